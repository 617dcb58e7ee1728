"""Sample calls of each op, for the tests that apply to every op."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastplm
from fastplm import _backends, _extension, ops
from fastplm._backends import record_decisions
from fastplm._registry import OPS
from fastplm.errors import BackendError
from fastplm.ops._attention_call import _BUCKET_TABLES
from fastplm.testing import poisoned_memory

ROOM = 1 << 40  # bytes for the logits of linear_cross_entropy


class Sample(NamedTuple):
    """A call: ``function(**make(size, dtype))``. The first result has a gradient, if ``wrt``."""

    op: str
    function: Callable[..., Any]
    make: Callable[[int, torch.dtype], dict[str, Any]]
    wrt: tuple[str, ...]


def floats(*shape: int) -> Callable[[torch.dtype], Tensor]:
    return torch.randn(shape).to


def ends_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


# --- attention ------------------------------------------------------------------------------------


def attend(bias_weight=None, **inputs):
    """The op for the inputs; the bias' table is an argument, so that it gets a gradient."""
    if bias_weight is not None:
        inputs["relative_bias"] = ops.T5RelativeBias(bias_weight, True, 20)
    return (ops.attention_varlen if "cu_seqlens_q" in inputs else ops.attention)(**inputs)


def attention(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        query=floats(2, 1, size, 16)(dtype),
        key=floats(2, 1, size, 16)(dtype),
        value=floats(2, 1, size, 16)(dtype),
    )


def attention_with_all(size: int, dtype: torch.dtype) -> dict[str, Any]:
    key_mask = torch.rand(2, size) < 0.7
    key_mask[:, 0] = True
    attn_mask = torch.rand(2, 1, size, size) < 0.7
    attn_mask[..., 0] = True
    return attention(size, dtype) | dict(
        attn_mask=attn_mask,
        bias_weight=floats(16, 1)(dtype),
        key_mask=key_mask,
        is_causal=True,
        dropout_p=0.1,
        seed=torch.tensor(5),
        window=(6, 3),
    )


