"""``fastplm prompt``: classify texts by the label words that a language model finds most probable.

    template + text + examples -> prompts -> distinct inputs, by length -> logits of the label's row
    -> log-probabilities of the label words -> classes, with and without calibration

A template has the fields ``{text}`` (or ``{text1}`` and ``{text2}``) and ``{label}``. A prompt is
the template with a text filled in. A decoder continues the part before ``{label}``. In place of
``{label}`` a masked language model and BART read a mask token, and T5 reads a sentinel.
"""

from __future__ import annotations

import json
import random
import string
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fastplm._checks import check_int
from fastplm.data import load_tokenizer
from fastplm.data._output import result
from fastplm.data.examples import Example, read_table, subset
from fastplm.errors import (
    ArgumentTypeError,
    DataError,
    about,
    check,
    check_choice,
    check_type,
    fail,
    message,
)
from fastplm.inference._batches import (
    around,
    batches,
    begun,
    evaluating,
    longest_input,
    padded,
    progress_bar,
)
from fastplm.inference._checkpoint import (
    announce,
    computing_results,
    head_of,
    load_model,
    warnings_said,
)
from fastplm.inference.score import start_token
from fastplm.inference.settings import CALIBRATIONS, PromptArguments
from fastplm.models._gpt import CausalModel
from fastplm.models._heads import CausalLM, MaskedLM
from fastplm.models._seq2seq import ConditionalGeneration
from fastplm.run.checkpoint import config_at
from fastplm.run.report import tsv
from fastplm.run.settings import BATCH_TOKENS

_WHERE = "prompt"
#: Texts without content, for contextual calibration (Zhao et al. 2021, §5).
CONTENT_FREE = ("N/A", "", "[MASK]")
_LABEL = "label"
#: The token that T5 reads in place of the label.
_SENTINEL = "<extra_id_0>"


@dataclass(frozen=True)
class Prompt:
    """How a text is presented to a language model.

    Args:
        template: a text with ``{label}`` and ``{text}``; for pairs ``{text1}`` and ``{text2}``.
        labels: {label: its words}; a word may have several tokens.
        examples: (texts, label) of the examples that come before the text (few-shot).
        separator: the text between two examples.
        premise: the prompt without a text, for PMI. Default: the template with an empty text.
    """

    template: str
    labels: Mapping[str, Sequence[str]]
    examples: Sequence[tuple[tuple[str, ...], str]] = ()
    separator: str = "\n\n"
    premise: str | None = None
    #: The names of the template's fields for texts.
    fields: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        try:
            names = [name for _, name, *_ in string.Formatter().parse(self.template) if name]
        except ValueError as error:
            names = [f"braces that do not fit ({error})"]
        texts = ("text",) if "text" in names else ("text1", "text2")
        fits = sorted(names) == sorted((_LABEL, *texts))
        expected = "{label} and {text}, or {label}, {text1} and {text2}, each once"
        fix = "Write {{ and }} for braces."
        check(fits, _WHERE, "template", f"places {sorted(names)}", expected, fix)
        object.__setattr__(self, "fields", texts)
        words = [word for of_one in self.labels.values() for word in of_one]
        shown = [text for known, _ in self.examples for text in known]
        one = {"separator": [self.separator], "premise": [self.premise or ""]}
        for argument, values in {"labels": words, "examples": shown, **one}.items():
            got = next((repr(value) for value in values if not isinstance(value, str)), "")
            fix = "Put it in quotation marks."
            check(not got, _WHERE, argument, got, "a text", fix, ArgumentTypeError)
        fits = len(self.labels) > 1 and all(self.labels.values()) and all(w.strip() for w in words)
        got = f"{len(self.labels)} labels and {len(words)} words"
        fix = 'Write {"label": ["word"], ...}.'
        check(fits, _WHERE, "labels", got, "two labels or more, each with a word", fix)
        premise = self.premise
        fits = premise is None or (premise.count("{label}") == 1 and "{text" not in premise)
        expected, fix = "a text with {label} once, and no {text}", 'Write "It was {label}.", say.'
        check(fits, _WHERE, "premise", repr(premise), expected, fix)
        for known, label in self.examples:
            check_choice(_WHERE, "examples", label, list(self.labels))
            self.check_texts("examples", known)

    def check_texts(self, argument: str, texts: Sequence[str]) -> None:
        """Check that there is a text for each field of the template."""
        got = f"{len(texts)} texts where the template has {len(self.fields)}"
        check(len(texts) == len(self.fields), _WHERE, argument, got, "as many", "Change either.")

    def around(self, texts: Sequence[str]) -> tuple[str, str]:
        """The two parts of the prompt of these texts: before the label and after it."""
        shown = [
            "".join(self._around(known, self.labels[label][0])) for known, label in self.examples
        ]
        before, after = self._around(texts)
        return self.separator.join([*shown, before]), after

    def without_text(self) -> tuple[str, str]:
        """``around`` for the premise of PMI, which has no text."""
        if self.premise is None:
            return self._around([""] * len(self.fields))
        before, _, after = self.premise.partition(f"{{{_LABEL}}}")
        return before, after

    def _around(self, texts: Sequence[str], label: str | None = None) -> tuple[str, str]:
        values = dict(zip(self.fields, texts, strict=True))
        parts, place = ["", ""], 0
        for literal, name, *_ in string.Formatter().parse(self.template):
            parts[place] += literal
            if name == _LABEL and label is None:
                place = 1
            elif name is not None:
                parts[place] += values.get(name, label or "")
        return parts[0], parts[1]


