// fastplm_C::replaced_token_loss and its backward on the CPU: each reads a row that counts once.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <vector>

#include "sizes.h"
#include "tensors.h"

#define FASTPLM_FILE "replaced_token_loss.cpp"
#include "each_level.h"
#include "lanes.h"
#include "replaced_token_loss.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// Elements that are worth a thread.
constexpr int64_t kDetectorGrain = 1 << 15;

const bool* flags_of(const std::optional<Tensor>& mask) {
  return mask ? static_cast<const bool*>(mask->const_data_ptr()) : nullptr;
}

// function(part, first, last) for each kDetectorPart of `rows`.
template <typename Function>
void for_parts(int64_t rows, int64_t width, const Function& function) {
  const int64_t grain = std::max<int64_t>(1, kDetectorGrain / (kDetectorPart * width));
  torch::stable::parallel_for(
      0, ceil_div(rows, kDetectorPart), grain, [&](int64_t begin, int64_t end) {
        for (int64_t part = begin; part < end; ++part) {
          const int64_t first = part * kDetectorPart;
          function(part, first, std::min(first + kDetectorPart, rows));
        }
      });
}

// sum_parts with what it adds up in.
template <typename T>
void add_parts(int64_t parts, int64_t width, int64_t stride, const float* from, double factor, T* out) {
  std::vector<double> total(width);
  sum_parts(parts, width, stride, from, factor, total.data(), out);
}

// Floats that kDetectorRows rows of T need beside their tensor.
template <typename T>
int64_t room_of_rows(int64_t width, int64_t filled) {
  return are_floats<T>(width, filled) ? 0 : kDetectorRows * filled;
}

// function(is_replaced) of the labels: flags, or ids that differ from the original ones.
template <typename Function>
void with_labels(const Tensor& replaced, const std::optional<Tensor>& original,
                 const Function& function) {
  if (!original) {
    const bool* flags = static_cast<const bool*>(replaced.const_data_ptr());
    return function([flags](int64_t row) { return flags[row]; });
  }
  with_id_type(replaced, [&](auto type) {
    using Id = decltype(type);
    const Id* ids = static_cast<const Id*>(replaced.const_data_ptr());
    const Id* before = static_cast<const Id*>(original->const_data_ptr());
    function([=](int64_t row) { return ids[row] != before[row]; });
  });
}

// input [N, E], rows dense; normalizer [] fp32. The outputs are those of fastplm::replaced_token_loss_fwd.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> replaced_token_loss(
    const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
    const Tensor& replaced, const std::optional<Tensor>& original,
    const std::optional<Tensor>& mask, const std::optional<Tensor>& normalizer, bool reduced,
    bool mean, bool need_counts, bool sum_weight) {
  const int64_t rows = input.size(0), width = input.size(1), stride = input.stride(0);
  const int64_t filled = detector_width(width), parts = ceil_div(rows, kDetectorPart);
  const std::vector<float> weights = widened(weight, filled);
  const float offset = bias ? widened(*bias, 1)[0] : 0.0f;
  const bool* counts = flags_of(mask);
  Tensor each = empty_tensor(input, {rows}, ScalarType::Float), slope = empty_tensor(each, {rows});
  Tensor weight_sum = empty_tensor(each, {sum_weight ? width : 0});
  float *losses = each.mutable_data_ptr<float>(), *slopes = slope.mutable_data_ptr<float>();
  if (counts != nullptr) {
    std::fill(losses, losses + rows, 0.0f);
    std::fill(slopes, slopes + rows, 0.0f);
  }
  std::vector<Detected> of_part(parts);
  std::vector<float> sum_of_part(sum_weight ? parts * filled : 0);
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(input.const_data_ptr());
    with_labels(replaced, original, [&](const auto& is_replaced) {
      for_parts(rows, width, [&](int64_t part, int64_t first, int64_t last) {
        std::vector<float> wide(room_of_rows<T>(width, filled));
        float* sum = sum_weight ? sum_of_part.data() + part * filled : nullptr;
        of_part[part] = detect_rows(first, last, width, from, stride, weights.data(), offset, counts,
                                    is_replaced, losses, slopes, sum, wide.data());
      });
    });
  });
  Detected all;
  for (const Detected& part : of_part) all.add(part);
  if (sum_weight) {
    add_parts(parts, width, filled, sum_of_part.data(), 1.0, weight_sum.mutable_data_ptr<float>());
  }
  Tensor told = empty_tensor(input, {need_counts ? 5 : 0}, ScalarType::Long);
  if (need_counts) {
    const int64_t numbers[5] = {all.found, all.flagged, all.told, all.correct, all.total};
    std::memcpy(told.mutable_data_ptr(), numbers, sizeof(numbers));
  }
  if (!reduced) {
    return {each, slope, empty_tensor(each, {0}), weight_sum, empty_tensor(each, {0}), told};
  }
  float divisor = 1.0f;
  if (normalizer) {
    divisor = *normalizer->const_data_ptr<float>();
  } else if (mean) {
    divisor = static_cast<float>(all.total);
  }
  divisor = divisor == 0.0f ? 1.0f : divisor;
  const auto scalar = [&](double value) {
    Tensor out = empty_tensor(each, {});
    *out.mutable_data_ptr<float>() = static_cast<float>(value);
    return out;
  };
  return {scalar(all.loss / divisor), slope,    scalar(divisor),
          weight_sum,                 scalar(all.slope), told};
}

