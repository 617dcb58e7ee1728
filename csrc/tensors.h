// Tensors of PyTorch's stable ABI as the dense pointers that the row algorithms take.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

#include "half.h"
#include "rows.h"

namespace fastplm {

using torch::headeronly::ScalarType;
using torch::stable::new_empty;
using torch::stable::Tensor;

// A tensor, or none, in row-major order; it owns the copy where one had to be made.
template <typename T>
struct Dense {
  explicit Dense(const std::optional<Tensor>& given)
      : tensor(given ? torch::stable::contiguous(*given) : Tensor()), defined(given.has_value()) {}
  const T* data() const { return defined ? static_cast<const T*>(tensor.const_data_ptr()) : nullptr; }

  const Tensor tensor;
  const bool defined;
};

inline Tensor new_empty_like(const Tensor& tensor) {
  return new_empty(tensor, tensor.sizes());
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
