"""In how many directions the outputs of discriminators vary, and what that does to tagging.

    python studies/collapsed_outputs.py NAME=MODEL [...] --text FILE --train FILE --eval FILE \\
        --rows ROWS

Each MODEL, the discriminator of a ``fastplm pretrain``, is measured on lines of --text and
fine-tuned by ``fastplm finetune --task tagging``, as it is and with new weights in its last layer.
A row has the mean cosine of any two tokens' outputs before the fine-tuning, the dimensions in which
these outputs vary (the participation ratio of the variances of their principal components, [sum of
them]² / [sum of their squares]: 1 if all lie on a line), and the mean accuracy of the seeds with
half the width of its 95 % interval.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
import transformers
from film_reviews import EXAMPLES, fine_tuned, renew
from film_reviews import FIELDS as _OTHERS

from fastplm.data._files import lines_of
from fastplm.run.settings import integer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import append_row, machine_line

FIELDS = (
    *_OTHERS[: _OTHERS.index("model") + 1],
    *("new_weights", "cosine", "dimensions", "learning_rate", "examples", "seeds"),
    *("accuracy", "half_width"),
)
_LINES, _LETTERS, _TOKENS = 64, 60, 32
_RATE = 1e-3


def parts(model: Path) -> dict[str, Callable[[str], bool]]:
    """The parameters that get new weights, by name, of a model of ELECTRA."""
    config = transformers.ElectraConfig.from_pretrained(model)
    last = f"encoder.layer.{config.num_hidden_layers - 1}."
    return {"none": lambda name: False, "last layer": lambda name: last in name}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", metavar="NAME=MODEL", nargs="+")
    for name in ("text", "train", "eval", "rows"):
        parser.add_argument(f"--{name}", metavar="FILE", required=True, type=Path)
    parser.add_argument("--seeds", type=integer(2, 1000), default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    lines = list(islice((line for line in lines_of(args.text) if len(line) > _LETTERS), _LINES))
    settings = {"learning_rate": _RATE, "examples": EXAMPLES, "seeds": args.seeds}
    for word in args.models:
        label, folder = word.split("=", 1)
        for part, is_new in parts(Path(folder)).items():
            with tempfile.TemporaryDirectory() as place:
                renew(Path(folder), is_new, Path(place), transformers.AutoModelForPreTraining)
                found = measured(Path(place), lines)
                found |= fine_tuned(Path(place), args, _RATE, "--task", "tagging")
            row = machine_line() | settings | found | {"model": label, "new_weights": part}
            append_row(args.rows, FIELDS, row)


if __name__ == "__main__":
    main()
