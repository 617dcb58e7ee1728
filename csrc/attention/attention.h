// Attention of one head of one sequence on one CPU thread, forward and backward, by blocks of
// queries; included once a level, after lanes.h.
//
//   S = scale * Q K^T + bias + mask      P = softmax(S)      O = c * drop(P) V
//   dV = c * drop(P)^T dO     dP = c * drop(dO V^T)     dS = P * (dP - rowsum(P * dP))
//   dQ = scale * dS K         dK = scale * dS^T Q       dbias = sums of dS over equal distances
//
//   c is 1 / (the probability of keeping)
//   Tq/Tk query/key length    D head dim, padded with zeros to Dw, whole vectors    kBlock queries a block
//
// Everything is computed in fp32, whatever the dtype of the tensors. Rows of a matrix lie an odd number
// of cache lines apart (odd_lines).

namespace fastplm::FASTPLM_LEVEL {

constexpr int64_t kFewQueries = 4;
// Random bytes are drawn for kDrawnKeys keys at a time (draw_bytes), each draw for kKeysOfADraw of them.
constexpr int64_t kDrawnKeys = 64;
constexpr int64_t kKeysOfADraw = 16;

// --- products -------------------------------------------------------------------------------------

// A tile of a product: rows and vectors of sums that fit in the registers, beside a row of B and an
// element of A.
constexpr int kTileRows = 6;
constexpr int kTileWide = kRegisters == 32 ? 4 : 2;
constexpr int64_t kBlock = 11 * kTileRows;
// A product is computed in slices of this many steps, whose rows of B stay in the first-level
// cache. Between slices the sums are in C.
constexpr int64_t kSlice = 128;

// The layout of A: the elements that a tile reads at a step are a stride apart (A lies by rows), or
// side by side (a transposed view).
enum class Lies { kByRows, kByColumns };

// C [kRows, kWide vectors] = (C +) A B
template <Lies kLies, int kRows, int kWide>
FASTPLM_HD void product_tile(bool add, int64_t depth, const float* a, int64_t a_stride,
                             const float* b, int64_t b_stride, float* c, int64_t c_stride) {
  Floats sum[kRows][kWide] = {};
  if (add) {
    for (int m = 0; m < kRows; ++m) {
      for (int n = 0; n < kWide; ++n) sum[m][n] = at(c + m * c_stride + n * kWidth);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Floats right[kWide];
    for (int n = 0; n < kWide; ++n) right[n] = at(b + k * b_stride + n * kWidth);
    for (int m = 0; m < kRows; ++m) {
      const float left = kLies == Lies::kByRows ? a[m * a_stride + k] : a[k * a_stride + m];
      for (int n = 0; n < kWide; ++n) sum[m][n] += left * right[n];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kWide; ++n) at(c + m * c_stride + n * kWidth) = sum[m][n];
  }
}

template <Lies kLies, int kWide>
void product_columns(bool add, int64_t rows, int64_t depth, const float* a, int64_t a_stride,
                     const float* b, int64_t b_stride, float* c, int64_t c_stride) {
  const int64_t a_row = kLies == Lies::kByRows ? a_stride : 1;
  int64_t m = 0;
  const auto tile = [&](auto tile_rows) FASTPLM_INLINE {
    product_tile<kLies, tile_rows.value, kWide>(add, depth, a + m * a_row, a_stride, b, b_stride,
                                                c + m * c_stride, c_stride);
    m += tile_rows.value;
  };
  while (m + kTileRows <= rows) tile(std::integral_constant<int, kTileRows>());
  if (m + 4 <= rows) tile(std::integral_constant<int, 4>());
  if (m + 2 <= rows) tile(std::integral_constant<int, 2>());
  if (m < rows) tile(std::integral_constant<int, 1>());
}

// C [rows, columns] = (C +) A [rows, depth] B [depth, columns]; columns are whole vectors. An element of C
// is always one chain of multiply-adds, so a row's bits do not depend on its neighbours.
template <Lies kLies>
FASTPLM_HD void product(bool add, int64_t rows, int64_t columns, int64_t depth, const float* a,
                        int64_t a_stride, const float* b, int64_t b_stride, float* c,
                        int64_t c_stride) {
  const int64_t a_step = kLies == Lies::kByRows ? 1 : a_stride;
  int64_t k = 0;
  do {
    const int64_t steps = std::min(kSlice, depth - k);
    const float* a_k = a + k * a_step;
    const float* b_k = b + k * b_stride;
    int64_t n = 0;
    for (; n + kTileWide * kWidth <= columns; n += kTileWide * kWidth) {
      product_columns<kLies, kTileWide>(add, rows, steps, a_k, a_stride, b_k + n, b_stride, c + n,
                                        c_stride);
    }
    if constexpr (kTileWide == 4) {
      for (; n + 2 * kWidth <= columns; n += 2 * kWidth) {
        product_columns<kLies, 2>(add, rows, steps, a_k, a_stride, b_k + n, b_stride, c + n,
                                  c_stride);
      }
    }
    if (n < columns) {
      product_columns<kLies, 1>(add, rows, steps, a_k, a_stride, b_k + n, b_stride, c + n, c_stride);
    }
    add = true;
    k += steps;
  } while (k < depth);
}

// --- rows -----------------------------------------------------------------------------------------

// Rows are prefetched this far ahead: a head's rows are short and far apart, so the CPU does not
// prefetch them itself.
constexpr int64_t kRowsAhead = 16;

// kNear is 3 for the first-level cache, 2 for the second.
template <int kToWrite, int kNear = 3, typename T>
FASTPLM_HD void fetch_row(const T* row, int64_t width) {
  constexpr int64_t kLineBytes = 64;
  for (int64_t byte = 0; byte < width * int64_t{sizeof(T)}; byte += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(row) + byte, kToWrite, kNear);
  }
}

// Rows [count, width] of a tensor as fp32, filled up with zeros to `padded` columns, times a factor.
template <typename T>
FASTPLM_HD void load_rows(const T* from, int64_t stride, int64_t count, int64_t width,
                          int64_t padded, float factor, float* to, int64_t to_stride) {
  for (int64_t row = 0; row < count; ++row, from += stride, to += to_stride) {
    fetch_row<0>(from + kRowsAhead * stride, width);
    for (int64_t d = 0; d < width; ++d) to[d] = static_cast<float>(from[d]) * factor;
    for (int64_t d = width; d < padded; ++d) to[d] = 0.0f;
  }
}

template <typename T>
FASTPLM_HD void store_rows(const float* from, int64_t from_stride, int64_t count, int64_t width,
                           float factor, T* to, int64_t stride) {
  for (int64_t row = 0; row < count; ++row, from += from_stride, to += stride) {
    fetch_row<1>(to + kRowsAhead * stride, width);
    for (int64_t d = 0; d < width; ++d) to[d] = static_cast<T>(from[d] * factor);
  }
}

// Scores [rows, columns] = Q [rows, width] K [columns, width]^T for few rows, where it would cost
// more to transpose K for a product. Prefetches `fetched` elements of each row of K and of `next`,
// which is read after it.
template <typename T>
FASTPLM_HD void inner_products(int64_t rows, int64_t columns, int64_t width, const float* query,
                               int64_t query_stride, const float* key, int64_t key_stride,
                               Strided<const T> next, int64_t fetched, float* scores,
                               int64_t scores_stride) {
  for (int64_t j = 0; j < columns; ++j) {
    fetch_row<0>(key + (j + kRowsAhead) * key_stride, fetched);
    fetch_row<0, 2>(next.data + j * next.stride, fetched);
    for (int64_t i = 0; i < rows; ++i) {
      scores[i * scores_stride + j] = dot(width, query + i * query_stride, key + j * key_stride);
    }
  }
}

// --- softmax --------------------------------------------------------------------------------------

// Rows [first, end) of a tensor become 0.
template <typename T>
FASTPLM_HD void zero_rows(Strided<T> rows, int64_t first, int64_t end, int64_t width) {
  for (int64_t j = first; j < end; ++j) {
    std::fill(rows.data + j * rows.stride, rows.data + j * rows.stride + width, T(0.0f));
  }
}

// Vector j of a row of scores: products q k [columns], scaled, plus the bias; minus infinity where
// a key is masked, or none of the `count` from `from` on. With kAll there are no such keys.
template <bool kBias, bool kAll>
struct Scores {
  FASTPLM_HD Floats operator()(int64_t j) const {
    // The product is scaled, not the query: only the rounding of large scores matters.
    Floats score = at(products + j) * scale;
    if (kBias) score += at(bias + j);
    if (!kAll) {
      Ints lane, unseen;
      for (int i = 0; i < kWidth; ++i) lane[i] = i;
      std::memcpy(&unseen, masked + j, sizeof(unseen));
      const Ints place = lane + static_cast<int32_t>(j - from);  // below 0 it is a large number
      unseen |= reinterpret_cast<const UInts&>(place) >= static_cast<uint32_t>(count);
      choose(unseen, Floats{} - kInfinity, score, score);
    }
    return score;
  }

