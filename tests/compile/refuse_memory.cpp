// A library to preload: refuse(n) lets the n-th next allocation with an alignment fail, which are those of PyTorch's
// tensors and of csrc/; refuse(-1) lets none. Returns how many were to come before that one; -1: it was refused.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <dlfcn.h>

namespace {

std::atomic<long> left(-1);

bool refused() {
  return left.load() >= 0 && left.fetch_sub(1) == 0;
}

template <typename Function>
Function* original(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

long refuse(long number) {
  const long before = left.exchange(number);
  return before < 0 ? -1 : before;
}

int posix_memalign(void** out, size_t alignment, size_t bytes) noexcept {
  static auto* const allocate = original<int(void**, size_t, size_t)>("posix_memalign");
  return refused() ? ENOMEM : allocate(out, alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) noexcept {
  static auto* const allocate = original<void*(size_t, size_t)>("aligned_alloc");
  return refused() ? nullptr : allocate(alignment, bytes);
}
}
