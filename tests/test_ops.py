"""The promises of every op, by every backend: one table of calls, one test for each promise."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import fastplm
from fastplm import ops
from fastplm._backends import BACKENDS, record_decisions
from fastplm._registry import OPS
from fastplm.errors import ArgumentTypeError, BackendError, UnsupportedError
from fastplm.ops import _linear_cross_entropy_torch
from fastplm.testing import LAYOUTS, BudgetExceeded, assert_within_budget

from .samples import (
    DIFFERENTIABLE,
    DISTINCT,
    IN_16_BITS,
    OF_TOKENS,
    SAMPLES,
    TWICE,
    Operators,
    assert_same,
    check_mode,
    each_kernel,
    each_sample,
    every_mode,
    first,
    kernels,
    leaves,
    results_and_grads,
    run,
    to,
    upstream_of,
)

FP32 = torch.float32
SEEDED = OF_TOKENS | {
    name: SAMPLES[name] for name in ("dropout", "attention, all", "linear_cross_entropy, sampled")
}
VOCABULARY_LOSSES = ("linear_cross_entropy", "linear_distillation")
ONCE = {name: sample for name, sample in DISTINCT.items() if sample.wrt}


@pytest.fixture
def threads():
    """``torch.set_num_threads``, undone at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# --- the declaration ------------------------------------------------------------------------------


def test_every_op_is_here_and_its_reference_has_its_name():
    assert {sample.op for sample in SAMPLES.values()} == set(OPS)
    for name, op in OPS.items():
        assert op.reference.__name__ == f"{name}_ref"
        assert (op._function is not None) == any(one.op == name for one in DIFFERENTIABLE.values())


@each_kernel()
def test_opcheck(device, sample, backend):
    inputs = to(device, sample.make(9, FP32))
    with Operators() as operators:
        results_and_grads(sample, backend, inputs)
    names = [operator.__name__.split(".")[0] for operator, _ in operators.calls]
    assert names == ([f"{sample.op}_fwd", f"{sample.op}_bwd"] if sample.wrt else [sample.op])
    for operator, arguments in operators.calls:
        if "_bwd" in operator.__name__:
            arguments = [a.detach() if isinstance(a, Tensor) else a for a in arguments]
        torch.library.opcheck(operator, tuple(arguments))


@each_sample()
def test_shapes_on_a_device_without_values(sample):
    inputs = sample.make(9, FP32)
    real, meta = (tree_leaves(run(sample, "auto", one)) for one in (inputs, to("meta", inputs)))
    assert [(x.shape, x.dtype) for x in meta] == [(x.shape, x.dtype) for x in real]


@each_sample()
def test_the_fake_makes_the_same_checks(sample):
    with Operators() as operators:
        run(sample, kernels(sample)[-1], sample.make(9, FP32))
    operator, (tensor, *rest) = operators.calls[0]
    rest = [to("meta", one) for one in rest]
    with pytest.raises(ArgumentTypeError, match="` got torch.complex64; expected"):
        operator(tensor.to("meta", torch.complex64), *rest)


# --- which backend --------------------------------------------------------------------------------


@each_sample()
def test_a_forced_backend_that_cannot_run_says_every_reason(sample):
    with fastplm.use_backend("cuda"), pytest.raises(BackendError) as caught:
        sample.function(**sample.make(9, FP32))
    said = str(caught.value)
    assert "backend 'cuda' was forced" in said and "eager: can run it" in said
    assert all(f"  {name}: " in said for name in BACKENDS if name != "cuda")


@each_sample(DIFFERENTIABLE)
def test_float64_runs_on_a_cpu(sample):
    inputs = sample.make(9, torch.float64)
    expected = results_and_grads(sample, "eager", inputs)
    assert_close(results_and_grads(sample, "auto", inputs), expected)
    for backend in OPS[sample.op].backends:
        try:
            assert_close(results_and_grads(sample, backend, inputs), expected)
        except BackendError as error:
            assert "float64" in str(error).splitlines()[0] or sample.op == "linear"