// The outputs of fastplm::replaced_token_loss_bwd, of its inputs.
std::tuple<Tensor, Tensor, Tensor> replaced_token_loss_backward(
    const Tensor& grad_loss, const Tensor& slope, const std::optional<Tensor>& denominator,
    const Tensor& weight, const std::optional<Tensor>& mask, const std::optional<Tensor>& input,
    const std::optional<Tensor>& weight_sum, const std::optional<Tensor>& bias_sum,
    bool need_input, bool need_weight) {
  const int64_t rows = slope.size(0), width = weight.size(0), filled = detector_width(width);
  const bool* counts = flags_of(mask);
  const float* grads = grad_loss.const_data_ptr<float>();
  const float* slopes = slope.const_data_ptr<float>();
  const bool reduced = denominator.has_value();
  const float scale = reduced ? *grads / *denominator->const_data_ptr<float>() : 0.0f;
  const auto counted = [counts](int64_t row) { return counts == nullptr || counts[row]; };
  const std::vector<float> weights = widened(weight, filled);
  const bool reads_rows = need_weight && !weight_sum;
  std::vector<float> grad_logit(rows);
  double grad_of_bias = 0;
  for (int64_t row = 0; row < rows; ++row) {
    if (counted(row)) grad_logit[row] = slopes[row] * (reduced ? scale : grads[row]);
    grad_of_bias += grad_logit[row];
  }
  if (bias_sum) grad_of_bias = static_cast<double>(*bias_sum->const_data_ptr<float>()) * scale;
  Tensor grad_weight = empty_tensor(weight, {need_weight ? width : 0}), grad_bias = empty_tensor(weight, {});
  Tensor grad_input = empty_tensor(weight, {need_input ? rows : 0, width});
  if (!need_input) grad_input = empty_tensor(weight, {0});
  with_floating_type(weight, [&](auto type) {
    using T = decltype(type);
    *static_cast<T*>(grad_bias.mutable_data_ptr()) = static_cast<T>(static_cast<float>(grad_of_bias));
    T* of_weight = static_cast<T*>(grad_weight.mutable_data_ptr());
    if (need_weight && weight_sum) {
      add_parts(1, width, width, weight_sum->const_data_ptr<float>(), scale, of_weight);
    }
    std::vector<float> sum_of_part(reads_rows ? ceil_div(rows, kDetectorPart) * filled : 0);
    T* to = static_cast<T*>(grad_input.mutable_data_ptr());
    for_parts(rows, width, [&](int64_t part, int64_t first, int64_t last) {
      for (int64_t row = first; need_input && row < last; ++row) {
        scaled_row(width, weights.data(), counted(row), grad_logit[row], to + row * width);
      }
      if (reads_rows) {
        std::vector<float> wide(room_of_rows<T>(width, filled));
        add_weighted_rows(first, last, width, static_cast<const T*>(input->const_data_ptr()),
                          input->stride(0), counts, grad_logit.data(),
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

#if FASTPLM_ONCE
STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def(
      "replaced_token_loss(Tensor input, Tensor weight, Tensor? bias, Tensor replaced, "
      "Tensor? original, Tensor? mask, Tensor? normalizer, bool reduced, bool mean, "
      "bool need_counts, bool sum_weight) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "replaced_token_loss_backward(Tensor grad_loss, Tensor slope, Tensor? denominator, "
      "Tensor weight, Tensor? mask, Tensor? input, Tensor? weight_sum, Tensor? bias_sum, "
      "bool need_input, bool need_weight) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("replaced_token_loss", FASTPLM_BOX(replaced_token_loss));
  library.impl("replaced_token_loss_backward", FASTPLM_BOX(replaced_token_loss_backward));
}
#endif
