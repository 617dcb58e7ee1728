// Attention of one head of one sequence on one CPU thread, forward and backward, by blocks of
// queries; the formulas are those of fastplm/ops/_attention_torch.py.
//
//   Tq/Tk query/key length    D head dim, padded with zeros to D16    kBlock queries a block
//
// Everything is computed in fp32, whatever the dtype of the tensors.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>

#include "lanes.h"
#include "philox.h"

namespace fastplm {

constexpr int64_t kBlock = 48;
constexpr int64_t kFewQueries = 4;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// --- products -------------------------------------------------------------------------------------

// C [kRows, 16 kWide] = (C +) A B: what the registers hold of a product.
template <int kRows, int kWide, bool kAdd>
FASTPLM_HD void product_tile(int64_t depth, const float* a, int64_t a_row, int64_t a_col,
                             const float* b, int64_t b_row, float* c, int64_t c_row) {
  Floats sum[kRows][kWide];
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kWide; ++n) sum[m][n] = kAdd ? at(c + m * c_row + n * kLane) : Floats{};
  }
  for (int64_t k = 0; k < depth; ++k) {
    for (int m = 0; m < kRows; ++m) {
      const float left = a[m * a_row + k * a_col];
      for (int n = 0; n < kWide; ++n) sum[m][n] += left * at(b + k * b_row + n * kLane);
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kWide; ++n) at(c + m * c_row + n * kLane) = sum[m][n];
  }
}

template <int kWide, bool kAdd>
FASTPLM_HD void product_columns(int64_t rows, int64_t depth, const float* a, int64_t a_row,
                                int64_t a_col, const float* b, int64_t b_row, float* c,
                                int64_t c_row) {
  int64_t m = 0;
  for (; m + 6 <= rows; m += 6) {
    product_tile<6, kWide, kAdd>(depth, a + m * a_row, a_row, a_col, b, b_row, c + m * c_row,
                                 c_row);
  }
  for (; m + 2 <= rows; m += 2) {
    product_tile<2, kWide, kAdd>(depth, a + m * a_row, a_row, a_col, b, b_row, c + m * c_row,
                                 c_row);
  }
  if (m < rows) {
    product_tile<1, kWide, kAdd>(depth, a + m * a_row, a_row, a_col, b, b_row, c + m * c_row,
                                 c_row);
  }
}

// C [rows, columns] = (C +) A [rows, depth] B [depth, columns]; columns is a multiple of 16, and
// A lies as its strides say, so that it may be a transposed view.
template <bool kAdd>
FASTPLM_HD void product(int64_t rows, int64_t columns, int64_t depth, const float* a,
                        int64_t a_row, int64_t a_col, const float* b, int64_t b_row, float* c,
                        int64_t c_row) {
  int64_t n = 0;
  for (; n + 2 * kLane <= columns; n += 2 * kLane) {
    product_columns<2, kAdd>(rows, depth, a, a_row, a_col, b + n, b_row, c + n, c_row);
  }
  if (n < columns) {
    product_columns<1, kAdd>(rows, depth, a, a_row, a_col, b + n, b_row, c + n, c_row);
  }
}

// Scores [rows, columns] = Q [rows, width] K [columns, width]^T, for so few rows that laying K out
// for the product above would cost more.
FASTPLM_HD void inner_products(int64_t rows, int64_t columns, int64_t width, const float* query,
                               const float* key, int64_t key_stride, float* scores,
                               int64_t row_stride) {
  for (int64_t j = 0; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      Floats sum = {};
      for (int64_t d = 0; d < width; d += kLane) {
        sum += at(query + i * width + d) * at(key + j * key_stride + d);
      }
      scores[i * row_stride + j] = sum_of(sum);
    }
  }
}

// --- rows -----------------------------------------------------------------------------------------

// Rows [count, width] of a tensor as fp32 [count, padded], times a factor.
template <typename T>
FASTPLM_HD void load_rows(const T* from, int64_t stride, int64_t count, int64_t width,
                          int64_t padded, float factor, float* to) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t d = 0; d < width; ++d) {
      to[row * padded + d] = static_cast<float>(from[row * stride + d]) * factor;
    }
    for (int64_t d = width; d < padded; ++d) to[row * padded + d] = 0.0f;
  }
}

