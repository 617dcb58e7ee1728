// CUDA kernels of mask_tokens: a thread block is the group that works on a row. No torch header, so
// that they compile wherever nvcc is.
#pragma once

#include "mask_tokens.h"
#include "thread_block.cuh"

namespace fastplm {

// Rows of so many tokens are worked on in shared memory, which holds what a row needs of them.
constexpr int kSharedTokens = 4096;

// What the first kernel leaves for the second one, and room for rows that are longer than that.
struct MaskScratch {
  uint32_t* keys;    // [tokens + 4 * rows], a row's part padded to whole draws
  uint32_t* sizes;   // [tokens]
  uint8_t* chosen;   // [tokens]
  int64_t* counts;   // [rows] tokens chosen
  int64_t* dropped;  // [rows]
};

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
  MaskRow own{memory.keys + begin + 4 * row, memory.sizes + begin, memory.chosen + begin};
  if (is_short) own = {keys, sizes, chosen};
  int64_t count = 0;
  int64_t dropped = 0;
  if (rows_are_apart(block, call.rows)) {
    count = choose_row(block, scratch, call, row, own, &dropped);
    for (int64_t i = block.rank(); is_short && i < length; i += block.size()) {
      memory.chosen[begin + i] = chosen[i];
    }
  }
  if (block.rank() == 0) {
    memory.counts[row] = count;
    memory.dropped[row] = dropped;
  }
}

// Block b: writes row b, and its share of the slots that no row uses. It sums the counts of all
// rows itself, which is cheaper than a scan kernel in between.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    mask_tokens_write_kernel(const MaskTokensCall<Id> call, const MaskScratch memory) {
  __shared__ uint64_t warp_values[kWarps];
  ThreadBlock block(warp_values);
  const int64_t row = blockIdx.x;

  uint64_t earlier = 0;
  uint64_t all = 0;
  uint64_t dropped = 0;
  for (int64_t other = block.rank(); other < call.rows.count; other += block.size()) {
    earlier += other < row ? memory.counts[other] : 0;
    all += memory.counts[other];
    dropped += memory.dropped[other];
  }
  uint64_t first_slot;
  uint64_t total;
  uint64_t total_dropped;
  block.exclusive_sum(earlier, &first_slot);
  block.exclusive_sum(all, &total);
  block.exclusive_sum(dropped, &total_dropped);
  const int64_t wanted = static_cast<int64_t>(total);
  const int64_t count = wanted < call.slots ? wanted : call.slots;
  if (row == 0 && block.rank() == 0) {
    *call.count = count;
    *call.dropped = static_cast<int64_t>(total_dropped) + wanted - count;
  }
  const int64_t threads = int64_t{gridDim.x} * block.size();
  for (int64_t slot = count + row * block.size() + block.rank(); slot < call.slots;
       slot += threads) {
    call.positions[slot] = kUnusedPosition;
    call.labels[slot] = kUnusedLabel;
  }
  if (!rows_are_apart(block, call.rows)) {
    for (int64_t i = row * block.size() + block.rank(); i < call.rows.tokens; i += threads) {
      call.output_ids[i] = call.input_ids[i];
    }
    return;
  }
  write_row(block, call, row, static_cast<int64_t>(first_slot),
            memory.chosen + call.rows.begin(row));
}

}  // namespace fastplm
