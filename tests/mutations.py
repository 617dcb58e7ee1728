"""Plants bugs, one at a time, and names the test that catches each: ``python tests/mutations.py``.

The tree is copied to a scratch folder, so that nothing here changes. First every selection of tests
must pass there without a bug. ``--csrc`` plants the bugs of csrc/, which need a new build of the
extension. Bugs of one group share a build, as different selections test them.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    file: str
    old: str
    new: str
    tests: str  # pytest's arguments; with `-m slow` among them, slow tests
    group: int = 0  # bugs of csrc/ in one group share a build
    level: str = ""  # of vector instructions, where other levels have no such bug


_SELECTION = re.compile(r"(?:\[(?P<group>\d)(?: (?P<level>\w+))?\] )?(?P<tests>tests/.*)")


def read(path: Path) -> list[Mutation]:
    """The bugs of a file as planted_bugs.txt."""
    found, file, tests = [], "", {}
    text: dict[str, list[str]] = {"-": [], "+": []}
    for line in (*path.read_text().splitlines(), ""):
        if line[:1] in ("-", "+"):
            text[line[0]].append(line[2:])
        elif text["-"]:
            old, new = ("\n".join(text[sign]) for sign in "-+")
            found.append(Mutation(file, old, new, **tests))
            text = {"-": [], "+": []}
        if line.startswith("== "):
            file = line[3:]
        elif match := _SELECTION.fullmatch(line):
            group, level = int(match["group"] or 0), match["level"] or ""
            tests = {"tests": match["tests"], "group": group, "level": level}
    return found


MUTATIONS = read(Path(__file__).with_name("planted_bugs.txt"))


def scratch_copy(folder: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    )
    built = [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "fastplm").glob("_C*")]
    for name in (*listed.stdout.split("\n"), *built):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    # An installation has the kernels there. Python searches the working directory first.
    (folder / "fastplm" / "triton_kernels").symlink_to("../triton_kernels")


def run_tests(folder: Path, tests: str, level: str = "") -> str:
    """The first test that fails, or nothing."""
    command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider"
    command += f" -m 'not gpu and not slow' {tests}"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"ATEN_CPU_CAPABILITY": level} if level else {}
    found = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    if found.returncode == 0:
        return ""
    if found.returncode >= 128:  # killed by a signal
        crashed = re.search(r"tests/\S+, line \d+ in test_\w+", found.stderr.replace('"', ""))
        return f"a crash: {crashed[0] if crashed else 'somewhere'}"
    if "ImportError while loading conftest" in found.stderr + found.stdout:
        return "an error at import"
    if found.returncode not in (1, 2):
        raise SystemExit(f"{command}\n{found.stdout}{found.stderr}")
    failed = re.search(r"^(?:FAILED|ERROR) ([^\n]*?)(?: - |$)", found.stdout, re.M)
    return failed[1] if failed else "an error at collection"


def plant(folder: Path, mutation: Mutation) -> None:
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise SystemExit(f"{mutation.file}: {mutation.old!r} is there {text.count(mutation.old)}x")
    path.write_text(text.replace(mutation.old, mutation.new))


def restore(folder: Path, mutation: Mutation) -> None:
    shutil.copy2(REPOSITORY / mutation.file, folder / mutation.file)


def build(folder: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=folder, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csrc", action="store_true", help="those of csrc/, which are built")
    parser.add_argument("--only", default="", help="those whose file has this in its name")
    arguments = parser.parse_args()
    chosen = [m for m in MUTATIONS if bool(m.group) == arguments.csrc and arguments.only in m.file]
    survived = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scratch_copy(folder)
        for tests in sorted({mutation.tests for mutation in chosen}):
            if failed := run_tests(folder, tests):
                raise SystemExit(f"{failed} fails with no bug planted")
        for group in sorted({mutation.group for mutation in chosen}):
            together = [mutation for mutation in chosen if mutation.group == group]
            if group:
                for mutation in together:
                    plant(folder, mutation)
                build(folder)
            for mutation in together:
                if not group:
                    plant(folder, mutation)
                caught = run_tests(folder, mutation.tests, mutation.level)
                survived += not caught
                line = " ".join(mutation.old.split())
                print(f"{mutation.file}: {line[:60]}\n    {caught or 'SURVIVED'}", flush=True)
                if not group:
                    restore(folder, mutation)
            if group:
                for mutation in together:
                    restore(folder, mutation)
    print(f"{len(chosen) - survived} of {len(chosen)} planted bugs are caught")
    return int(survived > 0)


if __name__ == "__main__":
    raise SystemExit(main())
