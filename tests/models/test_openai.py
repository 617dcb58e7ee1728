"""fastplm.models.openai against the classes of the same names in Transformers."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from fastplm import models
from fastplm._backends import record_decisions
from fastplm.models import (
    OpenAIGPTDoubleHeadsModel,
    OpenAIGPTModel,
)

from .conftest import LENGTH, PADDINGS, ROWS, changed, eager_parent, small_config

VOCAB = 37
CONFIG = small_config("openai", n_embd=32)
CLASSES = [getattr(models, name) for name in models.__all__ if name.startswith("OpenAIGPT")]
RIGHT = PADDINGS["right"]
NAME = dict(ids=lambda value: getattr(value, "__name__", None))


def config(**changes):
    return changed(CONFIG, **changes)


def batch(mask=None):
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH))
    return ids if mask is None else ids.masked_fill(mask == 0, 0)


@pytest.mark.parametrize("ours", CLASSES, **NAME)
def test_padding_is_left_out_and_attention_fused(ours):
    model, shapes = ours(config()), []
    model.base_model.h[0].register_forward_hook(
        lambda module, args, out: shapes.append(tuple(args[0].shape[:2]))
    )
    ids = batch(RIGHT)
    with record_decisions() as decisions:
        model(ids, attention_mask=RIGHT)
        model(ids)
    rows = int(RIGHT.sum()) + (3 if ours is OpenAIGPTDoubleHeadsModel else 0)
    assert shapes == [(1, rows), (ROWS, LENGTH)]
    assert [decision.op for decision in decisions].count("attention") == 2 * CONFIG.n_layer


def test_accumulated_choices_are_one_batch(hold):
    """Language model and choice: their sum is what is learnt from."""
    ids = torch.randint(4, VOCAB, (ROWS, 2, LENGTH))
    # As many labels in each part, or the mean of the choices would weigh them unequally.
    labels, right = ids.masked_fill(torch.arange(LENGTH) % 3 == 0, -100), torch.tensor([0, 1, 1, 0])

    def run(model, rows, **items):
        total = 0.0
        for part in torch.arange(ROWS).split(rows):
            out = model(ids[part], labels=labels[part], mc_labels=right[part], **items)
            total = total + out.loss + out.mc_loss
        return {"loss": total}

    ours = OpenAIGPTDoubleHeadsModel(config())
    count = int((labels[..., 1:] != -100).sum())
    accumulated = lambda model: run(model, 2, num_items_in_batch=count)  # noqa: E731
    parent = eager_parent(OpenAIGPTDoubleHeadsModel, config())
    hold(ours, parent, accumulated, lambda model: run(model, ROWS))


def test_the_same_seed_drops_the_same():
    model = OpenAIGPTModel(config(attn_pdrop=0.5)).train()
    ids, runs = batch(RIGHT), []
    for seed, unpad in ((0, None), (0, None), (0, 30), (1, None)):
        torch.manual_seed(seed)
        runs.append(model(ids, attention_mask=RIGHT, unpad=unpad)[0])
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[3])
