"""Skip-thoughts and Quick-thoughts against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fastplm.classic.sentences import (
    QuickThoughtsModel,
    SkipThoughtsModel,
    ThoughtsConfig,
    neighbour_loss,
    pad,
)
from fastplm.classic.words import PAD

from .conftest import SENTENCES, WORDS

SMALL = ThoughtsConfig(vocab_size=len(WORDS), embedding_size=6, hidden_size=10)


def test_skip_thoughts_equals_its_formula():
    torch.manual_seed(0)
    model = SkipThoughtsModel(SMALL).double()
    ids = [*map(WORDS.encode, SENTENCES)]
    before, after = [[PAD], ids[0], ids[1]], [ids[1], ids[2], [PAD]]
    loss = model(pad(ids), previous=pad(before), next=pad(after)).loss
    total, count = 0.0, 0
    for own, *around in zip(ids, before, after, strict=True):
        _, vector = model.encoder.gru(model.encoder.embedding(torch.tensor([own])))
        for decoder, other in zip(model.decoders, around, strict=True):
            if other == [PAD]:
                continue
            read = model.encoder.embedding(torch.tensor(other[:-1]))
            states, _ = decoder(torch.cat((read, vector[0].expand(len(read), -1)), -1)[None])
            target = torch.tensor(other[1:])
            total += F.cross_entropy(model.softmax(states[0]), target, reduction="sum")
            count += len(target)
    torch.testing.assert_close(loss.double(), total / count)


def test_skip_thoughts_of_a_batch_without_neighbours():
    torch.manual_seed(0)
    model = SkipThoughtsModel(SMALL)
    ids, none = pad([WORDS.encode(["the", "cat"])] * 2), pad([[PAD]] * 2)
    loss = model(ids, previous=none, next=none).loss
    loss.backward()
    assert loss == 0 and all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())


def test_quick_thoughts_by_hand():
    scores = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    begins = torch.tensor([True, False, True, False])  # two documents of two sentences
    total = 0.0
    for i, j in ((0, 1), (1, 0), (2, 3), (3, 2)):
        others = [scores[i, k].exp() for k in range(4) if k != i]
        total -= math.log(scores[i, j].exp() / sum(others))
    assert neighbour_loss(scores, begins).item() == pytest.approx(total / 4, rel=1e-5)
    # A batch without neighbours has gradients of 0, not NaN.
    free = scores.clone().requires_grad_()
    neighbour_loss(free, torch.ones(4, dtype=torch.bool)).backward()
    assert free.grad.eq(0).all()


def test_vectors_do_not_depend_on_padding():
    torch.manual_seed(0)
    for kind in (SkipThoughtsModel, QuickThoughtsModel):
        model = kind(SMALL).double()
        texts = [" ".join(words) for words in SENTENCES]
        together = model.embed(texts, WORDS)
        for text, vector in zip(texts, together, strict=True):
            torch.testing.assert_close(model.embed([text], WORDS)[0], vector)
