"""ops.linear_cross_entropy against its reference: loss and gradients by the error budget, in both
data flows of every backend; statistics; and samples, one by one."""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastplm
from fastplm import ops
from fastplm._machine import peak_bytes
from fastplm.reference.linear_cross_entropy import (
    linear_cross_entropy_ref,
    row_statistics_ref,
    uniform_level,
)
from fastplm.reference.philox import Stream, draw
from fastplm.testing import FORWARD_FACTOR, assert_repeatable, assert_within_budget, poisoned_memory
from step_model import NO_KERNEL

from ..pairwise import pairwise

# The package exports the function under the name of its module.
op_module = importlib.import_module("fastplm.ops.linear_cross_entropy")
torch_module = importlib.import_module("fastplm.ops._linear_cross_entropy_torch")

PARAMETERS = ("input", "linear_weight", "linear_bias")
NAN, INF = float("nan"), float("inf")


class Flow(NamedTuple):
    """A backend and one of its data flows; rows of ``width`` run the kernels for such rows."""

    backend: str
    logits_budget: int
    width: int = 32


ROOM = 1 << 40
FLOWS = {
    "torch-kept": Flow("torch", ROOM),
    "torch-recomputed": Flow("torch", 0),
    "triton-kept": Flow("triton", ROOM),
    "triton-recomputed": Flow("triton", 0),
}
EAGER = Flow("eager", 0)


def flows(**some: Flow):
    return pytest.mark.parametrize("flow", some.values(), ids=some.keys())


#: Rows wider than a tile recompute through a buffer.
PATHS = FLOWS | {"triton-recomputed-wide": Flow("triton", 0, 160)}
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = {"fp32": torch.float32, **HALF}
each_flow = flows(**FLOWS)
each_path = flows(**PATHS)
each_flow_and_eager = flows(**FLOWS, eager=EAGER)
each_path_and_eager = flows(**PATHS, eager=EAGER)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
half_precision = pytest.mark.parametrize("dtype", HALF.values(), ids=HALF)


def configs():
    return importlib.import_module("fastplm.triton_kernels.linear_cross_entropy.configs")


# --- calls ----------------------------------------------------------------------------------------


def run(flow: Flow, function=ops.linear_cross_entropy, **inputs):
    skip_where_it_cannot_run(flow, inputs["input"].device)
    with fastplm.use_backend(flow.backend):
        return function(**inputs, logits_budget=flow.logits_budget)


def skip_where_it_cannot_run(flow: Flow, device: torch.device) -> None:
    if flow.backend == "torch" and device.type == "cuda":
        pytest.skip("the torch backend of linear_cross_entropy is for CPU tensors")


def run_with_sample(flow: Flow, seed=0, **inputs):
    return run(flow, ops.linear_cross_entropy_with_sample, seed=seed, **inputs)


def sampled(flow: Flow, **inputs) -> torch.Tensor:
    """The samples alone, drawn in this flow: logits are kept only if a gradient is needed."""
    with poisoned_memory():
        return run_with_sample(flow, **with_gradients(inputs))[1]


def parameters(inputs: dict) -> tuple[str, ...]:
    return tuple(name for name in PARAMETERS if name in inputs)


def with_gradients(inputs: dict) -> dict:
    return inputs | {n: inputs[n].detach().requires_grad_() for n in parameters(inputs)}


def check(flow: Flow, inputs: dict, reference=linear_cross_entropy_ref) -> None:
    candidate = functools.partial(run, flow)
    assert_within_budget(candidate, reference, inputs, wrt=parameters(inputs))


def loss_and_grads(flow: Flow, inputs: dict, upstream=None, function=ops.linear_cross_entropy):
    """The loss, the other results, and the gradients by name."""
    inputs = with_gradients(inputs)
    loss, *rest = results(run(flow, function, **inputs))
    upstream = torch.ones_like(loss) if upstream is None else upstream
    grads = torch.autograd.grad(loss, [inputs[n] for n in parameters(inputs)], upstream)
    return loss.detach(), rest, dict(zip(parameters(inputs), grads, strict=True))


def results(out) -> tuple:
    return out if isinstance(out, tuple) else (out,)


# --- inputs ---------------------------------------------------------------------------------------


def make(device, rows=33, vocab=70, width=32, dtype=torch.float32, bias=True):
    inputs = dict(
        input=torch.randn(rows, width, device=device).to(dtype),
        linear_weight=(torch.randn(vocab, width, device=device) * 2 * width**-0.5).to(dtype),
        target=torch.randint(0, vocab, (rows,), device=device),
    )
    if bias:
        inputs["linear_bias"] = torch.randn(vocab, device=device).to(dtype)
    return inputs


def exact(device, rows=33, vocab=70, width=32, dtype=torch.float32, bias=True):
    """Inputs whose logits are exact in every dtype and order of summation: multiples of 1/8."""
    inputs = make(device, rows, vocab, width, bias=bias)
    inputs["input"] = inputs["input"].sign() * (inputs["input"].abs() > 0.5)
    inputs |= {name: inputs[name].mul(8).round().div(8).to(dtype) for name in parameters(inputs)}
    assert exact_logits(inputs).abs().max() < 32
    return inputs


def exact_logits(inputs: dict) -> torch.Tensor:
    """The logits, fp64 [N, V]; 0 in ignored rows."""
    rows = inputs["input"].double().masked_fill((inputs["target"] == -100)[:, None], 0.0)
    logits = rows @ inputs["linear_weight"].double().T
    return logits + inputs["linear_bias"].double() if "linear_bias" in inputs else logits


