"""Label words scored by language models: the same as from the parent class, word by word."""

from __future__ import annotations

import copy
import json
import re
import statistics

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from fastplm import cli
from fastplm.data import train_tokenizer
from fastplm.errors import ArgumentTypeError, ArgumentValueError, DataError
from fastplm.inference.prompt import (
    CONTENT_FREE,
    LabelScores,
    Prompt,
    _spread,
    read_prompts,
    score_labels,
)
from fastplm.models import BertForMaskedLM, GPT2LMHeadModel

from ..models.conftest import FAMILIES, LANGUAGE_MODELS, pair
from .conftest import hold

LABELS = {"good": ["cd", "e"], "bad": ["fgh"], "none": ["k"]}
PROMPT = Prompt("{text} a {label}", LABELS)
SHOTS = [(("bc",), "good"), (("d",), "bad")]
FEW_SHOT = Prompt("b {text} a {label}", LABELS, SHOTS, separator=" p ", premise="a {label}")
TEXTS = [("ab",), ("p",), ("hij ab",), ("ab",)]
SENTINEL = "<extra_id_0>"


@pytest.fixture(scope="module")
def words(tokenizer):
    """The tokenizer with a mask token; and another one with T5's sentinel."""
    masked, sentinel = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    masked.add_special_tokens({"mask_token": "[MASK]"})
    sentinel.add_tokens([SENTINEL], special_tokens=True)
    masked.model_max_length = sentinel.model_max_length = 60
    return masked, sentinel


def models(family, words):
    name = LANGUAGE_MODELS[family]
    options = {} if family == "t5" else {"max_position_embeddings": 60}
    if family in ("gpt2", "openai"):
        options = {"n_positions": 60}
    model, parent = pair(name, vocab_size=37, **options)
    return model, parent, words[family == "t5"]


