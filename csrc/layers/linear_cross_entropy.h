// Softmax of rows of logits: the statistics of a loss over a vocabulary, in two passes over a row while it
// is in the cache. Included once a level, after rowwise.h.
//
//   m = max(z)    l = sum(e^(z - m))    d = sum(z - m)    s = sum(e^((z - m) / temperature))

namespace fastplm::FASTPLM_LEVEL {

struct RowStatistics {
  float m, l, d, s;
};

// With `write`, z becomes e^(z - m) / l. With `finite`, a row that is all minus infinity has m = 0,
// as the result would be NaN.
FASTPLM_HD RowStatistics softmax_row(float* z, int64_t columns, bool finite, bool write,
                                     bool sampled, float temperature) {
  constexpr int64_t kBlock = kTogether * kWidth;
  const int64_t whole = columns / kBlock * kBlock;
  float m = largest_of(Stored{z}, whole);
  int64_t j = whole;
  for (; j < columns; ++j) m = z[j] > m ? z[j] : m;
  const float pivot = finite && m == -kInfinity ? 0.0f : m;
  const float cooler = 1.0f / temperature;
  Several<kTogether> l = {}, d = {}, s = {};
  const auto add = [&](float* at_j) FASTPLM_INLINE {
    const auto below = load<kTogether>(at_j) - pivot;
    const auto power = exponential(below);
    l = l + power;
    d = d + below;
    if (sampled) s = s + exponential(below * cooler);
    if (write) store(power, at_j);
  };
  for (j = 0; j < whole; j += kBlock) add(z + j);
  if (whole < columns) {  // the last vector is filled up with numbers that add 0
    float rest[kBlock];
    std::fill(rest, rest + kBlock, -kInfinity);
    std::copy(z + whole, z + columns, rest);
    const auto before = d;
    add(rest);
    d = before;
    for (j = whole; j < columns; ++j) d.each[0][0] += z[j] - pivot;
    if (write) std::copy(rest, rest + (columns - whole), z + whole);
  }
  const RowStatistics row{m, sum_of(l), sum_of(d), sum_of(s)};
  if (write) {
    const float inverse = 1.0f / row.l;
    for (j = 0; j < whole; j += kBlock) store(load<kTogether>(z + j) * inverse, z + j);
    for (; j < columns; ++j) z[j] *= inverse;
  }
  return row;
}

}  // namespace fastplm::FASTPLM_LEVEL
