// csrc/layers/rms_norm.h under sanitizers, compiled for one level: rows are allocations
// of exactly their size, results those of the formula in double precision.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "common/base.h"
#include "one_level.h"

#include "common/lanes.h"
#include "common/rowwise.h"
#include "layers/rms_norm.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

void check(const char* what, double got, double expected, double size) {
  if (std::fabs(got - expected) <= 2e-6 * size) return;
  std::printf("%s: %.9g, not %.9g\n", what, got, expected);
  std::exit(1);
}

float draw(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

void run(int64_t rows, int64_t width, float size) {
  const float eps = 1e-6f;
  const int64_t filled = norm_width(width);
  uint32_t state = static_cast<uint32_t>(rows * 1000 + width);
  std::vector<float> in(rows * width), grad_out(rows * width), weight(filled);
  for (float& x : in) x = size * draw(state);
  for (float& g : grad_out) g = draw(state);
  for (int64_t i = 0; i < width; ++i) weight[i] = 1.0f + draw(state);
  std::vector<float> out(rows * width), grad_in(rows * width), x(filled), g(filled), sum(filled);
  norm_rows(rows, width, eps, weight.data(), in.data(), out.data(), x.data());
  norm_grad_rows(rows, width, eps, weight.data(), in.data(), grad_out.data(), grad_in.data(),
                 sum.data(), x.data(), g.data());
  std::vector<double> of_weight(width);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * width;
    double squares = 0, products = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double value = in[at + i];
      squares += value * value;
      products += value * grad_out[at + i] * weight[i];
    }
    const double scale = 1 / std::sqrt(squares / width + eps), mean = products / width;
    for (int64_t i = 0; i < width; ++i) {
      const double value = in[at + i], grad = grad_out[at + i];
      check("value", out[at + i], value * scale * weight[i], 4);
      const double along = value * scale * scale * mean;
      check("gradient", grad_in[at + i], scale * (grad * weight[i] - along), 4 * scale);
      of_weight[i] += grad * value * scale;
    }
  }
  for (int64_t i = 0; i < width; ++i) check("weight's", sum[i], of_weight[i], rows + 1.0);
  // Half the sum of two equal parts is the sum of one.
  std::vector<float> parts(2 * width), added(width);
  for (int64_t i = 0; i < 2 * width; ++i) parts[i] = sum[i % width];
  std::vector<double> total(width);
  sum_parts(2, width, width, parts.data(), 0.5, total.data(), added.data());
  for (int64_t i = 0; i < width; ++i) check("parts", added[i], sum[i], 0);
}

}  // namespace

int main() {
  int runs = 0;
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t width : {1, 15, 16, 17, 63, 64, 65, 130, 768}) {
      for (float size : {1e-3f, 1.0f, 1e4f}) {
        run(rows, width, size);
        ++runs;
      }
    }
  }
  std::printf("%d matrices\n", runs);
  return 0;
}
