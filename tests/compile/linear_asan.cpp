// csrc/linear.h under sanitizers, compiled for one width of the vector unit: matrices are
// allocations of exactly their size, results those of plain loops in double.
#include "linear.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>

namespace {

using namespace fastplm;

// An allocation of rows x columns floats, which lie by rows or by columns.
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

// The largest difference, in units of what rounding may cost.
double run(int64_t rows, int64_t columns, int64_t depth, int layout, std::mt19937& random) {
  const Array a(rows, depth, (layout & 1) != 0, random);
  const Array b(depth, columns, (layout & 2) != 0, random);
  const Array bias(1, columns, true, random);
  const bool biased = (layout & 4) != 0;
  const Cut cut(rows, columns, depth);
  const std::unique_ptr<float[]> packed(new float[cut.packed_size()]);
  const std::unique_ptr<float[]> c(new float[rows * columns]);
  std::fill_n(c.get(), rows * columns, std::numeric_limits<float>::quiet_NaN());
  for (int64_t tile = 0; tile < cut.tiles; tile += kPackTiles) {
    pack_tiles(cut, a.matrix(), tile, std::min(tile + kPackTiles, cut.tiles), packed.get());
  }
  for (int64_t block = 0; block < cut.blocks_down * cut.blocks_across; ++block) {
    block_product(cut, packed.get(), b.matrix(), biased ? bias.data.get() : nullptr, c.get(),
                  columns, block);
  }
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

}  // namespace

int main() {
  std::mt19937 random(7);
  double worst = 0.0;
  int runs = 0;
  // Around the sizes of a tile, of what is packed at a time, and of a block; then of a slice.
  for (int64_t rows : {1, 11, 12, 13, 97, 541}) {
    for (int64_t columns : {1, 31, 32, 33, 129}) {
      for (int64_t depth : {1, 15, 16, 33}) {
        worst = std::max(worst, run(rows, columns, depth, runs % 8, random));
        ++runs;
      }
    }
  }
  for (int64_t depth : {383, 384, 385, 400, 769, 1153}) {
    for (int layout = 0; layout < 8; ++layout) {
      worst = std::max(worst, run(25, 35, depth, layout, random));
      ++runs;
    }
  }
  std::printf("%d products, worst error %.2f of the bound\n", runs, worst);
  return 0;
}