@each_sample(DIFFERENTIABLE)
def test_autocast(device, sample):
    check_autocast(device, sample)


@each_sample({name: one for name, one in DIFFERENTIABLE.items() if one.op in VOCABULARY_LOSSES})
def test_autocast_without_instructions_for_16_bits(sample, monkeypatch):
    monkeypatch.setattr(
        _linear_cross_entropy_torch, "computes_in", lambda dtype: dtype.itemsize > 2
    )
    check_autocast(torch.device("cpu"), sample)


def check_autocast(device, sample):
    """If the op multiplies in 16 bits, its result is that of 16-bit inputs."""
    wide = to(device, sample.make(9, FP32))
    floating = [name for name in sample.wrt if name != "bias_weight"]  # a table keeps its dtype
    floating += [
        name for name in ("teacher_input", "teacher_weight", "teacher_bias") if name in wide
    ]
    for name in {"linear_bias", "teacher_bias"} & wide.keys():  # which Triton adds as they are
        wide[name] = wide[name].bfloat16().float()
    narrow = wide | {name: wide[name].bfloat16() for name in floating}
    expected, *grads = results_and_grads(
        sample, "auto", narrow if sample.op in IN_16_BITS else wide
    )
    with torch.autocast(device.type, torch.bfloat16):
        out, *rest = results_and_grads(sample, "auto", wide)
    # PyTorch's own rms_norm, which a GPU runs, is not taken under autocast.
    agrees = assert_close if sample.op == "rms_norm" and device.type == "cuda" else assert_same
    agrees(out, expected)
    count = len(sample.wrt)
    for name, grad, rounded in zip(sample.wrt, rest[-count:], grads[-count:], strict=True):
        assert grad.dtype is FP32
        if name not in ("linear_weight", "linear_bias"):  # nothing rounds these gradients
            agrees(grad, rounded.float())


# --- torch.compile --------------------------------------------------------------------------------


@each_kernel(DISTINCT | {"attention": SAMPLES["attention"]})
def test_compiles_without_graph_breaks_or_recompiles(device, sample, backend):
    """Other values need no new graph, and other sizes need none after the second size."""
    run(sample, backend, to(device, sample.make(9, FP32)))  # skips if the backend cannot run
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sample.function, fullgraph=True, backend=count)
    graphs = []
    # The interpreter is slow, and a graph is the same around every operator.
    fixed = backend == "triton" and device.type == "cpu"
    for size in (9, 9) if fixed else (9, 9, 12, 15):
        inputs = to(device, sample.make(size, FP32))
        got = results_and_grads(sample._replace(function=compiled), backend, inputs)
        assert_close(got, results_and_grads(sample, backend, inputs))
        graphs.append(count.frame_count)
    assert graphs[1] == 1 and graphs[-2] == graphs[-1] <= 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("auto", "eager"))
@each_sample(OF_TOKENS)
def test_numbers_that_count_up_compile_twice(device, sample, backend):
    """The first number is a constant of its graph; the others are one symbol."""
    torch.compiler.reset()
    count = CompileCounterWithBackend("inductor")
    compiled = torch.compile(sample.function, fullgraph=True, backend=count)
    inputs = to(device, sample.make(20, FP32))
    for step in range(2, 6):
        call = inputs | {"step": step, "seed": step * 2**33}
        got = run(sample._replace(function=compiled), backend, call)
        assert_same(got, run(sample, "auto", call))
    assert count.frame_count == 2


def of_chosen_rows(sample, inputs):
    """(the sample on rows that a mask ``keep`` chooses, the length of the mask)."""
    rows = len(next(value for value in inputs.values() if isinstance(value, Tensor)))
    names = [
        name
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows
    ]

    def function(keep, **inputs):
        return sample.function(**inputs | {name: inputs[name][keep] for name in names})

    return sample._replace(function=function), rows


#: Packed rows and their bounds, positions of rows, and pairs of queries and documents.
NOT_ROW_BY_ROW = ("attention, varlen", "gather_rows", "maxsim", "replaced_token_loss, ids")
NOT_ROW_BY_ROW += tuple(name for name in SAMPLES if name.endswith("packed"))


