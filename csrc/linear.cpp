// fastplm_C::product and linear on the CPU. One thread computes a whole block of the result, always in
// the same order, so results do not depend on the number of threads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "operators.h"

#define FASTPLM_FILE "linear.cpp"
#include "each_level.h"
#include "lanes.h"
#include "linear.h"
#include "linear_few_rows.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

// Calls function(i) for each i below count, each on a thread that is free.
template <typename Function>
void in_parallel(int64_t count, const Function& function) {
  std::atomic<int64_t> next(0);
  torch::stable::parallel_for(0, count, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) function(i);
  });
}

// A matrix of any type and strides.
struct Operand {
  explicit Operand(const Tensor& tensor)
      : data(tensor.const_data_ptr()),
        rows(tensor.size(0)),
        columns(tensor.size(1)),
        row(tensor.stride(0)),
        col(tensor.stride(1)) {}
  Operand(const void* data, int64_t rows, int64_t columns, int64_t row, int64_t col)
      : data(data), rows(rows), columns(columns), row(row), col(col) {}
  Operand transposed() const { return {data, columns, rows, col, row}; }
  Matrix floats() const { return {static_cast<const float*>(data), row, col}; }

  const void* data;
  int64_t rows, columns, row, col;
};

void product_of_many(const Operand& a, const Operand& b, const std::optional<Tensor>& bias,
                     Tensor& out) {
  const Cut cut(a.rows, b.columns, a.columns, torch::stable::get_num_threads());
  const Dense<float> first(bias);
  const Matrix left = a.floats(), right = b.floats();
  Tensor buffer = empty_tensor(out, {cut.packed_size()});
  float* packed = buffer.mutable_data_ptr<float>();
  float* c = out.mutable_data_ptr<float>();
  with_height(cut, [&](auto rows) {
    in_parallel(ceil_div(cut.tiles, cut.group_tiles), [&](int64_t group) {
      const int64_t tile = group * cut.group_tiles;
      pack_tiles<rows.value>(cut, left, tile, std::min(tile + cut.group_tiles, cut.tiles), packed);
    });
    in_parallel(cut.blocks_down * cut.blocks_across, [&](int64_t block) {
      block_product<rows.value>(cut, packed, right, first.data(), c, b.columns, block);
    });
  });
}

// --- few rows -------------------------------------------------------------------------------------

// From this many rows on it is faster to pack fp32. Without AVX-512 an inner tile is smaller, and
// adds up lanes more often; Zen 4 executes AVX-512 in halves. ops/linear.py knows where MKL is
// faster than both.
constexpr int64_t kManyRows = 49;

int64_t many_inner_rows() {
  if (kRegisters < 32) return 29;
#if FASTPLM_HAS_LEVELS
  static const bool zen4 = __builtin_cpu_is("amdfam19h");
  if (zen4) return 33;
#endif
  return kManyRows;
}

// A function for products of few rows, and the rows of A that it takes at a time.
template <typename T>
struct Method {
  int64_t tile;
  void (*run)(const FewRows& a, const T* b, int64_t b_stride, int64_t columns, float* c);
};

template <typename T>
void inner_product(const FewRows& a, const T* b, int64_t b_stride, int64_t columns, float* c) {
  inner(a, b, b_stride, columns, c);
}

template <int kRows, typename T>
void outer_product(const FewRows& a, const T* b, int64_t b_stride, int64_t columns, float* c) {
  outer<kRows>(a, b, b_stride, columns, c);
}

template <typename T>
Method<T> method_of(int64_t rows, bool by_rows) {
  if (!by_rows) return {kInnerRows, inner_product<T>};
  if (rows > 4) return {kMostOuterRows, outer_product<kMostOuterRows, T>};
  return {4, outer_product<4, T>};
}

