"""The settings of ``fastplm score``. Nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fastplm.run.settings import Settings, common, integer, setting

if TYPE_CHECKING:
    from typing_extensions import Self

PAIRS = "minimal-pairs"
METRICS = ("log-likelihood", "pseudo-log-likelihood", "bertscore", PAIRS)
#: How tokens are masked where one of them is scored.
METHODS = ("original", "within_word_l2r")
#: BART and T5 without masks: the source is an empty text.
EMPTY_SOURCE = "empty_source"
PAIR_METHODS = (*METHODS, EMPTY_SOURCE)
#: What has a row of its own; of minimal pairs, the last three.
UNITS = ("token", "text", "corpus", "pair", "paradigm")
_PAIR_UNITS = UNITS[2:]
FORMATS = ("tsv", "json")
_OF_BERTSCORE = ("references", "idf", "layer", "baseline")
_OF_PAIRS = ("part", "no_bos", "normalize", "max_pairs", "published", "picture")
_PARTS = ("generator", "discriminator")


@dataclass(frozen=True)
class ScoreArguments(Settings):
    """The settings of scoring a file; see ``fastplm score --help``.

    Raises:
        ArgumentValueError: a value is out of its range.
    """

    where = "score"

    model: str | Path = common("model")
    data: str | Path = setting(
        "file of texts, one a line, plain or compressed, or a table, as pretrain reads it; for an "
        "encoder-decoder also a source, a tab and its text in each line; for minimal-pairs BLiMP's "
        "zip, or a .jsonl, .tsv or .csv file with the columns sentence_good and sentence_bad",
        path="FILE",
    )
    metric: str | None = setting(
        "what is computed (default: that of the model: pseudo-log-likelihood for BERT, RoBERTa, "
        "ALBERT and ELECTRA's generator, log-likelihood for GPT, GPT-2, BART and T5); bertscore "
        "compares the texts with --references; minimal-pairs is how often the acceptable one of "
        "two sentences is found more probable",
        None,
        choices=METRICS,
    )
    method: str | None = setting(
        "of pseudo-log-likelihood: mask only the token that is scored (original, the default), or "
        "also the tokens after it in its word (within_word_l2r); of minimal-pairs with BART and T5 "
        "also the log-likelihood after an empty text (empty_source)",
        None,
        choices=PAIR_METHODS,
    )
    by: str | None = setting(
        "a score for each token, for each text (the default), or one for all (corpus); for "
        "minimal-pairs the accuracy of each paradigm, term and field (paradigm, the default), the "
        "scores of each pair, or one accuracy for all (corpus)",
        None,
        choices=UNITS,
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
        number=integer(0, 1000),
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
    part: str | None = setting(
        "minimal-pairs with a checkpoint of ELECTRA's pre-training, which holds two models: the "
        "one that is scored (default: generator, or a discriminator that predicts tokens)",
        None,
        choices=_PARTS,
    )
    no_bos: bool = setting(
        "minimal-pairs with GPT and GPT-2: put no beginning-of-text token before the sentences, "
        "and do not score their first token",
        False,
    )
    normalize: bool = setting(
        "minimal-pairs: compare the means over the tokens of the sentences in place of the sums",
        False,
    )
    max_pairs: int | None = setting(
        "minimal-pairs: score N pairs of each paradigm, the same ones every time",
        None,
        number=integer(),
    )
    published: str | Path | None = setting(
        "minimal-pairs: table of the accuracies of other systems, with a column UID and one for "
        "each system, which are shown beside (BLiMP's models_summary.jsonl)",
        None,
        path="FILE",
    )
    picture: bool = setting(
        "minimal-pairs: draw the accuracies of terms with their intervals, as OUT with the ending "
        ".png beside --out",
        False,
    )
    truncate: bool = setting(
        "cut texts that are longer than the model takes; without it they are an error", False
    )
    batch_tokens: int = common("batch_tokens")
    bf16: bool = setting("compute under autocast to bfloat16: faster, with rounder scores", False)
    matmul_precision: str = common("matmul_precision")
    threads: int | None = common("threads")
    overwrite: bool = common("overwrite")

    def resolved(self) -> Self:
        pairs = self.metric == PAIRS
        units = _PAIR_UNITS if pairs else UNITS[:3]
        by = self.by or ("paradigm" if pairs else "text")
        fix = f"Choose one of them{'' if pairs else f', or give --metric {PAIRS}'}."
        self.check("by", by in units, " | ".join(units), fix)
        for name in _OF_PAIRS:
            given = getattr(self, name) not in (None, False)
            fix = f"Leave the option out, or give --metric {PAIRS}."
            self.check(name, pairs or not given, "nothing with another metric", fix)
        expected, fix = "false with minimal-pairs, which put it there", "Leave it out."
        self.check("bos", not (pairs and self.bos), expected, fix)
        fix = f"Choose one of them, or give --metric {PAIRS}."
        masks = self.method in (None, *METHODS)
        self.check("method", pairs or masks, " | ".join(METHODS), fix)
        named = self.out is not None and Path(self.out).suffix not in ("", ".png")
        expected, fix = "--out FILE with another ending than .png", "Name one."
        got = f"true with --out {self.out}"
        self.check("picture", named or not self.picture, expected, fix, got)
        compares = self.metric == "bertscore"
        for name in _OF_BERTSCORE:
            given = getattr(self, name) not in (None, False)
            fix = "Leave the option out, or give --metric bertscore."
            self.check(name, compares or not given, "nothing with another metric", fix)
        fix = "Give --references FILE."
        self.check("references", not compares or bool(self.references), "a file", fix)
        fix = "Choose text or corpus."
        self.check("by", not (compares and by == "token"), "text or corpus", fix)
        for name in ("method", "bos"):
            given = getattr(self, name) not in (None, False)
            self.check(name, not (compares and given), "nothing with bertscore", "Leave it out.")
        return self.changed(by=by)
