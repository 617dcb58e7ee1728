// The operator fastplm_C::corrupt_spans: from tensors to a CorruptSpansCall. Arguments are checked by
// fastplm/ops/corrupt_spans.py.
#pragma once

#include "index/batch_of_tokens.h"
#include "index/corrupt_spans.h"

namespace fastplm {

#define FASTPLM_CORRUPT_SPANS_TENSORS(ARGUMENT)                          \
  ARGUMENT(Tensor, input_ids)                                            \
  ARGUMENT(Dense<int64_t>, lengths) ARGUMENT(Dense<int32_t>, cu_seqlens) \
  ARGUMENT(Tensor, sentinel_ids) ARGUMENT(Dense<int64_t>, sample_index)  \
  ARGUMENT(Tensor, seed)
FASTPLM_ARGUMENTS(CorruptSpansTensors, FASTPLM_CORRUPT_SPANS_TENSORS)

// Makes the outputs and calls run(call) with a CorruptSpansCall of the integer type of the tokens.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> corrupt_spans(
    const CorruptSpansTensors& tensors, const CorruptSpansSettings& settings, const Run& run) {
  Shapes shapes = shapes_of_batch(tensors);
  shapes.any(tensors.lengths, "lengths [B]");
  shapes.any(tensors.sentinel_ids, "sentinel_ids [K]");
  require(is_length(settings.max_length), "max_length must be 0 to 2^31 - 1");
  require(is_share(settings.noise_scale) && is_share(settings.span_scale), "noise_scale and span_scale must be 0 to 2^32");
  const Tensor ids = dense(tensors.input_ids), sentinels = dense(tensors.sentinel_ids);
  const Rows rows = rows_of(ids, tensors.cu_seqlens, tensors.sample_index, tensors.lengths);
  const SpanPlan plan{settings, sentinels.size(0)};
  Tensor output_ids = empty_tensor(ids, {rows.count, plan.input_width()});
  Tensor labels = empty_tensor(ids, {rows.count, plan.label_width()}, ScalarType::Long);
  Tensor input_lengths = empty_tensor(ids, {rows.count}, ScalarType::Long);
  Tensor label_lengths = empty_tensor(ids, {rows.count}, ScalarType::Long);
  Tensor dropped = empty_tensor(ids, {}, ScalarType::Long);
  with_id_type(ids, [&](auto id) {
    using Id = decltype(id);
    CorruptSpansCall<Id> call{plan, rows};
    call.input_ids = ids.const_data_ptr<Id>();
    call.sentinel_ids = data_of<int64_t>(sentinels);
    call.seed = data_of<int64_t>(tensors.seed);
    call.output_ids = output_ids.mutable_data_ptr<Id>();
    call.labels = labels.mutable_data_ptr<int64_t>();
    call.input_lengths = input_lengths.mutable_data_ptr<int64_t>();
    call.label_lengths = label_lengths.mutable_data_ptr<int64_t>();
    call.dropped = dropped.mutable_data_ptr<int64_t>();
    run(call);
  });
  return {output_ids, labels, input_lengths, label_lengths, dropped};
}

}  // namespace fastplm
