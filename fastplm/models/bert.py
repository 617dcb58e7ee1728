"""BERT: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from fastplm.models._base import drop_in
from fastplm.models._encoder import EncoderAttention, EncoderModel, EncoderSelfAttention
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
    """Self-attention whose queries may be some of the rows alone."""


@drop_in
class BertAttention(EncoderAttention, modeling_bert.BertAttention):
    """The attention block, in the last layer for the rows that are wanted."""


@drop_in
class BertModel(EncoderModel, transformers.BertModel):
    """``transformers.BertModel`` with fused attention, on the tokens alone."""


def _split(head: Any) -> Head:
    if not is_plain(head, modeling_bert.BertLMPredictionHead):
        return None, head
    return head.transform, head.decoder


@drop_in
class BertForMaskedLM(MaskedLM, transformers.BertForMaskedLM):
    """``transformers.BertForMaskedLM`` whose head and loss see the labelled tokens only.

    Source: Devlin et al. 2018 (arXiv 1810.04805).
    """

    def _head(self) -> Head:
        if not is_plain(self.cls, modeling_bert.BertOnlyMLMHead):
            return None, self.cls
        return _split(self.cls.predictions)


@drop_in
class BertLMHeadModel(CausalLM, transformers.BertLMHeadModel):
    """``transformers.BertLMHeadModel``, a decoder, whose loss never makes all logits."""

    def _head(self) -> Head:
        if not is_plain(self.cls, modeling_bert.BertOnlyMLMHead):
            return None, self.cls
        return _split(self.cls.predictions)


@drop_in
class BertForSequenceClassification(
    SequenceClassification, transformers.BertForSequenceClassification
):
    """``transformers.BertForSequenceClassification``, whose last layer is for [CLS] alone."""


@drop_in
class BertForNextSentencePrediction(
    SequenceClassification, transformers.BertForNextSentencePrediction
):
    """``transformers.BertForNextSentencePrediction``, whose last layer is for [CLS] alone."""


@drop_in
class BertForMultipleChoice(MultipleChoice, transformers.BertForMultipleChoice):
    """``transformers.BertForMultipleChoice``, whose last layer is for [CLS] alone."""


@drop_in
class BertForTokenClassification(TokenClassification, transformers.BertForTokenClassification):
    """``transformers.BertForTokenClassification`` on the tokens alone."""


@drop_in
class BertForQuestionAnswering(QuestionAnswering, transformers.BertForQuestionAnswering):
    """``transformers.BertForQuestionAnswering`` with fused attention."""


@drop_in
class BertForPreTraining(SequencePairPreTraining, transformers.BertForPreTraining):
    """``transformers.BertForPreTraining`` whose MLM head sees the labelled tokens only.

    ``loss = MLM loss + next-sentence loss``, or the one whose labels are given.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §3.1.
    """

    def _head(self) -> Head:
        return _split(self.cls.predictions)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        masked_positions: Tensor | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        num_sequences_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> BertForPreTrainingOutput:
        """As the parent, with these differences.

        Args:
            labels, masked_positions, output_logits, num_items_in_batch: as in ``BertForMaskedLM``,
                for the MLM loss and ``prediction_logits``.
            next_sentence_label: int64 [B], 0 = B follows A, 1 = it does not, -100 = none.
            num_sequences_in_batch: what the sum of the next-sentence losses is divided by. Without
                it, but with ``num_items_in_batch``, their mean is weighted by this batch's share of
                the labels: the shares of accumulated batches sum to 1, yet batches whose rows hold
                unequally many labels do not weigh their sequences quite equally.

        Returns:
            ``BertForPreTrainingOutput``; the loss is fp32.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes, dtypes or (on the CPU) ids that do not
                fit.
        """
        inputs = dict(
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        outputs, loss, prediction_logits, seq_relationship_logits = self._pretrain(
            self.cls.seq_relationship,
            labels,
            "next_sentence_label",
            next_sentence_label,
            masked_positions,
            output_logits,
            num_items_in_batch,
            num_sequences_in_batch,
            inputs,
        )
        return BertForPreTrainingOutput(
            loss=loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=seq_relationship_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
