// csrc/gemm/linear_int8.h under sanitizers, compiled for one level: rows, panels and results are allocations of
// exactly their size, and sums are those of plain loops.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "common/base.h"
#include "one_level.h"
#include "common/vectors.h"

#include "common/lanes.h"
#include "gemm/linear.h"
#include "gemm/linear_int8.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

void need(bool right, const char* what, int64_t rows, int64_t columns, int64_t depth) {
  if (right) return;
  std::printf("%s: %ld x %ld x %ld\n", what, long(rows), long(columns), long(depth));
  std::exit(1);
}

template <typename kTile>
void run(int64_t rows, int64_t columns, int64_t depth, std::mt19937& random) {
  using Q = typename kTile::Q;
  const int64_t steps = ceil_div(depth, kStepDepth), panels = ceil_div(columns, kPanel);
  const int64_t stride = steps * kStepDepth;
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> byte(1, 255);
  const std::unique_ptr<float[]> x(new float[rows * depth]), out(new float[rows * columns]);
  const std::unique_ptr<float[]> scale(new float[rows]), scales(new float[columns]);
  const std::unique_ptr<Q[]> quanta(new Q[rows * stride]);
  const std::unique_ptr<int32_t[]> start(new int32_t[rows]);
  const std::unique_ptr<uint8_t[]> weight(new uint8_t[panels * steps * kPanel * kStepDepth]);
  for (int64_t i = 0; i < rows * depth; ++i) x[i] = normal(random);
  for (int64_t i = 0; i < columns; ++i) scales[i] = 1.0f;
  for (int64_t i = 0; i < panels * steps * kPanel * kStepDepth; ++i) weight[i] = uint8_t(byte(random));
  const Quanta<Q> a{quanta.get(), stride, scale.get(), start.get()};
  for (int64_t m = 0; m < rows; ++m) quantize_row(depth, x.get() + m * depth, m, a);
  const Int8Factor<float> factor{weight.get(), scales.get(), nullptr, out.get()};
  for (int64_t n = 0; n < columns; n += kInt8Group) {
    int8_block<kTile>(a, steps, factor, columns, columns, 0, rows, n, Nothing());
  }
  for (int64_t m = 0; m < rows; ++m) {
    float peak = 0.0f;
    for (int64_t k = 0; k < depth; ++k) peak = std::max(peak, std::abs(x[m * depth + k]));
    need(scale[m] == peak / 127.0f, "scale", rows, columns, depth);
    for (int64_t k = 0; k < depth; ++k) {
      const float expected = std::nearbyint(x[m * depth + k] * (127.0f / peak));
      need(quanta[m * stride + k] == expected, "quantum", rows, columns, depth);
    }
    for (int64_t n = 0; n < columns; ++n) {
      int64_t sum = 0;
      for (int64_t k = 0; k < depth; ++k) {
        const int64_t step = (n / kPanel * steps + k / kStepDepth) * kPanel + n % kPanel;
        sum += quanta[m * stride + k] * (weight[step * kStepDepth + k % kStepDepth] - 128);
      }
      need(out[m * columns + n] == static_cast<float>(sum) * scale[m], "sum", rows, columns, depth);
    }
  }
}

template <typename kTile>
int run_all(std::mt19937& random) {
  int runs = 0;
  for (int64_t rows : {1, 2, 3, 5, 6, 7, 11, 12, 13, 25}) {
    for (int64_t columns : {1, 15, 16, 17, 33, 64, 81}) {
      for (int64_t depth : {1, 3, 4, 15, 16, 33, 100}) {
        run<kTile>(rows, columns, depth, random);
        ++runs;
      }
    }
  }
  return runs;
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int runs = run_all<ScalarTile>(random);
#if FASTPLM_WIDTH >= 8
  runs += run_all<WideTile>(random);
#endif
#if FASTPLM_WIDTH == 16
  if (__builtin_cpu_supports("avx512vnni")) runs += run_all<VnniTile>(random);
#elif FASTPLM_WIDTH == 8
  if (__builtin_cpu_supports("avxvnni")) runs += run_all<VnniTile>(random);
#endif
  std::printf("%d products\n", runs);
  return 0;
}
