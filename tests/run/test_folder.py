"""A run's use of its folder, and the outcome of errors there."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

from fastplm.cli import main
from fastplm.data import _folder
from fastplm.data._folder import build_once, verify, write_manifest
from fastplm.errors import DataError
from fastplm.run import folder as module
from fastplm.run.folder import claimed, last_checkpoint, read_record, writing
from fastplm.run.trainer import FiniteCheck


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def copied(bert, tmp_path):
    """A finished run of six steps, for a test to change."""
    return Path(shutil.copytree(bert, tmp_path / "out"))


@pytest.fixture
def stopped(copied):
    """The same run, as if it had been killed after its last checkpoint."""
    for name in ("manifest.json", "metrics.json", "loss.png"):
        (copied / name).unlink()
    shutil.rmtree(copied / "model")
    return copied


@pytest.fixture(scope="module")
def labelled(tmp_path_factory, bert):
    """The words of a fine-tuning of two seeds and two steps."""
    path = tmp_path_factory.mktemp("labelled") / "data.tsv"
    rows = (f"the {'river' if i % 2 else 'house'} {i}\t{i % 2}" for i in range(40))
    path.write_text("\n".join(("text\tlabel", *rows)) + "\n")

    def build(out, *words, model=bert / "model", **options):
        settings = {"task": "classification", "model": model, "data": path, "out": out}
        settings |= {"steps": 2, "batch-size": 4, "log-every": 1, "max-length": 16}
        settings |= {name.replace("_", "-"): value for name, value in options.items()}
        pairs = (f"--{name} {value}" for name, value in settings.items())
        return ["finetune", *" ".join(pairs).split(), *words]

    return build


# --- whose folder it is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["model/mine.txt", "metrics.json", "seed-0/model/mine.txt", ".mine"]
)
@pytest.mark.parametrize("command", ["pretrain", "finetune"])
def test_existing_files_are_not_touched(command, name, arguments, labelled, tmp_path, refused):
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    argv = arguments(out) if command == "pretrain" else labelled(out)
    refused(argv, str(out), name.split("/")[0], "--overwrite")
    assert content(out) == {name: b"mine"}


@pytest.mark.slow
def test_overwrite_moves(copied, run, tmp_path, capsys):
    before = content(copied)
    (tmp_path / "out.old-1").mkdir()  # this name is taken
    run(copied, overwrite=True, steps=1)
    assert content(tmp_path / "out.old-2") == before
    assert f"was moved to {tmp_path / 'out.old-2'}" in capsys.readouterr().err
    assert not list((tmp_path / "out.old-1").iterdir())


@pytest.mark.parametrize("out", ["", " "])
def test_a_folder_has_a_name(out, arguments, labelled, refused):
    argv = arguments(out)
    refused(argv, "`out` got '")
    argv = labelled("here")
    argv[argv.index("here")] = out
    refused(argv, "`out` got '")


@pytest.mark.parametrize("out", ["/dev/null/run", "/proc/run", "FILE", "FILE/run"])
def test_impossible_folders(out, arguments, labelled, tmp_path, refused):
    (tmp_path / "file").write_text("mine")
    out = Path(out.replace("FILE", str(tmp_path / "file")))
    for argv in (arguments(out), labelled(out), arguments(out, overwrite=True)):
        refused(argv, str(out), "expected a folder")
    assert (tmp_path / "file").read_text() == "mine"


def test_one_process_at_a_time(copied, arguments, labelled, refused):
    before = content(copied)
    with claimed("pretrain", copied, resume=True, overwrite=False):
        for options in ({"resume": True}, {"overwrite": True}, {}):
            refused(arguments(copied, **options), f"process {os.getpid()} ")
        refused(labelled(copied), f"process {os.getpid()} ")
    assert content(copied) == before


def test_the_lock_of_a_killed_process_does_not_count(tmp_path):
    (tmp_path / module.LOCK).write_text("1 of elsewhere")
    with claimed("pretrain", tmp_path, resume=False, overwrite=False):
        assert (tmp_path / module.LOCK).read_text().startswith(f"{os.getpid()} of ")
    assert not list(tmp_path.iterdir())


def test_a_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "fcntl", None)
    with claimed("pretrain", tmp_path / "out", resume=False, overwrite=False):
        module.place_checkpoint(_made(tmp_path / "scratch"), tmp_path / "out", 2, keep=1)
    assert [step for step, _ in module.checkpoints(tmp_path / "out")] == [2]
    assert build_once(tmp_path / "cache", "key", lambda folder: None).is_dir()


def test_a_run_that_never_began_leaves_no_folder(arguments, tmp_path, refused):
    refused(arguments(tmp_path / "out", corpus=tmp_path / "no.txt"), "no.txt")
    assert not (tmp_path / "out").exists()


def test_of_several_processes_the_first_one_claims(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "mine").write_text("")
    with claimed("pretrain", tmp_path, resume=False, overwrite=True):
        assert content(tmp_path) == {"mine": b""}


@pytest.mark.slow
def test_a_cache_may_lie_in_the_folder(run, tmp_path):
    (tmp_path / "out" / "cache").mkdir(parents=True)
    run(tmp_path / "out", cache=tmp_path / "out" / "cache", steps=1)


# --- checkpoints ----------------------------------------------------------------------------------


def _damages():
    def flip(path):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 8
        path.write_bytes(data)

    return {
        "missing": lambda path: path.unlink(),
        "empty": lambda path: path.write_bytes(b""),
        "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "flipped": flip,
    }


FILES = """model.safetensors optimizer.pt scheduler.pt trainer_state.json config.json rng_state.pth
training_args.bin tokenizer.json manifest.json""".split()


@pytest.mark.parametrize("damaged", _damages())
@pytest.mark.parametrize("name", FILES)
def test_damaged_checkpoints_are_found(name, damaged, copied):
    _damages()[damaged](copied / "checkpoint-6" / name)
    lines = []
    assert last_checkpoint(copied, lines.append) == copied / "checkpoint-4"
    (line,) = lines
    assert "checkpoint-6 is not complete and is passed over: " in line and name in line


def test_a_checkpoint_of_another_step(copied):
    shutil.rmtree(copied / "checkpoint-6")
    os.rename(copied / "checkpoint-4", copied / "checkpoint-5")
    lines = []
    assert last_checkpoint(copied, lines.append) is None
    assert "step 4" in lines[0]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_said(stopped, bert, run, capsys, caplog, curve):
    (stopped / "checkpoint-6" / "rng_state.pth").unlink()
    # One checkpoint was being written when the process died, and one has another step.
    shutil.copytree(stopped / "checkpoint-4", stopped / ".incomplete" / "checkpoint-6")
    shutil.copytree(stopped / "checkpoint-4", stopped / "checkpoint-5")
    metrics = run(stopped, resume=True, dropout=0.1)
    assert "missing keys" not in caplog.text and not (stopped / ".incomplete").exists()
    assert curve(stopped) == curve(bert)
    shown = capsys.readouterr()
    assert "checkpoint-6 is not complete and is passed over: rng_state.pth is missing" in shown.err
    assert metrics["starts"] == [0, 4] and "all steps; resumed at 4" in shown.out


def _without_checkpoints(out):
    for path in out.glob("checkpoint-*"):
        shutil.rmtree(path)


def _without_optimizers(out):
    for path in out.glob("checkpoint-*"):
        (path / "optimizer.pt").write_bytes(b"")


def _another_hold_out(out):
    record = read_record("pretrain", out)
    record["held_out"]["samples"] += 1
    module.write_hashed(out / "run.json", record)


def _another_seed(out):
    record = out / "run.json"
    record.write_text(record.read_text().replace('"seed": 0', '"seed": 1'))


def _damaged_record(damaged):
    return lambda out: _damages()[damaged](out / "run.json")


@pytest.mark.parametrize(
    "change, options, words",
    [
        (_without_checkpoints, {}, ["no checkpoint yet", "--overwrite"]),
        (_without_checkpoints, {"resume": True}, ["no checkpoint", "--overwrite"]),
        (lambda out: None, {"resume": True, "overwrite": True}, ["`overwrite`", "resume"]),
        (_without_optimizers, {"resume": True}, ["optimizer.pt has 0 bytes", "--overwrite"]),
        (_another_hold_out, {"resume": True}, ["held-out samples", "`cache`"]),
        (_another_seed, {"resume": True}, ["run.json", "was edited"]),
        *((_damaged_record(name), {"resume": True}, ["run.json"]) for name in _damages()),
    ],
)
def test_a_run_that_is_refused_is_not_touched(change, options, words, stopped, arguments, refused):
    change(stopped)
    before = content(stopped)
    refused(arguments(stopped, **options), *words)
    assert content(stopped) == before


@pytest.mark.slow
def test_the_last_good_checkpoint_stays_until_the_next_is_there(run, tmp_path, monkeypatch):
    seen = []
    place = module.place_checkpoint

    def looked_at(scratch, out, step, *args):
        seen.append((step, [at for at, path in module.checkpoints(out) if verify(path) is None]))
        place(scratch, out, step, *args)

    monkeypatch.setattr("fastplm.run.trainer.place_checkpoint", looked_at)
    out = tmp_path / "out"
    run(out, steps=4, save_every=1)
    assert seen == [(1, []), (2, [1]), (3, [1, 2]), (4, [2, 3])]
    assert [at for at, _ in module.checkpoints(out)] == [3, 4]


def _made(folder):
    """A folder with a file."""
    folder.mkdir()
    (folder / "weights").write_text("1")
    return folder


def test_later_checkpoints_go_when_an_earlier_one_is_placed(tmp_path):
    for step in (2, 4, 8):
        (tmp_path / f"checkpoint-{step}").mkdir()
    module.place_checkpoint(_made(tmp_path / "scratch"), tmp_path, 6, keep=2)
    assert [step for step, _ in module.checkpoints(tmp_path)] == [4, 6]
    assert verify(tmp_path / "checkpoint-6", step=6) is None


def test_a_damaged_tokenizer_is_written_again(stopped, bert, run):
    shutil.rmtree(stopped / "tokenizer")
    run(stopped, resume=True)
    assert content(stopped / "tokenizer") == content(bert / "tokenizer")


# --- a disk that is full --------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        "torch.save",
        "transformers.modeling_utils.safe_save_file",
        "transformers.trainer_callback.TrainerState.save_to_json",
        "fastplm.data._folder.atomic_write",
    ],
)
def test_a_full_disk(target, bert, arguments, run, tmp_path, monkeypatch, refused, curve):
    out = tmp_path / "out"
    place = module.place_checkpoint

    def then_full(*args):
        place(*args)
        monkeypatch.setattr(target, full)

    monkeypatch.setattr("fastplm.run.trainer.place_checkpoint", then_full)
    line = refused(arguments(out), str(out), "No space left on device", "--resume")
    assert "Make room" in line
    assert not (out / ".incomplete").exists()
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-2"]
    assert last_checkpoint(out) == out / "checkpoint-2"
    monkeypatch.undo()
    if target != "torch.save":  # once is enough
        return
    run(out, resume=True)
    assert curve(out) == curve(bert)


def test_a_lost_process_is_no_full_disk(tmp_path):
    """A checkpoint waits for all processes while it is written."""
    error = RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]")
    with pytest.raises(RuntimeError, match="gloo") as raised, writing("pretrain", tmp_path):
        raise error
    assert raised.value is error
    with pytest.raises(DataError, match="cannot be written"), writing("pretrain", tmp_path):
        raise RuntimeError("PytorchStreamWriter failed")


def test_a_file_in_the_place_of_a_folder(tmp_path):
    (tmp_path / "model").write_text("")
    with pytest.raises(DataError, match="expected nothing in the way, which .*model is. Move it"):
        with writing("pretrain", tmp_path):
            (tmp_path / "model").mkdir()


# --- a training that diverges ---------------------------------------------------------------------


def test_divergence(arguments, tmp_path, refused):
    out = tmp_path / "out"
    argv = arguments(out, lr=1e30, warmup=3, steps=30, log_every=100, save_every=2)
    line = refused(argv, "diverged", "lower learning rate", "1e+30", code=3)
    step = int(line.split("at step ")[1].split()[0])
    last = last_checkpoint(out)
    saved = int(last.name.removeprefix("checkpoint-"))
    assert saved < step <= saved + 2 and f"{last} is the last good state" in line
    weights = transformers.AutoModelForPreTraining.from_pretrained(last).state_dict()
    assert all(value.isfinite().all() for value in weights.values())
    assert not (out / "model").exists() and not (out / "metrics.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", ["the loss", "the norm of the gradient"])
def test_the_step_that_diverged_is_the_last(spoilt, arguments, tmp_path, monkeypatch, refused):
    """The CPU notices it in that step, even if the next line of the log is far."""
    from transformers import Trainer

    step, steps = Trainer.training_step, []

    def spoiled(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        steps.append(self.state.global_step + 1)
        if steps[-1] == 5 and spoilt == "the loss":
            return loss * math.nan
        if steps[-1] == 5:
            next(self.model.parameters()).grad.view(-1)[0] = math.inf
        return loss

    monkeypatch.setattr(Trainer, "training_step", spoiled)
    argv = arguments(tmp_path / "out", steps=9, log_every=100, save_every=8)
    refused(argv, f"at step 5 {spoilt} is not finite", "No checkpoint", code=3)
    assert steps == [1, 2, 3, 4, 5]


def test_the_check_does_not_wait_for_a_gpu():
    """The number copied before is checked, and copied again when its copy has arrived."""
    check, arrived = FiniteCheck(torch.device("cpu")), False
    check._on_gpu, check._copy = True, check.steps.clone()
    check._copied = SimpleNamespace(query=lambda: arrived, record=lambda: None)
    for step, value in ((3, 1.0), (4, math.nan), (5, 2.0), (6, math.inf)):
        check.add("the loss", torch.tensor(value), step)
    assert check.known().tolist() == [check.NEVER] * 2
    arrived = True
    assert check.known().tolist() == [check.NEVER] * 2
    assert check.known().tolist() == [4, check.NEVER]


def test_weights_that_are_not_finite_are_not_saved(arguments, tmp_path, monkeypatch, refused):
    step = torch.optim.AdamW.step

    def spoiled(self, closure=None):
        step(self, closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].view(-1)[0] = math.inf

    monkeypatch.setattr(torch.optim.AdamW, "step", spoiled)
    argv = arguments(tmp_path / "out", steps=1)
    refused(argv, "at step 1 a weight is not finite", code=3)
    assert not list((tmp_path / "out").glob("*/model.safetensors"))


def test_divergence_of_a_seed(labelled, tmp_path, refused):
    out = tmp_path / "out"
    argv = labelled(out, learning_rate=1e38, warmup=0, steps=6, log_every=2)
    refused(argv, "finetune: at step ", "diverged", "seed 0", code=3)
    assert not (out / "seed-0" / "model").exists() and not (out / "metrics.json").exists()


# --- resuming -------------------------------------------------------------------------------------


def test_a_finished_run_stays_as_it_is(copied, arguments, capsys):
    before = content(copied)
    assert main(arguments(copied, resume=True)) == 0
    assert content(copied) == before
    shown = capsys.readouterr()
    assert "is finished, all 6 steps of it: nothing was changed" in shown.err
    assert "tokens/s" in shown.out


@pytest.mark.slow
def test_what_a_finished_run_wrote_is_written_again(copied, bert, run, capsys):
    _damages()["flipped"](copied / "model" / "model.safetensors")
    run(copied, resume=True)
    shown = capsys.readouterr().err
    assert "is written again: model/model.safetensors has other content" in shown
    again, first = content(copied / "model"), content(bert / "model")
    cards = [files.pop("README.md").decode() for files in (again, first)]  # which name the folder
    assert again == first and "written by fastplm" in cards[0]
    assert verify(copied) is None


@pytest.mark.slow
def test_figures_are_those_of_all_steps(stopped, bert, run):
    shutil.rmtree(stopped / "checkpoint-6")
    metrics = run(stopped, resume=True)
    assert metrics["train_seconds"] == sum(entry["seconds"] for entry in metrics["history"])
    assert len(metrics["history"]) == 6
    before = json.loads((bert / "metrics.json").read_text())["history"]
    assert metrics["history"][:4] == before[:4]  # also their seconds
    tokens = sum(entry["seconds"] * entry["tokens_per_second"] for entry in metrics["history"])
    # The step counts all tokens of its samples, so both runs have seen the same number.
    assert round(tokens) == round(sum(e["seconds"] * e["tokens_per_second"] for e in before))


@pytest.mark.slow
def test_a_checkpoint_between_two_lines_of_the_log(run, tmp_path, curve):
    out, options = tmp_path / "out", {"steps": 8, "log_every": 4, "save_every": 6}
    run(out, **options)
    whole = curve(out)
    assert [entry["step"] for entry in whole] == [1, 4, 6, 8]
    shutil.rmtree(out / "checkpoint-8")
    (out / "manifest.json").unlink()
    run(out, resume=True, **options)
    assert curve(out) == whole


@pytest.mark.slow
def test_more_steps(copied, run, arguments, tmp_path, capsys, refused):
    metrics = run(copied, resume=True, steps=9)
    assert "now 9 steps long instead of 6: from step 7 on" in capsys.readouterr().err
    assert [entry["step"] for entry in metrics["history"]] == list(range(1, 10))
    # From the first new step on the rate is on a line from 1e-3 at step 1 to 0 after step 9,
    # without warm-up.
    rates = [entry["learning_rate"] for entry in metrics["history"]]
    assert rates[6:] == pytest.approx([1e-3 * (10 - step) / 9 for step in (7, 8, 9)], abs=1e-12)
    assert read_record("pretrain", copied)["steps"] == 9
    line = refused(arguments(copied, resume=True, steps=8), "`steps` got 8", "9 or more")
    assert "the steps that are done" in line


def test_another_corpus(copied, arguments, corpus, tmp_path, refused):
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(["The river. The house. A train."] * 40))
    argv = arguments(copied, resume=True, corpus=other)
    line = refused(argv, str(other), str(corpus), "150 documents")
    assert "tokens-" not in line  # no name with a hash


@pytest.mark.slow
def test_a_corpus_that_has_changed(run, arguments, corpus, tmp_path, refused):
    mine, out = tmp_path / "mine.txt", tmp_path / "out"
    shutil.copy(corpus, mine)
    run(out, corpus=mine, steps=2)
    mine.write_text(mine.read_text() + " One word more.")
    refused(arguments(out, corpus=mine, resume=True), "text has changed since")


@pytest.mark.slow
def test_a_damaged_cache_holds_out_the_same(run, tmp_path, capsys, curve):
    cache = tmp_path / "cache"
    first = run(tmp_path / "first", cache=cache)
    damaged = sorted(cache.rglob("chunks.bin"))
    for path in damaged:
        path.write_bytes(path.read_bytes()[:-8])
    capsys.readouterr()
    second = run(tmp_path / "second", cache=cache)
    assert second["held_out"] == first["held_out"] and curve(second) == curve(first)
    said = [line for line in capsys.readouterr().err.splitlines() if "is damaged" in line]
    assert len(said) == len(damaged) == 2


# --- fine-tuning ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_damaged_seed_is_trained_again(labelled, tmp_path, capsys, refused):
    out = tmp_path / "out"
    assert main(labelled(out)) == 0
    first = content(out / "seed-0")
    assert main(labelled(out, "--resume", seeds=2)) == 0  # a further seed is added
    assert content(out / "seed-0") == first
    whole = json.loads((out / "metrics.json").read_text())
    assert len(whole["seeds"]) == 2
    _damages()["cut"](out / "seed-1" / "result.json")
    before = content(out / "seed-0")
    assert main(labelled(out, "--resume", seeds=2)) == 0
    assert "seed-1 is not complete: result.json has " in capsys.readouterr().err
    assert (out / "seed-1.old-1").is_dir() and content(out / "seed-0") == before
    again = json.loads((out / "metrics.json").read_text())
    assert again["scores"] == whole["scores"]
    assert again["seeds"][1]["loss"] == whole["seeds"][1]["loss"]
    refused(labelled(out, "--resume", seeds=2, learning_rate=1), "got 1.0; expected 0.0001,")
    rate = labelled(out, "--resume", seeds=2, learning_rate=1e-4)  # the default, which it used
    before = content(out)
    assert main(rate) == 0
    now = content(out)
    assert now.pop("settings.yaml") != before.pop("settings.yaml")  # has the last settings given
    assert now == before


@pytest.mark.parametrize("damaged", ["empty", "cut", "flipped"])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_model(name, damaged, bert, labelled, tmp_path, refused):
    model = Path(shutil.copytree(bert / "model", tmp_path / "model"))
    if damaged == "flipped":
        (model / name).write_bytes(b"\0" + (model / name).read_bytes()[1:])
    else:
        _damages()[damaged](model / name)
    refused(labelled(tmp_path / "out", model=model), str(model))


@pytest.mark.slow
def test_the_settings_of_a_finetuning_go_on(labelled, tmp_path, refused):
    out = tmp_path / "out"
    assert main(labelled(out)) == 0
    refused(labelled(out), "holds a run", "--resume")
    refused(labelled(out, "--resume", steps=3), "`steps` got 3; expected 2, as in", "another --out")
    (out / "run.json").write_text("{}")
    refused(labelled(out, "--resume"), "run.json")


def test_an_error_of_the_program_keeps_its_traceback(arguments, tmp_path, monkeypatch):
    monkeypatch.setattr("fastplm.pretrain.run.make_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(arguments(tmp_path / "out"))
    monkeypatch.setattr("fastplm.pretrain.run.make_model", full)
    assert main(arguments(tmp_path / "two")) == 2
    monkeypatch.setenv("FASTPLM_TRACEBACK", "1")
    with pytest.raises(OSError, match="No space"):
        main(arguments(tmp_path / "three"))


def test_manifest(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_text("1")
    (tmp_path / "beside").write_text("2")
    write_manifest(tmp_path, ["inner"], step=3)
    assert verify(tmp_path, step=3) is None and "step 3" in verify(tmp_path, step=4)
    (tmp_path / "beside").write_text("3")
    assert verify(tmp_path) is None
    (tmp_path / "inner" / "file").write_text("4")
    assert verify(tmp_path) == "inner/file has other contents"
