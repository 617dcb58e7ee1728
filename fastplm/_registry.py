"""The one place that calls ``torch.library``: schema, fake, autograd and backends of each op.

An op ``<op>`` has a public function ``ops.<op>`` and, for its fused backends, the opaque operators
``fastplm::<op>_fwd`` and ``fastplm::<op>_bwd`` (one operator ``fastplm::<op>`` if it has no
gradient). The last argument of their schemas is ``str backend``. The eager backend is not behind an
operator: ``ops.<op>`` calls the reference itself, so it stays ordinary differentiable PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastplm._backends import BACKENDS, Backend, accepts_all, resolve

_LIBRARY = torch.library.Library("fastplm", "DEF")

#: Every op by name, in the order of definition.
OPS: dict[str, Op] = {}


class Op:
    """An op and its backends.

    Args:
        name: the op's stem; the same in every folder of the tree.
        reference: the eager reference, ``<op>_ref``.
        smoke: runs the op once on tiny inputs of a device (``smoke(device)``); used by
            ``fastplm info`` to say what works by trying it.
    """

    def __init__(
        self, name: str, *, reference: Callable[..., Any], smoke: Callable[[torch.device], Any]
    ) -> None:
        if name in OPS:
            raise ValueError(f"op {name!r} is defined twice")
        self.name = name
        self.reference = reference
        self.smoke = smoke
        self.backends: dict[str, Backend] = {"eager": Backend("eager", accepts_all)}
        OPS[name] = self

    def backend(
        self,
        name: str,
        *,
        forward: Callable[..., Any],
        rejects: Callable[..., str | None],
        backward: Callable[..., Any] | None = None,
    ) -> None:
        """Add an implementation; ``resolve`` tries them in the order of ``BACKENDS``."""
        self.backends[name] = Backend(name, rejects, forward, backward)
        self.backends = {
            known: self.backends[known] for known in BACKENDS if known in self.backends
        }

    def resolve(self, *arguments: Any) -> str:
        """The backend that runs a call with these arguments (see ``_backends.resolve``)."""
        return resolve(self.name, self.backends, arguments)

    def define(self, schema: str, *, fake: Callable[..., Any]) -> None:
        """Register an op without gradient: ``fastplm::<op>`` + ``schema``."""
        self._define(self.name, schema, "forward", fake)
        self._operator = getattr(torch.ops.fastplm, self.name).default

    def call(self, *arguments: Any) -> Any:
        """Call the operator of an op without gradient; the last argument is the backend.

        Where nobody traces the call it goes straight to the backend: the operator is Python too,
        and in the middle of a training step, when the caches have forgotten it, it takes as long as
        the work itself.
        """
        first = arguments[0]
        is_traced = (
            torch.compiler.is_compiling()
            or type(first) is not torch.Tensor
            or first.is_meta
            or torch._C._len_torch_dispatch_stack() > 0
        )
        if is_traced:
            return self._operator(*arguments)
        return self.backends[arguments[-1]].forward(*arguments[:-1])  # type: ignore[misc]

    def define_differentiable(
        self,
        forward_schema: str,
        backward_schema: str,
        *,
        fake_forward: Callable[..., Any],
        fake_backward: Callable[..., Any],
        setup_context: Callable[..., None],
        backward: Callable[..., Any],
    ) -> None:
        """Register ``fastplm::<op>_fwd``, ``fastplm::<op>_bwd`` and the formula that joins them."""
        forward_name, backward_name = f"{self.name}_fwd", f"{self.name}_bwd"
        self._define(forward_name, forward_schema, "forward", fake_forward)
        self._define(backward_name, backward_schema, "backward", fake_backward)
        operator = getattr(torch.ops.fastplm, forward_name).default
        formula = _autograd_kernel(operator, setup_context, backward)
        _LIBRARY.impl(forward_name, formula, "Autograd", with_keyset=True)

    def _define(self, operator: str, schema: str, attribute: str, fake: Callable[..., Any]) -> None:
        def run(*arguments: Any) -> Any:
            implementation = getattr(self.backends[arguments[-1]], attribute)
            # The public function has cast its arguments; a product inside is in their dtype.
            with torch._C._DisableAutocast():
                return implementation(*arguments[:-1])

        _LIBRARY.define(operator + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(operator, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastplm::{operator}", fake, lib=_LIBRARY)


def _autograd_kernel(
    operator: torch._ops.OpOverload,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> Callable[..., Any]:
    """What ``torch.library.register_autograd`` makes, for a schema without defaults.

    Looking for defaults to fill in is what costs most there: 40 µs a call on the host.
    """
    assert not any(argument.has_default_value() for argument in operator._schema.arguments)

    def below_autograd(keyset: Any, arguments: tuple[Any, ...]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *inputs, keyset = arguments  # last, so that the gradients of the inputs come first
            output = below_autograd(keyset, tuple(inputs))
            setup_context(ctx, tuple(inputs), output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return *backward(ctx, *grads), None

    def kernel(keyset: Any, *arguments: Any) -> Any:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return Differentiable.apply(*arguments, keyset)
        return below_autograd(keyset, arguments)

    return kernel


def autocast(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Floating tensors in the autocast dtype of their device, as ``nn.Linear`` would see them."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        tensor.to(dtype) if tensor is not None and tensor.is_floating_point() else tensor
        for tensor in tensors
    )
