"""In how many places each argument of each op is written: ``python tools/count_places.py [OP …]``.

A place is one of

- a parameter of a function, or a field of a class, with the argument's name;
- a keyword of a call (``name=…``), which hands it on;
- an entry of a docstring's ``Args``.

Counted are the files of the op's own stem: the public function and its call, the reference, the
launchers and kernels in Triton, and csrc/ (there a parameter or member is any line with a type
before the name). Tests and benchmarks, which use the public function, are counted with ``--tests``.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import fastplm.ops  # noqa: E402
from fastplm._registry import OPS  # noqa: E402


def files_of(op: str, tests: bool = False) -> list[Path]:
    """The files whose stem, or whose folder's, is the name of an op."""
    patterns = (
        *(f"fastplm/ops/{op}.py", f"fastplm/ops/_{op}_*.py", f"fastplm/reference/{op}.py"),
        *(f"triton_kernels/{op}.py", f"triton_kernels/{op}/*.py", f"csrc/*/{op}.*"),
        *((f"tests/ops/test_{op}.py", f"benchmarks/test_{op}.py") if tests else ()),
    )
    found = {path for pattern in patterns for path in ROOT.glob(pattern)}
    longer = [other for other in OPS if other.startswith(f"{op}_")]  # "linear" has those of others
    return sorted(path for path in found if not any(other in path.name for other in longer))


def places(path: Path) -> Counter[str]:
    """How often each name is written in a place of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        code = re.sub(r"//.*", "", text)
        return Counter(re.findall(r"\b[\w:<>]+[&*]?\s+[&*]?(\w+)\s*(?=[,);=])", code))
    found: Counter[str] = Counter()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            given = node.args
            for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                found[argument.arg] += 1
            found.update(documented(ast.get_docstring(node) or ""))
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    found[line.target.id] += 1
            found.update(documented(ast.get_docstring(node) or ""))
        elif isinstance(node, ast.Call) and not ast.unparse(node.func).startswith("tl."):
            found.update(keyword.arg for keyword in node.keywords if keyword.arg)
    return found


def documented(doc: str) -> list[str]:
    """The names that the ``Args`` of a docstring explain."""
    section = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", doc, re.M | re.S)
    names = re.findall(r"^    ([\w, ]+):", section[1], re.M) if section else []
    return [name.strip() for line in names for name in line.split(",")]


def counts(op: str, tests: bool = False) -> dict[str, int]:
    """The places of each argument of an op's public function."""
    function = getattr(fastplm.ops, op)
    found: Counter[str] = sum((places(path) for path in files_of(op, tests)), Counter())
    return {name: found[name] for name in inspect.signature(function).parameters}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*", metavar="OP", help="default: all")
    parser.add_argument("--tests", action="store_true", help="tests and benchmarks, too")
    options = parser.parse_args()
    print("| op | arguments | places: median | most | of |\n|---|---|---|---|---|")
    for op in options.ops or sorted(OPS):
        found = counts(op, options.tests)
        middle = sorted(found.values())[len(found) // 2]
        most = max(found, key=lambda name: found[name])
        print(f"| {op} | {len(found)} | {middle} | {found[most]} | {most} |")
        if options.ops:
            for name, count in sorted(found.items(), key=lambda item: -item[1]):
                print(f"  {name}: {count}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
