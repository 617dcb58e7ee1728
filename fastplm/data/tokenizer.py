"""The tokenizer of a run: a saved one, or one trained on the corpus."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastplm.data._folder import build_once, say
from fastplm.data.blocks import short_texts
from fastplm.data.corpus import check_documents, fingerprint
from fastplm.errors import DataError, check, check_choice, fail, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
#: RoBERTa's and BART's, in the order of their ids; the mask is the last token of the vocabulary.
ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>")
ROBERTA_MASK = "<mask>"
#: T5's, in the order of their ids; the sentinels are the last tokens, <extra_id_0> the very last.
T5_TOKENS = ("<pad>", "</s>", "<unk>")
T5_SENTINELS = tuple(f"<extra_id_{i}>" for i in reversed(range(100)))

KINDS = ("wordpiece", "bytelevel", "unigram")
_ALPHABET = 1000
_MOST_TOKENS = 10**7  # the trainers allocate memory for all of them at once
#: Letters at which longer words are cut before a vocabulary is trained.
LONGEST_WORD = 1000
_SPACE = "▁"
_WORDS_AT_ONCE = 1 << 14
#: Texts on which tokenizers differ, beside words of their vocabulary: letters, accents, digits,
#: marks, white space, other scripts.
_PROBES = (
    *(
        "Aa",
        "\u00e9\u00c9",
        "e\u0301",
        "ab12 345",
        "it's",
        "(a-b),c!",
        "a  b",
        " a",
        "a ",
        "a\nb\tc",
    ),
    *("\u4e2d\u6587", "\ufb01\u00bd", "\u00df", "\u201cx\u201d\u2026", "a\u00adb\u200bc"),
)
_ACCENTS = str.maketrans("aeiounc", "\u00e1\u00e9\u00ed\u00f6\u00fc\u00f1\u00e7")
_SHOWN = 60  # letters of a text and of its tokens in a line
_SAID: set[str] = set()
#: Tokens of a vocabulary that are tried as words.
_PROBED = 256
_ROLES = ("pad", "mask", "cls", "sep", "bos", "eos", "unk")


def load_tokenizer(
    directory: str | Path, needs: Sequence[str] = ("pad", "mask", "cls", "sep")
) -> PreTrainedTokenizerBase:
    """A tokenizer as ``AutoTokenizer`` loads it from a local directory.

    Transformers builds many classes by rules of their own, not by tokenizer.json. If that changes
    the tokens of some texts, a line on stderr says so.

    Args:
        directory: what ``tokenizer.save_pretrained`` wrote.
        needs: the tokens that the objective asks for: roles (``"pad"``, ``"mask"``, ``"cls"``,
            ``"sep"``, ``"bos"``, ``"eos"``, ``"unk"``) or tokens by their text
            (``"<extra_id_0>"``).

    Raises:
        DataError: the directory is missing or holds no tokenizer, or the tokenizer lacks a token
            of ``needs``.
    """
    from transformers import AutoTokenizer

    path, expected = Path(directory), "a directory that tokenizer.save_pretrained wrote"
    if not path.is_dir():
        _refuse(path, "", expected, "Check the path.")
    with _reading(path, expected):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, **_config_of(path))
    # Without such a file Transformers makes a tokenizer that knows no word.
    files = sorted({"tokenizer.json", *tokenizer.vocab_files_names.values()})
    if tokenizer.vocab_files_names and not any((path / file).is_file() for file in files):
        _refuse(path, f", without a vocabulary: there is no {' or '.join(files)}", expected)
    vocabulary = tokenizer.get_vocab()
    most = tokenizer.model_max_length
    expected = "room for a token between the special ones"
    if not isinstance(most, int | float) or not most > tokenizer.num_special_tokens_to_add():
        got = f", whose tokenizer_config.json has model_max_length: {most!r:.40}"
        _refuse(path, got, expected, "Correct it, or take it out.")
    with _reading(path, expected):
        tokenizer("a \u2603")  # a vocabulary may lack what stands for an unknown word
    # Transformers adds a special token that the vocabulary lacks, with the id of another one.
    special = set(tokenizer.all_special_ids)
    owner = {index: token for token, index in vocabulary.items() if index in special}
    for token, index in vocabulary.items():
        if (other := owner.get(index, token)) != token:
            got = f", where one id is that of {token} and {other}"
            _refuse(path, got, "a vocabulary that has the special tokens")
    for need in needs:
        role = f"{need}_token" if need in _ROLES else need
        there = getattr(tokenizer, role) is not None if need in _ROLES else need in vocabulary
        if not there:
            got, fix = (
                f", a tokenizer without a {role}",
                "Add them with tokenizer.add_special_tokens.",
            )
            _refuse(path, got, f"a tokenizer with {', '.join(needs)}", fix)
    _say_what_is_not_obeyed(path, tokenizer)
    return tokenizer


def _say_what_is_not_obeyed(path: Path, tokenizer: Any) -> None:
    """One line, if the class of a tokenizer splits texts otherwise than its tokenizer.json says."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json"
    if not (file.is_file() and tokenizer.is_fast):
        return
    with _reading(path, "a tokenizer.json of the tokenizers library"):
        written = Tokenizer.from_file(str(file))
    written.no_truncation()
    written.no_padding()
    # Without a post-processor the file says nothing of special tokens.
    options = {"add_special_tokens": written.post_processor is not None}

    def differ(text: str) -> bool:
        with suppress(Exception):  # a vocabulary may lack what stands for an unknown word
            own = tokenizer(text, verbose=False, **options)["input_ids"]
            return own != written.encode(text, **options).ids
        return False

    words = _some_words(written)
    accented = [word.translate(_ACCENTS) for word in words]
    kinds = (words, [w.upper() for w in words], [w.title() for w in words], accented)
    probe = next(filter(differ, (*_PROBES, *map(" ".join, kinds))), None)
    if probe is None:
        return
    text = next(filter(differ, probe.split()), probe)  # the first word that differs
    own = tokenizer.convert_ids_to_tokens(tokenizer(text, **options)["input_ids"])
    line = (
        f"{path}: tokenizer.json is not obeyed, as Transformers builds a "
        f"{type(tokenizer).__name__}, which tokenizer_config.json or config.json names: of "
        f"{text[:_SHOWN]!r} it makes {' '.join(own)[:_SHOWN]}, the file "
        f"{' '.join(written.encode(text, **options).tokens)[:_SHOWN]}. To obey the file, write "
        '"tokenizer_class": "TokenizersBackend" in tokenizer_config.json.'
    )
    if line not in _SAID:
        _SAID.add(line)
        say(line)


