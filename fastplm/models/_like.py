"""Drop-in classes for models of Transformers that have no name here, made from their structure.

``fastplm.accelerate`` looks at a model's modules, makes the classes, and proves them on the model:
on a few short texts, with and without padding, outputs and gradients must be Transformers'.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from fastplm.hf import NAME
from fastplm.models import _heads, bart, bert, roberta
from fastplm.models._base import CACHE, MADE, FastplmModel, documented, drop_in_for, fitted
from fastplm.models._encoder import EncoderLayer, EncoderModel
from fastplm.models._own_attention import (
    HERE,
    GetsMore,
    InContext,
    Now,
    OnRows,
    OwnAttention,
    OwnLayer,
    PassesOn,
    within,
)
from fastplm.models._proof import Proof
from fastplm.models._seq2seq import (
    ConditionalGeneration,
    DecoderQuestionAnswering,
    EncoderDecoder,
    LastEosClassification,
    Stack,
)

logger = logging.get_logger(__name__)
#: The inputs of a backbone that every family may have, and those that have a value for each token.
_INPUTS = (
    """
    input_ids attention_mask token_type_ids position_ids inputs_embeds encoder_hidden_states
    encoder_attention_mask use_cache output_attentions output_hidden_states return_dict kwargs self
    cache_position
""".split()
    + [CACHE]
)
_OF_TOKENS = """
    bbox input_pronunciation_ids input_shape_ids task_type_ids xpath_subs_seq xpath_tags_seq
""".split()
_HEADS: dict[str, Any] = _heads.STANDARD | {"ForMaskedLM": _heads.MaskedLM}


class _Made(type):
    """The class of the classes made here. No module has them by name: a pickle has the recipe."""

    _recipe: Any


@functools.cache
def made(parent: Any, mixins: Any, attributes: Any) -> type:
    """The class of mixins in front of a class of Transformers, with its name."""
    body = dict(attributes, __module__=__name__, _recipe=(parent, mixins, attributes))
    bases, how = (*mixins, parent), {"metaclass": _Made}
    ours = types.new_class(parent.__name__, bases, how, lambda space: space.update(body))
    MADE[ours] = parent
    return fitted(documented(ours), parent)


def _recipe_of(kind: _Made) -> Any:
    return made, kind._recipe


copyreg.pickle(_Made, _recipe_of)


def _of(module: nn.Module, *mixins: Any, **attributes: Any) -> tuple[type, type]:
    parent: Any = type(module)
    return parent, made(parent, mixins, tuple(sorted(attributes.items())))


# --- mixins ---------------------------------------------------------------------------------------


def _any_of(names: tuple[str, ...], inputs: dict[str, Any]) -> bool:
    return any(inputs.get(name) is not None for name in names)


class _Backbone(EncoderModel):
    """Mixin of a backbone that may have further inputs."""

    #: The inputs with which the parent computes everything, padding too.
    _others: tuple[str, ...] = ()
    _has_types = True

    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        given = input_ids if inputs_embeds is None else inputs_embeds
        inputs |= dict(input_ids=input_ids, inputs_embeds=inputs_embeds)
        here = {"parents": _any_of(self._others, {**inputs, "token_type_ids": token_type_ids})}
        if token_type_ids is None and self._has_types and given is not None:
            # The parent may have them for as many rows as it has positions.
            token_type_ids = torch.zeros(given.shape[:2], dtype=torch.int64, device=given.device)
        return within(here, super().forward, token_type_ids=token_type_ids, **inputs)

    def _keeps_padding(self, masks: Any, kwargs: dict[str, Any], layers: bool = True) -> Any:
        if HERE.parents:
            return "inputs"
        if _counts_rows(getattr(self.encoder, "embed_positions", None)):
            return "layers"
        return super()._keeps_padding(masks, kwargs, layers)

    def _position_table(self) -> nn.Module | None:
        if getattr(self.config, "reset_position_index_per_cell", False):
            return None  # TAPAS': of the longest cell, and the last one for all after it
        table = getattr(self.encoder, "embed_positions", None)  # RoFormer's
        return super()._position_table() if table is None else table

    def _positions(self, input_ids: Tensor | None, given: Tensor) -> Any:
        # They may depend on these inputs, as TAPAS' on the cells of a table.
        return None if HERE.parents else super()._positions(input_ids, given)


class _LinearPooler:
    """Mixin of a backbone, as BigBird's, whose pooler is a product, and its activation beside."""

    def _pooled(self: Any, first: Tensor) -> Tensor:
        return self.activation(self.pooler(first[:, 0]))


