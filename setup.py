"""Builds csrc/ and maps the packages; everything else stands in pyproject.toml.

The extension is optional: without it every op still runs on its other backends, so whatever is
missing costs one notice, never the installation. What is built follows from the tools found
(compiler, torch, nvcc), never from whether this machine has a GPU or its torch has CUDA: the CUDA
code is a library of its own, which stays unloaded where it cannot run.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup

PACKAGES = [
    *find_packages(include=("fastplm", "fastplm.*")),
    *(f"fastplm.{name}" for name in find_packages(include=("triton_kernels", "triton_kernels.*"))),
]
# 2.11, in the encoding of torch/headeronly/version.h: one binary serves every later torch.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"
CUDA_ARCHS = (80, 90, 100, 120)
CUDA_LIBRARY = "fastplm._C_cuda"
# Bytes of the stack, as threads with 64 KB in all call csrc/. In the compile lane more is an error.
MOST_FRAME = 8192


def tell(text: str) -> None:
    print(f"fastplm: {text}", file=sys.stderr, flush=True)


def notice(text: str) -> None:
    tell(f"NOTICE: {text}")


def find_compiler() -> str | None:
    candidates = (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++")
    names = (shlex.split(candidate)[0] for candidate in candidates if candidate)
    return next((name for name in names if shutil.which(name)), None)


def find_nvcc() -> str | None:
    """The nvcc to use, or None with a notice that says why the CUDA code is left out."""
    folders = ["", "/usr/local/cuda/bin"]
    if os.environ.get("CUDA_HOME"):
        folders = [os.path.join(os.environ["CUDA_HOME"], "bin")]
    found = (shutil.which(os.path.join(folder, "nvcc")) for folder in folders)
    nvcc = next((path for path in found if path), None)
    if sys.platform != "linux":
        notice("the CUDA code of csrc/ is for Linux; csrc/ is built for the CPU alone")
    elif nvcc is None:
        notice("nvcc was not found; csrc/ is built for the CPU alone")
    elif not gencode(nvcc):
        notice(f"{nvcc} is too old for sm_{CUDA_ARCHS[0]}; csrc/ is built for the CPU alone")
    else:
        return nvcc
    return None


def run(*command: str) -> tuple[int, str]:
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    # A compiler may quote a line of any bytes.
    result = subprocess.run(command, **both, text=True, errors="replace")
    return result.returncode, result.stdout


def gencode(nvcc: str) -> list[str]:
    """Machine code for each architecture this nvcc knows, and PTX of two for later ones.

    The PTX of sm_120 does not serve the architectures between sm_100 and it.
    """
    known = run(nvcc, "--list-gpu-arch")[1].split()
    archs = [arch for arch in CUDA_ARCHS if f"compute_{arch}" in known]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return flags + [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in archs[-2:]]


def build_cuda(nvcc: str, compiler: str, includes: list[str], temp: Path) -> tuple[Path, str]:
    """csrc/index/cuda.cu as a library, and what nvcc or the linker says if it fails.

    It is the same whatever torch is here: CUDA's runtime is inside, and what it takes of torch is
    the stable ABI. Empty libraries stand for torch's, as not every torch has the one of CUDA.
    """
    library = temp / "cuda.so"
    temp.mkdir(parents=True, exist_ok=True)
    link = ["-shared", "-cudart=static"]
    link += ["-Xlinker", "--no-as-needed,--exclude-libs=ALL,--strip-all"]
    commands = []
    for name in ("torch_cpu", "torch_cuda"):
        empty = temp / f"lib{name}.so"
        flags = ["-shared", f"-Wl,-soname,{empty.name}", "-x", "c++", os.devnull]
        commands.append([compiler, *flags, "-o", str(empty)])
        link += [f"-L{temp}", f"-l{name}"]
    options = ["-std=c++20", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-ccbin", compiler]
    options += ["-DUSE_CUDA", STABLE_ABI, "-Icsrc", *(f"-isystem={path}" for path in includes)]
    options += ["--threads=0", *gencode(nvcc)]
    commands.append([nvcc, *options, *link, "csrc/index/cuda.cu", "-o", str(library)])
    for command in commands:
        code, said = run(*command)
        if code != 0:
            return library, said or f"{command[0]} failed"
    return library, ""


def extension_arguments() -> dict:
    compiler = find_compiler()
    if compiler is None:
        notice("no C++ compiler was found; csrc/ is not built")
        return {}
    os.environ["CXX"] = compiler
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
    except ImportError:
        notice("torch is not in the build environment; csrc/ is not built")
        return {}
    nvcc = find_nvcc()

    # With ninja, files are compiled in parallel, and only what changed; without it one by one.
    class OptionalBuild(BuildExtension):
        def build_extensions(self) -> None:
            with ThreadPoolExecutor() as pool:
                if nvcc is not None:
                    temp = Path(self.build_temp)
                    self.cuda = pool.submit(build_cuda, nvcc, compiler, include_paths(), temp)
                try:
                    super().build_extensions()
                except Exception as error:
                    notice(f"csrc/ could not be built and is left out: {error}")
                    self.extensions.clear()
            made = {extension.name for extension in self.extensions}
            for name in {"fastplm._C", CUDA_LIBRARY} - made:
                for old in Path().glob(f"{name.replace('.', '/')}.*"):  # of an earlier build
                    old.unlink()

        def build_extension(self, extension: Extension) -> None:
            if extension.name != CUDA_LIBRARY:
                super().build_extension(extension)
                return
            library, said = self.cuda.result()
            if said:
                why = f"the CUDA code of csrc/ could not be built: {said}"
                notice(f"{extension.name} is left out: {why}")
                # A new list, as somebody may be iterating over this one.
                self.extensions = [each for each in self.extensions if each is not extension]
            else:
                self.copy_file(str(library), self.get_ext_fullpath(CUDA_LIBRARY))

    flags = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", f"-Wframe-larger-than={MOST_FRAME}"]
    sources = sorted(path for path in Path("csrc").glob("*/*.*") if path.parent.name != "python")
    extensions = [
        CppExtension(
            "fastplm._C",
            [str(path) for path in sources if path.suffix == ".cpp"],
            include_dirs=[str(Path("csrc").resolve())],
            depends=[str(path) for path in sources],
            extra_compile_args={"cxx": [*flags, STABLE_ABI]},
            # Before torch's libraries: they export parts of libstdc++ that they were built with,
            # and what is found there first is asked of every later torch.
            libraries=["stdc++"] if sys.platform == "linux" else [],
            py_limited_api=True,
        ),
    ]
    if nvcc is not None:
        extensions.append(Extension(CUDA_LIBRARY, [], py_limited_api=True))
    # They hold no Python symbol, so one wheel serves all from 3.10 on.
    return {
        "ext_modules": extensions,
        "cmdclass": {"build_ext": OptionalBuild},
        "options": {"bdist_wheel": {"py_limited_api": "cp310"}},
    }


setup(
    packages=PACKAGES,
    package_dir={"fastplm.triton_kernels": "triton_kernels"},
    **extension_arguments(),
)
