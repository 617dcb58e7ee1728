"""The launches, bytes and FLOPs of a training step on a CUDA device that does not exist.

``fake_cuda.cpp``, preloaded, lets fake tensors lie on "cuda": a step runs forward, backward and
optimizer as on a GPU, and computes nothing. Each operator that reaches PyTorch counts as one launch
that reads its inputs and writes its outputs. A compiled step is what Inductor would launch: its own
scheduler fuses for an H100, and stops before Triton. The time of a launch on an H100 is at least
the largest of its bytes over 2.9 TB/s, its FLOPs over 700 TFLOP/s, and 2 us.

The model does not know caches, overlap, a late host, kernels that are slower than that, or work in
an operator of ours beyond its inputs and outputs, its products and attention excepted; such an
operator is one launch even if it has several kernels. ``benchmarks/step_report.py`` has the cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
BYTES_A_SECOND, FLOPS_A_SECOND, LAUNCH_SECONDS = 2.9e12, 7.0e14, 2e-6
SMS = 132

# --- the device -----------------------------------------------------------------------------------


def find_compiler() -> str | None:
    """The compiler that setup.py takes."""
    candidates = (os.environ.get("CXX"), sysconfig.get_config_var("CXX"), "c++", "g++", "clang++")
    names = (shlex.split(candidate)[0] for candidate in candidates if candidate)
    return next((name for name in names if shutil.which(name)), None)


def build() -> Path:
    """The library of ``fake_cuda.cpp`` for the PyTorch that is installed."""
    compiler, text = find_compiler(), SOURCE.read_bytes()
    if compiler is None:
        raise SystemExit(f"{SOURCE.name} needs a C++ compiler")
    folder = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    digest = hashlib.sha256(
        text + str(folder).encode() + importlib.metadata.version("torch").encode()
    ).hexdigest()[:12]
    library = SOURCE.parents[1] / "build" / f"fake_cuda-{digest}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        written = library.with_suffix(f".{os.getpid()}")
        command = [compiler, "-shared", "-fPIC", "-O1", "-std=c++20", f"-I{folder / 'include'}"]
        command += [str(SOURCE), "-o", str(written), f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu"]
        command.append(f"-Wl,-rpath,{folder / 'lib'}")
        subprocess.run(command, check=True)
        written.replace(library)  # by one step, as another process may build it, too
    return library


def run_preloaded() -> int | None:
    """Run this program again with the library preloaded; None = it is, and its exit status."""
    if SOURCE.stem in os.environ.get("LD_PRELOAD", ""):
        del os.environ["LD_PRELOAD"]  # a compiler that this process starts needs no device
        return None
    environment = os.environ | {"LD_PRELOAD": str(build()), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


@contextlib.contextmanager
def fake_device(as_real: bool, traced: bool = False) -> Iterator[Any]:
    """Give a mode of fake tensors, and answer what PyTorch asks of a GPU as an H100 would.

    Args:
        as_real: tensors do not say that they are fake. Then a model reads the values that it would
            read on a GPU, and ``counter`` says where.
        traced: Transformers knows that it is traced.
    """
    import torch
    import transformers.utils.import_utils as installed
    from torch._inductor import scheduler
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import proxy_tensor

    from fastplm import _modes

    h100 = dict(multi_processor_count=SMS, regs_per_multiprocessor=65536, warp_size=32)
    h100 |= dict(major=9, max_threads_per_multi_processor=2048, max_threads_per_block=1024)
    found = DeviceProperties(type="cuda", index=0, cc=90, **h100)
    patches: list[tuple[Any, str, Any]] = [
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.nn.functional, "scaled_dot_product_attention", _flash()),
        # It draws again what lies too far out, so it reads what it has drawn.
        (torch.nn.init, "_no_grad_trunc_normal_", lambda weight, *_, **__: weight),
        (DeviceProperties, "create", lambda device: found),
        (scheduler, "has_triton", lambda *_: True),
    ]
    if as_real:
        patches.append((_modes, "FakeTensor", ()))
        patches.append((installed, "is_fake_tensor", lambda tensor: False))
    if traced:
        # DeBERTa moves numbers to the device, where PyTorch would compute with them.
        patches.append((proxy_tensor, "CONSTANT_NUMEL_LIMIT", 0))
        patches.append((installed, "is_torchdynamo_compiling", lambda: True))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        yield FakeTensorMode(allow_non_fake_inputs=True)


def _flash() -> Callable[..., Any]:
    """Stands for SDPA: one kernel a direction, as a flash kernel, also with a mask or bias."""
    import torch
    from torch import Tensor

    def forward(
        query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool
    ) -> Tensor:
        return torch.empty_like(query)

    def backward(
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        out: Tensor,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        learned = bias is not None and bias.is_floating_point()
        of_bias = query.new_empty(bias.shape if bias is not None and learned else 0)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_bias

    def save(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:-1], output)
        ctx.is_causal = inputs[-1]

    def gradients(ctx: Any, grad: Tensor) -> Any:
        *found, of_bias = torch.ops.sdpa.attention_bwd(grad, *ctx.saved_tensors, ctx.is_causal)
        return (*found, of_bias if of_bias.numel() else None, None)

    if not hasattr(torch.ops.sdpa, "attention_fwd"):
        for name, function in dict(fwd=forward, bwd=backward).items():
            function.__annotations__ = typing.get_type_hints(function, localns=locals())
            made = torch.library.custom_op(f"sdpa::attention_{name}", function, mutates_args=())
            made.register_fake(function)
            if name == "fwd":
                made.register_autograd(gradients, setup_context=save)

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **_: Any,
    ) -> Any:
        given = [query, key, value, attn_mask]
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            given = [x if x is None or x.dtype is torch.bool else x.to(dtype) for x in given]
        return torch.ops.sdpa.attention_fwd(*given, is_causal)

    return attention


# --- what a launch costs --------------------------------------------------------------------------


class Launch(NamedTuple):
    part: str  # forward, backward or optimizer
    name: str
    bytes: int
    flops: int = 0

    @property
    def seconds(self) -> float:
        return max(self.bytes / BYTES_A_SECOND, self.flops / FLOPS_A_SECOND, LAUNCH_SECONDS)

    @property
    def is_product(self) -> bool:
        return self.flops > 0 and "attention" not in self.name


class Batch(NamedTuple):
    """What an operator's inputs do not show: their values.

    Args:
        labelled: tokens with a label.
        spread: the mean of the squared lengths over the square of their mean.
    """

    labelled: int
    spread: float = 1.0


#: Queries that a program of attention has at the most (triton_kernels/attention/configs.py).
TILE_OF_QUERIES = 128
#: Operators without a kernel: views, and memory that is allocated.
NO_KERNEL = frozenset(
    """
    view t transpose detach detach_ expand unsqueeze squeeze slice select alias _unsafe_view permute
    as_strided unbind split split_with_sizes chunk reshape _reshape_alias view_as unflatten diagonal
    empty empty_like empty_strided new_empty new_empty_strided lift_fresh device promote_types
    sym_size sym_numel sym_stride is_same_size set_ resize_ unfold real view_as_real narrow
    """.split()
)
#: Operators that do not read their first argument, and those that read no more than they write.
ONLY_WRITTEN = frozenset(
    "copy_ fill_ zero_ zeros_like ones_like full_like new_zeros new_ones new_full".split()
)
LOOKED_UP = frozenset("embedding index index_select gather gather_rows_fwd".split())
#: Operators that wait for the device, as the host reads a value.
READS = frozenset(
    """
    _local_scalar_dense item is_nonzero equal nonzero nonzero_numpy masked_select unique_dim _unique
    _unique2 unique_consecutive repeat_interleave allclose
    """.split()
)
#: Operators that look for the elements of a mask that are True.
INDEXED = frozenset("index index_put index_put_ _index_put_impl_".split())


def _tensors(values: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]


def _named(operator: Any, arguments: Any, keywords: Any) -> dict[str, Any]:
    names = (argument.name for argument in operator._schema.arguments)
    return dict(zip(names, arguments, strict=False)) | dict(keywords)


def _size(tensor: Any) -> int:
    """Bytes of a tensor; those that an expanded one repeats are read once."""
    if not tensor.numel():
        return 0
    stored = tensor.untyped_storage().nbytes()
    return min(int(tensor.numel() * tensor.element_size()), int(stored))


def flops(name: str, given: dict[str, Any], batch: Batch) -> int:
    """FLOPs of the products in an operator; 0 if it has none."""
    if name.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm"):
        right = next(given[key] for key in ("mat2", "batch2") if key in given)
        left = next(given[key] for key in ("mat1", "batch1", "self") if key in given)
        return 2 * math.prod(left.shape) * right.shape[-1]
    forward = not name.endswith("_bwd")
    if "attention" in name and "query" in given:
        query, key = given["query"], given["key"]
        keys = key.shape[-2]
        if (bounds := given.get("cu_seqlens_k", given.get("cu_seqlens"))) is not None:
            keys = key.shape[0] / (bounds.shape[0] - 1) * batch.spread
        share = 0.5 if given.get("is_causal") else 1.0
        left, right = given.get("window_left", -1), given.get("window_right", -1)
        if left >= 0 or right >= 0:  # a tile of queries computes all keys that one of them sees
            sides = [keys if one < 0 else one for one in (left, 0 if share < 1 else right)]
            keys, share = min(keys * share, sum(sides) + TILE_OF_QUERIES), 1.0
        products = 2 if forward else 5
        if name.startswith("disentangled"):  # a tile's two blocks of places, for each table
            products += (2 if forward else 9) * len(_tables(given))
        return int(2 * products * query.numel() * keys * share)
    if name.startswith("linear_cross_entropy"):
        rows, weight = batch.labelled, given["linear_weight"]
        if not forward:  # logits that were not kept are computed again
            rows = 3 * rows - min(rows, given["grad_logits"].shape[0])
        return 2 * rows * weight.numel()
    return 0


def _tables(given: dict[str, Any]) -> list[Any]:
    """The tables of positions of disentangled attention."""
    return [given[name] for name in ("pos_key", "pos_query") if given[name] is not None]


def moved(name: str, given: dict[str, Any], made: Any) -> int:
    """Bytes that an operator reads and writes."""
    written = sum(map(_size, _tensors(made)))
    if name in LOOKED_UP:
        return 2 * written + sum(_size(x) for x in _tensors(given) if not x.is_floating_point())
    if name == "embedding_dense_backward":
        return written + _size(given["grad_output"])
    if name == "add_rows_":  # as many rows of the table are read and written, at the most
        rows = _size(given["rows"])
        return rows + 2 * min(rows, _size(given["table"])) + _size(given["ids"])
    if name == "disentangled_attention_bwd":
        # The fp32 sums of places, one set for each SM, are no output; zeroed, written, and read.
        query, bounds = given["query"], given["cu_seqlens"]
        places = 2 * (query.shape[2] if bounds is None else given["max_seqlen"]) - 1
        heads = query.shape[1]
        sums = 4 * max(1, SMS // heads) * heads * places * query.shape[-1]
        written += 3 * sums * len(_tables(given))
    read = {key: value for key, value in given.items() if not key.startswith("out")}
    if name in ONLY_WRITTEN:
        read.pop("self")
    return written + sum(map(_size, _tensors(read)))


class ReadsValue(RuntimeError):
    """The host reads a value of a tensor on the device, so it waits for all launches before."""


def counter(batch: Batch, may_read: bool) -> Any:
    """A context that collects ``launches``, the list of a step's, whose ``part`` you set.

    Args:
        may_read: without it an operator that reads a value raises ``ReadsValue``, with its line.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        part = "forward"

        def __init__(self) -> None:
            super().__init__()
            self.launches: list[Launch] = []

        def __torch_dispatch__(
            self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            space, name = op._schema.name.split("::")
            given = _named(op, args, kwargs or {})
            if not may_read and _reads(name, given):
                raise ReadsValue(f"{space}::{name} in {self.part}, {_line()}")
            out = op(*args, **(kwargs or {}))
            on_device = any(x.is_cuda for x in _tensors((given, out)))
            if on_device and name not in NO_KERNEL and space != "prim":
                cost = moved(name, given, out), flops(name, given, batch)
                self.launches.append(Launch(self.part, f"{space}.{name}", *cost))
            return out

    def _reads(name: str, given: dict[str, Any]) -> bool:
        tensors = _tensors(given)
        if not any(x.is_cuda for x in tensors):
            return False
        if name in INDEXED:
            return any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(given["indices"]))
        to = given.get("device") if name == "_to_copy" else None
        if name == "copy_" and not given["self"].is_cuda:
            to = given["self"].device
        return name in READS or (to is not None and torch.device(to).type == "cpu")

    return Count()


