// csrc/layers/dropout.h under sanitizers, compiled for one level: arrays are allocations
// of exactly their size, results those of one Philox draw after another.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "common/philox.h"
#include "common/base.h"
#include "one_level.h"

#include "common/lanes.h"
#include "layers/dropout.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

uint32_t choice_of(uint64_t seed, int64_t element) {
  const int64_t lane = element % kDraws, j = element % kDropBlock / kDraws;
  const uint64_t draw = static_cast<uint64_t>(element / kDropBlock * kDraws + lane);
  WordLanes<1> counter = {{static_cast<uint32_t>(draw)},
                          {static_cast<uint32_t>(draw >> 32)},
                          {0},
                          {static_cast<uint32_t>(Stream::kHidden)}};
  philox4x32<1, kDropoutRounds>(seed, counter);
  const uint32_t words[4] = {counter.x[0], counter.y[0], counter.z[0], counter.w[0]};
  return words[j / 2] >> (j % 2 * 16) & 0xFFFF;
}

void run(int64_t first, int64_t size, int32_t threshold) {
  const uint64_t seed = 0x9E3779B97F4A7C15;
  const std::unique_ptr<float[]> in(new float[size]), out(new float[size]);
  for (int64_t i = 0; i < size; ++i) in[i] = static_cast<float>(i + 1);
  drop_elements(seed, threshold, 2.0f, first, size, in.get(), out.get());
  for (int64_t i = 0; i < size; ++i) {
    const bool dropped = choice_of(seed, first + i) < static_cast<uint32_t>(threshold);
    const float expected = dropped ? 0.0f : 2.0f * in[i];
    if (out[i] != expected) {
      std::printf("element %ld of %ld from %ld: %g, not %g\n", long(i), long(size), long(first),
                  out[i], expected);
      std::exit(1);
    }
  }
}

uint32_t choice_in_row(uint64_t seed, int64_t sample, int64_t position, int64_t column) {
  const int64_t lane = column % kDraws, j = column % kDropBlock / kDraws;
  const uint32_t draw = static_cast<uint32_t>(column / kDropBlock * kDraws + lane);
  WordLanes<1> counter = {{static_cast<uint32_t>(position)},
                          {static_cast<uint32_t>(sample)},
                          {static_cast<uint32_t>(static_cast<uint64_t>(sample) >> 32)},
                          {draw << 4 | static_cast<uint32_t>(Stream::kHidden)}};
  philox4x32<1, kDropoutRounds>(seed, counter);
  const uint32_t words[4] = {counter.x[0], counter.y[0], counter.z[0], counter.w[0]};
  return words[j / 2] >> (j % 2 * 16) & 0xFFFF;
}

void run_row(int64_t sample, int64_t position, int64_t width, int32_t threshold) {
  const uint64_t seed = 0x9E3779B97F4A7C15;
  const std::unique_ptr<float[]> in(new float[width]), out(new float[width]);
  for (int64_t i = 0; i < width; ++i) in[i] = static_cast<float>(i + 1);
  drop_row(seed, threshold, 2.0f, sample, position, width, in.get(), out.get());
  for (int64_t i = 0; i < width; ++i) {
    const bool dropped =
        choice_in_row(seed, sample, position, i) < static_cast<uint32_t>(threshold);
    const float expected = dropped ? 0.0f : 2.0f * in[i];
    if (out[i] != expected) {
      std::printf("column %ld of %ld: %g, not %g\n", long(i), long(width), out[i], expected);
      std::exit(1);
    }
  }
}

}  // namespace

int main() {
  int runs = 0;
  for (int64_t sample : {int64_t{0}, int64_t{-3}, int64_t{5} << 40}) {
    for (int64_t width : {1, 127, 128, 300}) {
      for (int32_t threshold : {0, 6554, 65536}) {
        run_row(sample, sample + 7, width, threshold);
        ++runs;
      }
    }
  }
  // The last number of draws is beyond 32 bits.
  for (int64_t first : {int64_t{0}, kDropBlock, int64_t{5} << 36}) {
    for (int64_t size : {1, 15, 16, 17, 127, 128, 300}) {
      for (int32_t threshold : {0, 1, 6554, 65535, 65536}) {
        run(first, size, threshold);
        ++runs;
      }
    }
  }
  std::printf("%d calls\n", runs);
  return 0;
}
