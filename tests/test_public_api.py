"""The public names, and what the docstring of each must say."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import fastplm
from fastplm import _backends, _explain, _extension, _machine, ops
from fastplm._registry import OPS

OP_FUNCTIONS = [getattr(ops, name) for name in OPS]


def test_names():
    assert set(fastplm.__all__) == {
        "FastplmError",
        "__version__",
        "accelerate",
        "dequantize",
        "explain",
        "freeze",
        "info",
        "keep_memory",
        "ops",
        "quantize",
        "restore",
        "use_backend",
    }
    assert set(OPS) <= set(ops.__all__)
    assert all(hasattr(ops, name) for name in ops.__all__)


@pytest.mark.parametrize("function", OP_FUNCTIONS, ids=lambda f: f.__name__)
def test_an_op_documents_itself(function):
    doc = inspect.getdoc(function)
    sections = ("Args:", "Returns:", "Determinism:", "Raises:", "Source", "Reference")
    missing = [section for section in sections if section not in doc]
    assert not missing
    for name, parameter in inspect.signature(function).parameters.items():
        assert f"{name}" in doc, f"`{name}` is not documented"
        assert parameter.annotation is not inspect.Parameter.empty


@pytest.mark.parametrize("function", OP_FUNCTIONS, ids=lambda f: f.__name__)
def test_options_are_keyword_only_as_in_torch(function):
    by_position = {
        **{ops.linear: ["bias"], ops.linear_int8: ["bias"], ops.dropout: ["p"]},
        ops.geglu: ["activation"],
    }.get(function, [])  # as in torch
    if function in (ops.linear_distillation, ops.linear_distillation_topk):
        by_position = ["target"]  # the same place as in linear_cross_entropy
    parameters = inspect.signature(function).parameters.values()
    options = [p for p in parameters if p.default is not p.empty and p.name not in by_position]
    assert all(p.kind is p.KEYWORD_ONLY for p in options)


def test_info_tries_every_op_on_every_backend():
    text = fastplm.info(all=True)
    for op in OPS:
        for backend in _backends.BACKENDS:
            line = next(x for x in text.splitlines() if x.split()[:3] == ["cpu", op, backend])
            assert line.split()[3] in ("ok", "no", "-"), line
        assert f"cpu     {op}" in text


@pytest.mark.slow
def test_info_in_short():
    text = fastplm.info()
    assert len(text.splitlines()) <= 20
    for start in ("fastplm ", "python ", "torch ", "CPU: ", "threads: ", "precision 'auto' is "):
        assert sum(line.startswith(start) for line in text.splitlines()) == 1, start
    assert f"threads: {torch.get_num_threads()} on " in text
    assert f"'auto' is {'bf16' if _machine.hardware_has_bf16() else 'fp32'}: " in text
    for backend in _backends.BACKENDS:
        ops_of_it = [op for op in OPS.values() if backend in op.backends]
        works = sum(_explain._try(op, backend, _explain._device()) == "ok" for op in ops_of_it)
        assert f"\n  {backend:6} {works} of its {len(ops_of_it)} ops" in text


def test_info_says_what_is_not_there_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr(_extension, "_MISSING", "was not built")
    monkeypatch.setattr(_machine, "level", lambda: "none")
    monkeypatch.setattr(_backends, "_HAS_TRITON", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def breaks(device):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(OPS["gelu"], "smoke", breaks)
    text = fastplm.info()
    for lack in (
        r"csrc/: the extension was not built\. With a C\+\+ compiler: pip install ",
        r"a GPU: ",
        r"triton, .*: pip install triton",
        r"rules for this CPU, ",
    ):
        assert re.search(f"\nnot there: {lack}", text), text
    assert re.search(r"\n  eager .*; gelu BROKEN  RuntimeError: no such luck", text), text


@pytest.mark.parametrize(
    "version, tested",
    [("2.10.1", False), ("2.11.0", True), ("2.15.9+cpu", True), ("2.16.0.dev1", False)],
)
def test_info_says_which_versions_were_never_tested(version, tested, monkeypatch):
    found = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "torch" else found(name)
    )
    monkeypatch.setattr(_explain, "OPS", {"gelu": OPS["gelu"]})
    (line,) = (x for x in fastplm.info().splitlines() if x.startswith("torch "))
    assert line.startswith(f"torch {version}") and ("NOT TESTED" in line) != tested


def test_the_tested_versions_begin_where_the_requirements_do_and_hold_the_pins():
    text = Path(__file__).parents[1].joinpath("constraints.txt").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
    required = {r.name: r for r in map(Requirement, importlib.metadata.requires("fastplm-torch"))}
    for name, tested in _explain.TESTED.items():
        assert pins[name] in tested
        lowest = {bound for bound in required[name].specifier if bound.operator == ">="}
        assert lowest and lowest <= set(tested)


def test_use_backend_is_scoped_and_checked():
    assert _backends.requested("attention") == "auto"
    with fastplm.use_backend("eager"):
        assert _backends.requested("attention") == "eager"
        with fastplm.use_backend("torch", "attention"):
            assert _backends.requested("attention") == "torch"
            assert _backends.requested("gather_rows") == "eager"
    assert _backends.requested("attention") == "auto"
    for arguments in (("cublas",), ("eager", "atention")):
        with pytest.raises(ValueError, match="expected"), fastplm.use_backend(*arguments):
            pass


@pytest.mark.slow
def test_the_environment_variable_sets_the_backend():
    code = "import fastplm._backends as b; print(b.requested('attention'))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"FASTPLM_BACKEND": "eager"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "eager"


def test_explain_names_the_backend_and_every_rejection():
    import torch

    query = torch.zeros(1, 1, 2, 16)

    def twice():
        for _ in range(2):
            ops.attention(query, query, query, key_mask=torch.ones(1, 2, dtype=torch.bool))

    text = fastplm.explain(twice)
    assert "-> cpp  (2 calls)" in text and "not triton: CPU tensors" in text
    assert fastplm.explain(lambda: None) == "no fastplm op was called"
    with fastplm.use_backend("eager"):
        assert "not cpp: eager was forced" in fastplm.explain(twice)


def test_whoever_looks_at_operators_sees_them():
    """Without a mode, a call skips the dispatcher and goes straight to its backend."""
    rows = torch.randn(4, 16, requires_grad=True)
    positions = torch.tensor([2, -1])
    plain = torch.autograd.grad(ops.gather_rows(rows, positions).sum(), rows)[0]
    with torch.profiler.profile() as profile:
        seen = torch.autograd.grad(ops.gather_rows(rows, positions).sum(), rows)[0]
    names = {event.key for event in profile.key_averages()}
    assert {"fastplm::gather_rows_fwd", "fastplm::gather_rows_bwd"} <= names
    assert torch.equal(plain, seen)


def attend(x):
    return ops.attention(x[None, None], x[None, None], x[None, None])


TWICE = {
    "attention": attend,
    "gather_rows": lambda x: ops.gather_rows(x, torch.tensor([2, -1, 0])),
    "linear_cross_entropy": lambda x: ops.linear_cross_entropy(x, x, torch.tensor([1, 2, 3, 0])),
    "linear_distillation": lambda x: ops.linear_distillation(x, x, x.flip(0), x).loss,
    "replaced_token_loss": lambda x: ops.replaced_token_loss(x, x[0], torch.arange(4) > 1),
}


def penalty(function, x, profiled=False):
    """A gradient penalty needs the gradient of a gradient's square."""
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum() + x.sum(), x)[0]


@pytest.mark.parametrize("profiled", [False, True])
@pytest.mark.parametrize("op", TWICE)
def test_a_gradient_without_one_of_its_own_says_so(op, profiled):
    """A gradient without a gradient raises, and is not a constant; the reference's has one."""
    x = torch.randn(4, 16, requires_grad=True)
    with pytest.raises(fastplm.FastplmError, match=rf"use_backend\('eager', '{op}'\)"):
        penalty(TWICE[op], x, profiled)
    with fastplm.use_backend("eager", op):
        second = penalty(TWICE[op], x)
    assert (second != 1).any()
    # The gradient itself is the usual one.
    once = torch.autograd.grad(TWICE[op](x).square().sum(), x)[0]
    again = torch.autograd.grad(TWICE[op](x).square().sum(), x, create_graph=True)[0]
    assert torch.equal(once, again)
