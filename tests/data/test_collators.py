from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from fastplm import ops
from fastplm.data import (
    BlockDataset,
    Collator,
    DataCollatorForCausalTokens,
    DataCollatorForDenoising,
    DataCollatorForMaskedTokens,
    DataCollatorForSpanCorruption,
    NextSentencePairs,
    PackedDocuments,
    PretrainingStream,
    SentenceChunks,
    sequence_index,
)
from fastplm.errors import ArgumentTypeError, ArgumentValueError, DataError
from fastplm.models._ragged import RaggedBatch

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
        # BERT's quota: 15 % of the 30 tokens that are known, and not [CLS] or [SEP].
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


# --- two halves, units, packing, causal -----------------------------------------------------------


def assert_same_batch(one, other):
    assert set(one) == set(other)
    for key, value in one.items():
        same = torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
        assert same, key


@pytest.mark.parametrize("packed", (False, True))
def test_pad_and_corrupt_are_the_whole_collator(pairs, tokenizer, packed):
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


def test_lists_arrays_and_tensors_give_the_same_batch(blocks, tokenizer):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2)
    samples = [blocks[i] for i in range(3)]
    bytes_ = (torch.Tensor.byte, lambda ids: ids.numpy().astype(np.uint8), tuple)
    for convert in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.int, *bytes_):
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


def test_each_epoch_has_other_masks(blocks, tokenizer):
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2)
    samples = [blocks[i] for i in range(3)]
    first = collator(samples)
    collator.set_epoch(1)
    assert not torch.equal(collator(samples)["labels"], first["labels"])
    collator.set_epoch(0)
    assert_same_batch(collator(samples), first)


def test_dropped_tokens_are_counted_with_one_warning(blocks, tokenizer):
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
    samples = [
        pairs[i] | {"special_tokens_mask": (pairs[i]["input_ids"] % 2).tolist()} for i in range(6)
    ]
    settings = dict(seed=2, mlm_probability=0.5, max_predictions=24)
    padded = DataCollatorForMaskedTokens(tokenizer, **settings)(samples)
    for block_size in (None, 48):
        settings["block_size"] = block_size
        packed = DataCollatorForMaskedTokens(tokenizer, packed=True, **settings)(samples)
        assert "special_tokens_mask" not in packed and "attention_mask" not in packed
        inside = padded["attention_mask"].bool()
        tokens = int(inside.sum())
        assert packed["input_ids"].shape == (1, tokens if block_size is None else 6 * 48)
        for key in ("input_ids", "labels", "token_type_ids"):
            assert torch.equal(packed[key][0, :tokens], padded[key][inside]), key
        assert (packed["token_type_ids"][0, tokens:] == 0).all()
        assert (packed["labels"][0, tokens:] == -100).all()
        assert (packed["labels"][packed["labels"] != -100] % 2 == 0).all()
        lengths = inside.sum(1)
        ends = packed["cu_seq_lens_q"]
        assert ends.dtype == torch.int32 and torch.equal(ends.diff(), lengths.int())
        assert packed["max_length_q"] == packed["max_length_k"] == int(lengths.max())
        positions = torch.cat([torch.arange(length) for length in lengths])
        assert torch.equal(packed["position_ids"][0, :tokens], positions)
        assert (packed["position_ids"][0, tokens:] == 0).all(), "no position a model may not have"
        assert torch.equal(packed["next_sentence_label"], padded["next_sentence_label"])


def test_packed_documents_have_independent_masks(store, tokenizer):
    stream = PretrainingStream(PackedDocuments(store, 64, **SPECIAL), seed=0, length=8)
    collator = DataCollatorForMaskedTokens(tokenizer, seed=2, packed=True)
    batch = collator([stream[i] for i in range(4)])
    lengths = [length for i in range(4) for length in stream[i]["sequence_lengths"]]
    assert batch["cu_seq_lens_q"].diff().tolist() == lengths and len(lengths) > 4
    # A sequence is masked as it would be alone, with its own sample index.
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


