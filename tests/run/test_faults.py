"""A run whose process is killed, at a known step and at random ones.

After each fault the run continues with ``--resume``: it ends with exactly the losses of a run
without a fault, or one line says what is lost and what to do. Each test prints the counts.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import shutil
import subprocess
import time
from collections import Counter

import pytest
import torch

from fastplm.cli import main

pytestmark = pytest.mark.slow


FINETUNE = "finetune --steps 6 --batch-size 4 --save-every 2 --log-every 1 --max-length 16"
CLASSIFY = f"{FINETUNE} --task classification --data {{table}} --model {{bert}} --seeds 2"
WRITE = f"{FINETUNE} --task seq2seq --data {{pairs}} --eval-every 3 --beams 2"
WRITE += " --max-target-length 8"
STREAM = "--corpus {corpus} --cache {cache} --steps 6 --batch-size 4 --save-every 2 --log-every 1"
STREAM += " --block-size 32 --precision fp32 --dropout 0.1"
# An epoch of these sentences has five steps.
CLASSIC = "classic --corpus {sentences} --steps 6 --batch-size 16 --save-every 2 --log-every 1"
CLASSIC += " --hidden 16 --embedding 8 --vocab-size 60 --system"
#: The kinds of runs, each of six steps with a checkpoint after every second one.
KINDS = {
    "pretrain": f"pretrain --arch bert-tiny --vocab-size 120 --lr 1e-3 {STREAM}",
    "finetune": CLASSIFY,
    "frozen": f"{CLASSIFY} --freeze --features mix --head bilstm",
    "new source encoder": f"{WRITE} --model {{bart}} --source-encoder-layers 1"
    " --source-vocab-size 300 --source-encoder-steps 3",
    "elmo": f"{CLASSIC} elmo",
    "distill": f"distill --recipe distilbert --teacher {{bert}} --student-layers 1 {STREAM}",
    "t5": f"{WRITE} --model {{t5}}",
    "bart": f"{WRITE} --model {{bart}}",
    "encoder-decoder": f"{WRITE} --encoder {{bert}} --share",
    "skip-thoughts": f"{CLASSIC} skip-thoughts",
    "quick-thoughts": f"{CLASSIC} quick-thoughts",
}
every_kind = pytest.mark.parametrize("training", KINDS, indirect=True)


class Training:
    """A kind of run: its command line and its results.

    Attributes:
        whole, stopped: folders of a run that was finished, and of one that was killed before.
        gold: ``curve`` of the first.
    """

    def __init__(self, name, places):
        self.words, self.places = KINDS[name], places
        self.finetunes = self.words.startswith("finetune")
        self.has_cache = "{cache}" in self.words
        self.often = name in ("pretrain", "finetune")  # the other kinds share most of this code

    def faults(self, count):
        return count if self.often else count // 3

    def argv(self, out, resume=False, overwrite=False):
        words = self.words.format(**self.places, cache=out.parent / "cache").split()
        flags = ["--resume"] * resume + ["--overwrite"] * overwrite
        return [*words, "--out", str(out), "--threads", "1", *flags]

    def curve(self, out):
        """All numbers of a run without times, and its weights."""
        metrics = json.loads((out / "metrics.json").read_text())
        runs = metrics.get("seeds", [metrics])
        curves = [
            [{k: v for k, v in entry.items() if "second" not in k} for entry in run["history"]]
            for run in runs
        ]
        names = ("scores", "scores_by_step", "held_out")
        scores = [{name: run[name] for name in names if name in run} for run in runs]
        models = [*out.glob("model/*.safetensors"), *out.glob("seed-?/model/*.safetensors")]
        assert models and any(scores)
        return curves, scores, {str(path.relative_to(out)): path.read_bytes() for path in models}


@pytest.fixture(scope="module")
def places(corpus, bert, run, tmp_path_factory):
    """The files and folders that the command lines name."""
    work = tmp_path_factory.mktemp("places")
    documents = corpus.read_text().split("\n\n")
    (work / "sentences.txt").write_text("\n\n".join(documents[:12]))
    names = [f"the {'river' if i % 3 else 'house'} {i}" for i in range(26)]
    rows = (f"{name}\t{i % 2}" for i, name in enumerate(names))
    (work / "data.tsv").write_text("\n".join(("text\tlabel", *rows)) + "\n")
    pairs = (f"{name}\t{name[4:]}" for name in names)
    (work / "pairs.tsv").write_text("\n".join(("source\ttarget", *pairs)) + "\n")
    for arch in ("t5", "bart"):
        run(work / arch, arch=f"{arch}-tiny", vocab_size=300, steps=1)
    return {
        "corpus": corpus,
        "sentences": work / "sentences.txt",
        "table": work / "data.tsv",
        "pairs": work / "pairs.tsv",
        "bert": bert / "model",
        "t5": work / "t5" / "model",
        "bart": work / "bart" / "model",
    }


@pytest.fixture(scope="module")
def training(request, places, killed, tmp_path_factory):
    """A kind of run with the folders of a finished run and of one that was killed."""
    work = tmp_path_factory.mktemp("training")
    kind = Training(request.param, places)
    kind.whole = work / "out"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(kind.argv(kind.whole)) == 0
    kind.gold = kind.curve(kind.whole)
    # Killed at step 5 (of the second seed).
    kind.stopped = work / "stopped" / "out"
    if kind.has_cache:
        shutil.copytree(work / "cache", work / "stopped" / "cache")
    killed(kind.argv(kind.stopped), 5, seed=len(kind.gold[0]) - 1)
    yield kind
    torch.set_num_threads(threads)


def outcome(kind, out, capsys, argv=None):
    """The outcome of a run that continues: the same curve, or one line of an error."""
    capsys.readouterr()
    code = main(argv or kind.argv(out, resume=True))
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    if code == 0:
        assert kind.curve(out) == kind.gold
        passed = "not complete" in shown
        return "the same curve, with a line on what was passed over" if passed else "the same curve"
    assert code == 2, shown
    lines = [line for line in shown.splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("fastplm: error: "), shown
    return "one line: " + re.sub(r"\S*/\S*", "…", lines[0].removeprefix("fastplm: error: "))[:90]


def report(capsys, name, counts):
    with capsys.disabled():
        print(f"\n{name}")
        for what, count in counts.most_common():
            print(f"  {count:4}  {what}")


@every_kind
def test_killed_in_a_known_step(training, tmp_path, capsys):
    for name in ("out", "cache")[: 1 + training.has_cache]:
        shutil.copytree(training.stopped.parent / name, tmp_path / name)
    assert not (tmp_path / "out" / "metrics.json").exists()
    assert max(path.name for path in (tmp_path / "out").rglob("checkpoint-*")) == "checkpoint-4"
    assert outcome(training, tmp_path / "out", capsys) == "the same curve"


@every_kind
def test_killed(training, tmp_path, capsys, request):
    """A run is killed at random moments, and continues from each."""
    context = multiprocessing.get_context("forkserver")
    modules = ["fastplm.cli", "fastplm.finetune.run", "fastplm.classic.train", "transformers"]
    context.set_forkserver_preload(modules)
    draw, counts, faults = random.Random("killed"), Counter(), training.faults(25)

    def checkpoints(out):
        return {*out.glob("checkpoint-*"), *out.glob("seed-?/checkpoint-*")}

    def start(out):
        begun = checkpoints(out) or (training.finetunes and (out / "run.json").exists())
        argv = training.argv(out, resume=bool(begun), overwrite=not begun and out.exists())
        process = context.Process(target=main, args=(argv,))
        process.start()
        return process

    def prepared(work):
        if (training.stopped.parent / "cache").is_dir():
            shutil.copytree(training.stopped.parent / "cache", work / "cache")
        return work / "out"

    (tmp_path / "timed").mkdir()
    out = prepared(tmp_path / "timed")
    for _ in range(2):  # the first run also starts the server
        shutil.rmtree(out, ignore_errors=True)
        began = time.perf_counter()
        start(out).join()
        seconds = time.perf_counter() - began
    assert training.curve(out) == training.gold
    killed = number = 0
    while killed < faults:
        (tmp_path / str(number)).mkdir()
        out = prepared(tmp_path / str(number))
        number += 1
        for _ in range(3):
            known, soon = checkpoints(out), draw.random() < 0.5
            process = start(out)
            # Half of the kills come after a checkpoint, as a short run is mostly its start.
            while soon and process.is_alive() and checkpoints(out) <= known:
                time.sleep(0.002)
            process.join(draw.uniform(0, 0.2) * seconds if soon else draw.uniform(0.2, 1) * seconds)
            if process.is_alive():
                process.kill()
                killed += 1
            process.join()
            if killed >= faults:
                break
        what = outcome(training, out, capsys)
        counts[what] += 1
        if what.startswith("one line"):
            argv = training.argv(out, overwrite=True)
            counts[f"  then {outcome(training, out, capsys, argv)}"] += 1
        shutil.rmtree(tmp_path / str(number - 1))
    report(capsys, f"{request.node.name}, {killed} kills", counts)


#: Code that Python runs when it starts: this rank's process fails when it makes its model.
FAULTY = """
import os, time
if os.environ.get("RANK") == os.environ["FAULTY_RANK"]:
    from fastplm.errors import DataError
    from fastplm.pretrain import run as pretrain
    def make_model(*arguments):
        if os.environ["FAULTY_RANK"] == "1":
            time.sleep(3)  # the other one now waits for this one
        print(f"failed at {time.time()}", flush=True)
        raise DataError("pretrain: `disk` got a fault of one process alone; expected none. Mend it")
    pretrain.make_model = make_model
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_process_alone(arguments, command, tmp_path, rank):
    """The line of the process's error is not hidden, and no other process waits for ever."""
    (tmp_path / "sitecustomize.py").write_text(FAULTY)
    (python, *fastplm), environment = command
    environment = environment | {"PYTHONPATH": str(tmp_path), "FAULTY_RANK": str(rank)}
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = torchrun + fastplm + arguments(tmp_path / "out", threads=1)
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    ended = time.time()
    assert ran.returncode != 0 and re.search(r"exitcode *: 2\b", ran.stderr), ran.stderr
    assert ended - float(re.search(r"failed at ([\d.]+)", ran.stdout)[1]) < 10
    # torchrun's own messages follow.
    said, _, _ = ran.stderr.partition("ChildFailedError")
    lines = [line for line in said.splitlines() if line.startswith("fastplm: error:")]
    assert f"fastplm: error: rank {rank}: pretrain: `disk` got a fault" in "\n".join(lines)
    assert len(lines) <= 2 and "gloo" not in said and "barrier" not in said, said
    assert not (tmp_path / "out").exists()


def test_processes_have_the_same_settings(arguments, command, tmp_path):
    (python, *_), environment = command
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nfrom fastplm.cli import main\n"
        "sys.exit(main([*sys.argv[1:], '--lr', f'0.00{1 + int(os.environ[\"RANK\"])}']))"
    )
    words = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program]
    words += arguments(tmp_path / "out", threads=1)
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    expected = "pretrain: `lr` got 0.002 on rank 1; expected 0.001, as on rank 0"
    assert ran.returncode != 0 and expected in ran.stderr, ran.stderr
    assert not (tmp_path / "out").exists()
