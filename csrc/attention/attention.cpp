// fastplm_C::attention and its backward on the CPU: one thread computes a head of a sequence, so nothing
// is summed across threads, and results do not depend on their number.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/attention_head.h"
#include "common/operators.h"
#include "common/philox.h"

#define FASTPLM_FILE "attention/attention.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "common/rowwise.h"
#include "attention/attention.h"
#include "attention/attention_call.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// Heads [B, H, T, D] with any strides, or [N, H, D] of packed sequences, given by their starts.
template <typename T>
struct Heads {
  Heads(const Tensor& tensor, const int32_t* starts)
      : data(const_cast<T*>(data_of<std::remove_const_t<T>>(tensor))),
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
#define FASTPLM_ATTENTION(ARGUMENT)                                             \
  ARGUMENT(Tensor, query) ARGUMENT(Tensor, key) ARGUMENT(Tensor, value)         \
  ARGUMENT(Dense<bool>, key_mask) ARGUMENT(std::optional<Tensor>, attn_mask)    \
  ARGUMENT(Dense<int32_t>, cu_seqlens_q) ARGUMENT(Dense<int32_t>, cu_seqlens_k) \
  ARGUMENT(int64_t, longest_q) ARGUMENT(int64_t, longest_k)                     \
  ARGUMENT(Dense<float>, bias_weight)                                           \
  ARGUMENT(Dense<int64_t>, buckets) /* [2 max_distance + 1] */                  \
  ARGUMENT(Dense<int64_t>, seed) ARGUMENT(Dense<int64_t>, sample_index)         \
  ARGUMENT(int64_t, dropout_threshold)                                          \
  ARGUMENT(bool, is_causal) ARGUMENT(double, scale)                             \
  ARGUMENT(int64_t, window_left) ARGUMENT(int64_t, window_right)
FASTPLM_ARGUMENTS(AttentionArguments, FASTPLM_ATTENTION)

// The arguments that only the backward has.
#define FASTPLM_ATTENTION_BACKWARD(ARGUMENT) \
  ARGUMENT(Tensor, stats) ARGUMENT(Tensor, grad_out) ARGUMENT(bool, bias_grad)
FASTPLM_ARGUMENTS(BackwardArguments, FASTPLM_ATTENTION_BACKWARD)

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

int64_t batch_of(const AttentionArguments& args) {
  return args.cu_seqlens_q ? args.cu_seqlens_q.size() - 1 : args.query.size(0);
}

// The number of query rows of all sequences.
int64_t rows_of(const AttentionArguments& args) {
  return args.query.size(0) * (args.cu_seqlens_q ? 1 : args.query.size(2));
}

// Computes every head of every sequence, each by a thread that is free. The forward writes `out`,
// the backward `gradients`.
template <typename T>
void run(const AttentionArguments& args, Softmax* softmax, const Heads<T>* out,
         const Gradients<T>* gradients) {
  const int32_t* starts_q = args.cu_seqlens_q.data();
  const int32_t* starts_k = args.cu_seqlens_k.data();
  const Heads<T> queries(args.query, starts_q), keys(args.key, starts_k);
  const Heads<T> values(args.value, starts_k);
  std::optional<Heads<const bool>> masks;
  if (args.attn_mask) masks.emplace(*args.attn_mask, nullptr);
  const int64_t batch = batch_of(args), rows = rows_of(args);
  const int64_t heads = args.query.size(1);
  const int64_t dim = args.query.size(starts_q ? 2 : 3);
  int64_t floats = 0;
  for (int64_t b = 0; b < batch; ++b) {
    floats = std::max(floats, HeadPass<T>::floats(queries.seqlen(b), keys.seqlen(b), dim,
                                                  gradients != nullptr));
  }
  // A thread starts with its own share, then continues with heads that no thread has begun. So two threads
  // seldom write neighbouring heads, which share cache lines.
  const int64_t tasks = batch * heads;
  Vector<std::atomic<bool>> begun(tasks);
  parallel_for(tasks, 1, [&](int64_t share, int64_t) {
    const Room<Use::kHead> room(floats);
    for (int64_t step = 0; step < tasks; ++step) {
      const int64_t task = (share + step) % tasks;
      if (begun[task].exchange(true, std::memory_order_relaxed)) continue;
      const int64_t b = task / heads;
      const int64_t h = task % heads;
      // Keys before the window of the first query are left out as if they were not there.
      const int64_t cached = queries.seqlen(b) > 0 ? keys.seqlen(b) - queries.seqlen(b) : 0;
      const bool clipped = args.is_causal && args.window_left >= 0 && cached > args.window_left;
      const int64_t skipped = clipped ? (cached - args.window_left) / kDrawnKeys * kDrawnKeys : 0;
      const auto after_skipped = [&](auto rows) {
        if (rows.data != nullptr) rows.data += skipped * rows.stride;
        return rows;
      };
      const bool* mask = args.key_mask.data();
      if (mask != nullptr) mask += skipped + (starts_k ? starts_k[b] : b * keys.length);
      Head<T> head{
          .seqlen_q = queries.seqlen(b),
          .seqlen_k = keys.seqlen(b) - skipped,
          .dim = dim,
          .longest_q = args.longest_q,
          .query = queries.template head<const T>(b, h),
          .key = after_skipped(keys.template head<const T>(b, h)),
          .value = after_skipped(values.template head<const T>(b, h)),
          .key_mask = mask,
          .attn_mask = masks ? masks->head<const bool>(b, h) : Strided<const bool>{},
          .is_causal = args.is_causal,
          .scale = static_cast<float>(args.scale),
          .softmax = softmax + h * rows + (starts_q ? starts_q[b] : b * queries.length),
          .left = args.window_left,
          .right = std::min(args.window_right, keys.seqlen(b)),  // more would be as much
      };
      if (head.attn_mask.data != nullptr) head.attn_mask.data += skipped;
      const int64_t next_task = task + 1;  // probably this thread's
      if (next_task < tasks && !begun[next_task].load(std::memory_order_relaxed)) {
        const int64_t next_b = next_task / heads, next_h = next_task % heads;
        head.prefetch[0] = queries.template head<const T>(next_b, next_h);
        head.prefetch[1] = keys.template head<const T>(next_b, next_h);
        head.prefetch[2] = values.template head<const T>(next_b, next_h);
        if (gradients) head.prefetch[3] = gradients->out.template head<const T>(next_b, next_h);
        head.prefetch_rows = std::min(queries.seqlen(next_b), keys.seqlen(next_b));
      }
      if (args.bias_weight) {
        head.bias = {args.bias_weight.data() + h, heads, args.bias_weight.size(),
                     args.buckets.data(), (args.buckets.size() - 1) / 2};
      }
      if (args.seed) {
        const int64_t* sample_index = args.sample_index.data();
        head.dropout = {static_cast<uint64_t>(*args.seed.data()),
                        static_cast<uint64_t>(sample_index ? sample_index[b] : b),
                        static_cast<uint32_t>(h),
                        static_cast<uint32_t>(args.dropout_threshold), skipped};
      }
      Scratch& scratch = room.memory;
      scratch.reserve(floats);
      if (gradients == nullptr) {
        run_head<T>(head, scratch, out->template head<T>(b, h));
      } else {
        double* bias = gradients->bias;
        if (bias != nullptr) bias += task * head.bias.count;
        const Strided<T> of_keys[2] = {gradients->key.template head<T>(b, h),
                                       gradients->value.template head<T>(b, h)};
        for (const Strided<T>& grad : of_keys) zero_rows(grad, 0, skipped, dim);
        run_head_backward<T>(head, scratch, gradients->out.template head<const T>(b, h),
                             gradients->query.template head<T>(b, h), after_skipped(of_keys[0]),
                             after_skipped(of_keys[1]), bias);
      }
    }
  });
}

// --- operators ------------------------------------------------------------------------------------

// Whether sequences lie one after the other within the rows, and none is longer than max_seqlen. If
// not, ops.attention_varlen says what is wrong.
void check_starts(const Dense<int32_t>& starts, const Tensor& rows, int64_t longest) {
  if (!starts) return;
  const int32_t* at = starts.data();
  const int64_t batch = starts.size() - 1;
  bool fit = at[0] == 0 && at[batch] <= rows.size(0);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{at[b + 1]} - at[b];
    fit = fit && length >= 0 && length <= longest;
  }
  require(fit, "cu_seqlens do not fit the rows or the longest length");
}

