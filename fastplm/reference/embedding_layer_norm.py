"""Reference of ``ops.embedding_layer_norm``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastplm.reference.dropout import dropout_ref


def embedding_layer_norm_ref(
    input_ids: Tensor,
    word_weight: Tensor,
    position_ids: Tensor,
    position_weight: Tensor,
    token_type_ids: Tensor | None,
    token_type_weight: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    padding_idx: int = -1,
    position_padding_idx: int = -1,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """``dropout(layer_norm(word + position + type) * weight + bias)``, rounded once to ``dtype``.

    Args: those of ``ops.embedding_layer_norm``; an index of padding of -1 is none.
    """
    wide = torch.float32
    for one in (word_weight, position_weight, token_type_weight, weight, bias):
        wide = torch.promote_types(wide, one.dtype)
    word = F.embedding(input_ids, word_weight, None if padding_idx < 0 else padding_idx)
    positions = None if position_padding_idx < 0 else position_padding_idx
    place = F.embedding(position_ids, position_weight, positions)
    kind = token_type_weight[0]
    if token_type_ids is not None:
        kind = F.embedding(token_type_ids, token_type_weight)
    sum = word.to(wide) + place.to(wide) + kind.to(wide)
    out = F.layer_norm(sum, weight.shape, weight.to(wide), bias.to(wide), eps)
    if dropout_p > 0.0:
        assert seed is not None
        out = dropout_ref(out, dropout_p, seed=seed, sample_index=sample_index, position=position)
    return out.to(dtype)
