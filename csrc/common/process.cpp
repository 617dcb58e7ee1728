// Operators of fastplm_C that ask about this process or its memory.
#include "common/level.h"
#include "common/operators.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif
#if defined(__GLIBC__)
#include <malloc.h>
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

// Asks Linux for huge pages, so that writing to new memory takes few page faults: a fault costs
// about as much as the arithmetic on its 4 KiB. If Linux refuses, nothing changes.
void in_huge_pages(void* from, size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = 4096;
  const auto begin = reinterpret_cast<uintptr_t>(from);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  if (first < begin + bytes)
    madvise(reinterpret_cast<void*>(first), begin + bytes - first, MADV_HUGEPAGE);
#endif
}

// Nothing was written to the tensor yet.
void ask_for_huge_pages(Tensor& tensor) {
  Shapes().dense(tensor, "tensor [...]");
  in_huge_pages(tensor.mutable_data_ptr(), tensor.numel() * tensor.element_size());
}

// Keeps what is freed in this process. By itself glibc maps a large block when it is allocated and
// unmaps it when it is freed, and shrinks the heap as the last blocks of it are freed, so that each
// step of a training writes to new pages. `reserve` bytes of addresses are added to the heap, not
// yet memory, which Linux then fills with huge pages. False without glibc.
bool keep_memory(int64_t reserve) {
#if defined(__GLIBC__)
  if (!mallopt(M_MMAP_MAX, 0) || !mallopt(M_TRIM_THRESHOLD, -1)) return false;
  if (reserve == 0) return true;
  void* heap = malloc(static_cast<size_t>(reserve));
  if (heap != nullptr) in_huge_pages(heap, static_cast<size_t>(reserve));
  free(heap);
  return true;
#else
  return false;
#endif
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def("level() -> int");
  library.def("mkl_leaves_avx512_unused() -> bool");
  library.def("ask_for_huge_pages(Tensor(a!) tensor) -> ()");
  library.def("keep_memory(int reserve) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CompositeExplicitAutograd, library) {
  library.impl("level", TORCH_BOX(&fastplm::level_number));
  library.impl("mkl_leaves_avx512_unused", TORCH_BOX(&fastplm::mkl_leaves_avx512_unused));
  library.impl("keep_memory", TORCH_BOX(&fastplm::keep_memory));
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("ask_for_huge_pages", (fastplm::Operator<&fastplm::ask_for_huge_pages, "ask_for_huge_pages">::call));
}
