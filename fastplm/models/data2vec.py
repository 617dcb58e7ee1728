"""data2vec-text: drop-in for the classes of the same names in Transformers; RoBERTa's layers.

Source: Baevski et al. 2022 (arXiv 2202.03555).
"""

from __future__ import annotations

import transformers
from transformers.models.data2vec import modeling_data2vec_text

from fastplm.models import _encoder, _heads, roberta

Data2VecTextEmbeddings, Data2VecTextLayer = _encoder.like_bert(
    modeling_data2vec_text, "Data2VecText", __name__
)


class Data2VecTextModel(roberta.Backbone, transformers.Data2VecTextModel): ...


class Data2VecTextForMaskedLM(
    roberta.LMHead, _heads.MaskedLM, transformers.Data2VecTextForMaskedLM
): ...


class Data2VecTextForCausalLM(
    roberta.LMHead, _heads.CausalLM, transformers.Data2VecTextForCausalLM
): ...


class Data2VecTextForSequenceClassification(
    _heads.SequenceClassification, transformers.Data2VecTextForSequenceClassification
): ...


class Data2VecTextForMultipleChoice(
    _heads.MultipleChoice, transformers.Data2VecTextForMultipleChoice
): ...


class Data2VecTextForTokenClassification(
    _heads.TokenClassification, transformers.Data2VecTextForTokenClassification
): ...


class Data2VecTextForQuestionAnswering(
    _heads.QuestionAnswering, transformers.Data2VecTextForQuestionAnswering
): ...
