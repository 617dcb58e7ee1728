"""The cells of a study: the commands that it takes, each under a key of all that it depends on.

A cell is one of the ordinary commands with its settings. Its folder ``cells/<key>`` holds
``cell.json`` (what it is), ``run/`` or ``scores.json`` (what the command writes), ``log.txt`` (what
it prints) and, when it is finished, ``done.json`` (its figures).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fastplm.errors import ArgumentValueError, DataError, check, fail
from fastplm.pretrain.objectives import learned_as, names_of
from fastplm.run.folder import checkpoints, read_hashed
from fastplm.study.costs import config_at_folder, configuration_of, cost_of
from fastplm.study.grid import Evaluation, Grid, Variant, resolved, settings_of, words_of
from fastplm.study.held_out import detects, loss_of_choice
from fastplm.study.keys import facts_of, hash_of, key_of
from fastplm.study.progress import DONE

#: Settings that say which model a training begins with; the others are how it learns.
_SHAPE = (
    *("arch", "layers", "hidden", "heads", "embedding_size", "parameter_sharing", "vocab_size"),
    *("tokenizer", "corpus", "block_size", "dropout", "attention_dropout", "start_from"),
)
_FIRST_SEED = 0
#: By which share of the steps a milestone may be away from the one that is evaluated.
_NEAR = 0.001


@dataclass(frozen=True)
class Model:
    """A folder that a command reads: of a checkpoint that is there, or of another cell.

    Args:
        folder: of it.
        cell: that writes it, or None.
        name: of the folder inside that cell.
        part: of a milestone of ELECTRA's training, which has two models, the evaluated one.
    """

    folder: str
    cell: Cell | None = None
    name: str = ""
    part: str | None = None


@dataclass(frozen=True)
class Cell:
    """One command.

    Args:
        command: its name.
        label: what it is, for people.
        key: the hash of all that its figures depend on.
        words: of its command line, but ``--out`` and what may change without a new key.
        needs: the cells that come before.
        cost: its FLOPs, about; see ``costs``.
        folder: in which it runs: that of the study's data.
        threads: of it.
        facts: what the key is the hash of.
        provisional: a choice that it depends on is not made yet, so neither is its key.
        config: the configuration of the model that it makes, for the cost of others.
        model: the folder of the model that it makes, inside what it writes.
    """

    command: str
    label: str
    key: str
    words: tuple[str, ...]
    needs: tuple[Cell, ...]
    cost: float
    folder: Path
    threads: int
    facts: Mapping[str, Any]
    provisional: bool = False
    config: Any = None
    model: str = "model"

    @property
    def out(self) -> str:
        """What the command writes, inside the cell's folder."""
        return "scores.json" if self.command == "score" else "run"


