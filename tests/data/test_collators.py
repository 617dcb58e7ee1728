from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader

from fastplm._checks import ArgumentValueError, DataError
from fastplm.data import (
    BlockDataset,
    DataCollatorForCausalTokens,
    DataCollatorForMaskedTokens,
    NextSentencePairs,
    PackedDocuments,
    PretrainingStream,
    SentenceChunks,
    sequence_index,
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


# --- two halves, units, packing, causal -----------------------------------------------------------


def assert_same_batch(one, other):
    assert set(one) == set(other)
    for key, value in one.items():
        same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
        assert same, key


@pytest.mark.parametrize("packed", (False, True))
def test_the_halves_make_the_whole(pairs, tokenizer, packed):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2, unit="ngram", packed=packed)
    samples = [pairs[i] for i in range(5)]
    padded = collator.pad(samples)
    before = {key: torch.as_tensor(value).clone() for key, value in padded.items()}
    assert_same_batch(collator.corrupt(padded), collator(samples))
    for key, value in before.items():
        assert torch.equal(torch.as_tensor(padded[key]), value), f"corrupt changed {key}"


@pytest.mark.gpu
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("unit", ("token", "word", "ngram"))
def test_device_tensors_give_the_same_batch(pairs, tokenizer, unit, packed):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2, unit=unit, packed=packed)
    samples = [pairs[i] for i in range(5)]
    on_device = [
        {k: v.cuda() if torch.is_tensor(v) else v for k, v in sample.items()} for sample in samples
    ]
    batch = collator(on_device)
    assert batch["input_ids"].is_cuda
    moved = {k: v.cpu() if torch.is_tensor(v) else v for k, v in batch.items()}
    assert_same_batch(moved, collator(samples))


def test_lists_arrays_and_tensors_are_one(blocks, tokenizer):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2)
    samples = [blocks[i] for i in range(3)]
    for convert in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.int):
        others = [sample | {"input_ids": convert(sample["input_ids"])} for sample in samples]
        assert_same_batch(collator(others), collator(samples))


@pytest.mark.parametrize("unit", ("word", "ngram"))
def test_words_stay_whole(documents, tokenizer, unit):
    samples = [tokenizer(text, truncation=True, max_length=40) for text in documents[:6]]
    collator = DataCollatorForMaskedTokens(tokenizer, mlm_probability=0.4, unit=unit)
    batch = collator(samples)
    assert batch["labels"].ne(-100).any()
    for row, sample in enumerate(samples):
        chosen = batch["labels"][row].ne(-100).tolist()
        by_word = {}
        for place, word in enumerate(sample.word_ids()):
            by_word.setdefault(word, set()).add(chosen[place])
        assert by_word.pop(None) == {False}
        assert all(len(fates) == 1 for fates in by_word.values())


def test_an_epoch_has_masks_of_its_own(blocks, tokenizer):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2)
    samples = [blocks[i] for i in range(3)]
    first = collator(samples)
    collator.set_epoch(1)
    assert not torch.equal(collator(samples)["labels"], first["labels"])
    collator.set_epoch(0)
    assert_same_batch(collator(samples), first)


def test_what_finds_no_room_is_counted_and_said_once(blocks, tokenizer):
    samples = [blocks[i] for i in range(3)]
    collator = DataCollatorForMaskedTokens(tokenizer, max_predictions=3)
    free = DataCollatorForMaskedTokens(tokenizer)
    wanted = int((free(samples)["labels"] != -100).sum())
    with pytest.warns(UserWarning, match="max_predictions"):
        collator(samples)
    assert free.dropped == 0 and collator.dropped == wanted - 9
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collator(samples)
    assert collator.dropped == 2 * (wanted - 9)


def test_special_tokens_mask(tokenizer):
    ids = torch.arange(10, 30)
    mask = (torch.arange(20) % 2).tolist()
    collator = DataCollatorForMaskedTokens(tokenizer, mlm_probability=1.0)
    batch = collator([{"input_ids": ids, "special_tokens_mask": mask}] * 3)
    assert batch["labels"].ne(-100).tolist() == [[not special for special in mask]] * 3
    assert "special_tokens_mask" not in batch


