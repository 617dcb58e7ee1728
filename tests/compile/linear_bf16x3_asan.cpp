// csrc/linear_bf16x3.h under sanitizers, on a CPU with AMX: matrices are allocations of exactly their
// size, results those of plain loops in double.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "base.h"
#include "linear_bf16x3.h"

namespace {

using namespace fastplm;

struct Array {
  Array(int64_t rows, int64_t columns, bool by_rows, std::mt19937& random)
      : data(new float[rows * columns]),
        matrix{data.get(), rows, columns, by_rows ? columns : 1, by_rows ? 1 : rows} {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * columns; ++i) data[i] = normal(random);
  }
  double operator()(int64_t i, int64_t j) const { return *matrix.at(i, j); }

  std::unique_ptr<float[]> data;
  Fp32Matrix matrix;
};

bool run(int64_t rows, int64_t columns, int64_t depth, int layout, std::mt19937& random) {
  const Array a(rows, depth, (layout & 1) != 0, random);
  const Array b(depth, columns, (layout & 2) != 0, random);
  const Array bias(1, columns, true, random);
  const bool biased = (layout & 4) != 0;
  const int64_t steps = ceil_div(depth, amx::kStep);
  const int64_t tiles = round_up(columns, amx::kPair) / amx::kSide;
  const int64_t tiles_down = round_up(rows, amx::kPair) / amx::kSide;
  std::vector<amx::Halves> right(tiles * steps), left(tiles_down * steps);
  const std::unique_ptr<float[]> c(new float[rows * columns]);
  std::fill_n(c.get(), rows * columns, std::numeric_limits<float>::quiet_NaN());
  amx::pack_tiles(b.matrix.transposed(), 0, tiles, steps, true, right.data());
  amx::pack_tiles(a.matrix, 0, tiles_down, steps, false, left.data());
  {
    const amx::Tiles configured;
    const int64_t half = round_up(ceil_div(columns, 2), amx::kPair);  // two parts, the second may be empty
    for (int64_t n = 0; n < 2 * half; n += half) {
      amx::block_product(left.data(), right.data(), biased ? bias.data.get() : nullptr, steps, rows, n,
                         std::min(n + half, columns), columns, c.get());
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double gold = biased ? bias(0, j) : 0.0, size = std::abs(gold);
      for (int64_t k = 0; k < depth; ++k) {
        gold += a(i, k) * b(k, j);
        size += std::abs(a(i, k) * b(k, j));
      }
      const double bound = size * (3 * 0x1p-18 + static_cast<double>(3 * depth + 1) * 0x1p-24);
      if (!(std::abs(c[i * columns + j] - gold) <= bound)) {
        std::printf("%ld x %ld x %ld, layout %d: [%ld, %ld] is %g, not %g\n", long(rows),
                    long(columns), long(depth), layout, long(i), long(j), c[i * columns + j], gold);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  constexpr int64_t kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    std::puts("Linux gives no AMX");
    return 0;
  }
  std::mt19937 random(1);
  const int64_t sizes[][3] = {{1, 1, 1},    {16, 16, 32},  {17, 33, 31},
                              {32, 32, 64}, {127, 15, 95}, {129, 65, 33}, {300, 40, 200}};
  for (const auto& size : sizes) {
    for (int layout = 0; layout < 8; ++layout) {
      if (!run(size[0], size[1], size[2], layout, random)) return 1;
    }
  }
  return 0;
}
