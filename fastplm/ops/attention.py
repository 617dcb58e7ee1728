"""``ops.attention`` and ``ops.attention_varlen``: checks, schema, fake, autograd and backends.

Both are one op with two layouts: a ragged call carries ``cu_seqlens``, a dense one does not.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fastplm._backends import is_recorded, needs_cpu, needs_plain_pytorch, needs_triton, requested
from fastplm._checks import (
    FLOATING,
    ArgumentTypeError,
    check,
    check_dtype,
    check_number,
    check_probability,
    check_same,
    check_same_device,
    check_seed_form,
    check_shape,
    check_tensor,
)
from fastplm._measured import CallClass, slower, training
from fastplm._registry import OldOp as Op, autocast, is_eager, is_watched
from fastplm.ops._common import checked_seed, kernels, last_dim_contiguous, rejects_of_csrc
from fastplm.reference.attention import (
    T5RelativeBias,
    attention_ref,
    attention_varlen_ref,
    dropout_threshold,
    t5_buckets,
)

#: Of the kernels, in 16 bits and in fp32.
_MAX_HEAD_DIM = {2: 256, 4: 128}

#: Limits of the dropout's counter layout (``reference.attention.dropout_keep_mask``).
_MAX_DROPOUT_KEYS = 2**20
_MAX_DROPOUT_HEADS = 2**12


class _Call(NamedTuple):
    """The arguments of ``fastplm::attention_fwd`` but the last, in the order of its schema."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    bias_weight: torch.Tensor | None
    bias_bidirectional: bool
    bias_max_distance: int
    seed: torch.Tensor | None
    sample_index: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float
    allow_tf32: bool = False

    @property
    def ragged(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.numel() - 1
        return self.query.shape[0]

    @property
    def options(self) -> dict[str, Any]:
        """The keywords that the two public functions and the two references share."""
        bias = None
        if self.bias_weight is not None:
            bias = T5RelativeBias(self.bias_weight, self.bias_bidirectional, self.bias_max_distance)
        return dict(
            key_mask=self.key_mask,
            is_causal=self.is_causal,
            dropout_p=self.dropout_p,
            scale=self.scale,
            relative_bias=bias,
            seed=self.seed,
            sample_index=self.sample_index,
        )


#: The place of the one argument beside query, key and value that gets a gradient.
_BIAS = _Call._fields.index("bias_weight")
# Which arguments a backend wants with a last stride of 1.
_ALIGNED = ("query", "key", "value", "key_mask", "cu_seqlens_q", "cu_seqlens_k", "sample_index")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    relative_bias: T5RelativeBias | None = None,
    seed: int | torch.Tensor | None = None,
    sample_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention with padding, causality, T5's bias and dropout, without a score matrix.

    ``O = dropout(softmax(scale * Q K^T + bias + mask)) V``

    Args:
        query: [B, H, Tq, D], fp32, fp16 or bf16; any strides whose last is 1 (a view of packed
            projections or of [B, T, H, D] is not copied).
        key, value: [B, H, Tk, D], dtype and device of ``query``; strides of their own.
        key_mask: bool [B, Tk], True = attend. The content of a masked key never matters.
        is_causal: query i sees the keys j <= i + (Tk - Tq) (bottom-right aligned), so that few
            queries, down to one, continue a cache of keys and values.
        dropout_p: the probability of dropping an attention probability, in steps of 1/256; the
            others are divided by the probability of keeping that is really used. A probability
            that rounds to 0 or 1 but is neither takes 1/256 or 255/256.
        scale: factor on the scores; default ``D ** -0.5`` (T5 uses 1.0).
        relative_bias: ``T5RelativeBias(weight [buckets, H], bidirectional, max_distance)``: a bias
            by the bucket of the distance, computed on the fly; ``weight`` gets a gradient.
        seed: of the dropout: int, or 0-d int64 tensor on the device of ``query`` (which a captured
            graph can advance). Default: drawn from PyTorch's generator of the device. Give each
            layer and step a seed of its own.
        sample_index: int64 [B], what the dropout's random bits depend on besides ``seed`` and the
            indices of head, query and key; default ``arange(B)``. With a global index the bits do
            not depend on how a batch is spread over devices.

    Returns:
        [B, H, Tq, D] in the dtype of ``query``. A row that may attend to nothing is 0 and passes
        no gradient.

    Numerics:
        Products in the input dtype (in C++ on a CPU in fp32 always); bias, softmax and sums in
        fp32. On a GPU fp32 is multiplied in TF32 where ``torch.backends.cuda.matmul`` allows it as
        the forward is called (or traced: another answer compiles anew); the backward follows.

    Determinism:
        Forward and backward repeat bit for bit on one backend, the gradient of the bias included;
        no atomics. A dropped probability is the same one on every backend, device and layout.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> query = torch.zeros(1, 1, 2, 16)  # so that every key counts alike
        >>> value = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1).expand(1, 1, 2, 16)
        >>> ops.attention(query, query, value, is_causal=True)[0, 0, :, 0]
        tensor([1., 2.])
        >>> hidden = torch.tensor([[False, False]])
        >>> ops.attention(query, query, value, key_mask=hidden)[0, 0, :, 0]
        tensor([0., 0.])

    Source: Vaswani et al. 2017, eq. 1; Dao 2023 (arXiv 2307.08691); bias: Raffel et al. 2020, §2.1.
    Reference: ``fastplm.reference.attention.attention_ref``.
    """
    where = "attention"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(where, name, tensor, ndim=4)
    if (
        key_mask is relative_bias is seed is sample_index is None
        and dropout_p == 0.0
        and not (is_causal and query.shape[2] > 1)
        and (scale is None or isinstance(scale, (float, int)) and scale == scale)
    ):
        out = _short_way(query, key, value, scale)
        if out is not None:
            return out
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    weight, bidirectional, max_distance = _bias(where, relative_bias)
    call = _Call(
        query,
        key,
        value,
        key_mask,
        None,
        None,
        query.shape[2],
        key.shape[2],
        weight,
        bidirectional,
        max_distance,
        _seed(where, seed, dropout_p, query.device),
        sample_index,
        float(dropout_p),
        is_causal,
        _scale(where, scale, query.shape[-1]),
    )
    _check(call)
    return _run(call)


def is_faster(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether ``attention`` of these has more to win than a call costs, with nothing but scores.

    For those who have ``scaled_dot_product_attention`` at hand, and nothing to hide, add or drop.
    """
    if query.device.type != "cpu" or requested("attention") != "auto" or not is_eager(query, key):
        return True
    return slower("attention", _class_of(query, key)) is None


def attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    key_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    relative_bias: T5RelativeBias | None = None,
    seed: int | torch.Tensor | None = None,
    sample_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """``attention`` of a ragged batch: sequences packed one after the other, without padding.

    ``O_b = dropout(softmax(scale * Q_b K_b^T + bias + mask)) V_b`` for every sequence b.

    Args:
        query: [Nq, H, D]; sequence b owns the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
            Rows past ``cu_seqlens_q[-1]`` are spare capacity; their content never matters.
        key, value: [Nk, H, D], cut by ``cu_seqlens_k`` in the same way.
        cu_seqlens_q, cu_seqlens_k: int32 [B + 1], from 0, not decreasing, on the device of
            ``query``: lengths of queries and keys (an encoder and a decoder); a length may be 0.
        max_seqlen_q, max_seqlen_k: not less than the longest sequence; they choose the kernel, so
            fixed ones let a captured or compiled step serve every batch. A sequence that is longer
            is an error on the CPU; on a GPU, where looking would wait for the device, the rows
            beyond are not computed.
        key_mask: bool [Nk], True = attend.
        is_causal, dropout_p, scale, relative_bias, seed: as in ``attention``, with the lengths of
            each sequence as its Tq and Tk.
        sample_index: int64 [B], as in ``attention``.

    Returns:
        [Nq, H, D] in the dtype of ``query``; spare rows are 0 and pass no gradient. The same as
        ``attention`` gives for the batch padded at the right to ``max_seqlen_q`` and
        ``max_seqlen_k``: bit for bit on one backend. What dropout drops is the same on all.

    Numerics:
        As ``attention``.

    Determinism:
        As ``attention``.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or values that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> starts = torch.tensor([0, 2, 3], dtype=torch.int32)  # sequences of 2 and 1
        >>> query = torch.zeros(3, 1, 16)
        >>> value = torch.tensor([1.0, 3.0, 7.0]).view(3, 1, 1).expand(3, 1, 16)
        >>> ops.attention_varlen(query, query, value, starts, starts, 2, 2)[:, 0, 0]
        tensor([2., 2., 7.])

    Source: as ``attention``.
    Reference: ``fastplm.reference.attention.attention_varlen_ref``.
    """
    where = "attention_varlen"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_tensor(where, name, tensor, ndim=3)
    check_tensor(where, "cu_seqlens_q", cu_seqlens_q, ndim=1)
    check_tensor(where, "cu_seqlens_k", cu_seqlens_k, ndim=1)
    query, key, value = autocast(query, key, value)  # type: ignore[assignment]
    weight, bidirectional, max_distance = _bias(where, relative_bias)
    call = _Call(
        query,
        key,
        value,
        key_mask,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        weight,
        bidirectional,
        max_distance,
        _seed(where, seed, dropout_p, query.device),
        sample_index,
        float(dropout_p),
        is_causal,
        _scale(where, scale, query.shape[-1]),
    )
    _check(call)
    return _run(call)


