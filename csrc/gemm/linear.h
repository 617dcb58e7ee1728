// The product of a linear layer in fp32, by tiles that the registers hold.
//
//   C [M, N] = A [M, K] B [K, N] + bias [N]
//
// A tile is kRows x kTileColumns of C, all of one height. K is cut into slices, so that a tile's rows of A
// stay in the first-level cache while panels of B, kTileColumns wide, come from the second; between slices
// the sums are in C. A and B are first copied into the order in which a tile reads them ("packed"), and the
// last rows and columns are filled up with zeros.
//
// Source: Goto and van de Geijn 2008, "Anatomy of High-Performance Matrix Multiplication".

namespace fastplm::FASTPLM_LEVEL {

// A tile has at most this many rows of sums in registers, beside a row of B and an element of A.
constexpr int64_t kTileRows = kRegisters == 32 ? 12 : 6;
// Fewer rows have too few sums to keep the unit busy. A height is kLeastRows plus whole steps.
constexpr int64_t kHeightStep = kTileRows / 6;
constexpr int64_t kLeastRows = 4 * kHeightStep;
constexpr int64_t kTileWide = 2;
constexpr int64_t kTileColumns = kTileWide * kWidth;
constexpr int64_t kSliceDepth = 384;
// The most and the least that a thread computes at a time: the second-level cache holds a slice of
// its columns of B, and its rows of C until the next slice.
constexpr int64_t kBlockTiles = 528 / kTileRows;
constexpr int64_t kBlockColumns = 128;
constexpr int64_t kLeastBlockColumns = 2 * kTileColumns;
// A tile's panel is prefetched this far ahead.
constexpr int64_t kAhead = 8;
constexpr int64_t kPackTiles = 16;
constexpr int64_t kPackSteps = 16;
// What block_product packs a slice of its columns of B into.
constexpr int64_t kPanelFloats = kSliceDepth * kBlockColumns;

// A matrix with contiguous rows or columns: element (i, j) is at i * row + j * col.
struct Matrix {
  const float* at(int64_t i, int64_t j) const { return data + i * row + j * col; }

  const float* data;
  int64_t row, col;
};

// How a product that is not empty is cut. The number of threads decides the width of a block, but
// not the order of any sum.
struct Cut {
  Cut(int64_t rows, int64_t columns, int64_t depth, int64_t threads)
      : rows(rows), columns(columns), depth(depth) {
    tiles = ceil_div(rows, kTileRows);
    // All tiles have one height, chosen so that few rows are padding: 38 rows are four tiles of 10.
    tile_rows = std::max(kLeastRows, round_up(ceil_div(rows, tiles), kHeightStep));
    slice = round_up(ceil_div(depth, ceil_div(depth, kSliceDepth)), kCacheLine);
    blocks_down = ceil_div(tiles, kBlockTiles);
    block_tiles = ceil_div(tiles, blocks_down);
    group_tiles = std::min(kPackTiles, ceil_div(tiles, threads));
    // Blocks are as wide as possible without idle threads: three blocks take two threads as long as
    // four.
    int64_t least = std::numeric_limits<int64_t>::max();
    for (int64_t width = kBlockColumns; width >= kLeastBlockColumns; width -= kTileColumns) {
      const int64_t longest = width * ceil_div(blocks_down * ceil_div(columns, width), threads);
      if (longest < least) {
        least = longest;
        block_columns = width;
      }
    }
    blocks_across = ceil_div(columns, block_columns);
  }
  // The place of a tile's packed rows, for the slice from `k` on.
  int64_t packed(int64_t tile, int64_t k) const {
    return k * tiles * tile_rows + tile * tile_rows * depth_at(k);
  }
  int64_t packed_size() const { return tiles * tile_rows * depth; }
  int64_t depth_at(int64_t k) const { return std::min(slice, depth - k); }

