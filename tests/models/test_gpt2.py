"""fastplm.models.gpt2 against the classes of the same names in Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing

from fastplm import models
from fastplm._checks import ArgumentValueError
from fastplm.models import (
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    _gpt,
)

from .conftest import LENGTH, PADDINGS, ROWS, changed, eager_parent, small_config

VOCAB = 37
CONFIG = small_config("gpt2", n_embd=32, n_inner=48, n_positions=40, use_cache=False)
CLASSES = [getattr(models, name) for name in models.__all__ if name.startswith("GPT2")]
RIGHT = PADDINGS["right"]
NAME = dict(ids=lambda value: getattr(value, "__name__", None))


def config(**changes):
    return changed(CONFIG, **changes)


def batch(mask=None):
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH))
    return ids if mask is None else ids.masked_fill(mask == 0, 0)


def rows_computed(model, **inputs):
    """[rows of the batch, rows of a sequence] that go through the layers."""
    seen = []
    hook = model.base_model.h[0].register_forward_hook(
        lambda module, args, out: seen.append(tuple(args[0].shape[:2]))
    )
    model(**inputs)
    hook.remove()
    return seen


@pytest.mark.parametrize("ours", CLASSES, **NAME)
def test_padding_is_left_out(ours):
    inputs = {"input_ids": batch(RIGHT), "attention_mask": RIGHT}
    if ours in (GPT2Model, GPT2LMHeadModel, GPT2DoubleHeadsModel):
        # By default, the other classes return no cache.
        inputs["use_cache"] = False
    if "QuestionAnswering" in ours.__name__:
        inputs["exclude_padding"] = True
    expected = int(RIGHT.sum())
    if ours is GPT2DoubleHeadsModel:
        # By default the last token is classified, which is padding in three rows.
        expected += 3
    assert rows_computed(ours(config(use_cache=True)), **inputs) == [(1, expected)]


@pytest.mark.parametrize("use_cache", [None, True])
def test_a_cache_keeps_the_parents_padded_path(hold, use_cache):
    ids = batch(RIGHT)
    ours = GPT2LMHeadModel(config(use_cache=True))
    inputs = {"input_ids": ids, "attention_mask": RIGHT, "use_cache": use_cache}
    assert rows_computed(ours, **inputs) == [(ROWS, LENGTH)]
    assert (ours(**inputs, labels=ids).past_key_values is None) == (use_cache is None)

    def run(model):
        """Two steps: the second one's positions begin where the first ended."""
        out = model(ids[:, :5], use_cache=use_cache)
        out = model(ids[:, 5:], past_key_values=out.past_key_values, use_cache=use_cache)
        return {"logits": out.logits, "loss": out.logits.square().sum()}

    hold(ours, eager_parent(GPT2LMHeadModel, config(use_cache=True)), run)


@pytest.mark.parametrize("option", ["scale_attn_by_inverse_layer_idx", "scale_attn_weights"])
def test_the_scale_of_attention_is_the_parents(hold_drop_in, option):
    hold_drop_in(GPT2LMHeadModel, config(**{option: not getattr(CONFIG, option)}), "right")


def test_reorder_and_upcast_attn_affects_only_eager_attention():
    """As in the parent, whose other implementations do not read the option either."""
    models = [GPT2Model(config(reorder_and_upcast_attn=option)) for option in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    ids = batch(RIGHT)
    assert torch.equal(*(model(ids, attention_mask=RIGHT)[0] for model in models))


# --- cross-attention ------------------------------------------------------------------------------

SOURCE_MASK = torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [1] + [0] * 5, [0] * 2 + [1] * 4])


@pytest.mark.parametrize("padding", [None, RIGHT], ids=["none", "right"])
def test_cross_attention_equals_the_parents(hold, padding):
    ids, states = batch(padding), torch.randn(ROWS, 6, CONFIG.n_embd)
    labels = ids if padding is None else ids.masked_fill(padding == 0, -100)

    def run(model, states=states):
        out = model(
            ids,
            attention_mask=padding,
            encoder_hidden_states=states.to(model.dtype),
            encoder_attention_mask=SOURCE_MASK,
            labels=labels,
        )
        return {"loss": out.loss}

    ours = GPT2LMHeadModel(config(add_cross_attention=True))
    hold(ours, eager_parent(GPT2LMHeadModel, config(add_cross_attention=True)), run)
    garbage = states.masked_fill(SOURCE_MASK[:, :, None] == 0, 1e6)
    assert torch.equal(run(ours, garbage)["loss"], run(ours)["loss"])


