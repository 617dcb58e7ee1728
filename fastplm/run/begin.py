"""What pre-training and fine-tuning share: how a run begins, and the processor it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fastplm.data._folder import say
from fastplm.run.config_file import write_settings
from fastplm.run.folder import RECORD, claimed, read_record, write_hashed, writing
from fastplm.run.report import settings_of
from fastplm.run.threads import busy_cores, using_threads

#: What the processes on another machine may have otherwise.
_OF_A_MACHINE = ("cache", "threads", "workers")


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
