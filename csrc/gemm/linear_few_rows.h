// The product of a linear layer with few rows, in one pass over a weight whose rows are contiguous (Conv1D, the
// gradient of nn.Linear's input); linear_in_place.h is for one whose columns are (nn.Linear).
//
//   C [M, N] = A [M, K] B [K, N]      A and C in fp32; B in fp32, fp16 or bf16, widened on the way
//
// Reading B takes most of the time: there are only 2 M operations an element. To pack B first
// (linear.h) would read it twice and write it once. So B is read in place, each vector is used for
// all rows, and the next vectors are prefetched.
//
//   stream  rows of A are 4 at most: a thread reads a slice of K from one end to the other, as memory is fastest so.
//           Its sums are added to those of the other slices in the end;
//   outer   rows of A are more: vectors of N, to which a few steps of K are added.
//
// Included once a level, after lanes.h.

namespace fastplm::FASTPLM_LEVEL {

// An outer tile adds up kOuterDepth steps of K at a time, so it reads this many rows of B side by
// side. Each kOuterSlice steps are summed apart, then added to the rest: this rounds less than one
// long sum.
constexpr int64_t kOuterDepth = 16;
constexpr int64_t kOuterSlice = 384;
// A stream reads so many rows of B side by side, and prefetches the next ones. Its slices are as long as an outer one
// at most, of whole steps.
constexpr int64_t kStreamDepth = 4;
constexpr int kStreamVectors = 2;
constexpr int64_t kStreamColumns = kStreamVectors * kWidth;
constexpr int64_t kStreamRows = 4;
// B is prefetched so many elements ahead.
constexpr int64_t kOuterAhead = 48;
// A thread computes at most so many rows and columns at a time, columns in multiples of the unit.
constexpr int64_t kFewRows = 64;
constexpr int64_t kFewColumns = 384;
constexpr int64_t kFewUnit = 48;

// A [rows, depth], filled up with zeros to whole tiles and vectors; rows lie `stride` apart.
struct FewRows {
  const float* at(int64_t m) const { return data + m * stride; }
  FewRows from(int64_t k) const { return {data + k, rows, depth - k, stride}; }

  const float* data;
  int64_t rows, depth, stride;
};

// A tile has as many sums as the registers hold beside the operands: fewer sums would wait for one
// another, and need more loads for each product.
constexpr int kOuterVectors = 3;
constexpr int kOuterColumns = kOuterVectors * kWidth;
constexpr int kMostOuterRows = kRegisters == 32 ? 8 : 4;
static_assert(kFewColumns % kFewUnit == 0 && kFewUnit % kOuterColumns == 0);

// --- numbers -------------------------------------------------------------------------------------

FASTPLM_HD void widen(const float* from, Floats& to) { to = at(from); }

// Written lane by lane, of which GCC makes one instruction.
template <typename T>
FASTPLM_HD void bits_of(const T* from, UInts& to) {
  for (int i = 0; i < kWidth; ++i) to[i] = from[i].bits;
}
FASTPLM_HD void widen(const Bf16* from, Floats& to) {
  UInts bits;
  bits_of(from, bits);
  bits <<= 16;
  to = reinterpret_cast<const Floats&>(bits);
}
// Without an instruction sign, exponent and mantissa are moved to their places in fp32. A factor corrects the
// exponent's bias and makes subnormal numbers normal. Infinity and NaN get their exponent in fp32.
FASTPLM_HD void widen(const Fp16* from, Floats& to) {
#if FASTPLM_WIDTH == 16
  to = reinterpret_cast<const Floats&>(
      static_cast<const __m512&>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))));
#elif FASTPLM_WIDTH == 8
  to = reinterpret_cast<const Floats&>(
      static_cast<const __m256&>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))));
#else
  UInts bits;
  bits_of(from, bits);
  const UInts magnitude = (bits & 0x7FFF) << 13;
  const Floats scaled = reinterpret_cast<const Floats&>(magnitude) * 0x1p112f;
  const Ints special = (0x0F7FFFFF - reinterpret_cast<const Ints&>(magnitude)) >> 31;
  const UInts out = reinterpret_cast<const UInts&>(scaled) | ((bits & 0x8000) << 16) |
                    (reinterpret_cast<const UInts&>(special) & 0x7F800000u);
  to = reinterpret_cast<const Floats&>(out);
#endif
}

// to [rows, width] = from [rows, count], filled up with zeros; width is whole vectors, rows lie to_row apart.
template <int64_t kAhead, typename T>
FASTPLM_HD void widen_rows(int64_t rows, int64_t count, const T* from, int64_t from_row, float* to,
                           int64_t width, int64_t to_row) {
  for (int64_t row = 0; row < rows; ++row, from += from_row, to += to_row) {
    int64_t i = 0;
    for (; i + kWidth <= count; i += kWidth) {
      widen(from + i, at(to + i));
      __builtin_prefetch(from + i + kAhead);
    }
    for (; i < width; i += kWidth) {
      T rest[kWidth] = {};
      if (i < count) std::memcpy(rest, from + i, sizeof(T) * (count - i));
      widen(rest, at(to + i));
    }
  }
}

// --- outer ---------------------------------------------------------------------------------------

