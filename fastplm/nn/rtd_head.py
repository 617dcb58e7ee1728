"""The replaced-token-detection head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastplm import ops
from fastplm._checks import check_shape, check_tensor
from fastplm.nn._rows import as_normalizer, is_plain
from fastplm.nn.linear import Linear


def rtd_loss(
    features: Tensor,
    replaced: Tensor | tuple[Tensor, Tensor],
    prediction: Any,
    mask: Tensor | None = None,
    *,
    normalizer: float | Tensor | None = None,
    return_counts: bool = False,
    where: str = "rtd_loss",
) -> Any:
    """``RTDHead`` without its dense layer and activation, as a function.

    ``features`` [..., E] are the input of ``prediction``, ``nn.Linear(E, 1)`` or a function with
    its shapes; the other arguments are those of ``RTDHead.forward``.
    """
    pair = isinstance(replaced, (tuple, list))
    labels: tuple[Any, ...] = tuple(replaced) if pair else (replaced,)
    for name, value in (*(("labels", value) for value in labels), ("attention_mask", mask)):
        if name == "labels" or value is not None:
            check_tensor(where, name, value)
            check_shape(where, name, value, features.shape[:-1], "one value a token")
    flat = tuple(value.flatten() for value in labels)
    rows: Tensor = features.flatten(0, -2)
    if is_plain(prediction, nn.Linear, Linear):
        weight, bias = prediction.weight.flatten(), prediction.bias
    else:
        # With an adapter or a hook it is called, and its scores are rows of width 1.
        rows = prediction(rows)
        weight, bias = rows.new_ones(1), None
    return ops.replaced_token_loss(
        rows,
        weight,
        flat if pair else flat[0].bool(),
        bias=bias,
        mask=None if mask is None else mask.flatten().bool(),
        normalizer=as_normalizer(normalizer, features.device),
        return_counts=return_counts,
    )


class RTDHead(nn.Module):
    """Dense layer, activation, and the binary cross-entropy of "was this token replaced?".

    ``mean over tokens of BCE(sigmoid(w . activation(dense(h)) + b), replaced)``

    Args:
        dense: ``nn.Linear(E, E)``.
        activation: module or function on tensors; ELECTRA's is GELU.
        prediction: ``nn.Linear(E, 1)``.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2.
    """

    def __init__(self, dense: nn.Linear, activation: nn.Module, prediction: nn.Linear) -> None:
        super().__init__()
        self.dense = dense
        self.activation = activation
        self.prediction = prediction

    def forward(
        self,
        hidden: Tensor,
        replaced: Tensor | tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        *,
        normalizer: float | Tensor | None = None,
        return_counts: bool = False,
    ) -> Any:
        """The loss.

        Args:
            hidden: [N, E] or [B, T, E].
            replaced: bool or integer [N] or [B, T], 1 = replaced; or (ids, original ids), two
                int64 or two int32 of that shape, replaced where they differ.
            mask: bool or integer of the same shape, 0 = leave the token out; default all tokens.
            normalizer: the denominator of the loss; default the number of tokens.
            return_counts: return (loss, ``ops.DetectionCounts``).

        Returns:
            fp32, 0-d; 0 if every token is left out.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes or dtypes that do not fit.
        """
        return rtd_loss(
            self.activation(self.dense(hidden)),
            replaced,
            self.prediction,
            mask,
            normalizer=normalizer,
            return_counts=return_counts,
            where=type(self).__name__,
        )
