"""Names of the Hugging Face Hub in the place of folders, with a cache that is made by hand."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import transformers

from fastplm.cli import main
from fastplm.errors import DataError
from fastplm.finetune.settings import FinetuneArguments
from fastplm.inference.columns import TextEmbedder, TextScorer
from fastplm.run.hub import folder_of, name_of
from fastplm.run.settings import MODEL
from fastplm.study.grid import COMMANDS, settings_of

REVISION = "0123456789abcdef0123456789abcdef01234567"
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] a b c d e".split()
TAKE_A_MODEL = [
    (command, each.name)
    for command, settings in COMMANDS.items()
    for each in dataclasses.fields(settings)
    if each.metadata["path"] == MODEL
]
#: What else such a setting needs, beside a corpus and the like.
NEEDED = {
    "pretrain": {"arch": "bert-tiny", "corpus": "text.txt", "steps": 1, "out": "out"},
    "finetune": {"task": "seq2seq", "data": "table.tsv", "out": "out"},
    "distill": {"corpus": "text.txt", "steps": 1, "out": "out"},
    "score": {"data": "text.txt"},
}
OF_SETTING = {
    ("distill", "generator"): {"recipe": "electra", "teacher": "acme/tiny"},
    ("distill", "tokenizer"): {"recipe": "multilingual", "translation": "table.tsv"},
    ("finetune", "decoder"): {"encoder": "acme/tiny"},
    ("finetune", "teacher"): {"model": "acme/tiny", "task": "classification"},
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of acme/tiny, a BERT, in a cache, without a network; a working directory."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "hub/models--acme--tiny"
    folder = model / "snapshots" / REVISION
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(REVISION)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "text.txt").write_text("a b c\nd e\n")
    (work / "table.tsv").write_text("text\tlabel\n" + "a b\tyes\nc d\tno\n" * 20)
    return folder


@pytest.mark.parametrize("command, name", TAKE_A_MODEL)
def test_every_setting_that_takes_a_model(command, name, cache, capsys):
    given = {**NEEDED[command], **OF_SETTING.get((command, name), {}), name: "acme/tiny"}
    if command == "distill":
        given = {"recipe": "distilbert", "teacher": "acme/tiny", **given}
    args = settings_of(command, given).with_models()
    assert getattr(args, name) == cache
    assert args.given[name] == f"acme/tiny@{REVISION}", "what OUT/settings.yaml has"
    assert f"{name}: acme/tiny@{REVISION}, in the cache" in capsys.readouterr().err


def test_a_run_by_name_repeats_by_its_revision(cache, capsys):
    words = "finetune --task classification --data table.tsv --steps 1 --batch-size 2".split()
    assert main([*words, "--model", "acme/tiny", "--out", "run"]) == 0
    settings = Path("run/settings.yaml").read_text()
    assert f"model: acme/tiny@{REVISION}" in settings
    assert main([*words, "--config", "run/settings.yaml", "--out", "again"]) == 0
    losses = [json.load(open(f"{out}/metrics.json"))["scores"] for out in ("run", "again")]
    assert losses[0] == losses[1]
    assert main([*words, "--model", "acme/tiny", "--out", "run", "--resume"]) == 0


def test_commands_and_classes_of_inference(cache, capsys):
    for command, out in (("embed", "out.npy"), ("score", "out.tsv")):
        words = [command, "--model", "acme/tiny", "--data", "text.txt", "--out", out]
        assert main(words) == 0
    assert TextEmbedder("acme/tiny")({"text": ["a b"]})["embedding"].shape == (1, 16)
    assert TextScorer("acme/tiny")({"text": ["a b"]})["score_tokens"] == [2]


def test_what_is_no_name_and_what_is_not_there(cache, tmp_path):
    for path in (cache, str(cache), "a/b/c", "./acme/tiny", tmp_path / "none"):
        assert str(folder_of("finetune", "model", path)) == str(path).removeprefix("./")
    assert name_of(cache) == f"acme/tiny@{REVISION}" and name_of(tmp_path) is None
    Path("acme/tiny").mkdir(parents=True)
    assert str(folder_of("finetune", "model", "acme/tiny")) == "acme/tiny", "a folder comes first"
    shutil.rmtree("acme")
    for name in ("acme/other", "bert-base-uncased", f"acme/tiny@{REVISION[::-1]}"):
        with pytest.raises(DataError) as error:
            FinetuneArguments("classification", "table.tsv", "out", name).plan().with_models()
        line = str(error.value)
        assert line.startswith(f"finetune: `model` got {name!r}, which is no folder, and cannot")
        assert "hf download NAME" in line and "\n" not in line
