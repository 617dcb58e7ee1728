"""The launchers of the forward and the backward."""

from __future__ import annotations

from typing import Any

import torch

from fastplm.triton_kernels._launch import cdiv, launch
from fastplm.triton_kernels.linear_cross_entropy import products
from fastplm.triton_kernels.linear_cross_entropy.backward import (
    Logits,
    backward_kept,
    backward_recomputed,
)
from fastplm.triton_kernels.linear_cross_entropy.launch import operands_of, sums_like
from fastplm.triton_kernels.linear_cross_entropy.rows import Part, parts_of, write_order
from fastplm.triton_kernels.linear_distillation.backward import (
    _linear_distillation_bwd_logits_kernel,
)
from fastplm.triton_kernels.linear_distillation.configs import tile_config
from fastplm.triton_kernels.linear_distillation.forward import (
    both_sides,
    forward_kept,
    forward_recomputed,
)
from fastplm.triton_kernels.linear_distillation.given import Given, pick_logits, place_gradients
from fastplm.triton_kernels.linear_distillation.tiles import DIVERGENCES


def _teacher_of(
    student: dict[str, Any],
    whole: bool | None,
    input: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    indices: torch.Tensor | None,
    probabilities: torch.Tensor | None,
) -> tuple[dict[str, Any], Given | None]:
    """The teacher's operands, or rows of width 0 in their place with the given probabilities.

    ``whole``: whether whole products read its weight; None: nothing reads it.
    """
    if input is None or weight is None:
        assert indices is not None and probabilities is not None
        return student | dict(E=0, HAS_BIAS=False), Given(indices, probabilities)
    if whole is not None:
        weight = products.copied(weight, input.dtype, whole)
    return operands_of(input, weight, bias), None


def _setting(
    given: Given | None,
    divergence: str,
    beta: float,
    temperature: float,
    distillation_weight: float,
    cross_entropy_weight: float,
) -> dict[str, Any]:
    """The arguments of a call that all kernels of D take."""
    return dict(
        inverse_temperature=1.0 / temperature,
        beta=beta,
        distillation_scale=distillation_weight * temperature,
        cross_entropy_weight=cross_entropy_weight,
        DIVERGENCE=DIVERGENCES[divergence if given is None else "given"],
        TEMPERED=temperature != 1.0,
        DISTILLS=distillation_weight != 0,
        HARD=cross_entropy_weight != 0,
    )


def linear_distillation_fwd(
    loss: torch.Tensor,
    distillation: torch.Tensor,
    cross_entropy: torch.Tensor,
    statistics: torch.Tensor,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    *,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    teacher_input: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
    teacher_bias: torch.Tensor | None,
    teacher_indices: torch.Tensor | None,
    teacher_probabilities: torch.Tensor | None,
    target: torch.Tensor,
    has_target: bool,
    ignore_index: int,
    divergence: str,
    beta: float,
    temperature: float,
    distillation_weight: float,
    cross_entropy_weight: float,
    kept_rows: int,
) -> None:
    """Launch the forward, which writes the seven tensors before the keywords.

    Loss and its parts fp32 [N]; statistics fp32 [7, N]; the others as in ``linear_cross_entropy``.
    Without a teacher's rows: teacher_indices int64 and teacher_probabilities fp32, both [N, K].
    """
    weight, kept = products.weight_of(linear_weight, slots, kept_rows)
    products.copy_to(weight, linear_weight)
    write_order(target, ignore_index, kept_rows, order)
    parts = parts_of(order, kept_rows)
    student = operands_of(input, weight[: linear_weight.shape[0]], linear_bias)
    teacher, given = _teacher_of(
        student,
        kept_rows > 0,
        teacher_input,
        teacher_weight,
        teacher_bias,
        teacher_indices,
        teacher_probabilities,
    )
    setting = dict(
        **_setting(given, divergence, beta, temperature, distillation_weight, cross_entropy_weight),
        temperature_squared=temperature**2,
        distillation_weight=distillation_weight,
        HAS_TARGET=has_target,
    )
    results = dict(
        target_ptr=target,
        loss_ptr=loss,
        distillation_ptr=distillation,
        cross_entropy_ptr=cross_entropy,
        statistics_ptr=statistics,
        rows_total=target.shape[0],
    )
    for part in parts:
        if part.kept:
            weights = weight, teacher["w_ptr"]
            forward_kept(
                part, student, teacher, weights, setting, results, grad_logits, kept, given
            )
        else:
            forward_recomputed(part, student, teacher, setting, results, given)


