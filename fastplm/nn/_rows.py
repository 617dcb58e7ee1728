"""Labelled rows of a batch, their loss and its denominator."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastplm import ops
from fastplm._checks import INTEGER, check_dtype, check_shape, check_tensor, read
from fastplm._machine import computes_in
from fastplm._modes import values_are_known, values_can_be_read
from fastplm.errors import fail
from fastplm.nn.linear import Linear

IGNORE_INDEX = -100


def labelled_positions(
    labels: Tensor,
    ignore_index: int = IGNORE_INDEX,
    *,
    exact: bool = True,
    slots: int | None = None,
) -> Tensor:
    """Flat positions, int64 [P], of all labels that are not ``ignore_index``, in ascending order.

    P is their number, or unless ``exact`` what ``bucketed_rows`` makes of it on a CPU. Counting
    them is a sync on a GPU, unless the caller knows the number of ``slots``. In a trace and in the
    capture of a CUDA graph nothing can be counted, and P is that of all labels. Unused slots at the
    end are -1.
    """
    labelled = labels.flatten() != ignore_index
    if values_are_known(labelled):
        positions = places_on_cpu(labelled)
        return positions if exact else with_spare_slots(positions, labels.numel())
    if slots is None and values_can_be_read(labelled):
        slots = read(labelled.sum())[0]
    return compact(labelled, slots)


def compact(mask: Tensor, size: int | None) -> Tensor:
    """int64 [size], ascending: the flat positions of the True elements, -1 in unused slots."""
    mask = mask.flatten()
    if size is not None and values_are_known(mask):
        positions = places_on_cpu(mask)
        spare = size - positions.shape[0]
        return F.pad(positions, (0, spare), value=-1) if spare else positions
    order = (~mask).to(torch.uint8).argsort(stable=True)[:size]
    return order.masked_fill(~mask[order], -1)


def places_on_cpu(mask: Tensor) -> Tensor:
    """int64, ascending: where a mask [N] is True."""
    return mask.nonzero().squeeze(1)


def bucketed_rows(count: int, most: int) -> int:
    """``count`` rounded up to one of 16 numbers between two powers of two; ``most`` at most.

    For products of bf16 on a CPU, oneDNN compiles a program for each number of rows, in one or two
    milliseconds, and PyTorch keeps 1,024 of them. Batches without padding have as many different
    numbers as there are batches; with at most a sixteenth more rows they share a few.
    """
    step = 1 << max(0, count.bit_length() - 5)
    return min(-(-count // step) * step, most)


def _is_compiled(dtype: torch.dtype | None) -> bool:
    """Whether this CPU's products of a dtype are programs of oneDNN, one for each shape."""
    return dtype in (torch.bfloat16, torch.float16) and computes_in(dtype)


def with_spare_slots(positions: Tensor, most: int, dtype: torch.dtype | None = None) -> Tensor:
    """``positions`` [P] with unused slots, -1, where a number of rows that recurs is faster.

    Args:
        positions: int64 [P], eager.
        most: the most slots.
        dtype: of the weights; under autocast its dtype counts, and None is fp32.
    """
    if positions.device.type != "cpu":
        return positions
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if not _is_compiled(dtype):
        return positions
    count = positions.shape[0]
    return F.pad(positions, (0, bucketed_rows(count, most) - count), value=-1)


def labels_at(
    where: str,
    labels: Tensor,
    shape: Sequence[int],
    positions: Tensor | None,
    *,
    exact: bool = True,
    slots: int | None = None,
    argument: str = "masked_positions",
) -> tuple[Tensor, Tensor]:
    """The labelled positions, and their labels with -100 in unused slots: int64 [P] both.

    Args:
        where: the caller's name in error messages.
        labels: int64 [...] or flat, -100 = none.
        shape: of the tokens.
        positions: int64 [P] flat positions, -1 in unused slots; None = computed from ``labels``.
        exact, slots: of computed ones, see ``labelled_positions``.
        argument: the name of ``positions`` in error messages.
    """
    labels = as_tokens(where, labels, shape).flatten().long()
    if positions is None:
        positions = labelled_positions(labels, exact=exact, slots=slots)
    else:
        check_tensor(where, argument, positions, ndim=1)
        check_dtype(where, argument, positions, (torch.int64,))
        if values_are_known(positions):
            check_flat_positions(where, argument, positions, labels.numel())
    # One additional element, so that position -1 reads "no label", also in an empty batch.
    targets = torch.cat((labels, labels.new_full((1,), IGNORE_INDEX)))[positions]
    return positions, targets


def as_tokens(where: str, labels: Tensor, shape: Sequence[int]) -> Tensor:
    """Labels in the shape of the tokens. As in Transformers, labels may be flat."""
    check_tensor(where, "labels", labels)
    check_dtype(where, "labels", labels, INTEGER)
    if labels.dim() == 1 and labels.shape[0] == math.prod(shape):
        return labels.view(shape)
    check_shape(
        where, "labels", labels, shape, "one label a token", "Use -100 where there is none."
    )
    return labels


