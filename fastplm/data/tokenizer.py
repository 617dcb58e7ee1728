"""The tokenizer of a run: one that is given, or a WordPiece one trained on the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fastplm._checks import DataError, check, message
from fastplm.data._cache import build_once
from fastplm.data.corpus import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ALPHABET = 1000


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer as ``AutoTokenizer`` loads it from a local directory.

    Raises:
        DataError: the directory is missing or holds no tokenizer, or the tokenizer lacks a token
            that pre-training needs (padding, mask, beginning and end of a block).
    """
    from transformers import AutoTokenizer

    where, expected = "load_tokenizer", "a directory that tokenizer.save_pretrained wrote"
    path = Path(directory)
    check(path.is_dir(), where, "directory", path, expected, "Check the path.", DataError)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            message(where, "directory", f"{path} ({reason})", expected, "Check the path.")
        ) from error
    for token in ("pad_token_id", "mask_token_id", "cls_token_id", "sep_token_id"):
        check(
            getattr(tokenizer, token) is not None,
            where,
            "directory",
            f"{path}, a tokenizer without a {token.removesuffix('_id')}",
            "padding, mask, [CLS] and [SEP] tokens",
            "Add them with tokenizer.add_special_tokens.",
            DataError,
        )
    return tokenizer


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, cache: str | Path
) -> PreTrainedTokenizerBase:
    """A lower-casing WordPiece tokenizer trained on the documents, as BERT's is built.

    The same documents give the same vocabulary in every process.

    Args:
        documents: an iterable that can be iterated several times.
        vocab_size: the most tokens, the five special ones included; a small corpus gives fewer.
        cache: a folder where the result is kept under the hash of documents and size.

    Raises:
        DataError: the alphabet of the documents alone is larger.
    """
    from transformers import AutoTokenizer, BertTokenizer

    def build(directory: Path) -> None:
        vocabulary = _wordpiece(documents, vocab_size)
        BertTokenizer(vocab=vocabulary, do_lower_case=True).save_pretrained(directory)

    key = f"wordpiece-{vocab_size}-{fingerprint(documents)[:24]}"
    return AutoTokenizer.from_pretrained(build_once(cache, key, build), local_files_only=True)


def _wordpiece(documents: Iterable[str], vocab_size: int) -> dict[str, int]:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    frequency: Counter[str] = Counter()
    for document in documents:
        frequency.update(normalizer.normalize_str(document))
    seen = (letter for letter in frequency if not letter.isspace())
    alphabet = sorted(seen, key=lambda letter: (-frequency[letter], letter))[:_ALPHABET]

    def train(size: int, first_tokens: list[str]) -> dict[str, int]:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(
            documents,
            trainers.WordPieceTrainer(
                vocab_size=size,
                special_tokens=first_tokens,
                initial_alphabet=alphabet,
                limit_alphabet=len(alphabet),
                show_progress=False,
            ),
        )
        return tokenizer.get_vocab()

    # The trainer numbers the pieces "##x" in the order of a hash map and breaks ties between
    # merges by these numbers: naming them first, sorted, makes the vocabulary the same every time.
    special = list(SPECIAL_TOKENS)
    pieces = sorted(token for token in train(0, special) if token.startswith("##"))
    vocabulary = train(vocab_size, special + pieces)
    check(
        len(vocabulary) <= vocab_size,
        "train_tokenizer",
        "vocab_size",
        vocab_size,
        f"at least {len(vocabulary)}, the alphabet of this corpus",
        "Raise it.",
        DataError,
    )
    return vocabulary
