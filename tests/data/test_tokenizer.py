from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from fastplm import cli
from fastplm.data import blocks, load_tokenizer, tokenize, train_tokenizer
from fastplm.data.tokenizer import KINDS, for_words
from fastplm.errors import ArgumentTypeError, ArgumentValueError, DataError


def test_special_tokens_and_round_trip(tokenizer, documents, tmp_path):
    assert len(tokenizer) == 120
    assert tokenizer.convert_ids_to_tokens(range(5)) == [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
    ]
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)):
        assert loaded(documents[3])["input_ids"] == tokenizer(documents[3])["input_ids"]
        assert loaded.mask_token_id == 4
    decoded = tokenizer.decode(tokenizer(documents[0])["input_ids"], skip_special_tokens=True)
    assert decoded.replace(" .", ".") == documents[0]


@pytest.fixture(scope="module", params=["bytelevel", "unigram"])
def trained(request, documents, tmp_path_factory):
    return train_tokenizer(documents, 300, tmp_path_factory.mktemp("tokenizer"), request.param)


def test_special_tokens_of_roberta_and_t5(trained, documents):
    last = len(trained) - 1
    if trained.mask_token is None:
        assert trained.convert_ids_to_tokens(range(3)) == ["<pad>", "</s>", "<unk>"]
        assert (trained.pad_token_id, trained.eos_token_id, trained.unk_token_id) == (0, 1, 2)
        sentinels = [f"<extra_id_{i}>" for i in range(100)]
        ids = [last - i for i in range(100)]
        assert trained.convert_tokens_to_ids(sentinels) == ids
        assert set(ids) < set(trained.all_special_ids)
        # A sentinel that occurs in a text is one token.
        assert trained("<extra_id_7>", add_special_tokens=False).input_ids == [last - 7]
        assert trained(documents[0]).input_ids[-1] == 1
    else:
        assert trained.convert_ids_to_tokens(range(4)) == ["<s>", "<pad>", "</s>", "<unk>"]
        assert (trained.cls_token_id, trained.bos_token_id, trained.pad_token_id) == (0, 0, 1)
        assert (trained.sep_token_id, trained.eos_token_id, trained.unk_token_id) == (2, 2, 3)
        assert trained.mask_token_id == last
        ids = trained(documents[0]).input_ids
        assert ids[0] == 0 and ids[-1] == 2
    assert trained.vocab_size == len(trained) <= 300


def test_no_special_token_is_a_piece_of_text(tmp_path):
    # T5 splits at white space alone, so a text can hold the special tokens as words.
    text = [f"{letter}<unk> {letter}<pad> {letter}</s> <extra_id_3>" for letter in "abcdefgh"] * 9
    tokenizer = train_tokenizer(text, 160, tmp_path, "unigram")
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    tokens = [token for token, _ in vocabulary]
    assert len(set(tokens)) == len(tokens) == len(tokenizer)
    assert tokens.index("<pad>") == 0


def test_round_trips(trained, documents):
    accents = "Größe, naïve: 10 % of “it’s” — 😀"
    for text in (documents[5], "  two  spaces\tand\nlines ", accents):
        decoded = trained.decode(trained(text).input_ids, skip_special_tokens=True)
        if trained.mask_token is None:  # T5 keeps words, not white space, and no unseen letters
            known = set("".join(documents))
            text = " ".join("".join(a for a in text if a in known or a.isspace()).split())
            decoded = " ".join("".join(a for a in decoded if a in known).split())
        assert decoded == text


def test_probable_pieces_are_chosen(documents, tmp_path):
    # The scores are log probabilities, so frequent words are single tokens and come first.
    tokenizer = train_tokenizer(documents, 300, tmp_path, "unigram")
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["vocab"]
    scores = [score for _, score in vocabulary[3:-100]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] < 0
    for word in ("before", "apples", "dmitri", "the"):
        assert tokenizer.tokenize(word) == ["▁" + word]


SCRIPT = """
import hashlib, sys
from fastplm.data.tokenizer import KINDS, train_tokenizer
text = ["the quick brown fox jumps over lazy dogs while zebras watch quietly \u00e9\u00e8"] * 3
for kind, size in zip(KINDS, (90, 290, 150), strict=True):
    tokenizer = train_tokenizer(text, size, sys.argv[1], kind=kind)
    print(kind, hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest())
"""


@pytest.mark.slow
def test_vocabulary_is_the_same_in_every_process(tmp_path):
    # The trainers of the tokenizers library number pieces in the order of randomised hash maps,
    # and sum in the order of their threads.
    outputs = set()
    for process, threads in enumerate(("1", "2", "5")):
        environment = {"PYTHONHASHSEED": str(process), "RAYON_NUM_THREADS": threads}
        outputs.add(_run(SCRIPT, str(tmp_path / str(process)), **environment))
    assert len(outputs) == 1
    assert len(outputs.pop().splitlines()) == len(KINDS)


