"""``ops.linear_cross_entropy``: checks, schema, fake, autograd formula and backends.

The operator takes the reduction with it, so that autograd has one node to walk, not one more for
each step of the reduction.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fastplm._backends import needs_cpu, needs_triton
from fastplm._checks import (
    FLOATING,
    ArgumentValueError,
    check,
    check_dtype,
    check_number,
    check_same_device,
    check_seed_form,
    check_shape,
    check_tensor,
    message,
    values_are_known,
)
from fastplm._registry import OldOp as Op, autocast
from fastplm.ops._common import check_reduction, kernels, last_dim_contiguous
from fastplm.ops._linear_cross_entropy_torch import multiplies_in, torch_backward, torch_forward
from fastplm.reference._reduce import denominator_of, reduce_loss
from fastplm.reference.linear_cross_entropy import (
    RowStatistics,
    linear_cross_entropy_ref,
    row_statistics_ref,
    sample_ref,
)

_NAME = "linear_cross_entropy"

# Keeping 16-bit logits costs about two passes over them that nothing hides, computing them again
# costs one more product. On an H200 (4.3 TB/s, 790 TFLOP/s) they break even at 184 columns a pass,
# whatever the number of rows. On two cores of an EPYC they were measured to do so between 128 and
# 256 columns (benchmarks/results/cpu).
_KEEP_FROM_WIDTH = 2 * 184
_KEEP_FROM_WIDTH_ON_A_CPU = 192
_LOGITS_BUDGET = 2 << 30
# Rows of kept logits begin at whole cache lines of 16 bits: 30,528 columns for 30,522.
_LOGITS_ALIGNMENT = 64
# Where not all rows fit: fewer than this would cost more in launches and passes over the weight's
# gradient (245 rows' worth each) than they save.
_LEAST_KEPT_ROWS = 4096
_ROW_ALIGNMENT = 256
# Before the order of rows stand their counts.
_ORDER_HEAD = 4
_FP32 = torch.finfo(torch.float32)


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
    return_statistics: bool = False,
    logits_budget: int | None = None,
    expected_targets: int | None = None,
) -> Any:
    """Cross-entropy of a linear layer's logits, kept in one matrix within a budget, or in none.

    ``z = input W^T + b``, ``loss[n] = logsumexp(z[n]) - sum_v q[n, v] z[n, v]`` with
    ``q = (1 - label_smoothing) onehot(target) + label_smoothing / V``

    Args:
        input: [N, E], fp32, fp16 or bf16 (fp64 on the CPU); any strides whose last is 1.
        linear_weight: [V, E], device of ``input``, and its dtype or fp32; any strides whose last
            is 1.
        target: int64 [N]; ``ignore_index`` takes a row out of the loss and out of every gradient.
            Its content never matters then, and it costs nothing in the matrix products (see
            ``expected_targets``).
        linear_bias: [V], dtype of ``linear_weight``.
        reduction: "mean" over the rows that count | "sum" | "none".
        ignore_index: the target of ignored rows; may lie inside [0, V).
        label_smoothing: in [0, 1], the share of the target spread evenly over the vocabulary.
        normalizer: 0-d tensor that replaces the mean's denominator (the number of targets of a
            whole accumulated batch); only with ``reduction="mean"``.
        return_statistics: return ``RowStatistics`` as well: each row's likeliest token, logsumexp
            and log-probability of the target.
        logits_budget: bytes. Logits in the dtype of ``input`` are kept from the forward to the
            backward, of all rows or of the first that fit (at least 4,096), and computed again,
            tile by tile, for the others; 0 never keeps any. Default: rows of 368 columns or more
            (on a CPU 192) may take 2 GiB, narrower ones, to which a product is cheaper than the
            traffic, nothing.
        expected_targets: how many rows should count, if the caller knows it without asking the
            device. A GPU multiplies rows that keep their logits whether they count or not, by the
            vendor's library; so only that many do, and without this number none, unless
            ``logits_budget`` is given. More or fewer targets cost time, never correctness. A CPU
            counts them: there it has no effect.

    Returns:
        0-d, or [N] for "none", 0 in ignored rows; fp32 (fp64 for fp64 inputs). With
        ``return_statistics`` the pair (loss, ``RowStatistics``).

    Numerics:
        Products in the dtype of ``input``; softmax, sums and loss in fp32. The gradient of
        ``input`` comes in its dtype; that of the vocabulary is accumulated in fp32 and rounded
        once, to the dtype of ``linear_weight``: not at all if that is fp32 (on the CPU, whose
        products of 16 bits come in 16 bits, those round it). Kept logits are rounded to the dtype
        of ``input``; of fp32 a GPU makes them in TF32 where ``torch.backends`` allows it. Each
        row's maximum and sum are kept apart, so a large common offset costs no digits. The mean
        over no rows is 0 with zero gradients, where PyTorch's is NaN: the training
        step must survive.

    Determinism:
        Forward and backward repeat bit for bit on one backend (on the CPU for one number of
        threads); no atomics.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or choices that do not fit;
            on the CPU also a target outside [0, V). On CUDA, and where a compiled function runs
            the eager backend, finding that target would wait for the device: the row's loss is
            NaN, and so are the gradients.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> rows, weight = torch.zeros(3, 8), torch.randn(4, 8)  # all logits are 0
        >>> ops.linear_cross_entropy(rows, weight, torch.tensor([2, -100, 0]))  # log 4
        tensor(1.3863)

    Source: Wijmans et al. 2024 (arXiv 2411.09009), algorithms 1-3, without gradient filtering;
        Milakov and Gimelshein 2018 (arXiv 1805.02867) for the running maximum and sum; Szegedy et
        al. 2015 (arXiv 1512.00567), section 7, for label smoothing.
    Reference: ``fastplm.reference.linear_cross_entropy.linear_cross_entropy_ref``.
    """
    loss, _, statistics = _vocabulary_pass(
        _NAME,
        input,
        linear_weight,
        target,
        linear_bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        normalizer=normalizer,
        return_statistics=return_statistics,
        logits_budget=logits_budget,
        expected_targets=expected_targets,
        sampling=None,
    )
    return (loss, statistics) if return_statistics else loss


def linear_cross_entropy_with_sample(
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    *,
    linear_bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    normalizer: torch.Tensor | None = None,
    return_statistics: bool = False,
    logits_budget: int | None = None,
    expected_targets: int | None = None,
    temperature: float = 1.0,
    seed: int | torch.Tensor,
    sample_index: torch.Tensor | None = None,
    position: torch.Tensor | None = None,
) -> Any:
    """``linear_cross_entropy`` and one token a row from ``softmax(z / temperature)``, in one pass.

    The token is the first at which the running sum of probabilities exceeds a uniform number u:
    the pass leaves the sum of each tile of the vocabulary, u chooses the tile, and that tile alone
    is computed again. One random number for each row, not for each logit; the distribution is that
    of ``argmax(z / temperature + Gumbel noise)``.

    Args:
        temperature: over 0; in the range of normal fp32 numbers.
        seed: int, or 0-d int64 tensor on the device of ``input`` (which a captured graph can
            advance).
        sample_index: int64 [N], the place of the row's sample in the training stream; default the
            row's number.
        position: int64 [N], the row's place in that sample; default 0.
        the others: as in ``linear_cross_entropy``.

    Returns:
        (loss, sample) or, with ``return_statistics``, (loss, sample, ``RowStatistics``). Samples
        are int64 [N]: -1 in ignored rows, 0 in a row with a NaN or an infinite largest logit, and
        never a token whose probability underflows to 0. No gradient flows through them.

    Randomness:
        u is a pure function of (seed, sample_index, position): the same on every backend and in
        every layout of the rows. The token is that of exact arithmetic on the row's logits, as
        rounded by the backend: two backends differ only where u lies within that rounding of the
        boundary between two tokens.

    Numerics, Determinism, Raises: as ``linear_cross_entropy``.

    Examples:
        >>> rows, weight, target = torch.zeros(3, 8), torch.randn(4, 8), torch.tensor([2, -100, 0])
        >>> loss, sample = ops.linear_cross_entropy_with_sample(rows, weight, target, seed=0)
        >>> sample
        tensor([ 3, -1,  1])

    Source: Clark et al. 2020 (ELECTRA, arXiv 2003.10555), section 2, samples from the generator;
        Devroye 1986, "Non-Uniform Random Variate Generation", III.2, inversion by sequential
        search, here in two levels.
    Reference: ``fastplm.reference.linear_cross_entropy.sample_ref``.
    """
    where = "linear_cross_entropy_with_sample"
    check(
        isinstance(temperature, float | int) and _FP32.tiny <= temperature <= _FP32.max,
        where,
        "temperature",
        temperature,
        "a number over 0, finite and normal in fp32",
        "Use a small one for the likeliest token, or the statistics' argmax.",
    )
    check_tensor(where, "input", input, ndim=2)
    sampling = _Sampling(
        _seed(where, seed, input),
        _row_index(where, "sample_index", sample_index, input),
        _row_index(where, "position", position, input),
        float(temperature),
    )
    loss, sample, statistics = _vocabulary_pass(
        where,
        input,
        linear_weight,
        target,
        linear_bias,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        normalizer=normalizer,
        return_statistics=return_statistics,
        logits_budget=logits_budget,
        expected_targets=expected_targets,
        sampling=sampling,
    )
    return (loss, sample, statistics) if return_statistics else (loss, sample)


class _Sampling(NamedTuple):
    """How a token is drawn; the first three are None where none is."""

    seed: torch.Tensor | None = None
    sample_index: torch.Tensor | None = None
    position: torch.Tensor | None = None
    temperature: float = 1.0


def _seed(where: str, seed: int | torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    check_seed_form(where, seed)
    if isinstance(seed, torch.Tensor):
        check_same_device(where, input=input, seed=seed)
        return seed
    return torch.full((), seed, dtype=torch.int64, device=input.device)


def _row_index(
    where: str, name: str, index: torch.Tensor | None, input: torch.Tensor
) -> torch.Tensor | None:
    if index is None:
        return None
    check_tensor(where, name, index, ndim=1)
    check_dtype(where, name, index, (torch.int64,))
    check_same_device(where, input=input, **{name: index})
    check_shape(where, name, index, input.shape[:1], "[N], N of `input`", "Pass one a row.")
    return index.contiguous()


def _vocabulary_pass(
    where: str,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    target: torch.Tensor,
    linear_bias: torch.Tensor | None,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    normalizer: torch.Tensor | None,
    return_statistics: bool,
    logits_budget: int | None,
    expected_targets: int | None,
    sampling: _Sampling | None,
) -> tuple[torch.Tensor, torch.Tensor | None, RowStatistics | None]:
    """The loss; the samples and the statistics where they are asked for."""
    check_tensor(where, "input", input, ndim=2)
    check_tensor(where, "linear_weight", linear_weight, ndim=2)
    check_tensor(where, "target", target, ndim=1)
    check_reduction(where, input, reduction, normalizer)
    hint = "Usual values are 0.0 and 0.1."
    check_number(where, "label_smoothing", label_smoothing, 0.0, 1.0, "a share in [0, 1]", hint)
    for name, value, unit, hint in (
        ("logits_budget", logits_budget, "bytes", "0 never keeps logits; None goes by the width."),
        ("expected_targets", expected_targets, "rows", "None is for whoever does not know."),
    ):
        if value is not None:
            check_number(where, name, value, 0, math.inf, f"{unit}, 0 or more, or None", hint)
    input, linear_weight, linear_bias = _autocast(input, linear_weight, linear_bias)
    _check(where, input, linear_weight, linear_bias, target)
    backend = OP.resolve(input, linear_weight, linear_bias, target, ignore_index)
    sample = statistics = None
    if backend == "eager":
        if values_are_known(target):
            check_targets(target, linear_weight, ignore_index)
        rows: dict[str, Any] = {"linear_bias": linear_bias, "ignore_index": ignore_index}
        loss = linear_cross_entropy_ref(
            input,
            linear_weight,
            target,
            reduction=reduction,
            label_smoothing=label_smoothing,
            normalizer=normalizer,
            **rows,
        )
        if sampling is not None:
            sample = sample_ref(input, linear_weight, target, **rows, **sampling._asdict())
        if return_statistics:
            statistics = row_statistics_ref(input, linear_weight, target, **rows)
        return loss, sample, statistics
    operands = input, linear_weight, linear_bias
    kept_rows = _kept_rows(operands, logits_budget, expected_targets, backend)
    if backend == "torch" and kept_rows and multiplies_in(input) is not input.dtype:
        kept_rows = 0  # a CPU without 16-bit products makes them in fp32
    seed, sample_index, position, temperature = sampling or _Sampling()
    # The operator passes no gradient to the normalizer; whoever wants one divides here.
    divides = normalizer is not None and normalizer.requires_grad
    loss, _, log_probability, row_max, row_sum, argmax, drawn, *_ = OP.call(
        last_dim_contiguous(input),
        last_dim_contiguous(linear_weight),
        None if linear_bias is None else last_dim_contiguous(linear_bias),
        target.contiguous(),
        seed,
        sample_index,
        position,
        ignore_index,
        label_smoothing,
        temperature,
        return_statistics,
        kept_rows,
        None if divides else normalizer,
        "sum" if divides else reduction,
        backend,
    )
    if divides:
        loss = reduce_loss(loss, None, reduction, normalizer)
    if return_statistics:
        # An ignored row holds the sum 0.
        logsumexp = (row_max + row_sum.log()).masked_fill(target == ignore_index, 0.0)
        statistics = RowStatistics(argmax, logsumexp, log_probability)
    return loss, None if sampling is None else drawn, statistics


def _autocast(
    input: torch.Tensor, linear_weight: torch.Tensor, linear_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As ``nn.Linear`` would see them, but for fp32 parameters, which the op rounds itself: so
    their gradients stay fp32."""
    (input,) = autocast(input)  # type: ignore[assignment]
    if linear_weight.dtype is not torch.float32:
        linear_weight, linear_bias = autocast(linear_weight, linear_bias)  # type: ignore[assignment]
    return input, linear_weight, linear_bias


