// Philox4x32-10 (Salmon et al., SC 2011) and the counter layout of fastplm's random choices.
// fastplm/reference/philox.py is the specification in Python.
#pragma once

#include <cstdint>

#include "common/base.h"

namespace fastplm {

// What a word is drawn for. The numbers are part of the randomness contract: never change them.
enum class Stream : uint32_t {
  kMaskSelect = 0,
  kMaskReplace = 1,
  kDropout = 3,
  kNgram = 6,
  kSpan = 7,
  kNoise = 8,
  kInfill = 9,
  kOrder = 10,
  kHidden = 11,
};

struct Words {
  uint32_t x, y, z, w;
};

// Several counters side by side, for vector units; a GPU has one.
template <int kLanes>
struct WordLanes {
  uint32_t x[kLanes], y[kLanes], z[kLanes], w[kLanes];
  FASTPLM_HD Words operator[](int lane) const { return {x[lane], y[lane], z[lane], w[lane]}; }
};

constexpr int kRounds = 10;
constexpr int kDropoutRounds = 7;  // the fewest rounds that pass all of BigCrush

// Encrypts the counters in place.
template <int kLanes, int kOfRounds = kRounds>
FASTPLM_HD void philox4x32(uint64_t seed, WordLanes<kLanes>& counter) {
  uint32_t key0 = static_cast<uint32_t>(seed);
  uint32_t key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kOfRounds; ++round) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const uint64_t product0 = uint64_t{0xD2511F53} * counter.x[lane];
      const uint64_t product1 = uint64_t{0xCD9E8D57} * counter.z[lane];
      const uint32_t x = static_cast<uint32_t>(product1 >> 32) ^ counter.y[lane] ^ key0;
      const uint32_t z = static_cast<uint32_t>(product0 >> 32) ^ counter.w[lane] ^ key1;
      counter.x[lane] = x;
      counter.y[lane] = static_cast<uint32_t>(product1);
      counter.z[lane] = z;
      counter.w[lane] = static_cast<uint32_t>(product0);
    }
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

// The draws of one sample at several positions.
template <int kLanes>
FASTPLM_HD WordLanes<kLanes> draw_lanes(uint64_t seed, Stream stream, uint64_t sample_index,
                                        const uint32_t* positions, uint32_t step) {
  WordLanes<kLanes> counter;
  for (int lane = 0; lane < kLanes; ++lane) {
    counter.x[lane] = positions[lane];
    counter.y[lane] = static_cast<uint32_t>(sample_index);
    counter.z[lane] = static_cast<uint32_t>(sample_index >> 32);
    counter.w[lane] = step << 4 | static_cast<uint32_t>(stream);
  }
  philox4x32(seed, counter);
  return counter;
}

FASTPLM_HD Words draw(uint64_t seed, Stream stream, uint64_t sample_index, uint32_t position,
                      uint32_t step) {
  return draw_lanes<1>(seed, stream, sample_index, &position, step)[0];
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
    uint32_t positions[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      positions[lane] = first_quad + static_cast<uint32_t>(first) + lane;
    }
    const auto drawn = draw_lanes<kLanes>(seed, stream, sample_index, positions, step);
    for (int lane = 0; lane < kLanes && first + lane < quads; ++lane) {
      uint32_t* quad = words + 4 * (first + lane);
      quad[0] = drawn.x[lane];
      quad[1] = drawn.y[lane];
      quad[2] = drawn.z[lane];
      quad[3] = drawn.w[lane];
    }
  }
}

}  // namespace fastplm
