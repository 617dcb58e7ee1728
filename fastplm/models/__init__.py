"""Drop-in models: subclasses of the Transformers classes of the same names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastplm.models.bert import (
        BertForMaskedLM,
        BertForMultipleChoice,
        BertForNextSentencePrediction,
        BertForPreTraining,
        BertForQuestionAnswering,
        BertForSequenceClassification,
        BertForTokenClassification,
        BertLMHeadModel,
        BertModel,
    )
    from fastplm.models.electra import ElectraForMaskedLM, ElectraForPreTraining
    from fastplm.models.electra_joint import (
        ElectraForJointPreTraining,
        ElectraJointConfig,
        ElectraJointOutput,
    )

__all__ = [
    "BertForMaskedLM",
    "BertForMultipleChoice",
    "BertForNextSentencePrediction",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertLMHeadModel",
    "BertModel",
    "ElectraForJointPreTraining",
    "ElectraForMaskedLM",
    "ElectraForPreTraining",
    "ElectraJointConfig",
    "ElectraJointOutput",
]

# The module of a family, by what the names of its classes begin with; the longest beginning counts.
_FAMILIES = {
    "Albert": "albert",
    "Auto": "auto",
    "Bart": "bart",
    "Bert": "bert",
    "Electra": "electra",
    "ElectraForJoint": "electra_joint",
    "ElectraJoint": "electra_joint",
    "EncoderDecoder": "encoder_decoder",
    "GPT2": "gpt2",
    "OpenAIGPT": "openai",
    "Roberta": "roberta",
    "T5": "t5",
}


def __getattr__(name: str) -> Any:
    # Transformers takes seconds to import, so a family is imported when it is first asked for.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = _FAMILIES[max(filter(name.startswith, _FAMILIES), key=len)]
    return getattr(importlib.import_module(f"{__name__}.{family}"), name)


def __dir__() -> list[str]:
    return __all__
