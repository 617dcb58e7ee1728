// csrc/layers/replaced_token_loss.h under sanitizers, compiled for one level: rows are allocations of exactly
// their size, results those of the formula in double precision.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <vector>

#include "common/half.h"
#include "common/base.h"
#include "one_level.h"

#include "common/lanes.h"
#include "layers/replaced_token_loss.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

void check(const char* what, double got, double expected, double size) {
  if (std::fabs(got - expected) <= 4e-6 * size) return;
  std::printf("%s: %.9g, not %.9g\n", what, got, expected);
  std::exit(1);
}

float draw(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

template <typename T>
void run(int64_t rows, int64_t width, bool masked, float size) {
  const int64_t filled = detector_width(width), stride = width + 3;
  uint32_t state = static_cast<uint32_t>(rows * 1000 + width);
  std::vector<T> in(std::max<int64_t>(0, (rows - 1) * stride + width), T(0.0f));
  std::vector<float> weight(filled), loss(rows, -1.0f), slope(rows, -1.0f);
  for (T& x : in) x = T(draw(state));
  for (int64_t i = 0; i < width; ++i) weight[i] = size * draw(state);
  const std::unique_ptr<bool[]> counts(new bool[rows]), labels(new bool[rows]);
  for (int64_t row = 0; row < rows; ++row) {
    counts[row] = !masked || draw(state) > -0.3f;
    labels[row] = draw(state) > 0.5f;
    if (!counts[row]) std::fill_n(in.data() + row * stride, width, T(NAN));  // never read
  }
  const bool* mask = masked ? counts.get() : nullptr;
  const float bias = 0.25f;
  std::vector<float> sum(filled), again(filled), wide(kDetectorRows * filled);
  const Detected all = detect_rows(
      int64_t{0}, rows, width, in.data(), stride, weight.data(), bias, mask,
      [&](int64_t row) { return labels[row]; }, loss.data(), slope.data(), sum.data(), wide.data());
  std::vector<double> of_weight(width);
  double total = 0, slopes = 0;
  int64_t flagged = 0, told = 0, correct = 0, found = 0, counted = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (!counts[row]) {
      check("loss of a row that does not count", loss[row], -1, 0);  // not written
      continue;
    }
    double z = bias, scale = 1;
    for (int64_t i = 0; i < width; ++i) {
      const double term = static_cast<double>(static_cast<float>(in[row * stride + i])) * weight[i];
      z += term;
      scale += std::fabs(term);
    }
    const double expected = (z > 0 ? z : 0) + std::log1p(std::exp(-std::fabs(z))) - labels[row] * z;
    const double grad = 1 / (1 + std::exp(-z)) - labels[row];
    check("loss", loss[row], expected, scale);
    check("slope", slope[row], grad, scale);
    total += loss[row];
    slopes += slope[row];
    for (int64_t i = 0; i < width; ++i) {
      of_weight[i] += static_cast<double>(static_cast<float>(in[row * stride + i])) * slope[row];
    }
    flagged += z > 0;
    found += z > 0 && labels[row];
    told += labels[row];
    correct += (z > 0) == labels[row];
    ++counted;
  }
  check("sum", all.loss, total, 1e-6 * rows);
  check("slopes", all.slope, slopes, 1e-6 * rows);
  const int64_t got[5] = {all.found, all.predicted, all.replaced, all.correct, all.total};
  const int64_t expected[5] = {found, flagged, told, correct, counted};
  for (int i = 0; i < 5; ++i) check("count", got[i], expected[i], 0);
  add_weighted_rows(int64_t{0}, rows, width, in.data(), stride, mask, slope.data(), again.data(),
                    wide.data());
  std::vector<T> out(width, T(7.0f));
  for (int64_t i = 0; i < width; ++i) {
    check("weight's", sum[i], of_weight[i], rows + 1.0);
    check("weight's again", again[i], sum[i], 0);
  }
  scaled_row(width, weight.data(), false, NAN, out.data());
  for (const T& x : out) check("no gradient", static_cast<float>(x), 0, 0);
  scaled_row(width, weight.data(), true, 0.5f, out.data());
  for (int64_t i = 0; i < width; ++i) {
    check("gradient", static_cast<float>(out[i]), static_cast<float>(T(0.5f * weight[i])), 0);
  }
}

}  // namespace

int main() {
  int runs = 0;
  for (int64_t rows : {0, 1, 7, 8, 9, 40}) {
    for (int64_t width : {1, 15, 16, 17, 64, 130, 768}) {
      for (bool masked : {false, true}) {
        for (float size : {1e-3f, 1.0f, 30.0f}) {
          run<float>(rows, width, masked, size);
          run<Bf16>(rows, width, masked, size);
          run<Fp16>(rows, width, masked, size);
          runs += 3;
        }
      }
    }
  }
  std::printf("%d calls\n", runs);
  return 0;
}
