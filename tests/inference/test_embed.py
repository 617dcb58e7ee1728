"""Vectors of texts and words: the same as from the parent class, one text at a time."""

from __future__ import annotations

import copy
import json
import re
import warnings

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models

import survey_models
from fastplm import cli
from fastplm.errors import ArgumentValueError
from fastplm.inference._checkpoint import load_encoder
from fastplm.inference.embed import embed
from fastplm.inference.settings import POOLINGS, WORD_POOLINGS
from fastplm.models import AutoModel
from fastplm.models._base import most_positions

from ..models.conftest import PREFIXES, every_family, pair, small_config
from .conftest import TEXTS, WORDS, hold, of_texts, pooled, saved, states_of

LAYERS = (0, 1, 2)


def of_words(parent, tokenizer, kind, layers=(-1,)):
    vectors = []
    for words in WORDS:
        encoded = tokenizer(words, is_split_into_words=True)
        states = states_of(parent, encoded["input_ids"])
        for number in range(len(words)):
            tokens = [i for i, word in enumerate(encoded.word_ids()) if word == number]
            rows = [state[tokens] for state in states]
            empty = torch.zeros_like(rows[0].sum(0))
            vectors.append(torch.cat([pooled(rows[i], kind) if tokens else empty for i in layers]))
    return torch.stack(vectors)


@every_family
@pytest.mark.parametrize("layers, budget", [(LAYERS, 17), ((1,), 1), ((-1,), 1000)])
def test_texts_are_those_of_the_parent_one_by_one(family, layers, budget, tokenizer):
    """Every pooling, with any texts in the same batch."""
    options = {"pooling": POOLINGS, "layers": layers, "batch_tokens": budget}
    hold(
        *pair(f"{PREFIXES[family]}Model"),
        lambda model: embed(model, tokenizer, TEXTS, **options),
        lambda parent: of_texts(parent, tokenizer, layers, POOLINGS),
    )


@every_family
@pytest.mark.parametrize("layers", [LAYERS, (-1,)])
def test_spare_slots_change_no_vector(family, layers, tokenizer, spare_slots):
    options = {"layers": layers, "batch_tokens": 17}
    hold(
        *pair(f"{PREFIXES[family]}Model"),
        lambda model: embed(model, tokenizer, TEXTS, **options),
        lambda parent: of_texts(parent, tokenizer, layers),
    )
    assert any(spare_slots)


@every_family
@pytest.mark.parametrize("layers", [(-2, -1), (-1,)])
def test_words_are_those_of_the_parent_one_by_one(family, layers, tokenizer):
    def ours(model):
        found = [
            embed(model, tokenizer, WORDS, words=kind, layers=layers, batch_tokens=9)
            for kind in WORD_POOLINGS
        ]
        return np.concatenate([vectors for each in found for vectors in each])

    def theirs(parent):
        return torch.cat([of_words(parent, tokenizer, kind, layers) for kind in WORD_POOLINGS])

    hold(*pair(f"{PREFIXES[family]}Model"), ours, theirs)


@pytest.mark.parametrize("combine, weights", [("mean", None), ("sum", None), ("concat", (2, -1))])
def test_layers_are_combined(combine, weights, tokenizer):
    model, parent = pair("BertModel")
    kept = embed(model, tokenizer, TEXTS, layers=(0, 1), pooling="max")
    factors = weights or ((0.5, 0.5) if combine == "mean" else (1, 1))

    def theirs(parent):
        vectors = []
        for text in TEXTS:
            states = states_of(parent, tokenizer(text)["input_ids"])
            rows = sum(factor * states[i] for factor, i in zip(factors, (0, 1), strict=True))
            vectors.append(pooled(rows, "max"))
        return torch.stack(vectors)

    options = {"layers": (0, 1), "combine": combine, "layer_weights": weights}
    hold(model, parent, lambda m: embed(m, tokenizer, TEXTS, pooling="max", **options), theirs)
    assert kept.shape == (len(TEXTS), 2 * model.config.hidden_size)


def test_normalized_vectors_have_length_one(tokenizer):
    model, _ = pair("BertModel")
    plain = embed(model, tokenizer, TEXTS)
    unit = embed(model, tokenizer, TEXTS, normalize=True)
    np.testing.assert_allclose(unit * np.linalg.norm(plain, axis=1)[:, None], plain, rtol=1e-5)


