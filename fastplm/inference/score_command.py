"""``fastplm score``: the scores of a file of texts, as a table or as JSON."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastplm._machine import device_label
from fastplm.data import load_tokenizer
from fastplm.data._files import lines_of
from fastplm.data._folder import atomic_write, say
from fastplm.data.minimal_pairs import read_pairs, read_published, some_of_each
from fastplm.errors import DataError
from fastplm.inference._batches import progress_bar
from fastplm.inference._checkpoint import fp32_name, head_of, load_model, results
from fastplm.inference._encoder import load_encoder
from fastplm.inference.bertscore import bert_score
from fastplm.inference.minimal_pairs import (
    Accuracy,
    PairScores,
    draw,
    minimal_pairs,
    published_means,
)
from fastplm.inference.score import TextScore, log_likelihood, perplexity, pseudo_log_likelihood
from fastplm.inference.score_settings import METHODS, PAIRS, ScoreArguments
from fastplm.models._heads import CausalLM
from fastplm.run.checkpoint import JOINT, config_at, kind_of
from fastplm.run.report import block, counted, drawn
from fastplm.run.threads import computing, fp32_products

#: The encoder-decoders that have learned to fill in what is masked.
_INFILLING = ("bart", "t5")


@dataclass(frozen=True)
class Line:
    """A line of the file: its number from 1 on, its text, and what stands before a tab or None."""

    number: int
    text: str
    source: str | None


@dataclass(frozen=True)
class Report:
    """What a metric finds, as names and values."""

    texts: list[dict[str, Any]]  # of each text
    tokens: list[list[dict[str, Any]]]  # of each token of each text
    corpus: dict[str, Any]  # of all texts
    cut: int = 0  # how many texts were cut


def score_file(args: ScoreArguments) -> str:
    """Score a file; returns the results, or nothing if they are written to a file.

    Raises:
        FastplmError: a file, the model or a setting is wrong.
    """
    out = None if args.out is None else Path(args.out)
    picture = out.with_suffix(".png") if out is not None and args.picture else None
    with results(args, out, picture):
        if args.metric == PAIRS:
            return _score_pairs(args, out, picture)
        return _score_file(args, out)


def _score_file(args: ScoreArguments, out: Path | None) -> str:
    config = config_at("score", "model", args.model)
    usual = "pseudo-log-likelihood" if head_of(config) == "MaskedLM" else "log-likelihood"
    metric = args.metric or usual
    likelihood = metric.endswith("log-likelihood")
    able = {usual} | ({"pseudo-log-likelihood"} if config.model_type in _INFILLING else set())
    fix = "Leave the option out."
    expected = f"{usual}, the one for a {config.model_type} model of this kind"
    args.check("metric", metric in able or not likelihood, expected, fix)
    lines = read_lines(args, paired=metric == "log-likelihood" and config.is_encoder_decoder)
    with computing(args.threads), fp32_products(args.matmul_precision):
        begun = time.perf_counter()
        report = _METRICS[metric](args, lines, config)
        seconds = time.perf_counter() - begun
    lost = [name for name, value in report.corpus.items() if math.isnan(value)]
    got = f"{args.model}, which gives NaN as {', '.join(lost)}"
    fix = "Check its config.json and weights."
    args.check("model", not lost, "a model that gives numbers", fix, got, DataError)
    if report.cut:
        say(f"texts longer than the model takes, cut: {report.cut} of {len(lines)}")
    shown = ", ".join(f"{name} {_short(value)}" for name, value in report.corpus.items())
    say(f"{shown}; {seconds:.1f} s")
    head = {"model": str(args.model), "data": str(args.data), "metric": metric}
    if metric == "pseudo-log-likelihood":
        head["method"] = args.method or METHODS[0]
    assert args.by is not None
    text = (_json if args.format == "json" else _table)(args.by, lines, report, head)
    return _given(text, out)


def _given(text: str, out: Path | None) -> str:
    """The results, or nothing when they were written to ``out``."""
    if out is None:
        return text
    with atomic_write(out) as part:
        part.write_text(text, encoding="utf-8")
    say(f"written to {out}")
    return ""


def read_lines(args: ScoreArguments, *, paired: bool) -> list[Line]:
    """The lines of a file that are not blank.

    If they are ``paired``, a tab may part a source from its text: in all lines, or in none.
    """
    lines: list[Line] = []
    blank = 0
    for number, line in enumerate(lines_of(Path(args.data)), 1):
        text = line.rstrip("\n")
        if not text.strip():
            blank += 1
            continue
        source: str | None = None
        if paired:
            *before, text = text.split("\t")
            got = f"{args.data}:{number}: {len(before)} tabs"
            fix = "Correct the line."
            args.check("data", len(before) < 2, "one at most", fix, got, DataError)
            source = before[0] if before else None
            alike = not lines or (source is None) == (lines[0].source is None)
            expected = "a tab in all lines, between a source and its text, or in none"
            args.check("data", alike, expected, fix, got, DataError)
        lines.append(Line(number, text, source))
    expected, got = "a text or more, one a line", f"{args.data}, a file without text"
    args.check("data", bool(lines), expected, "Check the file.", got, DataError)
    if blank:
        say(f"blank lines of {args.data}, left out: {blank}")
    return lines


# --- likelihoods ----------------------------------------------------------------------------------


def _likelihood(
    args: ScoreArguments, lines: list[Line], config: Any, *, pseudo: bool = False
) -> Report:
    causal = not config.is_encoder_decoder
    expected, fix = "none, as only pseudo-log-likelihood masks tokens", "Leave it out."
    args.check("method", pseudo or args.method is None, expected, fix)
    args.check("bos", causal and not pseudo or not args.bos, "a GPT or GPT-2", fix, "another model")
    needs = ("mask",) if pseudo and causal else ()  # T5 has a sentinel
    tokenizer: Any = load_tokenizer(args.model, needs=needs)
    model = load_model("score", args.model, head_of(config))
    _say_what(args, model)
    texts = [line.text for line in lines]
    options: dict[str, Any] = {"batch_tokens": args.batch_tokens, "truncate": args.truncate}
    metric: Callable[..., list[TextScore]] = log_likelihood
    if pseudo:
        metric = pseudo_log_likelihood
        options["method"] = args.method or METHODS[0]
    elif causal:
        options["bos"] = args.bos
    elif lines[0].source is not None:
        options["sources"] = [line.source for line in lines]
    with progress_bar(None, "score", True) as bar, _precision(args, model.device):
        scores = metric(model, tokenizer, texts, progress=_shown_in(bar), **options)
    prefix = "pseudo_" if pseudo else ""
    names = "tokens", f"{prefix}log_likelihood", f"{prefix}perplexity"

    def row(*values: float) -> dict[str, Any]:
        return dict(zip(names, values, strict=True))

    def by_token(score: TextScore) -> list[dict[str, Any]]:
        each = zip(score.tokens, score.log_probs.tolist(), strict=True)
        return [{"token": token, "log_prob": value} for token, value in each]

    total = sum(len(score.tokens) for score in scores)
    of_all = row(total, math.fsum(score.sum for score in scores), perplexity(scores))
    return Report(
        [row(len(score.tokens), score.sum, score.perplexity) for score in scores],
        [by_token(score) for score in scores],
        {"texts": len(scores), **of_all},
        sum(score.truncated for score in scores),
    )


# --- BERTScore ------------------------------------------------------------------------------------


def _bertscore(args: ScoreArguments, lines: list[Line], config: Any) -> Report:
    files = [[text.strip() for text in lines_of(Path(path))] for path in args.references or ()]
    count = sum(1 for _ in lines_of(Path(args.data)))
    for path, texts in zip(args.references or (), files, strict=True):
        got = f"{path}, a file of {len(texts)} lines"
        fix = "Give the references line by line."
        expected = f"{count} lines, as --data has"
        args.check("references", len(texts) == count, expected, fix, got, DataError)
    references = [[texts[line.number - 1] for texts in files] for line in lines]
    blank = sum(not text for of_line in references for text in of_line)
    say(f"references without a text, which score 0: {blank}" if blank else "")
    layers = (-1 if args.layer is None else args.layer,)
    model, tokenizer = load_encoder("score", args.model, layers)
    _say_what(args, model)
    options: dict[str, Any] = {name: getattr(args, name) for name in ("idf", "layer", "baseline")}
    options |= {"batch_tokens": args.batch_tokens, "progress": True}
    texts = [line.text for line in lines]
    with warnings.catch_warnings(record=True) as caught, _precision(args, model.device):
        warnings.simplefilter("always")
        score = bert_score(texts, references, model, tokenizer, **options)
    for warning in caught:
        say(str(warning.message))
    rows = zip(*(part.tolist() for part in score), strict=True)
    means = {name: float(part.mean()) for name, part in score._asdict().items()}
    found = [dict(zip(score._fields, row, strict=True)) for row in rows]
    return Report(found, [], {"texts": len(lines), **means})


# --- minimal pairs --------------------------------------------------------------------------------


def _score_pairs(args: ScoreArguments, out: Path | None, picture: Path | None) -> str:
    """The accuracies of minimal pairs, or their scores, as ``score_file`` gives them."""
    joint, fix = kind_of(args.model) == JOINT, "Leave the option out."
    expected = f"nothing with {args.model}, a checkpoint of one model"
    args.check("part", joint or args.part is None, expected, fix)
    config = config_at("score", "model", args.model, part=args.part)
    pairs = some_of_each(read_pairs(args.data), args.max_pairs)
    published = {} if args.published is None else read_published(args.published)
    taken = [name for name in next(iter(published.values()), {}) if name in Accuracy._fields]
    got, fix = f"{args.published}, with a column {', '.join(taken)}", "Rename it."
    expected = "a column for each system, and none called as one of the result"
    args.check("published", not taken, expected, fix, got, DataError)
    there = not published or any(pair.paradigm in published for pair in pairs)
    got, fix = f"{args.published}, with no UID of {args.data}", "Check both files."
    args.check("published", there, "rows for the same paradigms", fix, got, DataError)
    tokenizer: Any = load_tokenizer(args.model, needs=())
    discriminates = (config.architectures or [""])[0] == "ElectraForPreTraining"
    head_name = "PreTraining" if discriminates else head_of(config)
    model = load_model("score", args.model, head_name, part=args.part)
    expected, fix = f"false with a {type(model).__name__}", "Leave it out."
    args.check("no_bos", isinstance(model, CausalLM) or not args.no_bos, expected, fix)
    options: dict[str, Any] = {"method": args.method, "bos": not args.no_bos}
    options |= {name: getattr(args, name) for name in ("normalize", "batch_tokens", "truncate")}
    begun = time.perf_counter()
    with (
        computing(args.threads),
        fp32_products(args.matmul_precision),
        progress_bar(None, "score", True, "sentences") as bar,
        _precision(args, model.device),
    ):
        _say_what(args, model)
        scores = minimal_pairs(model, tokenizer, pairs, progress=_shown_in(bar), **options)
    seconds = time.perf_counter() - begun
    finite = bool((scores.good + scores.bad).isfinite().all())
    got, fix = f"{args.model}, which gives NaN or infinity", "Check its config.json and weights."
    args.check("model", finite, "a model that gives numbers", fix, got, DataError)
    if scores.truncated:
        say(f"distinct sentences longer than the model takes, cut: {scores.truncated}")
    rows, others = scores.accuracies(), published_means(scores, published)
    say(_summary(rows[0], others, scores.scorer, seconds))
    head = {"model": str(args.model), "data": str(args.data), "metric": PAIRS}
    head["scorer"] = scores.scorer
    if picture is not None:

        def paint() -> None:
            with atomic_write(picture) as part:
                folder = Path(args.model).resolve()  # OUT/model, OUT/discriminator …
                name = f"{folder.parent.name}/{folder.name}".removesuffix("/model")
                draw(part, f"minimal pairs, {name}", rows, others)

        if drawn(picture, paint):
            say(f"drawn as {picture}")
    return _given(_pairs_as(args, scores, rows, others, head), out)


def _summary(
    row: Accuracy, others: dict[str, list[float | None]], scorer: str, seconds: float
) -> str:
    beside = ", ".join(f"{name} {of[0]:.3f}" for name, of in others.items() if of[0] is not None)
    return (
        f"accuracy {row.accuracy:.3f} (95 % interval {row.low:.3f} to {row.high:.3f}) of "
        f"{counted(row.pairs, 'pair')}, {counted(row.paradigms, 'paradigm')}, "
        f"{counted(row.ties, 'tie')}, by {scorer}; "
        f"{f'published: {beside}; ' if beside else ''}{seconds:.1f} s"
    )


def _pairs_as(
    args: ScoreArguments,
    scores: PairScores,
    rows: list[Accuracy],
    others: dict[str, list[float | None]],
    head: dict[str, str],
) -> str:
    """The table or JSON of accuracies, or of each pair."""
    shown = [
        row._asdict() | {system: of[i] for system, of in others.items()}
        for i, row in enumerate(rows)
        if args.by != "corpus" or row.level == "overall"
    ]
    each = []
    if args.by == "pair":
        known = zip(scores.pairs, scores.good.tolist(), scores.bad.tolist(), strict=True)
        each = [
            {"paradigm": pair.paradigm, "number": number, "good": good, "bad": bad}
            | {"correct": int(good > bad), "sentence_good": pair.good, "sentence_bad": pair.bad}
            for number, (pair, good, bad) in enumerate(known, 1)
        ]
    if args.format == "tsv":
        return _rows(each or shown)
    content: dict[str, Any] = {**head, "accuracies": shown}
    if each:
        content["pairs"] = each
    return _written(content)


#: What computes the report of a metric from the lines of a file.
_METRICS: dict[str, Callable[[ScoreArguments, list[Line], Any], Report]] = {
    "log-likelihood": _likelihood,
    "pseudo-log-likelihood": functools.partial(_likelihood, pseudo=True),
    "bertscore": _bertscore,
}


def _say_what(args: ScoreArguments, model: Any) -> None:
    rows = {
        "data": str(args.data),
        "model": f"{args.model}, {type(model).__name__}",
        "precision": "bf16 (autocast)" if args.bf16 else fp32_name(args),
        "device": f"{device_label(model.device)}, {counted(torch.get_num_threads(), 'CPU thread')}",
    }
    say(block(rows))


def _shown_in(bar: Any) -> Callable[[int, int], None]:
    """What shows (done, all) in a bar of progress."""

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def _precision(args: ScoreArguments, device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)


# --- results --------------------------------------------------------------------------------------


def _table(by: str, lines: Sequence[Line], report: Report, head: dict[str, str]) -> str:
    rows = [report.corpus]
    if by != "corpus":
        found = [[row] for row in report.texts] if by == "text" else report.tokens
        each = zip(lines, found, strict=True)
        rows = [{"line": line.number, **row} for line, some in each for row in some]
    return _rows(rows)


def _rows(rows: Sequence[dict[str, Any]]) -> str:
    """A header and rows, separated by tabs."""
    shown = io.StringIO()
    table = csv.writer(shown, delimiter="\t", lineterminator="\n")
    table.writerow(rows[0] if rows else ("line",))
    for row in rows:
        table.writerow([f"{v:.8g}" if isinstance(v, float) else v for v in row.values()])
    return shown.getvalue()


def _json(by: str, lines: Sequence[Line], report: Report, head: dict[str, str]) -> str:
    content: dict[str, Any] = {**head, "corpus": report.corpus}
    if by != "corpus":
        content["texts"] = [
            {"line": line.number, "text": line.text}
            | ({} if line.source is None else {"source": line.source})
            | row
            for line, row in zip(lines, report.texts, strict=True)
        ]
    if by == "token":
        for text, some in zip(content["texts"], report.tokens, strict=True):
            text["by_token"] = some
    return _written(content)


def _written(content: dict[str, Any]) -> str:
    """As JSON."""
    return json.dumps(_finite(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """The same with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
