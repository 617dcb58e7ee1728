// The layer norm of a row in fp32, or T5's norm, which is the same about 0 in place of the mean.
//
//   norm(x) = (x - mean) / sqrt(variance + eps) weight + bias
//
// Sources: Ba, Kiros and Hinton 2016 (arXiv 1607.06450), section 3; Zhang and Sennrich 2019 (arXiv 1910.07467),
// equation 4. Included once a level, after lanes.h.

namespace fastplm::FASTPLM_LEVEL {

FASTPLM_HD float mean_of(int64_t width, const float* x) {
  Block sum = {};
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    sum = sum + load_block<whole.value>(size, x + i);
  });
  return sum_of(sum) / static_cast<float>(width);
}

FASTPLM_HD float variance_of(int64_t width, const float* x, float mean) {
  Block sum = {};
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block away = load_block<whole.value>(size, x + i, mean) - mean;
    sum = sum + away * away;
  });
  return sum_of(sum) / static_cast<float>(width);
}

// What a row is normed by.
struct Moments {
  float mean, scale;
};

FASTPLM_HD Moments moments_of(int64_t width, const float* x, float eps, bool centered) {
  const float mean = centered ? mean_of(width, x) : 0.0f;
  return {mean, 1.0f / std::sqrt(variance_of(width, x, mean) + eps)};
}

// out [width] = norm(x); out may be x. T5's is not centered; the bias is null if there is none.
FASTPLM_HD void norm_row(int64_t width, float eps, bool centered, const float* weight, const float* bias,
                         const float* x, float* out) {
  const Moments moments = moments_of(width, x, eps, centered);
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const auto load = [&](const float* from) FASTPLM_INLINE { return load_block<whole.value>(size, from + i); };
    Block y = (load(x) - moments.mean) * moments.scale * load(weight);
    if (bias != nullptr) y = y + load(bias);
    store_block<whole.value>(size, y, out + i);
  });
}

}  // namespace fastplm::FASTPLM_LEVEL
