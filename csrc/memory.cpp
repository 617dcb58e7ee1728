// fastplm_C::ask_for_huge_pages: large fresh memory in few page faults, where Linux gives huge pages
// to those who ask. A fault costs about as much as the arithmetic on the 4 KiB that it brings.
#include "tensors.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastplm {
namespace {

// For a dense tensor that nothing was written to yet; a hint, whose refusal changes nothing.
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
  library.def("ask_for_huge_pages(Tensor(a!) tensor) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("ask_for_huge_pages", TORCH_BOX(&fastplm::ask_for_huge_pages));
}
