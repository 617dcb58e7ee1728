// fastplm_C::bias_gelu and its backward on the CPU.
#include <algorithm>

#include "common/operators.h"

#define FASTPLM_FILE "layers/bias_gelu.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "layers/gelu.h"
#include "layers/bias_gelu.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// A thread should have at least so many elements.
constexpr int64_t kGeluGrain = 1 << 13;

// A bias, or zeros in its place.
Vector<float> bias_of(const std::optional<Tensor>& bias, int64_t width) {
  return bias ? widened(dense(*bias), width) : Vector<float>(width);
}

// Calls function(T{}, tanh) with the element type of the tensor, and the form as a constant.
template <typename Function>
void with_type_and_form(const Tensor& tensor, bool tanh, const Function& function) {
  with_floating_type(tensor, [&](auto type) {
    tanh ? function(type, std::true_type()) : function(type, std::false_type());
  });
}

void bias_gelu(const Tensor& input, const std::optional<Tensor>& bias, bool tanh, Tensor& out) {
  Shapes shapes;
  shapes.any(input, "input [..., F]");
  shapes.any(bias, "bias [F]");
  shapes.dense(out, "out [..., F]");
  if (out.numel() == 0) return;
  const Tensor rows = dense(input);
  const int64_t width = shapes['F'];
  const Vector<float> biases = bias_of(bias, width);
  with_type_and_form(rows, tanh, [&](auto type, auto form) {
    using T = decltype(type);
    const T* from = data_of<T>(rows);
    T* to = data_to<T>(out);
    for_ranges(rows.numel(), width, grain_of(kGeluGrain, width), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i += width) {
        bias_gelu_row<decltype(form)::value>(width, biases.data(), from + i, to + i);
      }
    });
  });
}

void bias_gelu_backward(const Tensor& grad_out, const Tensor& input, const std::optional<Tensor>& bias,
                        bool tanh, Tensor& grad_input, Tensor& grad_bias) {
  Shapes shapes;
  shapes.any(grad_out, "grad_out [..., F]");
  shapes.any(input, "input [..., F]");
  shapes.any(bias, "bias [F]");
  shapes.dense(grad_input, "grad_input [..., F]");
  shapes.wanted(grad_bias, "grad_bias [F]");
  const Tensor values = dense(input), upstream = dense(grad_out);
  const int64_t width = shapes['F'], rows = width == 0 ? 0 : input.numel() / width;
  const int64_t count = ceil_div(rows, kBiasRows);
  const Vector<float> biases = bias_of(bias, width);
  const Buffer<float> parts(count * width);
  with_type_and_form(values, tanh, [&](auto type, auto form) {
    using T = decltype(type);
    const T* from = data_of<T>(values);
    const T* grad = data_of<T>(upstream);
    T* to = data_to<T>(grad_input);
    const int64_t grain = grain_of(kGeluGrain, kBiasRows * width);
    for_parts(rows, kBiasRows, grain, [&](int64_t part, int64_t first, int64_t last) {
      float* sum = parts.get() + part * width;
      std::fill(sum, sum + width, 0.0f);
      for (int64_t i = first * width; i < last * width; i += width) {
        bias_gelu_grad_row<decltype(form)::value>(width, biases.data(), from + i, grad + i, to + i, sum);
      }
    });
  });
  if (grad_bias.numel() == 0) return;
  Vector<double> total(width);
  with_floating_type(grad_bias, [&](auto type) {
    using T = decltype(type);
    sum_parts(count, width, width, parts.get(), 1.0, total.data(), data_to<T>(grad_bias));
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(bias_gelu, "(Tensor input, Tensor? bias, bool tanh, Tensor(a!) out) -> ()")
FASTPLM_OPERATOR(bias_gelu_backward,
                 "(Tensor grad_out, Tensor input, Tensor? bias, bool tanh, Tensor(a!) grad_input, "
                 "Tensor(b!) grad_bias) -> ()")
