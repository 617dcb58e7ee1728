"""DataCollatorForDenoising: what BART is given, whoever makes the batch."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

from fastplm._checks import ArgumentValueError, DataError, UnsupportedError
from fastplm.data.denoising import DataCollatorForDenoising, sentence_ends
from fastplm.reference.bart_noise import bart_noise_ref

ROLES = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def tokenizer(documents):
    """Byte-level BPE with BART's special tokens: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> last."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=list(ROLES.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, mask_token="<mask>", **ROLES)


@pytest.fixture(scope="module")
def samples(tokenizer, documents):
    """Documents with BOS and EOS around them, as BART's tokenizer returns them."""
    texts = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return [
        {"input_ids": [0, *ids[: 20 + index % 43], 2], "sample_index": 10**12 + index}
        for index, ids in enumerate(texts)
    ]


def same(batch, other) -> bool:
    return batch.keys() == other.keys() and all(torch.equal(batch[k], other[k]) for k in batch)


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


def test_padding_edges_and_containers_change_nothing(tokenizer, samples):
    collator = DataCollatorForDenoising(tokenizer, block_size=70)
    plain = collator(samples[:8])
    assert plain["input_ids"].shape == plain["labels"].shape == (8, 70)
    for change in (
        lambda ids: ids[1:-1],
        lambda ids: ids[:-1],
        lambda ids: [*ids, 1, 1, 1],
        torch.tensor,
        lambda ids: torch.tensor(ids, dtype=torch.int32).numpy(),
    ):
        changed = [sample | {"input_ids": change(sample["input_ids"])} for sample in samples[:8]]
        assert same(collator(changed), plain)


def test_the_attention_mask_says_what_is_text(tokenizer, samples):
    collator = DataCollatorForDenoising(tokenizer, block_size=70)
    plain = collator(samples[:8])
    for before, behind in ((3, 0), (0, 2), (2, 1)):
        for convert in (list, torch.tensor):
            changed = []
            for sample in samples[:8]:
                ids = [1] * before + sample["input_ids"] + [7] * behind
                seen = [0] * before + [1] * len(sample["input_ids"]) + [0] * behind
                new = {"input_ids": convert(ids), "attention_mask": convert(seen)}
                changed.append(sample | new)
            assert same(collator(changed), plain)


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


def test_batches_do_not_depend_on_batch_or_order(tokenizer, samples):
    collator = DataCollatorForDenoising(tokenizer, block_size=70, delete_probability=0.1)
    together, apart = collator(samples[:8]), collator([samples[5], samples[2]])
    for key, value in apart.items():
        assert torch.equal(value, together[key][[5, 2]])


def test_seed_and_epoch_change_the_noise_alone(tokenizer, samples):
    base = DataCollatorForDenoising(tokenizer)(samples[:8])
    other_seed = DataCollatorForDenoising(tokenizer, seed=1)(samples[:8])
    later = DataCollatorForDenoising(tokenizer)
    later.set_epoch(1)
    for batch in (other_seed, later(samples[:8])):
        assert not torch.equal(batch["input_ids"], base["input_ids"])
        assert torch.equal(batch["labels"], base["labels"])


def test_workers_make_the_same_batches(tokenizer, samples):
    collator = DataCollatorForDenoising(tokenizer, mask_probability=0.1)
    batches = [
        list(DataLoader(samples[:48], batch_size=8, collate_fn=collator, num_workers=workers))
        for workers in (0, 2)
    ]
    for here, there in zip(*batches, strict=True):
        assert same(here, there)


def test_pad_in_the_worker_and_corrupt_elsewhere(tokenizer, samples):
    collator = DataCollatorForDenoising(tokenizer)
    padded = collator.pad(samples[:8])
    assert same(collator.corrupt(padded), collator(samples[:8]))


@pytest.mark.gpu
def test_corrupted_on_the_gpu(tokenizer, samples):
    collator = DataCollatorForDenoising(tokenizer, rotate_probability=0.5)
    padded = {key: value.cuda() for key, value in collator.pad(samples[:8]).items()}
    corrupted = collator.corrupt(padded)
    assert all(value.is_cuda for value in corrupted.values())
    cpu = {key: value.cpu() for key, value in corrupted.items()}
    assert same(cpu, collator(samples[:8]))


def test_bart_learns_from_it(tokenizer, samples):
    torch.manual_seed(0)
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=64, decoder_ffn_dim=64)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    model = BartForConditionalGeneration(
        BartConfig(vocab_size=351, d_model=32, max_position_embeddings=70, **sizes, **heads)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    collator = DataCollatorForDenoising(tokenizer, block_size=70)
    losses = []
    for step in range(12):
        batch = collator(samples[8 * step : 8 * step + 8])
        batch.pop("sample_index")
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


def test_a_tokenizer_without_bos_has_cls(documents):
    vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5, "b.": 6}
    roles = dict(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]")
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", **roles)
    collator = DataCollatorForDenoising(tokenizer, infill_probability=0.0)
    batch = collator([{"input_ids": [2, 5, 6, 5, 3]}])
    assert batch["input_ids"][0].tolist() in ([2, 5, 6, 5, 3], [2, 5, 5, 6, 3])
    assert batch["labels"].tolist() == [[2, 5, 6, 5, 3]]


def test_wrong_settings_and_samples(tokenizer, samples):
    with pytest.raises(UnsupportedError, match="packed"):
        DataCollatorForDenoising(tokenizer, packed=True)
    with pytest.raises(ArgumentValueError, match="a sample of 20 tokens and 2 around them"):
        DataCollatorForDenoising(tokenizer, block_size=21)(samples[:1])
    with pytest.raises(ArgumentValueError, match="infill_probability"):
        DataCollatorForDenoising(tokenizer, infill_probability=2.0)(samples[:1])
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, **ROLES)
    with pytest.raises(DataError, match="without a mask token"):
        DataCollatorForDenoising(without)


def test_what_is_cut_is_said(tokenizer):
    collator = DataCollatorForDenoising(tokenizer, infill_probability=0.5, poisson_lambda=0.1)
    with pytest.warns(UserWarning, match="found no room"):
        batch = collator([{"input_ids": list(range(10, 40))}])
    assert batch["input_ids"].shape == (1, 32) and batch["input_ids"][0, -1] == 2
    assert collator.dropped > 0
