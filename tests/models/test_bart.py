"""fastplm.models.bart against the classes of the same names in Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import BaseModelOutput

from fastplm import models
from fastplm._backends import record_decisions
from fastplm._checks import ArgumentValueError
from fastplm.models import (
    BartForConditionalGeneration,
    BartForQuestionAnswering,
    BartForSequenceClassification,
    BartModel,
)

from . import conftest
from .conftest import PADDINGS, changed, compared, eager_parent, small_config

VOCAB, ROWS, SOURCE, TARGET, CLASSES = 41, 4, 9, 7, 3
PAD, EOS = 1, 2
CONFIG = small_config(
    "bart",
    vocab_size=VOCAB,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
    num_labels=CLASSES,
)
DEEPER = {"encoder_layers": 2, "decoder_layers": 2}
#: How far each target is labelled; within, one token has no label.
LABELLED = (7, 3, 5, 1)


def config(**changes):
    return changed(CONFIG, **changes)


def parent_like(ours, **changes):
    return eager_parent(ours, config(**changes))


def pair(ours, **changes):
    """(ours, the parent) with the same weights, in evaluation."""
    model, parent = ours(config(**changes)).eval(), parent_like(ours, **changes).eval()
    if hasattr(model, "final_logits_bias"):
        nn.init.normal_(model.final_logits_bias)
    parent.load_state_dict(model.state_dict())
    return model, parent


def source(padding):
    """Ids that end with <eos>, and their mask."""
    mask = PADDINGS[padding]
    ids = torch.randint(4, VOCAB, (ROWS, SOURCE))
    if mask is None:
        ids[:, -1] = EOS
        return {"input_ids": ids}
    ids = ids.masked_fill(mask == 0, PAD)
    last = (mask * torch.arange(SOURCE)).argmax(1)
    ids[torch.arange(ROWS), last] = EOS
    return {"input_ids": ids, "attention_mask": mask}


def target():
    labels = torch.randint(4, VOCAB, (ROWS, TARGET))
    for row, length in enumerate(LABELLED):
        labels[row, length:] = -100
    labels[0, 2] = -100
    return labels


def inputs_of(ours, padding):
    inputs = conftest.inputs_of(ours.__name__, CONFIG, PADDINGS[padding])
    del inputs["use_cache"]
    return inputs


def hold_to_parent(hold, ours, inputs, loss_alone=True, changes=None, **options):
    """Everything that a forward returns, and once more the loss alone; ``options`` go to ours."""
    changes = changes or {}
    model = ours(config(**changes))
    if hasattr(model, "final_logits_bias"):
        nn.init.normal_(model.final_logits_bias)
    parent = parent_like(ours, **changes)

    def everything(model, **extra):
        out = model(**inputs, output_hidden_states=True, use_cache=False, **extra)
        return compared(out, inputs, ours.__name__)

    def loss(model, **extra):
        out = model(**inputs, use_cache=False, **extra)
        return {"loss": compared(out, inputs, ours.__name__)["loss"]}

    logits = {"output_logits": True} if "labels" in inputs and hasattr(model, "lm_head") else {}
    hold(model, parent, lambda m: everything(m, **logits, **options), everything)
    if loss_alone:
        hold(model, parent, lambda m: loss(m, **options), loss)
    return model


# --- which rows are computed ----------------------------------------------------------------------


def rows_seen(model, run):
    """(rows of the encoder's, of the decoder's first layer)."""
    seen = {}
    hooks = [
        stack.layers[0].register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: tuple(args[0].shape[:2])})
        )
        for name, stack in (("encoder", model.model.encoder), ("decoder", model.model.decoder))
    ]
    run()
    for hook in hooks:
        hook.remove()
    return seen["encoder"], seen["decoder"]


def test_a_loss_needs_no_row_after_the_last_label():
    inputs = inputs_of(BartForConditionalGeneration, "right")
    model = BartForConditionalGeneration(config())
    tokens = int(inputs["attention_mask"].sum())
    short = rows_seen(model, lambda: model(**inputs))
    assert short == ((1, tokens), (1, sum(LABELLED)))
    for asked in ("output_logits", "output_hidden_states"):
        seen = rows_seen(model, lambda asked=asked: model(**inputs, **{asked: True}))
        assert seen == ((1, tokens), (1, ROWS * TARGET))
    padded = rows_seen(model, lambda: model(**inputs, unpad=False))
    assert padded == ((ROWS, SOURCE), (ROWS, TARGET))
    del inputs["attention_mask"]
    assert rows_seen(model, lambda: model(**inputs)) == ((4, SOURCE), (1, sum(LABELLED)))


def test_a_classifier_needs_no_row_after_its_token():
    inputs = inputs_of(BartForSequenceClassification, "right")
    model = BartForSequenceClassification(config())
    tokens = int(inputs["attention_mask"].sum())
    assert rows_seen(model, lambda: model(**inputs)) == ((1, tokens), (1, tokens))


DECODER_MASKS = {
    "right": torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [1] * 5 + [0] * 2, [1] + [0] * 6]),
    "left": torch.tensor([[1] * 7, [0] * 4 + [1] * 3, [0] * 2 + [1] * 5, [0] * 6 + [1]]),
}


@pytest.mark.parametrize("decoder_padding", DECODER_MASKS)
@pytest.mark.parametrize("padding", ["none", "right"])
def test_two_paddings_equal_the_parent(hold, padding, decoder_padding):
    inputs = inputs_of(BartForConditionalGeneration, padding)
    mask = inputs["decoder_attention_mask"] = DECODER_MASKS[decoder_padding]
    inputs["decoder_input_ids"] = torch.randint(4, VOCAB, (ROWS, TARGET))
    del inputs["labels"]
    # Labels are on padding, and a row of tokens after the last label is left out.
    labels = torch.randint(4, VOCAB, (ROWS, TARGET)).masked_fill(mask == 0, -100)
    labels[0, 5:] = -100
    labels[1, 3:5] = 7
    extra = 2
    if decoder_padding == "left":
        # A row that attends to no token is not defined: it is computed, but not compared.
        extra, compared = 1, labels.masked_fill(mask == 0, -100)
    else:
        compared = labels
    given = {**inputs, "labels": compared}
    model = hold_to_parent(hold, BartForConditionalGeneration, given, changes=DEEPER)
    _, (one, rows) = rows_seen(model, lambda: model(**inputs, labels=labels))
    assert (one, rows) == (1, int(mask.sum()) - 2 + extra)


@pytest.mark.parametrize("options", [{}, {"unpad": 30, "decoder_unpad": ROWS * TARGET}])
@pytest.mark.parametrize("ours", [BartModel, BartForQuestionAnswering])
def test_a_decoder_that_stays_padded_keeps_its_mask(hold, ours, options):
    """With a packed encoder, all of its rows are packed."""
    inputs = inputs_of(ours, "right")
    inputs["decoder_input_ids"] = torch.randint(4, VOCAB, (ROWS, TARGET))
    # Every token would attend to padding at the left; at the right, only the softmax reads it.
    mask = DECODER_MASKS["left" if ours is BartModel else "right"]
    inputs["decoder_attention_mask"] = mask

    def run(model, **extra):
        out = model(**inputs, use_cache=False, **extra)
        if ours is BartModel:
            hidden = out.last_hidden_state[mask.bool()]
            return {"hidden": hidden, "loss": hidden.square().sum()}
        return {"loss": out.loss, "logits": out.start_logits}

    hold(ours(config()), parent_like(ours), lambda model: run(model, **options), run)


@pytest.mark.parametrize("ours", [BartForConditionalGeneration, BartModel])
def test_a_capacity_changes_nothing(hold, ours):
    """26 tokens lie in 30 rows, 16 in 20, in shapes that do not depend on the batch."""
    inputs = inputs_of(ours, "right")
    inputs["decoder_attention_mask"] = DECODER_MASKS["right"]
    options = {"unpad": 30, "decoder_unpad": 20}
    model = hold_to_parent(hold, ours, inputs, loss_alone=False, **options)
    if ours is BartForConditionalGeneration:
        assert rows_seen(model, lambda: model(**inputs, **options)) == ((1, 30), (1, 20))


@pytest.mark.parametrize("given", ["encoder_outputs", "inputs_embeds"])
@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_encoder_padding_has_no_effect(given, value):
    inputs = inputs_of(BartForConditionalGeneration, "left")
    model = BartForConditionalGeneration(config())
    del inputs["input_ids"]
    mask = inputs["attention_mask"]
    states = torch.randn(ROWS, SOURCE, 32)
    losses, gradients = [], []
    for garbage in (0.0, value):
        rows = states.masked_fill(mask[..., None] == 0, garbage).requires_grad_()
        extra = {given: (rows,) if given == "encoder_outputs" else rows}
        out = model(**inputs, **extra)
        gradients.append(torch.autograd.grad(out.loss, rows)[0])
        losses.append(out.loss)
    assert torch.equal(*losses) and torch.equal(*gradients)
    assert not gradients[1][mask == 0].any()


@pytest.mark.parametrize("value", [1e6, float("nan")])
def test_encoder_padding_has_no_effect_with_a_cache(value):
    mask = PADDINGS["left"]
    model = BartForConditionalGeneration(config()).eval()
    states = torch.randn(ROWS, SOURCE, 32)
    logits = []
    for garbage in (0.0, value):
        rows = states.masked_fill(mask[..., None] == 0, garbage)
        out = model(
            encoder_outputs=BaseModelOutput(rows),
            attention_mask=mask,
            decoder_input_ids=torch.full((ROWS, 2), EOS),
            use_cache=True,
        )
        assert out.past_key_values is not None
        logits.append(out.logits)
    assert torch.equal(*logits)


# --- the head, its table and its bias -------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_the_tables_gradient_is_the_sum_of_three_uses(frozen):
    inputs = inputs_of(BartForConditionalGeneration, "right")
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


class LargeTensors(TorchDispatchMode):
    """The operators that make a tensor of the table's shape."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        outs = out if isinstance(out, tuple | list) else (out,)
        shapes = [tuple(o.shape) for o in outs if isinstance(o, torch.Tensor)]
        if (VOCAB, 32) in shapes:
            self.found.append(func.__name__.split(".")[0])
        return out