// to [filled, width] = from [rows, depth], filled up with zeros.
template <typename T>
void load_rows(const T* from, int64_t row, int64_t col, int64_t rows, int64_t depth, float* to,
               int64_t filled, int64_t width) {
  for (int64_t m = 0; m < filled; ++m, to += width) {
    const int64_t given = m < rows ? depth : 0;
    const T* line = from + m * row;
    if (col == 1) {
      for (int64_t k = 0; k < given; ++k) to[k] = static_cast<float>(line[k]);
    } else {
      for (int64_t k = 0; k < given; ++k) to[k] = static_cast<float>(line[k * col]);
    }
    std::fill(to + given, to + width, 0.0f);
  }
}

template <typename T>
void store_rows(int64_t rows, int64_t columns, const float* from, const T* bias, T* to,
                int64_t to_row) {
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t n = 0; n < columns; ++n) {
      const float start = bias == nullptr ? 0.0f : static_cast<float>(bias[n]);
      to[m * to_row + n] = static_cast<T>(from[m * kFewColumns + n] + start);
    }
  }
}

struct alignas(64) Line {
  float each[kCacheLine];
};

template <typename T>
void product_of_few(const Operand& a, const Operand& b, const std::optional<Tensor>& bias,
                    Tensor& out) {
  const int64_t depth = a.columns, columns = b.columns;
  const bool by_rows = b.col == 1;
  const int64_t b_stride = by_rows ? b.row : b.col;
  const Method<T> method = method_of<T>(a.rows, by_rows);
  // One more cache line, so that rows do not compete for the same places in the cache.
  const int64_t stride = round_up(depth, kCacheLine) + kCacheLine;
  const int64_t share = ceil_div(columns, torch::stable::get_num_threads());
  const int64_t part = std::min(round_up(share, kFewUnit), kFewColumns);
  const Dense<T> first(bias);
  const T* left = static_cast<const T*>(a.data);
  const T* right = static_cast<const T*>(b.data);
  T* to = static_cast<T*>(out.mutable_data_ptr());
  const int64_t room = round_up(std::min(kFewRows, a.rows), method.tile);
  const std::unique_ptr<Line[]> buffer(new Line[room * stride / kCacheLine]);
  float* packed = buffer[0].each;
  for (int64_t row = 0; row < a.rows; row += kFewRows) {
    const int64_t count = std::min(kFewRows, a.rows - row);
    const FewRows rows{packed, round_up(count, method.tile), depth, stride};
    load_rows(left + row * a.row, a.row, a.col, count, depth, packed, rows.rows, stride);
    in_parallel(ceil_div(columns, part), [&](int64_t number) {
      const int64_t n = number * part, width = std::min(part, columns - n);
      alignas(64) float c[kFewRows * kFewColumns];
      method.run(rows, right + n * (by_rows ? 1 : b_stride), b_stride, width, c);
      store_rows(count, width, c, bias ? first.data() + n : nullptr, to + row * columns + n, columns);
    });
  }
}

// --- operators ------------------------------------------------------------------------------------

void multiply(const Operand& a, const Operand& b, const std::optional<Tensor>& bias, Tensor& out) {
  with_floating_type(out, [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<T, float>) {
      const bool by_rows = b.col == 1;
      if (a.rows >= (by_rows ? kManyRows : many_inner_rows())) {
        return product_of_many(a, b, bias, out);
      }
    }
    product_of_few<T>(a, b, bias, out);
  });
}

// a [M, K] and b [K, N] are not empty, and each has a stride of 1; bias [N]; out [M, N], dense.
void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Tensor& out) {
  multiply(Operand(a), Operand(b), bias, out);
}

// input [..., K] of at most 8 dimensions, weight [N, K] with a stride of 1, neither of them empty,
// and bias [N] -> [..., N]. The forward of a layer is one call: when a decoder generates tokens,
// the calls of many layers with few rows cost as much as their products.
Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor dense = torch::stable::contiguous(input);
  const Operand b = Operand(weight).transposed();
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = b.columns;
  Tensor out = empty_tensor(input, sizes);
  multiply({dense.const_data_ptr(), input.numel() / b.rows, b.rows, b.rows, 1}, b, bias, out);
  return out;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(product, "(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out) -> ()")
FASTPLM_OPERATOR(linear, "(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