template <typename T>
FASTPLM_HD void store_rows(const float* from, int64_t padded, int64_t count, int64_t width,
                           float factor, T* to, int64_t stride) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t d = 0; d < width; ++d) {
      to[row * stride + d] = static_cast<T>(from[row * padded + d] * factor);
    }
  }
}

// [count, width] -> [width, columns]; columns beyond count are 0.
FASTPLM_HD void transpose(const float* from, int64_t count, int64_t width, int64_t columns,
                          float* to) {
  for (int64_t first = 0; first < columns; first += kLane) {
    const int64_t some = std::min(kLane, count - first);
    for (int64_t d = 0; d < width; ++d) {
      float* line = to + d * columns + first;
      if (some == kLane) {
        for (int64_t i = 0; i < kLane; ++i) line[i] = from[(first + i) * width + d];
      } else {
        for (int64_t i = 0; i < kLane; ++i) line[i] = i < some ? from[(first + i) * width + d] : 0;
      }
    }
  }
}

// --- softmax --------------------------------------------------------------------------------------

// Products q k [columns] to probabilities; the hidden ones and those from `limit` on become 0.
template <bool kBias>
FASTPLM_HD void softmax_row(float* scores, int64_t columns, float scale, const float* bias,
                            const int32_t* hidden, int64_t limit) {
  Ints lane;
  for (int64_t i = 0; i < kLane; ++i) lane[i] = static_cast<int32_t>(i);
  const Floats lowest = Floats{} - kInfinity;
  Four largest[kLane / 4];
  for (Four& four : largest) four = Four{} - kInfinity;
  for (int64_t j = 0; j < columns; j += kLane) {
    Ints unseen;
    std::memcpy(&unseen, hidden + j, sizeof(unseen));
    unseen |= (static_cast<int32_t>(limit - j) - 1 - lane) >> 31;
    // Not the query is scaled but the product: the rounding of large scores is all that matters.
    Floats score = at(scores + j) * scale;
    if (kBias) score += at(bias + j);
    choose(unseen, lowest, score, at(scores + j));
    for (int64_t i = 0; i < kLane / 4; ++i) {
      const Four four = *reinterpret_cast<const Four*>(scores + j + 4 * i);
      largest[i] = four > largest[i] ? four : largest[i];
    }
  }
  float most = -kInfinity;
  for (const Four& four : largest) {
    for (int64_t i = 0; i < 4; ++i) most = std::max(most, four[i]);
  }
  Floats total = {};
  int64_t j = 0;
  for (; j + kTogether * kLane <= columns; j += kTogether * kLane) {
    const auto weight = exponential(load<kTogether>(scores + j) - most);
    store(weight, scores + j);
    for (const Floats& each : weight.each) total += each;
  }
  for (; j < columns; j += kLane) {
    const auto weight = exponential(load<1>(scores + j) - most);
    store(weight, scores + j);
    total += weight.each[0];
  }
  const float inverse = 1.0f / sum_of(total);
  for (j = 0; j < columns; j += kLane) at(scores + j) *= inverse;
}

// --- one head -------------------------------------------------------------------------------------

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
    memory_ = static_cast<float*>(::operator new(sizeof(float) * floats, kCacheLine));
    size_ = floats;
  }
  float* take(int64_t floats) {
    float* piece = memory_ + used_;
    used_ += round_up(floats, kLane);
    return piece;
  }

 private:
  static constexpr std::align_val_t kCacheLine{64};

  void release() {
    ::operator delete(memory_, kCacheLine);
    memory_ = nullptr;
    size_ = 0;
  }

  float* memory_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

// The keys of a head in fp32, and what the queries of a block make of them.
template <typename T>
class HeadPass {
 public:
  // Of scratch that a pass takes: tiles by key, by score and by query, and what is drawn or masked.
  static int64_t floats(int64_t seqlen_q, int64_t seqlen_k, int64_t dim, bool backward) {
    const int64_t columns = round_up(seqlen_k, 4 * kLane);
    const int64_t width = round_up(dim, kLane);
    const int64_t by_key = backward ? 6 : 3;
    const int64_t by_score = backward ? 3 : 1;
    return columns * width * by_key + kBlock * columns * by_score + 3 * kBlock * width +
           columns + kBlock * columns / 4 + 2 * (seqlen_q + columns) + 64;
  }

