// fastplm_C::mask_tokens on the CPU: rows in parallel on PyTorch's own threads, each row by one.
#include <algorithm>
#include <vector>

#include "mask_tokens_op.h"

namespace fastplm {
namespace {

struct OneThread {
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  void increment(uint32_t* counter) const { ++*counter; }
  uint32_t exclusive_sum(uint32_t value, uint32_t* total) const {
    *total = value;
    return 0;
  }
};

struct MaskTokensCpu {
  template <typename Id>
  static void run(const Tensor&, const MaskTokensCall<Id>& call) {
    OneThread group;
    std::vector<int64_t> first_slots(call.rows + 1);
    for (int64_t row = 0; row < call.rows; ++row) {
      first_slots[row + 1] = first_slots[row] + call.quota(count_maskable(group, call, row));
    }
    const int64_t count = first_slots[call.rows];
    *call.count = count;
    std::fill(call.positions + count, call.positions + call.rows * call.capacity, kUnusedPosition);
    std::fill(call.labels + count, call.labels + call.rows * call.capacity, kUnusedLabel);

    constexpr int64_t kTokensWorthAThread = 4096;
    const int64_t grain = std::max<int64_t>(1, kTokensWorthAThread / (call.length + 1));
    torch::stable::parallel_for(0, call.rows, grain, [&](int64_t begin, int64_t end) {
      GroupScratch scratch{};
      std::vector<uint64_t> keys(call.length);
      for (int64_t row = begin; row < end; ++row) {
        const int64_t quota = first_slots[row + 1] - first_slots[row];
        draw_keys(group, call, row, keys.data());
        mask_row(group, scratch, call, row, quota, first_slots[row], keys.data());
      }
    });
  }
};

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY(fastplm_C, library) { library.def(fastplm::kMaskTokensSchema); }

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("mask_tokens", TORCH_BOX(&fastplm::mask_tokens<fastplm::MaskTokensCpu>));
}
