"""The gradient of a table that is both embedding and vocabulary head."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fastplm
from fastplm import ops
from fastplm.nn._tied_embedding import shares_table, tied_embedding, tied_lookup
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref
from fastplm.testing import assert_repeatable, assert_within_budget

from ..samples import Operators

VOCAB, WIDTH, PADDING = 31, 18, 3


def some_ids(rows=4, length=9):
    """Ids in which every token occurs many times or never, with padding."""
    ids = torch.randint(0, VOCAB // 2, (rows, length))
    ids[:, -2:] = PADDING
    return ids


def some_inputs(dtype=torch.float32):
    ids = some_ids()
    targets = torch.randint(0, VOCAB, (ids.numel(),))
    targets[::3] = -100
    return {"weight": torch.randn(VOCAB, WIDTH, dtype=dtype), "ids": ids, "targets": targets}


def plain(weight, ids, targets, loss=ops.linear_cross_entropy):
    rows = F.embedding(ids, weight, PADDING)
    return loss(rows.flatten(0, 1).tanh(), weight, targets)


def tied(weight, ids, targets):
    rows, head = tied_embedding(ids, weight, PADDING)
    return ops.linear_cross_entropy(rows.flatten(0, 1).tanh(), head, targets)


def gradient(function, weight, **inputs):
    weight = weight.detach().requires_grad_()
    return torch.autograd.grad(function(weight, **inputs), weight)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_a_lookup_and_a_head(dtype):
    def reference(**inputs):
        return plain(**inputs, loss=linear_cross_entropy_ref)

    assert_within_budget(tied, reference, some_inputs(dtype), wrt=["weight"])
    assert_repeatable(tied, some_inputs(dtype), wrt=["weight"])


def test_the_bits_are_those_of_plain_autograd_in_fp32():
    inputs = some_inputs()
    assert torch.equal(gradient(tied, **inputs), gradient(plain, **inputs))


@pytest.mark.parametrize("padding", [None, 0, PADDING])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
def test_padding_gives_no_gradient(padding, ids_dtype):
    ids = some_ids().to(ids_dtype)
    ids[0, 0] = 0
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    rows, head = tied_embedding(ids, weight, padding)
    assert torch.equal(rows, F.embedding(ids, weight))
    upstream = torch.randn_like(rows)
    if padding is not None:
        upstream[ids == padding] = float("nan")
    of_head = torch.randn(VOCAB, WIDTH)
    torch.autograd.backward((rows, head), (upstream, of_head.clone()))
    expected = of_head.clone()
    for token, row in zip(ids.flatten(), upstream.flatten(0, 1), strict=True):
        if token != padding:
            expected[token.item()] += row
    torch.testing.assert_close(weight.grad, expected)
    if padding is not None:
        assert torch.equal(weight.grad[padding], of_head[padding])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows_are_added_up_in_fp32(dtype):
    """A sum of ones stops at 256 in bf16, at 2048 in fp16; only fp16 can hold 4100 exactly."""
    weight = torch.zeros(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    ids = torch.full((4095,), 5)
    rows, head = tied_embedding(ids, weight)
    of_head = torch.full_like(weight, 5.0)
    torch.autograd.backward((rows, head), (torch.ones_like(rows), of_head))
    assert (weight.grad[5] == torch.tensor(4100.0).to(dtype)).all()
    assert (weight.grad[6] == 5.0).all()


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_adds_the_rows(dtype, read):
    ids, weight = some_ids(), torch.randn(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    wide = weight.detach().float().requires_grad_()
    upstream, of_head = torch.randn(*ids.shape, WIDTH).to(dtype), torch.randn_like(weight)
    rows = F.embedding(ids, wide, PADDING)
    (expected,) = torch.autograd.grad(rows, wide, upstream.float())
    with fastplm.use_backend("triton"), Operators() as operators:
        rows, head = tied_embedding(ids, weight, PADDING, read=read)
        (found,) = torch.autograd.grad((rows, head), weight, (upstream, of_head.clone()))
    assert "add_rows_" in operators.names
    assert "embedding_dense_backward" not in operators.names
    assert ("embedding" in operators.names) == read
    torch.testing.assert_close(found, (expected + of_head).to(dtype))


def test_only_one_of_the_two_uses():
    ids, weight = some_ids(), torch.randn(VOCAB, WIDTH, requires_grad=True)
    rows, _ = tied_embedding(ids, weight, PADDING)
    upstream = torch.randn_like(rows)
    (alone,) = torch.autograd.grad(rows, weight, upstream)
    (expected,) = torch.autograd.grad(F.embedding(ids, weight, PADDING), weight, upstream)
    assert torch.equal(alone, expected)
    _, head = tied_embedding(ids, weight, PADDING)
    upstream = torch.randn_like(weight)
    assert torch.equal(torch.autograd.grad(head, weight, upstream)[0], upstream)


def test_no_tokens():
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    rows, head = tied_embedding(torch.zeros(0, 4, dtype=torch.int64), weight)
    torch.autograd.backward((rows, head), (torch.ones_like(rows), torch.ones_like(head)))
    assert (weight.grad == 1).all()


# --- the graph ------------------------------------------------------------------------------------


def test_the_head_may_be_used_twice_and_through_an_expanded_gradient():
    inputs = some_inputs()

    def twice(weight, ids, targets, look=tied_embedding):
        rows, head = look(ids, weight, PADDING)
        rows = rows.flatten(0, 1)
        first = ops.linear_cross_entropy(rows, head, targets)
        second = ops.linear_cross_entropy(rows.tanh(), head, targets)
        return first + second + head.sum()

    def reference(**inputs):
        return twice(**inputs, look=lambda ids, w, padding: (F.embedding(ids, w, padding), w))

    assert_within_budget(twice, reference, inputs, wrt=["weight"])


def test_a_retained_graph_gives_the_same_gradient_again():
    inputs = some_inputs()
    weight = inputs.pop("weight").requires_grad_()
    loss = tied(weight, **inputs)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert first.data_ptr() != second.data_ptr() and torch.equal(first, second)
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(weight.grad, 2 * first)


# --- memory ---------------------------------------------------------------------------------------


class DenseGradients(TorchDispatchMode):
    """The pieces of memory of a table's size that operators inside write."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.numel() == VOCAB * WIDTH:
                # Memory that is kept alive is not allocated again. (The tensor is not kept alive:
                # autograd could then not pass it on, and would copy it.)
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = storage
        return out


