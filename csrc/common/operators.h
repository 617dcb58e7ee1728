// Operators of fastplm_C on PyTorch's stable ABI: how PyTorch calls a function of csrc/.
#pragma once

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "common/arguments.h"
#include "common/shapes.h"
#include "common/tensors.h"

namespace fastplm {

// An argument type's name in a schema, and the type that PyTorch passes it as.
template <typename T>
struct Argument;
template <>
struct Argument<Tensor> {
  static constexpr const char* kName = "Tensor";
  using Passed = Tensor;
};
template <>
struct Argument<std::optional<Tensor>> {
  static constexpr const char* kName = "Tensor?";
  using Passed = std::optional<Tensor>;
};
template <typename T>
struct Argument<Dense<T>> : Argument<std::optional<Tensor>> {};
template <>
struct Argument<int64_t> {
  static constexpr const char* kName = "int";
  using Passed = int64_t;
};
template <>
struct Argument<uint32_t> : Argument<int64_t> {};
template <>
struct Argument<double> {
  static constexpr const char* kName = "float";
  using Passed = double;
};
template <>
struct Argument<bool> {
  static constexpr const char* kName = "bool";
  using Passed = bool;
};

// The arguments of a call, which are taken one after the other.
class Stack {
 public:
  explicit Stack(StableIValue* values) : values_(values) {}
  template <typename T>
  T next() {
    return static_cast<T>(torch::stable::detail::to<typename Argument<T>::Passed>(*values_++));
  }

 private:
  StableIValue* values_;
};

struct Schema {
  template <typename T>
  void add(const char* name) {
    text += text.empty() ? "" : ", ";
    text += std::string(Argument<T>::kName) + " " + name;
  }

  std::string text;
};

// An operator's name as a template's argument: the text itself, and zeros after it.
struct Name {
  template <size_t kSize>
  constexpr Name(const char (&from)[kSize]) {
    static_assert(kSize <= sizeof(text));
    std::copy(from, from + kSize, text);
  }
  char text[40] = {};
};

// Out of memory in PyTorch's words and its kind of error, for which those look who then try a smaller batch. No bytes:
// how many is not known.
inline std::runtime_error out_of_memory(const char* name, int64_t bytes, bool on_cpu) {
  std::string text = std::string("fastplm_C::") + name + ": ";
  text += on_cpu ? "DefaultCPUAllocator: can't allocate memory" : "CUDA out of memory";
  if (bytes > 0) text += ": you tried to allocate " + std::to_string(bytes) + " bytes";
  return std::runtime_error(text + ". Call it with fewer or shorter rows at a time, or free memory first.");
}

// Calls function() for the operator of this name, which its errors then have.
template <typename Function>
void with_its_name(const char* name, const Function& function) {
  try {
    function();
  } catch (const OutOfMemory& error) {
    throw out_of_memory(name, error.bytes, error.on_cpu);
  } catch (const std::bad_alloc&) {
    throw out_of_memory(name, 0, true);
  } catch (const WrongArgument& error) {
    throw std::runtime_error(std::string("fastplm_C::") + name + ": " + error.what());
  }
}

// An operator: how PyTorch calls `function`, and its schema. If the function's parameters are
// structs of FASTPLM_ARGUMENTS, the schema follows from them; otherwise it is written out.
template <auto function, Name name>
struct Operator {
  static void call(StableIValue* values, uint64_t arguments, uint64_t results) {
    with_its_name(name.text, [&] { TORCH_BOX(function)(values, arguments, results); });
  }
  static std::string schema(const char* rest) { return std::string(name.text) + rest; }
};

template <typename... Results, typename... Structs,
          std::tuple<Results...> (*function)(const Structs&...), Name name>
  requires(sizeof...(Structs) > 0 && (requires(Schema& schema) { Structs::declare(schema); } && ...))
struct Operator<function, name> {
  static void call(StableIValue* values, uint64_t, uint64_t) {
    with_its_name(name.text, [&] {
      Stack stack(values);
      // Braces evaluate the arguments from left to right.
      const std::tuple<Structs...> arguments{Structs::read(stack)...};
      torch::stable::detail::box_from_tuple(values, std::apply(function, arguments));
    });
  }
  static std::string schema() {
    Schema arguments;
    (Structs::declare(arguments), ...);
    std::string results;
    ((results += (results.empty() ? "" : ", ") + std::string(Argument<Results>::kName)), ...);
    return std::string(name.text) + "(" + arguments.text + ") -> (" + results + ")";
  }
};

}  // namespace fastplm