def test_the_tables_gradient_is_accumulated_in_one_buffer():
    inputs = inputs_of(BartForConditionalGeneration, "right")
    model = BartForConditionalGeneration(config())
    loss = model(**inputs).loss
    with LargeTensors() as large:
        loss.backward()
    assert large.found
    assert not {"embedding_dense_backward", "new_zeros", "zeros", "add"} & set(large.found)


def test_hooks_of_the_embeddings_still_run():
    inputs = inputs_of(BartForConditionalGeneration, "right")
    model = BartForConditionalGeneration(config())
    plain = model(**inputs).loss
    hook = model.model.decoder.embed_tokens.register_forward_hook(lambda *args: args[-1] * 0.5)
    halved = model(**inputs).loss
    hook.remove()
    model.model.decoder.embed_tokens.embed_scale *= 0.5
    assert torch.equal(halved, model(**inputs).loss) and not torch.equal(plain, halved)


@pytest.mark.parametrize("vocab", [VOCAB - 5, VOCAB + 8])
def test_tying_and_the_bias_survive_a_resize_and_a_checkpoint(hold, vocab, tmp_path):
    model = BartForConditionalGeneration(config())
    nn.init.normal_(model.final_logits_bias)
    model.resize_token_embeddings(vocab, mean_resizing=False)
    model.save_pretrained(tmp_path)
    loaded = BartForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.final_logits_bias, model.final_logits_bias)
    assert loaded.lm_head.weight is loaded.model.shared.weight
    assert loaded.lm_head.weight is loaded.model.decoder.embed_tokens.weight
    inputs = source("right")
    inputs["input_ids"].clamp_(max=vocab - 1)
    inputs["labels"] = target().clamp(max=vocab - 1)
    parent = transformers.BartForConditionalGeneration.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    hold(loaded, parent, lambda m: {"loss": m(**inputs).loss})


