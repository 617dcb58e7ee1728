// fastplm_C::corrupt_spans on the CPU: rows in parallel on PyTorch's own threads, each row by one.
#include <algorithm>
#include <vector>

#include "corrupt_spans_op.h"

namespace fastplm {
namespace {

template <typename Id>
FASTPLM_CLONES void corrupt_rows(const CorruptSpansCall<Id>& call, int64_t first_row,
                                 int64_t last_row) {
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

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) { library.def(fastplm::kCorruptSpansSchema); }

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("corrupt_spans", TORCH_BOX(&fastplm::corrupt_spans<fastplm::CorruptSpansCpu>));
}
