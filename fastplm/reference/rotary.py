"""Reference of ``ops.rotary``."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_ref(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """``ops.rotary``, in plain PyTorch."""
    return rotated(query, cos, sin), rotated(key, cos, sin)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, H, T, D], of which elements i and i + D/2 are the pair that is rotated."""
    wide = torch.promote_types(heads.dtype, torch.float32)
    half = heads.shape[-1] // 2
    first, second = heads.to(wide).split(half, -1)
    cos, sin = (one[:, None, :, :half].to(wide) for one in (cos, sin))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, -1).to(heads.dtype)
