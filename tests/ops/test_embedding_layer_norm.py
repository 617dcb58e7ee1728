"""ops.embedding_layer_norm against its reference: output and all gradients, by the error budget."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastplm
from fastplm import ops
from fastplm.nn._tied_embedding import tied_embedding
from fastplm.reference.dropout import dropout_ref
from fastplm.reference.embedding_layer_norm import embedding_layer_norm_ref
from fastplm.testing import assert_within_budget, poisoned_memory

from ..pairwise import pairwise
from ..samples import TABLES, Operators

#: The dtype of the tables and that of the result.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp16": (torch.float16, torch.float16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32 to bf16": (torch.float32, torch.bfloat16),
}
each_dtype = pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
VOCAB, PLACES = 50, 20


def run(**inputs):
    with fastplm.use_backend("triton"):
        return ops.embedding_layer_norm(**inputs)


def reference(dtype=None, **inputs):
    """The result in fp64 is not rounded."""
    double = inputs["word_weight"].dtype is torch.float64
    return embedding_layer_norm_ref(dtype=torch.float64 if double else dtype, **inputs)


def make(device, rows, width, dtypes=DTYPES["fp32"], types=2, **more) -> dict:
    """A fifth of the words is one word, as [MASK] is; types 0: none are given."""
    dtype, out = dtypes

    def table(*shape):
        return torch.randn(shape, device=device).to(dtype)

    ids = torch.randint(0, VOCAB, (rows,), device=device)
    ids[torch.rand(rows, device=device) < 0.2] = 3
    return dict(
        input_ids=ids,
        word_weight=table(VOCAB, width),
        position_ids=torch.arange(rows, device=device) % PLACES,
        position_weight=table(PLACES, width),
        token_type_ids=torch.randint(0, types, (rows,), device=device) if types else None,
        token_type_weight=table(max(types, 1), width),
        weight=1 + table(width) / 4,
        bias=table(width),
        dtype=out,
        **more,
    )


def random(device, rows, by_sample=True) -> dict:
    found = dict(dropout_p=0.3, seed=torch.tensor(5, device=device))
    if by_sample:
        place = torch.arange(rows, device=device)
        found |= dict(sample_index=place // 7 << 33, position=place % 7)
    return found


def check(inputs: dict, wrt=TABLES) -> None:
    inputs = {"padding_idx": -1, "position_padding_idx": -1, **inputs}
    candidate = functools.partial(_public, run)
    assert_within_budget(candidate, reference, inputs, wrt=wrt)


def _public(function, **inputs):
    """The reference has -1 for no padding, the op None."""
    for name in ("padding_idx", "position_padding_idx"):
        inputs[name] = None if inputs[name] < 0 else inputs[name]
    return function(**inputs)


def gradients(inputs: dict, upstream=None, function=run):
    leaves = {name: inputs[name].detach().requires_grad_() for name in TABLES}
    with poisoned_memory():
        out = function(**inputs | leaves)
        upstream = torch.ones_like(out) if upstream is None else upstream
        return out.detach(), *torch.autograd.grad(out, list(leaves.values()), upstream)


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("types", (0, 1, 2))
def test_the_reference_is_that_of_pytorchs_modules(types):
    inputs = make("cpu", 40, 16, types=types)
    words = nn.Embedding.from_pretrained(inputs["word_weight"])
    rows = words(inputs["input_ids"]) + inputs["position_weight"][inputs["position_ids"]]
    types = inputs["token_type_ids"]
    rows = rows + inputs["token_type_weight"][0 if types is None else types]
    expected = F.layer_norm(rows, (16,), inputs["weight"], inputs["bias"], 1e-12)
    torch.testing.assert_close(embedding_layer_norm_ref(**inputs), expected)


@pytest.mark.parametrize("by_sample", (False, True))
def test_dropout_is_that_of_the_op(device, by_sample):
    inputs, drawn = make(device, 40, 24), random(device, 40, by_sample)
    plain = run(**inputs)
    p = drawn.pop("dropout_p")
    expected = dropout_ref(plain, p, **drawn)
    out = run(**inputs, dropout_p=p, **drawn)
    assert torch.equal(out == 0, expected == 0)
    torch.testing.assert_close(out, expected)
    assert torch.equal(ops.embedding_layer_norm(**inputs, dropout_p=p, **drawn) == 0, out == 0)


# --- the kernels ----------------------------------------------------------------------------------


@pairwise(
    dtypes=DTYPES,
    rows=(0, 1, 63, 150),
    width=(1, 100, 128, 768),
    types=(0, 1, 2, 3),
    dropout=("none", "by element", "by sample"),
)
def test_shapes_and_dtypes(device, dtypes, rows, width, types, dropout):
    drawn = {} if dropout == "none" else random(device, rows, dropout == "by sample")
    check(make(device, rows, width, dtypes, types, **drawn))


@each_dtype
def test_padding_gets_no_gradient(device, dtypes):
    inputs = make(device, 63, 40, dtypes)
    check(inputs | dict(padding_idx=3, position_padding_idx=1))
    _, words, places, *_ = gradients(inputs | dict(padding_idx=3, position_padding_idx=1))
    assert not words[3].any() and not places[1].any()
    assert words[inputs["input_ids"][inputs["input_ids"] != 3]].any(1).all()


@pytest.mark.parametrize("rows", (1, 31, 32, 33, 64, 65, 700))
@pytest.mark.parametrize("kinds", (1, 2, 5, 300))
@pytest.mark.parametrize("width", (8, 300))
def test_rows_are_added_by_their_ids(device, rows, kinds, width):
    """Runs of equal ids are whole chunks, and begin and end anywhere in them."""
    kernels = importlib.import_module("fastplm.triton_kernels.embedding_layer_norm")
    ids = torch.randint(-1, kinds + 1, (rows,), device=device)  # also ids of no row
    values = torch.randint(-9, 10, (rows, width), device=device).float()
    table = torch.randint(-9, 10, (kinds, width), device=device).float()
    expected = table.clone()
    known = (ids >= 0) & (ids < kinds) & (ids != 1)
    expected.index_add_(0, ids[known], values[known])
    with poisoned_memory():
        kernels.add_rows_(table, ids, values, padding_idx=1)
    assert torch.equal(table, expected)


@each_dtype
def test_rows_of_words_get_their_gradient(device, dtypes):
    inputs = make(device, 63, 40, dtypes) | random(device, 63)
    inputs["word_rows"] = torch.zeros(63, 40, dtype=dtypes[0], device=device)
    check(inputs | {"padding_idx": 3}, wrt=("word_rows", *TABLES[1:]))
    table = inputs["word_weight"].requires_grad_()
    run(**inputs | {"word_rows": inputs["word_rows"].requires_grad_()}).sum().backward()
    assert table.grad is None and inputs["word_rows"].grad[inputs["input_ids"] == 3].any()


def test_the_sums_of_words_are_added_to_a_gradient(device):
    """As a head needs whose weight is the table of the words."""
    inputs = make(device, 63, 40) | {"padding_idx": 3}
    _, expected, *_ = gradients(inputs)
    table = inputs["word_weight"].requires_grad_()
    rows, alias = tied_embedding(inputs["input_ids"], table, 3, read=False)
    assert rows.untyped_storage().data_ptr() == table.data_ptr()
    buffer = torch.randn(VOCAB, 40, device=device)
    before = buffer.clone()
    with fastplm.use_backend("triton"), Operators() as operators:
        out = run(**inputs, word_rows=rows)
        (found,) = torch.autograd.grad((out, alias), table, (torch.ones_like(out), buffer))
    assert found is buffer
    assert "add_rows_" in operators.names and "embedding_dense_backward" not in operators.names
    torch.testing.assert_close(buffer, before + expected)
    assert torch.equal(buffer[3], before[3])


def test_groups_of_many_rows(device, monkeypatch):
    rows = importlib.import_module("fastplm.triton_kernels._rows")
    kernels = importlib.import_module("fastplm.triton_kernels.embedding_layer_norm")
    monkeypatch.setattr(rows, "_MAX_GROUPS", 3)
    monkeypatch.setattr(kernels, "groups_of", rows.groups_of.__wrapped__)  # without its cache
    check(make(device, 150, 40) | random(device, 150))


@each_dtype
def test_a_large_offset(device, dtypes):
    """The mean of a row is 100 times its deviation."""
    inputs = make(device, 63, 40, dtypes)
    inputs["token_type_weight"] = inputs["token_type_weight"] + 100
    check(inputs)


@each_dtype
def test_vectors_of_another_dtype(device, dtypes):
    inputs = make(device, 63, 40, dtypes)
    inputs |= {name: inputs[name].float() for name in ("weight", "bias", "position_weight")}
    check(inputs)


def test_ids_of_32_bits_and_any_strides(device):
    inputs = make(device, 63, 40)
    expected = gradients(inputs)
    for name in ("input_ids", "position_ids", "token_type_ids"):
        inputs[name] = torch.stack((inputs[name], inputs[name]), 1).int()[:, 0]
    inputs["word_weight"] = inputs["word_weight"].t().contiguous().t()
    for one, other in zip(gradients(inputs), expected, strict=True):
        assert torch.equal(one, other)


def test_a_row_does_not_depend_on_those_beside_it(device):
    inputs = make(device, 70, 40) | random(device, 70)
    whole = run(**inputs)
    of_rows = ("input_ids", "position_ids", "token_type_ids", "sample_index", "position")
    part = run(**inputs | {name: inputs[name][13:50] for name in of_rows})
    assert torch.equal(part, whole[13:50])


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize(("rows", "width"), ((5, 1023), (3, 4096), (3, 9001), (9000, 16)))
def test_wide_rows_and_many_rows(device, dtypes, rows, width):
    check(make(device, rows, width, dtypes) | random(device, rows))


# --- wrong calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("input_ids", "position_ids", "token_type_ids"))
@pytest.mark.parametrize("id", (-1, 50))
def test_an_id_that_the_table_does_not_have(name, id):
    inputs = make("cpu", 9, 8)
    inputs[name][4] = id
    for function in (run, ops.embedding_layer_norm):
        with pytest.raises(fastplm.FastplmError, match=f"`{name}` got id {id}; expected 0 … "):
            function(**inputs)


@pytest.mark.parametrize("name", ("input_ids", "position_ids", "token_type_ids"))
@pytest.mark.parametrize("id", (-1, 50))
def test_in_a_kernel_it_gives_nan(monkeypatch, device, name, id):
    """A GPU does not wait for the values of ids, so that they cannot be looked at before."""
    module = importlib.import_module("fastplm.ops.embedding_layer_norm")
    monkeypatch.setattr(module, "_check_range", lambda call: None)
    inputs = make(device, 9, 8)
    expected = run(**inputs)
    inputs[name][4] = id
    found = run(**inputs)
    assert found[4].isnan().all()
    others = [at for at in range(9) if at != 4]
    assert torch.equal(found[others], expected[others])
