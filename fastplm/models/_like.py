"""Drop-in classes for models of Transformers that have no name here, made from their structure.

``fastplm.accelerate`` looks at a model's modules, makes the classes, and proves them on the model:
on a few short texts, with and without padding, outputs and gradients must be Transformers'.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from fastplm.hf import NAME
from fastplm.models import _heads, bert, roberta
from fastplm.models._base import MADE, FastplmModel, documented, drop_in_for, fitted
from fastplm.models._encoder import EncoderLayer, EncoderModel
from fastplm.models._own_attention import GetsMore, OnRows, OwnAttention, OwnLayer, PassesOn
from fastplm.nn import Dropout

logger = logging.get_logger(__name__)
#: The inputs of a backbone that every family may have, and those that have a value for each token.
_INPUTS = """
    input_ids attention_mask token_type_ids position_ids inputs_embeds encoder_hidden_states
    encoder_attention_mask past_key_values use_cache output_attentions output_hidden_states
    return_dict kwargs self cache_position
""".split()
_OF_TOKENS = """
    bbox input_pronunciation_ids input_shape_ids task_type_ids xpath_subs_seq xpath_tags_seq
""".split()
_HEADS: dict[str, Any] = {
    "ForMaskedLM": _heads.MaskedLM,
    "ForMultipleChoice": _heads.MultipleChoice,
    "ForQuestionAnswering": _heads.QuestionAnswering,
    "ForSequenceClassification": _heads.SequenceClassification,
    "ForTokenClassification": _heads.TokenClassification,
}


@functools.cache
def made(parent: Any, mixins: Any, attributes: Any) -> type:
    """The class of mixins in front of a class of Transformers, with its name."""
    body = dict(attributes, __module__=__name__, _recipe=(parent, mixins, attributes))
    bases = (*mixins, parent)
    ours = types.new_class(parent.__name__, bases, {}, lambda space: space.update(body))
    # No module has the class by its name: a pickle has what it was made of.
    ours.__reduce_ex__ = lambda self, _: (_new, self._recipe, self.__dict__)  # type: ignore
    MADE[ours] = parent
    return fitted(documented(ours), parent)


def _new(*recipe: Any) -> Any:
    kind: Any = made(*recipe)
    return kind.__new__(kind)


def _of(module: nn.Module, *mixins: Any, **attributes: Any) -> tuple[type, type]:
    parent: Any = type(module)
    return parent, made(parent, mixins, tuple(sorted(attributes.items())))


# --- mixins ---------------------------------------------------------------------------------------


class _Backbone(EncoderModel):
    """Mixin of a backbone that may have further inputs."""

    _others: tuple[str, ...] = ()
    _has_types = True

    def _keeps_padding(self, masks: Any, kwargs: dict[str, Any], layers: bool = True) -> Any:
        others = any(kwargs.get(name) is not None for name in self._others)
        return "inputs" if others else super()._keeps_padding(masks, kwargs, layers)


class _OwnMasks(FastplmModel):
    """Mixin of a model whose attention, or whose masks, do not follow Transformers' interface: on
    its rows the attention is ours, and elsewhere the parent is left alone."""

    #: The attention implementation that stands for ours.
    _name = NAME

    def _has_our_attention(self) -> bool:
        return self.config._attn_implementation == self._name

    def _mask_of_parent(self, mask: Tensor | None) -> Tensor | None:
        return mask


class _ByModules(EncoderLayer):
    """Mixin of a layer that is not put together as BERT's: its modules run."""

    def _parts(self: Any, no_hooks: bool = True) -> None:
        return None


class _WholeHead:
    """Mixin of a head with a module that makes logits of hidden states."""

    def _head(self: Any) -> _heads.Head:
        return None, getattr(self, "cls", None) or self.lm_head


# --- structure ------------------------------------------------------------------------------------


def _children(module: Any) -> set[str]:
    return {name for name, child in module.named_children()}


def _has_plain_attention(attention: Any) -> bool:
    """Whether a module has query, key and value, and nothing else that could change them."""
    return (
        _children(attention) == {"query", "key", "value", "dropout"}
        and not attention._parameters
        and isinstance(attention.dropout, nn.Dropout)
        and isinstance(getattr(attention, "attention_head_size", None), int)
    )


def _is_like_berts(layer: Any) -> bool:
    """Whether the modules of a layer are those of BERT's, with the norms at the ends of blocks."""
    ends = {"dense", "LayerNorm", "dropout"}
    return (
        _children(layer) <= {"attention", "intermediate", "output", "crossattention"}
        and _children(layer.attention) == {"self", "output"}
        and _children(layer.attention.output) == _children(layer.output) == ends
        and _children(layer.intermediate) == {"dense", "intermediate_act_fn"}
        and hasattr(layer, "chunk_size_feed_forward")
    )


