// csrc/layers/gelu.h under sanitizers, compiled for one level: arrays are allocations of
// exactly their size, results those of the standard library in double precision.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "common/base.h"
#include "one_level.h"

#include "common/lanes.h"
#include "layers/gelu.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

void check(const char* what, double x, double got, double expected) {
  // Some units in the last place of 1, times the factor.
  if (std::fabs(got - expected) <= 4e-7 * std::fmax(1.0, std::fabs(x))) return;
  std::printf("%s at %.9g: %.9g, not %.9g\n", what, x, got, expected);
  std::exit(1);
}

// gelu(x) and its derivative
template <bool kTanh>
void compute(double x, double& value, double& slope) {
  const double factor = std::sqrt(0.5 / std::atan(1.0));  // sqrt(2 / pi)
  const double t = std::tanh(factor * (x + 0.044715 * x * x * x));
  const double below = std::erfc(-x * std::sqrt(0.5)) / 2;  // the distribution function
  const double gate = kTanh ? (1 + t) / 2 : below;
  const double along = kTanh ? (1 - t * t) / 2 * factor * (1 + 3 * 0.044715 * x * x)
                             : std::exp(-x * x / 2) * factor / 2;
  value = x * gate;
  slope = gate + x * along;
}

template <bool kTanh>
void run(int64_t size, double from, double to) {
  const std::unique_ptr<float[]> in(new float[size]), grad_out(new float[size]);
  const std::unique_ptr<float[]> out(new float[size]), grad_in(new float[size]);
  for (int64_t i = 0; i < size; ++i) {
    in[i] = static_cast<float>(from + (to - from) * static_cast<double>(i) / size);
    grad_out[i] = i % 2 ? 1.0f : -1.0f;
  }
  gelu_elements<kTanh>(size, in.get(), out.get());
  gelu_grad_elements<kTanh>(size, in.get(), grad_out.get(), grad_in.get());
  for (int64_t i = 0; i < size; ++i) {
    double value, slope;
    compute<kTanh>(in[i], value, slope);
    check("value", in[i], out[i], value);
    check("gradient", in[i], grad_in[i] * grad_out[i], slope);
    // Far below 0 the value keeps its digits.
    if (!kTanh && in[i] < 0 && in[i] > -9) check("digits", 9, out[i] / value, 1);
  }
}

}  // namespace

int main() {
  int runs = 0;
  for (int64_t size : {0, 1, 15, 16, 17, 63, 64, 65, 128, 5000}) {
    for (double end : {0.01, 1.0, 6.0, 100.0}) {
      run<false>(size, -end, end);
      run<true>(size, -end, end);
      runs += 2;
    }
  }
  std::printf("%d arrays\n", runs);
  return 0;
}
