"""Tests of all models with an encoder and a decoder: BART, T5 and BERT2BERT."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import BartConfig, EncoderDecoderConfig, T5Config

from fastplm import models
from fastplm._backends import record_decisions
from fastplm.errors import ArgumentValueError
from fastplm.models import _ragged

from .conftest import (
    LENGTH,
    PADDINGS,
    ROWS,
    TARGET,
    as_loss,
    changed,
    eager_parent,
    gradients,
    inputs_of,
    loss_of,
    rows_of,
    same,
    small_config,
)

pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")

WIDTH = 16
#: Each model: its class, its configuration, and the first layers of encoder and decoder.
MODELS = {
    "bart": (
        models.BartForConditionalGeneration,
        small_config("bart"),
        lambda model: (model.model.encoder.layers[0], model.model.decoder.layers[0]),
    ),
    "t5": (
        models.T5ForConditionalGeneration,
        small_config("t5"),
        lambda model: (model.encoder.block[0], model.decoder.block[0]),
    ),
    "bert2bert": (
        models.EncoderDecoderModel,
        EncoderDecoderConfig.from_encoder_decoder_configs(
            small_config("bert"), small_config("bert"), pad_token_id=0, decoder_start_token_id=3
        ),
        lambda model: (model.encoder.encoder.layer[0], model.decoder.bert.encoder.layer[0]),
    ),
}
every_model = pytest.mark.parametrize("kind", MODELS)
LABELLED = (7, 3, 5, 1)  # tokens of each target up to its last label
DECODER_MASKS = {
    "right": torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [1] * 5 + [0] * 2, [1] + [0] * 6]),
    "left": torch.tensor([[1] * 7, [0] * 4 + [1] * 3, [0] * 2 + [1] * 5, [0] * 6 + [1]]),
    "holes": torch.tensor(
        [[1, 0, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 1, 0], [1] * 7, [0] * 3 + [1] * 4]
    ),
}


def pair(kind, **fields):
    """(fastplm's model, the parent with eager attention and the same weights)."""
    ours, config, _ = MODELS[kind]
    config = changed(config, **fields)
    model, parent = ours(copy.deepcopy(config)), eager_parent(ours, config)
    parent.load_state_dict(model.state_dict())
    return model, parent


def batch(kind, padding="right"):
    """Ids, their mask, and labels with a tail and a gap without label."""
    ours, config, _ = MODELS[kind]
    inputs = inputs_of(ours.__name__, config, PADDINGS[padding])
    del inputs["use_cache"]
    return inputs


def random_targets():
    return torch.randint(4, 37, (ROWS, TARGET))


@pytest.mark.slow
@pytest.mark.parametrize("decoder_padding", DECODER_MASKS)
@pytest.mark.parametrize("padding", ["none", "right"])
@every_model
def test_a_mask_of_the_decoder_equals_the_parents(hold_drop_in, kind, padding, decoder_padding):
    """Rows that the mask leaves out may have labels, and holes in the mask move no other row."""
    ours, config, _ = MODELS[kind]
    mask, labels = DECODER_MASKS[decoder_padding], random_targets()
    labels[0, 5:] = -100
    # The output of a row that attends to no token is not defined.
    labels = labels.masked_fill((mask == 0).cumprod(1).bool(), -100)
    given = {"decoder_attention_mask": mask, "decoder_input_ids": random_targets()}
    hold_drop_in(ours, config, padding, given=given | {"labels": labels})


@pytest.mark.parametrize("ours", [*MODELS, "BartModel", "T5Model"])
def test_a_capacity_changes_nothing(hold_drop_in, ours):
    """24 tokens are in 30 rows, 16 in 20: shapes that do not depend on the batch."""
    if ours in MODELS:
        ours, config, _ = MODELS[ours]
    else:
        config, ours = small_config(ours[:-5].lower()), getattr(models, ours)
    given = {"decoder_attention_mask": DECODER_MASKS["right"]}
    hold_drop_in(ours, config, "right", given=given, unpad=30, decoder_unpad=20)


@every_model
def test_only_rows_that_matter_are_computed(kind):
    inputs, (model, _) = batch(kind), pair(kind)
    inputs["decoder_input_ids"] = random_targets()
    seen = rows_of(*MODELS[kind][2](model))

    def rows(**given):
        seen.clear()
        out = model(**inputs | given)
        return out, tuple(seen)

    tokens, labelled = (1, int(inputs["attention_mask"].sum())), (1, sum(LABELLED))
    out, found = rows()
    assert found == (tokens, labelled)
    assert out.logits is None and out.past_key_values is None
    assert rows(output_logits=True)[1] == (tokens, (1, ROWS * TARGET))
    with torch.no_grad():  # else somebody may ask for the gradient of the states
        assert rows(output_hidden_states=True)[1] == (tokens, (1, ROWS * TARGET))
    for given in (dict(output_hidden_states=True), dict(unpad=False, decoder_unpad=False)):
        assert rows(**given)[1] == ((ROWS, LENGTH), (ROWS, TARGET))
    assert rows(attention_mask=None)[1] == ((ROWS, LENGTH), labelled)
    assert rows(unpad=30, decoder_unpad=20)[1] == ((1, 30), (1, 20))


@pytest.mark.parametrize("value", [1e6, float("nan")])
@pytest.mark.parametrize("padding", ["right", "left"])
@every_model
def test_padding_of_the_source_is_never_seen(kind, padding, value):
    """Loss, logits, cache and gradients do not see it, in hidden states or embeddings."""
    inputs, (model, _) = batch(kind, padding), pair(kind)
    del inputs["input_ids"]
    mask, labels = inputs["attention_mask"], inputs.pop("labels")
    states, ids = torch.randn(ROWS, LENGTH, WIDTH), random_targets()
    results = []
    for garbage in (0.0, value):
        rows = states.masked_fill(mask[..., None] == 0, garbage).requires_grad_()
        found = []
        for given in ({"encoder_outputs": (rows,)}, {"inputs_embeds": rows}):
            rows.grad = None
            loss = model(**inputs, **given, labels=labels).loss
            found += [loss, *gradients(model, loss).values(), rows.grad]
            assert not rows.grad[mask == 0].any()
        with torch.no_grad():
            for cached in (True, False):
                given = {"encoder_outputs": (rows,), "decoder_input_ids": ids, "use_cache": cached}
                out = model(**inputs, **given)
                assert (out.past_key_values is not None) == cached
                found.append(out.logits)
        results.append(found)
    assert same(*results)


@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("padding", ["right", "full"])
@every_model
def test_each_side_is_counted_once(monkeypatch, kind, padding, states):
    """A second count of a side's tokens would wait for the device again."""
    counts, inner = [], _ragged._counts
    monkeypatch.setattr(_ragged, "_counts", lambda *masks: counts.append(masks) or inner(*masks))
    inputs, (model, _) = batch(kind, padding), pair(kind)
    if states:
        del inputs["input_ids"]
        inputs["encoder_outputs"] = (torch.randn(ROWS, LENGTH, WIDTH),)
    model(**inputs)
    assert len(counts) == 2


# --- other inputs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["encoder_outputs", "inputs_embeds"])
@every_model
def test_hidden_states_and_embeddings_of_the_user_equal_the_parents(hold, kind, given):
    inputs = batch(kind)
    states = torch.randn(ROWS, LENGTH, WIDTH)
    inputs[given] = (states,) if given == "encoder_outputs" else states
    del inputs["input_ids"]
    if given == "inputs_embeds":
        inputs["decoder_inputs_embeds"] = torch.randn(ROWS, TARGET, WIDTH)
    models = pair(kind)
    hold(*models, loss_of(**inputs))
    if given == "encoder_outputs" and kind != "bert2bert":
        assert torch.equal(models[0](**inputs).encoder_last_hidden_state, states)


@every_model
def test_a_mask_of_4_dimensions_gives_the_same_loss(hold, kind):
    inputs, (model, _) = batch(kind), pair(kind)
    whole = inputs | {"attention_mask": inputs["attention_mask"].bool()[:, None, None]}
    hold(model, model, loss_of(**whole), loss_of(**inputs))


@every_model
def test_eager_attention_equals_the_parent_bit_for_bit(kind):
    inputs, (ours, parent) = batch(kind, "none"), pair(kind)
    ours.set_attn_implementation("eager")
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    with torch.no_grad():
        assert torch.equal(ours(**inputs).logits, parent(**inputs).logits)


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_labels_of_another_length_are_an_error(kind):
    inputs, (model, _) = batch(kind), pair(kind)
    with pytest.raises(ArgumentValueError, match="labels"):
        model(**inputs, decoder_input_ids=inputs["labels"][:, :4])


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_hooks_on_the_embeddings_are_called(kind):
    inputs, (model, _) = batch(kind), pair(kind)
    plain = model(**inputs).loss
    for stack in (model.get_encoder(), model.get_decoder()):
        hook = stack.embed_tokens.register_forward_hook(lambda *args: args[-1] * 0.5)
        assert not torch.equal(plain, model(**inputs).loss)
        hook.remove()
    assert torch.equal(plain, model(**inputs).loss)


# --- checkpointing, caches and the compiler -------------------------------------------------------


@pytest.mark.parametrize("kind", ["bart", "t5"])
def test_reentrant_checkpointing_loses_no_gradient(hold, kind):
    """Reentrant checkpointing adds up the gradients of the encoder's states in another order."""
    model, parent = pair(kind)
    model.train().gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    hold(model, parent, loss_of(**batch(kind)))


@every_model
def test_with_a_cache_encoder_states_are_not_packed(kind):
    """The cache has these states: to pack and pad them for every token would be wasted."""
    inputs, (model, _) = batch(kind), pair(kind)
    mask, token = inputs["attention_mask"], torch.full((ROWS, 1), 4)
    with torch.no_grad():
        states = model.get_encoder()(inputs["input_ids"], attention_mask=mask)
        given = dict(encoder_outputs=states, attention_mask=mask, use_cache=True)
        cache = model.eval()(decoder_input_ids=token, **given).past_key_values
        with record_decisions() as decisions:
            model(decoder_input_ids=token, past_key_values=cache, **given)
    assert "gather_rows" not in [decision.op for decision in decisions]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"unpad": 30, "decoder_unpad": 22}], ids=str)
