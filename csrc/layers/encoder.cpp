// fastplm_C::encoder on the CPU: the layers of a BERT, for inference, in one call. Between two layers
// nothing is left to Python, and no memory is new: with one short text these cost more than the products.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <type_traits>
#include <vector>

#include "common/operators.h"
#include "common/scratch.h"
#include "common/vectors.h"

#define FASTPLM_FILE "layers/encoder.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "common/rowwise.h"
#include "layers/gelu.h"
#include "gemm/gemm.h"
#include "attention/attention_call.h"
#include "layers/layer.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// So many rows, of whole sequences, go through all layers before the next ones do: their states stay in
// the caches, and a large batch needs no more memory.
constexpr int64_t kMostRows = 512;

const int32_t* ints(const Tensor& tensor) { return data_of<int32_t>(tensor); }

// The tensors of a layer, in the order of the operator's argument.
struct Layer {
  static int64_t tensors(bool int8) { return int8 ? 22 : 16; }
  Layer(const Tensor* next, bool int8)
      : query(next, int8), key(next, int8), value(next, int8), out(next, int8),
        attention_norm(next, false), up(next, int8), down(next, int8), norm(next, false) {}
  int64_t inner() const { return up.outputs(); }
  bool fits(int64_t width) const {
    return query.is_linear(width, width) && key.is_linear(width, width) &&
           value.is_linear(width, width) && out.is_linear(width, width) &&
           up.is_linear(inner(), width) && down.is_linear(width, inner()) &&
           attention_norm.is_norm(width) && norm.is_norm(width);
  }

  Pair query, key, value, out, attention_norm, up, down, norm;
};

// What all layers of a call share.
struct Shape {
  int64_t wide() const { return std::max(inner, width); }

  int64_t width, heads, inner;  // E, H, the widest feed-forward
  float eps;
  bool tanh;
};

// Memory of the states of `rows` rows.
struct States {
  States(const Shape& shape, int64_t rows) : room(rows * (6 * shape.width + shape.wide()) + 5 * kCacheLine) {
    Scratch& memory = room.memory;
    const int64_t width = shape.width, wide = shape.wide();
    qkv = memory.next(rows * 3 * width);
    context = memory.next(rows * width);
    state = memory.next(rows * width);
    chosen = memory.next(rows * width);
    inner = memory.next(rows * wide);
  }

  const Room<Use::kStates> room;
  float *qkv, *context, *state, *chosen, *inner;
};

// out [query_rows, E]: a layer's output at the rows that `query_input` [query_rows, E] has, which are x [rows, E] or some of
// them. `starts` and `starts_q` [batch + 1] say which of both are of one sequence.
void run_layer(const Shape& shape, const Layer& layer, const States& states, int64_t batch,
               const int32_t* starts, const float* x, const int32_t* starts_q, const float* query_input,
               float* out) {
  const int64_t width = shape.width, rows = starts[batch], query_rows = starts_q[batch];
  float *query = states.qkv, *key = query + width, *value = key + width;
  const Pair &of_query = layer.query, &of_key = layer.key, &of_value = layer.value;
  if (query_input == x && of_key.is_laid_out_as(of_query) && of_value.is_laid_out_as(of_query)) {
    dense<3>(rows, x, width, {&of_query, &of_key, &of_value}, {query, key, value}, 3 * width);
  } else {
    dense(query_rows, query_input, width, of_query, query, 3 * width);
    dense(rows, x, width, of_key, key, 3 * width);
    dense(rows, x, width, of_value, value, 3 * width);
  }
  const int64_t dim = width / shape.heads;
  attend({query, key, value, 3 * width, 3 * width, states.context, width, starts_q, starts, batch,
          shape.heads, dim, 1.0f / std::sqrt(static_cast<float>(dim))});
  // The residual is read before it is overwritten: `out` may be x.
  float *attended = states.inner, *normed = states.context;
  dense(query_rows, states.context, width, layer.out, attended, width, AddResidual{query_input, width});
  norm(query_rows, width, shape.eps, layer.attention_norm, attended, normed);
  const int64_t wide = layer.inner();
  dense(query_rows, normed, width, layer.up, states.inner, wide, Gelu{shape.tanh});
  dense(query_rows, states.inner, wide, layer.down, out, width, AddResidual{normed, width});
  norm(query_rows, width, shape.eps, layer.norm, out, out);
}

