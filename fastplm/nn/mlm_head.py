"""The masked-language-model head, on the labelled rows only."""

from __future__ import annotations

from torch import Tensor, nn

from fastplm import ops
from fastplm.nn._rows import as_normalizer, gather_labelled


def mlm_loss(
    hidden: Tensor,
    labels: Tensor,
    transform: nn.Module,
    decoder: nn.Linear,
    masked_positions: Tensor | None = None,
    *,
    normalizer: float | Tensor | None = None,
    where: str = "mlm_loss",
) -> Tensor:
    """``MLMHead`` as a function, for models whose submodules keep the names of their checkpoint."""
    rows, targets, _ = gather_labelled(where, hidden, labels, masked_positions)
    return ops.linear_cross_entropy(
        transform(rows),
        decoder.weight,
        targets,
        linear_bias=decoder.bias,
        normalizer=as_normalizer(normalizer, hidden.device),
    )


class MLMHead(nn.Module):
    """Transform, vocabulary projection and cross-entropy, for the rows that have a label.

    ``mean over labelled rows of -log softmax(W transform(h) + b)[label]``; neither the other rows
    nor the logits are ever computed.

    Args:
        transform: maps [P, E] to [P, E']: dense, activation and LayerNorm; of BERT
            ``cls.predictions.transform``, of ELECTRA ``generator_predictions``.
        decoder: ``nn.Linear(E', V)``, its weight usually tied to the embedding.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §3.1 and appendix A.
    """

    def __init__(self, transform: nn.Module, decoder: nn.Linear) -> None:
        super().__init__()
        self.transform = transform
        self.decoder = decoder

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor,
        masked_positions: Tensor | None = None,
        *,
        normalizer: float | Tensor | None = None,
    ) -> Tensor:
        """The loss.

        Args:
            hidden: [N, E] or [B, T, E].
            labels: int64 [N] or [B, T], -100 = no label.
            masked_positions: int64 [P], flat positions of the labels, -1 in unused slots. Without
                it they are found: exactly on an eager CPU tensor, else with one slot a token.
            normalizer: what the sum of the losses is divided by; default the number of labels.

        Returns:
            fp32, 0-d; 0 if nothing has a label.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes or dtypes that do not fit.
        """
        return mlm_loss(
            hidden,
            labels,
            self.transform,
            self.decoder,
            masked_positions,
            normalizer=normalizer,
            where="MLMHead",
        )
