"""``nn.Dropout`` on ``ops.dropout``, and what the rows are that a layer computes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastplm import ops
from fastplm.ops.dropout import OP as DROPOUT
from fastplm.ops.dropout import draws_by_row


class RowNumbers(NamedTuple):
    """What the rows of hidden states [..., E] are, wherever a batch has them.

    Args:
        sample_index: int64 [N], the sample index of each row.
        position: int64 [N], its position in the sample.
    """

    sample_index: Tensor
    position: Tensor

    def to(self, *args: Any, **kwargs: Any) -> RowNumbers:
        """On a device; Accelerate moves to a layer's device what has this method."""
        return RowNumbers(self.sample_index.to(*args, **kwargs), self.position.to(*args, **kwargs))


_ROWS: ContextVar[RowNumbers | None] = ContextVar("_ROWS", default=None)


def rows_now(count: int) -> RowNumbers | None:
    """The numbers of the rows that are computed, if there are ``count`` and they are known."""
    numbers = None if torch.compiler.is_compiling() else _ROWS.get()
    known = numbers is not None and numbers.sample_index.shape[0] == count
    return numbers if known else None


def on_rows(numbers: RowNumbers | None, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, in which dropout of these rows is drawn by their numbers.

    Compiled programs draw by the number of the element: Dynamo cannot trace a variable of a context
    inside of a checkpoint. A layer that may be checkpointed calls this itself, with numbers among
    its arguments, as the backward runs it alone.
    """
    if torch.compiler.is_compiling() or numbers is _ROWS.get():
        return function(*args, **kwargs)
    token = _ROWS.set(numbers)
    try:
        return function(*args, **kwargs)
    finally:
        _ROWS.reset(token)


def dropout(input: Tensor, p: float, training: bool = True, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.dropout``, for layers: by the rows' numbers where these are known, else
    by whichever is faster, ``ops.dropout`` or PyTorch's function."""
    if training and not inplace:
        numbers = None if torch.compiler.is_compiling() else _ROWS.get()
        if (
            numbers is not None
            and 0.0 < p < 1.0
            and numbers.sample_index.shape[0] * input.shape[-1] == input.numel()
            and draws_by_row(input)
        ):
            sample_index, position = numbers.sample_index, numbers.position
            return ops.dropout(input, p, sample_index=sample_index, position=position)
        out = DROPOUT.layer(input, p, None, None, None) if 0.0 < p < 1.0 else None
        if out is not None:
            return out
    return torch.nn.functional.dropout(input, p, training, inplace)


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` that uses ``ops.dropout`` on a CPU, where PyTorch's is slow.

    The probability differs by at most 1/131072; the random numbers are different. Drop-in models
    use it instead of ``torch.nn.Dropout``; in them, what is dropped of a row depends on its sample
    and position, not on the batch.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] -> [...]."""
        return dropout(input, self.p, True, self.inplace) if self.training else input
