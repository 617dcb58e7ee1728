"""fastplm.models.albert against Transformers; what ALBERT's layers share, and change."""

from __future__ import annotations

import copy
import itertools
import json
import math

import pytest
import torch
import torch._dynamo.testing
import transformers
from torch import nn
from transformers import AlbertConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from fastplm import models
from fastplm.errors import ArgumentValueError
from fastplm.models import (
    AlbertForMaskedLM,
    AlbertForSequenceClassification,
    AlbertModel,
)

from .conftest import (
    LENGTH,
    PADDINGS,
    ROWS,
    eager_parent,
    gradients,
    in_own_memory,
    loss_of,
    rows_of,
    same,
    small_config,
)

VOCAB, LAYERS = 37, 3
MASK = PADDINGS["right"]
MODES = ["attention", "feed_forward", "none"]


def config(**changes):
    sizes = dict(embedding_size=12, hidden_size=32, intermediate_size=48, initializer_range=0.2)
    return small_config("albert", **{**sizes, "num_hidden_layers": LAYERS, **changes})


def shared(mode, **changes):
    groups = 1 if mode == "all" else LAYERS
    return config(num_hidden_groups=groups, parameter_sharing=mode, **changes)


def batch(mask=MASK):
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH)) * mask
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH) > 0.3, -100).masked_fill(mask == 0, -100)
    labels[0, 1] = labels[2, 4] = 5
    return ids, labels


# --- every class against its parent ---------------------------------------------------------------


@pytest.mark.parametrize(
    "layers",
    [
        {"num_hidden_layers": 2, "num_hidden_groups": 2, "inner_group_num": 2},
        {"num_hidden_layers": 1},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 5, "num_hidden_groups": 3},
        {"num_hidden_layers": 2, "embedding_size": 1},
        {"num_hidden_layers": 1, "embedding_size": 32},
        {"num_hidden_layers": 2, "embedding_size": 40},
        {"num_hidden_layers": 2, "chunk_size_feed_forward": 9},
    ],
    ids=lambda layers: " ".join(f"{name}={value}" for name, value in layers.items()),
)
def test_layers_groups_and_embeddings_of_any_number(hold_drop_in, layers):
    hold_drop_in(AlbertForMaskedLM, config(**layers), "right")


def calls_of(model):
    """A list to which each call of a layer adds its number of rows."""
    return rows_of(*(layer.ffn for layer in layers_of(model)))


@pytest.mark.parametrize("layers", [{}, {"num_hidden_groups": 2, "inner_group_num": 2}])
def test_only_the_last_call_computes_fewer_rows(layers):
    ids, labels = batch()
    tokens, calls = int(MASK.sum()), LAYERS * layers.get("inner_group_num", 1)
    labelled = int((labels != -100).sum())
    for cls, wanted, arguments in (
        (AlbertForMaskedLM, labelled, {"labels": labels}),
        (AlbertForSequenceClassification, ROWS, {}),
        (AlbertModel, tokens, {}),
    ):
        model = cls(config(**layers))
        seen = calls_of(model)
        model(ids, attention_mask=MASK, **arguments)
        assert [math.prod(shape) for shape in seen] == [tokens] * (calls - 1) + [wanted]


def test_a_user_layer_computes_all_rows(hold):
    """A user's layer may know nothing of rows to leave out, nor of packed rows."""

    class Own(transformers.models.albert.modeling_albert.AlbertAttention):
        pass

    ids, labels = batch()
    ours = AlbertForMaskedLM(config())
    ours.albert.encoder.albert_layer_groups[0].albert_layers[0].attention.__class__ = Own

    run = loss_of(ids, attention_mask=MASK, labels=labels)
    hold(ours, eager_parent(AlbertForMaskedLM, ours.config), run)
    seen = calls_of(ours)
    run(ours)
    assert [math.prod(shape) for shape in seen] == [MASK.numel()] * LAYERS


# --- what the layers share ------------------------------------------------------------------------


def layers_of(model):
    groups = model.base_model.encoder.albert_layer_groups
    return list(itertools.chain.from_iterable(group.albert_layers for group in groups))


def tie_by_hand(model, mode):
    """The layers of Transformers' model share modules."""
    first, *others = layers_of(model)
    parts = {
        "attention": ["attention"],
        "feed_forward": ["ffn", "ffn_output", "full_layer_layer_norm"],
    }
    for layer, part in itertools.product(others, parts[mode]):
        setattr(layer, part, getattr(first, part))
    return model


@pytest.mark.parametrize("mode", ["attention", "feed_forward"])
def test_gradients_of_shared_parts_add_up(hold, mode):
    ids, labels = batch()
    ours = AlbertForMaskedLM(shared(mode, inner_group_num=2))
    parent = tie_by_hand(eager_parent(AlbertForMaskedLM, ours.config), mode)
    assert dict(ours.named_parameters()).keys() == dict(parent.named_parameters()).keys()
    hold(ours, parent, loss_of(ids, attention_mask=MASK, labels=labels))