// The offsets of sequences first … last, from 0 on.
Vector<int32_t> from_zero(const int32_t* starts, int64_t first, int64_t last) {
  Vector<int32_t> out(starts + first, starts + last + 1);
  for (int32_t& each : out) each -= starts[first];
  return out;
}

// Runs all layers on sequences with these offsets, kMostRows rows at a time. The last layer computes the rows with
// the indices index[starts_q[b]] to index[starts_q[b + 1]] of sequence b, or all if `index` is null.
//   begin(row, rows, states)    gives the first layer's input from a row on;
//   target(row, states)         says where the last layer's output goes from a row on;
//   end(first, last, states)    is told when it is there.
template <typename Begin, typename Target, typename End>
void run_layers(const Shape& shape, const std::vector<Layer>& layers, int64_t batch, const int32_t* starts,
                const int32_t* starts_q, const int64_t* index, const Begin& begin, const Target& target,
                const End& end) {
  const int64_t width = shape.width;
  for (int64_t first = 0, last; first < batch; first = last) {
    last = first + 1;
    while (last < batch && starts[last + 1] - starts[first] <= kMostRows) ++last;
    if (starts[first] == starts[last]) continue;
    const Vector<int32_t> keys = from_zero(starts, first, last);
    const Vector<int32_t> queries = from_zero(starts_q, first, last);
    const States states(shape, keys.back());
    const float* x = begin(starts[first], keys.back(), states);
    float* to = target(starts_q[first], states);
    for (const Layer& layer : layers) {
      const bool is_last = &layer == &layers.back();
      const float* query_input = x;
      if (is_last && index != nullptr) {
        for (int64_t i = 0; i < queries.back(); ++i) {
          const int64_t row = index[starts_q[first] + i] - starts[first];
          std::memcpy(states.chosen + i * width, x + row * width, sizeof(float) * width);
        }
        query_input = states.chosen;
      }
      run_layer(shape, layer, states, last - first, keys.data(), x,
                query_input == x ? keys.data() : queries.data(), query_input, is_last ? to : states.state);
      x = states.state;
    }
    end(starts_q[first], starts_q[last], states);
  }
}

bool are_starts(const Tensor& tensor, int64_t rows) {
  const int32_t* at = ints(tensor);
  const int64_t batch = tensor.size(0) - 1;
  return batch >= 0 && at[0] == 0 && at[batch] == rows && std::is_sorted(at, at + batch + 1);
}

// Whether each of the indices is one of a row of its own sequence, and there are not more than rows.
bool are_rows(const int64_t* index, int64_t batch, const int32_t* starts_q, const int32_t* starts) {
  for (int64_t b = 0; b < batch; ++b) {
    if (starts_q[b + 1] - starts_q[b] > starts[b + 1] - starts[b]) return false;
    for (int64_t i = starts_q[b]; i < starts_q[b + 1]; ++i) {
      if (index[i] < starts[b] || index[i] >= starts[b + 1]) return false;
    }
  }
  return true;
}

// The width of the layers with these weights; 0 if they have none.
int64_t width_of(const std::vector<Tensor>& weights) {
  const size_t bias = !weights.empty() && weights[0].scalar_type() == ScalarType::Byte ? 2 : 1;
  return weights.size() > bias && weights[bias].dim() == 1 ? weights[bias].size(0) : 0;
}

// The layers of these weights, 16 each or 22 in 8 bits; none of them if one is not fp32 or in 8 bits, or not of
// its shape.
std::vector<Layer> layers_of(const std::vector<Tensor>& weights, int64_t width, int64_t head_size) {
  std::vector<Layer> layers;
  if (head_size < 1 || width < 1 || width % head_size != 0) return layers;
  const bool int8 = weights[0].scalar_type() == ScalarType::Byte;
  if (weights.size() % Layer::tensors(int8) != 0) return layers;
  for (size_t i = 0; i < weights.size(); i += Layer::tensors(int8)) {
    layers.emplace_back(&weights[i], int8);
    if (!layers.back().fits(width)) return {};
  }
  return layers;
}

// Whether `encoder` can take these weights.
bool encoder_fits(const std::vector<Tensor>& weights, int64_t head_size) {
  return !layers_of(weights, width_of(weights), head_size).empty();
}

