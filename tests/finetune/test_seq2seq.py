"""Fine-tuning to write texts, on tiny models: T5, BART, encoder-decoders, a new source encoder."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoTokenizer

import fastplm.models
from fastplm import _extension, cli
from fastplm.data import train_tokenizer
from fastplm.data.examples import read_examples
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune import bart_translation
from fastplm.finetune import run as module
from fastplm.finetune.models import usual_learning_rate
from fastplm.finetune.run import (
    FeatureDataset,
    FinetuneArguments,
    build_model,
    finetune,
    make_trainer,
    prepare_task,
)
from fastplm.run.optimizer import Adafactor

GERMAN = {
    **{"small": "kleiner", "big": "großer", "red": "roter", "cat": "Kater", "dog": "Hund"},
    **{"man": "Mann", "sits": "sitzt", "runs": "läuft", "mat": "Teppich", "road": "Weg"},
    **{"hill": "Hügel", "a": "ein", "the": "dem", "on": "auf"},
}
SOURCES = [
    f"a {size} {who} {does} on the {place}"
    for size in ("small", "big", "red")
    for who in ("cat", "dog", "man")
    for does in ("sits", "runs")
    for place in ("mat", "road", "hill")
]
TARGETS = [" ".join(GERMAN[word] for word in source.split()) for source in SOURCES]
#: Class, kind of tokenizer and configuration of each checkpoint.
CHECKPOINTS = {
    "bert": (
        transformers.BertModel,
        "wordpiece",
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 64,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
    "bart": (
        transformers.BartForConditionalGeneration,
        "bytelevel",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "bos_token_id": 0,
            "pad_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 2,
        },
    ),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        "bytelevel",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 2,
            "eos_token_id": 2,
        },
    ),
    "t5": (
        transformers.T5ForConditionalGeneration,
        "unigram",
        {
            "d_model": 64,
            "d_kv": 32,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 2,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
}
#: Ways to start a model, as options of the command. "DIR" is the folder of the checkpoints.
STARTS = {
    "t5": {"model": "t5", "prefix": "the red "},
    "bart": {"model": "bart"},
    "bert2bert": {"encoder": "bert", "target_vocab_size": 320},
    "rnd2gpt": {"encoder": "bert", "decoder": "gpt2", "warm": "decoder"},
    "bertshare": {"encoder": "bert", "share": True},
    "new source": {"model": "bart", "source_encoder_layers": 1, "source_vocab_size": 320},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Checkpoints with their tokenizers, and files of sources and targets."""
    path = tmp_path_factory.mktemp("seq2seq")
    (path / "sources.txt").write_text("\n".join(SOURCES) + "\n")
    (path / "targets.txt").write_text("\n".join(TARGETS) + "\n")
    rows = (f"{s}\t{t}" for s, t in zip(SOURCES, TARGETS, strict=True))
    (path / "pairs.tsv").write_text("\n".join(("source\ttarget", *rows)) + "\n")
    torch.manual_seed(7)  # a run's own seed would give its new weights these values
    for name, (kind, tokens, sizes) in CHECKPOINTS.items():
        tokenizer = train_tokenizer(SOURCES + TARGETS, 400, path / "cache", tokens)
        if name == "gpt2":  # like GPT-2's own tokenizer, it adds no token and cannot pad
            bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
            pairs = [tuple(pair) for pair in bpe["merges"]]
            ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
            tokenizer = transformers.GPT2Tokenizer(vocab=bpe["vocab"], merges=pairs, **ends)
        tokenizer.save_pretrained(path / name)
        config = kind.config_class(vocab_size=len(tokenizer), **sizes)
        kind(config).save_pretrained(path / name)
    return path


@pytest.fixture
def arguments(folder, tmp_path):
    """The settings of a short run, with changes."""

    def build(start: str = "bart", name: str = "run", **changes) -> FinetuneArguments:
        places = {
            key: folder / value
            for key, value in STARTS[start].items()
            if key in ("model", "encoder", "decoder")
        }
        settings = {
            "task": "seq2seq",
            "data": folder / "pairs.tsv",
            "out": tmp_path / name,
            "max_length": 32,
            "max_target_length": 24,
            "learning_rate": 3e-3,
            "steps": 4,
            "batch_size": 16,
            "log_every": 1,
            "beams": 2,
            **STARTS[start],
            **places,
        }
        return FinetuneArguments(**{**settings, **changes}).plan()

    return build


@pytest.mark.slow
@pytest.mark.skipif(_extension.lacks("dropout_rows", "CPU") is not None, reason="no csrc/")
@pytest.mark.parametrize("start", STARTS)
def test_dropout_does_not_depend_on_the_batch(start, arguments, one_step_of):
    whole, *split = one_step_of(arguments(start, dropout=0.1))
    assert split == pytest.approx([whole] * len(split), rel=1e-5)


