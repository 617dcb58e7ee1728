"""The folder of a run: one process writes to it, and what is in it is complete or not there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from safetensors import SafetensorError

from fastplm.data._folder import (
    CARD,
    MANIFEST,
    acquire_lock,
    first_process,
    locked,
    release_lock,
    say,
    verify,
    write_json,
    write_manifest,
)
from fastplm.data._output import check_apart, make_room
from fastplm.errors import (
    DataError,
    DivergenceError,
    FastplmError,
    check,
    fail,
    first_line,
    message,
)

#: The file that locks a run's folder, and the one that describes the run.
LOCK = "run.lock"
RECORD = "run.json"
_T = TypeVar("_T")


# --- whose folder it is ---------------------------------------------------------------------------


@contextmanager
def claimed(
    where: str,
    out: Path,
    *,
    resume: bool,
    overwrite: bool | None,
    own: Iterable[Path] = (),
    inputs: Mapping[str, Sequence[str | Path]] | None = None,
    resumable: bool = True,
) -> Iterator[Callable[[], None]]:
    """Lock a folder for this run; it must be empty or new unless the run is resumed.

    Gives a function to be called before the first write: with ``overwrite`` it moves what the
    folder holds to ``<out>.old-<n>``, and the lock with it. So a run that fails in its settings,
    its data or its model moves nothing. Under torchrun only the first process does any of this.

    Args:
        where: the command.
        out: the folder, or a link to it.
        resume: it holds this run, which is continued.
        overwrite: whether what it holds is moved; None for a command without this option.
        own: folders of this run that may be in it and stay, such as a cache.
        inputs: what the run reads, by the settings.
        resumable: whether such a run can be resumed.

    Raises:
        DataError: the folder holds something, no run to resume, or cannot be written; it is read,
            or is around what is read.
        ArgumentValueError: both ``resume`` and ``overwrite``.
    """
    got, fix = "True together with resume", "Leave one of the two options out."
    check(not (resume and overwrite), where, "overwrite", got, "one of the two", fix)
    if not first_process():
        yield lambda: None
        return
    check_apart(where, out, inputs or {})
    if resume and not (out / RECORD).is_file():
        if checkpoints(out):
            read_record(where, out)
        _refuse_to_resume(where, f"{out}, which holds no run, and no checkpoint")
    real = out.resolve()  # of a link the folder is moved, and the link stays
    new = not real.exists()
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        with locked(real.parent):
            real.mkdir(exist_ok=True)
            handle = _lock(where, out)
    except OSError as error:
        what = "a file" if out.is_file() else f"which cannot be written ({error.strerror})"
        _refuse_output(where, f"{out}, {what}", "a folder", "Choose another --out.")
    stay = {path.name for path in own if path.resolve().parent == real}
    there: list[str] = []

    def begin() -> None:
        nonlocal handle
        if not there:
            return
        there.clear()
        with locked(real.parent):
            old = make_room(out)
            real.mkdir()
            for name in stay:
                if (old / name).exists():
                    os.rename(old / name, real / name)
            moved, handle = handle, _lock(where, out)
        release_lock(old / LOCK, moved)

    try:
        if not resume:
            held = sorted(path.name for path in real.iterdir() if path.name not in {LOCK, *stay})
            if held and not overwrite:
                _refuse_what_is_there(where, out, held, overwrite, resumable)
            if held:
                here = Path.cwd()
                if here == real or real in here.parents:
                    expected = "with --overwrite a folder that can be moved"
                    fix = "Choose another --out, or call the command in another folder."
                    _refuse_output(
                        where, f"{out}, the current folder or one around it", expected, fix
                    )
            there = held
        yield begin
    finally:
        release_lock(real / LOCK, handle)
        if new:
            with suppress(OSError):  # unless there is something in it
                real.rmdir()


def _refuse_what_is_there(
    where: str, out: Path, there: list[str], overwrite: bool | None, resumable: bool
) -> NoReturn:
    what = there[0] + (f" and {len(there) - 1} more" if there[1:] else "")
    instead = ""
    if RECORD in there and not resumable:
        what = "a run"
    elif RECORD in there and can_resume(out):
        what, instead = "a run", ", continue that run with --resume"
    elif RECORD in there:
        what = "a run that has no checkpoint yet"
    if overwrite is not None:
        instead += ", or move the folder aside with --overwrite"
    fix = f"Choose another --out{instead}."
    _refuse_output(where, f"{out}, which holds {what}", "an empty or new folder", fix)


def _lock(where: str, out: Path) -> int:
    def refuse(holder: str) -> NoReturn:
        fix = "Choose another --out, or wait for it to end."
        got = f"{out}, where process {holder} writes"
        _refuse_output(where, got, "a folder that no other process uses", fix)

    return acquire_lock(out / LOCK, refuse)


def _refuse_output(where: str, got: str, expected: str, fix: str) -> NoReturn:
    fail(where, "out", got, expected, fix, DataError)


def _refuse_to_resume(where: str, got: str, fix: str = "") -> NoReturn:
    fix = fix or "Check --out, or start afresh without --resume."
    fail(where, "resume", got, "the output folder of an interrupted run", fix, DataError)


# --- what is complete -----------------------------------------------------------------------------


def step_of(checkpoint: Path) -> int:
    """The steps that were done at a checkpoint, by its name; -1 for the name of another folder."""
    step = checkpoint.name.removeprefix("checkpoint-")
    return int(step) if step.isdecimal() else -1


def checkpoints(out: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all checkpoints of a run, complete or not, in order."""
    found = ((step_of(path), path) for path in out.glob("checkpoint-*") if path.is_dir())
    return sorted(each for each in found if each[0] >= 0)


