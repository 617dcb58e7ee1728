// csrc/gelu.h under sanitizers, compiled for one level: arrays are allocations of
// exactly their size, results those of the standard library in double precision.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>

#include "base.h"
#include "one_level.h"

#include "lanes.h"
#include "gelu.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

void check(const char* what, double x, double got, double expected) {
  // Some units in the last place of 1, times the factor.
  if (std::fabs(got - expected) <= 4e-7 * std::fmax(1.0, std::fabs(x))) return;
  std::printf("%s at %.9g: %.9g, not %.9g\n", what, x, got, expected);
  std::exit(1);
}

void run(int64_t size, double from, double to) {
  const std::unique_ptr<float[]> in(new float[size]), grad_out(new float[size]);
  const std::unique_ptr<float[]> out(new float[size]), grad_in(new float[size]);
  for (int64_t i = 0; i < size; ++i) {
    in[i] = static_cast<float>(from + (to - from) * static_cast<double>(i) / size);
    grad_out[i] = i % 2 ? 1.0f : -1.0f;
  }
  gelu_elements(size, in.get(), out.get());
  gelu_grad_elements(size, in.get(), grad_out.get(), grad_in.get());
  const double factor = std::sqrt(0.5 / std::atan(1.0));
  for (int64_t i = 0; i < size; ++i) {
    const double x = in[i], t = std::tanh(factor * (x + 0.044715 * x * x * x));
    const double slope = x * (1 - t * t) / 2 * factor * (1 + 3 * 0.044715 * x * x);
    check("value", x, out[i], x * (1 + t) / 2);
    check("gradient", x, grad_in[i] * grad_out[i], (1 + t) / 2 + slope);
  }
}

}  // namespace

int main() {
  int runs = 0;
  for (int64_t size : {0, 1, 15, 16, 17, 63, 64, 65, 128, 5000}) {
    for (double end : {0.01, 1.0, 6.0, 100.0}) {
      run(size, -end, end);
      ++runs;
    }
  }
  std::printf("%d arrays\n", runs);
  return 0;
}
