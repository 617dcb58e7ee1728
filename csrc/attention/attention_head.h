// Attention of one head of one sequence: its inputs, for all levels.
#pragma once

#include <cstdint>

#include "common/scratch.h"

namespace fastplm {

// A tensor's rows of one head of one sequence.
template <typename T>
struct Strided {
  T* data;
  int64_t stride;
};

struct Bias {
  const float* weight;  // [buckets, H], the column of this head; null: no bias
  int64_t heads;        // H, the stride of the column
  int64_t count;        // buckets
  const int64_t* bucket;  // [2 furthest + 1], by distance + furthest
  int64_t furthest;
};

struct Dropout {
  uint64_t seed;
  uint64_t sample_index;
  uint32_t head;
  uint32_t threshold;  // of 256; 0: no dropout
  int64_t first_key = 0;  // what key 0 of the head is to dropout: a multiple of 64
};

// A row's softmax: e^(score - most) * inverse_sum.
struct Softmax {
  float most, inverse_sum;
};

template <typename T>
struct Head {
  int64_t seqlen_q, seqlen_k, dim;
  int64_t longest_q;  // longest query length; makes a padded and a packed batch compute alike
  Strided<const T> query, key, value;
  const bool* key_mask;  // [Tk], true = attend; null: all
  Strided<const bool> attn_mask;  // [Tq, Tk], true = attend; null: all
  bool is_causal;
  float scale;
  Bias bias;
  Dropout dropout;
  Softmax* softmax;  // [Tq], written by the forward for the backward
  Strided<const T> prefetch[4];  // rows to prefetch, which the thread probably reads next; or null
  int64_t prefetch_rows;
  // A query at position p sees keys p - left to p + right; negative: no bound.
  int64_t left = -1, right = -1;
};

}  // namespace fastplm
