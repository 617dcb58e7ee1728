"""The configuration of a checkpoint."""

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


def config_at(path: str | Path, argument: str, **settings: Any) -> Any:
    """The configuration in a folder, which ``argument`` names.

    Raises:
        DataError: there is none.
    """
    from transformers import AutoConfig

    load = functools.partial(AutoConfig.from_pretrained, path, local_files_only=True, **settings)
    return loaded("finetune", argument, path, "a checkpoint with its config.json", load)


def set_dropout(config: Any, rate: float | None) -> None:
    """Set every dropout of a configuration, and of the parts of an encoder-decoder's."""
    if rate is None:
        return
    for each in (config, getattr(config, "encoder", None), getattr(config, "decoder", None)):
        for name in _DROPOUTS:
            if hasattr(each, name):
                setattr(each, name, rate)
