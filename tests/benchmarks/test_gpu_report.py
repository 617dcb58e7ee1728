"""The report's steps and their outcomes, its page, and what it measures itself.

Steps are tiny commands here, and rows are planted. The slow lane runs a whole report, without a
GPU.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import compile_cache
import gpu_report
import pytest
from gpu_report import Machine, Step

import harness
import plots
import targets

BENCHMARKS = Path(gpu_report.__file__).parent
LINE = {"date": "2026-01-02 03:04", "torch": "2.13", "triton": "3.7", "commit": "abc"}
CPU = Machine("cpu", {"machine": "cpu Some (2 threads)", **LINE})
H200 = Machine("nvidia-h200", {"machine": "NVIDIA H200 (driver 1.2)", **LINE})


def row(op, case, direction="forward", variant="fastplm", p50=100.0, machine=H200, **given):
    made = dict.fromkeys(("gb_per_s", "gflop_per_s", "peak_mb", "vs_eager"), "")
    made |= machine.line | dict(op=op, case=case, direction=direction, variant=variant, status="ok")
    times = dict.fromkeys(("p20_us", "p50_us", "p80_us"), p50 or "")
    return {name: str(value) for name, value in (made | times | given).items()}


def write(folder: Path, name: str, rows) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [",".join(columns)]
    lines += [",".join(f'"{row.get(column, "")}"' for column in columns) for row in rows]
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")


def python(code: str, name="step", share=1.0) -> Step:
    return Step(name, [sys.executable, "-c", code], share)


@pytest.fixture
def report(tmp_path, monkeypatch):
    """Runs the steps, and returns the page."""
    monkeypatch.setattr(gpu_report, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(gpu_report, "machine", lambda dry_run: CPU)

    def run(*steps, budget=100.0, **options):
        return gpu_report.report(steps, tmp_path / "rows", budget, **options).read_text()

    return run


# --- steps ----------------------------------------------------------------------------------------


def test_a_step_that_works_fails_is_stopped_or_is_missing(report):
    slow = python("import time; print('begun', flush=True); time.sleep(60)", "stopped")
    slow.most = 1
    steps = [
        python("print('fine')", "works"),
        python("print('it said why'); raise SystemExit(3)", "fails"),
        slow,
        Step("missing", ["/no/such/program"], 1),
        python("print('fine')", "after all that"),
    ]
    page = report(*steps)
    assert [step.outcome.split(":")[0] for step in steps] == [
        "ok",
        "exit status 3",
        "stopped after 1 s",
        "not started",
        "ok",
    ]
    assert "| works | ok |" in page and "| after all that | ok |" in page
    assert re.search(r"\| fails \| exit status 3 \| \d+ \|  \| it said why \|", page)
    assert "| stopped | stopped after 1 s |" in page
    assert "| missing | not started: [Errno 2]" in page


def test_none_starves_and_the_rest_is_said_not_to_be_reached(report, monkeypatch):
    now = 0.0
    needs = {"greedy": 60, "next": 0.1, "third": 60, "never": 0.1}

    def run(step, limit):
        nonlocal now
        step.seconds = min(needs[step.name], limit)
        step.outcome = "ok" if step.seconds < limit else f"stopped after {limit:.1f} s"
        now += step.seconds

    monkeypatch.setattr(gpu_report, "run", run)
    monkeypatch.setattr(gpu_report, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(gpu_report, "LEAST", 0.3)
    steps = [Step(name, [], share=1e-9 if name == "never" else 1.0) for name in needs]
    report(*steps, budget=2.0)
    assert [step.outcome for step in steps] == [
        "stopped after 0.7 s",
        "ok",
        "stopped after 1.2 s",  # it also had the time that "next" did not use
        "not reached: the time was up",
    ]


@pytest.mark.slow
def test_rows_of_a_stopped_step_are_counted_and_on_the_page(report, tmp_path):
    folder = tmp_path / "rows" / "cpu"
    write(tmp_path, "made", [row("attention", "kept", machine=CPU)])
    code = "import os, time; os.renames({!r}, {!r}); time.sleep(60)"
    made = python(code.format(str(tmp_path / "made.csv"), str(folder / "attention.csv")), "made")
    made.most = 4  # as long as a busy machine may take to start Python
    page = report(python(f"print({GREEN!r})", "checks"), made)
    assert re.search(r"\| made \| stopped after 4 s \| \d+ \| 1 \|  \|", page)
    assert "| attention | kept | forward | fastplm | 100.0 [100.0–100.0] |" in page


def test_a_report_that_is_stopped_leaves_its_page_and_no_process(tmp_path):
    code = f"""
