// The product of a linear layer in 8 bits: a row of A is quantized when it is used, B when it was packed.
//
//   q_a [m, k] = round(A[m, k] 127 / a[m]),  s_a [m] = a[m] / 127,  a[m] = max_k |A[m, k]|
//   C [m, n] = (sum_k q_a[m, k] q_b[n, k]) (s_a[m] s_b[n]) + bias[n]
//
// Sums are exact integers, so every way to add them up has the same result. B is packed in panels of 16
// columns, [panel, step, 16, 4]: a step is 4 k of each column, and q_b is stored as q_b + 128, as the
// instructions multiply bytes without a sign by bytes with one (VNNI). So sums begin at
// -128 sum_k q_a[m, k]. AVX2 without AVX-VNNI has no such instruction but pmaddubsw, whose sums of two products do
// not fit into its 16 bits: there both factors are widened to 16 bits, and pmaddwd adds up in 32.
//
// Source: Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient
// Integer-Arithmetic-Only Inference", section 2; rows scaled one by one as in Dettmers et al. 2022
// (arXiv 2208.07339), section 2. Included once a level, after vectors.h, lanes.h and linear.h.

namespace fastplm::FASTPLM_LEVEL {

constexpr int64_t kPanel = 16;     // columns of a panel
constexpr int64_t kStepDepth = 4;  // k of a step
constexpr int64_t kInt8Group = 64;  // columns that a thread computes at a time
constexpr float kMostQuantum = 127.0f;
// Rows with no larger number are zeros: 127 / a would overflow.
constexpr float kLeastPeak = 0x1p-119f;

// --- quantization ---------------------------------------------------------------------------------

// max |x|; NaN and infinity are the largest of all.
FASTPLM_HD float peak_of(int64_t width, const float* x) {
  Ints most = {};
  int64_t i = 0;
  for (; i + kWidth <= width; i += kWidth) {
    const Ints magnitude = reinterpret_cast<const Ints&>(at(x + i)) & INT32_MAX;
    most = magnitude > most ? magnitude : most;
  }
  int32_t peak = 0;
  for (int64_t lane = 0; lane < kWidth; ++lane) peak = std::max(peak, most[lane]);
  for (; i < width; ++i) {
    int32_t bits;
    std::memcpy(&bits, x + i, sizeof(bits));
    peak = std::max(peak, bits & INT32_MAX);
  }
  float out;
  std::memcpy(&out, &peak, sizeof(out));
  return out;
}

// Rows of A as their quanta, filled up with zeros to whole steps; Q is int8_t or int16_t.
template <typename Q>
struct Quanta {
  Q* at(int64_t m) const { return data + m * stride; }

  Q* data;
  int64_t stride;  // a whole number of steps
  float* scale;    // s_a
  int32_t* start;  // -128 sum_k q_a
};

// to [kWidth] = round(x factor), halves to even; returns their sum. The product is rounded by itself.
template <typename Q>
FASTPLM_HD int32_t quantize_some(int64_t count, const float* x, float factor, Q* to) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float value = x[i] * factor;
    const auto quantum = static_cast<int32_t>(std::nearbyint(value));
    to[i] = static_cast<Q>(quantum);
    sum += quantum;
  }
  return sum;
}

template <typename Q>
FASTPLM_HD void quantize_row(int64_t width, const float* x, int64_t m, const Quanta<Q>& out) {
  const float peak = peak_of(width, x);
  Q* to = out.at(m);
  std::fill(to + width, to + out.stride, Q(0));
  // What has NaN or infinity is NaN in the whole row of the result.
  const bool finite = peak <= std::numeric_limits<float>::max();
  const bool zero = peak < kLeastPeak;
  out.scale[m] = !finite ? std::numeric_limits<float>::quiet_NaN() : zero ? 0.0f : peak / kMostQuantum;
  if (!finite || zero) {
    std::fill_n(to, width, Q(0));
    out.start[m] = 0;
    return;
  }
  const float factor = kMostQuantum / peak;
  int32_t sum = 0;
  int64_t i = 0;
#if FASTPLM_WIDTH == 16
  __m512i sums = _mm512_setzero_si512();
  for (; i + 16 <= width; i += 16) {
    const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)));
    sums = _mm512_add_epi32(sums, q);
    if constexpr (sizeof(Q) == 1) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(q));
    } else {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(q));
    }
  }
  sum = _mm512_reduce_add_epi32(sums);
#elif FASTPLM_WIDTH == 8
  __m256i sums = _mm256_setzero_si256();
  for (; i + 8 <= width; i += 8) {
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(factor)));
    sums = _mm256_add_epi32(sums, q);
    const __m128i low = _mm256_castsi256_si128(q), high = _mm256_extracti128_si256(q, 1);
    const __m128i words = _mm_packs_epi32(low, high);
    if constexpr (sizeof(Q) == 1) {
      _mm_storeu_si64(to + i, _mm_packs_epi16(words, words));
    } else {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), words);
    }
  }
  alignas(32) int32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sums);
  for (int32_t lane : lanes) sum += lane;
