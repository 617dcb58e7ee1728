// Levels of vector instructions. The CPU kernels of csrc/ are compiled once for each level (each_level.h),
// with vectors as wide as its registers. A process uses the highest level that its CPU has and that
// PyTorch's environment variable ATEN_CPU_CAPABILITY (default, avx2, avx512) allows.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <strings.h>

// Whether a function can be compiled with instructions that no compiler flag switches on.
#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 12
#define FASTPLM_HAS_LEVELS 1
#else
#define FASTPLM_HAS_LEVELS 0
#endif

namespace fastplm {

// Everything up to SSE2 on x86, and NEON on Arm, is the baseline.
enum class Level { kBaseline, kAvx2, kAvx512 };

inline Level level_of_cpu() {
#if FASTPLM_HAS_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return Level::kAvx512;
  if (__builtin_cpu_supports("x86-64-v3")) return Level::kAvx2;
#endif
  return Level::kBaseline;
}

// Like PyTorch, ignores a name that is not known; PyTorch warns of it.
inline Level most_allowed(const char* capability) {
  if (capability != nullptr && std::strcmp(capability, "default") == 0) return Level::kBaseline;
  if (capability != nullptr && std::strcmp(capability, "avx2") == 0) return Level::kAvx2;
  return Level::kAvx512;
}

// The level of this process, read once.
inline Level level() {
  static const Level chosen =
      std::min(level_of_cpu(), most_allowed(std::getenv("ATEN_CPU_CAPABILITY")));
  return chosen;
}

// Whether oneDNN's environment variable ONEDNN_MAX_CPU_ISA, or DNNL_MAX_CPU_ISA as it was called, allows VNNI, which
// multiplies bytes. PyTorch's variable cannot tell AVX2 with it from AVX2 without. The level stays that of level().
inline bool vnni_is_allowed() {
  const char* most = std::getenv("ONEDNN_MAX_CPU_ISA");
  if (most == nullptr) most = std::getenv("DNNL_MAX_CPU_ISA");
  if (most == nullptr) return true;
  for (const char* without : {"SSE41", "AVX", "AVX2", "AVX512_CORE"}) {
    if (strcasecmp(most, without) == 0) return false;
  }
  return true;
}

}  // namespace fastplm
