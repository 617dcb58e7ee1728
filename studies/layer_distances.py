"""How far a layer moves what it reads: the distance and the angle of its input and its output.

    python studies/layer_distances.py NAME=MODEL [...] --text FILE --out NAME

For each layer of each encoder the mean over the tokens of the first lines of --text, each cut to
--length tokens: the L2 distance of a token's input and output, the angle between them in degrees,
and the L2 norm of the output. ``NAME.tsv`` has a row for each layer, ``NAME.png`` both curves.

Source: Lan et al. 2020 (arXiv 1909.11942), §3.1 and figure 1.
"""

from __future__ import annotations

import argparse
import csv
from itertools import islice
from pathlib import Path

import matplotlib
import torch
import transformers

from fastplm.data._files import lines_of
from fastplm.run.settings import integer

matplotlib.use("Agg")
from matplotlib import pyplot

FIELDS = ("model", "layer", "distance", "degrees", "norm", "tokens")
_LINES, _LETTERS = 64, 60


@torch.no_grad()
def distances(model: Path, lines: list[str], length: int) -> list[dict[str, float]]:
    """A row for each layer of a model."""
    encoder = transformers.AutoModel.from_pretrained(model).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    options = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    batch = tokenizer(lines, **options)
    kept = batch["attention_mask"].bool()
    states = encoder(**batch, output_hidden_states=True).hidden_states
    states = [each[kept].double() for each in states]
    rows = []
    for layer, (before, after) in enumerate(zip(states, states[1:], strict=False), 1):
        cosine = torch.nn.functional.cosine_similarity(before, after, dim=-1).clamp(-1, 1)
        row = {
            "distance": (after - before).norm(dim=-1).mean(),
            "degrees": cosine.arccos().rad2deg().mean(),
            "norm": after.norm(dim=-1).mean(),
        }
        rounded = {name: round(float(value), 3) for name, value in row.items()}
        rows.append({"layer": layer, **rounded, "tokens": len(after)})
    return rows


def draw(rows: list[dict[str, object]], path: Path) -> None:
    figure, sides = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(sides, ("distance", "degrees"), strict=True):
        for model in dict.fromkeys(row["model"] for row in rows):
            points = [(row["layer"], row[name]) for row in rows if row["model"] == model]
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=model)
        axes.set_ylim(0)
        axes.set_xlabel("layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
    sides[0].set_ylabel("L2 distance of input and output")
    sides[1].set_ylabel("angle of input and output, degrees")
    figure.legend(*sides[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", metavar="NAME=MODEL", nargs="+")
    parser.add_argument("--text", metavar="FILE", required=True, type=Path)
    parser.add_argument("--length", metavar="N", type=integer(3, 1 << 16), default=32)
    parser.add_argument("--out", metavar="NAME", required=True, type=Path)
    args = parser.parse_args()
    lines = list(islice((line for line in lines_of(args.text) if len(line) > _LETTERS), _LINES))
    rows: list[dict[str, object]] = []
    for word in args.models:
        model, folder = word.split("=", 1)
        rows += [{"model": model, **row} for row in distances(Path(folder), lines, args.length)]
    with args.out.with_suffix(".tsv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, delimiter="\t", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