def _line() -> str:
    """The innermost line of Python that is not PyTorch's, nor of this file."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and path != __file__ and not path.startswith("<"):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "by no line of Python"


# --- a step ---------------------------------------------------------------------------------------

#: Makes a model, in training mode.
Make = Callable[[], Any]
#: The names of a model's inputs, each with shape and dtype; or any other value.
Inputs = dict[str, Any]


def _on_device(inputs: Inputs) -> dict[str, Any]:
    import torch

    return {
        name: torch.empty(value.shape, dtype=value.dtype) if _tensors(value) else value
        for name, value in inputs.items()
    }


def step(make: Make, inputs: Inputs, batch: Batch, *, may_read: bool = False) -> list[Launch]:
    """The launches of forward and backward.

    Args:
        inputs: tensors among them lie anywhere; only their shapes and dtypes are used.
        may_read: the step may read values, see ``counter``. As there are none, tensors then say
            that they are fake, and a model does what it does in a trace.
    """
    import torch

    with fake_device(as_real=not may_read) as mode, mode:
        with torch.device("cuda"):
            model, given = make(), _on_device(inputs)
        with counter(batch, may_read) as count:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**given).loss
            count.part = "backward"
            loss.backward()
    return count.launches


def update(make: Make, *, fused: bool = True) -> list[Launch]:
    """The launches of clipping and AdamW, in their second step.

    Args:
        fused: one kernel for all parameters, as in Trainer; else "foreach" with ``capturable``, as
            the counts of steps would lie on the CPU otherwise, and be read there.
    """
    import torch

    with fake_device(as_real=True) as mode, mode:
        with torch.device("cuda"):
            model = make()
        options: dict[str, bool] = (
            dict(fused=True) if fused else dict(foreach=True, capturable=True)
        )
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        with counter(Batch(0), may_read=False) as count:
            count.part = "optimizer"
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
    return count.launches


def compiled_step(make: Make, inputs: Inputs, batch: Batch) -> list[Launch]:
    """The launches of forward and backward under ``torch.compile``, as Inductor fuses them."""
    import torch
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._inductor import compile_fx, config
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    found: list[Launch] = []

    def compiler(part: str) -> Callable[..., Any]:
        def compile(graph: Any, examples: Any) -> Any:
            is_backward = part == "backward"  # it compiles in another thread
            with V.set_fake_mode(mode), config.patch(joint_graph_constant_folding=False):
                compile_fx._recursive_post_grad_passes(graph, is_inference=False)
                lowering = GraphLowering(graph, examples, mode.shape_env, is_backward=is_backward)
            with V.set_fake_mode(mode), V.set_graph_handler(lowering), DebugContext():
                lowering.run(*examples)
                lowering.init_wrapper_code()
                lowering._update_scheduler()
                for node in lowering.scheduler.nodes:
                    if type(node.node).__name__ not in ("MultiOutput", "NopKernelSchedulerNode"):
                        size = int(node.get_read_write_buffers_sizes())
                        found.append(Launch(part, *_inductor(node, size, batch)))
            (outputs,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
            values = [getattr(one, "meta", {}).get("val", one) for one in outputs]
            return make_boxed_func(lambda *_: values)  # nothing runs

        return compile

    with fake_device(as_real=False, traced=True) as mode:
        with mode, torch.device("cuda"):
            model, given = make(), _on_device(inputs)
        state = dict(model.named_parameters()) | dict(model.named_buffers())

        def run(values: list[Any], tensors: dict[str, Any]) -> Any:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                named = dict(zip(state, values, strict=True))
                return torch.func.functional_call(model, named, (), others | tensors).loss

        tensors = {name: value for name, value in given.items() if _tensors(value)}
        others = {name: value for name, value in given.items() if name not in tensors}
        function = aot_function(
            run,
            compiler("forward"),
            compiler("backward"),
            compile_fx.partition_fn,
            select_decomp_table(),
        )
        # Constants are computed on the device.
        with V.set_fake_mode(mode), config.patch(joint_graph_constant_folding=False):
            function(list(state.values()), tensors).backward()
    return found


def _inductor(node: Any, size: int, batch: Batch) -> tuple[str, int, int]:
    """(name, bytes, FLOPs) of a node of Inductor's scheduler."""
    kernels = [one.node for one in node.get_nodes()]
    for origin in (origin for kernel in kernels for origin in kernel.get_origins()):
        if node.is_extern() and hasattr(origin.target, "_schema"):
            space, name = origin.target._schema.name.split("::")
            values = [getattr(one, "meta", {}).get("val", one) for one in origin.args]
            count = flops(name, _named(origin.target, values, origin.kwargs), batch)
            if count:
                return f"{space}.{name}", size, count
    if node.is_extern():
        return f"inductor.{getattr(kernels[0], 'op_overload', None)}", size, 0
    return f"inductor.{'reduction' if node.is_reduction() else 'pointwise'}", size, 0
