"""Every command and code block of README.md and docs/ works, and every example in a docstring.

- Python is executed, the blocks of a page one after another in one namespace, in a folder that has
  the files which the pages name: ``path/to/bert`` is a BERT of two layers.
- ``fastplm …`` runs in this process with the options of the page, cut down to two steps of a tiny
  model (``SMALL``), those of a block in one folder.
- ``make``, ``pytest``, ``python`` and ``pip`` are not run, as they take minutes, install, or are
  what runs this test; their targets, files, modules and options must exist.

A block in a language without a rule fails, and so does a command.
"""

from __future__ import annotations

import argparse
import copy
import doctest
import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import fastplm
from fastplm import cli, ops
from fastplm._registry import OPS
from fastplm.data import train_tokenizer

if sys.version_info >= (3, 11):
    import tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: What a run of a page is cut down to; arguments that come later count.
SMALL = {
    "pretrain": "--steps 2 --batch-size 2 --block-size 32 --vocab-size 400 --precision fp32",
    "finetune": "--epochs 1 --batch-size 2 --max-samples 4 --max-eval-samples 2 --seeds 1"
    " --max-length 64",
}


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, and its lines."""

    page: str
    line: int
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^(```+)([^\n]*)\n(.*?)^\1$", text, re.MULTILINE | re.DOTALL)
    for match in fences:
        line = text.count("\n", 0, match.start()) + 1
        yield Block(str(page.relative_to(ROOT)), line, match[2].strip(), match[3])


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^(```+)[^\n]*\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def commands(code: str) -> list[list[str]]:
    """The commands of a shell block, as words."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


BLOCKS = [block for page in PAGES for block in blocks(page)]


def test_every_block_has_a_language_with_a_rule():
    """An indented block has none: it would be shown as code, and never run."""
    for block in BLOCKS:
        assert block.language in ("python", "pycon", "sh", "text"), f"{block}: {block.language!r}"
        if block.language == "text":
            first = {line.split()[0] for line in block.code.splitlines() if line.split()}
            assert not first & set(CHECKS), f"{block}: a command in a block of text"
    for page in PAGES:
        # Directives of mkdocstrings have options that are indented.
        plain = re.sub(r"^::: .*\n(?:    .*\n)*", "", prose(page), flags=re.MULTILINE)
        indented = re.search(r"\n\n    \S.*", plain)
        assert not indented, f"{page}: an indented block:{indented[0] if indented else ''}"


# --- the files that pages name --------------------------------------------------------------------

NOUNS = "river house teacher garden train letter window forest engine island".split()
VERBS = "follows carries remembers builds opens paints".split()


def sentence(i: int) -> str:
    return f"the {NOUNS[i % 10]} {VERBS[i * 5 % 6]} the {NOUNS[(i * 3 + 1) % 10]}"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with all of them."""
    folder = tmp_path_factory.mktemp("files")
    stories = [". ".join(sentence(i + j) for j in range(4 + i % 7)) + "." for i in range(150)]
    (folder / "my-texts").mkdir()
    for name in ("wiki.txt", "my-texts/one.txt"):
        (folder / name).write_text("\n\n".join(stories))
    labelled = [f"{'good' if i % 2 else 'bad'}\t{sentence(i)}" for i in range(20)]
    for name in ("reviews.tsv", "train.tsv", "test.tsv"):
        (folder / name).write_text("\n".join(("label\ttext", *labelled)))
    pairs = [f"{i % 2}\t1\t2\t{sentence(i)}\t{sentence(i + 6 * (i % 2))}" for i in range(20)]
    head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
    (folder / "mrpc.txt").write_text("\n".join((head, *pairs)))
    tags = ("DET", "NOUN", "VERB", "DET", "NOUN")
    tagged = [zip(sentence(i).split(), tags, strict=True) for i in range(20)]
    (folder / "pos.tsv").write_text(
        "\n\n".join("\n".join("\t".join(pair) for pair in words) for words in tagged)
    )
    paragraphs = []
    for i in range(10):
        answer = {"text": NOUNS[i], "answer_start": sentence(i).index(NOUNS[i])}
        question = {"id": str(i), "question": "what is there?", "answers": [answer]}
        paragraphs.append({"context": sentence(i), "qas": [question]})
    squad = {"data": [{"title": "", "paragraphs": paragraphs}]}
    (folder / "squad.json").write_text(json.dumps(squad))
    questions = [
        {"question": f"what {VERBS[i % 6]}?", "choices": NOUNS[:3], "answer": i % 3}
        for i in range(20)
    ]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    # As large as BERT's vocabulary, as the README has one of its token ids.
    tokenizer = train_tokenizer(stories, 120, folder / "cache")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
    )
    for name in ("path/to/bert", "path/to/model"):
        transformers.BertForMaskedLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def here(files, tmp_path, monkeypatch) -> Path:
    """A folder of the test's own with those files, where it works."""
    for path in files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    # Vocabularies of the same text are trained once.
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return tmp_path


