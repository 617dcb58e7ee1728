// The operator fastplm_C::bart_noise on PyTorch's stable ABI: its schema, and from tensors to the
// pointers of a BartNoiseCall. Arguments are checked by fastplm/ops/bart_noise.py.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "bart_noise.h"
#include "tensors.h"

namespace fastplm {

constexpr const char* kBartNoiseSchema =
    "bart_noise(Tensor input_ids, Tensor? sentence_end_ids, Tensor? special_ids, Tensor? lengths, "
    "Tensor? cu_seqlens, Tensor? sample_index, Tensor seed, int step, int longest, int capacity, "
    "int vocab_size, int mask_token_id, int pad_token_id, int bos_token_id, int eos_token_id, "
    "int infill_scale, int[] span_below, int permute_scale, int rotate_below, int delete_below, "
    "int noise_below, int random_below) -> (Tensor, Tensor, Tensor)";

// `Run` is a struct with `static void run(const Tensor& input_ids, const BartNoiseCall<Id>&)`.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor> bart_noise(
    const Tensor& input_ids, const std::optional<Tensor>& sentence_end_ids,
    const std::optional<Tensor>& special_ids, const std::optional<Tensor>& lengths,
    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& sample_index,
    const Tensor& seed, int64_t step, int64_t longest, int64_t capacity, int64_t vocab_size,
    int64_t mask_token_id, int64_t pad_token_id, int64_t bos_token_id, int64_t eos_token_id,
    int64_t infill_scale, std::vector<int64_t> span_below, int64_t permute_scale,
    int64_t rotate_below, int64_t delete_below, int64_t noise_below, int64_t random_below) {
  const Dense<void> ids(input_ids);
  const Dense<int64_t> ends(sentence_end_ids);
  const Dense<int64_t> special(special_ids);
  const DenseRows rows(input_ids, cu_seqlens, lengths, sample_index);
  const int64_t count = rows.rows().count;
  Tensor output_ids = empty_tensor(input_ids, {count, capacity});
  Tensor output_lengths = empty_tensor(input_ids, {count}, ScalarType::Long);
  Tensor dropped = empty_tensor(input_ids, {}, ScalarType::Long);

  with_id_type(input_ids, [&](auto id) {
    using Id = decltype(id);
    BartNoiseCall<Id> call{};
    call.rows = rows.rows();
    call.input_ids = ids.tensor.template const_data_ptr<Id>();
    call.sentence_end_ids = ends.data();
    call.special_ids = special.data();
    call.seed = seed.const_data_ptr<int64_t>();
    call.output_ids = output_ids.mutable_data_ptr<Id>();
    call.lengths = output_lengths.mutable_data_ptr<int64_t>();
    call.dropped = dropped.mutable_data_ptr<int64_t>();
    call.sentence_end_count = sentence_end_ids ? sentence_end_ids->size(0) : 0;
    call.special_count = special_ids ? special_ids->size(0) : 0;
    call.longest = longest;
    call.capacity = capacity;
    call.mask_token_id = mask_token_id;
    call.pad_token_id = pad_token_id;
    call.bos_token_id = bos_token_id;
    call.eos_token_id = eos_token_id;
    call.vocab_size = vocab_size;
    call.infill_scale = infill_scale;
    call.permute_scale = permute_scale;
    call.rotate_below = rotate_below;
    call.delete_below = delete_below;
    call.noise_below = noise_below;
    call.random_below = random_below;
    call.step = static_cast<uint32_t>(step);
    call.span_thresholds = std::min<int64_t>(span_below.size(), kMostSpanThresholds);
    std::copy_n(span_below.begin(), call.span_thresholds, call.span_below);
    Run::run(input_ids, call);
  });
  return {output_ids, output_lengths, dropped};
}

}  // namespace fastplm
