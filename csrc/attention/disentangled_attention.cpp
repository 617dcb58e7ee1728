// fastplm_C::disentangled_attention and its backward on the CPU: one thread computes a head of some sequences. How
// they are shared out depends on the batch alone, so results do not depend on the number of threads.
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

#define FASTPLM_FILE "attention/disentangled_attention.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "common/rowwise.h"
#include "attention/attention.h"
#include "attention/attention_rows.h"
#include "attention/disentangled_attention.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// The arguments that the forward and the backward share.
#define FASTPLM_DISENTANGLED(ARGUMENT)                                                            \
  ARGUMENT(Tensor, query) ARGUMENT(Tensor, key) ARGUMENT(Tensor, value)                           \
  ARGUMENT(std::optional<Tensor>, pos_key) ARGUMENT(std::optional<Tensor>, pos_query)             \
  ARGUMENT(Dense<int64_t>, buckets) /* [2 reach - 1] */                                           \
  ARGUMENT(Dense<bool>, key_mask) ARGUMENT(Dense<int32_t>, cu_seqlens) ARGUMENT(int64_t, longest) \
  ARGUMENT(Dense<int64_t>, seed) ARGUMENT(Dense<int64_t>, sample_index)                           \
  ARGUMENT(int64_t, dropout_threshold) ARGUMENT(double, scale)
FASTPLM_ARGUMENTS(DisentangledArguments, FASTPLM_DISENTANGLED)

// The arguments that only the backward has.
#define FASTPLM_DISENTANGLED_BACKWARD(ARGUMENT) ARGUMENT(Tensor, stats) ARGUMENT(Tensor, grad_out)
FASTPLM_ARGUMENTS(UpstreamArguments, FASTPLM_DISENTANGLED_BACKWARD)

// A batch is shared out to at most so many groups of sequences; the backward sums the gradients of the tables in
// each of them.
constexpr int64_t kGroups = 8;

template <typename T>
struct Gradients {
  Heads<T> out, query, key, value;
  float *pos_key, *pos_query;  // [groups, H, buckets, D]
};

int64_t batch_of(const DisentangledArguments& args) {
  return args.cu_seqlens ? args.cu_seqlens.size() - 1 : args.query.size(0);
}

int64_t rows_of(const DisentangledArguments& args) {
  return args.query.size(0) * (args.cu_seqlens ? 1 : args.query.size(2));
}

template <typename T>
Table<T> table_of(const std::optional<Tensor>& table, int64_t task, int64_t heads, float* grads) {
  if (!table) return {};
  const int64_t size = table->size(0) * table->size(2);
  return {data_of<T>(*table) + task % heads * table->stride(1), table->stride(0),
          grads ? grads + task * size : nullptr};
}

// Computes every head of every sequence. The forward writes `out`, the backward `gradients`.
template <typename T>
void run(const DisentangledArguments& args, Softmax* softmax, const Heads<T>* out,
         const Gradients<T>* gradients) {
  const int32_t* starts = args.cu_seqlens.data();
  const Heads<T> queries(args.query, starts), keys(args.key, starts), values(args.value, starts);
  const int64_t batch = batch_of(args), rows = rows_of(args), heads = args.query.size(1);
  const int64_t dim = args.query.size(starts ? 2 : 3), groups = std::min(batch, kGroups);
  const int64_t* bucket = args.buckets.data() + args.buckets.size() / 2;
  int64_t longest = 0;
  for (int64_t b = 0; b < batch; ++b) longest = std::max(longest, queries.seqlen(b));
  using Pass = HeadPass<T, Positions>;
  const int64_t floats = Pass::floats(longest, longest, dim, gradients != nullptr);
  const int64_t of_positions = Positions::floats(longest, dim, gradients != nullptr);
  const int64_t tasks = groups * heads;
  std::atomic<int64_t> next(0);
  parallel_for(tasks, 1, [&](int64_t, int64_t) {
    const Room<Use::kHead> room(floats);
    const Room<Use::kProduct> room_of_positions(of_positions);
    for (int64_t task = next++; task < tasks; task = next++) {
      const int64_t group = task / heads, h = task % heads;
      const int64_t begin = batch * group / groups, end = batch * (group + 1) / groups;
      int64_t reach = 0;
      for (int64_t b = begin; b < end; ++b) reach = std::max(reach, queries.seqlen(b));
      const auto pos_key = table_of<T>(args.pos_key, task, heads, gradients ? gradients->pos_key : nullptr);
      const auto pos_query = table_of<T>(args.pos_query, task, heads, gradients ? gradients->pos_query : nullptr);
      if (reach == 0) continue;
      room_of_positions.memory.reserve(of_positions);
      Positions positions(pos_key, pos_query, bucket, reach, dim, room_of_positions.memory);
      for (int64_t b = begin; b < end; ++b) {
        const bool* mask = args.key_mask.data();
        if (mask != nullptr) mask += starts ? starts[b] : b * keys.length;
        Head<T> head{
            .seqlen_q = queries.seqlen(b),
            .seqlen_k = keys.seqlen(b),
            .dim = dim,
            .longest_q = longest,
            .query = queries.template head<const T>(b, h),
            .key = keys.template head<const T>(b, h),
            .value = values.template head<const T>(b, h),
            .key_mask = mask,
            .scale = static_cast<float>(args.scale),
            .softmax = softmax + h * rows + (starts ? starts[b] : b * queries.length),
        };
        if (args.seed) {
          const int64_t* sample_index = args.sample_index.data();
          head.dropout = {static_cast<uint64_t>(*args.seed.data()),
                          static_cast<uint64_t>(sample_index ? sample_index[b] : b),
                          static_cast<uint32_t>(h), static_cast<uint32_t>(args.dropout_threshold)};
        }
        room.memory.reserve(floats);
        Pass pass(head, room.memory, &positions);
        if (gradients == nullptr) {
          pass.forward(out->template head<T>(b, h), room.memory);
        } else {
          pass.backward(gradients->out.template head<const T>(b, h),
                        gradients->query.template head<T>(b, h),
                        gradients->key.template head<T>(b, h),
                        gradients->value.template head<T>(b, h), nullptr, room.memory);
        }
      }
      if (gradients != nullptr) positions.fold(pos_key, pos_query);
    }
  });
}

