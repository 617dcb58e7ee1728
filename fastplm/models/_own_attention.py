"""Families whose attention computes its scores itself, and knows neither names nor packed rows.

Their models run as Transformers wrote them, on packed rows and with a mask that masks nothing.
While they do, ``HERE`` holds what their attention needs. Where it is empty, as with a
cache, the parent's attention runs.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastplm.hf import NAME, as_booleans, fastplm_attention_forward, in_dtype_of
from fastplm.models._base import FastplmModel
from fastplm.models._encoder import EncoderLayer
from fastplm.models._layer import ready_layer, run_layer
from fastplm.models._ragged import Rows, SetsDropoutRows
from fastplm.nn.dropout import on_rows


class Now(NamedTuple):
    """What the layers of a model that runs get."""

    rows: Rows
    keys: Tensor | None  # bool [B, T] or [1, N]; None = all may be attended to
    keys_of_encoder: Tensor | None
    others: dict[str, Any]  # for self-attention: whether it is causal, the bias


class _Here(threading.local):
    """What a model that runs has for the modules below it. (Dynamo traces no ContextVar.)

    Args:
        now: what its layers get.
        more: a model without head, and the inputs that the parent of its head did not pass on.
        given: the padded ids or embeddings of a batch.
        packed: these, and how they are packed.
        parents: whether a model has inputs with which its parent computes everything.
    """

    def __init__(self) -> None:  # not in the class: Dynamo guards what an instance has
        self.now: Now | None = None
        self.more: tuple[Any, dict[str, Any]] = None, {}
        self.given: Tensor | None = None
        self.packed: tuple[Tensor, Any] | None = None
        self.parents = False


HERE = _Here()
_STATES = ("encoder_hidden_states", "key_value_states")


def within(values: dict[str, Any], function: Callable, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, in which ``HERE`` has these values."""
    before = {name: getattr(HERE, name) for name in values}
    for name, value in values.items():
        setattr(HERE, name, value)
    try:
        return function(*args, **kwargs)
    finally:
        for name, value in before.items():
            setattr(HERE, name, value)


def _inputs_of_parent(kind: type) -> list[str]:
    """The arguments of the forward of the class of Transformers that a class extends."""
    for base in kind.__mro__:
        if base.__module__.startswith("transformers.models."):
            return list(inspect.signature(base.forward).parameters)  # type: ignore[attr-defined]
    return []  # a mixin