def _run(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_cached(documents, tmp_path, monkeypatch):
    first = train_tokenizer(documents, 100, tmp_path)
    monkeypatch.setattr("fastplm.data.tokenizer._wordpiece", None)
    assert train_tokenizer(documents, 100, tmp_path).get_vocab() == first.get_vocab()


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_words_are_not_cut(documents, tmp_path, monkeypatch, capsys, kind):
    expected = train_tokenizer(documents, 300, tmp_path / "cut", kind)
    assert "cut" not in capsys.readouterr().err
    monkeypatch.setattr("fastplm.data.tokenizer._cut", lambda pre_tokenizer: pre_tokenizer)
    tokenizer = train_tokenizer(documents, 300, tmp_path / "not", kind)
    assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()


@pytest.mark.parametrize("kind", KINDS)
def test_long_words_are_cut_with_one_line(documents, tmp_path, monkeypatch, capsys, kind):
    text = [*documents, *["abcdefghijklmnopqrstuvwxyz" * 9] * 50]

    def longest(vocabulary):
        return max(len(token.removeprefix("##")) for token in vocabulary if token[0] not in "<[")

    whole = train_tokenizer(text, 500, tmp_path / "whole", kind).get_vocab()
    assert capsys.readouterr().err == ""
    assert longest(whole) > 16
    monkeypatch.setattr("fastplm.data.tokenizer.LONGEST_WORD", 16)
    for _ in range(2):  # the second one comes from the cache
        cut = train_tokenizer(text, 500, tmp_path / "cut", kind).get_vocab()
    (line,) = capsys.readouterr().err.splitlines()
    assert "has 234 letters" in line and "cut every 16" in line
    assert longest(cut) <= 16


def test_chinese_is_no_long_word_of_wordpiece(tmp_path, capsys):
    train_tokenizer(["你好世界" * 500], 300, tmp_path)
    assert capsys.readouterr().err == ""
    train_tokenizer(["你好世界" * 500], 300, tmp_path, "unigram")
    assert "has 2,000 letters" in capsys.readouterr().err


def test_small_corpus_gives_a_smaller_vocabulary(tmp_path):
    assert len(train_tokenizer(["only a few words"], 1000, tmp_path)) < 60


@pytest.mark.parametrize(
    "kind, size", [("wordpiece", 12), ("bytelevel", 260), ("unigram", 110), ("unigram", 50)]
)
def test_vocabulary_smaller_than_the_alphabet(documents, tmp_path, kind, size):
    with pytest.raises(DataError, match="alphabet"):
        train_tokenizer(documents, size, tmp_path, kind)
    assert not any(path.name[0] != "." for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "documents, size, kind, error, words",
    [
        (iter(["a"]), 300, "wordpiece", ArgumentTypeError, "Pass a list"),
        (["a"], 10**12, "wordpiece", ArgumentValueError, "1 to 10,000,000"),
        (["a"], "300", "wordpiece", ArgumentValueError, "got '300'"),
        (["a"], 300, "bpe", ArgumentValueError, "bytelevel"),
    ],
)
def test_what_cannot_be_trained(documents, size, kind, error, words, tmp_path):
    with pytest.raises(error, match=words):
        train_tokenizer(documents, size, tmp_path, kind)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("data", [b"", b"null", b'{"a": 1', b"\xff\0"], ids=repr)
def test_damaged_files(name, data, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_folders_without_a_tokenizer(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path):
        with pytest.raises(DataError, match="that tokenizer.save_pretrained wrote.*Check the path"):
            load_tokenizer(path)


def test_smallest_vocabularies(tmp_path):
    assert len(train_tokenizer(["ab ab"], 261, tmp_path, "bytelevel")) == 261
    assert len(train_tokenizer(["ab ab"], 106, tmp_path, "unigram")) == 106


def test_load_refuses_a_tokenizer_without_a_mask(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    with pytest.raises(DataError, match="pad_token"):
        load_tokenizer(tmp_path)


def test_load_asks_for_what_is_needed(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    if trained.mask_token is None:
        assert load_tokenizer(tmp_path, needs=("pad", "eos", "<extra_id_99>")).eos_token_id == 1
        missing = "mask", "cls", "<extra_id_100>"
    else:
        assert load_tokenizer(tmp_path).mask_token_id == len(trained) - 1
        assert load_tokenizer(tmp_path, needs=("eos",)).eos_token_id == 2
        missing = ("<extra_id_0>",)
    for need in missing:
        with pytest.raises(DataError, match=f"without a {need}"):
            load_tokenizer(tmp_path, needs=("pad", need))


@pytest.mark.parametrize("kind", ["wordpiece", "bytelevel", "unigram"])
def test_a_line_without_an_end_is_given_to_the_tokenizer_in_parts(kind, tmp_path, monkeypatch):
    """The library takes dozens of bytes a letter, and ends the process if memory is short."""
    text = " ".join(f"{word}{number % 7}" for number in range(400) for word in ("ab", "river"))
    expected = train_tokenizer([text], 400, tmp_path / "whole", kind)
    whole = tokenize([text], expected, tmp_path / "whole").tokens.tolist()
    monkeypatch.setattr(blocks, "LONGEST_TEXT", 50)
    assert max(map(len, blocks.short_texts(text))) <= 50
    assert "".join(blocks.short_texts(text)) == text
    given = train_tokenizer([text], 400, tmp_path / "parts", kind)
    assert given.get_vocab() == expected.get_vocab()
    assert max(map(len, blocks.split_sentences(text))) <= 50
    assert tokenize([text], given, tmp_path / "parts").tokens.tolist() == whole


def test_a_word_without_an_end_is_cut(monkeypatch):
    monkeypatch.setattr(blocks, "LONGEST_TEXT", 50)
    assert list(map(len, blocks.short_texts("a" * 120))) == [50, 50, 20]
    assert list(map(len, blocks.short_texts(" " + "a" * 60))) == [50, 11]
    assert list(blocks.short_texts("")) == []


def test_a_vocabulary_without_words(documents, tmp_path):
    train_tokenizer(documents, 100, tmp_path / "cache").save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = {}
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"`directory` got .*\("):
        load_tokenizer(tmp_path / "saved", needs=())


# --- a file that its class does not obey ----------------------------------------------------------

CASED = {"type": "BertNormalizer", "lowercase": False, "strip_accents": False}
CASED |= {"clean_text": True, "handle_chinese_chars": True}
DIGITS = {"type": "Digits", "individual_digits": True}
NOT_OBEYED = {
    "case": ("wordpiece", {"normalizer": CASED}),
    "accents": ("wordpiece", {"normalizer": CASED | {"lowercase": True}}),
    "digits": ("wordpiece", {"pre_tokenizer": DIGITS}),
    "no normalizer": ("wordpiece", {"normalizer": None}),
    "special tokens": ("wordpiece", {"post_processor": None}),
    "lower case": ("bytelevel", {"normalizer": {"type": "Lowercase"}}),
    "accents of bytes": ("bytelevel", {"normalizer": {"type": "NFD"}}),
    "words": ("bytelevel", {"pre_tokenizer": {"type": "Whitespace"}}),
    "digits of pieces": ("unigram", {"pre_tokenizer": DIGITS}),
    "lower case of pieces": ("unigram", {"normalizer": {"type": "Lowercase"}}),
}


@pytest.fixture(scope="module")
def saved(documents, tmp_path_factory):
    """Copies the folder of a trained tokenizer, and changes its tokenizer.json."""
    made = {}

    def copied(kind, folder, **change):
        if kind not in made:
            cache = tmp_path_factory.mktemp(kind)
            made[kind] = train_tokenizer(documents, 400, cache, kind)
        return changed(folder, made[kind], **change)

    return copied


def changed(folder, tokenizer, **change):
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


@pytest.mark.parametrize("name", NOT_OBEYED)
def test_a_file_that_is_not_obeyed_is_named(name, saved, tmp_path, capsys):
    """Transformers builds BertTokenizer and others by rules of their own."""
    kind, change = NOT_OBEYED[name]
    folder = saved(kind, tmp_path, **change)
    loaded = load_tokenizer(folder, needs=())
    said = capsys.readouterr().err
    if name == "special tokens":  # the file says nothing of them
        assert not said
        return
    assert said.count("\n") == 1 and f"Transformers builds a {type(loaded).__name__}" in said
    load_tokenizer(folder, needs=())
    assert not capsys.readouterr().err  # once

    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text()) | {"tokenizer_class": "TokenizersBackend"}
    config.write_text(json.dumps(fields))
    obeyed, written = (
        load_tokenizer(folder, needs=()),
        Tokenizer.from_file(f"{folder}/tokenizer.json"),
    )
    assert not capsys.readouterr().err
    text = "The Caf\u00e9 of 1990"
    assert obeyed(text)["input_ids"] == written.encode(text).ids


@pytest.mark.parametrize("kind, model", [("wordpiece", "bert"), ("bytelevel", "roberta")])
def test_the_class_that_config_json_names(kind, model, saved, tmp_path, capsys):
    folder = saved(kind, tmp_path, normalizer={"type": "NFD"})
    (folder / "config.json").write_text(json.dumps({"model_type": model}))
    config = folder / "tokenizer_config.json"
    fields = json.loads(config.read_text())
    del fields["tokenizer_class"]
    config.write_text(json.dumps(fields))
    load_tokenizer(folder, needs=())
    assert "tokenizer.json is not obeyed" in capsys.readouterr().err
    config.write_text(json.dumps(fields | {"tokenizer_class": "TokenizersBackend"}))
    load_tokenizer(folder, needs=())
    assert not capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_files_are_obeyed(kind, saved, tmp_path, capsys):
    load_tokenizer(saved(kind, tmp_path), needs=())
    assert not capsys.readouterr().err


@pytest.mark.parametrize("command", ["embed", "score", "prompt", "finetune"])
def test_commands_say_so_at_their_start(command, saved, tmp_path, capsys):
    folder = saved("wordpiece", tmp_path, normalizer=CASED)
    config = BertConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    texts, table = folder / "texts.txt", folder / "table.tsv"
    texts.write_text("anna reads\n")
    table.write_text("text\tlabel\n" + "anna reads\tone\nboris paints\ttwo\n" * 8)
    prompt = folder / "prompt.json"
    prompt.write_text(
        json.dumps({"template": "{text} {label}", "labels": {"one": "red", "two": "old"}})
    )
    words = {
        "embed": ["--data", texts, "--out", folder / "out.npy"],
        "score": ["--data", texts],
        "prompt": ["--data", table, "--prompt", prompt],
        "finetune": [
            *"--task classification --steps 1 --data".split(),
            table,
            "--out",
            folder / "o",
        ],
    }[command]
    cli.main([command, "--model", str(folder), *map(str, words)])
    said = capsys.readouterr().err
    assert said.count("tokenizer.json is not obeyed") == 1, said


# --- words one by one -----------------------------------------------------------------------------

TEXT = "Anna lives in Berlin since 1990 , in Stra\u00dfe don't caf\u00e9"
GPT4 = Regex(r"'s|\s?\p{L}+|\s?\p{N}+|\s?[^\s\p{L}\p{N}]+|\s+")
BYTES = pre_tokenizers.ByteLevel
META = pre_tokenizers.Metaspace
LLAMA = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
#: {name: (normalizer, pre-tokenizer, whether words can be split off)}.
SPLITS = {
    "bert": (normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), True),
    "bytes": (None, BYTES(add_prefix_space=False), True),
    "bytes with a space before": (None, BYTES(add_prefix_space=True), True),
    "bytes after nfkc": (normalizers.NFKC(), BYTES(add_prefix_space=False), True),
    "bytes of other words": (
        normalizers.NFC(),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(GPT4, "isolated"), BYTES(False, use_regex=False)]
        ),
        True,
    ),
    "bytes after digits": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTES(add_prefix_space=False)]),
        True,
    ),
    "bytes of whole texts": (None, BYTES(False, use_regex=False), False),
    "metaspace": (None, META(), True),
    "metaspace at the first word": (None, META(prepend_scheme="first"), True),
    "metaspace that is never added": (None, META(prepend_scheme="never"), True),
    "metaspace of whole texts": (None, META(split=False), False),
    "words and metaspace": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), META()]),
        True,
    ),
    "no pre-tokenizer": (LLAMA, None, False),
}


