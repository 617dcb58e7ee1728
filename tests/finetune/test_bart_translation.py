"""fastplm.finetune.bart_translation: a BART that reads its source through a new encoder."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.bart import modeling_bart

from fastplm.errors import ArgumentValueError
from fastplm.finetune.bart_translation import BartForTranslation
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import build_model
from fastplm.finetune.run import finetune

from ..models.conftest import small_config

CONFIG = small_config("bart", vocab_size=41)
SOURCE_VOCABULARY = 53


@pytest.fixture
def models():
    """fastplm's model in fp64, and the parents of its parts: the source encoder and BART."""
    torch.manual_seed(0)
    bart = transformers.BartForConditionalGeneration(CONFIG)
    ours = BartForTranslation.from_bart(bart, SOURCE_VOCABULARY, layers=1).double().eval()
    source = modeling_bart.BartEncoder(
        transformers.BartConfig(**ours.config.source_encoder, attn_implementation="eager")
    )
    source.load_state_dict(ours.model.encoder.source_encoder.state_dict())
    return ours, source.double().eval(), bart.double().eval()


@pytest.fixture
def batch():
    ids = torch.randint(4, SOURCE_VOCABULARY, (3, 9))
    mask = torch.ones_like(ids)
    mask[0, 5:] = mask[2, 7:] = 0
    labels = torch.randint(4, 41, (3, 6))
    labels[1, 3:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def test_loss_and_gradients_are_those_of_the_parents(models, batch):
    ours, source, bart = models
    ours(**batch).loss.backward()
    mask = batch["attention_mask"]
    states = source(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    loss = bart(inputs_embeds=states, attention_mask=mask, labels=batch["labels"]).loss
    loss.backward()
    torch.testing.assert_close(ours(**batch).loss.double(), loss, rtol=1e-6, atol=0)
    theirs = dict(bart.named_parameters()) | {
        f"model.encoder.source_encoder.{name}": p for name, p in source.named_parameters()
    }
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("beams", [1, 3])
def test_generate(models, batch, beams):
    ours, source, bart = models
    mask = batch["attention_mask"]
    states = source(input_ids=batch["input_ids"], attention_mask=mask).last_hidden_state
    options = {"num_beams": beams, "max_new_tokens": 8, "do_sample": False}
    found = ours.generate(input_ids=batch["input_ids"], attention_mask=mask, **options)
    encoded = bart.model.encoder(inputs_embeds=states, attention_mask=mask)
    wanted = bart.generate(encoder_outputs=encoded, attention_mask=mask, **options)
    assert torch.equal(found, wanted)


def test_saved_and_loaded(models, batch, tmp_path):
    ours, _, _ = models
    ours.save_pretrained(tmp_path)
    loaded = BartForTranslation.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(loaded(**batch).loss, ours(**batch).loss)


def test_first_step_parameters(models):
    ours, _, _ = models
    first = {id(parameter) for parameter in ours.first_step_parameters()}
    names = [n for n, p in ours.named_parameters() if id(p) in first]
    rest = [name for name in names if ".source_encoder." not in name]
    attention = "model.encoder.layers.0.self_attn"
    assert set(rest) == {
        *(f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")),
        *(f"{attention}.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")),
    }
    source = ours.model.encoder.source_encoder
    assert len(names) - len(rest) == len(list(source.parameters()))


def test_wrong_configurations():
    with pytest.raises(ArgumentValueError, match="from_bart"):
        BartForTranslation(CONFIG)
    config = transformers.BartConfig.from_dict(CONFIG.to_dict())
    config.source_encoder = {"d_model": CONFIG.d_model + 1}
    with pytest.raises(ArgumentValueError, match=f"d_model = {CONFIG.d_model}"):
        BartForTranslation(config)


# --- the two steps of its training ----------------------------------------------------------------


@pytest.mark.slow
def test_first_step_trains_the_new_encoder_alone(writing):
    args = writing("new source", steps=12, source_encoder_steps=12, weight_decay=0.1)
    task = prepare_task(args)
    before = build_model(task, 0)
    free = {id(parameter) for parameter in before.first_step_parameters()}
    metrics = finetune(args)
    after = BartForTranslation.from_pretrained(metrics["seeds"][0]["model"])
    trained = dict(after.named_parameters())
    for name, parameter in before.named_parameters():
        # All weights change, except embeddings of the source encoder for tokens that no source has.
        assert torch.equal(parameter, trained[name]) == (id(parameter) not in free), name
    losses = [entry["loss"] for entry in metrics["seeds"][0]["history"]]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_second_step_trains_all(writing):
    args = writing("new source", steps=3, source_encoder_steps=2)
    before = dict(build_model(prepare_task(args), 0).named_parameters())
    metrics = finetune(args)
    after = BartForTranslation.from_pretrained(metrics["seeds"][0]["model"])
    same = [name for name, p in after.named_parameters() if torch.equal(p, before[name])]
    assert same == []
