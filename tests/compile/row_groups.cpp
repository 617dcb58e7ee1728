// The row algorithms, run by a group of cooperating threads as on the GPU, but on threads of the
// CPU: eight threads must write what one writes. ThreadSanitizer shows a missing barrier,
// AddressSanitizer a stray access. test_csrc.py builds and runs this.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "index/bart_noise.h"
#include "index/corrupt_spans.h"
#include "index/mask_tokens.h"

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
  static constexpr bool kAlone = false;
  static constexpr int kLanes = 1;
  int rank_;
  int size_;
  Barrier* barrier;
  uint64_t* values;  // [size]

  int rank() const { return rank_; }
  int size() const { return size_; }
  void sync() const { barrier->wait(); }
  void add(uint64_t* counter, uint64_t value) const {
    __atomic_fetch_add(counter, value, __ATOMIC_RELAXED);
  }
  template <typename Sum>
  Sum exclusive_sum(Sum value, Sum* total) const {
    values[rank_] = value;
    sync();
    const Sum before = std::accumulate(values, values + rank_, Sum{0});
    *total = std::accumulate(values + rank_, values + size_, before);
    sync();
    return before;
  }
  uint64_t minimum(uint64_t value) const {
    values[rank_] = value;
    sync();
    value = *std::min_element(values, values + size_);
    sync();
    return value;
  }
};

// Runs function(group) on all threads of a group of `size`, or on one thread alone if it is 1.
template <typename Function>
void run_group(int size, const Function& function) {
  if (size == 1) {
    OneThread group;
    function(group);
    return;
  }
  Barrier barrier(size);
  std::vector<uint64_t> values(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Threads group{rank, size, &barrier, values.data()};
      function(group);
    });
  }
  for (auto& thread : threads) thread.join();
}

// select_prefix against its definition. Random keys all differ; `kept_bits` makes some equal.
bool select_is_right(int size, int64_t items, uint32_t kept_bits, uint32_t heaviest) {
  std::mt19937 random(static_cast<uint32_t>(items) + kept_bits);
  std::vector<uint32_t> keys(items), weights(items);
  for (auto& key : keys) key = random() & kept_bits;
  for (auto& weight : weights) weight = random() % (heaviest + 1);
  const uint64_t budget = static_cast<uint64_t>(items * heaviest) / 5;

  std::vector<int64_t> order;
  for (int64_t i = 0; i < items; ++i) {
    if (weights[i] > 0) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return keys[a] < keys[b]; });
  std::vector<bool> wanted(items);
  uint64_t sum = 0;
  for (const int64_t i : order) {
    if (sum + weights[i] > budget) break;
    sum += weights[i];
    wanted[i] = true;
  }

  SelectScratch scratch{};
  bool right = true;
  run_group(size, [&](auto& group) {
    const Prefix prefix = select_prefix(
        group, scratch, items, budget, [&](int64_t i) { return order_of(keys[i], i); },
        [&](int64_t i) { return weights[i]; });
    if (group.rank() != 0) return;
    right = prefix.weight == sum;
    for (int64_t i = 0; i < items; ++i) {
      right &= weights[i] == 0 || prefix.has(order_of(keys[i], i)) == wanted[i];
    }
  });
  return right;
}

struct Masked {
  std::vector<int64_t> output, positions, labels;
  int64_t count, dropped;
  bool operator==(const Masked& other) const {
    return output == other.output && positions == other.positions && labels == other.labels &&
           count == other.count && dropped == other.dropped;
  }
};

