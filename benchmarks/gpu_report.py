"""``make gpu-report``: build, test and measure on this machine's GPU, with the Python it is given.

    python benchmarks/gpu_report.py              # under 9 minutes; RESULTS/<gpu>/ and a page there
    python benchmarks/gpu_report.py --rest       # the same for other models and small ops
    python benchmarks/gpu_report.py --dry-run    # the whole of it without a GPU, on small shapes

The steps run one by one, each in its own process:

- build the package with csrc/ into build/site, from this checkout alone;
- list what works;
- compile the kernels that the next steps launch, on all CPUs, unless they are in --cache
  (``compile_cache.py`` can fill that folder on a machine without a GPU);
- check a small call of each kernel, dtype and branch (``gpu_checks.py``);
- run the most important benchmarks, with ``--rest`` the others instead;
- pre-train ELECTRA-small briefly, with and without CUDA graphs;
- profile the kernels.

Each step gets its share of the time that is left; the time that a step does not use goes to later
steps. After each step the page is written, RESULTS/<machine>/report.md with its pictures, from the
rows that are there, so a report that is stopped keeps its results.

Nothing is downloaded. If something is missing (a compiler, matplotlib, Nsight Compute, the GPU),
the page says so, and the other steps run. An op whose checks are red, or were not reached, has no
speed on the page. The whole GPU suite is another command, ``make test-device``.

A dry run uses the CPU instead of the GPU, Triton's interpreter instead of its compiler, and the
plain step instead of the CUDA graph; its rows go to a temporary folder.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import plots
import targets

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SITE = ROOT / "build" / "site"
LOGS = ROOT / "build" / "gpu-report"
#: Seconds for everything; no step begins with fewer than the second number left.
BUDGET, LEAST = 520.0, 5.0
#: The steps in this order, each with its share of the time that is left: a benchmark, those of its
#: cases with a text in their label, or a script. The shares are the seconds that each should take
#: on an H200 (tests/benchmarks/test_gpu_report.py).
ORDER = {
    "attention": 110,
    "linear_cross_entropy": 60,
    "bert: padding 0%": 40,
    "pretrain.py": 42,
    "replaced_token_loss": 18,
    "gather_rows": 12,
    "mask_tokens": 12,
    "profile_kernels.py": 36,
}
#: The same for ``--rest``; benchmarks that neither list names come last, in one process.
REST = {
    **dict.fromkeys(("electra", "t5", "albert", "bart", "gpt2", "roberta"), 40),
    "bert: padding 30%": 40,
    "bert: padding 50%": 40,
    "memory.py": 20,
    "linear_distillation": 30,
    "linear": 20,
}
LAST_SHARE = 50
#: The ops that must be right before a benchmark's rows count: its own op, or those that it uses.
CHECKED = (
    *("attention", "linear_cross_entropy", "gather_rows", "replaced_token_loss", "mask_tokens"),
    *("linear_distillation", "maxsim", "corrupt_spans", "bart_noise"),
)
_STEP = ("attention", "linear_cross_entropy", "gather_rows")
USES: dict[str, tuple[str, ...]] = {
    **{op: (op,) for op in CHECKED},
    **dict.fromkeys(("bert", "roberta", "albert", "t5", "bart", "gpt2"), _STEP),
    "electra": (*_STEP, "replaced_token_loss"),
    "electra_pretraining": (*_STEP, "replaced_token_loss", "mask_tokens"),
    "loss_memory": _STEP[1:],
    "collators": ("mask_tokens",),
}
#: The scripts' options in a dry run.
SMALL = {
    "pretrain.py": (
        *("--arch", "electra-tiny", "--batch-size", "4", "--seqlen", "32"),
        *("--steps", "8", "--vocab-size", "4000"),
    ),
    "memory.py": ("--sizes", "1024", "2048"),
    "profile_kernels.py": ("--most", "4"),
}


@dataclass
class Step:
    """One step: its command and share of the time, then its outcome and output."""

    name: str
    command: Sequence[str]
    share: float
    most: float = float("inf")  # the most seconds
    environment: dict[str, str] = field(default_factory=dict)
    outcome: str = "not reached"
    seconds: float = 0.0
    rows: int = 0
    output: str = ""


@dataclass(frozen=True)
class Machine:
    """The name of the folder of the rows, and the columns that every row begins with."""

    folder: str
    line: dict[str, str]


# --- steps ----------------------------------------------------------------------------------------


def script(name: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, str(BENCHMARKS / name), *map(str, arguments)]


def benchmarks() -> list[str]:
    return sorted(path.stem.removeprefix("test_") for path in BENCHMARKS.glob("test_*.py"))


def plan(options: argparse.Namespace) -> list[Step]:
    """All steps in their order."""
    rows = ["--rows", options.results]
    rounds = ["--rounds", str(options.rounds)] if options.rounds else []
    steps = [] if options.skip_build else [Step("build", [], 145, most=200)]
    steps.append(Step("info", [sys.executable, "-m", "fastplm", "info"], 10, most=60))
    if not options.dry_run:  # a dry run interprets its kernels
        steps.append(
            Step("compile", script("compile_cache.py", options.cache, "--if-gpu"), 48, most=120)
        )
    if not options.skip_tests and (ops := _checked(options.only)):
        steps.append(Step("checks", script("gpu_checks.py", *ops), 30, most=120))
    known = benchmarks()
    shares = dict(REST if options.rest else ORDER)
    if options.only is not None:
        shares = {n: share for n, share in (ORDER | REST).items() if _stem(n) in options.only}
    others = [name for name in known if name not in map(_stem, (ORDER | REST))]
    if options.only is not None:
        others = [name for name in others if name in options.only]
    for name, share in shares.items():
        benchmark, _, part = name.partition(": ")
        if name.endswith(".py"):
            small = SMALL[name] if options.dry_run else ()
            steps.append(Step(_stem(name), script(name, *rows, *small), share))
        else:
            some = ["--only", part] if part else []
            command = script("harness.py", benchmark, "--quick", *some, *rows, *rounds)
            steps.append(Step(f"benchmark {name}", command, share))
    if others and (options.rest or options.only is not None):
        command = script("harness.py", *others, "--quick", *rows, *rounds)
        steps.append(Step("benchmark others", command, LAST_SHARE))
    for step in steps:
        step.environment |= {"TRITON_CACHE_DIR": str(options.cache)}
    if options.dry_run:
        for step in steps:
            step.most = float("inf")
            step.environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            if step.name == "checks":
                step.environment["TRITON_INTERPRET"] = "1"
    return steps


def _stem(name: str) -> str:
    """The benchmark or script of an entry of ``ORDER``."""
    return name.partition(": ")[0].removesuffix(".py")


def _checked(only: Sequence[str] | None) -> list[str]:
    """The ops to check: those that the chosen benchmarks and scripts use, or all of them."""
    scripts = {"pretrain": "electra_pretraining", "memory": "loss_memory"}
    if only is None or "profile_kernels" in only:
        return list(CHECKED)
    used = {op for name in only for op in USES.get(scripts.get(name, name), ())}
    return [op for op in CHECKED if op in used]


def run(step: Step, limit: float) -> None:
    """Run a step in build/ (elsewhere ./fastplm would hide the built one), and keep its output."""
    print(f"== {step.name}, at most {limit:.0f} s: {' '.join(step.command)}", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / (re.sub(r"\W+", "-", step.name) + ".log")
    paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    started = time.perf_counter()
    process = None
    step.outcome = "stopped with the report"
    try:
        with log.open("w") as sink:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT / "build",
                env=environment | step.environment,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = process.wait(timeout=limit)
        step.outcome = "ok" if status == 0 else f"exit status {status}"
    except subprocess.TimeoutExpired:
        step.outcome = f"stopped after {limit:.0f} s"
    except OSError as error:
        step.outcome = f"not started: {error}"
    finally:
        if process is not None:
            _end(process)
        step.seconds += time.perf_counter() - started
        step.output = log.read_text(errors="replace").strip()
    print("\n".join(step.output.splitlines()[-25:]), flush=True)


def _end(process: subprocess.Popen) -> None:
    """End a step's process, and the processes that it started."""
    for kind, grace in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        try:
            os.killpg(process.pid, kind)
            process.wait(timeout=grace)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def build(step: Step, limit: float) -> None:
    """Build the package into build/site, unless it is there; copy it if pip cannot build it."""
    stamp = SITE / "built-from"
    source = _fingerprint()
    if stamp.exists() and stamp.read_text() == source:
        step.outcome, step.output = "ok", "nothing has changed since it was built"
        return
    shutil.rmtree(SITE, ignore_errors=True)
    flags = ["--no-index", "--no-deps", "--no-build-isolation", "--target", str(SITE)]
    step.command = [sys.executable, "-m", "pip", "install", "--verbose", *flags, str(ROOT)]
    try:
        run(step, limit)
    finally:
        if step.outcome != "ok":
            shutil.rmtree(SITE, ignore_errors=True)
            shutil.copytree(ROOT / "fastplm", SITE / "fastplm")
            shutil.copytree(ROOT / "triton_kernels", SITE / "fastplm" / "triton_kernels")
            step.outcome += "; the Python sources were copied and csrc/ is not built"
    if step.outcome == "ok":
        notices = re.findall(r"fastplm: NOTICE: (.+)", step.output)
        step.output = "\n".join(["built", *notices])
        stamp.write_text(source)


