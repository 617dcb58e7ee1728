"""The Trainer's losses: of accumulated batches, of other classes and of evaluations."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BartConfig,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    ElectraConfig,
    GPT2Config,
    T5Config,
    Trainer,
    TrainingArguments,
)

import fastplm.hf
from fastplm import models
from fastplm.data import DataCollatorForCausalTokens, DataCollatorForMaskedTokens
from fastplm.distill.run import DistillationTrainer
from fastplm.errors import ArgumentTypeError
from fastplm.finetune.run import FinetuningTrainer
from fastplm.pretrain import run as pretrain
from fastplm.pretrain.evaluate import evaluate
from fastplm.pretrain.model import build_model
from fastplm.pretrain.trainer import PretrainingTrainer, TwoStageTrainer
from fastplm.run import trainer as module
from fastplm.run.trainer import RunTrainer
from fastplm.testing import FORWARD_FACTOR, GRADIENT_FACTOR, BudgetExceeded, check_error

VOCAB, LENGTH, STEPS = 37, 12, 3
LENGTHS = (12, 3, 7, 1, 5, 12, 2)
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
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
ALBERT = {**BERT, **ENDS, "embedding_size": 16, "classifier_dropout_prob": 0.0}
GPT = {"vocab_size": VOCAB, "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LENGTH}
GPT |= {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
GPT |= {"initializer_range": 0.3, **ENDS}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
BART = {f"{side}_{name}": SIDE[name] for side in ("encoder", "decoder") for name in SIDE}
BART |= {"vocab_size": VOCAB, "d_model": 32, "max_position_embeddings": LENGTH, "dropout": 0.0}
BART |= {"init_std": 0.3, "pad_token_id": 0, "decoder_start_token_id": 2, **ENDS}


def settings(tmp_path, batch_size, rows, **options):
    """The arguments of steps that each see all rows in order, and are each logged."""
    return TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=-(-len(rows) // batch_size),
        optim="sgd",
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def mean_loss(logits, labels):
    return -logits.log_softmax(1).gather(1, labels[:, None]).mean()


# --- accumulated batches --------------------------------------------------------------------------

# Each step has seven samples with very unequal numbers of labels and tokens: in one batch, or in
# micro-batches of two (the last of one) or of one, some without any label.
LABELS = (0, 0, 1, 0, 2, 1, 9)
TOKENS = (12, 5, 12, 3, 6, 4, 12)


def samples(pair_label):
    """The samples of one epoch, which is one step."""
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


def electra(**options):
    discriminator = ElectraConfig(**BERT, embedding_size=16)
    return models.ElectraForJointPreTraining(
        models.ElectraJointConfig.from_discriminator(discriminator, generator_size=0.5, **options)
    )


CASES = {
    "MLM": (lambda: models.BertForMaskedLM(BertConfig(**BERT)), PretrainingTrainer),
    "MLM, plain Trainer": (lambda: models.BertForMaskedLM(BertConfig(**BERT)), Trainer),
    "MLM+NSP": (lambda: models.BertForPreTraining(BertConfig(**BERT)), PretrainingTrainer),
    "RTD": (electra, PretrainingTrainer),
    "RTD, masked tokens": (lambda: electra(objective="rtd_masked"), PretrainingTrainer),
    "MLM+SOP": (
        lambda: build_model("albert", "mlm+sop", AlbertConfig(**ALBERT)),
        PretrainingTrainer,
    ),
    "CLM": (lambda: build_model("gpt2", "clm", GPT2Config(**GPT)), PretrainingTrainer),
    "spans": (lambda: build_model("t5", "spans", T5Config(**T5)), PretrainingTrainer),
    "denoise": (lambda: build_model("bart", "denoise", BartConfig(**BART)), PretrainingTrainer),
}


def pair_label(model):
    if isinstance(model, AlbertForPreTraining):
        return "sentence_order_label"
    return "next_sentence_label" if isinstance(model, BertForPreTraining) else None


def unaware(cls):
    """A model that sees only its own batch, so that its mean losses are averaged."""

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
def accumulated(tmp_path):
    """Trains a case; returns the logged losses [STEPS] by name, and all parameters by name."""

    def run(case, batch_size, *, unaware_of_others=False):
        make_model, trainer_cls = CASES[case]
        torch.manual_seed(0)
        model = make_model()
        rows = samples(pair_label(model))
        if type(model) is models.BertForMaskedLM:
            rows = [{k: v for k, v in row.items() if k != "sample_index"} for row in rows]
        if unaware_of_others:
            model.__class__ = unaware(type(model))
        options = {"max_steps": STEPS, "learning_rate": 0.02, "max_grad_norm": 0.0}
        trainer = trainer_cls(
            model=model.double(),
            args=settings(tmp_path, batch_size, rows, **options),
            data_collator=collate,
            train_dataset=rows,
        )
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        trainer.train()
        history = logged(trainer)
        assert len(history) == STEPS
        losses = {
            name: torch.tensor([entry[name] for entry in history], dtype=torch.float64)
            for name in history[0]
            if name.endswith("loss")
        }
        moved = {name: (p.detach() - before[name]) for name, p in model.named_parameters()}
        return losses, moved

    return run


def hold_run(out, gold, bases):
    """Compares losses and updated parameters, in fp64 except for one fp32 rounding."""
    for kind, factor in ((0, FORWARD_FACTOR), (1, GRADIENT_FACTOR)):
        related = tuple(gold[1].values()) if kind else ()
        assert out[kind].keys() == gold[kind].keys()
        for name, value in out[kind].items():
            measures = [base[kind][name].float() for base in bases]
            check_error(name, value.float(), gold[kind][name], measures, factor, related)


QUICK = ("MLM, plain Trainer", "RTD")


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_micro_batches_of_unequal_size_are_one_batch(accumulated, case):
    gold = accumulated(case, 7)
    assert all(moved.any() for moved in gold[1].values())
    # In fp64, results may differ only by the rounding of an fp32 number.
    hold_run(accumulated(case, 2), gold, [gold])
    hold_run(accumulated(case, 1), gold, [gold])
    # The mean of the micro-batches' means would differ.
    wrong = accumulated(case, 2, unaware_of_others=True)
    for kind in (0, 1):
        with pytest.raises(BudgetExceeded):
            hold_run(pick(wrong, kind), pick(gold, kind), [pick(gold, kind)])


def pick(run, kind):
    """The loss alone, or the parameters alone, of a run's results."""
    losses, moved = run
    return ({"loss": losses["loss"]}, {}) if kind == 0 else ({}, moved)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [7, 2])
