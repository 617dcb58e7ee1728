"""Write attention and the losses as Hub kernels, in the layout that the package `kernels` loads.

    python tools/hub_kernel.py OUT            # Python and Triton alone, in seconds
    python tools/hub_kernel.py OUT --compiled # and csrc/ for this machine's platform, in minutes

OUT gets two repositories, as Transformers calls a kernel in one way or in the other:

    flash-attn  by flash_attn_varlen_func: packed batches, and padded ones without their padding
    attention   as the attention of a layer: padded batches, also with a bias on the scores (T5)

In each, build/ has a folder for each variant. The modules are those of fastplm.ops,
fastplm.reference and triton_kernels with relative imports, and operators of a namespace that is
unique to the build: several builds, and fastplm, may be loaded in one process. Transformers and
fastplm need not be installed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: The version of the interface: a user's code asks for it, and a change that breaks code raises it.
VERSION = 1
#: {repository: what Transformers looks for in it}. A name with "flash" in it promises to
#: sentence-transformers that the kernel takes packed batches.
ENTRIES = {
    "flash-attn": ("flash_attn_func", "flash_attn_varlen_func"),
    "attention": ("flash_attn_forward", "supports_flash_attn"),
}
LOSSES = ("linear_cross_entropy", "linear_distillation", "replaced_token_loss")
INIT = '''"""Attention, and losses over a vocabulary, with gradients. ``ops`` holds all ops."""

from . import ops
from .flash_attn import {attention}
from .ops import {losses}

__version__ = "{version}"
__all__ = {names}
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags:
- kernels
---
# Attention, and losses over a vocabulary

{attention}: attention with gradients and dropout, in fp32, fp16 and bf16, on CPUs and GPUs.
{losses}: losses that store no logits of ignored rows. Part of fastplm {version}.
"""
_IMPORT = re.compile(r"^(\s*)from fastplm(?P<rest>[\w.]*) import ", re.MULTILINE)


def sources(entry: str) -> dict[Path, str]:
    """{path in the kernel: text} of the modules of a repository, with absolute imports."""
    found = {}
    for path in (ROOT / "fastplm").glob("*.py"):
        # Without what looks at a whole installation, or at models.
        of_the_core = path.stem.startswith("_") or path.stem in ("errors", "flash_attn")
        if of_the_core and path.stem not in (
            "__init__",
            "__main__",
            "_explain",
            "_measure",
            "_judge",
        ):
            found[Path(path.name)] = path
    for folder in ("fastplm/ops", "fastplm/reference", "triton_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            found[Path(Path(folder).name, path.relative_to(ROOT / folder))] = path
    names = {"names": sorted((*ENTRIES[entry], *LOSSES, "ops"))}
    return {Path("__init__.py"): text_of(INIT, entry, **names)} | {
        name: path.read_text("utf-8") for name, path in sorted(found.items())
    }


def text_of(template: str, entry: str, **others: Any) -> str:
    lists = {"attention": ", ".join(ENTRIES[entry]), "losses": ", ".join(LOSSES)}
    return template.format(version=version(), **lists, **others)


def relative(path: Path, text: str, namespace: str) -> str:
    """The text of a module with relative imports, and with the operators of a namespace."""
    dots = "." * len(path.parts)

    def one(match: re.Match[str]) -> str:
        return f"{match[1]}from {dots}{match['rest'].removeprefix('.')} import "

    text = _IMPORT.sub(one, text)
    text = text.replace(
        'import_module(f"fastplm.', "import_module(f\"{__package__.rpartition('.')[0]}."
    )
    text = text.replace('NAMESPACE = "fastplm"', f'NAMESPACE = "{namespace}"')
    text = re.sub(r"\bfastplm_C\b", f"{namespace}_C", text)
    if (left := re.search(r"^\s*(import|from) fastplm\b.*", text, re.MULTILINE)) is not None:
        raise ValueError(f"{path}: {left[0].strip()!r} is not made relative")
    return text


def namespace_of(texts: dict[Path, str]) -> str:
    """A namespace that is unique to the sources, csrc/ included."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        digest.update(path.read_bytes())
    for path, text in texts.items():
        digest.update(f"{path}\0{text}\0".encode())
    return f"fastplm_{digest.hexdigest()[:12]}"


def compiled(namespace: str, folder: Path) -> Path:
    """The library of csrc/ for CPUs, built with a namespace. (On a GPU all of this is Triton.)"""
    # The macros that register operators expand their argument before they make a name of it.
    flags = dict.fromkeys(("CFLAGS", "CXXFLAGS"), f"-Dfastplm_C={namespace}_C")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("csrc", "fastplm", "triton_kernels"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    words = [sys.executable, "setup.py", "build_ext", "--build-lib", "lib", "--build-temp", "temp"]
    without_nvcc = {"CUDA_HOME": str(folder)}
    subprocess.run(words, cwd=folder, env=os.environ | flags | without_nvcc, check=True)
    (library,) = (folder / "lib/fastplm").glob("_C.*")
    return library


def version() -> str:
    found = re.search(r'__version__ = "(.+)"', (ROOT / "fastplm/__init__.py").read_text("utf-8"))
    assert found is not None
    return found[1]


def write(
    folder: Path, entry: str, texts: dict[Path, str], namespace: str, backend: dict[str, object]
) -> None:
    """A variant: the modules and the metadata."""
    shutil.rmtree(folder, ignore_errors=True)
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(relative(path, text, namespace), "utf-8")
    metadata = {
        "id": f"_{namespace}_{backend['type']}",
        "name": f"fastplm-{entry}",
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": backend,
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--compiled", action="store_true", help="csrc/ for this platform, too")
    args = parser.parse_args()
    for entry in ENTRIES:
        texts = sources(entry)
        namespace, build = namespace_of(texts), args.out / entry / "build"
        build.mkdir(parents=True, exist_ok=True)
        (args.out / entry / "README.md").write_text(text_of(CARD, entry), "utf-8")
        for kind in ("cpu", "cuda"):
            write(build / f"torch-{kind}", entry, texts, namespace, {"type": kind})
        if not args.compiled:
            continue
        where = f"{platform.machine()}-{platform.system().lower()}"
        with tempfile.TemporaryDirectory() as temporary:
            variant = build / f"torch-stable-abi211-cpu-{where}"
            library = compiled(namespace, Path(temporary))
            write(variant, entry, texts, namespace, {"type": "cpu"})
            shutil.copy(library, variant)


if __name__ == "__main__":
    main()