def _fingerprint() -> str:
    """A hash of the sources, the Python and the torch of a build."""
    digest = hashlib.sha256(sys.executable.encode())
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    files = [ROOT / "setup.py", ROOT / "pyproject.toml"]
    for folder in ("csrc", "fastplm", "triton_kernels"):
        files += sorted(path for path in (ROOT / folder).rglob("*") if path.suffix != ".pyc")
    for path in (*files, *filter(None, [version])):
        if path.is_file():
            digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()


def machine(dry_run: bool) -> Machine:
    """The place, asked of the harness in another process, as this one needs no torch."""
    code = (
        "import json, harness; "
        "print(json.dumps([harness.machine_folder(), harness.machine_line()]))"
    )
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if dry_run else {}
    paths = [str(BENCHMARKS), str(SITE)]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "build",
        env=os.environ | hidden | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        names = ("date", "machine", "torch", "triton", "commit")
        return Machine("unknown", dict.fromkeys(names, "unknown") | {"machine": reason})
    return Machine(*json.loads(done.stdout.splitlines()[-1]))


# --- the page -------------------------------------------------------------------------------------

RED, UNTESTED = "refused: its checks are red", "not tested"


def refusals(steps: Sequence[Step]) -> dict[str, str]:
    """The reasons why rows have no speed, by the name of the op or model."""
    said = next((step.output for step in steps if step.name == "checks"), "")
    red, done = _named("RED", said), _named("DONE", said)
    found = {}
    for name, used in USES.items():
        bad = [op for op in used if op in red]
        unknown = [op for op in used if op not in done]
        if used == (name,):
            why = RED if bad else UNTESTED if unknown else ""
        elif bad:
            why = f"refused: the checks of {', '.join(bad)} are red"
        else:
            why = f"{UNTESTED}: {', '.join(unknown)}" if unknown else ""
        if why:
            found[name] = why
    return found


