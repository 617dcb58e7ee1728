"""The peers of the benchmarks, by their own names, as variants of a ``harness.Case``.

A benchmark file lists names and gets a ``Peer`` for each. A peer that is not installed, or does not
support the call, raises ``Unavailable`` with the reason, which becomes its row. The first result of
a peer is compared with the eager reference, on the inputs that are timed: if it differs, the row
says so and has no speed.
"""

from __future__ import annotations

import collections
import functools
import importlib
import importlib.util
import inspect
import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastplm.reference.attention import t5_buckets
from harness import SESSION, Differs, Unavailable, default_device

if TYPE_CHECKING:
    from test_attention import Shape as AttentionCall
    from test_linear_cross_entropy import Shape as LossCall

Run = Callable[..., Any]

#: T5's distances from here on share a bucket.
MAX_DISTANCE = 128
#: A peer's error may be this many times the reference's, as it may sum in another order.
LOOSE = 4.0
#: Seconds that one name may compile in one process without ``--full``; its later cases are skipped.
#: The cases of a benchmark are in the order of their importance.
COMPILE_SECONDS = 40.0 if torch.cuda.is_available() else 10.0
#: Peers that compile, or autotune, when they are first called.
COMPILES = {
    "flex_attention",
    "liger-kernel compiled",
    "cut-cross-entropy torch_compile",
    "quack",
    "quack chunked",
}


class Peer:
    """A variant that its first call builds, and compares with the reference before it is timed.

    Args:
        name: the name under which seconds of compiling are counted.
        build: makes the function; raises Unavailable if it cannot.
        reference: the eager reference of the same inputs.
        exact: builds the same function without dropout, for the comparison.
        compiles: its first call compiles, which may take ``COMPILE_SECONDS``.
    """

    spent: collections.Counter[str] = collections.Counter()

    def __init__(
        self,
        name: str,
        build: Callable[[], Run],
        reference: Run,
        exact: Callable[[], Run] | None = None,
        compiles: bool = False,
    ) -> None:
        self.name, self.build, self.reference = name, build, reference
        self.exact, self.compiles = exact, compiles
        #: A compiled function is compiled again with or without gradients.
        self.runs: dict[bool, Run] = {}

    def __call__(self, **inputs: Any) -> Any:
        mode = torch.is_grad_enabled()
        if mode in self.runs:
            return self.runs[mode](**inputs)
        run = self.build()
        if self.compiles and not SESSION.full and self.spent[self.name] >= COMPILE_SECONDS:
            raise Unavailable(f"compiling has had its {COMPILE_SECONDS:g} s; --full waits longer")
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                out = run(**inputs)
                answer = out if self.exact is None else self.exact()(**inputs)
        except RuntimeError as error:
            if reason := _unfit(error, [str(warning.message) for warning in said]):
                raise Unavailable(reason) from error
            raise
        finally:
            self.spent[self.name] += time.perf_counter() - started
        if self.compiles or not self.runs:
            hold(_first(answer), self.reference, inputs)
        self.runs[mode] = run
        return out


def _unfit(error: Exception, said: list[str]) -> str:
    """Why a library does not support the call; empty if the error is of another kind."""
    message = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if isinstance(error, NotImplementedError):
        return message or "not implemented"
    if not message.startswith(("No available kernel", "No viable backend")):
        return ""
    # PyTorch warns why each of its kernels cannot run, also of kernels that were not requested.
    lacks = [
        text.split(" (Triggered")[0]
        for text in said
        if "not used because" not in text and "runtime disabled" not in text
    ]
    return "; ".join(["no such kernel in PyTorch", *dict.fromkeys(lacks)])


def hold(out: Tensor, reference: Run, inputs: dict[str, Any]) -> None:
    """Raise Differs if ``out`` is further from the truth than ``LOOSE`` allows.

    As in ``fastplm.testing``, the truth is the reference in the next wider dtype. The limit is a
    multiple of the reference's own error plus a rounding of the largest value.
    """
    dtype = next(value.dtype for value in inputs.values() if _is_floating(value))
    wider = torch.float64 if dtype == torch.float32 else torch.float32

    def answer(dtype: torch.dtype) -> Tensor:
        with torch.no_grad():
            cast = {n: v.detach().to(dtype) if _is_floating(v) else v for n, v in inputs.items()}
            return _first(reference(**cast)).double()

    gold, base, out = answer(wider), answer(dtype), out.detach().double()
    if out.shape != gold.shape:
        raise Differs(f"{list(out.shape)} instead of {list(gold.shape)}")
    rounding = torch.finfo(dtype).eps * float(gold.abs().max())
    budget = LOOSE * (float((base - gold).abs().max()) + rounding)
    error = float((out - gold).abs().max())
    if not error <= budget:  # also true if the error is NaN
        raise Differs(f"off by {error:.3g}, where {budget:.3g} is allowed")


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _first(out: Any) -> Any:
    """The answer of a peer that may return further results."""
    return out[0] if isinstance(out, tuple) else out