def ignore(inputs: dict, fraction: float, ignore_index: int = -100) -> dict:
    """The inputs with a fraction of the rows ignored; these hold NaN."""
    rows = inputs["target"].shape[0]
    ignored = torch.arange(rows) < round(fraction * rows)
    ignored = ignored[torch.randperm(rows)].to(inputs["target"].device)
    return inputs | dict(
        target=inputs["target"].masked_fill(ignored, ignore_index),
        input=inputs["input"].masked_fill(ignored[:, None], NAN),
    )


@pytest.fixture
def chunked(monkeypatch):
    """Makes chunks, splits and buffers so small that a small vocabulary needs several of each."""
    monkeypatch.setattr(torch_module, "_CHUNK_ELEMENTS", 1 << 10)
    monkeypatch.setattr(torch_module, "_CHUNK_COLUMNS", 16)
    monkeypatch.setattr(configs(), "_SPLIT_COLUMNS", 128)
    monkeypatch.setattr(configs(), "_SCRATCH_ELEMENTS", 1 << 12)
    monkeypatch.setattr(configs(), "rows_config", lambda input: (4, 64, 4))
    monkeypatch.setattr(configs(), "BIAS_TILE", (16, 32, 4))


# --- values and gradients -------------------------------------------------------------------------


@pairwise(
    flow=FLOWS,
    vocab_and_bias={"1-bias": (1, True), "17": (17, False), "200-bias": (200, True)},
    width=(1, 17, 64, 128, 160),
)
def test_shapes(device, flow, vocab_and_bias, width):
    vocab, bias = vocab_and_bias
    check(flow, make(device, vocab=vocab, width=width, bias=bias))


@pairwise(
    flow=FLOWS,
    width=(64, 128, 768),
    vocab=(17, 1000),
    ignored=(0.0, 0.85, 1.0),
    dtype=DTYPES,
    bias=(True, False),
    smoothing=(0.0, 0.1),
)
def test_ignored_rows_dtypes_and_smoothing(
    device, flow, width, vocab, ignored, dtype, bias, smoothing
):
    inputs = make(device, 30, vocab, width, dtype, bias)
    check(flow, ignore(inputs, ignored) | {"label_smoothing": smoothing})


@pairwise(flow=PATHS, dtype=DTYPES, smoothing=(0.0, 0.1, 1.0))
def test_chunks_and_splits(device, flow, dtype, smoothing, chunked):
    inputs = ignore(make(device, rows=60, vocab=300, width=flow.width, dtype=dtype), 0.3)
    kept = (inputs["target"] >= 0).nonzero()[:, 0]
    steps = (torch_module._chunk_sizes(len(kept), 300)[0], configs()._SPLIT_COLUMNS)
    firsts = torch.tensor([first for step in steps for first in range(step, 300, step)])
    assert len(firsts) < len(kept)
    inputs["target"][kept[: len(firsts)]] = firsts.to(device)
    check(flow, inputs | {"label_smoothing": smoothing})


@pairwise(flow=FLOWS, reduction=("mean", "sum", "none"), dtype=DTYPES)
def test_reductions(device, flow, reduction, dtype):
    inputs = ignore(make(device, dtype=dtype), 0.5)
    check(flow, inputs | {"reduction": reduction, "label_smoothing": 0.2})


@each_path
@each_dtype
def test_upstream_gradients_of_every_size_and_sign(device, flow, dtype):
    """Kept logits are computed before these numbers are known."""
    inputs = ignore(make(device, rows=40, width=flow.width, dtype=dtype), 0.3)
    scale = torch.randn(40, device=device) * 10.0 ** torch.randint(-3, 3, (40,), device=device)
    scale[::4] = 0.0

    def weighted(function, input, **rest):
        return function(input=input, **rest, reduction="none") * scale

    candidate = functools.partial(weighted, functools.partial(run, flow))
    reference = functools.partial(weighted, linear_cross_entropy_ref)
    assert_within_budget(candidate, reference, inputs, wrt=parameters(inputs))


@each_path
def test_rows_of_an_upstream_gradient_of_zero_get_none(device, flow):
    inputs = make(device, rows=40, width=flow.width) | {"reduction": "none"}
    upstream = torch.randn(40, device=device).masked_fill(torch.arange(40, device=device) > 4, 0.0)
    *_, some = loss_and_grads(flow, inputs, upstream)
    assert some["input"][:5].any(1).all() and not some["input"][5:].any()
    *_, none = loss_and_grads(flow, inputs, torch.zeros_like(upstream))
    assert not any(grad.any() for grad in none.values())


@each_flow
@pytest.mark.parametrize("dtype", (torch.int64, torch.float32, torch.float64))
def test_normalizer_replaces_the_denominator(device, flow, dtype):
    inputs = ignore(make(device), 0.5)
    check(flow, inputs | {"normalizer": torch.tensor(7, dtype=dtype, device=device)})


@each_flow
def test_accumulated_batches_give_the_loss_of_the_whole(device, flow):
    inputs = ignore(make(device, rows=40), 0.7)
    count = (inputs["target"] != -100).sum()

    def two_steps(input, target, **rest):
        halves = zip(input.split((13, 27)), target.split((13, 27)), strict=True)
        return sum(run(flow, input=i, target=t, normalizer=count, **rest) for i, t in halves)

    assert_within_budget(two_steps, linear_cross_entropy_ref, inputs, wrt=parameters(inputs))


@each_flow
@pytest.mark.parametrize("ignore_index", (0, 5, -1, 1 << 40))
def test_ignore_index(device, flow, ignore_index):
    inputs = ignore(make(device), 0.5, ignore_index)
    check(flow, inputs | {"ignore_index": ignore_index, "label_smoothing": 0.1})


