"""Checkpoints that are used, and the files that results are written to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from fastplm import models
from fastplm._checks import DataError, check
from fastplm.train._checkpoint import weights_at

#: How the names of classes end that write from left to right.
_CAUSAL = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")


def head_of(config: Any) -> str:
    """Which language model a checkpoint is: "MaskedLM", "CausalLM" or "Seq2SeqLM"."""
    if config.is_encoder_decoder:
        return "Seq2SeqLM"
    saved = (config.architectures or [""])[0]
    masked = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    writes = getattr(config, "is_decoder", False) or saved.endswith(_CAUSAL)
    return "MaskedLM" if masked and not writes else "CausalLM"


def load_model(where: str, folder: str | Path, head: str = "", *, bf16: bool = False) -> Any:
    """The model of a checkpoint, on a GPU if there is one.

    Args:
        where: the caller, for errors.
        folder: of the checkpoint.
        head: that of a language model (see ``head_of``), of which no weight may be missing; "" is
            the model without a head.
        bf16: convert the weights to bfloat16; default fp32.

    Raises:
        DataError: the folder holds no such checkpoint.
    """
    kind = getattr(models, f"AutoModelFor{head}" if head else "AutoModel")
    expected = "a checkpoint with its config.json and weights"
    dtype = torch.bfloat16 if bf16 else torch.float32
    model, lost = weights_at(where, "model", folder, expected, kind, dtype=dtype)
    check(
        not (head and lost),  # without a head it is a pooler, which is left out
        where,
        "model",
        f"{folder}, which lacks {len(lost)} weights, such as {lost[:1]}",
        f"all weights of a {type(model).__name__}, its head among them",
        "Take a checkpoint that was trained with this head, of ELECTRA the generator.",
        DataError,
    )
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def check_out(args: Any, *paths: Path) -> None:
    """Check that the files of results can be written, and that none is replaced unasked."""
    for path in paths:
        free = args.overwrite or not os.path.lexists(path)
        fix = "Choose another --out, or replace it with --overwrite."
        args.check("out", free, "a new file", fix, f"{path}, which exists", DataError)
        there = path.parent.is_dir() and not path.is_dir()
        fix = "Make the folder, or choose another file."
        args.check("out", there, "a file in an existing folder", fix, error=DataError)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives the name under which a file is written, until all of it is there."""
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def fp32_name(args: Any) -> str:
    """fp32, and how it is multiplied."""
    exact = args.matmul_precision == "highest"
    return "fp32" if exact else f"fp32, products {args.matmul_precision}"
