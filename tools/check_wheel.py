"""Checks a wheel as its users get it: what is inside, its audits, and that it works elsewhere.

    python tools/check_wheel.py dist/*.whl --tag v0.1.0   # are they the version of this tag?
    python tools/check_wheel.py WHEEL                     # what is inside, and the audits
    python tools/check_wheel.py WHEEL --python python3.12 --torch 2.13.0 --rows ROWS.csv

It builds nothing. The third form makes a new virtual environment with a torch, installs the wheel
by the clock, and runs `fastplm info` and the tests of the ops there: the PATH has the environment's
own programs alone, so no compiler, and no folder that is imported from has the sources. The result
is appended to the rows. The audits need the packages auditwheel and abi3audit beside this Python.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What every copy of PyTorch has: a wheel with its own would run two of them.
TORCH = {"libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so"}
#: The tests of the ops as users run them on a CPU.
CHOSEN = "not gpu and not slow"
#: What the environment says of itself, a line each.
ABOUT = """
import sys, importlib.metadata, shutil, fastplm, torch
from fastplm import _extension
print(fastplm.__file__)
print("%d.%d.%d" % sys.version_info[:3])
for name in ("torch", "triton", "transformers", "numpy"):
    try:
        print(importlib.metadata.version(name) if name != "torch" else torch.__version__)
    except importlib.metadata.PackageNotFoundError:
        print("none")
print(_extension.lacks("gather_rows", "CPU") or "is loaded")
print(_extension.cuda_code())
print(*filter(shutil.which, ("c++", "g++", "gcc", "cc", "clang", "cl")))
"""


def run(*command: object, cwd: Path | None = None, **variables: str) -> str:
    """The output of a command; a failure ends this program with it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


# --- the file -------------------------------------------------------------------------------------


def version_of(wheel: Path) -> str:
    return wheel.name.split("-")[1]


def check_tag(wheel: Path, tag: str) -> None:
    """The version is written once, in fastplm/__init__.py; a release's tag must say the same."""
    if tag != f"v{version_of(wheel)}":
        sys.exit(
            f"the tag is {tag}, but {wheel.name} is of version {version_of(wheel)}: set "
            f"__version__ in fastplm/__init__.py, or tag v{version_of(wheel)}"
        )


def inside(wheel: Path) -> list[str]:
    """The lines on what is inside; an error if that is not one package with its libraries.

    A build leaves out what it cannot compile, with a notice. A wheel for others may lack nothing.
    """
    with zipfile.ZipFile(wheel) as archive:
        files = [each for each in archive.infolist() if not each.is_dir()]
    top = {each.filename.split("/")[0] for each in files}
    if top != {"fastplm", f"fastplm_torch-{version_of(wheel)}.dist-info"}:
        sys.exit(f"{wheel.name} has {sorted(top)}, but a wheel has fastplm and its metadata alone")
    platform = wheel.stem.split("-")[-1]
    names = {each.filename for each in files if Path(each.filename).suffix in (".so", ".pyd")}
    expected = set() if platform == "any" else {"fastplm/_C.abi3.so"}
    if platform.endswith("x86_64"):
        expected.add("fastplm/_C_cuda.abi3.so")
    if names != expected:
        sys.exit(f"{wheel.name} has the libraries {sorted(names)}, not {sorted(expected)}")
    lines = [f"{wheel.name}: {wheel.stat().st_size:,} bytes, {len(files)} files"]
    kinds: dict[str, list[int]] = {}
    for each in files:
        kinds.setdefault(Path(each.filename).suffix or "others", []).append(each.file_size)
    for kind, sizes in sorted(kinds.items()):
        lines.append(f"{kind}: {len(sizes)} files, {sum(sizes):,} bytes")
    lines += [
        f"{each.filename}: {each.file_size:,} bytes" for each in files if each.filename in names
    ]
    return lines


def audits(wheel: Path) -> list[str]:
    """The lines of auditwheel and abi3audit; an error if one of them finds a fault."""
    if wheel.name.endswith("-none-any.whl"):
        return ["no library is inside: nothing to audit"]
    shown = json.loads(run(sys.executable, "-m", "auditwheel", "show", "--json", wheel))
    symbols, others = shown["sym_tag"], sorted(shown["external_libs"])
    if symbols not in wheel.stem.split("-")[-1].split("."):
        sys.exit(f"{wheel.name} needs symbols of {symbols}: {shown['versioned_symbols']}")
    if not TORCH.issuperset(others):
        sys.exit(f"{wheel.name} needs {others}; beside the system there are torch's alone")
    lines = [f"auditwheel: symbols of {symbols}; libraries of torch: {', '.join(others)}"]
    for library, versions in sorted(shown["versioned_symbols"].items()):
        newest: dict[str, str] = {}
        for version in sorted(versions, key=numbers):
            newest[version.split("_")[0]] = version
        lines.append(f"auditwheel: {library}: at most {', '.join(newest.values())}")
    report = json.loads(run(sys.executable, "-m", "abi3audit", "--strict", "--report", wheel))
    (results,) = (each["wheel"] for each in report["specs"].values())
    for each in results:
        found, wrong = each["result"], len(each["result"]["non_abi3_symbols"])
        lines.append(
            f"abi3audit: {each['name']}: abi3 of {found['baseline']}, needs {found['computed']}, "
            f"{wrong} symbols outside of it"
        )
    return lines


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", version)]


# --- the installation -----------------------------------------------------------------------------


