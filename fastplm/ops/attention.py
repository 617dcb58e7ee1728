"""``ops.attention`` and ``ops.attention_varlen``: one op with two layouts, and its backends.

``_attention_call.py`` declares its arguments.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastplm._backends import DIFFERENTIABLE, fast_choice, requested
from fastplm._checks import (
    FLOATING,
    check_number,
    check_probability,
    check_seed_form,
    check_tensor,
    check_tensors,
)
from fastplm._modes import is_traced, is_transformed, needs_dispatch
from fastplm._registry import Op
from fastplm._rules import ALONE, CallClass, slower, training
from fastplm.errors import ArgumentTypeError, fail
from fastplm.ops._attention_call import (
    Call,
    Saved,
    Window,
    empty_like_projection,
    expanded_mask,
    lie_side_by_side,
    parts_of,
    projection_layout,
    stored_once,
    window_bounds,
)
from fastplm.ops._common import (
    cast_for_autocast,
    csrc_rejects,
    kernels,
    last_dim_contiguous,
    seed_tensor,
    torch_rejects,
    triton_rejects,
)
from fastplm.reference.attention import (
    T5RelativeBias,
    attention_ref,
    attention_varlen_ref,
)

#: The largest head dim of the Triton kernels, by the bytes of an element.
_MAX_HEAD_DIM = {2: 256, 4: 128}
_NUMBER = (float, int)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    relative_bias: T5RelativeBias | None = None,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    window: Window | None = None,
) -> Tensor:
    """Softmax attention with masks, causality, T5's bias and dropout, without a score matrix.

    ``O = dropout(softmax(scale * Q K^T + bias + mask)) V``

    Args:
        query: [B, H, Tq, D], fp32, fp16 or bf16; any strides whose last is 1 (a view of packed
            projections or of [B, T, H, D] is not copied).
        key, value: [B, H, Tk, D], dtype and device of ``query``; strides of their own.
        key_mask: bool [B, Tk], True = attend. The content of a masked key never matters.
        attn_mask: bool [B, H, Tq, Tk], True = attend; each size may be 1, and [Tq, Tk] is one mask
            for all heads. Use it for patterns that ``key_mask`` and ``is_causal`` cannot express: a
            query attends to a key if every mask that is given allows it. It is copied only if its
            last stride is not 1. On a GPU it saves no time: the scores of masked keys are computed
            and get the weight 0. A NaN in a masked key is ignored only with ``key_mask``.
        is_causal: query i attends to the keys j <= i + (Tk - Tq) (bottom-right aligned). So one or
            a few queries can continue a cache of keys and values.
        dropout_p: the probability of dropping an attention probability. It is rounded to a multiple
            of 1/256, but 0 and 1 are used only if they are given: other values become 1/256 or
            255/256. Probabilities that are kept are divided by 1 minus the rounded value.
        scale: factor on the scores; default ``D ** -0.5`` (T5 uses 1.0).
        relative_bias: ``T5RelativeBias(weight [buckets, H], bidirectional, max_distance)``: a bias
            by the bucket of the distance, computed on the fly; ``weight`` gets a gradient.
        seed: the seed of dropout: int, or 0-d int64 tensor on the device of ``query`` (which a
            captured graph can advance). Default: drawn from PyTorch's generator of the device. Use
            another seed for each layer and step.
        sample_index: int64 [B], default ``arange(B)``. The random bits of dropout depend on
            ``seed``, ``sample_index`` and the indices of head, query and key. With indices that are
            unique in the whole training, they do not depend on how a batch is split over devices.
        window: (left, right), each an int of 0 or more, or None for no bound: query i sees the keys
            i - left <= j <= i + right, with ``is_causal`` from i + (Tk - Tq) - left on. Tiles of
            keys that no query of a tile sees are not read, forward and backward, so that time grows
            with the window, not with Tk. Nor is a bound that hides nothing. Other masks still hold.

    Returns:
        [B, H, Tq, D] in the dtype of ``query``. A row that may attend to nothing is 0 and passes
        no gradient.

    Numerics:
        Matrix products use the input dtype (the C++ backend on a CPU: always fp32); bias, softmax
        and sums use fp32. On a GPU, fp32 inputs are multiplied in TF32 if
        ``torch.backends.cuda.matmul`` allows it when the forward is called or traced (a compiled
        function is recompiled if the setting changes). The backward uses what the forward used.

    Determinism:
        Forward and backward repeat bit for bit on one backend, the gradient of the bias included;
        no atomics. Dropout drops the same probabilities on every backend, device and layout.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> query = torch.zeros(1, 1, 2, 16)  # so that every key counts alike
        >>> value = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1).expand(1, 1, 2, 16)
        >>> ops.attention(query, query, value, is_causal=True)[0, 0, :, 0]
        tensor([1., 2.])
        >>> hidden = torch.tensor([[False, False]])
        >>> ops.attention(query, query, value, key_mask=hidden)[0, 0, :, 0]
        tensor([0., 0.])
        >>> ops.attention(query, query, value, window=(0, 1))[0, 0, :, 0]
        tensor([2., 3.])
        >>> seen = torch.tensor([[True, True], [False, True]])  # query 1 sees key 1 alone
        >>> ops.attention(query, query, value, attn_mask=seen)[0, 0, :, 0]
        tensor([2., 3.])

    Source: Vaswani et al. 2017, eq. 1; Dao 2023 (arXiv 2307.08691); bias: Raffel et al. 2020, §2.1.
    Reference: ``fastplm.reference.attention.attention_ref``.
    """
    where = "attention"
    check_tensors(where, 4, query=query, key=key, value=value)
    # ``_prepared`` raises the error for an argument of a wrong type.
    if (
        query.is_cpu
        and key_mask is attn_mask is relative_bias is seed is sample_index is window is None
        and isinstance(dropout_p, _NUMBER)
        and dropout_p == 0.0
        and (is_causal is False or (is_causal is True and query.shape[2] <= 1))
    ):
        out = plain_attention(query, key, value, scale)
        if out is not None:
            return out
    call, backend, dispatches = _prepared(
        where,
        (query, key, value),
        (None, None, query.shape[2], key.shape[2]),
        key_mask=key_mask,
        attn_mask=attn_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        relative_bias=relative_bias,
        seed=seed,
        sample_index=sample_index,
        window=window,
    )
    return OP(call, backend, dispatches)[0]


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    relative_bias: T5RelativeBias | None = None,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    window: Window | None = None,
) -> Tensor:
    """``attention`` of a ragged batch: sequences packed one after the other, without padding.

    ``O_b = dropout(softmax(scale * Q_b K_b^T + bias + mask)) V_b`` for every sequence b.

    Args:
        query: [Nq, H, D]; sequence b owns the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
            Rows past ``cu_seqlens_q[-1]`` are spare capacity; their content never matters.
        key, value: [Nk, H, D], cut by ``cu_seqlens_k`` in the same way.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], from 0, not decreasing, on the device of
            ``query``: lengths of queries and keys (an encoder and a decoder); a length may be 0.
        max_seqlen_q, max_seqlen_k: upper bounds of the sequence lengths. They choose the kernel, so
            a captured or compiled step with fixed bounds serves every batch. A longer sequence is
            an error on the CPU. On a GPU the lengths are not checked, as that would be a sync: rows
            beyond the bound are not computed.
        key_mask: bool [Nk], True = attend. (There is no ``attn_mask``: ``cu_seqlens`` already says
            which rows belong together, and a dense mask of packed sequences would have the square
            of their total length.)
        is_causal, dropout_p, scale, relative_bias, seed: as in ``attention``, with the lengths of
            each sequence as its Tq and Tk.
        sample_index: int64 [B], as in ``attention``.
        window: as in ``attention``, within each sequence.

    Returns:
        [Nq, H, D] in the dtype of ``query``; spare rows are 0 and pass no gradient. The same as
        ``attention`` gives for the batch padded at the right to ``max_seqlen_q`` and
        ``max_seqlen_k``, bit for bit on one backend. Dropout drops the same on all backends.

    Numerics:
        As ``attention``.

    Determinism:
        As ``attention``.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> starts = torch.tensor([0, 2, 3], dtype=torch.int32)  # sequences of 2 and 1
        >>> query = torch.zeros(3, 1, 16)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).view(3, 1, 1).expand(3, 1, 16)
        >>> ops.attention_varlen(query, query, value, starts, starts, 2, 2)[:, 0, 0]
        tensor([2., 2., 7.])

    Source: as ``attention``.
    Reference: ``fastplm.reference.attention.attention_varlen_ref``.
    """
    where = "attention_varlen"
    check_tensors(where, 3, query=query, key=key, value=value)
    check_tensors(where, 1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if (
        query.is_cpu
        and relative_bias is seed is sample_index is None
        and isinstance(dropout_p, _NUMBER)
        and dropout_p == 0.0
    ):
        out = _fast_varlen(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            key_mask,
            is_causal,
            scale,
            window,
        )
        if out is not None:
            return out
    call, backend, dispatches = _prepared(
        where,
        (query, key, value),
        (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        key_mask=key_mask,
        is_causal=is_causal,
        dropout_p=dropout_p,
        scale=scale,
        relative_bias=relative_bias,
        seed=seed,
        sample_index=sample_index,
        window=window,
    )
    return OP(call, backend, dispatches)[0]


def _allows_tf32() -> bool:
    """Whether PyTorch multiplies fp32 matrices on a GPU in TF32, by whichever of its flags."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# Dynamo cannot trace the function; this attribute makes its result a constant of the graph.
