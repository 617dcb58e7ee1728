"""The checks that come before a speed: there are enough of them, and they can turn red."""

from __future__ import annotations

import re
import sys

import gpu_checks
import pytest
import torch

from fastplm._registry import OPS
from fastplm.triton_kernels import gather_rows

CPU = torch.device("cpu")
#: The other ops take half a minute in the interpreter.
QUICK = ("gather_rows", "maxsim", "mask_tokens", "corrupt_spans", "bart_noise")


def test_every_op_with_a_kernel_for_a_gpu_has_checks():
    kernels = {"triton", "cuda"}
    assert set(gpu_checks.OPS) == {name for name, op in OPS.items() if kernels & set(op.backends)}
    for op, checks in gpu_checks.OPS.items():
        found = list(checks())
        labels = [check.branch for check in found]
        assert found and {check.op for check in found} == {op}
        assert len(labels) == len(set(labels))
        assert {check.backend for check in found} == kernels & set(OPS[op].backends)


def test_every_dtype_is_checked_on_a_gpu():
    for op in gpu_checks.OPS:
        dtypes = [where.dtype for _, where in gpu_checks.runs(op, torch.device("cuda"))]
        assert set(dtypes) == set(gpu_checks.DTYPES if "triton" in OPS[op].backends else DTYPE)
        assert len(dtypes) == len(list(gpu_checks.OPS[op]())) * len(set(dtypes))


DTYPE = gpu_checks.DTYPES[1:2]


def slow_unless_quick(op):
    return pytest.param(op, marks=() if op in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("op", [slow_unless_quick(op) for op in gpu_checks.OPS])
def test_they_are_green(op):
    found = dict(gpu_checks.check_op(op, CPU))
    assert found and not any(found.values()), found


def test_a_wrong_kernel_turns_its_op_red(monkeypatch, capsys):
    right = gather_rows.launch

    def wrong(kernel, grid, device, **arguments):
        right(kernel, grid, device, **arguments)
        if "fwd" in kernel.__name__:
            arguments["out_ptr"].view(-1)[3] += 1

    monkeypatch.setattr(gather_rows, "launch", wrong)
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "gather_rows", "corrupt_spans"])
    assert gpu_checks.main() == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^RED gather_rows \| float16 repeated \| .* s: BudgetExceeded: output", said, 8
    )
    assert "GREEN gather_rows" not in said and "RED corrupt_spans" not in said
    assert re.findall("^DONE (.*)", said, re.MULTILINE) == ["gather_rows", "corrupt_spans"]


def test_the_other_ops_get_a_process_that_has_a_gpu(monkeypatch, capsys):
    """After an illegal access, every later call of the process on the GPU fails."""
    begun = []

    def lost(check, where):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu_checks.Check, "run", lost)
    monkeypatch.setattr(
        gpu_checks.os, "execv", lambda program, line: begun.append(line) or sys.exit()
    )
    monkeypatch.setattr(sys, "argv", ["gpu_checks.py", "gather_rows", "maxsim", "bart_noise"])
    with pytest.raises(SystemExit):
        gpu_checks.main()
    (line,) = begun
    assert line[2:] == ["maxsim", "bart_noise"]
    said = capsys.readouterr().out
    assert said.count("RED") == 1 and "DONE" not in said
