"""The choices of the commands and their defaults; nothing here imports PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

#: The minutes of a demo, without the installation.
MINUTES = 3.0
#: The share of the tokens, the last ones, that a pre-training holds out where they are enough.
HELD_OUT = 0.05
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

    @property
    def usual(self) -> str:
        """The objective where none is named."""
        return next(iter(self.classes))


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
#: All objectives, and those that choose tokens to mask.
OBJECTIVES = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.classes))
MASKED = ("mlm", "mlm+nsp", "mlm+sop", "rtd")
#: The tasks of fine-tuning, with the usual size of their batches.
BATCH_SIZES = {"classification": 32, "pair": 32, "tagging": 32, "qa": 16, "choice": 16}
LIBRARIES = ("fastplm", "transformers")
