"""The base of the collators: from a list of samples to tensors."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor

from fastplm.data.packing import sequence_index
from fastplm.errors import (
    ArgumentValueError,
    DataError,
    FastplmError,
    UnsupportedError,
    check,
    fail,
)
from fastplm.models._ragged import RaggedBatch
from fastplm.nn._rows import bucketed_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Samples = Sequence[dict[str, Any]]
_Error = type[FastplmError]
_Constants = dict[torch.device, dict[str, Tensor]]
# Fields of a sample that are a single number; a batch has them as a tensor [B].
_LABELS_OF_A_SAMPLE = ("next_sentence_label", "sentence_order_label")
# Fields that ``PretrainingStream`` adds: the sample index, and the lengths of the sequences.
_OF_THE_STREAM = ("sample_index", "sequence_lengths")
_MOST_SAMPLES = 1 << 43  # ``sequence_index`` has room for so many sample indices


@dataclass(eq=False)
class Collator:
    """Base of the collators: ``collator(samples) = collator.corrupt(collator.pad(samples))``.

    ``pad`` makes tensors of the samples; it is the part for a DataLoader's worker. ``corrupt`` adds
    the noise of the objective; it can run on any device, with the same result.

    Samples are dicts, as a tokenizer returns them for one text, with ``input_ids`` and any of
    ``attention_mask``, ``token_type_ids``, ``special_tokens_mask``, ``next_sentence_label``,
    ``sentence_order_label``, ``sample_index`` and ``sequence_lengths`` (of packed samples). All
    samples of a batch must have the same of these keys. Other keys, including ``labels``, are
    ignored.

    If samples have no ``sample_index``, it is drawn from torch's global generator, which the
    collators of Transformers use for their masks; if the seed or the epoch is not 0, a warning says
    so. The Trainer of Transformers removes keys that are no argument of the model: pass it
    ``remove_unused_columns=False``, or the collator gets no ``sample_index``,
    ``special_tokens_mask`` and ``sequence_lengths``.

    Args:
        tokenizer: the tokenizer, for the ids of special tokens and the size of the vocabulary.
        seed: the seed of all random choices.
        block_size: rows are padded to this length. Default: the longest sample of the batch. A
            packed batch is filled up to ``block_size`` tokens for each sample.
        packed: put the sequences of a batch one after the other in one row, with no padding between
            them; see ``pad``. The model is one of ``fastplm.models``, or needs an attention that
            reads ``cu_seq_lens_q``, such as ``attn_implementation="fastplm"`` or FlashAttention;
            with any other the sequences attend to each other.
        position_offset: the first position id of each packed sequence. RoBERTa and models like it
            begin at ``pad_token_id + 1``.
        unpad: say which rows are tokens, for the models of ``fastplm.models``: a training step on
            a GPU then waits for no count, and batches have few shapes, as CUDA graphs need them.
            The batch gets what these models take: ``unpad`` (and ``decoder_unpad``), the rows of
            the tokens, in one of few numbers, at most a sixteenth more than there are, or False if
            there is no padding, and then no ``attention_mask``; and, with labels of most tokens,
            ``loss_positions``. Rows are padded to one of few lengths, too.
    """

    tokenizer: PreTrainedTokenizerBase
    seed: int = 0
    block_size: int | None = None
    packed: bool = False
    position_offset: int = 0
    unpad: bool = field(default=False, kw_only=True)

    #: The other fields with a value for each token. A collator that shortens samples reads none.
    token_fields: ClassVar[tuple[str, ...]] = (
        "attention_mask",
        "token_type_ids",
        "special_tokens_mask",
    )
    #: Whether the collator makes random choices.
    random: ClassVar[bool] = True
    #: The name of the op that makes the noise, if there is one.
    op: ClassVar[str | None] = None
    _epoch: int = field(default=0, init=False, repr=False)
    _warned: bool = field(default=False, init=False, repr=False)
    _dropped: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)
    _constants: _Constants = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        where, size, offset = type(self).__name__, self.block_size, self.position_offset
        fits = size is None or size >= 1
        check(fits, where, "block_size", size, "1 or more, or None", "Leave it out, or raise it.")
        fix = "RoBERTa's is tokenizer.pad_token_id + 1, most others' is 0."
        check(offset >= 0, where, "position_offset", offset, "0 or more", fix)
        fix = "Leave one of the two out: a packed batch has no padding in it."
        fits = not (self.unpad and self.packed)
        check(fits, where, "unpad", "True with packed=True", "False", fix)

    def __call__(self, samples: Samples) -> dict[str, Any]:
        return self.corrupt(self.pad(samples))

    def set_epoch(self, epoch: int) -> None:
        """Make new random choices for every sample from now on.

        A ``PretrainingStream`` does not need this: each of its sample indices occurs once. It has
        no effect on the copies of the collator in workers that a DataLoader keeps over epochs.
        """
        self._epoch = epoch

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the noise of the objective to the tensors of ``pad``, on any device."""
        raise NotImplementedError

    @property
    def needs_cpu(self) -> bool:
        """Whether ``corrupt`` must run on the CPU, as ``unpad`` reads the lengths that it makes."""
        return False

    def rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """What ``unpad`` adds to a batch of ``pad``."""
        return {"unpad": rows_of(batch["attention_mask"])}

    def keep(self, **constants: Tensor) -> None:
        """Store CPU tensors that ``corrupt`` needs for every batch."""
        self._constants[torch.device("cpu")] = constants

    def constants(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors of ``keep`` on a device; they are copied to it once."""
        if device not in self._constants:
            kept = self._constants[torch.device("cpu")]
            self._constants[device] = {name: value.to(device) for name, value in kept.items()}
        return self._constants[device]

    @property
    def dropped(self) -> int:
        """The number of tokens so far that did not fit. If they are on a GPU, reading it is a sync.

        The workers of a DataLoader have their own copies of the collator and of this number. On the
        CPU, and so in workers, a warning is printed the first time.
        """
        return sum(int(count) for count in self._dropped.values())

    def count_dropped(self, dropped: Tensor, fix: str) -> None:
        """Add the number of tokens that an op dropped, a 0-d tensor; on the CPU warn of it once."""
        before = self._dropped.get(dropped.device)
        if dropped.device.type == "cpu" and dropped > 0 and not before:
            warnings.warn(
                f"{type(self).__name__}: {int(dropped)} tokens of this batch did not fit and "
                f"were dropped. {fix} `collator.dropped` counts them.",
                stacklevel=3,
            )
        self._dropped[dropped.device] = dropped if before is None else before + dropped

    def content(self, sample: dict[str, Any]) -> Any:
        """The tokens of a sample that go into the batch: all, unless a subclass shortens it."""
        return sample["input_ids"]

    def pad(self, samples: Samples) -> dict[str, Any]:
        """The tensors of a batch before any noise.

        Args:
            samples: as above; ids are integers in lists, arrays or tensors, all on one device.

        Returns:
            A dict of int64 tensors: ``input_ids`` and ``attention_mask`` [B, T], ``sample_index``
            [B] and, where the samples have them, ``token_type_ids`` and ``special_tokens_mask``
            [B, T], ``next_sentence_label`` and ``sentence_order_label`` [B]. Padding inside of a
            sample (0 in its ``attention_mask``) is marked in ``special_tokens_mask``.

            Packed: ``input_ids``, ``position_ids``, ``token_type_ids`` and ``special_tokens_mask``
            [1, N], ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32 [S + 1], ``max_length_q`` and
            ``max_length_k`` as ints, and ``sample_index`` [S] of the S sequences; the others as
            above. Samples must not contain padding. On a GPU that is not checked, as it would be a
            sync: padding is marked in ``special_tokens_mask``, but it is attended to.

        Raises:
            DataError: there are no samples; one of them lacks a key that others have; a value has
                the wrong shape or type.
            ArgumentValueError: a sample is longer than ``block_size``; it has ``sequence_lengths``
                without ``packed``, or padding inside with it.

        Warns:
            UserWarning: a seed or an epoch was given, and the samples have no ``sample_index``.
        """
        self._check_keys(samples)
        self._check_rows("input_ids", [sample["input_ids"] for sample in samples])
        rows = [self.content(sample) for sample in samples]
        lengths = [len(row) for row in rows]
        ids = self._concatenate("input_ids", rows)
        fields = {
            key: self._field(key, samples, lengths).to(ids.device)
            for key in self.token_fields
            if key in samples[0]
        }
        arrange = self._pack if self.packed else self._pad
        batch = arrange(samples, ids, lengths, fields)
        for key in _LABELS_OF_A_SAMPLE:
            if key in samples[0]:
                batch[key] = torch.tensor([int(s[key]) for s in samples], device=ids.device)
        return batch | self.rows(batch) if self.unpad else batch

    def _pad(
        self, samples: Samples, ids: Tensor, lengths: list[int], fields: dict[str, Tensor]
    ) -> dict[str, Any]:
        width = self._room(max(lengths))
        per_row = torch.tensor(lengths, device=ids.device)
        inside = torch.arange(width, device=ids.device) < per_row[:, None]
        batch = {
            "input_ids": _fill(ids, inside, self._pad_token_id()),
            "attention_mask": inside.long(),
        }
        batch |= {key: _fill(values, inside, 0) for key, values in fields.items()}
        if "attention_mask" in fields:
            _hide(batch, batch["attention_mask"])
        batch["sample_index"] = self._sample_index(samples).to(ids.device)
        return batch

    def _pack(
        self, samples: Samples, ids: Tensor, lengths: list[int], fields: dict[str, Tensor]
    ) -> dict[str, Any]:
        room = self._room(max(lengths))
        size = len(ids) if self.block_size is None else room * len(samples)
        inner = self._sequence_lengths(samples, lengths)
        flat = [length for row in inner for length in row]
        longest = max(flat, default=0)
        sequences = torch.tensor(flat, dtype=torch.int64, device="cpu")
        index = self._sample_index(samples)
        if "sequence_lengths" in samples[0]:
            index = self._sequence_index(index, [len(row) for row in inner])
        ends = torch.nn.functional.pad(sequences.cumsum(0), (1, 0))
        # Padding at the end gets ``position_offset``, a position that every model has.
        first = torch.repeat_interleave(ends[:-1], sequences)
        positions = torch.arange(len(ids), device="cpu") - first
        positions = positions.to(ids.device) + self.position_offset

        def row(values: Tensor, filler: int) -> Tensor:
            return torch.nn.functional.pad(values, (0, size - len(values)), value=filler)[None]

        boundaries = ends.int().to(ids.device)
        batch = {
            "input_ids": row(ids, self._pad_token_id()),
            "position_ids": row(positions, self.position_offset),
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
            "sample_index": index.to(ids.device),
        }
        mask = fields.pop("attention_mask", None)
        batch |= {key: row(values, 0) for key, values in fields.items()}
        if mask is None:
            return batch
        if mask.device.type != "cpu":
            _hide(batch, row(mask, 0))
            return batch
        for number, part in enumerate(mask.split(lengths)):
            if not part.all():
                got, fix = "padding inside", "Tokenize with padding=False."
                expected, key = "none in a packed batch", "attention_mask"
                self._refuse(key, number, got, expected, fix, ArgumentValueError)
        return batch

    def _room(self, longest: int) -> int:
        """The length of a row; an error if the longest sample does not fit."""
        return self._fit(longest, self.block_size)

    def _fit(self, longest: int, room: int | None, beside: str = "", most: object = "") -> int:
        if room is None:
            return bucketed_rows(longest, max(longest, self._most())) if self.unpad else longest
        where, got = type(self).__name__, f"a sample of {longest} tokens{beside}"
        expected, fix = f"at most {most or room}", "Raise block_size or cut the samples."
        check(longest <= room, where, "input_ids", got, expected, fix)
        return room

    def _most(self) -> int:
        """The most tokens that a row is padded to, so that the model has a position for each."""
        return self.tokenizer.model_max_length

    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else pad

    def _sample_index(self, samples: Samples) -> Tensor:
        if "sample_index" in samples[0]:
            return torch.tensor([int(sample["sample_index"]) for sample in samples], device="cpu")
        if self.random and (self.seed != 0 or self._epoch != 0) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: the samples have no sample_index, so their places are "
                "drawn from torch's global generator, and seed and epoch alone do not decide what "
                "is chosen. Give each sample a sample_index (PretrainingStream does), and the "
                "Trainer of Transformers remove_unused_columns=False.",
                stacklevel=5,
            )
        return torch.randint(1 << 42, (len(samples),), device="cpu")

    def _sequence_lengths(self, samples: Samples, lengths: list[int]) -> list[list[int]]:
        """The lengths of the sequences of each sample."""
        if "sequence_lengths" not in samples[0]:
            return [[length] for length in lengths]
        inner = [[int(length) for length in sample["sequence_lengths"]] for sample in samples]
        for number, (row, length) in enumerate(zip(inner, lengths, strict=True)):
            if sum(row) != length or min(row, default=0) < 0:
                got, expected = f"{row} for {length} tokens", "lengths that add up to the tokens"
                self._refuse("sequence_lengths", number, got, expected, "Cut or join both alike.")
        return inner

    def _sequence_index(self, index: Tensor, counts: list[int]) -> Tensor:
        """The sample index of each sequence, from that of each sample."""
        for number, place in enumerate(index.tolist()):
            if not 0 <= place < _MOST_SAMPLES:
                expected = f"0 to {_MOST_SAMPLES - 1} beside sequence_lengths"
                self._refuse("sample_index", number, place, expected, "Count the samples from 0.")
        places = torch.cat([torch.arange(count, device="cpu") for count in counts])
        return sequence_index(index.repeat_interleave(torch.tensor(counts, device="cpu")), places)  # type: ignore[return-value]

    # --- checks of samples, not of tokens -----------------------------------------

    def _refuse(
        self, key: str, number: int, got: object, expected: str, fix: str, error: _Error = DataError
    ) -> NoReturn:
        fail(type(self).__name__, key, f"{got} in sample {number}", expected, fix, error)

    def _check_keys(self, samples: Samples) -> None:
        """Check that all samples are dicts with ids and have the same of the keys that are read."""
        where = type(self).__name__
        check(len(samples) > 0, where, "samples", "none", "one or more", "Pass a batch.", DataError)
        for number, sample in enumerate(samples):
            if not (hasattr(sample, "keys") and "input_ids" in sample):
                kind, expected = type(sample).__name__, "a dict with input_ids in each"
                fix = "Collators take dicts as a tokenizer returns them."
                self._refuse("samples", number, kind, expected, fix)
        first = samples[0].keys()
        others = [number for number, sample in enumerate(samples) if sample.keys() != first]
        for key in (*self.token_fields, *_LABELS_OF_A_SAMPLE, *_OF_THE_STREAM) if others else ():
            for number in others:
                if (key in samples[number]) != (key in first):
                    got, there = ("nothing", "a value") if key in first else ("a value", "nothing")
                    fix = "Give it to all samples or to none."
                    self._refuse(key, number, got, f"{there}, as in sample 0", fix)
        got = "lengths of several sequences in a sample"
        expected = "none with packed=False"
        fix = "Pass packed=True, or each sequence as a sample of its own."
        fits = self.packed or "sequence_lengths" not in first
        check(fits, where, "sequence_lengths", got, expected, fix)

    def _check_rows(self, key: str, rows: list[Any]) -> None:
        for number, row in enumerate(rows):
            if _dimensions(row) != 1:
                got = f"shape {tuple(np.shape(row))}"
                fix = "Tokenize text by text with return_tensors=None, or squeeze it."
                self._refuse(key, number, got, "one row of tokens, [T]", fix)

    def _field(self, key: str, samples: Samples, lengths: list[int]) -> Tensor:
        """The values of a field for all tokens, one sample after the other."""
        rows = [sample[key] for sample in samples]
        self._check_rows(key, rows)
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            if len(row) != length:
                got, fix = f"{len(row)} values", "Make both by one call of the tokenizer."
                self._refuse(key, number, got, "as many as input_ids", fix, ArgumentValueError)
        return self._concatenate(key, rows)

    def _concatenate(self, key: str, rows: list[Any]) -> Tensor:
        """Concatenate rows of integers as int64; an error if they hold anything else."""
        parts = [_whole_numbers(row) for row in rows]
        if any(part is None for part in parts):
            number = next(i for i, part in enumerate(parts) if part is None)
            got = f"a {getattr(rows[number], 'dtype', 'list')}"
            fix = "Convert them with .long(), or make them with a tokenizer."
            self._refuse(key, number, got, "whole numbers of at most 64 bits", fix)
        if isinstance(rows[0], Tensor):
            return torch.cat([*map(torch.as_tensor, parts)])
        return torch.from_numpy(np.concatenate(parts))


@dataclass(eq=False)
class TextCollator(Collator):
    """Base of the collators of T5 and BART, which read only text.

    They remove padding and special tokens at the ends of a sample. Padding is what its
    ``attention_mask`` masks at either end; without a mask, the padding tokens at its end. After
    that, one BOS and one EOS are removed.
    """

    token_fields: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "False, as an encoder-decoder takes a padded batch"
        fix = f"Leave it out; ops.{self.op} takes packed rows and returns padded ones."
        where, packed = type(self).__name__, self.packed
        check(not packed, where, "packed", packed, expected, fix, UnsupportedError)
        # Looked up once: the properties of a tokenizer are slow.
        self._padding: int | None = self.tokenizer.pad_token_id
        self._pad_id = self._pad_token_id()
        self._bos: int | None = None
        self._eos: int | None = self.tokenizer.eos_token_id

    @property
    def needs_cpu(self) -> bool:
        return self.unpad

    def rows(self, batch: dict[str, Any]) -> dict[str, Any]:
        """``unpad`` adds nothing before the noise, which changes the lengths."""
        return {}

    def corrupted(
        self, batch: dict[str, Any], input_ids: Tensor, lengths: Tensor, labels: Tensor
    ) -> dict[str, Any]:
        """The batch of noised rows [B, T], their lengths and labels, and what ``unpad`` adds."""
        column = torch.arange(input_ids.shape[1], device=input_ids.device)
        inside = (column < lengths[:, None]).long()
        batch = batch | {"input_ids": input_ids, "attention_mask": inside, "labels": labels}
        if self.unpad:
            batch["unpad"] = rows_of(batch["attention_mask"])
            batch["decoder_unpad"] = rows = rows_of(batch["labels"] != -100)
            batch["loss_positions"] = positions_of(rows, batch["labels"])
        return without_full_mask(batch)

    def content(self, sample: dict[str, Any]) -> Any:
        """The tokens of the text of a sample. If they are on a GPU, this is a sync."""
        ids, where = sample["input_ids"], type(self).__name__
        tokens = _on_cpu(ids)
        begin, end = 0, len(tokens)
        if "attention_mask" in sample:
            seen = np.flatnonzero(_on_cpu(sample["attention_mask"]))
            count = len(sample["attention_mask"])
            got, fix = f"{count} values", "Make both by one call of the tokenizer."
            expected = f"{end}, as many as input_ids"
            check(count == end, where, "attention_mask", got, expected, fix)
            begin, end = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 0)
            one_run, fix = end - begin == len(seen), "Remove what is not text."
            check(one_run, where, "attention_mask", "gaps", "one run of ones", fix, DataError)
        else:
            while end > 0 and tokens[end - 1] == self._padding:
                end -= 1
        if end > begin and self._eos is not None and tokens[end - 1] == self._eos:
            end -= 1
        if end > begin and self._bos is not None and tokens[begin] == self._bos:
            begin += 1
        return ids[begin:end]


def rows_of(mask: Tensor) -> Any:
    """The rows of the tokens of a batch, see ``Collator.unpad``; on a GPU this is a sync."""
    rows = RaggedBatch.in_steps_on_cpu(mask.cpu())
    return False if rows is None else rows.to(mask.device)


def positions_of(rows: Any, given: Tensor) -> Tensor:
    """int64 [P], flat: where the ``rows_of`` a batch [B, T] are."""
    return torch.arange(given.numel(), device=given.device) if rows is False else rows.positions


def without_full_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch without its ``attention_mask`` if ``unpad`` says that there is no padding."""
    if batch.get("unpad") is False:
        del batch["attention_mask"]
    return batch


def scatter_labels(input_ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
    """Labels in the shape of ``input_ids``, -100 where there is none; unused positions are -1."""
    flat = positions.new_full((input_ids.numel() + 1,), -100)
    flat[positions] = labels  # position -1 is the additional element at the end
    return flat[:-1].view(input_ids.shape)


def _hide(batch: dict[str, Any], attention_mask: Tensor) -> None:
    """Mark masked tokens in ``special_tokens_mask``, so that none of them is chosen."""
    hidden = (attention_mask == 0).long()
    batch["special_tokens_mask"] = batch.get("special_tokens_mask", 0) | hidden


def _on_cpu(row: Any) -> Any:
    return row.numpy(force=True) if isinstance(row, Tensor) else row


def _dimensions(row: Any) -> int:
    if not isinstance(row, (list, tuple)):
        return getattr(row, "ndim", 0)
    # Not ``np.ndim`` of the first int: that takes longer than all other checks of a sample.
    return 1 if not row or isinstance(row[0], int) else 1 + np.ndim(row[0])


def _whole_numbers(row: Any) -> Any:
    """A row as an int64 tensor or array; None if it holds anything but integers."""
    if isinstance(row, Tensor):
        if row.dtype is torch.int64:
            return row
        whole = not (row.is_floating_point() or row.is_complex())
        return row.long() if whole or len(row) == 0 else None
    if isinstance(row, np.ndarray):
        whole = row.dtype.kind in "biu"
        return row.astype(np.int64, copy=False) if whole or len(row) == 0 else None
    try:
        return np.asarray(array("q", row))  # as fast as NumPy, and refuses fractions
    except (TypeError, OverflowError):
        return None


def _fill(values: Tensor, inside: Tensor, filler: int) -> Tensor:
    """Write ``values`` to the True elements of ``inside``; all others become ``filler``."""
    if values.numel() == inside.numel():
        return values.view(inside.shape)
    padded = values.new_full(inside.shape, filler)
    return padded.masked_scatter_(inside, values)
