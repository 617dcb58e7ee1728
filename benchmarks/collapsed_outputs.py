"""In how many directions the outputs of pre-trained encoders vary, and what that does to tagging.

    python benchmarks/collapsed_outputs.py NAME=MODEL [...] --text FILE --train FILE --eval FILE \
        --rows ROWS

Each MODEL, a checkpoint of ``fastplm pretrain``, is measured on lines of --text and fine-tuned by
``fastplm finetune --task tagging``, as it is and with a part of its weights replaced by new ones. A
row has the mean cosine of any two tokens' outputs before the fine-tuning, the dimensions in which
these outputs vary (the participation ratio of the variances of their principal components, [sum of
them]² / [sum of their squares]: 1 if all lie on a line), and the mean accuracy of the seeds with
half the width of its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import transformers
from film_reviews import FIELDS as _OTHERS

from fastplm.data._files import lines_of
from harness import append_row, machine_line

FIELDS = (
    *_OTHERS[: _OTHERS.index("model") + 1],
    *("new_weights", "cosine", "dimensions", "learning_rate", "examples", "seeds"),
    *("accuracy", "half_width"),
)
#: The parameters that get new weights, by name and by the number of the last layer.
PARTS: dict[str, Callable[[str, int], bool]] = {
    "none": lambda name, last: False,
    "last layer": lambda name, last: f"encoder.layer.{last}." in name,
    "all": lambda name, last: True,
}
_LINES, _LETTERS, _TOKENS = 64, 60, 32
_EXAMPLES, _JUDGED, _RATE = 2000, 1000, 1e-3


def renew(model: Path, part: str, out: Path) -> None:
    """Write a copy of a discriminator, with new weights for a part of it."""
    ours = transformers.AutoModelForPreTraining.from_pretrained(model)
    transformers.set_seed(0)
    fresh = transformers.AutoModelForPreTraining.from_config(ours.config).state_dict()
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if PARTS[part](name, ours.config.num_hidden_layers - 1):
                weight.copy_(fresh[name])
    ours.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(out)


@torch.no_grad()
def measured(model: Path, lines: list[str]) -> dict[str, float]:
    """The cosine of any two tokens' outputs, and the dimensions in which outputs vary."""
    encoder = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    options = {"padding": True, "truncation": True, "max_length": _TOKENS, "return_tensors": "pt"}
    batch = tokenizer(lines, **options)
    outputs = encoder(**batch).last_hidden_state[batch["attention_mask"].bool()].double()
    mean = torch.nn.functional.normalize(outputs, dim=-1).mean(0)
    variances = torch.linalg.svdvals(outputs - outputs.mean(0)) ** 2
    dimensions = variances.sum() ** 2 / variances.square().sum()
    return {"cosine": round(float(mean @ mean), 3), "dimensions": round(float(dimensions), 1)}


def fine_tuned(model: Path, args: argparse.Namespace) -> dict[str, float]:
    """The mean and half the width of the interval of ``fastplm finetune --task tagging``."""
    with tempfile.TemporaryDirectory() as out:
        command: list[object] = [sys.executable, "-m", "fastplm", "finetune", "--task", "tagging"]
        command += ["--model", model, "--data", args.train, "--eval-data", args.eval]
        command += ["--max-samples", _EXAMPLES, "--max-eval-samples", _JUDGED]
        command += ["--learning-rate", _RATE, "--seeds", args.seeds]
        command += ["--threads", 1, "--report-to", "none", "--out", Path(out) / "run"]
        subprocess.run([str(word) for word in command], check=True)
        score = json.loads((Path(out) / "run" / "metrics.json").read_text())["scores"]["accuracy"]
    return {"accuracy": round(score["mean"], 4), "half_width": round(score["half_width"], 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", metavar="NAME=MODEL", nargs="+")
    for name in ("text", "train", "eval", "rows"):
        parser.add_argument(f"--{name}", metavar="FILE", required=True, type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = list(islice((line for line in lines_of(args.text) if len(line) > _LETTERS), _LINES))
    for word in args.models:
        name, folder = word.split("=", 1)
        for part in PARTS:
            with tempfile.TemporaryDirectory() as place:
                renew(Path(folder), part, Path(place))
                row = measured(Path(place), lines) | fine_tuned(Path(place), args)
            settings = {"learning_rate": _RATE, "examples": _EXAMPLES, "seeds": args.seeds}
            row |= machine_line() | settings | {"model": name, "new_weights": part}
            append_row(args.rows, FIELDS, row)


if __name__ == "__main__":
    main()
