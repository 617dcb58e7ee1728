"""The table of faster backends: look-ups, files, and the command that writes them."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastplm
from fastplm import _backends, _machine, _measure, _measured, cli, ops
from fastplm._backends import record_decisions
from fastplm._measured import Series, Table
from fastplm._registry import OPS

GAIN = _measured.LEAST_GAIN
# The function is taken before any test replaces it by its own table.
_TABLE = _measured.table
needs_csrc = pytest.mark.skipif(_machine.level() == "none", reason="csrc/ is not built")


@pytest.fixture
def on_disk(monkeypatch, tmp_path):
    """The tables of files, in an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_measured, "table", _TABLE)
    _TABLE.cache_clear()
    yield tmp_path
    _TABLE.cache_clear()


def test_the_sizes_around_count():
    series = Series([[1, 10], [100, 1000, 10000]], [1.0] * 6, [0.1, 0.2, 0.3, 1.1, 1.2, 1.3])
    assert series.speedup((1, 100)) == 0.1
    assert series.speedup((10, 1000)) == pytest.approx(1.2)
    assert series.speedup((0, 50000)) == 0.3
    assert series.speedup((600, 50000)) == 1.3
    assert series.speedup((1, 200)) == pytest.approx(0.1 * 2 ** math.log10(2))
    corners = math.prod((0.1, 0.2, 1.1, 1.2)) ** 0.25
    assert series.speedup((10**0.5, 100 * 10**0.5)) == pytest.approx(corners)
    assert series.speedup((700, 3000)) is None and series.speedup((1, 10**6)) is None
    between = Series([[128, 512], [1]], [1.0, 1.0], [0.9, 1.6]).speedup((256, 1))
    assert between == pytest.approx(1.2)


def test_what_nobody_measured_is_pytorchs(monkeypatch):
    monkeypatch.setattr(_measured, "table", lambda: Table(None, {}))
    assert "not measured" in _measured.slower("gelu", ("forward", torch.float32, (9,)))
    if _machine.level() != "none":
        said = fastplm.explain(ops.gelu, torch.randn(1 << 16), approximate="tanh")
        assert "not measured" in said


def _table_of(**series):
    given = {"axes": [[8, 512], [4096]], "ours": [1.0, 1.0]}
    return Table(None, {"ops": {"linear": {key: given | more for key, more in series.items()}}})


def _linear(table, form, rows):
    return table.speedup("linear", form, torch.float16, (rows, 4096))


def test_the_form_of_a_weight_counts(monkeypatch):
    """The weights are tall, square and wide; an older table has no entry for the product."""
    monkeypatch.setattr(_machine, "computes_in", lambda dtype: False)
    axes = [[8, 512], [4096], [16, 64]]
    forms = _table_of(
        **{
            "linear float16": {"axes": axes, "ours": [1.0] * 4, "stock": [1.0, 2.0, 3.0, 4.0]}
            | {"weights": 72}
        }
    )
    aspects = [_measured.aspect(n, k) for n, k in ((32, 128), (64, 64), (1, 4096), (50257, 16))]
    assert aspects == [16, 64, 1, 4096]

    def speedups(table):
        return [table.speedup("linear", "linear", torch.float16, (512, 4096, a)) for a in aspects]

    assert speedups(forms) == [3.0, 4.0, 3.0, 4.0]
    before = _table_of(**{"linear float16": {"stock": [1.0, 2.0], "weights": 72}})
    assert speedups(before) == [2.0] * 4


def test_one_thread_has_figures_of_its_own(monkeypatch):
    monkeypatch.setattr(_machine, "computes_in", lambda dtype: False)
    both = {"linear float16": {"stock": [2.0, 2.0], "weights": 72}}
    assert _linear(_table_of(**both), "linear, 1 thread", 512) == 2.0
    both["linear, 1 thread float16"] = {"stock": [3.0, 3.0], "weights": 72}
    assert _linear(_table_of(**both), "linear, 1 thread", 512) == 3.0
    assert _linear(_table_of(**both), "linear", 512) == 2.0


