"""BERT: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.bert.modeling_bert import BertForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from fastplm._checks import INTEGER, check_dtype, check_shape, check_tensor
from fastplm.models._base import FastplmModel, check_input_ids, tied_inputs
from fastplm.nn._rows import IGNORE_INDEX, as_normalizer, batch_share
from fastplm.nn.mlm_head import mlm_loss


class BertModel(FastplmModel, transformers.BertModel):
    """``transformers.BertModel`` with fused attention."""


class BertForMaskedLM(FastplmModel, transformers.BertForMaskedLM):
    """``transformers.BertForMaskedLM`` whose head and loss see the labelled tokens only.

    Source: Devlin et al. 2018 (arXiv 1810.04805).
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        masked_positions: Tensor | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """As the parent, with these differences.

        Args:
            labels: int64 [B, T], -100 = none. With labels, ``logits`` are None.
            masked_positions: int64 [P], flat positions of the labels, -1 in unused slots; fixes the
                shapes of the head, for compiled models and CUDA. Without it they are found.
            output_logits: return the logits beside the loss after all.
            num_items_in_batch: what the sum of the losses is divided by: the number of labels of
                all batches that gradients are accumulated over. Default: of this batch.

        Returns:
            ``MaskedLMOutput``; the loss is fp32, and 0 if nothing has a label.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes, dtypes or (on the CPU) ids that do not
                fit.
        """
        check_input_ids("BertForMaskedLM", input_ids, self.config.vocab_size)
        decoder = self.cls.predictions.decoder
        inputs, weight = tied_inputs(self, decoder, input_ids, inputs_embeds, labels)
        outputs = self.bert(
            **inputs,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if labels is not None:
            loss = mlm_loss(
                hidden,
                labels,
                self.cls.predictions.transform,
                decoder,
                masked_positions,
                normalizer=num_items_in_batch,
                decoder_weight=weight,
                where="BertForMaskedLM",
            )
        if labels is None or output_logits:
            logits = self.cls(hidden)
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


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
        check_input_ids("BertForPreTraining", input_ids, self.config.vocab_size)
        decoder = self.cls.predictions.decoder
        inputs, weight = tied_inputs(self, decoder, input_ids, inputs_embeds, labels)
        outputs = self.bert(
            **inputs,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        seq_relationship_logits = self.cls.seq_relationship(outputs.pooler_output)
        loss = prediction_logits = None
        if labels is not None:
            loss = mlm_loss(
                hidden,
                labels,
                self.cls.predictions.transform,
                decoder,
                masked_positions,
                normalizer=num_items_in_batch,
                decoder_weight=weight,
                where="BertForPreTraining",
            )
        if next_sentence_label is not None:
            nsp_loss = _next_sentence_loss(
                seq_relationship_logits, next_sentence_label, num_sequences_in_batch
            )
            if labels is not None and num_sequences_in_batch is None:
                nsp_loss = nsp_loss * batch_share(labels, num_items_in_batch)
            loss = nsp_loss if loss is None else loss + nsp_loss
        if loss is None or output_logits:
            prediction_logits = self.cls.predictions(hidden)
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
