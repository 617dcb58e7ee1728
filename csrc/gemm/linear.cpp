// fastplm_C::product and linear on the CPU. One thread computes a whole block of the result, always in
// the same order, so results do not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "common/operators.h"
#include "common/scratch.h"
#include "common/vectors.h"

#define FASTPLM_FILE "gemm/linear.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "gemm/gemm.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// --- operators ------------------------------------------------------------------------------------

void multiply(const Operand& a, const Operand& b, const std::optional<Tensor>& bias, Tensor& out) {
  with_floating_type(out, [&](auto type) {
    using T = decltype(type);
    const Dense<T> first(bias);
    const Factor<T> factor{static_cast<const T*>(b.data), first.data(), data_to<T>(out)};
    multiply<T>(a, b, &factor, 1, b.columns);
  });
}

// A matrix whose rows or columns are contiguous.
Operand operand_of(const Tensor& matrix) {
  require(matrix.stride(0) == 1 || matrix.stride(1) == 1, "matrices must have contiguous rows or columns");
  return Operand(matrix);
}

void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Tensor& out) {
  Shapes shapes;
  shapes.any(a, "a [M, K]");
  shapes.any(b, "b [K, N]");
  shapes.any(bias, "bias [N]");
  shapes.dense(out, "out [M, N]");
  check_same_type(out, a, b);
  require(a.numel() > 0 && b.numel() > 0, "matrices must not be empty");
  multiply(operand_of(a), operand_of(b), bias, out);
}

// input [..., K] of at most 8 dimensions -> [..., N]. The forward of a layer is one call: when a decoder generates tokens,
// the calls of many layers with few rows cost as much as their products.
Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  Shapes shapes;
  shapes.any(input, "input [..., K]");
  shapes.any(weight, "weight [N, K]");
  shapes.any(bias, "bias [N]");
  check_same_type(input, weight);
  require(weight.numel() > 0, "weight must not be empty");
  const Tensor rows = dense(input);
  const Operand b = operand_of(weight).transposed();
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = b.columns;
  Tensor out = empty_tensor(input, sizes);
  if (out.numel() == 0) return out;
  multiply({rows.const_data_ptr(), input.numel() / b.rows, b.rows, b.rows, 1}, b, bias, out);
  return out;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(product, "(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out) -> ()")
FASTPLM_OPERATOR(linear, "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
