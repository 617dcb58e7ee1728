// fastplm_C::corrupt_spans on the CPU: rows in parallel on PyTorch's own threads, each row by one.
#include <algorithm>
#include <vector>

#include "corrupt_spans_op.h"

#define FASTPLM_FILE "corrupt_spans.cpp"
#include "each_level.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

template <typename Id>
void corrupt_rows(const CorruptSpansCall<Id>& call, int64_t first_row, int64_t last_row) {
  OneThread group;
  SelectScratch scratch{};
  std::vector<uint32_t> keys(call.plan.keys_size());
  std::vector<uint32_t> noise_bounds(call.plan.bounds_size());
  std::vector<uint32_t> kept_bounds(call.plan.bounds_size());
  for (int64_t row = first_row; row < last_row; ++row) {
    corrupt_row(group, scratch, call, row, keys.data(), {noise_bounds.data(), kept_bounds.data()});
  }
}

struct CorruptSpansCpu {
  template <typename Id>
  static void run(const Tensor&, const CorruptSpansCall<Id>& call) {
    OneThread group;
    *call.dropped = count_dropped(group, call);
    constexpr int64_t kTokensWorthAThread = 4096;
    const int64_t grain = std::max<int64_t>(1, kTokensWorthAThread / (call.plan.max_length + 1));
    torch::stable::parallel_for(0, call.rows.count, grain, [&](int64_t first, int64_t last) {
      corrupt_rows(call, first, last);
    });
  }
};

constexpr auto corrupt_spans_op = &corrupt_spans<CorruptSpansCpu>;

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

#if FASTPLM_ONCE
STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) { library.def(fastplm::kCorruptSpansSchema); }

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("corrupt_spans", FASTPLM_BOX(corrupt_spans_op));
}
#endif
