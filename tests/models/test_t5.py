"""fastplm.models.t5 against the classes of the same names in Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from transformers.modeling_outputs import BaseModelOutput

import fastplm.hf
from fastplm import models
from fastplm._backends import record_decisions
from fastplm._checks import ArgumentValueError, UnsupportedError
from fastplm.models import T5EncoderModel, T5ForConditionalGeneration, T5Model, _ragged

from . import conftest
from .conftest import LENGTH, PADDINGS, ROWS, changed, compared, eager_parent, small_config

VOCAB, TARGETS = 37, 6
CONFIG = small_config("t5", num_labels=3)
MASKS = {
    **PADDINGS,
    "holes": torch.tensor(
        [[1, 0, 1, 1, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 1, 1, 0, 0], [1] * 8 + [0], [0] * 3 + [1] * 6]
    ),
}


def config(**changes):
    return changed(CONFIG, **changes)


def v1_1():
    """Gated GELU, and a head of its own whose input is not scaled."""
    return config(
        is_gated_act=True,
        dense_act_fn="gelu_new",
        tie_word_embeddings=False,
        scale_decoder_outputs=False,
    )


def batch(padding="right"):
    """Ids, and labels with a tail, a gap and a row of nothing without label."""
    ids = torch.randint(2, VOCAB, (ROWS, LENGTH))
    labels = torch.randint(2, VOCAB, (ROWS, TARGETS))
    labels[1, 3:] = labels[2, 1] = labels[3] = -100
    return {"input_ids": ids, "attention_mask": MASKS[padding], "labels": labels}


def inputs_of(name, padding):
    return conftest.inputs_of(name, CONFIG, MASKS[padding])


def hold_class(hold, ours, config, inputs, **options):
    """Loss, outputs and gradients; where labels leave rows out, without hidden states too."""
    name = ours.__name__
    model = ours(copy.deepcopy(config))
    parent = eager_parent(ours, config)
    assert model.state_dict().keys() == parent.state_dict().keys()

    def everything(model, **extra):
        return compared(model(**inputs, output_hidden_states=True, **extra), inputs, name)

    def without_states(model, **extra):
        outputs = model(**inputs, **extra)
        if generates:
            outputs = {"loss": outputs.loss}
        return compared(outputs, inputs, name)

    generates = name == "T5ForConditionalGeneration"
    if generates or name in ("T5Model", "T5EncoderModel"):
        logits = {"output_logits": True} if generates else {}
        hold(model, parent, lambda m: everything(m, **logits, **options), everything)
    if "labels" in inputs or "start_positions" in inputs:
        hold(model, parent, lambda m: without_states(m, **options), without_states)


def test_an_untied_gated_model_equals_its_parent(hold):
    hold_class(hold, T5ForConditionalGeneration, v1_1(), batch("holes"))


def test_a_decoder_with_a_cache_equals_the_parents(hold):
    hold_class(hold, T5Model, config(), dict(inputs_of("T5Model", "left"), use_cache=None))


@pytest.mark.parametrize(
    "padding, options",
    [("right", {}), ("left", {}), ("holes", {}), ("left", {"decoder_unpad": False})],
)
def test_a_mask_of_the_decoder_equals_the_parents(hold, padding, options):
    """Its rows may have labels, and holes in it move no other row; a packed encoder packs it."""
    given = batch("left")
    mask = given["decoder_attention_mask"] = MASKS[padding][:, -TARGETS:]
    before = (mask == 0).cumprod(1).bool()
    given["labels"] = given["labels"].masked_fill(before, -100)
    assert padding == "left" or ((given["labels"] != -100) & (mask == 0)).any()
    hold_class(hold, T5ForConditionalGeneration, config(), given, **options)


@pytest.mark.parametrize("ours", [T5Model, T5ForConditionalGeneration])
def test_a_capacity_changes_nothing(hold, ours):
    """24 tokens lie in 30 rows, in shapes that do not depend on the batch."""
    given = inputs_of(ours.__name__, "right")
    hold_class(hold, ours, config(), given, unpad=30, decoder_unpad=20)


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return [loss, *(p.grad for p in model.parameters() if p.grad is not None)]


def same_bits(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_gradient_checkpointing_changes_no_bit():
    model, given = T5ForConditionalGeneration(config()).train(), batch()
    plain = loss_and_gradients(model, **given)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert same_bits(loss_and_gradients(model, **given), plain)


def test_reentrant_checkpointing_loses_no_gradient(hold):
    """It adds the gradients of the encoder's states up in another order."""
    given = batch()

    def run(model):
        return {"loss": model(**given).loss}

    model = T5ForConditionalGeneration(config()).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    hold(model, eager_parent(T5ForConditionalGeneration, config()), run)


