"""GPT: drop-in for the OpenAIGPT classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.modeling_outputs import BaseModelOutput, SequenceClassifierOutput
from transformers.models.openai import modeling_openai

from fastplm.hf import fastplm_attention_forward
from fastplm.models._base import CACHE, drop_in, wants_output
from fastplm.models._gpt import CausalModel, DoubleHeads, LastTokenClassification
from fastplm.models._heads import CausalLM
from fastplm.models._layer import Attention as AttentionBlock
from fastplm.models._layer import (
    FeedForward,
    Join,
    Layer,
    nothing_hides_modules,
    ready_layer,
    run_layer,
    stand_for,
)
from fastplm.models._ragged import Rows, SetsDropoutRows
from fastplm.nn._rows import is_plain
from fastplm.nn.dropout import Dropout, on_rows
from fastplm.nn.gelu import gelu
from fastplm.ops._attention_call import made_for_one_forward


class _Keys(NamedTuple):
    """A mask of the keys that may be attended to; replaces Transformers' additive mask.

    Args:
        mask: bool [B, T], or [1, N] of packed rows; None = all; or a full 4-D mask, as GPT-2's.
        others: what else the attention interface gets, such as ``rows``.
    """

    mask: Tensor | None
    others: dict[str, Any]


@drop_in
class Attention(modeling_openai.Attention):
    """Causal attention in one fused op, without a matrix of all scores."""

    def forward(
        self, x: Tensor, attention_mask: Any = None, output_attentions: bool = False
    ) -> list[Tensor]:
        if not isinstance(attention_mask, _Keys):
            return super().forward(x, attention_mask, output_attentions)
        # [B, T, 3, H, D] -> three of [B, H, T, D]
        # (Not unflatten, after which the TorchScript exporter of ONNX takes lengths for constants.)
        head_dim = self.split_size // self.n_head
        heads = self.c_attn(x).view(*x.shape[:-1], 3, self.n_head, head_dim)
        query, key, value = heads.transpose(1, 3).unbind(2)
        out, _ = fastplm_attention_forward(
            self,
            query,
            key,
            value,
            attention_mask.mask,
            dropout=self.attn_dropout.p if self.attn_dropout.training else 0.0,
            scaling=self.scaling,
            **attention_mask.others,
        )
        return [self.resid_dropout(self.c_proj(out.flatten(-2)))]

    @property
    def scaling(self) -> float | None:
        return None if self.scale else 1.0


@drop_in
class MLP(modeling_openai.MLP):
    """The feed-forward block. All models share its activation module, which is not replaced."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_plain(self.act, NewGELUActivation):
            return super().forward(x)
        return self.dropout(self.c_proj(gelu(self.c_fc(x), "tanh")))


