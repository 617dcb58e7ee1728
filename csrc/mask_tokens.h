// Masking of one row of tokens: the code that the CPU op and the CUDA kernel both run.
//
//   B batch, T tokens of a row, n maskable tokens of the row, k tokens to choose, P output slots
//
// A row is worked on by a *group*: one thread on the CPU, a thread block on the GPU. A group offers
//   rank(), size()             which thread of the group this is, and of how many
//   sync()                     barrier; what was written before it is seen after it
//   increment(counter)         adds one to a shared counter; integers, so any order gives one result
//   exclusive_sum(x, &total)   sum of x over the lower ranks, and over all; every thread calls it
#pragma once

#include <cstdint>

#include "philox.h"

// A group's members are host functions in one instantiation and __device__ functions in another.
#if defined(__CUDACC__)
#define FASTPLM_GROUP_CODE _Pragma("nv_exec_check_disable")
#else
#define FASTPLM_GROUP_CODE
#endif

namespace fastplm {

constexpr int64_t kUnusedPosition = -1;
constexpr int64_t kUnusedLabel = -100;

// One call of the op: dense row-major tensors, and probabilities as round(p * 2^32), so that a
// random choice is a comparison of integers.
template <typename Id>
struct MaskTokensCall {
  const Id* input_ids;          // [B, T]
  const bool* maskable;         // [B, T], or null: every token
  const int64_t* sample_index;  // [B], or null: the number of the row
  const int64_t* seed;          // []
  Id* output_ids;               // [B, T]
  int64_t* positions;           // [P]
  int64_t* labels;              // [P]
  int64_t* count;               // []
  int64_t rows;                 // B
  int64_t length;               // T
  int64_t capacity;             // most tokens chosen in a row: P = B * capacity
  int64_t quota_scale;
  int64_t mask_below;
  int64_t random_below;
  int64_t mask_token_id;
  int64_t vocab_size;
  uint32_t step;

  FASTPLM_HD bool is_maskable(int64_t row, int64_t position) const {
    return maskable == nullptr || maskable[row * length + position];
  }

  // The k of a row, from its n.
  FASTPLM_HD int64_t quota(int64_t n) const {
    const int64_t wanted = (n * quota_scale + (int64_t{1} << 31)) >> 32;
    const int64_t at_least_one = wanted < 1 ? 1 : wanted;
    const int64_t within_row = at_least_one < n ? at_least_one : n;
    return within_row < capacity ? within_row : capacity;
  }

  // What stands in the place of a chosen token: [MASK], a random id, or the token itself.
  FASTPLM_HD int64_t replacement(const Words& words, int64_t token) const {
    if (words.x < mask_below) return mask_token_id;
    if (words.x < random_below) return (words.y * vocab_size) >> 32;
    return token;
  }
};

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;

// Memory that the threads of a group share.
struct GroupScratch {
  uint32_t histogram[kDigits];
  uint32_t digit;   // the digit of the key looked for
  uint32_t below;   // keys of a lower digit
  uint32_t inside;  // keys of that digit
};

// Chosen are all keys whose high bits are below `prefix` and, of those whose high bits equal it,
// the first `ties` by position.
struct Threshold {
  uint64_t prefix;
  int shift;  // of the high bits
  uint32_t ties;
};

FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD int64_t count_maskable(Group& group, const MaskTokensCall<Id>& call, int64_t row) {
  uint32_t mine = 0;
  for (int64_t position = group.rank(); position < call.length; position += group.size()) {
    mine += call.is_maskable(row, position);
  }
  uint32_t total;
  group.exclusive_sum(mine, &total);
  return total;
}

// Radix selection of the quota-th smallest key, from the highest digit down. A digit costs O(T),
// and random keys are told apart by the first two or three.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD Threshold select_threshold(Group& group, GroupScratch& scratch,
                                      const MaskTokensCall<Id>& call, int64_t row, int64_t quota,
                                      const uint64_t* keys) {
  Threshold threshold{0, 64, static_cast<uint32_t>(quota)};
  do {
    const int above = threshold.shift;
    threshold.shift -= kDigitBits;
    for (int digit = group.rank(); digit < kDigits; digit += group.size()) {
      scratch.histogram[digit] = 0;
    }
    group.sync();
    for (int64_t position = group.rank(); position < call.length; position += group.size()) {
      // The first digit is looked at in all keys; C++ has no shift by 64.
      if (!call.is_maskable(row, position) ||
          (above < 64 && keys[position] >> above != threshold.prefix)) {
        continue;
      }
      group.increment(&scratch.histogram[(keys[position] >> threshold.shift) & (kDigits - 1)]);
    }
    group.sync();
    uint32_t counted = 0;
    for (int first = 0; first < kDigits && counted < threshold.ties; first += group.size()) {
      const int digit = first + group.rank();
      const uint32_t inside = digit < kDigits ? scratch.histogram[digit] : 0;
      uint32_t total;
      const uint32_t below = counted + group.exclusive_sum(inside, &total);
      if (below < threshold.ties && threshold.ties <= below + inside) {
        scratch.digit = digit;
        scratch.below = below;
        scratch.inside = inside;
      }
      counted += total;
    }
    group.sync();
    threshold.prefix = threshold.prefix << kDigitBits | scratch.digit;
    threshold.ties -= scratch.below;
  } while (threshold.shift > 0 && threshold.ties < scratch.inside);
  return threshold;
}

