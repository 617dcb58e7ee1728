"""XLM-RoBERTa: drop-in for the classes of the same names in Transformers; RoBERTa's layers.

Source: Conneau et al. 2019 (arXiv 1911.02116).
"""

from __future__ import annotations

import transformers
from transformers.models.xlm_roberta import modeling_xlm_roberta

from fastplm.models import _encoder, _heads, roberta

XLMRobertaEmbeddings, XLMRobertaLayer = _encoder.like_bert(
    modeling_xlm_roberta, "XLMRoberta", __name__
)


class XLMRobertaModel(roberta.Backbone, transformers.XLMRobertaModel): ...


class XLMRobertaForMaskedLM(
    roberta.LMHead, _heads.MaskedLM, transformers.XLMRobertaForMaskedLM
): ...


class XLMRobertaForCausalLM(
    roberta.LMHead, _heads.CausalLM, transformers.XLMRobertaForCausalLM
): ...


class XLMRobertaForSequenceClassification(
    _heads.SequenceClassification, transformers.XLMRobertaForSequenceClassification
): ...


class XLMRobertaForMultipleChoice(
    _heads.MultipleChoice, transformers.XLMRobertaForMultipleChoice
): ...


class XLMRobertaForTokenClassification(
    _heads.TokenClassification, transformers.XLMRobertaForTokenClassification
): ...


class XLMRobertaForQuestionAnswering(
    _heads.QuestionAnswering, transformers.XLMRobertaForQuestionAnswering
): ...
