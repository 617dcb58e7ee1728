"""Accumulated micro-batches are one large batch, through the Trainer.

Seven samples an optimizer step: in one batch, or in micro-batches of two (the last of one) or of
one, with very unequal numbers of labels and of tokens, some without any label.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BartConfig,
    BertConfig,
    ElectraConfig,
    GPT2Config,
    T5Config,
    Trainer,
    TrainingArguments,
)

from fastplm.models import (
    BertForMaskedLM,
    BertForPreTraining,
    ElectraForJointPreTraining,
    ElectraJointConfig,
)
from fastplm.testing import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    BudgetExceeded,
    check_error,
)
from fastplm.train.objectives import build_model
from fastplm.train.trainer import PretrainingTrainer

VOCAB, LENGTH, STEPS = 37, 12, 3
LABELS = (0, 0, 1, 0, 2, 1, 9)
TOKENS = (12, 5, 12, 3, 6, 4, 12)
SIZES = {
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


def samples(pair_label):
    """One epoch, which is one step."""
    rows = []
    for index, (labels, tokens) in enumerate(zip(LABELS, TOKENS, strict=True)):
        ids = torch.randint(1, VOCAB, (LENGTH,))
        seen = torch.arange(LENGTH) < tokens
        chosen = torch.randperm(tokens)[:labels]
        row = {
            "input_ids": ids.index_fill(0, chosen, 1).masked_fill(~seen, 0),
            "attention_mask": seen.long(),
            "labels": torch.full((LENGTH,), -100).index_copy(0, chosen, ids[chosen]),
        }
        if pair_label:
            row[pair_label] = torch.tensor(index % 3 % 2)
        else:
            row["sample_index"] = torch.tensor(index)
        rows.append(row)
    return rows


def collate(rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    positions = (batch["labels"].flatten() != -100).nonzero().flatten()
    spare = torch.full((batch["labels"].numel() - len(positions),), -1)
    return {**batch, "masked_positions": torch.cat((positions, spare))}


def bert(cls):
    return cls(BertConfig(**SIZES))


def electra(**options):
    discriminator = ElectraConfig(**SIZES, embedding_size=16)
    return ElectraForJointPreTraining(
        ElectraJointConfig.from_discriminator(discriminator, generator_size=0.5, **options)
    )


# Classes of Transformers itself, which divide by the labels of their own batch.
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    "d_model": 32,
    "max_position_embeddings": LENGTH,
    "init_std": 0.3,
    "dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "n_positions": LENGTH,
    "initializer_range": 0.3,
    **{f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALBERT = {
    **SIZES,
    "embedding_size": 16,
    "classifier_dropout_prob": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES = {
    "MLM": (lambda: bert(BertForMaskedLM), PretrainingTrainer),
    "MLM, plain Trainer": (lambda: bert(BertForMaskedLM), Trainer),
    "MLM+NSP": (lambda: bert(BertForPreTraining), PretrainingTrainer),
    "RTD": (electra, PretrainingTrainer),
    "RTD, masked tokens": (lambda: electra(objective="rtd_masked"), PretrainingTrainer),
    "MLM+SOP": (
        lambda: build_model("albert", "mlm+sop", AlbertConfig(**ALBERT)),
        PretrainingTrainer,
    ),
    "CLM": (lambda: build_model("gpt2", "clm", GPT2Config(**GPT2)), PretrainingTrainer),
    "spans": (lambda: build_model("t5", "spans", T5Config(**T5)), PretrainingTrainer),
    "denoise": (lambda: build_model("bart", "denoise", BartConfig(**BART)), PretrainingTrainer),
}


PAIRS = {
    BertForPreTraining: "next_sentence_label",
    AlbertForPreTraining: "sentence_order_label",
}


def pair_label(model):
    return next((label for cls, label in PAIRS.items() if isinstance(model, cls)), None)


def unaware(cls):
    """The model, blind to all batches but its own: its mean losses are averaged."""

    class MeanOfMeans(cls):
        accepts_loss_kwargs = False

        def forward(
            self,
            num_items_in_batch=None,
            num_sequences_in_batch=None,
            num_tokens_in_batch=None,
            **kwargs,
        ):
            return super().forward(**kwargs)

    return MeanOfMeans


@pytest.fixture
def trained(tmp_path):
    """Trains a case; returns the logged losses [STEPS] by name, and all parameters by name."""

    def run(case, batch_size, *, unaware_of_others=False):
        make_model, trainer_cls = CASES[case]
        torch.manual_seed(0)
        model = make_model()
        rows = samples(pair_label(model))
        if type(model) is BertForMaskedLM:
            rows = [{k: v for k, v in row.items() if k != "sample_index"} for row in rows]
        if unaware_of_others:
            model.__class__ = unaware(type(model))
        trainer = trainer_cls(
            model=model.double(),
            args=TrainingArguments(
                output_dir=str(tmp_path),
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=-(-len(rows) // batch_size),
                max_steps=STEPS,
                learning_rate=0.02,
                optim="sgd",
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                train_sampling_strategy="sequential",
                remove_unused_columns=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,
            ),
            data_collator=collate,
            train_dataset=rows,
        )
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(history) == STEPS
        losses = {
            name: torch.tensor([entry[name] for entry in history], dtype=torch.float64)
            for name in history[0]
            if name.endswith("loss")
        }
        moved = {name: (p.detach() - before[name]) for name, p in model.named_parameters()}
        return losses, moved

    return run


def hold(out, gold, bases):
    """Losses and what the optimizer made of the gradients, in fp64 but for an fp32 rounding."""
    for kind, factor in ((0, FORWARD_FACTOR), (1, GRADIENT_FACTOR)):
        related = tuple(gold[1].values()) if kind else ()
        assert out[kind].keys() == gold[kind].keys()
        for name, value in out[kind].items():
            measures = [base[kind][name].float() for base in bases]
            check_error(name, value.float(), gold[kind][name], measures, factor, related)


QUICK = ("MLM, plain Trainer", "RTD")


@pytest.mark.parametrize("case", QUICK)
def test_micro_batches_of_unequal_size_are_one_batch(trained, case):
    hold_in_micro_batches(trained, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_micro_batches_of_other_objectives(trained, case):
    hold_in_micro_batches(trained, case)


def hold_in_micro_batches(trained, case):
    gold = trained(case, 7)
    assert all(moved.any() for moved in gold[1].values())
    # In fp64 all that may differ is how an fp32 number is rounded.
    hold(trained(case, 2), gold, [gold])
    hold(trained(case, 1), gold, [gold])
    # The mean of the micro-batches' means is something else.
    wrong = trained(case, 2, unaware_of_others=True)
    for kind in (0, 1):
        with pytest.raises(BudgetExceeded):
            hold(pick(wrong, kind), pick(gold, kind), [pick(gold, kind)])


def pick(run, kind):
    """The loss alone, or the parameters alone."""
    losses, moved = run
    return ({"loss": losses["loss"]}, {}) if kind == 0 else ({}, moved)


@pytest.mark.parametrize("batch_size", [7, 2])
@pytest.mark.parametrize("case", ["MLM", "MLM+SOP", "CLM", "spans"])
def test_a_logged_loss_is_the_mean_over_all_labels_of_the_step(trained, case, batch_size):
    """By the definition: the first step's loss from Transformers' logits on all rows at once."""
    losses, _ = trained(case, batch_size)
    torch.manual_seed(0)
    model = CASES[case][0]()
    batch = collate(samples(pair_label(model)))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if case == "spans":
        start = torch.zeros(len(LABELS), 1, dtype=torch.int64)
        shifted = torch.cat((start, batch["labels"][:, :-1]), 1)
        inputs["decoder_input_ids"] = shifted.clamp(min=0)  # padding is 0, too
    with torch.no_grad():
        outputs = model.double().eval()(**inputs)
    logits, labels = outputs[0], batch["labels"]
    if case == "CLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    chosen = labels != -100
    assert case == "CLM" or chosen.sum() == sum(LABELS)
    expected = mean_loss(logits[chosen], labels[chosen])
    if case == "MLM+SOP":
        expected = expected + mean_loss(outputs.sop_logits, batch["sentence_order_label"])
    check_error("loss", losses["loss"][0].float(), expected, [expected.float()], FORWARD_FACTOR)


def mean_loss(logits, labels):
    return -logits.log_softmax(1).gather(1, labels[:, None]).mean()
