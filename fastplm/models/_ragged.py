"""A padded batch without its padding: which rows are computed, and the way there and back.

B sequences of T tokens become one row of N tokens, sequence after sequence, as
``attn_implementation="fastplm"`` takes them (``cu_seq_lens_q`` and its kin). Positions are flat,
``b * T + t``; -1 is a slot without a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastplm import ops
from fastplm._checks import check, values_are_known, values_exist

_WHERE = "unpad"
#: What ``unpad`` of a model may be; see ``unpadded``.
Unpad: TypeAlias = "bool | int | RaggedBatch | None"


def values_can_be_read(tensor: Tensor) -> bool:
    """Whether a tensor's values can be looked at, be it after waiting for its device."""
    if not values_exist(tensor):
        return False
    if tensor.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return tensor.device.type == "cpu"


@dataclass
class RaggedBatch:
    """The rows of a padded batch [B, T] that are computed.

    Args:
        positions: int64 [N], flat and ascending; -1 in spare slots, which are the last.
        cu_seqlens: int32 [B + 1], sequence b is rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.
        max_seqlen: a bound of the lengths.
        key_mask: bool [N], the rows that may be attended to; None = all.
        batch, seqlen: B and T.
    """

    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    key_mask: Tensor | None
    batch: int
    seqlen: int

    @classmethod
    def of(
        cls, mask: Tensor, kept: Tensor | None = None, capacity: int | None = None
    ) -> RaggedBatch | None:
        """The rows of a batch that are tokens.

        Args:
            mask: [B, T] of any dtype, 0 = padding.
            kept: bool [B, T], rows to be computed although the mask hides them from the others.
            capacity: N, which fixes all shapes and waits for nothing; None counts the rows, for
                which the values have to be read (on CUDA that waits for the device).

        Returns:
            None if nothing would be left out.

        Raises:
            ArgumentValueError: more rows than the capacity, where the values are known. (Elsewhere
                an assertion on the device fails.)
        """
        mask = mask.bool()
        keep = mask if kept is None else mask | kept
        batch, seqlen = keep.shape
        total = batch * seqlen
        lengths = keep.sum(1)
        max_seqlen, hides = seqlen, kept is not None
        if capacity is None:
            count, hidden = _counts_on_cpu(keep, mask)
            if count in (0, total):
                return None
            hides = hidden > 0
        elif capacity >= total:
            return None
        else:
            count, fits = capacity, lengths.sum() <= capacity
            if not values_are_known(keep):
                torch._assert_async(fits, "unpad: a batch has more tokens than that")
            else:
                check(
                    bool(fits),
                    _WHERE,
                    "unpad",
                    f"{capacity} for a batch of {int(lengths.sum())} tokens",
                    "at least the number of tokens",
                    "Raise it, or leave it out to have them counted.",
                )
        positions = _compact(keep, count)
        if values_are_known(keep):
            max_seqlen = int(lengths.max())
        key_mask = values_at(mask.flatten(), positions) & (positions >= 0) if hides else None
        return cls(positions, _offsets(lengths), max_seqlen, key_mask, batch, seqlen)

    @classmethod
    def whole(
        cls, batch: int, seqlen: int, device: torch.device, mask: Tensor | None = None
    ) -> RaggedBatch:
        """All rows, for a model whose other batch is packed; ``mask`` [B, T] may hide some."""
        return cls(
            torch.arange(batch * seqlen, device=device),
            torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen,
            seqlen,
            None if mask is None else mask.bool().flatten(),
            batch,
            seqlen,
        )

    def pack(self, values: Tensor) -> Tensor:
        """[B, T] integers -> [1, N]; those of spare slots are some token's."""
        return values_at(values.flatten(), self.positions)[None]

    def pack_rows(self, rows: Tensor) -> Tensor:
        """[B, T, E] -> [1, N, E], zeros in spare slots."""
        return ops.gather_rows(rows.flatten(0, 1), self.positions)[None]

    def pad(self, rows: Tensor) -> Tensor:
        """[1, N, E] -> [B, T, E], zeros where a row was left out."""
        return ops.gather_rows(rows.squeeze(0), self.slots()).view(self.batch, self.seqlen, -1)

    def slots(self) -> Tensor:
        """int64 [B * T], the packed row of each position, -1 where it was left out."""
        return slots_of(self.positions, self.batch * self.seqlen)

    def token_mask(self) -> Tensor:
        """bool [B, T], the rows that may be attended to."""
        seen = self.positions if self.key_mask is None else self.positions.where(self.key_mask, -1)
        return mask_at(seen, self.batch * self.seqlen).view(self.batch, self.seqlen)

    def key_mask_row(self, always: bool = False) -> Tensor | None:
        """bool [1, N] for a model's ``attention_mask``; None if it hides nothing, or ones."""
        if self.key_mask is None and always:
            # Without one, Transformers takes position ids for a sign of packing and adds a mask.
            return torch.ones_like(self.positions, dtype=torch.bool)[None]
        return None if self.key_mask is None else self.key_mask[None]


