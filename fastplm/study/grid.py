"""The file of a study: what is compared, by what it is judged, and what is claimed.

Every option in it is one of an ordinary command, and its value is read as on the command line.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from fastplm.data.sources import HUB
from fastplm.distill.settings import DistillArguments
from fastplm.errors import FastplmError, check, fail, nearest
from fastplm.finetune.settings import FinetuneArguments
from fastplm.finetune.tasks import TASKS
from fastplm.inference.score_settings import ScoreArguments
from fastplm.pretrain.settings import PretrainArguments
from fastplm.run.config_file import Refuse, named, read, values_of
from fastplm.run.hub import is_name
from fastplm.run.options import option_of
from fastplm.run.settings import MODEL, Settings, integer, takes_several

#: The studies that come with the library.
STUDIES = Path(__file__).parent / "studies"
#: The commands that a cell may be, with the class of their settings.
COMMANDS: Mapping[str, type[Settings]] = {
    each.where: each
    for each in (PretrainArguments, DistillArguments, FinetuneArguments, ScoreArguments)
}
#: The commands that make a model.
TRAINS = ("pretrain", "distill")
#: What the study itself gives to every command.
OWN = (
    *("out", "cache", "resume", "overwrite", "dry_run", "seed", "threads", "report_to", "format"),
    *("config", "by"),
)
#: How a file names the figures of held-out text, which need no judge: "held out: mlm_loss".
HELD_OUT = "held out: "
#: What claims call the mean over all judges that fine-tune, as GLUE's.
MEAN = "mean"
_TOP = ("study", "question", "paper", *COMMANDS, "variants", "grid", "curve")
_TOP += ("judges", "claims", "sizes")
_OF_VARIANT = ("command", "model", "model_of", "finetune", "score", "judges")
_OF_JUDGE = ("score", "task", "model_as", "scratch", "figure", "part")
_OF_CLAIM = ("better", "than", "on", "paper", "beyond")
#: The fewest judges of which there is a mean.
OF_A_MEAN = 2
_PARTS = ("discriminator", "generator")
_SEEDS = integer(1, 1000)
#: What a judge tells a command from: the option that names what is judged.
_KIND = {"task": "finetune", "score": "score"}
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """One thing that is compared.

    Args:
        name: of it.
        command: that makes its model.
        options: of that command, as the file gives them.
        rates: the learning rates that are tried, one or none if there is nothing to choose.
        seeds: of its training; 0 where nothing is trained.
        model: a checkpoint that is there, in place of a training.
        model_of: another variant, whose models it takes.
        judged: options that its judges get beside their own, by the command.
        judges: their names; None: all.
    """

    name: str
    command: str
    options: Options
    rates: tuple[str, ...]
    seeds: int
    model: str | None
    model_of: str | None
    judged: Mapping[str, Options]
    judges: tuple[str, ...] | None


@dataclass(frozen=True)
class Evaluation:
    """What scores a model.

    Args:
        name: of it.
        command: that scores: ``finetune`` or ``score``.
        options: of that command.
        model_as: the option by which it gets the model.
        scratch: whether a model without pre-training is scored, too, to be compared.
        figure: the score of ``finetune`` that counts; by default its first one.
        part: of ELECTRA's two models the one that is scored.
    """

    name: str
    command: str
    options: Options
    model_as: str
    scratch: bool
    figure: str | None
    part: str | None

    @property
    def counts(self) -> bool:
        """Whether its score is one of those of the mean: of a task that GLUE could have."""
        return self.command == "finetune" and not TASKS[self.options["task"]].running_text


@dataclass(frozen=True)
class Claim:
    """What a paper found: one variant is better than another, by some judges.

    ``beyond`` are those of the judges that the paper does not have.
    """

    better: str
    than: str
    on: tuple[str, ...]
    paper: str
    beyond: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """A study, of one size.

    Args:
        path: the file.
        sizes: the names of all sizes in it.
        curve: how many states of each training are judged; 1: the last one alone.
    """

    path: Path
    name: str
    size: str | None
    sizes: tuple[str, ...]
    question: str
    paper: str
    curve: int
    variants: Mapping[str, Variant]
    evaluations: Mapping[str, Evaluation]
    claims: tuple[Claim, ...]


def read_grid(study: str, size: str | None = None) -> Grid:
    """Read a study that comes with the library, by its name, or a file.

    Args:
        study: the name or the path.
        size: of the sizes in the file; by default the first one.

    Raises:
        ArgumentValueError: there is no such file or size, or it holds a key or value that is not
            valid; the message has the nearest valid word.
    """
    path = _path_of(study)
    return _Reader(path).grid(read("study", str(path), "study"), size)


def _path_of(study: str) -> Path:
    path = Path(study)
    known = sorted(each.stem for each in STUDIES.glob("*.yaml"))
    if study in known and not path.is_file():
        return STUDIES / f"{study}.yaml"
    if not path.is_file():
        expected = f"a file, or one of the studies {', '.join(known)}"
        fail("study", "study", repr(study), expected, nearest(study, known, "Check the path."))
    return path


def names_of(command: str) -> list[str]:
    """The settings of a command, by all their names."""
    return [n for each in fields(COMMANDS[command]) for n in (each.name, *each.metadata["also"])]


def words_of(command: str, options: Options) -> list[str]:
    """Options as words of the command line.

    Raises:
        ValueError: a value that no command line can hold.
    """
    known, words = COMMANDS[command].__dataclass_fields__, []
    for name, value in options.items():
        if value is None or value is False:
            continue
        parts = [str(part) for part in (value if isinstance(value, list) else [value])]
        if value is True:
            words.append(option_of(name))
        elif not takes_several(known[name]):
            words.append(f"{option_of(name)}={','.join(parts)}")
        else:
            wrong = next((part for part in parts if part.startswith("-")), None)
            if wrong is not None:
                raise ValueError(f"{name} got {wrong}; expected values that do not begin with -")
            words += [option_of(name), *parts]
    return words


def settings_of(command: str, options: Options) -> Any:
    """The plan of a command, checked.

    Raises:
        FastplmError: a value is wrong.
    """
    values = _values_of(command, options, functools.partial(fail, command, "options"))
    return COMMANDS[command](**values).plan()


def _values_of(command: str, options: Options, refuse: Refuse) -> dict[str, Any]:
    """The values of options, among them all that the command needs."""
    values = values_of(COMMANDS[command], options, refuse)
    for each in fields(COMMANDS[command]):
        if each.metadata["default"] is not None:
            values.setdefault(each.name, each.metadata["default"])
        elif each.name not in values and each.default is each.default_factory is MISSING:
            refuse(f"no {each.name}", f"all that fastplm {command} needs", "Add it.")
    return values


def kind_of_path(command: str, name: str) -> str | None:
    """What an option names: a folder, a file or a checkpoint; None if it is no path."""
    kind: str | None = COMMANDS[command].__dataclass_fields__[name].metadata["path"]
    return kind


class _Reader:
    """Reads one file, which every error names.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The judges that the size takes away, and with them what is claimed of them.
        self.without: set[str] = set()

    def refuse(self, got: str, expected: str, fix: str = "Change it.") -> NoReturn:
        fail("study", "study", f"{self.path}, with {got}", expected, fix)

    def grid(self, found: Mapping[str, Any], size: str | None) -> Grid:
        self.keys("the file", found, _TOP)
        sizes = self.mapping("sizes", found.get("sizes"))
        if size is None:
            size = next(iter(sizes), None)
        elif size not in sizes:
            known = f"one of {', '.join(sizes)}" if sizes else "none, as this study has no sizes"
            fix = nearest(size, sizes, "Choose one of these.")
            fail("study", "size", repr(size), known, fix)
        for name, changes in sizes.items():
            self.keys(f"sizes: {name}", self.mapping(name, changes), _TOP[:-1])
        merged = _merged(found, sizes[size]) if size else found
        before, after = (self.mapping("judges", each.get("judges")) for each in (found, merged))
        self.without = {*before} - {*after}
        variants = self.variants(merged)
        judges = {
            name: self.judge(merged, name, each)
            for name, each in self.mapping("judges", merged.get("judges")).items()
        }
        for variant in variants.values():
            for judge in judges.values():
                extra = variant.judged.get(judge.command, {})
                if extra and (variant.judges is None or judge.name in variant.judges):
                    where, all_of = f"{variant.name}: {judge.name}", {**judge.options, **extra}
                    self.options(where, judge.command, all_of, model_as=judge.model_as)
        return Grid(
            path=self.path,
            name=self.text(merged, "study") or self.path.stem,
            size=size,
            sizes=tuple(sizes),
            question=self.text(merged, "question"),
            paper=self.text(merged, "paper"),
            curve=self.number(merged, "curve", integer(1, 100)) or 1,
            variants=variants,
            evaluations=judges,
            claims=self.claims(merged, variants, judges),
        )

    # --- the parts --------------------------------------------------------------------------------

    def variants(self, found: Mapping[str, Any]) -> dict[str, Variant]:
        if ("variants" in found) == ("grid" in found):
            self.refuse("both or neither of variants and grid", "one of the two")
        if "variants" in found:
            named = self.mapping("variants", found["variants"])
        else:
            axes = self.mapping("grid", found["grid"])
            values = [each if isinstance(each, list) else [each] for each in axes.values()]
            named = {
                ", ".join(f"{n} {_shown(v)}" for n, v in zip(axes, row, strict=True)): dict(
                    zip(axes, row, strict=True)
                )
                for row in itertools.product(*values)
            }
        if not named:
            self.refuse("no variants", "one or more")
        variants = {name: self.variant(found, name, each) for name, each in named.items()}
        for each in variants.values():
            if each.model_of is not None:
                self.name(f"{each.name}: model_of", each.model_of, variants)
                if variants[each.model_of].model_of is not None:
                    self.refuse(f"{each.name}: model_of", "a variant that has a model of its own")
            for name, value in each.options.items():
                if isinstance(value, Mapping):
                    self.name(f"{each.name}: {name}: variant", value["variant"], variants)
        self._check_order(variants)
        return variants

    def variant(self, found: Mapping[str, Any], name: str, given: Any) -> Variant:
        given = dict(self.mapping(name, given))
        command = given.pop("command", "pretrain")
        self.name(f"{name}: command", command, TRAINS)
        shared = self.mapping(command, found.get(command))
        self.keys(name, given, (*names_of(command), *_OF_VARIANT, "seeds"))
        self.keys(command, shared, (*names_of(command), "seeds"))
        judged = {
            kind: self.named(kind, self.mapping(f"{name}: {kind}", given.pop(kind, None)))
            for kind in _KIND.values()
        }
        judges = given.pop("judges", None)
        if judges is not None:
            judges = tuple(judges if isinstance(judges, list) else [judges])
            for each in judges:
                known = {*self.mapping("judges", found.get("judges")), *self.without}
                self.name(f"{name}: judges", each, known)
            judges = tuple(each for each in judges if each not in self.without)
        model, model_of = given.pop("model", None), given.pop("model_of", None)
        if (model is not None) + (model_of is not None) + bool(given) > 1:
            self.refuse(f"{name}: several of model, model_of and options", "one of them")
        if model is not None or model_of is not None:
            return Variant(name, command, {}, (), 0, model, model_of, judged, judges)
        options = self.named(command, shared, ("seeds",)) | self.named(command, given, ("seeds",))
        seeds = self.number(options, "seeds", _SEEDS) or 1
        options.pop("seeds", None)
        rates = options.pop("lr", None)
        rates = tuple(rates) if isinstance(rates, list) else () if rates is None else (rates,)
        for name_of, value in options.items():
            if isinstance(value, Mapping):
                self.keys(f"{name}: {name_of}", value, ("variant",))
                if "variant" not in value or not kind_of_path(command, name_of):
                    self.refuse(f"{name}: {name_of}: a mapping", "a value")
        for rate in rates or (None,):
            self.options(name, command, {**options, "lr": rate})
        return Variant(name, command, options, rates, seeds, None, None, judged, judges)

    def _check_order(self, variants: Mapping[str, Variant]) -> None:
        """Check that no variant needs itself."""
        needs = {
            each.name: {v["variant"] for v in each.options.values() if isinstance(v, Mapping)}
            | ({each.model_of} if each.model_of else set())
            for each in variants.values()
        }
        left = dict(needs)
        while left:
            free = [name for name, others in left.items() if not others & left.keys()]
            if not free:
                self.refuse(f"variants that need each other: {', '.join(left)}", "an order")
            for name in free:
                del left[name]

    def judge(self, found: Mapping[str, Any], name: str, given: Any) -> Evaluation:
        if name.startswith(HELD_OUT):
            self.refuse(f"a judge of the name {name!r}", "another name, as it means held-out text")
        if name == MEAN:
            self.refuse(f"a judge of the name {name!r}", "another name, as it means all of them")
        given = dict(self.mapping(name, given))
        kinds = [kind for kind in _KIND if kind in given]
        if len(kinds) != 1:
            self.refuse(
                f"the judge {name}, with {' and '.join(kinds) or 'neither'}",
                "either task (of finetune) or score (a metric of score)",
            )
        command = _KIND[kinds[0]]
        self.keys(name, given, (*names_of(command), *_OF_JUDGE))
        shared = self.mapping(command, found.get(command))
        self.keys(command, shared, names_of(command))
        options = self.named(command, shared, _OF_JUDGE) | self.named(command, given, _OF_JUDGE)
        special = {each: options.pop(each, None) for each in _OF_JUDGE if each != "task"}
        if command == "score":
            options["metric"] = special["score"]
        part = special["part"]
        if part is not None:
            self.name(f"{name}: part", part, _PARTS)
            if part == "generator" and command == "finetune" and found.get("curve") is not None:
                expected = "the discriminator, which finetune reads of the states of a curve"
                self.refuse(f"{name}: part: generator", expected)
        model_as = special["model_as"] or "model"
        self.name(f"{name}: model_as", model_as, ("model", "encoder"))
        self.options(name, command, options, model_as=model_as)
        scratch = special["scratch"]
        if scratch not in (None, True, False):
            self.refuse(f"{name}: scratch: {scratch}", "true or false")
        able = command == "finetune" and model_as == "model" and not options.get("from_scratch")
        return Evaluation(
            *(name, command, options, model_as),
            scratch=able if scratch is None else scratch,
            figure=special["figure"],
            part=part,
        )

    def claims(
        self, found: Mapping[str, Any], variants: Iterable[str], judges: Mapping[str, Evaluation]
    ) -> tuple[Claim, ...]:
        given = found.get("claims") or []
        if not isinstance(given, list):
            self.refuse("claims that are no list", "a list: - {better: …, than: …, on: […]}")
        claims = []
        for number, each in enumerate(given, 1):
            where = f"claim {number}"
            each = self.mapping(where, each)
            self.keys(where, each, _OF_CLAIM)
            for name in ("better", "than"):
                if name not in each:
                    self.refuse(f"{where}, without {name}", "the name of a variant")
                self.name(f"{where}: {name}", str(each[name]), variants)
            on = each.get("on", list(judges))
            on = on if isinstance(on, list) else [on]
            gone = [name for name in on if is_of(name, self.without)]
            if sum(judge.counts for judge in judges.values()) < OF_A_MEAN:
                gone.append(MEAN)
            for name in on:
                if name == MEAN:
                    continue
                # Figures of held-out text, and points of curves, are known when they are there.
                if not (name in gone or is_of(name, judges) or name.startswith(HELD_OUT)):
                    self.name(f"{where}: on", name, judges)
            on = [name for name in on if name not in gone]
            beyond = each.get("beyond", [])
            beyond = beyond if isinstance(beyond, list) else [beyond]
            for name in beyond:
                if name not in self.without:
                    self.name(f"{where}: beyond", name, judges)
            paper = self.text(each, "paper") or self.text(found, "paper")
            if on:
                claims.append(
                    Claim(str(each["better"]), str(each["than"]), tuple(on), paper, tuple(beyond))
                )
        return tuple(claims)

    # --- values -----------------------------------------------------------------------------------

    def mapping(self, where: str, value: Any) -> Mapping[str, Any]:
        if value is None:
            return {}
        if isinstance(value, Mapping) and True in value:  # YAML takes the word on for true
            value = {"on" if name is True else name: each for name, each in value.items()}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            self.refuse(f"{where}: {_shown(value)}", "names and values")
        return value

    def named(
        self, command: str, given: Mapping[str, Any], own: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Options by the names of their settings, beside those that a study has of its own."""
        theirs = {name: value for name, value in given.items() if name not in own}
        ours = {name: value for name, value in given.items() if name in own}
        return ours | named(COMMANDS[command], theirs, self.refuse)

    def keys(self, where: str, given: Iterable[str], known: Iterable[str]) -> None:
        own = [name for name in given if name in OWN]
        if own:
            self.refuse(f"{where}: {own[0]}", "no option that the study gives itself")
        for name in given:
            self.name(where, name, [each for each in known if each not in OWN])

    def name(self, where: str, name: Any, known: Iterable[str]) -> None:
        """Check a word against those that are valid."""
        known = list(known)
        if name not in known:
            fix = nearest(str(name), known, f"Choose {', '.join(known)}.")
            self.refuse(f"{where}: {_shown(name)}", "a valid name", fix)

    def number(self, found: Mapping[str, Any], name: str, kind: Any) -> int | None:
        value = found.get(name)
        if value is None:
            return None
        try:
            return kind(str(value))
        except argparse.ArgumentTypeError as error:
            self.refuse(f"{name}: {error}", kind.expected)

    def text(self, found: Mapping[str, Any], name: str) -> str:
        value = found.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(f"{name}: {_shown(value)}", "a text")
        return " ".join((value or "").split())

    def options(
        self, where: str, command: str, options: Options, *, model_as: str = "model"
    ) -> None:
        """Check options by the settings of their command.

        Args:
            where: whose options they are.
            command: of them.
            options: names and values.
            model_as: the option by which a judge gets its model.
        """
        self.keys(where, options, names_of(command))
        given = {
            name: str(self.path) if isinstance(value, Mapping) else value
            for name, value in options.items()
        }
        if command in _KIND.values():
            given.setdefault(model_as, str(self.path))
        if command != "score":
            given |= {"out": "out", "report_to": "none"}

        def refuse(got: str, expected: str, fix: str) -> NoReturn:
            self.refuse(f"{where}: {got}", expected, fix)

        values = _values_of(command, given, refuse)
        try:
            COMMANDS[command](**values)
            words_of(command, given)
        except (FastplmError, ValueError) as error:
            self.refuse(f"{where}: {error}", f"options of fastplm {command}", "Change the file.")


def is_of(column: str, judges: Iterable[str]) -> bool:
    """Whether a column is one of these judges', or a point of the curve of one."""
    return any(column == judge or column.startswith(f"{judge} ") for judge in judges)


def _merged(found: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """One mapping with the values of another in the place of its own, level by level.

    Nothing (null) takes a name away.
    """
    merged = dict(found)
    for name, value in changes.items():
        if value is None:
            merged.pop(name, None)
            continue
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else f"{value!s:.60}"


def resolved(options: Options, command: str, data: str | Path | None, grid: Grid) -> dict[str, Any]:
    """Options whose paths are absolute, and exist.

    Args:
        options: of ``command``.
        command: of them.
        data: the folder of relative paths; by default that of the file.
        grid: the study.

    Raises:
        ArgumentValueError: a file is not there.
    """
    found = {}
    for name, value in options.items():
        if isinstance(value, Mapping) or value is None or not kind_of_path(command, name):
            found[name] = value
            continue
        parts = [value] if isinstance(value, str) else value
        models = kind_of_path(command, name) == MODEL
        paths = [
            part
            if part == "embedded" or (part.startswith(HUB) and command != "score")
            else _there(part, data, grid, models=models)
            for part in parts
        ]
        found[name] = paths[0] if isinstance(value, str) else paths
    return found


def _there(path: str, data: str | Path | None, grid: Grid, *, models: bool) -> str:
    folder = Path(data) if data is not None else grid.path.parent
    full = (folder / path).resolve()
    if models and is_name(path) and not full.exists():
        return path
    ours = data is None and grid.path.parent == STUDIES
    fix = "Give --data DIR, the folder of the texts." if ours else "Check the path, or --data."
    expected = f"a file that is there, for the study {grid.name}"
    check(full.exists(), "study", "data", str(path if ours else full), expected, fix)
    return str(full)
