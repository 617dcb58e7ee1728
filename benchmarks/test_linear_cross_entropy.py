"""ops.linear_cross_entropy, with and without samples, against its eager reference, PyTorch's fused
loss, the full logits of a Hugging Face model, and the libraries.

Some rows of a case have no target, as 85 % of the tokens of a masked language model: they are for
the variants that see all tokens.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastplm import ops
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref, sample_ref
from fastplm.testing import assert_within_budget
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
#: Bytes of kept logits: whatever they take, and none.
FLOWS = {"fastplm, logits kept": 1 << 40, "fastplm, recomputed": 0}

if GPU:  # every case compiles the same functions for shapes of its own
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024


@dataclass(frozen=True)
class Shape:
    """A call; ``ignored`` is the share of its rows without a target."""

    rows: int
    vocab: int
    width: int
    ignored: float = 0.0
    bias: bool = True
    sampled: bool = False

    @property
    def counted(self) -> int:
        return self.rows - round(self.rows * self.ignored)

    @property
    def learned(self) -> tuple[str, ...]:
        return ("input", "linear_weight", "linear_bias")[: 3 if self.bias else 2]

    def make(self, device: torch.device) -> dict[str, Any]:
        def draw(*shape):
            return torch.randn(shape, device=device, dtype=DTYPE)

        target = torch.randint(0, self.vocab, (self.rows,), device=device)
        target[torch.randperm(self.rows, device=device)[self.counted :]] = -100
        made = dict(
            input=draw(self.rows, self.width),
            linear_weight=draw(self.vocab, self.width) * self.width**-0.5,
            target=target,
        )
        if self.bias:
            made["linear_bias"] = draw(self.vocab)
        if self.sampled:  # as a training step passes it
            made["seed"] = torch.zeros((), dtype=torch.int64, device=device)
        return made

    def make_small(self, device: torch.device) -> dict[str, Any]:
        """The same call, small enough for fp64, and of logits that are exact if it is sampled."""
        torch.manual_seed(0)
        small = replace(self, rows=min(self.rows, 65), vocab=min(self.vocab, 999))
        made = small.make(device)
        if self.sampled:
            made["input"] = made["input"].sign()
            for name in self.learned[1:]:
                made[name] = made[name].mul(8).round().div(8)
        return made


# --- what is compared -----------------------------------------------------------------------------


def fastplm(shape: Shape, **options):
    if not shape.sampled:
        return functools.partial(ops.linear_cross_entropy, **options)
    return functools.partial(ops.linear_cross_entropy_with_sample, **options)


def reference(shape: Shape):
    def with_sample(seed, **inputs):
        return linear_cross_entropy_ref(**inputs), sample_ref(**inputs, seed=seed)

    return with_sample if shape.sampled else linear_cross_entropy_ref


def full_logits(shape: Shape):
    """What ``transformers.BertForMaskedLM`` does, and a hand-written ELECTRA with its logits."""

    def run(input, linear_weight, target, linear_bias=None, seed=None):
        logits = F.linear(input, linear_weight, linear_bias)
        loss = F.cross_entropy(logits, target)
        if not shape.sampled:
            return loss
        with torch.no_grad():
            return loss, torch.multinomial(logits.float().softmax(1), 1).squeeze(1)

    return run


def rows_that_count(function):
    """Select the rows first, as a hand-written head does: it waits for the device to count them."""

    def run(input, linear_weight, target, **rest):
        counts = (target != -100).nonzero().squeeze(1)
        return function(
            input=input[counts], linear_weight=linear_weight, target=target[counts], **rest
        )

    return run


def without_sample(function):
    def run(seed, **inputs):
        return function(**inputs)

    return run


def loss_of(function):
    """A sampled call returns a pair, of which the loss alone has a gradient."""

    def run(**inputs):
        out = function(**inputs)
        return out[0] if isinstance(out, tuple) else out

    run.whole = function
    return run


def pytorch() -> Iterator[tuple[str, Callable[..., Tensor]]]:
    if hasattr(F, "linear_cross_entropy"):
        yield "torch", F.linear_cross_entropy
        options = torch.nn.LinearCrossEntropyOptions()
        yield "torch chunked", functools.partial(F.linear_cross_entropy, options=options)


def libraries(shape: Shape) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Those that are installed; all are for GPUs."""
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        yield (
            "liger",
            lambda input, linear_weight, target, linear_bias=None: liger(
                input, linear_weight, target, bias=linear_bias
            ),
        )
    if importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy as cut

        def cut_cross_entropy(input, linear_weight, target, linear_bias=None, **options):
            return cut(input, linear_weight, target, bias=linear_bias, **options)

        yield "cut-cross-entropy", cut_cross_entropy
        exact = functools.partial(cut_cross_entropy, filter_eps=None)
        yield "cut-cross-entropy, unfiltered", exact
    if importlib.util.find_spec("quack"):
        from quack.linear_cross_entropy import (
            chunked_linear_cross_entropy,
            linear_cross_entropy_func,
        )

        yield (
            "quack",
            lambda input, linear_weight, target, linear_bias=None: linear_cross_entropy_func(
                input, linear_weight, linear_bias, target
            ),
        )
        # Its chunked loss takes no bias.
        label = "quack chunked, no bias" if shape.bias else "quack chunked"
        yield (
            label,
            lambda input, linear_weight, target, linear_bias=None: chunked_linear_cross_entropy(
                input, linear_weight, target
            ),
        )


