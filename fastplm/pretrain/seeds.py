"""Several pre-trainings that differ in their seed alone, and the means of their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fastplm.data._folder import MANIFEST, first_process, say
from fastplm.errors import DivergenceError
from fastplm.pretrain.report import numbers_of
from fastplm.pretrain.settings import PretrainArguments
from fastplm.pretrain.stream import TextRun
from fastplm.run.folder import RECORD, ending, last_checkpoint, writing
from fastplm.run.report import block, settings_of, versions
from fastplm.run.runner import Run
from fastplm.run.seeds import interval


class Seeds(Run):
    """The runs of ``fastplm pretrain --seeds N``, each in a folder of its own.

    A seed that is finished is not trained again; a resumed run may have more of them.

    Args:
        args: the settings.
        pretrain: makes the run of one seed, and returns its ``metrics.json``.
    """

    ignored_on_resume = TextRun.ignored_on_resume | {"warmup"}

    def __init__(
        self, args: PretrainArguments, pretrain: Callable[[PretrainArguments], dict[str, Any]]
    ) -> None:
        super().__init__(args)
        self.pretrain = pretrain

    def read(self) -> dict[str, Any]:
        args = self.args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        seeds = range(args.seed, args.seed + args.seeds)
        # Before the first one writes: all processes of a training come to the same.
        self.parts = [self._part(seed, self.out / f"seed-{seed}") for seed in seeds]
        return {}

    def _part(self, seed: int, out: Path) -> PretrainArguments:
        there = self.args.resume and (out / RECORD).is_file()
        resume = there and (last_checkpoint(out) is not None or (out / MANIFEST).is_file())
        # What ended before its first checkpoint begins again.
        changes = {"resume": resume, "overwrite": there and not resume}
        # Not the values that followed from the defaults, which may follow otherwise.
        given = {**self.args.given, "seeds": 1, "seed": seed, "out": out, **changes}
        return PretrainArguments(**given)

    def compare(self, before: dict[str, Any]) -> None:
        # The record of one run has its steps.
        expected, fix = "1, as in the run that is resumed", "Give the same, or another --out."
        self.args.check("seeds", "steps" not in before, expected, fix)
        super().compare(before)

    def finished(self, before: dict[str, Any]) -> bool:
        return False  # each seed says of itself whether it is

    def build(self) -> str:
        first, last = self.parts[0].out, self.parts[-1].out
        return f"{len(self.parts)} runs, one for each seed, in {first} to {last}"

    def train(self) -> dict[str, Any]:
        results = []
        for part in self.parts:
            say(f"\nseed {part.seed}:")
            try:
                results.append(self.pretrain(part))
            except DivergenceError as error:
                raise DivergenceError(f"{error} This was seed {part.seed}.") from error
        if not first_process():
            return {}
        models = [Path(path) for each in results for path in each["models"].values()]
        with ending("the report of the seeds", models), writing(self.args.where, self.out):
            runs = [
                {"seed": part.seed, "out": str(part.out), **_figures(result)}
                for part, result in zip(self.parts, results, strict=True)
            ]
            metrics = {
                "arguments": settings_of(self.args),
                "versions": versions(),
                "seeds": runs,
                **_means(runs),
            }
            return self.finish(metrics, [])


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the summary has of a run; its own ``metrics.json`` has all."""
    names = ("flops", "train_seconds", "tokens_per_second", "held_out")
    last = result["history"][-1]
    found = {name: result[name] for name in names if name in result}
    return {"steps": last["step"], "loss": last["loss"], **found}


def _means(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The mean of each figure that all runs have, with half the width of its 95 % interval."""
    each = [numbers_of(run.get("held_out", {})) for run in runs]
    names = [name for name in each[0] if all(name in one for one in each)]
    held_out = {name: interval([one[name] for one in each]) for name in names if name != "samples"}
    return {"loss": interval([run["loss"] for run in runs]), "held_out": held_out}


def summary(metrics: Mapping[str, Any]) -> str:
    """The losses of all seeds as a table for the terminal."""

    def shown(score: Mapping[str, Any]) -> str:
        return f"{score['mean']:.4f} ± {score['half_width']:.4f}"

    rows = {
        f"seed {run['seed']}": f"loss {run['loss']:.4f}  {run['out']}" for run in metrics["seeds"]
    }
    rows["loss"] = f"{shown(metrics['loss'])} (95 % interval of {len(metrics['seeds'])} seeds)"
    for name, score in metrics["held_out"].items():
        rows[f"held out: {name.replace('_', ' ')}"] = shown(score)
    return block(rows)
