from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from fastplm._checks import ArgumentValueError
from fastplm.data import (
    BlockDataset,
    DataCollatorForMaskedTokens,
    NextSentencePairs,
    PretrainingStream,
    SentenceChunks,
)

SPECIAL = {"cls_token_id": 2, "sep_token_id": 3}


@pytest.fixture(scope="module")
def blocks(store):
    return PretrainingStream(BlockDataset(store, 32, **SPECIAL), seed=0, length=60)


@pytest.fixture(scope="module")
def pairs(store):
    stream = PretrainingStream(SentenceChunks(store, 48), seed=0, length=60)
    return NextSentencePairs(stream, **SPECIAL)


def batches(dataset, collator, batch_size=6, workers=0):
    return list(
        DataLoader(dataset, batch_size=batch_size, num_workers=workers, collate_fn=collator)
    )


def test_invariants_of_full_blocks(blocks, tokenizer):
    for batch in batches(blocks, DataCollatorForMaskedTokens(tokenizer, seed=1)):
        assert set(batch) == {
            "input_ids",
            "attention_mask",
            "labels",
            "masked_positions",
            "sample_index",
        }
        assert batch["attention_mask"].all()
        check_masks(batch, tokenizer)
        # The quota of BERT: 15 % of the 30 tokens that are no [CLS] or [SEP] and known.
        unknown = batch["input_ids"].eq(tokenizer.unk_token_id).any()
        assert unknown or (batch["labels"].ne(-100).sum(1) == 5).all()


def test_invariants_of_padded_pairs(pairs, tokenizer):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=1, block_size=48)
    padded = 0
    for batch in batches(pairs, collator):
        assert batch["input_ids"].shape == (6, 48)
        padding = batch["attention_mask"] == 0
        assert (batch["input_ids"][padding] == tokenizer.pad_token_id).all()
        assert (batch["token_type_ids"][padding] == 0).all()
        assert (batch["labels"][padding] == -100).all()
        assert batch["next_sentence_label"].dtype == torch.int64
        check_masks(batch, tokenizer)
        padded += int(padding.sum())
    assert padded > 0


def check_masks(batch, tokenizer):
    chosen = batch["labels"].ne(-100)
    positions = batch["masked_positions"]
    used = positions[positions >= 0]
    assert torch.equal(used, chosen.view(-1).nonzero()[:, 0])
    assert (positions[len(used) :] == -1).all()
    special = torch.tensor(tokenizer.all_special_ids)
    assert not torch.isin(batch["labels"][chosen], special).any()


def test_originals_are_recovered(blocks, tokenizer):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=1)
    samples = [blocks[i] for i in range(8)]
    batch = collator(samples)
    original = torch.where(batch["labels"].ne(-100), batch["labels"], batch["input_ids"])
    assert torch.equal(original, torch.stack([sample["input_ids"] for sample in samples]))


def test_electra_masks_all_that_it_chooses(blocks, tokenizer):
    collator = DataCollatorForMaskedTokens(
        tokenizer, mask_replace_prob=1.0, random_replace_prob=0.0
    )
    batch = collator([blocks[i] for i in range(8)])
    chosen = batch["labels"].ne(-100)
    assert (batch["input_ids"][chosen] == tokenizer.mask_token_id).all()


@pytest.mark.parametrize("kind", ["blocks", "pairs"])
def test_workers_and_batch_size_change_nothing(kind, request, tokenizer):
    dataset = request.getfixturevalue(kind)
    collator = DataCollatorForMaskedTokens(tokenizer, seed=4, block_size=48)
    alone = batches(dataset, collator)
    for other in (batches(dataset, collator, workers=2), batches(dataset, collator, 12)):
        for key in alone[0]:
            if key == "masked_positions":
                continue
            one = torch.cat([batch[key] for batch in alone])
            two = torch.cat([batch[key] for batch in other])
            assert torch.equal(one, two), key


def test_a_plain_list_of_encodings(documents, tokenizer):
    samples = [tokenizer(text, truncation=True, max_length=20) for text in documents[:4]]
    samples[0] = tokenizer("anna reads")
    collator = DataCollatorForMaskedTokens(tokenizer)
    torch.manual_seed(0)
    first, second = collator(samples), collator(samples)
    assert first["input_ids"].shape == (4, 20)
    lengths = [len(sample["input_ids"]) for sample in samples]
    assert lengths[0] < 20
    assert first["attention_mask"].sum(1).tolist() == lengths
    assert not torch.equal(first["labels"], second["labels"])
    torch.manual_seed(0)
    again = collator(samples)
    assert torch.equal(first["labels"], again["labels"])
    assert "token_type_ids" in again


def test_padding_inside_a_sample_is_never_chosen(documents, tokenizer):
    samples = [
        tokenizer(text, truncation=True, padding="max_length", max_length=30)
        for text in ("anna reads", documents[1])
    ]
    batch = DataCollatorForMaskedTokens(tokenizer, mlm_probability=0.9)(samples)
    assert batch["attention_mask"].tolist() == [sample["attention_mask"] for sample in samples]
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_too_long(tokenizer):
    with pytest.raises(ArgumentValueError, match="block_size"):
        DataCollatorForMaskedTokens(tokenizer, block_size=4)([{"input_ids": list(range(9))}])
