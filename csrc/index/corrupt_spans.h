// T5's span corruption of one row: the code that the CPU op and the CUDA kernel both run.
//
//   B batch, n tokens of a row, T most of them; K sentinels; Ti and To width of inputs and labels
//
// A row is kept 0, noise 0, kept 1, noise 1, …; its input is kept 0, sentinel 0, kept 1,
// sentinel 1, …, [EOS], and its labels are sentinel 0, noise 0, sentinel 1, noise 1, …, [EOS].
#pragma once

#include <cstdint>

#include "common/arguments.h"
#include "common/philox.h"
#include "common/rows.h"
#include "index/select.h"

namespace fastplm {

constexpr int64_t kIgnoredLabel = -100;
// The keys of the noise tokens are drawn from counter 0 on, those of the kept tokens from here on.
constexpr uint32_t kKeptPosition = uint32_t{1} << 31;

struct SpanCounts {
  int64_t noise;  // tokens that leave the input
  int64_t kept;
  int64_t spans;
  int64_t dropped;  // spans without a sentinel
};

// The op's arguments that are not tensors. Density and spans per noise token are times 2^32,
// rounded up, so that all counting is in integers.
#define FASTPLM_CORRUPT_SPANS_SETTINGS(ARGUMENT)               \
  ARGUMENT(uint32_t, step)                                     \
  ARGUMENT(int64_t, max_length) /* T */                        \
  ARGUMENT(int64_t, noise_scale) ARGUMENT(int64_t, span_scale) \
  ARGUMENT(int64_t, eos_token_id) /* negative: none */         \
  ARGUMENT(int64_t, pad_token_id)
FASTPLM_ARGUMENTS(CorruptSpansSettings, FASTPLM_CORRUPT_SPANS_SETTINGS)

// Sizes that follow from a row's length alone.
struct SpanPlan : CorruptSpansSettings {
  int64_t sentinels;  // K

  FASTPLM_HD bool has_eos() const { return eos_token_id >= 0; }
  FASTPLM_HD SpanCounts counts(int64_t n) const {
    if (n < 2) return {0, n, 0, 0};
    const int64_t noise = least(most(share_of(n, noise_scale), 1), n - 1);
    const int64_t room = least(noise, n - noise);
    const int64_t asked = least(most(share_of(noise, span_scale), 1), room);
    const int64_t spans = least(asked, sentinels);
    return {noise, n - noise, spans, asked - spans};
  }
  FASTPLM_HD int64_t input_length(const SpanCounts& of) const {
    return of.kept + of.spans + has_eos();
  }
  FASTPLM_HD int64_t label_length(const SpanCounts& of) const {
    return of.noise + of.spans + has_eos();
  }
  // The longest row needs the most room.
  FASTPLM_HD int64_t input_width() const { return input_length(counts(max_length)); }
  FASTPLM_HD int64_t label_width() const { return label_length(counts(max_length)); }
  FASTPLM_HD int64_t bounds_size() const { return counts(max_length).spans + 1; }
  // Keys are drawn four at a time.
  FASTPLM_HD int64_t keys_size() const { return (max_length + 3) / 4 * 4; }

 private:
  FASTPLM_HD static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
  FASTPLM_HD static int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
};

// The boundaries of the parts of a row: part i of the noise tokens is noise[i] … noise[i + 1] - 1.
struct SpanBounds {
  uint32_t* noise;  // [bounds_size()]
  uint32_t* kept;   // [bounds_size()]
};

// One call of the op.
template <typename Id>
struct CorruptSpansCall : SpanPlan {
  Rows rows;
  const Id* input_ids;          // [B, T] or [N]
  const int64_t* sentinel_ids;  // [K]
  const int64_t* seed;          // []
  Id* output_ids;               // [B, Ti]
  int64_t* labels;              // [B, To]
  int64_t* input_lengths;       // [B]
  int64_t* label_lengths;       // [B]
  int64_t* dropped;             // []