def test_words_that_are_cut_off_have_zeros(tokenizer):
    model, _ = pair("BertModel")
    texts = ["ab cd ef", ["g", "h"]]
    with pytest.warns(UserWarning, match="1 of 2 texts were cut off after 5 tokens; 1 words"):
        first, second = embed(model, tokenizer, texts, words="mean", max_length=5)
    assert [vectors.shape[0] for vectors in (first, second)] == [3, 2]
    assert first[:2].any(1).all() and not first[2].any() and second.any(1).all()
    with pytest.raises(ArgumentValueError, match="`texts` got text 0, which has more than 5"):
        embed(model, tokenizer, texts, words="mean", max_length=5, too_long="error")


def test_a_text_without_a_token_has_zeros(tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.post_processor = None
    model, _ = pair("GPT2Model")
    vectors = embed(model, bare, ["", "ab"], pooling="last")
    assert not vectors[0].any() and vectors[1].any()
    assert embed(model, bare, []).shape == (0, 16)
    assert embed(model, bare, [], words="first") == []
    found = embed(model, tokenizer, ["", ["\u200b"]], words="max")
    assert [vectors.shape for vectors in found] == [(0, 16), (1, 16)] and not found[1].any()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"pooling": "average"}, "`pooling` got 'average'; expected mean | cls"),
        ({"pooling": ()}, "`pooling` got nothing"),
        ({"words": "cls"}, "`words` got 'cls'; expected first | mean"),
        ({"combine": "max"}, "`combine` got 'max'; expected concat"),
        ({"layers": (3,)}, r"`layers` got \[3\]; expected numbers from -3 to 2"),
        ({"layers": ()}, r"`layers` got \[\]"),
        ({"layer_weights": (1, 2)}, "`layer_weights` got 2 numbers; expected 1"),
        ({"too_long": "split"}, "`too_long` got 'split'"),
        ({"batch_tokens": 0}, "`batch_tokens` got 0"),
        ({"max_length": 21}, "`max_length` got 21; expected 3 to 20"),
    ],
)
def test_bad_arguments(options, said, tokenizer):
    model, _ = pair("BertModel")
    with pytest.raises(ArgumentValueError, match=f"embed: {said}"):
        embed(model, tokenizer, TEXTS, **options)


# --- files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    return saved(tmp_path_factory.mktemp("checkpoint"), pair("BertForMaskedLM")[0], tokenizer)


