"""Comments and docstrings are sentences with a subject: the first word of each is looked at.

- "Of", "But", "Whose" and "Which" begin no sentence; "Which" and "Whose" may begin a question.
  "Of several, the best counts." is written "The best of several counts."
- "That" and "Those" begin a sentence only before one of ``VERBS``, as its subject ("That costs a
  load."). Before a noun, write "This" or "These"; before "of" or a clause, write the noun itself.

A sentence begins with a capital letter, at the start of a paragraph or after one of ``. ! ? : ;``.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("fastplm", "triton_kernels", "tools", "benchmarks", "tests", "csrc")
#: Sentences inside kernels that wait until the kernel changes: ``tools/compile_kernels.py`` hashes
#: a kernel's text, comments included, to find the rows of a table that are out of date.
IN_KERNELS = (
    "triton_kernels/attention/backward.py: But a thread draws the dropout bits",
    "triton_kernels/attention/tiles.py: Of bytes, a thread loads one",
    "triton_kernels/gather_rows.py: Of all slots of a row, one gets the rank",
)
#: Verbs that "That" or "Those" may stand before.
VERBS = """
    are can could costs did do does gives had has have holds is keeps leaves made makes may means
    might must need needs saves takes took was were will would
""".split()

#: Where a sentence ends: before a capital letter, an empty line or an item of a list.
BREAK = re.compile(r"[.!?:;][)\"'`]*\s+(?=\(?[A-Z])|\n\n+(?:[-*] )?|\n[-*] ")
WITHOUT_SUBJECT = re.compile(
    rf"""\(?(
        (Of|But)\b
        | (Whose|Which)\b (?! .* \?[)"'`]*$)
        | (That|Those)\b (?! \s ({"|".join(VERBS)})\b)
    )""",
    re.VERBOSE,
)
#: A comment of C++, and what stands before it in its line.
SLASHES = re.compile(r"^(?P<before>|.*?[\s;{})])//+(?P<text>.*)")

#: Lines of text that follow each other, each with its number.
Lines = list[tuple[int, str]]


def comment_blocks(comments: Iterator[tuple[int, bool, str]]) -> Iterator[Lines]:
    """Comments on lines of their own that follow each other are one block.

    Args:
        comments: number of the line, whether nothing stands before the comment, and its text.
    """
    block: Lines = []
    grows = False  # whether the next line may belong to the block
    for number, alone, text in comments:
        if block and not (grows and alone and number == block[-1][0] + 1):
            yield block
            block = []
        block.append((number, text))
        grows = alone
    if block:
        yield block


def python_blocks(source: str) -> Iterator[Lines]:
    """The docstrings of a Python file, then its comments."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text = node.body[0].value  # type: ignore[attr-defined]
            yield list(enumerate(text.value.splitlines(), text.lineno))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from comment_blocks(
        (token.start[0], not token.line[: token.start[1]].strip(), token.string.lstrip("#:"))
        for token in tokens
        if token.type == tokenize.COMMENT
    )


def cpp_blocks(source: str) -> Iterator[Lines]:
    found = ((n, SLASHES.match(line)) for n, line in enumerate(source.splitlines(), 1))
    yield from comment_blocks((n, not m["before"].strip(), m["text"]) for n, m in found if m)


BLOCKS = {".py": python_blocks} | dict.fromkeys((".h", ".cpp", ".cu", ".cuh"), cpp_blocks)


def sentences(block: Lines) -> Iterator[tuple[int, str]]:
    """The sentences of a block, each with the number of its first line."""
    text, starts = "", {}
    for number, line in block:
        starts[len(text)] = number
        text += line.strip() + "\n"
    ends = [found.end() for found in BREAK.finditer(text)]
    for begin, end in zip([0, *ends], [*ends, len(text)], strict=True):
        number = max(number for start, number in starts.items() if start <= begin)
        yield number, " ".join(text[begin:end].split())


def findings(source: str, suffix: str) -> list[tuple[int, str]]:
    """Line and text of each sentence without a subject."""
    every = (sentence for block in BLOCKS[suffix](source) for sentence in sentences(block))
    return sorted((n, text) for n, text in every if WITHOUT_SUBJECT.match(text))


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_sentence_has_a_subject(folder):
    found, waiting = [], {entry for entry in IN_KERNELS if entry.startswith(f"{folder}/")}
    for path in sorted((ROOT / folder).rglob("*")):
        for number, text in (
            findings(path.read_text(), path.suffix) if path.suffix in BLOCKS else ()
        ):
            place = path.relative_to(ROOT)
            known = {entry for entry in waiting if f"{place}: {text}".startswith(entry)}
            waiting -= known
            found += [] if known else [f"{place}:{number}: {text}"]
    assert not found, "\n".join(["sentences without a subject:", *found])
    assert not waiting, f"no longer there, remove from IN_KERNELS: {waiting}"


BAD = (
    "Of one side in a round.",
    "Of several, the best counts.",
    "But the last row is kept.",
    "That of the largest.",
    "That a step needs.",
    "Those that all kernels share.",
    "Those rows are left out.",
    "Which rows count, in which order.",
    "Whose turn it is.",
    "(Of no use here.)",
)
GOOD = (
    "The best of several counts.",
    "That costs a load. Those are left out.",
    "Which rows count? Whose turn is it?",
    "``Which`` is a name.",
    "Official, thatched, butter: whichever.",
    "Rows [N] of the batch, but not the last; of these, that which is read.",
)
PLACES = {
    "comment": (".py", 'x = "#"\n# {}\n', 2),
    "documented name": (".py", "#: {}\nx = 1\n", 1),
    "end of a line": (".py", "# One row.\nx = 1  # {}\n# two\n", 2),
    "docstring": (".py", 'def f():\n    """{}"""\n', 2),
    "second sentence": (".py", "# The rows are read\n# here: now. {}\n", 2),
    "next line": (".py", "# The rows are read.\n# {}\n", 2),
    "paragraph": (".py", '"""Rows\n\n{}\n"""\n', 3),
    "item": (".py", "# Rows:\n# - the first\n# - {}\n", 3),
    "argument": (".py", 'class C:\n    """Rows.\n\n    Args:\n        n: {}\n    """\n', 5),
    "C++": (".cpp", "int x;  // one\n// {}\n", 2),
    "end of a line of C++": (".cu", "f(x);  // {}\n", 1),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bad", BAD)
def test_a_sentence_without_a_subject_is_found(bad, place):
    suffix, source, line = PLACES[place]
    assert findings(source.format(bad), suffix) == [(line, bad)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("good", GOOD)
def test_a_sentence_with_a_subject_is_not(good, place):
    suffix, source, _ = PLACES[place]
    assert findings(source.format(good), suffix) == []


def test_a_sentence_over_two_lines_and_a_string():
    assert findings("# Of rows\n# that follow\n", ".py") == [(1, "Of rows that follow")]
    assert findings('x = "Of rows"\ny = "# But"\nf("//x")  # That is: fine\n', ".py") == []
    assert findings('f("https://But.org");\n', ".cpp") == []