// T queries, S keys of a padded sequence; M queries, N keys of packed ones.
Shapes check(const AttentionArguments& args) {
  Shapes shapes;
  if (args.cu_seqlens_q) {
    shapes.rows(args.query, "query [M, H, D]");
    shapes.rows(args.key, "key [N, H, D]");
    shapes.rows(args.value, "value [N, H, D]");
    shapes.any(args.key_mask, "key_mask [N]");
    shapes.any(args.cu_seqlens_q, "cu_seqlens_q [B + 1]");
    shapes.any(args.cu_seqlens_k, "cu_seqlens_k [B + 1]");
    require(args.cu_seqlens_k && !args.attn_mask, "cu_seqlens_q comes with cu_seqlens_k, and without attn_mask");
    check_starts(args.cu_seqlens_q, args.query, args.longest_q);
    check_starts(args.cu_seqlens_k, args.key, args.longest_k);
  } else {
    shapes.rows(args.query, "query [B, H, T, D]");
    shapes.rows(args.key, "key [B, H, S, D]");
    shapes.rows(args.value, "value [B, H, S, D]");
    shapes.any(args.key_mask, "key_mask [B, S]");
    shapes.rows(args.attn_mask, "attn_mask [B, H, T, S]");
    require(!args.cu_seqlens_k, "cu_seqlens_k comes with cu_seqlens_q");
  }
  require(shapes['D'] > 0, "D of query must not be 0");
  shapes.any(args.seed, "seed []");
  shapes.any(args.sample_index, "sample_index [B]");
  if (args.bias_weight) {
    shapes.any(args.bias_weight, "bias_weight [K, H]");
    shapes.any(args.buckets, "buckets [L + 1]");
    const int64_t *bucket = args.buckets.data(), count = args.buckets.size(), weights = shapes['K'];
    require(count % 2 == 1 && std::all_of(bucket, bucket + count, [&](int64_t each) { return each >= 0 && each < weights; }),
            "buckets [2 max_distance + 1] must be rows of bias_weight");
  }
  return shapes;
}

