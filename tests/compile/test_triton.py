"""The compile lane: every Triton kernel becomes machine code for every architecture, with no GPU.

The kernels are compiled in another process, as this one may have Triton's interpreter switched on.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import machine_code
from compile_kernels import ARCHS, Report, kernel_modules, table

pytestmark = pytest.mark.compile

# Kernels whose machine code, or fault, is known in advance.
PLANTED = """
import torch
import triton
import triton.language as tl

from fastplm.triton_kernels._launch import launch


@triton.jit
def _matmul_kernel(x_ptr, out_ptr, steps, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tile = offs[:, None] * BLOCK + offs[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for step in range(0, steps):
        x = tl.load(x_ptr + step * BLOCK * BLOCK + tile)
        acc = tl.dot(x, x, acc)
    tl.store(out_ptr + tile, acc)


@triton.jit
def _exponential_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr, SPILLS: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if SPILLS:
        x -= tl.max(x, 0)
    tl.store(out_ptr + offs, tl.exp2(x))


@triton.jit
def _narrow_kernel(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = row * stride + tl.arange(0, BLOCK)  # narrow
    tl.store(out_ptr + offs.to(tl.int64), tl.load(x_ptr + offs))


@triton.jit
def _carried_kernel(x_ptr, out_ptr, stride, steps, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    jump = 0
    for step in range(0, steps):
        total += tl.load(x_ptr + offs + jump)
        jump = (step + 1) * stride  # carried
    tl.store(out_ptr + offs, total)


@triton.jit
def _wide_kernel(x_ptr, out_ptr, stride, size, split, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * split
    for start in range(first, tl.minimum(first + split, size), BLOCK):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(x_ptr + row * stride + offs))
    tl.store(out_ptr + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), 0.0)


@triton.jit
def _elements_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK  # elements
    step = tl.num_programs(0) * BLOCK  # elements
    for start in range(first.to(tl.int64), size, step):
        offs = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _rows_kernel(x_ptr, out_ptr, width, BLOCK: tl.constexpr):
    rows = tl.program_id(0) // 2 * BLOCK + tl.arange(0, BLOCK)
    offs = rows.to(tl.int64) * width + tl.program_id(0) % 2
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _shifted_kernel(x_ptr, out_ptr, places, BLOCK: tl.constexpr):
    first = tl.program_id(0) << 20  # shifted
    step = tl.program_id(1) << places  # shifted
    offs = first + step + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.load(x_ptr + offs))


@triton.jit
def _running_kernel(x_ptr, out_ptr, stride, steps, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    row, rows, line = 0, tl.zeros([BLOCK], tl.int32), 0
    for _ in range(0, steps):
        total += tl.load(x_ptr + row + offs)
        row += stride  # running
        total += tl.load(x_ptr + rows + offs)
        rows += stride  # running
        total += tl.load(x_ptr + line + offs)
        line += 1 << 20  # running
    at, step = 0, 0
    while step < steps:
        total += tl.load(x_ptr + at + offs)
        at += stride  # running
        step += 1
    tl.store(out_ptr + offs, total)


@triton.jit
def _loaded_kernel(x_ptr, index_ptr, out_ptr, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    row = tl.load(index_ptr + offs)
    x = tl.load(x_ptr + row * WIDTH)  # loaded
    x += tl.load(x_ptr + (row << 6))  # loaded
    x += tl.load(x_ptr + row * stride)  # loaded
    first = (tl.program_id(0).to(tl.int64) * stride).to(tl.int32)  # loaded
    tl.store(out_ptr + first + offs, x)


@triton.jit
def _allowed_kernel(
    x_ptr, index_ptr, out_ptr, stride, steps, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    offs = tl.arange(0, BLOCK)
    row = tl.load(index_ptr + offs)
    x = tl.load(x_ptr + row.to(tl.int64) * WIDTH)
    x += tl.load(x_ptr + (row.to(tl.int64) << 6) + (tl.program_id(0) << 2))
    x += tl.load(x_ptr + row // BLOCK * BLOCK + row % 5 * WIDTH)
    first, place = tl.full([], 0, tl.int64), 0
    for _ in range(0, steps):
        x += tl.load(x_ptr + first + place + offs)
        first += stride
        place += 1
        x_ptr += stride
    tl.store(out_ptr + offs, x)


def _run(kernel, dtype=torch.float32, shape=(1, 1 << 14), grid=(1,), **arguments):
    x = torch.empty(shape, dtype=dtype, device="meta")
    launch(kernel, grid, x.device, x_ptr=x, out_ptr=x.float(), **arguments)


def compile_cases():
    yield "matmul", lambda: _run(
        _matmul_kernel, torch.bfloat16, steps=8, BLOCK=64, PARTS=2, num_warps=4, num_stages=2
    )
    yield "exp", lambda: _run(_exponential_kernel, BLOCK=256, SPILLS=False, num_warps=1)
    yield "spill", lambda: _run(_exponential_kernel, BLOCK=16384, SPILLS=True, num_warps=1)
    yield "narrow", lambda: _run(_narrow_kernel, stride=7, BLOCK=64)
    yield "carried", lambda: _run(_carried_kernel, stride=7, steps=8, BLOCK=64)
    yield "wide", lambda: _run(_wide_kernel, stride=7, size=999, split=70, BLOCK=64)
    yield "shifted", lambda: _run(_shifted_kernel, grid=(4096, 4096), places=20, BLOCK=64)
    yield "running", lambda: _run(_running_kernel, stride=7, steps=4096, BLOCK=64)
    index = torch.empty(64, dtype=torch.int32, device="meta")
    loaded = dict(index_ptr=index, stride=7, BLOCK=64, WIDTH=48)
    yield "loaded", lambda: _run(_loaded_kernel, grid=(64,), **loaded)
    yield "allowed", lambda: _run(_allowed_kernel, grid=(64,), steps=64, **loaded)
    matrix = dict(shape=(4096, 48), BLOCK=64)
    size = 4096 * 48
    yield "elements", lambda: _run(_elements_kernel, grid=(size // 64,), size=size, **matrix)
    yield "rows", lambda: _run(_rows_kernel, grid=(2 * 4096 // 64,), width=48, **matrix)
"""
SCRIPT = """
import dataclasses, json, sys
import fastplm.triton_kernels
import compile_kernels
fastplm.triton_kernels.__path__.append(sys.argv[1])
for arch in compile_kernels.ARCHS:
    for report in compile_kernels.compile_op("planted", arch):
        print(json.dumps(dataclasses.asdict(report)))
"""

# The instructions of a kernel of dropout_add_layer_norm with dropout, by their names in the PTX.
WITH_DROPOUT = """
import collections, json
import compile_kernels
for arch in compile_kernels.ARCHS:
    for label, launch in compile_kernels._launches("dropout_add_layer_norm", arch):
        if launch.arguments.get("seed_ptr") is None:
            continue
        source, options, _ = compile_kernels.source_of(launch)
        ptx = compile_kernels._compile(source, arch, options).asm["ptx"]
        lines = [line.split() for line in ptx.splitlines() if line.strip()]
        names = [words[words[0].startswith("@") and len(words) > 1] for words in lines]
        print(json.dumps([label, launch.arguments["PARTS"], collections.Counter(names)]))
"""


def assert_shippable(reports: list[Report]) -> None:
    bad = [(f"{r.kernel} [{r.case}] sm_{r.arch}", r.problems()) for r in reports if r.problems()]
    assert not bad


@pytest.fixture(scope="module")
def planted(tmp_path_factory, run_reports) -> dict[tuple[str, int], Report]:
    folder = tmp_path_factory.mktemp("planted")
    Path(folder, "planted.py").write_text(PLANTED)
    found = run_reports("-c", SCRIPT, str(folder))
    return {(report.case, report.arch): report for report in found}


ONCE = """
import dataclasses, json
import compile_kernels

for op in compile_kernels.kernel_modules():
    for report in compile_kernels.compile_once(op, 90):
        print(json.dumps(dataclasses.asdict(report)))
"""


def test_the_first_launch_of_each_kernel_has_no_fault_on_hopper(run_reports):
    """What ``make test`` compiles; all launches on all architectures follow."""
    found = run_reports("-c", ONCE)
    assert {r.op for r in found} == set(kernel_modules())
    assert not [f"{r.kernel}: {problem}" for r in found for problem in r.problems()]


def test_every_kernel_compiles_for_every_architecture(reports, capsys):
    with capsys.disabled():
        print("\n" + table(reports))
    compiled = {(report.op, report.arch) for report in reports}
    assert compiled == {(op, arch) for op in kernel_modules() for arch in ARCHS}


def test_no_spills_shared_memory_fits_hopper_matmuls_use_hgmma_and_offsets_are_wide(reports):
    assert_shippable(reports)


def test_products_in_tf32_are_those_of_tensor_cores(reports):
    found = [r for r in reports if r.case.startswith("tf32") and r.flops]
    assert {r.arch for r in found} == set(ARCHS) and all(r.mix["tensor"] for r in found)
    assert all(r.hgmma for r in found if r.arch == 90 and r.dots)
    in_fp32 = [r for r in reports if r.case.startswith("float32") and r.op == "attention"]
    assert in_fp32 and not any(r.mix["tensor"] for r in in_fp32)


def test_every_kernel_fits_on_an_sm_and_has_a_bound(reports):
    assert all(report.blocks > 0 and report.bound()[1] > 0 for report in reports)
    assert all(bool(r.mix["tensor"]) == (r.cycles["tensor"] > 0) for r in reports)


def test_a_thread_makes_whole_draws_of_dropout_and_moves_16_bytes(run):
    """A draw is two products in each of seven rounds, and decides for the 8 elements of a thread in
    a part of a row. Left to the compiler, each thread makes the draws of all its 8 elements."""
    found = run("-c", WITH_DROPOUT)
    assert len(found) >= 2 * 5 * len(ARCHS)
    for label, parts, names in found:

        def count(*begins, names=names):
            return sum(many for name, many in names.items() if name.startswith(begins))

        products = count("mul.wide.u32", "mul.hi.u32", "mul.lo.s64")  # some are those of addresses
        assert 14 * parts - 8 <= products <= 21 * parts + 16, label
        assert count("ld.shared.b16", "st.shared.b16") == 0, label
        # Numbers that all threads or a whole row share; the sums over rows are written once.
        assert count("ld.global") - count("ld.global.v4") <= 3, label
        assert count("st.global") - count("st.global.v4") <= 3 * parts, label
        assert count("ld.global.v4", "cp.async.cg") >= 2 * parts, label


@pytest.mark.slow
def test_kernels_fit_a_card_with_less_shared_memory(run_reports):
    """sm_120 stands for the smaller cards, as it spills first; the long list has all of them."""
    options = ("--json", "--arch", "120", "attention", "gather_rows", "linear_cross_entropy")
    found = run_reports("tools/compile_kernels.py", *options)
    assert {(report.op, report.arch) for report in found} == {(op, 120) for op in options[3:]}
    assert_shippable(found)


@pytest.mark.parametrize(
    ("arch", "limit"),  # the CUDA programming guide's maximum for a block
    ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99)),
)
def test_the_gate_knows_the_shared_memory_of_each_card(planted, arch, limit):
    full = replace(planted["exp", 80], arch=arch, shared=limit * 1024)
    assert not full.problems()
    (problem,) = replace(full, shared=full.shared + 1).problems()
    assert f"of shared memory over {limit * 1024}" in problem


@pytest.mark.parametrize("arch", ARCHS)
def test_the_gate_sees_a_spill(planted, arch):
    """A kernel whose tile is far too large must be reported, or the gate proves nothing."""
    assert any("register spills" in problem for problem in planted["spill", arch].problems())
    assert not planted["exp", arch].problems()


@pytest.mark.parametrize("arch", ARCHS)
def test_narrow_offsets_are_reported_where_they_are_multiplied(planted, arch):
    lines = PLANTED.splitlines()
    for case in ("narrow", "carried", "elements", "shifted", "running", "loaded"):
        places = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {case}"))
        said = [f"32-bit offset arithmetic: planted.py:{line}" for line in places]
        assert said and planted[case, arch].problems() == said
    for case in ("wide", "matmul", "rows", "allowed"):
        assert not planted[case, arch].problems()


def sass(*instructions: str) -> str:
    """Machine code as the disassembler prints it: 16 bytes an instruction."""
    return "".join(
        f"        /*{16 * i:04x}*/    {text} ;    /* 0x0 */\n"
        for i, text in enumerate(instructions)
    )


def names(text: str) -> list[str]:
    return [instruction.name for instruction in machine_code.inner_loop(machine_code.parse(text))]


def test_spills_are_counted_by_where_they_are():
    """Spills outside of loops, and in an inner loop; a kernel without a loop counts as one."""
    loop = ("HMMA.16816.F32.BF16 R4, R8, R12, R4", "@!P1 BRA 0x10", "LDL R1, [R2]", "EXIT")
    assert machine_code.spills(sass("STL [R2], R1", *loop)) == (2, 0)
    assert machine_code.spills(sass("NOP", "STL [R2], R1", *loop[:1], "@P0 BRA 0x10")) == (1, 1)
    # A loop that waits on a barrier, within the loop with the work, does not count.
    waits = ("SYNCS R1", "@!P2 BRA 0x20", "@!P1 BRA 0x10", "EXIT")
    assert machine_code.spills(sass("NOP", "HMMA R4, R8, R12, R4", *waits)) == (0, 0)
    assert machine_code.spills(
        sass(
            "LDL R1, [R2]",
            "HMMA R4, R8, R12, R4",
            "LDL R1, [R2]",
            "SYNCS R1",
            "@!P2 BRA 0x30",
            "@!P1 BRA 0x10",
            "EXIT",
        )
    ) == (2, 1)
    assert machine_code.spills(sass("STL [R2], R1", "EXIT")) == (1, 1)