def plain_model(family, tokenizer):
    """A small model of Transformers with dropout off."""
    import transformers

    import fastplm.hf  # noqa: F401 (registers the attention)

    off = {f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")}
    off |= {f"{name}_dropout_prob": 0.0 for name in ("hidden", "attention_probs")}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "pad_token_id": tokenizer.pad_token_id, "use_cache": False}
    config = transformers.AutoConfig.for_model(family, vocab_size=len(tokenizer), **sizes, **off)
    kind = "CausalLM" if family == "gpt2" else "MaskedLM"
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{kind}").from_config(
        config, attn_implementation="fastplm"
    )


@pytest.mark.parametrize("block_size", (None, 48))
@pytest.mark.parametrize("family", ("bert", "roberta", "albert", "gpt2"))
def test_packed_batches_train_like_padded_ones(pairs, tokenizer, family, block_size):
    """Packed rows give a Transformers model the loss and gradient of the padded batch."""
    keys = ("input_ids", "sample_index") if family == "gpt2" else (*pairs[0],)
    keys = [key for key in keys if key != "next_sentence_label"]
    samples = [{key: pairs[i][key] for key in keys} for i in range(5)]
    offset = tokenizer.pad_token_id + 1 if family == "roberta" else 0
    if family == "roberta":
        samples = [s | {"token_type_ids": s["token_type_ids"] * 0} for s in samples]
    model = plain_model(family, tokenizer)

    def gradients(packed, dtype):
        settings = dict(packed=packed, block_size=block_size, position_offset=offset)
        if family == "gpt2":
            collator = DataCollatorForCausalTokens(tokenizer, **settings)
        else:
            collator = DataCollatorForMaskedTokens(tokenizer, max_predictions=20, **settings)
        model.to(dtype).zero_grad()
        model(**collator(samples)).loss.backward()
        named = model.named_parameters()
        return {name: p.grad.double() for name, p in named if p.grad is not None}

    gold, base = gradients(False, torch.float64), gradients(False, torch.float32)
    out = gradients(True, torch.float32)
    largest = max(grad.abs().max() for grad in gold.values())
    assert len(out) == len(gold) > 20
    for name in gold:
        allowed = 3 * (base[name] - gold[name]).abs().max()
        allowed += torch.finfo(torch.float32).eps * largest
        assert (out[name] - gold[name]).abs().max() <= allowed, name


@pytest.mark.parametrize("packed, offset", [(False, 0), (True, 0), (True, 2)])
def test_causal_labels(tokenizer, packed, offset):
    samples = [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    batch = DataCollatorForCausalTokens(
        tokenizer, packed=packed, block_size=4, position_offset=offset
    )(samples)
    if packed:
        positions = batch["position_ids"] - offset
        assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
        pad = tokenizer.pad_token_id
        assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, pad, pad, pad]]
        assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, -100, -100]]
    else:
        assert batch["labels"].tolist() == [[5, 6, 7, -100], [8, 9, -100, -100]]


# --- what is never chosen -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    """A tokenizer of words; [MASK] is its only special token, so it cannot pad."""
    words = [*(f"w{i}" for i in range(40)), "[MASK]"]
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    return PreTrainedTokenizerFast(tokenizer_object=model, mask_token="[MASK]")


@pytest.mark.parametrize("field", (None, "special_tokens_mask", "attention_mask"))
def test_padding_is_not_chosen_without_a_pad_token(plain, field):
    assert plain.pad_token_id is None and plain.all_special_ids == [40]
    lengths = (3, 12, 7)
    samples = [{"input_ids": [*range(n)], "sample_index": n} for n in lengths]
    if field is not None:
        value = int(field == "attention_mask")
        samples = [s | {field: [1 - value, *[value] * (len(s["input_ids"]) - 1)]} for s in samples]
    collator = DataCollatorForMaskedTokens(plain, mlm_probability=1.0, max_predictions=12)
    batch = collator(samples)
    chosen = batch["labels"] != -100
    assert chosen.sum(1).tolist() == [n - (field is not None) for n in lengths]
    padding = torch.arange(12) >= torch.tensor(lengths)[:, None]
    assert not chosen[padding].any() and (batch["input_ids"][padding] == 0).all()


