"""ops.replaced_token_loss against its reference: loss and gradients, by the error budget."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import fastplm
from fastplm import ops
from fastplm.reference.replaced_token_loss import replaced_token_loss_ref
from fastplm.testing import (
    LAYOUTS,
    BudgetExceeded,
    assert_repeatable,
    assert_within_budget,
    poisoned_memory,
)

BACKENDS = ("torch", "triton")
ALL_BACKENDS = ("eager", *BACKENDS)
WRT = ("input", "weight", "bias")
NAN, INF = float("nan"), float("inf")
DTYPES = pytest.mark.parametrize(
    "dtype", (torch.float32, torch.float16, torch.bfloat16), ids=("fp32", "fp16", "bf16")
)


def run(backend: str, **inputs) -> torch.Tensor:
    if backend == "torch" and inputs["input"].is_cuda:
        pytest.skip("the torch backend of replaced_token_loss is for CPU tensors")
    with fastplm.use_backend(backend):
        return ops.replaced_token_loss(**inputs)


def each(loss):
    """``loss`` of every problem in a batch of them.

    The gradient of a bias is one number, and so is a mean: whether the rounding error of one number
    is smaller than that of another is luck. Over several problems it is a statement.
    """

    def losses(**inputs):
        per_problem = [name for name, value in inputs.items() if isinstance(value, torch.Tensor)]
        problems = range(len(inputs["input"]))
        return torch.stack(
            [loss(**inputs | {n: inputs[n][i] for n in per_problem}) for i in problems]
        )

    return losses


def check(backend: str, inputs: dict, wrt=WRT) -> None:
    candidate = each(functools.partial(run, backend))
    assert_within_budget(candidate, each(replaced_token_loss_ref), inputs, wrt=wrt)


def make(device, rows=63, width=40, dtype=torch.float32, problems=6, **more) -> dict:
    """Problems [S, N, E] with logits of size 1, a fifth of the tokens replaced."""
    return dict(
        input=torch.randn(problems, rows, width, device=device).to(dtype),
        weight=(torch.randn(problems, width, device=device) * width**-0.5).to(dtype),
        replaced=torch.rand(problems, rows, device=device) < 0.2,
        bias=torch.randn(problems, 1, device=device).to(dtype),
        **more,
    )


def random_mask(inputs: dict) -> dict:
    return inputs | {"mask": torch.rand_like(inputs["replaced"], dtype=torch.float32) < 0.7}


def first(inputs: dict) -> dict:
    """The first problem alone, as leaves."""
    inputs = {n: v[0] if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    return inputs | {name: inputs[name].detach().requires_grad_() for name in WRT}


def loss_and_grads(backend: str, upstream=None, **inputs):
    with poisoned_memory():
        loss = run(backend, **inputs)
        return loss.detach(), *torch.autograd.grad(loss, [inputs[name] for name in WRT], upstream)


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
@pytest.mark.parametrize("rows", (0, 1, 63, 257))
@pytest.mark.parametrize("width", (1, 40, 64, 768))
def test_shapes_and_dtypes(device, backend, rows, width, dtype):
    # A wide row has a wide gradient of the weight, so that one problem is enough of them.
    wide = width == 768
    inputs = make(device, rows, width, dtype, problems=1 if wide else 6, reduction="none")
    check(backend, random_mask(inputs), wrt=("input", "weight") if wide else WRT)


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("masked", (False, True), ids=("all rows", "mask"))
def test_reductions(device, backend, reduction, masked, dtype):
    inputs = make(device, dtype=dtype, reduction=reduction)
    check(backend, random_mask(inputs) if masked else inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", (torch.float32, torch.int64), ids=("fp32", "int64"))
def test_normalizer_replaces_the_denominator(device, backend, kind):
    normalizer = torch.tensor([100, 3, 1, 63, 7, 64], device=device).to(kind)
    check(backend, random_mask(make(device, normalizer=normalizer)))


@pytest.mark.parametrize(("least_tiles", "most_groups"), ((1, 1024), (4, 3)))
def test_many_rows(device, monkeypatch, least_tiles, most_groups):
    """More groups of rows than are added up at once, and groups of more tiles than the fewest."""
    kernels = importlib.import_module("fastplm.triton_kernels.replaced_token_loss")
    monkeypatch.setattr(kernels, "_MIN_TILES_PER_GROUP", least_tiles)
    monkeypatch.setattr(kernels, "_MAX_GROUPS", most_groups)
    inputs = random_mask(make(device, rows=2200, width=24, problems=1, reduction="none"))
    check("triton", inputs, wrt=("input", "weight"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_bias_and_with_a_bias_of_no_dimension(device, backend):
    inputs = make(device)
    check(backend, inputs | {"bias": inputs["bias"][:, 0]})
    check(backend, inputs | {"bias": None}, wrt=("input", "weight"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrt", ("input", "weight", "bias"))
def test_one_gradient_alone(device, backend, wrt):
    check(backend, random_mask(make(device)), wrt=(wrt,))


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
def test_a_row_that_does_not_count_may_hold_anything(device, backend, dtype):
    inputs = random_mask(make(device, dtype=dtype))
    hole = ~inputs["mask"][..., None]
    check(backend, inputs | {"input": inputs["input"].masked_fill(hole, NAN)})
    check(backend, inputs | {"input": inputs["input"].masked_fill(hole, INF)})


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@DTYPES
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("rows", (0, 63))
def test_no_row_counts(device, backend, rows, reduction, dtype):
    inputs = first(make(device, rows, dtype=dtype, reduction=reduction))
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    with torch.no_grad():
        inputs["input"].fill_(NAN)
    upstream = torch.ones(rows if reduction == "none" else (), device=device)
    for result in loss_and_grads(backend, upstream, **inputs, mask=mask):
        assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_upstream_gradient_of_a_row_that_does_not_count_does_not_matter(device, backend):
    inputs = first(random_mask(make(device, reduction="none")))
    upstream = torch.randn(63, device=device)
    clean = loss_and_grads(backend, upstream, **inputs)
    poisoned = loss_and_grads(backend, upstream.masked_fill(~inputs["mask"], NAN), **inputs)
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_row_that_counts_is_not_hidden(device, backend):
    inputs = random_mask(make(device, reduction="none"))
    inputs["mask"][:, 3] = True
    inputs["input"][:, 3, 0] = NAN
    check(backend, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_that_is_not_finite(device, backend):
    inputs = random_mask(make(device, reduction="none"))
    inputs["weight"][:, 0] = INF
    check(backend, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
@pytest.mark.parametrize(("name", "size"), (("weight", 1e-4), ("weight", 30.0), ("bias", 1e4)))
def test_logits_of_any_size(device, backend, name, size, dtype):
    inputs = make(device, dtype=dtype, reduction="none")
    check(backend, inputs | {name: inputs[name] * size})


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("replaced", (False, True))
def test_values_at_the_limits(device, backend, replaced):
    """softplus of z in closed form, to the last bits on both sides, signed zero included."""
    logit = torch.tensor([0.0, 10.0, -10.0, 200.0, -200.0, INF, -INF], device=device)
    input = logit[:, None].requires_grad_()
    flags = torch.full((7,), replaced, device=device)
    one = torch.ones(1, device=device)
    loss = run(backend, input=input, weight=one, replaced=flags, reduction="none")
    x = (-logit if replaced else logit).double()
    expected = torch.where(x > 0, x, 0) + (-x.abs()).exp().log1p()
    torch.testing.assert_close(loss, expected.float())
    assert not loss.signbit().any()
    (grad,) = torch.autograd.grad(loss.sum(), input)
    slope = (-1 if replaced else 1) / (1 + (-x).exp())
    torch.testing.assert_close(grad[:, 0], slope.float())


def test_is_the_loss_of_the_published_discriminator(device):
    inputs = first(random_mask(make(device)))
    logit = inputs["input"] @ inputs["weight"] + inputs["bias"]
    mask = inputs["mask"]
    expected = F.binary_cross_entropy_with_logits(logit[mask], inputs["replaced"][mask].float())
    torch.testing.assert_close(ops.replaced_token_loss(**inputs), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n != "expanded"])
def test_layouts(device, backend, layout):
    inputs = random_mask(make(device))
    check(backend, {name: LAYOUTS[layout](tensor) for name, tensor in inputs.items()})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "source", ("transposed", "every other", "expanded rows", "expanded weight")
)
def test_strides_other_than_one(device, backend, source):
    inputs = random_mask(make(device, rows=64, width=40))
    if source == "transposed":
        inputs["input"] = torch.randn(6, 40, 64, device=device).transpose(1, 2)
    elif source == "every other":
        inputs = {n: v if n in ("weight", "bias") else v[:, ::2] for n, v in inputs.items()}
    elif source == "expanded rows":
        inputs["input"] = inputs["input"][:, :1].expand(6, 64, 40)
        inputs["mask"] = torch.ones(6, 1, dtype=torch.bool, device=device).expand(6, 64)
    else:
        inputs["weight"] = inputs["weight"][:, :1].expand(6, 40)
    check(backend, inputs)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.sampled_from(BACKENDS),
    st.integers(0, 70),
    st.integers(1, 100),
    st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    st.booleans(),
    st.sampled_from(("mean", "sum", "none")),
)
def test_property(backend, rows, width, dtype, masked, reduction):
    torch.manual_seed(rows * 1000 + width)
    inputs = make("cpu", rows, width, dtype, reduction=reduction)
    check(backend, random_mask(inputs) if masked else inputs)


def planted(bug):
    """A copy of the loss with one classic bug."""

    def loss(input, weight, replaced, bias, mask, reduction="mean"):
        if bug == "flipped labels":
            replaced = ~replaced
        if bug == "dropped bias":
            bias = bias * 0
        if bug == "dropped bias gradient":
            bias = bias.detach() + 0 * bias
        if bug == "dropped weight gradient":
            weight = weight.detach() + 0 * weight
        if bug == "ignored mask":
            mask = torch.ones_like(mask)
        if bug == "labels off by one":
            replaced = replaced.roll(1)
        if bug == "mean over all rows":
            total = replaced_token_loss_ref(
                input, weight, replaced, bias=bias, mask=mask, reduction="sum"
            )
            return total / len(input)
        return replaced_token_loss_ref(
            input, weight, replaced, bias=bias, mask=mask, reduction=reduction
        )

    return loss


@DTYPES
@pytest.mark.parametrize(
    ("bug", "where"),
    (
        ("flipped labels", "output"),
        ("labels off by one", "output"),
        ("dropped bias", "output"),
        ("ignored mask", "output"),
        ("mean over all rows", "output"),
        ("dropped bias gradient", "gradient of bias"),
        ("dropped weight gradient", "gradient of weight"),
    ),
)
def test_planted_bugs_are_caught(bug, where, dtype):
    inputs = random_mask(make("cpu", dtype=dtype))
    assert_within_budget(each(planted(None)), each(replaced_token_loss_ref), inputs, wrt=WRT)
    with pytest.raises(BudgetExceeded, match=where):
        assert_within_budget(each(planted(bug)), each(replaced_token_loss_ref), inputs, wrt=WRT)


@pytest.mark.parametrize("backend", BACKENDS)
@DTYPES
def test_repeats_bit_for_bit(device, backend, dtype):
    inputs = random_mask(make(device, rows=257, width=64, dtype=dtype, problems=2))
    assert_repeatable(each(functools.partial(run, backend)), inputs, wrt=WRT)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optional", (False, True), ids=("plain", "bias and mask"))
def test_opcheck(device, backend, optional):
    if backend == "torch" and device.type == "cuda":
        pytest.skip("the torch backend of replaced_token_loss is for CPU tensors")
    inputs = first(random_mask(make(device)))
    input, weight, replaced = inputs["input"], inputs["weight"], inputs["replaced"]
    bias, mask = (inputs["bias"].reshape(()), inputs["mask"]) if optional else (None, None)
    arguments = (input, weight, bias, replaced, mask, backend)
    torch.library.opcheck(torch.ops.fastplm.replaced_token_loss_fwd, arguments)
    logit = torch.randn(63, device=device)
    for need in ((True, True), (True, False), (False, True)):
        tensors = (logit.expand(63), input.detach(), weight.detach(), logit, replaced, mask)
        arguments = (*tensors, *need, backend)
        torch.library.opcheck(torch.ops.fastplm.replaced_token_loss_bwd, arguments)


def test_compiles_without_graph_breaks_or_recompiles(device):
    inputs = first(random_mask(make(device)))
    count = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(ops.replaced_token_loss, fullgraph=True, backend=count)
    for _ in range(3):
        torch.testing.assert_close(compiled(**inputs), ops.replaced_token_loss(**inputs))
    assert count.frame_count == 1
    with fastplm.use_backend("eager"):
        compiled(**inputs)
    assert count.frame_count == 2


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_gradient_compiles_with_dynamic_shapes(device, reduction):
    compiled = torch.compile(
        ops.replaced_token_loss, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for rows in (63, 20, 257):
        inputs = first(random_mask(make(device, rows, reduction=reduction)))
        results = []
        for loss in (ops.replaced_token_loss, compiled):
            out = loss(**inputs)
            upstream = torch.ones_like(out)
            results.append((out, *torch.autograd.grad(out, [inputs[n] for n in WRT], upstream)))
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected)


def test_autocast_as_linear(device):
    inputs = first(make(device))
    halved = {n: v.bfloat16() if v.is_floating_point() else v for n, v in inputs.items()}
    with torch.autocast(device.type, torch.bfloat16):
        loss = ops.replaced_token_loss(**inputs)
    assert loss.dtype is torch.float32
    assert torch.equal(loss, ops.replaced_token_loss(**halved))
    assert torch.autograd.grad(loss, inputs["weight"])[0].dtype is torch.float32


def test_float64_runs_on_the_cpu_default():
    inputs = first(random_mask(make("cpu", dtype=torch.float64)))
    loss = ops.replaced_token_loss(**inputs)
    assert loss.dtype is torch.float64
    torch.testing.assert_close(loss, replaced_token_loss_ref(**inputs))
    small = {n: v[:5] if n in ("input", "replaced", "mask") else v for n, v in inputs.items()}
    assert torch.autograd.gradcheck(
        lambda *tensors: ops.replaced_token_loss(**small | dict(zip(WRT, tensors, strict=True))),
        [small[name] for name in WRT],
    )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    (
        (dict(input=None), TypeError, "`input` got a NoneType"),
        (dict(input=torch.zeros(2, 3, 4)), ValueError, "`input` got 3 dimensions"),
        (dict(input=torch.zeros(63, 0), weight=torch.zeros(0)), ValueError, "row width 0"),
        (dict(input=torch.zeros(63, 40).long()), TypeError, "`input` got torch.int64"),
        (dict(weight=torch.zeros(1, 40)), ValueError, "`weight` got 2 dimensions"),
        (dict(weight=torch.zeros(41)), ValueError, "`weight` got shape (41,)"),
        (dict(weight=torch.zeros(40).half()), TypeError, "`weight` got torch.float16"),
        (dict(replaced=torch.zeros(63)), TypeError, "`replaced` got torch.float32"),
        (dict(replaced=torch.zeros(62).bool()), ValueError, "`replaced` got shape (62,)"),
        (dict(bias=0.5), TypeError, "`bias` got a float"),
        (dict(bias=torch.zeros(2)), ValueError, "`bias` got shape (2,)"),
        (dict(bias=torch.zeros(1).double()), TypeError, "`bias` got torch.float64"),
        (dict(mask=torch.ones(63).long()), TypeError, "`mask` got torch.int64"),
        (dict(mask=torch.ones(7, 9).bool()), ValueError, "`mask` got 2 dimensions"),
        (dict(mask=torch.ones(63, device="meta").bool()), ValueError, "`mask` got device meta"),
        (dict(reduction="avg"), ValueError, "`reduction` got 'avg'"),
        (dict(normalizer=3.0), TypeError, "`normalizer` got a float"),
        (dict(normalizer=torch.ones(2)), ValueError, "`normalizer` got 1 dimensions"),
        (dict(normalizer=torch.ones(()), reduction="sum"), ValueError, "`normalizer` got a tensor"),
    ),
)
def test_errors_name_argument_got_expected_fix(change, error, words):
    with pytest.raises(error) as caught:
        ops.replaced_token_loss(**first(make("cpu")) | change)
    assert isinstance(caught.value, fastplm.FastplmError)
    assert words in str(caught.value) and "expected" in str(caught.value)


def test_the_fake_makes_the_same_checks():
    tensors = torch.zeros(63, 40, device="meta"), torch.zeros(41, device="meta")
    replaced = torch.zeros(63, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match=r"`weight` got shape \(41,\)"):
        torch.ops.fastplm.replaced_token_loss_fwd(*tensors, None, replaced, None, "torch")


def test_a_forced_backend_that_cannot_run_says_every_reason():
    with fastplm.use_backend("cuda"), pytest.raises(RuntimeError) as caught:
        ops.replaced_token_loss(**first(make("cpu")))
    for words in ("backend 'cuda' was forced", "triton: ", "torch: can run it", "eager: "):
        assert words in str(caught.value)