# ``torch.compiler.assume_constant_result`` sets it, too, but imports Dynamo, which takes a second.
_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _prepared(
    where: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    lengths: tuple[Tensor | None, Tensor | None, int, int],
    *,
    key_mask: Tensor | None,
    attn_mask: Tensor | None = None,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    relative_bias: T5RelativeBias | None,
    seed: int | Tensor | None,
    sample_index: Tensor | None,
    window: Window | None,
) -> tuple[Call, str, bool]:
    """The checked call with the layout that its backend asks for; this backend; and whether it
    needs PyTorch's dispatcher."""
    query, key, value = cast_for_autocast(*tensors)
    assert query is not None and key is not None and value is not None
    fix = "Pass the share of attention probabilities to drop."
    check_probability(where, "dropout_p", dropout_p, fix)
    if dropout_p > 0.0:
        seed = seed_tensor(where, seed, query, optional=True)
    elif seed is not None:
        check_seed_form(where, seed)
        seed = None
    if attn_mask is not None:
        attn_mask = expanded_mask(where, attn_mask, (*query.shape[:3], key.shape[2]))
    call = Call(
        query,
        key,
        value,
        key_mask,
        attn_mask,
        *lengths,
        *_bias(where, relative_bias),
        seed,
        sample_index,
        float(dropout_p),
        is_causal,
        _scale(where, scale, query.shape[-1]),
    )
    if window is not None:
        left, right = window_bounds(where, window, is_causal, *lengths[2:])
        call = call._replace(window_left=left, window_right=right)
    OP.check(call, where)
    dispatches = needs_dispatch(call)
    backend = OP.resolve(call, dispatches)
    if backend in DIFFERENTIABLE:
        return call, backend, dispatches
    if backend in ("cudnn", "triton"):
        call.check_lengths()
        if query.dtype is torch.float32 and _allows_tf32():
            call = call._replace(allow_tf32=True)
    if backend == "cudnn" and _cudnn_backward_row(call) is not None:
        call = call._replace(reorders=True)
    if not dispatches or type(query) is FakeTensor:
        grads = torch.is_grad_enabled() and query.requires_grad
        if grads and lie_side_by_side(query, key, value):
            call = call._replace(side_by_side=True)
    if call.attn_mask is not None and call.attn_mask.stride(-1) != 1:
        dense = stored_once(call.attn_mask).contiguous()
        call = call._replace(attn_mask=dense.expand(call.attn_mask.shape))
    # Backends read rows with any stride, but the elements of a row must be contiguous.
    return OP.arguments.laid_out(call), backend, dispatches


