// fastplm_C::softmax_statistics on the CPU, for the loss over a vocabulary.
#include <algorithm>
#include <limits>

#include "common/operators.h"

#define FASTPLM_FILE "layers/linear_cross_entropy.cpp"
#include "common/each_level.h"
#include "common/lanes.h"
#include "common/rowwise.h"
#include "layers/linear_cross_entropy.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

constexpr int64_t kLogitsWorthAThread = 1 << 15;

// A temperature of 0 asks for no s. Returns [4, rows]: m, l, d
// and s of linear_cross_entropy.h.
Tensor softmax_statistics(Tensor& logits, bool finite, bool write, double temperature) {
  Shapes shapes;
  shapes.rows(logits, "logits [N, V]");
  const int64_t rows = shapes['N'], columns = shapes['V'];
  require(columns > 0, "V of logits must not be 0");
  const int64_t stride = logits.stride(0);
  Tensor out = empty_tensor(logits, {4, rows});
  float* statistics = out.mutable_data_ptr<float>();
  float* z = logits.mutable_data_ptr<float>();
  const bool sampled = temperature > 0.0;
  const float cooled = sampled ? static_cast<float>(temperature) : 1.0f;
  const int64_t grain = ceil_div(kLogitsWorthAThread, columns);
  parallel_for(rows, grain, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const RowStatistics of =
          softmax_row(z + row * stride, columns, finite, write, sampled, cooled);
      const float each[4] = {of.m, of.l, of.d, of.s};
      for (int64_t i = 0; i < 4; ++i) statistics[i * rows + row] = each[i];
    }
  });
  return out;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(softmax_statistics,
                 "(Tensor(a!) logits, bool finite, bool write, float temperature) -> Tensor")
