"""The masked-language-model head, which computes only labelled rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fastplm import ops
from fastplm.nn._rows import as_normalizer, gather_labelled

if TYPE_CHECKING:
    from transformers import AlbertConfig, BertConfig, ElectraConfig, RobertaConfig


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

    def transform_rows(self, hidden: Tensor) -> Tensor:
        return self.transform(hidden)

    @property
    def output_projection(self) -> nn.Linear:
        """The decoder; tie its ``weight`` to the embedding."""
        return self.decoder

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
        where, decoder = type(self).__name__, self.output_projection
        rows, targets, _ = gather_labelled(where, hidden, labels, masked_positions)
        return ops.linear_cross_entropy(
            self.transform_rows(rows),
            decoder.weight,
            targets,
            linear_bias=decoder.bias,
            label_smoothing=label_smoothing,
            normalizer=as_normalizer(normalizer, hidden.device),
            return_statistics=return_statistics,
            logits_budget=logits_budget,
            expected_targets=None if masked_positions is None else masked_positions.shape[0],
        )


# --- the heads of Transformers' models, by their parameter names ----------------------------------


class _ModelHead(nn.Module):
    """``forward`` is that of Transformers' head, ``loss`` the fused loss of the labelled rows."""

    decoder: nn.Linear
    #: The input of the decoder: [..., E] -> [..., E'].
    transform_rows: Callable[[Tensor], Tensor]

    @property
    def output_projection(self) -> nn.Linear:
        """The decoder; tie its ``weight`` to the embedding."""
        return self.decoder

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits: [..., E] -> [..., V]."""
        return self.output_projection(self.transform_rows(hidden))

    loss = MLMHead.forward


class BertMLMHead(_ModelHead):
    """``BertForMaskedLM.cls``: ``predictions.{transform.{dense, LayerNorm}, decoder, bias}``.

    Source: Devlin et al. 2018 (arXiv 1810.04805), appendix A.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _BertPredictions(config)

    def transform_rows(self, hidden: Tensor) -> Tensor:
        return self.predictions.transform(hidden)

    @property
    def output_projection(self) -> nn.Linear:
        return self.predictions.decoder


class _BertPredictions(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bias = _bias(config)
        self.transform = _BertTransform(config)
        self.decoder = _decoder(config.hidden_size, self.bias)


class _BertTransform(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = _activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden)))


class AlbertMLMHead(_ModelHead):
    """``AlbertForMaskedLM.predictions``: ``{bias, LayerNorm, dense, decoder}``.

    Source: Lan et al. 2019 (arXiv 1909.11942), §3.1, with embeddings narrower than hidden states.
    """

    def __init__(self, config: AlbertConfig) -> None:
        super().__init__()
        self.bias = _bias(config)
        self.LayerNorm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.decoder = _decoder(config.embedding_size, self.bias)
        self.activation = _activation(config.hidden_act)

    def transform_rows(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(self.activation(self.dense(hidden)))


class ElectraMLMHead(_ModelHead):
    """``ElectraForMaskedLM``'s ``generator_predictions.{LayerNorm, dense}`` and
    ``generator_lm_head``; its activation is always GELU.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2.
    """

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.generator_predictions = _ElectraTransform(config)
        self.generator_lm_head = nn.Linear(config.embedding_size, config.vocab_size)

    def transform_rows(self, hidden: Tensor) -> Tensor:
        return self.generator_predictions(hidden)

    @property
    def output_projection(self) -> nn.Linear:
        return self.generator_lm_head


class _ElectraTransform(nn.Module):
    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.LayerNorm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.LayerNorm(nn.functional.gelu(self.dense(hidden)))


class RobertaMLMHead(_ModelHead):
    """``RobertaForMaskedLM.lm_head``: ``{bias, dense, layer_norm, decoder}``.

    Source: Liu et al. 2019 (arXiv 1907.11692).
    """

    def __init__(self, config: RobertaConfig) -> None:
        super().__init__()
        self.bias = _bias(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = _decoder(config.hidden_size, self.bias)

    def transform_rows(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(nn.functional.gelu(self.dense(hidden)))


def _bias(config: BertConfig | AlbertConfig | RobertaConfig) -> nn.Parameter:
    return nn.Parameter(torch.zeros(config.vocab_size))


def _decoder(width: int, bias: nn.Parameter) -> nn.Linear:
    """Checkpoints contain the decoder's bias under two names; here both are one parameter."""
    decoder = nn.Linear(width, len(bias))
    decoder.bias = bias
    return decoder


def _activation(choice: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if not isinstance(choice, str):
        return choice
    # Importing Transformers is slow, so it is imported on first use.
    from transformers.activations import ACT2FN

    return ACT2FN[choice]