def _eager(call: Call) -> tuple[Tensor, None]:
    if call.packed:
        call.check_lengths()
        out = attention_varlen_ref(
            *(call.query, call.key, call.value),
            *(call.cu_seqlens_q, call.cu_seqlens_k),  # type: ignore[arg-type]
            *(call.max_seqlen_q, call.max_seqlen_k),
            **call.options,
        )
    else:
        out = attention_ref(
            call.query, call.key, call.value, attn_mask=call.attn_mask, **call.options
        )
    return out, None


def _bias(where: str, bias: T5RelativeBias | None) -> tuple[Tensor | None, bool, int]:
    if bias is None:
        return None, False, 0
    if not isinstance(bias, T5RelativeBias):
        fail(
            where,
            "relative_bias",
            f"a {type(bias).__name__}",
            "ops.T5RelativeBias or None",
            "Wrap the table: T5RelativeBias(weight, bidirectional=…, max_distance=…).",
            ArgumentTypeError,
        )
    check_tensor(where, "relative_bias.weight", bias.weight, ndim=2)
    return bias.weight, bool(bias.bidirectional), int(bias.max_distance)


def _scale(where: str, scale: float | None, head_dim: int) -> float:
    if head_dim <= 0:
        fail(where, "query", "head dim 0", "at least 1", "Check the reshape.")
    if scale is None:
        return head_dim**-0.5
    check_number(where, "scale", scale, -math.inf, math.inf, "a number", "None is D ** -0.5.")
    return float(scale)


