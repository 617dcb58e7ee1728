"""BERT: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert import modeling_bert
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from fastplm._checks import INTEGER, check_dtype, check_shape, check_tensor
from fastplm.models._base import FastplmModel, drop_in
from fastplm.models._encoder import EncoderAttention, EncoderModel, EncoderSelfAttention
from fastplm.models._heads import (
    CausalLM,
    MaskedLM,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    labelled_loss,
)
from fastplm.nn._rows import IGNORE_INDEX, as_normalizer, batch_share


@drop_in
class BertSelfAttention(EncoderSelfAttention, modeling_bert.BertSelfAttention):
    """Self-attention whose queries may be some of the rows alone."""


@drop_in
class BertAttention(EncoderAttention, modeling_bert.BertAttention):
    """The attention block, in the last layer for the rows that are wanted."""


@drop_in
class BertModel(EncoderModel, transformers.BertModel):
    """``transformers.BertModel`` with fused attention, on the tokens alone."""


@drop_in
class BertForMaskedLM(MaskedLM, transformers.BertForMaskedLM):
    """``transformers.BertForMaskedLM`` whose head and loss see the labelled tokens only.

    Source: Devlin et al. 2018 (arXiv 1810.04805).
    """

    def _head(self) -> tuple[Callable[[Tensor], Tensor], nn.Linear]:
        return self.cls.predictions.transform, self.cls.predictions.decoder


@drop_in
class BertLMHeadModel(CausalLM, transformers.BertLMHeadModel):
    """``transformers.BertLMHeadModel``, a decoder, whose loss never makes all logits."""

    def _head(self) -> tuple[Callable[[Tensor], Tensor], nn.Linear]:
        return self.cls.predictions.transform, self.cls.predictions.decoder


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
class BertForPreTraining(FastplmModel, transformers.BertForPreTraining):
    """``transformers.BertForPreTraining`` whose MLM head sees the labelled tokens only.

    ``loss = MLM loss + next-sentence loss``, or the one whose labels are given.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §3.1.
    """

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
        head = self.cls.predictions
        inputs = dict(
            kwargs,
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
        )
        loss = prediction_logits = None
        all_rows = output_logits or (labels is None and next_sentence_label is None)
        if labels is not None:
            outputs, loss = labelled_loss(
                self,
                head.transform,
                head.decoder,
                labels,
                masked_positions,
                num_items_in_batch,
                all_rows,
                inputs,
            )
        else:
            rows = None if all_rows else "first"
            outputs = self.bert(**inputs, output_rows=rows, return_dict=True)
        seq_relationship_logits = self.cls.seq_relationship(outputs.pooler_output)
        if next_sentence_label is not None:
            nsp_loss = _next_sentence_loss(
                seq_relationship_logits, next_sentence_label, num_sequences_in_batch
            )
            if labels is not None and num_sequences_in_batch is None:
                nsp_loss = nsp_loss * batch_share(labels, num_items_in_batch)
            loss = nsp_loss if loss is None else loss + nsp_loss
        if all_rows:
            prediction_logits = head(outputs.last_hidden_state)
        return BertForPreTrainingOutput(
            loss=loss,
            prediction_logits=prediction_logits,
            seq_relationship_logits=seq_relationship_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


def _next_sentence_loss(
    logits: Tensor, label: Tensor, num_sequences_in_batch: int | Tensor | None
) -> Tensor:
    check_tensor("BertForPreTraining", "next_sentence_label", label)
    check_dtype("BertForPreTraining", "next_sentence_label", label, INTEGER)
    label = label.flatten().long()
    check_shape("BertForPreTraining", "next_sentence_label", label, logits.shape[:1], "[B]")
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = nn.functional.cross_entropy(logits, label, reduction="sum", ignore_index=IGNORE_INDEX)
    if num_sequences_in_batch is None:
        num_sequences_in_batch = (label != IGNORE_INDEX).sum()
    return total / as_normalizer(num_sequences_in_batch, logits.device)
