"""NomicBERT: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.nomic_bert import modeling_nomic_bert as theirs

from fastplm.models import _described, _heads, bert

NomicBertLayer = _described.layer(
    *(theirs, "NomicBert", "Layer", "Attention MLP"),
    _described.OF_LLAMA._replace(
        norms=("post_attention_layernorm", "post_mlp_layernorm"),
        norms_first=False,
        context_dropout="post_attention_dropout",
        outer_dropout="post_mlp_dropout",
    ),
)


class NomicBertModel(_described.Encoder, transformers.NomicBertModel):
    """``transformers.NomicBertModel`` with fused attention, computing only tokens.

    Source: Nussbaum et al. 2024 (arXiv 2402.01613).
    """

    _block, _rotary, _output = NomicBertLayer, "rotary_emb", BaseModelOutputWithPooling

    def _embedded(self, **inputs: Any) -> Tensor:
        return self.embeddings(**inputs)


class NomicBertForMaskedLM(
    bert.PredictionHead, _heads.MaskedLM, transformers.NomicBertForMaskedLM
): ...


class NomicBertForSequenceClassification(
    _heads.SequenceClassification, transformers.NomicBertForSequenceClassification
): ...


class NomicBertForTokenClassification(
    _heads.TokenClassification, transformers.NomicBertForTokenClassification
): ...
