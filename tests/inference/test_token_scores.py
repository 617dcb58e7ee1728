"""Scores of tokens against plain loops over the parent classes, one text after another."""

from __future__ import annotations

import pytest
import torch

from fastplm.inference import _token_scores
from fastplm.inference._token_scores import Part, token_scores

from .conftest import DECODERS, MASKED, hold

TEXTS = ["the lazy foxes jump", "the lazy", "the lazy dogs", "a", "the lazy foxes", "over a fox"]


def parts_of(tokenizer, texts=TEXTS):
    """All tokens of each text but the first one, and, once more, the last one alone."""
    found = []
    for text in texts:
        ids = tokenizer("x " + text, add_special_tokens=False)["input_ids"]
        found += [Part(ids, 1, len(ids)), Part(ids, len(ids) - 1, len(ids))]
    return found


@torch.no_grad()
def loop(parent, tokenizer, parts, masked):
    """[n, 2] of each part: the log-probability of each token, and of the most probable one."""
    found = []
    for ids, first, end in parts:
        rows = []
        for place in range(first, end):
            read = torch.tensor([ids if masked else ids[:place]])
            if masked:
                read[0, place] = tokenizer.mask_token_id
            options = {} if masked else {"use_cache": False}
            logits = parent(read, **options).logits[0, place if masked else -1].log_softmax(-1)
            rows.append(torch.stack([logits[ids[place]], logits.max()]))
        found.append(torch.stack(rows))
    return found


@pytest.mark.parametrize("batch_tokens", [16, 1000])
@pytest.mark.parametrize("name", [*DECODERS, *MASKED])
def test_scores_of_a_loop(made, name, batch_tokens):
    model, parent, tokenizer = made(name)
    masked, parts = name in MASKED, parts_of(tokenizer)
    if not masked:  # one whose token is the most probable one, and others that are not
        likely = parent(torch.tensor([parts[0].ids])).logits[0, -1].argmax().item()
        for token in (likely, likely - 1):
            parts.append(Part([*parts[0].ids, token], len(parts[0].ids), len(parts[0].ids) + 1))

    def ours(model):
        found = token_scores(model, tokenizer, parts, batch_tokens)
        return torch.tensor([value for each in found for value, _ in each], dtype=model.dtype)

    def theirs(parent):
        return torch.cat(loop(parent, tokenizer, parts, masked))[:, 0]

    flags = [
        best for each in token_scores(model, tokenizer, parts, batch_tokens) for _, best in each
    ]
    both = torch.cat(loop(parent, tokenizer, parts, masked))
    assert flags == (both[:, 0] == both[:, 1]).tolist()
    assert masked or {*flags} == {True, False}
    hold(model, parent, ours, theirs)


def test_what_parts_have_in_common_is_read_once(made, monkeypatch):
    """A decoder reads one context once for all next tokens, and no beginning of another text."""
    model, _, tokenizer = made("GPT2LMHeadModel")
    batches, compute = [], _token_scores._compute

    def recorded(model, tokenizer, readings):
        batches.append(readings)
        compute(model, tokenizer, readings)

    monkeypatch.setattr(_token_scores, "_compute", recorded)
    context = tokenizer("the lazy dogs", add_special_tokens=False)["input_ids"]
    count = len(context)
    parts = [Part([*context, token], count, count + 1) for token in range(5, 9)]
    parts += [parts[0], Part(context, 1, count), Part(context[:-1], 1, count - 1)]
    found = token_scores(model, tokenizer, parts, 1000)
    (readings,) = batches
    # Of the four choices, the first one has the row; the context alone has its own rows.
    assert [len(each.ids) for each in readings] == [count, count - 1]
    assert [len(each.rows) for each in readings] == [1, count - 1]
    assert found[4] == found[0] and found[6] == found[5][:-1]
    assert len({value for ((value, _),) in found[:4]}) == 4


def test_a_masked_text_is_read_once(made, monkeypatch):
    model, _, tokenizer = made("BertForMaskedLM")
    sizes, compute = [], _token_scores._compute

    def recorded(model, tokenizer, readings):
        sizes.append(len(readings))
        compute(model, tokenizer, readings)

    monkeypatch.setattr(_token_scores, "_compute", recorded)
    ids = tokenizer("the lazy dogs")["input_ids"]
    whole, last = Part(ids, 1, len(ids) - 1), Part(ids, len(ids) - 2, len(ids) - 1)
    found = token_scores(model, tokenizer, [last, whole, whole], 1000)
    assert sum(sizes) == len(ids) - 2
    assert found[0] == found[1][-1:] and found[1] == found[2]
    assert token_scores(model, tokenizer, [], 1000) == []
