"""The Trainer's losses and figures with classes, batches and evaluations that it has not made."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    TrainingArguments,
)

import fastplm.hf
import fastplm.models
from fastplm.data import DataCollatorForCausalTokens, DataCollatorForMaskedTokens
from fastplm.testing import FORWARD_FACTOR, check_error
from fastplm.train import trainer as module
from fastplm.train.evaluate import evaluate
from fastplm.train.losses import outputs_with_loss
from fastplm.train.trainer import PretrainingTrainer

VOCAB, LENGTH = 37, 12
LENGTHS = (12, 3, 7, 1, 5, 12, 2)
GPT = {"vocab_size": VOCAB, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LENGTH}
GPT |= {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
GPT |= {"initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2}
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}
ALBERT = {**BERT, "embedding_size": 16, "classifier_dropout_prob": 0.0}
CAUSAL = {
    GPT2LMHeadModel: GPT2Config(**GPT),
    OpenAIGPTLMHeadModel: OpenAIGPTConfig(**GPT),
    BertLMHeadModel: BertConfig(**BERT, is_decoder=True),
}


def make(cls, config, attention="eager"):
    torch.manual_seed(0)
    return cls._from_config(copy.deepcopy(config), attn_implementation=attention).double()


def text():
    generator = torch.Generator().manual_seed(1)
    ids = (torch.randint(5, VOCAB, (length,), generator=generator) for length in LENGTHS)
    return [{"input_ids": row, "sample_index": i} for i, row in enumerate(ids)]


@pytest.fixture(scope="module")
def tokenizer(word_tokenizer):
    words = [f"word{i}" for i in range(VOCAB - 2)]
    return word_tokenizer(["[PAD]", "[MASK]", *words], pad_token="[PAD]", mask_token="[MASK]")


@pytest.fixture
def trained(tmp_path):
    """A trainer that has been through its steps without changing the weights."""

    def trained(model, collator, *, batch_size=None, steps=1, rows=None, **options):
        rows = text() if rows is None else rows
        batch_size = batch_size or len(rows)
        evaluated = "eval_dataset" in options
        trainer = PretrainingTrainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=batch_size,
                per_device_eval_batch_size=100,
                gradient_accumulation_steps=-(-len(rows) // batch_size),
                max_steps=steps,
                learning_rate=options.pop("learning_rate", 0.0),
                optim="sgd",
                lr_scheduler_type="constant",
                train_sampling_strategy="sequential",
                remove_unused_columns=False,
                logging_steps=1,
                eval_strategy="steps" if evaluated else "no",
                eval_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            data_collator=collator,
            train_dataset=rows,
            **options,
        )
        trainer.train()
        return trainer

    return trained


def curve(trainer):
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{k: v for k, v in entry.items() if "second" not in k} for entry in history]


def hold(name, value, gold):
    """In fp64 all that may differ is how an fp32 number is rounded."""
    gold = torch.as_tensor(gold).detach()
    check_error(name, torch.tensor(value), gold, [gold.float()], FORWARD_FACTOR)


# --- classes of Transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", CAUSAL, ids=lambda kind: kind.__name__)
def test_a_causal_model_predicts_the_next_token(trained, tokenizer, tmp_path, kind):
    """A plain one and one from a checkpoint have the loss of Transformers' own class."""
    model = make(kind, CAUSAL[kind])
    collator = DataCollatorForCausalTokens(tokenizer)
    batch = collator(text())
    del batch["sample_index"]
    gold = model(**batch).loss
    hold("loss", curve(trained(model, collator, batch_size=2))[0]["loss"], gold)
    model.save_pretrained(tmp_path / "model")
    reloaded = kind.from_pretrained(tmp_path / "model", attn_implementation="eager")
    held_out = evaluate(reloaded.double(), text(), collator, 2, "clm_loss")
    hold("clm_loss", held_out["clm_loss"], gold)


