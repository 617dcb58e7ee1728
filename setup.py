"""Builds csrc/ and maps the packages; everything else stands in pyproject.toml.

The extension is optional: without it every op still runs on its other backends, so whatever is
missing costs one notice, never the installation. What is built follows from the tools found
(compiler, torch, nvcc), never from whether this machine has a GPU.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

PACKAGES = [
    "fastplm",
    "fastplm.reference",
    "fastplm.ops",
    "fastplm.nn",
    "fastplm.models",
    "fastplm.data",
    "fastplm.train",
    "fastplm.triton_kernels",
]
# 2.11, in the encoding of torch/headeronly/version.h: one binary serves every later torch.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CUDA_ARCHS = (80, 90, 100)


def notice(text: str) -> None:
    print(f"fastplm: NOTICE: {text}", file=sys.stderr)


def find_compiler() -> str | None:
    candidates = (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++")
    names = (shlex.split(candidate)[0] for candidate in candidates if candidate)
    return next((name for name in names if shutil.which(name)), None)


def find_cuda_home() -> str | None:
    """The toolkit that nvcc belongs to: what stands on the PATH is often a script elsewhere."""
    if "CUDA_HOME" in os.environ or shutil.which("nvcc") is None:
        return os.environ.get("CUDA_HOME")
    here = re.search(r"_HERE_=(.+)", run("nvcc", "--dryrun", "-x", "cu", os.devnull))
    return str(Path(here[1]).parent) if here else None


def find_nvcc(torch_cuda: str | None, cuda_home: str | None) -> str | None:
    """The nvcc to use, or None with a notice that says why csrc/*.cu is left out."""
    nvcc = Path(cuda_home or "") / "bin" / "nvcc"
    if torch_cuda is None:
        notice("this torch has no CUDA; csrc/ is built for the CPU alone")
    elif cuda_home is None or not nvcc.exists():
        notice("nvcc was not found; csrc/ is built for the CPU alone")
    elif f"release {torch_cuda.split('.')[0]}." not in run(nvcc, "--version"):
        notice(f"nvcc is not of torch's CUDA {torch_cuda}; csrc/ is built for the CPU alone")
    else:
        return str(nvcc)
    return None


def run(*command: str | Path) -> str:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return result.stdout


def gencode(nvcc: str) -> list[str]:
    """Machine code for each architecture this nvcc knows, and PTX of the newest for later ones."""
    known = run(nvcc, "--list-gpu-arch").split()
    archs = [arch for arch in CUDA_ARCHS if f"compute_{arch}" in known]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def extension_arguments() -> dict:
    compiler = find_compiler()
    if compiler is None:
        notice("no C++ compiler was found; csrc/ is not built")
        return {}
    os.environ["CXX"] = compiler
    cuda_home = find_cuda_home()
    if cuda_home is not None:
        os.environ["CUDA_HOME"] = cuda_home  # torch reads it when imported
    try:
        import torch
        from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
    except ImportError:
        notice("torch is not in the build environment; csrc/ is not built")
        return {}

    class OptionalBuild(BuildExtension):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:
                notice(f"csrc/ could not be built and is left out: {error}")
                self.extensions.clear()

    nvcc = find_nvcc(torch.version.cuda, CUDA_HOME)
    sources = [str(path) for path in sorted(Path("csrc").glob("*.cpp"))]
    compile_args = {"cxx": ["-O3", "-g0", "-fvisibility=hidden", STABLE_ABI]}
    if nvcc is not None:
        sources += [str(path) for path in sorted(Path("csrc").glob("*_cuda.cu"))]
        compile_args["cxx"].append("-DUSE_CUDA")
        compile_args["nvcc"] = ["-O3", "-DUSE_CUDA", STABLE_ABI, *gencode(nvcc)]
    extension = (CppExtension if nvcc is None else CUDAExtension)(
        "fastplm._C",
        sources,
        depends=[str(path) for path in sorted(Path("csrc").iterdir())],
        extra_compile_args=compile_args,
        py_limited_api=True,
    )
    # The library holds no Python symbol at all, so one wheel serves every Python from 3.10 on.
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    packages=PACKAGES,
    package_dir={"fastplm.triton_kernels": "triton_kernels"},
    **extension_arguments(),
)
