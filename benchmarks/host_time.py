"""Host time of a call on the GPU path, without a GPU: ``python benchmarks/host_time.py``.

Small batches are bound by the host's work before the device gets a kernel. This script runs that
work without a device: the public function of an op, checks, choice of the backend, autograd, the
launcher, and Triton's part of a launch: the binding of arguments, their specialisation, the look-up
of the compiled kernel and the Python side of its launcher. At their first launch, which is not
timed, kernels are compiled to machine code for sm_90.

These parts are stubs:

- the tensors: they lie in host memory but claim to lie on ``cuda:0``. The host allocates and fills
  them, so sizes are small;
- PyTorch's CUDA runtime, as far as it gives the current device and stream;
- Triton's driver: loading a binary, and the C function that ends a launch (``utils.launch``; in
  Triton 3.6 the ``launch`` of the module that it compiles for each signature).

The figures leave out that C function (it parses the arguments and calls ``cuLaunchKernelEx``), the
caching allocator, the launches of PyTorch's own kernels, and every wait. Compare the figures with
each other, on one machine.

``--layers`` counts the calls of Python functions that a layer of each family makes, forward and
backward: the difference of a model with 3 layers and one with 2. It is exact on a busy machine,
too.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia

from fastplm import ops
from fastplm.triton_kernels._launch import shared_limit
from harness import append_row, machine_line

CALLS_A_ROUND = 100
#: The models whose layers are counted: a small one of each family.
LAYERS = [
    f"{family}-tiny" for family in ("bert", "roberta", "albert", "electra", "gpt2", "bart", "t5")
]
DEVICE = torch.device("cuda", 0)

Call = Callable[[], Any]


class Driver:
    """Triton's driver without a device; ``launches`` has the kernels that it would launch."""

    def __init__(self, arch: int = 90) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self.launches: list[tuple[Any, ...]] | None = None
        self.launcher_cls = nvidia.CudaLauncher
        self.utils = SimpleNamespace(
            launch=self.launch,
            # The stand-in for a loaded kernel differs if the machine code differs.
            load_binary=lambda name, cubin, *_: (name, hash(cubin), 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": 227 * 1024},
            build_signature_metadata=tuple,
        )

    def launch(self, *arguments: Any) -> None:
        if self.launches is not None:
            self.launches.append(arguments)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7


@contextlib.contextmanager
def stubbed(arch: int = 90) -> Iterator[Driver]:
    """Make every tensor claim to lie on a GPU, and launch nothing there."""
    driver = Driver(arch)
    module = SimpleNamespace(launch=driver.launch)
    runtime = dict(
        _cuda_getDevice=lambda: 0,
        _cuda_getCurrentRawStream=lambda device: 7,
        _cuda_exchangeDevice=lambda device: 0,
        _cuda_maybeExchangeDevice=lambda device: 0,
    )
    with contextlib.ExitStack() as stack:
        for name, function in runtime.items():
            stack.enter_context(mock.patch.object(torch._C, name, function, create=True))
        cuda = dict(
            _exchange_device=runtime["_cuda_exchangeDevice"],
            _maybe_exchange_device=runtime["_cuda_maybeExchangeDevice"],
            _lazy_init=lambda: None,
            get_device_capability=lambda device=None: divmod(arch, 10),
            get_device_properties=lambda device=None: SimpleNamespace(
                major=arch // 10,
                minor=arch % 10,
                multi_processor_count=132,
                shared_memory_per_block_optin=shared_limit(arch),
            ),
        )
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        where = dict(
            device=property(lambda tensor: DEVICE),
            is_cuda=property(lambda tensor: True),
            is_cpu=property(lambda tensor: False),
        )
        stack.enter_context(mock.patch.multiple(torch.Tensor, create=True, **where))
        for name in ("arange", "empty", "full", "ones", "randint", "tensor", "zeros"):
            stack.enter_context(mock.patch.object(torch, name, _on_host(getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "to", _stays(torch.Tensor.to)))
        # PyTorch's own products and what writes a given output are left out; nothing reads them.
        for name in ("addmm", "mm", "mul"):
            stack.enter_context(mock.patch.object(torch, name, _given_output))
        compiled = dict(compile_module_from_src=lambda **_: module, library_dirs=list)
        # The C part of the driver sets this when it is loaded: how an argument is passed.
        compiled |= dict(PyKernelArg=SimpleNamespace, ARG_CONSTEXPR=0, ARG_KERNEL=1, ARG_TUPLE=2)
        stack.enter_context(mock.patch.multiple(nvidia, create=True, **compiled))
        stack.callback(triton.runtime.driver.__dict__.update, dict(triton.runtime.driver.__dict__))
        triton.runtime.driver.set_active(driver)
        yield driver


def _given_output(
    *given: Any, out: torch.Tensor | None = None, out_dtype: Any = None, **_: Any
) -> torch.Tensor:
    """The output of a call, or an empty one of a product."""
    if out is not None:
        return out
    a, b = given[-2:]
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype)


def _stays(move: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``Tensor.to`` without a device."""

    def to(tensor: torch.Tensor, *given: Any, device: Any = None, **options: Any) -> torch.Tensor:
        given = tuple(one for one in given if not isinstance(one, str | torch.device))
        return move(tensor, *given, **options) if given or options else tensor

    return to


def _on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*arguments: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return factory(*arguments, **options)

    return make


def calls() -> dict[str, Call]:
    """The calls to time, by name: small batches of a BERT with 64 columns a head."""

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    def both(forward: Call, *leaves: torch.Tensor) -> Call:
        ones = torch.ones_like(forward())
        return lambda: torch.autograd.grad(forward(), leaves, ones)

    def only(forward: Call) -> Call:
        return torch.no_grad()(forward)

    seed, starts = torch.tensor(1), torch.tensor([0, 100, 180], dtype=torch.int32)
    seen = torch.ones(2, 128, dtype=torch.bool)
    dense = draw(2, 128, 3, 2, 64).permute(2, 0, 3, 1, 4).unbind()
    packed = [draw(192, 2, 64) for _ in range(3)]
    rows, table, vocab_bias = draw(192, 64), draw(1024, 64), draw(1024)
    positions = torch.arange(0, 160, 4)
    target = torch.randint(1024, (40,))
    chosen, weight, bias = draw(40, 64), draw(64), draw(1)
    ids = torch.randint(1024, (192,))
    mask = torch.ones(192, dtype=torch.bool)

    def attention() -> torch.Tensor:
        return ops.attention(*dense, key_mask=seen)

    def ragged() -> torch.Tensor:
        return ops.attention_varlen(*packed, starts, starts, 128, 128, dropout_p=0.1, seed=seed)

    def ragged_long() -> torch.Tensor:
        return ops.attention_varlen(*packed, starts, starts, 512, 512, dropout_p=0.1, seed=seed)

    def gather() -> torch.Tensor:
        return ops.gather_rows(rows, positions)

    def detection() -> torch.Tensor:
        return ops.replaced_token_loss(rows, weight, (ids, ids), bias=bias, mask=mask)

    def loss() -> torch.Tensor:
        return ops.linear_cross_entropy(chosen, table, target, linear_bias=vocab_bias)

    def kept_loss() -> torch.Tensor:
        return ops.linear_cross_entropy(*wide, target % 64, logits_budget=1 << 20)

    vocabulary, wide = (chosen, table, vocab_bias), (draw(40, 384), draw(64, 384))
    return {
        "attention, forward": only(attention),
        "attention ragged, forward with dropout": only(ragged),
        "attention ragged, forward + backward with dropout": both(ragged, *packed),
        "attention ragged T=512, forward + backward with dropout": both(ragged_long, *packed),
        "gather_rows, forward": only(gather),
        "gather_rows, forward + backward": both(gather, rows),
        "replaced_token_loss, forward": only(detection),
        "replaced_token_loss, forward + backward": both(detection, rows, weight, bias),
        "linear_cross_entropy, forward": only(loss),
        "linear_cross_entropy, forward + backward": both(loss, *vocabulary),
        "linear_cross_entropy of kept logits, forward + backward": both(kept_loss, *wide),
    }


def launches_of(call: Call, driver: Driver) -> list[tuple[Any, ...]]:
    """The kernels that one call would launch."""
    driver.launches = []
    call()
    launches, driver.launches = driver.launches, None
    return launches


def microseconds(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Microseconds of a call: a low percentile, as other load disturbs the higher ones."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):  # all take turns
        for name, call in calls.items():
            for _ in range(CALLS_A_ROUND):
                started = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - started) * 1e6)
    return {name: statistics.quantiles(found, n=20)[0] for name, found in times.items()}


# --- the layers of models -------------------------------------------------------------------------


def step_of(arch: str, kind: str, layers: int) -> Call:
    """A training step of a small model that ``steps.build`` makes; one of fastplm's has room."""
    from steps import Path, Step, build

    step = Step(arch, 2, 16, padding=0.3, dropout=0.1, vocab=2000, layers=layers)
    host = torch.device("cpu")
    path, batch, used = Path(kind, room=kind == "fastplm"), step.make(host), build(step, kind, host)
    if kind != "fastplm" and "sample_index" in batch:  # draws are not counted
        batch["replaced_ids"] = batch["input_ids"]

    def run() -> None:
        # The tensors lie on the CPU, so its autocast is the one that casts.
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
            loss = path.loss(used, step, batch)
        loss.backward()

    return run


def calls_of(run: Call) -> tuple[int, int]:
    """(calls of Python functions, calls of C functions from Python), the stubs' left out."""
    counts = dict(call=0, c_call=0)

    def count(frame: Any, event: str, _: Any) -> None:
        if event in counts and frame.f_code.co_filename not in (__file__, mock.__file__):
            counts[event] += 1

    sys.setprofile(count)  # a backward on the CPU runs in this thread
    try:
        run()
    finally:
        sys.setprofile(None)
    return counts["call"], counts["c_call"]


def layer_calls(arch: str, kind: str) -> tuple[int, int]:
    """(Python calls, C calls) of a layer, forward and backward."""
    changed = (
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda: True),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.Tensor, "new_empty", torch.Tensor.new_zeros),  # tokens that nothing samples
    )
    with contextlib.ExitStack() as stack:
        for patch in changed:
            stack.enter_context(mock.patch.object(*patch))
        stack.enter_context(stubbed())
        runs = [step_of(arch, kind, layers) for layers in (2, 3)]
        for run in 2 * runs:  # what is chosen once, and kept, is not counted
            run()
        (python, c), (more, more_c) = map(calls_of, runs)
    return more - python, more_c - c


