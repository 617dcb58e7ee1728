"""ops.dropout against its reference, bit for bit, and against the definition of dropout."""

from __future__ import annotations

import itertools

import pytest
import torch

import fastplm
from fastplm import _extension, ops
from fastplm.nn import Dropout
from fastplm.nn.dropout import RowNumbers, on_rows
from fastplm.reference import philox
from fastplm.reference.dropout import dropout_ref, dropout_threshold, keep_mask, keep_mask_of_rows
from fastplm.testing import assert_within_budget, poisoned_memory

from ..samples import backends_of

LACKING = _extension.lacks("dropout", "CPU")
needs_csrc = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def run(input: torch.Tensor, p: float = 0.3, seed: int = 5) -> torch.Tensor:
    with fastplm.use_backend("cpp"):
        return ops.dropout(input, p, seed=seed)


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_p_says(p):
    size = 1 << 20
    kept = keep_mask(7, size, p, CPU).double().mean().item()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / size) ** 0.5  # five standard deviations


def test_neighbours_and_seeds_are_independent():
    size = 1 << 20
    mask = keep_mask(7, size, 0.5, CPU)
    others = [mask.roll(shift) for shift in (1, 2, 8, 16, 128)] + [keep_mask(8, size, 0.5, CPU)]
    for other in others:
        agreeing = (mask == other).double().mean().item()
        assert abs(agreeing - 0.5) < 5 * 0.5 / size**0.5


def test_each_bit_decides_for_one_element():
    """Elements that are dropped at one probability are dropped at every larger one."""
    masks = [keep_mask(3, 4096, p, CPU) for p in (0.0, 0.2, 0.6, 0.95, 1.0)]
    assert masks[0].all() and not masks[-1].any()
    for fewer, more in zip(masks[1:], masks, strict=False):
        assert (fewer <= more).all()


@pytest.mark.parametrize(
    "p, expected", [(0.0, 0), (1e-9, 1), (0.1, 6554), (1 - 1e-9, 65535), (1, 65536)]
)
def test_steps_of_the_probability(p, expected):
    assert dropout_threshold(p) == expected


def test_the_mean_stays():
    out = dropout_ref(torch.ones(1 << 20), 0.1, seed=1)
    assert abs(out.mean().item() - 1.0) < 1e-3


# --- backend "cpp" --------------------------------------------------------------------------------


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 127, 128, 129, 1000, 70_001])
def test_sizes_and_dtypes(size, dtype):
    input = torch.randn(size).to(dtype)
    with poisoned_memory():
        out = run(input)
    assert torch.equal(out, dropout_ref(input, 0.3, seed=5)) and out.dtype is dtype


@needs_csrc
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 2**32])
@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.999999, 1.0])
def test_seeds_and_probabilities(seed, p):
    input = torch.randn(3, 333)
    assert torch.equal(run(input, p, seed), dropout_ref(input, p, seed=seed))


@needs_csrc
def test_what_is_dropped_is_0_and_what_stays_is_not_hidden():
    input = torch.full((1000,), float("nan"))
    out, keep = run(input), keep_mask(5, 1000, 0.3, CPU)
    assert out[keep].isnan().all() and (out[~keep] == 0).all()
    leaf = torch.randn(1000, requires_grad=True)
    (grad,) = torch.autograd.grad(run(leaf), leaf, input)
    assert grad[keep].isnan().all() and (grad[~keep] == 0).all()


def test_without_p_nothing_happens():
    input = torch.randn(4)
    out = ops.dropout(input, 0.0)
    assert torch.equal(out, input) and out is not input


# --- by rows --------------------------------------------------------------------------------------


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Rows with the largest samples and positions."""
    rows = torch.Size(shape[:-1]).numel()
    return {
        "input": torch.randn(shape).to(dtype),
        "sample_index": torch.randint(-(2**62), 2**62, (rows,)),
        "position": torch.randint(2**32, (rows,)),
    }


def test_the_formula_of_a_row():
    """One Philox draw serves 8 elements; its counter has the row's sample and position."""
    sample, position, p = torch.tensor([3, 2**40 + 5]), torch.tensor([7, 2**32 - 1]), 0.4
    keep = keep_mask_of_rows(9, sample, position, 300, p)
    for row in range(2):
        for element in (0, 1, 16, 127, 128, 299):
            block, rest = divmod(element, 128)
            choice, lane = divmod(rest, 16)
            words = philox.draw(
                9,
                philox.Stream.HIDDEN,
                sample_index=int(sample[row]),
                position=int(position[row]),
                step=16 * block + lane,
                rounds=7,
            )
            half = int(words[choice // 2]) >> 16 * (choice % 2) & 0xFFFF
            assert keep[row, element] == (half >= dropout_threshold(p))


@needs_csrc
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(0, 5), (5, 0), (7, 1), (3, 5, 7), (4, 128), (2, 3, 129), (9, 300), (600, 640)]
)
def test_rows_equal_the_reference(shape, dtype):
    given = numbered(*shape, dtype=dtype)
    with poisoned_memory(), fastplm.use_backend("cpp"):
        out = ops.dropout(p=0.3, seed=5, **given)
    assert torch.equal(out, dropout_ref(p=0.3, seed=5, **given)) and out.dtype is dtype


