"""fastplm.models.bert against the classes of the same names in Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import nn

import fastplm
from fastplm import models
from fastplm._budget import GRADIENT_FACTOR, check_error
from fastplm._machine import peak_bytes
from fastplm.errors import ArgumentTypeError, ArgumentValueError
from fastplm.models import BertForMaskedLM, BertForPreTraining
from fastplm.nn import MLMHead

from ..samples import Operators
from . import conftest
from .conftest import LENGTH, ROWS, Storages, eager_parent, gradients, same, small_config

VOCAB = 37
CONFIG = small_config("bert", hidden_size=32, intermediate_size=48)


def config():
    return copy.deepcopy(CONFIG)


def batch(mask=None):
    """Ids, and labels at a third of the tokens; the first label is token id 0."""
    ids = torch.randint(1, VOCAB, (ROWS, LENGTH))
    chosen = torch.rand(ROWS, LENGTH) < 0.3
    chosen[0, 0] = True
    if mask is not None:
        chosen &= mask.bool()
    labels = ids.masked_fill(~chosen, -100)
    labels[0, 0] = 0
    return ids.masked_fill(chosen, 1), labels


@pytest.mark.parametrize("count", [None, 0])
def test_no_pair_labelled_is_loss_0(count):
    ids, labels = batch()
    nothing = {
        "labels": torch.full_like(labels, -100),
        "next_sentence_label": torch.full((ROWS,), -100),
    }
    loss = BertForPreTraining(config())(ids, **nothing, num_sequences_in_batch=count).loss
    assert loss.item() == 0.0


def test_next_sentence_shares_sum_to_1_without_a_count_of_sequences(hold):
    ids, labels = batch()
    labels[:] = -100
    labels[:, 2:4] = 7
    pairs = torch.tensor([0, 1, 1, 0])

    def halves(model):
        given = [
            {"input_ids": ids[part], "labels": labels[part], "next_sentence_label": pairs[part]}
            for part in (slice(0, 2), slice(2, 4))
        ]
        return {"loss": sum(model(**each, num_items_in_batch=8).loss for each in given)}

    whole = conftest.loss_of(ids, labels=labels, next_sentence_label=pairs)
    model = BertForPreTraining(config())
    hold(model, model, halves, whole)


# --- the tied table -------------------------------------------------------------------------------

HEADS = [BertForMaskedLM, BertForPreTraining]
WORDS = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"


def loss_of(model, ids, labels):
    pairs = {}
    if hasattr(model.cls, "seq_relationship"):
        pairs["next_sentence_label"] = torch.arange(ROWS) % 2
    return {"loss": model(ids, labels=labels, **pairs).loss}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("cls", HEADS)
def test_the_tables_gradient_is_one_tensor(cls, checkpointing):
    ids, labels = batch()
    model = cls(config()).train()
    if checkpointing:
        model.gradient_checkpointing_enable()

    def backward():
        loss = model(ids, labels=labels).loss
        with Storages(VOCAB * CONFIG.hidden_size) as tables:
            found = gradients(model, loss)
        return len(tables.found), found

    tables, found = backward()
    assert tables == 1
    # A direct call of the embedding gives the same bits.
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: None)
    tables, expected = backward()
    assert tables > 1 and same(found, expected)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Albert", "Electra"])
def test_embeddings_in_one_call_share_the_gradient(device, family):
    """The kernel of the embeddings adds its rows to the gradient of the head."""
    ids, labels = (one.to(device) for one in batch())
    small = small_config(family.lower(), hidden_size=32, intermediate_size=48, embedding_size=32)
    model = getattr(models, f"{family}ForMaskedLM")(small).to(device).train()
    theirs = gradients(model, model(ids, labels=labels).loss)
    exact = copy.deepcopy(model).double()
    gold = gradients(exact, exact(ids, labels=labels).loss)
    with fastplm.use_backend("triton", "embedding_layer_norm"), Operators() as operators:
        found = gradients(model, model(ids, labels=labels).loss)
    assert {"embedding_layer_norm_bwd", "add_rows_"} <= operators.names
    assert "embedding_dense_backward" not in operators.names
    assert found.keys() == gold.keys()
    for name, grad in found.items():
        check_error(name, grad, gold[name], [theirs[name]], GRADIENT_FACTOR, [*gold.values()])


@pytest.mark.parametrize("cls", HEADS)
def test_an_untied_head_keeps_its_own_table(hold, cls):
    ids, labels = batch()
    apart = conftest.changed(CONFIG, tie_word_embeddings=False)
    ours = cls(apart)
    nn.init.normal_(ours.cls.predictions.decoder.weight)
    hold(ours, eager_parent(cls, apart), lambda model: loss_of(model, ids, labels))
    parameters = dict(ours.named_parameters())
    assert not torch.equal(parameters[WORDS].grad, parameters[DECODER].grad)


def test_the_default_attention_is_fastplm():
    own = config()
    model = BertForMaskedLM(own)
    assert model.config._attn_implementation == "fastplm"
    assert model.bert.config is model.config
    assert own._attn_implementation is None, "the caller's configuration is not changed"
    chosen = BertForMaskedLM._from_config(config(), attn_implementation="sdpa")
    assert chosen.config._attn_implementation == "sdpa"
    with_weights = copy.deepcopy(CONFIG)
    with_weights.output_attentions = True
    assert BertForMaskedLM(with_weights).config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"labels": torch.zeros(ROWS, 3, dtype=torch.int64)}, ArgumentValueError, "labels"),
        ({"labels": torch.zeros(ROWS, LENGTH)}, ArgumentTypeError, "labels"),
        ({"labels": torch.full((ROWS, LENGTH), VOCAB)}, ArgumentValueError, "target"),
        ({"input_ids": torch.full((ROWS, LENGTH), VOCAB)}, ArgumentValueError, "vocabulary"),
        ({"input_ids": torch.full((ROWS, LENGTH), -1)}, ArgumentValueError, "vocabulary"),
        ({"input_ids": torch.zeros(ROWS, LENGTH)}, ArgumentTypeError, "input_ids"),
        ({"masked_positions": torch.zeros(3)}, ArgumentTypeError, "masked_positions"),
        ({"masked_positions": torch.zeros(1, 3).long()}, ArgumentValueError, "masked_positions"),
        ({"masked_positions": torch.tensor([ROWS * LENGTH])}, ArgumentValueError, "positions"),
    ],
)
def test_bad_input_raises_a_typed_error(change, error, words):
    ids, labels = batch()
    for cls in (BertForMaskedLM, BertForPreTraining):
        with pytest.raises(error, match=words):
            cls(config())(**{"input_ids": ids, "labels": labels, **change})


def test_the_loss_needs_at_most_a_quarter_of_the_memory():
    """The peak of forward and backward counts, with the gradient of the vocabulary's weight."""
    sizes = config()
    sizes.vocab_size, batch_size, length = 3000, 8, 64
    parent = transformers.BertForMaskedLM._from_config(sizes)
    head = parent.cls.predictions
    hidden = torch.randn(batch_size, length, sizes.hidden_size, requires_grad=True)
    ids = torch.randint(0, sizes.vocab_size, (batch_size, length))
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.15, -100)

    def theirs():
        logits = parent.cls(hidden)
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()

    def ours():
        MLMHead(head.transform, head.decoder)(hidden, labels).backward()

    peaks = []
    for run in (theirs, ours):
        for _ in range(2):  # the first call makes the allocations that stay
            parent.zero_grad()
            hidden.grad = None
            peak = peak_bytes(run, torch.device("cpu"))
        peaks.append(peak)
    assert peaks[1] <= peaks[0] / 4, peaks
