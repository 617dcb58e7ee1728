"""ops.corrupt_spans: the reference against slow plain loops and statistics, csrc/ bit-equal to
it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastplm.errors import ArgumentValueError
from fastplm.ops.corrupt_spans import corrupt_spans, span_corruption_fit, span_corruption_lengths
from fastplm.reference.corrupt_spans import (
    KEPT_POSITION,
    corrupt_spans_by_plan,
    corrupt_spans_ref,
    fixed_point_scales,
    span_counts,
)
from fastplm.reference.philox import Stream, draw
from fastplm.testing import chi_square, poisoned_memory

from ..samples import assert_same, run_compiled

TEXT = 1000  # tokens have ids below it, sentinels above
EOS, PAD = 1, 0


def sentinels(count: int = 100) -> torch.Tensor:
    """The sentinels' ids, descending as in T5."""
    return torch.arange(TEXT + count - 1, TEXT - 1, -1)


def make(batch: int, length: int, dtype=torch.int64) -> dict:
    """Inputs on the CPU with rows of different lengths; the first row is full."""
    lengths = torch.randint(0, length + 1, (batch,))
    lengths[:1] = length
    return dict(
        input_ids=torch.randint(2, TEXT, (batch, length), dtype=dtype),
        lengths=lengths,
        sentinel_ids=sentinels(),
        eos_token_id=EOS,
        sample_index=torch.randint(0, 2**50, (batch,)),
        seed=11,
    )


def packed(inputs: dict, spare: int = 0) -> dict:
    """The same rows packed, with ``spare`` tokens that are in no row."""
    rows = [row[:n] for row, n in zip(inputs["input_ids"], inputs["lengths"], strict=True)]
    rest = inputs["input_ids"].new_full((spare,), TEXT - 1)
    ends = inputs["lengths"].cumsum(0, dtype=torch.int32)
    return inputs | {
        "input_ids": torch.cat((*rows, rest)),
        "lengths": None,
        "cu_seqlens": torch.nn.functional.pad(ends, (1, 0)),
        "max_seqlen": inputs["input_ids"].shape[1],
    }


def check(device: torch.device, inputs: dict) -> None:
    """The reference always runs on the CPU, as the bits are the same on every device."""
    assert_same(run_compiled(corrupt_spans, device, inputs), corrupt_spans_ref(**inputs))


# --- csrc/ and the reference ----------------------------------------------------------------------


