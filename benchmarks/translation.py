"""English to German on Multi30k: warm against cold starts, with the curve of BLEU.

    python benchmarks/translation.py --model DIR --data DIR [--only TEXT] [--steps 1000]

The model's DIR is an encoder's checkpoint (MiniLM). The data's DIR holds multi30k.train.en.gz and
.de.gz, and the same two of test. ``--t5`` and ``--bart`` name checkpoints of ``fastplm pretrain``.
The BART also translates from German to English, through a new source encoder.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils import logging

from fastplm.finetune.run import finetune
from fastplm.finetune.settings import FinetuneArguments
from harness import machine_folder, machine_line

FIELDS = (
    *("date", "machine", "torch", "triton", "commit"),
    *("start", "library", "seed", "steps", "batch", "bf16", "step", "bleu", "chrf", "rougeLsum"),
    *("loss", "seconds"),
)


def starts(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings of each start."""
    new = {"encoder": options.model, "target_vocab_size": 4000}
    rows: dict[str, dict[str, Any]] = {
        "cold": {**new, "warm": "none"},
        "warm encoder": {**new, "warm": "encoder"},
        "warm both": {**new, "warm": "both"},
        "warm, shared": {"encoder": options.model, "share": True},
    }
    if options.t5 is not None:
        rows["T5"] = {
            "model": options.t5,
            "prefix": "translate English to German: ",
            "optimizer": "adafactor",
            "learning_rate": 1e-2,
        }
    if options.bart is not None:
        bart = {"model": options.bart, "learning_rate": 2e-4}
        rows["BART"] = bart
        rows["BART, new source encoder (de-en)"] = {
            **bart,
            "source_encoder_layers": 2,
            "source_vocab_size": 4000,
        }
    return {name: row for name, row in rows.items() if (options.only or name) in name}


def measure(
    options: argparse.Namespace, start: str, settings: dict[str, Any], seed: int
) -> list[dict[str, Any]]:
    """A row for each step at which a training was scored."""
    sides = ("de", "en") if "de-en" in start else ("en", "de")
    files = {
        name: options.data / f"multi30k.{split}.{side}.gz"
        for split, names in (
            ("train", ("data", "targets")),
            ("test", ("eval_data", "eval_targets")),
        )
        for name, side in zip(names, sides, strict=True)
    }
    with tempfile.TemporaryDirectory() as out:
        args = FinetuneArguments(
            task="seq2seq",
            out=Path(out) / "run",
            **files,
            **{"learning_rate": options.learning_rate, **settings},
            steps=options.steps,
            batch_size=options.batch_size,
            max_length=48,
            max_target_length=48,
            max_eval_samples=options.samples,
            eval_every=max(1, options.steps // 5),
            beams=options.beams,
            precision="bf16" if options.bf16 else "fp32",
            seed=seed,
            save_every=1 << 30,
            log_every=max(1, options.steps // 20),
            threads=options.threads,
        )
        (run,) = finetune(args, print)["seeds"]
    losses = {entry["step"]: entry["loss"] for entry in run["history"]}
    scores = [*run["scores_by_step"], {"step": run["steps"], **run["scores"]}]
    return [
        {
            **machine_line(),
            "start": start,
            "library": args.library,
            "seed": seed,
            "steps": run["steps"],
            "batch": args.batch_size,
            "bf16": args.precision == "bf16",
            "step": score["step"],
            **{name: round(score[name], 2) for name in ("bleu", "chrf", "rougeLsum")},
            "loss": round(losses[score["step"]], 4),
            "seconds": round(run["train_seconds"], 1),
        }
        for score in scores
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of an encoder")
    parser.add_argument("--data", type=Path, required=True, help="folder of Multi30k")
    parser.add_argument("--t5", type=Path, help="folder of a T5")
    parser.add_argument("--bart", type=Path, help="folder of a BART")
    parser.add_argument("--only", help="the starts whose name has this text")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of the BERTs")
    parser.add_argument("--samples", type=int, default=200, help="test sentences that are scored")
    parser.add_argument("--beams", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int)
    results = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=results, help="where rows are added")
    options = parser.parse_args()
    logging.disable_progress_bar()
    folder = options.results / machine_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "translation.csv"
    for start, settings in starts(options).items():
        for seed in range(options.seeds):
            rows = measure(options, start, settings, seed)
            begins = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                if begins:
                    writer.writeheader()
                writer.writerows(rows)
            curve = "  ".join(f"{row['step']}: {row['bleu']}" for row in rows)
            print(f"{start}, seed {seed}: BLEU by step {curve}", flush=True)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