@pytest.mark.parametrize("autocast", [False, True])
def test_no_second_dense_gradient(autocast):
    inputs = some_inputs()
    weight = inputs.pop("weight").requires_grad_()
    counts = {}
    for function in (plain, tied):
        weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(weight, **inputs)
        with DenseGradients() as dense:
            loss.backward()
        counts[function] = len(dense.storages)
        assert weight.grad.dtype is torch.float32
    assert weight.grad.data_ptr() in dense.storages
    assert counts[tied] == 1 < counts[plain]


def test_mixed_precision_equals_a_lookup_and_a_head():
    inputs = some_inputs()

    def under_autocast(function):
        def run(**inputs):
            if inputs["weight"].dtype is torch.float64:  # this run computes the truth
                return function(**inputs)
            with torch.autocast("cpu", torch.bfloat16):
                return function(**inputs)

        return run

    def reference(**inputs):
        rows = F.embedding(inputs["ids"], inputs["weight"], PADDING)
        logits = F.linear(rows.flatten(0, 1).tanh(), inputs["weight"]).to(rows.dtype)
        return F.cross_entropy(logits, inputs["targets"])

    candidate, reference = under_autocast(tied), under_autocast(reference)
    assert_within_budget(candidate, reference, inputs, wrt=["weight"])


# --- compiled -------------------------------------------------------------------------------------


def test_compiles_without_graph_breaks():
    torch._dynamo.reset()
    inputs = some_inputs()

    def function(weight, ids, targets):
        return tied(weight, ids, targets)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(gradient(compiled, **inputs), gradient(function, **inputs))


# --- when it stands in for the module -------------------------------------------------------------


def pair():
    embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=PADDING)
    decoder = nn.Linear(WIDTH, VOCAB)
    decoder.weight = embedding.weight
    return embedding, decoder


class Scaled(nn.Embedding):
    def forward(self, input):
        return 2 * super().forward(input)


def untie(embedding, decoder):
    decoder.weight = copy.deepcopy(embedding.weight)


def replace_forward(embedding, decoder):
    embedding.forward = lambda ids: F.embedding(ids, embedding.weight)


def scaled(embedding, decoder):
    embedding.__class__ = Scaled


REFUSALS = {
    "untied": untie,
    "frozen": lambda e, d: e.weight.requires_grad_(False),
    "max_norm": lambda e, d: setattr(e, "max_norm", 1.0),
    "frequency": lambda e, d: setattr(e, "scale_grad_by_freq", True),
    "sparse": lambda e, d: setattr(e, "sparse", True),
    "forward": replace_forward,
    "subclass": scaled,
    "pre-hook": lambda e, d: e.register_forward_pre_hook(lambda *_: None),
    "hook with keywords": lambda e, d: e.register_forward_hook(lambda *_: None, with_kwargs=True),
    "backward hook": lambda e, d: e.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda e, d: e.register_full_backward_pre_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", REFUSALS.values(), ids=REFUSALS)
def test_replaces_only_a_plain_lookup_in_the_decoders_table(change):
    embedding, decoder = pair()
    assert shares_table(embedding, decoder)
    with torch.no_grad():
        assert not shares_table(embedding, decoder)
    change(embedding, decoder)
    assert not shares_table(embedding, decoder)


def test_forward_hooks_run():
    embedding, decoder = pair()
    seen = []
    embedding.register_forward_hook(lambda module, args, out: seen.append((module, args, out)))
    embedding.register_forward_hook(lambda module, args, out: out + 1)
    assert shares_table(embedding, decoder)
    ids = some_ids()
    rows, _ = tied_lookup(embedding, ids)
    assert torch.equal(rows, embedding(ids))
    (module, args, out), called = seen
    assert module is embedding and args == (ids,) == called[1] and torch.equal(out, called[2])
