// Philox4x32-10 (Salmon et al., SC 2011) and the counter layout of fastplm's random choices; the
// Python twin, and their specification, is fastplm/reference/philox.py.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define FASTPLM_HD __host__ __device__ __forceinline__
#else
#define FASTPLM_HD inline
#endif

namespace fastplm {

// What a word is drawn for. Part of the randomness contract: never renumber.
enum class Stream : uint32_t { kMaskSelect = 0, kMaskReplace = 1 };

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

}  // namespace fastplm
