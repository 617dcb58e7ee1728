"""A short pre-training of ELECTRA-small, step by step and as one CUDA graph: rows of gpu_report.py.

A step includes masking, generator, sampling, discriminator, backward, clipping and AdamW, in
bfloat16 by autocast with the published dropout. Both trainings start from the same weights and see
the same text of random tokens, some far more frequent than others. Their losses must be as close as
those of two trainings that differ only in dropout's bits and in bf16 or fp32; otherwise the graph
has no speed. Losses are in electra_pretraining_losses.csv, and the kernels of a step in
profile.csv. Without CUDA the plain step replaces the graph, and the rows say so.
"""

from __future__ import annotations

import csv
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import profile_kernels
import torch
from torch import Tensor

import harness
from fastplm._machine import peak_bytes
from fastplm.models.electra_joint import ElectraForJointPreTraining
from fastplm.nn import TokenMasker
from fastplm.pretrain.presets import configuration
from fastplm.run.flops import training_flops

#: Steps before the graph is captured, and steps before times count.
WARM_UP = 4
PARTS = ("mlm_loss", "rtd_loss")
PLAIN, GRAPH = "fastplm", "fastplm, CUDA graph"
MASK_TOKEN = 103
#: Ids below this one are special tokens in BERT's vocabulary.
FIRST_TOKEN = 1000


@dataclass(frozen=True)
class Setting:
    """A training's settings; for the budget of the losses ``dropout_seed`` and ``bf16`` vary."""

    arch: str
    batch: int
    seqlen: int
    steps: int
    vocab: int = 30522
    dropout: float = 0.1
    bf16: bool = True
    dropout_seed: int = 0

    def __str__(self) -> str:
        name = self.arch.replace("electra", "ELECTRA")
        return f"{name} {self.batch}x{self.seqlen} dropout {self.dropout:g} bf16 AdamW"


@dataclass
class Training:
    """A training's results: the parts of its losses [steps, 2], seconds a step, most bytes."""

    losses: Tensor
    seconds: list[float]
    peak: int
    profiled: profile_kernels.Profiled
    flops: float


class Model:
    """Model, optimizer and the current batch, which is in buffers that a graph can read."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.setting, self.device = setting, device
        torch.manual_seed(0)
        config = configuration(
            setting.arch,
            vocab_size=setting.vocab,
            block_size=setting.seqlen,
            dropout=setting.dropout,
            attention_dropout=setting.dropout,
        )
        self.model = ElectraForJointPreTraining(config).to(device).train()
        masker = TokenMasker(
            setting.vocab, MASK_TOKEN, mask_replace_prob=1.0, random_replace_prob=0.0
        )
        self.masker = masker.to(device)
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), 5e-4, weight_decay=0.01, capturable=on_gpu, fused=on_gpu
        )
        generator = torch.Generator().manual_seed(0)
        shape = (setting.steps, setting.batch, setting.seqlen)
        rare = torch.rand(shape, generator=generator) ** 4
        text = FIRST_TOKEN + (rare * (setting.vocab - FIRST_TOKEN)).long()
        self.text = text.to(device)
        self.index = torch.arange(setting.batch, device=device)
        self.ids = self.text[0].clone()
        torch.manual_seed(setting.dropout_seed)

    def load(self, step: int) -> None:
        self.ids.copy_(self.text[step])
        self.index += self.setting.batch  # the sample indices

    def step(self) -> Tensor:
        """Run one step on the current batch. Returns the parts of its loss [2]."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.setting.bf16):
            masked = self.masker(self.ids, None, self.index)
            out = self.model(
                masked.input_ids,
                labels=masked.labels,
                masked_positions=masked.positions,
                sample_index=self.index,
            )
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return torch.stack([out.mlm_loss.float(), out.rtd_loss.float()])

    def captured(self) -> Callable[[], Tensor]:
        """The step as one graph; without CUDA, which has the graphs, the plain step."""
        if self.device.type != "cuda":
            return self.step
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            out = self.step()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def flops(self) -> float:
        """The FLOPs of a step."""
        batch, length = self.ids.shape
        return float(training_flops(self.model.config, [length] * batch))


