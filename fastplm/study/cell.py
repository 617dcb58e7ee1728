"""What the engine runs for a cell: its command, and then its figures in ``done.json``.

``python -m fastplm.study.cell FOLDER PLAN``. A cell that is finished is left alone, one that was
killed continues with the command's own ``--resume``, and of one that another process runs the end
is awaited.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastplm.data._folder import lock, say, unlock
from fastplm.errors import DivergenceError
from fastplm.run.folder import RECORD, can_resume, last_checkpoint, read_hashed, write_hashed
from fastplm.run.interrupt import handled
from fastplm.study.progress import CELL, DONE, LOG, clock, progress, seconds_of

_LOCK = "cell.lock"
#: What a row of accuracies holds beside those of published systems.
_OURS = ("level", "name", "paradigms", "pairs", "ties", "accuracy", "low", "high")
#: The last lines of a log that are shown when a command fails.
_SHOWN = 12
#: Exit codes after Ctrl-C and SIGTERM, heard or not.
_STOPPED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
#: The figures of a training that diverged, and of what would have evaluated it.
_NOTHING: Mapping[str, Any] = {"held_out": {}, "flops": None}


def main(words: Sequence[str]) -> int:
    """Run the cell in a folder, unless it is finished; returns the exit code."""
    folder, plan = (Path(word).resolve() for word in words)
    cell = json.loads((folder / CELL).read_text("utf-8"))
    # The lock ends with this process and the command, whichever lives longer.
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if lock(descriptor) is False:
            say(f"{cell['label']}: another process runs it; its end is awaited.")
            lock(descriptor, wait=True)
        if read_hashed(folder / DONE) is None:
            code = _run(folder, cell, descriptor)
            if code != 0:
                return code
    finally:
        unlock(descriptor)
    done = read_hashed(folder / DONE)
    assert done is not None
    finished, of_all, to_go = progress(plan)
    left = "" if to_go is None or finished == of_all else f"; about {clock(to_go)} to go"
    say(f"[{finished} of {of_all}] {cell['label']}: {clock(seconds_of(done))}{left}")
    return 0


def _run(folder: Path, cell: Mapping[str, Any], descriptor: int) -> int:
    """Run the command of a cell, and write its figures; returns its exit code."""
    before = [read_hashed(folder.parent / key / DONE) or {} for key in cell["needs"]]
    out, command = folder / cell["out"], cell["command"]
    figures: Mapping[str, Any] = _NOTHING
    train_seconds, seconds, processor_seconds = None, 0.0, 0.0
    if not any(each.get("diverged") for each in before):  # there is no model to go on with
        begun = time.perf_counter()
        code, tail = _called(folder, cell, out, descriptor)
        seconds = time.perf_counter() - begun
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_seconds = used.ru_utime + used.ru_stime
        if code in _STOPPED:
            say(f"{cell['label']}: stopped; the same command goes on.")
            return code
        if code == DivergenceError.EXIT_CODE:
            say("\n".join([f"{cell['label']}: it diverged. {folder / LOG} ends:", *tail[-1:]]))
        elif code != 0:
            say("\n".join([f"{cell['label']}: exit code {code}. {folder / LOG} ends:", *tail]))
            return code
        else:
            figures, train_seconds = FIGURES[command](out)
    content = {
        "diverged": figures is _NOTHING,
        **{name: cell[name] for name in ("label", "command", "code")},
        **figures,
        "times": {
            "seconds": seconds,
            "cpu_seconds": processor_seconds,
            "train_seconds": train_seconds,
        },
    }
    write_hashed(folder / DONE, content)
    if command == "finetune":  # no cell reads these models, and there are many
        for model in out.glob("**/seed-*/model"):
            shutil.rmtree(model, ignore_errors=True)
    return 0


def _called(
    folder: Path, cell: Mapping[str, Any], out: Path, descriptor: int
) -> tuple[int, list[str]]:
    """Call the command of a cell; gives its exit code, and the last lines of its log."""
    words = [cell["command"], *cell["words"], "--out", str(out), *_again(cell["command"], out)]
    with (folder / LOG).open("ab") as log:
        log.write(os.fsencode(f"\n$ fastplm {' '.join(words)}\n"))
        log.flush()
        child = subprocess.Popen(
            [sys.executable, "-m", "fastplm", *words],
            cwd=cell["folder"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": str(cell["threads"])},
            pass_fds=(descriptor,),
        )
        code = _awaited(child)
    return code, (folder / LOG).read_text("utf-8", "replace").rstrip().splitlines()[-_SHOWN:]


def _again(command: str, out: Path) -> list[str]:
    """The options by which a command goes on with what an earlier call of it left."""
    if (out / RECORD).is_file() and can_resume(out):
        if command == "finetune" or last_checkpoint(out) is not None:
            return ["--resume"]
    # It was killed before it had anything to keep.
    if out.is_file():
        out.unlink()
    shutil.rmtree(out, ignore_errors=True)
    return []


def _awaited(child: subprocess.Popen) -> int:
    """The exit code of a command; a signal lets it write a checkpoint first."""

    def hand_on(number: int, frame: Any) -> None:
        # Ctrl-C reaches the command by itself, as it is of the same terminal.
        if number == signal.SIGTERM:
            child.send_signal(number)

    with handled(hand_on):
        return child.wait()


# --- figures --------------------------------------------------------------------------------------


def _of_training(out: Path) -> tuple[dict[str, Any], float]:
    from fastplm.pretrain.report import numbers_of

    metrics = json.loads((out / "metrics.json").read_text("utf-8"))
    record = json.loads((out / RECORD).read_text("utf-8"))
    figures = {
        "held_out": numbers_of(metrics.get("held_out", {})),
        "steps": record["steps"],
        **{name: metrics[name] for name in ("flops", "parameters", "vocab_size")},
        "tokenizer": record["tokenizer"],
        **{name: metrics[name] for name in ("versions", "device")},
    }
    return figures, metrics["train_seconds"]


def _of_finetuning(out: Path) -> tuple[dict[str, Any], float]:
    metrics = json.loads((out / "metrics.json").read_text("utf-8"))
    points = [
        {
            "examples": point["train_examples"],
            "scores": {
                name: [each["scores"][name] for each in point["seeds"]] for name in point["scores"]
            },
        }
        for point in metrics.get("curve", [metrics])
    ]
    seconds = sum(each["train_seconds"] for each in metrics["seeds"])
    figures = {"points": points, "chance": metrics["chance"], "versions": metrics["versions"]}
    return figures, seconds


def _of_scoring(out: Path) -> tuple[dict[str, Any], None]:
    content = json.loads(out.read_text("utf-8"))
    if content["metric"] == "minimal-pairs":
        rows = content["accuracies"]
        pairs = {each["name"]: each["accuracy"] for each in rows if each["level"] == "paradigm"}
        overall = next(each for each in rows if each["level"] == "overall")
        others = {name: value for name, value in overall.items() if name not in _OURS}
        return {"pairs": pairs, "scorer": content["scorer"], "published": others}, None
    return {"corpus": content["corpus"]}, None


#: Reads the figures and the seconds of training from what each command wrote.
FIGURES: dict[str, Any] = {
    "pretrain": _of_training,
    "distill": _of_training,
    "finetune": _of_finetuning,
    "score": _of_scoring,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
