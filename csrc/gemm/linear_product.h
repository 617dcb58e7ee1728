// Products of a linear layer by linear.h (many rows), linear_in_place.h (some) and linear_few_rows.h (few), on
// PyTorch's threads. One thread computes a whole block of the result, always in the same order, so results do
// not depend on the number of threads. Included once a level, after all three.

namespace fastplm::FASTPLM_LEVEL {

// Calls function(i) for each i below count, each on a thread that is free.
template <typename Function>
void in_parallel(int64_t count, const Function& function) {
  std::atomic<int64_t> next(0);
  parallel_for(count, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) function(i);
  });
}

// A matrix of any type and strides.
struct Operand {
  explicit Operand(const Tensor& tensor)
      : data(tensor.const_data_ptr()),
        rows(tensor.size(0)),
        columns(tensor.size(1)),
        row(tensor.stride(0)),
        col(tensor.stride(1)) {}
  Operand(const void* data, int64_t rows, int64_t columns, int64_t row, int64_t col)
      : data(data), rows(rows), columns(columns), row(row), col(col) {}
  Operand transposed() const { return {data, columns, rows, col, row}; }
  Matrix floats() const { return {static_cast<const float*>(data), row, col}; }

  const void* data;
  int64_t rows, columns, row, col;
};

// One of the weights that a matrix is multiplied by in one go, all of one shape and layout.
template <typename T>
struct Factor {
  const T* weight;
  const T* bias;  // [N], or null
  T* out;         // [M, N]
};

template <typename Finish>
void product_of_many(const Operand& a, const Operand& b, const Factor<float>* factors, int64_t count,
                     int64_t out_row, const Finish& finish) {
  const Cut cut(a.rows, b.columns, a.columns, torch::stable::get_num_threads());
  const Matrix left = a.floats();
  const Room<Use::kProduct> room(cut.packed_size());
  float* packed = room.data;
  with_height(cut, [&](auto rows) {
    in_parallel(ceil_div(cut.tiles, cut.group_tiles), [&](int64_t group) {
      const int64_t tile = group * cut.group_tiles;
      pack_tiles<rows.value>(cut, left, tile, std::min(tile + cut.group_tiles, cut.tiles), packed);
    });
    const int64_t blocks = cut.blocks_down * cut.blocks_across;
    in_parallel(count * blocks, [&](int64_t number) {
      const Factor<float>& factor = factors[number / blocks];
      const Matrix right{factor.weight, b.row, b.col};
      const Room<Use::kBlock> panels(kPanelFloats);
      block_product<rows.value>(cut, packed, right, factor.bias, factor.out, out_row, number % blocks,
                                panels.data, finish);
    });
  });
}

// --- few rows -------------------------------------------------------------------------------------

// From so many rows on it is faster to pack fp32 that lies by rows, and from so many on fp32 that lies by columns:
// there both ways took the same time at AVX2 and AVX-512, with 384 to 3072 columns.
constexpr int64_t kManyRows = 49;
constexpr int64_t kManyInPlace = 384;
// With more than kShallow steps of K and long slices (kInPlaceSlice) packing is faster later.
constexpr int64_t kShallow = 512;
constexpr int64_t kManyDeepInPlace = 2048;
// At AVX2 one row is enough: fewer sums are added up in the end than by a tile of inner. Only bf16 with 3072 columns of
// A took longer, by an eighth.
constexpr int64_t kLeastInPlace = kWidth == 8 ? 1 : kInnerRows + 1;

// A function for products of few rows, and the rows of A that it takes at a time.
template <typename T>
struct Method {
  int64_t tile;
  void (*run)(const FewRows& a, const T* b, int64_t b_stride, int64_t columns, float* slice, float* c);
};

template <typename T>
void inner_product(const FewRows& a, const T* b, int64_t b_stride, int64_t columns, float*, float* c) {
  inner(a, b, b_stride, columns, c);
}

template <int kRows, typename T>
void outer_product(const FewRows& a, const T* b, int64_t b_stride, int64_t columns, float* slice, float* c) {
  outer<kRows>(a, b, b_stride, columns, slice, c);
}

template <typename T>
Method<T> method_of(bool by_rows) {
  if (!by_rows) return {kInnerRows, inner_product<T>};
  return {kMostOuterRows, outer_product<kMostOuterRows, T>};
}

// to [filled, width] = from [rows, depth], filled up with zeros.
template <typename T>
void load_rows(const T* from, int64_t row, int64_t col, int64_t rows, int64_t depth, float* to,
               int64_t filled, int64_t width) {
  for (int64_t m = 0; m < filled; ++m, to += width) {
    const int64_t given = m < rows ? depth : 0;
    const T* line = from + m * row;
    if (col == 1) {
      for (int64_t k = 0; k < given; ++k) to[k] = static_cast<float>(line[k]);
    } else {
      for (int64_t k = 0; k < given; ++k) to[k] = static_cast<float>(line[k * col]);
    }
    std::fill(to + given, to + width, 0.0f);
  }
}

