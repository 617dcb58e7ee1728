"""Which tests ``make test`` runs: of those of ``make test-all`` what a change most often breaks.

``pytest --part quick`` chooses every test that a planted bug names (``planted_bugs.txt``), and of
each other test function the case in the middle of its parameters. It leaves out ``THOROUGH``: what
takes seconds, and is put together of parts that other tests have. ``--part rest`` chooses the rest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

from .mutations import MUTATIONS

#: Files, or functions of a file: how their names begin.
THOROUGH = (
    "tests/benchmarks/test_gpu_report.py",
    "tests/benchmarks/test_peers_cpu.py",
    "tests/benchmarks/test_plots.py::test_the_committed_rows",
    "tests/benchmarks/test_serving.py",
    "tests/compile/test_compile_cache.py",
    "tests/compile/test_csrc.py::test_kernels_compile",
    "tests/compile/test_csrc_asan.py",
    "tests/compile/test_hazards.py::test_what_",
    "tests/compile/test_kernels_on_threads.py",
    "tests/compile/test_static_report.py::test_no_kernel",
    "tests/compile/test_static_report.py::test_the_machine_code",
    "tests/compile/test_triton.py::test_a_thread_makes",
    "tests/compile/test_triton.py::test_every_kernel",
    "tests/compile/test_triton.py::test_kernels_fit",
    "tests/compile/test_triton.py::test_no_spills",
    "tests/compile/test_triton.py::test_products_in_tf32",
    "tests/data/test_sources.py::test_without_the_library",
    "tests/docs/test_site.py",
    "tests/ops/test_linear.py::test_the_ends_of_slices",
    "tests/ops/test_linear_distillation.py::test_compiled",
    "tests/pretrain/test_stream.py::test_killed_and_resumed",
    "tests/run/test_messages.py::test_a_backend_that_is_none",
    "tests/run/test_messages.py::test_an_empty_variable_is_unset",
    "tests/study/test_cell.py::test_a_cell_by_itself",
)


def _named_by_planted_bugs() -> dict[str, list[str]]:
    """By file, the expressions that pytest's ``-k`` has for it; an empty one is the whole file."""
    found: dict[str, list[str]] = {}
    for file, *options in (shlex.split(mutation.tests) for mutation in MUTATIONS):
        if "slow" not in options:
            found.setdefault(file, []).append(options[-1] if options else "")
    return found


def _matches(expression: str, name: str) -> bool:
    """As ``-k`` does: words that the name of a test has, with and, or, not and brackets."""
    words = re.sub(
        r"\b(?!(?:and|or|not)\b)[\w-]+", lambda word: str(word[0].lower() in name), expression
    )
    return not expression or eval(words)


def chosen(names: Iterable[str]) -> set[str]:
    """Those of the names of tests (file::function[case]) that are quick."""
    functions: dict[str, list[str]] = {}
    for name in names:
        functions.setdefault(name.split("[")[0], []).append(name)
    found = {
        cases[len(cases) // 2]
        for function, cases in functions.items()
        if not function.startswith(THOROUGH)
    }
    bugs = _named_by_planted_bugs()
    for function, cases in functions.items():
        for expression in bugs.get(function.split("::")[0], ()):
            found.update(case for case in cases if _matches(expression, case.lower()))
    return found
