// The operator fastplm_C::mask_tokens on PyTorch's stable ABI: its schema, and from tensors to the
// pointers of a MaskTokensCall. Arguments are checked by fastplm/ops/mask_tokens.py.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "mask_tokens.h"

namespace fastplm {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kMaskTokensSchema =
    "mask_tokens(Tensor input_ids, Tensor? maskable, Tensor? sample_index, Tensor seed, int step, "
    "int capacity, int quota_scale, int mask_below, int random_below, int mask_token_id, "
    "int vocab_size) -> (Tensor, Tensor, Tensor, Tensor)";

// `Run` is a struct with `static void run(const Tensor& input_ids, const MaskTokensCall<Id>&)`.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor> mask_tokens(
    const Tensor& input_ids, const std::optional<Tensor>& maskable,
    const std::optional<Tensor>& sample_index, const Tensor& seed, int64_t step, int64_t capacity,
    int64_t quota_scale, int64_t mask_below, int64_t random_below, int64_t mask_token_id,
    int64_t vocab_size) {
  using torch::stable::contiguous;
  using torch::stable::new_empty;
  const int64_t rows = input_ids.size(0);
  const int64_t length = input_ids.size(1);
  const int64_t slots = rows * capacity;

  const Tensor dense_ids = contiguous(input_ids);
  const Tensor dense_maskable = maskable ? contiguous(*maskable) : Tensor();
  const Tensor dense_samples = sample_index ? contiguous(*sample_index) : Tensor();
  Tensor output_ids = new_empty(input_ids, {rows, length});
  Tensor positions = new_empty(input_ids, {slots}, ScalarType::Long);
  Tensor labels = new_empty(input_ids, {slots}, ScalarType::Long);
  Tensor count = new_empty(input_ids, {}, ScalarType::Long);

  const auto run = [&](auto id) {
    using Id = decltype(id);
    Run::run(input_ids,
             MaskTokensCall<Id>{
                 dense_ids.const_data_ptr<Id>(),
                 maskable ? dense_maskable.const_data_ptr<bool>() : nullptr,
                 sample_index ? dense_samples.const_data_ptr<int64_t>() : nullptr,
                 seed.const_data_ptr<int64_t>(),
                 output_ids.mutable_data_ptr<Id>(),
                 positions.mutable_data_ptr<int64_t>(),
                 labels.mutable_data_ptr<int64_t>(),
                 count.mutable_data_ptr<int64_t>(),
                 rows,
                 length,
                 capacity,
                 quota_scale,
                 mask_below,
                 random_below,
                 mask_token_id,
                 vocab_size,
                 static_cast<uint32_t>(step),
             });
  };
  if (input_ids.scalar_type() == ScalarType::Int) {
    run(int32_t{});
  } else {
    run(int64_t{});
  }
  return {output_ids, positions, labels, count};
}

}  // namespace fastplm
