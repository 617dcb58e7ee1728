// Masking of one row of tokens: the code that the CPU op and the CUDA kernels both run.
//
//   n  tokens of the row that may be chosen        k  tokens to choose
//   A unit is chosen as a whole: a token, a word, or a run of one to `max_ngram` words. The unit's
//   first token represents it, and has its key.
#pragma once

#include <cstdint>

#include "common/arguments.h"
#include "common/philox.h"
#include "common/rows.h"
#include "index/select.h"

namespace fastplm {

constexpr int64_t kUnusedPosition = -1;
constexpr int64_t kUnusedLabel = -100;

// The op's arguments that are not tensors. Probabilities are round(p * 2^32), so that a random
// choice is a comparison of integers.
#define FASTPLM_MASK_TOKENS_SETTINGS(ARGUMENT)                                                  \
  ARGUMENT(uint32_t, step)                                                                      \
  ARGUMENT(int64_t, capacity) /* most tokens chosen in a row */                                 \
  ARGUMENT(int64_t, slots) /* P */                                                              \
  ARGUMENT(int64_t, quota_scale) /* the share of tokens to choose, or */                        \
  ARGUMENT(int64_t, chosen_below) /* if not negative: choose each unit whose key is below it */ \
  ARGUMENT(int64_t, mask_below) ARGUMENT(int64_t, random_below)                                 \
  ARGUMENT(int64_t, mask_token_id) ARGUMENT(int64_t, vocab_size)                                \
  ARGUMENT(int64_t, max_ngram) /* 0: the units are tokens; 1: words; more: runs of words */
FASTPLM_ARGUMENTS(MaskTokensSettings, FASTPLM_MASK_TOKENS_SETTINGS)

// One call of the op.
template <typename Id>
struct MaskTokensCall : MaskTokensSettings {
  Rows rows;
  const Id* input_ids;         // [tokens]
  const bool* maskable;        // [tokens], or null: every token
  const int64_t* special_ids;  // [special_count], ascending
  int64_t special_count;
  const int64_t* word_ids;  // [tokens]; null if max_ngram is 0
  const int64_t* seed;      // []
  Id* output_ids;           // [tokens]
  int64_t* positions;       // [slots]
  int64_t* labels;          // [slots]
  int64_t* count;           // []
  int64_t* dropped;         // []

  // The number of a row's n tokens to choose, before the capacity limits it.
  FASTPLM_HD int64_t share(int64_t n) const {
    const int64_t rounded = share_of(n, quota_scale);
    const int64_t at_least_one = rounded < 1 ? 1 : rounded;
    return at_least_one < n ? at_least_one : n;
  }

  // The id that replaces a chosen token: [MASK], a random id that is not special, or its own.
  FASTPLM_HD int64_t replacement(const Words& words, int64_t token) const {
    if (words.x < mask_below) return mask_token_id;
    if (words.x >= random_below) return token;
    int64_t id = choice(words.y, vocab_size - special_count);
    for (int64_t i = 0; i < special_count; ++i) id += special_ids[i] <= id;
    return id;
  }
};

// The length of a run of words: n with a probability proportional to 1/n (Lan et al. 2020, §4.2).
class NgramLengths {
 public:
  FASTPLM_HD explicit NgramLengths(int64_t max_ngram) : total_(0) {
    for (int n = 1; n <= kMaxNgram; ++n) {
      total_ += n <= max_ngram ? kMultiple / n : 0;
      below_[n - 1] = total_;
    }
  }
  FASTPLM_HD uint8_t operator()(uint32_t word) const {
    const int64_t drawn = choice(word, total_);
    uint8_t length = 1;
    for (int n = 1; n < kMaxNgram; ++n) length += below_[n - 1] <= drawn;
    return length;
  }

 private:
  static constexpr int kMaxNgram = 8;
  static constexpr int64_t kMultiple = 840;  // a multiple of each of 1 … 8
  int64_t below_[kMaxNgram];
  int64_t total_;
};

// Memory of a row, shared by all threads of its group.
struct MaskRow {
  uint32_t* keys;   // [length rounded up to a multiple of 4]
  uint32_t* sizes;  // [length] tokens of the unit that begins here, or 0
  uint8_t* chosen;  // [length]
};

// chosen[i] = 1 where token i may be chosen.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void find_candidates(Group& group, const MaskTokensCall<Id>& call, int64_t begin,
                                int64_t length, uint8_t* chosen) {
  const Id* ids = call.input_ids + begin;
  const bool* maskable = call.maskable == nullptr ? nullptr : call.maskable + begin;
  for (int64_t i = group.rank(); i < length; i += group.size()) {
    chosen[i] = maskable == nullptr || maskable[i];
  }
  for (int64_t special = 0; special < call.special_count; ++special) {
    const int64_t id = call.special_ids[special];
    for (int64_t i = group.rank(); i < length; i += group.size()) chosen[i] &= ids[i] != id;
  }
}

