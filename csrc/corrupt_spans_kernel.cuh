// CUDA kernel of corrupt_spans: a thread block is the group that works on a row. No torch header,
// so that it compiles wherever nvcc is.
#pragma once

#include "corrupt_spans.h"
#include "thread_block.cuh"

namespace fastplm {

// Block b: row b. `keys` is [B, keys_size()], `bounds` [B, 2, bounds_size()]. The last block has
// the sum over all rows on top: no kernel of its own, and no atomics on a counter set to 0 before.
template <typename Id>
__global__ void __launch_bounds__(kThreads, kBlocks)
    corrupt_spans_kernel(const CorruptSpansCall<Id> call, uint32_t* keys, uint32_t* bounds) {
  __shared__ uint64_t warp_values[kWarps];
  __shared__ SelectScratch scratch;
  ThreadBlock block(warp_values);
  const int64_t row = blockIdx.x;
  const int64_t size = call.plan.bounds_size();
  corrupt_row(block, scratch, call, row, keys + row * call.plan.keys_size(),
              {bounds + 2 * row * size, bounds + (2 * row + 1) * size});
  if (row == call.rows.count - 1) {
    const int64_t dropped = count_dropped(block, call);
    if (block.rank() == 0) *call.dropped = dropped;
  }
}

}  // namespace fastplm
