// fastplm_C::mask_tokens on the CPU: PyTorch's threads compute rows in parallel, one thread a row.
#include <algorithm>
#include <numeric>
#include <vector>

#include "index/mask_tokens_op.h"

#define FASTPLM_FILE "index/mask_tokens.cpp"
#include "common/each_level.h"

namespace fastplm::FASTPLM_LEVEL {
namespace {

template <typename Id>
struct Chosen {
  const MaskTokensCall<Id>& call;
  Buffer<uint8_t> tokens;      // [tokens] 1 where chosen
  Vector<int64_t> first_slot;  // [rows + 1]
  Vector<int64_t> dropped;     // [rows]
};

template <typename Id>
void choose_rows(Chosen<Id>& chosen, int64_t first_row, int64_t last_row, int64_t longest) {
  OneThread group;
  SelectScratch scratch{};
  const Buffer<uint32_t> keys(longest + 3), sizes(longest);
  for (int64_t row = first_row; row < last_row; ++row) {
    uint8_t* tokens = chosen.tokens.get() + chosen.call.rows.begin(row);
    chosen.first_slot[row + 1] = choose_row(group, scratch, chosen.call, row,
                                            {keys.get(), sizes.get(), tokens}, &chosen.dropped[row]);
  }
}

template <typename Id>
void write_rows(const Chosen<Id>& chosen, int64_t first_row, int64_t last_row) {
  OneThread group;
  for (int64_t row = first_row; row < last_row; ++row) {
    const uint8_t* tokens = chosen.tokens.get() + chosen.call.rows.begin(row);
    write_row(group, chosen.call, row, chosen.first_slot[row], tokens);
  }
}

template <typename Id>
void run(const MaskTokensCall<Id>& call) {
  Rows rows = call.rows;
  OneThread group;
  if (!rows_are_apart(group, rows)) rows.count = 0;
  Chosen<Id> chosen{call, Buffer<uint8_t>(rows.tokens), Vector<int64_t>(rows.count + 1),
                    Vector<int64_t>(rows.count)};
  int64_t longest = 0;
  for (int64_t row = 0; row < rows.count; ++row) longest = std::max(longest, rows.length(row));

  constexpr int64_t kTokensPerThread = 4096;
  const int64_t grain = grain_of(kTokensPerThread, longest);
  parallel_for(rows.count, grain, [&](int64_t first, int64_t last) {
    choose_rows(chosen, first, last, longest);
  });
  std::partial_sum(chosen.first_slot.begin(), chosen.first_slot.end(), chosen.first_slot.begin());
  parallel_for(rows.count, grain, [&](int64_t first, int64_t last) {
    write_rows(chosen, first, last);
  });

  const int64_t total = chosen.first_slot[rows.count], count = std::min(total, call.slots);
  *call.count = count;
  *call.dropped = std::accumulate(chosen.dropped.begin(), chosen.dropped.end(), total - count);
  std::fill(call.positions + count, call.positions + call.slots, kUnusedPosition);
  std::fill(call.labels + count, call.labels + call.slots, kUnusedLabel);
  if (rows.count == 0) std::copy(call.input_ids, call.input_ids + rows.tokens, call.output_ids);
}

auto mask_tokens(const MaskTokensTensors& tensors, const MaskTokensSettings& settings) {
  return fastplm::mask_tokens(tensors, settings, [](const auto& call) { run(call); });
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL

FASTPLM_OPERATOR(mask_tokens)
