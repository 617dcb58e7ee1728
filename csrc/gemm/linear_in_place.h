// The product of a linear layer whose weight is read where it is.
//
//   C [M, N] = A [M, K] B [N, K]^T      A and C in fp32; B in fp32, fp16 or bf16, widened on the way
//
// A vector of A has four steps of K for each of kQuadRows rows, side by side. The same four steps of a column of
// B are loaded into all quarters of a register, so no number of B is moved before it is multiplied: with a few
// hundred rows, to pack B (linear.h) costs a tenth of the product. A sum's lanes are its four parts, which are
// added up once a slice of K.
//
//   A, packed     [k / 4] of vectors  | row 0: k k+1 k+2 k+3 | row 1: k k+1 k+2 k+3 | ...
//   B, in place   column n            |        k k+1 k+2 k+3 |        k k+1 k+2 k+3 | ...
//
// Included once a level, after vectors.h, lanes.h and linear_few_rows.h.

namespace fastplm::FASTPLM_LEVEL {

constexpr int64_t kQuad = 4;
constexpr int64_t kQuadRows = kWidth / kQuad;
// A tile has up to kMostQuads vectors of rows and kQuadColumns columns, or twice as many columns of a few
// rows: so many sums fit into the registers beside the operands.
constexpr int64_t kMostQuads = kRegisters == 32 ? 6 : 3;
constexpr int64_t kQuadColumns = 4;
// A thread computes at most so many rows and columns at a time. While it computes a slice of K, a tile's rows
// stay in the first-level cache for all columns, and the columns stay in the second for all tiles.
constexpr int64_t kInPlaceRows = 240;
constexpr int64_t kInPlaceColumns = 64;
constexpr int64_t kCopiedSlice = 384;
// A column that is copied lies so far from the next one.
constexpr int64_t kCopiedColumn = kCopiedSlice + kCacheLine;
constexpr int64_t kCopiedFloats = kInPlaceColumns * kCopiedColumn;
// Where B is not copied, a tile at AVX2 has longer slices, of fewer columns: to add up the parts of its sums after
// each slice takes longer (a tenth of a product with 1536 steps) than to read its rows from the second-level cache.
constexpr int64_t kInPlaceSlice = kWidth == 8 ? 4 * kCopiedSlice : kCopiedSlice;
constexpr int64_t kManyTilesColumns = kWidth == 8 ? 32 : kInPlaceColumns;
// So few tiles take 2 kQuadColumns columns at a time, with all steps of K. More of them in registers of 64 bytes
// would read A from the second-level cache nearly as fast as it can.
constexpr int64_t kFewTiles = kWidth == 16 ? 1 : 8;
// What is copied is prefetched so many elements ahead.
constexpr int64_t kInPlaceAhead = 128;
static_assert(kInPlaceRows % (kMostQuads * kQuadRows) == 0 && kInPlaceColumns % (2 * kQuadColumns) == 0);

// How the rows of A are cut into tiles of nearly one height.
struct QuadTiles {
  explicit QuadTiles(int64_t rows)
      : rows(rows), vectors(ceil_div(rows, kQuadRows)), count(ceil_div(vectors, kMostQuads)) {}
  int64_t first(int64_t tile) const { return vectors * tile / count; }  // vector
  int64_t height(int64_t tile) const { return first(tile + 1) - first(tile); }
  int64_t row(int64_t tile) const { return first(tile) * kQuadRows; }
  // Where a tile is in what all of them are packed to, [vectors kQuadRows, depth filled up].
  static int64_t filled(int64_t depth) { return round_up(depth, kQuad); }
  int64_t packed_size(int64_t depth) const { return vectors * kQuadRows * filled(depth); }
  int64_t place(int64_t tile, int64_t depth) const { return row(tile) * filled(depth); }