Masked mask(int size, int64_t length, int64_t max_ngram, int64_t chosen_below, int64_t capacity,
            int64_t slots) {
  const int64_t seed = 5;
  const int64_t special[] = {7, 11};
  const auto maskable = std::make_unique<bool[]>(2 * length);
  // The second of two rows.
  std::vector<int64_t> input(2 * length), words(2 * length);
  for (int64_t i = 0; i < 2 * length; ++i) {
    input[i] = i % 13;
    // A word of seven tokens and four words of one: the short words fill the room that is left.
    words[i] = i / 11 * 8 + (i % 11 < 7 ? 0 : i % 11);
    maskable[i] = i % 19 != 2;
  }
  Masked result{std::vector<int64_t>(2 * length, -7), std::vector<int64_t>(slots, kUnusedPosition),
                std::vector<int64_t>(slots, kUnusedLabel), 0, 0};
  MaskTokensCall<int64_t> call{};
  call.rows = {nullptr, nullptr, nullptr, 2, length, 2 * length};
  call.input_ids = input.data();
  call.maskable = maskable.get();
  call.special_ids = special;
  call.special_count = 2;
  call.word_ids = words.data();
  call.seed = &seed;
  call.output_ids = result.output.data();
  call.positions = result.positions.data();
  call.labels = result.labels.data();
  call.slots = slots;
  call.capacity = capacity;
  call.quota_scale = int64_t{1} << 30;
  call.chosen_below = chosen_below;
  call.mask_below = int64_t{1} << 31;
  call.random_below = int64_t{3} << 30;
  call.mask_token_id = 1;
  call.vocab_size = 13;
  call.max_ngram = max_ngram;

  SelectScratch scratch{};
  std::vector<uint32_t> keys(length + 3), sizes(length);
  std::vector<uint8_t> chosen(length);
  run_group(size, [&](auto& group) {
    int64_t dropped;
    const int64_t count = choose_row(group, scratch, call, 1,
                                     {keys.data(), sizes.data(), chosen.data()}, &dropped);
    write_row(group, call, 1, 0, chosen.data());
    if (group.rank() == 0) {
      result.count = count;
      result.dropped = dropped;
    }
  });
  return result;
}

struct Corrupted {
  std::vector<int64_t> inputs, labels, lengths;
  int64_t dropped;
  bool operator==(const Corrupted& other) const {
    return inputs == other.inputs && labels == other.labels && lengths == other.lengths &&
           dropped == other.dropped;
  }
};

