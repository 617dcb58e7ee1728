// fastplm_C::dropout_add_layer_norm and its backward on the CPU: each reads its tensors once.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "common/operators.h"
#include "common/philox.h"

#define FASTPLM_FILE "layers/dropout_add_layer_norm.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "common/rowwise.h"
#include "layers/dropout.h"
#include "layers/dropout_add_layer_norm.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// A thread should have at least so many elements.
constexpr int64_t kNormGrain = 1 << 13;

// The rows of a tensor of any dtype, or of none, as floats.
struct FloatRows {
  FloatRows(const std::optional<Tensor>& given, int64_t width) : width(width) {
    if (!given) return;
    tensor = dense(*given);
    type = tensor->scalar_type();
    data = tensor->const_data_ptr();
  }
  // A row where it is, or a copy in `room`; null if there is no tensor.
  const float* read(int64_t row, float* room) const {
    if (data == nullptr) return nullptr;
    const float* out = nullptr;
    with_floating_type(type, [&](auto element) {
      out = as_floats(width, width, static_cast<const decltype(element)*>(data) + row * width, room);
    });
    return out;
  }

  std::optional<Tensor> tensor;
  ScalarType type = ScalarType::Float;
  int64_t width;
  const void* data = nullptr;
};

// The same, to be written. A result is dense; one without elements is not wanted.
struct ResultRows : FloatRows {
  ResultRows(Tensor& given, int64_t width)
      : FloatRows(given, width), to(given.numel() > 0 ? given.mutable_data_ptr() : nullptr) {}
  // Where to compute a row; write() then stores it, unless it is there.
  float* place(int64_t row, float* room) const {
    return to == nullptr || type != ScalarType::Float ? room : static_cast<float*>(to) + row * width;
  }
  void write(int64_t row, const float* from) const {
    if (to == nullptr) return;
    with_floating_type(type, [&](auto element) {
      narrow(width, from, static_cast<decltype(element)*>(to) + row * width);
    });
  }

  void* to;
};

// A row [E] of any dtype as floats, or none.
Vector<float> optional_row(const std::optional<Tensor>& row) {
  return row ? widened(dense(*row), row->numel()) : Vector<float>();
}

RowDropout dropout_of(const std::optional<Tensor>& seed, const Dense<int64_t>& sample_index,
                      const Dense<int64_t>& position, int64_t threshold, double keep_scale) {
  if (!seed) return {};
  return {static_cast<uint64_t>(*seed->const_data_ptr<int64_t>()), static_cast<int32_t>(threshold),
          static_cast<float>(keep_scale), sample_index.data(), position.data()};
}

// Checks what both operators take, of which `rows` is how many have a sample and a position.
Shapes shapes_of(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& seed,
                 const std::optional<Tensor>& sample_index, const std::optional<Tensor>& position) {
  Shapes shapes;
  shapes.any(input, "input [..., E]");
  shapes.any(weight, "weight [E]");
  shapes.any(seed, "seed []");
  shapes.any(sample_index, "sample_index [N]");
  shapes.any(position, "position [N]");
  require((!sample_index && !position) || shapes['N'] * shapes['E'] == input.numel(),
          "sample_index and position [N] need a number for each row");
  return shapes;
}

// Elements are dropped if there is a seed, by samples and positions or by the number of a row.
void dropout_add_layer_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& linear_bias,
                            const std::optional<Tensor>& seed, const std::optional<Tensor>& sample_index,
                            const std::optional<Tensor>& position, int64_t threshold, double keep_scale,
                            double eps, bool is_rms, Tensor& out, Tensor& sum) {
  Shapes shapes = shapes_of(input, weight, seed, sample_index, position);
  shapes.any(residual, "residual [..., E]");
  shapes.any(bias, "bias [E]");
  shapes.any(linear_bias, "linear_bias [E]");
  shapes.dense(out, "out [..., E]");
  shapes.dense(sum, "sum [..., E]");
  const int64_t width = shapes['E'], rows = width == 0 ? 0 : input.numel() / width;
  const FloatRows inputs(input, width), residuals(residual, width);
  const ResultRows outs(out, width), sums(sum, width);
  const Vector<float> w = optional_row(weight), b = optional_row(bias), x_bias = optional_row(linear_bias);
  const Dense<int64_t> samples(sample_index), positions(position);
  const RowDropout dropout = dropout_of(seed, samples, positions, threshold, keep_scale);
  for_ranges(rows, 1, grain_of(kNormGrain, width), [&](int64_t first, int64_t last) {
    const Buffer<float> room(2 * width + RowDropout::room(width));
    float *one = room.get(), *two = one + width, *three = two + width;
    for (int64_t row = first; row < last; ++row) {
      const float* keep = seed ? dropout.keep(row, width, three) : nullptr;
      float* added = sums.place(row, two);
      add_row(width, inputs.read(row, one), linear_bias ? x_bias.data() : nullptr, keep, dropout.scale,
              residuals.read(row, two), added);
      sums.write(row, added);
      const float* rounded = sums.read(row, two);
      float* normed = outs.place(row, one);
      norm_row(width, static_cast<float>(eps), !is_rms, w.data(), bias ? b.data() : nullptr, rounded, normed);
      outs.write(row, normed);
    }
  });
}

