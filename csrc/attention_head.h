// Attention of one head of one sequence: its inputs and its scratch memory, for all levels.
#pragma once

#include <cstdint>
#include <new>

#include "base.h"

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
  Strided<const T> soon[4];  // rows to prefetch, which the thread probably reads next; or null
  int64_t soon_rows;
};

// Scratch memory of a thread. It grows and is never freed, as new pages are slow.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  // Makes room for `floats` floats, from which next() gives piece after piece.
  void reserve(int64_t floats) {
    used_ = 0;
    if (floats <= size_) return;
    release();
    memory_ = static_cast<float*>(::operator new(sizeof(float) * floats, kAligned));
    size_ = floats;
  }
  float* next(int64_t floats) {
    float* piece = memory_ + used_;
    used_ += round_up(floats, kCacheLine);
    return piece;
  }

 private:
  static constexpr std::align_val_t kAligned{64};

  void release() {
    ::operator delete(memory_, kAligned);
    memory_ = nullptr;
    size_ = 0;
  }

  float* memory_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

}  // namespace fastplm