@pytest.mark.parametrize("case", ["MLM", "MLM+SOP", "CLM", "spans"])
def test_a_logged_loss_is_the_mean_over_all_labels_of_the_step(accumulated, case, batch_size):
    """The first step's loss, by its definition, follows from Transformers' logits on all rows."""
    losses, _ = accumulated(case, batch_size)
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


# --- any model, collator and rows -----------------------------------------------------------------


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
    """A trainer that has run its steps without changing the weights."""

    def trained(model, collator, *, batch_size=None, steps=1, rows=None, **options):
        rows = text() if rows is None else rows
        batch_size = batch_size or len(rows)
        evaluated = "eval_dataset" in options
        rate = options.pop("learning_rate", 0.0)
        when = {"eval_strategy": "steps" if evaluated else "no", "eval_steps": 1}
        when |= {"max_steps": steps, "learning_rate": rate, "per_device_eval_batch_size": 100}
        trainer = PretrainingTrainer(
            model=model,
            args=settings(tmp_path, batch_size, rows, **when),
            data_collator=collator,
            train_dataset=rows,
            **options,
        )
        trainer.train()
        return trainer

    return trained


def curve(trainer):
    return [{k: v for k, v in e.items() if "second" not in k} for e in logged(trainer)]


def hold(name, value, gold):
    """In fp64, values may differ only by the rounding of an fp32 number."""
    gold = torch.as_tensor(gold).detach()
    check_error(name, torch.tensor(value), gold, [gold.float()], FORWARD_FACTOR)


