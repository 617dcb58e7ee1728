"""The making of a row: the gate, the clock, the ceilings, and the file that it is appended to."""

from __future__ import annotations

import contextlib
import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastplm.reference.attention import attention_ref

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def draw(device):
    names = ("query", "key", "value")
    return {name: torch.randn(2, 2, 5, 8, device=device) for name in names}


def wrongly_scaled(query, key, value):
    return attention_ref(query, key, value, scale=1.1 * query.shape[-1] ** -0.5)


def unavailable(harness):
    def run(**inputs):
        raise harness.Unavailable("it needs a GPU\nand more")

    return run


def broken(**inputs):
    raise RuntimeError


def make_case(harness, **changed):
    given = dict(
        op="attention",
        label="tiny, 2 heads",
        make=draw,
        make_small=draw,
        variants={"eager": attention_ref, "fastplm": attention_ref},
        wrt=("query", "key", "value"),
        bytes=1000,
        flops=4000,
        training_bytes=3000,
        training_flops=9000,
        tokens=10,
    )
    return harness.Case(**{**given, **changed})


def by_variant(rows):
    return {row.variant: row for row in rows}


class FakeBenchmark:
    """The part of pytest-benchmark's fixture that the harness uses."""

    def __init__(self):
        self.extra_info, self.rounds = {}, 0

    def pedantic(self, function, rounds, iterations):
        self.rounds = rounds
        for _ in range(rounds):
            function()


# --- the gate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrt", [(), ("query", "key", "value")])
def test_a_wrong_kernel_gets_no_time(harness, wrt):
    variants = {"eager": attention_ref, "fastplm": wrongly_scaled, "other": attention_ref}
    case = make_case(harness, variants=variants, wrt=wrt)
    benchmark = FakeBenchmark()
    with pytest.raises(AssertionError, match="fastplm: refused: BudgetExceeded: output"):
        harness.measure(case, "forward", benchmark, rounds=2)
    rows = by_variant(harness.SESSION.rows)
    assert rows["fastplm"].status.startswith("refused: BudgetExceeded")
    assert rows["fastplm"].p20_us is rows["fastplm"].p50_us is rows["fastplm"].p80_us is None
    assert rows["fastplm"].vs_eager is rows["fastplm"].gflop_per_s is None
    assert rows["eager"].status == rows["other"].status == "ok"
    assert rows["other"].p50_us > 0, "who is not gated is measured all the same"
    assert [row["status"] for row in benchmark.extra_info["rows"]].count("ok") == 2


def test_a_right_kernel_with_a_wrong_gradient_gets_no_time(harness):
    def without_key(query, key, value):
        return attention_ref(query, key.detach() + 0 * key, value)

    variants = {"eager": attention_ref, "fastplm": without_key}
    with pytest.raises(AssertionError, match="gradient of key"):
        harness.measure(make_case(harness, variants=variants), "training", rounds=2)


def test_what_is_not_here_is_skipped_and_what_breaks_has_failed(harness):
    def breaks_later(**inputs):
        breaks_later.calls += 1
        if breaks_later.calls == 3:
            raise MemoryError("out of it")

    breaks_later.calls = 0

    def differs(**inputs):
        raise harness.Differs("off by 2")

    variants = {
        "eager": attention_ref,
        "fastplm": unavailable(harness),
        "peer": unavailable(harness),
        "other": differs,
        "broken": broken,
        "later": breaks_later,
    }
    rows = by_variant(harness.measure(make_case(harness, variants=variants), "forward", rounds=3))
    assert rows["fastplm"].status == rows["peer"].status == "skipped: it needs a GPU"
    assert rows["other"].status == "differs: off by 2"
    assert rows["broken"].status == "failed: RuntimeError: "
    assert rows["later"].status == "failed: MemoryError: out of it"
    assert all(row.p50_us is None for name, row in rows.items() if name != "eager")
    assert list(rows) == list(variants)


