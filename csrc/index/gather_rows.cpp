// fastplm_C::gather_rows and its backward on the CPU: rows are copied whole, by PyTorch's threads.
//
//   N rows of E elements        P slots, each with the position of a row, or with none
#include <algorithm>
#include <cstring>
#include <vector>

#include "common/operators.h"

#define FASTPLM_FILE "index/gather_rows.cpp"
#include "common/each_level.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

constexpr int64_t kBytesWorthAThread = 1 << 15;

Tensor gather_rows(const Tensor& input, const Tensor& positions) {
  Shapes shapes;
  shapes.rows(input, "input [N, E]");
  shapes.dense(positions, "positions [P]");
  const int64_t rows = shapes['N'], slots = shapes['P'];
  const int64_t row_bytes = shapes['E'] * static_cast<int64_t>(input.element_size());
  const int64_t stride_bytes = input.stride(0) * static_cast<int64_t>(input.element_size());
  Tensor out = empty_tensor(input, {slots, input.size(1)});
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const auto* position = positions.const_data_ptr<int64_t>();
  // If a position is outside, ops.gather_rows says what is wrong.
  const bool inside = std::all_of(position, position + slots, [rows](int64_t row) {
    return row >= -1 && row < rows;
  });
  require(inside, "a position is outside of the rows");
  parallel_for(slots, grain_of(kBytesWorthAThread, row_bytes), [&](int64_t first, int64_t last) {
    for (int64_t slot = first; slot < last; ++slot) {
      const int64_t row = position[slot];
      if (row >= 0) {
        std::memcpy(to + slot * row_bytes, from + row * stride_bytes, row_bytes);
      } else {
        std::memset(to + slot * row_bytes, 0, row_bytes);
      }
    }
  });
  return out;
}

// The slots of each row side by side, ascending: row n has slots[begin[n]] … slots[begin[n + 1] - 1].
struct SlotsByRow {
  SlotsByRow(const int64_t* position, int64_t count, int64_t rows) : begin(rows + 1), slots(count) {
    const auto in_range = [&](int64_t row) { return row >= 0 && row < rows; };
    for (int64_t slot = 0; slot < count; ++slot) {
      if (in_range(position[slot])) ++begin[position[slot] + 1];
    }
    for (int64_t row = 0; row < rows; ++row) begin[row + 1] += begin[row];
    Vector<int64_t> next(begin.begin(), begin.end() - 1);
    for (int64_t slot = 0; slot < count; ++slot) {
      if (in_range(position[slot])) slots[next[position[slot]]++] = slot;
    }
  }
  Vector<int64_t> begin;
  Vector<int64_t> slots;
};

// grad_input[n] = the sum of its slots' gradients, in Sum and ascending order, rounded once.
template <typename T, typename Sum>
void sum_slots(const Tensor& grad_out, const Tensor& positions, Tensor& grad_input) {
  const int64_t rows = grad_input.size(0);
  const int64_t width = grad_input.size(1);
  const int64_t stride = grad_out.stride(0);
  const auto* from = data_of<T>(grad_out);
  auto* to = data_to<T>(grad_input);
  const SlotsByRow by_row(positions.const_data_ptr<int64_t>(), positions.size(0), rows);
  const int64_t row_bytes = width * static_cast<int64_t>(sizeof(T));
  parallel_for(rows, grain_of(kBytesWorthAThread, row_bytes), [&](int64_t first, int64_t last) {
    const Buffer<Sum> room(width);
    Sum* sum = room.get();
    for (int64_t row = first; row < last; ++row) {
      const int64_t begin = by_row.begin[row];
      const int64_t end = by_row.begin[row + 1];
      T* out = to + row * width;
      if (end == begin) {
        std::memset(out, 0, row_bytes);
      } else if (end == begin + 1) {
        std::memcpy(out, from + by_row.slots[begin] * stride, row_bytes);
      } else {
        std::fill(sum, sum + width, Sum(0));
        for (int64_t i = begin; i < end; ++i) {
          const T* slot = from + by_row.slots[i] * stride;
          for (int64_t e = 0; e < width; ++e) sum[e] += static_cast<Sum>(slot[e]);
        }
        for (int64_t e = 0; e < width; ++e) out[e] = static_cast<T>(sum[e]);
      }
    }
  });
}

Tensor gather_rows_backward(const Tensor& grad_out, const Tensor& positions, int64_t rows) {
  Shapes shapes;
  shapes.rows(grad_out, "grad_out [P, E]");
  shapes.dense(positions, "positions [P]");
  require(rows >= 0, "rows must be 0 or more");
  Tensor grad_input = empty_tensor(grad_out, {rows, grad_out.size(1)});
  if (grad_out.scalar_type() == ScalarType::Double) {
    sum_slots<double, double>(grad_out, positions, grad_input);
  } else {
    with_floating_type(grad_out, [&](auto type) {
      sum_slots<decltype(type), float>(grad_out, positions, grad_input);
    });
  }
  return grad_input;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(gather_rows, "(Tensor input, Tensor positions) -> Tensor")
FASTPLM_OPERATOR(gather_rows_backward, "(Tensor grad_out, Tensor positions, int rows) -> Tensor")