def _some_words(backend: Any) -> list[str]:
    """Tokens of a vocabulary in equal distances, without what BPE and WordPiece add to words."""
    size = backend.get_vocab_size(False)
    tokens = (backend.id_to_token(i) or "" for i in range(0, size, size // _PROBED + 1))
    return [word for token in tokens if (word := token.strip("\u0120\u2581#"))]


def for_words(where: str, tokenizer: Any) -> Any:
    """A fast tokenizer that encodes words one by one as it does inside a text.

    A byte-level tokenizer has other tokens for a word with a space before it than without one. If
    the words need that space, the result is a copy that puts it there (``normalizers.Prepend``).

    Args:
        where: the caller, for errors.
        tokenizer: built on the tokenizers library.

    Raises:
        DataError: its tokens go beyond words, or depend on the words around them.
    """
    from tokenizers import normalizers

    if _splits_alike(tokenizer):
        return tokenizer
    spaced = copy.deepcopy(tokenizer)
    backend = spaced.backend_tokenizer
    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(" "), *before])
    got = f"a {type(tokenizer).__name__} whose tokens of words differ from those inside a text"
    expected = "one that splits texts at white space before it makes tokens"
    fix = "Use another tokenizer, or whole texts."
    check(_splits_alike(spaced), where, "tokenizer", got, expected, fix, DataError)
    return spaced


