"""EuroBERT: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.eurobert import modeling_eurobert as theirs

from fastplm.models import _described, _heads
from fastplm.models._base import joined
from fastplm.models.t5 import RMSNorm

EuroBertRMSNorm = joined(RMSNorm, theirs.EuroBertRMSNorm)
EuroBertDecoderLayer = _described.layer(
    *(theirs, "EuroBert", "DecoderLayer", "Attention MLP"),
    _described.OF_LLAMA._replace(rms=EuroBertRMSNorm),
)


class EuroBertModel(_described.Encoder, transformers.EuroBertModel):
    """``transformers.EuroBertModel`` with fused attention, computing only tokens.

    Source: Boizard et al. 2025 (arXiv 2503.05500).
    """

    _block, _last_norm, _output = EuroBertDecoderLayer, "norm", BaseModelOutput
    _rotary = "rotary_emb"

    def _embedded(self: Any, **inputs: Any) -> Tensor:
        rows = inputs["inputs_embeds"]
        return self.embed_tokens(inputs["input_ids"]) if rows is None else rows


class EuroBertForMaskedLM(_heads.MaskedLM, transformers.EuroBertForMaskedLM): ...


class EuroBertForSequenceClassification(
    _heads.PooledClassification, transformers.EuroBertForSequenceClassification
): ...


class EuroBertForTokenClassification(
    _heads.TokenClassification, transformers.EuroBertForTokenClassification
): ...
