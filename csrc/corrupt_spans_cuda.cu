// fastplm_C::corrupt_spans on CUDA: one kernel on the current stream, nothing waits for the device.
#include "corrupt_spans_kernel.cuh"
#include "corrupt_spans_op.h"
#include "cuda_stream.h"

namespace fastplm {
namespace {

struct CorruptSpansCuda {
  template <typename Id>
  static void run(const Tensor& input_ids, const CorruptSpansCall<Id>& call) {
    const CurrentStream stream(input_ids);
    const int64_t rows = call.rows.count;
    if (rows == 0) {
      stream.fill(call.dropped, 0, sizeof(*call.dropped));
      return;
    }
    Scratch<uint32_t> keys(input_ids, rows * call.plan.keys_size());
    Scratch<uint32_t> bounds(input_ids, rows * 2 * call.plan.bounds_size());
    corrupt_spans_kernel<<<static_cast<unsigned int>(rows), kThreads, 0, stream.get()>>>(
        call, keys.data(), bounds.data());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CUDA, library) {
  library.impl("corrupt_spans", TORCH_BOX(&fastplm::corrupt_spans<fastplm::CorruptSpansCuda>));
}