import signal, sys
from pathlib import Path
import gpu_report
gpu_report.LOGS = Path({str(tmp_path / "logs")!r})
gpu_report.machine = lambda dry_run: gpu_report.Machine("cpu", {CPU.line!r})
signal.signal(signal.SIGTERM, gpu_report._stop)
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
steps = [
    gpu_report.Step("first", [sys.executable, "-c", "print(1)"], 1),
    gpu_report.Step("second", [sys.executable, "-c", child], 1),
    gpu_report.Step("third", [sys.executable, "-c", child], 1),
]
gpu_report.report(steps, Path({str(tmp_path / "rows")!r}), 100)
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=BENCHMARKS)
    log = tmp_path / "logs" / "second.log"
    deadline = time.time() + 20
    while not (log.exists() and log.read_text().strip()) and time.time() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    page = (tmp_path / "rows" / "cpu" / "report.md").read_text()
    assert "| first | ok |" in page
    assert "| second | stopped with the report |" in page and "| third | not reached |" in page
    with pytest.raises(ProcessLookupError):  # as soon as its new parent has waited for it
        while time.time() < deadline + 20:
            os.kill(int(log.read_text()), 0)
            time.sleep(0.05)


def ops_of(step: Step) -> list[str]:
    """The benchmarks that a step's harness runs."""
    return list(step.command[2 : step.command.index("--quick")])


def test_the_plan_has_every_benchmark_and_begins_with_the_telling_ones(tmp_path):
    def planned(*arguments):
        return gpu_report.plan(gpu_report.parse(["--results", str(tmp_path), *arguments]))

    def named(*arguments):
        return [step.name for step in planned(*arguments)]

    names = named()
    assert names[:4] == ["build", "info", "compile", "checks"]
    assert names[4:6] == ["benchmark attention", "benchmark linear_cross_entropy"]
    scripts = {"pretrain", "profile_kernels", "memory"}
    assert scripts <= set(names + named("--rest")) and names.index("profile_kernels") > names.index(
        "pretrain"
    )
    assert all((BENCHMARKS / f"{name}.py").exists() for name in scripts)
    steps = planned() + planned("--rest")
    measured = {op for step in steps if is_benchmark(step.name) for op in ops_of(step)}
    assert measured == set(gpu_report.benchmarks())
    assert named("--skip-build", "--only", "bert", "pretrain")[1:] == [
        "compile",
        "checks",
        "benchmark bert: padding 0%",
        "pretrain",
        "benchmark bert: padding 30%",
        "benchmark bert: padding 50%",
    ]


def test_without_a_gpu_nothing_is_compiled(tmp_path, monkeypatch, capsys):
    """A report goes on; who asks for the kernels alone must say for which GPU."""
    monkeypatch.setattr(compile_cache.torch.cuda, "is_available", lambda: False)
    step = next(step for step in gpu_report.plan(gpu_report.parse([])) if step.name == "compile")
    monkeypatch.setattr(sys, "argv", [*step.command[1:2], str(tmp_path), *step.command[3:]])
    assert compile_cache.main() == 0 and not [*tmp_path.iterdir()]
    assert "nothing is compiled" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [step.command[1], str(tmp_path)])
    with pytest.raises(SystemExit):
        compile_cache.main()
    assert "no GPU is here: --arch says for which one" in capsys.readouterr().err


