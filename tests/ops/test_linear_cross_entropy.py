"""ops.linear_cross_entropy against its reference: loss and gradients, by the error budget."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fastplm
from fastplm import ops
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref
from fastplm.testing import LAYOUTS, BudgetExceeded, assert_repeatable, assert_within_budget

# The package exports the function under the name of its module.
op_module = importlib.import_module("fastplm.ops.linear_cross_entropy")

BACKENDS = ("torch", "triton")
DTYPES = pytest.mark.parametrize(
    "dtype", (torch.float32, torch.float16, torch.bfloat16), ids=("fp32", "fp16", "bf16")
)
#: A width that one tile holds, and one that goes through the scratch.
WIDTHS = pytest.mark.parametrize("width", (64, 320))


def kernels():
    return importlib.import_module("fastplm.triton_kernels.linear_cross_entropy")


def run(backend: str, **inputs):
    if backend == "torch" and inputs["input"].is_cuda:
        pytest.skip("the torch backend of linear_cross_entropy is for CPU tensors")
    with fastplm.use_backend(backend):
        return ops.linear_cross_entropy(**inputs)


def parameters(inputs: dict) -> tuple[str, ...]:
    return tuple(n for n in ("input", "linear_weight", "linear_bias") if n in inputs)


def check(backend: str, inputs: dict) -> None:
    candidate = functools.partial(run, backend)
    assert_within_budget(candidate, linear_cross_entropy_ref, inputs, wrt=parameters(inputs))


def make(device, rows=33, vocab=70, width=32, dtype=torch.float32, bias=True):
    inputs = dict(
        input=torch.randn(rows, width, device=device).to(dtype),
        linear_weight=(torch.randn(vocab, width, device=device) * 2 * width**-0.5).to(dtype),
        target=torch.randint(0, vocab, (rows,), device=device),
    )
    if bias:
        inputs["linear_bias"] = torch.randn(vocab, device=device).to(dtype)
    return inputs


def ignore(inputs: dict, fraction: float, ignore_index: int = -100) -> dict:
    """A fraction of the rows ignored, and NaN in them."""
    rows = inputs["target"].shape[0]
    ignored = torch.arange(rows) < round(fraction * rows)
    ignored = ignored[torch.randperm(rows)].to(inputs["target"].device)
    return inputs | dict(
        target=inputs["target"].masked_fill(ignored, ignore_index),
        input=inputs["input"].masked_fill(ignored[:, None], float("nan")),
    )


@pytest.fixture
def chunked(monkeypatch):
    """Chunks, splits and scratch so small that a small vocabulary needs several of each."""
    monkeypatch.setattr(op_module, "_CHUNK_ELEMENTS", 1 << 10)
    monkeypatch.setattr(op_module, "_CHUNK_COLUMNS", 16)
    monkeypatch.setattr(kernels(), "_SPLIT_COLUMNS", 128)
    monkeypatch.setattr(kernels(), "_SCRATCH_ELEMENTS", 1 << 12)


# --- values and gradients -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", (1, 17, 1000))
@pytest.mark.parametrize("width", (1, 17, 64, 128, 320))
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "plain"))
def test_shapes(device, backend, vocab, width, bias):
    check(backend, make(device, vocab=vocab, width=width, bias=bias))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", (0, 1, 65, 257))
@pytest.mark.parametrize("fraction", (0.0, 0.85, 1.0), ids=("none", "most", "all"))
@WIDTHS
def test_ignored_rows_hide_even_nan(device, backend, rows, fraction, width):
    check(backend, ignore(make(device, rows=rows, width=width), fraction))


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
@WIDTHS
@pytest.mark.parametrize("bias", (True, False), ids=("bias", "plain"))
def test_dtypes(device, backend, dtype, width, bias):
    inputs = make(device, rows=65, vocab=200, width=width, dtype=dtype, bias=bias)
    check(backend, ignore(inputs, 0.5))


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
@WIDTHS
def test_chunks_and_splits(device, backend, dtype, width, chunked):
    inputs = make(device, rows=30, vocab=300, width=width, dtype=dtype)
    check(backend, ignore(inputs, 0.3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@DTYPES
def test_reductions(device, backend, reduction, dtype):
    check(backend, ignore(make(device, dtype=dtype), 0.5) | {"reduction": reduction})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.int64, torch.float32, torch.float64))
def test_normalizer_replaces_the_denominator(device, backend, dtype):
    inputs = ignore(make(device), 0.5)
    check(backend, inputs | {"normalizer": torch.tensor(7, dtype=dtype, device=device)})


@pytest.mark.parametrize("backend", BACKENDS)
def test_accumulated_batches_give_the_loss_of_the_whole(device, backend):
    inputs = ignore(make(device, rows=40), 0.7)
    count = (inputs["target"] != -100).sum()

    def two_steps(input, target, **rest):
        halves = zip(input.split((13, 27)), target.split((13, 27)), strict=True)
        return sum(run(backend, input=i, target=t, normalizer=count, **rest) for i, t in halves)

    assert_within_budget(two_steps, linear_cross_entropy_ref, inputs, wrt=parameters(inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ignore_index", (0, 5, -1, 1 << 40))
def test_ignore_index(device, backend, ignore_index):
    check(backend, ignore(make(device), 0.5, ignore_index) | {"ignore_index": ignore_index})


@pytest.mark.parametrize("backend", (*BACKENDS, "eager"))
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_a_batch_without_targets_gives_zero_and_zero_gradients(device, backend, reduction):
    inputs = ignore(make(device), 1.0)
    inputs |= {name: inputs[name].requires_grad_() for name in parameters(inputs)}
    loss = run(backend, **inputs, reduction=reduction)
    assert not loss.any()
    loss.sum().backward()
    for name in parameters(inputs):
        assert not inputs[name].grad.any(), name


@pytest.mark.parametrize("backend", BACKENDS)
@WIDTHS
@pytest.mark.parametrize("kind", ("one-hot", "offset", "large", "excluded"))
def test_extreme_logits(device, backend, kind, width, chunked):
    inputs = make(device, rows=40, vocab=300, width=width)
    # Of multiples of 1/8 every product and sum is exact: what errs is the softmax alone.
    inputs |= {name: inputs[name].mul(8).round().div(8) for name in parameters(inputs)}
    if kind in ("one-hot", "large"):
        inputs["linear_weight"] = inputs["linear_weight"] * (1024 if kind == "large" else 32)
        logits = inputs["input"] @ inputs["linear_weight"].T + inputs["linear_bias"]
        inputs["target"][::2] = logits.argmax(1)[::2]
    elif kind == "offset":
        inputs["linear_bias"] = inputs["linear_bias"] + 1e4
    else:  # a bias of -inf takes words out of the vocabulary: here a whole chunk of them
        inputs["linear_bias"][:140] = float("-inf")
        inputs["target"] = inputs["target"].clamp(min=140)
    check(backend, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@WIDTHS
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_a_row_that_is_not_finite_stays_alone_in_the_loss(device, backend, width, value):
    inputs = make(device, width=width)
    inputs["input"][3, 0] = value
    inputs["input"][5] = value
    check(backend, inputs | {"reduction": "none"})


def test_a_loss_near_zero_is_exact_and_never_negative(device):
    """The maximum and the target's logit are one number, so their difference has no rounding."""
    inputs = make(device, rows=64, vocab=90) | {"reduction": "none"}
    inputs["linear_weight"] = inputs["linear_weight"] * 1e4
    logits = inputs["input"] @ inputs["linear_weight"].T + inputs["linear_bias"]
    inputs["target"] = logits.argmax(1)
    for backend in ("triton", "torch") if device.type == "cpu" else ("triton",):
        assert (run(backend, **inputs) >= 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@WIDTHS
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts(device, backend, width, layout):
    inputs = make(device, width=width)
    for name in inputs:  # one by one: an expanded everything is one row and one word
        check(backend, inputs | {name: layout(inputs[name])})


@pytest.mark.parametrize("backend", BACKENDS)
@WIDTHS
def test_column_major_operands(device, backend, width):
    inputs = make(device, width=width)
    check(
        backend,
        inputs | {n: inputs[n].T.contiguous().T for n in ("input", "linear_weight")},
    )


def test_vocabulary_of_bert_on_the_cpu_default():
    check("torch", ignore(make("cpu", rows=7, vocab=30522, width=24), 0.3))


@pytest.mark.slow
@pytest.mark.parametrize(("vocab", "width"), ((30522, 128), (50265, 320)))
def test_vocabularies_of_bert_and_roberta(device, vocab, width):
    check("triton", ignore(make(device, rows=70, vocab=vocab, width=width), 0.3))


@pytest.mark.gpu
@pytest.mark.parametrize("width", (128, 768))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16), ids=("fp16", "bf16"))
def test_training_shape(width, dtype):
    inputs = make("cuda", rows=4915, vocab=30522, width=width, dtype=dtype)
    check("triton", ignore(inputs, 0.1))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.sampled_from(BACKENDS),
    st.integers(0, 70),
    st.integers(1, 200),
    st.sampled_from((8, 24, 33, 64, 100, 130)),
    st.floats(0, 1),
    st.booleans(),
    st.sampled_from(("mean", "sum", "none")),
    st.sampled_from(tuple(LAYOUTS)),
)
def test_property(backend, rows, vocab, width, fraction, bias, reduction, layout):
    inputs = make("cpu", rows, vocab, width, bias=bias)
    inputs = ignore({name: LAYOUTS[layout](tensor) for name, tensor in inputs.items()}, fraction)
    check(backend, inputs | {"reduction": reduction})


