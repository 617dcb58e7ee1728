"""The code that made a cell: a hash of what fastplm runs, docstrings and comments left out."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

import fastplm

_ROOT = Path(fastplm.__file__).parent
#: What only shows or plans, and changes no figure of a run.
_ASIDE = ("study", "triton_kernels")


@functools.cache
def digest() -> str:
    """The hash of the code of the library: another one says that it is another code, not that
    results are others."""
    whole = hashlib.blake2b(digest_size=8)
    for path in sorted(_ROOT.rglob("*.py")):
        if path.relative_to(_ROOT).parts[0] not in _ASIDE:
            whole.update(meaning(path.read_text("utf-8")).encode())
    return whole.hexdigest()


def meaning(source: str) -> str:
    """A text of what a module does, which its comments and docstrings do not change."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)
