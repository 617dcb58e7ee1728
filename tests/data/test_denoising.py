"""DataCollatorForDenoising: the inputs of BART."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fastplm.data.denoising import DataCollatorForDenoising, sentence_ends
from fastplm.errors import ArgumentValueError, DataError
from fastplm.pretrain.objectives import NOISES
from fastplm.reference.bart_noise import bart_noise_ref

ROLES = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def tokenizer(bart):
    return bart[0]


@pytest.fixture(scope="module")
def samples(bart):
    return bart[1]


def test_the_batch_is_that_of_the_op(tokenizer, samples):
    collator = DataCollatorForDenoising(tokenizer, seed=5)
    collator.set_epoch(3)
    batch = collator(samples[30:36])
    assert set(batch) == {"input_ids", "attention_mask", "labels", "sample_index"}
    texts = [torch.tensor(sample["input_ids"][1:-1]) for sample in samples[30:36]]
    expected = bart_noise_ref(
        torch.cat(texts),
        cu_seqlens=torch.tensor([0, *map(len, texts)]).cumsum(0).int(),
        max_seqlen=max(map(len, texts)),
        vocab_size=351,
        mask_token_id=350,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        sentence_end_ids=sentence_ends(tokenizer),
        special_ids=torch.tensor([0, 1, 2, 3, 350]),
        sample_index=torch.arange(10**12 + 30, 10**12 + 36),
        seed=5,
        step=3,
    )
    assert torch.equal(batch["input_ids"], expected.input_ids)
    assert torch.equal(batch["attention_mask"].sum(1), expected.lengths)
    assert torch.equal(batch["attention_mask"] == 0, batch["input_ids"] == 1)
    assert (batch["input_ids"] == 350).any()
    for row, sample in zip(batch["labels"].tolist(), samples[30:36], strict=True):
        ids = sample["input_ids"]
        assert row == ids + [-100] * (len(row) - len(ids))


@pytest.mark.parametrize("name", NOISES)
def test_each_noise_reaches_the_text(tokenizer, samples, name):
    setting, share = NOISES[name]
    none = {each: 0.0 for each, _ in NOISES.values()}

    def noised(**given):
        batch = DataCollatorForDenoising(tokenizer, seed=5, **given)(samples[30:36])
        return batch["input_ids"], batch["labels"].masked_fill(batch["labels"] == -100, 1)

    assert torch.equal(*noised(**none))
    assert not torch.equal(noised(**none | {setting: share})[0], noised(**none)[0])


@pytest.mark.parametrize("tokens", [6, 98])
@pytest.mark.parametrize(
    "noise",
    [
        {},
        {"infill_probability": 0.0},
        {"infill_probability": 0.5, "poisson_lambda": 0.4, "delete_probability": 0.2},
        {"infill_probability": 0.0, "delete_probability": 0.15},
        {"rotate_probability": 1.0, "mask_probability": 0.2},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*did not fit:UserWarning")  # of the long row
def test_the_length_that_is_expected(tokenizer, noise, tokens):
    """The mean of 4,096 rows is as near to it as chance allows; without chance it is exact."""
    text = torch.randint(4, 350, (4096, tokens), generator=torch.Generator().manual_seed(0))
    collator = DataCollatorForDenoising(tokenizer, **noise)
    # With a row of four times the length no inserted mask is cut.
    rows = [*text.tolist(), text[:4].flatten().tolist()]
    batch = collator([{"input_ids": [0, *row, 2], "sample_index": i} for i, row in enumerate(rows)])
    lengths = batch["attention_mask"][:-1].sum(1).double() - 2
    expected = DataCollatorForDenoising.expected_length(tokens, **noise)
    assert abs(lengths.mean() - expected) <= 4 * lengths.std() / 4096**0.5 + 1e-9


def test_sentences_are_permuted_whole(tokenizer):
    sentences = ["one boat sells.", " who paints it?", " we do!", " and so on"]
    ids = [tokenizer(sentence, add_special_tokens=False).input_ids for sentence in sentences]
    text = [token for sentence in ids for token in sentence]
    permuting = DataCollatorForDenoising(tokenizer, infill_probability=0.0)
    batch = permuting([{"input_ids": text, "sample_index": index} for index in range(200)])
    seen = set()
    for row in batch["input_ids"].tolist():
        rest = tokenizer.decode(row[1:-1])
        seen.add(rest)
        for sentence in sentences:
            assert rest.count(sentence) == 1
    assert len(seen) == 24
    assert tokenizer.decode(batch["labels"][0]) == "<s>" + "".join(sentences) + "</s>"
    given = DataCollatorForDenoising(tokenizer, infill_probability=0.0, sentence_end_ids=[])
    assert given([{"input_ids": text}])["input_ids"][0, 1:-1].tolist() == text


def test_sentence_ends(tokenizer):
    ends = sentence_ends(tokenizer)
    tokens = tokenizer.convert_ids_to_tokens(ends.tolist())
    assert {".", "!", "?"} <= set(tokens) and "<s>" not in tokens
    assert (ends.diff() > 0).all()
    assert {token[-1] for token in tokens} == {".", "!", "?"}


def test_added_special_tokens_end_no_sentence(documents):
    vocabulary = {"<mask>": 0, "<pad>": 1, "a": 2, "b.": 3}
    model = Tokenizer(models.WordLevel(vocabulary))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, mask_token="<mask>", pad_token="<pad>"
    )
    tokenizer.add_tokens(["really?"])
    tokenizer.add_tokens(["<stop>."], special_tokens=True)
    assert sentence_ends(tokenizer).tolist() == [3, 4]


def test_short_samples(tokenizer):
    plain = dict(permute_sentences=1.0, infill_probability=0.0)
    batch = DataCollatorForDenoising(tokenizer, **plain)(
        [{"input_ids": [0, 2]}, {"input_ids": []}, {"input_ids": [7]}]
    )
    assert batch["input_ids"].tolist() == [[0, 2, 1], [0, 2, 1], [0, 7, 2]]
    assert batch["labels"].tolist() == [[0, 2, -100], [0, 2, -100], [0, 7, 2]]


def test_a_tokenizer_without_bos_has_cls(documents):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b.": 6}
    roles = dict(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", **roles)
    collator = DataCollatorForDenoising(tokenizer, infill_probability=0.0)
    batch = collator([{"input_ids": [2, 5, 6, 5, 3]}])
    assert batch["input_ids"][0].tolist() in ([2, 5, 6, 5, 3], [2, 5, 5, 6, 3])
    assert batch["labels"].tolist() == [[2, 5, 6, 5, 3]]


def test_wrong_samples_and_tokenizers(tokenizer, samples):
    with pytest.raises(ArgumentValueError, match="a sample of 20 tokens and 2 around them"):
        DataCollatorForDenoising(tokenizer, block_size=21)(samples[:1])
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **ROLES)
    with pytest.raises(DataError, match="without a mask token"):
        DataCollatorForDenoising(without)


def test_a_warning_when_tokens_are_cut(tokenizer):
    collator = DataCollatorForDenoising(tokenizer, infill_probability=0.5, poisson_lambda=0.1)
    with pytest.warns(UserWarning, match="did not fit"):
        batch = collator([{"input_ids": list(range(10, 40))}])
    assert batch["input_ids"].shape == (1, 32) and batch["input_ids"][0, -1] == 2
    assert collator.dropped > 0
