// fastplm_C::rotary on the CPU: query and key rotated by their positions, or back.
#include <algorithm>
#include <initializer_list>

#include "common/operators.h"

#define FASTPLM_FILE "layers/rotary.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "layers/rotary.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// A thread should have at least so many elements.
constexpr int64_t kRotaryGrain = 1 << 13;

// Half a row of cosines or sines as floats, negated or not.
void angles(const Tensor& rows, int64_t b, int64_t t, int64_t half, bool negated, float* to) {
  const int64_t row = (rows.size(0) > 1 ? b * rows.stride(0) : 0) + t * rows.stride(1);
  with_floating_type(rows, [&](auto type) { widen(half, data_of<decltype(type)>(rows) + row, to); });
  if (negated) std::transform(to, to + half, to, [](float value) { return -value; });
}

template <typename T>
void rotate_heads(const Tensor& from, const Tensor& to, int64_t b, int64_t t, const float* cos, const float* sin,
                  float* room) {
  const int64_t heads = from.size(1), half = from.size(3) / 2;
  if (heads == 0) return;
  const T* in = data_of<T>(from) + b * from.stride(0) + t * from.stride(2);
  T* out = data_to<T>(to) + b * to.stride(0) + t * to.stride(2);
  for (int64_t h = 0; h < heads; ++h) {
    rotate_head(half, cos, sin, in + h * from.stride(1), out + h * to.stride(1), room);
  }
}

// The outputs may be the inputs.
void rotary(const Tensor& query, const Tensor& key, const Tensor& cos, const Tensor& sin, bool inverse,
            Tensor& out_query, Tensor& out_key) {
  Shapes shapes;
  shapes.rows(query, "query [B, H, T, D]");
  shapes.rows(key, "key [B, G, T, D]");
  shapes.rows(cos, "cos [C, T, D]");
  shapes.rows(sin, "sin [C, T, D]");
  shapes.rows(out_query, "out_query [B, H, T, D]");
  shapes.rows(out_key, "out_key [B, G, T, D]");
  require(shapes['D'] % 2 == 0, "D of query must be even");
  require(shapes['C'] == 1 || shapes['C'] == shapes['B'], "C of cos must be 1 or B");
  check_same_type(query, key, out_query, out_key);
  const int64_t length = shapes['T'], half = shapes['D'] / 2;
  const int64_t elements = (shapes['H'] + shapes['G']) * shapes['D'];
  if (elements == 0) return;
  with_floating_type(query, [&](auto type) {
    using T = decltype(type);
    for_ranges(shapes['B'] * length, 1, grain_of(kRotaryGrain, elements), [&](int64_t first, int64_t last) {
      Vector<float> room(4 * half);
      float *c = room.data(), *s = c + half;
      for (int64_t i = first; i < last; ++i) {
        const int64_t b = i / length, t = i % length;
        angles(cos, b, t, half, false, c);
        angles(sin, b, t, half, inverse, s);
        rotate_heads<T>(query, out_query, b, t, c, s, s + half);
        rotate_heads<T>(key, out_key, b, t, c, s, s + half);
      }
    });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(rotary,
                 "(Tensor query, Tensor key, Tensor cos, Tensor sin, bool inverse, Tensor(a!) out_query, "
                 "Tensor(b!) out_key) -> ()")
