"""What all drop-in models share: the attention they use unless told otherwise, and input checks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedConfig, PreTrainedModel

from fastplm._checks import INTEGER, check, check_dtype, check_tensor
from fastplm.hf import NAME
from fastplm.nn._tied_embedding import shares_table, tied_lookup


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


def values_are_known(tensor: Tensor) -> bool:
    """Whether looking at a tensor's values waits for nothing: an eager CPU tensor."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    return tensor.device.type == "cpu" and not traced and not isinstance(tensor, FakeTensor)


def check_input_ids(where: str, input_ids: Tensor | None, vocab_size: int) -> None:
    """Every id of an eager CPU tensor lies in the vocabulary; elsewhere that would be a sync."""
    if input_ids is None:
        return
    check_tensor(where, "input_ids", input_ids, ndim=2)
    check_dtype(where, "input_ids", input_ids, INTEGER)
    if input_ids.numel() == 0 or not values_are_known(input_ids):
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


def tied_inputs(
    model: PreTrainedModel,
    decoder: nn.Linear,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    labels: Tensor | None,
) -> tuple[dict[str, Tensor | None], Tensor]:
    """A backbone's inputs, and what stands in for the decoder's weight in the loss.

    Where lookup and head share their table, their gradients are made in one buffer. The loss is the
    one reader of that weight: logits, if asked for, use the decoder's own.
    """
    embedding = model.get_input_embeddings()
    given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds}
    if labels is None or input_ids is None or inputs_embeds is not None:
        return given, decoder.weight
    if not isinstance(embedding, nn.Embedding) or not shares_table(embedding, decoder):
        return given, decoder.weight
    rows, weight = tied_lookup(embedding, input_ids)
    return {"inputs_embeds": rows}, weight
