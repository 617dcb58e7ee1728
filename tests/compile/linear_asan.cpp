// csrc/gemm/linear.h, linear_few_rows.h and linear_in_place.h under sanitizers, compiled for one level:
// matrices are allocations of exactly their size, results those of plain loops in double.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>

#include "common/half.h"
#include "common/base.h"
#include "common/vectors.h"
#include "one_level.h"

#include "common/lanes.h"
#include "gemm/linear.h"
#include "gemm/linear_few_rows.h"
#include "gemm/linear_in_place.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

// A matrix of rows x columns floats in an allocation of exactly that size, by rows or by columns.
struct Array {
  Array(int64_t rows, int64_t columns, bool by_rows, std::mt19937& random)
      : data(new float[rows * columns]), row(by_rows ? columns : 1), col(by_rows ? 1 : rows) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * columns; ++i) data[i] = normal(random);
  }
  Matrix matrix() const { return {data.get(), row, col}; }
  double operator()(int64_t i, int64_t j) const { return data[i * row + j * col]; }

  std::unique_ptr<float[]> data;
  int64_t row, col;
};

// The largest difference, in units of the possible rounding.
double run(int64_t rows, int64_t columns, int64_t depth, int layout, int64_t threads,
           std::mt19937& random) {
  const Array a(rows, depth, (layout & 1) != 0, random);
  const Array b(depth, columns, (layout & 2) != 0, random);
  const Array bias(1, columns, true, random);
  const bool biased = (layout & 4) != 0;
  const Cut cut(rows, columns, depth, threads);
  const std::unique_ptr<float[]> packed(new float[cut.packed_size()]);
  const std::unique_ptr<float[]> c(new float[rows * columns]), panels(new float[kPanelFloats]);
  std::fill_n(c.get(), rows * columns, std::numeric_limits<float>::quiet_NaN());
  with_height(cut, [&](auto height) {
    for (int64_t tile = 0; tile < cut.tiles; tile += cut.group_tiles) {
      const int64_t last = std::min(tile + cut.group_tiles, cut.tiles);
      pack_tiles<height.value>(cut, a.matrix(), tile, last, packed.get());
    }
    for (int64_t block = 0; block < cut.blocks_down * cut.blocks_across; ++block) {
      block_product<height.value>(cut, packed.get(), b.matrix(),
                                  biased ? bias.data.get() : nullptr, c.get(), columns, block, panels.get());
    }
  });
  double worst = 0.0;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double gold = biased ? bias(0, j) : 0.0, size = std::abs(gold);
      for (int64_t k = 0; k < depth; ++k) {
        gold += a(i, k) * b(k, j);
        size += std::abs(a(i, k) * b(k, j));
      }
      const double error = std::abs(c[i * columns + j] - gold);
      const double bound = size * static_cast<double>(depth + 1) * 0x1p-24;
      if (!(error <= bound)) {
        std::printf("%ld x %ld x %ld, layout %d: [%ld, %ld] is %g, not %g\n", long(rows),
                    long(columns), long(depth), layout, long(i), long(j), c[i * columns + j], gold);
        std::exit(1);
      }
      worst = std::max(worst, bound > 0.0 ? error / bound : 0.0);
    }
  }
  return worst;
}

// --- few rows -------------------------------------------------------------------------------------

// Small multiples of 1/8, which every type has exactly.
struct Eighth {
  int value;
  operator float() const { return static_cast<float>(value) / 8.0f; }
  operator Bf16() const {
    const float number = *this;
    return Bf16(number);
  }
  operator Fp16() const {
    const float number = *this;
    return Fp16(number);
  }
};

// How a product is computed: by rows of B, kRows at a time, or all of one or of kStreamRows rows; or by columns.
constexpr int kInPlace = -1, kStreamOne = 1001, kStreamFew = 1000 + kStreamRows;

