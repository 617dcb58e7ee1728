"""Several processes: what they send, how long a step takes, and arithmetic for many GPUs.

    python benchmarks/scale.py measure --corpus FILE [--arch bert-mini] [--rounds 3]
    python benchmarks/scale.py simulate
    python benchmarks/scale.py model
    python benchmarks/scale.py page

Each of the first three writes its rows to ``benchmarks/results/scale/``, and the last one the
tables of docs/scale.md from these.

- ``measure`` runs steps of one and of two processes, each with one thread, by the training loop of
  ``fastplm pretrain``: alone, by DDP, and by FSDP2. The settings take turns, so that other load
  slows all of them. What a process sends is what it writes (Linux counts it, over Gloo's sockets).
- ``simulate`` runs a step of one of 2, 8 or 64 processes whose other ones are not there (PyTorch's
  fake process group): the numbers are wrong, the calls and their sizes are right.
- ``model`` computes the step of GPUs from a predicted step of one and the bytes that they send.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness import append_row, machine_line

RESULTS = Path(__file__).parent / "results" / "scale"
PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
_STEPS = Path(__file__).parent / "results" / "static" / "steps.csv"
#: (processes, samples of each, whether it is sharded) by the name of a setting.
SETTINGS = {
    "1 process": (1, 1.0, False),
    "1 process, twice the batch": (1, 2.0, False),
    "DDP": (2, 1.0, False),
    "DDP, half the batch each": (2, 0.5, False),
    "FSDP2": (2, 1.0, True),
    "FSDP2, half the batch each": (2, 0.5, True),
}
#: Bytes of a weight and of its gradient: fp32, as bf16 is autocast.
_SIZE = 4
_WARM_UP, _TIMED = 3, 10
MEASURED = (
    *("date", "machine", "torch", "triton", "commit", "arch", "samples", "setting"),
    *("processes", "parameters", "step_ms", "loss", "sent", "model_sent"),
)
SIMULATED = ("arch", "way", "processes", "parameters", "calls", "sent", "model_sent")
MODEL = (
    *("arch", "network", "way", "gpus", "samples", "batch", "mb_sent"),
    *("compute_ms", "step_ms", "efficiency"),
)


# --- bytes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The numbers of weights of a model, as FSDP2 groups them: each layer, and all around them."""

    root: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        from fastplm.run.fsdp import layers_of

        kinds = layers_of(model)
        layers = tuple(
            sum(weight.numel() for weight in module.parameters())
            for module in model.modules()
            if type(module).__name__.removeprefix("FSDP") in kinds
        )
        return cls(sum(weight.numel() for weight in model.parameters()) - sum(layers), layers)

    @property
    def all(self) -> int:
        return self.root + sum(self.layers)


def sent_by_ddp(weights: Weights, n: int, size: int = _SIZE) -> float:
    """Bytes that each of n processes sends in a step: one all-reduce of all gradients, by a ring.

    ``2 (n - 1) / n`` times the bytes of the gradients.
    """
    return 2 * (n - 1) / n * size * weights.all


def sent_by_fsdp(weights: Weights, n: int, size: int = _SIZE, *, scatter: float = 1) -> float:
    """The same with a sharded model: layers are gathered twice, the rest once, all is scattered.

    Args:
        scatter: what a reduce-scatter sends, as a multiple of that of a ring: Gloo has none, and
            PyTorch makes one of its all-reduce, which sends twice as much.
    """
    gathered = weights.root + 2 * sum(weights.layers)
    return (n - 1) / n * size * (gathered + scatter * weights.all)


# --- measured -------------------------------------------------------------------------------------