@each_flow_and_eager
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_a_batch_without_targets_gives_zero_and_zero_gradients(device, flow, reduction):
    inputs = ignore(make(device), 1.0) | {"reduction": reduction, "label_smoothing": 0.1}
    loss, _, grads = loss_and_grads(flow, inputs)
    assert not loss.any()
    for name, grad in grads.items():
        assert not grad.any(), name


@pairwise(flow=PATHS, kind=("one-hot", "offset", "large", "excluded"), smoothing=(0.0, 0.1))
def test_extreme_logits(device, flow, kind, smoothing, chunked):
    if kind == "excluded":  # a word of probability 0 makes a smoothed loss infinite
        smoothing = 0.0
    # Every product and sum is exact, so only the softmax has an error.
    inputs = exact(device, rows=40, vocab=300, width=flow.width)
    if kind in ("one-hot", "large"):
        inputs["linear_weight"] = inputs["linear_weight"] * (1024 if kind == "large" else 32)
        inputs["target"][::2] = exact_logits(inputs).argmax(1)[::2]
    elif kind == "offset":
        inputs["linear_bias"] = inputs["linear_bias"] + 1e4
    else:  # a bias of -inf takes words out of the vocabulary: here a whole chunk of them
        inputs["linear_bias"][:140] = -INF
        inputs["target"] = inputs["target"].clamp(min=140)
    check(flow, inputs | {"label_smoothing": smoothing})


LIMITS = {
    "equal": [(slice(0, 300), 0.0)],
    "one word": [(2, 3e38)],
    "one late word": [(210, 3e38)],
    "all but one": [(slice(0, 300), -3e38), (77, 0.0)],
    "both ends": [(slice(0, 150), -3e38), (slice(150, 300), 3e38)],
    "largest": [(slice(0, 300), 3e38)],
    "lowest": [(slice(0, 300), -3e38)],
    "infinite": [(77, INF)],
    "two infinities": [(2, INF), (210, INF)],
    "one impossible": [(77, -INF)],
    "impossible until late": [(slice(0, 299), -INF)],
    "all impossible": [(slice(0, 300), -INF)],
}


@pairwise(flow=PATHS, limits=LIMITS, smoothing=(0.0, 0.1))
def test_logits_at_the_limits(device, flow, limits, smoothing, chunked):
    """Checks for the same numbers, infinities and NaN as the reference in fp32."""
    inputs = make(device, rows=6, vocab=300, width=flow.width) | {"reduction": "none"}
    inputs |= {"label_smoothing": smoothing}
    inputs["target"] = torch.tensor([2, 77, 149, 150, 210, 299], device=device)
    for place, value in limits:
        inputs["linear_bias"][place] = value
    upstream = torch.linspace(-1, 2, 6, device=device)
    loss, _, grads = loss_and_grads(flow, inputs, upstream)
    learning = with_gradients(inputs)
    expected = linear_cross_entropy_ref(**learning)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    expected.backward(upstream)
    for name, grad in grads.items():
        torch.testing.assert_close(
            grad, learning[name].grad, rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
        )
    assert_samples_are_words(flow, inputs)


def assert_samples_are_words(flow: Flow, inputs: dict) -> None:
    """The number of words with a probability above 0; 0 if the largest logit is infinite."""
    inputs = {name: value for name, value in inputs.items() if name != "reduction"}
    sample = sampled(flow, **inputs)
    logits = F.linear(inputs["input"], inputs["linear_weight"], inputs["linear_bias"])
    chosen = logits.softmax(1).gather(1, sample[:, None])[:, 0]
    finite = logits.amax(1).isfinite()
    assert ((chosen > 0) == finite).all()
    assert not sample[~finite].any()


@each_path
@pytest.mark.parametrize("value", (NAN, INF))
def test_a_row_that_is_not_finite_stays_alone_in_the_loss(device, flow, value):
    inputs = make(device, width=flow.width)
    inputs["input"][3, 0] = value
    inputs["input"][5] = value
    check(flow, inputs | {"reduction": "none"})


@each_flow
def test_a_loss_near_zero_is_exact_and_never_negative(device, flow):
    """The maximum is the target's logit, so their difference is exactly 0."""
    inputs = make(device, rows=64, vocab=90) | {"reduction": "none"}
    inputs["linear_weight"] = inputs["linear_weight"] * 1e4
    logits = inputs["input"] @ inputs["linear_weight"].T + inputs["linear_bias"]
    inputs["target"] = logits.argmax(1)
    loss, *_ = loss_and_grads(flow, inputs)
    assert (loss >= 0).all()


@pytest.mark.parametrize(
    ("flow", "vocab", "width"),
    [
        pytest.param(
            *(flow, vocab, width),
            id=f"{name}-{vocab}",
            marks=pytest.mark.slow if flow.backend == "triton" or width > 128 else (),
        )
        for name, flow in FLOWS.items()
        for vocab, width in ((30522, 128), (50265, 320))
    ],
)
def test_vocabularies_of_bert_and_roberta(device, flow, vocab, width):
    inputs = make(device, rows=70, vocab=vocab, width=width, dtype=torch.float16)
    check(flow, ignore(inputs, 0.3))


# --- 16-bit rows, fp32 parameters -----------------------------------------------------------------


@pytest.mark.slow
@pairwise(flow=PATHS, dtype=HALF, bias={"bias": True, "plain": False})
def test_fp32_parameters(device, flow, dtype, bias):
    inputs = make(device, rows=65, vocab=200, width=flow.width, bias=bias)
    inputs["input"] = inputs["input"].to(dtype)
    check(flow, ignore(inputs, 0.3) | {"label_smoothing": 0.1})


