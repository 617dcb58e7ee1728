"""Collators of masked language modelling against that of Transformers, on real text.

``collator`` is the whole call, from samples to a batch; ``masks`` the masking alone; ``corrupt`` is
the part that a run on a GPU moves to the device. Transformers' inputs are made before: for whole
words the offsets of the tokens, with which it only ever puts [MASK]. In ``transformers, given
specials`` the mask of special tokens, too, is made before, which it otherwise makes itself.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch

from fastplm import ops, use_backend
from fastplm.data import DataCollatorForMaskedTokens, embedded_corpus, train_tokenizer
from fastplm.data._folder import default_cache
from fastplm.data.words import word_ids, word_starts
from harness import Case, default_device

GPU = default_device().type == "cuda"
ROWS, LENGTH = 32, 512


@functools.cache
def corpus():
    return embedded_corpus()


@functools.cache
def tokenizer():
    """A vocabulary so small that it cuts as many words as BERT's does in unseen text."""
    return train_tokenizer(corpus(), 2000, default_cache() / "benchmarks")


@functools.cache
def encodings() -> list[dict[str, Any]]:
    """Full rows of text, with the inputs of every collator."""
    rows: list[dict[str, Any]] = []
    for document in corpus():
        encoded = tokenizer()(
            document,
            truncation=True,
            max_length=LENGTH,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_special_tokens_mask=True,
        )
        for i, ids in enumerate(encoded["input_ids"]):
            if len(ids) == LENGTH:
                rows.append(
                    {
                        "input_ids": ids,
                        "special_tokens_mask": encoded["special_tokens_mask"][i],
                        "offset_mapping": [list(pair) for pair in encoded["offset_mapping"][i]],
                        "word_ids": [-1 if w is None else w for w in encoded.word_ids(i)],
                    }
                )
        if len(rows) >= ROWS:
            return rows[:ROWS]
    raise RuntimeError("the corpus is too small")


def samples(convert, *keys):
    return [{key: convert(row[key]) for key in keys} for row in encodings()]


def stacked(key):
    return torch.tensor([row[key] for row in encodings()])


def make_samples(convert, device):
    return {
        "plain": samples(convert, "input_ids"),
        "given_specials": samples(convert, "input_ids", "special_tokens_mask"),
        "given_offsets": samples(convert, "input_ids", "special_tokens_mask", "offset_mapping"),
    }


def make_tensors(device):
    return {
        "input_ids": stacked("input_ids"),
        "special": stacked("special_tokens_mask"),
        "offsets": stacked("offset_mapping"),
    }