#endif
  sum += quantize_some(width - i, x + i, factor, to + i);
  out.start[m] = -128 * sum;
}

// --- tiles ----------------------------------------------------------------------------------------

// C [rows, columns] int32 = start + A B, for rows of quanta and `panels` panels from `panel` on.
template <typename Q>
using Tile = void (*)(int64_t steps, const Q* a, int64_t a_row, const int32_t* start,
                      const uint8_t* panel, int64_t panels, int32_t* c);

// A kind of tile: of up to kRows rows and of kPanels panels.
struct ScalarTile {
  using Q = int16_t;
  static constexpr int64_t kRows = 4;
  static constexpr int64_t kPanels = 1;

  template <int64_t kHeight>
  static void run(int64_t steps, const Q* a, int64_t a_row, const int32_t* start,
                  const uint8_t* panel, int64_t, int32_t* c) {
    for (int64_t m = 0; m < kHeight; ++m, a += a_row, c += kPanel) {
      std::fill_n(c, kPanel, start[m]);
      const uint8_t* b = panel;
      for (int64_t step = 0; step < steps; ++step, b += kPanel * kStepDepth) {
        for (int64_t n = 0; n < kPanel; ++n) {
          for (int64_t k = 0; k < kStepDepth; ++k) {
            c[n] += a[step * kStepDepth + k] * b[n * kStepDepth + k];
          }
        }
      }
    }
  }
};

#if FASTPLM_WIDTH >= 8
// By pmaddwd: a vector of B is 4 k of 4 columns in 16 bits, and a sum has the even and the odd pairs of k of
// a column side by side, which are added at the end.
struct WideTile {
  using Q = int16_t;
  static constexpr int64_t kRows = 6;
  static constexpr int64_t kPanels = 1;

  template <int64_t kHeight>
  static void run(int64_t steps, const Q* a, int64_t a_row, const int32_t* start,
                  const uint8_t* panel, int64_t, int32_t* c) {
    for (int64_t half = 0; half < kPanel; half += 8) {
      const uint8_t* b = panel + half * kStepDepth;
      __m256i sum[kHeight][2] = {};
      for (int64_t step = 0; step < steps; ++step, b += kPanel * kStepDepth) {
        __m256i columns[2];
        for (int64_t n = 0; n < 2; ++n) {
          columns[n] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + 16 * n)));
        }
#pragma GCC unroll 6
        for (int64_t m = 0; m < kHeight; ++m) {
          int64_t four;
          std::memcpy(&four, a + m * a_row + step * kStepDepth, sizeof(four));
          const __m256i row = _mm256_set1_epi64x(four);
          for (int64_t n = 0; n < 2; ++n) {
            sum[m][n] = _mm256_add_epi32(sum[m][n], _mm256_madd_epi16(columns[n], row));
          }
          // One row after the other: the products of all would not fit into the registers.
          asm volatile("" : "+x"(sum[m][0]), "+x"(sum[m][1]));
        }
      }
#pragma GCC unroll 6
      for (int64_t m = 0; m < kHeight; ++m) {
        // The halves of hadd's result are of columns 0 1 4 5 and 2 3 6 7.
        const __m256i pairs = _mm256_permute4x64_epi64(_mm256_hadd_epi32(sum[m][0], sum[m][1]), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(c + m * kPanel + half),
                            _mm256_add_epi32(pairs, _mm256_set1_epi32(start[m])));
      }
    }
  }
};
#endif

#if FASTPLM_WIDTH == 16
// By vpdpbusd, which multiplies 16 times 4 bytes and adds them up in 32 bits.
struct VnniTile {
  using Q = int8_t;
  static constexpr int64_t kRows = 12;
  static constexpr int64_t kPanels = 2;

  template <int64_t kHeight>
  __attribute__((target("avx512vnni"))) static void run(int64_t steps, const Q* a, int64_t a_row,
                                                        const int32_t* start, const uint8_t* panel,
                                                        int64_t panels, int32_t* c) {
    // Where there is no second panel, the first is taken twice.
    const uint8_t* other = panels > 1 ? panel + steps * kPanel * kStepDepth : panel;
    __m512i sum[kHeight][2];
#pragma GCC unroll 12
    for (int64_t m = 0; m < kHeight; ++m) sum[m][0] = sum[m][1] = _mm512_set1_epi32(start[m]);
    for (int64_t step = 0; step < steps; ++step) {
      const __m512i first = _mm512_loadu_si512(panel + step * kPanel * kStepDepth);
      const __m512i second = _mm512_loadu_si512(other + step * kPanel * kStepDepth);
#pragma GCC unroll 12
      for (int64_t m = 0; m < kHeight; ++m) {
        int32_t four;
        std::memcpy(&four, a + m * a_row + step * kStepDepth, sizeof(four));
        const __m512i row = _mm512_set1_epi32(four);
        sum[m][0] = _mm512_dpbusd_epi32(sum[m][0], first, row);
        sum[m][1] = _mm512_dpbusd_epi32(sum[m][1], second, row);
      }
    }
#pragma GCC unroll 12
    for (int64_t m = 0; m < kHeight; ++m) {
      _mm512_storeu_si512(c + m * 2 * kPanel, sum[m][0]);
      _mm512_storeu_si512(c + m * 2 * kPanel + kPanel, sum[m][1]);
    }
  }
};
#elif FASTPLM_WIDTH == 8
// The same with 8 times 4 bytes: AVX-VNNI, which CPUs without AVX-512 have.
struct VnniTile {
  using Q = int8_t;
  static constexpr int64_t kRows = 6;
  static constexpr int64_t kPanels = 1;

