// The operator fastplm_C::mask_tokens: from tensors to a MaskTokensCall. Arguments are checked by
// fastplm/ops/mask_tokens.py.
#pragma once

#include "index/batch_of_tokens.h"
#include "index/mask_tokens.h"

namespace fastplm {

#define FASTPLM_MASK_TOKENS_TENSORS(ARGUMENT)                                 \
  ARGUMENT(Tensor, input_ids) ARGUMENT(Dense<bool>, maskable)                 \
  ARGUMENT(Dense<int64_t>, special_ids) ARGUMENT(Dense<int64_t>, word_ids)    \
  ARGUMENT(Dense<int32_t>, cu_seqlens) ARGUMENT(Dense<int64_t>, sample_index) \
  ARGUMENT(Tensor, seed)
FASTPLM_ARGUMENTS(MaskTokensTensors, FASTPLM_MASK_TOKENS_TENSORS)

// Makes the outputs and calls run(call) with a MaskTokensCall of the integer type of the tokens.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mask_tokens(
    const MaskTokensTensors& tensors, const MaskTokensSettings& settings, const Run& run) {
  Shapes shapes = shapes_of_batch(tensors);
  shapes.any(tensors.input_ids, "input_ids [...]");
  shapes.any(tensors.maskable, "maskable [...]");
  shapes.any(tensors.special_ids, "special_ids [S]");
  shapes.any(tensors.word_ids, "word_ids [...]");
  require(settings.slots >= 0 && settings.capacity >= 0, "capacity and slots must be 0 or more");
  require(settings.max_ngram <= 0 || tensors.word_ids, "max_ngram needs word_ids");
  const Tensor ids = dense(tensors.input_ids);
  Tensor output_ids = empty_tensor_like(ids);
  Tensor positions = empty_tensor(ids, {settings.slots}, ScalarType::Long);
  Tensor labels = empty_tensor(ids, {settings.slots}, ScalarType::Long);
  Tensor count = empty_tensor(ids, {}, ScalarType::Long);
  Tensor dropped = empty_tensor(ids, {}, ScalarType::Long);
  with_id_type(ids, [&](auto id) {
    using Id = decltype(id);
    MaskTokensCall<Id> call{settings, rows_of(ids, tensors.cu_seqlens, tensors.sample_index)};
    call.input_ids = ids.const_data_ptr<Id>();
    call.maskable = tensors.maskable.data();
    call.special_ids = tensors.special_ids.data();
    call.special_count = tensors.special_ids.size();
    call.word_ids = tensors.word_ids.data();
    call.seed = data_of<int64_t>(tensors.seed);
    call.output_ids = output_ids.mutable_data_ptr<Id>();
    call.positions = positions.mutable_data_ptr<int64_t>();
    call.labels = labels.mutable_data_ptr<int64_t>();
    call.count = count.mutable_data_ptr<int64_t>();
    call.dropped = dropped.mutable_data_ptr<int64_t>();
    run(call);
  });
  return {output_ids, positions, labels, count, dropped};
}

}  // namespace fastplm
