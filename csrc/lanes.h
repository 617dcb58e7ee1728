// Vectors of floats: those of GCC and Clang, 16 wide. Where the CPU's are narrower, the compiler
// takes several.
#pragma once

#include <cstdint>

#include "group.h"

namespace fastplm {

constexpr int64_t kLane = 16;
using Floats = float __attribute__((vector_size(4 * kLane), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(4 * kLane), aligned(4), may_alias));

FASTPLM_HD int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

FASTPLM_HD Floats& at(float* pointer) {
  return *reinterpret_cast<Floats*>(pointer);
}

FASTPLM_HD const Floats& at(const float* pointer) {
  return *reinterpret_cast<const Floats*>(pointer);
}

// Lane i becomes lane `from[i]` of the two vectors, those of `b` counted from 16 on. (Returned, a
// vector this wide would be a matter of the ABI.)
FASTPLM_HD void shuffle(const Floats& a, const Floats& b, const Ints& from, Floats& out) {
#if defined(__clang__)
  for (int i = 0; i < kLane; ++i) out[i] = from[i] < kLane ? a[from[i]] : b[from[i] - kLane];
#else
  out = __builtin_shuffle(a, b, from);
#endif
}

FASTPLM_HD float sum_of(Floats lanes) {
  for (int64_t width = kLane / 2; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

}  // namespace fastplm