  int64_t rows, vectors, count;
};

// --- packing --------------------------------------------------------------------------------------

template <typename T>
FASTPLM_HD void widen_quad(const T* from, float* to) {
  if constexpr (std::is_same_v<T, float>) {
    std::memcpy(to, from, sizeof(float) * kQuad);
  } else {
    for (int64_t k = 0; k < kQuad; ++k) to[k] = static_cast<float>(from[k]);
  }
}

// Packs a tile of A, whole vectors: past the last row that row is repeated, past the last step there are zeros.
// Element (m, k) is at a[m * row + k * col].
template <typename T>
FASTPLM_HD void pack_quads(const QuadTiles& tiles, int64_t tile, const T* a, int64_t row, int64_t col,
                           int64_t depth, float* packed) {
  const int64_t height = tiles.height(tile), whole = col == 1 ? depth / kQuad : 0;
  for (int64_t m = 0; m < height; ++m) {
    const T* from[kQuadRows];
    for (int64_t i = 0; i < kQuadRows; ++i) {
      from[i] = a + std::min(tiles.row(tile) + m * kQuadRows + i, tiles.rows - 1) * row;
    }
    float* to = packed + m * kWidth;
    int64_t quad = 0;
    for (; quad < whole; ++quad, to += height * kWidth) {
      for (int64_t i = 0; i < kQuadRows; ++i) widen_quad(from[i] + quad * kQuad, to + i * kQuad);
    }
    for (; quad < ceil_div(depth, kQuad); ++quad, to += height * kWidth) {
      for (int64_t i = 0; i < kWidth; ++i) {
        const int64_t k = quad * kQuad + i % kQuad;
        to[i] = k < depth ? static_cast<float>(from[i / kQuad][k * col]) : 0.0f;
      }
    }
  }
}

// --- tiles ----------------------------------------------------------------------------------------

// All quarters of the vector are these four numbers.
FASTPLM_HD void repeat_quad(const float* from, Floats& to) {
#if FASTPLM_WIDTH == 16
  to = reinterpret_cast<const Floats&>(
      static_cast<const __m512&>(_mm512_broadcast_f32x4(_mm_loadu_ps(from))));
#elif FASTPLM_WIDTH == 8
  to = reinterpret_cast<const Floats&>(
      static_cast<const __m256&>(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from))));
#else
  to = at(from);
#endif
}

// Columns to prefetch, `column` bytes apart, with `step` bytes for each step of K: of any address, as nothing happens
// past the end of B.
struct Ahead {
  Ahead part(int64_t i, int64_t parts) const {
    const int64_t first = count * i / parts;
    return {from + first * column, column, step, count * (i + 1) / parts - first};
  }

  const char* from;
  int64_t column, step, count;
};

// C [kHeight kQuadRows, kColumns] (+)= A B^T over `depth` steps of K, a multiple of four. The same steps of the
// columns ahead are prefetched.
template <int64_t kHeight, int64_t kColumns>
FASTPLM_HD void quad_tile(int64_t depth, const float* a, const float* b, int64_t b_col, bool add, float* c,
                          const Ahead& ahead) {
  Floats sum[kColumns][kHeight] = {};
  for (int64_t k = 0; k < depth;) {
    for (int64_t n = 0; n < ahead.count; ++n) __builtin_prefetch(ahead.from + n * ahead.column + k * ahead.step);
    for (const int64_t end = std::min(k + kCacheLine, depth); k < end; k += kQuad, a += kHeight * kWidth) {
      Floats left[kHeight];
#pragma GCC unroll 6
      for (int64_t m = 0; m < kHeight; ++m) left[m] = at(a + m * kWidth);
#pragma GCC unroll 8
      for (int64_t n = 0; n < kColumns; ++n) {
        Floats right;
        repeat_quad(b + n * b_col + k, right);
#pragma GCC unroll 6
        for (int64_t m = 0; m < kHeight; ++m) sum[n][m] += left[m] * right;
      }
    }
  }
  using Four = float __attribute__((vector_size(16), aligned(4), may_alias));
#pragma GCC unroll 6
  for (int64_t m = 0; m < kHeight; ++m) {
#pragma GCC unroll 2
    for (int64_t n = 0; n < kColumns; n += kQuad) {
      // The parts of four columns are added up, so that a quarter has the four columns of a row.
      Floats one, other, first, second;
      exchange<1>(sum[n][m], sum[n + 1][m], one, other);
      first = one + other;
      exchange<1>(sum[n + 2][m], sum[n + 3][m], one, other);
      second = one + other;
      exchange<2>(first, second, one, other);
      const Floats total = one + other;
      for (int64_t row = 0; row < kQuadRows; ++row) {
        Four& to = *reinterpret_cast<Four*>(c + (m * kQuadRows + row) * kInPlaceColumns + n);
        const Four& four = reinterpret_cast<const Four*>(&total)[row];
        to = add ? to + four : four;
      }
    }
  }
}

