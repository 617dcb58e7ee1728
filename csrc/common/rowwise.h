// What several operators compute of a row in fp32: dot products, softmax, and norms. Included once a level, after
// lanes.h.

namespace fastplm::FASTPLM_LEVEL {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// With several sums the CPU computes one while it waits for another.
template <int kSums = 1>
FASTPLM_HD float dot(int64_t count, const float* a, const float* b) {
  Several<kSums> sums = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= count; i += kSums * kWidth) {
    for (int k = 0; k < kSums; ++k) sums.each[k] += at(a + i + k * kWidth) * at(b + i + k * kWidth);
  }
  for (; i + kWidth <= count; i += kWidth) sums.each[0] += at(a + i) * at(b + i);
  float sum = sum_of(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// --- softmax --------------------------------------------------------------------------------------

// Scores as they lie in memory.
struct Stored {
  FASTPLM_HD Floats operator()(int64_t j) const { return at(scores + j); }
  const float* scores;
};

// The largest of `columns` scores, whole vectors, of which row(j) gives the one at j.
template <typename Row>
FASTPLM_HD float largest_of(const Row& row, int64_t columns) {
  Several<kTogether> largest;
  for (Floats& each : largest.each) each = Floats{} - kInfinity;
  const auto raise = [&](Floats& most, int64_t j) {
    const Floats score = row(j);
    most = score > most ? score : most;
  };
  int64_t j = 0;
  for (; j + kTogether * kWidth <= columns; j += kTogether * kWidth) {
    for (int i = 0; i < kTogether; ++i) raise(largest.each[i], j + i * kWidth);
  }
  for (; j < columns; j += kWidth) raise(largest.each[0], j);
  return maximum_of(largest);
}

// to [columns] = e^(score - most) * factor; returns the sum of the powers.
template <typename Row>
FASTPLM_HD float weights_of(const Row& row, int64_t columns, float most, float factor, float* to) {
  Floats total = {};
  int64_t j = 0;
  for (; j + kTogether * kWidth <= columns; j += kTogether * kWidth) {
    Several<kTogether> score;
    for (int i = 0; i < kTogether; ++i) score.each[i] = row(j + i * kWidth);
    const auto weight = exponential(score - most);
    for (const Floats& each : weight.each) total += each;
    store(weight * factor, to + j);
  }
  for (; j < columns; j += kWidth) {
    const auto weight = exponential(Several<1>{{row(j)}} - most);
    total += weight.each[0];
    store(weight * factor, to + j);
  }
  return sum_of(total);
}

// --- norms ----------------------------------------------------------------------------------------

// Layer norm, or T5's norm, which is the same about 0 in place of the mean:
//
//   norm(x) = (x - mean) / sqrt(variance + eps) weight + bias
//
// Sources: Ba, Kiros and Hinton 2016 (arXiv 1607.06450), section 3; Zhang and Sennrich 2019 (arXiv 1910.07467),
// equation 4.

FASTPLM_HD float mean_of(int64_t width, const float* x) {
  Block sum = {};
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    sum = sum + load_block<whole.value>(size, x + i);
  });
  return sum_of(sum) / static_cast<float>(width);
}

// The sum of the squares of x - mean.
FASTPLM_HD float squares_of(int64_t width, const float* x, float mean) {
  Block sum = {};
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block away = load_block<whole.value>(size, x + i, mean) - mean;
    sum = sum + away * away;
  });
  return sum_of(sum);
}

FASTPLM_HD float scale_of(float squares, int64_t width, float eps) {
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

// What a row is normed by.
struct Moments {
  float mean, scale;
};

FASTPLM_HD Moments moments_of(int64_t width, const float* x, float eps, bool centered) {
  const float mean = centered ? mean_of(width, x) : 0.0f;
  return {mean, scale_of(squares_of(width, x, mean), width, eps)};
}

// out [width] = (x - mean) scale weight + bias; out may be x; the bias is null if there is none.
FASTPLM_HD void scale_row(int64_t width, const Moments& moments, const float* weight, const float* bias,
                          const float* x, float* out) {
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const auto load = [&](const float* from) FASTPLM_INLINE { return load_block<whole.value>(size, from + i); };
    Block y = (load(x) - moments.mean) * moments.scale * load(weight);
    if (bias != nullptr) y = y + load(bias);
    store_block<whole.value>(size, y, out + i);
  });
}

// out [width] = norm(x); T5's is not centered.
FASTPLM_HD void norm_row(int64_t width, float eps, bool centered, const float* weight, const float* bias,
                         const float* x, float* out) {
  scale_row(width, moments_of(width, x, eps, centered), weight, bias, x, out);
}

}  // namespace fastplm::FASTPLM_LEVEL
