"""The functions of the package ``flash_attn`` that Transformers calls, over ``ops.attention``.

They take what ``flash_attn`` takes, and in addition fp32 and CPUs; both have gradients. So a
Hub kernel of them serves any model of Transformers with flash attention, by name (docs/dev/hub.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastplm import ops
from fastplm._modes import values_are_known
from fastplm.errors import UnsupportedError, fail
from fastplm.ops._attention_call import Window


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Attention of a batch without padding.

    Args:
        q: [B, Tq, H, D], fp32, fp16 or bf16 (fp64 on a CPU).
        k, v: [B, Tk, Hk, D]; H is a multiple of Hk (grouped heads).
        dropout_p: the probability of dropping an attention probability, drawn from PyTorch's
            generator; 0 in evaluation.
        softmax_scale: factor on the scores; default ``D ** -0.5``.
        causal: query i sees the keys j <= i + (Tk - Tq).
        window_size: (left, right), -1 for no bound: query i sees the keys
            i + (Tk - Tq) - left <= j <= i + (Tk - Tq) + right.
        deterministic: gradients always repeat bit for bit.
        softcap, alibi_slopes, return_attn_probs, s_aux: must keep their defaults.

    Returns:
        [B, Tq, H, D] in the dtype of ``q``.

    Raises:
        UnsupportedError: an argument that must keep its default has another value.
        ArgumentValueError, ArgumentTypeError: as ``ops.attention``.
    """
    where = "flash_attn_func"
    _check_defaults(where, softcap, alibi_slopes, return_attn_probs, s_aux)
    window = _window(where, window_size, causal, q.shape[1] == k.shape[1])
    k, v = _repeated(q, k, v)
    out = ops.attention(
        *(one.transpose(1, 2) for one in (q, k, v)),
        is_causal=causal,
        dropout_p=dropout_p,
        scale=softmax_scale,
        window=window,
    )
    return out.transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """``flash_attn_func`` of sequences packed one after the other, without padding.

    Args:
        q: [Nq, H, D]; sequence b has the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
        k, v: [Nk, Hk, D], cut by ``cu_seqlens_k`` in the same way.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], from 0, not decreasing.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths.
        window_size: without ``causal`` only where keys are cut as queries are. On a GPU that is
            not checked, as it would be a sync: equal totals and bounds are taken for it.
        block_table: must keep its default, as the others of ``flash_attn_func``.

    Returns:
        [Nq, H, D] in the dtype of ``q``.

    Raises:
        UnsupportedError, ArgumentValueError, ArgumentTypeError: as ``flash_attn_func``.
    """
    where = "flash_attn_varlen_func"
    _check_defaults(where, softcap, alibi_slopes, return_attn_probs, s_aux, block_table)
    alike = cu_seqlens_q is cu_seqlens_k or (q.shape[0], max_seqlen_q) == (k.shape[0], max_seqlen_k)
    if alike and values_are_known(cu_seqlens_q):
        alike = torch.equal(cu_seqlens_q, cu_seqlens_k)
    window = _window(where, window_size, causal, alike)
    k, v = _repeated(q, k, v)
    lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
    return ops.attention_varlen(
        q, k, v, *lengths, is_causal=causal, dropout_p=dropout_p, scale=softmax_scale, window=window
    )


def _check_defaults(
    where: str,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_attn_probs: bool,
    s_aux: Tensor | None,
    block_table: Tensor | None = None,
) -> None:
    """Transformers leaves out, without a word, what a function has no argument for. So these are
    arguments."""
    refused = {"softcap": softcap or None, "alibi_slopes": alibi_slopes, "s_aux": s_aux}
    refused |= {"return_attn_probs": return_attn_probs or None, "block_table": block_table}
    for name, given in refused.items():
        if given is not None:
            got = "a tensor" if isinstance(given, Tensor) else repr(given)
            fix = "Use attn_implementation='sdpa' or 'eager' for this model."
            fail(where, name, got, "its default", fix, UnsupportedError)


def _window(where: str, size: tuple[int, int], causal: bool, alike: bool) -> Window | None:
    """``window`` of ops.attention, whose bounds count from the query's own place unless causal."""
    left, right = (None if one is None or one < 0 else one for one in size)
    right = None if causal else right
    if left is None and right is None:
        return None
    if not (causal or alike):
        expected = "(-1, -1), as queries and keys have other lengths"
        fix = "Pass causal=True, or use attn_implementation='sdpa' for this model."
        fail(where, "window_size", repr(size), expected, fix, UnsupportedError)
    return left, right


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each head of the queries."""
    heads, groups = q.shape[-2], k.shape[-2]
    if groups in (0, heads) or heads % groups:  # an error is that of ops.attention
        return k, v
    return (
        torch.repeat_interleave(k, heads // groups, -2),
        torch.repeat_interleave(v, heads // groups, -2),
    )