@pytest.mark.parametrize("name", SPLITS)
def test_words_have_the_tokens_that_they_have_in_a_text(name, tmp_path):
    """Also after the tokenizer is saved, as that of a model for tags is."""
    normalizer, pre_tokenizer, able = SPLITS[name]
    backend = Tokenizer(models.BPE(unk_token="[UNK]"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    options = {"vocab_size": 500, "special_tokens": ["[UNK]"], "show_progress": False}
    letters = BYTES.alphabet() if "bytes" in name else []
    trainer = trainers.BpeTrainer(initial_alphabet=letters, **options)
    backend.train_from_iterator([TEXT] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    before = repr(tokenizer.backend_tokenizer.normalizer)
    if not able:
        with pytest.raises(DataError, match="whose tokens of words differ from those inside a"):
            for_words("test", tokenizer)
        return
    ready = for_words("test", tokenizer)
    assert repr(tokenizer.backend_tokenizer.normalizer) == before  # not that of the caller
    assert for_words("test", ready) is ready
    ready.save_pretrained(tmp_path)
    known = tokenizer("x " + TEXT)["input_ids"]
    for other in (ready, load_tokenizer(tmp_path, needs=())):
        alone = other(["x", *TEXT.split()], is_split_into_words=True)
        count = sum(word != 0 for word in alone.word_ids())
        assert alone["input_ids"][-count:] == known[-count:]
        assert sorted({*alone.word_ids()}) == list(range(len(TEXT.split()) + 1))
