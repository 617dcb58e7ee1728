"""The static report: the committed rows match today's machine code; worse code is reported."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import sys
from pathlib import Path

import pytest

import machine_code
from compile_kernels import Report, faults, kernel_modules, tile_work
from fastplm.triton_kernels._launch import shared_limit

pytestmark = pytest.mark.compile

#: Compiles attention's streaming forward with another launch configuration.
PLANTED = """
import dataclasses, json, sys
import compile_kernels
from fastplm.triton_kernels import attention
from fastplm.triton_kernels.attention import configs
from fastplm.triton_kernels._launch import record_launches

label = "bfloat16 D=64 T=1024 ragged"
case = dict(attention.compile_cases())[label]
for config in json.loads(sys.argv[1]):
    configs._TABLE["stream_fwd"][90, True, 64] = (tuple(config),)
    with record_launches(90) as launches:
        case()
    (launch,) = (each for each in launches if "stream_fwd" in each.kernel.__name__)
    report = compile_kernels.compile_launch("attention", label, 90, launch)
    print(json.dumps(dataclasses.asdict(report)))
"""
#: BLOCK_Q, BLOCK_K, num_warps, num_stages
CONFIGS = {"as shipped": (128, 64, 8, 3), "one warp": (64, 64, 1, 3), "tiny tiles": (16, 16, 4, 3)}


@pytest.fixture
def static_report(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("static_report")


@pytest.fixture
def committed(static_report):
    rows = static_report.read(static_report.RESULTS)
    if reason := static_report.not_comparable(rows):
        pytest.skip(reason)
    return rows


@pytest.fixture(scope="module")
def planted(run_reports) -> dict[str, Report]:
    found = run_reports("-c", PLANTED, json.dumps(list(CONFIGS.values())))
    return dict(zip(CONFIGS, found, strict=True))


def test_no_kernel_is_worse_than_the_committed_rows_and_these_are_todays(
    static_report, committed, reports
):
    now = static_report.rows(reports)
    assert not static_report.worse(now, committed)
    meant = "if this is meant: python benchmarks/static_report.py"
    assert not static_report.changed(now, committed), meant
    assert static_report.PAGE.read_text(encoding="utf-8") == static_report.text(reports), meant


STALE = """
import json, sys
from static_report import LONG, read, stale

print(json.dumps(list(stale(read(LONG), map(int, sys.argv[1:])))))
"""


RACES = """
import sys
import compile_kernels
from fastplm.triton_kernels import attention
from fastplm.triton_kernels._launch import record_launches
cases = dict(attention.compile_cases())
for label in sys.argv[1:]:
    with record_launches(90) as launches:
        cases[label]()
    for launch in launches:
        report = compile_kernels.compile_launch("attention", label, 90, launch)
        print(len(report.hazards["races"]))
"""


@pytest.mark.slow
def test_dk_and_dv_with_bias_and_dropout_have_no_race(run):
    """A kernel of the long list: with three stages a copy of Q overwrote a product's rows."""
    counts = run("-c", RACES, "slow: bfloat16 D=128 T=64 everything and bias")
    assert len(counts) >= 3 and not any(counts)


def test_every_op_and_architecture_has_been_compiled_in_all_configurations(static_report):
    rows = static_report.read(static_report.LONG)
    ops, archs = kernel_modules(), static_report.ARCHS + static_report.SMALLER_ARCHS
    assert {(row["op"], int(row["arch"])) for row in rows} == set(itertools.product(ops, archs))
    assert all(row["may_not_ship"] == "0" for row in rows)
    page = static_report.PAGE.read_text(encoding="utf-8")
    assert page.endswith(static_report.long_section(rows))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_the_rows_of_all_configurations_are_of_todays_code(run, arch):
    assert run("-c", STALE, str(arch)) == [[]], "run: python benchmarks/static_report.py --long"


def test_a_row_of_all_configurations_names_what_may_not_ship(
    static_report, planted, tmp_path, monkeypatch
):
    shipped = planted["as shipped"]
    monkeypatch.setattr(static_report, "LONG", tmp_path / "long.csv")
    monkeypatch.setattr(static_report, "PAGE", tmp_path / "kernels.md")
    static_report.PAGE.write_text("The page\n", encoding="utf-8")
    limit = shared_limit(86)
    bad = dataclasses.replace(
        shipped, arch=86, shared=limit + 512, spills=3, hazards={"races": ["race: x"]}
    )
    outside = dataclasses.replace(shipped, spills=3)
    row = static_report.long_row
    static_report.write_long(row("op", 90, "digest", [shipped, outside]))
    static_report.write_long(
        row("op", 86, "digest", [bad, dataclasses.replace(bad, loop_spills=2)])
    )
    page = static_report.PAGE.read_text(encoding="utf-8")
    assert page.startswith("The page\n")
    first, second = (line.split(" | ") for line in page.splitlines()[-2:])
    assert first[1] == "sm_86" and first[3:-1] == ["2", "99.5", "99", "2", "2", "1", "2"]
    name = f"{bad.kernel} [{bad.case}]"
    for why in (f"{limit + 512} bytes", "2 local-memory instructions in a loop", "race: x"):
        assert f"{name}: {why}" in first[-1]
    assert second[1] == "sm_90" and second[3:] == ["2", "64.0", "227", "0", "0", "0", "1", "0 |"]
    static_report.write_long(row("op", 86, "digest", [shipped]))
    assert static_report.PAGE.read_text(encoding="utf-8").count("sm_86") == 1