# --- backend "cpp": csrc/attention/attention.h, one head of one sequence a thread -----------------

_CSRC_REJECTS = csrc_rejects("attention", fp64=False)
# Parts of the arguments of csrc/, which takes them in the order of ``_cpp_arguments``: names cost
# 3 of the 5 microseconds of a small call.
_NO_MASK, _NOT_PACKED = (None, None), (None, None)
_NO_BIAS, _NO_DROPOUT, _NO_WINDOW = (None, None), (None, None, 0), (-1, -1)


def _is_plain(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Whether a call without mask, bias and dropout is correct, on the CPU and not traced."""
    batch, heads, _, dim = query.shape
    dtype = query.dtype
    return (
        not is_traced()
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and dtype is key.dtype is value.dtype
        and dtype in FLOATING
        and key.shape == value.shape == (batch, heads, key.shape[2], dim)
        and dim > 0
        and (scale is None or isinstance(scale, float) and scale == scale)
        and not torch._C._is_any_autocast_enabled()
        and not is_transformed()
    )


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None
) -> Tensor | None:
    """The fast path of 4-D tensors without mask, bias and dropout on a CPU; None for others."""
    wanted = fast_choice("attention") if query.is_cpu else None
    if wanted is None or not _is_plain(query, key, value, scale):
        return None
    if wanted == "auto" and slower("attention", _class_of(query, key)) is not None:
        return _sdpa(query, key, value, scale)
    if (
        training(query, key, value) == "training"
        or needs_dispatch((query, key, value))
        or _CSRC_REJECTS((query,), forced=False) is not None
    ):
        return None
    out, _ = torch.ops.fastplm_C.attention.default(
        *map(last_dim_contiguous, (query, key, value)),
        *_NO_MASK,
        *_NOT_PACKED,
        *(query.shape[2], key.shape[2]),
        *_NO_BIAS,
        *_NO_DROPOUT,
        False,
        query.shape[3] ** -0.5 if scale is None else float(scale),
        *_NO_WINDOW,
    )
    return out


def _sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)


def _class_of(query: Tensor, key: Tensor) -> CallClass:
    batch, heads, seqlen_q, dim = query.shape
    form = training(query, key)
    if torch.get_num_threads() == 1:
        form += ALONE
    return form, query.dtype, (seqlen_q, key.shape[2], batch * heads, dim)


def _fast_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    key_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    window: Window | None,
) -> Tensor | None:
    """The output by csrc/ of a correct call without gradients, bias and dropout; else None."""
    if not query.is_cpu or fast_choice("attention") is None:
        return None
    rows, heads, dim = key.shape
    if (
        needs_dispatch((query, key, value, cu_seqlens_q, cu_seqlens_k, key_mask))
        or _CSRC_REJECTS((query,), forced=False) is not None
        or torch._C._is_any_autocast_enabled()
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(query, key, value))
        or not (query.dtype is key.dtype is value.dtype and query.dtype in FLOATING)
        or not (key.shape == value.shape and query.shape[1:] == (heads, dim) and dim > 0)
        or not (cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32)
        or not (cu_seqlens_q.shape == cu_seqlens_k.shape != (0,))
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or not (cu_seqlens_q.is_cpu and cu_seqlens_k.is_cpu)
        or not (type(max_seqlen_q) is type(max_seqlen_k) is int and type(is_causal) is bool)
        or not (scale is None or isinstance(scale, float) and scale == scale)
    ):
        return None
    if key_mask is not None and (
        not isinstance(key_mask, Tensor)
        or key_mask.is_nested
        or not (key_mask.is_cpu and key_mask.dtype is torch.bool and key_mask.shape == (rows,))
    ):
        return None
    sides = _NO_WINDOW
    if window is not None:
        sides = window_bounds("attention_varlen", window, is_causal, max_seqlen_q, max_seqlen_k)
    try:
        out, _ = torch.ops.fastplm_C.attention.default(
            *map(last_dim_contiguous, (query, key, value)),
            *(None if key_mask is None else key_mask.contiguous(), None),
            *(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()),
            *(max_seqlen_q, max_seqlen_k),
            *_NO_BIAS,
            *_NO_DROPOUT,
            is_causal,
            dim**-0.5 if scale is None else float(scale),
            *sides,
        )
    except (RuntimeError, ValueError):  # wrong lengths: ``_prepared`` raises an error about them
        return None
    return out


def _measured(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, *others: Any
) -> CallClass | None:
    """None for a call that is not plain: PyTorch has no kernel for it, so csrc/ runs if it can."""
    if key_mask is not None or not Call(query, key, value, key_mask, *others).is_plain:
        return None
    return _class_of(query, key)


def _cpp_arguments(call: Call) -> tuple[Any, ...]:
    weight = call.bias_weight
    return (
        *(call.query, call.key, call.value),
        *(call.key_mask, call.attn_mask),
        *(call.cu_seqlens_q, call.cu_seqlens_k),
        *(call.max_seqlen_q, call.max_seqlen_k),
        *(None if weight is None else weight.float(), call.buckets),
        *(call.seed, call.sample_index, call.dropout_threshold),
        call.is_causal,
        call.scale,
        *(call.window_left, call.window_right),
    )


def _cpp_forward(call: Call) -> tuple[Tensor, Tensor]:
    try:
        return torch.ops.fastplm_C.attention.default(*_cpp_arguments(call))
    except RuntimeError:
        call.check_lengths()  # csrc/ found wrong lengths; this raises an error that names them
        raise


def _cpp_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, bias_grad = saved.call, saved.need_bias_weight
    backward = torch.ops.fastplm_C.attention_backward.default
    grad = last_dim_contiguous(grad)
    *grads, by_sample = backward(*_cpp_arguments(call), saved.stats, grad, bias_grad)
    bias = call.query.new_empty(0)
    if bias_grad and call.bias_weight is not None:
        bias = by_sample.sum(0).t().to(call.bias_weight.dtype).contiguous()
    return _returned(call, (*grads, bias))


def _returned(call: Call, grads: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a backward returns, of the gradients of query, key, value and bias."""
    if not call.side_by_side:
        return grads  # type: ignore[return-value]
    places = [one if call.packed else one.transpose(1, 2) for one in grads[:3]]
    nothing = call.query.new_empty(0)
    return torch.stack(places, -3), nothing, nothing.clone(), grads[3]


# --- backend "stock": PyTorch's own attention, with its own gradient -----------------------------


def _stock_rejects(call: Call, *, forced: bool) -> str | None:
    if not call.is_plain:
        return "PyTorch's is taken without masks, bias and dropout alone"
    if is_transformed():
        return "PyTorch's has no batching rule and no tangent"
    return None if forced else torch_rejects(call, forced=forced)


def _stock(call: Call) -> tuple[Tensor, None]:
    return _sdpa(call.query, call.key, call.value, call.scale), None


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(call: Call, *, forced: bool) -> str | None:
    query, most = call.query, _MAX_HEAD_DIM.get(call.query.dtype.itemsize, math.inf)
    if query.shape[-1] > most:
        return f"head dim {query.shape[-1]} is over {most}"
    if call.scale <= 0.0:
        return f"scale {call.scale}: the kernels take a positive one"
    return triton_rejects(call, forced=forced)


def _triton_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels("attention").attention_bwd(grad, saved)


# --- backend "cudnn": the forward of PyTorch's cuDNN kernel, mostly with the backward of "triton"


def _cudnn_row(call: Call) -> str | None:
    """The row of benchmarks/results/nvidia-h100-80gb-hbm3/attention.csv that lets cuDNN's forward
    run a call, by µs of cuDNN and ours; None if there is none, as for sizes not measured.

    From 129 queries or keys on, two launches more give our backward its statistics. So cross
    128x512 (49 and 54) is not among them, nor decode 64x512 (40 and 42).
    """
    queries, keys, dim = call.query.shape[2], call.key.shape[2], call.query.shape[3]
    if dim != 64 or _capability(call.query.device.index or 0) != (9, 0):
        return None
    if call.is_causal and queries > 1:
        return "GPT-2 16x1024 causal: 86, 116" if queries >= 512 else None
    if queries <= 16:
        return None
    if keys <= 128:
        short = "BERT-base 256x128: 73, 87; ELECTRA-small 128x128: 18, 21"
        return short if queries <= 128 else "cross 512x128: 55, 72"
    longer = "BERT-base 64x512: 140, 180; ALBERT-xxlarge 16x512: 182, 231"
    return longer if queries > 128 else None


def _cudnn_backward_row(call: Call) -> str | None:
    """The same of the backward. Its sums may come in any order, so the user must name cuDNN."""
    if requested("attention") != "cudnn" or torch.are_deterministic_algorithms_enabled():
        return None
    if call.key.shape[2] < 512:  # BERT-base 256x128: 355 and 135
        return None
    if call.is_causal:
        return "GPT-2 16x1024 causal: 296, 420"
    return "BERT-base 64x512: 526, 645; ALBERT-xxlarge 16x512: 678, 843; cross 128x512: 222, 239"


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _cudnn_rejects(call: Call, *, forced: bool) -> str | None:
    query, key, value = call.query, call.key, call.value
    if query.device.type != "cuda":
        return f"it runs on CUDA tensors, not {query.device}"
    if not call.is_at_most_causal:
        return "cuDNN is taken without masks, packing, bias and dropout alone"
    if call.is_causal and query.shape[2] not in (1, key.shape[2]):
        return "cuDNN aligns causality at the first key"
    if torch.compiler.is_compiling():
        return "a program is traced, which serves calls of any size"
    if not torch.cuda.is_available():
        return "there is no GPU to ask"
    if not forced and _cudnn_row(call) is None:
        return "it was not measured to be faster for this size on this GPU"
    causal = call.is_causal and query.shape[2] > 1
    asked = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, False)
    if 0 in (*query.shape, *key.shape) or not torch.backends.cuda.can_use_cudnn_attention(asked):
        return "PyTorch's cuDNN attention does not take this call, or is turned off"
    return _triton_rejects(call, forced=True)


