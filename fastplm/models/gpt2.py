"""GPT-2: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.models.gpt2 import modeling_gpt2

from fastplm.hf import WITH_WEIGHTS
from fastplm.models._base import asked_for, drop_in
from fastplm.models._gpt import CausalModel, DoubleHeads, LastTokenClassification
from fastplm.models._heads import CausalLM, QuestionAnswering, TokenClassification


class _StatesAndArguments(NamedTuple):
    """An encoder's states, and what attention to them has to be told.

    Transformers' block hands nothing but the states and their mask on to its cross-attention.
    """

    states: Tensor
    arguments: dict[str, Any]


@drop_in
class GPT2Attention(modeling_gpt2.GPT2Attention):
    """Attention that is told more than Transformers' block tells it about an encoder's states."""

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        if isinstance(encoder_hidden_states, _StatesAndArguments):
            kwargs.update(encoder_hidden_states.arguments)
            encoder_hidden_states = encoder_hidden_states.states
        return super().forward(
            hidden_states,
            past_key_values,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            output_attentions,
            **kwargs,
        )


@drop_in
class GPT2Block(modeling_gpt2.GPT2Block):
    """A layer whose cross-attention is told the lengths of packed states, as any attention is."""

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        *,
        cross_lengths: tuple[Tensor, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if encoder_hidden_states is not None:
            names = [WITH_WEIGHTS]
            if cross_lengths is not None:
                names += ["cu_seq_lens_q", "max_length_q"]
            arguments = {name: kwargs[name] for name in names if name in kwargs}
            if cross_lengths is not None:
                arguments["cu_seq_lens_k"], arguments["max_length_k"] = cross_lengths
            encoder_hidden_states = _StatesAndArguments(encoder_hidden_states, arguments)
        return super().forward(
            hidden_states,
            past_key_values,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            use_cache,
            **kwargs,
        )


@drop_in
class GPT2Model(CausalModel, transformers.GPT2Model):
    """``transformers.GPT2Model`` with fused attention, without a cache on the tokens alone.

    ``use_cache`` is True by default, as in the parent: say False to leave padding out.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    _attention = GPT2Attention

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with the further arguments of ``BertModel``."""
        if asked_for(self, "output_attentions", kwargs):
            kwargs[WITH_WEIGHTS] = True
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


@drop_in
class GPT2LMHeadModel(CausalLM, transformers.GPT2LMHeadModel):
    """``transformers.GPT2LMHeadModel``, whose loss sees the labelled tokens only.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    def _head(self) -> tuple[Callable[[Tensor], Tensor] | None, nn.Linear]:
        return None, self.lm_head

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with the differences of ``BertLMHeadModel``."""
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            labels=labels,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_logits=output_logits,
            num_items_in_batch=num_items_in_batch,
            shift_labels=shift_labels,
            **kwargs,
        )


@drop_in
class GPT2DoubleHeadsModel(DoubleHeads, transformers.GPT2DoubleHeadsModel):
    """``transformers.GPT2DoubleHeadsModel``, whose heads see the rows only that they need.

    Source: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", §3.
    """

    _output = modeling_gpt2.GPT2DoubleHeadsModelOutput

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        mc_token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mc_labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_logits: bool = False,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with the differences of ``OpenAIGPTDoubleHeadsModel``."""
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            mc_token_ids=mc_token_ids,
            labels=labels,
            mc_labels=mc_labels,
            output_logits=output_logits,
            num_items_in_batch=num_items_in_batch,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


@drop_in
class GPT2ForSequenceClassification(
    LastTokenClassification, transformers.GPT2ForSequenceClassification
):
    """``transformers.GPT2ForSequenceClassification``, whose head sees the last token alone."""

    _output = SequenceClassifierOutputWithPast

    def forward(
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the parent, with the differences of ``OpenAIGPTForSequenceClassification``."""
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


class _WithoutCache:
    """Mixin of a head whose output has no place for a cache, so that none need be made."""

    def forward(self, *args: Any, use_cache: bool | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, use_cache=bool(use_cache), **kwargs)  # type: ignore[misc]


@drop_in
class GPT2ForTokenClassification(
    TokenClassification, _WithoutCache, transformers.GPT2ForTokenClassification
):
    """``transformers.GPT2ForTokenClassification`` on the tokens alone."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        return super().forward(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            num_items_in_batch=num_items_in_batch,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **kwargs,
        )


@drop_in
class GPT2ForQuestionAnswering(
    QuestionAnswering, _WithoutCache, transformers.GPT2ForQuestionAnswering
):
    """``transformers.GPT2ForQuestionAnswering`` with fused attention."""
