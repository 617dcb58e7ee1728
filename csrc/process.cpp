// Operators of fastplm_C that ask about this process or its memory.
#include "level.h"
#include "tensors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastplm {
namespace {

// The vector instructions that csrc/ uses: 0 baseline, 1 AVX2, 2 AVX-512.
int64_t level_number() {
  return static_cast<int64_t>(level());
}

// MKL uses AVX-512 only on Intel's CPUs.
bool mkl_leaves_avx512_unused() {
#if FASTPLM_HAS_LEVELS
  return level() == Level::kAvx512 && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

// Asks Linux for huge pages, so that writing to a large new tensor takes few page faults: a fault
// costs about as much as the arithmetic on its 4 KiB. The tensor is dense, and nothing was written
// to it yet. If Linux refuses, nothing changes.
void ask_for_huge_pages(Tensor& tensor) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t end = begin + tensor.numel() * tensor.element_size();
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def("level() -> int");
  library.def("mkl_leaves_avx512_unused() -> bool");
  library.def("ask_for_huge_pages(Tensor(a!) tensor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CompositeExplicitAutograd, library) {
  library.impl("level", TORCH_BOX(&fastplm::level_number));
  library.impl("mkl_leaves_avx512_unused", TORCH_BOX(&fastplm::mkl_leaves_avx512_unused));
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("ask_for_huge_pages", TORCH_BOX(&fastplm::ask_for_huge_pages));
}
