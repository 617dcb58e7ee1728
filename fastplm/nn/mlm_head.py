"""The masked-language-model head, which computes only labelled rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fastplm import ops
from fastplm.nn._rows import as_normalizer, labels_at


class MLMHead(nn.Module):
    """Transform, vocabulary projection and cross-entropy of the labelled rows.

    ``mean over labelled rows of -log softmax(W transform(h) + b)[label]``; other rows are not
    computed.

    Args:
        transform: maps [P, E] to [P, E']: dense, activation and LayerNorm; in BERT
            ``cls.predictions.transform``, in ELECTRA ``generator_predictions``.
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
        label_smoothing: float = 0.0,
        return_statistics: bool = False,
        logits_budget: int | None = None,
    ) -> Any:
        """The loss.

        Args:
            hidden: [N, E] or [B, T, E].
            labels: int64 [N] or [B, T], -100 = no label.
            masked_positions: int64 [P], flat positions of the labels, -1 in unused slots. Default:
                computed from ``labels``, without unused slots only for an eager CPU tensor.
            normalizer: the denominator of the loss; default the number of labels.
            label_smoothing, return_statistics, logits_budget: as in ``ops.linear_cross_entropy``.

        Returns:
            fp32, 0-d; 0 without labels. With ``return_statistics`` the pair (loss,
            ``ops.RowStatistics`` of the P rows, in the order of their positions).

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes or dtypes that do not fit.
        """
        shape = hidden.shape[:-1]
        positions, targets = labels_at(type(self).__name__, labels, shape, masked_positions)
        return ops.linear_cross_entropy(
            self.transform(ops.gather_rows(hidden.flatten(0, -2), positions)),
            self.decoder.weight,
            targets,
            linear_bias=self.decoder.bias,
            label_smoothing=label_smoothing,
            normalizer=as_normalizer(normalizer, hidden.device),
            return_statistics=return_statistics,
            logits_budget=logits_budget,
            expected_targets=None if masked_positions is None else positions.shape[0],
        )
