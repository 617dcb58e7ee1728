// CUDA kernels of mask_tokens, corrupt_spans and bart_noise: the group that works on a row is a thread
// block. No torch header, so that they compile wherever nvcc is.
#pragma once

#include "index/bart_noise.h"
#include "index/corrupt_spans.h"
#include "index/mask_tokens.h"

namespace fastplm {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
// Blocks that must fit on a multiprocessor, which leaves each thread 64 registers. Without this bound,
// ptxas spills on sm_100.
constexpr int kBlocks = 4;

class ThreadBlock {
 public:
  static constexpr bool kAlone = false;
  static constexpr int kLanes = 1;
  __device__ explicit ThreadBlock(uint64_t* warp_values) : warp_values_(warp_values) {}
  __device__ int rank() const { return threadIdx.x; }
  __device__ int size() const { return kThreads; }
  __device__ void sync() const { __syncthreads(); }
  __device__ void add(uint64_t* counter, uint64_t value) const {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter), value);
  }

  template <typename Sum>
  __device__ Sum exclusive_sum(Sum value, Sum* total) const {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    Sum inclusive = value;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const Sum lower = __shfl_up_sync(0xFFFFFFFF, inclusive, offset);
      if (lane >= offset) inclusive += lower;
    }
    if (lane == kWarp - 1) warp_values_[warp] = inclusive;
    __syncthreads();
    Sum before = 0;
    Sum sum = 0;
    for (int other = 0; other < kWarps; ++other) {
      if (other == warp) before = sum;
      sum += static_cast<Sum>(warp_values_[other]);
    }
    __syncthreads();  // the next call writes warp_values_ again
    *total = sum;
    return before + inclusive - value;
  }

  __device__ uint64_t minimum(uint64_t value) const {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      const uint64_t other = __shfl_xor_sync(0xFFFFFFFF, value, offset);
      value = other < value ? other : value;
    }
    if (threadIdx.x % kWarp == 0) warp_values_[threadIdx.x / kWarp] = value;
    __syncthreads();
    for (int other = 0; other < kWarps; ++other) {
      value = warp_values_[other] < value ? warp_values_[other] : value;
    }
    __syncthreads();
    return value;
  }

 private:
  uint64_t* warp_values_;  // [kWarps], shared
};

// --- mask_tokens ----------------------------------------------------------------------------------

// Rows of up to so many tokens are masked in shared memory.
constexpr int kSharedTokens = 4096;

// The results of a kernel that the next ones read, and memory for longer rows.
struct MaskScratch {
  uint32_t* keys;        // [tokens + 4 * rows], a row's part padded to whole draws
  uint32_t* sizes;       // [tokens]
  uint8_t* chosen;       // [tokens]
  int64_t* counts;       // [rows] tokens chosen
  int64_t* first_slots;  // [rows]
  int64_t* dropped;      // [rows]
  bool* apart;           // [] whether no two rows overlap; null: padded rows never do

  __device__ bool rows_are_apart() const { return apart == nullptr || *apart; }
};

// One block, for packed rows only: tests whether they are apart. If each block of the next kernels
// tested all boundaries, the work would grow with the square of the rows.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_tokens_check_kernel(const MaskTokensCall<Id> call, const MaskScratch memory) {
  __shared__ uint64_t warp_values[kWarps];
  ThreadBlock block(warp_values);
  const bool apart = rows_are_apart(block, call.rows);
  if (block.rank() == 0) *memory.apart = apart;
}

// Block b: chooses in row b.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_tokens_choose_kernel(const MaskTokensCall<Id> call, const MaskScratch memory) {
  __shared__ uint64_t warp_values[kWarps];
  __shared__ SelectScratch scratch;
  ThreadBlock block(warp_values);
  __shared__ uint32_t keys[kSharedTokens];
  __shared__ uint32_t sizes[kSharedTokens];
  __shared__ uint8_t chosen[kSharedTokens];
  const int64_t row = blockIdx.x;
  const int64_t begin = call.rows.begin(row);
  const int64_t length = call.rows.length(row);
  const bool is_short = length <= kSharedTokens;
  MaskRow row_memory{memory.keys + begin + 4 * row, memory.sizes + begin, memory.chosen + begin};
  if (is_short) row_memory = {keys, sizes, chosen};
  int64_t count = 0;
  int64_t dropped = 0;
  if (memory.rows_are_apart()) {
    count = choose_row(block, scratch, call, row, row_memory, &dropped);
    for (int64_t i = block.rank(); is_short && i < length; i += block.size()) {
      memory.chosen[begin + i] = chosen[i];
    }
  }
  if (block.rank() == 0) {
    memory.counts[row] = count;
    memory.dropped[row] = dropped;
  }
}

