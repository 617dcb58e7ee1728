"""RoBERTa: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.roberta import modeling_roberta

from fastplm._checks import values_are_known
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
    TokenClassification,
)
from fastplm.nn._rows import is_plain


@drop_in
class RobertaSelfAttention(EncoderSelfAttention, modeling_roberta.RobertaSelfAttention):
    """Self-attention whose queries may be only some of the rows."""


@drop_in
class RobertaAttention(EncoderAttention, modeling_roberta.RobertaAttention):
    """The attention block, which in the last layer may compute only some rows."""


@drop_in
class RobertaSelfOutput(EncoderOutput, modeling_roberta.RobertaSelfOutput):
    """The end of the attention block."""


@drop_in
class RobertaIntermediate(EncoderIntermediate, modeling_roberta.RobertaIntermediate):
    """The first half of the feed-forward."""


@drop_in
class RobertaOutput(EncoderOutput, modeling_roberta.RobertaOutput):
    """The second half of the feed-forward."""


@drop_in
class RobertaLayer(EncoderLayer, modeling_roberta.RobertaLayer):
    """The layer, which does not inspect its feed-forward in every call."""


@drop_in
class RobertaModel(EncoderModel, transformers.RobertaModel):
    """``transformers.RobertaModel`` with fused attention, computing only tokens.

    Position ids are those of the parent's padded batch: they start at ``pad_token_id + 1`` and
    count the ids that are not ``pad_token_id``, whatever the mask is.
    """

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

    lm_head: Any

    def _head(self) -> Head:
        if not is_plain(self.lm_head, modeling_roberta.RobertaLMHead):
            return None, self.lm_head
        return self._transform, self.lm_head.decoder

    def _transform(self, rows: Tensor) -> Tensor:
        return self.lm_head.layer_norm(nn.functional.gelu(self.lm_head.dense(rows)))


@drop_in
class RobertaForMaskedLM(_LanguageModelHead, MaskedLM, transformers.RobertaForMaskedLM):
    """``transformers.RobertaForMaskedLM`` whose head and loss compute only labelled tokens.

    Source: Liu et al. 2019 (arXiv 1907.11692).
    """


@drop_in
class RobertaForCausalLM(_LanguageModelHead, CausalLM, transformers.RobertaForCausalLM):
    """``transformers.RobertaForCausalLM``, a decoder. Its loss computes no full logits."""


@drop_in
class RobertaForSequenceClassification(
    SequenceClassification, transformers.RobertaForSequenceClassification
):
    """``transformers.RobertaForSequenceClassification``, whose last layer computes only <s>."""


@drop_in
class RobertaForMultipleChoice(MultipleChoice, transformers.RobertaForMultipleChoice):
    """``transformers.RobertaForMultipleChoice``, whose last layer computes only <s>."""


@drop_in
class RobertaForTokenClassification(
    TokenClassification, transformers.RobertaForTokenClassification
):
    """``transformers.RobertaForTokenClassification``, computing only tokens."""


@drop_in
class RobertaForQuestionAnswering(QuestionAnswering, transformers.RobertaForQuestionAnswering):
    """``transformers.RobertaForQuestionAnswering`` with fused attention."""
