"""What pre-training and fine-tuning share: how a run begins, and the processor it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastplm.data._folder import say
from fastplm.train._config_file import write_settings
from fastplm.train._run_folder import RECORD, claimed, read_record, write_hashed, writing
from fastplm.train.report import settings_of

#: What the processes on another machine may have otherwise.
_OF_A_MACHINE = ("cache", "threads", "workers")
# A product of this size takes a core a few milliseconds, and is repeated this often.
_PRODUCT, _REPEATED = 512, 8
# With idle cores two threads take half the time of one; above this share the cores are busy.
_BUSY = 0.8


@contextmanager
def started(
    args: Any, own: Iterable[Path] = ()
) -> Iterator[tuple[dict[str, Any] | None, Callable[[], None]]]:
    """Claim the folder of a run and set its threads.

    Gives the record of a run that is resumed, or None, and what is called before the first write
    (see ``claimed``).
    """
    where, out = args.where, Path(args.out)
    folder = claimed(
        where,
        out,
        resume=args.resume,
        overwrite=args.overwrite,
        own=own,
        inputs=args.inputs(),
        resumable=args.resumable,
    )
    with folder as make_room:
        with using_threads(args.threads):
            yield read_record(where, out) if args.resume else None, make_room


def describe(args: Any, free: set[str], **facts: Any) -> dict[str, Any]:
    """What the results of a run depend on: its settings but the ``free`` ones, and ``facts``."""
    settings = settings_of(args)
    return {name: settings[name] for name in sorted(settings.keys() - free)} | facts


def begin(
    args: Any,
    run: dict[str, Any],
    announcement: str,
    device: torch.device,
    make_room: Callable[[], None],
) -> None:
    """Write what the run is, and print what it will do."""
    out = Path(args.out)
    with writing(args.where, out):
        make_room()
        write_hashed(out / RECORD, run)
        write_settings(out, args)
    say(announcement)
    if device.type == "cpu":
        say(busy_cores())


def check_ranks(args: Any) -> None:
    """Check that all processes of a training were given the same settings.

    They wait for each other, so that nothing is written if one of them has refused its input.
    """
    if not torch.distributed.is_initialized():
        return
    given = settings_of(args)
    own = {name: given[name] for name in given if name not in _OF_A_MACHINE}
    of_all: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, own)
    for rank, other in enumerate(of_all):
        for name, value in other.items():
            expected = f"{of_all[0][name]}, as on rank 0"
            fix = "Give all processes the same options."
            args.check(name, value == of_all[0][name], expected, fix, f"{value} on rank {rank}")


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
def fp32_products(precision: str) -> Iterator[None]:
    """``torch.set_float32_matmul_precision``, and set back."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def busy_cores() -> str:
    """A warning if several threads are hardly faster than one, else an empty string."""
    threads = torch.get_num_threads()
    if threads == 1:
        return ""
    many = _milliseconds()
    torch.set_num_threads(1)
    try:
        one = _milliseconds()
    finally:
        torch.set_num_threads(threads)
    if many < _BUSY * one:
        return ""
    return (
        f"The {threads} threads of this process are hardly faster than one (a product takes "
        f"{many:.1f} ms against {one:.1f}): other programs use the cores, and threads wait for "
        "each other. With --threads 1 steps may be several times as fast."
    )


def _milliseconds() -> float:
    matrix = torch.ones(_PRODUCT, _PRODUCT)
    torch.mm(matrix, matrix)
    began = time.perf_counter()
    for _ in range(_REPEATED):
        torch.mm(matrix, matrix)
    return 1000 * (time.perf_counter() - began) / _REPEATED