def _allows_tf32() -> bool:
    """Whether PyTorch multiplies fp32 matrices of a GPU in TF32, by whichever flag it was told."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


# It cannot be traced, but Dynamo guards its answer. As ``torch.compiler.assume_constant_result``
# does it, which imports Dynamo: a second that nobody else needs.
_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _run(call: _Call) -> torch.Tensor:
    backend = OP.resolve(*call)
    if backend == "triton" and call.query.dtype is torch.float32 and _allows_tf32():
        call = call._replace(allow_tf32=True)
    if call.ragged and call.query.is_cpu and backend not in ("cpp", "torch"):  # they look, too
        _check_lengths(call)
    if backend == "torch" and requested("attention") == "auto" and _is_plain(call):
        return torch.nn.functional.scaled_dot_product_attention(*call[:3], scale=call.scale)
    if backend == "eager":
        if call.ragged:
            return attention_varlen_ref(*call[:3], *call[4:8], **call.options)  # type: ignore[arg-type]
        return attention_ref(*call[:3], **call.options)
    # Backends find any row by its stride, and elements of a row side by side.
    for name in _ALIGNED:
        tensor = getattr(call, name)
        if tensor is not None and tensor.stride(-1) != 1:
            call = call._replace(**{name: tensor.contiguous()})
    return OP.call(*call, backend)[0]


def _bias(where: str, bias: T5RelativeBias | None) -> tuple[torch.Tensor | None, bool, int]:
    if bias is None:
        return None, False, 0
    check(
        isinstance(bias, T5RelativeBias),
        where,
        "relative_bias",
        f"a {type(bias).__name__}",
        "ops.T5RelativeBias or None",
        "Wrap the table: T5RelativeBias(weight, bidirectional=…, max_distance=…).",
        ArgumentTypeError,
    )
    check_tensor(where, "relative_bias.weight", bias.weight, ndim=2)
    return bias.weight, bool(bias.bidirectional), int(bias.max_distance)


def _scale(where: str, scale: float | None, head_dim: int) -> float:
    check(head_dim > 0, where, "query", "head dim 0", "at least 1", "Check the reshape.")
    if scale is None:
        return head_dim**-0.5
    check_number(where, "scale", scale, -math.inf, math.inf, "a number", "None is D ** -0.5.")
    return float(scale)


def _seed(
    where: str, seed: int | torch.Tensor | None, dropout_p: float, device: torch.device
) -> torch.Tensor | None:
    fix = "Pass the share of attention probabilities to drop."
    check_probability(where, "dropout_p", dropout_p, fix)
    if seed is not None:
        check_seed_form(where, seed)
    if dropout_p == 0.0:
        return None
    return checked_seed(where, seed, device)


def _check(call: _Call) -> None:
    ragged = call.ragged
    where = "attention_varlen" if ragged else "attention"
    query, key, value = call[:3]
    check_dtype(where, "query", query, FLOATING)
    check_same(where, query=query, key=key, value=value)
    heads, head_dim = query.shape[1], query.shape[-1]
    shape: tuple[int, ...]
    if ragged:
        names, shape = "[Nk, H, D]", (key.shape[0], heads, head_dim)
    else:
        names, shape = "[B, H, Tk, D]", (query.shape[0], heads, key.shape[2], head_dim)
    check_shape(where, "key", key, shape, f"{names} with the sizes of `query`")
    check_shape(where, "value", value, shape, f"{names}, the shape of `key`")
    if ragged:
        _check_ragged(call)
    if call.key_mask is not None:
        _check_key_mask(where, call, call.key_mask)
    if call.bias_weight is not None:
        _check_bias(where, call, call.bias_weight)
    if call.seed is not None or call.sample_index is not None:
        _check_dropout(where, call)


def _check_ragged(call: _Call) -> None:
    where = "attention_varlen"
    cu_seqlens_q, cu_seqlens_k = call.cu_seqlens_q, call.cu_seqlens_k
    assert cu_seqlens_q is not None and cu_seqlens_k is not None
    check(
        cu_seqlens_q.numel() > 0,
        where,
        "cu_seqlens_q",
        "no element",
        "int32 [B + 1], from 0",
        "Prepend the 0: pad(lengths.cumsum(0), (1, 0)).",
    )
    check_shape(
        where, "cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, "[B + 1], as `cu_seqlens_q`"
    )
    check_same_device(where, query=call.query, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    for name, cu_seqlens, longest in (
        ("q", cu_seqlens_q, call.max_seqlen_q),
        ("k", cu_seqlens_k, call.max_seqlen_k),
    ):
        check_dtype(where, f"cu_seqlens_{name}", cu_seqlens, (torch.int32,))
        expected, fix = "the length of the longest sequence", "Pass it, or any upper bound."
        check_number(where, f"max_seqlen_{name}", longest, 0, math.inf, expected, fix)


def _check_lengths(call: _Call) -> None:
    """The values of ``cu_seqlens``, on the CPU where looking costs no wait."""
    for name, cu_seqlens, rows, longest in (
        ("q", call.cu_seqlens_q, call.query, call.max_seqlen_q),
        ("k", call.cu_seqlens_k, call.key, call.max_seqlen_k),
    ):
        assert cu_seqlens is not None
        # Under torch.compile, in a fake or on meta there are none.
        there = type(cu_seqlens) is torch.Tensor and not torch.compiler.is_compiling()
        if there and cu_seqlens.device.type == "cpu":
            check_lengths_on_cpu(name, cu_seqlens, rows.shape[0], longest)


def check_lengths_on_cpu(name: str, cu_seqlens: torch.Tensor, rows: int, longest: int) -> None:
    """Sequences lie one after the other in so many rows, and none is longer than the longest."""
    where = "attention_varlen"
    values = cu_seqlens.tolist()
    lengths = [end - start for start, end in zip(values[:-1], values[1:], strict=True)]
    check(
        values[0] == 0 and min(lengths, default=0) >= 0 and values[-1] <= rows,
        where,
        f"cu_seqlens_{name}",
        f"{values[0]} … {values[-1]} with lengths from {min(lengths, default=0)}",
        f"0 first, never decreasing, at most {rows} (the rows of the tensor) last",
        "Build it as pad(lengths.cumsum(0), (1, 0)).",
    )
    check(
        max(lengths, default=0) <= longest,
        where,
        f"max_seqlen_{name}",
        longest,
        f"at least {max(lengths, default=0)}, the longest sequence",
        "Pass the longest length, or any upper bound.",
    )


def _check_key_mask(where: str, call: _Call, key_mask: torch.Tensor) -> None:
    check_tensor(where, "key_mask", key_mask)
    check_dtype(
        where, "key_mask", key_mask, (torch.bool,), "Use attention_mask.bool(), True = attend."
    )
    check_same_device(where, query=call.query, key_mask=key_mask)
    shape = call.key.shape[:1] if call.ragged else (call.batch, call.key.shape[2])
    check_shape(
        where,
        "key_mask",
        key_mask,
        shape,
        "[Nk]" if call.ragged else "[B, Tk]",
        "Pass one boolean per key of each sample; causality is is_causal=True.",
    )


def _check_bias(where: str, call: _Call, weight: torch.Tensor) -> None:
    name, heads = "relative_bias.weight", call.query.shape[1]
    check_dtype(where, name, weight, FLOATING)
    check_same_device(where, query=call.query, **{name: weight})
    check_shape(where, name, weight, (weight.shape[0], heads), "[buckets, H]")
    least = 4 if call.bias_bidirectional else 2
    check(
        weight.shape[0] >= least and weight.shape[0] % 2 == 0,
        where,
        name,
        f"{weight.shape[0]} buckets",
        f"an even number, at least {least}",
        "T5 has 32: half of those of a side are exact distances.",
    )
    exact = weight.shape[0] // least
    check(
        call.bias_max_distance > exact,
        where,
        "relative_bias.max_distance",
        call.bias_max_distance,
        f"more than {exact}, the distances with a bucket of their own",
        "T5 has 128.",
    )


def _check_dropout(where: str, call: _Call) -> None:
    if call.sample_index is not None:
        check_tensor(where, "sample_index", call.sample_index, ndim=1)
        check_dtype(where, "sample_index", call.sample_index, (torch.int64,))
        check_same_device(where, query=call.query, sample_index=call.sample_index)
        check_shape(where, "sample_index", call.sample_index, (call.batch,), "[B]")
    if call.seed is None:
        return
    check_same_device(where, query=call.query, seed=call.seed)
    heads, longest = call.query.shape[1], call.max_seqlen_k
    check(
        longest <= _MAX_DROPOUT_KEYS and heads < _MAX_DROPOUT_HEADS,
        where,
        "dropout_p",
        f"{call.dropout_p} with {longest} keys and {heads} heads",
        f"at most {_MAX_DROPOUT_KEYS} keys and fewer than {_MAX_DROPOUT_HEADS} heads",
        "Turn dropout off for such a call.",
    )


def _projection_layout(tensor: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D] over [B, T, H, D] memory, the dense layout every backend returns."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _empty_like_projection(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() == 3:
        return tensor.new_empty(tensor.shape)
    batch, heads, length, dim = tensor.shape
    return tensor.new_empty(batch, length, heads, dim).transpose(1, 2)


# --- backend "cpp": csrc/attention.h, one head of one sequence a thread ---------------------------


def _cpp_rejects(query: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if query.dtype is torch.float64:
        return "float64: csrc/ takes fp32, fp16 and bf16"
    return _CSRC_REJECTS(query, forced=forced)


def _short_way(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> torch.Tensor | None:
    """A call with nothing but scores and no error in it, by what ``_run`` would find, or None.

    Between the layers of a model the caches forget all Python, most of what a small call costs.
    """
    batch, heads, seqlen_q, dim = query.shape
    seqlen_k, dtype, wanted = key.shape[2], query.dtype, requested("attention")
    if (
        torch.compiler.is_compiling()
        or wanted not in ("auto", "cpp")
        or is_recorded()
        or not (query.is_cpu and key.is_cpu and value.is_cpu)
        or not (dtype is key.dtype is value.dtype and dtype in FLOATING)
        or not (key.shape == value.shape == (batch, heads, seqlen_k, dim) and dim > 0)
        or torch._C._is_any_autocast_enabled()
        or needs_plain_pytorch() is not None
    ):
        return None
    # Asked of a forced call, too, as `fastplm measure` times calls with their question.
    if slower("attention", _class_of(query, key)) is not None and wanted == "auto":
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale)
    if (
        training(query, key, value) == "training"
        or is_watched((query, key, value))
        or _cpp_rejects(query, forced=False) is not None
    ):
        return None
    out, _ = torch.ops.fastplm_C.attention.default(
        *map(last_dim_contiguous, (query, key, value)),
        *(None, None, None, seqlen_q, seqlen_k, None, None, None, None, 0, False),
        dim**-0.5 if scale is None else float(scale),
    )
    return out


def _is_plain(call: _Call) -> bool:
    """Whether there is nothing but scores: nothing hidden, added or dropped."""
    return (
        call.key_mask is None
        and call.cu_seqlens_q is None
        and call.bias_weight is None
        and call.seed is None
        and (not call.is_causal or call.query.shape[2] == 1)  # the last query sees every key
    )


def _class_of(query: torch.Tensor, key: torch.Tensor) -> CallClass:
    batch, heads, seqlen_q, _ = query.shape
    return CallClass(training(query, key), query.dtype, (seqlen_q, key.shape[2], batch * heads))


def _measured(*arguments: Any) -> CallClass | None:
    """Of the calls that PyTorch has a kernel for; all others are ours wherever it can run them."""
    call = _Call(*arguments)
    return _class_of(call.query, call.key) if _is_plain(call) else None


def _cpp_arguments(call: _Call) -> tuple[Any, ...]:
    """What the forward and the backward of csrc/ share."""
    buckets = weight = None
    if call.bias_weight is not None:
        weight = call.bias_weight.float()
        buckets = _buckets_of(call)
    threshold = 0 if call.seed is None else dropout_threshold(call.dropout_p)
    return (
        *call[:8],
        weight,
        buckets,
        call.seed,
        call.sample_index,
        threshold,
        call.is_causal,
        call.scale,
    )


def _cpp_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Call(*arguments)
    try:
        return torch.ops.fastplm_C.attention.default(*_cpp_arguments(call))
    except RuntimeError:
        if call.ragged:
            _check_lengths(call)  # csrc/ looks itself, and this says what it found
        raise


def _cpp_backward(
    grad_out: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, bias_grad: bool, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    call = _Call(*arguments)
    backward = torch.ops.fastplm_C.attention_backward.default
    dq, dk, dv, by_sample = backward(*_cpp_arguments(call), stats, grad_out, bias_grad)
    if not bias_grad or call.bias_weight is None:
        return dq, dk, dv, call.query.new_empty(0)
    return dq, dk, dv, by_sample.sum(0).t().to(call.bias_weight.dtype).contiguous()


# --- backend "torch" ------------------------------------------------------------------------------


def _torch_rejects(*arguments: Any, forced: bool) -> str | None:
    return needs_cpu(_Call(*arguments).query)


def _torch_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from fastplm.ops._attention_torch import attention_fwd

    call = _Call(*arguments)
    return attention_fwd(call, _statistics(call, "torch"))


def _torch_backward(
    grad_out: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, bias_grad: bool, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    from fastplm.ops._attention_torch import attention_bwd

    return attention_bwd(_Call(*arguments), grad_out, out, stats, bias_grad)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(query: torch.Tensor, *others: Any, forced: bool) -> str | None:
    if query.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    most, scale = _MAX_HEAD_DIM[query.dtype.itemsize], others[-2]
    if query.shape[-1] > most:
        return f"head dim {query.shape[-1]} is over {most}"
    if scale <= 0.0:
        return f"scale {scale}: the kernels take a positive one"
    return needs_triton(query, forced)


_BUCKET_TABLES: dict[tuple[int, bool, int, torch.device], torch.Tensor] = {}


def _bucket_table(
    num_buckets: int, bidirectional: bool, max_distance: int, device: torch.device
) -> torch.Tensor:
    """``t5_buckets`` on a device, made once.

    But for a table made inside the capture of a CUDA graph: it holds nothing until a replay.
    """
    settings = num_buckets, bidirectional, max_distance, device
    table = _BUCKET_TABLES.get(settings)
    if table is None:
        table = _filled_from_cpu(t5_buckets(num_buckets, bidirectional, max_distance), device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
            _BUCKET_TABLES[settings] = table
    return table


def _filled_from_cpu(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A few runs of equal values on a device, without a copy, which no CUDA graph can capture."""
    if device.type == "cpu":
        return values
    result = torch.empty(values.shape, dtype=values.dtype, device=device)
    runs, lengths = values.unique_consecutive(return_counts=True)
    parts = result.split(lengths.tolist())
    for part, value in zip(parts, runs.tolist(), strict=True):
        part.fill_(value)
    return result


