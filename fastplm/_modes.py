"""How a call runs: eagerly, traced, transformed or intercepted; and whether values can be seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

TENSORS = (Tensor, torch.nn.Parameter)
#: Argument types that need no dispatch: no tensor subclasses and no symbolic sizes.
_ORDINARY = frozenset((*TENSORS, type(None), bool, int, float, str))
_VMAP = torch._C._functorch.TransformType.Vmap

# Every call uses these, so they are looked up once.
_is_tracing, _dispatch_modes = torch._C._is_tracing, torch._C._len_torch_dispatch_stack
transform, _profiler = torch._C._functorch.peek_interpreter_stack, torch.autograd.profiler
# Whether a gradient is a batch of them, as with ``is_grads_batched=True``.
is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_traced() -> bool:
    """Whether one of PyTorch's tracers records a call."""
    return torch.compiler.is_compiling() or _is_tracing()


def is_exporting() -> bool:
    """Whether ``torch.jit.trace`` or an ONNX export records a call, where only PyTorch's operators
    exist."""
    if torch.compiler.is_compiling():
        return not torch.compiler.is_dynamo_compiling() and torch.onnx.is_in_onnx_export()
    return _is_tracing()


def is_transformed() -> bool:
    """Whether a call runs inside a transform of ``torch.func`` or inside forward-mode AD."""
    return transform() is not None or forward_ad._current_level >= 0


# Dynamo takes the result as a constant: see ``_allows_tf32`` in ops/attention.py.
is_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_plain_pytorch() -> str | None:
    """Why only plain PyTorch can run a call, or None."""
    if is_exporting():
        return "torch.jit.trace or an ONNX export, which record only PyTorch's own operators"
    # The level is read here, too, so that Dynamo guards on it.
    if is_transformed() or forward_ad._current_level >= 0:
        return "a transform of torch.func or forward-mode AD, which need PyTorch's own operators"
    return None


def needs_dispatch(arguments: tuple[Any, ...]) -> bool:
    """Whether a call must go through PyTorch's dispatcher as an operator: it is traced, profiled,
    transformed or intercepted."""
    return (
        torch.compiler.is_dynamo_compiling()  # where others compile, there is a mode
        or _is_tracing()
        or _dispatch_modes() > 0
        or _profiler._is_profiler_enabled
        or transform() is not None
        or forward_ad._current_level >= 0
        or not _ORDINARY.issuperset(map(type, arguments))
        or arguments[0].is_meta  # then all are: the tensors of a call are on one device
    )


def is_eager(*tensors: Tensor) -> bool:
    """Whether a call on these tensors is neither traced nor transformed, and no subclass runs it.
    (A dispatch mode or the profiler may still see it.)"""
    return _ORDINARY.issuperset(map(type, tensors)) and not (is_traced() or is_transformed())


def is_fake(x: Tensor) -> bool:
    """Whether it is a tensor without data, which may be on a device that is not there."""
    return type(x) is torch._subclasses.FakeTensor and not torch.compiler.is_compiling()


def values_are_known(tensor: Tensor) -> bool:
    """Whether looking at a tensor's values waits for nothing: an eager CPU tensor."""
    return tensor.device.type == "cpu" and values_can_be_read(tensor)


def values_can_be_read(tensor: Tensor) -> bool:
    """The same of any device, where looking may wait for it. Inside of ``vmap`` a tensor's values
    are many."""
    if is_traced() or isinstance(tensor, FakeTensor):
        return False
    for level in torch._C._functorch.get_interpreter_stack() or ():
        if level.key() == _VMAP:
            return False
    if tensor.device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return tensor.device.type == "cpu"
