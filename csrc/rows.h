// The rows of a batch of token sequences: padded, [B, T], or packed one after the other, [N].
#pragma once

#include <cstdint>

#include "group.h"

namespace fastplm {

struct Rows {
  const int32_t* cu_seqlens;    // [count + 1], where each packed row begins; null: padded rows
  const int64_t* lengths;       // [count] of padded rows, or null: all of them `stride`
  const int64_t* sample_index;  // [count], or null: the number of the row
  int64_t count;                // B
  int64_t stride;               // T of padded rows
  int64_t tokens;               // B * T, or N

  // Whatever the boundaries say, a row lies within the tokens: on a GPU nobody has looked at them.
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
