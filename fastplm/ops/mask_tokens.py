"""``ops.mask_tokens``: the public function, and its backends.

``reference/mask_tokens.py`` declares the arguments, as the reference takes them, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastplm._checks import check_int, check_number, check_probability, check_tensor
from fastplm._registry import Op
from fastplm.errors import check_choice, fail
from fastplm.ops._common import cached_by_settings, csrc_rejects, seed_tensor
from fastplm.reference._token_rows import check_boundary_values, check_input_ids, check_step
from fastplm.reference.mask_tokens import (
    MAX_NGRAM,
    UNITS,
    Call,
    MaskedTokens,
    mask_plan,
    mask_tokens_by_plan,
    mask_tokens_ref,
    shape_of_rows,
)

_UNITS = (*UNITS, "ngram")
_SAMPLINGS = ("exact", "bernoulli")
_WHERE = "mask_tokens"


def mask_tokens(
    input_ids: Tensor,
    *,
    vocab_size: int,
    mask_token_id: int,
    maskable: Tensor | None = None,
    special_ids: Tensor | None = None,
    mlm_probability: float = 0.15,
    mask_replace_prob: float = 0.8,
    random_replace_prob: float = 0.1,
    max_predictions: int | None = None,
    sampling: str = "exact",
    unit: str = "token",
    word_ids: Tensor | None = None,
    max_ngram: int = 3,
    cu_seqlens: Tensor | None = None,
    sample_index: Tensor | None = None,
    seed: int | Tensor,
    step: int = 0,
) -> MaskedTokens:
    """Choose the tokens to predict, corrupt them, and compact their places, in one pass.

    Among the ``n > 0`` maskable tokens of a row exactly
    ``k = min(capacity, max(1, round(mlm_probability * n)))`` are chosen, halves rounded up; every
    set of k is equally likely. A chosen token becomes ``mask_token_id`` with probability
    ``mask_replace_prob``, a random id of the vocabulary with ``random_replace_prob``, and else
    stays. ``capacity = max_predictions``, or ``max(1, round(mlm_probability * T))``.

    With ``sampling="bernoulli"`` each token is chosen by itself with ``mlm_probability``, as the
    collator of Transformers does it; the capacity is then at least six standard deviations above
    the expected number. With ``unit="word"`` or ``"ngram"`` whole words, or runs of words, are
    chosen: in random order each is taken if all of its tokens still fit in the k of the row, as
    BERT's and ALBERT's authors do it. A row falls into runs of n words with ``p(n)`` proportional
    to ``1 / n``; each token is corrupted by a draw of its own. The chosen ones are a bit shorter,
    as long runs fit less often in what is left of k, in short rows above all; so are those of
    ALBERT's authors (docs/corruption.md has the shares).

    Args:
        input_ids: int64 or int32 [B, T], or [N] with ``cu_seqlens``; any strides.
        vocab_size: random ids are drawn from 0 … vocab_size - 1.
        mask_token_id: id of [MASK].
        maskable: bool, the shape of ``input_ids``, True = may be chosen (neither special nor
            padding); default all.
        special_ids: int64 [S], ascending, each once: tokens that are neither chosen nor drawn as a
            random id; default none.
        mlm_probability: share of the maskable tokens to choose, in (0, 1].
        mask_replace_prob, random_replace_prob: as above; their sum is at most 1.
        max_predictions: most tokens to choose in a row; what it forbids is counted in ``dropped``.
        sampling: "exact" or "bernoulli".
        unit: "token", "word" or "ngram".
        word_ids: int64, the shape of ``input_ids``, for the last two: neighbours with the same id
            are of one word. A token that may not be chosen ends a word and a run.
        max_ngram: most words in a run, 2 … 8.
        cu_seqlens: int32 [B + 1], ascending from 0: ``input_ids`` [N] holds B rows one after the
            other, row b from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. Tokens past the last
            one are spare capacity and stay as they are. Boundaries that fall are an error on the
            CPU; on CUDA, where finding them would wait for the device, nothing is chosen then.
        sample_index: int64 [B], the place of each row in the training stream; default 0 … B - 1.
            A row's choice depends on this alone, so neither the batch nor the padding changes it.
        seed: int, or 0-d int64 tensor on the device of ``input_ids`` (which a captured graph can
            advance).
        step: gives the same sample a fresh choice, e.g. the epoch; 0 … 2^28 - 1.

    Returns:
        MaskedTokens, with P fixed by the shapes: B * capacity, or for packed rows without
        ``max_predictions`` what all of them can ask for, ``floor(mlm_probability * N) + B`` and
        never more than N ("bernoulli": the capacity of a row of N tokens):

        - input_ids, shape and dtype of ``input_ids``: the corrupted tokens.
        - positions int64 [P]: places of the chosen tokens in the flattened ``input_ids``,
          ascending; the slots from ``count`` on are unused and hold -1.
        - labels int64 [P]: the tokens that stood there; -100 in unused slots.
        - count int64 []: how many were chosen.
        - dropped int64 []: how many more the rows ask for than there is room.

    Determinism:
        A pure function of its arguments, the same bits on every backend and device, for padded and
        packed rows. 32 random bits are a token's rank; tokens of equal rank, which matters for one
        row in 2^32 / T, are ordered by position. 64 other bits decide what a chosen token becomes.
        Probabilities are rounded to multiples of 2^-32. Nothing waits for the device, except the
        reference on packed rows.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ids = torch.arange(10, 30).view(2, 10)
        >>> masked = ops.mask_tokens(ids, vocab_size=100, mask_token_id=4, seed=0)
        >>> masked.input_ids
        tensor([[10, 11, 12, 13, 14, 15, 16,  4,  4, 19],
                [20, 21, 22,  4, 24, 25, 26, 27,  4, 29]])
        >>> masked.positions, masked.labels
        (tensor([ 7,  8, 13, 18]), tensor([17, 18, 23, 28]))

    Source: Devlin et al. 2018 (arXiv 1810.04805), appendix A.1, and ``create_pretraining_data.py``
        of its authors for the exact count in a row and for whole words; Lan et al. 2020 (arXiv
        1909.11942), §4.2, for runs of words; Salmon et al. 2011 for the random bits.
    Reference: ``fastplm.reference.mask_tokens.mask_tokens_ref``.
    """
    check_input_ids(_WHERE, input_ids, cu_seqlens)
    if cu_seqlens is not None:
        check_tensor(_WHERE, "cu_seqlens", cu_seqlens, ndim=1)
    check_step(_WHERE, step)
    shares = mlm_probability, mask_replace_prob, random_replace_prob
    special_count, has_words = _count(special_ids), word_ids is not None
    settings = mask_settings(
        *shape_of_rows(input_ids, cu_seqlens),
        *(special_count, has_words, vocab_size, mask_token_id, *shares),
        *(max_predictions, sampling, unit, max_ngram),
    )
    seed = seed_tensor(_WHERE, seed, input_ids)
    call = Call(
        input_ids, maskable, special_ids, word_ids, cu_seqlens, sample_index, seed, step, *settings
    )
    return MaskedTokens(*OP(call))


def _count(special_ids: Tensor | None) -> int:
    if special_ids is None:
        return 0
    check_tensor(_WHERE, "special_ids", special_ids, ndim=1)
    return special_ids.shape[0]


@cached_by_settings
def mask_settings(
    rows: int,
    length: int | None,
    tokens: int,
    special_count: int,
    has_words: bool,
    vocab_size: int,
    mask_token_id: int,
    mlm_probability: float,
    mask_replace_prob: float,
    random_replace_prob: float,
    max_predictions: int | None,
    sampling: str,
    unit: str,
    max_ngram: int,
) -> tuple[int, ...]:
    """Checks what is no tensor; the operator's arguments that follow from it, in their order."""
    check_int(_WHERE, "vocab_size", vocab_size, 1, 2**31, "Pass the length of the tokenizer.")
    fix = "Pass tokenizer.mask_token_id and its length."
    check_int(_WHERE, "mask_token_id", mask_token_id, 0, vocab_size, fix)
    if special_count >= vocab_size:
        fail(
            _WHERE,
            "special_ids",
            f"{special_count} of {vocab_size} ids",
            "fewer than the vocabulary has, or there is no random id to draw",
            "Pass only the ids of the special tokens.",
        )
    if max_predictions is not None:
        fix = "Leave it out for the default."
        check_int(_WHERE, "max_predictions", max_predictions, 1, 2**31, fix)
    expected, least, fix = "a number above 0 and at most 1", math.ulp(0.0), "BERT uses 0.15."
    check_number(_WHERE, "mlm_probability", mlm_probability, least, 1.0, expected, fix)
    fix = "BERT uses 0.8 and 0.1."
    check_probability(_WHERE, "mask_replace_prob", mask_replace_prob, fix)
    check_probability(_WHERE, "random_replace_prob", random_replace_prob, fix)
    # The slack is what fixed-point probabilities cannot tell apart.
    if mask_replace_prob + random_replace_prob > 1 + 2**-32:
        fail(
            _WHERE,
            "random_replace_prob",
            random_replace_prob,
            f"at most 1 - mask_replace_prob = {1 - mask_replace_prob}",
            "The two are shares of the chosen tokens; the rest stays as it is.",
        )
    check_choice(_WHERE, "unit", unit, _UNITS)
    if has_words != (unit != "token"):
        fail(
            _WHERE,
            "word_ids",
            "a tensor" if has_words else "none",
            f"{'none' if unit == 'token' else 'a tensor'} with unit={unit!r}",
            "fastplm.data.word_ids makes them for a tokenizer; tokens one by one need none.",
        )
    check_int(_WHERE, "max_ngram", max_ngram, 2, MAX_NGRAM + 1, "ALBERT uses 3.")
    check_choice(_WHERE, "sampling", sampling, _SAMPLINGS)
    shares = mlm_probability, mask_replace_prob, random_replace_prob
    plan = mask_plan(rows, length, tokens, *shares, max_predictions, sampling)
    return (*plan, mask_token_id, vocab_size, UNITS.get(unit, max_ngram))


