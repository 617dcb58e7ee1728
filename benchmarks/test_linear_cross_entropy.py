"""ops.linear_cross_entropy, with and without samples, against its eager reference and the peers:
PyTorch's fused loss, the full logits of a Hugging Face model, and the libraries.

In some cases rows have no target, like 85 % of the tokens of a masked language model, for the
variants that see all tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import peers
from fastplm import ops
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref, sample_ref
from fastplm.testing import assert_within_budget
from harness import Case, default_device
from peers import rows_that_count

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
#: Bytes of kept logits: without a limit, and none.
FLOWS = {"fastplm, logits kept": 1 << 40, "fastplm, recomputed": 0}
COUNTING = "full logits on rows that count"
PEERS = (
    "F.linear_cross_entropy",
    "F.linear_cross_entropy chunked",
    "liger-kernel",
    "cut-cross-entropy",
    "cut-cross-entropy unfiltered",
)
COMPILING = (
    "liger-kernel compiled",
    "cut-cross-entropy torch_compile",
    "quack",
    "quack chunked",
)


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
        if self.sampled:  # a tensor, as a training step passes it
            made["seed"] = torch.zeros((), dtype=torch.int64, device=device)
        return made

    def make_small(self, device: torch.device) -> dict[str, Any]:
        """The same call, small enough for fp64, with exact logits if it is sampled."""
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


def without_sample(function):
    def run(seed, **inputs):
        return function(**inputs)

    return run


def loss_of(function):
    """The variant with the loss alone as its result: a sampled call returns a pair."""

    def run(**inputs):
        out = function(**inputs)
        return out[0] if isinstance(out, tuple) else out

    run.whole = function
    return run


def variants(shape: Shape, compiling: bool) -> dict[str, Callable[..., Any]]:
    """The peers that see all rows, and, if not all rows count, those that select rows first."""
    eager, loss = reference(shape), linear_cross_entropy_ref
    # Models call the op in this way, as a collator knows how many rows have a label.
    found = {"eager": eager, "fastplm": fastplm(shape, expected_targets=shape.counted)}
    if shape.sampled:
        loss = without_sample(loss)
    counting = rows_that_count(eager)
    if compiling:
        found["compiled"] = peers.compiled("linear_cross_entropy", eager, loss)
        if shape.ignored:
            found["compiled on rows that count"] = peers.compiled(
                "linear_cross_entropy, counted", counting, loss, dynamic=True
            )
        found |= peers.linear_cross_entropy(COMPILING, shape, loss)
    else:
        found |= {name: fastplm(shape, logits_budget=budget) for name, budget in FLOWS.items()}
        logits = "full logits, multinomial" if shape.sampled else "full logits"
        found |= peers.linear_cross_entropy((logits, *PEERS), shape, loss)
        if shape.sampled:
            found["fastplm, no sample"] = without_sample(ops.linear_cross_entropy)
        if shape.ignored:
            found["eager on rows that count"] = counting
            found |= peers.linear_cross_entropy((COUNTING,), shape, loss)
    return {name: loss_of(function) for name, function in found.items()} if shape.sampled else found


def gate_with_sample(candidate, eager, inputs):
    """Checks loss and gradients by the budget, and that samples of exact logits are equal."""
    wrt = tuple(name for name, value in inputs.items() if value.is_floating_point())
    assert_within_budget(candidate, eager, inputs, wrt=wrt)
    (_, sample), (_, expected) = candidate.whole(**inputs), eager.whole(**inputs)
    assert torch.equal(sample, expected), "other samples than those of the reference"


# --- cases ----------------------------------------------------------------------------------------


def case(label: str, shape: Shape, *targets: float, compiling: bool = False) -> Case:
    """A case with the peers that compile, or with all others.

    ``targets``: floor, must and stretch, in µs for forward and backward together on an H200.
    """
    size = DTYPE.itemsize
    parameters = size * (shape.vocab * shape.width + shape.vocab * shape.bias)
    rows = size * shape.counted * shape.width + 8 * shape.rows
    moved = rows + parameters
    # The task needs one product of the rows that count in the forward, and two in the backward.
    product = 2 * shape.counted * shape.vocab * shape.width
    return Case(
        op="linear_cross_entropy",
        label=label,
        make=shape.make,
        make_small=shape.make_small,
        variants=variants(shape, compiling),
        gated=("fastplm",) if compiling else ("fastplm", *FLOWS),
        gate=gate_with_sample if shape.sampled else None,
        wrt=shape.learned,
        bytes=moved,
        flops=product,
        # The backward reads all inputs again, and writes a gradient of every row and parameter.
        training_bytes=2 * moved + parameters + size * shape.rows * shape.width,
        training_flops=3 * product,
        dtype=DTYPE,
        full=compiling and GPU,  # takes minutes
        rounds=None if GPU else 5,
        targets={"training": targets} if targets else {},
    )


BASE, LARGE = Shape(4915, 30522, 768), Shape(4915, 30522, 1024)
SMALL = Shape(2458, 30522, 128)


def cases(arguments: list[tuple], telling: tuple[str, ...]) -> list[Case]:
    """The cases of peers that compile come last, in the order of their importance."""
    by_label = {label: (label, *rest) for label, *rest in arguments}
    return [case(*each) for each in arguments] + [
        case(*by_label[label], compiling=True) for label in telling
    ]


def gpu_cases() -> list[Case]:
    sampled = replace(SMALL, sampled=True)
    arguments = [
        ("BERT-base N 4915", BASE, 880, 1150, 1000),
        ("BERT-large N 4915", LARGE, 1170, 1500, 1320),
        ("RoBERTa-base N 4915", replace(BASE, vocab=50265), 1440, 1900, 1650),
        ("GPT-2 N 16384", Shape(16384, 50257, 768, bias=False), 4800, 6200, 5500),
        ("ELECTRA-small generator N 2458", SMALL, 73, 240, 170),
        ("ELECTRA-small generator N 2458, with sample", sampled, 110, 270, 190),
        # The same rows among all tokens of the batch.
        ("BERT-base N 32768, 85 % ignored", replace(BASE, rows=32768, ignored=0.85)),
        ("ELECTRA-small N 16384, 85 % ignored", replace(SMALL, rows=16384, ignored=0.85)),
        ("ELECTRA-base generator N 4915, with sample", replace(BASE, width=256, sampled=True)),
        ("ALBERT-base N 4915", replace(BASE, vocab=30000, width=128)),
    ]
    telling = (
        "BERT-base N 32768, 85 % ignored",
        "BERT-base N 4915",
        "GPT-2 N 16384",
        "ELECTRA-small generator N 2458",
        "ELECTRA-small generator N 2458, with sample",
        "RoBERTa-base N 4915",
        "BERT-large N 4915",
    )
    return cases(arguments, telling)


def cpu_cases() -> list[Case]:
    arguments = [
        ("BERT-base N 154", replace(BASE, rows=154)),
        ("BERT-base N 256, 85 % ignored", replace(BASE, rows=256, ignored=0.85)),
        ("GPT-2 N 64", Shape(64, 50257, 768, bias=False)),
        ("ELECTRA-small generator N 512", replace(SMALL, rows=512)),
        ("ELECTRA-small generator N 512, with sample", replace(SMALL, rows=512, sampled=True)),
        ("ELECTRA-small N 1024, 85 % ignored", replace(SMALL, rows=1024, ignored=0.85)),
    ]
    found = cases(arguments, ("ELECTRA-small N 1024, 85 % ignored", "GPT-2 N 64"))
    for wide in found:
        if "ELECTRA" not in wide.label:  # takes 4 to 16 times as long as eager; ELECTRA is enough
            wide.variants.pop("F.linear_cross_entropy chunked", None)
    return found


CASES = gpu_cases() if GPU else cpu_cases()


def test_linear_cross_entropy(case, direction, bench):
    bench(case, direction)