def classes_like_berts(root: PreTrainedModel, name: str | None) -> dict[type, type]:
    """{class of Transformers: the class that replaces it}; empty if no layer is like BERT's.

    Args:
        root: a model with or without head.
        name: of the attention implementation of a model with own attention or masks.
    """
    own = name is not None
    backbone: Any = root.base_model
    layers = getattr(getattr(backbone, "encoder", None), "layer", ())
    if not isinstance(layers, nn.ModuleList) or len({*map(type, layers)}) != 1:
        return {}
    layer: Any = layers[0]
    itself = getattr(getattr(layer, "attention", None), "self", None)
    inputs = inspect.signature(backbone.forward).parameters
    if itself is None or not _has_plain_attention(itself) or "position_ids" not in inputs:
        return {}
    found: dict[type, type] = {}
    kind = type(itself)
    if own:
        found |= [_of(itself, OwnAttention)]
        kind = found[kind]
    like = _is_like_berts(layer)
    around = [type(layer.attention), kind]
    if like:
        around += [type(one) for one in (layer.attention.output, layer.intermediate, layer.output)]
    how: dict[str, Any] = {"_around": tuple(around)}
    if own:
        how["_returns_tuple"] = "output_attentions" in inspect.signature(layer.forward).parameters
    how["_is_numbered"] = getattr(itself, "layer_idx", None) is not None
    mixins: list[Any] = [OwnLayer if own else EncoderLayer]
    found |= [_of(layer, *([] if like else [_ByModules]), *mixins, **how)]
    embeddings = backbone.embeddings
    counted = getattr(embeddings.position_embeddings, "padding_idx", None) is not None
    of_tokens = tuple(name for name in _OF_TOKENS if name in inputs)
    has_types = "token_type_embeddings" in _children(embeddings)
    others = [name for name in inputs if name not in (*_INPUTS, *of_tokens)]
    others += [] if has_types else ["token_type_ids"]
    mixins = [_Backbone, *([roberta.Backbone] if counted else [])]
    if own:
        mixins = [GetsMore, _OwnMasks, *mixins, OnRows]
    how = dict(_of_tokens=of_tokens, _others=tuple(others), _output=None)
    how |= {"_name": name} if own else {}
    found |= [_of(backbone, *mixins, **how)]
    return found | _head_of(root, name)


def _head_of(root: Any, own_name: str | None) -> dict[type, type]:
    name, inputs = type(root).__name__, inspect.signature(root.forward).parameters
    mixins = [mixin for end, mixin in _HEADS.items() if name.endswith(end)]
    if not mixins and {"labels", "logits_to_keep"} <= inputs.keys():
        mixins = [_heads.CausalLM]
    if root.base_model is root or not mixins:
        return {}
    if issubclass(mixins[0], _heads.LanguageModel):
        mixins.insert(0, _language_model_head(root))
    if own_name is None:
        return dict([_of(root, *mixins)])
    return dict([_of(root, _OwnMasks, *mixins, PassesOn, _name=own_name)])


def _language_model_head(root: Any) -> type:
    if {"dense", "layer_norm", "decoder"} <= _children(getattr(root, "lm_head", nn.Module())):
        return roberta.LMHead
    predictions = getattr(getattr(root, "cls", None), "predictions", nn.Module())
    return bert.PredictionHead if {"transform", "decoder"} <= _children(predictions) else _WholeHead


# --- the proof ------------------------------------------------------------------------------------

_BATCH, _LENGTH = 3, 8
#: None, at the right, at the left, and scattered.
_MASKS: tuple[Any, ...] = (
    None,
    [[1] * 8, [1] * 5 + [0] * 3, [1] * 7 + [0]],
    [[1] * 8, [0] * 3 + [1] * 5, [0] + [1] * 7],
    [[1] * 8, [1, 1, 0, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 1, 1, 1]],
)
#: How many roundings of fp32 of the largest number two outputs, or two gradients, may differ.
_ROUNDINGS = 1024, 16384
_MOST = 1 << 22  # elements of a parameter whose gradient is compared


def prover(root: PreTrainedModel, own: bool) -> Callable[[], bool] | None:
    """A function that replaces the classes of a model and its modules, and says whether they are
    proved, or else puts all back. None: nothing is to be replaced.

    It is to be made while the model is as Transformers made it.

    Args:
        own: whether its attention computes its scores itself.
    """
    tried = []
    parameters = list(root.parameters())
    dtypes = {one.dtype for one in parameters}
    devices = {one.device.type for one in parameters}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return None
    if not devices <= {"cpu", "cuda"} or {*map(type, parameters)} != {nn.Parameter}:
        return None
    try:
        for name in ["eager"] if own else [None, NAME]:
            tried += [one for one in (classes_like_berts(root, name),) if one]
        proof = Proof(root) if tried else None
    except Exception as error:  # it is another model than it looks like
        logger.debug("%s is not replaced: %s", type(root).__name__, error)
        return None

    def prove() -> bool:
        return any(_replaces(root, classes, proof) for classes in tried)

    return None if proof is None else prove


def _replaces(root: PreTrainedModel, classes: dict[type, type], proof: Any) -> bool:
    before = [(module, type(module)) for module in root.modules()]
    for module, kind in before:
        if (ours := classes.get(kind) or drop_in_for(module)) is not None:
            module.__class__ = ours
    try:
        why = None if proof.holds() else "other results"
    except Exception as error:
        why = str(error)
    if why is not None:
        logger.debug("%s is not replaced: %s", type(root).__name__, why)
        for module, kind in before:
            module.__class__ = kind
    return why is None


