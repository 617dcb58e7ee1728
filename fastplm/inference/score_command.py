"""``fastplm score``: the scores of a file of texts, as a table or as JSON."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fastplm.data import load_tokenizer
from fastplm.data._folder import say
from fastplm.data._output import result
from fastplm.data.minimal_pairs import read_pairs, read_published, some_of_each
from fastplm.data.sources import texts_of
from fastplm.errors import DataError, about
from fastplm.inference._batches import progress_bar
from fastplm.inference._checkpoint import (
    announce,
    check_numbers,
    computing_results,
    head_of,
    load_encoder,
    load_model,
    warnings_said,
)
from fastplm.inference.bertscore import bert_score
from fastplm.inference.minimal_pairs import Accuracy, draw, minimal_pairs, published_means
from fastplm.inference.score import TextScore, log_likelihood, perplexity, pseudo_log_likelihood
from fastplm.inference.score_settings import METHODS, PAIRS, ScoreArguments
from fastplm.models._heads import CausalLM
from fastplm.run.checkpoint import JOINT, config_at, kind_of
from fastplm.run.report import counted, drawn, tsv

#: The encoder-decoders that have learned to fill in what is masked.
_INFILLING = ("bart", "t5")
#: Names and values: a row of a table, or an object of JSON.
Row = dict[str, Any]


class Line(NamedTuple):
    """A line of the file: its number from 1 on, its text, and what stands before a tab or None."""

    number: int
    text: str
    source: str | None


class Report(NamedTuple):
    """What a metric finds of each text, of each token of each text, and of all texts."""

    texts: list[Row]
    tokens: list[list[Row]]
    corpus: Row
    cut: int = 0  # how many texts were cut


def score_file(args: ScoreArguments) -> str:
    """Score a file; returns the results, or nothing if they are written to a file.

    Raises:
        FastplmError: a file, the model or a setting is wrong.
    """
    args = args.plan().with_models()
    out = None if args.out is None else Path(args.out)
    picture = out.with_suffix(".png") if out is not None and args.picture else None
    with computing_results(args, out, picture):
        rows, content = _of_pairs(args, picture) if args.metric == PAIRS else _of_texts(args)
        text = _as_json(args, content) if args.format == "json" else _as_table(rows)
        if out is None:
            return text
        with result(out) as part:
            part.write_text(text, encoding="utf-8")
        say(f"written to {out}")
        return ""


# --- texts ----------------------------------------------------------------------------------------


def _of_texts(args: ScoreArguments) -> tuple[list[Row], Row]:
    """The rows of a table, and the same as JSON."""
    config = config_at("score", "model", args.model)
    default = "pseudo-log-likelihood" if head_of(config) == "MaskedLM" else "log-likelihood"
    metric = args.metric or default
    able = {default, "bertscore"}
    able |= {"pseudo-log-likelihood"} if config.model_type in _INFILLING else set()
    fix = "Leave the option out."
    expected = f"{default}, the one for a {config.model_type} model of this kind"
    args.check("metric", metric in able, expected, fix)
    lines = read_lines(args, paired=metric == "log-likelihood" and config.is_encoder_decoder)
    begun = time.perf_counter()
    if metric == "bertscore":
        report = _bertscore(args, lines)
    else:
        report = _likelihood(args, lines, config, pseudo=metric != "log-likelihood")
    seconds = time.perf_counter() - begun
    check_numbers(args, not any(math.isnan(value) for value in report.corpus.values()))
    if report.cut:
        say(f"texts longer than the model takes, cut: {report.cut} of {len(lines)}")
    numbers = report.corpus.items()
    shown = ", ".join(f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v:,}" for k, v in numbers)
    say(f"{shown}; {seconds:.1f} s")
    content: Row = {"metric": metric}
    if metric == "pseudo-log-likelihood":
        content["method"] = args.method or METHODS[0]
    content["corpus"] = report.corpus
    if args.by == "corpus":
        return [report.corpus], content
    found = report.tokens if args.by == "token" else [[row] for row in report.texts]
    each = zip(lines, found, strict=True)
    rows = [{"line": line.number, **row} for line, some in each for row in some]
    content["texts"] = [
        {"line": line.number, "text": line.text}
        | ({} if line.source is None else {"source": line.source})
        | row
        | ({"by_token": some} if args.by == "token" else {})
        for line, row, some in zip(lines, report.texts, found, strict=True)
    ]
    return rows, content


def read_lines(args: ScoreArguments, *, paired: bool) -> list[Line]:
    """The lines of a file, or the rows of a table, that are not blank.

    If they are ``paired``, a tab may part a source from its text: in all lines, or in none.
    """
    lines: list[Line] = []
    blank = 0
    with about("score", "data"):
        all_texts = [*texts_of(args.data, lines=paired)]
    for number, text in all_texts:
        if text is None or not text.strip():
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


def _likelihood(args: ScoreArguments, lines: list[Line], config: Any, *, pseudo: bool) -> Report:
    causal = not config.is_encoder_decoder
    expected, fix = "none, as only pseudo-log-likelihood masks tokens", "Leave it out."
    args.check("method", pseudo or args.method is None, expected, fix)
    args.check("bos", causal and not pseudo or not args.bos, "a GPT or GPT-2", fix, "another model")
    needs = ("mask",) if pseudo and causal else ()  # T5 has a sentinel
    with about("score", "model"):
        tokenizer: Any = load_tokenizer(args.model, needs=needs)
    model = load_model("score", args.model, head_of(config))
    announce(args, model, counted(len(lines), "text"))
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
    with progress_bar(None, "score", True) as bar, _precision(args, model):
        scores = metric(model, tokenizer, texts, progress=_shown_in(bar), **options)
    prefix = "pseudo_" if pseudo else ""
    names = "tokens", f"{prefix}log_likelihood", f"{prefix}perplexity"

    def row(scores: Sequence[TextScore]) -> Row:
        total = math.fsum(score.sum for score in scores)
        values = sum(len(score.tokens) for score in scores), total, perplexity(scores)
        return dict(zip(names, values, strict=True))

    def by_token(score: TextScore) -> list[Row]:
        each = zip(score.tokens, score.log_probs.tolist(), strict=True)
        return [{"token": token, "log_prob": value} for token, value in each]

    return Report(
        [row([score]) for score in scores],
        [by_token(score) for score in scores],
        {"texts": len(scores), **row(scores)},
        sum(score.truncated for score in scores),
    )


def _bertscore(args: ScoreArguments, lines: list[Line]) -> Report:
    files = [[(text or "").strip() for _, text in texts_of(path)] for path in args.references or ()]
    places = {number: place for place, (number, _) in enumerate(texts_of(args.data))}
    for path, texts in zip(args.references or (), files, strict=True):
        got = f"{path}, a file of {len(texts)} lines"
        fix = "Give the references line by line."
        expected = f"{len(places)} lines, as --data has"
        args.check("references", len(texts) == len(places), expected, fix, got, DataError)
    references = [[texts[places[line.number]] for texts in files] for line in lines]
    blank = sum(not text for of_line in references for text in of_line)
    say(f"references without a text, which score 0: {blank}" if blank else "")
    layers = (-1 if args.layer is None else args.layer,)
    model, tokenizer = load_encoder("score", args.model, layers)
    announce(args, model, counted(len(lines), "text"))
    names = ("idf", "layer", "baseline", "batch_tokens")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    texts = [line.text for line in lines]
    with warnings_said(), _precision(args, model):
        score = bert_score(texts, references, model, tokenizer, progress=True, **options)
    rows = zip(*(part.tolist() for part in score), strict=True)
    means = {name: float(part.mean()) for name, part in score._asdict().items()}
    found = [dict(zip(score._fields, row, strict=True)) for row in rows]
    return Report(found, [], {"texts": len(lines), **means})


# --- minimal pairs --------------------------------------------------------------------------------


def _of_pairs(args: ScoreArguments, picture: Path | None) -> tuple[list[Row], Row]:
    """The same of minimal pairs: their accuracies, or their scores."""
    joint, fix = kind_of(args.model) == JOINT, "Leave the option out."
    expected = f"nothing with {args.model}, a checkpoint of one model"
    args.check("part", joint or args.part is None, expected, fix)
    config = config_at("score", "model", args.model, part=args.part)
    with about("score", "data"):
        pairs = some_of_each(read_pairs(args.data), args.max_pairs)
    published = {} if args.published is None else read_published(args.published)
    taken = [name for name in next(iter(published.values()), {}) if name in Accuracy._fields]
    got, fix = f"{args.published}, with a column {', '.join(taken)}", "Rename it."
    expected = "a column for each system, and none called as one of the result"
    args.check("published", not taken, expected, fix, got, DataError)
    there = not published or any(pair.paradigm in published for pair in pairs)
    got, fix = f"{args.published}, with no UID of {args.data}", "Check both files."
    args.check("published", there, "rows for the same paradigms", fix, got, DataError)
    with about("score", "model"):
        tokenizer: Any = load_tokenizer(args.model, needs=())
    discriminates = (config.architectures or [""])[0] == "ElectraForPreTraining"
    head = "PreTraining" if discriminates else head_of(config)
    model = load_model("score", args.model, head, part=args.part)
    expected, fix = f"false with a {type(model).__name__}", "Leave it out."
    args.check("no_bos", isinstance(model, CausalLM) or not args.no_bos, expected, fix)
    names = ("method", "normalize", "batch_tokens", "truncate")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    announce(args, model, counted(len(pairs), "pair"))
    begun = time.perf_counter()
    with progress_bar(None, "score", True, "sentences") as bar, _precision(args, model):
        options |= {"bos": not args.no_bos, "progress": _shown_in(bar)}
        scores = minimal_pairs(model, tokenizer, pairs, **options)
    seconds = time.perf_counter() - begun
    check_numbers(args, bool((scores.good + scores.bad).isfinite().all()))
    if scores.truncated:
        say(f"distinct sentences longer than the model takes, cut: {scores.truncated}")
    found, others = scores.accuracies(), published_means(scores, published)
    all_of, beside = found[0], [(name, of[0]) for name, of in others.items() if of[0] is not None]
    known = ", ".join(f"{name} {value:.3f}" for name, value in beside)
    say(
        f"accuracy {all_of.accuracy:.3f} (95 % interval {all_of.low:.3f} to {all_of.high:.3f}) of "
        f"{counted(all_of.pairs, 'pair')}, {counted(all_of.paradigms, 'paradigm')}, "
        f"{counted(all_of.ties, 'tie')}, by {scores.scorer}; "
        f"{f'published: {known}; ' if known else ''}{seconds:.1f} s"
    )
    if picture is not None:

        def paint() -> None:
            with result(picture) as part:
                folder = Path(args.model).resolve()  # OUT/model, OUT/discriminator …
                name = f"{folder.parent.name}/{folder.name}".removesuffix("/model")
                draw(part, f"minimal pairs, {name}", found, others)

        if drawn(picture, paint):
            say(f"drawn as {picture}")
    rows = [
        row._asdict() | {system: of[i] for system, of in others.items()}
        for i, row in enumerate(found)
        if args.by != "corpus" or row.level == "overall"
    ]
    content: Row = {"metric": PAIRS, "scorer": scores.scorer, "accuracies": rows}
    if args.by == "pair":
        each = zip(pairs, scores.good.tolist(), scores.bad.tolist(), strict=True)
        content["pairs"] = rows = [
            {"paradigm": pair.paradigm, "number": number, "good": good, "bad": bad}
            | {"correct": int(good > bad), "sentence_good": pair.good, "sentence_bad": pair.bad}
            for number, (pair, good, bad) in enumerate(each, 1)
        ]
    return rows, content


# --- what is shown --------------------------------------------------------------------------------


def _shown_in(bar: Any) -> Callable[[int, int], None]:
    """What shows (done, all) in a bar of progress."""

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return show


def _precision(args: ScoreArguments, model: Any) -> Any:
    return torch.autocast(model.device.type, torch.bfloat16, enabled=args.bf16)


def _as_table(rows: list[Row]) -> str:
    numbers = [[f"{v:.8g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    return tsv([list(rows[0]) if rows else ["line"], *numbers])


def _as_json(args: ScoreArguments, content: Row) -> str:
    """One object, with null for numbers that JSON does not have."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [finite(inner) for inner in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    content = finite({"model": str(args.model), "data": str(args.data), **content})
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
