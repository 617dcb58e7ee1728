"""BART: drop-in for the classes of the same names in Transformers.

Source: Lewis et al. 2019 (arXiv 1910.13461).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPastAndCrossAttentions,
    ModelOutput,
    Seq2SeqModelOutput,
)
from transformers.models.bart import modeling_bart
from transformers.utils.output_capturing import capture_outputs

from fastplm.models._base import CACHE, joined, takes_cache
from fastplm.models._heads import CausalLM
from fastplm.models._layer import (
    Attention,
    FeedForward,
    Join,
    Layer,
    nothing_hides_modules,
    ready_layer,
    run_layer,
    stand_for,
)
from fastplm.models._ragged import Rows, SetsDropoutRows
from fastplm.models._seq2seq import (
    ConditionalGeneration,
    DecoderQuestionAnswering,
    EncoderDecoder,
    LastEosClassification,
    Stack,
)
from fastplm.nn._rows import is_plain
from fastplm.nn.dropout import dropout

stand_for(modeling_bart.BartAttention)


class PostNormLayer(SetsDropoutRows):
    """Mixin of a layer: it runs as ``_layer`` says, or the parent's forward with a dropout that
    knows the rows."""

    _attention: type = modeling_bart.BartAttention

    def _parts(self: Any) -> Layer | None:
        """The modules that run; None if what is around them is not as it was made."""
        modules = self._modules
        attentions = [(modules["self_attn"], modules["self_attn_layer_norm"])]
        if "encoder_attn" in modules:
            attentions.append((modules["encoder_attn"], modules["encoder_attn_layer_norm"]))
        weight: Any = modules["fc1"]._parameters.get("weight")  # an adapter may have none
        halves = getattr(weight, "dtype", None) is torch.float16
        known = all(is_plain(module, self._attention) for module, _ in attentions)
        if halves or not known or not nothing_hides_modules(self, *(one for one, _ in attentions)):
            return None
        blocks = []
        for module, norm in attentions:
            parts = module._modules
            join = Join(parts["out_proj"], norm, float(self.dropout))
            projections = parts["q_proj"], parts["k_proj"], parts["v_proj"]
            blocks.append(Attention(module, module.head_dim, module.dropout, projections, join))
        end = Join(modules["fc2"], modules["final_layer_norm"], float(self.dropout))
        activation = modules.get("activation_fn", self.activation_fn)
        between = float(self.activation_dropout)
        feed_forward = FeedForward(modules["fc1"], activation, end, dropout=between)
        return Layer(tuple(blocks), feed_forward, self.training)

    @takes_cache
    def forward(
        self: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Tensor:
        made = None
        if past_key_values is None:
            made = ready_layer(self, kwargs.get("rows"), hidden_states)
        if made is not None:
            cross_attention_args = (encoder_hidden_states, encoder_attention_mask)
            return run_layer(
                made, hidden_states, attention_mask, None, kwargs, cross_attention_args
            )
        if past_key_values is not None:
            kwargs[CACHE] = past_key_values
        attended, _ = self.self_attn(hidden_states, attention_mask=attention_mask, **kwargs)
        hidden = self.self_attn_layer_norm(hidden_states + self._dropped(attended))
        if encoder_hidden_states is not None:
            others = {"key_value_states": encoder_hidden_states, **kwargs}
            attended, _ = self.encoder_attn(hidden, attention_mask=encoder_attention_mask, **others)
            hidden = self.encoder_attn_layer_norm(hidden + self._dropped(attended))
        inner = self.activation_fn(self.fc1(hidden))
        inner = dropout(inner, self.activation_dropout, self.training)
        hidden = self.final_layer_norm(hidden + self._dropped(self.fc2(inner)))
        halves = hidden.dtype is torch.float16 and not hasattr(self, "encoder_attn")
        if halves and not hidden.isfinite().all():  # as in the parent's encoder
            most = torch.finfo(hidden.dtype).max - 1000
            hidden = hidden.clamp(-most, most)
        return hidden

    def _dropped(self: Any, hidden: Tensor) -> Tensor:
        return dropout(hidden, self.dropout, self.training)


BartEncoderLayer = joined(PostNormLayer, modeling_bart.BartEncoderLayer)
BartDecoderLayer = joined(PostNormLayer, modeling_bart.BartDecoderLayer)


class _AddsPositions(Stack):
    """Mixin of encoder and decoder: adds position embeddings to packed rows."""

    _output: type[ModelOutput] = BaseModelOutput

    def _layers(self: Any) -> Any:
        return self.layers

    def _layer_numbers(self: Any) -> list[Any]:
        return [layer.self_attn.layer_idx for layer in self.layers]

    def _keeps_padding(self, masks: Any, kwargs: dict[str, Any], *caching: Any, **more: Any) -> Any:
        crossed = (layer._modules.get("encoder_attn") for layer in self._layers())
        if not all(one is None or type(one) is modeling_bart.BartAttention for one in crossed):
            return "layers"
        return super()._keeps_padding(masks, kwargs, *caching, **more)

    @capture_outputs
    def _on_rows(
        self: Any, inputs_embeds: Tensor, attention_mask: Tensor | None, rows: Rows, **kwargs: Any
    ) -> Any:
        # Positional, because gradient checkpointing needs it.
        states = [kwargs.pop(name) for name in ("encoder_hidden_states",) if name in kwargs]
        packed: Any = rows.packed
        places = packed.positions % packed.seqlen
        positions = self.embed_positions(inputs_embeds, position_ids=places)
        hidden = self.layernorm_embedding(inputs_embeds + positions.to(inputs_embeds.device))
        hidden = dropout(hidden, self.dropout, self.training)
        for layer in self.layers:
            drops = self.training and self.layerdrop > 0.0
            if drops and torch.rand([], device="cpu") < self.layerdrop:
                continue
            hidden = layer(hidden, attention_mask, *states, rows=rows, **kwargs)
        return self._output(last_hidden_state=hidden)


BartEncoder = joined(_AddsPositions, modeling_bart.BartEncoder, _takes_cache=False)
BartDecoder = joined(
    *(_AddsPositions, modeling_bart.BartDecoder),
    _output=BaseModelOutputWithPastAndCrossAttentions,
)


class BartModel(EncoderDecoder, transformers.BartModel):
    """``transformers.BartModel`` with fused attention, each side unpadded once."""

    def _default_decoder_ids(self, input_ids: Tensor | None) -> Tensor | None:
        if input_ids is None:
            transformers.BartModel.forward(self)  # which raises
        return modeling_bart.shift_tokens_right(
            input_ids, self.config.pad_token_id, self.config.decoder_start_token_id
        )


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


class BartForSequenceClassification(
    LastEosClassification, transformers.BartForSequenceClassification
): ...


class BartForQuestionAnswering(DecoderQuestionAnswering, transformers.BartForQuestionAnswering): ...


class DecoderCausalLM(CausalLM):
    """Mixin of a decoder alone, whose label t is predicted at t."""

    #: Trainer would leave out the first label of each row, as of a class that shifts them.
    accepts_loss_kwargs = False

    def forward(self, *, labels: Tensor | None = None, **inputs: Any) -> Any:
        """Like the parent, with the differences of ``BertLMHeadModel``.

        Args:
            labels: int64 [B, T], -100 = none. As in the parent, label t is predicted at t.
        """
        if labels is not None:  # the parent reads no other
            inputs["shift_labels"] = labels
        return super().forward(**inputs)


class BartForCausalLM(DecoderCausalLM, transformers.BartForCausalLM):
    """``transformers.BartForCausalLM``, only the decoder. Its loss computes no full logits."""
