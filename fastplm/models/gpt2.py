"""GPT-2: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from transformers.models.gpt2 import modeling_gpt2

from fastplm.hf import WITH_WEIGHTS
from fastplm.models._base import check_parts, drop_in, wants_output
from fastplm.models._decoder_call import gpt2_layer_call
from fastplm.models._gpt import CausalModel, DoubleHeads, LastTokenClassification
from fastplm.models._heads import CausalLM, QuestionAnswering, TokenClassification
from fastplm.models._ragged import OnRows


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
class GPT2Block(OnRows, modeling_gpt2.GPT2Block):
    """A layer that passes the arguments of attention on to its cross-attention too.

    On a CPU, one call of csrc/ computes the next token of a sequence (``_decoder_call``).
    """

    def forward(
        self,
        hidden_states: Any,
        past_key_values: Any = None,
        attention_mask: Any = None,
        encoder_hidden_states: Any = None,
        **kwargs: Any,
    ) -> Any:
        if encoder_hidden_states is None:
            out = gpt2_layer_call(self, hidden_states, past_key_values, attention_mask, kwargs)
            if out is not None:
                return out
        else:
            check_parts(self, self.crossattention)
            passed_on = {name: kwargs[name] for name in (WITH_WEIGHTS, "rows") if name in kwargs}
            encoder_hidden_states = _States(encoder_hidden_states, passed_on)
        given = hidden_states, past_key_values, attention_mask, encoder_hidden_states
        return super().forward(*given, **kwargs)


class GPT2Model(CausalModel, transformers.GPT2Model):
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