def read_prompts(path: str | Path, templates: Sequence[str] | None = None) -> list[Prompt]:
    """Read prompts from a JSON file with the fields of ``Prompt``, one for each template.

    ``examples`` are lists [text, label] or [text1, text2, label], and ``template`` is one or a
    list of several.

    Args:
        path: the file.
        templates: in place of those of the file, which then needs none.

    Raises:
        DataError: the file does not hold such a prompt.
        ArgumentValueError: a template or another field is wrong, or templates read other texts.
    """
    expected = 'JSON: {"template": "...", "labels": {"...": ["..."]}}'
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        content["labels"] = {
            name: [words] if isinstance(words, str) else list(words)
            for name, words in content["labels"].items()
        }
        content["examples"] = [
            (tuple(texts), label) for *texts, label in content.get("examples", [])
        ]
        given = content.pop("template", None) if templates is None else templates
        content.pop("template", None)
        if given is None or len(given) == 0:
            raise ValueError("no template")
        given = [given] if isinstance(given, str) else given
        prompts = [Prompt(template, **content) for template in given]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        fix = "See docs/prompting.md."
        got = f"{path} ({reason})"
        raise DataError(message(_WHERE, "prompt", got, expected, fix)) from error
    other = next((p for p in prompts if p.fields != prompts[0].fields), prompts[0])
    same, got = other is prompts[0], f"{prompts[0].template!r} and {other.template!r}"
    check(same, _WHERE, "template", got, "templates of the same texts", "Change one of them.")
    twice = [p.template for i, p in enumerate(prompts) if p in prompts[:i]]
    check(not twice, _WHERE, "template", f"{twice[:1]} twice", "each once", "Leave one out.")
    return prompts


class LabelScores(NamedTuple):
    """The log-probabilities of labels.

    Args:
        texts: fp64 [N, labels], the log-probability of each label, given each text.
        content_free: fp64 [labels], the logarithm of each label's mean probability given the
            ``CONTENT_FREE`` texts, where the probabilities of all labels are scaled to sum to 1.
        premise: fp64 [labels], the log-probability of each label, given the premise.
    """

    texts: np.ndarray
    content_free: np.ndarray
    premise: np.ndarray

    def chosen(self, calibration: str = "none") -> np.ndarray:
        """int64 [N], the label of each text.

        Args:
            calibration: "none" = the most probable label; "contextual" = probabilities are divided
                by those given content-free texts (Zhao et al. 2021, equation 1, with
                W = diag(p_cf)^-1 and b = 0); "pmi" = probabilities are divided by those given the
                premise: the pointwise mutual information of text and label (Holtzman et al. 2021,
                §3).
        """
        check_choice(_WHERE, "calibration", calibration, CALIBRATIONS)
        less = {"none": 0.0, "contextual": self.content_free, "pmi": self.premise}[calibration]
        return (self.texts - less).argmax(1)


