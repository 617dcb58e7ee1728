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
)
from transformers.models.bart import modeling_bart
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from fastplm import ops
from fastplm.models._base import FastplmModel, asked_for, check_input_ids, drop_in
from fastplm.models._encoder import cross_inputs
from fastplm.models._heads import CausalLM, ScaledLoss
from fastplm.models._ragged import RaggedBatch, flags, take
from fastplm.models._seq2seq import (
    ConditionalGeneration,
    CrossAttention,
    Seq2SeqModel,
    Unpad,
    can_pack,
    decoder_rows,
    padded,
    unpadded,
)


@drop_in
class BartAttention(CrossAttention, modeling_bart.BartAttention):
    """Attention, of packed queries and packed keys of another batch too."""


class _Stack(FastplmModel):
    """Mixin of encoder and decoder: the parent adds positions inside, and they start at 0."""

    config: Any
    embed_tokens: nn.Module
    embed_positions: Any
    layernorm_embedding: nn.Module
    layers: nn.ModuleList
    dropout: float
    layerdrop: float
    training: bool

    @capture_outputs
    def _packed(
        self, embeds: Tensor, rows: RaggedBatch, *states: Tensor, **kwargs: Any
    ) -> BaseModelOutput:
        """The parent's forward on packed rows [1, N, E]; ``states`` are the encoder's, if any."""
        positions = self.embed_positions(embeds, position_ids=rows.positions % rows.seqlen)
        hidden = self.layernorm_embedding(embeds + positions.to(embeds.device))
        hidden = nn.functional.dropout(hidden, p=self.dropout, training=self.training)
        mask = rows.key_mask_row()
        for layer in self.layers:
            if self.training and self.layerdrop > 0.0 and torch.rand([]) < self.layerdrop:
                continue
            hidden = layer(hidden, mask, *states, **rows.attention_arguments(), **kwargs)
        return BaseModelOutput(last_hidden_state=hidden)

    def _embeds(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        rows: RaggedBatch | None,
        lookup: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        """[B, T, E], or [1, N, E] of the rows that are computed."""
        if inputs_embeds is not None:
            return inputs_embeds if rows is None else rows.pack_rows(inputs_embeds)
        assert input_ids is not None
        return (lookup or self.embed_tokens)(input_ids if rows is None else rows.pack(input_ids))


@drop_in
class BartEncoder(_Stack, modeling_bart.BartEncoder):
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
            unpad: as in ``BartModel``; a batch = these rows, and hidden states [1, N, E].
            lookup: takes the place of the word embeddings.
        """
        if (input_ids is None) == (inputs_embeds is None):
            return super().forward(input_ids, inputs_embeds=inputs_embeds)
        check_input_ids(type(self).__name__, input_ids, self.config.vocab_size)
        rows = None
        if can_pack(self, (attention_mask,), kwargs):
            rows = unpadded(attention_mask, None, unpad)
        embeds = self._embeds(input_ids, inputs_embeds, rows, lookup)
        kwargs["return_dict"] = True
        if rows is None:
            return super().forward(attention_mask=attention_mask, inputs_embeds=embeds, **kwargs)
        outputs = self._packed(embeds, rows, **kwargs)
        if rows is not unpad:
            outputs["last_hidden_state"] = rows.pad(outputs.last_hidden_state)
            if outputs.hidden_states is not None:
                outputs["hidden_states"] = padded(outputs.hidden_states, rows)
        return outputs


@drop_in
class BartDecoder(_Stack, modeling_bart.BartDecoder):
    """The decoder, on the rows that anybody reads and those that they depend on."""

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
        if (input_ids is None) == (inputs_embeds is None):
            return super().forward(input_ids, inputs_embeds=inputs_embeds)
        check_input_ids(type(self).__name__, input_ids, self.config.vocab_size)
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        batch, seqlen = given.shape[:2]
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        if output_rows is not None:
            read_rows = flags(output_rows, batch * seqlen).view(batch, seqlen)
        if use_cache is None:
            use_cache = self.config.use_cache

        # --- which rows are computed ---
        rows = None
        masks = (attention_mask, encoder_attention_mask)
        crosses = encoder_hidden_states is None or all(
            isinstance(layer.encoder_attn, CrossAttention) for layer in self.layers
        )
        cached = past_key_values is not None or use_cache
        if crosses and not cached and can_pack(self, masks, kwargs):
            if asked_for(self, "output_hidden_states", kwargs) and read_rows is not None:
                extra_rows = read_rows if extra_rows is None else extra_rows | read_rows
                read_rows = None
            rows = decoder_rows(attention_mask, read_rows, extra_rows, unpad)
            if encoder_rows is None and encoder_hidden_states is not None:
                encoder_rows = unpadded(encoder_attention_mask, None, None)
                if encoder_rows is not None:
                    encoder_hidden_states = encoder_rows.pack_rows(encoder_hidden_states)
            if rows is None and encoder_rows is not None:
                rows = RaggedBatch.whole(batch, seqlen, given.device, attention_mask)
        states: tuple[Tensor, ...] = ()
        if encoder_hidden_states is not None:
            kwargs.update(
                cross_inputs(encoder_hidden_states, encoder_attention_mask, encoder_rows, rows)
            )

        # --- those ---
        embeds = self._embeds(input_ids, inputs_embeds, rows, lookup)
        kwargs["return_dict"] = True
        if rows is None:
            outputs = super().forward(
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                inputs_embeds=embeds,
                use_cache=use_cache,
                **kwargs,
            )
        else:
            if encoder_hidden_states is not None:
                states = (kwargs.pop("encoder_hidden_states"),)
            packed = self._packed(embeds, rows, *states, **kwargs)
            outputs = BaseModelOutputWithPastAndCrossAttentions(
                last_hidden_state=packed.last_hidden_state,
                hidden_states=padded(packed.hidden_states, rows),
            )

        # --- back ---
        hidden = outputs.last_hidden_state
        if output_rows is not None:
            slots = output_rows
            if rows is not None:
                slots = take(rows.slots(), output_rows).masked_fill(output_rows < 0, -1)
            outputs["last_hidden_state"] = ops.gather_rows(hidden.flatten(0, 1), slots)[:, None]
        elif rows is not None:
            outputs["last_hidden_state"] = rows.pad(hidden)
        return outputs


@drop_in
class BartModel(Seq2SeqModel, transformers.BartModel):
    """``transformers.BartModel`` with fused attention, on the tokens of both sides alone."""


@drop_in
class BartForConditionalGeneration(
    ConditionalGeneration, transformers.BartForConditionalGeneration
):
    """``transformers.BartForConditionalGeneration`` whose loss never makes all logits.

    Source: Lewis et al. 2019 (arXiv 1910.13461).
    """

    def _backbone(self) -> Callable[..., Any]:
        return self.model

    def _embedding_class(self) -> type[nn.Embedding]:
        return modeling_bart.BartScaledWordEmbedding

    def _head_bias(self) -> Tensor:
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
            shift_labels=labels,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_logits=output_logits,
            num_items_in_batch=num_items_in_batch,
            return_dict=True,
            **kwargs,
        )