def is_rounded(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype`` holds every number exactly, which it does for few unrounded numbers."""
    held = (tensor == tensor.to(dtype).to(tensor.dtype)).double().mean()
    return bool(held > 0.5)


def product_rounds(flow, dtype: torch.dtype, name: str) -> bool:
    """Whether this CPU computes the gradient by a product in 16 bits, whose result has 16 bits."""
    in_16_bits = torch_module.multiplies_in(torch.empty(0, dtype=dtype)) is dtype
    return flow.backend == "torch" and name == "linear_weight" and in_16_bits


@pytest.mark.slow
@each_path
@half_precision
def test_fp32_parameters_get_gradients_that_nothing_rounds_to_16_bits(device, flow, dtype):
    inputs = make(device, rows=65, vocab=200, width=flow.width, dtype=dtype)
    # The loss is a sum: the upstream gradient of a mean would hide a rounding before it.
    inputs = ignore(inputs, 0.3) | {"reduction": "sum"}
    expected, _, rounded = loss_and_grads(flow, inputs)
    wide = {name: inputs[name].float() for name in ("linear_weight", "linear_bias")}
    loss, _, grads = loss_and_grads(flow, inputs | wide)
    assert torch.equal(loss, expected)
    assert torch.equal(grads["input"], rounded["input"]) and grads["input"].dtype is dtype
    for name in wide:
        assert grads[name].dtype is torch.float32 and rounded[name].dtype is dtype
        assert is_rounded(grads[name], dtype) is product_rounds(flow, dtype, name), name
    if product_rounds(flow, dtype, "linear_weight"):
        return
    *_, gold = loss_and_grads(
        EAGER, inputs | {name: inputs[name].double() for name in parameters(inputs)}
    )

    def error(grad):
        return (grad.double() - gold["linear_weight"]).square().sum()

    assert error(grads["linear_weight"]) < error(grads["linear_weight"].to(dtype))


# --- against each other and against PyTorch -------------------------------------------------------


def pytorch_cross_entropy(input, linear_weight, target, linear_bias=None, **options):
    return F.cross_entropy(F.linear(input, linear_weight, linear_bias), target, **options)


PYTORCH = [pytorch_cross_entropy]
if hasattr(F, "linear_cross_entropy"):
    PYTORCH.append(F.linear_cross_entropy)


@pairwise(
    flow=FLOWS | {"eager": EAGER},
    theirs={each.__name__: each for each in PYTORCH},
    smoothing=(0.0, 0.1, 1.0),
    reduction=("mean", "sum", "none"),
)
def test_agrees_with_pytorch(device, flow, theirs, smoothing, reduction):
    inputs = make(device, rows=65) | {"reduction": reduction, "label_smoothing": smoothing}
    inputs["target"][::3] = -100
    check(flow, inputs, theirs)


# --- statistics -----------------------------------------------------------------------------------


def statistic(function, name: str, **inputs):
    return getattr(function(**inputs), name)


@pairwise(
    flow=PATHS,
    name=("logsumexp", "log_probability"),
    kind=("plain", "offset", "excluded", "not finite", "fp16", "bf16"),
)
def test_statistics(device, flow, name, kind, chunked):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind, torch.float32)
    inputs = ignore(exact(device, rows=40, vocab=300, width=flow.width, dtype=dtype), 0.3)
    if kind == "offset":
        inputs["linear_bias"] = inputs["linear_bias"] - 1e4
    elif kind == "excluded":  # the target may be among them
        inputs["linear_bias"][40:180] = -INF
    elif kind == "not finite":
        counts = (inputs["target"] != -100).nonzero()
        inputs["input"][counts[3], 5] = NAN

    def candidate(**inputs):
        return run(flow, return_statistics=True, label_smoothing=0.1, **inputs)[1]

    ours = functools.partial(statistic, candidate, name)
    assert_within_budget(ours, functools.partial(statistic, row_statistics_ref, name), inputs)
    ours = functools.partial(ours, **with_gradients(inputs))()  # logits are kept in some flows
    assert torch.equal(ours.isfinite(), statistic(row_statistics_ref, name, **inputs).isfinite())
    assert not ours[inputs["target"] == -100].any()


@each_path_and_eager
@pytest.mark.parametrize("gradients", (True, False), ids=("training", "scoring"))
def test_argmax_is_the_first_of_the_largest(device, flow, gradients, chunked):
    inputs = exact(torch.device("cpu"), rows=60, vocab=300, width=flow.width)  # whose draws tie
    inputs = {name: value.to(device) for name, value in inputs.items()}
    inputs |= {name: inputs[name].round() for name in parameters(inputs)}
    inputs["linear_bias"][50:180] = -INF
    inputs = ignore(inputs, 0.3)
    logits = exact_logits(inputs)
    largest = logits == logits.amax(1, keepdim=True)
    index = torch.arange(300, device=device).expand_as(logits)
    first = index.masked_fill(~largest, 300).amin(1)
    ignored = inputs["target"] == -100
    assert (largest.sum(1)[~ignored] > 1).sum() > 5
    call = with_gradients(inputs) if gradients else inputs
    with poisoned_memory():
        statistics = run(flow, **call, return_statistics=True)[1]
    assert torch.equal(statistics.argmax, first.masked_fill(ignored, -1))


@each_flow_and_eager
def test_statistics_cost_nothing_and_carry_no_gradient(device, flow):
    inputs = ignore(make(device, width=flow.width), 0.3) | {"label_smoothing": 0.1}
    expected, _, expected_grads = loss_and_grads(flow, inputs)
    asked = functools.partial(ops.linear_cross_entropy, return_statistics=True)
    loss, (statistics,), grads = loss_and_grads(flow, inputs, function=asked)
    assert torch.equal(loss, expected)
    assert all(torch.equal(grads[name], expected_grads[name]) for name in grads)
    assert isinstance(statistics, ops.RowStatistics)
    assert not any(tensor.requires_grad for tensor in statistics)
    assert statistics.argmax.dtype is torch.int64
    assert statistics.logsumexp.dtype is statistics.log_probability.dtype is torch.float32


# --- samples --------------------------------------------------------------------------------------


def shares(logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor, float]:
    """(fp32 weights, ends, error) of exact ``logits``. The share of each token in [0, 1] ends at
    ``ends`` (fp64); by the error budget, from running sums in either order, fp32 arithmetic may
    move an end by ``error``."""
    narrow = ((logits - logits.amax(1, keepdim=True)).float() / temperature).exp()
    weights = ((logits - logits.amax(1, keepdim=True)) / temperature).exp()
    ends = weights.cumsum(1) / weights.sum(1, keepdim=True)
    errors = []
    for flip in (False, True):
        summands = narrow.flip(1) if flip else narrow
        # NumPy sums in fp32; PyTorch on a CPU would sum in fp64.
        sums = torch.from_numpy(np.cumsum(summands.cpu().numpy(), axis=1, dtype=np.float32))
        sums = (sums / sums[:, -1:]).double().to(ends.device)
        errors.append((sums - (1 - F.pad(ends.flip(1), (0, 1))[:, 1:] if flip else ends)).abs())
    error = max(float(error.max()) for error in errors)
    return narrow, ends, FORWARD_FACTOR * error + torch.finfo(torch.float32).eps


def check_samples(sample, inputs: dict, temperature=1.0, **draws) -> None:
    """Checks that each sample is the token whose share of [0, 1] holds the row's uniform number,
    unless that is within rounding of a boundary; and that no sample has probability 0."""
    counts = inputs["target"] != -100
    rows, device = counts.shape[0], counts.device
    draws = {"seed": 0, "sample_index": None, "position": None} | draws
    level = uniform_level(draws["seed"], rows, draws["sample_index"], draws["position"], device)
    assert sample.shape == (rows,) and sample.dtype is torch.int64
    assert (sample[~counts] == -1).all()
    sample, level = sample[counts, None], level[counts, None]
    logits = exact_logits(inputs)[counts]
    assert ((sample >= 0) & (sample < logits.shape[1])).all()
    narrow, ends, rounding = shares(logits, temperature)
    assert (narrow.gather(1, sample) > 0).all(), "a token whose probability underflows to 0"
    end, start = ends.gather(1, sample), F.pad(ends, (1, -1)).gather(1, sample)
    outside = torch.maximum(start - level, level - end)
    assert (outside <= rounding).all(), (
        f"{int((outside > rounding).sum())} of {sample.shape[0]} samples are not the token on "
        f"which the row's uniform number lies: off by up to {float(outside.max()):.2e}"
    )


@pytest.mark.slow
@each_path
@pytest.mark.parametrize(
    ("dtype", "temperature"),
    (
        (torch.float32, 1.0),
        (torch.float16, 0.5),
        (torch.bfloat16, 3.0),
        (torch.float32, 1e-3),
        (torch.float16, 100.0),
    ),
)
def test_samples_are_those_of_exact_arithmetic(device, flow, dtype, temperature, chunked):
    inputs = ignore(exact(device, 40, 300, flow.width, dtype), 0.1)
    sample = sampled(flow, **inputs, temperature=temperature)
    check_samples(sample, inputs, temperature)


@each_flow_and_eager
def test_samples_without_a_gradient(device, flow, chunked):
    """Without gradients no logits are kept."""
    inputs = ignore(exact(device, 40, 300, width=flow.width), 0.3)
    loss, sample = run_with_sample(flow, **inputs)
    assert not loss.requires_grad
    check_samples(sample, inputs)


@each_path
@pytest.mark.parametrize(
    ("vocab", "bias"), ((1, True), (17, False), (128, True), (129, False), (1000, True))
)
def test_samples_from_vocabularies_of_every_size(device, flow, vocab, bias):
    inputs = exact(device, 20, vocab, flow.width, bias=bias)
    check_samples(sampled(flow, **inputs, seed=5), inputs, seed=5)


#: Sample indices whose uniform number at position 0 is (word + 0.5) / 2^32 for these words: the
#: generator's nearest numbers to 0, to 1, and to 1/2 from below and from above.
EXTREME_WORDS = {
    7: {7068324101: 0, 5084076149: 2**31 - 1, 7983980867: 2**31, 6877237343: 2**32 - 1},
    -3: {7694681416: 1, 1198058738: 2**31 - 1, 7764594387: 2**31, 3258244692: 2**32 - 1},
}


@pairwise(
    flow=FLOWS | {"eager": EAGER}, seed=EXTREME_WORDS.keys(), dead=(-INF, -200.0), vocab=(9, 600)
)
def test_a_token_of_probability_0_is_not_drawn_at_its_very_boundary(
    device, flow, seed, dead, vocab, chunked
):
    """Only four tokens, in two pairs, have a probability above 0. The uniform numbers fall on the
    first, on the last, and between the pairs. The tokens before, behind and between the pairs have
    probability 0; in the large vocabulary these are whole tiles."""
    index = torch.tensor(list(EXTREME_WORDS[seed]), device=device)
    word, *_ = draw(seed, Stream.SAMPLE, sample_index=index)
    assert word.tolist() == list(EXTREME_WORDS[seed].values())
    alive = [1, 2, 6, 7] if vocab == 9 else [135, 140, 400, 405]
    inputs = exact(device, 4, vocab, width=flow.width)
    inputs["input"] = torch.zeros_like(inputs["input"])
    inputs["linear_bias"] = torch.full((vocab,), dead, device=device)
    inputs["linear_bias"][alive] = 0.5
    sample = sampled(flow, **inputs, seed=seed, sample_index=index)
    check_samples(sample, inputs, seed=seed, sample_index=index)
    first, below, above, last = sample.tolist()
    assert first == alive[0] and last == alive[3]
    assert {below, above} <= {alive[1], alive[2]}


@pytest.mark.slow
@each_flow_and_eager
@pytest.mark.parametrize("temperature", (1.0, 0.3))
def test_rows_that_are_ignored_or_not_finite(device, flow, temperature, chunked):
    inputs = ignore(exact(device, 40, 300, width=flow.width), 0.4)
    rows = (inputs["target"] != -100).nonzero().squeeze(1)
    inputs["input"][rows[0], 3] = NAN
    inputs["input"][rows[1]] = INF
    sample = sampled(flow, **inputs, temperature=temperature)
    assert not sample[rows[:2]].any()
    inputs["target"][rows[:2]] = -100
    check_samples(sample.index_fill(0, rows[:2], -1), inputs, temperature)

    inputs["linear_bias"] = inputs["linear_bias"].index_fill(0, rows[:1], INF)
    sample = sampled(flow, **inputs, temperature=temperature)
    assert not sample[rows[2:]].any() and (sample[inputs["target"] == -100] == -1).all()


@pytest.mark.slow
@each_path
@half_precision
def test_sampling_changes_neither_loss_nor_gradients(device, flow, dtype):
    inputs = ignore(make(device, 20, 150, flow.width, dtype), 0.3) | {"label_smoothing": 0.1}
    expected, _, expected_grads = loss_and_grads(flow, inputs)
    function = functools.partial(ops.linear_cross_entropy_with_sample, seed=1, temperature=0.4)
    loss, (sample,), grads = loss_and_grads(flow, inputs, function=function)
    assert torch.equal(loss, expected)
    for name, grad in grads.items():
        assert torch.equal(grad, expected_grads[name]), name
    assert not sample.requires_grad
    function = functools.partial(function, return_statistics=True)
    _, (again, statistics), _ = loss_and_grads(flow, inputs, function=function)
    assert torch.equal(again, sample)
    plain = run(flow, **with_gradients(inputs), return_statistics=True)[1]
    assert all(torch.equal(a, b) for a, b in zip(statistics, plain, strict=True))


# --- memory ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operator inside returns."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastplm":  # runs its parts, as a mode sees an operator as one call
            op = op_module.OP
            with self:
                out = (op._run_forward if "fwd" in func.__name__ else op._run_backward)(*args)
        else:
            out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.nbytes = max(self.nbytes, tensor.nbytes)
        return out


class Calls(TorchDispatchMode):
    """The arguments, by name, and the results of fastplm's operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fastplm":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((dict(zip(names, args, strict=True)), out))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("fp32", "fp16"))
def test_kept_logits_stay_in_the_budget(device, backend, dtype, chunked):
    """Kept logits fit to the byte, with V padded as a backend may need; with one byte less, logits
    are computed again. No other tensor is as large."""
    if backend == "torch" and torch_module.multiplies_in(torch.empty(0, dtype=dtype)) is not dtype:
        pytest.skip("this CPU has no products in that dtype, and keeps no logits in it")
    rows, vocab = 100, 300
    inputs = with_gradients(make(device, rows, vocab, width=32, dtype=dtype))
    size = rows * op_module.logit_columns(vocab) * dtype.itemsize
    for budget, kept in ((size, True), (size - 1, False)):
        with Calls() as forward:
            run(Flow(backend, budget), **inputs)
        [(call, (*_, grad_logits, _, _))] = forward.calls
        assert call["kept_rows"] == (rows if kept else 0)
        if kept:
            assert rows * vocab * dtype.itemsize <= grad_logits.nbytes <= size
        else:
            assert grad_logits.numel() == 0
        with Largest() as largest:
            run(Flow(backend, budget), **inputs).backward()
        if kept:
            assert largest.nbytes == grad_logits.nbytes
        else:
            assert largest.nbytes < rows * vocab * dtype.itemsize


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (1, 64, 200, 4915))
@flows(kept=Flow("triton", ROOM, 768), recomputed=Flow("triton", 0, 768))
@half_precision
def test_the_published_vocabulary(flow, rows, dtype):
    """BERT-base's vocabulary, which is no multiple of a vector, with the rows of real batches."""
    check(flow, ignore(make("cuda", rows, 30522, flow.width, dtype), 0.2))


