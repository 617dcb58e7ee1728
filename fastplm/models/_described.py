"""Encoders that are descriptions: where a layer has its modules, and whether its norms come first.

Their layers run one after the other by ``_layer.run_blocks``, on packed rows; the last one computes
the rows that the head reads. The parent's forward runs, on packed rows, too, where hidden states
are returned, in a decoder, and where a layer is not what its names say.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from fastplm.models import _encoder
from fastplm.models._base import joined, wants_output
from fastplm.models._layer import (
    ANGLES,
    OUTPUTS,
    Attention,
    Blocks,
    FeedForward,
    Join,
    Layer,
    Ready,
    is_patched,
    ready,
    run_blocks,
    stand_for,
)
from fastplm.models._ragged import SetsDropoutRows
from fastplm.nn._rows import are_plain, is_plain, kind_of


class Names(NamedTuple):
    """The paths from a layer to its modules; "" = there is none."""

    attention: str  # what the attention interface gets
    projections: tuple[str, ...]  # of query, key and value, or one for all
    context: str  # the product after attention, and its dropout
    context_dropout: str
    norms: tuple[str, str]  # before the blocks, or after them
    inner: str
    activation: Any  # or a module that the layer does not have
    outer: str
    outer_dropout: str = ""
    dropout: str = ""  # between the products
    factor: str = ""  # see ``FeedForward``
    gated: bool = False
    norms_first: bool = True
    rms: type | None = None
    probability: str = "dropout"  # attributes of ``attention``
    head_size: str = "head_dim"


#: The classes of a layer that hold modules, after the prefix of a family like BERT.
PARTS_OF_BERT = "Attention SelfAttention SelfOutput Intermediate Output"
_OF_BERT = "attention.self."
#: The names of BERT, in a layer whose norms come first.
OF_BERT = Names(
    attention="attention.self",
    projections=(_OF_BERT + "query", _OF_BERT + "key", _OF_BERT + "value"),
    context="attention.output.dense",
    context_dropout="attention.output.dropout",
    norms=("attention.LayerNorm", "LayerNorm"),
    inner="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    outer="output.dense",
    outer_dropout="output.dropout",
    head_size="attention_head_size",
)
#: Those of Llama.
OF_LLAMA = Names(
    attention="self_attn",
    projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    context="self_attn.o_proj",
    context_dropout="",
    norms=("input_layernorm", "post_attention_layernorm"),
    inner="mlp.gate_proj",
    activation="mlp.act_fn",
    outer="mlp.down_proj",
    factor="mlp.up_proj",
    probability="attention_dropout",
)


def layer(theirs: Any, prefix: str, name: str, parts: str, names: Names) -> Any:
    """The drop-in class of a layer.

    Args:
        theirs: the Python module of the family in Transformers.
        prefix, name, parts: of its classes, those of the layer and of what holds its modules.
        names: where these are.
    """
    kinds = tuple(getattr(theirs, prefix + part) for part in parts.split())
    parent, module = getattr(theirs, prefix + name), sys._getframe(1).f_globals["__name__"]
    given = dict(_names=names, _wrappers=kinds, _around=_above(names), __module__=module)
    made = joined(DescribedLayer, parent, **given)
    stand_for(*kinds, parent, made, *([] if names.rms is None else [names.rms]))
    return made


def _above(names: Names) -> tuple[str, ...]:
    """The paths of the modules of a layer that hold others."""
    given = (*names, *names.projections, *names.norms)
    paths = [one for one in given if isinstance(one, str) and "." in one]
    ends = {path.rpartition(".")[0] for path in paths} | {names.attention}
    return tuple(sorted(ends))


def _at(module: Any, path: str) -> Any:
    """The module at a path; None if it is not there."""
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


class DescribedLayer(SetsDropoutRows):
    """Mixin of a layer that has its modules where ``_names`` says, in modules of ``_wrappers``."""

    _names: Names
    _wrappers: tuple[type, ...]
    _around: tuple[str, ...]

    def attends_as_made(self: Any) -> bool:
        """Whether its attention is what Transformers made, which supports packed rows."""
        return kind_of(_at(self, self._names.attention)) in self._wrappers

    def _parts_up_to(self: Any, norm: Any, crossed: bool) -> Layer | None:
        names, held = self._names, vars(self)
        around = [_at(self, path) for path in self._around]
        if not all(kind_of(one) in self._wrappers for one in around):
            return None
        if held.get("chunk_size_feed_forward") or "feed_forward_chunk" in held:
            return None
        first, second = (_at(self, path) for path in names.norms)
        ends = (second, norm) if names.norms_first else (first, second)
        attention, inner = _at(self, names.attention), _at(self, names.inner)
        products = [*(_at(self, one) for one in names.projections), _at(self, names.context)]
        products += [inner, _at(self, names.outer)]
        if None in (first, second, *products):
            return None
        probability = getattr(attention, names.probability)
        size = getattr(attention, names.head_size)
        activation = names.activation
        attends = Attention(
            module=attention,
            head_size=size,
            dropout=probability.p if isinstance(probability, nn.Module) else probability,
            projections=tuple(products[:-3]),
            join=Join(products[-3], ends[0], self._dropout(names.context_dropout), names.rms),
            scaling=size**-0.5,
        )
        feed = FeedForward(
            inner=inner,
            activation=_at(self, activation) if isinstance(activation, str) else activation,
            outer=Join(products[-1], ends[1], self._dropout(names.outer_dropout), names.rms),
            factor=_at(self, names.factor) if names.factor else None,
            dropout=self._dropout(names.dropout),
            gated=names.gated,
        )
        begins = first if names.norms_first else None
        return Layer((attends,), feed, self.training, begins, (self, *around))

    def _dropout(self, path: str) -> Any:
        """A dropout, for ``Join``; a probability of 0 if there is none."""
        module = _at(self, path) if path else None
        nothing = module is None or (type(module) is nn.Identity and are_plain((module,)))
        return 0.0 if nothing else module


class Encoder(_encoder.EncoderModel, Blocks):
    """Mixin of a backbone whose layers are described."""

    #: The path of the norm after the last layer.
    _last_norm = ""
    #: The name of the module of rotary positions, which count from 0 in each sequence.
    _rotary = ""

    def _layers(self: Any) -> Any:
        encoder = self._modules.get("encoder")
        return (self if encoder is None else encoder)._modules[
            "layers" if encoder is None else "layer"
        ]

    def _norm(self: Any) -> Any:
        return _at(self, self._last_norm) if self._last_norm else None

    def _layer_numbers(self) -> list[Any]:
        attentions = (_at(one, one._names.attention) for one in self._layers())
        numbers = [getattr(one, "layer_idx", None) for one in attentions]
        return [at if number is None else number for at, number in enumerate(numbers)]

    def _layers_are_ours(self) -> bool:
        return all(
            isinstance(one, DescribedLayer) and one.attends_as_made() for one in self._layers()
        )

    def _last_layer(self) -> int | None:
        layers = None if self._is_causal() or is_patched() else self._described(False)
        return None if layers is None else len(layers) - 1

    def _position_table(self: Any) -> nn.Module | None:
        return None if self._rotary else super()._position_table()

    def _positions(self, input_ids: Tensor | None, given: Tensor) -> Tensor:
        if not self._rotary:
            return super()._positions(input_ids, given)
        return torch.arange(given.shape[1], device=given.device)[None]

    def _reads_length(self: Any, seqlen: int, no_positions: bool) -> bool:
        """Whether the frequencies of rotary positions may be others than for the tokens alone.

        The parent takes them from the largest position id of the padded batch.
        """
        given = getattr(self.config, "rope_parameters", None) or {} if self._rotary else {}
        kinds = [given] if "rope_type" in given else [*given.values()]  # or one for each layer type
        most = [
            one["original_max_position_embeddings"]
            if one["rope_type"] == "longrope"
            else self.config.max_position_embeddings
            for one in kinds
            if one is not None and one["rope_type"] in ("dynamic", "longrope")
        ]
        return bool(most) and (not no_positions or seqlen >= min(most))

    def _described(self: Any, crossed: bool) -> list[Layer] | None:
        encoder = self._modules.get("encoder")
        made = encoder is None or kind_of(encoder).__module__.startswith("transformers.models.")
        plain = made and (encoder is None or is_plain(encoder))
        return super()._described(crossed) if plain else None

    def _ready(self: Any, inputs: dict[str, Any]) -> list[Ready] | None:
        asked = any(wants_output(self, name, inputs) for name in OUTPUTS)
        both = [inputs.get(name) for name in ("input_ids", "inputs_embeds")]
        given = both[0] if both[1] is None else both[1]
        layers = None if asked or self._is_causal() else self._described(False)
        if layers is None or given is None or None not in both:
            return None
        made = ready(layers, given.new_empty(0, dtype=self.dtype))
        return None if None in made else made  # type: ignore[return-value]

    def _run(
        self: Any,
        made: list[Ready],
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        given = dict(input_ids=input_ids, inputs_embeds=inputs_embeds, position_ids=position_ids)
        hidden = self._embedded(token_type_ids=token_type_ids, **given)
        mask = create_bidirectional_mask(self.config, hidden, attention_mask)
        of_layers = None
        if self._rotary:
            if position_ids is None:
                position_ids = self._positions(None, hidden)
            of_layers = self._of_layers(hidden, position_ids, attention_mask)
        return run_blocks(made, self._layers(), hidden, mask, kwargs, of_layers=of_layers)

    def _of_layers(
        self: Any, hidden: Tensor, position_ids: Tensor, mask: Tensor | None
    ) -> list[dict[str, Any]]:
        """What the attention of each layer gets beside the mask; ``mask`` is the caller's."""
        angles = getattr(self, self._rotary)(hidden, position_ids)
        return [{ANGLES: angles}] * len(self._layers())

    def _returned(self: Any, hidden: Tensor) -> Any:
        pooled = {"pooler_output": self._pooled(hidden)} if self._pools() else {}
        return self._output(last_hidden_state=hidden, **pooled)