@pytest.mark.slow
@pytest.mark.parametrize("tied_words", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cls", [AlbertModel, AlbertForMaskedLM])
def test_a_shared_checkpoint_is_one_of_transformers(hold, tmp_path, cls, mode, tied_words):
    """In Transformers a step of training then makes the copies differ; here it cannot."""
    ours = cls(shared(mode, tie_word_embeddings=tied_words)).eval()
    ours.save_pretrained(tmp_path / "ours")
    assert json.loads((tmp_path / "ours/config.json").read_text())["parameter_sharing"] == mode
    parent = getattr(transformers, cls.__name__)
    theirs, report = parent.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    ids, _ = batch()
    hold(ours, theirs, lambda m: {"out": m(ids, attention_mask=MASK)[0][MASK.bool()]})

    theirs.save_pretrained(tmp_path / "theirs")
    back, report = cls.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values()), report
    assert [n for n, _ in back.named_parameters()] == [n for n, _ in ours.named_parameters()]
    for name, value in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    assert torch.equal(in_own_memory(back)(ids)[0], ours(ids)[0])

    if mode != "none":
        changed = layers_of(theirs)[1]
        part = changed.attention.query if mode == "attention" else changed.ffn
        nn.init.ones_(part.weight)
        theirs.save_pretrained(tmp_path / "apart")
        with pytest.raises(ArgumentValueError, match="parameter_sharing='none'"):
            cls.from_pretrained(tmp_path / "apart")
        cls.from_pretrained(tmp_path / "apart", parameter_sharing="none")


@pytest.mark.parametrize("mode", MODES)
def test_resize_and_copy_keep_the_sharing(mode):
    ours = AlbertForMaskedLM(shared(mode))
    shared_before = [name for name, _ in ours.named_parameters()]
    ours.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    other = copy.deepcopy(ours).to(torch.bfloat16).float()
    other.tie_weights()
    for model in (ours, other):
        assert [name for name, _ in model.named_parameters()] == shared_before


def test_a_mode_that_does_not_fit_raises():
    with pytest.raises(ArgumentValueError, match="parameter_sharing.*'some'"):
        AlbertModel(config(parameter_sharing="some"))
    for cls, mode in itertools.product((AlbertModel, AlbertForMaskedLM), MODES):
        with pytest.raises(ArgumentValueError, match=f"num_hidden_groups={LAYERS}"):
            cls(config(parameter_sharing=mode))


PAPER = {
    (768, "all"): 31,
    (768, "attention"): 83,
    (768, "feed_forward"): 57,
    (768, "none"): 108,
    (128, "all"): 12,
    (128, "attention"): 64,
    (128, "feed_forward"): 38,
    (128, "none"): 89,
}


@pytest.mark.parametrize(("embedding", "mode"), PAPER)
def test_parameter_counts_of_the_paper(embedding, mode):
    """The counts of Lan et al. 2019, table 4, in millions.

    The models of 108M and 89M are counted there without the pooler, the others with it. If the
    embeddings are as wide as the layers the paper has no projection, but Transformers has one.
    """
    sizes = AlbertConfig(
        vocab_size=30_000,
        embedding_size=embedding,
        hidden_size=768,
        num_attention_heads=12,
        intermediate_size=3072,
        num_hidden_groups=1 if mode == "all" else 12,
        parameter_sharing=mode,
    )
    with torch.device("meta"):
        model = AlbertModel(sizes)

    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    total = count(model)
    if embedding == 768:
        total -= count(model.encoder.embedding_hidden_mapping_in)
    if mode == "none":
        total -= count(model.pooler)
    assert round(total / 1e6) == PAPER[embedding, mode]


# --- as users run it ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["all", "feed_forward"])
def test_gradient_checkpointing_changes_no_bit(mode):
    """Transformers' ALBERT has no gradient checkpointing."""
    ids, labels = batch()
    model = AlbertForMaskedLM(shared(mode, hidden_dropout_prob=0.1)).train()
    calls = calls_of(model)

    def run():
        calls.clear()
        torch.manual_seed(1)
        found = gradients(model, model(ids, attention_mask=MASK, labels=labels).loss)
        return found, len(calls)

    plain, once = run()
    model.gradient_checkpointing_enable()
    found, twice = run()
    assert (once, twice) == (LAYERS, 2 * LAYERS) and same(found, plain)


@pytest.mark.parametrize("name", [name for name in models.__all__ if name.startswith("Albert")])
def test_an_old_configuration_that_asks_for_checkpointing(name):
    """Transformers' ALBERT cannot, and ignores it; the layers here can."""
    model = getattr(models, name)(small_config("albert", gradient_checkpointing=True))
    layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
    assert layers and all(layer.gradient_checkpointing for layer in layers)
    assert not hasattr(model.config, "gradient_checkpointing"), "as in other families"
