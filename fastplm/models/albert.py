"""ALBERT: drop-in for the classes of the same names in Transformers, and parameter sharing.

ALBERT's layers share their parameters: layer i is a call of group ``i * groups // layers``. So the
last layer is not a module of its own, but the last call of a group.

Sharing
-------
``AlbertConfig(parameter_sharing=…)`` is one of the four choices of the paper's table 4:

============== ============================ ====================
mode           shared by all layers         ``num_hidden_groups``
============== ============================ ====================
"all"          everything (the default)     any, 1 in the paper
"attention"    the attention part           one for each layer
"feed_forward" the feed-forward part        one for each layer
"none"         nothing                      one for each layer
============== ============================ ====================

The attention part consists of query, key, value, output projection and the LayerNorm after it
(``attention.LayerNorm``); the feed-forward part of its two projections and the LayerNorm after
them (``full_layer_layer_norm``).

A shared part is one set of parameters under the names of all groups. A checkpoint stores one copy
for each group, so that ``transformers.AlbertModel`` loads it and computes the same; there the
copies are no longer shared. A checkpoint with different copies raises an error here.

The embedding is always factorised: ``embedding_size`` may also be 1, ``hidden_size`` or larger.
The projection to ``hidden_size`` exists even if the two sizes are equal.

Source: Lan et al. 2019 (arXiv 1909.11942).
"""

from __future__ import annotations

import os
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.albert import modeling_albert

from fastplm.errors import check_choice, fail
from fastplm.models import _heads
from fastplm.models._base import FastplmModel, drop_in, joined, switch_modules
from fastplm.models._encoder import EncoderEmbeddings, EncoderLayer, EncoderModel
from fastplm.models._layer import Attention, FeedForward, Join, Layer, stand_for
from fastplm.models._ragged import LastRows, Rows
from fastplm.nn._rows import is_plain

_SHARED = ("all", "attention", "feed_forward", "none")


def _sharing(config: PreTrainedConfig) -> str:
    return getattr(config, "parameter_sharing", "all")


def _shares_a_part(config: PreTrainedConfig) -> bool:
    return _sharing(config) in ("attention", "feed_forward")


def _check_sharing(where: str, config: Any) -> None:
    mode = _sharing(config)
    check_choice(where, "config.parameter_sharing", mode, _SHARED)
    layers, groups = config.num_hidden_layers, config.num_hidden_groups
    if mode != "all" and groups != layers:
        expected = f"{layers}, the number of layers, with parameter_sharing={mode!r}"
        fix = f"Set num_hidden_groups={layers}: each group has parameters of its own."
        fail(where, "config.num_hidden_groups", groups, expected, fix)


def _ties_of_layers(model: Any) -> dict[str, str]:
    """{shared parameter of a layer: the first layer's parameter} in a backbone."""
    if not _shares_a_part(model.config):
        return {}
    first, *others = [
        f"encoder.albert_layer_groups.{g}.albert_layers.{i}"
        for g, group in enumerate(model.encoder.albert_layer_groups)
        for i in range(len(group.albert_layers))
    ]
    attention = _sharing(model.config) == "attention"
    return {
        f"{layer}.{name}": f"{first}.{name}"
        for name, _ in model.get_submodule(first).named_parameters()
        if name.startswith("attention.") == attention
        for layer in others
    }