// input [N, E] of sequences cu_seqlens int32 [B + 1]; 16 or 22 weights a layer -> [N, E], or of the last layer
// the rows with the indices `rows` int64 [P], cu_rows[b] to cu_rows[b + 1] of sequence b -> [P, E]. The
// result is None if a weight does not fit (any more), as after model.half(), or the input is not fp32.
std::optional<Tensor> encoder(const Tensor& input, const std::vector<Tensor>& weights,
                              const Tensor& cu_seqlens, const std::optional<Tensor>& rows,
                              const std::optional<Tensor>& cu_rows, int64_t head_size, double eps,
                              bool tanh) {
  Shapes shapes;
  shapes.any(input, "input [N, E]");
  shapes.dense(cu_seqlens, "cu_seqlens [B + 1]");
  shapes.dense(rows, "rows [P]");
  shapes.dense(cu_rows, "cu_rows [B + 1]");
  require(rows.has_value() == cu_rows.has_value(), "rows comes with cu_rows");
  const int64_t width = shapes['E'], batch = shapes['B'];
  if (weights.empty() || width != width_of(weights)) return std::nullopt;
  const std::vector<Layer> layers = layers_of(weights, width, head_size);
  if (layers.empty() || !is_here(input) || !input.is_contiguous()) return std::nullopt;
  Shape shape{width, width / head_size, 0, static_cast<float>(eps), tanh};
  for (const Layer& layer : layers) shape.inner = std::max(shape.inner, layer.inner());
  const Tensor& cu_query_rows = rows ? *cu_rows : cu_seqlens;
  require(are_starts(cu_seqlens, input.size(0)) && are_starts(cu_query_rows, rows ? rows->size(0) : input.size(0)),
          "cu_seqlens do not fit the rows");
  const int32_t *starts = ints(cu_seqlens), *starts_q = ints(cu_query_rows);
  const auto* index = rows ? data_of<int64_t>(*rows) : nullptr;
  require(!rows || are_rows(index, batch, starts_q, starts), "rows of other sequences");
  Tensor out = empty_tensor(input, {rows ? rows->size(0) : input.size(0), width});
  const auto begin = [&](int64_t row, int64_t, const States&) { return floats(input) + row * width; };
  const auto target = [&](int64_t row, const States&) { return out.mutable_data_ptr<float>() + row * width; };
  const auto end = [](int64_t, int64_t, const States&) {};
  run_layers(shape, layers, batch, starts, starts_q, index, begin, target, end);
  return out;
}

// --- from ids on ----------------------------------------------------------------------------------

// Integers, or bools of a mask, of a matrix.
struct Integers {
  static bool can_read(const Tensor& tensor, bool is_mask = false) {
    const ScalarType type = tensor.scalar_type();
    return tensor.is_cpu() && tensor.is_contiguous() && tensor.dim() == 2 && tensor.numel() > 0 &&
           tensor.const_data_ptr() != nullptr &&
           (type == ScalarType::Long || type == ScalarType::Int || (is_mask && type == ScalarType::Bool));
  }
  explicit Integers(const Tensor& tensor)
      : data(tensor.const_data_ptr()), type(tensor.scalar_type()), count(tensor.numel()) {}
  int64_t operator[](int64_t i) const {
    if (type == ScalarType::Long) return static_cast<const int64_t*>(data)[i];
    if (type == ScalarType::Int) return static_cast<const int32_t*>(data)[i];
    return static_cast<const bool*>(data)[i];
  }

  const void* data;
  ScalarType type;
  int64_t count;
};

// A token that is computed: where it is in [B, T], and its rows in the tables.
struct Token {
  int64_t flat, word, position, type;
};

// The tables [rows, width], the norm of their sum, and the ids that are taken where none are given: the
// positions [1, T], and by positions the types.
struct Embeddings {
  static constexpr size_t kTensors = 7;
  explicit Embeddings(const Tensor* next)
      : word(*next++), position(*next++), type(*next++), norm(next, false), position_ids(*next++),
        type_ids(*next++) {}
  int64_t width() const { return word.dim() == 2 ? word.size(1) : 0; }
  bool is_table(const Tensor& tensor) const {
    return is_here(tensor) && tensor.dim() == 2 && tensor.is_contiguous() && tensor.size(1) == width();
  }
  bool fits() const {
    return is_table(word) && is_table(position) && is_table(type) && norm.is_norm(width()) &&
           Integers::can_read(position_ids) && position_ids.size(0) == 1 &&
           Integers::can_read(type_ids) && type_ids.size(0) == 1;
  }

  const Tensor &word, &position, &type;
  Pair norm;
  const Tensor &position_ids, &type_ids;
};

