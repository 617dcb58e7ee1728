// fastplm_C::bart_noise on the CPU: PyTorch's threads compute rows in parallel, one thread a row.
#include <algorithm>
#include <numeric>
#include <vector>

#include "index/bart_noise_op.h"

#define FASTPLM_FILE "index/bart_noise.cpp"
#include "common/each_level.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

template <typename Id>
void noise_rows(const BartNoiseCall<Id>& call, int64_t first_row, int64_t last_row,
                int64_t* dropped) {
  OneThread group;
  SelectScratch scratch;
  NoiseRow<Id> memory;
  Vector<uint64_t> arrays(memory.lay_out(call, nullptr) / 8);
  memory.lay_out(call, reinterpret_cast<uint8_t*>(arrays.data()));
  for (int64_t row = first_row; row < last_row; ++row) {
    dropped[row] = noise_row(group, scratch, call, row, memory);
  }
}

auto bart_noise(const BartNoiseTensors& tensors, const BartNoiseSettings& settings) {
  return fastplm::bart_noise(tensors, settings, [](auto call) {
    // A lookup is several times as fast as a search, and a table is made in microseconds.
    constexpr int64_t kMostEntries = 1 << 20;
    Vector<uint8_t> table;
    if (call.sentence_end_count > 0 && call.vocab_size <= kMostEntries) {
      table.resize(call.vocab_size);
      for (int64_t i = 0; i < call.sentence_end_count; ++i) {
        const int64_t id = call.sentence_end_ids[i];
        if (id >= 0 && id < call.vocab_size) table[id] = 1;
      }
      call.sentence_end_table = table.data();
    }

    Vector<int64_t> dropped(call.rows.count);
    constexpr int64_t kTokensPerThread = 2048;
    const int64_t grain = grain_of(kTokensPerThread, call.longest);
    parallel_for(call.rows.count, grain, [&](int64_t first, int64_t last) {
      noise_rows(call, first, last, dropped.data());
    });
    *call.dropped = std::accumulate(dropped.begin(), dropped.end(), int64_t{0});
  });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(bart_noise)
