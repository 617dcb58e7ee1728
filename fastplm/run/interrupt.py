"""Ctrl-C and SIGTERM: a training writes a checkpoint, and a command says how to continue."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fastplm.data._folder import first_process, say
from fastplm.run.folder import RECORD, can_resume

#: What ends a command: of Ctrl-C, and of ``kill``, a batch system or a container that stops.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds in which Python ends by itself, unless a library is busy and ignores signals.
_PATIENCE = 2.0
# By how many seconds the clock of a file system may be behind.
_GRAIN = 0.1
#: Seconds after which a training writes a checkpoint, whatever --save-every says.
_SAVE_SECONDS = 600.0


class _Stop:
    """Whether a training would end after its step, and the signal that asked it to, or 0."""

    heard = False
    asked = 0


@contextmanager
def interruptible(words: Sequence[str], out: str | Path, **asked: bool) -> Iterator[None]:
    """In this block a signal prints how to continue, and ends the process even if it is busy.

    Args:
        words: of the command line.
        out: what it writes.
        asked: of ``resume`` and ``overwrite`` those that the command has: whether it was given.

    Raises:
        KeyboardInterrupt: with the number of the signal.
    """
    left, began = threading.Event(), time.time()

    def told() -> None:
        say(_how_to_go_on(words, Path(out), began, asked))

    try:
        with _watched(left, told):
            yield
    except KeyboardInterrupt:
        told()
        raise


def _interrupt(number: int, frame: Any) -> None:
    """What Python calls at a signal."""
    if _Stop.heard and not _Stop.asked:
        _Stop.asked = number
        if first_process():  # not by print, which may be what was interrupted
            line = b"\nfastplm: interrupted; a checkpoint is written after this step. "
            with suppress(OSError):  # if nobody reads it
                os.write(2, line + b"Another signal (Ctrl-C) ends it at once.\n")
        return
    raise KeyboardInterrupt(number)


@contextmanager
def _watched(left: threading.Event, told: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        waits = False  # for the checkpoint of a training
        while arrived := os.read(reader, 1):
            if arrived[0] not in _SIGNALS:
                continue
            if _Stop.heard and not waits:
                waits = True
            elif not left.wait(_PATIENCE):
                told()
                os._exit(128 + arrived[0])
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    try:
        with handled(_interrupt):
            yield
    finally:
        left.set()
        signal.set_wakeup_fd(wakeup)
        os.close(writer)  # the thread reads the end


@contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """In this block ``handler`` is what Python calls at a signal that ends a command.

    One that is ignored stays so: a shell starts the background jobs of a script (``command &``)
    with SIGINT ignored, as Ctrl-C is not meant for them.
    """
    asked = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in asked}
    try:
        yield
    finally:
        for number, own in before.items():
            with suppress(TypeError):  # one that was not set by Python
                signal.signal(number, own)


@contextmanager
def checkpoint_on_signal(trainer: Any) -> Iterator[None]:
    """In this block a signal ends a training after its step, with a checkpoint; so does time.

    Several processes would each end after another step, so there a signal ends them at once.

    Transformers' own ``enable_jit_checkpoint`` is not used: it knows SIGTERM alone, and it may save
    between a backward and its update, from where a resumed run draws other random numbers.

    Raises:
        KeyboardInterrupt: a signal has ended the training, that of this number.
    """
    from transformers import TrainerCallback

    saved = time.monotonic()

    class SaveAndStop(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            nonlocal saved
            saved = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if _Stop.asked:
                control.should_training_stop = True
            if _Stop.asked or time.monotonic() - saved > _SAVE_SECONDS:
                control.should_save = control.should_log = True

    if trainer.args.world_size > 1:
        yield
        return
    # The first, as what is logged depends on whether a checkpoint is written.
    trainer.callback_handler.callbacks.insert(0, SaveAndStop())
    _Stop.heard, _Stop.asked = True, 0
    try:
        yield
    finally:
        _Stop.heard = False
    if _Stop.asked:
        raise KeyboardInterrupt(_Stop.asked)


def _how_to_go_on(words: Sequence[str], out: Path, began: float, asked: Mapping[str, bool]) -> str:
    given = [f"--{name}" for name, value in asked.items() if value]
    # argparse takes the beginning of an option for it, if it has but one such option.
    taken = {name[:length] for name in given for length in range(3, len(name) + 1)}
    again = [word for word in words if word not in taken]
    resumable = "resume" in asked
    record = out / RECORD if resumable else out
    # With --overwrite the folder may still be that of the run before.
    own = asked.get("resume") or (record.exists() and record.stat().st_mtime > began - _GRAIN)
    option = "--overwrite" if "overwrite" in asked else ""
    if not own:
        begun = "nothing was written. Start again"
        option = option if option in given else ""
    elif not resumable:
        begun = f"what was made is in {_quoted(str(out))}. Start again"
    elif can_resume(out) or words[:1] == ["finetune"]:
        # A run of several seeds continues after its last finished one, others at a checkpoint.
        begun, option = f"what was made so far is in {_quoted(str(out))}. Continue", "--resume"
    else:
        begun = "there is no checkpoint yet. Start again"
    if os.environ.get("WORLD_SIZE"):
        changes = [f"without {name}" for name in given if name != option]
        changes += [f"with {option}"] if option and option not in given else []
        command = f"the same command {' and '.join(changes)}".rstrip()
    else:
        command = " ".join([_program(), *map(_quoted, [*again, *option.split()])])
    return f"fastplm: interrupted; {begun} with: {command}"


def _program() -> str:
    """What starts the command line, as it was started."""
    script = sys.argv[0]
    if Path(script) == Path(__file__).parents[1] / "__main__.py":
        return f"{_quoted(sys.executable)} -m fastplm"
    # One that the shell does not find by its name was called by its path.
    unknown = os.path.basename(script) == "fastplm" and shutil.which("fastplm") != script
    return _quoted(script) if unknown else "fastplm"


def _quoted(word: str) -> str:
    """A word for a shell; one that stderr cannot show, or no reader see, in octal digits."""
    with suppress(UnicodeEncodeError):
        word.encode(sys.stderr.encoding or "ascii")
        if word.isprintable():
            return shlex.quote(word)
    return "$'" + "".join(f"\\{byte:03o}" for byte in os.fsencode(word)) + "'"