// --- operators ------------------------------------------------------------------------------------

Shapes check(const DisentangledArguments& args) {
  Shapes shapes;
  if (args.cu_seqlens) {
    shapes.rows(args.query, "query [N, H, D]");
    shapes.rows(args.key, "key [N, H, D]");
    shapes.rows(args.value, "value [N, H, D]");
    shapes.any(args.key_mask, "key_mask [N]");
    shapes.any(args.cu_seqlens, "cu_seqlens [B + 1]");
    check_starts(args.cu_seqlens, args.query, args.longest);
  } else {
    shapes.rows(args.query, "query [B, H, T, D]");
    shapes.rows(args.key, "key [B, H, T, D]");
    shapes.rows(args.value, "value [B, H, T, D]");
    shapes.any(args.key_mask, "key_mask [B, T]");
  }
  require(shapes['D'] > 0, "D of query must not be 0");
  shapes.rows(args.pos_key, "pos_key [K, H, D]");
  shapes.rows(args.pos_query, "pos_query [K, H, D]");
  require(args.pos_key || args.pos_query, "pos_key or pos_query must be given");
  shapes.any(args.seed, "seed []");
  shapes.any(args.sample_index, "sample_index [B]");
  const int64_t longest = args.cu_seqlens ? args.longest : args.query.size(2);
  const int64_t *bucket = args.buckets.data(), count = args.buckets.size(), weights = shapes['K'];
  require(count % 2 == 1 && count >= 2 * round_up(longest, kWidth) - 1 &&
              std::all_of(bucket, bucket + count, [&](int64_t each) { return each >= 0 && each < weights; }),
          "buckets [2 reach - 1] must be rows of the tables, for distances up to the longest sequence");
  return shapes;
}

// (out, the softmax of each row for the backward, as of fastplm_C::attention).
std::tuple<Tensor, Tensor> disentangled_attention(const DisentangledArguments& args) {
  check(args);
  const Tensor out = like_projection(args.query, args.cu_seqlens);
  const int64_t heads = args.query.size(1), rows = rows_of(args);
  Tensor stats = empty_tensor(args.query, {2, heads, rows}, ScalarType::Float);
  auto* pairs = static_cast<Softmax*>(stats.mutable_data_ptr());
  if (args.cu_seqlens) std::fill(pairs, pairs + heads * rows, Softmax{});
  with_floating_type(args.query, [&](auto element) {
    using T = decltype(element);
    const Heads<T> result(out, args.cu_seqlens.data());
    run<T>(args, pairs, &result, nullptr);
  });
  return {out, stats};
}

// The gradients of query, key and value, and of the tables: fp32 [groups, H, buckets, D], or empty.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> disentangled_attention_backward(
    const DisentangledArguments& args, const UpstreamArguments& upstream) {
  Shapes shapes = check(args);
  shapes.dense(upstream.stats, "stats [2, H, R]");
  require(shapes['R'] == rows_of(args), "stats [2, H, R] must have a number for each row of query");
  shapes.rows(upstream.grad_out, args.cu_seqlens ? Shape("grad_out [N, H, D]") : Shape("grad_out [B, H, T, D]"));
  const Tensor dq = like_projection(args.query, args.cu_seqlens);
  const Tensor dk = like_projection(args.key, args.cu_seqlens);
  const Tensor dv = like_projection(args.value, args.cu_seqlens);
  const auto zeros = [&](const std::optional<Tensor>& table) {
    std::vector<int64_t> sizes{0};
    if (table) sizes = {std::min(batch_of(args), kGroups), table->size(1), table->size(0), table->size(2)};
    Tensor grads = empty_tensor(args.query, sizes, ScalarType::Float);
    float* data = grads.mutable_data_ptr<float>();
    std::fill(data, data + grads.numel(), 0.0f);
    return grads;
  };
  Tensor of_key = zeros(args.pos_key), of_query = zeros(args.pos_query);
  with_floating_type(args.query, [&](auto element) {
    using T = decltype(element);
    const int32_t* starts = args.cu_seqlens.data();
    const Gradients<T> gradients{
        Heads<T>(upstream.grad_out, starts), Heads<T>(dq, starts), Heads<T>(dk, starts),
        Heads<T>(dv, starts), args.pos_key ? of_key.mutable_data_ptr<float>() : nullptr,
        args.pos_query ? of_query.mutable_data_ptr<float>() : nullptr};
    // The cast is safe, as the backward only reads the pairs.
    auto* pairs = reinterpret_cast<Softmax*>(const_cast<float*>(data_of<float>(upstream.stats)));
    run<T>(args, pairs, nullptr, &gradients);
  });
  return {dq, dk, dv, of_key, of_query};
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(disentangled_attention)
FASTPLM_OPERATOR(disentangled_attention_backward)