  template <int64_t kHeight>
  __attribute__((target("avxvnni"))) static void run(int64_t steps, const Q* a, int64_t a_row,
                                                     const int32_t* start, const uint8_t* panel, int64_t,
                                                     int32_t* c) {
    __m256i sum[kHeight][2];
#pragma GCC unroll 6
    for (int64_t m = 0; m < kHeight; ++m) sum[m][0] = sum[m][1] = _mm256_set1_epi32(start[m]);
    for (int64_t step = 0; step < steps; ++step, panel += kPanel * kStepDepth) {
      const auto* halves = reinterpret_cast<const __m256i*>(panel);
      const __m256i first = _mm256_loadu_si256(halves), second = _mm256_loadu_si256(halves + 1);
#pragma GCC unroll 6
      for (int64_t m = 0; m < kHeight; ++m) {
        int32_t four;
        std::memcpy(&four, a + m * a_row + step * kStepDepth, sizeof(four));
        const __m256i row = _mm256_set1_epi32(four);
        sum[m][0] = _mm256_dpbusd_avx_epi32(sum[m][0], first, row);
        sum[m][1] = _mm256_dpbusd_avx_epi32(sum[m][1], second, row);
      }
    }
#pragma GCC unroll 6
    for (int64_t m = 0; m < kHeight; ++m) {
      for (int64_t n = 0; n < 2; ++n) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(c + m * kPanel) + n, sum[m][n]);
      }
    }
  }
};
#endif

// The tile of `rows` rows, one of kTile::kRows functions.
template <typename kTile, int64_t kHeight = kTile::kRows>
Tile<typename kTile::Q> tile_of(int64_t rows) {
  if constexpr (kHeight > 1) {
    if (rows < kHeight) return tile_of<kTile, kHeight - 1>(rows);
  }
  return kTile::template run<kHeight>;
}

// --- blocks ---------------------------------------------------------------------------------------

// A packed B [K, N], its scales and a bias, and where its product goes.
template <typename T>
struct Int8Factor {
  const uint8_t* weight;
  const float* scale;  // s_b [N]
  const T* bias;       // [N], or null
  T* out;              // rows out_row apart
};

// Rows first … last of columns n … n + kInt8Group of the product, and `finish` of each.
template <typename kTile, typename T, typename Finish>
void int8_block(const Quanta<typename kTile::Q>& a, int64_t steps, const Int8Factor<T>& factor,
                int64_t columns, int64_t out_row, int64_t first, int64_t last, int64_t n,
                const Finish& finish) {
  constexpr int64_t kTileColumns8 = kTile::kPanels * kPanel;
  const int64_t end = std::min(n + kInt8Group, columns), tiles = ceil_div(last - first, kTile::kRows);
  alignas(64) int32_t c[kTile::kRows * kTileColumns8];
  for (int64_t tile = 0; tile < tiles; ++tile) {
    const int64_t row = first + (last - first) * tile / tiles;
    const int64_t rows = first + (last - first) * (tile + 1) / tiles - row;
    const auto run = tile_of<kTile>(rows);
    for (int64_t column = n; column < end; column += kTileColumns8) {
      const int64_t width = std::min(kTileColumns8, end - column);
      run(steps, a.at(row), a.stride, a.start + row, factor.weight + column * steps * kStepDepth,
          ceil_div(width, kPanel), c);
      for (int64_t m = 0; m < rows; ++m) {
        T* out = factor.out + (row + m) * out_row + column;
        const float scale = a.scale[row + m];
        for (int64_t i = 0; i < width; ++i) {
          const float start = factor.bias == nullptr ? 0.0f : static_cast<float>(factor.bias[column + i]);
          const float value = static_cast<float>(c[m * kTileColumns8 + i]) * (scale * factor.scale[column + i]);
          out[i] = static_cast<T>(value + start);
        }
      }
    }
    for (int64_t m = row; m < row + rows; ++m) finish(m, n, end - n, factor.out + m * out_row + n);
  }
}

}  // namespace fastplm::FASTPLM_LEVEL
