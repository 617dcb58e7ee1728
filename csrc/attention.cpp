// fastplm_C::attention and its backward on the CPU: a head of a sequence is one thread's work, so
// nothing is summed across threads and results do not depend on how many there are.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#include "attention_head.h"
#include "philox.h"
#include "tensors.h"

#define FASTPLM_FILE "attention.cpp"
#include "each_level.h"
#include "lanes.h"
#include "attention.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// [B, H, T, D] with any strides, or the packed rows [N, H, D] of sequences given by their starts.
template <typename T>
struct Heads {
  Heads(const Tensor& tensor, const int32_t* starts)
      : data(static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()))),
        starts(starts),
        batch_stride(starts ? 0 : tensor.stride(0)),
        head_stride(tensor.stride(1)),
        row_stride(tensor.stride(starts ? 0 : 2)),
        length(starts ? 0 : tensor.size(2)) {}
  int64_t seqlen(int64_t b) const { return starts ? starts[b + 1] - starts[b] : length; }
  template <typename U>
  Strided<U> head(int64_t b, int64_t h) const {
    const int64_t row = starts ? starts[b] * row_stride : b * batch_stride;
    return {data + row + h * head_stride, row_stride};
  }

  T* data;
  const int32_t* starts;
  int64_t batch_stride, head_stride, row_stride, length;
};

// The arguments that the forward and the backward share.
struct Options {
  Dense<bool> key_mask;
  Dense<int32_t> cu_seqlens_q, cu_seqlens_k;
  int64_t longest_q;
  Dense<float> bias_weight;  // [buckets, H]
  Dense<int64_t> buckets;    // [2 max_distance + 1]
  Dense<int64_t> seed, sample_index;
  int64_t dropout_threshold;
  bool is_causal;
  double scale;
};

template <typename T>
struct Gradients {
  Heads<T> out, query, key, value;
  double* bias;  // [B, H, buckets], null: not asked for
};

template <typename T>
void run_head(const Head<T>& head, Scratch& scratch, Strided<T> out) {
  HeadPass<T>(head, scratch).forward(out, scratch);
}

template <typename T>
void run_head_backward(const Head<T>& head, Scratch& scratch, Strided<const T> grad_out,
                       Strided<T> grad_query, Strided<T> grad_key, Strided<T> grad_value,
                       double* grad_bias) {
  HeadPass<T>(head, scratch)
      .backward(grad_out, grad_query, grad_key, grad_value, grad_bias, scratch);
}

// Rows of the queries, of all sequences.
int64_t rows_of(const Tensor& query, const Dense<int32_t>& starts) {
  return starts.defined ? query.size(0) : query.size(0) * query.size(2);
}

