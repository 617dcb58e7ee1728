"""``attn_implementation="fastplm"``: fused attention for Hugging Face models.

Importing this module registers the name with Transformers::

    import fastplm.hf
    model = AutoModel.from_pretrained(path, attn_implementation="fastplm")

Two functions are registered. Transformers calls ``fastplm_mask`` once per forward to convert the
user's padding mask into one that also says whether attention is causal. It calls
``fastplm_attention_forward`` in every layer. A model whose own attention would ignore the name, or
misread such a mask, is refused when it is built (see ``attention_of``): Transformers does that for
"sdpa" and "flash_attention_2", but not for names that others register.

What runs a call:

=================================================================== ============================
padding, causality, dropout, packed sequences (``cu_seq_lens_q``,   the fused op
…), T5's position bias (from its table, see ``_relative_bias``),
sliding windows: no mask [Tq, Tk] is made, but in a traced program
boolean 4-D masks, of the user or of Transformers (of a prefix,
blocks); for BERT's own masks see ``fastplm_mask``
grouped heads (those of packed rows and windows are repeated); a    Transformers' SDPA function,
position bias of unknown origin or with a cache;                    with an equivalent mask
4-D masks that are added to the scores (see ``_boolean``);
on a CPU one query with few keys, where it is faster
what neither of them supports                                       an error
=================================================================== ============================

If a boolean mask lets a row attend to nothing, the row is 0; other implementations of Transformers
give an average of the values, or NaN. If a causal model gets ``position_ids`` that restart and no
``attention_mask``, Transformers makes a 4-D mask of blocks; with ``cu_seq_lens_q``, pass an
``attention_mask`` of ones. A model that reads more of a row than its attention does (positions
that nobody gives, the first token of a row, the states of an encoder) refuses packed rows; the
classes of ``fastplm.models`` take them.

No function changes Python state that outlives a forward, as a compiled model would recompile.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    AttentionMaskInterface,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_overlay,
    sliding_window_overlay,
)
from transformers.utils import logging

from fastplm._checks import INTEGER, check_dtype, check_tensor
from fastplm._modes import is_eager, is_traced, values_are_known
from fastplm.errors import UnsupportedError, fail
from fastplm.nn._rows import kind_of
from fastplm.ops import T5RelativeBias, attention, attention_varlen
from fastplm.ops._attention_call import Window, made_for_one_forward, share_bits
from fastplm.ops.attention import plain_attention

logger = logging.get_logger(__name__)
NAME = "fastplm"
#: The name for ``output_attentions`` in GPT-2, which does not pass that one to its attention.
WITH_WEIGHTS = "with_attention_weights"
_WHERE = "attn_implementation='fastplm'"
#: The argument with which the models of fastplm pass ``models._ragged.Rows`` to attention.
ROWS = "rows"
# Arguments of some models' attention that change its result and are not supported here.
_UNSUPPORTED = ("softcap", "s_aux", "head_mask", "cache", "indices", "block_indices")
#: The bounds of packed sequences, in the order of the arguments of ``ops.attention_varlen``.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_PACKED = frozenset(PACKED)
# Arguments that change what a call needs. Most calls have none of them.
_SPECIAL = frozenset(
    (*_UNSUPPORTED, *PACKED, ROWS, "output_attentions", WITH_WEIGHTS, "position_bias")
)
# The layers with a known ``position_bias``. Similar classes (UDOP) compute it in another way.
_T5_ATTENTION = (
    ("transformers.models.t5.modeling_t5", "T5Attention"),
    ("transformers.models.mt5.modeling_mt5", "MT5Attention"),
    ("fastplm.models.t5", "T5Attention"),
)
#: A ``position_bias`` of zeros. (With None, T5 would create a tensor.)
NO_BIAS: Any = object()
#: True while a drop-in model is built whose attention implementation is chosen. Its parts, which
#: still have classes of Transformers, take that implementation without the check of ``_checked``.
IS_CHOSEN = ContextVar("IS_CHOSEN", default=False)
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
) -> Tensor:
    """The mask for ``fastplm_attention_forward``, computed without a sync.

    Args:
        batch_size, q_length, kv_length: sizes of the attention.
        q_offset, kv_offset: positions of the first query and key; a tensor with a static cache.
        mask_function: one of Transformers: causal, bidirectional or composed.
        attention_mask: bool [B, S], True = attend, or None; or a full mask [B, Tq, Tk], 0 = hidden,
            of any dtype, as Google's BERT and the models of Transformers 4 take it.
        kwargs: other arguments of ``transformers.masking_utils.sdpa_mask``.

    Returns:
        A bool mask, True = attend, whose number of dimensions says whether attention is causal: a
        module may lack ``is_causal``, or have a wrong one. [B, 1, 1, Tk]: every query attends to
        the same keys. [B, 1, 1, 1, Tk]: query i attends to those of them with j <= i + (Tk - Tq).
        Both have the shape [1, …, 0] if no key is masked. With a dimension more, expanded to W: the
        same, but among the W keys up to its own place (causal), or up to W - 1 places away.
        [B, 1, Tq, Tk]: any other pattern, or a model that asks for the full mask.
    """
    if attention_mask is not None and attention_mask.dim() == 3:
        return as_booleans(_WHERE, attention_mask)[:, None]
    if attention_mask is not None and attention_mask.dim() >= 5:  # made here, for `generate`
        return attention_mask
    if attention_mask is not None:
        attention_mask = of_batch(attention_mask, batch_size)
    base, width = _without_window(mask_function)
    causal, known = base is causal_mask_function, isinstance(q_offset, int)
    known = known and isinstance(kv_offset, int)
    bottom_right = known and q_offset + q_length == kv_offset + kv_length
    # Whether the queries of a window stand where the op has them.
    in_place = bottom_right if causal else known and q_offset == kv_offset
    if in_place and width >= max(q_length, kv_length):
        width = 0  # it hides nothing
    two_dimensional = attention_mask is None or attention_mask.dim() == 2
    # A traced program with one query may later run with more.
    one_query = q_length == 1 and not torch.jit.is_tracing()
    if causal:
        short = one_query or bottom_right and kwargs.get("allow_is_causal_skip", True)
    else:
        short = base is bidirectional_mask_function and kwargs.get(
            "allow_is_bidirectional_skip", True
        )
    if two_dimensional and short and (in_place or not width):
        key_mask = _key_window(attention_mask, kv_length, kv_offset)
        device = kwargs.get("device", "cpu")
        if causal and not bottom_right:
            # One query in a static cache: the keys after it are masked like padding.
            seen = torch.arange(kv_length, device=device) + kv_offset <= q_offset
            # Used in the last step, too, where all are True: so one graph serves all steps.
            key_mask = seen.expand(batch_size, -1) if key_mask is None else key_mask & seen
        elif key_mask is None or (
            key_mask.device.type == "cpu" and is_eager(key_mask) and bool(key_mask.all())
        ):
            key_mask = torch.ones(1, 0, dtype=torch.bool, device=device)
        keys = key_mask[:, None, None] if not causal or one_query else key_mask[:, None, None, None]
        if width:
            keys = key_mask[:, None, None, None, None]
            keys = keys[:, None] if causal else keys
            keys = keys.expand(*[-1] * (4 + causal), width, -1)
        return made_for_one_forward(keys) if keys.shape[-1] else keys
    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    sizes = batch_size, q_length, kv_length, q_offset, kv_offset
    return sdpa_mask(*sizes, mask_function, attention_mask, **kwargs)


def _without_window(mask_function: Any) -> tuple[Any, int]:
    """A sliding window of Transformers as (the mask function without it, the W of
    ``fastplm_mask``); any other function and 0, as all are in a trace."""
    parts = None if is_traced() else _made_by(and_masks, mask_function, causal_mask_function)
    if parts is not None and len(parts) == 2:
        for base, overlay, more in (
            (causal_mask_function, sliding_window_overlay, 0),
            (bidirectional_mask_function, sliding_window_bidirectional_overlay, 1),
        ):
            size = _made_by(overlay, parts[0], 1) if parts[1] is base else None
            if isinstance(size, int):
                return base, size + more
    return mask_function, 0


def _made_by(maker: Callable[..., Any], function: Any, example: Any) -> Any:
    """What ``maker`` was called with to make a function, whose code that of an example is; else
    None."""
    if getattr(function, "__code__", None) is not maker(example).__code__:
        return None
    return function.__closure__[0].cell_contents


def of_batch(mask: Tensor | None, batch: int) -> Tensor | None:
    """A padding mask [B, T]; the caller may give one [1, T] for all sequences."""
    if mask is None or mask.dim() != 2 or mask.shape[0] != 1:
        return mask
    return mask.expand(batch, -1)


def as_booleans(where: str, mask: Tensor) -> Tensor:
    """A full mask, 0 = hidden, as booleans.

    Raises:
        ArgumentValueError: numbers below 0, as of a mask that is to be added to the scores.
    """
    if mask.dtype is torch.bool:
        return mask
    known, right = values_are_known(mask), (mask >= 0).all()
    if not known:
        torch._assert_async(right, "attention_mask: a number below 0")
    elif not right:
        fix = "Pass mask == 0 if it was to be added to the scores."
        fail(where, "attention_mask", f"{mask.min().item()}", "1 = attend and 0 = hidden", fix)
    return mask.bool()


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
        module: the layer; its ``is_causal`` is used if neither the mask nor the argument decides.
        query: [B, H, Tq, D].
        key, value: [B, H, Tk, D], or with fewer heads.
        attention_mask: from ``fastplm_mask``; or None or bool [B, Tk], combined with ``is_causal``;
            or a full 4-D mask, one for all heads or for each: booleans or integers, True or 1 =
            attend, or floating-point numbers that are added to the scores.
        dropout: probability of dropping an attention weight, 0 outside training. Every call draws
            its seed from PyTorch's generator, which ``torch.manual_seed`` sets and activation
            checkpointing restores. The sample indices are those of ``rows`` (fastplm's models), or
            0 ... B - 1.
        scaling: factor on the scores.
        is_causal: query i may attend to keys j <= i + (Tk - Tq); ignored if the mask says whether
            attention is causal.
        kwargs: supported are ``position_bias`` (dense, or a ``T5RelativeBias`` for the fused op)
            and ``output_attentions``. For sequences packed into a batch of one: ``cu_seq_lens_q``,
            ``cu_seq_lens_k``, ``max_length_q``, ``max_length_k``; with a 4-D mask, both count.
            ``window`` as in ``ops.attention``, in place of the mask's. (What a model calls
            ``sliding_window`` has several meanings; its mask has the one that counts.)

    Returns:
        The output [B, Tq, H, D], and the weights [B, H, Tq, Tk] if ``output_attentions``, else
        None.

    Raises:
        UnsupportedError: an argument that changes the result and is not supported, or neither
            mask, argument nor module says whether attention is causal.
        ArgumentValueError, ArgumentTypeError: packed sequences or a mask that do not fit.
    """
    _check_supported(attention_mask, kwargs)
    if attention_mask is not None and attention_mask.dtype is not torch.bool:
        if attention_mask.dim() == 4 and not attention_mask.is_floating_point():
            attention_mask = as_booleans(_WHERE, attention_mask)
    if is_causal is None and query.shape[2] == 1:
        is_causal = False  # a single query is the last one: it attends to all keys in any case
    given_mask = attention_mask
    causal, attention_mask, window = _meaning(module, attention_mask, is_causal)
    window = kwargs.get("window", window)
    if (
        query.is_cpu
        and window is None
        and attention_mask is None
        and not dropout
        and not (causal and query.shape[2] > 1)
        and (_SPECIAL.isdisjoint(kwargs) or _says_only_samples(kwargs))
    ):
        plain = plain_attention(query, key, value, scaling)
        if plain is not None:
            return plain.transpose(1, 2).contiguous(), None
    complete = attention_mask is not None and attention_mask.dim() == 4
    lengths = _packing(query, key, causal, kwargs)
    if complete and lengths is not None:
        attention_mask, lengths = _within_texts(query, key, attention_mask, *lengths[:2]), None
    attn_mask = _boolean(attention_mask) if complete else None
    weights_too = kwargs.get("output_attentions") or kwargs.get(WITH_WEIGHTS, False)
    position_bias = kwargs.get("position_bias")
    many, of_key = query.shape[1], max(key.shape[1], 1)
    repeats = window is not None or lengths is not None
    if repeats and many > of_key and many % of_key == 0 and not weights_too:
        # Grouped heads: a mask [Tq, Tk] for PyTorch's function costs more than such copies, and it
        # takes no packed rows.
        key, value = (one.repeat_interleave(many // of_key, 1) for one in (key, value))
    fused = (
        not (complete and attn_mask is None)
        and not weights_too
        and key.shape == value.shape
        and key.shape[:2] == query.shape[:2]
    )
    relative_bias = None
    if fused and position_bias is not None:
        relative_bias, fused = _relative_bias(module, query, key, position_bias)
    if not fused:
        check_unfused(position_bias, lengths is not None)
        return _unfused(
            *(module, query, key, value, attention_mask, dropout, scaling, causal, weights_too),
            window,
            kwargs,
        )
    rows = kwargs.get(ROWS)
    options: dict[str, Any] = {
        "is_causal": causal and not complete,
        "dropout_p": dropout,
        "scale": scaling,
        "relative_bias": relative_bias,
        "window": window,
        "sample_index": None if rows is None or not dropout else rows.sample_index,
        "seed": seed_of_layer(rows, module, causal) if dropout and not complete else None,
    }
    if attention_mask is not None and not complete:
        keys = of_batch(attention_mask, query.shape[0]) if lengths is None else attention_mask[0]
        options["key_mask"] = keys
        share_bits(given_mask, keys)  # type: ignore[arg-type]
    if lengths is None:
        out = attention(query, key, value, attn_mask=attn_mask, **options)
        return out.transpose(1, 2).contiguous(), None  # some models take views of it
    # Not query[0]: its backward copies the gradient into a tensor of zeros.
    query, key, value = [one.squeeze(0).transpose(0, 1) for one in (query, key, value)]
    return attention_varlen(query, key, value, *lengths, **options)[None], None


def seed_of_layer(rows: Any, module: nn.Module, causal: bool) -> Tensor | None:
    """The seed of a layer that its model has drawn (``Rows``); None = the op draws one."""
    if rows is None or rows.seeds is None:
        return None
    number = rows.number_of_layer
    number = getattr(module, "layer_idx", None) if number is None else number
    return None if number is None else rows.seeds[number, int(causal)]


def check_unfused(position_bias: Any, packed: bool) -> None:
    """Raise an error for what only the fused op supports, in a call that cannot use it."""
    if position_bias is not None and not isinstance(position_bias, Tensor):
        got = "a T5RelativeBias with grouped heads, output_attentions or an additive 4-D mask"
        fix = "Look the table up: position_bias [1, H, Tq, Tk]."
        fail(_WHERE, "position_bias", got, "a dense tensor with these", fix, UnsupportedError)
    if packed:
        got = "a value with output_attentions or an unknown position_bias"
        fix = "Pad the batch instead of packing it."
        fail(_WHERE, "cu_seq_lens_q", got, "None with these", fix, UnsupportedError)


def _unfused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    causal: bool,
    weights_too: bool,
    window: Window | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Run ``fastplm_attention_forward`` for a call that the fused op does not support."""
    dead = None
    if mask is not None and mask.is_floating_point():
        mask = in_dtype_of(query, mask)
    if mask is None or mask.dim() != 4:
        mask, dead = _complete_mask(query, key, mask, causal, window, always=weights_too)
    weights = None
    if weights_too:
        if not torch.compiler.is_compiling():
            logger.warning_once(
                "output_attentions: fused attention computes no attention weights, so "
                "attn_implementation='fastplm' computes these layers like 'eager' instead."
            )
        out, weights = _attention_with_weights(
            query, key, value, mask, dropout, scaling, kwargs.get("position_bias")
        )
    else:
        out, _ = sdpa_attention_forward(
            module, query, key, value, mask, dropout, scaling, is_causal=causal, **kwargs
        )
    if dead is not None:
        out = out.masked_fill(dead.transpose(1, 2), 0.0)
    return out, weights


def says_only_keys(mask: Tensor | None) -> bool:
    """Whether a mask masks the same keys for every query, apart from causality."""
    return mask is None or mask.dim() in (2, 5) or _hides_keys(mask)


def _hides_keys(mask: Tensor) -> bool:
    if mask.dim() != 4 or mask.dtype is not torch.bool or not mask.shape[1] == mask.shape[2] == 1:
        return False
    # A traced program with one query may later run with more.
    return mask.shape[3] == 0 or not torch.jit.is_tracing()


def _meaning(
    module: nn.Module, mask: Tensor | None, is_causal: bool | None
) -> tuple[bool, Tensor | None, Window | None]:
    """(whether attention is causal, None or bool [B, Tk] or a full 4-D mask, the window) of a
    layer's call."""
    if mask is not None and mask.dim() > 5:
        causal, width = mask.dim() == 7, mask.shape[-2]
        keys = mask
        while keys.dim() > 2:  # not flattened, as it is expanded
            keys = keys.select(1, 0)
        window = (width - 1, None if causal else width - 1)
        return causal, keys if keys.shape[1] else None, window
    if mask is not None and mask.dim() > 2:
        causal = mask.dim() == 5
        if not causal and not _hides_keys(mask):
            return False, mask, None
        keys = mask.flatten(1, -2).squeeze(1)
        return causal, keys if keys.shape[1] else None, None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        got = f"{'None' if mask is None else 'a mask of keys'} from a {type(module).__name__}"
        expected = "a mask that says whether attention is causal, as this module does not say it"
        fix = "Use attn_implementation='eager', or set its attribute `is_causal`."
        fail(_WHERE, "attention_mask", got, expected, fix, UnsupportedError)
    return bool(is_causal), mask, None


def _boolean(mask: Tensor | None) -> Tensor | None:
    """A 4-D mask as a boolean one; None if it is additive, or if finding out would be a sync.

    Masks of a floating dtype are added to the scores. If all their values are 0, the lowest of the
    dtype or -inf, they mean the same as a boolean mask. The values are read only on a CPU, and
    outside of a trace.
    """
    if mask is None or mask.dtype is torch.bool:
        return mask
    if mask.requires_grad or not values_are_known(mask):
        return None
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool((hidden | (mask == 0)).all()) else None


def in_dtype_of(query: Tensor, mask: Tensor) -> Tensor:
    """An additive mask in the dtype of the scores, whose lowest number stands for lower ones.

    They would be -inf, and a query without any key NaN.
    """
    to = torch.finfo(query.dtype)
    if torch.finfo(mask.dtype).max > to.max:
        mask = mask.clamp(to.min, to.max).where(mask.isfinite(), mask)
    return mask.to(query.dtype)


def _check_supported(mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        # A floating-point tensor, such as attention sinks, may change the scores.
        numbers = isinstance(value, Tensor) and value.dim() > 0 and value.is_floating_point()
        if name in _UNSUPPORTED and value is not None or numbers and name != "position_bias":
            fix = "Use attn_implementation='eager' or 'sdpa' for this call."
            fail(_WHERE, name, "a value", "None in this version", fix, UnsupportedError)
    if mask is not None and mask.dim() not in (2, 4, 5, 6, 7):
        got, expected = f"{mask.dim()} dimensions", "bool [B, Tk] or [B, 1 or H, Tq, Tk]"
        fix = "Pass the model a mask [B, T], True or 1 for tokens."
        fail(_WHERE, "attention_mask", got, expected, fix, UnsupportedError)


def _says_only_samples(kwargs: dict[str, Any]) -> bool:
    """Whether the only special argument is ``rows`` of a padded batch, which only dropout reads."""
    alone = _SPECIAL.intersection(kwargs) == {ROWS} and kwargs[ROWS] is not None
    return alone and kwargs[ROWS].cu_seqlens_of(self_attention=True) is None


def _packing(
    query: Tensor, key: Tensor, causal: bool, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, int, int] | None:
    """(cu_seqlens of queries and keys, max_seqlen of both); None if they are not packed."""
    rows = kwargs.get(ROWS)
    # In a decoder the attention that is not causal is the cross-attention, but for one query and
    # one key, where ``causal`` is False.
    self_attention = causal or (query.shape[2] == 1 and key.shape[2] == 1)
    found = None if rows is None else rows.cu_seqlens_of(self_attention)
    if found is not None:
        return found
    packed: Any = tuple(kwargs.get(name) for name in PACKED)
    if all(one is None for one in packed):
        return None
    for name, one in zip(PACKED, packed, strict=True):
        if one is None:
            expected = f"a value, because others of {', '.join(PACKED)} have one"
            fail(_WHERE, name, "None", expected, "Packed sequences need all four.")
    if query.shape[0] != 1:
        got = f"a value with a batch of {query.shape[0]}"
        expected = "a batch of one row that holds all sequences"
        fix = "Concatenate the sequences: input_ids [1, N], with position_ids from 0 in each."
        fail(_WHERE, "cu_seq_lens_q", got, expected, fix)
    return packed


def _within_texts(
    query: Tensor, key: Tensor, mask: Any, ends_of_query: Tensor, ends_of_key: Tensor
) -> Tensor:
    """A full 4-D mask that also hides the keys of other texts of a packed row."""
    places = (
        torch.bucketize(torch.arange(rows.shape[2], device=rows.device), ends[1:], right=True)
        for rows, ends in ((query, ends_of_query), (key, ends_of_key))
    )
    of_query, of_key = places
    same = of_query[:, None] == of_key
    if mask.dtype is torch.bool:
        return mask & same
    return mask.masked_fill(~same, torch.finfo(mask.dtype).min)


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
    table: Any = getattr(module, "relative_attention_bias", None)
    # A subclass (a parametrized or adapted table) may look up something other than its weight.
    if kind_of(table) is not nn.Embedding or table.weight.device != query.device:
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
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    window: Window | None,
    always: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(mask bool [B|1, 1, Tq|1, Tk] or None, rows [B|1, 1, Tq|1, 1] without any key or None).

    None = ``is_causal`` of Transformers' SDPA function is enough. It aligns the mask at the top
    left, which is only right if Tq = Tk.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    mask = None if key_mask is None else key_mask[:, None, None, :]
    always = always or mask is not None or seqlen_q != seqlen_k
    left, right = window or (None, None)
    # A traced program with one query may later run with more.
    if window or (causal and (torch.jit.is_tracing() or always and seqlen_q > 1)):
        keys = torch.arange(seqlen_k, device=query.device)
        first = seqlen_k - seqlen_q if causal else 0
        distance = keys - torch.arange(seqlen_q, device=query.device)[:, None] - first
        sides = [distance <= most for most in (0 if causal else None, right) if most is not None]
        sides += [] if left is None else [distance >= -left]
        for side in sides:
            mask = side[None, None] if mask is None else mask & side
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
    if (repeats := query.shape[1] // max(key.shape[1], 1)) > 1:  # grouped heads
        key, value = (one.repeat_interleave(repeats, 1) for one in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.matmul(query, key.transpose(2, 3)) * scale  # [B, H, Tq, Tk]
    if position_bias is not None:
        scores = scores + position_bias
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = nn.functional.dropout(scores.softmax(-1), dropout)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


# --- packed rows ----------------------------------------------------------------------------------


#: The labels of a text, by their names in all models; the first two are those of pairs.
LABELS_OF_TEXTS = (
    "next_sentence_label",
    "sentence_order_label",
    "start_positions",
    "end_positions",
)
#: How heads are called that read a text of several choices, and those that read a row as one text.
OF_CHOICES = ("ForMultipleChoice", "DoubleHeadsModel")
_OF_TEXTS = ("ForSequenceClassification", "ForNextSentencePrediction", *OF_CHOICES)
#: How position embeddings are called in models of Transformers.
POSITION_TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")
#: Rotary positions of these kinds depend on the length of the longest text.
_OF_LENGTH = ("dynamic", "longrope")


def packing_of(inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The bounds of packed sequences among the inputs of a model; None if there are none."""
    if _PACKED.isdisjoint(inputs):
        return None
    bounds = {name: inputs.get(name) for name in PACKED}
    return None if all(one is None for one in bounds.values()) else bounds


def check_packed(
    model: nn.Module, inputs: dict[str, Any], bounds: dict[str, Any], sides: bool
) -> None:
    """Check what every model needs of a packed row; no value is read on a GPU.

    Args:
        sides: whether the model has an encoder and a decoder.
    """
    where, first = type(model).__name__, PACKED[0]
    for name, one in bounds.items():
        if one is None:
            expected = f"a value, because others of {', '.join(PACKED)} have one"
            fail(where, name, "None", expected, "Packed sequences need all four.")
    for name in PACKED[:2]:
        check_tensor(where, name, bounds[name], ndim=1)
        check_dtype(where, name, bounds[name], INTEGER)
        if bounds[name].shape[0] < 2:
            fail(where, name, "no text", "the borders of one or more", "Pass [0, …, N].")
    fix = "Pass the padded batch and its attention_mask: its padding is left out."
    expected = "None with an encoder, as it says the borders of one side only"
    if sides or inputs.get("encoder_hidden_states") is not None:
        fail(where, first, "a packed row", expected, fix, UnsupportedError)
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    dims = 2 if inputs.get("input_ids") is not None else 3
    if isinstance(given, Tensor) and (given.shape[0] != 1 or given.dim() != dims):
        got = f"a value with a batch of {given.shape[0]}, of shape {tuple(given.shape)}"
        expected = "a batch of one row that holds all sequences"
        fix = "Concatenate the sequences: input_ids [1, N], with position_ids from 0 in each."
        fail(where, first, got, expected, fix)
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() != 2:
        got, fix = f"{mask.dim()} dimensions with {first}", "Leave one of the two out."
        fail(where, "attention_mask", got, "None or [1, N]", fix, UnsupportedError)
    query, key = (bounds[name] for name in PACKED[:2])
    if query is not key:
        same = query.shape == key.shape
        if same and values_are_known(query):
            same = bool((query == key).all())
        elif same:
            torch._assert_async((query == key).all(), "cu_seq_lens_k is not cu_seq_lens_q")
        if not same:
            fix = "Pass one tensor as both."
            fail(where, PACKED[1], "other borders", f"those of {first}", fix, UnsupportedError)


def has_name(model: nn.Module, ends: tuple[str, ...]) -> bool:
    return any(kind.__name__.endswith(ends) for kind in type(model).__mro__)


class CheckCall:
    """A hook before the forward of a model that has only the attention of fastplm: packed rows are
    refused where something else than attention would have to know where a text ends."""

    def __init__(self, kind: Any) -> None:
        self.names = (*inspect.signature(kind.forward).parameters,)  # Dynamo cannot ask for them

    def __call__(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bounds, ours = packing_of(kwargs), hasattr(model, "_takes_rows")
        if bounds is None or ours or model.config._attn_implementation != NAME:
            return
        where, takes, first = type(model).__name__, self.names, PACKED[0]
        inputs = dict(zip(takes, (model, *args))) | kwargs  # noqa: B905
        check_packed(model, inputs, bounds, "decoder_input_ids" in takes)
        fix = "Take the class of fastplm.models, or pass the padded batch and its attention_mask."
        texts, labels = bounds[first].shape[0] - 1, inputs.get("labels")
        asked = any(inputs.get(name) is not None for name in LABELS_OF_TEXTS)
        asked = asked or any(name in takes for name in LABELS_OF_TEXTS[:2])
        if texts != 1 and (asked or has_name(model, _OF_TEXTS)):
            got = f"a packed row of {texts} texts"
            if isinstance(labels, Tensor):
                got += f", with labels of shape {tuple(labels.shape)}"
            expected = "one text, as a head of this class reads one a row"
            fail(where, first, got, expected, fix, UnsupportedError)
        if getattr(model.config, "token_dropout", False):
            expected = "None, as the share of masked tokens (token_dropout) is that of a row"
            fail(where, first, "a packed row", expected, fix, UnsupportedError)
        if any(isinstance(module, nn.Conv1d) for module in model.modules()):
            expected = "None, as a convolution or a state of this model runs through a row"
            fail(where, first, "a packed row", expected, fix, UnsupportedError)
        if inputs.get("position_ids") is None and _counts_rows(model):
            if "position_ids" not in takes:
                expected = "None, as the positions of this model count through a row"
                fail(where, first, "a packed row", expected, fix, UnsupportedError)
            fix = "Pass those of each text, as DataCollatorWithFlattening returns them."
            fail(where, "position_ids", "None", "int64 [1, N] with packed sequences", fix)


def _counts_rows(model: Any) -> bool:
    """Whether positions that are not given depend on the whole row."""
    said = getattr(model.config, "rope_parameters", None) or {}
    kinds = [said, *(one for one in said.values() if isinstance(one, dict))]
    if any(one.get("rope_type") in _OF_LENGTH for one in kinds):
        return True
    return any(path.rpartition(".")[2] in POSITION_TABLES for path, _ in model.named_modules())


# --- which models may take the name ---------------------------------------------------------------


def attention_of(kind: type) -> str:
    """How the attention of a model class is chosen, from the source of its modules.

    Returns:
        "interface": by Transformers' attention interface; "own": the class computes its own, and
        would ignore a name or misread the mask that goes with it; "none": it has no attention.
    """
    modules = [base.__module__ for base in kind.__mro__ if issubclass(base, PreTrainedModel)]
    modules.remove(PreTrainedModel.__module__)
    if any(module.startswith("fastplm.") for module in modules):
        return "interface"
    # By source, as no behaviour says it before a forward: ``_supports_attention_backend`` is False
    # of 517 classes of Transformers 5.23 that do call the interface, and True of 13 that do not.
    # Modules of Transformers first: the user's module may contain other, unrelated attention.
    modules.sort(key=lambda module: not module.startswith("transformers."))
    for found in (*map(_attention_in, modules), *map(_attention_of_parts, modules)):
        if found != "none":
            return found
    return "none"


@functools.cache
def _attention_in(module: str) -> str:
    """``attention_of`` for one Python module, from its source, which Transformers reads, too."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # there is no source, as of a class written in a shell
        return "none"
    # Some have both, as BigBird-Pegasus, whose encoder adds the mask to scores of its own.
    if ".get_interface(" in source and "attention_scores + attention_mask" not in source:
        return "interface"
    own = re.search(r"^class \w*Attention\w*\([^)]*\bModule\b", source, re.MULTILINE)
    return "own" if own else "none"


def _attention_of_parts(module: str) -> str:
    """``attention_of`` for the models that a Python module imports, as parts of its own models."""
    used = vars(sys.modules[module]) if module in sys.modules else {}
    # A part that is built by an Auto class gets the name from its configuration.
    if any(name.startswith("AutoModel") for name in used):
        return "interface"
    kinds = [one for one in used.values() if isinstance(one, type)]
    parts = {one.__module__ for one in kinds if issubclass(one, PreTrainedModel)}
    found = {_attention_in(part) for part in parts - {module, PreTrainedModel.__module__}}
    return next((one for one in ("own", "interface") if one in found), "none")


def _checked(transformers_own: Callable[..., str]) -> Callable[..., str]:
    """Add a check of "fastplm" to Transformers' check, which knows only Transformers' names."""

    @functools.wraps(transformers_own)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        if requested_attention == NAME and not IS_CHOSEN.get():
            name, attention = type(self).__name__, attention_of(type(self))
            if attention == "own":
                expected = (
                    "a name that this model knows: its attention does not go through Transformers' "
                    "attention interface, and would ignore this one or misread its masks"
                )
                fix = "Leave attn_implementation out, or use 'eager'."
                fail(name, "attn_implementation", repr(NAME), expected, fix, UnsupportedError)
            if attention == "none":
                logger.warning_once(
                    f"attn_implementation={NAME!r} changes nothing in {name}: it has no attention"
                )
            elif not any(isinstance(hook, CheckCall) for hook in self._forward_pre_hooks.values()):
                self.register_forward_pre_hook(CheckCall(type(self)), with_kwargs=True)
        return transformers_own(self, requested_attention, is_init_check)

    return get_correct_attn_implementation


# Transformers calls this when a model is built or its attention is set. It has no hook for it, and
# a check in the first forward would come after a training has begun to load its data.
PreTrainedModel.get_correct_attn_implementation = _checked(
    PreTrainedModel.get_correct_attn_implementation
)
AttentionInterface.register(NAME, fastplm_attention_forward)
AttentionMaskInterface.register(NAME, fastplm_mask)
