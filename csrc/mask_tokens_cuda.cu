// fastplm_C::mask_tokens on CUDA: two kernels on the current stream, nothing waits for the device.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "mask_tokens_kernel.cuh"
#include "mask_tokens_op.h"

namespace fastplm {
namespace {

Tensor scratch(const Tensor& like, int64_t size, ScalarType dtype) {
  return torch::stable::new_empty(like, {size}, dtype);
}

struct MaskTokensCuda {
  template <typename Id>
  static void run(const Tensor& input_ids, const MaskTokensCall<Id>& call) {
    const torch::stable::accelerator::DeviceGuard guard(input_ids.get_device_index());
    void* current = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(input_ids.get_device_index(), &current));
    const auto stream = static_cast<cudaStream_t>(current);
    if (call.rows == 0) {
      STD_CUDA_CHECK(cudaMemsetAsync(call.count, 0, sizeof(*call.count), stream));
      return;
    }
    const Tensor quotas = scratch(input_ids, call.rows, ScalarType::Int);
    const Tensor keys = scratch(input_ids, call.rows * call.length, ScalarType::Long);
    auto* quota_ptr = static_cast<uint32_t*>(quotas.mutable_data_ptr());
    auto* key_ptr = static_cast<uint64_t*>(keys.mutable_data_ptr());
    const auto blocks = static_cast<unsigned int>(call.rows);
    mask_tokens_quota_kernel<<<blocks, kThreads, 0, stream>>>(call, quota_ptr);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    mask_tokens_row_kernel<<<blocks, kThreads, 0, stream>>>(call, quota_ptr, key_ptr);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CUDA, library) {
  library.impl("mask_tokens", TORCH_BOX(&fastplm::mask_tokens<fastplm::MaskTokensCuda>));
}
