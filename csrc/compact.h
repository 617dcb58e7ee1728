// Compaction: the flagged ones of many items, side by side.
#pragma once

#include <cstdint>
#include <cstring>

#include "group.h"

namespace fastplm {

// Calls emit(i, rank) for every i of 0 … size - 1 with flag(i), rank counting them in ascending order
// from 0, and returns how many there are. Every thread calls it.
FASTPLM_GROUP_CODE
template <typename Group, typename Flag, typename Emit>
FASTPLM_HD int64_t for_each_flagged(Group& group, int64_t size, const Flag& flag,
                                    const Emit& emit) {
  int64_t found = 0;
  if constexpr (Group::kAlone) {
    // One branch for each item that is found, none for those that are not: flags are gathered in a
    // word whose set bits are then walked over.
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
