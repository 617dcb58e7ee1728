// fastplm_C::replaced_token_loss and its backward on the CPU: each reads a row that counts once.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "common/operators.h"

#define FASTPLM_FILE "layers/replaced_token_loss.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "layers/replaced_token_loss.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// A thread should have at least so many elements.
constexpr int64_t kDetectorGrain = 1 << 15;

// sum_parts with the memory that it sums in.
template <typename T>
void add_parts(int64_t parts, int64_t width, int64_t stride, const float* from, double factor, T* out) {
  Vector<double> total(width);
  sum_parts(parts, width, stride, from, factor, total.data(), out);
}

// Floats that kDetectorRows rows of T need beside their tensor.
template <typename T>
int64_t room_of_rows(int64_t width, int64_t filled) {
  return are_floats<T>(width, filled) ? 0 : kDetectorRows * filled;
}

#define FASTPLM_REPLACED_TOKEN_LOSS(ARGUMENT)                              \
  ARGUMENT(Tensor, input)                                                  \
  ARGUMENT(Tensor, weight) ARGUMENT(Dense<void>, bias)                     \
  ARGUMENT(Tensor, replaced) ARGUMENT(Dense<void>, original)               \
  ARGUMENT(Dense<bool>, mask)                                              \
  ARGUMENT(Dense<float>, normalizer)                                       \
  ARGUMENT(bool, reduced) ARGUMENT(bool, mean) ARGUMENT(bool, need_counts) \
  ARGUMENT(bool, sum_weight)
FASTPLM_ARGUMENTS(LossArguments, FASTPLM_REPLACED_TOKEN_LOSS)

#define FASTPLM_REPLACED_TOKEN_LOSS_BACKWARD(ARGUMENT)                \
  ARGUMENT(Tensor, grad_loss) ARGUMENT(Tensor, slope)                 \
  ARGUMENT(Dense<float>, denominator)                                 \
  ARGUMENT(Tensor, weight) ARGUMENT(Dense<bool>, mask)                \
  ARGUMENT(std::optional<Tensor>, input)                              \
  ARGUMENT(Dense<float>, weight_sum) ARGUMENT(Dense<float>, bias_sum) \
  ARGUMENT(bool, need_input) ARGUMENT(bool, need_weight)
FASTPLM_ARGUMENTS(BackwardArguments, FASTPLM_REPLACED_TOKEN_LOSS_BACKWARD)

// Calls function(is_replaced) with a test of the labels: flags, or ids compared with the original
// ones.
template <typename Function>
void with_labels(const LossArguments& args, const Function& function) {
  if (!args.original) {
    const bool* flags = data_of<bool>(args.replaced);
    return function([flags](int64_t row) { return flags[row]; });
  }
  with_id_type(args.replaced, [&](auto type) {
    using Id = decltype(type);
    const Id* ids = data_of<Id>(args.replaced);
    const Id* before = data_of<Id>(*args.original.tensor);
    function([=](int64_t row) { return ids[row] != before[row]; });
  });
}

// The outputs are those of fastplm::replaced_token_loss_fwd.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> replaced_token_loss(
    const LossArguments& args) {
  const Tensor& input = args.input;
  Shapes shapes;
  shapes.rows(input, "input [N, E]");
  shapes.dense(args.weight, "weight [E]");
  shapes.any(args.bias, "bias []");
  shapes.dense(args.replaced, "replaced [N]");
  shapes.any(args.original, "original [N]");
  shapes.any(args.mask, "mask [N]");
  shapes.any(args.normalizer, "normalizer []");
  const int64_t rows = shapes['N'], width = shapes['E'], stride = input.stride(0);
  require(width > 0, "E of input must not be 0");
  const int64_t grain = grain_of(kDetectorGrain, kDetectorPart * width);
  const int64_t filled = detector_width(width), parts = ceil_div(rows, kDetectorPart);
  const Vector<float> weights = widened(args.weight, filled);
  const float offset = args.bias ? widened(*args.bias.tensor, 1)[0] : 0.0f;
  const bool* counts = args.mask.data();
  Tensor each = empty_tensor(input, {rows}, ScalarType::Float), slope = empty_tensor(each, {rows});
  Tensor weight_sum = empty_tensor(each, {args.sum_weight ? width : 0});
  float *losses = each.mutable_data_ptr<float>(), *slopes = slope.mutable_data_ptr<float>();
  if (counts != nullptr) {
    std::fill(losses, losses + rows, 0.0f);
    std::fill(slopes, slopes + rows, 0.0f);
  }
  Vector<Detected> of_part(parts);
  Vector<float> sum_of_part(args.sum_weight ? parts * filled : 0);
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(input);
    with_labels(args, [&](const auto& is_replaced) {
      for_parts(rows, kDetectorPart, grain, [&](int64_t part, int64_t first, int64_t last) {
        Vector<float> wide(room_of_rows<T>(width, filled));
        float* sum = args.sum_weight ? sum_of_part.data() + part * filled : nullptr;
        of_part[part] = detect_rows(first, last, width, from, stride, weights.data(), offset, counts,
                                    is_replaced, losses, slopes, sum, wide.data());
      });
    });
  });
  Detected all;
  for (const Detected& part : of_part) all.add(part);
  if (args.sum_weight) {
    add_parts(parts, width, filled, sum_of_part.data(), 1.0, weight_sum.mutable_data_ptr<float>());
  }
  Tensor counts_out = empty_tensor(input, {args.need_counts ? 5 : 0}, ScalarType::Long);
  if (args.need_counts) {
    const int64_t numbers[5] = {all.found, all.predicted, all.replaced, all.correct, all.total};
    std::memcpy(counts_out.mutable_data_ptr(), numbers, sizeof(numbers));
  }
  if (!args.reduced) {
    return {each, slope, empty_tensor(each, {0}), weight_sum, empty_tensor(each, {0}), counts_out};
  }
  float divisor = 1.0f;
  if (args.normalizer) {
    divisor = *args.normalizer.data();
  } else if (args.mean) {
    divisor = static_cast<float>(all.total);
  }
  divisor = divisor == 0.0f ? 1.0f : divisor;
  const auto scalar = [&](double value) {
    Tensor out = empty_tensor(each, {});
    *out.mutable_data_ptr<float>() = static_cast<float>(value);
    return out;
  };
  return {scalar(all.loss / divisor), slope, scalar(divisor), weight_sum, scalar(all.slope), counts_out};
}

