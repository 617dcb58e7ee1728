"""The wheel, the source archive, and the time of an import."""

from __future__ import annotations

import csv
import fcntl
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
import yaml
from torch.utils.cpp_extension import include_paths

import check_wheel
import fastplm
from fastplm import _extension

ROOT = Path(__file__).parents[1]
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
NVCC = shutil.which("nvcc") if sys.platform == "linux" else None
needs_nvcc = pytest.mark.skipif(not (COMPILER and NVCC), reason="no nvcc on the PATH")
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A copy of the files for a build, as building writes into the tree."""
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
    """Run the build backend as pip does without isolation. Returns the archive and the output."""
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


def small(tree: Path, copy: Path) -> Path:
    """A copy with one CPU op of csrc/, as an installation of all takes minutes."""
    shutil.copytree(tree, copy)
    for source in (copy / "csrc").glob("*/*.cpp"):
        if source.name not in ("gather_rows.cpp", "unchanged.cpp"):
            source.unlink()
    return copy


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    """A wheel with one CPU op and the CUDA code; if pytest has several workers, one builds it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    built = folder / "wheel"
    with (folder / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            out = tmp_path_factory.mktemp("out")
            build("build_wheel", small(tree, tmp_path_factory.mktemp("small") / "tree"), out)
            out.rename(built)
    (archive,) = built.iterdir()
    return archive


@pytest.fixture
def site(wheel, tmp_path) -> Path:
    """The installed wheel, with all CPU ops from this tree's build."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    compiled = list(Path(fastplm.__file__).parent.glob("_C.*"))
    if not compiled:
        pytest.skip("the extension was not built")
    shutil.copy(compiled[0], tmp_path / "site/fastplm")
    return tmp_path / "site"


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_wheel_has_one_top_level_package(wheel):
    top = {name.split("/")[0] for name in files(wheel)}
    assert top == {"fastplm", f"fastplm_torch-{fastplm.__version__}.dist-info"}


def test_wheel_holds_every_module_and_nothing_else(wheel):
    modules = {name for name in files(wheel) if name.endswith(".py")}
    sources = {f"fastplm/{path.relative_to(ROOT / 'fastplm')}" for path in python("fastplm")}
    sources |= {f"fastplm/{path.relative_to(ROOT)}" for path in python("triton_kernels")}
    assert modules == {name.replace(os.sep, "/") for name in sources}
    assert any(name.startswith("fastplm/triton_kernels/") for name in modules)
    assert not any(name.endswith(".json") for name in files(wheel))
    grids = {name for name in files(wheel) if name.endswith(".yaml")}
    assert grids == {p.relative_to(ROOT).as_posix() for p in ROOT.glob("fastplm/**/*.yaml")}
    assert {name.split("/")[1] for name in grids} == {"run", "study"}


def test_wheel_carries_the_license(wheel):
    (license_file,) = [name for name in files(wheel) if name.endswith("/LICENSE")]
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = [name for name in files(wheel) if name.endswith("dist-info/METADATA")]
        assert "License-Expression: Apache-2.0" in archive.read(metadata).decode()


@pytest.mark.slow
def test_wheel_holds_the_extension_and_works_alone(wheel, tmp_path):
    if COMPILER is None:
        pytest.skip("no C++ compiler on the PATH")
    assert [name for name in files(wheel) if name.startswith("fastplm/_C.")]
    # No library holds a Python symbol, so one wheel serves all versions.
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


@pytest.mark.slow
def test_a_failed_compilation_costs_one_notice(tree, tmp_path):
    archive, said = build("build_wheel", tree, tmp_path, CXX="false")
    assert not [name for name in files(archive) if name.startswith("fastplm/_C.")]
    assert said.count("fastplm: NOTICE: csrc/ could not be built") == 1


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on the PATH")
@pytest.mark.parametrize("why", ("nvcc was not found", "fastplm._C_cuda is left out"))
def test_without_cuda_code_one_notice_and_the_rest(why, tree, tmp_path):
    short = small(tree, tmp_path / "tree")
    old = short / "fastplm/_C_cuda.abi3.so"  # as from a build in place, of other sources
    old.touch()
    nvcc = tmp_path / "cuda/bin/nvcc"
    if "not found" not in why:  # a compiler that knows its architectures but compiles for none
        nvcc.parent.mkdir(parents=True)
        # What it says is no text of any encoding.
        fails = r"{ printf '\377\n'; exit 1; }"
        nvcc.write_text(f'#!/bin/sh\n[ "$1" = --list-gpu-arch ] && echo compute_80 || {fails}\n')
        nvcc.chmod(0o755)
    (tmp_path / "out").mkdir()
    home = str(nvcc.parents[1])
    archive, said = build("build_wheel", short, tmp_path / "out", CUDA_HOME=home)
    libraries = {name.split(".")[0] for name in files(archive) if name.startswith("fastplm/_C")}
    assert libraries == {"fastplm/_C"}
    assert said.count(f"fastplm: NOTICE: {why}") == said.count("NOTICE") == 1
    assert not old.exists()


# --- the CUDA code, a library of its own ----------------------------------------------------------


@needs_nvcc
def test_cuda_library_has_code_for_every_architecture(site):
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def listed(what: str) -> set[int]:
        library = site / "fastplm/_C_cuda.abi3.so"
        said = subprocess.run([tool, what, library], check=True, capture_output=True, text=True)
        return {int(arch) for arch in re.findall(r"\.sm_(\d+)\.", said.stdout)}

    known = subprocess.run([NVCC, "--list-gpu-arch"], capture_output=True, text=True).stdout.split()
    archs = {arch for arch in (80, 90, 100, 120) if f"compute_{arch}" in known}
    # sm_86 and sm_89 run the code for sm_80; later GPUs compile the PTX of the two newest.
    assert listed("--list-elf") == archs and listed("--list-ptx") == set(sorted(archs)[-2:])


@pytest.mark.parametrize("name", ("_C", pytest.param("_C_cuda", marks=needs_nvcc)))
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm is not on the PATH")
def test_wheel_libraries_need_nothing_but_the_stable_abi(name, site):
    """Nor does it take from torch's libraries the parts of libstdc++ that some of them have."""
    library = site / f"fastplm/{name}.abi3.so"
    command = ["nm", "--dynamic", "--undefined-only", str(library)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    needed = {line.split()[-1] for line in said.splitlines() if line.split()[0] != "w"}
    # Symbols with a version belong to the libraries of C, C++ or the compiler.
    torch_has = {name for name in needed if "@" not in name}
    shims = [
        path
        for folder in include_paths()
        for name in ("torch/csrc/stable/c/shim.h", "torch/csrc/inductor/aoti_torch/c/shim.h")
        if (path := Path(folder, name)).exists()
    ]
    declared = {name for path in shims for name in re.findall(r"\w+", path.read_text())}
    # A macro of the header declares one function for each type.
    declared |= {name for name in torch_has if re.fullmatch(r"(aoti_)?torch_dtype_\w+", name)}
    assert "torch_call_dispatcher" in torch_has
    assert torch_has <= declared
    versions = {name.split("@")[1].split("_")[0] for name in needed - torch_has}
    assert versions <= {"GLIBC", "GLIBCXX", "CXXABI", "GCC"}


def status(site: Path, torch_cuda: str | None, *libraries: Path) -> tuple[str, dict, bool]:
    """(message about the CUDA code, what the ops lack, whether it is loaded) for a torch's CUDA."""
    return python_says(
        "import json, pathlib, torch\n"
        f"torch.version.cuda = {torch_cuda!r}\n"
        "from fastplm import _extension\n"
        "ops = ['mask_tokens', 'corrupt_spans', 'bart_noise']\n"
        "lacks = [[_extension.lacks(op, on) for op in ops] for on in ('CPU', 'CUDA')]\n"
        "loaded = '_C_cuda' in pathlib.Path('/proc/self/maps').read_text()\n"
        "print(json.dumps([_extension.cuda_code(), *lacks, loaded]))",
        cwd=site,
        PYTHONPATH=str(site),
        LD_LIBRARY_PATH=os.pathsep.join(str(library.parent) for library in libraries),
    )


def test_info_says_what_became_of_the_cuda_code():
    assert f"\nthe CUDA code of csrc/ {_extension.cuda_code()}\n" in fastplm.info(all=True)


def library(path: Path, source: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    command = [COMPILER, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)
    return path


@pytest.mark.slow
@needs_nvcc
def test_cuda_library_is_loaded_where_it_can_run(site, tmp_path):
    version = subprocess.run([NVCC, "--version"], capture_output=True, text=True).stdout
    built = re.search(r"release (\d+\.\d+)", version)[1]
    major = int(built.split(".")[0])
    older = f"{major - 1}.9"
    functions = "aoti_torch_get_current_cuda_stream", "torch_c10_cuda_check_msg"
    functions += ("torch_c10_cuda_free_error_msg",)
    # The torch here must have every other name that the library needs.
    torch_cuda = library(
        tmp_path / "torch/libtorch_cuda.so",
        "".join(f'extern "C" int {name}() {{ return 0; }}\n' for name in functions),
    )

    def driver(of: int) -> Path:
        source = (
            'extern "C" int cuDriverGetVersion(int* version) { *version = 1000 * %d; return 0; }'
        )
        return library(tmp_path / f"driver{of}/libcuda.so.1", source % of)

    all_there = [None] * 3
    said, cpu, cuda, loaded = status(site, None, torch_cuda)
    assert "is not loaded: this torch has no CUDA" in said
    assert cpu == all_there and "this torch has no CUDA" in cuda[0] and not loaded

    for torch_version in (built, f"{major + 1}.0"):
        said, cpu, cuda, loaded = status(site, torch_version, torch_cuda)
        assert f"is loaded, built with CUDA {built}" in said
        assert cpu == cuda == all_there and loaded
    said, cpu, cuda, _ = status(site, older, torch_cuda, driver(major))
    assert cpu == cuda == all_there and "is loaded" in said
    said, cpu, cuda, _ = status(site, older, torch_cuda, driver(major - 1))
    assert cpu == all_there and f"install fastplm again with an nvcc of CUDA {major - 1}" in said
    assert all("update the driver" in reason for reason in cuda)

    (site / "fastplm/_C_cuda.abi3.so").write_text("no library")
    said, cpu, cuda, loaded = status(site, built, torch_cuda)
    assert cpu == all_there and not loaded
    assert "cannot be loaded" in said and "cannot be loaded" in cuda[0]


@pytest.mark.slow
def test_sdist_has_all_it_takes_to_build(tree, tmp_path):
    archive, _ = build("build_sdist", tree, tmp_path)
    with tarfile.open(archive) as tar:
        names = {name.split("/", 1)[-1] for name in tar.getnames()}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.*")} <= names
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
        "import fastplm.ops\n"
        "seconds = time.perf_counter() - start\n"
        "triton = sys.modules.get('triton.runtime.driver')\n"
        "driver = triton and triton.driver._active\n"
        "print(json.dumps([seconds, torch.cuda.is_initialized(), driver is not None]))"
    )
    for _ in range(3):  # a busy machine gets further tries
        seconds, *touched = python_says(script)
        assert not any(touched)
        if seconds < 1.0:
            return
    pytest.fail(f"it took {seconds:.1f} s, the last time of three")


def test_the_package_alone_imports_no_torch_and_every_name_is_there():
    heavy, names, same = python_says(
        "import json, sys\n"
        "import fastplm\n"
        "heavy = sorted({'torch', 'numpy', 'transformers'} & set(sys.modules))\n"
        "names = sorted(dir(fastplm))\n"
        "values = {name: getattr(fastplm, name) for name in fastplm.__all__}\n"
        "from fastplm import *\n"
        "same = all(globals()[name] is value for name, value in values.items())\n"
        "from fastplm import errors, ops, _backends\n"
        "same &= fastplm.ops is ops and errors.FastplmError is fastplm.FastplmError\n"
        "same &= fastplm.use_backend is fastplm._backends.use_backend\n"
        "print(json.dumps([heavy, names, same]))"
    )
    assert heavy == [] and set(fastplm.__all__) <= set(names) and same
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = fastplm.nothing


def python(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def test_every_folder_of_code_is_a_package_and_tests_are_none():
    for folder in ("fastplm", "triton_kernels"):
        assert all((path.parent / "__init__.py").is_file() for path in python(folder))
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_message_advises_a_package_of_others():
    """On the package index fastplm is another project's name: ours there is fastplm-torch."""
    advises = re.compile(r"pip install[^`\n]*\bfastplm\b(?!-torch)|\bfastplm\[\w")
    assert advises.search("pip install 'fastplm[study]'") and advises.search("fastplm[study]")
    assert not advises.search("pip install 'fastplm-torch[study]'")
    folders = "fastplm", "triton_kernels", "csrc", "benchmarks", "docs", "examples", ".github"
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    kinds = (".py", ".md", ".yml", ".yaml", ".toml", ".cpp", ".h", ".cu", "")
    for path in (*ROOT.iterdir(), *paths):
        if path.is_file() and path.suffix in kinds and not path.name.startswith("."):
            advised = advises.findall(path.read_text("utf-8"))
            assert not advised, f"{path}: {advised}"
    assert "`fastplm-torch`" in (ROOT / "README.md").read_text("utf-8")


def test_the_newest_transformers_that_is_installed_is_one_that_was_tested():
    from packaging.requirements import Requirement

    from fastplm._explain import TESTED

    text = (ROOT / "pyproject.toml").read_text()
    wanted = Requirement(re.search(r'"(transformers[^"]*)"', text)[1]).specifier
    assert wanted == TESTED["transformers"]


# --- the wheels of a release (docs/dev/wheels.md) -------------------------------------------------


def made_wheel(folder: Path, platform: str, *names: str) -> Path:
    """A file that looks like a wheel of version 0.1.0 with these files."""
    path = folder / f"fastplm_torch-0.1.0-cp310-abi3-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("fastplm/__init__.py", "fastplm_torch-0.1.0.dist-info/METADATA", *names):
            archive.writestr(name, "text")
    return path


@pytest.mark.parametrize(
    "platform, names, fault",
    (
        ("manylinux_2_28_x86_64", ("_C", "_C_cuda"), None),
        ("manylinux_2_28_aarch64", ("_C",), None),
        ("any", (), None),
        ("manylinux_2_28_x86_64", ("_C",), "has the libraries"),
        ("manylinux_2_28_aarch64", (), "has the libraries"),
        ("any", ("_C",), "has the libraries"),
    ),
)
def test_a_wheel_for_others_lacks_no_library(platform, names, fault, tmp_path):
    made = made_wheel(tmp_path, platform, *(f"fastplm/{name}.abi3.so" for name in names))
    if fault is None:
        assert check_wheel.inside(made)[0].startswith(made.name)
        return
    with pytest.raises(SystemExit, match=fault):
        check_wheel.inside(made)


def test_a_wheel_with_a_second_package_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="fastplm_torch.libs"):
        check_wheel.inside(made_wheel(tmp_path, "any", "fastplm_torch.libs/libc10.so"))


def test_a_tag_of_another_version_is_refused():
    made = Path(f"fastplm_torch-{fastplm.__version__}-py3-none-any.whl")
    check_wheel.check_tag(made, f"v{fastplm.__version__}")
    for tag in (fastplm.__version__, "v9.9.9"):
        with pytest.raises(SystemExit, match=f"the tag is {tag}, but"):
            check_wheel.check_tag(made, tag)


def test_the_page_of_wheels_has_the_committed_results():
    page = (ROOT / "docs/dev/wheels.md").read_text("utf-8")
    results = ROOT / "benchmarks/results/wheels"
    with (results / "installed.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows and check_wheel.table(rows) in page
    (audited,) = results.glob("*.txt")
    assert audited.read_text("utf-8") in page


def test_the_workflow_checks_the_oldest_torch_and_the_pinned_one():
    from packaging.requirements import Requirement

    workflow = yaml.safe_load((ROOT / ".github/workflows/wheels.yml").read_text("utf-8"))
    torches = workflow["jobs"]["check"]["strategy"]["matrix"]["torch"]
    needed = re.search(r'^    "(torch>=.*)",$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    (oldest,) = (each.version for each in Requirement(needed).specifier)
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    assert {f"{oldest}.0", pinned} <= set(torches)
