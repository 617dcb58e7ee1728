"""upstream/: each patch applies to the releases that it names, and its test fails without it.

A test runs in a process of its own, which imports the patched files from a folder of links to the
installed package: nothing that is installed changes. A patch whose project is not installed, or in
another version, is skipped. docs/dev/upstream.md says how to bring another version in.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "upstream"
PAGE = ROOT / "docs/dev/upstream.md"


class Patch(NamedTuple):
    path: Path
    project: str
    versions: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def test(self) -> Path:
        return self.path.with_name(f"test_{self.path.stem.replace('-', '_')}.py")


def read(path: Path) -> Patch:
    """A patch, by the line ``Versions: project 1.0 1.1`` above it and the files that it names."""
    text = path.read_text()
    project, *versions = re.findall(r"^Versions: (.+)$", text, re.MULTILINE)[0].split()
    files = re.findall(r"^\+\+\+ b/(\S+)", text, re.MULTILINE)
    return Patch(path, project, tuple(versions), tuple(files))


PATCHES = [read(path) for path in sorted(FOLDER.glob("*.patch"))]
every_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.path.stem)


def links(source: Path, target: Path, files: list[Path]) -> None:
    """``target`` is like ``source`` by links, but ``files`` and the folders above are copies."""
    target.mkdir()
    own = {file.parts[0] for file in files}
    for entry in source.iterdir():
        if entry.name not in own:
            (target / entry.name).symlink_to(entry)
    for name in own:
        if (source / name).is_dir():
            below = [Path(*file.parts[1:]) for file in files if file.parts[0] == name]
            links(source / name, target / name, below)
        else:
            (target / name).write_bytes((source / name).read_bytes())


@pytest.fixture
def copy(patch: Patch, tmp_path: Path) -> Path:
    """A folder with the project's package, in which the files of the patch may be changed."""
    try:
        found = metadata.distribution(patch.project)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{patch.project} is not installed")
    version = found.version.split("+")[0]  # torch's builds are 2.13.0+cpu and the like
    if version not in patch.versions:
        pytest.skip(f"for {patch.project} {', '.join(patch.versions)}, not {version}")
    (package,) = {Path(file).parts[0] for file in patch.files}
    files = [Path(*Path(file).parts[1:]) for file in patch.files]
    links(Path(str(found.locate_file(package))), tmp_path / package, files)
    return tmp_path


def apply(patch: Patch, folder: Path) -> None:
    # Within a checkout git would leave out what is not below it.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", str(patch.path)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(patch: Patch, folder: Path) -> subprocess.CompletedProcess[str]:
    """The test of a patch, with the package in ``folder`` and no settings of this project."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "TRITON"))}
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Compiled files are linked, too: none is written.
    environment |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    test = folder / patch.test.name
    test.write_text(patch.test.read_text())
    options = ["-q", "-c", os.devnull, "--rootdir", str(folder), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(test)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@every_patch
def test_a_patch_applies(patch, copy):
    before = {file: (copy / file).read_text() for file in patch.files}
    apply(patch, copy)
    for file in patch.files:
        assert (copy / file).read_text() != before[file]
        compile((copy / file).read_text(), file, "exec")


@pytest.mark.slow
@every_patch
def test_its_test_fails_without_it_and_passes_with_it(patch, copy):
    before = run(patch, copy)
    if before.returncode == 0 and " passed" not in before.stdout:
        pytest.skip(f"nothing to see on this machine: {before.stdout.splitlines()[-1]}")
    # 1: tests failed. An error of an import or of the test file itself is 2.
    assert before.returncode == 1 and "AssertionError" in before.stdout, before.stdout[-4000:]
    apply(patch, copy)
    after = run(patch, copy)
    assert after.returncode == 0 and " passed" in after.stdout, after.stdout[-4000:]


@every_patch
def test_a_patch_is_whole(patch):
    """It has a test that needs nothing of this project, three lines of context, and its row."""
    text = patch.path.read_text()
    assert patch.test.exists() and "fastplm" not in patch.test.read_text() + text
    for hunk in re.split(r"^@@ .*\n", text.split("\n---\n")[1], flags=re.MULTILINE)[1:]:
        lines = [line for line in hunk.splitlines() if not line.startswith(("---", "+++"))]
        changed = [i for i, line in enumerate(lines) if line[0] in "+-"]
        assert changed[0] <= 3 and len(lines) - 1 - changed[-1] <= 3
    rows = [row for row in PAGE.read_text().splitlines() if f"`{patch.path.name}`" in row]
    assert len(rows) == 1 and f"{patch.project} {', '.join(patch.versions)}" in rows[0]
    assert f"`{patch.test.name}`" in rows[0]