  const float* products;
  float scale;
  const float* bias;
  const int32_t* masked;
  int64_t from, count;
};

// --- one head -------------------------------------------------------------------------------------

// What a HeadPass adds to the products of queries and keys, if they are all of a score.
struct NoPositions {
  static constexpr bool kAny = false;
};

// A pass over one head: its keys in fp32, and scratch for a block of queries.
template <typename T, typename Positions = NoPositions>
class HeadPass {
 public:
  // The most floats of scratch memory that a pass takes: matrices with a row for each key (also
  // transposed), score or query, and random bytes, masks and biases.
  static int64_t floats(int64_t seqlen_q, int64_t seqlen_k, int64_t dim, bool backward) {
    const int64_t columns = round_up(seqlen_k, kDrawnKeys);
    const int64_t width = round_up(dim, kWidth);
    const int64_t by_key = columns * odd_lines(width), transposed = width * odd_lines(columns);
    const int64_t by_score = kBlock * odd_lines(columns), by_query = kBlock * odd_lines(width);
    const int64_t others = 3 * columns + kWidth + kBlock * columns / 4 + 2 * (seqlen_q + columns);
    const int64_t pieces = 18;  // calls of Scratch::next(), or more
    return (backward ? 3 : 2) * by_key + (backward ? 2 : 1) * transposed +
           (backward ? 3 : 1) * by_score + 5 * by_query + others + pieces * kCacheLine;
  }

