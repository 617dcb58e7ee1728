// The CUDA kernels of csrc/ on the CPU, with grids, blocks and shared memory: they must write what
// the CPU ops write, in any order of their threads and blocks. Every array is an allocation of
// exactly its size, so that AddressSanitizer sees a stray access. test_kernels_on_threads.py builds
// and runs this.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_on_threads.h"

// Static variables of function templates serve as shared memory. AddressSanitizer guards them only
// if other files cannot have them, too, hence the namespace. Headers that csrc/ includes come
// before it.
namespace {
#include "index/kernels.cuh"
}  // namespace

namespace {

using namespace fastplm;
using cuda_on_threads::launch;

constexpr int64_t kOne = int64_t{1} << 32;  // a probability of 1
constexpr int kPoison = -7;                 // fills every output; no kernel writes it

int failures = 0;

// An array of exactly its size. A vector may own more, or nothing, where pointer arithmetic is
// undefined.
template <typename T>
struct Array {
  explicit Array(int64_t length, T value = static_cast<T>(kPoison))
      : size(length), values(new T[length]) {
    std::fill_n(values.get(), size, value);
  }
  explicit Array(const std::vector<T>& given)
      : size(static_cast<int64_t>(given.size())), values(new T[given.size()]) {
    std::copy(given.begin(), given.end(), values.get());
  }
  T* data() const { return values.get(); }
  T& operator[](int64_t i) const { return values[i]; }

