"""``attn_implementation="fastplm"``: fused attention for Hugging Face models.

Importing this module registers the name with Transformers::

    import fastplm.hf
    model = AutoModel.from_pretrained(path, attn_implementation="fastplm")

Two functions are registered. Transformers calls ``fastplm_mask`` once per forward to convert the
user's padding mask into a boolean key mask [B, Tk]; without it, Transformers would pass no mask. It
calls ``fastplm_attention_forward`` in every layer.

Dropout, the position bias of T5 (from its table; see ``_relative_bias``), packed sequences
(``cu_seq_lens_q``, …) and boolean 4-D masks are fused as well: those that Transformers makes (of a
prefix, sliding windows, blocks) and those of the user; for BERT's own masks [B, F, T] see
``fastplm_mask``. Transformers' SDPA function, with an equivalent mask, does what ``ops.attention``
does not support: grouped heads, a position bias of unknown origin or with a cache, and 4-D masks
that are added to the scores (see ``_boolean``). A row that a boolean mask lets attend to nothing
gives 0; other implementations of Transformers give it an average of the values, or NaN.
If a causal model gets ``position_ids`` that restart and no ``attention_mask``, Transformers makes
such a mask; with ``cu_seq_lens_q``, pass an ``attention_mask`` of ones. What neither of the two
supports is an error. On a CPU, one query with few keys (a generation step) uses SDPA too, because
it is faster.

No function changes Python state that outlives a forward: a compiled model would recompile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)
from transformers.utils import logging

from fastplm._checks import (
    FLOATING,
    UnsupportedError,
    check,
    check_dtype,
    message,
    values_are_known,
)
from fastplm._registry import is_eager
from fastplm.ops import T5RelativeBias, attention, attention_varlen
from fastplm.ops.attention import plain_attention

logger = logging.get_logger(__name__)
NAME = "fastplm"
#: ``output_attentions`` for GPT-2, which passes only other names on to its attention.
WITH_WEIGHTS = "with_attention_weights"
_WHERE = "attn_implementation='fastplm'"
#: The argument with which the models of fastplm pass ``models._ragged.Rows`` to attention.
ROWS = "rows"
# Arguments of some models' attention that change its result and are not supported here.
_UNSUPPORTED = ("softcap", "s_aux", "head_mask", "cache")
# In the order of the arguments of ``ops.attention_varlen``.
_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# The arguments of which one must be looked at; most calls have none of them.
_SPECIAL = frozenset(
    (*_UNSUPPORTED, *_PACKED, ROWS, "output_attentions", WITH_WEIGHTS, "position_bias")
)
# The layers with a known ``position_bias``. Similar classes (UDOP) compute it in another way.
_T5_ATTENTION = (
    ("transformers.models.t5.modeling_t5", "T5Attention"),
    ("transformers.models.mt5.modeling_mt5", "MT5Attention"),
    ("fastplm.models.t5", "T5Attention"),
)
#: A ``position_bias`` of zeros. (With None, T5 would create a tensor.)
NO_BIAS: Any = object()
_NOTE = "_fastplm_relative_bias"


def fastplm_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for ``fastplm_attention_forward``, computed without a sync.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: positions of the first query and key; a tensor with a static cache.
        mask_function: of Transformers: causal, bidirectional or a composed one.
        attention_mask: bool [B, S], True = attend, or None; or a full mask [B, Tq, Tk], 0 = hidden,
            of any dtype, as Google's BERT and the models of Transformers 4 take it.
        kwargs: other arguments of ``transformers.masking_utils.sdpa_mask``.

    Returns:
        None if no key is padding, bool [B, Tk] for padding (both without causality, which the
        attention function applies), or bool [B, 1, Tq, Tk], the full mask of any other pattern.
    """
    if attention_mask is not None and attention_mask.dim() == 3:
        return attention_mask.bool()[:, None]
    causal = mask_function is causal_mask_function
    bottom_right = (
        isinstance(q_offset, int)
        and isinstance(kv_offset, int)
        and q_offset + q_length == kv_offset + kv_length
    )
    two_dimensional = attention_mask is None or attention_mask.dim() == 2
    if two_dimensional and (
        mask_function is bidirectional_mask_function or causal and (bottom_right or q_length == 1)
    ):
        key_mask = _key_window(attention_mask, kv_length, kv_offset)
        if causal and not bottom_right:
            # One query in a static cache: the keys after it are masked like padding.
            device = kwargs.get("device", "cpu")
            seen = torch.arange(kv_length, device=device) + kv_offset <= q_offset
            # Also in the last step, where all are True: one graph serves all steps.
            return seen.expand(batch_size, -1) if key_mask is None else key_mask & seen
        return None if _hides_nothing(key_mask) else key_mask
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        **kwargs,
    )


def _hides_nothing(key_mask: Tensor | None) -> bool:
    """Whether a mask is known, without a sync, to be True everywhere."""
    if key_mask is None:
        return True
    return key_mask.device.type == "cpu" and is_eager(key_mask) and bool(key_mask.all())


