"""Every command of README.md and docs/ runs, with its own words and options that make it short.

- ``fastplm …`` runs in this process, for two steps of a tiny model (``SMALL``). The commands of a
  block run in one folder with the files that the pages name. ``torchrun`` runs as one process, and
  in the slow lane as two instead of eight.
- Other commands run in a copy of this checkout (``tree``), one copy for each block, and must write
  or print what their page promises. Arguments and environment variables that users have, too, make
  them short (``CUTS``): one case of a benchmark, one round, the smallest vocabulary. The copy's
  .venv is this Python, with the Makefile's stamps set, and pip has no index, so nothing is fetched.
  Triton's compiler gets one kernel file alone. No command gets a GPU, where cases have other names.
  Commands that take longer than some seconds are in the slow lane.

Before a command runs, the targets, files, modules and options that it names must exist. Commands
within a sentence are only checked so. A command, or a block's language, without a rule fails.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pages import BLOCKS, PAGES, ROOT, Block, commands, prose

import fastplm
from fastplm import cli

if sys.version_info >= (3, 11):
    import tomllib

#: Arguments that make ``fastplm`` short; the last value of an argument counts.
SMALL = {
    "pretrain": "--steps 2 --batch-size 2 --block-size 32 --vocab-size 400 --precision fp32",
    "finetune": "--epochs 1 --batch-size 2 --max-samples 4 --max-eval-samples 2 --seeds 1"
    " --max-length 64",
    "classic": "--steps 2 --batch-size 4 --hidden 16 --embedding 8",
    "classic --system word2vec": "--steps 2 --hidden 16",
    "embed": "--batch-tokens 512",
    "prompt": "--max-samples 4",
    "score": "--threads 1",
    "study": "--dry-run",
    "distill": "--steps 2 --batch-size 2 --block-size 32 --precision fp32",
}


@dataclass(frozen=True)
class Cut:
    """How to make another command short, and the results that it promises.

    Args:
        arguments: arguments added behind its own.
        variables: environment variables.
        leaves: files that it writes.
        says: a pattern of its output.
        judges: it may exit with 1 for a bad speed, which so few rounds cannot tell.
        slow: whether it takes longer than some seconds.
    """

    arguments: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    leaves: tuple[str, ...] = ()
    says: str = ""
    judges: bool = False
    slow: bool = False


#: The cheapest of all benchmarks.
ONE_OP = {"PYTEST_ADDOPTS": "-k test_mask_tokens"}
ITS_TABLE = r"mask_tokens +BERT-base 32x128 +forward +fastplm +\d"
RESULTS = "benchmarks/results"
ONE_PIECE_OF_THE_REPORT = "--only mask_tokens"
#: The cuts by a command's first words; the longest match counts.
CUTS = {
    "make bench": Cut(
        variables=ONE_OP,
        leaves=(
            f"{RESULTS}/cpu/mask_tokens.csv",
            *(f"docs/images/{name}-cpu.png" for name in ("speed", "padding", "memory")),
        ),
        slow=True,
    ),
    "make gpu-report": Cut(
        f"ARGS='{ONE_PIECE_OF_THE_REPORT}'",
        leaves=tuple(f"{RESULTS}/cpu/{name}" for name in ("mask_tokens.csv", "report.md")),
        slow=True,
    ),
    "pip install sacrebleu": Cut("--dry-run", says="already satisfied: sacrebleu "),
    "pip install gensim": Cut("--dry-run", says="already satisfied: gensim "),
    "pip install torch": Cut("--dry-run", says="already satisfied: torch "),
    "pip install -v --no-build-isolation .": Cut(
        "--no-deps --target out/site",
        leaves=(
            "out/site/fastplm/_C.abi3.so",
            "out/site/fastplm/triton_kernels/attention/launch.py",
        ),
        says=r"\[\d+/\d+\] .*/csrc/attention/attention\.cpp ",
        slow=True,
    ),
    "pip wheel": Cut(
        leaves=(
            f"out/fastplm_torch-{fastplm.__version__}-cp310-abi3-linux_{platform.machine()}.whl",
        ),
        slow=True,
    ),
    "pytest benchmarks/ --benchmark-only": Cut(variables=ONE_OP, says=ITS_TABLE, slow=True),
    "pytest benchmarks/ --benchmark-only --compare": Cut(
        variables=ONE_OP, says=r"(?s)before: main \(\w+\); after: \w.* of \d+ flagged", slow=True
    ),
    "pytest benchmarks/test_attention.py": Cut(
        variables={"PYTEST_ADDOPTS": "-k 64x256-forward"},
        says=r"attention +cross 64x256 +forward +fastplm +\d",
        slow=True,
    ),
    "python benchmarks/compile_cache.py": Cut(
        "gather_rows --jobs 1", says=r"gather_rows: [1-9]\d* kernels, \d+ compiled", slow=True
    ),
    "python benchmarks/compare.py": Cut(
        "--ops mask_tokens --rounds 1 --turns 1",
        says=r"(?s)before: main \(\w+\); after: \w.* of \d+ flagged",
        judges=True,
        slow=True,
    ),
    "python benchmarks/distillation.py": Cut(
        "--seeds 1 --scale 0.01",
        leaves=tuple(f"{RESULTS}/cpu/distillation.{kind}" for kind in ("csv", "md")),
        slow=True,
    ),
    "python benchmarks/finetuning.py": Cut(
        "--seeds 1 --scale 0.01 --tasks choice",
        leaves=tuple(f"{RESULTS}/cpu/finetuning.{kind}" for kind in ("csv", "md")),
        slow=True,
    ),
    "python benchmarks/generation.py": Cut(
        "--arch bart-tiny --batch-size 2 --tokens 2 --rounds 1",
        says=r"(?s)bart-tiny fp32, 2 prompts .*fastplm +\d",
        slow=True,
    ),
    "python benchmarks/gpu_report.py --dry": Cut(says=r"the rest: mask_tokens .*: ok", slow=True),
    "python benchmarks/harness.py bert": Cut(
        "--rounds 1 --only 'padding 50% dropout 0.1 fp32' --quick",
        leaves=("out/rows/cpu/bert.csv",),
        slow=True,
    ),
    "python benchmarks/harness.py linear_cross_entropy": Cut(
        "--rounds 1 --only 'with sample'",
        leaves=("out/rows/cpu/linear_cross_entropy.csv",),
        slow=True,
    ),
    "python benchmarks/host_time.py": Cut(
        "--rounds 2", says=r"gather_rows, forward +\d", slow=True
    ),
    "python benchmarks/host_time.py --layers": Cut(
        "--only bert", says=r"bert-tiny +fastplm +\d", slow=True
    ),
    "python benchmarks/memory.py": Cut("--sizes 1024", leaves=("out/rows/cpu/loss_memory.csv",)),
    "python benchmarks/overhead.py": Cut(
        "--rounds 2", says=r"gather_rows, backward +\d", judges=True
    ),
    "python benchmarks/plots.py": Cut(leaves=("out/images/padding-cpu.png",), slow=True),
    "python benchmarks/static_report.py": Cut(
        leaves=tuple(f"{RESULTS}/static/kernels.{kind}" for kind in ("csv", "md")), slow=True
    ),
    "python benchmarks/static_report.py --check": Cut(says="0 worse, 0 changed", slow=True),
    "python benchmarks/step_report.py": Cut(
        "--arch bert-tiny --shape 4x16 --padding 0 --variant fastplm",
        leaves=(f"{RESULTS}/static/steps.csv", "docs/step-model.md"),
        slow=True,
    ),
}


def cut_of(words: list[str]) -> Cut | None:
    found = [start for start in CUTS if " ".join(words).startswith(start)]
    return CUTS[max(found, key=len)] if found else None


SHELL = [block for block in BLOCKS if block.language == "sh"]
#: The commands that run in this process.
OURS = ("fastplm", "torchrun")


def ours(block: Block) -> list[list[str]]:
    return [words for words in commands(block.code) if words[0] in OURS]


def others() -> list[Any]:
    """The parameters of a test: the other commands of each block that belong to one lane.

    A command on several pages runs for the first page alone.
    """
    known: list[list[str]] = []
    found = []
    for block in SHELL:
        lanes: dict[bool, list[list[str]]] = {}
        for words in commands(block.code):
            if words[0] not in OURS and words not in known:
                known.append(words)
                cut = cut_of(words)
                lanes.setdefault(bool(cut and cut.slow), []).append(words)
        for slow, lines in lanes.items():
            marks, name = ([pytest.mark.slow], f"{block}, slow") if slow else ([], str(block))
            found.append(pytest.param(lines, id=name, marks=marks))
    return found


def test_every_block_has_a_language_with_a_rule():
    """A fenced block may not be indented: it would be shown as code, and never run."""
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


# --- what a page's line runs as -------------------------------------------------------------------

#: The commands of an environment with fastplm, as Python code: scripts may not be installed.
SCRIPTS = {
    "python": "",
    "python3": "",
    "pip": "-m pip",
    "pytest": "-m pytest",
    "torchrun": "-m torch.distributed.run",
}


@pytest.fixture
def tree(files, here) -> Path:
    """A copy of this checkout, with csrc/ as built but no other ignored file; a commit on main."""
    tree = here / "tree"
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", *ignored))
    for arguments in ("init --quiet --initial-branch main", "add .", "commit --quiet -m copy"):
        settings = ("user.name=t", "user.email=t@example.invalid", f"core.hooksPath={os.devnull}")
        options = [word for setting in settings for word in ("-c", setting)]
        subprocess.run(["git", *options, *arguments.split()], cwd=tree, check=True)
    for path in (ROOT / "fastplm").glob("_C.*"):
        shutil.copy(path, tree / "fastplm")
    for path in files.iterdir():
        (tree / path.name).symlink_to(path)
    programs = tree / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, module in SCRIPTS.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {module} "$@"\n')
        program.chmod(0o755)
    for stamp in ("base", "docs", "peers", "test"):  # those of `make test` and `make bench`
        (tree / ".venv" / f".{stamp}").touch()
    # The package as an installation has it, with the smallest kernel file alone.
    package = here / "site" / "fastplm"
    (package / "triton_kernels").mkdir(parents=True)
    for path in (tree / "fastplm").iterdir():
        (package / path.name).symlink_to(path)
    for path in (*(tree / "triton_kernels").glob("_*.py"), tree / "triton_kernels/gather_rows.py"):
        (package / "triton_kernels" / path.name).symlink_to(path)
    return tree


#: Variables of this run of tests, and of the `make` that started it.
OUTER = ("MAKE", "MFLAGS", "PYTEST", "TRITON")


def run(words: list[str], cut: Cut, tree: Path) -> None:
    """Runs a command with ``tree/.venv`` as the active environment, without network and GPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OUTER)}
    changed = {
        "PATH": f"{tree / '.venv' / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(tree.parent / "site"),
        "PIP_NO_INDEX": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = [*words, *shlex.split(cut.arguments)]
    started = time.time()
    done = subprocess.run(
        command,
        cwd=tree,
        env=kept | changed | cut.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = f"{shlex.join(command)}: exit status {done.returncode}\n{done.stdout[-4000:]}"
    assert done.returncode in ((0, 1) if cut.judges else (0,)), said
    assert re.search(cut.says, done.stdout), said
    for name in cut.leaves:
        # A file's time may be coarser than the clock.
        written = (tree / name).exists() and (tree / name).stat().st_mtime > started - 1
        assert written, f"no {name} of {said}"


# --- the commands ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("block", [block for block in SHELL if ours(block)], ids=str)
def test_fastplm_of_a_block(block, here, capsys):
    """The commands of a block run in one folder, as a later one may use an earlier one's files."""
    for words in ours(block):
        arguments = CHECKS[words[0]](words)
        if arguments:
            assert cli.main(arguments) == 0, f"{' '.join(words)}: {capsys.readouterr().err}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [w for block in SHELL for w in ours(block) if w[0] == "torchrun"], ids=" ".join
)
def test_torchrun_as_two_processes(words, tree):
    own = [*words[: words.index("-m")], "--standalone", "--nproc-per-node", "2"]
    arguments = [*own, "-m", "fastplm", *check_torchrun(words)]
    out = words[words.index("--out") + 1]
    run(arguments, Cut(leaves=(f"{out}/model/config.json",)), tree)
    assert json.loads((tree / out / "metrics.json").read_text())["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("lines", others())
def test_others_of_a_block(lines, tree):
    for words in lines:
        CHECKS[words[0]](words)
        cut = cut_of(words)
        assert cut, f"{' '.join(words)}: CUTS does not say how it is cut down"
        if words[1] == "benchmarks/plots.py":
            give_all_shares_of_padding(tree / "out/rows/cpu/bert.csv")
        run(words, cut, tree)


def give_all_shares_of_padding(rows: Path) -> None:
    """The picture needs three points or more, but the command before is cut to one."""
    head, *lines = rows.read_text().splitlines(keepends=True)
    shares = ("0%", "30%", "50%")
    rows.write_text(head + "".join(li.replace("50%", share) for share in shares for li in lines))


def test_every_cut_is_of_a_command():
    used = [cut_of(words) for block in SHELL for words in commands(block.code)]
    assert all(cut in used for cut in CUTS.values())


def test_commands_in_prose():
    """Commands in a sentence are not run, but the things that they name must exist."""
    found = 0
    for page in PAGES:
        for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose(page)):
            words = match[1].split()
            if len(words) > 1 and words[0] in CHECKS:
                CHECKS[words[0]](words)
                found += 1
    assert found > 10


def check_fastplm(words: list[str]) -> list[str]:
    """The command to run instead; none if it cannot be shorter than minutes."""
    command = words[1]
    options, required = parser_of(command)
    unknown = {word for word in words if word.startswith("--")} - options
    assert not unknown, f"fastplm {command} has no {unknown}"
    if command not in SMALL:
        return words[1:] if command == "info" else []
    if not required <= set(words):
        if "--config" in words:  # has the others
            return []
        assert "--help" in words or len(words) < 5, f"{words}: {required - set(words)} missing"
        return []
    small = shlex.split(SMALL.get(" ".join(words[1:4]), SMALL[command]))
    if "--arch" in words:
        family = words[words.index("--arch") + 1].split("-")[0]
        small += ["--arch", f"{family}-tiny"]
    if "--start-from" in words:  # whose vocabulary is that of the checkpoint
        at = small.index("--vocab-size")
        del small[at : at + 2]
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
    named = [action for action in actions if action.required and action.option_strings]
    return options, {action.option_strings[0] for action in named}


def check_torchrun(words: list[str]) -> list[str]:
    """The command line for one process instead of several, which other tests run."""
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
    assert words[1] in ("install", "wheel")
    if sys.version_info >= (3, 11):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in words[2:]:
            for extra in re.findall(r"\[(\w+)\]", word):
                assert extra in project["optional-dependencies"], word
    return []


#: The rule of a command: it checks the words, and returns the command line to run.
CHECKS: dict[str, Callable[[list[str]], list[str]]] = {
    "fastplm": check_fastplm,
    "make": check_make,
    "pip": check_pip,
    "pytest": check_pytest,
    "python": check_python,
    "torchrun": check_torchrun,
}
