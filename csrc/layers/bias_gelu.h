// GELU of rows and a bias for each column, and the gradients; all in fp32, whatever the dtypes of the tensors.
//
//   out = gelu(x + b)    grad_x = g gelu'(x + b)    grad_b = sum over rows of grad_x    g = grad_out
//
// Included once a level, after lanes.h and gelu.h.

namespace fastplm::FASTPLM_LEVEL {

// Rows that make one part of the bias's gradient, for any number of threads.
constexpr int64_t kBiasRows = 32;

// out [width] = gelu(in + bias)
template <bool kTanh, typename T>
FASTPLM_HD void bias_gelu_row(int64_t width, const float* bias, const T* in, T* out) {
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block x = load_block<whole.value>(size, in + i) + load_block<whole.value>(size, bias + i);
    store_block<whole.value>(size, gelu_of<kTanh>(x), out + i);
  });
}

// grad_in [width], which is also added to grad_bias.
template <bool kTanh, typename T>
FASTPLM_HD void bias_gelu_grad_row(int64_t width, const float* bias, const T* in, const T* grad_out,
                                   T* grad_in, float* grad_bias) {
  for_blocks(width, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block x = load_block<whole.value>(size, in + i) + load_block<whole.value>(size, bias + i);
    const Block grad = load_block<whole.value>(size, grad_out + i) * gelu_slope_of<kTanh>(x);
    store_block<whole.value>(size, grad, grad_in + i);
    store_block<whole.value>(size, load_block<whole.value>(size, grad_bias + i) + grad, grad_bias + i);
  });
}

}  // namespace fastplm::FASTPLM_LEVEL
