"""What the finished cells of a study say: scores of each variant by each judge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastplm.pretrain.settings import COLLAPSED
from fastplm.study.cells import Cell, Plan, Planned, Store, detects
from fastplm.study.grid import HELD_OUT, MEAN, OF_A_MEAN, Grid, Judge
from fastplm.study.statistics import Interval, Spread, interval, spread

#: The device of a training whose cell does not say it.
UNRECORDED = "a device that was not recorded"
#: Figures of which less is more end so.
_LOSSES = ("loss", "perplexity")
#: Figures of held-out text that are beside its losses.
_HELD_OUT = ("_loss", "_accuracy")
#: Figures that stay out of the table: most are of all tokens, of which few can be replaced.
_LEFT_OUT = ("words_loss", "balanced_accuracy", "words_balanced_accuracy_error")
#: What "clearly" means of a loss in the rule of a budget that can speak, see ``too_early``.
CLEAR_NATS = 0.05
_CHANCE_OF_PAIRS = 0.5
#: The losses of models that know no context, or one token of it.
_PLATEAUS = ("unigram_loss", "bigram_loss")
_FACTS = ("steps", "parameters", "vocab_size", "tokenizer")
_TOKEN_LOSSES = (
    *("mlm_loss", "clm_loss", "spans_loss", "denoise_loss"),
    *("discriminator_mlm_loss", "discriminator_chosen_loss"),
)


@dataclass(frozen=True)
class Scores:
    """The scores of a variant by one judge.

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
        planned: its cells.
        scores: by judge, or figure of held-out text.
        states: by the same, of earlier states of the training: (its share in steps, scores).
        flops: of a training, by the library's count; None where nothing is trained.
        facts: parameters, vocabulary, learning rate and the like.
        times: CPU seconds and seconds of a training, and CPU seconds of all that was judged.
        diverged: the cells without figures, as their loss was not finite.
    """

    name: str
    planned: Planned
    scores: Mapping[str, Scores]
    states: Mapping[str, Sequence[tuple[float, Scores]]]
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
        published: by judge the accuracies of other systems, as its file has them.
    """

    grid: Grid
    rows: Mapping[str, Row]
    codes: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The judges and figures that any variant has, in the order of the file."""
        return list(dict.fromkeys(name for row in self.rows.values() for name in row.scores))

    @property
    def spreads(self) -> dict[str, Spread]:
        """By judge, how much scores vary with the seeds, over the variants that have several.

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
    rows = {name: _row(grid, each, done) for name, each in plan.variants.items()}
    codes = sorted({content["code"] for content in done.values()})
    versions: dict[str, str] = next((c["versions"] for c in done.values() if "versions" in c), {})
    published = {
        name: {system: value for system, value in found.items() if value is not None}
        for each in plan.variants.values()
        for (name, _), cells in each.judged.items()
        for cell in cells
        if (found := done[cell.key].get("published"))
    }
    return Results(grid, rows, tuple(codes), versions, _devices(done.values()), published)


