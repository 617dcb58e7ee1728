"""What every class of every family promises: it is its parent of Transformers, faster."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch

from fastplm import models, ops
from fastplm.testing import KeptDouble, check_in_fp64

from .conftest import (
    FAMILIES,
    PADDINGS,
    VOCABULARY_HEADS,
    has_decoder,
    inputs_of,
    parent_of,
    small_config,
    with_classes,
)

PREFIXES = {
    **{family: family.capitalize() for family in FAMILIES},
    "gpt2": "GPT2",
    "openai": "OpenAIGPT",
}
CLASSES = {
    name: family
    for name in models.__all__
    for family, prefix in PREFIXES.items()
    if name.startswith(prefix) and "Joint" not in name
}
every_class = pytest.mark.parametrize("name", CLASSES)


def config_of(name):
    """A small configuration for the class of this name."""
    config = small_config(CLASSES[name])
    if name in ("BertLMHeadModel", "ElectraForCausalLM", "RobertaForCausalLM"):
        config.is_decoder = True
    if CLASSES[name] == "gpt2":
        # A cache keeps the padded path, which is not what is looked at here.
        config.use_cache = False
    return config


def takes_flat_labels(name):
    """Whether the parent of this class does."""
    heads = ("MaskedLM", "CausalLM", "LMHeadModel", "TokenClassification", "ForPreTraining")
    return name.endswith(heads) and name != "ElectraForPreTraining"


def test_every_family_has_its_classes():
    found = [name for name in models.__all__ if hasattr(getattr(models, name), "forward")]
    others = {"ElectraForJointPreTraining", "EncoderDecoderModel"}
    assert set(CLASSES) == set(found) - others and set(CLASSES.values()) == set(FAMILIES)


@pytest.mark.parametrize("padding", ["none", "right", "left", "dead row"])
@every_class
def test_equals_its_parent(hold_drop_in, name, padding):
    if name == "GPT2ForQuestionAnswering" and padding == "left":
        pytest.skip("its loss runs over padding, which sees nothing where it lies at the left")
    hold_drop_in(getattr(models, name), config_of(name), padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_are_as_exact_as_the_parents(hold_drop_in, family, dtype):
    """In the dtype that users train in; what is around the kernels is looked at in fp64."""
    heads = ("ForMaskedLM", "LMHeadModel", "ForConditionalGeneration")
    name = next(n for n, of in CLASSES.items() if of == family and n.endswith(heads))
    hold_drop_in(getattr(models, name), config_of(name), "right", dtype)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize(
    "name", [n for n in CLASSES if n.endswith(("Model", *VOCABULARY_HEADS)) and not has_decoder(n)]
)
def test_a_capacity_changes_nothing(hold_drop_in, name, padding):
    """24 tokens of a sequence or choice lie in 30 rows, whatever the batch."""
    rows = 90 if name.endswith("DoubleHeadsModel") else 30
    ours, config = getattr(models, name), config_of(name)
    hold_drop_in(ours, config, padding, unpad=rows)
    if name.removesuffix("Model") in PREFIXES.values():
        mask = PADDINGS[padding]
        hidden = ours(config)(**inputs_of(name, config, mask), unpad=rows)[0]
        # A pooler reads the first one, whatever it is.
        left_out = hidden[:, 1:][mask[:, 1:] == 0]
        assert not left_out.any(), "rows that are left out are 0"


@every_class
def test_checkpoints_go_both_ways(round_trip, name):
    round_trip(getattr(models, name), config_of(name))


@every_class
def test_arguments_come_in_the_parents_order(name):
    ours = getattr(models, name)
    theirs = list(inspect.signature(parent_of(ours).forward).parameters)
    theirs = [argument for argument in theirs if argument != "kwargs"]
    assert list(inspect.signature(ours.forward).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize("name", [n for n in CLASSES if takes_flat_labels(n)])
def test_labels_may_come_flat(name):
    """As in Transformers, which looks at all of them as one row."""
    config = with_classes(name, config_of(name))
    inputs = inputs_of(name, config, PADDINGS["right"])
    inputs["labels"] = inputs["labels"].flatten()
    model = getattr(models, name)(copy.deepcopy(config)).eval()
    parent = parent_of(type(model))(config).eval()
    parent.load_state_dict(model.state_dict())
    single = {"loss": parent(**inputs).loss.detach()}
    with KeptDouble():
        out = {"loss": model.double()(**inputs).loss.detach()}
        gold = {"loss": parent.double()(**inputs).loss.detach()}
    check_in_fp64(out, gold, single)


@pytest.mark.parametrize(
    "name", [n for n in CLASSES if n.endswith(VOCABULARY_HEADS) and n != "ElectraForPreTraining"]
)
def test_the_loss_is_told_how_many_rows_have_a_label_where_that_is_known(monkeypatch, name):
    """Positions of a collator, and next tokens; a device alone knows how many of N are masked."""
    told = []
    loss = ops.linear_cross_entropy

    def record(rows, *arguments, **options):
        told.append((options["expected_targets"], rows.shape[0]))
        return loss(rows, *arguments, **options)

    monkeypatch.setattr(ops, "linear_cross_entropy", record)
    config = config_of(name)
    model, inputs = getattr(models, name)(config), inputs_of(name, config, None)
    model(**inputs)
    [(expected, rows)] = told
    masked = "masked_positions" in inspect.signature(model.forward).parameters
    assert expected == (None if masked else rows)
    if masked:
        positions = (inputs["labels"].flatten() != -100).nonzero().flatten()
        model(**inputs, masked_positions=positions)
        assert told[1] == (len(positions), len(positions))
