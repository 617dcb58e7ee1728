"""``ops.attention``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

from typing import Any

import torch

from fastplm._backends import needs_cpu, needs_triton
from fastplm._checks import (
    FLOATING,
    UnsupportedError,
    check,
    check_dtype,
    check_same,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from fastplm._registry import Op, autocast
from fastplm.ops._common import last_dim_contiguous
from fastplm.reference.attention import attention_ref

_MAX_HEAD_DIM = 128


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    relative_bias: object | None = None,
    seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention with key padding, causal and cross-attention, without a score matrix.

    ``O = softmax(scale * Q K^T + mask) V``

    Args:
        query: [B, H, Tq, D], fp32, fp16 or bf16; any strides whose last is 1 (a view of packed
            projections or of [B, T, H, D] is not copied).
        key, value: [B, H, Tk, D], dtype and device of ``query``; strides of their own.
        key_mask: bool [B, Tk], True = attend. The content of a masked key never matters.
        is_causal: query i sees the keys j <= i + (Tk - Tq) (bottom-right aligned).
        dropout_p: must be 0.0 in this version.
        scale: factor on the scores; default ``D ** -0.5``.
        relative_bias: must be None in this version.
        seed: seed of the dropout; unused while ``dropout_p`` is 0.

    Returns:
        [B, H, Tq, D] in the dtype of ``query``. A row that may attend to nothing is 0 and passes
        no gradient.

    Numerics:
        Products in the input dtype (fp32 without TF32); softmax and sums in fp32.

    Determinism:
        Forward and backward repeat bit for bit on one backend; no atomics.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes or devices that do not fit.
        UnsupportedError: ``dropout_p > 0`` or ``relative_bias``.
        BackendError: a forced backend cannot run the call.

    Source: Vaswani et al. 2017, eq. 1; Dao 2023 (arXiv 2307.08691).
    Reference: ``fastplm.reference.attention.attention_ref``.
    """
    _check_unsupported(dropout_p, relative_bias)
    check_tensor("attention", "query", query, ndim=4)
    check_tensor("attention", "key", key, ndim=4)
    check_tensor("attention", "value", value, ndim=4)
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    _check(query, key, value, key_mask)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    backend = OP.resolve(query, key, value, key_mask, is_causal, scale)
    if backend == "eager":
        return attention_ref(query, key, value, key_mask=key_mask, is_causal=is_causal, scale=scale)
    query, key, value = (last_dim_contiguous(tensor) for tensor in (query, key, value))
    out, _ = torch.ops.fastplm.attention_fwd(query, key, value, key_mask, is_causal, scale, backend)
    return out


def _check_unsupported(dropout_p: float, relative_bias: object | None) -> None:
    if dropout_p != 0.0:
        raise UnsupportedError(
            message(
                "attention",
                "dropout_p",
                dropout_p,
                "0.0 in this version",
                "Use torch.nn.functional.scaled_dot_product_attention where attention dropout is "
                "needed (attn_implementation='fastplm' does so by itself).",
            )
        )
    if relative_bias is not None:
        raise UnsupportedError(
            message(
                "attention",
                "relative_bias",
                f"a {type(relative_bias).__name__}",
                "None in this version",
                "Use scaled_dot_product_attention with attn_mask= for an additive bias.",
            )
        )


def _check(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
) -> None:
    check_dtype("attention", "query", query, FLOATING)
    check_same("attention", query=query, key=key, value=value)
    batch, heads, _, head_dim = query.shape
    seqlen_k = key.shape[2]
    shape = (batch, heads, seqlen_k, head_dim)
    check_shape("attention", "key", key, shape, "[B, H, Tk, D] with B, H, D of `query`")
    check_shape("attention", "value", value, shape, "[B, H, Tk, D], the shape of `key`")
    check(head_dim > 0, "attention", "query", "head dim 0", "at least 1", "Check the reshape.")
    if key_mask is not None:
        check_tensor("attention", "key_mask", key_mask, ndim=2)
        check_dtype(
            "attention",
            "key_mask",
            key_mask,
            (torch.bool,),
            "Use attention_mask.bool(), True = attend.",
        )
        check_same_device("attention", query=query, key_mask=key_mask)
        check_shape(
            "attention",
            "key_mask",
            key_mask,
            (batch, seqlen_k),
            "[B, Tk]",
            "Pass one boolean per key of each sample; causality is is_causal=True.",
        )


def _projection_layout(tensor: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] over [B, T, H, D] memory, the layout every backend returns."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_like_projection(tensor: torch.Tensor) -> torch.Tensor:
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty(batch, length, heads, dim).transpose(1, 2)


# --- backend "torch": the flash kernel that PyTorch has for CPUs ----------------------------------


def _torch_rejects(query: torch.Tensor, *_: Any, forced: bool) -> str | None:
    return needs_cpu(query)


