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
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import Seq2SeqModelOutput
from transformers.models.t5 import modeling_t5

from fastplm import ops
from fastplm.hf import NAME, NO_BIAS, says_only_keys
from fastplm.models._base import (
    CACHE,
    FastplmModel,
    check_parts,
    drop_in,
    joined,
    takes_cache,
    wants_output,
)
from fastplm.models._heads import TokenClassification
from fastplm.models._layer import (
    Attention,
    Blocks,
    FeedForward,
    Join,
    Layer,
    Ready,
    run_blocks,
    stand_for,
)
from fastplm.models._ragged import SetsDropoutRows, Unpad
from fastplm.models._seq2seq import (
    ConditionalGeneration,
    DecoderQuestionAnswering,
    EncoderDecoder,
    LastEosClassification,
    Stack,
)
from fastplm.nn._rows import kind_of
from fastplm.ops.rms_norm import OP as RMS_NORM


class RMSNorm:
    """Mixin of T5's norm: one op instead of the parent's six, on a CPU, and on CUDA if the dtypes
    are equal."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight, eps = self.weight, self.variance_epsilon
        out = RMS_NORM.layer(hidden_states, weight, eps)
        if out is not None:
            return out
        if hidden_states.is_cuda and hidden_states.dtype is weight.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        return super().forward(hidden_states)  # type: ignore[misc]


T5LayerNorm = joined(RMSNorm, modeling_t5.T5LayerNorm)


def _is_under_autocast(x: Tensor) -> bool:
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)  # "meta" has none


class _Dense:
    """Mixin without the parent's copy in the dtype of ``wo``, which autocast casts back."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        if not _is_under_autocast(hidden_states):
            return super().forward(hidden_states)  # type: ignore[misc]
        if isinstance(self, modeling_t5.T5DenseGatedActDense):
            active = self.act(self.wi_0(hidden_states)) * self.wi_1(hidden_states)
        else:
            active = self.act(self.wi(hidden_states))
        return self.wo(self.dropout(active))


T5DenseActDense = joined(_Dense, modeling_t5.T5DenseActDense)
T5DenseGatedActDense = joined(_Dense, modeling_t5.T5DenseGatedActDense)


@drop_in
class T5Attention(modeling_t5.T5Attention):
    """Attention that passes on the table of the position bias [buckets, H] instead of the bias."""

    @takes_cache
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
            table, bias = self._bias(position_bias, hidden_states.device)
        output, dense_bias, weights = super().forward(
            hidden_states, mask, key_value_states, bias, past_key_values, **kwargs
        )
        return output, table if fused else dense_bias, weights

    def _bias(self: Any, table: Tensor | None, device: torch.device) -> tuple[Tensor | None, Any]:
        """(the table of the first layer, the bias that attention gets)."""
        if table is None and self.has_relative_attention_bias:
            buckets = torch.arange(self.relative_attention_num_buckets, device=device)
            table = self.relative_attention_bias(buckets)
        if table is None:
            return None, NO_BIAS
        distance = self.relative_attention_max_distance
        return table, ops.T5RelativeBias(
            table, bidirectional=not self.is_decoder, max_distance=distance
        )


@drop_in
class T5Block(SetsDropoutRows, modeling_t5.T5Block):
    """A layer that tells its dropout which rows it computes."""

    def _parts_up_to(self: Any, norm: Any, crossed: bool) -> Layer | None:
        parts, kinds = list(self.layer), [*_ATTENTIONS, modeling_t5.T5LayerFF]
        if not self.is_decoder:
            del kinds[1]
        if [*map(kind_of, parts)] != kinds:
            return None
        if self.is_decoder and not crossed:
            del parts[1]
        *attending, last = parts
        attentions, around = [], [self, self.layer, *parts, last.DenseReluDense]
        for part, after in zip(attending, parts[1:], strict=True):
            module = getattr(part, _ATTENTIONS[kind_of(part)])
            if kind_of(module) is not T5Attention:
                return None
            around.append(module)
            join = Join(module.o, after.layer_norm, part.dropout, T5LayerNorm)
            projections, size = (module.q, module.k, module.v), module.key_value_proj_dim
            attentions.append(Attention(module, size, module.dropout, projections, join))
        dense = last.DenseReluDense
        gated = kind_of(dense) is T5DenseGatedActDense
        if not (gated or kind_of(dense) is T5DenseActDense):
            return None
        inner, factor = (dense.wi_0, dense.wi_1) if gated else (dense.wi, None)
        dtypes = {getattr(getattr(one, "weight", None), "dtype", None) for one in (inner, dense.wo)}
        if len(dtypes) > 1:  # the parent casts what ``wo`` reads
            return None
        end = Join(dense.wo, norm, last.dropout, T5LayerNorm)
        feed_forward = FeedForward(inner, dense.act, end, factor, dense.dropout)
        norm = parts[0].layer_norm
        return Layer(tuple(attentions), feed_forward, self.training, norm, tuple(around))


