// What the calls of whole layers share (encoder.cpp, decoder.cpp). Included once a level, after rowwise.h, gelu.h
// and gemm.h.

namespace fastplm::FASTPLM_LEVEL {

inline const float* floats(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

// Whether it is of this type and on the CPU, with memory: a storage can be freed under its tensor.
inline bool is_here(const Tensor& tensor, ScalarType type = ScalarType::Float) {
  return tensor.is_cpu() && tensor.scalar_type() == type &&
         (tensor.numel() == 0 || tensor.const_data_ptr() != nullptr);
}

// Whether it is a dense row of so many numbers.
inline bool is_row(const Tensor& tensor, int64_t width) {
  return is_here(tensor) && tensor.dim() == 1 && tensor.size(0) == width && tensor.is_contiguous();
}

// Whether it is a weight [rows, columns] in 8 bits.
inline bool is_packed(const Tensor& weight, int64_t rows, int64_t columns) {
  return is_here(weight, ScalarType::Byte) && weight.dim() == 4 && weight.is_contiguous() &&
         weight.size(0) == ceil_div(rows, kPanel) && weight.size(1) == ceil_div(columns, kStepDepth) &&
         weight.size(2) == kPanel && weight.size(3) == kStepDepth;
}

// x [count] = gelu(x), in its form with a tanh or without. It is a call, as the tiles of the product that it
// ends need all registers.
__attribute__((noinline)) inline void gelu_row(bool tanh, int64_t count, float* x) {
  tanh ? gelu_elements<true>(count, x, x) : gelu_elements<false>(count, x, x);
}

// The epilogues of a product: what happens to a piece of a row of its result.
struct Gelu {
  FASTPLM_HD void operator()(int64_t, int64_t, int64_t count, float* values) const {
    gelu_row(tanh, count, values);
  }
  bool tanh;
};

struct AddResidual {
  FASTPLM_HD void operator()(int64_t row, int64_t column, int64_t count, float* values) const {
    const float* more = from + row * stride + column;
    for (int64_t i = 0; i < count; ++i) values[i] += more[i];
  }
  const float* from;
  int64_t stride;
};

// A linear layer's weight [N, K], or a Conv1D's [K, N], with a stride of 1; or either in 8 bits, with its scale [N]; and
// a bias [N] or none. Or those of a norm. They are read where they are, as they are now.
struct Pair {
  // Takes the tensors of a linear layer or norm, and moves on to the next.
  Pair(const Tensor*& next, bool int8, bool biased = true, bool by_inputs = false)
      : weight(*next++), scale(int8 ? next++ : nullptr), bias(biased ? next++ : nullptr),
        conv1d(by_inputs && !int8) {}
  int64_t outputs() const {
    if (scale != nullptr) return scale->dim() == 1 ? scale->size(0) : 0;
    return weight.dim() == 2 ? weight.size(conv1d ? 1 : 0) : 0;
  }
  bool is_linear(int64_t wanted, int64_t inputs) const {
    if (wanted < 1 || inputs < 1 || (bias != nullptr && !is_row(*bias, wanted))) return false;
    if (scale != nullptr) return is_packed(weight, wanted, inputs) && is_row(*scale, wanted);
    return is_here(weight) && weight.dim() == 2 && weight.size(conv1d ? 1 : 0) == wanted &&
           weight.size(conv1d ? 0 : 1) == inputs && (weight.stride(0) == 1 || weight.stride(1) == 1);
  }
  bool is_norm(int64_t width) const { return is_row(weight, width) && (bias == nullptr || is_row(*bias, width)); }
  bool is_laid_out_as(const Pair& other) const {
    return scale != nullptr || (weight.stride(0) == other.weight.stride(0) &&
                                weight.stride(1) == other.weight.stride(1));
  }

  const Tensor& weight;
  const Tensor *scale, *bias;
  bool conv1d;
};

constexpr int64_t kNormRows = 64;  // that are worth a thread

// out [rows, width] = norm(in): layer norm, or without a bias T5's. `out` may be `in`.
inline void norm(int64_t rows, int64_t width, float eps, const Pair& pair, const float* in, float* out) {
  const float* bias = pair.bias == nullptr ? nullptr : floats(*pair.bias);
  for_ranges(rows, 1, kNormRows, [&](int64_t first, int64_t last) {
    for (int64_t i = first * width; i < last * width; i += width) {
      norm_row(width, eps, bias != nullptr, floats(pair.weight), bias, in + i, out + i);
    }
  });
}

// out [rows, N] = finish(in [rows, K] weight^T + bias) for each of kCount weights of one shape and layout, whose
// results lie row by row beside one another in places `stride` apart.
template <size_t kCount, typename Finish = Nothing>
void dense(int64_t rows, const float* in, int64_t width, const std::array<const Pair*, kCount>& pairs,
           const std::array<float*, kCount>& out, int64_t stride, const Finish& finish = {}) {
  const auto bias_of = [&](size_t i) { return pairs[i]->bias == nullptr ? nullptr : floats(*pairs[i]->bias); };
  if (pairs[0]->scale != nullptr) {
    std::array<Int8Factor<float>, kCount> factors;
    for (size_t i = 0; i < kCount; ++i) {
      const Pair& pair = *pairs[i];
      factors[i] = {static_cast<const uint8_t*>(pair.weight.const_data_ptr()), floats(*pair.scale), bias_of(i),
                    out[i]};
    }
    return multiply_int8<float>(in, rows, width, factors.data(), kCount, pairs[0]->outputs(), stride, finish);
  }
  std::array<Factor<float>, kCount> factors;
  for (size_t i = 0; i < kCount; ++i) factors[i] = {floats(pairs[i]->weight), bias_of(i), out[i]};
  const Operand weight(pairs[0]->weight);
  const Operand b = pairs[0]->conv1d ? weight : weight.transposed();
  multiply<float>({in, rows, width, width, 1}, b, factors.data(), kCount, stride, finish);
}

// The same for one weight.
template <typename Finish = Nothing>
void dense(int64_t rows, const float* in, int64_t width, const Pair& pair, float* out, int64_t stride,
           const Finish& finish = {}) {
  dense<1>(rows, in, width, {&pair}, {out}, stride, finish);
}

}  // namespace fastplm::FASTPLM_LEVEL
