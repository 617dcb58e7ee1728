// The operators of fastplm_C that index a corpus: on the CPU, over tensors that may be memory maps
// of files of any size. They are called by fastplm/data/index.py, which checks their arguments.
#include "index/index.h"

#include <tuple>

#include "common/operators.h"

namespace fastplm {
namespace {

constexpr int64_t kMostCapacity = 1 << 24;

int64_t sentence_chunks_op(const Tensor& sentences, const Tensor& documents, int64_t room,
                           Tensor& out) {
  Shapes shapes;
  shapes.any(sentences, "sentences [S + 1]");
  shapes.any(documents, "documents [D + 1]");
  shapes.dense(out, "out [3, C]");
  const Tensor dense_sentences = dense(sentences), dense_documents = dense(documents);
  return sentence_chunks(data_of<int64_t>(dense_sentences), shapes['S'],
                         data_of<int64_t>(dense_documents), shapes['D'],
                         room, data_to<int64_t>(out), shapes['C']);
}

Tensor as_tensor(const Tensor& like, const Vector<int64_t>& values) {
  Tensor tensor = empty_tensor(like, {static_cast<int64_t>(values.size())}, ScalarType::Long);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

std::tuple<Tensor, Tensor> pack_sequences_op(const Tensor& lengths, int64_t capacity) {
  Shapes().any(lengths, "lengths [N]");
  require(capacity >= 1 && capacity <= kMostCapacity, "capacity must be 1 to 2^24");
  const Tensor rows = dense(lengths);
  Packing packing;
  require(pack_sequences(data_of<int64_t>(rows), rows.numel(), capacity, &packing),
          "every length must be 1 to capacity");
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
