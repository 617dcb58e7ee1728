// Vectors of floats: those of GCC and Clang, 16 wide. Where the CPU's are narrower, the compiler
// takes several.
#pragma once

#include <cstdint>

#include "group.h"

namespace fastplm {

constexpr int64_t kLane = 16;
using Floats = float __attribute__((vector_size(4 * kLane), aligned(4), may_alias));
using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));
// What every CPU with vectors compares by one instruction.
using Four = float __attribute__((vector_size(16), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(4 * kLane), aligned(4), may_alias));
using UInts = uint32_t __attribute__((vector_size(4 * kLane), aligned(4), may_alias));

FASTPLM_HD int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

FASTPLM_HD Floats& at(float* pointer) {
  return *reinterpret_cast<Floats*>(pointer);
}

FASTPLM_HD const Floats& at(const float* pointer) {
  return *reinterpret_cast<const Floats*>(pointer);
}

// Lane i becomes lane `from[i]` of the two vectors, those of `b` counted from where `a` ends.
// (Returned, vectors this wide would be a matter of the ABI.)
template <typename Vector, typename Lanes>
FASTPLM_HD void shuffle(const Vector& a, const Vector& b, const Lanes& from, Vector& out) {
#if defined(__clang__)
  constexpr int kCount = sizeof(Lanes) / sizeof(from[0]);
  for (int i = 0; i < kCount; ++i) out[i] = from[i] < kCount ? a[from[i]] : b[from[i] - kCount];
#else
  out = __builtin_shuffle(a, b, from);
#endif
}

// Two vectors a, b -> the lanes of `a` whose number lacks the bit kBit, with those of `b` that lack it
// in the places between; and the same of those that have it. Floats or narrower.
template <int kBit, typename Lanes, typename Vector>
FASTPLM_HD void exchange(const Vector& a, const Vector& b, Vector& without, Vector& with) {
  constexpr int kCount = sizeof(Vector) / sizeof(float);
  Lanes first, second;
  for (int lane = 0; lane < kCount; ++lane) {
    first[lane] = lane & kBit ? kCount + (lane ^ kBit) : lane;
    second[lane] = lane & kBit ? kCount + lane : lane ^ kBit;
  }
  const Vector left = a, right = b;
  shuffle(left, right, first, without);
  shuffle(left, right, second, with);
}

// In halves, from registers: an index that is not known costs a way through memory.
FASTPLM_HD float sum_of(const Floats& lanes) {
  const Eight* halves = reinterpret_cast<const Eight*>(&lanes);
  const Eight eight = halves[0] + halves[1];
  const Four* quarters = reinterpret_cast<const Four*>(&eight);
  const Four four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// GCC compares vectors that are wider than the CPU's lane by lane, at ten times the cost; masks made
// of signs it does not take apart so. All bits of a lane where x is negative:
FASTPLM_HD void sign_of(const Floats& x, Ints& mask) {
  mask = reinterpret_cast<const Ints&>(x) >> 31;
}

// out = mask ? a : b
FASTPLM_HD void choose(const Ints& mask, const Floats& a, const Floats& b, Floats& out) {
  const Ints chosen =
      (reinterpret_cast<const Ints&>(a) & mask) | (reinterpret_cast<const Ints&>(b) & ~mask);
  out = reinterpret_cast<const Floats&>(chosen);
}

// Several vectors that go through the same steps side by side: a CPU does the steps of one while it
// waits for those of another. So many are worth it:
constexpr int kTogether = 4;

template <int kCount>
struct Several {
  Floats each[kCount];
};

#define FASTPLM_SEVERAL(op)                                                                     \
  template <int kCount>                                                                         \
  FASTPLM_HD Several<kCount> operator op(const Several<kCount>& a, const Several<kCount>& b) {  \
    Several<kCount> out;                                                                        \
    for (int i = 0; i < kCount; ++i) out.each[i] = a.each[i] op b.each[i];                      \
    return out;                                                                                 \
  }                                                                                             \
  template <int kCount>                                                                         \
  FASTPLM_HD Several<kCount> operator op(const Several<kCount>& a, float b) {                   \
    Several<kCount> out;                                                                        \
    for (int i = 0; i < kCount; ++i) out.each[i] = a.each[i] op b;                              \
    return out;                                                                                 \
  }
FASTPLM_SEVERAL(+)
FASTPLM_SEVERAL(-)
FASTPLM_SEVERAL(*)
#undef FASTPLM_SEVERAL

template <int kCount>
FASTPLM_HD Several<kCount> load(const float* from) {
  Several<kCount> out;
  for (int i = 0; i < kCount; ++i) out.each[i] = at(from + i * kLane);
  return out;
}

template <int kCount>
FASTPLM_HD void store(const Several<kCount>& value, float* to) {
  for (int i = 0; i < kCount; ++i) at(to + i * kLane) = value.each[i];
}

// e^x for x <= 0 or NaN, to about an ulp: 2^n times a polynomial in the rest (Cephes' expf).
template <int kCount>
FASTPLM_HD Several<kCount> exponential(const Several<kCount>& x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Several<kCount> shifted = x * 1.44269504f + kMagic;
  const Several<kCount> n = shifted - kMagic;
  const Several<kCount> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Several<kCount> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  for (int i = 0; i < kCount; ++i) {
    // The low bits of `shifted` are n. Unsigned, as far below 0 they wrap round.
    const UInts bits = reinterpret_cast<const UInts&>(p.each[i]) +
                       (reinterpret_cast<const UInts&>(shifted.each[i]) << 23);
    // 0 from -87 down to minus infinity, but not where it is NaN.
    const Ints magnitude = reinterpret_cast<const Ints&>(x.each[i]) & 0x7FFFFFFF;
    const Ints zero = (0x42AE0000 - magnitude) & (magnitude - 0x7F800001);
    const Ints kept = reinterpret_cast<const Ints&>(bits) & ~(zero >> 31);
    p.each[i] = reinterpret_cast<const Floats&>(kept);
  }
  return p;
}

}  // namespace fastplm