def by_hand(family, parent, tokenizer, before, word):
    """The log-probability of a word after this text, one call a token if the tokens follow."""
    tokens = tokenizer(word, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        if family not in ("gpt2", "openai", "t5", "bart"):
            ids = tokenizer(before + " [MASK]" * len(tokens))["input_ids"]
            logs = parent(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            places = [i for i, token in enumerate(ids) if token == tokenizer.mask_token_id]
            return sum(logs[at, token] for at, token in zip(places, tokens, strict=True))
        total = 0.0
        for k, token in enumerate(tokens):
            if family in ("gpt2", "openai"):
                ids = tokenizer(before)["input_ids"] + tokens[:k]
                logits = parent(input_ids=torch.tensor([ids])).logits
            else:
                mark = SENTINEL if family == "t5" else "[MASK]"
                source = tokenizer(before + " " + mark)["input_ids"]
                ids = [parent.config.decoder_start_token_id]
                if family == "t5":
                    ids += [tokenizer.convert_tokens_to_ids(SENTINEL)]
                else:
                    ids += tokenizer(before)["input_ids"]
                logits = parent(
                    input_ids=torch.tensor([source]),
                    decoder_input_ids=torch.tensor([[*ids, *tokens[:k]]]),
                ).logits
            total = total + logits[0, -1].log_softmax(-1)[token]
    return total


def of_prompts(family, parent, tokenizer, befores):
    """The scores [prompts, labels], word by word."""

    def label(before, words):
        logs = [by_hand(family, parent, tokenizer, before, word) for word in words]
        return torch.stack(logs).exp().mean().log()

    rows = [[label(before, words) for words in LABELS.values()] for before in befores]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_scores_are_those_of_the_parent_word_by_word(family, words):
    model, parent, tokenizer = models(family, words)
    if family in ("gpt2", "openai", "bart"):  # the tokenizer adds no token at the end for these
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.backend_tokenizer.post_processor = None
    for prompt in (PROMPT, FEW_SHOT):
        shown = "" if prompt is PROMPT else "b bc a cd p b d a fgh p b "
        befores = [f"{shown}{text} a" for (text,) in TEXTS]

        def ours(model, prompt=prompt, tokenizer=tokenizer):
            return score_labels(model, tokenizer, prompt, TEXTS, batch_tokens=30).texts

        def theirs(parent, befores=befores, tokenizer=tokenizer):
            return of_prompts(family, parent, tokenizer, befores)

        hold(model, parent, ours, theirs)


def test_calibration(words):
    """Zhao et al.: over the mean share without content; Holtzman et al.: over the premise."""
    model, parent, tokenizer = models("bert", words)
    scores = score_labels(model, tokenizer, FEW_SHOT, TEXTS)
    shown = "b bc a cd p b d a fgh p b "
    free = of_prompts("bert", parent, tokenizer, [f"{shown}{text} a" for text in CONTENT_FREE[1:2]])
    assert torch.isfinite(free).all()
    premise = of_prompts("bert", parent, tokenizer, ["a"])[0]
    np.testing.assert_allclose(scores.premise, premise.numpy(), rtol=1e-4)
    assert np.exp(scores.content_free).sum() == pytest.approx(1)
    scores = LabelScores(np.log([[0.6, 0.4], [0.8, 0.2]]), np.log([0.7, 0.3]), np.log([0.2, 0.9]))
    assert scores.chosen().tolist() == [0, 0]
    assert scores.chosen("contextual").tolist() == [1, 0]
    assert scores.chosen("pmi").tolist() == [0, 0]


def test_words_share_inputs(words):
    """Words of one token need one input of a decoder, and words of equal length one mask."""
    model, _, tokenizer = models("gpt2", words)
    model.config.bos_token_id = tokenizer.cls_token_id
    computed = []
    model.transformer.wte.register_forward_hook(lambda m, i, output: computed.append(output.shape))
    prompt = Prompt("{text} a {label}", {"x": ["b"], "y": ["c", "d"]})
    score_labels(model, tokenizer, prompt, [("p",)] * 5)
    distinct = 1 + len(CONTENT_FREE)  # the prompt with the empty text is also the premise
    # Without the [SEP] at the end.
    ids = [tokenizer(f"{text} a".strip())["input_ids"][:-1] for text in ("p", *CONTENT_FREE)]
    assert sum(shape[-2] for shape in computed) == sum(map(len, ids)) and len(ids) == distinct


def test_texts_that_are_too_long_are_cut_off(words):
    model, _, tokenizer = models("bert", words)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = 12
    with pytest.warns(UserWarning, match="1 of 2 texts were cut off: a prompt has 12 tokens"):
        long = score_labels(model, tokenizer, PROMPT, [("a" * 40,), ("b",)])
    short = score_labels(model, tokenizer, PROMPT, [("a" * 6,), ("b",)])  # 12 tokens: 6 + a + 3 + 2
    assert np.array_equal(long.texts, short.texts)
    with pytest.raises(ArgumentValueError, match="`prompt` got .* tokens too many"):
        score_labels(model, tokenizer, FEW_SHOT, [("b",)])


def test_a_long_text_that_ends_with_a_space_is_cut_off(tmp_path):
    tokenizer = train_tokenizer(["the module " * 9], 300, tmp_path, "bytelevel")
    tokenizer.model_max_length = 9
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 16}
    model = GPT2LMHeadModel(transformers.GPT2Config(vocab_size=len(tokenizer), **sizes))
    prompt = Prompt("{text} {label}", {"good": ["the"], "bad": ["module"]})
    with pytest.warns(UserWarning, match="1 of 1 texts were cut off"):
        scores = score_labels(model, tokenizer, prompt, [("the module " * 9,)])
    assert scores.texts.shape == (1, 2)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"template": "{text}"}, r"`template` got places \['text'\]"),
        ({"template": "{text} {label} {label}"}, "`template` got places"),
        ({"template": "{text"}, "`template` got places .*braces"),
        ({"labels": {"a": ["b"]}}, "`labels` got 1 labels"),
        ({"labels": {"a": ["b"], "c": []}}, "`labels` got 2 labels and 1 words"),
        ({"examples": [(("a",), "d")]}, "`examples` got 'd'"),
        ({"examples": [(("a", "b"), "good")]}, "`examples` got 2 texts where"),
        ({"labels": {"a": ["b"], "c": [1]}}, "`labels` got 1; expected a text"),
        ({"examples": [((1,), "good")]}, "`examples` got 1; expected a text"),
        ({"separator": 3}, "`separator` got 3; expected a text"),
        ({"premise": 3}, "`premise` got 3; expected a text"),
        ({"premise": "It was"}, "`premise` got 'It was'; expected a text with {label} once"),
        ({"premise": "{text} {label}"}, "`premise` got '{text} {label}'"),
    ],
)
def test_bad_prompts(options, said):
    with pytest.raises((ArgumentValueError, ArgumentTypeError), match=f"prompt: {said}"):
        Prompt(**{"template": "{text} {label}", "labels": LABELS, **options})