def _named(word: str, said: str) -> set[str]:
    """The ops named in the lines that begin with ``word``."""
    return set(re.findall(rf"^{word} (\w+)", said, re.MULTILINE))


def red_checks(steps: Sequence[Step]) -> list[str]:
    said = next((step.output for step in steps if step.name == "checks"), "")
    return re.findall(r"^RED (.*)", said, re.MULTILINE)


def note(step: Step) -> str:
    """The lines of the page that explain a step's outcome."""
    lines = step.output.splitlines()
    if step.name == "checks":
        kinds = re.findall(r"^(GREEN|RED) ", step.output, re.MULTILINE)
        done = len(_named("DONE", step.output))
        counts = f"{kinds.count('GREEN')} green, {kinds.count('RED')} red"
        return f"{counts}; {done} ops to the end" if kinds else "".join(lines[-1:])
    if step.name == "compile":
        counts = re.findall(r"(\d+) kernels, (\d+) compiled", step.output)
        asked, made = (sum(int(count[i]) for count in counts) for i in (0, 1))
        return f"{asked} kernels, {made} compiled" if counts else "".join(lines[-1:])
    if step.name == "build" and step.outcome == "ok":
        return "; ".join(dict.fromkeys(lines))
    if step.name in ("pretrain", "profile_kernels") or step.outcome.startswith("exit"):
        return "".join(lines[-1:])
    return ""


