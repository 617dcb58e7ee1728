// GELU in its form with a tanh, and its gradient, for a tensor's elements; all in fp32, whatever
// the dtype of the tensor.
//
//   gelu(x) = x (1 + tanh u) / 2 = x sigma(2u)    u = sqrt(2 / pi) (x + 0.044715 x^3)
//
// with the logistic function sigma, which keeps the digits of small values far below 0.
//
// Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (arXiv 1606.08415), section 2.

namespace fastplm::FASTPLM_LEVEL {

// Elements of a block: all of them are read before the first is written.
constexpr int64_t kGeluBlock = kTogether * kWidth;
using Block = Several<kTogether>;

// The factor of x, sigma(2u), and its derivative.
FASTPLM_HD void gate_and_slope(const Block& x, Block& gate, Block& slope) {
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
  for (int i = 0; i < kTogether; ++i) {
    Ints below;
    sign_of(y.each[i], below);
    choose(below, other.each[i], r.each[i], gate.each[i]);
  }
  slope = other * r * (square * (3.0f * kTwice * kCubic) + kTwice);
}

// Loads `count` elements as fp32, filled up with zeros, and stores them. With kWhole they are a
// whole block, whose size the compiler knows.
template <bool kWhole, typename T>
FASTPLM_HD Block load_block(int64_t count, const T* from) {
  if constexpr (kWhole && std::is_same_v<T, float>) {
    return load<kTogether>(from);
  } else {
    float value[kGeluBlock] = {};
    for (int64_t i = 0; i < (kWhole ? kGeluBlock : count); ++i) value[i] = static_cast<float>(from[i]);
    return load<kTogether>(value);
  }
}

template <bool kWhole, typename T>
FASTPLM_HD void store_block(int64_t count, const Block& block, T* to) {
  if constexpr (kWhole && std::is_same_v<T, float>) {
    store(block, to);
  } else {
    float value[kGeluBlock];
    store(block, value);
    for (int64_t i = 0; i < (kWhole ? kGeluBlock : count); ++i) to[i] = static_cast<T>(value[i]);
  }
}

// Calls function(whole, i, size) for each block of `count` elements, which begins at i; the last
// block may be shorter.
template <typename Function>
FASTPLM_HD void for_blocks(int64_t count, const Function& function) {
  int64_t i = 0;
  for (; i + kGeluBlock <= count; i += kGeluBlock) function(std::true_type(), i, kGeluBlock);
  if (i < count) function(std::false_type(), i, count - i);
}

// out [count] = gelu(x)
template <typename T>
FASTPLM_HD void gelu_elements(int64_t count, const T* in, T* out) {
  for_blocks(count, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block x = load_block<whole.value>(size, in + i);
    Block gate, slope;
    gate_and_slope(x, gate, slope);
    store_block<whole.value>(size, x * gate, out + i);
  });
}

// grad_in [count] = grad_out (gate + x slope)
template <typename T>
FASTPLM_HD void gelu_grad_elements(int64_t count, const T* in, const T* grad_out, T* grad_in) {
  for_blocks(count, [&](auto whole, int64_t i, int64_t size) FASTPLM_INLINE {
    const Block x = load_block<whole.value>(size, in + i);
    const Block grad = load_block<whole.value>(size, grad_out + i);
    Block gate, slope;
    gate_and_slope(x, gate, slope);
    store_block<whole.value>(size, grad * (gate + x * slope), grad_in + i);
  });
}

}  // namespace fastplm::FASTPLM_LEVEL