@every_model
def test_compiles_to_one_graph(hold, kind, options):
    inputs, (model, _) = batch(kind), pair(kind)
    # In training, Transformers 5.17 draws the layers to drop even if none may be dropped.
    model.train(bool(options))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    hold(
        model,
        model,
        lambda _: {"loss": compiled(**inputs, **options).loss},
        lambda model: {"loss": model(**inputs).loss},
    )


@pytest.mark.parametrize("ours", ["BartModel", "BartForQuestionAnswering", "T5Model"])
@pytest.mark.parametrize("options", [{}, {"unpad": 30, "decoder_unpad": ROWS * TARGET}], ids=str)
def test_a_decoder_that_stays_padded_keeps_its_mask(hold, ours, options):
    """If the encoder is packed, all rows of the decoder are packed, too."""
    config, kind = small_config(ours[:4].lower() if ours[0] == "B" else "t5"), getattr(models, ours)
    inputs = inputs_of(ours, config, PADDINGS["right"]) | {"decoder_input_ids": random_targets()}
    # At the left, every token would attend to padding; at the right, only a loss's softmax reads
    # padding.
    side = "left" if ours.endswith("Model") else "right"
    mask = inputs["decoder_attention_mask"] = DECODER_MASKS[side]

    def run(model, **extra):
        out = model(**inputs, **extra)
        if side == "right":
            return {"loss": out.loss, "logits": out.start_logits}
        hidden = out.last_hidden_state[mask.bool()]
        return {"hidden": hidden, "loss": as_loss(hidden)}

    hold(kind(config), eager_parent(kind, config), lambda model: run(model, **options), run)


@pytest.mark.parametrize("kind", ["t5", "bart"])
@pytest.mark.parametrize("by_mask", [False, True])
def test_rows_of_an_encoder_see_the_tokens_after_them(kind, by_mask):
    torch.manual_seed(0)
    if kind == "t5":
        config = T5Config(vocab_size=30, d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=2)
        encoder = models.T5EncoderModel(config).eval()
    else:
        sizes = dict(encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=32)
        config = BartConfig(vocab_size=30, d_model=16, max_position_embeddings=16, **sizes)
        encoder = models.BartModel(config).eval().encoder
    ids, rows = torch.randint(3, 30, (2, 7)), torch.tensor([0, 9])
    read = torch.zeros(14).index_fill(0, rows, 1).view(2, 7).bool()
    with torch.no_grad():
        expected = encoder(input_ids=ids)[0].flatten(0, 1)[rows]
        if by_mask:
            found = encoder(input_ids=ids, read_rows=read)[0].flatten(0, 1)[rows]
        else:
            found = encoder(input_ids=ids, output_rows=rows)[0][:, 0]
    torch.testing.assert_close(found, expected)