// Writes sizes[i] from the candidates in `chosen`, with `keys` and `chosen` as scratch: neighbours
// of the same word make a unit.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void find_units(Group& group, const MaskTokensCall<Id>& call, int64_t row,
                           int64_t length, const MaskRow& memory) {
  const uint8_t* candidate = memory.chosen;
  if (call.max_ngram == 0) {
    for (int64_t i = group.rank(); i < length; i += group.size()) memory.sizes[i] = candidate[i];
    return;
  }
  const int64_t* words = call.word_ids + call.rows.begin(row);
  for (int64_t i = group.rank(); i < length; i += group.size()) {
    const bool begins = candidate[i] && (i == 0 || !candidate[i - 1] || words[i - 1] != words[i]);
    int64_t end = i + 1;
    while (begins && end < length && candidate[end] && words[end] == words[i]) ++end;
    memory.sizes[i] = begins ? end - i : 0;
  }
  if (call.max_ngram == 1) return;

  // The draws are expensive and independent, so all threads share them. The loop over words is
  // cheap.
  uint8_t* ngrams = memory.chosen;
  draw_words(group, static_cast<uint64_t>(*call.seed), Stream::kNgram, call.rows.sample(row), 0,
             call.step, length, memory.keys);
  group.sync();
  const NgramLengths draw_length(call.max_ngram);
  for (int64_t i = group.rank(); i < length; i += group.size()) {
    if (memory.sizes[i] != 0) ngrams[i] = draw_length(memory.keys[i]);
  }
  group.sync();
  if (group.rank() == 0) {
    for (int64_t i = 0; i < length;) {
      int64_t end = i + (memory.sizes[i] == 0 ? 1 : memory.sizes[i]);
      for (int64_t n = memory.sizes[i] == 0 ? 1 : ngrams[i]; n > 1; --n) {
        if (end >= length || memory.sizes[end] == 0) break;
        const int64_t next = end + memory.sizes[end];
        memory.sizes[end] = 0;
        end = next;
      }
      if (memory.sizes[i] != 0) memory.sizes[i] = static_cast<uint32_t>(end - i);
      i = end;
    }
  }
}

// Chooses units of a row in the order of their keys, each that still fits in the quota, and marks
// their tokens in memory.chosen. Returns their number; *dropped says how many more were asked for.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD int64_t choose_row(Group& group, SelectScratch& scratch, const MaskTokensCall<Id>& call,
                              int64_t row, const MaskRow& memory, int64_t* dropped) {
  const int64_t begin = call.rows.begin(row);
  const int64_t length = call.rows.length(row);
  uint32_t* keys = memory.keys;
  uint32_t* sizes = memory.sizes;
  uint8_t* chosen = memory.chosen;
  find_candidates(group, call, begin, length, chosen);
  group.sync();
  find_units(group, call, row, length, memory);
  group.sync();
  draw_words(group, static_cast<uint64_t>(*call.seed), Stream::kMaskSelect, call.rows.sample(row),
             0, call.step, length, keys);
  group.sync();

  uint32_t mine = 0;
  uint32_t tokens;
  if (call.chosen_below < 0) {
    for (int64_t i = group.rank(); i < length; i += group.size()) mine += sizes[i];
  } else {
    for (int64_t i = group.rank(); i < length; i += group.size()) {
      mine += keys[i] < call.chosen_below ? sizes[i] : 0;
    }
  }
  group.exclusive_sum(mine, &tokens);
  const int64_t wanted = call.chosen_below < 0 ? call.share(tokens) : tokens;
  const int64_t quota = wanted < call.capacity ? wanted : call.capacity;
  *dropped = wanted - quota;

  const Prefix prefix = select_prefix(
      group, scratch, length, quota, [&](int64_t i) { return order_of(keys[i], i); },
      [&](int64_t i) { return sizes[i]; });
  if (call.max_ngram == 0) {
    // Most often the keys alone decide, and 32 bits are compared twice as fast as 64.
    if (prefix.shift >= 32) {
      const int shift = prefix.shift - 32;
      const uint32_t bound = static_cast<uint32_t>(prefix.bound);
      for (int64_t i = group.rank(); i < length; i += group.size()) {
        chosen[i] = static_cast<uint8_t>(sizes[i] & (keys[i] >> shift < bound));
      }
    } else {
      for (int64_t i = group.rank(); i < length; i += group.size()) {
        chosen[i] = static_cast<uint8_t>(sizes[i] & prefix.has(order_of(keys[i], i)));
      }
    }
    group.sync();
    return static_cast<int64_t>(prefix.weight);
  }
  for (int64_t i = group.rank(); i < length; i += group.size()) {
    const bool has = prefix.has(order_of(keys[i], i));
    for (int64_t token = 0; token < sizes[i]; ++token) chosen[i + token] = has;
    if (has) sizes[i] = 0;
  }
  // A unit that is too long for what is left is skipped; the next one that fits is chosen.
  uint64_t left = static_cast<uint64_t>(quota) - prefix.weight;
  while (left > 0) {
    constexpr uint64_t kNone = ~uint64_t{0};
    uint64_t first = kNone;
    for (int64_t i = group.rank(); i < length; i += group.size()) {
      const uint64_t order = order_of(keys[i], i);
      const bool wanted_too = call.chosen_below < 0 || keys[i] < call.chosen_below;
      if (wanted_too && sizes[i] != 0 && sizes[i] <= left && order < first) first = order;
    }
    first = group.minimum(first);
    if (first == kNone) break;
    const uint32_t unit = static_cast<uint32_t>(first);
    const uint32_t size = sizes[unit];
    group.sync();
    if (group.rank() == 0) {
      for (uint32_t token = 0; token < size; ++token) chosen[unit + token] = 1;
      sizes[unit] = 0;
    }
    left -= size;
    group.sync();
  }
  group.sync();
  const int64_t count = quota - static_cast<int64_t>(left);
  if (call.chosen_below >= 0) *dropped = wanted - count;
  return count;
}

