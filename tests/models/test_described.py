"""Encoders that are descriptions: what their layers run, and what the small models of the contract
lack."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fastplm
from fastplm import models
from fastplm.models import _layer

from ..samples import Operators
from .conftest import (
    CLASSES,
    LABELS,
    LENGTH,
    PADDINGS,
    ROWS,
    compared,
    config_of,
    eager_parent,
    gradients,
    inputs_of,
    loss_of,
    pair,
    same,
)

FAMILIES = ("Esm", "NomicBert", "EuroBert", "ModernBert", "RobertaPreLayerNorm")
every_family = pytest.mark.parametrize("family", FAMILIES)
HOLES = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0, 1, 1, 1]])
HOLES = torch.cat((HOLES, HOLES.flip(1)))


@pytest.fixture
def queries(monkeypatch):
    """(the number of queries, that of keys) of each attention."""
    seen = []
    inner = _layer.ALL_ATTENTION_FUNCTIONS["fastplm"]

    def call(module, query, key, *given, **options):
        seen.append((query.shape[0] * query.shape[2], key.shape[0] * key.shape[2]))
        return inner(module, query, key, *given, **options)

    monkeypatch.setitem(_layer.ALL_ATTENTION_FUNCTIONS._local_mapping, "fastplm", call)
    return seen


@every_family
def test_functions_run_and_the_last_layer_computes_labelled_rows(family, runs, queries):
    """The norm of each block is in the function that ends the block before."""
    name = f"{family}ForMaskedLM"
    model = getattr(models, name)(config_of(name)).train()
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    labelled = int((inputs["labels"] != -100).sum())
    tokens = int(inputs["attention_mask"].sum())
    model(**inputs).loss.backward()
    assert queries == [(tokens, tokens), (labelled, tokens)]
    joined = family == "ModernBert"  # one product for query, key and value, also in the last layer
    assert runs == {"project": 2 if joined else 3, "join": 4, "expand": 2}


@every_family
@pytest.mark.parametrize("unpad", [None, False, 35])
def test_masks_with_holes(hold, family, unpad):
    """Positions are those of the padded batch, and so are the distances within a window."""
    name = f"{family}ForMaskedLM"
    ours, parent = pair(name)
    inputs = inputs_of(name, ours.config, HOLES)

    def run(model, **more):
        return compared(model(**inputs, **more), inputs, name)

    hold(ours, parent, lambda model: run(model, unpad=unpad), run)


@every_family
def test_a_packed_batch_is_its_sequences(hold, family):
    """Packed by the caller, with positions that begin anew."""
    name = f"{family}Model"
    ours, parent = pair(name)
    lengths = (2, 6, 4)
    ids = torch.randint(5, 30, (1, sum(lengths)))
    bounds = nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()
    packed = dict(cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, max_length_q=6, max_length_k=6)
    first = 2 if family == "RobertaPreLayerNorm" else 0
    places = torch.cat([torch.arange(n) + first for n in lengths])[None]
    if family == "Esm":
        ours.config.token_dropout = parent.config.token_dropout = False
        ours.embeddings.token_dropout = parent.embeddings.token_dropout = False

    def run(model):
        return {"out": model(input_ids=ids, position_ids=places, **packed)[0]}

    def each(model):
        return {"out": torch.cat([model(input_ids=one)[0] for one in ids.split(lengths, 1)], 1)}

    hold(ours, parent, run, each)


CHANGED = {
    "grouped heads": ("EuroBertForMaskedLM", dict(num_key_value_heads=1)),
    "biases, Llama": ("EuroBertForMaskedLM", dict(attention_bias=True, mlp_bias=True)),
    "biases": (
        "ModernBertForMaskedLM",
        dict(norm_bias=True, attention_bias=True, mlp_bias=True, decoder_bias=False),
    ),
    "an activation": ("ModernBertForMaskedLM", dict(hidden_activation="relu")),
    "a tanh": ("ModernBertForMaskedLM", dict(hidden_activation="gelu_pytorch_tanh")),
    "a window last": (
        "ModernBertForMaskedLM",
        dict(layer_types=["full_attention", "sliding_attention"]),
    ),
    "the mean": ("ModernBertForSequenceClassification", dict(classifier_pooling="mean")),
    "the first": ("EuroBertForSequenceClassification", dict(classifier_pooling="bos")),
    "positions in a table": ("EsmForMaskedLM", dict(position_embedding_type="absolute")),
    "no token dropout": ("EsmForMaskedLM", dict(token_dropout=False, emb_layer_norm_before=False)),
    "a gelu": ("NomicBertForMaskedLM", dict(hidden_act="gelu")),
}


@pytest.mark.parametrize("padding", ["right", "none"])
@pytest.mark.parametrize("case", CHANGED)
def test_other_configurations_equal_the_parents(hold_drop_in, case, padding):
    name, changed = CHANGED[case]
    hold_drop_in(getattr(models, name), config_of(name, **changed), padding)


def test_masked_tokens_scale_the_embeddings_of_their_own_sequence(hold):
    """ESM's: the share of masked tokens is that of a sequence, not of the packed rows."""
    ours, parent = pair("EsmForMaskedLM")
    inputs = inputs_of("EsmForMaskedLM", ours.config, PADDINGS["right"])
    inputs["input_ids"][1, :3] = ours.config.mask_token_id
    hold(ours, parent, loss_of(**inputs))


