// The noise of BART on one row of tokens: the code that the CPU op and the CUDA kernel both run.
//
//   B rows, C columns of the output, n tokens of the row, m of them to be covered by S spans
//   place   where a token of the row stands after permutation and rotation
//   item    a span, which becomes one token, or a token that no span covers
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "common/arguments.h"
#include "common/philox.h"
#include "common/rows.h"
#include "index/select.h"

namespace fastplm {

// Counters of Stream INFILL: from 0 the lengths of spans, from kSecondDraw their layout, from
// kThirdDraw the choice of the last span. Counters of Stream ORDER: from 0 the sentences that move,
// then their order, then the rotation.
constexpr uint32_t kSecondDraw = 1u << 30;
constexpr uint32_t kThirdDraw = 1u << 31;
constexpr int64_t kSpareSpans = 16;
constexpr int64_t kMostSpanThresholds = 64;

// The length of a span for a random word: the number of bounds that are not above the word.
struct SpanThresholds {
  SpanThresholds() = default;
  explicit SpanThresholds(const std::vector<int64_t>& given)
      : count(std::min<int64_t>(given.size(), kMostSpanThresholds)) {
    std::copy_n(given.begin(), count, bounds);
  }

  int64_t count;
  uint32_t bounds[kMostSpanThresholds];
};

// The op's arguments that are not tensors. Probabilities are round(p * 2^32), so that a random
// choice is a comparison of integers: …_scale is a share of tokens (share_of), and what happens to a token follows from
// the first …_below that its random word is below, delete_below before noise_below.
#define FASTPLM_BART_NOISE_SETTINGS(ARGUMENT)                                          \
  ARGUMENT(uint32_t, step)                                                             \
  ARGUMENT(int64_t, longest) /* most tokens of a row */                                \
  ARGUMENT(int64_t, capacity) /* C */                                                  \
  ARGUMENT(int64_t, vocab_size)                                                        \
  ARGUMENT(int64_t, mask_token_id) ARGUMENT(int64_t, pad_token_id)                     \
  ARGUMENT(int64_t, bos_token_id) ARGUMENT(int64_t, eos_token_id) /* negative: none */ \
  ARGUMENT(int64_t, infill_scale) ARGUMENT(SpanThresholds, span_below)                 \
  ARGUMENT(int64_t, permute_scale) ARGUMENT(int64_t, rotate_below)                     \
  ARGUMENT(int64_t, delete_below) ARGUMENT(int64_t, noise_below) ARGUMENT(int64_t, random_below)
FASTPLM_ARGUMENTS(BartNoiseSettings, FASTPLM_BART_NOISE_SETTINGS)

// One call of the op.
template <typename Id>
struct BartNoiseCall : BartNoiseSettings {
  Rows rows;
  const Id* input_ids;              // [tokens]
  const int64_t* sentence_end_ids;  // [sentence_end_count], ascending
  int64_t sentence_end_count;
  const uint8_t* sentence_end_table;  // [vocab_size] the same, 1 where a sentence ends; or null
  const int64_t* special_ids;         // [special_count], ascending
  int64_t special_count;
  const int64_t* seed;  // []
  Id* output_ids;       // [B, C]
  int64_t* lengths;     // [B]
  int64_t* dropped;     // []

  FASTPLM_HD int64_t length(int64_t row) const {
    const int64_t given = rows.length(row);
    return given < longest ? given : longest;
  }

  // The most spans of a row with m tokens to cover.
  FASTPLM_HD static int64_t most_spans(int64_t m) { return 2 * m + kSpareSpans; }

  FASTPLM_HD int64_t span_length(uint32_t word) const {
    int64_t length = 0;
    while (length < span_below.count && word >= span_below.bounds[length]) ++length;
    return length;
  }

  FASTPLM_HD bool ends_sentence(int64_t id) const {
    if (sentence_end_table != nullptr && id >= 0 && id < vocab_size) return sentence_end_table[id];
    // Binary search for the last id that is not above this one, without branches to mispredict.
    int64_t first = 0;
    for (int64_t left = sentence_end_count; left > 1;) {
      const int64_t half = left / 2;
      first += sentence_end_ids[first + half] <= id ? half : 0;
      left -= half;
    }
    return sentence_end_count > 0 && sentence_end_ids[first] == id;
  }

