// Operators of fastplm_C on PyTorch's stable ABI: how PyTorch calls a function of csrc/.
#pragma once

#include <string>
#include <tuple>
#include <type_traits>

#include "arguments.h"
#include "tensors.h"

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

// An operator: how PyTorch calls `function`, and its schema. If the function's parameters are
// structs of FASTPLM_ARGUMENTS, the schema follows from them; otherwise it is written out.
template <auto function>
struct Operator {
  static constexpr auto call = TORCH_BOX(function);
  static std::string schema(const char* name, const char* rest) { return std::string(name) + rest; }
};

template <typename... Results, typename... Structs,
          std::tuple<Results...> (*function)(const Structs&...)>
  requires(sizeof...(Structs) > 0 && (requires(Schema& schema) { Structs::declare(schema); } && ...))
struct Operator<function> {
  static void call(StableIValue* values, uint64_t, uint64_t) {
    Stack stack(values);
    // Braces evaluate the arguments from left to right.
    const std::tuple<Structs...> arguments{Structs::read(stack)...};
    torch::stable::detail::box_from_tuple(values, std::apply(function, arguments));
  }
  static std::string schema(const char* name) {
    Schema arguments;
    (Structs::declare(arguments), ...);
    std::string results;
    ((results += (results.empty() ? "" : ", ") + std::string(Argument<Results>::kName)), ...);
    return std::string(name) + "(" + arguments.text + ") -> (" + results + ")";
  }
};

}  // namespace fastplm
