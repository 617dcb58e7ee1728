"""``ops.bart_noise``: the public function, and its backends.

``reference/bart_noise.py`` declares the arguments, as the reference takes them, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastplm._checks import check_int, check_number, check_probability
from fastplm._registry import Op
from fastplm.errors import fail
from fastplm.ops._common import csrc_rejects, seed_tensor
from fastplm.reference._token_rows import check_input_ids, check_rows, check_step, rows_of
from fastplm.reference.bart_noise import (
    SHARES,
    Call,
    NoisedText,
    bart_noise_by_plan,
    bart_noise_ref,
)

_WHERE = "bart_noise"


def bart_noise(
    input_ids: Tensor,
    *,
    vocab_size: int,
    mask_token_id: int,
    pad_token_id: int,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    sentence_end_ids: Tensor | None = None,
    special_ids: Tensor | None = None,
    mask_probability: float = 0.0,
    delete_probability: float = 0.0,
    infill_probability: float = 0.3,
    poisson_lambda: float = 3.0,
    permute_sentences: float = 1.0,
    rotate_probability: float = 0.0,
    random_replace_prob: float = 0.1,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    capacity: int | None = None,
    sample_index: Tensor | None = None,
    seed: int | Tensor,
    step: int = 0,
) -> NoisedText:
    """Corrupt text as BART does: any mix of its five transformations, in one pass.

    A row of n tokens goes through these steps, each of which its default or a 0 can switch off:

    1. Sentence permutation: ``round(permute_sentences * sentences)`` of its sentences, any of them
       equally likely, are shuffled among their sites.
    2. Document rotation, with ``rotate_probability``: the row begins with a token drawn uniformly.
    3. Text infilling: spans with lengths from ``Poisson(poisson_lambda)`` are drawn until they
       cover ``m = round(infill_probability * n)`` tokens; the last one drawn is cut to fit. In an
       order of which each rotation is equally likely they are laid between the ``n - m`` tokens
       kept, every layout equally likely. Each becomes one mask: a span of length 0 inserts it, and
       spans that touch leave one mask each.
    4. Token masking, with ``mask_probability``, and token deletion, with ``delete_probability``, of
       each token that is left.

    Halves are rounded up. A mask, of a span or of a token, is a random id instead with
    ``random_replace_prob``. The defaults are BART's: infilling of 30 % of the tokens and
    permutation of all sentences.

    Args:
        input_ids: int64 or int32 [B, T], or [N] with ``cu_seqlens``; any strides. Tokens of text
            alone, without special ones.
        vocab_size: random ids are drawn from 0 … vocab_size - 1.
        mask_token_id, pad_token_id: ids of the mask and of the padding of the output.
        bos_token_id, eos_token_id: put before and after each row, if given.
        sentence_end_ids: int64 [K], ascending: a sentence ends with one of these tokens, or with
            the row. Default none: a row is one sentence.
        special_ids: int64 [S], ascending, each once: never drawn as a random id; default none.
        mask_probability, delete_probability: as above; their sum is at most 1.
        infill_probability: share of the tokens that spans cover.
        poisson_lambda: mean length of a span, above 0 and at most 20. A row has at most 2 m + 16
            spans, the last of which covers what is left; this matters only for means below 1.
        permute_sentences: share of the sentences that is shuffled.
        rotate_probability: share of the rows that is rotated.
        random_replace_prob: share of the masks that becomes a random id. The paper does not name
            it; 0.1 is that of the authors' training command.
        lengths: int64 [B], the number of tokens in each padded row; default T.
        cu_seqlens: int32 [B + 1], ascending from 0: ``input_ids`` [N] holds B rows one after the
            other, row b from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.
        max_seqlen: most tokens in a packed row; required with ``cu_seqlens``.
        capacity: C, the width of the output, with BOS and EOS; default T or ``max_seqlen``, and one
            more for each of these given.
        sample_index: int64 [B], the place of each row in the training stream; default 0 … B - 1.
            A row's noise depends on this alone, so neither the batch nor the padding changes it.
        seed: int, or 0-d int64 tensor on the device of ``input_ids`` (which a captured graph can
            advance).
        step: gives the same sample fresh noise, e.g. the epoch; 0 … 2^28 - 1.

    Returns:
        NoisedText:

        - input_ids [B, C], dtype of ``input_ids``: BOS, the noised row, EOS, padding.
        - lengths int64 [B]: tokens of each row, with BOS and EOS.
        - dropped int64 []: tokens of all rows that found no room, cut before EOS. A row grows if
          many spans have length 0.

    Determinism:
        A pure function of its arguments, the same bits on every backend and device, for padded and
        packed rows. All is integers: probabilities are rounded to multiples of 2^-32, orders are of
        random keys of 32 bits, equal ones by position. Nothing waits for the device; lengths and
        boundaries that make no sense are an error on the CPU and are cut to the tokens on CUDA.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ids = torch.arange(10, 20)[None]
        >>> tokens = dict(vocab_size=100, mask_token_id=4, pad_token_id=1)
        >>> noised = ops.bart_noise(ids, **tokens, random_replace_prob=0.0, seed=0)
        >>> noised.input_ids, noised.lengths
        (tensor([[10, 11,  4, 15, 16, 17, 18,  4, 19,  1]]), tensor([9]))

    Source: Lewis et al. 2020 (arXiv 1910.13461), §2.2 and §5.1; Salmon et al. 2011 for the random
        bits.
    Reference: ``fastplm.reference.bart_noise.bart_noise_ref``.
    """
    check_input_ids(_WHERE, input_ids, cu_seqlens)
    check_rows(_WHERE, lengths, cu_seqlens, max_seqlen)
    fix = "Pass the length of the tokenizer."
    check_int(_WHERE, "vocab_size", vocab_size, 1, 2**31, fix)
    tokens: dict[str, int] = {"mask_token_id": mask_token_id, "pad_token_id": pad_token_id}
    if bos_token_id is not None:
        tokens["bos_token_id"] = bos_token_id
    if eos_token_id is not None:
        tokens["eos_token_id"] = eos_token_id
    for argument, token_id in tokens.items():
        check_int(_WHERE, argument, token_id, 0, 2**31, "Pass that of the tokenizer.")
    edges = (bos_token_id is not None) + (eos_token_id is not None)
    longest = input_ids.shape[-1] if max_seqlen is None else max_seqlen
    if capacity is None:
        capacity = longest + edges
    check_int(_WHERE, "capacity", capacity, edges, 2**31, "BOS and EOS are part of the row.")
    shares = (
        *(mask_probability, delete_probability, infill_probability, poisson_lambda),
        *(permute_sentences, rotate_probability, random_replace_prob),
    )
    _check_shares(shares)
    check_step(_WHERE, step)
    call = Call(
        *(input_ids, sentence_end_ids, special_ids, lengths, cu_seqlens, sample_index),
        *(seed_tensor(_WHERE, seed, input_ids), step, longest, capacity),
        *(vocab_size, mask_token_id, pad_token_id),
        -1 if bos_token_id is None else bos_token_id,
        -1 if eos_token_id is None else eos_token_id,
        *map(float, shares),
    )
    return NoisedText(*OP(call))


def _check_shares(shares: tuple[float, ...]) -> None:
    given: dict[str, Any] = dict(zip(Call._fields[-SHARES:], shares, strict=True))
    for argument, value in given.items():
        if argument != "poisson_lambda":
            check_probability(_WHERE, argument, value, "It is a share.")
    mean, expected, fix = given["poisson_lambda"], "a number above 0 and at most 20", "BART uses 3."
    check_number(_WHERE, "poisson_lambda", mean, math.ulp(0.0), 20.0, expected, fix)
    mask, delete = given["mask_probability"], given["delete_probability"]
    # The slack is what fixed-point probabilities cannot tell apart.
    if mask + delete > 1 + 2**-32:
        fail(
            _WHERE,
            "delete_probability",
            delete,
            f"at most 1 - mask_probability = {1 - mask}",
            "A token is masked or deleted, not both: the two are shares of the same tokens.",
        )


# --- registration ---------------------------------------------------------------------------------


def _compiled(call: Call) -> tuple[Tensor, ...]:
    """One operator of csrc/, which PyTorch dispatches by device."""
    return torch.ops.fastplm_C.bart_noise(*call.with_plan)


def _fake(call: Call, backend: str) -> tuple[Tensor, ...]:
    ids, rows = call.input_ids, rows_of(call)
    return (
        ids.new_empty(rows, call.capacity),
        ids.new_empty(rows, dtype=torch.int64),
        ids.new_empty((), dtype=torch.int64),
    )


def _smoke(device: torch.device) -> None:
    tokens = torch.arange(16, device=device)[None]
    bart_noise(tokens, vocab_size=16, mask_token_id=0, pad_token_id=1, seed=0)


OP = Op(
    "bart_noise",
    Call,
    results=NoisedText._fields,
    fake=_fake,
    reference=bart_noise_ref,
    # Behind the operator, too: with no gradient nothing is lost, and Inductor takes minutes over
    # the integer arithmetic of Philox.
    eager=lambda call: bart_noise_by_plan(*call),
    smoke=_smoke,
)
OP.backend("cpp", forward=_compiled, rejects=csrc_rejects("bart_noise"))
OP.backend("cuda", forward=_compiled, rejects=csrc_rejects("bart_noise", "CUDA"))