@pytest.mark.parametrize("threads", (1, 8))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
@pytest.mark.parametrize("length", (0, 1, 2, 3, 17, 65, 512, 4096))
def test_lengths(device, length, dtype, threads):
    # More rows than one thread takes at a time.
    inputs = make(max(3, 8192 // (length + 32)), length, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(device, inputs)
        check(device, packed(inputs, spare=5))
        check(device, inputs | {"lengths": None, "eos_token_id": None})
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("count", (1, 3, 100))
@pytest.mark.parametrize("mean", (1.0, 3.0, 1000.0))
@pytest.mark.parametrize("density", (0.001, 0.15, 0.5, 0.999))
def test_densities(device, density, mean, count):
    inputs = make(5, 130) | {
        "sentinel_ids": sentinels(count),
        "noise_density": density,
        "mean_span_length": mean,
        "pad_token_id": 7,
    }
    check(device, inputs)


@pytest.mark.parametrize("eos", (None, EOS))
@pytest.mark.parametrize("shape", ((0, 7), (3, 0), (0, 0)))
def test_empty(device, shape, eos):
    inputs = make(*shape) | {"eos_token_id": eos}
    for layout in (inputs, packed(inputs)):
        check(device, layout)
        out = run_compiled(corrupt_spans, device, layout)
        assert out.dropped == 0 and out.input_ids.shape[0] == shape[0]


def test_boundaries_that_do_not_fit_are_held_to_the_tokens(device):
    """A GPU cannot check the boundaries first, so the operator is called here without checks."""
    run_compiled(corrupt_spans, device, make(1, 1))
    ids = torch.arange(2, 52)
    cu_seqlens = torch.tensor([5, -3, 2**31 - 1, 20, 30, 60, 10, 50], dtype=torch.int32)
    lengths = torch.tensor([-(2**62), -1, 0, 9, 10, 11, 2**62])
    plan = (*fixed_point_scales(0.15, 3.0), EOS, PAD)
    for tokens, *rows in ((ids, None, cu_seqlens), (ids[:10].repeat(7, 1), lengths, None)):
        arguments = (tokens, *rows, sentinels(), None, torch.tensor(5), 0, 10, *plan)
        moved = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        with poisoned_memory():
            out = torch.ops.fastplm.corrupt_spans(
                *moved, {"cpu": "cpp", "cuda": "cuda"}[device.type]
            )
        assert_same(out, corrupt_spans_by_plan(*arguments))


@st.composite
def any_inputs(draw_from):
    inputs = make(draw_from(st.integers(0, 5)), draw_from(st.integers(0, 90))) | {
        "noise_density": draw_from(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        "mean_span_length": draw_from(st.floats(1, 20)),
        "sentinel_ids": sentinels(draw_from(st.integers(1, 40))),
        "eos_token_id": draw_from(st.sampled_from((None, EOS))),
        "seed": draw_from(st.integers(-(2**63), 2**63 - 1)),
    }
    return inputs


@given(inputs=any_inputs())
@settings(max_examples=60, deadline=None)
def test_any_input(inputs):
    check(torch.device("cpu"), inputs)
    expected = corrupt_spans_ref(**inputs)
    check_rows(inputs, expected)
    assert_same(corrupt_spans_ref(**packed(inputs, spare=3)), expected)
    assert_same(run_compiled(corrupt_spans, torch.device("cpu"), packed(inputs, spare=3)), expected)


# --- the reference and what it promises -----------------------------------------------------------


def split(row: list[int], eos: int | None) -> tuple[list[list[int]], list[int]]:
    """(the runs of text in a row, cut at its sentinels; the sentinels)."""
    if eos is not None:
        assert row.pop() == eos
    runs, found = [[]], []
    for token in row:
        if token >= TEXT:
            found.append(token)
            runs.append([])
        else:
            runs[-1].append(token)
    return runs, found


def check_rows(inputs: dict, out) -> None:
    """Checks that in every row the spans of the labels, put for the sentinels, give the row."""
    eos = inputs["eos_token_id"]
    for index, length in enumerate(inputs["lengths"].tolist()):
        n_inputs, n_labels = int(out.input_lengths[index]), int(out.label_lengths[index])
        assert (out.input_ids[index, n_inputs:] == inputs.get("pad_token_id", PAD)).all()
        assert (out.labels[index, n_labels:] == -100).all()
        kept, in_inputs = split(out.input_ids[index, :n_inputs].tolist(), eos)
        noise, in_labels = split(out.labels[index, :n_labels].tolist(), eos)
        assert in_inputs == in_labels == inputs["sentinel_ids"][: len(in_labels)].tolist()
        assert noise[0] == [] and all(noise[1:])  # labels begin with a sentinel; no span is empty
        if length >= 2:
            assert kept.pop() == [] and all(kept) and in_labels
            density, mean = inputs.get("noise_density", 0.15), inputs.get("mean_span_length", 3.0)
            scales = fixed_point_scales(density, mean)
            counts = span_counts(length, *scales, len(inputs["sentinel_ids"]))
            assert (sum(map(len, noise)), len(in_labels)) == counts[:2]
        spliced = [piece for pair in zip(kept, noise[1:], strict=False) for piece in pair]
        row = list(itertools.chain(*(spliced or kept)))
        assert row == inputs["input_ids"][index, :length].tolist()


def oracle(inputs: dict, row: int) -> tuple[list[int], list[int]]:
    """The definition of one row, with the default density and mean."""
    n = int(inputs["lengths"][row])
    text = inputs["input_ids"][row, :n].tolist()
    end = [inputs["eos_token_id"]]
    if n < 2:
        return text + end, end
    noise = min(max(math.floor(n * 15 / 100 + 0.5), 1), n - 1)
    spans = max(math.floor(noise / 3 + 0.5), 1)
    sample = int(inputs["sample_index"][row])

    def pieces(size: int, first_position: int) -> list[int]:
        """Lengths of the parts of ``size`` items."""
        keys = []
        for boundary in range(size - 1):
            position = first_position + boundary // 4
            words = draw(inputs["seed"], Stream.SPAN, sample_index=sample, position=position)
            keys.append((words[boundary % 4].item(), boundary))
        cuts = sorted(boundary + 1 for _, boundary in sorted(keys)[: spans - 1])
        return [b - a for a, b in itertools.pairwise([0, *cuts, size])]

    corrupted, labels = [], []
    kept, dropped = pieces(n - noise, KEPT_POSITION), pieces(noise, 0)
    sentinel_ids = inputs["sentinel_ids"][:spans].tolist()
    for sentinel, keep, drop in zip(sentinel_ids, kept, dropped, strict=True):
        corrupted += [*text[:keep], sentinel]
        labels += [sentinel, *text[keep : keep + drop]]
        text = text[keep + drop :]
    assert not text
    return corrupted + end, labels + end


def test_reference_against_the_definition():
    inputs = make(6, 120) | {"lengths": torch.tensor([120, 0, 1, 2, 61, 30])}
    out = corrupt_spans_ref(**inputs)
    assert out.dropped == 0
    for row in range(6):
        corrupted, labels = oracle(inputs, row)
        assert out.input_lengths[row] == len(corrupted) and out.label_lengths[row] == len(labels)
        padding = [PAD] * (out.input_ids.shape[1] - len(corrupted))
        assert out.input_ids[row].tolist() == corrupted + padding
        padding = [-100] * (out.labels.shape[1] - len(labels))
        assert out.labels[row].tolist() == labels + padding


@pytest.mark.parametrize(
    ("length", "noise", "spans"),
    ((0, 0, 0), (1, 0, 0), (2, 1, 1), (3, 1, 1), (9, 1, 1), (10, 2, 1), (29, 4, 1), (30, 5, 2))
    + ((512, 77, 26), (568, 85, 28), (4096, 614, 205)),
)
def test_exact_counts(length, noise, spans):
    scales = fixed_point_scales(0.15, 3.0)
    assert span_counts(length, *scales, 1000) == (noise, spans, spans)
    assert span_counts(length, *scales, 2) == (noise, min(spans, 2), spans)


def test_halves_round_up():
    # As floats, 0.35 and 0.05 are just below their decimals; some quotients end in exactly 1/2.
    assert span_counts(10, *fixed_point_scales(0.35, 1.0), 100)[0] == 4
    assert span_counts(30, *fixed_point_scales(0.05, 1.0), 100)[0] == 2
    assert span_counts(20, *fixed_point_scales(0.15, 2.0), 100)[1] == 2


@pytest.mark.parametrize("eos", (False, True))
@pytest.mark.parametrize("count", (1, 7, 100))
@pytest.mark.parametrize("shares", ((0.15, 3.0), (0.5, 1.0), (0.3, 1.5), (0.9, 4.0), (0.01, 20.0)))
def test_widths_and_what_fits_in_them(shares, count, eos):
    options = dict(
        zip(("noise_density", "mean_span_length"), shares, strict=True), sentinels=count, eos=eos
    )
    lengths = [span_corruption_lengths(n, **options) for n in range(900)]
    assert all(a <= c and b <= d for (a, b), (c, d) in itertools.pairwise(lengths))
    for width in (1, 2, 20, 57):
        longest = max(n for n in range(900) if lengths[n][0] <= width)
        if longest < 899:
            assert span_corruption_fit(width, **options) == (longest, lengths[longest][1])


def test_t5_cuts_568_tokens_for_512():
    assert span_corruption_fit(512) == (568, 114)
    assert span_corruption_lengths(568) == (512, 114)
    assert span_corruption_fit(0, eos=False) == (0, 0)


def test_too_few_sentinels_are_counted():
    inputs = make(3, 512) | {
        "sentinel_ids": sentinels(4),
        "lengths": torch.tensor([512, 100, 30]),  # 26, 5 and 2 spans
    }
    out = corrupt_spans(**inputs)
    assert out.dropped == 22 + 1 + 0
    check_rows(inputs, out)
    assert (out.input_ids == int(sentinels(4)[-1])).sum() == 2


def noise_of(length: int, rows: int, density: float, mean: float, seed: int) -> torch.Tensor:
    """The mask of the noise tokens, bool [rows, length]; token t of a row is 2 + t."""
    out = corrupt_spans(
        torch.arange(2, 2 + length).repeat(rows, 1),
        sentinel_ids=sentinels(),
        noise_density=density,
        mean_span_length=mean,
        seed=seed,
    )
    text = torch.where((out.labels >= 2) & (out.labels < TEXT), out.labels, 1)
    return torch.zeros(rows, length + 2, dtype=torch.bool).scatter(1, text, True)[:, 2:]


def compositions(size: int, parts: int):
    for cuts in itertools.combinations(range(1, size), parts - 1):
        yield [b - a for a, b in itertools.pairwise([0, *cuts, size])]


@pytest.mark.parametrize(
    ("length", "density", "mean", "noise", "spans"), ((30, 0.15, 3.0, 5, 2), (12, 0.5, 2.0, 6, 3))
)
def test_every_layout_is_equally_likely(length, density, mean, noise, spans):
    """Checks that all divisions of noise and kept tokens occur, and no other."""
    layouts = {}
    for drop in compositions(noise, spans):
        for keep in compositions(length - noise, spans):
            marks = [[False] * k + [True] * d for k, d in zip(keep, drop, strict=True)]
            layouts[tuple(itertools.chain(*marks))] = len(layouts)
    found = noise_of(length, 30_000, density, mean, seed=1)
    numbers = [layouts[tuple(row)] for row in found.tolist()]
    hits = torch.bincount(torch.tensor(numbers), minlength=len(layouts))
    uniform = torch.full((len(layouts),), 1 / len(layouts))
    assert chi_square(hits, uniform) > 0.001
    # The test must be able to see a bias: it finds one layout that is 60 % too frequent.
    hits[0] += int(0.6 * hits[0])
    assert chi_square(hits, uniform) < 0.001


# --- wrong calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", (span_corruption_lengths, span_corruption_fit))
def test_wrong_arguments_of_the_lengths(function):
    with pytest.raises(ArgumentValueError, match="length` got -1"):
        function(-1)
    with pytest.raises(ArgumentValueError, match="`sentinels` got 0"):
        function(9, sentinels=0)
    with pytest.raises(ArgumentValueError, match=f"{function.__name__}: `noise_density` got 15"):
        function(9, noise_density=15)
