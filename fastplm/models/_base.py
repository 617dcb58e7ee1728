"""What all drop-in models share: the attention they use unless told otherwise, and input checks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fastplm._checks import INTEGER, check, check_dtype, check_tensor
from fastplm.hf import NAME


class FastplmModel:
    """Mixin in front of a Transformers model: ``attn_implementation`` is "fastplm" by default.

    An implementation that the user chose stays, whether by argument or in the configuration. (A
    configuration that already built a model of Transformers holds that model's choice.) The
    caller's own configuration is not changed, and nothing of this is saved with a checkpoint.
    """

    #: ``forward`` divides its loss by ``num_items_in_batch``; Trainer asks for this name.
    accepts_loss_kwargs = True

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if config._attn_implementation is None:
            config = copy.deepcopy(config)
            config._attn_implementation = NAME
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]


def check_input_ids(where: str, input_ids: Tensor | None, vocab_size: int) -> None:
    """Every id of an eager CPU tensor lies in the vocabulary; elsewhere that would be a sync."""
    if input_ids is None:
        return
    check_tensor(where, "input_ids", input_ids, ndim=2)
    check_dtype(where, "input_ids", input_ids, INTEGER)
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if input_ids.device.type != "cpu" or input_ids.numel() == 0 or traced:
        return
    low, high = (int(bound) for bound in input_ids.aminmax())
    check(
        0 <= low and high < vocab_size,
        where,
        "input_ids",
        f"ids from {low} to {high}",
        f"0 to {vocab_size - 1}, the vocabulary of this model",
        "Use the tokenizer of the checkpoint, or resize_token_embeddings.",
    )
