// The group: whoever works on one row, one thread on the CPU and a thread block on the GPU. A row
// algorithm is written once, as a template over it; a group offers
//   rank(), size()             which thread of the group this is, and of how many
//   kAlone                     whether it is a single thread
//   kLanes                     neighbours that a thread does best at a time, for vector units
//   sync()                     barrier; what was written before it is seen after it
//   add(counter, x)            adds to a shared counter; integers, so any order gives one result
//   exclusive_sum(x, &total)   sum of x over the lower ranks, and over all; every thread calls it
//   minimum(x)                 smallest x of all threads; every thread calls it
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTPLM_HD __host__ __device__ __forceinline__
// A group's members are host functions in one instantiation and __device__ functions in another.
#define FASTPLM_GROUP_CODE _Pragma("nv_exec_check_disable")
#else
// Inlined whatever its size: a row's code takes the instructions of the level that it is called from.
#if defined(__GNUC__)
#define FASTPLM_INLINE __attribute__((always_inline))
#else
#define FASTPLM_INLINE
#endif
#define FASTPLM_HD inline FASTPLM_INLINE
#define FASTPLM_GROUP_CODE
#endif

namespace fastplm {

struct OneThread {
  static constexpr bool kAlone = true;
  // Fewer, and GCC unrolls the loop over them before it looks for vectors, and finds none.
  static constexpr int kLanes = 32;
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  void add(uint64_t* counter, uint64_t value) const { *counter += value; }
  template <typename Sum>
  Sum exclusive_sum(Sum value, Sum* total) const {
    *total = value;
    return 0;
  }
  uint64_t minimum(uint64_t value) const { return value; }
};

}  // namespace fastplm
