"""``fastplm.quantize`` and ``fastplm.dequantize``: linear layers in 8 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from torch import nn

from fastplm.errors import ArgumentTypeError, UnsupportedError, fail
from fastplm.models._accelerate import module_of

_Model = TypeVar("_Model")
#: The attribute of a module with the names of its parameters that required a gradient.
_TRAINED = "_fastplm_trained"


def quantize(model: _Model, *, skip: Sequence[str] = (), keep_weights: bool = False) -> _Model:
    """Replace the linear layers of a model's blocks by layers in 8 bits, in place, for inference.

    Weights are in 8 bits with a scale for each output; the rows that come in are rounded to 8 bits
    with a scale of their own, so there is nothing to calibrate. Attention, norms, embeddings and
    all that lies outside of the blocks, such as poolers and heads, stays as it is. It works with or
    without ``fastplm.accelerate``, before or after it; on a CPU it is made to be fast
    (docs/models.md has what it gains and costs), elsewhere it is correct.

    Layers with hooks or a parametrization, and subclasses, stay in floats. No parameter requires a
    gradient afterwards, and a forward in training mode is refused. The state dict has int8 weights:
    to load one, quantize a model of the same configuration first. ``save_pretrained`` is refused,
    as ``from_pretrained`` would not see them. ONNX's exporters do not know these layers.

    Args:
        model: a model, or what has one, as for ``fastplm.accelerate``. Its blocks are what is in
            an ``nn.ModuleList``.
        skip: ends of the names of linear layers that stay as they are, such as
            ``["output.dense"]``, by whole parts of a name.
        keep_weights: keep the weights in memory, so that ``dequantize`` gives them back bit for
            bit. Otherwise they are gone, and these layers take a quarter of the memory of fp32.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: nothing can be replaced, there is an adapter with a ``base_layer``, or a
            name in ``skip`` is of no layer.
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
    from transformers import PreTrainedModel

    from fastplm.models._watch import thaw
    from fastplm.nn import LinearInt8

    where = "quantize"
    if isinstance(skip, str) or not all(isinstance(end, str) for end in skip):
        fail(where, "skip", skip, "a list of names", "Put it in a list.", ArgumentTypeError)
    inner = module_of(where, model)
    thaw(inner, "quantize was called")
    unknown, found = set(skip), []
    for name, parent, key, linear in _linears(inner):
        ends = {end for end in skip if ("." + name).endswith("." + end)}
        unknown -= ends
        if not ends:
            found.append((parent, key, linear))
    if unknown:
        expected = "ends of names of linear layers in the model's blocks"
        fix = "Take names of model.named_modules()."
        fail(where, "skip", sorted(unknown), expected, fix, UnsupportedError)
    if not found and not any(isinstance(module, LinearInt8) for module in inner.modules()):
        got = f"a {type(model).__name__} without linear layers in blocks"
        expected = "a model whose blocks, in an nn.ModuleList, have layers of exactly nn.Linear"
        fix = "Quantize a model with its weights in memory, before hooks are added."
        fail(where, "model", got, expected, fix, UnsupportedError)
    for module in inner.modules():
        trained = [name for name, one in module._parameters.items() if _is_trained(one)]
        if trained:
            vars(module)[_TRAINED] = trained
        if isinstance(module, PreTrainedModel):
            vars(module)["save_pretrained"] = _refuse_to_save
    made: dict[int, LinearInt8] = {}  # a layer may be at several places
    for parent, key, linear in found:
        if id(linear) not in made:
            made[id(linear)] = LinearInt8(linear, keep_weight=keep_weights)
            vars(made[id(linear)])[_TRAINED] = vars(linear).pop(_TRAINED, [])
        setattr(parent, key, made[id(linear)])
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
    from fastplm.models._watch import thaw
    from fastplm.nn import LinearInt8

    inner, parents = module_of("dequantize", model), {ours: kind for kind, ours in DROP_INS.items()}
    thaw(inner, "dequantize was called")
    accelerated = any(type(module) in parents for module in inner.modules())
    made: dict[int, nn.Module] = {}
    for parent in list(inner.modules()):
        for key, child in list(parent._modules.items()):
            if not isinstance(child, LinearInt8):
                continue
            if id(child) not in made:
                linear = made[id(child)] = child.dequantize().requires_grad_(False).eval()
                kind = drop_in_for(linear) if accelerated else parents.get(type(linear))
                linear.__class__ = kind or type(linear)
                vars(linear)[_TRAINED] = vars(child).get(_TRAINED, [])
            setattr(parent, key, made[id(child)])
    for module in inner.modules():
        for name in vars(module).pop(_TRAINED, ()):
            if module._parameters.get(name) is not None:
                module._parameters[name].requires_grad_()  # type: ignore[union-attr]
        if vars(module).get("save_pretrained") is _refuse_to_save:
            del vars(module)["save_pretrained"]
    return model


def _is_trained(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _refuse_to_save(*args: Any, **kwargs: Any) -> None:
    """In the place of a model's ``save_pretrained``: ``from_pretrained`` would not see 8 bits."""
    expected = "a model of floats, as from_pretrained would begin with new weights"
    fix = "Save model.state_dict() and load it into a quantized model, or fastplm.dequantize it."
    fail("save_pretrained", "model", "layers in 8 bits", expected, fix, UnsupportedError)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """(name, parent, name in it, linear layer) of each place of a layer in blocks."""
    from transformers.pytorch_utils import Conv1D

    from fastplm.models._base import DROP_INS
    from fastplm.nn import FusedAttention
    from fastplm.nn._rows import is_plain

    kinds = nn.Linear, Conv1D, DROP_INS[nn.Linear], DROP_INS[Conv1D]
    seen: set[tuple[int, str]] = set()
    for path, blocks in model.named_modules():
        if not isinstance(blocks, nn.ModuleList):
            continue
        for inner, parent in blocks.named_modules():
            within = ".".join(part for part in (path, inner) if part)
            if hasattr(parent, "base_layer"):
                fix = "Merge it first, such as by merge_and_unload() of PEFT."
                got = f"an adapter at `{within}`"
                fail("quantize", "model", got, "layers of the model itself", fix, UnsupportedError)
            if isinstance(parent, FusedAttention):  # multiplies by parts of its weights
                continue
            for key, child in parent._modules.items():
                place, weight = (id(parent), key), getattr(child, "weight", None)
                if place in seen or child is None or not is_plain(child, *kinds):
                    continue
                if (
                    type(weight) is nn.Parameter
                    and weight.is_floating_point()
                    and not weight.is_meta
                ):
                    seen.add(place)
                    yield within + "." + key, parent, key, child
