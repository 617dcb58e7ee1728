// CUDA kernels of mask_tokens: a thread block is the group that works on a row. No torch header, so
// that they compile wherever nvcc is.
#pragma once

#include "mask_tokens.h"

namespace fastplm {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
// Asking for no more than these blocks on a multiprocessor leaves 64 registers a thread; left to
// itself, ptxas spills on sm_100.
constexpr int kBlocks = 4;

class ThreadBlock {
 public:
  __device__ explicit ThreadBlock(uint32_t* warp_sums) : warp_sums_(warp_sums) {}
  __device__ int rank() const { return threadIdx.x; }
  __device__ int size() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ void increment(uint32_t* counter) const { atomicAdd(counter, 1u); }

  __device__ uint32_t exclusive_sum(uint32_t value, uint32_t* total) const {
    constexpr int kWarps = kThreads / kWarp;
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    uint32_t inclusive = value;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const uint32_t lower = __shfl_up_sync(0xFFFFFFFF, inclusive, offset);
      if (lane >= offset) inclusive += lower;
    }
    if (lane == kWarp - 1) warp_sums_[warp] = inclusive;
    __syncthreads();
    uint32_t before = 0;
    uint32_t sum = 0;
    for (int other = 0; other < kWarps; ++other) {
      if (other == warp) before = sum;
      sum += warp_sums_[other];
    }
    __syncthreads();  // the next call writes warp_sums_ again
    *total = sum;
    return before + inclusive - value;
  }

 private:
  uint32_t* warp_sums_;
};

// Block b: the quota of row b.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_tokens_quota_kernel(const MaskTokensCall<Id> call, uint32_t* quotas) {
  __shared__ uint32_t warp_sums[kThreads / kWarp];
  ThreadBlock block(warp_sums);
  const int64_t row = blockIdx.x;
  const int64_t maskable = count_maskable(block, call, row);
  if (block.rank() == 0) quotas[row] = static_cast<uint32_t>(call.quota(maskable));
}

// Block b: row b, and the unused ones among the slots [b * capacity, (b + 1) * capacity). It sums
// the quotas of all rows itself, which is cheaper than a scan kernel in between.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_tokens_row_kernel(const MaskTokensCall<Id> call, const uint32_t* quotas, uint64_t* keys) {
  __shared__ uint32_t warp_sums[kThreads / kWarp];
  __shared__ GroupScratch scratch;
  ThreadBlock block(warp_sums);
  const int64_t row = blockIdx.x;

  uint32_t earlier = 0;
  uint32_t later = 0;
  for (int64_t other = block.rank(); other < call.rows; other += block.size()) {
    (other < row ? earlier : later) += quotas[other];
  }
  uint32_t first_slot;
  uint32_t from_here;
  block.exclusive_sum(earlier, &first_slot);
  block.exclusive_sum(later, &from_here);
  const int64_t count = int64_t{first_slot} + from_here;

  if (row == 0 && block.rank() == 0) *call.count = count;
  const int64_t first_own = row * call.capacity;
  const int64_t first_unused = first_own > count ? first_own : count;
  for (int64_t slot = first_unused + block.rank(); slot < first_own + call.capacity;
       slot += block.size()) {
    call.positions[slot] = kUnusedPosition;
    call.labels[slot] = kUnusedLabel;
  }
  draw_keys(block, call, row, keys + row * call.length);
  mask_row(block, scratch, call, row, int64_t{quotas[row]}, int64_t{first_slot},
           keys + row * call.length);
}

}  // namespace fastplm
