"""GPT and GPT-2: tests beyond test_contract.py."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from fastplm import models
from fastplm._backends import record_decisions
from fastplm.errors import ArgumentValueError
from fastplm.models import (
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    OpenAIGPTDoubleHeadsModel,
    OpenAIGPTModel,
)

from .conftest import (
    CLASSES,
    LENGTH,
    PADDINGS,
    ROWS,
    as_loss,
    changed,
    config_of,
    eager_parent,
    rows_of,
    small_config,
)

VOCAB = 37
CONFIG = small_config("gpt2", use_cache=False)
RIGHT = PADDINGS["right"]


def config(**changes):
    return changed(CONFIG, **changes)


def pair(ours, **changes):
    return ours(config(**changes)), eager_parent(ours, config(**changes))


def batch(mask=None):
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH))
    return ids if mask is None else ids.masked_fill(mask == 0, 0)


@pytest.mark.parametrize("name", [n for n in CLASSES if CLASSES[n] in ("gpt2", "openai")])
def test_padding_is_left_out_and_attention_fused(name):
    settings = config_of(name)
    given = {"exclude_padding": True} if name == "GPT2ForQuestionAnswering" else {}
    if name in ("GPT2Model", "GPT2LMHeadModel", "GPT2DoubleHeadsModel"):
        given["use_cache"] = False  # by default, the other classes return no cache
    settings.use_cache = True
    model = getattr(models, name)(settings)
    shapes = rows_of(model.base_model.h[0])
    with record_decisions() as decisions:
        model(batch(RIGHT), attention_mask=RIGHT, **given)
        model(batch(), **given)
    # By default the last position is classified, which is padding in three rows.
    rows = int(RIGHT.sum()) + (3 if name.endswith("DoubleHeadsModel") else 0)
    assert shapes == [(1, rows), (ROWS, LENGTH)]
    assert [decision.op for decision in decisions].count("attention") == 2 * CONFIG.n_layer


@pytest.mark.parametrize("use_cache", [None, True])
def test_a_cache_keeps_the_parents_padded_path(hold, use_cache):
    ids, (ours, parent) = batch(RIGHT), pair(GPT2LMHeadModel, use_cache=True)
    shapes = rows_of(ours.transformer.h[0])
    inputs = {"input_ids": ids, "attention_mask": RIGHT, "use_cache": use_cache}
    assert (ours(**inputs, labels=ids).past_key_values is None) == (use_cache is None)
    ours(**inputs)
    assert shapes[1] == (ROWS, LENGTH)

    def run(model):
        """Run two steps; the positions of the second begin where the first ended."""
        out = model(ids[:, :5], use_cache=use_cache)
        out = model(ids[:, 5:], past_key_values=out.past_key_values, use_cache=use_cache)
        return {"logits": out.logits, "loss": as_loss(out.logits)}

    hold(ours, parent, run)


@pytest.mark.parametrize("option", ["scale_attn_by_inverse_layer_idx", "scale_attn_weights"])
def test_the_scale_of_attention_is_the_parents(hold_drop_in, option):
    hold_drop_in(GPT2LMHeadModel, config(**{option: not getattr(CONFIG, option)}), "right")


def test_reorder_and_upcast_attn_affects_only_eager_attention():
    """The parent's other implementations do not read the options either."""
    models = [GPT2Model(config(reorder_and_upcast_attn=option)) for option in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    ids = batch(RIGHT)
    assert torch.equal(*(model(ids, attention_mask=RIGHT)[0] for model in models))


def test_classification_reads_one_row_a_sequence():
    model, parent = pair(GPT2ForSequenceClassification)
    parent.load_state_dict(model.state_dict())
    seen, ids = rows_of(model.score), batch(RIGHT)
    model(ids, attention_mask=RIGHT)
    assert seen == [(ROWS,)]
    embeds = model.transformer.wte(ids)
    assert_close(model(inputs_embeds=embeds).logits, parent(inputs_embeds=embeds).logits)
    # Without a mask padding is a token like any other, but is not classified.
    assert_close(model(ids).logits, parent(ids).logits)


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
    ids = batch(RIGHT).view(-1, *choices, LENGTH)
    mask = RIGHT.view(ids.shape)

    def run(model):
        out = model(ids, attention_mask=mask)
        return {"mc_logits": out.mc_logits, "loss": as_loss(out.mc_logits)}

    hold(*pair(GPT2DoubleHeadsModel, summary_type=summary), run)


SOURCE_MASK = torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [1] + [0] * 5, [0] * 2 + [1] * 4])


def test_output_attentions_equal_the_parents(hold):
    ids, states = batch(RIGHT), torch.randn(ROWS, 6, CONFIG.n_embd)

    def run(model):
        given = {"encoder_hidden_states": states.to(model.dtype), "output_attentions": True}
        out = model(ids, attention_mask=RIGHT, encoder_attention_mask=SOURCE_MASK, **given)
        names = ("self 0", "self 1", "cross 0", "cross 1")
        weights = dict(zip(names, out.attentions + out.cross_attentions, strict=True))
        return {**weights, "loss": as_loss(*weights.values())}

    hold(*pair(GPT2Model, add_cross_attention=True), run)


def test_accumulated_choices_are_one_batch(hold):
    """The sum of the language model's loss and the choice's loss is trained."""
    ids = torch.randint(4, VOCAB, (ROWS, 2, LENGTH))
    # Each part has the same number of labels, so that the mean of the choices weighs them equally.
    labels, right = ids.masked_fill(torch.arange(LENGTH) % 3 == 0, -100), torch.tensor([0, 1, 1, 0])

    def run(model, rows, **items):
        total = 0.0
        for part in torch.arange(ROWS).split(rows):
            out = model(ids[part], labels=labels[part], mc_labels=right[part], **items)
            total = total + out.loss + out.mc_loss
        return {"loss": total}

    ours = OpenAIGPTDoubleHeadsModel(small_config("openai"))
    count = int((labels[..., 1:] != -100).sum())
    parent = eager_parent(OpenAIGPTDoubleHeadsModel, small_config("openai"))
    hold(
        ours,
        parent,
        lambda model: run(model, 2, num_items_in_batch=count),
        lambda model: run(model, ROWS),
    )


def test_the_same_seed_drops_the_same():
    model = OpenAIGPTModel(small_config("openai", attn_pdrop=0.5)).train()
    ids, runs = batch(RIGHT), []
    for seed, unpad in ((0, None), (0, None), (0, 30), (1, None)):
        torch.manual_seed(seed)
        runs.append(model(ids, attention_mask=RIGHT, unpad=unpad)[0])
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[3])


@pytest.mark.parametrize("kind", ("GPT2ForSequenceClassification", "GPT2DoubleHeadsModel"))
def test_a_head_returns_the_attentions_alone(kind):
    """There is no cross-attention, so its attentions are not returned; the output has no field."""
    model = getattr(models, kind)(config(pad_token_id=0)).eval()
    ids = torch.randint(3, 9, (1, 1, 5) if "Double" in kind else (1, 5))
    assert len(model(ids, output_attentions=True).attentions) == model.config.n_layer
