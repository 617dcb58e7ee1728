"""What is learned beside the loss of a class: both orders, a language model, a teacher."""

from __future__ import annotations

import pytest
import torch
import transformers

from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import DELIMITER, EXTRACT, START, build_model
from fastplm.finetune.teacher import teacher_logits
from fastplm.finetune.trainer import make_trainer


def test_both_orders_are_added_before_the_head(arguments, tmp_path):
    args = arguments("pair", "gpt2", both_orders=True, dropout=0.0)
    task = prepare_task(args)
    features, _ = task.features(task.train)
    tokens = [task.tokenizer.decode(ids) for ids in features[0]["input_ids"]]
    assert tokens == [f"{START}ab{DELIMITER}cd{EXTRACT}", f"{START}cd{DELIMITER}ab{EXTRACT}"]
    model = build_model(task, 0).double().eval()
    batch = task.collator()([dict(feature) for feature in features[:5]])
    outputs = task.outputs(model, **batch)
    states = []
    for order in range(2):
        ids, mask = batch["input_ids"][:, order], batch["attention_mask"][:, order]
        hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
        states.append(hidden[torch.arange(5), mask.sum(-1) - 1])
    logits = model.score(states[0] + states[1])
    torch.testing.assert_close(outputs["logits"], logits)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"])
    torch.testing.assert_close(outputs["loss"], loss)
    # The order of the texts has no effect.
    swapped = {name: value.flip(1) for name, value in batch.items() if name != "labels"}
    torch.testing.assert_close(task.outputs(model, **swapped)["logits"], logits)


@pytest.mark.parametrize("name", ["pair", "choice"])
def test_the_loss_of_the_language_model_is_added(name, arguments):
    args = arguments(name, "gpt2", dropout=0.0, lm_weight=0.25)
    task = prepare_task(args)
    features, _ = task.features(task.train)
    batch = task.collator()([dict(feature) for feature in features[:5]])
    model = build_model(task, 0).double().eval()
    both = task.outputs(model, **batch)["loss"]
    alone = task.with_settings(lm_weight=0.0).outputs(model, **batch)["loss"]
    language = transformers.GPT2LMHeadModel(model.config).double().eval()
    language.transformer.load_state_dict(model.base_model.state_dict())
    language.tie_weights()
    ids, mask = (
        batch[key].reshape(-1, batch[key].shape[-1]) for key in ("input_ids", "attention_mask")
    )
    gold = language(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    # Transformers' loss is in fp32.
    torch.testing.assert_close(
        both - alone, 0.25 * gold.loss, atol=1e-5, rtol=1e-5, check_dtype=False
    )


def soft_by_hand(task: str, model, teacher, batch, temperature: float) -> torch.Tensor:
    """The distance of two models on a padded batch, without dropout, row by row."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "token_type_ids")}
    with torch.no_grad():
        ours, theirs = model(**inputs), teacher(**inputs)
    if task == "regression":
        return (ours.logits - theirs.logits).square().mean()
    found = []
    names = ("start_logits", "end_logits") if task == "qa" else ("logits",)
    for name in names:
        for row in range(len(batch["input_ids"])):
            pairs = [(ours[name][row], theirs[name][row])]
            if task == "qa":
                length = int(batch["attention_mask"][row].sum())
                pairs = [(ours[name][row, :length], theirs[name][row, :length])]
            if task == "tagging":
                at = (batch["labels"][row] != -100).nonzero()[:, 0].tolist()
                pairs = [(ours[name][row, i], theirs[name][row, i]) for i in at]
            for student, right in pairs:
                p = (right / temperature).softmax(-1)
                q = (student / temperature).softmax(-1)
                found.append((p * (p / q).log()).sum() * temperature**2)
    return torch.stack(found).mean()


@pytest.mark.parametrize("task", ["classification", "regression", "tagging", "qa", "choice"])
def test_the_loss_has_the_predictions_of_the_teacher(task, arguments, teacher, tmp_path):
    path = teacher(task)
    options = {"teacher": path, "teacher_weight": 0.25, "teacher_temperature": 3.0, "dropout": 0.0}
    args = arguments(task, **options)
    prepared = prepare_task(args)
    features = prepared.dataset
    kind = getattr(transformers, prepared.auto)
    loaded = kind.from_pretrained(path).eval()
    features.teacher = teacher_logits(prepared, torch.device("cpu"))
    model = build_model(prepared, 0)
    trainer = make_trainer(prepared, model, 0, tmp_path)
    batch = trainer.data_collator([features[i] for i in range(6)])
    assert len({len(features[i]["input_ids"]) for i in range(6)}) > 1 or task == "choice"
    plain = {name: value for name, value in batch.items() if name != "teacher"}
    hard = prepared.outputs(model, **plain)["loss"]
    soft = soft_by_hand(task, build_model(prepared, 0).eval(), loaded, batch, 3.0)
    found = prepared.outputs(model, **batch)["loss"]
    torch.testing.assert_close(found, 0.75 * hard + 0.25 * soft)
    assert abs(soft - hard) > 1e-3