  FASTPLM_HD HeadPass(const Head<T>& head, Scratch& scratch, Positions* positions = nullptr)
      : head_(head),
        positions_(positions),
        width_(round_up(head.dim, kWidth)),
        row_(odd_lines(width_)) {
    seen_ = head.seqlen_k;
    if (head.right >= 0 && !head.is_causal) seen_ = std::min(seen_, head.seqlen_q + head.right);
    first_seen_ = 0;
    if (head.key_mask != nullptr) {
      while (seen_ > 0 && !head.key_mask[seen_ - 1]) --seen_;
      while (first_seen_ < seen_ && !head.key_mask[first_seen_]) ++first_seen_;
    }
    columns_ = round_up(seen_, kWidth);
    line_ = odd_lines(columns_);
    shift_ = head.seqlen_k - head.seqlen_q;
    masked_ = reinterpret_cast<int32_t*>(scratch.next(columns_));
    for (int64_t j = 0; j < columns_; ++j) {
      masked_[j] = j < seen_ && (head.key_mask == nullptr || head.key_mask[j]) ? 0 : -1;
    }
    all_seen_ = std::find(masked_, masked_ + seen_, -1) == masked_ + seen_;
    if (head.left >= 0 && !all_seen_) {
      next_seen_ = reinterpret_cast<int32_t*>(scratch.next(columns_ + 1));
      next_seen_[columns_] = static_cast<int32_t>(columns_);
      for (int64_t j = columns_ - 1; j >= 0; --j) {
        next_seen_[j] = masked_[j] ? next_seen_[j + 1] : static_cast<int32_t>(j);
      }
    }
    if (head.attn_mask.data != nullptr) {
      row_masked_ = reinterpret_cast<int32_t*>(scratch.next(columns_));
    }
    bytes_ = reinterpret_cast<uint8_t*>(scratch.next(kBlock * drawn() / 4));
    query_ = scratch.next(kBlock * row_);
    scores_ = scratch.next(kBlock * line_);
    if constexpr (Positions::kAny) {
      float* rows = scratch.next(columns_ * row_);
      load_keys(head.key, 0, seen_, rows);
      std::fill(rows + seen_ * row_, rows + columns_ * row_, 0.0f);
      key_ = {rows, row_};
      key_t_ = transposed(head.key, scratch);
    } else if (head.longest_q > kFewQueries) {
      key_t_ = transposed(head.key, scratch);
    } else {
      key_ = rows_by_key(head.key, scratch);
    }
    if (head.bias.weight != nullptr) load_bias(scratch);
  }