// Whether the boundaries of packed rows ascend. If rows overlapped, groups would write the same
// tokens. The CPU op refuses such rows; a GPU cannot check them in time, so it chooses nothing.
FASTPLM_GROUP_CODE
template <typename Group>
FASTPLM_HD bool rows_are_apart(Group& group, const Rows& rows) {
  if (rows.cu_seqlens == nullptr) return true;
  uint32_t mine = 0;
  uint32_t falls;
  for (int64_t row = group.rank(); row < rows.count; row += group.size()) {
    mine += rows.cu_seqlens[row] > rows.cu_seqlens[row + 1];
  }
  group.exclusive_sum(mine, &falls);
  return falls == 0;
}

// Copies the tokens that are in no row: those before the first packed row and after the last.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void copy_outside_rows(Group& group, const MaskTokensCall<Id>& call, int64_t row) {
  const int64_t first = row == 0 ? call.rows.begin(row) : 0;
  for (int64_t i = group.rank(); i < first; i += group.size()) {
    call.output_ids[i] = call.input_ids[i];
  }
  if (row != call.rows.count - 1) return;
  const int64_t end = call.rows.begin(row) + call.rows.length(row);
  for (int64_t i = end + group.rank(); i < call.rows.tokens; i += group.size()) {
    call.output_ids[i] = call.input_ids[i];
  }
}

// Writes the choice in a row: positions and labels from slot `first_slot` on, and the corrupted
// tokens.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void write_row(Group& group, const MaskTokensCall<Id>& call, int64_t row,
                          int64_t first_slot, const uint8_t* chosen) {
  const int64_t begin = call.rows.begin(row);
  const int64_t length = call.rows.length(row);
  const Id* ids = call.input_ids + begin;
  Id* out = call.output_ids + begin;
  for (int64_t i = group.rank(); i < length; i += group.size()) out[i] = ids[i];
  copy_outside_rows(group, call, row);
  const int64_t count = for_each_flagged(
      group, length, [&](int64_t i) { return chosen[i]; },
      [&](int64_t i, int64_t rank) {
        const int64_t slot = first_slot + rank;
        if (slot >= call.slots) return;
        call.positions[slot] = begin + i;
        call.labels[slot] = ids[i];
      });
  group.sync();

  constexpr int kLanes = Group::kLanes;
  const int64_t last_slot = first_slot + count < call.slots ? first_slot + count : call.slots;
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
  const uint64_t sample = call.rows.sample(row);
  for (int64_t slot = first_slot + int64_t{group.rank()} * kLanes; slot < last_slot;
       slot += int64_t{group.size()} * kLanes) {
    const int64_t lanes = last_slot - slot < kLanes ? last_slot - slot : kLanes;
    uint32_t places[kLanes] = {};
    for (int64_t lane = 0; lane < lanes; ++lane) {
      places[lane] = static_cast<uint32_t>(call.positions[slot + lane] - begin);
    }
    const auto words =
        draw_lanes<kLanes>(seed, Stream::kMaskReplace, sample, places, call.step);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const Id token = ids[places[lane]];
      out[places[lane]] = static_cast<Id>(call.replacement(words[static_cast<int>(lane)], token));
    }
  }
}

}  // namespace fastplm