def plain(function: Run, reference: Run) -> Peer:
    """A peer of hand-written PyTorch code."""
    return Peer("plain", lambda: function, reference)


def compiled(op: str, function: Run, reference: Run | None = None, **options: Any) -> Peer:
    """``torch.compile`` of ``function``, by default of the eager reference."""
    build = functools.partial(_compile, function, **options)
    return Peer(f"{op} compiled", build, reference or function, compiles=True)


def _compile(function: Run, **options: Any) -> Run:
    # Every case compiles the same functions for its own shapes.
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024
    return torch.compile(function, **options)


def _needs_cuda() -> None:
    if default_device().type != "cuda":
        raise Unavailable("needs CUDA")


def _library(package: str, module: str, cuda: bool = True) -> ModuleType:
    if importlib.util.find_spec(module.split(".")[0]) is None:
        raise Unavailable(f"{package} is not installed")
    if cuda:
        _needs_cuda()
    try:
        return importlib.import_module(module)
    # A library made for another PyTorch may raise any error while it is imported.
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise Unavailable(f"{package} does not import: {first[:120]}") from error


# --- attention ------------------------------------------------------------------------------------


def attention(names: Iterable[str], call: AttentionCall, reference: Run) -> dict[str, Peer]:
    """Peers by name; ``reference`` is the eager one without dropout, as peers draw other bits."""
    exact = replace(call, dropout_p=0.0)
    return {
        name: Peer(
            f"attention {name}",
            functools.partial(ATTENTION[name], call),
            reference,
            functools.partial(ATTENTION[name], exact) if call.dropout_p else None,
            compiles=name in COMPILES,
        )
        for name in names
    }


def _takes_no(call: AttentionCall, *features: str) -> None:
    asked = {
        "bias": call.bias,
        "dropout": call.dropout_p > 0,
        "dense mask": call.prefix,
        "key mask": call.padding > 0 and not call.ragged,
        "ragged batch": call.ragged,
        "ragged causal batch": call.ragged and call.is_causal,
        "key mask beside causality": call.padding > 0 and call.is_causal and not call.ragged,
    }
    for feature in features:
        if asked[feature]:
            raise Unavailable(f"takes no {feature}")


def sdpa(call: AttentionCall, backend: SDPBackend | None = None) -> Run:
    """T5's bias is a dense [1, H, Tq, Tk], as Transformers makes it for every layer."""
    if backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        _needs_cuda()
    _takes_no(call, "ragged batch")
    # SDPA aligns causality at the top left; the one query of a decoding step sees every key.
    is_causal = call.is_causal and call.seqlen_q > 1

    def run(query, key, value, key_mask=None, attn_mask=None, weight=None):
        mask = attn_mask if key_mask is None else key_mask[:, None, None, :]
        if weight is not None:
            mask = _dense_bias(weight, query.shape[2], key.shape[2])
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=is_causal,
            scale=call.scale,
        )

    def run_forced(**inputs):
        with sdpa_kernel(backend):
            return run(**inputs)

    return run if backend is None else run_forced


def varlen_attn(call: AttentionCall) -> Run:
    _takes_no(call, "bias", "dropout", "key mask", "dense mask")
    _needs_cuda()
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    options: dict[str, Any] = dict(scale=call.scale)
    if call.is_causal:
        options["window_size"] = (-1, 0)

    def run(query, key, value, cu_seqlens_q=None, cu_seqlens_k=None, **longest):
        dense = cu_seqlens_q is None
        if dense:
            cu_seqlens_q, cu_seqlens_k = (
                _even(tensor.shape[0], tensor.shape[2], tensor.device) for tensor in (query, key)
            )
            query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        lengths = call.seqlen_q, call.seqlen_k
        out = attend(query, key, value, cu_seqlens_q, cu_seqlens_k, *lengths, **options)
        return out.unflatten(0, (-1, call.seqlen_q)).transpose(1, 2) if dense else out

    return run


def flex(call: AttentionCall) -> Run:
    """Padding and packed batches by a block mask, T5's bias by a score_mod."""
    _takes_no(call, "dropout", "ragged causal batch")
    if default_device().type == "cpu" and torch.is_grad_enabled():
        raise Unavailable("has no backward on a CPU")
    from torch.nn.attention.flex_attention import flex_attention

    attend = _compile(flex_attention, dynamic=False)

    def run(query, key, value, key_mask=None, attn_mask=None, weight=None, **cuts):
        if call.ragged:
            query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
        buckets = None if weight is None else _buckets(call.seqlen_q, call.seqlen_k, query.device)

        def biased(score, b, h, i, j):
            return score + weight[buckets[i, j], h]

        out = attend(
            query,
            key,
            value,
            score_mod=None if weight is None else biased,
            block_mask=_block_mask(call, query.device),
            scale=call.scale,
        )
        return out[0].transpose(0, 1) if call.ragged else out

    return run


