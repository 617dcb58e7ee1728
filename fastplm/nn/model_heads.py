"""The heads of Transformers' models, by their parameter names, with the fused losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastplm.nn.mlm_head import MLMHead
from fastplm.nn.rtd_head import RTDHead

if TYPE_CHECKING:
    from transformers import AlbertConfig, BertConfig, ElectraConfig, RobertaConfig


class _ModelHead(nn.Module):
    """``forward`` is that of Transformers' head, ``loss`` the fused loss of the labelled rows."""

    decoder: nn.Linear
    transform: Callable[[Tensor], Tensor]  # [..., E] -> [..., E'], the input of the decoder

    @property
    def output_projection(self) -> nn.Linear:
        """The decoder; tie its ``weight`` to the embedding."""
        return self.decoder

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits: [..., E] -> [..., V]."""
        return self.decoder(self.transform(hidden))

    loss = MLMHead.forward


class BertMLMHead(_ModelHead):
    """``BertForMaskedLM.cls``: ``predictions.{transform.{dense, LayerNorm}, decoder, bias}``.

    Source: Devlin et al. 2018 (arXiv 1810.04805), appendix A.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = _BertPredictions(config)

    @property
    def transform(self) -> nn.Module:  # type: ignore[override]
        return self.predictions.transform

    @property
    def decoder(self) -> nn.Linear:  # type: ignore[override]
        return self.predictions.decoder


class _BertPredictions(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
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
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.LayerNorm = nn.LayerNorm(config.embedding_size, eps=config.layer_norm_eps)
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.decoder = _decoder(config.embedding_size, self.bias)
        self.activation = _activation(config.hidden_act)

    def transform(self, hidden: Tensor) -> Tensor:
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

    def transform(self, hidden: Tensor) -> Tensor:
        return self.generator_predictions(hidden)

    @property
    def decoder(self) -> nn.Linear:  # type: ignore[override]
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
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = _decoder(config.hidden_size, self.bias)

    def transform(self, hidden: Tensor) -> Tensor:
        return self.layer_norm(nn.functional.gelu(self.dense(hidden)))


class ElectraRTDHead(nn.Module):
    """``ElectraDiscriminatorPredictions``: ``{dense, dense_prediction}``. ``forward`` gives the
    logits of "replaced", ``loss`` the fused loss.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2.
    """

    def __init__(self, config: ElectraConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = _activation(config.hidden_act)
        self.dense_prediction = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., E] -> [...]."""
        return self.dense_prediction(self.activation(self.dense(hidden))).squeeze(-1)

    @property
    def prediction(self) -> nn.Linear:
        return self.dense_prediction

    loss = RTDHead.forward


def _decoder(width: int, bias: nn.Parameter) -> nn.Linear:
    """Checkpoints contain the decoder's bias under two names; here both are one parameter."""
    decoder = nn.Linear(width, len(bias))
    decoder.bias = bias
    return decoder


def _activation(choice: str | Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if not isinstance(choice, str):
        return choice
    from transformers.activations import ACT2FN  # importing Transformers is slow

    return ACT2FN[choice]