  // O = c * drop(P) V
  FASTPLM_HD void forward(Strided<T> out, Scratch& scratch) {
    const Strided<const float> value = rows_by_key(head_.value, scratch);
    float* result = scratch.next(kBlock * row_);
    for (int64_t first = 0; first < head_.seqlen_q; first += kBlock) {
      const int64_t rows = std::min(kBlock, head_.seqlen_q - first);
      const int64_t columns = block_columns(first, rows), begin = block_begin(first, columns);
      load_products(first, rows, begin, columns);
      // A row's sum needs its largest score. All rows find their largest first, so that no row
      // waits.
      for_rows<false>(first, rows, begin, columns, [&](const auto& scores, float*, Softmax& softmax) {
        softmax.most = largest_of(scores, columns - begin);
      });
      for_rows<true>(first, rows, begin, columns, [&](const auto& scores, float* row, Softmax& softmax) {
        softmax.inverse_sum = 1.0f / weights_of(scores, columns - begin, softmax.most, 1.0f, row);
      });
      if (head_.dropout.threshold > 0) {
        draw_bytes(first, rows, begin, columns);
        drop(scores_, rows, begin, columns);
      }
      product<Lies::kByRows>(false, rows, width_, std::min(columns, seen_) - begin, scores_ + begin,
                             line_, value.data + begin * value.stride, value.stride, result, row_);
      for (int64_t i = 0; i < rows; ++i) {
        store_rows(result + i * row_, row_, 1, head_.dim, rescale() * head_.softmax[first + i].inverse_sum,
                   out.data + (first + i) * out.stride, out.stride);
      }
    }
  }