// The gradients that have elements.
void dropout_add_layer_norm_backward(const Tensor& grad_out, const Tensor& sum, const Tensor& weight,
                                     const std::optional<Tensor>& grad_sum, const std::optional<Tensor>& seed,
                                     const std::optional<Tensor>& sample_index,
                                     const std::optional<Tensor>& position, int64_t threshold,
                                     double keep_scale, double eps, bool is_rms, Tensor& grad_input,
                                     Tensor& grad_residual, Tensor& grad_weight, Tensor& grad_bias,
                                     Tensor& grad_linear_bias) {
  Shapes shapes = shapes_of(sum, weight, seed, sample_index, position);
  shapes.any(grad_out, "grad_out [..., E]");
  shapes.any(grad_sum, "grad_sum [..., E]");
  shapes.wanted(grad_input, "grad_input [..., E]");
  shapes.wanted(grad_residual, "grad_residual [..., E]");
  shapes.wanted(grad_weight, "grad_weight [E]");
  shapes.wanted(grad_bias, "grad_bias [E]");
  shapes.wanted(grad_linear_bias, "grad_linear_bias [E]");
  const int64_t width = shapes['E'], rows = width == 0 ? 0 : sum.numel() / width;
  const FloatRows grads(grad_out, width), grad_sums(grad_sum, width), sums(sum, width);
  const ResultRows to_input(grad_input, width), to_residual(grad_residual, width);
  const Vector<float> w = optional_row(weight);
  const Dense<int64_t> samples(sample_index), positions(position);
  const RowDropout dropout = dropout_of(seed, samples, positions, threshold, keep_scale);
  const std::array<Tensor*, 3> summed = {&grad_weight, &grad_bias, &grad_linear_bias};
  const int64_t count = ceil_div(rows, kSumRows), stride = 3 * width;
  const Buffer<float> parts(count * stride);
  const int64_t grain = grain_of(kNormGrain, kSumRows * width);
  for_parts(rows, kSumRows, grain, [&](int64_t part, int64_t first, int64_t last) {
    float* added = parts.get() + part * stride;
    std::fill(added, added + stride, 0.0f);
    const auto sum_of = [&](int64_t i) { return summed[i]->numel() > 0 ? added + i * width : nullptr; };
    const SumsOverRows added_to = {sum_of(0), sum_of(1), sum_of(2)};
    const Buffer<float> room(4 * width + RowDropout::room(width));
    float *one = room.get(), *two = one + width, *three = two + width, *four = three + width;
    for (int64_t row = first; row < last; ++row) {
      const float* keep = seed ? dropout.keep(row, width, four + width) : nullptr;
      float *of_residual = to_residual.place(row, three), *of_input = to_input.place(row, four);
      grad_row(width, static_cast<float>(eps), !is_rms, sums.read(row, one), w.data(), keep, dropout.scale,
               grads.read(row, two), grad_sums.read(row, three), added_to, of_residual, of_input);
      to_residual.write(row, of_residual);
      to_input.write(row, of_input);
    }
  });
  for (size_t i = 0; i < summed.size(); ++i) {
    if (summed[i]->numel() == 0) continue;
    Vector<double> total(width);
    with_floating_type(*summed[i], [&](auto type) {
      sum_parts(count, width, stride, parts.get() + i * width, 1.0, total.data(),
                data_to<decltype(type)>(*summed[i]));
    });
  }
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(dropout_add_layer_norm,
                 "(Tensor input, Tensor residual, Tensor weight, Tensor? bias, Tensor? linear_bias, "
                 "Tensor? seed, Tensor? sample_index, Tensor? position, int threshold, "
                 "float keep_scale, float eps, bool is_rms, Tensor(a!) out, Tensor(b!) sum) -> ()")
FASTPLM_OPERATOR(dropout_add_layer_norm_backward,
                 "(Tensor grad_out, Tensor sum, Tensor weight, Tensor? grad_sum, Tensor? seed, "
                 "Tensor? sample_index, Tensor? position, int threshold, float keep_scale, float eps, "
                 "bool is_rms, Tensor(a!) grad_input, Tensor(b!) grad_residual, Tensor(c!) grad_weight, "
                 "Tensor(d!) grad_bias, Tensor(e!) grad_linear_bias) -> ()")
