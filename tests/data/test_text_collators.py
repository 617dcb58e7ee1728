"""The collators of T5 and BART: a row depends on its text, its sample index and the seed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader

from fastplm.data import DataCollatorForDenoising, DataCollatorForSpanCorruption
from fastplm.errors import ArgumentValueError, UnsupportedError

# Settings under which much is random.
KINDS = {
    "t5": partial(DataCollatorForSpanCorruption, block_size=40),
    "bart": partial(
        DataCollatorForDenoising, block_size=70, delete_probability=0.1, rotate_probability=0.5
    ),
}


@pytest.fixture(params=KINDS)
def case(request):
    """(function that makes the collator, samples with BOS (BART's) and EOS)."""
    tokenizer, samples = request.getfixturevalue(request.param)
    return partial(KINDS[request.param], tokenizer), samples


def assert_same(batch, other):
    assert batch.keys() == other.keys()
    for name, value in batch.items():
        assert torch.equal(value, other[name]), name


def test_padding_ends_and_containers_change_nothing(case):
    make, samples = case
    collator = make()
    plain, pad = collator(samples[:8]), collator.tokenizer.pad_token_id
    bos = int(samples[0]["input_ids"][0] == collator.tokenizer.bos_token_id)
    changes = [
        lambda ids: ids[:-1],
        lambda ids: ids[bos:-1],
        lambda ids: [*ids, pad, pad],
        torch.tensor,
        lambda ids: torch.tensor(ids, dtype=torch.int32).numpy(),
    ]
    for change in changes:
        changed = [sample | {"input_ids": change(sample["input_ids"])} for sample in samples[:8]]
        assert_same(collator(changed), plain)


@pytest.mark.parametrize("before, behind", [(3, 0), (0, 2), (2, 1)])
@pytest.mark.parametrize("convert", [list, torch.tensor])
def test_the_attention_mask_says_what_is_text(case, before, behind, convert):
    make, samples = case
    collator = make()
    pad = collator.tokenizer.pad_token_id
    changed = []
    for sample in samples[:8]:
        ids = [pad] * before + sample["input_ids"] + [7] * behind
        seen = [0] * before + [1] * len(sample["input_ids"]) + [0] * behind
        changed.append(sample | {"input_ids": convert(ids), "attention_mask": convert(seen)})
    assert_same(collator(changed), collator(samples[:8]))


def test_pad_and_corrupt_are_the_whole_collator(case):
    make, samples = case
    collator = make()
    padded = collator.pad(samples[:8])
    before = {name: value.clone() for name, value in padded.items()}
    assert_same(collator.corrupt(padded), collator(samples[:8]))
    assert_same(padded, before)


@pytest.mark.gpu
def test_corrupted_on_the_gpu(case):
    make, samples = case
    collator = make()
    padded = {name: value.cuda() for name, value in collator.pad(samples[:8]).items()}
    corrupted = collator.corrupt(padded)
    assert all(value.is_cuda for value in corrupted.values())
    assert_same({name: value.cpu() for name, value in corrupted.items()}, collator(samples[:8]))


def test_workers_batch_size_and_order_change_nothing(case):
    make, samples = case
    collator = make(seed=4)

    def rows(samples, batch_size, workers=0):
        loader = DataLoader(samples, batch_size, num_workers=workers, collate_fn=collator)
        batches = list(loader)
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    alone = rows(samples[:48], 8)
    assert_same(rows(samples[:48], 8, workers=2), alone)
    assert_same(rows(samples[:48], 16), alone)
    backwards = rows(samples[:48][::-1], 8)
    assert_same({name: value.flip(0) for name, value in backwards.items()}, alone)


@pytest.mark.parametrize(
    "kind, settings, error, words",
    [
        ("t5", {"packed": True}, UnsupportedError, "`packed` got True.*ops.corrupt_spans takes"),
        ("bart", {"packed": True}, UnsupportedError, "`packed` got True.*ops.bart_noise takes"),
        ("t5", {"block_size": 0}, ArgumentValueError, "ForSpanCorruption: `block_size` got 0"),
        ("t5", {"noise_density": 15}, ArgumentValueError, "`noise_density` got 15"),
        ("bart", {"infill_probability": 2.0}, ArgumentValueError, "infill_probability"),
    ],
)
def test_wrong_settings(kind, settings, error, words, request):
    tokenizer, samples = request.getfixturevalue(kind)
    with pytest.raises(error, match=words):
        KINDS[kind](tokenizer, **settings)(samples[:1])


def test_seed_epoch_and_sample_change_the_noise(case):
    make, samples = case

    def noised(seed=0, epoch=0, shift=0):
        collator = make(seed=seed)
        collator.set_epoch(epoch)
        moved = [sample | {"sample_index": sample["sample_index"] + shift} for sample in samples]
        return collator(moved)["input_ids"]

    base = noised()
    assert torch.equal(noised(), base)
    for change in ({"seed": 1}, {"epoch": 1}, {"shift": 1}):
        assert not torch.equal(noised(**change), base)
