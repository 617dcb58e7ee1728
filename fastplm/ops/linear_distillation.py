"""``ops.linear_distillation`` and ``ops.linear_distillation_topk``: one op and its backends.

``_linear_distillation_call.py`` declares the arguments, ``_linear_distillation_torch.py`` is the
backend "torch". The code that keeps logits and multiplies is shared with ``linear_cross_entropy``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastplm._checks import (
    FLOATING,
    check_dtype,
    check_number,
    check_same_device,
    check_scalar,
    check_shape,
    check_tensor,
)
from fastplm._declare import from_fields
from fastplm._modes import values_are_known
from fastplm._registry import Op
from fastplm.errors import ArgumentTypeError, check_choice, fail, shown
from fastplm.ops._common import check_reduction, kernels, triton_rejects
from fastplm.ops._linear_cross_entropy_call import (
    Gradients,
    autocast_layer,
    check_budget,
    check_targets,
    empty_gradients,
    learns,
)
from fastplm.ops._linear_cross_entropy_torch import multiplies_in, vocabulary_rejects
from fastplm.ops._linear_distillation_call import Call, Saved, check_indices, empty_outputs
from fastplm.ops._linear_distillation_torch import torch_backward, torch_forward
from fastplm.ops._reduction import grad_of_rows, reduced, reduced_on_triton, run_loss
from fastplm.ops.linear_cross_entropy import rows_that_fit, usual_budget
from fastplm.reference.linear_distillation import (
    LinearDistillation,
    kl_of_limit,
    linear_distillation_ref,
    linear_distillation_topk_ref,
    probabilities_of_rows,
    rows_chosen,
)

_NAME = "linear_distillation"
DIVERGENCES = ("forward_kl", "reverse_kl", "js")
_FP32 = torch.finfo(torch.float32)


def linear_distillation(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    temperature: float = 1.0,
    divergence: str = "forward_kl",
    beta: float = 0.5,
    distillation_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Tensor | None = None,
    logits_budget: int | None = None,
    expected_targets: int | None = None,
) -> LinearDistillation:
    """Distillation over a vocabulary: a divergence between the softmax of two linear layers, the
    student's and the teacher's, without storing all logits of either.

    ``z = input W^T + b``, ``q = softmax(z / T)``; the teacher's ``p`` is computed in the same way;
    ``loss[n] = distillation_weight T^2 D(p[n], q[n]) + cross_entropy_weight CE(z[n], target[n])``

    with ``D`` one of

    - "forward_kl": ``KL(p || q) = sum_v p[v] log(p[v] / q[v])``
    - "reverse_kl": ``KL(q || p)``
    - "js": ``beta KL(p || m) + (1 - beta) KL(q || m)``, ``m = beta p + (1 - beta) q``, the
      generalized Jensen-Shannon divergence; ``beta=0.5`` is the ordinary one. As ``beta`` goes to
      0 the divergence goes to 0, and the divergence divided by ``beta`` goes to ``KL(p || q)``. As
      ``beta`` goes to 1 it goes to 0, too, and divided by ``1 - beta`` to ``KL(q || p)``. At the
      ends themselves these limits are used, as in Liger and TRL: ``beta=0`` is "forward_kl",
      ``beta=1`` is "reverse_kl".

    Args:
        input: [N, E], the student's rows, fp32, fp16 or bf16 (fp64 on the CPU); any strides whose
            last is 1.
        linear_weight: [V, E], device of ``input``, and its dtype or fp32; any strides whose last
            is 1.
        teacher_input: [N, Et], the teacher's rows; any of the dtypes of ``input``. The teacher's
            tensors are constants: they get no gradient, even if they require one.
        teacher_weight: [V, Et], dtype of ``teacher_input`` or fp32. Student and teacher must have
            the same vocabulary.
        target: int64 [N], for the cross-entropy. A row whose target is ``ignore_index`` is left out
            of both parts of the loss and gets no gradient.
        linear_bias: [V], dtype of ``linear_weight``.
        teacher_bias: [V], dtype of ``teacher_weight``.
        temperature: T, over 0. In the divergence it divides the logits of student and teacher; the
            cross-entropy has temperature 1.
        divergence: "forward_kl" | "reverse_kl" | "js".
        beta: in [0, 1], for "js": the teacher's share of the mixture.
        distillation_weight: the weight of the divergence, 0 or more. The divergence is also
            multiplied by T^2: gradients of soft targets shrink with 1 / T^2, so the ratio of the
            two parts stays the same at every temperature.
        cross_entropy_weight: the weight of the cross-entropy, 0 or more; over 0 only with
            ``target``.
        mask: bool [N], True = the row counts. The content of other rows never matters, and they
            take no time in the matrix products (see ``expected_targets``).
        ignore_index: the target of ignored rows; may lie inside [0, V).
        reduction: "mean" over the rows that count | "sum" | "none".
        normalizer: 0-d tensor that replaces the mean's denominator (for example the number of rows
            of all accumulated batches); only with ``reduction="mean"``.
        logits_budget: bytes for keeping the gradient of the student's logits, in the dtype of
            ``input``, from the forward to the backward. It is kept for all rows, or for the first
            rows that fit (at least 4,096). For the other rows the backward computes the logits of
            student and teacher again, tile by tile. 0 never keeps any. The teacher's logits of kept
            rows exist only in the forward. Default: 2 GiB if ``E + Et`` is at least 552 (for "js"
            276, on a CPU 192), else 0.
        expected_targets: the number of rows that count, if the caller knows it without a sync. It
            is used as in ``linear_cross_entropy``, except that without ``target`` and ``mask`` all
            rows are known to count. A CPU counts the rows itself, unless it is in a trace.

    Returns:
        ``LinearDistillation(loss, distillation, cross_entropy)``. ``distillation`` is the
        divergence without its weight and without T^2. ``cross_entropy`` is without its weight; it
        is 0 without targets. These two have no gradient and are reduced like the loss. All are 0-d,
        or [N] for "none", with 0 in rows that do not count; fp32 (fp64 for an fp64 ``input``).

    Numerics:
        Matrix products of student and teacher use the dtype of their rows; softmax, sums and loss
        use fp32. Gradients are as in ``linear_cross_entropy``. 0 times the logarithm of 0 is 0. Two
        logits of a row whose difference is larger than the largest fp32 number count as infinitely
        far apart. A weight of 0 removes a part of the loss even if that part is infinite. The mean
        over no rows is 0 with zero gradients.

    Determinism:
        Forward and backward repeat bit for bit on one backend (on the CPU for one number of
        threads); no atomics.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or choices that do not fit;
            on the CPU also a target outside [0, V). On CUDA, and where a compiled function runs
            the eager backend, such a target is not searched for, as that would be a sync: the
            row's cross-entropy is NaN, and so are the gradients.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> rows, weight = torch.zeros(3, 8), torch.randn(4, 8)  # all logits are 0
        >>> bias = torch.tensor([1.0, 0.0, 0.0, 0.0])
        >>> ops.linear_distillation(rows, weight, rows, weight, teacher_bias=bias).loss
        tensor(0.1180)

    Source: Hinton, Vinyals and Dean 2015 (arXiv 1503.02531), section 2, for soft targets and T^2;
        Agarwal et al. 2024 (GKD, arXiv 2306.13649), section 2, for the generalized Jensen-Shannon
        divergence; the running sums of Milakov and Gimelshein 2018 (arXiv 1805.02867).
    Reference: ``fastplm.reference.linear_distillation.linear_distillation_ref``.
    """
    call = Call._make(
        (
            *(input, linear_weight, linear_bias, teacher_input, teacher_weight, teacher_bias),
            *(None, None, target, target is not None, ignore_index, divergence, beta, temperature),
            *(distillation_weight, cross_entropy_weight, 0, normalizer, reduction),
        )
    )
    for name in ("teacher_input", "teacher_weight"):
        check_tensor(_NAME, name, getattr(call, name), ndim=2)
    return _distilled(call, mask, logits_budget, expected_targets)


def linear_distillation_topk(
    input: Tensor,
    linear_weight: Tensor,
    teacher_indices: Tensor,
    teacher_probabilities: Tensor,
    target: Tensor | None = None,
    *,
    linear_bias: Tensor | None = None,
    renormalize: bool = True,
    temperature: float = 1.0,
    distillation_weight: float = 1.0,
    cross_entropy_weight: float = 0.0,
    mask: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    normalizer: Tensor | None = None,
    logits_budget: int | None = None,
    expected_targets: int | None = None,
) -> LinearDistillation:
    """``linear_distillation`` from stored soft targets: the K most probable tokens of each row.

    ``D(p, q) = sum_k p[k] log(p[k] / q[indices[k]])`` is the forward KL. (The reverse KL would be
    infinite, as the other tokens have the teacher probability 0.)

    Args:
        teacher_indices: int64 [N, K], the tokens of a row, each one once.
        teacher_probabilities: [N, K], their probabilities at this ``temperature``, of any floating
            dtype; a constant. An index with probability 0 is not read and may have any value, so
            rows with fewer tokens can be filled up. A row with only zeros has the divergence 0.
        renormalize: True: the probabilities are divided by their sum, so tokens not given have
            probability 0, and the minimum of D is 0. False: they are used as given, and tokens not
            given have no term. With a sum S under 1, D is then ``S * (renormalized D) + S log S``:
            its minimum, for the same student, is ``S log S``, which is below 0.
        temperature: T, over 0. It divides the student's logits in the divergence.
        logits_budget: as in ``linear_distillation``, but the default of ``linear_cross_entropy``.
        the others: as in ``linear_distillation``.

    Returns, Numerics, Determinism, Raises: as ``linear_distillation``; on the CPU also an index
        outside [0, V) is an error, elsewhere the row's divergence is NaN.

    Examples:
        >>> rows, weight = torch.zeros(1, 8), torch.randn(4, 8)  # all logits are 0
        >>> indices, probabilities = torch.tensor([[2, 0]]), torch.tensor([[0.6, 0.2]])
        >>> ops.linear_distillation_topk(rows, weight, indices, probabilities).loss  # 3/4 and 1/4
        tensor(0.8240)

    Source: as ``linear_distillation``; Tan et al. 2019 (arXiv 1902.10461) for stored top-K
        distributions.
    Reference: ``fastplm.reference.linear_distillation.linear_distillation_topk_ref``.
    """
    call = Call._make(
        (
            *(input, linear_weight, linear_bias, None, None, None),
            *(teacher_indices, teacher_probabilities, target, target is not None, ignore_index),
            *("forward_kl", 0.5, temperature, distillation_weight, cross_entropy_weight),
            *(0, normalizer, reduction),
        )
    )
    where = "linear_distillation_topk"
    for name in ("teacher_indices", "teacher_probabilities"):
        check_tensor(where, name, getattr(call, name), ndim=2)
    check_dtype(where, "teacher_probabilities", teacher_probabilities, FLOATING)
    if not isinstance(renormalize, bool):
        fix = "True divides the probabilities of a row by their sum."
        got, expected = shown(renormalize), "True or False"
        fail(where, "renormalize", got, expected, fix, ArgumentTypeError)
    return _distilled(call, mask, logits_budget, expected_targets, renormalize=renormalize)


def _distilled(
    call: Call,
    mask: Tensor | None,
    logits_budget: int | None,
    expected_targets: int | None,
    *,
    renormalize: bool = False,
) -> LinearDistillation:
    """Check and run a call. The public functions have checked only the teacher's arguments."""
    where, all_count = call.where, call.target is None and mask is None
    _check_arguments(call, mask)
    check_budget(where, logits_budget, expected_targets)
    input, weight, bias = autocast_layer(call.input, call.linear_weight, call.linear_bias)
    teacher = _constants(call.teacher_input, call.teacher_weight, call.teacher_bias)
    call = call._replace(
        input=input,
        linear_weight=weight,
        linear_bias=bias,
        teacher_input=teacher[0],
        teacher_weight=teacher[1],
        teacher_bias=teacher[2],
        target=rows_chosen(call.input, call.target, None, call.ignore_index),
        divergence=kl_of_limit(call.divergence, call.beta),
        beta=float(call.beta),
        temperature=float(call.temperature),
        distillation_weight=float(call.distillation_weight),
        cross_entropy_weight=float(call.cross_entropy_weight),
    )
    OP.check(call, where)
    backend = OP.resolve(call)
    call = call._replace(target=rows_chosen(call.input, call.target, mask, call.ignore_index))
    if call.teacher_probabilities is not None:
        dtype = torch.promote_types(call.input.dtype, torch.float32)
        counts = call.target != call.ignore_index
        given = probabilities_of_rows(call.teacher_probabilities, counts, renormalize, dtype)
        call = call._replace(teacher_probabilities=given)
    if backend == "eager":
        return _eager(call)
    kept_rows = _kept_rows(call, logits_budget, expected_targets, backend, all_count)
    call = OP.arguments.laid_out(call)._replace(kept_rows=kept_rows)
    return LinearDistillation(*run_loss(OP, call, backend, losses=3)[:3])