// The tokens of a batch whose mask is not 0, and the offsets of sequences [B + 1] among them. They are empty
// if an index is none of a table's, or there is no token, or `reads_first` and the first place of a sequence has none.
struct Tokens {
  // Positions count the ids that are not padding_id from padding_id + 1 on, as in RoBERTa, if it is not negative.
  Tokens(const Embeddings& tables, const Tensor& input_ids, const std::optional<Tensor>& mask,
         const std::optional<Tensor>& types, int64_t padding_id, bool reads_first)
      : starts{0} {
    const int64_t batch = input_ids.size(0), seqlen = input_ids.size(1);
    const Integers ids(input_ids), positions(tables.position_ids), type_ids(tables.type_ids);
    const Integers seen(mask ? *mask : input_ids), given_types(types ? *types : input_ids);
    const int64_t word_rows = tables.word.size(0), position_rows = tables.position.size(0), type_rows = tables.type.size(0);
    const bool counts = padding_id >= 0;
    if (!counts && seqlen > std::min(positions.count, position_rows)) return;
    const auto is_index = [](int64_t index, int64_t rows) { return index >= 0 && index < rows; };
    Vector<Token> found;
    found.reserve(batch * seqlen);
    for (int64_t b = 0, flat = 0; b < batch; ++b) {
      for (int64_t t = 0, counted = padding_id; t < seqlen; ++t, ++flat) {
        Token token{flat, ids[flat], 0, 0};
        if (!is_index(token.word, word_rows)) return;
        token.position = !counts ? positions[t] : token.word == padding_id ? padding_id : ++counted;
        if (!is_index(token.position, std::min(position_rows, types ? position_rows : type_ids.count))) return;
        if (mask && seen[flat] == 0) {
          if (reads_first && t == 0) return;
          continue;
        }
        token.type = types ? given_types[flat] : type_ids[token.position];
        if (!is_index(token.type, type_rows)) return;
        found.push_back(token);
      }
      starts.push_back(static_cast<int32_t>(found.size()));
    }
    all = std::move(found);
  }

  Vector<Token> all;
  Vector<int32_t> starts;
};

// out [count, width]: the normed sums of the tokens' rows.
void embed(const Embeddings& tables, float eps, const Token* tokens, int64_t count, float* out) {
  const int64_t width = tables.width();
  const float *words = floats(tables.word), *types = floats(tables.type), *positions = floats(tables.position);
  const float *weight = floats(tables.norm.weight), *bias = floats(*tables.norm.bias);
  for_ranges(count, 1, kNormRows, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const float* word = words + tokens[i].word * width;
      const float* type = types + tokens[i].type * width;
      const float* position = positions + tokens[i].position * width;
      float* to = out + i * width;
      for (int64_t j = 0; j < width; ++j) to[j] = word[j] + type[j] + position[j];
      norm_row(width, eps, true, weight, bias, to, to);
    }
  });
}

// out [count, width] = the rows of tokens first … last - 1, each where it is in [B, T]; the rows before each, and those
// after the last one of all, are 0.
void put(const Vector<Token>& tokens, int64_t first, int64_t last, int64_t count, int64_t width,
         const float* rows, float* out) {
  for_ranges(last - first, 1, kNormRows, [&](int64_t begin, int64_t end) {
    for (int64_t i = first + begin; i < first + end; ++i) {
      const int64_t flat = tokens[i].flat, before = i > 0 ? tokens[i - 1].flat + 1 : 0;
      std::fill(out + before * width, out + flat * width, 0.0f);
      std::memcpy(out + flat * width, rows + (i - first) * width, sizeof(float) * width);
      if (&tokens[i] == &tokens.back()) std::fill(out + (flat + 1) * width, out + count * width, 0.0f);
    }
  });
}

struct Tanh {
  FASTPLM_HD void operator()(int64_t, int64_t, int64_t count, float* values) const {
    for (int64_t i = 0; i < count; ++i) values[i] = std::tanh(values[i]);
  }
};

// A linear layer in a list of tensors, which is empty if there is none.
std::optional<Pair> pair_of(const std::vector<Tensor>& tensors) {
  if (tensors.empty()) return std::nullopt;
  const Tensor* next = tensors.data();
  return Pair(next, tensors.size() == 3);
}

