"""``fastplm classic``: every system learns, and goes on where it was stopped."""

from __future__ import annotations

import json
import shutil

import pytest

from fastplm import cli
from fastplm.classic import train as module
from fastplm.classic.elmo import ElmoForLanguageModeling
from fastplm.classic.sentences import QuickThoughtsModel, SkipThoughtsModel
from fastplm.classic.settings import SYSTEMS, ClassicArguments
from fastplm.classic.train import classic
from fastplm.classic.words import Words
from fastplm.errors import ArgumentValueError, DataError, TooLittleTextError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("classic") / "text.txt"
    nouns, verbs = "river house teacher garden".split(), "follows carries remembers".split()
    lines = [f"The {nouns[i % 4]} {verbs[i % 3]} the {nouns[(i + 1) % 4]}." for i in range(240)]
    documents = [" ".join(lines[i : i + 12]) for i in range(0, len(lines), 12)]
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture
def arguments(corpus, tmp_path):
    def build(system, name="run", **changes):
        settings = {"hidden": 24, "vocab_size": 60, "steps": 6, "out": tmp_path / name}
        if system != "word2vec":
            settings |= {"embedding": 16, "batch_size": 16, "log_every": 1, "learning_rate": 1e-2}
        return ClassicArguments(system=system, **{"corpus": [corpus], **settings, **changes}).plan()

    return build


def test_every_system_from_the_command_line(corpus, tmp_path, capsys):
    for system in SYSTEMS:
        out = tmp_path / system
        words = ["classic", "--system", system, "--corpus", str(corpus), "--out", str(out)]
        words += ["--steps", "2", "--hidden", "16"]
        if system != "word2vec":
            words += ["--embedding", "8", "--batch-size", "8"]
        assert cli.main(words) == 0, capsys.readouterr().err
        assert "words" in capsys.readouterr().out
        assert cli.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
        metrics = json.loads((out / "metrics.json").read_text())
        assert metrics["arguments"]["system"] == system
    kinds = (ElmoForLanguageModeling, SkipThoughtsModel, QuickThoughtsModel)
    for kind, system in zip(kinds, SYSTEMS, strict=False):
        model = kind.from_pretrained(tmp_path / system / "model")
        assert model.config.vocab_size == len(Words.load(tmp_path / system / "model"))
    from gensim.models import KeyedVectors

    assert "river" in KeyedVectors.load(str(tmp_path / "word2vec" / "vectors.kv"))


@pytest.mark.slow
@pytest.mark.parametrize("system", ["elmo", "skip-thoughts", "quick-thoughts"])
def test_learns(system, arguments):
    metrics = classic(arguments(system, steps=60))
    first, last = (metrics["history"][at]["loss"] for at in (0, -1))
    assert last < 0.6 * first
    assert metrics["held_out"]["loss"] < first


@pytest.mark.slow
@pytest.mark.parametrize("system, damaged", [("elmo", False), ("quick-thoughts", True)])
def test_resume(system, damaged, arguments, tmp_path, monkeypatch, capsys):
    whole = classic(arguments(system, "whole", save_every=2))
    step = module._Trainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module._Trainer, "training_step", stop)
        classic(arguments(system, "part", save_every=2))
    if damaged:
        (tmp_path / "part" / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    part = classic(arguments(system, "part", save_every=2, resume=True))
    assert ("checkpoint-4 is not complete and is passed over" in capsys.readouterr().err) == damaged
    assert [e["loss"] for e in part["history"]] == [e["loss"] for e in whole["history"]]
    assert part["held_out"] == whole["held_out"]
    for path in (tmp_path / "part").glob("checkpoint-*"):
        shutil.rmtree(path)
    assert classic(arguments(system, "part", save_every=2, resume=True)) == part  # was finished


def test_wrong_settings(arguments, tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("".join(f"A line {i}.\n" for i in range(9)))
    lines = {"corpus": [tmp_path / "lines.txt"]}
    (tmp_path / "more-lines.txt").write_text("A line. Another line. A third one.\n\n" * 9)
    (tmp_path / "tied.txt").write_text("one two three four five six seven. " * 9)
    several = {"corpus": [tmp_path / "more-lines.txt"]}
    for system in ("skip-thoughts", "quick-thoughts"):
        with pytest.raises(TooLittleTextError, match="got documents of one sentence each"):
            classic(arguments(system, **lines))
    assert classic(arguments("elmo", "elmo", **lines))["held_out"]["loss"] > 0
    assert classic(arguments("word2vec", "w2v", seed=2**32 - 1, **lines))["arguments"]["steps"] == 6
    assert arguments("word2vec", steps=None).steps == 5
    with pytest.raises(ArgumentValueError, match="quick-thoughts"):
        arguments("bert")
    with pytest.raises(ArgumentValueError, match="no checkpoints"):
        arguments("word2vec", resume=True)
    for system, name in (("word2vec", "batch_size"), ("skip-thoughts", "layers")):
        with pytest.raises(
            ArgumentValueError, match=f"`{name}` got 3; expected nothing with {system}"
        ):
            arguments(system, **{name: 3})
    with pytest.raises(ArgumentValueError, match="`hidden` got 24; expected more than --embedding"):
        arguments("elmo", embedding=24)
    with pytest.raises(ArgumentValueError, match="`batch_size` got 2; expected 3 or more"):
        arguments("quick-thoughts", batch_size=2)
    with pytest.raises(ArgumentValueError, match="`vocab_size` got 5; expected room"):
        classic(arguments("word2vec", "rare", vocab_size=5, corpus=[tmp_path / "tied.txt"]))
    assert not (tmp_path / "rare").exists()
    with pytest.raises(ArgumentValueError, match="`corpus` got .*lines.txt, which is another text"):
        classic(arguments("skip-thoughts", "other", steps=1))
        classic(arguments("skip-thoughts", "other", steps=1, resume=True, **several))
    monkeypatch.setitem(__import__("sys").modules, "gensim.models", None)
    with pytest.raises(DataError, match="pip install gensim"):
        classic(arguments("word2vec"))
