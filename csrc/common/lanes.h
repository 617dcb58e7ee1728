// Vectors of floats as wide as the level's registers, by the extension of GCC and Clang. Included once a
// level.
//
// Never use a wider type: a compiler splits it, at many times the cost.

namespace fastplm {
struct Fp16;
}

namespace fastplm::FASTPLM_LEVEL {

constexpr int64_t kWidth = FASTPLM_WIDTH;
// Vector registers.
constexpr int kRegisters = FASTPLM_REGISTERS;

using Floats = float __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
using Ints = int32_t __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
using UInts = uint32_t __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
using EightFloats = float __attribute__((vector_size(32), aligned(4), may_alias));
using HalfBits = int16_t __attribute__((vector_size(16), aligned(2), may_alias));

FASTPLM_HD Floats& at(float* pointer) {
  return *reinterpret_cast<Floats*>(pointer);
}

FASTPLM_HD const Floats& at(const float* pointer) {
  return *reinterpret_cast<const Floats*>(pointer);
}

// Lane i of the result is lane `from[i]` of `a` and `b`, whose lanes are numbered behind those of
// `a`. (The result is not returned, as the ABI decides how a vector is returned.)
FASTPLM_HD void shuffle(const Floats& a, const Floats& b, const Ints& from, Floats& out) {
#if defined(__clang__)
  for (int i = 0; i < kWidth; ++i) out[i] = from[i] < kWidth ? a[from[i]] : b[from[i] - kWidth];
#else
  out = __builtin_shuffle(a, b, from);
#endif
}

// One result has the lanes of `a` whose number lacks the bit kBit, and in between the lanes of `b`
// that lack it. The other result has the lanes that have the bit, in the same way.
template <int kBit>
FASTPLM_HD void exchange(const Floats& a, const Floats& b, Floats& without, Floats& with) {
  Ints first, second;
  for (int lane = 0; lane < kWidth; ++lane) {
    first[lane] = lane & kBit ? kWidth + (lane ^ kBit) : lane;
    second[lane] = lane & kBit ? kWidth + lane : lane ^ kBit;
  }
  const Floats left = a, right = b;
  shuffle(left, right, first, without);
  shuffle(left, right, second, with);
}

// Transposes kWidth rows of kWidth lanes. For each bit of the numbers, two rows exchange half of
// their lanes: the lanes with the bit of one, and the lanes without it of the other.
template <int kBit = 1>
FASTPLM_HD void transpose(Floats* rows) {
  if constexpr (kBit < kWidth) {
    for (int i = 0; i < kWidth; ++i) {
      if ((i & kBit) == 0) exchange<kBit>(rows[i], rows[i | kBit], rows[i], rows[i | kBit]);
    }
    transpose<2 * kBit>(rows);
  }
}

// Combines all lanes by op, half by half: a lane index that is no constant would go through memory.
template <typename Op>
FASTPLM_HD float reduce(const Floats& lanes, const Op& op) {
  using Four = float __attribute__((vector_size(16), aligned(4), may_alias));
  Four four;
  if constexpr (kWidth == 4) {
    four = reinterpret_cast<const Four&>(lanes);
  } else {
    EightFloats eight;
    if constexpr (kWidth == 16) {
      const EightFloats* halves = reinterpret_cast<const EightFloats*>(&lanes);
      op(halves[0], halves[1], eight);
    } else {
      eight = reinterpret_cast<const EightFloats&>(lanes);
    }
    const Four* quarters = reinterpret_cast<const Four*>(&eight);
    op(quarters[0], quarters[1], four);
  }
  const float first[2] = {four[0], four[1]}, second[2] = {four[2], four[3]};
  float pair[2], out;
  op(first[0], second[0], pair[0]);
  op(first[1], second[1], pair[1]);
  op(pair[0], pair[1], out);
  return out;
}

FASTPLM_HD float sum_of(const Floats& lanes) {
  return reduce(lanes, [](const auto& a, const auto& b, auto& out) { out = a + b; });
}

FASTPLM_HD float maximum_of(const Floats& lanes) {
  return reduce(lanes, [](const auto& a, const auto& b, auto& out) { out = a > b ? a : b; });
}

// The result has all bits of a lane set where x is negative:
FASTPLM_HD void sign_of(const Floats& x, Ints& mask) {
  mask = reinterpret_cast<const Ints&>(x) >> 31;
}

// out = mask ? a : b
FASTPLM_HD void choose(const Ints& mask, const Floats& a, const Floats& b, Floats& out) {
  const Ints chosen =
      (reinterpret_cast<const Ints&>(a) & mask) | (reinterpret_cast<const Ints&>(b) & ~mask);
  out = reinterpret_cast<const Floats&>(chosen);
}

// Several vectors that take the same steps side by side: the CPU computes one while it waits for
// another. This many fit in the registers, beside the operands of a step.
constexpr int kTogether = kRegisters / 8;

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
  for (int i = 0; i < kCount; ++i) out.each[i] = at(from + i * kWidth);
  return out;
}