def test_a_head_with_a_bias_of_its_own_adds_both():
    inputs = inputs_of(BartForConditionalGeneration, "right")
    model, parent = pair(BartForConditionalGeneration)
    model.lm_head = parent.lm_head = nn.Linear(32, VOCAB)
    torch.testing.assert_close(model(**inputs).loss, parent(**inputs).loss)


# --- other inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["encoder_outputs", "embeds", "4-D mask", "attentions", "cache"])
def test_other_inputs_equal_the_parent(hold, way):
    """The first two are unpadded; the others are the parent's padded path."""
    inputs = inputs_of(BartModel, "right")
    mask = inputs["attention_mask"]
    if way == "encoder_outputs":
        del inputs["input_ids"]
        inputs["encoder_outputs"] = (torch.randn(ROWS, SOURCE, 32),)
    if way == "embeds":
        del inputs["input_ids"], inputs["decoder_input_ids"]
        inputs["inputs_embeds"] = torch.randn(ROWS, SOURCE, 32)
        inputs["decoder_inputs_embeds"] = torch.randn(ROWS, TARGET, 32)
    seen = []

    def run(model):
        dtype = next(model.parameters()).dtype
        given = dict(inputs)
        for name in ("inputs_embeds", "decoder_inputs_embeds"):
            if name in given:
                given[name] = given[name].to(dtype)
        if way == "encoder_outputs":
            given["encoder_outputs"] = tuple(s.to(dtype) for s in inputs["encoder_outputs"])
        if way == "4-D mask":
            future = torch.ones(ROWS, 1, TARGET, TARGET, dtype=dtype).triu(1)
            given["decoder_attention_mask"] = future * torch.finfo(dtype).min
        out = model(**given, output_attentions=way == "attentions", use_cache=way == "cache")
        assert (out.past_key_values is not None) == (way == "cache")
        seen.append(out)
        result = compared(
            {"last_hidden_state": out.last_hidden_state}, {"attention_mask": mask}, "BartModel"
        )
        if out.encoder_last_hidden_state is not None and way != "encoder_outputs":
            result["encoder"] = out.encoder_last_hidden_state[mask.bool()]
        return result

    hold(BartModel(config()), parent_like(BartModel), run)
    if way == "attentions":
        for name in ("decoder_attentions", "cross_attentions", "encoder_attentions"):
            assert len(seen[0][name]) == 1 and seen[0][name][0] is not None
    if way == "encoder_outputs":
        assert torch.equal(seen[0].encoder_last_hidden_state, inputs["encoder_outputs"][0])