def train(setting: Setting, device: torch.device, graph: bool = False) -> Training:
    """The losses and times of all steps; with ``graph``, steps after the first few are replays."""
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    model = Model(setting, device)
    step = model.step
    losses, marks = [], []
    side = torch.cuda.Stream() if on_gpu and graph else None
    for number in range(setting.steps):
        if graph and number == WARM_UP:
            step = model.captured()
        marks.append(_mark(on_gpu))
        if side is not None and number < WARM_UP:
            # A capture asks for this: lazy allocations happen on another stream, before it.
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                model.load(number)
                losses.append(step().detach().clone())
            torch.cuda.current_stream().wait_stream(side)
        else:
            model.load(number)
            losses.append(step().detach().clone())
    marks.append(_mark(on_gpu))
    if on_gpu:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(device)
        seconds = [a.elapsed_time(b) / 1e3 for a, b in zip(marks, marks[1:], strict=False)]
    else:
        peak = peak_bytes(step, device)
        seconds = [b - a for a, b in zip(marks, marks[1:], strict=False)]
    curve = torch.stack(losses).cpu()  # copied before the profile trains further
    return Training(
        losses=curve,
        seconds=seconds[WARM_UP + 1 :],
        peak=peak,
        profiled=profile_kernels.profile(step, device, calls=3),
        flops=model.flops(),
    )


def _mark(on_gpu: bool):
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def row(setting: Setting, variant: str, training: Training | None, status: str) -> harness.Row:
    """The row of a training; without a speed if the training went wrong."""
    device = harness.default_device()
    label = str(setting)
    if device.type != "cuda" and variant == GRAPH:
        label += ", no CUDA: plain step in the graph's place"
    made = harness.Row(
        **harness.machine_line(),
        **dict(op="electra_pretraining", case=label, direction="training", variant=variant),
        **dict.fromkeys(("p20_us", "p50_us", "p80_us", "gb_per_s", "gflop_per_s", "peak_mb")),
        vs_eager=None,
        status=status,
    )
    if training is None or status != "ok":
        return made
    times = torch.tensor(training.seconds, dtype=torch.float64)
    p20, p50, p80 = (float(times.quantile(q)) for q in (0.2, 0.5, 0.8))
    made.p20_us, made.p50_us, made.p80_us = (round(1e6 * p, 2) for p in (p20, p50, p80))
    made.gflop_per_s = round(training.flops / p50 / 1e9, 2)
    made.peak_mb = round(training.peak / 2**20, 1)
    peak = harness.peak_flops(device, torch.bfloat16)
    made.mfu = round(training.flops / p50 / peak, 4) if peak else None
    made.tokens_per_s = round(setting.batch * setting.seqlen / p50, 1)
    if device.type == "cuda":
        kernels = sum(launches for _, launches, _ in training.profiled)
        made.launches = 1 if variant == GRAPH else round(kernels)
    return made


def verdict(plain: Tensor, graph: Tensor, other: Tensor) -> str:
    """ "ok" if the graph's losses are as close to the plain step's as the other training's are."""
    budget = (plain - other).abs().amax(0)
    error = (plain - graph).abs().amax(0)
    wrong = [
        f"{name} off by {error[i]:.3g}, where {budget[i]:.3g} is allowed"
        for i, name in enumerate(PARTS)
        if not error[i] <= budget[i]  # also true if the error is NaN
    ]
    return f"refused: {'; '.join(wrong)}" if wrong else "ok"


def write_losses(path: Path, setting: Setting, trainings: dict[str, Training]) -> None:
    names = (*("date", "machine", "torch", "triton", "commit"), "setting", "training", "step")
    begins = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if begins:
            writer.writerow([*names, *PARTS])
        for name, training in trainings.items():
            for step, values in enumerate(training.losses.tolist()):
                where = (*harness.machine_line().values(), str(setting), name, step)
                writer.writerow([*where, *(round(value, 5) for value in values)])


def rows(setting: Setting, results: Path) -> Iterator[harness.Row]:
    """The rows of the plain step and of the graph; writes the files of kernels and losses."""
    device, folder = harness.default_device(), results / harness.machine_folder()
    folder.mkdir(parents=True, exist_ok=True)
    trainings = {PLAIN: train(setting, device)}
    written = row(setting, PLAIN, trainings[PLAIN], "ok")
    yield written
    key = (written.op, written.case, written.direction)
    profile_kernels.write_profile(folder, *key, trainings[PLAIN].profiled)
    trainings[GRAPH] = train(setting, device, graph=True)
    # The other training differs only in dropout's bits and the precision.
    trainings["fp32, other dropout"] = train(replace(setting, bf16=False, dropout_seed=1), device)
    plain, graph, other = (training.losses for training in trainings.values())
    status = verdict(plain, graph, other)
    yield row(setting, GRAPH, trainings[GRAPH], status)
    if status == "ok":
        profile_kernels.write_profile(folder, *key, trainings[GRAPH].profiled)
    write_losses(folder / "electra_pretraining_losses.csv", setting, trainings)