def write_page(
    results: Path,
    here: Machine,
    steps: Sequence[Step],
    dry_run: bool = False,
    pictures: bool = True,
) -> Path:
    """Write RESULTS/<machine>/report.md, from the latest rows there and the steps' output."""
    folder = results / here.folder
    folder.mkdir(parents=True, exist_ok=True)
    rows = plots.latest_rows(folder)
    refused = refusals(steps)
    lines = [
        f"# fastplm on {here.line['machine']}",
        "",
        f"{datetime.date.today()}, torch {here.line['torch']}, triton {here.line['triton']}, "
        f"commit {here.line['commit']}. Made by `make gpu-report`; the rows are beside this page.",
        "",
    ]
    if dry_run:
        lines += [
            "**Dry run**: the CPU in the place of the GPU on small shapes, Triton's interpreter in "
            "that of its compiler, the plain step in that of the CUDA graph. No figure here is of "
            "a GPU.",
            "",
        ]
    lines += ["## Steps", "", "| step | outcome | seconds | rows | |", "|---|---|---|---|---|"]
    for step in steps:
        figures = (f"{step.seconds:.0f}", step.rows or "")
        lines.append(_cells(step.name, step.outcome, *figures, note(step)[:400]))
    lines += ["", *_checks(steps)]
    lines += ["", "## Targets", "", *_targets(results, here, rows, refused)]
    lines += ["", "## The three worst", "", *_worst(folder, here, rows, refused)]
    if pictures:  # pictures take seconds
        lines += ["", "## Pictures", "", *_pictures(folder, refused)]
    lines += ["", "## All rows", "", *_rows(here, rows, refused)]
    page = folder / "report.md"
    scratch = page.with_suffix(".tmp")
    scratch.write_text("\n".join(lines) + "\n")
    os.replace(scratch, page)
    return page


def _checks(steps: Sequence[Step]) -> Iterator[str]:
    """The lines of the page about ops that are wrong, or were not checked, on this machine."""
    refused = refusals(steps)
    for said in (RED, UNTESTED):
        if ops := [f"`{op}`" for op in CHECKED if refused.get(op) == said]:
            yield f"No speed is shown of {', '.join(ops)}, or of what uses them: {said}."
            yield ""
    for line in red_checks(steps):
        yield f"Red: `{line}`"
        yield ""
    yield (
        "The checks are one small call of each kernel, dtype and branch. The whole GPU suite is "
        "`make test-device`; this report did not run it."
    )


def _cells(*cells: object) -> str:
    text = (str(cell).replace("|", "/").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(text)} |"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}".rstrip("0").rstrip(".")


def _targets(
    results: Path, here: Machine, rows: Sequence[plots.Row], refused: Mapping[str, str]
) -> Iterator[str]:
    """A table of every target; those of another machine are judged by the rows of that machine."""
    name = here.line["machine"]
    yield f"Of an NVIDIA {targets.GPU} in bfloat16; the floor is what the arithmetic allows."
    yield ""
    yield "| target | unit | floor | must | stretch | measured | |"
    yield "|---|---|---|---|---|---|---|"
    known = {
        targets.GPU: targets.Rows(rows if targets.GPU in name else []),
        "cpu": targets.Rows(rows if name.startswith("cpu") else plots.latest_rows(results / "cpu")),
    }
    for target in targets.TARGETS:
        of_here = target.machine in name  # others were measured, and checked, on another machine
        found = targets.judge(target, known[target.machine], refused if of_here else {})
        said = found.text
        if found.measured is None and said == "not measured" and target.machine not in name:
            said += (
                f": needs an {targets.GPU}" if target.machine == targets.GPU else ": no such rows"
            )
        what = target.what + (" (rows of the CPU)" if target.machine == "cpu" else "")
        goals = (_plain(target.floor), _plain(target.must), _plain(target.stretch))
        yield _cells(what, target.unit, *goals, _plain(found.measured), said)
    if targets.GPU not in name:
        yield ""
        yield f"This machine is no {targets.GPU}: the times to reach are not its own."


