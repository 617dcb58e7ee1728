// fastplm_C::mask_tokens on CUDA: kernels on the current stream, nothing waits for the device.
#include "cuda_stream.h"
#include "mask_tokens_kernel.cuh"
#include "mask_tokens_op.h"

namespace fastplm {
namespace {

struct MaskTokensCuda {
  template <typename Id>
  static void run(const Tensor& input_ids, const MaskTokensCall<Id>& call) {
    const CurrentStream stream(input_ids);
    const int64_t rows = call.rows.count;
    const int64_t tokens = call.rows.tokens;
    if (rows == 0) {  // and no slots, for these are given to rows
      stream.fill(call.count, 0, sizeof(*call.count));
      stream.fill(call.dropped, 0, sizeof(*call.dropped));
      stream.copy(call.output_ids, call.input_ids, tokens * sizeof(Id));
      return;
    }
    // How long packed rows are is known to the device alone.
    const bool all_short = call.rows.cu_seqlens == nullptr && call.rows.stride <= kSharedTokens;
    Scratch<uint32_t> keys(input_ids, all_short ? 0 : tokens + 4 * rows);
    Scratch<uint32_t> sizes(input_ids, all_short ? 0 : tokens);
    Scratch<uint8_t> chosen(input_ids, tokens);
    Scratch<int64_t> of_rows(input_ids, 3 * rows);
    Scratch<bool> apart(input_ids, 1);
    const bool is_packed = call.rows.cu_seqlens != nullptr;
    const MaskScratch memory{keys.data(),           sizes.data(),
                             chosen.data(),         of_rows.data(),
                             of_rows.data() + rows, of_rows.data() + 2 * rows,
                             is_packed ? apart.data() : nullptr};
    const auto launch = [&](auto kernel, int64_t blocks) {
      kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream.get()>>>(call, memory);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    };
    if (is_packed) launch(mask_tokens_check_kernel<Id>, 1);
    launch(mask_tokens_choose_kernel<Id>, rows);
    launch(mask_tokens_place_kernel<Id>, 1);
    launch(mask_tokens_write_kernel<Id>, rows);
  }
};

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CUDA, library) {
  library.impl("mask_tokens", TORCH_BOX(&fastplm::mask_tokens<fastplm::MaskTokensCuda>));
}
