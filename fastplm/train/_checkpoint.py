"""The configuration and the weights of a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from fastplm.train._run_folder import loaded

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
    where: str, argument: str, path: str | Path, expected: str, kind: Any, **options: Any
) -> tuple[Any, list[str]]:
    """(a model of the class ``kind`` from a folder, the names of the weights that it lacks).

    Transformers does not warn of these: that is up to the caller.

    Raises:
        DataError: there is none.
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
    return model, sorted(info["missing_keys"])


def set_dropout(config: Any, rate: float | None) -> None:
    """Set every dropout of a configuration, and of the parts of an encoder-decoder's."""
    if rate is None:
        return
    for each in (config, getattr(config, "encoder", None), getattr(config, "decoder", None)):
        for name in _DROPOUTS:
            if hasattr(each, name):
                setattr(each, name, rate)
