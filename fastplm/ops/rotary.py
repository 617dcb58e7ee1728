"""``ops.rotary``: its arguments, and its backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fastplm._checks import same_sizes
from fastplm._declare import Arg, Size
from fastplm._modes import needs_dispatch
from fastplm._registry import Op, define
from fastplm.errors import fail
from fastplm.ops._attention_call import empty_like_projection
from fastplm.ops._common import csrc_rejects, kernels, triton_rejects
from fastplm.reference.rotary import rotary_ref


class Call(NamedTuple):
    query: Annotated[Tensor, Arg("[B, H, T, D > 0]")]
    key: Annotated[Tensor, Arg("[B, G, T, D]", "query")]
    cos: Annotated[Tensor, Arg("[C, T, D]")]
    sin: Annotated[Tensor, Arg("[C, T, D]", "cos")]

    @property
    def key_heads(self) -> int:
        return self.key.shape[1]

    def check(self, where: str) -> None:
        if self.query.shape[-1] % 2:
            got, fix = f"{self.query.shape[-1]} elements a head", "Check the layout of the heads."
            fail(where, "query", got, "an even number", fix)
        batch, rows = self.query.shape[0], self.cos.shape[0]
        # A size that a program chooses is that of the batch, as a size of 1 is known before.
        for_all = (
            rows == 1 if not torch.compiler.is_compiling() else statically_known_true(rows == 1)
        )
        if not for_all and not same_sizes((rows,), (batch,)):
            expected = f"1 or {batch}, the batch of `query`, as its first size"
            fix = "Pass what the model's rotary embedding makes of [1, T] or [B, T] positions."
            fail(where, "cos", f"shape {tuple(self.cos.shape)}", expected, fix)
        for name, angles in (("cos", self.cos), ("sin", self.sin)):
            if angles.requires_grad and torch.is_grad_enabled():
                got, fix = "a tensor that requires a gradient", f"Pass {name}.detach()."
                fail(where, name, got, "one that requires none, as it gets none", fix)


class Saved(NamedTuple):
    cos: Tensor
    sin: Tensor
    key_heads: Size
    grad_out_key: Tensor | None


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions: query and key with each pair of elements rotated by its angle, in one pass.

    ``(a, b) -> (a cos - b sin, b cos + a sin)``, a and b the elements i and i + D/2 of a head: the
    form of Transformers with ``rotate_half``, of ModernBERT, ESM-2, NomicBERT, EuroBERT and Llama.

    Args:
        query: [B, H, T, D], fp64, fp32, fp16 or bf16; D is even, any strides whose last is 1 (a
            view of packed projections or of [B, T, H, D] is not copied).
        key: [B, G, T, D], dtype and device of ``query``; its number of heads may be another.
        cos, sin: [C, T, D], C = B or 1, of any of these dtypes, as a rotary embedding of
            Transformers makes them. Their second half repeats the first and is not read. They have
            no gradient.

    Returns:
        (query, key), rotated, in their dtype; their memory is [B, T, H, D], as that of a
        projection, which ``attention`` reads without a copy.

    Numerics:
        In fp32 (fp64 in fp64), rounded once.

    Determinism:
        Forward and backward repeat bit for bit. The backward is the rotation back.

    Raises:
        ArgumentValueError, ArgumentTypeError: arguments that do not fit, or cos or sin that require
            a gradient.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> query = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
        >>> turn = torch.full((1, 1, 2), torch.pi / 2)
        >>> ops.rotary(query, query, turn.cos(), turn.sin())[0].round()
        tensor([[[[-0., 1.]]]])

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding" (arXiv
        2104.09864), equation 34.
    Reference: ``fastplm.reference.rotary.rotary_ref``.
    """
    return OP(Call(query, key, cos, sin))