def score_labels(
    model: Any,
    tokenizer: Any,
    prompt: Prompt,
    texts: Sequence[Sequence[str]],
    *,
    batch_tokens: int = BATCH_TOKENS,
    progress: bool = False,
) -> LabelScores:
    """The log-probability of each label, given each text.

    The score of a word with tokens ``t_1 … t_k`` is ``sum_i log p(t_i | prompt, t_1 … t_(i-1))``;
    in a masked language model all k tokens are masked at once. The probability of a label is the
    mean of the probabilities of its words.

    Args:
        model: a decoder (GPT, GPT-2), a masked language model, T5 or BART of ``fastplm.models``.
        tokenizer: the fast tokenizer of the model.
        prompt: template, label words and examples.
        texts: tuples of one text, or of two for a template of pairs. The end of a text is cut off
            if its prompt would be longer than the model takes.
        batch_tokens: the maximum number of tokens in a batch; it changes only speed and memory.
        progress: show a progress bar on stderr.

    Raises:
        ArgumentTypeError, ArgumentValueError: an argument does not fit.

    Source: Brown et al. 2020 (arXiv 2005.14165), §2; Schick & Schütze 2021 (arXiv 2001.07676), §3;
        Zhao et al. 2021 (arXiv 2102.09690); Holtzman et al. 2021 (arXiv 2104.08315).
    """
    for each in texts:
        prompt.check_texts("texts", each)
    check_int(_WHERE, "batch_tokens", batch_tokens, 1, 2**40, "Pass a number of tokens.")
    asked = _Asked(model, tokenizer, prompt)
    for each in [*texts, *([word] * len(prompt.fields) for word in CONTENT_FREE)]:
        asked.add(*asked.fitted(each))
    asked.add(*prompt.without_text())
    if asked.cut:
        line = f"{asked.cut:,} of {len(texts):,} texts were cut off: a prompt has {asked.limit}"
        warnings.warn(f"{line} tokens at most.", stacklevel=2)
    scores = asked.scores(batch_tokens, progress)
    got = f"a {type(model).__name__} whose probabilities are not numbers"
    fix = "Take a checkpoint from before its training diverged."
    finite = bool(np.isfinite(scores).all())
    check(finite, _WHERE, "model", got, "finite weights", fix, DataError)
    free = scores[len(texts) : -1]
    free = np.exp(free - np.logaddexp.reduce(free, axis=1, keepdims=True))
    return LabelScores(scores[: len(texts)], np.log(free.mean(0)), scores[-1])


# --- what a model is asked ------------------------------------------------------------------------

#: An input of the model: the ids of a decoder-only or masked model, or of the decoder; and those of
#: the encoder, none if there is none.
_Input = tuple[tuple[int, ...], tuple[int, ...]]
#: By index: a prompt, a label, a word of it.
_Word = tuple[int, int, int]