// C [kRows, kOuterColumns] (+)= A B over `depth` steps of K.
template <int kRows, bool kFetch, typename T>
FASTPLM_HD void outer_tile(int64_t depth, const float* a, int64_t a_row, const T* b, int64_t b_row,
                           bool add, float* c) {
  Floats sum[kRows][kOuterVectors] = {};
  for (int64_t k = 0; k < depth; ++k, b += b_row) {
    Floats right[kOuterVectors];
    for (int n = 0; n < kOuterVectors; ++n) {
      widen(b + n * kWidth, right[n]);
      if (kFetch) __builtin_prefetch(b + n * kWidth + kOuterAhead);
    }
    for (int m = 0; m < kRows; ++m) {
      const float left = a[m * a_row + k];
      for (int n = 0; n < kOuterVectors; ++n) sum[m][n] += left * right[n];
    }
  }
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kOuterVectors; ++n) {
      float* to = c + m * kFewColumns + n * kWidth;
      at(to) = add ? at(to) + sum[m][n] : sum[m][n];
    }
  }
}

template <int kRows, typename T>
FASTPLM_HD void outer_tiles(const FewRows& a, int64_t depth, const T* b, int64_t b_row, bool add,
                            float* c) {
  outer_tile<kRows, true>(depth, a.at(0), a.stride, b, b_row, add, c);
  for (int64_t m = kRows; m < a.rows; m += kRows) {
    outer_tile<kRows, false>(depth, a.at(m), a.stride, b, b_row, add, c + m * kFewColumns);
  }
}

// C [rows, columns filled up to kOuterColumns] = A B over the first kOuterSlice steps of K.
template <int kRows, typename T>
FASTPLM_HD void outer_slice(const FewRows& a, const T* b, int64_t b_row, int64_t columns,
                            float* c) {
  const int64_t end = std::min(kOuterSlice, a.depth);
  for (int64_t k = 0; k < end; k += kOuterDepth) {
    const int64_t depth = std::min(kOuterDepth, end - k);
    const FewRows part = a.from(k);
    for (int64_t n = 0; n < columns; n += kOuterColumns) {
      const T* from = b + k * b_row + n;
      const bool whole = columns - n >= kOuterColumns;
      if (whole && (sizeof(T) == sizeof(float) || a.rows == kRows)) {
        outer_tiles<kRows>(part, depth, from, b_row, k > 0, c + n);
      } else {
        alignas(64) float wide[kOuterDepth * kOuterColumns];
        const int64_t count = whole ? kOuterColumns : columns - n;
        widen_rows<kOuterAhead>(depth, count, from, b_row, wide, kOuterColumns, kOuterColumns);
        outer_tiles<kRows>(part, depth, wide, kOuterColumns, k > 0, c + n);
      }
    }
  }
}

// The same for all steps; slice [kFewRows, kFewColumns] is for the sums of one slice.
template <int kRows, typename T>
FASTPLM_HD void outer(const FewRows& a, const T* b, int64_t b_row, int64_t columns, float* slice, float* c) {
  outer_slice<kRows>(a, b, b_row, columns, c);
  for (int64_t k = kOuterSlice; k < a.depth; k += kOuterSlice) {
    outer_slice<kRows>(a.from(k), b + k * b_row, b_row, columns, slice);
    for (int64_t m = 0; m < a.rows; ++m) {
      for (int64_t n = 0; n < columns; n += kWidth) {
        at(c + m * kFewColumns + n) += at(slice + m * kFewColumns + n);
      }
    }
  }
}

// --- stream --------------------------------------------------------------------------------------

// C [kRows, columns filled up to kStreamColumns] (+)= A B over kDepth steps of K. So many rows of B from `ahead` on
// are prefetched.
template <int kRows, int kDepth, typename T>
FASTPLM_HD void stream_steps(const float* a, int64_t a_row, const T* b, int64_t b_row, int64_t columns,
                             const T* ahead, bool add, float* c, int64_t c_row) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t n = 0; n < columns; n += kStreamColumns) {
    Floats right[kDepth][kStreamVectors];
    for (int k = 0; k < kDepth; ++k) {
      const T* from = b + k * b_row + n;
      T rest[kStreamColumns];
      if (columns - n < kStreamColumns) {
        std::fill(rest, rest + kStreamColumns, T{});
        from = static_cast<const T*>(std::memcpy(rest, from, sizeof(T) * (columns - n)));
      }
      for (int v = 0; v < kStreamVectors; ++v) widen(from + v * kWidth, right[k][v]);
      for (int64_t i = 0; i < kStreamColumns; i += kLine) __builtin_prefetch(ahead + k * b_row + n + i);
    }
    for (int m = 0; m < kRows; ++m) {
      Floats sum[kStreamVectors] = {};
      for (int k = 0; k < kDepth; ++k) {
        const float left = a[m * a_row + k];
        for (int v = 0; v < kStreamVectors; ++v) sum[v] += left * right[k][v];
      }
      for (int v = 0; v < kStreamVectors; ++v) {
        float* to = c + m * c_row + n + v * kWidth;
        at(to) = add ? at(to) + sum[v] : sum[v];
      }
    }
  }
}

// C [kRows, columns filled up to kStreamColumns] = A B, with rows of C that lie c_row apart.
template <int kRows, typename T>
FASTPLM_HD void stream(const FewRows& a, const T* b, int64_t b_row, int64_t columns, float* c, int64_t c_row) {
  int64_t k = 0;
  for (; k + kStreamDepth <= a.depth; k += kStreamDepth) {
    const T* from = b + k * b_row;
    const T* ahead = from + kStreamDepth * b_row;
    stream_steps<kRows, kStreamDepth>(a.at(0) + k, a.stride, from, b_row, columns, ahead, k > 0, c, c_row);
  }
  for (; k < a.depth; ++k) {
    const T* from = b + k * b_row;
    stream_steps<kRows, 1>(a.at(0) + k, a.stride, from, b_row, columns, from, k > 0, c, c_row);
  }
}

}  // namespace fastplm::FASTPLM_LEVEL