// A tensor to fill, with a projection's order in memory: [B, T, H, D], or [N, H, D] with 0 in spare
// rows.
Tensor like_projection(const Tensor& like, const Dense<int32_t>& starts) {
  if (!starts) {
    const Tensor out =
        empty_tensor(like, {like.size(0), like.size(2), like.size(1), like.size(3)});
    return torch::stable::transpose(out, 1, 2);
  }
  Tensor out = empty_tensor_like(like);
  const int64_t row = like.size(1) * like.size(2) * static_cast<int64_t>(like.element_size());
  const int64_t used = starts.data()[starts.size() - 1];
  auto* bytes = static_cast<char*>(out.mutable_data_ptr());
  std::memset(bytes + used * row, 0, (like.size(0) - used) * row);
  return out;
}

// (out, the softmax of each row for the backward, fp32 [2, H, rows of the queries]: pairs of a
// row's largest score and the inverse of its sum, one head after another).
std::tuple<Tensor, Tensor> attention(const AttentionArguments& args) {
  check(args);
  const Tensor out = like_projection(args.query, args.cu_seqlens_q);
  const int64_t heads = args.query.size(1), rows = rows_of(args);
  Tensor stats = empty_tensor(args.query, {2, heads, rows}, ScalarType::Float);
  auto* pairs = static_cast<Softmax*>(stats.mutable_data_ptr());
  if (args.cu_seqlens_q) std::fill(pairs, pairs + heads * rows, Softmax{});
  with_floating_type(args.query, [&](auto element) {
    using T = decltype(element);
    const Heads<T> result(out, args.cu_seqlens_q.data());
    run<T>(args, pairs, &result, nullptr);
  });
  return {out, stats};
}