def _check_arguments(call: Call, mask: Tensor | None) -> None:
    """Check what the declaration of ``Call`` cannot express."""
    where = call.where
    parameters = "linear_weight", "linear_bias", "teacher_bias"
    OP.arguments.check_dimensions(where, call, "input", *parameters)
    check_reduction(where, call.input, call.reduction, call.normalizer)
    check_scalar(where, "ignore_index", call.ignore_index, int)
    check_choice(where, "divergence", call.divergence, DIVERGENCES)
    share = "0.5 is the ordinary one; near 0 it goes to the forward KL."
    check_number(where, "beta", call.beta, 0.0, 1.0, "a share in [0, 1]", share)
    hint = "Usual values are 1 to 4."
    expected = "a number over 0, finite and normal in fp32"
    check_number(where, "temperature", call.temperature, _FP32.tiny, _FP32.max, expected, hint)
    expected, hint = "a number of 0 or more", "0 leaves it out."
    for name in ("distillation_weight", "cross_entropy_weight"):
        check_number(where, name, getattr(call, name), 0.0, _FP32.max, expected, hint)
    if call.target is None and call.cross_entropy_weight != 0:
        fail(
            where,
            "target",
            f"None with cross_entropy_weight={call.cross_entropy_weight}",
            "targets for the cross-entropy",
            "Pass them, or leave the weight at 0.",
        )
    if mask is not None:
        check_tensor(where, "mask", mask, ndim=1)
        fix = "Pass a bool tensor, True = the row counts."
        check_dtype(where, "mask", mask, (torch.bool,), fix)
        check_shape(where, "mask", mask, call.input.shape[:1], "[N]")
        check_same_device(where, input=call.input, mask=mask)