# --- a budget for some of the rows ----------------------------------------------------------------

#: Rows that recompute logits in registers, and through a buffer.
each_partly = flows(
    torch=Flow("torch", 0), triton=Flow("triton", 0), triton_wide=Flow("triton", 0, 160)
)


@pytest.fixture
def some_rows(monkeypatch):
    """A budget of bytes for this many rows of these inputs, even if few."""
    monkeypatch.setattr(op_module, "_LEAST_KEPT_ROWS", 1)
    monkeypatch.setattr(op_module, "_ROW_ALIGNMENT", 1)

    def budget(inputs: dict, rows: int) -> int:
        columns = op_module.logit_columns(inputs["linear_weight"].shape[0])
        return rows * columns * inputs["input"].dtype.itemsize

    return budget


@each_partly
@pytest.mark.parametrize(
    ("dtype", "reduction"),
    (
        # In 16 bits the errors of kept logits may cancel in a mean, but only if all rows keep them.
        (torch.float32, "mean"),
        (torch.float32, "none"),
        (torch.float16, "none"),
        (torch.bfloat16, "none"),
    ),
    ids=str,
)
@pytest.mark.parametrize("fraction", (0.0, 0.5, 0.9), ids=("none", "half", "most"))
def test_some_rows_keep_their_logits(device, flow, dtype, fraction, reduction, some_rows, chunked):
    """The budget has room for 24 of 40 rows, the first that count; if most are ignored, for all."""
    inputs = make(device, rows=40, vocab=300, width=flow.width, dtype=dtype)
    inputs = ignore(inputs, fraction) | {"label_smoothing": 0.1, "reduction": reduction}
    flow = flow._replace(logits_budget=some_rows(inputs, 24))
    check(flow, inputs)
    with Calls() as forward:
        run(flow, **with_gradients(inputs))
    holds = flow.backend == "triton" or torch_module.multiplies_in(inputs["input"]) is dtype
    assert forward.calls[0][0]["kept_rows"] == (24 if holds else 0)


