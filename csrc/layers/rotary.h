// Heads whose pairs of elements are rotated by the angles of a position; all in fp32, whatever the dtype of the tensor.
//
//   (a, b) -> (a cos - b sin, b cos + a sin)      a, b the elements i and i + half of a head
//
// Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv 2104.09864), equation
// 34. Included once a level.

namespace fastplm::FASTPLM_LEVEL {

// to [2 half] = from [2 half], rotated; to may be from. room has space for 2 half numbers.
template <typename T>
FASTPLM_HD void rotate_head(int64_t half, const float* cos, const float* sin, const T* from, T* to, float* room) {
  const float* x = as_floats(2 * half, 2 * half, from, room);
  float* y = floats_for(2 * half, 2 * half, to, room);
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) {
    const Floats a = at(x + i), b = at(x + half + i), c = at(cos + i), s = at(sin + i);
    at(y + i) = a * c - b * s;
    at(y + half + i) = b * c + a * s;
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    y[i] = a * cos[i] - b * sin[i];
    y[half + i] = b * cos[i] + a * sin[i];
  }
  narrow(2 * half, y, to);
}

}  // namespace fastplm::FASTPLM_LEVEL