  int64_t rows, columns, depth;                     // M, N, K
  int64_t tiles, tile_rows;                         // tiles down C, rows of a tile
  int64_t slice;                                    // the depth of each slice but the last
  int64_t blocks_down, blocks_across;               // blocks of C
  int64_t block_tiles, block_columns;               // tiles down a block, columns of a block
  int64_t group_tiles;                              // tiles that a thread packs at a time
};

// --- packing --------------------------------------------------------------------------------------

// packed [depth, kElements]: element i of each of `depth` steps, at data[i * across + k * along], and 0
// from `count` on.
template <int64_t kElements>
FASTPLM_HD void pack(const float* data, int64_t across, int64_t along, int64_t count,
                     int64_t depth, float* packed) {
  if (across == 1) {
    for (int64_t k = 0; k < depth; ++k, data += along, packed += kElements) {
      __builtin_prefetch(data + kPackSteps * along);
      if (count == kElements) {
        std::memcpy(packed, data, sizeof(float) * kElements);
      } else {
        for (int64_t i = 0; i < kElements; ++i) packed[i] = i < count ? data[i] : 0.0f;
      }
    }
    return;
  }
  // All steps of a few elements, then the next few: the CPU prefetches only so many rows at once.
  for (int64_t begin = 0; begin < kElements; begin += kWidth, data += kWidth * across) {
    const int64_t width = std::min(kWidth, kElements - begin);
    const int64_t given = std::min(count - begin, width);
    float* to = packed + begin;
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      Floats rows[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) rows[i] = i < given ? at(data + i * across + k) : Floats{};
      transpose(rows);
      for (int64_t j = 0; j < kWidth; ++j) {
        std::memcpy(to + (k + j) * kElements, &rows[j], sizeof(float) * width);
      }
    }
    for (; k < depth; ++k) {
      for (int64_t i = 0; i < width; ++i) to[k * kElements + i] = i < given ? data[i * across + k] : 0.0f;
    }
  }
}

// The steps of a tile or panel to pack before its neighbour: all, or few if the neighbour is in the
// same cache lines.
FASTPLM_HD int64_t steps_of(int64_t across, int64_t depth) {
  return across == 1 ? kPackSteps : depth;
}

// Calls function(kRows) with the height of a tile as a constant.
template <typename Function>
FASTPLM_HD void with_height(const Cut& cut, const Function& function) {
  if (cut.tile_rows == kLeastRows) {
    function(std::integral_constant<int64_t, kLeastRows>());
  } else if (cut.tile_rows == kLeastRows + kHeightStep) {
    function(std::integral_constant<int64_t, kLeastRows + kHeightStep>());
  } else {
    function(std::integral_constant<int64_t, kTileRows>());
  }
}

// Packs tiles first … last - 1 of A, with all their slices.
template <int64_t kRows>
FASTPLM_HD void pack_tiles(const Cut& cut, const Matrix& a, int64_t first, int64_t last,
                           float* packed) {
  for (int64_t k = 0; k < cut.depth; k += cut.slice) {
    const int64_t depth = cut.depth_at(k), steps = steps_of(a.row, depth);
    for (int64_t step = 0; step < depth; step += steps) {
      for (int64_t tile = first; tile < last; ++tile) {
        const int64_t row = tile * kRows;
        pack<kRows>(a.at(row, k + step), a.row, a.col, std::min(kRows, cut.rows - row),
                    std::min(steps, depth - step), packed + cut.packed(tile, k) + step * kRows);
      }
    }
  }
}

// Packs the columns of a block of B, for one slice: panel after panel, [depth, kTileColumns] each.
FASTPLM_HD void pack_panels(const Matrix& b, int64_t k, int64_t depth, int64_t first, int64_t last,
                            float* panels) {
  const int64_t steps = steps_of(b.col, depth);
  for (int64_t step = 0; step < depth; step += steps) {
    for (int64_t column = first; column < last; column += kTileColumns) {
      pack<kTileColumns>(b.at(k + step, column), b.col, b.row,
                         std::min(kTileColumns, last - column), std::min(steps, depth - step),
                         panels + (column - first) * depth + step * kTileColumns);
    }
  }
}