// The same for `columns`, a multiple of 2 kQuadColumns, which share the columns to prefetch.
template <int64_t kHeight>
void quad_tiles(int64_t depth, const float* a, const float* b, int64_t b_col, int64_t columns, bool add,
                float* c, const Ahead& ahead) {
  constexpr bool kFits = 2 * kQuadColumns * kHeight + kHeight + 1 <= kRegisters;
  constexpr int64_t kColumns = kFits ? 2 * kQuadColumns : kQuadColumns;
  for (int64_t n = 0; n < columns; n += kColumns) {
    const Ahead part = ahead.part(n / kColumns, columns / kColumns);
    quad_tile<kHeight, kColumns>(depth, a, b + n * b_col, b_col, add, c + n, part);
  }
}

// The function for `height` vectors of rows.
template <int64_t kHeight = kMostQuads>
decltype(&quad_tiles<kHeight>) quad_tiles_of(int64_t height) {
  if constexpr (kHeight > 1) {
    if (height < kHeight) return quad_tiles_of<kHeight - 1>(height);
  }
  return quad_tiles<kHeight>;
}

// --- blocks ---------------------------------------------------------------------------------------

// How many steps of K a block takes at a time, of a B with so many columns in all: if a block's own columns decided,
// sums would depend on the number of threads.
template <typename T>
int64_t in_place_slice(int64_t columns, int64_t depth) {
  const bool whole = std::is_same_v<T, float> && columns % (2 * kQuadColumns) == 0 && depth % kQuad == 0;
  return whole ? kInPlaceSlice : kCopiedSlice;
}

// C [rows, kInPlaceColumns] = A B^T for tiles first … last - 1 of A, kInPlaceRows at most, and `columns` columns of
// B, `longest` steps of K at a time. B is copied to copied [kCopiedFloats] if it is not fp32, or no whole tile. A few
// tiles take a few columns at a time, which stay in the first-level cache. What comes next is prefetched meanwhile, in the end the columns at
// `after`, if it is not null.
template <typename T>
void in_place_block(const QuadTiles& tiles, int64_t first, int64_t last, const float* packed, int64_t depth,
                    const T* b, int64_t b_col, int64_t columns, int64_t longest, const T* after, float* copied,
                    float* c) {
  constexpr int64_t kUnit = 2 * kQuadColumns, kStride = kCopiedColumn;
  const bool whole = std::is_same_v<T, float> && columns % kUnit == 0 && depth % kQuad == 0;
  const int64_t most = last - first > kFewTiles ? kManyTilesColumns : kUnit;
  for (int64_t n = 0; n < columns; n += most) {
    const int64_t given = std::min(most, columns - n), filled = round_up(given, kUnit);
    for (int64_t k = 0; k < depth; k += longest) {
      const int64_t slice = std::min(longest, depth - k), right_col = whole ? b_col : kStride;
      const T* from = b + n * b_col + k;
      const T* then = k + slice < depth ? from + slice : n + most < columns ? b + (n + most) * b_col : after;
      const float* right = reinterpret_cast<const float*>(from);
      if (!whole) {
        widen_rows<kInPlaceAhead>(given, slice, from, b_col, copied, round_up(slice, kWidth), kStride);
        std::fill(copied + given * kStride, copied + filled * kStride, 0.0f);
        right = copied;
      }
      const int64_t bytes = sizeof(T);
      const Ahead ahead{reinterpret_cast<const char*>(then), b_col * bytes, bytes, then == nullptr ? 0 : most};
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t height = tiles.height(tile);
        const float* a = packed + tiles.place(tile, depth) + k * height * kQuadRows;
        float* out = c + (tiles.row(tile) - tiles.row(first)) * kInPlaceColumns + n;
        const auto run = quad_tiles_of(height);
        run(round_up(slice, kQuad), a, right, right_col, filled, k > 0, out, ahead.part(tile - first, last - first));
      }
    }
  }
}

}  // namespace fastplm::FASTPLM_LEVEL