def _worst(
    folder: Path, here: Machine, rows: Sequence[plots.Row], refused: Mapping[str, str]
) -> Iterator[str]:
    """The rows furthest from their targets, and their time by kernel, from the profile."""
    counted = [row for row in rows if row["op"] not in refused]
    found = targets.worst(targets.Rows(counted), here.line["machine"])
    if not found:
        yield "No row has a target or a share of the roofline yet."
    profiles, asked = _table(folder / "profile.csv"), _table(folder / "ncu.csv")
    for number, (why, row) in enumerate(found, 1):
        key = (row["op"], row["case"], row["direction"])
        yield f"{number}. **{why}** ({', '.join((*key, row['variant']))})."
        yield f"   {_reached(row)}"
        kernels = _latest(profiles, key)
        if not kernels:
            yield "   No profile of it."
            continue
        total = sum(float(kernel["us"]) for kernel in kernels)
        yield f"   The profile: {_spent(row, total, kernels)}"
        for kernel in kernels[:4]:
            yield (
                f"   - {float(kernel['share']):.0%}, {float(kernel['us']):,.1f} µs in "
                f"{float(kernel['launches']):g} launches: `{kernel['kernel']}`"
            )
        for kernel in _latest(asked, key)[:4]:
            yield (
                f"   - Nsight Compute, `{kernel['kernel']}`: {kernel['ncu_time']}, memory "
                f"{kernel['dram_percent']} %, SM {kernel['sm_percent']} %, warps "
                f"{kernel['warps_percent']} %, {kernel['registers']} registers"
            )


def _reached(row: plots.Row) -> str:
    """The rates of a row, in words."""
    parts = []
    for column, unit, scale in (
        ("gb_per_s", "GB/s", 1),
        ("gflop_per_s", "GFLOP/s", 1),
        ("of_roofline", "% of the roofline", 100),
        ("mfu", "% of the peak", 100),
        ("launches", "launches", 1),
    ):
        if (value := plots.number(row, column)) is not None:
            parts.append(f"{_plain(scale * value)} {unit}")
    return f"{_plain(plots.number(row, 'p50_us'))} µs: {', '.join(parts) or 'no rates'}."


def _spent(row: plots.Row, total: float, kernels: Sequence[plots.Row]) -> str:
    """The conclusion from the sum over the kernels."""
    p50 = plots.number(row, "p50_us") or 0.0
    launches = sum(float(kernel["launches"]) for kernel in kernels)
    said = f"{total:,.1f} µs in {launches:g} launches."
    if row["direction"] == "backward":
        return said + " Its forward is among them."
    if total < 0.8 * p50:
        return said + f" {p50 - total:,.1f} µs of the median are in none of them: launching costs."
    name = kernels[0]["kernel"]
    return said + f" What to work on first is `{name}`."