def test_encoder_and_decoder_called_separately():
    inputs = source("right")
    model, parent = pair(BartModel)
    hidden = [m.get_encoder()(**inputs).last_hidden_state for m in (model, parent)]
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(hidden[0][mask], hidden[1][mask])
    assert not hidden[0][~mask].any()
    ids = torch.randint(4, VOCAB, (ROWS, TARGET))
    out = [
        m.get_decoder()(
            ids,
            encoder_hidden_states=hidden[1],
            encoder_attention_mask=inputs["attention_mask"],
            use_cache=False,
        ).last_hidden_state
        for m in (model, parent)
    ]
    torch.testing.assert_close(*out)


def test_eager_attention_equals_the_parent_bit_for_bit():
    inputs = inputs_of(BartForConditionalGeneration, "right")
    labels = inputs.pop("labels")
    model, parent = pair(BartForConditionalGeneration)
    model.set_attn_implementation("eager")
    ids = torch.full((ROWS, 3), EOS)
    ours, theirs = (
        m(**inputs, decoder_input_ids=ids, output_hidden_states=True) for m in (model, parent)
    )
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.encoder_last_hidden_state, theirs.encoder_last_hidden_state)
    loss = [m(**inputs, labels=labels).loss for m in (model, parent)]
    torch.testing.assert_close(*loss)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    """Reentrant, the layers of a decoder add up the gradient of the encoder's states in another
    order, so that what comes before these is left out."""
    inputs = inputs_of(BartForConditionalGeneration, "right")
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = BartForConditionalGeneration(
            config(dropout=0.1, attention_dropout=0.1, **DEEPER)
        ).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(**inputs).loss.backward()
        part = model.model.decoder.layers if reentrant else model
        gradients.append([p.grad for p in part.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_layerdrop():
    inputs = inputs_of(BartForConditionalGeneration, "right")
    changes = {"encoder_layerdrop": 1.0, "decoder_layerdrop": 1.0}
    model, parent = pair(BartForConditionalGeneration, **changes)
    losses = [m.train()(**inputs).loss for m in (model, parent)]
    torch.testing.assert_close(*losses)
    assert not torch.equal(losses[0], model.eval()(**inputs).loss)


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_other_classification_losses_equal_the_parent(hold, problem):
    inputs = inputs_of(BartForSequenceClassification, "right")
    labels = 1 if problem == "regression" else CLASSES
    inputs["labels"] = torch.rand(ROWS, labels).round()

    def run(model):
        given = {**inputs, "labels": inputs["labels"].to(next(model.parameters()).dtype)}
        return {"loss": model(**given).loss}

    changes = {"problem_type": problem, "num_labels": labels}
    model = BartForSequenceClassification(config(**changes))
    hold(model, parent_like(BartForSequenceClassification, **changes), run)


def test_the_parents_errors_are_kept():
    model = BartForSequenceClassification(config())
    ids = source("right")["input_ids"]
    ids[0, 3] = EOS
    with pytest.raises(ValueError, match="same number of <eos>"):
        model(ids)
    with pytest.raises(ValueError, match="at least one <eos>"):
        model(ids.clamp(min=4))
    with pytest.raises(NotImplementedError, match="input embeddings"):
        model(inputs_embeds=torch.randn(ROWS, SOURCE, 32))
    with pytest.raises(ValueError, match="decoder_input_ids"):
        BartModel(config())(inputs_embeds=torch.randn(ROWS, SOURCE, 32))
    with pytest.raises(ValueError, match="exactly one of"):
        BartModel(config())(ids, inputs_embeds=torch.randn(ROWS, SOURCE, 32))
    with pytest.raises(ArgumentValueError, match="input_ids"):
        BartModel(config())(ids + VOCAB)
    with pytest.raises(ArgumentValueError, match="labels"):
        BartForConditionalGeneration(config())(ids, decoder_input_ids=ids, labels=target())


# --- generate -------------------------------------------------------------------------------------


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["dense", "capacity"])
def test_compiles_to_one_graph(way):
    inputs = inputs_of(BartForConditionalGeneration, "right")
    options = {} if way == "dense" else {"unpad": 30, "decoder_unpad": 22}
    # In training, Transformers 5.17 draws which layers to drop even where none may be.
    model = BartForConditionalGeneration(config()).train(way == "capacity")
    expected = model(**inputs).loss
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**inputs, **options).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


def test_with_a_cache_encoder_states_are_not_packed():
    """They are in the cache: packing and padding them for every token would be for nothing."""
    model = models.BartForConditionalGeneration(config()).eval()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    with torch.no_grad():
        states = model.get_encoder()(torch.randint(3, 30, (2, 9)), attention_mask=mask)
        inputs = dict(encoder_outputs=states, attention_mask=mask, use_cache=True)
        token = torch.full((2, 1), 4)
        cache = model(decoder_input_ids=token, **inputs).past_key_values
        with record_decisions() as decisions:
            model(decoder_input_ids=token, past_key_values=cache, **inputs)
    assert "gather_rows" not in [decision.op for decision in decisions]