  // dV = c * drop(P)^T dO     dP = c * drop(dO V^T)     dS = P * (dP - rowsum(P * dP))
  // dQ = scale * dS K         dK = scale * dS^T Q       dbias[bucket] += sums of dS
  // The scale is part of dS, so that the products are the gradients and need no further pass.
  FASTPLM_HD void backward(Strided<const T> grad_out, Strided<T> grad_query, Strided<T> grad_key,
                           Strided<T> grad_value, double* grad_bias, Scratch& scratch) {
    if (key_.data == nullptr) key_ = rows_by_key(head_.key, scratch);
    const float* value_t = transposed(head_.value, scratch);
    const Strided<float> dk = room_for(grad_key, scratch.next(columns_ * row_));
    const Strided<float> dv = room_for(grad_value, scratch.next(columns_ * row_));
    float* dq_room = scratch.next(kBlock * row_);
    float* upstream = scratch.next(kBlock * row_);
    float* ds = scratch.next(kBlock * line_);
    float* used = scores_;
    if (head_.dropout.threshold > 0) used = scratch.next(kBlock * line_);
    int64_t begun = 0;  // keys that a block has seen
    for (int64_t first = 0; first < head_.seqlen_q; first += kBlock) {
      const int64_t rows = std::min(kBlock, head_.seqlen_q - first);
      const int64_t columns = block_columns(first, rows), begin = block_begin(first, columns);
      const int64_t keys = std::min(columns, seen_);
      load_rows(grad_out.data + first * grad_out.stride, grad_out.stride, rows, head_.dim, width_,
                rescale(), upstream, row_);
      load_products(first, rows, begin, columns);
      for_rows<true>(first, rows, begin, columns, [&](const auto& scores, float* row, const Softmax& softmax) {
        weights_of(scores, columns - begin, softmax.most, softmax.inverse_sum, row);
      });
      product<Lies::kByRows>(false, rows, columns - begin, width_, upstream, row_, value_t + begin,
                             line_, ds + begin, line_);
      if (head_.dropout.threshold > 0) {
        draw_bytes(first, rows, begin, columns);
        for (int64_t i = 0; i < rows; ++i) {
          std::copy(scores_ + i * line_ + begin, scores_ + i * line_ + columns, used + i * line_ + begin);
        }
        drop(used, rows, begin, columns);
        drop(ds, rows, begin, columns);
      }
      add_by_key(begun, begin, keys, rows, used, upstream, dv);
      for (int64_t i = 0; i < rows; ++i) {
        float *row = ds + i * line_ + begin, *probs = scores_ + i * line_ + begin;
        const float delta = dot<kTogether>(columns - begin, probs, row);
        if (grad_bias != nullptr) add_distances(probs, row, delta, first + i, begin, keys);
        softmax_backward_row(probs, delta, head_.scale, columns - begin, row);
      }
      add_by_key(begun, begin, keys, rows, ds, query_, dk);
      const Strided<T> block{grad_query.data + first * grad_query.stride, grad_query.stride};
      const Strided<float> dq = room_for(block, dq_room);
      product<Lies::kByRows>(false, rows, width_, keys - begin, ds + begin, line_,
                             key_.data + begin * key_.stride, key_.stride, dq.data, dq.stride);
      if constexpr (Positions::kAny) {
        positions_->backward(first, rows, columns, keys, ds, line_, query_, key_, dq, dk);
      }
      move_rows(dq, rows, block);
      begun = std::max(begun, keys);
    }
    move_rows(dk, begun, grad_key);
    move_rows(dv, begun, grad_value);
    for (const Strided<T>& grad : {grad_key, grad_value}) zero_rows(grad, begun, head_.seqlen_k, head_.dim);
    if (grad_bias != nullptr) {
      for (int64_t place = 0; place < head_.seqlen_q + seen_ - 1; ++place) {
        grad_bias[bucket_of(place)] += distance_sums_[place];
      }
    }
  }

 private:
  // The rows of the keys up to the last that is seen, as padded fp32. For few queries a copy would
  // cost as much as the rest, so the tensor's own rows are used if they are the same.
  FASTPLM_HD Strided<const float> rows_by_key(Strided<const T> from, Scratch& scratch) {
    if constexpr (std::is_same_v<T, float>) {
      if (head_.longest_q <= kFewQueries && head_.dim == width_ && all_seen_) return from;
    }
    float* to = scratch.next(columns_ * row_);
    load_keys(from, 0, seen_, to);
    return {to, row_};
  }

  // Masked keys become 0, as they may hold NaN.
  FASTPLM_HD void load_keys(Strided<const T> from, int64_t first, int64_t count, float* to) {
    load_rows(from.data + first * from.stride, from.stride, count, head_.dim, width_, 1.0f, to,
              row_);
    if (head_.key_mask == nullptr) return;
    for (int64_t j = 0; j < count; ++j) {
      if (masked_[first + j]) std::fill(to + j * row_, to + j * row_ + width_, 0.0f);
    }
  }

  // [Dw, columns] of the keys, and 0 beyond the last that is seen.
  FASTPLM_HD const float* transposed(Strided<const T> from, Scratch& scratch) {
    float* to = scratch.next(width_ * line_);
    float* rows = query_;  // serves as scratch, as it is not in use yet
    for (int64_t first = 0; first < columns_; first += kWidth) {
      const int64_t count = std::min(kWidth, seen_ - first);
      load_keys(from, first, count, rows);
      for (int64_t j = first; j < first + count; ++j) {
        fetch_row<0>(head_.value.data + j * head_.value.stride, head_.dim);  // needed next
      }
      std::fill(rows + count * row_, rows + kWidth * row_, 0.0f);
      for (int64_t d = 0; d < width_; d += kWidth) {
        Floats square[kWidth];
        for (int64_t i = 0; i < kWidth; ++i) square[i] = at(rows + i * row_ + d);
        transpose(square);
        for (int64_t i = 0; i < kWidth; ++i) at(to + (d + i) * line_ + first) = square[i];
      }
    }
    return to;
  }

