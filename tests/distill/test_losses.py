"""The losses of distillation against plain formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastplm.distill import losses
from fastplm.testing import check_in_fp64

from .conftest import DOUBLE, HEADS, MASK, B, T


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def agrees(ours, plain, *inputs: torch.Tensor, teacher: int = 1) -> None:
    """Compares loss and gradients with a formula; the last inputs, the teacher's, get none."""

    def run(function, dtype):
        given = [value.to(dtype, copy=True).requires_grad_() for value in inputs]
        for value in given[len(given) - teacher :]:
            value.requires_grad_(False)
        loss = function(*given)
        loss.backward()
        grads = {f"grad {i}": value.grad for i, value in enumerate(given) if value.requires_grad}
        return {"loss": loss.detach(), **grads}

    check_in_fp64(run(ours, DOUBLE), run(plain, DOUBLE), run(plain, torch.float32))


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
@pytest.mark.parametrize("at_once", [1, 1 << 22])
@pytest.mark.parametrize("kind", ["relation", "score"])
def test_relations_and_scores(kind, at_once, mask, monkeypatch):
    monkeypatch.setattr(losses, "_SCORES_AT_ONCE", at_once)

    def scores(a, b, b_index, length):
        a, b = a[b_index, :length], b[b_index, :length]
        width = a.shape[-1] // HEADS
        parts = (slice(h * width, (h + 1) * width) for h in range(HEADS))
        return torch.stack([a[:, part] @ b[:, part].T / width**0.5 for part in parts])

    def plain(a, b, c, d):
        total = 0
        for index in range(B):
            length = T if mask is None else int(mask[index].sum())
            ours, theirs = scores(a, b, index, length), scores(c, d, index, length)
            if kind == "score":
                total = total + (ours - theirs).square().mean((0, 2)).sum()
            else:
                expected, log = theirs.softmax(-1), ours.log_softmax(-1)
                total = total + (expected * (theirs.log_softmax(-1) - log)).sum() / HEADS
        return total

    function = losses.relation_divergence if kind == "relation" else losses.score_distance

    def ours(a, b, c, d):
        return function((a, b), (c, d), HEADS, mask)

    inputs = [drawn(B, T, width, seed=seed) for seed, width in enumerate((6, 6, 10, 10))]
    for value in inputs if mask is not None else ():
        value[~mask] = 3e4  # values of padding are not read
    agrees(ours, plain, *inputs, teacher=2)


def test_relations_of_values_have_both_gradients():
    value, theirs = drawn(B, T, 6, seed=1), drawn(B, T, 6, seed=2)

    def plain(value, theirs):
        def log(x):
            heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return (heads @ heads.mT / 3**0.5).log_softmax(-1)

        return F.kl_div(log(value), log(theirs), reduction="sum", log_target=True) / HEADS

    def ours(value, theirs):
        return losses.relation_divergence((value, value), (theirs, theirs), HEADS)

    agrees(ours, plain, value, theirs)


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "padded"])
def test_distances_of_hidden_states(mask):
    student, teacher = drawn(B, T, 5, seed=1), drawn(B, T, 5, seed=2)
    kept = torch.ones(B, T, dtype=torch.bool) if mask is None else mask

    def cosine(student, teacher):
        a, b = student[kept], teacher[kept]
        return (1 - (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))).sum()

    def squares(student, teacher):
        return (student[kept] - teacher[kept]).square().sum() / 5

    agrees(lambda s, t: losses.cosine_distance(s, t, mask), cosine, student, teacher)
    agrees(lambda s, t: losses.squared_distance(s, t, mask), squares, student, teacher)


def test_divergence_of_detections():
    student, teacher = drawn(B, T, seed=1), drawn(B, T, seed=2)

    def plain(student, teacher):
        total = 0
        for sign in (1, -1):  # the logits of "replaced" and of "original"
            log_p, log_q = (F.logsigmoid(sign * x[MASK] / 3) for x in (teacher, student))
            total = total + (log_p.exp() * (log_p - log_q)).sum()
        return 9 * total

    def ours(student, teacher):
        return losses.detection_divergence(student, teacher, 3.0, MASK)

    agrees(ours, plain, student, teacher)
