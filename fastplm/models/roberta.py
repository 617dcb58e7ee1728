"""RoBERTa: drop-in for the classes of the same names in Transformers, shared by its relatives."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.activations import gelu
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.models.roberta import modeling_roberta

from fastplm._modes import values_are_known
from fastplm.models import _encoder, _heads

RobertaEmbeddings, RobertaLayer = _encoder.like_bert(modeling_roberta, "Roberta", __name__)


class Backbone(_encoder.EncoderModel):
    """Mixin of a backbone whose positions are those of RoBERTa, in the parent's padded batch: they
    start at ``padding_idx + 1`` and count the ids that are not padding, whatever the mask is."""

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
        first = self.embeddings.padding_idx + 1
        if input_ids is None:
            places = torch.arange(first, first + given.shape[1], device=given.device)
            return places.expand(given.shape[:2])
        count = getattr(self.embeddings, "create_position_ids_from_input_ids", None)
        if count is not None:
            return count(input_ids, first - 1)
        tokens = (input_ids != first - 1).int()
        return (tokens.cumsum(1).to(tokens) * tokens).long() + (first - 1)


class LMHead:
    """Mixin of the heads that predict tokens."""

    def _head(self: Any) -> _heads.Head:
        head = self.lm_head
        return (self._transform, head.decoder) if _heads.as_made(self, head) else (None, head)

    def _transform(self: Any, rows: Tensor) -> Tensor:
        return self.lm_head.layer_norm(gelu(self.lm_head.dense(rows)))


class RobertaModel(Backbone, transformers.RobertaModel):
    """``transformers.RobertaModel`` with fused attention, computing only tokens.

    Source: Liu et al. 2019 (arXiv 1907.11692).
    """


class RobertaForMaskedLM(LMHead, _heads.MaskedLM, transformers.RobertaForMaskedLM): ...


class RobertaForCausalLM(LMHead, _heads.CausalLM, transformers.RobertaForCausalLM): ...


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