# --- figures --------------------------------------------------------------------------------------


def told(name: str, ran: list[str]):
    """The reference, which also notes its name when it runs."""

    def run(**inputs):
        ran.append(name)
        return attention_ref(**inputs)

    return run


def test_figures_follow_from_the_median(harness, monkeypatch):
    ran: list[str] = []
    times = {"eager": iter([9.0, 9.0, 1.0, 2.0, 3.0]), "fastplm": iter([9.0, 9.0, 4.0, 2.0, 1.0])}

    def seconds(call, device):
        call()
        return next(times[ran[-1]])

    monkeypatch.setattr(harness, "_seconds", seconds)
    monkeypatch.setattr(harness, "peak_flops", lambda device, dtype: 1e5)
    monkeypatch.setattr(harness, "_product_rate", lambda device, dtype: 1e4)
    benchmark = FakeBenchmark()
    case = make_case(harness, variants={name: told(name, ran) for name in times})
    rows = by_variant(harness.measure(case, "training", benchmark, rounds=3))
    assert benchmark.rounds == 3
    eager, ours = rows["eager"], rows["fastplm"]
    assert (eager.p50_us, ours.p50_us) == (2e6, 2e6)  # the medians of 1, 2, 3 and of 4, 2, 1
    assert eager.p20_us == 1.4e6 and ours.p80_us == 3.2e6
    assert ours.vs_eager == 1.0 and ours.status == "ok"
    # 9000 FLOPs take 2 s; the ceiling allows 0.9 s, and the data sheet 0.09 s.
    assert (ours.of_roofline, ours.mfu) == (0.45, 0.045)
    assert ours.gflop_per_s == round(4500 / 1e9, 2)
    assert ours.tokens_per_s == 5.0
    assert ours.peak_mb is not None


# --- rows -----------------------------------------------------------------------------------------