def test_no_maskable_tensor_where_ids_are_enough(blocks, tokenizer, plain, monkeypatch):
    given, mask_tokens = [], ops.mask_tokens

    def spy(input_ids, **settings):
        given.append(settings["maskable"])
        return mask_tokens(input_ids, **settings)

    monkeypatch.setattr(ops, "mask_tokens", spy)
    samples = [blocks[0], {"input_ids": [5, 6, 7], "sample_index": 1}]
    DataCollatorForMaskedTokens(tokenizer)(samples)
    DataCollatorForMaskedTokens(tokenizer, packed=True, block_size=48)(samples)
    DataCollatorForMaskedTokens(plain)([{"input_ids": [1, 2]}])
    assert [maskable is None for maskable in given] == [True, True, False]


def test_added_special_tokens_are_special(plain):
    tokenizer = pickle.loads(pickle.dumps(plain))
    tokenizer.add_tokens(["<added>", "<plain>"])
    tokenizer.add_tokens(["<marker>"], special_tokens=True)
    added, marker = tokenizer.convert_tokens_to_ids(["<added>", "<marker>"])
    assert marker not in tokenizer.all_special_ids
    collator = DataCollatorForMaskedTokens(tokenizer, mlm_probability=1.0)
    batch = collator([{"input_ids": [3, added, marker, 4]}])
    assert batch["labels"].tolist() == [[3, added, -100, 4]]


# --- packed ---------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_padding_inside_of_a_packed_sample_on_a_gpu_is_not_chosen(tokenizer):
    ids, mask = torch.arange(10, 20).cuda(), (torch.arange(10) < 7).cuda()
    collator = DataCollatorForMaskedTokens(
        tokenizer, mlm_probability=1.0, packed=True, max_predictions=10
    )
    batch = collator([{"input_ids": ids, "attention_mask": mask}])
    assert torch.equal(batch["labels"][0] != -100, mask)


GOOD = {"input_ids": [5, 6, 7], "sequence_lengths": [1, 2], "sample_index": 2**43 - 1}


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    (
        ({"sequence_lengths": [2, 2]}, DataError, "`sequence_lengths` got [2, 2] for 3 tokens"),
        ({"sequence_lengths": [4, -1]}, DataError, "got [4, -1] for 3 tokens in sample 1"),
        ({"sample_index": -1}, DataError, "`sample_index` got -1 in sample 1"),
        ({"sample_index": 2**43}, DataError, f"`sample_index` got {2**43} in sample 1"),
        ({"attention_mask": [1, 0, 1]}, ArgumentValueError, "padding inside in sample 1"),
        ({"attention_mask": torch.tensor([1, 1, 0])}, ArgumentValueError, "padding inside in sam"),
        ({"attention_mask": torch.ones(3)}, DataError, "`attention_mask` got a torch.float32 in"),
    ),
)
def test_wrong_packed_samples(tokenizer, changes, error, words):
    collator = DataCollatorForMaskedTokens(tokenizer, packed=True)
    good = GOOD | ({"attention_mask": [1, 1, 1]} if "attention_mask" in changes else {})
    assert collator([good, good])["cu_seq_lens_q"].tolist() == [0, 1, 3, 4, 6]
    with pytest.raises(error) as raised:
        collator([good, good | changes])
    assert words in str(raised.value)


# --- samples and settings that cannot be ----------------------------------------------------------