class _Named(FastplmModel):
    """Mixin of a model whose attention is fastplm's where its configuration says ``_name``."""

    _name = NAME  # "eager" in models with own attention, which may have no other

    def _has_our_attention(self) -> bool:
        return self.config._attn_implementation == self._name


class _OwnMasks(_Named):
    """Mixin of a model whose attention, or whose masks, do not follow Transformers' interface: on
    its rows the attention is ours, and elsewhere the parent is left alone."""

    def _mask_of_parent(self, mask: Tensor | None) -> Tensor | None:
        return mask


class _ByModules(EncoderLayer):
    """Mixin of a layer that is not put together as BERT's: its modules run."""

    def _parts(self: Any, no_hooks: bool = True) -> None:
        return None


class _Summary(_heads.MultipleChoice):
    """Mixin of a head that reads what its summary of the text says, as the last row."""

    sequence_summary: Any

    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        kind = self.sequence_summary.summary_type
        if kind == "first":
            super()._select_rows(inputs, labels)
        elif kind != "last":
            inputs["unpad"] = False
        elif (shape := self._shape(inputs)) is not None:
            count, length = shape[:-1].numel(), shape[-1]
            ends = torch.arange(1, count + 1, device=self.device) * length - 1  # type: ignore
            _heads.set_output_rows(self, inputs, ends)

    def _shape(self, inputs: dict[str, Any]) -> torch.Size | None:
        rows, ids = inputs.get("inputs_embeds"), inputs.get("input_ids")
        return rows.shape[:-1] if rows is not None else None if ids is None else ids.shape


class _WholeHead:
    """Mixin of a head with a module that makes logits of hidden states."""

    def _head(self: Any) -> _heads.Head:
        return None, getattr(self, "cls", None) or self.lm_head


# --- structure ------------------------------------------------------------------------------------


def _children(module: Any) -> set[str]:
    return {name for name, child in module.named_children()}


#: What LUKE has for entities: with these the parent runs.
_OF_ENTITIES = {"w2e_query", "e2w_query", "e2e_query"}