def test_a_product_of_few_rows_that_was_measured_with_one_weight_gains_less(monkeypatch):
    monkeypatch.setattr(_machine, "computes_in", lambda dtype: False)
    gains = {"stock": [2.0, 2.0]}
    hot, turns = (_table_of(**{"linear float16": gains | more}) for more in ({}, {"weights": 72}))
    assert [_linear(turns, "linear", rows) for rows in (8, 512)] == [2.0, 2.0]
    assert [_linear(hot, "linear", rows) for rows in (8, 512)] == [1.6, 2.0]


@needs_csrc
@pytest.mark.parametrize("speedup", [0.9, 1 + (GAIN - 1) / 2, GAIN])
def test_a_small_gain_is_none(measured, monkeypatch, speedup):
    """Another CPU of the kind, or this one an hour later, may not show a small gain."""
    monkeypatch.setattr(measured, "slower", lambda *call: _measured.reason_of(speedup))
    query, weight = torch.randn(1, 2, 300, 16), torch.randn(64, 64)
    for call in (
        lambda: ops.gelu(weight, approximate="tanh"),
        lambda: ops.attention(query, query, query),
        lambda: ops.linear(weight, weight),
    ):
        short = call()
        with record_decisions() as decisions:
            assert torch.equal(call(), short)
        (decision,) = decisions
        assert (decision.backend == "cpp") == (speedup == GAIN)
        assert ("too little" in str(decision)) == (1 < speedup < GAIN)
    assert (OPS["linear"].layer(weight, weight, None) is None) == (speedup < GAIN)


@pytest.mark.parametrize("path", sorted(_measured.shipped_table().parent.glob("*.json")), ids=str)
def test_a_shipped_table_is_whole(path):
    contents = json.loads(path.read_text())
    assert contents["kind"] == path.stem and contents["torch"] and contents["date"]
    measured = {name for name, op in OPS.items() if op.backends.get("cpp", None) is not None}
    assert set(contents["ops"]) <= measured | {"encoder"}
    for series in contents["ops"].values():
        for each in series.values():
            series = Series(**each)
            cells = 1
            for axis in series.axes:
                assert axis == sorted(set(axis))
                cells *= len(axis)
            assert len(series.ours) == len(series.stock) == cells
            assert min(series.ours + series.stock) > 0


def test_a_table_of_ones_own_comes_first(on_disk):
    one = {"axes": [[1]], "ours": [1.0], "stock": [3.0]}
    key = f"forward {_measured.dtype_key(torch.float32)}"
    contents = {"cpu": _machine.cpu_model(), "ops": {"gelu": {key: one}}}
    _measured.own_table().parent.mkdir(parents=True)
    _measured.own_table().write_text(json.dumps(contents))
    assert _measured.table().path == _measured.own_table()
    assert _measured.table().speedup("gelu", "forward", torch.float32, (5,)) == 3.0
    _measured.own_table().write_text(json.dumps(contents | {"cpu": "another"}))
    _TABLE.cache_clear()
    assert _measured.table().path in (_measured.shipped_table(), None)


@pytest.mark.parametrize(
    "text",
    [
        '{"cpu": ',
        "[]",
        "null",
        "[" * 100_000,
        '{"cpu": CPU}',
        '{"cpu": CPU, "ops": []}',
        '{"cpu": CPU, "ops": {"gelu": []}}',
        '{"cpu": CPU, "ops": {"gelu": {"forward float32 native": {"axes": [[1]]}}}}',
        '{"cpu": CPU, "ops": {"gelu": {"f": {"axes": [[1, 2]], "ours": [1.0], "stock": [1.0]}}}}',
    ],
    ids=lambda text: text[:60],
)
def test_a_broken_table_is_passed_over(on_disk, text):
    _measured.own_table().parent.mkdir(parents=True)
    _measured.own_table().write_text(text.replace("CPU", json.dumps(_machine.cpu_model())))
    assert _measured.read_table(_measured.own_table()) is None
    assert _measured.table().path in (_measured.shipped_table(), None)


