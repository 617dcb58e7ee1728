"""ELECTRA: drop-in for the classes of the same names in Transformers.

Joint pre-training of a generator and a discriminator is in ``electra_joint``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.electra import modeling_electra
from transformers.models.electra.modeling_electra import ElectraForPreTrainingOutput
from transformers.utils.generic import can_return_tuple

from fastplm._checks import check_shape, check_tensor
from fastplm.hf import of_batch
from fastplm.models import _encoder, _heads
from fastplm.models._base import FastplmModel, check_parts, unpad_of
from fastplm.models._ragged import backbone_unpad, read_by_callers
from fastplm.nn._rows import IGNORE_INDEX, batch_share, is_plain
from fastplm.nn.rtd_head import rtd_loss

ElectraEmbeddings, ElectraLayer = _encoder.like_bert(modeling_electra, "Electra", __name__)


class ElectraModel(_encoder.EncoderModel, transformers.ElectraModel):
    _output = BaseModelOutputWithPastAndCrossAttentions

    def _embedded(self, **inputs: Any) -> Tensor:
        embedded = super()._embedded(**inputs)
        return (
            self.embeddings_project(embedded) if hasattr(self, "embeddings_project") else embedded
        )


class _LanguageModelHead:
    """Shared by the two heads that predict tokens."""

    def _head(self: Any) -> _heads.Head:
        return self.generator_predictions, self.generator_lm_head


class ElectraForCausalLM(_LanguageModelHead, _heads.CausalLM, transformers.ElectraForCausalLM): ...


class ElectraForMaskedLM(_LanguageModelHead, _heads.MaskedLM, transformers.ElectraForMaskedLM):
    """``transformers.ElectraForMaskedLM`` whose head and loss compute only labelled tokens.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the generator.
    """


class ReplacedTokenDetection(FastplmModel):
    """Mixin of a discriminator: a backbone, and ELECTRA's head with the fused replaced-token loss,
    computing only tokens from the embeddings to the loss."""

    _takes_rows = True
    discriminator_predictions: Any

    @can_return_tuple
    def forward(
        self,
        *,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_logits: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        unpad: bool | int | None = None,
        **inputs: Any,
    ) -> ElectraForPreTrainingOutput:
        """Like the parent, with these differences.

        Args:
            labels: integer or bool [B, T], 1 = replaced, 0 = original, -100 = not in the loss, like
                all masked tokens (a 4-D mask names none).
            output_logits: as in ``ElectraForMaskedLM``.
            num_items_in_batch: the number of labels other than -100 of all batches over which
                gradients are accumulated: the mean loss is multiplied by this batch's share of
                them. Where padding has labels (0, by some collators), they count in the share only.
            unpad: None = leave padding out where possible; False = keep it; an int = a capacity,
                the number of packed rows, which fixes all shapes.

        Returns:
            ``ElectraForPreTrainingOutput``; the loss is fp32, and 0 without a token in it. The
            logits of padding that was left out are 0.

        Raises:
            ArgumentValueError, ArgumentTypeError: wrong shapes, dtypes or (on the CPU) ids.
        """
        check_parts(self, self.base_model)
        (ragged, full), shape = (None, False), _heads.shape_of(inputs)
        if attention_mask is not None and attention_mask.dim() == 2:
            if shape is not None:
                attention_mask = of_batch(attention_mask, shape[0])
            read, unpad = None, unpad_of(self.base_model, unpad, inputs)
            if unpad is None and _heads.wants_logits(self, output_logits, labels):
                given = _heads.given_of(inputs)
                read = read_by_callers(self.config, given, attention_mask)
            ragged, full = self.base_model._unpadded(attention_mask, read, unpad)
        outputs = self.base_model(
            attention_mask=attention_mask,
            return_dict=True,
            unpad=backbone_unpad(ragged, full, attention_mask),
            **inputs,
        )
        features = self.features(outputs.last_hidden_state)
        loss = logits = None
        if _heads.wants_logits(self, output_logits, labels):
            logits = self.logits(features)
            if ragged is not None and not ragged.of_caller:
                logits = ragged.pad(logits[..., None]).squeeze(-1)
        if labels is not None:
            where = type(self).__name__
            check_tensor(where, "labels", labels)
            assert shape is not None, "the backbone requires it"
            check_shape(where, "labels", labels, shape, "[B, T]")
            in_loss = labels != IGNORE_INDEX
            if attention_mask is not None and attention_mask.dim() == 2:
                check_shape(where, "labels", labels, attention_mask.shape, "[B, T]")
                in_loss = in_loss & attention_mask.bool()
            share = batch_share(labels, num_items_in_batch)
            prediction, read_whole = self.prediction(), False
            if logits is not None and logits.requires_grad:  # the loss is a function of them
                features, prediction = logits[..., None], nn.Identity()
                read_whole = ragged is None or not ragged.of_caller
            if ragged is not None and not read_whole:
                labels = ragged.pack(labels)
                in_loss = ragged.pack(in_loss) & (ragged.positions >= 0)
            loss = rtd_loss(features, labels, prediction, in_loss, where=where) * share
        return ElectraForPreTrainingOutput(loss=loss, logits=logits, **_heads.recorded(outputs))

    def _splits_head(self) -> bool:
        """Whether the head is as it was made; if the user has changed it, it is called."""
        kind = modeling_electra.ElectraDiscriminatorPredictions
        return is_plain(self.discriminator_predictions, kind)

    def features(self, hidden: Tensor) -> Tensor:
        """The input of ``prediction()``: [..., E] -> [..., E]."""
        head = self.discriminator_predictions
        return head.activation(head.dense(hidden)) if self._splits_head() else hidden

    def prediction(self) -> Callable[[Tensor], Tensor]:
        """The head's last linear layer, or all of a changed head: [..., E] -> [..., 1]."""
        head = self.discriminator_predictions
        if self._splits_head():
            return head.dense_prediction
        return lambda rows: head(rows).unsqueeze(-1)

    def logits(self, features: Tensor) -> Tensor:
        """The logit of "replaced" of each token: [..., E] -> [...]."""
        return self.prediction()(features).squeeze(-1)


class ElectraForPreTraining(ReplacedTokenDetection, transformers.ElectraForPreTraining):
    """``transformers.ElectraForPreTraining`` with the fused replaced-token loss, computing only
    tokens from the embeddings to the loss.

    Source: Clark et al. 2020 (arXiv 2003.10555), §2, the discriminator.
    """


class ElectraForSequenceClassification(
    _heads.SequenceClassification, transformers.ElectraForSequenceClassification
): ...


class ElectraForTokenClassification(
    _heads.TokenClassification, transformers.ElectraForTokenClassification
): ...


class ElectraForQuestionAnswering(
    _heads.QuestionAnswering, transformers.ElectraForQuestionAnswering
): ...


class ElectraForMultipleChoice(_heads.MultipleChoice, transformers.ElectraForMultipleChoice):
    """``transformers.ElectraForMultipleChoice``, whose last layer computes only [CLS].

    With a ``config.summary_type`` other than "first", the parent also reads other rows, including
    padding, so all rows are computed.
    """

    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        first = self.sequence_summary.summary_type == "first"
        _heads.set_output_rows(self, inputs, "first" if first else None)
        if not first:
            inputs["unpad"] = False
