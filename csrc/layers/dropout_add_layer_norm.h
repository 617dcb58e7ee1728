// Dropout, residual and the norm after it for rows, and the gradients; all in fp32.
//
//   sum = dropout(x + b) + residual    out = n w + c    n = (sum - mean) r    r = 1 / sqrt(variance + eps)
//
//   grad_residual = r (h - mean(h) - n mean(h n)) + grad_sum    h = g w, g = grad_out
//   grad_x = dropout(grad_residual)                             the elements that stayed
//   grad_w, grad_c, grad_b = sums over rows of g n, g and grad_x
//
// T5's norm is about 0: without the mean, c and mean(h). The statistics are those of the sum as it is stored, so the
// backward needs nothing else; it draws the bits again. Included once a level, after dropout.h and norm.h.

namespace fastplm::FASTPLM_LEVEL {

// Rows that make one part of the sums over rows, for any number of threads.
constexpr int64_t kSumRows = 32;

// What dropout of rows depends on. Without samples, elements are counted through the tensor; without positions, these
// are 0.
struct RowDropout {
  // Floats of room that keep() needs.
  static int64_t room(int64_t width) { return round_up(width, kDropBlock) + kDropBlock; }

  // The elements of a row that stay: all bits of their floats are set, in `room`.
  FASTPLM_HD const float* keep(int64_t row, int64_t width, float* room) const {
    const int64_t first = samples == nullptr ? row * width : 0, before = first % kDropBlock;
    for (int64_t i = 0; i < before + width; i += kDropBlock) {
      const auto counter = samples == nullptr
                               ? counter_of_elements(first - before + i)
                               : counter_of_row(samples[row], positions == nullptr ? 0 : positions[row], i);
      for_choices(seed, counter, threshold, [&](int64_t element, const Ints& dropped) FASTPLM_INLINE {
        const Ints keep = ~dropped;
        at(room + i + element) = reinterpret_cast<const Floats&>(keep);
      });
    }
    return room + before;
  }

  uint64_t seed = 0;
  int32_t threshold = 0;
  float scale = 1.0f;
  const int64_t *samples = nullptr, *positions = nullptr;
};

// x = the elements of scale x that stay, the others 0
FASTPLM_HD void drop(const Block& keep, float scale, Block& x) {
  for (int i = 0; i < kTogether; ++i) {
    const Floats scaled = x.each[i] * scale;
    const Ints left = reinterpret_cast<const Ints&>(scaled) & reinterpret_cast<const Ints&>(keep.each[i]);
    x.each[i] = reinterpret_cast<const Floats&>(left);
  }
}

// sum [width]; bias is null if there is none, kept if nothing is dropped.
FASTPLM_HD void add_row(int64_t width, const float* x, const float* bias, const float* keep, float scale,
                        const float* residual, float* sum) {
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const auto load = [&](const float* from) FASTPLM_INLINE { return load_block<whole.value>(size, from + i); };
    Block added = load(x);
    if (bias != nullptr) added = added + load(bias);
    if (keep != nullptr) drop(load(keep), scale, added);
    store_block<whole.value>(size, added + load(residual), sum + i);
  });
}

// What the gradients of a row are added to; null is left out.
struct SumsOverRows {
  float *weight, *bias, *linear_bias;
};

// grad_residual and grad_in [width]; grad_sum is null if there is none, kept if nothing is dropped.
FASTPLM_HD void grad_row(int64_t width, float eps, bool centered, const float* sum, const float* weight,
                         const float* keep, float scale, const float* grad_out, const float* grad_sum,
                         const SumsOverRows& sums, float* grad_residual, float* grad_in) {
  const Moments moments = moments_of(width, sum, eps, centered);
  Block products = {}, grads = {};
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const auto load = [&](const float* from) FASTPLM_INLINE { return load_block<whole.value>(size, from + i); };
    const auto add = [&](const Block& value, float* to) FASTPLM_INLINE {
      store_block<whole.value>(size, load(to) + value, to + i);
    };
    const Block grad = load(grad_out), normed = (load(sum) - moments.mean) * moments.scale;
    const Block weighted = grad * load(weight);
    store_block<whole.value>(size, weighted, grad_in + i);  // as it was rounded for its mean
    products = products + weighted * normed;
    grads = grads + weighted;
    if (sums.weight != nullptr) add(grad * normed, sums.weight);
    if (sums.bias != nullptr) add(grad, sums.bias);
  });
  const float along = sum_of(products) / static_cast<float>(width);
  const float mean = centered ? sum_of(grads) / static_cast<float>(width) : 0.0f;
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const auto load = [&](const float* from) FASTPLM_INLINE { return load_block<whole.value>(size, from + i); };
    const Block normed = (load(sum) - moments.mean) * moments.scale;
    Block grad = (load(grad_in) - mean - normed * along) * moments.scale;
    if (grad_sum != nullptr) grad = grad + load(grad_sum);
    store_block<whole.value>(size, grad, grad_residual + i);
    if (keep != nullptr) drop(load(keep), scale, grad);
    store_block<whole.value>(size, grad, grad_in + i);
    if (sums.linear_bias == nullptr) return;
    store_block<whole.value>(size, load(sums.linear_bias) + grad, sums.linear_bias + i);
  });
}

}  // namespace fastplm::FASTPLM_LEVEL