// The gradients of query, key and value, and of the bias: fp64 [B, H, buckets], or empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const AttentionArguments& args,
                                                              const BackwardArguments& upstream) {
  Shapes shapes = check(args);
  shapes.dense(upstream.stats, "stats [2, H, R]");
  require(shapes['R'] == rows_of(args), "stats [2, H, R] must have a number for each row of query");
  if (args.cu_seqlens_q) {
    shapes.rows(upstream.grad_out, "grad_out [M, H, D]");
  } else {
    shapes.rows(upstream.grad_out, "grad_out [B, H, T, D]");
  }
  const Tensor dq = like_projection(args.query, args.cu_seqlens_q);
  const Tensor dk = like_projection(args.key, args.cu_seqlens_k);
  const Tensor dv = like_projection(args.value, args.cu_seqlens_k);
  std::vector<int64_t> sizes{0};
  if (upstream.bias_grad && args.bias_weight) {
    sizes = {batch_of(args), args.query.size(1), args.bias_weight.size()};
  }
  Tensor by_sample = empty_tensor(args.query, sizes, ScalarType::Double);
  double* bias = by_sample.mutable_data_ptr<double>();
  std::fill(bias, bias + by_sample.numel(), 0.0);
  with_floating_type(args.query, [&](auto element) {
    using T = decltype(element);
    const int32_t* starts_q = args.cu_seqlens_q.data();
    const int32_t* starts_k = args.cu_seqlens_k.data();
    const Gradients<T> gradients{Heads<T>(upstream.grad_out, starts_q), Heads<T>(dq, starts_q),
                                 Heads<T>(dk, starts_k), Heads<T>(dv, starts_k),
                                 by_sample.numel() > 0 ? bias : nullptr};
    // The cast is safe, as the backward only reads the pairs.
    auto* pairs = reinterpret_cast<Softmax*>(const_cast<float*>(data_of<float>(upstream.stats)));
    run<T>(args, pairs, nullptr, &gradients);
  });
  return {dq, dk, dv, by_sample};
}

}  // namespace

void attend(const PackedAttention& args) {
  const auto length = [](const int32_t* starts, int64_t b) { return int64_t{starts[b + 1]} - starts[b]; };
  int64_t floats = 0, longest = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    longest = std::max(longest, length(args.starts_q, b));
    floats = std::max(floats, HeadPass<float>::floats(length(args.starts_q, b),
                                                      length(args.starts_k, b), args.dim, false));
  }
  const int64_t tasks = args.batch * args.heads;
  std::atomic<int64_t> next(0);
  parallel_for(tasks, 1, [&](int64_t, int64_t) {
    const Room<Use::kHead> room(floats);
    const Buffer<Softmax> softmax(longest);  // which nobody reads
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t b = task / args.heads, column = task % args.heads * args.dim;
      const int64_t query = args.starts_q[b], key = args.starts_k[b];
      const Head<float> head{
          .seqlen_q = length(args.starts_q, b),
          .seqlen_k = length(args.starts_k, b),
          .dim = args.dim,
          .longest_q = longest,
          .query = {args.query + query * args.query_row + column, args.query_row},
          .key = {args.key + key * args.key_row + column, args.key_row},
          .value = {args.value + key * args.key_row + column, args.key_row},
          .scale = args.scale,
          .softmax = softmax.get(),
      };
      room.memory.reserve(floats);
      run_head<float>(head, room.memory, {args.out + query * args.out_row + column, args.out_row});
    }
  });
}

}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(attention)
FASTPLM_OPERATOR(attention_backward)
