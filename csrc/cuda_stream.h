// What the CUDA ops share: the current stream of a tensor's device, and scratch memory on it.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include "tensors.h"

namespace fastplm {

// The device of a tensor is current, and its stream known, for as long as this lives.
class CurrentStream {
 public:
  explicit CurrentStream(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* current = nullptr;
    const int32_t device = tensor.get_device_index();
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &current) == AOTI_TORCH_SUCCESS,
                    "no CUDA stream on device ", device);
    stream_ = static_cast<cudaStream_t>(current);
  }
  cudaStream_t get() const { return stream_; }
  void fill(void* memory, int byte, size_t bytes) const {
    if (bytes > 0) STD_CUDA_CHECK(cudaMemsetAsync(memory, byte, bytes, stream_));
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

}  // namespace fastplm
