// Dropout of a tensor's elements: each is multiplied by 1 / (1 - p) or becomes 0, by the bits of
// fastplm/reference/dropout.py. The backward draws them again, so nothing is saved for it. The bits
// of an element depend on its number in the tensor, or on its number in the row and the row's
// sample and position.

namespace fastplm::FASTPLM_LEVEL {

constexpr int64_t kDraws = 16;  // draws side by side, one a lane, for any width of vectors
constexpr int64_t kChoices = 8;    // choices of a draw, 16 bits each
constexpr int64_t kDropBlock = kChoices * kDraws;

// The counters of the draws of a block, which begins at element `first` of the tensor.
FASTPLM_HD WordLanes<kDraws> counter_of_elements(int64_t first) {
  WordLanes<kDraws> counter;
  for (int64_t lane = 0; lane < kDraws; ++lane) {
    const uint64_t draw = static_cast<uint64_t>(first / kChoices + lane);
    counter.x[lane] = static_cast<uint32_t>(draw);
    counter.y[lane] = static_cast<uint32_t>(draw >> 32);
    counter.z[lane] = 0;
    counter.w[lane] = static_cast<uint32_t>(Stream::kHidden);
  }
  return counter;
}

// The same for a block that begins at element `first` of a row.
FASTPLM_HD WordLanes<kDraws> counter_of_row(int64_t sample, int64_t position, int64_t first) {
  WordLanes<kDraws> counter;
  for (int64_t lane = 0; lane < kDraws; ++lane) {
    counter.x[lane] = static_cast<uint32_t>(position);
    counter.y[lane] = static_cast<uint32_t>(sample);
    counter.z[lane] = static_cast<uint32_t>(static_cast<uint64_t>(sample) >> 32);
    counter.w[lane] = static_cast<uint32_t>(first / kChoices + lane) << 4 |
                      static_cast<uint32_t>(Stream::kHidden);
  }
  return counter;
}

// Calls function(element, dropped) for the vectors of kDropBlock elements of kDraws draws; a lane of `dropped` has all
// bits set or none. Choice j of draw i is for element j * kDraws + i, so that numbers stay in their lanes.
template <typename Function>
FASTPLM_HD void for_choices(uint64_t seed, WordLanes<kDraws> counter, int32_t threshold,
                            const Function& function) {
  philox4x32<kDraws, kDropoutRounds>(seed, counter);
  const uint32_t* words[4] = {counter.x, counter.y, counter.z, counter.w};
  for (int64_t j = 0; j < kChoices; ++j) {
    for (int64_t i = 0; i < kDraws; i += kWidth) {
      Ints choice;
      std::memcpy(&choice, words[j / 2] + i, sizeof(choice));
      const Ints dropped = ((choice >> (j % 2 * 16) & 0xFFFF) - threshold) >> 31;  // the sign
      function(j * kDraws + i, dropped);
    }
  }
}

// Drops the kDropBlock elements of kDraws draws.
template <typename T>
FASTPLM_HD void drop_block(uint64_t seed, const WordLanes<kDraws>& counter, int32_t threshold, float scale,
                           const T* in, T* out) {
  float room[kDropBlock];
  const float* from = as_floats(kDropBlock, kDropBlock, in, room);
  float* to = floats_for(kDropBlock, kDropBlock, out, room);
  for_choices(seed, counter, threshold, [&](int64_t element, const Ints& dropped) FASTPLM_INLINE {
    const Floats scaled = at(from + element) * scale;
    at(to + element) = reinterpret_cast<Floats>(reinterpret_cast<const Ints&>(scaled) & ~dropped);
  });
  narrow(kDropBlock, to, out);
}

// Drops `count` elements; the block at `first` has the counters counter_at(first).
template <typename T, typename CounterAt>
FASTPLM_HD void drop_blocks(uint64_t seed, int32_t threshold, float scale, int64_t count, const T* in,
                            T* out, const CounterAt& counter_at) {
  int64_t i = 0;
  for (; i + kDropBlock <= count; i += kDropBlock) {
    drop_block(seed, counter_at(i), threshold, scale, in + i, out + i);
  }
  if (i < count) {
    T block[kDropBlock] = {};
    std::copy(in + i, in + count, block);
    drop_block(seed, counter_at(i), threshold, scale, block, block);
    std::copy(block, block + (count - i), out + i);
  }
}

// Drops `count` elements from number `first` on, a multiple of kDropBlock.
template <typename T>
FASTPLM_HD void drop_elements(uint64_t seed, int32_t threshold, float scale, int64_t first,
                              int64_t count, const T* in, T* out) {
  drop_blocks(seed, threshold, scale, count, in, out,
              [&](int64_t i) { return counter_of_elements(first + i); });
}

// Drops elements of a row of `width`.
template <typename T>
FASTPLM_HD void drop_row(uint64_t seed, int32_t threshold, float scale, int64_t sample, int64_t position,
                         int64_t width, const T* in, T* out) {
  drop_blocks(seed, threshold, scale, width, in, out,
              [&](int64_t i) { return counter_of_row(sample, position, i); });
}

}  // namespace fastplm::FASTPLM_LEVEL