  // Where a product writes rows of a tensor: in the tensor if they are unpadded fp32, or in
  // scratch.
  FASTPLM_HD Strided<float> room_for(Strided<T> rows, float* room) {
    if constexpr (std::is_same_v<T, float>) {
      if (head_.dim == width_) return rows;
    }
    return {room, row_};
  }

  FASTPLM_HD void move_rows(Strided<float> from, int64_t count, Strided<T> to) {
    if (static_cast<const void*>(from.data) == to.data) return;
    store_rows(from.data, from.stride, count, head_.dim, 1.0f, to.data, to.stride);
  }

  // C [keys, Dw] += A [rows, keys]^T B [rows, Dw] of the keys from `begin` on; rows of C from `begun` on have no
  // sums yet.
  FASTPLM_HD void add_by_key(int64_t begun, int64_t begin, int64_t keys, int64_t rows, const float* a,
                             const float* b, Strided<float> c) {
    zero_rows(c, begun, begin, width_);
    begun = std::max(std::min(begun, keys), begin);
    product<Lies::kByColumns>(true, begun - begin, width_, rows, a + begin, line_, b, row_,
                              c.data + begin * c.stride, c.stride);
    product<Lies::kByColumns>(false, keys - begun, width_, rows, a + begun, line_, b, row_,
                              c.data + begun * c.stride, c.stride);
  }

  // The number of keys, in whole vectors, that any of these queries may see.
  FASTPLM_HD int64_t block_columns(int64_t first, int64_t rows) const {
    if (head_.attn_mask.data == nullptr) return round_up(limit(first + rows - 1), kWidth);
    int64_t end = 0;
    for (int64_t i = first; i < first + rows; ++i) {
      const bool* mask = head_.attn_mask.data + i * head_.attn_mask.stride;
      int64_t j = limit(i);
      for (uint64_t eight = 0; j - 8 >= end; j -= 8) {
        std::memcpy(&eight, mask + j - 8, 8);
        if (eight != 0) break;
      }
      while (j > end && !mask[j - 1]) --j;
      end = std::max(end, j);
    }
    return round_up(end, kWidth);
  }

  // The first key, in whole vectors, that any query from `first` on may see.
  FASTPLM_HD int64_t block_begin(int64_t first, int64_t columns) const {
    return std::min(from(first), std::min(columns, seen_)) / kWidth * kWidth;
  }

  // Writes row_masked_ from `begin` on, the keys that either mask leaves out for query i. Returns whether any key
  // below `columns` is left out, and whether all from `from` to `end` are.
  FASTPLM_HD std::pair<bool, bool> mask_row(int64_t i, int64_t begin, int64_t columns, int64_t from, int64_t end) {
    const bool* mask = head_.attn_mask.data + i * head_.attn_mask.stride;
    const int64_t keys = std::min(columns, seen_);
    int32_t any = 0, all = -1;
    for (int64_t j = begin; j < keys; ++j) {
      row_masked_[j] = masked_[j] | (static_cast<int32_t>(mask[j]) - 1);
      any |= row_masked_[j];
    }
    for (int64_t j = from; j < end; ++j) all &= row_masked_[j];
    std::copy(masked_ + keys, masked_ + columns, row_masked_ + keys);
    return {any != 0 || keys < columns, all != 0};
  }

  // Query i sees only keys below it ...
  FASTPLM_HD int64_t limit(int64_t i) const {
    if (!head_.is_causal && head_.right < 0) return seen_;
    return std::max<int64_t>(0, std::min(seen_, i + 1 + (head_.is_causal ? shift_ : head_.right)));
  }

  // ... and none before it.
  FASTPLM_HD int64_t from(int64_t i) const {
    return head_.left < 0 ? 0 : std::max<int64_t>(0, i + (head_.is_causal ? shift_ : 0) - head_.left);
  }

  FASTPLM_HD float rescale() const {
    const uint32_t kept = 256 - head_.dropout.threshold;
    return 256.0f / static_cast<float>(std::max<uint32_t>(kept, 1));
  }