  FASTPLM_HD HeadPass(const Head<T>& head, Scratch& scratch)
      : head_(head), width_(round_up(head.dim, kLane)) {
    seen_ = head.seqlen_k;
    first_seen_ = 0;
    if (head.key_mask != nullptr) {
      while (seen_ > 0 && !head.key_mask[seen_ - 1]) --seen_;
      while (first_seen_ < seen_ && !head.key_mask[first_seen_]) ++first_seen_;
    }
    columns_ = round_up(seen_, kLane);
    shift_ = head.seqlen_k - head.seqlen_q;
    hidden_ = reinterpret_cast<int32_t*>(scratch.take(columns_));
    for (int64_t j = 0; j < columns_; ++j) {
      hidden_[j] = j < seen_ && (head.key_mask == nullptr || head.key_mask[j]) ? 0 : -1;
    }
    keep_ = reinterpret_cast<uint8_t*>(scratch.take(kBlock * round_up(seen_, 4 * kLane) / 4));
    query_ = scratch.take(kBlock * width_);
    scores_ = scratch.take(kBlock * columns_);
    key_ = rows_by_key(head.key, scratch);
    if (head.longest_q > kFewQueries) {
      key_t_ = scratch.take(columns_ * width_);
      transpose(key_.data, seen_, width_, columns_, key_t_);
    }
    if (head.bias.weight != nullptr) load_bias(scratch);
  }

  // O = c * drop(P) V
  FASTPLM_HD void forward(Strided<T> out, Scratch& scratch) {
    const Strided<const float> value = rows_by_key(head_.value, scratch);
    float* result = scratch.take(kBlock * width_);
    for (int64_t first = 0; first < head_.seqlen_q; first += kBlock) {
      const int64_t rows = std::min(kBlock, head_.seqlen_q - first);
      const int64_t columns = block_columns(first, rows);
      probabilities(first, rows, columns);
      if (head_.dropout.threshold > 0) drop(scores_, rows, columns);
      product<false>(rows, width_, std::min(columns, seen_), scores_, columns_, 1, value.data,
                     value.stride, result, width_);
      store_rows(result, width_, rows, head_.dim, rescale(), out.data + first * out.stride,
                 out.stride);
    }
  }

  // dV = c * drop(P)^T dO     dP = c * drop(dO V^T)     dS = P * (dP - rowsum(P * dP))
  // dQ = scale * dS K         dK = scale * dS^T Q       dbias[bucket] += sums of dS
  FASTPLM_HD void backward(Strided<const T> grad_out, Strided<T> grad_query, Strided<T> grad_key,
                           Strided<T> grad_value, double* grad_bias, Scratch& scratch) {
    const float* value_t;
    {
      float* value = load_keys(head_.value, scratch);
      float* transposed = scratch.take(columns_ * width_);
      transpose(value, seen_, width_, columns_, transposed);
      value_t = transposed;
    }
    float* dk = scratch.take(columns_ * width_);
    float* dv = scratch.take(columns_ * width_);
    float* upstream = scratch.take(kBlock * width_);
    float* dq = scratch.take(kBlock * width_);
    float* ds = scratch.take(kBlock * columns_);
    float* used = scores_;
    if (head_.dropout.threshold > 0) used = scratch.take(kBlock * columns_);
    std::fill(dk, dk + columns_ * width_, 0.0f);
    std::fill(dv, dv + columns_ * width_, 0.0f);
    for (int64_t first = 0; first < head_.seqlen_q; first += kBlock) {
      const int64_t rows = std::min(kBlock, head_.seqlen_q - first);
      const int64_t columns = block_columns(first, rows);
      const int64_t keys = std::min(columns, seen_);
      load_rows(grad_out.data + first * grad_out.stride, grad_out.stride, rows, head_.dim, width_,
                rescale(), upstream);
      probabilities(first, rows, columns);
      product<false>(rows, columns, width_, upstream, width_, 1, value_t, columns_, ds, columns_);
      if (head_.dropout.threshold > 0) {
        std::copy(scores_, scores_ + rows * columns_, used);
        drop(used, rows, columns);
        drop(ds, rows, columns);
      }
      product<true>(keys, width_, rows, used, 1, columns_, upstream, width_, dv, width_);
      for (int64_t i = 0; i < rows; ++i) {
        softmax_backward_row(scores_ + i * columns_, ds + i * columns_, columns);
        if (grad_bias != nullptr) add_line(ds + i * columns_, first + i, keys);
      }
      product<true>(keys, width_, rows, ds, 1, columns_, query_, width_, dk, width_);
      product<false>(rows, width_, keys, ds, columns_, 1, key_.data, key_.stride, dq, width_);
      store_rows(dq, width_, rows, head_.dim, head_.scale,
                 grad_query.data + first * grad_query.stride, grad_query.stride);
    }
    store_keys(dk, head_.scale, grad_key);
    store_keys(dv, 1.0f, grad_value);
    if (grad_bias != nullptr) {
      for (int64_t at_line = 0; at_line < head_.seqlen_q + seen_ - 1; ++at_line) {
        grad_bias[bucket_of(at_line)] += line_sums_[at_line];
      }
    }
  }

