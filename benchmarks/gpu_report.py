"""``make gpu-report``: what this machine's GPU does with fastplm and with Transformers.

    python benchmarks/gpu_report.py                # 485 seconds; RESULTS/<gpu>/ and a page there
    python benchmarks/gpu_report.py --seconds 300  # the same plan, cut off earlier; 900: longer
    python benchmarks/gpu_report.py --dry          # the plan alone, by a clock that only counts
    python benchmarks/gpu_report.py --page         # the page again, from the rows

One process does all of it. The plan is a list of pieces in the order of their worth, each with the
seconds that it should take, grouped to parts. A piece begins if it fits before its part should end,
or runs no later than ``SPARE`` seconds after that; the others wait for the end, and run then if
there is time. A piece that takes far too long is cut off. Every row is in its file as soon as it is
measured, so a report that is killed loses nothing. Each piece has a row of the op "report": whether
it ran, failed, was cut off or had no time. A failure is a row; the next piece runs.

A kernel whose check is wrong makes every row of fastplm that uses it "red": it has its time, and no
place among the results. After a fault that makes all later calls fail, the process replaces itself
and goes on with the next piece.

Compiled kernels are kept in --cache. ``compile_cache.py`` fills its folder "triton" without a GPU;
carry the whole folder along, and back. Nothing is downloaded or built: the checkout is measured,
and an op whose part in csrc/ is not built runs as the registry chooses. On a CPU all sizes are
tiny.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import plots

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 485.0
#: Seconds for the imports, and those by which the pieces may be late.
START, SPARE = 15.0, 30.0
#: Seconds after the deadline at which a process that hangs is ended.
GRACE = 5.0
LAYER = ("dropout_add_layer_norm", "bias_gelu", "embedding_layer_norm")
_STEP = ("attention", *LAYER, "linear_cross_entropy", "gather_rows")
#: The ops whose kernels are checked, in this order.
CHECKED = (*_STEP, "replaced_token_loss", "mask_tokens")
#: The ops that others use; an op in none of these lists uses itself.
USES = {
    **dict.fromkeys(("bert", "albert", "gpt2", "t5", "bart"), _STEP),
    "electra_pretraining": CHECKED,
    "attention_tiles": ("attention",),
}
OURS, SDPA = plots.OURS, "transformers sdpa"
#: The variants of a step: the model, and whether its largest number of tokens is given, and
#: whether it is compiled.
EAGER = {SDPA: ("sdpa", False, False), OURS: (OURS, False, False)}
EAGER["fastplm, room given"] = (OURS, True, False)
COMPILED = {"transformers compiled": ("sdpa", False, True), "fastplm compiled": (OURS, True, True)}

Rows = Iterator[Any]


class Late(BaseException):
    """A piece has taken too long. What turns errors into rows must let it pass."""


@dataclass(frozen=True)
class Piece:
    """What is begun or left out as a whole: its part, the seconds that it should take, its rows."""

    part: str
    name: str
    seconds: float
    rows: Callable[[], Rows]


# --- what is measured -----------------------------------------------------------------------------


class Measured:
    """The rows of this machine: each method measures some. The sizes of a CPU are tiny."""

    def __init__(self) -> None:
        import torch

        import harness
        import steps

        self.torch, self.harness, self.steps = torch, harness, steps
        self.device = harness.default_device()
        self.on_gpu = self.device.type == "cuda"
        self.red: set[str] = set()
        self.seen: set[str] = set()
        self.trainers: dict[Any, Callable[[], Any]] = {}

    def row(self, op: str, case: str, direction: str, variant: str, times: Sequence[float], **of):
        """A row of these seconds."""
        line = self.harness.machine_line()
        empty = dict.fromkeys(self.harness.COLUMNS)
        made = self.harness.Row(
            **(empty | line | dict(op=op, case=case, direction=direction, variant=variant)) | of
        )
        made.status = made.status or "ok"
        if times:
            seconds = self.torch.tensor(times, dtype=self.torch.float64)
            p20, p50, p80 = (round(1e6 * float(seconds.quantile(q)), 2) for q in (0.2, 0.5, 0.8))
            made.p20_us, made.p50_us, made.p80_us = p20, p50, p80
        return made

    def ceilings(self) -> Rows:
        copy, product = self.harness.ceilings(self.device, self.torch.bfloat16)
        for case, rate in (("copy", "gb_per_s"), ("product bf16", "gflop_per_s")):
            found = round((copy if case == "copy" else product) / 1e9, 1)
            yield self.row("ceilings", case, "forward", "torch", [], **{rate: found})

    def checks(self, op: str) -> Rows:
        """In the dtype that is timed alone; ``make test-gpu`` has the others."""
        import gpu_checks

        for label, error in gpu_checks.check_op(op, self.device, (self.torch.bfloat16,)):
            status = "ok" if error is None else f"red: {_said(error)}"
            if error is not None:
                self.red.add(op)
            yield self.row("checks", f"{op} {label}", "forward", OURS, [], status=status)
            if error is not None and _is_lost(error):
                raise error

    def checked_step(self, family: str) -> Rows:
        """Loss and gradients of a small model, by the error budget."""
        step = self.steps.Step(f"{family}-tiny", 4, 16, 0.3, bf16=True, vocab=1999)
        path, status = self.steps.Path(OURS), "ok"
        try:
            self.steps.passes(step.small, path, self.device)
        except AssertionError as error:
            self.red.add(family)
            status = f"red: {_said(error)}"
        yield self.row("checks", f"step of {family}", "training", OURS, [], status=status)

    def products(self) -> Rows:
        """The products of a layer of BERT-base at 256 x 128, forward, and of the gradients."""
        n, widths = (32768, (768, 2304, 3072)) if self.on_gpu else (64, (16, 48, 64))
        of = dict(device=self.device, dtype=self.torch.bfloat16)
        draw = functools.partial(self.torch.randn, **of)
        narrow, *wides = widths
        for first, second in ((narrow, wides[0]), (narrow, narrow), (narrow, wides[1])):
            for k, m in {(first, second), (second, first)}:
                case = self.harness.Case(
                    op="products",
                    label=f"[{n}, {k}] x [{k}, {m}] bf16",
                    make=lambda device, k=k, m=m: dict(input=draw(n, k), weight=draw(m, k)),
                    make_small=lambda device: {},
                    variants={"torch": self.torch.nn.functional.linear},
                    gated=(),
                    wrt=("input", "weight"),
                    bytes=2 * (n * k + k * m + n * m),
                    flops=2 * n * k * m,
                    training_bytes=6 * (n * k + k * m + n * m),
                    training_flops=6 * n * k * m,
                    dtype=self.torch.bfloat16,
                )
                for direction in ("forward", "backward"):
                    yield from self.harness.measure(case, direction, rounds=10)

    # --- steps of models --------------------------------------------------------------------------

    def step_of(self, family: str, batch: int, length: int, padding: float) -> Any:
        size = "small" if family == "gpt2" else "base"
        if not self.on_gpu:
            size, batch, length = "tiny", 2, 16
        vocab = None if self.on_gpu else 1999
        return self.steps.Step(f"{family}-{size}", batch, length, padding, 0.1, True, vocab)

    def label(self, step: Any) -> str:
        return f"{self.steps.case(step).label} AdamW"

    def trainer(self, step: Any, variant: str) -> Callable[[], Any]:
        """A whole step: forward, backward, the norm clipped, AdamW."""
        if (step, variant) in self.trainers:
            return self.trainers[step, variant]
        kind, room, compiled = (EAGER | COMPILED)[variant]
        model = self.steps.model(step, kind, self.device)
        batch = step.make(self.device)
        if not step.padding:  # as a compiled model would compute with a full mask
            del batch["attention_mask"]
        path = self.steps.Path(kind, room and step.padding > 0, compiled)
        optimizer = self.torch.optim.AdamW(model.parameters(), 1e-5, fused=True)

        def train() -> None:
            self.steps.backward(path, model, step, batch)
            self.torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()

        self.trainers[step, variant] = train
        return train

    def trained(self, step: Any, variants: Sequence[str], rounds: int = 3, each: int = 6) -> Rows:
        """The variants take turns of some steps, of which none waits for the one before."""
        times: dict[str, list[float]] = {}
        peaks: dict[str, int] = {}
        failed: dict[str, str] = {}
        for turn, variant in itertools.product(range(-1, rounds), variants):
            if variant in failed:
                continue
            try:
                train = self.trainer(step, variant)
                if turn < 0:  # it compiles, and its first gradients allocate
                    self.consecutive(train, 3)
                    peaks[variant] = self.harness.peak_bytes(train, self.device)
                else:
                    times.setdefault(variant, []).extend(self.consecutive(train, each))
            except Exception as error:
                if _is_lost(error):
                    raise
                failed[variant] = f"failed: {_said(error)}"
        family = step.arch.partition("-")[0]
        for variant in variants:
            made = self.row(
                family, self.label(step), "training", variant, times.get(variant, ()),
                status=failed.get(variant, "ok"),
            )  # fmt: skip
            if variant in times:
                seconds = made.p50_us / 1e6
                peak = self.harness.peak_flops(self.device, self.torch.bfloat16)
                made.gflop_per_s = round(step.flops / seconds / 1e9, 1)
                made.mfu = round(step.flops / seconds / peak, 4) if peak else None
                made.tokens_per_s = round(step.tokens / seconds)
                made.peak_mb = round(peaks[variant] / 2**20, 1)
            yield made
        if self.on_gpu and len(self.trainers) > 6:
            self.trainers.clear()
            self.torch.cuda.empty_cache()

    def consecutive(self, train: Callable[[], Any], count: int) -> list[float]:
        if not self.on_gpu:
            return [self.harness._seconds(train, self.device) for _ in range(count)]
        marks = [self.torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        self.torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            train()
            mark.record()
        self.torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]

    def kernels(self, step: Any, variant: str, results: Path) -> Rows:
        """Every kernel of a step, into profile.csv; the row has their sum."""
        import profile_kernels

        found = profile_kernels.profile(self.trainer(step, variant), self.device, calls=3)
        folder, op = results / self.harness.machine_folder(), step.arch.partition("-")[0]
        case = f"{self.label(step)}, {variant}"
        profile_kernels.write_profile(folder, op, case, "training", found, kept=None)
        total, count = sum(us for *_, us in found) / 1e6, round(sum(n for _, n, _ in found))
        case = f"{op} {self.label(step)}"
        yield self.row("kernels", case, "training", variant, [total], launches=count)

    def electra(self, results: Path) -> Rows:
        import pretrain

        setting = pretrain.Setting("electra-small", 128, 128, steps=60)
        if not self.on_gpu:
            setting = pretrain.Setting("electra-tiny", 2, 16, steps=8, vocab=1999)
        yield from pretrain.rows(setting, results)

    # --- ops --------------------------------------------------------------------------------------

    def op(self, name: str, label: str) -> Rows:
        """The case of a benchmark with this label; on a CPU its first case, and only once."""
        cases = importlib.import_module(f"test_{name}").CASES
        wanted = [case for case in cases if case.label == label and not case.full]
        if not self.on_gpu:
            wanted = cases[: int(name not in self.seen)]
            self.seen.add(name)
        elif not wanted:
            raise LookupError(f"test_{name}.py has no case {label!r}")
        for case in wanted:
            directions = case.directions
            if not case.wrt and directions == ("forward", "training"):
                directions = ("forward",)
            for direction in directions if self.on_gpu else directions[:1]:
                self.harness.SESSION.rows.clear()
                rounds = 20 if self.on_gpu else 1
                try:
                    yield from self.harness.measure(case, direction, rounds=rounds)
                except AssertionError:  # its row says what the gate refused
                    yield from self.harness.SESSION.rows


# --- the plan -------------------------------------------------------------------------------------

SHAPES = ((256, 128, 0.0), (256, 128, 0.35), (64, 512, 0.0), (64, 512, 0.35))
#: Label and seconds of the cases of an op, by part.
OPS = {
    "attention": [
        *(
            ("attention_tiles", f"{kernel} {kind}", 5.0)
            for kernel in ("stream_fwd", "stream_dq", "stream_dkdv")
            for kind in ("plain", "dropout", "bias")
        ),
        ("attention", "BERT-base 256x128 dropout 0.1", 5.0),
        ("attention", "BERT-base 64x512 dropout 0.1", 5.0),
        ("attention", "BERT-base 256x128", 5.0),
        ("attention", "BERT-base 64x512", 5.0),
        ("attention", "BERT-base 64x512 padded 30 %, ragged", 5.0),
    ],
    "fused ops": [
        ("dropout_add_layer_norm", "BERT-base 32768x768 bfloat16 p=0.1", 14.0),
        ("bias_gelu", "32768x3072 bfloat16", 12.0),
        ("dropout_add_layer_norm", "BERT-base 32768x768 bfloat16 p=0.0", 8.0),
        ("embedding_layer_norm", "32768x768 bfloat16 dropout", 6.0),
    ],
    "the rest": [
        ("linear_cross_entropy", "BERT-base N 4915", 8.0),
        ("linear_cross_entropy", "GPT-2 N 16384", 6.0),
        ("replaced_token_loss", "ELECTRA-small 128x128", 4.0),
        ("gather_rows", "BERT-base 256x128", 4.0),
        ("mask_tokens", "BERT-base 256x128", 3.0),
    ],
}
CHECK_SECONDS = {"attention": 4.0, **dict.fromkeys(CHECKED[1:], 1.0)}


def plan(of: Measured, results: Path) -> list[Piece]:
    """Every piece, in order. Nothing is imported or measured here."""
    pieces: list[Piece] = []

    def add(part: str, name: str, seconds: float, rows: Callable[..., Rows], *given: Any) -> None:
        pieces.append(Piece(part, name, seconds, lambda: rows(*given)))

    def of_shape(function: Callable[..., Rows], family: str, shape: tuple, *given: Any):
        return lambda: function(of.step_of(family, *shape), *given)

    def ops(part: str) -> None:
        for op, label, seconds in OPS[part]:
            add(part, f"{op} {label}", seconds, of.op, op, label)

    def named(shape: tuple) -> str:
        return f"{shape[0]}x{shape[1]}, {shape[2]:.0%} padding"

    add("ceilings", "copy and product", 15.0, of.ceilings)
    for op in CHECKED:
        add("checks", op, CHECK_SECONDS[op], of.checks, op)
    for family in ("bert", "electra"):
        add("checks", f"step of {family}", 4.5, of.checked_step, family)
    add("products of BERT", "a layer", 10.0, of.products)
    for shape in SHAPES:
        variants = tuple(EAGER)[: None if shape[2] else 2]
        add("BERT-base", named(shape), 22.5, of_shape(of.trained, "bert", shape, variants))
    for shape in SHAPES:
        for variant in COMPILED:
            name, rows = (
                f"{named(shape)}, {variant}",
                of_shape(of.trained, "bert", shape, (variant,)),
            )
            add("BERT-base compiled", name, 16.25, rows)
    for variant in (SDPA, OURS, *COMPILED):
        add("all kernels", variant, 5.0, of_shape(of.kernels, "bert", SHAPES[0], variant, results))
    add("ELECTRA-small", "eager and graph", 30.0, of.electra, results)
    ops("attention")
    ops("fused ops")
    ops("the rest")
    for family in ("gpt2", "t5", "bart", "albert"):
        rows = of_shape(of.trained, family, SHAPES[0], (SDPA, OURS))
        add("the rest", f"step of {family}", 5.0, rows)
    return pieces


# --- the run --------------------------------------------------------------------------------------


class Clock:
    """Seconds since the report began. ``limited`` stops what takes longer, also in a compiler."""

    def __init__(self, began: float) -> None:
        self.began = began

    def now(self) -> float:
        return time.time() - self.began

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        def late(*_: object) -> None:
            raise Late(f"cut off after {seconds:.0f} s")

        before = signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.01))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def attempt(self, piece: Piece, seconds: float, write: Callable[[Any], None]) -> str:
        """Measure a piece; returns "ok" or what went wrong."""
        try:
            with self.limited(seconds):
                for row in piece.rows():
                    write(row)
        except Late as late:
            return str(late)
        except Exception as error:  # becomes a row
            lost = "lost" if _is_lost(error) else "failed"
            return f"{lost}: {_said(error)}"
        return "ok"


class Counted(Clock):
    """A clock that measures nothing: every piece takes the seconds of the plan."""

    def __init__(self) -> None:
        self.spent = START

    def now(self) -> float:
        return self.spent

    def attempt(self, piece: Piece, seconds: float, write: Callable[[Any], None]) -> str:
        self.spent += min(piece.seconds, seconds)
        return "ok" if piece.seconds <= seconds else f"cut off after {seconds:.0f} s"


def run(
    pieces: Sequence[Piece],
    clock: Clock,
    deadline: float,
    write: Callable[[Any], None],
    said: Callable[[Piece, str, float], None],
) -> None:
    """All pieces, as this file's first lines say; ``said`` gets the outcome and the seconds."""
    end, ends = START, {}
    for piece in pieces:
        end += piece.seconds
        ends[piece.part] = end + SPARE
    waiting: list[Piece] = []

    def attempt(piece: Piece, most: float) -> None:
        began = clock.now()
        outcome = clock.attempt(piece, most, write)
        said(piece, outcome, clock.now() - began)

    for piece in pieces:
        left = min(ends[piece.part], deadline) - clock.now()
        if left < piece.seconds:
            waiting.append(piece)
        else:
            attempt(piece, min(max(left, 2 * piece.seconds), deadline - clock.now()))
    for piece in waiting:
        left = deadline - clock.now()
        if left >= piece.seconds:
            attempt(piece, left)
        else:
            said(piece, f"skipped: {left:.0f} s left for the {piece.seconds:g} s of it", 0.0)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:160]}"


