"""The settings of ``fastplm score``. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastplm.run.settings import Settings, common, setting, whole

METRICS = ("log-likelihood", "pseudo-log-likelihood", "bertscore")
#: How tokens are masked where one of them is scored.
METHODS = ("original", "within_word_l2r")
UNITS = ("token", "text", "corpus")
FORMATS = ("tsv", "json")
_OF_BERTSCORE = ("references", "idf", "layer", "baseline")


@dataclass
class ScoreArguments(Settings):
    """The settings of scoring a file; see ``fastplm score --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "score"

    model: str | Path = common("model")
    data: str | Path = setting(
        "file of texts, one a line, plain or compressed; for an encoder-decoder also a source, a "
        "tab and its text in each line",
        path="FILE",
    )
    metric: str | None = setting(
        "what is computed (default: that of the model: pseudo-log-likelihood for BERT, RoBERTa, "
        "ALBERT and ELECTRA's generator, log-likelihood for GPT, GPT-2, BART and T5); bertscore "
        "compares the texts with --references",
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
    out: str | Path | None = setting(  # type: ignore[assignment]
        "file of the scores (default: print them)", None, path="FILE"
    )
    references: Sequence[str | Path] | None = setting(
        "bertscore: files of references, line by line those of --data; the best of several counts",
        None,
        path="FILE",
    )
    idf: bool = setting("bertscore: rare tokens of the references weigh more", False)
    layer: int | None = setting(
        "bertscore: the layer whose states are compared (default: the last one)",
        None,
        number=whole(0, 1000),
        metavar="N",
    )
    baseline: str | Path | None = setting(
        "bertscore: file of scores of unrelated texts, as of bert-score, to rescale by",
        None,
        path="FILE",
    )
    bos: bool = setting(
        "GPT and GPT-2: put the beginning-of-text token before each text, so that the first token "
        "has a score, too",
        False,
    )
    truncate: bool = setting(
        "cut texts that are longer than the model takes; without it they are an error", False
    )
    batch_tokens: int = common("batch_tokens")
    bf16: bool = setting("compute under autocast to bfloat16: faster, with rounder scores", False)
    matmul_precision: str = common("matmul_precision")
    threads: int | None = common("threads")
    overwrite: bool = setting("replace the file --out", False)

    def __post_init__(self) -> None:
        self.check_values()
        compares = self.metric == "bertscore"
        for name in _OF_BERTSCORE:
            given = getattr(self, name) not in (None, False)
            fix = "Leave the option out, or give --metric bertscore."
            self.check(name, compares or not given, "nothing with another metric", fix)
        fix = "Give --references FILE."
        self.check("references", not compares or bool(self.references), "a file", fix)
        fix = "Choose text or corpus."
        self.check("by", not (compares and self.by == "token"), "text or corpus", fix)
        for name in ("method", "bos"):
            given = getattr(self, name) not in (None, False)
            self.check(name, not (compares and given), "nothing with bertscore", "Leave it out.")
