"""ops.rotary against its reference: outputs and gradients, by the error budget."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers.models.modernbert import modeling_modernbert
from transformers.models.nomic_bert import modeling_nomic_bert

import fastplm
from fastplm import ops
from fastplm._registry import OPS
from fastplm.errors import ArgumentValueError
from fastplm.ops.rotary import rotate_
from fastplm.reference.rotary import rotary_ref, rotated
from fastplm.testing import assert_within_budget, poisoned_memory

from ..pairwise import pairwise

BACKENDS = tuple(name for name in OPS["rotary"].backends if name != "eager")
each_backend = pytest.mark.parametrize("backend", BACKENDS)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
BOTH = ("query", "key")
NAN = float("nan")
ODD = dict(cos=torch.zeros(1, 5, 7), sin=torch.zeros(1, 5, 7))


def run(backend: str, **inputs):
    if backend == "cpp" and inputs["query"].device.type == "cuda":
        pytest.skip("the cpp backend of rotary is for CPU tensors")
    with fastplm.use_backend(backend):
        return ops.rotary(**inputs)


def joined(backend: str, **inputs):
    """Both outputs as one tensor, so that the gradient of each is of its own."""
    query, key = run(backend, **inputs)
    return torch.cat((query, 2 * key), 1)


def joined_ref(**inputs):
    query, key = rotary_ref(**inputs)
    return torch.cat((query, 2 * key), 1)


def angles(length: int, dim: int, *, batch=1, dtype=torch.float32, device=None):
    """cos and sin as Transformers makes them, of any positions."""
    place = torch.randint(0, 500, (batch, length, 1), device=device)
    turns = place / 100 ** (torch.arange(0, dim, 2, device=device) / dim)
    turns = torch.cat((turns, turns), -1)
    return dict(cos=turns.cos().to(dtype), sin=turns.sin().to(dtype))


def make(device, heads=(3, 3), length=5, dim=16, *, batch=2, of=1, dtype=torch.float32) -> dict:
    query, key = (torch.randn(batch, one, length, dim, device=device).to(dtype) for one in heads)
    of_angles = torch.float32 if dtype is torch.float16 else dtype
    return dict(query=query, key=key) | angles(
        length, dim, batch=of, dtype=of_angles, device=device
    )


def check(backend: str, inputs: dict) -> None:
    assert_within_budget(functools.partial(joined, backend), joined_ref, inputs, wrt=BOTH)


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [modeling_modernbert, modeling_nomic_bert])
def test_the_reference_is_transformers(module):
    """Bit for bit in fp32; in 16 bits where Transformers computes in fp32, too."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = make(None, length=9, dim=32, of=2, dtype=dtype)
        theirs = module.apply_rotary_pos_emb(*inputs.values())
        if dtype is torch.float32 or module is modeling_modernbert:
            assert all(map(torch.equal, rotary_ref(**inputs), theirs))


def test_a_rotation_keeps_lengths_and_differences_of_positions():
    """The product of a query and a key depends on the difference of their positions alone."""
    query, key = torch.randn(2, 1, 1, 1, 16).double().expand(2, 1, 1, 8, 16)
    turns = torch.arange(8)[None, :, None] * torch.rand(8).double()
    turns = torch.cat((turns, turns), -1)
    query, key = ops.rotary(query, key, turns.cos(), turns.sin())
    products = (query @ key.transpose(-1, -2))[0, 0]
    for shift in range(-7, 8):
        diagonal = products.diagonal(shift)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(key.norm(dim=-1), key[..., :1, :].norm(dim=-1).expand(1, 1, 8))


# --- kernels --------------------------------------------------------------------------------------


@pairwise(
    backend=BACKENDS,
    dtype=DTYPES,
    length=(1, 63, 65, 257),
    dim=(2, 18, 32, 40, 64, 80, 96, 128),
    heads=((1, 1), (3, 3), (5, 2), (4, 0)),
    of=(1, 2),
)
def test_shapes_and_dtypes(device, backend, dtype, length, dim, heads, of):
    check(backend, make(device, heads, length, dim, of=of, dtype=dtype))