  // The id that replaces a masked token or a span: the mask, or a random id that is not special.
  FASTPLM_HD Id replacement(uint32_t kind, uint32_t word) const {
    if (kind >= random_below) return static_cast<Id>(mask_token_id);
    int64_t id = choice(word, vocab_size - special_count);
    for (int64_t i = 0; i < special_count; ++i) id += special_ids[i] <= id;
    return static_cast<Id>(id);
  }
};

// Memory of a row, shared by all threads of its group.
template <typename Id>
struct NoiseRow {
  uint64_t* sorted;   // [longest] keys of the sentences that move
  Id* tokens;         // [longest] by place
  Id* fills;          // [most spans] what stands for each
  uint32_t* keys;     // [most items, rounded up to a multiple of 4]
  uint32_t* places;   // [longest] by token; before that, the sentence of each token
  uint32_t* begins;   // [longest + 1] of the sentences, in the given order
  uint32_t* moved;    // [longest] where each sentence goes
  uint32_t* order;    // [longest] the sentences in their new order
  uint32_t* movers;   // [longest] the sentences that move
  uint32_t* covered;  // [most spans] tokens that the spans drawn before cover
  uint8_t* deleted;   // [longest] by place

  // Lays the arrays out in `memory`, or only counts if that is null. Returns the bytes they take, a
  // multiple of 8.
  FASTPLM_HD int64_t lay_out(const BartNoiseCall<Id>& call, uint8_t* memory) {
    const int64_t m = share_of(call.longest, call.infill_scale);
    const int64_t spans = call.most_spans(m);
    const int64_t items = (call.longest + m + kSpareSpans + 3) / 4 * 4;
    int64_t used = 0;
    const auto next = [&](auto** array, int64_t size) {
      using Element = std::remove_reference_t<decltype(**array)>;
      *array = reinterpret_cast<Element*>(memory + used);
      used += (size * static_cast<int64_t>(sizeof(Element)) + 7) / 8 * 8;
    };
    next(&sorted, call.longest);
    next(&tokens, call.longest);
    next(&fills, spans);
    next(&keys, items);
    next(&places, call.longest);
    next(&begins, call.longest + 1);
    next(&moved, call.longest);
    next(&order, call.longest);
    next(&movers, call.longest);
    next(&covered, spans);
    next(&deleted, call.longest);
    return used;
  }
};

// Sorts numbers, no two of them equal, by a bitonic network. The lower place always gets the
// smaller number, so any size works: no number would move past the end.
FASTPLM_GROUP_CODE
template <typename Group>
FASTPLM_HD void sort_ascending(Group& group, uint64_t* values, int64_t size) {
  for (int64_t run = 1; run < size; run *= 2) {
    // The first step mirrors a run onto its neighbour, the others halve the distance.
    int64_t flip = 2 * run - 1;
    for (int64_t stride = run; stride > 0; stride /= 2) {
      for (int64_t i = group.rank(); i < size; i += group.size()) {
        const int64_t other = i ^ flip;
        if (other > i && other < size && values[other] < values[i]) {
          const uint64_t larger = values[i];
          values[i] = values[other];
          values[other] = larger;
        }
      }
      group.sync();
      flip = stride / 2;
    }
  }
}

// memory.places = the sentence of each token, memory.begins; returns the number of sentences.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD int64_t find_sentences(Group& group, const BartNoiseCall<Id>& call, const Id* ids,
                                  int64_t n, const NoiseRow<Id>& memory) {
  if (group.rank() == 0) memory.begins[0] = 0;
  int64_t sentences = 0;
  for (int64_t first = 0; first < n; first += group.size()) {
    const int64_t i = first + group.rank();
    const uint32_t ends = i < n && (i == n - 1 || call.ends_sentence(ids[i]));
    uint32_t total;
    const int64_t sentence = sentences + group.exclusive_sum(ends, &total);
    if (i < n) memory.places[i] = static_cast<uint32_t>(sentence);
    if (ends) memory.begins[sentence + 1] = static_cast<uint32_t>(i + 1);
    sentences += total;
  }
  group.sync();
  return sentences;
}