@needs_csrc
def test_the_command_measures_and_its_figures_are_used(on_disk, monkeypatch, capsys):
    def cell(ours, stock, cold):
        torch.testing.assert_close(ours(), stock(), rtol=0.05, atol=0.05)
        return 2.0, 7.0

    monkeypatch.setattr(_measure, "_cell", cell)
    monkeypatch.setattr(_measure, "_DTYPES", (torch.float32,))
    assert cli.main(["measure", "gelu", "rms_norm"]) == 0
    said = capsys.readouterr().out
    assert "gelu forward float32 native: 3.50 to 3.50 times as fast" in said
    assert str(_measured.own_table()) in said and _measured.table().path == _measured.own_table()
    assert set(_measured.table().contents["ops"]) == {"gelu", "rms_norm"}
    assert "-> cpp" in fastplm.explain(ops.gelu, torch.randn(512), approximate="tanh")
    # The measurements of other ops stay.
    assert cli.main(["measure", "gelu"]) == 0
    assert set(json.loads(_measured.own_table().read_text())["ops"]) == {"gelu", "rms_norm"}


@needs_csrc
def test_products_are_measured_with_weights_in_turn_and_with_one_thread(monkeypatch):
    monkeypatch.setattr(_measure, "_OF_WEIGHTS", 5 * 4 * 4096)
    seen = []
    monkeypatch.setattr(_measure.F, "linear", lambda *given: seen.append(given[1].data_ptr()))
    forms, threads = [], torch.get_num_threads()
    for plan in _measure._linear(torch.float32):
        forms.append(plan.form)
        with _measure._threads(plan.form):
            assert torch.get_num_threads() == 1 or not plan.form.endswith("thread")
        assert torch.get_num_threads() == threads
        seen.clear()
        for rows in (1, 8):
            _, stock = plan.make(rows, 4096, 64)
            for _ in range(5):
                stock()
        assert seen == seen[:5] * 2 and len(set(seen)) == 5
    assert {"linear", "linear, 1 thread", "conv1d", "conv1d, 1 thread"} <= set(forms)


@needs_csrc
@pytest.mark.parametrize("alone", [True, False])
def test_attention_asks_for_the_figures_of_its_threads(monkeypatch, alone):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if alone else 2)
    asked = []

    class Asked(Table):
        def speedup(self, *call):
            asked.append(call)

    table = Asked(None, {})
    monkeypatch.setattr(_measured, "table", lambda: table)
    query = torch.randn(2, 3, 5, 16)
    ops.attention(query, query[:, :, :4], query[:, :, :4])
    form = "forward, 1 thread" if alone else "forward"
    assert asked == [("attention", form, torch.float32, (5, 4, 6, 16))]


@pytest.mark.skipif(_machine.level() != "avx512", reason="needs a CPU with AVX-512, and its level")
def test_the_generations_of_a_maker_have_tables_of_their_own(monkeypatch):
    monkeypatch.setattr(_machine, "_cpuinfo", lambda field, otherwise: otherwise)
    maker = _machine.cpu_kind()
    monkeypatch.setattr(_machine, "_cpuinfo", lambda field, otherwise: "26")
    new = {"avx512-amd": "avx512-amd-zen5"}.get(maker, maker)
    assert _machine.cpu_kind() == new
    assert _measured.shipped_table().exists()


def test_an_unknown_op_is_refused(on_disk, capsys):
    assert cli.main(["measure", "nothing"]) == 2
    assert "nothing" in capsys.readouterr().err
    assert not _measured.own_table().exists()


def test_the_command_says_where_the_table_is(on_disk):
    said = fastplm.info(all=True)
    assert f"vector instructions of csrc/: {_machine.level()}" in said
    assert "measured speeds: " in said


def test_the_only_query_of_a_causal_call_is_a_plain_call(measured):
    measured.ours = lambda *call: False
    query, key = torch.randn(2, 3, 1, 16), torch.randn(2, 3, 5, 16)
    out = ops.attention(query, key, key, is_causal=True)
    assert torch.equal(out, F.scaled_dot_product_attention(query, key, key))
    with fastplm.use_backend("cpp"):
        torch.testing.assert_close(out, ops.attention(query, key, key, is_causal=True))


