// The library of the CUDA code, fastplm/_C_cuda: all of it at once, as nvcc reads PyTorch's headers
// again for each architecture, which takes longer than the kernels.
#include "bart_noise_cuda.cu"
#include "corrupt_spans_cuda.cu"
#include "mask_tokens_cuda.cu"

namespace fastplm {
namespace {

// The CUDA that this code was built with and has inside, as in 13000 for 13.0.
int64_t cuda_version() {
  return CUDART_VERSION;
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) { library.def("cuda_version() -> int"); }

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CompositeExplicitAutograd, library) {
  library.impl("cuda_version", TORCH_BOX(&fastplm::cuda_version));
}
