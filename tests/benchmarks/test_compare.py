"""Comparing two commits: a planted slow-down is flagged, equal code is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import compare

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
