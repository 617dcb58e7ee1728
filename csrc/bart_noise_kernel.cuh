// CUDA kernel of bart_noise: a thread block is the group that works on a row. No torch header, so
// that it compiles wherever nvcc is.
#pragma once

#include "bart_noise.h"
#include "thread_block.cuh"

namespace fastplm {

// Block b: row b, with the bytes [b * row_bytes, (b + 1) * row_bytes) of `memory` to work in.
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
