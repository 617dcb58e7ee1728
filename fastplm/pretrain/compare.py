"""The fused path against Hugging Face's own, on the same batches with the same weights."""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastplm._machine import peak_bytes

Batch = dict[str, Tensor]
Step = Callable[[Batch], Tensor]

# Arguments of our models alone.
_OURS = ("masked_positions", "sample_index")


@dataclass(frozen=True)
class Row:
    """One path of the comparison."""

    name: str
    #: The mean over the batches, and its difference from that of the first path.
    loss: float
    difference: float
    #: The median time of forward and backward of one batch.
    milliseconds: float
    #: The most memory that PyTorch's allocator held at once in such a step, beyond what it held
    #: before (weights, the batch). Scratch space inside libraries is not counted.
    peak_bytes: int


def compare(
    model: nn.Module,
    batches: Sequence[Batch],
    *,
    bf16: bool,
    rounds: int = 5,
    time_limit: float = math.inf,
) -> list[Row]:
    """Measure a model of fastplm and its Hugging Face twins, with eager and SDPA attention.

    The twins get the weights by state dict and, for ELECTRA, the replacements that ours sampled, so
    that all compute the same loss; they do not spend the time of sampling. Steps of the
    paths are interleaved batch by batch.

    Args:
        model: ``BertForMaskedLM``, ``BertForPreTraining`` or ``ElectraForJointPreTraining``; it
            is left in evaluation mode, as dropout would make the losses differ by chance.
        batches: of ``DataCollatorForMaskedTokens``.
        bf16: run under autocast to bfloat16.
        rounds: times that each path sees every batch, after one that does not count.
        time_limit: seconds after which no further round may end; there is one at least.

    Returns:
        One row a path, ours first.
    """
    device = next(model.parameters()).device
    model.eval()
    batches = [{name: value.to(device) for name, value in batch.items()} for batch in batches]
    paths: dict[str, tuple[nn.Module, Step]] = {
        "fastplm": (model, lambda batch: model(**batch)["loss"])
    }
    for attention in ("eager", "sdpa"):
        twin, step = hugging_face_twin(model, attention)
        paths[f"Hugging Face, {attention}"] = twin, step
    inputs = {name: batches for name in paths}
    if hasattr(model, "discriminator"):
        twins = [_with_replacements(model, batch, bf16) for batch in batches]
        inputs = {name: batches if name == "fastplm" else twins for name in paths}

    losses: dict[str, list[float]] = {name: [] for name in paths}
    seconds: dict[str, list[float]] = {name: [] for name in paths}
    start = time.perf_counter()
    for turn in range(rounds + 1):
        if turn > 1 and (time.perf_counter() - start) * (turn + 1) / turn > time_limit:
            break
        for index in range(len(batches)):
            for name, (module, step) in paths.items():
                began = time.perf_counter()
                loss = _forward_backward(module, step, inputs[name][index], bf16)
                if turn == 0:
                    losses[name].append(loss)
                else:
                    seconds[name].append(time.perf_counter() - began)
    rows = []
    for name, (module, step) in paths.items():
        mean, first = (statistics.fmean(losses[each]) for each in (name, "fastplm"))
        peak = _peak_bytes(module, step, inputs[name][0], bf16)
        rows.append(Row(name, mean, mean - first, 1000 * statistics.median(seconds[name]), peak))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with each path's time and memory as a multiple of ours."""
    ours = rows[0]
    head = ("path", "loss", "difference", "ms/step", "", "peak MiB", "")
    lines = [
        (
            row.name,
            f"{row.loss:.5f}",
            f"{row.difference:+.1e}" if row is not ours else "",
            f"{row.milliseconds:.1f}",
            f"{row.milliseconds / ours.milliseconds:.2f}x",
            f"{row.peak_bytes / 2**20:.1f}",
            f"{row.peak_bytes / max(ours.peak_bytes, 1):.2f}x",
        )
        for row in rows
    ]
    first, *others = (max(map(len, column)) for column in zip(head, *lines, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(form.format(*line) for line in (head, *lines))


def hugging_face_twin(model: Any, attention: str) -> tuple[nn.Module, Step]:
    """Transformers' own model with the weights of ours, and its loss on a batch.

    Args:
        model: a model of fastplm that pre-trains.
        attention: the ``attn_implementation`` of the twin.
    """
    if not hasattr(model, "discriminator"):
        twin = _plain_copy(model, attention)
        return twin, lambda batch: twin(**_without(batch, _OURS)).loss

    generator: Any = _plain_copy(model.generator, attention)
    discriminator: Any = _plain_copy(model.discriminator, attention)
    for name in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        setattr(generator.electra.embeddings, name, getattr(discriminator.electra.embeddings, name))
    generator.generator_lm_head.weight = discriminator.electra.embeddings.word_embeddings.weight
    weight = model.config.discriminator_weight

    def step(batch: Batch) -> Tensor:
        batch = _without(batch, _OURS)
        replaced_ids = batch.pop("replaced_ids")
        labels = batch.pop("labels")
        originals = torch.where(labels == -100, batch["input_ids"], labels)
        mlm_loss = generator(**batch, labels=labels).loss
        batch["input_ids"] = replaced_ids
        replaced = (replaced_ids != originals).long()
        return mlm_loss + weight * discriminator(**batch, labels=replaced).loss

    return nn.ModuleList([generator, discriminator]), step


def _plain_copy(model: nn.Module, attention: str) -> nn.Module:
    import transformers

    plain = getattr(transformers, type(model).__name__)
    config = copy.deepcopy(model.config)
    parameter = next(model.parameters())
    twin = plain._from_config(config, attn_implementation=attention)
    twin.to(parameter.device, parameter.dtype).load_state_dict(model.state_dict())
    return twin.eval()


def _without(batch: Batch, names: Sequence[str]) -> Batch:
    return {name: value for name, value in batch.items() if name not in names}


@torch.no_grad()
def _with_replacements(model: nn.Module, batch: Batch, bf16: bool) -> Batch:
    with _autocast(model, bf16):
        return {**batch, "replaced_ids": model(**batch, output_replaced_ids=True)["replaced_ids"]}


def _autocast(module: nn.Module, bf16: bool) -> torch.autocast:
    device = next(module.parameters()).device
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def _forward_backward(module: nn.Module, step: Step, batch: Batch, bf16: bool) -> float:
    module.zero_grad(set_to_none=True)
    with _autocast(module, bf16):
        loss = step(batch)
    loss.backward()
    return loss.item()


def _peak_bytes(module: nn.Module, step: Step, batch: Batch, bf16: bool) -> int:
    module.zero_grad(set_to_none=True)
    device = next(module.parameters()).device
    return peak_bytes(lambda: _forward_backward(module, step, batch, bf16), device)
