// fastplm_C::dropout and dropout_rows on the CPU, forward and backward alike.
#include <algorithm>
#include <cstring>

#include "common/operators.h"
#include "common/philox.h"

#define FASTPLM_FILE "layers/dropout.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "layers/dropout.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

constexpr int64_t kBlocksPerThread = 64;

// threshold of 65536
void dropout(const Tensor& input, const Tensor& seed, int64_t threshold, double scale,
             Tensor& out) {
  Shapes shapes;
  shapes.dense(input, "input [...]");
  shapes.any(seed, "seed []");
  shapes.dense(out, "out [...]");
  const auto key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(input);
    T* to = data_to<T>(out);
    for_ranges(input.numel(), kDropBlock, kBlocksPerThread, [&](int64_t first, int64_t last) {
      drop_elements(key, static_cast<int32_t>(threshold), static_cast<float>(scale), first,
                    last - first, from + first, to + first);
    });
  });
}

// The same for rows, with the sample and the position of each.
void dropout_rows(const Tensor& input, const Tensor& seed, int64_t threshold, double scale,
                  const Tensor& sample_index, const Tensor& position, Tensor& out) {
  Shapes shapes;
  shapes.dense(input, "input [..., E]");
  shapes.any(seed, "seed []");
  shapes.dense(sample_index, "sample_index [N]");
  shapes.dense(position, "position [N]");
  shapes.dense(out, "out [..., E]");
  const auto key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  const int64_t rows = shapes['N'], width = shapes['E'];
  require(rows * width == input.numel(), "sample_index [N] needs a number for each row of input [..., E]");
  if (width == 0) return;
  const int64_t* samples = sample_index.const_data_ptr<int64_t>();
  const int64_t* positions = position.const_data_ptr<int64_t>();
  const int64_t grain = grain_of(kBlocksPerThread, ceil_div(width, kDropBlock));
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = data_of<T>(input);
    T* to = data_to<T>(out);
    for_ranges(rows, 1, grain, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        drop_row(key, static_cast<int32_t>(threshold), static_cast<float>(scale), samples[row],
                 positions[row], width, from + row * width, to + row * width);
      }
    });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(dropout,
                 "(Tensor input, Tensor seed, int threshold, float scale, Tensor(a!) out) -> ()")
FASTPLM_OPERATOR(dropout_rows,
                 "(Tensor input, Tensor seed, int threshold, float scale, Tensor sample_index, "
                 "Tensor position, Tensor(a!) out) -> ()")
