"""The threads of a run, and the precision of its products."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import fastplm

# A product of this size takes a core a few milliseconds, and is repeated this often.
_PRODUCT, _REPEATED = 512, 8
# With idle cores two threads take half the time of one; above this share the cores are busy.
_BUSY = 0.8


@contextmanager
def using_threads(count: int | None) -> Iterator[None]:
    """Set PyTorch's number of threads, and set it back."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def computing(threads: int | None, *, huge_pages: bool = False) -> Iterator[None]:
    """What a command computes with: PyTorch's threads, and memory that the process keeps."""
    fastplm.keep_memory(huge_pages=huge_pages)
    with using_threads(threads):
        yield


@contextmanager
def fp32_products(precision: str) -> Iterator[None]:
    """``torch.set_float32_matmul_precision``, and set back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def busy_cores() -> str:
    """A warning if several threads are hardly faster than one, or slower; else an empty string."""
    threads = torch.get_num_threads()
    if threads == 1:
        return ""
    many = _milliseconds()
    with using_threads(1):
        one = _milliseconds()
    if many < _BUSY * one:
        return ""
    compared = "slower" if many > one else "hardly faster"
    return (
        f"The {threads} threads of this process are {compared} than one (a product takes "
        f"{many:.1f} ms against {one:.1f}): other programs use the cores, and threads wait for "
        "each other. With --threads 1 steps may be several times as fast."
    )


def _milliseconds() -> float:
    matrix = torch.ones(_PRODUCT, _PRODUCT, device="cpu")
    torch.mm(matrix, matrix)
    began = time.perf_counter()
    for _ in range(_REPEATED):
        torch.mm(matrix, matrix)
    return 1000 * (time.perf_counter() - began) / _REPEATED
