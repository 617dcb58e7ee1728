// fastplm_C::dropout on the CPU, forward and backward alike.
#include "dropout.h"

#include "tensors.h"

namespace fastplm {
namespace {

constexpr int64_t kBlocksWorthAThread = 64;

template <typename T>
FASTPLM_CLONES void run_drop(uint64_t seed, int32_t threshold, float scale, int64_t first,
                             int64_t last, const T* in, T* out) {
  drop_elements(seed, threshold, scale, first, last, in, out);
}

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
          run_drop<T>(key, static_cast<int32_t>(threshold), static_cast<float>(scale),
                      begin * kDropBlock, std::min(end * kDropBlock, size), from, to);
        });
  });
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def(
      "dropout(Tensor input, Tensor seed, int threshold, float scale, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("dropout", TORCH_BOX(&fastplm::dropout));
}
