// GELU in its form with a tanh, and its gradient, for a tensor's elements; all in fp32, whatever
// the dtype of the tensor.
//
//   gelu(x) = x (1 + tanh u) / 2 = x sigma(2u)    u = sqrt(2 / pi) (x + 0.044715 x^3)
//
// with the logistic function sigma, which keeps the digits of small values far below 0.
//
// Source: Hendrycks and Gimpel 2016, "Gaussian Error Linear Units" (arXiv 1606.08415), section 2.

namespace fastplm::FASTPLM_LEVEL {

// What is read before the first of it is written.
constexpr int64_t kGeluBlock = kTogether * kWidth;
using Block = Several<kTogether>;

// What x is multiplied by, sigma(2u), and the derivative of that.
FASTPLM_HD void gate_and_slope(const Block& x, Block& gate, Block& slope) {
  constexpr float kTwice = 1.5957691f;  // 2 sqrt(2 / pi)
  constexpr float kCubic = 0.044715f;
  const Block square = x * x;
  const Block y = x * (square * (kTwice * kCubic) + kTwice);
  // By e = e^-|y|, which does not overflow: sigma is r = 1 / (1 + e) or e r, and sigma' = e r^2.
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

// Elements as fp32 and back: a whole block of them, whose size the compiler knows, or fewer.
template <typename T>
struct Whole {
  FASTPLM_HD static Block load(int64_t, const T* from) {
    float value[kGeluBlock];
    for (int64_t i = 0; i < kGeluBlock; ++i) value[i] = static_cast<float>(from[i]);
    return FASTPLM_LEVEL::load<kTogether>(value);
  }
  FASTPLM_HD static void store(int64_t, const Block& block, T* to) {
    float value[kGeluBlock];
    FASTPLM_LEVEL::store(block, value);
    for (int64_t i = 0; i < kGeluBlock; ++i) to[i] = static_cast<T>(value[i]);
  }
};

template <>
struct Whole<float> {
  FASTPLM_HD static Block load(int64_t, const float* from) {
    return FASTPLM_LEVEL::load<kTogether>(from);
  }
  FASTPLM_HD static void store(int64_t, const Block& block, float* to) {
    FASTPLM_LEVEL::store(block, to);
  }
};

template <typename T>
struct Part {
  FASTPLM_HD static Block load(int64_t count, const T* from) {
    float value[kGeluBlock] = {};
    for (int64_t i = 0; i < count; ++i) value[i] = static_cast<float>(from[i]);
    return FASTPLM_LEVEL::load<kTogether>(value);
  }
  FASTPLM_HD static void store(int64_t count, const Block& block, T* to) {
    float value[kGeluBlock];
    FASTPLM_LEVEL::store(block, value);
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(value[i]);
  }
};

// out [count] = gelu(x)
template <typename Access, typename T>
FASTPLM_HD void gelu_block(int64_t count, const T* in, T* out) {
  const Block x = Access::load(count, in);
  Block gate, slope;
  gate_and_slope(x, gate, slope);
  Access::store(count, x * gate, out);
}

// grad_in [count] = grad_out (gate + x slope)
template <typename Access, typename T>
FASTPLM_HD void gelu_grad_block(int64_t count, const T* in, const T* grad_out, T* grad_in) {
  const Block x = Access::load(count, in), grad = Access::load(count, grad_out);
  Block gate, slope;
  gate_and_slope(x, gate, slope);
  Access::store(count, grad * (gate + x * slope), grad_in);
}

template <typename T>
FASTPLM_HD void gelu_elements(int64_t count, const T* in, T* out) {
  int64_t i = 0;
  for (; i + kGeluBlock <= count; i += kGeluBlock) {
    gelu_block<Whole<T>>(kGeluBlock, in + i, out + i);
  }
  if (i < count) gelu_block<Part<T>>(count - i, in + i, out + i);
}

template <typename T>
FASTPLM_HD void gelu_grad_elements(int64_t count, const T* in, const T* grad_out, T* grad_in) {
  int64_t i = 0;
  for (; i + kGeluBlock <= count; i += kGeluBlock) {
    gelu_grad_block<Whole<T>>(kGeluBlock, in + i, grad_out + i, grad_in + i);
  }
  if (i < count) gelu_grad_block<Part<T>>(count - i, in + i, grad_out + i, grad_in + i);
}

}  // namespace fastplm::FASTPLM_LEVEL