def make_batch(rows, device):
    batch = ours("token").pad(samples(torch.tensor, "input_ids"))
    batch["sample_index"] = torch.arange(ROWS)
    return {
        "batch": {
            key: torch.cat([value] * (rows // ROWS)).to(device) for key, value in batch.items()
        }
    }


@functools.cache
def ours(unit):
    return DataCollatorForMaskedTokens(tokenizer(), unit=unit)


@functools.cache
def theirs(whole_words):
    from transformers import DataCollatorForLanguageModeling

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns that whole words get nothing but [MASK]
        return DataCollatorForLanguageModeling(tokenizer(), whole_word_mask=whole_words)


def on_reference(function):
    @functools.wraps(function)
    def call(**inputs):
        with use_backend("eager"):
            return function(**inputs)

    return call


def collate(unit):
    return lambda plain, **_: ours(unit)(plain)


def collate_theirs(whole_words, key):
    return lambda **inputs: theirs(whole_words)(inputs[key])


def corrupt(unit):
    return lambda batch: ours(unit).corrupt(batch)


@functools.cache
def facts():
    """The facts that a collator looks up once: vocabulary, mask, special tokens, word starts."""
    special_ids = torch.tensor(sorted(tokenizer().all_special_ids))
    return len(tokenizer()), tokenizer().mask_token_id, special_ids, word_starts(tokenizer())


def masks(unit):
    def call(input_ids, **_):
        vocab_size, mask_token_id, special_ids, starts = facts()
        return ops.mask_tokens(
            input_ids,
            vocab_size=vocab_size,
            mask_token_id=mask_token_id,
            special_ids=special_ids,
            unit=unit,
            word_ids=None if unit == "token" else word_ids(input_ids, starts),
            seed=0,
        )

    return call


def masks_theirs(whole_words):
    def call(input_ids, special, offsets):
        offsets = offsets if whole_words else None
        return theirs(whole_words).torch_mask_tokens(input_ids.clone(), special, offsets)

    return call


def chi_square_of_two_degrees(observed, shares):
    """The probability that chance alone puts the counts so far from the shares."""
    expected = [sum(observed) * share for share in shares]
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return math.exp(-statistic / 2)


def assert_right(unit, variant, eager, inputs):
    """Checks the reference's bits, the share of every row, 80/10/10, and that words are whole."""
    torch.manual_seed(0)
    got = variant(**inputs)
    torch.manual_seed(0)
    expected = eager(**inputs)
    if isinstance(got, ops.MaskedTokens):
        got, expected = got._asdict(), expected._asdict()
    assert got.keys() == expected.keys()
    for key in got:
        assert torch.equal(got[key], expected[key]), f"{key} differs from the reference"

    original = stacked("input_ids")
    corrupted = got["input_ids"].cpu()[:ROWS]
    positions = got.get("masked_positions", got.get("positions")).cpu()
    positions = positions[(positions >= 0) & (positions < original.numel())]
    chosen = torch.zeros(original.numel(), dtype=torch.bool)
    chosen[positions] = True
    chosen = chosen.view(original.shape)
    assert torch.equal(corrupted[~chosen], original[~chosen]), "a token was touched unchosen"
    maskable = stacked("special_tokens_mask") == 0
    assert not (chosen & ~maskable).any(), "a special token was chosen"
    # Every row has enough words of one token, so that a choice always fits the last place.
    assert torch.equal(chosen.sum(1), (maskable.sum(1) * 15 + 50) // 100), "another share"
    if unit != "token":
        same = stacked("word_ids")[:, 1:] == stacked("word_ids")[:, :-1]
        assert same.any(), "all words are single tokens: that shows nothing"
        assert not (same & (chosen[:, 1:] != chosen[:, :-1])).any(), "a word in pieces"
    masked = int((corrupted[chosen] == tokenizer().mask_token_id).sum())
    kept = int((corrupted[chosen] == original[chosen]).sum())
    counts = masked, kept, int(chosen.sum()) - masked - kept
    assert chi_square_of_two_degrees(counts, (0.8, 0.1, 0.1)) > 0.001, f"{counts}, not 80/10/10"


def case(label, unit, make, variants, rows=ROWS):
    fused, *others = variants.items()
    return Case(
        op="collators",
        label=f"{label} {rows}x{LENGTH}, {unit}",
        make=make,
        make_small=make,
        variants={"eager": on_reference(fused[1]), **dict([fused, *others])},
        gate=functools.partial(assert_right, unit),
        # Reads ids, and writes ids and labels.
        bytes=rows * LENGTH * 8 * 3,
        tokens=rows * LENGTH,
    )


def collator_cases(name, convert):
    make = functools.partial(make_samples, convert)
    yield case(
        f"collator, {name}",
        "token",
        make,
        {
            "fastplm": collate("token"),
            "transformers": collate_theirs(False, "plain"),
            "transformers, given specials": collate_theirs(False, "given_specials"),
        },
    )
    yield case(
        f"collator, {name}",
        "word",
        make,
        {"fastplm": collate("word"), "transformers": collate_theirs(True, "given_offsets")},
    )
    yield case(f"collator, {name}", "ngram", make, {"fastplm": collate("ngram")})


def cases():
    if GPU:
        for unit in ("token", "word", "ngram"):
            make = functools.partial(make_batch, 8 * ROWS)
            yield case("corrupt", unit, make, {"fastplm": corrupt(unit)}, 8 * ROWS)
        return
    yield from collator_cases("lists", list)
    yield from collator_cases("tensors", torch.tensor)
    for unit, whole_words in (("token", False), ("word", True)):
        variants = {"fastplm": masks(unit), "transformers": masks_theirs(whole_words)}
        yield case("masks", unit, make_tensors, variants)
    yield case("masks", "ngram", make_tensors, {"fastplm": masks("ngram")})


CASES = list(cases())


def test_collators(case, bench):
    bench(case, "forward")
