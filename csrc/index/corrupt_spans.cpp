// fastplm_C::corrupt_spans on the CPU: PyTorch's threads compute rows in parallel, one thread a
// row.
#include <algorithm>
#include <vector>

#include "index/corrupt_spans_op.h"

#define FASTPLM_FILE "index/corrupt_spans.cpp"
#include "common/each_level.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

template <typename Id>
void corrupt_rows(const CorruptSpansCall<Id>& call, int64_t first_row, int64_t last_row) {
  OneThread group;
  SelectScratch scratch{};
  Vector<uint32_t> keys(call.keys_size());
  Vector<uint32_t> noise_bounds(call.bounds_size()), kept_bounds(call.bounds_size());
  for (int64_t row = first_row; row < last_row; ++row) {
    corrupt_row(group, scratch, call, row, keys.data(), {noise_bounds.data(), kept_bounds.data()});
  }
}

auto corrupt_spans(const CorruptSpansTensors& tensors, const CorruptSpansSettings& settings) {
  return fastplm::corrupt_spans(tensors, settings, [](const auto& call) {
    OneThread group;
    *call.dropped = count_dropped(group, call);
    constexpr int64_t kTokensPerThread = 4096;
    const int64_t grain = grain_of(kTokensPerThread, call.max_length);
    parallel_for(call.rows.count, grain, [&](int64_t first, int64_t last) {
      corrupt_rows(call, first, last);
    });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(corrupt_spans)
