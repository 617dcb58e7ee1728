"""Drop-in models: subclasses of the Transformers classes of the same names."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastplm.models.albert import *
    from fastplm.models.auto import *
    from fastplm.models.bart import *
    from fastplm.models.bert import *
    from fastplm.models.camembert import *
    from fastplm.models.data2vec import *
    from fastplm.models.deberta_v2 import *
    from fastplm.models.distilbert import *
    from fastplm.models.electra import *
    from fastplm.models.electra_joint import *
    from fastplm.models.encoder_decoder import *
    from fastplm.models.ernie import *
    from fastplm.models.esm import *
    from fastplm.models.eurobert import *
    from fastplm.models.gpt2 import *
    from fastplm.models.modernbert import *
    from fastplm.models.mpnet import *
    from fastplm.models.nomic_bert import *
    from fastplm.models.openai import *
    from fastplm.models.roberta import *
    from fastplm.models.roberta_prelayernorm import *
    from fastplm.models.t5 import *
    from fastplm.models.xlm_roberta import *
    from fastplm.models.xlm_roberta_xl import *

#: The choices of ``ElectraJointConfig``; the settings of a command read them without Transformers.
ELECTRA_OBJECTIVES = ("rtd", "rtd_masked", "replace_mlm", "all_tokens_mlm")
ELECTRA_SHARINGS = ("none", "embeddings", "all", "gdes")
ELECTRA_GENERATORS = ("model", "unigram")
ELECTRA_SECOND_STAGES = ("generator", "scratch")
#: The public names of each module.
_NAMES = {
    "albert": """
        AlbertForMaskedLM AlbertForMultipleChoice AlbertForPreTraining
        AlbertForQuestionAnswering AlbertForSequenceClassification AlbertForTokenClassification
        AlbertModel
    """,
    "auto": """
        AutoModel AutoModelForCausalLM AutoModelForMaskedLM AutoModelForMultipleChoice
        AutoModelForNextSentencePrediction AutoModelForPreTraining AutoModelForQuestionAnswering
        AutoModelForSeq2SeqLM AutoModelForSequenceClassification AutoModelForTextEncoding
        AutoModelForTokenClassification
    """,
    "bart": """
        BartForCausalLM BartForConditionalGeneration BartForQuestionAnswering
        BartForSequenceClassification BartModel
    """,
    "bert": """
        BertForMaskedLM BertForMultipleChoice BertForNextSentencePrediction BertForPreTraining
        BertForQuestionAnswering BertForSequenceClassification BertForTokenClassification
        BertLMHeadModel BertModel
    """,
    "camembert": """
        CamembertForCausalLM CamembertForMaskedLM CamembertForMultipleChoice
        CamembertForQuestionAnswering CamembertForSequenceClassification
        CamembertForTokenClassification CamembertModel
    """,
    "data2vec": """
        Data2VecTextForCausalLM Data2VecTextForMaskedLM Data2VecTextForMultipleChoice
        Data2VecTextForQuestionAnswering Data2VecTextForSequenceClassification
        Data2VecTextForTokenClassification Data2VecTextModel
    """,
    "deberta_v2": """
        DebertaV2ForMaskedLM DebertaV2ForMultipleChoice DebertaV2ForPreTraining
        DebertaV2ForQuestionAnswering DebertaV2ForSequenceClassification
        DebertaV2ForTokenClassification DebertaV2Model
    """,
    "distilbert": """
        DistilBertForMaskedLM DistilBertForMultipleChoice DistilBertForQuestionAnswering
        DistilBertForSequenceClassification DistilBertForTokenClassification DistilBertModel
    """,
    "electra": """
        ElectraForCausalLM ElectraForMaskedLM ElectraForMultipleChoice ElectraForPreTraining
        ElectraForQuestionAnswering ElectraForSequenceClassification
        ElectraForTokenClassification ElectraModel
    """,
    "electra_joint": "ElectraForJointPreTraining ElectraJointConfig ElectraJointOutput",
    "encoder_decoder": "EncoderDecoderModel",
    "ernie": """
        ErnieForCausalLM ErnieForMaskedLM ErnieForMultipleChoice
        ErnieForNextSentencePrediction ErnieForPreTraining ErnieForQuestionAnswering
        ErnieForSequenceClassification ErnieForTokenClassification ErnieModel
    """,
    "esm": """
        EsmForMaskedLM EsmForSequenceClassification EsmForTokenClassification EsmModel
    """,
    "eurobert": """
        EuroBertForMaskedLM EuroBertForSequenceClassification EuroBertForTokenClassification
        EuroBertModel
    """,
    "gpt2": """
        GPT2DoubleHeadsModel GPT2ForQuestionAnswering GPT2ForSequenceClassification
        GPT2ForTokenClassification GPT2LMHeadModel GPT2Model
    """,
    "mpnet": """
        MPNetForMaskedLM MPNetForMultipleChoice MPNetForQuestionAnswering
        MPNetForSequenceClassification MPNetForTokenClassification MPNetModel
    """,
    "modernbert": """
        ModernBertForMaskedLM ModernBertForMultipleChoice ModernBertForQuestionAnswering
        ModernBertForSequenceClassification ModernBertForTokenClassification ModernBertModel
    """,
    "nomic_bert": """
        NomicBertForMaskedLM NomicBertForSequenceClassification NomicBertForTokenClassification
        NomicBertModel
    """,
    "openai": """
        OpenAIGPTDoubleHeadsModel OpenAIGPTForSequenceClassification OpenAIGPTLMHeadModel
        OpenAIGPTModel
    """,
    "roberta": """
        RobertaForCausalLM RobertaForMaskedLM RobertaForMultipleChoice
        RobertaForQuestionAnswering RobertaForSequenceClassification
        RobertaForTokenClassification RobertaModel
    """,
    "roberta_prelayernorm": """
        RobertaPreLayerNormForCausalLM RobertaPreLayerNormForMaskedLM
        RobertaPreLayerNormForMultipleChoice RobertaPreLayerNormForQuestionAnswering
        RobertaPreLayerNormForSequenceClassification RobertaPreLayerNormForTokenClassification
        RobertaPreLayerNormModel
    """,
    "t5": """
        T5EncoderModel T5ForConditionalGeneration T5ForQuestionAnswering
        T5ForSequenceClassification T5ForTokenClassification T5Model
    """,
    "xlm_roberta": """
        XLMRobertaForCausalLM XLMRobertaForMaskedLM XLMRobertaForMultipleChoice
        XLMRobertaForQuestionAnswering XLMRobertaForSequenceClassification
        XLMRobertaForTokenClassification XLMRobertaModel
    """,
    "xlm_roberta_xl": """
        XLMRobertaXLForCausalLM XLMRobertaXLForMaskedLM XLMRobertaXLForMultipleChoice
        XLMRobertaXLForQuestionAnswering XLMRobertaXLForSequenceClassification
        XLMRobertaXLForTokenClassification XLMRobertaXLModel
    """,
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    # Importing Transformers takes seconds, so each family is imported on first use.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    family = _MODULES[name]
    return getattr(importlib.import_module(f"{__name__}.{family}"), name)


def __dir__() -> list[str]:
    return __all__
