"""Comparing two commits: a planted slow-down is flagged, equal code is not."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import compare
import harness

BENCHMARKS = Path(compare.__file__).parent


def row(variant="fastplm", p50=100.0, spread=0.05, status="ok", op="toy", case="case"):
    times = (p50 * (1 - spread), p50, p50 * (1 + spread)) if status == "ok" else (0.0, 0.0, 0.0)
    return compare.Row(op, case, "forward", variant, *times, status)


def flagged(before, after):
    return [change.key.variant for change in compare.compare(before, after) if change.flagged]


# --- planted rows -------------------------------------------------------------------------------


def test_a_slow_down_is_flagged_and_a_speed_up_is_not():
    eager = [row("eager")]
    assert flagged([row(), *eager], [row(p50=120), *eager]) == ["fastplm"]
    assert flagged([row(p50=120), *eager], [row(), *eager]) == []
    assert flagged([row(), *eager], [row(), *eager]) == []


def test_intervals_that_overlap_prove_nothing():
    assert flagged([row(spread=0.2)], [row(p50=140, spread=0.2)]) == []
    assert flagged([row(spread=0.1)], [row(p50=140, spread=0.1)]) == ["fastplm"]


def test_a_slow_down_must_exceed_what_unchanged_code_shows():
    before = [row(), row("eager"), row("peer")]
    for noisy in (130, 100 / 1.3):  # the machine was slower in one turn, the first or the second
        after = [row(p50=125), row("eager"), row("peer", p50=noisy)]
        assert flagged(before, after) == []
    assert flagged(before, [row(p50=135), row("eager"), row("peer", p50=130)]) == ["fastplm"]


def test_noise_is_that_of_the_op_or_where_it_has_none_the_largest():
    before = [row(), row("eager"), row(op="loud"), row("eager", op="loud"), row(op="alone")]
    after = [
        row(p50=120),
        row("eager", p50=101),
        row(p50=120, op="loud"),
        row("eager", p50=150, op="loud"),
        row(p50=140, op="alone"),
    ]
    changes = {change.key.op: change for change in compare.compare(before, after)}
    assert changes["toy"].noise == pytest.approx(1.01)
    assert changes["loud"].noise == changes["alone"].noise == pytest.approx(1.5)
    flags = [c.key.op for c in compare.compare(before, after) if c.flagged]
    assert flags == ["toy"]


def test_all_turns_count():
    quiet, busy = [row(), row(), row()], [row(p50=120), row(p50=120), row(p50=102)]
    (change,) = compare.compare(quiet, busy)
    assert change.ratio == pytest.approx(1.2)
    assert change.spread == pytest.approx((102 / 105, 120 * 1.05 / 95))
    assert not change.flagged  # one turn was as fast as before


def test_a_busy_moment_hides_nothing():
    disturbed = dataclasses.replace(row(), p80_us=5000.0)
    assert flagged([row(), disturbed, row()], [row(p50=120)] * 3) == ["fastplm"]
    assert flagged([disturbed], [row(p50=120)]) == []  # one turn alone cannot show it


def test_what_does_not_run_any_more_is_flagged_and_what_is_new_is_not():
    before = [row(), row("peer"), row("fastplm, kept"), row("fastplm, gone", status="skipped: x")]
    after = [
        row(status="refused: BudgetExceeded: far off"),
        row("peer", status="skipped: not installed"),
        row("fastplm, gone", status="skipped: x"),
        row("fastplm, new"),
    ]
    assert flagged(before, after) == ["fastplm"]
    text = compare.report(compare.compare(before, after), "a", "b")
    assert "FAILS: refused: BudgetExceeded: far off" in text
    assert "not measured now" in text and "skipped: not installed" in text
    assert text.count("\n  toy, case, forward, fastplm: FAILS") == 1


def test_the_table_has_a_line_for_each_variant_and_names_the_slow_ones():
    before, after = [row(), row("eager")], [row(p50=200), row("eager", p50=101)]
    text = compare.report(compare.compare(before, after), "old", "new")
    lines = text.splitlines()
    assert lines[1].split() == "toy case forward fastplm 100.0 200.0 2.00 1.81-2.21 SLOWER".split()
    assert lines[2].split() == "toy case forward eager 100.0 101.0 1.01 0.91-1.12".split()
    assert "noise, by the variants that did not change: toy 1.01x" in lines
    assert lines[-2:] == ["1 of 2 flagged:", "  toy, case, forward, fastplm: SLOWER 2.00x"]


# --- measured rows --------------------------------------------------------------------------------


class Clock:
    """A clock that only work advances.

    A busy machine may change real times by any amount, so no verdict on them is sure.
    """

    def __init__(self):
        self.seconds = 0.0
        self.calls = 0

    def work(self) -> None:
        self.calls += 1
        self.seconds += 1e-3 * (1 + 0.01 * (self.calls % 7))  # no two turns are quite equal

    def time(self, call, device) -> float:
        """Replaces ``harness._seconds``."""
        began = self.seconds
        call()
        return self.seconds - began


@pytest.fixture
def turn(monkeypatch):
    """A function that returns the rows of a case; its variant repeats its work so often."""
    clock = Clock()
    monkeypatch.setattr(harness, "SESSION", harness.Session())
    monkeypatch.setattr(harness, "_seconds", clock.time)

    def work(x, times=1):
        for _ in range(times):
            out = x @ x
            clock.work()
        return out

    def make(device):
        return {"x": torch.randn(4, 4, device=device)}

    def measure(repeats: int):
        case = harness.Case(
            op="toy",
            label="product",
            make=make,
            make_small=make,
            variants={
                "eager": work,
                "torch": work,
                "fastplm": lambda x: work(x, repeats),
                "fastplm, other": work,
            },
            gated=(),
        )
        return harness.measure(case, "forward", rounds=25)

    return measure


def test_work_done_three_times_is_flagged_and_equal_work_is_not(turn):
    before, same, slow = [], [], []
    for _ in range(3):
        before += turn(1)
        same += turn(1)
        slow += turn(3)
    assert flagged(before, same) == []
    assert flagged(before, slow) == ["fastplm"]


# --- committed rows -------------------------------------------------------------------------------


def test_rows_of_that_commit_and_this_machine_are_taken(turn, tmp_path, monkeypatch):
    now = turn(3)
    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "describe", lambda ref: "abc1234")
    monkeypatch.setattr(compare, "git", lambda *arguments: pytest.fail("nothing to check out"))
    old = [dataclasses.replace(each, commit="abc1234") for each in turn(1)]
    harness.write_rows(old, tmp_path)
    text = compare.against("main", now)
    assert "before: main (abc1234), committed rows" in text
    assert "\n  toy, product, forward, fastplm: SLOWER" in text
    # A folder of rows gives the same.
    folder = compare.against(str(tmp_path), now)
    assert folder.replace(str(tmp_path), "main (abc1234), committed rows") == text

    for other in ({"commit": "abc1234-dirty"}, {"machine": "another"}, {"torch": "0"}):
        shutil.rmtree(tmp_path)
        harness.write_rows([dataclasses.replace(each, **other) for each in old], tmp_path)
        assert compare.stored("main", now) is None
    shutil.rmtree(tmp_path)
    harness.write_rows([each for each in old if each.variant != "fastplm"], tmp_path)
    assert compare.stored("main", now) is None


def test_without_such_rows_the_other_commit_is_measured(turn, tmp_path, monkeypatch):
    now, asked = turn(1), []

    class Old:
        name = "main (abc1234)"

        def ops(self):
            return ["toy", "another"]

        def turn(self, op, rounds, quick):
            asked.append((op, quick))
            return [*turn(1), row(op="toy", case="not measured now")]

    monkeypatch.setattr(compare, "RESULTS", tmp_path)
    monkeypatch.setattr(compare, "describe", lambda ref: "abc1234")
    monkeypatch.setattr(compare, "checkout", lambda ref: contextlib.nullcontext((Old(), None)))
    text = compare.against("main", now)
    assert asked == [("toy", True)]
    assert "before: main (abc1234); after:" in text
    assert "of 4 flagged" in text


def test_what_cannot_be_compared_says_so(turn, monkeypatch):
    text = compare.against("no such commit", turn(1))
    assert text.startswith("not compared with no such commit: git ")
    monkeypatch.setattr(sys, "argv", ["compare.py", "no such commit"])
    assert compare.main() == 2


# --- two commits ----------------------------------------------------------------------------------

HARNESS = '''
"""As much of a harness as a comparison needs, without torch and without a clock."""
import argparse, statistics
from pathlib import Path
import fastplm

parser = argparse.ArgumentParser()
parser.add_argument("op")
parser.add_argument("--rows", type=Path)
parser.add_argument("--rounds", type=int, default=25)
options = parser.parse_args()
work = {"eager": 1, "fastplm": fastplm.WORK}
times = {name: [] for name in work}
for number in range(options.rounds):
    for name, count in work.items():
        times[name].append(1e3 * count * (1 + 0.01 * (number % 7)))
built = (Path(fastplm.__file__).parent / "_C.so").exists()
lines = ["op,case,direction,variant,p20_us,p50_us,p80_us,status"]
for name, each in times.items():
    p20, *_, p80 = statistics.quantiles(each, n=5)
    middle = statistics.median(each)
    lines.append(f"{options.op},built {built},forward,{name},{p20},{middle},{p80},ok")
(options.rows / "toy.csv").write_text("\\n".join(lines) + "\\n")
'''


@pytest.fixture
def repository(tmp_path) -> Path:
    """The smallest tree that can be compared, with one commit."""
    root = tmp_path / "repository"
    files = {
        "benchmarks/harness.py": HARNESS,
        "benchmarks/test_toy.py": "",
        "benchmarks/test_other.py": "",
        "fastplm/__init__.py": "import fastplm.triton_kernels\nWORK = 1\n",
        "triton_kernels/__init__.py": "",
        "csrc/toy.cpp": "",
        ".gitignore": "*.so\n__pycache__/\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(BENCHMARKS / "compare.py", root / "benchmarks")
    run_git(root, "init", "--quiet")
    run_git(root, "add", ".")
    run_git(root, "commit", "--quiet", "-m", "first")
    (root / "fastplm" / "_C.so").write_text("as if built")
    return root


def run_git(root: Path, *arguments: str) -> str:
    settings = ("user.name=t", "user.email=t@example.invalid", f"core.hooksPath={os.devnull}")
    options = [word for setting in settings for word in ("-c", setting)]
    command = ["git", *options, *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def run_compare(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "benchmarks/compare.py", *arguments]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_two_commits(repository):
    (repository / "fastplm" / "__init__.py").write_text("import fastplm.triton_kernels\nWORK = 4\n")
    done = run_compare(repository, "HEAD", "--ops", "toy")
    assert done.returncode == 1, done.stdout + done.stderr
    commit = run_git(repository, "describe", "--always").strip()
    progress = [line for line in done.stdout.splitlines() if line.startswith("toy, turn")]
    trees = (f"HEAD ({commit})", f"{commit}-dirty")  # in turns
    turns = [f"toy, turn {turn} of 3: {tree}" for turn in (1, 2, 3) for tree in trees]
    assert progress == turns
    # One library serves both trees, as csrc/ is the same.
    assert "toy, built True, forward, fastplm: SLOWER" in done.stdout
    assert "1 of 2 flagged" in done.stdout
    # The worktree is removed.
    assert len(run_git(repository, "worktree", "list").splitlines()) == 1
    assert run_git(repository, "status", "--porcelain").split() == ["M", "fastplm/__init__.py"]


def test_equal_commits_and_what_stops_a_comparison(repository):
    run_git(repository, "mv", "benchmarks/test_other.py", "benchmarks/test_new.py")
    done = run_compare(repository, "HEAD", "--rounds", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no benchmark of it" in done.stdout and "0 of 2 flagged" in done.stdout
    assert run_compare(repository, "HEAD", "--ops", "unknown").returncode == 2
    (repository / "benchmarks" / "harness.py").write_text("raise OSError('broken')")
    done = run_compare(repository, "HEAD", "--ops", "toy")
    assert done.returncode == 2 and "toy of" in done.stderr and "broken" in done.stderr
    assert len(run_git(repository, "worktree", "list").splitlines()) == 1


def test_a_changed_csrc_is_built_there_or_left_out(repository):
    (repository / "csrc" / "toy.cpp").write_text("// another\n")
    done = run_compare(repository, "HEAD", "--ops", "toy", "--turns", "1")
    assert "csrc/ of the other commit was not built" in done.stderr  # there is no setup.py
    assert "built False" in done.stdout and "built True" in done.stdout