// The outputs are those of fastplm::replaced_token_loss_bwd.
std::tuple<Tensor, Tensor, Tensor> replaced_token_loss_backward(const BackwardArguments& args) {
  const Tensor& weight = args.weight;
  const bool reduced = static_cast<bool>(args.denominator), reads_rows = args.need_weight && !args.weight_sum;
  Shapes shapes;
  shapes.dense(args.slope, "slope [N]");
  shapes.dense(weight, "weight [E]");
  reduced ? shapes.any(args.grad_loss, "grad_loss []") : shapes.dense(args.grad_loss, "grad_loss [N]");
  shapes.any(args.denominator, "denominator []");
  shapes.any(args.mask, "mask [N]");
  shapes.rows(args.input, "input [N, E]");
  shapes.any(args.weight_sum, "weight_sum [E]");
  shapes.any(args.bias_sum, "bias_sum []");
  const int64_t rows = shapes['N'], width = shapes['E'], filled = detector_width(width);
  require(width > 0, "E of weight must not be 0");
  const int64_t grain = grain_of(kDetectorGrain, kDetectorPart * width);
  require(args.input || !reads_rows, "the gradient of the weight needs input or weight_sum");
  const bool* counts = args.mask.data();
  const float* grads = args.grad_loss.const_data_ptr<float>();
  const float* slopes = args.slope.const_data_ptr<float>();
  const float scale = reduced ? *grads / *args.denominator.data() : 0.0f;
  const auto counted = [counts](int64_t row) { return counts == nullptr || counts[row]; };
  const Vector<float> weights = widened(weight, filled);
  Vector<float> grad_logit(rows);
  double grad_of_bias = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (counted(row)) grad_logit[row] = slopes[row] * (reduced ? scale : grads[row]);
    grad_of_bias += grad_logit[row];
  }
  if (args.bias_sum) grad_of_bias = static_cast<double>(*args.bias_sum.data()) * scale;
  Tensor grad_weight = empty_tensor(weight, {args.need_weight ? width : 0});
  Tensor grad_bias = empty_tensor(weight, {});
  Tensor grad_input = empty_tensor(weight, {args.need_input ? rows : 0, width});
  if (!args.need_input) grad_input = empty_tensor(weight, {0});
  with_floating_type(weight, [&](auto type) {
    using T = decltype(type);
    *data_to<T>(grad_bias) = static_cast<T>(static_cast<float>(grad_of_bias));
    T* of_weight = data_to<T>(grad_weight);
    if (args.need_weight && args.weight_sum) {
      add_parts(1, width, width, args.weight_sum.data(), scale, of_weight);
    }
    Vector<float> sum_of_part(reads_rows ? ceil_div(rows, kDetectorPart) * filled : 0);
    T* to = data_to<T>(grad_input);
    for_parts(rows, kDetectorPart, grain, [&](int64_t part, int64_t first, int64_t last) {
      for (int64_t row = first; args.need_input && row < last; ++row) {
        scaled_row(width, weights.data(), counted(row), grad_logit[row], to + row * width);
      }
      if (reads_rows) {
        Vector<float> wide(room_of_rows<T>(width, filled));
        add_weighted_rows(first, last, width, data_of<T>(*args.input),
                          args.input->stride(0), counts, grad_logit.data(),
                          sum_of_part.data() + part * filled, wide.data());
      }
    });
    if (reads_rows) {
      add_parts(ceil_div(rows, kDetectorPart), width, filled, sum_of_part.data(), 1.0, of_weight);
    }
  });
  return {grad_input, grad_weight, grad_bias};
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(replaced_token_loss)
FASTPLM_OPERATOR(replaced_token_loss_backward)