def child(given: dict[str, Any]) -> None:
    """Take steps; the first process prints what they took."""
    from transformers import TrainerCallback

    from fastplm.data._folder import first_process
    from fastplm.pretrain.run import build, read
    from fastplm.pretrain.settings import PretrainArguments
    from fastplm.pretrain.stream import training_settings
    from fastplm.run.trainer import Progress

    torch.set_num_threads(1)
    ends: list[tuple[float, int]] = []

    class Counter(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            ends.append((time.perf_counter(), _written()))
            control.should_training_stop = len(ends) > _WARM_UP + _TIMED

    with tempfile.TemporaryDirectory() as folder:
        plan = PretrainArguments(
            **{**given["options"], "out": folder, "lr": 1e-3, "precision": "fp32", "threads": 1},
            **{"steps": 10_000, "report_to": "none", "save_every": 1 << 40, "log_every": 10_000},
        ).plan()
        settings = training_settings(plan)
        plan, data = read(plan, settings, None)
        trainer = build(plan, settings, data, Counter()).trainer
        trainer.remove_callback(Progress)
        weights = Weights.of(trainer.model)
        # Each process has its share of the loss.
        loss = torch.tensor([trainer.train().training_loss])
        loss = trainer.accelerator.gather(loss).mean().item()
        taken = ends[_WARM_UP:]
        pairs = list(zip(taken, taken[1:], strict=False))
        sent = torch.tensor([float(statistics.median(b[1] - a[1] for a, b in pairs))])
        sent = trainer.accelerator.gather(sent).max().item()
    if first_process():
        milliseconds = 1e3 * statistics.median(b[0] - a[0] for a, b in pairs)
        print(json.dumps([milliseconds, loss, sent, weights.root, weights.layers]))


def _written() -> int:
    """The bytes that this process has written, to files and sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


def _run(processes: int, given: dict[str, Any]) -> Any:
    words = [sys.executable, __file__, "child", json.dumps(given)]
    if processes > 1:
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
        words[1:1] = launcher
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of all settings."""
    found: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(args.rounds):
            for name, (processes, share, fsdp) in SETTINGS.items():
                options = {
                    **{"arch": args.arch, "corpus": [args.corpus], "cache": cache, "fsdp": fsdp},
                    **{"batch_size": round(args.samples * share), "block_size": args.block_size},
                    **{"vocab_size": args.vocab_size, "objective": args.objective},
                }
                taken = _run(processes, {"options": options})
                found.setdefault(name, []).append(taken)
                print(f"{name}: {taken[0]:.1f} ms, {taken[2] / 1e6:.3f} MB", file=sys.stderr)
    for name, runs in found.items():
        processes, share, fsdp = SETTINGS[name]
        _, loss, sent, root, layers = runs[0]
        weights, way = Weights(root, tuple(layers)), sent_by_fsdp if fsdp else sent_by_ddp
        yield {
            **machine_line(),
            **{"arch": args.arch, "samples": f"{round(args.samples * share)}x{args.block_size}"},
            **{"setting": name, "processes": processes, "parameters": weights.all},
            "step_ms": f"{statistics.median(run[0] for run in runs):.1f}",
            "loss": f"{loss:.6f}",
            "sent": round(sent),
            "model_sent": round(way(weights, processes, **({"scatter": 2} if fsdp else {}))),
        }


# --- simulated ------------------------------------------------------------------------------------


def _on_meta(arch: str) -> nn.Module:
    """A model of a preset without values, as its objective trains it."""
    from fastplm import models
    from fastplm.pretrain.presets import configuration

    kind = "ElectraForJointPreTraining" if arch.startswith("electra") else "BertForPreTraining"
    with torch.device("meta"):
        return getattr(models, kind)(configuration(arch, vocab_size=VOCABULARY))


def simulate(arch: str, n: int) -> Iterator[dict[str, Any]]:
    """The calls of one of n processes in a step, and what they send by a ring."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    from fastplm.models import BertForPreTraining
    from fastplm.pretrain.presets import configuration
    from fastplm.run.fsdp import layers_of

    calls: list[float] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore
            if function.namespace == "c10d":  # the larger tensor is the whole one
                tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
                whole = max(tensor.numel() * tensor.element_size() for tensor in tensors)
                calls.append((n - 1) / n * whole)
            return function(*args, **(kwargs or {}))

    def reduced(state: Any, bucket: Any) -> Any:
        calls.append(2 * (n - 1) / n * bucket.buffer().nbytes)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # DDP looks at them, and reads no text.
    types = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    reduced.__annotations__ = types

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        for way in ("DDP", "FSDP2"):
            model = BertForPreTraining(configuration(arch, vocab_size=VOCABULARY))
            wrapped: Any = model
            weights, kinds = Weights.of(model), layers_of(model)
            if way == "DDP":
                wrapped = DistributedDataParallel(model, broadcast_buffers=False)
                wrapped.register_comm_hook(None, reduced)
            else:
                for module in list(model.modules()):
                    if type(module).__name__ in kinds:
                        fully_shard(module)
                fully_shard(model)
            ids = torch.randint(5, 1000, (1, 8))
            for _ in range(2):  # DDP makes its buckets anew after a first step
                calls.clear()
                with Calls():
                    labels = {"labels": ids, "next_sentence_label": ids[:, 0] % 2}
                    wrapped(input_ids=ids, **labels).loss.backward()
            expected = (sent_by_ddp if way == "DDP" else sent_by_fsdp)(weights, n)
            yield {
                **{"arch": arch, "way": way, "processes": n, "parameters": weights.all},
                **{"calls": len(calls), "sent": round(sum(calls)), "model_sent": round(expected)},
            }
    finally:
        dist.destroy_process_group()


# --- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """What connects GPUs.

    Args:
        between: bytes a second that a node sends to others, by all of its adapters.
        inside: bytes a second that a GPU sends in its node: NVLink 4 has 900 GB/s, half each way.
        node: GPUs of a node.
        hop, hop_inside: seconds that a message takes to the next node, and to the next GPU.
        reached: the share of these rates that collectives reach.
    """

    between: float
    inside: float = 450e9
    node: int = 8
    hop: float = 5e-6
    hop_inside: float = 2e-6
    reached: float = 0.8

    def _rate(self, n: int) -> float:
        return self.reached * (self.inside if n <= self.node else min(self.inside, self.between))

    def all_reduce(self, size: float, n: int) -> float:
        """Seconds: bytes by rings, one an adapter; the wait of a ring in a node, a tree above."""
        inside = 2 * (min(n, self.node) - 1) * self.hop_inside
        above = 2 * math.ceil(math.log2(max(1, n / self.node))) * self.hop
        return 2 * (n - 1) / n * size / self._rate(n) + inside + above

    def gather(self, size: float, n: int) -> float:
        """Seconds of an all-gather, and of a reduce-scatter: a ring through all GPUs."""
        nodes = math.ceil(n / self.node)
        wait = (nodes - 1) * self.hop + (n - nodes) * self.hop_inside
        return (n - 1) / n * size / self._rate(n) + wait


NETWORKS = {
    "8 x 400 Gb/s": Network(between=8 * 50e9),  # InfiniBand NDR, an adapter each GPU
    "100 Gb/s": Network(between=12.5e9),  # one Ethernet adapter each node
}
#: An H100 needs so much longer than the model of a step says (docs/step-model.md).
_OF_DEVICE = 0.81
WAYS = ("DDP", "FSDP2")
_BUCKET = 25 * 2**20
GPUS = (8, 64, 1000)
#: Of BERT and ELECTRA.
VOCABULARY = 30_522
#: Samples of 128 tokens that one micro-batch has, as in the predicted steps.
SAMPLES = 256
#: (architecture, the batch of all GPUs; None: 256 samples each).
CASES = (
    ("bert-base", None),
    ("bert-large", None),
    ("electra-small", None),
    ("bert-large", 32_768),
)


@dataclass(frozen=True)
class Step:
    """A step of 256 samples on one GPU, in seconds."""

    forward: float
    backward: float
    optimizer: float

    @classmethod
    def predicted(cls, arch: str) -> Step:
        with _STEPS.open() as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if (row["arch"], row["shape"], row["padding"], row["variant"])
                == (arch, f"{SAMPLES}x128", "0", "fastplm")
            ]
        parts = (float(rows[-1][f"ms_{part}"]) for part in ("forward", "backward", "optimizer"))
        return cls(*(part / 1e3 / _OF_DEVICE for part in parts))


def step_of(
    step: Step, weights: Weights, network: Network, way: str, n: int, samples: float
) -> tuple[float, float]:
    """Seconds of a step of n GPUs: (what each computes, the whole step).

    More than 256 samples are micro-batches, whose last one alone sends gradients; fewer samples
    take as much less time.
    """
    batches = max(1, math.ceil(samples / SAMPLES))
    share = samples / SAMPLES / batches
    forward, backward = share * step.forward, share * step.backward
    optimizer = step.optimizer / (n if way == "FSDP2" else 1)
    compute = batches * (forward + backward) + optimizer
    if way == "DDP":
        before, last = forward + backward, _by_ddp(forward, backward, weights, network, n)
    else:  # each micro-batch gathers the weights
        before, last = (
            _by_fsdp(forward, backward, weights, network, n, reduces=reduces)
            for reduces in (False, True)
        )
    return compute, (batches - 1) * before + last + optimizer


def _by_ddp(forward: float, backward: float, weights: Weights, network: Network, n: int) -> float:
    """Buckets of the layers are reduced while the backward goes on.

    The embeddings come last, when nothing is left to compute: their lookup is the first of the
    forward, and their weight is also that of the head.
    """
    layers, size = sum(weights.layers), _SIZE
    count = max(1, math.ceil(size * layers / _BUCKET))
    wire = 0.0
    for i in range(1, count + 1):
        ready = forward + backward * i / count
        wire = max(wire, ready) + network.all_reduce(size * layers / count, n)
    wire = max(wire, forward + backward)
    return wire + network.all_reduce(size * weights.root, n)


def _by_fsdp(
    forward: float,
    backward: float,
    weights: Weights,
    network: Network,
    n: int,
    *,
    reduces: bool,
) -> float:
    """A layer is gathered while the one before it computes, and reduced while the next does."""
    size, layers = _SIZE, weights.layers
    wire = now = network.gather(size * weights.root, n)
    for layer in layers:
        wire += network.gather(size * layer, n)
        now = max(now, wire) + forward / max(1, len(layers))
    now += 0 if layers else forward
    wire, ready = now, None
    for layer in reversed(layers):
        gathered = wire = wire + network.gather(size * layer, n)
        if ready and reduces:  # what was computed before is reduced behind this gathering
            wire = max(wire, ready[0]) + network.gather(size * ready[1], n)
        now = max(now, gathered) + backward / len(layers)
        ready = (now, layer)
    now += 0 if layers else backward
    if not reduces:
        return now
    if ready:
        wire = max(wire, ready[0]) + network.gather(size * ready[1], n)
    return max(wire, now) + network.gather(size * weights.root, n)


def model_rows() -> Iterator[dict[str, Any]]:
    """The predicted steps of all cases."""
    for arch, batch in CASES:
        weights, step = Weights.of(_on_meta(arch)), Step.predicted(arch)
        for name, network in NETWORKS.items():
            for way in WAYS:
                for n in GPUS:
                    samples = SAMPLES if batch is None else batch / n
                    compute, taken = step_of(step, weights, network, way, n, samples)
                    # One GPU computes all samples, and updates its weights once.
                    alone = n * samples / SAMPLES * (step.forward + step.backward)
                    sent = (sent_by_ddp if way == "DDP" else sent_by_fsdp)(weights, n)
                    yield {
                        **{"arch": arch, "network": name, "way": way, "gpus": n},
                        **{"samples": f"{samples:.0f}", "batch": round(n * samples)},
                        **{"mb_sent": f"{sent / 1e6:.0f}", "compute_ms": f"{1e3 * compute:.1f}"},
                        "step_ms": f"{1e3 * taken:.1f}",
                        "efficiency": f"{(alone + step.optimizer) / (n * taken):.3f}",
                    }


# --- the tables of docs/scale.md ------------------------------------------------------------------


def _read(name: str) -> list[dict[str, str]]:
    with (RESULTS / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mb(text: str) -> str:
    return f"{int(text) / 1e6:.2f}"


def tables() -> dict[str, str]:
    """The tables, by the names of their places in the page."""
    measured = _read("measured")
    last = {(row["arch"], row["setting"]): row for row in measured}  # the latest of a case counts
    keys = ("arch", "network", "way", "gpus", "batch")
    by_case = {tuple(row[key] for key in keys): row for row in _read("model")}
    head = ["", *(f"{n:,} GPUs" for n in GPUS)]
    lines: list[list[str]] = []
    for arch, batch in CASES:
        for network in NETWORKS:
            for way in WAYS:
                found = [
                    by_case[arch, network, way, str(n), str(batch or n * SAMPLES)] for n in GPUS
                ]
                cells = [f"{float(r['efficiency']):.0%} ({r['step_ms']} ms)" for r in found]
                of_all = f", {batch:,} samples in all" if batch else ""
                lines.append([f"{arch}{of_all}; {network}; {way}", *cells])
    return {
        "measured": _table(
            ["", "samples of a process", "ms a step", "MB sent", "MB by the model", "mean loss"],
            (
                [
                    *(f"{row['arch']}, {row['setting']}", row["samples"], row["step_ms"]),
                    *(_mb(row["sent"]), _mb(row["model_sent"]), row["loss"]),
                ]
                for row in last.values()
            ),
        ),
        "simulated": _table(
            ["", "processes", "calls", "MB sent", "MB by the model"],
            (
                [
                    *(f"{row['arch']}, {row['way']}", row["processes"], row["calls"]),
                    *(_mb(row["sent"]), _mb(row["model_sent"])),
                ]
                for row in _read("simulated")
            ),
        ),
        "model": _table(head, lines),
    }


def written(page: str) -> str:
    """The page with its tables as the rows have them."""
    for name, table in tables().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"
    return page


def _write(name: str, columns: Iterable[str], rows: Iterable[dict[str, Any]]) -> None:
    """Write a file of rows anew, as they follow from the code alone."""
    path, columns = RESULTS / f"{name}.csv", list(columns)
    path.unlink(missing_ok=True)
    for row in rows:
        append_row(path, columns, row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("measure", "simulate", "model", "page", "child"))
    parser.add_argument("given", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--corpus", default="embedded", help="text to train on")
    parser.add_argument("--arch", default="bert-mini")
    parser.add_argument("--objective", default="mlm")
    parser.add_argument("--samples", type=int, default=16, help="of a process")
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.what == "child":
        child(json.loads(args.given))
    elif args.what == "measure":
        for row in measure(args):
            append_row(RESULTS / "measured.csv", MEASURED, row)
    elif args.what == "simulate":
        rows = (row for n in (2, 8, 64) for row in simulate("bert-tiny", n))
        _write("simulated", SIMULATED, rows)
    elif args.what == "model":
        _write("model", MODEL, model_rows())
    else:
        PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
