"""A training step on a CUDA device that does not exist: what a layer may cost, and that a step with
a capacity reads no value."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

import step_model

pytestmark = [
    pytest.mark.compile,
    pytest.mark.skipif(sys.platform != "linux", reason="a library is preloaded"),
    pytest.mark.skipif(step_model.find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="this PyTorch has CUDA of its own"),
]

REPORT = "benchmarks/step_report.py"
FAMILIES = [
    f"{family}-tiny" for family in ("bert", "roberta", "albert", "electra", "gpt2", "bart", "t5")
]
#: The most that a layer may cost: launches forward and backward, and tensors [N, E] that move
#: through operators which are neither products nor attention. Lower them with the cost.
MOST = {
    "bert-base": {"layer_forward": 8, "layer_backward": 16, "layer_tensors": 40.0},
    "gpt2-small": {"layer_forward": 8, "layer_backward": 13, "layer_tensors": 42.0},
}
#: The most calls of Python functions in a layer of BERT, forward and backward.
MOST_CALLS = 299


@pytest.mark.parametrize("arch", MOST)
def test_a_layer_costs_no_more_than_it_did(run, arch):
    case = "--shape 256x128 --padding 0 --variant fastplm --json --arch".split()
    (row,) = run(REPORT, *case, arch)
    assert {name: most for name, most in MOST[arch].items() if float(row[name]) > most} == {}
    assert row["variant"] == "fastplm" and float(row["ms"]) > float(row["ms_products"]) > 15


@pytest.mark.parametrize("padding", [0, 0.35])
def test_a_step_with_a_capacity_reads_no_value(run, padding):
    case = f"--shape 4x16 --padding {padding} --variant fastplm --json --arch"
    rows = run(REPORT, *case.split(), *FAMILIES)
    assert [row["arch"] for row in rows] == FAMILIES


READS = """
import json, sys
from types import SimpleNamespace

import step_model

if (status := step_model.run_preloaded()) is not None:
    sys.exit(status)
import torch

class Model(torch.nn.Module):
    def __init__(self, read):
        super().__init__()
        self.weight, self.read = torch.nn.Parameter(torch.ones(4)), read

    def forward(self, ids):
        self.read(self.weight.detach())
        return SimpleNamespace(loss=self.weight.sum())

for read in (
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: bool(x.sum() > 0),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x.cpu(),
    lambda x: torch.equal(x, x),
):
    try:
        step_model.step(lambda: Model(read), dict(ids=torch.ones(3)), step_model.Batch(0))
    except step_model.ReadsValue as error:
        print(json.dumps([read.__code__.co_firstlineno, str(error)]))
"""


def test_a_read_is_named_with_its_line(run, tmp_path):
    path = tmp_path / "reads.py"
    path.write_text(READS)
    found = run(str(path))
    assert len(found) == 7
    for line, said in found:
        assert f" in forward, {path}:{line}" in said


CALLS = "import json, host_time; print(json.dumps(host_time.layer_calls('bert-tiny', 'fastplm')))"


def test_python_calls_of_a_layer(run):
    pytest.importorskip("triton")
    ((python, c),) = run("-c", CALLS)
    assert 50 < python <= MOST_CALLS and c > 0


def test_the_page_has_the_committed_rows(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    report = importlib.import_module("step_report")
    page = report.page(report.read(report.RESULTS), report.read(report.CALLS))
    assert report.PAGE.read_text(encoding="utf-8") == page, f"python {REPORT} --page"
