// Tensors of PyTorch's stable ABI as the dense pointers that the row algorithms take.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "half.h"
#include "rows.h"

namespace fastplm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A dense tensor on the device of `like`. The stable ABI's new_empty looks its operator up by name,
// which takes several times as long as to make a tensor.
inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                           ScalarType type) {
  std::array<int64_t, 8> strides;
  STD_TORCH_CHECK(sizes.size() <= strides.size(), "a tensor of more than 8 dimensions");
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(1, sizes[i])) strides[i] = stride;
  int32_t device = 0;
  AtenTensorHandle out = nullptr;
  const bool made =
      aoti_torch_get_device_type(like.get(), &device) == AOTI_TORCH_SUCCESS &&
      aoti_torch_empty_strided(
          static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(),
          torch::stable::detail::to<int32_t>(torch::stable::detail::from(type)), device,
          like.get_device_index(), &out) == AOTI_TORCH_SUCCESS;
  STD_TORCH_CHECK(made, "no memory for a tensor of csrc/");
  return Tensor(out);
}

inline Tensor empty_tensor(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  return empty_tensor(like, sizes, like.scalar_type());
}

// A tensor, or none, in row-major order; it owns the copy where one had to be made.
template <typename T>
struct Dense {
  explicit Dense(const std::optional<Tensor>& given)
      : tensor(given ? torch::stable::contiguous(*given) : Tensor()), defined(given.has_value()) {}
  const T* data() const { return defined ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr; }

  const Tensor tensor;
  const bool defined;
};

inline Tensor empty_tensor_like(const Tensor& tensor) {
  return empty_tensor(tensor, tensor.sizes());
}

// Padded rows, or packed ones if there are cu_seqlens.
class DenseRows {
 public:
  DenseRows(const Tensor& input_ids, const std::optional<Tensor>& cu_seqlens,
            const std::optional<Tensor>& lengths, const std::optional<Tensor>& sample_index)
      : cu_seqlens_(cu_seqlens),
        lengths_(lengths),
        sample_index_(sample_index),
        count_(cu_seqlens ? cu_seqlens->size(0) - 1 : input_ids.size(0)),
        stride_(cu_seqlens ? 0 : input_ids.size(1)),
        tokens_(input_ids.numel()) {}
  Rows rows() const {
    return {cu_seqlens_.data(), lengths_.data(), sample_index_.data(), count_, stride_, tokens_};
  }

 private:
  const Dense<int32_t> cu_seqlens_;
  const Dense<int64_t> lengths_;
  const Dense<int64_t> sample_index_;
  const int64_t count_;
  const int64_t stride_;
  const int64_t tokens_;
};

// Calls function(T{}) with the element type of a tensor of fp32, fp16 or bf16.
template <typename Function>
void with_floating_type(const Tensor& tensor, const Function& function) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return function(float{});
    case ScalarType::Half:
      return function(Fp16{});
    default:
      return function(Bf16{});
  }
}

// A row as floats, filled up with zeros.
inline std::vector<float> widened(const Tensor& row, int64_t filled) {
  std::vector<float> out(filled);
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

}  // namespace fastplm
