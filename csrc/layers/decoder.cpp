// fastplm_C::decoder_layer on the CPU: a layer of a GPT-2 or T5 for the next token of each sequence, in one call.
// With one sequence, Python and PyTorch's calls between the products take as long as the products.
//
//   GPT-2   y = x + attention(norm(x)),   out = y + down(gelu(up(norm(y))))
//   T5      the same, with attention to the encoder's states between them, and without biases; its norm
//           subtracts no mean, its attention adds a bias to the scores and may have a scale of 1
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "common/operators.h"
#include "common/scratch.h"
#include "common/vectors.h"

#define FASTPLM_FILE "layers/decoder.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "common/rowwise.h"
#include "layers/gelu.h"
#include "gemm/gemm.h"
#include "layers/layer.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

constexpr int64_t kHeadGrain = 16384;  // numbers of keys that are worth a thread
constexpr int64_t kGateGrain = 32768;  // numbers that are worth a thread
constexpr float kMaskedScore = -kInfinity;  // the score of a masked key

// --- the parts of a layer -------------------------------------------------------------------------

struct Relu {
  FASTPLM_HD void operator()(int64_t, int64_t, int64_t count, float* values) const {
    for (int64_t i = 0; i < count; ++i) values[i] = values[i] < 0.0f ? 0.0f : values[i];
  }
};

enum Activation : int64_t { kRelu, kGelu, kGeluTanh };

// The tensors of a layer, in the order of the operator's argument.
struct Layer {
  // GPT-2 has two norms and four products, T5 three norms and eight products or, with a gate, nine. A product has a
  // scale in 8 bits, and only GPT-2 has biases.
  static size_t tensors(bool gpt2, bool int8, bool gated) {
    const size_t each = 1 + (int8 ? 1 : 0) + (gpt2 ? 1 : 0);
    return gpt2 ? 4 + 4 * each : 3 + (gated ? 9 : 8) * each;
  }
  Layer(const Tensor* next, bool gpt2, bool int8, bool gated) : norm(next, false, gpt2), query(next, int8, gpt2, gpt2) {
    const auto product = [&](std::optional<Pair>& pair) { pair.emplace(next, int8, gpt2, gpt2); };
    if (!gpt2) {
      product(key);
      product(value);
    }
    product(out);
    if (!gpt2) {
      cross_norm.emplace(next, false, false);
      product(cross_query);
      product(cross_out);
    }
    inner_norm.emplace(next, false, gpt2);
    product(up);
    if (gated) product(gate);
    product(down);
  }
  // width E, inner H D
  bool fits(int64_t width, int64_t inner) const {
    if (!norm.is_norm(width) || !out->is_linear(width, inner) || !inner_norm->is_norm(width)) return false;
    if (!query.is_linear(key ? inner : 3 * inner, width)) return false;
    if (key && !(key->is_linear(inner, width) && key->is_laid_out_as(query) && value->is_linear(inner, width) &&
                 value->is_laid_out_as(query) && cross_norm->is_norm(width) &&
                 cross_query->is_linear(inner, width) && cross_out->is_linear(width, inner))) {
      return false;
    }
    const int64_t wide = up->outputs();
    return up->is_linear(wide, width) && (!gate || gate->is_linear(wide, width)) && down->is_linear(width, wide);
  }

  Pair norm, query;  // of GPT-2: query, key and value side by side
  std::optional<Pair> key, value, out, cross_norm, cross_query, cross_out, inner_norm, up, gate, down;
};

// --- attention of one query -----------------------------------------------------------------------

// Keys or values [B, H, T, D] of a cache.
struct Cached {
  explicit Cached(const Tensor& tensor)
      : data(floats(tensor)), of_sample(tensor.stride(0)), of_head(tensor.stride(1)), of_row(tensor.stride(2)),
        length(tensor.size(2)) {}
  static bool fits(const Tensor& tensor, int64_t batch, int64_t heads, int64_t dim) {
    return tensor.dim() == 4 && is_here(tensor) && tensor.size(0) == batch && tensor.size(1) == heads &&
           tensor.size(2) > 0 && tensor.size(3) == dim && (dim == 1 || tensor.stride(3) == 1);
  }
  const float* row(int64_t sample, int64_t head, int64_t t) const {
    return data + sample * of_sample + head * of_head + t * of_row;
  }

  const float* data;
  int64_t of_sample, of_head, of_row, length;
};