// --- tiles ----------------------------------------------------------------------------------------

// C [kRows, kTileColumns] = start + A B, for packed A [depth, kRows] and B [depth, kTileColumns];
// `start` is C itself, or one row for all.
template <int64_t kRows>
FASTPLM_HD void tile_product(int64_t depth, const float* a, const float* b, const float* start,
                             int64_t start_row, float* c, int64_t c_row) {
  Floats sum[kRows][kTileWide] = {};
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t n = 0; n < kTileWide; ++n) {
      __builtin_prefetch(b + kAhead * kTileColumns + n * kWidth);
    }
    for (int64_t m = 0; m < kRows; ++m) {
      for (int64_t n = 0; n < kTileWide; ++n) sum[m][n] += a[m] * at(b + n * kWidth);
    }
    a += kRows;
    b += kTileColumns;
  }
  for (int64_t m = 0; m < kRows; ++m) {
    for (int64_t n = 0; n < kTileWide; ++n) {
      at(c + m * c_row + n * kWidth) = at(start + m * start_row + n * kWidth) + sum[m][n];
    }
  }
}

// finish(row, column, count, values) gets each piece of a row of the result, which has its bias, while it
// is in the first-level cache.
struct Nothing {
  template <typename T>
  FASTPLM_HD void operator()(int64_t, int64_t, int64_t, T*) const {}
};

// Computes the block of C with this number; panels [kPanelFloats].
template <int64_t kRows, typename Finish = Nothing>
FASTPLM_HD void block_product(const Cut& cut, const float* packed, const Matrix& b,
                              const float* bias, float* c, int64_t c_row, int64_t block,
                              float* panels, const Finish& finish = {}) {
  const int64_t first_tile = block / cut.blocks_across * cut.block_tiles;
  const int64_t last_tile = std::min(first_tile + cut.block_tiles, cut.tiles);
  const int64_t first_column = block % cut.blocks_across * cut.block_columns;
  const int64_t last_column = std::min(first_column + cut.block_columns, cut.columns);
  alignas(64) float edge[kRows * kTileColumns];
  alignas(64) float first[kBlockColumns] = {};
  if (bias != nullptr) {
    std::memcpy(first, bias + first_column, sizeof(float) * (last_column - first_column));
  }
  for (int64_t k = 0; k < cut.depth; k += cut.slice) {
    const int64_t depth = cut.depth_at(k);
    pack_panels(b, k, depth, first_column, last_column, panels);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t row = tile * kRows;
      const int64_t rows = std::min(kRows, cut.rows - row);
      const float* tile_a = packed + cut.packed(tile, k);
      for (int64_t column = first_column; column < last_column; column += kTileColumns) {
        const int64_t columns = std::min(kTileColumns, last_column - column);
        const float* panel = panels + (column - first_column) * depth;
        float* out = c + row * c_row + column;
        // The sums of this slice start from one row for all, or from C itself.
        const float* start = k == 0 ? first + (column - first_column) : out;
        const int64_t start_row = k == 0 ? 0 : c_row;
        if (rows == kRows && columns == kTileColumns) {
          tile_product<kRows>(depth, tile_a, panel, start, start_row, out, c_row);
          continue;
        }
        for (int64_t m = 0; m < rows; ++m) {
          std::memcpy(edge + m * kTileColumns, start + m * start_row, sizeof(float) * columns);
        }
        tile_product<kRows>(depth, tile_a, panel, edge, kTileColumns, edge, kTileColumns);
        for (int64_t m = 0; m < rows; ++m) {
          std::memcpy(out + m * c_row, edge + m * kTileColumns, sizeof(float) * columns);
        }
      }
      if (k + depth < cut.depth) continue;
      for (int64_t m = 0; m < rows; ++m) {
        finish(row + m, first_column, last_column - first_column, c + (row + m) * c_row + first_column);
      }
    }
  }
}

}  // namespace fastplm::FASTPLM_LEVEL