def test_faults_of_first_launches_are_counted(planted):
    shipped = planted["as shipped"]
    bad = dataclasses.replace(
        shipped, shared=shared_limit(90) + 1, spills=5, loop_spills=2, hazards={"races": ["x", "y"]}
    )
    assert list(faults([shipped]).values()) == [0, 0, 0, 0]
    assert list(faults([shipped, bad, bad]).values()) == [2, 2, 4, 6]


def test_a_row_is_kept_until_a_launch_or_its_code_changes(static_report, monkeypatch):
    digests = {"attention": (3, "a"), "maxsim": (2, "b")}
    monkeypatch.setattr(static_report, "kernel_modules", lambda: list(digests))
    monkeypatch.setattr(static_report, "launches_digest", lambda op, arch: digests[op])
    version = static_report.triton.__version__
    row = dict(op="attention", arch="86", triton=version, code="a")
    assert static_report.stale([row], [86]) == {("maxsim", 86): "b"}
    assert len(static_report.stale([row | dict(code="before")], [86])) == 2
    assert len(static_report.stale([row | dict(triton="3.0")], [86])) == 2
    assert len(static_report.stale([row], [90])) == 2


def test_badly_configured_kernels_are_flagged(static_report, committed, planted):
    shipped = static_report.rows([planted["as shipped"]])
    assert not static_report.worse(shipped, committed)
    (name,) = (static_report.name_of(key) for key in static_report.by_key(shipped))
    for config in ("one warp", "tiny tiles"):
        (line,) = static_report.worse(static_report.rows([planted[config]]), committed)
        assert line.startswith(f"{name}: more cycles for the same work"), line
        assert "no HGMMA" in line
    assert "more bytes for the same FLOPs" in line


def test_the_machine_code_does_the_work_of_the_tile(reports):
    redundant = set()
    for r in reports:
        where = (r.kernel, r.case, r.arch)
        done = r.cycles["tensor"] * machine_code.TENSOR_FLOPS[r.arch]
        done /= 1 + ("tf32" in r.case)  # TF32 has half the rate
        if done:
            assert r.flops <= done, where
            if r.flops < done:
                redundant.add(r.kernel)
        elif r.flops:  # fp32 lanes, whose instructions may do two operations on sm_100
            lanes = 2 * 32 * r.warps * r.mix["fp32"]
            assert 0.5 * r.flops <= lanes <= 1.2 * r.flops, where
        else:
            assert r.roofline()[0] == "bytes" and r.moved > 0, where
    # A tile with fewer rows than its warps have in one instruction is multiplied more than once. If
    # ptxas unrolls a loop over columns, the report has the loop over tiles around it.
    unrolled = {"linear_distillation_fwd"}
    assert redundant <= {"attention_stream_bwd_dkdv", "attention_stream_bwd_dq"} | unrolled


LOOPS = """
module {
  tt.func public @_kernel(%x_ptr: !tt.ptr<bf16> {tt.divisibility = 16 : i32} loc("x"(#loc))) {
    %0 = tt.load %x_ptr : !tt.ptr<i64> loc(#loc)
    %1 = scf.for %i = %c0 to %n step %c1 iter_args(%a = %z) -> (tensor<64x32xf32>)  : i32 {
      %2 = tt.load %p, %m, %z : tensor<64x16x!tt.ptr<bf16>> loc(#loc)
      %3 = "tt.reduce"(%2) <{axis = 1 : i32}> ({
      ^bb0(%l: f32, %r: f32):
        tt.reduce.return %l : f32
      }) : (tensor<64x16xf32>) -> tensor<64xf32> loc(#loc)
      %4 = scf.if %c -> (tensor<16x32xbf16>) {
        %5 = tt.load %q : tensor<16x32x!tt.ptr<bf16>> loc(#loc)
        scf.yield %5
      } else {
        scf.yield %z
      } loc(#loc)
      %6 = tt.dot %2, %4, %a : tensor<64x16xbf16> * tensor<16x32xbf16> -> tensor<64x32xf32>
      scf.yield %6
    } loc(#loc)
    scf.for %i = %c0 to %n step %c1  : i32 {
      %7 = tt.atomic_rmw max, acq_rel, gpu, %p, %v, %m : (tensor<8x!tt.ptr<i32>>, tensor<8xi32>)
    } loc(#loc)
    tt.store %o, %1, %m : tensor<64x32x!tt.ptr<f32>> loc(#loc)
  } loc(#loc)
} loc(#loc)
"""