def _visible_rows(
    query: torch.Tensor, key: torch.Tensor, key_mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(additive mask [B|1, 1, Tq|1, Tk] or None, dead rows [B|1, 1, Tq|1, 1] or None)."""
    if key_mask is not None and bool(key_mask.all()):
        key_mask = None  # a full batch takes the unmasked kernel
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    allowed = None if key_mask is None else key_mask[:, None, None, :]
    if is_causal and not (key_mask is None and seqlen_q == seqlen_k):
        causal = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
        allowed = causal if allowed is None else causal & allowed
    if allowed is None:
        return None, None
    dead = ~allowed.any(-1, keepdim=True)
    bias = torch.zeros(allowed.shape, dtype=query.dtype)
    bias.masked_fill_(~(allowed | dead), float("-inf"))
    return bias, dead if bool(dead.any()) else None


def _zero_masked(tensor: torch.Tensor, key_mask: torch.Tensor | None) -> torch.Tensor:
    """The tensor with its masked keys set to 0, as a NaN there would survive ``0 * NaN``."""
    if key_mask is None or bool(key_mask.all()):
        return tensor
    return tensor.masked_fill(~key_mask[:, None, :, None], 0.0)


def _torch_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if 0 in query.shape or key.shape[2] == 0:
        return _empty_like_projection(query).zero_(), _row_statistics(query).zero_()
    bias, dead = _visible_rows(query, key, key_mask, is_causal)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        _zero_masked(key, key_mask),
        _zero_masked(value, key_mask),
        0.0,
        is_causal and bias is None,
        attn_mask=bias,
        scale=scale,
    )
    if dead is not None:
        out.masked_fill_(dead, 0.0)
    stats = _row_statistics(query)
    stats[0], stats[1] = lse, 0.0
    return _projection_layout(out), stats


def _torch_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    out: torch.Tensor,
    stats: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if 0 in query.shape or key.shape[2] == 0:
        return tuple(_empty_like_projection(t).zero_() for t in (query, key, value))  # type: ignore[return-value]
    bias, dead = _visible_rows(query, key, key_mask, is_causal)
    if dead is not None:
        grad_out = grad_out.masked_fill(dead, 0.0)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out,
        query,
        _zero_masked(key, key_mask),
        _zero_masked(value, key_mask),
        out,
        stats[0],
        0.0,
        is_causal and bias is None,
        attn_mask=bias,
        scale=scale,
    )
    return tuple(_projection_layout(grad) for grad in grads)  # type: ignore[return-value]


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(query: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if query.shape[-1] > _MAX_HEAD_DIM:
        return f"head dim {query.shape[-1]} is over {_MAX_HEAD_DIM}"
    if query.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return needs_triton(query, forced)


def _triton_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from fastplm.triton_kernels.attention import attention_fwd

    return attention_fwd(*arguments)


def _triton_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from fastplm.triton_kernels.attention import attention_bwd

    return attention_bwd(*arguments)


# --- registration ---------------------------------------------------------------------------------


def _row_statistics(query: torch.Tensor) -> torch.Tensor:
    """[2, B, H, Tq]: what a backend's own backward needs to rebuild the softmax of each row."""
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty((2, *query.shape[:3]), dtype=dtype)


def _fake_forward(query, key, value, key_mask, is_causal, scale, backend):
    _check(query, key, value, key_mask)
    return _empty_like_projection(query), _row_statistics(query)


def _fake_backward(grad_out, query, key, value, key_mask, out, stats, is_causal, scale, backend):
    return tuple(_empty_like_projection(tensor) for tensor in (query, key, value))


def _setup_context(ctx, inputs, output):
    query, key, value, key_mask, ctx.is_causal, ctx.scale, ctx.backend = inputs
    ctx.save_for_backward(query, key, value, key_mask, *output)


def _backward(ctx, grad_out, _grad_stats):
    query, key, value, key_mask, out, stats = ctx.saved_tensors
    grads = torch.ops.fastplm.attention_bwd(
        last_dim_contiguous(grad_out),
        query,
        key,
        value,
        key_mask,
        out,
        stats,
        ctx.is_causal,
        ctx.scale,
        ctx.backend,
    )
    return *grads, None, None, None, None


def _smoke(device: torch.device) -> None:
    query = torch.randn(1, 2, 4, 16, device=device, requires_grad=True)
    key_mask = torch.tensor([[True, True, False]], device=device)
    key = torch.randn(1, 2, 3, 16, device=device)
    attention(query, key, key, key_mask=key_mask).sum().backward()


OP = Op("attention", reference=attention_ref, smoke=_smoke)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=_torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
OP.define_differentiable(
    "(Tensor query, Tensor key, Tensor value, Tensor? key_mask, bool is_causal, float scale, "
    "str backend) -> (Tensor out, Tensor stats)",
    "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor out, "
    "Tensor stats, bool is_causal, float scale, str backend) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
