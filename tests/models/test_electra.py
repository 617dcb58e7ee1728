"""fastplm.models.electra: tests beyond test_contract.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastplm.errors import ArgumentValueError
from fastplm.models import ElectraForMaskedLM, ElectraForMultipleChoice, ElectraForPreTraining

from .conftest import LENGTH, PADDINGS, ROWS, changed, eager_parent, loss_of, rows_of, small_config

CONFIG = small_config("electra", embedding_size=16, hidden_size=32, intermediate_size=48)
MASK = PADDINGS["right"]


def batch():
    return torch.randint(2, CONFIG.vocab_size, (ROWS, LENGTH))


def pair():
    return ElectraForPreTraining(CONFIG), eager_parent(ElectraForPreTraining, CONFIG)


@pytest.mark.parametrize("ours", [ElectraForMaskedLM, ElectraForPreTraining])
def test_embeddings_of_the_hidden_size_are_not_projected(hold_drop_in, ours):
    wide = changed(CONFIG, embedding_size=CONFIG.hidden_size)
    assert not hasattr(ours(wide).electra, "embeddings_project")
    hold_drop_in(ours, wide, "right")


@pytest.mark.parametrize("summary", ["last", "mean", "cls_index"])
def test_multiple_choice_with_any_summary_type(hold_drop_in, summary):
    """These types of summary read padding, too."""
    hold_drop_in(ElectraForMultipleChoice, changed(CONFIG, summary_type=summary), "right")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_labels_of_any_dtype_give_the_loss_of_the_parent(hold, dtype):
    given = {"input_ids": batch(), "attention_mask": MASK}
    labels = torch.rand(ROWS, LENGTH) < 0.3
    ours = loss_of(**given, labels=labels.to(dtype))
    hold(*pair(), ours, loss_of(**given, labels=labels))


def test_labels_of_minus_100_are_ignored(hold):
    ids, labels, mask = batch(), (torch.rand(ROWS, LENGTH) < 0.3).long(), MASK.bool()

    def parent_run(model):
        logits = model(ids).logits[mask]
        target = labels[mask].to(logits.dtype)
        return {"loss": nn.functional.binary_cross_entropy_with_logits(logits, target)}

    ours, parent = pair()
    hold(ours, parent, loss_of(ids, labels=labels.masked_fill(~mask, -100)), parent_run)
    assert ours(ids, labels=torch.full_like(labels, -100)).loss.item() == 0.0
    with pytest.raises(ArgumentValueError, match="labels"):
        ours(ids, labels=torch.zeros(ROWS, 2))


def test_a_hook_on_the_detection_layer_is_called(hold):
    """The loss reads this layer's weight, but calls the layer if it has a hook or an adapter."""
    models = pair()
    for model in models:
        layer = model.discriminator_predictions.dense_prediction
        layer.register_forward_hook(lambda _, __, out: 3 * out - 1)
    ids = batch()
    hold(*models, loss_of(ids, attention_mask=MASK, labels=ids % 2))


def test_the_discriminators_head_sees_the_tokens_alone():
    ids, model = batch(), ElectraForPreTraining(CONFIG)
    ids = ids.masked_fill(MASK == 0, CONFIG.pad_token_id)
    seen = rows_of(model.discriminator_predictions.dense)
    given = {"attention_mask": MASK, "labels": ids % 2}
    assert model(ids, **given).logits is None
    logits = model(ids, **given, output_logits=True).logits
    assert logits.shape == (ROWS, LENGTH) and not logits[MASK == 0].any()
    model(ids, **given, unpad=False)
    model(ids, **given, unpad=30)
    assert seen == [(1, int(MASK.sum()))] * 2 + [(ROWS, LENGTH), (1, 30)]
