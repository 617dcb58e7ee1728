"""Token ids on disk, memory-mapped, and the fixed blocks cut from them."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from fastplm.data._folder import MANIFEST, build_once, verify
from fastplm.data._numbers import first_descent, first_outside, map_file, refuse_file, refuse_unread
from fastplm.data.corpus import check_documents, fingerprint
from fastplm.errors import TooLittleTextError, UnsupportedError, check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A sentence ends before the space after ".", "!" or "?", and at a line's end. Nothing is consumed:
# the pieces joined are the text, so that a tokenizer that looks at spaces sees the same words.
_SENTENCE_END = re.compile(r"(?<=[.!?])(?=\s)|(?<=\n)")
_DOCUMENTS_AT_ONCE = 256
#: The longest text, in letters, that the tokenizers library is given at once. It keeps dozens of
#: bytes for each letter, and ends the process where there is no room for them.
LONGEST_TEXT = 1 << 20
_FILES = ("meta.json", "tokens.bin", "sentences.bin", "documents.bin")
_TOKEN_TYPES: dict[str, type[np.generic]] = {"uint16": np.uint16, "int32": np.int32}
_MOST_TOKENS = 1 << 31  # different ones, that int32 has room for


class TokenStore:
    """The token ids of a corpus with the beginnings of its sentences and documents.

    Opening it looks at the sizes of the files and at the ends of what they hold; ``validate`` reads
    all of them.

    Args:
        directory: what ``tokenize`` wrote.
        first, last: the range of sentences seen, all by default.

    Attributes:
        directory: the folder, whose name is a hash of the corpus and the tokenizer.
        vocab_size: every id is below it.
        tokens: ids of all documents one after the other, memory-mapped ``[tokens]``.
        sentences: int64 ``[sentences + 1]``, sentence i is
            ``tokens[sentences[i]:sentences[i + 1]]``.
        documents: int64 ``[documents + 1]``, document d has the sentences
            ``documents[d]`` to ``documents[d + 1] - 1``.

    Raises:
        DataError: a file is missing, cannot be read, was cut off or is of another kind.
        ArgumentValueError: the range is not within the sentences.
    """

    def __init__(self, directory: str | Path, first: int = 0, last: int | None = None) -> None:
        self.directory = path = Path(directory)
        dtype, self.vocab_size = _read_meta(path / "meta.json")
        tokens = map_file(path / "tokens.bin", dtype)
        sentences = map_file(path / "sentences.bin", np.int64)
        documents = map_file(path / "documents.bin", np.int64)
        stats = [(path / name).stat() for name in _FILES]
        state = repr([(stat.st_size, stat.st_mtime_ns) for stat in stats])
        self._state = hashlib.sha256(state.encode()).hexdigest()[:16]
        _check_ends(path / "sentences.bin", sentences, len(tokens), "tokens.bin")
        _check_ends(path / "documents.bin", documents, len(sentences) - 1, "sentences.bin")
        last = len(sentences) - 1 if last is None else last
        expected = f"0 <= first <= last <= {len(sentences) - 1}, the number of sentences"
        got, fix = f"{first}, {last}", "Choose a range within the store."
        inside = 0 <= first <= last < len(sentences)
        check(inside, "TokenStore", "first, last", got, expected, fix)
        self._range = first, last
        begin = int(sentences[first])
        self.tokens = tokens[begin : int(sentences[last])]
        self.sentences = sentences[first : last + 1]
        if first > 0:
            self.sentences = self.sentences - begin
        if (first, last) == (0, len(sentences) - 1):
            self.documents = documents
        else:
            low, high = np.searchsorted(documents, [first + 1, last])
            self.documents = np.concatenate([[first], documents[low:high], [last]]) - first

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the files again; pickling a memory map would copy the whole corpus.
        return TokenStore, (self.directory, *self._range)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    def split(self, fraction: float) -> tuple[TokenStore, TokenStore]:
        """All but the last ``fraction`` of the tokens, and that tail, cut between two sentences."""
        first, last = self._range
        cut = first + int(np.searchsorted(self.sentences, len(self) * (1 - fraction)))
        return TokenStore(self.directory, first, cut), TokenStore(self.directory, cut, last)

    def validate(self) -> None:
        """Read all files, whatever the range, unless that was done since they were written.

        Raises:
            DataError: boundaries that do not ascend, or an id outside the vocabulary; or the folder
                cannot be written, where the result is kept.
        """
        self._derive("valid", lambda _: TokenStore(self.directory)._read_all())

    def derive(self, name: str, build: Callable[[Path], None]) -> Path:
        """A folder of what ``build(folder)`` computes from a valid store and its range, built once.

        It stands in the store's own folder and is built anew when the files of the store change.

        Raises:
            DataError: see ``validate``.
        """
        self.validate()
        return self._derive("{}-{}-{}".format(name, *self._range), build)

    def _derive(self, name: str, build: Callable[[Path], None]) -> Path:
        return build_once(self.directory, f"{name}-{self._state}", build)

    def _read_all(self) -> None:
        # A store that other means wrote has no manifest.
        if (self.directory / MANIFEST).exists() and (damaged := verify(self.directory, cache=True)):
            got = f"beside which {damaged}"
            refuse_file(self.directory / MANIFEST, got, "the files that were written")
        for name, boundaries in ("sentences", self.sentences), ("documents", self.documents):
            wrong = first_descent(boundaries)
            if wrong >= 0:
                pair = boundaries[wrong : wrong + 2].tolist()
                got = "where entries {} and {} are {} and {}".format(wrong, wrong + 1, *pair)
                refuse_file(self.directory / f"{name}.bin", got, "ascending numbers")
        wrong = first_outside(self.tokens, self.vocab_size)
        if wrong >= 0:
            got = f"where token {wrong} is {self.tokens[wrong]}"
            refuse_file(self.directory / "tokens.bin", got, f"0 to {self.vocab_size - 1}")


def tokenize(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, cache: str | Path
) -> TokenStore:
    """Turn documents into token ids, once for each pair of corpus and tokenizer.

    A sentence of more than a million letters (2^20), such as a file without spaces or ends of
    lines, is cut into several, so that memory is bounded.

    Args:
        documents: an iterable that can be iterated several times.
        tokenizer: a fast Transformers tokenizer; no special tokens are added.
        cache: a folder where the ids are kept under the hash of documents and tokenizer.

    Raises:
        TooLittleTextError: the documents hold no token at all.
        UnsupportedError: the tokenizer is not a fast one.
        ArgumentTypeError: one text, or documents that can be read only once.
    """
    where, kind, fix = "tokenize", type(tokenizer).__name__, "Save it with a tokenizer.json first."
    check_documents(where, documents)
    fast = tokenizer.is_fast
    check(fast, where, "tokenizer", kind, "a fast tokenizer", fix, UnsupportedError)
    description = tokenizer.backend_tokenizer.to_str()
    digest = hashlib.sha256((fingerprint(documents) + description).encode()).hexdigest()

    def build(directory: Path) -> None:
        _write_tokens(directory, documents, description)

    return TokenStore(build_once(cache, f"tokens-{digest[:32]}", build))


class BlockDataset(Dataset):
    """Blocks of one size, ``[CLS] … [SEP]``: the corpus cut every ``block_size - 2`` tokens.

    Only the last, partial block of the whole corpus is left out. Item i is
    ``{"input_ids": int64 [block_size]}``.

    Args:
        store: the tokens.
        block_size: tokens a block, the special ones included.
        cls_token_id, sep_token_id: the ids put before and after each block; none by default, and
            the text has their place.

    Raises:
        ArgumentValueError: a block has no room for text.
        TooLittleTextError: fewer tokens than one block needs.
        DataError: see ``TokenStore.validate``.
    """

    def __init__(
        self,
        store: TokenStore,
        block_size: int,
        *,
        cls_token_id: int | None = None,
        sep_token_id: int | None = None,
    ) -> None:
        self.store, self.block_size = store, block_size
        self.cls_token_id, self.sep_token_id = cls_token_id, sep_token_id
        self._begin = int(cls_token_id is not None)
        self._text = room_for_text("BlockDataset", block_size, cls_token_id, sep_token_id)
        check_enough_tokens("BlockDataset", store, self._text)
        store.validate()

    def __len__(self) -> int:
        return len(self.store) // self._text

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        block = np.empty(self.block_size, dtype=np.int64)
        if self.cls_token_id is not None:
            block[0] = self.cls_token_id
        if self.sep_token_id is not None:
            block[-1] = self.sep_token_id
        text = self.store.tokens[index * self._text : (index + 1) * self._text]
        block[self._begin : self._begin + self._text] = text
        return {"input_ids": torch.from_numpy(block)}


def room_for_text(where: str, block_size: int, *special: int | None) -> int:
    """The tokens of a block beside the special ones that are given; at least one."""
    room = block_size - sum(token is not None for token in special)
    expected = f"{block_size - room + 1} or more"
    check(room > 0, where, "block_size", block_size, expected, "Raise it.")
    return room


def check_enough_tokens(where: str, store: TokenStore, needed: int) -> None:
    """The one message for a corpus that is too small."""
    got, expected = f"{len(store)} tokens", f"at least the {needed} tokens of one block"
    fix = "Give more text or a smaller block size."
    check(len(store) >= needed, where, "store", got, expected, fix, TooLittleTextError)


def split_sentences(document: str) -> list[str]:
    """The pieces of a document that end with a sentence; joined they are the document.

    A sentence of more than ``LONGEST_TEXT`` letters is cut, before a space where it has one.
    """
    pieces = [piece for piece in _SENTENCE_END.split(document) if piece]
    if len(document) <= LONGEST_TEXT:
        return pieces
    return [part for piece in pieces for part in short_texts(piece)]


def short_texts(text: str) -> Iterator[str]:
    """The parts of a text that have ``LONGEST_TEXT`` letters at most; joined they are the text.

    They are cut before a space, which tokenizers take with the word after it; a word that is too
    long is cut inside.
    """
    begin = 0
    while len(text) - begin > LONGEST_TEXT:
        end = text.rfind(" ", begin + 1, begin + LONGEST_TEXT + 1)
        end = begin + LONGEST_TEXT if end < 0 else end
        yield text[begin:end]
        begin = end
    if begin < len(text):
        yield text[begin:]


def _write_tokens(directory: Path, documents: Iterable[str], description: str) -> None:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(description)
    backend.no_padding()
    backend.no_truncation()
    # Not the number of tokens: some vocabularies have holes.
    vocab_size = 1 + max(backend.get_vocab().values(), default=0)
    dtype = "uint16" if vocab_size <= 1 << 16 else "int32"
    ends, total, sentences = array("q", [0]), 0, 0
    with (
        (directory / "tokens.bin").open("wb") as token_file,
        (directory / "sentences.bin").open("wb") as sentence_file,
        (directory / "documents.bin").open("wb") as document_file,
    ):
        document_file.write(ends.tobytes())
        iterator = iter(documents)
        while batch := list(islice(iterator, _DOCUMENTS_AT_ONCE)):
            split = [split_sentences(document) for document in batch]
            pieces = [piece for document in split for piece in document]
            encoded = _encoded(backend, pieces)
            for document in split:
                before = sentences
                for encoding in islice(encoded, len(document)):
                    if encoding.ids:
                        token_file.write(np.array(encoding.ids, dtype=dtype).tobytes())
                        total, sentences = total + len(encoding.ids), sentences + 1
                        ends.append(total)
                if sentences > before:
                    document_file.write(array("q", [sentences]).tobytes())
            sentence_file.write(ends.tobytes())
            ends = array("q")
    where, got, fix = "tokenize", "no tokens", "Give more text."
    check(total > 0, where, "documents", got, "text", fix, TooLittleTextError)
    meta = {"dtype": dtype, "vocab_size": vocab_size}
    (directory / "meta.json").write_text(json.dumps(meta), "utf-8")


def _encoded(backend: Any, pieces: list[str]) -> Iterator[Any]:
    """The encodings of texts, so many at once as have a few times ``LONGEST_TEXT`` letters."""
    begin = letters = 0
    for end, piece in enumerate(pieces, 1):
        letters += len(piece)
        if letters >= 4 * LONGEST_TEXT or end == len(pieces):
            yield from backend.encode_batch_fast(pieces[begin:end], add_special_tokens=False)
            begin, letters = end, 0


def _read_meta(path: Path) -> tuple[type[np.generic], int]:
    """The type of the ids and the number that they are below."""
    expected = '{"dtype": "uint16" or "int32", "vocab_size": 1 to 2^31}'
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        dtype = _TOKEN_TYPES[meta["dtype"]]
        vocab_size = meta["vocab_size"]
    except OSError as error:
        refuse_unread(path, error, expected)
    # A file of another kind is no JSON, no dict, or has no such keys.
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError):
        refuse_file(path, "which has other contents", expected)
    if type(vocab_size) is not int or not 1 <= vocab_size <= _MOST_TOKENS:
        refuse_file(path, f"where vocab_size is {vocab_size!r}", expected)
    return dtype, vocab_size


def _check_ends(path: Path, boundaries: np.ndarray, count: int, parts: str) -> None:
    first, last = int(boundaries[0]), int(boundaries[-1])
    if (first, last) != (0, count):
        got = f"{len(boundaries)} numbers from {first} to {last}"
        refuse_file(path, got, f"numbers from 0 to {count}, as many as {parts} has")
