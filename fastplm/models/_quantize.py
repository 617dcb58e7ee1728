"""``fastplm.quantize`` and ``fastplm.dequantize``: linear layers in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from fastplm.errors import UnsupportedError, fail
from fastplm.models._accelerate import module_of

_Model = TypeVar("_Model")
#: The attribute with the names of the parameters that required a gradient.
_TRAINED = "_fastplm_trained"


def quantize(model: _Model, *, skip: Sequence[str] = (), keep_weights: bool = False) -> _Model:
    """Replace the linear layers of a model's blocks by layers in 8 bits, in place, for inference.

    Weights are in 8 bits with a scale for each output; the rows that come in are rounded to 8 bits
    with a scale of their own, so there is nothing to calibrate. Attention, norms, embeddings and
    all that lies outside of the blocks, such as poolers and heads, stays as it is. It works with or
    without ``fastplm.accelerate``, before or after it; on a CPU it is made to be fast
    (docs/models.md has what it gains and costs), elsewhere it is correct.

    No parameter requires a gradient afterwards, and ``model.train()`` is refused. Its state dict
    has int8 weights: to load one, quantize a model of the same configuration first.

    Args:
        model: a model, or what has one, as for ``fastplm.accelerate``. Its blocks are what is in
            an ``nn.ModuleList``.
        skip: ends of the names of linear layers that stay as they are, such as
            ``["output.dense"]``, by whole parts of a name.
        keep_weights: keep the weights in memory, so that ``dequantize`` gives them back bit for
            bit. Otherwise they are gone, and the model takes a quarter of the memory there.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: nothing can be replaced, or a name in ``skip`` is of no layer.
        ArgumentValueError, ArgumentTypeError: an argument that does not fit.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = fastplm.quantize(BertModel(BertConfig(vocab_size=100, **sizes)).eval())
        >>> type(model.encoder.layer[0].intermediate.dense).__name__
        'LinearInt8'
        >>> type(fastplm.dequantize(model).encoder.layer[0].intermediate.dense).__name__
        'Linear'

    Source: Dettmers et al. 2022 (arXiv 2208.07339), section 2.1, without its outliers in fp16.
    """
    from fastplm.nn import LinearInt8

    where = "quantize"
    inner = module_of(where, model)
    unknown = set(skip)
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for name, parent, key, linear in _linears(inner):
        ends = {end for end in skip if ("." + name).endswith("." + end)}
        unknown -= ends
        if not ends:
            found.append((parent, key, linear))
    if unknown:
        expected = "ends of names of linear layers in the model's blocks"
        fix = "Take names of model.named_modules()."
        fail(where, "skip", sorted(unknown), expected, fix, UnsupportedError)
    already = any(isinstance(module, LinearInt8) for module in inner.modules())
    if not found and not already:
        got = f"a {type(model).__name__} without linear layers in blocks"
        expected = "a model whose blocks, in an nn.ModuleList, have layers of exactly nn.Linear"
        fix = "Quantize before adapters are added, or merge them."
        fail(where, "model", got, expected, fix, UnsupportedError)
    trained = [name for name, one in inner.named_parameters() if one.requires_grad]
    for parent, key, linear in found:
        setattr(parent, key, LinearInt8(linear, keep_weight=keep_weights))
    if trained:
        setattr(inner, _TRAINED, trained)
    inner.requires_grad_(False)
    inner.eval()
    return model


def dequantize(model: _Model) -> _Model:
    """Undo ``quantize``, in place: linear layers in the dtype that they had.

    Their weights are those of before with ``keep_weights=True``; otherwise the rounded ones. The
    parameters that required a gradient do so again.

    Args:
        model: a model that ``quantize`` changed. Others are not changed.

    Returns:
        ``model``, in evaluation mode.
    """
    from fastplm.models._base import DROP_INS, drop_in_for
    from fastplm.nn import LinearInt8

    inner, drop_ins = module_of("dequantize", model), set(DROP_INS.values())
    accelerated = any(type(module) in drop_ins for module in inner.modules())
    for parent in list(inner.modules()):
        for key, child in list(parent._modules.items()):
            if not isinstance(child, LinearInt8):
                continue
            linear: Any = child.dequantize()
            linear.requires_grad_(False)
            ours = drop_in_for(linear) if accelerated else None
            if ours is not None:
                linear.__class__ = ours
            setattr(parent, key, linear.eval())
    for module in list(inner.modules()):
        for name in vars(module).pop(_TRAINED, ()):
            module.get_parameter(name).requires_grad_()
    return model


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent, name in it, linear layer) of the layers in blocks, each once."""
    from transformers.pytorch_utils import Conv1D

    from fastplm.models._base import DROP_INS

    kinds = {nn.Linear, Conv1D, DROP_INS[nn.Linear], DROP_INS.get(Conv1D)}
    seen: set[int] = set()
    for path, blocks in model.named_modules():
        if not isinstance(blocks, nn.ModuleList):
            continue
        for inner, parent in blocks.named_modules():
            for key, child in parent._modules.items():
                weight = getattr(child, "weight", None)
                if type(child) not in kinds or id(child) in seen or not _is_plain(child, weight):
                    continue
                seen.add(id(child))
                yield ".".join(part for part in (path, inner, key) if part), parent, key, child


def _is_plain(linear: Any, weight: Any) -> bool:
    """Whether the layer computes just its product, of a weight that is in memory."""
    return (
        type(weight) is nn.Parameter
        and weight.is_floating_point()
        and not weight.is_meta
        and "forward" not in vars(linear)
        and not any((linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks))
    )
