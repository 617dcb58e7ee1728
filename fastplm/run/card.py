"""The model card of a folder that a run saves: its README.md, as the Hugging Face Hub reads it."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.modelcard import TASK_MAPPING

from fastplm.data._folder import CARD, say
from fastplm.data.sources import HUB
from fastplm.run.hub import name_of
from fastplm.run.report import versions
from fastplm.run.settings import CALL, Settings, takes_several

#: The figures of a run, in its ``metrics.json``, that its card has, too.
FACTS = ("device", "precision", "processes", "tokens_per_second", "train_seconds")
#: Closes a card with the hash of what is before it, by which one that was edited is known.
_MARK = "\n<!-- written by fastplm, which writes it anew unless it was edited: {} -->\n"
#: Settings of a machine, or of what is written beside the model.
_LEFT_OUT = (*CALL, "out", "cache", "threads", "workers", "log_every", "save_every", "report_to")
#: The Hub's tasks of models that Transformers has no pipeline for.
_TASKS = {"ForMultipleChoice": "multiple-choice"}


def write_card(
    folder: Path,
    args: Any,
    model: Any,
    *,
    trained: str,
    data: Sequence[str],
    base: str | Path | None,
    scores: Mapping[str, float],
    scored: str,
    facts: Mapping[str, Any],
) -> None:
    """Write the card of a saved model, unless the folder has one that is not as a run wrote it.

    Args:
        folder: of the model.
        args: the settings of the run, with all their values.
        model: what was saved.
        trained: what was trained on what: the sentences of the card.
        data: the files or data sets that it was trained on, as the settings name them.
        base: the checkpoint that it began with or learned from, if any.
        scores: by their names.
        scored: what they are of.
        facts: other figures of the run, by their names.
    """
    path = folder / CARD
    if path.exists() and not _is_own(path):
        say(f"{path} is not as a run wrote it, and stays.")
        return
    kind = _kind_of(model).__name__
    task = next((task for task, of in TASK_MAPPING.items() if kind in of.values()), None)
    task = task or next((each for end, each in _TASKS.items() if kind.endswith(end)), None)
    paths = [each.removeprefix(HUB).split(":")[0] for each in data if each.startswith(HUB)]
    sets = ["/".join(each.split("/")[:2]) for each in paths]  # without the configuration
    results = [
        EvalResult(
            task_type=task or "other",
            dataset_type=sets[0] if sets else "local",
            dataset_name=scored,
            metric_type=name,
            metric_value=value,
        )
        for name, value in scores.items()
    ]
    known = None if base is None else name_of(base)
    about = ModelCardData(
        base_model=known and known.partition("@")[0],
        datasets=sets or None,
        library_name="transformers",
        model_name=f"{folder.resolve().parent.name}/{folder.name}",
        eval_results=results or None,
        pipeline_tag=task,
        tags=["fastplm", args.where],
    )
    text = _text(args, model, trained, scores, scored, facts)
    card = str(ModelCard(f"---\n{about.to_yaml()}\n---\n{text}"))
    # The name of a file may have a byte that is not UTF-8.
    card = card.encode("utf-8", "backslashreplace").decode()
    path.write_bytes((card + _MARK.format(_hash(card))).encode())


def command_of(args: Settings) -> str:
    """The command line that gives these settings."""
    known, words = {each.name: each for each in fields(args)}, ["fastplm", args.where]
    for name, value in args.given.items():
        if name in CALL or value is None or value is False:
            continue
        option = f"--{name.replace('_', '-')}"
        parts = [str(part) for part in (value if isinstance(value, list | tuple) else [value])]
        if value is True:
            parts = []
        words += [
            option,
            *(parts if takes_several(known[name]) else [",".join(parts)] * bool(parts)),
        ]
    return shlex.join(words)


def _kind_of(model: Any) -> type:
    """The class of a model, also of one whose class FSDP2 has changed."""
    return next(each for each in type(model).__mro__ if not each.__name__.startswith("FSDP"))


def _is_own(path: Path) -> bool:
    """Whether a card is as ``write_card`` wrote it."""
    text, mark, _ = path.read_text("utf-8", "replace").rpartition(_MARK.split("{", 1)[0])
    return bool(mark) and path.read_bytes() == (text + _MARK.format(_hash(text))).encode()


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _text(
    args: Any,
    model: Any,
    trained: str,
    scores: Mapping[str, float],
    scored: str,
    facts: Mapping[str, Any],
) -> str:
    """The card below its metadata."""
    kind = _kind_of(model)
    name, theirs = kind.__name__, hasattr(transformers, kind.__name__)
    ours = "fastplm.models" if theirs else kind.__module__
    imports = f"from transformers import {name}  # or, faster:\n" if theirs else ""
    settings = {
        each.name: getattr(args, each.name)
        for each in fields(args)
        if each.name not in _LEFT_OUT and getattr(args, each.name) not in (None, False)
        if not args.is_default(each.name) or not each.metadata["of"]
    }
    count = sum(parameter.numel() for parameter in model.parameters())
    parts = [
        f"# {getattr(args, 'arch', name)}, by `fastplm {args.where}`",
        f"{trained} The class is `{name}`, with {count:,} parameters.",
        f"## Loading\n\n```python\nfrom transformers import AutoTokenizer\n{imports}"
        f"from {ours} import {name}\n\n"
        'folder = "path/to/this/folder"\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        f"model = {name}.from_pretrained(folder)\n```",
        f"## Scores\n\nOf {scored}:\n\n{_table(scores)}" if scores else "",
        f"## The run\n\n```sh\n{command_of(args)}\n```\n\n{_table(facts)}",
        f"### Settings\n\n{_table(settings)}",
        f"### Versions\n\n{_table(versions())}",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(rows: Mapping[str, Any]) -> str:
    def cell(value: Any) -> str:
        several = value if isinstance(value, list | tuple) else [value]
        text = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in several)
        return re.sub(r"\s+", " ", text).replace("|", "\\|")

    lines = [f"| {name.replace('_', ' ')} | {cell(value)} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