template <int kCount>
FASTPLM_HD void store(const Several<kCount>& value, float* to) {
  for (int i = 0; i < kCount; ++i) at(to + i * kWidth) = value.each[i];
}

template <int kCount>
FASTPLM_HD float sum_of(const Several<kCount>& block) {
  Floats sum = block.each[0];
  for (int i = 1; i < kCount; ++i) sum += block.each[i];
  return sum_of(sum);
}

template <int kCount>
FASTPLM_HD float maximum_of(const Several<kCount>& block) {
  Floats most = block.each[0];
  for (int i = 1; i < kCount; ++i) most = block.each[i] > most ? block.each[i] : most;
  return maximum_of(most);
}

// Numbers of any type to floats, and back. A loop that is unrolled first is not made of vectors.
template <typename T>
FASTPLM_HD void widen(int64_t count, const T* from, float* to) {
  int64_t whole = 0;
#if FASTPLM_F16C
  if constexpr (std::is_same_v<T, Fp16>) {
    whole = count / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8) {
      const auto& bits = *reinterpret_cast<const HalfBits*>(from + i);
      *reinterpret_cast<EightFloats*>(to + i) = __builtin_ia32_vcvtph2ps256(bits);
    }
  }
#endif
#pragma GCC unroll 1
  for (int64_t i = whole; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

template <typename T>
FASTPLM_HD void round_to(int64_t count, const float* from, T* to) {
  int64_t whole = 0;
#if FASTPLM_F16C
  if constexpr (std::is_same_v<T, Fp16>) {
    whole = count / 8 * 8;
    for (int64_t i = 0; i < whole; i += 8) {
      const auto& floats = *reinterpret_cast<const EightFloats*>(from + i);
      *reinterpret_cast<HalfBits*>(to + i) = __builtin_ia32_vcvtps2ph256(floats, 0);  // to the nearest, ties to even
    }
  }
#endif
#pragma GCC unroll 1
  for (int64_t i = whole; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// A block of elements, all of which are read before the first is written.
constexpr int64_t kBlockSize = kTogether * kWidth;
using Block = Several<kTogether>;

// Loads `count` elements as fp32, filled up with `rest`, and stores them. With kWhole they are a
// whole block, whose size the compiler knows.
template <bool kWhole, typename T>
FASTPLM_HD Block load_block(int64_t count, const T* from, float rest = 0.0f) {
  if constexpr (kWhole && std::is_same_v<T, float>) {
    return load<kTogether>(from);
  } else {
    float value[kBlockSize];
    for (int64_t i = 0; i < kBlockSize; ++i) value[i] = rest;
    widen(kWhole ? kBlockSize : count, from, value);
    return load<kTogether>(value);
  }
}

template <bool kWhole, typename T>
FASTPLM_HD void store_block(int64_t count, const Block& block, T* to) {
  if constexpr (kWhole && std::is_same_v<T, float>) {
    store(block, to);
  } else {
    float value[kBlockSize];
    store(block, value);
    round_to(kWhole ? kBlockSize : count, value, to);
  }
}

// Calls function(whole, i, size) for each block of `count` elements, which begins at i; the last
// block may be shorter.
template <typename Function>
FASTPLM_HD void for_blocks(int64_t count, const Function& function) {
  int64_t i = 0;
  for (; i + kBlockSize <= count; i += kBlockSize) function(std::true_type(), i, kBlockSize);
  if (i < count) function(std::false_type(), i, count - i);
}

// Whether rows of `width` elements of T can be used as they are: floats that need no filling up.
template <typename T>
FASTPLM_HD constexpr bool are_floats(int64_t width, int64_t filled) {
  return std::is_same_v<T, float> && width == filled;
}

// A row of `width` elements as floats, filled up with zeros to `filled`: the row itself if it can be used as
// it is, or a copy in `room`.
template <typename T>
FASTPLM_HD const float* as_floats(int64_t width, int64_t filled, const T* row, float* room) {
  if constexpr (std::is_same_v<T, float>) {
    if (are_floats<T>(width, filled)) return row;
  }
  widen(width, row, room);
  for (int64_t i = width; i < filled; ++i) room[i] = 0.0f;
  return room;
}

// Memory to write such a row to; `narrow` then copies the row to `out`, unless it was written
// there.
template <typename T>
FASTPLM_HD float* floats_for(int64_t width, int64_t filled, T* out, float* room) {
  if constexpr (std::is_same_v<T, float>) {
    if (are_floats<T>(width, filled)) return out;
  }
  return room;
}

template <typename T>
FASTPLM_HD void narrow(int64_t width, const float* row, T* out) {
  if constexpr (std::is_same_v<T, float>) {
    if (row == out) return;
  }
  round_to(width, row, out);
}

// out [width] = factor times the sum over parts [parts, stride], in order and in fp64, as there may be
// many. total is `width` zeros.
template <typename T>
FASTPLM_HD void sum_parts(int64_t parts, int64_t width, int64_t stride, const float* from,
                          double factor, double* total, T* out) {
  for (int64_t part = 0; part < parts; ++part, from += stride) {
    for (int64_t i = 0; i < width; ++i) total[i] += static_cast<double>(from[i]);
  }
  for (int64_t i = 0; i < width; ++i) out[i] = static_cast<T>(static_cast<float>(total[i] * factor));
}

// e^x for x <= 0 or NaN, to about an ulp: 2^n times a polynomial in the rest (Cephes' expf).
template <int kCount>
FASTPLM_HD Several<kCount> exponential(const Several<kCount>& x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Several<kCount> shifted = x * 1.44269504f + kMagic;
  const Several<kCount> n = shifted - kMagic;
  const Several<kCount> r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  // The terms are added in pairs, so that a step waits for half as many earlier ones.
  const Several<kCount> rr = r * r;
  Several<kCount> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * rr + (r * 8.3334519073e-3f + 4.1665795894e-2f);
  p = p * rr + (r * 1.6666665459e-1f + 5.0000001201e-1f);
  p = p * rr + r + 1.0f;
  for (int i = 0; i < kCount; ++i) {
    // The low bits of `shifted` are n. They are unsigned, as they wrap round far below 0.
    const UInts bits = reinterpret_cast<const UInts&>(p.each[i]) +
                       (reinterpret_cast<const UInts&>(shifted.each[i]) << 23);
    // The result is 0 from -87 down to minus infinity, but NaN stays NaN.
    const Ints kept = reinterpret_cast<const Ints&>(bits) & ~(x.each[i] < -87.0f);
    p.each[i] = reinterpret_cast<const Floats&>(kept);
  }
  return p;
}

}  // namespace fastplm::FASTPLM_LEVEL