@dataclass
class Rows:
    """Which rows the layers of a model compute: the one thing that they are told of a batch.

    It goes through Transformers' layers as the keyword ``rows``, down to the attention.

    Args:
        own: the packed batch of the model; None = it is padded.
        cross: the packed batch of the encoder whose states a decoder attends to.
        last: the rows of the last layer; None = all.
    """

    own: RaggedBatch | None = None
    cross: RaggedBatch | None = None
    last: LastRows | None = None

    def lengths(self, causal: bool) -> tuple[Tensor, Tensor, int, int] | None:
        """(offsets int32 [B + 1] of queries and of keys, bounds of both lengths) of an attention.

        In a decoder that attends to an encoder, the attention that is not causal does that.
        """
        if self.own is None:
            return None
        queries = self.own
        keys = queries if causal or self.cross is None else self.cross
        return queries.cu_seqlens, keys.cu_seqlens, queries.max_seqlen, keys.max_seqlen

    def in_layer(self, index: int) -> LastRows | None:
        """The rows of one layer, if that is the last one and does not compute all of them."""
        return self.last if self.last is not None and self.last.layer == index else None

    def of_others(self) -> Rows:
        """What the layers before the last one are told."""
        return Rows(self.own, self.cross)


@dataclass
class LastRows:
    """The rows of a last layer that anybody reads; its keys and values are of all rows.

    For the attention of that layer it takes the place of ``Rows``.

    Args:
        layer: the ``layer_idx`` of that layer.
        source: int64 [P], rows of the layer's input, flattened; -1 in spare slots.
        cu_seqlens_q: int32 [B + 1], the rows of each sequence among ``source``.
        max_seqlen_q: a bound of their number.
        cu_seqlens_k: int32 [B + 1], the rows of each sequence in the input.
        max_seqlen_k: a bound of their number.
        key_mask: bool [N], None = all.
        rank: int64 [B * T], the place of a flat position in ``source``, -1 if it has none.
    """

    layer: int
    source: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    cu_seqlens_k: Tensor
    max_seqlen_k: int
    key_mask: Tensor | None
    rank: Tensor

    @classmethod
    def of(
        cls,
        layer: int,
        needed: Tensor,
        capacity: int,
        ragged: RaggedBatch | None,
        mask: Tensor | None,
    ) -> LastRows:
        """The rows at the positions where ``needed`` [B, T] is True.

        Args:
            layer: the ``layer_idx`` of the layer.
            needed: bool [B, T].
            capacity: a bound of their number, where that cannot be had without waiting.
            ragged: how the batch was unpadded; every needed row is among its own.
            mask: bool [B, T], the tokens, if the batch was not unpadded; None = all.
        """
        batch, seqlen = needed.shape
        lengths = needed.sum(1)
        max_seqlen_q = min(seqlen, capacity)
        if values_are_known(needed):
            capacity, max_seqlen_q = int(lengths.sum()), max(1, int(lengths.max()))
        positions = _compact(needed, capacity)
        rank = slots_of(positions, batch * seqlen)
        cu_seqlens_q = _offsets(lengths)
        if ragged is None:
            ends = torch.full_like(lengths, seqlen)
            key_mask = None if mask is None else mask.flatten()
            source, keys = positions, (_offsets(ends), seqlen, key_mask)
        else:
            source = values_at(ragged.slots(), positions).masked_fill(positions < 0, -1)
            keys = (ragged.cu_seqlens, ragged.max_seqlen, ragged.key_mask)
        return cls(layer, source, cu_seqlens_q, max_seqlen_q, *keys, rank)

    def lengths(self, causal: bool) -> tuple[Tensor, Tensor, int, int]:
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    def attention_inputs(self, hidden_states: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """What an attention is given that is told queries and keys apart, as if it were cross-.

        Args:
            hidden_states: [..., E], the input of the layer.

        Returns:
            (the rows of the queries [1, P, E], the other arguments).
        """
        states = hidden_states.flatten(0, -2)
        mask = None if self.key_mask is None else self.key_mask[None]
        others = {"encoder_hidden_states": states[None], "attention_mask": mask, "rows": self}
        return ops.gather_rows(states, self.source)[None], others


def _counts_on_cpu(keep: Tensor, mask: Tensor) -> tuple[int, int]:
    """How many rows are kept, and how many of those the mask hides.

    The one thing that a CUDA device is waited for, once a forward; a capacity spares it that.
    """
    kept, hidden = torch.stack((keep.sum(), (keep & ~mask).sum())).tolist()
    return kept, hidden


def _compact(mask: Tensor, size: int) -> Tensor:
    """int64 [size], ascending: the flat positions of what is True, -1 in spare slots."""
    mask = mask.flatten()
    order = (~mask).to(torch.uint8).argsort(stable=True)[:size]
    return order.masked_fill(~mask[order], -1)


def values_at(values: Tensor, positions: Tensor) -> Tensor:
    """``values[positions]`` [P]; the first value where a position is -1."""
    return values[positions.clamp(min=0)]


def slots_of(positions: Tensor, total: int) -> Tensor:
    """int64 [total]: where in ``positions`` a number stands, -1 where nowhere."""
    slots = positions.new_full((total + 1,), -1)
    # The numbers -1 all write the last place, which is nobody's.
    slots[positions] = torch.arange(positions.shape[0], device=positions.device)
    return slots[:total]


def mask_at(positions: Tensor, total: int) -> Tensor:
    """bool [total]: True at ``positions``, of which -1 counts for nothing."""
    where = torch.zeros(total + 1, dtype=torch.bool, device=positions.device)
    where[positions] = True
    return where[:total]


def _offsets(lengths: Tensor) -> Tensor:
    """[B] -> int32 [B + 1] from 0."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def until_last(chosen: Tensor) -> Tensor:
    """bool [B, T]: True up to the last True of each row."""
    return chosen.flip(1).cumsum(1).flip(1) > 0


def unpadded(
    mask: Tensor | None, extra_rows: Tensor | None, unpad: Unpad, contiguous: bool = False
) -> RaggedBatch | None:
    """The rows of a batch that are computed; None = all of them, padded.

    Args:
        mask: [B, T], 0 = padding.
        extra_rows: bool [B, T], rows to compute although the mask hides them from the others.
        unpad: None = leave padding out where that is possible; False = do not; an int = the number
            of rows to make room for, which fixes all shapes; a batch = these rows.
        contiguous: compute what lies between the first and the last of these rows as well.
    """
    if isinstance(unpad, RaggedBatch):
        return unpad
    counted = unpad is None or unpad is True
    if mask is None or unpad is False or (counted and not values_can_be_read(mask)):
        return None
    if contiguous:
        kept = mask.bool() if extra_rows is None else mask.bool() | extra_rows
        extra_rows = (kept.cumsum(1) > 0) & until_last(kept)
    return RaggedBatch.of(mask, extra_rows, None if counted else unpad)


def rows_at(hidden: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
    """[..., E] -> [P, 1, E]; ``slots`` says in which row a position lies, None = in its own."""
    if slots is not None:
        positions = values_at(slots, positions).masked_fill(positions < 0, -1)
    return ops.gather_rows(hidden.flatten(0, -2), positions)[:, None]


def as_asked(
    outputs: Any,
    own: RaggedBatch | None,
    last: LastRows | None,
    output_rows: Tensor | None,
    unpad: Unpad,
) -> tuple[dict[str, Any], Tensor | None]:
    """The hidden states that the caller gets to see, of those that were computed.

    Args:
        outputs: of the parent, on the rows that were computed.
        own, last: which those were.
        output_rows: int64 [P], flat positions of the rows that are wanted; None = all.
        unpad: what the caller asked for.

    Returns:
        (the fields that change, the row of ``outputs.last_hidden_state`` that each flat position
        has: int64 [B * T], or None where that is its own).
    """
    hidden, slots = outputs.last_hidden_state, None
    if last is not None:
        slots = last.rank
    elif own is not None:
        slots = own.slots()
    asked: dict[str, Any] = {}
    if output_rows is not None:
        asked["last_hidden_state"] = rows_at(hidden, output_rows, slots)
    elif isinstance(unpad, RaggedBatch):
        asked["last_hidden_state"] = hidden if own is unpad else unpad.pack_rows(hidden)
    elif own is not None:
        asked["last_hidden_state"] = own.pad(hidden)
    if own is not None and outputs.get("hidden_states") is not None:
        asked["hidden_states"] = tuple(
            None if state is None else own.pad(state) for state in outputs.hidden_states
        )
    return asked, slots
