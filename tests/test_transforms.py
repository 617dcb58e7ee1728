"""PyTorch's transforms of functions: forward-mode AD, torch.func, traces and exports."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fastplm
from fastplm import _backends, ops
from fastplm._registry import OPS
from fastplm.errors import ArgumentValueError, UnsupportedError
from fastplm.testing import FORWARD_FACTOR, check_error

from .samples import DIFFERENTIABLE, SAMPLES, first


@pytest.fixture(autouse=True)
def no_call_for_an_issue(capfd, recwarn):
    """PyTorch prints a warning for each operator without a batching rule."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)
    printed = [capfd.readouterr().err, *(str(warning.message) for warning in recwarn)]
    assert not any("performance drop" in text for text in printed), printed


ROWS, WIDTH = 6, 16


def function_of(name: str, wrt: str):
    """(a sample's call as a function of one of its tensors, the tensor)."""
    sample = SAMPLES[name]
    inputs = sample.make(ROWS, torch.float32)

    def function(x: Tensor) -> Tensor:
        # The first result of rotary does not depend on the key.
        names = (*sample.wrt, "key")
        given = {key: value.to(x.dtype) if key in names else value for key, value in inputs.items()}
        return first(sample.function(**given | {wrt: x}))

    return function, inputs[wrt]


#: For every op with a gradient: (the op as a function of one tensor, the tensor).
with torch.random.fork_rng():
    torch.manual_seed(0)
    FUNCTIONS = {name: function_of(name, sample.wrt[0]) for name, sample in DIFFERENTIABLE.items()}
    FUNCTIONS |= {
        f"{name}, {wrt}": function_of(name, wrt)
        for name, wrt in (
            ("attention, all", "bias_weight"),
            ("linear_cross_entropy, recomputed", "linear_weight"),
        )
    }
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def number(name: str):
    """(a function to one number, which depends on all results of the op; its argument)."""
    function, x = FUNCTIONS[name]
    return lambda x: function(x).sin().sum(), x