def test_bad_models(words):
    model, _, tokenizer = models("gpt2", words)
    with pytest.raises(ArgumentTypeError, match="`model` got a GPT2Model"):
        score_labels(model.transformer, tokenizer, PROMPT, TEXTS)
    with pytest.raises(ArgumentValueError, match="{label} after the text"):
        score_labels(model, tokenizer, Prompt("{label} {text}", LABELS), TEXTS)
    with pytest.raises(ArgumentValueError, match="`texts` got 2 texts where the template has 1"):
        score_labels(model, tokenizer, PROMPT, [("a", "b")])
    model.transformer.wte.weight.data.fill_(torch.nan)
    with pytest.raises(DataError, match="a GPT2LMHeadModel whose probabilities are not numbers"):
        score_labels(model, tokenizer, PROMPT, TEXTS)


# --- words that a model cannot tell apart, or does not know ---------------------------------------

VOCABULARY = ["[PAD]", "[UNK]", "[MASK]", "it", "was", "great", "bad", "the", "film"]


@pytest.fixture(scope="module")
def bert():
    """A tiny model and a tokenizer of whole words in small letters."""
    known = dict(zip(VOCABULARY, range(9), strict=True))
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, "[UNK]"))
    plain.normalizer = tokenizers.normalizers.Lowercase()
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=9, num_hidden_layers=1, **sizes)
    return BertForMaskedLM(config), tokenizer


def score(bert, labels):
    return score_labels(*bert, Prompt("{text} it was {label}", labels), [("the film",)]).texts


@pytest.mark.parametrize(
    "labels, said",
    [
        ({"good": ["grand"], "bad": ["bad"]}, r"the word 'grand' of 'good', .* \[UNK\]"),
        ({"good": ["great"], "bad": ["bad", "so awful"]}, r"the word 'so awful' of 'bad'"),
        (
            {"good": ["great"], "bad": ["GREAT"]},
            "'great' of 'good' and 'GREAT' of 'bad', .*: great;",
        ),
        ({"a": ["bad", "great"], "b": ["it"], "c": ["Bad"]}, "'bad' of 'a' and 'Bad' of 'c'"),
    ],
)
def test_words_that_say_nothing(labels, said, bert):
    with pytest.raises(ArgumentValueError, match=f"prompt: `labels` got .*{said}"):
        score(bert, labels)


def test_words_that_say_something(bert):
    # Labels may contain an unknown part, or a word twice, if they still differ.
    labels = {"good": ["great", "Great"], "bad": ["bad", "bad awful"]}
    assert score(bert, labels).shape == (1, 2)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def folder(words, tmp_path, monkeypatch):
    """A checkpoint, a prompt and examples."""
    model, _, tokenizer = models("bert", words)
    model.save_pretrained(tmp_path / "model")
    model.bert.save_pretrained(tmp_path / "headless")
    for name in ("model", "headless"):
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "prompt.json").write_text(
        json.dumps({"template": "{text} a {label} b", "labels": {"0": "cd", "1": ["fg", "k"]}})
    )
    (tmp_path / "data.tsv").write_text("label\ttext\n" + "0\tab c\n1\tp\n" * 4 + "1\tabc\n")
    (tmp_path / "other.tsv").write_text("label\ttext\n2\tab\n")
    (tmp_path / "numbers.json").write_text(
        json.dumps({"template": "{text} {label}", "labels": {"0": [1], "1": "k"}})
    )
    (tmp_path / "old.tsv").write_text("kept")
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = "prompt --model model --prompt prompt.json --data data.tsv"


def test_the_command_writes_predictions(folder, capsys):
    words = f"{COMMAND} --out found.tsv --shots 3 --shots-data data.tsv".split()
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    found = re.fullmatch(
        r"accuracy: none (\S+)  contextual \S+  pmi \S+  \(9 texts; the most .*: 0\.5556\)\n",
        shown.out,
    )
    assert found and "2 labels, 3 examples shown" in shown.err
    head, *rows = [line.split("\t") for line in (folder / "found.tsv").read_text().splitlines()]
    assert head == ["label", "none", "contextual", "pmi", "log p(0)", "log p(1)"]
    assert len(rows) == 9
    right = sum(row[0] == row[1] for row in rows) / 9
    assert float(found[1]) == pytest.approx(right, abs=1e-4)
    assert all((row[1] == "1") == (float(row[5]) > float(row[4])) for row in rows)


