"""BERTScore against the package bert-score.

    python benchmarks/bertscore.py --model DIR --pairs FILE --layer 6

The pairs are real ones, in their own order. Both libraries use the same checkpoint and layer, which
are loaded before the clock starts. They take turns, each in its own process, so that each has its
own peak of memory. First their scores must agree. Without bert-score (``pip install bert-score``)
fastplm is timed alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

#: The largest difference of the two libraries' scores: rounding, in sums over 384 numbers or more.
APART = 1e-4


def read_pairs(path: Path, count: int) -> tuple[list[str], list[str]]:
    """The last two columns of a table with a header: (candidates, references)."""
    lines = path.read_text(encoding="utf-8-sig").splitlines()[1 : count + 1]
    candidates, references = zip(*(line.split("\t")[-2:] for line in lines), strict=True)
    return list(candidates), list(references)


def ours(args: argparse.Namespace) -> Callable[[list[str], list[str]], list[torch.Tensor]]:
    from fastplm.inference._checkpoint import load_encoder
    from fastplm.inference.bertscore import bert_score

    model, tokenizer = load_encoder("benchmark", args.model)
    options = {"idf": args.idf, "layer": args.layer}
    return lambda *texts: list(bert_score(*texts, model, tokenizer, **options))


def theirs(args: argparse.Namespace) -> Callable[[list[str], list[str]], list[torch.Tensor]]:
    from bert_score import BERTScorer

    scorer = BERTScorer(
        model_type=str(args.model),
        num_layers=args.layer,
        idf=args.idf,
        idf_sents=read_pairs(args.pairs, args.count)[1] if args.idf else None,
        nthreads=0,  # with more, the tokenizer starts processes, which is slower here
        device="cpu",
    )
    return lambda *texts: list(scorer.score(*texts))


LIBRARIES = {"fastplm": ours, "bert-score": theirs}


def measure(args: argparse.Namespace) -> dict:
    """Run one library in this process."""
    torch.set_num_threads(args.threads)
    score = LIBRARIES[args.library](args)
    texts = read_pairs(args.pairs, args.count)
    score(*(part[:2] for part in texts))  # brings the weights into memory
    before = resident(reset=True)
    seconds = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        scores = score(*texts)
        seconds.append(time.perf_counter() - start)
    found = [part.tolist() for part in scores]
    return {"seconds": seconds, "mib": (resident() - before) / 1024, "scores": found}


def resident(reset: bool = False) -> int:
    """The largest resident size in KiB since the last reset, or since now if ``reset`` (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--pairs", type=Path, required=True, help="table that ends in two texts")
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("--idf", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3, help="in each process")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each library")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--library", choices=LIBRARIES, help="only this one, as JSON")
    args = parser.parse_args()
    if args.library is not None:
        print(json.dumps(measure(args)))
        return 0

    names = list(LIBRARIES)
    if importlib.util.find_spec("bert_score") is None:
        print("bert-score is not installed: fastplm is timed alone (pip install bert-score)")
        names = names[:1]
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            command = [sys.executable, __file__, *sys.argv[1:], "--library", name]
            shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            runs[name].append(json.loads(shown.splitlines()[-1]))
    if len(names) == 2:
        first, second = (torch.tensor(runs[name][0]["scores"]) for name in names)
        apart = (first - second).abs().max().item()
        print(f"{args.count} pairs, idf {args.idf}: scores are at most {apart:.1e} apart")
        assert apart < APART, "the libraries do not agree"
    least = {name: min(s for run in found for s in run["seconds"]) for name, found in runs.items()}
    for name, found in runs.items():
        seconds = [s for run in found for s in run["seconds"]]
        mib = statistics.median(run["mib"] for run in found)
        print(
            f"{name:12} {least[name]:8.3f} s at least, {statistics.median(seconds):.3f} s in the "
            f"median; {mib:.0f} MiB above the loaded model; "
            f"{least[names[-1]] / least[name]:.2f} x {names[-1]}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