def _cudnn_forward(call: Call) -> tuple[Tensor, Tensor]:
    """Output and statistics. cuDNN's logarithm of a sum is ours of the maximum, and that of the sum
    is 0: with a large offset of a row's scores fewer digits are left."""
    query, key, value = call.query, call.key, call.value
    stats = _statistics(call, "cudnn")
    causal, streams = call.is_causal and query.shape[2] > 1, stats.numel() > 0
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, None, streams, 0.0, causal, False, scale=call.scale
    )
    if call.reorders:
        return projection_layout(out), logsumexp
    if streams:
        batch, heads, length, _ = query.shape
        rows = stats[0].view(heads, batch, length)
        torch.mul(logsumexp.view(batch, heads, length).transpose(0, 1), math.log2(math.e), out=rows)
        stats[1].zero_()
    return projection_layout(out), stats


def _cudnn_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, out, logsumexp, _ = saved
    if not call.reorders:
        return _triton_backward(grad, saved)
    query, key, value = call.query, call.key, call.value
    causal, drawn = call.is_causal and query.shape[2] > 1, query.new_empty((), dtype=torch.int64)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
        *(grad, query, key, value, out, logsumexp, drawn, drawn, None, None, None),
        *(query.shape[2], key.shape[2], 0.0, causal),
        scale=call.scale,
    )
    return _returned(call, (*map(projection_layout, grads), query.new_empty(0)))