@each_backend
@each_dtype
def test_parts_of_one_product_are_read_as_they_lie(device, backend, dtype):
    """Query and key are views of one product; NaN is in the rest of it."""
    product = torch.full((2, 7, 3, 4, 32), NAN, device=device).to(dtype)
    inputs = make(device, (4, 4), 7, 32, of=2, dtype=dtype)
    for at, name in enumerate(BOTH):
        product[:, :, at] = inputs[name].transpose(1, 2)
    views = {name: product[:, :, at].transpose(1, 2) for at, name in enumerate(BOTH)}
    out, expected = run(backend, **inputs | views), run(backend, **inputs)
    assert all(map(torch.equal, out, expected))
    assert all(one.transpose(1, 2).is_contiguous() for one in out)
    check(backend, inputs | views)


@each_backend
@each_dtype
@pytest.mark.parametrize("dim", [24, 64])
def test_in_place(device, backend, dtype, dim):
    """Heads of query and key are rotated where they lie, and back; those of value stay."""
    if backend == "cpp" and torch.device(device or "cpu").type == "cuda":
        pytest.skip("the cpp backend of rotary is for CPU tensors")
    inputs = make(device, (5, 5), 9, dim, of=2, dtype=dtype)
    value, turns = inputs["query"] + 1, (inputs["cos"], inputs["sin"])
    product = torch.stack([inputs[name] for name in BOTH] + [value]).permute(1, 3, 0, 2, 4)
    product = product.contiguous()
    both = product[:, :, :2].flatten(2, 3).transpose(1, 2)
    assert both._base is not None
    rotate_(both, *turns, backend)
    for out, expected in zip(product.unbind(2), run(backend, **inputs), strict=False):
        assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(product[:, :, 2].transpose(1, 2), value)
    (grad,) = torch.autograd.grad(
        run(backend, **inputs | {"query": inputs["key"].requires_grad_()})[0],
        inputs["key"],
        both[:, :5],
    )
    rotate_(both[:, :5], *turns, backend, inverse=True)
    assert torch.equal(both[:, :5], grad)


def test_in_place_in_a_compiled_program(device):
    """The operator says what it writes to."""

    def turn(product, cos, sin):
        product = 2 * product
        rotate_(product[:, :, :2].flatten(2, 3).transpose(1, 2), cos, sin, backend)
        return product.sum(2)

    backend = "cpp" if torch.device(device or "cpu").type == "cpu" else "triton"
    product = torch.randn(2, 6, 3, 2, 16, device=device)
    turns = angles(6, 16, device=device)
    expected = turn(product, **turns)
    found = torch.compile(turn, fullgraph=True, backend="aot_eager")(product, **turns)
    torch.testing.assert_close(found, expected)


@each_backend
def test_the_second_half_of_the_angles_is_not_read(device, backend):
    inputs = make(device, dim=32, length=70)
    expected = run(backend, **inputs)
    for name in ("cos", "sin"):
        inputs[name] = inputs[name].clone()
        inputs[name][..., 16:] = NAN
    assert all(map(torch.equal, run(backend, **inputs), expected))


@each_backend
@each_dtype
def test_packed_rows_are_those_of_the_padded_batch(device, backend, dtype):
    """Bit for bit, as is the gradient."""
    lengths, inputs = (5, 70, 1), make(device, (2, 2), 70, 40, batch=3, of=3, dtype=dtype)
    kept = [(b, t) for b, length in enumerate(lengths) for t in range(length)]
    rows = tuple(torch.tensor(one, device=device) for one in zip(*kept, strict=True))
    packed = {name: inputs[name].transpose(1, 2)[rows][None].transpose(1, 2) for name in BOTH}
    packed |= {name: inputs[name][rows][None] for name in ("cos", "sin")}
    for given in (inputs, packed):
        given["query"] = given["query"].detach().requires_grad_()
    out, of_packed = run(backend, **inputs), run(backend, **packed)
    for one, other in zip(out, of_packed, strict=True):
        assert torch.equal(one.transpose(1, 2)[rows], other.transpose(1, 2)[0])
    out[0].backward(out[1].detach())
    of_packed[0].backward(of_packed[1].detach())
    one, other = inputs["query"].grad, packed["query"].grad
    assert torch.equal(one.transpose(1, 2)[rows], other.transpose(1, 2)[0])


