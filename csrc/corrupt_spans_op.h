// The operator fastplm_C::corrupt_spans on PyTorch's stable ABI: its schema, and from tensors to
// the pointers of a CorruptSpansCall. Arguments are checked by fastplm/ops/corrupt_spans.py.
#pragma once

#include <optional>
#include <tuple>

#include "corrupt_spans.h"
#include "tensors.h"

namespace fastplm {

constexpr const char* kCorruptSpansSchema =
    "corrupt_spans(Tensor input_ids, Tensor? lengths, Tensor? cu_seqlens, Tensor sentinel_ids, "
    "Tensor? sample_index, Tensor seed, int step, int max_length, int noise_scale, int span_scale, "
    "int eos_token_id, int pad_token_id) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";

// `Run` is a struct with `static void run(const Tensor& input_ids, const CorruptSpansCall<Id>&)`.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> corrupt_spans(
    const Tensor& input_ids, const std::optional<Tensor>& lengths,
    const std::optional<Tensor>& cu_seqlens, const Tensor& sentinel_ids,
    const std::optional<Tensor>& sample_index, const Tensor& seed, int64_t step,
    int64_t max_length, int64_t noise_scale, int64_t span_scale, int64_t eos_token_id,
    int64_t pad_token_id) {
  const Dense<void> ids(input_ids);
  const Dense<int64_t> sentinels(sentinel_ids);
  const DenseRows rows(input_ids, cu_seqlens, lengths, sample_index);
  const int64_t count = rows.rows().count;
  const SpanPlan plan{max_length, sentinel_ids.size(0), noise_scale, span_scale, eos_token_id >= 0};
  Tensor output_ids = empty_tensor(input_ids, {count, plan.input_width()});
  Tensor labels = empty_tensor(input_ids, {count, plan.label_width()}, ScalarType::Long);
  Tensor input_lengths = empty_tensor(input_ids, {count}, ScalarType::Long);
  Tensor label_lengths = empty_tensor(input_ids, {count}, ScalarType::Long);
  Tensor dropped = empty_tensor(input_ids, {}, ScalarType::Long);

  with_id_type(input_ids, [&](auto id) {
    using Id = decltype(id);
    Run::run(input_ids, CorruptSpansCall<Id>{
                            rows.rows(),
                            plan,
                            ids.tensor.template const_data_ptr<Id>(),
                            sentinels.data(),
                            seed.const_data_ptr<int64_t>(),
                            output_ids.mutable_data_ptr<Id>(),
                            labels.mutable_data_ptr<int64_t>(),
                            input_lengths.mutable_data_ptr<int64_t>(),
                            label_lengths.mutable_data_ptr<int64_t>(),
                            dropped.mutable_data_ptr<int64_t>(),
                            eos_token_id,
                            pad_token_id,
                            static_cast<uint32_t>(step),
                        });
  });
  return {output_ids, labels, input_lengths, label_lengths, dropped};
}

}  // namespace fastplm
