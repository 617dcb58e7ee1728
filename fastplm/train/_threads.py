"""The processor of a run: its threads, and whether it multiplies bf16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def hardware_has_bf16() -> bool:
    """Whether the device of a run multiplies bf16 in hardware."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Set PyTorch's number of threads, and set it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
