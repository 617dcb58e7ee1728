// Products of fp32 matrices by the matrix units of AMX, which multiply bf16 and add up in fp32.
//
//   x = hi(x) + lo(x) + r,   hi(x) = bf16(x), lo(x) = bf16(x - hi(x)), |r| <= 2^-18 |x|
//   a b ~ lo(a) hi(b) + hi(a) lo(b) + hi(a) hi(b)
//
// So three products replace one, each more than ten times as fast as one in fp32. lo(a) lo(b), up
// to 2^-18 |a b|, is left out. If x is infinite, lo(x) is NaN.
//
//   C [M, N] = A [M, K] B [K, N] + bias [N]
//
// A tile holds 16 rows of 64 bytes. K is cut into steps of 32: a step of A is a tile [16 rows, 32 k], one
// of B [16 pairs of k, 16 columns x 2]. Both are packed with hi and lo side by side. 2 x 2 tiles of C stay
// in the unit; per step that costs 8 loads of tiles for 12 products.
//
// Source: Henry, Tang and Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations" (arXiv 1904.06376).
#pragma once

#include <algorithm>
#include <cstdint>

#include "base.h"
#include "level.h"

#if FASTPLM_HAS_LEVELS && defined(__linux__)
#define FASTPLM_HAS_AMX 1
#else
#define FASTPLM_HAS_AMX 0
#endif

namespace fastplm {

// A matrix in fp32: element (i, j) is at i * row + j * col, and row or col is 1.
struct Fp32Matrix {
  Fp32Matrix transposed() const { return {data, columns, rows, col, row}; }
  const float* at(int64_t i, int64_t j) const { return data + i * row + j * col; }

  const float* data;
  int64_t rows, columns, row, col;
};

}  // namespace fastplm

#if FASTPLM_HAS_AMX
// The code from here on is compiled for AMX, so only CPUs that have it may run it.
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,amx-tile,amx-bf16")
#pragma GCC diagnostic push
// These warnings are false alarms, as GCC's own header leaves values undefined.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace fastplm::amx {

constexpr int64_t kSide = 16;          // rows of a tile, and columns of a tile of C
constexpr int64_t kStep = 2 * kSide;   // k of a step
constexpr int64_t kPair = 2 * kSide;   // rows and columns of C that are computed together
constexpr int64_t kBlock = 4 * kPair;  // rows of A that a thread multiplies by all columns of B

struct alignas(64) Tile {
  __m512i rows[kSide];
};

// One step of a tile of A, or of B.
struct Halves {
  Tile hi, lo;
};

// --- packing ----------------------------------------------------------------------------------------

// The mask of the first lanes.
inline __mmask16 lanes_below(int64_t count) {
  return static_cast<__mmask16>(count >= 16 ? 0xffff : count <= 0 ? 0 : (1 << count) - 1);
}

inline __m512i rounded(__m512 low, __m512 high) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
}

inline __m512 widened(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Both halves (hi and lo) of 32 numbers: those of low[i] in element i, of high[i] in element 16 +
// i.
inline void split(__m512 low, __m512 high, __m512i& hi, __m512i& lo) {
  hi = rounded(low, high);
  lo = rounded(_mm512_sub_ps(low, widened(_mm512_castsi512_si256(hi))),
               _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(hi, 1))));
}

// Transposes: rows[i] element j = rows[j] element i, of 32 bits each.
inline void transpose(Tile& tile) {
  __m512i* r = tile.rows;
  __m512i t[kSide];
  for (int i = 0; i < kSide; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < kSide; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 g + c], lane l: column 4 l + c of rows 4 g … 4 g + 3.
  for (int c = 0; c < 4; ++c) {
    t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
    t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
    t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
    r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
    r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
  }
}

// Packs k … k + 31 of rows i … i + 15, with zeros past the end: out row r holds elements of row i +
// r.
inline void pack_along(const Fp32Matrix& from, int64_t i, int64_t k, Halves& out) {
  const int64_t left = from.columns - k;
  for (int64_t r = 0; r < kSide; ++r) {
    const int64_t given = i + r < from.rows ? left : 0;
    const float* row = from.at(std::min(i + r, from.rows - 1), k);
    const __mmask16 low = lanes_below(given), high = lanes_below(given - kSide);
    split(_mm512_maskz_loadu_ps(low, row), _mm512_maskz_loadu_ps(high, row + kSide), out.hi.rows[r],
          out.lo.rows[r]);
  }
}

