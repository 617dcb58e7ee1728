"""The time that the machine code of attention's kernels allows on an H200, beside the targets.

    python benchmarks/attention_bound.py [--markdown docs/attention.md]

For every shape with a target the launches are recorded, compiled for sm_90 without a GPU, and
simulated (``bounds``). The time that memory needs is computed, too; the longer time counts. All of
this is arithmetic, not a measurement.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import triton
from bounds import ARCH, CLOCK, SMS, executed, moved
from test_attention import DTYPE, TARGETS, Shape, case

from compile_kernels import Report, compile_launch
from fastplm.triton_kernels import attention
from fastplm.triton_kernels._launch import Launch, record_launches

_PAGE = """# Attention: the kernels against their targets, by arithmetic

Written by `python benchmarks/attention_bound.py --markdown docs/attention.md` with Triton {triton}.
**No time in the table is measured.** H200: {sms} SMs at {clock:.3f} GHz, 4.3 TB/s; bf16, head
dim 64.

- `kernels`: of each kernel that multiplies, the time of its machine code, followed instruction by
  instruction: what it issues, what it waits for, its start and end, whole waves of programs
  (`tools/timeline.py`); in brackets the warps an SM holds, the unit that works most of the time,
  and what warps wait for most.
- `memory`: every input read once and every output written once, at 80 % of 4.3 TB/s.
- `expected`: the longer of the two.
- `floor`: ideal machine code (matmuls, exponentials and memory alone); `must`: the time to beat the
  published rates of other kernels.

**How far to trust it.** The published rates nearest to these kernels are those of Triton's own
forward on an H100 (FlashAttention-3, Shah et al. 2024, head dim 64, 16-bit, without a mask): 340
TFLOP/s at 512 tokens, 382 at 1,024, 400 at 4,096. For a kernel with tiles of 128x64, which is near
to that one, the simulation says 310, 389 and 481. On an H100 ours was measured at 287 at 512 tokens
(BERT-base 64x512). [Measured on an H100](gpu.md) has all times; the table is of an H200, by
arithmetic.

{table}

A backward that streams makes seven products in two kernels. One kernel of five would add dQ up over
tiles of keys. Without atomics, whose order changes the bits, every tile of keys writes its part,
and another pass reads them. For {five_label} the dK and dV of today, a quarter more for the fifth
product, and those parts take {five:.0f} µs; the two kernels take {seven:.0f}. So there are two. Up
to 128 tokens a head fits into one program, and `tile_bwd` makes five.
"""

#: The shape at which a backward of five products is compared with that of seven.
_FIVE = "BERT-base 64x512"


def iterations(launch: Launch, shape: Shape) -> int:
    """How often a launch runs its inner loop, or all of its code if it has no loop."""
    (programs, *rest), given = launch.grid, launch.arguments
    name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
    if name == "attention_row_fwd":
        return shape.batch * shape.heads * triton.cdiv(shape.seqlen_q, given["BLOCK_Q"])
    if name == "attention_tile_bwd":
        return shape.batch * shape.heads
    if name == "attention_bwd_dbias":  # it skips tiles outside the scores
        block_k = given["BLOCK_K"]
        reach = triton.cdiv(given["max_distance"], block_k)
        tiles = range(triton.cdiv(shape.seqlen_q, block_k))
        pairs = sum(0 <= t + d < len(tiles) for t in tiles for d in range(-reach, reach + 1))
        return shape.batch * shape.heads * pairs * block_k // given["BLOCK_Q"]
    if name not in ("attention_stream_fwd", "attention_stream_bwd_dq", "attention_stream_bwd_dkdv"):
        return programs * (rest[0] if rest else 1)
    block_q, block_k = given["BLOCK_Q"], given["BLOCK_K"]
    pairs = 0
    for start_q in range(0, shape.seqlen_q, block_q):
        last = shape.seqlen_k - shape.seqlen_q + min(start_q + block_q, shape.seqlen_q)
        pairs += triton.cdiv(last if shape.is_causal else shape.seqlen_k, block_k)
    return shape.batch * shape.heads * pairs


def launches(shape: Shape) -> tuple[list[Launch], list[Launch]]:
    """The launches of the forward and of the backward."""
    with record_launches(ARCH) as recorded:
        attention.meta_case(
            torch.bfloat16,
            shape.dim,
            shape.seqlen_q,
            shape.seqlen_k,
            is_causal=shape.is_causal,
            has_bias=shape.bias,
            batch=shape.batch,
            heads=shape.heads,
        )
    forward = next(i for i, each in enumerate(recorded) if "fwd" in each.kernel.__name__) + 1
    return recorded[:forward], recorded[forward:]


def describe(report: Report, time: float, reason: str) -> str:
    name = report.kernel.removeprefix("attention_")
    return f"{name} {time:.0f} ({report.blocks * report.warps} warps; {reason})"


def five_products(shape: Shape, dkdv: float, block_k: int) -> float:
    """The least microseconds if every tile of keys has its own dQ, in fp32."""
    parts = triton.cdiv(shape.seqlen_k, block_k)
    size = shape.batch * shape.heads * shape.seqlen_q * shape.dim * 4.0
    return dkdv * 5 / 4 + moved(2 * parts * size)


def rows() -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """The table, and the two times of ``_FIVE``."""
    compared: dict[str, float] = {}
    table = [("shape", "", "kernels, µs", "memory", "**expected**", "floor", "must")]
    for label, shape, floors, musts in TARGETS:
        work = case(label, shape)
        halves = 2 / DTYPE.itemsize  # the cases of a CPU are fp32
        sizes = (work.bytes * halves, (work.training_bytes - work.bytes) * halves)
        for i, (direction, group) in enumerate(
            zip(("forward", "backward"), launches(shape), strict=True)
        ):
            total, parts = 0.0, []
            for launch in group:
                report = compile_launch("attention", label, ARCH, launch)
                # The kernel of a whole sequence has one program for each place on the device.
                whole = report.kernel == "attention_tile_bwd"
                time, reason = executed(report, launch, iterations(launch, shape), whole)
                total += time
                if label == _FIVE and "dkdv" in report.kernel:
                    block_k = launch.arguments["BLOCK_K"]
                    compared["five"] = five_products(shape, time, block_k)
                if report.dots:
                    parts.append(describe(report, time, reason))
            memory = moved(sizes[i])
            expected = max(total, memory)
            if label == _FIVE:
                compared["seven"] = expected  # that of the backward, which comes last
            must = f"{musts[i]:.0f}" + (" (missed)" if expected > musts[i] else "")
            numbers = (f"{memory:.0f}", f"**{expected:.0f}**", f"{floors[i]}", must)
            table.append((label, direction, ", ".join(parts), *numbers))
    return table, compared


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    (head, *body), compared = rows()
    lines = [head, ("---",) * len(head), *body]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    names = dict(triton=triton.__version__, sms=SMS, clock=CLOCK / 1e9, five_label=_FIVE)
    page = _PAGE.format(**names, **compared, table=table)
    if options.markdown:
        options.markdown.write_text(page)
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