@functools.lru_cache(maxsize=2)
def _block_mask(call: AttentionCall, device: torch.device):
    """The block mask, made once, as in a model for all of its layers. All inputs have the same
    lengths."""
    from torch.nn.attention.flex_attention import create_block_mask

    lengths_k = torch.tensor(call.lengths(call.seqlen_k), device=device)
    if call.ragged:
        owner_q, owner_k = (
            torch.arange(call.batch, device=device).repeat_interleave(lengths)
            for lengths in (torch.tensor(call.lengths(call.seqlen_q), device=device), lengths_k)
        )

        def same(b, h, i, j):
            return owner_q[i] == owner_k[j]

        return create_block_mask(same, None, None, len(owner_q), len(owner_k), device=device)
    if call.prefix:
        seen = call.seen(device)

        def of_prefix(b, h, i, j):
            return seen[i, j]

        return create_block_mask(of_prefix, None, None, call.seqlen_q, call.seqlen_k, device=device)
    if not (call.padding or call.is_causal):
        return None
    cached = call.seqlen_k - call.seqlen_q

    def visible(b, h, i, j):
        exists = j < lengths_k[b]
        return exists & (j <= i + cached) if call.is_causal else exists

    batch = call.batch if call.padding else None
    return create_block_mask(visible, batch, None, call.seqlen_q, call.seqlen_k, device=device)


def flash_attn(call: AttentionCall, package: str, module: str) -> Run:
    _takes_no(call, "bias", "key mask", "dense mask")
    library = _library(package, module)
    options: dict[str, Any] = dict(softmax_scale=call.scale, causal=call.is_causal)
    if call.dropout_p:
        options["dropout_p"] = call.dropout_p

    def run(query, key, value, cu_seqlens_q=None, cu_seqlens_k=None, **longest):
        if cu_seqlens_q is None:
            projected = (t.transpose(1, 2) for t in (query, key, value))
            return _first(library.flash_attn_func(*projected, **options)).transpose(1, 2)
        cuts = cu_seqlens_q, cu_seqlens_k, call.seqlen_q, call.seqlen_k
        return _first(library.flash_attn_varlen_func(query, key, value, *cuts, **options))

    return run


def flash_attn_3(call: AttentionCall) -> Run:
    _takes_no(call, "dropout")
    return flash_attn(call, "flash-attn 3", "flash_attn_interface")


def xformers(call: AttentionCall) -> Run:
    _takes_no(call, "key mask beside causality", "dense mask")
    library = _library("xformers", "xformers.ops")
    masks = importlib.import_module("xformers.ops.fmha.attn_bias")
    bias = None
    if call.ragged:  # made once, as in a model for all of its layers
        lengths = call.lengths(call.seqlen_q), call.lengths(call.seqlen_k)
        bias = masks.BlockDiagonalMask.from_seqlens(*lengths)
        bias = bias.make_causal_from_bottomright() if call.is_causal else bias
    elif call.is_causal:
        bias = masks.LowerTriangularFromBottomRightMask()

    def run(query, key, value, key_mask=None, weight=None, **cuts):
        attn_bias = bias
        scores = (*query.shape[:3], key.shape[2]) if not call.ragged else ()
        if key_mask is not None:
            added = torch.zeros_like(key_mask, dtype=query.dtype)
            added = added.masked_fill(~key_mask, float("-inf"))
            attn_bias = added[:, None, None, :].expand(scores)
        if weight is not None:
            added = _dense_bias(weight, query.shape[2], key.shape[2])
            attn_bias = added.contiguous().expand(scores)
        if call.ragged:
            query, key, value = (t[None] for t in (query, key, value))
        else:
            query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        out = library.memory_efficient_attention(
            query, key, value, attn_bias=attn_bias, p=call.dropout_p, scale=call.scale
        )
        return out[0] if call.ragged else out.transpose(1, 2)

    return run


