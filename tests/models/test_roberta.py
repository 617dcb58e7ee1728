"""fastplm.models.roberta against the classes of the same names in Transformers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import transformers
from transformers import RobertaConfig

from fastplm.models import RobertaForCausalLM, RobertaForMaskedLM, RobertaModel
from fastplm.models._ragged import RaggedBatch

VOCAB, ROWS, LENGTH, PAD = 37, 4, 9, 1
CONFIG = RobertaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=20,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    initializer_range=0.3,
    pad_token_id=PAD,
)
RIGHT = torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 8 + [0], [1] * 2 + [0] * 7])
LEFT = RIGHT.flip(1)


def config(**fields):
    changed = copy.deepcopy(CONFIG)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def batch(mask=None):
    """Ids, which are the padding token where the mask hides them alone, and labels at some."""
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH))
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    chosen = (torch.rand(ROWS, LENGTH) < 0.3) & seen
    chosen[0, 4] = True
    return ids.masked_fill(~seen, PAD), ids.masked_fill(~chosen, -100)


def parent_of(ours, config):
    parent = getattr(transformers, ours.__name__)
    return parent._from_config(copy.deepcopy(config), attn_implementation="eager")


def test_compiled_once_for_all_paddings(hold):
    torch._dynamo.reset()
    model = RobertaForMaskedLM(config())
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for mask in (RIGHT, LEFT):
        ids, labels = batch(mask)
        given = {"attention_mask": mask, "labels": labels}
        hold(
            model,
            model,
            lambda _, ids=ids, given=given: {"loss": compiled(ids, unpad=30, **given).loss},
            lambda model, ids=ids, given=given: {"loss": model(ids, **given).loss},
        )
    assert counter.frame_count == 1


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["ids", "labels", "embeds", "position_ids"])
@pytest.mark.parametrize("unpad", [None, 30, False])
def test_positions_are_those_of_the_padded_batch(given, unpad):
    """Counted from the padding token's id on, over what is not that token; the mask has no say."""
    mask = LEFT.clone()
    ids, labels = batch(mask)
    ids[0, 3] = PAD  # a padding token that the mask does not hide
    mask[0, 0] = 0  # a token that it hides
    inputs = {"input_ids": ids}
    counted = PAD + (ids != PAD).cumsum(1) * (ids != PAD)
    assert counted[0].tolist() == [2, 3, 4, PAD, 5, 6, 7, 8, 9]
    model = RobertaForMaskedLM(config())
    rows = mask.bool()
    if given == "labels":
        labels[0, 0] = 5
        inputs["labels"] = labels
        rows = rows | (labels != -100)
    if given == "embeds":
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach()}
        counted = torch.arange(PAD + 1, PAD + 1 + LENGTH).expand(ROWS, -1)
    if given == "position_ids":
        counted = inputs["position_ids"] = torch.arange(LENGTH).flip(0).expand(ROWS, -1)
    seen = []
    model.roberta.embeddings.register_forward_pre_hook(
        lambda _, arguments, kwargs: seen.append(kwargs["position_ids"]), with_kwargs=True
    )
    model(attention_mask=mask, unpad=unpad, **inputs)
    shown = seen[0] if unpad is False else seen[0][:, : rows.sum()]
    assert torch.equal(shown, counted if unpad is False else counted[rows][None])


def test_a_padding_token_among_the_others_equals_the_parents(hold):
    mask = RIGHT.clone()
    ids, labels = batch(mask)
    ids[0, 3] = PAD
    mask[2, 1] = 0

    def run(model):
        return {"loss": model(ids, attention_mask=mask, labels=labels).loss}

    hold(RobertaForMaskedLM(config()), parent_of(RobertaForMaskedLM, config()), run)


