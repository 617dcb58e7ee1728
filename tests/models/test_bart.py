"""fastplm.models.bart: tests beyond test_contract.py and test_seq2seq.py."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from fastplm.errors import ArgumentValueError
from fastplm.models import BartForConditionalGeneration, BartForSequenceClassification, BartModel

from . import conftest
from .conftest import LENGTH, PADDINGS, ROWS, TARGET, Storages, loss_of, rows_of, small_config

CONFIG = small_config("bart", vocab_size=41)
VOCAB, WIDTH, EOS = 41, CONFIG.d_model, 2


def pair(ours, **changes):
    return conftest.pair(ours.__name__, conftest.changed(CONFIG, **changes))


def inputs_of(ours, padding="right"):
    inputs = conftest.inputs_of(ours.__name__, CONFIG, PADDINGS[padding])
    del inputs["use_cache"]
    return inputs


def test_a_classifier_needs_no_row_after_its_token():
    inputs = inputs_of(BartForSequenceClassification)
    model, _ = pair(BartForSequenceClassification)
    seen = rows_of(model.model.encoder.layers[0], model.model.decoder.layers[0])
    model(**inputs)
    assert seen == [(1, int(inputs["attention_mask"].sum()))] * 2


# --- the head, its table and its bias -------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_the_tables_gradient_is_the_sum_of_three_uses(frozen):
    inputs = inputs_of(BartForConditionalGeneration)
    model, parent = pair(BartForConditionalGeneration)
    apart = copy.deepcopy(parent)
    uses = []
    inner = apart.model
    for module in (inner.encoder.embed_tokens, inner.decoder.embed_tokens, apart.lm_head):
        module.weight = nn.Parameter(module.weight.detach().clone())
        uses.append(module.weight)
    apart(**inputs).loss.backward()
    assert all(use.grad.any() for use in uses)
    if frozen:
        model.model.shared.weight.requires_grad_(False)
    model(**inputs).loss.backward()
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight
    if frozen:
        assert model.lm_head.weight.grad is None
    else:
        torch.testing.assert_close(model.lm_head.weight.grad, sum(use.grad for use in uses))


def test_the_tables_gradient_is_accumulated_in_one_buffer():
    model, _ = pair(BartForConditionalGeneration)
    given = inputs_of(BartForConditionalGeneration) | dict(output_logits=False)
    loss = model(**given).loss
    with Storages(VOCAB * WIDTH) as large:
        loss.backward()
    assert len(large.found) == 1
    # With a hook, a lookup computes its gradient by itself.
    model.zero_grad()
    model.model.decoder.embed_tokens.register_forward_pre_hook(lambda *_: None)
    loss = model(**given).loss
    with Storages(VOCAB * WIDTH) as large:
        loss.backward()
    assert len(large.found) > 1


@pytest.mark.parametrize("vocab", [VOCAB - 5, VOCAB + 8])
def test_tying_and_the_bias_survive_a_resize_and_a_checkpoint(hold, vocab, tmp_path):
    model, _ = pair(BartForConditionalGeneration)
    model.resize_token_embeddings(vocab, mean_resizing=False)
    model.save_pretrained(tmp_path)
    loaded = BartForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.final_logits_bias, model.final_logits_bias)
    assert loaded.lm_head.weight is loaded.model.shared.weight
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight
    inputs = inputs_of(BartForConditionalGeneration)
    inputs |= {name: inputs[name].clamp(max=vocab - 1) for name in ("input_ids", "labels")}
    parent = transformers.BartForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    hold(loaded, parent, loss_of(**inputs))


def test_a_head_with_a_bias_of_its_own_adds_both():
    inputs = inputs_of(BartForConditionalGeneration)
    model, parent = pair(BartForConditionalGeneration)
    model.lm_head = parent.lm_head = nn.Linear(WIDTH, VOCAB)
    torch.testing.assert_close(model(**inputs).loss, parent(**inputs).loss)


# --- other inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["4-D mask of the decoder", "cache"])
def test_the_parents_padded_path_equals_the_parent(hold, way):
    inputs = inputs_of(BartModel)
    future = torch.ones(ROWS, 1, TARGET, TARGET).triu(1)

    def run(model):
        given = {"use_cache": way == "cache"}
        if way != "cache":
            dtype = next(model.parameters()).dtype
            given["decoder_attention_mask"] = future.to(dtype) * torch.finfo(dtype).min
        out = model(**inputs, **given)
        assert (out.past_key_values is not None) == (way == "cache")
        return conftest.compared(out, inputs, "BartModel")

    hold(*pair(BartModel), run)


def test_encoder_and_decoder_called_separately():
    inputs, models = inputs_of(BartModel), pair(BartModel)
    ids, mask = inputs.pop("decoder_input_ids"), inputs["attention_mask"].bool()
    hidden = [model.get_encoder()(**inputs).last_hidden_state for model in models]
    torch.testing.assert_close(hidden[0][mask], hidden[1][mask])
    assert not hidden[0][~mask].any()
    given = {"encoder_hidden_states": hidden[1], "encoder_attention_mask": mask}
    decoders = [model.get_decoder() for model in models]
    torch.testing.assert_close(*(decoder(ids, **given, use_cache=False)[0] for decoder in decoders))


def test_layerdrop():
    inputs = inputs_of(BartForConditionalGeneration)
    changes = {"encoder_layerdrop": 1.0, "decoder_layerdrop": 1.0}
    model, parent = pair(BartForConditionalGeneration, **changes)
    losses = [m.train()(**inputs).loss for m in (model, parent)]
    torch.testing.assert_close(*losses)
    assert not torch.equal(losses[0], model.eval()(**inputs).loss)


def test_the_parents_errors_are_kept():
    model, (inner, _) = BartForSequenceClassification(CONFIG), pair(BartModel)
    ids, embeds = torch.full((ROWS, LENGTH), 5), torch.randn(ROWS, LENGTH, WIDTH)
    ids[:, -1] = ids[0, 3] = EOS
    with pytest.raises(ValueError, match="same number of <eos>"):
        model(ids)
    with pytest.raises(ValueError, match="at least one <eos>"):
        model(ids.clamp(min=4))
    with pytest.raises(NotImplementedError, match="input embeddings"):
        model(inputs_embeds=embeds)
    with pytest.raises(ValueError, match="decoder_input_ids"):
        inner(inputs_embeds=embeds)
    with pytest.raises(ValueError, match="exactly one of"):
        inner(ids, inputs_embeds=embeds)
    with pytest.raises(ArgumentValueError, match="input_ids"):
        inner(ids + VOCAB)
