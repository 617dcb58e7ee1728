from __future__ import annotations

import copy

import pytest
import torch

from fastplm.data import DataCollatorForMaskedTokens, load_tokenizer
from fastplm.models import BertForPreTraining, ElectraForJointPreTraining
from fastplm.pretrain.compare import _peak_bytes, compare, hugging_face_twin, table
from fastplm.pretrain.evaluate import evaluate
from fastplm.pretrain.trainer import detection
from fastplm.run.folder import last_checkpoint
from fastplm.testing import FORWARD_FACTOR, KeptDouble, check_error, check_in_fp64

TEXT = [
    "The river follows the old house. A train carries the letter.",
    "A teacher opens.",
    "The forest remembers the engine and the island.",
    "The garden.",
]


@pytest.fixture(scope="module", params=["bert", "electra"])
def trained(request):
    """A model, its collator and samples of different lengths."""
    out = request.getfixturevalue(request.param)
    kind = BertForPreTraining if request.param == "bert" else ElectraForJointPreTraining
    model = kind.from_pretrained(last_checkpoint(out))
    tokenizer = load_tokenizer(out / "tokenizer")
    samples = [
        {"input_ids": tokenizer(text)["input_ids"], "sample_index": index}
        for index, text in enumerate(TEXT)
    ]
    if request.param == "bert":
        for index, sample in enumerate(samples):
            sample["next_sentence_label"] = index % 2
    return model, DataCollatorForMaskedTokens(tokenizer), samples


def test_twins_compute_the_same_loss(trained):
    model, collator, samples = trained
    batch = collator(samples)
    if hasattr(model, "discriminator"):
        with torch.no_grad():
            batch["replaced_ids"] = model(**batch, output_replaced_ids=True)["replaced_ids"]

    def twin(attention, source=model):
        _, step = hugging_face_twin(source, attention)
        return step(batch).detach()

    ours = {name: value for name, value in batch.items() if name != "replaced_ids"}
    for attention in ("eager", "sdpa"):
        exact = copy.deepcopy(model).double().eval()
        out, single = exact(**ours)["loss"], twin(attention)
        with KeptDouble():
            gold = twin(attention, exact)
        check_in_fp64({"loss": out.detach()}, {"loss": gold}, {"loss": single})


def test_table(trained):
    model, collator, samples = trained
    rows = compare(model, [collator(samples)], bf16=False, rounds=1)
    assert [row.name for row in rows] == ["fastplm", "Hugging Face, eager", "Hugging Face, sdpa"]
    assert all(row.milliseconds > 0 and row.peak_bytes > 0 for row in rows)
    text = table(rows)
    assert len({len(line) for line in text.splitlines()}) == 1
    assert text.splitlines()[1].startswith("fastplm") and "1.00x" in text


def test_peak_of_known_allocations():
    weight = torch.nn.Parameter(torch.zeros(1))
    module = torch.nn.ParameterList([weight])

    def step(batch):
        first = torch.zeros(1 << 20)
        second = first + 1
        del first
        third = torch.zeros(1 << 21)
        del second, third
        return weight.sum()

    peak = _peak_bytes(module, step, {}, bf16=False)
    assert 0 <= peak - 4 * ((1 << 20) + (1 << 21)) < 1024


def test_evaluation_is_the_mean_loss_of_the_model(trained):
    model, collator, samples = trained
    model = copy.deepcopy(model).double().train()
    together = evaluate(model, samples, collator, batch_size=4)
    apart = evaluate(model, samples, collator, batch_size=3)
    assert model.training
    batch = collator(samples)
    with torch.no_grad():
        outputs = model.eval()(**batch)
    expected = outputs["loss"].double().cpu()
    if "rtd_loss" in outputs:
        weight = model.config.discriminator_weight
        found = [result["mlm_loss"] + weight * result["rtd_loss"] for result in (together, apart)]
        counts = {name: float(outputs[name]) for name in ("positives", "total")}
        share = 1 - counts["positives"] / counts["total"]
        assert together["accuracy_of_always_original"] == share
    else:
        found = [result["mlm_loss"] + result["next_sentence_loss"] for result in (together, apart)]
    for value in found:
        out = torch.tensor(value)  # may differ only by its rounding to fp32
        check_error("loss", out, expected, [expected.float()], FORWARD_FACTOR)


def test_detection():
    counts = {
        "true_positives": 6.0,
        "predicted_positives": 8.0,
        "positives": 10.0,
        "correct": 94.0,
        "total": 100.0,
    }
    result = detection(counts)
    assert result["replaced_precision"] == 6 / 8
    assert result["replaced_recall"] == 6 / 10
    assert result["balanced_accuracy"] == (6 / 10 + (1 - 2 / 90)) / 2
    assert result["accuracy"] == 0.94
    assert result["accuracy_of_always_original"] == 0.9
    silent = detection({**counts, "true_positives": 0.0, "predicted_positives": 0.0})
    assert silent["balanced_accuracy"] == 0.5 and silent["replaced_precision"] == 0.0