@pytest.mark.parametrize(
    ("kind", "label", "pair"),
    [
        (BertForPreTraining, "next_sentence_label", "next_sentence_loss"),
        (AlbertForPreTraining, "sentence_order_label", "sentence_order_loss"),
    ],
)
def test_pairs_of_transformers_classes(trained, tokenizer, kind, label, pair):
    model = make(kind, BertConfig(**BERT) if kind is BertForPreTraining else AlbertConfig(**ALBERT))
    rows = [row | {label: index % 3 % 2} for index, row in enumerate(text())]
    collator = DataCollatorForMaskedTokens(tokenizer, mlm_probability=0.4)
    batch = collator(rows)
    plain = {k: v for k, v in batch.items() if k not in ("sample_index", "masked_positions")}
    gold = model(**plain)
    labelled = plain["labels"] >= 0
    parts = {
        "mlm_loss": mean_loss(gold.prediction_logits[labelled], plain["labels"][labelled]),
        pair: mean_loss(gold[2], plain[label]),
    }
    counts = {"num_items_in_batch": labelled.sum(), "num_sequences_in_batch": len(rows)}
    outputs = outputs_with_loss(model, model, **batch, **counts)
    hold("loss", outputs["loss"].item(), gold.loss)
    for batch_size in (len(rows), 2):
        entry = curve(trained(model, collator, batch_size=batch_size, rows=rows))[0]
        hold("loss", entry["loss"], gold.loss)
        for name, value in parts.items():
            hold(name, entry[name], value)


def test_labels_of_pairs_for_a_model_without_a_head_for_them(trained, tokenizer):
    """They are left out of the loss, and of the log."""
    model = make(BertForMaskedLM, BertConfig(**BERT))
    collator = DataCollatorForMaskedTokens(tokenizer)
    rows = [row | {"next_sentence_label": 1} for row in text()]
    without, paired = (trained(model, collator, rows=rows) for rows in (None, rows))
    assert curve(without) == curve(paired) and "next_sentence_loss" not in curve(paired)[0]
    assert evaluate(model, text(), collator, 2) == evaluate(model, rows, collator, 2)


def mean_loss(logits, labels):
    return -logits.log_softmax(1).gather(1, labels[:, None]).mean()


# --- evaluation during the training ---------------------------------------------------------------


def test_evaluation_leaves_no_trace_in_the_log(trained, tokenizer, monkeypatch):
    """And has the loss of ``evaluate``; the clock of the training stands still meanwhile."""
    collator = DataCollatorForMaskedTokens(tokenizer, mlm_probability=0.4)
    clock = 1.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock))

    def corrupt(batch):
        nonlocal clock
        clock += 1 if batch["sample_index"][0] < 100 else 1000
        return collator.corrupt(batch)

    rows = [row | {"sentence_order_label": index % 3 % 2} for index, row in enumerate(text())]
    others = [row | {"sample_index": 100 + row["sample_index"]} for row in rows[:3]]
    options = {"corrupt": corrupt, "rows": rows, "batch_size": 2, "steps": 3}
    runs = []
    for more in ({}, {"eval_dataset": others}):
        model = make(AlbertForPreTraining, AlbertConfig(**ALBERT))
        runs.append(trained(model, collator.pad, learning_rate=0.1, **options, **more))
    without, evaluated = runs
    assert curve(evaluated) == curve(without)
    assert evaluated.train_seconds == without.train_seconds == 12
    assert evaluated.tokens_per_second == without.tokens_per_second == sum(LENGTHS) * 3 / 12
    logged = [entry for entry in evaluated.state.log_history if "eval_loss" in entry]
    held_out = evaluate(evaluated.model, others, collator, 3)
    assert len(logged) == 3 and held_out["samples"] == 3
    gold = torch.tensor(held_out["mlm_loss"] + held_out["sentence_order_loss"]).double()
    hold("eval_loss", logged[-1]["eval_loss"], gold)
    hold("eval_loss", evaluated.evaluate()["eval_loss"], gold)


# --- packed rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [GPT2LMHeadModel, BertForMaskedLM, fastplm.models.BertForMaskedLM], ids=str
)
def test_packed_rows_have_the_loss_of_padded_ones(trained, tokenizer, kind):
    config, make_collator = BertConfig(**BERT), DataCollatorForMaskedTokens
    if kind is GPT2LMHeadModel:
        config, make_collator = GPT2Config(**GPT), DataCollatorForCausalTokens
    model = make(kind, config, fastplm.hf.NAME)
    padded, packed = (make_collator(tokenizer, packed=packed) for packed in (False, True))
    runs = [trained(model, collator, batch_size=3) for collator in (padded, packed)]
    hold("loss", curve(runs[1])[0]["loss"], torch.tensor(curve(runs[0])[0]["loss"]).double())
    tokens = [round(run.tokens_per_second * run.train_seconds) for run in runs]
    assert tokens == [sum(LENGTHS)] * 2
    held_out = [evaluate(model, text(), collator, 3) for collator in (padded, packed)]
    assert held_out[0]["samples"] == held_out[1]["samples"] == len(LENGTHS)
    hold("mlm_loss", held_out[1]["mlm_loss"], torch.tensor(held_out[0]["mlm_loss"]).double())