_ATTENTIONS = {
    modeling_t5.T5LayerSelfAttention: "SelfAttention",
    modeling_t5.T5LayerCrossAttention: "EncDecAttention",
}


stand_for(*_ATTENTIONS, modeling_t5.T5LayerFF, T5Attention, T5Block, modeling_t5.T5Block)
stand_for(T5DenseActDense, T5DenseGatedActDense, T5LayerNorm)


class _Blocks(Blocks):
    """Mixin between the two forwards of a stack."""

    _block = T5Block

    def _norm(self: Any) -> Any:
        return self.final_layer_norm

    def _run(
        self: Any,
        made: list[Ready],
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        input_ids: Any = None,
        **kwargs: Any,
    ) -> Tensor | None:
        if made[0].form.dtype is torch.float16:  # whose sums the parent clamps
            return None
        given = dict(config=self.config, inputs_embeds=inputs_embeds)
        if self.config.is_decoder:
            mask = create_causal_mask(**given, attention_mask=attention_mask, **{CACHE: None})
        else:
            mask = create_bidirectional_mask(**given, attention_mask=attention_mask)
        states, mask_of_states = encoder_hidden_states if self.is_decoder else None, None
        if states is not None:
            mask_of_states = create_bidirectional_mask(
                **given, attention_mask=encoder_attention_mask, encoder_hidden_states=states
            )
        if not (says_only_keys(mask) and says_only_keys(mask_of_states)):
            return None
        attention, hidden = made[0].layer.attentions[0].module, self.dropout(inputs_embeds)
        normed = run_blocks(
            *(made, self.block, hidden, mask, kwargs, (states, mask_of_states)),
            kwargs | dict(position_bias=NO_BIAS),
            attention._bias(None, hidden.device)[0],
            lambda table: dict(position_bias=attention._bias(table, hidden.device)[1]),
        )
        return self.dropout(normed)


class T5Stack(Stack, _Blocks, modeling_t5.T5Stack):
    """An encoder or decoder: [B, T] in, [B, T, E] out; only tokens are computed."""

    contiguous = True

    def _layers(self) -> Any:
        return self.block

    def _layer_numbers(self) -> list[Any]:
        return [block.layer[0].SelfAttention.layer_idx for block in self.block]

    def _is_causal(self) -> bool:
        return self.is_decoder

    def forward(self, *, decoder_unpad: Unpad = None, **inputs: Any) -> Any:
        """Like ``Stack``, with one additional argument.

        Args:
            decoder_unpad: replaces ``unpad`` in a decoder.
        """
        if self.is_decoder and decoder_unpad is not None:
            inputs["unpad"] = decoder_unpad
        if inputs.get(CACHE) is None:  # else all have the dense bias of the parent
            layers = (layer for block in self.block for layer in getattr(block, "layer", ()))
            inner = (module for layer in layers for module in layer.children())
            check_parts(self, *(m for m in inner if isinstance(m, modeling_t5.T5Attention)))
        return super().forward(**inputs)


class T5Model(EncoderDecoder, transformers.T5Model): ...


class T5EncoderModel(FastplmModel, transformers.T5EncoderModel):
    """``transformers.T5EncoderModel`` with fused attention, computing only tokens.

    ``unpad`` and ``extra_rows`` are those of its ``T5Stack``.
    """

    _takes_rows = True


class T5ForConditionalGeneration(
    ConditionalGeneration, EncoderDecoder, transformers.T5ForConditionalGeneration
):
    """``transformers.T5ForConditionalGeneration``. Its loss computes no full logits.

    Source: Raffel et al. 2020 (arXiv 1910.10683).
    """

    def _backbone(self, **inputs: Any) -> Seq2SeqModelOutput:
        return EncoderDecoder.forward(self, **inputs)

    def _rows_of_head(self, hidden: Tensor, outputs: Any) -> Tensor:
        return hidden * self.model_dim**-0.5 if self.config.scale_decoder_outputs else hidden


class T5ForSequenceClassification(
    LastEosClassification, transformers.T5ForSequenceClassification
): ...


class T5ForTokenClassification(TokenClassification, transformers.T5ForTokenClassification): ...


class T5ForQuestionAnswering(DecoderQuestionAnswering, transformers.T5ForQuestionAnswering): ...
