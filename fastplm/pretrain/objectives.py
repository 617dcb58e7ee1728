"""The pre-training objectives, each with all that is special about it in one class.

The command line reads these classes, too: nothing here imports PyTorch before it needs it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fastplm.run.flops import MASKED, flops_a_token

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedTokenizerBase

    from fastplm.data import Collator, PretrainingStream, TokenStore

#: BART's transformations, each with its setting of ``DataCollatorForDenoising``. The shares of
#: infilling and permutation are those of the published models. Lewis et al. 2020, §2.2, mask "as
#: BERT" and give no share of deletion, which here is the same.
NOISES: Mapping[str, tuple[str, float]] = {
    "token_masking": ("mask_probability", 0.15),
    "token_deletion": ("delete_probability", 0.15),
    "text_infilling": ("infill_probability", 0.3),
    "sentence_permutation": ("permute_sentences", 1.0),
    "document_rotation": ("rotate_probability", 1.0),
}


@dataclass(frozen=True)
class Objective:
    """How a model learns from text.

    Args:
        tokenizer: of the text.
        block_size: tokens of a sample.
        seed: of samples and noise.
        noise: settings of the collator.
        separators: whether the separator token stands between two documents of a block.
        copies: the ways in which each block is masked in the whole training; None = ever new ones.
        short_block_size: the tokens of the pieces into which the samples of the first steps are
            cut; None = all are whole.
        short_share: the share of these steps.
    """

    tokenizer: PreTrainedTokenizerBase
    block_size: int
    seed: int = 0
    noise: Mapping[str, Any] = field(default_factory=dict)
    separators: bool = False
    copies: int | None = None
    short_block_size: int | None = None
    short_share: float = 0.0

    #: What ``--objective`` calls it.
    name: ClassVar[str]
    #: The class of ``fastplm.models`` that learns it, for each family that can.
    models: ClassVar[Mapping[str, str]]
    #: The name of the loss over tokens, to which one over pairs may be added.
    token_loss: ClassVar[str]
    #: Whether that loss may be compared with those of a unigram and a bigram.
    beside_ngrams: ClassVar[bool] = True
    #: The class of ``fastplm.data`` that makes its batches.
    collator_class: ClassVar[str]
    #: The special tokens of a sample.
    special: ClassVar[int] = 0
    #: What a tokenizer must have, see ``load_tokenizer``.
    needs: ClassVar[tuple[str, ...]] = ("pad", "mask", "cls", "sep")
    #: The usual shares of the chosen tokens that become [MASK], and another token; None: it chooses
    #: no tokens to mask.
    shares: ClassVar[tuple[float, float] | None] = None
    #: Whether it has blocks of several documents, static masks, or short blocks first.
    has_separators: ClassVar[bool] = False
    has_static_masks: ClassVar[bool] = False
    has_short_blocks: ClassVar[bool] = False
    #: Whether a sample is a pair of segments, and whether ELECTRA's two models learn together.
    has_pairs: ClassVar[bool] = False
    is_joint: ClassVar[bool] = False
    #: Whether an encoder gets a causal mask.
    causal: ClassVar[bool] = False
    #: Whether a checkpoint of the encoder will do to begin with, whatever its heads.
    new_heads: ClassVar[bool] = False
    #: The folder of the model that a run is made for.
    folder: ClassVar[str] = "model"
    #: The version of its samples: those of a run with another one are others.
    pairs_version: ClassVar[int | None] = None
    #: What a change that may change its results raises, see ``study/keys.py``.
    version: ClassVar[int | None] = None

    @classmethod
    def noise_of(cls, plan: Any) -> dict[str, Any]:
        """The settings of the collator, from those of a run."""
        return {}

    # --- lengths ---

    @property
    def tokens(self) -> int:
        """The tokens of text that one sample needs."""
        return self.block_size - self.special

    @property
    def pieces(self) -> int:
        """The pieces of a sample in the steps with short blocks."""
        return self.block_size // (self.short_block_size or self.block_size)

    def mean_length(self, block_size: int) -> float:
        """The tokens of a full sample of this size that the model, or its encoder, reads; in the
        mean where samples differ. It needs no tokenizer."""
        return block_size

    @property
    def _lengths(self) -> list[tuple[float, float]]:
        """The tokens that short pieces of a mean sample have, and whole samples; how long each."""
        share, whole = self.short_share, self.mean_length(self.block_size)
        if self.short_block_size is None:
            return [(whole, whole)]
        short = self.mean_length(self.short_block_size)
        return [(share * self.pieces * short, short), ((1 - share) * whole, whole)]

    @property
    def source_length(self) -> float:
        """The mean over all steps of ``mean_length``, for what stands in the place of a sample."""
        return sum(tokens for tokens, _ in self._lengths)

    @property
    def target_length(self) -> int:
        """The tokens of a decoder for a full sample; 0 without one."""
        return 0

    def tokens_of(self, samples: float) -> float:
        """The tokens of both sides of so many full samples, in the mean."""
        return samples * (self.source_length + self.target_length)

    def flops_a_token(self, config: Any) -> float:
        """The FLOPs of forward and backward, for each token of full samples."""
        masked = self.noise.get("mlm_probability", MASKED)
        return sum(
            tokens
            / self.source_length
            * flops_a_token(config, round(length), self.target_length, masked=masked)
            for tokens, length in self._lengths
        )

    # --- samples ---

    def lacks(self, store: TokenStore) -> str:
        """What a store has too little of for one sample; empty if it gives one."""
        return "" if len(store) >= self.tokens else _too_few("token", len(store), self.tokens)

    def source(self, store: TokenStore) -> Dataset:
        """The pieces of the corpus that a training stream shuffles; at least one."""
        from fastplm.data import BlockDataset

        return BlockDataset(store, self.tokens)

    def samples(self, stream: PretrainingStream) -> Dataset:
        """The stream itself, or what is made of each of its elements."""
        return stream

    def dataset(
        self, store: TokenStore, length: int | None = None, at_most: int | None = None
    ) -> Dataset:
        """The training stream over a store; by default each block or run of sentences once."""
        from fastplm.data import PretrainingStream

        source: Any = self.source(store)
        length = length or len(source)
        length = length if at_most is None else min(length, at_most)
        stream = PretrainingStream(source, seed=self.seed, length=length, copies=self.copies)
        return self.samples(stream)

    def short_first(self, samples: Dataset, store: TokenStore, short: list[range]) -> Dataset:
        """The samples of a run, of which those with the indices ``short`` are short ones."""
        from fastplm.pretrain.blocks import ShortBlocks

        return ShortBlocks(samples, self.pieces, short)

    # --- batches and models ---

    def collator(self, **settings: Any) -> Collator:
        """Pads samples (``pad``) and corrupts them (``corrupt``); called, it does both.

        Args:
            settings: other ones than the run's.
        """
        from fastplm import data

        kind = getattr(data, self.collator_class)
        names = ("mask_replace_prob", "random_replace_prob")
        usual = dict(zip(names, self.shares, strict=True)) if self.shares else {}
        settings = {**usual, **self.noise, **settings}
        return kind(self.tokenizer, seed=self.seed, block_size=self.block_size, **settings)

    def eval_collator(self) -> Collator:
        """The collator of held-out text."""
        return self.collator()

    @staticmethod
    def saved(model: Any) -> dict[str, Any]:
        """The models that are saved, by the names of their folders."""
        return {"model": model}


#: The families with a generator and a discriminator.
JOINT_FAMILIES = ("electra", "deberta-v3")


class MaskedTokens(Objective):
    """Masked language modelling: BERT's 80 % ``[MASK]``, 10 % random, 10 % unchanged."""

    name = "mlm"
    models = {
        "bert": "BertForMaskedLM",
        "roberta": "RobertaForMaskedLM",
        "albert": "AlbertForMaskedLM",
        "electra": "ElectraForMaskedLM",
        "distilbert": "DistilBertForMaskedLM",
        "xlm-roberta": "XLMRobertaForMaskedLM",
        "roberta-prelayernorm": "RobertaPreLayerNormForMaskedLM",
        "modernbert": "ModernBertForMaskedLM",
        "deberta-v3": "DebertaV2ForMaskedLM",
    }
    token_loss = "mlm_loss"
    collator_class = "DataCollatorForMaskedTokens"
    special = 2
    shares = (0.8, 0.1)
    has_separators = has_static_masks = has_short_blocks = new_heads = True

    @classmethod
    def noise_of(cls, plan: Any) -> dict[str, Any]:
        names = ("mlm_probability", "mask_replace_prob", "random_replace_prob")
        return dict(zip(names, plan.mask_shares, strict=True)) | {"unit": plan.unit}

    @property
    def ends(self) -> dict[str, int]:
        """The tokens around a segment."""
        names = ("cls_token_id", "sep_token_id")
        return {name: getattr(self.tokenizer, name) for name in names}

    def source(self, store: TokenStore) -> Dataset:
        from fastplm.data import BlockDataset
        from fastplm.pretrain.blocks import DocumentBlocks

        size, ends = self.block_size, self.ends
        if self.separators:
            return DocumentBlocks(store, size, ends["sep_token_id"], **ends)
        return BlockDataset(store, size, **ends)

    def eval_collator(self) -> Collator:
        """15 % of the tokens, each of them ``[MASK]``, with whatever masks the model has learned.

        So masked models have comparable losses. A token that is left as it is can be copied, so
        where some are, the loss is below that of the tokens' frequency with nothing learned.
        """
        return self.collator(
            mlm_probability=MASKED, mask_replace_prob=1.0, random_replace_prob=0.0, unit="token"
        )


