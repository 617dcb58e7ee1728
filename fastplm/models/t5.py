"""T5: drop-in for the classes of the same names in Transformers.

    encoder mask -> unpad once -> encoder on packed rows  ─┐ cross-attention between two packings
    decoder mask or labels -> unpad once -> decoder on packed rows -> head and loss on the labels

The parent adds a dense bias [1, H, Tq, Tk] to the scores of every layer, zeros in cross-attention.
Here the first layer's table goes from layer to layer in its place, and the attention looks up the
distance j - i in it. Distances are those of columns: what lies between the first and the last token
of a sequence is computed, and hidden from the others, where a mask has holes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.modeling_outputs import (
    Seq2SeqModelOutput,
    Seq2SeqQuestionAnsweringModelOutput,
    Seq2SeqSequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.models.t5 import modeling_t5
from transformers.utils.generic import can_return_tuple

from fastplm import ops
from fastplm.hf import NO_BIAS
from fastplm.models._base import FastplmModel, drop_in
from fastplm.models._heads import ScaledLoss, labelled_rows
from fastplm.models._ragged import RaggedBatch
from fastplm.models._seq2seq import (
    ConditionalGeneration,
    EncoderDecoder,
    Stack,
    Unpad,
    is_fused,
)
from fastplm.ops.rms_norm import OP as RMS_NORM


@drop_in
class T5LayerNorm(modeling_t5.T5LayerNorm):
    """The parent's six operations in one, on a CPU and where dtypes allow on CUDA."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, eps = self.weight, self.variance_epsilon
        if RMS_NORM.is_faster(hidden_states, weight):
            return ops.rms_norm(hidden_states, weight, eps=eps)
        if hidden_states.is_cuda and hidden_states.dtype is weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        return super().forward(hidden_states)


@drop_in
class T5Attention(modeling_t5.T5Attention):
    """Attention that hands on the table of the position bias [buckets, H], not the bias."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        cross_lengths: tuple[Tensor, int] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        crosses = key_value_states is not None
        if crosses and cross_lengths is not None:
            kwargs["cu_seq_lens_k"], kwargs["max_length_k"] = cross_lengths
        dense = position_bias is not None and position_bias.dim() == 4
        table: Tensor | None = None
        bias: Any = position_bias
        fused = not dense and past_key_values is None and is_fused(self, (mask,), kwargs)
        if fused:
            table, bias = position_bias, NO_BIAS
            if table is None and self.has_relative_attention_bias:
                buckets = torch.arange(
                    self.relative_attention_num_buckets, device=hidden_states.device
                )
                table = self.relative_attention_bias(buckets)
            if table is not None:
                bias = ops.T5RelativeBias(
                    table,
                    bidirectional=not self.is_decoder,
                    max_distance=self.relative_attention_max_distance,
                )
        output, dense_bias, weights = super().forward(
            hidden_states, mask, key_value_states, bias, past_key_values, **kwargs
        )
        return output, table if fused else dense_bias, weights


@drop_in
class T5Stack(Stack, modeling_t5.T5Stack):
    """An encoder or decoder: [B, T] in, [B, T, E] out, and only the tokens in between."""

    gapless = True

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        *,
        unpad: Unpad = None,
        decoder_unpad: Unpad = None,
        output_rows: Tensor | None = None,
        read_rows: Tensor | None = None,
        extra_rows: Tensor | None = None,
        encoder_rows: RaggedBatch | None = None,
        lookup: Callable[[Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with these arguments more.

        Args:
            unpad: None = leave padding out where that is possible; False = do not; an int = the
                number of rows to make room for, which fixes all shapes; a batch = these rows, and
                a last hidden state [1, N, E].
            decoder_unpad: takes its place in a decoder.
            output_rows, read_rows, extra_rows: as in ``T5Model``.
            encoder_rows: how ``encoder_hidden_states`` [1, N, E] were unpadded.
            lookup: takes the place of the word embeddings.
        """
        return self._run(
            input_ids,
            attention_mask,
            inputs_embeds,
            kwargs,
            decoder_unpad if self.is_decoder and decoder_unpad is not None else unpad,
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
class T5Model(EncoderDecoder, transformers.T5Model):
    """``transformers.T5Model`` with fused attention, on the tokens alone.

    Source: Raffel et al. 2020 (arXiv 1910.10683).
    """


@drop_in
class T5EncoderModel(FastplmModel, transformers.T5EncoderModel):
    """``transformers.T5EncoderModel`` with fused attention, on the tokens alone.

    ``unpad`` and ``extra_rows`` are those of its ``T5Stack``.
    """


@drop_in
class T5ForConditionalGeneration(
    ConditionalGeneration, EncoderDecoder, transformers.T5ForConditionalGeneration
):
    """``transformers.T5ForConditionalGeneration`` whose loss never makes all logits.

    Source: Raffel et al. 2020 (arXiv 1910.10683).
    """

    def _backbone(self, **inputs: Any) -> Seq2SeqModelOutput:
        return EncoderDecoder.forward(self, **inputs)

    def _scaled_rows(self, hidden: Tensor) -> Tensor:
        return hidden * self.model_dim**-0.5 if self.config.scale_decoder_outputs else hidden


@drop_in
class T5ForSequenceClassification(ScaledLoss, transformers.T5ForSequenceClassification):
    """``transformers.T5ForSequenceClassification``, whose decoder stops at the last </s>."""

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
    ) -> Seq2SeqSequenceClassifierOutput:
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
class T5ForTokenClassification(ScaledLoss, transformers.T5ForTokenClassification):
    """``transformers.T5ForTokenClassification`` on the tokens alone.

    Tokens with a label count, whatever the mask says.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        given = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and isinstance(given, Tensor):
            labelled = labelled_rows(type(self).__name__, labels, given.shape[:2])
            if attention_mask is not None:
                kwargs["extra_rows"] = labelled
        outputs = super().forward(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            labels=labels,
            return_dict=True,
            **kwargs,
        )
        return self._scaled(outputs, labels, num_items_in_batch)


@drop_in
class T5ForQuestionAnswering(FastplmModel, transformers.T5ForQuestionAnswering):
    """``transformers.T5ForQuestionAnswering`` with fused attention.

    The parent's softmax runs over all rows of the decoder, which are all computed; the encoder's
    padding is left out.
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
    ) -> Seq2SeqQuestionAnsweringModelOutput:
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
            **{**kwargs, "decoder_unpad": False},
        )
