"""ELECTRA: drop-in for the classes of the same names in Transformers.

Joint pre-training of a generator and a discriminator is in ``electra_joint``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.electra import modeling_electra
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from fastplm._checks import check_shape, check_tensor
from fastplm.models._base import FastplmModel, drop_in
from fastplm.models._encoder import EncoderAttention, EncoderModel, EncoderSelfAttention
from fastplm.models._heads import (
    CausalLM,
    MaskedLM,
    MultipleChoice,
    QuestionAnswering,
    SequenceClassification,
    TokenClassification,
    shape_of,
)
from fastplm.models._ragged import unpadded
from fastplm.nn._rows import IGNORE_INDEX
from fastplm.nn.rtd_head import rtd_loss


@drop_in
class ElectraSelfAttention(EncoderSelfAttention, modeling_electra.ElectraSelfAttention):
    """Self-attention whose queries may be some of the rows alone."""


@drop_in
class ElectraAttention(EncoderAttention, modeling_electra.ElectraAttention):
    """The attention block, in the last layer for the rows that are wanted."""


@drop_in
class ElectraModel(EncoderModel, transformers.ElectraModel):
    """``transformers.ElectraModel`` with fused attention, on the tokens alone."""


class _LanguageModelHead:
    """What the two heads have in common that predict tokens."""

    generator_predictions: Any
    generator_lm_head: Any

    def _head(self) -> tuple[Callable[[Tensor], Tensor], nn.Linear]:
        return self.generator_predictions, self.generator_lm_head


@drop_in
class ElectraForMaskedLM(_LanguageModelHead, MaskedLM, transformers.ElectraForMaskedLM):
    """``transformers.ElectraForMaskedLM`` whose head and loss see the labelled tokens only.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the generator.
    """


@drop_in
class ElectraForCausalLM(_LanguageModelHead, CausalLM, transformers.ElectraForCausalLM):
    """``transformers.ElectraForCausalLM``, a decoder, whose loss never makes all logits."""


@drop_in
class ElectraForPreTraining(FastplmModel, transformers.ElectraForPreTraining):
    """``transformers.ElectraForPreTraining`` with the fused replaced-token loss, on the tokens
    alone from the embeddings to the loss.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the discriminator.
    """

    @can_return_tuple
    def forward(
        self,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        unpad: bool | int | None = None,
        **inputs: Any,
    ) -> ElectraForPreTrainingOutput:
        """As the parent, with these differences.

        Args:
            labels: integer or bool [B, T], 1 = replaced, 0 = original, -100 = left out of the loss,
                as is everything that ``attention_mask`` hides. With labels, ``logits`` are None.
            output_logits: return the logits beside the loss after all.
            num_items_in_batch: what the sum of the losses is divided by: the number of tokens that
                count in all batches that gradients are accumulated over. Trainer counts the labels
                that are not -100, so padding must be labelled -100 there.
            unpad: None = leave padding out where that is possible; False = do not; an int = the
                number of rows to make room for, which fixes all shapes.

        Returns:
            ``ElectraForPreTrainingOutput``; the loss is fp32, and 0 if no token counts. The logits
            of padding that was left out are 0.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes, dtypes or (on the CPU) ids that do not
                fit.
        """
        ragged = None
        if attention_mask is not None and attention_mask.dim() == 2:
            ragged = unpadded(attention_mask, None, unpad)
        outputs = self.electra(
            attention_mask=attention_mask,
            return_dict=True,
            unpad=False if ragged is None else ragged,
            **inputs,
        )
        features = self.features(outputs.last_hidden_state)
        loss = logits = None
        if labels is not None:
            where = "ElectraForPreTraining"
            check_tensor(where, "labels", labels)
            shape = shape_of(inputs)
            assert shape is not None, "the backbone asks for it"
            check_shape(where, "labels", labels, shape, "[B, T]")
            counted = labels != IGNORE_INDEX
            if attention_mask is not None:
                check_shape(where, "labels", labels, attention_mask.shape, "[B, T]")
                counted = counted & attention_mask.bool()
            if ragged is not None:
                labels = ragged.pack(labels)
                counted = ragged.pack(counted) & (ragged.positions >= 0)
            loss = rtd_loss(
                features,
                labels,
                self.discriminator_predictions.dense_prediction,
                counted,
                normalizer=num_items_in_batch,
                where=where,
            )
        if labels is None or output_logits:
            logits = self.logits(features)
            if ragged is not None:
                logits = ragged.pad(logits[..., None]).squeeze(-1)
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


@drop_in
class ElectraForSequenceClassification(
    SequenceClassification, transformers.ElectraForSequenceClassification
):
    """``transformers.ElectraForSequenceClassification``, whose last layer is for [CLS] alone."""


@drop_in
class ElectraForMultipleChoice(MultipleChoice, transformers.ElectraForMultipleChoice):
    """``transformers.ElectraForMultipleChoice``, whose last layer is for [CLS] alone.

    With a ``summary_type`` other than "first" in the configuration, the parent reads other rows,
    padding among them, and so all rows are computed.
    """

    def forward(self, **inputs: Any) -> Any:
        if self.sequence_summary.summary_type != "first":
            inputs.update(output_rows=None, unpad=False)
        return super().forward(**inputs)


@drop_in
class ElectraForTokenClassification(
    TokenClassification, transformers.ElectraForTokenClassification
):
    """``transformers.ElectraForTokenClassification`` on the tokens alone."""


@drop_in
class ElectraForQuestionAnswering(QuestionAnswering, transformers.ElectraForQuestionAnswering):
    """``transformers.ElectraForQuestionAnswering`` with fused attention."""