def _devices(contents: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    trained = (content for content in contents if "parameters" in content)
    return tuple(sorted({content.get("device", UNRECORDED) for content in trained}))


def _row(grid: Grid, planned: Planned, done: Mapping[str, Any]) -> Row:
    trained = [done[cell.key] for cell in planned.trainings]
    held_out = [each["held_out"] for each in trained]
    early = too_early(held_out)
    scores = {f"{HELD_OUT}{name}": each for name, each in _of_held_out(held_out, early)}
    states: dict[str, list[tuple[float, Scores]]] = {}
    judging = []
    for (name, share), cells in sorted(planned.judged.items(), key=lambda each: each[0][1]):
        judge = grid.judges[name]
        contents = [done[cell.key] for cell in cells]
        if any(each["diverged"] for each in contents):
            continue
        judging += contents if share == 1 else []
        scratch = planned.scratch.get(name)
        nothing = None if scratch is None else done[scratch.key]
        if nothing is not None and nothing["diverged"]:
            nothing = None
        for column, each in _of_judge(judge, contents, nothing, early, bool(trained)):
            if share == 1:
                scores[column] = each
            else:
                states.setdefault(column, []).append((share, each))
    scores |= _mean_of(grid, scores)
    ordered = [name for name in scores if not name.startswith(HELD_OUT)]
    ordered += [name for name in scores if name.startswith(HELD_OUT)]
    flops = [each["flops"] for each in trained if each["flops"] is not None]
    first = trained[0] if trained else {}
    return Row(
        name=planned.variant.name,
        planned=planned,
        scores={name: scores[name] for name in ordered},
        states=states,
        flops=sum(flops) / len(flops) if flops else None,
        facts={
            **{name: first.get(name) for name in _FACTS},
            "learning_rate": planned.rate,
            "rates": {rate: _finite(loss) for rate, loss in planned.tried.items()},
            "seeds": len(trained),
        },
        times=_times(trained, judging),
        diverged=tuple(
            cell.label for cell in cells_of(planned) if done[cell.key].get("diverged", False)
        ),
    )


def _mean_of(grid: Grid, scores: Mapping[str, Scores]) -> dict[str, Scores]:
    """The mean over the judges that fine-tune, as GLUE's: nothing where one has not judged.

    A score is the one that a judge shows first. Losses are not among them, nor are the pair tasks
    of pre-training, which GLUE does not have.

    Source: Wang et al. 2019 (arXiv 1804.07461), §3: an unweighted mean over tasks.
    """
    names = [name for name, judge in grid.judges.items() if judge.counts]
    found = [scores[name] for name in names if name in scores and not scores[name].lower]
    if len(found) < max(OF_A_MEAN, len(names)):
        return {}
    if len({each.values.shape for each in found}) > 1:  # by other numbers of seeds
        return {}
    early = tuple(dict.fromkeys(reason for each in found for reason in each.early))
    return {MEAN: Scores(np.mean([each.values for each in found], 0), early=early)}


def _finite(loss: float | None) -> float | None:
    """A loss for JSON; None of a training that diverged."""
    return None if loss is None or math.isinf(loss) else loss


def _times(trained: Sequence[Any], judging: Sequence[Any]) -> dict[str, float | None]:
    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    known = [each["times"] for each in trained if each["times"]["train_seconds"]]
    # The processor time of a training that was resumed: its seconds from beginning to end, times
    # the share of a processor that its last process had.
    shares = [each["cpu_seconds"] / each["seconds"] for each in known]
    cpu = [each["train_seconds"] * share for each, share in zip(known, shares, strict=True)]
    return {
        "train_seconds": mean([each["train_seconds"] for each in known]),
        "train_cpu_seconds": mean(cpu),
        "judge_cpu_seconds": sum(each["times"]["cpu_seconds"] for each in judging) or None,
    }


# --- scores ---------------------------------------------------------------------------------------


def _of_held_out(
    held_out: Sequence[Mapping[str, float]], early: tuple[str, ...]
) -> Iterator[tuple[str, Scores]]:
    names = [name for name in (held_out[0] if held_out else {}) if name.endswith(_HELD_OUT)]
    for name in names:
        if name in (*_PLATEAUS, *_LEFT_OUT) or not all(name in each for each in held_out):
            continue
        values = np.array([[each[name]] for each in held_out], np.float64)
        yield name, Scores(values, lower=name.endswith(_LOSSES), early=early)


def _of_judge(
    judge: Judge, contents: Sequence[Any], scratch: Any, early: tuple[str, ...], trained: bool
) -> Iterator[tuple[str, Scores]]:
    """(column, scores) of a judge: one, or one for each number of examples to train on."""
    if judge.command == "score":
        yield judge.name, _of_scoring(contents, early)
        return
    points = contents[0]["points"]
    for number, point in enumerate(points):
        figure = judge.figure or next(iter(point["scores"]))
        values = np.array([each["points"][number]["scores"][figure] for each in contents])
        if not trained:  # of a model that is there, the fine-tuning seeds are all there is
            values = values.T
        reasons = early
        if scratch is not None:
            nothing = np.array(scratch["points"][number]["scores"][figure], np.float64)
            reasons += _not_above(values, nothing, figure.endswith(_LOSSES))
        is_main = figure == next(iter(point["scores"]))  # chance is that of the first metric
        if is_main and not _clearly_above(values, contents[0].get("chance", -np.inf)):
            reasons += ("fine-tuning is not clearly better than one answer to all examples",)
        name = judge.name if len(points) == 1 else f"{judge.name} {point['examples']}"
        yield name, Scores(values.astype(np.float64), False, figure.endswith(_LOSSES), reasons)


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


# --- a budget that can speak ----------------------------------------------------------------------


def too_early(held_out: Sequence[Mapping[str, float]]) -> tuple[str, ...]:
    """Why the trainings of a variant say nothing yet of an order; nothing where they do.

    The loss of held-out tokens must be at least ``CLEAR_NATS`` below that of a unigram's and of a
    bigram's on the same tokens, at each seed. In ELECTRA's joint training this holds for a
    discriminator that predicts tokens (where it predicts all of them, its softmax, without copies,
    over those that the generator had to predict); one that detects them must have a balanced
    accuracy of ``cells.CLEAR_BALANCED`` at least. Its generator, which is small on purpose and not
    judged, must be below the unigram alone. An encoder-decoder can copy most labels: it must be
    below what it would have with the others alone, and its encoder must not give all tokens one
    output.
    """
    found = []
    for each in held_out:
        joint = "discriminator_mlm_loss" in each or "words_balanced_accuracy" in each
        missing = each.get("missing_share", 1.0)
        of = f" of the {missing:.0%} of its labels that are not in its source"
        for name in _TOKEN_LOSSES:
            beaten = _PLATEAUS[:1] if joint and name == "mlm_loss" else _PLATEAUS
            if name == "discriminator_mlm_loss" and "discriminator_chosen_loss" in each:
                continue
            for plateau in beaten:
                if name not in each or plateau not in each:
                    continue
                if each[name] > missing * (each[plateau] - CLEAR_NATS):
                    said = f"its {name} is not clearly below the {plateau.replace('_', ' ')}"
                    found.append(said + (of if missing < 1 else ""))
        if each.get("encoder_similarity", 0.0) > COLLAPSED:
            found.append("its encoder gives all tokens one output")
        if not detects(each):
            found.append("its discriminator's balanced accuracy is not clearly above .5")
        if not each:
            found.append("it diverged, or no text was held out")
    return tuple(dict.fromkeys(found))


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


def cells_of(planned: Planned) -> list[Cell]:
    """All cells of a variant."""
    judged = [cell for cells in planned.judged.values() for cell in cells]
    return [*planned.trainings, *judged, *planned.scratch.values()]
