// csrc/layers/rotary.h under sanitizers, compiled for one level: heads are allocations of exactly their size, results those
// of double precision.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "common/half.h"
#include "one_level.h"

#include "common/lanes.h"
#include "layers/rotary.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

float draw(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / 2097152.0f - 4.0f;
}

// A result of T may be off by `unit` of itself.
template <typename T>
void run(int64_t half, double unit) {
  uint32_t state = static_cast<uint32_t>(half);
  std::vector<float> cos(half), sin(half), room(2 * half);
  std::vector<T> in(2 * half), out(2 * half);
  for (int64_t i = 0; i < half; ++i) {
    const float angle = draw(state);
    cos[i] = std::cos(angle);
    sin[i] = std::sin(angle);
  }
  for (T& x : in) x = static_cast<T>(draw(state));
  rotate_head(half, cos.data(), sin.data(), in.data(), out.data(), room.data());
  std::vector<T> same = in;
  rotate_head(half, cos.data(), sin.data(), same.data(), same.data(), room.data());
  for (int64_t i = 0; i < 2 * half; ++i) {
    const int64_t pair = i % half;
    const double a = static_cast<float>(in[pair]), b = static_cast<float>(in[half + pair]);
    const double expected = i < half ? a * cos[pair] - b * sin[pair] : b * cos[pair] + a * sin[pair];
    const double got = static_cast<float>(out[i]), in_place = static_cast<float>(same[i]);
    if (std::fabs(got - expected) <= 2e-6 + unit * std::fabs(expected) && got == in_place) continue;
    std::printf("element %ld of half %ld: %.9g, in place %.9g, not %.9g\n", long(i), long(half), got, in_place, expected);
    std::exit(1);
  }
}

}  // namespace

int main() {
  int runs = 0;
  for (int64_t half : {1, 3, 4, 7, 8, 15, 16, 17, 20, 32, 48, 64}) {
    run<float>(half, 0);
    run<Bf16>(half, 1.0 / 256);
    run<Fp16>(half, 1.0 / 2048);
    runs += 3;
  }
  std::printf("%d heads\n", runs);
  return 0;
}
