// Shared by all of csrc/: the macros that declare functions, and rounding of sizes.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTPLM_HD __host__ __device__ __forceinline__
// Silences nvcc: a group's members are host functions in one instantiation, __device__ ones in
// another.
#define FASTPLM_GROUP_CODE _Pragma("nv_exec_check_disable")
#else
// Always inlined, so that shared code is compiled with the instructions of the level that calls it.
#if defined(__GNUC__)
#define FASTPLM_INLINE __attribute__((always_inline))
#else
#define FASTPLM_INLINE
#endif
#define FASTPLM_HD inline FASTPLM_INLINE
#define FASTPLM_GROUP_CODE
#endif

namespace fastplm {

FASTPLM_HD int64_t ceil_div(int64_t size, int64_t part) {
  return (size + part - 1) / part;
}

FASTPLM_HD int64_t round_up(int64_t size, int64_t multiple) {
  return ceil_div(size, multiple) * multiple;
}

// A row's floats, rounded up to an odd number of cache lines: rows that lie a power of 2 apart
// would compete for the same few places in the cache.
constexpr int64_t kCacheLine = 16;

FASTPLM_HD int64_t odd_lines(int64_t floats) {
  return (ceil_div(floats, kCacheLine) | 1) * kCacheLine;
}

// The share of n that `scale` / 2^32 stands for; halves are rounded up.
FASTPLM_HD int64_t share_of(int64_t n, int64_t scale) {
  return (n * scale + (int64_t{1} << 31)) >> 32;
}

}  // namespace fastplm
