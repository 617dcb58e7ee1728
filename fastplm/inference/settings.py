"""The settings of the commands that use a trained model. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastplm.run.settings import SEED, Number, Rule, Settings, common, integer, setting

if TYPE_CHECKING:
    from typing_extensions import Self

#: How one vector is made of those of a text's tokens, special tokens among them.
POOLINGS = ("mean", "cls", "max", "sum", "last", "mean_sqrt_len", "weighted_mean")
#: How one vector is made of those of a word's tokens.
WORD_POOLINGS = ("first", "mean", "max", "sum")
#: How one vector is made of those of several layers.
COMBINATIONS = ("concat", "mean", "sum")
#: How the scores of label words are compared.
CALIBRATIONS = ("none", "contextual", "pmi")
TOO_LONG = ("truncate", "error")
DTYPES = ("float32", "float16")
_WEIGHT = Number(float, -1e9, 1e9, "a number")


@dataclass(frozen=True)
class EmbedArguments(Settings):
    """The settings of ``fastplm embed``; see ``fastplm embed --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "embed"

    model: str | Path = common("model")
    data: str | Path = setting(
        "text file, a text a line, plain or compressed; or a table, as pretrain reads it",
        path="FILE",
    )
    out: str | Path = setting(
        "file of the vectors, in NumPy's format; with --words, OUT.offsets.npy beside it says "
        "which rows are whose",
        path="FILE.npy",
    )
    words: str | None = setting(
        "a vector for each word, words being separated by whitespace: that of its first token, or "
        "the mean, maximum or sum of all its tokens (default: a vector for each text)",
        None,
        choices=WORD_POOLINGS,
        excludes="pooling",
    )
    pooling: Sequence[str] | None = setting(
        "what is made of the tokens of a text; of several kinds, one vector after the other. cls "
        "is the first token, last the last one; mean_sqrt_len is the sum over the root of the "
        "length, and weighted_mean has weights 1, 2, 3, ... (default: what modules.json of "
        "sentence-transformers says where there is one, with its length and normalisation; else "
        "mean)",
        None,
        choices=POOLINGS,
        excludes="pooling",
    )
    layers: Sequence[int] | None = setting(
        "hidden states of these layers: 0 is the embeddings, 1 the first layer, -1 the last; no "
        "layer above them is computed (default: -1)",
        None,
        number=integer(-10_000, 10_000),
    )
    combine: str = setting("what is made of several layers", "concat", choices=COMBINATIONS)
    layer_weights: Sequence[float] | None = setting(
        "the sum of the layers, each times its weight, instead of --combine",
        None,
        number=_WEIGHT,
        metavar="W",
    )
    normalize: bool = setting("divide each vector by its length", False)
    max_length: int | None = setting(
        "most tokens of a text (default: what the model takes)", None, number=integer()
    )
    too_long: str = setting(
        "what is done with longer texts; a word without a token left has a vector of zeros",
        "truncate",
        choices=TOO_LONG,
    )
    batch_tokens: int = common("batch_tokens")
    dtype: str = setting("type of the numbers in the file", "float32", choices=DTYPES)
    bf16: bool = setting("compute in bfloat16", False)
    matmul_precision: str = common("matmul_precision")
    threads: int | None = common("threads")
    overwrite: bool = common("overwrite")

    def resolved(self) -> Self:
        self.check("out", str(self.out).endswith(".npy"), "a name that ends in .npy", "Add it.")
        layers = self.layers or (-1,)
        weights = layers if self.layer_weights is None else self.layer_weights
        expected = f"{len(layers)}, one for each of --layers"
        fits, got = len(weights) == len(layers), f"{len(weights)} of them"
        self.check("layer_weights", fits, expected, "Name both.", got)
        return self


@dataclass(frozen=True)
class PromptArguments(Settings):
    """The settings of ``fastplm prompt``; see ``fastplm prompt --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "prompt"

    model: str | Path = common("model")
    prompt: str | Path = setting(
        "JSON file of the prompt: template, label words and examples", path="FILE"
    )
    data: str | Path = setting(
        "labelled examples, as finetune --task classification or pair reads them", path="FILE"
    )
    template: Sequence[str] | None = setting(
        "templates in place of that of --prompt; several are each scored, and the mean, the ends "
        "and the standard deviation of their accuracies are printed (default: those of --prompt)",
        None,
        metavar="TEXT",
    )
    out: str | Path | None = setting(  # type: ignore[assignment]
        "table of the predictions and scores (default: none)", None, path="FILE.tsv"
    )
    shots: int | None = setting(
        "show N examples of --shots-data before each text, about as many of each label",
        None,
        number=integer(),
    )
    shots_data: str | Path | None = setting(
        "labelled examples from which --shots are chosen", None, path="FILE"
    )
    seed: int = setting("seed of the choice of --shots", 0, number=SEED)
    text_columns: Sequence[str] | None = common("text_columns")
    label_column: str | None = common("label_column")
    max_samples: int | None = setting(
        "score N examples, the same ones every time",
        None,
        number=integer(),
    )
    batch_tokens: int = common("batch_tokens")
    bf16: bool = setting("compute in bfloat16", False)
    threads: int | None = common("threads")
    overwrite: bool = common("overwrite")

    rules = (
        Rule(
            "shots",
            lambda args: (args.shots is None) == (args.shots_data is None),
            "--shots and --shots-data together",
            "shots_data",
            "Name both, or neither.",
        ),
    )
