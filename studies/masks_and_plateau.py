"""How soon a small BERT leaves its plateau, with other tokens in the places that it is asked for.

    python studies/masks_and_plateau.py --rows FILE [--seeds 0 1] -- --corpus FILE --arch ARCH …

After ``--`` come the options of ``fastplm pretrain`` for all runs. A share of the tokens that the
model is asked for becomes [MASK], a share a random token, and the others are left as they are. With
``untied`` the word embeddings and the last projection begin as copies, and are two weights. A row
has the loss on held-out text, where 15 % of the tokens are asked for and each is [MASK], whatever
the run had, beside the losses of a unigram and a bigram on the same text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from fastplm.pretrain.run import build, read
from fastplm.pretrain.settings import PretrainArguments
from fastplm.pretrain.stream import TextRun, Training
from fastplm.run.options import add_settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from harness import append_row, machine_line

FIELDS = (
    *("date", "machine", "torch", "triton", "commit"),
    *("options", "masked", "random", "kept", "embeddings", "seed"),
    *("held_out_loss", "unigram", "bigram"),
)
#: The shares of masked and of random tokens, and whether the two embeddings are one weight.
RUNS = [
    (0.8, 0.1, "tied"),
    (1.0, 0.0, "tied"),
    (0.9, 0.1, "tied"),
    (0.9, 0.0, "tied"),
    (1.0, 0.0, "untied"),
    (0.8, 0.1, "untied"),
]


def untied(plan: Any, settings: Any, data: Any) -> Training:
    """A pre-training whose last projection is a weight of its own."""
    training = build(plan, settings, data)
    model = training.trainer.model
    projection = model.get_output_embeddings()
    projection.weight = nn.Parameter(projection.weight.detach().clone())
    model.config.tie_word_embeddings = False
    assert projection.weight is not model.get_input_embeddings().weight
    return training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that rows go to")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("options", nargs="+", help="after --: options of fastplm pretrain")
    own = parser.parse_args()
    pretrain = argparse.ArgumentParser("fastplm pretrain")
    add_settings(pretrain, PretrainArguments)
    for seed in own.seeds:
        for masked, random, embeddings in RUNS:
            with tempfile.TemporaryDirectory() as out:
                shares = ["--mask-replace-prob", f"{masked}", "--random-replace-prob", f"{random}"]
                words = [*own.options, *shares, "--seed", f"{seed}", "--objective", "mlm"]
                words += ["--report-to", "none", "--out", out]
                args = PretrainArguments(**vars(pretrain.parse_args(words)))
                made = untied if embeddings == "untied" else build
                found = TextRun(args, read, made).run()["held_out"]
            row = {"options": " ".join(Path(word).name for word in own.options)}
            row |= {
                "masked": masked,
                "random": random,
                "kept": f"{max(1 - masked - random, 0.0):.1f}",
            }
            row |= {"embeddings": embeddings, "seed": seed}
            row |= {"held_out_loss": f"{found['mlm_loss']:.3f}"}
            row |= {"unigram": f"{found['unigram_loss']:.3f}"}
            row |= {"bigram": f"{found['bigram_loss']:.3f}"}
            append_row(own.rows, FIELDS, machine_line() | row)
            print(row)


if __name__ == "__main__":
    main()
