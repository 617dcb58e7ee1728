// Sizes in whole parts.
#pragma once

#include <cstdint>

#include "group.h"

namespace fastplm {

FASTPLM_HD int64_t ceil_div(int64_t size, int64_t part) {
  return (size + part - 1) / part;
}

FASTPLM_HD int64_t round_up(int64_t size, int64_t multiple) {
  return ceil_div(size, multiple) * multiple;
}

// A row of so many floats in lines of the cache, and of an odd number of them: rows that lie a power
// of 2 apart compete for the same few places in it.
constexpr int64_t kCacheLine = 16;

FASTPLM_HD int64_t odd_lines(int64_t floats) {
  return (ceil_div(floats, kCacheLine) | 1) * kCacheLine;
}

}  // namespace fastplm
