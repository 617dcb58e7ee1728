// The rows of heads in the tensors of a call of attention, padded or packed. Included once a level.

namespace fastplm::FASTPLM_LEVEL {
namespace {

// Heads [B, H, T, D] with any strides, or [N, H, D] of packed sequences, given by their starts.
template <typename T>
struct Heads {
  Heads(const Tensor& tensor, const int32_t* starts)
      : data(const_cast<T*>(data_of<std::remove_const_t<T>>(tensor))),
        starts(starts),
        batch_stride(starts ? 0 : tensor.stride(0)),
        head_stride(tensor.stride(1)),
        row_stride(tensor.stride(starts ? 0 : 2)),
        length(starts ? 0 : tensor.size(2)) {}
  int64_t seqlen(int64_t b) const { return starts ? starts[b + 1] - starts[b] : length; }
  template <typename U>
  Strided<U> head(int64_t b, int64_t h) const {
    const int64_t row = starts ? starts[b] * row_stride : b * batch_stride;
    return {data + row + h * head_stride, row_stride};
  }

  T* data;
  const int32_t* starts;
  int64_t batch_stride, head_stride, row_stride, length;
};

// Whether sequences lie one after the other within the rows, and none is longer than max_seqlen. If
// not, the op says what is wrong.
void check_starts(const Dense<int32_t>& starts, const Tensor& rows, int64_t longest) {
  if (!starts) return;
  const int32_t* at = starts.data();
  const int64_t batch = starts.size() - 1;
  bool fit = at[0] == 0 && at[batch] <= rows.size(0);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = int64_t{at[b + 1]} - at[b];
    fit = fit && length >= 0 && length <= longest;
  }
  require(fit, "cu_seqlens do not fit the rows or the longest length");
}

// A tensor to fill, with a projection's order in memory: [B, T, H, D], or [N, H, D] with 0 in spare
// rows.
Tensor like_projection(const Tensor& like, const Dense<int32_t>& starts) {
  if (!starts) {
    const Tensor out =
        empty_tensor(like, {like.size(0), like.size(2), like.size(1), like.size(3)});
    return torch::stable::transpose(out, 1, 2);
  }
  Tensor out = empty_tensor_like(like);
  const int64_t row = like.size(1) * like.size(2) * static_cast<int64_t>(like.element_size());
  const int64_t used = starts.data()[starts.size() - 1];
  auto* bytes = static_cast<char*>(out.mutable_data_ptr());
  std::memset(bytes + used * row, 0, (like.size(0) - used) * row);
  return out;
}

}  // namespace
}  // namespace fastplm::FASTPLM_LEVEL