def test_one_warning_if_seed_or_epoch_have_no_effect(tokenizer, blocks):
    known, unknown = [blocks[0]], [{"input_ids": [5, 6, 7, 8]}]

    def silent(collator, samples):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            collator(samples)

    silent(DataCollatorForMaskedTokens(tokenizer), unknown)
    silent(DataCollatorForMaskedTokens(tokenizer, packed=True), unknown)
    silent(DataCollatorForMaskedTokens(tokenizer, seed=1), known)
    silent(DataCollatorForCausalTokens(tokenizer, seed=1), unknown)
    later = DataCollatorForMaskedTokens(tokenizer)
    later.set_epoch(1)
    for collator in (DataCollatorForMaskedTokens(tokenizer, seed=1), later):
        with pytest.warns(UserWarning, match="no sample_index.*remove_unused_columns"):
            collator(unknown)
        silent(collator, unknown)


IDS = {"input_ids": [5, 6]}


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    (
        ([], DataError, "`samples` got none"),
        ([IDS, [1, 2]], DataError, "`samples` got list in sample 1"),
        ([IDS, {"labels": [1, 2]}], DataError, "`samples` got dict in sample 1"),
        ([IDS | {"token_type_ids": [0]}], ArgumentValueError, "`token_type_ids` got 1 values"),
        ([IDS | {"sample_index": 3}, IDS], DataError, "`sample_index` got nothing in sample 1"),
        ([IDS, IDS | {"sample_index": 3}], DataError, "`sample_index` got a value in sample 1"),
        ([IDS, {"input_ids": torch.ones(1, 2).long()}], DataError, "got shape (1, 2) in sample 1"),
        ([{"input_ids": np.array([[5, 6]])}], DataError, "return_tensors=None, or squeeze"),
        ([IDS | {"attention_mask": [[1, 1]]}], DataError, "`attention_mask` got shape (1, 2)"),
        ([IDS, {"input_ids": [5, 6.5]}], DataError, "`input_ids` got a list in sample 1"),
        ([{"input_ids": torch.ones(2)}], DataError, "`input_ids` got a torch.float32 in sample 0"),
        ([{"input_ids": [2**63]}], DataError, "at most 64 bits"),
        ([IDS, {"input_ids": [5] * 9}], ArgumentValueError, "a sample of 9 tokens; expected at"),
        ([IDS | {"sequence_lengths": [1, 1]}], ArgumentValueError, "`sequence_lengths` got"),
    ),
)
def test_wrong_samples(tokenizer, samples, error, words):
    collator = DataCollatorForMaskedTokens(tokenizer, block_size=8)
    with pytest.raises(error) as raised:
        collator(samples)
    assert words in str(raised.value)


def test_keys_that_no_collator_reads_may_differ(tokenizer):
    samples = [IDS | {"labels": [1, 2]}, IDS | {"text": "a"}, {"input_ids": []}]
    batch = DataCollatorForCausalTokens(tokenizer)(samples)
    assert batch["labels"].tolist() == [[5, 6], [5, 6], [-100, -100]]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    (
        ({"mlm_probability": 0.0}, ArgumentValueError, "`mlm_probability` got 0.0"),
        ({"random_replace_prob": 0.5}, ArgumentValueError, "`random_replace_prob` got 0.5"),
        ({"max_predictions": 1.5}, ArgumentTypeError, "`max_predictions`"),
        ({"block_size": 0}, ArgumentValueError, "`block_size` got 0"),
        ({"position_offset": -1}, ArgumentValueError, "`position_offset` got -1"),
    ),
)
def test_wrong_settings(tokenizer, settings, error, words):
    with pytest.raises(error) as raised:
        DataCollatorForMaskedTokens(tokenizer, **settings)
    assert str(raised.value).startswith("DataCollatorForMaskedTokens: ")
    assert words in str(raised.value)


def test_a_tokenizer_without_a_mask_token(plain):
    without = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer)
    with pytest.raises(DataError, match="DataCollatorForMaskedTokens: `tokenizer` got one without"):
        DataCollatorForMaskedTokens(without)


def test_collators_compare_by_identity_and_pickle(tokenizer):
    one, other = (DataCollatorForMaskedTokens(tokenizer) for _ in range(2))
    assert isinstance(one, Collator)
    assert one == one and one != other and len({one, other}) == 2
    samples = [{"input_ids": [5, 6, 7, 8], "sample_index": 3}]
    assert_same_batch(pickle.loads(pickle.dumps(one))(samples), one(samples))