class ReplacedTokens(MaskedTokens):
    """ELECTRA and DeBERTa-v3: every token chosen for the generator becomes ``[MASK]``, unless asked
    otherwise."""

    name = "rtd"
    models = dict.fromkeys(JOINT_FAMILIES, "ElectraForJointPreTraining")
    shares = (1.0, 0.0)
    has_static_masks = new_heads = False
    is_joint = True
    folder = "discriminator"
    version = 1

    @staticmethod
    def saved(model: Any) -> dict[str, Any]:
        both = {"discriminator": model.discriminator, "generator": model.generator}
        return {name: part for name, part in both.items() if part is not None}


class SentenceOrder(MaskedTokens):
    """Masked language modelling over pairs of segments, which are in their order or not."""

    name = "mlm+sop"
    models = {"bert": "BertForPreTraining", "albert": "AlbertForPreTraining"}
    special = 3
    has_separators = has_static_masks = False
    has_pairs = True
    version = 2
    #: The class of ``fastplm.data`` of its pairs, and the documents that a pair needs.
    pairs: ClassVar[str] = "SentenceOrderPairs"
    documents: ClassVar[int] = 1

    def mean_length(self, block_size: int) -> float:
        return self._pairs.expected_length(block_size)

    def lacks(self, store: TokenStore) -> str:
        documents = len(store.documents) - 1
        if documents < self.documents:
            return _too_few("document", documents, self.documents)
        # With more tokens than documents, one of these has two tokens and gives two segments.
        return super().lacks(store) or (
            "" if len(store) > documents else "documents of one token each"
        )

    def source(self, store: TokenStore) -> Dataset:
        from fastplm.data import SentenceChunks

        return SentenceChunks(store, self.block_size)

    def samples(self, stream: PretrainingStream) -> Dataset:
        return self._pairs(stream, **self.ends)

    def short_first(self, samples: Dataset, store: TokenStore, short: list[range]) -> Dataset:
        from fastplm.data import PretrainingStream, SentenceChunks
        from fastplm.pretrain.blocks import ShortPairs

        source, length = SentenceChunks(store, self.block_size // self.pieces), sum(map(len, short))
        stream = PretrainingStream(source, seed=self.seed, length=length * self.pieces)
        return ShortPairs(self.samples(stream), samples, self.pieces, short)

    @property
    def _pairs(self) -> Any:
        from fastplm import data

        return getattr(data, self.pairs)


class NextSentence(SentenceOrder):
    """The same over pairs whose second segment follows the first, or is of another document."""

    name = "mlm+nsp"
    pairs = "NextSentencePairs"
    documents = 2
    pairs_version = 2  # the pair of a run of one sentence is a random one


class CausalTokens(Objective):
    """Each token from those before it, the end of each document among them."""

    name = "clm"
    models = {"gpt": "OpenAIGPTLMHeadModel", "gpt2": "GPT2LMHeadModel"}
    token_loss = "clm_loss"
    collator_class = "DataCollatorForCausalTokens"
    needs: ClassVar[tuple[str, ...]] = ("eos",)
    has_short_blocks = True

    def source(self, store: TokenStore) -> Dataset:
        from fastplm.pretrain.blocks import DocumentBlocks

        return DocumentBlocks(store, self.block_size, self.tokenizer.eos_token_id)


class LeftToRight(CausalTokens):
    """The same for an encoder with a causal mask: ``[CLS] …``, each document ended by ``[SEP]``.

    So a block begins and ends its texts with the tokens that fine-tuning puts around them.

    Source: Devlin et al. 2019 (arXiv 1810.04805), §5.1, "LTR & No NSP".
    """

    models = {
        "bert": "BertLMHeadModel",
        "roberta": "RobertaForCausalLM",
        "electra": "ElectraForCausalLM",
    }
    special = 1
    needs = ("pad", "cls", "sep")
    causal = new_heads = True

    def source(self, store: TokenStore) -> Dataset:
        from fastplm.pretrain.blocks import DocumentBlocks

        ids = self.tokenizer
        return DocumentBlocks(
            store, self.block_size, ids.sep_token_id, cls_token_id=ids.cls_token_id
        )


class Spans(Objective):
    """T5: spans become sentinels, and the decoder says what was there.

    A block is as long as its corrupted form, the encoder's input, fits ``block_size``.
    """

    name = "spans"
    models = {"t5": "T5ForConditionalGeneration"}
    token_loss = "spans_loss"
    version = 2
    beside_ngrams = False
    collator_class = "DataCollatorForSpanCorruption"
    needs = ("pad", "eos", "<extra_id_0>")

    @property
    def tokens(self) -> int:
        # It depends on the number of sentinels, which the collator has looked up.
        collator: Any = self.collator()
        return collator.raw_size

    @property
    def target_length(self) -> int:
        collator: Any = self.collator()
        return collator.target_size


class Denoising(Objective):
    """BART: sentences permuted and spans infilled, or other noise; the decoder says the original.

    The beginning and the end of a text are put around it after the noise.
    """

    name = "denoise"
    models = {"bart": "BartForConditionalGeneration"}
    token_loss = "denoise_loss"
    version = 3
    beside_ngrams = False
    collator_class = "DataCollatorForDenoising"
    special = 2
    needs = ("pad", "mask", "bos", "eos")

    @classmethod
    def noise_of(cls, plan: Any) -> dict[str, Any]:
        if plan.noise is None:
            return {}
        return {
            setting: share if name in plan.noise else 0.0
            for name, (setting, share) in NOISES.items()
        }

    def mean_length(self, block_size: int) -> float:
        from fastplm.data import DataCollatorForDenoising

        text = block_size - self.special
        return DataCollatorForDenoising.expected_length(text, **self.noise) + self.special

    @property
    def target_length(self) -> int:
        return self.block_size


#: All objectives; that of an encoder and that of a decoder may have one name.
OBJECTIVES: tuple[type[Objective], ...] = (
    *(NextSentence, SentenceOrder, MaskedTokens, LeftToRight, CausalTokens, ReplacedTokens),
    *(Spans, Denoising),
)
#: Their names, and of them those that choose tokens to mask.
NAMES = tuple(dict.fromkeys(kind.name for kind in OBJECTIVES))
MASKING = tuple(kind.name for kind in OBJECTIVES if kind.shares is not None)


def names_of(has: str) -> tuple[str, ...]:
    """The names of the objectives that have something, such as ``has_static_masks``."""
    return tuple(dict.fromkeys(kind.name for kind in OBJECTIVES if getattr(kind, has)))


def learned_as(name: str, family: str) -> type[Objective]:
    """The objective of a name that a family of architectures learns."""
    return next(kind for kind in OBJECTIVES if kind.name == name and family in kind.models)


def objective_of(plan: Any, tokenizer: PreTrainedTokenizerBase) -> Objective:
    """How the model of a pre-training learns."""
    kind = learned_as(plan.objective, plan.preset.family)
    return kind(
        tokenizer,
        plan.block_size,
        plan.seed,
        kind.noise_of(plan),
        separators=plan.separators,
        copies=plan.static_masks,
        short_block_size=plan.short_block_size,
        short_share=plan.short_share,
    )


def _too_few(what: str, there: int, needed: int) -> str:
    return f"{there:,} {what}{'' if there == 1 else 's'}, of {needed:,} that a sample takes"