@pytest.mark.parametrize("backend", [pytest.param("cpp", marks=needs_csrc), "eager"])
def test_a_row_drops_the_same_wherever_it_is(backend):
    given = numbered(40, 50)
    given["input"] = torch.ones(40, 50)
    with fastplm.use_backend(backend):
        whole = ops.dropout(p=0.3, seed=5, **given)
        order = torch.randperm(40)
        for rows in (order, order[:7], order[-1:]):
            part = ops.dropout(p=0.3, seed=5, **{name: of[rows] for name, of in given.items()})
            assert torch.equal(part, whole[rows])
        strided = {name: of.repeat_interleave(2, 0)[::2] for name, of in given.items()}
        assert torch.equal(ops.dropout(p=0.3, seed=5, **strided), whole)
        padded = given | {"input": torch.ones(5, 8, 50)}
        assert torch.equal(ops.dropout(p=0.3, seed=5, **padded).flatten(0, 1), whole)
        first = {name: of for name, of in given.items() if name != "position"}
        at_0 = first | {"position": torch.zeros(40, dtype=torch.int64)}
        assert torch.equal(ops.dropout(p=0.3, seed=5, **first), ops.dropout(p=0.3, seed=5, **at_0))
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(whole))


def test_rows_samples_and_positions_are_independent():
    rows = torch.arange(4096)
    zeros = torch.zeros_like(rows)
    masks = [
        keep_mask_of_rows(7, *numbers, 256, 0.5)
        for numbers in ((rows, zeros), (zeros, rows), (rows << 32, zeros), (rows, zeros + 1))
    ]
    masks.append(masks[0].roll(1, 0))
    masks.append(masks[0].roll(128, 1))
    for one, other in itertools.combinations(masks, 2):
        agreeing = (one == other).double().mean().item()
        assert abs(agreeing - 0.5) < 5 * 0.5 / one.numel() ** 0.5
    kept = masks[0].double()
    for mean, count in ((kept.mean(0), 4096), (kept.mean(1), 256)):
        assert (mean - 0.5).abs().max() < 5.5 * 0.5 / count**0.5


@needs_csrc
def test_gradients_of_rows():
    given = numbered(7, 50)
    numbers = {name: given[name] for name in ("sample_index", "position")}

    def reference(input):
        return dropout_ref(input, 0.3, seed=5, **numbers)

    def candidate(input):
        with fastplm.use_backend("cpp"):
            return ops.dropout(input, 0.3, seed=5, **numbers)

    assert_within_budget(candidate, reference, {"input": given["input"]}, wrt=("input",))
    leaf = torch.randn(7, 50, requires_grad=True)
    (grad,) = torch.autograd.grad(candidate(leaf), leaf, torch.ones(7, 50))
    assert torch.equal(grad, reference(torch.ones(7, 50)))


@needs_csrc
def test_the_threads_do_not_matter():
    given, threads = numbered(2000, 200), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = ops.dropout(p=0.1, seed=5, **given)
        torch.set_num_threads(3)
        assert torch.equal(ops.dropout(p=0.1, seed=5, **given), alone)
    finally:
        torch.set_num_threads(threads)


@needs_csrc
def test_a_layer_is_told_its_rows():
    """The layer draws by the rows if they fit the input, of any size, else as without rows."""
    layer, given = Dropout(0.3), numbered(6, 40)
    numbers = RowNumbers(given["sample_index"], given["position"])
    seen = []
    for place in (slice(None), slice(2, 4)):
        torch.manual_seed(3)
        part = RowNumbers(numbers.sample_index[place], numbers.position[place])
        seen.append(on_rows(part, layer, torch.ones(6, 40)[place]))
    assert torch.equal(seen[0][2:4], seen[1])
    torch.manual_seed(3)
    other = on_rows(numbers, layer, torch.ones(5, 40))
    torch.manual_seed(3)
    assert torch.equal(layer(torch.ones(5, 40)), other)
    torch.manual_seed(3)
    assert not torch.equal(layer(torch.ones(6, 40)), seen[0]), "outside, nobody knows the rows"


# --- the layer ------------------------------------------------------------------------------------

LARGE = (64, 300)


@needs_csrc
def test_what_pytorch_alone_can_do_stays_pytorchs():
    large = torch.randn(LARGE)
    for layer in (Dropout(0.1, inplace=True), Dropout(0.0), Dropout(1.0)):
        assert backends_of(layer, large.clone()) == []
    assert torch.equal(Dropout(0.1).eval()(large), large)


@needs_csrc
def test_a_checkpointed_layer_drops_the_same_again():
    layer, weight = Dropout(0.5), torch.randn(LARGE, requires_grad=True)
    seen = []

    def block(weight):
        seen.append(layer(weight))
        return seen[-1].square()

    torch.utils.checkpoint.checkpoint(block, weight, use_reentrant=False).sum().backward()
    assert len(seen) == 2 and torch.equal(seen[0], seen[1])


# --- compiled -------------------------------------------------------------------------------------


@needs_csrc
@pytest.mark.parametrize("faster", [False, True], ids=["PyTorch's", "csrc"])
def test_a_compiled_layer(measured, faster):
    """A compiled layer takes the backend that is faster for many elements, for any number of them;
    its backward drops the same."""
    measured.ours = lambda op, form, dtype, sizes: faster
    graphs = []

    def keep(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes})
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(Dropout(0.5), fullgraph=True, dynamic=True, backend=keep)
    for size in (30, 600):
        x = torch.ones(size, 7, requires_grad=True)
        out = compiled(x)
        assert 0.2 < (out == 0).double().mean() < 0.8
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, out)  # the input is ones
    assert [torch.ops.fastplm.dropout_fwd.default in targets for targets in graphs] == [faster]
