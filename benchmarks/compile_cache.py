"""Fill Triton's compile cache for a GPU, on a machine that need not have one.

    python benchmarks/compile_cache.py DIR --arch 90 [step …]

``TRITON_CACHE_DIR=DIR`` then saves a machine with that GPU the time to compile the kernels of
``gpu_checks.py`` and of the ops' quick benchmarks: several hundred kernels, a second for each. The
cache's keys depend on Triton's own files, the kernel's source, the architecture and the signature,
so both machines need the same release of Triton. They need the same release of Python, too, as
Triton's library differs; else ``--like DIR`` names the other one's ``triton`` folder, such as that
of an unpacked wheel. The files name each other by absolute paths: if a
folder was moved, this command corrects the paths, and compiles missing kernels. Files that no
launch reads (the IR and the PTX) are not kept.

Each call is made with the report's own inputs, in CPU memory. Its launches are recorded instead of
run, and passed to the function by which Triton's JIT would compile them, so the same code makes the
keys. For each step a line says how many kernels it has, and how many were compiled. Models are not
run: the cache has only those of their kernels that a check or a benchmark launches, too.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import islice, repeat
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import torch

STEPS = (
    *("checks", "attention", "linear_cross_entropy", "replaced_token_loss", "gather_rows"),
    *("dropout_add_layer_norm", "bias_gelu", "attention_tiles", "linear_distillation", "maxsim"),
)
ARCHS = (80, 86, 89, 90, 100, 120)


class _Driver:
    """The functions of a GPU's driver that the JIT calls before it compiles."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Compiled(list):
    """The list that launches are recorded in; it also compiles each of them."""

    def append(self, launch: Any) -> None:
        launch.kernel.warmup(grid=launch.grid, **launch.arguments)


@contextmanager
def compiling(arch: int, folder: Path) -> Iterator[list[bool]]:
    """Compile launches of the Triton backend on CPU tensors for sm_<arch> into a folder, without
    running them. Yields a list: whether each requested kernel was there already."""
    from triton import knobs
    from triton.runtime import driver

    from fastplm import triton_kernels, use_backend
    from fastplm.triton_kernels import _launch
    from fastplm.triton_kernels.linear_cross_entropy import products

    found: list[bool] = []

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    for module in pkgutil.iter_modules(triton_kernels.__path__):
        importlib.import_module(f"fastplm.triton_kernels.{module.name}")
    # The variable lets the Triton backend take CPU tensors. It is too late for the kernels, which
    # are imported by now.
    environment = {"TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(driver, "_active", _Driver(arch)),
        mock.patch.object(knobs.compilation, "listener", listen),
        # These take long on a CPU and change no launch.
        mock.patch.object(products, "multiply", lambda a, b, out: None),
        mock.patch.object(torch, "randn", lambda *shape, **kind: torch.zeros(*shape, **kind)),
        _launch.record_launches(arch),
        use_backend("triton"),
    ):
        _launch._Recorder.launches = _Compiled()
        yield found


def _call(function: Callable[..., Any], inputs: dict[str, Any], wrt: Any) -> None:
    """Run forward, and backward if there is one. The results are uninitialised memory."""
    leaves = {name: inputs[name].detach().requires_grad_() for name in wrt}
    out = function(**(inputs | leaves))
    if leaves:
        upstream = torch.zeros_like(out)
        torch.autograd.grad(out, list(leaves.values()), upstream, allow_unused=True)


def _checks() -> Iterator[tuple[Callable[..., Any], dict[str, Any], Any]]:
    import gpu_checks

    class Full(gpu_checks.Where):
        small = False

    for op in gpu_checks.OPS:
        for check in gpu_checks.OPS[op]():
            for dtype in gpu_checks.DTYPES if check.backend == "triton" else ():
                torch.manual_seed(0)
                yield check.fused, check.make(Full(torch.device("cpu"), dtype)), check.wrt


def _benchmark(op: str) -> Iterator[tuple[Callable[..., Any], dict[str, Any], Any]]:
    import harness

    with mock.patch.object(harness, "default_device", lambda: torch.device("cuda")):
        cases = importlib.import_module(f"test_{op}").CASES
    for case in cases:
        for name, function in case.variants.items():
            if name.startswith("fastplm") and not case.full:
                yield function, case.make(torch.device("cpu")), case.wrt
                yield function, case.make_small(torch.device("cpu")), case.wrt


def key_of(package: Path) -> str:
    """What Triton takes from its own files for a key, from those in another folder."""
    from triton.runtime import cache

    function = inspect.unwrap(cache.triton_key)
    files = {"__file__": str(package / "runtime" / "cache.py")}
    return FunctionType(function.__code__, {**vars(cache), **files})()


def fill(
    folder: Path, arch: int, step: str, key: str | None = None, part: int = 0, parts: int = 1
) -> tuple[int, int]:
    """(kernels of a step, missing ones) for sm_<arch>, from every ``parts``-th call alone; ``key``
    replaces that of Triton's own files."""
    from triton.runtime import cache

    calls = _checks() if step == "checks" else _benchmark(step)
    own = cache.triton_key
    with (
        mock.patch.object(cache, "triton_key", own if key is None else lambda: key),
        compiling(arch, folder) as found,
    ):
        for function, inputs, wrt in islice(calls, part, None, parts):
            _call(function, inputs, wrt)
    return len(found), found.count(False)


def settle(folder: Path) -> None:
    """Drop files that no launch reads, and write where the other files are now."""
    for path in folder.glob("*/*"):
        if path.suffix in (".ttir", ".ttgir", ".llir", ".ptx", ".source"):
            path.unlink()
    for path in folder.glob("*/__grp__*.json"):
        names = json.loads(path.read_text())["child_paths"]
        there = {name: str(path.with_name(name)) for name in names if path.with_name(name).exists()}
        path.write_text(json.dumps({"child_paths": there}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--arch", type=int, choices=ARCHS, help="default: this machine's GPU")
    parser.add_argument("--like", type=Path, metavar="DIR", help="another Python's triton folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="default: the CPUs")
    parser.add_argument("steps", nargs="*", metavar="step", help=f"of {' '.join(STEPS)}")
    options = parser.parse_intermixed_args()
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no step {', '.join(sorted(unknown))}; there are {' '.join(STEPS)}")
    if options.arch is None:
        if not torch.cuda.is_available():
            parser.error("no GPU is here: --arch says for which one")
        major, minor = torch.cuda.get_device_capability()
        options.arch = 10 * major + minor
    folder = options.folder.resolve()
    settle(folder)
    os.environ.pop("TRITON_INTERPRET", None)  # interpreted kernels cannot be compiled
    jobs = max(options.jobs, 1)
    key = None if options.like is None else key_of(options.like)
    # The processes are not forked, as a process that has used its GPU may not be.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for step in options.steps or STEPS:
            given = map(repeat, (folder, options.arch, step, key))
            each = (*given, range(jobs), repeat(jobs))
            kernels, made = (sum(counts) for counts in zip(*pool.map(fill, *each), strict=True))
            print(f"{step}: {kernels} kernels, {made} compiled", flush=True)
    settle(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