class PassesOn:
    """Mixin between the two forwards of a head, whose parent passes only what it knows on to the
    model without head: the rest reaches that here."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._known = _inputs_of_parent(cls)

    _known: list[str]
    base_model: Any

    def forward(self, **inputs: Any) -> Any:
        known = {*self._known, "return_dict"}  # which is the head's, although a decorator takes it
        more = {name: inputs.pop(name) for name in [*inputs] if name not in known}
        return within({"more": (self.base_model, more)}, super().forward, **inputs)  # type: ignore[misc]


class GetsMore:
    """Mixin before the two forwards of a model, which may have such a head."""

    def forward(self, **inputs: Any) -> Any:
        model, more = HERE.more  # another model may run inside of a head, in a hook
        inputs |= more if model is self else {}
        return within({"more": (None, {})}, super().forward, **inputs)  # type: ignore[misc]


class OnRows(FastplmModel):
    """Mixin between the two forwards of a model: it fills ``HERE``, where it can."""

    _is_causal: Callable[[], bool]
    _keeps_padding: Callable[..., str | None]

    def forward(
        self,
        *,
        attention_mask: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        rows: Rows | None = None,
        **inputs: Any,
    ) -> Any:
        if attention_mask is not None and attention_mask.dim() == 5:  # it masks nothing
            attention_mask = None
        masks, forward = (attention_mask, encoder_attention_mask), super().forward  # type: ignore
        if self._keeps_padding(masks, inputs) is not None:
            if encoder_attention_mask is not None:
                inputs["encoder_attention_mask"] = encoder_attention_mask
            inputs["attention_mask"] = self._mask_of_parent(attention_mask)
            return within({"now": None}, forward, **inputs)
        keys, others = (None if mask is None else mask.bool() for mask in masks)
        now = Now(rows or Rows(), keys, others, self._of_attention())
        # A mask with four dimensions is passed on unchanged.
        nothing = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=self.device)  # type: ignore
        if inputs.get("encoder_hidden_states") is not None:
            inputs["encoder_attention_mask"] = nothing
        return within({"now": now}, forward, attention_mask=nothing, **inputs)

    def _mask_of_parent(self, mask: Tensor | None) -> Tensor | None:
        """A mask that is added to the scores, unless the parent makes one."""
        if self.config._attn_implementation != NAME:
            return mask
        added = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=self.device)  # type: ignore
        if mask is None or mask.dim() == 4 and mask.is_floating_point():
            return added if mask is None else in_dtype_of(added, mask)
        keys = mask.bool() if mask.dim() == 2 else as_booleans(type(self).__name__, mask)
        while keys.dim() < 4:
            keys = keys[:, None]
        return added.masked_fill(~keys, torch.finfo(self.dtype).min)

    def _of_attention(self) -> dict[str, Any]:
        """What else self-attention gets in all layers."""
        return {"is_causal": self._is_causal()}


class _Own:
    """Mixin of a module that may get the states of an encoder."""

    #: Where they are among the arguments of the parent's forward.
    _place: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        names = _inputs_of_parent(cls)
        places = [names.index(name) - 1 for name in _STATES if name in names]
        cls._place = places[0] if places else None

    def _states(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if self._place is not None and len(args) > self._place:
            return args[self._place]
        return next((kwargs[name] for name in _STATES if kwargs.get(name) is not None), None)


class OwnAttention(_Own):
    """Mixin of a module with query, key and value: in ``OnRows`` it calls fastplm's attention."""

    _projections: tuple[str, ...] = ("query", "key", "value")

    _size = "attention_head_size"
    is_causal = False  # where no argument says it

    @property
    def scaling(self: Any) -> float:
        return getattr(self, self._size) ** -0.5

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        now, theirs = HERE.now, super().forward  # type: ignore[misc]
        if now is None:
            return theirs(*args, **kwargs)
        hidden, states = args[0] if args else kwargs["hidden_states"], self._states(args, kwargs)
        options, keys = now.others, now.keys
        if states is not None:
            options, keys = {"is_causal": False}, now.keys_of_encoder
        modules = [self._modules[name] for name in self._projections]
        heads = [
            one(hidden if states is None or at == 0 else states) for at, one in enumerate(modules)
        ]
        size, drop = getattr(self, self._size), self.dropout
        heads = [one.view(*one.shape[:-1], -1, size).transpose(1, 2) for one in heads]
        query, key, value = heads if states is not None else self._turned(*heads, args, kwargs)
        dropout = (drop if isinstance(drop, float) else drop.p) if self.training else 0.0
        out, _ = fastplm_attention_forward(
            *(self, query, key, value, keys, dropout, self.scaling), rows=now.rows, **options
        )
        return self._output(out.flatten(-2)), None

    def _turned(self, query: Any, key: Any, value: Any, args: Any, kwargs: Any) -> Any:
        return query, key, value

    def _output(self, context: Tensor) -> Tensor:
        return context


class InContext(_Own):
    """Mixin of a layer with such attention."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A checkpointed layer runs again when ``HERE`` is empty.
        now = HERE.now
        given = kwargs if now is None else kwargs | {"now": now}
        return super().__call__(*args, **given)  # type: ignore[misc]

    def forward(self, *args: Any, now: Now | None = None, **kwargs: Any) -> Any:
        return within({"now": now}, super().forward, *args, **kwargs)  # type: ignore[misc]


class OwnLayer(InContext, EncoderLayer):
    """Mixin of a layer of an encoder. It returns a tuple, if the parent's does."""

    _is_numbered = False
    _returns_tuple = True

    def forward(self: Any, *args: Any, now: Now | None = None, **kwargs: Any) -> Any:
        theirs = super(SetsDropoutRows, self).forward  # type: ignore[misc]
        if now is None:
            return theirs(*args, **kwargs)
        hidden, rows = args[0] if args else kwargs["hidden_states"], now.rows
        if rows.order:
            rows = rows.for_layer(rows.order[id(self)])
        last = None if rows.last is None else self._last(rows)
        made = None if self._states(args, kwargs) is not None else ready_layer(self, rows, hidden)
        if made is None:
            now = now._replace(rows=rows.of_others())
            return on_rows(rows.numbers, within, {"now": now}, theirs, *args, **kwargs)
        out = run_layer(made, hidden, now.keys, last, {"rows": rows, **now.others})
        return (out,) if self._returns_tuple else out
