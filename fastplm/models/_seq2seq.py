"""What BART and T5 share: two paddings, that of the encoder's batch and that of the decoder's.

    encoder's mask -> unpad once -> encoder on packed rows
    decoder's mask, or the rows that are read -> unpad once -> decoder on packed rows, with
    cross-attention packed on both sides -> head and loss at the labelled rows

Each side is padded back only where the caller gets to see its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fastplm.hf import NAME
from fastplm.models._base import asked_for
from fastplm.models._ragged import RaggedBatch, values_can_be_read
from fastplm.nn._tied_embedding import shares_table, tied_lookup

Unpad = bool | int | RaggedBatch | None


def can_pack(model: Any, masks: Sequence[Tensor | None], kwargs: dict[str, Any]) -> bool:
    """Whether rows can be left out: the parent's padded path does the rest."""
    return (
        model.config._attn_implementation == NAME
        and all(mask is None or mask.dim() == 2 for mask in masks)
        and kwargs.get("cu_seq_lens_q") is None
        and not asked_for(model, "output_attentions", kwargs)
    )


def unpadded(mask: Tensor | None, extra_rows: Tensor | None, unpad: Unpad) -> RaggedBatch | None:
    """The rows of a batch that are computed; None = all of them, padded.

    Args:
        mask: [B, T], 0 = padding.
        extra_rows: bool [B, T], rows to compute although the mask hides them from the others.
        unpad: None = leave padding out where that is possible; False = do not; an int = the number
            of rows to make room for, which fixes all shapes; a batch = these rows.
    """
    if isinstance(unpad, RaggedBatch):
        return unpad
    if mask is None or unpad is False:
        return None
    if unpad is not None and unpad is not True:
        return RaggedBatch.of(mask, extra_rows, unpad)
    return RaggedBatch.of(mask, extra_rows) if values_can_be_read(mask) else None


def decoder_rows(
    mask: Tensor | None, read_rows: Tensor | None, extra_rows: Tensor | None, unpad: Unpad
) -> RaggedBatch | None:
    """The rows that a causal decoder computes.

    Args:
        mask, extra_rows, unpad: as in ``unpadded``.
        read_rows: bool [B, T], the rows whose last hidden state anybody looks at: those after the
            last one of a sequence influence none of them. None = all.
    """
    if read_rows is not None:
        reached = read_rows.flip(1).cumsum(1).flip(1) > 0
        if mask is None:
            mask = reached
        else:
            mask = mask.bool() & reached
            extra_rows = read_rows if extra_rows is None else extra_rows | read_rows
    return unpadded(mask, None if mask is None else extra_rows, unpad)


def padded(states: tuple[Tensor | None, ...] | None, rows: RaggedBatch | None) -> Any:
    """Hidden states [1, N, E] of all layers -> [B, T, E]."""
    if states is None or rows is None:
        return states
    return tuple(None if state is None else rows.pad(state) for state in states)


class SharedLookup:
    """Lookups of several embeddings that share their table with a vocabulary head.

    The gradients of all uses are made in one buffer. The loss is the one reader of ``weight``.

    Args:
        decoder: the head's projection to the vocabulary.
        kind: the class of the embeddings; another one is called as it is.
    """

    def __init__(self, decoder: nn.Linear, kind: type[nn.Embedding] = nn.Embedding) -> None:
        self.decoder, self.kind = decoder, kind
        self.weight: Any = getattr(decoder, "weight", None)  # an adapter's may be further inside

    def __call__(self, embedding: Any, input_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., E]."""
        if not shares_table(embedding, self.decoder, self.kind):
            return embedding(input_ids)
        # The table that one lookup returns is the next one's: their gradients pile up on the way.
        rows, self.weight = tied_lookup(embedding, input_ids, self.weight)
        return rows
