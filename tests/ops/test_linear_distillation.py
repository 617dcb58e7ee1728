"""ops.linear_distillation against its reference: loss and gradients by the error budget, in both
data flows of every backend, for every divergence; its parts; and given probabilities."""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastplm
from fastplm import ops
from fastplm.reference.linear_distillation import (
    LinearDistillation,
    linear_distillation_ref,
    linear_distillation_topk_ref,
)
from fastplm.testing import assert_within_budget

from ..pairwise import pairwise

op_module = importlib.import_module("fastplm.ops.linear_distillation")
torch_module = importlib.import_module("fastplm.ops._linear_distillation_torch")
loss_module = importlib.import_module("fastplm.ops._linear_cross_entropy_torch")

PARAMETERS = ("input", "linear_weight", "linear_bias")
NAN, INF = float("nan"), float("inf")
ROOM = 1 << 40


class Flow(NamedTuple):
    """A backend and one of its data flows."""

    backend: str
    logits_budget: int


OF_TORCH = {"torch-kept": Flow("torch", ROOM), "torch-recomputed": Flow("torch", 0)}
FLOWS = OF_TORCH | {"triton-kept": Flow("triton", ROOM), "triton-recomputed": Flow("triton", 0)}
EAGER = Flow("eager", 0)
DIVERGENCES = {
    "forward": dict(divergence="forward_kl"),
    "reverse": dict(divergence="reverse_kl"),
    "js": dict(divergence="js"),
    "js 0.1": dict(divergence="js", beta=0.1),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
#: Temperatures and weights of the targets.
MIXES = {"T1": (1.0, 0.0), "T4": (4.0, 0.0), "T0.5-ce": (0.5, 0.7), "T1-ce": (1.0, 2.0)}


def flows(**some: Flow):
    return pytest.mark.parametrize("flow", some.values(), ids=some.keys())


each_flow = flows(**FLOWS)
each_flow_and_eager = flows(**FLOWS, eager=EAGER)
each_divergence = pytest.mark.parametrize("options", DIVERGENCES.values(), ids=DIVERGENCES.keys())
#: Divergences with one pass over the vocabulary, and with two.
two_divergences = pytest.mark.parametrize("options", [DIVERGENCES["forward"], DIVERGENCES["js"]])


@pytest.fixture
def chunked(monkeypatch):
    """Makes chunks, splits and buffers so small that a small vocabulary needs several of each."""
    configs = importlib.import_module("fastplm.triton_kernels.linear_cross_entropy.configs")
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", 1 << 10)
    monkeypatch.setattr(loss_module, "_CHUNK_COLUMNS", 16)
    monkeypatch.setattr(torch_module, "_TEACHER_BYTES", 1 << 13)
    monkeypatch.setattr(configs, "_SPLIT_COLUMNS", 128)
    monkeypatch.setattr(configs, "_SCRATCH_ELEMENTS", 1 << 12)
    kept = importlib.import_module("fastplm.triton_kernels.linear_distillation.forward")
    monkeypatch.setattr(kept, "ROWS_TILE", (8, 128, 4))
    words = importlib.import_module("fastplm.triton_kernels.linear_distillation.given")
    monkeypatch.setattr(words, "_BLOCK_K", 4)
    monkeypatch.setattr(words, "_BLOCK_E", 16)
    monkeypatch.setattr(configs, "BIAS_TILE", (16, 32, 4))


# --- calls ----------------------------------------------------------------------------------------


def make(
    device,
    rows=33,
    vocab=70,
    width=32,
    teacher_width=24,
    dtype=torch.float32,
    bias=("linear_bias", "teacher_bias"),
):
    def draw(*shape, scale=1.0):
        return (torch.randn(shape, device=device) * scale).to(dtype)

    inputs = dict(
        input=draw(rows, width),
        linear_weight=draw(vocab, width, scale=2 * width**-0.5),
        teacher_input=draw(rows, teacher_width),
        teacher_weight=draw(vocab, teacher_width, scale=2 * teacher_width**-0.5),
        target=torch.randint(0, vocab, (rows,), device=device),
    )
    return inputs | {name: draw(vocab) for name in bias}


def ignore(inputs: dict, fraction: float) -> dict:
    """The inputs with a fraction of the rows left out, half by the target; these rows hold NaN."""
    rows, device = inputs["target"].shape[0], inputs["target"].device
    place = torch.randperm(rows).to(device)
    left = round(fraction * rows)
    ignored, masked = place < left // 2, (place >= left // 2) & (place < left)
    out = dict(target=inputs["target"].masked_fill(ignored, -100), mask=~masked)
    out["target"] = out["target"].masked_fill(masked, 1 << 40)
    for name in ("input", "teacher_input", "teacher_probabilities"):
        if name in inputs:
            out[name] = inputs[name].masked_fill((ignored | masked)[:, None], NAN)
    return inputs | out


def run(flow: Flow, function=ops.linear_distillation, **inputs) -> LinearDistillation:
    if flow.backend == "torch" and inputs["input"].is_cuda:
        pytest.skip("the torch backend of linear_distillation is for CPU tensors")
    with fastplm.use_backend(flow.backend):
        return function(**inputs, logits_budget=flow.logits_budget)


def loss_of(function):
    def loss(**inputs):
        return function(**inputs).loss

    return loss


REFERENCE = loss_of(linear_distillation_ref)


def parameters(inputs: dict) -> tuple[str, ...]:
    return tuple(name for name in PARAMETERS if name in inputs)


def with_gradients(inputs: dict) -> dict:
    return inputs | {n: inputs[n].detach().requires_grad_() for n in parameters(inputs)}


def check(flow: Flow, inputs: dict, reference=REFERENCE, function=ops.linear_distillation) -> None:
    candidate = loss_of(functools.partial(run, flow, function))
    assert_within_budget(candidate, reference, inputs, wrt=parameters(inputs))


def mixed(mix: tuple[float, float], options: dict) -> dict:
    return options | dict(temperature=mix[0], cross_entropy_weight=mix[1])


# --- values and gradients -------------------------------------------------------------------------


@pairwise(flow=FLOWS, options=DIVERGENCES, mix=MIXES, dtype=DTYPES)
def test_divergences_temperatures_and_dtypes(device, flow, options, mix, dtype, chunked):
    """Runs with several chunks, splits and groups of rows, with rows left out."""
    inputs = ignore(make(device, rows=60, vocab=300, dtype=dtype), 0.4)
    check(flow, inputs | mixed(mix, options))


@pairwise(
    flow=FLOWS,
    options=DIVERGENCES,
    vocab=(1, 17, 200),
    widths={"17-40": (17, 40), "160-8": (160, 8), "64-64": (64, 64)},
    bias={
        "both": ("linear_bias", "teacher_bias"),
        "own": ("linear_bias",),
        "taught": ("teacher_bias",),
        "none": (),
    },
)
def test_shapes(device, flow, options, vocab, widths, bias):
    inputs = make(device, 33, vocab, *widths, bias=bias)
    check(flow, inputs | options | {"cross_entropy_weight": 0.5})


@pairwise(flow=FLOWS, rows=(0, 1, 65), fraction={"none": 0.0, "most": 0.85, "all": 1.0})
def test_rows_left_out_hide_even_nan(device, flow, rows, fraction):
    inputs = ignore(make(device, rows=rows), fraction)
    check(flow, inputs | {"cross_entropy_weight": 0.5, "temperature": 2.0})


@each_flow_and_eager
def test_a_batch_without_rows_gives_zero_and_zero_gradients(device, flow):
    inputs = with_gradients(ignore(make(device), 1.0))
    found = run(flow, **inputs, divergence="js", cross_entropy_weight=1.0)
    found.loss.backward()
    assert not any(part.any() for part in found)
    assert not any(inputs[name].grad.any() for name in PARAMETERS)


@pairwise(flow=FLOWS, reduction=("mean", "sum", "none"), options=DIVERGENCES)
def test_reductions_and_upstream_gradients(device, flow, reduction, options):
    inputs = ignore(make(device, rows=40), 0.5)
    check(flow, inputs | options | {"reduction": reduction, "cross_entropy_weight": 0.3})


@pytest.mark.slow
@each_flow
@pytest.mark.parametrize("teacher", DTYPES.values(), ids=DTYPES)
def test_the_teacher_may_be_of_another_dtype(device, flow, teacher):
    inputs = make(device)
    for name in ("teacher_input", "teacher_weight", "teacher_bias"):
        inputs[name] = inputs[name].to(teacher)
    check(flow, inputs)
    if teacher is not torch.float32:
        for name in PARAMETERS:
            inputs[name] = inputs[name].to(torch.bfloat16)
        check(flow, inputs | {"divergence": "js"})


@each_flow
def test_the_normalizer_makes_accumulated_batches_one(device, flow):
    inputs = ignore(make(device, rows=40), 0.6)
    count = ((inputs["target"] != -100) & inputs["mask"]).sum()
    per_row = ("input", "teacher_input", "target", "mask")

    def two_steps(**inputs):
        halves = zip(*(inputs.pop(name).split((13, 27)) for name in per_row), strict=True)
        return sum(
            run(flow, **dict(zip(per_row, half, strict=True)), **inputs, normalizer=count).loss
            for half in halves
        )

    assert_within_budget(two_steps, REFERENCE, inputs, wrt=parameters(inputs))


KINDS = ("one-hot", "offset", "equal", "huge", "excluded", "excluded by one", "far below")


@pairwise(flow=FLOWS, kind=KINDS, options=DIVERGENCES)
def test_extreme_logits(device, flow, kind, options, chunked):
    check_extreme(device, flow, kind, options)


@each_flow
@pytest.mark.parametrize("divergence", ("forward_kl", "reverse_kl"))
def test_an_infinite_gap_that_loses_all_weight(device, flow, divergence, chunked):
    check_extreme(device, flow, "far below", {"divergence": divergence})


def check_extreme(device, flow, kind, options):
    # Every product and sum is exact, so only the softmax has an error.
    inputs = make(device, rows=40, vocab=300)
    for name in ("input", "teacher_input"):
        inputs[name] = inputs[name].sign()
    for name in ("linear_weight", "teacher_weight", "linear_bias", "teacher_bias"):
        inputs[name] = inputs[name].mul(8).round().div(8)
    if kind == "one-hot":
        for name in ("linear_weight", "teacher_weight"):
            inputs[name] = inputs[name] * 32
    elif kind == "offset":
        inputs["linear_bias"] = inputs["linear_bias"] + 4096
        inputs["teacher_bias"] = inputs["teacher_bias"] - 8192
    elif kind == "equal":  # loss and gradients are 0
        for name in ("input", "weight", "bias"):
            own = name if name == "input" else f"linear_{name}"
            inputs[f"teacher_{name}"] = inputs[own]
    elif kind == "huge":  # one word of each side has all probability; gaps are beyond fp32
        for side in ("linear", "teacher"):
            inputs[f"{side}_bias"].fill_(-3e38)
            inputs[f"{side}_bias"][141] = 3e38
    elif kind == "far below":  # later words make the weight 0, but one side has -inf
        one, other = "linear_bias", "teacher_bias"
        if options["divergence"] == "reverse_kl":
            one, other = other, one
        inputs[one][:140] = -INF
        inputs[other][140:] += 4096
    else:  # a bias of -inf takes words out of the vocabulary: here a whole chunk of them
        divergence = options["divergence"]
        if kind == "excluded" or divergence != "forward_kl":
            inputs["linear_bias"][:140] = -INF
        if kind == "excluded" or divergence != "reverse_kl":
            # Only one side excludes words, so that the divergence stays finite.
            inputs["teacher_bias"][70 * (kind != "excluded") : 140] = -INF
    check(flow, inputs | options | {"reduction": "none"})


LIMITS = {
    "equal": [(slice(0, 300), 0.0)],
    "one word": [(2, 3e38)],
    "one late word": [(210, 3e38)],
    "one low word": [(77, -3e38)],
    "all but one": [(slice(0, 300), -3e38), (77, 0.0)],
    "largest": [(slice(0, 300), 3e38)],
    "infinite": [(77, INF)],
    "one impossible": [(77, -INF)],
    "impossible until late": [(slice(0, 299), -INF)],
    "all impossible": [(slice(0, 300), -INF)],
}


@pairwise(
    flow=FLOWS,
    limits=LIMITS,
    divergence=("forward_kl", "reverse_kl", "js", "topk"),
    sides=(("linear_bias",), ("teacher_bias",), ("linear_bias", "teacher_bias")),
    weight=(0.0, 0.7),
)
def test_logits_at_the_limits(device, flow, limits, divergence, sides, weight, chunked):
    """Checks for the same numbers, infinities and NaN as the reference, which sums in fp64."""
    inputs = make(device, rows=4, vocab=300, width=16, teacher_width=16)
    inputs |= dict(temperature=2.0, cross_entropy_weight=weight, reduction="none")
    inputs["target"] = torch.tensor([2, 77, 210, 299], device=device)
    for side in sides:
        for place, value in limits:
            inputs[side][place] = value
    op, reference = ops.linear_distillation, linear_distillation_ref
    if divergence == "topk":
        op, reference = ops.linear_distillation_topk, linear_distillation_topk_ref
        inputs = {name: value for name, value in inputs.items() if "teacher" not in name}
        inputs["teacher_indices"] = torch.tensor([[2, 77, 299]] * 4, device=device)
        inputs["teacher_probabilities"] = torch.tensor([[0.5, 0.3, 0.2]] * 4, device=device)
    else:
        inputs["divergence"] = divergence
    upstream = torch.linspace(-1, 2, 4, device=device)

    def found(function, inputs) -> list[torch.Tensor]:
        learning = with_gradients(inputs)
        parts = function(**learning)
        parts.loss.backward(upstream.to(parts.loss.dtype))
        return [*parts, *(learning[name].grad for name in PARAMETERS)]

    wide = {n: v.double() if is_floating(v) else v for n, v in inputs.items()}
    names = ("loss", "distillation", "cross_entropy", *PARAMETERS)
    ours = found(functools.partial(run, flow, op), inputs)
    for name, one, expected in zip(names, ours, found(reference, wide), strict=True):
        expected = expected.float()
        size = float(expected[expected.isfinite()].abs().amax()) if expected.isfinite().any() else 0
        torch.testing.assert_close(
            one.detach(),
            expected.detach(),
            rtol=1e-3,
            atol=1e-5 * max(1.0, size),
            equal_nan=True,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def is_floating(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pairwise(flow=FLOWS, options=DIVERGENCES, name=("input", "teacher_input"))
def test_a_row_that_is_not_finite_stays_alone_in_the_loss(device, flow, options, name):
    inputs = make(device) | options | {"reduction": "none"}
    inputs[name][3] = NAN
    found = run(flow, **inputs)
    assert found.loss.isnan().nonzero().flatten().tolist() == [3]
    learning = with_gradients(inputs)
    run(flow, **learning).loss.sum().backward()
    assert learning["input"].grad.isnan().all(1).nonzero().flatten().tolist() == [3]


# --- the parts ------------------------------------------------------------------------------------


@pytest.mark.slow
@each_flow_and_eager
@two_divergences
def test_the_parts_are_unweighted_and_have_no_gradient(device, flow, options):
    inputs = with_gradients(ignore(make(device), 0.3)) | options | {"temperature": 3.0}
    found = run(flow, **inputs, distillation_weight=0.25, cross_entropy_weight=0.5)
    assert isinstance(found, ops.LinearDistillation) and found.loss.requires_grad
    assert not (found.distillation.requires_grad or found.cross_entropy.requires_grad)
    total = 0.25 * 9 * found.distillation + 0.5 * found.cross_entropy
    torch.testing.assert_close(found.loss, total)
    hard = ops.linear_cross_entropy(
        *(inputs[name] for name in ("input", "linear_weight")),
        inputs["target"].masked_fill(~inputs["mask"], -100),
        linear_bias=inputs["linear_bias"],
    )
    torch.testing.assert_close(found.cross_entropy, hard.detach())
    alone = run(flow, **inputs)
    torch.testing.assert_close(alone.distillation, found.distillation)
    torch.testing.assert_close(alone.loss, 9 * found.distillation)
    untaught = run(flow, **inputs, distillation_weight=0.0, cross_entropy_weight=1.0)
    torch.testing.assert_close(untaught.loss, found.cross_entropy)
    (grad,) = torch.autograd.grad(untaught.loss, inputs["linear_bias"])
    (expected,) = torch.autograd.grad(hard, inputs["linear_bias"])
    torch.testing.assert_close(grad, expected)


@each_flow_and_eager
def test_without_targets_there_is_no_cross_entropy(device, flow):
    inputs = ignore(make(device), 0.5)
    del inputs["target"]
    inputs["input"] = inputs["input"].nan_to_num(0.0)  # in rows that the target left out
    inputs["teacher_input"] = inputs["teacher_input"].nan_to_num(0.0)
    found = run(flow, **inputs)
    assert found.cross_entropy == 0 and torch.equal(found.loss, found.distillation)
    torch.testing.assert_close(found.loss, REFERENCE(**inputs))


@each_flow_and_eager
@pytest.mark.parametrize("beta, divergence", ((0.0, "forward_kl"), (1.0, "reverse_kl")))
def test_js_at_its_ends(device, flow, beta, divergence):
    inputs = make(device)
    found = run(flow, **inputs, divergence="js", beta=beta)
    assert torch.equal(found.loss, run(flow, **inputs, divergence=divergence).loss)


@each_flow_and_eager
def test_the_teacher_is_a_constant(device, flow):
    inputs = with_gradients(make(device))
    taught = ("teacher_input", "teacher_weight", "teacher_bias")
    for name in taught:
        inputs[name].requires_grad_()
    run(flow, **inputs).loss.backward()
    assert all(inputs[name].grad is None for name in taught)
    assert all(inputs[name].grad is not None for name in PARAMETERS)


# --- given probabilities --------------------------------------------------------------------------


TOPK = loss_of(linear_distillation_topk_ref)


def given(device, k=7, **sizes) -> dict:
    """Inputs with given probabilities. Places with probability 0 are not read; their index may be
    outside the vocabulary or another word's. Some rows have only such places."""
    inputs = make(device, **sizes)
    rows, vocab = inputs["input"].shape[0], inputs["linear_weight"].shape[0]
    for name in [name for name in inputs if name.startswith("teacher")]:
        del inputs[name]
    indices = torch.rand(rows, vocab, device=device).argsort(1)[:, :k]
    probabilities = torch.rand(rows, k, device=device) / k
    unread = torch.zeros_like(indices, dtype=torch.bool)
    unread[::5] = True
    unread[:, 1::5] = True
    probabilities[unread] = 0.0
    outside = torch.where(torch.arange(rows, device=device) % 2 == 0, -5, 1 << 40)[:, None]
    others = torch.arange(k, device=device) % 2 == 1
    indices = torch.where(unread, indices.roll(1, 1).where(others, outside), indices)
    return inputs | dict(teacher_indices=indices, teacher_probabilities=probabilities)


@pairwise(flow=FLOWS, mix=MIXES, dtype=DTYPES, renormalize=(True, False), k=(1, 7), bias=(0, 1))
def test_given_probabilities(device, flow, mix, dtype, renormalize, k, bias, chunked):
    """Runs with several chunks and blocks, with rows left out, and with strides."""
    bias = ("linear_bias",) * bias
    inputs = ignore(given(device, k, rows=24, vocab=140, dtype=dtype, bias=bias), 0.4)
    for name in ("input", "linear_weight", "teacher_indices", "teacher_probabilities"):
        inputs[name] = inputs[name].repeat(1, 2)[:, : inputs[name].shape[1]]
    inputs |= mixed(mix, {"renormalize": renormalize})
    check(flow, inputs, TOPK, ops.linear_distillation_topk)


@pairwise(flow=FLOWS, kind=("certain", "offset", "excluded"))
def test_extreme_logits_of_given_words(device, flow, kind):
    inputs = given(device, rows=10) | {"reduction": "none", "cross_entropy_weight": 0.5}
    inputs["input"] = inputs["input"].sign()
    for name in ("linear_weight", "linear_bias"):
        inputs[name] = inputs[name].mul(8).round().div(8)
    if kind == "certain":
        inputs["linear_weight"] = inputs["linear_weight"] * 32
    else:
        inputs["linear_bias"] += 4096 if kind == "offset" else 0
        inputs["linear_bias"][:35] += 0 if kind == "offset" else -INF
    check(flow, inputs, TOPK, ops.linear_distillation_topk)


@pairwise(flow=FLOWS, k=(4, 70), cross_entropy_weight=(0.0, 0.5))
def test_a_word_that_is_given_several_times(device, flow, k, cross_entropy_weight):
    """The word repeats within a tile of words, and in several tiles."""
    inputs = given(device, k, rows=9, vocab=80) | {"cross_entropy_weight": cross_entropy_weight}
    inputs["teacher_indices"] = inputs["teacher_indices"] % 3 + torch.arange(k, device=device) % 2
    inputs["teacher_indices"] *= inputs["teacher_probabilities"] != 0
    check(flow, inputs, TOPK, ops.linear_distillation_topk)


@each_flow_and_eager
def test_all_probabilities_given_are_the_teacher(device, flow):
    inputs = make(device, rows=9, vocab=40) | {"temperature": 2.0}
    teacher = {name: inputs.pop(name) for name in list(inputs) if name.startswith("teacher")}
    logits = teacher["teacher_input"] @ teacher["teacher_weight"].T + teacher["teacher_bias"]
    probabilities, indices = (logits / 2).softmax(1).sort(1)
    found = run(
        flow,
        ops.linear_distillation_topk,
        **inputs,
        teacher_indices=indices,
        teacher_probabilities=probabilities,
    )
    torch.testing.assert_close(found, run(flow, **inputs, **teacher))


@each_flow_and_eager
@pytest.mark.parametrize("bad", (-1, 70))
def test_an_index_outside_the_vocabulary_is_an_error_on_the_cpu(flow, bad):
    inputs = given("cpu")
    inputs["teacher_indices"][4, 2] = bad
    with pytest.raises(fastplm.FastplmError, match=f"`teacher_indices` got index {bad}"):
        run(flow, ops.linear_distillation_topk, **inputs)
    inputs["mask"] = torch.arange(33) != 4
    run(flow, ops.linear_distillation_topk, **inputs)


of_the_device = flows(**{n: f for n, f in FLOWS.items() if f.backend == "triton"}, eager=EAGER)


@of_the_device
def test_where_it_cannot_be_seen_an_index_outside_the_vocabulary_gives_nan(
    device, flow, monkeypatch
):
    monkeypatch.setattr(op_module, "_check_values", lambda *_: None)
    inputs = with_gradients(given(device, rows=9)) | {"reduction": "none"}
    inputs["teacher_indices"][4, 2] = -1
    inputs["teacher_indices"][7, 0] = 70
    found = run(flow, ops.linear_distillation_topk, **inputs)
    assert found.loss.isnan().nonzero().flatten().tolist() == [4, 7]
    (grad,) = torch.autograd.grad(found.loss.sum(), inputs["input"])
    assert grad.isnan().all(1).nonzero().flatten().tolist() == [4, 7]


# --- memory ---------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The number of elements of the largest matrix with a column for each word."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.elements = vocab, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, torch.Tensor) and one.dim() == 2 and one.shape[1] == self.vocab:
                self.elements = max(self.elements, one.numel())
        return out


def small_chunks(monkeypatch, elements: int) -> None:
    monkeypatch.setattr(loss_module, "_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(loss_module, "_CHUNK_COLUMNS", 128)
    monkeypatch.setattr(torch_module, "_TEACHER_BYTES", 4 * elements)


@each_divergence
def test_no_matrix_of_all_rows_and_words(options, monkeypatch):
    """If logits are kept, only rows that count have columns for all words."""
    # A dispatch mode does not see the calls inside an operator.
    for module in (fastplm._autograd, fastplm._registry):
        monkeypatch.setattr(module, "needs_dispatch", lambda *_: False)
    rows, vocab, counted = 256, 4096, 40
    small_chunks(monkeypatch, rows * 128)
    inputs = with_gradients(make("cpu", rows, vocab)) | options
    inputs["mask"] = torch.arange(rows) < counted
    for flow, allowed in (("torch-kept", counted * vocab), ("torch-recomputed", 0)):
        with Largest(vocab) as largest:
            run(FLOWS[flow], **inputs).loss.backward()
        assert largest.elements <= allowed
    with Largest(vocab) as largest:
        REFERENCE(**inputs).backward()
    assert largest.elements == rows * vocab


# --- contract of the operator ---------------------------------------------------------------------


def test_how_many_rows_are_kept(device):
    """A CPU keeps the rows that count; kernels without a known number keep no rows."""
    inputs = with_gradients(make(device, rows=20, width=400, teacher_width=400))
    inputs["mask"] = torch.arange(20, device=device) < 5

    def kept(backend: str, inputs=inputs, **options) -> int:
        if backend == "torch" and inputs["input"].is_cuda:
            pytest.skip("the torch backend is for CPU tensors")
        with fastplm.use_backend(backend):
            loss = ops.linear_distillation(**inputs, **options).loss
        if loss.grad_fn is None:
            return 0
        shapes = {tuple(one.shape) for one in loss.grad_fn.saved_tensors if one is not None}
        kept = [shape[0] for shape in shapes if len(shape) == 2 and shape[1] in (70, 128)]
        return max(kept, default=0)

    assert kept("torch") == kept("torch", expected_targets=9) == 5
    assert kept("torch", logits_budget=0) == 0
    assert kept("triton") == kept("triton", logits_budget=0, expected_targets=9) == 0
    assert kept("triton", expected_targets=9) == 9
    assert kept("triton", logits_budget=1 << 20) == 20


@pytest.mark.parametrize("backend", ("torch", "triton"))
@two_divergences
def test_where_not_all_rows_fit_the_others_are_computed_again(
    device, backend, options, monkeypatch
):
    rule = importlib.import_module("fastplm.ops.linear_cross_entropy")
    monkeypatch.setattr(rule, "_LEAST_KEPT_ROWS", 1)
    monkeypatch.setattr(rule, "_ROW_ALIGNMENT", 1)
    budget = 9 * 4 * rule.logit_columns(70)
    inputs = ignore(make(device), 0.5) | options | {"cross_entropy_weight": 0.5}
    check(Flow(backend, budget), inputs)


@pytest.mark.parametrize("flow", [FLOWS["torch-kept"], pytest.param(EAGER, marks=pytest.mark.slow)])
def test_compiled(device, flow):
    torch._dynamo.reset()
    inputs = ignore(make(device, rows=65), 0.85) | dict(cross_entropy_weight=0.5, divergence="js")
    compiled = torch.compile(ops.linear_distillation, fullgraph=True)
    candidate = loss_of(functools.partial(run, flow, compiled))
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        assert_within_budget(candidate, REFERENCE, inputs, wrt=parameters(inputs))
