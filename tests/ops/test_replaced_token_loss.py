"""ops.replaced_token_loss against its reference: loss and gradients, by the error budget."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
import torch.nn.functional as F

import fastplm
from fastplm import ops
from fastplm.reference.replaced_token_loss import DetectionCounts, replaced_token_loss_ref
from fastplm.testing import assert_within_budget, poisoned_memory

from ..pairwise import pairwise

BACKENDS = ("cpp", "triton")
ALL_BACKENDS = ("eager", *BACKENDS)
WRT = ("input", "weight", "bias")
NAN, INF = float("nan"), float("inf")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def skip_where_it_cannot_run(backend: str, device: torch.device) -> None:
    if backend == "cpp" and device.type == "cuda":
        pytest.skip(f"the {backend} backend of replaced_token_loss is for CPU tensors")


def run(backend: str, **inputs):
    skip_where_it_cannot_run(backend, inputs["input"].device)
    with fastplm.use_backend(backend):
        return ops.replaced_token_loss(**inputs)


def each(loss):
    """``loss`` for every problem in a batch of problems.

    The gradient of a bias is one number, and so is a mean. The rounding error of one number is
    chance, so several problems are compared together.
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
    """The first problem alone, as leaf tensors."""
    inputs = {n: v[0] if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    return inputs | {name: inputs[name].detach().requires_grad_() for name in WRT}


def loss_and_grads(backend: str, upstream=None, **inputs):
    with poisoned_memory():
        loss = run(backend, **inputs)
        return loss.detach(), *torch.autograd.grad(loss, [inputs[name] for name in WRT], upstream)


@pairwise(backend=BACKENDS, dtype=DTYPES, rows=(0, 1, 65), width=(1, 40, 64, 768))
def test_shapes_and_dtypes(device, backend, rows, width, dtype):
    # A wide row has a wide gradient of the weight, so one problem is enough.
    wide = width == 768
    inputs = make(device, rows, width, dtype, problems=1 if wide else 6, reduction="none")
    check(backend, random_mask(inputs), wrt=("input", "weight") if wide else WRT)


@pairwise(
    3,
    backend=BACKENDS,
    reduction=("mean", "sum", "none"),
    masked={"all rows": False, "mask": True},
    dtype=DTYPES,
)
def test_reductions(device, backend, reduction, masked, dtype):
    inputs = make(device, dtype=dtype, reduction=reduction)
    check(backend, random_mask(inputs) if masked else inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", (torch.float32, torch.int64), ids=("fp32", "int64"))
def test_normalizer_replaces_the_denominator(device, backend, kind):
    normalizer = torch.tensor([100, 3, 1, 63, 7, 64], device=device).to(kind)
    check(backend, random_mask(make(device, normalizer=normalizer)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduction", "rows_of_a_group", "most_groups"), (("mean", 8, 1024), ("none", 16, 3))
)
def test_many_rows(device, monkeypatch, reduction, rows_of_a_group, most_groups):
    """There are more groups than the smaller tile of sums holds, and groups of many rows."""
    kernels = importlib.import_module("fastplm.triton_kernels.replaced_token_loss")
    monkeypatch.setattr(kernels, "_ROWS", rows_of_a_group)
    monkeypatch.setattr(kernels, "_MAX_GROUPS", most_groups)
    inputs = random_mask(make(device, rows=1100, width=24, problems=1, reduction=reduction))
    check("triton", inputs, wrt=("input", "weight"))


@pytest.mark.slow
@each_dtype
@pytest.mark.parametrize("reduction", ("mean", "none"))
@pytest.mark.parametrize("parts", (3, 7, 33), ids=lambda parts: f"{parts} parts")
def test_rows_of_many_parts(device, parts, reduction, dtype):
    """A row takes one warp, several warps, or (33) does not fit; its last part is not full."""
    width = parts * 512 // dtype.itemsize - 24
    inputs = random_mask(make(device, 5, width, dtype, problems=1, reduction=reduction))
    check("triton", inputs, wrt=("input", "weight"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_bias_and_with_a_bias_of_no_dimension(device, backend):
    inputs = make(device)
    check(backend, inputs | {"bias": inputs["bias"][:, 0]})
    check(backend, inputs | {"bias": None}, wrt=("input", "weight"))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
def test_gradient_of_the_normalizer(device, backend):
    inputs = first(random_mask(make(device)))
    normalizer = torch.tensor(40.0, device=device, requires_grad=True)
    loss = run(backend, **inputs, normalizer=normalizer)
    got = torch.autograd.grad(loss, [normalizer, *(inputs[name] for name in WRT)])
    expected = replaced_token_loss_ref(**inputs, normalizer=normalizer)
    expected = torch.autograd.grad(expected, [normalizer, *(inputs[name] for name in WRT)])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@pytest.mark.parametrize("frozen", (False, True), ids=("trained weight", "frozen weight"))
def test_the_rows_are_kept_only_to_be_read_again(device, backend, reduction, frozen):
    inputs = first(random_mask(make(device, reduction=reduction)))
    inputs["weight"].requires_grad_(not frozen)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        run(backend, **inputs)
    kept = any(tensor is not None and tensor.shape == inputs["input"].shape for tensor in saved)
    assert saved and kept == (reduction == "none" and not frozen)


# --- labels as two tensors of ids -----------------------------------------------------------------


def as_ids(replaced: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids that differ where ``replaced``; some of 64 bits differ in the upper half alone."""
    original = torch.randint(30522, replaced.shape, device=replaced.device).to(dtype)
    step = torch.where(original % 2 == 0, 1, 2**32 if dtype is torch.int64 else 3).to(dtype)
    return original + step * replaced, original


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32), ids=("int64", "int32"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_two_tensors_of_ids_are_compared(device, backend, reduction, dtype):
    inputs = first(random_mask(make(device, reduction=reduction)))
    upstream = torch.randn(63 if reduction == "none" else (), device=device)
    expected = loss_and_grads(backend, upstream, **inputs)
    ids, original = as_ids(inputs["replaced"], dtype)
    spread = torch.stack((ids, original), 1)  # columns of stride 2
    for pair in ((ids, original), [original, ids], spread.unbind(1)):
        got = loss_and_grads(backend, upstream, **inputs | {"replaced": pair})
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# --- counts ---------------------------------------------------------------------------------------


def assert_counts(counts, logit, replaced, mask) -> None:
    """Checks the counts against a loop over the rows."""
    expected = dict.fromkeys(DetectionCounts._fields, 0)
    for z, was, counted in zip(logit.tolist(), replaced.tolist(), mask.tolist(), strict=True):
        if counted:
            expected["true_positives"] += was and z > 0
            expected["predicted_positives"] += z > 0
            expected["positives"] += was
            expected["correct"] += (z > 0) == was
            expected["total"] += 1
    assert {name: int(count) for name, count in counts._asdict().items()} == expected


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("masked", (False, True), ids=("all rows", "mask"))
def test_counts_by_hand(device, backend, masked):
    logit = [0.0, 1.0, -1.0, 2.0, -3.0, 0.0, 5.0, NAN]
    replaced = [True, True, True, False, False, False, True, True]
    rows = slice(None) if masked else slice(6)
    inputs = dict(
        input=torch.tensor(logit, device=device)[rows, None],
        weight=torch.ones(1, device=device),
        replaced=torch.tensor(replaced, device=device)[rows],
        mask=torch.arange(8, device=device) < 6 if masked else None,
    )
    loss, counts = run(backend, **inputs, return_counts=True)
    assert torch.equal(loss, run(backend, **inputs))
    # A logit of exactly 0 predicts "original".
    assert [int(count) for count in counts] == [1, 2, 3, 3, 6]
    assert isinstance(counts, DetectionCounts)
    for count in counts:
        assert count.dtype is torch.int64 and count.dim() == 0 and count.device == loss.device
    ratios = (counts.accuracy, counts.precision, counts.recall)
    assert all(ratio.dim() == 0 and ratio.dtype is torch.float32 for ratio in ratios)
    torch.testing.assert_close(torch.stack(ratios).cpu(), torch.tensor([3 / 6, 1 / 2, 1 / 3]))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize(
    ("rows", "reduction"), ((1, "mean"), (65, "sum"), (65, "none"), (300, "mean"))
)
def test_counts_of_many_rows(device, backend, rows, reduction):
    """Inputs of whole numbers, so that logits are exact and often 0."""
    input = torch.randint(-1, 2, (rows, 5), device=device).float()
    weight = torch.tensor([1.0, 2.0, 1.0, -2.0, 1.0], device=device)
    replaced = torch.rand(rows, device=device) < 0.3
    mask = torch.rand(rows, device=device) < 0.7
    inputs = dict(input=input, weight=weight, mask=mask, reduction=reduction)
    for labels in (replaced, as_ids(replaced, torch.int32)):
        loss, counts = run(backend, **inputs, replaced=labels, return_counts=True)
        assert_counts(counts, input @ weight, replaced, mask)
        assert torch.equal(loss, run(backend, **inputs, replaced=labels))


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("rows", (0, 9))
def test_ratios_of_no_row_are_0(device, backend, rows):
    inputs = first(make(device, rows))
    mask = torch.zeros(rows, dtype=torch.bool, device=device)
    _, counts = run(backend, **inputs, mask=mask, return_counts=True)
    assert not any(counts)
    assert not any((counts.accuracy, counts.precision, counts.recall))


# --- numbers that are not finite, limits, layouts -------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@each_dtype
def test_a_row_that_does_not_count_may_hold_anything(device, backend, dtype):
    inputs = random_mask(make(device, dtype=dtype))
    hole = ~inputs["mask"][..., None]
    check(backend, inputs | {"input": inputs["input"].masked_fill(hole, NAN)})
    check(backend, inputs | {"input": inputs["input"].masked_fill(hole, INF)})


@pairwise(backend=ALL_BACKENDS, dtype=DTYPES, reduction=("mean", "sum", "none"), rows=(0, 63))
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
@each_dtype
@pytest.mark.parametrize(("name", "size"), (("weight", 1e-4), ("weight", 30.0), ("bias", 1e4)))
def test_logits_of_any_size(device, backend, name, size, dtype):
    inputs = make(device, dtype=dtype, reduction="none")
    check(backend, inputs | {name: inputs[name] * size})


@pytest.mark.parametrize("backend", ALL_BACKENDS)
@pytest.mark.parametrize("replaced", (False, True))
def test_values_at_the_limits(device, backend, replaced):
    """The loss is softplus of z, exact to the last bits on both sides, with signed zero."""
    sizes = [0.0, 10.0, -10.0, 200.0, -200.0, 3e38, -3e38, INF, -INF]
    logit = torch.tensor(sizes, device=device)
    input = logit[:, None].requires_grad_()
    flags = torch.full((len(sizes),), replaced, device=device)
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