// What is added to the scores of keys, bias [1, H, 1, T], and which keys may be seen, mask [B, 1, 1, T], or
// [1, 1, 1, 0]: all of them. Either may be null.
struct Scores {
  Scores(const std::optional<Tensor>& mask, const std::optional<Tensor>& bias)
      : mask(mask && !sees_all(*mask) ? &*mask : nullptr), bias(bias ? &*bias : nullptr) {}
  static bool sees_all(const Tensor& mask) {
    return mask.scalar_type() == ScalarType::Bool && mask.dim() == 4 && mask.size(3) == 0;
  }
  bool fits(int64_t batch, int64_t heads, int64_t keys) const {
    return (mask == nullptr ||
            (is_here(*mask, ScalarType::Bool) && mask->dim() == 4 && mask->size(0) == batch &&
             mask->size(1) == 1 && mask->size(2) == 1 && mask->size(3) == keys)) &&
           (bias == nullptr || (is_here(*bias) && bias->dim() == 4 && bias->size(0) == 1 && bias->size(1) == heads &&
                                bias->size(2) == 1 && bias->size(3) == keys));
  }
  void add(int64_t sample, int64_t head, int64_t keys, float* scores) const {
    if (bias != nullptr) {
      const float* more = floats(*bias) + head * bias->stride(1);
      for (int64_t t = 0; t < keys; ++t) scores[t] += more[t * bias->stride(3)];
    }
    if (mask != nullptr) {
      const bool* seen = data_of<bool>(*mask);
      seen += sample * mask->stride(0);
      for (int64_t t = 0; t < keys; ++t) scores[t] = seen[t * mask->stride(3)] ? scores[t] : kMaskedScore;
    }
  }

  const Tensor *mask, *bias;
};

FASTPLM_HD void add_scaled(int64_t count, float scale, const float* from, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) at(to + i) += scale * at(from + i);
  for (; i < count; ++i) to[i] += scale * from[i];
}

// scores [keys, filled up to whole vectors] = softmax(scores); false if all keys are masked.
FASTPLM_HD bool softmax(int64_t keys, float* scores) {
  const int64_t filled = round_up(keys, kWidth);
  if (std::count(scores, scores + keys, kMaskedScore) == keys) return false;
  std::fill(scores + keys, scores + filled, kMaskedScore);
  const float most = largest_of(Stored{scores}, filled);
  const float inverse = 1.0f / weights_of(Stored{scores}, filled, most, 1.0f, scores);
  for (int64_t t = 0; t < filled; t += kWidth) at(scores + t) *= inverse;
  return true;
}

// A query of each head of each sequence, [B, H, D] with rows `query_row` apart -> out [B, H, D], dense. With
// `new_keys` and `new_values` [B, H, T + 1, D] each of them is the cache's rows and then the row of `key` and
// `value`, which lie like the query.
struct Step {
  const float* query;
  int64_t query_row;
  Cached keys, values;
  Scores scores;
  float *new_keys = nullptr, *new_values = nullptr;
  const float *key = nullptr, *value = nullptr;

  // The rows t of a head: those of the cache, copied to `copy` if it is not null, and then the new one.
  static const float* row_at(const Cached& cached, int64_t sample, int64_t head, int64_t t, int64_t dim,
                             const float* fresh, float* copy) {
    const float* from = t < cached.length ? cached.row(sample, head, t) : fresh;
    if (copy == nullptr) return from;
    std::memcpy(copy + t * dim, from, sizeof(float) * dim);
    return copy + t * dim;
  }
  void run(int64_t batch, int64_t heads, int64_t dim, float scale, float* out) const {
    const int64_t keys_seen = keys.length + (new_keys != nullptr ? 1 : 0);
    const int64_t grain = grain_of(kHeadGrain, keys_seen * dim);
    for_ranges(batch * heads, 1, grain, [&](int64_t first, int64_t last) {
      const Room<Use::kHead> room(round_up(keys_seen, kWidth));
      float* weights = room.data;
      for (int64_t i = first; i < last; ++i) {
        const int64_t sample = i / heads, head = i % heads, offset = sample * query_row + head * dim;
        const int64_t copied = i * keys_seen * dim;
        const auto rows_of = [&](const Cached& cached, const float* fresh, float* copy) {
          return [=, &cached](int64_t t) {
            return row_at(cached, sample, head, t, dim, fresh == nullptr ? nullptr : fresh + offset,
                          copy == nullptr ? nullptr : copy + copied);
          };
        };
        const auto key_at = rows_of(keys, key, new_keys), value_at = rows_of(values, value, new_values);
        for (int64_t t = 0; t < keys_seen; ++t) weights[t] = scale * dot(dim, query + offset, key_at(t));
        scores.add(sample, head, keys_seen, weights);
        float* to = out + i * dim;
        std::fill(to, to + dim, 0.0f);
        const bool sees = softmax(keys_seen, weights);
        for (int64_t t = 0; t < keys_seen; ++t) {
          const float* row = value_at(t);
          if (sees && weights[t] != 0.0f) add_scaled(dim, weights[t], row, to);
        }
      }
    });
  }
};

// --- the layer ------------------------------------------------------------------------------------

void feed_forward(const Layer& layer, int64_t activation, int64_t rows, const float* normed, const float* residual,
                  int64_t width, float* mid, float* out) {
  const int64_t wide = layer.up->outputs();
  if (activation == kRelu) {
    dense(rows, normed, width, *layer.up, mid, wide, Relu{});
  } else {
    dense(rows, normed, width, *layer.up, mid, wide, Gelu{activation == kGeluTanh});
  }
  if (layer.gate) {
    float* factor = mid + rows * wide;
    dense(rows, normed, width, *layer.gate, factor, wide);
    for_ranges(rows * wide, 1, kGateGrain, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) mid[i] *= factor[i];
    });
  }
  dense(rows, mid, wide, *layer.down, out, width, AddResidual{residual, width});
}

