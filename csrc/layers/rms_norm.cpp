// fastplm_C::rms_norm and its backward on the CPU.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "common/operators.h"

#define FASTPLM_FILE "layers/rms_norm.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "common/rowwise.h"
#include "layers/rms_norm.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

void rms_norm(const Tensor& input, const Tensor& weight, double eps, Tensor& out) {
  Shapes shapes;
  shapes.dense(input, "input [N, E]");
  shapes.dense(weight, "weight [E]");
  shapes.dense(out, "out [N, E]");
  const int64_t rows = shapes['N'], width = shapes['E'];
  const Vector<float> weights = widened(weight, norm_width(width));
  with_floating_type(input, [&](auto in_type) {
    with_floating_type(out, [&](auto out_type) {
      using In = decltype(in_type);
      using Out = decltype(out_type);
      const In* from = data_of<In>(input);
      Out* to = data_to<Out>(out);
      for_parts(rows, kNormRows, 1, [&](int64_t, int64_t first, int64_t last) {
        Vector<float> x(weights.size());
        norm_rows(last - first, width, static_cast<float>(eps), weights.data(), from + first * width,
                  to + first * width, x.data());
      });
    });
  });
}

void rms_norm_backward(const Tensor& grad_out, const Tensor& input, const Tensor& weight,
                       double eps, Tensor& grad_input, Tensor& grad_weight) {
  Shapes shapes;
  shapes.dense(grad_out, "grad_out [N, E]");
  shapes.dense(input, "input [N, E]");
  shapes.dense(weight, "weight [E]");
  shapes.dense(grad_input, "grad_input [N, E]");
  shapes.dense(grad_weight, "grad_weight [E]");
  const int64_t rows = shapes['N'], width = shapes['E'], filled = norm_width(width);
  const int64_t count = ceil_div(rows, kNormRows);
  const Vector<float> weights = widened(weight, filled);
  Vector<float> parts(count * filled);
  with_floating_type(input, [&](auto in_type) {
    with_floating_type(weight, [&](auto out_type) {
      using In = decltype(in_type);
      using Out = decltype(out_type);
      const In* from = data_of<In>(input);
      const Out* grad = data_of<Out>(grad_out);
      In* to = data_to<In>(grad_input);
      for_parts(rows, kNormRows, 1, [&](int64_t part, int64_t first, int64_t last) {
        Vector<float> room(2 * filled);
        norm_grad_rows(last - first, width, static_cast<float>(eps), weights.data(),
                       from + first * width, grad + first * width, to + first * width,
                       parts.data() + part * filled, room.data(), room.data() + filled);
      });
      Vector<double> total(width);
      sum_parts(count, width, filled, parts.data(), 1.0, total.data(),
                data_to<Out>(grad_weight));
    });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(rms_norm, "(Tensor input, Tensor weight, float eps, Tensor(a!) out) -> ()")
FASTPLM_OPERATOR(rms_norm_backward,
                 "(Tensor grad_out, Tensor input, Tensor weight, float eps, Tensor(a!) "
                 "grad_input, Tensor(b!) grad_weight) -> ()")