def linear_distillation_bwd(
    grad_input: torch.Tensor,
    grad_weight: torch.Tensor,
    grad_bias: torch.Tensor,
    *,
    grad_loss: torch.Tensor,
    input: torch.Tensor,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    teacher_input: torch.Tensor | None,
    teacher_weight: torch.Tensor | None,
    teacher_bias: torch.Tensor | None,
    teacher_indices: torch.Tensor | None,
    teacher_probabilities: torch.Tensor | None,
    target: torch.Tensor,
    statistics: torch.Tensor,
    grad_logits: torch.Tensor,
    slots: torch.Tensor,
    order: torch.Tensor,
    divergence: str,
    beta: float,
    temperature: float,
    distillation_weight: float,
    cross_entropy_weight: float,
    need_input: bool,
    need_weight: bool,
    need_bias: bool,
) -> None:
    """Launch the backward, which writes the three gradients; those not needed have no elements.

    ``grad_loss`` fp32 [N] has any stride; 0 if all rows have one gradient.
    """
    parts = parts_of(order, grad_logits.shape[0])
    if not parts:
        grad_weight.zero_()
        grad_bias.zero_()
        return
    weight, kept = products.weight_of(linear_weight, slots, grad_logits.shape[0])
    student = operands_of(input, weight[: linear_weight.shape[0]], linear_bias)
    teacher, given = _teacher_of(
        student,
        None if parts[-1].kept else False,
        teacher_input,
        teacher_weight,
        teacher_bias,
        teacher_indices,
        teacher_probabilities,
    )
    setting = _setting(
        given, divergence, beta, temperature, distillation_weight, cross_entropy_weight
    )
    dw, db = grad_weight, grad_bias
    if len(parts) > 1:
        dw, db = sums_like(dw), sums_like(db)
    grads = dict(
        dx_ptr=grad_input if need_input else None,
        dw_ptr=dw if need_weight else None,
        db_ptr=db if need_bias else None,
    )
    results = dict(target_ptr=target, statistics_ptr=statistics, rows_total=target.shape[0])
    config = tile_config("dz", input, teacher_input)
    for number, part in enumerate(parts):
        if part.kept:
            backward_kept(part, student, kept, **grads, w=weight, g=grad_loss, d=grad_logits)
            continue
        picked = None if given is None else pick_logits(part, student, given, setting)

        def write(
            dz: torch.Tensor,
            chunk_start: int,
            columns: int,
            part: Part = part,
            picked: Any = picked,
        ) -> None:
            launch(
                _linear_distillation_bwd_logits_kernel,
                (cdiv(part.rows, config["BLOCK_N"]), cdiv(columns, config["BLOCK_V"])),
                input.device,
                g_ptr=grad_loss,
                dz_ptr=dz,
                chunk_start=chunk_start,
                stride_dzn=dz.stride(0),
                stride_g=grad_loss.stride(0),
                **part.arguments(),
                **both_sides(student, teacher),
                **setting,
                **results,
                **config,
            )
            if given is not None:
                end = chunk_start + columns
                place_gradients(
                    part, student, given, picked, setting, results, dz, chunk_start, end, grad_loss
                )

        backward_recomputed(
            part,
            student,
            **grads,
            accumulates=number > 0,
            logits=Logits(write, config),
            # Kernels that read a stored dZ do not read these.
            target_ptr=target,
            g_ptr=grad_loss,
            log_probability_ptr=statistics,
            max_ptr=statistics,
            sum_ptr=statistics,
            label_smoothing=0.0,
            stride_g=grad_loss.stride(0),
            SMOOTHED=False,
        )
    for grad, total in ((grad_weight, dw), (grad_bias, db)):
        if total is not grad:
            grad.copy_(total)
