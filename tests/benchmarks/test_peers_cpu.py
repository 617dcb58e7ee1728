"""benchmarks/peers_cpu.py: its batches, the comparison of outputs, and its rows."""

from __future__ import annotations

import csv
from pathlib import Path

import peers_cpu
import pytest
import torch
import transformers


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    return transformers.BertModel(config).eval()


@pytest.fixture
def run(monkeypatch, tmp_path, model):
    """Runs the script with a tiny model and these variants, and returns its rows."""

    def run(*variants: str, texts: str = "one\ntwo words here\n" * 4) -> list[dict[str, str]]:
        (tmp_path / "texts.txt").write_text(texts)
        monkeypatch.setattr(peers_cpu, "SIZES", {"tiny": {"hidden_size": 32}})
        monkeypatch.setattr(transformers, "BertModel", lambda config: model)
        options = ["--texts", str(tmp_path / "texts.txt"), "--rows", str(tmp_path / "rows.csv")]
        options += ["--sizes", "tiny", "--batch-size", "1", "4", "--batches", "2", "--rounds", "2"]
        monkeypatch.setattr("sys.argv", ["peers_cpu.py", *options, "--variants", *variants])
        assert peers_cpu.main() == 0
        with (tmp_path / "rows.csv").open() as file:
            return list(csv.DictReader(file))

    return run


def test_a_row_for_each_variant_and_batch(run):
    rows = run("transformers sdpa", "fastplm")
    assert [(row["variant"], row["batch"]) for row in rows] == [
        ("transformers sdpa", "1"),
        ("fastplm", "1"),
        ("transformers sdpa", "4"),
        ("fastplm", "4"),
    ]
    assert [row["padding"] for row in rows] == ["0.00", "0.00", "0.25", "0.25"]
    assert all(float(row["ms"]) > 0 and float(row["difference"]) < 1e-4 for row in rows)
    assert rows[0]["times_transformers"] == "1.00" and "threads" in rows[0]["machine"]


def test_a_variant_whose_output_differs_has_no_speed(run, monkeypatch):
    def wrong(model, folder):
        return lambda batch: torch.zeros(*batch["input_ids"].shape, 32)

    monkeypatch.setitem(peers_cpu.VARIANTS, "fastplm", ("fastplm", wrong))
    stock, ours = run("transformers sdpa", "fastplm")[:2]
    assert stock["ms"] and not ours["ms"] and "too much" in ours["difference"]


def test_a_variant_that_is_not_installed_is_left_out(run, monkeypatch, capsys):
    def missing(model, folder):
        raise ImportError("no module of that name")

    monkeypatch.setitem(peers_cpu.VARIANTS, "openvino", ("openvino", missing))
    assert len(run("transformers sdpa", "openvino")) == 2
    assert "openvino is left out: no module of that name" in capsys.readouterr().out


def test_onnxruntime_gets_the_same_model(model, tmp_path: Path):
    pytest.importorskip("onnxruntime")
    batches = peers_cpu.batches_of([3, 9, 16, 40], 2, 2, longest=16)
    assert [batch["input_ids"].shape[1] for batch in batches] == [9, 16]
    run = peers_cpu.of_onnxruntime(model, tmp_path)
    stock = peers_cpu.of_transformers(model, tmp_path)
    assert peers_cpu.difference(run, stock, batches) < peers_cpu.ALLOWED
