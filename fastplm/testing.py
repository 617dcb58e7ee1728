"""Error budget, poisoned memory and layout variants: tools of the tests and benchmarks.

No tolerance is written by hand. The reference runs once in fp64 (``gold``) and several times in the
dtype of the kernel (``base``): as it is; with the summands of every reduction in reverse and in
random order; and with each input changed by one unit in its last place. The largest error of these
runs is PyTorch's error. The runs are made one after another until the kernel is within the budget:
its error may be at most ``factor`` times PyTorch's error on the same inputs.

    max|out - gold| <= factor * max|base - gold| + floor        factor 2 forward, 3 gradients
    rms(out - gold) <= 1.5    * rms(base - gold) + floor

``floor`` is one rounding of the largest (rms: of the root-mean-square) gold value to the dtype of
the output: no kernel can be more exact than the dtype of its output. For a gradient, one fp32
rounding of the largest gradient of the call is added: some gradients are small because terms
cancel, and the sums that cancel are computed in fp32. Where a gradient is 0 by cancellation (that
of a query which attends to one key), PyTorch may get exactly 0 by luck; its error then counts as
one rounding of the largest gradient.
"""

from __future__ import annotations

import contextlib
import copy
import getpass
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastplm._budget import (
    FORWARD_FACTOR,
    GRADIENT_FACTOR,
    BudgetExceeded,
    check_error,
    check_non_finite,
    max_norm,
)

FP64_FACTOR = 16.0
# A gradient that is 0 by cancellation has at most this share of the largest one in fp64.
_NOTHING = 2.0**-46