def test_no_layer_gets_a_dense_bias(monkeypatch):
    """The table goes from layer to layer in its place, in the padded form too."""
    seen, inner = [], fastplm.hf._relative_bias

    def spy(module, query, key, position_bias):
        seen.append(position_bias)
        return inner(module, query, key, position_bias)

    monkeypatch.setattr(fastplm.hf, "_relative_bias", spy)
    model, given = T5ForConditionalGeneration(config()), batch()
    for unpad in (None, False):
        with record_decisions() as decisions:
            model(**given, unpad=unpad, decoder_unpad=unpad)
        assert [decision.op for decision in decisions].count("attention") == 6
    assert len(seen) == 12 and not any(isinstance(bias, torch.Tensor) for bias in seen)


def test_the_decoder_leaves_out_what_follows_the_last_label():
    model, given = T5ForConditionalGeneration(config()), batch()
    shapes = []
    model.decoder.block[0].register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    model.encoder.block[0].register_forward_pre_hook(lambda _, args: shapes.append(args[0].shape))
    model(**given)
    assert shapes == [(1, 24, 16), (1, 6 + 3 + 6 + 0, 16)]
    model(**given, output_logits=True)
    assert shapes[2:] == [(1, 24, 16), (1, ROWS * TARGETS, 16)]


@pytest.mark.parametrize("value", [1e6, float("nan")])
@pytest.mark.parametrize("padding", ["right", "left", "holes"])
def test_cross_attention_never_sees_padding(padding, value):
    model, given = T5ForConditionalGeneration(config()), batch(padding)
    mask = given.pop("attention_mask")
    ids, labels = given["input_ids"], given["labels"]
    states = T5EncoderModel(config())(ids, attention_mask=mask).last_hidden_state.detach()
    rows = model.shared(ids).detach()
    spoiled = [x.masked_fill(mask[..., None] == 0, value) for x in (states, rows)]
    losses = [
        loss_and_gradients(
            model, encoder_outputs=BaseModelOutput(state), attention_mask=mask, labels=labels
        )
        for state in (states, spoiled[0])
    ]
    assert same_bits(*losses)
    # Rows in a hole are computed, as in the parent, so their own values stay finite.
    if padding != "holes":
        losses = [
            loss_and_gradients(model, inputs_embeds=embeds, attention_mask=mask, labels=labels)
            for embeds in (rows, spoiled[1])
        ]
        assert same_bits(*losses)
    with torch.no_grad():
        cached = [
            model(
                encoder_outputs=(state,),
                attention_mask=mask,
                decoder_input_ids=labels.clamp(min=0),
                use_cache=True,
            )
            for state in (states, spoiled[0])
        ]
    assert cached[0].past_key_values is not None
    assert torch.equal(cached[0].logits, cached[1].logits)


def test_encoder_states_of_the_callers_equal_the_parents(hold):
    given = batch("left")
    states = torch.randn(ROWS, LENGTH, 16)

    def run(model):
        encoder_outputs = (states.to(next(model.parameters()).dtype),)
        out = model(
            encoder_outputs=encoder_outputs,
            attention_mask=given["attention_mask"],
            labels=given["labels"],
        )
        assert torch.equal(out.encoder_last_hidden_state, encoder_outputs[0])
        return {"loss": out.loss}

    hold(
        T5ForConditionalGeneration(config()),
        eager_parent(T5ForConditionalGeneration, config()),
        run,
    )


# --- generation -----------------------------------------------------------------------------------


# --- what else users do ---------------------------------------------------------------------------


