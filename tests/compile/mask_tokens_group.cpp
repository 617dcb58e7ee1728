// mask_row as the GPU runs it, by a group of cooperating threads, but on threads of the CPU: under
// ThreadSanitizer, a missing barrier shows as well as a wrong choice. Built by test_csrc.py.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "mask_tokens.h"

using namespace fastplm;

class Barrier {
 public:
  explicit Barrier(int threads) : threads_(threads) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int round = round_;
    if (++waiting_ == threads_) {
      waiting_ = 0;
      ++round_;
      all_here_.notify_all();
    } else {
      all_here_.wait(lock, [&] { return round != round_; });
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_here_;
  const int threads_;
  int waiting_ = 0;
  int round_ = 0;
};

struct Threads {
  int rank_;
  int size_;
  Barrier* barrier;
  uint32_t* values;  // [size]

  int rank() const { return rank_; }
  int size() const { return size_; }
  void sync() const { barrier->wait(); }
  void increment(uint32_t* counter) const { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }
  uint32_t exclusive_sum(uint32_t value, uint32_t* total) const {
    values[rank_] = value;
    sync();
    const uint32_t before = std::accumulate(values, values + rank_, 0u);
    *total = std::accumulate(values + rank_, values + size_, before);
    sync();
    return before;
  }
};

// The chosen positions by their definition.
std::vector<int64_t> choose(const MaskTokensCall<int64_t>& call, const std::vector<uint64_t>& keys) {
  std::vector<int64_t> order;
  for (int64_t position = 0; position < call.length; ++position) {
    if (call.is_maskable(0, position)) order.push_back(position);
  }
  const int64_t quota = call.quota(static_cast<int64_t>(order.size()));
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys[a] < keys[b]; });
  order.resize(quota);
  std::sort(order.begin(), order.end());
  return order;
}

// One row by `size` threads. Random keys are all different, so `kept_bits` makes some of them equal.
bool check(int size, int64_t length, bool all_maskable, uint64_t kept_bits) {
  const int64_t seed = 5;
  const int64_t sample = 3;
  const auto maskable = std::make_unique<bool[]>(length);
  std::vector<int64_t> input(length), output(length, -7);
  for (int64_t position = 0; position < length; ++position) {
    input[position] = 5000 + position;
    maskable[position] = position % 7 != 2;
  }
  const int64_t capacity = length / 3 + 1;
  std::vector<int64_t> positions(capacity, kUnusedPosition), labels(capacity, kUnusedLabel);
  MaskTokensCall<int64_t> call{};
  call.input_ids = input.data();
  call.maskable = all_maskable ? nullptr : maskable.get();
  call.sample_index = &sample;
  call.seed = &seed;
  call.output_ids = output.data();
  call.positions = positions.data();
  call.labels = labels.data();
  call.rows = 1;
  call.length = length;
  call.capacity = capacity;
  call.quota_scale = int64_t{1} << 30;
  call.mask_below = int64_t{1} << 32;
  call.mask_token_id = 1;

  Barrier barrier(size);
  GroupScratch scratch;
  std::vector<uint32_t> values(size);
  std::vector<uint64_t> keys(length);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Threads group{rank, size, &barrier, values.data()};
      draw_keys(group, call, 0, keys.data());
      for (int64_t position = rank; position < length; position += size) {
        keys[position] &= kept_bits;
      }
      mask_row(group, scratch, call, 0, call.quota(count_maskable(group, call, 0)), 0, keys.data());
    });
  }
  for (auto& thread : threads) thread.join();

  const std::vector<int64_t> chosen = choose(call, keys);
  std::vector<int64_t> wanted_output = input;
  std::vector<int64_t> wanted_positions(capacity, kUnusedPosition);
  std::vector<int64_t> wanted_labels(capacity, kUnusedLabel);
  for (size_t slot = 0; slot < chosen.size(); ++slot) {
    wanted_positions[slot] = chosen[slot];
    wanted_labels[slot] = input[chosen[slot]];
    wanted_output[chosen[slot]] = call.mask_token_id;
  }
  return output == wanted_output && positions == wanted_positions && labels == wanted_labels;
}

int main() {
  int failures = 0;
  for (const int size : {1, 8}) {
    for (const int64_t length : {0, 1, 7, 8, 9, 200, 513}) {
      for (const bool all_maskable : {true, false}) {
        for (const uint64_t kept_bits : {~uint64_t{0}, uint64_t{3} << 62, uint64_t{1}, uint64_t{0}}) {
          if (check(size, length, all_maskable, kept_bits)) continue;
          ++failures;
          std::printf("wrong choice: %d threads, T = %lld, %s, kept bits %llx\n", size,
                      static_cast<long long>(length), all_maskable ? "all" : "some",
                      static_cast<unsigned long long>(kept_bits));
        }
      }
    }
  }
  return failures == 0 ? 0 : 1;
}