#: References whose backward, or whose logsumexp, PyTorch cannot trace for a number of rows that it
#: does not know (``logsigmoid``'s and ``logsumexp``'s decompositions ask whether it is 0).
NOT_IN_EAGER = ("linear_cross_entropy, sampled", "replaced_token_loss", "replaced_token_loss, none")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("auto", "eager"))
@each_sample({name: one for name, one in SAMPLES.items() if name not in NOT_ROW_BY_ROW})
def test_rows_that_are_chosen_in_the_graph_need_one_graph(device, sample, backend):
    """Rows are chosen as by ``hidden[labels != -100]``; there may be none."""
    if backend == "eager" and any(sample is SAMPLES[name] for name in NOT_IN_EAGER):
        pytest.skip("PyTorch cannot trace the reference for an unknown number of rows")
    torch._dynamo.reset()
    inputs = to(device, sample.make(13, FP32))
    sample, rows = of_chosen_rows(sample, inputs)
    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sample.function, fullgraph=True, dynamic=True, backend=count)
    graphs = []
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for keep in (torch.arange(rows) % 3 > 0, torch.arange(rows) < 2, torch.zeros(rows).bool()):
            given = inputs | {"keep": keep.to(device)}
            got = results_and_grads(sample._replace(function=compiled), backend, given)
            assert_close(got, results_and_grads(sample, backend, given), equal_nan=True)
            graphs.append(count.frame_count)
    assert graphs[0] == graphs[-1]


def test_an_exported_program_may_choose_its_rows():
    """torch.export has the sizes of the batch and of the rows as symbols."""

    class Loss(torch.nn.Module):
        def forward(self, hidden, weight, labels):
            keep = labels != -100
            return fastplm.ops.linear_cross_entropy(hidden[keep], weight, labels[keep])

    def batch(size):
        labels = torch.randint(0, 40, (size,)).masked_fill(torch.arange(size) % 3 == 0, -100)
        return torch.randn(size, 32), torch.randn(40, 32), labels

    rows = torch.export.Dim("rows", min=2)
    shapes = ({0: rows}, None, {0: rows})
    program = torch.export.export(Loss(), batch(9), dynamic_shapes=shapes)
    for size in (9, 20):
        given = batch(size)
        assert_close(program.module()(*given), Loss()(*given))