def can_resume(out: Path) -> bool:
    """Whether a run has something to continue from: a checkpoint, or a seed of a fine-tuning."""
    seeds = (*out.glob("seed-*"), *out.glob("samples-*/seed-*"), *out.glob("rate-*/seed-*"))
    return bool(checkpoints(out)) or bool(seeds) or (out / MANIFEST).is_file()


def last_checkpoint(out: Path, report: Callable[[str], object] = lambda _: None) -> Path | None:
    """The newest checkpoint in a run's folder that is complete, if any.

    Args:
        report: is called with a line for each newer one that is not complete.
    """
    for step, path in reversed(checkpoints(out)):
        reason = verify(path, step=step)
        if reason is None:
            return path
        report(f"{path} is not complete and is passed over: {reason}.")
    return None


def checkpoint_to_resume(where: str, out: Path) -> Path:
    """``last_checkpoint``, which there must be.

    Raises:
        DataError: there is none, or none is complete.
    """
    passed: list[str] = []
    checkpoint = last_checkpoint(out, passed.append)
    fix = "The steps made are lost: start again with --overwrite, which moves the folder aside."
    if checkpoint is None and passed:
        reasons = " ".join(passed)
        _refuse_to_resume(where, f"{out}, none of whose checkpoints is complete. {reasons}", fix)
    if checkpoint is None:
        got = f"{out}, which holds no checkpoint: the run ended before its first one"
        _refuse_to_resume(where, got, fix)
    for line in passed:
        say(line)
    return checkpoint


def place_checkpoint(
    scratch: Path, out: Path, step: int, keep: int | None, milestones: Collection[int] = ()
) -> None:
    """Write a checkpoint's manifest, and rename it; then remove all but the newest ``keep``.

    None keeps all. The checkpoints of the ``milestones`` stay, and do not count.

    Checkpoints of later steps, which were not complete when the run was resumed, are removed too.
    """
    final = out / f"checkpoint-{step}"
    write_manifest(scratch, step=step)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(scratch, final)
    _sync_folder(out)
    before = [path for at, path in checkpoints(out) if at < step and at not in milestones]
    after = [path for at, path in checkpoints(out) if at > step]
    old = [] if keep is None else before[: max(0, len(before) + 1 - keep)]
    for path in (*old, *after):
        shutil.rmtree(path, ignore_errors=True)


