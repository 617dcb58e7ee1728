"""The replaced-token-detection head."""

from __future__ import annotations

from torch import Tensor, nn

from fastplm import ops
from fastplm._checks import check_shape, check_tensor
from fastplm.nn._rows import as_normalizer


def rtd_loss(
    features: Tensor,
    replaced: Tensor,
    prediction: nn.Linear,
    mask: Tensor | None = None,
    *,
    normalizer: float | Tensor | None = None,
    where: str = "rtd_loss",
) -> Tensor:
    """``RTDHead`` behind its dense layer, as a function.

    Args:
        features: [..., E], what ``prediction`` sees.
        replaced: [...] of any dtype; a token counts as replaced where it is not 0.
        prediction: ``nn.Linear(E, 1)``.
        mask: [...] of any dtype; tokens with 0 are left out.
        normalizer: what the sum of the losses is divided by; default the number of tokens.
        where: what an error message calls the caller.
    """
    shape = features.shape[:-1]
    for name, value in (("labels", replaced), ("attention_mask", mask)):
        if value is not None:
            check_tensor(where, name, value)
            check_shape(where, name, value, shape, "one value a token")
    return ops.replaced_token_loss(
        features.flatten(0, -2),
        prediction.weight.flatten(),
        replaced.flatten().bool(),
        bias=prediction.bias,
        mask=None if mask is None else mask.flatten().bool(),
        normalizer=as_normalizer(normalizer, features.device),
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
        replaced: Tensor,
        mask: Tensor | None = None,
        *,
        normalizer: float | Tensor | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            hidden: [N, E] or [B, T, E].
            replaced: bool or integer [N] or [B, T], 1 = replaced.
            mask: bool or integer of the same shape, 0 = leave the token out; default none.
            normalizer: what the sum of the losses is divided by; default the number of tokens.

        Returns:
            fp32, 0-d; 0 if every token is left out.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes or dtypes that do not fit.
        """
        features = self.activation(self.dense(hidden))
        return rtd_loss(
            features, replaced, self.prediction, mask, normalizer=normalizer, where="RTDHead"
        )
