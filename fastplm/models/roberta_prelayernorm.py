"""RoBERTa with its norms first: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

import transformers
from transformers.models.roberta_prelayernorm import modeling_roberta_prelayernorm as theirs

from fastplm.models import _described, _encoder, _heads, roberta
from fastplm.models._base import joined

RobertaPreLayerNormEmbeddings = joined(
    _encoder.EncoderEmbeddings, theirs.RobertaPreLayerNormEmbeddings
)
RobertaPreLayerNormLayer = _described.layer(
    *(theirs, "RobertaPreLayerNorm", "Layer", _described.PARTS_OF_BERT),
    _described.OF_BERT._replace(norms=("attention.LayerNorm", "intermediate.LayerNorm")),
)


class RobertaPreLayerNormModel(
    _described.Encoder, roberta.Backbone, transformers.RobertaPreLayerNormModel
):
    """``transformers.RobertaPreLayerNormModel`` with fused attention, computing only tokens.

    Source: Wettig et al. 2023 (arXiv 2202.08005).
    """

    _block, _last_norm = RobertaPreLayerNormLayer, "LayerNorm"


class RobertaPreLayerNormForMaskedLM(
    roberta.LMHead, _heads.MaskedLM, transformers.RobertaPreLayerNormForMaskedLM
): ...


class RobertaPreLayerNormForCausalLM(
    roberta.LMHead, _heads.CausalLM, transformers.RobertaPreLayerNormForCausalLM
): ...


class RobertaPreLayerNormForSequenceClassification(
    _heads.SequenceClassification, transformers.RobertaPreLayerNormForSequenceClassification
): ...


class RobertaPreLayerNormForMultipleChoice(
    _heads.MultipleChoice, transformers.RobertaPreLayerNormForMultipleChoice
): ...


class RobertaPreLayerNormForTokenClassification(
    _heads.TokenClassification, transformers.RobertaPreLayerNormForTokenClassification
): ...


class RobertaPreLayerNormForQuestionAnswering(
    _heads.QuestionAnswering, transformers.RobertaPreLayerNormForQuestionAnswering
): ...