@pytest.mark.gpu
@each_kernel()
def test_forward_and_backward_fit_in_one_cuda_graph(sample, backend):
    """The CUDA graph is replayed with other values and another seed."""
    static, other = (to("cuda", sample.make(70, FP32)) for _ in range(2))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results_and_grads(sample, backend, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results_and_grads(sample, backend, static)
    for seed in (5, 6):
        for name, value in other.items():
            for ours, theirs in zip(tree_leaves(static[name]), tree_leaves(value), strict=True):
                if isinstance(ours, Tensor):
                    ours.copy_(theirs if name != "seed" else torch.tensor(seed))
        graph.replay()
        assert_same(captured, results_and_grads(sample, backend, static))


# --- what comes in and out ------------------------------------------------------------------------

VIEWS = {
    **{name: LAYOUTS[name] for name in ("offset", "gapped", "transposed")},
    "columns": lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor,
    "strided": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
}


@each_kernel(DISTINCT)
def test_layouts(device, sample, backend):
    """NaN lies between and around the elements of a view."""
    plain = to(device, sample.make(20, FP32))
    tensors = [name for name, value in plain.items() if isinstance(value, Tensor) and value.dim()]
    expected = results_and_grads(sample, backend, plain)
    for view in VIEWS.values():
        views = {name: view(plain[name]) for name in tensors}
        assert_close(results_and_grads(sample, backend, plain | views), expected)
    name = sample.wrt[0] if sample.wrt else next(iter(plain))
    expanded = LAYOUTS["expanded"](plain[name])
    got, expected = (
        results_and_grads(sample, backend, plain | {name: value})
        for value in (expanded, expanded.contiguous())
    )
    assert_close(got, expected)


@each_kernel(ONCE)
def test_upstream_gradients_of_any_strides(device, sample, backend):
    inputs = leaves(sample, to(device, sample.make(20, FP32)))
    out = first(run(sample, backend, inputs))
    wrt = [inputs[name] for name in sample.wrt]
    upstream, ones = upstream_of(out), torch.ones_like(out)
    views = [VIEWS[layout](upstream) for layout in ("gapped", "columns") if out.dim()]
    for contiguous, strided in (
        (upstream, views),
        (ones, [ones[(0,) * ones.dim()].expand_as(out)]),
    ):
        expected = torch.autograd.grad(out, wrt, contiguous, retain_graph=True)
        for view in strided:
            assert_close(torch.autograd.grad(out, wrt, view, retain_graph=True), expected)


# Another test has the gradients of linear_cross_entropy, in each of its data flows.
@each_kernel({name: one for name, one in ONCE.items() if "cross_entropy" not in name})
def test_each_gradient_alone(device, sample, backend):
    inputs = to(device, sample.make(20, FP32))
    whole = results_and_grads(sample, backend, inputs)[-len(sample.wrt) :]
    for name, expected in zip(sample.wrt, whole, strict=True):
        alone = sample._replace(wrt=(name,))
        assert_close(results_and_grads(alone, backend, inputs)[-1], expected)


@each_kernel(ONCE)
def test_a_second_backward_through_one_forward(device, sample, backend):
    inputs = leaves(sample, to(device, sample.make(20, FP32)))
    wrt = [inputs[name] for name in sample.wrt]
    out = first(run(sample, backend, inputs))
    upstream = upstream_of(out)
    torch.autograd.grad(out, wrt, -3 * upstream, retain_graph=True)
    expected = torch.autograd.grad(first(run(sample, backend, inputs)), wrt, upstream)
    assert_same(torch.autograd.grad(out, wrt, upstream), expected)


@each_kernel(ONCE)
def test_gradients_of_gradients_are_right_or_refused(device, sample, backend):
    """The budget's output is a first gradient here, and its gradients are second gradients."""

    def first_gradients(backend):
        def call(**inputs):
            out = first(run(sample, backend, inputs)).square().sum()
            grads = torch.autograd.grad(out, [inputs[n] for n in sample.wrt], create_graph=True)
            return torch.cat([grad.flatten() for grad in grads])

        return call

    inputs = to(device, sample.make(20, FP32))
    if sample.op in TWICE:
        return assert_within_budget(
            first_gradients(backend), first_gradients("eager"), inputs, wrt=sample.wrt
        )
    with pytest.raises(UnsupportedError, match=rf"use_backend\('eager', '{sample.op}'\)"):
        first_gradients(backend)(**leaves(sample, inputs)).sum().backward()


@each_kernel(DISTINCT)
def test_a_forced_backend_is_recorded_and_repeats_bit_for_bit(device, sample, backend, threads):
    inputs = to(device, sample.make(40, FP32))
    with record_decisions() as decisions:
        expected = results_and_grads(sample, backend, inputs)
    assert [(one.op, one.backend) for one in decisions] == [(sample.op, backend)]
    for count in (1, 2, 3) if backend == "cpp" else (torch.get_num_threads(),):
        threads(count)
        assert_same(results_and_grads(sample, backend, inputs), expected)


@each_sample({name: DISTINCT[name] for name in ONCE if name != "dropout"})
@pytest.mark.parametrize("bug", ("a factor", "rows swapped", "a gradient lost", "a gradient twice"))
def test_the_budget_of_these_calls_sees_a_bug(sample, bug):
    """Each op's own tests compare it with the reference by this budget."""
    inputs = sample.make(33, FP32)

    def wrong(**inputs):
        name = sample.wrt[-1] if bug.startswith("a gradient") else None
        if bug == "a gradient lost":
            inputs[name] = inputs[name].detach() + 0 * inputs[name]
        elif bug == "a gradient twice":
            inputs[name] = 2 * inputs[name] - inputs[name].detach()
        elif bug == "rows swapped":
            inputs[sample.wrt[0]] = inputs[sample.wrt[0]].roll(1, -1)
        return first(run(sample, "auto", inputs)) * (1 + 2**-16 * (bug == "a factor"))

    def reference(**inputs):
        return first(run(sample, "eager", inputs))

    where = "gradient of" if bug.startswith("a gradient") else "output"
    with pytest.raises(BudgetExceeded, match=where):
        assert_within_budget(wrong, reference, inputs, wrt=sample.wrt)


# --- random choices -------------------------------------------------------------------------------


@each_kernel(SEEDED)
@pytest.mark.parametrize("seed", (0, -1, 2**63 - 1, -(2**63), 2**40 + 1))
def test_an_int_seed_is_the_tensor_and_draws_what_the_reference_draws(
    device, sample, backend, seed
):
    inputs = to(device, sample.make(9, FP32))
    if "step" in inputs:
        inputs["step"] = 2**28 - 1
    got = run(sample, backend, inputs | {"seed": seed})
    assert_same(run(sample, backend, inputs | {"seed": torch.tensor(seed, device=device)}), got)
    assert_close(got, run(sample, "eager", inputs | {"seed": seed}))
    long = to(device, sample.make(60, FP32))
    for change in ({"seed": seed ^ 1}, {"seed": seed ^ 2**35}, {"seed": seed, "step": 7}):
        if "step" in long or "step" not in change:
            got, expected = (run(sample, backend, long | one) for one in ({"seed": seed}, change))
            assert not all(map(torch.equal, tree_leaves(got), tree_leaves(expected)))


@each_kernel(OF_TOKENS)
def test_the_index_of_a_sample_is_that_of_its_row(device, sample, backend):
    inputs = to(device, sample.make(40, FP32)) | {"sample_index": None}
    index = torch.arange(3, device=device)
    got = run(sample, backend, inputs)
    assert_same(run(sample, backend, inputs | {"sample_index": index}), got)
    other = run(sample, backend, inputs | {"sample_index": index + 2**32})
    assert not all(map(torch.equal, tree_leaves(got), tree_leaves(other)))


@each_sample({name: SAMPLES[name] for name in ("attention, all", "attention, varlen", "dropout")})
def test_without_a_seed_it_follows_the_generator_of_pytorch(device, sample):
    inputs = to(device, sample.make(33, FP32)) | {"seed": None}
    torch.manual_seed(3)
    drawn, second = (run(sample, "auto", inputs) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(run(sample, "auto", inputs), drawn) and not torch.equal(drawn, second)


@each_sample({n: s for n, s in OF_TOKENS.items() if "packed" not in n})
def test_a_row_does_not_depend_on_its_batch(sample):
    inputs, order = sample.make(64, FP32), torch.tensor([2, 0])
    names = [n for n, v in inputs.items() if isinstance(v, Tensor) and len(v.shape) and len(v) == 3]
    some = inputs | {name: inputs[name][order] for name in names}
    whole, part = (run(sample, "auto", one) for one in (inputs, some))
    per_row = [n for n, value in whole._asdict().items() if value.dim() and len(value) == 3]
    assert "input_ids" in per_row
    for name in per_row:
        assert torch.equal(getattr(part, name), getattr(whole, name)[order])


@pytest.mark.gpu
@each_sample(OF_TOKENS)
def test_eager_on_the_gpu_has_the_bits_of_the_cpu(sample):
    inputs = sample.make(300, FP32)
    assert_same(run(sample, "eager", to("cuda", inputs)), run(sample, "eager", inputs))


# --- inside modes ---------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("backend", ("auto", "eager", "torch", "cpp"))
@each_sample()
def test_a_mode_leaves_nothing_behind(sample, backend, mode):
    if mode in ("vmap", "grad") and backend not in ("auto", "eager"):
        pytest.skip("a transform takes no kernel")
    inputs = sample.make(33, torch.float32)
    inputs |= dict(seed=7) if "seed" in inspect.signature(sample.function).parameters else {}

    inputs = leaves(sample, inputs)

    def call():
        results = sample.function(**inputs)
        grads, out = (), first(results)
        if out.requires_grad and mode not in ("vmap", "grad"):
            grads = torch.autograd.grad(out, [inputs[name] for name in sample.wrt], out.detach())
        return [one.detach() for one in (*tree_leaves(results), *grads)]

    with fastplm.use_backend(backend if backend in OPS[sample.op].backends else "auto"):
        check_mode(mode, call)


# --- fast paths -----------------------------------------------------------------------------------


def fast_calls():
    """Calls for the fast path of an op (a function of its file), or just not for it."""
    for dtype, other in ((torch.float32, torch.float64), (torch.bfloat16, torch.float16)):
        rows, weight = torch.randn(6, 32).to(dtype), torch.randn(16, 32).to(dtype)
        bias = torch.randn(16).to(dtype)
        for name, arguments in {
            "rows": (rows, weight, bias),
            "one row": (rows[0], weight, bias),
            "no row": (rows[:0], weight, bias),
            "batch": (rows.view(2, 3, 32), weight),
            "columns": (rows, weight.t().contiguous().t(), bias),
            "strides": (rows, torch.randn(32, 32).to(dtype)[::2, :], bias),
            "another width": (rows[:, 1:], weight, bias),
            "another bias": (rows, weight, bias[1:]),
            "another dtype": (rows, weight.to(other), bias),
            "a gradient": (rows.clone().requires_grad_(), weight, bias),
            "no tensor": (rows, None, bias),
        }.items():
            yield f"linear, {name}", "_fast", ops.linear, arguments, {}
        q, k = torch.randn(2, 3, 7, 16).to(dtype), torch.randn(2, 3, 9, 16).to(dtype)
        side = torch.randn(2, 7, 3, 3, 16).to(dtype).unbind(2)
        for name, arguments in {
            "full": (q, k, k),
            "few": (q[:, :, :1], k, k),
            "views": [one.transpose(1, 2) for one in side],
            "no query": (q[:, :, :0], k, k),
            "no key": (q, k[:, :, :0], k[:, :, :0]),
            "another width": (q, k[..., 1:], k),
            "another dtype": (q, k.to(other), k),
            "a gradient": (q.clone().requires_grad_(), k, k),
        }.items():
            yield f"attention, {name}", "plain_attention", ops.attention, arguments, {}
            yield (
                f"attention, scaled {name}",
                "plain_attention",
                ops.attention,
                arguments,
                {"scale": 1},
            )
        rows, ends = torch.randn(9, 3, 16).to(dtype), torch.tensor([0, 4, 9], dtype=torch.int32)
        for name, arguments in {
            "rows": (rows, rows, rows, ends, ends, 5, 5),
            "too long": (rows, rows, rows, ends, ends, 4, 5),
            "64-bit offsets": (rows, rows, rows, ends.long(), ends, 5, 5),
            "too far": (rows, rows, rows, ends + ends, ends, 10, 5),
        }.items():
            yield f"attention_varlen, {name}", "_fast_varlen", ops.attention_varlen, arguments, {}


FAST = [pytest.param(*rest, id=f"{name}-{at}") for at, (name, *rest) in enumerate(fast_calls())]


@pytest.mark.parametrize(("path", "function", "arguments", "options"), FAST)
def test_a_fast_path_gives_what_the_op_gives(monkeypatch, path, function, arguments, options):
    def outcome():
        try:
            return function(*arguments, **options).detach()
        except (RuntimeError, TypeError, ValueError) as error:
            return type(error), str(error)

    fast = outcome()
    monkeypatch.setattr(sys.modules[function.__module__], path, lambda *_: None)
    slow = outcome()
    if isinstance(slow, tuple):
        assert fast == slow
    else:
        torch.testing.assert_close(fast, slow, atol=0, rtol=0, equal_nan=True)
        assert fast.stride() == slow.stride()
