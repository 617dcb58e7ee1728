"""Transformers' Trainer with every head: it trains, evaluates and predicts as with the parent."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, default_data_collator
from transformers.utils.generic import find_labels

import fastplm
from fastplm import models

from .conftest import (
    CLASSES,
    LENGTH,
    PADDINGS,
    ROWS,
    changed,
    eager_parent,
    inputs_of,
    pair,
    small_config,
)

#: Classes with a loss, one of a decoder for each family that has one.
HEADS = [name for name in CLASSES if find_labels(getattr(models, name))]
# Its loss runs over padding, and a row of padding may have no token in its window.
HEADS.remove("ModernBertForQuestionAnswering")
every_head = pytest.mark.parametrize("name", [*HEADS, "EncoderDecoderModel"])
#: One head of each backbone.
every_family = pytest.mark.parametrize(
    "name", {getattr(models, name).__module__: name for name in HEADS}.values()
)
#: Their labels are not those that Trainer counts, so Trainer takes means of batches from them.
MEANS = ("BartForCausalLM", "GPT2DoubleHeadsModel", "OpenAIGPTDoubleHeadsModel")
#: Classes whose parents fail with label smoothing: Trainer finds no ``logits``, or not [..., V].
NOT_SMOOTHED = ("AlbertForPreTraining", "BertForPreTraining", "ElectraForPreTraining")
#: Classes that ``generate`` from a source.
GENERATES = ("BartForConditionalGeneration", "T5ForConditionalGeneration", "EncoderDecoderModel")


def both(name):
    """(a drop-in model, its parent with the same weights)."""
    if name != "EncoderDecoderModel":
        return pair(name)
    parts = small_config("bert"), small_config("bert", is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    ours = models.EncoderDecoderModel(copy.deepcopy(config)).eval()
    parent = eager_parent(models.EncoderDecoderModel, config).eval()
    parent.load_state_dict(ours.state_dict())
    return ours, parent


def rows_of(name, config):
    """The batch of ``inputs_of``, row by row."""
    if name == "EncoderDecoderModel":
        config = changed(config.encoder, pad_token_id=0)
    inputs = inputs_of(name, config, PADDINGS["right"])
    inputs.pop("use_cache", None)
    if name.startswith("OpenAIGPTDouble"):
        # Its parent takes no mask [B, C, T].
        inputs.pop("attention_mask")
    if "end_positions" in inputs:  # the loss of a batch without an answer inside is NaN
        inputs["end_positions"] = inputs["end_positions"].clamp(max=LENGTH - 1)
    if name in GENERATES:
        # As DataCollatorForSeq2Seq adds them.
        inputs["decoder_input_ids"] = torch.randint(4, 37, inputs["labels"].shape)
    return [{key: value[row] for key, value in inputs.items()} for row in range(ROWS)]


class Metrics:
    """``compute_metrics``: how often it is called, and with which predictions."""

    def __init__(self):
        self.seen = []

    def __call__(self, predictions):
        self.seen.append(predictions)
        return {"metric": 0.5}


def trainer_of(model, rows, folder, **options):
    metrics = Metrics()
    quiet = dict(report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    quiet["train_sampling_strategy"] = "sequential"
    sizes = dict(per_device_train_batch_size=ROWS, per_device_eval_batch_size=ROWS)
    arguments = Seq2SeqTrainingArguments(str(folder), **{**quiet, **sizes, **options})
    return Seq2SeqTrainer(model, arguments, None, rows, rows, compute_metrics=metrics), metrics


def arrays(value):
    """The arrays of predictions, in their order."""
    if isinstance(value, (tuple, list)):
        return [array for each in value for array in arrays(each)]
    return [] if value is None else [np.asarray(value)]


def evaluated(model, rows, folder, **options):
    """(scores, arrays of the predictions, arrays of the labels) of an evaluation."""
    trainer, metrics = trainer_of(model, rows, folder, **options)
    scores = trainer.evaluate()
    (seen,) = metrics.seen
    return scores, arrays(seen.predictions), arrays(seen.label_ids)


def train_loss(model, rows, folder, accumulation=1, **options):
    """The loss of one step, which changes no weight."""
    trainer, _ = trainer_of(
        model,
        rows,
        folder,
        per_device_train_batch_size=ROWS // accumulation,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.0,
        max_steps=1,
        **options,
    )
    return trainer.train().training_loss


@pytest.mark.parametrize("made", ["class", pytest.param("accelerated", marks=pytest.mark.slow)])
@every_head
def test_evaluation_is_the_parents(name, made, tmp_path):
    """Trainer finds the same labels, loss and predictions, and asks for metrics."""
    ours, parent = both(name)
    if made == "accelerated":
        ours = fastplm.accelerate(copy.deepcopy(parent))
    assert find_labels(type(ours)) == find_labels(type(parent))
    rows = rows_of(name, parent.config)
    cases = [{}]
    if "labels" in rows[0] and name not in NOT_SMOOTHED:
        cases.append({"label_smoothing_factor": 0.1})
    if name in GENERATES:
        generates = {"predict_with_generate": True, "generation_max_length": LENGTH}
        cases += [{**case, **generates} for case in cases]
    for case in cases:
        found = evaluated(ours, rows, tmp_path, **case)
        theirs = evaluated(parent, rows, tmp_path, **case)
        assert found[0].keys() == theirs[0].keys() and "eval_loss" in found[0], case
        assert found[0]["eval_loss"] == pytest.approx(theirs[0]["eval_loss"], rel=1e-4), case
        for own, other in zip(found[1:], theirs[1:], strict=True):
            assert [array.shape for array in own] == [array.shape for array in other], case


@every_head
def test_batches_without_labels_are_left_out_of_the_mean(name, tmp_path):
    ours, parent = both(name)
    rows = rows_of(name, parent.config)
    if "labels" not in rows[0] or rows[0]["labels"].dim() == 0 or name == "ElectraForPreTraining":
        pytest.skip("one label, or none, for each text; ELECTRA's parent takes -100 for a number")
    rows[1]["labels"] = torch.full_like(rows[1]["labels"], -100)
    options = dict(per_device_eval_batch_size=1)
    found, theirs = (evaluated(model, rows, tmp_path, **options)[0] for model in (ours, parent))
    assert found["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-4)


@every_family
def test_noise_of_embeddings_is_the_parents(name, tmp_path):
    """NEFTune's noise depends on the length of the batch, so padding is not left out."""
    ours, parent = (model.train() for model in both(name))
    rows = rows_of(name, parent.config)
    found, theirs = (
        train_loss(model, rows, tmp_path, neftune_noise_alpha=50.0) for model in (ours, parent)
    )
    assert found == pytest.approx(theirs, rel=1e-4)


