// The operators of fastplm_C that index a corpus: on the CPU, over tensors that may be memory maps
// of files of any size. They are called by fastplm/data/index.py, which checks their arguments.
#include "index/index.h"

#include <tuple>

#include "common/operators.h"

namespace fastplm {
namespace {

int64_t sentence_chunks_op(const Tensor& sentences, const Tensor& documents, int64_t room,
                           Tensor& out) {
  const Tensor dense_sentences = dense(sentences), dense_documents = dense(documents);
  STD_TORCH_CHECK(dense_sentences.numel() > 0 && dense_documents.numel() > 0 && out.dim() == 2 &&
                      out.size(0) == 3 && out.is_contiguous(),
                  "sentence_chunks: boundaries must not be empty, out must be contiguous [3, n]");
  return sentence_chunks(dense_sentences.const_data_ptr<int64_t>(), dense_sentences.numel() - 1,
                         dense_documents.const_data_ptr<int64_t>(), dense_documents.numel() - 1,
                         room, out.mutable_data_ptr<int64_t>(), out.size(1));
}

Tensor as_tensor(const Tensor& like, const Vector<int64_t>& values) {
  Tensor tensor = empty_tensor(like, {static_cast<int64_t>(values.size())}, ScalarType::Long);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

std::tuple<Tensor, Tensor> pack_sequences_op(const Tensor& lengths, int64_t capacity) {
  const Tensor rows = dense(lengths);
  Packing packing;
  const bool packed = capacity >= 1 && pack_sequences(rows.const_data_ptr<int64_t>(), rows.numel(),
                                                      capacity, &packing);
  STD_TORCH_CHECK(packed, "pack_sequences: every length must be 1 to capacity");
  return {as_tensor(lengths, packing.offsets), as_tensor(lengths, packing.members)};
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def(
      "sentence_chunks(Tensor sentences, Tensor documents, int room, Tensor(a!) out) -> int");
  library.def("pack_sequences(Tensor lengths, int capacity) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("sentence_chunks", (fastplm::Operator<&fastplm::sentence_chunks_op, "sentence_chunks">::call));
  library.impl("pack_sequences", (fastplm::Operator<&fastplm::pack_sequences_op, "pack_sequences">::call));
}
