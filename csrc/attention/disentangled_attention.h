// DeBERTa's terms of positions in the scores of one head, forward and backward; included once a level, after
// attention.h, whose HeadPass calls them for each block of queries.
//
//   S[i, j] += q_i . K(j - i) + k_j . Q(i - j)
//
// K and Q have a row for each distance, in the order in which it grows along a row of S, or along a column: so a
// block's products are bands, and row i of S adds a piece of row i of the first band that begins one place earlier
// than that of row i - 1. No element is gathered one by one.
//
//   dq_i += sums of dS K    dk_j += sums of dS Q    dK(x) += sums of dS q    dQ(y) += sums of dS k

namespace fastplm::FASTPLM_LEVEL {

// A term: the rows of its table by place, the distance plus reach - 1.
struct Term {
  const float* by_place = nullptr;   // [places, Dw]; null: there is no such term
  const float* by_column = nullptr;  // [Dw, places], for the products of scores
  float* grad = nullptr;             // [places, Dw], sums of gradients, null in a forward
};

// A position table [buckets, H, D], the rows of one head.
template <typename T>
struct Table {
  const T* data;  // null: there is none
  int64_t stride;
  float* grad;  // [buckets, D]; null in a forward
};

class Positions {
 public:
  static constexpr bool kAny = true;

  // The floats of scratch memory, for sequences up to this length.
  static int64_t floats(int64_t longest, int64_t dim, bool backward) {
    const int64_t reach = round_up(longest, kWidth), width = round_up(dim, kWidth);
    const int64_t places = places_of(reach), row = odd_lines(width);
    const int64_t bands = (kBlock + kKeys) * odd_lines(reach + kBlock + 2 * kWidth);
    const int64_t pieces = 8;  // calls of Scratch::next()
    return 2 * ((backward ? 2 : 1) * places * row + width * odd_lines(places)) + bands +
           pieces * kCacheLine;
  }

  // bucket points to that of distance 0 of a query and a key, i - j.
  template <typename T>
  Positions(const Table<T>& key, const Table<T>& query, const int64_t* bucket, int64_t longest,
            int64_t dim, Scratch& scratch)
      : bucket_(bucket),
        reach_(round_up(longest, kWidth)),
        dim_(dim),
        width_(round_up(dim, kWidth)),
        row_(odd_lines(width_)),
        line_(odd_lines(places_of(reach_))),
        band_line_(odd_lines(reach_ + kBlock + 2 * kWidth)) {
    key_ = load(key, -1, scratch);
    query_ = load(query, 1, scratch);
    band_ = scratch.next(kBlock * band_line_);
    key_band_ = scratch.next(kKeys * band_line_);
  }

  // Adds the terms of queries [first, first + rows) and keys [0, columns) to their products.
  FASTPLM_HD void add(int64_t first, int64_t rows, int64_t columns, const float* query,
                      int64_t row, const float* key, float* scores, int64_t line) {
    if (key_.by_place != nullptr) {
      const int64_t x = reach_ - first - rows;
      product<Lies::kByRows>(false, rows, round_up(columns + rows - 1, kWidth), width_, query, row,
                             key_.by_column + x, line_, band_, band_line_);
      for (int64_t i = 0; i < rows; ++i) {
        const float* from = band_ + i * band_line_ + rows - 1 - i;
        for (int64_t j = 0; j < columns; j += kWidth) at(scores + i * line + j) += at(from + j);
      }
    }
    if (query_.by_place == nullptr) return;
    for (int64_t j = 0; j < columns; j += kKeys) {
      const int64_t count = std::min(kKeys, columns - j);
      const int64_t y = reach_ + first - j - count;
      product<Lies::kByRows>(false, count, round_up(round_up(rows, kWidth) + count - 1, kWidth),
                             width_, key + j * row, row, query_.by_column + y, line_, key_band_,
                             band_line_);
      for_squares(rows, count, [&](int64_t i, int64_t most, int64_t t, float* band) {
        Floats square[kWidth];
        for (int64_t n = 0; n < kWidth; ++n) square[n] = at(band + n * (band_line_ - 1));
        transpose(square);
        for (int64_t n = 0; n < most; ++n) at(scores + (i + n) * line + j + t) += square[n];
      });
    }
  }

