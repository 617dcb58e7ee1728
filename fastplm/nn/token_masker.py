"""BERT's masking as a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastplm import ops
from fastplm.reference.mask_tokens import MaskedTokens


class TokenMasker(nn.Module):
    """Chooses the tokens to predict and corrupts them; holds the options of ``ops.mask_tokens``.

    Args:
        vocab_size: random ids are drawn below it.
        mask_token_id: id of [MASK].
        mlm_probability: the fraction of the maskable tokens that is chosen.
        mask_replace_prob: the fraction of the chosen tokens that is replaced by [MASK].
        random_replace_prob: the fraction of the chosen tokens that is replaced by a random token.
        max_predictions: the maximum of tokens chosen in a sequence; default that of a full one.
        special_ids: ids that are neither chosen nor used as random tokens.
        sampling: "exact" or "bernoulli".
        unit: what is chosen as a whole: "token", "word" or "ngram".
        max_ngram: the maximum number of words in an n-gram.
        seed: of all random choices.

    Source: Devlin et al. 2018 (arXiv 1810.04805), §3.1.
    """

    def __init__(
        self,
        vocab_size: int,
        mask_token_id: int,
        *,
        mlm_probability: float = 0.15,
        mask_replace_prob: float = 0.8,
        random_replace_prob: float = 0.1,
        max_predictions: int | None = None,
        special_ids: Sequence[int] = (),
        sampling: str = "exact",
        unit: str = "token",
        max_ngram: int = 3,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.mask_token_id = mask_token_id
        self.mlm_probability = mlm_probability
        self.mask_replace_prob = mask_replace_prob
        self.random_replace_prob = random_replace_prob
        self.max_predictions = max_predictions
        self.sampling = sampling
        self.unit = unit
        self.max_ngram = max_ngram
        self.seed = seed
        self.special_ids: Tensor | None
        ids = sorted(set(special_ids or ()))
        self.register_buffer("special_ids", torch.tensor(ids) if ids else None, persistent=False)

    def forward(
        self,
        input_ids: Tensor,
        maskable: Tensor | None = None,
        sample_index: Tensor | None = None,
        step: int = 0,
        word_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> MaskedTokens:
        """Mask a batch; see ``ops.mask_tokens``.

        Args:
            input_ids: int64 [B, T], or [N] with ``cu_seqlens``.
            maskable: bool, the shape of ``input_ids``, True = may be chosen; default all.
            sample_index: int64 [B], the sample indices; default 0 ... B-1.
            step: another step makes independent choices for the same samples.
            word_ids: int64, the shape of ``input_ids``; needed for the units "word" and "ngram".
            cu_seqlens: int32 [B + 1], the boundaries of packed rows.

        Returns:
            ``MaskedTokens``: input_ids, positions [P], labels [P], count, dropped.

        Raises:
            ArgumentValueError, ArgumentTypeError: as ``ops.mask_tokens``.
        """
        return ops.mask_tokens(
            input_ids,
            vocab_size=self.vocab_size,
            mask_token_id=self.mask_token_id,
            maskable=maskable,
            mlm_probability=self.mlm_probability,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
            max_predictions=self.max_predictions,
            special_ids=self.special_ids,
            sampling=self.sampling,
            unit=self.unit,
            word_ids=word_ids,
            max_ngram=self.max_ngram,
            cu_seqlens=cu_seqlens,
            sample_index=sample_index,
            seed=self.seed,
            step=step,
        )

    def extra_repr(self) -> str:
        return (
            f"vocab_size={self.vocab_size}, mask_token_id={self.mask_token_id}, "
            f"mlm_probability={self.mlm_probability}, unit={self.unit!r}, seed={self.seed}"
        )
