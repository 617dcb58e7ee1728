"""ops.maxsim against its reference: scores and gradients by the error budget, exact matches."""

from __future__ import annotations

import functools
import importlib
import types

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    """Random rows, and spare rows that nothing may read."""
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


def module():
    """The module; the package's attribute of this name is the function."""
    return importlib.import_module("fastplm.ops.maxsim")


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


@pytest.mark.slow
@pairwise(
    backend=BACKENDS,
    dtype=DTYPES,
    lengths=LENGTHS,
    width=(1, 40, 128, 384),
    normalize=(True, False),
)
def test_shapes_and_dtypes(device, backend, dtype, lengths, width, normalize):
    normalize = normalize and width > 1  # with width 1, all rows would have one direction
    inputs = make(device, *lengths, width, dtype)
    check(backend, inputs, normalize=normalize)
    assert_matches(run(backend, **inputs, normalize=normalize), inputs, normalize)


def assert_matches(match, inputs, normalize=True):
    """Checks that indices point into their sets, at rows with these scores."""
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
    """A pair of sets may be larger than the buffers."""
    inputs = make("cpu", [70, 3, 5], [40, 9, 5])
    plain = run("torch", **inputs)
    monkeypatch.setattr(module(), "_GROUP", 300)
    calls = []
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *a, out: (calls.append(out.shape), bmm(*a, out=out)))
    check("torch", inputs)
    tiled = run("torch", **inputs)
    assert_close(tuple(tiled), tuple(plain))
    assert max(shape.numel() for shape in calls) <= 300 and len(calls) > 10


def test_no_similarities_of_a_whole_pair_are_kept(device):
    """Forward and backward take less memory than a pair's similarities, or a batch's."""
    inputs = make(device, [1500] * 2, [1400] * 2, width=16)
    inputs |= {name: inputs[name].requires_grad_() for name in ("query", "key")}

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for one in tree_leaves(result):
                if isinstance(one, torch.Tensor):
                    self.most = max(self.most, one.numel())
            return result

    largest = {}
    for backend in ("eager", "torch"):
        with Largest() as mode:
            both_scores(functools.partial(run, backend), **inputs).sum().backward()
        largest[backend] = mode.most
    assert largest["eager"] >= 2 * 1500 * 1400
    assert largest["torch"] <= max(module()._GROUP, 2 * 2902 * 16)


# --- matches --------------------------------------------------------------------------------------


@each_backend
@pytest.mark.parametrize("size", (3, 70, 200))
def test_of_equal_similarities_the_first_row_is_the_match(device, backend, size):
    """The first row is the match also if equal similarities are in different tiles."""
    ends = torch.tensor([0, size], dtype=torch.int32, device=device)
    query = torch.ones(size, 16, device=device)
    query[0] = 0
    match = run(
        backend,
        **dict(query=query, key=query, cu_seqlens_q=ends, cu_seqlens_k=ends),
        **dict(max_seqlen_q=size, max_seqlen_k=size, normalize=False),
    )
    expected = torch.ones(size, dtype=torch.int64, device=device)
    expected[0] = 0  # all similarities of the first row are 0
    assert torch.equal(match.query_index, expected) and torch.equal(match.key_index, expected)


@each_backend
def test_nan_reaches_its_own_pair_alone(device, backend):
    inputs = make(device, [70, 5, 66], [66, 4, 130])
    inputs["query"][71] = NAN  # a row of the second pair
    inputs["key"][150] = NAN  # a row of the third pair
    match, expected = run(backend, **inputs), maxsim_ref(**inputs)
    for one, other in zip(match, expected, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
    assert match.query_score[:70].isfinite().all() and match.key_score[66:70].isnan().all()
    at = expected.query_score.isfinite()
    assert torch.equal(match.query_index[at], expected.query_index[at])


@each_backend
def test_a_row_of_zeros_has_similarity_0(device, backend):
    inputs = make(device, [3, 2], [4, 3])
    inputs["query"][1] = 0
    inputs["query"][3:5] = 0  # all rows of a set
    check(backend, inputs)


@each_backend
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_row_that_all_others_chose(device, backend, dtype):
    """The row's gradient is a sum over all the others, in fp32."""
    inputs = make(device, [300, 2], [40, 3], dtype=dtype)
    with torch.no_grad():
        inputs["key"][7] = inputs["query"][:300].float().mean(0).mul(9).to(dtype)
    match = run(backend, **inputs, normalize=False)
    assert (match.query_index[:300] == 7).sum() > 200
    check(backend, inputs, normalize=False)


@each_backend
def test_upstream_gradients_of_rows_without_a_match_do_not_matter(device, backend):
    inputs = make(device, *LENGTHS["sets without rows"])
    grads = []
    for wrong in (0.0, NAN):
        tensors = [inputs[name].detach().requires_grad_() for name in ("query", "key")]
        match = run(backend, **inputs | dict(zip(("query", "key"), tensors, strict=True)))
        upstream = [
            torch.ones_like(score).masked_fill(index < 0, wrong)
            for score, index in (match[:2], match[2:])
        ]
        grads.append(torch.autograd.grad(match[::2], tensors, upstream))
    assert all(map(torch.equal, *grads))
    assert all(grad.isfinite().all() for grad in grads[0])


@pytest.mark.parametrize("normalize", [False, True])
def test_the_gradient_without_compiled_code(monkeypatch, normalize):
    module = importlib.import_module("fastplm.ops.maxsim")
    monkeypatch.setattr(module, "GATHER_ROWS", types.SimpleNamespace(backends={}))
    check("torch", make("cpu", [9, 70, 0], [5, 65, 3], dtype=torch.float32), normalize=normalize)
