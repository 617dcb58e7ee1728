// Tensors of PyTorch's stable ABI, as the dense pointers that the kernels take, and loops over threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/half.h"
#include "common/scratch.h"

namespace fastplm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// What an operator does not take. operators.h makes an error of it that names the operator.
struct WrongArgument : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The dtype whose elements are of the type T.
template <typename T>
constexpr ScalarType type_of() {
  if (std::is_same_v<T, float>) return ScalarType::Float;
  if (std::is_same_v<T, Fp16>) return ScalarType::Half;
  if (std::is_same_v<T, Bf16>) return ScalarType::BFloat16;
  if (std::is_same_v<T, double>) return ScalarType::Double;
  if (std::is_same_v<T, int32_t>) return ScalarType::Int;
  if (std::is_same_v<T, int64_t>) return ScalarType::Long;
  if (std::is_same_v<T, uint8_t>) return ScalarType::Byte;
  return ScalarType::Bool;
}

[[noreturn]] inline void refuse_type(ScalarType type, const char* expected) {
  throw WrongArgument(std::string("a tensor of ") + torch::headeronly::toString(type) + ", where it takes " + expected);
}

// A dtype as PyTorch's libraries number it. To ask for it takes a fraction of the time of Tensor::scalar_type().
inline int32_t number_of(ScalarType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

inline int32_t number_of_type(const Tensor& tensor) {
  int32_t number = -1;
  STD_TORCH_CHECK(aoti_torch_get_dtype(tensor.get(), &number) == AOTI_TORCH_SUCCESS, "a tensor without a dtype");
  return number;
}

template <typename T>
void check_type(const Tensor& tensor) {
  static const int32_t expected = number_of(type_of<T>());
  if (number_of_type(tensor) == expected) return;
  refuse_type(tensor.scalar_type(), torch::headeronly::toString(type_of<T>()));
}

// The others are of the dtype of the first.
template <typename... Tensors>
void check_same_type(const Tensor& first, const Tensors&... others) {
  for (const Tensor* other : {&others...}) {
    if (number_of_type(*other) == number_of_type(first)) continue;
    refuse_type(other->scalar_type(), torch::headeronly::toString(first.scalar_type()));
  }
}

// The elements of a tensor, which has to be of the type T.
template <typename T>
const T* data_of(const Tensor& tensor) {
  check_type<T>(tensor);
  return static_cast<const T*>(tensor.const_data_ptr());
}

// The same, to be written.
template <typename T>
T* data_to(const Tensor& tensor) {
  check_type<T>(tensor);
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// A new dense tensor on the device of `like`. The stable ABI's new_empty is not used: it looks up
// its operator by name, which takes several times as long as making a tensor.
inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, int32_t dtype) {
  std::array<int64_t, 8> strides;
  STD_TORCH_CHECK(sizes.size() <= strides.size(), "a tensor of more than 8 dimensions");
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(1, sizes[i])) strides[i] = stride;
  int32_t device = 0;
  AtenTensorHandle out = nullptr;
  const bool made =
      aoti_torch_get_device_type(like.get(), &device) == AOTI_TORCH_SUCCESS &&
      aoti_torch_empty_strided(
          static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device,
          like.get_device_index(), &out) == AOTI_TORCH_SUCCESS;
  if (!made) {
    throw OutOfMemory(stride * static_cast<int64_t>(aoti_torch_dtype_element_size(dtype)),
                      device == aoti_torch_device_type_cpu());
  }
  return Tensor(out);
}

inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes, ScalarType type) {
  return empty_tensor(like, sizes, number_of(type));
}

inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return empty_tensor(like, sizes, number_of_type(like));
}

// The tensor itself, or a copy in row-major order.
inline Tensor dense(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::runtime_error&) {  // of which only memory can be the cause
    throw OutOfMemory(tensor.numel() * static_cast<int64_t>(tensor.element_size()), tensor.is_cpu());
  }
}

// An optional tensor in row-major order; the object owns a copy if the tensor was not. With type void it takes any dtype.
template <typename T>
struct Dense {
  Dense() = default;
  explicit Dense(const std::optional<Tensor>& given) {
    if (!given) return;
    tensor = dense(*given);
    if constexpr (!std::is_void_v<T>) elements = data_of<T>(*tensor);
  }
  explicit operator bool() const { return tensor.has_value(); }
  const T* data() const { return elements; }
  int64_t size() const { return tensor ? tensor->size(0) : 0; }

  std::optional<Tensor> tensor;
  const T* elements = nullptr;
};

inline Tensor empty_tensor_like(const Tensor& tensor) {
  return empty_tensor(tensor, tensor.sizes());
}

// Calls function(T{}) with an element type: fp32, fp16 or bf16.
template <typename Function>
void with_floating_type(ScalarType type, const Function& function) {
  switch (type) {
    case ScalarType::Float:
      return function(float{});
    case ScalarType::Half:
      return function(Fp16{});
    case ScalarType::BFloat16:
      return function(Bf16{});
    default:
      refuse_type(type, "Float, Half and BFloat16");
  }
}

// The same with that of a tensor.
template <typename Function>
void with_floating_type(const Tensor& tensor, const Function& function) {
  with_floating_type(tensor.scalar_type(), function);
}

// A row as floats, filled up with zeros.
inline Vector<float> widened(const Tensor& row, int64_t filled) {
  Vector<float> out(filled);
  with_floating_type(row, [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(row);
    std::transform(from, from + row.numel(), out.begin(),
                   [](T value) { return static_cast<float>(value); });
  });
  return out;
}

// Calls function(Id{}) with the integer type of the tokens.
template <typename Function>
void with_id_type(const Tensor& input_ids, const Function& function) {
  switch (input_ids.scalar_type()) {
    case ScalarType::Int:
      return function(int32_t{});
    case ScalarType::Long:
      return function(int64_t{});
    default:
      refuse_type(input_ids.scalar_type(), "Int and Long");
  }
}

// Calls function(first, last) for ranges of 0 … count on PyTorch's threads, `grain` or more for each. PyTorch's own
// has one error for all; here the first one that a thread throws is thrown again.
template <typename Function>
void parallel_for(int64_t count, int64_t grain, const Function& function) {
  std::exception_ptr error;
  std::atomic<bool> failed(false);
  torch::stable::parallel_for(0, count, grain, [&](int64_t first, int64_t last) {
    try {
      function(first, last);
    } catch (...) {
      if (!failed.exchange(true)) error = std::current_exception();
    }
  });
  if (error) std::rethrow_exception(error);
}

// How many pieces of so many elements a thread should have at least, if it should have `worth` elements.
inline int64_t grain_of(int64_t worth, int64_t elements) {
  return std::max<int64_t>(1, worth / std::max<int64_t>(1, elements));
}

// Calls function(first, last) for ranges of 0 … total, which begin at multiples of `unit`, on PyTorch's
// threads: `grain` units or more for each.
template <typename Function>
void for_ranges(int64_t total, int64_t unit, int64_t grain, const Function& function) {
  parallel_for(ceil_div(total, unit), grain, [&](int64_t begin, int64_t end) {
    function(begin * unit, std::min(end * unit, total));
  });
}

// Calls function(part, first, last) for parts of `size` elements of 0 … total. Parts, and so sums over a
// part, do not depend on the number of threads.
template <typename Function>
void for_parts(int64_t total, int64_t size, int64_t grain, const Function& function) {
  for_ranges(ceil_div(total, size), 1, grain, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      function(part, part * size, std::min((part + 1) * size, total));
    }
  });
}

}  // namespace fastplm
