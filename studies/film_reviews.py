"""Film reviews, told apart by pre-trained BERTs of which a part has new weights.

    python studies/film_reviews.py MODEL [MODEL ...] --train FILE --eval FILE --rows ROWS

Each MODEL, a checkpoint of ``fastplm pretrain``, is fine-tuned by ``fastplm finetune`` as it is and
with a part of its weights replaced by new ones. A row has the mean accuracy of the seeds and half
the width of its 95 % interval. A bag of words is beside them: logistic regression on how often each
token is in a review, its weight decay chosen on a tenth of the training examples.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from fastplm.run.settings import integer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import append_row, machine_line

FIELDS = (
    *("date", "machine", "torch", "triton", "commit"),
    *("model", "new_weights", "pooling", "learning_rate", "examples", "seeds"),
    *("accuracy", "half_width"),
)
_LAYER = "encoder.layer."
#: The parameters that get new weights, by name.
PARTS: dict[str, Callable[[str], bool]] = {
    "none": lambda name: False,
    "all": lambda name: True,
    "layers": lambda name: _LAYER in name,
    "word embeddings": lambda name: "word_embeddings" in name,
    "queries and keys": lambda name: ".query." in name or ".key." in name,
    "attention": lambda name: _LAYER in name and ".attention." in name,
    "feed-forward": lambda name: _LAYER in name and ".attention." not in name,
}
EXAMPLES = 2000
_JUDGED = 1000


def renew(
    model: Path,
    is_new: Callable[[str], bool],
    out: Path,
    of: Any = transformers.AutoModelForMaskedLM,
) -> None:
    """Write a copy of a model, with new weights where ``is_new`` says so of their names."""
    ours = of.from_pretrained(model)
    transformers.set_seed(0)
    fresh = of.from_config(ours.config).state_dict()
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            if is_new(name):
                weight.copy_(fresh[name])
    ours.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(out)


def fine_tuned(
    model: Path, args: argparse.Namespace, rate: float, *options: object
) -> dict[str, float]:
    """The mean and half the width of the interval of ``fastplm finetune``."""
    with tempfile.TemporaryDirectory() as out:
        command: list[object] = [sys.executable, "-m", "fastplm", "finetune", *options]
        command += ["--model", model, "--data", args.train, "--eval-data", args.eval]
        command += ["--max-samples", EXAMPLES, "--max-eval-samples", _JUDGED]
        command += ["--learning-rate", rate, "--seeds", args.seeds]
        command += ["--threads", 1, "--report-to", "none", "--out", Path(out) / "run"]
        subprocess.run([str(word) for word in command], check=True)
        score = json.loads((Path(out) / "run" / "metrics.json").read_text())["scores"]["accuracy"]
    return {"accuracy": round(score["mean"], 4), "half_width": round(score["half_width"], 4)}


def bag_of_words(model: Path, args: argparse.Namespace) -> float:
    """The accuracy of a logistic regression on the shares of the tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def read(path: Path, limit: int) -> tuple[Tensor, Tensor]:
        lines = path.read_text(encoding="utf-8").splitlines()[1:]
        order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(0))[:limit]
        shares, labels = torch.zeros(len(order), len(tokenizer)), torch.zeros(len(order))
        for row, index in enumerate(order.tolist()):
            score, text = lines[index].split("\t", 1)
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
            shares[row] = torch.bincount(ids, minlength=len(tokenizer)) / len(ids)
            labels[row] = float(score) > 0
        return shares, labels

    def fit(inputs: Tensor, labels: Tensor, decay: float) -> Tensor:
        weight = torch.zeros(inputs.shape[1], requires_grad=True)
        optimizer = torch.optim.LBFGS([weight], max_iter=200)

        def loss() -> Tensor:
            optimizer.zero_grad()
            value = F.binary_cross_entropy_with_logits(inputs @ weight, labels)
            value = value + decay * weight.square().sum()
            value.backward()
            return value

        optimizer.step(loss)
        return weight.detach()

    def accuracy(inputs: Tensor, labels: Tensor, weight: Tensor) -> float:
        return ((inputs @ weight > 0) == labels.bool()).double().mean().item()

    inputs, labels = read(args.train, EXAMPLES)
    tenth = len(inputs) // 10
    decay = max(
        (10.0**-n for n in range(2, 8)),
        key=lambda decay: accuracy(
            inputs[:tenth], labels[:tenth], fit(inputs[tenth:], labels[tenth:], decay)
        ),
    )
    return accuracy(*read(args.eval, _JUDGED), fit(inputs, labels, decay))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", metavar="MODEL", nargs="+", type=Path)
    for name in ("train", "eval", "rows"):
        parser.add_argument(f"--{name}", metavar="FILE", required=True, type=Path)
    parser.add_argument("--seeds", type=integer(2, 1000), default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for number, model in enumerate(args.models):
        row = machine_line() | {"model": number, "examples": EXAMPLES, "seeds": args.seeds}
        words = {"new_weights": "bag of words", "seeds": 1, "accuracy": bag_of_words(model, args)}
        append_row(args.rows, FIELDS, row | words)
        for part, pooling, rate in [
            *((part, "cls", 3e-4) for part in PARTS),
            *(("none", "mean", rate) for rate in (3e-4, 1e-3)),
        ]:
            with tempfile.TemporaryDirectory() as place:
                renew(model, PARTS[part], Path(place))
                options = ("--task", "classification", "--threshold", 0, "--pooling", pooling)
                found = fine_tuned(Path(place), args, rate, *options)
            settings = {"new_weights": part, "pooling": pooling, "learning_rate": rate}
            append_row(args.rows, FIELDS, row | settings | found)


if __name__ == "__main__":
    main()
