"""ELMo against its formula, one sentence after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastplm.classic.elmo import ElmoConfig, ElmoForLanguageModeling, batch_of_words
from fastplm.classic.words import UNK, word_bytes
from fastplm.errors import ArgumentValueError

from .conftest import SENTENCES, WORDS


@pytest.fixture
def elmo():
    torch.manual_seed(0)
    sizes = {"filters": ((1, 4), (3, 6)), "projection": 8, "lstm_size": 12, "layers": 2}
    return ElmoForLanguageModeling(ElmoConfig(vocab_size=len(WORDS), **sizes)).double().eval()


def alone(model: ElmoForLanguageModeling, words: list[str]):
    """(layers [L + 1, T, 2 P], summed loss) of one sentence; the directions are independent."""
    words = ["<s>", *words, "</s>"]
    tokens = model.characters(word_bytes(words))
    ids = torch.tensor([WORDS.ids.get(word, UNK) for word in words])
    sides, loss = [], torch.zeros((), dtype=torch.float64)
    for layers, turn in ((model.forward_layers, False), (model.backward_layers, True)):
        states = [tokens.flip(0) if turn else tokens]
        for number, layer in enumerate(layers):
            out = layer(states[-1][None])[0][0]
            states.append(out + states[-1] if number else out)
        logits = model.softmax(states[-1][:-1])
        targets = ids.flip(0)[1:] if turn else ids[1:]
        loss = loss + F.cross_entropy(logits, targets, reduction="sum")
        sides.append([state.flip(0) if turn else state for state in states])
    return torch.stack([torch.cat(pair, -1) for pair in zip(*sides, strict=True)]), loss


def test_elmo_equals_its_formula(elmo):
    batch = batch_of_words(SENTENCES, WORDS)
    outputs = elmo(**batch)
    total, count = 0.0, 0
    for index, words in enumerate(SENTENCES):
        layers, loss = alone(elmo, words)
        found = torch.stack([layer[index, : len(words) + 2] for layer in outputs.layers])
        torch.testing.assert_close(found, layers)
        total, count = total + loss, count + 2 * (len(words) + 1)
    torch.testing.assert_close(outputs.loss.double(), total / count)
    vectors = elmo.embed(SENTENCES)
    torch.testing.assert_close(vectors[1], alone(elmo, SENTENCES[1])[0][:, 1:-1])


def test_elmo_reads_the_letters_of_unknown_words(elmo):
    one, two = elmo.embed([["zoo"], ["zebra"]])
    assert not torch.equal(one, two)
    with pytest.raises(ArgumentValueError, match="without words"):
        elmo.embed([[]])