def _key_window(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int | Tensor
) -> Tensor | None:
    """Columns [kv_offset, kv_offset + kv_length) of the mask; False after its end."""
    if attention_mask is None:
        return None
    if isinstance(kv_offset, Tensor):
        columns = torch.arange(kv_length, device=attention_mask.device) + kv_offset
        inside = columns < attention_mask.shape[1]
        return attention_mask[:, columns.clamp(max=attention_mask.shape[1] - 1)] & inside
    missing = kv_offset + kv_length - attention_mask.shape[1]
    if missing > 0:
        attention_mask = nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def fastplm_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention of one layer, in the calling convention of Transformers.

    Args:
        module: the layer; its ``is_causal`` is used if the argument is None.
        query: [B, H, Tq, D].
        key, value: [B, H, Tk, D], or with fewer heads.
        attention_mask: None or bool [B, Tk], combined with ``is_causal``; or a full 4-D mask, one
            for all heads or for each, boolean (True = attend) or additive.
        dropout: probability of dropping an attention weight, 0 outside training. Every call draws
            its seed from PyTorch's generator, which ``torch.manual_seed`` sets and activation
            checkpointing restores.
        scaling: factor on the scores.
        is_causal: query i may attend to keys j <= i + (Tk - Tq); ignored with a 4-D mask.
        kwargs: supported are ``position_bias`` (dense, or a ``T5RelativeBias`` for the fused op),
            ``output_attentions``, and for sequences packed into a batch of one ``cu_seq_lens_q``,
            ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k``, which a 4-D mask replaces.

    Returns:
        The output [B, Tq, H, D], and the weights [B, H, Tq, Tk] if ``output_attentions``, else
        None.

    Raises:
        UnsupportedError: an argument that changes the result and is not supported.
        ArgumentValueError, ArgumentTypeError: packed sequences or a mask that do not fit.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if (
        attention_mask is None
        and not dropout
        and not (causal and query.shape[2] > 1)
        and _SPECIAL.isdisjoint(kwargs)
    ):
        plain = plain_attention(query, key, value, scaling)
        if plain is not None:
            return plain.transpose(1, 2), None
    complete = attention_mask is not None and attention_mask.dim() == 4
    _check_supported(attention_mask, kwargs)
    attn_mask = _boolean(attention_mask) if complete else None
    lengths = None if complete else _lengths(query, causal, kwargs)
    with_weights = kwargs.get("output_attentions") or kwargs.get(WITH_WEIGHTS, False)
    position_bias = kwargs.get("position_bias")
    fused = (
        not (complete and attn_mask is None)
        and not with_weights
        and key.shape == value.shape
        and key.shape[:2] == query.shape[:2]
    )
    relative_bias = None
    if fused and position_bias is not None:
        relative_bias, fused = _relative_bias(module, query, key, position_bias)
    check(
        fused or position_bias is None or isinstance(position_bias, Tensor),
        _WHERE,
        "position_bias",
        "a T5RelativeBias with grouped heads, output_attentions or an additive 4-D mask",
        "a dense tensor with these",
        "Look the table up: position_bias [1, H, Tq, Tk].",
        UnsupportedError,
    )
    if lengths is not None:
        check(
            fused,
            _WHERE,
            "cu_seq_lens_q",
            "a value with grouped heads, output_attentions or an unknown position_bias",
            "None with these",
            "Pad the batch instead of packing it.",
            UnsupportedError,
        )
        out = attention_varlen(
            # Not query[0]: its backward copies the gradient into a tensor of zeros.
            query.squeeze(0).transpose(0, 1),
            key.squeeze(0).transpose(0, 1),
            value.squeeze(0).transpose(0, 1),
            *lengths,
            key_mask=None if attention_mask is None else attention_mask[0],
            is_causal=causal,
            dropout_p=dropout,
            scale=scaling,
            relative_bias=relative_bias,
        )
        return out[None], None
    if fused:
        out = attention(
            query,
            key,
            value,
            key_mask=None if complete else attention_mask,
            attn_mask=attn_mask,
            is_causal=causal and not complete,
            dropout_p=dropout,
            scale=scaling,
            relative_bias=relative_bias,
        )
        return out.transpose(1, 2), None

    mask, dead = attention_mask, None
    if not complete:
        mask, dead = _complete_mask(query, key, attention_mask, causal, always=with_weights)
    weights = None
    if with_weights:
        if not torch.compiler.is_compiling():
            logger.warning_once(
                "output_attentions: fused attention computes no attention weights, so "
                "attn_implementation='fastplm' computes these layers like 'eager' instead."
            )
        out, weights = _attention_with_weights(
            query, key, value, mask, dropout, scaling, position_bias
        )
    else:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal=causal, **kwargs
        )
    if dead is not None:
        out = out.masked_fill(dead.transpose(1, 2), 0.0)
    return out, weights


def _boolean(mask: Tensor | None) -> Tensor | None:
    """A 4-D mask as a boolean one; None if it is additive, or if to know that takes a sync.

    Masks of a floating dtype are added to the scores. Of a few values, 0 and the lowest of the
    dtype or -inf, they say the same as a boolean one. Only on a CPU, outside of a trace, the
    values can be looked at.
    """
    if mask is None or mask.dtype is torch.bool:
        return mask
    if mask.requires_grad or not values_are_known(mask):
        return None
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool((hidden | (mask == 0)).all()) else None


