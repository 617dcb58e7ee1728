"""Reference of ``ops.gather_rows``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch


def gather_rows_ref(input: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``out[p] = input[positions[p]]``, or a zero row where the position is not in [0, N).

    Args: those of ``ops.gather_rows``. A zero row passes no gradient.
    """
    rows = input.shape[0]
    if rows == 0:
        # The sum of no rows: zeros that still hang on the graph of `input`.
        return input.sum(0).repeat(positions.shape[0], 1)
    unused = (positions < 0) | (positions >= rows)
    gathered = input.index_select(0, positions.masked_fill(unused, 0))
    # Filled, not multiplied by 0: the row read in its place may hold a NaN.
    return gathered.masked_fill(unused[:, None], 0.0)