class _Asked:
    """The distinct inputs of all prompts and words, and what is looked up in their outputs.

    Words share an input if they need the same one: words of one token, and in a masked language
    model words with the same number of tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt: Prompt) -> None:
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt
        self.words = [(label, word) for label, words in prompt.labels.items() for word in words]
        self.paired = isinstance(model, ConditionalGeneration)
        causal = isinstance(model, CausalLM) and isinstance(model.base_model, CausalModel)
        known = CausalLM if causal else (ConditionalGeneration, MaskedLM)
        expected = "a language model of fastplm.models: of GPT, GPT-2, T5 or BART, or a masked one"
        fix = "Load it with AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSeq2SeqLM."
        check_type(_WHERE, "model", model, known, expected, fix)
        self.sentinel = self.paired and _SENTINEL in tokenizer.get_vocab()
        self.mark = "" if causal else _SENTINEL if self.sentinel else tokenizer.mask_token
        lacks = " without a mask token" if self.mark is None else ""
        expected, fix = "a fast one, with a mask token or T5's sentinels", "Take the checkpoint's."
        got = f"a {type(tokenizer).__name__}{lacks}"
        check(not lacks and tokenizer.is_fast, _WHERE, "tokenizer", got, expected, fix)
        before, _ = prompt.around(["\0"] * len(prompt.fields))
        reads_all = not causal or before.count("\0") == len(prompt.fields)
        expected = "{label} after the text, as a decoder reads only what is before it"
        check(reads_all, _WHERE, "template", repr(prompt.template), expected)
        #: How many tokens the tokenizer puts before a text, and after it.
        self.beginning, self.ending = map(len, around(tokenizer))
        self._check_words(before)
        self.limit = longest_input(tokenizer, model.config)
        self.cut = self.prompts = 0
        #: (row, token, whose it is) of each token that is looked up in the output of each input.
        self.inputs: dict[_Input, list[tuple[int, int, _Word]]] = {}

    def add(self, before: str, after: str) -> None:
        """Add a prompt: all words of all labels, between these two parts of the text."""
        for label, words in enumerate(self.prompt.labels.values()):
            for number, word in enumerate(words):
                tokens = self._word(before, word)
                given, first = self._input(before, after, tokens)
                whose = self.prompts, label, number
                looked_up = self.inputs.setdefault(given, [])
                looked_up += [(row, token, whose) for row, token in enumerate(tokens, first)]
        self.prompts += 1

    def _ids(self, text: str, special: bool = True) -> list[int]:
        return self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]

    def _word(self, before: str, word: str) -> list[int]:
        """The tokens of a word that follows this text."""
        space = " " if before.endswith(" ") and not self.sentinel else ""
        tokens = self._ids(space + word, special=False)
        got = f"the word {word!r}, of which the tokenizer makes nothing"
        check(len(tokens) > 0, _WHERE, "labels", got, "words with a token", "Change it.")
        return tokens

    def _check_words(self, before: str) -> None:
        """Check that the model can tell the words of different labels apart."""
        known: dict[tuple[int, ...], tuple[str, str]] = {}
        for label, word in self.words:
            tokens = tuple(self._word(before, word))
            if set(tokens) == {self.tokenizer.unk_token_id}:
                got = f"the word {word!r} of {label!r}, all of which the tokenizer reads as "
                got += f"{self.tokenizer.unk_token}, its token of unknown words"
                fix = "Choose another word, in the language and letters of the checkpoint."
                fail(_WHERE, "labels", got, "words that the tokenizer knows", fix)
            other, same = known.setdefault(tokens, (label, word))
            if other != label:
                shown = " ".join(self.tokenizer.convert_ids_to_tokens(tokens))
                got = f"the word {same!r} of {other!r} and {word!r} of {label!r}, which are the "
                got += f"same tokens: {shown}"
                expected = "different tokens for different labels, which are else equally likely"
                fail(_WHERE, "labels", got, expected, "Choose another word for one of them.")

    def _input(self, before: str, after: str, tokens: list[int]) -> tuple[_Input, int]:
        """The input for the tokens of a word, and the row of its output that predicts the first
        of them; the others follow."""
        source: tuple[int, ...] = ()
        if self.mark:
            encoded = self.tokenizer(before + self.mark + after, verbose=False)
            marked = encoded["input_ids"]
            if not self.paired:  # all tokens of the word are masked at once
                place = encoded.char_to_token(len(before))
                mask = [marked[place]] * len(tokens)
                return ((*marked[:place], *mask, *marked[place + 1 :]), ()), place
            source = tuple(marked)
        ids = self._before_word(before)
        return ((*ids, *tokens[:-1]), source), len(ids) - 1

    def _before_word(self, before: str) -> list[int]:
        """The ids that a decoder reads before the word."""
        if self.sentinel:
            start = self.model.config.decoder_start_token_id
            return [start, self.tokenizer.convert_tokens_to_ids(_SENTINEL)]
        ids = self._ids(before.rstrip(" "))
        ids = ids[: len(ids) - self.ending]  # what ends a text comes after the word
        if self.paired:
            return [self.model.config.decoder_start_token_id, *ids]
        start = start_token(self.model, self.tokenizer)
        if start is not None and self.beginning:
            return begun([start], ids[self.beginning :])
        if not ids and start is None:
            expected = "text before {label}, as the tokenizer has no token for the beginning"
            fail(_WHERE, "template", "none", expected, "Add some.")
        return ids if start is None else ids or [start]

    def fitted(self, texts: Sequence[str]) -> tuple[str, str]:
        """``around`` for these texts, which are cut off if they are too long."""
        texts, cut = list(texts), False
        while True:
            before, after = self.prompt.around(texts)
            longest = max(len(self._word(before, word)) for _, word in self.words)
            (ids, source), _ = self._input(before, after, [0] * longest)
            excess = max(len(ids), len(source)) - (self.limit or 1 << 40)
            if excess <= 0:
                self.cut += cut
                return before, after
            cut = True
            number = max(range(len(texts)), key=lambda i: len(texts[i]))
            options = {"add_special_tokens": False, "return_offsets_mapping": True}
            places = self.tokenizer(texts[number], verbose=False, **options)["offset_mapping"]
            got = f"{excess} tokens too many without any text"
            expected = f"room for a text in {self.limit} tokens, what this model takes"
            fix = "Give fewer examples, or shorter ones."
            check(len(places) > 0, _WHERE, "prompt", got, expected, fix)
            # The token of a trailing space may be empty and start at the end of the text.
            end = min(places[max(0, len(places) - excess)][0], len(texts[number]) - 1)
            texts[number] = texts[number][:end]

    def scores(self, batch_tokens: int, progress: bool) -> np.ndarray:
        """fp64 [prompts, labels]: the log-probabilities of labels."""
        given = list(self.inputs)
        lengths = np.array([len(ids) + len(source) for ids, source in given])
        words: dict[_Word, float] = {}
        total = int(lengths.sum())
        with evaluating(self.model), progress_bar(total, _WHERE, progress) as bar:
            for numbers in batches(lengths, batch_tokens):
                some = [given[i] for i in numbers.tolist()]
                inputs = self._batch(some)
                width = inputs["decoder_input_ids" if self.paired else "input_ids"].shape[1]
                asked = [
                    (number * width + row, token, whose)
                    for number, each in enumerate(some)
                    for row, token, whose in self.inputs[each]
                ]
                places, tokens, whose = zip(*asked, strict=True)
                rows, at = np.unique(places, return_inverse=True)
                inputs["output_rows"] = torch.from_numpy(rows).to(self.model.device)
                logits = self.model(**inputs).logits[:, 0]
                wide = torch.promote_types(logits.dtype, torch.float32)
                found = logits.log_softmax(1, dtype=wide).cpu()[at, tokens]
                for word, value in zip(whose, found.tolist(), strict=True):
                    words[word] = words.get(word, 0.0) + value
                bar.update(int(lengths[numbers].sum()))
        # The mean probability of a label's words.
        sizes = [len(of_one) for of_one in self.prompt.labels.values()]
        return np.array(
            [
                [
                    np.logaddexp.reduce([words[prompt, label, i] for i in range(size)])
                    - np.log(size)
                    for label, size in enumerate(sizes)
                ]
                for prompt in range(self.prompts)
            ]
        )

    def _batch(self, given: list[_Input]) -> dict[str, Any]:
        """The model's inputs, padded."""
        pad, device = self.model.config.pad_token_id, self.model.device
        ids, sources = zip(*given, strict=True)
        inputs = padded(ids, pad, device)
        if self.paired:
            of_decoder = {f"decoder_{name}": value for name, value in inputs.items()}
            inputs = padded(sources, pad, device) | of_decoder
        return inputs if self.mark and not self.paired else inputs | {"use_cache": False}


