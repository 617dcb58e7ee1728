// Scratch memory of the CPU kernels, for all levels. Large arrays are here and not on the stack: a thread's stack may
// have 64 KB, and setup.py warns of a function that takes more than its share.
#pragma once

#include <cstdint>
#include <new>
#include <vector>

#include "common/base.h"

namespace fastplm {

// Memory of so many bytes could not be had. operators.h makes an error of it that names the operator.
struct OutOfMemory : std::bad_alloc {
  explicit OutOfMemory(int64_t bytes, bool on_cpu = true) : bytes(bytes), on_cpu(on_cpu) {}
  int64_t bytes;
  bool on_cpu;
};

// New memory in whole cache lines; give_back(memory) frees it.
constexpr std::align_val_t kAligned{64};
inline void* new_memory(int64_t bytes) {
  void* memory = ::operator new(static_cast<size_t>(bytes), kAligned, std::nothrow);
  if (memory == nullptr) throw OutOfMemory(bytes);
  return memory;
}
inline void give_back(void* memory) { ::operator delete(memory, kAligned); }

template <typename T>
struct Allocator {
  using value_type = T;
  Allocator() = default;
  template <typename Other>
  Allocator(const Allocator<Other>&) {}
  T* allocate(size_t count) { return static_cast<T*>(new_memory(static_cast<int64_t>(count * sizeof(T)))); }
  void deallocate(T* memory, size_t) { give_back(memory); }
  template <typename Other>
  bool operator==(const Allocator<Other>&) const { return true; }
  template <typename Other>
  bool operator!=(const Allocator<Other>&) const { return false; }
};

template <typename T>
using Vector = std::vector<T, Allocator<T>>;

// Numbers that are not set to 0 first.
template <typename T>
class Buffer {
 public:
  explicit Buffer(int64_t count) : memory_(static_cast<T*>(new_memory(count * static_cast<int64_t>(sizeof(T))))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { give_back(memory_); }
  T* get() const { return memory_; }

 private:
  T* memory_;
};

// Scratch memory, which grows.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  // Makes room for `floats` floats, from which next() gives piece after piece.
  void reserve(int64_t floats) {
    used_ = 0;
    if (floats <= size_) return;
    release();
    memory_ = static_cast<float*>(new_memory(floats * static_cast<int64_t>(sizeof(float))));
    size_ = floats;
  }
  float* next(int64_t floats) {
    float* piece = memory_ + used_;
    used_ += round_up(floats, kCacheLine);
    return piece;
  }

 private:
  void release() {
    give_back(memory_);
    memory_ = nullptr;
    size_ = 0;
  }

  float* memory_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

// What a call needs scratch memory for. A thread has one Room of each at a time: the states of layers, a head of
// attention, and of a product what all threads read, and what a block of it needs.
enum class Use { kStates, kHead, kProduct, kBlock };

// Scratch memory of a call: that of the thread, which stays, as new pages are slow; or new memory if it is much, which
// is given back after the call.
template <Use>
class Room {
 public:
  explicit Room(int64_t floats) : memory(floats <= kMostOfThread ? of_thread() : new_) {
    memory.reserve(floats);
    data = memory.next(0);
  }

 private:
  static constexpr int64_t kMostOfThread = int64_t{1} << 18;  // 1 MB
  static Scratch& of_thread() {
    static thread_local Scratch memory;
    return memory;
  }
  Scratch new_;

 public:
  Scratch& memory;
  float* data;  // its begin
};

}  // namespace fastplm
