// The group of a CUDA kernel: a thread block. No torch header, so that it compiles wherever nvcc is.
#pragma once

#include "group.h"

namespace fastplm {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
// So many blocks shall fit on a multiprocessor, which leaves each thread 64 registers; left to
// itself, ptxas spills on sm_100.
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

}  // namespace fastplm
