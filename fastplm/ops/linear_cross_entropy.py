"""``ops.linear_cross_entropy``: the public functions, and its backends.

``_linear_cross_entropy_call.py`` declares the arguments, ``_linear_cross_entropy_torch.py`` is the
backend "torch".
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fastplm._checks import check_bool, check_number, check_tensor
from fastplm._declare import from_fields
from fastplm._modes import values_are_known
from fastplm._registry import Op
from fastplm.errors import fail
from fastplm.ops._common import (
    check_reduction,
    kernels,
    seed_tensor,
    triton_rejects,
)
from fastplm.ops._linear_cross_entropy_call import (
    Call,
    Gradients,
    Saved,
    autocast_layer,
    check_budget,
    check_targets,
    empty_gradients,
    empty_outputs,
    learns,
    logit_columns,
)
from fastplm.ops._linear_cross_entropy_torch import (
    multiplies_in,
    torch_backward,
    torch_forward,
    vocabulary_rejects,
)
from fastplm.ops._reduction import grad_of_rows, reduced, reduced_on_triton, run_loss
from fastplm.reference.linear_cross_entropy import (
    RowStatistics,
    linear_cross_entropy_ref,
    row_statistics_ref,
    sample_ref,
)

_NAME = "linear_cross_entropy"

# Keeping 16-bit logits costs about two passes over them that nothing hides, computing them again
# costs one more product. Both an H100 and two cores of an EPYC were measured to break even between
# 128 and 256 columns (benchmarks/results), that is at about 96 columns a pass. By the H100's rates
# alone it would be 184: products of so few columns do not run at the full rate.
_COLUMNS_OF_A_PASS = 96
_LOGITS_BUDGET = 2 << 30
# Where not all rows fit: fewer than this would cost more in launches and passes over the weight's
# gradient (245 rows' worth each) than they save.
_LEAST_KEPT_ROWS = 4096
_ROW_ALIGNMENT = 256
_FP32 = torch.finfo(torch.float32)


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    normalizer: Tensor | None = None,
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
            tile by tile, for the others; 0 never keeps any. Default: rows of 192 columns or more
            may take 2 GiB, narrower ones, to which a product is cheaper than the traffic, nothing.
        expected_targets: how many rows should count, if the caller knows it without asking the
            device. A GPU multiplies rows that keep their logits whether they count or not, by the
            vendor's library; so only that many do, and without this number none, unless
            ``logits_budget`` is given. More or fewer targets cost time, never correctness. A CPU
            counts them: there it has no effect.

    Returns:
        0-d, or [N] for "none", 0 in ignored rows; fp32 (fp64 for fp64 inputs). With
        ``return_statistics`` the pair (loss, ``RowStatistics``).

    Numerics:
        Products in the dtype of ``input``, to which ``linear_weight`` and ``linear_bias`` are
        rounded (a CPU without instructions for 16 bits multiplies the same numbers in fp32);
        softmax, sums and loss in fp32. The gradient of ``input`` comes in its dtype; that of the
        vocabulary is accumulated in fp32 and rounded once, to the dtype of ``linear_weight``: not
        at all if that is fp32 (on the CPU, whose products of 16 bits come in 16 bits, those round
        it). Kept logits are rounded to the dtype of ``input``; of fp32 a GPU makes them in TF32
        where ``torch.backends`` allows it. Each row's maximum and sum are kept apart, so a large
        common offset costs no digits. The mean over no rows is 0 with zero gradients, where
        PyTorch's is NaN: the training step must survive.

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
    call = Call._make(
        (
            *(input, linear_weight, linear_bias, target, None, None, None, ignore_index),
            *(label_smoothing, 1.0, return_statistics, 0, False, normalizer, reduction),
        )
    )
    loss, _, statistics = _vocabulary_pass(_NAME, call, logits_budget, expected_targets)
    return (loss, statistics) if return_statistics else loss


def linear_cross_entropy_with_sample(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    normalizer: Tensor | None = None,
    return_statistics: bool = False,
    logits_budget: int | None = None,
    expected_targets: int | None = None,
    temperature: float = 1.0,
    seed: int | Tensor,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
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
    if not isinstance(temperature, float | int) or not _FP32.tiny <= temperature <= _FP32.max:
        fail(
            where,
            "temperature",
            temperature,
            "a number over 0, finite and normal in fp32",
            "Use a small one for the likeliest token, or the statistics' argmax.",
        )
    check_tensor(where, "input", input, ndim=2)
    for name, index in (("sample_index", sample_index), ("position", position)):
        if index is not None:
            check_tensor(where, name, index, ndim=1)
    seed = seed_tensor(where, seed, input)
    call = Call._make(
        (
            *(input, linear_weight, linear_bias, target, seed, sample_index, position),
            *(ignore_index, label_smoothing, float(temperature), return_statistics),
            *(0, False, normalizer, reduction),
        )
    )
    loss, sample, statistics = _vocabulary_pass(where, call, logits_budget, expected_targets)
    return (loss, sample, statistics) if return_statistics else (loss, sample)


def _vocabulary_pass(
    where: str, call: Call, logits_budget: int | None, expected_targets: int | None
) -> tuple[Tensor, Tensor | None, RowStatistics | None]:
    """The loss, and the samples and the statistics if requested."""
    OP.arguments.check_dimensions(where, call, "input", "linear_weight", "linear_bias")
    check_reduction(where, call.input, call.reduction, call.normalizer)
    check_bool(where, "return_statistics", call.need_argmax)
    expected, hint = "a share in [0, 1]", "Usual values are 0.0 and 0.1."
    check_number(where, "label_smoothing", call.label_smoothing, 0.0, 1.0, expected, hint)
    check_budget(where, logits_budget, expected_targets)
    input, weight, bias = autocast_layer(call.input, call.linear_weight, call.linear_bias)
    call = call._replace(input=input, linear_weight=weight, linear_bias=bias)
    OP.check(call, where)
    backend = OP.resolve(call)
    if backend == "eager":
        return _eager(call)
    kept_rows, overflow_unlikely = _kept_rows(call, logits_budget, expected_targets, backend)
    call = OP.arguments.laid_out(call)._replace(
        kept_rows=kept_rows, overflow_unlikely=overflow_unlikely
    )
    outputs = run_loss(OP, call, backend)
    loss, _, log_probability, row_max, row_sum, argmax, drawn, *_ = outputs
    statistics = None
    if call.need_argmax:
        # An ignored row holds the sum 0.
        ignored = call.target == call.ignore_index
        logsumexp = (row_max + row_sum.log()).masked_fill(ignored, 0.0)
        statistics = RowStatistics(argmax, logsumexp, log_probability)
    return loss, None if call.seed is None else drawn, statistics


_loss = from_fields(linear_cross_entropy_ref)
_sample = from_fields(sample_ref)
_statistics = from_fields(row_statistics_ref)


def _eager(call: Call) -> tuple[Tensor, Tensor | None, RowStatistics | None]:
    if values_are_known(call.target):
        check_targets(call)
    loss = _loss(call)
    sample = None if call.seed is None else _sample(call)
    return loss, sample, _statistics(call) if call.need_argmax else None


def _kept_rows(
    call: Call, budget: int | None, expected: int | None, backend: str
) -> tuple[int, bool]:
    """How many rows keep their logits for a backward: where it pays, those that fit; and whether
    these are all that are expected to count."""
    if not learns(call):
        return 0, False
    input, linear_weight = call.input, call.linear_weight
    rows = input.shape[0]
    if backend == "triton":  # which multiplies kept rows whether they count or not
        most = rows if budget is not None else 0
        rows = most if expected is None else torch.sym_min(rows, expected)
    if budget is None:
        budget = usual_budget(input.shape[1], on_cpu=backend == "torch")
    overflow_unlikely = expected is not None and (
        rows_that_fit(expected, input, linear_weight, budget) == expected
    )
    if backend == "torch" and multiplies_in(input) is not input.dtype:
        return 0, overflow_unlikely  # a CPU without 16-bit products makes them in fp32
    return rows_that_fit(rows, input, linear_weight, budget), overflow_unlikely


def usual_budget(columns: int, passes: int = 2, *, on_cpu: bool) -> int:
    """The default of ``logits_budget``: bytes where keeping pays, else 0.

    Args:
        columns: the width of all products that keeping saves.
        passes: over 16-bit logits that it costs a GPU.
    """
    pays = columns >= (2 if on_cpu else passes) * _COLUMNS_OF_A_PASS
    return _LOGITS_BUDGET if pays else 0


def rows_that_fit(rows: int, input: Tensor, linear_weight: Tensor, budget: int) -> int:
    """All rows whose logits fit in so many bytes, or so many that they are worth their launches."""
    most = budget // (logit_columns(linear_weight.shape[0]) * input.dtype.itemsize)
    if statically_known_true(rows <= most):
        return rows
    # A graph for any number of rows keeps so many of them at most, too.
    most = most // _ROW_ALIGNMENT * _ROW_ALIGNMENT
    return torch.sym_min(rows, most) if most >= _LEAST_KEPT_ROWS else 0


# --- backends -------------------------------------------------------------------------------------


def _torch_forward(call: Call) -> tuple[Tensor, ...]:
    outputs = empty_outputs(call, "torch")
    check_targets(call)
    torch_forward(call, outputs)
    return reduced(call, outputs)


def _torch_backward(grad: Tensor, saved: Saved) -> Gradients:
    grads = empty_gradients(saved)
    torch_backward(grad_of_rows(grad, saved), saved, grads)
    return grads


def _triton_forward(call: Call) -> tuple[Tensor, ...]:
    outputs, arguments = empty_outputs(call, "triton"), call._asdict()
    check_targets(call)
    for name in ("normalizer", "reduction", "overflow_unlikely"):
        del arguments[name]
    kernels(_NAME).linear_cross_entropy_fwd(*outputs, **arguments)
    return reduced_on_triton(call, outputs)


def _triton_backward(grad: Tensor, saved: Saved) -> Gradients:
    grads, arguments = empty_gradients(saved), saved._asdict()
    for name in ("weight", "bias"):
        arguments[f"need_{name}"] = arguments.pop(f"need_linear_{name}")
    arguments["grad_loss"] = grad_of_rows(grad, saved)
    del arguments["denominator"]
    kernels(_NAME).linear_cross_entropy_bwd(*grads, **arguments)
    return grads


# --- registration ---------------------------------------------------------------------------------


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


OP = Op(
    _NAME,
    Call,
    results=(
        *("loss", "denominator", "log_probability", "row_max", "row_sum", "argmax", "sample"),
        *("grad_logits", "slots", "order"),
    ),
    fake=lambda call, backend: reduced(call, empty_outputs(call, backend)),
    reference=linear_cross_entropy_ref,
    eager=_eager,
    smoke=_smoke,
    saved=Saved,
    gradients=("input", "linear_weight", "linear_bias"),
    fake_backward=lambda grad, saved: empty_gradients(saved),
    unused=lambda call, *_: () if call.reduction == "mean" else ("denominator",),
)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=vocabulary_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=triton_rejects)
