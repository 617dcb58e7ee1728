// The rows of a batch of token sequences: padded, [B, T], or packed one after the other, [N]; and the
// group of threads that works on a row, one thread on the CPU and a thread block on the GPU. A row
// algorithm is written once, as a template over the group, which offers
//   rank(), size()             the number of this thread in the group, and of its threads
//   kAlone                     whether it is a single thread
//   kLanes                     neighbours that a thread works on at a time, for vector units
//   sync()                     barrier; what was written before it is seen after it
//   add(counter, x)            adds to a shared counter; integers, so any order gives one result
//   exclusive_sum(x, &total)   sum of x over the lower ranks, and over all; every thread calls it
//   minimum(x)                 smallest x of all threads; every thread calls it
#pragma once

#include <cstdint>

#include "common/base.h"

namespace fastplm {

struct OneThread {
  static constexpr bool kAlone = true;
  // With fewer lanes, GCC unrolls the loop over them before it looks for vectors, and finds none.
  static constexpr int kLanes = 32;
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  void add(uint64_t* counter, uint64_t value) const { *counter += value; }
  template <typename Sum>
  Sum exclusive_sum(Sum value, Sum* total) const {
    *total = value;
    return 0;
  }
  uint64_t minimum(uint64_t value) const { return value; }
};

struct Rows {
  const int32_t* cu_seqlens;    // [count + 1], where each packed row begins; null: padded rows
  const int64_t* lengths;       // [count] of padded rows, or null: all of them `stride`
  const int64_t* sample_index;  // [count], or null: the number of the row
  int64_t count;                // B
  int64_t stride;               // T of padded rows
  int64_t tokens;               // B * T, or N

  // Clamped, so that a row lies within the tokens: nothing checks boundaries on a GPU.
  FASTPLM_HD int64_t begin(int64_t row) const {
    return cu_seqlens == nullptr ? row * stride : clamp(cu_seqlens[row], 0, tokens);
  }
  FASTPLM_HD int64_t length(int64_t row) const {
    if (cu_seqlens != nullptr) {
      const int64_t first = begin(row);
      return clamp(cu_seqlens[row + 1], first, tokens) - first;
    }
    return lengths == nullptr ? stride : clamp(lengths[row], 0, stride);
  }
  FASTPLM_HD uint64_t sample(int64_t row) const {
    return static_cast<uint64_t>(sample_index == nullptr ? row : sample_index[row]);
  }

 private:
  FASTPLM_HD static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
  }
};

}  // namespace fastplm
