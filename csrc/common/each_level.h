// Compiles a file once for each level: this header includes FASTPLM_FILE again for each, so there
// is one namespace fastplm::FASTPLM_LEVEL for each level.
//
//   #include "common/operators.h"   // headers that the levels share come first
//   #define FASTPLM_FILE "layers/op.cpp"
//   #include "common/each_level.h"
//   #include "common/lanes.h"       // code of a level: no include guard, FASTPLM_WIDTH floats a vector
//   ...
//   FASTPLM_OPERATOR(op)            // registers function `op` of this process's level
//
// A function is compiled with the instructions that are switched on where it is defined. So no
// shared header may be included after each_level.h: the linker would keep one level's copy for all.
#ifndef FASTPLM_EACH_LEVEL
#define FASTPLM_EACH_LEVEL

#include <type_traits>

#include "common/level.h"

#define FASTPLM_AT(level, name) (::fastplm::Operator<&::fastplm::level::name, #name>::call)

#if FASTPLM_HAS_LEVELS
#define FASTPLM_OPERATOR(...)
#define FASTPLM_F16C 1  // instructions that convert fp16

#define FASTPLM_LEVEL avx2
#define FASTPLM_WIDTH 8
#define FASTPLM_REGISTERS 16
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#include FASTPLM_FILE
#pragma GCC pop_options
#undef FASTPLM_LEVEL
#undef FASTPLM_WIDTH
#undef FASTPLM_REGISTERS

#define FASTPLM_LEVEL avx512
#define FASTPLM_WIDTH 16
#define FASTPLM_REGISTERS 32
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#include FASTPLM_FILE
#pragma GCC pop_options
#undef FASTPLM_LEVEL
#undef FASTPLM_WIDTH
#undef FASTPLM_REGISTERS

#undef FASTPLM_OPERATOR
#undef FASTPLM_F16C
#define FASTPLM_BOX(name)                                                           \
  (::fastplm::level() == ::fastplm::Level::kAvx512 ? FASTPLM_AT(avx512, name)       \
   : ::fastplm::level() == ::fastplm::Level::kAvx2 ? FASTPLM_AT(avx2, name)         \
                                                   : FASTPLM_AT(baseline, name))
#else
#define FASTPLM_BOX(name) FASTPLM_AT(baseline, name)
#endif

// FASTPLM_OPERATOR(name) is for a function whose parameters are structs of arguments.
// FASTPLM_OPERATOR(name, "(Tensor input) -> Tensor") is for any other, with the rest of its schema.
#define FASTPLM_OPERATOR(name, ...)                                                           \
  STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {                                         \
    using Defined = ::fastplm::Operator<&::fastplm::baseline::name, #name>;                   \
    library.def(Defined::schema(__VA_ARGS__).c_str());                                        \
  }                                                                                           \
  STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) { library.impl(#name, FASTPLM_BOX(name)); }

#define FASTPLM_LEVEL baseline
#define FASTPLM_WIDTH 4
#if defined(__aarch64__)
#define FASTPLM_REGISTERS 32
#else
#define FASTPLM_REGISTERS 16
#endif

#endif