def _is_lost(error: BaseException) -> bool:
    """Whether a kernel's fault makes every later call of this process on the GPU fail."""
    return "CUDA error" in str(error) and "out of memory" not in str(error)


def _append(of: Measured, results: Path, row: Any) -> None:
    """Write a row to its file, with fastplm's marked if it uses a kernel that is wrong."""
    bad = of.red.intersection((row.op, *USES.get(row.op, ())))
    if bad and row.status == "ok" and row.variant.startswith(OURS):
        row.status = f"red: the check of {', '.join(sorted(bad))}"
    of.harness.write_rows([row], results)
    time_us = "" if row.p50_us is None else f"{row.p50_us:,.1f} us"
    print(f"  {row.op} | {row.case} | {row.direction} | {row.variant} | {time_us} {row.status}")
    sys.stdout.flush()


def report(options: argparse.Namespace) -> Path:
    """Measure, and write the page; it is written too if the report is stopped."""
    of = Measured()
    more = max(options.seconds / SECONDS, 1.0)  # on a slow machine every piece has more time
    pieces = [
        replace(piece, seconds=more * piece.seconds)
        for piece in plan(of, options.results)
        if not options.only or any(name in f"{piece.part}: {piece.name}" for name in options.only)
    ]
    folder = options.results / of.harness.machine_folder()
    done = options.after  # the pieces before are measured, or waited when a fault came

    def said(piece: Piece, outcome: str, seconds: float) -> None:
        nonlocal done
        done = max(done, pieces.index(piece) + 1)
        name = f"{piece.part}: {piece.name}"
        row = of.row("report", name, "training", "", [seconds], status=outcome)
        _append(of, options.results, row)
        if outcome.startswith("lost"):
            given = [*sys.argv, "--after", str(done), "--began", str(options.began)]
            os.execv(sys.executable, [sys.executable, *given, "--red", *of.red])

    def end() -> None:
        write_page(folder)
        os._exit(1)

    clock = Clock(options.began)
    of.red |= set(options.red)
    watch = threading.Timer(options.seconds + GRACE - clock.now(), end)
    watch.daemon = True
    watch.start()
    write = functools.partial(_append, of, options.results)
    try:
        run(pieces[done:], clock, options.seconds, write, said)
    finally:
        watch.cancel()
        page = write_page(folder)
    return page


