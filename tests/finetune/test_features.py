"""Heads that read more of an encoder than Transformers' classes do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from fastplm.finetune.data import prepare_task
from fastplm.finetune.features import (
    FeaturesConfig,
    FeaturesForSequenceClassification,
    FeaturesForTokenClassification,
    ScalarMix,
    pooled,
)
from fastplm.finetune.run import finetune
from fastplm.finetune.trainer import make_trainer

from .conftest import NOUNS


def test_pooling_by_hand():
    states = torch.tensor([[[1.0, -9.0], [3.0, -5.0], [50.0, 50.0]], [[2.0, 4.0]] * 3])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert pooled(states, mask, "cls").tolist() == [[1, -9], [2, 4]]
    assert pooled(states, mask, "mean").tolist() == [[2, -7], [2, 4]]
    assert pooled(states, mask, "max").tolist() == [[3, -5], [2, 4]]
    assert pooled(states, mask, "last").tolist() == [[3, -5], [2, 4]]


def test_a_scalar_mix_by_hand():
    mix = ScalarMix(2)
    states = (torch.tensor([1.0]), torch.tensor([5.0]))
    assert mix(states).item() == 3
    with torch.no_grad():
        mix.weight.copy_(torch.tensor([3.0, 1.0]).log())
        mix.gamma.fill_(10)
    torch.testing.assert_close(mix(states), torch.tensor([20.0]))  # 10 (3/4 * 1 + 1/4 * 5)


@pytest.mark.parametrize("family", ["deep", "albert", "electra"])
def test_what_the_head_reads(family, checkpoint):
    """The features are the states of Transformers' encoder, with any padding."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint(family))
    theirs = transformers.AutoModel.from_pretrained(checkpoint(family)).double().eval()
    batch = tokenizer(["river house", " ".join(NOUNS[3:8])], padding=True, return_tensors="pt")
    states = theirs(**batch, output_hidden_states=True).hidden_states
    expected = {"last": states[-1], "mix": sum(states) / len(states)}
    if family == "deep":
        expected["last-four"] = torch.cat(states[1:], -1)
    for features, gold in expected.items():
        config = FeaturesConfig(
            encoder=theirs.config.to_dict(), features=features, dropout=0.0, num_labels=3
        )
        model = FeaturesForTokenClassification(config).double().eval()
        weights = {n: w for n, w in theirs.state_dict().items() if "pooler." not in n}
        model.encoder.load_state_dict(weights)
        assert type(model.encoder).__module__.startswith("fastplm.")
        kept = batch["attention_mask"].bool()
        logits = model(**batch).logits[kept]
        torch.testing.assert_close(logits, model.classifier(gold[kept]))


def test_an_lstm_sees_no_padding(checkpoint):
    encoder = transformers.BertConfig.from_pretrained(checkpoint("deep"))
    config = FeaturesConfig(encoder=encoder.to_dict(), head="bilstm", pooling="max", num_labels=2)
    torch.manual_seed(0)
    model = FeaturesForSequenceClassification(config).double().eval()
    ids = torch.randint(5, 40, (1, 7))
    padded = torch.nn.functional.pad(ids, (0, 4), value=9)
    mask = torch.arange(11)[None] < 7
    torch.testing.assert_close(model(padded, mask).logits, model(ids).logits)
    assert model.lstm.num_layers == 2 and model.lstm.bidirectional
    assert model.classifier.in_features == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, options",
    [
        ("classification", {"pooling": "mean"}),
        ("classification", {"features": "mix", "head": "bilstm", "freeze": True}),
        ("tagging", {"features": "last-four", "head": "bilstm", "freeze": True}),
        ("regression", {"pooling": "max"}),
        ("tagging", {"features": "mix"}),
    ],
)
def test_a_run_with_such_a_head_loads_again(task, options, arguments):
    args = arguments(task, "deep", **options)
    metrics = finetune(args)
    assert all(metrics["arguments"][name] == value for name, value in options.items())
    path = metrics["seeds"][0]["model"]
    tokens = task == "tagging"
    kind = FeaturesForTokenClassification if tokens else FeaturesForSequenceClassification
    model, loading = kind.from_pretrained(path, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    prepared = prepare_task(args)
    trainer = make_trainer(prepared, model, 0, args.out)
    scores, predictions = prepared.evaluate(trainer)
    assert scores == pytest.approx(metrics["seeds"][0]["scores"], abs=1e-5)
    written = json.loads((Path(path).parent / "predictions.json").read_text())["predictions"]
    if task == "classification":
        assert [each["prediction"] for each in written] == predictions
        assert model.config.id2label == {0: "-1", 1: "1"}