# --- Python ---------------------------------------------------------------------------------------


def given(page: str, files: Path) -> dict[str, Any]:
    """What the blocks of a page take for granted."""
    from fastplm import models
    from fastplm.train.presets import configuration

    generator = torch.Generator().manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(files / "path/to/bert")
    if page == "README.md":
        return {
            "hidden": torch.randn(6, 16, generator=generator, requires_grad=True),
            "embedding": torch.randn(40, 16, generator=generator, requires_grad=True),
            "targets": torch.tensor([3, -100, 39, -100, 0, 7]),
            "bias": torch.zeros(40),
        }
    if page == "docs/quickstart.md":
        return {
            "ids": torch.randint(5, 1000, (2, 64), generator=generator),
            "table": torch.randn(1000, 16, generator=generator, requires_grad=True),
            "bias": torch.zeros(1000),
        }
    if page == "docs/models.md":
        return {"model": transformers.BertModel.from_pretrained(files / "path/to/bert")}
    if page == "docs/corruption.md":
        return {"tokenizer": tokenizer, "dataset": []}
    if page == "docs/pretraining.md":
        texts = [sentence(i) for i in range(60)]
        pieces = train_tokenizer(texts, 400, files / "cache", "unigram")
        ids = torch.randint(5, 100, (2, 32), generator=generator)
        joint = configuration("electra-tiny", vocab_size=100)
        return {
            "tokenizer": pieces,
            "dataset": [pieces(text) | {"sample_index": i} for i, text in enumerate(texts[:4])],
            "model": models.T5ForConditionalGeneration(
                configuration("t5-tiny", vocab_size=len(pieces), tokenizer=pieces)
            ),
            "electra": models.ElectraForJointPreTraining(joint),
            "vocab_size": 100,
            "mask_token_id": 4,
            "ids": ids,
            "mask": torch.ones_like(ids),
            "maskable": ids > 10,
            "sample_index": torch.arange(2),
        }
    return {}


@pytest.mark.parametrize("page", sorted({b.page for b in BLOCKS if b.language == "python"}))
def test_python_of_a_page(page, files, here):
    namespace = given(page, files)
    for block in BLOCKS:
        if (block.page, block.language) == (page, "python"):
            # As many lines before it as on the page, so that a traceback names the page's.
            exec(compile("\n" * block.line + block.code, page, "exec"), namespace)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "pycon"], ids=str)
def test_console_of_a_page(block):
    test = doctest.DocTestParser().get_doctest(block.code, {}, str(block), block.page, block.line)
    assert run_doctest(test) > 0


# --- the shell ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=str)
def test_commands_of_a_block(block, here, capsys):
    """One after another in one folder: a later one may take what an earlier one made."""
    for words in commands(block.code):
        rest = CHECKS[words[0]](words)
        if rest:
            assert cli.main(rest) == 0, f"{' '.join(words)}: {capsys.readouterr().err}"


def test_commands_in_prose():
    """They are not run, but what they name must be there."""
    found = 0
    for page in PAGES:
        for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose(page)):
            words = match[1].split()
            if len(words) > 1 and words[0] in CHECKS:
                CHECKS[words[0]](words)
                found += 1
    assert found > 10


