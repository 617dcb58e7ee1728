// fastplm_C::gelu_tanh and its backward on the CPU.
#include <algorithm>

#include "common/operators.h"

#define FASTPLM_FILE "layers/gelu.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "layers/gelu.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

constexpr int64_t kBlocksPerThread = 128;

void gelu_tanh(const Tensor& input, Tensor& out) {
  Shapes shapes;
  shapes.dense(input, "input [...]");
  shapes.dense(out, "out [...]");
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(input);
    T* to = data_to<T>(out);
    for_ranges(input.numel(), kBlockSize, kBlocksPerThread, [&](int64_t first, int64_t last) {
      gelu_elements<true>(last - first, from + first, to + first);
    });
  });
}

void gelu_tanh_backward(const Tensor& grad_out, const Tensor& input, Tensor& grad_input) {
  Shapes shapes;
  shapes.dense(grad_out, "grad_out [...]");
  shapes.dense(input, "input [...]");
  shapes.dense(grad_input, "grad_input [...]");
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(input);
    const T* grad = data_of<T>(grad_out);
    T* to = data_to<T>(grad_input);
    for_ranges(input.numel(), kBlockSize, kBlocksPerThread, [&](int64_t first, int64_t last) {
      gelu_grad_elements<true>(last - first, from + first, grad + first, to + first);
    });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(gelu_tanh, "(Tensor input, Tensor(a!) out) -> ()")
FASTPLM_OPERATOR(gelu_tanh_backward, "(Tensor grad_out, Tensor input, Tensor(a!) grad_input) -> ()")
