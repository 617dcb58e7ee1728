// fastplm_C::product on the CPU. Each block of the result is one thread's work and its sums go one
// way whichever thread that is, so results do not depend on how many there are.
#include "linear.h"

#include <atomic>

#include "tensors.h"

namespace fastplm {
namespace {

FASTPLM_CLONES void run_pack(const Cut& cut, const Matrix& a, int64_t group, float* packed) {
  const int64_t first = group * kPackTiles;
  pack_tiles(cut, a, first, std::min(first + kPackTiles, cut.tiles), packed);
}

FASTPLM_CLONES void run_block(const Cut& cut, const float* packed, const Matrix& b,
                              const float* bias, float* c, int64_t c_row, int64_t block) {
  block_product(cut, packed, b, bias, c, c_row, block);
}

// function(i) for each i below count, by whichever thread is free.
template <typename Function>
void in_parallel(int64_t count, const Function& function) {
  std::atomic<int64_t> next(0);
  torch::stable::parallel_for(0, count, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) function(i);
  });
}

Matrix matrix_of(const Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), tensor.stride(0), tensor.stride(1)};
}

// a [M, K] and b [K, N], neither of them empty, of each of which one stride is 1; bias [N]; out
// [M, N], dense.
void product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Tensor& out) {
  const Cut cut(a.size(0), b.size(1), a.size(1));
  const Dense<float> first(bias);
  const Matrix left = matrix_of(a), right = matrix_of(b);
  Tensor buffer = new_empty(out, {cut.packed_size()});
  float* packed = buffer.mutable_data_ptr<float>();
  float* c = out.mutable_data_ptr<float>();
  in_parallel(ceil_div(cut.tiles, kPackTiles),
              [&](int64_t group) { run_pack(cut, left, group, packed); });
  in_parallel(cut.blocks_down * cut.blocks_across, [&](int64_t block) {
    run_block(cut, packed, right, first.data(), c, out.stride(0), block);
  });
}

// Whether this CPU has AVX-512, but not of the maker for whose CPUs alone MKL uses it.
bool mkl_leaves_avx512_unused() {
#if defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("intel") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def("product(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out) -> ()");
  library.def("mkl_leaves_avx512_unused() -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("product", TORCH_BOX(&fastplm::product));
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CompositeExplicitAutograd, library) {
  library.impl("mkl_leaves_avx512_unused", TORCH_BOX(&fastplm::mkl_leaves_avx512_unused));
}