std::vector<int64_t> counting(int64_t first, int64_t length) {
  std::vector<int64_t> numbers(length);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

Corrupted corrupt(int size, int64_t length, int64_t density, int64_t sentinels) {
  const int64_t seed = 5;
  const int64_t sample = 3;
  const std::vector<int64_t> input = counting(100, length);
  const std::vector<int64_t> sentinel_ids = counting(20, sentinels);
  CorruptSpansCall<int64_t> call{};
  call.rows = {nullptr, nullptr, &sample, 1, length, length};
  call.max_length = length;
  call.sentinels = sentinels;
  call.noise_scale = density;
  call.span_scale = (int64_t{1} << 32) / 3 + 1;  // spans of three tokens on average
  call.eos_token_id = 1;
  Corrupted result{std::vector<int64_t>(call.input_width(), -7),
                   std::vector<int64_t>(call.label_width(), -7), {-7, -7}, 0};
  call.input_ids = input.data();
  call.sentinel_ids = sentinel_ids.data();
  call.seed = &seed;
  call.output_ids = result.inputs.data();
  call.labels = result.labels.data();
  call.input_lengths = &result.lengths[0];
  call.label_lengths = &result.lengths[1];

  SelectScratch scratch{};
  std::vector<uint32_t> keys(call.keys_size());
  std::vector<uint32_t> noise(call.bounds_size()), kept(call.bounds_size());
  run_group(size, [&](auto& group) {
    corrupt_row(group, scratch, call, 0, keys.data(), {noise.data(), kept.data()});
    const int64_t dropped = count_dropped(group, call);
    if (group.rank() == 0) result.dropped = dropped;
  });
  return result;
}

Corrupted noise(int size, int64_t length, int64_t infill, int64_t permute, int64_t capacity) {
  const int64_t seed = 5;
  const int64_t sample = 3;
  const int64_t ends[] = {4, 9};
  const int64_t special[] = {2};
  std::vector<int64_t> input(length);
  for (int64_t i = 0; i < length; ++i) input[i] = 3 + i * i % 10;
  Corrupted result{std::vector<int64_t>(capacity, -7), {}, {-7}, 0};
  BartNoiseCall<int64_t> call{};
  call.rows = {nullptr, nullptr, &sample, 1, length, length};
  call.input_ids = input.data();
  call.sentence_end_ids = ends;
  call.sentence_end_count = 2;
  call.special_ids = special;
  call.special_count = 1;
  call.seed = &seed;
  call.output_ids = result.inputs.data();
  call.lengths = result.lengths.data();
  call.longest = length;
  call.capacity = capacity;
  call.mask_token_id = 2;
  call.bos_token_id = 0;
  call.eos_token_id = 1;
  call.vocab_size = 13;
  call.infill_scale = infill;
  call.permute_scale = permute;
  call.rotate_below = int64_t{1} << 32;
  call.delete_below = int64_t{1} << 29;
  call.noise_below = int64_t{1} << 30;
  call.random_below = int64_t{1} << 31;
  call.span_below.count = 6;
  for (uint32_t n = 0; n < 6; ++n) call.span_below.bounds[n] = (n + 1) << 29;

  SelectScratch scratch{};
  NoiseRow<int64_t> memory;
  std::vector<uint64_t> arrays(memory.lay_out(call, nullptr) / 8);
  memory.lay_out(call, reinterpret_cast<uint8_t*>(arrays.data()));
  run_group(size, [&](auto& group) {
    const int64_t dropped = noise_row(group, scratch, call, 0, memory);
    if (group.rank() == 0) result.dropped = dropped;
  });
  return result;
}

int main() {
  int failures = 0;
  const auto expect = [&](bool right, const char* what, int64_t length) {
    if (right) return;
    ++failures;
    std::printf("wrong: %s, T = %lld\n", what, static_cast<long long>(length));
  };
  for (const int64_t length : {0, 1, 7, 8, 9, 200, 513}) {
    for (const int size : {1, 8}) {
      for (const uint32_t kept_bits : {~0u, 3u << 30, 1u, 0u}) {
        expect(select_is_right(size, length, kept_bits, 1), "select_prefix", length);
        expect(select_is_right(size, length, kept_bits, 5), "select_prefix with weights", length);
      }
    }
    for (const int64_t max_ngram : {0, 1, 3}) {
      for (const int64_t chosen_below : {int64_t{-1}, int64_t{1} << 31}) {
        for (const int64_t capacity : {length, length / 5}) {
          for (const int64_t slots : {capacity, capacity / 3}) {
            const Masked alone = mask(1, length, max_ngram, chosen_below, capacity, slots);
            const Masked together = mask(8, length, max_ngram, chosen_below, capacity, slots);
            expect(together == alone, "mask_tokens", length);
          }
        }
      }
    }
  }
  constexpr int64_t kOne = int64_t{1} << 32;
  for (const int64_t length : {0, 1, 2, 7, 33, 300}) {
    for (const int64_t density : {kOne / 7, kOne / 2, kOne}) {
      for (const int64_t sentinels : {1, 100}) {
        const Corrupted alone = corrupt(1, length, density, sentinels);
        expect(corrupt(8, length, density, sentinels) == alone, "corrupt_spans", length);
      }
    }
    for (const int64_t infill : {int64_t{0}, kOne / 3, kOne}) {
      for (const int64_t permute : {int64_t{0}, kOne / 2, kOne}) {
        for (const int64_t capacity : {length + 2, length / 2 + 2}) {
          const Corrupted alone = noise(1, length, infill, permute, capacity);
          expect(noise(8, length, infill, permute, capacity) == alone, "bart_noise", length);
        }
      }
    }
  }
  return failures == 0 ? 0 : 1;
}