def _plain_calls():
    """Plain calls of attention and linear, with several dtypes, layouts and sizes, also empty."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        query, key = (torch.randn(2, 3, length, 16).to(dtype) for length in (5, 7))
        by_feature = key.mT.contiguous().mT
        yield lambda q=query, k=key: ops.attention(q, k, k)
        yield lambda q=query, k=by_feature: ops.attention(q, k, k + 1, scale=0.5)
        yield lambda q=query, k=key: ops.attention(q[:, :, :1], k, k, is_causal=True)
        yield lambda q=query: ops.attention(q[:0], q[:0], q[:0])
        weight, bias = torch.randn(6, 16).to(dtype), torch.randn(6).to(dtype)
        yield lambda q=query, w=weight, b=bias: ops.linear(q, w, b)
        yield lambda q=query, w=weight: ops.linear(q[0, 0, 0], w.t().contiguous().t())
        yield lambda q=query, w=weight: ops.linear(q[:0], w)
        yield lambda q=query, w=weight: ops.linear(q[..., :0], w[:, :0])


@pytest.mark.parametrize("ours", [True, False])
def test_the_fast_path_of_a_plain_call_ends_where_the_full_one_does(measured, ours):
    measured.ours = lambda op, form, dtype, sizes: ours and dtype is not torch.float64
    for call in _plain_calls():
        short = call()
        with record_decisions() as decisions:
            long = call()
        assert len(decisions) == 1 and torch.equal(short, long)
        if ours and short.dtype is not torch.float64 and _machine.level() != "none":
            assert decisions[0].backend == "cpp"


@needs_csrc
@pytest.mark.parametrize("ours", [True, False])
def test_a_plain_call_takes_the_fast_path(measured, ours, monkeypatch):
    measured.ours = lambda *call: ours
    query, weight = torch.randn(2, 3, 5, 16), torch.randn(6, 16)
    calls = {
        "attention": lambda: ops.attention(query, query, query),
        "linear": lambda: ops.linear(query, weight),
    }
    for name, call in calls.items():
        with monkeypatch.context() as patch:
            patch.setattr(OPS[name], "resolve", None)
            call()
            with record_decisions(), pytest.raises(TypeError):
                call()


def test_a_call_of_which_the_value_alone_has_a_gradient_is_one_of_a_forward(measured):
    measured.ours = lambda op, form, dtype, sizes: form.startswith("forward")
    query, value = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 5, 16, requires_grad=True)
    short = ops.attention(query, query, value)
    with record_decisions() as decisions:
        assert torch.equal(short, ops.attention(query, query, value))
    assert decisions[0].backend == ("stock" if _machine.level() == "none" else "cpp")


STOCK = {
    "attention": (
        lambda x: ops.attention(x, x, x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
    ),
    "gelu": (lambda x: ops.gelu(x, approximate="tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "linear": (lambda x: ops.linear(x, x[0, 0]), lambda x: F.linear(x, x[0, 0])),
    "rms_norm": (
        lambda x: ops.rms_norm(x, x[0, 0, 0], eps=1e-3),
        lambda x: F.rms_norm(x, x.shape[-1:], x[0, 0, 0], eps=1e-3),
    ),
}


def test_what_pytorch_has_itself_is_a_backend(measured):
    """It runs where csrc/ was not faster, with PyTorch's own gradient, or if it is asked for."""
    assert set(STOCK) == {name for name, op in OPS.items() if "stock" in op.backends}
    measured.ours = lambda *call: False
    for name, (ours, theirs) in STOCK.items():
        for forced in ("auto", "stock"):
            x = torch.randn(2, 3, 5, 16, requires_grad=True)
            with fastplm.use_backend(forced), record_decisions() as decisions:
                out = ours(x)
            assert [decision.backend for decision in decisions] == ["stock"]
            expected = theirs(x)
            assert torch.equal(out, expected)
            grads = (torch.autograd.grad(one.sum(), x)[0] for one in (out, expected))
            assert torch.equal(*grads), name
    x = torch.randn(2, 3, 5, 16)
    with fastplm.use_backend("stock"):
        with pytest.raises(_backends.BackendError, match="masks, bias and dropout"):
            ops.attention(x, x, x, is_causal=True)
        with pytest.raises(_backends.BackendError, match="one dtype"):
            ops.rms_norm(x, x[0, 0, 0].double())
        with pytest.raises(_backends.BackendError, match="no implementation"):
            ops.dropout(x)


