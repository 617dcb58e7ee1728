"""Vectors of many short texts: two workers of Ray, killed once, beside one process.

    python benchmarks/ray_data.py --model DIR --texts FILE --work DIR --rows FILE.csv

FILE is cut into texts of four to eight words, so many in each file of --work. Then
``examples/embed_with_ray.py`` runs, is killed (SIGKILL to it and its workers) when half of the
vectors are there, and runs again. One process embeds the same files, with as many threads as there
are workers or with --threads, and the vectors are compared bit for bit. Times have all that a
command does in them: its start, the loading of the model, and of the killed run what it lost. The
texts that are in --work are used.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from fastplm.data._files import lines_of
from harness import append_row, machine_line

EXAMPLE = Path(__file__).parents[1] / "examples/embed_with_ray.py"
FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "ray", "model", "texts", "files"),
    *("variant", "seconds", "texts_per_s", "files_when_killed", "texts_that_differ", "difference"),
)


def write_texts(source: Path, folder: Path, count: int, per_file: int) -> None:
    words = itertools.chain.from_iterable(line.split() for line in lines_of(source))
    sizes = np.random.default_rng(0).integers(4, 9, count).tolist()
    folder.mkdir(parents=True)
    for start in range(0, count, per_file):
        some = sizes[start : start + per_file]
        lines = "".join(" ".join(itertools.islice(words, size)) + "\n" for size in some)
        (folder / f"{start // per_file:06}.txt").write_text(lines, encoding="utf-8")


def run(command: list[str], vectors: Path, until: int | None = None) -> float:
    """The seconds of a command, which is killed when so many files are there."""
    start = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None:
        time.sleep(0.1)
        if until is not None and len(list(vectors.glob("*.npy"))) >= until:
            os.killpg(process.pid, signal.SIGKILL)
    assert until is not None or process.returncode == 0, f"exit status {process.returncode}"
    return time.monotonic() - start


def one_process(model: str, texts: Path, vectors: Path) -> None:
    from fastplm.inference.columns import TextEmbedder

    vectors.mkdir(parents=True, exist_ok=True)
    embedder = TextEmbedder(model)
    for path in sorted(texts.glob("*.txt")):
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        np.save(vectors / f"{path.stem}.npy", embedder({"text": lines})["embedding"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--texts", type=Path, help="text file, plain or compressed")
    parser.add_argument("--work", type=Path, required=True, help="new folder of all results")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that the rows go to")
    parser.add_argument("--name", help="name of the model in the rows")
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--per-file", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, help="of the one process; default the workers")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    texts, ours, theirs = (args.work / name for name in ("texts", "one", "ray"))
    threads = args.threads or args.workers
    if args.one:
        torch.set_num_threads(threads)
        return one_process(args.model, texts, ours)
    if not texts.exists():
        write_texts(args.texts, texts, args.count, args.per_file)
    files = sorted(path.stem for path in texts.glob("*.txt"))
    command = [sys.executable, str(EXAMPLE), args.model, str(texts), str(theirs)]
    command.append(str(args.workers))
    seconds = run(command, theirs, len(files) // 2)
    killed = len(list(theirs.glob("*.npy")))
    seconds += run(command, theirs)
    alone = run([sys.executable, __file__, "--one", *sys.argv[1:]], ours)
    differing, difference, count = 0, 0.0, 0
    for name in files:
        one, ray = (np.load(folder / f"{name}.npy") for folder in (ours, theirs))
        differing += int((one != ray).any(1).sum())
        difference, count = max(difference, float(np.abs(one - ray).max())), count + len(one)
    row = machine_line() | {"ray": importlib.metadata.version("ray"), "texts": count}
    row |= {"model": args.name or Path(args.model).name, "files": len(files)}
    kinds = {f"ray, {args.workers} workers, killed once": seconds}
    kinds[f"one process, threads: {threads}"] = alone
    for variant, time_of in kinds.items():
        row |= {"variant": variant, "seconds": f"{time_of:.1f}"}
        row |= {"texts_per_s": f"{count / time_of:.0f}"}
        with_ray = variant.startswith("ray")
        row["files_when_killed"] = killed if with_ray else ""
        row["texts_that_differ"] = differing if with_ray else ""
        row["difference"] = f"{difference:.1e}" if with_ray else ""
        append_row(args.rows, FIELDS, row)
        print(row)


if __name__ == "__main__":
    main()
