"""The order of every run that trains: begin or resume, train, save, and report."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from fastplm.data._folder import MANIFEST, first_process, say, verify, write_json, write_manifest
from fastplm.run.config_file import write_settings
from fastplm.run.folder import RECORD, check_same, claimed, read_record, write_hashed, writing
from fastplm.run.report import settings_of
from fastplm.run.threads import busy_cores, computing

#: What the processes on another machine may have otherwise.
_OF_A_MACHINE = ("cache", "threads", "workers")


class Run:
    """What a command that trains reads, builds, trains and writes; ``run`` has the order.

    Args:
        args: the settings.

    Attributes:
        args: their plan, in which ``read`` may set what the data says.
        before: the record of the run that is resumed, or None.
        record: that of this run: what its results depend on.
        checkpoint: what the training continues from, if anything.
        device: where it trains.
    """

    #: Settings that are not in the record, as they may differ when a run is resumed.
    ignored_on_resume: frozenset[str] = frozenset()
    #: Whether it is so long that huge pages are worth the seconds that Linux needs for them.
    huge_pages = False
    before: dict[str, Any] | None = None
    checkpoint: Path | None = None
    record: dict[str, Any]
    device: torch.device

    def __init__(self, args: Any) -> None:
        self.args, self.out = args.plan(), Path(args.out)

    def read(self) -> dict[str, Any]:
        """Read the data; returns what the results depend on beside the settings."""
        return {}

    def compare(self, before: dict[str, Any]) -> None:
        """Check that a resumed run is the one of the record ``before``."""
        check_same(self.args.where, self.record, before)

    def finished(self, before: dict[str, Any]) -> bool:
        """Whether nothing is left to do of a resumed run."""
        return verify(self.out) is None

    def build(self) -> str:
        """Make the model and its trainer, which is the last that may fail before it is written.

        Returns what is printed before the first step.
        """
        raise NotImplementedError

    def train(self) -> dict[str, Any]:
        """Train, save the models, then write the results; returns ``metrics.json``."""
        raise NotImplementedError

    def run(self) -> dict[str, Any]:
        """Claim the folder, and run or resume the training; returns ``metrics.json``.

        A run that fails in its settings, its data or its model has written nothing, and moved
        nothing of what the folder held.
        """
        args = self.args = self.args.with_models()
        cache = getattr(args, "cache", None)
        folder = claimed(
            args.where,
            self.out,
            resume=args.resume,
            overwrite=args.overwrite,
            own=[] if cache is None else [Path(cache)],
            inputs=args.inputs(),
            resumable=args.resumable,
        )
        with folder as make_room, computing(args.threads, huge_pages=self.huge_pages):
            before = self.before = read_record(args.where, self.out) if args.resume else None
            facts = self.read()
            settings = settings_of(self.args)
            compared = sorted(settings.keys() - self.ignored_on_resume)
            self.record = {name: settings[name] for name in compared} | facts
            if before is not None:
                self.compare(before)
                if self.finished(before):
                    steps = f"all {self.args.steps} steps of it"
                    say(f"The run in {self.out} is finished, {steps}: nothing was changed.")
                    written = self.out / "metrics.json"
                    return json.loads(written.read_text("utf-8")) if first_process() else {}
            said = self.build()
            check_ranks(self.args)
            if first_process():
                with writing(args.where, self.out):
                    make_room()
                    (self.out / MANIFEST).unlink(missing_ok=True)  # it is no longer a finished one
                    write_hashed(self.out / RECORD, self.record)
                    write_settings(self.out, self.args)
                say(said)
                if self.device.type == "cpu":
                    say(busy_cores())
            return self.train()

    def finish(self, metrics: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Write ``metrics.json``, and the manifest, by which the run is a finished one."""
        write_json(self.out / "metrics.json", metrics)
        write_manifest(self.out, [*names, "metrics.json", RECORD])
        return metrics


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