@drop_in
class Block(SetsDropoutRows, modeling_openai.Block):
    """A layer that runs as ``_layer`` says, or by modules whose dropout knows the rows."""

    def forward(
        self, x: Tensor, attention_mask: Any = None, output_attentions: bool = False
    ) -> list[Tensor]:
        numbers = None
        if isinstance(attention_mask, _Keys):
            rows: Rows | None = attention_mask.others["rows"]
            made = ready_layer(self, rows, x)
            if made is not None:
                return [run_layer(made, x, attention_mask.mask, None, attention_mask.others)]
            numbers = None if rows is None else rows.numbers
        compute = modeling_openai.Block.forward
        return on_rows(numbers, compute, self, x, attention_mask, output_attentions)

    def _parts(self: Any) -> Layer | None:
        """The modules that run; None if what is around them is not as it was made."""
        modules = self._modules
        attn, mlp, first, second = modules["attn"], modules["mlp"], modules["ln_1"], modules["ln_2"]
        if not (is_plain(attn, Attention) and is_plain(mlp, MLP)):
            return None
        if not nothing_hides_modules(self, attn, mlp):
            return None
        attention = AttentionBlock(
            *(attn, attn.split_size // attn.n_head, attn.attn_dropout, (attn.c_attn,)),
            Join(attn.c_proj, first, attn.resid_dropout),
        )
        end = Join(mlp.c_proj, second, mlp.dropout)
        feed_forward = FeedForward(mlp.c_fc, mlp.act, end)
        return Layer((attention,), feed_forward, self.training)


stand_for(modeling_openai.Attention, modeling_openai.MLP, modeling_openai.Block, Attention, MLP)


class _FusedLayers:
    """Mixin in front of the parent's forward: no [T, T] mask, and rows may be packed."""

    def forward(
        self: Any,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        rows: Rows | None = None,
        **kwargs: Any,
    ) -> Any:
        if (
            wants_output(self, "output_attentions", kwargs)
            or (input_ids is None) == (inputs_embeds is None)
            or (attention_mask is not None and attention_mask.dim() not in (2, 4))
            or not self._layers_are_ours()
        ):
            return super().forward(  # type: ignore[misc]
                input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **kwargs
            )
        hidden = self._embed(input_ids, token_type_ids, position_ids, inputs_embeds)
        mask = attention_mask
        if mask is not None and mask.dim() == 2:
            mask = made_for_one_forward(mask.bool()[:])
        states = [hidden]
        for number, block in enumerate(self.h):
            numbered = None if rows is None else rows.for_layer(number)
            hidden = block(hidden, _Keys(mask, {"is_causal": True, "rows": numbered}))[0]
            states.append(hidden)
        recorded = wants_output(self, "output_hidden_states", kwargs)
        return BaseModelOutput(
            last_hidden_state=hidden, hidden_states=tuple(states) if recorded else None
        )


class OpenAIGPTModel(CausalModel, _FusedLayers, transformers.OpenAIGPTModel):
    """``transformers.OpenAIGPTModel`` with fused attention, computing only tokens.

    Transformers has no choice of attention for this model, so ``attn_implementation`` is ignored.
    Unfused attention is used with ``output_attentions``, which warns once, and with attention
    modules of the user.

    With padding at the left, the output of a row that may attend to no token is 0. In Transformers
    such a row attends to later tokens, because the causal mask adds only -1e4 and padding more. So
    the loss of ``OpenAIGPTLMHeadModel`` differs if the first token of such a sequence, which is
    predicted from padding, has a label. Label it -100.

    Source: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training".
    """

    _attention = Attention

    def _position_table(self) -> nn.Module:
        return self.positions_embed

    def forward(self, **inputs: Any) -> Any:
        """Like the parent, with the additional arguments of ``BertModel``."""
        # The model has no cache, but generate() passes one.
        inputs.pop(CACHE, None)
        return super().forward(**{**inputs, "use_cache": False})

    def _has_our_attention(self) -> bool:
        return True

    def _layers_are_ours(self) -> bool:
        forwards = nn.Dropout.forward, Dropout.forward
        drops = (getattr(block.attn, "attn_dropout", None) for block in self.h)
        # Not the class: torch.export sees modules through subclasses where one is shared.
        known = (getattr(type(one), "forward", None) in forwards for one in drops)
        return super()._layers_are_ours() and all(known)

    def _no_mask(self, given: Tensor) -> None:
        """The parent makes its own causal mask."""


class OpenAIGPTLMHeadModel(CausalLM, transformers.OpenAIGPTLMHeadModel):
    """``transformers.OpenAIGPTLMHeadModel``, whose loss computes only labelled tokens.

    Source: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training".
    """


class OpenAIGPTDoubleHeadsModel(DoubleHeads, transformers.OpenAIGPTDoubleHeadsModel):
    _output = modeling_openai.OpenAIGPTDoubleHeadsModelOutput


class OpenAIGPTForSequenceClassification(
    LastTokenClassification, transformers.OpenAIGPTForSequenceClassification
):
    _output = SequenceClassifierOutput