def test_one_text_for_all_is_said(arguments):
    task = prepare_task(arguments("bart"))
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
def test_whether_a_model_reads_its_source_is_said(start, arguments):
    """The losses are those of Transformers' class, one example at a time."""
    args = arguments(start, batch_size=3, max_length=16)
    task = prepare_task(args)
    features, _ = task.features(task.test)
    assert len(features) == 5
    data, model = FeatureDataset(features), build_model(args, task, 0)
    found = task.reading(make_trainer(args, task, model, data, 0, args.out))["source"]
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


def test_a_model_that_does_not_read_its_source_is_named(arguments, capsys):
    args = arguments("t5", steps=1, learning_rate=1e-9)  # the weights stay those of the start
    task = prepare_task(args)
    said = task.warnings({"source": {"loss": 2.0, "loss_with_another": 2.1, "gain": 0.1}})
    assert len(said) == 1 and "the model hardly reads its source" in said[0]
    assert said[0].endswith(" T5 learns it with --optimizer adafactor.")
    task.args = arguments("t5", optimizer="adafactor")
    (said,) = task.warnings({"source": {"loss": 2.0, "loss_with_another": 2.1, "gain": 0.1}})
    assert "adafactor" not in said
    reads = {"source": {"loss": 2.0, "loss_with_another": 2.2, "gain": 0.2}}
    assert task.warnings(reads) == task.warnings({}) == []
    printed: list[str] = []
    finetune(args, printed.append)
    assert "the model hardly reads its source" in capsys.readouterr().err
    assert "  source gain 0.0" in printed[0] or "  source gain -0.0" in printed[0]
    task.test = task.test[:1]
    assert task.reading(None) == {}  # there is no other source


def test_targets_to_judge_by_are_others(arguments, folder, tmp_path):
    files = {"data": folder / "sources.txt", "targets": folder / "targets.txt"}
    other = tmp_path / "other.txt"
    other.write_text("x\n" * len(SOURCES))
    for name, paths in (
        ("eval_data", {"eval_data": files["data"], "eval_targets": other}),
        ("eval_targets", {"eval_data": other, "eval_targets": files["targets"]}),
    ):
        with pytest.raises(ArgumentValueError, match=f"`{name}` got .*, the file of --"):
            prepare_task(arguments("bart", **files, **paths))


def lines(folder: Path, name: str) -> list[str]:
    return json.loads((folder / "seed-0" / name).read_text())


@pytest.mark.parametrize("start", STARTS)
def test_from_files_to_scores_and_back(start, arguments, folder, tmp_path):
    # If these packages are not installed, the other tests of this file still run.
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    args = arguments(start, data=folder / "sources.txt", targets=folder / "targets.txt")
    metrics = finetune(args)
    task = prepare_task(args)
    written = [found["prediction"] for found in lines(args.out, "predictions.json")["predictions"]]
    records = lines(args.out, "predictions.json")["predictions"]
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


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "start", ["bert2bert", pytest.param("t5", marks=SLOW), pytest.param("rnd2gpt", marks=SLOW)]
)
def test_learns(start, arguments):
    metrics = finetune(arguments(start, steps=80))
    assert metrics["scores"]["bleu"]["mean"] > 50


@pytest.mark.slow
def test_adafactor_learns_at_a_constant_rate(arguments):
    args = arguments("t5", steps=20, optimizer="adafactor", learning_rate=0.02, log_every=1)
    assert args.weight_decay == 0.0
    with pytest.raises(ArgumentValueError, match="`weight_decay` got 0.1; expected nothing with"):
        arguments("t5", optimizer="adafactor", weight_decay=0.1)
    assert usual_learning_rate(args, None) == 1e-3
    task = prepare_task(args)
    features = FeatureDataset(task.features(task.train)[0])
    trainer = make_trainer(args, task, build_model(args, task, 0), features, 0, Path(args.out))
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, Adafactor)
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[:2] == [0.0, 0.01] and set(rates[2:]) == {0.02}
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("start", STARTS)
def test_labels(start, arguments):
    args = arguments(start)
    task = prepare_task(args)
    (feature, *_), _ = task.features(task.train[:1])
    model = build_model(args, task, 0)
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


def test_targets_and_sources_are_cut_with_a_line(arguments, capsys):
    task = prepare_task(arguments(max_length=16, max_target_length=5))
    features, _ = task.features(task.train)
    assert {len(feature["labels"]) for feature in features} == {5}
    assert {feature["labels"][-1] for feature in features} == {task.end}
    said = capsys.readouterr().err
    assert f"{len(features)} of {len(features)} targets were cut" in said
    assert "sources" not in said


