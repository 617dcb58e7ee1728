"""The collator of BART's objective: the noised text in, the text itself out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fastplm.data._collate import TextCollator
from fastplm.data.collators import mask_token_id, special_ids
from fastplm.ops.bart_noise import bart_noise
from fastplm.reference.bart_noise import SPARE_SPANS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_END_OF_SENTENCE = (".", "!", "?")
#: What the collator hands on to the op.
_SETTINGS = (
    *("infill_probability", "poisson_lambda", "permute_sentences", "mask_probability"),
    *("delete_probability", "rotate_probability", "random_replace_prob"),
)


@dataclass(eq=False)
class DataCollatorForDenoising(TextCollator):
    """Batches for BART's denoising, as ``BartForConditionalGeneration`` takes them.

    The noise is a pure function of (seed, epoch, sample index): the same at any batch size, worker
    count and world size, on the CPU and on a GPU. BOS and EOS (where the tokenizer has none, CLS
    and SEP) stand around inputs and labels, whether the samples have them or not. Padding is not
    text and is taken off: what the ``attention_mask`` of a sample hides at either end or, without
    one, the padding tokens at its end.

    Args:
        tokenizer, seed, unpad: see ``Collator``; with ``unpad`` the noise is best made on a CPU.
        block_size: inputs and labels are padded to this length, BOS and EOS included; by default to
            that of the longest sample.
        packed: must be False; ``position_offset`` has no use then.
        infill_probability, poisson_lambda, permute_sentences, mask_probability,
        delete_probability, rotate_probability, random_replace_prob: see ``ops.bart_noise``. The
            defaults are BART's recipe: infilling of 30 % of the tokens, permutation of all
            sentences.
        sentence_end_ids: a sentence ends with one of these tokens; by default with any token of the
            vocabulary whose last character is ``.``, ``!`` or ``?``.

    Returns:
        A dict with ``input_ids`` (int64 [B, T], noised), ``attention_mask`` (int64 [B, T]),
        ``labels`` (int64 [B, T], the text, -100 for padding), ``sample_index`` (int64 [B]) and,
        where the samples have them, ``next_sentence_label`` and ``sentence_order_label``.

    Raises:
        ArgumentValueError: a sample does not fit ``block_size``, or a setting is out of its range.
        DataError: the tokenizer has no mask token, an ``attention_mask`` has gaps, or see
            ``Collator.pad``.
        UnsupportedError: ``packed=True``.

    Warns:
        UserWarning: tokens were cut, as inserted masks made a row longer than T, see ``dropped``;
            or see ``Collator.pad``.

    Source: Lewis et al. 2020 (arXiv 1910.13461), §2.2 and §5.1.
    """

    infill_probability: float = 0.3
    poisson_lambda: float = 3.0
    permute_sentences: float = 1.0
    mask_probability: float = 0.0
    delete_probability: float = 0.0
    rotate_probability: float = 0.0
    random_replace_prob: float = 0.1
    sentence_end_ids: Sequence[int] | None = None

    op: ClassVar[str | None] = "bart_noise"

    def __post_init__(self) -> None:
        super().__post_init__()
        tokenizer = self.tokenizer
        self._mask = mask_token_id(type(self).__name__, tokenizer)
        self._padding = self._pad_id
        self._bos = _first(tokenizer.bos_token_id, tokenizer.cls_token_id)
        self._eos = _first(tokenizer.eos_token_id, tokenizer.sep_token_id)
        self._edges = (self._bos is not None) + (self._eos is not None)
        self._vocab_size = len(tokenizer)
        ends = self.sentence_end_ids
        if ends is None:
            given = sentence_ends(tokenizer)
        else:
            given = torch.tensor(list(ends), dtype=torch.int64, device="cpu")
        self.keep(special_ids=special_ids(tokenizer), sentence_end_ids=given.unique())

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Noise the text, and make labels of it."""
        text: Tensor = batch["input_ids"]
        lengths: Tensor = batch["attention_mask"].sum(1)
        constants: dict[str, Any] = dict(self.constants(text.device))
        noised = bart_noise(
            text,
            vocab_size=self._vocab_size,
            mask_token_id=self._mask,
            pad_token_id=self._pad_id,
            bos_token_id=self._bos,
            eos_token_id=self._eos,
            **constants,
            **{name: getattr(self, name) for name in _SETTINGS},
            lengths=lengths,
            sample_index=batch["sample_index"],
            seed=self.seed,
            step=self._epoch,
        )
        self.count_dropped(noised.dropped, "Shorten the samples.")
        labels = self._labels(text, lengths[:, None])
        return self.corrupted(batch, noised.input_ids, noised.lengths, labels)

    @classmethod
    def expected_length(cls, tokens: int, **noise: float) -> float:
        """The mean number of tokens that the noise leaves of so many, before any is cut.

        A span of any length becomes one mask. Spans begin until m tokens are covered, so there is a
        span k + 1 if k spans, of Poisson lengths, cover fewer than m: the mean number of spans is
        the sum of P(Poisson(k lambda) < m) over k. Deletion spares the masks.

        Args:
            tokens: of a row, without special tokens.
            noise: settings of the noise that are not the defaults.
        """
        names = ("infill_probability", "poisson_lambda", "delete_probability")
        infilled, mean, deleted = (noise.get(name, getattr(cls, name)) for name in names)
        covered = math.floor(tokens * infilled + 0.5)  # halves up, as the op does
        before = mean * torch.arange(2 * covered + SPARE_SPANS, dtype=torch.float64, device="cpu")
        # P(Poisson(x) < m) is the regularized upper incomplete gamma function Q(m, x).
        fewer = torch.special.gammaincc(torch.full_like(before, covered), before)
        spans = float(fewer.sum()) if covered else 0.0
        return (tokens - covered) * (1 - deleted) + spans

    def _labels(self, text: Tensor, lengths: Tensor) -> Tensor:
        """BOS, the text, EOS, and -100 behind."""
        begin, end = int(self._bos is not None), int(self._eos is not None)
        labels = torch.nn.functional.pad(text, (begin, end), value=-100)
        if self._bos is not None:
            labels[:, 0] = self._bos
        column = torch.arange(labels.shape[1], device=text.device)
        labels.masked_fill_(column >= lengths + begin, -100)
        if self._eos is not None:
            labels.masked_fill_(column == lengths + begin, self._eos)
        return labels

    def _most(self) -> int:
        return super()._most() - self._edges

    def _room(self, longest: int) -> int:
        """Tokens of a row without BOS and EOS."""
        room = None if self.block_size is None else self.block_size - self._edges
        return self._fit(longest, room, f" and {self._edges} around them", self.block_size)


def sentence_ends(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The ids of tokens that end a sentence, by their last character: int64, ascending."""
    special = set(special_ids(tokenizer).tolist())
    ids = [
        token_id
        for token, token_id in tokenizer.get_vocab().items()
        if token.endswith(_END_OF_SENTENCE) and token_id not in special
    ]
    return torch.tensor(sorted(ids), dtype=torch.int64, device="cpu")


def _first(token_id: int | None, otherwise: int | None) -> int | None:
    return otherwise if token_id is None else token_id