// x [B, 1, E], the next token's state of each sequence -> [its state after the layer, keys and values [B, H, T + 1, D]
// that are those of a cache [B, H, T, D] and its own]. The mask [B, 1, 1, T + 1] says which keys it sees, none or one
// of no keys: all of them; bias [1, H, 1, T + 1] is added to its scores. `weights` are those of a GPT-2 or T5, of which
// `states` are the keys and values [B, H, S, D] of the encoder, with a mask of their own. The result is empty if
// something does not fit: then the modules themselves must run, or say what is wrong.
std::vector<Tensor> decoder_layer(const Tensor& x, const std::vector<Tensor>& weights, const Tensor& keys,
                                  const Tensor& values, const std::optional<Tensor>& mask,
                                  const std::optional<Tensor>& bias, const std::vector<Tensor>& states,
                                  const std::optional<Tensor>& states_mask, int64_t head_size, double eps,
                                  double scale, int64_t activation, bool gpt2, bool int8) {
  const size_t count = weights.size();
  const bool gated = !gpt2 && count == Layer::tensors(gpt2, int8, true);
  if (x.dim() != 3 || x.size(1) != 1 || x.numel() == 0 || !is_here(x) || !x.is_contiguous() ||
      !(gated || count == Layer::tensors(gpt2, int8, false)) || head_size < 1 || activation < kRelu ||
      activation > kGeluTanh || keys.dim() != 4 || keys.size(2) != values.size(2) ||
      states.size() != (gpt2 ? 0 : 2)) {
    return {};
  }
  const Layer layer(weights.data(), gpt2, int8, gated);
  const int64_t batch = x.size(0), width = x.size(2), heads = keys.size(1), inner = heads * head_size;
  const Scores self_scores(mask, bias), cross_scores(states_mask, std::nullopt);
  if (!layer.fits(width, inner) || !Cached::fits(keys, batch, heads, head_size) ||
      !Cached::fits(values, batch, heads, head_size) || !self_scores.fits(batch, heads, keys.size(2) + 1)) {
    return {};
  }
  for (const Tensor& each : states) {
    if (!Cached::fits(each, batch, heads, head_size) || each.size(2) != states[0].size(2) ||
        !cross_scores.fits(batch, heads, each.size(2))) {
      return {};
    }
  }
  const std::vector<int64_t> grown{batch, heads, keys.size(2) + 1, head_size};
  std::vector<Tensor> results{empty_tensor(x, {batch, 1, width}), empty_tensor(x, grown), empty_tensor(x, grown)};
  const auto to = [&](size_t i) { return results[i].template mutable_data_ptr<float>(); };
  const int64_t wide = layer.up->outputs();
  const Room<Use::kStates> room(batch * (2 * width + 4 * inner + 2 * wide) + 5 * kCacheLine);
  Scratch& memory = room.memory;
  float *normed = memory.next(batch * width), *other = memory.next(batch * width);
  float *qkv = memory.next(batch * 3 * inner), *context = memory.next(batch * inner);
  float* mid = memory.next(batch * 2 * wide);
  const float epsilon = static_cast<float>(eps), factor = static_cast<float>(scale);
  // A product's result and the residual that is added to it are never in one place.
  float *after_self = layer.cross_norm ? to(0) : other, *last = other;

  norm(batch, width, epsilon, layer.norm, floats(x), normed);
  if (layer.key) {
    dense<3>(batch, normed, width, {&layer.query, &*layer.key, &*layer.value}, {qkv, qkv + inner, qkv + 2 * inner},
             3 * inner);
  } else {
    dense(batch, normed, width, layer.query, qkv, 3 * inner);
  }
  Step{qkv, 3 * inner, Cached(keys), Cached(values), self_scores, to(1), to(2), qkv + inner, qkv + 2 * inner}.run(
      batch, heads, head_size, factor, context);
  dense(batch, context, inner, *layer.out, after_self, width, AddResidual{floats(x), width});
  if (layer.cross_norm) {
    norm(batch, width, epsilon, *layer.cross_norm, after_self, normed);
    dense(batch, normed, width, *layer.cross_query, qkv, inner);
    Step{qkv, inner, Cached(states[0]), Cached(states[1]), cross_scores}.run(batch, heads, head_size, factor, context);
    dense(batch, context, inner, *layer.cross_out, last, width, AddResidual{after_self, width});
  }
  norm(batch, width, epsilon, *layer.inner_norm, last, normed);
  feed_forward(layer, activation, batch, normed, last, width, mid, to(0));
  return results;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(decoder_layer,
                 "(Tensor x, Tensor[] weights, Tensor keys, Tensor values, Tensor? mask, Tensor? bias, "
                 "Tensor[] states, Tensor? states_mask, int head_size, float eps, float scale, int activation, "
                 "bool gpt2, bool int8) -> Tensor[]")
