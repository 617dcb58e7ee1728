// csrc/layers/bias_gelu.h under sanitizers, compiled for one level: rows are allocations of exactly their size, results those
// of the standard library in double precision.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "common/half.h"
#include "one_level.h"

#include "common/lanes.h"
#include "layers/gelu.h"
#include "layers/bias_gelu.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

void check(const char* what, double got, double expected, double size) {
  if (std::fabs(got - expected) <= size) return;
  std::printf("%s: %.9g, not %.9g\n", what, got, expected);
  std::exit(1);
}

float draw(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 2097152.0f - 4.0f;
}

// A result of T may be off by `unit` of itself.
template <typename T>
void run(int64_t rows, int64_t width, double unit) {
  uint32_t state = static_cast<uint32_t>(rows * 1000 + width);
  std::vector<float> bias(width), sum(width);
  for (float& b : bias) b = draw(state) / 4;
  std::vector<double> expected(width);
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<T> in(width), grad_out(width), out(width), grad_in(width);
    for (T& x : in) x = static_cast<T>(draw(state));
    for (T& g : grad_out) g = static_cast<T>(draw(state));
    bias_gelu_row<false>(width, bias.data(), in.data(), out.data());
    bias_gelu_grad_row<false>(width, bias.data(), in.data(), grad_out.data(), grad_in.data(), sum.data());
    for (int64_t i = 0; i < width; ++i) {
      const double x = static_cast<double>(in[i]) + bias[i], share = std::erfc(-x * std::sqrt(0.5)) / 2;
      const double density = std::exp(-x * x / 2) / std::sqrt(8 * std::atan(1.0));
      const double grad = static_cast<float>(grad_out[i]) * (share + x * density);
      check("value", out[i], x * share, 5e-6 + unit * std::fabs(x * share));
      check("gradient", grad_in[i], grad, 5e-6 + unit * std::fabs(grad));
      expected[i] += grad;
    }
  }
  for (int64_t i = 0; i < width; ++i) check("bias's", sum[i], expected[i], 5e-6 * (rows + 1));
}

// Vectors of conversions give what Fp16 gives, bit for bit; NaN stays NaN.
void convert() {
  const int64_t count = 1 << 16;
  std::vector<Fp16> halves(count), back(count);
  std::vector<float> floats(count);
  for (int64_t i = 0; i < count; ++i) halves[i].bits = static_cast<uint16_t>(i);
  widen(count, halves.data(), floats.data());
  const auto same = [](float one, float other) {
    return (one != one && other != other) || bits_as<uint32_t>(one) == bits_as<uint32_t>(other);
  };
  for (int64_t i = 0; i < count; ++i) {
    if (!same(floats[i], halves[i])) check("fp16 as fp32", floats[i], halves[i], -1);
  }
  for (uint32_t between : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x1FFFu}) {
    std::vector<float> given(count);
    for (int64_t i = 0; i < count; ++i) given[i] = bits_as<float>(bits_as<uint32_t>(floats[i]) + between);
    round_to(count, given.data(), back.data());
    for (int64_t i = 0; i < count; ++i) {
      const float expected = static_cast<float>(Fp16(given[i]));
      if (!same(back[i], expected)) check("fp32 as fp16", back[i], expected, -1);
    }
  }
}

}  // namespace

int main() {
  int runs = 0;
  convert();
  for (int64_t rows : {0, 1, 5}) {
    for (int64_t width : {1, 15, 16, 17, 63, 64, 65, 130, 768}) {
      run<float>(rows, width, 0);
      run<Bf16>(rows, width, 1.0 / 256);
      run<Fp16>(rows, width, 1.0 / 2048);
      runs += 3;
    }
  }
  std::printf("%d matrices\n", runs);
  return 0;
}