class Store:
    """The folder of all cells, of this study and of others.

    Args:
        folder: of them.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()

    def at(self, cell: Cell) -> Path:
        """The folder of a cell."""
        return self.folder / cell.key

    def done(self, cell: Cell) -> dict[str, Any] | None:
        """The figures of a cell; None if it is not finished."""
        return None if cell.provisional else read_hashed(self.at(cell) / DONE)


@dataclass(frozen=True)
class Planned:
    """The cells of one variant.

    Args:
        variant: it.
        rate: the learning rate that was chosen, or the only one; None: the command's own.
        tried: held-out loss by learning rate, as far as it is known.
        trainings: the cell of each seed; empty where nothing is trained.
        evaluations: by evaluation and milestone (the share of the training in steps, 1: the end) a
            cell for each training, or one where nothing is trained.
        scratch: by evaluation a cell that trains the same model without pre-training.
    """

    variant: Variant
    rate: str | None
    tried: Mapping[str, float | None]
    trainings: tuple[Cell, ...]
    evaluations: Mapping[tuple[str, float], tuple[Cell, ...]]
    scratch: Mapping[str, Cell]


@dataclass(frozen=True)
class Plan:
    """All cells of a study, as far as its choices are made.

    Args:
        variants: the cells by variant.
        cells: all of them by key, each after those that it needs.
    """

    variants: Mapping[str, Planned]
    cells: Mapping[str, Cell]

    @property
    def complete(self) -> bool:
        """Whether every choice is made."""
        return not any(cell.provisional for cell in self.cells.values())


#: The rate that was chosen, what was tried, and a cell for each seed.
_Trainings = tuple[str | None, dict[str, float | None], list[Cell]]


class Planner:
    """Makes the cells of a study; what depends on figures reads those of finished cells.

    Args:
        grid: the study.
        store: its cells.
        data: the folder of relative paths.
        threads: of each cell.
        cache: of vocabularies and token ids.
    """

    def __init__(
        self, grid: Grid, store: Store, data: str | Path | None, threads: int, cache: str | Path
    ) -> None:
        self.grid, self.store, self.data = grid, store, data
        self.threads, self.cache = threads, str(cache)
        self.folder = Path(data or grid.path.parent).resolve()
        self._cells: dict[str, Cell] = {}
        self._trainings: dict[str, _Trainings] = {}

    def plan(self) -> Plan:
        """The cells, by what is finished now."""
        self._cells, self._trainings = {}, {}
        found = {name: self._planned(each) for name, each in self.grid.variants.items()}
        return Plan(found, self._cells)

    def _planned(self, variant: Variant) -> Planned:
        rate, tried, trainings = self._training(variant)
        evaluations: dict[tuple[str, float], tuple[Cell, ...]] = {}
        scratch = {}
        for evaluation in self.grid.evaluations.values():
            if variant.judges is not None and evaluation.name not in variant.judges:
                continue
            for share, models in self._milestones(variant, evaluation, trainings):
                evaluations[evaluation.name, share] = tuple(
                    self._evaluate(variant, evaluation, model, share, row=row)
                    for row, model in enumerate(models)
                )
            if evaluation.scratch:
                model = self._models(variant, evaluation.part, trainings)[0]
                with suppress(ArgumentValueError):  # options that need a model that is trained
                    cell = self._evaluate(variant, evaluation, model, 1.0, scratch=True)
                    scratch[evaluation.name] = cell
        return Planned(variant, rate, tried, tuple(trainings), evaluations, scratch)

    # --- trainings --------------------------------------------------------------------------------

    def _trained_as(self, variant: Variant) -> Variant:
        """The variant whose models this one takes: by default itself."""
        return self.grid.variants[variant.model_of] if variant.model_of else variant

    def _training(self, variant: Variant) -> _Trainings:
        own = self._trained_as(variant)
        if own.name not in self._trainings:
            self._trainings[own.name] = (None, {}, []) if own.model else self._train(own)
        return self._trainings[own.name]

    def _train(self, variant: Variant) -> _Trainings:
        rates: tuple[str | None, ...] = variant.rates or (None,)
        sweep = {rate: self._trained(variant, rate, _FIRST_SEED) for rate in rates}
        rate, waits, tried = rates[0], False, {}
        if len(sweep) > 1:
            tried = {str(rate): self._loss(cell) for rate, cell in sweep.items()}
            waits = None in tried.values()
        if tried and not waits:
            # The smaller one of two rates with equal losses is taken.
            known = [
                (loss == math.inf, not self._detects(sweep[each]), loss, float(each), each)
                for each, loss in tried.items()
            ]
            diverged, *_, rate = min(known)
            expected = "a learning rate at which it does not diverge"
            got = f"{variant.name}, which diverged at {', '.join(tried)}"
            check(not diverged, "study", "lr", got, expected, "Lower the rates.", DataError)
        others = range(_FIRST_SEED + 1, _FIRST_SEED + variant.seeds)
        # The first seed is a cell that chooses the rate; which one is not known until then.
        cells = [replace(sweep[rate], provisional=waits)]
        cells += [self._trained(variant, rate, seed, waits) for seed in others]
        return rate, tried, cells

    def _trained(self, variant: Variant, rate: str | None, seed: int, waits: bool = False) -> Cell:
        options = {**variant.options, "lr": rate} if rate else dict(variant.options)
        options = resolved(options, variant.command, self.data, self.grid)
        for name, value in options.items():
            if isinstance(value, Mapping):  # the model of another variant, of the same seed
                options[name] = self._model_of(value["variant"], seed, name)
        options |= {"seed": str(seed), "cache": self.cache}
        if self.grid.curve > 1 and variant.command == "pretrain":
            got = f"{self.grid.curve} with {variant.name}, which has two stages"
            expected = "one stage, as a state of the first has no discriminator"
            fix = "Take curve or two_stage away."
            check(not options.get("two_stage"), "study", "curve", got, expected, fix, DataError)
            options["states"] = str(self.grid.curve)
        at = f" at {rate}" if len(variant.rates) > 1 else ""
        return self._add(variant.command, f"{variant.name}{at}, seed {seed}", options, waits)

    def _model_of(self, name: str, seed: int, option: str) -> Model:
        variant = self.grid.variants[name]
        trainings = self._training(variant)[2]
        if option == "tokenizer" and trainings:
            return self._inside(trainings[min(seed, len(trainings) - 1)], "tokenizer")
        models = self._models(variant, None, trainings)
        return models[min(seed, len(models) - 1)]

    def _loss(self, cell: Cell) -> float | None:
        """The loss of held-out text that a learning rate is chosen by; infinite if it diverged."""
        done = self.store.done(cell)
        if done is None:
            return None
        loss = math.inf if done["diverged"] else loss_of_choice(done["held_out"])
        if loss is None:
            got = f"{cell.label}, whose text is too short to hold some out"
            fail("study", "lr", got, "more text to choose a rate by", "Name one rate.", DataError)
        return loss

    def _detects(self, cell: Cell) -> bool:
        return detects((self.store.done(cell) or {}).get("held_out", {}))

    # --- models -----------------------------------------------------------------------------------

    def _models(self, variant: Variant, part: str | None, trainings: list[Cell]) -> list[Model]:
        own = self._trained_as(variant)
        if own.model is not None:
            options = resolved({"model": own.model}, "finetune", self.data, self.grid)
            return [Model(options["model"])]
        return [self._inside(cell, part or cell.model) for cell in trainings]

    def _inside(self, cell: Cell, name: str) -> Model:
        return Model(str(self.store.at(cell) / cell.out / name), cell, name)

    def _milestones(
        self, variant: Variant, evaluation: Evaluation, trainings: list[Cell]
    ) -> Iterator[tuple[float, list[Model]]]:
        """(share of the training, its model of each seed): what is evaluated of it."""
        if self.grid.curve > 1 and variant.command == "pretrain" and variant.seeds:
            for number in range(1, self.grid.curve):
                share = round(number / self.grid.curve, 4)
                yield share, [self._milestone(cell, evaluation.part, share) for cell in trainings]
        yield 1.0, self._models(variant, evaluation.part, trainings)

    def _milestone(self, cell: Cell, part: str | None, share: float) -> Model:
        """The model after a share of the steps; a name where there is none yet."""
        done = self.store.done(cell)
        if done is None or done["diverged"]:
            return self._inside(cell, f"checkpoint-{share}")
        kept = checkpoints(self.store.at(cell) / cell.out)
        last = kept[-1][0] if kept else 0
        step, found = min(kept, key=lambda each: abs(each[0] - share * last), default=(-1, Path()))
        if not kept or abs(step - share * last) > max(1, _NEAR * last):
            got = f"a training that kept no state after {share:.0%} of its steps"
            fix = "Delete the folder of its cell."
            fail("study", "curve", got, "its states", fix, DataError)
        return replace(self._inside(cell, found.name), part=part or cell.model)

    # --- evaluations ------------------------------------------------------------------------------

    def _evaluate(
        self,
        variant: Variant,
        evaluation: Evaluation,
        model: Model,
        share: float,
        *,
        scratch: bool = False,
        row: int = 0,
    ) -> Cell:
        options = {**evaluation.options, **variant.judged.get(evaluation.command, {})}
        options = resolved(options, evaluation.command, self.data, self.grid)
        options[evaluation.model_as] = model
        if evaluation.command == "score" and model.part not in (None, "model"):
            options["part"] = model.part
        if scratch:
            options["from_scratch"] = True
        elif options.get("warm") == "none" or options.get("from_scratch"):
            # Nothing of the model is pre-trained, so the rows would be one training, twice.
            options["seed"] = int(options.get("seed", 0)) + row * int(options.get("seeds", 1))
        waits = share < 1 and model.cell is not None and self.store.done(model.cell) is None
        of = variant.name if model.cell is None else model.cell.label
        if variant.model_of is not None and model.cell is not None:
            of = f"{variant.name} of {of}"
        state = f" after {share:.0%}" if share < 1 else ""
        label = f"{of}{state}: {evaluation.name}{', from scratch' if scratch else ''}"
        return self._add(evaluation.command, label, options, waits, scratch=scratch)

    # --- cells ------------------------------------------------------------------------------------

    def _add(
        self,
        command: str,
        label: str,
        options: Mapping[str, Any],
        waits: bool,
        *,
        scratch: bool = False,
    ) -> Cell:
        models = {name: each for name, each in options.items() if isinstance(each, Model)}
        needs = tuple(each.cell for each in models.values() if each.cell is not None)
        waits = waits or any(cell.provisional for cell in needs)
        plain = {name: getattr(each, "folder", each) for name, each in options.items()}
        plain |= {"threads": str(self.threads)}
        plain |= {"format": "json"} if command == "score" else {"report_to": "none"}
        args = settings_of(command, {**plain, "out": str(self.store.folder / "out")})
        args = args.with_models()
        # Of a model without pre-training only its shape matters.
        identify = _shape if scratch and needs else _identity
        identities = {name: identify(each) for name, each in models.items()}
        facts = facts_of(command, args, identities, self.folder)
        key = f"{'later-' if waits else ''}{key_of(facts)}"
        if key not in self._cells:
            config = _config_of(command, args, models)
            self._cells[key] = Cell(
                command=command,
                label=label,
                key=key,
                words=tuple(words_of(command, plain)),
                needs=needs,
                cost=cost_of(command, args, config, self.folder),
                folder=self.folder,
                threads=self.threads,
                facts=facts,
                provisional=waits,
                config=config,
                model=_folder_of(command, args),
            )
        return self._cells[key]


def _folder_of(command: str, args: Any) -> str:
    """The folder of the model that a command makes, inside what it writes."""
    if command != "pretrain":
        return "model"
    return learned_as(args.objective, args.preset.family).folder


def _config_of(command: str, args: Any, models: Mapping[str, Model]) -> Any:
    """The configuration of the model that a command makes or reads."""
    if command == "pretrain" and args.start_from is None:
        return configuration_of(args)
    model = models.get("start_from") or next(iter(models.values()), None)
    if model is None:
        names = {"distill": "teacher", "pretrain": "start_from"}
        return config_at_folder(Path(getattr(args, names.get(command, "model"))))
    if model.cell is None:
        return config_at_folder(Path(model.folder))
    config = model.cell.config  # ELECTRA's has those of two models
    return config if command == "pretrain" else getattr(config, model.name, config)


def _identity(model: Model) -> Any:
    if model.cell is not None:
        return {"cell": model.cell.key, "name": model.name}
    return {"model": hash_of(Path(model.folder))}


def _shape(model: Model) -> Any:
    """What a model without its weights depends on: the shape of what is trained."""
    assert model.cell is not None
    if model.cell.command != "pretrain":
        return {"shape of": _identity(model)}
    settings = model.cell.facts["settings"]
    found = {name: settings[name] for name in _SHAPE if name in settings}
    if settings.get("objective") in names_of("causal"):  # an encoder with a causal mask
        found["objective"] = settings["objective"]
    if model.name == "generator":
        found["generator_size"] = settings.get("generator_size")
    return {"shape of": {**found, "name": model.name}}
