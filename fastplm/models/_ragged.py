"""Packed batches: which rows are computed, packing and padding.

A padded batch [B, T] becomes one row [1, N] of tokens, one sequence after another, as
``attn_implementation="fastplm"`` takes it (``cu_seq_lens_q``, …). Positions are flat,
``b * T + t``; -1 marks an unused slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fastplm import ops
from fastplm._checks import read
from fastplm._modes import is_eager, is_exporting, values_are_known, values_can_be_read
from fastplm.errors import UnsupportedError, fail
from fastplm.nn._rows import IGNORE_INDEX, bucketed_rows, compact, places_on_cpu, with_spare_slots
from fastplm.nn.dropout import RowNumbers, on_rows
from fastplm.ops._attention_call import made_for_one_forward

#: The reasons why a backbone computes padding, too; docs/faq.md lists them.
PADDING_REASONS = {
    "attention": "attn_implementation is not 'fastplm'",
    "mask": "a mask with more than two dimensions",
    "cache": "a cache (past_key_values or use_cache)",
    "weights": "output_attentions",
    "noise": "NEFTune, whose noise depends on the length of the batch",
    "chunks": "chunk_size_feed_forward",
    "length": "rotary positions whose frequencies depend on the length of the batch (rope_type "
    "'dynamic' or 'longrope', from the length of the pre-training on)",
    "layers": "a layer, attention, embeddings, norm or pooler of your own, which may use several "
    "rows",
    "inputs": "inputs that do not belong to single tokens",
    "traced": "a trace (torch.compile, an export) or a CUDA graph reads no masks; there, unpad=N "
    "or a collator with unpad=True sets a number of rows",
    "asked": "unpad=False, a head or a module after the model that may read padding, or "
    "output_hidden_states while gradients are computed",
}
#: Devices where each draw of a seed is a launch: ``Rows.draw_seeds`` draws all at once there.
ONE_DRAW = ("cuda",)
#: How configurations call the dropout of attention, and that of hidden states in a layer.
OF_ATTENTION = ("attention_probs_dropout_prob", "attn_pdrop", "attention_dropout", "dropout_rate")
DROPOUTS = (*OF_ATTENTION, "hidden_dropout_prob", "resid_pdrop", "dropout")
#: The type of a model's argument ``unpad``; see ``unpadded``.
Unpad: TypeAlias = "bool | int | Counted | RaggedBatch | None"


@dataclass(frozen=True)
class Counted:
    """``unpad``, where a head has counted the tokens of the mask together with its labels.

    All rows that the head reads are tokens.
    """

    tokens: int


class _Movable:
    """A dataclass of tensors with the methods by which a DataLoader and Accelerate move it."""

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Any:
        return self._with("to", device, non_blocking=non_blocking)

    def pin_memory(self) -> Any:
        """In page-locked memory, of which a copy to a GPU does not wait."""
        return self._with("pin_memory")

    def _with(self, method: str, *args: Any, **kwargs: Any) -> Any:
        values = ((each.name, getattr(self, each.name)) for each in fields(self))  # type: ignore[arg-type]
        changed = {
            name: getattr(value, method)(*args, **kwargs)
            for name, value in values
            if hasattr(value, method)
        }
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass
class RaggedBatch(_Movable):
    """The rows of a padded batch [B, T] that are computed."""

    positions: Tensor  # int64 [N], flat and ascending; -1 in unused slots, which come last
    cu_seqlens: Tensor  # int32 [B + 1]: sequence b is rows cu_seqlens[b] to cu_seqlens[b + 1]
    max_seqlen: int  # an upper bound of the lengths
    key_mask: Tensor | None  # bool [N], the rows that may be attended to; None = all
    batch: int
    seqlen: int
    of_caller: bool = False  # whether the caller has packed them, see ``_packed``

    @classmethod
    def of(
        cls,
        mask: Tensor,
        extra_rows: Tensor | None = None,
        capacity: int | None = None,
        counts: tuple[int, int] | None = None,
    ) -> RaggedBatch | None:
        """Pack the tokens of a batch.

        Args:
            mask: [B, T] of any dtype, 0 = padding.
            extra_rows: bool [B, T], rows to compute although they are masked as keys.
            capacity: N, which fixes all shapes and needs no sync; None = count the rows, which
                reads values (on CUDA a sync). Not more than B * T rows are packed.
            counts: what ``_counts`` returns, if the caller has called it.

        Returns:
            None if there is no padding to leave out.

        Raises:
            ArgumentValueError: more rows than the capacity, if the values are known. (Otherwise
                an assertion on the device fails.)
            UnsupportedError: a capacity inside of ``torch.jit.trace`` or an ONNX exporter.
        """
        mask = mask.bool()
        keep = either(mask, extra_rows)
        batch, seqlen = keep.shape
        total = batch * seqlen
        lengths = keep.sum(1)
        max_seqlen, has_masked_rows = seqlen, extra_rows is not None
        if capacity is None:
            count, hidden = counts or _counts(keep, mask)
            if count in (0, total):
                return None
            has_masked_rows = hidden > 0
        elif is_exporting():
            expected = (
                "None or False in torch.jit.trace and ONNX's exporters, which would drop the "
            )
            expected += "check that a batch fits"
            fail("unpad", "unpad", capacity, expected, "Leave it out.", UnsupportedError)
        elif statically_known_true(capacity >= total):  # unknown while sizes are symbols
            return None
        else:
            count, fits = torch.sym_min(capacity, total), lengths.sum() <= capacity
            if not values_are_known(keep):
                torch._assert_async(fits, "unpad: a batch has more tokens than the capacity")
            elif not fits:
                got = f"{capacity} for a batch of {int(lengths.sum())} tokens"
                fix = "Raise it, or leave it out: then the tokens are counted."
                fail("unpad", "unpad", got, "at least the number of tokens", fix)
        positions = compact(keep, count)
        if values_are_known(keep):
            max_seqlen = int(lengths.max())
        key_mask = None
        if has_masked_rows:
            key_mask = values_at(mask.flatten(), positions) & (positions >= 0)
        return cls(positions, _offsets(lengths), max_seqlen, key_mask, batch, seqlen)

    @classmethod
    def whole(cls, given: Tensor, mask: Tensor | None = None) -> RaggedBatch:
        """All rows of a batch [B, T, …], packed; ``mask`` [B, T] becomes the key mask."""
        (batch, seqlen), device = given.shape[:2], given.device
        return cls(
            torch.arange(batch * seqlen, device=device),
            torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen,
            seqlen,
            None if mask is None else mask.bool().flatten(),
            batch,
            seqlen,
        )

    @classmethod
    def in_steps_on_cpu(cls, mask: Tensor) -> RaggedBatch | None:
        """The tokens of a batch, in one of few numbers of rows, see ``bucketed_rows``.

        So a step reads no value of them, and has one of few shapes.

        Args:
            mask: [B, T] on the CPU, 0 = padding.

        Returns:
            None if there is no padding.
        """
        positions = places_on_cpu(mask.flatten() != 0)
        count, (batch, seqlen) = positions.shape[0], mask.shape
        if count == mask.numel():
            return None
        positions = F.pad(positions, (0, bucketed_rows(count, mask.numel()) - count), value=-1)
        return cls(positions, _offsets((mask != 0).sum(1)), seqlen, None, batch, seqlen)

    def with_spare_slots(self, dtype: torch.dtype | None = None) -> RaggedBatch:
        """The same batch with unused slots where that is faster, see ``nn._rows``."""
        positions = with_spare_slots(self.positions, self.batch * self.seqlen, dtype)
        unused, key_mask = positions.shape[0] - self.positions.shape[0], self.key_mask
        if key_mask is not None:
            key_mask = F.pad(key_mask, (0, unused))
        return replace(self, positions=positions, key_mask=key_mask) if unused else self

    def pack(self, values: Tensor | None) -> Any:
        """[B or 1, T, …] -> [1, N, …]; unused slots get an arbitrary value. None stays None."""
        if values is None:
            return None
        if values.shape[:2] != (self.batch, self.seqlen):
            values = values.expand(self.batch, self.seqlen, *values.shape[2:])
        return values_at(values.flatten(0, 1), self.positions)[None]

    def pack_rows(self, rows: Tensor | None) -> Any:
        """[B, T, E] -> [1, N, E], zeros in unused slots. None stays None."""
        return None if rows is None else ops.gather_rows(rows.flatten(0, 1), self.positions)[None]

    def pad(self, rows: Tensor, slots: Tensor | None = None) -> Tensor:
        """[1, N, E] -> [B, T, E], zeros where a row was left out; ``slots`` = ``self.slots()``."""
        slots = self.slots() if slots is None else slots
        return ops.gather_rows(rows.squeeze(0), slots).view(self.batch, self.seqlen, -1)

    def slots(self) -> Tensor:
        """int64 [B * T], the packed row of each position, -1 where it was left out."""
        return slots_of(self.positions, self.batch * self.seqlen)

    def token_mask(self) -> Tensor:
        """bool [B, T], the rows that may be attended to."""
        seen = self.positions if self.key_mask is None else self.positions.where(self.key_mask, -1)
        return mask_at(seen, self.batch, self.seqlen)

    def key_mask_row(self) -> Tensor | None:
        """bool [1, N], the ``attention_mask``; None if no row is masked."""
        return None if self.key_mask is None else self.key_mask[None]


@dataclass
class Rows(_Movable):
    """Says which rows the layers of a model compute.

    Transformers' layers pass this object on to the attention as the keyword ``rows``.
    """

    packed: RaggedBatch | None = None  # the batch of the model; None = the batch is padded
    cross: RaggedBatch | None = None  # the packed encoder batch, if a decoder attends to one
    last: LastRows | None = None  # the rows of the last layer; None = all
    sample_index: Tensor | None = None  # int64 [B], for attention's dropout; None = 0 ... B - 1
    numbers: RowNumbers | None = None  # sample and position of rows, for dropout of hidden states
    layers: dict[int, Any] = field(default_factory=dict)  # see ``_layer.of_one_forward``
    seeds: Tensor | None = None  # int64 [layers, 5], of dropout; see ``draw_seeds``
    number_of_layer: int | None = None  # where the layers have no ``layer_idx``
    order: dict[int, int] = field(default_factory=dict)  # their numbers, by the ``id`` of a layer
    is_cut: bool = False  # whether the queries of an attention are ``last``

    def number(self, given: Tensor, sample_index: Tensor | None, hidden: bool) -> None:
        """Let dropout depend on the samples: that of attention and, if ``hidden``, of all rows."""
        self.sample_index = sample_index
        if hidden:
            self.numbers = numbers_of_rows(given, sample_index, self.packed)

    def draw_seeds(self, model: Any, given: Tensor, numbers: Callable[[], list[Any]]) -> None:
        """Draw the seeds of all layers at once: on a GPU each draw is a launch.

        The second column is that of causal attention: self-attention and cross-attention of a layer
        differ. The other three are those of hidden states. On a CPU every call draws one. So it
        does if two layers have one number, as in a model that the user has made deeper: they would
        drop the same.
        """
        if given.device.type not in ONE_DRAW or torch.compiler.is_compiling():
            return
        layers = numbers()
        if set(layers) != set(range(len(layers))):
            return
        if not any(getattr(model.config, name, 0.0) for name in DROPOUTS):
            return
        self.seeds = torch.randint(2**63 - 1, (len(layers), 5), device=given.device)

    @property
    def layers_need_it(self) -> bool:
        """Whether layers need this object: some rows are left out, or dropout depends on it."""
        cut = self.packed is not None or self.last is not None
        drops = self.numbers is not None or self.seeds is not None or self.sample_index is not None
        return cut or drops or bool(self.layers)

    def for_layer(self, number: int) -> Rows:
        """This object for a layer without ``layer_idx``, such as one that runs more than once."""
        return self if self.seeds is None else replace(self, number_of_layer=number)

    def seeds_of(self, module: Any) -> tuple[Tensor, ...] | None:
        """The seeds of a layer's hidden states; None = each is drawn where it is used."""
        number = self.number_of_layer
        number = getattr(module, "layer_idx", None) if number is None else number
        if self.seeds is None or number is None:
            return None
        return self.seeds[number, 2:].unbind()

    def cu_seqlens_of(self, self_attention: bool) -> tuple[Tensor, Tensor, int, int] | None:
        """(cu_seqlens int32 [B + 1] of queries and of keys, max_seqlen of both) of one attention.
        Without an encoder all attention is self-attention."""
        packed, last = self.packed, self.last
        if self.is_cut and last is not None:
            return last.cu_seqlens_q, last.cu_seqlens_k, last.max_seqlen_q, last.max_seqlen_k
        if packed is None:
            return None
        keys = packed if self_attention or self.cross is None else self.cross
        return packed.cu_seqlens, keys.cu_seqlens, packed.max_seqlen, keys.max_seqlen

    def of_others(self) -> Rows:
        return replace(self, last=None)

    def numbers_of(self, last: LastRows | None) -> RowNumbers | None:
        """``numbers``; with ``last``, only those of the rows of the last layer."""
        if last is None or self.numbers is None:
            return self.numbers
        source = last.source.clamp(min=0)
        return RowNumbers(self.numbers.sample_index[source], self.numbers.position[source])


