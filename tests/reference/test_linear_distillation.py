"""The reference of distillation over a vocabulary, against its definitions computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fastplm.reference.linear_distillation import (
    linear_distillation_ref,
    linear_distillation_topk_ref,
)

P = torch.tensor([[1 / 8, 2 / 8, 5 / 8], [1 / 2, 1 / 2, 0.0]], dtype=torch.float64)
Q = torch.tensor([[1 / 2, 1 / 4, 1 / 4], [1 / 4, 3 / 4, 0.0]], dtype=torch.float64)


def of_probabilities(probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and a table with a given softmax: rows are one-hot and pick their logits."""
    count = probabilities.shape[0]
    logits = probabilities.log().clamp(min=-1e4).T.contiguous()
    return torch.eye(count, dtype=torch.float64), logits


def distilled(**options):
    return linear_distillation_ref(
        *of_probabilities(Q), *of_probabilities(P), reduction="none", **options
    )


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return torch.tensor(
        [
            sum(x * math.log(x / y) for x, y in zip(row, other, strict=True) if x > 0)
            for row, other in zip(p.tolist(), q.tolist(), strict=True)
        ],
        dtype=torch.float64,
    )


def test_divergences_by_hand():
    torch.testing.assert_close(distilled().loss, kl(P, Q))
    torch.testing.assert_close(distilled(divergence="reverse_kl").loss, kl(Q, P))
    for beta in (0.5, 0.1):
        mixture = beta * P + (1 - beta) * Q
        expected = beta * kl(P, mixture) + (1 - beta) * kl(Q, mixture)
        torch.testing.assert_close(distilled(divergence="js", beta=beta).loss, expected)


def test_js_at_its_ends_is_what_it_tends_to_when_divided():
    for beta, divergence in ((0.0, "forward_kl"), (1.0, "reverse_kl")):
        end = distilled(divergence="js", beta=beta).loss
        assert torch.equal(end, distilled(divergence=divergence).loss)
        close = abs(beta - 1e-7)
        near = distilled(divergence="js", beta=close).loss / 1e-7
        torch.testing.assert_close(near, end, rtol=1e-5, atol=0.0)


def test_the_kl_is_that_of_pytorch_and_its_gradient_softmax_minus_softmax():
    logits, teacher = torch.randn(2, 5, 7, dtype=torch.float64)
    logits.requires_grad_()
    identity = torch.eye(7, dtype=torch.float64)
    loss = linear_distillation_ref(
        logits, identity, teacher, identity, temperature=3.0, reduction="sum"
    ).loss
    soft, hard = (logits / 3).log_softmax(1), (teacher / 3).log_softmax(1)
    expected = 9 * F.kl_div(soft, hard, reduction="sum", log_target=True)
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, 3 * (soft.exp() - hard.exp()).detach())


def test_at_a_high_temperature_logits_are_matched_by_their_squares():
    """At high temperatures, logits with mean 0 have the gradient (z - v) / V. It does not depend on
    the temperature, whose square is in the loss (Hinton et al. 2015, section 2.1)."""
    logits, teacher = torch.randn(2, 1, 7, dtype=torch.float64)
    logits, teacher = (x - x.mean() for x in (logits, teacher))
    logits.requires_grad_()
    identity = torch.eye(7, dtype=torch.float64)
    for temperature in (1e4, 1e5):
        loss = linear_distillation_ref(
            logits, identity, teacher, identity, temperature=temperature
        ).loss
        (grad,) = torch.autograd.grad(loss, logits)
        expected = (logits - teacher).detach() / 7
        torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-3)


def test_the_loss_is_the_weighted_sum_of_its_parts():
    target, options = torch.tensor([2, 1]), dict(distillation_weight=0.3, cross_entropy_weight=0.7)
    found = distilled(target=target, temperature=2.0, **options)
    soft = [x.sqrt() / x.sqrt().sum(1, keepdim=True) for x in (P, Q)]
    torch.testing.assert_close(found.distillation, kl(*soft))
    expected = torch.tensor([math.log(4), math.log(4 / 3)], dtype=torch.float64)
    torch.testing.assert_close(found.cross_entropy, expected)
    total = 0.3 * 4 * found.distillation + 0.7 * found.cross_entropy
    torch.testing.assert_close(found.loss, total)


def test_given_probabilities_by_hand():
    rows, table = of_probabilities(Q)
    indices = torch.tensor([[2, 0], [1, -7]])
    probabilities = torch.tensor([[0.6, 0.2], [0.5, 0.0]], dtype=torch.float64)

    def found(**options):
        return linear_distillation_topk_ref(
            rows, table, indices, probabilities, reduction="none", **options
        ).loss

    own = [3 / 4 * math.log(3) + 1 / 4 * math.log(1 / 2), math.log(4 / 3)]
    torch.testing.assert_close(found(), torch.tensor(own, dtype=torch.float64))
    # It is S times the renormalized divergence, plus S log S.
    given = [0.8 * own[0] + 0.8 * math.log(0.8), 0.5 * own[1] + 0.5 * math.log(0.5)]
    torch.testing.assert_close(found(renormalize=False), torch.tensor(given, dtype=torch.float64))


@pytest.mark.parametrize("weights", ((1.0, 0.0), (0.0, 1.0)))
def test_a_weight_of_zero_takes_out_what_is_infinite(weights):
    """A student that excludes the teacher's word, and a target that it excludes."""
    rows, table = of_probabilities(Q)
    found = linear_distillation_ref(
        rows,
        table,
        *of_probabilities(P.flip(0)),
        torch.tensor([0, 0]),
        linear_bias=torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64),
        distillation_weight=weights[0],
        cross_entropy_weight=weights[1],
        reduction="none",
    )
    assert found.distillation.isinf().tolist() == [False, True]
    assert found.loss.isfinite().tolist() == ([True, False] if weights[0] else [True, True])
