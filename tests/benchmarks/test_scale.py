"""docs/scale.md: its tables are those of the rows, and its arithmetic is what processes send."""

from __future__ import annotations

import csv
import subprocess
import sys

import pytest
import scale

WEIGHTS = scale.Weights(root=100, layers=(10, 10))
#: Headers of Gloo and counts of tokens, beside the weights; and what pads them to equal parts.
BESIDE = 0.005


def test_the_page_has_the_tables_of_the_rows():
    page = scale.PAGE.read_text("utf-8")
    assert scale.written(page) == page, "python benchmarks/scale.py page"


def test_the_rows_of_the_model_follow_from_the_code_and_the_predicted_steps():
    made = [{name: str(value) for name, value in row.items()} for row in scale.model_rows()]
    assert scale._read("model") == made, "python benchmarks/scale.py model"


def test_what_is_sent():
    assert scale.sent_by_ddp(WEIGHTS, 2) == 4 * 120
    assert scale.sent_by_ddp(WEIGHTS, 4) == 2 * 3 / 4 * 4 * 120
    assert scale.sent_by_fsdp(WEIGHTS, 2) == 0.5 * 4 * (140 + 120)
    assert scale.sent_by_fsdp(WEIGHTS, 2, scatter=2) == 0.5 * 4 * (140 + 240)
    assert scale.sent_by_ddp(WEIGHTS, 1) == scale.sent_by_fsdp(WEIGHTS, 1) == 0


def test_processes_sent_what_the_model_says_and_had_the_same_losses():
    rows = scale._read("measured")
    assert {row["setting"] for row in rows} >= scale.SETTINGS.keys()
    for row in rows:
        sent, expected = int(row["sent"]), int(row["model_sent"])
        assert abs(sent - expected) <= BESIDE * expected + 1000, row
    for arch in {row["arch"] for row in rows}:
        of_one = {row["setting"]: float(row["loss"]) for row in rows if row["arch"] == arch}
        for way in ("DDP", "FSDP2"):
            twice = of_one["1 process, twice the batch"]
            assert of_one[way] == pytest.approx(twice, rel=1e-5)
            half = of_one[f"{way}, half the batch each"]
            assert half == pytest.approx(of_one["1 process"], rel=1e-5)


@pytest.mark.slow
def test_a_simulated_process_calls_what_the_rows_say():
    code = "import csv, sys, scale; w = csv.DictWriter(sys.stdout, scale.SIMULATED)\n"
    code += "for row in scale.simulate('bert-tiny', 8): w.writerow(row)"
    folder = scale.RESULTS.parents[1]
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    found = list(csv.DictReader(done.stdout.splitlines(), scale.SIMULATED))
    assert found == [row for row in scale._read("simulated") if row["processes"] == "8"]
    for row in found:
        assert int(row["sent"]) == pytest.approx(int(row["model_sent"]), rel=BESIDE)


@pytest.fixture
def free():
    """A network that takes no time."""
    return scale.Network(between=1e30, inside=1e30, hop=0, hop_inside=0)


@pytest.mark.parametrize("way", ("DDP", "FSDP2"))
def test_a_free_network_costs_nothing(way, free):
    step = scale.Step(1.0, 2.0, 0.0)
    for samples, batches in ((scale.SAMPLES, 1), (4 * scale.SAMPLES, 4)):
        compute, taken = scale.step_of(step, WEIGHTS, free, way, 64, samples)
        assert compute == taken == pytest.approx(3 * batches)


def test_what_ddp_cannot_hide_is_the_last_reduction():
    step = scale.Step(1.0, 2.0, 0.5)
    slow = scale.Network(between=4e2, inside=4e2, hop=0, hop_inside=0, reached=1.0)
    _, taken = scale.step_of(step, WEIGHTS, slow, "DDP", 2, scale.SAMPLES)
    # The layers' bucket of 80 bytes is ready when the backward ends; all 480 follow it.
    assert taken == pytest.approx(3 + 480 / 4e2 + 0.5)


def test_fsdp_waits_for_what_the_first_layer_needs():
    step = scale.Step(1.0, 2.0, 0.5)
    slow = scale.Network(between=1e2, inside=1e2, hop=0, hop_inside=0, reached=1.0)
    _, taken = scale.step_of(step, WEIGHTS, slow, "FSDP2", 2, scale.SAMPLES)
    # Half of all bytes is sent, 100 a second: the root in 2 s, a layer in 0.2. Exposed are the root
    # and the first layer, before they run; the last layer, which is gathered anew; and, behind the
    # backward, the first layer's gradient and the root's. The optimizer has half of the weights.
    assert taken == pytest.approx((2 + 0.2) + 1 + 0.2 + 2 + (0.2 + 2) + 0.25)


def test_streamed_files_are_split_by_processes(tmp_path):
    """As docs/scale.md says of ``datasets``."""
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    files = []
    for number in range(4):
        files.append(str(tmp_path / f"{number}.parquet"))
        datasets.Dataset.from_dict({"row": [10 * number, 10 * number + 1]}).to_parquet(files[-1])
    stream = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)

    def rows(rank, count):
        part = split_dataset_by_node(stream, rank, count)
        return [row["row"] for row in part]

    assert [rows(rank, 2) for rank in (0, 1)] == [[0, 1, 20, 21], [10, 11, 30, 31]]
    assert [rows(rank, 3) for rank in range(3)] == [[0, 11, 30], [1, 20, 31], [10, 21]]
