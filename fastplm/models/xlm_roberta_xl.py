"""XLM-RoBERTa-XL: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

import transformers
from transformers.models.xlm_roberta_xl import modeling_xlm_roberta_xl as theirs

from fastplm.models import _described, _heads, roberta

XLMRobertaXLLayer = _described.layer(
    *(theirs, "XLMRobertaXL", "Layer", _described.PARTS_OF_BERT),
    _described.OF_BERT._replace(
        norms=("attention.self_attn_layer_norm", "LayerNorm"), outer_dropout=""
    ),
)


class XLMRobertaXLModel(_described.Encoder, roberta.Backbone, transformers.XLMRobertaXLModel):
    """``transformers.XLMRobertaXLModel`` with fused attention, computing only tokens.

    Source: Goyal et al. 2021 (arXiv 2105.00572).
    """

    _block, _last_norm = XLMRobertaXLLayer, "encoder.LayerNorm"


class XLMRobertaXLForMaskedLM(
    roberta.LMHead, _heads.MaskedLM, transformers.XLMRobertaXLForMaskedLM
): ...


class XLMRobertaXLForCausalLM(
    roberta.LMHead, _heads.CausalLM, transformers.XLMRobertaXLForCausalLM
): ...


class XLMRobertaXLForSequenceClassification(
    _heads.SequenceClassification, transformers.XLMRobertaXLForSequenceClassification
): ...


class XLMRobertaXLForMultipleChoice(
    _heads.MultipleChoice, transformers.XLMRobertaXLForMultipleChoice
): ...


class XLMRobertaXLForTokenClassification(
    _heads.TokenClassification, transformers.XLMRobertaXLForTokenClassification
): ...


class XLMRobertaXLForQuestionAnswering(
    _heads.QuestionAnswering, transformers.XLMRobertaXLForQuestionAnswering
): ...