template <typename T>
void store_rows(int64_t rows, int64_t columns, const float* from, int64_t from_row, const T* bias, T* to,
                int64_t to_row) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      const float start = bias == nullptr ? 0.0f : static_cast<float>(bias[n]);
      to[m * to_row + n] = static_cast<T>(from[m * from_row + n] + start);
    }
  }
}

template <typename T, typename Finish>
void product_of_few(const Operand& a, const Operand& b, const Factor<T>* factors, int64_t count,
                    int64_t out_row, const Finish& finish) {
  const int64_t depth = a.columns, columns = b.columns;
  const bool by_rows = b.col == 1;
  const int64_t b_stride = by_rows ? b.row : b.col;
  const Method<T> method = method_of<T>(by_rows);
  // One more cache line, so that rows do not compete for the same places in the cache.
  const int64_t stride = round_up(depth, kCacheLine) + kCacheLine;
  const int64_t share = ceil_div(columns, torch::stable::get_num_threads());
  const int64_t part = std::min(round_up(share, kFewUnit), kFewColumns);
  const int64_t parts = ceil_div(columns, part);
  const T* left = static_cast<const T*>(a.data);
  const Room<Use::kProduct> room(round_up(std::min(kFewRows, a.rows), method.tile) * stride);
  float* packed = room.data;
  for (int64_t row = 0; row < a.rows; row += kFewRows) {
    const int64_t given = std::min(kFewRows, a.rows - row);
    const FewRows rows{packed, round_up(given, method.tile), depth, stride};
    load_rows(left + row * a.row, a.row, a.col, given, depth, packed, rows.rows, stride);
    in_parallel(count * parts, [&](int64_t number) {
      const Factor<T>& factor = factors[number / parts];
      const int64_t n = number % parts * part, width = std::min(part, columns - n);
      const Room<Use::kBlock> sums(2 * kFewRows * kFewColumns);
      float* c = sums.data;
      method.run(rows, factor.weight + n * (by_rows ? 1 : b_stride), b_stride, width, c + kFewRows * kFewColumns, c);
      T* out = factor.out + row * out_row + n;
      store_rows(given, width, c, kFewColumns, factor.bias ? factor.bias + n : nullptr, out, out_row);
      for (int64_t m = 0; m < given; ++m) finish(row + m, n, width, out + m * out_row);
    });
  }
}

// What is worth a thread when the sums of slices are added up, in numbers, of which the bias and `finish` of a number
// count as many as kEndCost. Columns are divided where a row's activation divides them, too.
constexpr int64_t kEndGrain = 32768;
constexpr int64_t kEndCost = 8;
constexpr int64_t kEndColumns = 64;

// Rows of b are contiguous, and those of a are kStreamRows at most.
template <typename T, typename Finish>
void product_of_slices(const Operand& a, const Operand& b, const Factor<T>* factors, int64_t count,
                       int64_t out_row, const Finish& finish) {
  const int64_t depth = a.columns, threads = torch::stable::get_num_threads();
  const int64_t slice = round_up(ceil_div(depth, ceil_div(depth, kOuterSlice)), kStreamDepth);
  const int64_t slices = ceil_div(depth, slice);
  // Whole rows of B are read fastest, but all threads should have as much to read.
  int64_t parts = 1;
  while (count * slices * parts % threads != 0 && count * slices * parts < 4 * threads) ++parts;
  const int64_t width = round_up(ceil_div(b.columns, parts), kStreamColumns);
  parts = ceil_div(b.columns, width);
  const int64_t stride = round_up(depth, kCacheLine), sum_row = parts * width, filled = a.rows == 1 ? 1 : kStreamRows;
  const Room<Use::kProduct> room(filled * (stride + count * slices * sum_row));
  load_rows(static_cast<const T*>(a.data), a.row, a.col, a.rows, depth, room.data, filled, stride);
  // The sums of a slice of a factor.
  const auto sums_of = [&](int64_t number) { return room.data + filled * (stride + number * sum_row); };
  in_parallel(count * slices * parts, [&](int64_t number) {
    const int64_t of = number / parts, k = of % slices * slice, n = number % parts * width;
    const FewRows rows{room.data + k, filled, std::min(slice, depth - k), stride};
    const auto run = filled == 1 ? stream<1, T> : stream<kStreamRows, T>;
    const T* weight = factors[of / slices].weight + k * b.row + n;
    run(rows, weight, b.row, std::min(width, b.columns - n), sums_of(of) + n, sum_row);
  });
  const int64_t grain = ceil_div(kEndGrain, count * a.rows * (slices + kEndCost) * kEndColumns);
  for_ranges(b.columns, kEndColumns, grain, [&](int64_t first, int64_t last) {
    for (int64_t i = 0; i < count; ++i) {
      const Factor<T>& factor = factors[i];
      float* sums = sums_of(i * slices) + first;
      for (int64_t other = 1; other < slices; ++other) {
        const float* more = sums_of(i * slices + other) + first;
        for (int64_t m = 0; m < a.rows; ++m) {
          for (int64_t n = 0; n < last - first; ++n) sums[m * sum_row + n] += more[m * sum_row + n];
        }
      }
      const T* bias = factor.bias ? factor.bias + first : nullptr;
      store_rows(a.rows, last - first, sums, sum_row, bias, factor.out + first, out_row);
      for (int64_t m = 0; m < a.rows; ++m) finish(m, first, last - first, factor.out + m * out_row + first);
    }
  });
}

