"""Sets of token ids, given as ascending tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def is_one_of(input_ids: Tensor, ids: Tensor) -> Tensor:
    """A mask of the tokens among ``ids``, int64 [S]; ``torch.isin`` may wait for the device."""
    ids = ids.contiguous()
    place = torch.searchsorted(ids, input_ids.long().contiguous())
    none = torch.iinfo(torch.int64).min
    return torch.nn.functional.pad(ids, (0, 1), value=none)[place] == input_ids


def ordinary_id(rank: Tensor, special_ids: Tensor) -> Tensor:
    """The id with ``rank`` smaller ids that are not special.

    Args:
        rank: int64.
        special_ids: int64 [S], ascending, each once.
    """
    below = special_ids - torch.arange(special_ids.shape[0], device=rank.device)
    return rank + torch.searchsorted(below, rank, right=True)
