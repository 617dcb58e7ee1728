// Products of a linear layer in 8 bits by linear_int8.h, on PyTorch's threads. Included once a level, after
// it and linear_product.h.

namespace fastplm::FASTPLM_LEVEL {

constexpr int64_t kInt8Rows = 256;   // rows that a thread computes at a time
constexpr int64_t kInt8Quantized = 32768;  // numbers that are worth a thread
constexpr int64_t kInt8Most = 2048;  // rows that are quantized before they are multiplied

template <typename kTile, typename T, typename Finish>
void product_int8(const T* a, int64_t rows, int64_t depth, const Int8Factor<T>* factors, int64_t count,
                  int64_t columns, int64_t out_row, const Finish& finish) {
  using Q = typename kTile::Q;
  const int64_t steps = ceil_div(depth, kStepDepth), most = std::min(rows, kInt8Most);
  // One more cache line, so that rows do not compete for the same places in the cache.
  const int64_t stride = round_up(steps * kStepDepth, 64) + 64;
  const int64_t floats = ceil_div(most * stride * int64_t{sizeof(Q)}, int64_t{sizeof(float)});
  const Room<Use::kProduct> room(floats + 2 * most);
  const Quanta<Q> quanta{reinterpret_cast<Q*>(room.data), stride, room.data + floats,
                         reinterpret_cast<int32_t*>(room.data + floats + most)};
  for (int64_t start = 0; start < rows; start += most) {
    const int64_t given = std::min(most, rows - start);
    for_ranges(given, 1, ceil_div(kInt8Quantized, depth), [&](int64_t first, int64_t last) {
      Vector<float> wide(std::is_same_v<T, float> ? 0 : depth);
      for (int64_t m = first; m < last; ++m) {
        quantize_row(depth, as_floats(depth, depth, a + (start + m) * depth, wide.data()), m, quanta);
      }
    });
    const int64_t groups = ceil_div(columns, kInt8Group), blocks = ceil_div(given, kInt8Rows);
    in_parallel(count * blocks * groups, [&](int64_t number) {
      Int8Factor<T> factor = factors[number / (blocks * groups)];
      factor.out += start * out_row;
      const int64_t first = number / groups % blocks * kInt8Rows;
      int8_block<kTile>(quanta, steps, factor, columns, out_row, first, std::min(first + kInt8Rows, given),
                        number % groups * kInt8Group, finish);
    });
  }
}

#if FASTPLM_WIDTH >= 8
inline bool has_vnni() {
#if FASTPLM_WIDTH == 16
  static const bool has = __builtin_cpu_supports("avx512vnni") && vnni_is_allowed();
#else
  static const bool has = __builtin_cpu_supports("avxvnni") && vnni_is_allowed();
#endif
  return has;
}
#endif

// out [M, N] = A B + bias for each of `count` factors of one shape; then finish(row, column, count, values).
// A [M, K] is dense, and no size is 0.
template <typename T, typename Finish = Nothing>
void multiply_int8(const T* a, int64_t rows, int64_t depth, const Int8Factor<T>* factors, int64_t count,
                   int64_t columns, int64_t out_row, const Finish& finish = {}) {
#if FASTPLM_WIDTH >= 8
  if (has_vnni()) {
    return product_int8<VnniTile>(a, rows, depth, factors, count, columns, out_row, finish);
  }
  product_int8<WideTile>(a, rows, depth, factors, count, columns, out_row, finish);
#else
  product_int8<PlainTile>(a, rows, depth, factors, count, columns, out_row, finish);
#endif
}

}  // namespace fastplm::FASTPLM_LEVEL