def _buckets_of(call: _Call) -> torch.Tensor:
    assert call.bias_weight is not None
    return _bucket_table(
        call.bias_weight.shape[0],
        call.bias_bidirectional,
        call.bias_max_distance,
        call.query.device,
    )


def _kernel_arguments(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    call = _Call(*arguments)
    buckets = None if call.bias_weight is None else _buckets_of(call)
    threshold = dropout_threshold(call.dropout_p)
    return (
        *call[:9],
        buckets,
        call.seed,
        call.sample_index,
        threshold,
        call.is_causal,
        call.scale,
        call.allow_tf32,
    )


def _triton_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels("attention").attention_fwd(*_kernel_arguments(arguments))


def _triton_backward(
    grad_out: torch.Tensor, out: torch.Tensor, stats: torch.Tensor, bias_grad: bool, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    shared = _kernel_arguments(arguments)
    return kernels("attention").attention_bwd(grad_out, out, stats, bias_grad, *shared)


# --- registration ---------------------------------------------------------------------------------


def _statistics(call: _Call, backend: str) -> torch.Tensor:
    """[2, H, rows of query]: what a backend's own backward needs to rebuild the softmax of a row.

    [2, H, 0] where it needs nothing.
    """
    query = call.query
    rows = query.shape[0] if call.ragged else query.shape[0] * query.shape[2]
    if backend == "triton":
        from fastplm.triton_kernels.attention import needs_statistics

        has_bias = call.bias_weight is not None
        lengths = call.max_seqlen_q, call.max_seqlen_k
        if not needs_statistics(query.dtype, query.shape[-1], *lengths, has_bias):
            rows = 0
    rebuilt = call.seed is not None or call.bias_weight is not None
    if backend == "torch" and rebuilt:
        rows = 0
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return query.new_empty((2, query.shape[1], rows), dtype=dtype)


def _fake_forward(*arguments):
    call = _Call(*arguments[:-1])
    _check(call)
    return _empty_like_projection(call.query), _statistics(call, arguments[-1])


def _fake_backward(grad_out, out, stats, bias_grad, *arguments):
    call = _Call(*arguments[:-1])
    bias = call.bias_weight if bias_grad else None
    return (
        *(_empty_like_projection(tensor) for tensor in call[:3]),
        call.query.new_empty(0) if bias is None else bias.new_empty(bias.shape),
    )


def _setup_context(ctx, inputs, output):
    # As they come in _Call: tensors are saved, the others kept as they are.
    tensors = (*inputs[:6], inputs[8], *inputs[11:13])
    ctx.lengths, ctx.buckets, ctx.settings = inputs[6:8], inputs[9:11], inputs[13:]
    out, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)  # zeros like ``stats``, which nobody reads
    # Some backwards rebuild the output: those without row statistics, and that of csrc/.
    rebuilt = stats.numel() == 0 or inputs[-1] == "cpp"
    ctx.save_for_backward(*tensors, None if rebuilt else out, stats)


def _backward(ctx, grad_out, _grad_stats):
    *rows, weight, seed, sample_index, out, stats = ctx.saved_tensors
    inputs = (*rows, *ctx.lengths, weight, *ctx.buckets, seed, sample_index, *ctx.settings)
    bias_grad = ctx.needs_input_grad[_BIAS]
    grad_out = last_dim_contiguous(grad_out)
    out = grad_out if out is None else out
    grads = OP.call_backward(grad_out, out, stats, bias_grad, *inputs)
    result: list[Any] = [None] * len(inputs)
    result[:3] = grads[:3]
    result[_BIAS] = grads[3] if bias_grad else None
    return tuple(result)


def _smoke(device: torch.device) -> None:
    query = torch.randn(1, 2, 4, 16, device=device, requires_grad=True)
    key_mask = torch.tensor([[True, True, False]], device=device)
    key = torch.randn(1, 2, 3, 16, device=device)
    attention(query, key, key, key_mask=key_mask).sum().backward()


_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? bias_weight, "
    "bool bias_bidirectional, int bias_max_distance, Tensor? seed, Tensor? sample_index, "
    "float dropout_p, bool is_causal, float scale, bool allow_tf32, str backend"
)

_CSRC_REJECTS = rejects_of_csrc("attention")["cpp"]

OP = Op("attention", reference=attention_ref, smoke=_smoke)
OP.backend(
    "cpp",
    forward=_cpp_forward,
    backward=_cpp_backward,
    rejects=_cpp_rejects,
    measured=_measured,
)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=_torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
OP.define_differentiable(
    f"({_INPUTS}) -> (Tensor out, Tensor stats)",
    f"(Tensor grad_out, Tensor out, Tensor stats, bool bias_grad, {_INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
