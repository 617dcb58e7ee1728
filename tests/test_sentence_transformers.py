"""``fastplm.accelerate`` on the objects of sentence-transformers' own release."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder

import fastplm
from fastplm import models
from fastplm._backends import record_notes
from fastplm.nn._rows import kind_of

TEXTS = ["ab cd", "a long text that is here to make the other ones short", "b", "of the b c d"]
PAIRS = [("ab", "cd of it"), ("a long question that has no answer", "b")]


def embedded(model):
    return model.encode(TEXTS)


def scored(model):
    return model.predict(PAIRS)


def weighted(model):
    return model.encode(TEXTS, convert_to_sparse_tensor=False).numpy()


@pytest.mark.parametrize(
    "kind, run",
    [(SentenceTransformer, embedded), (CrossEncoder, scored), (SparseEncoder, weighted)],
)
def test_the_same_results_with_our_classes_inside(kind, run, checkpoint):
    options = {"num_labels": 1} if kind is CrossEncoder else {}
    torch.manual_seed(0)
    stock = kind(str(checkpoint), device="cpu", **options)
    ours = fastplm.freeze(fastplm.accelerate(copy.deepcopy(stock)))
    inner = [kind_of(module) for module in ours.modules()]
    assert models.BertModel in inner and transformers.BertModel not in inner
    with record_notes() as notes, fastplm.use_backend("cpp", "linear"):
        out = run(ours)
    # Not the error budget, as the library takes no fp64; the models are held to it in tests/models.
    np.testing.assert_allclose(out, run(stock), rtol=1e-4, atol=1e-5)
    text = "\n".join(notes)
    assert "padding left out" in text
    if fastplm._extension.lacks("encoder", "CPU") is None:
        assert "layers in one call of csrc/" in text
    np.testing.assert_array_equal(run(fastplm.restore(ours)), run(stock))


@pytest.mark.parametrize(
    "kind, run",
    [(SentenceTransformer, embedded), (CrossEncoder, scored), (SparseEncoder, weighted)],
)
def test_the_same_object_in_8_bits(kind, run, checkpoint, tmp_path):
    """The object computes in 8 bits, saves and loads them, and goes back."""
    options = {"num_labels": 1} if kind is CrossEncoder else {}
    torch.manual_seed(0)
    stock = kind(str(checkpoint), device="cpu", **options)
    ours = fastplm.quantize(fastplm.accelerate(copy.deepcopy(stock)), keep_weights=True)
    fastplm.freeze(ours)
    assert any(kind_of(module) is fastplm.nn.LinearInt8 for module in ours.modules())
    with record_notes() as notes:
        out = run(ours)
    assert np.isfinite(out).all() and not np.array_equal(out, run(stock))
    if fastplm._extension.lacks("encoder", "CPU") is None:
        assert "layers in one call of csrc/" in "\n".join(notes)
    torch.save(ours.state_dict(), tmp_path / "int8.pt")
    other = fastplm.quantize(kind(str(checkpoint), device="cpu", **options))
    other.load_state_dict(torch.load(tmp_path / "int8.pt"))
    np.testing.assert_array_equal(run(fastplm.freeze(fastplm.accelerate(other))), run(ours))
    np.testing.assert_array_equal(run(fastplm.restore(fastplm.dequantize(ours))), run(stock))
