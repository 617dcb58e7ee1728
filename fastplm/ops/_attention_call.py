"""The arguments of ``fastplm::attention_fwd``, and what its backends on a CPU share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._checks import FLOATING, check_number, check_tensor
from fastplm._declare import Arg, Size
from fastplm._modes import is_traced, needs_dispatch
from fastplm.errors import ArgumentTypeError, fail, shown
from fastplm.reference.attention import T5RelativeBias, dropout_threshold, t5_buckets

_threshold = functools.lru_cache(dropout_threshold)
#: Limits of the dropout's counter layout (``reference.attention.dropout_keep_mask``).
_MAX_DROPOUT_KEYS = 2**20
_MAX_DROPOUT_HEADS = 2**12
#: Beside a window the kernels count in 32 bits.
_MAX_WINDOW = 2**30

_KEY = Arg("[B, H, Tk, D]", "query", packed="[Nk, H, D]")
_ENDS = Arg("[B + 1 > 0]", (torch.int32,), "Pass pad(lengths.cumsum(0), (1, 0)).int().")
_MASK_FIX = "Pass one bool for each key, attention_mask.bool(); causality is is_causal=True."
_ATTN_MASK_FIX = (
    "Pass bools, True = attend: mask[:, None] of [B, Tq, Tk], mask == 0 of added values."
)


class Call(NamedTuple):
    """Both layouts: a ragged call has ``cu_seqlens``, a dense one does not."""

    query: Annotated[Tensor, Arg("[B, H, Tq, D]", packed="[Nq, H, D]")]
    key: Annotated[Tensor, _KEY]
    value: Annotated[Tensor, _KEY]
    key_mask: Annotated[Tensor | None, Arg("[B, Tk]", (torch.bool,), _MASK_FIX, packed="[Nk]")]
    # With strides of 0 where it is broadcast; see ``expanded_mask``.
    attn_mask: Annotated[Tensor | None, Arg("[B, H, Tq, Tk]", (torch.bool,), _ATTN_MASK_FIX)]
    cu_seqlens_q: Annotated[Tensor | None, _ENDS]
    cu_seqlens_k: Annotated[Tensor | None, _ENDS]
    max_seqlen_q: Size
    max_seqlen_k: Size
    bias_weight: Annotated[
        Tensor | None, Arg("[buckets, H]", FLOATING, name="relative_bias.weight")
    ]
    bias_bidirectional: bool
    bias_max_distance: int
    seed: Annotated[Tensor | None, Arg("[]", (torch.int64,))]
    sample_index: Annotated[Tensor | None, Arg("[B]", (torch.int64,))]
    dropout_p: float
    is_causal: bool
    scale: float
    allow_tf32: bool = False
    side_by_side: bool = False  # the gradients of query, key and value are parts of one tensor
    reorders: bool = False  # cuDNN runs the backward, too, whose sums may come in any order
    # How far from a query its keys may be, see ``attention``; -1: as far as they like.
    window_left: int = -1
    window_right: int = -1

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.numel() - 1
        return self.query.shape[0]

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but scores: nothing is hidden, added or dropped."""
        causal = self.is_causal and self.query.shape[2] != 1  # the last query sees every key
        return not causal and self.is_at_most_causal

    @property
    def is_at_most_causal(self) -> bool:
        """Whether nothing else than later keys is hidden, and nothing added or dropped."""
        return (
            self.key_mask is None
            and self.attn_mask is None
            and self.cu_seqlens_q is None
            and self.bias_weight is None
            and self.seed is None
            and not self.has_window
        )

    @property
    def has_window(self) -> bool:
        return self.window_left >= 0 or self.window_right >= 0

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that the two references share."""
        bias = None
        if self.bias_weight is not None:
            bias = T5RelativeBias(self.bias_weight, self.bias_bidirectional, self.bias_max_distance)
        return dict(
            key_mask=self.key_mask,
            is_causal=self.is_causal,
            dropout_p=self.dropout_p,
            scale=self.scale,
            relative_bias=bias,
            seed=self.seed,
            sample_index=self.sample_index,
            window=tuple(None if one < 0 else one for one in (self.window_left, self.window_right)),
        )

    def check(self, where: str) -> None:
        if self.cu_seqlens_q is not None:
            for name in ("max_seqlen_q", "max_seqlen_k"):
                expected, fix = "the length of the longest sequence", "Pass it, or any upper bound."
                check_number(where, name, getattr(self, name), 0, math.inf, expected, fix)
        if self.bias_weight is not None:
            self._check_bias(where, self.bias_weight.shape[0])
        if self.seed is not None:
            check_dropout_counters(where, self.dropout_p, self.query.shape[1], self.max_seqlen_k)

    def _check_bias(self, where: str, buckets: int) -> None:
        least = 4 if self.bias_bidirectional else 2
        if buckets < least or buckets % 2 != 0:
            fail(
                where,
                "relative_bias.weight",
                f"{buckets} buckets",
                f"an even number, at least {least}",
                "T5 has 32: half of those of a side are exact distances.",
            )
        if self.bias_max_distance <= buckets // least:
            fail(
                where,
                "relative_bias.max_distance",
                self.bias_max_distance,
                f"more than {buckets // least}, the distances with a bucket of their own",
                "T5 has 128.",
            )

    def check_lengths(self) -> None:
        """The values of ``cu_seqlens``, on the CPU, where looking at them waits for nothing."""
        for name, cu_seqlens, rows, longest in (
            ("q", self.cu_seqlens_q, self.query, self.max_seqlen_q),
            ("k", self.cu_seqlens_k, self.key, self.max_seqlen_k),
        ):
            if (
                type(cu_seqlens) is Tensor
                and cu_seqlens.is_cpu
                and not torch.compiler.is_compiling()
                and not torch._C._functorch.is_batchedtensor(cu_seqlens)
            ):
                check_lengths_on_cpu(name, cu_seqlens, rows.shape[0], longest)

    @property
    def dropout_threshold(self) -> int:
        """Random bytes below it drop a probability."""
        return 0 if self.seed is None else _threshold(self.dropout_p)

    @property
    def buckets(self) -> Tensor | None:
        """int64 [2 * max_distance + 1]: the bucket of each distance."""
        if self.bias_weight is None:
            return None
        buckets, device = self.bias_weight.shape[0], self.query.device
        return _bucket_table(buckets, self.bias_bidirectional, self.bias_max_distance, device)


class Saved(NamedTuple):
    call: Call
    out: Tensor | None  # None where the backward computes it again
    stats: Tensor
    need_bias_weight: bool


def check_dropout_counters(where: str, dropout_p: float, heads: int, longest: int) -> None:
    """The counters of dropout have room for so many heads and keys."""
    if longest > _MAX_DROPOUT_KEYS or heads >= _MAX_DROPOUT_HEADS:
        fail(
            where,
            "dropout_p",
            f"{dropout_p} with {longest} keys and {heads} heads",
            f"at most {_MAX_DROPOUT_KEYS} keys and fewer than {_MAX_DROPOUT_HEADS} heads",
            "Turn dropout off for such a call.",
        )


def check_lengths_on_cpu(
    name: str, cu_seqlens: Tensor, rows: int, longest: int, where: str = "attention_varlen"
) -> None:
    """Sequences lie one after the other in so many rows, and none is longer than the longest."""
    values = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(values[:-1], values[1:], strict=True)]
    if values[0] != 0 or min(lengths, default=0) < 0 or values[-1] > rows:
        fail(
            where,
            f"cu_seqlens{name and '_'}{name}",
            f"{values[0]} … {values[-1]} with lengths from {min(lengths, default=0)}",
            f"0 first, never decreasing, at most {rows} (the rows of the tensor) last",
            "Build it as pad(lengths.cumsum(0), (1, 0)).",
        )
    if max(lengths, default=0) > longest:
        fail(
            where,
            f"max_seqlen{name and '_'}{name}",
            longest,
            f"at least {max(lengths, default=0)}, the longest sequence",
            "Pass the longest length, or any upper bound.",
        )


#: An attribute of a key mask: what launchers make of it, for all layers of a forward.
BITS = "_fastplm_bits"


def made_for_one_forward(key_mask: Tensor) -> Tensor:
    """Say that a key mask is used in one forward and its backward alone, and does not change there.

    So its bits are made once for all layers and both directions. In a trace nothing is kept.
    """
    if not is_traced():
        setattr(key_mask, BITS, {})
    return key_mask


def share_bits(key_mask: Tensor, view: Tensor) -> None:
    """Let ``view``, which has the same keys, share the bits of ``made_for_one_forward``."""
    bits = None if is_traced() else getattr(key_mask, BITS, None)
    if bits is not None:
        setattr(view, BITS, bits)


def expanded_mask(where: str, mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """``attn_mask`` [Tq, Tk] or with four dimensions, some of them 1, as a view of ``shape``."""
    check_tensor(where, "attn_mask", mask)
    sizes = (1, 1, *mask.shape) if mask.dim() == 2 else mask.shape
    if len(sizes) != 4 or any(size not in (1, full) for size, full in zip(sizes, shape)):  # noqa: B905
        expected = f"[Tq, Tk] or [B or 1, H or 1, Tq, Tk] with [B, H, Tq, Tk] = {tuple(shape)}"
        got = "shape" if len(sizes) == 4 else f"{mask.dim()} dimensions"
        got = f"{got} {tuple(mask.shape)}"
        fail(where, "attn_mask", got, expected, _ATTN_MASK_FIX)
    return mask.expand(shape)


#: (left, right), each None or an int; see ``attention``.
Window = tuple[int | None, int | None]


def window_bounds(
    where: str, window: Window | None, is_causal: bool, longest_q: int, longest_k: int
) -> tuple[int, int]:
    """``window`` as the fields of a ``Call``, without the bounds that hide nothing."""
    if window is None:
        return -1, -1
    expected, fix = "(left, right), each an int of 0 or more or None", "(64, 64) is 129 keys."
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        fail(where, "window", shown(window), expected, fix, ArgumentTypeError)
    found = []
    for side in window:
        if side is not None and (not isinstance(side, int) or isinstance(side, bool)):
            fail(where, "window", window, expected, fix, ArgumentTypeError)
        if side is not None and not 0 <= side < _MAX_WINDOW:
            fail(where, "window", window, expected, fix)
        found.append(-1 if side is None else side)
    left, right = found
    # A traced program serves other sizes, too.
    if isinstance(longest_q, int) and isinstance(longest_k, int) and not is_traced():
        left = -1 if left >= (longest_k if is_causal else longest_q) - 1 else left
        right = -1 if right >= longest_k - 1 else right
    return left, -1 if is_causal else right


def stored_once(mask: Tensor) -> Tensor:
    """An expanded mask with size 1 where it was broadcast, but for its last dimension."""
    return mask[tuple(slice(0, 1 if step == 0 else None) for step in mask.stride()[:-1])]


def projection_layout(tensor: Tensor) -> Tensor:
    """[B, H, T, D] over [B, T, H, D] memory, the dense layout every backend returns."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def lie_side_by_side(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether they are the parts of one product, [N, 3, H, D] or [B, T, 3, H, D]."""
    if not (query.shape == key.shape == value.shape):
        return False
    width = query.shape[-3 if query.dim() == 4 else -2] * query.shape[-1]
    steps = query.stride()
    row = steps[-2] if query.dim() == 4 else steps[0]
    if row != 3 * width or not (steps == key.stride() == value.stride()):
        return False
    begin = query.storage_offset()
    places = (key.storage_offset() - begin, value.storage_offset() - begin)
    storage = query.untyped_storage()._cdata
    return (
        places == (width, 2 * width)
        and key.untyped_storage()._cdata == storage
        and value.untyped_storage()._cdata == storage
    )


