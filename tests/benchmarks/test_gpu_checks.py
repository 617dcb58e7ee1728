"""The checks that come before a speed: every op with a kernel has some, and they are green."""

from __future__ import annotations

import gpu_checks
import pytest
import torch

from fastplm._registry import OPS

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