def show_layers(archs: list[str], rows: Path | None) -> None:
    about = machine_line()
    print(f"{'a layer, forward and backward':<34} Python calls  C calls")
    for arch in archs:
        for kind, variant in (("fastplm", "fastplm"), ("sdpa", "transformers")):
            python, c = layer_calls(arch, kind)
            print(f"{arch:<20} {variant:<13} {python:12} {c:8}", flush=True)
            if rows is not None:
                named = {name: about[name] for name in ("date", "commit", "torch")}
                found = dict(arch=arch, variant=variant, python_calls=python, c_calls=c)
                append_row(rows, list(named | found), named | found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--only", default="", metavar="TEXT", help="calls with this in their name")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    parser.add_argument("--layers", action="store_true", help="Python calls of models' layers")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append those of --layers to it")
    options = parser.parse_args()
    if options.layers:
        show_layers([arch for arch in LAYERS if options.only in arch], options.rows)
        return 0
    print(f"Triton {triton.__version__}, PyTorch {torch.__version__}")
    print(f"{'µs a call on the host, the device stubbed':<56} µs  launches")
    with stubbed() as driver:
        timed = {name: call for name, call in calls().items() if options.only in name}
        for call in timed.values():
            call()
        launches = {name: len(launches_of(call, driver)) for name, call in timed.items()}
        times = microseconds(timed, options.rounds)
        for name, call in timed.items():
            print(f"{name:<56} {times[name]:5.0f} {launches[name]:4}")
            if options.profile:
                _profile(call)
    return 0


def _profile(call: Call) -> None:
    import cProfile
    import pstats

    with cProfile.Profile() as profile:
        for _ in range(10 * CALLS_A_ROUND):
            call()
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    sys.exit(main())
