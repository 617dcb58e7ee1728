"""A launch on a GPU takes the kernel that Triton's JIT would take. The driver is stubbed."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.compile

HEAD = """
import functools, importlib, itertools, json, sys
import host_time, torch, triton
from fastplm import ops
import compile_kernels
from fastplm.triton_kernels import _launch


def planted(self, arguments):  # a rule that forgets what is divisible by 16
    values = map(arguments.get, self.names)
    kinds = (getattr(value, "dtype", type(value)) for value in values)
    constants = map(arguments.get, self.constants)
    return (self, *constants, *((str(kind), "D") for kind in kinds))
"""

#: Every launch of every op's cases, and each again with one argument changed at a time.
KEYS = (
    HEAD
    + """
def others(value):
    if isinstance(value, torch.Tensor):
        plain = torch.empty(64, dtype=value.dtype)
        return [plain, plain[1:], plain[32:], torch.empty(64, dtype=torch.float64), None]
    if isinstance(value, int) and not isinstance(value, bool):
        return [0, 1, 2, 16, 17, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), 2**40, True]
    return [0.5, 1.0, None]


def cases():
    for op in compile_kernels.kernel_modules():
        module = importlib.import_module(f"fastplm.triton_kernels.{op}")
        for label, case in module.compile_cases():
            if label.startswith("slow: "):
                continue
            with _launch.record_launches(90) as launches:
                case()
            yield from launches


if len(sys.argv) > 1:
    _launch._CompiledKernels.key = planted
told, seen, wrong = {}, set(), set()
compiled_kernels = functools.cache(_launch._compiled_kernels)
with host_time.stubbed():
    for launch in cases():
        kernel, given = launch.kernel, launch.arguments
        found = compiled_kernels(kernel, 0, tuple(given))
        every = [given]
        for parameter in kernel.params:
            if not parameter.is_constexpr:
                name = parameter.name
                every += [given | {name: other} for other in others(given[name])]
        for arguments in every:
            _, specialization, options = found.binder(**arguments)
            key, theirs = found.key(arguments), (tuple(specialization), str(options))
            if told.setdefault(key, theirs) != theirs or not found.agrees(key, arguments):
                wrong.add(kernel.__name__)
            seen.add(kernel.__name__)
            told.setdefault(("theirs", kernel, theirs), set()).add(key)
    finer = sum(len(keys) > 1 for name, keys in told.items() if name[0] == "theirs")
    kernels = {launch.kernel.__name__ for launch in cases()}
print(json.dumps(dict(told=len(told), finer=finer, seen=sorted(seen), kernels=sorted(kernels),
                      wrong=sorted(wrong))))
"""
)

#: Calls of two ops, each twice, through ``launch`` and through the JIT alone.
CALLS = (
    HEAD
    + """
def draw(*shape, offset=0):
    flat = torch.randn(offset + torch.Size(shape).numel()).bfloat16()
    return flat[offset:].view(shape)


def calls():
    for rows, slots, offset in itertools.product((1, 40, 72), (1, 24, 32), (0, 1)):
        positions = torch.arange(slots) - 1
        for width in (64, 65, 72):
            input = draw(rows, width, offset=offset)[:, :64]
            yield lambda i=input, p=positions: ops.gather_rows(i, p)
            yield lambda i=input, p=positions[:-1]: ops.gather_rows(i, p)
    for length, keys in ((32, 32), (32, 32), (33, 48), (32, 33)):
        query, key = draw(2, 2, length, 64), draw(2, 2, keys, 64)
        yield lambda q=query, k=key: ops.attention(q, k, k)
        yield lambda q=query, k=key: ops.attention(q, k, k, scale=0.5)


