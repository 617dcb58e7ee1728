// fastplm_C::gelu_tanh and its backward on the CPU.
#include <algorithm>

#include "sizes.h"
#include "tensors.h"

#define FASTPLM_FILE "gelu.cpp"
#include "each_level.h"
#include "lanes.h"
#include "gelu.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

constexpr int64_t kBlocksWorthAThread = 128;

// function(first, count) for parts of `size` elements.
template <typename Function>
void for_parts(int64_t size, const Function& function) {
  torch::stable::parallel_for(0, (size + kGeluBlock - 1) / kGeluBlock, kBlocksWorthAThread,
                              [&](int64_t begin, int64_t end) {
                                const int64_t first = begin * kGeluBlock;
                                function(first, std::min(end * kGeluBlock, size) - first);
                              });
}

// input and out dense and of one shape.
void gelu_tanh(const Tensor& input, Tensor& out) {
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(input.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    for_parts(input.numel(), [&](int64_t first, int64_t count) {
      gelu_elements(count, from + first, to + first);
    });
  });
}

void gelu_tanh_backward(const Tensor& grad_out, const Tensor& input, Tensor& grad_input) {
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(input.const_data_ptr());
    const T* grad = static_cast<const T*>(grad_out.const_data_ptr());
    T* to = static_cast<T*>(grad_input.mutable_data_ptr());
    for_parts(input.numel(), [&](int64_t first, int64_t count) {
      gelu_grad_elements(count, from + first, grad + first, to + first);
    });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

#if FASTPLM_ONCE
STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def("gelu_tanh(Tensor input, Tensor(a!) out) -> ()");
  library.def("gelu_tanh_backward(Tensor grad_out, Tensor input, Tensor(a!) grad_input) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("gelu_tanh", FASTPLM_BOX(gelu_tanh));
  library.impl("gelu_tanh_backward", FASTPLM_BOX(gelu_tanh_backward));
}
#endif
