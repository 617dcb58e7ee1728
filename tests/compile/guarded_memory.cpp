// A library to preload: after guard(1) each allocation with an alignment, which are those of PyTorch's tensors and of
// csrc/, lies between pages that end the process when they are read or written. It ends where the next page begins, but
// for its alignment. What is freed is not used again; what is large is refused.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <sys/mman.h>

extern "C" {
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* memory);
}

namespace {

constexpr size_t kPage = 4096, kArena = size_t{64} << 30, kMost = size_t{256} << 20;
std::atomic<bool> guards(false);
std::atomic<size_t> used(0);

char* arena() {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  static char* const memory = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, kFlags, -1, 0));
  return memory;
}

size_t round_up(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

void* allocate(size_t alignment, size_t bytes) {
  if (!guards) return __libc_memalign(alignment, bytes);
  if (bytes > kMost) return nullptr;
  const size_t filled = round_up(bytes, alignment), pages = round_up(filled, kPage);
  const size_t end = used.fetch_add(pages + kPage) + kPage + pages;
  if (end + kPage > kArena) return nullptr;
  if (mprotect(arena() + end - pages, pages, PROT_READ | PROT_WRITE) != 0) return nullptr;
  return arena() + end - filled;
}

}  // namespace

extern "C" {

void guard(int on) { guards = on != 0; }

int posix_memalign(void** out, size_t alignment, size_t bytes) noexcept {
  *out = allocate(alignment, bytes);
  return *out == nullptr ? ENOMEM : 0;
}

void* aligned_alloc(size_t alignment, size_t bytes) noexcept { return allocate(alignment, bytes); }

void free(void* memory) noexcept {
  char* const at = static_cast<char*>(memory);
  if (at < arena() || at >= arena() + kArena) __libc_free(memory);
}
}
