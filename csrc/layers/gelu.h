// GELU and its gradient, for a tensor's elements; all in fp32, whatever the dtype of the tensor.
//
//   gelu(x) = x Phi(x)                            Phi the distribution function of the normal distribution
//
// or, in its form with a tanh,
//
//   gelu(x) = x (1 + tanh u) / 2 = x sigma(2u)    u = sqrt(2 / pi) (x + 0.044715 x^3)
//
// with the logistic function sigma. Both keep the digits of small values far below 0.
//
// Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (arXiv 1606.08415), section 2.

namespace fastplm::FASTPLM_LEVEL {

// out = the lanes of `below` where x is negative, else those of `above`
FASTPLM_HD void choose_by_sign(const Block& x, const Block& below, const Block& above, Block& out) {
  for (int i = 0; i < kTogether; ++i) {
    Ints negative;
    sign_of(x.each[i], negative);
    choose(negative, below.each[i], above.each[i], out.each[i]);
  }
}

// The factor of x, Phi(x), and its derivative e^(-x^2 / 2) / sqrt(2 pi).
//
// Phi(-|x|) = e^(-x^2 / 2) t p(t) with t = 1 / (1 + 0.2645 |x|), a form of Abramowitz and Stegun 1964 (7.1.26);
// this p is a fit of our own to more than double precision, 1.1e-8 of Phi away at most for |x| up to 13.4.
FASTPLM_HD void erf_gate_and_slope(const Block& x, Block& gate, Block& slope) {
  constexpr float p[] = {0.105544639f,  0.105001201f, 0.102895697f,  0.0587472208f, 0.141801423f,
                         -0.122158302f, 0.223376935f, -0.146249778f, 0.0310409683f};
  Block t;
  for (int i = 0; i < kTogether; ++i) {
    const Ints magnitude = reinterpret_cast<const Ints&>(x.each[i]) & INT32_MAX;
    t.each[i] = 1.0f / (reinterpret_cast<const Floats&>(magnitude) * 0.2645f + 1.0f);
  }
  const Block power = exponential(x * x * -0.5f);
  Block sum = t * p[8] + p[7];
  for (int k = 6; k >= 0; --k) sum = sum * t + p[k];
  const Block tail = sum * t * power;
  Block above;
  for (int i = 0; i < kTogether; ++i) above.each[i] = 1.0f - tail.each[i];
  choose_by_sign(x, tail, above, gate);
  slope = power * 0.398942280f;
}

// The same with a tanh: sigma(2u) and its derivative.
FASTPLM_HD void tanh_gate_and_slope(const Block& x, Block& gate, Block& slope) {
  constexpr float kTwice = 1.5957691f;  // 2 sqrt(2 / pi)
  constexpr float kCubic = 0.044715f;
  const Block square = x * x;
  const Block y = x * (square * (kTwice * kCubic) + kTwice);
  // e = e^-|y| does not overflow: sigma is r = 1 / (1 + e) or e r, and sigma' = e r^2.
  Block e;
  for (int i = 0; i < kTogether; ++i) {
    const Ints negative = reinterpret_cast<const Ints&>(y.each[i]) | INT32_MIN;
    e.each[i] = reinterpret_cast<const Floats&>(negative);
  }
  e = exponential(e);
  const Block sum = e + 1.0f;
  Block r;
  for (int i = 0; i < kTogether; ++i) r.each[i] = 1.0f / sum.each[i];
  const Block other = e * r;
  choose_by_sign(y, other, r, gate);
  slope = other * r * (square * (3.0f * kTwice * kCubic) + kTwice);
}

// gelu(x)
template <bool kTanh>
FASTPLM_HD Block gelu_of(const Block& x) {
  Block gate, slope;
  kTanh ? tanh_gate_and_slope(x, gate, slope) : erf_gate_and_slope(x, gate, slope);
  return x * gate;
}

// Its derivative.
template <bool kTanh>
FASTPLM_HD Block gelu_slope_of(const Block& x) {
  Block gate, slope;
  kTanh ? tanh_gate_and_slope(x, gate, slope) : erf_gate_and_slope(x, gate, slope);
  return gate + x * slope;
}

// out [count] = gelu(x)
template <bool kTanh, typename T>
FASTPLM_HD void gelu_elements(int64_t count, const T* in, T* out) {
  for_blocks(count, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block x = load_block<whole.value>(size, in + i);
    store_block<whole.value>(size, gelu_of<kTanh>(x), out + i);
  });
}

// grad_in [count] = grad_out gelu'(x)
template <bool kTanh, typename T>
FASTPLM_HD void gelu_grad_elements(int64_t count, const T* in, const T* grad_out, T* grad_in) {
  for_blocks(count, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block x = load_block<whole.value>(size, in + i);
    const Block grad = load_block<whole.value>(size, grad_out + i);
    store_block<whole.value>(size, grad * gelu_slope_of<kTanh>(x), grad_in + i);
  });
}

}  // namespace fastplm::FASTPLM_LEVEL