 private:
  // The rows of the keys up to the last that is seen, or for so few queries that a copy would cost
  // as much as they do, the tensor's own if they are what a copy would be.
  FASTPLM_HD Strided<const float> rows_by_key(Strided<const T> from, Scratch& scratch) {
    if constexpr (std::is_same_v<T, float>) {
      const bool all_seen = std::find(hidden_, hidden_ + seen_, -1) == hidden_ + seen_;
      if (head_.longest_q <= kFewQueries && head_.dim == width_ && all_seen) return from;
    }
    return {load_keys(from, scratch), width_};
  }

  // What masked keys hold never matters, NaN included: they are 0 here.
  FASTPLM_HD float* load_keys(Strided<const T> from, Scratch& scratch) {
    float* to = scratch.take(columns_ * width_);
    load_rows(from.data, from.stride, seen_, head_.dim, width_, 1.0f, to);
    if (head_.key_mask != nullptr) {
      for (int64_t j = 0; j < seen_; ++j) {
        if (hidden_[j]) std::fill(to + j * width_, to + (j + 1) * width_, 0.0f);
      }
    }
    return to;
  }

  FASTPLM_HD void store_keys(const float* from, float factor, Strided<T> to) {
    store_rows(from, width_, seen_, head_.dim, factor, to.data, to.stride);
    for (int64_t j = seen_; j < head_.seqlen_k; ++j) {
      std::fill(to.data + j * to.stride, to.data + j * to.stride + head_.dim, T(0.0f));
    }
  }

  // How many keys, rounded up, the last of these queries may see.
  FASTPLM_HD int64_t block_columns(int64_t first, int64_t rows) const {
    return head_.is_causal ? std::min(columns_, round_up(limit(first + rows - 1), kLane))
                           : columns_;
  }

  // Query i sees only keys below it.
  FASTPLM_HD int64_t limit(int64_t i) const {
    return head_.is_causal ? std::max<int64_t>(0, std::min(seen_, i + shift_ + 1)) : seen_;
  }

  FASTPLM_HD float rescale() const {
    const uint32_t kept = 256 - head_.dropout.threshold;
    return 256.0f / static_cast<float>(std::max<uint32_t>(kept, 1));
  }

  // Leaves P in scores_, Q in query_ and, with dropout, the random bytes in keep_.
  FASTPLM_HD void probabilities(int64_t first, int64_t rows, int64_t columns) {
    load_rows(head_.query.data + first * head_.query.stride, head_.query.stride, rows, head_.dim,
              width_, 1.0f, query_);
    if (key_t_ != nullptr) {
      product<false>(rows, columns, width_, query_, width_, 1, key_t_, columns_, scores_, columns_);
    } else {
      inner_products(rows, std::min(columns, seen_), width_, query_, key_.data, key_.stride,
                     scores_, columns_);
    }
    for (int64_t i = 0; i < rows; ++i) {
      float* row = scores_ + i * columns_;
      const int64_t end = limit(first + i);
      if (end <= first_seen_) {  // nothing to attend to
        std::fill(row, row + columns, 0.0f);
        continue;
      }
      if (line_ != nullptr) {
        const float* bias = line_ + head_.seqlen_q - 1 - (first + i);
        softmax_row<true>(row, columns, head_.scale, bias, hidden_, end);
      } else {
        softmax_row<false>(row, columns, head_.scale, nullptr, hidden_, end);
      }
    }
    if (head_.dropout.threshold > 0) draw_bytes(first, rows, columns);
  }

  FASTPLM_HD void softmax_backward_row(const float* probs, float* grad, int64_t columns) {
    Floats sum = {};
    for (int64_t j = 0; j < columns; j += kLane) sum += at(probs + j) * at(grad + j);
    const float delta = sum_of(sum);
    for (int64_t j = 0; j < columns; j += kLane) {
      at(grad + j) = at(probs + j) * (at(grad + j) - delta);
    }
  }

