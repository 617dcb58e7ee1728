// Choosing some of n items without bias, by a random key for each: the items with the smallest keys.
// Items are ordered by (key, index), so no two are equal. A 64-bit number holds this order.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/rows.h"

namespace fastplm {

FASTPLM_HD uint64_t order_of(uint32_t key, int64_t index) {
  return uint64_t{key} << 32 | static_cast<uint32_t>(index);
}

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;

// Memory that the threads of a group share.
struct SelectScratch {
  uint64_t bins[kDigits];  // by digit: items << 32 | sum of weights
  uint64_t digit;          // the digit in which the budget runs out
  uint64_t bin;            // the contents of that digit's bin
  uint64_t below;          // the sum of the weights below that digit
};

// The items whose order, without its `shift` lowest bits, is below `bound`.
struct Prefix {
  uint64_t bound;
  int shift;
  uint64_t weight;  // sum over all its items
  FASTPLM_HD bool has(uint64_t order) const { return order >> shift < bound; }
};

// The longest run of items in ascending order whose weights sum to `budget` at most.
//
// `order(i)` and `weight(i)` describe the items 0 … size - 1; an item of weight 0 is left out.
// Radix selection goes from the highest digit down: a digit costs O(size), and random keys differ
// in the first two or three.
FASTPLM_GROUP_CODE
template <typename Group, typename Order, typename Weight>
FASTPLM_HD Prefix select_prefix(Group& group, SelectScratch& scratch, int64_t size, uint64_t budget,
                                const Order& order, const Weight& weight) {
  uint64_t mine = 0;
  uint64_t total;
  for (int64_t i = group.rank(); i < size; i += group.size()) mine += weight(i);
  group.exclusive_sum(mine, &total);
  if (total <= budget) return {2, 63, total};

  Prefix prefix{0, 64, 0};
  do {
    const int above = prefix.shift;
    const int shift = above - kDigitBits;
    for (int digit = group.rank(); digit < kDigits; digit += group.size()) scratch.bins[digit] = 0;
    group.sync();
    for (int64_t i = group.rank(); i < size; i += group.size()) {
      const uint64_t place = order(i);
      // The first digit of every item counts; C++ has no shift by 64.
      if (weight(i) == 0 || (above < 64 && place >> above != prefix.bound)) continue;
      group.add(&scratch.bins[place >> shift & (kDigits - 1)], uint64_t{1} << 32 | weight(i));
    }
    group.sync();
    uint64_t below = prefix.weight;
    for (int first = 0; first < kDigits && below <= budget; first += group.size()) {
      const int digit = first + group.rank();
      const uint64_t bin = digit < kDigits ? scratch.bins[digit] : 0;
      const uint64_t inside = static_cast<uint32_t>(bin);
      uint64_t sum;
      const uint64_t before = below + group.exclusive_sum(inside, &sum);
      if (before <= budget && budget < before + inside) {
        scratch.digit = digit;
        scratch.bin = bin;
        scratch.below = before;
      }
      below += sum;
    }
    group.sync();
    prefix = {prefix.bound << kDigitBits | scratch.digit, shift, scratch.below};
  } while (prefix.weight < budget && scratch.bin >> 32 > 1);
  return prefix;
}

// Calls emit(i, rank) for every i of 0 … size - 1 with flag(i), rank counting them in ascending order
// from 0, and returns how many there are. Every thread calls it.
FASTPLM_GROUP_CODE
template <typename Group, typename Flag, typename Emit>
FASTPLM_HD int64_t for_each_flagged(Group& group, int64_t size, const Flag& flag,
                                    const Emit& emit) {
  int64_t found = 0;
  if constexpr (Group::kAlone) {
    // Flags are gathered in a word, then the loop goes over its set bits: only flagged items cost a
    // branch.
    constexpr int kBits = 64;
    for (int64_t first = 0; first < size; first += kBits) {
      uint8_t flags[kBits] = {};
      const int64_t lanes = size - first < kBits ? size - first : kBits;
      for (int64_t lane = 0; lane < lanes; ++lane) flags[lane] = flag(first + lane);
      uint64_t bits = 0;
      for (int byte = 0; byte < kBits / 8; ++byte) {
        uint64_t eight;
        std::memcpy(&eight, flags + 8 * byte, 8);
        bits |= (eight * 0x0102040810204080) >> 56 << 8 * byte;
      }
      for (; bits != 0; bits &= bits - 1) emit(first + __builtin_ctzll(bits), found++);
    }
  } else {
    for (int64_t first = 0; first < size; first += group.size()) {
      const int64_t i = first + group.rank();
      const uint32_t flagged = i < size && flag(i);
      uint32_t total;
      const uint32_t before = group.exclusive_sum(flagged, &total);
      if (flagged) emit(i, found + before);
      found += total;
    }
  }
  return found;
}

}  // namespace fastplm