def _splits_alike(tokenizer: Any) -> bool:
    """Whether words of the vocabulary have the same tokens one by one as in a text.

    The first word is left out, as a text has nothing before it.
    """
    found = _some_words(tokenizer.backend_tokenizer)
    words = ["a", *(word for word in found if word.isascii() and word.isalnum())]
    words += ["b", "B", "1990", ",", "it's"]
    options = {"add_special_tokens": False, "verbose": False}
    of_text = tokenizer(" ".join(words), **options)["input_ids"]
    alone = tokenizer(words, is_split_into_words=True, **options)
    count = sum(word != 0 for word in alone.word_ids())
    return len(of_text) > count and of_text[-count:] == alone["input_ids"][-count:]


def _config_of(path: Path) -> dict[str, Any]:
    """An empty configuration for a model of fastplm's own: Transformers would warn of its type."""
    from transformers import PreTrainedConfig

    try:
        kind = json.loads((path / "config.json").read_text("utf-8"))["model_type"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return {}
    return {"config": PreTrainedConfig()} if str(kind).startswith("fastplm-") else {}


def _refuse(
    path: Path, got: str, expected: str, fix: str = "Save the tokenizer again."
) -> NoReturn:
    fail("load_tokenizer", "directory", f"{path}{got}", expected, fix, DataError)


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Files of other contents raise whatever they lead to: here, a DataError."""
    try:
        yield
    except Exception as error:
        fix = "Check the path; if it is right, the files are damaged: save the tokenizer again."
        _refuse(path, f" ({first_line(error)})", expected, fix)


def train_tokenizer(
    documents: Iterable[str], vocab_size: int, cache: str | Path, kind: str = "wordpiece"
) -> PreTrainedTokenizerBase:
    """A tokenizer trained on the documents.

    - "wordpiece" (BERT, ELECTRA, ALBERT): lower case; ``[PAD]`` 0, ``[UNK]`` 1, ``[CLS]`` 2,
      ``[SEP]`` 3, ``[MASK]`` 4.
    - "bytelevel" (GPT-2, RoBERTa, BART): byte-level BPE; ``<s>`` 0, ``<pad>`` 1, ``</s>`` 2,
      ``<unk>`` 3, ``<mask>`` the last.
    - "unigram" (T5): pieces of words with probabilities; ``<pad>`` 0, ``</s>`` 1, ``<unk>`` 2, and
      100 sentinels at the end, ``<extra_id_0>`` the last.

    A word of more than 1000 letters (bytes for "bytelevel") is cut every 1000, as the time that
    training takes grows with the square of a word's length; a line on stderr says so. WordPiece
    encodes words of more than 100 letters as ``[UNK]``.

    The same documents give the same vocabulary in every process. ``AutoTokenizer`` loads what the
    cache holds as ``BertTokenizer``, ``RobertaTokenizer`` or ``T5Tokenizer``.

    Args:
        documents: an iterable that can be iterated several times.
        vocab_size: the most tokens, the special ones included; a small corpus gives fewer.
        cache: a folder where the result is kept under the hash of kind, documents and size.
        kind: as above.

    Raises:
        ArgumentValueError: an unknown kind, or a size outside its range.
        ArgumentTypeError: one text, or documents that can be read only once.
        DataError: the alphabet of the documents alone is larger.
    """
    from transformers import AutoTokenizer

    where, expected = "train_tokenizer", f"an integer from 1 to {_MOST_TOKENS:,}"
    check_choice(where, "kind", kind, KINDS)
    check_documents(where, documents)
    fits = isinstance(vocab_size, int) and 1 <= vocab_size <= _MOST_TOKENS
    fix = "30522 and 50265 are usual."
    check(fits, where, "vocab_size", repr(vocab_size), expected, fix)
    builders = {"wordpiece": _wordpiece, "bytelevel": _bytelevel, "unigram": _unigram}

    def build(directory: Path) -> None:
        tokenizer = builders[kind](documents, vocab_size)
        try:
            tokenizer.save_pretrained(directory)
        except Exception as error:
            # The tokenizers library raises a plain Exception where the disk is full.
            if (code := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(code[1]), os.strerror(int(code[1]))) from error

    key = f"{kind}-{vocab_size}-{fingerprint(documents)[:24]}"
    return AutoTokenizer.from_pretrained(build_once(cache, key, build), local_files_only=True)


class _ReportedWords(Iterable[str]):
    """Documents, those of more than ``LONGEST_TEXT`` letters in parts.

    When all were read, a line on stderr says if a word will be cut.
    """

    def __init__(self, documents: Iterable[str], words_of: Callable[[str], Iterable[str]]) -> None:
        self.documents, self.words_of, self.longest = documents, words_of, 0

    def __iter__(self) -> Iterator[str]:
        known = self.longest
        for part in chain.from_iterable(map(short_texts, self.documents)):
            for text in part.split():
                # Text without spaces may be several words, as in Chinese.
                if len(text) > max(LONGEST_WORD // 4, self.longest):
                    self.longest = max(self.longest, *map(len, self.words_of(text)))
            yield part
        if self.longest > max(LONGEST_WORD, known):
            say(
                f"fastplm: the longest word of the corpus has {self.longest:,} letters: for the "
                f"vocabulary, words are cut every {LONGEST_WORD:,}"
            )


def _words_by(pre_tokenizer: Any, normalizer: Any = None) -> Callable[[str], list[str]]:
    def words_of(text: str) -> list[str]:
        text = normalizer.normalize_str(text) if normalizer else text
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    return words_of


def _cut(pre_tokenizer: Any) -> Any:
    """A pre-tokenizer that also cuts words that are too long."""
    from tokenizers import pre_tokenizers

    return pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.FixedLength(LONGEST_WORD)])


def _alphabet(frequency: Counter[str]) -> list[str]:
    """The most frequent letters, ties by code point."""
    seen = (letter for letter in frequency if not letter.isspace())
    return sorted(seen, key=lambda letter: (-frequency[letter], letter))[:_ALPHABET]


def _check_size(vocab_size: int, least: int) -> None:
    where, fits = "train_tokenizer", least <= vocab_size
    expected = f"at least {least}, the special tokens and the alphabet of this corpus"
    check(fits, where, "vocab_size", vocab_size, expected, "Raise it.", DataError)


def _wordpiece(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    normalizer = normalizers.BertNormalizer(lowercase=True)
    pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    documents = _ReportedWords(documents, _words_by(pre_tokenizer, normalizer))
    frequency: Counter[str] = Counter()
    for document in documents:
        frequency.update(normalizer.normalize_str(document))
    alphabet = _alphabet(frequency)

    def train(size: int, first_tokens: list[str]) -> dict[str, int]:
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = _cut(pre_tokenizer)
        options = _options(alphabet, size, first_tokens)
        tokenizer.train_from_iterator(documents, trainers.WordPieceTrainer(**options))
        return tokenizer.get_vocab()

    # The trainer numbers the pieces "##x" in the order of a hash map and breaks ties between
    # merges by these numbers: naming them first, sorted, makes the vocabulary the same every time.
    special = list(SPECIAL_TOKENS)
    pieces = sorted(token for token in train(0, special) if token.startswith("##"))
    vocabulary = train(vocab_size, special + pieces)
    _check_size(vocab_size, len(vocabulary))
    return BertTokenizer(vocab=vocabulary, do_lower_case=True)


def _bytelevel(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, pre_tokenizers
    from transformers import RobertaTokenizer

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(vocab_size, len(ROBERTA_TOKENS) + len(alphabet) + 1)
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    documents = _ReportedWords(documents, _words_by(pre_tokenizer))
    bpe = _bpe(documents, pre_tokenizer, alphabet, vocab_size - 1, ROBERTA_TOKENS)
    model = json.loads(bpe.to_str())["model"]
    vocabulary = {**model["vocab"], ROBERTA_MASK: len(model["vocab"])}
    merges = [(left, right) for left, right in model["merges"]]
    # As in RoBERTa, the mask includes the space before it; the token after it has its own space.
    mask = AddedToken(ROBERTA_MASK, lstrip=True, special=True)
    return RobertaTokenizer(vocab=vocabulary, merges=merges, mask_token=mask)


def _unigram(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """T5's tokenizer, of tokens with their log probabilities.

    The Unigram trainer of the tokenizers library adds floats in the order of a randomised hash map
    and of its threads, so that its vocabulary depends on the process. Here every sum is one of
    integers. The first pieces are those of a BPE vocabulary of twice the size; in each round the
    words are split in the most probable way and the pieces counted (hard expectation maximisation),
    and those counted least are dropped; the last rounds only count.

    Source: Kudo 2018 (arXiv 1804.10959), whose expectation maximisation is the soft one.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import T5Tokenizer

    words: Counter[str] = Counter()
    for document in _ReportedWords(documents, str.split):
        for word in document.split():
            spaced = _SPACE + word
            words.update(spaced[i : i + LONGEST_WORD] for i in range(0, len(spaced), LONGEST_WORD))
    letters: Counter[str] = Counter()
    for word, frequency in words.items():
        for letter in word:
            letters[letter] += frequency
    alphabet = _alphabet(letters)
    special = T5_TOKENS + T5_SENTINELS
    room = vocab_size - len(special)
    _check_size(vocab_size, len(special) + len(alphabet))

    split = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer = _bpe(documents, split, alphabet, 2 * room)
    tokenizer.pre_tokenizer = None
    pieces = [piece for piece in tokenizer.get_vocab() if piece not in special]
    first = [(token, 0.0) for token in T5_TOKENS]
    for size in (2 * room, 3 * room // 2, room, room, room):
        counts = _count_pieces(tokenizer, words, pieces)
        multiple = [piece for piece in pieces if len(piece) > 1]
        multiple.sort(key=lambda piece: (-counts[piece], piece))
        pieces = alphabet + multiple[: size - len(alphabet)]
        total = sum(counts[piece] for piece in pieces) or 1
        # Rounded, so that the last bit of a logarithm on another machine changes nothing.
        scores = {piece: round(math.log(max(counts[piece], 1) / total), 6) for piece in pieces}
        pieces.sort(key=lambda piece: (-scores[piece], piece))
        vocabulary = first + [(piece, scores[piece]) for piece in pieces]
        tokenizer = Tokenizer(models.Unigram(vocabulary, T5_TOKENS.index("<unk>"), False))
    vocabulary += [(token, 0.0) for token in T5_SENTINELS]
    return T5Tokenizer(vocab=vocabulary, extra_ids=len(T5_SENTINELS))


def _bpe(
    documents: Iterable[str],
    pre_tokenizer: Any,
    alphabet: list[str],
    vocab_size: int,
    first_tokens: Sequence[str] = (),
) -> Any:
    """A BPE tokenizer; its trainer sorts the alphabet and breaks ties between merges by the ids."""
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _cut(pre_tokenizer)
    options = _options(alphabet, vocab_size, first_tokens)
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(**options))
    return tokenizer


def _options(alphabet: list[str], vocab_size: int, first_tokens: Sequence[str]) -> dict[str, Any]:
    """What both trainers are told."""
    letters = {"initial_alphabet": alphabet, "limit_alphabet": len(alphabet)}
    tokens = {"vocab_size": vocab_size, "special_tokens": list(first_tokens)}
    return {**letters, **tokens, "show_progress": False}


def _count_pieces(tokenizer: Any, words: Counter[str], pieces: list[str]) -> dict[str, int]:
    """How often each piece is used where the tokenizer splits the words."""
    counts = dict.fromkeys(pieces, 0)
    pending = list(words.items())
    for begin in range(0, len(pending), _WORDS_AT_ONCE):
        batch = pending[begin : begin + _WORDS_AT_ONCE]
        encodings = tokenizer.encode_batch([word for word, _ in batch])
        for (_, frequency), encoding in zip(batch, encodings, strict=True):
            for token in encoding.tokens:
                if token in counts:  # not for letters beyond the alphabet
                    counts[token] += frequency
    return counts