template <int kRows, typename T>
void run_few(int64_t rows, int64_t columns, int64_t depth, std::mt19937& random) {
  constexpr bool kByRows = kRows > 0, kStreams = kRows >= kStreamOne;
  constexpr int64_t kTile = kStreams ? kRows - 1000 : kByRows ? kRows : 1;
  const int64_t c_row =
      kStreams ? round_up(columns, kStreamColumns) : kRows == kInPlace ? kInPlaceColumns : kFewColumns;
  std::uniform_int_distribution<int> eighths(-31, 31);
  const int64_t filled = (rows + kTile - 1) / kTile * kTile, stride = round_up(depth, kWidth);
  const std::unique_ptr<float[]> a(new float[filled * stride]());
  const std::unique_ptr<T[]> b(new T[columns * depth]);
  const std::unique_ptr<float[]> plain(new float[columns * depth]);
  const int64_t most = std::max(kFewRows * kFewColumns, kInPlaceRows * kInPlaceColumns);
  const std::unique_ptr<float[]> c(new float[kStreams ? filled * c_row : most]);
  const std::unique_ptr<float[]> room(new float[std::max(kFewRows * kFewColumns, kCopiedFloats)]);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t k = 0; k < depth; ++k) a[m * stride + k] = Eighth{eighths(random)};
  }
  for (int64_t i = 0; i < columns * depth; ++i) {
    const Eighth number{eighths(random)};
    b[i] = number;
    plain[i] = number;
  }
  const FewRows left{a.get(), filled, depth, stride};
  if constexpr (kStreams) {
    stream<kTile>(left, b.get(), columns, columns, c.get(), c_row);
  } else if constexpr (kByRows) {
    outer<kRows>(left, b.get(), columns, columns, room.get(), c.get());
  } else {
    const QuadTiles tiles(rows);
    const std::unique_ptr<float[]> packed(new float[tiles.packed_size(depth)]);
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
      pack_quads(tiles, tile, a.get(), stride, 1, depth, packed.get() + tiles.place(tile, depth));
    }
    const int64_t slice = in_place_slice<T>(columns, depth);
    in_place_block(tiles, 0, tiles.count, packed.get(), depth, b.get(), depth, columns, slice, b.get(), room.get(),
                   c.get());
  }
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      float gold = 0.0f;  // exact in any order of the sum
      for (int64_t k = 0; k < depth; ++k) {
        gold += a[m * stride + k] * plain[kByRows ? k * columns + n : n * depth + k];
      }
      if (c[m * c_row + n] != gold) {
        std::printf("%ld lanes, %ld x %ld x %ld: [%ld, %ld] is %g, not %g\n", long(kWidth), long(rows),
                    long(columns), long(depth), long(m), long(n), c[m * c_row + n], gold);
        std::exit(1);
      }
    }
  }
}

template <int kRows, typename T>
void run_few_sizes(std::mt19937& random) {
  for (int64_t rows : {1, 3, 5, 17, 50, 107}) {
    const int64_t most = kRows == kInPlace ? kInPlaceRows : kFewRows;
    if (rows > (kRows >= kStreamOne ? kRows - 1000 : most)) continue;
    for (int64_t columns : {1, 5, 8, 48, 64, 97}) {
      if (kRows == kInPlace && columns > kInPlaceColumns) continue;
      for (int64_t depth : {1, 4, 16, 19, 384, 390, 785}) {
        run_few<kRows, T>(rows, columns, depth, random);
      }
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(7);
  double worst = 0.0;
  int runs = 0;
  run_few_sizes<kInPlace, float>(random);
  run_few_sizes<kInPlace, Fp16>(random);
  run_few_sizes<kInPlace, Bf16>(random);
  run_few_sizes<kStreamOne, float>(random);
  run_few_sizes<kStreamOne, Fp16>(random);
  run_few_sizes<kStreamFew, float>(random);
  run_few_sizes<kStreamFew, Bf16>(random);
  run_few_sizes<kMostOuterRows, float>(random);
  run_few_sizes<kMostOuterRows, Fp16>(random);
  // Sizes around those of a tile, of the rows packed at a time, of a block, then of a slice.
  for (int64_t rows : {1, 7, 11, 12, 13, 19, 97, 541}) {
    for (int64_t columns : {1, 31, 32, 33, 129, 384}) {
      for (int64_t depth : {1, 15, 16, 33}) {
        worst = std::max(worst, run(rows, columns, depth, runs % 8, 1 + runs % 5, random));
        ++runs;
      }
    }
  }
  for (int64_t depth : {383, 384, 385, 400, 769, 1153}) {
    for (int layout = 0; layout < 8; ++layout) {
      worst = std::max(worst, run(25, 35, depth, layout, 1, random));
      ++runs;
    }
  }
  std::printf("%d products, worst error %.2f of the bound\n", runs, worst);
  return 0;
}
