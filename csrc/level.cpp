// fastplm_C::level: of the vector instructions that csrc/ uses in this process.
#include "level.h"

#include <torch/csrc/stable/library.h>

#include <cstdint>

namespace fastplm {
namespace {

// 0 baseline, 1 AVX2, 2 AVX-512.
int64_t level_number() {
  return static_cast<int64_t>(level());
}

// Whether MKL, whatever the level, uses no AVX-512: it does on the CPUs of its maker alone.
bool mkl_leaves_avx512_unused() {
#if FASTPLM_HAS_LEVELS
  return level() == Level::kAvx512 && !__builtin_cpu_is("intel");
#else
  return false;
#endif
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def("level() -> int");
  library.def("mkl_leaves_avx512_unused() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CompositeExplicitAutograd, library) {
  library.impl("level", TORCH_BOX(&fastplm::level_number));
  library.impl("mkl_leaves_avx512_unused", TORCH_BOX(&fastplm::mkl_leaves_avx512_unused));
}