# --- the page -------------------------------------------------------------------------------------


def _cells(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def _table(head: str, lines: Sequence[str]) -> list[str]:
    return [head, "|" + "---|" * (head.count("|") - 1), *lines, ""] if lines else ["None.", ""]


def write_page(folder: Path) -> Path:
    """``folder``/report.md, from the latest rows of each case there."""
    page, rows = folder / "report.md", plots.latest_rows(folder)
    own = [row for row in rows if row["op"] not in ("report", "checks")]
    said = [row for row in rows if row["op"] == "report"]
    if not said:  # the report was stopped in its first piece
        return page
    last = max(said, key=lambda row: row["date"])
    lines = [f"# fastplm on {last['machine'].split(' (')[0]}", ""]
    lines += [f"Made by `make gpu-report` on {last['date']} from the rows beside this page.", ""]
    lines += ["## Red", ""]
    red = [row for row in rows if row["status"].startswith(("red", "refused"))]
    cells = [_cells(row["op"], row["case"], row["variant"], row["status"]) for row in red]
    lines += _table("| op | case | variant | |", cells)
    lines += ["## In short", "", *_verdicts(own), "", "## Rows", ""]
    head = "| op | case | direction | variant | µs [p20–p80] | GB/s | GFLOP/s | roofline | MFU "
    head += "| tokens/s | launches | MiB | status | machine |"
    lines += _table(head, [_line(row) for row in own])
    lines += ["## Pieces", ""]
    cells = [_cells(r["case"], float(r["p50_us"] or 0) // 1e5 / 10, r["status"]) for r in said]
    lines += _table("| piece | seconds | outcome |", cells)
    page.write_text("\n".join(lines))
    return page


def _place(row: plots.Row) -> str:
    with_versions = f"{row['machine']}, torch {row['torch']}, Triton {row['triton']}"
    return f"{with_versions}, {row['commit']}, {row['date']}"


def _line(row: plots.Row) -> str:
    times = f"{row['p50_us']} [{row['p20_us']}–{row['p80_us']}]" if row["p50_us"] else ""
    names = ("gb_per_s", "gflop_per_s", "of_roofline", "mfu", "tokens_per_s", "launches", "peak_mb")
    key = (row["op"], row["case"], row["direction"], row["variant"])
    return _cells(*key, times, *(row.get(name) or "" for name in names), row["status"], _place(row))


def _verdicts(rows: Sequence[plots.Row]) -> Iterator[str]:
    """A line for each case: our fastest variant beside the fastest other one."""
    for (op, case, direction), variants in plots.by_case(rows).items():
        ours = [row for name, row in variants.items() if name.startswith(OURS)]
        other = plots.fastest_other(variants)
        if op == "kernels" or not ours or (other is None and op != "attention_tiles"):
            continue
        best = min(ours, key=lambda row: float(row["p50_us"]))
        machine = best["machine"].split(" (")[0]
        if other is None:
            shipped = variants.get(OURS, best)
            gain = float(shipped["p50_us"]) / float(best["p50_us"])
            yield f"- {case}: {best['variant']} is the fastest, {gain:.2f}× of ours ({machine})."
            continue
        ratio = float(other["p50_us"]) / float(best["p50_us"])
        name = other["variant"].replace("transformers compiled", "compiled Transformers")
        times = f"{float(other['p50_us']):,.1f} µs beside {float(best['p50_us']):,.1f}"
        faster = f"**{name} is faster here**" if ratio < 1 else f"{ratio:.2f}× as fast as {name}"
        yield f"- {op}, {case}, {direction}, {best['variant']}: {faster}, {times} ({machine})."


# --- the command ----------------------------------------------------------------------------------


def dry(deadline: float) -> list[tuple[Piece, str, float]]:
    """The outcomes of the whole plan if each piece takes its seconds."""
    found: list[tuple[Piece, str, float]] = []
    pieces = plan(object.__new__(Measured), Path())
    run(pieces, Counted(), deadline, print, lambda *outcome: found.append(outcome))
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything")
    parser.add_argument("--dry", action="store_true", help="say what would be done")
    parser.add_argument("--only", nargs="+", default=(), help="pieces with such a text in --dry")
    parser.add_argument("--page", action="store_true", help="write the page of this machine again")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "gpu-cache")
    for name, kind, default in (("--after", int, 0), ("--began", float, time.time())):
        parser.add_argument(name, type=kind, default=default, help=argparse.SUPPRESS)
    parser.add_argument("--red", nargs="*", default=(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.results, options.cache = options.results.resolve(), options.cache.resolve()
    return options


def prepare(cache: Path) -> None:
    """Let this process use the checkout and the cache; to be called before torch is imported."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    sys.path.insert(1, str(ROOT))
    import fastplm

    # Where nothing is installed, the kernels are beside the package.
    fastplm.__path__.append(str(ROOT))


def main() -> int:
    options = parse()
    if options.dry:
        for piece, outcome, seconds in dry(options.seconds):
            print(f"{seconds:6.2f} s  {piece.part}: {piece.name}: {outcome}")
        return 0
    prepare(options.cache)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.page:
        import harness

        page = write_page(options.results / harness.machine_folder())
    else:
        page = report(options)
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