@pytest.mark.parametrize("start", ["bart", "bert2bert", "rnd2gpt"])
def test_targets_are_no_longer_than_the_decoder(start, arguments, folder, tmp_path):
    usual = arguments(start, max_target_length=128)
    decoder = {"bart": "bart", "bert2bert": "bert", "rnd2gpt": "gpt2"}[start]
    short = shutil.copytree(folder / decoder, tmp_path / "short")
    config = transformers.AutoConfig.from_pretrained(short)
    config.max_position_embeddings = 40
    config.save_pretrained(short)
    option = "model" if start == "bart" else "decoder"
    args = arguments(start, max_target_length=41, **{option: short})
    with pytest.raises(
        ArgumentValueError, match="`max_target_length` got 41; expected 40, the dec"
    ):
        prepare_task(args)
    args = arguments(start, max_target_length=128, **{option: short})  # 128 is the default
    assert prepare_task(args).target_length == 40
    assert prepare_task(usual).target_length == 64  # the model's positions


# --- warm start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", ["both", "encoder", "decoder", "none"])
@pytest.mark.parametrize("library", ["fastplm", "transformers"])
def test_which_parts_are_warm(warm, library, arguments, folder):
    args = arguments("bert2bert", warm=warm, library=library, target_vocab_size=None)
    model = build_model(args, prepare_task(args), 0)
    known = transformers.BertModel.from_pretrained(folder / "bert").state_dict()
    name = "encoder.layer.1.intermediate.dense.weight"
    parts = {"encoder": model.encoder, "decoder": model.decoder.bert}
    for part, backbone in parts.items():
        loaded = torch.equal(backbone.state_dict()[name], known[name])
        assert loaded == (warm in ("both", part))
    assert any(".crossattention." in name for name, _ in model.decoder.named_parameters())
    ours = type(model) is fastplm.models.EncoderDecoderModel
    assert ours == (library == "fastplm")


@pytest.mark.parametrize("warm", ["both", "none"])
def test_shared_weights(warm, arguments):
    args = arguments("bertshare", warm=warm)
    model = build_model(args, prepare_task(args), 0)
    weights = dict(model.decoder.bert.named_parameters())
    for name, weight in model.encoder.named_parameters():
        assert name.startswith("pooler.") or weights[name] is weight


def test_a_new_vocabulary_leaves_the_layers_warm(arguments, folder):
    args = arguments("bert2bert")
    task = prepare_task(args)
    model = build_model(args, task, 0)
    known = transformers.BertModel.from_pretrained(folder / "bert").state_dict()
    found = model.decoder.bert.state_dict()
    name = "encoder.layer.0.attention.self.query.weight"
    assert torch.equal(found[name], known[name])
    assert len(found["embeddings.word_embeddings.weight"]) == len(task.target_tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["t5", "bart", "bert2bert"])
def test_both_libraries_have_the_same_losses(start, arguments):
    runs = [
        finetune(arguments(start, library, library=library))
        for library in ("fastplm", "transformers")
    ]
    ours, theirs = ([entry["loss"] for entry in run["seeds"][0]["history"]] for run in runs)
    assert ours == pytest.approx(theirs, rel=1e-4)


# --- a new source encoder -------------------------------------------------------------------------


@pytest.mark.slow
def test_first_step_trains_the_new_encoder_alone(arguments):
    args = arguments("new source", steps=12, source_encoder_steps=12, weight_decay=0.1)
    task = prepare_task(args)
    before = build_model(args, task, 0)
    free = {id(parameter) for parameter in before.first_step_parameters()}
    metrics = finetune(args)
    after = bart_translation.BartForTranslation.from_pretrained(metrics["seeds"][0]["model"])
    trained = dict(after.named_parameters())
    for name, parameter in before.named_parameters():
        # All weights change, except embeddings of the source encoder for tokens that no source has.
        assert torch.equal(parameter, trained[name]) == (id(parameter) not in free), name
    losses = [entry["loss"] for entry in metrics["seeds"][0]["history"]]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_second_step_trains_all(arguments):
    args = arguments("new source", steps=3, source_encoder_steps=2)
    before = dict(build_model(args, prepare_task(args), 0).named_parameters())
    metrics = finetune(args)
    after = bart_translation.BartForTranslation.from_pretrained(metrics["seeds"][0]["model"])
    same = [name for name, p in after.named_parameters() if torch.equal(p, before[name])]
    assert same == []