def test_gradient_checkpointing_changes_no_bit():
    ids, states = batch(RIGHT), torch.randn(ROWS, 6, CONFIG.n_embd)
    model = GPT2LMHeadModel(config(add_cross_attention=True, attn_pdrop=0.3)).train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(0)
        model.zero_grad()
        model(ids, attention_mask=RIGHT, encoder_hidden_states=states, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


# --- heads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["regression", "several"])
def test_classification_with_other_losses(hold, kind):
    labels = torch.randn(ROWS, 1) if kind == "regression" else torch.rand(ROWS, 3).round()
    changed = config(num_labels=labels.shape[1])
    ids = batch(RIGHT)

    def run(model):
        out = model(ids, attention_mask=RIGHT, labels=labels.to(model.dtype))
        return {"loss": out.loss, "logits": out.logits}

    ours = GPT2ForSequenceClassification(copy.deepcopy(changed))
    hold(ours, eager_parent(GPT2ForSequenceClassification, changed), run)


def test_classification_reads_one_row_a_sequence():
    model = GPT2ForSequenceClassification(config())
    seen = []
    model.score.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    ids = batch(RIGHT)
    model(ids, attention_mask=RIGHT)
    assert seen == [(ROWS, CONFIG.n_embd)]
    parent = eager_parent(GPT2ForSequenceClassification, config())
    parent.load_state_dict(model.state_dict())
    embedded = {"inputs_embeds": model.transformer.wte(ids)}
    close = torch.testing.assert_close
    close(model(**embedded).logits, parent(**embedded).logits)
    # Without a mask padding is a token as any other, but still not the last.
    close(model(ids).logits, parent(ids).logits)


def test_double_heads_read_the_rows_of_a_loss_alone():
    model = GPT2DoubleHeadsModel(config())
    ids = batch().expand(3, ROWS, LENGTH)
    labels = torch.full_like(ids, -100)
    labels[0, 0, 3] = 5
    out = model(ids, labels=labels, mc_labels=torch.zeros(3, dtype=torch.int64))
    assert out.logits is None and out.mc_logits.shape == (3, ROWS)
    asked = model(ids, labels=labels, output_logits=True)
    assert asked.logits.shape == (3, ROWS, LENGTH, VOCAB)
    assert torch.equal(asked.logits, model(ids).logits)
    with pytest.raises(ArgumentValueError, match="mc_token_ids"):
        model(ids, mc_token_ids=torch.full((3, ROWS), LENGTH))


@pytest.mark.parametrize("summary", ["cls_index", "mean", "last", "first"])
@pytest.mark.parametrize("choices", [(), (2,)], ids=["[B, T]", "[B, C, T]"])
def test_double_heads_with_any_summary(hold, summary, choices):
    changed = config(summary_type=summary)
    ids = batch(RIGHT).view(-1, *choices, LENGTH)
    mask = RIGHT.view(ids.shape)

    def run(model):
        out = model(ids, attention_mask=mask)
        return {"mc_logits": out.mc_logits, "loss": out.mc_logits.square().sum()}

    ours = GPT2DoubleHeadsModel(copy.deepcopy(changed))
    hold(ours, eager_parent(GPT2DoubleHeadsModel, changed), run)


def test_output_attentions_equal_the_parents_and_warn(hold, monkeypatch):
    ids, warnings = batch(RIGHT), []
    states = torch.randn(ROWS, 6, CONFIG.n_embd)

    def run(model):
        out = model(
            ids,
            attention_mask=RIGHT,
            encoder_hidden_states=states.to(model.dtype),
            encoder_attention_mask=SOURCE_MASK,
            output_attentions=True,
        )
        names = ("self 0", "self 1", "cross 0", "cross 1")
        weights = dict(zip(names, out.attentions + out.cross_attentions, strict=True))
        return {**weights, "loss": sum(w.square().sum() for w in weights.values())}

    parent = eager_parent(GPT2Model, config(add_cross_attention=True))
    # It has no weights.
    parent._supports_sdpa = False
    monkeypatch.setattr(_gpt._logger, "warning_once", warnings.append)
    hold(GPT2Model(config(add_cross_attention=True)), parent, run)
    assert len(warnings) == 1 and "output_attentions" in warnings[0]


def test_a_4d_mask_is_used_unchanged(hold):
    ids = batch()
    mask = torch.rand(ROWS, 1, LENGTH, LENGTH) < 0.5
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)

    def run(model, mask=mask):
        hidden = model(ids, attention_mask=mask)[0]
        return {"hidden": hidden, "loss": hidden.square().sum()}

    parent = eager_parent(GPT2Model, config())
    hold(GPT2Model(config()), parent, run, lambda m: run(m, additive.to(m.dtype)))


# --- generation -----------------------------------------------------------------------------------


# --- the compiler ---------------------------------------------------------------------------------
