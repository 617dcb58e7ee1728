// The index of a corpus on disk: runs of sentences and packed sequences. fastplm/data/index.py has
// the specification in Python. Files are not trusted: whatever they hold, no function here reads or
// writes beyond the sizes it was given.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/scratch.h"

namespace fastplm {

// Cuts each document into runs of sentences of `room` tokens or more, the last one of a document
// excepted; runs of one token are left out. Sentence i is tokens sentences[i] to sentences[i + 1],
// document d is sentences documents[d] to documents[d + 1]. Run i becomes out[i] (its first
// sentence), out[capacity + i] (the one after its last) and out[2 * capacity + i] (its document),
// if i < capacity. Returns the number of all runs, or -1 if a document is not within the sentences.
inline int64_t sentence_chunks(const int64_t* sentences, int64_t sentence_count,
                               const int64_t* documents, int64_t document_count, int64_t room,
                               int64_t* out, int64_t capacity) {
  // The numbers are unsigned, so that the difference of garbage in a file cannot overflow.
  const auto tokens = [&](int64_t begin, int64_t end) {
    return static_cast<uint64_t>(sentences[end]) - static_cast<uint64_t>(sentences[begin]);
  };
  int64_t count = 0;
  for (int64_t document = 0; document < document_count; ++document) {
    int64_t begin = documents[document];
    const int64_t last = documents[document + 1];
    if (begin < 0 || last < begin || last > sentence_count) return -1;
    while (begin < last) {
      int64_t end = begin + 1;
      while (end < last && tokens(begin, end) < static_cast<uint64_t>(room)) ++end;
      if (tokens(begin, end) >= 2) {
        if (count < capacity) {
          out[count] = begin;
          out[capacity + count] = end;
          out[2 * capacity + count] = document;
        }
        ++count;
      }
      begin = end;
    }
  }
  return count;
}

// A set of the integers 0 to largest: a binary tree in which a node says whether any leaf below it
// is in the set.
class IntegerSet {
 public:
  explicit IntegerSet(int64_t largest) {
    while (leaves_ <= static_cast<std::size_t>(largest)) leaves_ *= 2;
    any_.resize(2 * leaves_);
  }
  void put(int64_t value, bool present) {
    std::size_t node = leaves_ + static_cast<std::size_t>(value);
    any_[node] = present;
    for (node /= 2; node > 0; node /= 2) any_[node] = any_[2 * node] | any_[2 * node + 1];
  }
  // The smallest member that is not below `value`; there must be one.
  int64_t at_least(int64_t value) const {
    std::size_t node = leaves_ + static_cast<std::size_t>(value);
    if (any_[node]) return value;
    while (node % 2 == 1 || !any_[node + 1]) node /= 2;
    ++node;  // from a left child to its sibling; the loop below finds the smallest member there
    while (node < leaves_) node = 2 * node + (any_[2 * node] ? 0 : 1);
    return static_cast<int64_t>(node - leaves_);
  }

 private:
  std::size_t leaves_ = 1;
  Vector<uint8_t> any_;
};

struct Packing {
  Vector<int64_t> offsets;  // [bins + 1] where each bin's members begin
  Vector<int64_t> members;  // [count] indices of sequences, bin after bin
};

// Best-fit-decreasing bin packing in O(count log capacity) (Ding et al. 2024, arXiv 2404.10830):
// sequences in the order of falling length, equal ones by index, each go into the bin with the
// least room that still holds it. If there are several such bins, the last one filled is taken.
// False if a length is not in [1, capacity].
inline bool pack_sequences(const int64_t* lengths, int64_t count, int64_t capacity,
                           Packing* packing) {
  Vector<int64_t> next(capacity + 1);  // the next place of a sequence of capacity - i tokens
  for (int64_t i = 0; i < count; ++i) {
    if (lengths[i] < 1 || lengths[i] > capacity) return false;
    ++next[capacity - lengths[i] + 1];
  }
  for (int64_t i = 1; i <= capacity; ++i) next[i] += next[i - 1];
  Vector<int64_t> order(count);
  for (int64_t i = 0; i < count; ++i) order[next[capacity - lengths[i]]++] = i;

  // The bins with the same room are a stack: its top in `newest`, the one below each in `older`.
  // There is always an empty bin; it is taken last, as it has the most room.
  Vector<int64_t> newest(capacity + 1, -1), older, bin_of(count), sizes;
  IntegerSet rooms(capacity);
  rooms.put(capacity, true);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t length = lengths[order[i]];
    const int64_t room = rooms.at_least(length);
    int64_t bin = newest[room];
    if (room == capacity) {
      bin = static_cast<int64_t>(older.size());
      older.push_back(-1);
      sizes.push_back(0);
    } else {
      newest[room] = older[bin];
      if (newest[room] < 0) rooms.put(room, false);
    }
    const int64_t left = room - length;
    older[bin] = newest[left];
    newest[left] = bin;
    if (left > 0) rooms.put(left, true);
    bin_of[i] = bin;
    ++sizes[bin];
  }

  packing->offsets.assign(1, 0);
  for (const int64_t size : sizes) packing->offsets.push_back(packing->offsets.back() + size);
  packing->members.resize(count);
  std::copy(packing->offsets.begin(), packing->offsets.end() - 1, sizes.begin());
  for (int64_t i = 0; i < count; ++i) packing->members[sizes[bin_of[i]]++] = order[i];
  return true;
}

}  // namespace fastplm
