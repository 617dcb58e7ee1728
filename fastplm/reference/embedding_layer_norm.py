"""Reference of ``ops.embedding_layer_norm``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fastplm.reference.dropout import dropout_ref


def _rows(table: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """``F.embedding``, whose rule for ``torch.vmap`` fails for a batch of no tables."""
    rows = table[ids]
    if padding_idx < 0:
        return rows
    return torch.where((ids == padding_idx)[:, None], rows.detach(), rows)


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
    word_rows: Tensor | None = None,
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
    if word_rows is None:
        word = _rows(word_weight, input_ids, padding_idx)
    else:
        word = word_weight.detach()[input_ids] + (word_rows - word_rows.detach())
    place = _rows(position_weight, position_ids, position_padding_idx)
    kind = token_type_weight[0]
    if token_type_ids is not None:
        kind = _rows(token_type_weight, token_type_ids, -1)
    sum = word.to(wide) + place.to(wide) + kind.to(wide)
    x = sum - sum.mean(-1, keepdim=True)
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    out = x * weight.to(wide) + bias.to(wide)
    if dropout_p > 0.0:
        assert seed is not None
        out = dropout_ref(out, dropout_p, seed=seed, sample_index=sample_index, position=position)
    return out.to(dtype)