// Every head of every sequence, by whichever thread is free: `out` is written by the forward,
// `gradients` by the backward.
template <typename T>
void run(const Tensor& query, const Tensor& key, const Tensor& value, const Options& options,
         Softmax* softmax, const Heads<T>* out, const Gradients<T>* gradients) {
  const int32_t* starts_q = options.cu_seqlens_q.data();
  const int32_t* starts_k = options.cu_seqlens_k.data();
  const Heads<T> queries(query, starts_q), keys(key, starts_k), values(value, starts_k);
  const int64_t batch =
      starts_q ? options.cu_seqlens_q.tensor.size(0) - 1 : query.size(0);
  const int64_t heads = query.size(1);
  const int64_t rows = rows_of(query, options.cu_seqlens_q);
  const int64_t dim = query.size(starts_q ? 2 : 3);
  int64_t floats = 0;
  for (int64_t b = 0; b < batch; ++b) {
    floats = std::max(floats, HeadPass<T>::floats(queries.seqlen(b), keys.seqlen(b), dim,
                                                  gradients != nullptr));
  }
  // A thread begins with its share and goes on with what others have not begun. So two threads seldom
  // write rows of neighbouring heads, which lie side by side: each would fetch the other's lines.
  const int64_t tasks = batch * heads;
  std::vector<std::atomic<bool>> begun(tasks);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t share, int64_t) {
    static thread_local Scratch scratch;
    for (int64_t step = 0; step < tasks; ++step) {
      const int64_t task = (share + step) % tasks;
      if (begun[task].exchange(true, std::memory_order_relaxed)) continue;
      const int64_t b = task / heads;
      const int64_t h = task % heads;
      const bool* mask = options.key_mask.data();
      if (mask != nullptr) mask += starts_k ? starts_k[b] : b * keys.length;
      Head<T> head{
          queries.seqlen(b),
          keys.seqlen(b),
          dim,
          options.longest_q,
          queries.template head<const T>(b, h),
          keys.template head<const T>(b, h),
          values.template head<const T>(b, h),
          mask,
          options.is_causal,
          static_cast<float>(options.scale),
          {},
          {},
          softmax + h * rows + (starts_q ? starts_q[b] : b * queries.length),
          {},
          0,
      };
      const int64_t soon = task + 1;  // what this thread probably takes next
      if (soon < tasks && !begun[soon].load(std::memory_order_relaxed)) {
        const int64_t b_soon = soon / heads, h_soon = soon % heads;
        head.soon[0] = queries.template head<const T>(b_soon, h_soon);
        head.soon[1] = keys.template head<const T>(b_soon, h_soon);
        head.soon[2] = values.template head<const T>(b_soon, h_soon);
        if (gradients) head.soon[3] = gradients->out.template head<const T>(b_soon, h_soon);
        head.soon_rows = std::min(queries.seqlen(b_soon), keys.seqlen(b_soon));
      }
      if (options.bias_weight.defined) {
        head.bias = {options.bias_weight.data() + h, heads, options.bias_weight.tensor.size(0),
                     options.buckets.data(), (options.buckets.tensor.size(0) - 1) / 2};
      }
      if (options.seed.defined) {
        const int64_t* sample_index = options.sample_index.data();
        head.dropout = {static_cast<uint64_t>(*options.seed.data()),
                        static_cast<uint64_t>(sample_index ? sample_index[b] : b),
                        static_cast<uint32_t>(h),
                        static_cast<uint32_t>(options.dropout_threshold)};
      }
      scratch.reserve(floats);
      if (gradients == nullptr) {
        run_head<T>(head, scratch, out->template head<T>(b, h));
      } else {
        double* bias = gradients->bias;
        if (bias != nullptr) bias += task * head.bias.count;
        run_head_backward<T>(head, scratch, gradients->out.template head<const T>(b, h),
                             gradients->query.template head<T>(b, h),
                             gradients->key.template head<T>(b, h),
                             gradients->value.template head<T>(b, h), bias);
      }
    }
  });
}

// --- operators ------------------------------------------------------------------------------------

// Sequences lie one after the other within the rows, and none is longer than it was said to be. What
// is wrong where they do not, ops.attention_varlen says.
void check_starts(const Dense<int32_t>& starts, const Tensor& rows, int64_t longest) {
  if (!starts.defined) return;
  const int32_t* at = starts.data();
  const int64_t batch = starts.tensor.size(0) - 1;
  bool fit = at[0] == 0 && at[batch] <= rows.size(0);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{at[b + 1]} - at[b];
    fit = fit && length >= 0 && length <= longest;
  }
  STD_TORCH_CHECK(fit, "attention: cu_seqlens do not fit the rows or the longest length");
}

// A tensor to fill, in memory as a projection is: [B, T, H, D], or [N, H, D] with 0 in spare rows.
Tensor like_projection(const Tensor& like, const Dense<int32_t>& starts) {
  if (!starts.defined) {
    const Tensor out =
        empty_tensor(like, {like.size(0), like.size(2), like.size(1), like.size(3)});
    return torch::stable::transpose(out, 1, 2);
  }
  Tensor out = empty_tensor_like(like);
  const int64_t row = like.size(1) * like.size(2) * static_cast<int64_t>(like.element_size());
  const int64_t used = starts.data()[starts.tensor.size(0) - 1];
  auto* bytes = static_cast<char*>(out.mutable_data_ptr());
  std::memset(bytes + used * row, 0, (like.size(0) - used) * row);
  return out;
}