  // The bytes of fastplm/reference/attention.py's dropout_keep_mask: a draw decides for 16 keys.
  FASTPLM_HD void draw_bytes(int64_t first, int64_t rows, int64_t columns) {
    constexpr int kDraws = 16;
    const int64_t stride = round_up(seen_, 4 * kLane);
    const int64_t draws = round_up(columns, 4 * kLane) / kLane;
    const Dropout& dropout = head_.dropout;
    for (int64_t begin = 0; begin < rows * draws; begin += kDraws) {
      WordLanes<kDraws> counter;
      for (int lane = 0; lane < kDraws; ++lane) {
        const uint32_t call = static_cast<uint32_t>((begin + lane) % draws);
        counter.x[lane] = static_cast<uint32_t>(first + (begin + lane) / draws);
        counter.y[lane] = static_cast<uint32_t>(dropout.sample_index);
        counter.z[lane] = static_cast<uint32_t>(dropout.sample_index >> 32);
        counter.w[lane] = (call << 12 | dropout.head) << 4 | static_cast<uint32_t>(Stream::kDropout);
      }
      philox4x32<kDraws, kDropoutRounds>(dropout.seed, counter);
      for (int lane = 0; lane < kDraws && begin + lane < rows * draws; ++lane) {
        const int64_t call = (begin + lane) % draws;
        uint8_t* bytes = keep_ + (begin + lane) / draws * stride + call / 4 * 64 + call % 4 * 2;
        const Words drawn = counter[lane];
        const uint32_t words[4] = {drawn.x, drawn.y, drawn.z, drawn.w};
        for (int pair = 0; pair < 8; ++pair) {
          const uint32_t word = words[pair / 2] >> (pair % 2 * 16);
          bytes[8 * pair] = static_cast<uint8_t>(word);
          bytes[8 * pair + 1] = static_cast<uint8_t>(word >> 8);
        }
      }
    }
  }

  FASTPLM_HD void drop(float* row, int64_t rows, int64_t columns) {
    const int64_t stride = round_up(seen_, 4 * kLane);
    const uint32_t threshold = head_.dropout.threshold;
    for (int64_t i = 0; i < rows; ++i, row += columns_) {
      const uint8_t* bytes = keep_ + i * stride;
      for (int64_t j = 0; j < columns; ++j) row[j] = bytes[j] < threshold ? 0.0f : row[j];
    }
  }

  // The bias of key j and query i stands at j - i + Tq - 1.
  FASTPLM_HD void load_bias(Scratch& scratch) {
    const int64_t length = head_.seqlen_q + columns_;
    line_ = scratch.take(length);
    line_sums_ = scratch.take(length);
    for (int64_t i = 0; i < length; ++i) {
      line_[i] = head_.bias.weight[bucket_of(i) * head_.bias.heads];
      line_sums_[i] = 0.0f;
    }
  }

  FASTPLM_HD int64_t bucket_of(int64_t at_line) const {
    const int64_t furthest = head_.bias.furthest;
    const int64_t distance =
        at_line - (head_.seqlen_q - 1) - (head_.is_causal ? shift_ : int64_t{0});
    return head_.bias.bucket[std::clamp(distance, -furthest, furthest) + furthest];
  }

  FASTPLM_HD void add_line(const float* row, int64_t i, int64_t keys) {
    float* line = line_sums_ + head_.seqlen_q - 1 - i;
    for (int64_t j = 0; j < keys; ++j) line[j] += row[j];
  }

  const Head<T>& head_;
  const int64_t width_;         // D16
  int64_t seen_;                // keys up to the last that is not masked
  int64_t first_seen_;          // the first that is not masked
  int64_t columns_;             // seen_, rounded up
  int64_t shift_;
  int32_t* hidden_;             // [columns], -1: masked
  uint8_t* keep_;               // [kBlock, columns rounded up to 64]
  float* query_;                // [kBlock, D16]
  float* scores_;               // [kBlock, columns]
  Strided<const float> key_;    // [seen, D16]
  float* key_t_ = nullptr;      // [D16, columns], null: few queries
  float* line_ = nullptr;       // [Tq + columns]
  float* line_sums_ = nullptr;  // [Tq + columns]
};

}  // namespace fastplm
