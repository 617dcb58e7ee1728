// Floating-point numbers in 16 bits, to fp32 and back. There are no branches, so that loops over
// them compile to vector code at every level.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/base.h"

namespace fastplm {

template <typename To, typename From>
FASTPLM_HD To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct Bf16 {
  Bf16() = default;
  // Rounds to the nearest, ties to even; NaN stays NaN.
  FASTPLM_HD explicit Bf16(float value) {
    const uint32_t from = bits_as<uint32_t>(value);
    const uint32_t rounded = (from + 0x7FFF + (from >> 16 & 1)) >> 16;
    bits = static_cast<uint16_t>(value != value ? 0x7FC0 : rounded);
  }
  FASTPLM_HD operator float() const { return bits_as<float>(uint32_t{bits} << 16); }

  uint16_t bits;
};

struct Fp16 {
  Fp16() = default;
  // Rounds to the nearest, ties to even, and to infinity beyond the largest number; NaN stays NaN.
  FASTPLM_HD explicit Fp16(float value) {
    const uint32_t from = bits_as<uint32_t>(value), sign = from >> 16 & 0x8000;
    const uint32_t magnitude = from & 0x7FFFFFFF;
    const uint32_t normal = (magnitude + 0xC8000FFF + (magnitude >> 13 & 1)) >> 13;
    // The sum with 1/2 rounds a subnormal number and has its digits in the lowest bits.
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3F000000;
    uint32_t out = magnitude < 0x38800000 ? subnormal : normal;
    out = magnitude >= 0x477FF000 ? 0x7C00 : out;
    out = magnitude > 0x7F800000 ? 0x7E00 : out;
    bits = static_cast<uint16_t>(sign | out);
  }
  // Sign, exponent and mantissa are moved to their places in fp32. A factor corrects the exponent's
  // bias and makes subnormal numbers normal. Infinity and NaN get their exponent in fp32.
  FASTPLM_HD operator float() const {
    const uint32_t magnitude = (uint32_t{bits} & 0x7FFF) << 13;
    const uint32_t scaled = bits_as<uint32_t>(bits_as<float>(magnitude) * 0x1p112f);
    const uint32_t special = magnitude > 0x0F7FFFFF ? 0x7F800000 : 0;
    return bits_as<float>(scaled | special | (uint32_t{bits} & 0x8000) << 16);
  }

  uint16_t bits;
};

}  // namespace fastplm
