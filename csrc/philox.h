// Philox4x32-10 (Salmon et al., SC 2011) and the counter layout of fastplm's random choices; the
// Python twin, and their specification, is fastplm/reference/philox.py.
#pragma once

#include <cstdint>

#include "group.h"

namespace fastplm {

// What a word is drawn for. Part of the randomness contract: never renumber.
enum class Stream : uint32_t {
  kMaskSelect = 0,
  kMaskReplace = 1,
  kNgram = 6,
  kSpan = 7,
  kNoise = 8,
  kInfill = 9,
  kOrder = 10,
};

struct Words {
  uint32_t x, y, z, w;
};

FASTPLM_HD Words philox4x32(uint64_t seed, Words counter) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * counter.x;
    const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.z;
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter.y ^ key0,
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter.w ^ key1,
               static_cast<uint32_t>(product0)};
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

FASTPLM_HD Words draw(uint64_t seed, Stream stream, uint64_t sample_index, uint32_t position,
                      uint32_t step) {
  return philox4x32(seed, {position, static_cast<uint32_t>(sample_index),
                           static_cast<uint32_t>(sample_index >> 32),
                           step << 4 | static_cast<uint32_t>(stream)});
}

// One of `many` choices, all equally likely to within 2^-32 of them.
FASTPLM_HD int64_t choice(uint32_t word, int64_t many) {
  return static_cast<int64_t>((static_cast<uint64_t>(word) * static_cast<uint64_t>(many)) >> 32);
}

// One random word for each of `size` neighbours, the first of which sits at counter 4 * first_quad:
// a draw serves four. `words` has room for size rounded up to a multiple of 4.
FASTPLM_GROUP_CODE
template <typename Group>
FASTPLM_HD void draw_words(Group& group, uint64_t seed, Stream stream, uint64_t sample_index,
                           uint32_t first_quad, uint32_t step, int64_t size, uint32_t* words) {
  constexpr int kLanes = Group::kLanes;
  const int64_t quads = (size + 3) / 4;
  for (int64_t first = int64_t{group.rank()} * kLanes; first < quads;
       first += int64_t{group.size()} * kLanes) {
    Words drawn[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      drawn[lane] = draw(seed, stream, sample_index,
                         first_quad + static_cast<uint32_t>(first) + lane, step);
    }
    for (int lane = 0; lane < kLanes && first + lane < quads; ++lane) {
      uint32_t* quad = words + 4 * (first + lane);
      quad[0] = drawn[lane].x;
      quad[1] = drawn[lane].y;
      quad[2] = drawn[lane].z;
      quad[3] = drawn[lane].w;
    }
  }
}

}  // namespace fastplm
