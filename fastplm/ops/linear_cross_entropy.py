"""``ops.linear_cross_entropy``: checks, schema, fake, autograd formula and backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastplm._backends import needs_cpu, needs_triton
from fastplm._checks import (
    FLOATING,
    ArgumentValueError,
    UnsupportedError,
    check,
    check_dtype,
    check_same,
    check_same_device,
    check_shape,
    check_tensor,
    message,
)
from fastplm._registry import Op, autocast
from fastplm.ops._common import check_reduction, last_dim_contiguous
from fastplm.reference._reduce import reduce_loss
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref

_NAME = "linear_cross_entropy"


def linear_cross_entropy(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    normalizer: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of a linear layer's logits, without a matrix of logits.

    ``z = input W^T + b``, ``loss[n] = logsumexp(z[n]) - z[n, target[n]]``

    Args:
        input: [N, E], fp32, fp16 or bf16 (fp64 on the CPU); any strides whose last is 1.
        linear_weight: [V, E], dtype and device of ``input``; any strides whose last is 1.
        target: int64 [N]; ``ignore_index`` takes a row out of the loss and out of every gradient.
            Its content never matters then, and it costs nothing in the matrix products.
        linear_bias: [V], dtype of ``input``.
        reduction: "mean" over the rows that count | "sum" | "none".
        ignore_index: the target of ignored rows; may lie inside [0, V).
        label_smoothing: must be 0.0 in this version.
        normalizer: 0-d tensor that replaces the mean's denominator (the number of targets of a
            whole accumulated batch); only with ``reduction="mean"``.

    Returns:
        0-d, or [N] for "none", 0 in ignored rows; fp32 (fp64 for fp64 inputs).

    Numerics:
        Products in the input dtype; softmax, sums and loss in fp32. Gradients come in the input
        dtype; that of the vocabulary is accumulated in fp32. The backward recomputes the logits
        from each row's maximum and sum, so a large common offset costs no digits. The mean over no
        rows is 0 with zero gradients, where PyTorch's is NaN: the training step must survive.

    Determinism:
        Forward and backward repeat bit for bit on one backend (on the CPU for one number of
        threads); no atomics.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or choices that do not fit;
            on the CPU also a target outside [0, V). On CUDA, and where a compiled function runs
            the eager backend, finding that target would wait for the device: the row's loss is
            NaN, and so are the gradients.
        UnsupportedError: ``label_smoothing`` is not 0.
        BackendError: a forced backend cannot run the call.

    Source: Wijmans et al. 2024 (arXiv 2411.09009), algorithms 1-3, without gradient filtering;
        Milakov and Gimelshein 2018 (arXiv 1805.02867) for the running maximum and sum.
    Reference: ``fastplm.reference.linear_cross_entropy.linear_cross_entropy_ref``.
    """
    check_tensor(_NAME, "input", input, ndim=2)
    check_tensor(_NAME, "linear_weight", linear_weight, ndim=2)
    check_tensor(_NAME, "target", target, ndim=1)
    _check_unsupported(label_smoothing)
    check_reduction(_NAME, input, reduction, normalizer)
    input, linear_weight, linear_bias = autocast(input, linear_weight, linear_bias)  # type: ignore[assignment]
    _check(input, linear_weight, linear_bias, target)
    backend = OP.resolve(input, linear_weight, linear_bias, target, ignore_index)
    if backend == "eager":
        if not torch.compiler.is_compiling():  # the values of a traced tensor are not known
            _check_targets(target, linear_weight, ignore_index)
        return linear_cross_entropy_ref(
            input,
            linear_weight,
            target,
            linear_bias=linear_bias,
            reduction=reduction,
            ignore_index=ignore_index,
            normalizer=normalizer,
        )
    loss, _, _ = torch.ops.fastplm.linear_cross_entropy_fwd(
        last_dim_contiguous(input),
        last_dim_contiguous(linear_weight),
        None if linear_bias is None else last_dim_contiguous(linear_bias),
        target.contiguous(),
        ignore_index,
        backend,
    )
    return reduce_loss(loss, target != ignore_index, reduction, normalizer)


def _check_unsupported(label_smoothing: float) -> None:
    check(
        label_smoothing == 0.0,
        _NAME,
        "label_smoothing",
        label_smoothing,
        "0.0 in this version",
        "Use torch.nn.functional.linear_cross_entropy where smoothed labels are needed.",
        UnsupportedError,
    )


def _check(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
) -> None:
    check_dtype(_NAME, "input", input, FLOATING)
    check_dtype(_NAME, "target", target, (torch.int64,), "Use target.long().")
    if linear_bias is not None:
        check_tensor(_NAME, "linear_bias", linear_bias, ndim=1)
    check_same(_NAME, input=input, linear_weight=linear_weight, linear_bias=linear_bias)
    check_same_device(_NAME, input=input, target=target)
    rows, width = input.shape
    vocab = linear_weight.shape[0]
    check(width > 0, _NAME, "input", "row width 0", "at least 1", "Check the reshape.")
    check(vocab > 0, _NAME, "linear_weight", "no rows", "at least 1", "Check the vocabulary.")
    check_shape(_NAME, "linear_weight", linear_weight, (vocab, width), "[V, E], E of `input`")
    check_shape(_NAME, "target", target, (rows,), "[N], N of `input`", "Pass one target per row.")
    if linear_bias is not None:
        check_shape(_NAME, "linear_bias", linear_bias, (vocab,), "[V], V of `linear_weight`")


