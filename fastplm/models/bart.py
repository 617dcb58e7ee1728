"""BART: drop-in for the classes of the same names in Transformers.

Source: Lewis et al. 2019 (arXiv 1910.13461).
"""

from __future__ import annotations

from collections.abc import Callable
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
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from fastplm.models._base import FastplmModel, drop_in
from fastplm.models._heads import CausalLM, ScaledLoss
from fastplm.models._ragged import RaggedBatch
from fastplm.models._seq2seq import ConditionalGeneration, EncoderDecoder, Stack, Unpad


@drop_in
class BartAttention(modeling_bart.BartAttention):
    """Attention whose keys may be of another packed batch than its queries."""

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        cross_lengths: tuple[Tensor, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if cross_lengths is not None and kwargs.get("key_value_states") is not None:
            kwargs["cu_seq_lens_k"], kwargs["max_length_k"] = cross_lengths
        return super().forward(hidden_states, *args, **kwargs)


class _AddsPositions(Stack):
    """Mixin of encoder and decoder: the parent adds positions inside, and they start at 0."""

    embed_positions: Any
    layernorm_embedding: nn.Module
    layers: Any
    dropout: float
    layerdrop: float
    _output: type[ModelOutput] = BaseModelOutput

    @capture_outputs
    def _on_rows(self, embeds: Tensor, rows: RaggedBatch, **kwargs: Any) -> Any:
        # The layers take them by position, for the sake of gradient checkpointing.
        states = [kwargs.pop(name) for name in ("encoder_hidden_states",) if name in kwargs]
        positions = self.embed_positions(embeds, position_ids=rows.positions % rows.seqlen)
        hidden = self.layernorm_embedding(embeds + positions.to(embeds.device))
        hidden = nn.functional.dropout(hidden, p=self.dropout, training=self.training)
        mask = rows.key_mask_row()
        for layer in self.layers:
            if self.training and self.layerdrop > 0.0 and torch.rand([]) < self.layerdrop:
                continue
            hidden = layer(hidden, mask, *states, **rows.attention_arguments(), **kwargs)
        return self._output(last_hidden_state=hidden)


@drop_in
class BartEncoder(_AddsPositions, modeling_bart.BartEncoder):
    """The encoder, on the tokens alone."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        unpad: Unpad = None,
        lookup: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutput:
        """As the parent, with these arguments more.

        Args:
            unpad: as in ``BartModel``; a batch = these rows, and a last hidden state [1, N, E].
            lookup: takes the place of the word embeddings.
        """
        return self._run(input_ids, attention_mask, inputs_embeds, kwargs, unpad, lookup)


@drop_in
class BartDecoder(_AddsPositions, modeling_bart.BartDecoder):
    """The decoder, on the rows that anybody reads and those that they depend on."""

    _output = BaseModelOutputWithPastAndCrossAttentions

    def _packs(self, *args: Any, **kwargs: Any) -> bool:
        ours = all(isinstance(layer.encoder_attn, BartAttention) for layer in self.layers)
        return ours and super()._packs(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        unpad: Unpad = None,
        output_rows: Tensor | None = None,
        read_rows: Tensor | None = None,
        extra_rows: Tensor | None = None,
        encoder_rows: RaggedBatch | None = None,
        lookup: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        """As the parent, with these arguments more.

        Args:
            unpad: ``decoder_unpad`` of ``BartModel``.
            output_rows, read_rows, extra_rows: as in ``BartModel``.
            encoder_rows: how ``encoder_hidden_states`` [1, N, E] were unpadded.
            lookup: takes the place of the word embeddings.
        """
        return self._run(
            input_ids,
            attention_mask,
            inputs_embeds,
            {name: value for name, value in kwargs.items() if value is not None},
            unpad,
            lookup,
            caching={"past_key_values": past_key_values, "use_cache": use_cache},
            states=encoder_hidden_states,
            states_mask=encoder_attention_mask,
            encoder_rows=encoder_rows,
            output_rows=output_rows,
            read_rows=read_rows,
            extra_rows=extra_rows,
        )


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
    """``transformers.BartForConditionalGeneration`` whose loss never makes all logits.

    Source: Lewis et al. 2019 (arXiv 1910.13461).
    """

    _embedding_kind = modeling_bart.BartScaledWordEmbedding
    _caches_beside_loss = False

    def _backbone(self, **inputs: Any) -> Seq2SeqModelOutput:
        return self.model(**inputs)

    def _logits_bias(self) -> Tensor:
        return self.final_logits_bias[0]


@drop_in
class BartForSequenceClassification(ScaledLoss, transformers.BartForSequenceClassification):
    """``transformers.BartForSequenceClassification``, whose decoder ends at the last <eos>."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        given = decoder_input_ids if decoder_inputs_embeds is None else decoder_inputs_embeds
        if input_ids is not None and (given is None or given.shape[:2] == input_ids.shape):
            kwargs["read_rows"] = input_ids == self.config.eos_token_id
        outputs = super().forward(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        return self._scaled(outputs, labels, num_items_in_batch)


@drop_in
class BartForQuestionAnswering(FastplmModel, transformers.BartForQuestionAnswering):
    """``transformers.BartForQuestionAnswering`` with the encoder on its tokens alone.

    The parent's softmax runs over all rows of the decoder, so none is left out.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        kwargs["decoder_unpad"] = False
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            start_positions=start_positions,
            end_positions=end_positions,
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )


@drop_in
class BartForCausalLM(CausalLM, transformers.BartForCausalLM):
    """``transformers.BartForCausalLM``, the decoder alone, whose loss never makes all logits."""

    def _head(self) -> tuple[None, nn.Linear]:
        return None, self.lm_head

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with the differences of ``BertLMHeadModel``.

        Args:
            labels: int64 [B, T], -100 = none. As in the parent, that at t is predicted at t.
        """
        return super().forward(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            shift_labels=labels if shift_labels is None else shift_labels,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_logits=output_logits,
            num_items_in_batch=num_items_in_batch,
            return_dict=True,
            **kwargs,
        )