// memory.order: `moving` of the sentences, chosen without bias, are shuffled among their places.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void shuffle_sentences(Group& group, SelectScratch& scratch,
                                  const BartNoiseCall<Id>& call, uint64_t sample, int64_t sentences,
                                  int64_t moving, const NoiseRow<Id>& memory) {
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
  const uint32_t* keys = memory.keys;
  draw_words(group, seed, Stream::kOrder, sample, 0, call.step, sentences, memory.keys);
  group.sync();
  const Prefix prefix = select_prefix(
      group, scratch, sentences, moving, [&](int64_t i) { return order_of(keys[i], i); },
      [](int64_t) { return 1u; });
  int64_t found = 0;
  for (int64_t first = 0; first < sentences; first += group.size()) {
    const int64_t i = first + group.rank();
    const uint32_t moves = i < sentences && prefix.has(order_of(keys[i], i));
    uint32_t total;
    const int64_t site = found + group.exclusive_sum(moves, &total);
    if (moves) memory.movers[site] = static_cast<uint32_t>(i);
    if (i < sentences) memory.order[i] = static_cast<uint32_t>(i);
    found += total;
  }
  group.sync();
  draw_words(group, seed, Stream::kOrder, sample, kSecondDraw, call.step, moving, memory.keys);
  group.sync();
  for (int64_t i = group.rank(); i < moving; i += group.size()) {
    memory.sorted[i] = order_of(keys[i], i);
  }
  group.sync();
  sort_ascending(group, memory.sorted, moving);
  for (int64_t i = group.rank(); i < moving; i += group.size()) {
    memory.order[memory.movers[i]] = memory.movers[static_cast<uint32_t>(memory.sorted[i])];
  }
  group.sync();
}

// memory.places: where each token goes.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void place_tokens(Group& group, SelectScratch& scratch, const BartNoiseCall<Id>& call,
                             const Id* ids, uint64_t sample, int64_t n,
                             const NoiseRow<Id>& memory) {
  int64_t sentences = 1;
  if (call.permute_scale > 0 && call.sentence_end_count > 0) {
    sentences = find_sentences(group, call, ids, n, memory);
  }
  const int64_t moving = share_of(sentences, call.permute_scale);
  const bool permutes = sentences > 1 && moving > 1;
  if (permutes) {
    shuffle_sentences(group, scratch, call, sample, sentences, moving, memory);
    int64_t placed = 0;
    for (int64_t first = 0; first < sentences; first += group.size()) {
      const int64_t i = first + group.rank();
      const uint32_t sentence = i < sentences ? memory.order[i] : 0;
      const uint32_t size =
          i < sentences ? memory.begins[sentence + 1] - memory.begins[sentence] : 0;
      uint32_t total;
      const int64_t place = placed + group.exclusive_sum(size, &total);
      if (i < sentences) memory.moved[sentence] = static_cast<uint32_t>(place);
      placed += total;
    }
    group.sync();
  }
  const Words words = draw(static_cast<uint64_t>(*call.seed), Stream::kOrder, sample, kThirdDraw,
                           call.step);
  const int64_t start = words.x < call.rotate_below ? choice(words.y, n) : 0;
  for (int64_t i = group.rank(); i < n; i += group.size()) {
    int64_t place = i;
    if (permutes) {
      const uint32_t sentence = memory.places[i];
      place += int64_t{memory.moved[sentence]} - memory.begins[sentence];
    }
    place -= start;
    memory.places[i] = static_cast<uint32_t>(place < 0 ? place + n : place);
  }
  group.sync();
}

// The draws at `first`, first + 1, …
template <int kLanes>
FASTPLM_HD WordLanes<kLanes> draw_neighbours(uint64_t seed, Stream stream, uint64_t sample,
                                             int64_t first, uint32_t step) {
  uint32_t positions[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) positions[lane] = static_cast<uint32_t>(first + lane);
  return draw_lanes<kLanes>(seed, stream, sample, positions, step);
}

// memory.tokens and memory.deleted: each token at its place, masked, deleted or unchanged.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void corrupt_tokens(Group& group, const BartNoiseCall<Id>& call, const Id* ids,
                               uint64_t sample, int64_t n, const NoiseRow<Id>& memory) {
  if (call.noise_below == 0) {
    for (int64_t i = group.rank(); i < n; i += group.size()) {
      memory.tokens[memory.places[i]] = ids[i];
      memory.deleted[memory.places[i]] = 0;
    }
    group.sync();
    return;
  }
  constexpr int kLanes = Group::kLanes;
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
  for (int64_t first = int64_t{group.rank()} * kLanes; first < n;
       first += int64_t{group.size()} * kLanes) {
    const auto words = draw_neighbours<kLanes>(seed, Stream::kNoise, sample, first, call.step);
    for (int lane = 0; lane < kLanes && first + lane < n; ++lane) {
      const uint32_t place = memory.places[first + lane];
      const bool deleted = words.x[lane] < call.delete_below;
      const bool masked = !deleted && words.x[lane] < call.noise_below;
      memory.deleted[place] = deleted;
      memory.tokens[place] =
          masked ? call.replacement(words.z[lane], words.y[lane]) : ids[first + lane];
    }
  }
  group.sync();
}