# --- the run --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scores_on_the_way_change_nothing(arguments):
    plain = finetune(arguments("bart", "plain", dropout=0.1))["seeds"][0]
    scored = finetune(arguments("bart", "scored", dropout=0.1, eval_every=2))["seeds"][0]
    assert [e["loss"] for e in plain["history"]] == [e["loss"] for e in scored["history"]]
    assert plain["scores"] == scored["scores"]
    assert [entry["step"] for entry in scored["scores_by_step"]] == [2]
    assert scored["scores_by_step"][0].keys() >= scored["scores"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("start", [pytest.param("bertshare", marks=SLOW), "new source"])
def test_resume(start, arguments, monkeypatch):
    settings = {"steps": 6, "save_every": 2, "dropout": 0.1, "eval_every": 3}
    whole = finetune(arguments(start, "whole", **settings))["seeds"][0]
    stopped = module.FinetuningTrainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        return stopped(self, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module.FinetuningTrainer, "training_step", stop)
        finetune(arguments(start, "part", **settings))
    part = finetune(arguments(start, "part", **settings, resume=True))["seeds"][0]
    assert part["scores"] == whole["scores"] and part["scores_by_step"] == whole["scores_by_step"]
    assert [e["loss"] for e in part["history"]] == [e["loss"] for e in whole["history"]]


# --- files and settings ---------------------------------------------------------------------------


def test_tables_and_aligned_files_are_the_same(folder, tmp_path):
    packed = tmp_path / "sources.gz"
    packed.write_bytes(gzip.compress((folder / "sources.txt").read_bytes()))
    table = read_examples("seq2seq", folder / "pairs.tsv")
    named = read_examples("seq2seq", folder / "pairs.tsv", ["source", "target"])
    aligned = read_examples("seq2seq", packed, targets=folder / "targets.txt")
    for found in (table, named, aligned):
        assert [(e.texts[0], e.target) for e in found] == list(zip(SOURCES, TARGETS, strict=True))


@pytest.mark.parametrize(
    "content, options, expected",
    [
        ("a\tb\nx\ty\n", {}, "one of sources and one of targets"),
        ("source\ttarget\nx\t\n", {}, ":2"),
        ("source\ttarget\nx\ty\n", {"text_columns": ["source"]}, "two"),
        ("", {}, "nothing"),
        ("one\ntwo\n", {"targets": "un\n"}, "targets.txt:2: no such line"),
        ("one\n\n", {"targets": "un\ndeux\n"}, ":2: an empty line"),
    ],
)
def test_malformed_files(content, options, expected, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text(content)
    if "targets" in options:
        (tmp_path / "targets.txt").write_text(options["targets"])
        options = {"targets": tmp_path / "targets.txt"}
    with pytest.raises((DataError, ArgumentValueError), match=expected):
        read_examples("seq2seq", path, **options)


@pytest.mark.parametrize(
    "start, changes, expected",
    [
        ("bart", {"task": "pair", "beams": 8}, "with --task pair; expected --task seq2seq"),
        ("bart", {"warm": "none"}, "`warm` got none"),
        ("bart", {"encoder": "x"}, "either --model or --encoder"),
        ("bart", {"model": None}, "--model DIR, or --encoder DIR"),
        ("bart", {"source_vocab_size": 400}, "`source_vocab_size` got 400"),
        ("bertshare", {"warm": "encoder"}, "one set of weights"),
        ("bertshare", {"decoder": "x"}, "one checkpoint for both parts"),
        ("bertshare", {"library": "transformers"}, "--library fastplm"),
        ("new source", {"library": "transformers"}, "--library fastplm"),
        ("bart", {"eval_targets": "x"}, "--eval-data, too"),
        ("bart", {"eval_data": "x", "eval_targets": "x"}, "for both --data and --eval-data"),
        ("bart", {"targets": "x", "text_columns": ["a", "b"]}, "Leave one of the two options out"),
    ],
)
def test_wrong_settings(start, changes, expected, arguments):
    with pytest.raises(ArgumentValueError, match=expected):
        arguments(start, **changes)


def test_wrong_models(arguments, folder, monkeypatch):
    args = arguments("new source", model=folder / "t5")
    with pytest.raises(ArgumentValueError, match="a t5; expected a BART"):
        prepare_task(args)
    for model in ("bert", "gpt2"):
        with pytest.raises(ArgumentValueError, match=f"a {model}; expected a model that writes"):
            finetune(arguments("bart", model=folder / model))
    assert not arguments().out.exists()
    args = arguments("bert2bert", decoder=folder / "t5")
    with pytest.raises(DataError, match="a family with a decoder"):
        build_model(args, prepare_task(args), 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install sacrebleu"):
        prepare_task(arguments())


def test_command_line(folder, tmp_path, capsys):
    words = ["finetune", "--task", "seq2seq", "--data", str(folder / "pairs.tsv")]
    words += ["--out", str(tmp_path / "out"), "--steps", "1", "--max-length", "32"]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main([*words, "--model", str(folder / "t5"), "--max-target-length", "8"]) == 0
    assert "bleu" in capsys.readouterr().out
