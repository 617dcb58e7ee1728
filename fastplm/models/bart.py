"""BART: drop-in for the classes of the same names in Transformers.

Source: Lewis et al. 2019 (arXiv 1910.13461).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    ModelOutput,
    Seq2SeqModelOutput,
)
from transformers.models.bart import modeling_bart
from transformers.utils.output_capturing import capture_outputs

from fastplm.models._base import drop_in
from fastplm.models._heads import CausalLM
from fastplm.models._ragged import Rows
from fastplm.models._seq2seq import (
    ConditionalGeneration,
    DecoderQuestionAnswering,
    EncoderDecoder,
    LastEosClassification,
    Stack,
)


class _AddsPositions(Stack):
    """Mixin of encoder and decoder: adds position embeddings to packed rows."""

    embed_positions: Any
    layernorm_embedding: nn.Module
    layers: Any
    dropout: float
    layerdrop: float
    _output: type[ModelOutput] = BaseModelOutput

    @capture_outputs
    def _on_rows(self, embeds: Tensor, rows: Rows, **kwargs: Any) -> Any:
        assert rows.own is not None
        # Positional, because gradient checkpointing needs it.
        states = [kwargs.pop(name) for name in ("encoder_hidden_states",) if name in kwargs]
        positions = self.embed_positions(embeds, position_ids=rows.own.positions % rows.own.seqlen)
        hidden = self.layernorm_embedding(embeds + positions.to(embeds.device))
        hidden = nn.functional.dropout(hidden, p=self.dropout, training=self.training)
        mask = rows.own.key_mask_row()
        for layer in self.layers:
            if self.training and self.layerdrop > 0.0 and torch.rand([]) < self.layerdrop:
                continue
            hidden = layer(hidden, mask, *states, rows=rows, **kwargs)
        return self._output(last_hidden_state=hidden)


@drop_in
class BartEncoder(_AddsPositions, modeling_bart.BartEncoder):
    """The encoder, computing only tokens."""

    _takes_cache = False


@drop_in
class BartDecoder(_AddsPositions, modeling_bart.BartDecoder):
    """The decoder, computing only the rows that are read and those before them."""

    _output = BaseModelOutputWithPastAndCrossAttentions

    def _keeps_padding(self, *args: Any, **kwargs: Any) -> str | None:
        ours = all(type(layer.encoder_attn) is modeling_bart.BartAttention for layer in self.layers)
        return super()._keeps_padding(*args, **kwargs) if ours else "layers"


@drop_in
class BartModel(EncoderDecoder, transformers.BartModel):
    """``transformers.BartModel`` with fused attention, each side unpadded once."""

    def _default_decoder_ids(self, input_ids: Tensor | None) -> Tensor | None:
        if input_ids is None:
            transformers.BartModel.forward(self)  # which raises
        return modeling_bart.shift_tokens_right(
            input_ids, self.config.pad_token_id, self.config.decoder_start_token_id
        )


@drop_in
class BartForConditionalGeneration(
    ConditionalGeneration, transformers.BartForConditionalGeneration
):
    """``transformers.BartForConditionalGeneration``. Its loss computes no full logits.

    Source: Lewis et al. 2019 (arXiv 1910.13461).
    """

    _embedding_kind = modeling_bart.BartScaledWordEmbedding
    _caches_beside_loss = False

    def _backbone(self, **inputs: Any) -> Seq2SeqModelOutput:
        return self.model(**inputs)

    def _logits_bias(self) -> Tensor:
        return self.final_logits_bias[0]


@drop_in
class BartForSequenceClassification(
    LastEosClassification, transformers.BartForSequenceClassification
):
    """``transformers.BartForSequenceClassification``, whose decoder ends at the last <eos>."""


@drop_in
class BartForQuestionAnswering(DecoderQuestionAnswering, transformers.BartForQuestionAnswering):
    """``transformers.BartForQuestionAnswering``, whose encoder computes only tokens."""


@drop_in
class BartForCausalLM(CausalLM, transformers.BartForCausalLM):
    """``transformers.BartForCausalLM``, only the decoder. Its loss computes no full logits."""

    def _head(self) -> tuple[None, nn.Linear]:
        return None, self.lm_head

    def forward(
        self, *, labels: Tensor | None = None, shift_labels: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Like the parent, with the differences of ``BertLMHeadModel``.

        Args:
            labels: int64 [B, T], -100 = none. As in the parent, label t is predicted at t.
        """
        return super().forward(
            shift_labels=labels if shift_labels is None else shift_labels, **inputs
        )