def _dense_bias(weight: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The bias [1, H, Tq, Tk]."""
    return weight[_buckets(seqlen_q, seqlen_k, weight.device)].permute(2, 0, 1)[None]


@functools.cache
def _buckets(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None]
    table = t5_buckets(32, True, MAX_DISTANCE)
    return table[distance.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE].to(device)


@functools.cache
def _even(batch: int, length: int, device: torch.device) -> Tensor:
    ends = list(itertools.accumulate([length] * batch, initial=0))
    return torch.tensor(ends, dtype=torch.int32, device=device)


ATTENTION: dict[str, Callable[[Any], Run]] = {
    "sdpa": sdpa,
    "sdpa flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "sdpa cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sdpa efficient": functools.partial(sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "sdpa math": functools.partial(sdpa, backend=SDPBackend.MATH),
    "varlen_attn": varlen_attn,
    "flex_attention": flex,
    "flash-attn": functools.partial(flash_attn, package="flash-attn", module="flash_attn"),
    "flash-attn 3": flash_attn_3,
    "xformers": xformers,
}


# --- linear cross-entropy -------------------------------------------------------------------------


def linear_cross_entropy(names: Iterable[str], call: LossCall, reference: Run) -> dict[str, Peer]:
    """Peers by name; ``reference`` is the eager loss, and takes a ``seed`` if the call samples."""
    return {
        name: Peer(
            f"linear_cross_entropy {name}",
            functools.partial(LINEAR_CROSS_ENTROPY[name], call),
            reference,
            compiles=name in COMPILES,
        )
        for name in names
    }


def full_logits(call: LossCall) -> Run:
    """All logits, as ``transformers.BertForMaskedLM`` computes them, and hand-written ELECTRAs."""

    def run(input, linear_weight, target, linear_bias=None, seed=None):
        logits = F.linear(input, linear_weight, linear_bias)
        loss = F.cross_entropy(logits, target)
        if not call.sampled:
            return loss
        with torch.no_grad():
            return loss, torch.multinomial(logits.float().softmax(1), 1).squeeze(1)

    return run


def rows_that_count(function: Run) -> Run:
    """Select the rows first, as in a hand-written head, which waits for the device's count."""

    def run(input, linear_weight, target, **rest):
        counts = (target != -100).nonzero().squeeze(1)
        return function(
            input=input[counts], linear_weight=linear_weight, target=target[counts], **rest
        )

    return run


def torch_linear_cross_entropy(call: LossCall, chunked: bool = False) -> Run:
    _draws_no_sample(call)
    if not hasattr(F, "linear_cross_entropy"):
        raise Unavailable("needs torch 2.13")
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    return functools.partial(F.linear_cross_entropy, options=options)


def liger_kernel(call: LossCall, compile: bool = False) -> Run:
    _draws_no_sample(call)
    library = _library("liger-kernel", "liger_kernel.transformers.functional")
    loss = library.liger_fused_linear_cross_entropy
    loss = _compile(loss) if compile else loss

    def run(input, linear_weight, target, linear_bias=None):
        return loss(input, linear_weight, target, bias=linear_bias)

    return run


def cut_cross_entropy(call: LossCall, cuda: bool = True, **options: Any) -> Run:
    _draws_no_sample(call)
    loss = _library("cut-cross-entropy", "cut_cross_entropy", cuda).linear_cross_entropy
    if call.bias and "bias" not in inspect.signature(loss).parameters:
        raise Unavailable("takes no bias")  # true of 25.1.1, which pip installs

    def run(input, linear_weight, target, linear_bias=None):
        bias = {} if linear_bias is None else {"bias": linear_bias}
        return loss(input, linear_weight, target, **bias, **options)

    return run


def quack(call: LossCall) -> Run:
    _draws_no_sample(call)
    loss = _library("quack-kernels", "quack.linear_cross_entropy").linear_cross_entropy_func

    def run(input, linear_weight, target, linear_bias=None):
        return loss(input, linear_weight, linear_bias, target)

    return run


def quack_chunked(call: LossCall) -> Run:
    _draws_no_sample(call)
    if call.bias:
        raise Unavailable("takes no bias")
    library = _library("quack-kernels", "quack.linear_cross_entropy")

    def run(input, linear_weight, target):
        return library.chunked_linear_cross_entropy(input, linear_weight, target)

    return run


def _draws_no_sample(call: LossCall) -> None:
    if call.sampled:
        raise Unavailable("draws no sample")


LINEAR_CROSS_ENTROPY: dict[str, Callable[[Any], Run]] = {
    "full logits": full_logits,
    "full logits, multinomial": full_logits,
    "full logits on rows that count": lambda call: rows_that_count(full_logits(call)),
    "F.linear_cross_entropy": torch_linear_cross_entropy,
    "F.linear_cross_entropy chunked": functools.partial(torch_linear_cross_entropy, chunked=True),
    "liger-kernel": liger_kernel,
    "liger-kernel compiled": functools.partial(liger_kernel, compile=True),
    "cut-cross-entropy": cut_cross_entropy,
    "cut-cross-entropy unfiltered": functools.partial(cut_cross_entropy, filter_eps=None),
    "cut-cross-entropy torch_compile": functools.partial(
        cut_cross_entropy, cuda=False, impl="torch_compile"
    ),
    "quack": quack,
    "quack chunked": quack_chunked,
}