// One block: computes where the slots of each row begin. A thread has neighbouring rows; the slots
// of its first row begin at the sum of the threads before it.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_tokens_place_kernel(const MaskTokensCall<Id> call, const MaskScratch memory) {
  __shared__ uint64_t warp_values[kWarps];
  ThreadBlock block(warp_values);
  const int64_t rows = call.rows.count;
  const int64_t share = ceil_div(rows, block.size());
  const int64_t begin = block.rank() * share;
  const int64_t end = begin + share < rows ? begin + share : rows;
  int64_t mine = 0;
  int64_t dropped = 0;
  for (int64_t row = begin; row < end; ++row) {
    mine += memory.counts[row];
    dropped += memory.dropped[row];
  }
  int64_t wanted;
  int64_t all_dropped;
  int64_t slot = block.exclusive_sum(mine, &wanted);
  block.exclusive_sum(dropped, &all_dropped);
  for (int64_t row = begin; row < end; ++row) {
    memory.first_slots[row] = slot;
    slot += memory.counts[row];
  }
  if (block.rank() == 0) {
    const int64_t count = wanted < call.slots ? wanted : call.slots;
    *call.count = count;
    *call.dropped = all_dropped + wanted - count;
  }
}

// Block b: writes row b, and its share of the slots that no row uses.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_tokens_write_kernel(const MaskTokensCall<Id> call, const MaskScratch memory) {
  __shared__ uint64_t warp_values[kWarps];
  ThreadBlock block(warp_values);
  const int64_t row = blockIdx.x;
  const int64_t threads = int64_t{gridDim.x} * block.size();
  const int64_t thread = row * block.size() + block.rank();
  for (int64_t slot = *call.count + thread; slot < call.slots; slot += threads) {
    call.positions[slot] = kUnusedPosition;
    call.labels[slot] = kUnusedLabel;
  }
  if (!memory.rows_are_apart()) {
    for (int64_t i = thread; i < call.rows.tokens; i += threads) {
      call.output_ids[i] = call.input_ids[i];
    }
    return;
  }
  write_row(block, call, row, memory.first_slots[row], memory.chosen + call.rows.begin(row));
}

// --- corrupt_spans --------------------------------------------------------------------------------

// Block b: corrupts row b. `keys` is [B, keys_size()], `bounds` [B, 2, bounds_size()]. The last
// block also sums over all rows, which saves a kernel and a counter to reset.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    corrupt_spans_kernel(const CorruptSpansCall<Id> call, uint32_t* keys, uint32_t* bounds) {
  __shared__ uint64_t warp_values[kWarps];
  __shared__ SelectScratch scratch;
  ThreadBlock block(warp_values);
  const int64_t row = blockIdx.x;
  const int64_t size = call.bounds_size();
  corrupt_row(block, scratch, call, row, keys + row * call.keys_size(),
              {bounds + 2 * row * size, bounds + (2 * row + 1) * size});
  if (row == call.rows.count - 1) {
    const int64_t dropped = count_dropped(block, call);
    if (block.rank() == 0) *call.dropped = dropped;
  }
}

// --- bart_noise -----------------------------------------------------------------------------------

// Block b: adds noise to row b, in the bytes [b * row_bytes, (b + 1) * row_bytes) of `memory`.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    bart_noise_kernel(const __grid_constant__ BartNoiseCall<Id> call, uint8_t* memory,
                      int64_t row_bytes) {
  __shared__ uint64_t warp_values[kWarps];
  __shared__ SelectScratch scratch;
  ThreadBlock block(warp_values);
  NoiseRow<Id> arrays;
  arrays.lay_out(call, memory + blockIdx.x * row_bytes);
  const int64_t dropped = noise_row(block, scratch, call, blockIdx.x, arrays);
  if (block.rank() == 0 && dropped > 0) {
    block.add(reinterpret_cast<uint64_t*>(call.dropped), static_cast<uint64_t>(dropped));
  }
}

}  // namespace fastplm
