"""Blocks with the ends of documents, and short blocks first."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch
import transformers

from fastplm.data import load_tokenizer, pairs, tokenize
from fastplm.pretrain.blocks import DocumentBlocks, ShortPairs
from fastplm.pretrain.objectives import objective_of
from fastplm.pretrain.run import build, read
from fastplm.pretrain.stream import training_settings
from fastplm.run.flops import flops_a_token

from .conftest import with_ends


@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
def test_blocks_with_the_ends_of_documents(words, tmp_path, block_size):
    """Documents of one token, of several sentences, or longer than a block; whole and split."""
    text = ["The", "river", "The house. The river. The train.", "house", "The train. " * 100, "The"]
    tokenizer = words(1)
    store = tokenize(text, tokenizer, tmp_path)
    for part in (store, *store.split(0.3)):
        expected = with_ends(part, 2)
        blocks = DocumentBlocks(part, block_size, tokenizer.eos_token_id)
        ids = [block["input_ids"].tolist() for block in (blocks[i] for i in range(len(blocks)))]
        assert len(ids) == len(expected) // block_size
        assert sum(ids, []) == expected[: len(ids) * block_size]
        assert blocks[len(ids) - 1]["input_ids"].tolist() == ids[-1]
    with pytest.raises(IndexError):
        blocks[len(blocks)]


def batches_of(args):
    """What each step of a run reads, on its way to the model, with the tokens that were masked."""
    trained = training_settings(args)
    args, data = read(args, trained, None)
    training = build(args, trained, data)
    trainer, collator = training.trainer, training.collator
    found = []
    for batch in trainer.as_read(iter(trainer.get_train_dataloader())):
        batch["originals"] = batch["input_ids"]
        if collator.random:
            batch["originals"] = batch["labels"].where(batch["labels"] != -100, batch["input_ids"])
        found.append(batch)
    return found, collator


@pytest.mark.parametrize("arch", ["bert-tiny", "electra-tiny", "gpt2-tiny"])
def test_the_first_blocks_are_short(settings, tmp_path, arch):
    """The same tokens in the same order, cut; each piece has masks of its own."""
    options = {"arch": arch, "batch_size": 4, "steps": 5, "vocab_size": 300}
    if arch == "bert-tiny":
        options["objective"] = "mlm"
    whole, _ = batches_of(settings(tmp_path / "whole", **options))
    options |= {"short_block_size": 8, "short_share": 0.6}
    short, collator = batches_of(settings(tmp_path / "short", **options))
    assert [tuple(batch["input_ids"].shape) for batch in short] == [(16, 8)] * 3 + [(4, 32)] * 2
    assert collator.block_size == 32, "held-out text is whole"
    for ours, theirs in zip(short, whole, strict=True):
        assert torch.equal(ours["originals"].flatten(), theirs["originals"].flatten())
        indices = ours["sample_index"].tolist()
        assert len({*indices}) == len(indices) and ours["attention_mask"].all()
    for ours, theirs in zip(short[3:], whole[3:], strict=True):
        assert torch.equal(ours["input_ids"], theirs["input_ids"])
    if collator.random:
        masks = (short[0]["labels"] != -100).view(4, 4, 8)
        assert not torch.equal(masks[:, 0], masks[:, 1])


def test_pairs_in_the_place_of_a_sample():
    """Whichever samples a batch has, of datasets that give one item at a time."""
    short, whole = ([{"sample_index": at + n} for n in range(8)] for at in (0, 100))
    items = ShortPairs(short, whole, 2, [range(3)]).__getitems__([1, 4, 0])
    found = [[pair["sample_index"] - (1 << 40) for pair in items[n]["pieces"]] for n in (0, 2)]
    assert found == [[2, 3], [0, 1]] and items[1] == {"sample_index": 104}


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm+sop"])
def test_the_first_pairs_are_short(settings, tmp_path, objective):
    """They are pairs of their own, with a label each; the whole ones are those of any run."""
    options = {"objective": objective, "batch_size": 4, "steps": 5, "vocab_size": 300}
    options |= {"arch": "albert-tiny" if objective == "mlm+sop" else "bert-tiny"}
    whole, _ = batches_of(settings(tmp_path / "whole", **options))
    args = settings(tmp_path / "short", **options, short_block_size=16, short_share=0.6)
    with mock.patch.object(pairs, "draw", wraps=pairs.draw) as draws:
        short, collator = batches_of(args)
    assert draws.call_count == len(short), "pairs are made one by one"
    assert [tuple(batch["input_ids"].shape) for batch in short] == [(8, 16)] * 3 + [(4, 32)] * 2
    label = "sentence_order_label" if objective == "mlm+sop" else "next_sentence_label"
    for batch in short[:3]:
        assert batch[label].shape == (8,) and 0 < batch["token_type_ids"].sum()
        assert (batch["originals"][:, 0] == collator.tokenizer.cls_token_id).all()
        assert ((batch["originals"] == collator.tokenizer.sep_token_id).sum(1) == 2).all()
    rows = torch.cat([batch["originals"] for batch in short[:3]])
    assert len({tuple(row) for row in rows.tolist()}) > 12, "the pieces of a sample are one pair"
    assert {*torch.cat([batch[label] for batch in short[:3]]).tolist()} == {0, 1}
    indices = [index for batch in short for index in batch["sample_index"].tolist()]
    assert len({*indices}) == len(indices)
    for ours, theirs in zip(short[3:], whole[3:], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_of_two_stages_begins_with_short_blocks(
    settings, run, arguments, refused, tmp_path, capsys
):
    options = {"arch": "electra-tiny", "batch_size": 4, "steps": 7, "vocab_size": 300}
    options |= {"short_block_size": 16, "short_share": 0.5, "two_stage": True}
    batches, _ = batches_of(settings(tmp_path, **options))
    short, whole = (8, 16), (4, 32)
    shapes = [tuple(batch["input_ids"].shape) for batch in batches]
    assert shapes == [short, short, whole, short, short, whole, whole]
    indices = [index for batch in batches for index in batch["sample_index"].tolist()]
    assert len({*indices}) == len(indices)
    del options["vocab_size"], options["batch_size"]
    metrics = run(tmp_path / "run", **options)
    said = capsys.readouterr().err
    assert "the first 2 and 2 steps of the two stages are of pieces of blocks, 16 tokens" in said
    assert metrics["history"][-1]["step"] == 7
    said = "`steps` got 9; expected 7, of which the first stage of a two-stage training is half"
    refused(arguments(tmp_path / "run", resume=True, **options | {"steps": 9}), said)


def test_static_masks_of_short_blocks_come_again(settings, tmp_path):
    options = {"arch": "bert-tiny", "objective": "mlm", "batch_size": 64, "steps": 16}
    options |= {"vocab_size": 300, "short_block_size": 16, "short_share": 0.7, "static_masks": 1}
    batches, _ = batches_of(settings(tmp_path, **options))
    assert {batch["input_ids"].shape[1] for batch in batches[11:]} == {32}
    for steps in (batches[:11], batches[11:]):
        masks: dict[int, list] = {}
        for batch in steps:
            rows = zip(batch["sample_index"].tolist(), batch["labels"].tolist(), strict=True)
            for index, labels in rows:
                masks.setdefault(index, []).append(labels)
        again = [found for found in masks.values() if len(found) > 1]
        assert len(again) > 100 and all(found[0] == each for found in again for each in found)


def test_a_run_of_short_blocks_and_its_budget(run, arguments, refused, tmp_path, capsys):
    short = {"objective": "mlm", "short_block_size": 16, "short_share": 0.5}
    metrics = run(tmp_path / "a", steps=4, **short)
    assert "the first 2 steps are of pieces of blocks, 16 tokens each" in capsys.readouterr().err
    config = transformers.AutoConfig.from_pretrained(tmp_path / "a" / "model")
    each = [flops_a_token(config, length, masked=0.15) for length in (16, 32)]
    assert metrics["flops"] == pytest.approx(4 * 4 * 32 * sum(each) / 2, rel=1e-6)
    said = "`steps` got 8; expected 4, of which the first 0.5 are of short blocks"
    refused(arguments(tmp_path / "a", steps=8, resume=True, **short), said)


def test_a_run_of_short_pairs(run, curve, tmp_path, capsys):
    """It is resumed in its short part and in its whole one, with the same losses."""
    short = {"objective": "mlm+nsp", "short_block_size": 16, "keep_checkpoints": "all"}
    short["short_share"] = 0.5
    whole = run(tmp_path / "a", steps=6, **short)
    said = capsys.readouterr().err
    assert "the first 3 steps are of short pairs, 16 tokens each" in said
    assert "short pairs " in said and "are of one sentence, whose next one is always random" in said
    for done in (2, 4):
        out = tmp_path / str(done)
        shutil.copytree(tmp_path / "a", out)
        for path in (*out.glob("checkpoint-*"), *out.glob("m*.json")):
            if path.suffix or int(path.name.split("-")[1]) > done:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        resumed = run(out, steps=6, resume=True, **short)
        assert curve(resumed) == curve(whole) and resumed["starts"] == [0, done]


def test_separators_between_documents(settings, bert, tmp_path):
    from fastplm.data import tokenize
    from fastplm.pretrain.data import open_corpus

    tokenizer = load_tokenizer(bert / "tokenizer")
    args = settings(tmp_path / "out", objective="mlm", separators=True)
    store = tokenize(open_corpus(args.corpus), tokenizer, args.cache)
    plain = settings(tmp_path / "out", objective="mlm")
    without, blocks = (
        objective_of(each, tokenizer).dataset(store).dataset for each in (plain, args)
    )
    assert isinstance(blocks, DocumentBlocks)
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    text = []
    for block in (blocks[i]["input_ids"].tolist() for i in range(len(blocks))):
        assert len(block) == 32 and block[0] == cls and block[-1] == sep
        text += block[1:-1]
    expected = []
    for first, last in zip(store.documents[:-1], store.documents[1:], strict=True):
        expected += [*store.tokens[store.sentences[first] : store.sentences[last]].tolist(), sep]
    assert text == expected[: len(text)] and len(expected) - len(text) < 30
    assert sep not in torch.cat([without[i]["input_ids"][:-1] for i in range(len(without))])