// --- in place -------------------------------------------------------------------------------------

constexpr int64_t kInPlaceGrain = 32768;  // numbers that are worth a thread
constexpr int64_t kInPlacePacked = int64_t{1} << 20;  // numbers of A that are packed before they are multiplied

// Columns lie b.col apart.
template <typename T, typename Finish>
void product_in_place(const Operand& a, const Operand& b, const Factor<T>* factors, int64_t count,
                      int64_t out_row, const Finish& finish) {
  const int64_t depth = a.columns, threads = torch::stable::get_num_threads();
  const int64_t most = std::min(a.rows, std::max(kInPlaceRows, kInPlacePacked / QuadTiles::filled(depth)));
  const int64_t width = std::min(round_up(ceil_div(b.columns, threads), kCacheLine), kInPlaceColumns);
  const int64_t across = ceil_div(b.columns, width), slice = in_place_slice<T>(b.columns, depth);
  const Room<Use::kProduct> room(QuadTiles(most).packed_size(depth));
  for (int64_t start = 0; start < a.rows; start += most) {
    const QuadTiles tiles(std::min(most, a.rows - start));
    const T* left = static_cast<const T*>(a.data) + start * a.row;
    const int64_t grain = ceil_div(kInPlaceGrain * tiles.count, tiles.packed_size(depth));
    for_ranges(tiles.count, 1, grain, [&](int64_t first, int64_t last) {
      for (int64_t tile = first; tile < last; ++tile) {
        pack_quads(tiles, tile, left, a.row, a.col, depth, room.data + tiles.place(tile, depth));
      }
    });
    const int64_t down = ceil_div(tiles.rows, kInPlaceRows), blocks = across * down;
    // The columns of a block; null past the last one.
    const auto columns_of = [&](int64_t number) -> const T* {
      if (number >= count * blocks) return nullptr;
      return factors[number / blocks].weight + number % blocks / down * width * b.col;
    };
    in_parallel(count * blocks, [&](int64_t number) {
      const Factor<T>& factor = factors[number / blocks];
      const int64_t n = number % blocks / down * width, columns = std::min(width, b.columns - n);
      const int64_t first = tiles.count * (number % down) / down;
      const int64_t last = tiles.count * (number % down + 1) / down;
      const Room<Use::kBlock> sums(kInPlaceRows * kInPlaceColumns + kCopiedFloats);
      float *c = sums.data, *copied = c + kInPlaceRows * kInPlaceColumns;
      // The other threads take the blocks between, as a rule.
      const T* after = columns_of(number + threads);
      const T* right = columns_of(number);
      in_place_block(tiles, first, last, room.data, depth, right, b.col, columns, slice, after, copied, c);
      const int64_t row = tiles.row(first), given = std::min(tiles.row(last), tiles.rows) - row;
      T* out = factor.out + (start + row) * out_row + n;
      const T* bias = factor.bias ? factor.bias + n : nullptr;
      store_rows(given, columns, c, kInPlaceColumns, bias, out, out_row);
      for (int64_t m = 0; m < given; ++m) finish(start + row + m, n, columns, out + m * out_row);
    });
  }
}

// out [M, N] = A B + bias for each of `count` factors, with rows of `out` out_row apart; then finish. `b`
// says the shape and the strides of the weights.
template <typename T, typename Finish = Nothing>
void multiply(const Operand& a, const Operand& b, const Factor<T>* factors, int64_t count,
              int64_t out_row, const Finish& finish = {}) {
  const bool by_rows = b.col == 1;
  if constexpr (std::is_same_v<T, float>) {
    const bool deep = a.columns > kShallow && in_place_slice<T>(b.columns, a.columns) > kCopiedSlice;
    if (a.rows >= (by_rows ? kManyRows : deep ? kManyDeepInPlace : kManyInPlace)) {
      return product_of_many(a, b, factors, count, out_row, finish);
    }
  }
  if (!by_rows && a.rows >= kLeastInPlace) return product_in_place(a, b, factors, count, out_row, finish);
  if (by_rows && a.rows <= kStreamRows) return product_of_slices(a, b, factors, count, out_row, finish);
  product_of_few<T>(a, b, factors, count, out_row, finish);
}

}  // namespace fastplm::FASTPLM_LEVEL
