// fastplm_C::bart_noise on CUDA: one kernel on the current stream, nothing waits for the device.
#include "bart_noise_kernel.cuh"
#include "bart_noise_op.h"
#include "cuda_stream.h"

namespace fastplm {
namespace {

struct BartNoiseCuda {
  template <typename Id>
  static void run(const Tensor& input_ids, const BartNoiseCall<Id>& call) {
    const CurrentStream stream(input_ids);
    const int64_t rows = call.rows.count;
    stream.fill(call.dropped, 0, sizeof(*call.dropped));
    if (rows == 0) return;
    const int64_t row_bytes = NoiseRow<Id>{}.lay_out(call, nullptr);
    Scratch<uint8_t> memory(input_ids, rows * row_bytes);
    bart_noise_kernel<<<static_cast<unsigned int>(rows), kThreads, 0, stream.get()>>>(
        call, memory.data(), row_bytes);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CUDA, library) {
  library.impl("bart_noise", TORCH_BOX(&fastplm::bart_noise<fastplm::BartNoiseCuda>));
}
