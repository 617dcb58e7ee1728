"""Embed the lines of many text files on several workers with Ray, and go on where it ended.

    python examples/embed_with_ray.py CHECKPOINT TEXTS VECTORS [WORKERS]

TEXTS/NAME.txt gives VECTORS/NAME.npy, fp32 [lines, width]. A file gets its name when it is whole,
and a file that is there is not computed again: after a crash, run the same command. Each worker
loads the model once, and computes on one core. On a cluster all nodes must see both folders.
"""

from __future__ import annotations

import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import ray

from fastplm.inference.columns import TextEmbedder


class FileEmbedder:
    """Writes the vectors of a file's lines."""

    def __init__(self, checkpoint: str, vectors: str) -> None:
        self.embedder, self.vectors = TextEmbedder(checkpoint), Path(vectors)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        path = Path(row["path"])
        with path.open(encoding="utf-8", newline="\n") as file:
            texts = [line.rstrip("\r\n") for line in file]
        part = self.vectors / f".{path.stem}.{uuid.uuid4().hex}.part"
        with part.open("wb") as out:
            np.save(out, self.embedder({"text": texts})["embedding"])
        part.replace(self.vectors / f"{path.stem}.npy")
        return {"name": path.stem, "texts": len(texts)}


def main() -> None:
    checkpoint, texts, vectors, *workers = sys.argv[1:]
    Path(vectors).mkdir(parents=True, exist_ok=True)
    paths = sorted(Path(texts).glob("*.txt"))
    done = {path.stem for path in Path(vectors).glob("*.npy")}
    rows = [{"path": str(path.resolve())} for path in paths if path.stem not in done]
    print(f"{len(rows)} of {len(paths)} files are to be embedded", flush=True)
    if not rows:
        return
    start, count = time.monotonic(), 0
    found = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        FileEmbedder,
        fn_constructor_args=(str(Path(checkpoint).resolve()), str(Path(vectors).resolve())),
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=int(workers[0]) if workers else 2),
    )
    for row in found.iter_rows():
        count += row["texts"]
        seconds = time.monotonic() - start
        print(f"{row['name']}: {count:,} texts in {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