def _table(path: Path) -> list[plots.Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _latest(rows: Sequence[plots.Row], key: plots.Key) -> list[plots.Row]:
    """The lines of one case, from the last time that it was profiled."""
    of_case = [row for row in rows if (row["op"], row["case"], row["direction"]) == key]
    return [row for row in of_case if row["date"] == of_case[-1]["date"]]


def _pictures(folder: Path, refused: Mapping[str, str]) -> Iterator[str]:
    try:
        drawn, missing = plots.draw(folder, folder, without=refused)
    except ImportError:
        yield "None: matplotlib is not installed."
        return
    for path in drawn:
        yield f"![{path.stem}]({path.name})"
        yield ""
    for reason in missing:
        yield f"Not drawn, {reason}."
        yield ""


def _rows(here: Machine, rows: Sequence[plots.Row], refused: Mapping[str, str]) -> Iterator[str]:
    times = {
        (target.key, target.variant): target for target in targets.TARGETS if target.unit == "µs"
    }
    yield "Medians of interleaved rounds, 20th to 80th percentile; a slower row is a row."
    yield ""
    columns = ("gb_per_s", "gflop_per_s", "of_roofline", "mfu", "tokens_per_s", "launches")
    columns = (*columns, "peak_mb", "vs_eager")
    names = "GB/s | GFLOP/s | of roofline | MFU | tokens/s | launches | peak MiB | vs eager"
    yield f"| op | case | direction | variant | µs | floor | must | {names} | status | commit |"
    yield "|" + 17 * "---|"
    for row in rows:
        key = (row["op"], row["case"], row["direction"])
        goal = next(
            (
                target
                for (wanted, variant), target in times.items()
                if variant == row["variant"]
                and target.machine in here.line["machine"]
                and all(map(re.fullmatch, wanted, key))
            ),
            None,
        )
        goals = ("", "") if goal is None else (_plain(goal.floor), _plain(goal.must))
        time_us = f"{row['p50_us']} [{row['p20_us']}–{row['p80_us']}]" if row["p50_us"] else ""
        figures = [row.get(column) or "" for column in columns]
        status = row["status"]
        if row["op"] in refused:
            time_us, figures, status = "", [""] * len(columns), refused[row["op"]]
        yield _cells(*key, row["variant"], time_us, *goals, *figures, status, row["commit"])


# --- the report -----------------------------------------------------------------------------------


def _lines(results: Path) -> int:
    """The number of lines in all tables there, without the header of each."""
    files = results.rglob("*.csv") if results.is_dir() else ()
    return sum(path.read_bytes().count(b"\n") - 1 for path in files)


def _stop(*_: object) -> None:
    raise SystemExit(143)


def report(steps: Sequence[Step], results: Path, budget: float, dry_run: bool = False) -> Path:
    """Run the steps within ``budget`` seconds, with the page written after each."""
    deadline = time.perf_counter() + budget
    (ROOT / "build").mkdir(exist_ok=True)
    here = None
    try:
        for number, step in enumerate(steps):
            left = deadline - time.perf_counter()
            if left < LEAST:
                step.outcome = "not reached: the time was up"
                continue
            share = step.share / sum(later.share for later in steps[number:])
            limit = min(step.most, left * share)
            before = _lines(results)
            try:
                (build if step.name == "build" else run)(step, limit)
            finally:
                step.rows = _lines(results) - before
            # The harness imports the package, so it cannot be asked before the build.
            here = here or machine(dry_run)
            write_page(results, here, steps, dry_run, pictures=False)
    finally:
        page = write_page(results, here or machine(dry_run), steps, dry_run)
        print(f"report: {page}", flush=True)
    return page


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, help="where rows are; default: benchmarks/results")
    parser.add_argument("--rounds", type=int, help="timed rounds of each case")
    parser.add_argument("--rest", action="store_true", help="what the first run has no time for")
    parser.add_argument("--only", nargs="*", help="benchmarks and scripts to run; default: all")
    parser.add_argument("--skip-build", action="store_true", help="use build/site as it is")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--budget", type=float, help=f"seconds for everything; default {BUDGET:g}")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU, on small shapes")
    parser.add_argument(
        "--cache",
        type=Path,
        default=os.environ.get("TRITON_CACHE_DIR", ROOT / "build" / "triton-cache"),
        help="compiled kernels; default: $TRITON_CACHE_DIR, else build/triton-cache",
    )
    options = parser.parse_args(arguments)
    if options.results is None:
        scratch = tempfile.mkdtemp(prefix="fastplm-gpu-report-") if options.dry_run else None
        options.results = Path(scratch or BENCHMARKS / "results")
    options.results, options.cache = options.results.resolve(), options.cache.resolve()
    if options.dry_run:
        options.rounds = options.rounds or 1
    # A dry run on two cores is slow, and uses no time of a GPU.
    options.budget = options.budget or (3000 if options.dry_run else BUDGET)
    return options


def main() -> int:
    options = parse()
    signal.signal(signal.SIGTERM, _stop)
    steps = plan(options)
    report(steps, options.results, options.budget, options.dry_run)
    return 0 if all(step.outcome == "ok" for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
