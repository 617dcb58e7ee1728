// csrc/attention/attention.h under sanitizers, compiled for one level: tensors are
// allocations of exactly their size, results those of plain loops in double.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/attention_head.h"
#include "common/philox.h"
#include "one_level.h"

#include "common/lanes.h"
#include "common/rowwise.h"
#include "attention/attention.h"

namespace {

using namespace fastplm;
using namespace fastplm::tested;

struct Shape {
  int64_t seqlen_q, seqlen_k, dim;
  bool masked, causal, biased, dense;
  uint32_t threshold;
  int64_t left, right;  // negative: no bound
};

struct Rows {
  Rows(int64_t rows, int64_t dim) : size(rows * dim), dim(dim), data(new float[rows * dim]) {}
  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size; ++i) data[i] = normal(random);
  }
  double operator()(int64_t row, int64_t d) const { return data[row * dim + d]; }
  Strided<const float> in() const { return {data.get(), dim}; }
  Strided<float> out() { return {data.get(), dim}; }

  int64_t size, dim;
  std::unique_ptr<float[]> data;
};

constexpr int64_t kFurthest = 3;
constexpr uint64_t kSeed = 0x123456789abcdefull, kSample = (1ull << 40) + 1;
constexpr uint32_t kHead = 5;

bool dropped(int64_t i, int64_t j, uint32_t threshold) {
  WordLanes<1> counter;
  counter.x[0] = static_cast<uint32_t>(i);
  counter.y[0] = static_cast<uint32_t>(kSample);
  counter.z[0] = static_cast<uint32_t>(kSample >> 32);
  const uint32_t call = static_cast<uint32_t>(j / 64 * 4 + j % 8 / 2);
  counter.w[0] = (call << 12 | kHead) << 4 | static_cast<uint32_t>(Stream::kDropout);
  philox4x32<1, kDropoutRounds>(kSeed, counter);
  const uint32_t words[4] = {counter.x[0], counter.y[0], counter.z[0], counter.w[0]};
  const int64_t octet = j / 8 % 8;
  return (words[octet / 2] >> (octet % 2 * 16 + j % 2 * 8) & 0xff) < threshold;
}

// The largest difference, in units of the possible rounding: n times an epsilon for a sum of n
// terms.
double worst = 0.0;

void compare(const char* what, const Shape& s, const Rows& got, const std::vector<double>& gold) {
  double largest = 1.0;
  for (double value : gold) largest = std::max(largest, std::abs(value));
  const double terms = static_cast<double>(s.seqlen_q + s.seqlen_k + s.dim);
  for (int64_t i = 0; i < got.size; ++i) {
    const double error = std::abs(got.data[i] - gold[i]) / (largest * terms * 0x1p-24);
    worst = std::max(worst, error);
    if (!(error < 2.0)) {
      std::fprintf(stderr, "%s: Tq %ld Tk %ld D %ld masked %d causal %d biased %d dense %d drop %u window %ld %ld: %g, not %g\n",
                   what, static_cast<long>(s.seqlen_q), static_cast<long>(s.seqlen_k),
                   static_cast<long>(s.dim), s.masked, s.causal, s.biased, s.dense, s.threshold,
                   static_cast<long>(s.left), static_cast<long>(s.right),
                   static_cast<double>(got.data[i]), gold[i]);
      std::exit(1);
    }
  }
}

