"""A run whose process is killed, whose disk fills and whose files are damaged, at random.

After each fault the run goes on with ``--resume``: it ends with the very losses of a run that
nothing happened to, or one line says what is lost and what to do. Each test prints the counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from fastplm.cli import main

pytestmark = pytest.mark.slow


class Pretraining:
    """Six steps of a BERT, a checkpoint after each second one."""

    def __init__(self, arguments, work):
        self.cache, self.arguments = work / "cache", arguments

    def argv(self, out, resume=False, overwrite=False):
        options = {"resume": resume, "overwrite": overwrite, "dropout": 0.1, "threads": 1}
        options = {name: value for name, value in options.items() if value is not False}
        return self.arguments(out, cache=out.parent / "cache", **options)

    def curve(self, out):
        metrics = json.loads((out / "metrics.json").read_text())
        entries = metrics["history"]
        curve = [{k: v for k, v in entry.items() if "second" not in k} for entry in entries]
        return curve, metrics["held_out"], (out / "model" / "model.safetensors").read_bytes()


class Finetuning:
    """Two seeds of six steps each."""

    def __init__(self, model, work):
        self.model, self.data = model, work / "data.tsv"
        rows = (f"the {'river' if i % 3 else 'house'} {i}\t{i % 2}" for i in range(30))
        self.data.write_text("\n".join(("text\tlabel", *rows)) + "\n")

    def argv(self, out, resume=False, overwrite=False):
        words = (
            f"finetune --task classification --model {self.model} --data {self.data} --out {out}"
        )
        words += " --steps 6 --batch-size 4 --log-every 1 --save-every 2 --max-length 16 --seeds 2"
        words += " --threads 1" + " --resume" * resume + " --overwrite" * overwrite
        return words.split()

    def curve(self, out):
        seeds = json.loads((out / "metrics.json").read_text())["seeds"]
        curves = [
            [{k: v for k, v in entry.items() if "second" not in k} for entry in seed["history"]]
            for seed in seeds
        ]
        weights = [
            (out / f"seed-{seed['seed']}" / "model" / "model.safetensors").read_bytes()
            for seed in seeds
        ]
        return curves, [seed["scores"] for seed in seeds], weights


@pytest.fixture(scope="module", params=["pretrain", "finetune"])
def training(request, arguments, bert, killed, tmp_path_factory):
    """A kind of run, its folder when it was finished, and one of it killed on its way."""
    work = tmp_path_factory.mktemp(request.param)
    kind = (
        Pretraining(arguments, work)
        if request.param == "pretrain"
        else Finetuning(bert / "model", work)
    )
    whole = work / "out"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert main(kind.argv(whole)) == 0
    kind.whole = whole
    kind.gold = kind.curve(whole)
    # Killed at step 5 (of the second seed).
    stopped = work / "stopped" / "out"
    if (work / "cache").is_dir():
        shutil.copytree(work / "cache", work / "stopped" / "cache")
    killed(kind.argv(stopped), 5, seed=0 if request.param == "pretrain" else 1)
    kind.stopped = stopped
    yield kind
    torch.set_num_threads(threads)


def outcome(kind, out, capsys, argv=None):
    """What became of a run that goes on: the same curve, or one line of an error."""
    capsys.readouterr()
    code = main(argv or kind.argv(out, resume=True))
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    if code == 0:
        assert kind.curve(out) == kind.gold
        passed = "whole" in shown
        return "the same curve, with a line on what was passed over" if passed else "the same curve"
    assert code == 2, shown
    lines = [line for line in shown.splitlines() if "error" in line]
    assert len(lines) == 1 and lines[0].startswith("fastplm: error: "), shown
    return "one line: " + re.sub(r"\S*/\S*", "…", lines[0].removeprefix("fastplm: error: "))[:90]


def spoil(path, draw):
    """One file, damaged in one of the ways of disks and people."""
    data = path.read_bytes()
    way = draw.choice(["cut", "flip", "flip", "zeros", "delete", "empty"])
    place = draw.randrange(len(data)) if data else 0
    if way == "delete":
        path.unlink()
    elif way == "empty" or not data:
        path.write_bytes(b"")
    elif way == "cut":
        path.write_bytes(data[:place])
    elif way == "zeros":
        path.write_bytes(data[:place] + bytes(len(data) - place))
    else:
        spoilt = bytearray(data)
        spoilt[place] ^= 1 << draw.randrange(8)
        path.write_bytes(spoilt)
    return way


def report(capsys, name, counts):
    with capsys.disabled():
        print(f"\n{name}")
        for what, count in counts.most_common():
            print(f"  {count:4}  {what}")


@pytest.mark.parametrize(
    "state, damaged, faults",
    [("stopped", "out", 45), ("whole", "out", 15), ("stopped", "cache", 40)],
)
def test_damaged_files(training, state, damaged, faults, tmp_path, capsys, request):
    if damaged == "cache" and not isinstance(training, Pretraining):
        pytest.skip("fine-tuning has no cache")
    draw, counts = random.Random(state + damaged), Counter()
    folder = getattr(training, state)
    for number in range(faults):
        work = tmp_path / str(number)
        for name in "out", "cache":
            source = folder if name == "out" else folder.parent / name
            if source.is_dir():
                shutil.copytree(source, work / name)
        files = (path for path in (work / damaged).rglob("*") if path.is_file())
        path = draw.choice(sorted(path for path in files if path.name != "run.lock"))
        way = spoil(path, draw)
        try:
            counts[outcome(training, work / "out", capsys)] += 1
        except Exception as error:
            raise AssertionError(f"after {way} {path.relative_to(work)}") from error
        shutil.rmtree(work)
    report(capsys, f"{request.node.name}: {faults} faults", counts)


@pytest.mark.parametrize("faults", [25])
def test_killed(training, faults, tmp_path, capsys, request):
    """Killed at random moments, each time anew on the way on from the last."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fastplm.cli", "fastplm.train.finetune", "transformers"])
    draw, counts = random.Random("killed"), Counter()

    def start(out):
        begun = bool(list(out.glob("**/checkpoint-*"))) or (
            isinstance(training, Finetuning) and (out / "run.json").exists()
        )
        argv = training.argv(out, resume=begun, overwrite=not begun and out.exists())
        process = context.Process(target=main, args=(argv,))
        process.start()
        return process

    def prepared(work):
        if (training.stopped.parent / "cache").is_dir():
            shutil.copytree(training.stopped.parent / "cache", work / "cache")
        return work / "out"

    (tmp_path / "timed").mkdir()
    out = prepared(tmp_path / "timed")
    for _ in range(2):  # the first one starts the server, too
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
            process = start(out)
            process.join(draw.uniform(0.2, 1.0) * seconds)
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