def lines(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_rows_are_appended_and_never_rewritten(harness, tmp_path):
    rows = harness.measure(make_case(harness), "forward", rounds=1)
    (path,) = harness.write_rows(rows, tmp_path)
    assert path == tmp_path / harness.machine_folder() / "attention.csv"
    first = path.read_bytes()
    assert harness.write_rows(rows, tmp_path) == [path]
    assert path.read_bytes().startswith(first)
    head, *body = lines(path)
    assert head == harness.COLUMNS and len(body) == 4
    assert all(len(line) == len(head) for line in body)
    row = dict(zip(head, body[0], strict=True))
    assert row["case"] == "tiny, 2 heads" and row["status"] == "ok" and row["launches"] == ""


def test_a_file_of_other_columns_is_left_as_it_is(harness, tmp_path):
    rows = harness.measure(make_case(harness), "forward", rounds=1)
    rows += harness.measure(make_case(harness, op="other"), "forward", rounds=1)
    path = tmp_path / harness.machine_folder() / "attention.csv"
    path.parent.mkdir(parents=True)
    older = ",".join(harness.COLUMNS[:-1]) + "\r\n"
    path.write_text(older, newline="")
    with pytest.raises(ValueError, match="attention.csv: other columns"):
        harness.write_rows(rows, tmp_path)
    assert path.read_bytes().decode() == older
    assert len(lines(path.with_name("other.csv"))) == 3, "other files are written"


def test_the_committed_rows_have_all_columns():
    import harness

    for path in (BENCHMARKS / "results").glob("*/*.csv"):
        head, *body = lines(path)
        if head[:9] == harness.COLUMNS[:9]:  # other files are not the harness'
            assert head == harness.COLUMNS, path
            assert body and all(len(line) == len(head) for line in body), path


# --- the command and the plug-in ------------------------------------------------------------------

SCRIPT = """
import pytest, torch
from harness import Case

def make(device):
    return {"x": torch.ones(3, device=device)}

def case(label, full):
    variants = {"eager": torch.exp, "fastplm": torch.exp}
    variants = {name: lambda x, f=function: f(x) for name, function in variants.items()}
    return Case("toy", label, make, make, variants, full=full, bytes=24)

CASES = [case("quick", False), case("slow", True)]

@pytest.mark.parametrize("case", CASES, ids=str)
def test_toy(case, bench):
    bench(case, "forward")
"""


def measured(folder):
    (path,) = folder.glob("*/toy.csv")
    return {line[6] for line in lines(path)[1:]}


@pytest.mark.slow
def test_pytest_leaves_out_what_takes_minutes_and_its_json_gives_the_rows(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # pytest-benchmark is off in workers
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/test_toy.py").write_text(SCRIPT)
    for name in ("harness.py", "conftest.py"):
        (tmp_path / "benchmarks" / name).write_text((BENCHMARKS / name).read_text())

    def run(*command):
        subprocess.run([sys.executable, *command], check=True, cwd=tmp_path)

    pytest_run = ("-m", "pytest", "benchmarks/", "--benchmark-only", "--rootdir", str(tmp_path))
    run(*pytest_run, "--rows", "a", "--benchmark-json", "run.json")
    assert measured(tmp_path / "a") == {"quick"}
    run(*pytest_run, "--rows", "b", "--full")
    assert measured(tmp_path / "b") == {"quick", "slow"}
    run("benchmarks/harness.py", "--from-json", "run.json", "--rows", "c")
    assert lines(next((tmp_path / "c").glob("*/*.csv"))) == lines(
        next((tmp_path / "a").glob("*/*.csv"))
    )
    run("benchmarks/harness.py", "toy", "--rows", "d")
    assert measured(tmp_path / "d") == {"quick", "slow"}
    run("benchmarks/harness.py", "toy", "--rows", "e", "--quick")
    assert measured(tmp_path / "e") == {"quick"}
    run("benchmarks/harness.py", "toy", "--rows", "f", "--only", "low")
    assert measured(tmp_path / "f") == {"slow"}


# --- graphs ---------------------------------------------------------------------------------------


class Streams:
    """The parts of torch.cuda that a capture uses. Its graph runs the body, and counts replays."""

    def __init__(self, monkeypatch, fails=False):
        self.fails, self.replays, self.body = fails, 0, None
        of = SimpleNamespace(wait_stream=lambda other: None)
        for name, value in dict(
            Stream=lambda: of,
            current_stream=lambda: of,
            stream=lambda stream: contextlib.nullcontext(),
            synchronize=lambda: None,
            _sleep=lambda cycles: None,
            CUDAGraph=lambda: SimpleNamespace(replay=self.replay),
            graph=self.graph,
        ).items():
            monkeypatch.setattr(torch.cuda, name, value)

    def replay(self):
        self.replays += 1

    @contextlib.contextmanager
    def graph(self, graph, stream):
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield


@pytest.mark.parametrize("direction", ("forward", "backward", "training"))
@pytest.mark.parametrize("fails", (False, True))
def test_calls_are_repeated_in_a_graph_unless_they_cannot_be_captured(
    harness, monkeypatch, direction, fails
):
    streams, calls = Streams(monkeypatch, fails), []
    cuda = SimpleNamespace(type="cuda")
    monkeypatch.setattr(harness, "_seconds", lambda call, device: call() and 0.0 or 4e-4)

    def counted(**inputs):
        calls.append(1)
        return attention_ref(**inputs)

    case = make_case(harness, make=lambda device: draw("cpu"))
    runner = harness._Runner(case, counted, direction, cuda)
    for _ in range(5):
        runner.step()
    assert (runner.replay is None) == fails and streams.replays == (0 if fails else 3)
    # A graph has 2 ms of calls, so a replay's time is that of five.
    assert runner.times == pytest.approx([4e-4] * 5 if fails else [4e-4] * 2 + [8e-5] * 3)
    assert not harness._Runner(replace(case, replayed=False), counted, direction, cuda).replays
