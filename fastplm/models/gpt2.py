"""GPT-2: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.models.gpt2 import modeling_gpt2

from fastplm.hf import ROWS, WITH_WEIGHTS
from fastplm.models._base import CACHE, check_parts, drop_in, takes_cache, wants_output
from fastplm.models._gpt import CausalModel, DoubleHeads, LastTokenClassification
from fastplm.models._heads import CausalLM, QuestionAnswering, TokenClassification
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
from fastplm.models._ragged import SetsDropoutRows
from fastplm.nn._rows import kind_of


class _States(NamedTuple):
    """The states of an encoder, with more arguments of cross-attention.

    Transformers' block passes only the states and their mask on to its cross-attention.
    """

    states: Tensor
    arguments: dict[str, Any]


@drop_in
class GPT2Attention(modeling_gpt2.GPT2Attention):
    """Attention that takes the arguments that ``_States`` adds to the encoder states."""

    def forward(self, *, encoder_hidden_states: Any = None, **kwargs: Any) -> Any:
        if isinstance(encoder_hidden_states, _States):
            encoder_hidden_states, arguments = encoder_hidden_states
            kwargs.update(arguments)
        return super().forward(encoder_hidden_states=encoder_hidden_states, **kwargs)


@drop_in
class GPT2Block(SetsDropoutRows, modeling_gpt2.GPT2Block):
    """A layer that passes the arguments of attention on to its cross-attention too."""

    @takes_cache
    def forward(
        self,
        hidden_states: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        **kwargs: Any,
    ) -> Any:
        if encoder_hidden_states is not None:
            check_parts(self, self.crossattention)
            passed_on = {name: kwargs[name] for name in (WITH_WEIGHTS, "rows") if name in kwargs}
            encoder_hidden_states = _States(encoder_hidden_states, passed_on)
        given = hidden_states, past_key_values, attention_mask, encoder_hidden_states
        return super().forward(*given, **kwargs)

    def _parts_up_to(self: Any, norm: Any, crossed: bool) -> Layer | None:
        modules, attending, norms = self._modules, ["attn"], ["ln_2"]
        if crossed:
            attending, norms = ["attn", "crossattention"], ["ln_cross_attn", "ln_2"]
        inner, *around = map(modules.get, ("mlp", *attending))
        kinds = [modeling_gpt2.GPT2MLP, *[GPT2Attention] * len(around)]
        if [*map(kind_of, (inner, *around))] != kinds:
            return None
        attentions = []
        for module, after in zip(around, map(modules.get, norms), strict=True):
            projections = (
                (module.q_attn, module.c_attn) if module.is_cross_attention else (module.c_attn,)
            )
            join = Join(module.c_proj, after, module.resid_dropout)
            attentions.append(
                Attention(module, module.head_dim, module.attn_dropout.p, projections, join)
            )
        feed_forward = FeedForward(inner.c_fc, inner.act, Join(inner.c_proj, norm, inner.dropout))
        around = [self, inner, *around]
        return Layer(tuple(attentions), feed_forward, self.training, modules["ln_1"], (*around,))


class _Blocks(Blocks):
    """Mixin between the two forwards of the model."""

    _block = GPT2Block

    def _norm(self: Any) -> Any:
        return self.ln_f

    def _run(
        self: Any,
        made: list[Ready],
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Any = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if inputs_embeds is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
            inputs_embeds = self.wte(input_ids)
        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
        given = dict(config=self.config, inputs_embeds=inputs_embeds)
        if attention_mask is not None and attention_mask.dim() < 4:
            attention_mask = attention_mask.view(inputs_embeds.shape[0], -1)
        causal = dict(attention_mask=attention_mask, position_ids=position_ids)
        mask = create_causal_mask(**given, **causal, **{CACHE: None})
        states, mask_of_states = encoder_hidden_states, None
        if states is not None:
            of_states = dict(attention_mask=encoder_attention_mask, encoder_hidden_states=states)
            mask_of_states = create_bidirectional_mask(**given, **of_states)
        hidden = self._embed(None, token_type_ids, position_ids, inputs_embeds)
        return run_blocks(
            *(made, self.h, hidden, mask, kwargs),
            (states, mask_of_states),
            {ROWS: kwargs[ROWS]} if ROWS in kwargs else {},
        )


stand_for(
    *(modeling_gpt2.GPT2Attention, modeling_gpt2.GPT2MLP, modeling_gpt2.GPT2Block),
    *(GPT2Attention, GPT2Block, transformers.GPT2Model),
)


class GPT2Model(CausalModel, _Blocks, transformers.GPT2Model):
    """``transformers.GPT2Model`` with fused attention; without a cache, it computes only tokens.

    ``use_cache`` is True by default, as in the parent. Pass False to leave padding out.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    _attention = GPT2Attention

    def forward(self, **inputs: Any) -> Any:
        """Like the parent, with the additional arguments of ``BertModel``."""
        if wants_output(self, "output_attentions", inputs):
            inputs[WITH_WEIGHTS] = True
        return super().forward(**inputs)


class GPT2LMHeadModel(CausalLM, transformers.GPT2LMHeadModel):
    """``transformers.GPT2LMHeadModel``, whose loss computes only labelled tokens.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    _loss_by_name = False


class GPT2DoubleHeadsModel(DoubleHeads, transformers.GPT2DoubleHeadsModel):
    _output = modeling_gpt2.GPT2DoubleHeadsModelOutput


class GPT2ForSequenceClassification(
    LastTokenClassification, transformers.GPT2ForSequenceClassification
):
    _output = SequenceClassifierOutputWithPast


class _WithoutCache:
    """Mixin of a head whose output has no field for a cache; so by default there is none."""

    def forward(self, use_cache: bool | None = None, **inputs: Any) -> Any:
        return super().forward(use_cache=bool(use_cache), **inputs)  # type: ignore[misc]


class GPT2ForTokenClassification(
    TokenClassification, _WithoutCache, transformers.GPT2ForTokenClassification
): ...


class GPT2ForQuestionAnswering(
    QuestionAnswering, _WithoutCache, transformers.GPT2ForQuestionAnswering
): ...
