"""What the tests of the commands share: a corpus, runs of seconds, and their errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import UserDict
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fastplm.cli import main


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A small file of documents, with blank lines between them."""
    nouns = "river house teacher garden train letter window forest engine island".split()
    verbs = "follows carries remembers builds opens paints".split()
    documents = []
    for i in range(150):
        sentences = [
            f"The {nouns[(i + j) % 10]} {verbs[(i * 5 + j) % 6]} the {nouns[(i * 3 + j * 7) % 10]}."
            for j in range(4 + i % 7)
        ]
        documents.append(" ".join(sentences))
    path = tmp_path_factory.mktemp("corpus") / "stories.txt"
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture(scope="session")
def arguments(corpus, tmp_path_factory):
    """The command line of a run that takes seconds, with options added or replaced."""
    cache = tmp_path_factory.mktemp("cache")

    def build(out: Path, arch: str = "bert-tiny", **options: object) -> list[str]:
        settings = {
            "arch": arch,
            "corpus": corpus,
            "out": out,
            "cache": cache,
            "vocab-size": 120,
            "block-size": 32,
            "batch-size": 4,
            "steps": 6,
            "save-every": 2,
            "log-every": 1,
            "lr": 1e-3,
            "precision": "fp32",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        words = ["pretrain"]
        for name, value in settings.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not None:
                words += [f"--{name}", str(value)]
        return words

    return build


@pytest.fixture(scope="session")
def run(arguments):
    """Runs the command in this process and returns its metrics."""

    def run(out: Path, **options: object) -> dict:
        assert main(arguments(out, **options)) == 0
        return json.loads((out / "metrics.json").read_text())

    return run


@pytest.fixture(scope="session")
def one_step_of():
    """A function: the losses of a fine-tuning's step on eight examples, split in several ways."""

    from fastplm.finetune.data import prepare_task
    from fastplm.finetune.models import build_model
    from fastplm.finetune.trainer import make_trainer

    def losses(args) -> list[float]:
        task = prepare_task(args)
        features, model = task.dataset, build_model(task, 3)
        trainer = make_trainer(task, model, 3, Path(args.out))
        trainer.current_gradient_accumulation_steps = 1
        chosen = torch.arange(8)

        def loss(parts: Iterable[torch.Tensor]) -> float:
            batches = [trainer.data_collator([features[int(i)] for i in part]) for part in parts]
            assert trainer.draws_by_sample(batches[0])
            count = None
            if "labels" in batches[0]:
                count = torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum()
            steps = [trainer.training_step(model, batch, count).item() for batch in batches]
            return sum(steps) if "labels" in batches[0] else sum(steps) / len(steps)

        ways = [chosen], chosen.chunk(2), chosen.chunk(4), [chosen.flip(0)], chosen.split(1)
        return [loss(way) for way in ways]

    return losses


@pytest.fixture(scope="session")
def curve():
    """The loss curve of a run, from its metrics or its folder, without times."""

    def curve(run: dict | Path) -> list[dict]:
        metrics = json.loads((run / "metrics.json").read_text()) if isinstance(run, Path) else run
        return [
            {k: v for k, v in entry.items() if "second" not in k} for entry in metrics["history"]
        ]

    return curve


@pytest.fixture
def refused(capsys):
    """The command ends with one line of an error, which has the words. Returns the line."""

    def refused(argv: list[str], *words: str, code: int = 2) -> str:
        capsys.readouterr()
        try:
            found = main(argv)
        except SystemExit as exit:  # argparse raises it
            found = exit.code
        shown = capsys.readouterr()
        *before, line = shown.err.splitlines()
        assert found == code and not shown.out, shown
        assert re.match("fastplm( pretrain| finetune| distill)?: error: ", line), shown.err
        assert not any("error" in text or "Traceback" in text for text in before)
        for word in words:
            assert word in line
        return line

    return refused


@pytest.fixture(scope="session")
def word_tokenizer():
    """Makes a tokenizer of words with spaces between them; the options name special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def build(words: list[str], **special: str) -> PreTrainedTokenizerFast:
        vocabulary = {word: index for index, word in enumerate(words)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=backend, **special)

    return build


@pytest.fixture(scope="session")
def command():
    """The command line in a process with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [sys.executable, "-m", "fastplm"], environment


@pytest.fixture(scope="session")
def in_two_processes(command):
    """Runs a command under torchrun, and asserts that it ends well."""
    (python, *fastplm), environment = command
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

    def run(words: list[str]) -> None:
        process = subprocess.Popen(
            torchrun + fastplm + words,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, output

    return run


#: The command in a process that is killed, as by a scheduler, in the step after this many.
KILLED = """
import os, signal, sys
from transformers import Trainer
from fastplm.cli import main
step, steps, seed = Trainer.training_step, int(sys.argv[1]), int(sys.argv[2])
def training_step(self, *args, **kwargs):
    if self.state.global_step == steps and self.args.seed == seed:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, *args, **kwargs)
Trainer.training_step = training_step
main(sys.argv[3:])
"""


@pytest.fixture(scope="session")
def killed(command):
    """Runs a command line that is killed after so many steps of a seed."""
    (python, *_), environment = command

    def killed(argv: list[str], steps: int, seed: int = 0) -> None:
        words = [python, "-c", KILLED, str(steps), str(seed), *argv]
        process = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert process.returncode == -signal.SIGKILL, process.stderr

    return killed


@pytest.fixture(scope="session")
def bert(run, tmp_path_factory) -> Path:
    """The folder of a finished BERT run."""
    out = tmp_path_factory.mktemp("bert") / "out"
    run(out)
    return out


@pytest.fixture(scope="session")
def electra(run, tmp_path_factory) -> Path:
    """The folder of a finished ELECTRA run."""
    out = tmp_path_factory.mktemp("electra") / "out"
    run(out, arch="electra-tiny")
    return out


@pytest.fixture(autouse=True)
def rules_of_this_machine() -> None:
    """The rules, which other processes have, for runs compared with theirs."""


class TellsNoRest:
    """A tokenizer that says nothing of the tokens it cuts off, as tokenizers 0.23.1 may."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *texts, return_overflowing_tokens=False, **options):
        encoded = self.tokenizer(*texts, **options)
        if return_overflowing_tokens:
            encoded["overflow_to_sample_mapping"] = [*range(len(encoded["input_ids"]))]
        return _WithoutRest(encoded)


class _WithoutRest(UserDict):
    """What such a tokenizer returns."""

    def __init__(self, encoded):
        super().__init__(encoded)
        self.encoded = encoded
        self.encodings = [_CutOff(encoding) for encoding in encoded.encodings]

    def __getattr__(self, name):
        return getattr(self.__dict__["encoded"], name)


class _CutOff:
    overflowing: tuple[()] = ()

    def __init__(self, encoding):
        self.encoding = encoding

    def __getattr__(self, name):
        return getattr(self.__dict__["encoding"], name)