def test_the_command_writes_what_embed_returns(checkpoint, tokenizer, tmp_path, capsys):
    data, out = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    data.write_text("".join(f"{text}\n" for text in TEXTS))
    words = ["embed", "--model", str(checkpoint), "--data", str(data), "--out", str(out)]
    model, own = load_encoder("test", checkpoint)
    layers = ["--layers", "-2", "-1"]
    assert cli.main([*words, *layers, "--pooling", "max"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{len(TEXTS)} texts, 32 numbers each, in ")
    assert "max of the tokens of each text, concat of layers -2 -1" in shown.err
    expected = embed(model, own, TEXTS, layers=(-2, -1), pooling="max")
    assert np.array_equal(np.load(out, mmap_mode="r"), expected)

    high = ["--matmul-precision", "high"]
    assert cli.main([*words, "--overwrite", "--words", "sum", "--dtype", "float16", *high]) == 0
    assert "fp32, products high" in capsys.readouterr().err
    assert torch.get_float32_matmul_precision() == "highest"
    rows, offsets = np.load(out), np.load(tmp_path / "vectors.offsets.npy")
    expected = embed(model, own, TEXTS, words="sum")
    assert rows.dtype == np.float16 and len(offsets) == len(TEXTS) + 1
    for i, vectors in enumerate(expected):
        assert np.array_equal(rows[offsets[i] : offsets[i + 1]], vectors.astype(np.float16))
    there = ["texts.txt", "vectors.npy", "vectors.npy.old-1", "vectors.offsets.npy"]
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert len(np.load(f"{out}.old-1")) == len(TEXTS), "the file of before"

    out.unlink()
    assert cli.main(words) == 2  # those offsets would be taken for those of the new file
    assert "vectors.offsets.npy, which exists" in capsys.readouterr().err
    assert cli.main([*words, "--overwrite"]) == 0
    there[-1] += ".old-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == there

    rows, expected = [{"text": text} for text in TEXTS] + [{"content": TEXTS[0]}], np.load(out)
    data = tmp_path / "texts[0-9].json"
    data.write_text(json.dumps(rows))
    words[4] = str(data)
    assert cli.main([*words, "--overwrite"]) == 0
    assert np.array_equal(np.load(out), np.concatenate([expected, expected[:1]]))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"out": "old.npy"}, "`out` got .*old.npy, which exists; .*--overwrite"),
        ({"out": "vectors.txt"}, "a name that ends in .npy"),
        ({"out": "no/such.npy"}, "a file in an existing folder"),
        ({"out": "folder.npy --overwrite"}, "`out` got folder.npy; expected a file in an existing"),
        ({"data": "empty.txt"}, "a file with texts"),
        ({"model": "missing"}, "`model` got 'missing', which is no folder"),
        ({"layers": "7"}, "`layers` got"),
        ({"layer-weights": "1 2"}, "`layer_weights` got 2 of them"),
        ({"too-long": "error", "max-length": "3"}, "`texts` got text 0"),
    ],
)
def test_errors_are_one_line(change, said, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in (("texts.txt", "ab\n"), ("empty.txt", ""), ("old.npy", "kept")):
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.npy").mkdir()
    given = {"model": checkpoint, "data": "texts.txt", "out": "new.npy", **change}
    words = [w for k, v in given.items() for w in (f"--{k}", *(str(v).split() or [""]))]
    assert cli.main(["embed", *words]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fastplm: error: ")
    assert re.search(said, line), line
    assert (tmp_path / "old.npy").read_text() == "kept" and not (tmp_path / "new.npy").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "name", ["mpnet", "esm", "xlnet", "xlm-roberta-xl", "roberta-prelayernorm"]
)
def test_long_texts_of_other_families_are_cut_off(name, tokenizer):
    """The vectors of a text that has as many tokens as the model takes, and of one too long."""
    case = next(case for case in survey_models.cases() if case.name == name)
    model = survey_models.build(case, "eager")
    own = copy.deepcopy(tokenizer)
    own.model_max_length = 1 << 40
    most = most_positions(model.config) or 100
    short, long = ("a " * (most - 2), "a " * (most + 20))
    with warnings.catch_warnings(record=True) as said:
        vectors = embed(model, own, ["b", short, long])
    ids = torch.tensor([own(short)["input_ids"]])
    with torch.no_grad():
        state = model.base_model(input_ids=ids).last_hidden_state.mean(1)[0]
    np.testing.assert_allclose(vectors[1], state, rtol=1e-6, atol=1e-6)
    cut = [f"1 of 3 texts were cut off after {most} tokens."]
    # XLNet takes texts of any length.
    assert [str(each.message) for each in said] == ([] if name == "xlnet" else cut)
    if name != "xlnet":
        np.testing.assert_allclose(vectors[2], state, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("add_prefix_space", [True, False])
def test_words_of_a_byte_level_tokenizer_without_a_class_keep_their_space(
    add_prefix_space, tmp_path
):
    """A file of the tokenizers library says nothing of what its words need."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    backend = Tokenizer(tokenizer_models.BPE({each: i for i, each in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    own = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64)
    torch.manual_seed(0)
    config = small_config("roberta", vocab_size=len(letters), max_position_embeddings=66)
    model = AutoModel.from_config(config).eval()
    words = ["Anna", "lives", "here,", "1990"]
    found = embed(model, own, [words], words="mean")[0]
    ids = own((" " if not add_prefix_space else "") + " ".join(words))["input_ids"]
    with torch.no_grad():
        state = model(torch.tensor([ids])).last_hidden_state[0]
    ends = np.cumsum([len(word) + 1 for word in words])
    known = [state[end - len(w) - 1 : end].mean(0) for end, w in zip(ends, words, strict=True)]
    np.testing.assert_allclose(found, torch.stack(known), rtol=1e-4, atol=1e-5)
    # The command, which loads the tokenizer itself.
    encoder, ready = load_encoder("test", saved(tmp_path, model, own), split=True)
    again = embed(encoder, ready, [" ".join(words)], words="mean")[0]
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-5)