class _Sharing(FastplmModel):
    """Mixin of every class: shares parts of the layers, and saves a copy for each layer."""

    # Transformers' ALBERT does not support it; the layers here do.
    supports_gradient_checkpointing = True

    all_tied_weights_keys: dict[str, str]

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        _check_sharing(type(self).__name__, config)
        super().__init__(config, *args, **kwargs)
        if _shares_a_part(config):
            # Transformers has tied the weights already, but when the backbone was still its own.
            self.all_tied_weights_keys = self.get_expanded_tied_weights_keys(all_submodels=True)
            self.tie_weights(recompute_mapping=False)

    def _backward_compatibility_gradient_checkpointing(self) -> None:
        switch_modules(self)  # type: ignore[arg-type]  # the parent's layers cannot do it
        super()._backward_compatibility_gradient_checkpointing()  # type: ignore[misc]

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        # `_tied_weights_keys` cannot be used: it needs `tie_word_embeddings`.
        tied = super().get_expanded_tied_weights_keys(all_submodels)  # type: ignore[misc]
        if isinstance(self, AlbertModel):
            tied.update(_ties_of_layers(self))
        return tied

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        super().tie_weights(*args, **kwargs)  # type: ignore[misc]
        # Transformers does not tie weights with different values in the checkpoint.
        for name, source in self._tied_layers().items():
            get: Any = self.get_parameter  # type: ignore[attr-defined]
            parameter = get(name)
            if parameter is not get(source) and not parameter.is_meta:
                got = f"{_sharing(self.config)!r}, but other values of {name} than of {source}"
                expected = "a checkpoint whose layers are equal in what they share"
                fix = "Load it with parameter_sharing='none'."
                fail(type(self).__name__, "config.parameter_sharing", got, expected, fix)

    def _tied_layers(self) -> dict[str, str]:
        """{shared parameter of a layer: the first layer's parameter}, by full names."""
        if not _shares_a_part(self.config):
            return {}
        tied = self.get_expanded_tied_weights_keys(all_submodels=True)
        return {name: source for name, source in tied.items() if ".albert_layers." in name}

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Like the parent; writes a copy of the shared parts for each layer."""
        if _shares_a_part(self.config):
            values = self.state_dict() if state_dict is None else state_dict  # type: ignore
            copies = self._tied_layers()
            state_dict = {
                name: value.clone() if name in copies else value for name, value in values.items()
            }
        return super().save_pretrained(  # type: ignore[misc]
            save_directory, is_main_process, state_dict, **kwargs
        )


# --- the layers -----------------------------------------------------------------------------------


stand_for(modeling_albert.AlbertAttention, modeling_albert.AlbertLayer)
AlbertEmbeddings = joined(EncoderEmbeddings, modeling_albert.AlbertEmbeddings)


@drop_in
class AlbertLayer(EncoderLayer, GradientCheckpointingLayer, modeling_albert.AlbertLayer):
    """A layer, which in the last call may compute only some rows."""

    _around = (modeling_albert.AlbertAttention,)
    _feed_forward_method = "ff_chunk"

    def _last(self, rows: Rows) -> LastRows | None:
        return rows.last  # the calls before it get no such rows

    def _attends(self) -> tuple[Any, ...]:
        return (self._modules.get("attention"),)

    def _parts(self, no_hooks: bool = True) -> Layer | None:
        attention: Any = self._modules["attention"]
        if not self._is_known((attention,), no_hooks):
            return None
        modules, within = self._modules, attention._modules
        block = Attention(
            module=attention,
            head_size=attention.attention_head_size,
            dropout=within["attention_dropout"].p,
            projections=(within["query"], within["key"], within["value"]),
            join=Join(within["dense"], within["LayerNorm"], within["output_dropout"]),
        )
        ends = Join(modules["ffn_output"], modules["full_layer_layer_norm"], 0.0)
        feed_forward = FeedForward(modules["ffn"], modules["activation"], ends)
        return Layer((block,), feed_forward, self.training)


def _in_turn(calls: list[Any], hidden: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Layers or groups in the order in which they run, each with the number of its first layer in
    ``rows``; only the last may compute some rows."""
    rows: Rows = kwargs["rows"]
    number = rows.number_of_layer or 0
    for at, call in enumerate(calls, 1):
        others = rows.last is not None and at < len(calls)
        kwargs["rows"] = (rows.of_others() if others else rows).for_layer(number)
        hidden = call(hidden, **kwargs)
        number += len(getattr(call, "albert_layers", (call,)))
    return hidden


