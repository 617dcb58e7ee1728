from __future__ import annotations

import pytest

from fastplm.data import tokenize
from fastplm.pretrain.blocks import DocumentBlocks

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