@pytest.mark.parametrize("faults", [20])
def test_a_disk_that_fills(training, faults, tmp_path, capsys, request):
    """Where a small disk may be mounted the writes fail; else files may not grow beyond a size."""
    draw, counts = random.Random("disk"), Counter()
    needed = sum(path.stat().st_size for path in training.stopped.rglob("*") if path.is_file())
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={5 * needed}", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for number in range(faults):
            work = disk / str(number)
            out = work / "out"
            work.mkdir()
            cache = training.stopped.parent / "cache"
            if cache.is_dir():
                os.symlink(shutil.copytree(cache, tmp_path / f"cache{number}"), work / "cache")
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            if mounted:
                free = shutil.disk_usage(disk).free
                ballast = disk / "ballast"
                ballast.write_bytes(bytes(max(0, free - draw.randrange(4 * needed))))
            else:
                size = draw.randrange(needed // 2)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            try:
                first = outcome(training, out, capsys, training.argv(out))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            if mounted:
                ballast.unlink()
            counts[first] += 1
            if first.startswith("one line"):
                again = outcome(training, out, capsys) if out.exists() else "one line"
                if again.startswith("one line"):
                    argv = training.argv(out, overwrite=True)
                    again = f"from its beginning, {outcome(training, out, capsys, argv)}"
                counts[f"  then {again}"] += 1
            shutil.rmtree(work)
            for old in disk.glob("*.old-*"):
                shutil.rmtree(old)
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)
    report(capsys, f"{request.node.name} ({'disk' if mounted else 'size of files'})", counts)


BUSY = """
import hashlib, sys
from fastplm.train._interrupt import interruptible
with interruptible(["pretrain"], sys.argv[1]):
    print("busy", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 28)  # minutes, and it looks at no signal
"""


def test_interrupted_where_python_cannot_answer(tmp_path):
    words = [sys.executable, "-c", BUSY, str(tmp_path)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "busy\n"
        time.sleep(0.5)
        began = time.perf_counter()
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and shown.startswith("fastplm: interrupted")
    assert shown.count("\n") == 1 and time.perf_counter() - began < 30