# --- classes of Transformers ----------------------------------------------------------------------


def test_a_class_of_transformers_is_refused(trained, tokenizer):
    model = make(BertForMaskedLM, BertConfig(**BERT))
    with pytest.raises(ArgumentTypeError, match=r"divides its loss by its own batch.*accelerate"):
        trained(model, DataCollatorForMaskedTokens(tokenizer))
    trained(fastplm.accelerate(model), DataCollatorForMaskedTokens(tokenizer))


@pytest.mark.slow
def test_labels_of_pairs_for_a_model_without_a_head_for_them(trained, tokenizer):
    """Such labels are left out of the loss, and of the log."""
    model = make(models.BertForMaskedLM, BertConfig(**BERT), "fastplm")
    collator = DataCollatorForMaskedTokens(tokenizer)
    rows = [row | {"next_sentence_label": 1} for row in text()]
    without, paired = (trained(model, collator, rows=rows) for rows in (None, rows))
    assert curve(without) == curve(paired) and "next_sentence_loss" not in curve(paired)[0]
    assert evaluate(model, text(), collator, 2) == evaluate(model, rows, collator, 2)


# --- evaluation during the training ---------------------------------------------------------------


@pytest.mark.slow
def test_evaluation_does_not_change_the_log(trained, tokenizer, monkeypatch):
    """The evaluation has the loss of ``evaluate``; the training's clock stands still meanwhile."""
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
        model = make(models.AlbertForPreTraining, AlbertConfig(**ALBERT), "fastplm")
        runs.append(trained(model, collator.pad, learning_rate=0.1, **options, **more))
    without, evaluated = runs
    assert curve(evaluated) == curve(without)
    assert evaluated.train_seconds == without.train_seconds == 12
    assert evaluated.tokens_per_second == without.tokens_per_second == sum(LENGTHS) * 3 / 12
    evaluations = [entry for entry in evaluated.state.log_history if "eval_loss" in entry]
    held_out = evaluate(evaluated.model, others, collator, 3)
    assert len(evaluations) == 3 and held_out["samples"] == 3
    gold = torch.tensor(held_out["mlm_loss"] + held_out["sentence_order_loss"]).double()
    hold("eval_loss", evaluations[-1]["eval_loss"], gold)
    hold("eval_loss", evaluated.evaluate()["eval_loss"], gold)


# --- packed rows ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", [models.GPT2LMHeadModel, models.BertForMaskedLM], ids=str)
def test_packed_rows_have_the_loss_of_padded_ones(trained, tokenizer, kind):
    config, make_collator = BertConfig(**BERT), DataCollatorForMaskedTokens
    if kind is models.GPT2LMHeadModel:
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "value, words", [(float("nan"), "the weight {} holds NaN"), (3e38, "is 3e+38 in {}")]
)
def test_weights_that_are_no_numbers(value, words, refused, arguments, tmp_path, monkeypatch):
    make, name = pretrain.make_model, "bert.encoder.layer.1.output.dense.weight"

    def spoilt(*args):
        model = make(*args)
        model.get_parameter(name).data.fill_(value)
        return model

    monkeypatch.setattr(pretrain, "make_model", spoilt)
    line = refused(arguments(tmp_path / "out"), "at step 1", words.format(name), code=3)
    assert "learning rate" not in line


# --- Transformers ---------------------------------------------------------------------------------


def test_a_private_method_of_transformers_is_overridden_for_a_reason():
    """Any release may change it, so a comment says why no public hook will do."""
    classes, private = [RunTrainer], {}
    for cls in classes:
        classes += cls.__subclasses__()
        for name, value in vars(cls).items():
            if name.startswith("_") and not name.startswith("__") and hasattr(Trainer, name):
                private[name] = inspect.getsource(value)
    assert {DistillationTrainer, FinetuningTrainer, TwoStageTrainer} <= set(classes)
    assert private.keys() == {"_clip_grad_norm", "_prepare_for_training", "_save_checkpoint"}
    assert all("# Private, as no hook of Transformers" in source for source in private.values())
