"""Checkpoints that are used, and what a command says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from fastplm import models
from fastplm._machine import device_label
from fastplm.data import _output
from fastplm.models._freeze import freeze_parts
from fastplm.run.checkpoint import weights_at
from fastplm.run.report import counted

#: How the names of classes end that write from left to right.
_CAUSAL = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")


def head_of(config: Any) -> str:
    """The kind of language model of a checkpoint: "MaskedLM", "CausalLM" or "Seq2SeqLM"."""
    if config.is_encoder_decoder:
        return "Seq2SeqLM"
    saved = (config.architectures or [""])[0]
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    writes = getattr(config, "is_decoder", False) or saved.endswith(_CAUSAL)
    return "MaskedLM" if masked and not writes else "CausalLM"


def _is_pooler(model: Any, name: str) -> bool:
    return "pooler." in name


def load_model(
    where: str,
    folder: str | Path,
    head: str = "",
    *,
    bf16: bool = False,
    part: str | None = None,
) -> Any:
    """The model of a checkpoint, in fp32 unless ``bf16``, on a GPU if there is one, and frozen.

    Without a ``head`` (see ``head_of``) it is the model below it, whose pooler may be missing, and
    which is not frozen.
    ``part`` is that of ``config_at``.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    if not head:
        kind, expected = models.AutoModel, "a checkpoint with its config.json and all weights"
        model, _ = weights_at(where, "model", folder, expected, kind, _is_pooler, dtype=dtype)
    else:
        kind = getattr(models, f"AutoModelFor{head}")
        expected = f"a checkpoint with all weights of a model {head}, its head among them"
        model, _ = weights_at(where, "model", folder, expected, kind, part=part, dtype=dtype)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    if head:
        freeze_parts(model)
    return model


@contextmanager
def results(args: Any, *paths: Path | None) -> Iterator[None]:
    """In this block no other process writes the files of results, which were checked."""
    given = [path for path in paths if path is not None]
    with _output.results(args.where, given, args.inputs(), overwrite=args.overwrite):
        yield


def device_name(args: Any, model: Any) -> str:
    """The device of a model, and on a CPU how many threads compute."""
    threads = counted(args.threads or torch.get_num_threads(), "thread")
    label = device_label(model.device)
    return f"{label}, {threads}" if model.device.type == "cpu" else label


def fp32_name(args: Any) -> str:
    """fp32, and how it is multiplied."""
    exact = args.matmul_precision == "highest"
    return "fp32" if exact else f"fp32, products {args.matmul_precision}"
