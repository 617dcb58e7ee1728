"""ops.maxsim against its reference: scores and gradients by the error budget, exact matches."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from torch.testing import assert_close

import fastplm
from fastplm import ops
from fastplm.reference.maxsim import maxsim_ref
from fastplm.testing import assert_within_budget

from ..pairwise import pairwise
from ..samples import ends_of

BACKENDS = ("torch", "triton")
NAN = float("nan")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_backend = pytest.mark.parametrize("backend", BACKENDS)
LENGTHS = {
    "one pair": ([9], [5]),
    "one token": ([1, 1, 70], [1, 65, 1]),
    "over a tile": ([63, 65, 130], [257, 64, 65]),
    "sets without rows": ([0, 5, 0, 3], [4, 0, 0, 7]),
    "no pair": ([], []),
    "only empty ones": ([0, 0], [0, 0]),
}


def run(backend: str, **inputs):
    if backend == "torch" and inputs["query"].is_cuda:
        pytest.skip("the torch backend of maxsim is for CPU tensors")
    with fastplm.use_backend(backend):
        return ops.maxsim(**inputs)


def both_scores(function, **inputs) -> torch.Tensor:
    match = function(**inputs)
    return torch.cat([match.query_score, match.key_score])


def check(backend: str, inputs: dict, **options) -> None:
    assert_within_budget(
        functools.partial(both_scores, functools.partial(run, backend)),
        functools.partial(both_scores, maxsim_ref),
        inputs | options,
        wrt=("query", "key"),
    )


def make(device, sizes_q, sizes_k, width=40, dtype=torch.float32, spare=(2, 1)) -> dict:
    """Random rows, and spare ones that nothing may read."""
    sizes = [torch.tensor(one, dtype=torch.int64) for one in (sizes_q, sizes_k)]
    rows = []
    for one, more in zip(sizes, spare, strict=True):
        packed = torch.randn(int(one.sum()) + more, width) + 0.3
        packed[int(one.sum()) :] = NAN
        rows.append(packed.to(device, dtype))
    ends = [ends_of(one).to(device) for one in sizes]
    longest = [max([0, *one]) for one in (sizes_q, sizes_k)]
    names = ("query", "key", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, [*rows, *ends, *longest], strict=True))


def pairs_of(inputs):
    """The rows of both sides, pair by pair."""
    ends = [inputs[f"cu_seqlens_{side}"].tolist() for side in "qk"]
    for start_q, end_q, start_k, end_k in zip(
        ends[0][:-1], ends[0][1:], ends[1][:-1], ends[1][1:], strict=True
    ):
        yield slice(start_q, end_q), slice(start_k, end_k)


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", (True, False))
def test_the_reference_is_the_maximum_of_each_pair_alone(normalize):
    inputs = make("cpu", *LENGTHS["sets without rows"], dtype=torch.float64)
    match = maxsim_ref(**inputs, normalize=normalize)
    expected = ops.MaxSim(*(torch.zeros_like(one) for one in match))
    expected.query_index.fill_(-1)
    expected.key_index.fill_(-1)
    for queries, keys in pairs_of(inputs):
        for i in range(queries.start, queries.stop):
            for j in range(keys.start, keys.stop):
                one, other = inputs["query"][i], inputs["key"][j]
                score = one @ other
                if normalize:
                    score = torch.nn.functional.cosine_similarity(one, other, dim=0)
                for index, scores, here, there in (
                    (expected.query_index, expected.query_score, i, j),
                    (expected.key_index, expected.key_score, j, i),
                ):
                    if index[here] < 0 or score > scores[here]:
                        scores[here], index[here] = score, there
    assert_close(tuple(match), tuple(expected))
    assert (match.query_index < 0).any() and (match.query_index >= 0).any()


# --- scores and gradients -------------------------------------------------------------------------


@pairwise(
    backend=BACKENDS,
    dtype=DTYPES,
    lengths=LENGTHS,
    width=(1, 40, 128, 384),
    normalize=(True, False),
)
def test_shapes_and_dtypes(device, backend, dtype, lengths, width, normalize):
    normalize = normalize and width > 1  # all rows of one number have the same direction
    inputs = make(device, *lengths, width, dtype)
    check(backend, inputs, normalize=normalize)
    assert_matches(run(backend, **inputs, normalize=normalize), inputs, normalize)


def assert_matches(match, inputs, normalize=True):
    """Indices point into their sets, at rows that have these scores."""
    one, other = (inputs[name].double() for name in ("query", "key"))
    if normalize:
        one, other = (torch.nn.functional.normalize(x, dim=-1) for x in (one, other))
    expected = maxsim_ref(**inputs)
    for index, like in ((match.query_index, expected[1]), (match.key_index, expected[3])):
        assert index.dtype is torch.int64
        assert torch.equal(index < 0, like < 0)
    for index, score, own, of in (
        (match.query_index, match.query_score, one, other),
        (match.key_index, match.key_score, other, one),
    ):
        at = index >= 0
        assert_close((own[at] * of[index[at]]).sum(-1).float(), score[at], rtol=1e-5, atol=1e-5)
    for queries, keys in pairs_of(inputs):
        for index, (own, of) in zip(match[1::2], ((queries, keys), (keys, queries)), strict=True):
            assert ((index[own] == -1) | (index[own] >= of.start) & (index[own] < of.stop)).all()


def test_products_in_several_tiles(monkeypatch):
    """Where one pair is larger than the buffers."""
    module = importlib.import_module("fastplm.ops.maxsim")  # the package has the function
    inputs = make("cpu", [70, 3, 5], [40, 9, 5])
    plain = run("torch", **inputs)
    monkeypatch.setattr(module, "_GROUP", 300)
    calls = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a, out: (calls.append(out.shape), bmm(*a, out=out)))
    check("torch", inputs)
    tiled = run("torch", **inputs)
    assert_close(tuple(tiled), tuple(plain))
    assert max(shape.numel() for shape in calls) <= 300 and len(calls) > 10