class Proof:
    """What a model computes before its classes change, and whether it still does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        chosen = [p for p in model.parameters() if p.is_floating_point() and p.numel() <= _MOST]
        self.parameters = chosen[:48] + chosen[48:][-48:]
        self.before = self._results()

    def holds(self) -> bool:
        pairs = zip(self._results(), self.before, strict=True)
        return all(map(_are_equal, *zip(*pairs, strict=True)))

    def _results(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """(outputs, gradients) of each batch."""
        found, model = [], self.model
        with _left_alone(model, self.parameters), torch.enable_grad():
            for mask in _MASKS:
                found.append(self._of_batch(mask))
            # What is dropped with a probability of 1 is known, and where it is dropped is seen. (In
            # layers: without embeddings, norms would have no numbers.)
            rates = list(_rates(model))
            for role in sorted({role for role, *_ in rates if role is not None}):
                model.train()
                for its_role, module, name in rates:
                    vars(module)[name] = float(its_role == role)
                found.append(self._of_batch(_MASKS[1]))
        return found

    def _of_batch(self, mask: Any) -> tuple[list[Tensor], list[Tensor]]:
        inputs = _batch_for(self.model, mask)
        outputs = _tensors(self.model(**inputs), inputs)
        total: Any = 0
        for one in outputs:
            weights = torch.linspace(-1, 1, one.numel(), device=one.device, dtype=one.dtype)
            total = total + (one.flatten() * weights).sum() if one.requires_grad else total
        grads = torch.autograd.grad(total, self.parameters, allow_unused=True)
        return [one.detach() for one in outputs], [g for g in grads if g is not None]


def _batch_for(model: Any, mask: Any) -> dict[str, Any]:
    """A few short texts for a model, padded with its padding."""
    config, device = model.config, model.device
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "unk")}
    special |= {getattr(config, "decoder_start_token_id", None)}
    words = [one for one in range(min(config.vocab_size, 200)) if one not in special]
    choice = torch.arange(_BATCH * _LENGTH, device=device) * 7 % len(words)
    ids = torch.tensor(words, device=device)[choice].view(_BATCH, _LENGTH)
    inputs: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = torch.tensor(mask, device=device)
        padding = getattr(config, "pad_token_id", None) or 0
        ids.masked_fill_(inputs["attention_mask"] == 0, padding)
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: torch.stack((one, one.flip(0)), 1) for name, one in inputs.items()}
    names = inspect.signature(model.forward).parameters
    if "use_cache" in names:
        inputs["use_cache"] = False
    if "labels" in names and model.get_output_embeddings() is not None and not model.training:
        seen = inputs.get("attention_mask", torch.ones_like(ids)).bool()
        inputs["labels"] = ids.masked_fill(~(seen & seen.roll(1, 1)), -100)
    return inputs


def _tensors(outputs: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The outputs, without those of padding."""
    mask: Tensor | None = inputs.get("attention_mask")
    found = []
    for name, value in outputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            if mask is not None and value.shape[:2] == mask.shape and name != "pooler_output":
                value = value[mask.bool()]
            found.append(value)
    return found


def _are_equal(ours: Any, theirs: Any) -> bool:
    for mine, others, most in zip(ours, theirs, _ROUNDINGS, strict=True):
        if [one.shape for one in mine] != [one.shape for one in others]:
            return False
        for one, other in zip(mine, others, strict=True):
            if not torch.equal(one.isfinite(), other.isfinite()):
                return False
            least = most * torch.finfo(torch.float32).eps  # parents compute parts in fp32
            scale = max((float(x.nan_to_num().abs().max()) for x in others if x.numel()), default=0)
            if bool(((one - other).nan_to_num().abs() > least * scale).any()):
                return False
    return True


def _rates(model: nn.Module) -> Iterator[tuple[str | None, nn.Module, str]]:
    """The probabilities of dropout of a model: (the place in a layer, the module, the attribute)."""
    for path, module in model.named_modules():
        alone = isinstance(module, (nn.Dropout, Dropout))
        parts = path.split(".")[: -1 if alone else None]
        place = ".".join(part for part in parts if not part.isdigit())
        inside = any(part.isdigit() for part in parts)
        for name, value in vars(module).items():
            if isinstance(value, float) and (alone and name == "p" or "drop" in name):
                yield place if inside else None, module, name


@contextlib.contextmanager
def _left_alone(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Restores modes, probabilities, what requires gradients and the generators of numbers."""
    modes = [(module, module.training) for module in model.modules()]
    rates = [(module, name, vars(module)[name]) for _, module, name in _rates(model)]
    needs = [(parameter, parameter.requires_grad) for parameter in parameters]
    devices = [parameters[0].device] if parameters and parameters[0].is_cuda else []
    try:
        with torch.random.fork_rng(devices):
            model.eval()
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, rate in rates:
            vars(module)[name] = rate
        for parameter, need in needs:
            parameter.requires_grad_(need)
