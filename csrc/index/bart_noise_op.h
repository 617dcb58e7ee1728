// The operator fastplm_C::bart_noise: from tensors to a BartNoiseCall. Arguments are checked by
// fastplm/ops/bart_noise.py.
#pragma once

#include "index/batch_of_tokens.h"
#include "index/bart_noise.h"

namespace fastplm {

template <>
struct Argument<SpanThresholds> {
  static constexpr const char* kName = "int[]";
  using Passed = std::vector<int64_t>;
};

#define FASTPLM_BART_NOISE_TENSORS(ARGUMENT)                                       \
  ARGUMENT(Tensor, input_ids)                                                      \
  ARGUMENT(Dense<int64_t>, sentence_end_ids) ARGUMENT(Dense<int64_t>, special_ids) \
  ARGUMENT(Dense<int64_t>, lengths) ARGUMENT(Dense<int32_t>, cu_seqlens)           \
  ARGUMENT(Dense<int64_t>, sample_index) ARGUMENT(Tensor, seed)
FASTPLM_ARGUMENTS(BartNoiseTensors, FASTPLM_BART_NOISE_TENSORS)

// Makes the outputs and calls run(call) with a BartNoiseCall of the integer type of the tokens.
template <typename Run>
std::tuple<Tensor, Tensor, Tensor> bart_noise(const BartNoiseTensors& tensors,
                                              const BartNoiseSettings& settings, const Run& run) {
  Shapes shapes = shapes_of_batch(tensors);
  shapes.any(tensors.lengths, "lengths [B]");
  shapes.any(tensors.sentence_end_ids, "sentence_end_ids [K]");
  shapes.any(tensors.special_ids, "special_ids [S]");
  require(is_length(settings.longest), "longest must be 0 to 2^31 - 1");
  require(settings.vocab_size >= 0, "vocab_size must be 0 or more");
  require(is_share(settings.infill_scale) && is_share(settings.permute_scale), "infill_scale and permute_scale must be 0 to 2^32");
  require(settings.capacity >= (settings.bos_token_id >= 0) + (settings.eos_token_id >= 0),
          "capacity must hold BOS and EOS");
  const Tensor ids = dense(tensors.input_ids);
  const Rows rows = rows_of(ids, tensors.cu_seqlens, tensors.sample_index, tensors.lengths);
  Tensor output_ids = empty_tensor(ids, {rows.count, settings.capacity});
  Tensor lengths = empty_tensor(ids, {rows.count}, ScalarType::Long);
  Tensor dropped = empty_tensor(ids, {}, ScalarType::Long);
  with_id_type(ids, [&](auto id) {
    using Id = decltype(id);
    BartNoiseCall<Id> call{settings, rows};
    call.input_ids = ids.const_data_ptr<Id>();
    call.sentence_end_ids = tensors.sentence_end_ids.data();
    call.sentence_end_count = tensors.sentence_end_ids.size();
    call.special_ids = tensors.special_ids.data();
    call.special_count = tensors.special_ids.size();
    call.seed = data_of<int64_t>(tensors.seed);
    call.output_ids = output_ids.mutable_data_ptr<Id>();
    call.lengths = lengths.mutable_data_ptr<int64_t>();
    call.dropped = dropped.mutable_data_ptr<int64_t>();
    run(call);
  });
  return {output_ids, lengths, dropped};
}

}  // namespace fastplm
