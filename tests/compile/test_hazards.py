"""Hazards of pipelined kernels: planted ones are found, harmless variations are not. The kernels
have no race; findings that cost them time are listed, each with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import triton

import machine_code
from compile_kernels import ARCHS, Report
from hazards import find_hazards

pytestmark = pytest.mark.compile

#: db is a sum of dz, and dw a product with dz: if both read one load, the compiler allocates the
#: buffers of dz for the sum alone.
PLANTED = """
import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import launch


@triton.jit
def _weight_kernel(
    x_ptr, dz_ptr, order_ptr, dw_ptr, db_ptr, rows, stride,
    BLOCK: tl.constexpr, SUMS: tl.constexpr, GATHERED: tl.constexpr, SCALED: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    dw = tl.zeros([BLOCK, BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for start in range(0, rows, BLOCK):
        row = start + offs
        dz_ptrs = dz_ptr + row.to(tl.int64)[:, None] * stride + offs[None, :]
        dz = tl.load(dz_ptrs)
        if SUMS == "same load":
            db += tl.sum(dz.to(tl.float32), 0)
        if SUMS == "own load":
            db += tl.sum(tl.load(dz_ptrs, volatile=True).to(tl.float32), 0)
        if GATHERED:
            row = tl.load(order_ptr + row)
        x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride + offs[None, :])
        if SCALED:
            x = (x * 0.5).to(x.dtype)
        dz_t = (dz * 0.5).to(dz.dtype) if IN_REGISTERS else tl.trans(dz)
        dw = tl.dot(dz_t, x, dw)
    tl.store(dw_ptr + offs[:, None] * BLOCK + offs[None, :], dw)
    tl.store(db_ptr + offs, db)


def _run(stages=4, stride=64, SUMS="", GATHERED=False, SCALED=False, IN_REGISTERS=False):
    x = torch.empty(1 << 14, dtype=torch.bfloat16, device="meta")
    launch(
        _weight_kernel, (1,), x.device, x_ptr=x, dz_ptr=x, order_ptr=x.int(), dw_ptr=x.float(),
        db_ptr=x.float(), rows=512, stride=stride, BLOCK=64, SUMS=SUMS, GATHERED=GATHERED,
        SCALED=SCALED, IN_REGISTERS=IN_REGISTERS, num_warps=8, num_stages=stages,
    )


def compile_cases():
    yield "plain", lambda: _run()
    yield "same load", lambda: _run(SUMS="same load")
    yield "same load, 2 stages", lambda: _run(SUMS="same load", stages=2)
    yield "own load", lambda: _run(SUMS="own load")
    yield "scaled", lambda: _run(SCALED=True)
    yield "gathered", lambda: _run(GATHERED=True)
    yield "odd stride", lambda: _run(stride=63)
    yield "in registers", lambda: _run(IN_REGISTERS=True)
    yield "in registers, 1 stage", lambda: _run(IN_REGISTERS=True, stages=1)
"""
SCRIPT = """
import dataclasses, json, pathlib, sys
import triton
import fastplm.triton_kernels
import compile_kernels

folder = pathlib.Path(sys.argv[1])
fastplm.triton_kernels.__path__.append(str(folder))
compile, made = triton.compile, []
triton.compile = lambda *given, **options: made.append(compile(*given, **options)) or made[-1]
for arch, uneven in (*((arch, False) for arch in compile_kernels.ARCHS), (90, True)):
    made.clear()
    reports = compile_kernels.compile_op("planted_hazards", arch, uneven=uneven)
    for compiled, report in zip(made, reports, strict=True):
        case = "uneven " * uneven + report.case
        texts = [compiled.asm[name] for name in ("ttgir", "ptx")]
        (folder / f"{case} {arch}").write_text(json.dumps(texts))
        print(json.dumps(dataclasses.asdict(dataclasses.replace(report, case=case))))
"""


class Planted(NamedTuple):
    """A compiled kernel, as text that a test may change."""

    ttgir: str
    ptx: str
    report: Report

    def hazards(self, ttgir: str = "", ptx: str = "") -> dict[str, list[str]]:
        stages = self.report.stages
        return find_hazards(ttgir or self.ttgir, ptx or self.ptx, stages)


@pytest.fixture(scope="module")
def planted(tmp_path_factory, run_reports) -> dict[tuple[str, int], Planted]:
    folder = tmp_path_factory.mktemp("planted")
    Path(folder, "planted_hazards.py").write_text(PLANTED)
    found = run_reports("-c", SCRIPT, str(folder))
    texts = {(r.case, r.arch): Path(folder, f"{r.case} {r.arch}").read_text() for r in found}
    return {(r.case, r.arch): Planted(*json.loads(texts[r.case, r.arch]), r) for r in found}


CASES = (
    "plain",
    "same load",
    "same load, 2 stages",
    "own load",
    "scaled",
    "gathered",
    "odd stride",
)


def buffers(kernel: Planted) -> dict[str, int]:
    """The number of buffers for the copies of each load."""
    found = re.findall(r"%(\w+?)(?:_\d+)? = ttg.local_alloc : .*<(\d+)x64x64x", kernel.ttgir)
    return {name: int(count) for name, count in found}


@pytest.mark.parametrize("case, stages", [("same load", 4), ("same load, 2 stages", 2)])
def test_the_race_of_a_buffer_that_a_sum_reads_too(planted, case, stages):
    kernel = planted[case, 90]
    assert buffers(kernel) == {"x": stages, "dz": stages - 1}
    races = [problem for problem in kernel.report.problems() if problem.startswith("race: ")]
    pattern = (
        r"race: async_copy\S+ \(planted.*\) writes dz\[(\d)\] while warp_group_dot .* reads it"
    )
    assert {int(re.fullmatch(pattern, race)[1]) for race in races} == set(range(stages - 1))
    # The same copies, but each matmul ends before the next one is issued.
    waited = kernel.ttgir.replace("pendings = 1", "pendings = 0")
    assert waited != kernel.ttgir and not kernel.hazards(waited)["races"]


@pytest.mark.parametrize("arch", ARCHS)
def test_its_siblings_have_none(planted, arch):
    for case in CASES:
        if arch != 90 or not case.startswith("same load"):
            assert not planted[case, arch].report.hazards["races"], case
    if arch == 90:
        assert buffers(planted["plain", 90]) == {"x": 4, "dz": 4}
        assert buffers(planted["own load", 90])["dz"] == 4


def once(pattern: str, new: str):
    """A change to the loop of a kernel; its pattern must occur in one place alone."""

    def change(text: str) -> str:
        head, loop, rest = re.split(r"(?=scf\.for)|(?<=scf\.yield)", text, maxsplit=2)
        changed, count = re.subn(pattern, new, loop)
        assert count == 1, count
        return head + changed + rest

    return change


def everywhere(pattern: str, new: str):
    def change(text: str) -> str:
        changed, count = re.subn(pattern, new, text)
        assert count, pattern
        return changed

    return change


def after(pattern: str, new: str):
    """A change behind the loop."""

    def change(text: str) -> str:
        start = text.index("scf.yield")
        return text[:start] + everywhere(pattern, new)(text[start:])

    return change


def deeper(match: re.Match) -> str:
    return f"async_wait{match[1]}num = {int(match[2]) + 2}"


WAIT = r"async_wait(.*)num = (\d+)"
#: case, architecture, change, expected finding
CHANGES = {
    "a wait for too few copies, sm_80": (
        ("same load", 80, once(WAIT, deeper)),
        r"race: local_load .* reads dz\[0\] while async_copy",
    ),
    "a wait for too few copies, sm_90": (
        ("plain", 90, once(WAIT, deeper)),
        r"race: warp_group_dot .* reads x\[0\] while async_copy",
    ),
    "a wait for too few copies, sm_100": (
        ("plain", 100, once(WAIT, deeper)),
        r"race: tc_gen5_mma .* reads x\[\d\] while async_copy",
    ),
    "a matmul more in flight": (
        ("plain", 90, once("pendings = 1", "pendings = 2")),
        "race: .* writes x.* while warp_group_dot",
    ),
    "a matmul in flight where its sum is used": (
        ("plain", 90, after("pendings = 0", "pendings = 1")),
        "race: .* uses the result of warp_group_dot",
    ),
    "no fence behind a store": (
        ("scaled", 90, everywhere(r"ttng\.fence_async_shared.*", "")),
        "race: .* with no fence since",
    ),
    "a buffer less": (
        ("plain", 80, everywhere("memdesc<3x64x64", "memdesc<2x64x64")),
        "race: .* takes buffer 2 of 2",
    ),
    "copies in flight at the end": (
        ("plain", 90, after(r"async_wait(.*)num = 0", r"async_wait\1num = 9")),
        "race: .* gives x back",
    ),
    "no wait for tcgen05": (
        ("plain", 100, once(r"ttng\.wait_barrier.*", "")),
        "race: .* writes x.* while tc_gen5_mma",
    ),
    "a wait for tcgen05 that does not end": (
        ("plain", 100, everywhere(r"(tc_gen5_mma.*), %\w+\[%true\]", r"\1")),
        "race: .* nothing arrives",
    ),
    "a barrier of two arrivals": (
        ("plain", 100, everywhere(r"(init_barrier .*), 1 ", r"\1, 2 ")),
        "not modelled: a barrier of several arrivals",
    ),
    "an operation of the future": (
        ("plain", 80, everywhere(r"ttg\.local_load", "ttg.local_gather")),
        "not modelled: ttg.local_gather",
    ),
    "a loop that never runs": (
        ("plain", 90, everywhere(r"(scf\.for .* to) %rows", r"\1 %c0_i32")),
        "not modelled: never reached ttng.warp_group_dot",
    ),
    "an attribute of the future": (
        ("plain", 80, everywhere(r"num = (\d+)", r"count = \1")),
        "not modelled: ValueError: not as Triton prints it",
    ),
    "a view of the future": (
        ("plain", 90, everywhere(r"ttg\.memdesc_trans", "ttx.view")),
        "not modelled: ttx.view",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_breaks_the_order_is_seen(planted, name):
    (case, arch, change), said = CHANGES[name]
    kernel = planted[case, arch]
    assert not kernel.hazards()["races"]
    found = kernel.hazards(change(kernel.ttgir))["races"]
    assert any(re.match(said, line) for line in found), found


@pytest.mark.parametrize(
    "case, arch, reader",
    [("plain", 90, "ttng.warp_group_dot"), ("same load, 2 stages", 80, "ttg.local_load")],
)
def test_a_copy_needs_a_barrier_after_the_reads_of_other_warps(planted, case, arch, reader):
    kernel = planted[case, arch]
    assert not kernel.hazards()["races"]
    found = []
    for barrier in re.finditer(r"bar\.sync", kernel.ptx):
        without = kernel.ptx[: barrier.start()] + "nop" + kernel.ptx[barrier.end() :]
        found += kernel.hazards(ptx=without)["races"]
    # Other barriers stand elsewhere: only the one between the reads and the copy counts.
    assert found
    assert all(re.fullmatch(rf"race: a copy .* since {reader}", line) for line in found)


def unaligned(*pointers: str) -> set[str]:
    return {f"narrow: 2-byte ld of {name}" for name in pointers} | set(map(waits, pointers))


@pytest.mark.parametrize("arch", ARCHS)
def test_what_costs_time_is_found(planted, arch):
    late = "order_ptr, x_ptr" if arch == 80 else "dz_ptr, order_ptr, x_ptr"
    costs = {
        "gathered": {f"late: 1 iterations ahead of 3, the copies of {late}"},
        "odd stride": unaligned("dz_ptr", "x_ptr"),
    }
    for case in CASES:
        hazards = planted[case, arch].report.hazards
        assert set(hazards["findings"]) == costs.get(case, set()), case
    assert planted["plain", arch].report.hazards["ahead"][-1] == "x_ptr: [3]"
    assert planted["odd stride", arch].report.hazards["widths"] == ["ld 2: 32"]


def test_sizes_that_16_does_not_divide(planted):
    assert not planted["plain", 90].report.hazards["findings"]
    uneven = planted["uneven plain", 90].report.hazards
    assert set(uneven["findings"]) == unaligned("dz_ptr", "x_ptr")
    assert not uneven["races"]


@pytest.mark.parametrize("arch", (80, 90))
def test_a_wait_for_all_copies_leaves_none_in_flight(planted, arch):
    kernel = planted["plain", arch]
    drained = kernel.hazards(once(WAIT, r"async_wait\1num = 0")(kernel.ttgir))
    names = "x_ptr" if arch == 80 else "dz_ptr, x_ptr"
    assert drained["findings"] == [f"drained: a loop waits for all of its copies, of {names}"]


def waits(pointer: str) -> str:
    return f"unpipelined: {pointer} is loaded for a matmul that waits for it"


TRITON = "3.7.1"
PAIRS = (
    "a flag of a query and a key is a byte: beside a bias Triton loads them one by one, where the"
    " accumulator has their scores; without one, 16 together"
)
ROWS = "TF32: the tensor cores take 32-bit operands with the keys of a column side by side"
DISTANCES = "one value for each distance: neighbours in a row, but a row starts anywhere"
FORTY = "rows of 40 elements: Triton knows of a stride only whether 16 divides it"
COLUMNS = "the bias of the columns that a thread holds of the accumulator, two of them together"
ORDER = "what order_ptr says is needed to copy the rest: a stage is spent on it"
TILES = (
    "to fix: rows wider than a tile pass by in a loop over E inside that over the tiles of V. There"
    " copies are as far ahead as the stages allow, but they begin anew for each tile, whose first"
    " product waits for memory (on sm_100 it stands before the inner loop)"
)
LAST_TILE = "of the last tile alone, which ends past the vocabulary"
ONCE = "one program, a single pass over at most N numbers"
NO_FENCE = "unfenced: tcgen05.mma with no fence since copies were waited for"
IN_TENSOR_MEMORY = (
    "may give wrong results: of a product whose left operand is in tensor memory, Triton puts no"
    " fence behind the copies of the right one; nobody has run it on sm_100"
)
ONE_STAGE = "unpipelined: one stage, nothing is loaded ahead"
FULL = (
    "in some dtype or variant of it no configuration with two stages was found that neither spills"
    " in a loop nor leaves an SM fewer blocks; or a block has one or two turns alone"
)
SPARE = "of rows that are not expected to count: each tile of E computes dZ again, without a buffer"
#: Findings that cost a kernel time, with the architectures and the reason why they remain. An entry
#: that no longer applies fails, so that a better kernel stays better.
KNOWN: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {
    ("attention_bwd_dbias", "narrow: 1-byte ld of attn_mask_ptr"): ((80, 90), PAIRS),
    ("attention_stream_bwd_dkdv", "narrow: 4-byte cp.async of bias_ptr"): ((90,), DISTANCES),
    ("attention_stream_bwd_dkdv", "narrow: 4-byte ld of bias_ptr"): (ARCHS, DISTANCES),
    ("attention_stream_bwd_dq", "narrow: 1-byte ld of attn_mask_ptr"): (ARCHS, PAIRS),
    ("attention_stream_bwd_dq", "late: 0 iterations ahead of 1, the copies of k_ptr"): (
        (100,),
        "TF32: K is read by rows and by columns, and of the latter nothing is copied ahead",
    ),
    ("attention_stream_bwd_dq", "narrow: 4-byte cp.async of bias_ptr"): ((80, 90), DISTANCES),
    ("attention_stream_bwd_dq", "narrow: 4-byte ld of bias_ptr"): (ARCHS, DISTANCES),
    ("attention_stream_bwd_dq", waits("k_ptr")): (
        (80, 90),
        "two products read K, one of them transposed: Triton copies V and loads K, in the loop of"
        " the masked tiles alone, and in TF32 in every loop",
    ),
    ("attention_stream_fwd", "narrow: 1-byte ld of attn_mask_ptr"): (ARCHS, PAIRS),
    ("attention_stream_fwd", "narrow: 4-byte cp.async of bias_ptr"): ((80, 90), DISTANCES),
    ("attention_stream_fwd", "narrow: 4-byte cp.async of v_ptr"): ((90, 100), ROWS),
    ("attention_stream_fwd", "narrow: 4-byte ld of bias_ptr"): (ARCHS, DISTANCES),
    ("attention_stream_fwd", waits("attn_mask_ptr")): ((80, 90), PAIRS),
    ("attention_stream_fwd", NO_FENCE): ((100,), IN_TENSOR_MEMORY),
    ("disentangled_attention_fwd", waits("mask_ptr")): (
        ARCHS,
        "a byte for each key of a tile, which comes while the products of positions run",
    ),
    ("linear_cross_entropy_bwd_input", NO_FENCE): ((100,), IN_TENSOR_MEMORY),
    ("gather_rows_bwd", "narrow: 2-byte ld of dout_ptr"): (ARCHS, FORTY),
    ("gather_rows_bwd", "narrow: 4-byte ld of dout_ptr"): (ARCHS, FORTY),
    ("linear_cross_entropy_bwd_input", "narrow: 2-byte ld of bias_ptr"): ((90, 100), COLUMNS),
    ("linear_cross_entropy_bwd_input", waits("bias_ptr")): (ARCHS, COLUMNS),
    (
        "linear_cross_entropy_bwd_weight",
        "late: 1 iterations ahead of 2, the copies of g_ptr, log_probability_ptr, max_ptr,"
        " order_ptr, sum_ptr, target_ptr, x_ptr",
    ): ((100,), ORDER),
    (
        "linear_cross_entropy_fwd",
        "drained: a loop waits for all of its copies, of w_ptr, x_ptr",
    ): ((80, 90), TILES),
    (
        "linear_cross_entropy_fwd",
        "late: 0 iterations ahead of 3, the copies of w_ptr, x_ptr",
    ): ((100,), TILES),
    ("linear_cross_entropy_fwd", "narrow: 2-byte ld of bias_ptr"): (ARCHS, COLUMNS),
    ("linear_cross_entropy_order", "narrow: 8-byte st of order_ptr"): (
        ARCHS,
        "scattered: a row's slot follows from how many rows before it count",
    ),
    ("linear_cross_entropy_rows", "narrow: 2-byte ld of bias_ptr"): (ARCHS, LAST_TILE),
    (
        "linear_distillation_fwd",
        "drained: a loop waits for all of its copies, of w_ptr, x_ptr",
    ): ((80, 90), TILES),
    (
        "linear_distillation_fwd",
        "late: 0 iterations ahead of 2, the copies of w_ptr, x_ptr",
    ): ((100,), TILES),
    (
        "linear_distillation_fwd",
        "late: 0 iterations ahead of 3, the copies of teacher_w_ptr, teacher_x_ptr, w_ptr, x_ptr",
    ): ((100,), TILES),
    (
        "linear_distillation_fwd",
        "drained: a loop waits for all of its copies, of teacher_w_ptr, teacher_x_ptr, w_ptr,"
        " x_ptr",
    ): ((80, 90), TILES),
    ("linear_distillation_rows", "narrow: 2-byte ld of bias_ptr"): (ARCHS, LAST_TILE),
    ("linear_distillation_rows", "narrow: 2-byte ld of teacher_bias_ptr"): (ARCHS, LAST_TILE),
    ("linear_cross_entropy_scale", "narrow: 4-byte ld of g_ptr"): (ARCHS, ONCE),
    ("linear_cross_entropy_scale", "narrow: 8-byte ld of order_ptr"): (ARCHS, ONCE),
    ("maxsim_fwd", "drained: a loop waits for all of its copies, of k_ptr, q_ptr"): (
        (80, 90),
        TILES,
    ),
    ("maxsim_fwd", "late: 0 iterations ahead of 2, the copies of k_ptr, q_ptr"): ((100,), TILES),
    ("maxsim_keys", "narrow: 8-byte ld of tile_index_ptr"): (
        ARCHS,
        "a set begins at any row",
    ),
    ("replaced_token_loss_bwd", "narrow: 2-byte ld of h_ptr"): (ARCHS, FORTY),
    ("replaced_token_loss_bwd", "narrow: 4-byte ld of h_ptr"): (ARCHS, FORTY),
    ("replaced_token_loss_fwd", "narrow: 2-byte ld of h_ptr"): (ARCHS, FORTY),
    ("replaced_token_loss_fwd", "narrow: 4-byte ld of h_ptr"): (ARCHS, FORTY),
    ("attention_stream_bwd_dq", waits("attn_mask_ptr")): ((90,), PAIRS),
    (
        "linear_cross_entropy_bwd_input",
        "drained: a loop waits for all of its copies, of w_ptr, x_ptr",
    ): ((90,), SPARE),
    (
        "linear_cross_entropy_bwd_input",
        "late: 0 iterations ahead of 2, the copies of w_ptr, x_ptr",
    ): ((100,), SPARE),
    (
        "linear_cross_entropy_bwd_weight",
        "late: 0 iterations ahead of 2, the copies of w_ptr, x_ptr",
    ): ((100,), SPARE),
    ("linear_cross_entropy_bwd_input", waits("w_ptr")): (ARCHS, SPARE),
    **{
        ("linear_cross_entropy_bwd_weight", waits(f"{name}_ptr")): (ARCHS, SPARE)
        for name in ("g", "log_probability", "max", "sum", "target", "x")
    },
    **{
        (kernel, ONE_STAGE): (ARCHS, FULL)
        for kernel in (
            "attention_bwd_dbias",
            "attention_row_fwd",
            "attention_stream_bwd_dkdv",
            "attention_stream_bwd_dq",
            "attention_stream_fwd",
            "disentangled_attention_bwd_dkdv",
            "disentangled_attention_bwd_dq",
            "linear_cross_entropy_bwd_input",
            "linear_cross_entropy_bwd_weight",
            "linear_cross_entropy_fwd",
        )
    },
    ("attention_tile_bwd", ONE_STAGE): ((80,), FULL),
}


def races(reports: list[Report]) -> list[tuple[str, str, int, str]]:
    """The races in all launches of a case, which may launch a kernel several times."""
    return [(r.kernel, r.case, r.arch, race) for r in reports for race in r.hazards["races"]]


def test_registers_that_a_matmul_in_flight_reads_are_not_written(planted):
    """Some versions of ptxas have this fault in machine code alone; the PTX waits correctly."""
    if triton.__version__ != TRITON:
        pytest.skip(f"the fault is seen with the assembler of Triton {TRITON}")
    kernel = planted["in registers", 90]
    assert not kernel.hazards()["races"]
    assert kernel.report.hazards["races"]
    pattern = r"race: HGMMA.* \(0x\w+\) reads R\d+, which LDSM.* \(0x\w+\) writes before its wait"
    assert all(re.fullmatch(pattern, race) for race in kernel.report.hazards["races"])
    assert not planted["in registers, 1 stage", 90].report.problems()
    for arch in (80, 100):
        assert not planted["in registers", arch].report.hazards["races"]


MATMULS = """
LDSM.16.M88.4 R88, [R4]
HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0
HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x1
MOV R2, R3
@P0 BRA 0x0
EXIT
"""


@pytest.mark.parametrize(
    "old, new, overwritten",
    [
        ("", "", False),
        ("gsb0, 0x1", "gsb0, 0x2", True),  # the next iteration's load
        ("WARPGROUP.DEPBAR.LE gsb0, 0x1", "NOP", True),
        ("R56, gsb0", "R56", True),  # one group: both are in flight
        ("R88, gdesc", "gdesc[UR4], gdesc", False),
        ("EXIT", "IMAD.WIDE R90, R4, 0x4, R6\nEXIT", False),  # behind the wait
        ("MOV R2, R3", "WARPGROUP.DEPBAR.LE gsb0, 0x0", False),
        ("HGMMA.64x64x16.F32.BF16 R56", "LDS.64 R90, [R4]\nHGMMA.64x64x16.F32.BF16 R56", True),
        ("HGMMA.64x64x16.F32.BF16 R56", "LDS.64 R86, [R4]\nHGMMA.64x64x16.F32.BF16 R56", False),
        ("HGMMA.64x64x16.F32.BF16 R56", "LDS.128 R86, [R4]\nHGMMA.64x64x16.F32.BF16 R56", True),
        ("HGMMA.64x64x16.F32.BF16 R56", "LOP3.LUT P0, R91, R1\nHGMMA.64x64x16.F32.BF16 R56", True),
        ("HGMMA.64x64x16.F32.BF16 R56", "STS [R90], R91\nHGMMA.64x64x16.F32.BF16 R56", False),
    ],
)
def test_which_registers_are_written_too_early(old, new, overwritten):
    lines = MATMULS.replace(old, new, 1).strip().splitlines()
    sass = "".join(f"  /*{16 * i:04x}*/  {line} ;  /* 0x0 */\n" for i, line in enumerate(lines))
    assert bool(machine_code.overwritten(sass)) == overwritten


@pytest.mark.parametrize("arch", (90, 100))
def test_a_matmul_needs_a_fence_after_copies_have_landed(planted, arch):
    kernel = planted["plain", arch]
    unfenced = kernel.ptx.replace("fence.proxy.async", "nop")
    assert unfenced != kernel.ptx and not kernel.hazards()["races"]
    where, matmul = {
        90: ("races", "race: wgmma.mma_async"),
        100: ("findings", "unfenced: tcgen05.mma"),
    }[arch]
    said = f"{matmul} with no fence since copies were waited for"
    assert said not in kernel.hazards()[where]
    assert said in kernel.hazards(ptx=unfenced)[where]


def test_a_matmul_needs_a_fence_of_its_registers(planted):
    kernel = planted["plain", 90]
    unfenced = kernel.ptx.replace("wgmma.fence.sync.aligned", "nop")
    assert unfenced != kernel.ptx
    (race, *_) = kernel.hazards(ptx=unfenced)["races"]
    assert re.fullmatch(r"race: line \d+: wgmma\.mma_async\S* with no wgmma\.fence before it", race)


def test_what_ships_has_no_race(reports):
    """The kernels of the compile lane have no race; `-m slow` checks the long list."""
    assert not races(reports)


def test_what_costs_time_is_known(reports):
    if triton.__version__ != TRITON:
        pytest.skip(f"the list is of Triton {TRITON}, this is {triton.__version__}")
    found: dict[tuple[str, str], set[int]] = {}
    for r in reports:
        for finding in r.hazards["findings"]:
            found.setdefault((r.kernel, finding), set()).add(r.arch)
    known = {what: set(archs) for what, (archs, _) in KNOWN.items()}
    assert found == known


@pytest.mark.slow
def test_sizes_that_16_does_not_divide_bring_no_race(run_reports, capsys):
    uneven = run_reports("tools/compile_kernels.py", "--json", "--uneven")
    costs = {(r.kernel, r.arch, finding) for r in uneven for finding in r.hazards["findings"]}
    with capsys.disabled():
        print()
        for kernel, arch, finding in sorted(costs):
            print(f"{kernel} sm_{arch}, no size a multiple of 16: {finding}")
    assert not races(uneven)