def test_packed_sequences_are_masked_as_padded_ones(pairs, tokenizer):
    samples = [pairs[i] for i in range(6)]
    padded = DataCollatorForMaskedTokens(tokenizer, seed=2, max_predictions=4)(samples)
    for block_size in (None, 48):
        packed = DataCollatorForMaskedTokens(
            tokenizer, seed=2, max_predictions=4, packed=True, block_size=block_size
        )(samples)
        inside = padded["attention_mask"].bool()
        tokens = int(inside.sum())
        assert packed["input_ids"].shape == (1, tokens if block_size is None else 6 * 48)
        for key in ("input_ids", "labels"):
            assert torch.equal(packed[key][0, :tokens], padded[key][inside]), key
        assert (packed["labels"][0, tokens:] == -100).all()
        lengths = inside.sum(1)
        ends = packed["cu_seq_lens_q"]
        assert ends.dtype == torch.int32 and torch.equal(ends.diff(), lengths.int())
        assert packed["max_length_q"] == packed["max_length_k"] == int(lengths.max())
        positions = torch.cat([torch.arange(length) for length in [*lengths, 6 * 48 - tokens]])
        assert torch.equal(packed["position_ids"][0], positions[: packed["input_ids"].shape[1]])
        assert torch.equal(packed["next_sentence_label"], padded["next_sentence_label"])


def test_packed_documents_have_choices_of_their_own(store, tokenizer):
    stream = PretrainingStream(PackedDocuments(store, 64, **SPECIAL), seed=0, length=8)
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2, packed=True)
    batch = collator([stream[i] for i in range(4)])
    lengths = [length for i in range(4) for length in stream[i]["sequence_lengths"]]
    assert batch["cu_seq_lens_q"].diff().tolist() == lengths and len(lengths) > 4
    # A sequence is masked as it would be alone, under its own index.
    ends = batch["cu_seq_lens_q"].tolist()
    original = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])[0]
    place = 0
    for i in range(4):
        for number in range(len(stream[i]["sequence_lengths"])):
            row = slice(ends[place], ends[place + 1])
            index = sequence_index(stream[i]["sample_index"], number)
            alone = DataCollatorForMaskedTokens(tokenizer, seed=2)(
                [{"input_ids": original[row], "sample_index": index}]
            )
            assert torch.equal(alone["input_ids"][0], batch["input_ids"][0, row])
            place += 1


def test_packed_batches_train_like_padded_ones(pairs, tokenizer):
    """In a plain Transformers model: same loss, same gradient, no padding."""
    from transformers import BertConfig, BertForMaskedLM

    import fastplm.hf  # noqa: F401 (registers the attention)

    samples = [{"input_ids": pairs[i]["input_ids"], "sample_index": i} for i in range(5)]
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM._from_config(config, attn_implementation="fastplm")

    def gradients(packed, dtype):
        collator = DataCollatorForMaskedTokens(tokenizer, max_predictions=20, packed=packed)
        batch = collator(samples)
        for key in ("masked_positions", "sample_index"):
            del batch[key]
        model.to(dtype).zero_grad()
        model(**batch).loss.backward()
        named = model.named_parameters()
        return {name: p.grad.double() for name, p in named if p.grad is not None}

    gold, base = gradients(False, torch.float64), gradients(False, torch.float32)
    out = gradients(True, torch.float32)
    largest = max(grad.abs().max() for grad in gold.values())
    assert len(out) == len(gold) > 30
    for name in gold:
        allowed = 3 * (base[name] - gold[name]).abs().max()
        allowed += torch.finfo(torch.float32).eps * largest
        assert (out[name] - gold[name]).abs().max() <= allowed, name


@pytest.mark.parametrize("packed", (False, True))
def test_causal_labels(tokenizer, packed):
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    batch = DataCollatorForCausalTokens(tokenizer, packed=packed, block_size=4)(samples)
    if packed:
        pad = tokenizer.pad_token_id
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, pad, pad, pad]]
        assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, -100, -100]]
    else:
        assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, 9, -100, -100]]


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    (
        ([], DataError, "`samples` got none"),
        ([{"tokens": [1]}], DataError, "expected input_ids"),
        ([[1, 2]], DataError, "`samples` got list"),
        ([{"input_ids": [1, 2], "token_type_ids": [0]}], ArgumentValueError, "`token_type_ids`"),
    ),
)
def test_wrong_samples(tokenizer, samples, error, words):
    with pytest.raises(error) as raised:
        DataCollatorForMaskedTokens(tokenizer)(samples)
    assert words in str(raised.value)


def test_padding_inside_a_packed_sample(tokenizer):
    samples = [{"input_ids": [5, 0], "attention_mask": [1, 0]}]
    with pytest.raises(ArgumentValueError, match="padding inside"):
        DataCollatorForMaskedTokens(tokenizer, packed=True)(samples)