def test_several_templates(folder, capsys):
    """Each is scored as in a run of its own; the last line has their mean and spread."""
    templates = ["{text} a {label} b", "k {label} {text}", "{text} {label}"]
    alone = []
    for template in templates:
        assert cli.main([*COMMAND.split(), "--template", template]) == 0
        line = capsys.readouterr().out
        alone.append([float(x) for x in re.findall(r"(?:none|contextual|pmi) (\S+)", line)])
    words = ["--out", "found.tsv", "--template", *templates]
    assert cli.main([*COMMAND.split(), *words]) == 0
    shown = capsys.readouterr()
    *lines, last = shown.out.splitlines()
    assert "2 labels, 0 examples shown, 3 templates" in shown.err
    for number, (line, values) in enumerate(zip(lines, alone, strict=True), 1):
        start = "template {}: none {:.4f}  contextual {:.4f}  pmi {:.4f}  ".format(number, *values)
        assert line == f"{start}{templates[number - 1]!r}"
    none = [round(9 * values[0]) / 9 for values in alone]
    spread = f"none {statistics.fmean(none):.4f} ± {statistics.stdev(none):.4f}"
    expected = f"accuracy of 3 templates: {spread} ({min(none):.4f} to {max(none):.4f})  contextual"
    assert last.startswith(expected) and last.endswith("(9 texts; the most frequent label: 0.5556)")
    assert _spread([0.25, 0.5, 0.75]) == "0.5000 ± 0.2500 (0.2500 to 0.7500)"
    head, *rows = [line.split("\t") for line in (folder / "found.tsv").read_text().splitlines()]
    assert head[:3] == ["template", "label", "none"]
    assert [row[0] for row in rows] == [*"111111111222222222333333333"]
    content = json.loads((folder / "prompt.json").read_text()) | {"template": templates}
    (folder / "prompt.json").write_text(json.dumps(content))
    assert cli.main(COMMAND.split()) == 0
    assert capsys.readouterr().out == shown.out


@pytest.mark.parametrize(
    "templates, said",
    [
        (["{text} {label}", "{text1} {text2} {label}"], "templates of the same texts"),
        (["{text} {label}", "{text} {label}"], "`template` got .* twice; expected each once"),
        (["{text}"], r"`template` got places \['text'\]"),
    ],
)
def test_bad_templates(templates, said, folder, capsys):
    assert cli.main([*COMMAND.split(), "--template", *templates]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fastplm: error: ") and re.search(said, line), line


@pytest.mark.parametrize(
    "change, said",
    [
        ("--out old.tsv", "`out` got old.tsv, which exists"),
        (
            "--out model --overwrite",
            "`out` got model, which is --model; expected a path apart from all that is read",
        ),
        ("--data other.tsv", "`data` got other.tsv:2: the label '2'; expected one of the prompt"),
        ("--prompt data.tsv", "`prompt` got data.tsv .*expected JSON"),
        ("--prompt missing.json", "`prompt` got missing.json .No such file"),
        (
            "--model headless",
            "`model` got headless, which lacks . weights of a BertForMaskedLM, such as cls",
        ),
        ("--shots 2", "`shots` got 2 with --shots-data None"),
        ("--data data.tsv --label-column name", "expected one named 'name'"),
        ("--prompt numbers.json", "`prompt` got numbers.json .*`labels` got 1; expected a text"),
        ("--model missing", "`model` got 'missing', which is no folder"),
    ],
)
def test_errors_are_one_line(change, said, folder, capsys):
    assert cli.main([*COMMAND.split(), *change.split()]) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fastplm: error: ") and re.search(said, line), line
    assert (folder / "old.tsv").read_text() == "kept"


def test_prompts_of_files(tmp_path):
    path = tmp_path / "prompt.json"
    content = {
        "template": "{text1} a {text2} {label}",
        "labels": {"x": "b", "y": ["c"]},
        "examples": [["p", "k", "x"]],
        "premise": "{label}",
    }
    path.write_text(json.dumps(content))
    (prompt,) = read_prompts(path)
    assert prompt.around(["d", "e"]) == ("p a k b\n\nd a e ", "")
    assert prompt.without_text() == ("", "")
    path.write_text(json.dumps(content | {"shots": 3}))
    with pytest.raises(DataError, match="unexpected keyword argument 'shots'"):
        read_prompts(path)