# --- the command ----------------------------------------------------------------------------------


def run_prompt(args: PromptArguments) -> str:
    """Run ``fastplm prompt``: classify the texts of a file. Returns the line of accuracies.

    Raises:
        FastplmError: a file, the model or a setting is wrong.
    """
    args = args.plan().with_models()
    out = None if args.out is None else Path(args.out)
    with computing_results(args, out):
        return _run_prompt(args, out)


def _run_prompt(args: PromptArguments, out: Path | None) -> str:
    prompts = read_prompts(args.prompt, args.template)
    examples = subset(_examples(args, args.data, prompts[0]), args.max_samples)
    if args.shots is not None and args.shots_data is not None:
        shots = _shots(_examples(args, args.shots_data, prompts[0]), args.shots, args.seed)
        known = [(e.texts, e.target) for e in shots]
        prompts = [replace(prompt, examples=known) for prompt in prompts]
    several, names = len(prompts) > 1, list(prompts[0].labels)
    with about(_WHERE, "model"):
        tokenizer: Any = load_tokenizer(args.model, needs=())
    head = head_of(config_at(_WHERE, "model", args.model))
    model = load_model(_WHERE, args.model, head, bf16=args.bf16)
    shown = f"{args.prompt}: {len(names)} labels, {len(prompts[0].examples)} examples shown"
    shown += f", {len(prompts)} templates" if several else ""
    announce(args, model, f"{len(examples):,} examples", prompt=shown)
    right = np.array([names.index(example.target) for example in examples])
    texts = [example.texts for example in examples]
    lines = []
    rows: list[list[str]] = []
    accuracies: dict[str, list[float]] = {kind: [] for kind in CALIBRATIONS}
    for number, prompt in enumerate(prompts, 1):
        with warnings_said():
            options: dict[str, Any] = {"batch_tokens": args.batch_tokens, "progress": True}
            scores = score_labels(model, tokenizer, prompt, texts, **options)
        chosen = {kind: scores.chosen(kind) for kind in CALIBRATIONS}
        for kind, found in chosen.items():
            accuracies[kind].append(float(np.mean(found == right)))
        line = "  ".join(f"{kind} {values[-1]:.4f}" for kind, values in accuracies.items())
        which = f"template {number}: {line}  {prompt.template!r}"
        lines.append(which if several else f"accuracy: {line}")
        for i, example in enumerate(examples):
            answers = [names[found[i]] for found in chosen.values()]
            logs = [f"{score:.6g}" for score in scores.texts[i]]
            rows.append([*([str(number)] * several), example.target, *answers, *logs])
    if out is not None:
        columns = ["label", *CALIBRATIONS, *(f"log p({name})" for name in names)]
        with result(out) as part:
            part.write_text(tsv([[*(["template"] * several), *columns], *rows]), encoding="utf-8")
    if several:
        spreads = "  ".join(f"{kind} {_spread(values)}" for kind, values in accuracies.items())
        lines.append(f"accuracy of {len(prompts)} templates: {spreads}")
    most_frequent = np.bincount(right).max() / len(right)
    lines[-1] += f"  ({len(right):,} texts; the most frequent label: {most_frequent:.4f})"
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    """Mean, standard deviation (n - 1 in its denominator), lowest and highest of several values."""
    deviation = np.std(values, ddof=1)
    return f"{np.mean(values):.4f} ± {deviation:.4f} ({min(values):.4f} to {max(values):.4f})"


def _examples(args: PromptArguments, path: str | Path, prompt: Prompt) -> list[Example]:
    """The examples of a file; an error if a label is not one of the prompt."""
    columns = (args.text_columns, args.label_column)
    with about(_WHERE, "data"):
        examples = read_table(path, *columns, counts=(len(prompt.fields),))
    expected = f"one of the prompt, {', '.join(prompt.labels)}"
    fix = "Add it to the labels of the prompt."
    for example in examples:
        got = f"{example.where}: the label {example.target!r}"
        check(example.target in prompt.labels, _WHERE, "data", got, expected, fix, DataError)
    return examples


def _shots(examples: list[Example], count: int, seed: int) -> list[Example]:
    """``count`` random examples in random order, about as many of each label."""
    order = torch.randperm(
        len(examples), generator=torch.Generator().manual_seed(seed), device="cpu"
    ).tolist()
    by_label: dict[str, list[Example]] = {}
    for i in order:
        by_label.setdefault(examples[i].target, []).append(examples[i])
    turns = (one for turn in zip_longest(*by_label.values()) for one in turn if one is not None)
    chosen = list(islice(turns, count))
    random.Random(seed).shuffle(chosen)
    return chosen
