// fastplm_C::dropout on the CPU, forward and backward alike.
#include <algorithm>
#include <cstring>

#include "philox.h"
#include "sizes.h"
#include "tensors.h"

#define FASTPLM_FILE "dropout.cpp"
#include "each_level.h"
#include "lanes.h"
#include "dropout.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

constexpr int64_t kBlocksWorthAThread = 64;

// input and out dense and of one shape; threshold of 65536.
void dropout(const Tensor& input, const Tensor& seed, int64_t threshold, double scale,
             Tensor& out) {
  const int64_t size = input.numel();
  const auto key = static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  with_floating_type(input, [&](auto type) {
    using T = decltype(type);
    const T* from = static_cast<const T*>(input.const_data_ptr());
    T* to = static_cast<T*>(out.mutable_data_ptr());
    torch::stable::parallel_for(
        0, (size + kDropBlock - 1) / kDropBlock, kBlocksWorthAThread,
        [&](int64_t begin, int64_t end) {
          const int64_t first = begin * kDropBlock, last = std::min(end * kDropBlock, size);
          drop_elements(key, static_cast<int32_t>(threshold), static_cast<float>(scale), first,
                        last - first, from + first, to + first);
        });
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

#if FASTPLM_ONCE
STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def(
      "dropout(Tensor input, Tensor seed, int threshold, float scale, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("dropout", FASTPLM_BOX(dropout));
}
#endif
