// The operator fastplm_C::mask_tokens on PyTorch's stable ABI: its schema, and from tensors to the
// pointers of a MaskTokensCall. Arguments are checked by fastplm/ops/mask_tokens.py.
#pragma once

#include <optional>
#include <tuple>

#include "mask_tokens.h"
#include "tensors.h"

namespace fastplm {

constexpr const char* kMaskTokensSchema =
    "mask_tokens(Tensor input_ids, Tensor? maskable, Tensor? special_ids, Tensor? word_ids, "
    "Tensor? cu_seqlens, Tensor? sample_index, Tensor seed, int step, int capacity, int slots, "
    "int quota_scale, int chosen_below, int mask_below, int random_below, int mask_token_id, "
    "int vocab_size, int max_ngram) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";

// `Run` is a struct with `static void run(const Tensor& input_ids, const MaskTokensCall<Id>&)`.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mask_tokens(
    const Tensor& input_ids, const std::optional<Tensor>& maskable,
    const std::optional<Tensor>& special_ids, const std::optional<Tensor>& word_ids,
    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& sample_index,
    const Tensor& seed, int64_t step, int64_t capacity, int64_t slots, int64_t quota_scale,
    int64_t chosen_below, int64_t mask_below, int64_t random_below, int64_t mask_token_id,
    int64_t vocab_size, int64_t max_ngram) {
  const Dense<void> ids(input_ids);
  const Dense<bool> dense_maskable(maskable);
  const Dense<int64_t> dense_special(special_ids);
  const Dense<int64_t> dense_words(word_ids);
  const DenseRows rows(input_ids, cu_seqlens, std::nullopt, sample_index);
  Tensor output_ids = empty_tensor_like(ids.tensor);
  Tensor positions = empty_tensor(input_ids, {slots}, ScalarType::Long);
  Tensor labels = empty_tensor(input_ids, {slots}, ScalarType::Long);
  Tensor count = empty_tensor(input_ids, {}, ScalarType::Long);
  Tensor dropped = empty_tensor(input_ids, {}, ScalarType::Long);

  with_id_type(input_ids, [&](auto id) {
    using Id = decltype(id);
    Run::run(input_ids, MaskTokensCall<Id>{
                            rows.rows(),
                            ids.tensor.const_data_ptr<Id>(),
                            dense_maskable.data(),
                            dense_special.data(),
                            dense_words.data(),
                            seed.const_data_ptr<int64_t>(),
                            output_ids.mutable_data_ptr<Id>(),
                            positions.mutable_data_ptr<int64_t>(),
                            labels.mutable_data_ptr<int64_t>(),
                            count.mutable_data_ptr<int64_t>(),
                            dropped.mutable_data_ptr<int64_t>(),
                            special_ids ? special_ids->size(0) : 0,
                            slots,
                            capacity,
                            quota_scale,
                            chosen_below,
                            mask_below,
                            random_below,
                            mask_token_id,
                            vocab_size,
                            max_ngram,
                            static_cast<uint32_t>(step),
                        });
  });
  return {output_ids, positions, labels, count, dropped};
}

}  // namespace fastplm
