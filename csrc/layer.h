// What the calls of whole layers share (encoder.cpp, decoder.cpp). Included once a level, after gelu.h and
// linear_int8.h.

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

}  // namespace fastplm::FASTPLM_LEVEL