# --- registration ---------------------------------------------------------------------------------


def _statistics(call: Call, backend: str) -> Tensor:
    """An empty [2, H, rows of query] for what the backward needs to rebuild the softmax of a row.

    It is [2, H, 0] if the backend's backward needs no statistics.
    """
    query = call.query
    if call.reorders:  # cuDNN's logarithm of a sum
        return query.new_empty((*query.shape[:3], 1), dtype=torch.float32)
    rows = query.shape[0] if call.packed else query.shape[0] * query.shape[2]
    if backend in ("cudnn", "triton"):
        has_bias = call.bias_weight is not None
        lengths = call.max_seqlen_q, call.max_seqlen_k
        if not kernels("attention").needs_statistics(
            query.dtype, query.shape[-1], *lengths, has_bias
        ):
            rows = 0
    return query.new_empty((2, query.shape[1], rows), dtype=torch.float32)


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    call = saved.call
    bias = call.bias_weight if saved.need_bias_weight else None
    grads = [empty_like_projection(tensor) for tensor in (call.query, call.key, call.value)]
    grads.append(call.query.new_empty(0) if bias is None else bias.new_empty(bias.shape))
    return _returned(call, tuple(grads))


def _unused(call: Call, outputs: Any, needs: Any, backend: str) -> tuple[str, ...]:
    """The output, if the backward computes it again: in csrc/, and without row statistics."""
    rows = outputs[1].shape[2]  # a symbol where the rows were chosen in a compiled graph
    return ("out",) if backend == "cpp" or (isinstance(rows, int) and rows == 0) else ()


def _smoke(device: torch.device) -> None:
    query = torch.randn(1, 2, 4, 16, device=device, requires_grad=True)
    key_mask = torch.tensor([[True, True, False]], device=device)
    key = torch.randn(1, 2, 3, 16, device=device)
    attention(query, key, key, key_mask=key_mask).sum().backward()


OP = Op(
    "attention",
    Call,
    results=("out", "stats"),
    fake=lambda call, backend: (empty_like_projection(call.query), _statistics(call, backend)),
    reference=attention_ref,
    eager=_eager,
    smoke=_smoke,
    saved=Saved,
    gradients=("query", "key", "value", "bias_weight"),
    fake_backward=_fake_backward,
    finish=lambda grads, saved: parts_of(grads) if saved.call.side_by_side else grads,
    unused=_unused,
)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_CSRC_REJECTS,
    measured=_measured,
)
OP.backend(
    "triton",
    forward=lambda call: kernels("attention").attention_fwd(call),
    backward=_triton_backward,
    rejects=_triton_rejects,
)
OP.backend("cudnn", forward=_cudnn_forward, backward=_cudnn_backward, rejects=_cudnn_rejects)
OP.backend("stock", forward=_stock, rejects=_stock_rejects)