@dataclass
class LastRows(_Movable):
    """The rows that the last layer computes. Its keys and values come from all rows."""

    layer: int  # the ``layer_idx`` of that layer
    source: Tensor  # int64 [P], rows of the layer's input, flattened; -1 in unused slots
    cu_seqlens_q: Tensor  # int32 [B + 1], the rows of each sequence among ``source``
    max_seqlen_q: int  # an upper bound of their number
    cu_seqlens_k: Tensor  # int32 [B + 1], the rows of each sequence in the input
    max_seqlen_k: int  # an upper bound of their number
    key_mask: Tensor | None  # bool [N], None = all
    slots: Tensor  # int64 [B * T], the index of a flat position in ``source``, -1 if not there

    @classmethod
    def of(
        cls,
        layer: int,
        needed: Tensor,
        capacity: int,
        longest: int,
        ragged: RaggedBatch | None,
        mask: Tensor | None,
        dtype: torch.dtype | None = None,
    ) -> LastRows:
        """The rows at the positions where ``needed`` [B, T] is True.

        Args:
            capacity, longest: upper bounds of the number of these rows, in all and in one sequence.
                They are used if counting the rows would be a sync.
            ragged: the packed batch, which contains every needed row; None = padded.
            mask: bool [B, T], True = token, of a padded batch; None = all.
            dtype: of the weights, for ``with_spare_slots``.
        """
        batch, seqlen = needed.shape
        lengths = needed.sum(1)
        known = values_are_known(needed)
        if known:
            capacity, longest = int(lengths.sum()), max(1, int(lengths.max()))
        positions = compact(needed, capacity)
        if known:
            positions = with_spare_slots(positions, batch * seqlen, dtype)
        slots = slots_of(positions, batch * seqlen)
        cu_seqlens_q = _offsets(lengths)
        if ragged is None:
            # No cumsum of equal lengths: Inductor cannot rewrite that if sizes are symbols.
            ends = torch.arange(batch + 1, dtype=torch.int32, device=needed.device) * seqlen
            key_mask = None if mask is None else mask.flatten()
            source, keys = positions, (ends, seqlen, key_mask)
        else:
            source = values_at(ragged.slots(), positions).masked_fill(positions < 0, -1)
            keys = (ragged.cu_seqlens, ragged.max_seqlen, ragged.key_mask)
        return cls(layer, source, cu_seqlens_q, longest, *keys, slots)

    def attention_inputs(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(what queries [1, P, E], keys and values [1, N, E] are of, the mask) of an attention, of
        the layer's input [..., E]. It is called like cross-attention."""
        states = hidden_states.flatten(0, -2)[None]
        return self.rows(hidden_states), states, self.attention_mask()

    def attention_mask(self) -> Tensor | None:
        return None if self.key_mask is None else made_for_one_forward(self.key_mask[None])

    def rows(self, hidden_states: Tensor, dims: int = 1) -> Tensor:
        """These rows of what all rows have, [..., E] -> [1, P, E]; a row may have more ``dims``."""
        states = hidden_states.flatten(0, -1 - dims)
        rows = ops.gather_rows(states.flatten(1), self.source)
        return rows.view(1, -1, *states.shape[1:])


def numbers_of_rows(
    given: Tensor, sample_index: Tensor | None, ragged: RaggedBatch | None
) -> RowNumbers | None:
    """The sample and position of each row that a backbone computes of ``given`` [B, T, …].

    The result is None in a trace, where dropout does not depend on them.

    Args:
        sample_index: int64 [B]; None = 0 ... B - 1.
        ragged: the rows that are computed; None = all.
    """
    if not is_eager(given):
        return None
    batch, seqlen = given.shape[:2]
    everything = torch.arange(batch * seqlen, device=given.device)
    rows = everything if ragged is None else ragged.positions
    sample, position = rows.div(seqlen, rounding_mode="floor"), rows % seqlen
    return RowNumbers(sample if sample_index is None else sample_index[sample], position)


class SetsDropoutRows:
    """Mixin of a layer that tells its dropout which rows it computes.

    It reads them from its keyword argument ``rows``. So a checkpointed layer draws the same dropout
    again when the backward recomputes it.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        rows: Rows | None = kwargs.get("rows")
        numbers = None if rows is None else rows.numbers_of(rows.last)
        return on_rows(numbers, super().forward, *args, **kwargs)  # type: ignore[misc]


def know_their_rows(layers: Iterable[Any]) -> bool:
    """Whether all of these layers tell their dropout which rows they compute."""
    return all(isinstance(layer, SetsDropoutRows) for layer in layers)


def _counts(keep: Tensor, mask: Tensor) -> tuple[int, int]:
    """(how many rows are computed, how many of these are masked)."""
    count, *hidden = read(keep.sum(), *(() if keep is mask else [(keep & ~mask).sum()]))
    return count, sum(hidden)


#: The mask [B, T] of a batch, and the rows, bool [B, T], that are computed although it masks them;
#: by the names of the arguments ``unpad`` for these batches.
Batches: TypeAlias = dict[str, tuple[Tensor | None, Tensor | None]]


def slots_of_labels(
    labels: Tensor,
    inputs: dict[str, Any],
    batches: Callable[[Tensor], Batches],
    name: str = "unpad",
    *,
    waits: bool = True,
) -> int | None:
    """The number of slots for labels [B, T]; None = ``labelled_positions`` finds it.

    On a GPU counting is a wait. What a backbone would count is counted in the same one: its
    ``unpad`` in ``inputs`` becomes a ``Counted``. A capacity is the number of slots, too.

    Args:
        batches: of the mask [B, T] of the labels, the batches that are counted.
        name: that of the argument for the batch that has the labels.
        waits: whether to wait for the labels alone, too.
    """
    if values_are_known(labels):
        return None
    labelled, unpad = labels != IGNORE_INDEX, inputs.get(name)
    if not (unpad is None or isinstance(unpad, bool)):
        rows = unpad if isinstance(unpad, int) else unpad.positions.shape[0]
        most = torch.sym_min(rows, labels.numel())
        torch._assert_async(labelled.sum() <= most, "unpad: more labels than the capacity")
        return most
    if not values_can_be_read(labels):
        return None
    numbers, counted = [labelled.sum()], []
    for batch, (mask, rows) in batches(labelled).items():
        asked = inputs.get(batch) is None or inputs[batch] is True
        if asked and isinstance(mask, Tensor) and mask.dim() == 2:
            seen = mask.bool()
            numbers += [seen.sum(), (seen[:0] if rows is None else rows & ~seen).sum()]
            counted.append(batch)
    if not (counted or waits):
        return labels.numel()
    count, *others = read(*numbers)
    for batch, tokens, masked in zip(counted, others[::2], others[1::2], strict=True):
        if not masked:
            inputs[batch] = Counted(tokens)
    return count


def encoder_batch(
    model: Any, inputs: dict[str, Any], beside: Tensor | None = None
) -> Callable[[Tensor], Batches]:
    """``batches`` of an encoder, for ``slots_of_labels``.

    ``beside``, int64, are the flat positions of further rows that the head of ``model`` reads.
    """

    def batches(labelled: Tensor) -> Batches:
        (batch, seqlen), mask = labelled.shape, inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.numel() != labelled.numel():
            return {}
        rows = either(labelled, inputs.get("extra_rows"))
        if beside is not None:
            rows = rows | mask_at(beside, batch, seqlen)
        if getattr(model.base_model, "pooler", None) is not None:  # it reads the first rows
            rows = rows | (torch.arange(seqlen, device=labelled.device) == 0)
        mask = mask.reshape(labelled.shape)
        if getattr(model.base_model, "contiguous", False):
            rows = between(either(mask.bool(), rows))
        return {"unpad": (mask, rows)}

    return batches


def values_at(values: Tensor, positions: Tensor) -> Tensor:
    """``values[positions]`` [P]; the first value where a position is -1."""
    return values[positions.clamp(min=0)]


def slots_of(positions: Tensor, total: int) -> Tensor:
    """int64 [total]: the index in ``positions`` of each number, -1 if it is not there."""
    slots = positions.new_full((total + 1,), -1)
    # Position -1 writes to the additional last element, which is cut off.
    slots[positions] = torch.arange(positions.shape[0], device=positions.device)
    return slots[:total]


def padding_of(config: Any) -> int | None:
    """The id of padding; of a configuration without one, with what tokenizers pad then: the end of
    a text."""
    padding = getattr(config, "pad_token_id", None)
    padding = getattr(config, "eos_token_id", None) if padding is None else padding
    return padding[0] if isinstance(padding, list) else padding


def read_by_callers(config: Any, given: Any, mask: Tensor | None) -> Tensor | None:
    """bool [B, T]: the rows that a caller may read although the mask hides them; None if it hides
    none, or cannot be read.

    Padding has the id of padding. Other tokens that nobody attends to are read: late interaction
    fills queries up with [MASK]. Embeddings show no ids: any may be read, as where a configuration
    names no padding.

    Args:
        config: of the model.
        given: ids [B, T], or embeddings [B, T, E]; None if there are none.
    """
    if mask is None or given is None or not values_can_be_read(mask):
        return None
    if mask.shape[-1:] != given.shape[1:2]:  # which is refused where the mask is used
        return None
    if given.is_floating_point():
        return given.new_ones(given.shape[:-1], dtype=torch.bool)
    padding = padding_of(config)
    return torch.ones_like(given, dtype=torch.bool) if padding is None else given != padding


def mask_at(positions: Tensor, batch: int, seqlen: int) -> Tensor:
    """bool [B, T]: True at the flat ``positions``; -1 is ignored."""
    total = batch * seqlen
    where = positions.new_zeros(total + 1, dtype=torch.bool)  # batched, under vmap, as these are
    # Not where[positions] = True, which copies the value from the CPU and waits for the GPU.
    where.index_fill_(0, positions.long(), 1)
    return where[:total].view(batch, seqlen)


def either(one: Tensor | None, other: Tensor | None) -> Any:
    """``one | other``, where None counts as all False."""
    if one is None or other is None:
        return other if one is None else one
    return one | other


def _offsets(lengths: Tensor) -> Tensor:
    """[B] lengths -> int32 [B + 1], their cumulative sums, from 0."""
    return F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def until_last(chosen: Tensor) -> Tensor:
    """bool [B, T]: True up to the last True of each row."""
    return chosen.flip(1).cumsum(1).flip(1) > 0


def between(chosen: Tensor) -> Tensor:
    """bool [B, T]: True from the first to the last True of each row."""
    return (chosen.cumsum(1) > 0) & until_last(chosen)


def unpadded(
    mask: Tensor | None,
    extra_rows: Tensor | None,
    unpad: Unpad,
    contiguous: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[RaggedBatch | None, bool]:
    """(the rows of a batch that are computed, whether it is known that no key is masked).

    The rows are None if all are computed, padded.

    Args:
        mask: [B, T], 0 = padding.
        extra_rows: bool [B, T], rows to compute although they are masked as keys.
        unpad: as in ``EncoderModel``.
        contiguous: also compute every row between the first and the last of a sequence's rows.
        dtype: of the weights, for ``with_spare_slots``.
    """
    if isinstance(unpad, RaggedBatch):
        return unpad, False
    counts = (unpad.tokens, 0) if isinstance(unpad, Counted) else None
    counted = unpad is None or unpad is True or counts is not None
    if mask is None or unpad is False or (counted and not values_can_be_read(mask)):
        return None, mask is None
    mask = mask.bool()
    if counts is not None:
        extra_rows = None
    elif contiguous:
        extra_rows = between(either(mask, extra_rows))
    if not counted:
        return RaggedBatch.of(mask, extra_rows, unpad), False  # type: ignore[arg-type]
    counts = counts or _counts(either(mask, extra_rows), mask)
    rows = RaggedBatch.of(mask, extra_rows, counts=counts)
    full = counts == (mask.numel(), 0)
    return None if rows is None else rows.with_spare_slots(dtype), full


def backbone_unpad(rows: RaggedBatch | None, full: bool, mask: Tensor | None) -> Unpad:
    """``unpad`` for a backbone whose rows a head has found; the first two are of ``unpadded``."""
    if rows is None and full and mask is not None:
        return Counted(mask.numel())
    return False if rows is None else rows


def rows_computed(
    model: Any, shape: tuple[int, int], mask: Tensor | None, row_plan: Rows, reason: str | None
) -> str:
    """The line of ``fastplm.explain`` about the rows that a backbone computes of a batch [B, T]."""
    total = shape[0] * shape[1]
    if row_plan.packed is not None:
        rows = f"{row_plan.packed.positions.shape[0]} of {total} rows, padding left out"
    elif mask is None or (mask.dim() == 2 and values_can_be_read(mask) and bool(mask.all())):
        rows = f"{total} rows, no padding"
    else:
        reason = reason or ("asked" if values_can_be_read(mask) else "traced")
        rows = f"{total} rows with their padding: {PADDING_REASONS[reason]}"
    if row_plan.last is not None:
        rows += f"; {row_plan.last.source.shape[0]} of them in the last layer"
    name = model.config._attn_implementation
    return f"{type(model).__name__}: {rows}; attention by {name!r}"


def padded(hidden: Tensor, unpad: Unpad) -> Tensor:
    """The last hidden state [B, T, E] of a backbone that was called with this ``unpad``."""
    return unpad.pad(hidden) if isinstance(unpad, RaggedBatch) else hidden


def rows_at(hidden: Tensor, positions: Tensor, slots: Tensor | None = None) -> Tensor:
    """[..., E] -> [P, 1, E]: the rows at ``slots[positions]``, or at ``positions`` if None."""
    if slots is not None:
        positions = values_at(slots, positions).masked_fill(positions < 0, -1)
    return ops.gather_rows(hidden.flatten(0, -2), positions)[:, None]


def restore_layout(
    outputs: Any,
    rows: Rows,
    output_rows: Tensor | str | None,
    unpad: Unpad,
    first: Tensor | None = None,
    pooled: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """The outputs for the caller, from the outputs of the parent on the computed rows.

    Args:
        output_rows, unpad: as the caller gave them; "first" = the rows ``first``.
        first: int64 [B], flat positions of the first tokens.
        pooled: the pooler, a function of the first rows [B, 1, E]; None = there is none.
    """
    hidden, packed, slots = outputs.last_hidden_state, rows.packed, None
    if rows.last is not None:
        slots = rows.last.slots
    elif packed is not None:
        slots = packed.slots()
    changed: dict[str, Any] = {}
    positions = first if isinstance(output_rows, str) else output_rows
    if positions is not None:
        changed["last_hidden_state"] = rows_at(hidden, positions, slots)
    elif isinstance(unpad, RaggedBatch):
        changed["last_hidden_state"] = hidden if packed is unpad else unpad.pack_rows(hidden)
    elif packed is not None:
        changed["last_hidden_state"] = packed.pad(hidden, slots)
    as_packed = packed is not None and packed.of_caller
    if packed is not None and not as_packed and outputs.get("hidden_states") is not None:
        # See ``unpad_of``.
        changed["hidden_states"] = tuple(
            None if state is None else packed.pad(state) for state in outputs.hidden_states
        )
    if slots is not None and first is not None and pooled is not None:
        # The parent has pooled the first packed row, which is wrong; replace its result.
        shown = changed["last_hidden_state"]
        whole = positions is None and not isinstance(unpad, RaggedBatch)
        row = shown[:, :1] if whole else rows_at(hidden, first, slots)
        changed["pooler_output"] = pooled(row)
    return type(outputs)(**{**outputs, **changed}) if changed else outputs
