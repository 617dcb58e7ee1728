"""``ops.mask_tokens``: checks, schema, fake and backends."""

from __future__ import annotations

from typing import Any

import torch

from fastplm import _extension
from fastplm._backends import accepts_all, needs_cpu
from fastplm._checks import (
    INTEGER,
    ArgumentTypeError,
    UnsupportedError,
    check,
    check_choice,
    check_dtype,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from fastplm._registry import Op
from fastplm.reference.mask_tokens import (
    MaskedTokens,
    fixed_point_plan,
    mask_tokens_by_plan,
    mask_tokens_ref,
)

_UNITS = ("token", "word", "ngram")


def mask_tokens(
    input_ids: torch.Tensor,
    *,
    vocab_size: int,
    mask_token_id: int,
    maskable: torch.Tensor | None = None,
    mlm_probability: float = 0.15,
    mask_replace_prob: float = 0.8,
    random_replace_prob: float = 0.1,
    max_predictions: int | None = None,
    unit: str = "token",
    word_ids: torch.Tensor | None = None,
    sample_index: torch.Tensor | None = None,
    seed: int | torch.Tensor,
    step: int = 0,
) -> MaskedTokens:
    """Choose the tokens to predict, corrupt them, and compact their places, in one pass.

    Of the ``n > 0`` maskable tokens of a row exactly
    ``k = min(capacity, max(1, round(mlm_probability * n)))`` are chosen, halves rounded up; every
    set of k is equally likely. A chosen token becomes ``mask_token_id`` with probability
    ``mask_replace_prob``, a random id of the vocabulary with ``random_replace_prob``, and else
    stays. ``capacity = max_predictions``, or ``max(1, round(mlm_probability * T))``.

    Args:
        input_ids: int64 or int32 [B, T], any strides.
        vocab_size: random ids are drawn from 0 … vocab_size - 1.
        mask_token_id: id of [MASK].
        maskable: bool [B, T], True = may be chosen (neither special nor padding); default all.
        mlm_probability: share of the maskable tokens to choose, in (0, 1].
        mask_replace_prob, random_replace_prob: as above; their sum is at most 1.
        max_predictions: most tokens to choose in a row.
        unit: "token"; "word" and "ngram" are not in this version.
        word_ids: must be None in this version.
        sample_index: int64 [B], the place of each row in the training stream; default 0 … B - 1.
            A row's choice depends on this alone, so neither the batch nor the padding changes it.
        seed: int, or 0-d int64 tensor on the device of ``input_ids`` (which a captured graph can
            advance).
        step: gives the same sample a fresh choice, e.g. the epoch; 0 … 2^28 - 1.

    Returns:
        MaskedTokens, with P = B * capacity fixed by the shapes:

        - input_ids [B, T], dtype of ``input_ids``: the corrupted tokens.
        - positions int64 [P]: places of the chosen tokens in the flattened [B * T], ascending;
          the slots from ``count`` on are unused and hold -1.
        - labels int64 [P]: the tokens that stood there; -100 in unused slots.
        - count int64 []: how many were chosen.

    Determinism:
        A pure function of its arguments, the same bits on every backend and device. Per token, 64
        random bits are its rank and 64 others its fate; equal ranks go by position. Probabilities
        are rounded to multiples of 2^-32. Nothing waits for the device.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        UnsupportedError: ``unit`` other than "token", or ``word_ids``.
        BackendError: a forced backend cannot run the call.

    Source: Devlin et al. 2018 (arXiv 1810.04805), appendix A.1, and ``create_pretraining_data.py``
        of its authors for the exact count in a row; Salmon et al. 2011 for the random bits.
    Reference: ``fastplm.reference.mask_tokens.mask_tokens_ref``.
    """
    _check_unsupported(unit, word_ids)
    check_tensor("mask_tokens", "input_ids", input_ids, ndim=2)
    _check_tensors(input_ids, maskable, sample_index)
    _check_numbers(vocab_size, mask_token_id, max_predictions, step)
    _check_probabilities(mlm_probability, mask_replace_prob, random_replace_prob)
    _check_seed(input_ids, seed)
    if not isinstance(seed, torch.Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=input_ids.device)
    plan = fixed_point_plan(
        input_ids.shape[1], mlm_probability, mask_replace_prob, random_replace_prob, max_predictions
    )
    backend = OP.resolve(input_ids, maskable)
    return MaskedTokens(
        *torch.ops.fastplm.mask_tokens(
            input_ids, maskable, sample_index, seed, step, *plan, mask_token_id, vocab_size, backend
        )
    )


def _check_unsupported(unit: str, word_ids: torch.Tensor | None) -> None:
    check_choice("mask_tokens", "unit", unit, _UNITS)
    check(
        unit == "token",
        "mask_tokens",
        "unit",
        repr(unit),
        "'token' in this version",
        "Leave it out; tokens are then chosen one by one.",
        UnsupportedError,
    )
    check(
        word_ids is None,
        "mask_tokens",
        "word_ids",
        f"a {type(word_ids).__name__}",
        "None in this version",
        "Leave it out; tokens are then chosen one by one.",
        UnsupportedError,
    )


def _check_tensors(
    input_ids: torch.Tensor, maskable: torch.Tensor | None, sample_index: torch.Tensor | None
) -> None:
    batch, length = input_ids.shape
    check_dtype("mask_tokens", "input_ids", input_ids, INTEGER)
    if maskable is not None:
        check_tensor("mask_tokens", "maskable", maskable)
        check_dtype(
            "mask_tokens",
            "maskable",
            maskable,
            (torch.bool,),
            "Convert it with .bool(), True = may.",
        )
        check_same_device("mask_tokens", input_ids=input_ids, maskable=maskable)
        check_shape("mask_tokens", "maskable", maskable, (batch, length), "[B, T] of `input_ids`")
    if sample_index is not None:
        check_tensor("mask_tokens", "sample_index", sample_index)
        check_dtype("mask_tokens", "sample_index", sample_index, (torch.int64,))
        check_same_device("mask_tokens", input_ids=input_ids, sample_index=sample_index)
        check_shape("mask_tokens", "sample_index", sample_index, (batch,), "[B] of `input_ids`")


def _check_numbers(
    vocab_size: int, mask_token_id: int, max_predictions: int | None, step: int
) -> None:
    _check_int("vocab_size", vocab_size, 1, 2**31, "Pass the length of the tokenizer.")
    _check_int(
        "mask_token_id",
        mask_token_id,
        0,
        vocab_size,
        "Pass tokenizer.mask_token_id and its length.",
    )
    _check_int("step", step, 0, 2**28, "Count from 0.")
    if max_predictions is not None:
        _check_int("max_predictions", max_predictions, 1, 2**31, "Leave it out for the default.")


def _check_int(argument: str, value: int, low: int, high: int, fix: str) -> None:
    expected = f"an int from {low} to {high - 1}"
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(message("mask_tokens", argument, repr(value), expected, fix))
    check(low <= value < high, "mask_tokens", argument, value, expected, fix)


def _check_probabilities(
    mlm_probability: float, mask_replace_prob: float, random_replace_prob: float
) -> None:
    check(
        0 < mlm_probability <= 1,
        "mask_tokens",
        "mlm_probability",
        mlm_probability,
        "a number above 0 and at most 1",
        "BERT uses 0.15.",
    )
    for argument, value in (
        ("mask_replace_prob", mask_replace_prob),
        ("random_replace_prob", random_replace_prob),
    ):
        check(
            0 <= value <= 1,
            "mask_tokens",
            argument,
            value,
            "a number from 0 to 1",
            "BERT uses 0.8 and 0.1.",
        )
    # The slack is what fixed-point probabilities cannot tell apart.
    check(
        mask_replace_prob + random_replace_prob <= 1 + 2**-32,
        "mask_tokens",
        "random_replace_prob",
        random_replace_prob,
        f"at most 1 - mask_replace_prob = {1 - mask_replace_prob}",
        "The two are shares of the chosen tokens; the rest stays as it is.",
    )


def _check_seed(input_ids: torch.Tensor, seed: int | torch.Tensor) -> None:
    if isinstance(seed, torch.Tensor):
        check_tensor("mask_tokens", "seed", seed, ndim=0)
        check_dtype("mask_tokens", "seed", seed, (torch.int64,))
        check_same_device("mask_tokens", input_ids=input_ids, seed=seed)
    else:
        _check_int("seed", seed, -(2**63), 2**63, "Pass an int or a 0-d int64 tensor.")


# --- backends "cpp" and "cuda": one operator of csrc/, which PyTorch dispatches by device ---------

_CPP_LACKS = _extension.lacks("mask_tokens", "CPU")
_CUDA_LACKS = _extension.lacks("mask_tokens", "CUDA")


def _cpp_rejects(input_ids: torch.Tensor, *_: Any, forced: bool) -> str | None:
    return needs_cpu(input_ids) or _CPP_LACKS


def _cuda_rejects(input_ids: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if input_ids.device.type != "cuda":
        return f"it runs on CUDA tensors, not {input_ids.device}"
    return _CUDA_LACKS


def _compiled(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return torch.ops.fastplm_C.mask_tokens(*arguments)


# --- registration ---------------------------------------------------------------------------------


def _fake(input_ids, maskable, sample_index, seed, step, capacity, *_):
    _check_tensors(input_ids, maskable, sample_index)
    _check_seed(input_ids, seed)
    slots = input_ids.shape[0] * capacity
    return (
        input_ids.new_empty(input_ids.shape),
        input_ids.new_empty(slots, dtype=torch.int64),
        input_ids.new_empty(slots, dtype=torch.int64),
        input_ids.new_empty((), dtype=torch.int64),
    )


def _smoke(device: torch.device) -> None:
    tokens = torch.arange(8, device=device)[None]
    mask_tokens(tokens, vocab_size=8, mask_token_id=0, maskable=tokens > 1, seed=0)


OP = Op("mask_tokens", reference=mask_tokens_ref, smoke=_smoke)
# The reference is opaque too: with no gradient nothing is lost, and Inductor takes minutes over the
# integer arithmetic of Philox.
OP.backend("eager", forward=mask_tokens_by_plan, rejects=accepts_all)
OP.backend("cpp", forward=_compiled, rejects=_cpp_rejects)
OP.backend("cuda", forward=_compiled, rejects=_cuda_rejects)
OP.define(
    "(Tensor input_ids, Tensor? maskable, Tensor? sample_index, Tensor seed, SymInt step, "
    "SymInt capacity, int quota_scale, int mask_below, int random_below, int mask_token_id, "
    "int vocab_size, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_fake,
)
