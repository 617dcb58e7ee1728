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
from fastplm.models._base import joined
from fastplm.nn._rows import is_plain

BertEmbeddings = joined(_encoder.EncoderEmbeddings, modeling_bert.BertEmbeddings)
BertLayer = joined(
    _encoder.EncoderLayer,
    modeling_bert.BertLayer,
    _around=_encoder.wrapper_classes(modeling_bert, "Bert"),
)


class BertModel(_encoder.EncoderModel, transformers.BertModel):
    _output = BaseModelOutputWithPoolingAndCrossAttentions


def _split(head: Any) -> _heads.Head:
    if not is_plain(head, modeling_bert.BertLMPredictionHead):
        return None, head
    return head.transform, head.decoder


class _LanguageModelHead:
    """Shared by the two heads that predict tokens alone."""

    def _head(self: Any) -> _heads.Head:
        if not is_plain(self.cls, modeling_bert.BertOnlyMLMHead):
            return None, self.cls
        return _split(self.cls.predictions)


class BertForMaskedLM(_LanguageModelHead, _heads.MaskedLM, transformers.BertForMaskedLM): ...


class BertLMHeadModel(_LanguageModelHead, _heads.CausalLM, transformers.BertLMHeadModel): ...


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


class BertForPreTraining(_heads.SequencePairPreTraining, transformers.BertForPreTraining):
    """``transformers.BertForPreTraining`` whose MLM head computes only labelled tokens.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §3.1.
    """

    _output = modeling_bert.BertForPreTrainingOutput
    _pair_label, _pair_logits = "next_sentence_label", "seq_relationship_logits"

    def _changed(self) -> nn.Module | None:
        return None if is_plain(self.cls, modeling_bert.BertPreTrainingHeads) else self.cls

    def _head(self) -> _heads.Head:
        return _split(self.cls.predictions) if self._changed() is None else (None, nn.Identity())

    def _pair_head(self) -> nn.Module:
        return self.cls.seq_relationship if self._changed() is None else nn.Identity()
