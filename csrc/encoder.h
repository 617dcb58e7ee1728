// What an encoder's layer does between its products, row by row in fp32.
//
//   gelu(x) = x Phi(x)                        Phi the normal distribution's function
//   norm(x) = (x - mean) / sqrt(variance + eps) weight + bias
//
// Sources: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2; Ba, Kiros and Hinton 2016 (arXiv
// 1607.06450), section 3. Included once a level, after lanes.h and gelu.h.

namespace fastplm::FASTPLM_LEVEL {

// Phi(x) = erfc(z) / 2 where x is negative, and 1 - erfc(z) / 2 elsewhere; z = |x| / sqrt(2).
// erfc(z) = t e^(p(t) - z^2) with t = 1 / (1 + z / 2), as in Numerical Recipes (Press et al. 1992, section
// 6.2); this p is a fit of our own to double precision, 6e-9 of erfc away at most for z up to 9.5.
FASTPLM_HD void gelu_by_erf(Block& x) {
  constexpr float p[] = {-1.26558518f, 1.00197923f,  0.351640612f, 0.241523638f,
                         -0.76602459f, 1.78919208f,  -3.73588848f, 4.42309475f,
                         -2.90740967f, 1.01676643f,  -0.149288610f};
  Block z, t;
  for (int i = 0; i < kTogether; ++i) {
    const Ints magnitude = reinterpret_cast<const Ints&>(x.each[i]) & INT32_MAX;
    z.each[i] = reinterpret_cast<const Floats&>(magnitude) * 0.707106781f;
    t.each[i] = 1.0f / (z.each[i] * 0.5f + 1.0f);
  }
  Block sum = t * p[10] + p[9];
  for (int k = 8; k >= 0; --k) sum = sum * t + p[k];
  const Block half = t * exponential(sum - z * z) * 0.5f;
  for (int i = 0; i < kTogether; ++i) {
    Ints negative;
    sign_of(x.each[i], negative);
    Floats share;
    choose(negative, half.each[i], 1.0f - half.each[i], share);
    x.each[i] *= share;
  }
}

// x [count] = gelu(x), in its form with a tanh or without. It is a call, as the tiles of the product that it
// ends need all registers.
__attribute__((noinline)) inline void gelu_row(bool tanh, int64_t count, float* x) {
  if (tanh) return gelu_elements(count, x, x);
  for_blocks(count, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    Block block = load_block<whole.value>(size, x + i);
    gelu_by_erf(block);
    store_block<whole.value>(size, block, x + i);
  });
}

FASTPLM_HD float mean_of(int64_t width, const float* x) {
  Floats sums[kTogether] = {};
  const int64_t whole = width / kGeluBlock * kGeluBlock;
  for (int64_t i = 0; i < whole; i += kGeluBlock) {
    for (int j = 0; j < kTogether; ++j) sums[j] += at(x + i + j * kWidth);
  }
  for (int j = 1; j < kTogether; ++j) sums[0] += sums[j];
  float sum = sum_of(sums[0]);
  for (int64_t i = whole; i < width; ++i) sum += x[i];
  return sum / static_cast<float>(width);
}

FASTPLM_HD float variance_of(int64_t width, const float* x, float mean) {
  Floats sums[kTogether] = {};
  const int64_t whole = width / kGeluBlock * kGeluBlock;
  for (int64_t i = 0; i < whole; i += kGeluBlock) {
    for (int j = 0; j < kTogether; ++j) {
      const Floats away = at(x + i + j * kWidth) - mean;
      sums[j] += away * away;
    }
  }
  for (int j = 1; j < kTogether; ++j) sums[0] += sums[j];
  float sum = sum_of(sums[0]);
  for (int64_t i = whole; i < width; ++i) sum += (x[i] - mean) * (x[i] - mean);
  return sum / static_cast<float>(width);
}

// out [width] = norm(x); out may be x.
FASTPLM_HD void norm_row(int64_t width, float eps, const float* weight, const float* bias,
                         const float* x, float* out) {
  const float mean = mean_of(width, x);
  const float scale = 1.0f / std::sqrt(variance_of(width, x, mean) + eps);
  for (int64_t i = 0; i < width; ++i) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}

}  // namespace fastplm::FASTPLM_LEVEL
