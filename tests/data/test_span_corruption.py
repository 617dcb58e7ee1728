"""DataCollatorForSpanCorruption: the inputs of T5."""

from __future__ import annotations

import pytest
import torch

from fastplm.data.span_corruption import DataCollatorForSpanCorruption
from fastplm.errors import ArgumentValueError, DataError
from fastplm.ops.corrupt_spans import span_corruption_fit, span_corruption_lengths
from fastplm.reference.corrupt_spans import corrupt_spans_ref

WORDS = [f"w{number}" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer(t5):
    return t5[0]


@pytest.fixture(scope="module")
def samples(t5):
    return t5[1]


def test_the_batch_is_that_of_the_op(tokenizer, samples):
    collator = DataCollatorForSpanCorruption(tokenizer, seed=5)
    collator.set_epoch(3)
    assert collator.constants(torch.device("cpu"))["sentinel_ids"].tolist() == list(
        range(82, 62, -1)
    )
    batch = collator(samples[30:36])
    assert set(batch) == {"input_ids", "attention_mask", "labels", "sample_index"}
    texts = [torch.tensor(sample["input_ids"][:-1]) for sample in samples[30:36]]
    assert all(sample["input_ids"][-1] == tokenizer.eos_token_id for sample in samples)
    expected = corrupt_spans_ref(
        torch.cat(texts),
        cu_seqlens=torch.tensor([0, *map(len, texts)]).cumsum(0).int(),
        max_seqlen=max(map(len, texts)),
        sentinel_ids=torch.arange(82, 62, -1),
        eos_token_id=1,
        sample_index=torch.arange(10**12 + 30, 10**12 + 36),
        seed=5,
        step=3,
    )
    assert torch.equal(batch["input_ids"], expected.input_ids)
    assert torch.equal(batch["labels"], expected.labels)
    assert torch.equal(batch["attention_mask"].sum(1), expected.input_lengths)
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == tokenizer.pad_token_id)
    assert batch["attention_mask"].dtype == torch.int64


def test_the_text_can_be_read_again(tokenizer):
    text = " ".join(WORDS[:30])
    batch = DataCollatorForSpanCorruption(tokenizer)([{"input_ids": tokenizer(text).input_ids}])
    corrupted = tokenizer.decode(batch["input_ids"][0])
    labels = tokenizer.decode(batch["labels"][0])
    assert corrupted.count("<extra_id_") == labels.count("<extra_id_") == 2
    for number, dropped in enumerate(labels.removesuffix("</s>").split("<extra_id_")[1:]):
        corrupted = corrupted.replace(f"<extra_id_{number}>", dropped.split(">")[1])
    assert corrupted.removesuffix("</s>").split() == text.split()


def test_wrong_samples(tokenizer):
    whole = DataCollatorForSpanCorruption(tokenizer, block_size=40)
    nothing = whole([{"input_ids": [5, 6], "attention_mask": [0, 0], "sample_index": 0}])
    assert nothing["input_ids"][0].tolist() == [1] + [0] * 39
    collator = DataCollatorForSpanCorruption(tokenizer)
    for sample, error, words in (
        ({"attention_mask": [1, 0, 1]}, DataError, "`attention_mask` got gaps"),
        ({"attention_mask": [1, 1]}, ArgumentValueError, "`attention_mask` got 2 values"),
    ):
        with pytest.raises(error, match=words):
            collator([{"input_ids": [5, 6, 7]} | sample])
    with pytest.warns(UserWarning, match="no sample_index"):
        DataCollatorForSpanCorruption(tokenizer, seed=1)([{"input_ids": [5, 6, 7]}])


def test_block_size_fixes_the_shapes(tokenizer, samples):
    raw, labels = span_corruption_fit(40, sentinels=20)
    assert span_corruption_lengths(raw, sentinels=20) == (40, labels)
    collator = DataCollatorForSpanCorruption(tokenizer, block_size=40)
    full = {"input_ids": [5] * raw}
    for batch in (collator(samples[:3]), collator([full]), collator([{"input_ids": [5]}])):
        assert batch["input_ids"].shape[1] == 40 and batch["labels"].shape[1] == labels
    assert collator([full])["attention_mask"].all()
    with pytest.raises(ArgumentValueError, match=f"a sample of {raw + 1} tokens"):
        collator([full, {"input_ids": [5] * (raw + 1)}])


def test_a_warning_when_sentinels_are_too_few(t5_tokenizer):
    long = [{"input_ids": list(range(3, 43)) * 3}]  # 120 tokens, 18 of noise, 6 spans
    with pytest.warns(UserWarning, match="120 tokens has 6 spans, and the tokenizer has 4"):
        batch = DataCollatorForSpanCorruption(t5_tokenizer(4))(long)
    assert (batch["labels"] > 62).sum() == 4 and (batch["labels"] > 0).sum() == 4 + 18 + 1


def test_a_tokenizer_without_sentinels(t5_tokenizer):
    without = t5_tokenizer(0)
    with pytest.raises(DataError, match="without <extra_id_0>"):
        DataCollatorForSpanCorruption(without)
