// fastplm_C::linear_int8 on the CPU.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "common/operators.h"
#include "common/scratch.h"
#include "common/vectors.h"

#define FASTPLM_FILE "gemm/linear_int8.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "gemm/gemm.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// input [..., K] of at most 8 dimensions -> [..., N].
Tensor linear_int8(const Tensor& input, const Tensor& weight, const Tensor& scale,
                   const std::optional<Tensor>& bias) {
  Shapes shapes;
  shapes.any(input, "input [..., K]");
  shapes.any(weight, "weight [P, S, 16, 4]");
  shapes.any(scale, "scale [N]");
  shapes.any(bias, "bias [N]");
  const int64_t depth = shapes['K'], columns = shapes['N'];
  require(shapes['P'] == ceil_div(columns, kPanel) && shapes['S'] == ceil_div(depth, kStepDepth) && depth > 0,
          "weight must be [ceil(N / 16), ceil(K / 4), 16, 4] for K > 0 of input and N of scale");
  const Tensor rows = dense(input), packed = dense(weight), scales = dense(scale);
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  Tensor out = empty_tensor(input, sizes);
  if (out.numel() == 0) return out;
  with_floating_type(out, [&](auto type) {
    using T = decltype(type);
    const Dense<T> first(bias);
    const Int8Factor<T> factor{data_of<uint8_t>(packed), data_of<float>(scales), first.data(), data_to<T>(out)};
    multiply_int8(data_of<T>(rows), input.numel() / depth, depth, &factor, 1, columns, columns);
  });
  return out;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(linear_int8, "(Tensor input, Tensor weight, Tensor scale, Tensor? bias) -> Tensor")