def _has_plain_attention(attention: Any) -> bool:
    """Whether a module has query, key and value, and nothing else that could change them."""
    return (
        _children(attention) - _OF_ENTITIES == {"query", "key", "value", "dropout"}
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
    sines = getattr(backbone.encoder, "embed_positions", None)
    if itself is None or not _has_plain_attention(itself):
        return {}
    if (sines is None) != ("position_ids" in inputs) or (sines is not None and not own):
        return {}
    found: dict[type, type] = {}
    kind = type(itself)
    if own:
        found |= [_of(itself, OwnAttention if sines is None else _Rotated)]
        kind = found[kind]
    if sines is not None:
        found |= [_of(sines, _Positions)]
    first = next(iter(inspect.signature(layer.forward).parameters))
    like = first == "hidden_states" and sines is None and _is_like_berts(layer)
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
    table = getattr(embeddings, "position_embeddings", None)
    counted = getattr(table, "padding_idx", None) is not None
    of_tokens = tuple(name for name in _OF_TOKENS if name in inputs)
    has_types = "token_type_embeddings" in _children(embeddings)
    others = [name for name in inputs if name not in (*_INPUTS, *of_tokens)]
    others += [] if has_types else ["token_type_ids"]
    mixins = [_Backbone, *([roberta.Backbone] if counted else [])]
    if isinstance(getattr(backbone, "pooler", None), nn.Linear):
        mixins = [_LinearPooler, *mixins]
    if own:
        mixins = [GetsMore, _OwnMasks, *mixins, OnRows if sines is None else _RotaryRows]
    how = dict(_of_tokens=of_tokens, _others=tuple(others), _output=None, _has_types=has_types)
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
    if mixins[0] is _heads.MultipleChoice and hasattr(root, "sequence_summary"):
        mixins = [_Summary]
    if issubclass(mixins[0], _heads.LanguageModel):
        known = {*inspect.signature(root.base_model.forward).parameters, *_INPUTS}
        if not inputs.keys() <= known | {"labels", "logits_to_keep"}:  # it has another task, too
            return {}
        mixins.insert(0, _language_model_head(root))
    if own_name is None:
        return dict([_of(root, *mixins)])
    return dict([_of(root, _OwnMasks, *mixins, PassesOn, _name=own_name)])


def _language_model_head(root: Any) -> type:
    if {"dense", "layer_norm", "decoder"} <= _children(getattr(root, "lm_head", nn.Module())):
        return roberta.LMHead
    predictions = getattr(getattr(root, "cls", None), "predictions", nn.Module())
    return bert.PredictionHead if {"transform", "decoder"} <= _children(predictions) else _WholeHead


class _RotaryRows(OnRows):
    """Mixin of a model that turns query and key by a table of all positions."""

    def forward(self, *, position_ids: Any = None, rows: Any = None, **inputs: Any) -> Any:
        packed = None if rows is None else rows.packed
        now = None
        if packed is not None:
            now = packed.positions.new_empty(packed.batch, packed.seqlen), packed
        return within({"packed": now}, super().forward, rows=rows, **inputs)


class _Rotated(OwnAttention):
    """Mixin of RoFormer's attention."""

    def _turned(self: Any, query: Any, key: Any, value: Any, args: Any, kwargs: Any) -> Any:
        sines = args[2] if len(args) > 2 else kwargs["sinusoidal_pos"]
        heads = (query, key, value) if self.rotary_value else (query, key)
        return *self.apply_rotary_position_embeddings(sines, *heads), *([value][len(heads) - 2 :])


# --- BART's shape ---------------------------------------------------------------------------------


class _Positions:
    """Mixin of position embeddings: on packed rows they are those of the padded batch."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        theirs, now = super().forward, HERE.packed  # type: ignore[misc]
        if now is None:
            return theirs(*args, **kwargs)
        given, packed = now
        ids = given if given.dim() == 2 else None
        first, *names = inspect.signature(theirs).parameters
        if first == "input_ids_shape":
            out = theirs(given.shape[:2])
        elif first == "position_ids":
            out = theirs(torch.arange(given.shape[1], device=given.device)[None])
        elif "inputs_embeds" in names:
            out = theirs(ids, None if ids is not None else given)
        else:
            out = theirs(given if ids is not None else given[..., -1])
        rows = packed.pack_rows(out.expand(packed.batch, packed.seqlen, -1))
        return rows[0] if out.dim() == 2 else rows


def _counts_rows(table: nn.Module | None) -> bool:
    """Whether position embeddings are others than were made, as after the parent's
    ``resize_position_embeddings``: they would count the rows of all texts."""
    return not (table is None or isinstance(table, _Positions))


class _Stack(_Named, Stack):
    """Mixin of an encoder or a decoder, whose parent runs on packed rows."""

    _embeds_ids = True
    embed_positions: nn.Module
    #: The classes of layers and their attention.
    _kinds: frozenset[type] = frozenset()
    _others: tuple[str, ...] = ()
    _owns = False

    def _layers(self: Any) -> Any:
        return self.layers

    def _layer_numbers(self: Any) -> list[Any]:
        return [getattr(layer.self_attn, "layer_idx", None) for layer in self.layers]

    def _keeps_padding(self, masks: Any, kwargs: dict[str, Any], *caching: Any, **more: Any) -> Any:
        if HERE.parents or _any_of(self._others, kwargs):
            return "inputs"
        parts = [*self._layers(), *(layer.self_attn for layer in self._layers())]
        parts += [layer.encoder_attn for layer in self._layers() if hasattr(layer, "encoder_attn")]
        if not self._kinds.issuperset(map(type, parts)) or _counts_rows(self.embed_positions):
            return "layers"
        return super()._keeps_padding(masks, kwargs, *caching, **more)

    def forward(self, *, input_ids: Any = None, inputs_embeds: Any = None, **inputs: Any) -> Any:
        # Rows that are packed have their positions in the batch that is given here.
        given = input_ids if inputs_embeds is None else inputs_embeds
        inputs |= dict(input_ids=input_ids, inputs_embeds=inputs_embeds)
        here = {"given": given, "parents": _any_of(self._others, inputs)}
        return within(here, super().forward, **inputs)

    def _on_rows(self, *, attention_mask: Any = None, rows: Any = None, **inputs: Any) -> Any:
        here: dict[str, Any] = {"packed": (HERE.given, rows.packed)}
        if not self._owns:
            inputs |= dict(attention_mask=attention_mask, rows=rows)
            return within(here, super()._on_rows, **inputs)
        keys_of_encoder = inputs.pop("encoder_attention_mask", None)
        here["now"] = Now(rows, attention_mask, keys_of_encoder, {"is_causal": self._is_causal()})
        where = rows.packed.positions.device
        nothing = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=where)
        if "encoder_hidden_states" in inputs:
            inputs["encoder_attention_mask"] = nothing
        return within(here, super()._on_rows, attention_mask=nothing, **inputs)


class _Projected(OwnAttention):
    """Mixin of BART's attention, where it computes its scores itself."""

    _projections = ("q_proj", "k_proj", "v_proj")
    _size = "head_dim"

    def _output(self: Any, context: Tensor) -> Tensor:
        return self.out_proj(context)


class _Shifts:
    """Mixin of a model that may make the ids of a decoder of others, as its parent does."""

    #: The function of the parent's Python module, if its forward calls it.
    _shift: Callable[..., Tensor] | None = None
    _parent: Any = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        theirs = [one for one in cls.__mro__ if one.__module__.startswith("transformers.models.")]
        if theirs:
            forward: Any = inspect.unwrap(theirs[0].forward)  # type: ignore[attr-defined]
            cls._parent, name = theirs[0], "shift_tokens_right"
            function = forward.__globals__[name] if name in forward.__code__.co_names else None
            cls._shift = None if function is None else staticmethod(function)

    def _shifted(self: Any, ids: Tensor) -> Tensor:
        _, *names = inspect.signature(self._shift).parameters  # such as pad_token_id
        return self._shift(ids, *(getattr(self.config, name) for name in names))


class _DecodesIds(_Shifts, EncoderDecoder):
    """Mixin of an encoder and a decoder, which may begin with the ids of the encoder."""

    def _default_decoder_ids(self, input_ids: Tensor | None) -> Tensor | None:
        if self._shift is None:  # the decoder raises then
            return None
        if input_ids is None:
            self._parent.forward(self)  # which raises
        return self._shifted(input_ids)  # type: ignore[arg-type]


class _PlainHead:
    """Mixin of a model whose logits are a product with the last hidden state."""

    def _head(self: Any) -> _heads.Head:
        return None, self.get_output_embeddings()


class _Generation(_PlainHead, _Shifts, ConditionalGeneration):
    _caches_beside_loss = False
    #: The inputs with which the parent's head runs.
    _others: tuple[str, ...] = ()

    @functools.wraps(ConditionalGeneration.forward)
    def forward(self, **inputs: Any) -> Any:
        if _any_of(self._others, inputs):
            return self._parent.forward(self, **inputs)
        return super().forward(**inputs)

    def _backbone(self: Any, **inputs: Any) -> Any:
        return self.base_model(**inputs)

    def _logits_bias(self: Any) -> Tensor | None:
        bias = getattr(self, "final_logits_bias", None)
        return None if bias is None else bias[0]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        return self._shifted(labels)


def classes_like_barts(root: PreTrainedModel, name: str | None, plain: bool) -> dict[type, type]:
    """As ``classes_like_berts``.

    Args:
        plain: whether the forward of a layer is the parent's.
    """
    found: dict[type, type] = {}
    for stack in root.modules():
        layers = getattr(stack, "layers", None)
        if not (isinstance(stack, PreTrainedModel) and isinstance(layers, nn.ModuleList)):
            continue
        found |= _stack_like_barts(stack, layers, name, plain)
    if not found:
        return {}
    kind, inputs = type(root).__name__, inspect.signature(root.forward).parameters
    backbone: Any = root.base_model
    if root.config.is_encoder_decoder and isinstance(backbone, PreTrainedModel):
        found |= [_of(backbone, GetsMore, _DecodesIds)]
    if root is backbone:
        return found
    if {
        "labels",
        "decoder_input_ids",
    } <= inputs.keys() and root.get_output_embeddings() is not None:
        found |= [_of(root, _Generation, _others=())]
    elif "ForCausalLM" in kind or "logits_to_keep" in inputs:
        unshifted = "Decoder" in type(backbone).__name__
        causal = bart.DecoderCausalLM if unshifted else _heads.CausalLM
        found |= [_of(root, _PlainHead, causal)]
    elif kind.endswith("ForSequenceClassification"):
        found |= [_of(root, LastEosClassification, PassesOn)]
    elif kind.endswith("ForQuestionAnswering"):
        found |= [_of(root, DecoderQuestionAnswering, PassesOn)]
    return found


_OF_BARTS = {
    *("self_attn", "self_attn_layer_norm", "encoder_attn", "encoder_attn_layer_norm"),
    *("fc1", "fc2", "activation_fn", "final_layer_norm"),
}


def _stack_like_barts(
    stack: Any, layers: nn.ModuleList, name: str | None, plain: bool
) -> dict[type, type]:
    layer: Any = layers[0] if len(layers) else None
    if len({*map(type, layers)}) != 1 or not _children(layer) <= _OF_BARTS:
        return {}
    if _children(layer.self_attn) != {"k_proj", "v_proj", "q_proj", "out_proj"}:
        return {}
    attention, own = type(layer.self_attn), name is not None
    kind, found = attention, dict([_of(stack.embed_positions, _Positions)])
    if own:
        found |= [_of(layer.self_attn, _Projected)]
        kind = found[attention]
    if own:
        found |= [_of(layer, InContext)]
    elif not plain:
        found |= [_of(layer, bart.PostNormLayer, _attention=kind)]
    kinds = frozenset((found.get(type(layer), type(layer)), kind))
    inputs = inspect.signature(stack.forward).parameters
    how: dict[str, Any] = dict(_kinds=kinds, _takes_cache=CACHE in inputs, _owns=own)
    how |= {} if name is None else {"_name": name}
    known = set(_INPUTS) - {"position_ids", "token_type_ids"}
    how["_others"] = tuple(one for one in inputs if one not in known)
    return found | dict([_of(stack, _Stack, **how)])


# --- what is tried --------------------------------------------------------------------------------


def prover(root: PreTrainedModel, own: bool) -> Callable[[], bool] | None:
    """A function that replaces the classes of a model and its modules, and says whether they are
    proved, or else puts all back. None: nothing is to be replaced.

    It is to be made while the model is as Transformers made it.

    Args:
        own: whether its attention computes its scores itself.
    """
    tried: list[dict[type, type]] = []
    root = _unwrapped(root)
    parameters = list(root.parameters())
    dtypes = {one.dtype for one in parameters}
    devices = {one.device.type for one in parameters}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        return None
    if not devices <= {"cpu", "cuda"} or {*map(type, parameters)} != {nn.Parameter}:
        return None
    # A short text, as of the proof, makes BigBird's full for good.
    if any(getattr(one, "attention_type", None) == "block_sparse" for one in root.modules()):
        return None
    try:
        for name in ["eager"] if own else [None, NAME]:
            tried.append(classes_like_berts(root, name))
        for plain in (False, True):
            tried.append(classes_like_barts(root, "eager" if own else None, plain))
        tried = [one for one in tried if one]
        proof = Proof(root) if tried else None
    except Exception as error:  # it is another model than it looks like
        logger.debug("%s is not replaced: %s", type(root).__name__, error)
        return None

    def prove() -> bool:
        return any(_replaces(root, classes, proof) for classes in tried)

    return None if proof is None else prove


def _unwrapped(root: PreTrainedModel) -> PreTrainedModel:
    """The model to which another one hands on all its inputs, as ``MBartDecoderWrapper`` does."""
    inner = [*root.children()]
    passes_on = {*inspect.signature(root.forward).parameters} == {"args", "kwargs"}
    alone = passes_on and len(inner) == 1 and isinstance(inner[0], PreTrainedModel)
    return inner[0] if alone else root


def _replaces(root: PreTrainedModel, classes: dict[type, type], proof: Any) -> bool:
    """Replace the classes, if they are proved. Inputs with which they compute something else are
    left to the parent, if it then computes the same."""
    before = [(module, type(module)) for module in root.modules()]
    left: set[str] = set()
    while True:
        for module, kind in before:
            ours = _leaving(classes[kind], left) if kind in classes else drop_in_for(module)
            if ours is not None:
                module.__class__ = ours
        differs = proof.differs()
        if not differs:
            return True
        logger.debug("%s: other results with %s", type(root).__name__, sorted(differs))
        for module, kind in before:
            module.__class__ = kind
        if "" in differs or differs <= left:
            return False
        left |= differs


def _leaving(ours: Any, inputs: set[str]) -> type:
    """A class with further inputs with which the parent runs."""
    parent, mixins, attributes = ours._recipe
    how = dict(attributes)
    if not inputs or "_others" not in how:
        return ours
    how["_others"] = tuple(sorted({*how["_others"], *inputs}))
    return made(parent, mixins, tuple(sorted(how.items())))
