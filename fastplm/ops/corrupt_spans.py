"""``ops.corrupt_spans``: the public function, and its backends.

``reference/corrupt_spans.py`` declares the arguments, as the reference takes them, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastplm._checks import check_int, check_number
from fastplm._registry import Op
from fastplm.ops._common import cached_by_settings, csrc_rejects, seed_tensor
from fastplm.reference._token_rows import check_input_ids, check_rows, check_step, rows_of
from fastplm.reference.corrupt_spans import (
    Call,
    CorruptedSpans,
    corrupt_spans_by_plan,
    corrupt_spans_ref,
    fixed_point_scales,
    output_lengths,
)

_WHERE = "corrupt_spans"
_LONGEST = 2**31


def corrupt_spans(
    input_ids: Tensor,
    *,
    sentinel_ids: Tensor,
    eos_token_id: int | None = None,
    pad_token_id: int = 0,
    noise_density: float = 0.15,
    mean_span_length: float = 3.0,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    sample_index: Tensor | None = None,
    seed: int | Tensor,
    step: int = 0,
) -> CorruptedSpans:
    """Replace random spans of tokens by sentinels, and make labels of what was replaced: T5's task.

    In a row of n tokens ``noise = clip(round(n * noise_density), 1, n - 1)`` leave the input, in
    ``spans = clip(round(noise / mean_span_length), 1, min(noise, n - noise, K))`` spans, halves
    rounded up. The noise is cut in that many spans, and the ``n - noise`` kept tokens in as many
    runs, of one token at least, every composition equally likely; the row is ``kept_0 noise_0
    kept_1 noise_1 …``. So a row begins with a kept token and ends with a noise one, and

        input_ids:  kept_0 sentinel_0 kept_1 sentinel_1 … [EOS]
        labels:     sentinel_0 noise_0 sentinel_1 noise_1 … [EOS]

    with no sentinel after the last span. A row of fewer than two tokens has no span: its input is
    the row and EOS, its labels are EOS.

    Args:
        input_ids: int64 or int32 [B, T], or [N] with ``cu_seqlens``; any strides. Without the
            EOS that ends a text: it is added here.
        sentinel_ids: int64 [K], K >= 1: ids of ``<extra_id_0>``, ``<extra_id_1>``, …
        eos_token_id: ends inputs and labels; default none.
        pad_token_id: fills ``input_ids`` of shorter rows.
        noise_density: share of the tokens that leaves the input, between 0 and 1.
        mean_span_length: noise tokens a span, at least 1.
        lengths: int64 [B], tokens in each padded row; default T.
        cu_seqlens: int32 [B + 1], ascending from 0: ``input_ids`` [N] holds B rows one after the
            other, row b from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``.
        max_seqlen: with ``cu_seqlens``, the T that packed rows have at most.
        sample_index: int64 [B], the place of each row in the training stream; default 0 … B - 1.
            A row's spans depend on this alone, so neither the batch nor the padding changes them.
        seed: int, or 0-d int64 tensor on the device of ``input_ids`` (which a captured graph can
            advance).
        step: gives the same sample fresh spans, e.g. the epoch; 0 … 2^28 - 1.

    Returns:
        CorruptedSpans, with ``(Ti, To) = span_corruption_lengths(T, …)`` fixed by the shapes:

        - input_ids [B, Ti], dtype of ``input_ids``, padded with ``pad_token_id``.
        - labels int64 [B, To], padded with -100.
        - input_lengths, label_lengths int64 [B]: tokens before the padding, EOS included.
        - dropped int64 []: spans that K sentinels were too few for. Their noise tokens are in the
          other spans, which are longer for it.

    Determinism:
        A pure function of its arguments, the same bits on every backend and device, for padded and
        packed rows. A boundary between two tokens has 32 random bits as its rank; equal ranks go
        by position. Density and mean are rounded to multiples of 2^-32. Nothing waits for the
        device: lengths and boundaries that do not fit are errors only on the CPU, and elsewhere
        are cut to the tokens.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ids, sentinels = torch.arange(10, 20)[None], torch.tensor([99, 98])
        >>> shares = dict(noise_density=0.4, mean_span_length=2.0)
        >>> corrupted = ops.corrupt_spans(
        ...     ids, sentinel_ids=sentinels, eos_token_id=1, **shares, seed=0
        ... )
        >>> corrupted.input_ids, corrupted.labels
        (tensor([[10, 11, 12, 99, 15, 16, 17, 98,  1]]), tensor([[99, 13, 14, 98, 18, 19,  1]]))

    Source: Raffel et al. 2020 (arXiv 1910.10683), §3.1.4, and ``random_spans_noise_mask`` of its
        authors, which rounds halves to even; Salmon et al. 2011 for the random bits.
    Reference: ``fastplm.reference.corrupt_spans.corrupt_spans_ref``.
    """
    check_input_ids(_WHERE, input_ids, cu_seqlens)
    check_rows(_WHERE, lengths, cu_seqlens, max_seqlen)
    check_step(_WHERE, step)
    call = Call(
        *(input_ids, lengths, cu_seqlens, sentinel_ids, sample_index),
        *(seed_tensor(_WHERE, seed, input_ids), step),
        input_ids.shape[-1] if max_seqlen is None else max_seqlen,
        *_settings(noise_density, mean_span_length, eos_token_id, pad_token_id),
    )
    return CorruptedSpans(*OP(call))


def span_corruption_lengths(
    length: int,
    *,
    noise_density: float = 0.15,
    mean_span_length: float = 3.0,
    sentinels: int = 100,
    eos: bool = True,
) -> tuple[int, int]:
    """How long the inputs and the labels of a row of ``length`` tokens are.

    Args:
        length: tokens of the row.
        noise_density, mean_span_length: as in ``corrupt_spans``.
        sentinels: how many there are.
        eos: whether inputs and labels end with EOS.

    Returns:
        (input length, label length), the EOS included; neither gets shorter as ``length`` grows.

    Raises:
        ArgumentValueError, ArgumentTypeError: an argument out of its range.
    """
    where = "span_corruption_lengths"
    check_int(where, "length", length, 0, _LONGEST, "Pass the tokens of a row.")
    check_int(where, "sentinels", sentinels, 1, _LONGEST, "T5 has 100.")
    _check_shares(where, noise_density, mean_span_length)
    scales = fixed_point_scales(noise_density, mean_span_length)
    return output_lengths(length, *scales, sentinels, eos)


def span_corruption_fit(
    input_length: int,
    *,
    noise_density: float = 0.15,
    mean_span_length: float = 3.0,
    sentinels: int = 100,
    eos: bool = True,
) -> tuple[int, int]:
    """The longest row whose corrupted input fits in ``input_length`` tokens: how T5 cuts its text.

    Args:
        input_length: tokens of the encoder, the EOS included.
        the others: as in ``span_corruption_lengths``.

    Returns:
        (length, label length): 568 and 114 for the 512 tokens of T5.

    Raises:
        ArgumentValueError, ArgumentTypeError: an argument out of its range.

    Source: ``random_spans_helper`` of the authors of Raffel et al. 2020.
    """
    where = "span_corruption_fit"
    check_int(where, "input_length", input_length, int(eos), _LONGEST, "Pass the encoder's length.")
    check_int(where, "sentinels", sentinels, 1, _LONGEST, "T5 has 100.")
    _check_shares(where, noise_density, mean_span_length)
    scales = fixed_point_scales(noise_density, mean_span_length)
    # The longest of length … end - 1 that fits, by bisection.
    length, end = 0, _LONGEST
    while end - length > 1:
        middle = (length + end) // 2
        if output_lengths(middle, *scales, sentinels, eos)[0] <= input_length:
            length = middle
        else:
            end = middle
    return length, output_lengths(length, *scales, sentinels, eos)[1]


@cached_by_settings
def _settings(
    noise_density: float, mean_span_length: float, eos_token_id: int | None, pad_token_id: int
) -> tuple[int, ...]:
    """Checks them; the operator's arguments that follow, in their order."""
    _check_shares(_WHERE, noise_density, mean_span_length)
    if eos_token_id is not None:
        check_int(_WHERE, "eos_token_id", eos_token_id, 0, 2**31, "Pass tokenizer.eos_token_id.")
    check_int(_WHERE, "pad_token_id", pad_token_id, 0, 2**31, "Pass tokenizer.pad_token_id.")
    scales = fixed_point_scales(noise_density, mean_span_length)
    return (*scales, -1 if eos_token_id is None else eos_token_id, pad_token_id)