def _check_targets(target: torch.Tensor, linear_weight: torch.Tensor, ignore_index: int) -> None:
    """Every target of a CPU tensor is ``ignore_index`` or lies in [0, V)."""
    vocab = linear_weight.shape[0]
    if target.device.type != "cpu" or target.numel() == 0:
        return
    low, high = (int(end) for end in target.masked_fill(target == ignore_index, 0).aminmax())
    if low < 0 or high >= vocab:
        raise ArgumentValueError(
            message(
                _NAME,
                "target",
                f"target {low if low < 0 else high}",
                f"{ignore_index} (ignore_index) or 0 … {vocab - 1}, as V = {vocab}",
                "Check that tokenizer and vocabulary fit; rows without target take ignore_index.",
            )
        )


def _statistic_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# --- backend "torch": stock GEMMs on chunks of the vocabulary, on the rows that count -------------
#
# Chunks of the vocabulary, not of rows: each row of the weight is read once and its gradient is
# written once, from one product over all rows, so it needs no accumulator of its size.

_CHUNK_ELEMENTS = 1 << 20  # logits alive at once: fp32 and a half-precision copy stay in the cache
_CHUNK_COLUMNS = 512  # at least, or the GEMMs get too narrow


def _torch_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    return needs_cpu(input)


def _gemm_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The input dtype, or fp32 where this CPU has no instructions for products in it."""
    supported = {
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
    }.get(tensor.dtype)
    return tensor.dtype if supported is None or supported() else torch.float32


def _logit_chunks(
    rows: torch.Tensor, linear_weight: torch.Tensor, linear_bias: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(first column, its rows of the weight, fp32 logits, scratch in the dtype of the GEMMs).

    Logits and scratch are [rows, columns] and the caller's to overwrite: one piece of memory serves
    all chunks, as touching a fresh one costs more than the arithmetic on it.
    """
    count, vocab = rows.shape[0], linear_weight.shape[0]
    columns = min(vocab, max(_CHUNK_COLUMNS, _CHUNK_ELEMENTS // count))
    products = rows.new_empty(count * columns)
    logits = products
    if rows.dtype is not _statistic_dtype(rows):
        logits = products.new_empty(count * columns, dtype=_statistic_dtype(rows))
    for start in range(0, vocab, columns):
        weight = linear_weight[start : start + columns].to(rows.dtype)
        shape = count, weight.shape[0]
        scratch = products[: count * weight.shape[0]].view(shape)
        if linear_bias is None:
            torch.mm(rows, weight.t(), out=scratch)
        else:
            bias = linear_bias[start : start + columns].to(rows.dtype)
            torch.addmm(bias, rows, weight.t(), out=scratch)
        chunk = scratch
        if logits is not products:
            chunk = logits[: scratch.numel()].view(shape).copy_(scratch)
        yield start, weight, chunk, scratch


def _locate(
    target: torch.Tensor, start: int, chunk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(column of each target in this chunk, whether it lies there), both [rows, 1]."""
    column = target[:, None] - start
    inside = (column >= 0) & (column < chunk.shape[1])
    return column.clamp(0, chunk.shape[1] - 1), inside


def _torch_forward(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_targets(target, linear_weight, ignore_index)
    loss, row_max, row_sum = (tensor.zero_() for tensor in _row_statistics(input))
    rows = (target != ignore_index).nonzero().squeeze(1)
    if rows.numel() == 0:
        return loss, row_max, row_sum
    compact, target = input[rows].to(_gemm_dtype(input)), target[rows]
    picked = loss.new_empty(rows.shape[0], 1)  # the logit of the target
    maxima, sums = [], []
    for start, _, logits, _ in _logit_chunks(compact, linear_weight, linear_bias):
        column, inside = _locate(target, start, logits)
        picked = torch.where(inside, logits.gather(1, column), picked)
        maxima.append(logits.amax(1))
        # -inf - -inf is NaN: a row with nothing in this chunk keeps a reference point of 0.
        pivot = maxima[-1].masked_fill(maxima[-1].isneginf(), 0.0)
        sums.append(logits.sub_(pivot[:, None]).exp_().sum(1))
    m_c, l_c = torch.stack(maxima), torch.stack(sums)  # [chunks, rows]
    m_i = m_c.amax(0)
    l_i = ((m_c - m_i).exp() * l_c).sum(0)
    loss[rows], row_max[rows], row_sum[rows] = (m_i - picked.squeeze(1)) + l_i.log(), m_i, l_i
    return loss, row_max, row_sum


def _torch_backward(
    grad_loss: torch.Tensor,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    ignore_index: int,
    *needed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grads = _empty_gradients(input, linear_weight, needed)
    grad_input, grad_weight, grad_bias = grads
    grad_input.zero_()
    rows = (target != ignore_index).nonzero().squeeze(1)
    if rows.numel() == 0:
        grad_weight.zero_()
        grad_bias.zero_()
        return grads
    compact, target = input[rows].to(_gemm_dtype(input)), target[rows]
    grad_loss, row_max = grad_loss[rows, None], row_max[rows, None]
    scale = grad_loss / row_sum[rows, None]
    # Not softmax - 1 of the recomputed logits: this is exact where the row is certain.
    grad_picked = grad_loss * loss[rows, None].neg().expm1()
    grad_rows = compact.new_zeros(compact.shape, dtype=row_sum.dtype)
    for start, weight, logits, scratch in _logit_chunks(compact, linear_weight, linear_bias):
        column, inside = _locate(target, start, logits)
        grad_logits = logits.sub_(row_max).exp_().mul_(scale)
        grad_target = torch.where(inside, grad_picked, grad_logits.gather(1, column))
        grad_logits.scatter_(1, column, grad_target)
        here = slice(start, start + weight.shape[0])
        if needed[2]:
            grad_bias[here] = grad_logits.sum(0)
        grad_logits = scratch.copy_(grad_logits)
        if needed[1]:
            _mm_into(grad_weight[here], grad_logits.t(), compact)
        if needed[0]:
            grad_rows += grad_logits @ weight
    if needed[0]:
        grad_input[rows] = grad_rows.to(grad_input.dtype)
    return grads


def _mm_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if out.dtype is a.dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if input.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return needs_triton(input, forced)


def _triton_forward(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from fastplm.triton_kernels.linear_cross_entropy import linear_cross_entropy_fwd

    _check_targets(target, linear_weight, ignore_index)
    return linear_cross_entropy_fwd(input, linear_weight, linear_bias, target, ignore_index)


def _triton_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from fastplm.triton_kernels.linear_cross_entropy import linear_cross_entropy_bwd

    return linear_cross_entropy_bwd(*arguments)


# --- registration ---------------------------------------------------------------------------------


def _row_statistics(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, maximum and sum of exponentials above it of each row.

    Maximum and sum, not their logsumexp: its rounding would be an error of the softmax, e.g. 0.05 %
    at logits around 1e4.
    """
    dtype, rows = _statistic_dtype(input), input.shape[0]
    return tuple(input.new_empty(rows, dtype=dtype) for _ in range(3))  # type: ignore[return-value]


def _empty_gradients(
    input: torch.Tensor, linear_weight: torch.Tensor, needed: tuple[bool, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, weight and bias to be written; without elements where not needed."""
    shapes = tuple(input.shape), tuple(linear_weight.shape), (linear_weight.shape[0],)
    pairs = zip(shapes, needed, strict=True)
    return tuple(input.new_empty(shape if need else (0,)) for shape, need in pairs)  # type: ignore[return-value]


def _fake_forward(input, linear_weight, linear_bias, target, ignore_index, backend):
    _check(input, linear_weight, linear_bias, target)
    return _row_statistics(input)


def _fake_backward(
    grad_loss,
    input,
    linear_weight,
    linear_bias,
    target,
    loss,
    row_max,
    row_sum,
    ignore_index,
    need_input,
    need_weight,
    need_bias,
    backend,
):
    return _empty_gradients(input, linear_weight, (need_input, need_weight, need_bias))


def _setup_context(ctx, inputs, output):
    input, linear_weight, linear_bias, target, ctx.ignore_index, ctx.backend = inputs
    ctx.save_for_backward(input, linear_weight, linear_bias, target, *output)


def _backward(ctx, grad_loss, _grad_max, _grad_sum):
    needed = ctx.needs_input_grad[:3]
    grads = torch.ops.fastplm.linear_cross_entropy_bwd(
        grad_loss.contiguous(), *ctx.saved_tensors, ctx.ignore_index, *needed, ctx.backend
    )
    grads = (grad if need else None for grad, need in zip(grads, needed, strict=True))
    return *grads, None, None, None


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(11, 16, device=device, requires_grad=True)
    target = torch.tensor([0, 10, -100, 3, 4], device=device)
    linear_cross_entropy(input, weight, target, linear_bias=weight[:, 0].contiguous()).backward()


OP = Op(_NAME, reference=linear_cross_entropy_ref, smoke=_smoke)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=_torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
OP.define_differentiable(
    "(Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, int ignore_index, "
    "str backend) -> (Tensor loss, Tensor row_max, Tensor row_sum)",
    "(Tensor grad_loss, Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, "
    "Tensor loss, Tensor row_max, Tensor row_sum, int ignore_index, bool need_input, "
    "bool need_weight, bool need_bias, str backend) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