#: Environment variables that limit oneDNN (its "CPU Dispatcher Control") and MKL to a level. These
#: libraries do not read ``ATEN_CPU_CAPABILITY``.
_OF_LIBRARIES = {
    "default": {"ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}


def hold_to_level() -> None:
    """Limit this whole process to the level of ``ATEN_CPU_CAPABILITY``, if that is set.

    The kernels of PyTorch, of Inductor and of csrc/ follow that variable. oneDNN and MKL have
    variables of their own and read them at their first use, so call this function before.
    Variables that are already set stay as they are.

    Inductor gets a separate cache for the level. Inductor (torch 2.13) does not compare levels when
    it reads a kernel from its cache, and a kernel of another level writes past its arrays.
    """
    level = os.environ.get("ATEN_CPU_CAPABILITY")
    if level:
        folder = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}_{level}"
        settings = {"TORCHINDUCTOR_CACHE_DIR": folder, **_OF_LIBRARIES.get(level, {})}
        os.environ.update({name: to for name, to in settings.items() if name not in os.environ})


# --- the budget -----------------------------------------------------------------------------------


def assert_within_budget(
    candidate: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: Mapping[str, Any],
    *,
    wrt: Sequence[str] = (),
    peers: Sequence[Callable[..., torch.Tensor]] = (),
) -> None:
    """Check the error of ``candidate`` against that of ``reference``, for output and gradients.

    Args:
        candidate: the function under test. It is called as ``candidate(**inputs)``, with exactly
            these views as inputs, and new memory is poisoned.
        reference: the eager reference, called with the same keywords.
        inputs: tensors and plain values by name. Floating tensors have the kernel's dtype.
        wrt: names of the tensors whose gradients are compared, under one random upstream gradient.
        peers: other PyTorch functions that compute the same, called like the reference. Their
            errors count as PyTorch's error, too.

    Raises:
        BudgetExceeded: an error is over its budget; the message names the output or gradient.
    """
    with poisoned_memory():
        out, grads = _run(candidate, inputs, wrt)
    gold, gold_grads = _run(reference, _to_double(inputs), wrt, upstream_dtype=out.dtype)
    siblings = tuple(gold_grads.values())
    largest = max(map(max_norm, siblings), default=0.0)

    def check(runs: Sequence[tuple[torch.Tensor, dict[str, torch.Tensor]]]) -> None:
        check_error("output", out, gold, [output for output, _ in runs], FORWARD_FACTOR)
        for name, grad in grads.items():
            bases = [of_run[name] for _, of_run in runs]
            truth = gold_grads[name]
            if max_norm(truth) <= largest * _NOTHING:
                bases = [base + largest * torch.finfo(base.dtype).eps for base in bases]
            check_error(f"gradient of {name}", grad, truth, bases, GRADIENT_FACTOR, siblings)

    runs = []
    error = None
    for draw in _draws(reference, inputs, wrt, peers):
        runs.append(draw)
        try:
            return check(runs)
        except BudgetExceeded as exceeded:
            error = exceeded
    assert error is not None
    raise error


def _draws(
    reference: Callable[..., torch.Tensor],
    inputs: Mapping[str, Any],
    wrt: Sequence[str],
    peers: Sequence[Callable[..., torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Results of PyTorch for the inputs, each with other rounding errors."""
    for function in (reference, *peers):
        yield _run(function, inputs, wrt)
    for mode in (ReversedReductions(), ShuffledReductions(0), ShuffledReductions(1)):
        with mode:
            draw = _run(reference, inputs, wrt)
        yield draw
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        nearby = {
            name: _rerounded(value, generator) if _is_floating(value) else value
            for name, value in inputs.items()
        }
        for function in (reference, *peers):
            yield _run(function, nearby, wrt)


def check_in_fp64(
    out: Mapping[str, torch.Tensor],
    gold: Mapping[str, torch.Tensor],
    single: Mapping[str, torch.Tensor],
    condition: float = 0.0,
) -> None:
    """Check results in fp64 against PyTorch's error in fp32, scaled by the ratio of their eps.

    A bug causes an error of at least one fp32 rounding, which is half a billion roundings of fp64.
    So a large factor still finds every bug. All tensors of a call share the largest error among
    them, so no check depends on one lucky rounding.

    Args:
        out: results under test by name, in fp64.
        gold: PyTorch's results in fp64.
        single: PyTorch's results in fp32.
        condition: the absolute error of a result per relative error of the inputs.

    Raises:
        BudgetExceeded: name, shape, dtype, non-finite pattern or error do not fit.
    """
    if out.keys() != gold.keys():
        raise BudgetExceeded(f"{sorted(out)} instead of {sorted(gold)}")
    base_error = largest = 0.0
    for name, truth in gold.items():
        value = out[name]
        if value.shape != truth.shape or value.dtype is not torch.float64:
            raise BudgetExceeded(
                f"{name}: {value.dtype}{list(value.shape)} instead of fp64{list(truth.shape)}"
            )
        check_non_finite(name, value, truth)
        finite = truth.isfinite()
        base_error = max(base_error, max_norm((single[name].double() - truth)[finite]))
        largest = max(largest, max_norm(truth[finite]))
    rounding = torch.finfo(torch.float64).eps
    base_error *= rounding / torch.finfo(torch.float32).eps
    floor = rounding * (largest + condition)
    for name, truth in gold.items():
        finite = truth.isfinite()
        error = max_norm((out[name] - truth)[finite])
        if not error <= FP64_FACTOR * (base_error + floor):
            raise BudgetExceeded(
                f"{name}: error {error:.3e} in fp64 exceeds {FP64_FACTOR} times {base_error:.3e} "
                f"(PyTorch's own in fp32, scaled) + {floor:.3e} (rounding)"
            )


def _to_double(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if _is_floating(value) else value for name, value in inputs.items()
    }


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _run(
    function: Callable[..., torch.Tensor],
    inputs: Mapping[str, Any],
    wrt: Sequence[str],
    upstream_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    inputs = dict(inputs)
    for name in wrt:
        inputs[name] = inputs[name].detach().requires_grad_()
    out = function(**inputs)
    if not wrt:
        return out.detach(), {}
    generator = torch.Generator().manual_seed(0)
    upstream = torch.randn(out.shape, generator=generator, device="cpu").to(out.device)
    # Gold gets the upstream gradient rounded as for the kernel, so this is not counted as an error.
    upstream = upstream.to(upstream_dtype or out.dtype).to(out.dtype)
    grads = torch.autograd.grad(out, [inputs[name] for name in wrt], upstream)
    return out.detach(), dict(zip(wrt, grads, strict=True))


class ReversedReductions(TorchDispatchMode):
    """Inside, every matrix product, sum and softmax runs with its summands in reverse order.

    The exact result is the same, but the rounding differs. This shows how much the error of a
    reference depends on the order.
    """

    def _order(self, size: int) -> torch.Tensor:
        return torch.arange(size - 1, -1, -1, device="cpu")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten

        def reordered(tensor: torch.Tensor, dim: int, order: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(dim, order.to(tensor.device))

        if func in (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default):
            *bias, a, b = args
            order = self._order(a.shape[-1])
            return func(*bias, reordered(a, -1, order), reordered(b, -2, order), **kwargs)
        if func in (aten._softmax.default, aten._log_softmax.default):
            tensor, dim, *rest = args
            order = self._order(tensor.shape[dim])
            result = func(reordered(tensor, dim, order), dim, *rest, **kwargs)
            return reordered(result, dim, order.argsort())
        if func is aten.nll_loss_forward.default and args[3]:
            logits, target, *rest = args
            order = self._order(len(logits))
            return func(reordered(logits, 0, order), reordered(target, 0, order), *rest, **kwargs)
        dims: list[int] | None = None
        if func in (aten.sum.dim_IntList, aten.mean.dim, aten.logsumexp.default):
            dims = [args[1]] if isinstance(args[1], int) else args[1]
        elif func not in (aten.sum.default, aten.mean.default):
            return func(*args, **kwargs)
        tensor = args[0]
        for dim in dims or range(tensor.dim()):
            tensor = reordered(tensor, dim, self._order(tensor.shape[dim]))
        return func(tensor, *args[1:], **kwargs)


class ShuffledReductions(ReversedReductions):
    """Like ``ReversedReductions``, with the summands in random order."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def _order(self, size: int) -> torch.Tensor:
        return torch.randperm(size, generator=self.generator, device="cpu")


def as_tf32(tensor: torch.Tensor) -> torch.Tensor:
    """fp32 numbers as tensor cores read them in TF32 products: without the low 13 bits."""
    return (tensor.view(torch.int32) & -(2**13)).view(torch.float32)


class _ProductInTF32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return as_tf32(a) @ as_tf32(b)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        grad = as_tf32(grad)
        return grad @ as_tf32(b).mT, as_tf32(a).mT @ grad


class ProductsInTF32(TorchFunctionMode):
    """Inside, every fp32 product ``a @ b`` and its gradient are computed in TF32."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.matmul, torch.Tensor.matmul) and args[0].dtype is torch.float32:
            return _ProductInTF32.apply(*args)
        return func(*args, **(kwargs or {}))


class KeptDouble(TorchFunctionMode):
    """Inside, ``Tensor.float()`` converts to fp64, so gold results are never rounded to fp32.

    Otherwise a loss would round them by ``logits.float()``, or by ``labels.float()``: with fp32
    labels PyTorch computes in fp32. A softmax that is asked for in fp32 is in fp64, too.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif func is torch.Tensor.to and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.promote_types(args[0].dtype, torch.float32)
        elif func is torch.nn.functional.softmax and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.promote_types(args[0].dtype, torch.float32)
        return func(*args, **kwargs)


def rerounded(model: torch.nn.Module, count: int = 4) -> Iterator[torch.nn.Module]:
    """Yield one copy ``count`` times; each weight is changed by -1, 0 or +1 unit in its last place.

    Any algorithm may have errors of that size. A result of few numbers may be exact by luck in one
    copy; the largest error over several copies is not.
    """
    other = copy.deepcopy(model)
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight, exact in zip(other.parameters(), model.parameters(), strict=True):
                weight.copy_(_rerounded(exact, generator))
        yield other


def _rerounded(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    step = torch.randint(-1, 2, tensor.shape, generator=generator, device="cpu").to(tensor.device)
    return (tensor * (1 + torch.finfo(tensor.dtype).eps * step)).to(tensor.dtype)


# --- hostile inputs -------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, all newly allocated memory is filled with NaN (integers: with the largest value)."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module with properties, which mypy cannot see
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        settings.fill_uninitialized_memory = fill


def _guarded(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """A flat buffer full of NaN (or of the largest integer)."""
    poison = (
        float("nan")
        if tensor.is_floating_point()
        else (True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)
    )
    return torch.full((size,), poison, dtype=tensor.dtype, device=tensor.device)


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous()


def offset(tensor: torch.Tensor) -> torch.Tensor:
    """The same values at offset 1 of a larger buffer: the pointer is unaligned, NaN is around."""
    buffer = _guarded(tensor, tensor.numel() + 2)
    view = buffer[1:-1].view(tensor.shape)
    view.copy_(tensor)
    return view


def gapped(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in rows with gaps of NaN between them."""
    if tensor.dim() < 2:
        return offset(tensor)
    *outer, rows, width = tensor.shape
    buffer = _guarded(tensor, tensor.numel() // max(width, 1) * (width + 5))
    view = buffer.view(*outer, rows, width + 5)[..., :width]
    view.copy_(tensor)
    return view


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values [B, H, T, D], stored in memory as [B, T, H, D]."""
    if tensor.dim() < 3:
        return gapped(tensor)
    return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """Entry 0 of dimension 0, repeated with stride 0. (So the values change.)"""
    return tensor[:1].expand_as(tensor)


#: Layout variants by name; each takes a tensor and returns a view that a kernel must accept.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    function.__name__: function for function in (contiguous, offset, gapped, transposed, expanded)
}


# --- repeatability --------------------------------------------------------------------------------


def assert_repeatable(
    function: Callable[..., torch.Tensor],
    inputs: Mapping[str, Any],
    *,
    wrt: Sequence[str] = (),
    runs: int = 3,
    threads: Sequence[int] = (),
) -> None:
    """Check that outputs and gradients of several runs, also with other numbers of threads, are
    equal bit for bit."""
    first, first_grads = _run(function, inputs, wrt)
    before = torch.get_num_threads()
    try:
        for count in (*[before] * (runs - 1), *threads):
            torch.set_num_threads(count)
            out, grads = _run(function, inputs, wrt)
            if not _same_bits(out, first):
                raise AssertionError("the output differs between two runs on the same inputs")
            for name, grad in grads.items():
                if not _same_bits(grad, first_grads[name]):
                    raise AssertionError(f"the gradient of {name} differs between two runs")
    finally:
        torch.set_num_threads(before)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


# --- statistics -----------------------------------------------------------------------------------


def p_value(statistic: torch.Tensor, degrees: int) -> float:
    """The probability, by chance, of a chi-square statistic that is at least this large."""
    half = torch.tensor(degrees / 2, dtype=torch.float64, device="cpu")
    return torch.special.gammaincc(half, statistic.double().cpu() / 2).item()


def chi_square(observed: Any, probability: Any) -> float:
    """The p-value of Pearson's chi-square test of counts [n] against probabilities [n]."""
    observed = torch.as_tensor(observed, dtype=torch.float64, device="cpu")
    expected = observed.sum() * torch.as_tensor(probability, dtype=torch.float64, device="cpu")
    return p_value(((observed - expected) ** 2 / expected).sum(), len(observed) - 1)
