// Rows scaled to a root mean square of 1, times a weight for each column, and the gradients; all in
// fp32, whatever the dtypes of the tensors.
//
//   out    = w x r                            r = 1 / sqrt(mean(x^2) + eps)
//   grad_x = r (g w - x r^2 mean(g w x))      g = grad_out
//   grad_w = sum over rows of g x r
//
// Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467),
// equation 4. Included once a level, after rowwise.h.

namespace fastplm::FASTPLM_LEVEL {

// Rows are fp32, filled up with zeros to whole blocks.
constexpr int64_t kNormBlock = kTogether * kWidth;

// Rows that make one part of the weight's gradient, for any number of threads.
constexpr int64_t kNormRows = 32;

FASTPLM_HD int64_t norm_width(int64_t width) {
  return round_up(width, kNormBlock);
}

// Computes out [rows, width] from in [rows, width]; weight is one row, filled up with zeros; room
// has space for one row.
template <typename In, typename Out>
FASTPLM_HD void norm_rows(int64_t rows, int64_t width, float eps, const float* weight, const In* in,
                          Out* out, float* room) {
  const int64_t filled = norm_width(width);
  for (int64_t row = 0; row < rows; ++row, in += width, out += width) {
    const float* x = as_floats(width, filled, in, room);
    float* y = floats_for(width, filled, out, room);
    scale_row(filled, {0.0f, scale_of(squares_of(filled, x, 0.0f), width, eps)}, weight, nullptr, x, y);
    narrow(width, y, out);
  }
}

// Computes grad_in [rows, width], and adds these rows' part of the weight's gradient to
// grad_weight. weight is one row, filled up with zeros; grad_weight, x_room and grad_room have
// space for one row each.
template <typename In, typename Out>
FASTPLM_HD void norm_grad_rows(int64_t rows, int64_t width, float eps, const float* weight,
                               const In* in, const Out* grad_out, In* grad_in, float* grad_weight,
                               float* x_room, float* grad_room) {
  const int64_t filled = norm_width(width);
  for (int64_t row = 0; row < rows; ++row, in += width, grad_out += width, grad_in += width) {
    const float* x = as_floats(width, filled, in, x_room);
    const float* grad = as_floats(width, filled, grad_out, grad_room);
    Several<kTogether> squares = {}, products = {};
    for (int64_t i = 0; i < filled; i += kNormBlock) {
      const Several<kTogether> block = load<kTogether>(x + i);
      squares = squares + block * block;
      products = products + load<kTogether>(grad + i) * load<kTogether>(weight + i) * block;
    }
    const float scale = scale_of(sum_of(squares), width, eps);
    const float mean = sum_of(products) / static_cast<float>(width);
    const float along = scale * scale * mean;
    float* to = floats_for(width, filled, grad_in, grad_room);
    for (int64_t i = 0; i < filled; i += kNormBlock) {
      const Several<kTogether> block = load<kTogether>(x + i), g = load<kTogether>(grad + i);
      store(load<kTogether>(grad_weight + i) + g * (block * scale), grad_weight + i);
      store((g * load<kTogether>(weight + i) - block * along) * scale, to + i);
    }
    narrow(width, to, grad_in);
  }
}

}  // namespace fastplm::FASTPLM_LEVEL