def check_flat_positions(where: str, argument: str, positions: Tensor, total: int) -> None:
    """Positions are those of a batch of ``total`` tokens, or -1."""
    if positions.numel() == 0:
        return
    low, high = (int(bound) for bound in positions.aminmax())
    if low < -1 or high >= total:
        got = f"positions from {low} to {high}"
        expected = f"-1 to {total - 1}, flat positions in the batch"
        fix = "Position (b, t) is b * T + t; -1 marks an unused slot."
        fail(where, argument, got, expected, fix)


#: The class of a module of which ``fastplm.freeze`` made a subclass, by that subclass.
THAWED: dict[type, type] = {}


def kind_of(module: Any) -> Any:
    """The class of a module as it was made, frozen or not."""
    kind = type(module)
    return THAWED.get(kind, kind)


@functools.cache
def is_known(function: Any) -> bool:
    """Whether it and all that it wraps was written in PyTorch, Transformers or this package."""
    while function is not None:
        written = getattr(function, "__globals__", {}).get("__name__", "").split(".")[0]
        if written not in ("fastplm", "torch", "transformers"):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of these classes, with no hooks and no replaced forward.

    Only then may its weights be used without calling it. Adapters, hooks and wrappers that shard
    the weight need the call, and so does a forward that somebody has set on the class.
    """
    if not are_plain((module,), *kinds):
        return False
    return torch.compiler.is_compiling() or is_known(type(module).forward)


def are_plain(modules: Iterable[nn.Module], *kinds: type[nn.Module]) -> bool:
    """``is_plain`` of all; without ``kinds`` they may be of any class."""
    for module in modules:
        if (
            (kinds and type(module) not in kinds and kind_of(module) not in kinds)
            or "forward" in module.__dict__
            or module._forward_pre_hooks
            or (module._forward_hooks and not _records_nothing(module._forward_hooks.values()))
            or module._backward_hooks
            or module._backward_pre_hooks
        ):
            return False
    return True


#: Transformers' module whose hooks record outputs. They stay on a model that was once asked for
#: hidden states.
RECORDER = "transformers.utils.output_capturing"


def _records_nothing(hooks: Iterable[Any]) -> bool:
    """Whether hooks record outputs, and no other than hidden states are asked for now."""
    if any(getattr(hook, "__module__", "") != RECORDER for hook in hooks):
        return False
    asked = sys.modules[RECORDER]._active_collector.get()
    return asked is None or asked.keys() <= {"hidden_states"}


def vocabulary_loss(
    rows: Tensor,
    decoder: nn.Module,
    targets: Tensor,
    normalizer: float | Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dense: bool,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of ``decoder(rows)``; without full logits if it is a linear layer.

    Args:
        rows: [P, E].
        decoder: the projection to the vocabulary.
        targets: int64 [P], -100 = none.
        normalizer: the denominator of the loss; None = the number of targets.
        weight: used instead of the decoder's weight; None = the decoder's weight.
        bias: [V], added to the decoder's logits.
        dense: whether most rows have a target.
        reduction: "mean", or "none" for the loss of each row.

    Returns:
        fp32 [], 0 without targets; or fp32 [P], 0 in rows without target.
    """
    if reduction == "none":
        normalizer = None
    if is_plain(decoder, nn.Linear, Linear):
        own: Any = decoder
        if bias is None:
            bias = own.bias
        elif own.bias is not None:
            bias = own.bias + bias
        return ops.linear_cross_entropy(
            rows,
            own.weight if weight is None else weight,
            targets,
            linear_bias=bias,
            reduction=reduction,
            normalizer=as_normalizer(normalizer, rows.device),
            expected_targets=rows.shape[0] if dense else None,
        )
    logits = decoder(rows)
    logits = logits if bias is None else logits + bias
    logits = in_fp32(logits)
    each = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE_INDEX)
    if reduction == "none":
        return each
    count = (targets != IGNORE_INDEX).sum() if normalizer is None else normalizer
    return each.sum() / as_normalizer(count, rows.device)


def in_fp32(values: Tensor) -> Tensor:
    """The values in fp32, or in their own dtype if that is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def batch_share(labels: Tensor, num_items_in_batch: float | Tensor | None) -> Tensor | float:
    """This batch's share of the labels of all accumulated batches; 1 without their number."""
    if num_items_in_batch is None:
        return 1.0
    return (labels != IGNORE_INDEX).sum() / as_normalizer(num_items_in_batch, labels.device)


@overload
def as_normalizer(value: None, device: torch.device) -> None: ...


@overload
def as_normalizer(value: float | Tensor, device: torch.device) -> Tensor: ...


def as_normalizer(value: float | Tensor | None, device: torch.device) -> Tensor | None:
    """The denominator of a mean as a 0-d fp32 tensor, 1 instead of 0; no sync."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        tensor = value.to(device=device, dtype=torch.float32).reshape(())
    else:
        tensor = torch.full((), float(value), device=device)
    return tensor.masked_fill(tensor == 0, 1.0)