def _constants(*teacher: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The teacher's rows, weight and bias, detached and cast by autocast."""
    input, weight, bias = (None if one is None else one.detach() for one in teacher)
    if input is None or weight is None:
        return None, None, None
    return autocast_layer(input, weight, bias)


_distillation = from_fields(linear_distillation_ref)
_topk = from_fields(linear_distillation_topk_ref)


def _eager(call: Call) -> LinearDistillation:
    _check_values(call)
    # Without targets of the user, ``call.target`` still says which rows count.
    target, mask = call.target if call.has_target else None, call.target != call.ignore_index
    rows = {"target": target, "mask": mask}
    if call.teacher_input is None:  # _distilled has renormalized the probabilities
        return _topk(call, **rows, renormalize=False)
    return _distillation(call, **rows)


def _kept_rows(
    call: Call, budget: int | None, expected: int | None, backend: str, all_count: bool
) -> int:
    """How many rows keep the gradient of their logits for the backward; 0 if it does not pay."""
    if not learns(call):
        return 0
    rows, on_cpu = call.input.shape[0], backend == "torch"
    if on_cpu and multiplies_in(call.input) is not call.input.dtype:
        return 0  # a CPU without 16-bit products computes them in fp32
    if on_cpu and values_are_known(call.target):
        rows = int((call.target != call.ignore_index).sum())
    elif expected is not None:
        rows = torch.sym_min(rows, expected)
    elif not on_cpu and budget is None and not all_count:
        rows = 0  # a GPU multiplies kept rows whether they count or not
    if budget is None:
        budget = _usual_budget(call, on_cpu=on_cpu)
    return rows_that_fit(rows, call.input, call.linear_weight, budget)


def _usual_budget(call: Call, *, on_cpu: bool) -> int:
    """The default of ``logits_budget``: is it faster to keep the gradient of the logits?

    Keeping it saves matrix products that are otherwise repeated: one of the student and one of the
    teacher in the backward and, for "js", one more of each in the forward.

    On a GPU it takes one pass to write the logits of each side, and one to write the gradient.
    Reading them is hidden behind the arithmetic, which is the same in both cases (by the machine
    code for sm_90, 220 cycles of memory for 1,024 tokens of both sides, and 600 of instructions).
    So keeping pays from E + Et = 3 * 96 on, and for "js" from half of that on. Without a teacher's
    rows two passes are compared with E, as in ``linear_cross_entropy``.
    """
    sides = (call.input,) if call.teacher_input is None else (call.input, call.teacher_input)
    width = sum(side.shape[1] for side in sides)
    if on_cpu:
        return usual_budget(width, on_cpu=True)
    repeats = 2 if call.divergence == "js" else 1
    return usual_budget(repeats * width, passes=len(sides) + 1, on_cpu=False)


# --- backends -------------------------------------------------------------------------------------


def _torch_forward(call: Call) -> tuple[Tensor, ...]:
    outputs = empty_outputs(call, "torch")
    _check_values(call)
    torch_forward(call, outputs)
    return reduced(call, outputs, losses=3)


def _check_values(call: Call) -> None:
    if call.has_target and values_are_known(call.target):
        check_targets(call, call.where)
    check_indices(call)


def _torch_backward(grad: Tensor, saved: Saved) -> Gradients:
    grads = empty_gradients(saved)
    torch_backward(grad_of_rows(grad, saved), saved, grads)
    return grads


def _triton_forward(call: Call) -> tuple[Tensor, ...]:
    outputs, arguments = empty_outputs(call, "triton"), call._asdict()
    _check_values(call)
    for name in ("normalizer", "reduction"):
        del arguments[name]
    kernels(_NAME).linear_distillation_fwd(*outputs, **arguments)
    return reduced_on_triton(call, outputs, losses=3)


def _triton_backward(grad: Tensor, saved: Saved) -> Gradients:
    grads, arguments = empty_gradients(saved), saved._asdict()
    for name in ("weight", "bias"):
        arguments[f"need_{name}"] = arguments.pop(f"need_linear_{name}")
    arguments["grad_loss"] = grad_of_rows(grad, saved)
    for name in ("denominator", "has_target", "ignore_index"):
        del arguments[name]
    kernels(_NAME).linear_distillation_bwd(*grads, **arguments)
    return grads


def _triton_rejects(call: Call, *, forced: bool) -> str | None:
    if call.teacher_input is not None and call.teacher_input.dtype is torch.float64:
        return "a teacher in float64: the kernels take fp32, fp16 and bf16"
    return triton_rejects(call, forced=forced)


# --- registration ---------------------------------------------------------------------------------


def _smoke(device: torch.device) -> None:
    input = torch.randn(5, 16, device=device, requires_grad=True)
    weight = torch.randn(11, 16, device=device, requires_grad=True)
    teacher = torch.randn(5, 24, device=device), torch.randn(11, 24, device=device)
    target = torch.tensor([0, 10, -100, 3, 4], device=device)
    for divergence in DIVERGENCES:
        for budget in (0, 1 << 20):
            loss, *_ = linear_distillation(
                input,
                weight,
                *teacher,
                target,
                divergence=divergence,
                cross_entropy_weight=0.5,
                logits_budget=budget,
            )
            loss.backward()


OP = Op(
    _NAME,
    Call,
    results=(
        *("loss", "distillation", "cross_entropy", "denominator", "statistics"),
        *("grad_logits", "slots", "order"),
    ),
    fake=lambda call, backend: reduced(call, empty_outputs(call, backend), losses=3),
    reference=linear_distillation_ref,
    eager=_eager,
    smoke=_smoke,
    saved=Saved,
    gradients=("input", "linear_weight", "linear_bias"),
    fake_backward=lambda grad, saved: empty_gradients(saved),
    unused=lambda call, *_: () if call.reduction == "mean" else ("denominator",),
)
OP.backend("torch", forward=_torch_forward, backward=_torch_backward, rejects=vocabulary_rejects)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
