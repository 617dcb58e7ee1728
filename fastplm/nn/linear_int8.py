"""``nn.LinearInt8`` on ``ops.linear_int8``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fastplm.errors import UnsupportedError, fail
from fastplm.ops.linear_int8 import linear_int8
from fastplm.reference.linear_int8 import (
    dequantize_int8,
    pack_int8,
    quantize_int8,
    unpack_int8,
)

#: The names of the weight and its scale in a state dict. No layer of floats has them, so neither
#: kind of checkpoint is loaded as the other.
_WEIGHT, _SCALE = "weight_int8", "weight_scale"


_WHERE = "LinearInt8"


class _WithoutValues(torch.Tensor):
    """A tensor without memory that refuses every function of its values.

    PyTorch's own meta tensors do not: ``F.linear`` of one gives whatever lies in the memory.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func == torch.Tensor.device.__get__:
            return args[0].of_layer
        if func in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs)
        name = getattr(func, "__name__", "a function")
        fix = "Let the module call the layer, or keep the layer in floats: fastplm.quantize has "
        fix += "`skip`. dequantize() has the values."
        fail(_WHERE, "weight", f"a call of {name}", "no use of its values", fix, UnsupportedError)


#: What can be asked of a weight in 8 bits.
_ABOUT = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.is_floating_point),
    *(torch.Tensor.stride, torch.Tensor.element_size, torch.is_floating_point),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "ndim", "layout", "requires_grad", "is_cpu", "is_cuda")
    ),
}


class LinearInt8(nn.Module):
    """A linear layer in 8 bits, for inference. ``fastplm.quantize`` puts it in a model.

    Its state dict has ``weight_int8``, int8 [M, K], ``weight_scale``, fp32 [M], and ``bias`` [M].

    Args:
        linear: an ``nn.Linear``, or Transformers' ``Conv1D``, whose weight is transposed.
        keep_weight: keep its weight in memory, so that ``dequantize`` gives it back as it was.

    Attributes:
        packed: uint8 [ceil(M / 16), ceil(K / 4), 16, 4], see ``ops.quantize_int8``.
        scale: fp32 [M], also in a model of 16 bits.
    """

    packed: Tensor
    scale: Tensor

    def __init__(self, linear: nn.Module, *, keep_weight: bool = False) -> None:
        super().__init__()
        weight: Any = linear.weight
        self.transposed = not isinstance(linear, nn.Linear)
        matrix = weight.t() if self.transposed else weight
        self.out_features, self.in_features = matrix.shape
        packed, scale = quantize_int8(matrix)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        bias: Any = linear.bias
        own = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", own)
        # In a tuple, as a submodule's weight would be in the state dict.
        self._kept = (linear,) if keep_weight else None
        self._dtype = weight.dtype
        self.train(False)

    def forward(self, input: Tensor) -> Tensor:
        """[..., K] -> [..., M] in the dtype of ``input``, under autocast, too."""
        if self.training:
            got, expected = "a layer that is trained", "eval(), as rounding has no gradient"
            fix = "Call model.eval(); to train the model, fastplm.dequantize it."
            fail(_WHERE, "training", got, expected, fix, UnsupportedError)
        if input.is_nested or input.shape[-1] != self.in_features:
            got = "a nested tensor" if input.is_nested else f"shape {tuple(input.shape)}"
            fix = "In nn.TransformerEncoder, pass enable_nested_tensor=False."
            fail(_WHERE, "input", got, f"[..., {self.in_features}]", fix if input.is_nested else "")
        bias, buffers = self._parameters["bias"], self._buffers
        if bias is not None and bias.dtype is not input.dtype:
            bias = bias.to(input.dtype)  # type: ignore[assignment]
        return linear_int8(input, buffers["packed"], buffers["scale"], bias)  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:
        """int8 [M, K] of which only shape, dtype and device can be asked; see ``dequantize``."""
        shape = torch.empty(self.out_features, self.in_features, dtype=torch.int8, device="meta")
        weight: Any = shape.as_subclass(_WithoutValues)
        weight.of_layer = self.packed.device
        return weight

    def dequantize(self) -> nn.Module:
        """The layer that this one was made of; with rounded weights, if they were not kept."""
        linear: Any
        if self._kept is not None:
            linear = self._kept[0].to(self.scale.device, self._dtype)
        else:
            with torch.device("meta"):
                if self.transposed:
                    from transformers.pytorch_utils import Conv1D

                    linear = Conv1D(self.out_features, self.in_features)
                else:
                    linear = nn.Linear(self.in_features, self.out_features)
            weight = dequantize_int8(self.packed, self.scale, self.in_features).to(self._dtype)
            linear.weight = nn.Parameter(weight.t().contiguous() if self.transposed else weight)
        linear.bias = self.bias
        return linear

    def extra_repr(self) -> str:
        own = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{own}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearInt8:
        scale = self.scale
        self._dtype = fn(torch.empty(0, dtype=self._dtype, device=scale.device)).dtype
        super()._apply(fn, recurse)
        if self.scale.dtype is not torch.float32:  # model.half(): 8 bits are scaled in fp32
            self.scale = scale.to(self.scale.device)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + _WEIGHT] = unpack_int8(
            self.packed, self.out_features, self.in_features
        )
        destination[prefix + _SCALE] = self.scale

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        given = {name: state_dict.get(prefix + name) for name in (_WEIGHT, _SCALE)}
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        missing = [prefix + name for name, value in given.items() if value is None]
        unexpected_keys[:] = [
            key for key in unexpected_keys if key.removeprefix(prefix) not in given
        ]
        missing_keys += missing
        if missing:
            if prefix + "weight" in state_dict:
                error_msgs.append(
                    f"`{prefix}weight` is a weight in floating point: load it into a model that is "
                    "not quantized, then call fastplm.quantize(model)"
                )
            return
        weight, scale = given[_WEIGHT], given[_SCALE]
        assert weight is not None and scale is not None
        right = {_WEIGHT: (self.out_features, self.in_features), _SCALE: (self.out_features,)}
        for name, shape in right.items():
            if given[name].shape != shape:  # type: ignore[union-attr]
                error_msgs.append(
                    f"size mismatch for {prefix}{name}: it is {tuple(given[name].shape)} in the "  # type: ignore[union-attr]
                    f"checkpoint, and {shape} in the model"
                )
                return
        with torch.no_grad():
            self.packed.copy_(pack_int8(weight.to(torch.int8)))
            self.scale.copy_(scale)
        self._kept = None  # another weight than the one of this checkpoint
