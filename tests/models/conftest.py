"""Holding a model to its parent class: the parent in fp64 is the truth, in fp32 the measure."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastplm.testing import FORWARD_FACTOR, GRADIENT_FACTOR, ReversedReductions, check_error

SHUFFLES = 4


class ShuffledReductions(TorchDispatchMode):
    """Every matrix product inside adds its summands in a random order.

    A loss is one number, and how far off one or two runs of it are is chance; several orders show
    what error PyTorch's own fp32 really has.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        products = (aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default)
        if func in products:
            *rest, a, b = args
            order = torch.randperm(a.shape[-1], generator=self.generator)
            args = (*rest, a[..., order], b[..., order, :])
        return func(*args, **(kwargs or {}))


Outputs = dict[str, Tensor]


def _outputs_and_gradients(model: nn.Module, run: Callable) -> tuple[Outputs, Outputs]:
    model.zero_grad()
    outputs = run(model)
    if "loss" in outputs:
        outputs["loss"].backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {name: value.detach() for name, value in outputs.items()}, gradients


def _check(
    out: tuple[Outputs, Outputs],
    gold: tuple[Outputs, Outputs],
    bases: Sequence[tuple[Outputs, Outputs]],
) -> None:
    siblings = tuple(gold[1].values())
    for kind, factor, related in ((0, FORWARD_FACTOR, ()), (1, GRADIENT_FACTOR, siblings)):
        assert out[kind].keys() == gold[kind].keys()
        for name, value in out[kind].items():
            measures = [base[kind][name] for base in bases]
            check_error(name, value, gold[kind][name], measures, factor, related)


def _measures(model: nn.Module, run: Callable) -> list[tuple[Outputs, Outputs]]:
    """What PyTorch itself errs: eager and, its own default for these models, SDPA."""
    measures = []
    for implementation in ("eager", "sdpa"):
        model = copy.deepcopy(model)
        model.set_attn_implementation(implementation)
        measures.append(_outputs_and_gradients(model, run))
        for mode in (ReversedReductions(), *map(ShuffledReductions, range(SHUFFLES))):
            with mode:
                measures.append(_outputs_and_gradients(model, run))
    return measures


def _hold(
    ours: nn.Module,
    parent: nn.Module,
    run: Callable[[nn.Module], Mapping[str, Tensor]],
    parent_run: Callable[[nn.Module], Mapping[str, Tensor]] | None = None,
) -> None:
    """Every output, and every parameter's gradient of output "loss", within the error budget.

    Args:
        ours, parent: models of the same parameter names (or the same model, to hold one of its
            paths to another); the parent is given the values of ours.
        run: outputs by name; called on both.
        parent_run: what is called on the parent instead.
    """
    parent_run = parent_run or run
    if parent is not ours:
        parent.load_state_dict(ours.state_dict())
    gold = _outputs_and_gradients(copy.deepcopy(parent).double(), parent_run)
    _check(_outputs_and_gradients(ours, run), gold, _measures(parent, parent_run))


@pytest.fixture
def hold() -> Callable[..., None]:
    return _hold