@pytest.mark.parametrize("extra", [{}, {"output_attentions": True}], ids=["packed", "padded"])
def test_rows_that_the_caller_chose_come_back_as_they_are(hold, extra):
    """The mask hides a first token, and what is pooled there is nobody's business."""
    mask = RIGHT.clone()
    mask[1, 0] = 0
    ids, _ = batch(mask)
    rows = RaggedBatch.of(mask)

    def packed(model):
        out = model(ids, attention_mask=mask, unpad=rows, **extra)
        alive = out.pooler_output[[0, 2, 3]]
        return {"hidden": out.last_hidden_state[0].detach(), "pooled": alive.detach()}

    def padded(model):
        out = model(ids, attention_mask=mask)
        alive = out.pooler_output[[0, 2, 3]]
        return {"hidden": out.last_hidden_state[mask.bool()].detach(), "pooled": alive.detach()}

    hold(RobertaModel(config()), parent_of(RobertaModel, config()), packed, padded)


# --- the decoder ----------------------------------------------------------------------------------

DECODER = {"is_decoder": True, "add_cross_attention": True}


@pytest.mark.parametrize("packed", [False, True], ids=["padded states", "packed states"])
@pytest.mark.parametrize("mask", [None, RIGHT, LEFT], ids=["none", "right", "left"])
def test_cross_attention_of_two_paddings_equals_the_parents(hold, mask, packed):
    ids, labels = batch(mask)
    mask_of_states = torch.tensor([[1] * 3 + [0] * 4, [1] * 7, [0] * 6 + [1], [1] * 5 + [0] * 2])
    states = torch.randn(ROWS, 7, 32)
    # What is padding must not matter, whatever it holds.
    states = states.masked_fill(mask_of_states[..., None] == 0, 1e6)
    given = {"encoder_hidden_states": states, "encoder_attention_mask": mask_of_states}
    rows = RaggedBatch.of(mask_of_states)
    ours_given = given
    if mask is not None:
        # What padding at the left predicts, having seen nothing, each implementation says itself.
        labels = labels.masked_fill((mask & mask.roll(1, 1)) == 0, -100)
    if packed:
        ours_given = {"encoder_hidden_states": rows.pack_rows(states), "encoder_rows": rows}

    def run(model, given=given, **extra):
        states = given["encoder_hidden_states"].to(next(model.parameters()).dtype)
        given = {**given, "encoder_hidden_states": states}
        out = model(ids, attention_mask=mask, labels=labels, **given, **extra)
        shown = slice(None) if mask is None else mask.bool()
        return {"loss": out.loss, "logits": out.logits[shown]}

    hold(
        RobertaForCausalLM(config(**DECODER)),
        parent_of(RobertaForCausalLM, config(**DECODER)),
        lambda model: run(model, ours_given, output_logits=True),
        run,
    )


def test_generation_is_the_parents_with_and_without_a_cache():
    ids, _ = batch(LEFT)
    ours = RobertaForCausalLM(config(is_decoder=True)).eval()
    parent = parent_of(RobertaForCausalLM, config(is_decoder=True)).eval()
    parent.load_state_dict(ours.state_dict())
    settings = {"attention_mask": LEFT, "max_new_tokens": 5, "do_sample": False}
    expected = parent.generate(ids, **settings)
    for use_cache in (True, False):
        assert torch.equal(ours.generate(ids, use_cache=use_cache, **settings), expected)


def test_a_cache_continues_the_positions(hold):
    ids, _ = batch()

    def in_two_pieces(model):
        first = model(ids[:, :4], use_cache=True)
        out = model(ids[:, 4:], past_key_values=first.past_key_values)
        return {"logits": torch.cat((first.logits, out.logits), 1).detach()}

    model = RobertaForCausalLM(config(is_decoder=True))
    hold(model, model, in_two_pieces, lambda model: {"logits": model(ids).logits.detach()})


def test_with_labels_there_is_a_cache_only_if_asked_for():
    ids, labels = batch()
    model = RobertaForCausalLM(config(is_decoder=True))
    assert model(ids, labels=labels).past_key_values is None
    assert model(ids, labels=labels, use_cache=True).past_key_values is not None
    assert model(ids).past_key_values is not None