def _check_supported(mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                message(
                    _WHERE,
                    name,
                    "a value",
                    "None in this version",
                    "Use attn_implementation='eager' or 'sdpa' for this call.",
                )
            )
    if mask is not None and mask.dim() not in (2, 4):
        raise UnsupportedError(
            message(
                _WHERE,
                "attention_mask",
                f"{mask.dim()} dimensions",
                "bool [B, Tk] or [B, 1 or H, Tq, Tk]",
                "Pass the model a mask [B, T], True or 1 for tokens.",
            )
        )
    if mask is not None and mask.dim() == 4 and mask.dtype is not torch.bool:
        fix = "Pass mask.bool() if 1 is to attend."
        check_dtype(_WHERE, "attention_mask", mask, FLOATING, fix)


def _lengths(
    query: Tensor, causal: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, int, int] | None:
    """(cu_seqlens of queries and keys, max_seqlen of both); None if they are not packed."""
    rows = kwargs.get(ROWS)
    if rows is not None:
        return rows.lengths(causal)
    if all(kwargs.get(name) is None for name in _PACKED):
        return None
    for name in _PACKED:
        check(
            kwargs.get(name) is not None,
            _WHERE,
            name,
            "None",
            f"a value, because others of {', '.join(_PACKED)} have one",
            "Packed sequences need all four.",
        )
    check(
        query.shape[0] == 1,
        _WHERE,
        "cu_seq_lens_q",
        f"a value with a batch of {query.shape[0]}",
        "a batch of one row that holds all sequences",
        "Concatenate the sequences: input_ids [1, N], with position_ids that start at 0 in each.",
    )
    offsets_q, offsets_k, longest_q, longest_k = (kwargs[name] for name in _PACKED)
    return offsets_q, offsets_k, longest_q, longest_k


def _relative_bias(
    module: nn.Module, query: Tensor, key: Tensor, position_bias: Any
) -> tuple[T5RelativeBias | None, bool]:
    """(the bias of the fused op that equals ``position_bias``, whether it is known).

    Transformers' T5 passes a dense ``position_bias`` [1, H, Tq, Tk] to every layer. A layer with a
    table has just computed it. The others get the same tensor; on it, the first layer stores its
    table as an attribute. Cross-attention has no table and gets zeros. A tensor without that
    attribute, for example a copy, is added as a dense bias. (A ``position_bias`` that a caller
    passes to the first layer is ignored; no model of Transformers does that.)
    """
    if isinstance(position_bias, T5RelativeBias):
        return position_bias, True
    if position_bias is NO_BIAS:
        return None, True
    owner = type(module)
    if (owner.__module__, owner.__name__) not in _T5_ATTENTION:
        return None, False
    if module.is_decoder and getattr(module, "is_causal", None) is False:
        return None, True
    if query.shape[2] != key.shape[2]:
        # A cache: in a static one, the lengths do not determine the positions of the queries.
        return None, False
    note = getattr(position_bias, _NOTE, None)
    if note is not None:
        return note, True
    table = getattr(module, "relative_attention_bias", None)
    # A subclass (a parametrized or adapted table) may look up something other than its weight.
    if type(table) is not nn.Embedding or table.weight.device != query.device:
        return None, False
    bias = T5RelativeBias(
        # A copy for the later layers: FSDP frees the weight itself after this layer.
        table.weight.clone(),
        bidirectional=not module.is_decoder,
        max_distance=module.relative_attention_max_distance,  # type: ignore[arg-type]
    )
    # Reentrant checkpointing runs forward without gradients, and again in backward on copies
    # without the attribute. Both must use the same attention, or their dropout would differ.
    if torch.is_grad_enabled() or not module.training:
        setattr(position_bias, _NOTE, bias)
    return bias, True


def _complete_mask(
    query: Tensor, key: Tensor, key_mask: Tensor | None, causal: bool, always: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(mask bool [B|1, 1, Tq|1, Tk] or None, rows [B|1, 1, Tq|1, 1] without any key or None).

    None = ``is_causal`` of Transformers' SDPA function is enough. It aligns the mask at the top
    left, which is only right if Tq = Tk.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    mask = None if key_mask is None else key_mask[:, None, None, :]
    if causal and seqlen_q > 1 and (always or mask is not None or seqlen_q != seqlen_k):
        ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
        past = ones.tril(seqlen_k - seqlen_q)[None, None]
        mask = past if mask is None else mask & past
    if mask is None:
        return None, None
    dead = ~mask.any(-1, keepdim=True)
    # Some SDPA kernels return NaN for a row without keys: it attends to all, and is set to 0 later.
    return mask | dead, dead


def _attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    position_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale  # [B, H, Tq, Tk]
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = nn.functional.dropout(scores.softmax(-1), dropout)
    return torch.matmul(weights, value).transpose(1, 2), weights


AttentionInterface.register(NAME, fastplm_attention_forward)
AttentionMaskInterface.register(NAME, fastplm_mask)
