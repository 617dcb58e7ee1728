// fastplm_C::rms_norm and its backward on the CPU.
#include <algorithm>
#include <cmath>
#include <vector>

#include "sizes.h"
#include "tensors.h"

#define FASTPLM_FILE "rms_norm.cpp"
#include "each_level.h"
#include "lanes.h"
#include "rms_norm.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

int64_t parts_of(int64_t rows) {
  return (rows + kNormRows - 1) / kNormRows;
}

// function(part, first, count) for each kNormRows of `rows`.
template <typename Function>
void for_parts(int64_t rows, const Function& function) {
  torch::stable::parallel_for(0, parts_of(rows), 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t first = part * kNormRows;
      function(part, first, std::min(kNormRows, rows - first));
    }
  });
}

// input [N, E] and out [N, E], dense; weight [E] in the dtype of out. N > 0 and E > 0.
void rms_norm(const Tensor& input, const Tensor& weight, double eps, Tensor& out) {
  const int64_t rows = input.size(0), width = input.size(1);
  const std::vector<float> weights = widened(weight, norm_width(width));
  with_floating_type(input, [&](auto in_type) {
    with_floating_type(out, [&](auto out_type) {
      using In = decltype(in_type);
      using Out = decltype(out_type);
      const In* from = static_cast<const In*>(input.const_data_ptr());
      Out* to = static_cast<Out*>(out.mutable_data_ptr());
      for_parts(rows, [&](int64_t, int64_t first, int64_t count) {
        std::vector<float> x(weights.size());
        norm_rows(count, width, static_cast<float>(eps), weights.data(), from + first * width,
                  to + first * width, x.data());
      });
    });
  });
}

// The same, and grad_out like out, grad_input like input, grad_weight like weight.
void rms_norm_backward(const Tensor& grad_out, const Tensor& input, const Tensor& weight,
                       double eps, Tensor& grad_input, Tensor& grad_weight) {
  const int64_t rows = input.size(0), width = input.size(1), filled = norm_width(width);
  const int64_t count = parts_of(rows);
  const std::vector<float> weights = widened(weight, filled);
  std::vector<float> parts(count * filled);
  with_floating_type(input, [&](auto in_type) {
    with_floating_type(weight, [&](auto out_type) {
      using In = decltype(in_type);
      using Out = decltype(out_type);
      const In* from = static_cast<const In*>(input.const_data_ptr());
      const Out* grad = static_cast<const Out*>(grad_out.const_data_ptr());
      In* to = static_cast<In*>(grad_input.mutable_data_ptr());
      for_parts(rows, [&](int64_t part, int64_t first, int64_t rows_here) {
        std::vector<float> room(2 * filled);
        norm_grad_rows(rows_here, width, static_cast<float>(eps), weights.data(),
                       from + first * width, grad + first * width, to + first * width,
                       parts.data() + part * filled, room.data(), room.data() + filled);
      });
      std::vector<double> total(width);
      sum_parts(count, width, filled, parts.data(), 1.0, total.data(),
                static_cast<Out*>(grad_weight.mutable_data_ptr()));
    });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

#if FASTPLM_ONCE
STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def("rms_norm(Tensor input, Tensor weight, float eps, Tensor(a!) out) -> ()");
  library.def(
      "rms_norm_backward(Tensor grad_out, Tensor input, Tensor weight, float eps, "
      "Tensor(a!) grad_input, Tensor(b!) grad_weight) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("rms_norm", FASTPLM_BOX(rms_norm));
  library.impl("rms_norm_backward", FASTPLM_BOX(rms_norm_backward));
}
#endif