@each_backend
def test_one_of_the_two_alone_has_a_gradient(device, backend):
    inputs = make(device, (2, 1), 6, 16)
    for name in BOTH:
        given = dict(inputs)
        given[name] = given[name].clone().requires_grad_()
        out = dict(zip(BOTH, run(backend, **given), strict=True))
        with poisoned_memory():
            (grad,) = torch.autograd.grad(out[name].sum(), given[name])
        back = rotated(torch.ones_like(grad), given["cos"], -given["sin"])
        torch.testing.assert_close(grad, back)


@each_backend
def test_nothing_depends_on_the_key(device, backend):
    """Only one output is used, but both inputs require a gradient."""
    inputs = make(device, (2, 1), 6, 16)
    leaves = [inputs[name].requires_grad_() for name in BOTH]
    for at in (0, 1):
        grads = torch.autograd.grad(run(backend, **inputs)[at].sum(), leaves, allow_unused=True)
        assert grads[at].abs().sum() > 0
        assert grads[1 - at] is None or (grads[1 - at] == 0).all()


@each_backend
def test_numbers_of_any_size(device, backend):
    """Each pair is compared alone, so that no error hides another's."""
    for exponent in (-120, -30, 0, 30, 120):
        inputs = make(device, (2, 2), 3, 8)
        check(backend, inputs | {name: inputs[name] * 2.0**exponent for name in BOTH})


@each_backend
def test_what_is_not_finite_stays_in_its_pair(device, backend):
    inputs = make(device, (2, 2), 5, 16)
    inputs["query"][0, 1, 2, 3] = NAN
    inputs["query"][1, 0, 4, 9] = float("inf")
    found, expected = run(backend, **inputs)[0], rotary_ref(**inputs)[0]
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert (~found.isfinite()).sum() == 4


@each_backend
@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_nothing(device, backend, shape):
    empty = torch.randn(shape, device=device, requires_grad=True)
    turns = angles(shape[2], 8, device=device)
    out, _ = run(backend, query=empty, key=empty, **turns)
    assert out.shape == shape
    assert torch.autograd.grad(out.sum(), empty)[0].shape == shape


@each_backend
def test_a_second_gradient(device, backend):
    inputs = make(device, (2, 1), 4, 8)
    leaves = [inputs[name].double().requires_grad_() for name in BOTH]
    inputs |= angles(4, 8, dtype=torch.float64, device=device)

    def twice(query, key):
        with fastplm.use_backend("eager"):
            return joined("eager", **inputs | dict(query=query, key=key)).pow(3).sum()

    assert torch.autograd.gradgradcheck(twice, leaves)
    given = {name: inputs[name].float().requires_grad_() for name in BOTH}
    (first,) = torch.autograd.grad(
        joined(backend, **make(device, (2, 1), 4, 8) | given).pow(3).sum(),
        given["query"],
        create_graph=True,
    )
    (second,) = torch.autograd.grad(first.sum(), given["query"])
    assert second.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(query=torch.zeros(2, 3, 5, 7), key=torch.zeros(2, 3, 5, 7)) | ODD, "an even number"),
        (dict(cos=torch.zeros(3, 5, 16), sin=torch.zeros(3, 5, 16)), "1 or 2, the batch"),
        (dict(cos=torch.zeros(1, 5, 16, requires_grad=True)), "requires none"),
        (dict(sin=torch.zeros(1, 5, 16, requires_grad=True)), "requires none"),
    ],
)
def test_what_it_refuses(change, message):
    with pytest.raises(ArgumentValueError, match=message):
        ops.rotary(**make(None) | change)


@pytest.mark.parametrize("rows", [1, 6])
def test_a_batch_that_is_chosen_in_a_program(rows):
    """Its size is unknown there, whether each text has angles or one row is for all."""
    torch._dynamo.reset()
    heads, angles = torch.randn(6, 2, 5, 8), torch.randn(rows, 5, 8)

    def turned(keep):
        its = angles if rows == 1 else angles[keep]
        return ops.rotary(heads[keep], heads[keep], its.cos(), its.sin())[0]

    program = torch.compile(turned, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for keep in (torch.arange(6) % 2 > 0, torch.arange(6) < 1):
            torch.testing.assert_close(program(keep), turned(keep))