void run(const Shape& s, std::mt19937& random) {
  const int64_t tq = s.seqlen_q, tk = s.seqlen_k, dim = s.dim;
  Rows query(tq, dim), key(tk, dim), value(tk, dim), grad_out(tq, dim);
  for (Rows* rows : {&query, &key, &value, &grad_out}) rows->fill(random);
  const std::unique_ptr<bool[]> mask(new bool[tk]);
  for (int64_t j = 0; j < tk; ++j) mask[j] = !s.masked || random() % 3 > 0;
  // A dense mask with gaps between its rows, and with a row that may attend to nothing.
  const std::unique_ptr<bool[]> dense(new bool[std::max<int64_t>(1, tq * (tk + 3))]);
  const auto seen = [&](int64_t i, int64_t j) -> bool& { return dense[i * (tk + 3) + j]; };
  for (int64_t i = 0; i < tq; ++i) {
    for (int64_t j = 0; j < tk + 3; ++j) {
      seen(i, j) = !s.dense || j >= tk || (i != tq / 2 && j < tk - i / 3 && random() % 3 > 0);
    }
  }
  const float bias_weight[4] = {0.5f, -1.0f, 2.0f, 0.25f};
  const int64_t bucket[2 * kFurthest + 1] = {0, 0, 1, 3, 2, 2, 1};
  const double scale = 0.3;

  // The contents of masked keys must not matter.
  std::vector<double> k(tk * dim), v(tk * dim);
  for (int64_t j = 0; j < tk; ++j) {
    for (int64_t d = 0; d < dim; ++d) {
      if (mask[j]) {
        k[j * dim + d] = key(j, d);
        v[j * dim + d] = value(j, d);
      } else {
        key.data[j * dim + d] = value.data[j * dim + d] = std::nanf("");
      }
    }
  }

  const double rescale = 256.0 / std::max(256 - static_cast<int>(s.threshold), 1);
  std::vector<double> out(tq * dim), dq(tq * dim), dk(tk * dim), dv(tk * dim);
  std::vector<double> dbias(4), probs(tk), dprobs(tk);
  for (int64_t i = 0; i < tq; ++i) {
    double most = -INFINITY, total = 0.0, delta = 0.0;
    const auto distance = [&](int64_t j) { return j - i - (s.causal ? tk - tq : 0); };
    const auto in_bucket = [&](int64_t j) {
      return bucket[std::clamp(distance(j), -kFurthest, kFurthest) + kFurthest];
    };
    for (int64_t j = 0; j < tk; ++j) {
      double score = 0.0;
      for (int64_t d = 0; d < dim; ++d) score += query(i, d) * k[j * dim + d];
      score = score * scale + (s.biased ? bias_weight[in_bucket(j)] : 0.0f);
      if (!mask[j] || !seen(i, j) || (s.causal && distance(j) > 0)) score = -INFINITY;
      if ((s.left >= 0 && distance(j) < -s.left) || (s.right >= 0 && distance(j) > s.right)) score = -INFINITY;
      probs[j] = score;
      most = std::max(most, score);
    }
    if (most == -INFINITY) continue;
    for (double& p : probs) total += p = std::exp(p - most);
    for (int64_t j = 0; j < tk; ++j) {
      probs[j] /= total;
      const double kept = dropped(i, j, s.threshold) ? 0.0 : rescale;
      dprobs[j] = 0.0;
      for (int64_t d = 0; d < dim; ++d) {
        out[i * dim + d] += kept * probs[j] * v[j * dim + d];
        dv[j * dim + d] += kept * probs[j] * grad_out(i, d);
        dprobs[j] += kept * grad_out(i, d) * v[j * dim + d];
      }
      delta += probs[j] * dprobs[j];
    }
    for (int64_t j = 0; j < tk; ++j) {
      const double ds = probs[j] * (dprobs[j] - delta);
      if (s.biased) dbias[in_bucket(j)] += ds;
      for (int64_t d = 0; d < dim; ++d) {
        dq[i * dim + d] += scale * ds * k[j * dim + d];
        dk[j * dim + d] += scale * ds * query(i, d);
      }
    }
  }

  const std::unique_ptr<Softmax[]> softmax(new Softmax[tq]);
  Head<float> head{tq,         tk,       dim,      tq, query.in(), key.in(), value.in(),
                   mask.get(), {},       s.causal, static_cast<float>(scale), {}, {}, softmax.get()};
  head.left = s.left;
  head.right = s.right;
  if (s.dense) head.attn_mask = {dense.get(), tk + 3};
  if (s.biased) head.bias = {bias_weight, 1, 4, bucket, kFurthest};
  if (s.threshold > 0) head.dropout = {kSeed, kSample, kHead, s.threshold};
  {
    Rows result(tq, dim);
    Scratch scratch;
    scratch.reserve(HeadPass<float>::floats(tq, tk, dim, false));
    HeadPass<float>(head, scratch).forward(result.out(), scratch);
    compare("out", s, result, out);
  }
  Rows got_q(tq, dim), got_k(tk, dim), got_v(tk, dim), got_bias(4, 1);
  double by_bucket[4] = {};
  Scratch scratch;
  scratch.reserve(HeadPass<float>::floats(tq, tk, dim, true));
  HeadPass<float>(head, scratch)
      .backward(grad_out.in(), got_q.out(), got_k.out(), got_v.out(),
                s.biased ? by_bucket : nullptr, scratch);
  compare("dq", s, got_q, dq);
  compare("dk", s, got_k, dk);
  compare("dv", s, got_v, dv);
  for (int i = 0; i < 4; ++i) got_bias.data[i] = static_cast<float>(by_bucket[i]);
  compare("dbias", s, got_bias, dbias);
}

}  // namespace

int main() {
  std::mt19937 random(7);
  const int64_t lengths[] = {0, 1, 5, 16, 47, 65, 130};
  int runs = 0;
  for (int64_t tq : lengths) {
    for (int64_t tk : lengths) {
      for (int64_t dim : {1, 16, 40}) {
        // Every pair of options, spread over the shapes.
        for (int option = 0; option < 4; ++option) {
          const int bits = option * 5 + runs % 3;
          const uint32_t threshold = runs % 4 == 0 ? 26 : runs % 16 == 1 ? 256 : 0;
          const bool dense = runs % 3 == 1;
          const int64_t left = runs % 5 == 0 ? runs % 40 : -1, right = runs % 10 == 5 || runs % 7 == 3 ? runs % 30 : -1;
          run({tq, tk, dim, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, dense, threshold, left, right}, random);
          ++runs;
        }
      }
    }
  }
  std::printf("%d shapes, worst error %.2f of the bound's 2\n", runs, worst);
  return 0;
}
