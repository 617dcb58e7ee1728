"""What is shipped: the wheel, the source archive, and what an import costs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fastplm

ROOT = Path(__file__).parents[1]
CODE = ("fastplm", "triton_kernels", "benchmarks", "tests", "tools", "examples")
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of what is needed to build, as building writes into the tree."""
    copy = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("fastplm", "triton_kernels", "csrc", "tests", "tools", "benchmarks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    return copy


def build(kind: str, tree: Path, out: Path, **environment: str) -> tuple[Path, str]:
    """Run the build backend as pip does without isolation; the archive, and what was said."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    result = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out)],
        cwd=tree,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    shutil.rmtree(tree / "build", ignore_errors=True)
    (archive,) = out.iterdir()
    return archive, result.stderr


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    """A wheel with one op of csrc/: an installation compiles all, and takes minutes."""
    short = tmp_path_factory.mktemp("short") / "tree"
    shutil.copytree(tree, short)
    for source in (short / "csrc").glob("*.c*"):
        if source.name != "gather_rows.cpp":
            source.unlink()
    return build("build_wheel", short, tmp_path_factory.mktemp("wheel"))[0]


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_wheel_has_one_top_level_package(wheel):
    top = {name.split("/")[0] for name in files(wheel)}
    assert top == {"fastplm", f"fastplm-{fastplm.__version__}.dist-info"}


def test_wheel_holds_every_module_and_nothing_else(wheel):
    modules = {name for name in files(wheel) if name.endswith(".py")}
    sources = {f"fastplm/{path.relative_to(ROOT / 'fastplm')}" for path in python("fastplm")}
    sources |= {f"fastplm/{path.relative_to(ROOT)}" for path in python("triton_kernels")}
    assert modules == {name.replace(os.sep, "/") for name in sources}
    assert any(name.startswith("fastplm/triton_kernels/") for name in modules)
    tables = {name for name in files(wheel) if name.endswith(".json")}
    assert tables == {f"fastplm/measured/{p.name}" for p in (ROOT / "fastplm/measured").glob("*")}


def test_wheel_carries_the_license(wheel):
    (license_file,) = [name for name in files(wheel) if name.endswith("/LICENSE")]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = [name for name in files(wheel) if name.endswith("dist-info/METADATA")]
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()


def test_wheel_holds_the_extension_and_works_alone(wheel, tmp_path):
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on the PATH")
    assert [name for name in files(wheel) if name.startswith("fastplm/_C.")]
    # No Python symbol in it: one wheel for all versions of Python.
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    file, lacks, lacks_of_other_sources = python_says(
        "import json, fastplm, fastplm.triton_kernels\n"
        "from fastplm import _extension\n"
        "lacks = [_extension.lacks(name, 'CPU') for name in ('gather_rows', 'product')]\n"
        "print(json.dumps([fastplm.__file__, *lacks]))",
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert file == str(tmp_path / "fastplm/__init__.py")
    assert lacks is None
    assert "no product: it is of other sources" in lacks_of_other_sources


def test_without_a_compiler_one_notice_and_a_wheel_of_python_alone(tree, tmp_path):
    archive, said = build("build_wheel", tree, tmp_path, PATH=str(tree), CXX="")
    assert archive.name.endswith("-py3-none-any.whl")
    assert said.count("fastplm: NOTICE: no C++ compiler was found") == 1


def test_a_failed_compilation_costs_one_notice(tree, tmp_path):
    archive, said = build("build_wheel", tree, tmp_path, CXX="false")
    assert not [name for name in files(archive) if name.startswith("fastplm/_C.")]
    assert said.count("fastplm: NOTICE: csrc/ could not be built") == 1


def test_sdist_has_all_it_takes_to_build(tree, tmp_path):
    archive, _ = build("build_sdist", tree, tmp_path)
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[-1] for name in tar.getnames()}
    assert {f"csrc/{path.name}" for path in (ROOT / "csrc").iterdir()} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "constraints.txt"} <= names
    assert any(name.startswith("triton_kernels/") for name in names)


def python_says(script: str, **kwargs):
    """The JSON that a fresh interpreter prints."""
    cwd = kwargs.pop("cwd", ROOT)
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=cwd,
        env={**os.environ, **kwargs},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_import_touches_no_device_and_takes_under_a_second():
    script = (
        "import json, sys, time, torch\n"
        "start = time.perf_counter()\n"
        "import fastplm\n"
        "seconds = time.perf_counter() - start\n"
        "triton = sys.modules.get('triton.runtime.driver')\n"
        "driver = triton and triton.driver._active\n"
        "print(json.dumps([seconds, torch.cuda.is_initialized(), driver is not None]))"
    )
    for _ in range(3):  # a machine may be busy once
        seconds, *touched = python_says(script)
        assert not any(touched)
        if seconds < 1.0:
            return
    pytest.fail(f"it took {seconds:.1f} s, the last time of three")


def test_versions_agree():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', pyproject, re.MULTILINE)[1] == fastplm.__version__


def python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_at_most_four_environment_variables():
    paths = [ROOT / "setup.py", ROOT / "Makefile"]
    paths += [path for folder in CODE for path in python(folder)]
    found = {
        name for path in paths for name in re.findall(r"\bFASTPLM_[A-Z_]+\b", path.read_text())
    }
    assert len(found) <= 4, sorted(found)


def test_packages_are_listed_by_name():
    assert "find_packages" not in (ROOT / "setup.py").read_text()
    assert not list((ROOT / "tests").rglob("__init__.py"))