def rotate_(heads: Tensor, cos: Tensor, sin: Tensor, backend: str, inverse: bool = False) -> None:
    """Rotate heads [B, H, T, D] where they lie, or back: for an autograd function that holds them
    alone. Those of query and key that lie side by side in one product are the heads of one tensor.

    Args:
        backend: "cpp" or "triton", which can run it.
    """
    if needs_dispatch((heads, cos, sin)):
        _IN_PLACE(heads, cos, sin, inverse, backend)
    else:
        _rotate_in_place(heads, cos, sin, inverse, backend)


def _rotate_in_place(heads: Tensor, cos: Tensor, sin: Tensor, inverse: bool, backend: str) -> None:
    none = heads[:, :0]
    _rotate(backend, Call(heads, none, cos, sin), inverse, (heads, none))


_IN_PLACE = define(
    "rotary_",
    "(Tensor(a!) heads, Tensor cos, Tensor sin, bool inverse, str backend) -> ()",
    _rotate_in_place,
    lambda heads, cos, sin, inverse, backend: None,
)


# --- backends -------------------------------------------------------------------------------------


def _rotate(backend: str, call: Call, inverse: bool, outs: tuple[Tensor, Tensor]) -> None:
    if outs[0].numel() + outs[1].numel() == 0:
        return
    if backend == "cpp":
        torch.ops.fastplm_C.rotary(*call, inverse, *outs)
    else:
        kernels("rotary").rotary(*call, inverse, *outs)


_CSRC_REJECTS = csrc_rejects("rotary", fp64=False)


def _of_angles(
    rejects: Callable[..., str | None],
) -> Callable[..., str | None]:
    def reason(call: Call, *, forced: bool) -> str | None:
        if call.cos.dtype is torch.float64:
            return "float64: the kernels take fp32, fp16 and bf16"
        return rejects(call, forced=forced)

    return reason


def _forward(call: Call, backend: str) -> tuple[Tensor, Tensor]:
    outs = empty_like_projection(call.query), empty_like_projection(call.key)
    _rotate(backend, OP.arguments.laid_out(call), False, outs)
    return outs


def _backward(grad: Tensor, saved: Saved, backend: str) -> tuple[Tensor, Tensor]:
    outs = _fake_backward(grad, saved)
    _rotate(backend, OP.arguments.laid_out(_as_call(grad, saved)), True, outs)
    return outs


# --- registration ---------------------------------------------------------------------------------


def _as_call(grad: Tensor, saved: Saved) -> Call:
    """The call whose rotation back are the gradients."""
    cos, sin, heads, grad_key = saved
    batch, _, *rest = grad.shape
    grad_key = grad.new_zeros(batch, heads, *rest) if grad_key is None else grad_key
    return Call(grad, grad_key, cos, sin)


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    batch, _, length, dim = grad.shape
    of_key = grad.new_empty(batch, length, saved.key_heads, dim).transpose(1, 2)
    return empty_like_projection(grad), of_key


def _second(grad: Tensor, saved: Saved, backend: str) -> tuple[Tensor, Tensor]:
    call = _as_call(grad, saved)
    return rotary_ref(*call._replace(sin=-call.sin))


def _smoke(device: torch.device) -> None:
    query = torch.randn(1, 2, 5, 16, device=device, requires_grad=True)
    angles = torch.randn(1, 5, 8, device=device).repeat(1, 1, 2)
    rotary(query, query, angles.cos(), angles.sin())[0].sum().backward()


OP = Op(
    "rotary",
    Call,
    results=("out", "out_key"),
    fake=lambda call, backend: (
        empty_like_projection(call.query),
        empty_like_projection(call.key),
    ),
    reference=rotary_ref,
    smoke=_smoke,
    saved=Saved,
    gradients=("query", "key"),
    fake_backward=_fake_backward,
    second=_second,
)
for _name, _rejects in (("cpp", _CSRC_REJECTS), ("triton", triton_rejects)):
    OP.backend(
        _name,
        forward=partial(_forward, backend=_name),
        backward=partial(_backward, backend=_name),
        rejects=_of_angles(_rejects),
    )