@pytest.mark.parametrize("ignored", [-100, 3])
def test_sparse_predictions_have_logits_of_labelled_tokens(ignored):
    name = "ModernBertForMaskedLM"
    ours, parent = pair(name, sparse_prediction=True, sparse_pred_ignore_index=ignored)
    inputs = inputs_of(name, ours.config, PADDINGS["right"])
    inputs["labels"][inputs["labels"] == 3] = 4
    inputs["labels"][inputs["labels"] == -100] = ignored
    found, expected = ours(**inputs), parent(**inputs)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits, expected.logits)
    assert ours.train()(**inputs).logits is None


#: Kinds of rotary positions with other frequencies for long texts, in models of 20 positions.
BY_LENGTH = {
    "dynamic": {"factor": 3.0},
    "longrope": {
        "factor": 1.5,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
        "original_max_position_embeddings": 20,
    },
}
ROTARY = [name for name in CLASSES if hasattr(config_of(name), "rope_parameters")]


@pytest.mark.parametrize("kind", BY_LENGTH)
@pytest.mark.parametrize("name", ROTARY)
def test_the_length_of_rotary_positions_is_that_of_the_padded_batch(name, kind):
    """By class, by ``accelerate`` and by name; frequencies that one batch has set, too."""
    config = config_of(name)
    given, rope = config.rope_parameters, {"rope_type": kind, **BY_LENGTH[kind]}
    if "rope_type" in given:
        config.rope_parameters = {**given, **rope}
    else:
        config.rope_parameters = {layers: {**one, **rope} for layers, one in given.items()}
    ours, parent = pair(name, config)
    made = [fastplm.accelerate(copy.deepcopy(parent)), copy.deepcopy(parent)]
    made[1].set_attn_implementation("fastplm")
    # (Tokens of the longest text, the length of the batch): what one sets, another one may reset.
    for longest, length in ((9, 40), (12, 20), (25, 30), (9, 12), (15, 21)):
        mask = torch.arange(length) < torch.tensor([longest, 5])[:, None]
        ids = torch.randint(5, 37, mask.shape).masked_fill(~mask, config.pad_token_id)
        inputs = {"input_ids": ids, "attention_mask": mask.long()}
        if name.endswith("MultipleChoice"):
            inputs = {key: value[:, None].repeat(1, 3, 1) for key, value in inputs.items()}
        expected = compared(parent(**inputs), inputs, name)
        for model in (ours, *made):
            found = compared(model(**inputs), inputs, name)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@every_family
def test_under_autocast_modules_and_functions_agree(family):
    name = f"{family}ForMaskedLM"
    model = getattr(models, name)(config_of(name)).train()
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    losses = []
    for backend in ("cpp", "eager"):
        asked = fastplm.use_backend(backend, "dropout_add_layer_norm", "bias_gelu")
        with torch.autocast("cpu", torch.bfloat16), asked:
            losses.append(model(**inputs).loss)
        gradients(model, losses[-1])
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)


@every_family
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_change_no_bit(family, reentrant):
    name = f"{family}ForMaskedLM"
    model = getattr(models, name)(config_of(name)).train()
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    plain = gradients(model, model(**inputs).loss)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert same(gradients(model, model(**inputs).loss), plain)


@every_family
def test_accelerate_takes_and_returns_a_model(family):
    name = f"{family}ForTokenClassification"
    config = config_of(name)
    config.num_labels = LABELS
    stock = eager_parent(getattr(models, name), config).eval()
    ids = torch.randint(5, 30, (ROWS, LENGTH))
    expected = stock(ids).logits
    assert type(fastplm.accelerate(stock)) is getattr(models, name)
    torch.testing.assert_close(stock(ids).logits, expected)
    assert torch.equal(fastplm.restore(stock)(ids).logits, expected)


@every_family
def test_freeze_leaves_it_to_its_modules(family):
    model = getattr(models, f"{family}Model")(config_of(f"{family}Model")).eval()
    ids = torch.randint(5, 30, (ROWS, LENGTH))
    with torch.no_grad():
        expected = model(ids).last_hidden_state
        assert torch.equal(fastplm.freeze(model)(ids).last_hidden_state, expected)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu", "relu"])
def test_a_fused_gate_equals_the_parents(activation):
    """Where the kernels run, the gate of one joined product is one of them, each way."""
    name = "ModernBertForMaskedLM"
    ours, parent = (one.train() for one in pair(name, hidden_activation=activation))
    inputs = inputs_of(name, ours.config, PADDINGS["right"])
    ops = ("dropout_add_layer_norm", "bias_gelu", "rotary")
    with fastplm.use_backend("triton", *ops), Operators() as operators:
        loss = ours(**inputs).loss
        found = gradients(ours, loss)
    assert ({"geglu_fwd", "geglu_bwd"} <= operators.names) == (activation != "relu")
    expected = parent(**inputs).loss
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(found, gradients(parent, expected), rtol=1e-3, atol=1e-4)


def test_grouped_heads_have_attention_weights():
    config = config_of("EuroBertModel")
    config.num_key_value_heads = 1
    assert config.num_attention_heads > 1
    ours = models.EuroBertModel(config).eval()
    parent = eager_parent(models.EuroBertModel, config).eval()
    parent.load_state_dict(ours.state_dict())
    ids = torch.randint(5, 30, (ROWS, LENGTH))
    found, expected = (one(ids, output_attentions=True).attentions for one in (ours, parent))
    torch.testing.assert_close(found, expected)
