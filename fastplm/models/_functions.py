"""The autograd functions of a layer (see ``_layer``): a product, with what follows it in one pass.

Gradients of weights leave the products in the dtype of the weights. Where a product reads a copy of
a weight, or its transpose, the function gets both: what it reads, and the parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastplm import ops
from fastplm._autograd import applied, once_differentiable
from fastplm._backends import requested
from fastplm.ops._common import seed_tensor
from fastplm.ops.bias_gelu import OP as BIAS_GELU
from fastplm.ops.bias_gelu import Call as BiasGelu
from fastplm.ops.bias_gelu import Saved as SavedGelu
from fastplm.ops.dropout_add_layer_norm import OP as NORM
from fastplm.ops.dropout_add_layer_norm import Call as Norm
from fastplm.ops.dropout_add_layer_norm import Saved as SavedNorm
from fastplm.ops.geglu import OP as GEGLU
from fastplm.ops.geglu import Call as Geglu
from fastplm.ops.linear import product
from fastplm.ops.rotary import rotate_
from fastplm.reference.dropout import dropout_scale, dropout_threshold

RELU, SILU = "relu", "silu"
#: How ``ops.geglu`` calls activations.
_GATES = {"none": "gelu", "tanh": "gelu_tanh", SILU: "silu"}
is_none = partial(operator.is_, None)
_dtype_of = operator.attrgetter("dtype")


class Drawn(NamedTuple):
    """What dropout of hidden states depends on."""

    p: float
    seed: Tensor | None
    numbers: Any  # sample and position of the rows; (None, None): elements are counted


NO_DROPOUT = Drawn(0.0, None, (None, None))


class Turn(NamedTuple):
    """Rotary positions: in each product, the first heads are turned by angles [1 or B, T, D]."""

    cos: Tensor
    sin: Tensor
    heads: tuple[int, ...]
    shape: tuple[int, ...]  # [B, T] of the rows
    backend: str

    def turn_(self, at: int, product: Tensor, inverse: bool = False) -> None:
        """Turn the heads of a product [N, M] where they lie, or turn them back."""
        count, size = self.heads[at], self.cos.shape[-1]
        if count:
            heads = product[:, : count * size].unflatten(1, (count, size)).unflatten(0, self.shape)
            rotate_(heads.transpose(1, 2), self.cos, self.sin, self.backend, inverse)


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, K], [K, N], [N] -> [M, N], ``a b + bias``."""
    if a.device.type == "cpu":
        return product(a, b, bias, forced=requested("linear") == "cpp")
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _add_product(sum: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``sum + a b``, written over ``sum``, which nobody else holds."""
    if sum is None:
        return _multiply(a, b)
    # What must have no gradient is a view: see ``once_differentiable``.
    return sum + torch.mm(a, b) if sum.requires_grad else sum.addmm_(a, b)


def _of_weight(grad: Tensor, input: Tensor, dtype: torch.dtype, turned: bool) -> Tensor:
    """The gradient of a weight [M, K], or [K, M] if it is turned, of gradients [N, M] and inputs
    [N, K]."""
    if turned:
        grad, input = input, grad
    if dtype is not torch.float32 or dtype is grad.dtype or grad.device.type == "cpu":
        return _multiply(grad.t(), input).to(dtype)
    return torch.mm(grad.t(), input, out_dtype=dtype)  # cuBLAS rounds its sums to fp32 alone


# --- query, key and value -------------------------------------------------------------------------


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        sizes: list[int],
        turned: bool,
        turn: Turn | None,
        count: int,
        *given: Any,
    ) -> Any:
        """x [N, E]; the sizes of the outputs; ``count`` pairs of weight [M, E] and bias [M], of
        that many products; the weights and biases of which they are copies or parts."""
        read, parameters = given[: 2 * count], given[2 * count :]
        weight, bias = parameters[:2]
        ctx.save_for_backward(x, *read[::2])
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.sizes, ctx.turned, ctx.pairs = sizes, turned, len(parameters) // 2
        ctx.turn = turn
        ctx.set_materialize_grads(False)
        products = zip(read[::2], read[1::2], strict=True)
        outs = [_multiply(x, weight.t(), bias) for weight, bias in products]
        if turn is not None:
            for at, one in enumerate(outs):
                turn.turn_(at, one)
        if count < len(sizes):
            outs = [*outs[0].split_with_sizes(sizes, 1)]
        return *outs, x.view_as(x)

    @staticmethod
    @once_differentiable(NORM.name)
    def backward(ctx: Any, saved: Any, *grads: Any) -> Any:
        (x, *weights), needs, of_x = saved, ctx.needs_input_grad, grads[-1]
        count, sizes, pairs = len(weights), ctx.sizes, ctx.pairs
        found, first = [None] * 2 * pairs, 5 + 2 * count
        each, per_product = (
            len(sizes) // count,
            pairs // count,
        )  # outputs and parameters of one product
        for at, weight in enumerate(weights):
            part = slice(at * each, (at + 1) * each)
            if all(map(is_none, grads[part])):
                continue
            grad = _side_by_side(grads[part], sizes[part], x)
            if ctx.turn is not None:  # nobody else holds the gradient, unless it has one itself
                grad = grad.clone() if grad.requires_grad else grad
                ctx.turn.turn_(at, grad, inverse=True)
            begin, end = 2 * at * per_product, 2 * (at + 1) * per_product
            places = slice(begin, end, 2), slice(begin + 1, end, 2)
            rows = sizes[part] if per_product > 1 else [grad.shape[1]]
            if any(needs[first:][places[0]]):
                of_weight = _of_weight(grad, x, ctx.dtypes[0], ctx.turned)
                found[places[0]] = of_weight.split_with_sizes(rows, int(ctx.turned))
            if any(needs[first:][places[1]]):
                sums = grad.sum(0, dtype=torch.float32).to(ctx.dtypes[1])
                found[places[1]] = sums.split_with_sizes(rows)
            if needs[0]:
                of_x = _add_product(of_x, grad, weight)
        return of_x, None, None, None, None, *[None] * 2 * count, *found


def _side_by_side(grads: Sequence[Any], sizes: list[int], x: Tensor) -> Tensor:
    """[N, M] of gradients of its columns. Attention on a GPU has written them side by side."""
    if len(grads) == 1:
        return grads[0]
    grads, rows = list(grads), x.shape[0]
    for at, size in enumerate(sizes):
        if grads[at] is None:
            grads[at] = x.new_zeros(rows, size)
    first, width = grads[0], sum(sizes)
    place, storage = first.storage_offset(), first.untyped_storage()._cdata
    for one, size in zip(grads, sizes, strict=True):
        if (
            one.untyped_storage()._cdata != storage
            or one.stride() != (width, 1)
            or one.storage_offset() != place
        ):
            return torch.cat(grads, 1)
        place += size
    return first.as_strided((rows, width), (width, 1))


# --- the ends of blocks ---------------------------------------------------------------------------


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        read: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        drawn: Drawn,
        eps: float,
        is_rms: bool,
        backend: str,
        turned: bool,
    ) -> tuple[Tensor, Tensor]:
        """x [N, K], residual [N, E], and the weight that the product reads; -> (norm [N, E], sum).

        ``is_rms``: the norm is T5's, not a layer norm.
        """
        added = _multiply(x, read.t()), residual, norm_weight, norm_bias, bias
        how = drawn.seed, *drawn.numbers, drawn.p, eps, is_rms
        out, sum = NORM.forward_only(Norm(*added, *how), backend)
        ctx.save_for_backward(x, read, sum, norm_weight, norm_bias, bias)
        ctx.how, ctx.backend, ctx.dtype, ctx.turned = how, backend, weight.dtype, turned
        ctx.set_materialize_grads(False)
        return out, sum

    @staticmethod
    @once_differentiable(NORM.name)
    def backward(ctx: Any, saved: Any, grad: Tensor | None, grad_sum: Tensor | None) -> Any:
        x, read, sum, *norm = saved
        of_input, _, _, of_weight, of_bias, *of_norm, _, _, _, _, _ = ctx.needs_input_grad
        grad = torch.zeros_like(sum) if grad is None else grad.contiguous()
        grad_sum = None if grad_sum is None else grad_sum.contiguous()
        drops = ctx.how[3] > 0.0
        call = SavedNorm(
            *(sum, *norm, grad_sum, *ctx.how),
            *(drops, True, *of_norm, of_bias),
        )
        grads = NORM.backward_only(grad, call, ctx.backend)
        dropped, of_residual, norm_weight, norm_bias, bias = grads
        of_product = dropped if drops else of_residual  # one tensor, where nothing is dropped
        return (
            _multiply(of_product, read) if of_input else None,
            of_residual,
            None,
            _of_weight(of_product, x, ctx.dtype, ctx.turned) if of_weight else None,
            bias if of_bias else None,
            norm_weight if of_norm[0] else None,
            norm_bias if of_norm[1] else None,
            *[None] * 5,
        )


# --- between the products of a feed-forward -------------------------------------------------------


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        activation: str,
        drawn: Drawn,
        backend: str,
        bias: Tensor | None,
        turned: bool,
        gated: bool,
        count: int,
        *given: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """x [N, E]; ``count`` weights [F, E] that products read, and those of which they are
        copies; -> (what the second product reads [N, F], ``x`` as the residual).

        ``gated``: one weight [2 F, E] gives what is activated and, beside it, its factor.
        """
        read, parameters = given[:count], given[count:]
        first, *factor = [_multiply(x, one.t()) for one in read]
        fused = gated and backend == "triton" and activation in _GATES
        if gated and not fused:
            first, *factor = first.chunk(2, 1)
        if fused:
            active = GEGLU.forward_only(Geglu(first, _GATES[activation]), backend)
        elif activation == RELU:
            active = first.relu_()
        elif activation == SILU:
            active = torch.nn.functional.silu(first)
        else:
            active = BIAS_GELU.forward_only(BiasGelu(first, bias, activation), backend)
        out, choice = active * factor[0] if factor else active, None
        if drawn.p > 0.0:
            out, choice = _drop(out, drawn)
        # The output of a ReLU says where its input is positive.
        between = (out,) if activation == RELU and not factor else (first, bias, choice)
        ctx.save_for_backward(x, *read, *between, *factor, *([active] if factor else []))
        ctx.others, ctx.turned = (activation, drawn, backend), turned
        ctx.fused, ctx.joined = fused, gated and not fused
        ctx.dtypes = [*map(_dtype_of, parameters)]
        ctx.set_materialize_grads(False)
        return out, x.view_as(x)

    @staticmethod
    @once_differentiable(NORM.name)
    def backward(ctx: Any, saved: Any, grad: Tensor | None, of_x: Tensor | None) -> Any:
        (x, *saved), needs, of_bias = saved, ctx.needs_input_grad, None
        (activation, drawn, backend), count = ctx.others, len(ctx.dtypes)
        read, between = saved[:count], saved[count:]
        found: list[Any] = [None] * count
        if grad is None:
            return of_x, *[None] * (7 + 2 * count)
        if len(between) == 1:
            # The backward of ReLU and dropout in one call: of an ELU whose lower part is 0, scaled.
            grads = [torch.ops.aten.elu_backward(grad, 0, _scale(drawn, grad), 0, True, *between)]
        else:
            first, bias, choice, *gated = between
            grad = grad if choice is None else _drop_again(grad, choice, drawn)
            grads = [grad * one for one in gated] or [grad]
            if ctx.fused:
                call = Geglu(first, _GATES[activation])
                grads = [GEGLU.backward_only(grad.contiguous(), call, backend)]
            elif activation == RELU:
                grads[0] = torch.ops.aten.threshold_backward(grads[0], first, 0)
            elif activation == SILU:
                grads[0] = torch.ops.aten.silu_backward(grads[0], first)
            else:
                saved_gelu = SavedGelu(first, bias, activation, needs[4])
                grads[0], of_bias = BIAS_GELU.backward_only(grads[0], saved_gelu, backend)
        grads = [torch.cat(grads, 1)] if ctx.joined else grads
        for at, (one, weight) in enumerate(zip(grads, read, strict=True)):
            if needs[8 + count + at]:
                found[at] = _of_weight(one, x, ctx.dtypes[at], ctx.turned)
            if needs[0]:
                of_x = _add_product(of_x, one, weight)
        of_bias = of_bias if needs[4] else None
        return of_x, None, None, None, of_bias, None, None, None, *[None] * count, *found


def _drop(x: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Dropout of ``x``, and what repeats its choice: on a GPU PyTorch's mask, else a seed."""
    if x.is_cuda:
        return torch.native_dropout(x, drawn.p, True)
    seed = seed_tensor("", None, x, optional=True)
    return _drop_again(x, seed, drawn), seed


def _drop_again(x: Tensor, choice: Tensor, drawn: Drawn) -> Tensor:
    if x.is_cuda:
        return torch.ops.aten.native_dropout_backward(x, choice, _scale(drawn, x))
    sample_index, position = drawn.numbers
    return ops.dropout(x, drawn.p, seed=choice, sample_index=sample_index, position=position)


def _scale(drawn: Drawn, x: Tensor) -> float:
    """What dropout multiplies that it keeps by."""
    if x.is_cuda:
        return 1 / (1 - drawn.p) if drawn.p < 1.0 else 0.0
    return dropout_scale(dropout_threshold(drawn.p))


project, join, expand = map(applied, (_Project, _Join, _Expand))
