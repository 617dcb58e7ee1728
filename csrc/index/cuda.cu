// The library fastplm/_C_cuda: operators that work row by row, on CUDA tensors. Kernels are launched on the
// current stream, and nothing waits for the device. It is one file, as nvcc reads PyTorch's headers again
// for each architecture, which takes longer than the kernels.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "index/bart_noise_op.h"
#include "index/corrupt_spans_op.h"
#include "index/kernels.cuh"
#include "index/mask_tokens_op.h"

namespace fastplm {
namespace {

// Makes the device of a tensor the current one while this object lives, and has its stream.
class CurrentStream {
 public:
  explicit CurrentStream(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* current = nullptr;
    const int32_t device = tensor.get_device_index();
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &current) == AOTI_TORCH_SUCCESS,
                    "no CUDA stream on device ", device);
    stream_ = static_cast<cudaStream_t>(current);
  }
  // kernel<<<blocks, kThreads>>>(arguments...)
  template <typename Kernel, typename... Arguments>
  void launch(Kernel kernel, int64_t blocks, const Arguments&... arguments) const {
    kernel<<<static_cast<unsigned int>(blocks), kThreads, 0, stream_>>>(arguments...);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  void set_zero(int64_t* number) const {
    STD_CUDA_CHECK(cudaMemsetAsync(number, 0, sizeof(*number), stream_));
  }
  void copy(void* to, const void* from, size_t bytes) const {
    if (bytes > 0) {
      STD_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_));
    }
  }

 private:
  const torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// Uninitialised memory of PyTorch's allocator, which keeps it for this stream.
template <typename T>
class Scratch {
 public:
  Scratch(const Tensor& like, int64_t size)
      : tensor_(empty_tensor(like, {size * static_cast<int64_t>(sizeof(T))}, ScalarType::Byte)) {}
  T* data() { return static_cast<T*>(tensor_.mutable_data_ptr()); }

 private:
  Tensor tensor_;
};

namespace on_cuda {

auto mask_tokens(const MaskTokensTensors& tensors, const MaskTokensSettings& settings) {
  return fastplm::mask_tokens(tensors, settings, [&](const auto& call) {
    using Id = std::remove_pointer_t<decltype(call.output_ids)>;
    const CurrentStream stream(tensors.input_ids);
    const int64_t rows = call.rows.count, tokens = call.rows.tokens;
    if (rows == 0) {  // then there are no slots
      stream.set_zero(call.count);
      stream.set_zero(call.dropped);
      stream.copy(call.output_ids, call.input_ids, tokens * sizeof(Id));
      return;
    }
    // Only the device knows the lengths of packed rows.
    const bool is_packed = call.rows.cu_seqlens != nullptr;
    const bool all_short = !is_packed && call.rows.stride <= kSharedTokens;
    Scratch<uint32_t> keys(tensors.input_ids, all_short ? 0 : tokens + 4 * rows);
    Scratch<uint32_t> sizes(tensors.input_ids, all_short ? 0 : tokens);
    Scratch<uint8_t> chosen(tensors.input_ids, tokens);
    Scratch<int64_t> of_rows(tensors.input_ids, 3 * rows);
    Scratch<bool> apart(tensors.input_ids, 1);
    const MaskScratch memory{keys.data(),           sizes.data(),
                             chosen.data(),         of_rows.data(),
                             of_rows.data() + rows, of_rows.data() + 2 * rows,
                             is_packed ? apart.data() : nullptr};
    if (is_packed) stream.launch(mask_tokens_check_kernel<Id>, 1, call, memory);
    stream.launch(mask_tokens_choose_kernel<Id>, rows, call, memory);
    stream.launch(mask_tokens_place_kernel<Id>, 1, call, memory);
    stream.launch(mask_tokens_write_kernel<Id>, rows, call, memory);
  });
}

auto corrupt_spans(const CorruptSpansTensors& tensors, const CorruptSpansSettings& settings) {
  return fastplm::corrupt_spans(tensors, settings, [&](const auto& call) {
    using Id = std::remove_pointer_t<decltype(call.output_ids)>;
    const CurrentStream stream(tensors.input_ids);
    const int64_t rows = call.rows.count;
    if (rows == 0) return stream.set_zero(call.dropped);
    Scratch<uint32_t> keys(tensors.input_ids, rows * call.keys_size());
    Scratch<uint32_t> bounds(tensors.input_ids, rows * 2 * call.bounds_size());
    stream.launch(corrupt_spans_kernel<Id>, rows, call, keys.data(), bounds.data());
  });
}

auto bart_noise(const BartNoiseTensors& tensors, const BartNoiseSettings& settings) {
  return fastplm::bart_noise(tensors, settings, [&](const auto& call) {
    using Id = std::remove_pointer_t<decltype(call.output_ids)>;
    const CurrentStream stream(tensors.input_ids);
    const int64_t rows = call.rows.count;
    stream.set_zero(call.dropped);
    if (rows == 0) return;
    const int64_t row_bytes = NoiseRow<Id>{}.lay_out(call, nullptr);
    Scratch<uint8_t> memory(tensors.input_ids, rows * row_bytes);
    stream.launch(bart_noise_kernel<Id>, rows, call, memory.data(), row_bytes);
  });
}

}  // namespace on_cuda

// The version of the CUDA runtime in this library, for example 13000 for 13.0.
int64_t cuda_version() {
  return CUDART_VERSION;
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) { library.def("cuda_version() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CompositeExplicitAutograd, library) {
  library.impl("cuda_version", TORCH_BOX(&fastplm::cuda_version));
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CUDA, library) {
  using fastplm::Operator;
  library.impl("mask_tokens", Operator<&fastplm::on_cuda::mask_tokens, "mask_tokens">::call);
  library.impl("corrupt_spans", Operator<&fastplm::on_cuda::corrupt_spans, "corrupt_spans">::call);
  library.impl("bart_noise", Operator<&fastplm::on_cuda::bart_noise, "bart_noise">::call);
}