  int64_t size;
  std::unique_ptr<T[]> values;
};

// Rows of a batch: padded ones, with lengths if there are any, or packed ones.
struct Shape {
  const char* name;
  int64_t count;
  int64_t stride;
  int64_t tokens;
  std::vector<int32_t> boundaries;
  std::vector<int64_t> lengths;
};

Shape padded(const char* name, int64_t count, int64_t length,
             const std::vector<int64_t>& lengths = {}) {
  return {name, count, length, count * length, {}, lengths};
}

Shape packed(const char* name, const std::vector<int32_t>& boundaries, int64_t tokens) {
  return {name, static_cast<int64_t>(boundaries.size()) - 1, 0, tokens, boundaries, {}};
}

// The boundaries of so many rows of three tokens; the first row begins at token 2.
std::vector<int32_t> every_third(int rows) {
  std::vector<int32_t> boundaries(rows + 1);
  for (int row = 0; row <= rows; ++row) boundaries[row] = 2 + 3 * row;
  return boundaries;
}

struct Batch {
  explicit Batch(const Shape& shape)
      : boundaries(shape.boundaries),
        lengths(shape.lengths),
        sample_index(shape.count),
        rows{boundaries.size > 0 ? boundaries.data() : nullptr,
             lengths.size > 0 ? lengths.data() : nullptr,
             sample_index.data(),
             shape.count,
             shape.stride,
             shape.tokens} {
    for (int64_t row = 0; row < shape.count; ++row) sample_index[row] = (row + 1) << 31;
    for (int64_t row = 0; row < shape.count; ++row) longest = std::max(longest, rows.length(row));
  }
  Array<int32_t> boundaries;
  Array<int64_t> lengths;
  Array<int64_t> sample_index;
  Rows rows;
  int64_t longest = 0;
};

template <typename Id>
Array<Id> tokens_of(const Shape& shape) {
  Array<Id> ids(shape.tokens);
  for (int64_t i = 0; i < shape.tokens; ++i) ids[i] = static_cast<Id>(3 + i * i % 10);
  return ids;
}

template <typename T>
void expect_same(const std::string& what, const char* output, const Array<T>& got,
                 const Array<T>& wanted) {
  for (int64_t i = 0; i < got.size; ++i) {
    if (got[i] == wanted[i] && got[i] != static_cast<T>(kPoison)) continue;
    ++failures;
    std::printf("%s: %s[%lld] is %lld, not %lld\n", what.c_str(), output,
                static_cast<long long>(i), static_cast<long long>(got[i]),
                static_cast<long long>(wanted[i]));
    return;
  }
}

// How to run a call: by the CPU op, or by the kernels in either order.
enum class By { kCpu, kBlocks, kBlocksBackwards };

// A stray access shows in any order.
const std::vector<By> kRuns = kBlocksTogether
                                  ? std::vector<By>{By::kBlocks, By::kBlocksBackwards}
                                  : std::vector<By>{By::kBlocks};

// ---- the group

// Each is called twice: the writes of the second call must not disturb threads that still read
// results of the first.
__global__ void group_kernel(uint64_t* output) {
  __shared__ uint64_t warp_values[kWarps];
  const ThreadBlock block(warp_values);
  const int64_t rank = block.rank();
  uint64_t* const mine = output + 6 * rank;
  int64_t total;
  uint32_t short_total;
  mine[0] = block.minimum(1000 - rank);
  mine[1] = block.minimum(rank + 3);
  mine[2] = block.exclusive_sum(rank, &total);
  mine[3] = total;
  mine[4] = block.exclusive_sum(uint32_t{1} << 31, &short_total);
  mine[5] = short_total;
}

void check_group() {
  for (const bool backwards : {false, true}) {
    Array<uint64_t> got(6 * kThreads), wanted(6 * kThreads);
    launch(backwards, group_kernel, 1, got.data());
    for (uint64_t rank = 0; rank < kThreads; ++rank) {
      const uint64_t right[] = {745, 3, rank * (rank - 1) / 2, 32640, rank % 2 << 31, 0};
      std::copy(std::begin(right), std::end(right), wanted.data() + 6 * rank);
    }
    expect_same("ThreadBlock", "sums and minima", got, wanted);
  }
}

// ---- mask_tokens

struct MaskSettings {
  int64_t max_ngram;
  int64_t chosen_below;
  int64_t capacity;
  int64_t slots;
};

template <typename Id>
struct Masked {
  Array<Id> output_ids;
  Array<int64_t> positions, labels, count, dropped;
};

template <typename Id>
void mask_by_rows(const MaskTokensCall<Id>& call, int64_t longest) {
  OneThread group;
  SelectScratch scratch{};
  Rows rows = call.rows;
  if (!rows_are_apart(group, rows)) rows.count = 0;  // then nothing is chosen
  Array<uint32_t> keys(longest + 3), sizes(longest);
  Array<uint8_t> chosen(rows.tokens);
  int64_t dropped = 0;
  std::vector<int64_t> first_slot(rows.count + 1);
  for (int64_t row = 0; row < rows.count; ++row) {
    const MaskRow memory{keys.data(), sizes.data(), chosen.data() + rows.begin(row)};
    int64_t of_row;
    first_slot[row + 1] = first_slot[row] + choose_row(group, scratch, call, row, memory, &of_row);
    dropped += of_row;
  }
  for (int64_t row = 0; row < rows.count; ++row) {
    write_row(group, call, row, first_slot[row], chosen.data() + rows.begin(row));
  }
  if (rows.count == 0) std::copy_n(call.input_ids, rows.tokens, call.output_ids);
  const int64_t total = first_slot[rows.count];
  *call.count = std::min(total, call.slots);
  *call.dropped = dropped + total - *call.count;
  std::fill(call.positions + *call.count, call.positions + call.slots, kUnusedPosition);
  std::fill(call.labels + *call.count, call.labels + call.slots, kUnusedLabel);
}

template <typename Id>
void mask_by_blocks(const MaskTokensCall<Id>& call, bool backwards) {
  const int64_t count = call.rows.count;
  const int64_t tokens = call.rows.tokens;
  // The launches of csrc/index/cuda.cu.
  const bool all_short = call.rows.cu_seqlens == nullptr && call.rows.stride <= kSharedTokens;
  Array<uint32_t> keys(all_short ? 0 : tokens + 4 * count), sizes(all_short ? 0 : tokens);
  Array<uint8_t> chosen(tokens);
  Array<int64_t> counts(count), first_slots(count), dropped(count);
  Array<bool> apart(1);
  const bool is_packed = call.rows.cu_seqlens != nullptr;
  const MaskScratch memory{keys.data(),        sizes.data(),   chosen.data(), counts.data(),
                           first_slots.data(), dropped.data(), is_packed ? apart.data() : nullptr};
  if (is_packed) launch(backwards, mask_tokens_check_kernel<Id>, 1, call, memory);
  launch(backwards, mask_tokens_choose_kernel<Id>, count, call, memory);
  launch(backwards, mask_tokens_place_kernel<Id>, 1, call, memory);
  launch(backwards, mask_tokens_write_kernel<Id>, count, call, memory);
}

template <typename Id>
Masked<Id> mask(const Shape& shape, const MaskSettings& settings, By by) {
  const Batch batch(shape);
  const Array<Id> ids = tokens_of<Id>(shape);
  Array<bool> maskable(shape.tokens);
  Array<int64_t> words(shape.tokens);
  for (int64_t i = 0; i < shape.tokens; ++i) {
    // A word of seven tokens and four words of one: the short words fill the room that is left.
    words[i] = i / 11 * 8 + (i % 11 < 7 ? 0 : i % 11);
    maskable[i] = i % 19 != 2;
  }
  const Array<int64_t> special(std::vector<int64_t>{7, 11});
  const Array<int64_t> seed(1, 5);
  Masked<Id> result{Array<Id>(shape.tokens), Array<int64_t>(settings.slots),
                    Array<int64_t>(settings.slots), Array<int64_t>(1), Array<int64_t>(1)};
  MaskTokensCall<Id> call{};
  call.rows = batch.rows;
  call.input_ids = ids.data();
  call.maskable = maskable.data();
  call.special_ids = special.data();
  call.special_count = special.size;
  call.word_ids = words.data();
  call.seed = seed.data();
  call.output_ids = result.output_ids.data();
  call.positions = result.positions.data();
  call.labels = result.labels.data();
  call.count = result.count.data();
  call.dropped = result.dropped.data();
  call.slots = settings.slots;
  call.capacity = settings.capacity;
  call.quota_scale = kOne / 4;
  call.chosen_below = settings.chosen_below;
  call.mask_below = kOne / 2;
  call.random_below = kOne / 4 * 3;
  call.mask_token_id = 1;
  call.vocab_size = 13;
  call.max_ngram = settings.max_ngram;
  call.step = 2;
  if (by == By::kCpu) {
    mask_by_rows(call, batch.longest);
  } else {
    mask_by_blocks(call, by == By::kBlocksBackwards);
  }
  return result;
}

template <typename Id>
void check_mask(const Shape& shape, const MaskSettings& settings) {
  for (const By by : kRuns) {
    const Masked<Id> got = mask<Id>(shape, settings, by);
    const Masked<Id> wanted = mask<Id>(shape, settings, By::kCpu);
    const std::string what = std::string("mask_tokens, ") + shape.name + ", max_ngram " +
                             std::to_string(settings.max_ngram) +
                             (settings.chosen_below < 0 ? ", exact" : ", bernoulli");
    expect_same(what, "output_ids", got.output_ids, wanted.output_ids);
    expect_same(what, "positions", got.positions, wanted.positions);
    expect_same(what, "labels", got.labels, wanted.labels);
    expect_same(what, "count", got.count, wanted.count);
    expect_same(what, "dropped", got.dropped, wanted.dropped);
  }
}

// Runs only the kernel for the slots of rows, as the others take long for many rows. The last rows
// have no slots left.
void check_place() {
  for (const int64_t rows : {1, 255, 256, 257, 511, 512, 513, 70001}) {
    Array<int64_t> counts(rows), dropped(rows), wanted(rows), wanted_sums(2);
    int64_t slot = 0;
    wanted_sums[1] = 0;
    for (int64_t row = 0; row < rows; ++row) {
      counts[row] = row * row % 11;
      dropped[row] = row % 3;
      wanted[row] = slot;
      slot += counts[row];
      wanted_sums[1] += dropped[row];
    }
    const int64_t few = slot / 2 + 1;
    wanted_sums[0] = std::min(slot, few);
    wanted_sums[1] += slot - wanted_sums[0];
    for (const bool backwards : {false, true}) {
      Array<int64_t> slots(rows), sums(2);
      MaskTokensCall<int64_t> call{};
      call.rows.count = rows;
      call.slots = few;
      call.count = sums.data();
      call.dropped = sums.data() + 1;
      const MaskScratch memory{nullptr,      nullptr,        nullptr, counts.data(),
                               slots.data(), dropped.data(), nullptr};
      launch(backwards, mask_tokens_place_kernel<int64_t>, 1, call, memory);
      const std::string what = "mask_tokens, slots of " + std::to_string(rows) + " rows";
      expect_same(what, "first_slots", slots, wanted);
      expect_same(what, "count and dropped", sums, wanted_sums);
    }
  }
}

// ---- corrupt_spans

struct SpanSettings {
  int64_t max_length;
  int64_t sentinels;
  bool has_eos;
};

template <typename Id>
struct Corrupted {
  Array<Id> output_ids;
  Array<int64_t> labels, input_lengths, label_lengths, dropped;
};

template <typename Id>
Corrupted<Id> corrupt(const Shape& shape, const SpanSettings& settings, By by) {
  const Batch batch(shape);
  const Array<Id> ids = tokens_of<Id>(shape);
  Array<int64_t> sentinels(settings.sentinels);
  for (int64_t i = 0; i < sentinels.size; ++i) sentinels[i] = 100 + i;
  const Array<int64_t> seed(1, 5);
  SpanPlan plan{};
  plan.step = 2;
  plan.max_length = settings.max_length;
  plan.noise_scale = kOne / 4;
  plan.span_scale = kOne / 3 + 1;
  plan.eos_token_id = settings.has_eos ? 1 : -1;
  plan.pad_token_id = 0;
  plan.sentinels = sentinels.size;
  Corrupted<Id> result{Array<Id>(shape.count * plan.input_width()),
                       Array<int64_t>(shape.count * plan.label_width()),
                       Array<int64_t>(shape.count), Array<int64_t>(shape.count),
                       Array<int64_t>(1)};
  CorruptSpansCall<Id> call{plan, batch.rows};
  call.input_ids = ids.data();
  call.sentinel_ids = sentinels.data();
  call.seed = seed.data();
  call.output_ids = result.output_ids.data();
  call.labels = result.labels.data();
  call.input_lengths = result.input_lengths.data();
  call.label_lengths = result.label_lengths.data();
  call.dropped = result.dropped.data();
  const int64_t rows = by == By::kCpu ? 1 : shape.count;
  Array<uint32_t> keys(rows * plan.keys_size()), bounds(rows * 2 * plan.bounds_size());
  if (by == By::kCpu) {
    OneThread group;
    SelectScratch scratch{};
    *call.dropped = count_dropped(group, call);
    for (int64_t row = 0; row < shape.count; ++row) {
      corrupt_row(group, scratch, call, row, keys.data(),
                  {bounds.data(), bounds.data() + plan.bounds_size()});
    }
  } else {
    launch(by == By::kBlocksBackwards, corrupt_spans_kernel<Id>, shape.count, call, keys.data(),
           bounds.data());
  }
  return result;
}

template <typename Id>
void check_corrupt(const Shape& shape, const SpanSettings& settings) {
  for (const By by : kRuns) {
    const Corrupted<Id> got = corrupt<Id>(shape, settings, by);
    const Corrupted<Id> wanted = corrupt<Id>(shape, settings, By::kCpu);
    const std::string what = std::string("corrupt_spans, ") + shape.name + ", max_length " +
                             std::to_string(settings.max_length);
    expect_same(what, "input_ids", got.output_ids, wanted.output_ids);
    expect_same(what, "labels", got.labels, wanted.labels);
    expect_same(what, "input_lengths", got.input_lengths, wanted.input_lengths);
    expect_same(what, "label_lengths", got.label_lengths, wanted.label_lengths);
    expect_same(what, "dropped", got.dropped, wanted.dropped);
  }
}

// ---- bart_noise

struct NoiseSettings {
  int64_t longest;
  int64_t capacity;
  int64_t infill_scale;
  int64_t permute_scale;
  int64_t noise_below;
};

template <typename Id>
struct Noised {
  Array<Id> output_ids;
  Array<int64_t> lengths, dropped;
};

template <typename Id>
Noised<Id> noise(const Shape& shape, const NoiseSettings& settings, By by) {
  const Batch batch(shape);
  const Array<Id> ids = tokens_of<Id>(shape);
  const Array<int64_t> ends(std::vector<int64_t>{4, 9});
  const Array<int64_t> special(1, 2);
  const Array<int64_t> seed(1, 5);
  Noised<Id> result{Array<Id>(shape.count * settings.capacity), Array<int64_t>(shape.count),
                    Array<int64_t>(1, 0)};
  BartNoiseCall<Id> call{};
  call.rows = batch.rows;
  call.input_ids = ids.data();
  call.sentence_end_ids = ends.data();
  call.sentence_end_count = ends.size;
  call.special_ids = special.data();
  call.special_count = special.size;
  call.seed = seed.data();
  call.output_ids = result.output_ids.data();
  call.lengths = result.lengths.data();
  call.dropped = result.dropped.data();
  call.longest = settings.longest;
  call.capacity = settings.capacity;
  call.mask_token_id = 2;
  call.pad_token_id = 14;
  call.bos_token_id = 0;
  call.eos_token_id = 1;
  call.vocab_size = 13;
  call.infill_scale = settings.infill_scale;
  call.permute_scale = settings.permute_scale;
  call.rotate_below = kOne / 2;
  call.delete_below = settings.noise_below / 2;
  call.noise_below = settings.noise_below;
  call.random_below = kOne / 2;
  call.step = 2;
  call.span_below.count = 6;
  for (uint32_t n = 0; n < 6; ++n) call.span_below.bounds[n] = (n + 1) << 29;

  const int64_t row_bytes = NoiseRow<Id>{}.lay_out(call, nullptr);
  if (by == By::kCpu) {
    Array<uint8_t> table(call.vocab_size, 0);
    for (int64_t i = 0; i < ends.size; ++i) table[ends[i]] = 1;
    call.sentence_end_table = table.data();
    OneThread group;
    SelectScratch scratch{};
    Array<uint8_t> arrays(row_bytes);
    NoiseRow<Id> memory;
    memory.lay_out(call, arrays.data());
    for (int64_t row = 0; row < shape.count; ++row) {
      *call.dropped += noise_row(group, scratch, call, row, memory);
    }
  } else {
    Array<uint8_t> memory(shape.count * row_bytes);
    launch(by == By::kBlocksBackwards, bart_noise_kernel<Id>, shape.count, call, memory.data(),
           row_bytes);
  }
  return result;
}

template <typename Id>
void check_noise(const Shape& shape, const NoiseSettings& settings) {
  for (const By by : kRuns) {
    const Noised<Id> got = noise<Id>(shape, settings, by);
    const Noised<Id> wanted = noise<Id>(shape, settings, By::kCpu);
    const std::string what = std::string("bart_noise, ") + shape.name + ", capacity " +
                             std::to_string(settings.capacity);
    expect_same(what, "output_ids", got.output_ids, wanted.output_ids);
    expect_same(what, "lengths", got.lengths, wanted.lengths);
    expect_same(what, "dropped", got.dropped, wanted.dropped);
  }
}

// ----

// Calls function(Id{}).
template <typename Function>
void with_either_id(bool wide, const Function& function) {
  if (wide) {
    function(int64_t{});
  } else {
    function(int32_t{});
  }
}

void check_all() {
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  const std::vector<Shape> small = {
      padded("one token a row", 3, 1),
      padded("33 tokens a row", 3, 33),
      padded("300 tokens a row", 3, 300),
      padded("one row", 1, 300),
      packed("packed rows, some empty, tokens before and behind", {5, 5, 38, 338, 338, 339, 339},
             350),
  };
  const std::vector<Shape> large = {
      padded("what just fits in shared memory", 1, kSharedTokens),
      padded("one token more than fits in shared memory", 2, kSharedTokens + 1),
      packed("packed rows of both memories", {3, 4109, 4200, 8302}, 8310),
  };
  // Rows whose boundaries descend, overlap or leave the tokens; also long ones.
  const std::vector<Shape> hostile = {
      packed("hostile boundaries", {7, 60, 20, 90, -5, 200, 30, 101, kMost, kLeast, 64, 50}, 100),
      packed("long rows that overlap", {kLeast, 4200, 50, 4300, 10, kMost}, 4301),
  };

  // Enough room or not, int32 or int64: each mode meets each of these in some shape.
  int number = 0;
  for (const auto* shapes : {&small, &large, &hostile}) {
    for (const Shape& shape : *shapes) {
      for (const int64_t max_ngram : {0, 1, 3}) {
        for (const int64_t chosen_below : {int64_t{-1}, kOne / 2}) {
          const int64_t capacity = number % 2 == 0 ? shape.tokens : shape.tokens / 9 + 1;
          const int64_t slots = number % 2 == 0 ? shape.tokens + 300 : shape.tokens / 7 + 1;
          with_either_id(number / 2 % 2 == 0, [&](auto id) {
            check_mask<decltype(id)>(shape, {max_ngram, chosen_below, capacity, slots});
          });
          ++number;
        }
      }
      ++number;
    }
  }

  // The threads that place rows have two rows each, then one, then none.
  const Shape many = packed("more rows than a block has threads", every_third(kThreads + 3),
                            3 * kThreads + 20);
  check_mask<int32_t>(many, {0, kOne / 2, 3, many.tokens / 3});

  // No two rows of these ops write the same memory.
  std::vector<Shape> others = small;
  others.push_back(large.back());
  others.push_back(hostile.front());
  others.push_back(padded("lengths", 3, 33, {33, 0, 17}));
  others.push_back(padded("hostile lengths", 3, 33, {-4, 34, int64_t{1} << 40}));
  for (const Shape& shape : others) {
    const int64_t longest = Batch(shape).longest;
    for (const bool wide : {false, true}) {
      with_either_id(wide, [&](auto id) {
        using Id = decltype(id);
        check_corrupt<Id>(shape, wide ? SpanSettings{longest, 100, true}
                                      : SpanSettings{longest / 2 + 1, 3, false});
        check_noise<Id>(shape, wide ? NoiseSettings{longest, longest + 2, kOne / 3, kOne, kOne / 4}
                                    : NoiseSettings{longest, longest / 2 + 2, kOne / 3, 0, 0});
        check_noise<Id>(shape, wide ? NoiseSettings{longest / 2 + 1, longest + 1, kOne, kOne / 2, 0}
                                    : NoiseSettings{longest, longest + 9, 0, kOne / 2, kOne});
      });
    }
  }
}

}  // namespace

int main() {
  std::setvbuf(stdout, nullptr, _IONBF, 0);  // so that a crash loses no message
  check_group();
  check_place();
  check_all();
  return failures == 0 ? 0 : 1;
}
