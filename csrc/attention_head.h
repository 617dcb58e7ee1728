// What attention of one head of one sequence is given, for every level alike.
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
  int64_t heads;        // its stride
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

// A row's softmax: e^(score - most) * inverse.
struct Softmax {
  float most, inverse;
};

template <typename T>
struct Head {
  int64_t seqlen_q, seqlen_k, dim;
  int64_t longest_q;  // of all sequences: the way to compute is one for a padded and a ragged batch
  Strided<const T> query, key, value;
  const bool* key_mask;  // [Tk], true = attend; null: all
  bool is_causal;
  float scale;
  Bias bias;
  Dropout dropout;
  Softmax* softmax;  // [Tq], written by the forward for the backward
  Strided<const T> soon[4];  // what the thread probably reads next, fetched while it computes, or null
  int64_t soon_rows;
};

// What a thread works in; grown, never given back, as fresh pages are slow.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  // `floats` of them, in pieces taken one after the other.
  void reserve(int64_t floats) {
    used_ = 0;
    if (floats <= size_) return;
    release();
    memory_ = static_cast<float*>(::operator new(sizeof(float) * floats, kAligned));
    size_ = floats;
  }
  float* take(int64_t floats) {
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