// The backbone of a BERT, RoBERTa or ELECTRA: ids [B, T], mask and types likewise -> hidden states [B, T, E], with
// zeros where the mask is 0, or [B, 1, E] of the first tokens, if `first_only`; and if there is a pooler [B, E].
// `embeddings` are those of the struct. A projection and a pooler are a weight and a bias, with the scale between
// them in 8 bits. The result is empty if something does not fit: then the modules themselves must run, or say what
// is wrong.
std::vector<Tensor> backbone(const Tensor& input_ids, const std::optional<Tensor>& mask,
                             const std::optional<Tensor>& types, const std::vector<Tensor>& embeddings,
                             const std::vector<Tensor>& projection, const std::vector<Tensor>& weights,
                             const std::vector<Tensor>& pooler, int64_t padding_id, int64_t head_size,
                             double embeddings_eps, double eps, bool tanh, bool first_only) {
  const auto reads = [&](const std::optional<Tensor>& given, bool is_mask) {
    return !given || (Integers::can_read(*given, is_mask) && given->size(0) == input_ids.size(0) &&
                      given->size(1) == input_ids.size(1));
  };
  const auto is_pair = [](const std::vector<Tensor>& tensors) {
    return tensors.empty() || tensors.size() == 2 || tensors.size() == 3;
  };
  if (input_ids.dim() != 2 || !reads(input_ids, false) || !reads(mask, true) || !reads(types, false) ||
      weights.empty() || embeddings.size() != Embeddings::kTensors || !is_pair(projection) || !is_pair(pooler)) {
    return {};
  }
  const int64_t width = width_of(weights), batch = input_ids.size(0), all = input_ids.numel();
  const std::vector<Layer> layers = layers_of(weights, width, head_size);
  const Embeddings tables(embeddings.data());
  const std::optional<Pair> project = pair_of(projection), pool = pair_of(pooler);
  if (layers.empty() || !tables.fits() || (pool && !pool->is_linear(width, width)) ||
      (project ? !project->is_linear(width, tables.width()) : tables.width() != width)) {
    return {};
  }
  const Tokens tokens(tables, input_ids, mask, types, padding_id, first_only || pool.has_value());
  const auto count = static_cast<int64_t>(tokens.all.size());
  if (count == 0) return {};
  Shape shape{width, width / head_size, tables.width(), static_cast<float>(eps), tanh};
  for (const Layer& layer : layers) shape.inner = std::max(shape.inner, layer.inner());
  const int64_t shown = first_only ? 1 : input_ids.size(1);  // rows of a sequence in the result
  std::vector<Tensor> results{empty_tensor(input_ids, {batch, shown, width}, ScalarType::Float)};
  float* out = results[0].mutable_data_ptr<float>();
  const auto begin = [&](int64_t row, int64_t rows, const States& states) -> const float* {
    float* embedded = project ? states.inner : states.state;
    embed(tables, static_cast<float>(embeddings_eps), tokens.all.data() + row, rows, embedded);
    if (project) dense(rows, embedded, tables.width(), *project, states.state, width);
    return states.state;
  };
  const bool in_place = first_only || count == all;
  const auto target = [&](int64_t row, const States& states) { return in_place ? out + row * width : states.state; };
  const auto end = [&](int64_t first, int64_t last, const States& states) {
    if (!in_place) put(tokens.all, first, last, all, width, states.state, out);
  };
  const int32_t* starts = tokens.starts.data();
  if (first_only) {
    const Vector<int64_t> index(starts, starts + batch);
    Vector<int32_t> each(batch + 1);
    std::iota(each.begin(), each.end(), 0);
    run_layers(shape, layers, batch, starts, each.data(), index.data(), begin, target, end);
  } else {
    run_layers(shape, layers, batch, starts, starts, nullptr, begin, target, end);
  }
  if (pool) {
    Vector<float> first(batch * width);
    for (int64_t b = 0; b < batch; ++b) {
      std::memcpy(&first[b * width], out + b * shown * width, sizeof(float) * width);
    }
    results.push_back(empty_tensor(results[0], {batch, width}));
    dense(batch, first.data(), width, *pool, results[1].mutable_data_ptr<float>(), width, Tanh{});
  }
  return results;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(encoder,
                 "(Tensor input, Tensor[] weights, Tensor cu_seqlens, Tensor? rows, Tensor? cu_rows, "
                 "int head_size, float eps, bool tanh) -> Tensor?")
FASTPLM_OPERATOR(backbone,
                 "(Tensor input_ids, Tensor? mask, Tensor? types, Tensor[] embeddings, Tensor[] projection, "
                 "Tensor[] weights, Tensor[] pooler, int padding_id, int head_size, float embeddings_eps, "
                 "float eps, bool tanh, bool first_only) -> Tensor[]")
FASTPLM_OPERATOR(encoder_fits, "(Tensor[] weights, int head_size) -> bool")
