"""ERNIE: drop-in for the classes of the same names in Transformers; BERT's layers, and a table of
tasks beside that of token types.

Source: Sun et al. 2019 (arXiv 1907.12412).
"""

from __future__ import annotations

import transformers
from transformers.models.ernie import modeling_ernie

from fastplm.models import _encoder, _heads, bert

ErnieLayer = _encoder.layer_like_bert(modeling_ernie, "Ernie", __name__)


class ErnieModel(_encoder.EncoderModel, transformers.ErnieModel):
    _of_tokens = ("task_type_ids",)


class ErnieForMaskedLM(bert.PredictionHead, _heads.MaskedLM, transformers.ErnieForMaskedLM): ...


class ErnieForCausalLM(bert.PredictionHead, _heads.CausalLM, transformers.ErnieForCausalLM): ...


class ErnieForPreTraining(bert.PreTraining, transformers.ErnieForPreTraining):
    _output = modeling_ernie.ErnieForPreTrainingOutput


class ErnieForSequenceClassification(
    _heads.SequenceClassification, transformers.ErnieForSequenceClassification
): ...


class ErnieForMultipleChoice(_heads.MultipleChoice, transformers.ErnieForMultipleChoice): ...


class ErnieForTokenClassification(
    _heads.TokenClassification, transformers.ErnieForTokenClassification
): ...


class ErnieForQuestionAnswering(
    _heads.QuestionAnswering, transformers.ErnieForQuestionAnswering
): ...


class ErnieForNextSentencePrediction(
    _heads.SequenceClassification, transformers.ErnieForNextSentencePrediction
): ...