  // Adds what the gradient ds of the products gives to those of queries and keys, and to the sums.
  FASTPLM_HD void backward(int64_t first, int64_t rows, int64_t columns, int64_t keys,
                           const float* ds, int64_t line, const float* query,
                           Strided<const float> key, Strided<float> dq, Strided<float> dk) {
    const int64_t row = key.stride;
    if (key_.by_place != nullptr) {
      const int64_t x = reach_ - first - rows, places = columns + rows - 1;
      for (int64_t i = 0; i < rows; ++i) {
        float* to = band_ + i * band_line_;
        const int64_t begin = rows - 1 - i;
        std::fill(to, to + begin, 0.0f);
        std::copy(ds + i * line, ds + i * line + columns, to + begin);
        std::fill(to + begin + columns, to + places, 0.0f);
      }
      product<Lies::kByRows>(true, rows, width_, places, band_, band_line_,
                             key_.by_place + x * row_, row_, dq.data, dq.stride);
      product<Lies::kByColumns>(true, places, width_, rows, band_, band_line_, query, row,
                                key_.grad + x * row_, row_);
    }
    if (query_.by_place == nullptr) return;
    for (int64_t j = 0; j < keys; j += kKeys) {
      const int64_t count = std::min(kKeys, columns - j);
      const int64_t y = reach_ + first - j - count, places = round_up(rows, kWidth) + count - 1;
      for (int64_t n = 0; n < count; ++n) {
        std::fill(key_band_ + n * band_line_, key_band_ + n * band_line_ + places, 0.0f);
      }
      for_squares(rows, count, [&](int64_t i, int64_t most, int64_t t, float* band) {
        Floats square[kWidth] = {};
        for (int64_t n = 0; n < most; ++n) square[n] = at(ds + (i + n) * line + j + t);
        transpose(square);
        for (int64_t n = 0; n < kWidth; ++n) at(band + n * (band_line_ - 1)) = square[n];
      });
      product<Lies::kByRows>(true, std::min(count, keys - j), width_, places, key_band_, band_line_,
                             query_.by_place + y * row_, row_, dk.data + j * dk.stride, dk.stride);
      product<Lies::kByColumns>(true, places, width_, count, key_band_, band_line_,
                                key.data + j * row, row, query_.grad + y * row_, row_);
    }
  }

  // Adds the sums of a term, by bucket in the order of the distances, to the gradient of its table.
  template <typename T>
  void fold(const Table<T>& key, const Table<T>& query) const {
    fold(key, key_, -1);
    fold(query, query_, 1);
  }

 private:
  // Keys of a block of the second band: few, as its width is that of queries and keys together.
  static constexpr int64_t kKeys = kWidth == 16 ? 16 : 24;

  // Room for the products of whole vectors.
  static int64_t places_of(int64_t reach) { return 2 * reach + 3 * kWidth; }

  // The row of place x; sign -1 where distances fall with the place.
  int64_t row_of(int64_t x, int64_t sign) const { return bucket_[sign * (x - (reach_ - 1))]; }

  template <typename T>
  Term load(const Table<T>& table, int64_t sign, Scratch& scratch) {
    if (table.data == nullptr) return {};
    const int64_t places = places_of(reach_), used = 2 * reach_ - 1;
    float* rows = scratch.next(places * row_);
    float* columns = scratch.next(width_ * line_);
    for (int64_t x = 0; x < used; ++x) {
      load_rows(table.data + row_of(x, sign) * table.stride, 0, 1, dim_, width_, 1.0f,
                rows + x * row_, row_);
    }
    std::fill(rows + used * row_, rows + places * row_, 0.0f);
    for (int64_t x = 0; x < places; x += kWidth) {
      for (int64_t d = 0; d < width_; d += kWidth) {
        Floats square[kWidth];
        for (int64_t n = 0; n < kWidth; ++n) square[n] = at(rows + (x + n) * row_ + d);
        transpose(square);
        for (int64_t n = 0; n < kWidth; ++n) at(columns + (d + n) * line_ + x) = square[n];
      }
    }
    float* grad = nullptr;
    if (table.grad != nullptr) {
      grad = scratch.next(places * row_);
      std::fill(grad, grad + places * row_, 0.0f);
    }
    return {rows, columns, grad};
  }

  template <typename T>
  void fold(const Table<T>& table, const Term& term, int64_t sign) const {
    if (table.grad == nullptr) return;
    for (int64_t x = 0; x < 2 * reach_ - 1; ++x) {
      float* to = table.grad + row_of(x, sign) * dim_;
      for (int64_t d = 0; d < dim_; ++d) to[d] += term.grad[x * row_ + d];
    }
  }

  // Calls function(i, most, t, band) for each square of queries [i, i + kWidth), of which `most` exist, and keys
  // [t, t + kWidth) of a block of `count`. Key t + n begins at band + n (band_line_ - 1).
  template <typename Function>
  FASTPLM_HD void for_squares(int64_t rows, int64_t count, const Function& function) {
    for (int64_t t = 0; t < count; t += kWidth) {
      for (int64_t i = 0; i < rows; i += kWidth) {
        function(i, std::min(kWidth, rows - i), t, key_band_ + t * band_line_ + count - 1 - t + i);
      }
    }
  }

  const int64_t* bucket_;
  const int64_t reach_;  // distances are below it
  const int64_t dim_, width_, row_, line_, band_line_;
  Term key_, query_;
  float* band_;      // [kBlock, places of a block of queries]
  float* key_band_;  // [kKeys, places of a block of keys]
};

}  // namespace fastplm::FASTPLM_LEVEL
