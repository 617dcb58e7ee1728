"""What ``fastplm measure`` times of models: a BERT in one call of csrc/, and module by module."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from fastplm._backends import use_backend
from fastplm._measure import Call, Plan
from fastplm._rules import ALONE
from fastplm.models._freeze import freeze
from fastplm.models.bert import BertModel

#: Tokens of a sequence; how many weights the layers have together, about.
_TOKENS, _OF_LAYERS = 32, 1 << 24


def plans() -> Iterator[Plan]:
    """A BERT in one call of csrc/, and module by module."""

    @functools.cache
    def model_of(width: int) -> Any:
        config = transformers.BertConfig(
            vocab_size=1000,
            hidden_size=width,
            num_attention_heads=width // 32,
            intermediate_size=4 * width,
            num_hidden_layers=min(12, max(2, _OF_LAYERS // (12 * width**2))),
        )
        return freeze(BertModel(config))

    def make(rows: int, width: int) -> tuple[Call, Call]:
        model = model_of(width)
        ids = torch.randint(1000, (math.ceil(rows / _TOKENS), min(rows, _TOKENS)), device="cpu")

        def ours() -> Any:
            with torch.inference_mode(), use_backend("cpp", "linear"):
                return model(ids)

        def stock() -> Any:
            with torch.inference_mode():
                return transformers.BertModel.forward(model, ids)

        return ours, stock

    for threads in ("", ALONE):
        axes = [[8, 32, 128, 512, 2048], [256, 384, 768]]
        yield Plan("encoder", "forward" + threads, torch.float32, axes, make)
