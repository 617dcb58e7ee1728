"""A training step of BERT, forward and backward, against Transformers' class of the same name.

BertForMaskedLM of BERT-base's shape with 15 % of the tokens masked, at shares of padding from none
to a half: without dropout, with the published 0.1, and in bfloat16 by autocast. All variants have
the same weights and see the same batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fastplm.models import BertForMaskedLM
from fastplm.testing import FORWARD_FACTOR, GRADIENT_FACTOR, ReversedReductions, check_error
from harness import Case, default_device

GPU = default_device().type == "cuda"
MASKED = 0.15


@dataclass(frozen=True)
class Step:
    """A batch of ``batch`` x ``seqlen`` slots of which ``padding`` are empty, on the right."""

    batch: int
    seqlen: int
    padding: float = 0.0
    dropout: float = 0.0
    bf16: bool = False
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocab: int = 30522

    def config(self) -> transformers.BertConfig:
        return transformers.BertConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
        )

    def lengths(self) -> Tensor:
        """[B], evenly spread around their mean, the longest ``seqlen`` where that is possible."""
        mean = self.seqlen * (1 - self.padding)
        spread = min(self.seqlen - mean, mean - 2)
        steps = torch.linspace(-1, 1, self.batch)
        return (mean + spread * steps).round().long()

    def make(self, device: torch.device) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        shape = (self.batch, self.seqlen)
        ids = torch.randint(1000, self.vocab, shape, generator=generator)
        mask = torch.arange(self.seqlen) < self.lengths()[:, None]
        chosen = (torch.rand(shape, generator=generator) < MASKED) & mask
        labels = ids.masked_fill(~chosen, -100)
        ids = ids.masked_fill(chosen, 103).masked_fill(~mask, 0)
        batch = {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}
        return {name: value.to(device) for name, value in batch.items()}

    @property
    def tokens(self) -> int:
        return int(self.lengths().sum())


def model(step: Step, kind: str, device: torch.device) -> nn.Module:
    """A model of a shape; those of different kinds have the same weights."""
    return _model(replace(step, batch=0, seqlen=0, padding=0.0, bf16=False), kind, device)


@functools.cache
def _model(step: Step, kind: str, device: torch.device) -> nn.Module:
    config = step.config()
    if kind == "fastplm":
        made = BertForMaskedLM(config)
        made.load_state_dict(model(step, "sdpa", device).state_dict())
    else:
        torch.manual_seed(0)
        made = transformers.BertForMaskedLM._from_config(config, attn_implementation=kind)
    return made.train().to(device)


def variant(step: Step, kind: str) -> Callable[..., Tensor]:
    def run(**batch: Tensor) -> Tensor:
        device = batch["input_ids"].device
        used = model(step, kind.removeprefix("compiled "), device)
        used.zero_grad(set_to_none=True)
        with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, enabled=step.bf16):
            loss = (compiled(used) if kind.startswith("compiled ") else used)(**batch).loss
            loss.backward()
        return loss.detach()

    run.kind = kind
    return run


@functools.cache
def compiled(used: nn.Module) -> Callable:
    return torch.compile(used)


def gate(candidate: Callable, eager: Callable, inputs: dict[str, Any]) -> None:
    """Loss and every gradient of a small model, without dropout, within PyTorch's own error."""
    small = Step(batch=4, seqlen=16, padding=0.3, layers=2, width=32, heads=2, vocab=1999)
    device = inputs["input_ids"].device
    batch = small.make(device)

    def results(used: nn.Module) -> dict[str, Tensor]:
        used.zero_grad()
        loss = used(**batch).loss
        loss.backward()
        grads = {name: p.grad.clone() for name, p in used.named_parameters()}
        return {"loss": loss.detach(), **grads}

    parents = [model(small, kind, device) for kind in ("eager", "sdpa")]
    gold = results(copy.deepcopy(parents[0]).double())
    bases = [results(parent) for parent in parents]
    with ReversedReductions():
        bases += [results(parent) for parent in parents]
    out = results(model(small, candidate.kind.removeprefix("compiled "), device))
    siblings = [value for name, value in gold.items() if name != "loss"]
    for name, value in out.items():
        factor, related = (FORWARD_FACTOR, ()) if name == "loss" else (GRADIENT_FACTOR, siblings)
        check_error(name, value, gold[name], [base[name] for base in bases], factor, related)


def case(step: Step) -> Case:
    kinds = {"eager": "eager", "transformers sdpa": "sdpa", "fastplm": "fastplm"}
    if GPU:
        kinds["transformers compiled"] = "compiled sdpa"
    encoder = 12 * step.width**2 * step.layers
    head = step.width**2 + step.vocab * step.width
    # What the task needs: the tokens through the layers, the masked ones through the head.
    needed = step.tokens * encoder + round(MASKED * step.tokens) * head
    precision = "bf16" if step.bf16 else "fp32"
    name = "base" if step.width == 768 else "large"
    label = (
        f"{name} {step.batch}x{step.seqlen} padding {step.padding:.0%} "
        f"dropout {step.dropout:g} {precision}"
    )
    return Case(
        op="bert",
        label=label,
        make=step.make,
        make_small=lambda device: Step(4, 16, vocab=1999).make(device),
        variants={name: variant(step, kind) for name, kind in kinds.items()},
        gate=gate,
        directions=("training",),
        training_flops=6 * needed,
        rounds=None if GPU else 5,
    )


if GPU:
    CASES = [
        case(Step(batch, seqlen, padding, 0.1, True, *size))
        for size in ((12, 768, 12), (24, 1024, 16))
        for batch, seqlen in ((256, 128), (64, 512))
        for padding in (0.0, 0.3, 0.5)
    ]
else:
    CASES = [
        case(Step(8, 128, padding, dropout, bf16))
        for dropout, bf16 in ((0.0, True), (0.1, True), (0.0, False))
        for padding in (0.0, 0.3, 0.5)
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_bert(case, bench):
    bench(case, "training")
