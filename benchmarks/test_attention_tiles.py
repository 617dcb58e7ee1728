"""Tiles of attention's streaming kernels on sm_90 that the static model prefers, beside ours.

The model's waits over the time of the products: of the forward 1.18 to 1.23 with tiles of 128 x 64
(1.61 with those of configs.py), of dQ 1.07 with 8 warps (1.48), of dK and dV 1.35 (1.45). A row of
a GPU decides. Without one, TRITON_INTERPRET=1 runs one case.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from test_attention import S512, Shape, over

import fastplm
from fastplm import ops
from fastplm.reference.attention import attention_ref, attention_varlen_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
NAMES = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", "TRANSPOSED")
CANDIDATES: dict[str, tuple[tuple[int, ...], ...]] = {
    "stream_fwd": ((128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3)),
    "stream_dq": ((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3)),
    "stream_dkdv": ((64, 128, 8, 3, 1), (64, 128, 8, 2, 1), (64, 128, 8, 3, 0), (64, 64, 4, 3, 1)),
}


@contextmanager
def tiles(kernel: str, config: tuple[int, ...]) -> Iterator[None]:
    """Launch one kernel with a configuration."""
    from fastplm.triton_kernels.attention import launch

    known = launch.config_of

    def config_of(name: str, *of: Any) -> dict[str, int]:
        return dict(zip(NAMES, config, strict=False)) if name == kernel else known(name, *of)

    launch._kept_shape.cache_clear()  # a shape keeps its configurations
    with mock.patch.object(launch, "config_of", config_of):
        yield
    launch._kept_shape.cache_clear()


def with_tiles(
    kernel: str, config: tuple[int, ...], function: Callable[..., Any]
) -> Callable[..., Any]:
    def run(**inputs: Any) -> Any:
        with tiles(kernel, config):
            return function(**inputs)

    return run


def with_gradients(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The gradients of the inputs, as tiles of a backward must be chosen when it runs."""

    def run(**inputs: torch.Tensor) -> torch.Tensor:
        leaves = {name: value.detach().requires_grad_() for name, value in inputs.items()}
        with torch.enable_grad():
            out = function(**leaves)
        grads = torch.autograd.grad(out, [*leaves.values()], torch.ones_like(out))
        return torch.cat([grad.flatten() for grad in grads])

    return run


def by_triton(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(**inputs: Any) -> Any:
        with fastplm.use_backend("triton"):
            return function(**inputs)

    return run


def case(kernel: str, kind: str, shape: Shape) -> Case:
    kept = (lambda function: function) if kernel == "stream_fwd" else with_gradients
    eager = kept(over(shape, attention_ref, attention_varlen_ref))
    ours = by_triton(kept(over(shape, ops.attention, ops.attention_varlen)))
    candidates = {
        "fastplm, " + "x".join(map(str, config)): with_tiles(kernel, config, ours)
        for config in CANDIDATES[kernel][: None if GPU else 1]
    }
    # Longer than the rows that other kernels hold as a whole.
    small = replace(shape, batch=1, heads=2, seqlen_q=150, seqlen_k=150)
    return Case(
        op="attention_tiles",
        label=f"{kernel} {kind}",
        make=shape.make,
        make_small=small.make,
        variants={"eager": eager, "fastplm": ours, **candidates},
        gated=("fastplm", *candidates),
        directions=("forward",) if kernel == "stream_fwd" else ("training",),
        dtype=torch.bfloat16 if GPU else torch.float32,
    )


KINDS = {"plain": S512, "dropout": replace(S512, dropout_p=0.1), "bias": replace(S512, bias=True)}
TINY = Shape(1, 1, 140, 140, dim=16)
if GPU:
    CASES = [case(kernel, *kind) for kernel in CANDIDATES for kind in KINDS.items()]
else:  # Triton's interpreter, if it is on, computes on a CPU
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    CASES = [case("stream_dq", "plain", TINY)] if interpreted else []


def test_attention_tiles(case, direction, bench):
    bench(case, direction)
