// The arguments of an operator, written once as a list:
//
//   #define FASTPLM_SCALE(ARGUMENT) ARGUMENT(Tensor, input) ARGUMENT(double, factor)
//   FASTPLM_ARGUMENTS(ScaleArguments, FASTPLM_SCALE)
//
// makes a struct with the fields `Tensor input` and `double factor`. operators.h reads it from PyTorch's
// stack and writes the operator's schema. No torch header, so that it compiles wherever nvcc is.
#pragma once

#define FASTPLM_FIELD(type, name) type name;
#define FASTPLM_READ(type, name) stack.template next<type>(),
#define FASTPLM_DECLARE(type, name) schema.template add<type>(#name);

#define FASTPLM_ARGUMENTS(Struct, LIST)   \
  struct Struct {                         \
    LIST(FASTPLM_FIELD)                   \
                                          \
    template <typename Stack>             \
    static Struct read(Stack& stack) {    \
      return {LIST(FASTPLM_READ)};        \
    }                                     \
    template <typename Schema>            \
    static void declare(Schema& schema) { \
      LIST(FASTPLM_DECLARE)               \
    }                                     \
  };