@every_head
def test_training_losses_are_the_parents(name, tmp_path):
    """Accumulated, they are those of one large batch, also where the parent's are added up.

    Trainer takes a model that accepts further arguments for one that divides its loss by the labels
    of all batches. Most parents do accept them, and do not divide: with k batches they give k
    times the loss.
    """
    ours, parent = (model.train() for model in both(name))
    rows = rows_of(name, parent.config)
    smooths = "labels" in rows[0] and name not in NOT_SMOOTHED
    for case in [{}, {"label_smoothing_factor": 0.1}] if smooths else [{}]:
        whole = train_loss(ours, rows, tmp_path, **case)
        assert whole == pytest.approx(train_loss(parent, rows, tmp_path, **case), rel=1e-4), case
        parts = 4
        found = train_loss(ours, rows, tmp_path, parts, **case)
        if "labels" not in rows[0]:
            theirs = train_loss(parent, rows, tmp_path, parts, **case)
            assert found == pytest.approx(theirs, rel=1e-4)
        elif name not in MEANS:
            # Losses of pairs are weighted by the labels of the other loss, see the docstring.
            few = 0.1 if name in ("AlbertForPreTraining", "BertForPreTraining") else 1e-4
            assert found == pytest.approx(whole, rel=few), case
        elif not case:
            size = ROWS // parts
            batches = [rows[begin : begin + size] for begin in range(0, ROWS, size)]
            means = [ours(**default_data_collator(batch)).loss.item() for batch in batches]
            assert found == pytest.approx(sum(means) / parts, rel=1e-4)