def _check_shares(where: str, noise_density: float, mean_span_length: float) -> None:
    least, most = math.ulp(0.0), math.nextafter(1.0, 0.0)
    expected, fix = "a number between 0 and 1", "T5 uses 0.15."
    check_number(where, "noise_density", noise_density, least, most, expected, fix)
    expected, fix = "a number from 1 to 2^31", "T5 uses 3."
    check_number(where, "mean_span_length", mean_span_length, 1, _LONGEST, expected, fix)


# --- registration ---------------------------------------------------------------------------------


def _compiled(call: Call) -> tuple[Tensor, ...]:
    """One operator of csrc/, which PyTorch dispatches by device."""
    return torch.ops.fastplm_C.corrupt_spans(*call)


def _fake(call: Call, backend: str) -> tuple[Tensor, ...]:
    ids, rows = call.input_ids, rows_of(call)
    input_width, label_width = call.widths
    return (
        ids.new_empty(rows, input_width),
        ids.new_empty(rows, label_width, dtype=torch.int64),
        ids.new_empty(rows, dtype=torch.int64),
        ids.new_empty(rows, dtype=torch.int64),
        ids.new_empty((), dtype=torch.int64),
    )


def _smoke(device: torch.device) -> None:
    tokens = torch.arange(8, device=device)[None]
    corrupt_spans(tokens, sentinel_ids=tokens[0] + 8, eos_token_id=1, seed=0)


OP = Op(
    "corrupt_spans",
    Call,
    results=CorruptedSpans._fields,
    fake=_fake,
    reference=corrupt_spans_ref,
    # Behind the operator, too: with no gradient nothing is lost, and Inductor takes minutes over
    # the integer arithmetic of Philox.
    eager=lambda call: corrupt_spans_by_plan(*call),
    smoke=_smoke,
)
OP.backend("cpp", forward=_compiled, rejects=csrc_rejects("corrupt_spans"))
OP.backend("cuda", forward=_compiled, rejects=csrc_rejects("corrupt_spans", "CUDA"))