@each_partly
def test_where_some_rows_keep_their_logits_all_are_sampled(device, flow, some_rows, chunked):
    inputs = ignore(exact(device, rows=60, vocab=300, width=flow.width), 0.3)
    flow = flow._replace(logits_budget=some_rows(inputs, 24))
    call = with_gradients(inputs) | {"return_statistics": True, "temperature": 0.5}
    _, sample, statistics = run_with_sample(flow, **call)
    check_samples(sample, inputs, 0.5)
    expected = row_statistics_ref(**inputs)
    assert torch.equal(statistics.argmax, expected.argmax)
    for ours, theirs in zip(statistics[1:], expected[1:], strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("width", (32, 160))
@pytest.mark.parametrize(
    "rows, ignored, expected, weight",
    [
        *((40, 0.3, n, dtype) for n in (0, 1, 12, 28, 40) for dtype in ("fp32", "bf16")),
        pytest.param(200, 0.85, 10, "bf16", marks=pytest.mark.slow),  # in four splits
        pytest.param(200, 0.5, 10, "bf16", marks=pytest.mark.slow),  # in two splits
    ],
)
def test_more_or_fewer_targets_than_expected(
    device, rows, ignored, expected, weight, width, chunked
):
    """28 of 40 rows count; the weight may be fp32, and the bias with it or not."""
    inputs = ignore(make(device, rows, vocab=300, width=width, dtype=torch.bfloat16), ignored)
    inputs["linear_weight"] = inputs["linear_weight"].to(DTYPES[weight])
    inputs |= {"reduction": "none", "expected_targets": expected}

    def reference(expected_targets, **inputs):
        return linear_cross_entropy_ref(**inputs)

    check(Flow("triton", ROOM), inputs, reference)


class Allocations(TorchDispatchMode):
    """The bytes of every new tensor."""

    def __init__(self):
        super().__init__()
        self.bytes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ or "_to_copy" in func.__name__:
            self.bytes.append(result.nbytes)
        return result


class Passes(TorchDispatchMode):
    """The operators that read or write a matrix of so many rows at least."""

    def __init__(self, rows, width):
        super().__init__()
        self.rows, self.width, self.names = rows, width, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        shapes = [one.shape for one in tree_leaves((args, result)) if isinstance(one, torch.Tensor)]
        if name not in NO_KERNEL and any(
            len(shape) == 2 and shape[0] >= self.rows and shape[1] == self.width for shape in shapes
        ):
            self.names.append(name)
        return result


@pytest.mark.parametrize("weights", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kept_rows", (0, 600, 1000))
@pytest.mark.parametrize("vocab", (3000, 3002))
def test_the_weight_is_copied_once_a_step(weights, kept_rows, vocab):
    """It is cast and padded by the forward; of the gradient's product one pass makes the gradient,
    and one more rounds a sum of two. Products on meta tensors compute nothing."""
    cases = importlib.import_module("fastplm.triton_kernels.linear_cross_entropy.cases")
    launches_of = importlib.import_module("fastplm.triton_kernels._launch").record_launches
    with Passes(3000, 64) as passes, launches_of(90):
        options = dict(rows=1000, vocab=vocab, weight_dtype=weights)
        cases.meta_case(torch.bfloat16, 64, kept_rows, **options)
    copied = weights is torch.float32 or (vocab % 8 and kept_rows)
    summed = kept_rows == 600 and weights is torch.bfloat16
    expected = ["copy_"] * bool(copied) + ["mul"] * bool(kept_rows) + ["copy_"] * summed
    assert passes.names == expected


def test_spare_rows_take_three_launches_and_no_buffer_for_their_gradients(monkeypatch):
    """4,915 of 32,768 rows should count. The other rows need fp32 sums for weight and bias, and one
    fp32 gradient of themselves."""
    launches_of = importlib.import_module("fastplm.triton_kernels._launch").record_launches
    cases = importlib.import_module("fastplm.triton_kernels.linear_cross_entropy.cases")
    backward = cases.linear_cross_entropy_bwd

    def measure(rows: int) -> tuple[int, int]:
        monkeypatch.setattr(cases, "linear_cross_entropy_bwd", counted)
        with launches_of(90):
            cases.meta_case(torch.bfloat16, 768, 4915, rows=rows, overflow_unlikely=True)
        return found.pop()

    def counted(*grads, **arguments):
        with Allocations() as allocated, launches_of(90) as launches:
            backward(*grads, **arguments)
        found.append((sum(allocated.bytes), len(launches)))

    found = []
    (whole, launches), (alone, few) = measure(32768), measure(4915)
    assert launches == few + 3
    spare_rows = -(-(32768 - 4915) // 128) * 128
    assert whole - alone <= 4 * (768 * (30522 + spare_rows) + 30522)


def test_too_few_rows_are_none(device):
    """If not all rows fit, at least 4,096 rows keep their logits, or none."""
    inputs = with_gradients(make("cpu", rows=4500, vocab=20, width=1))
    row = op_module.logit_columns(20) * 4
    for fit, kept in ((4500, 4500), (4499, 4352), (4096, 4096), (4095, 0)):
        with Calls() as forward:
            run(Flow("torch", fit * row), **inputs)
        assert forward.calls[0][0]["kept_rows"] == kept


def all_logits(input, linear_weight, target, linear_bias):
    """The loss of ``transformers.BertForMaskedLM``."""
    logits = F.linear(input, linear_weight, linear_bias)
    return F.cross_entropy(logits.view(-1, logits.shape[1]), target.view(-1))


def test_peak_memory_of_a_step(monkeypatch):
    rows, vocab, columns = 256, 4096, 128
    monkeypatch.setattr(torch_module, "_CHUNK_ELEMENTS", rows * columns)
    monkeypatch.setattr(torch_module, "_CHUNK_COLUMNS", columns)
    inputs = make("cpu", rows, vocab, width=32)

    def peak(function, inputs=inputs) -> int:
        call = with_gradients(inputs)
        return peak_bytes(lambda: function(**call).backward(), torch.device("cpu"))

    logits = rows * vocab * 4
    assert op_module.logit_columns(vocab) == vocab
    learned = sum(inputs[name].nbytes for name in PARAMETERS)
    recomputed = peak(functools.partial(run, Flow("torch", 0)))
    kept = peak(functools.partial(run, Flow("torch", logits)))
    # The gradients, as much again for their parts, and the work on a chunk.
    chunks = 4 * rows * columns * 4
    assert recomputed < 2 * learned + chunks < logits
    assert logits <= kept < logits + 2 * learned + chunks
    assert peak(all_logits) > 2 * logits
    if len(PYTORCH) > 1:
        assert peak(F.linear_cross_entropy) > 2 * logits


# --- contract of the operator ---------------------------------------------------------------------


@each_path
def test_repeats_bit_for_bit(device, flow, chunked):
    inputs = ignore(make(device, rows=40, vocab=300, width=flow.width), 0.3)
    inputs |= {"label_smoothing": 0.1}
    assert_repeatable(functools.partial(run, flow), inputs, wrt=parameters(inputs))
    assert torch.equal(sampled(flow, **inputs), sampled(flow, **inputs))


@each_path
@pytest.mark.parametrize("name", PARAMETERS)
def test_only_the_gradients_that_are_needed(device, flow, name):
    inputs = ignore(make(device, width=flow.width), 0.5)
    *_, whole = loss_and_grads(flow, inputs)
    asked = inputs[name].detach().requires_grad_()
    with Calls() as operators:
        run(flow, **(inputs | {name: asked})).backward()
    assert torch.equal(asked.grad, whole[name])
    (forward, _), (backward, grads) = operators.calls
    assert forward["kept_rows"] == (33 if flow.logits_budget else 0)
    for n, grad in zip(PARAMETERS, grads, strict=True):
        assert backward[f"need_{n}"] is (n == name)
        assert torch.equal(grad, whole[name]) if n == name else grad.numel() == 0, n


@pytest.mark.gpu
@flows(
    kept=Flow("triton", ROOM, 128), recomputed=Flow("triton", 0, 128), wide=Flow("triton", 0, 768)
)
def test_nothing_waits_for_the_device(flow):
    inputs = with_gradients(ignore(make("cuda", 257, 1000, flow.width, torch.bfloat16), 0.5))
    inputs["seed"] = torch.tensor(0, device="cuda")

    def step():
        run(flow, ops.linear_cross_entropy_with_sample, **inputs, return_statistics=True)[
            0
        ].backward()

    step()  # compiles the kernels
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


# --- errors ---------------------------------------------------------------------------------------


@each_flow_and_eager
@pytest.mark.parametrize("bad", (-1, 70, 1 << 40))
def test_a_target_outside_the_vocabulary_is_an_error_on_the_cpu(flow, bad):
    inputs = make("cpu")
    inputs["target"][4] = bad
    for call in (inputs, with_gradients(inputs)):
        with pytest.raises(fastplm.FastplmError) as caught:
            run(flow, **call)
        assert isinstance(caught.value, ValueError)
        assert f"`target` got target {bad}" in str(caught.value) and "V = 70" in str(caught.value)


@flows(
    **{"kept": FLOWS["triton-kept"], "recomputed": FLOWS["triton-recomputed"], "eager": EAGER},
)
@pytest.mark.parametrize("bad", (-1, 70, (1 << 32) + 3))
@pytest.mark.parametrize("smoothing", (0.0, 0.1))
def test_where_it_cannot_be_seen_a_target_outside_the_vocabulary_gives_nan(
    device, flow, bad, smoothing, monkeypatch
):
    monkeypatch.setattr(op_module, "check_targets", lambda *_: None)
    inputs = ignore(make(device), 0.5) | {"label_smoothing": smoothing, "reduction": "none"}
    row = int((inputs["target"] != -100).nonzero()[0])
    inputs["target"][row] = bad
    loss, _, grads = loss_and_grads(flow, inputs)
    assert loss.isnan().nonzero().flatten().tolist() == [row]
    width = inputs["input"].shape[1]
    assert grads["input"][row].isnan().all() and grads["input"].isnan().sum() == width
    assert grads["linear_weight"].isnan().all() and grads["linear_bias"].isnan().all()