def save_models(
    out: Path,
    models: Mapping[str, Any],
    tokenizers: Mapping[str, Any],
    states: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Save models, each with the tokenizers, in folders that are there completely or not at all.

    Args:
        tokenizers: by the folder inside that of a model; "" is that of the model itself.
        states: the weights of the models that have not all of them in this process.
    """
    states = states or {}
    for name, model in models.items():
        scratch = out / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        model.save_pretrained(scratch, **{"state_dict": states[name]} if name in states else {})
        for inside, tokenizer in tokenizers.items():
            tokenizer.save_pretrained(scratch / inside)
        if (out / name / CARD).is_file():  # of the user, perhaps: ``write_card`` knows
            shutil.copyfile(out / name / CARD, scratch / CARD)
        shutil.rmtree(out / name, ignore_errors=True)
        os.rename(scratch, out / name)


@contextmanager
def ending(what: str, models: Collection[Path], resumable: bool = True) -> Iterator[None]:
    """In this block a run does what is left after its last step; a line names what of it failed.

    What has diverged is no model: then those that were saved before are removed.

    Args:
        what: what is done, for the line.
        models: the folders or files that were saved before.
        resumable: whether such a run can be resumed.
    """
    try:
        yield
    except DivergenceError:
        for path in models if first_process() else ():
            shutil.rmtree(path, ignore_errors=True)
        raise
    except Exception as error:
        line = f"fastplm: after the last step, {what} failed"
        if not isinstance(error, FastplmError):  # which says more than its first line
            line += f" ({type(error).__name__}: {first_line(error)})"
        line += "."
        if models:
            line += f" The training is saved in {' and '.join(map(str, models))}."
        if resumable:
            line += " The same command with --resume does the rest, without training."
        say(line)
        raise


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # not every system can
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# --- what the run is ------------------------------------------------------------------------------


def write_hashed(path: Path, content: dict[str, Any]) -> None:
    """Write a dict as JSON, with a hash of it."""
    write_json(path, {**content, "blake2b": _content_hash(content)})


def read_hashed(path: Path) -> dict[str, Any] | None:
    """What ``write_hashed`` wrote; None if it is missing, damaged or was edited."""
    try:
        content = json.loads(path.read_text("utf-8"))
        return content if content.pop("blake2b") == _content_hash(content) else None
    except (OSError, ValueError, RecursionError, TypeError, AttributeError, KeyError):
        return None


def _content_hash(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def read_record(where: str, out: Path) -> dict[str, Any]:
    """What a run is, as ``run.json`` says.

    Raises:
        DataError: it is missing, damaged or was edited.
    """
    run = read_hashed(out / RECORD)
    if run is None:
        fix = (
            "What the run was cannot be known, so it is not continued; its checkpoints are as they "
            "were. Put the file back, or start again with --overwrite."
        )
        got = f"{out / RECORD}, which is missing, is damaged or was edited"
        _refuse_to_resume(where, got, fix)
    return run


_KIND = ("arch", "recipe", "system", "task")


def check_same(where: str, run: dict[str, Any], before: dict[str, Any]) -> None:
    """Check that a resumed run has the settings with which it began.

    Raises:
        ArgumentValueError: with the first setting that differs.
    """
    # The kind of the run is compared first: other settings follow from it.
    for name, value in sorted(run.items(), key=lambda item: item[0] not in _KIND):
        expected = f"{before.get(name)}, as in the run that is resumed"
        fix = "Give the same arguments, or another --out."
        check(before.get(name) == value, where, name, value, expected, fix)


# --- errors of libraries --------------------------------------------------------------------------


#: A file where a folder is to be, and the other way round.
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY)


def is_of_a_connection(error: Exception) -> bool:
    """Whether an error is about the connection to another process of the training."""
    return any(word in str(error) for word in ("gloo", "Gloo", "NCCL"))


@contextmanager
def writing(
    where: str,
    path: Path,
    fix: str = "Make room, then go on from the last checkpoint with --resume.",
) -> Iterator[None]:
    """Turn what libraries raise when a file cannot be written into a DataError of one line."""
    try:
        yield
    except FastplmError:
        raise
    # PyTorch's writer raises RuntimeError, that of safetensors its own.
    except (OSError, RuntimeError, SafetensorError) as error:
        if is_of_a_connection(error):
            raise  # another process of the training has ended, and the disk is well
        expected = "a disk with room for it"
        if isinstance(error, OSError) and error.errno in _IN_THE_WAY:
            expected = f"nothing in the way, which {error.filename or 'something'} is"
            fix = "Move it away, then go on from the last checkpoint with --resume."
        got = f"{path}, which cannot be written ({_first_line(error)})"
        raise DataError(message(where, "out", got, expected, fix)) from error


def loaded(
    where: str, argument: str, path: str | Path, expected: str, load: Callable[[], _T]
) -> _T:
    """Call ``load``, which reads a file of the user; any error of a library becomes a DataError."""
    try:
        return load()
    except FastplmError:
        raise
    except Exception as error:
        # Libraries would look for a model of this name elsewhere, and say so.
        reason = _first_line(error) if os.path.exists(path) else "no such file or folder"
        got, fix = f"{path} ({reason})", "Check the path, and whether the files are complete."
        raise DataError(message(where, argument, got, expected, fix)) from error


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "inline_container" in str(error):  # all that PyTorch's writer says
        return "PyTorch could not write a file to its end: the disk may be full"
    return first_line(error)
