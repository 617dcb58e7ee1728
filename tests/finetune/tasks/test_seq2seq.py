"""Fine-tuning to write texts, on tiny models: T5, BART, encoder-decoders, a new source encoder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

from fastplm import cli
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune import bart_translation
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import build_model
from fastplm.finetune.run import finetune
from fastplm.finetune.trainer import make_trainer

from ..conftest import SOURCES, STARTS, TARGETS


def test_one_text_for_all_is_said(writing):
    task = prepare_task(writing("bart"))
    right = [task.right(example) for example in task.test]
    assert task.most_frequent(right)["share"] == 0.2 and task.baseline() is None
    assert task.warnings({"most_frequent_prediction": task.most_frequent(right)}) == []
    for written, share in ((["der"] * 9 + ["das"], "90%"), (["der"] * 17 + ["das"] * 3, "")):
        said = task.warnings({"most_frequent_prediction": task.most_frequent(written)})
        expected = [f"Warning: {share} of the predictions are 'der'"] if share else []
        assert [each[: len(expected[0])] for each in said] == expected
    (said,) = task.warnings({"most_frequent_prediction": task.most_frequent([""] * 5)})
    assert "all predictions are ''" in said
    task.test = task.train[:40]
    few = [f"text {i % 4}" for i in range(40)]
    assert task.one_answer(task.most_frequent(few)) == "there are 4 different texts for 40 sources"
    task.test = [replace(example, target="one") for example in task.test]
    assert task.one_answer(task.most_frequent(few)) == ""  # the targets are few, too


@pytest.mark.parametrize("start", ["t5", "bart", "bert2bert"])
def test_whether_a_model_reads_its_source_is_said(start, writing):
    """The losses are those of Transformers' class, one example at a time."""
    args = writing(start, batch_size=3, max_length=16)
    task = prepare_task(args)
    features, _ = task.features(task.test)
    assert len(features) == 5
    model = build_model(task, 0)
    found = task.reading(make_trainer(task, model, 0, args.out))["source"]
    model.save_pretrained(args.out)
    theirs = getattr(transformers, type(model).__name__).from_pretrained(args.out).eval()

    def mean(sources) -> float:
        total = 0.0
        for feature, source in zip(features, sources, strict=True):
            labels = torch.tensor([feature["labels"]])
            ids = torch.tensor([features[source]["input_ids"]])
            with torch.no_grad():
                total += theirs(input_ids=ids, labels=labels).loss.item() * labels.numel()
        return total / sum(len(feature["labels"]) for feature in features)

    assert found["loss"] == pytest.approx(mean(range(5)), rel=1e-5)
    assert found["loss_with_another"] == pytest.approx(mean([2, 3, 4, 0, 1]), rel=1e-5)
    assert found["gain"] == found["loss_with_another"] - found["loss"]


def test_a_model_that_does_not_read_its_source_is_named(writing, capsys):
    args = writing("t5", steps=1, learning_rate=1e-9)  # the weights stay those of the start
    task = prepare_task(args)
    said = task.warnings({"source": {"loss": 2.0, "loss_with_another": 2.1, "gain": 0.1}})
    assert len(said) == 1 and "the model hardly reads its source" in said[0]
    assert said[0].endswith(" T5 learns it with --optimizer adafactor.")
    other = task.with_settings(optimizer="adafactor")
    (said,) = other.warnings({"source": {"loss": 2.0, "loss_with_another": 2.1, "gain": 0.1}})
    assert "adafactor" not in said
    reads = {"source": {"loss": 2.0, "loss_with_another": 2.2, "gain": 0.2}}
    assert task.warnings(reads) == task.warnings({}) == []
    printed: list[str] = []
    finetune(args, printed.append)
    assert "the model hardly reads its source" in capsys.readouterr().err
    assert "  source gain 0.0" in printed[0] or "  source gain -0.0" in printed[0]
    task.test = task.test[:1]
    assert task.reading(None) == {}  # there is no other source


def predictions_in(out: Path) -> list[dict]:
    return json.loads((out / "seed-0" / "predictions.json").read_text())["predictions"]


@pytest.mark.parametrize("start", STARTS)
def test_from_files_to_scores_and_back(start, writing, writers, tmp_path):
    # If these packages are not installed, the other tests of this file still run.
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    args = writing(start, data=writers / "sources.txt", targets=writers / "targets.txt")
    metrics = finetune(args)
    task = prepare_task(args)
    records = predictions_in(args.out)
    written = [record["prediction"] for record in records]
    assert [(r["texts"], r["label"]) for r in records] == [
        ([SOURCES[r["line"] - 1]], TARGETS[r["line"] - 1]) for r in records
    ]
    references = [example.target for example in task.test]
    assert len(written) == len(references) == 5
    scores = metrics["seeds"][0]["scores"]
    assert scores["bleu"] == sacrebleu.corpus_bleu(written, [references]).score
    rouge = scorer.RougeScorer(["rouge2"])
    each = [rouge.score(b, a)["rouge2"].fmeasure for a, b in zip(written, references, strict=True)]
    assert scores["rouge2"] == pytest.approx(100 * sum(each) / 5)
    # The saved model writes the same texts, in Transformers if it has the class.
    model = args.out / "seed-0" / "model"
    kind = json.loads((model / "config.json").read_text())["architectures"][0]
    library = bart_translation if kind == "BartForTranslation" else transformers
    loaded = getattr(library, kind).from_pretrained(model).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    inside = model / "target_tokenizer"
    target = AutoTokenizer.from_pretrained(inside if inside.is_dir() else model)
    assert inside.is_dir() == (start in ("bert2bert", "rnd2gpt", "new source"))
    for example, text in zip(task.test, written, strict=True):
        batch = tokenizer([args.prefix + example.texts[0]], return_tensors="pt")
        ids = loaded.generate(**batch, num_beams=2, max_new_tokens=24, do_sample=False)
        assert target.decode(ids[0], skip_special_tokens=True).strip() == text


