"""The settings of ``fastplm score``. Nothing here imports PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastplm.train.arguments import Settings, setting, whole

METRICS = ("log-likelihood", "pseudo-log-likelihood")
#: Which tokens are masked where one is scored.
METHODS = ("original", "within_word_l2r")
#: The tokens of a batch: so many that the caches of a CPU hold what a layer makes of them.
BATCH_TOKENS = 1024
UNITS = ("token", "text", "corpus")
FORMATS = ("tsv", "json")


@dataclass
class ScoreArguments(Settings):
    """The settings of scoring a file; see ``fastplm score --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "score"

    model: str | Path = setting("folder of the checkpoint and its tokenizer", metavar="DIR")
    data: str | Path = setting(
        "file of texts, one a line, plain or compressed; for an encoder-decoder also a source, a "
        "tab and its text in each line",
        metavar="FILE",
    )
    metric: str | None = setting(
        "what is computed (default: that of the model: pseudo-log-likelihood for BERT, RoBERTa, "
        "ALBERT and ELECTRA's generator, log-likelihood for GPT, GPT-2, BART and T5)",
        None,
        choices=METRICS,
    )
    method: str | None = setting(
        "of pseudo-log-likelihood: mask only the token that is scored (original, the default), or "
        "also the tokens after it in its word (within_word_l2r)",
        None,
        choices=METHODS,
    )
    by: str = setting(
        "a score for each token, for each text, or one for all", "text", choices=UNITS
    )
    format: str = setting("tsv: a header and rows; json: one object", "tsv", choices=FORMATS)
    out: str | Path | None = setting(
        "file of the scores (default: print them)", None, metavar="FILE"
    )
    bos: bool = setting(
        "GPT and GPT-2: put the beginning-of-text token before each text, so that the first token "
        "has a score, too",
        False,
    )
    truncate: bool = setting(
        "cut texts that are longer than the model takes; without it they are an error", False
    )
    batch_tokens: int = setting("most tokens of a batch", BATCH_TOKENS, number=whole())
    bf16: bool = setting("compute under autocast to bfloat16: faster, with rounder scores", False)
    threads: int | None = setting("CPU threads (default: PyTorch's choice)", None, number=whole())
    overwrite: bool = setting("replace the file --out", False)

    def __post_init__(self) -> None:
        self.check_values()
