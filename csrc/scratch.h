// Scratch memory of the CPU kernels, for all levels.
#pragma once

#include <cstdint>
#include <new>

#include "base.h"

namespace fastplm {

// Scratch memory of a thread. It grows and is never freed, as new pages are slow.
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
    memory_ = static_cast<float*>(::operator new(sizeof(float) * floats, kAligned));
    size_ = floats;
  }
  float* next(int64_t floats) {
    float* piece = memory_ + used_;
    used_ += round_up(floats, kCacheLine);
    return piece;
  }

 private:
  static constexpr std::align_val_t kAligned{64};

  void release() {
    ::operator delete(memory_, kAligned);
    memory_ = nullptr;
    size_ = 0;
  }

  float* memory_ = nullptr;
  int64_t size_ = 0;
  int64_t used_ = 0;
};

}  // namespace fastplm
