// fastplm_C::product_bf16x3 and linear_bf16x3: fastplm_C::product and linear (linear.cpp) in fp32,
// used if torch.set_float32_matmul_precision("high") allows it.
#include "level.h"
#include "linear_bf16x3.h"
#include "operators.h"

#if FASTPLM_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastplm {
namespace {

#if FASTPLM_HAS_AMX
// Whether the CPU has AMX, the level allows it, and Linux gives this process the 8 KiB of tiles,
// for which a process must ask (Documentation/arch/x86/xstate.rst).
bool ask_for_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAvx512Bf16 = 1u << 5;
  constexpr int64_t kRequestPermission = 0x1023, kTileData = 18;
  if (level() != Level::kAvx512 || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  if (!__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || (eax & kAvx512Bf16) == 0) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_bf16x3() {
  static const bool has = ask_for_amx();
  return has;
}

// Memory for the steps of so many tiles.
struct Buffer {
  Buffer(const Tensor& like, int64_t tiles, int64_t steps)
      : bytes(empty_tensor(like, {tiles * steps * int64_t{sizeof(amx::Halves)} + kAlign},
                           ScalarType::Byte)) {}
  amx::Halves* data() {
    const auto at = reinterpret_cast<uintptr_t>(bytes.mutable_data_ptr());
    return reinterpret_cast<amx::Halves*>((at + kAlign - 1) / kAlign * kAlign);
  }

  static constexpr int64_t kAlign = alignof(amx::Halves);
  Tensor bytes;
};

// Multiplies one block of rows for each thread at a time, so that their tiles stay in the caches.
// If there are fewer blocks than threads, several threads share a block and divide the columns.
void multiply(const Fp32Matrix& a, const Fp32Matrix& b, const float* bias, const Tensor& like,
              float* out) {
  const int64_t steps = ceil_div(a.columns, amx::kStep), columns = b.columns;
  const auto tiles_of = [](int64_t size) { return round_up(size, amx::kPair) / amx::kSide; };
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t most = std::min(a.rows, threads * amx::kBlock);
  Buffer of_a(like, tiles_of(most), steps), of_b(like, tiles_of(columns), steps);
  amx::Halves *left = of_a.data(), *right = of_b.data();
  for_ranges(tiles_of(columns), 1, 4, [&](int64_t begin, int64_t end) {
    amx::pack_tiles(b.transposed(), begin, end, steps, true, right + begin * steps);
  });
  for (int64_t start = 0; start < a.rows; start += most) {
    const int64_t rows = std::min(most, a.rows - start), first = start / amx::kSide;
    for_ranges(tiles_of(rows), 1, 4, [&](int64_t begin, int64_t end) {
      amx::pack_tiles(a, first + begin, first + end, steps, false, left + begin * steps);
    });
    const int64_t blocks = ceil_div(rows, amx::kBlock), parts = ceil_div(threads, blocks);
    const int64_t part = round_up(ceil_div(columns, parts), amx::kPair);
    for_ranges(blocks * parts, 1, 1, [&](int64_t begin, int64_t end) {
      const amx::Tiles configured;
      for (int64_t i = begin; i < end; ++i) {
        const int64_t m = i / parts * amx::kBlock, n = i % parts * part;
        amx::block_product(left + m / amx::kSide * steps, right, bias, steps,
                           std::min(amx::kBlock, rows - m), n, std::min(n + part, columns), columns,
                           out + (start + m) * columns);
      }
    });
  }
}

#else

bool has_bf16x3() {
  return false;
}

void multiply(const Fp32Matrix&, const Fp32Matrix&, const float*, const Tensor&, float*) {}

#endif

Fp32Matrix matrix_of(const Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), tensor.size(0), tensor.size(1), tensor.stride(0),
          tensor.stride(1)};
}

void run(const Fp32Matrix& a, const Fp32Matrix& b, const std::optional<Tensor>& bias, Tensor& out) {
  STD_TORCH_CHECK(has_bf16x3(), "no AMX: the CPU, ATEN_CPU_CAPABILITY or the build of csrc/ lacks it");
  const Dense<float> start(bias);
  multiply(a, b, start.data(), out, out.mutable_data_ptr<float>());
}

void product_bf16x3(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias, Tensor& out) {
  run(matrix_of(a), matrix_of(b), bias, out);
}

Tensor linear_bf16x3(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const Tensor rows = dense(input);
  const Fp32Matrix b = matrix_of(weight).transposed();
  const int64_t depth = weight.size(1), columns = weight.size(0);
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  sizes.back() = columns;
  Tensor out = empty_tensor(input, sizes);
  run({rows.const_data_ptr<float>(), input.numel() / depth, depth, depth, 1}, b, bias, out);
  return out;
}

}  // namespace
}  // namespace fastplm

STABLE_TORCH_LIBRARY_FRAGMENT(fastplm_C, library) {
  library.def("has_bf16x3() -> bool");
  library.def("product_bf16x3(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out) -> ()");
  library.def("linear_bf16x3(Tensor input, Tensor weight, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CompositeExplicitAutograd, library) {
  library.impl("has_bf16x3", TORCH_BOX(&fastplm::has_bf16x3));
}

STABLE_TORCH_LIBRARY_IMPL(fastplm_C, CPU, library) {
  library.impl("product_bf16x3", (fastplm::Operator<&fastplm::product_bf16x3, "product_bf16x3">::call));
  library.impl("linear_bf16x3", (fastplm::Operator<&fastplm::linear_bf16x3, "linear_bf16x3">::call));
}
