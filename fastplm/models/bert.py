"""BERT: drop-in for the classes of the same names in Transformers.

Source: Devlin et al. 2018 (arXiv 1810.04805).
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.bert import modeling_bert

from fastplm.models import _encoder, _heads

BertEmbeddings, BertLayer = _encoder.like_bert(modeling_bert, "Bert", __name__)


class BertModel(_encoder.EncoderModel, transformers.BertModel):
    _output = BaseModelOutputWithPoolingAndCrossAttentions


def _split(model: Any) -> _heads.Head:
    head = model.cls.predictions
    return (head.transform, head.decoder) if _heads.as_made(model, head) else (None, head)


class PredictionHead:
    """Mixin of the heads that predict tokens alone."""

    def _head(self: Any) -> _heads.Head:
        return _split(self) if _heads.as_made(self, self.cls) else (None, self.cls)


class PreTraining(_heads.SequencePairPreTraining):
    """Mixin of the two heads of pre-training."""

    _summary = "whose MLM head computes only labelled tokens."
    _pair_label, _pair_logits = "next_sentence_label", "seq_relationship_logits"
    cls: Any

    def _changed(self) -> nn.Module | None:
        return None if _heads.as_made(self, self.cls) else self.cls

    def _head(self) -> _heads.Head:
        return _split(self) if self._changed() is None else (None, nn.Identity())

    def _pair_head(self) -> nn.Module:
        return self.cls.seq_relationship if self._changed() is None else nn.Identity()


class BertForMaskedLM(PredictionHead, _heads.MaskedLM, transformers.BertForMaskedLM): ...


class BertLMHeadModel(PredictionHead, _heads.CausalLM, transformers.BertLMHeadModel): ...


class BertForSequenceClassification(
    _heads.SequenceClassification, transformers.BertForSequenceClassification
): ...


class BertForNextSentencePrediction(
    _heads.SequenceClassification, transformers.BertForNextSentencePrediction
): ...


class BertForMultipleChoice(_heads.MultipleChoice, transformers.BertForMultipleChoice): ...


class BertForTokenClassification(
    _heads.TokenClassification, transformers.BertForTokenClassification
): ...


class BertForQuestionAnswering(_heads.QuestionAnswering, transformers.BertForQuestionAnswering): ...


class BertForPreTraining(PreTraining, transformers.BertForPreTraining):
    """``transformers.BertForPreTraining`` whose MLM head computes only labelled tokens.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §3.1.
    """

    _output = modeling_bert.BertForPreTrainingOutput
