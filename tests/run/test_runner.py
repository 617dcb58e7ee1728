"""The order of every run, and that each command which trains keeps it."""

from __future__ import annotations

import json

import pytest
import torch

from fastplm.classic import train as classic
from fastplm.classic.settings import ClassicArguments
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.run import Finetuning
from fastplm.finetune.trainer import FinetuningTrainer
from fastplm.pretrain.seeds import Seeds
from fastplm.pretrain.stream import TextRun
from fastplm.pretrain.trainer import PretrainingTrainer
from fastplm.run.folder import RECORD
from fastplm.run.runner import Run
from fastplm.run.trainer import RunTrainer


class Noted(Run):
    """Notes what is called; ``failing`` raises."""

    ignored_on_resume = frozenset({"resume", "overwrite", "steps"})
    device = torch.device("cpu")
    failing = ""

    def __init__(self, args):
        super().__init__(args)
        self.called = []

    def note(self, name):
        self.called.append(name)
        if name == self.failing:
            raise DataError(name)

    def read(self):
        self.note("read")
        return {"text": "abc"}

    def compare(self, before):
        self.note("compare")
        super().compare(before)

    def build(self):
        self.note("build")
        return "what it will do"

    def train(self):
        self.note("train")
        (self.out / "model").mkdir(exist_ok=True)
        return self.finish({"steps": self.args.steps}, ["model"])


@pytest.fixture
def noted(tmp_path):
    (tmp_path / "text").write_text("A text.")

    def build(**changes) -> Noted:
        settings = {"system": "elmo", "corpus": [tmp_path / "text"], "out": tmp_path / "out"}
        return Noted(ClassicArguments(**settings | {"threads": 1, "steps": 3} | changes))

    return build


def test_the_order(noted, tmp_path, capsys):
    first = noted()
    assert first.run() == {"steps": 3} == json.loads((tmp_path / "out/metrics.json").read_text())
    assert first.called == ["read", "build", "train"]
    assert "what it will do" in capsys.readouterr().err
    assert "seed" in first.record and "steps" not in first.record and "out" in first.record
    with pytest.raises(DataError, match="an empty or new folder"):
        noted().run()
    again = noted(resume=True)
    assert again.run() == {"steps": 3}
    assert again.called == ["read", "compare"] and again.before["text"] == "abc"
    assert "is finished, all 3 steps of it: nothing was changed" in capsys.readouterr().err
    with pytest.raises(ArgumentValueError, match="`seed` got 7; expected 0, as in the run"):
        noted(resume=True, seed=7).run()
    (tmp_path / "out/metrics.json").unlink()
    again = noted(resume=True)
    again.run()
    assert again.called == ["read", "compare", "build", "train"]


@pytest.mark.parametrize("failing", ["read", "build"])
def test_what_fails_before_the_first_write_has_moved_nothing(noted, tmp_path, failing):
    noted().run()
    before = (tmp_path / "out" / RECORD).read_bytes()
    other = noted(overwrite=True, seed=1)
    other.failing = failing
    with pytest.raises(DataError, match=failing):
        other.run()
    assert (tmp_path / "out" / RECORD).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"out", "text"}
    noted(overwrite=True, seed=1).run()
    assert (tmp_path / "out.old-1" / RECORD).read_bytes() == before


def test_every_command_that_trains_has_this_order():
    for kind in (TextRun, Seeds, Finetuning, classic._Steps, classic._Word2Vec):
        assert issubclass(kind, Run) and kind.run is Run.run


def test_a_trainer_counts_and_leaves_the_loop_alone():
    for kind in (PretrainingTrainer, FinetuningTrainer, classic._Trainer):
        assert kind.get_batch_samples is RunTrainer.get_batch_samples
        assert kind.count is not RunTrainer.count
