// csrc/index/index.h under AddressSanitizer: right results on good input, and no access beyond the arrays
// on garbage. Each array is an allocation of exactly its size.
#include "index/index.h"

#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <set>

namespace {

using fastplm::Packing;
using Random = std::mt19937_64;

#define EXPECT(condition)                                                \
  do {                                                                   \
    if (!(condition)) {                                                  \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition);       \
      std::exit(1);                                                      \
    }                                                                    \
  } while (false)

// A vector may own more memory than its size, where a stray access is not noticed.
template <typename T>
struct Exact {
  explicit Exact(const std::vector<T>& values) : size(values.size()), data(new T[values.size()]) {
    std::copy(values.begin(), values.end(), data.get());
  }
  int64_t size;
  std::unique_ptr<T[]> data;
};

int64_t below(Random& random, int64_t limit) { return static_cast<int64_t>(random() % limit); }

int64_t any_number(Random& random, int64_t size) {
  switch (random() % 4) {
    case 0: return below(random, size + 3) - 1;
    case 1: return std::numeric_limits<int64_t>::max() - below(random, 3);
    case 2: return std::numeric_limits<int64_t>::min() + below(random, 3);
    default: return static_cast<int64_t>(random());
  }
}

std::vector<int64_t> ascending(Random& random, int64_t last) {
  std::set<int64_t> members = {0, last};
  for (int64_t i = below(random, 30); i > 0; --i) members.insert(below(random, last + 1));
  return {members.begin(), members.end()};
}

// The number of runs; each run is checked.
int64_t cut(const std::vector<int64_t>& sentences, const std::vector<int64_t>& documents,
            int64_t room) {
  const Exact<int64_t> s(sentences), d(documents);
  const auto build = [&](int64_t* out, int64_t capacity) {
    return fastplm::sentence_chunks(s.data.get(), s.size - 1, d.data.get(), d.size - 1, room, out,
                                    capacity);
  };
  const int64_t count = build(nullptr, 0);
  for (const int64_t capacity : {count, count / 2, count + 5}) {
    if (count < 0) break;
    const Exact<int64_t> out(std::vector<int64_t>(3 * capacity, -7));
    EXPECT(build(out.data.get(), capacity) == count);
    for (int64_t i = 0; i < capacity; ++i) {
      const int64_t begin = out.data[i], end = out.data[capacity + i];
      const int64_t document = out.data[2 * capacity + i];
      if (i >= count) {
        EXPECT(begin == -7 && end == -7 && document == -7);
        continue;
      }
      EXPECT(0 <= begin && begin < end && end < s.size);
      EXPECT(d.data[document] <= begin && end <= d.data[document + 1]);
    }
  }
  return count;
}

void sentence_chunks(Random& random) {
  const std::vector<int64_t> sentences = ascending(random, 1 + below(random, 300));
  const int64_t count = static_cast<int64_t>(sentences.size()) - 1;
  const int64_t room = 1 + below(random, 80);
  EXPECT(cut(sentences, ascending(random, count), room) >= 0);
  EXPECT(cut(sentences, {0, count + 1}, room) == -1);

  std::vector<int64_t> garbage(1 + below(random, 20)), documents(1 + below(random, 20));
  for (int64_t& value : garbage) value = any_number(random, 20);
  cut(garbage, ascending(random, static_cast<int64_t>(garbage.size()) - 1), room);
  for (int64_t& value : documents) value = any_number(random, count);
  cut(sentences, documents, room);
}

void pack_sequences(Random& random) {
  const int64_t capacity = 1 + below(random, 300);
  std::vector<int64_t> lengths(below(random, 200));
  for (int64_t& length : lengths) length = 1 + below(random, capacity);
  const Exact<int64_t> exact(lengths);
  Packing packing;
  EXPECT(fastplm::pack_sequences(exact.data.get(), exact.size, capacity, &packing));
  EXPECT(packing.offsets.front() == 0 && packing.offsets.back() == exact.size);
  EXPECT(std::set<int64_t>(packing.members.begin(), packing.members.end()).size() ==
         lengths.size());
  int half_empty = 0;
  for (std::size_t bin = 0; bin + 1 < packing.offsets.size(); ++bin) {
    int64_t total = 0;
    for (int64_t i = packing.offsets[bin]; i < packing.offsets[bin + 1]; ++i) {
      total += lengths.at(packing.members.at(i));
    }
    EXPECT(0 < total && total <= capacity);
    half_empty += 2 * total <= capacity;
  }
  EXPECT(half_empty <= 1);
  if (lengths.empty()) return;
  const int64_t wrong[] = {0, -1, capacity + 1, std::numeric_limits<int64_t>::max(),
                           std::numeric_limits<int64_t>::min()};
  exact.data[below(random, exact.size)] = wrong[random() % 5];
  EXPECT(!fastplm::pack_sequences(exact.data.get(), exact.size, capacity, &packing));
}

}  // namespace

int main() {
  Random random(1);
  for (int round = 0; round < 500; ++round) {
    sentence_chunks(random);
    pack_sequences(random);
  }
  return 0;
}
