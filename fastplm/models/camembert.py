"""CamemBERT: drop-in for the classes of the same names in Transformers; RoBERTa's layers.

Source: Martin et al. 2019 (arXiv 1911.03894).
"""

from __future__ import annotations

import transformers
from transformers.models.camembert import modeling_camembert

from fastplm.models import _encoder, _heads, roberta

CamembertEmbeddings, CamembertLayer = _encoder.like_bert(modeling_camembert, "Camembert", __name__)


class CamembertModel(roberta.Backbone, transformers.CamembertModel): ...


class CamembertForMaskedLM(roberta.LMHead, _heads.MaskedLM, transformers.CamembertForMaskedLM): ...


class CamembertForCausalLM(roberta.LMHead, _heads.CausalLM, transformers.CamembertForCausalLM): ...


class CamembertForSequenceClassification(
    _heads.SequenceClassification, transformers.CamembertForSequenceClassification
): ...


class CamembertForMultipleChoice(
    _heads.MultipleChoice, transformers.CamembertForMultipleChoice
): ...


class CamembertForTokenClassification(
    _heads.TokenClassification, transformers.CamembertForTokenClassification
): ...


class CamembertForQuestionAnswering(
    _heads.QuestionAnswering, transformers.CamembertForQuestionAnswering
): ...