// (out, what a backward needs of the softmax of each row, fp32 [2, H, rows of the queries]: pairs of
// its largest score and the inverse of its sum, a head after another).
std::tuple<Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& key_mask, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, int64_t longest_q, int64_t longest_k,
    const std::optional<Tensor>& bias_weight, const std::optional<Tensor>& buckets,
    const std::optional<Tensor>& seed, const std::optional<Tensor>& sample_index,
    int64_t dropout_threshold, bool is_causal, double scale) {
  const Options options{Dense<bool>(key_mask),       Dense<int32_t>(cu_seqlens_q),
                        Dense<int32_t>(cu_seqlens_k), longest_q,
                        Dense<float>(bias_weight),   Dense<int64_t>(buckets),
                        Dense<int64_t>(seed),        Dense<int64_t>(sample_index),
                        dropout_threshold,           is_causal,
                        scale};
  check_starts(options.cu_seqlens_q, query, longest_q);
  check_starts(options.cu_seqlens_k, key, longest_k);
  const Tensor out = like_projection(query, options.cu_seqlens_q);
  const int64_t rows = rows_of(query, options.cu_seqlens_q);
  Tensor stats = empty_tensor(query, {2, query.size(1), rows}, ScalarType::Float);
  auto* pairs = static_cast<Softmax*>(stats.mutable_data_ptr());
  if (options.cu_seqlens_q.defined) std::fill(pairs, pairs + query.size(1) * rows, Softmax{});
  with_floating_type(query, [&](auto element) {
    using T = decltype(element);
    const Heads<T> result(out, options.cu_seqlens_q.data());
    run<T>(query, key, value, options, pairs, &result, nullptr);
  });
  return {out, stats};
}

// The gradients of query, key and value, and of the bias [B, H, buckets] in fp64, or an empty one.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& key_mask, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, int64_t longest_q, int64_t longest_k,
    const std::optional<Tensor>& bias_weight, const std::optional<Tensor>& buckets,
    const std::optional<Tensor>& seed, const std::optional<Tensor>& sample_index,
    int64_t dropout_threshold, bool is_causal, double scale, const Tensor& stats,
    const Tensor& grad_out, bool bias_grad) {
  const Options options{Dense<bool>(key_mask),       Dense<int32_t>(cu_seqlens_q),
                        Dense<int32_t>(cu_seqlens_k), longest_q,
                        Dense<float>(bias_weight),   Dense<int64_t>(buckets),
                        Dense<int64_t>(seed),        Dense<int64_t>(sample_index),
                        dropout_threshold,           is_causal,
                        scale};
  check_starts(options.cu_seqlens_q, query, longest_q);
  check_starts(options.cu_seqlens_k, key, longest_k);
  const Tensor dq = like_projection(query, options.cu_seqlens_q);
  const Tensor dk = like_projection(key, options.cu_seqlens_k);
  const Tensor dv = like_projection(value, options.cu_seqlens_k);
  std::vector<int64_t> sizes{0};
  if (bias_grad && bias_weight) {
    const int64_t batch = cu_seqlens_q ? cu_seqlens_q->size(0) - 1 : query.size(0);
    sizes = {batch, query.size(1), bias_weight->size(0)};
  }
  Tensor by_sample = empty_tensor(query, sizes, ScalarType::Double);
  double* bias = by_sample.mutable_data_ptr<double>();
  std::fill(bias, bias + by_sample.numel(), 0.0);
  with_floating_type(query, [&](auto element) {
    using T = decltype(element);
    const int32_t* starts_q = options.cu_seqlens_q.data();
    const int32_t* starts_k = options.cu_seqlens_k.data();
    const Gradients<T> gradients{Heads<T>(grad_out, starts_q), Heads<T>(dq, starts_q),
                                 Heads<T>(dk, starts_k), Heads<T>(dv, starts_k),
                                 by_sample.numel() > 0 ? bias : nullptr};
    // The backward only reads them.
    auto* pairs = static_cast<Softmax*>(const_cast<void*>(stats.const_data_ptr()));
    run<T>(query, key, value, options, pairs, nullptr, &gradients);
  });
  return {dq, dk, dv, by_sample};
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

#if FASTPLM_ONCE
STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? cu_seqlens_q, "
      "Tensor? cu_seqlens_k, int longest_q, int longest_k, Tensor? bias_weight, Tensor? buckets, "
      "Tensor? seed, Tensor? sample_index, int dropout_threshold, bool is_causal, float scale) -> "
      "(Tensor, Tensor)");
  library.def(
      "attention_backward(Tensor query, Tensor key, Tensor value, Tensor? key_mask, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int longest_q, int longest_k, "
      "Tensor? bias_weight, Tensor? buckets, Tensor? seed, Tensor? sample_index, "
      "int dropout_threshold, bool is_causal, float scale, Tensor stats, Tensor grad_out, "
      "bool bias_grad) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("attention", FASTPLM_BOX(attention));
  library.impl("attention_backward", FASTPLM_BOX(attention_backward));
}
#endif