_COMPILED = """
import torch
from fastplm import ops
x = torch.randn(2, 3, 5, 16, dtype=torch.float64)
for call in (
    lambda x: ops.gelu(x),
    lambda x: ops.linear(x, x[0, 0]),
    lambda x: ops.rms_norm(x, x[0, 0, 0]),
    lambda x: ops.attention(x, x, x),
):
    compiled = torch.compile(call, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(compiled, call(x))
"""


def test_a_backend_that_did_not_run_yet_can_be_traced():
    """The process is a new one: what ran before would have filled the properties of backends."""
    run = subprocess.run([sys.executable, "-c", _COMPILED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_stock_rms_norm_leaves_autocast_to_the_reference(measured):
    """On a GPU autocast would make its result fp32."""
    x = torch.randn(4, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), record_decisions() as decisions:
        assert ops.rms_norm(x, x[0]).dtype is torch.bfloat16
    assert [decision.backend for decision in decisions] == ["eager"]


@needs_csrc
def test_numbers_of_numpy_take_the_op_too(measured):
    measured.ours = lambda *call: True
    out = OPS["dropout"].layer(torch.ones(64), np.float64(0.25), None, None, None)
    assert out is not None
    assert OPS["gelu"].layer(3, "tanh") is None  # PyTorch says what is wrong


def test_a_cold_cell(monkeypatch):
    monkeypatch.setattr(_measure, "_BETWEEN", 1 << 10)
    calls = []
    ours, stock = _measure._cell(lambda: calls.append("ours"), lambda: calls.append("stock"), True)
    assert ours > 0 and stock > 0 and calls == ["ours", "stock"] * (1 + _measure._COLD_ROUNDS)


@pytest.mark.parametrize("ours", [True, False])
def test_the_fast_path_keeps_gradients(measured, ours):
    measured.ours = lambda *call: ours
    query, key, value = torch.randn(3, 2, 3, 5, 16).unbind()
    input, weight = torch.randn(4, 16), torch.randn(6, 16)
    for call, tensors in (
        (ops.attention, (query, key, value)),
        (ops.linear, (input, weight, torch.randn(6))),
    ):
        for tensor in tensors:
            tensor.requires_grad_()
            call(*tensors).sum().backward()
            assert tensor.grad is not None
            tensor.requires_grad_(False)


def test_a_product_that_is_pytorchs_has_our_errors(measured):
    measured.ours = lambda *call: False
    weight, bias = torch.randn(3, 4), torch.randn(3)
    for arguments in (
        (torch.tensor(1.0), weight),
        (torch.randn(2, 5), weight),
        (torch.ones(2, 4, dtype=torch.int64), weight.long()),
        (torch.randn(2, 4), weight, bias[:2]),
        (torch.randn(2, 4), weight, 3.0),
    ):
        with pytest.raises(fastplm.FastplmError, match="linear"):
            ops.linear(*arguments)


def test_of_two_tables_each_size_has_the_smaller_gain():
    path = Path(__file__).parents[1] / "benchmarks" / "merge_tables.py"
    merged = runpy.run_path(str(path))["merged"]
    one = {"axes": [[1, 2]], "ours": [1.0, 1.0], "stock": [2.0, 3.0]}
    other = {"axes": [[1, 2]], "ours": [10.0, 10.0], "stock": [15.0, 40.0]}
    assert merged(one, other) == {"axes": [[1, 2]], "ours": [10.0, 1.0], "stock": [15.0, 3.0]}
    with pytest.raises(SystemExit, match="other sizes"):
        merged(one, other | {"axes": [[1, 3]]})


def test_what_pytorch_would_broadcast_is_an_error_all_the_same(measured):
    measured.ours = lambda *call: False
    query = torch.randn(2, 3, 4, 16)
    for key in (query[:1], query[:, :1], query.double(), query[..., :8]):
        for arguments in ((query, key, key), (query, query, key)):
            with pytest.raises(fastplm.FastplmError, match="key|value"):
                ops.attention(*arguments)