def test_the_work_of_a_tile_is_that_of_its_inner_loop():
    assert tile_work(LOOPS) == (2 * 64 * 16 * 32, 64 * 16 * 2 + 16 * 32 * 2)
    without = "".join(line + "\n" for line in LOOPS.splitlines() if "tt.dot" not in line)
    assert tile_work(without) == (0, 64 * 16 * 2 + 16 * 32 * 2)
    straight = without.replace("scf.for", "scf.if")
    assert tile_work(straight) == (0, 8 + 64 * 16 * 2 + 16 * 32 * 2 + 8 * 4 + 64 * 32 * 4)
    # In a nest of loops, the innermost loop with work counts.
    (dot,) = (line + "\n" for line in LOOPS.splitlines() if "tt.dot" in line)
    opened = "    scf.for %o = %a to %b step %c  : i32 {\n"
    nested = LOOPS.replace("    %0 = tt.load", f"{opened}{dot}    %0 = tt.load")
    nested = nested.replace("    tt.store", "    } loc(#loc)\n    tt.store")
    assert tile_work(nested) == tile_work(LOOPS)
    # The shorter one of two loops with the same matmul counts: the other is for masked tiles.
    load = "      %7 = tt.load %p : tensor<4x!tt.ptr<i8>> loc(#loc)\n"
    twice = LOOPS.replace("    tt.store", f"{opened}{load}{dot}    }} loc(#loc)\n    tt.store")
    assert tile_work(twice) == (tile_work(LOOPS)[0], 4)


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(bound_cycles=2), "more cycles for the same work"),
        (dict(bound_cycles=2, tile_flops=2, tile_bytes=2), None),  # a tile twice as large
        (dict(bound_cycles=0.6, tile_flops=0.5, tile_bytes=0.5), "more cycles for the same work"),
        (dict(tile_bytes=2), "more bytes for the same FLOPs"),
        (dict(registers=1.1), "more registers"),
        (dict(spills=1), "spills (spills 0 -> 8)"),
        (dict(warps_per_sm=0.5), "fewer warps on an SM (warps_per_sm 16 -> 8)"),
        (dict(hgmma=0), "no HGMMA"),
        (dict(bound_cycles=0.9, registers=0.9, warps_per_sm=2), None),
    ],
)
def test_what_counts_as_worse(static_report, changes, said):
    before = dict.fromkeys(static_report.KEY, "1") | dict(
        tiles="T", warps="8", bound_unit="issue", registers="100", spills="0", hgmma="1",
        warps_per_sm="16", bound_cycles="500", tile_flops="4096", tile_bytes="1024",
    )  # fmt: skip
    after = before | {
        name: f"{8 * factor if name == 'spills' else float(before[name]) * factor:g}"
        for name, factor in changes.items()
    }
    found = static_report.worse([after], [before])
    assert [said in line for line in found] == ([True] if said else []), found
    assert static_report.changed([after], [before])
    assert not static_report.changed([before], [before])


def test_check_names_what_got_worse(static_report, reports, tmp_path, monkeypatch, capsys):
    # To compile every kernel would take minutes, so the results are faked.
    compiled = list(reports)
    monkeypatch.setattr(static_report, "compile_all", lambda *arguments: compiled)
    monkeypatch.setattr(static_report, "RESULTS", tmp_path / "static" / "kernels.csv")
    monkeypatch.setattr(static_report, "PAGE", tmp_path / "kernels.md")

    def run(*flags: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["static_report.py", *flags])
        return static_report.main(), capsys.readouterr().out

    assert run()[0] == 0
    assert run("--check") == (0, f"{len(compiled)} kernels, 0 worse, 0 changed\n")
    first, last = compiled[0], compiled.pop()
    compiled[0] = dataclasses.replace(first, spills=first.spills + 4)
    code, said = run("--check")
    assert code == 1
    assert f"WORSE {first.kernel} [{first.case}] sm_{first.arch}: spills (" in said
    assert f"changed {last.kernel} [{last.case}" in said and "gone" in said
    monkeypatch.setattr(static_report.triton, "__version__", "0")
    assert run("--check")[0] == 2