def attention_varlen(size: int, dtype: torch.dtype) -> dict[str, Any]:
    lengths = ends_of(torch.tensor([size, size // 3]))
    rows = size + size // 3 + 2  # two of these are spare
    return dict(
        query=floats(rows, 1, 16)(dtype),
        key=floats(rows, 1, 16)(dtype),
        value=floats(rows, 1, 16)(dtype),
        bias_weight=floats(16, 1)(dtype),
        cu_seqlens_q=lengths,
        cu_seqlens_k=lengths,
        max_seqlen_q=size,
        max_seqlen_k=size,
        dropout_p=0.1,
        seed=torch.tensor(5),
    )


def disentangled(size: int, dtype: torch.dtype) -> dict[str, Any]:
    tables = dict(pos_key=floats(16, 1, 16)(dtype), pos_query=floats(16, 1, 16)(dtype))
    key_mask = torch.rand(2, size) < 0.7
    key_mask[:, 0] = True
    return attention(size, dtype) | tables | dict(max_distance=20, key_mask=key_mask)


def disentangled_packed(size: int, dtype: torch.dtype) -> dict[str, Any]:
    ends = ends_of(torch.tensor([size, size // 3]))
    rows = {name: floats(size + size // 3 + 2, 1, 16)(dtype) for name in QKV}
    tables = dict(pos_key=floats(16, 1, 16)(dtype), pos_query=floats(16, 1, 16)(dtype))
    return (
        rows | tables | dict(cu_seqlens=ends, max_seqlen=size, dropout_p=0.1, seed=torch.tensor(5))
    )


# --- losses ---------------------------------------------------------------------------------------


def cross_entropy(logits_budget: int, **options):
    def make(size: int, dtype: torch.dtype) -> dict[str, Any]:
        target = torch.randint(0, 40, (size,))
        if logits_budget == 0:  # kept logits of ignored rows are never written, so they may differ
            target[::3] = -100
        return dict(
            input=floats(size, 32)(dtype),
            linear_weight=floats(40, 32)(dtype) / 4,
            linear_bias=floats(40)(dtype),
            target=target,
            label_smoothing=0.1,
            logits_budget=logits_budget,
            **options,
        )

    return make


def with_sample(size: int, dtype: torch.dtype) -> dict[str, Any]:
    drawn = dict(seed=torch.tensor(3), sample_index=torch.arange(size), return_statistics=True)
    return cross_entropy(0, temperature=0.7)(size, dtype) | drawn


def distillation(logits_budget: int, **options):
    def make(size: int, dtype: torch.dtype) -> dict[str, Any]:
        inputs = cross_entropy(logits_budget, **options)(size, dtype)
        del inputs["label_smoothing"]
        if logits_budget == 0:
            inputs["mask"] = torch.rand(size) < 0.7
        return inputs | dict(
            teacher_input=floats(size, 24)(dtype),
            teacher_weight=floats(40, 24)(dtype) / 3,
            teacher_bias=floats(40)(dtype),
            temperature=2.0,
        )

    return make


def distillation_topk(size: int, dtype: torch.dtype) -> dict[str, Any]:
    inputs = distillation(0, cross_entropy_weight=0.3)(size, dtype)
    inputs = {name: value for name, value in inputs.items() if "teacher" not in name}
    return inputs | dict(
        teacher_indices=torch.rand(size, 40).argsort(1)[:, :5],
        teacher_probabilities=torch.rand(size, 5).to(dtype),
    )


def detection(reduction: str):
    def make(size: int, dtype: torch.dtype) -> dict[str, Any]:
        return dict(
            input=floats(size, 40)(dtype),
            weight=floats(40)(dtype) / 6,
            bias=floats(1)(dtype),
            replaced=torch.rand(size) < 0.2,
            mask=torch.rand(size) < 0.7,
            reduction=reduction,
        )

    return make


def detection_of_ids(size: int, dtype: torch.dtype) -> dict[str, Any]:
    """A call without the options, with the labels as two tensors of ids."""
    ids, original = torch.randint(0, 3, (2, size))
    inputs = dict(input=floats(size, 40)(dtype), weight=floats(40)(dtype) / 6)
    return inputs | dict(replaced=(ids, original), normalizer=torch.tensor(7.0), return_counts=True)


# --- rows -----------------------------------------------------------------------------------------


def gathered(size: int, dtype: torch.dtype) -> dict[str, Any]:
    positions = torch.randint(0, size, (size // 2,))
    positions[::4] = -1
    return dict(input=floats(size, 40)(dtype), positions=positions)


def matched(size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Pairs of sets, some without anything to match, and spare rows."""
    sizes_q, sizes_k = torch.tensor([size, 0, size // 3, 2]), torch.tensor([size // 2, 3, size, 0])
    return dict(
        query=floats(int(sizes_q.sum()) + 2, 40)(dtype),
        key=floats(int(sizes_k.sum()) + 1, 40)(dtype),
        cu_seqlens_q=ends_of(sizes_q),
        cu_seqlens_k=ends_of(sizes_k),
        max_seqlen_q=size,
        max_seqlen_k=size,
    )


def embedded(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(
        input_ids=torch.randint(0, 30, (size,)),
        word_weight=floats(30, 40)(dtype),
        position_ids=torch.arange(size) % 12,
        position_weight=floats(12, 40)(dtype),
        token_type_ids=torch.randint(0, 2, (size,)),
        token_type_weight=floats(2, 40)(dtype),
        weight=1 + floats(40)(dtype) / 2,
        bias=floats(40)(dtype),
        padding_idx=0,
        dropout_p=0.3,
        seed=torch.tensor(5),
    )


def product(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(input=floats(size, 40)(dtype), weight=floats(33, 40)(dtype), bias=floats(33)(dtype))


def product_int8(size: int, dtype: torch.dtype) -> dict[str, Any]:
    weight, scale = ops.quantize_int8(torch.randn(33, 40))
    of_both = dict(input=floats(size, 40)(dtype), bias=floats(33)(dtype))
    return of_both | dict(weight=weight, scale=scale)


def normalized(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(input=floats(size, 40)(dtype), weight=1 + floats(40)(dtype) / 2)


def activated(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(input=floats(size, 40)(dtype), approximate="tanh")


def gated(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(input=floats(size, 40)(dtype), activation="silu")


def activated_with_bias(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return activated(size, dtype) | dict(bias=floats(40)(dtype))


def dropped(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return dict(input=floats(size, 40)(dtype), p=0.3, seed=torch.tensor(5))


def dropped_rows(size: int, dtype: torch.dtype) -> dict[str, Any]:
    rows = torch.arange(size)
    return dropped(size, dtype) | dict(sample_index=rows // 3 << 33, position=rows % 3)


def added(size: int, dtype: torch.dtype) -> dict[str, Any]:
    rows = dict(input=floats(size, 40)(dtype), residual=floats(size, 40)(dtype))
    return rows | dict(weight=1 + floats(40)(dtype) / 2, dropout_p=0.3, seed=torch.tensor(5))


def added_with_all(size: int, dtype: torch.dtype) -> dict[str, Any]:
    rows, biases = torch.arange(size), dict(bias=floats(40)(dtype), linear_bias=floats(40)(dtype))
    numbers = dict(sample_index=rows // 3 << 33, position=rows % 3)
    return added(size, dtype) | biases | numbers | dict(return_sum=True)


# --- tokens ---------------------------------------------------------------------------------------


def rows_of_ids(size: int) -> dict[str, Any]:
    return dict(
        input_ids=torch.randint(10, 1000, (3, size)),
        sample_index=torch.randint(0, 2**50, (3,)),
        seed=torch.tensor(11),
        step=1,
    )


def packed_rows_of(make, longest: str):
    """The first tokens of each row, packed, and two spare tokens."""

    def packed(size: int, dtype: torch.dtype) -> dict[str, Any]:
        inputs = make(size, dtype) | {"lengths": None}
        lengths = torch.tensor([size, 0, size // 2])
        inside = torch.arange(size) < lengths[:, None]
        for name in ("input_ids", "maskable", "word_ids"):
            if name in inputs:
                inputs[name] = torch.nn.functional.pad(inputs[name][inside], (0, 2))
        if longest:
            return inputs | {"cu_seqlens": ends_of(lengths), longest: size}
        del inputs["lengths"]
        return inputs | {"cu_seqlens": ends_of(lengths)}

    return packed


def masked(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return rows_of_ids(size) | dict(
        vocab_size=1000,
        mask_token_id=3,
        maskable=torch.rand(3, size) < 0.9,
        special_ids=torch.tensor([0, 9]),
        unit="ngram",
        word_ids=torch.randint(0, 2, (3, size)).cumsum(-1),
    )


def spans(size: int, dtype: torch.dtype) -> dict[str, Any]:
    sentinels = torch.arange(1099, 999, -1)
    lengths = torch.tensor([size, 0, size // 2])
    return rows_of_ids(size) | dict(lengths=lengths, sentinel_ids=sentinels, eos_token_id=1)


def noised(size: int, dtype: torch.dtype) -> dict[str, Any]:
    return rows_of_ids(size) | dict(
        lengths=torch.tensor([size, 0, size // 2]),
        vocab_size=1000,
        mask_token_id=3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        sentence_end_ids=torch.arange(100, 1000, 9),
        special_ids=torch.tensor([0, 1, 2, 3]),
        mask_probability=0.1,
        delete_probability=0.1,
        rotate_probability=0.5,
    )


def turned(size: int, dtype: torch.dtype) -> dict[str, Any]:
    angles = torch.randn(2, size, 8).repeat(1, 1, 2)
    heads = dict(query=floats(2, 3, size, 16)(dtype), key=floats(2, 2, size, 16)(dtype))
    return heads | dict(cos=angles.cos(), sin=angles.sin())


# --- all of them ----------------------------------------------------------------------------------

QKV = ("query", "key", "value")
POSITIONS = (*QKV, "pos_key", "pos_query")
TABLES = ("word_weight", "position_weight", "token_type_weight", "weight", "bias")
PARAMETERS = ("input", "linear_weight", "linear_bias")
WEIGHTS = ("input", "weight", "bias")
ADDED = ("input", "residual", "weight", "bias", "linear_bias")


def _samples() -> dict[str, Sample]:
    of_tokens = {
        "mask_tokens": (ops.mask_tokens, masked, ""),
        "corrupt_spans": (ops.corrupt_spans, spans, "max_seqlen"),
        "bart_noise": (ops.bart_noise, noised, "max_seqlen"),
    }
    loss, detect = ops.linear_cross_entropy, ops.replaced_token_loss
    distil, js = ops.linear_distillation, dict(divergence="js", cross_entropy_weight=0.3)
    found = [
        ("attention", attend, attention, QKV),
        ("attention, all", attend, attention_with_all, (*QKV, "bias_weight")),
        ("attention, varlen", attend, attention_varlen, (*QKV, "bias_weight")),
        ("disentangled_attention", ops.disentangled_attention, disentangled, POSITIONS),
        (
            "disentangled_attention, packed",
            ops.disentangled_attention,
            disentangled_packed,
            POSITIONS,
        ),
        ("linear_cross_entropy, recomputed", loss, cross_entropy(0), PARAMETERS),
        ("linear_cross_entropy, kept", loss, cross_entropy(ROOM, reduction="none"), PARAMETERS),
        (
            "linear_cross_entropy, sampled",
            ops.linear_cross_entropy_with_sample,
            with_sample,
            PARAMETERS,
        ),
        ("linear_distillation, recomputed", distil, distillation(0, **js), PARAMETERS),
        ("linear_distillation, kept", distil, distillation(ROOM, reduction="none"), PARAMETERS),
        (
            "linear_distillation, top k",
            ops.linear_distillation_topk,
            distillation_topk,
            PARAMETERS,
        ),
        ("replaced_token_loss", detect, detection("mean"), WEIGHTS),
        ("replaced_token_loss, none", detect, detection("none"), WEIGHTS),
        ("replaced_token_loss, ids", detect, detection_of_ids, WEIGHTS[:2]),
        ("gather_rows", ops.gather_rows, gathered, ("input",)),
        ("embedding_layer_norm", ops.embedding_layer_norm, embedded, TABLES),
        ("maxsim", ops.maxsim, matched, QKV[:2]),
        ("linear", ops.linear, product, WEIGHTS),
        ("linear_int8", ops.linear_int8, product_int8, ()),
        ("rms_norm", ops.rms_norm, normalized, WEIGHTS[:2]),
        ("gelu", ops.gelu, activated, ("input",)),
        ("bias_gelu", ops.bias_gelu, activated_with_bias, ("input", "bias")),
        ("geglu", ops.geglu, gated, ("input",)),
        ("rotary", ops.rotary, turned, QKV[:1]),
        ("dropout", ops.dropout, dropped, ("input",)),
        ("dropout, rows", ops.dropout, dropped_rows, ("input",)),
        ("dropout_add_layer_norm, rms", ops.dropout_add_rms_norm, added, ADDED[:3]),
        ("dropout_add_layer_norm, all", ops.dropout_add_layer_norm, added_with_all, ADDED),
        *((op, function, make, ()) for op, (function, make, _) in of_tokens.items()),
        *(
            (f"{op}, packed", function, packed_rows_of(make, longest), ())
            for op, (function, make, longest) in of_tokens.items()
        ),
    ]
    return {name: Sample(name.split(",")[0], *rest) for name, *rest in found}


SAMPLES = _samples()
DIFFERENTIABLE = {name: sample for name, sample in SAMPLES.items() if sample.wrt}
OF_TOKENS = {
    name: sample
    for name, sample in SAMPLES.items()
    if sample.op in ("mask_tokens", "corrupt_spans", "bart_noise")
}
#: One sample for each set of kernels, as the interpreter is slow.
DISTINCT = {
    name: sample
    for name, sample in SAMPLES.items()
    if name not in ("attention", "linear_cross_entropy, sampled", "replaced_token_loss, ids")
}
#: These run in 16 bits under autocast, like nn.Linear.
IN_16_BITS = (
    "attention",
    "disentangled_attention",
    "linear_cross_entropy",
    "linear_distillation",
    "replaced_token_loss",
    "linear",
)
#: These have a second gradient; the others refuse it.
TWICE = (
    "linear",
    "rms_norm",
    "gelu",
    "bias_gelu",
    "dropout_add_layer_norm",
    "dropout",
    "rotary",
    "geglu",
)


#: Backends that take few calls of an op. The op's own tests run them.
OF_FEW_CALLS = {"attention": ("cudnn",)}


def kernels(sample: Sample) -> list[str]:
    """The backends with operators for the sample: not the reference, nor PyTorch's functions."""
    others = (*_backends.DIFFERENTIABLE, *OF_FEW_CALLS.get(sample.op, ()))
    return [name for name in OPS[sample.op].backends if name not in others]


def each_kernel(samples: dict[str, Sample] = SAMPLES):
    """``pytest.mark.parametrize`` over the samples and the backends of their ops."""
    return pytest.mark.parametrize(
        ("sample", "backend"),
        [
            pytest.param(sample, backend, id=f"{name}-{backend}")
            for name, sample in samples.items()
            for backend in kernels(sample)
        ],
    )


def each_sample(samples: dict[str, Sample] = SAMPLES):
    return pytest.mark.parametrize("sample", samples.values(), ids=samples)


# --- calls ----------------------------------------------------------------------------------------


def to(device: torch.device | str, value: Any) -> Any:
    """A structure with its tensors on the device; views on the CPU stay the same views."""
    if isinstance(value, dict):
        return {key: to(device, one) for key, one in value.items()}
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(to(device, one) for one in value)
    return value.to(device) if isinstance(value, Tensor) else value


def run(sample: Sample, backend: str, inputs: dict[str, Any]) -> Any:
    """Runs a call by a backend; skips if the backend is for other tensors or is not built."""
    tensor = next(value for value in inputs.values() if isinstance(value, Tensor))
    kind = {"cpp": "cpu", "torch": "cpu", "cuda": "cuda"}.get(backend, tensor.device.type)
    if tensor.device.type not in (kind, "meta"):
        pytest.skip(f"the {backend} backend of {sample.op} is for {kind} tensors")
    missing = {"cpp": _extension._MISSING, "cuda": _extension._CUDA_MISSING}.get(backend)
    if missing is not None:
        pytest.skip(f"the extension {missing}")
    with fastplm.use_backend(backend):
        return sample.function(**inputs)


def first(results: Any) -> Tensor:
    return results[0] if isinstance(results, tuple) else results


def leaves(sample: Sample, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, with gradients on."""
    return inputs | {name: inputs[name].detach().requires_grad_() for name in sample.wrt}


@cache
def _upstream(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def upstream_of(out: Tensor) -> Tensor:
    """The same numbers for each output of a shape. Do not change them. A second call copies nothing
    from the CPU, so a CUDA graph can capture it."""
    draw = _upstream if type(out) is Tensor else _upstream.__wrapped__  # others live in their mode
    return draw(out.shape, out.dtype, out.device)


def results_and_grads(sample: Sample, backend: str, inputs: dict[str, Any]) -> list[Tensor]:
    """All results of a call, and all gradients for a random gradient of the first result."""
    inputs = leaves(sample, inputs)
    with poisoned_memory():
        results = run(sample, backend, inputs)
        out = first(results)
        wrt = [inputs[name] for name in sample.wrt]
        grads = torch.autograd.grad(out, wrt, upstream_of(out)) if wrt else ()
    return [one.detach() for one in (*tree_leaves(results), *grads)]


class Operators(TorchDispatchMode):
    """The operators of fastplm that run inside, and their arguments; and the names of all."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple]] = []
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.split("::")[1])
        if func.namespace == "fastplm":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


# --- csrc/ and the reference of ops on tokens -----------------------------------------------------


def run_compiled(function: Callable[..., Any], device: torch.device, inputs: dict[str, Any]) -> Any:
    """Runs csrc/ on this device; views on the CPU stay the same views."""
    backend = {"cpu": "cpp", "cuda": "cuda"}[device.type]
    try:
        with fastplm.use_backend(backend), poisoned_memory():
            return function(**to(device, inputs))
    except BackendError as error:
        pytest.skip(f"backend {backend}: {error}".splitlines()[0])


def assert_same(got: Any, expected: Any) -> None:
    """Checks that all tensors have the same bits, on any devices."""
    got, expected = tree_leaves(got), tree_leaves(expected)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype is other.dtype and torch.equal(one.cpu(), other.cpu())


# --- inside modes ---------------------------------------------------------------------------------


def _inside(block: Any) -> Callable[[Callable[[], Any]], Any]:
    def run(function: Callable[[], Any]) -> Any:
        with block:
            return function()

    return run


def _on_default_device(function: Callable[[], Any]) -> Any:
    torch.set_default_device("meta")
    try:
        return function()
    finally:
        torch.set_default_device(None)


def _with_fakes(function: Callable[[], Any]) -> None:
    # What looks at values ends there.
    with contextlib.suppress(DataDependentOutputException):
        _inside(FakeTensorMode(allow_non_fake_inputs=True))(function)


def _transformed(transform: Any) -> Callable[[Callable[[], Any]], None]:
    def run(function: Callable[[], Any]) -> None:
        transform(lambda x: (function(), x.sum())[1])(torch.zeros(2))

    return run


#: What calls a function inside a mode or transform: it returns the results, where they are tensors
#: as outside.
MODES: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "torch.device": _inside(torch.device("meta")),
    "default device": _on_default_device,
    "inference_mode": _inside(torch.inference_mode()),
    "FakeTensorMode": _with_fakes,
    "vmap": _transformed(functools.partial(torch.vmap, randomness="different")),
    "grad": _transformed(torch.func.grad),
}
every_mode = pytest.mark.parametrize("mode", MODES)


def check_mode(mode: str, function: Callable[[], Any]) -> None:
    """One call of a function inside a mode changes no later one, nor does the mode change it.

    The call is the first of the process: what functions keep of their results is forgotten.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(("fastplm.hf", "fastplm.models", "fastplm.nn", "fastplm.ops")):
            for kept in vars(module).values():
                getattr(kept, "cache_clear", lambda: None)()
    _BUCKET_TABLES.clear()
    inside = MODES[mode](function)
    after = function()
    _BUCKET_TABLES.clear()
    expected = function()
    assert_same(after, expected)
    if inside is not None:
        assert_same(inside, expected[: len(inside)])


# --- which backends ran ---------------------------------------------------------------------------


def ops_of(function: Callable[..., Any], *arguments: Any) -> list[str]:
    with record_decisions() as decisions:
        function(*arguments)
    return [decision.op for decision in decisions]


def backends_of(function: Callable[..., Any], *arguments: Any) -> list[str]:
    with record_decisions() as decisions:
        function(*arguments)
    return [decision.backend for decision in decisions]