  // Leaves Q K^T in scores_ and Q in query_.
  FASTPLM_HD void load_products(int64_t first, int64_t rows, int64_t begin, int64_t columns) {
    load_rows(head_.query.data + first * head_.query.stride, head_.query.stride, rows, head_.dim,
              width_, 1.0f, query_, row_);
    if (key_t_ != nullptr) {
      product<Lies::kByRows>(false, rows, columns - begin, width_, query_, row_, key_t_ + begin, line_,
                             scores_ + begin, line_);
    } else {
      // If keys are read in place, the forward also reads values in place, so prefetch them. A copy
      // is in the caches already.
      const bool in_place = static_cast<const void*>(key_.data) == head_.key.data;
      const Strided<const T> next{head_.value.data + begin * head_.value.stride, head_.value.stride};
      inner_products(rows, std::min(columns, seen_) - begin, width_, query_, row_, key_.data + begin * key_.stride,
                     key_.stride, next, in_place ? head_.dim : 0, scores_ + begin, line_);
    }
    if constexpr (Positions::kAny) {
      positions_->add(first, rows, columns, query_, row_, key_.data, scores_, line_);
    }
  }

  // Calls function(scores, row, softmax) for each query of a block. The row of a query that may
  // attend to nothing becomes 0. With kFetch the next head is prefetched meanwhile.
  template <bool kFetch, typename Function>
  FASTPLM_HD void for_rows(int64_t first, int64_t rows, int64_t begin, int64_t columns, const Function& function) {
    const float scale = head_.scale;
    for (int64_t i = first; i < first + rows; ++i) {
      float* row = scores_ + (i - first) * line_ + begin;
      Softmax& softmax = head_.softmax[i];
      const int64_t start = std::min(from(i), columns), end = limit(i);
      if (kFetch) fetch_next_head(i);
      int64_t seen = head_.left < 0 ? first_seen_ : start;  // the first key that is not masked
      if (next_seen_ != nullptr) seen = next_seen_[start];
      bool all = all_seen_ && start <= begin && end >= columns, none = end <= seen;
      const int32_t* masked = masked_ + begin;
      if (row_masked_ != nullptr) {
        const auto [any_masked, all_masked] = mask_row(i, begin, columns, start, std::min(end, columns));
        all = all && !any_masked;
        none = all_masked;
        masked = row_masked_ + begin;
      }
      const float* bias = distances_ + head_.seqlen_q - 1 - i + begin;
      const int64_t first_key = start - begin, keys = std::max<int64_t>(0, end - start);
      if (none) {
        std::fill(row, row + columns - begin, 0.0f);
        softmax = {0.0f, 0.0f};
      } else if (distances_ == nullptr && all) {
        function(Scores<false, true>{row, scale, bias, masked, first_key, keys}, row, softmax);
      } else if (distances_ == nullptr) {
        function(Scores<false, false>{row, scale, bias, masked, first_key, keys}, row, softmax);
      } else if (all) {
        function(Scores<true, true>{row, scale, bias, masked, first_key, keys}, row, softmax);
      } else {
        function(Scores<true, false>{row, scale, bias, masked, first_key, keys}, row, softmax);
      }
    }
  }

  FASTPLM_HD void fetch_next_head(int64_t row) const {
    if (row >= head_.prefetch_rows) return;
    for (const Strided<const T>& rows : head_.prefetch) {
      if (rows.data != nullptr) fetch_row<0, 2>(rows.data + row * rows.stride, head_.dim);
    }
  }

  // grad = factor * P * (grad - delta)
  FASTPLM_HD void softmax_backward_row(const float* probs, float delta, float factor,
                                       int64_t columns, float* grad) {
    for (int64_t j = 0; j < columns; j += kWidth) {
      at(grad + j) = at(probs + j) * factor * (at(grad + j) - delta);
    }
  }

  FASTPLM_HD int64_t drawn() const { return round_up(seen_, kDrawnKeys); }

