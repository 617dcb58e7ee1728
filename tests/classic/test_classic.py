"""fastplm.classic: ELMo, Skip-thoughts, Quick-thoughts and word2vec against plain formulas."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F

from fastplm import cli
from fastplm.classic import train as module
from fastplm.classic.elmo import ElmoConfig, ElmoForLanguageModeling, batch_of_words
from fastplm.classic.sentences import (
    QuickThoughtsModel,
    SkipThoughtsModel,
    ThoughtsConfig,
    neighbour_loss,
    pad,
)
from fastplm.classic.settings import SYSTEMS, ClassicArguments
from fastplm.classic.train import classic
from fastplm.classic.words import BEGIN, END, PAD, UNK, Sentences, Words, word_bytes
from fastplm.errors import ArgumentValueError, DataError, TooLittleTextError

SENTENCES = [["the", "cat", "sat"], ["a", "dog", "ran", "to", "the", "zoo"], ["stop"]]
WORDS = Words(["<pad>", "<unk>", "<s>", "</s>", "the", "cat", "sat", "a", "dog", "ran", "to"])
SMALL = ThoughtsConfig(vocab_size=len(WORDS), embedding_size=6, hidden_size=10)


@pytest.fixture
def elmo():
    torch.manual_seed(0)
    sizes = {"filters": ((1, 4), (3, 6)), "projection": 8, "lstm_size": 12, "layers": 2}
    return ElmoForLanguageModeling(ElmoConfig(vocab_size=len(WORDS), **sizes)).double().eval()


# --- words ----------------------------------------------------------------------------------------


def test_vocabulary():
    words = Words.train(["b a, b c", "c a b"], size=7)
    assert words.names == ["<pad>", "<unk>", "<s>", "</s>", "b", "a", "c"]
    assert words.encode("a zebra, b") == [BEGIN, 5, UNK, UNK, 4, END]
    assert words.encode("a b c a", room=4) == [BEGIN, 5, 4, END]
    with pytest.raises(TooLittleTextError):
        Words.train([" \n"], size=7)


def test_vocabulary_on_disk(tmp_path):
    WORDS.save(tmp_path)
    assert Words.load(tmp_path).names == WORDS.names
    (tmp_path / "words.json").write_text('["a", "b"]')
    with pytest.raises(DataError, match="begin with <pad>"):
        Words.load(tmp_path)
    with pytest.raises(DataError, match="fastplm classic"):
        Words.load(tmp_path / "none")


def test_word_bytes():
    rows = word_bytes(["hi", "ü", "x" * 60, "<s>", "</s>", "<pad>"]).tolist()
    assert rows[0] == [258, 104, 105, 259, *[260] * 46]
    assert rows[1][:4] == [258, 0xC3, 0xBC, 259]
    assert rows[2] == [258, *[ord("x")] * 48, 259]
    assert rows[3][:3] == [258, 256, 259] and rows[4][:3] == [258, 257, 259]
    assert rows[5] == [260] * 50


def test_sentences():
    found = Sentences(["One two. Three!\nFour five six seven.", "\n", "Eight."], length=3)
    assert found.words == [["One", "two", "."], ["Three", "!"], ["Four", "five", "six"],
                           ["Eight", "."]]  # fmt: skip
    assert found.begins == [True, False, False, True] and found.cut == 2
    with pytest.raises(TooLittleTextError, match="four at least"):
        Sentences(["One. Two."], length=3)


# --- ELMo -----------------------------------------------------------------------------------------


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


# --- sentence vectors -----------------------------------------------------------------------------


def test_skip_thoughts_equals_its_formula():
    torch.manual_seed(0)
    model = SkipThoughtsModel(SMALL).double()
    ids = [WORDS.encode(" ".join(words)) for words in SENTENCES]
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
    ids, none = pad([WORDS.encode("the cat")] * 2), pad([[PAD]] * 2)
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


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("classic") / "text.txt"
    nouns, verbs = "river house teacher garden".split(), "follows carries remembers".split()
    lines = [f"The {nouns[i % 4]} {verbs[i % 3]} the {nouns[(i + 1) % 4]}." for i in range(240)]
    documents = [" ".join(lines[i : i + 12]) for i in range(0, len(lines), 12)]
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture
def arguments(corpus, tmp_path):
    def build(system, name="run", **changes):
        settings = {"hidden": 24, "vocab_size": 60, "steps": 6, "out": tmp_path / name}
        if system != "word2vec":
            settings |= {"embedding": 16, "batch_size": 16, "log_every": 1, "learning_rate": 1e-2}
        return ClassicArguments(system=system, **{"corpus": [corpus], **settings, **changes}).plan()

    return build


def test_every_system_from_the_command_line(corpus, tmp_path, capsys):
    for system in SYSTEMS:
        out = tmp_path / system
        words = ["classic", "--system", system, "--corpus", str(corpus), "--out", str(out)]
        words += ["--steps", "2", "--hidden", "16"]
        if system != "word2vec":
            words += ["--embedding", "8", "--batch-size", "8"]
        assert cli.main(words) == 0, capsys.readouterr().err
        assert "words" in capsys.readouterr().out
        assert cli.main(words) == 2
        assert capsys.readouterr().err.count("\n") == 1
        metrics = json.loads((out / "metrics.json").read_text())
        assert metrics["arguments"]["system"] == system
    kinds = (ElmoForLanguageModeling, SkipThoughtsModel, QuickThoughtsModel)
    for kind, system in zip(kinds, SYSTEMS, strict=False):
        model = kind.from_pretrained(tmp_path / system / "model")
        assert model.config.vocab_size == len(Words.load(tmp_path / system / "model"))
    from gensim.models import KeyedVectors

    assert "river" in KeyedVectors.load(str(tmp_path / "word2vec" / "vectors.kv"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "system",
    [pytest.param("elmo", marks=pytest.mark.slow), "skip-thoughts", "quick-thoughts"],
)
def test_learns(system, arguments):
    metrics = classic(arguments(system, steps=60))
    first, last = (metrics["history"][at]["loss"] for at in (0, -1))
    assert last < 0.6 * first
    assert metrics["held_out"]["loss"] < first


@pytest.mark.slow
@pytest.mark.parametrize(
    "system, damaged",
    [pytest.param("elmo", False, marks=pytest.mark.slow), ("quick-thoughts", True)],
)
def test_resume(system, damaged, arguments, tmp_path, monkeypatch, capsys):
    whole = classic(arguments(system, "whole", save_every=2))
    step = module._Trainer.training_step

    def stop(self, *args, **kwargs):
        if self.state.global_step == 5:
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module._Trainer, "training_step", stop)
        classic(arguments(system, "part", save_every=2))
    if damaged:
        (tmp_path / "part" / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    part = classic(arguments(system, "part", save_every=2, resume=True))
    assert ("checkpoint-4 is not complete and is passed over" in capsys.readouterr().err) == damaged
    assert [e["loss"] for e in part["history"]] == [e["loss"] for e in whole["history"]]
    assert part["held_out"] == whole["held_out"]
    for path in (tmp_path / "part").glob("checkpoint-*"):
        shutil.rmtree(path)
    assert classic(arguments(system, "part", save_every=2, resume=True)) == part  # was finished


def test_wrong_settings(arguments, tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("".join(f"A line {i}.\n" for i in range(9)))
    lines = {"corpus": [tmp_path / "lines.txt"]}
    (tmp_path / "more-lines.txt").write_text("A line. Another line. A third one.\n\n" * 9)
    (tmp_path / "tied.txt").write_text("one two three four five six seven. " * 9)
    several = {"corpus": [tmp_path / "more-lines.txt"]}
    for system in ("skip-thoughts", "quick-thoughts"):
        with pytest.raises(TooLittleTextError, match="got documents of one sentence each"):
            classic(arguments(system, **lines))
    assert classic(arguments("elmo", "elmo", **lines))["held_out"]["loss"] > 0
    assert classic(arguments("word2vec", "w2v", seed=2**32 - 1, **lines))["arguments"]["steps"] == 6
    assert arguments("word2vec", steps=None).steps == 5
    with pytest.raises(ArgumentValueError, match="quick-thoughts"):
        arguments("bert")
    with pytest.raises(ArgumentValueError, match="no checkpoints"):
        arguments("word2vec", resume=True)
    for system, name in (("word2vec", "batch_size"), ("skip-thoughts", "layers")):
        with pytest.raises(
            ArgumentValueError, match=f"`{name}` got 3; expected nothing with {system}"
        ):
            arguments(system, **{name: 3})
    with pytest.raises(ArgumentValueError, match="`hidden` got 24; expected more than --embedding"):
        arguments("elmo", embedding=24)
    with pytest.raises(ArgumentValueError, match="`batch_size` got 2; expected 3 or more"):
        arguments("quick-thoughts", batch_size=2)
    with pytest.raises(ArgumentValueError, match="`vocab_size` got 5; expected room"):
        classic(arguments("word2vec", "rare", vocab_size=5, corpus=[tmp_path / "tied.txt"]))
    assert not (tmp_path / "rare").exists()
    with pytest.raises(ArgumentValueError, match="`corpus` got .*lines.txt, which is another text"):
        classic(arguments("skip-thoughts", "other", steps=1))
        classic(arguments("skip-thoughts", "other", steps=1, resume=True, **several))
    monkeypatch.setitem(__import__("sys").modules, "gensim.models", None)
    with pytest.raises(DataError, match="pip install gensim"):
        classic(arguments("word2vec"))
