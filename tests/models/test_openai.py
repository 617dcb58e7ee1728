"""fastplm.models.openai against the classes of the same names in Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import transformers
from transformers import OpenAIGPTConfig

from fastplm import models
from fastplm._backends import record_decisions
from fastplm._checks import ArgumentValueError
from fastplm.models import (
    OpenAIGPTDoubleHeadsModel,
    OpenAIGPTForSequenceClassification,
    OpenAIGPTLMHeadModel,
    OpenAIGPTModel,
    _gpt,
)

VOCAB, ROWS, LENGTH = 37, 4, 9
CONFIG = OpenAIGPTConfig(
    vocab_size=VOCAB,
    n_embd=32,
    n_layer=2,
    n_head=2,
    n_positions=20,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    summary_first_dropout=0.0,
    initializer_range=0.3,
    pad_token_id=0,
)
CLASSES = [getattr(models, name) for name in models.__all__ if name.startswith("OpenAIGPT")]
RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 8 + [0], [1] * 2 + [0] * 7])
LEFT = RIGHT.flip(1)
NAME = dict(ids=lambda value: getattr(value, "__name__", None))


def config(**changed):
    config = copy.deepcopy(CONFIG)
    config.update(changed)
    return config


def parent_of(ours, config):
    return getattr(transformers, ours.__name__)(config)


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


@pytest.mark.parametrize("embedded", [False, True], ids=["ids", "inputs_embeds"])
@pytest.mark.parametrize("padding", [None, LEFT], ids=["none", "left"])
def test_token_types_and_positions_of_the_users(hold, padding, embedded):
    ids, types = batch(padding), torch.randint(4, VOCAB, (ROWS, LENGTH))
    positions, labels = torch.arange(LENGTH).flip(0)[None], ids
    if padding is not None:
        labels = ids.masked_fill((LEFT * LEFT.roll(1, 1)) == 0, -100)

    def run(model):
        given = {"input_ids": ids}
        if embedded:
            given = {"inputs_embeds": model.transformer.tokens_embed(ids)}
        given.update(attention_mask=padding, token_type_ids=types, position_ids=positions)
        return {"loss": model(**given, labels=labels).loss}

    hold(OpenAIGPTLMHeadModel(config()), parent_of(OpenAIGPTLMHeadModel, config()), run)


@pytest.mark.parametrize("ours", [OpenAIGPTLMHeadModel, OpenAIGPTDoubleHeadsModel], **NAME)
def test_labels_on_padding_count(hold, ours):
    """As with labels=input_ids."""
    ids = batch(RIGHT)
    run = lambda model: {"loss": model(ids, attention_mask=RIGHT, labels=ids).loss}  # noqa: E731
    hold(ours(config()), parent_of(ours, config()), run)


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
    parent = parent_of(OpenAIGPTDoubleHeadsModel, config())
    hold(ours, parent, accumulated, lambda model: run(model, ROWS))


def test_the_same_seed_drops_the_same():
    model = OpenAIGPTModel(config(attn_pdrop=0.5)).train()
    ids, runs = batch(RIGHT), []
    for seed, unpad in ((0, None), (0, None), (0, 30), (1, None)):
        torch.manual_seed(seed)
        runs.append(model(ids, attention_mask=RIGHT, unpad=unpad)[0])
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[3])


def test_attentions_are_the_parents_and_said_to_be_slow(hold, monkeypatch):
    ids, warnings = batch(RIGHT), []
    monkeypatch.setattr(_gpt._logger, "warning_once", warnings.append)

    def run(model):
        out = model(ids, attention_mask=RIGHT, output_attentions=True)
        weights = dict(zip("01", out.attentions, strict=True))
        return {**weights, "loss": sum(w.square().sum() for w in weights.values())}

    hold(OpenAIGPTModel(config()), parent_of(OpenAIGPTModel, config()), run)
    assert len(warnings) == 1 and "output_attentions" in warnings[0]


def test_classification_without_a_padding_token_takes_one_sequence():
    model = OpenAIGPTForSequenceClassification(config(pad_token_id=None))
    parent = parent_of(OpenAIGPTForSequenceClassification, config(pad_token_id=None))
    parent.load_state_dict(model.state_dict())
    ids = batch()
    torch.testing.assert_close(model(ids[:1]).logits, parent(ids[:1]).logits)
    for each, error in ((parent, ValueError), (model, ArgumentValueError)):
        with pytest.raises(error, match="pad"):
            each(ids)


SEARCHES = {
    "greedy": {"do_sample": False},
    "beam": {"num_beams": 3},
    "sampling": {"do_sample": True, "top_k": 20},
}


@pytest.mark.parametrize("search", SEARCHES)
def test_generation_gives_the_parents_tokens(search):
    ours = OpenAIGPTLMHeadModel(config()).eval()
    parent = parent_of(OpenAIGPTLMHeadModel, config()).eval()
    parent.load_state_dict(ours.state_dict())
    ids, tokens = batch(LEFT), []
    for model in (parent, ours):
        torch.manual_seed(0)
        options = {"max_new_tokens": 8, "eos_token_id": None, **SEARCHES[search]}
        tokens.append(model.generate(ids, attention_mask=LEFT, **options))
    assert tokens[0].shape == (ROWS, LENGTH + 8)
    assert torch.equal(*tokens)


def test_compiled_once_for_all_batches_of_a_shape(hold):
    torch._dynamo.reset()
    model = OpenAIGPTLMHeadModel(config())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for step in range(2):
        mask = RIGHT.roll(step, 0)
        ids = batch(mask)
        inputs = {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

        def run(model, ids=ids, inputs=inputs, **more):
            return {"loss": model(ids, **inputs, **more).loss}

        parent = parent_of(OpenAIGPTLMHeadModel, config())
        hold(model, parent, lambda _, run=run: run(compiled, unpad=30), run)
    assert counter.frame_count == 1
