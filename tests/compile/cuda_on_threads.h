// The part of CUDA that the kernels of csrc/ use, so that a C++ compiler builds their sources and
// the CPU runs them.
//
// A block is a thread of the CPU, and the block's threads take turns on it: each runs until it
// reaches a barrier. So every run is the same, and as unfair as possible: a warp runs ahead of the
// others as far as it can, then the next one does; blocks change at each __syncthreads. In one
// order of the threads or in its reverse, an access that lacks a barrier happens too early. Atomics
// are plain additions here, as no other thread can interrupt them.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(...)

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_ON_THREADS_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_THREADS_ASAN
#endif

// AddressSanitizer guards no thread_local variables, so with it the blocks run one after the other.
#if defined(CUDA_ON_THREADS_ASAN)
#define __shared__ static
constexpr bool kBlocksTogether = false;
#else
#define __shared__ static thread_local
constexpr bool kBlocksTogether = true;
#endif

struct Index {
  unsigned int x;
};
static thread_local Index threadIdx;
static thread_local Index blockIdx;
static thread_local Index gridDim;

namespace cuda_on_threads {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr int kStackBytes = 64 * 1024;

inline std::vector<int> in_order(int count, bool backwards) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (backwards) std::reverse(order.begin(), order.end());
  return order;
}

// Lets the blocks that have not ended take turns.
class Turns {
 public:
  explicit Turns(std::vector<int> blocks) : blocks_(std::move(blocks)) {}
  void wait(int block) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return blocks_[turn_] == block; });
  }
  void pass(bool ended) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (ended) {
      blocks_.erase(blocks_.begin() + turn_);
    } else {
      ++turn_;
    }
    if (turn_ == blocks_.size()) turn_ = 0;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> blocks_;
  size_t turn_ = 0;
};

class Block {
 public:
  Block(std::function<void()> kernel, bool backwards)
      : kernel_(std::move(kernel)), threads_(kThreads), backwards_(backwards) {}

  // Calls at_barrier whenever all threads are at a __syncthreads.
  void run(const std::function<void()>& at_barrier) {
    running_ = this;
    for (Thread& thread : threads_) {
      thread.stack.reset(new char[kStackBytes]);
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStackBytes;
      thread.context.uc_link = &scheduler_;
      makecontext(&thread.context, &Block::enter, 0);
    }
    const std::vector<int> warps = in_order(kThreads / kWarp, backwards_);
    while (!all(0, kThreads, State::kEnded)) {
      for (const int warp : warps) run_warp(warp * kWarp);
      if (all(0, kThreads, State::kAtBlockBarrier)) {
        at_barrier();
      } else if (!all(0, kThreads, State::kEnded)) {
        std::printf("block %u: not all threads reach the same barrier\n", blockIdx.x);
        std::exit(1);
      }
    }
  }

  static void sync() { running_->leave(State::kAtBlockBarrier); }

  // The value of the thread `from` of this warp.
  template <typename T>
  static T exchange(T value, int from) {
    Thread* const warp = &running_->threads_[threadIdx.x / kWarp * kWarp];
    Thread& self = running_->threads_[threadIdx.x];
    // Two buffers in turn: a lane writes its next value while others have yet to read this one.
    const int slot = self.exchanges++ % 2;
    self.given[slot] = static_cast<uint64_t>(value);
    running_->leave(State::kAtWarpBarrier);
    return static_cast<T>(warp[from].given[slot]);
  }

 private:
  enum class State { kReady, kAtWarpBarrier, kAtBlockBarrier, kEnded };
  struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    State state = State::kReady;
    uint64_t given[2] = {};
    unsigned int exchanges = 0;
  };

  static void enter() {
    running_->kernel_();
    running_->threads_[threadIdx.x].state = State::kEnded;
  }
  // Switches to the next thread of the warp, or back to run_warp.
  void leave(State state) {
    Thread& self = threads_[threadIdx.x];
    self.state = state;
    const unsigned int next = threadIdx.x + (backwards_ ? -1u : 1u);
    if (next / kWarp == threadIdx.x / kWarp && threads_[next].state == State::kReady) {
      threadIdx.x = next;
      swapcontext(&self.context, &threads_[next].context);
    } else {
      swapcontext(&self.context, &scheduler_);
    }
  }
  bool all(int first, int count, State state) const {
    return std::all_of(threads_.begin() + first, threads_.begin() + first + count,
                       [&](const Thread& thread) { return thread.state == state; });
  }
  void set(int first, int count, State state) {
    for (int i = first; i < first + count; ++i) threads_[i].state = state;
  }
  void run_warp(int first) {
    do {
      set(first, kWarp, State::kReady);
      for (const int lane : in_order(kWarp, backwards_)) {
        Thread& thread = threads_[first + lane];
        if (thread.state != State::kReady) continue;
        threadIdx.x = static_cast<unsigned int>(first + lane);
        swapcontext(&scheduler_, &thread.context);
      }
    } while (all(first, kWarp, State::kAtWarpBarrier));
  }

  static inline thread_local Block* running_ = nullptr;
  const std::function<void()> kernel_;
  std::vector<Thread> threads_;
  ucontext_t scheduler_;
  const bool backwards_;
};

// kernel<<<blocks, 256>>>(arguments...)
template <typename... Parameters, typename... Arguments>
void launch(bool backwards, void (*kernel)(Parameters...), int64_t blocks,
            const Arguments&... arguments) {
  const std::vector<int> order = in_order(static_cast<int>(blocks), backwards);
  // As on a GPU, only so many blocks run at a time.
  constexpr int kResident = 32;
  for (size_t first = 0; first < order.size(); first += kResident) {
    const size_t last = std::min(first + kResident, order.size());
    const std::vector<int> resident(order.begin() + first, order.begin() + last);
    Turns turns(resident);
    std::vector<std::thread> threads;
    for (const int block : resident) {
      threads.emplace_back([&, block] {
        turns.wait(block);
        gridDim.x = static_cast<unsigned int>(blocks);
        blockIdx.x = static_cast<unsigned int>(block);
        Block([&] { kernel(arguments...); }, backwards).run([&] {
          if (!kBlocksTogether) return;
          turns.pass(false);
          turns.wait(block);
        });
        turns.pass(true);
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

}  // namespace cuda_on_threads

inline void __syncthreads() { cuda_on_threads::Block::sync(); }

template <typename T>
T __shfl_up_sync(unsigned int, T value, int offset) {
  const int lane = threadIdx.x % cuda_on_threads::kWarp;
  return cuda_on_threads::Block::exchange(value, lane < offset ? lane : lane - offset);
}

template <typename T>
T __shfl_xor_sync(unsigned int, T value, int mask) {
  const int lane = threadIdx.x % cuda_on_threads::kWarp;
  return cuda_on_threads::Block::exchange(value, lane ^ mask);
}

inline unsigned long long atomicAdd(unsigned long long* counter, unsigned long long value) {
  const unsigned long long before = *counter;
  *counter += value;
  return before;
}