# --- against PyTorch ------------------------------------------------------------------------------


def pytorch_cross_entropy(input, linear_weight, target, linear_bias=None, **options):
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **options)


PYTORCH = [pytorch_cross_entropy]
if hasattr(F, "linear_cross_entropy"):
    PYTORCH.append(F.linear_cross_entropy)


@pytest.mark.parametrize("backend", (*BACKENDS, "eager"))
@pytest.mark.parametrize("theirs", PYTORCH, ids=lambda function: function.__name__)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_agrees_with_pytorch(device, backend, theirs, reduction):
    inputs = make(device, rows=65) | {"reduction": reduction}
    inputs["target"][::3] = -100
    assert_within_budget(functools.partial(run, backend), theirs, inputs, wrt=parameters(inputs))


@WIDTHS
def test_float64_gradients_are_those_of_finite_differences(width, chunked):
    inputs = ignore(make("cpu", rows=9, vocab=50, width=width // 16, dtype=torch.float64), 0.3)
    inputs["input"] = inputs["input"].nan_to_num()
    names = parameters(inputs)

    def loss(*tensors):
        changed = dict(zip(names, tensors, strict=True))
        return run("torch", **(inputs | changed), reduction="none")

    tensors = [inputs[name].requires_grad_() for name in names]
    assert loss(*tensors).dtype is torch.float64
    assert torch.autograd.gradcheck(loss, tensors)


# --- planted bugs of others -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bug", ("bias not recomputed", "ignored rows count", None))
def test_a_wrong_backward_is_caught(device, backend, bug, monkeypatch):
    """The bias must enter the recomputed softmax, and ignored rows no gradient."""
    if backend == "torch" and device.type == "cuda":
        pytest.skip("the torch backend of linear_cross_entropy is for CPU tensors")
    right = op_module.OP.backends[backend]

    def wrong(grad_loss, input, weight, bias, target, loss, m, l_i, ignore_index, *needed):
        if bug == "bias not recomputed":
            bias = None
        if bug == "ignored rows count":
            ignored = target == ignore_index
            target, l_i = target.masked_fill(ignored, 0), l_i.masked_fill(ignored, 1.0)
        return right.backward(
            grad_loss, input, weight, bias, target, loss, m, l_i, ignore_index, *needed
        )

    broken = dataclasses.replace(right, backward=wrong)
    monkeypatch.setitem(op_module.OP.backends, backend, broken)
    inputs = make(device)
    inputs["target"][::3] = -100
    if bug is None:
        return check(backend, inputs)
    with pytest.raises(BudgetExceeded, match="gradient"):
        check(backend, inputs)


@pytest.mark.parametrize("backend", (*BACKENDS, "eager"))
@pytest.mark.parametrize("compiler", ("aot_eager", "inductor"))
def test_compiled_loss_with_ignored_rows_is_the_loss(device, backend, compiler):
    if backend == "torch" and device.type == "cuda":
        pytest.skip("the torch backend of linear_cross_entropy is for CPU tensors")
    inputs = ignore(make(device, rows=65), 0.85)
    compiled = torch.compile(ops.linear_cross_entropy, fullgraph=True, backend=compiler)
    # A cached graph would be one that called an older schema of the operator.
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with fastplm.use_backend(backend), uncached:
        assert_within_budget(
            lambda **inputs: compiled(**inputs),
            linear_cross_entropy_ref,
            inputs,
            wrt=parameters(inputs),
        )


# --- contract of the operator ---------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@WIDTHS
def test_repeats_bit_for_bit(device, backend, width, chunked):
    inputs = ignore(make(device, rows=70, vocab=300, width=width), 0.3)
    assert_repeatable(functools.partial(run, backend), inputs, wrt=parameters(inputs))


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(device, backend):
    if backend == "torch" and device.type == "cuda":
        pytest.skip("the torch backend of linear_cross_entropy is for CPU tensors")
    inputs = make(device, rows=9, vocab=20)
    inputs["target"][::2] = -100
    names = ("input", "linear_weight", "linear_bias")
    tensors = [inputs[name].requires_grad_() for name in names]
    arguments = (*tensors, inputs["target"], -100, backend)
    torch.library.opcheck(torch.ops.fastplm.linear_cross_entropy_fwd, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@WIDTHS
@pytest.mark.parametrize("name", ("input", "linear_weight", "linear_bias"))
def test_only_the_gradients_that_are_needed(device, backend, width, name):
    if backend == "torch" and device.type == "cuda":
        pytest.skip("the torch backend of linear_cross_entropy is for CPU tensors")
    inputs = ignore(make(device, width=width), 0.5)
    names = parameters(inputs)
    tensors = [inputs[n] for n in names]
    forward = torch.ops.fastplm.linear_cross_entropy_fwd
    backward = torch.ops.fastplm.linear_cross_entropy_bwd
    out = forward(*tensors, inputs["target"], -100, backend)
    saved = (torch.ones_like(out[0]), *tensors, inputs["target"], *out, -100)
    whole = backward(*saved, True, True, True, backend)
    some = backward(*saved, *(n == name for n in names), backend)
    for n, one, all_ in zip(names, some, whole, strict=True):
        assert torch.equal(one, all_) if n == name else one.numel() == 0, n

    asked = inputs[name].detach().requires_grad_()
    run(backend, **(inputs | {name: asked}), reduction="sum").backward()
    assert torch.equal(asked.grad, whole[names.index(name)])


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operator inside returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastplm":  # look inside: an opaque operator is one call to a mode
            way = "forward" if "fwd" in func.__name__ else "backward"
            with self:
                out = getattr(op_module.OP.backends[args[-1]], way)(*args[:-1])
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return out


@pytest.mark.parametrize("backend", (*BACKENDS, "eager"))
@pytest.mark.parametrize("width", (64, 160))
def test_no_matrix_of_logits(backend, width, chunked):
    rows, vocab = 220, 300
    inputs = make("cpu", rows=rows, vocab=vocab, width=width)
    inputs |= {name: inputs[name].requires_grad_() for name in parameters(inputs)}
    with Largest() as largest:
        run(backend, **inputs).backward()
    logits, weight = rows * vocab * 4, vocab * width * 4
    if backend == "eager":
        assert largest.nbytes >= logits
    else:
        assert weight <= largest.nbytes < logits


def test_compiles_without_graph_breaks_or_recompiles(device):
    inputs = ignore(make(device), 0.5)
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(ops.linear_cross_entropy, fullgraph=True, backend=count)
    for _ in range(3):
        torch.testing.assert_close(compiled(**inputs), ops.linear_cross_entropy(**inputs))
    assert count.frame_count == 1
    with fastplm.use_backend("eager"):
        compiled(**inputs)
    assert count.frame_count == 2


def test_autocast_as_linear(device):
    inputs = make(device, dtype=torch.bfloat16)
    expected = ops.linear_cross_entropy(**inputs)
    wide = {name: inputs[name].float() for name in parameters(inputs)}
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(ops.linear_cross_entropy(**(inputs | wide)), expected)


@pytest.mark.gpu
def test_the_forward_and_backward_fit_in_one_cuda_graph():
    inputs = ignore(make("cuda", rows=257, vocab=1000, width=128, dtype=torch.bfloat16), 0.5)
    names = parameters(inputs)
    tensors = [inputs[name].requires_grad_() for name in names]

    def step():
        return torch.autograd.grad(ops.linear_cross_entropy(**inputs), tensors)

    expected = step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert torch.equal(got, want)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", (*BACKENDS, "eager"))
@pytest.mark.parametrize("bad", (-1, 70, 1 << 40))
def test_a_target_outside_the_vocabulary_is_an_error_on_the_cpu(backend, bad):
    inputs = make("cpu")
    inputs["target"][4] = bad
    with pytest.raises(fastplm.FastplmError) as caught:
        run(backend, **inputs)
    assert isinstance(caught.value, ValueError)
    assert f"`target` got target {bad}" in str(caught.value) and "V = 70" in str(caught.value)


@pytest.mark.parametrize("bad", (-1, 70, (1 << 32) + 3))
def test_where_it_cannot_be_seen_a_target_outside_the_vocabulary_gives_nan(device, bad):
    inputs = ignore(make(device), 0.5)
    row = int((inputs["target"] != -100).nonzero()[0])
    inputs["target"][row] = bad
    expected = linear_cross_entropy_ref(**inputs, reduction="none")
    names = ("input", "linear_weight", "linear_bias", "target")
    arguments = [inputs[name] for name in names]
    loss, *statistics = kernels().linear_cross_entropy_fwd(*arguments, -100)
    assert loss.isnan().nonzero().flatten().tolist() == [row]
    assert torch.equal(loss.isnan(), expected.isnan())
    grads = kernels().linear_cross_entropy_bwd(
        torch.ones_like(loss), *arguments, loss, *statistics, -100, True, True, True
    )
    assert grads[0][row].isnan().all() and grads[0].isnan().sum() == grads[0].shape[1]
    assert grads[2].isnan().all()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    (
        (dict(input=None), TypeError, "`input` got a NoneType"),
        (dict(input=torch.zeros(2, 3, 4)), ValueError, "`input` got 3 dimensions"),
        (dict(input=torch.zeros(33, 16)), ValueError, "`linear_weight` got shape (70, 32)"),
        (dict(input=torch.zeros(33, 32).half()), TypeError, "`linear_weight` got torch.float32"),
        (dict(input=torch.zeros(33, 32).long()), TypeError, "`input` got torch.int64"),
        (dict(input=torch.zeros(33, 0)), ValueError, "`input` got row width 0"),
        (dict(linear_weight=torch.zeros(0, 32)), ValueError, "`linear_weight` got no rows"),
        (dict(linear_bias=torch.zeros(69)), ValueError, "`linear_bias` got shape (69,)"),
        (dict(linear_bias=torch.zeros(70, 1)), ValueError, "`linear_bias` got 2 dimensions"),
        (dict(linear_bias=torch.zeros(70).half()), TypeError, "`linear_bias` got torch.float16"),
        (dict(target=torch.zeros(33).int()), TypeError, "`target` got torch.int32"),
        (dict(target=torch.zeros(32).long()), ValueError, "`target` got shape (32,)"),
        (dict(reduction="max"), ValueError, "`reduction` got 'max'"),
        (dict(label_smoothing=0.1), NotImplementedError, "`label_smoothing` got 0.1"),
        (dict(normalizer=3), TypeError, "`normalizer` got a int"),
        (dict(normalizer=torch.ones(1)), ValueError, "`normalizer` got 1 dimensions"),
        (
            dict(normalizer=torch.tensor(3), reduction="sum"),
            ValueError,
            "`normalizer` got a tensor with reduction='sum'",
        ),
    ),
)
def test_errors_name_argument_got_expected_fix(change, error, words):
    with pytest.raises(error) as caught:
        ops.linear_cross_entropy(**(make("cpu") | change))
    assert isinstance(caught.value, fastplm.FastplmError)
    assert words in str(caught.value) and "expected" in str(caught.value)


def test_float64_says_why_triton_cannot_run_it():
    with fastplm.use_backend("triton"), pytest.raises(RuntimeError, match="float64: the kernels"):
        ops.linear_cross_entropy(**make("cpu", dtype=torch.float64))
