"""PyTorch's own samples for two of its functions, run against the ops that replace them."""

from __future__ import annotations

import importlib.util
import os
import sys
import types
import unittest

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastplm import ops
from fastplm.testing import assert_within_budget

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(scope="module")
def samples():
    """``samples(name, dtype)``: torch's own samples for a function of ``torch.nn.functional``."""
    environment = dict(os.environ)
    stub = None
    if importlib.util.find_spec("expecttest") is None:
        # torch ships these samples, but not the package that its test cases derive from.
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    # The import changes global settings for torch's own tests.
    settings = torch.backends.disable_global_flags.__globals__
    settings["__allow_nonbracketed_mutation_flag"] = True
    os.environ.clear()
    os.environ.update(environment)
    if stub is not None:
        del sys.modules["expecttest"]

    def of(name, dtype):
        (info,) = (op for op in op_db if op.name == f"nn.functional.{name}")
        return list(info.sample_inputs("cpu", dtype, requires_grad=False))

    return of


def batched(*tensors: Tensor) -> tuple[tuple[int, ...], list[Tensor]]:
    """(the common leading dimensions, the tensors with these reshaped to [B, H])."""
    shape = torch.broadcast_shapes(*(x.shape[:-2] for x in tensors))
    full = (x.expand(*shape, *x.shape[-2:]) for x in tensors)
    return shape, [x if len(shape) == 2 else x[None] for x in full]


def ours(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options) -> Tensor:
    """SDPA aligns causality at the top left, ops.attention at the bottom right."""
    shape, (query, key, value) = batched(query, key, value)
    if is_causal:
        seen = query.shape[2]
        assert seen <= key.shape[2]
        key, value = key[:, :, :seen], value[:, :, :seen]
    out = ops.attention(query, key, value, is_causal=is_causal, **options)
    return out.view(*shape, *out.shape[-2:])


def theirs(query: Tensor, key: Tensor, value: Tensor, **options) -> Tensor:
    """SDPA on four dimensions: with three, PyTorch takes a kernel with another error."""
    shape, tensors = batched(query, key, value)
    out = F.scaled_dot_product_attention(*tensors, **options)
    return out.view(*shape, *out.shape[-2:])


@pytest.mark.slow
@DTYPES
def test_scaled_dot_product_attention(samples, dtype):
    """All samples are compared at once: with scores near 100 a tiny output's error is chance."""
    calls = []
    for sample in samples("scaled_dot_product_attention", dtype):
        options = dict(sample.kwargs)
        # Masks that are not key masks are left out, and torch's random bits.
        if options.pop("attn_mask", None) is not None or options.pop("dropout_p", 0.0):
            continue
        if options.pop("enable_gqa", False):
            continue
        calls.append(((sample.input, *sample.args), options))
    assert len(calls) >= 6  # torch 2.15 has half the samples of 2.13
    # The tensors of each kind are joined, so that a gradient's error is that of all samples.
    kinds = dict(
        zip(("query", "key", "value"), zip(*(call[0] for call in calls), strict=True), strict=True)
    )
    inputs = {kind: torch.cat([x.flatten() for x in tensors]) for kind, tensors in kinds.items()}

    def all_of(function):
        def run(**inputs):
            parts = [
                [part.view_as(x) for part, x in zip(flat.split(sizes), kinds[kind], strict=True)]
                for kind, flat in inputs.items()
                for sizes in [[x.numel() for x in kinds[kind]]]
            ]
            given = zip(*parts, calls, strict=True)
            outputs = [function(*tensors, **options) for *tensors, (_, options) in given]
            return torch.cat([out.flatten() for out in outputs])

        return run

    assert_within_budget(all_of(ours), all_of(theirs), inputs, wrt=tuple(inputs))


@DTYPES
def test_cross_entropy(samples, dtype):
    run = 0
    for sample in samples("cross_entropy", dtype):
        (target,), options = sample.args, sample.kwargs
        # The op has no weights of classes, and no distributions as targets.
        if options.get("weight") is not None or target.is_floating_point():
            continue

        def by_rows(input, target=target, options=options):
            rows = input.movedim(1, -1)
            classes = torch.eye(rows.shape[-1], dtype=input.dtype)
            loss = ops.linear_cross_entropy(
                rows.reshape(-1, rows.shape[-1]), classes, target.flatten(), **options
            )
            return loss.view(target.shape if loss.dim() else ()).to(input.dtype)

        assert_within_budget(
            by_rows,
            lambda input, target=target, options=options: F.cross_entropy(input, target, **options),
            {"input": sample.input},
            wrt=("input",),
        )
        run += 1
    assert run >= 8