def test_weights_given_back_equal_the_parents():
    """``output_attentions`` takes the parent's padded path."""
    given = batch()
    ours = T5ForConditionalGeneration(config()).double()
    parent = eager_parent(T5ForConditionalGeneration, config(), dtype=torch.float64)
    parent.load_state_dict(ours.state_dict())
    out, gold = (model(**given, output_attentions=True) for model in (ours, parent))
    for key in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(out[key]) == 2
        for value, other in zip(out[key], gold[key], strict=True):
            torch.testing.assert_close(value, other)
    torch.testing.assert_close(out.loss, gold.loss, check_dtype=False)


def test_a_mask_of_four_dimensions_gives_the_same_loss(hold):
    given = batch("holes")
    whole = dict(given, attention_mask=given["attention_mask"].bool()[:, None, None])

    def run(inputs):
        return lambda model: {"loss": model(**inputs).loss}

    model = T5ForConditionalGeneration(config())
    hold(model, eager_parent(T5ForConditionalGeneration, config()), run(whole), run(given))


def test_a_table_does_not_go_with_a_complete_mask():
    query = torch.randn(1, 2, 3, 8)
    bias = fastplm.ops.T5RelativeBias(torch.randn(8, 2))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    with pytest.raises(UnsupportedError, match="position_bias"):
        fastplm.hf.fastplm_attention_forward(
            torch.nn.Identity(), query, query, query, mask, position_bias=bias, is_causal=False
        )


def test_eager_attention_equals_the_parent_bit_for_bit():
    given = batch("none")
    ours = T5Model._from_config(config(), attn_implementation="eager")
    parent = eager_parent(T5Model, config())
    parent.load_state_dict(ours.state_dict())
    inputs = dict(input_ids=given["input_ids"], decoder_input_ids=given["labels"].clamp(min=0))
    assert same_bits((ours(**inputs)[0],), (parent(**inputs)[0],))


def test_hooks_on_the_word_embeddings_are_called():
    model, given, heard = T5ForConditionalGeneration(config()), batch(), []
    for stack in (model.encoder, model.decoder):
        stack.embed_tokens.register_forward_hook(lambda *_: heard.append(None))
    model(**given)
    assert len(heard) == 2


def test_labels_of_another_length_are_an_error():
    given = batch()
    with pytest.raises(ArgumentValueError, match="labels"):
        T5ForConditionalGeneration(config())(**given, decoder_input_ids=given["labels"][:, :4])


def test_a_decoder_without_inputs_is_the_parents_error():
    given = batch()
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        T5Model(config())(given["input_ids"], given["attention_mask"], use_cache=False)


def test_a_classifiers_decoder_of_another_length_is_the_parents_error():
    given = inputs_of("T5ForSequenceClassification", "right")
    given["decoder_input_ids"] = torch.randint(2, VOCAB, (ROWS, LENGTH + 2))
    with pytest.raises(IndexError):
        models.T5ForSequenceClassification(config())(**given)


@pytest.mark.parametrize("unpad", [None, 20])
def test_question_answering_computes_every_row_of_the_decoder(unpad):
    given = inputs_of("T5ForQuestionAnswering", "right")
    given["decoder_input_ids"] = given["input_ids"]
    given["decoder_attention_mask"] = given["attention_mask"]
    model = models.T5ForQuestionAnswering(config(num_labels=2))
    assert torch.equal(model(**given).loss, model(**given, decoder_unpad=unpad).loss)


@pytest.mark.parametrize("padding", ["right", "full"])
@pytest.mark.parametrize("states", [False, True])
def test_each_side_is_counted_once(monkeypatch, padding, states):
    """Each count waits for the device."""
    counts, inner = [], _ragged._counts_on_cpu
    monkeypatch.setattr(
        _ragged, "_counts_on_cpu", lambda *masks: counts.append(masks) or inner(*masks)
    )
    given = batch()
    if padding == "full":
        given["attention_mask"] = torch.ones_like(given["attention_mask"])
    if states:
        del given["input_ids"]
        given["encoder_outputs"] = (torch.randn(ROWS, LENGTH, 16),)
    T5ForConditionalGeneration(config())(**given)
    assert len(counts) == 2
