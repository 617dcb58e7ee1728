"""T5: drop-in for the classes of the same names in Transformers.

    encoder mask -> unpad once -> encoder on packed rows  ─┐ cross-attention between two packings
    decoder mask or labels -> unpad once -> decoder on packed rows -> head and loss on the labels

The parent adds a dense bias [1, H, Tq, Tk] to the scores of every layer, zeros in cross-attention.
Here the layers pass on the table of the first layer instead, and attention looks up the distance
j - i in it. Packing must not change distances: if a mask has holes, all rows between the first and
the last token of a sequence are computed, and the rows in the holes are masked as keys.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.models.t5 import modeling_t5

from fastplm import ops
from fastplm.hf import NAME, NO_BIAS, says_only_keys
from fastplm.models._base import FastplmModel, check_parts, drop_in, wants_output
from fastplm.models._decoder_call import t5_layer_call
from fastplm.models._heads import TokenClassification
from fastplm.models._ragged import OnRows, Unpad
from fastplm.models._seq2seq import (
    ConditionalGeneration,
    DecoderQuestionAnswering,
    EncoderDecoder,
    LastEosClassification,
    Stack,
)
from fastplm.ops.rms_norm import OP as RMS_NORM


@drop_in
class T5LayerNorm(modeling_t5.T5LayerNorm):
    """One op instead of the parent's six, on a CPU, and on CUDA if the dtypes are equal."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight, eps = self.weight, self.variance_epsilon
        out = RMS_NORM.layer(hidden_states, weight, eps)
        if out is not None:
            return out
        if hidden_states.is_cuda and hidden_states.dtype is weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        return super().forward(hidden_states)


@drop_in
class T5DenseActDense(modeling_t5.T5DenseActDense):
    """Without the parent's copy in the dtype of ``wo`` under autocast, which casts it back."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_autocast_enabled(hidden_states.device.type):
            return self.wo(self.dropout(self.act(self.wi(hidden_states))))
        return super().forward(hidden_states)


@drop_in
class T5DenseGatedActDense(modeling_t5.T5DenseGatedActDense):
    """The same of a gated layer."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.is_autocast_enabled(hidden_states.device.type):
            gate = self.act(self.wi_0(hidden_states))
            return self.wo(self.dropout(gate * self.wi_1(hidden_states)))
        return super().forward(hidden_states)


@drop_in
class T5Attention(modeling_t5.T5Attention):
    """Attention that passes on the table of the position bias [buckets, H] instead of the bias."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dense = position_bias is not None and position_bias.dim() == 4
        table: Tensor | None = None
        bias: Any = position_bias
        fused = (
            not dense
            and past_key_values is None
            and says_only_keys(mask)
            and self.config._attn_implementation == NAME
            and not wants_output(self, "output_attentions", kwargs)
        )
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
class T5Block(OnRows, modeling_t5.T5Block):
    """A layer that tells its dropout which rows it computes.

    On a CPU, one call of csrc/ computes the next token of a sequence (``_decoder_call``).
    """

    def forward(
        self,
        hidden_states: Any,
        attention_mask: Any = None,
        position_bias: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        encoder_decoder_position_bias: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = attention_mask, position_bias
        of_states = encoder_attention_mask
        if past_key_values is not None and encoder_hidden_states is not None:
            called = t5_layer_call(self, hidden_states, past_key_values, *given, of_states, kwargs)
            if called is not None:
                return *called, encoder_decoder_position_bias
        return super().forward(
            *(hidden_states, *given, encoder_hidden_states, of_states),
            *(encoder_decoder_position_bias, past_key_values),
            **kwargs,
        )


class T5Stack(Stack, modeling_t5.T5Stack):
    """An encoder or decoder: [B, T] in, [B, T, E] out; only tokens are computed."""

    contiguous = True

    def _layers(self) -> Any:
        return self.block

    def _layer_numbers(self) -> list[Any]:
        return [block.layer[0].SelfAttention.layer_idx for block in self.block]

    def forward(self, *, decoder_unpad: Unpad = None, **inputs: Any) -> Any:
        """Like ``Stack``, with one additional argument.

        Args:
            decoder_unpad: replaces ``unpad`` in a decoder.
        """
        if self.is_decoder and decoder_unpad is not None:
            inputs["unpad"] = decoder_unpad
        if inputs.get("past_key_values") is None:  # else all have the dense bias of the parent
            layers = (layer for block in self.block for layer in getattr(block, "layer", ()))
            inner = (module for layer in layers for module in layer.children())
            check_parts(self, *(m for m in inner if isinstance(m, modeling_t5.T5Attention)))
        return super().forward(**inputs)


class T5Model(EncoderDecoder, transformers.T5Model): ...


class T5EncoderModel(FastplmModel, transformers.T5EncoderModel):
    """``transformers.T5EncoderModel`` with fused attention, computing only tokens.

    ``unpad`` and ``extra_rows`` are those of its ``T5Stack``.
    """


class T5ForConditionalGeneration(
    ConditionalGeneration, EncoderDecoder, transformers.T5ForConditionalGeneration
):
    """``transformers.T5ForConditionalGeneration``. Its loss computes no full logits.

    Source: Raffel et al. 2020 (arXiv 1910.10683).
    """

    def _backbone(self, **inputs: Any) -> Seq2SeqModelOutput:
        return EncoderDecoder.forward(self, **inputs)

    def _scaled_rows(self, hidden: Tensor) -> Tensor:
        return hidden * self.model_dim**-0.5 if self.config.scale_decoder_outputs else hidden


class T5ForSequenceClassification(
    LastEosClassification, transformers.T5ForSequenceClassification
): ...


class T5ForTokenClassification(TokenClassification, transformers.T5ForTokenClassification): ...


class T5ForQuestionAnswering(DecoderQuestionAnswering, transformers.T5ForQuestionAnswering): ...