def parts_of(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """(query's, key's, value's, bias's) from what a backward with ``side_by_side`` returns."""
    whole, _, _, bias = gradients
    parts = whole.unbind(-3)
    if whole.dim() == 5:
        parts = tuple(one.transpose(1, 2) for one in parts)
    return *parts, bias


def empty_like_projection(tensor: Tensor) -> Tensor:
    if tensor.dim() == 3:
        return tensor.new_empty(tensor.shape)
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty(batch, length, heads, dim).transpose(1, 2)


_BUCKET_TABLES: dict[tuple[Any, ...], Tensor] = {}


def _bucket_table(
    num_buckets: int, bidirectional: bool, max_distance: int, device: torch.device
) -> Tensor:
    return table_on(device, t5_buckets, num_buckets, bidirectional, max_distance)


def table_on(device: torch.device, make: Callable[..., Tensor], *settings: Any) -> Tensor:
    """A table of integers, which ``make(*settings)`` computes on the CPU, on a device, made once.

    A table made inside the capture of a CUDA graph is not kept: it holds nothing until a replay.
    One made under a mode or transform is not kept, either: it may be no tensor outside of it.
    """
    key = make, device, *settings
    table = _BUCKET_TABLES.get(key)
    if table is None:
        with torch.inference_mode(False):
            table = _filled_from_cpu(make(*settings), device)
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not (captured or needs_dispatch((table,))):
            _BUCKET_TABLES[key] = table
    return table


def _filled_from_cpu(values: Tensor, device: torch.device) -> Tensor:
    """A few runs of equal values on a device, without a copy, which no CUDA graph can capture."""
    if device.type == "cpu":
        return values
    result = torch.empty(values.shape, dtype=values.dtype, device=device)
    runs, lengths = values.unique_consecutive(return_counts=True)
    parts = result.split(lengths.tolist())
    for part, value in zip(parts, runs.tolist(), strict=True):
        part.fill_(value)
    return result