def check_fastplm(words: list[str]) -> list[str]:
    """What to run in its place: nothing for what takes minutes by its nature."""
    command = words[1]
    options, required = parser_of(command)
    unknown = {word for word in words if word.startswith("--")} - options
    assert not unknown, f"fastplm {command} has no {unknown}"
    if command not in SMALL:
        return words[1:] if command == "info" else []
    if not required <= set(words):
        assert "--help" in words or len(words) < 5, f"{words}: {required - set(words)} missing"
        return []
    small = shlex.split(SMALL[command])
    if "--arch" in words:
        family = words[words.index("--arch") + 1].split("-")[0]
        small += ["--arch", f"{family}-tiny"]
    return [*words[1:], *small]


def parser_of(command: str) -> tuple[set[str], set[str]]:
    """(options, those that are required) of a subcommand."""
    (choices,) = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    actions = choices[command]._actions
    options = {option for action in actions for option in action.option_strings}
    return options, {action.option_strings[0] for action in actions if action.required}


def check_torchrun(words: list[str]) -> list[str]:
    """One process in place of several, which tests of their own run."""
    at = words.index("-m")
    assert words[at + 1] == "fastplm"
    importlib.import_module("torch.distributed.run")
    return check_fastplm(words[at + 1 :])


def check_make(words: list[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text()
    for word in words[1:]:
        name = word.split("=")[0]
        pattern = rf"^{name} \??:?=" if "=" in word else rf"^{name}:"
        assert re.search(pattern, makefile, re.MULTILINE), f"Makefile has no {word}"
    return []


def check_pytest(words: list[str]) -> list[str]:
    known = (ROOT / "benchmarks" / "conftest.py").read_text()
    for word in words[1:]:
        if "/" in word:
            assert (ROOT / word).exists(), word
        elif word.startswith("--"):
            assert word == "--benchmark-only" or f'"{word}"' in known, f"pytest has no {word}"
    return []


def check_python(words: list[str]) -> list[str]:
    if words[1] == "-m":
        if words[2] == "fastplm":
            return check_fastplm(words[2:])
        found = importlib.util.find_spec(words[2])
        assert found, words[2]
        script = Path(found.origin)
    else:
        script = ROOT / words[1]
    source = script.read_text()
    for word in words[2:]:
        if word.startswith("--"):
            assert f'"{word}"' in source, f"{script} has no {word}"
    return []


def check_pip(words: list[str]) -> list[str]:
    assert words[1] == "install"
    if sys.version_info >= (3, 11):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in words[2:]:
            for extra in re.findall(r"\[(\w+)\]", word):
                assert extra in project["optional-dependencies"], word
    return []


#: The rule of a command: it checks the words, and returns what the command line is to run of them.
CHECKS: dict[str, Callable[[list[str]], list[str]]] = {
    "fastplm": check_fastplm,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "torchrun": check_torchrun,
}


def test_the_checks_refuse():
    for wrong in (
        "make nothing",
        "make gpu-report PITHON=python3",
        "pytest benchmarks/test_nothing.py",
        "pytest benchmarks/ --no-such-option",
        "python benchmarks/nothing.py",
        "python benchmarks/harness.py bert --no-such-option",
        "fastplm pretrain --no-such-option",
        "fastplm pretrain --arch bert-tiny --corpus wiki.txt --steps 3",
    ):
        words = wrong.split()
        with pytest.raises((AssertionError, OSError)):
            CHECKS[words[0]](words)


# --- docstrings -----------------------------------------------------------------------------------


def examples() -> list[Any]:
    found = []
    for path in sorted((ROOT / "fastplm").rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found.append(pytest.param(name, id=name))
    return found


@pytest.mark.parametrize("module", examples())
def test_examples_of_docstrings(module, here):
    names = {"fastplm": fastplm, "ops": ops, "torch": torch}
    tests = doctest.DocTestFinder().find(importlib.import_module(module), extraglobs=names)
    assert sum(run_doctest(test) for test in tests if test.examples) > 0


def run_doctest(test: doctest.DocTest) -> int:
    """How many examples it has, all of which hold."""
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    result = runner.run(copy.copy(test), out=said.append)
    assert result.failed == 0, "".join(said)
    return result.attempted


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_has_an_example(op):
    assert ">>> " in getattr(ops, op).__doc__
