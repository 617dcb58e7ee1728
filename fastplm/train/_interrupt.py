"""Ctrl-C ends a run at once and prints how to continue it."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fastplm.data._folder import say
from fastplm.train._run_folder import RECORD, checkpoints

#: The exit code of a process that SIGINT ended.
INTERRUPTED = 128 + signal.SIGINT
# Seconds in which Python ends by itself, unless a library is busy and ignores signals.
_PATIENCE = 2.0
# By how many seconds the clock of a file system may be behind.
_GRAIN = 0.1


@contextmanager
def interruptible(words: Sequence[str], out: str | Path) -> Iterator[None]:
    """In this block Ctrl-C prints how to continue, and ends the process even if it is busy."""
    left, began = threading.Event(), time.time()
    try:
        with _watched(left, words, out, began):
            yield
    except KeyboardInterrupt:
        say(_how_to_go_on(words, Path(out), began))
        raise


@contextmanager
def _watched(
    left: threading.Event, words: Sequence[str], out: str | Path, began: float
) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread gets signals
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        while arrived := os.read(reader, 1):
            if arrived[0] == signal.SIGINT and not left.wait(_PATIENCE):
                say(_how_to_go_on(words, Path(out), began))
                os._exit(INTERRUPTED)
        os.close(reader)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(before)
        os.close(writer)  # the thread reads the end


def _how_to_go_on(words: Sequence[str], out: Path, began: float) -> str:
    again = [word for word in words if word not in ("--overwrite", "--resume")]
    record = out / RECORD
    # With --overwrite the folder may still be that of the run before.
    own = "--resume" in words or (record.is_file() and record.stat().st_mtime > began - _GRAIN)
    if not own:
        begun, option = "nothing was written. Start again", "--overwrite"
        option *= option in words
    elif checkpoints(out) or words[:1] == ["finetune"]:
        # A fine-tuning continues after its last finished seed, a pre-training at a checkpoint.
        begun, option = f"what was made so far is in {out}. Continue", "--resume"
    else:
        begun, option = "there is no checkpoint yet. Start again", "--overwrite"
    if "WORLD_SIZE" in os.environ:
        command = "the same command" + (f" and {option}" if option not in words else "")
    else:
        command = f"fastplm {shlex.join([*again, *option.split()])}"
    return f"fastplm: interrupted; {begun} with: {command}"