def variants(shape: Shape) -> dict[str, Callable[..., Any]]:
    found = {"eager": reference(shape), "fastplm": fastplm(shape)}
    found |= {name: fastplm(shape, logits_budget=budget) for name, budget in FLOWS.items()}
    logits = "full logits, multinomial" if shape.sampled else "full logits"
    found[logits] = full_logits(shape)
    if shape.sampled:
        found["fastplm, no sample"] = without_sample(ops.linear_cross_entropy)
    else:
        found |= dict(pytorch())
    if GPU and not shape.sampled:
        found |= dict(libraries(shape))
    if GPU:
        found["compiled"] = torch.compile(reference(shape))
        found[f"compiled {logits}"] = torch.compile(full_logits(shape))
    if shape.ignored:
        found["eager on rows that count"] = rows_that_count(reference(shape))
        found[f"{logits} on rows that count"] = rows_that_count(full_logits(shape))
        if GPU:
            compiled = torch.compile(reference(shape), dynamic=True)
            found["compiled on rows that count"] = rows_that_count(compiled)
    return {name: loss_of(function) for name, function in found.items()} if shape.sampled else found


def gate_with_sample(candidate, eager, inputs):
    """Loss and gradients by the budget; the samples of exact logits are those of the reference."""
    wrt = tuple(name for name, value in inputs.items() if value.is_floating_point())
    assert_within_budget(candidate, eager, inputs, wrt=wrt)
    (_, sample), (_, expected) = candidate.whole(**inputs), eager.whole(**inputs)
    assert torch.equal(sample, expected), "other samples than those of the reference"


# --- cases ----------------------------------------------------------------------------------------


def case(label: str, shape: Shape, floor: float | None = None, must: float | None = None) -> Case:
    """``floor`` and ``must`` are microseconds of forward and backward together on an H200."""
    size = DTYPE.itemsize
    parameters = size * (shape.vocab * shape.width + shape.vocab * shape.bias)
    rows = size * shape.counted * shape.width + 8 * shape.rows
    moved = rows + parameters
    # What the task needs: of the rows that count, one product forward and two more backward.
    product = 2 * shape.counted * shape.vocab * shape.width
    return Case(
        op="linear_cross_entropy",
        label=label,
        make=shape.make,
        make_small=shape.make_small,
        variants=variants(shape),
        gated=("fastplm", *FLOWS),
        gate=gate_with_sample if shape.sampled else None,
        wrt=shape.learned,
        bytes=moved,
        flops=product,
        # The backward reads all of it again, and writes a gradient of every row and parameter.
        training_bytes=2 * moved + parameters + size * shape.rows * shape.width,
        training_flops=3 * product,
        targets={} if floor is None else {"training": (floor, must)},
    )


def sampled(label: str, shape: Shape, floor=None, must=None) -> Case:
    return case(f"{label}, with sample", replace(shape, sampled=True), floor, must)


BASE, LARGE = Shape(4915, 30522, 768), Shape(4915, 30522, 1024)
SMALL = Shape(2458, 30522, 128)

if GPU:
    CASES = [
        case("BERT-base N 4915", BASE, 880, 1150),
        case("BERT-large N 4915", LARGE, 1170, 1500),
        case("RoBERTa-base N 4915", replace(BASE, vocab=50265), 1440, 1900),
        case("GPT-2 N 16384", Shape(16384, 50257, 768, bias=False), 4800, 6200),
        case("ELECTRA-small generator N 2458", SMALL, 73, 240),
        sampled("ELECTRA-small generator N 2458", SMALL, 110, 270),
        sampled("ELECTRA-base generator N 4915", replace(BASE, width=256)),
        case("ALBERT-base N 4915", replace(BASE, vocab=30000, width=128)),
        # The same rows among all tokens of the batch.
        case("BERT-base N 32768, 85 % ignored", replace(BASE, rows=32768, ignored=0.85)),
        case("ELECTRA-small N 16384, 85 % ignored", replace(SMALL, rows=16384, ignored=0.85)),
    ]
else:
    CASES = [
        case("BERT-base N 154", replace(BASE, rows=154)),
        case("ELECTRA-small generator N 512", replace(SMALL, rows=512)),
        sampled("ELECTRA-small generator N 512", replace(SMALL, rows=512)),
        case("ELECTRA-small N 1024, 85 % ignored", replace(SMALL, rows=1024, ignored=0.85)),
        case("BERT-base N 512, 85 % ignored", replace(BASE, rows=512, ignored=0.85)),
    ]


@pytest.mark.parametrize("direction", ("forward", "training"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear_cross_entropy(case, direction, bench):
    bench(case, direction)
