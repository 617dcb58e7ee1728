// What the operators on batches of token ids share: ids [B, T], or [N] of packed rows with cu_seqlens [B + 1].
#pragma once

#include "common/operators.h"
#include "common/rows.h"

namespace fastplm {

// The checked shapes of what each of the operators takes.
template <typename Tensors>
Shapes shapes_of_batch(const Tensors& tensors) {
  Shapes shapes;
  if (tensors.cu_seqlens) {
    shapes.any(tensors.input_ids, "input_ids [N]");
    shapes.any(tensors.cu_seqlens, "cu_seqlens [B + 1]");
  } else {
    shapes.any(tensors.input_ids, "input_ids [B, T]");
  }
  shapes.any(tensors.sample_index, "sample_index [B]");
  shapes.any(tensors.seed, "seed []");
  return shapes;
}

inline Rows rows_of(const Tensor& input_ids, const Dense<int32_t>& cu_seqlens,
                    const Dense<int64_t>& sample_index, const Dense<int64_t>& lengths = {}) {
  const bool is_packed = static_cast<bool>(cu_seqlens);
  return {cu_seqlens.data(),
          lengths.data(),
          sample_index.data(),
          is_packed ? cu_seqlens.size() - 1 : input_ids.size(0),
          is_packed ? 0 : input_ids.size(1),
          input_ids.numel()};
}

// Lengths and their products by a share, in units of 2^-32, fit into 64 bits.
inline bool is_length(int64_t length) { return length >= 0 && length < int64_t{1} << 31; }
inline bool is_share(int64_t scale) { return scale >= 0 && scale <= int64_t{1} << 32; }

}  // namespace fastplm
