"""Auto classes: those of Transformers, which here return drop-in models."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import transformers
from transformers import PreTrainedConfig

from fastplm.hf import NAME
from fastplm.models._accelerate import drop_in_of, switch
from fastplm.models._base import FastplmModel, choosing, documented, say_what_is_lost


class _DropInMapping:
    """Transformers' mapping from configurations to classes, with drop-in classes where they exist.

    All other attributes, such as ``register``, are those of Transformers' mapping.
    """

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def __getitem__(self, config_class: type) -> Any:
        found = self._theirs[config_class]
        if isinstance(found, list | tuple):
            return tuple(drop_in_of(kind) or kind for kind in found)
        return drop_in_of(found) or found

    def __contains__(self, config_class: object) -> bool:
        return config_class in self._theirs

    def __iter__(self) -> Iterator[type]:
        return iter(self._theirs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)


class _Auto:
    """Mixin in front of an Auto class of Transformers.

    If ``fastplm.models`` has a drop-in class for the class that Transformers chooses, it is used.
    Other classes, and code from the Hub with ``trust_remote_code=True``, are Transformers', with
    ``attn_implementation="fastplm"`` if they support it. An attention implementation that is given
    as an argument is kept; what a configuration says is Transformers' own choice of an earlier
    model. The caller's configuration is not changed.
    """

    _summary = "of drop-in models, where ``fastplm.models`` has the class that is chosen."
    _model_mapping: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        documented(cls)
        cls._model_mapping = _DropInMapping(cls._model_mapping)

    @classmethod
    def from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
        chosen = kwargs.get("attn_implementation")
        base: Any = super() if not kwargs.get("trust_remote_code") else _theirs(cls)
        with _other_than_ours(chosen):
            model = base.from_config(copy.deepcopy(config), **kwargs)
        return _ours(model, chosen)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if isinstance(config, PreTrainedConfig):
            kwargs["config"] = copy.deepcopy(config)
        chosen = kwargs.get("attn_implementation")
        base: Any = super() if not kwargs.get("trust_remote_code") else _theirs(cls)
        with _other_than_ours(chosen):  # Transformers takes the argument into the configuration
            loaded = base.from_pretrained(*args, **kwargs)
        if isinstance(loaded, tuple):  # output_loading_info=True
            return _ours(loaded[0], chosen), *loaded[1:]
        return _ours(loaded, chosen)


def _theirs(auto: type) -> Any:
    return getattr(transformers, auto.__name__)


def _other_than_ours(chosen: str | None) -> Any:
    return choosing(None if chosen == NAME else chosen)


def _ours(model: Any, chosen: str | None) -> Any:
    switch(model, attention=chosen is None)
    if chosen is not None and isinstance(model, FastplmModel):
        say_what_is_lost(chosen, type(model))
    return model


class AutoModel(_Auto, transformers.AutoModel): ...


class AutoModelForPreTraining(_Auto, transformers.AutoModelForPreTraining): ...


class AutoModelForMaskedLM(_Auto, transformers.AutoModelForMaskedLM): ...


class AutoModelForCausalLM(_Auto, transformers.AutoModelForCausalLM): ...


class AutoModelForSeq2SeqLM(_Auto, transformers.AutoModelForSeq2SeqLM): ...


class AutoModelForSequenceClassification(
    _Auto, transformers.AutoModelForSequenceClassification
): ...


class AutoModelForTokenClassification(_Auto, transformers.AutoModelForTokenClassification): ...


class AutoModelForQuestionAnswering(_Auto, transformers.AutoModelForQuestionAnswering): ...


class AutoModelForMultipleChoice(_Auto, transformers.AutoModelForMultipleChoice): ...


class AutoModelForNextSentencePrediction(
    _Auto, transformers.AutoModelForNextSentencePrediction
): ...


class AutoModelForTextEncoding(_Auto, transformers.AutoModelForTextEncoding): ...
