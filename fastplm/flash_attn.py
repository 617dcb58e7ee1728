"""What Transformers calls in a Hub kernel of attention, over ``ops.attention`` (docs/dev/hub.md).

``flash_attn_func`` and ``flash_attn_varlen_func`` take what the package ``flash_attn`` takes, and
in addition fp32 and CPUs. ``flash_attn_forward`` is the attention of one layer, for padded batches,
with a bias on the scores. All have gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastplm import ops
from fastplm._modes import values_are_known
from fastplm.errors import UnsupportedError, fail
from fastplm.ops._attention_call import Window, table_on
from fastplm.reference.attention import t5_buckets

#: A kernel that has this, and ``flash_attn_forward``, is the attention of a layer for Transformers.
supports_flash_attn = True
#: Layers whose ``position_bias`` is that of T5. (In UDOP it depends on the layout of a page, too.)
_T5_LAYERS = frozenset(
    f"{family}Attention" for family in ("LongT5", "MT5", "SwitchTransformers", "T5", "UMT5")
)


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
    given = dict(softcap=softcap, alibi_slopes=alibi_slopes, s_aux=s_aux)
    _must_be_default(where, **given, return_attn_probs=return_attn_probs)
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
    given = dict(softcap=softcap, alibi_slopes=alibi_slopes, s_aux=s_aux, block_table=block_table)
    _must_be_default(where, **given, return_attn_probs=return_attn_probs)
    alike = cu_seqlens_q is cu_seqlens_k or (q.shape[0], max_seqlen_q) == (k.shape[0], max_seqlen_k)
    if alike and values_are_known(cu_seqlens_q):
        alike = torch.equal(cu_seqlens_q, cu_seqlens_k)
    window = _window(where, window_size, causal, alike)
    k, v = _repeated(q, k, v)
    lengths = cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k)
    return ops.attention_varlen(
        q, k, v, *lengths, is_causal=causal, dropout_p=dropout_p, scale=softmax_scale, window=window
    )


def flash_attn_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of one layer, in the calling convention of Transformers, with SDPA's masks.

    Args:
        module: the layer. Without a mask and ``is_causal`` its own ``is_causal`` decides; if it has
            none, it is True, as in Transformers. Then query i sees the keys j <= i.
        query: [B, H, Tq, D], fp32, fp16 or bf16 (fp64 on a CPU).
        key, value: [B, Hk, Tk, D]; H is a multiple of Hk (grouped heads).
        attention_mask: [B, 1 or H, Tq, Tk], causality included: bool, True = attend, or numbers
            that are added to the scores.
        dropout: the probability of dropping an attention probability.
        scaling: factor on the scores; default ``D ** -0.5``.
        position_bias: [1, H, Tq, Tk], added to the scores. T5's is read back into its table of
            buckets, which the fused op takes. Where that cannot be done (another model's bias, or a
            cache, so that Tq != Tk) PyTorch's function gets the sum of bias and mask.
        kwargs: others of Transformers. ``softcap``, ``cu_seq_lens_q``, ``indices``,
            ``block_indices`` and tensors of floating-point numbers must be None, as they change the
            result.

    Returns:
        The output [B, Tq, H, D] in the dtype of ``query``, and None (no attention weights).

    Raises:
        UnsupportedError: an argument that must be None has a value.
        ArgumentValueError, ArgumentTypeError: as ``ops.attention``.
    """
    where = "flash_attn_forward"
    if kwargs.get("cu_seq_lens_q") is not None:
        fix = "Pad the batch, or use a kernel with flash_attn_varlen_func."
        fail(where, "cu_seq_lens_q", "a tensor", "None: a padded batch", fix, UnsupportedError)
    for name, one in kwargs.items():
        numbers = isinstance(one, Tensor) and one.dim() > 0 and one.is_floating_point()
        if name in ("softcap", "indices", "block_indices") or numbers:
            _must_be_default(where, **{name: one})
    key, value = _repeated(query, key, value, 1)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True) or _is_causal_umt5(module)
    is_causal = is_causal and attention_mask is None and query.shape[2] > 1
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None and queries != keys and getattr(module, "is_kv_shared_layer", False):
        got = "None beside fewer queries than keys, in a layer that shares keys"
        fix = "Load the kernel by a name with 'flash' in it, or use attn_implementation='sdpa'."
        fail(where, "attention_mask", got, "a mask", fix, UnsupportedError)
    if is_causal and queries < keys:  # the rest of the keys is that of a static cache, empty yet
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    elif is_causal and queries > keys:
        attention_mask, is_causal = _before(query, key), False
    added = attention_mask is not None and attention_mask.dtype is not torch.bool
    relative_bias = None
    if position_bias is not None and not added:
        relative_bias, added = _table(module, query, key, position_bias)
    if added or key.shape != value.shape:
        mask = _sum(query, key, position_bias, attention_mask, is_causal)
        out = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scaling
        )
        return out.transpose(1, 2).contiguous(), None
    out = ops.attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=is_causal,
        dropout_p=dropout,
        scale=scaling,
        relative_bias=relative_bias,
    )
    return out.transpose(1, 2).contiguous(), None


