"""Batches that the caller has packed: one row [1, N], and the borders of its texts.

    input_ids [1, N], cu_seq_lens_q [K + 1] -> a padded batch [K, T] whose rows are known
    -> the forward -> what has a value for each token, as [1, N, …] again

So whatever is computed of a text (positions, shares, means, first and last tokens, windows, shifted
labels) knows where it begins and ends. The layers run on the N rows as they lie.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastplm import ops
from fastplm._modes import values_are_known
from fastplm.errors import UnsupportedError, fail
from fastplm.hf import LABELS_OF_TEXTS, OF_CHOICES, PACKED, check_packed, has_name, packing_of
from fastplm.models._ragged import RaggedBatch, slots_of, values_at
from fastplm.nn._rows import IGNORE_INDEX

_BORDERS = PACKED[0]
#: What tokens have that no text has, where it is not 0.
_FILLERS = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX}
#: Arguments with flat positions in the row.
_POSITIONS = ("output_rows", "masked_positions", "loss_positions")
#: Outputs [K, T]; others of tokens are [K, T, …], and those of texts [K, …] with less dimensions.
_OF_TOKENS = ("start_logits", "end_logits", "replaced_ids")
#: Arguments that are refused: a packed row has no cache, no weights [N, N] and no end of its own.
_REFUSED = ("past_key_values", "cache", "use_cache", "output_attentions", "logits_to_keep")


def takes_packed(forward: Callable[..., Any], parent: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a model, which also takes packed rows; ``parent`` is that of its parent."""
    parameters = inspect.signature(forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    excludes = any(p.name == "exclude_padding" for p in parameters)
    sides = "decoder_input_ids" in inspect.signature(parent).parameters

    @functools.wraps(forward)
    def packed_or_not(self: Any, *args: Any, **kwargs: Any) -> Any:
        bounds = packing_of(kwargs)
        if bounds is None:
            return forward(self, *args, **kwargs)
        inputs = dict(zip(names, args))  # noqa: B905
        if twice := inputs.keys() & kwargs.keys():
            raise TypeError(f"forward() got multiple values for argument {min(twice)!r}")
        inputs |= {name: value for name, value in kwargs.items() if name not in PACKED}
        if excludes:
            inputs["exclude_padding"] = True
        return _on_texts(self, forward, inputs, bounds, sides)

    return packed_or_not


class _Texts(NamedTuple):
    """Where the rows of a packed batch are in the padded one."""

    rows: RaggedBatch
    slots: Tensor  # int64 [K * T], the row of each flat position, -1 if there is none

    def pad(self, values: Tensor, filler: int = 0) -> Tensor:
        """[1, N, …] -> [K, T, …]."""
        if values.requires_grad:
            out = ops.gather_rows(values[0], self.slots)
        else:
            absent = (self.slots < 0).view(-1, *[1] * (values.dim() - 2))
            out = values_at(values[0], self.slots).masked_fill(absent, filler)
        return out.unflatten(0, (self.rows.batch, self.rows.seqlen))

    def pack(self, values: Tensor) -> Tensor:
        """[K, T, …] -> [1, N, …]."""
        if values.is_floating_point() and values.dim() == 3:
            return self.rows.pack_rows(values)
        return self.rows.pack(values)


def _on_texts(
    model: Any,
    forward: Callable[..., Any],
    inputs: dict[str, Any],
    bounds: dict[str, Any],
    sides: bool,
) -> Any:
    where, config, ours = type(model).__name__, model.config, hasattr(model, "_takes_rows")
    if has_name(model, OF_CHOICES):
        expected = "None, as a text has several choices"
        fix = "Pass the padded batch [batch, choices, tokens]."
        fail(where, _BORDERS, "a packed row", expected, fix, UnsupportedError)
    check_packed(model, inputs, bounds, sides)
    for name in _REFUSED:
        if (value := inputs.get(name)) is not None and (isinstance(value, Tensor) or value):
            fix = "Pass the padded batch and its attention_mask: its padding is left out."
            fail(where, _BORDERS, f"a packed row with {name}", "one without", fix, UnsupportedError)
    given = inputs.get("input_ids")
    given = inputs.get("inputs_embeds") if given is None else given
    if given is None:
        return forward(model, **inputs)  # which raises
    texts = _texts_of(where, given, inputs.get("attention_mask"), bounds)
    (batch, seqlen), total = (texts.rows.batch, texts.rows.seqlen), given.shape[1]
    of_texts: tuple[str, ...] = LABELS_OF_TEXTS
    if getattr(model, "_one_label_a_text", False):
        of_texts = (*of_texts, "labels")
    _check_labels(where, inputs, of_texts, batch, total)
    fillers = _FILLERS | {"input_ids": getattr(config, "pad_token_id", None) or 0}
    for name, value in inputs.items():
        if not isinstance(value, Tensor) or name in of_texts:
            continue
        if name in _POSITIONS:
            inputs[name] = values_at(texts.rows.positions, value).masked_fill(value < 0, -1)
        elif value.shape[:2] == (1, total):
            inputs[name] = texts.pad(value, fillers.get(name, 0))
        elif value.dim() > 1 and value.shape[0] != batch:
            got = f"shape {tuple(value.shape)} with a packed row of {batch} texts"
            expected = f"(1, {total}, …) or ({batch}, …), a value for each token or text"
            fail(where, name, got, expected, "Pass the padded batch.")
    if inputs.get("attention_mask") is None:
        inputs["attention_mask"] = (texts.slots >= 0).view(batch, seqlen).long()
    if ours:
        inputs["unpad"] = texts.rows if model._takes_rows else total
    if ours and getattr(model.base_model, "_is_causal", bool)():
        inputs["use_cache"] = False
    asked = inputs.get("return_dict")
    outputs = forward(model, **inputs | {"return_dict": True})

    def as_given(name: str, value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(as_given(name, one) for one in value)
        of_tokens = isinstance(value, Tensor) and (value.dim() == 3 or name in _OF_TOKENS)
        padded = of_tokens and value.shape[:2] == (batch, seqlen) != (1, total)
        return texts.pack(value) if padded else value

    outputs = type(outputs)(**{name: as_given(name, value) for name, value in outputs.items()})
    return outputs if (config.return_dict if asked is None else asked) else outputs.to_tuple()


def _texts_of(where: str, given: Tensor, mask: Tensor | None, bounds: dict[str, Any]) -> _Texts:
    ends, longest, total = bounds[_BORDERS], int(bounds["max_length_q"]), given.shape[1]
    if values_are_known(ends):
        lengths = ends.diff()
        least, most = (int(one) for one in lengths.aminmax())
        if int(ends[0]) != 0 or least < 0 or int(ends[-1]) > total:
            got = f"{int(ends[0])} … {int(ends[-1])} with lengths from {least}"
            expected = f"0 first, never decreasing, at most {total} (the tokens of the row) last"
            fail(where, _BORDERS, got, expected, "Build it as pad(lengths.cumsum(0), (1, 0)).")
        if most > longest:
            expected = f"at least {most}, the longest text"
            fail(where, "max_length_q", longest, expected, "Pass the longest length.")
        longest = max(1, most)
    else:
        torch._assert_async((ends.diff() <= longest).all(), "max_length_q: a text is longer")
    batch, ends = ends.shape[0] - 1, ends.to(given.device, torch.int64)
    row = torch.arange(total, device=given.device)
    text = torch.bucketize(row, ends[1:], right=True)
    flat = text * longest + row - values_at(ends, text)
    positions = torch.where(text < batch, flat, -1)
    keys = None
    if mask is not None and not (values_are_known(mask) and bool(mask.all())):
        keys = mask[0].bool() & (positions >= 0)
    rows = RaggedBatch(positions, ends.int(), longest, keys, batch, longest, of_caller=True)
    return _Texts(rows, slots_of(positions, batch * longest))


def _check_labels(
    where: str, inputs: dict[str, Any], of_texts: tuple[str, ...], batch: int, total: int
) -> None:
    """Check that labels are of the texts, or of the tokens; flat ones of tokens become [1, N]."""
    for name in of_texts:
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.shape[:1] != (batch,):
            got = f"shape {tuple(value.shape)} with a packed row of {batch} texts"
            fail(where, name, got, f"one value a text, [{batch}]", "Pass that of each text.")
    for name in ("labels", "shift_labels"):
        value = inputs.get(name)
        slots = any(inputs.get(one) is not None for one in _POSITIONS)  # labels of these, [P]
        if name in of_texts or not isinstance(value, Tensor) or slots and value.dim() == 1:
            continue
        if value.numel() != total:
            got = f"shape {tuple(value.shape)} with a packed row of {batch} texts"
            fix = "Concatenate the labels as the texts are."
            fail(where, name, got, f"one label a token, (1, {total})", fix)
        inputs[name] = value.reshape(1, total)