@drop_in
class AlbertLayerGroup(modeling_albert.AlbertLayerGroup):
    """The layers of a group. The last one may compute only some rows."""

    def forward(self, *, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if kwargs.get("rows") is None:
            return super().forward(hidden_states, **kwargs)
        return _in_turn([*self.albert_layers], hidden_states, kwargs)


@drop_in
class AlbertTransformer(modeling_albert.AlbertTransformer):
    """The calls of the groups. The last one may compute only some rows."""

    def forward(self, *, hidden_states: Tensor, **kwargs: Any) -> Any:
        if kwargs.get("rows") is None:
            return super().forward(hidden_states, **kwargs)
        hidden = self.embedding_hidden_mapping_in(hidden_states)
        return BaseModelOutput(last_hidden_state=_in_turn(self.calls(), hidden, kwargs))

    def calls(self) -> list[Any]:
        """The group of each layer, in the order in which they run."""
        layers = self.config.num_hidden_layers
        # The parent's rounding, if the layers do not divide evenly into groups.
        each = layers / self.config.num_hidden_groups
        return [self.albert_layer_groups[int(i / each)] for i in range(layers)]


# --- the models -----------------------------------------------------------------------------------


class AlbertModel(_Sharing, EncoderModel, transformers.AlbertModel):
    """``transformers.AlbertModel`` with fused attention, computing only tokens.

    ``config.parameter_sharing`` selects what the layers share: see ``fastplm.models.albert``.

    Source: Lan et al. 2019 (arXiv 1909.11942).
    """

    def _is_causal(self) -> bool:
        # Some old configurations have `is_decoder`; the parent ignores it.
        return False

    def _layers_are_ours(self) -> bool:
        kinds = (type(group) is AlbertLayerGroup for group in self.encoder.albert_layer_groups)
        return type(self.encoder) is AlbertTransformer and all(kinds) and super()._layers_are_ours()

    def _layers(self) -> Any:
        groups = getattr(self.encoder, "albert_layer_groups", ())
        return [layer for group in groups for layer in getattr(group, "albert_layers", ())]

    def _layer_numbers(self) -> list[Any]:
        # One of each call of a layer.
        return list(range(sum(len(group.albert_layers) for group in self.encoder.calls())))

    def _pooled(self, first: Tensor) -> Tensor:
        return self.pooler_activation(self.pooler(first[:, 0]))


def _head(head: Any) -> _heads.Head:
    if not is_plain(head, modeling_albert.AlbertMLMHead):
        return None, head
    return lambda rows: head.LayerNorm(head.activation(head.dense(rows))), head.decoder


class AlbertForMaskedLM(_Sharing, _heads.MaskedLM, transformers.AlbertForMaskedLM):
    """``transformers.AlbertForMaskedLM`` whose head and loss compute only labelled tokens."""

    def _head(self) -> _heads.Head:
        return _head(self.predictions)


class AlbertForPreTraining(
    _Sharing, _heads.SequencePairPreTraining, transformers.AlbertForPreTraining
):
    """``transformers.AlbertForPreTraining`` whose MLM head computes only labelled tokens.

    Source: Lan et al. 2019 (arXiv 1909.11942), §3.1.
    """

    _output = modeling_albert.AlbertForPreTrainingOutput
    _pair_label, _pair_logits = "sentence_order_label", "sop_logits"

    def _head(self) -> _heads.Head:
        return _head(self.predictions)

    def _pair_head(self) -> nn.Module:
        return self.sop_classifier


class AlbertForSequenceClassification(
    _Sharing, _heads.SequenceClassification, transformers.AlbertForSequenceClassification
): ...


class AlbertForMultipleChoice(
    _Sharing, _heads.MultipleChoice, transformers.AlbertForMultipleChoice
): ...


class AlbertForTokenClassification(
    _Sharing, _heads.TokenClassification, transformers.AlbertForTokenClassification
): ...


class AlbertForQuestionAnswering(
    _Sharing, _heads.QuestionAnswering, transformers.AlbertForQuestionAnswering
): ...