def _kept_rows(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    budget: int | None,
    expected: int | None,
    backend: str,
) -> int:
    """How many rows keep their logits for a backward: if there is one and it pays, those that fit.

    All, or so many that their products are worth launching apart from those of the others.
    """
    learns = (tensor is not None and tensor.requires_grad for tensor in operands)
    if not (torch.is_grad_enabled() and any(learns)):
        return 0
    input, linear_weight, _ = operands
    rows = input.shape[0]
    if backend == "triton":  # which multiplies kept rows whether they count or not
        rows = min(rows, expected) if expected is not None else rows if budget is not None else 0
    if budget is None:
        on_cpu = backend == "torch"
        pays = input.shape[1] >= (_KEEP_FROM_WIDTH_ON_A_CPU if on_cpu else _KEEP_FROM_WIDTH)
        budget = _LOGITS_BUDGET if pays else 0
    row_bytes = logit_columns(linear_weight.shape[0]) * input.dtype.itemsize
    if rows * row_bytes <= budget:
        return rows
    some = budget // row_bytes // _ROW_ALIGNMENT * _ROW_ALIGNMENT
    return some if some >= _LEAST_KEPT_ROWS else 0


def logit_columns(vocab: int) -> int:
    """Columns of a row of kept logits: V, up to whole tiles."""
    return -(-vocab // _LOGITS_ALIGNMENT) * _LOGITS_ALIGNMENT


def _check(
    where: str,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    target: torch.Tensor,
) -> None:
    check_dtype(where, "input", input, FLOATING)
    check_dtype(where, "target", target, (torch.int64,), "Use target.long().")
    if linear_bias is not None:
        check_tensor(where, "linear_bias", linear_bias, ndim=1)
    allowed: tuple[torch.dtype, ...] = (input.dtype,)
    if input.dtype in (torch.float16, torch.bfloat16):
        allowed += (torch.float32,)
    for name, value in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if value is not None:
            check_dtype(where, name, value, allowed, f"Convert it with {name}.to(input.dtype).")
    check_same_device(
        where, input=input, linear_weight=linear_weight, linear_bias=linear_bias, target=target
    )
    rows, width = input.shape
    vocab = linear_weight.shape[0]
    check(width > 0, where, "input", "row width 0", "at least 1", "Check the reshape.")
    check(vocab > 0, where, "linear_weight", "no rows", "at least 1", "Check the vocabulary.")
    check_shape(where, "linear_weight", linear_weight, (vocab, width), "[V, E], E of `input`")
    check_shape(where, "target", target, (rows,), "[N], N of `input`", "Pass one target per row.")
    if linear_bias is not None:
        check_shape(where, "linear_bias", linear_bias, (vocab,), "[V], V of `linear_weight`")


def check_targets(target: torch.Tensor, linear_weight: torch.Tensor, ignore_index: int) -> None:
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


# --- backends -------------------------------------------------------------------------------------


def _torch_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    return needs_cpu(input)


def _torch_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *of_rows, normalizer, reduction = arguments
    call = _Forward(*of_rows)
    outputs = _empty_outputs(call, "torch")
    check_targets(call.target, call.linear_weight, call.ignore_index)
    torch_forward(call, *outputs[:-2])
    return _reduced(call, normalizer, reduction, *outputs)


def _torch_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    call = _backward_call(*arguments)
    grads = _empty_gradients(call)
    torch_backward(call, *grads)
    return grads


def _triton_rejects(input: torch.Tensor, *_: Any, forced: bool) -> str | None:
    if input.dtype is torch.float64:
        return "float64: the kernels take fp32, fp16 and bf16"
    return needs_triton(input, forced)


def _triton_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *of_rows, normalizer, reduction = arguments
    call = _Forward(*of_rows)
    outputs = _empty_outputs(call, "triton")
    check_targets(call.target, call.linear_weight, call.ignore_index)
    kernels(_NAME).linear_cross_entropy_fwd(*outputs, **call._asdict())
    if reduction != "mean":
        return _reduced(call, None, reduction, *outputs)
    loss, *others = outputs
    return *kernels(_NAME).mean(loss, outputs[-1], normalizer), *others


def _triton_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    call = _backward_call(*arguments)
    grads = _empty_gradients(call)
    kernels(_NAME).linear_cross_entropy_bwd(*grads, **call._asdict())
    return grads


# --- registration ---------------------------------------------------------------------------------


class _Forward(NamedTuple):
    """The arguments of ``fastplm::linear_cross_entropy_fwd``, but for reduction and backend."""

    input: torch.Tensor
    linear_weight: torch.Tensor
    linear_bias: torch.Tensor | None
    target: torch.Tensor
    seed: torch.Tensor | None
    sample_index: torch.Tensor | None
    position: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    temperature: float
    need_argmax: bool
    kept_rows: int


class _Backward(NamedTuple):
    """The arguments of ``fastplm::linear_cross_entropy_bwd``, but for the backend.

    ``grad_loss`` is that of each row [N]: see ``_backward_call``.
    """

    grad_loss: torch.Tensor
    input: torch.Tensor
    linear_weight: torch.Tensor
    linear_bias: torch.Tensor | None
    target: torch.Tensor
    log_probability: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    grad_logits: torch.Tensor
    slots: torch.Tensor
    order: torch.Tensor
    ignore_index: int
    label_smoothing: float
    need_input: bool
    need_weight: bool
    need_bias: bool


def _backward_call(
    grad_loss: torch.Tensor, denominator: torch.Tensor | None, input: torch.Tensor, *others: Any
) -> _Backward:
    """A backward of rows, from one of their reduction."""
    if denominator is not None:
        grad_loss = grad_loss / denominator
    return _Backward(grad_loss.expand(input.shape[0]), input, *others)


def _reduced(
    call: _Forward,
    normalizer: torch.Tensor | None,
    reduction: str,
    loss: torch.Tensor,
    *others: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """The outputs of a forward of rows, with the reduction of the loss and its denominator: [] for
    "mean", else without elements."""
    if reduction != "mean":
        loss = loss if reduction == "none" else loss.sum()
        return loss, loss.new_empty(0), *others
    denominator = denominator_of(loss, call.target != call.ignore_index, normalizer)
    return loss.sum() / denominator, denominator, *others


def _empty_outputs(call: _Forward, backend: str) -> tuple[torch.Tensor, ...]:
    """Of a forward of rows, to be written.

    Loss, log-probability of the target, maximum and sum of exponentials above it, each [N];
    argmax and sample, int64 [N] or without elements; the gradient of kept logits at grad_loss = 1,
    [kept_rows, columns], of the first rows that count; what is left over is 0 on the Triton
    backend, and is never written on the other. Then what the Triton backend needs again: the rows
    of kept logits, [kept_rows, E], and the order in which it took all rows, int64.

    Maximum and sum, not their logsumexp: its rounding would be an error of the softmax, e.g. 0.05 %
    at logits around 1e4.
    """
    (rows, width), vocab = call.input.shape, call.linear_weight.shape[0]
    dtype = torch.promote_types(call.input.dtype, torch.float32)
    on_triton, kept_rows = backend == "triton", call.kept_rows
    logits = (kept_rows, logit_columns(vocab) if on_triton else vocab)
    return (
        *(call.input.new_empty(rows, dtype=dtype) for _ in range(4)),
        call.target.new_empty(rows if call.need_argmax else 0),
        call.target.new_empty(rows if call.seed is not None else 0),
        call.input.new_empty(logits if kept_rows else (0,)),
        call.input.new_empty((kept_rows, width) if kept_rows and on_triton else (0,)),
        call.target.new_empty(_ORDER_HEAD + rows if on_triton else 0),
    )


def _empty_gradients(call: _Backward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of input, weight and bias to be written; without elements where not needed."""
    bias = call.linear_weight if call.linear_bias is None else call.linear_bias
    return (
        call.input.new_empty(call.input.shape if call.need_input else (0,)),
        call.linear_weight.new_empty(call.linear_weight.shape if call.need_weight else (0,)),
        bias.new_empty(call.linear_weight.shape[:1] if call.need_bias else (0,)),
    )


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *of_rows, normalizer, reduction, backend = arguments
    call = _Forward(*of_rows)
    _check(_NAME, call.input, call.linear_weight, call.linear_bias, call.target)
    outputs = _empty_outputs(call, backend)
    return _reduced(call, normalizer, reduction, *outputs)


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return _empty_gradients(_backward_call(*arguments[:-1]))


def _setup_context(ctx, inputs, output):
    *of_rows, _, reduction, ctx.backend = inputs
    call = _Forward(*of_rows)
    ctx.ignore_index, ctx.label_smoothing = call.ignore_index, call.label_smoothing
    _, *others = output
    denominator, log_probability, row_max, row_sum, _, _, grad_logits, slots, order = others
    ctx.mark_non_differentiable(*others)
    ctx.save_for_backward(
        denominator if reduction == "mean" else None,
        call.input,
        call.linear_weight,
        call.linear_bias,
        call.target,
        log_probability,
        row_max,
        row_sum,
        grad_logits,
        slots,
        order,
    )
    # Or every output without a gradient would get one of zeros, of the size of the logits.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * len(ctx.needs_input_grad)
    need_input, need_weight, need_bias, *others = ctx.needs_input_grad
    needed = (need_input, need_weight, need_bias)
    grads = OP.call_backward(
        grad_loss,
        *ctx.saved_tensors,
        ctx.ignore_index,
        ctx.label_smoothing,
        *needed,
        ctx.backend,
    )
    grads = (grad if need else None for grad, need in zip(grads, needed, strict=True))
    return *grads, *(None for _ in others)


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(11, 16, device=device, requires_grad=True)
    target = torch.tensor([0, 10, -100, 3, 4], device=device)
    bias = weight[:, 0].contiguous()
    for budget in (0, 1 << 20):
        loss, _ = linear_cross_entropy_with_sample(
            input, weight, target, linear_bias=bias, logits_budget=budget, seed=0
        )
        loss.backward(retain_graph=True)


OP = Op(_NAME, reference=linear_cross_entropy_ref, smoke=_smoke)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=_torch_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
OP.define_differentiable(
    "(Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? seed, "
    "Tensor? sample_index, Tensor? position, int ignore_index, float label_smoothing, "
    "float temperature, bool need_argmax, SymInt kept_rows, Tensor? normalizer, str reduction, "
    "str backend) "
    "-> (Tensor loss, Tensor denominator, Tensor log_probability, Tensor row_max, Tensor row_sum, "
    "Tensor argmax, Tensor sample, Tensor grad_logits, Tensor slots, Tensor order)",
    "(Tensor grad_loss, Tensor? denominator, Tensor input, Tensor linear_weight, "
    "Tensor? linear_bias, Tensor target, Tensor log_probability, Tensor row_max, Tensor row_sum, "
    "Tensor grad_logits, Tensor slots, Tensor order, int ignore_index, float label_smoothing, "
    "bool need_input, bool need_weight, bool need_bias, str backend) -> (Tensor, Tensor, Tensor)",
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    setup_context=_setup_context,
    backward=_backward,
)
