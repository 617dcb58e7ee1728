// The operators of fastplm_C that index a corpus: on the CPU, over tensors that may be memory maps
// of files of any size. They are called by fastplm/data/index.py, which checks their arguments.
#include "index.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace fastplm {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::contiguous;
using torch::stable::Tensor;

int64_t sentence_chunks_op(const Tensor& sentences, const Tensor& documents, int64_t room,
                           Tensor& out) {
  const Tensor dense_sentences = contiguous(sentences);
  const Tensor dense_documents = contiguous(documents);
  STD_TORCH_CHECK(dense_sentences.numel() > 0 && dense_documents.numel() > 0 && out.dim() == 2 &&
                      out.size(0) == 3 && out.is_contiguous(),
                  "sentence_chunks: boundaries must not be empty, out must be contiguous [3, n]");
  return sentence_chunks(dense_sentences.const_data_ptr<int64_t>(), dense_sentences.numel() - 1,
                         dense_documents.const_data_ptr<int64_t>(), dense_documents.numel() - 1,
                         room, out.mutable_data_ptr<int64_t>(), out.size(1));
}

Tensor as_tensor(const Tensor& like, const std::vector<int64_t>& values) {
  Tensor tensor =
      torch::stable::new_empty(like, {static_cast<int64_t>(values.size())}, ScalarType::Long);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

std::tuple<Tensor, Tensor> pack_sequences_op(const Tensor& lengths, int64_t capacity) {
  const Tensor dense = contiguous(lengths);
  Packing packing;
  const bool packed = capacity >= 1 && pack_sequences(dense.const_data_ptr<int64_t>(),
                                                      dense.numel(), capacity, &packing);
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
  library.impl("sentence_chunks", TORCH_BOX(&fastplm::sentence_chunks_op));
  library.impl("pack_sequences", TORCH_BOX(&fastplm::pack_sequences_op));
}
