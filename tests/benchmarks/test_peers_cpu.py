"""benchmarks/peers_cpu.py: its batches, the comparison of outputs, and its rows."""

from __future__ import annotations

import csv
from pathlib import Path

import peers_cpu
import peers_cpu_variants
import pytest
import torch
import transformers
from peers_cpu_variants import STOCK, Given, Variant

RESULTS = Path(peers_cpu.__file__).parent / "results" / "cpu"
TINY = dict(vocab_size=1000, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
TINY |= dict(intermediate_size=64, max_position_embeddings=16)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script with a tiny model and these options, and returns its rows."""

    def run(*options: str, texts: str = "one\ntwo words here\n" * 4) -> list[dict[str, str]]:
        (tmp_path / "texts.txt").write_text(texts)
        generates = transformers.GPT2Config(vocab_size=1000, n_embd=32, n_layer=2, n_head=2)
        sizes = {"tiny": transformers.BertConfig(**TINY), "tiny-gpt2": generates}
        monkeypatch.setattr(peers_cpu, "SIZES", sizes)
        size = "tiny-gpt2" if "generate" in options else "tiny"
        given = ["--texts", str(tmp_path / "texts.txt"), "--rows", str(tmp_path / "rows.csv")]
        given += ["--sizes", size, "--batches", "2", "--rounds", "2", "--batch-size", "1", "4"]
        monkeypatch.setattr("sys.argv", ["peers_cpu.py", *given, *options])
        assert peers_cpu.main() == 0
        with (tmp_path / "rows.csv").open() as file:
            return list(csv.DictReader(file))

    return run


def plant(monkeypatch, name: str, make, exact: bool = True) -> None:
    monkeypatch.setitem(peers_cpu.VARIANTS["embed"], name, Variant("fastplm", make, exact))


def test_a_row_for_each_variant_and_batch(run):
    rows = run("--variants", STOCK, "fastplm")
    assert [(row["variant"], row["batch"]) for row in rows] == [
        (STOCK, "1"),
        ("fastplm", "1"),
        (STOCK, "4"),
        ("fastplm", "4"),
    ]
    assert [row["padding"] for row in rows] == ["0.00", "0.00", "0.25", "0.25"]
    assert {(row["task"], row["order"]) for row in rows} == {("embed", "natural")}
    assert all(float(row["ms"]) > 0 and row["difference"][-4:] != "much" for row in rows)
    assert rows[0]["times_transformers"] == "1.00" and "threads" in rows[0]["machine"]


@pytest.mark.parametrize("task", ["rerank", "tag", "generate", "train"])
def test_every_task_agrees_with_transformers(run, task, monkeypatch):
    monkeypatch.setattr(peers_cpu_variants, "NEW", 4)
    options = "--length", "9", "--batch-size", "4", "--rounds", "1", "--variants", STOCK, "fastplm"
    rows = run("--task", task, *options)
    assert [row["task"] for row in rows] == [task] * 2
    assert all(row["ms"] for row in rows)


def test_a_variant_whose_output_differs_has_no_speed(run, monkeypatch):
    def wrong(given):
        return lambda batch: torch.ones(*batch.inputs["input_ids"].shape, 32)

    plant(monkeypatch, "fastplm", wrong)
    plant(monkeypatch, "fastplm int8", wrong, exact=False)
    stock, ours, rounded = run("--variants", STOCK, "fastplm", "fastplm int8")[:3]
    assert stock["ms"] and not ours["ms"] and "too much" in ours["difference"]
    assert rounded["ms"] and "too much" not in rounded["difference"]
    assert float(rounded["cosine"]) < 1 and not ours["cosine"]


def test_a_variant_that_is_not_installed_is_left_out(run, monkeypatch, capsys):
    def missing(given):
        raise ImportError("no module of that name")

    plant(monkeypatch, "openvino", missing)
    assert len(run("--variants", STOCK, "openvino")) == 2
    assert "openvino is left out: no module of that name" in capsys.readouterr().out


def test_onnxruntime_gets_the_same_model(tmp_path: Path):
    pytest.importorskip("onnxruntime")
    samples = [peers_cpu.random_sample(length) for length in (3, 9, 16, 40)]
    batches = peers_cpu.batches_of(samples, 2, 2, longest=16, task="embed")
    assert [batch.inputs["input_ids"].shape[1] for batch in batches] == [9, 16]
    given = Given("embed", tmp_path, batches)
    transformers.BertModel(transformers.BertConfig(**TINY)).save_pretrained(given.checkpoint)
    of_stock, of_runtime = (
        peers_cpu.outputs_of(peers_cpu_variants.ENCODING[name].make(given), batches)
        for name in (STOCK, "onnxruntime")
    )
    assert peers_cpu.difference(of_stock, of_runtime) < peers_cpu.ALLOWED


def test_the_committed_rows_have_these_columns():
    with (RESULTS / "peers_cpu.csv").open() as file:
        assert tuple(next(csv.reader(file))) == peers_cpu.FIELDS
