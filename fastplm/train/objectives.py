"""The pre-training objectives: what each makes of text, and which class of which family learns it.

An objective is three things: a stream of samples over a token store, a collator that corrupts
them, and the tokens that a vocabulary must have for that. ``FAMILIES`` says which architecture can
learn which of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastplm._checks import check, check_choice
from fastplm.data import (
    BlockDataset,
    DataCollatorForCausalTokens,
    DataCollatorForMaskedTokens,
    NextSentencePairs,
    PretrainingStream,
    SentenceChunks,
    SentenceOrderPairs,
    TokenStore,
)
from fastplm.data.blocks import check_enough_tokens
from fastplm.data.denoising import DataCollatorForDenoising
from fastplm.data.span_corruption import DataCollatorForSpanCorruption
from fastplm.ops.corrupt_spans import span_corruption_fit

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fastplm.train.pretrain import PretrainArguments

UNITS = ("token", "word", "ngram")


class TextBlocks(Dataset):
    """The corpus cut every ``size`` tokens, with nothing put around; its rest is left out.

    Item i is ``{"input_ids": int64 [size]}``.

    Raises:
        DataError: fewer tokens than one block needs; or see ``TokenStore.validate``.
    """

    def __init__(self, store: TokenStore, size: int) -> None:
        self.store, self.size = store, size
        check_enough_tokens("TextBlocks", store, size)
        store.validate()

    def __len__(self) -> int:
        return len(self.store) // self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = self.store.tokens[index * self.size : (index + 1) * self.size]
        return {"input_ids": torch.from_numpy(block.astype(np.int64))}


@dataclass(frozen=True)
class Objective:
    """How a model learns from text.

    Args:
        token_loss: the name of the loss over tokens, beside that over pairs if there is one.
        needs: what a tokenizer must have, see ``load_tokenizer``.
        masks: tokens are chosen by ``--unit``.
        documents: the fewest that a corpus must have.
    """

    token_loss: str
    needs: tuple[str, ...] = ("pad", "mask", "cls", "sep")
    masks: bool = False
    documents: int = 1

    def raw_size(self, args: PretrainArguments) -> int:
        """Tokens of text that become one sample."""
        return args.block_size

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        """The pieces of the corpus that a training stream shuffles: blocks of text alone."""
        return TextBlocks(store, self.raw_size(args))

    def samples(self, stream: PretrainingStream, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        """The stream itself, or what is made of each of its elements."""
        return stream

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        """Pads samples (``pad``) and corrupts them (``corrupt``); called, it does both."""
        raise NotImplementedError


@dataclass(frozen=True)
class MaskedTokens(Objective):
    """Masked language modelling over blocks or, with ``pairs``, over pairs of segments.

    Args:
        pairs: what makes them of runs of sentences.
        always_mask: every chosen token becomes ``[MASK]``, as for ELECTRA's generator, instead of
            BERT's 80 % ``[MASK]``, 10 % random, 10 % unchanged.
    """

    token_loss: str = "mlm_loss"
    masks: bool = True
    pairs: type[NextSentencePairs] | type[SentenceOrderPairs] | None = None
    always_mask: bool = False

    def source(
        self, args: PretrainArguments, store: TokenStore, tokenizer: PreTrainedTokenizerBase
    ) -> Dataset:
        if self.pairs is not None:
            return SentenceChunks(store, args.block_size)
        return BlockDataset(store, args.block_size, **_ends(tokenizer))

    def samples(self, stream: PretrainingStream, tokenizer: PreTrainedTokenizerBase) -> Dataset:
        if self.pairs is None:
            return stream
        return self.pairs(stream, **_ends(tokenizer))

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForMaskedTokens(
            tokenizer,
            seed=args.seed,
            mlm_probability=args.preset.mlm_probability,
            mask_replace_prob=1.0 if self.always_mask else 0.8,
            random_replace_prob=0.0 if self.always_mask else 0.1,
            block_size=args.block_size,
            unit=str(args.unit),
        )


@dataclass(frozen=True)
class CausalTokens(Objective):
    """Each token from those before it."""

    token_loss: str = "clm_loss"
    needs: tuple[str, ...] = ("eos",)

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForCausalTokens(tokenizer, block_size=args.block_size)


@dataclass(frozen=True)
class Spans(Objective):
    """T5: spans become sentinels, and the decoder says what was there.

    A block is as long as its corrupted form, the encoder's input, fits ``block_size``.
    """

    token_loss: str = "spans_loss"
    needs: tuple[str, ...] = ("pad", "eos", "<extra_id_0>")

    def raw_size(self, args: PretrainArguments) -> int:
        return span_corruption_fit(args.block_size)[0]

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForSpanCorruption(tokenizer, seed=args.seed, block_size=args.block_size)


@dataclass(frozen=True)
class Denoising(Objective):
    """BART: sentences permuted and spans infilled, and the decoder says the original.

    The beginning and the end of a text are put around it after the noise.
    """

    token_loss: str = "denoise_loss"
    needs: tuple[str, ...] = ("pad", "mask", "bos", "eos")

    def raw_size(self, args: PretrainArguments) -> int:
        return args.block_size - 2

    def collator(self, args: PretrainArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
        return DataCollatorForDenoising(tokenizer, seed=args.seed, block_size=args.block_size)


OBJECTIVES: Mapping[str, Objective] = {
    "mlm": MaskedTokens(),
    "mlm+nsp": MaskedTokens(pairs=NextSentencePairs, documents=2),
    "mlm+sop": MaskedTokens(pairs=SentenceOrderPairs),
    "rtd": MaskedTokens(always_mask=True),
    "clm": CausalTokens(),
    "spans": Spans(),
    "denoise": Denoising(),
}


@dataclass(frozen=True)
class Family:
    """What an architecture can learn, and how.

    Args:
        tokenizer: the kind of vocabulary, see ``train_tokenizer``.
        classes: the class that learns each objective; the first objective is the default.
        unit: the default of ``--unit``.
    """

    tokenizer: str
    classes: Mapping[str, str]
    unit: str = "token"


FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        "wordpiece",
        {
            "mlm+nsp": "fastplm.models.BertForPreTraining",
            "mlm": "fastplm.models.BertForMaskedLM",
        },
    ),
    "roberta": Family("bytelevel", {"mlm": "transformers.RobertaForMaskedLM"}),
    "albert": Family(
        "wordpiece",
        {
            "mlm+sop": "transformers.AlbertForPreTraining",
            "mlm": "transformers.AlbertForMaskedLM",
        },
        unit="ngram",
    ),
    "electra": Family("wordpiece", {"rtd": "fastplm.models.ElectraForJointPreTraining"}),
    "gpt2": Family("bytelevel", {"clm": "transformers.GPT2LMHeadModel"}),
    "t5": Family("unigram", {"spans": "transformers.T5ForConditionalGeneration"}),
    "bart": Family("bytelevel", {"denoise": "transformers.BartForConditionalGeneration"}),
}


def choose_objective(arch: str, family: str, objective: str | None) -> str:
    """The objective of a run; the family's usual one where none is named.

    Raises:
        ArgumentValueError: the family cannot learn it.
    """
    able = tuple(FAMILIES[family].classes)
    if objective is None:
        return able[0]
    check_choice("pretrain", "objective", objective, tuple(OBJECTIVES))
    check(
        objective in able,
        "pretrain",
        "objective",
        f"{objective} with {arch}",
        f"{' or '.join(able)}, what {arch} can learn",
        "Leave the option out, or choose another architecture.",
    )
    return objective


def choose_unit(family: str, objective: str, unit: str | None) -> str | None:
    """What masks are made of: the family's usual unit; None where nothing is masked.

    Raises:
        ArgumentValueError: there is no such unit, or the objective masks none.
    """
    if not OBJECTIVES[objective].masks:
        check(
            unit is None,
            "pretrain",
            "unit",
            f"{unit} with objective {objective}",
            "no unit, as this objective does not mask tokens",
            "Leave the option out.",
        )
        return None
    if unit is None:
        return FAMILIES[family].unit
    check_choice("pretrain", "unit", unit, UNITS)
    return unit


def build_model(family: str, objective: str, config: Any) -> PreTrainedModel:
    """The untrained model of a family that learns an objective, with fused attention."""
    import fastplm.hf

    module, _, name = FAMILIES[family].classes[objective].rpartition(".")
    model_class = getattr(importlib.import_module(module), name)
    if module == "fastplm.models":
        return model_class(config)
    model = model_class._from_config(config, attn_implementation=fastplm.hf.NAME)
    if objective == "clm":
        # Transformers knows no loss by the name of GPT-2's class, and would count the labels of
        # a step without knowing that the model shifts them.
        model.loss_type = "ForCausalLM"
    return model


def _ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {"cls_token_id": tokenizer.cls_token_id, "sep_token_id": tokenizer.sep_token_id}
