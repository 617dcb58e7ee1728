"""Measures of how much each layer of a model changes its input."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from fastplm._checks import check_shape
from fastplm.errors import fail


class LayerSimilarity(NamedTuple):
    """The difference between input and output of each layer, averaged over tokens: fp32 [L] each.

    Args:
        distance: L2 norm of the difference.
        cosine: cosine similarity.
        degrees: the angle between the two, 0 to 180; the mean of the angles, not of the cosines.
    """

    distance: Tensor
    cosine: Tensor
    degrees: Tensor


@torch.no_grad()
def layer_similarity(model: nn.Module, **batch: Any) -> LayerSimilarity:
    """L2 distance and cosine similarity of each layer's input and output.

    If layers share their parameters, both change smoothly from layer to layer but do not converge
    to 0 (the layers have no fixed point).

    Args:
        model: an encoder, with or without a head. Call ``model.eval()`` first to switch dropout
            off, as in the paper.
        batch: the arguments of its ``forward``. Tokens whose ``attention_mask`` [..., T] is 0 are
            left out. For an encoder-decoder, the layers of the encoder are measured.

    Returns:
        ``LayerSimilarity`` with L = the number of layers that ran. The input of the first layer is
        the embeddings, after their projection to the hidden size if there is one. Averages over no
        tokens are NaN.

    Raises:
        ArgumentValueError: the model returns no hidden states, or the mask has another shape.

    Source: Lan et al. 2019 (arXiv 1909.11942), figure 1.
    """
    outputs = model(**{**batch, "output_hidden_states": True, "return_dict": True})
    states = outputs.get("hidden_states")
    if states is None:
        states = outputs.get("encoder_hidden_states")
    if states is None:
        got = f"a {type(model).__name__} without hidden states"
        expected = "a model of Transformers that returns `hidden_states`"
        fail("layer_similarity", "model", got, expected, "Pass the encoder itself.")
    real = torch.ones(states[0].shape[:-1], dtype=torch.bool, device=states[0].device)
    mask = batch.get("attention_mask")
    if mask is not None:
        # Multiple-choice models flatten the choices into the batch.
        mask = mask.flatten(0, -2).bool()
        expected = "[the rows of the batch, T]"
        check_shape("layer_similarity", "attention_mask", mask, real.shape, expected)
        real = mask.to(real.device)

    means = []
    for before, after in zip(states[:-1], states[1:], strict=True):
        before, after = before.float(), after.float()
        distance = vector_norm(after - before, dim=-1)
        before, after = (nn.functional.normalize(one, dim=-1) for one in (before, after))
        cosine = (before * after).sum(-1)
        # From half the angle: accurate for small angles, unlike the arc cosine.
        apart, along = (vector_norm(side, dim=-1) for side in (after - before, after + before))
        degrees = 2 * torch.atan2(apart, along).rad2deg()
        values = torch.stack((distance, cosine, degrees))  # [3, B, T]
        means.append(values.where(real, 0).sum((1, 2)) / real.sum())
    return LayerSimilarity(*torch.stack(means, 1))
