"""fastplm.models.roberta against the classes of the same names in Transformers."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from transformers.models.esm.modeling_esm import EsmLMHead

from fastplm.models import RobertaForMaskedLM, RobertaModel
from fastplm.models._ragged import RaggedBatch

from .conftest import LENGTH, PADDINGS, ROWS, changed, eager_parent, small_config

VOCAB, PAD = 37, 1
CONFIG = small_config("roberta", hidden_size=32, intermediate_size=48)
RIGHT, LEFT = PADDINGS["right"], PADDINGS["left"]


def config(**changes):
    return changed(CONFIG, **changes)


def batch(mask=None):
    """Ids, the padding token only where masked, and labels for some tokens."""
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH))
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    chosen = (torch.rand(ROWS, LENGTH) < 0.3) & seen
    chosen[0, 4] = True
    return ids.masked_fill(~seen, PAD), ids.masked_fill(~chosen, -100)


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["ids", "labels", "embeds", "position_ids"])
@pytest.mark.parametrize("unpad", [None, 30, False])
def test_positions_are_those_of_the_padded_batch(given, unpad):
    """Positions count the tokens that are not padding tokens, from the padding id on; the mask has
    no effect."""
    mask = LEFT.clone()
    ids, labels = batch(mask)
    ids[0, 3] = PAD  # a padding token that the mask leaves in
    mask[0, 0] = 0  # a token that the mask leaves out
    inputs = {"input_ids": ids}
    counted = PAD + (ids != PAD).cumsum(1) * (ids != PAD)
    assert counted[0].tolist() == [2, 3, 4, PAD, 5, 6, 7, 8, 9]
    model = RobertaForMaskedLM(config())
    rows = mask.bool()
    if unpad is None:  # a token that is not padding may be read
        rows = rows | (ids != PAD) | torch.tensor(given == "embeds")
    if given == "labels":
        labels[0, 0] = 5
        inputs["labels"] = labels
        rows = mask.bool() | (labels != -100)
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
    shown = seen[0] if unpad is False else seen[0].reshape(1, -1)[:, : rows.sum()]
    assert torch.equal(shown, counted if unpad is False else counted[rows][None])


@pytest.mark.parametrize("extra", [{}, {"output_attentions": True}], ids=["packed", "padded"])
def test_unpad_with_a_ragged_batch_returns_its_rows(hold, extra):
    """The first token of one sequence is masked; its pooled output is not compared."""
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

    hold(RobertaModel(config()), eager_parent(RobertaModel, config()), packed, padded)


def test_a_head_of_another_family_runs_as_it_is():
    """ESM's has the modules of RoBERTa's, and a bias of its own beside that of the decoder."""
    config = small_config("roberta")
    ours, parent = RobertaForMaskedLM(config), eager_parent(RobertaForMaskedLM, config)
    head = EsmLMHead(config)
    torch.nn.init.normal_(head.bias)
    parent.load_state_dict(ours.state_dict())
    ours.lm_head = parent.lm_head = head
    ids = torch.randint(2, config.vocab_size, (ROWS, LENGTH))
    losses = [model.eval()(ids, labels=ids).loss for model in (ours, parent)]
    torch.testing.assert_close(*losses)