def check_installation(wheel: Path, python: str, torch: str, tests: str) -> dict[str, str]:
    """The row of one Python and one torch; an error if the wheel does not work there."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        run(python, "-m", "venv", here / "env")
        programs = here / "env" / ("Scripts" if os.name == "nt" else "bin")
        bare = {"PATH": str(programs), "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        own = programs / "python"
        pip = (own, "-m", "pip", "install", "--quiet")
        run(*pip, f"torch=={torch}", cwd=here, **bare)
        before = count_packages(own, here, bare)
        start = time.perf_counter()
        run(*pip, "--no-cache-dir", wheel.resolve(), cwd=here, **bare)
        seconds = time.perf_counter() - start
        more = count_packages(own, here, bare) - before
        (here / "about.py").write_text(ABOUT)
        said = run(own, here / "about.py", cwd=here, **bare).splitlines()
        file, version, torch, triton, transformers, numpy, cpu, cuda, compilers = said[-9:]
        if compilers or not Path(file).resolve().is_relative_to((here / "env").resolve()):
            sys.exit(f"this is not the installed wheel alone: {file}, compilers {compilers!r}")
        expected = "was not built" if wheel.name.endswith("-none-any.whl") else "is loaded"
        if expected not in cpu:
            sys.exit(f"csrc/ {cpu}, but of {wheel.name} it {expected}")
        run(programs / "fastplm", "info", cwd=here, **bare)
        counts = {} if tests == "none" else run_tests(own, here, bare, tests)
    return {
        "date": datetime.date.today().isoformat(),
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()[:12],
        "python": version,
        "torch": torch,
        "triton": triton,
        "transformers": transformers,
        "numpy": numpy,
        "csrc": cpu,
        "cuda_code": cuda,
        "packages": str(more),
        "install_seconds": f"{seconds:.0f}",
        **counts,
    }


def count_packages(python: Path, here: Path, bare: dict[str, str]) -> int:
    lines = run(python, "-m", "pip", "list", "--format=freeze", cwd=here, **bare).splitlines()
    return sum("==" in line for line in lines)


def run_tests(python: Path, here: Path, bare: dict[str, str], tests: str) -> dict[str, str]:
    """How many tests passed and why others failed, which the caller judges."""
    run(python, "-m", "pip", "install", "--quiet", "pytest", "hypothesis", cwd=here, **bare)
    # Without the packages' sources beside them.
    for folder in ("tests", "tools"):
        shutil.copytree(ROOT / folder, here / folder)
    shutil.copy(ROOT / "pyproject.toml", here)
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", CHOSEN, "-rf"]
    start = time.perf_counter()
    done = subprocess.run(
        [*map(str, command), *shlex.split(tests)],
        cwd=here,
        env={**os.environ, **bare, "COLUMNS": "1000"},  # so that a line has the whole reason
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    lines = done.stdout.splitlines()
    counts = dict(re.findall(r"(\d+) (\w+)", lines[-1]) if lines else ())
    counts = {word: number for number, word in counts.items()}
    if "passed" not in counts or "error" in counts or "errors" in counts:
        sys.exit(f"{tests}: no tests, or errors\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    failed = [line for line in lines if line.startswith("FAILED ")]
    print("\n".join(failed))
    reasons = Counter(line.split(" - ", 1)[-1][:100] for line in failed)
    return {
        "tests": tests,
        **{word: counts.get(word, "0") for word in ("passed", "failed", "skipped")},
        "test_seconds": f"{seconds:.0f}",
        "failures": "; ".join(f"{count}: {reason}" for reason, count in reasons.items()),
    }


# --- the rows -------------------------------------------------------------------------------------

COLUMNS = (
    *("date", "wheel", "sha256", "python", "torch", "triton", "transformers", "numpy"),
    *("csrc", "cuda_code", "packages", "install_seconds"),
    *("tests", "passed", "failed", "skipped", "test_seconds", "failures"),
)


def append(row: dict[str, str], path: Path) -> None:
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


HEADER = """\
| wheel for | Python | torch | Triton | Transformers | C++ | CUDA code | installed in | tests |
|---|---|---|---|---|---|---|---|---|
"""


def table(rows: Iterable[dict[str, str]]) -> str:
    """The rows as the table of docs/dev/wheels.md."""
    lines = []
    for row in rows:
        counts = ", ".join(f"{row[word]} {word}" for word in ("passed", "failed", "skipped"))
        cells = (
            re.split(r"[-.]", row["wheel"].removesuffix(".whl"))[-1],
            *(row[name] for name in ("python", "torch", "triton", "transformers")),
            *(
                "loaded" if row[name].startswith("is loaded") else "-"
                for name in ("csrc", "cuda_code")
            ),
            f"{row['install_seconds']} s",
            f"{counts}, {row['test_seconds']} s" if row["passed"] else "not run",
        )
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEADER + "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.add_argument("--tag", help="a tag of git, as v0.1.0, that the version must agree with")
    parser.add_argument("--python", default=sys.executable, help="the Python to install into")
    parser.add_argument("--torch", help="the version of torch to install it beside")
    parser.add_argument("--tests", default="tests/ops", help="what pytest runs, or none")
    parser.add_argument("--rows", type=Path, help="a CSV file that gets the row")
    args = parser.parse_args()
    for wheel in args.wheels:
        if args.tag is not None:
            check_tag(wheel, args.tag)
            continue
        print("\n".join([*inside(wheel), *audits(wheel)]))
        if args.torch is None:
            continue
        row = check_installation(wheel, args.python, args.torch, args.tests)
        if args.rows is not None:
            append(row, args.rows)
        print("\n".join(f"{name}: {value}" for name, value in row.items()))
        if row.get("failed", "0") != "0":
            sys.exit(f"{row['failed']} tests failed")


if __name__ == "__main__":
    main()