# --- the rows of the tokens -----------------------------------------------------------------------


def shapes(batch):
    """All shapes of a batch, those of its packed rows among them."""
    found = []
    for name, value in sorted(batch.items()):
        parts = vars(value) if isinstance(value, RaggedBatch) else {"": value}
        for part, each in parts.items():
            found.append((name, part, each.shape if isinstance(each, torch.Tensor) else each))
    return tuple(found)


@pytest.mark.parametrize("block_size", [64, None])
@pytest.mark.parametrize("kind", ["masked", "causal", "spans", "denoising"])
def test_batches_that_tell_their_rows_have_few_shapes(tokenizer, t5, bart, kind, block_size):
    """160 batches of any lengths: at most 16 numbers of rows between two powers of two, each at
    most a sixteenth above the tokens. The rows are the tokens of the batch, in order."""
    makers = {
        "masked": (DataCollatorForMaskedTokens, tokenizer),
        "causal": (DataCollatorForCausalTokens, tokenizer),
        "spans": (DataCollatorForSpanCorruption, t5[0]),
        "denoising": (DataCollatorForDenoising, bart[0]),
    }
    make, words = makers[kind]
    collator, counted = (make(words, block_size=block_size, unpad=told) for told in (True, False))
    generator = torch.Generator().manual_seed(0)
    found, numbers = set(), set()
    for _ in range(160):
        lengths = torch.randint(9, 62, (8,), generator=generator).tolist()
        samples = [
            {"input_ids": torch.full((length,), 40), "sample_index": index}
            for index, length in enumerate(lengths)
        ]
        batch, plain = collator(samples), counted(samples)
        found.add(shapes(batch))
        sides = {"unpad": plain["attention_mask"] != 0}
        if "decoder_unpad" in batch:
            sides["decoder_unpad"] = plain["labels"] != -100
        for name, mask in sides.items():
            rows, tokens = batch[name], int(mask.sum())
            if rows is False:
                continue
            numbers.add(tokens)
            width = rows.seqlen
            assert tokens <= len(rows.positions) <= tokens + tokens // 16 + 1
            expected = torch.nn.functional.pad(mask, (0, width - mask.shape[1])).flatten()
            assert torch.equal(rows.positions[:tokens], expected.nonzero().squeeze(1))
            assert (rows.positions[tokens:] == -1).all() and rows.key_mask is None
            assert torch.equal(rows.cu_seqlens[1:], mask.sum(1).cumsum(0).int())
    assert len(numbers) > 90
    widths, sides = (1 if block_size else 9), (2 if kind in ("spans", "denoising") else 1)
    assert len(found) <= 24 * widths * sides


def test_a_batch_without_padding_tells_so(tokenizer):
    """Then there is no mask: a model need not look whether it hides anything."""
    samples = [{"input_ids": torch.full((16,), 40)} for _ in range(3)]
    batch = DataCollatorForMaskedTokens(tokenizer, unpad=True)(samples)
    assert batch["unpad"] is False and "attention_mask" not in batch


def test_rows_survive_a_worker_and_page_locked_memory(tokenizer, monkeypatch):
    samples = [{"input_ids": torch.full((length,), 40)} for length in (16, 9, 5, 3)]
    collator = DataCollatorForMaskedTokens(tokenizer, unpad=True)
    (batch,) = batches(samples, collator, batch_size=4, workers=1)
    assert isinstance(batch["unpad"], RaggedBatch) and len(batch["unpad"].positions) == 34
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    batch["unpad"].pin_memory()
    assert len(pinned) == 2  # positions and cu_seqlens; what is no tensor stays


def test_packed_batches_tell_their_rows_already(tokenizer):
    with pytest.raises(ArgumentValueError, match="unpad"):
        DataCollatorForMaskedTokens(tokenizer, packed=True, unpad=True)
