from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, T5Tokenizer

from fastplm.data import TokenStore, embedded_corpus, tokenize, train_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def real_text() -> Path:
    """The folder of real text files: $FASTPLM_TEST_DATA/text or ../shared/data/text."""
    folder = os.environ.get("FASTPLM_TEST_DATA")
    path = (Path(folder) if folder else REPOSITORY.parent / "shared" / "data") / "text"
    if not path.is_dir():
        pytest.skip(f"no real text in {path}: set FASTPLM_TEST_DATA to the folder that has text/")
    return path


@pytest.fixture(scope="session")
def embedded() -> list[str]:
    """Python's own text, which takes seconds to collect: every file of the library is parsed."""
    return embedded_corpus()


def _story(number: int) -> str:
    names = ("anna", "boris", "clara", "dmitri", "emma", "felix", "greta")
    verbs = ("builds", "paints", "reads", "sells", "cooks", "finds")
    things = ("a house", "the red boat", "an old book", "seven apples", "the long road")
    lines = []
    for i in range(5 + number % 9):
        name, verb = names[(number + i) % 7], verbs[(number * 3 + i) % 6]
        lines.append(f"{name} {verb} {things[(number + 2 * i) % 5]} {i} times before evening.")
    return " ".join(lines)


@pytest.fixture(scope="session")
def documents() -> list[str]:
    return [_story(number) for number in range(120)]


@pytest.fixture(scope="session")
def tokenizer(documents, tmp_path_factory):
    return train_tokenizer(documents, 120, tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def store(documents, tokenizer, tmp_path_factory) -> TokenStore:
    return tokenize(documents, tokenizer, tmp_path_factory.mktemp("tokens"))


@pytest.fixture
def store_of(tmp_path):
    """Makes a store of the given token ids, without a tokenizer."""

    def build(tokens, sentences, documents) -> TokenStore:
        np.asarray(tokens, dtype=np.int32).tofile(tmp_path / "tokens.bin")
        np.asarray(sentences, dtype=np.int64).tofile(tmp_path / "sentences.bin")
        np.asarray(documents, dtype=np.int64).tofile(tmp_path / "documents.bin")
        meta = {"dtype": "int32", "vocab_size": int(max(tokens)) + 1}
        (tmp_path / "meta.json").write_text(json.dumps(meta))
        return TokenStore(tmp_path)

    return build


@pytest.fixture(scope="session")
def t5_tokenizer():
    """Makes T5's layout: <pad> 0, </s> 1, <unk> 2, the words, and the sentinels from the end."""

    def build(sentinels: int = 20) -> T5Tokenizer:
        special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
        pieces = [(f"▁w{number}", -1.0) for number in range(60)]
        extra = [(f"<extra_id_{i}>", 0.0) for i in reversed(range(sentinels))]
        return T5Tokenizer(vocab=[*special, *pieces, *extra], extra_ids=sentinels)

    return build


@pytest.fixture(scope="session")
def t5(t5_tokenizer):
    """T5's tokenizer, and texts of 2 to 41 words with the EOS that it adds."""
    tokenizer = t5_tokenizer()
    texts = [" ".join(f"w{(3 * i + j) % 60}" for j in range(2 + i % 40)) for i in range(64)]
    return tokenizer, [
        {"input_ids": ids, "sample_index": 10**12 + index}
        for index, ids in enumerate(tokenizer(texts)["input_ids"])
    ]


@pytest.fixture(scope="session")
def bart(documents):
    """Byte-level BPE with BART's special tokens: <s> 0, <pad> 1, </s> 2, <unk> 3, <mask> last;
    and documents with BOS and EOS around them."""
    roles = dict(bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=350,
        special_tokens=list(roles.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(documents, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, mask_token="<mask>", **roles)
    texts = tokenizer(documents, add_special_tokens=False)["input_ids"]
    return tokenizer, [
        {"input_ids": [0, *ids[: 20 + index % 43], 2], "sample_index": 10**12 + index}
        for index, ids in enumerate(texts)
    ]