def _has_t5_bias(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith("transformers.") and kind.__name__ in _T5_LAYERS


def _is_causal_umt5(module: Any) -> bool:
    """UMT5's decoder does not say that it is causal in Transformers 5.17: with SDPA it is not."""
    return _has_t5_bias(module) and module.is_decoder and module.has_relative_attention_bias


def _table(
    module: Any, query: Tensor, key: Tensor, bias: Tensor
) -> tuple[ops.T5RelativeBias | None, bool]:
    """(the bias of the fused op, whether ``bias`` must be added by PyTorch's function)."""
    if not _has_t5_bias(module) or bias.shape[0] != 1:
        return None, True
    if module.is_decoder and not (module.is_causal or module.has_relative_attention_bias):
        return None, False  # attention to the source: zeros
    many, most = module.relative_attention_num_buckets, module.relative_attention_max_distance
    two_sided = not module.is_decoder
    least = 4 if two_sided else 2
    if query.shape[2] != key.shape[2] or many < least or many % 2 or most <= many // least:
        return None, True
    # What stands beyond the bias has a bucket that the op does not read.
    nearest = _nearest(bias.device, many, two_sided, most)
    rows, columns = (side.clamp(0, query.shape[2] - 1) for side in (-nearest, nearest))
    return ops.T5RelativeBias(bias[0, :, rows, columns].T, two_sided, most), False


def _nearest(device: torch.device, *settings: Any) -> Tensor:
    """The smallest distance of each bucket, or 0 if it has none: int64 [buckets]."""
    # ``torch.export`` would trace how the table is made, which reads values.
    with torch.utils._python_dispatch._disable_current_modes():
        table = table_on(device, _nearest_distances, *settings)
    # As by ``mark_static``: the op checks the count of buckets, also where sizes are symbols.
    table._dynamo_static_indices = {0}  # type: ignore[attr-defined]
    return table


# A constant of compiled code: see ``_allows_tf32`` of ``ops.attention``.
_nearest._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _nearest_distances(buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    of_distance = t5_buckets(buckets, bidirectional, max_distance).tolist()
    found = [0] * buckets
    for distance in sorted(range(-max_distance, max_distance + 1), key=abs, reverse=True):
        found[of_distance[distance + max_distance]] = distance
    return torch.tensor(found, device="cpu")


def _before(query: Tensor, key: Tensor) -> Tensor:
    sizes = query.shape[2], key.shape[2]
    return torch.ones(sizes, dtype=torch.bool, device=query.device).tril()


def _sum(
    query: Tensor, key: Tensor, bias: Tensor | None, mask: Tensor | None, is_causal: bool
) -> Tensor | None:
    """A mask that PyTorch's function adds: of a bias, a mask, and causality."""
    if is_causal:
        mask = _before(query, key)
    if bias is None or mask is None:
        return mask if bias is None else bias.to(query.dtype)
    if mask.dtype is torch.bool:
        return bias.to(query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    return (bias + mask).to(query.dtype)


def _must_be_default(where: str, **arguments: Any) -> None:
    """Transformers leaves out, without a word, what a function has no argument for. So these are
    arguments."""
    for name, given in arguments.items():
        if isinstance(given, Tensor) or given:
            got = "a tensor" if isinstance(given, Tensor) else repr(given)
            fix = "Use attn_implementation='eager' for this model."
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


def _repeated(q: Tensor, k: Tensor, v: Tensor, dim: int = -2) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each head of the queries."""
    heads, groups = q.shape[dim], k.shape[dim]
    if groups in (0, heads) or heads % groups:  # an error is that of ops.attention
        return k, v
    return (
        torch.repeat_interleave(k, heads // groups, dim),
        torch.repeat_interleave(v, heads // groups, dim),
    )
