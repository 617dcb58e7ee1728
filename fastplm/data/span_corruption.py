"""The collator of T5's objective: spans of tokens become sentinels."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fastplm.data._collate import TextCollator
from fastplm.errors import DataError, check
from fastplm.ops.corrupt_spans import corrupt_spans, span_corruption_fit
from fastplm.reference.corrupt_spans import fixed_point_scales, span_counts

_LONGEST = 1 << 31


@dataclass(eq=False)
class DataCollatorForSpanCorruption(TextCollator):
    """Batches for T5's span corruption, as ``T5ForConditionalGeneration`` takes them.

    The spans are a pure function of (seed, epoch, sample index): the same at any batch size, worker
    count and world size, on the CPU and on a GPU. The sentinels are the tokenizer's
    ``<extra_id_0>``, ``<extra_id_1>``, …; the end of sequence follows inputs and labels, whether
    the samples have one or not. Padding is not text and is taken off: what the ``attention_mask``
    of a sample hides at either end or, without one, the padding tokens at its end.

    Args:
        tokenizer, seed, unpad: see ``Collator``; with ``unpad`` the spans are best made on a CPU.
        block_size: the most tokens of ``input_ids``, to which rows are padded; by default those of
            the longest row. Samples of ``span_corruption_fit(block_size)[0]`` tokens, 568 for
            T5's 512, fill it.
        packed: must be False; ``position_offset`` has no use then.
        noise_density: share of the tokens that leaves the input.
        mean_span_length: noise tokens a span.

    Attributes:
        raw_size, target_size: the most tokens of a sample, whose corrupted form fills
            ``block_size``, and of its labels; None without it.

    Returns:
        A dict with ``input_ids`` (int64 [B, Ti], corrupted), ``attention_mask`` (int64 [B, Ti]),
        ``labels`` (int64 [B, To], -100 where the label is padding), ``sample_index`` (int64 [B])
        and, where the samples have them, ``next_sentence_label`` and ``sentence_order_label``. Ti
        and To depend on ``block_size`` alone or, without it, on the longest sample.

    Raises:
        ArgumentValueError: a sample does not fit ``block_size``, or a setting is out of its range.
        DataError: the tokenizer has no ``<extra_id_0>``, an ``attention_mask`` has gaps, or see
            ``Collator.pad``.
        UnsupportedError: ``packed=True``.

    Warns:
        UserWarning: a sample has more spans than there are sentinels, and gets fewer, longer ones;
            or see ``Collator.pad``.

    Source: Raffel et al. 2020 (arXiv 1910.10683), §3.1.4.
    """

    noise_density: float = 0.15
    mean_span_length: float = 3.0

    op: ClassVar[str | None] = "corrupt_spans"

    def __post_init__(self) -> None:
        super().__post_init__()
        vocabulary = self.tokenizer.get_vocab()
        sentinels: list[int] = []
        while (token := f"<extra_id_{len(sentinels)}>") in vocabulary:
            sentinels.append(vocabulary[token])
        where, got = type(self).__name__, "one without <extra_id_0>"
        expected = "sentinels <extra_id_0>, <extra_id_1>, …"
        fix = "Add them with tokenizer.add_tokens(…, special_tokens=True), 100 as T5 has."
        check(len(sentinels) > 0, where, "tokenizer", got, expected, fix, DataError)
        self._sentinels = len(sentinels)
        self.keep(sentinel_ids=torch.tensor(sentinels, device="cpu"))
        self.raw_size: int | None = None
        self.target_size: int | None = None
        if self.block_size is not None:
            self.raw_size, self.target_size = span_corruption_fit(
                self.block_size,
                noise_density=self.noise_density,
                mean_span_length=self.mean_span_length,
                sentinels=len(sentinels),
                eos=self._eos is not None,
            )

    def corrupt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Replace the spans by sentinels, and make labels of them."""
        input_ids = batch["input_ids"]
        corrupted = corrupt_spans(
            input_ids,
            sentinel_ids=self.constants(input_ids.device)["sentinel_ids"],
            eos_token_id=self._eos,
            pad_token_id=self._pad_id,
            noise_density=self.noise_density,
            mean_span_length=self.mean_span_length,
            lengths=batch["attention_mask"].sum(1),
            sample_index=batch["sample_index"],
            seed=self.seed,
            step=self._epoch,
        )
        ids, lengths = corrupted.input_ids, corrupted.input_lengths
        return self.corrupted(batch, ids, lengths, corrupted.labels)

    def _most(self) -> int:
        return _LONGEST  # T5 has no table of positions

    def _room(self, longest: int) -> int:
        """Tokens of a row before its corruption."""
        most = f"{self.raw_size}, of which {self.block_size} are left in the input"
        size, sentinels = self._fit(longest, self.raw_size, most=most), self._sentinels
        scales = fixed_point_scales(self.noise_density, self.mean_span_length)
        _, spans, wanted = span_counts(longest, *scales, sentinels)
        if wanted > spans:
            warnings.warn(
                f"{type(self).__name__}: a sample of {longest} tokens has {wanted} spans, and the "
                f"tokenizer has {sentinels} sentinels; it gets {spans}, longer ones. Add "
                "<extra_id_…> tokens, or shorten the samples.",
                stacklevel=3,
            )
        return size
