"""ops.bart_noise: the reference against slow plain loops and statistics, csrc/ bit-equal to it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from decimal import Decimal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastplm.ops.bart_noise import bart_noise
from fastplm.reference.bart_noise import bart_noise_ref, poisson_thresholds
from fastplm.reference.philox import Stream, draw
from fastplm.testing import chi_square

from ..samples import assert_same, run_compiled

VOCAB = 1000
PAD, BOS, EOS, MASK = 0, 1, 2, 3
SPECIAL = torch.tensor([PAD, BOS, EOS, MASK, 500, VOCAB - 1])
ENDS = torch.tensor([17, 18, 400, 401, 402, 403, 404, 405, 406, 900])
NOTHING = dict(infill_probability=0.0, permute_sentences=0.0, random_replace_prob=0.0)
ALL = dict(mask_probability=0.1, delete_probability=0.1, rotate_probability=0.5)
MIXES = {
    "nothing": NOTHING,
    "permute": NOTHING | {"permute_sentences": 1.0},
    "permute_half": NOTHING | {"permute_sentences": 0.5},
    "rotate": NOTHING | {"rotate_probability": 0.7},
    "infill": NOTHING | {"infill_probability": 0.3},
    "infill_all": NOTHING | {"infill_probability": 1.0, "random_replace_prob": 0.5},
    "mask": NOTHING | {"mask_probability": 0.3, "random_replace_prob": 0.5},
    "delete": NOTHING | {"delete_probability": 0.3},
    "bart": {},
    "all": ALL,
}


def make(batch: int, length: int, dtype=torch.int64, **options) -> dict:
    """Rows of all lengths in which a hundredth of the tokens ends a sentence, on the CPU."""
    lengths = torch.randint(0, length + 1, (batch,))
    lengths[:1] = length
    return dict(
        input_ids=torch.randint(4, VOCAB, (batch, length), dtype=dtype),
        lengths=lengths,
        sample_index=torch.randint(0, 2**50, (batch,)),
        vocab_size=VOCAB,
        mask_token_id=MASK,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        sentence_end_ids=ENDS,
        special_ids=SPECIAL,
        seed=11,
    ) | options  # fmt: skip


def pack(inputs: dict, spare: int = 0) -> dict:
    """The same rows packed, with spare tokens behind them."""
    rows = [row[:n] for row, n in zip(inputs["input_ids"], inputs["lengths"], strict=True)]
    ids = torch.cat([*rows, inputs["input_ids"].new_full((spare,), 7)])
    boundaries = torch.nn.functional.pad(inputs["lengths"].cumsum(0), (1, 0)).int()
    length = inputs["input_ids"].shape[1]
    packed = dict(input_ids=ids, lengths=None, cu_seqlens=boundaries, max_seqlen=length)
    return inputs | packed


def check(device: torch.device, inputs: dict) -> None:
    """The reference always runs on the CPU, as the bits are the same on every device."""
    assert_same(run_compiled(bart_noise, device, inputs), bart_noise_ref(**inputs))


# --- csrc/ and the reference ----------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
@pytest.mark.parametrize("length", (0, 1, 2, 17, 65, 512, 4096))
def test_lengths(device, length, dtype, mix):
    check(device, make(2 if length == 4096 else 5, length, dtype, **MIXES[mix]))


@pytest.mark.parametrize("threads", (1, 8))
def test_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(torch.device("cpu"), make(100, 96, **ALL))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("mix", ("bart", "all"))
@pytest.mark.parametrize("spare", (0, 9))
def test_packed_rows_are_the_padded_ones(device, mix, spare):
    inputs = make(7, 65, **MIXES[mix])
    packed = pack(inputs, spare)
    expected = bart_noise_ref(**inputs)
    assert_same(bart_noise_ref(**packed), expected)
    assert_same(run_compiled(bart_noise, device, packed), expected)


@pytest.mark.parametrize("batch", (0, 3))
@pytest.mark.parametrize("edges", list(itertools.product((BOS, None), (EOS, None))))
def test_without_bos_eos_lengths_and_ids(device, batch, edges):
    optional = ("lengths", "sample_index", "sentence_end_ids", "special_ids")
    inputs = make(batch, 33) | dict.fromkeys(optional)
    inputs |= dict(zip(("bos_token_id", "eos_token_id"), edges, strict=True))
    check(device, inputs)
    assert_same(bart_noise_ref(**inputs | {"sample_index": torch.arange(batch)}),
                bart_noise_ref(**inputs))  # fmt: skip


@pytest.mark.parametrize("poisson_lambda", (1e-12, 0.05, 1.0, 20.0))
def test_span_lengths(device, poisson_lambda):
    check(device, make(4, 70, poisson_lambda=poisson_lambda, capacity=150))


def test_every_token_ends_a_sentence(device):
    for share in (0.3, 1.0):
        ends = torch.arange(VOCAB)
        check(device, make(2, 1025, sentence_end_ids=ends, permute_sentences=share))


@pytest.mark.parametrize("vocab_size", (250_002, 2**21))
@pytest.mark.parametrize("dtype", (torch.int64, torch.int32))
def test_large_vocabularies_and_ids_outside(device, vocab_size, dtype):
    inputs = make(3, 200, vocab_size=vocab_size, random_replace_prob=0.5, **ALL)
    ids = torch.randint(-100, vocab_size + 100, (3, 200), dtype=dtype)
    ends = torch.cat([torch.tensor([-7]), torch.arange(0, vocab_size + 50, 20)])
    check(device, inputs | dict(input_ids=ids, sentence_end_ids=ends))


@given(
    batch=st.integers(0, 4),
    length=st.integers(0, 70),
    shares=st.lists(st.floats(0, 1), min_size=5, max_size=5),
    mean=st.floats(1e-6, 20),
    fates=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    capacity=st.none() | st.integers(2, 90),
    packed=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@settings(max_examples=60, deadline=None)
def test_any_input(batch, length, shares, mean, fates, capacity, packed, seed):
    names = ("infill_probability", "permute_sentences", "rotate_probability", "random_replace_prob")
    inputs = make(batch, length, capacity=capacity, poisson_lambda=mean, seed=seed)
    inputs |= dict(zip(names, shares, strict=False))
    inputs |= dict(mask_probability=fates[0], delete_probability=fates[1])
    inputs["sentence_end_ids"] = torch.arange(int(shares[4] * VOCAB))
    check(torch.device("cpu"), pack(inputs, 3) if packed else inputs)


# --- the reference and what it promises -----------------------------------------------------------


def half_up(x: float) -> int:
    return math.floor(x + 0.5)


def oracle_row(tokens: list[int], sample: int, inputs: dict) -> list[int]:
    """The definition, token by token; all options are in ``inputs``."""

    def words(stream, position):
        return [w.item() for w in draw(inputs["seed"], stream, sample_index=torch.tensor(sample),
                                       position=position)]  # fmt: skip

    def keys(stream, count, first):
        return [(words(stream, first + i // 4)[i % 4], i) for i in range(count)]

    def mask(kind, word):
        if kind / 2**32 >= inputs["random_replace_prob"]:
            return MASK
        allowed = [i for i in range(VOCAB) if i not in SPECIAL.tolist()]
        return allowed[word * len(allowed) // 2**32]

    n = len(tokens)
    sentences, current = [], []
    for place in range(n):
        current.append(place)
        if tokens[place] in ENDS.tolist() or place == n - 1:
            sentences.append(current)
            current = []
    moving = half_up(inputs["permute_sentences"] * len(sentences))
    sites = sorted(i for _, i in sorted(keys(Stream.ORDER, len(sentences), 0))[:moving])
    shuffled = [sites[i] for _, i in sorted(keys(Stream.ORDER, moving, 2**30))]
    new = dict(zip(sites, shuffled, strict=True))
    order = [p for i in range(len(sentences)) for p in sentences[new.get(i, i)]]
    event, word, _, _ = words(Stream.ORDER, 2**31)
    if event / 2**32 < inputs["rotate_probability"]:
        start = word * n // 2**32
        order = order[start:] + order[:start]

    m = half_up(inputs["infill_probability"] * n)
    cdf = [sum(math.exp(-3) * 3**j / math.factorial(j) for j in range(k + 1)) for k in range(30)]
    spans = []
    while sum(length for length, _ in spans) < m:
        word, choice, kind, _ = words(Stream.INFILL, len(spans))
        length = sum(word >= round(c * 2**32) for c in cdf)
        spans.append((min(length, m - sum(x for x, _ in spans)), mask(kind, choice)))
    first = words(Stream.INFILL, 2**31)[0] * len(spans) // 2**32
    spans = spans[first:] + spans[:first]
    items = n - m + len(spans)
    layout = {i for _, i in sorted(keys(Stream.INFILL, items, 2**30))[: len(spans)]}
    out = []
    for item in range(items):
        if item in layout:
            length, token = spans.pop(0)
            order = order[length:]
            out.append(token)
            continue
        place = order.pop(0)
        fate, choice, kind, _ = words(Stream.NOISE, place)
        if fate / 2**32 < inputs["delete_probability"]:
            continue
        masked = fate / 2**32 < inputs["delete_probability"] + inputs["mask_probability"]
        out.append(mask(kind, choice) if masked else tokens[place])
    return out


@pytest.mark.parametrize("sentence", (1.0, 0.6))
def test_reference_against_the_definition(sentence):
    options = dict(infill_probability=0.3, permute_sentences=sentence, random_replace_prob=0.4)
    inputs = make(5, 37, **ALL, **options)
    inputs["input_ids"][:, ::6] = 400
    out = bart_noise_ref(**inputs, capacity=60)
    assert out.dropped == 0
    for row, n, sample, noised, size in zip(
        inputs["input_ids"].tolist(), inputs["lengths"].tolist(), inputs["sample_index"].tolist(),
        out.input_ids.tolist(), out.lengths.tolist(), strict=True,
    ):  # fmt: skip
        content = oracle_row(row[:n], sample, inputs)
        assert noised[:size] == [BOS, *content, EOS]
        assert noised[size:] == [PAD] * (60 - size)


def test_thresholds_are_those_of_a_poisson_distribution():
    for mean in ("0.5", "3", "3.5", "20"):
        wanted, probability = [], (-Decimal(mean)).exp()
        cumulated = probability
        while round(cumulated * 2**32) < 2**32:
            wanted.append(round(cumulated * 2**32))
            probability *= Decimal(mean) / len(wanted)
            cumulated += probability
        assert poisson_thresholds(float(mean)) == tuple(wanted)
        assert len(wanted) <= 64  # csrc/ has room for so many


def rows_of(tokens, rows: int, **options):
    """The same text in each of many rows, with NOTHING but the options."""
    ids = torch.as_tensor(tokens).expand(rows, -1)
    inputs = dict(vocab_size=VOCAB, mask_token_id=MASK, pad_token_id=PAD, special_ids=SPECIAL)
    return bart_noise(ids, **inputs | NOTHING | options)


def infill_outcomes(n: int, m: int, mean: float, most: int, turns: bool = True) -> dict:
    """The probability of each result for the row 100, 101, …, by enumeration of up to ``most``
    spans."""
    pmf = [math.exp(-mean) * mean**k / math.factorial(k) for k in range(m)]
    outcomes: Counter = Counter()

    def lay(lengths, probability):
        spans = len(lengths)
        layouts = list(itertools.combinations(range(n - m + spans), spans))
        rotations = range(spans if turns else 1)
        for turn, layout in itertools.product(rotations, layouts):
            rest = list(range(100, 100 + n))
            left = [*lengths[turn:], *lengths[:turn]]
            out = []
            for item in range(n - m + spans):
                if item in layout:
                    out.append(MASK)
                    rest = rest[left.pop(0) :]
                else:
                    out.append(rest.pop(0))
            outcomes[tuple(out)] += probability / len(rotations) / len(layouts)

    def grow(lengths, probability):
        needed = m - sum(lengths)
        if len(lengths) == most:
            return
        lay([*lengths, needed], probability * (1 - sum(pmf[:needed])))
        for length in range(needed):
            grow([*lengths, length], probability * pmf[length])

    grow([], 1.0)
    return outcomes


@pytest.mark.parametrize(("n", "m", "mean"), ((4, 2, 1.0), (6, 2, 3.0)))
def test_every_infilling_is_as_likely_as_it_should_be(n, m, mean):
    rows = 30_000
    out = rows_of(range(100, 100 + n), rows, infill_probability=m / n, poisson_lambda=mean,
                  capacity=20, seed=5)  # fmt: skip
    assert out.dropped == 0
    seen = Counter(
        tuple(row[:size])
        for row, size in zip(out.input_ids.tolist(), out.lengths.tolist(), strict=True)
    )
    outcomes = infill_outcomes(n, m, mean, most=5)
    likely = {outcome: p for outcome, p in outcomes.items() if p * rows >= 10}
    assert sum(likely.values()) > 0.8 and len(likely) > 20
    probability = [*likely.values(), 1 - sum(likely.values())]
    observed = [seen[outcome] for outcome in likely]
    observed.append(rows - sum(observed))
    assert chi_square(observed, probability) > 0.001
    if mean == 1.0:
        # The test must be able to see a bias: it sees if the span that is cut is always the last.
        wrong = infill_outcomes(n, m, mean, most=5, turns=False)
        probability = [wrong[outcome] for outcome in likely]
        assert chi_square(observed, [*probability, 1 - sum(probability)]) < 0.001


SENTENCES = [[20, 400], [21, 22, 23, 17], [24, 18], [25, 26, 27]]


def sentence_orders(**options) -> Counter:
    text = [token for sentence in SENTENCES for token in sentence]
    out = rows_of(text, 12_000, sentence_end_ids=ENDS, **options)
    assert (out.lengths == len(text)).all()
    return Counter(map(tuple, out.input_ids.tolist()))


def joined(order) -> tuple:
    return tuple(token for i in order for token in SENTENCES[i])


def test_sentences_are_in_any_order_equally_often():
    seen = sentence_orders(permute_sentences=1.0, seed=7)
    orders = [joined(order) for order in itertools.permutations(range(4))]
    assert set(seen) <= set(orders)
    assert chi_square([seen[order] for order in orders], [1 / 24] * 24) > 0.001
    assert chi_square([seen[order] for order in orders], [0.06] + [0.94 / 23] * 23) < 0.001


def test_rotation_begins_anywhere():
    text = list(range(100, 107))
    out = rows_of(text, 14_000, rotate_probability=0.7, seed=9)
    seen = Counter(map(tuple, out.input_ids.tolist()))
    turns = [tuple(text[i:] + text[:i]) for i in range(7)]
    assert set(seen) == set(turns)
    observed = [seen[turn] for turn in turns]
    assert chi_square(observed, [0.3 + 0.1] + [0.1] * 6) > 0.001
    assert chi_square(observed, [0.32 + 0.68 / 7] + [0.68 / 7] * 6) < 0.001


def test_fates_of_tokens():
    tokens = torch.arange(1000, 1032)
    rows = 4_000
    out = rows_of(tokens, rows, mask_probability=0.15, delete_probability=0.2, seed=10,
                  vocab_size=VOCAB, random_replace_prob=0.4)  # fmt: skip
    masks = (out.input_ids == MASK).sum()
    kept = (out.input_ids >= 1000).sum()
    deleted = rows * 32 - out.lengths.sum()
    random = out.lengths.sum() - masks - kept
    observed = torch.stack([masks, random, deleted, kept])
    assert chi_square(observed, [0.09, 0.06, 0.2, 0.65]) > 0.001
    assert chi_square(observed, [0.095, 0.065, 0.19, 0.65]) < 0.001
    # Each position is equally likely.
    by_position = torch.bincount(out.input_ids[out.input_ids >= 1000] - 1000, minlength=32)
    assert chi_square(by_position, [1 / 32] * 32) > 0.001


@pytest.mark.parametrize("noise", ({"mask_probability": 1.0}, {"infill_probability": 1.0}))
def test_random_ids_are_uniform_without_special_ones(noise):
    special = torch.tensor([0, 3, 4, 17, 29])
    out = rows_of([40] * 64, 600, **noise, random_replace_prob=1.0, vocab_size=30,
                  special_ids=special, mask_token_id=3, pad_token_id=31, seed=11)  # fmt: skip
    hits = torch.bincount(out.input_ids.flatten(), minlength=32)[:30]
    assert not hits[special].any() and hits.sum() > 10_000
    allowed = [i for i in range(30) if i not in special.tolist()]
    assert chi_square(hits[allowed], [1 / 25] * 25) > 0.001


@given(
    n=st.integers(0, 60),
    infill=st.floats(0, 1),
    mean=st.floats(0.5, 8),
    permute=st.floats(0, 1),
    rotate=st.sampled_from((0.0, 1.0)),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_infilling_covers_as_many_tokens_as_asked(n, infill, mean, permute, rotate, seed):
    text = torch.arange(1000, 1000 + n)
    ends = text[::7]
    noise = dict(permute_sentences=permute, rotate_probability=rotate, sentence_end_ids=ends)
    options = dict(poisson_lambda=mean, seed=seed, capacity=400)
    order = rows_of(text, 1, **noise, **options).input_ids[0, :n].tolist()
    assert sorted(order) == text.tolist()
    out = rows_of(text, 1, infill_probability=infill, **noise, **options)
    content = out.input_ids[0, : out.lengths[0]].tolist()
    kept = [token for token in content if token != MASK]
    assert len(kept) == n - math.floor(infill * n + 0.5)
    remaining = iter(order)
    assert all(token in remaining for token in kept), "not in the order of the text"


@pytest.mark.parametrize("capacity", (2, 3, 10, 39, 60))
def test_what_does_not_fit_is_cut_and_counted(device, capacity):
    inputs = make(6, 40, infill_probability=0.2, poisson_lambda=0.3)
    whole = bart_noise_ref(**inputs, capacity=100)
    assert whole.dropped == 0 and whole.lengths.max() > 42
    cut = run_compiled(bart_noise, device, inputs | {"capacity": capacity})
    assert_same(cut, bart_noise_ref(**inputs, capacity=capacity))
    assert cut.dropped == (whole.lengths - cut.lengths.cpu()).sum()
    for row, full, size in zip(cut.input_ids, whole.input_ids, cut.lengths, strict=True):
        assert row[size - 1] == EOS and torch.equal(row[: size - 1].cpu(), full[: size - 1])
    # Without `capacity` a row may not grow.
    assert bart_noise(**inputs).input_ids.shape == (6, 42)


@pytest.mark.gpu
def test_boundaries_that_make_no_sense_stay_within_the_tokens():
    device = torch.device("cuda")
    run_compiled(bart_noise, device, make(1, 1))
    packed = pack(make(4, 30))
    packed["cu_seqlens"] = torch.tensor([5, -9, 80, 20, 10**6], dtype=torch.int32)
    lengths = make(3, 30) | {"lengths": torch.tensor([-5, 10**9, 7])}
    for inputs in (packed, lengths):
        assert_same(run_compiled(bart_noise, device, inputs), bart_noise_ref(**inputs))
