"""RoBERTa: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.roberta import modeling_roberta

from fastplm._modes import values_are_known
from fastplm.models import _encoder, _heads
from fastplm.models._base import joined
from fastplm.nn._rows import is_plain

RobertaEmbeddings = joined(_encoder.EncoderEmbeddings, modeling_roberta.RobertaEmbeddings)
RobertaLayer = joined(
    _encoder.EncoderLayer,
    modeling_roberta.RobertaLayer,
    _around=_encoder.wrapper_classes(modeling_roberta, "Roberta"),
)


class RobertaModel(_encoder.EncoderModel, transformers.RobertaModel):
    """``transformers.RobertaModel`` with fused attention, computing only tokens.

    Position ids are those of the parent's padded batch: they start at ``pad_token_id + 1`` and
    count the ids that are not ``pad_token_id``, whatever the mask is.

    Source: Liu et al. 2019 (arXiv 1907.11692).
    """

    _output = BaseModelOutputWithPoolingAndCrossAttentions

    def _positions_taken(self, input_ids: Tensor | None, given: Tensor) -> int:
        """Padding needs no position, so a long input is counted, if its values are known."""
        if input_ids is None:
            return given.shape[1]
        table = self.embeddings
        fits = given.shape[1] + table.padding_idx < table.position_embeddings.num_embeddings
        if fits or input_ids.numel() == 0 or not values_are_known(input_ids):
            return 0
        return int((input_ids != table.padding_idx).sum(1).max())

    def _positions(self, input_ids: Tensor | None, given: Tensor) -> Tensor:
        table = self.embeddings
        if input_ids is None:
            return table.create_position_ids_from_inputs_embeds(given, table.padding_idx)
        return table.create_position_ids_from_input_ids(input_ids, table.padding_idx)


class _LanguageModelHead:
    """Shared by the two heads that predict tokens."""

    def _head(self: Any) -> _heads.Head:
        if not is_plain(self.lm_head, modeling_roberta.RobertaLMHead):
            return None, self.lm_head
        return self._transform, self.lm_head.decoder

    def _transform(self: Any, rows: Tensor) -> Tensor:
        return self.lm_head.layer_norm(nn.functional.gelu(self.lm_head.dense(rows)))


class RobertaForMaskedLM(_LanguageModelHead, _heads.MaskedLM, transformers.RobertaForMaskedLM): ...


class RobertaForCausalLM(_LanguageModelHead, _heads.CausalLM, transformers.RobertaForCausalLM): ...


class RobertaForSequenceClassification(
    _heads.SequenceClassification, transformers.RobertaForSequenceClassification
): ...


class RobertaForMultipleChoice(_heads.MultipleChoice, transformers.RobertaForMultipleChoice): ...


class RobertaForTokenClassification(
    _heads.TokenClassification, transformers.RobertaForTokenClassification
): ...


class RobertaForQuestionAnswering(
    _heads.QuestionAnswering, transformers.RobertaForQuestionAnswering
): ...