template <typename Id>
FASTPLM_HD uint64_t sample_of(const MaskTokensCall<Id>& call, int64_t row) {
  return static_cast<uint64_t>(call.sample_index == nullptr ? row : call.sample_index[row]);
}

// The random order of the row's tokens: smaller keys are chosen first. A thread draws the very keys
// that it reads later on.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void draw_keys(Group& group, const MaskTokensCall<Id>& call, int64_t row,
                          uint64_t* keys) {
  // Read before the loop: for all the compiler knows, `keys` might lie over them.
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
  const uint64_t sample = sample_of(call, row);
  const int64_t length = call.length;
  const uint32_t step = call.step;
  for (int64_t position = group.rank(); position < length; position += group.size()) {
    const Words words =
        draw(seed, Stream::kMaskSelect, sample, static_cast<uint32_t>(position), step);
    keys[position] = uint64_t{words.x} << 32 | words.y;
  }
}

// Chooses, corrupts and compacts one row. `first_slot` is the number of tokens chosen in the rows
// before, `keys` [T] what draw_keys has written.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void mask_row(Group& group, GroupScratch& scratch, const MaskTokensCall<Id>& call,
                         int64_t row, int64_t quota, int64_t first_slot, const uint64_t* keys) {
  Threshold threshold{0, 0, 0};
  if (quota > 0) threshold = select_threshold(group, scratch, call, row, quota, keys);

  int64_t slot_of_tile = first_slot;
  uint32_t ties_left = threshold.ties;
  for (int64_t first = 0; first < call.length; first += group.size()) {
    const int64_t position = first + group.rank();
    const bool inside = position < call.length;
    const bool candidate = inside && quota > 0 && call.is_maskable(row, position);
    const uint64_t high_bits = candidate ? keys[position] >> threshold.shift : 0;
    const uint32_t lower = candidate && high_bits < threshold.prefix;
    const uint32_t tie = candidate && high_bits == threshold.prefix;
    // Two counts in one sum: a group has fewer than 2^16 threads.
    uint32_t total;
    const uint32_t before = group.exclusive_sum(lower | tie << 16, &total);
    const uint32_t ties_before = before >> 16;
    const uint32_t ties_taken = ties_before < ties_left ? ties_before : ties_left;
    if (inside) {
      const int64_t flat = row * call.length + position;
      int64_t token = call.input_ids[flat];
      if (lower || (tie && ties_before < ties_left)) {
        const int64_t slot = slot_of_tile + (before & 0xFFFF) + ties_taken;
        call.positions[slot] = flat;
        call.labels[slot] = token;
        token = call.replacement(
            draw(static_cast<uint64_t>(*call.seed), Stream::kMaskReplace, sample_of(call, row),
                 static_cast<uint32_t>(position), call.step),
            token);
      }
      call.output_ids[flat] = static_cast<Id>(token);
    }
    const uint32_t ties_of_tile = total >> 16 < ties_left ? total >> 16 : ties_left;
    slot_of_tile += (total & 0xFFFF) + ties_of_tile;
    ties_left -= ties_of_tile;
  }
}

}  // namespace fastplm
