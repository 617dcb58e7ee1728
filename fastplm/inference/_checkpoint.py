"""Checkpoints that a command uses, and what the commands that use one do alike."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from fastplm import models
from fastplm._machine import device_label
from fastplm.data import _output, load_tokenizer
from fastplm.data._folder import say
from fastplm.data.tokenizer import for_words
from fastplm.errors import DataError, about
from fastplm.inference._encoder import Encoder
from fastplm.models._freeze import freeze_parts
from fastplm.run.checkpoint import config_at, weights_at
from fastplm.run.report import block, counted
from fastplm.run.threads import computing, fp32_products

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


def load_model(
    where: str, folder: str | Path, head: str, *, bf16: bool = False, part: str | None = None
) -> Any:
    """The model of a checkpoint with a ``head`` (see ``head_of``), frozen.

    It is in fp32 unless ``bf16``, and on a GPU if there is one. ``part`` is that of ``config_at``.
    """
    expected = f"a checkpoint with all weights of a model {head}, its head among them"
    model = _load(where, folder, f"AutoModelFor{head}", expected, bf16, part=part)
    freeze_parts(model)
    return model


def load_encoder(
    where: str,
    folder: str | Path,
    layers: Sequence[int] = (-1,),
    *,
    bf16: bool = False,
    split: bool = False,
) -> tuple[Any, Any]:
    """(the model below the head, its tokenizer) of a checkpoint; otherwise as ``load_model``.

    The model is frozen, unless lower ``layers`` are read, which takes hooks. With ``split`` the
    tokenizer is for texts that are split into words.
    """
    config_at(where, "model", folder)  # before the tokenizer, which reads it, too
    with about(where, "model"):
        tokenizer: Any = load_tokenizer(folder, needs=())
    tokenizer = for_words(where, tokenizer) if split else tokenizer
    expected = "a checkpoint with its config.json and all weights"
    model = _load(where, folder, "AutoModel", expected, bf16, lambda _, name: "pooler." in name)
    encoder: Any = Encoder(where, model).backbone
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    if {*layers} <= {-1, encoder.config.num_hidden_layers}:
        freeze_parts(encoder)
    return encoder, tokenizer


def _load(
    where: str, folder: str | Path, kind: str, expected: str, bf16: bool, *lacks: Any, **part: Any
) -> Any:
    dtype, auto = torch.bfloat16 if bf16 else torch.float32, getattr(models, kind)
    model, _ = weights_at(where, "model", folder, expected, auto, *lacks, dtype=dtype, **part)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


# --- the commands ---------------------------------------------------------------------------------


@contextmanager
def computing_results(args: Any, *paths: Path | None) -> Iterator[None]:
    """In this block PyTorch computes as the settings say; the lines that its functions warn of are
    said, and no other process writes the files of results, which were checked."""
    given = [path for path in paths if path is not None]
    with (
        _output.results(args.where, given, args.inputs(), overwrite=args.overwrite),
        computing(args.threads),
        fp32_products(getattr(args, "matmul_precision", "highest")),
    ):
        yield


@contextmanager
def warnings_said() -> Iterator[None]:
    """Say what is warned of in this block, a line each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        say(str(warning.message))


def announce(args: Any, model: Any, data: str, **more: str) -> None:
    """Say what is computed: of ``data`` how much there is, and ``more`` that a command knows."""
    products = getattr(args, "matmul_precision", "highest")
    fp32 = "fp32" if products == "highest" else f"fp32, products {products}"
    on_cpu = f", {counted(torch.get_num_threads(), 'thread')}" if model.device.type == "cpu" else ""
    rows = {
        "data": f"{args.data}: {data}",
        "model": f"{args.model}: {type(model).__name__}, {'bf16' if args.bf16 else fp32}",
        **more,
        "device": f"{device_label(model.device)}{on_cpu}",
    }
    say(block(rows | ({"results": str(args.out)} if args.out else {})))


def check_numbers(args: Any, finite: bool, fix: str = "") -> None:
    """Check that a model has given numbers."""
    got = f"{args.model}, which gives NaN or infinity"
    fix = f"Check its config.json and weights{fix}."
    args.check("model", finite, "a model that gives numbers", fix, got, DataError)
