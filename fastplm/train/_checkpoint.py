"""The configuration and the weights of a checkpoint."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fastplm.errors import DataError, message
from fastplm.train._run_folder import loaded

#: What others put before the names of weights, and who.
_PREFIXES = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}
_LAYER = re.compile(r"\.\d+\.")

_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout_prob",
    "classifier_dropout",
    "dropout",
    "dropout_rate",
    "attention_dropout",
    "activation_dropout",
    "summary_last_dropout",
    "summary_first_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
)


def config_at(where: str, argument: str, path: str | Path, **settings: Any) -> Any:
    """The configuration in a folder, which ``argument`` of the command ``where`` names.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoConfig

    load = functools.partial(AutoConfig.from_pretrained, path, local_files_only=True, **settings)
    return loaded(where, argument, path, "a checkpoint with its config.json", load)


def weights_at(
    where: str,
    argument: str,
    path: str | Path,
    expected: str,
    kind: Any,
    may_lack: Callable[[Any, str], bool] = lambda model, name: False,
    **options: Any,
) -> tuple[Any, list[str]]:
    """(a model of the class ``kind`` from a folder, the names of the weights that it lacks).

    Every command loads weights by this function, as Transformers fills what a file lacks with
    random numbers and drops what a model has no place for.

    Args:
        where, argument: the command, and its setting that names the folder.
        path: the folder.
        expected: what is to be there, for errors.
        kind: a class with ``from_pretrained``.
        may_lack: whether a model may lack the weight of this name: that of a new head, say.
        options: of ``from_pretrained``.

    Raises:
        DataError: there is no checkpoint; it lacks a weight, has more layers than its
            configuration says, or holds a number that is not finite.
    """
    from transformers.utils import logging

    options |= {"local_files_only": True, "output_loading_info": True}
    shown = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        load = functools.partial(kind.from_pretrained, path, **options)
        model, info = loaded(where, argument, path, expected, load)
    finally:
        logging.set_verbosity(shown)
    # What ``ignore_mismatched_sizes`` lets pass is random, too.
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})

    def refuse(what: str, fix: str) -> NoReturn:
        raise DataError(message(where, argument, f"{path}, {what}", expected, fix))

    lost = [name for name in missing if not may_lack(model, name)]
    if lost:
        what = f"which lacks {len(lost)} weights of a {type(model).__name__}, such as {lost[0]}"
        refuse(what, _why_lost(sorted(info["unexpected_keys"]), model.config))
    more = next(filter(_beyond(model), sorted(info["unexpected_keys"])), None)
    if more is not None:
        what = f"whose file has more layers than its config.json says, such as {more}"
        refuse(what, "Correct the number of layers in config.json.")
    bad = next((name for name, value in model.named_parameters() if not _is_finite(value)), None)
    if bad is not None:
        what = f"whose weight {bad} holds NaN or infinity"
        refuse(what, "Take an earlier checkpoint: the training that wrote it has diverged.")
    return model, missing


def _why_lost(unexpected: list[str], config: Any) -> str:
    """What to do about weights that a file lacks, by the names that it has instead."""
    for prefix, saved_by in _PREFIXES.items():
        if any(name.startswith(prefix) for name in unexpected):
            return (
                f"Its weights are called {prefix}…, as {saved_by} saves them: load the file, "
                f"rename them by name.removeprefix({prefix!r}), and save it again."
            )
    if unexpected:
        return (
            f"The file has {unexpected[0]} instead: see that it is of the model type "
            f"{config.model_type}, as config.json says, and has the head that is needed."
        )
    return "Check whether the file is whole, and has the head that is needed."


def _beyond(model: Any) -> Callable[[str], bool]:
    """Whether a weight is of a layer that ``model`` does not have, though it has others like it."""
    known = {_LAYER.sub(".0.", f".{name}") for name in model.state_dict()}
    prefix = f"{model.base_model_prefix}."

    def beyond(name: str) -> bool:
        first = _LAYER.sub(".0.", f".{name}")
        names = {first, f".{prefix}{first[1:]}", f".{first[1:].removeprefix(prefix)}"}
        return first != f".{name}" and bool(names & known)

    return beyond


def _is_finite(value: Any) -> bool:
    # A sum of finite numbers may overflow, so only where it has is each looked at.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def set_dropout(config: Any, rate: float | None) -> None:
    """Set every dropout of a configuration, and of the parts of an encoder-decoder's."""
    if rate is None:
        return
    for each in (config, getattr(config, "encoder", None), getattr(config, "decoder", None)):
        for name in _DROPOUTS:
            if hasattr(each, name):
                setattr(each, name, rate)
