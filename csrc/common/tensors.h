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

#include "common/half.h"
#include "common/rows.h"
#include "common/scratch.h"

namespace fastplm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A new dense tensor on the device of `like`. The stable ABI's new_empty is not used: it looks up
// its operator by name, which takes several times as long as making a tensor.
inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                           ScalarType type) {
  std::array<int64_t, 8> strides;
  STD_TORCH_CHECK(sizes.size() <= strides.size(), "a tensor of more than 8 dimensions");
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(1, sizes[i])) strides[i] = stride;
  int32_t device = 0, dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
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

inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return empty_tensor(like, sizes, like.scalar_type());
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

// An optional tensor in row-major order; the object owns a copy if the tensor was not.
template <typename T>
struct Dense {
  Dense() = default;
  explicit Dense(const std::optional<Tensor>& given) {
    if (given) tensor = dense(*given);
  }
  explicit operator bool() const { return tensor.has_value(); }
  const T* data() const { return tensor ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr; }
  int64_t size() const { return tensor ? tensor->size(0) : 0; }

  std::optional<Tensor> tensor;
};

inline Tensor empty_tensor_like(const Tensor& tensor) {
  return empty_tensor(tensor, tensor.sizes());
}

// Padded rows, or packed ones if there are cu_seqlens.
inline Rows rows_of(const Tensor& input_ids, const Dense<int32_t>& cu_seqlens,
                    const Dense<int64_t>& sample_index, const Dense<int64_t>& lengths = {}) {
  const bool is_packed = static_cast<bool>(cu_seqlens);
  return {cu_seqlens.data(),
          lengths.data(),
          sample_index.data(),
          is_packed ? cu_seqlens.size() - 1 : input_ids.size(0),
          is_packed ? 0 : input_ids.size(1),
          input_ids.numel()};
}

// Calls function(T{}) with an element type: fp32, fp16 or bf16.
template <typename Function>
void with_floating_type(ScalarType type, const Function& function) {
  switch (type) {
    case ScalarType::Float:
      return function(float{});
    case ScalarType::Half:
      return function(Fp16{});
    default:
      return function(Bf16{});
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
    const T* from = static_cast<const T*>(row.const_data_ptr());
    std::transform(from, from + row.numel(), out.begin(),
                   [](T value) { return static_cast<float>(value); });
  });
  return out;
}

// Calls function(Id{}) with the integer type of the tokens.
template <typename Function>
void with_id_type(const Tensor& input_ids, const Function& function) {
  if (input_ids.scalar_type() == ScalarType::Int) {
    function(int32_t{});
  } else {
    function(int64_t{});
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