# --- backends: the reference, and one operator of csrc/, dispatched by device ---------------------


def _reference(call: Call) -> MaskedTokens:
    # Here and not where the op is called: a compiled caller could not look at the values.
    check_boundary_values(_WHERE, call)
    return mask_tokens_by_plan(*call)


def _compiled(call: Call) -> tuple[Tensor, ...]:
    check_boundary_values(_WHERE, call)
    return torch.ops.fastplm_C.mask_tokens(*call)


# --- registration ---------------------------------------------------------------------------------


def _fake(call: Call, backend: str) -> tuple[Tensor, ...]:
    ids = call.input_ids
    sizes = (call.slots,), (call.slots,), (), ()
    return ids.new_empty(ids.shape), *(ids.new_empty(size, dtype=torch.int64) for size in sizes)


def _smoke(device: torch.device) -> None:
    tokens = torch.arange(8, device=device)[None]
    mask_tokens(tokens, vocab_size=8, mask_token_id=0, maskable=tokens > 1, seed=0)


OP = Op(
    "mask_tokens",
    Call,
    results=MaskedTokens._fields,
    fake=_fake,
    reference=mask_tokens_ref,
    # Behind the operator, too: with no gradient nothing is lost, and Inductor takes minutes over
    # the integer arithmetic of Philox.
    eager=_reference,
    smoke=_smoke,
)
OP.backend("cpp", forward=_compiled, rejects=csrc_rejects("mask_tokens"))
OP.backend("cuda", forward=_compiled, rejects=csrc_rejects("mask_tokens", "CUDA"))