// memory.covered and memory.fills of spans that cover m tokens; returns how many there are.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD int64_t draw_spans(Group& group, const BartNoiseCall<Id>& call, uint64_t sample,
                              int64_t m, const NoiseRow<Id>& memory) {
  constexpr int kLanes = Group::kLanes;
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
  const int64_t last = call.most_spans(m) - 1;
  int64_t spans = 0;
  int64_t covered = 0;
  for (int64_t tile = 0; covered < m; tile += int64_t{group.size()} * kLanes) {
    const int64_t first = tile + int64_t{group.rank()} * kLanes;
    const auto words = draw_neighbours<kLanes>(seed, Stream::kInfill, sample, first, call.step);
    // The last possible span covers all tokens that are left to cover.
    int64_t lengths[kLanes];
    int64_t mine = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      lengths[lane] = first + lane < last ? call.span_length(words.x[lane]) : m;
      mine += lengths[lane];
    }
    int64_t total;
    int64_t before = covered + group.exclusive_sum(mine, &total);
    int64_t needed = 0;
    for (int lane = 0; lane < kLanes && before < m; ++lane) {
      memory.covered[first + lane] = static_cast<uint32_t>(before);
      memory.fills[first + lane] = call.replacement(words.z[lane], words.y[lane]);
      before += lengths[lane];
      ++needed;
    }
    covered += total;
    group.exclusive_sum(needed, &total);
    spans += total;
  }
  group.sync();
  return spans;
}

// Adds noise to row `row`; returns how many of its tokens did not fit in the output.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD int64_t noise_row(Group& group, SelectScratch& scratch, const BartNoiseCall<Id>& call,
                             int64_t row, const NoiseRow<Id>& memory) {
  const Id* ids = call.input_ids + call.rows.begin(row);
  const int64_t n = call.length(row);
  const uint64_t seed = static_cast<uint64_t>(*call.seed);
  const uint64_t sample = call.rows.sample(row);
  place_tokens(group, scratch, call, ids, sample, n, memory);
  corrupt_tokens(group, call, ids, sample, n, memory);

  const int64_t m = share_of(n, call.infill_scale);
  const int64_t spans = draw_spans(group, call, sample, m, memory);
  const int64_t items = n - m + spans;
  const uint32_t* keys = memory.keys;
  Prefix prefix{0, 63, 0};
  int64_t rotation = 0;
  if (spans > 0) {
    draw_words(group, seed, Stream::kInfill, sample, kSecondDraw, call.step, items, memory.keys);
    group.sync();
    prefix = select_prefix(
        group, scratch, items, spans, [&](int64_t i) { return order_of(keys[i], i); },
        [](int64_t) { return 1u; });
    rotation = choice(draw(seed, Stream::kInfill, sample, kThirdDraw, call.step).x, spans);
  }
  const int64_t covered_first = spans > 0 ? memory.covered[rotation] : 0;

  Id* out = call.output_ids + row * call.capacity;
  const int64_t has_bos = call.bos_token_id >= 0;
  const int64_t has_eos = call.eos_token_id >= 0;
  const int64_t room = call.capacity - has_bos - has_eos;
  int64_t spans_done = 0;
  int64_t written = 0;
  for (int64_t first = 0; first < items; first += group.size()) {
    const int64_t i = first + group.rank();
    const uint32_t is_span = i < items && spans > 0 && prefix.has(order_of(keys[i], i));
    uint32_t total;
    const int64_t spans_before = spans_done + group.exclusive_sum(is_span, &total);
    spans_done += total;
    int64_t span = spans_before + rotation;
    const bool wrapped = span >= spans;
    if (wrapped) span -= spans;
    Id token = 0;
    uint32_t writes = i < items;
    if (is_span) {
      token = memory.fills[span];
    } else if (i < items) {
      int64_t place = i - spans_before;
      if (spans > 0) place += memory.covered[span] - covered_first + (wrapped ? m : 0);
      token = memory.tokens[place];
      writes = !memory.deleted[place];
    }
    const int64_t slot = written + group.exclusive_sum(writes, &total);
    if (writes && slot < room) out[has_bos + slot] = token;
    written += total;
  }

  const int64_t fitting = written < room ? written : room;
  if (group.rank() == 0) {
    if (has_bos) out[0] = static_cast<Id>(call.bos_token_id);
    if (has_eos) out[has_bos + fitting] = static_cast<Id>(call.eos_token_id);
    call.lengths[row] = has_bos + fitting + has_eos;
  }
  for (int64_t i = has_bos + fitting + has_eos + group.rank(); i < call.capacity;
       i += group.size()) {
    out[i] = static_cast<Id>(call.pad_token_id);
  }
  return written - fitting;
}

}  // namespace fastplm