  // The bytes of fastplm/reference/attention.py's dropout_keep_mask.
  FASTPLM_HD void draw_bytes(int64_t first, int64_t rows, int64_t begin, int64_t columns) {
    constexpr int kDraws = 16;
    const int64_t stride = drawn();
    begin = begin / kDrawnKeys * kDrawnKeys;
    const int64_t draws = (round_up(columns, kDrawnKeys) - begin) / kKeysOfADraw;
    const int64_t first_call = (begin + head_.dropout.first_key) / kKeysOfADraw;
    const Dropout& dropout = head_.dropout;
    for (int64_t at = 0; at < rows * draws; at += kDraws) {
      WordLanes<kDraws> counter;
      for (int lane = 0; lane < kDraws; ++lane) {
        const uint32_t call = static_cast<uint32_t>(first_call + (at + lane) % draws);
        counter.x[lane] = static_cast<uint32_t>(first + (at + lane) / draws);
        counter.y[lane] = static_cast<uint32_t>(dropout.sample_index);
        counter.z[lane] = static_cast<uint32_t>(dropout.sample_index >> 32);
        counter.w[lane] = (call << 12 | dropout.head) << 4 | static_cast<uint32_t>(Stream::kDropout);
      }
      philox4x32<kDraws, kDropoutRounds>(dropout.seed, counter);
      for (int lane = 0; lane < kDraws && at + lane < rows * draws; ++lane) {
        const int64_t call = (at + lane) % draws;
        uint8_t* bytes = bytes_ + (at + lane) / draws * stride + begin + call / 4 * 64 + call % 4 * 2;
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

  FASTPLM_HD void drop(float* row, int64_t rows, int64_t begin, int64_t columns) {
    const int64_t stride = drawn();
    const uint32_t threshold = head_.dropout.threshold;
    for (int64_t i = 0; i < rows; ++i, row += line_) {
      const uint8_t* bytes = bytes_ + i * stride;
      for (int64_t j = begin; j < columns; ++j) row[j] = bytes[j] < threshold ? 0.0f : row[j];
    }
  }

  // The bias of key j and query i stands at j - i + Tq - 1.
  FASTPLM_HD void load_bias(Scratch& scratch) {
    const int64_t length = head_.seqlen_q + columns_;
    distances_ = scratch.next(length);
    distance_sums_ = scratch.next(length);
    for (int64_t i = 0; i < length; ++i) {
      distances_[i] = head_.bias.weight[bucket_of(i) * head_.bias.heads];
      distance_sums_[i] = 0.0f;
    }
  }

  FASTPLM_HD int64_t bucket_of(int64_t place) const {
    const int64_t furthest = head_.bias.furthest;
    const int64_t distance =
        place - (head_.seqlen_q - 1) - (head_.is_causal ? shift_ : int64_t{0});
    return head_.bias.bucket[std::clamp(distance, -furthest, furthest) + furthest];
  }

  FASTPLM_HD void add_distances(const float* probs, const float* grad, float delta, int64_t i,
                                int64_t begin, int64_t keys) {
    float* sums = distance_sums_ + head_.seqlen_q - 1 - i + begin;
    for (int64_t j = 0; j < keys - begin; ++j) sums[j] += probs[j] * (grad[j] - delta);
  }

  const Head<T>& head_;
  Positions* positions_;
  const int64_t width_;                   // Dw
  const int64_t row_;                     // floats from a row of Dw to the next
  int64_t seen_;                          // keys up to the last that is not masked
  int64_t first_seen_;                    // the first key that is not masked
  bool all_seen_;                         // whether no key below seen_ is masked
  int64_t columns_;                       // seen_ in whole vectors
  int64_t line_;                          // floats from a row of columns to the next
  int64_t shift_;
  int32_t* masked_;                       // [columns], -1: masked
  int32_t* next_seen_ = nullptr;          // [columns + 1], the first key from here on that is not masked; null: this one
  int32_t* row_masked_ = nullptr;         // [columns], masked_ of one query; null: masked_ itself
  uint8_t* bytes_;                         // [kBlock, columns rounded up to kDrawnKeys]
  float* query_;                          // [kBlock, Dw]
  float* scores_;                         // [kBlock, columns]
  Strided<const float> key_ = {};         // [seen, Dw]; null in a forward of many queries
  const float* key_t_ = nullptr;          // [Dw, columns]; null for few queries
  float* distances_ = nullptr;            // [Tq + columns]
  float* distance_sums_ = nullptr;        // [Tq + columns]
};

}  // namespace fastplm::FASTPLM_LEVEL
