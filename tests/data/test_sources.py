"""Tables that ``datasets`` reads: the same examples and documents as of JSON lines."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastplm.cli import main
from fastplm.data.corpus import read_documents
from fastplm.data.examples import read_sources, read_table
from fastplm.data.sources import is_arrow, rows_of
from fastplm.errors import DataError

datasets = pytest.importorskip("datasets", reason="datasets not installed: pip install datasets")
ROWS = [{"text": f"tée {i} a\n\nb c", "label": i % 2} for i in range(6)]


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The same table in four forms, one of them in a cache of the Hub; no network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    features = datasets.Features(
        text=datasets.Value("string"), label=datasets.ClassLabel(names=["no", "yes"])
    )
    table = datasets.Dataset.from_list(ROWS, features=features)
    table.to_parquet("rows.parquet")
    table.save_to_disk("saved")
    shutil.copy(next(Path("saved").glob("*.arrow")), "rows.arrow")
    named = [{**row, "label": ("no", "yes")[row["label"]]} for row in ROWS]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    Path("source").mkdir()
    table.to_parquet("source/train.parquet")
    datasets.load_dataset("parquet", data_files={"train": "source/train.parquet"})
    for name, config in (("acme___tiny", "default"), ("acme___glue", "sst"), ("old", "sst")):
        made = next(p for p in (tmp_path / "cache/parquet").glob("*/*/*") if p.is_dir())
        theirs = tmp_path / f"cache/{name}/{config}/0.0.0/{made.name}"
        theirs.mkdir(parents=True)
        for file in made.iterdir():
            shutil.copy(file, theirs / file.name.replace("parquet-", f"{name.split('_')[-1]}-"))
        info = json.loads((theirs / "dataset_info.json").read_text())
        info |= {
            "builder_name": "parquet",
            "dataset_name": name.split("_")[-1],
            "config_name": config,
        }
        (theirs / "dataset_info.json").write_text(json.dumps(info))
    return tmp_path


TABLES = (
    *("rows.parquet", "rows.arrow", "hf:acme/tiny", "hf:acme/tiny:train", "hf:acme/glue/sst"),
    "hf:old/sst:train",
)


@pytest.mark.parametrize("path", TABLES)
def test_the_same_as_json_lines(path, place):
    assert is_arrow(path) and not is_arrow("rows.jsonl")
    found = [(e.texts, e.target) for e in read_table(path)]
    assert found == [(e.texts, e.target) for e in read_table("rows.jsonl")]
    assert found[1] == (("tée 1 a\n\nb c",), "yes")
    for cache in (None, place / "texts"):
        documents = list(read_documents([path], cache=cache))
        assert documents == list(read_documents(["rows.jsonl"], cache=cache))
        assert documents == [f"tée {i} a\nb c" for i in range(6)]


def test_a_label_that_is_none_and_nested_columns(place):
    features = datasets.Features(
        translation={"de": datasets.Value("string"), "en": datasets.Value("string")},
        label=datasets.ClassLabel(names=["no", "yes"]),
    )
    rows = [{"translation": {"de": "a", "en": "b"}, "label": -1}]
    datasets.Dataset.from_list(rows, features=features).to_parquet("pair.parquet")
    assert list(rows_of("pair.parquet")) == [
        (1, {"translation.de": "a", "translation.en": "b", "label": None})
    ]
    columns = ("translation.de", "translation.en")
    (example,) = read_sources("pair.parquet", columns)
    assert (example.texts, example.target) == (("a",), "b")
    with pytest.raises(DataError, match="nothing in column 'label'"):
        read_table("pair.parquet", columns[:1])


def test_runs_from_tables(place):
    corpus = [{"text": "a b c d e f g h " * 40} for _ in range(20)]
    datasets.Dataset.from_list(corpus).to_parquet("corpus.parquet")
    words = "pretrain --arch bert-tiny --steps 1 --batch-size 2 --block-size 16 --vocab-size 40"
    words = [*words.split(), "--report-to", "none", "--cache", "kept", "--corpus"]
    assert main([*words, "corpus.parquet", "--out", "run"]) == 0
    Path("corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    assert main([*words, "corpus.jsonl", "--out", "same"]) == 0
    of_runs = [json.loads(Path(out, "metrics.json").read_text()) for out in ("run", "same")]
    assert of_runs[0]["history"][-1]["loss"] == of_runs[1]["history"][-1]["loss"]
    words = "finetune --task classification --model run/model --steps 1 --batch-size 2"
    assert main([*words.split(), "--data", "hf:acme/tiny", "--out", "tuned"]) == 0


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none.parquet", "none.parquet, a path that does not exist"),
        ("bad.parquet", "which datasets cannot read"),
        ("hf:acme/other", "hf:acme/other, which datasets cannot read"),
        ("hf:acme/tiny:test", "hf:acme/tiny:test, which datasets cannot read"),
    ],
)
def test_errors_are_one_line(path, words, place):
    Path("bad.parquet").write_bytes(b"PAR1 and nothing else")
    for read in (lambda: read_table(path), lambda: read_documents([path])):
        with pytest.raises(DataError) as error:
            read()
        assert words in str(error.value) and "\n" not in str(error.value)


def test_columns_of_a_corpus(place):
    Path("two.jsonl").write_text('{"a": "x", "b": "y"}\n')
    with pytest.raises(DataError, match='two.jsonl:1.*columns a, b.*Name the column.*"text"'):
        read_documents(["two.jsonl"])
    for name, content in (
        ("index.csv", ",sentence\n0,x\n"),  # as pandas writes one
        ("title.jsonl", '{"title": "a", "text": "x"}\n{"title": "b"}\n'),
        ("lines.csv", "x\ny\n"),
    ):
        Path(name).write_text(content)
        with pytest.raises(DataError, match=rf"{name}:[12]\b"):
            read_documents([name])
    Path("no.jsonl").write_text("[1]\n")
    with pytest.raises(DataError, match="no.jsonl:1: a int; expected one JSON object"):
        read_documents(["no.jsonl"])
    Path("both.jsonl").write_text('{"content": "x", "text": "y", "url": "z"}\n')
    assert list(read_documents(["both.jsonl"])) == ["y"]
    Path("one.jsonl").write_text('{"a": "x", "n": 1}\n\n{"a": null}\n{"a": "y"}\n')
    assert list(read_documents(["one.jsonl"])) == ["x", "y"]


def test_without_the_library():
    code = (
        "import sys; sys.modules['datasets'] = None; import importlib.util as u; f = u.find_spec;"
        "u.find_spec = lambda n, *a: None if n == 'datasets' else f(n, *a);"
        "from fastplm.data.examples import read_table; read_table('hf:a/b')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (
        "without the library that reads it" in ran.stderr and "pip install datasets" in ran.stderr
    )
