"""What the layers of a model do to their input, as numbers to look at."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastplm._checks import check, check_shape


class LayerSimilarity(NamedTuple):
    """How far each layer's output lies from its input, on average over the tokens: fp32 [L] each.

    Args:
        distance: L2 norm of the difference.
        cosine: of the angle between the two.
        degrees: that angle, 0 to 180; the mean of the angles, not the angle of the mean.
    """

    distance: Tensor
    cosine: Tensor
    degrees: Tensor


@torch.no_grad()
def layer_similarity(model: nn.Module, **batch: Any) -> LayerSimilarity:
    """L2 distance and cosine similarity of each layer's input and output.

    Where parameters are shared across layers, both move smoothly from layer to layer, and neither
    goes to 0: the layers do not run into a fixed point.

    Args:
        model: an encoder, with any head or none. Dropout acts as its mode says: ``model.eval()``
            first, for the numbers of the paper.
        batch: the arguments of its ``forward``. Tokens whose ``attention_mask`` [..., T] is 0 do
            not count. Of an encoder-decoder, the encoder is reported.

    Returns:
        ``LayerSimilarity`` with L = the number of layers that ran. The first one's input are the
        embeddings, after the projection to the width of the layers where there is one. Averages
        over no token are NaN.

    Raises:
        ArgumentValueError: the model has no hidden states to show, or the mask is not of their
            shape.

    Source: Lan et al. 2019 (arXiv 1909.11942), figure 1.
    """
    outputs = model(**{**batch, "output_hidden_states": True, "return_dict": True})
    states = outputs.get("hidden_states")
    if states is None:
        states = outputs.get("encoder_hidden_states")
    check(
        states is not None,
        "layer_similarity",
        "model",
        f"a {type(model).__name__} without hidden states",
        "a model of Transformers that returns `hidden_states`",
        "Pass the encoder itself.",
    )
    real = torch.ones(states[0].shape[:-1], dtype=torch.bool, device=states[0].device)
    mask = batch.get("attention_mask")
    if mask is not None:
        # Choices are rows of their own inside a model.
        mask = mask.flatten(0, -2).bool()
        check_shape(
            "layer_similarity", "attention_mask", mask, real.shape, "[the rows of the batch, T]"
        )
        real = mask.to(real.device)

    means = []
    for before, after in zip(states[:-1], states[1:], strict=True):
        before, after = before.float(), after.float()
        distance = torch.linalg.vector_norm(after - before, dim=-1)
        before, after = (
            nn.functional.normalize(before, dim=-1),
            nn.functional.normalize(after, dim=-1),
        )
        cosine = (before * after).sum(-1)
        # Half the angle: unlike the arc cosine, exact where it is small.
        sides = [
            torch.linalg.vector_norm(side, dim=-1) for side in (after - before, after + before)
        ]
        degrees = 2 * torch.atan2(*sides).rad2deg()
        values = torch.stack((distance, cosine, degrees))  # [3, B, T]
        means.append(values.where(real, 0).sum((1, 2)) / real.sum())
    return LayerSimilarity(*torch.stack(means, 1))
