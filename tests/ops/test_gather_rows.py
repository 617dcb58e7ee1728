"""ops.gather_rows against its reference: exact rows, gradients by the error budget."""

from __future__ import annotations

import functools

import pytest
import torch

import fastplm
from fastplm import _extension, ops
from fastplm.reference.gather_rows import gather_rows_ref
from fastplm.testing import assert_within_budget, poisoned_memory

from ..pairwise import pairwise

BACKENDS = ("cpp", "triton")
NAN = float("nan")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def run(backend: str, input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if backend != "triton" and input.is_cuda:
        pytest.skip(f"the {backend} backend of gather_rows is for CPU tensors")
    if backend == "cpp" and (lacking := _extension.lacks("gather_rows", "CPU")):
        pytest.skip(lacking)
    with fastplm.use_backend(backend):
        return ops.gather_rows(input, positions)


def check(backend: str, inputs: dict) -> None:
    assert_within_budget(functools.partial(run, backend), gather_rows_ref, inputs, wrt=("input",))


def make(device, rows=63, width=40, slots=30, dtype=torch.float32) -> dict:
    """Random rows, and random positions with duplicates and unused slots."""
    positions = torch.randint(-1, rows, (slots,), device=device)
    positions[::10] = -1  # some slots are unused for every seed
    return dict(input=torch.randn(rows, width, device=device).to(dtype), positions=positions)


def grad_of(backend: str, input: torch.Tensor, positions: torch.Tensor, upstream: torch.Tensor):
    input = input.detach().requires_grad_()
    with poisoned_memory():
        return torch.autograd.grad(run(backend, input, positions), input, upstream)[0]


@pairwise(backend=BACKENDS, dtype=DTYPES, rows=(0, 1, 63, 257), width=(1, 40, 64, 768))
def test_shapes_and_dtypes(device, backend, rows, width, dtype):
    inputs = make(device, rows, width, slots=50, dtype=dtype)
    check(backend, inputs)
    assert torch.equal(run(backend, **inputs), gather_rows_ref(**inputs))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("slots", (0, 1, 33, 257))
@pytest.mark.parametrize("rows", (0, 5))
def test_slots(device, backend, slots, rows):
    check(backend, make(device, rows, slots=slots))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_unused_slot_is_zero_whatever_the_input_holds(device, backend):
    input = torch.full((4, 8), NAN, device=device)
    positions = torch.tensor([-1, 2, -1], device=device)
    out = run(backend, input, positions)
    assert not out[0].any() and not out[2].any() and out[1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_row_that_is_not_chosen_stays_there(device, backend):
    inputs = make(device, rows=63)
    inputs["positions"] = torch.tensor([1, 5, -1, 5, 40], device=device)
    inputs["input"][[0, 2, 41, 62]] = NAN
    check(backend, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@each_dtype
def test_upstream_gradient_of_an_unused_slot_does_not_matter(device, backend, dtype):
    inputs = make(device, dtype=dtype)
    upstream = torch.randn(30, 40, device=device).to(dtype)
    clean = grad_of(backend, **inputs, upstream=upstream)
    upstream[inputs["positions"] < 0] = NAN
    assert (inputs["positions"] < 0).any()
    assert torch.equal(grad_of(backend, **inputs, upstream=upstream), clean)


@pytest.mark.parametrize("backend", BACKENDS)
@each_dtype
def test_duplicates_add_up_in_fp32(device, backend, dtype):
    """A thousand ones on one row sum to 1000, which a running sum in bf16 does not reach."""
    input = torch.zeros(3, 8, device=device, dtype=dtype)
    positions = torch.full((1000,), 1, device=device)
    grad = grad_of(backend, input, positions, torch.ones(1000, 8, device=device, dtype=dtype))
    assert torch.equal(grad[:, 0], torch.tensor([0, 1000, 0], device=device, dtype=dtype))


@pytest.mark.parametrize("rows", (5, 60), ids=("many each", "few each"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=("fp32", "fp16"))
def test_duplicates_add_up_in_ascending_order_of_slots(device, backend, dtype, rows):
    # bf16 is left out: Triton's interpreter truncates to it, but devices and PyTorch round.
    positions = torch.arange(257, device=device)[torch.randperm(257, device=device)] % rows
    upstream = (torch.randn(257, 40, device=device) * 100).to(dtype)
    expected = torch.zeros(rows, 40, device=device)
    for slot, row in enumerate(positions.tolist()):
        expected[row] += upstream[slot]
    input = torch.zeros(rows, 40, device=device, dtype=dtype)
    grad = grad_of(backend, input, positions, upstream)
    # The kernels add the slots of a row with more than eight in another order.
    assert torch.equal(grad, expected.to(dtype)) or (backend == "triton" and rows == 5)


def uses(pattern: str, device) -> torch.Tensor:
    """Positions in 70 rows. With 700 slots, a row of more than 128 is split, in two chunks."""
    distinct = torch.randperm(70, device=device)
    few = torch.randint(-1, 70, (700,), device=device)
    every = torch.arange(700, device=device)
    return {
        "all distinct": distinct,
        "none used": torch.full((40,), -1, device=device),
        "both ends": torch.cat([distinct, few.clamp(max=-1), distinct]),
        "many at both ends": torch.cat([distinct[:1].expand(12), few, distinct[:1].expand(12)]),
        "random": few,
        "one owns all": torch.full((700,), 69, device=device),
        "one owns half": few.where(every % 2 == 0, 3),
        "one owns a run": few.where((every < 300) | (every > 500), 0),
        "two own all": torch.where(every % 3 == 0, 1, 64),
        "eight, nine, 128 and 129": torch.arange(4, device=device).repeat_interleave(
            torch.tensor([8, 9, 128, 129], device=device)
        )[torch.randperm(274, device=device)],
    }[pattern]


PATTERNS = (
    *("all distinct", "none used", "both ends", "many at both ends", "random", "one owns all"),
    *("one owns half", "one owns a run", "two own all", "eight, nine, 128 and 129"),
)


# The values that most cases should have come last.
@pytest.mark.slow
@pairwise(
    backend=BACKENDS, pattern=PATTERNS, dtype=dict(reversed(DTYPES.items())), width=(1, 300, 40)
)
def test_rows_of_many_slots(device, backend, pattern, dtype, width):
    positions = uses(pattern, device)
    input = torch.randn(70, width, device=device).to(dtype)
    check(backend, dict(input=input, positions=positions))
    upstream = torch.randn(len(positions), width, device=device).to(dtype)
    upstream[positions < 0] = NAN
    grad = grad_of(backend, input, positions, upstream)
    assert torch.equal(grad, grad_of(backend, input, positions, upstream))
    assert torch.equal(grad.isnan(), torch.zeros_like(grad, dtype=torch.bool))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", (20, 2500), ids=("whole", "split"))
def test_more_chunks_than_a_word_has_bits(device, backend, count):
    """The kernels have a bit for each 512 slots of a row, 64 bits in a word."""
    slots = 64 * 512 + 700
    positions = torch.full((slots,), -1, device=device)
    positions[torch.linspace(0, slots - 1, count, device=device).long()] = 2
    positions[1], positions[-2] = 0, 0
    upstream = torch.arange(slots, device=device)[:, None] / 4096
    expected = torch.stack([upstream[positions == row].sum(0) for row in range(3)])
    grad = grad_of(backend, torch.zeros(3, 1, device=device), positions, upstream)
    assert torch.allclose(grad, expected)


@pytest.mark.parametrize("backend", ("eager", *BACKENDS))
@pytest.mark.parametrize(
    ("rows", "position", "expected"),
    (
        (63, 63, "-1 or 0 … 62"),
        (63, -2, "-1 or 0 … 62"),
        (63, 2**40, "-1 or 0 … 62"),
        (0, 0, "-1, as `input` has no rows"),
    ),
)
def test_a_position_outside_is_an_error_on_the_cpu(backend, rows, position, expected):
    inputs = make("cpu", rows) | {"positions": torch.tensor([-1, position])}
    with pytest.raises(ValueError) as caught:
        run(backend, **inputs)
    assert isinstance(caught.value, fastplm.FastplmError)
    assert f"`positions` got position {position}; expected {expected}" in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ("eager", "triton"))
@pytest.mark.parametrize("rows", (0, 63))
def test_a_position_outside_is_a_zero_row_on_cuda(backend, rows):
    inputs = make("cuda", rows)
    positions = torch.tensor([-2, rows, 2**40, -1], device="cuda")
    assert not run(backend, inputs["input"], positions).any()
    upstream = torch.ones(4, 40, device="cuda")
    assert not grad_of(backend, inputs["input"], positions, upstream).any()
