"""Checkpoints by the names that they have on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from fastplm.data._folder import say
from fastplm.errors import DataError, fail, first_line

_NAME = re.compile(r"((?:[\w.-]+/)?[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
_SNAPSHOT = re.compile(r".*[/\\]models--([^/\\]+)[/\\]snapshots[/\\]([0-9a-f]{40})")
#: Configurations and tokenizers, and those of sentence-transformers in folders of their own.
_TEXTS = ["*.json", "*.txt", "*.model", "*.jinja"]
_WEIGHTS = (["*.safetensors"], ["pytorch_model*.bin"])  # the second only where the first is not
_OTHERS = ["onnx/*", "openvino/*", "coreml/*", "original/*"]


def folder_of(where: str, argument: str, value: str | Path, *, weights: bool = True) -> Path:
    """The folder of a checkpoint: ``value``, or where the cache of the Hub has the model so named.

    What the cache lacks is downloaded. ``HF_HOME``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` count, as
    in Transformers' ``from_pretrained``.

    Args:
        where, argument: the command, and its setting, for errors.
        value: a folder; or a name, such as "google-bert/bert-base-uncased", perhaps with
            "@revision" behind it. What is there as a folder, or is no such name, is returned.
        weights: whether the weights are needed, too.

    Raises:
        DataError: it is no folder, and neither in the cache nor to be had from the Hub.
    """
    match = _NAME.fullmatch(str(value))
    if (Path(value) / "run.json").is_file():
        inside = sorted(Path(value).glob("**/config.json"), key=lambda path: len(path.parts))
        fix = f"Give {inside[0].parent}." if inside else "It has no model yet."
        fail(where, argument, f"{value}, the folder of a run", "that of a model", fix, DataError)
    if match is None or Path(value).exists():
        return Path(value)
    from huggingface_hub import snapshot_download

    name, revision = match.groups()
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=_TEXTS, ignore_patterns=_OTHERS
        )
        for patterns in _WEIGHTS if weights else ():
            found = snapshot_download(
                name, revision=revision, allow_patterns=patterns, ignore_patterns=_OTHERS
            )
            if any(Path(found).glob(patterns[0])):
                break
    except Exception as error:  # of its own, of HTTP and of the system
        got = f"{str(value)!r}, which is no folder, and cannot be had from the Hugging Face Hub"
        reason = first_line(error).split(". ")[0]
        expected = "a folder, or a name on the Hub"
        fix = "Check it; without a network, get the model into the cache first (hf download NAME)."
        fail(where, argument, f"{got} ({reason:.200})", expected, fix, DataError)
    say(f"{argument}: {name_of(found) or found}, in the cache of the Hugging Face Hub")
    return Path(found)


def is_name(value: str | Path) -> bool:
    """Whether it may be the name of a model on the Hub."""
    return _NAME.fullmatch(str(value)) is not None


def name_of(path: str | Path) -> str | None:
    """The name and the revision of a folder in the cache of the Hub; None of another folder."""
    match = _SNAPSHOT.fullmatch(str(path))
    return None if match is None else f"{match[1].replace('--', '/')}@{match[2]}"
