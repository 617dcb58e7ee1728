// csrc/layers/dropout_add_layer_norm.h under sanitizers, compiled for one level: rows are allocations of exactly their size,
// results those of the formula in double precision; what stays is what csrc/layers/dropout.h leaves.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <vector>

#include "common/philox.h"
#include "common/base.h"
#include "one_level.h"

#include "common/lanes.h"
#include "common/rowwise.h"
#include "layers/dropout.h"
#include "layers/dropout_add_layer_norm.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

using Row = std::vector<float>;

void check(const char* what, double got, double expected, double size) {
  if (std::fabs(got - expected) <= 3e-6 * size) return;
  std::printf("%s: %.9g, not %.9g\n", what, got, expected);
  std::exit(1);
}

float draw(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
}

Row drawn(int64_t size, uint32_t& state) {
  Row row(size);
  for (float& x : row) x = draw(state);
  return row;
}

// The rows that csrc/layers/dropout.h makes of ones.
Row dropped(const RowDropout& dropout, int64_t rows, int64_t width) {
  Row out(rows * width, 1.0f);
  if (dropout.samples == nullptr) {
    drop_elements(dropout.seed, dropout.threshold, dropout.scale, 0, rows * width, out.data(), out.data());
  }
  for (int64_t row = 0; dropout.samples != nullptr && row < rows; ++row) {
    float* at = out.data() + row * width;
    const int64_t position = dropout.positions == nullptr ? 0 : dropout.positions[row];
    drop_row(dropout.seed, dropout.threshold, dropout.scale, dropout.samples[row], position, width, at, at);
  }
  return out;
}

struct Form {
  bool centered, biased, passes_sum;
};

void run(int64_t rows, int64_t width, const RowDropout& dropout, const Form& form) {
  const float eps = 1e-6f;
  uint32_t state = static_cast<uint32_t>(rows * 1000 + width);
  const bool drops = dropout.threshold > 0;
  const Row factor = dropped(dropout, rows, width);
  const Row weight = drawn(width, state), bias = drawn(width, state), x_bias = drawn(width, state);
  Row of_weight(width), of_bias(width), of_x_bias(width), room(RowDropout::room(width));
  std::vector<double> weight_sum(width), bias_sum(width), x_bias_sum(width);
  double bound = 1;
  for (int64_t row = 0; row < rows; ++row) {
    const Row x = drawn(width, state), residual = drawn(width, state), grad_out = drawn(width, state);
    const Row grad_sum = drawn(width, state);
    Row sum(width), out(width), of_residual(width), of_x(width);
    const float* kept = drops ? dropout.keep(row, width, room.data()) : nullptr;
    add_row(width, x.data(), form.biased ? x_bias.data() : nullptr, kept, dropout.scale, residual.data(),
            sum.data());
    norm_row(width, eps, form.centered, weight.data(), form.biased ? bias.data() : nullptr, sum.data(),
             out.data());
    grad_row(width, eps, form.centered, sum.data(), weight.data(), kept, dropout.scale, grad_out.data(),
             form.passes_sum ? grad_sum.data() : nullptr,
             {of_weight.data(), form.biased ? of_bias.data() : nullptr, form.biased ? of_x_bias.data() : nullptr},
             of_residual.data(), of_x.data());
    double mean = 0, variance = 0, weighted = 0, along = 0;
    for (int64_t i = 0; i < width; ++i) {
      const double added = x[i] + (form.biased ? static_cast<double>(x_bias[i]) : 0);
      check("sum", sum[i], added * (drops ? factor[row * width + i] : 1) + residual[i], 4);
      if (form.centered) mean += sum[i] / static_cast<double>(width);
    }
    for (int64_t i = 0; i < width; ++i) variance += (sum[i] - mean) * (sum[i] - mean) / width;
    const double scale = 1 / std::sqrt(variance + eps);
    bound += 8 * scale + 8;
    for (int64_t i = 0; i < width; ++i) {
      const double g = static_cast<double>(grad_out[i]) * weight[i];
      if (form.centered) weighted += g / width;
      along += g * (sum[i] - mean) * scale / width;
    }
    for (int64_t i = 0; i < width; ++i) {
      const double normed = (sum[i] - mean) * scale, g = static_cast<double>(grad_out[i]) * weight[i];
      check("value", out[i], normed * weight[i] + (form.biased ? bias[i] : 0), 8);
      const double grad = scale * (g - weighted - normed * along) + (form.passes_sum ? grad_sum[i] : 0);
      check("residual's", of_residual[i], grad, 8 * scale + 8);
      const double of_input = grad * (drops ? factor[row * width + i] : 1);
      check("input's", of_x[i], of_input, 8 * scale + 8);
      weight_sum[i] += grad_out[i] * normed;
      bias_sum[i] += grad_out[i];
      x_bias_sum[i] += of_input;
    }
  }
  for (int64_t i = 0; i < width; ++i) {
    check("weight's", of_weight[i], weight_sum[i], 4 * rows + 1.0);
    check("bias's", of_bias[i], form.biased ? bias_sum[i] : 0, rows + 1.0);
    check("linear bias's", of_x_bias[i], form.biased ? x_bias_sum[i] : 0, bound);
  }
}

}  // namespace

int main() {
  int runs = 0;
  const int64_t samples[] = {3, -1, int64_t{5} << 40, 7, 3}, positions[] = {0, 1, 2, 300, 4};
  const uint64_t seed = 0x9E3779B97F4A7C15;
  const RowDropout dropouts[] = {{},
                                 {seed, 6554, 65536.0f / (65536 - 6554), nullptr, nullptr},
                                 {seed, 6554, 65536.0f / (65536 - 6554), samples, positions},
                                 {seed, 32768, 2.0f, samples, nullptr},
                                 {seed, 65536, 0.0f, samples, positions}};
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t width : {2, 15, 16, 17, 64, 65, 127, 128, 130, 300, 768}) {
      for (const RowDropout& dropout : dropouts) {
        for (const Form& form : {Form{true, true, true}, {true, true, false}, {false, false, true}}) {
          run(rows, width, dropout, form);
          ++runs;
        }
      }
    }
  }
  std::printf("%d matrices\n", runs);
  return 0;
}
