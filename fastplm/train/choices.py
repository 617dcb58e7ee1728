"""What a run can be told to do, for those who need no torch: the help of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: What the whole of a demo is to take, installation aside.
MINUTES = 3.0
PRECISIONS = ("auto", "fp32", "bf16")
UNITS = ("token", "word", "ngram")


@dataclass(frozen=True)
class Family:
    """What an architecture can learn, and how.

    Args:
        tokenizer: the kind of vocabulary, see ``train_tokenizer``.
        classes: the class of ``fastplm.models`` that learns each objective; the first objective is
            the default.
        unit: the default of ``--unit``.
    """

    tokenizer: str
    classes: Mapping[str, str]
    unit: str = "token"


FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        "wordpiece",
        {
            "mlm+nsp": "BertForPreTraining",
            "mlm": "BertForMaskedLM",
        },
    ),
    "roberta": Family("bytelevel", {"mlm": "RobertaForMaskedLM"}),
    "albert": Family(
        "wordpiece",
        {
            "mlm+sop": "AlbertForPreTraining",
            "mlm": "AlbertForMaskedLM",
        },
        unit="ngram",
    ),
    "electra": Family("wordpiece", {"rtd": "ElectraForJointPreTraining"}),
    "gpt2": Family("bytelevel", {"clm": "GPT2LMHeadModel"}),
    "t5": Family("unigram", {"spans": "T5ForConditionalGeneration"}),
    "bart": Family("bytelevel", {"denoise": "BartForConditionalGeneration"}),
}
