"""What every collator does: from a list of samples to tensors, cheaply."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fastplm._checks import DataError, check
from fastplm.data.packing import sequence_index

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields of a sample that are one number, and go into the batch as they are.
_LABELS_OF_A_SAMPLE = ("next_sentence_label", "sentence_order_label")


@dataclass
class Collator:
    """Base of the collators: ``collator(samples) = collator.corrupt(collator.pad(samples))``.

    ``pad`` makes tensors of the samples and is what a DataLoader's worker has to do; ``corrupt`` is
    the objective's noise, and runs wherever the tensors lie, with the same result. Samples are
    dicts of ``input_ids`` and, where they have them, ``attention_mask``, ``token_type_ids``,
    ``special_tokens_mask``, ``next_sentence_label``, ``sentence_order_label``, ``sample_index`` and
    ``sequence_lengths`` (of packed samples). Without a ``sample_index`` one is drawn from torch's
    global generator, as the collators of Transformers draw their masks.

    Args:
        tokenizer: gives the ids of special tokens and the vocabulary's size.
        seed: of all random choices.
        block_size: rows are padded to this length; by default to the longest of the batch. Packed
            batches are filled up to as many tokens a sample.
        packed: the sequences of a batch one after the other in one row, with no padding between
            them; see ``pad``.
    """

    tokenizer: PreTrainedTokenizerBase
    seed: int = 0
    block_size: int | None = None
    packed: bool = False

    #: What else of a sample has a value a token; a collator that shortens samples takes none of it.
    token_fields: ClassVar[tuple[str, ...]] = (
        "attention_mask",
        "token_type_ids",
        "special_tokens_mask",
    )
    _epoch: int = field(default=0, init=False, repr=False)
    _dropped: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _constants: dict[torch.device, dict[str, Tensor]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self.corrupt(self.pad(samples))

    def set_epoch(self, epoch: int) -> None:
        """Give every sample fresh choices from here on.

        A ``PretrainingStream`` needs none of it: its sample indices never come again. Workers that
        a DataLoader keeps over epochs have their own copy of the collator, and do not hear of it.
        """
        self._epoch = epoch

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The noise of the objective on the tensors of ``pad``, on whatever device they lie."""
        raise NotImplementedError

    def keep(self, **constants: Tensor) -> None:
        """Tensors of the CPU that ``corrupt`` needs in every batch."""
        self._constants[torch.device("cpu")] = constants

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """Those tensors on a device, where they are copied once."""
        if device not in self._constants:
            kept = self._constants[torch.device("cpu")]
            self._constants[device] = {name: value.to(device) for name, value in kept.items()}
        return self._constants[device]

    @property
    def dropped(self) -> int:
        """How many tokens found no room since the collator was made; reading it waits for a GPU.

        A DataLoader's workers count in copies of their own; there, and on any CPU, a warning says
        it the first time.
        """
        return sum(int(count) for count in self._dropped.values())

    def count_dropped(self, dropped: Tensor, fix: str) -> None:
        """Add what an op has dropped, a 0-d tensor: never silently, and without a wait on a GPU."""
        before = self._dropped.get(dropped.device)
        if dropped.device.type == "cpu" and dropped > 0 and not before:
            warnings.warn(
                f"{type(self).__name__}: {int(dropped)} tokens of this batch found no room and "
                f"were dropped. {fix} `collator.dropped` counts them.",
                stacklevel=3,
            )
        self._dropped[dropped.device] = dropped if before is None else before + dropped

    def content(self, input_ids: Any) -> Any:
        """The part of a sample's tokens that goes into the batch: all, unless a subclass cuts."""
        return input_ids

    def pad(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The tensors of a batch before any noise.

        Args:
            samples: as above; ids are lists, arrays or tensors on any one device.

        Returns:
            A dict of int64 tensors: ``input_ids`` and ``attention_mask`` [B, T], ``sample_index``
            [B], and what else the samples have. Packed: ``input_ids`` and ``position_ids`` [1, N],
            ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [S + 1], ``max_length_q`` and
            ``max_length_k`` as ints, and ``sample_index`` [S] of the S sequences.

        Raises:
            DataError: no samples, or one of them lacks ``input_ids``.
            ArgumentValueError: a sample is longer than ``block_size``.
        """
        where = type(self).__name__
        check(len(samples) > 0, where, "samples", "none", "one or more", "Pass a batch.", DataError)
        first = samples[0]
        fix = "Collators take dicts as a tokenizer returns them."
        has_ids = isinstance(first, dict) or hasattr(first, "keys")
        has_ids = has_ids and "input_ids" in first
        check(has_ids, where, "samples", type(first).__name__, "input_ids in each", fix, DataError)
        ids, lengths = _concatenate([self.content(sample["input_ids"]) for sample in samples])
        batch = (
            self._pack(samples, ids, lengths) if self.packed else self._pad(samples, ids, lengths)
        )
        for key in _LABELS_OF_A_SAMPLE:
            if key in first:
                batch[key] = torch.tensor([int(s[key]) for s in samples], device=ids.device)
        return batch

    def _pad(
        self, samples: Sequence[dict[str, Any]], ids: Tensor, lengths: list[int]
    ) -> dict[str, Any]:
        width = self._room(max(lengths))
        per_row = torch.tensor(lengths, device=ids.device)
        inside = torch.arange(width, device=ids.device) < per_row[:, None]
        batch = {
            "input_ids": _fill(ids, inside, self._pad_token_id()),
            "attention_mask": inside.long(),
        }
        for key in self.token_fields:
            if key in samples[0]:
                values, others = _concatenate([sample[key] for sample in samples])
                check(
                    others == lengths,
                    type(self).__name__,
                    key,
                    f"{others} values",
                    f"as many as input_ids, {lengths}",
                    "Make both by one call of the tokenizer.",
                )
                batch[key] = _fill(values, inside, 0)
        if "attention_mask" in samples[0] and self.token_fields:  # padding inside of a sample
            hidden = (batch["attention_mask"] == 0) & inside
            batch["special_tokens_mask"] = batch.get("special_tokens_mask", 0) | hidden.long()
        batch["sample_index"] = self._sample_index(samples).to(ids.device)
        return batch

    def _pack(
        self, samples: Sequence[dict[str, Any]], ids: Tensor, lengths: list[int]
    ) -> dict[str, Any]:
        check(
            all(np.asarray(sample.get("attention_mask", 1)).all() for sample in samples),
            type(self).__name__,
            "attention_mask",
            "padding inside of a sample",
            "none in a packed batch",
            "Tokenize with padding=False.",
        )
        size = self._room(max(lengths)) * len(samples) if self.block_size else len(ids)
        inner = [
            sample.get("sequence_lengths", [length])
            for sample, length in zip(samples, lengths, strict=True)
        ]
        sequences = torch.tensor([length for lengths in inner for length in lengths])
        index = self._sample_index(samples)
        if "sequence_lengths" in samples[0]:
            places = torch.cat([torch.arange(len(lengths)) for lengths in inner])
            counts = torch.tensor([len(lengths) for lengths in inner])
            index = sequence_index(index.repeat_interleave(counts), places)  # type: ignore[assignment]
        ends = torch.nn.functional.pad(sequences.cumsum(0), (1, 0))
        # What fills the batch up is a sequence of its own to the attention, and to nobody else.
        positions = torch.arange(size) - torch.repeat_interleave(
            torch.cat([ends[:-1], ends[-1:]]),
            torch.cat([sequences, torch.tensor([size - len(ids)])]),
        )
        filler = ids.new_full((size - len(ids),), self._pad_token_id())
        boundaries = ends.int().to(ids.device)
        longest = int(sequences.max())
        return {
            "input_ids": torch.cat([ids, filler])[None],
            "position_ids": positions.to(ids.device)[None],
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
            "sample_index": index.to(ids.device),
        }

    def _room(self, longest: int) -> int:
        if self.block_size is None:
            return longest
        check(
            longest <= self.block_size,
            type(self).__name__,
            "input_ids",
            f"a sample of {longest} tokens",
            f"at most {self.block_size}",
            "Raise block_size or cut the samples.",
        )
        return self.block_size

    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else pad

    def _sample_index(self, samples: Sequence[dict[str, Any]]) -> Tensor:
        if "sample_index" in samples[0]:
            return torch.tensor([int(sample["sample_index"]) for sample in samples])
        return torch.randint(1 << 42, (len(samples),))


def scatter_labels(input_ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Labels in the shape of ``input_ids``, -100 where none is; unused positions are -1."""
    flat = positions.new_full((input_ids.numel() + 1,), -100)
    flat[positions] = labels  # an unused one is the extra element at the end
    return flat[:-1].view(input_ids.shape)


def _concatenate(rows: list[Any]) -> tuple[Tensor, list[int]]:
    """int64 rows one after the other, and their lengths."""
    lengths = [len(row) for row in rows]
    if isinstance(rows[0], Tensor):
        return torch.cat([row.long() for row in rows]), lengths
    # NumPy reads lists of numbers several times as fast as torch.
    return torch.from_numpy(np.concatenate([np.asarray(row, np.int64) for row in rows])), lengths


def _fill(values: Tensor, inside: Tensor, filler: int) -> Tensor:
    """Rows of ``values`` in a matrix, the rest of it ``filler``."""
    if values.numel() == inside.numel():
        return values.view(inside.shape)
    padded = values.new_full(inside.shape, filler)
    return padded.masked_scatter_(inside, values)
