// Binary cross-entropy of one logit a row, and its gradients; all in fp32, whatever the dtype of the rows.
//
//   z = w . x + b        loss = softplus(z) - y z        slope = sigmoid(z) - y
//
//   grad_x = g w         g = slope times the upstream gradient, over the denominator of a mean
//   grad_w = sum over rows of g x
//
// Included once a level, after lanes.h. Source: Clark et al. 2020 (ELECTRA, arXiv 2003.10555), section 2.

namespace fastplm::FASTPLM_LEVEL {

// Rows that are computed together: they stay in the first-level cache from the logits to the sum
// for the weight, and each element of w and of that sum is loaded once for all these rows.
constexpr int kDetectorRows = 8;

// Rows that make one part of each sum, for any number of threads.
constexpr int64_t kDetectorPart = 128;

// Sums over the rows that count, and numbers of rows: predicted as replaced, replaced,
// both (found), predicted right (correct).
struct Detected {
  double loss = 0, slope = 0;
  int64_t found = 0, predicted = 0, replaced = 0, correct = 0, total = 0;

  void add(const Detected& other) {
    loss += other.loss;
    slope += other.slope;
    found += other.found;
    predicted += other.predicted;
    replaced += other.replaced;
    correct += other.correct;
    total += other.total;
  }
};

FASTPLM_HD int64_t detector_width(int64_t width) {
  return round_up(width, kWidth);
}

// logit[row] = w . x
template <int kRows>
FASTPLM_HD void dot_rows(int64_t filled, const float* const* rows, const float* weight,
                         float* logit) {
  Floats sum[kRows] = {};
  for (int64_t i = 0; i < filled; i += kWidth) {
    const Floats w = at(weight + i);
    for (int row = 0; row < kRows; ++row) sum[row] += at(rows[row] + i) * w;
  }
  for (int row = 0; row < kRows; ++row) logit[row] = sum_of(sum[row]);
}

// sum += sum over rows of factor[row] x
template <int kRows>
FASTPLM_HD void add_rows(int64_t filled, const float* const* rows, const float* factor,
                         float* sum) {
  for (int64_t i = 0; i < filled; i += kWidth) {
    Floats total = at(rows[0] + i) * factor[0];
    for (int row = 1; row < kRows; ++row) total += at(rows[row] + i) * factor[row];
    at(sum + i) += total;
  }
}

// Loss and slope of one logit. No difference of large numbers is taken.
FASTPLM_HD void detect(float logit, bool replaced, float& loss, float& slope) {
  const float x = replaced ? -logit : logit;
  const float power = std::exp(-std::fabs(x)), inverse = 1.0f / (1.0f + power);
  loss = (x > 0.0f ? x : 0.0f) + std::log1p(power);
  const float sigmoid = x > 0.0f ? inverse : power * inverse;
  slope = replaced ? -sigmoid : sigmoid;
}

// Calls function(rows, number) for the rows of `first` … `last` - 1 that count, kDetectorRows at a
// time, the last few one at a time. `rows` is their number, a constant; `number` has their indices.
template <typename Function>
FASTPLM_HD void for_rows(int64_t first, int64_t last, const bool* counts, const Function& function) {
  int64_t number[kDetectorRows];
  int count = 0;
  for (int64_t row = first; row < last; ++row) {
    if (counts != nullptr && !counts[row]) continue;
    number[count++] = row;
    if (count == kDetectorRows) {
      function(std::integral_constant<int, kDetectorRows>(), number);
      count = 0;
    }
  }
  for (int i = 0; i < count; ++i) function(std::integral_constant<int, 1>(), number + i);
}

// Rows `first` … `last` - 1 of input, `stride` apart. is_replaced(row) tells the label; loss and slope are
// written for rows that count; weight [E] is filled up with zeros; weight_sum, if it is wanted, is one row
// of zeros of that width, and wide room for kDetectorRows, unless they are_floats.
template <typename T, typename Labels>
FASTPLM_HD Detected detect_rows(int64_t first, int64_t last, int64_t width, const T* input,
                                int64_t stride, const float* weight, float bias, const bool* counts,
                                const Labels& is_replaced, float* loss, float* slope,
                                float* weight_sum, float* wide) {
  const int64_t filled = detector_width(width);
  Detected sums;
  for_rows(first, last, counts, [&](auto rows, const int64_t* number) FASTPLM_INLINE {
    constexpr int kRows = decltype(rows)::value;
    const float* x[kRows];
    for (int i = 0; i < kRows; ++i) {
      x[i] = as_floats(width, filled, input + number[i] * stride, wide + i * filled);
    }
    float logit[kRows], factor[kRows];
    dot_rows<kRows>(filled, x, weight, logit);
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = number[i];
      const bool replaced = is_replaced(row), predicted = logit[i] + bias > 0.0f;
      detect(logit[i] + bias, replaced, loss[row], factor[i]);
      slope[row] = factor[i];
      sums.add({loss[row], factor[i], predicted && replaced, predicted, replaced, predicted == replaced, 1});
    }
    if (weight_sum != nullptr) add_rows<kRows>(filled, x, factor, weight_sum);
  });
  return sums;
}

// weight_sum += sum over the rows that count of factor times row; arguments as above.
template <typename T>
FASTPLM_HD void add_weighted_rows(int64_t first, int64_t last, int64_t width, const T* input,
                                  int64_t stride, const bool* counts, const float* factor,
                                  float* weight_sum, float* wide) {
  const int64_t filled = detector_width(width);
  for_rows(first, last, counts, [&](auto rows, const int64_t* number) FASTPLM_INLINE {
    constexpr int kRows = decltype(rows)::value;
    const float* x[kRows];
    float factors[kRows];
    for (int i = 0; i < kRows; ++i) {
      x[i] = as_floats(width, filled, input + number[i] * stride, wide + i * filled);
      factors[i] = factor[number[i]];
    }
    add_rows<kRows>(filled, x, factors, weight_sum);
  });
}

// out [width] = factor w, or 0 if the row does not count.
template <typename T>
FASTPLM_HD void scaled_row(int64_t width, const float* weight, bool counted, float factor, T* out) {
  if (counted) {
    for (int64_t i = 0; i < width; ++i) out[i] = static_cast<T>(weight[i] * factor);
  } else {
    std::memset(out, 0, sizeof(T) * width);
  }
}

}  // namespace fastplm::FASTPLM_LEVEL