def dual(function, x: Tensor, direction: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent


def tangent(function, x: Tensor, direction: Tensor) -> Tensor:
    return torch.func.jvp(function, (x,), (direction,))[1]


@every_function
@pytest.mark.parametrize("how", ["torch.func.jvp", "dual numbers"])
def test_tangents_are_those_of_the_reference(name, how):
    function, x = FUNCTIONS[name]
    direction = torch.linspace(-1, 1, x.numel()).view_as(x)
    with fastplm.use_backend("eager"):
        gold = tangent(function, x.double(), direction.double())
        base = tangent(function, x, direction)
        flipped = -tangent(function, x, -direction)
    if how == "dual numbers":
        out = dual(function, x, direction)
    else:
        out = tangent(function, x, direction)
    assert out is not None and out.any()
    check_error(name, out, gold, [base, flipped], FORWARD_FACTOR)


def test_a_forced_kernel_says_that_it_has_no_tangent():
    function, x = FUNCTIONS["attention, all"]
    with (
        fastplm.use_backend("cpp"),
        pytest.raises(fastplm.FastplmError, match="forward-mode AD") as caught,
    ):
        tangent(function, x, x)
    assert "eager: can run it" in str(caught.value)


@every_function
def test_a_graph_of_kernels_refuses_transforms_that_began_later(name):
    """A graph has fixed operators, so plain PyTorch cannot be chosen any more; that of autograd,
    too."""
    function, x = FUNCTIONS[name]
    op = name.split(",")[0]
    backend = next((one for one in ("cpp", "torch") if one in OPS[op].backends), None)
    if backend is None:
        pytest.skip("it has no kernels for a CPU")
    leaf = x.clone().requires_grad_()
    with fastplm.use_backend(backend, op):
        graph, out = make_fx(function)(x), function(leaf)
    upstream = torch.ones_like(out)

    def gradient(upstream: Tensor) -> Tensor:
        return torch.autograd.grad(out, leaf, upstream, retain_graph=True)[0]

    for transform in (
        lambda: tangent(graph, x, x),
        lambda: torch.func.grad(lambda x: graph(x).sum())(x),
        lambda: torch.vmap(graph)(torch.stack((x, x))),
        lambda: dual(graph, x, x),
        lambda: tangent(gradient, upstream, upstream),
        lambda: torch.vmap(gradient)(torch.stack((upstream, upstream))),
        lambda: dual(gradient, upstream, upstream),
    ):
        with pytest.raises(UnsupportedError, match=rf"use_backend\('eager', '{op}'\)"):
            transform()


def test_a_compiled_function_is_compiled_again_for_forward_mode_ad():
    function, x = FUNCTIONS["gather_rows"]
    direction = torch.linspace(-1, 1, x.numel()).view_as(x)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    compiled(x.clone())
    assert torch.equal(dual(compiled, x, direction), dual(function, x, direction))
    torch._dynamo.reset()


@every_function
def test_torch_func_grad_is_backward(name):
    """Transforms run plain PyTorch, which may round otherwise than a kernel."""
    function, x = number(name)
    leaf = x.clone().requires_grad_()
    function(leaf).backward()
    check_same(torch.func.grad(function)(x), leaf.grad)
    check_same(torch.func.vjp(function, x)[1](torch.ones(()))[0], leaf.grad)
    # The function has two numbers; its backward runs under vmap.
    both = torch.func.jacrev(lambda x: torch.stack((function(x), 2 * function(x))))(x)
    check_same(both, torch.stack((leaf.grad, 2 * leaf.grad)))


@pytest.mark.parametrize("name", ["attention, all", "linear_cross_entropy, kept"])
def test_a_compiled_gradient(name):
    function, x = number(name)
    compiled = torch.compile(torch.func.grad(function), backend="eager", fullgraph=True)
    check_same(compiled(x), torch.func.grad(function)(x))
    torch._dynamo.reset()


def check_same(out: Tensor, expected: Tensor) -> None:
    """A traced function may run slower kernels, which sum in another order."""
    torch.testing.assert_close(out, expected)


@every_function
def test_gradients_of_samples(name):
    """vmap of a gradient works, as for differential privacy, and a Hessian-vector product."""
    function, x = number(name)
    samples = torch.stack((x, x.flip(0)))
    out = torch.vmap(torch.func.grad(function), randomness="same")(samples)
    with fastplm.use_backend("eager"):
        expected = torch.vmap(torch.func.grad(function), randomness="same")(samples)
        product = torch.func.jvp(torch.func.grad(function), (x,), (x,))[1]
    check_same(out, expected)
    check_same(torch.vmap(function, randomness="same")(samples)[0], function(x))
    check_same(torch.func.jvp(torch.func.grad(function), (x,), (x,))[1], product)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_of_every_op(name):
    """vmap works along any dimension, and nested."""
    sample = SAMPLES[name]
    inputs = sample.make(ROWS, torch.float32)
    key = sample.wrt[0] if sample.wrt else next(iter(inputs))

    def function(x: Tensor) -> list[Tensor]:
        return tree_leaves(sample.function(**inputs | {key: x}))

    samples = inputs[key], inputs[key].flip(0)
    batch = torch.stack(samples, 1)
    one, other, batched = function(samples[0]), function(samples[1]), torch.vmap(function, 1)(batch)
    for ours, *expected in zip(batched, one, other, strict=True):
        check_same(ours, torch.stack(expected))
    nested = torch.vmap(torch.vmap(function, 1))(torch.stack((batch, batch.flip(1))))
    for ours, expected in zip(nested, batched, strict=True):
        check_same(ours, torch.stack((expected, expected.flip(0))))


# --- use_backend and threads ----------------------------------------------------------------------


def test_overlapping_blocks_of_threads_leave_nothing_behind():
    entered, left = threading.Barrier(2), threading.Barrier(2)
    seen = {}

    def run(backend, first):
        with fastplm.use_backend(backend):
            entered.wait()
            seen[backend] = _backends.requested("attention")
            if not first:
                left.wait()
        if first:
            left.wait()
        seen[backend, "after"] = _backends.requested("attention")

    threads = [
        threading.Thread(target=run, args=arguments) for arguments in (("eager", 1), ("torch", 0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen.pop("eager") == "eager" and seen.pop("torch") == "torch"
    assert set(seen.values()) == {"auto"} and _backends.requested("attention") == "auto"


def test_blocks_may_be_left_in_any_order():
    """Coroutines of one thread may leave their blocks in any order."""
    first, second = fastplm.use_backend("eager"), fastplm.use_backend("torch", "attention")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _backends.requested("attention") == "torch"
    second.__exit__(None, None, None)
    assert _backends.requested("attention") == "auto"


def test_threads_without_a_choice_follow_the_main_thread():
    """PyTorch runs a backward on a GPU, and recomputes a checkpoint, in such threads."""
    seen = []
    with fastplm.use_backend("eager"):
        thread = threading.Thread(target=lambda: seen.append(_backends.requested("gelu")))
        thread.start()
        thread.join()
    assert seen == ["eager"]


def test_a_coroutine_has_a_choice_of_its_own():
    async def one(backend, seen):
        for _ in range(3):
            with fastplm.use_backend(backend) if backend else contextlib.nullcontext():
                await asyncio.sleep(0)
                seen.append(_backends.requested("attention"))
                await asyncio.to_thread(lambda: seen.append(_backends.requested("attention")))

    async def all_of_them():
        await asyncio.gather(*(one(backend, seen) for backend, seen in found.items()))

    def run():
        asyncio.run(all_of_them())

    for in_a_thread in (False, True):
        found = {"eager": [], "torch": [], None: []}
        if in_a_thread:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        else:
            run()
        assert found == {"eager": ["eager"] * 6, "torch": ["torch"] * 6, None: ["auto"] * 6}


def test_a_coroutine_records_its_own_calls():
    """Blocks of others may begin and end in between, in any order."""
    tensor = torch.randn(3, 8)

    async def one(count, found):
        await asyncio.sleep(0.01 * (4 - count))
        with _backends.record_decisions() as decisions, _backends.record_notes() as notes:
            for index in range(count):
                ops.gelu(tensor)
                _backends.note(lambda index=index: f"{count}: {index}")
                await asyncio.sleep(0.01)
        found[count] = (len(decisions), notes)
        ops.gelu(tensor)
        assert not _backends.is_recorded() and not _backends.takes_notes()

    async def all_of_them():
        found = {}
        with _backends.record_decisions() as outer:
            ops.gelu(tensor)
        await asyncio.gather(*(one(count, found) for count in (1, 2, 3)))
        assert len(outer) == 1
        return found

    expected = {
        count: (count, [f"{count}: {index}" for index in range(count)]) for count in (1, 2, 3)
    }
    assert asyncio.run(all_of_them()) == expected
    assert not _backends.is_recorded() and not _backends.takes_notes()


#: fastplm is imported in a thread. A thread that Python did not start is like those of autograd.
IN_A_THREAD = """
import _thread, threading

def in_a_thread(function, start):
    done = threading.Event()
    start(lambda: (function(), done.set()))
    done.wait()

def of_python(function):
    threading.Thread(target=function).start()

def of_autograd(function):
    _thread.start_new_thread(function, ())

def see():
    seen.append(_backends.requested("attention"))

def in_a_block():
    with fastplm.use_backend("torch"):
        see()
        in_a_thread(see, of_autograd)

def load():
    global fastplm, _backends
    import fastplm.ops
    from fastplm import _backends

seen = []
in_a_thread(load, of_python)
with fastplm.use_backend("eager"):
    see()
    in_a_thread(see, of_python)
    in_a_thread(see, of_autograd)
    in_a_thread(in_a_block, of_python)
see()
in_a_thread(see, of_autograd)
print(*seen)
"""


def test_threads_of_autograd_follow_wherever_fastplm_was_imported():
    out = subprocess.run([sys.executable, "-c", IN_A_THREAD], capture_output=True, text=True)
    assert out.stdout.split() == [*["eager"] * 3, *["torch"] * 2, *["auto"] * 2], out.stderr


def test_a_compiled_function_follows_the_choice_of_its_thread():
    function, x = FUNCTIONS["gather_rows"]
    graphs = []

    def record(graph, _):
        graphs.append("fastplm" in graph.code)
        return graph.forward

    compiled = torch.compile(function, backend=record, fullgraph=True)

    def in_a_thread():
        with fastplm.use_backend("eager"):
            compiled(x)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    compiled(x)
    with fastplm.use_backend("eager"):
        compiled(x)
    compiled(x)
    assert graphs[:2] == [False, True]

    @torch.compile(backend=record, fullgraph=True)
    def inside(x):
        with fastplm.use_backend("eager"):
            return function(x)

    graphs.clear()
    inside(x)
    assert graphs == [False] and _backends.requested("gather_rows") == "auto"
    torch._dynamo.reset()


@every_function
def test_batched_upstream_gradients(name):
    """``torch.autograd.functional.jacobian(vectorize=True)`` passes such gradients."""
    function, x = FUNCTIONS[name]
    x = x.detach().requires_grad_()
    out = function(x)
    upstream = torch.randn(2, *out.shape)
    got = torch.autograd.grad(out, x, upstream, retain_graph=True, is_grads_batched=True)[0]
    each = [torch.autograd.grad(out, x, one, retain_graph=True)[0] for one in upstream]
    torch.testing.assert_close(got, torch.stack(each))


@every_function
def test_create_graph_through_a_checkpoint(name):
    """The saved tensors of a checkpoint may be read only once."""
    function, x = FUNCTIONS[name]
    x = x.detach().requires_grad_()
    expected = torch.autograd.grad(function(x).sum(), x)[0]
    out = checkpoint(function, x, use_reentrant=False)
    got = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    torch.testing.assert_close(got.detach(), expected)


@pytest.mark.parametrize("transform", ("traced", "batched"))
def test_the_reference_checks_lengths_inside_a_transform(transform):
    rows, ends = torch.randn(5, 3, 16), torch.tensor([0, 3, 2], dtype=torch.int32)

    def attend(x):
        return ops.attention_varlen(x, x, x, ends, ends, 5, 5)

    with fastplm.use_backend("eager"), pytest.raises(ArgumentValueError, match="cu_seq"):
        if transform == "traced":
            torch.jit.trace(attend, rows, check_trace=False)
        else:
            torch.func.vmap(attend)(torch.stack((rows, rows)))
