"""Columns of vectors and scores: those of ``embed`` and of the scores, bit for bit."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastplm.data import load_tokenizer
from fastplm.errors import ArgumentTypeError, ArgumentValueError, FastplmError
from fastplm.inference._checkpoint import load_encoder, load_model
from fastplm.inference.columns import TextEmbedder, TextScorer
from fastplm.inference.embed import embed
from fastplm.inference.score import log_likelihood, pseudo_log_likelihood

from ..models.conftest import pair
from .conftest import TEXTS

ROWS = {"id": np.arange(len(TEXTS)), "text": np.array(TEXTS, object)}


@pytest.fixture(scope="module")
def t5(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    pair("T5ForConditionalGeneration")[0].save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("texts", [TEXTS, ROWS["text"], np.array(TEXTS)], ids=["list", "O", "U"])
@pytest.mark.parametrize("settings", [{}, {"pooling": ("cls", "max"), "normalize": True}], ids=str)
def test_the_vectors_are_those_of_embed(checkpoint, texts, settings):
    batch = {"id": ROWS["id"], "text": texts}
    out = TextEmbedder(checkpoint, threads=1, **settings)(batch)
    assert list(out) == ["id", "text", "embedding"] and list(batch) == ["id", "text"]
    assert np.array_equal(
        out["embedding"], embed(*load_encoder("test", checkpoint), TEXTS, **settings)
    )


def test_words_have_an_array_of_each_text(checkpoint):
    embedder = TextEmbedder(checkpoint, column="line", into="words", words="first")
    out = embedder({"line": TEXTS})["words"]
    known = embed(*load_encoder("test", checkpoint, split=True), TEXTS, words="first")
    assert all(np.array_equal(one, other) for one, other in zip(out, known, strict=True))


def test_a_checkpoint_of_sentence_transformers_has_its_settings(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        (tmp_path / path.name).symlink_to(path)
    kinds = ("Transformer", ""), ("Pooling", "1"), ("Normalize", "2")
    modules = [{"type": f"sentence_transformers.{kind}", "path": path} for kind, path in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1").mkdir()
    (tmp_path / "1/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    model = load_encoder("test", checkpoint)
    for settings, normal in (
        ({}, True),
        ({"normalize": False}, False),
        ({"pooling": "mean"}, False),
    ):
        out = TextEmbedder(tmp_path, **settings)(ROWS)["embedding"]
        assert np.array_equal(out, embed(*model, TEXTS, normalize=normal))


@pytest.mark.parametrize("method", ["original", "within_word_l2r"])
def test_the_scores_are_those_of_the_models_function(checkpoint, method):
    out = TextScorer(checkpoint, method=method)(ROWS)
    model, tokenizer = load_model("test", checkpoint, "MaskedLM"), load_tokenizer(checkpoint)
    known = pseudo_log_likelihood(model, tokenizer, TEXTS, method=method)
    assert out["score"].tolist() == [score.sum for score in known]
    assert out["score_tokens"].tolist() == [len(score.tokens) for score in known]


def test_a_column_of_sources(t5):
    sources, batch = TEXTS[::-1], {"text": TEXTS, "question": TEXTS[::-1]}
    model, tokenizer = load_model("test", t5, "Seq2SeqLM"), load_tokenizer(t5, needs=())
    for column, given in ((None, None), ("question", sources)):
        out = TextScorer(t5, source=column, into="s")(batch)
        known = log_likelihood(model, tokenizer, TEXTS, sources=given)
        assert out["s"].tolist() == [score.sum for score in known]


@pytest.mark.parametrize("kind", [TextEmbedder, TextScorer])
def test_a_pickle_has_the_settings_and_no_weights(checkpoint, kind, tmp_path):
    column = kind(str(checkpoint), threads=1)
    before = pickle.dumps(column)
    out = column(ROWS)
    assert pickle.dumps(column) == before and len(before) < 2000
    again = pickle.loads(before)(ROWS)
    assert all(np.array_equal(out[name], again[name]) for name in out)
    # A cache whose key is the pickle's hash sees a model that was trained further.
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    first = pickle.dumps(kind(tmp_path))
    (tmp_path / "model.safetensors").touch()
    assert pickle.dumps(kind(tmp_path)) != first


def test_the_model_is_loaded_once(checkpoint, monkeypatch):
    embedder, loads = TextEmbedder(checkpoint), []
    path = "fastplm.inference.columns.load_encoder"
    monkeypatch.setattr(path, lambda *args, **options: loads.append(1) or load_encoder(*args))
    embedder(ROWS)
    embedder(ROWS)
    assert loads == [1]


@pytest.mark.parametrize(
    "make, batch, said",
    [
        (TextEmbedder, {"line": TEXTS, "id": []}, "columns line, id; expected a column text"),
        (TextEmbedder, {**ROWS, "embedding": []}, "`into` got the columns id, text, emb"),
        (TextScorer, {**ROWS, "score_tokens": []}, "no column score_tokens yet"),
        (TextEmbedder, TEXTS, "`batch` got a list; expected a dictionary"),
        (TextEmbedder, {"text": ["a", None]}, "`texts` got a NoneType at 1"),
    ],
)
def test_bad_batches(checkpoint, make, batch, said):
    with pytest.raises((ArgumentValueError, ArgumentTypeError), match=said):
        make(checkpoint)(batch)


@pytest.mark.parametrize(
    "make, options, said",
    [
        (TextEmbedder, {"pooled": "cls"}, "unexpected keyword argument 'pooled'"),
        (TextScorer, {"bos": True}, "unexpected keyword argument 'bos'"),
        (TextScorer, {"metric": "bleu"}, "`metric` got 'bleu'; expected log-"),
        (TextScorer, {"source": "q"}, "`source` got q with metric pseudo-log"),
        (TextEmbedder, {"threads": 0}, "`threads` got 0"),
        (TextEmbedder, {"matmul_precision": "low"}, "`matmul_precision` got"),
        (TextEmbedder, {"model": "nowhere"}, "`model` got 'nowhere', which is no folder"),
    ],
)
def test_bad_settings_are_found_before_a_batch(checkpoint, make, options, said):
    with pytest.raises((FastplmError, TypeError), match=said):
        make(**{"model": checkpoint} | options)


def test_map_of_datasets(checkpoint):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS * 4})
    for options in ({}, {"num_proc": 2}):
        embedder = TextEmbedder(checkpoint, threads=1)
        mapped = rows.map(embedder, batched=True, batch_size=len(TEXTS), **options)
        known = embed(*load_encoder("test", checkpoint), TEXTS)
        assert np.array_equal(np.array(mapped["embedding"], np.float32), np.tile(known, (4, 1)))


@pytest.mark.slow
def test_map_batches_of_ray(checkpoint):
    pytest.importorskip("ray.data")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rows = ray.data.from_items([{"text": text} for text in TEXTS], override_num_blocks=1)
        mapped = rows.map_batches(
            TextEmbedder,
            fn_constructor_kwargs={"model": str(checkpoint)},
            batch_size=None,
            num_cpus=1,
            compute=ray.data.ActorPoolStrategy(size=1),
        ).to_pandas()
    finally:
        ray.shutdown()
    known = embed(*load_encoder("test", checkpoint), TEXTS)
    assert np.array_equal(np.array(mapped["embedding"].tolist(), np.float32), known)


@pytest.mark.slow
def test_the_example_with_ray_embeds_the_files_that_lack(checkpoint, tmp_path):
    pytest.importorskip("ray.data")
    texts, vectors = tmp_path / "texts", tmp_path / "vectors"
    texts.mkdir()
    vectors.mkdir()
    for name in "abc":
        (texts / f"{name}.txt").write_text("".join(f"{text}\n" for text in TEXTS))
    (vectors / "b.npy").touch()  # it is there, and stays
    example = Path(__file__).parents[2] / "examples/embed_with_ray.py"
    command = [sys.executable, example, checkpoint, texts, vectors, "1"]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    assert "2 of 3 files are to be embedded" in done.stdout
    assert sorted(path.name for path in vectors.iterdir()) == ["a.npy", "b.npy", "c.npy"]
    assert (vectors / "b.npy").stat().st_size == 0
    known = embed(*load_encoder("test", checkpoint), TEXTS)
    assert all(np.array_equal(np.load(vectors / f"{name}.npy"), known) for name in "ac")