def launched(driver, every):
    launches = []
    for call in every:
        launches += host_time.launches_of(call, driver)
    # What is alike between two calls on the same inputs: not where an output lies.
    alike = lambda x: (str(x.dtype), x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x
    return [
        [repr(x) for x in launch[:-1]] + [[repr(alike(x)) for x in launch[-1]]]
        if isinstance(launch[-1], tuple)
        else [repr(alike(x)) for x in launch]
        for launch in launches
    ]


def ours(launch):  # where the JIT passes hooks without a listener, there is none
    return [x for x in launch if "HookChain" not in str(x) and "LazyDict" not in str(x)
            and x != "None"]


if len(sys.argv) > 1:
    _launch._CompiledKernels.key = planted
    _launch._CompiledKernels.agrees = lambda *_: True
jit = []
real = triton.JITFunction.run
triton.JITFunction.run = lambda self, *a, **k: (jit.append(self), real(self, *a, **k))[1]
with torch.no_grad(), host_time.stubbed() as driver:
    every = list(calls())
    launched(driver, every)
    jit.clear()
    fast = launched(driver, every)
    left = len(jit)
    _launch._KERNELS.clear()
    _launch._compiled_kernels = lambda *_: None
    slow = launched(driver, every)
same = [ours(a) == ours(b) for a, b in zip(fast, slow, strict=True)]
print(json.dumps(dict(launches=len(fast), left_to_the_jit=left, jit=len(jit), same=all(same),
                      kernels=len({a[4] for a in slow}))))
"""
)

#: With hooks, debugging or instrumentation the JIT makes the launch.
HOOKED = (
    HEAD
    + """
from triton import knobs

jit = []
real = triton.JITFunction.run
triton.JITFunction.run = lambda self, *a, **k: (jit.append(self), real(self, *a, **k))[1]
told = []
hook = lambda metadata: told.append(metadata.get()["name"])
input, positions = torch.randn(64, 64), torch.arange(32)
found = {}


def count(name):
    ops.gather_rows(input, positions)
    jit.clear()
    ops.gather_rows(input, positions)
    found[name] = len(jit)


with torch.no_grad(), host_time.stubbed() as driver:
    count("nobody")
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        count("hook")
        chain.remove(hook)
        count("nobody again")
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        count("debug")
    kernel = jit and jit[0] or importlib.import_module(
        "fastplm.triton_kernels.gather_rows")._gather_rows_fwd_kernel
    kernel.add_pre_run_hook(lambda *a, **k: None)
    count("pre-run hook")
    kernel.pre_run_hooks.clear()
    count("nobody at last")
    torch._C._cuda_getCurrentRawStream = lambda device: 99
    found["stream"] = host_time.launches_of(
        lambda: ops.gather_rows(input, positions), driver)[0][3]
    found["jit after"] = len(jit)
print(json.dumps(found))
"""
)

#: The kernels that the first steps of a BERT and an ELECTRA compile, with batches of varying rows.
STEPS = (
    HEAD
    + """
from fastplm.triton_kernels import bias_gelu, dropout_add_layer_norm, embedding_layer_norm
from fastplm.triton_kernels import gather_rows, replaced_token_loss
from fastplm.triton_kernels.attention import launch

meta = lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta")


def step(rows, slots, longest, heads):
    query, key, value = meta(rows, 3, heads, 64).unbind(1)
    starts = meta(33, dtype=torch.int32)
    shared = (query, key, value, None, None, starts, starts, longest, longest, None, None)
    call = launch.Call(*shared, meta(dtype=torch.int64), None, 26, False, 0.125, False, True)
    out, stats = launch.attention_fwd(call)
    launch.attention_bwd(out, launch.Saved(call, out, stats, False))
    hidden, positions = meta(rows, 64 * heads), meta(slots, dtype=torch.int64)
    gathered = gather_rows.gather_rows_fwd(hidden, positions)
    gather_rows.gather_rows_bwd(gathered, positions, rows)
    weight, ids = hidden[0], meta(rows, dtype=torch.int64)
    table = meta(512, 64 * heads)
    tables = (ids, table, ids, table, ids, table[:2])
    shared = (tables, weight, weight, (ids[0], ids, ids))
    settings = dict(threshold=6554, keep_scale=1.1, eps=1e-12)
    embedding_layer_norm.embedding_layer_norm_fwd(*shared, **settings, dtype=torch.bfloat16)
    embedding_layer_norm.embedding_layer_norm_bwd(
        hidden, *shared, **settings, paddings=(0, -1), needs=(True,) * 4)
    bias_gelu.bias_gelu_bwd(
        bias_gelu.bias_gelu_fwd(hidden, weight, "none"), hidden, weight, "none", True)
    random = (meta(dtype=torch.int64), ids, ids)
    settings = dict(threshold=6554, keep_scale=1.1, eps=1e-12, is_rms=False)
    dropout_add_layer_norm.dropout_add_layer_norm_fwd(
        hidden, hidden, weight, weight, weight, *random, **settings)
    dropout_add_layer_norm.dropout_add_layer_norm_bwd(
        hidden, hidden, weight, weight, weight, None, *random, **settings, needs=(True,) * 5)
    loss, slope, denominator, *sums, _ = replaced_token_loss.replaced_token_loss_fwd(
        hidden, weight, weight[0], ids, ids, None, None, "mean", True, True)
    replaced_token_loss.replaced_token_loss_bwd(
        loss, slope, denominator, weight, None, None, *sums, True, True)


def kernels(longest, heads):
    found = {}
    for rows in (4096, 4097, 4104, 20000):
        for slots in (640, 641, 648):
            with _launch.record_launches(90) as launches:
                step(rows, slots, longest, heads)
            for launch in launches:
                if len(sys.argv) > 1:
                    for parameter in launch.kernel.params:
                        parameter.do_not_specialize = False
                name = launch.kernel.__name__
                found.setdefault(name, set()).add(compile_kernels.source_of(launch)[2])
    return {name: len(keys) for name, keys in found.items()}


print(json.dumps([kernels(128, 12), kernels(512, 4)]))
"""
)


def test_launches_that_share_a_kernel_are_specialised_alike_by_the_jit(run):
    (keys,) = run("-c", KEYS)
    assert keys["seen"] == keys["kernels"] and len(keys["seen"]) >= 10
    assert keys["wrong"] == []
    assert keys["told"] > 1000 and keys["finer"] == 0  # keys differ only where the JIT's do
    (planted,) = run("-c", KEYS, "planted")
    assert planted["wrong"] == planted["seen"]


def test_what_is_launched_is_what_the_jit_launches(run):
    (found,) = run("-c", CALLS)
    assert found["same"] and found["kernels"] > 2
    assert found["left_to_the_jit"] == 0 and found["jit"] == found["launches"]
    (planted,) = run("-c", CALLS, "planted")
    assert not planted["same"]


def test_the_jit_launches_where_hooks_or_debugging_ask_for_it(run):
    (found,) = run("-c", HOOKED)
    assert found["hook"] == found["debug"] == found["pre-run hook"] == 1
    assert found["nobody"] == found["nobody again"] == found["nobody at last"] == 0
    assert found["stream"] == 99 and found["jit after"] == 0


#: Kernels that load more at once if 16 divides a count, so they are compiled twice.
TWICE = {
    "_gather_rows_count_kernel",
    "_replaced_token_loss_fwd_kernel",
    "_replaced_token_loss_bwd_kernel",
    "_replaced_token_loss_sum_kernel",
}


def test_batches_of_other_sizes_compile_no_kernel_again(run):
    for found in run("-c", STEPS)[0]:
        assert len(found) >= 8
        assert all(found.pop(name) <= 2 for name in TWICE)
        assert found.pop("_add_groups_kernel") <= 4  # of several kinds of sums
        assert set(found.values()) == {1}
    for specialised in run("-c", STEPS, "planted")[0]:
        assert min(specialised.values()) > 1


def test_plain_integers_are_those_of_triton():
    import triton

    from fastplm.triton_kernels._launch import cdiv, next_power_of_2

    sizes = (*range(1, 130), 50265, 2**31 - 1, 2**31, 2**31 + 1)
    assert [next_power_of_2(n) for n in sizes] == [triton.next_power_of_2(n) for n in sizes]
    assert all(cdiv(a, b) == triton.cdiv(a, b) for a in (0, *sizes) for b in (1, 7, 128))
