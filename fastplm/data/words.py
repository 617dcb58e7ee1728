"""The words that a row's tokens belong to, from a small table over the tokenizer's vocabulary.

A word is what a tokenizer splits a text into before it splits words into tokens. One byte for each
token of the vocabulary is enough to find the words of a row in a few elementwise operations.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastplm._checks import check_dtype, check_same_device, check_tensor
from fastplm.errors import DataError, fail

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a token can end with, a bit each; WordPiece and SentencePiece need no more than "anything".
_LETTER, _NUMBER, _OTHER = 1, 2, 4
_ANY = _LETTER | _NUMBER | _OTHER
_BITS = 3
_METASPACE = "▁"


def word_starts(tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """What each token begins and ends with: the table from which ``word_ids`` finds the words.

    ::

        starts[id] = continues | ends << 3
        a word begins at place j if (continues[id[j]] & ends[id[j - 1]]) == 0

    - WordPiece (BERT, ELECTRA): ``##x`` continues a word, any other token begins one.
    - SentencePiece (T5, ALBERT): ``▁x`` begins a word, any other token continues one, the unknown
      token too.
    - Byte-level BPE (GPT-2, RoBERTa, BART): a word begins at a space, at a line break and where
      letters, numbers and other characters meet, as GPT-2 cuts a text. A part of a character
      belongs to the word before it and to the one after it.
    - Added tokens, special ones among them, are words of their own.

    These are the words of ``tokenizer(text).word_ids()``. Byte-level BPE differs at fewer than one
    of a thousand tokens of English, in three cases that no table can tell: contractions (``'ll`` is
    two words if it is two tokens, and one with the letters after it), runs of white space (each
    token is a word), and where a character in parts meets one of another kind.

    Args:
        tokenizer: one of these kinds, built on the tokenizers library.

    Returns:
        uint8 [V] for ``word_ids``, V = the highest token id + 1.

    Raises:
        DataError: the tokenizer is of another kind.
    """
    code = _kind(tokenizer)
    vocabulary = tokenizer.get_vocab()
    starts = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.uint8, device="cpu")
    ids = torch.tensor(list(vocabulary.values()), device="cpu")
    starts[ids] = torch.tensor(
        [code(token) for token in vocabulary], dtype=torch.uint8, device="cpu"
    )
    own = [i for i in tokenizer.added_tokens_decoder if i != tokenizer.unk_token_id]
    starts[own] = 0
    if tokenizer.unk_token_id is not None and code is not _metaspace:
        starts[tokenizer.unk_token_id] = 0
    return starts


def word_ids(input_ids: Tensor, starts: Tensor) -> Tensor:
    """Number the words of each row: neighbours of one word have the same number.

    Args:
        input_ids: int64 or int32 [B, T] or [N], any device.
        starts: uint8 [V] of ``word_starts``, on the same device.

    Returns:
        int64, the shape of ``input_ids``; numbers ascend along a row. A row of several sequences
        (packed) is numbered as one: a word that a cut has divided may go on in the next sequence.
    """
    where = "word_ids"
    check_tensor(where, "input_ids", input_ids)
    check_dtype(where, "input_ids", input_ids, (torch.int64, torch.int32))
    check_tensor(where, "starts", starts, ndim=1)
    check_dtype(where, "starts", starts, (torch.uint8,), "Make it with word_starts(tokenizer).")
    check_same_device(where, input_ids=input_ids, starts=starts)
    codes = starts[input_ids]
    before = pad(codes[..., :-1] >> _BITS, (1, 0))
    return ((codes & before) == 0).cumsum(-1)


def _kind(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    """The function from a token to its byte, by what the tokenizer's backend is made of."""
    from tokenizers import models

    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    parts = f"{getattr(backend, 'pre_tokenizer', None)}, {getattr(backend, 'decoder', None)}"
    if isinstance(model, models.WordPiece):
        prefix = model.continuing_subword_prefix
        return lambda token: _code(token.startswith(prefix) and _ANY, _ANY)
    if "ByteLevel(" in parts:
        return _byte_level
    if _METASPACE in parts:
        return _metaspace
    got = f"a {type(tokenizer).__name__} ({type(model).__name__}; {parts})"
    expected = "WordPiece, byte-level BPE or SentencePiece, built on the tokenizers library"
    fix = 'Mask single tokens (unit="token"), or give ops.mask_tokens word ids of your own.'
    fail("word_starts", "tokenizer", got, expected, fix, DataError)


def _code(continues: int, ends: int) -> int:
    return continues | ends << _BITS


def _metaspace(token: str) -> int:
    return _code(0 if token.startswith(_METASPACE) else _ANY, _ANY)


def _byte_level(token: str) -> int:
    if not all(letter in _BYTES for letter in token):
        return 0
    encoded = bytes(_BYTES[letter] for letter in token)
    if encoded == b" ":  # the rest of its word follows
        return _code(0, _ANY)
    text = encoded.decode(errors="replace")
    return _code(_class(text[:1]), _class(text[-1:]))


def _class(letter: str) -> int:
    """White space is never joined to its neighbours; a part of a character always is."""
    if letter.isspace():
        return 0
    if letter in ("", "\ufffd"):
        return _ANY
    return {"L": _LETTER, "N": _NUMBER}.get(unicodedata.category(letter)[0], _OTHER)


def _byte_letters() -> dict[str, int]:
    """The letters by which byte-level BPE writes bytes: the printable ones of Latin-1 stand for
    themselves, the rest comes in order from code point 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_letters()