MODELS = ("bert", "electra", "t5", "albert", "bart", "gpt2", "roberta")
#: Kernels that a step launches on sm_90, as compile_cache.py counts them; for a model, the distinct
#: launches of its training step.
KERNELS = {
    **dict(checks=330, attention=51, linear_cross_entropy=45, replaced_token_loss=16),
    **dict(gather_rows=5, linear_distillation=27, maxsim=10, pretrain=24, profile_kernels=30),
    **dict.fromkeys(MODELS, 12),
}
COMPILING, BEGINNING = 0.8, 8.0  # seconds to compile a kernel, and to start a process with torch
FIXED = dict(build=120.0, info=0.0, compile=8.0, checks=330 * 0.05, memory=10.0, pretrain=30.0)
FIXED["profile_kernels"] = 25.0


@functools.cache
def cases_on_a_gpu() -> dict[str, list]:
    """The cases of each op's benchmark: label, full, directions, variants and targets."""
    code = """
import importlib, json, harness, torch, gpu_report
harness.default_device = lambda: torch.device("cuda")
print(json.dumps({
    op: [
        (case.label, case.full, case.directions, list(case.variants), dict(case.targets))
        for case in importlib.import_module(f"test_{op}").CASES
    ]
    for op in gpu_report.benchmarks() if op not in MODELS
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", f"MODELS = {MODELS!r}{code}"],
        env=os.environ | {"PYTHONPATH": str(BENCHMARKS)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def device_seconds(step: Step) -> float:
    """Seconds of a step on an H200, without compiling: for each call its target (1 ms without one)
    and half a millisecond of sleep, and a tenth of a second for each variant."""
    if step.name in FIXED:
        return BEGINNING + FIXED[step.name]
    seconds, rounds = BEGINNING, harness._QUICK_ROUNDS + 2
    part = step.name.partition(": ")[2]
    for name in ops_of(step):
        if name in MODELS:  # their benchmarks need the GPU; they have three cases of three variants
            seconds += 3 * 3 * (2.0 + rounds * 0.05)
            continue
        for label, full, directions, variants, times in cases_on_a_gpu()[name]:
            if full or part not in label:
                continue
            for direction in directions:
                ours = times.get(direction, (0.0, 1000.0))[1] / 1e6
                for variant in variants:
                    call = ours if variant == "fastplm" else 4 * ours
                    seconds += rounds * (0.0008 + call) + 0.1
    return seconds


@pytest.mark.parametrize("cpus", (16, 2))
@pytest.mark.parametrize("filled", (True, False))
@pytest.mark.parametrize("rest", ((), ("--rest",)))
def test_what_an_h200_is_expected_to_reach_in_nine_minutes(
    tmp_path, monkeypatch, rest, filled, cpus
):
    """With a cache, or CPUs that fill it, every step fits; else the page names what was dropped."""
    now, compiled = 0.0, 1.0 if filled else 0.0
    order = []

    def run(step, limit):
        nonlocal now, compiled
        order.append(step.name)
        name = step.name.removeprefix("benchmark ").split(":")[0]
        seconds = device_seconds(step)
        total = sum(KERNELS[op] for op in compile_cache.STEPS)
        if name == "compile":
            wanted = (1 - compiled) * total * COMPILING / cpus
            compiled += min(wanted, limit - seconds) * cpus / COMPILING / total
            seconds += wanted
        elif name == "build" and rest:  # the first run has built it
            seconds = 0.0
        seconds += (1 - compiled) * KERNELS.get(name, 0) * COMPILING
        step.outcome = "ok" if seconds < limit else f"stopped after {limit:.0f} s"
        step.seconds = min(seconds, limit)
        now += step.seconds
        if name == "checks":
            lines = GREEN.splitlines()
            step.output = "\n".join(lines[: round(len(lines) * min(1.0, limit / seconds))])

    monkeypatch.setattr(gpu_report, "run", run)
    monkeypatch.setattr(gpu_report, "build", run)
    monkeypatch.setattr(gpu_report, "machine", lambda dry_run: H200)
    monkeypatch.setattr(gpu_report, "time", SimpleNamespace(perf_counter=lambda: now))
    options = gpu_report.parse(["--results", str(tmp_path), *rest])
    steps = gpu_report.plan(options)
    page = gpu_report.report(steps, tmp_path, options.budget).read_text()
    print(*((s.name, s.outcome, round(s.seconds), s.share) for s in steps), sep="\n")
    assert now < 540
    assert order.index("checks") < min(map(order.index, filter(is_benchmark, order)))
    dropped = [step for step in steps if step.outcome != "ok"]
    if filled or cpus == 16:
        assert not dropped
    else:
        assert dropped and "not tested" in page
        assert all(f"| {step.name} | {step.outcome} |" in page for step in dropped)


def is_benchmark(name: str) -> bool:
    return name.startswith("benchmark")


def test_a_build_that_is_not_possible_leaves_the_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "SITE", tmp_path / "site")
    monkeypatch.setattr(gpu_report, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(gpu_report.sys, "executable", "/no/such/python")
    step = Step("build", [], 1)
    gpu_report.build(step, 10)
    assert step.outcome.startswith("not started") and "csrc/ is not built" in step.outcome
    assert (tmp_path / "site/fastplm/triton_kernels/attention/launch.py").exists()


# --- checks, and what follows from red ones -------------------------------------------------------

GREEN = "\n".join(f"GREEN {op} | bfloat16 | 0.10 s\nDONE {op}" for op in gpu_report.CHECKED)


def checked(output: str = GREEN, outcome: str = "ok") -> Step:
    return Step("checks", [], 1, outcome=outcome, output=output)


def rows_of(page: str, op: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith(f"| {op} |")]


def test_an_op_that_is_red_or_not_tested_has_no_speed(tmp_path):
    rows = [row(op, "BERT-base 256x128", p50=4) for op in ("gather_rows", "mask_tokens")]
    rows += [row("bert", "base", "training", p50=7), row("gelu", "any", p50=8)]
    write(tmp_path / "nvidia-h200", "rows", rows)

    def page(*steps):
        return gpu_report.write_page(tmp_path, H200, steps, pictures=False).read_text()

    green = page(checked())
    assert "| gather rows | µs | 3.5 | 5 |  | 4 | must reached |" in green
    assert all("| 4 [4–4] |" in rows_of(green, op)[0] for op in ("gather_rows", "mask_tokens"))

    said = GREEN.replace("GREEN gather_rows |", "RED gather_rows |")
    red = page(checked(said, "exit status 1"))
    assert "No speed is shown of `gather_rows`, or of what uses them: refused" in red
    assert "Red: `gather_rows | bfloat16 | 0.10 s`" in red
    assert "| gather rows | µs | 3.5 | 5 |  |  | refused: its checks are red |" in red
    assert "refused: its checks are red" in rows_of(red, "gather_rows")[0]
    assert "refused: the checks of gather_rows are red" in rows_of(red, "bert")[0]
    assert "| 4 [4–4] |" in rows_of(red, "mask_tokens")[0]

    cut = page(checked(GREEN.replace("DONE mask_tokens", ""), "stopped after 9 s"))
    assert "| choose + corrupt + compact | µs | 2.5 | 6 |  |  | not tested |" in cut
    assert "not tested" in rows_of(cut, "mask_tokens")[0] and "[" in rows_of(cut, "bert")[0]

    never = page()
    for op in ("gather_rows", "mask_tokens", "bert"):
        (line,) = rows_of(never, op)
        assert "not tested" in line and "[" not in line
    assert "[8–8]" in rows_of(never, "gelu")[0]  # gelu has no kernel for a GPU
    assert "make test-device" in never


def test_what_was_checked_is_counted():
    output = "GREEN attention | a | 0.1 s\nRED attention | b | 0.2 s: why\nDONE attention"
    assert gpu_report.note(checked(output)) == "1 green, 1 red; 1 ops to the end"
    assert gpu_report.note(checked("Killed", "exit status 9")) == "Killed"


def test_the_ops_that_a_benchmark_uses_are_checked(tmp_path):
    import gpu_checks

    assert list(gpu_checks.OPS) == list(gpu_report.CHECKED)

    def asked(*arguments):
        options = gpu_report.parse(["--results", str(tmp_path), *arguments])
        steps = {step.name: step for step in gpu_report.plan(options)}
        return steps["checks"].command[2:] if "checks" in steps else None

    assert asked() == list(gpu_report.CHECKED)
    assert asked("--only", "bert") == ["attention", "linear_cross_entropy", "gather_rows"]
    assert asked("--only", "memory") == ["linear_cross_entropy", "gather_rows"]
    assert asked("--only", "gelu") is None


@pytest.mark.parametrize("family", ("bert", "roberta", "albert", "electra", "gpt2", "t5", "bart"))
def test_a_model_counts_as_the_ops_that_it_uses(family):
    import torch

    import steps
    from fastplm._backends import record_decisions

    case = steps.case(steps.Step(f"{family}-tiny", 2, 16, padding=0.3, vocab=1999))
    with record_decisions() as decisions:
        case.variants["fastplm"](**case.make_small(torch.device("cpu")))
    used = {decision.op for decision in decisions} & set(gpu_report.CHECKED)
    assert used and used == set(gpu_report.USES[family])


# --- targets --------------------------------------------------------------------------------------


def judged(what, *rows):
    (target,) = (target for target in targets.TARGETS if target.what == what)
    return targets.judge(target, targets.Rows(rows))


def test_verdicts():
    what = "attention, BERT-base 64x512, backward"
    key = ("attention", "BERT-base 64x512", "backward")
    assert judged(what).text == "not measured"
    assert judged(what, row(*key, p50=300)).text == "stretch reached"
    assert judged(what, row(*key, p50=380)).text == "must reached"
    missed = judged(what, row(*key, p50=570))
    assert missed.text == "**missed**, 1.50 × the must" and missed.miss == 1.5
    assert judged(what, row(*key, p50=None, status="failed: no")).text == "failed: no"
    assert judged(what, row("attention", "BERT-base 64x512 padded 30 %", "backward")).miss is None


def test_figures_that_are_not_times():
    bias = ("attention", "T5-base 64x512", "forward")
    rows = [row(*bias, p50=108), row(*bias, "fastplm, no bias", p50=100)]
    assert judged("attention, T5's bias over none, forward", *rows).measured == 1.08
    drop = [row("attention", "BERT-base 64x512 dropout 0.1, ragged", p50=113)]
    drop += [row("attention", "BERT-base 64x512 padded 0 %, ragged", p50=100)]
    what = "attention, BERT-base 64x512, ragged, dropout 0.1 over none, forward"
    assert judged(what, *drop).miss == pytest.approx(1.13 / 1.12)
    back = ("gather_rows", "BERT-base 256x128")
    halves = [row(*back, "forward", p50=5), row(*back, "training", p50=20)]
    assert judged("scatter back", *halves).measured == 15
    assert judged("scatter back", row(*back, "backward", p50=14)).measured == 14
    step = ("bert", "large 64x512 padding 0% dropout 0.1 bf16", "training")
    verdict = judged("BERT-large step, 64x512, MFU", row(*step, mfu=0.47 / 2))
    assert verdict.measured == 23.5 and verdict.miss == pytest.approx(2)
    electra = ("electra_pretraining", "ELECTRA-small 128x128 dropout 0.1 bf16 AdamW", "training")
    what = "ELECTRA-small, 1M steps at B 128, S 128 (by arithmetic from the time of a step)"
    graph = row(*electra, "fastplm, CUDA graph", p50=5000)
    assert judged(what, graph, row(*electra, p50=9000)).measured == pytest.approx(5 / 3.6)


def test_gains_on_a_cpu():
    def steps(gains):
        for share, gain in gains.items():
            key = ("bert", f"base 8x128 padding {share}% dropout 0 fp32", "training")
            yield row(*key, p50=100, machine=CPU)
            yield row(*key, "transformers sdpa", p50=100 * gain, machine=CPU)

    # Transformers' step takes the same time with padding, fastplm's takes less.
    rows = list(steps({share: 1.4 / (1 - share / 100) for share in (0, 30, 50)}))
    name = "BERT-base step, padding {}, dropout 0, fp32, times as fast as Transformers with SDPA"
    between = judged(name.format("35 % (by arithmetic from 30 and 50 %)"), *rows)
    assert between.measured == pytest.approx(1.4 / 0.65)
    assert judged(name.format("0 %"), *rows).text.startswith("**missed**, 1.07")


def test_every_time_to_reach_is_that_of_its_benchmark():
    cases = {}
    for name in {target.key[0] for target in targets.TARGETS if target.unit == "µs"}:
        for case in importlib.import_module(f"test_{name}").gpu_cases():
            for direction, goals in case.targets.items():
                cases[case.op, case.label, direction] = tuple(goals)
    for target in targets.TARGETS:
        if target.unit != "µs":
            continue
        goals = next(g for key, g in cases.items() if all(map(re.fullmatch, target.key, key)))
        wanted = (target.floor, target.must, target.stretch)
        assert goals == wanted[: len(goals)], target.what


def test_every_target_is_on_the_page(tmp_path):
    page = gpu_report.write_page(tmp_path, H200, [checked()], pictures=False).read_text()
    for target in targets.TARGETS:
        assert f"| {target.what}" in page
    assert page.count("| not measured |") == sum(t.machine != "cpu" for t in targets.TARGETS)
    assert page.count("| not measured: no such rows |") == sum(
        t.machine == "cpu" for t in targets.TARGETS
    )


def test_the_three_worst_are_named_with_their_profile(tmp_path):
    rows = [
        row("mask_tokens", "BERT-base 256x128", p50=60, gb_per_s=9, launches=7),
        row("gather_rows", "BERT-base 256x128", p50=10),
        row("attention", "BERT-base 64x512", "backward", p50=950),
        row("attention", "BERT-base 64x512", "forward", p50=130),
    ]
    write(tmp_path / "nvidia-h200", "rows", rows)
    kernel = dict(op="mask_tokens", case="BERT-base 256x128", direction="forward", **H200.line)
    profile = [
        kernel | dict(date="older", kernel="stale", launches=1, us=1, share=1),
        kernel | dict(kernel="choose", launches=1, us=20, share=0.8),
        kernel | dict(kernel="write", launches=6, us=5, share=0.2),
    ]
    write(tmp_path / "nvidia-h200", "profile", profile)
    page = gpu_report.write_page(tmp_path, H200, [checked()], pictures=False).read_text()
    worst = page.split("## The three worst")[1].split("##")[0]
    assert re.findall(r"\d\. \*\*(.*?): (\S+) × the must", worst) == [
        ("choose + corrupt + compact", "10.00"),
        ("attention, BERT-base 64x512, backward", "2.50"),
        ("gather rows", "2.00"),
    ]
    assert "80%, 20.0 µs in 1 launches: `choose`" in worst and "stale" not in worst
    assert "35.0 µs of the median are in none of them" in worst
    assert "No profile of it" in worst


# --- the profile ----------------------------------------------------------------------------------


def test_a_profile_names_what_takes_the_time(tmp_path, harness):
    import profile_kernels
    import torch

    a = torch.randn(256, 256)
    profiled = profile_kernels.profile(lambda: a @ a @ a, torch.device("cpu"))
    assert profiled[0][:2] == ("aten::mm", 2)
    many = [(f"k{i}", 1, 10.0) for i in range(14)]
    rows = profile_kernels.write_profile(tmp_path, "op", "case", "forward", many)
    assert len(rows) == 13 and rows[-1]["kernel"] == "2 others" and rows[-1]["us"] == 20
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    assert not plots.latest_rows(tmp_path)  # rows of a profile are of another kind


def test_the_worst_are_profiled_first(monkeypatch, harness):
    import profile_kernels

    def case(op, label, wrt=()):
        make = dict.fromkeys(("make", "make_small"), lambda device: {})
        return harness.Case(op, label, **make, variants={}, wrt=wrt)

    known = {
        "attention": [case("attention", "one", ("q",)), case("attention", "two", ("q",))],
        "broken": None,
        "index": [case("index", "i")],
    }

    def cases(name):
        if known[name] is None:
            raise ImportError("no such library")
        return known[name]

    monkeypatch.setattr(profile_kernels, "cases", cases)
    monkeypatch.setattr(profile_kernels, "ops", lambda: list(known))
    rows = [row("attention", "two", "training", machine=CPU, of_roofline=0.1)]
    rows += [row("attention", "one", "training", machine=CPU, of_roofline=0.9)]
    found = profile_kernels.chosen(rows, "cpu Some")
    assert [(c.label, direction, worst) for c, direction, worst in found] == [
        ("two", "training", True),
        ("one", "training", True),
        ("i", "forward", False),
    ]


NCU = """==PROF== Connected to process 7
"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum"
"","","%","us"
"0","choose","81.5","4.2"
"1","write","12.0","1.1"
"""


def test_what_nsight_compute_prints_is_read(tmp_path, monkeypatch, harness):
    import profile_kernels

    first, second = profile_kernels.read_ncu(NCU)
    assert first["kernel"] == "choose" and first["ncu_time"] == "4.2 us"
    assert second["dram_percent"] == "12.0"
    program = tmp_path / "ncu"
    case = harness.Case("op", "case", lambda d: {}, lambda d: {}, {})
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, said in (
        (f"cat <<'EOF'\n{NCU}EOF", "2 launches"),
        ("echo '==ERROR== ERR_NVGPUCTRPERM'", "ERR_NVGPUCTRPERM"),
    ):
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        assert said in profile_kernels.ask_ncu(tmp_path, case, "forward")
    assert (tmp_path / "ncu.csv").read_text().count("\n") == 3


# --- pre-training ---------------------------------------------------------------------------------


def test_a_graph_may_not_change_the_losses():
    import pretrain
    import torch

    plain = torch.tensor([[10.0, 0.7], [9.0, 0.6]])
    other = plain + torch.tensor([[0.1, 0.0], [0.0, 0.01]])
    assert pretrain.verdict(plain, plain, other) == "ok"
    assert pretrain.verdict(plain, plain + 0.005, other) == "ok"
    off = plain + torch.tensor([[0.0, 0.0], [0.2, 0.0]])
    assert pretrain.verdict(plain, off, other).startswith("refused: mlm_loss off by 0.2")
    broken = plain * torch.tensor([1.0, float("nan")])
    assert pretrain.verdict(plain, broken, other).startswith("refused: rtd_loss off by nan")


@pytest.mark.slow
def test_pre_training_leaves_rows_and_losses(tmp_path, monkeypatch, harness, capsys):
    import pretrain

    small = ["--arch", "electra-tiny", "--batch-size", "4", "--seqlen", "16", "--steps", "8"]
    arguments = ["pretrain.py", "--rows", str(tmp_path), *small, "--vocab-size", "1999"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert pretrain.main() == 0
    (folder,) = tmp_path.iterdir()
    rows = plots.latest_rows(folder)
    assert [row["variant"] for row in rows] == ["fastplm", "fastplm, CUDA graph"]
    assert all(row["status"] == "ok" and float(row["tokens_per_s"]) > 0 for row in rows)
    assert "no CUDA" in rows[1]["case"] and "no CUDA" in capsys.readouterr().out.splitlines()[-1]
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


@pytest.mark.slow
def test_the_whole_report_without_a_gpu(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu_report.py"), "--dry-run"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TRITON"))}
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], env=environment, capture_output=True, text=True
    )
    page = (tmp_path / "cpu" / "report.md").read_text()
    assert done.returncode == 0, f"{page[:4000]}\n{done.stdout[-4000:]}"
    assert "**Dry run**" in page and "plain step in the graph's place" in page
    assert "![roofline](roofline.png)" in page and "![memory](memory.png)" in page
    rows = dict(re.findall(r"^\| (.+?) \| ok \| \d+ \| (\d*) \|", page, re.MULTILINE))
    # The small BERT of a CPU has no batch with 30 % of padding.
    without = {"build", "info", "checks", "benchmark bert: padding 30%"}
    assert {name for name, number in rows.items() if not number} == without
    assert len(rows) == len(gpu_report.plan(gpu_report.parse(["--dry-run"])))
