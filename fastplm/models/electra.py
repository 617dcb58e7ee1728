"""ELECTRA: drop-in heads; their joint pre-training is in ``electra_joint``."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor
from transformers.modeling_outputs import MaskedLMOutput
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from fastplm._checks import check_shape, check_tensor
from fastplm.models._base import FastplmModel, check_input_ids, tied_inputs
from fastplm.nn._rows import IGNORE_INDEX
from fastplm.nn.mlm_head import mlm_loss
from fastplm.nn.rtd_head import rtd_loss


class ElectraForMaskedLM(FastplmModel, transformers.ElectraForMaskedLM):
    """``transformers.ElectraForMaskedLM`` whose head and loss see the labelled tokens only.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the generator.
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
        masked_positions: Tensor | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """As the parent; ``labels``, ``masked_positions``, ``output_logits`` and
        ``num_items_in_batch`` are those of ``fastplm.models.BertForMaskedLM``."""
        check_input_ids("ElectraForMaskedLM", input_ids, self.config.vocab_size)
        decoder = self.generator_lm_head
        inputs, weight = tied_inputs(self, decoder, input_ids, inputs_embeds, labels)
        outputs = self.electra(
            **inputs,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            return_dict=True,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        loss = logits = None
        if labels is not None:
            loss = mlm_loss(
                hidden,
                labels,
                self.generator_predictions,
                self.generator_lm_head,
                masked_positions,
                normalizer=num_items_in_batch,
                decoder_weight=weight,
                where="ElectraForMaskedLM",
            )
        if labels is None or output_logits:
            logits = self.generator_lm_head(self.generator_predictions(hidden))
        return MaskedLMOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class ElectraForPreTraining(FastplmModel, transformers.ElectraForPreTraining):
    """``transformers.ElectraForPreTraining`` with the fused replaced-token loss.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the discriminator.
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
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> ElectraForPreTrainingOutput:
        """As the parent, with these differences.

        Args:
            labels: integer or bool [B, T], 1 = replaced, 0 = original, -100 = left out of the loss,
                as is everything that ``attention_mask`` hides. With labels, ``logits`` are None.
            output_logits: return the logits beside the loss after all.
            num_items_in_batch: what the sum of the losses is divided by: the number of tokens that
                count in all batches that gradients are accumulated over. Trainer counts the labels
                that are not -100, so padding must be labelled -100 there.

        Returns:
            ``ElectraForPreTrainingOutput``; the loss is fp32, and 0 if no token counts.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes, dtypes or (on the CPU) ids that do not
                fit.
        """
        check_input_ids("ElectraForPreTraining", input_ids, self.config.vocab_size)
        outputs = self.electra(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        features = self.features(outputs.last_hidden_state)
        loss = logits = None
        if labels is not None:
            check_tensor("ElectraForPreTraining", "labels", labels)
            counted = labels != IGNORE_INDEX
            if attention_mask is not None:
                check_shape(
                    "ElectraForPreTraining", "labels", labels, attention_mask.shape, "[B, T]"
                )
                counted = counted & attention_mask.bool()
            loss = rtd_loss(
                features,
                labels,
                self.discriminator_predictions.dense_prediction,
                counted,
                normalizer=num_items_in_batch,
                where="ElectraForPreTraining",
            )
        if labels is None or output_logits:
            logits = self.logits(features)
        return ElectraForPreTrainingOutput(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def features(self, hidden: Tensor) -> Tensor:
        """What the last linear layer of the head sees: [..., E] -> [..., E]."""
        head = self.discriminator_predictions
        return head.activation(head.dense(hidden))

    def logits(self, features: Tensor) -> Tensor:
        """The score of "replaced" for each token: [..., E] -> [...]."""
        return self.discriminator_predictions.dense_prediction(features).squeeze(-1)
