"""BERT: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers.models.bert import modeling_bert

from fastplm.models._base import drop_in
from fastplm.models._encoder import (
    EncoderAttention,
    EncoderIntermediate,
    EncoderLayer,
    EncoderModel,
    EncoderOutput,
    EncoderSelfAttention,
)
from fastplm.models._heads import (
    CausalLM,
    Head,
    MaskedLM,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    SequencePairPreTraining,
    TokenClassification,
)
from fastplm.nn._rows import is_plain


@drop_in
class BertSelfAttention(EncoderSelfAttention, modeling_bert.BertSelfAttention):
    """Self-attention whose queries may be only some of the rows."""


@drop_in
class BertAttention(EncoderAttention, modeling_bert.BertAttention):
    """The attention block, which in the last layer may compute only some rows."""


@drop_in
class BertSelfOutput(EncoderOutput, modeling_bert.BertSelfOutput):
    """The end of the attention block."""


@drop_in
class BertIntermediate(EncoderIntermediate, modeling_bert.BertIntermediate):
    """The first half of the feed-forward."""


@drop_in
class BertOutput(EncoderOutput, modeling_bert.BertOutput):
    """The second half of the feed-forward."""


@drop_in
class BertLayer(EncoderLayer, modeling_bert.BertLayer):
    """The layer, which does not inspect its feed-forward in every call."""


@drop_in
class BertModel(EncoderModel, transformers.BertModel):
    """``transformers.BertModel`` with fused attention, computing only tokens."""


def _split(head: Any) -> Head:
    if not is_plain(head, modeling_bert.BertLMPredictionHead):
        return None, head
    return head.transform, head.decoder


@drop_in
class BertForMaskedLM(MaskedLM, transformers.BertForMaskedLM):
    """``transformers.BertForMaskedLM`` whose head and loss compute only labelled tokens.

    Source: Devlin et al. 2018 (arXiv 1810.04805).
    """

    def _head(self) -> Head:
        if not is_plain(self.cls, modeling_bert.BertOnlyMLMHead):
            return None, self.cls
        return _split(self.cls.predictions)


@drop_in
class BertLMHeadModel(CausalLM, transformers.BertLMHeadModel):
    """``transformers.BertLMHeadModel``, a decoder. Its loss computes no full logits."""

    def _head(self) -> Head:
        if not is_plain(self.cls, modeling_bert.BertOnlyMLMHead):
            return None, self.cls
        return _split(self.cls.predictions)


@drop_in
class BertForSequenceClassification(
    SequenceClassification, transformers.BertForSequenceClassification
):
    """``transformers.BertForSequenceClassification``, whose last layer computes only [CLS]."""


@drop_in
class BertForNextSentencePrediction(
    SequenceClassification, transformers.BertForNextSentencePrediction
):
    """``transformers.BertForNextSentencePrediction``, whose last layer computes only [CLS]."""


@drop_in
class BertForMultipleChoice(MultipleChoice, transformers.BertForMultipleChoice):
    """``transformers.BertForMultipleChoice``, whose last layer computes only [CLS]."""


@drop_in
class BertForTokenClassification(TokenClassification, transformers.BertForTokenClassification):
    """``transformers.BertForTokenClassification``, computing only tokens."""


@drop_in
class BertForQuestionAnswering(QuestionAnswering, transformers.BertForQuestionAnswering):
    """``transformers.BertForQuestionAnswering`` with fused attention."""


@drop_in
class BertForPreTraining(SequencePairPreTraining, transformers.BertForPreTraining):
    """``transformers.BertForPreTraining`` whose MLM head computes only labelled tokens.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §3.1.
    """

    _output = modeling_bert.BertForPreTrainingOutput
    _pair_label, _pair_logits = "next_sentence_label", "seq_relationship_logits"

    def _head(self) -> Head:
        return _split(self.cls.predictions)

    def _pair_head(self) -> nn.Module:
        return self.cls.seq_relationship
