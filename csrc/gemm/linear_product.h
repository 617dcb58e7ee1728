// Products of a linear layer on PyTorch's threads: which one runs, and how it is divided. One thread computes a whole
// block of the result, always in the same order, so results do not depend on the number of threads. Included once a
// level, after the headers of the products.

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

// --- many rows ------------------------------------------------------------------------------------

template <typename Finish>
void product_packed(const Operand& a, const Operand& b, const Factor<float>* factors, int64_t count,
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

// to [filled, width] = from [rows, depth], filled up with zeros.
template <typename T>
void load_rows(const T* from, int64_t row, int64_t col, int64_t rows, int64_t depth, float* to,
               int64_t filled, int64_t width) {
  for (int64_t m = 0; m < filled; ++m, to += width) {
    const int64_t steps = m < rows ? depth : 0;
    const T* line = from + m * row;
    if (col == 1) {
      for (int64_t k = 0; k < steps; ++k) to[k] = static_cast<float>(line[k]);
    } else {
      for (int64_t k = 0; k < steps; ++k) to[k] = static_cast<float>(line[k * col]);
    }
    std::fill(to + steps, to + width, 0.0f);
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

// Rows of b are contiguous.
template <typename T, typename Finish>
void product_outer(const Operand& a, const Operand& b, const Factor<T>* factors, int64_t count,
                    int64_t out_row, const Finish& finish) {
  constexpr int64_t kTile = kMostOuterRows;
  const int64_t depth = a.columns, columns = b.columns;
  // One more cache line, so that rows do not compete for the same places in the cache.
  const int64_t stride = round_up(depth, kCacheLine) + kCacheLine;
  const int64_t share = ceil_div(columns, torch::stable::get_num_threads());
  const int64_t part = std::min(round_up(share, kFewUnit), kFewColumns);
  const int64_t parts = ceil_div(columns, part);
  const T* left = static_cast<const T*>(a.data);
  const Room<Use::kProduct> room(round_up(std::min(kFewRows, a.rows), kTile) * stride);
  float* packed = room.data;
  for (int64_t row = 0; row < a.rows; row += kFewRows) {
    const int64_t part_rows = std::min(kFewRows, a.rows - row);
    const FewRows rows{packed, round_up(part_rows, kTile), depth, stride};
    load_rows(left + row * a.row, a.row, a.col, part_rows, depth, packed, rows.rows, stride);
    in_parallel(count * parts, [&](int64_t number) {
      const Factor<T>& factor = factors[number / parts];
      const int64_t n = number % parts * part, width = std::min(part, columns - n);
      const Room<Use::kBlock> sums(2 * kFewRows * kFewColumns);
      float* c = sums.data;
      outer<kTile>(rows, factor.weight + n, b.row, width, c + kFewRows * kFewColumns, c);
      T* out = factor.out + row * out_row + n;
      store_rows(part_rows, width, c, kFewColumns, factor.bias ? factor.bias + n : nullptr, out, out_row);
      for (int64_t m = 0; m < part_rows; ++m) finish(row + m, n, width, out + m * out_row);
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
void product_streamed(const Operand& a, const Operand& b, const Factor<T>* factors, int64_t count,
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
      const int64_t row = tiles.row(first), part_rows = std::min(tiles.row(last), tiles.rows) - row;
      T* out = factor.out + (start + row) * out_row + n;
      const T* bias = factor.bias ? factor.bias + n : nullptr;
      store_rows(part_rows, columns, c, kInPlaceColumns, bias, out, out_row);
      for (int64_t m = 0; m < part_rows; ++m) finish(start + row + m, n, columns, out + m * out_row);
    });
  }
}

// --- which product --------------------------------------------------------------------------------

enum class Product { kInPlace, kStreamed, kOuter, kPacked };

// A product for a layout and dtype of B and so many rows of A or more: the last line that fits runs. To pack fp32 and to
// read it in place took the same time with so many rows, at AVX2 and AVX-512 with 384 to 3072 columns; with long slices
// of K, which AVX2 has, packing is faster later.
struct Route {
  bool by_rows, only_fp32, long_slices;
  int64_t rows;
  Product product;
};
constexpr Route kRoutes[] = {
    {false, false, false, 1, Product::kInPlace},
    {false, true, false, 384, Product::kPacked},
    {false, true, true, 384, Product::kInPlace},
    {false, true, true, 2048, Product::kPacked},
    {true, false, false, 1, Product::kStreamed},
    {true, false, false, kStreamRows + 1, Product::kOuter},
    {true, true, false, 49, Product::kPacked},
};
constexpr int64_t kShallow = 512;  // steps of K that are no long slice

template <typename T>
Product product_for(int64_t rows, const Operand& b) {
  const bool by_rows = b.col == 1;
  const bool long_slices = b.rows > kShallow && in_place_slice<T>(b.columns, b.rows) > kCopiedSlice;
  Product chosen = Product::kOuter;
  for (const Route& route : kRoutes) {
    const bool of_dtype = !route.only_fp32 || std::is_same_v<T, float>;
    if (route.by_rows == by_rows && of_dtype && (long_slices || !route.long_slices) && rows >= route.rows) {
      chosen = route.product;
    }
  }
  return chosen;
}

// out [M, N] = A B + bias for each of `count` factors, with rows of `out` out_row apart; then finish. `b`
// says the shape and the strides of the weights. No size is 0.
template <typename T, typename Finish = Nothing>
void multiply(const Operand& a, const Operand& b, const Factor<T>* factors, int64_t count,
              int64_t out_row, const Finish& finish = {}) {
  const Product product = product_for<T>(a.rows, b);
  if (product == Product::kInPlace) return product_in_place(a, b, factors, count, out_row, finish);
  if (product == Product::kStreamed) return product_streamed(a, b, factors, count, out_row, finish);
  if constexpr (std::is_same_v<T, float>) {
    if (product == Product::kPacked) return product_packed(a, b, factors, count, out_row, finish);
  }
  product_outer(a, b, factors, count, out_row, finish);
}

// --- 8 bits ---------------------------------------------------------------------------------------

constexpr int64_t kInt8Rows = 256;   // rows that a thread computes at a time
constexpr int64_t kInt8Quantized = 32768;  // numbers that are worth a thread
constexpr int64_t kInt8Most = 2048;  // rows that are quantized before they are multiplied

template <typename kTile, typename T, typename Finish>
void product_int8(const T* a, int64_t rows, int64_t depth, const Int8Factor<T>* factors, int64_t count,
                  int64_t columns, int64_t out_row, const Finish& finish) {
  using Q = typename kTile::Q;
  const int64_t steps = ceil_div(depth, kStepDepth), most = std::min(rows, kInt8Most);
  // One more cache line, so that rows do not compete for the same places in the cache.
  const int64_t stride = round_up(steps * kStepDepth, 64) + 64;
  const int64_t floats = ceil_div(most * stride * int64_t{sizeof(Q)}, int64_t{sizeof(float)});
  const Room<Use::kProduct> room(floats + 2 * most);
  const Quanta<Q> quanta{reinterpret_cast<Q*>(room.data), stride, room.data + floats,
                         reinterpret_cast<int32_t*>(room.data + floats + most)};
  for (int64_t start = 0; start < rows; start += most) {
    const int64_t part_rows = std::min(most, rows - start);
    for_ranges(part_rows, 1, ceil_div(kInt8Quantized, depth), [&](int64_t first, int64_t last) {
      Vector<float> wide(std::is_same_v<T, float> ? 0 : depth);
      for (int64_t m = first; m < last; ++m) {
        quantize_row(depth, as_floats(depth, depth, a + (start + m) * depth, wide.data()), m, quanta);
      }
    });
    const int64_t groups = ceil_div(columns, kInt8Group), blocks = ceil_div(part_rows, kInt8Rows);
    in_parallel(count * blocks * groups, [&](int64_t number) {
      Int8Factor<T> factor = factors[number / (blocks * groups)];
      factor.out += start * out_row;
      const int64_t first = number / groups % blocks * kInt8Rows;
      int8_block<kTile>(quanta, steps, factor, columns, out_row, first, std::min(first + kInt8Rows, part_rows),
                        number % groups * kInt8Group, finish);
    });
  }
}

#if FASTPLM_WIDTH >= 8
inline bool has_vnni() {
#if FASTPLM_WIDTH == 16
  static const bool has = __builtin_cpu_supports("avx512vnni") && vnni_is_allowed();
#else
  static const bool has = __builtin_cpu_supports("avxvnni") && vnni_is_allowed();
#endif
  return has;
}
#endif

// out [M, N] = A B + bias for each of `count` factors of one shape; then finish(row, column, count, values).
// A [M, K] is dense, and no size is 0.
template <typename T, typename Finish = Nothing>
void multiply_int8(const T* a, int64_t rows, int64_t depth, const Int8Factor<T>* factors, int64_t count,
                   int64_t columns, int64_t out_row, const Finish& finish = {}) {
#if FASTPLM_WIDTH >= 8
  if (has_vnni()) {
    return product_int8<VnniTile>(a, rows, depth, factors, count, columns, out_row, finish);
  }
  product_int8<WideTile>(a, rows, depth, factors, count, columns, out_row, finish);
#else
  product_int8<ScalarTile>(a, rows, depth, factors, count, columns, out_row, finish);
#endif
}

}  // namespace fastplm::FASTPLM_LEVEL