def test_a_run_with_several_targets(writing, tmp_path):
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    for name, count in (("train", 8), ("test", 4)):
        (tmp_path / name).write_text("\n".join(SOURCES[:count]))
        for number in (1, 2):
            lines = (f"{source} {number}" for source in SOURCES[:count])
            (tmp_path / f"{name}.{number}").write_text("\n".join(lines))
    args = writing(
        data=tmp_path / "train",
        targets=tmp_path / "train.1",
        eval_data=tmp_path / "test",
        eval_targets=[tmp_path / "test.1", tmp_path / "test.2"],
        stemmer=True,
        steps=1,
    )
    metrics = finetune(args)
    assert metrics["scores"].keys() >= {"bleu", "rouge1", "exact_match"}
    labels = [record["label"] for record in predictions_in(args.out)]
    assert labels == [[f"{source} 1", f"{source} 2"] for source in SOURCES[:4]]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["bert2bert", "t5", "rnd2gpt"])
def test_learns(start, writing):
    metrics = finetune(writing(start, steps=80))
    assert metrics["scores"]["bleu"]["mean"] > 50


@pytest.mark.parametrize("start", STARTS)
def test_labels(start, writing):
    args = writing(start)
    task = prepare_task(args)
    (feature, *_), _ = task.features(task.train[:1])
    model = build_model(task, 0)
    target, example = task.target_tokenizer, task.train[0]
    text = target.decode(feature["labels"], skip_special_tokens=True)
    if start == "bertshare":  # its tokenizer drops capitals and accents
        assert text == example.target.lower().translate(str.maketrans("äü", "au"))
    else:
        assert text == example.target
    assert feature["labels"].count(task.end) == 1 and feature["labels"][-1] == task.end
    assert task.end == model.generation_config.eos_token_id
    source = task.tokenizer.decode(feature["input_ids"], skip_special_tokens=True)
    assert source == args.prefix + example.texts[0]
    # The decoder reads its start token, then the labels without the last.
    batch = task.collator()([dict(feature)])
    seen = model.prepare_decoder_input_ids_from_labels(batch["labels"])[0].tolist()
    assert seen == [model.config.decoder_start_token_id, *feature["labels"][:-1]]
    assert "decoder_attention_mask" not in batch or batch["decoder_attention_mask"].all()


def test_targets_and_sources_are_cut_with_a_line(writing, capsys):
    task = prepare_task(writing(max_length=16, max_target_length=5))
    features, _ = task.features(task.train)
    assert {len(feature["labels"]) for feature in features} == {5}
    assert {feature["labels"][-1] for feature in features} == {task.end}
    said = capsys.readouterr().err
    assert f"{len(features)} of {len(features)} targets were cut" in said
    assert "sources" not in said


@pytest.mark.parametrize("start", ["bart", "bert2bert", "rnd2gpt"])
def test_targets_are_no_longer_than_the_decoder(start, writing, writers, tmp_path):
    usual = writing(start, max_target_length=128)
    decoder = {"bart": "bart", "bert2bert": "bert", "rnd2gpt": "gpt2"}[start]
    short = shutil.copytree(writers / decoder, tmp_path / "short")
    config = transformers.AutoConfig.from_pretrained(short)
    config.max_position_embeddings = 40
    config.save_pretrained(short)
    option = "model" if start == "bart" else "decoder"
    args = writing(start, max_target_length=41, **{option: short})
    with pytest.raises(
        ArgumentValueError, match="`max_target_length` got 41; expected 40, the dec"
    ):
        prepare_task(args)
    args = writing(start, max_target_length=128, **{option: short})  # 128 is the default
    assert prepare_task(args).target_length == 40
    assert prepare_task(usual).target_length == 64  # the model's positions


def test_wrong_models(writing, writers, monkeypatch):
    args = writing("new source", model=writers / "t5")
    with pytest.raises(ArgumentValueError, match="a t5; expected a BART"):
        prepare_task(args)
    for model in ("bert", "gpt2"):
        with pytest.raises(ArgumentValueError, match=f"a {model}; expected a model that writes"):
            finetune(writing("bart", model=writers / model))
    assert not writing().out.exists()
    args = writing("bert2bert", decoder=writers / "t5")
    with pytest.raises(DataError, match="a family with a decoder"):
        build_model(prepare_task(args), 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install sacrebleu"):
        prepare_task(writing())


def test_command_line(writers, tmp_path, capsys):
    words = ["finetune", "--task", "seq2seq", "--data", str(writers / "pairs.tsv")]
    words += ["--out", str(tmp_path / "out"), "--steps", "1", "--max-length", "32"]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main([*words, "--model", str(writers / "t5"), "--max-target-length", "8"]) == 0
    assert "bleu" in capsys.readouterr().out
