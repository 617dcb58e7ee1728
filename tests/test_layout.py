"""The rules of the tree: one stem for an op, imports that point down, one way to launch."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

import fastplm.ops  # noqa: F401 (fills OPS)
from fastplm._registry import OPS

from .mutations import MUTATIONS
from .quick import OF_SLOW_LANE, THOROUGH

ROOT = Path(__file__).parent.parent
#: The upper storey from top to bottom: a package or module may import those of the lines below its
#: own, none of the same line and none above.
RECIPES = (
    *(("__main__",), ("cli",), ("study",), ("distill",), ("pretrain", "finetune")),
    *(("inference", "classic"), ("run",), ("data",)),
)
#: The core, in the same way.
CORE = (
    *(
        ("graphs",),
        ("models",),
        ("hf", "_explain", "_measure"),
        ("_judge", "flash_attn", "nn"),
        ("ops",),
    ),
    *(("reference",), ("_registry",), ("_autograd",), ("_backends", "_declare", "_rules")),
    *(("_checks", "_machine", "_modes"), ("errors", "_extension", "_budget")),
)
#: The tests' own module, and the kernels, which have a test of their own.
ASIDE = ("testing", "triton_kernels")
#: What ``import fastplm.ops`` must not load: what the recipes and the models need.
UPSTAIRS = ("transformers", "tokenizers", "datasets", "safetensors", "huggingface_hub", "yaml")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, tree: ast.AST | None = None) -> set[str]:
    """Absolute names of all modules a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(tree or tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the full name"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
            names.add(str(node.module))
    return names


def modules(folder: str, pattern: str = "*.py") -> set[str]:
    return {p.stem for p in (ROOT / folder).glob(pattern) if not p.stem.startswith("_")}


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_op_has_its_stem_in_every_place(op):
    kernels = (f"triton_kernels/{op}.py", f"triton_kernels/{op}/__init__.py", f"csrc/*/{op}.h")
    assert any(list(ROOT.glob(path)) for path in kernels), f"no kernels named {op}"
    for place in (
        f"fastplm/reference/{op}.py",
        f"fastplm/ops/{op}.py",
        f"tests/ops/test_{op}.py",
        f"benchmarks/test_{op}.py",
    ):
        assert (ROOT / place).exists(), f"{place} is missing"
    reference = ast.parse((ROOT / f"fastplm/reference/{op}.py").read_text())
    functions = {node.name for node in reference.body if isinstance(node, ast.FunctionDef)}
    assert f"{op}_ref" in functions


def test_nothing_stands_there_that_is_not_an_op():
    stems = set(OPS)
    assert modules("fastplm/ops") == stems
    folders = {path.parent.name for path in ROOT.glob("triton_kernels/*/__init__.py")}
    assert modules("triton_kernels") | folders <= stems
    assert {stem.removeprefix("test_") for stem in modules("tests/ops", "test_*.py")} == stems


def broken_law(importing: str, imported: str) -> str | None:
    """The law of the two storeys that is broken if one module of fastplm imports another."""
    own, other = (f"{name}.".split(".")[1] for name in (importing, imported))
    if "" in (own, other) or own == other:  # the package, which imports names when they are used
        return None
    if other == "testing":
        return "only tests and benchmarks import fastplm.testing"
    if own in ASIDE or other in ASIDE:
        return None
    lines = {name: line for line, names in enumerate((*RECIPES, *CORE)) for name in names}
    for name in (own, other):
        assert name in lines, f"fastplm.{name} has no place in the storeys of this test"
    if lines[own] < lines[other]:
        return None
    if lines[own] >= len(RECIPES) > lines[other]:
        return "the core knows nothing of the recipes"
    if lines[own] == lines[other]:
        return f"{own} and {other} know nothing of each other; what both need lies below them"
    return "imports point down"


def test_every_import_keeps_the_laws_of_the_storeys():
    found = []
    for path in python_files("fastplm"):
        if "triton_kernels" in path.parts:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for name in imports(path):
            law = broken_law(module, name) if name.startswith("fastplm.") else None
            if law is not None:
                found.append(f"{path.relative_to(ROOT)} imports {name}: {law}")
    assert not found, "\n".join(found)


def test_the_ops_load_nothing_of_the_upper_storey():
    script = "import sys, fastplm.ops; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = [name.split(".") for name in run.stdout.split()]
    packages = {name[0] for name in loaded}
    assert "torch" in packages and not packages.intersection(UPSTAIRS)
    core = {name for line in CORE for name in line}
    assert {name[1] for name in loaded if name[0] == "fastplm" and len(name) > 1} <= core


def import_graph() -> dict[str, set[str]]:
    """The modules of fastplm that each imports, also in functions, but not for types alone."""
    paths = {}
    for folder, package in (("fastplm", "fastplm"), ("triton_kernels", "fastplm.triton_kernels")):
        for path in python_files(folder):
            if folder == "fastplm" and "triton_kernels" in path.parts:  # a link to the other folder
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            paths[".".join((package, *parts)).removesuffix(".__init__")] = path
    del paths["fastplm"]  # every module imports it; its own imports wait for a name to be used
    graph = {}
    for module, path in paths.items():
        tree = ast.parse(path.read_text())  # changed below
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = [ast.Pass()]
        graph[module] = {name for name in imports(path, tree) if name in paths} - {module}
        # ``from fastplm.ops import linear`` imports the module linear, not its package.
        graph[module] -= {name.rpartition(".")[0] for name in graph[module]}
    return graph


def test_no_import_circles():
    """The modules that these import, directly or through others."""
    graph = import_graph()

    def reached(start: str) -> set[str]:
        found, ahead = set(), [start]
        while ahead:
            for name in graph[ahead.pop()] - found:
                found.add(name)
                ahead.append(name)
        return found

    below = {module: reached(module) for module in graph}
    circles = {
        frozenset(other for other in below[module] if module in below[other])
        for module in graph
        if module in below[module]
    }
    assert not circles


def test_kernels_import_nothing_of_fastplm_but_their_own_helpers():
    for path in python_files("triton_kernels"):
        for name in imports(path):
            if name.startswith("fastplm"):
                assert name.startswith("fastplm.triton_kernels"), f"{path} imports {name}"


def test_only_the_registry_registers():
    for path in python_files("fastplm", "triton_kernels"):
        if path.name == "_registry.py":
            continue
        tree = tree_of(path)
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        forbidden = {call for call in calls if call.startswith("torch.library.")}
        assert not forbidden, f"{path} calls {forbidden}"


def test_kernels_are_launched_by_keyword_through_launch():
    for path in python_files("triton_kernels"):
        if path.name.startswith("_"):
            continue
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            assert not (
                isinstance(node.func, ast.Subscript) and "kernel" in ast.unparse(node.func.value)
            ), f"{path}:{node.lineno} launches a kernel itself; use launch()"
            if isinstance(node.func, ast.Name) and node.func.id == "launch":
                assert len(node.args) == 3, f"{path}:{node.lineno}: kernel, grid, device, keywords"


@pytest.mark.parametrize(
    "folder", ("fastplm/ops", "fastplm/nn", "fastplm/models", "triton_kernels")
)
def test_no_host_sync_in_hot_paths(folder):
    """``.item()`` and the like stop a GPU; functions for the CPU alone say so by their name."""
    for path in python_files(folder):
        for function in ast.walk(tree_of(path)):
            if not isinstance(function, ast.FunctionDef) or "cpu" in function.name:
                continue
            if function.name.startswith("_torch_"):  # the CPU's own backend
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    assert node.func.attr not in ("item", "nonzero", "tolist"), (
                        f"{path}:{node.lineno} {function.name} calls .{node.func.attr}()"
                    )


#: What makes tensors on the device of ``torch.device`` blocks, unless it is told another one.
MAKERS = {f"torch.{maker.__name__}" for maker in _device_constructors()}
#: What a module owns is made there on purpose, as PyTorch's own modules do.
OWNED = ("nn.Parameter", "self.register_buffer")


def on_any_device(tree: ast.AST) -> list[str]:
    """The calls that make a tensor on no device of their own."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    owned = {
        id(node) for call in calls if ast.unparse(call.func) in OWNED for node in ast.walk(call)
    }
    return [
        f"{call.lineno} {ast.unparse(call)}"
        for call in calls
        if ast.unparse(call.func) in MAKERS and id(call) not in owned
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]


def test_a_tensor_is_made_on_a_named_device():
    """A ``torch.device`` block of the user's, or ``torch.set_default_device``, changes nothing."""
    for path in python_files("fastplm", "triton_kernels"):
        assert not on_any_device(tree_of(path)), path


@pytest.mark.parametrize("op", sorted(OPS))
def test_the_documentation_says_the_shapes_declared(op):
    function = getattr(fastplm.ops, op)
    doc = inspect.getdoc(function)
    documented = doc[doc.index("Args:") : doc.index("Returns:")]
    found = 0
    for argument in OPS[op].arguments.tensors:
        if argument.shape is None or argument.name not in inspect.signature(function).parameters:
            continue
        text = argument.shape.text.replace(" > 0", "").replace("[...]", "[...").removesuffix("]")
        line = re.search(rf"^ +[\w, ]*\b{argument.name}\b[\w, ]*: ([^:]*)", documented, re.M)
        assert line and (text in line[1] or "shape of `" in line[1] or text == "["), argument
        found += 1
    assert found > 0 or op in ("dropout", "gelu")


def test_no_function_is_longer_than_80_lines():
    """The lines of its docstring do not count."""
    found = []
    for path in python_files("fastplm"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                doc = node.body[0] if ast.get_docstring(node) is not None else None
                own = 0 if doc is None else doc.end_lineno - doc.lineno + 1
                if node.end_lineno - node.lineno + 1 - own > 80:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    assert not found


def test_the_cuda_library_registers_each_op_that_runs_there():
    text = (ROOT / "csrc/index/cuda.cu").read_text()
    there = [name for name, op in OPS.items() if "cuda" in op.backends]
    assert sorted(there) == sorted(re.findall(r'library\.impl\("(\w+)", Operator', text))


def test_contributing_lists_every_environment_variable():
    """fastplm's own variables, and those of others that the library and its build read."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Environment variables")[1]
    listed = set(re.findall(r"`([A-Z][A-Z_]+)`", text))
    paths = [*python_files("fastplm", "triton_kernels", "tests"), ROOT / "setup.py"]
    paths += [path for path in (ROOT / "csrc").rglob("*.*")]
    of_ours, of_others = (
        r"\bFASTPLM_[A-Z]+(?:_[A-Z]+)*\b",
        r"(?:environ(?:\.get\(|\[)|getenv\()\"(\w+)\"",
    )
    read = set()
    for path in paths:
        source = path.read_text()
        read |= set(re.findall(of_others, source)) if "tests" not in path.parts else set()
        if path.suffix == ".py":
            read |= {name for name in re.findall(of_ours, source)}
    assert listed == read - {"PATH"}


def test_each_planted_bug_still_has_a_place():
    """So text that changes cannot leave tests/planted_bugs.txt behind."""
    lost = [each for each in MUTATIONS if (ROOT / each.file).read_text().count(each.old) != 1]
    assert lost == []


def test_each_thorough_test_is_there():
    for name in (*THOROUGH, *OF_SLOW_LANE):
        file, _, function = name.split("[")[0].partition("::")
        assert f"def {function}" in (ROOT / file).read_text(), name


def test_scripts_import_what_there_is():
    """No test runs most of them."""
    lost = []
    for path in python_files("benchmarks", "studies", "examples"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fastplm"):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name) and not _is_module(f"{node.module}.{name}"):
                        lost.append(f"{path.relative_to(ROOT)} imports {node.module}.{name}")
    assert not lost


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
