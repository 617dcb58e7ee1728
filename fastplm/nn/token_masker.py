"""BERT's masking as a module."""

from __future__ import annotations

from torch import Tensor, nn

from fastplm import ops
from fastplm.reference.mask_tokens import MaskedTokens


class TokenMasker(nn.Module):
    """Chooses the tokens to predict and corrupts them; holds what stays the same over a run.

    Args:
        vocab_size: random ids are drawn below it.
        mask_token_id: id of [MASK].
        mlm_probability: share of the maskable tokens that is chosen.
        mask_replace_prob: share of the chosen tokens that becomes [MASK].
        random_replace_prob: share of the chosen tokens that becomes a random token.
        max_predictions: most tokens chosen in a row; default the share of a full row.
        seed: of all choices.

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
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.mask_token_id = mask_token_id
        self.mlm_probability = mlm_probability
        self.mask_replace_prob = mask_replace_prob
        self.random_replace_prob = random_replace_prob
        self.max_predictions = max_predictions
        self.seed = seed

    def forward(
        self,
        input_ids: Tensor,
        maskable: Tensor | None = None,
        sample_index: Tensor | None = None,
        step: int = 0,
    ) -> MaskedTokens:
        """Mask a batch; see ``ops.mask_tokens``.

        Args:
            input_ids: int64 [B, T].
            maskable: bool [B, T], True = may be chosen; default all.
            sample_index: int64 [B], the samples' places in the training stream; default 0 ... B-1.
            step: advances independent draws for the same samples.

        Returns:
            ``MaskedTokens``: input_ids [B, T], positions [P], labels [P], count.

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
            sample_index=sample_index,
            seed=self.seed,
            step=step,
        )

    def extra_repr(self) -> str:
        return (
            f"vocab_size={self.vocab_size}, mask_token_id={self.mask_token_id}, "
            f"mlm_probability={self.mlm_probability}, seed={self.seed}"
        )
