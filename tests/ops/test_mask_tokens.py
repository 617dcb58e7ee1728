"""ops.mask_tokens: the reference against slow plain loops and statistics, csrc/ bit-equal to it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastplm.ops.mask_tokens import mask_tokens
from fastplm.reference.mask_tokens import (
    MaskedTokens,
    mask_tokens_by_plan,
    mask_tokens_ref,
    unit_starts,
)
from fastplm.reference.philox import Stream, draw
from fastplm.testing import chi_square, p_value, poisoned_memory

from ..samples import assert_same, run_compiled

VOCAB = 1000
MASK = 3


UNITS = ("token", "word", "ngram")


def make(batch: int, length: int, dtype=torch.int64, special: float = 0.1, unit="token") -> dict:
    """Inputs on the CPU; every tenth token is special, and words have two tokens on average."""
    words = torch.randint(0, 2, (batch, length)).cumsum(-1)
    return dict(
        input_ids=torch.randint(5, VOCAB, (batch, length), dtype=dtype),
        maskable=torch.rand(batch, length) >= special,
        unit=unit,
        word_ids=None if unit == "token" else words,
        sample_index=torch.randint(0, 2**50, (batch,)),
        vocab_size=VOCAB,
        mask_token_id=MASK,
        seed=11,
    )


def pack(inputs: dict, lengths: torch.Tensor, spare: int = 0) -> dict:
    """The first tokens of each row, packed, with some spare capacity."""
    inside = torch.arange(inputs["input_ids"].shape[1]) < lengths[:, None]
    packed = {
        name: torch.nn.functional.pad(tensor[inside], (0, spare))
        for name, tensor in inputs.items()
        if isinstance(tensor, torch.Tensor) and tensor.dim() == 2
    }
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    return inputs | packed | {"cu_seqlens": ends}


def check(device: torch.device, inputs: dict) -> None:
    """The reference always runs on the CPU, as the bits are the same on every device."""
    assert_same(run_compiled(mask_tokens, device, inputs), mask_tokens_ref(**inputs))


# --- csrc/ and the reference ----------------------------------------------------------------------


@pytest.mark.parametrize("threads", (1, 8))
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
@pytest.mark.parametrize("length", (1, 2, 63, 65, 512, 4096, 5000))
def test_lengths(device, length, dtype, unit, threads):
    # More rows than one thread takes at a time.
    inputs = make(max(3, 8192 // length), length, dtype, unit=unit)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(device, inputs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "maskable",
    (
        torch.zeros(3, 40, dtype=torch.bool),
        torch.eye(40, dtype=torch.bool)[[0, 17, 39]],
        torch.arange(40).expand(3, 40) < torch.tensor([[0], [40], [3]]),
        None,
    ),
    ids=("nothing", "one", "lengths", "all"),
)
@pytest.mark.parametrize("max_predictions", (None, 1, 4, 60))
@pytest.mark.parametrize("mlm_probability", (0.01, 0.15, 1.0))
def test_quotas(device, maskable, max_predictions, mlm_probability):
    inputs = make(3, 40) | {
        "maskable": maskable,
        "max_predictions": max_predictions,
        "mlm_probability": mlm_probability,
    }
    check(device, inputs)


@pytest.mark.parametrize("shape", ((0, 7), (3, 0), (0, 0)))
def test_empty(device, shape):
    check(device, make(*shape))
    out = run_compiled(mask_tokens, device, make(*shape))
    assert out.count == 0 and (out.positions == -1).all() and (out.labels == -100).all()


@given(
    batch=st.integers(0, 5),
    length=st.integers(0, 80),
    special=st.floats(0, 1),
    special_ids=st.sets(st.integers(0, VOCAB - 1), max_size=20),
    probability=st.floats(0, 1, exclude_min=True),
    replace=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    unit=st.sampled_from(UNITS),
    max_ngram=st.integers(2, 8),
    sampling=st.sampled_from(("exact", "bernoulli")),
    max_predictions=st.none() | st.integers(1, 90),
    packed=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=150, deadline=None)
def test_any_input(batch, length, special, special_ids, replace, unit, packed, probability, **rest):
    inputs = make(batch, length, special=special, unit=unit) | {
        "special_ids": torch.tensor(sorted(special_ids), dtype=torch.int64),
        "mask_replace_prob": replace[0],
        "random_replace_prob": replace[1],
        "mlm_probability": probability,
        **rest,
    }
    if packed:
        inputs = pack(inputs, torch.randint(0, length + 1, (batch,)), spare=length % 3)
    check(torch.device("cpu"), inputs)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("sampling", ("exact", "bernoulli"))
@pytest.mark.parametrize("spare", (0, 5))
def test_packed_rows(device, unit, sampling, spare):
    inputs = pack(make(5, 70, unit=unit), torch.tensor([70, 0, 1, 64, 3]), spare)
    check(device, inputs | {"sampling": sampling})


def test_tokens_without_rows(device):
    ids = torch.randint(5, VOCAB, (100,))
    empty = torch.zeros(1, dtype=torch.int32)
    for sampling in ("exact", "bernoulli"):
        inputs = make(1, 1) | {"sampling": sampling, "maskable": None, "sample_index": None}
        inputs |= {"input_ids": ids, "cu_seqlens": empty}
        check(device, inputs)
        assert mask_tokens_ref(**inputs).positions.shape == (0,)


@pytest.mark.parametrize("unit", UNITS)
def test_boundaries_that_do_not_fit_are_held_to_the_tokens(device, unit):
    """A GPU cannot check the boundaries first, so the operator is called here without checks."""
    run_compiled(mask_tokens, device, make(1, 1))
    operator = torch.ops.fastplm_C.mask_tokens
    ids, words = torch.arange(5, 105), torch.arange(100) // 2
    max_ngram = UNITS.index(unit)

    def call(function, boundaries, where):
        ends = torch.tensor(boundaries, dtype=torch.int32)
        given = ids, None, torch.tensor([7]), words, ends, None, torch.tensor(5)
        moved = [a.to(where) if isinstance(a, torch.Tensor) else a for a in given]
        with poisoned_memory():
            return MaskedTokens(
                *function(*moved, 0, 100, 30, 2**30, -1, 2**31, 2**31 + 2**30, 3, 200, max_ngram)
            )

    rising = [20, 50, 90], [-7, 30, 10**6], [100, 100], [50, 2**31 - 1, 2**31 - 1]
    falling = [0, 9, 3, 9], [100, 0, 100, 0, 100], [90, -5, 60, 2, 2**31 - 1]
    for boundaries in (*rising, *falling):
        expected = call(mask_tokens_by_plan, boundaries, torch.device("cpu"))
        assert_same(call(operator, boundaries, device), expected)
        assert (expected.count == 0) == (boundaries in (*falling, [100, 100]))


@pytest.mark.parametrize("unit", UNITS)
def test_special_ids(device, unit):
    inputs = make(3, 200, unit=unit) | {"special_ids": torch.tensor([0, 3, 5, 7, 500, VOCAB - 1])}
    check(device, inputs)
    check(device, inputs | {"special_ids": torch.arange(0, VOCAB, 2), "mask_replace_prob": 0.5})


@pytest.mark.parametrize("unit", UNITS)
def test_rows_of_special_tokens_alone(device, unit):
    inputs = make(3, 40, unit=unit) | {"special_ids": torch.arange(5)}
    inputs["input_ids"][:2] %= 5
    check(device, inputs)
    out = run_compiled(mask_tokens, device, inputs).input_ids.cpu()
    assert torch.equal(out[:2], inputs["input_ids"][:2])
    assert not torch.equal(out[2], inputs["input_ids"][2])


def test_large_vocabulary(device):
    inputs = make(2, 300) | {"vocab_size": 250_002, "mask_token_id": 250_001}
    inputs["input_ids"] = torch.randint(0, 250_002, (2, 300), dtype=torch.int32)
    inputs |= {"mask_replace_prob": 0.0, "random_replace_prob": 1.0}
    check(device, inputs)
    assert run_compiled(mask_tokens, device, inputs).input_ids.max() > 200_000


# --- the reference and what it promises -----------------------------------------------------------


def oracle(inputs: dict):
    """The definition, token by token."""
    ids, maskable = inputs["input_ids"].tolist(), inputs["maskable"].tolist()
    unit, word_ids = inputs["unit"], inputs["word_ids"]
    capacity = max(1, int(0.15 * len(ids[0]) + 0.5))
    positions, labels = [], []
    for row, (tokens, allowed) in enumerate(zip(ids, maskable, strict=True)):

        def words(stream, position, sample=inputs["sample_index"][row]):
            drawn = draw(inputs["seed"], stream, sample_index=sample, position=position)
            return [word.item() for word in drawn]

        candidates = [position for position, free in enumerate(allowed) if free]
        units = []
        for position in candidates:
            follows = units and units[-1][-1] == position - 1
            if (
                follows
                and unit != "token"
                and word_ids[row, position - 1] == word_ids[row, position]
            ):
                units[-1].append(position)
            else:
                units.append([position])
        if unit == "ngram":
            runs, left = [], 0
            for word in units:
                if left and runs[-1][-1] == word[0] - 1:
                    runs[-1] += word
                else:
                    runs.append(word)
                    # 6/11, 9/11 and 1 of all words: one, two and three words.
                    drawn = words(Stream.NGRAM, word[0] // 4)[word[0] % 4] * 11 / 2**32
                    left = 1 if drawn < 6 else 2 if drawn < 9 else 3
                left -= 1
            units = runs

        left = min(capacity, max(1, int(0.15 * len(candidates) + 0.5)), len(candidates))
        chosen = []
        for some in sorted(
            units, key=lambda unit: (words(Stream.MASK_SELECT, unit[0] // 4)[unit[0] % 4], unit[0])
        ):
            if len(some) <= left:
                chosen += some
                left -= len(some)
        for position in sorted(chosen):
            positions.append(row * len(tokens) + position)
            labels.append(tokens[position])
            decision, choice, _, _ = words(Stream.MASK_REPLACE, position)
            if decision / 2**32 < 0.8:
                tokens[position] = MASK
            elif decision / 2**32 < 0.9:
                tokens[position] = choice * VOCAB // 2**32
    return ids, positions, labels, len(ids) * capacity


@pytest.mark.parametrize("unit", UNITS)
def test_reference_against_the_definition(unit):
    inputs = make(6, 61, unit=unit)
    out = mask_tokens_ref(**inputs)
    ids, positions, labels, slots = oracle(inputs)
    assert out.input_ids.tolist() == ids
    assert out.count == len(positions)
    assert out.positions.tolist() == positions + [-1] * (slots - len(positions))
    assert out.labels.tolist() == labels + [-100] * (slots - len(labels))
    assert out.dropped == 0


@pytest.mark.parametrize(
    ("maskable", "quota"), ((0, 0), (1, 1), (9, 1), (10, 2), (16, 2), (30, 5), (40, 6))
)
def test_exact_quota(maskable, quota):
    inputs = make(2, 40) | {"maskable": torch.arange(40).expand(2, 40) < maskable}
    assert mask_tokens_ref(**inputs).count == 2 * quota


def test_every_position_is_equally_likely():
    length, rows = 32, 20_000
    ids = torch.full((rows, length), 7)
    out = mask_tokens(ids, vocab_size=VOCAB, mask_token_id=MASK, seed=1)
    assert out.count == rows * 5
    hits = torch.bincount(out.positions % length, minlength=length).double()
    share = 5 / length
    # Tokens are drawn without replacement, so the counts have the variance of a multinomial times
    # (1 - share) T / (T - 1).
    statistic = ((hits - rows * share) ** 2).sum() / (rows * share * (1 - share))
    assert p_value(statistic * (length - 1) / length, length - 1) > 0.001
    # The test must be able to see a bias: it finds 15 % more tokens at one place.
    hits[0] += 0.15 * rows * share
    statistic = ((hits - rows * share) ** 2).sum() / (rows * share * (1 - share))
    assert p_value(statistic * (length - 1) / length, length - 1) < 0.001


def test_80_10_10():
    ids = torch.full((10_000, 32), 7)
    out = mask_tokens(ids, vocab_size=VOCAB, mask_token_id=MASK, seed=2)
    tokens = out.input_ids.flatten()[out.positions]
    hits = torch.stack(((tokens == MASK).sum(), (tokens == 7).sum()))
    hits = torch.cat((hits, (len(tokens) - hits.sum())[None]))
    share = torch.tensor([0.8 + 0.1 / VOCAB, 0.1 + 0.1 / VOCAB, 0.1 * (1 - 2 / VOCAB)])
    assert chi_square(hits, share) > 0.001
    assert chi_square(hits, torch.tensor([0.79, 0.11, 0.1])) < 0.001


@pytest.mark.parametrize("special", ([], [0, 1, 2, 17, 49]), ids=("all", "no special ids"))
def test_random_ids_are_uniform_over_the_vocabulary(special):
    vocab = 50
    ids = torch.full((10_000, 32), 7)
    out = mask_tokens(
        ids,
        vocab_size=vocab,
        mask_token_id=MASK,
        special_ids=torch.tensor(special, dtype=torch.int64),
        mask_replace_prob=0.0,
        random_replace_prob=1.0,
        seed=3,
    )
    hits = torch.bincount(out.input_ids.flatten()[out.positions], minlength=vocab)
    assert len(hits) == vocab
    ordinary = torch.tensor([i for i in range(vocab) if i not in special])
    assert hits.sum() == hits[ordinary].sum()
    assert chi_square(hits[ordinary], torch.full((len(ordinary),), 1 / len(ordinary))) > 0.001


def test_bernoulli_chooses_each_token_by_itself():
    length, rows = 32, 20_000
    ids = torch.full((rows, length), 7)
    out = mask_tokens(ids, vocab_size=VOCAB, mask_token_id=MASK, sampling="bernoulli", seed=4)
    used = out.positions[: out.count]
    hits = torch.bincount(used % length, minlength=length)
    both = torch.stack((hits, rows - hits), -1)
    share = torch.tensor([0.15, 0.85], dtype=torch.float64)
    statistic = ((both - rows * share) ** 2 / (rows * share)).sum()
    assert p_value(statistic, length) > 0.001
    # The number of chosen tokens in a row is binomial: neighbours are chosen independently.
    in_row = torch.bincount(torch.bincount(used // length, minlength=rows), minlength=length + 1)
    n = torch.arange(length + 1, dtype=torch.float64)
    binomial = torch.lgamma(torch.tensor(length + 1.0)) - torch.lgamma(n + 1)
    binomial = binomial - torch.lgamma(length - n + 1) + n * share[0].log()
    binomial = (binomial + (length - n) * share[1].log()).exp()
    tail = torch.tensor([*in_row[:11], in_row[11:].sum()])
    assert chi_square(tail, torch.tensor([*binomial[:11], binomial[11:].sum()])) > 0.001
    assert out.dropped == 0


def test_run_lengths_and_their_places():
    sample = torch.arange(4000)[:, None]
    candidate = torch.ones(4000, 24, dtype=torch.bool)
    words = torch.arange(24).expand(4000, 24)
    starts = unit_starts(candidate, words, 3, 5, sample, 0)
    # The runs of each row that cannot be cut by its end.
    begins = [row.nonzero()[:, 0] for row in starts]
    lengths = torch.cat([begin.diff()[begin[:-1] < 21] for begin in begins])
    hits = torch.bincount(lengths, minlength=4)[1:]
    assert chi_square(hits, torch.tensor([6 / 11, 3 / 11, 2 / 11])) > 0.001
    assert chi_square(hits, torch.tensor([0.53, 0.28, 0.19])) < 0.001


@pytest.mark.parametrize("unit", ("word", "ngram"))
def test_words_are_never_split(unit):
    inputs = make(50, 120, special=0.05, unit=unit) | {"mask_replace_prob": 1.0}
    inputs["random_replace_prob"] = 0.0
    out = mask_tokens(**inputs)
    chosen = torch.zeros(50 * 120, dtype=torch.bool)
    chosen[out.positions[: out.count]] = True
    chosen = chosen.view(50, 120)
    maskable, words = inputs["maskable"], inputs["word_ids"]
    joined = maskable[:, 1:] & maskable[:, :-1] & (words[:, 1:] == words[:, :-1])
    assert torch.equal(chosen[:, 1:][joined], chosen[:, :-1][joined])
    assert not (chosen & ~maskable).any()
    # All but a few rows reach their number, as shorter words fill the room that longer ones leave.
    wanted = (maskable.sum(-1) * 0.15 + 0.5).long().clamp(max=18)
    assert (chosen.sum(-1) <= wanted).all() and (chosen.sum(-1) == wanted).float().mean() > 0.9


def test_a_word_too_long_is_passed_over():
    # Two of twelve tokens may be chosen, so the word of three never is, even if it comes first.
    words = torch.tensor([[0, 0, 0, 1, 2, 2, 3, 3, 3, 4, 4, 4]])
    for step in range(20):
        out = mask_tokens(
            torch.arange(12)[None] + 5,
            vocab_size=VOCAB,
            mask_token_id=MASK,
            unit="word",
            word_ids=words,
            seed=0,
            step=step,
        )
        assert out.positions.tolist() in ([4, 5], [3, -1])


@pytest.mark.parametrize("sampling", ("exact", "bernoulli"))
@pytest.mark.parametrize("unit", UNITS)
def test_what_the_capacity_forbids_is_counted(sampling, unit):
    inputs = make(20, 100, unit=unit) | {"sampling": sampling, "max_predictions": 100}
    free = mask_tokens(**inputs)
    few = mask_tokens(**inputs | {"max_predictions": 10})
    assert free.dropped == 0 and few.dropped > 0 and few.positions.shape == (200,)
    # Words that do not fit leave slots empty; these are not counted as dropped.
    if unit == "token":
        assert few.count + few.dropped == free.count
    per_row = torch.bincount(few.positions[: few.count] // 100, minlength=20)
    assert (per_row <= 10).all()


def test_packed_rows_are_chosen_as_padded_ones():
    lengths = torch.tensor([40, 0, 1, 33, 2])
    for unit in UNITS:
        inputs = make(5, 40, unit=unit)
        padded = inputs | {"max_predictions": 9}
        padded["maskable"] = inputs["maskable"] & (torch.arange(40) < lengths[:, None])
        one, other = mask_tokens(**padded), mask_tokens(**pack(padded, lengths))
        assert torch.equal(other.labels, one.labels) and other.count == one.count
        inside = torch.arange(40) < lengths[:, None]
        assert torch.equal(other.input_ids, one.input_ids[inside])


def runs_by_alberts_method(words, wanted, generator):
    """Lengths of the runs that ALBERT's authors choose: each has a random start, and a random
    length, which is cut to the number of tokens left to choose."""
    shares = torch.tensor([1.0, 1 / 2, 1 / 3], dtype=torch.float64)
    taken, left, found = torch.zeros(words, dtype=torch.bool), wanted, []
    for start in torch.randperm(words, generator=generator).tolist():
        most = min(3, words - start)
        drawn = 1 + int(torch.multinomial(shares[:most], 1, generator=generator))
        length = min(drawn, left)
        if length and not taken[start : start + length].any():
            taken[start : start + length] = True
            found.append(length)
            left -= length
    return found


@pytest.mark.slow
def test_runs_of_short_rows_are_as_short_as_by_alberts_method():
    """An exact number of tokens leaves less room for long runs: see docs/corruption.md."""
    rows, words, wanted = 1500, 62, 9
    ids = torch.arange(10, 10 + words).repeat(rows, 1)
    masked = mask_tokens(
        ids,
        vocab_size=100,
        mask_token_id=4,
        unit="ngram",
        word_ids=ids.clone(),
        mask_replace_prob=1.0,
        random_replace_prob=0.0,
        seed=0,
    )
    chosen = masked.input_ids == 4
    assert (chosen.sum(1) == wanted).all()
    starts = unit_starts(
        torch.ones_like(chosen), ids, 3, seed=0, sample=torch.arange(rows)[:, None], step=0
    )
    unit = starts.cumsum(1) - 1
    sizes, picked = (
        torch.zeros(rows, words, dtype=torch.int64).scatter_add(1, unit, each.long())
        for each in (torch.ones_like(chosen), chosen)
    )

    def shares(lengths):
        return torch.bincount(lengths, minlength=4)[1:].double() / len(lengths)

    generator = torch.Generator().manual_seed(0)
    theirs = [runs_by_alberts_method(words, wanted, generator) for _ in range(rows)]
    theirs = shares(torch.tensor([length for row in theirs for length in row]))
    ours, all_runs = shares(sizes[picked > 0]), shares(sizes[sizes > 0])
    paper = torch.tensor([6.0, 3.0, 2.0], dtype=torch.float64) / 11
    # Some 8,000 runs have a standard error of half a percent. Only the last run of a row is cut.
    assert (all_runs - paper).abs().max() < 0.015
    assert (ours - theirs).abs().max() < 0.03
    assert ours[0] > paper[0] + 0.04 and ours[2] < paper[2] - 0.02