// The same for contiguous columns: out row r holds pair r of k of rows i … i + 15.
inline void pack_across(const Fp32Matrix& from, int64_t i, int64_t k, Halves& out) {
  const __mmask16 given = lanes_below(from.rows - i);
  // Interleaves rows k and k + 1 to pairs.
  const __m512i places = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                          23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  for (int64_t r = 0; r < kSide; ++r, k += 2) {
    const __mmask16 one = k < from.columns ? given : 0, two = k + 1 < from.columns ? given : 0;
    const float* row = from.at(i, k);
    __m512i hi, lo;
    split(_mm512_maskz_loadu_ps(one, row), _mm512_maskz_loadu_ps(two, row + from.col), hi, lo);
    out.hi.rows[r] = _mm512_permutexvar_epi16(places, hi);
    out.lo.rows[r] = _mm512_permutexvar_epi16(places, lo);
  }
}

// A tile of A has a row for each row of A; a tile of B has a row for each pair of k (`paired`).
inline void pack(const Fp32Matrix& from, int64_t i, int64_t k, bool paired, Halves& out) {
  const bool along = from.col == 1;
  if (along) {
    pack_along(from, i, k, out);
  } else {
    pack_across(from, i, k, out);
  }
  if (along == paired) {
    transpose(out.hi);
    transpose(out.lo);
  }
}

// --- the product ------------------------------------------------------------------------------------

// Configures all eight tiles of this thread with 16 rows of 64 bytes, while the object lives. The
// configuration is a constant, as GCC does not see that more than its first bytes are read.
struct Tiles {
  struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  alignas(64) static constexpr Config kConfig = {
      1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

  Tiles() { _tile_loadconfig(&kConfig); }
  ~Tiles() { _tile_release(); }
};

// Adds the products of tiles 4 and 5 (of A) and 6 and 7 (of B) to tiles 0 to 3 (2 x 2 of C).
inline void add_products() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// c [32, 32] = the product of two tiles of rows of A and two of columns of B, with `steps` each;
// the small products are added first.
inline void multiply_tiles(const Halves* a0, const Halves* a1, const Halves* b0, const Halves* b1,
                           int64_t steps, float* c) {
  constexpr int64_t kBytes = sizeof(__m512i), kRow = kPair * sizeof(float);
  __asm__ volatile("" ::: "memory");  // GCC does not see that _tile_loadd reads memory
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    _tile_loadd(4, &a0[s].hi, kBytes);
    _tile_loadd(5, &a1[s].hi, kBytes);
    _tile_loadd(6, &b0[s].lo, kBytes);
    _tile_loadd(7, &b1[s].lo, kBytes);
    add_products();
    _tile_loadd(6, &b0[s].hi, kBytes);
    _tile_loadd(7, &b1[s].hi, kBytes);
    add_products();
    _tile_loadd(4, &a0[s].lo, kBytes);
    _tile_loadd(5, &a1[s].lo, kBytes);
    add_products();
  }
  _tile_stored(0, c, kRow);
  _tile_stored(1, c + kSide, kRow);
  _tile_stored(2, c + kSide * kPair, kRow);
  _tile_stored(3, c + kSide * kPair + kSide, kRow);
}

// out = the first rows and columns of c [32, 32] + bias.
inline void store(const float* c, const float* bias, int64_t rows, int64_t columns, float* out,
                  int64_t stride) {
  for (int64_t n = 0; n < columns; n += kSide) {
    const __mmask16 mask = lanes_below(columns - n);
    const __m512 start = bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, bias + n);
    for (int64_t m = 0; m < rows; ++m) {
      const __m512 sum = _mm512_add_ps(_mm512_load_ps(c + m * kPair + n), start);
      _mm512_mask_storeu_ps(out + m * stride + n, mask, sum);
    }
  }
}

// Packs the steps of the tiles `begin` … `end` - 1, 16 rows each. The tiles of B's columns are
// packed from its transpose, with `paired`.
inline void pack_tiles(const Fp32Matrix& from, int64_t begin, int64_t end, int64_t steps, bool paired,
                       Halves* packed) {
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t s = 0; s < steps; ++s) pack(from, tile * kSide, s * kStep, paired, *packed++);
  }
}

// Computes `rows` rows of C at `out`, columns n … end of `columns`, in a thread that has Tiles.
// `left` has the tiles of these rows, `right` those of all columns.
inline void block_product(const Halves* left, const Halves* right, const float* bias, int64_t steps,
                          int64_t rows, int64_t n, int64_t end, int64_t columns, float* out) {
  alignas(64) float c[kPair * kPair];
  for (; n < end; n += kPair) {
    const Halves* panel = right + n / kSide * steps;
    for (int64_t m = 0; m < rows; m += kPair) {
      const Halves* at = left + m / kSide * steps;
      multiply_tiles(at, at + steps, panel, panel + steps, steps, c);
      store(c, bias == nullptr ? nullptr : bias + n, std::min(kPair, rows - m),
            std::min(kPair, end - n), out + m * columns + n, columns);
    }
  }
}

}  // namespace fastplm::amx

#pragma GCC diagnostic pop
#pragma GCC pop_options
#endif
