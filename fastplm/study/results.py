"""What the finished cells of a study say: scores of each variant by each evaluation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastplm.study.cells import Plan, Planned, Store
from fastplm.study.grid import HELD_OUT, MEAN, OF_A_MEAN, Evaluation, Grid
from fastplm.study.held_out import LOSSES, shown, too_early
from fastplm.study.statistics import Interval, Spread, interval, spread

#: The device of a training whose cell does not say it.
UNRECORDED = "a device that was not recorded"
_CHANCE_OF_PAIRS = 0.5
_FACTS = ("steps", "parameters", "vocab_size", "tokenizer")
#: Of a variant: seconds, and seconds of processors.
TIMES = ("train_seconds", "train_cpu_seconds", "judge_cpu_seconds")


@dataclass(frozen=True)
class Scores:
    """The scores of a variant by one evaluation.

    Args:
        values: fp64 [n, m], see ``statistics``.
        fixed: whether columns are paradigms of minimal pairs, which are all there are.
        lower: whether less is more.
        early: why they are too early to tell anything; empty if they are not.
    """

    values: np.ndarray
    fixed: bool = False
    lower: bool = False
    early: tuple[str, ...] = ()

    @property
    def interval(self) -> Interval:
        """The mean, and its 95 % interval."""
        return interval(self.values, fixed=self.fixed)


@dataclass(frozen=True)
class Row:
    """All that is known of a variant.

    Args:
        name: of the variant.
        scores: by evaluation, or figure of held-out text.
        milestones: by the same, of earlier points of the training: (its share in steps, scores).
        flops: of a training, by the library's count; None where nothing is trained.
        facts: parameters, vocabulary, learning rate and the like.
        times: CPU seconds and seconds of a training, and CPU seconds of all that was evaluated.
        diverged: the cells without figures, as their loss was not finite.
    """

    name: str
    scores: Mapping[str, Scores]
    milestones: Mapping[str, Sequence[tuple[float, Scores]]]
    flops: float | None
    facts: Mapping[str, Any]
    times: Mapping[str, float | None]
    diverged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """A study with all its figures.

    Args:
        grid: what it is.
        rows: its variants.
        codes: the states of the code that made its cells.
        versions: of the libraries, as the first training says.
        devices: of the trainings; ``UNRECORDED`` for those of cells that do not say it.
        published: by evaluation the accuracies of other systems, as its file has them.
    """

    grid: Grid
    rows: Mapping[str, Row]
    codes: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The evaluations and figures that any variant has, in the order of the file."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row.scores))

    @property
    def spreads(self) -> dict[str, Spread]:
        """By evaluation, how much scores vary with the seeds, over the variants that have several.

        A variant that is too early to tell varies with the end of its plateau, and counts only
        where all of them do.
        """
        found = {}
        for name in self.columns:
            scores = [row.scores[name] for row in self.rows.values() if name in row.scores]
            fixed = scores[0].fixed
            past = [each for each in scores if not each.early] or scores
            each = spread([each.values for each in past], fixed=fixed)
            if each is not None and not name.startswith(HELD_OUT):
                found[name] = each
        return found

    @property
    def tokenizers(self) -> int:
        """How many vocabularies the variants have."""
        return len({row.facts["tokenizer"] for row in self.rows.values() if row.facts["tokenizer"]})


def results(grid: Grid, plan: Plan, store: Store) -> Results:
    """Read the figures of a study whose cells are all finished."""
    done = {key: store.done(cell) or {} for key, cell in plan.cells.items()}
    trained = [content for content in done.values() if "parameters" in content]
    published = {
        name: {system: value for system, value in found.items() if value is not None}
        for each in plan.variants.values()
        for (name, _), cells in each.evaluations.items()
        for cell in cells
        if (found := done[cell.key].get("published"))
    }
    return Results(
        grid=grid,
        rows={name: _row(grid, each, done) for name, each in plan.variants.items()},
        codes=tuple(sorted({content["code"] for content in done.values()})),
        versions=next((c["versions"] for c in done.values() if "versions" in c), {}),
        devices=tuple(sorted({content.get("device", UNRECORDED) for content in trained})),
        published=published,
    )


def _row(grid: Grid, planned: Planned, done: Mapping[str, Any]) -> Row:
    trained = [done[cell.key] for cell in planned.trainings]
    held_out = [each["held_out"] for each in trained]
    early = too_early(held_out)
    scores: dict[str, Scores] = {}
    milestones: dict[str, list[tuple[float, Scores]]] = {}
    of_evaluations = []
    for (name, share), cells in sorted(planned.evaluations.items(), key=lambda each: each[0][1]):
        contents = [done[cell.key] for cell in cells]
        if any(each["diverged"] for each in contents):
            continue
        of_evaluations += contents if share == 1 else []
        scratch = done[planned.scratch[name].key] if name in planned.scratch else None
        if scratch is not None and scratch["diverged"]:
            scratch = None
        for column, each in _of_evaluation(
            grid.evaluations[name], contents, scratch, early, bool(trained)
        ):
            if share == 1:
                scores[column] = each
            else:
                milestones.setdefault(column, []).append((share, each))
    of_text = {f"{HELD_OUT}{name}": each for name, each in _of_held_out(held_out, early)}
    flops = [each["flops"] for each in trained if each["flops"] is not None]
    first = trained[0] if trained else {}
    evaluated = [cell for cells in planned.evaluations.values() for cell in cells]
    return Row(
        name=planned.variant.name,
        scores={**scores, **_mean_of(grid, scores), **of_text},
        milestones=milestones,
        flops=sum(flops) / len(flops) if flops else None,
        facts={
            **{name: first.get(name) for name in _FACTS},
            "learning_rate": planned.rate,
            # Of a training that diverged, JSON has no loss.
            "rates": {r: None if loss == math.inf else loss for r, loss in planned.tried.items()},
            "seeds": len(trained),
        },
        times=_times(trained, of_evaluations),
        diverged=tuple(
            cell.label
            for cell in (*planned.trainings, *evaluated, *planned.scratch.values())
            if done[cell.key].get("diverged", False)
        ),
    )


def _mean_of(grid: Grid, scores: Mapping[str, Scores]) -> dict[str, Scores]:
    """The mean over the evaluations that fine-tune, as GLUE's: nothing where one is missing.

    A score is the one that an evaluation shows first. Losses are not among them, nor are the pair
    tasks of pre-training, which GLUE does not have.

    Source: Wang et al. 2019 (arXiv 1804.07461), §3: an unweighted mean over tasks.
    """
    names = [name for name, evaluation in grid.evaluations.items() if evaluation.counts]
    found = [scores[name] for name in names if name in scores and not scores[name].lower]
    if len(found) < max(OF_A_MEAN, len(names)):
        return {}
    if len({each.values.shape for each in found}) > 1:  # by other numbers of seeds
        return {}
    early = tuple(dict.fromkeys(reason for each in found for reason in each.early))
    return {MEAN: Scores(np.mean([each.values for each in found], 0), early=early)}


def _times(trained: Sequence[Any], of_evaluations: Sequence[Any]) -> dict[str, float | None]:
    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    known = [each["times"] for each in trained if each["times"]["train_seconds"]]
    # The processor time of a training that was resumed: its seconds from beginning to end, times
    # the share of a processor that its last process had.
    shares = [each["cpu_seconds"] / each["seconds"] for each in known]
    cpu = [each["train_seconds"] * share for each, share in zip(known, shares, strict=True)]
    evaluated = sum(each["times"]["cpu_seconds"] for each in of_evaluations) or None
    values = (mean([each["train_seconds"] for each in known]), mean(cpu), evaluated)
    return dict(zip(TIMES, values, strict=True))


# --- scores ---------------------------------------------------------------------------------------


def _of_held_out(
    held_out: Sequence[Mapping[str, float]], early: tuple[str, ...]
) -> Iterator[tuple[str, Scores]]:
    for name in shown(held_out[0]) if held_out else ():
        if all(name in each for each in held_out):
            values = np.array([[each[name]] for each in held_out], np.float64)
            yield name, Scores(values, lower=name.endswith(LOSSES), early=early)


def _of_evaluation(
    evaluation: Evaluation,
    contents: Sequence[Any],
    scratch: Any,
    early: tuple[str, ...],
    trained: bool,
) -> Iterator[tuple[str, Scores]]:
    """(column, scores) of an evaluation: one, or one for each number of examples to train on."""
    if evaluation.command == "score":
        yield evaluation.name, _of_scoring(contents, early)
        return
    points = contents[0]["points"]
    for number, point in enumerate(points):
        figure = evaluation.figure or next(iter(point["scores"]))
        values = np.array([each["points"][number]["scores"][figure] for each in contents])
        if not trained:  # of a model that is there, the fine-tuning seeds are all there is
            values = values.T
        reasons = early
        if scratch is not None:
            nothing = np.array(scratch["points"][number]["scores"][figure], np.float64)
            reasons += _not_above(values, nothing, figure.endswith(LOSSES))
        is_main = figure == next(iter(point["scores"]))  # chance is that of the first metric
        if is_main and not _clearly_above(values, contents[0].get("chance", -np.inf)):
            reasons += ("fine-tuning is not clearly better than one answer to all examples",)
        name = evaluation.name if len(points) == 1 else f"{evaluation.name} {point['examples']}"
        yield name, Scores(values.astype(np.float64), False, figure.endswith(LOSSES), reasons)


def _of_scoring(contents: Sequence[Any], early: tuple[str, ...]) -> Scores:
    if "pairs" in contents[0]:
        values = np.array([list(each["pairs"].values()) for each in contents], np.float64)
        # Below chance in all is as far from it as above: a rule that the model has wrong.
        if not _clearly_above(values, _CHANCE_OF_PAIRS, fixed=True):
            early += (f"its accuracy on minimal pairs is not clearly above {_CHANCE_OF_PAIRS}",)
        return Scores(values, fixed=True, early=early)
    name = next(name for name in contents[0]["corpus"] if name.endswith("perplexity"))
    values = np.array([[each["corpus"][name]] for each in contents], np.float64)
    return Scores(values, lower=True, early=early)


def _clearly_above(values: np.ndarray, chance: float, *, fixed: bool = False) -> bool:
    """Whether the whole interval is above what needs no knowledge; of one seed, whether it is."""
    found = interval(values, fixed=fixed)
    return (found.mean if found.low is None else found.low) > chance


def _not_above(values: np.ndarray, nothing: np.ndarray, lower: bool) -> tuple[str, ...]:
    """Why fine-tuning from the model is not clearly better than from new weights, if so.

    The means must differ by two standard errors of their difference, and by more than nothing.

    Args:
        values: fp64 [n, m], of the model.
        nothing: fp64 [k], of new weights.
        lower: whether less is more.
    """
    gain = (nothing.mean() - values.mean()) if lower else (values.mean() - nothing.mean())
    means = values.mean(1) if len(values) > 1 else values[0]
    variance = sum(each.var(ddof=1) / len(each) for each in (means, nothing) if len(each) > 1)
    if gain > 2 * float(variance) ** 0.5 and gain > 0:
        return ()
    return ("fine-tuning is not clearly better than from new weights",)
