"""The report's plan and its clock, its page, and what it measures itself.

The slow lane runs a whole report, without a GPU.
"""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu_report
import pytest
from gpu_report import Counted, Piece

import harness
import plots

BENCHMARKS = Path(gpu_report.__file__).parent
LINE = {"date": "2026-01-02 03:04", "torch": "2.13", "triton": "3.7", "commit": "abc"}
H200 = LINE | {"machine": "NVIDIA H200 (driver 1.2)"}


def row(op, case, direction="forward", variant="fastplm", p50=100.0, **given):
    made = dict.fromkeys(harness.COLUMNS, "") | H200
    made |= dict(op=op, case=case, direction=direction, variant=variant, status="ok")
    times = dict.fromkeys(("p20_us", "p50_us", "p80_us"), p50 or "")
    return {name: str(value) for name, value in (made | times | given).items()}


def write(folder: Path, rows) -> Path:
    """Write rows, and the page of them; returns its text."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [*rows, row("report", "the rest: all", "training", "")]
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, harness.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return gpu_report.write_page(folder).read_text()


# --- the plan -------------------------------------------------------------------------------------

#: Seconds by part.
PLANNED = {
    "ceilings": 15,
    "checks": 20,
    "products of BERT": 10,
    "BERT-base": 90,
    "BERT-base compiled": 130,
    "all kernels": 20,
    "ELECTRA-small": 30,
    "attention": 70,
    "fused ops": 40,
    "the rest": 45,
}


def test_dry_the_plan_takes_485_seconds_and_nothing_is_cut_off():
    found = gpu_report.dry(gpu_report.SECONDS)
    assert {outcome for _, outcome, _ in found} == {"ok"}
    parts: dict[str, float] = {}
    for piece, _, seconds in found:
        parts[piece.part] = parts.get(piece.part, 0.0) + seconds
    assert parts == PLANNED and list(parts) == list(PLANNED)
    assert gpu_report.START + sum(parts.values()) == gpu_report.SECONDS == 485


def test_every_case_of_the_plan_is_one_of_its_benchmark(monkeypatch):
    code = (
        "import importlib, json, harness, torch, gpu_report\n"
        "harness.default_device = lambda: torch.device('cuda')\n"
        "torch.cuda.get_device_name = lambda *_: 'none'\n"
        "for op, label, _ in sum(gpu_report.OPS.values(), []):\n"
        "    try: cases = importlib.import_module(f'test_{op}').CASES\n"
        "    except ModuleNotFoundError: continue\n"
        "    if label not in [case.label for case in cases if not case.full]: print(op, label)"
    )
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert not done.stdout


# --- the clock ------------------------------------------------------------------------------------


def outcomes(*pieces, deadline=10.0, began=None):
    """What the report says of pieces, and the rows that they left."""
    rows: list[str] = []
    said: dict[str, str] = {}
    clock = gpu_report.Clock(time.time() if began is None else began)
    gpu_report.run(pieces, clock, deadline, rows.append, lambda p, o, s: said.update({p.name: o}))
    return said, rows


def test_a_failure_is_a_row_and_what_takes_too_long_is_cut_off():
    def works():
        yield "made"

    def fails():
        yield "before"
        raise RuntimeError("no such kernel\nand more")

    def lasts():
        yield "begun"
        try:
            time.sleep(60)
        except Exception:  # as what turns errors into rows does
            yield "swallowed"

    pieces = [Piece("a", n, 0.1, f) for n, f in (("fails", fails), ("lasts", lasts))]
    said, rows = outcomes(*pieces, Piece("b", "works", 0.1, works), deadline=2.0)
    assert said["fails"] == "failed: RuntimeError: no such kernel" and said["works"].startswith(
        "skip"
    )
    assert said["lasts"].startswith("cut off after") and rows == ["before", "begun"]
    said, rows = outcomes(Piece("b", "works", 0.1, works))
    assert said == {"works": "ok"} and rows == ["made"]


def test_a_late_part_waits_and_runs_at_the_end_if_there_is_time():
    clock, order = Counted(), []

    class Slow(Counted):
        def attempt(self, piece, seconds, write):
            order.append(piece.name)
            self.spent += {"slow": 50.0, "quick": 1.0}.get(piece.name, piece.seconds)
            return "ok"

    pieces = [
        Piece("first", name, 10.0, lambda: iter(())) for name in ("slow", "second", "quick")
    ] + [Piece("last", "third", 40.0, lambda: iter(()))]
    clock = Slow()
    gpu_report.run(pieces, clock, 130.0, print, lambda *_: None)
    # The first part should end at 45 and may be 30 late: "second" would end at 75.
    assert order == ["slow", "second", "third", "quick"]


def test_a_fault_of_the_gpu_is_told_from_other_errors():
    def lost():
        yield "before"
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    said, _ = outcomes(Piece("a", "lost", 0.1, lost))
    assert said["lost"].startswith("lost: RuntimeError: CUDA error")
    assert not gpu_report._is_lost(RuntimeError("CUDA error: out of memory"))


def test_a_report_that_is_killed_has_left_its_rows(tmp_path):
    """As soon as a row is measured, it is in its file."""
    code = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import gpu_report
def rows(of):
    yield of.row("gelu", "kept", "forward", "fastplm", [1.0])
    time.sleep(60)
gpu_report.plan = lambda of, results: [gpu_report.Piece("a", "b", 1.0, lambda: rows(of))]
gpu_report.report(gpu_report.parse(["--results", {str(tmp_path)!r}, "--seconds", "90"]))
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    path, deadline = tmp_path / "cpu" / "gelu.csv", time.time() + 80
    while not path.exists() and time.time() < deadline:
        time.sleep(0.1)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert "kept" in path.read_text()


# --- the page -------------------------------------------------------------------------------------

CASE = ("bert", "base 256x128 padding 0% dropout 0.1 bf16 AdamW", "training")


def test_compiled_transformers_that_is_faster_is_printed_as_such(tmp_path):
    rows = [
        row(*CASE, variant, p50=p50) for variant, p50 in (("fastplm", 60), ("fastplm compiled", 50))
    ]
    rows += [row(*CASE, "transformers compiled", 40), row(*CASE, "transformers sdpa", 80)]
    page = write(tmp_path / "slower", rows)
    assert (
        "fastplm compiled: **compiled Transformers is faster here**, 40.0 µs beside 50.0 "
        "(NVIDIA H200)." in page
    )
    rows[2]["p50_us"] = "75"
    page = write(tmp_path / "faster", rows)
    assert "1.50× as fast as compiled Transformers, 75.0 µs beside 50.0 (NVIDIA H200)." in page
    lines = [line for line in page.splitlines() if line.startswith("| bert |")]
    assert len(lines) == 4 and all("NVIDIA H200 (driver 1.2), torch 2.13" in line for line in lines)


def test_what_uses_a_wrong_kernel_is_red_and_keeps_its_time(tmp_path, monkeypatch):
    of = gpu_report.Measured()
    of.red.add("bias_gelu")
    for op, variant in (
        ("bert", "fastplm"),
        ("bert", "transformers sdpa"),
        ("gather_rows", "fastplm"),
    ):
        made = of.row(op, "some", "training", variant, [1.0, 2.0, 3.0])
        gpu_report._append(of, tmp_path, made)
    (folder,) = tmp_path.iterdir()
    found = {(r["op"], r["variant"]): r for r in plots.latest_rows(folder)}
    assert found["bert", "fastplm"]["status"] == "red: the check of bias_gelu"
    assert found["bert", "fastplm"]["p50_us"] == "2000000.0"
    assert found["bert", "transformers sdpa"]["status"] == "ok"
    assert found["gather_rows", "fastplm"]["status"] == "ok"
    assert not [key for key in plots.by_case(found.values()) if key[0] == "bert" and len(key) > 3]


def test_a_wrong_kernel_is_found_by_the_checks(monkeypatch):
    from fastplm.triton_kernels import gather_rows

    right = gather_rows.launch

    def wrong(kernel, grid, device, **arguments):
        right(kernel, grid, device, **arguments)
        if "fwd" in kernel.__name__:
            arguments["out_ptr"].view(-1)[3] += 1

    monkeypatch.setattr(gather_rows, "launch", wrong)
    of = gpu_report.Measured()
    rows = list(of.checks("gather_rows"))
    assert of.red == {"gather_rows"}
    assert any(r.status.startswith("red: BudgetExceeded: output") for r in rows)


# --- pre-training and the profile -----------------------------------------------------------------


@pytest.mark.slow
def test_pre_training_leaves_rows_and_losses(tmp_path, harness):
    import pretrain

    setting = pretrain.Setting("electra-tiny", 4, 16, steps=8, vocab=1999)
    rows = list(pretrain.rows(setting, tmp_path))
    assert [row.variant for row in rows] == ["fastplm", "fastplm, CUDA graph"]
    assert all(row.status == "ok" and row.tokens_per_s > 0 for row in rows)
    assert "no CUDA" in rows[1].case
    (folder,) = tmp_path.iterdir()
    losses = (folder / "electra_pretraining_losses.csv").read_text().splitlines()
    assert len(losses) == 1 + 3 * 8
    assert (folder / "profile.csv").exists()


@pytest.mark.slow
def test_a_graph_that_reads_a_stale_batch_is_refused(monkeypatch):
    import pretrain
    import torch

    setting = pretrain.Setting("electra-tiny", 16, 32, 24, vocab=1999)
    cpu, load = torch.device("cpu"), pretrain.Model.load
    plain = pretrain.train(setting, cpu).losses
    other = pretrain.train(replace(setting, bf16=False, dropout_seed=1), cpu).losses
    again = pretrain.train(setting, cpu, graph=True).losses
    assert pretrain.verdict(plain, again, other) == "ok"
    monkeypatch.setattr(
        pretrain.Model, "load", lambda self, n: load(self, n) if n < pretrain.WARM_UP else None
    )
    stale = pretrain.train(setting, cpu, graph=True).losses
    assert pretrain.verdict(plain, stale, other).startswith("refused")


# --- the whole ------------------------------------------------------------------------------------


def whole(folder: Path, *arguments: str) -> tuple[str, dict[str, str]]:
    """The page of a report without a GPU, and the outcomes of its pieces."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    options = ["--results", str(folder), "--cache", str(folder / "cache"), "--seconds", "3000"]
    command = [sys.executable, str(BENCHMARKS / "gpu_report.py"), *options, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = plots.latest_rows(folder / "cpu")
    found = {row["case"]: row["status"] for row in rows if row["op"] == "report"}
    return (folder / "cpu" / "report.md").read_text(), found


def test_a_report_without_a_gpu(tmp_path):
    names = ["checks: gather_rows", "the rest: gather_rows", "BERT-base: 256x128, 35%"]
    page, found = whole(tmp_path, "--only", *names)
    assert list(found.values()) == ["ok"] * 3
    assert "- bert, tiny 2x16 padding 35% dropout 0.1 bf16 AdamW, training, fastplm" in page
    assert "## Red\n\nNone." in page


@pytest.mark.slow
def test_the_whole_report_without_a_gpu(tmp_path):
    _, found = whole(tmp_path)
    pieces = gpu_report.dry(485.0)
    assert len(found) == len(pieces)
    # An op that has no benchmark yet fails, and no other piece.
    bad = {case: status for case, status in found.items() if status != "ok"}
    assert not {case for case in bad if "embedding_layer_norm" not in case}, bad