  FASTPLM_HD SpanCounts counts_of(int64_t row) const {
    const int64_t n = rows.length(row);
    return counts(n < max_length ? n : max_length);
  }
};

FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD int64_t count_dropped(Group& group, const CorruptSpansCall<Id>& call) {
  uint64_t mine = 0;
  for (int64_t row = group.rank(); row < call.rows.count; row += group.size()) {
    mine += static_cast<uint64_t>(call.counts_of(row).dropped);
  }
  uint64_t total;
  group.exclusive_sum(mine, &total);
  return static_cast<int64_t>(total);
}

// Cuts `size` items into `parts` parts of at least one item; every division is equally likely. The
// cuts are the boundaries between neighbours that have the smallest keys. `keys` is room for `size`
// keys.
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void cut(Group& group, SelectScratch& scratch, const CorruptSpansCall<Id>& call,
                    int64_t row, int64_t size, int64_t parts, uint32_t position, uint32_t* keys,
                    uint32_t* bounds) {
  const int64_t boundaries = size - 1;
  draw_words(group, static_cast<uint64_t>(*call.seed), Stream::kSpan, call.rows.sample(row),
             position, call.step, boundaries, keys);
  group.sync();
  const auto order = [keys](int64_t i) { return order_of(keys[i], i); };
  const auto weight = [](int64_t) { return uint64_t{1}; };
  const Prefix cuts = select_prefix(group, scratch, boundaries, static_cast<uint64_t>(parts - 1),
                                    order, weight);
  if (group.rank() == 0) {
    bounds[0] = 0;
    bounds[parts] = static_cast<uint32_t>(size);
  }
  for_each_flagged(
      group, boundaries, [&](int64_t boundary) { return cuts.has(order(boundary)); },
      [&](int64_t boundary, int64_t rank) {
        bounds[1 + rank] = static_cast<uint32_t>(boundary + 1);
      });
}

// Several threads share a run, so that a GPU reads and writes neighbours together.
struct Runs {
  int64_t first;  // the first span of this thread
  int64_t step;   // spans from there to the thread's next one
  int64_t lane;
  int64_t lanes;
};

FASTPLM_GROUP_CODE
template <typename Group>
FASTPLM_HD Runs runs_of(const Group& group) {
  constexpr int kThreadsARun = 8;
  const int lanes = group.size() % kThreadsARun == 0 ? kThreadsARun : 1;
  return {group.rank() / lanes, group.size() / lanes, group.rank() % lanes, lanes};
}

template <typename From, typename To>
FASTPLM_HD void copy_run(const Runs& runs, const From* from, int64_t size, To* to) {
  for (int64_t i = runs.lane; i < size; i += runs.lanes) to[i] = static_cast<To>(from[i]);
}

FASTPLM_GROUP_CODE
template <typename Group, typename T>
FASTPLM_HD void fill(const Group& group, T* row, int64_t first, int64_t last, int64_t value) {
  for (int64_t i = first + group.rank(); i < last; i += group.size()) {
    row[i] = static_cast<T>(value);
  }
}

// Corrupts one row. `keys` is room for keys_size() keys, each of `bounds` for bounds_size().
FASTPLM_GROUP_CODE
template <typename Group, typename Id>
FASTPLM_HD void corrupt_row(Group& group, SelectScratch& scratch, const CorruptSpansCall<Id>& call,
                            int64_t row, uint32_t* keys, const SpanBounds& bounds) {
  const SpanCounts of = call.counts_of(row);
  const int64_t input_width = call.input_width();
  const int64_t label_width = call.label_width();
  const int64_t input_length = call.input_length(of);
  const int64_t label_length = call.label_length(of);
  const Id* tokens = call.input_ids + call.rows.begin(row);
  Id* output = call.output_ids + row * input_width;
  int64_t* labels = call.labels + row * label_width;

  fill(group, output, input_length, input_width, call.pad_token_id);
  fill(group, labels, label_length, label_width, kIgnoredLabel);
  if (group.rank() == 0) {
    call.input_lengths[row] = input_length;
    call.label_lengths[row] = label_length;
    if (call.has_eos()) {
      output[input_length - 1] = static_cast<Id>(call.eos_token_id);
      labels[label_length - 1] = call.eos_token_id;
    }
    if (of.spans == 0 && of.kept == 1) output[0] = tokens[0];
  }
  if (of.spans == 0) return;

  cut(group, scratch, call, row, of.noise, of.spans, 0, keys, bounds.noise);
  cut(group, scratch, call, row, of.kept, of.spans, kKeptPosition, keys, bounds.kept);
  group.sync();
  const Runs runs = runs_of(group);
  for (int64_t span = runs.first; span < of.spans; span += runs.step) {
    const int64_t noise = bounds.noise[span];
    const int64_t noise_end = bounds.noise[span + 1];
    const int64_t kept = bounds.kept[span];
    const int64_t kept_end = bounds.kept[span + 1];
    copy_run(runs, tokens + kept + noise, kept_end - kept, output + kept + span);
    copy_run(runs, tokens + kept_end + noise, noise_end - noise, labels + noise + span + 1);
    if (runs.lane == 0) {
      output[kept_end + span] = static_cast<Id>(call.sentinel_ids[span]);
      labels[noise + span] = call.sentinel_ids[span];
    }
  }
}

}  // namespace fastplm
