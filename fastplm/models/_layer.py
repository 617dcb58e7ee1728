"""A layer of a Transformer: three autograd functions, and the attention between them.

::

    x [N, E] -> query, key, value       ``project``: one product
             -> context                 ``ops.attention``
             -> y = norm(z), z = r + dropout(W c + b)   ``join``: a product, the rest in one pass
             -> h = gelu(V y + a)       ``expand``: a product and a pass
             -> norm(r + dropout(W h + b))              ``join``

If norms come after the residual (BERT, BART), the residual r is x, then y. If they come before
(T5, GPT-2, ModernBERT), r is the sum z of the block before, and the norm in ``join`` is that of the
next block.

Autograd adds no gradients of residuals: each function hands that of its residual to the previous,
which adds to it by the product or the norm that computes its own. Under autocast to bf16, products,
norms and the rows between them are bf16, and the weights are copied to it once a forward, query,
key and value side by side.

A function runs if its modules are what they were made as. With a hook, an adapter or another class
these modules are called. If what is around them has changed, the parent's layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers.activations import GELUActivation
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastplm import ops
from fastplm._backends import requested
from fastplm._modes import is_eager, is_fake
from fastplm._registry import Op
from fastplm.hf import NAME, ROWS
from fastplm.models import _functions
from fastplm.models._base import CACHE, Conv1D, GELUTanh, NewGELUActivation, wants_output
from fastplm.models._functions import NO_DROPOUT, RELU, SILU, Drawn
from fastplm.models._ragged import LastRows, Rows
from fastplm.nn import Dropout, Linear
from fastplm.nn._rows import are_plain, is_known, kind_of
from fastplm.nn.dropout import dropout, on_rows
from fastplm.nn.gelu import gelu
from fastplm.ops._common import seed_tensor
from fastplm.ops.bias_gelu import OP as BIAS_GELU
from fastplm.ops.bias_gelu import Call as BiasGelu
from fastplm.ops.dropout_add_layer_norm import OP as NORM
from fastplm.ops.dropout_add_layer_norm import Call as Norm

_has_global_hook = torch.nn.modules.module._has_any_global_hook
PARAMETER = (nn.Parameter, FakeTensor)
#: The argument with which Transformers passes (cos, sin) of rotary positions, [1 or B, T, D], on.
ANGLES = "position_embeddings"
#: Their weights are turned: [K, M] instead of [M, K].
_CONV1D = (Conv1D, transformers.pytorch_utils.Conv1D)
_TANH = (NewGELUActivation, transformers.activations.NewGELUActivation, GELUTanh)
_SILU = (nn.SiLU, transformers.activations.SiLUActivation)
_LINEAR, _DROPOUT = (Linear, nn.Linear), (Dropout, nn.Dropout)


#: The copies of a forward by the ``id`` of a parameter. In memory, the copies
#: for key and value follow that for the query.
Copies = dict[int, Tensor]


class Join(NamedTuple):
    """The end of a block: the modules of a product and a norm, and the dropout between them.

    Where norms come first, ``norm`` is that of the block, or of the stack, that follows.
    """

    dense: Any
    norm: Any
    dropout: Any  # a module, or what a layer has for one: a probability
    rms: type | None = None  # the class of a norm that is not ``nn.LayerNorm`` but T5's

    def is_plain(self) -> bool:
        """Whether the modules are as they were made."""
        dense, norm, dropout, rms = self
        return (
            _are_alike((dense,))
            and are_plain((norm,), rms or nn.LayerNorm)
            and read_their_parameters((norm,), norm._parameters.get("bias") is not None)
            and norm._parameters["weight"].shape
            == (dense._parameters["weight"].shape[isinstance(dense, _CONV1D)],)
            and (isinstance(dropout, float) or are_plain((dropout,), *_DROPOUT))
        )

    def by_modules(self, x: Tensor, residual: Tensor, training: bool) -> tuple[Tensor, Tensor]:
        """(the norm, the sum) of ``residual + dropout(dense(x))``."""
        x, drop = self.dense(x), self.dropout
        x = dropout(x, drop, training) if isinstance(drop, float) else drop(x)
        sum = (residual + x).to(residual.dtype)
        return self.norm(sum).to(residual.dtype), sum


class Attention(NamedTuple):
    """A block of attention: its modules, whatever a family calls them."""

    module: Any  # what the attention interface gets
    head_size: int
    dropout: Any  # of its probabilities: a module, or a probability
    projections: tuple[Any, ...]  # of query, key and value; two or all may be one product
    join: Join
    scaling: float | None = None  # None = that of the module
    function: Any = None  # stands for that of Transformers' attention interface


class FeedForward(NamedTuple):
    """A block of two products: its modules, whatever a family calls them."""

    inner: Any
    activation: Any
    outer: Join
    factor: Any = None  # the product by which a gated layer multiplies the activation
    dropout: Any = 0.0  # between the products
    gated: bool = False  # whether that product is the second half of the inner one

    def by_modules(self, x: Tensor, training: bool) -> Tensor:
        """What the outer product reads."""
        active, drop, factor = self.inner(x), self.dropout, None
        if self.gated:
            active, factor = active.chunk(2, -1)
        if activation_of(self.activation) == "tanh":  # all models share the module, a slow one
            active = gelu(active, "tanh")
        else:
            active = self.activation(active)
        if self.factor is not None:
            factor = self.factor(x)
        active = active if factor is None else active * factor
        return dropout(active, drop, training) if isinstance(drop, float) else drop(active)


class Layer(NamedTuple):
    """The blocks of a layer."""

    attentions: tuple[Attention, ...]
    feed_forward: FeedForward
    training: bool
    norm: Any = None  # that of the first block, where norms come first ...
    around: tuple[Any, ...] = ()  # ... and the modules that are not called: see ``Blocks``


class Form(NamedTuple):
    """How the functions of this file run: a backend of the ops, and the dtype of all rows."""

    backend: str
    dtype: torch.dtype | None
    no_grad: bool  # inside of inference mode gradients may be enabled, but a function saves nothing


_BY_MODULES = Form("", None, False)


def form_of(x: Tensor, layer: Layer) -> Form | None:
    """How the blocks of a layer run on rows like ``x``; None if its modules must run themselves."""
    block = layer.feed_forward
    inner, norm = block.inner._parameters, block.outer.norm._parameters
    weight, outer = inner.get("weight"), block.outer.dense._parameters.get("weight")
    if weight is None or x.is_meta or weight.device != x.device or _has_global_hook():
        return None
    if not (is_eager(x) or is_fake(x)) or requested("attention") == "eager":
        return None
    dtype, device = x.dtype, x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        # In fp16 the gradients between layers would need more range; on a CPU, where little is won,
        # hidden states stay as exact as the parent's, unless a backend is asked for.
        if dtype is not torch.bfloat16 or (device == "cpu" and requested(NORM.name) == "auto"):
            return None
    elif weight.dtype is not dtype or (outer is not None and outer.dtype is not dtype):
        return None
    rows = x.new_empty(0, weight.shape[not isinstance(block.inner, _CONV1D)], dtype=dtype)
    nothing, is_rms = (None, None, None, None, 0.0, 0.0), block.outer.rms is not None
    calls = (
        (NORM, Norm(rows, rows, norm.get("weight"), norm.get("bias"), *nothing, is_rms)),
        (BIAS_GELU, BiasGelu(rows, inner.get("bias"))),
    )
    usual = "cpp" if device == "cpu" else "triton"
    name, *others = {_backend_of(op, call, usual) for op, call in calls}
    no_grad = torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    return None if others or name is None else Form(name, dtype, no_grad)


def _backend_of(op: Op, call: Any, usual: str) -> str | None:
    wanted = requested(op.name)
    name = usual if wanted == "auto" else wanted
    if name not in ("cpp", "triton") or name not in op.backends:
        return None
    return None if op.backends[name].rejects(call, forced=wanted != "auto") else name


def read_their_parameters(modules: Iterable[Any], biased: bool = True) -> bool:
    """Whether modules have a weight and, or not, a bias, and read them from nowhere else."""
    for module in modules:
        attributes, parameters = module.__dict__, module._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (
            type(weight) not in PARAMETER
            or weight.layout is not torch.strided
            or (type(bias) not in PARAMETER if biased else bias is not None)
            or "weight" in attributes
            or "bias" in attributes
        ):
            return False
    return True


def nothing_hides_modules(*modules: Any) -> bool:
    """Whether the children of modules are what their names give: an attribute is found first."""
    for module in modules:
        attributes = module.__dict__
        for name in module._modules:
            if name in attributes:
                return False
    return True


#: Classes whose modules these functions stand for, and their methods ``forward`` as they were made.
_STANDS_FOR: dict[Any, Any] = {}


def stand_for(*kinds: Any) -> None:
    """Add classes of modules that a layer passes by."""
    # One whose forward somebody has replaced before is patched from the beginning.
    _STANDS_FOR.update({kind: kind.forward if is_known(kind.forward) else None for kind in kinds})


def stand_for_frozen(frozen: Any, kind: Any) -> None:
    """Add the subclass that modules of a class have in a frozen model, if the class is here."""
    if kind in _STANDS_FOR:
        own = "forward" in vars(frozen)
        _STANDS_FOR[frozen] = frozen.forward if own else _STANDS_FOR[kind]


stand_for(*_LINEAR, *_CONV1D, *_DROPOUT, nn.LayerNorm, nn.ReLU, GELUActivation, *_SILU, *_TANH)


def is_patched() -> bool:
    """Whether somebody has replaced the ``forward`` of a class that these functions stand for."""
    for kind, forward in _STANDS_FOR.items():
        if kind.forward is not forward:
            return True
    return False


def _are_alike(modules: Sequence[Any]) -> bool:
    """Whether all are linear of one kind, and all or none of them have a bias."""
    kinds = _CONV1D if isinstance(modules[0], _CONV1D) else _LINEAR
    if not are_plain(modules, *kinds):
        return False
    return read_their_parameters(modules, modules[0]._parameters.get("bias") is not None)


def _expands(block: FeedForward, training: bool) -> str | None:
    """The activation, if ``expand`` runs a feed-forward up to its second product."""
    activation, drop = activation_of(block.activation), block.dropout
    inner = [block.inner] if block.factor is None else [block.inner, block.factor]
    if activation is None or not _are_alike(inner):
        return None
    if isinstance(drop, nn.Module):
        if not are_plain((drop,), *_DROPOUT):
            return None
    elif training and drop:
        return None
    # The kernels of the others add no bias.
    adds_bias = activation not in (RELU, SILU) and block.factor is None and not block.gated
    return activation if adds_bias or block.inner._parameters.get("bias") is None else None


def activation_of(activation: Any) -> str | None:
    """A GELU, as ``ops.gelu`` calls it, ``RELU`` or ``SILU``; None for another activation."""
    if not are_plain((activation,), GELUActivation, nn.ReLU, *_SILU, *_TANH):
        return None
    if isinstance(activation, GELUActivation):
        return "none" if activation.act is torch.nn.functional.gelu else None
    if isinstance(activation, _SILU):
        return SILU
    return RELU if isinstance(activation, nn.ReLU) else "tanh"


# --- a layer --------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """A layer in one forward. It is made before the layers run, so a checkpointed one is as first
    run when the backward runs it again."""

    layer: Layer
    form: Form
    copies: Copies  # of all layers
    projects: list[bool]  # of each attention, whether its function runs
    joins: list[bool]
    activation: str | None  # as ``ops.gelu`` calls it, if the function of the feed-forward runs


def ready(layers: Iterable[Layer | None], x: Tensor) -> list[Ready | None]:
    """Layers that get rows like ``x``; None for one whose parent's forward must run."""
    made: list[Ready | None] = []
    copies: Copies = {}  # of all layers, filled when these are known
    forms: dict[Any, Form | None] = {}  # most layers of a model are alike
    named: dict[int, bool] = {}
    patched = is_patched()
    for layer in layers:
        if layer is None or patched or not _attends_by_name(layer, named):
            made.append(None)
            continue
        kind = _kind_of(layer.feed_forward)
        if kind not in forms:
            forms[kind] = form_of(x, layer)
        form, feed = forms[kind], layer.feed_forward
        projects, joins, activation = [], [], None
        for block in layer.attentions:
            projects.append(form is not None and _are_alike(block.projections))
            joins.append(form is not None and block.join.is_plain())
        if form is not None and feed.outer.is_plain():
            activation = _expands(feed, layer.training)
        made.append(Ready(layer, form or _BY_MODULES, copies, projects, joins, activation))
    copies.update(copies_of(made))
    return made


def _kind_of(block: FeedForward) -> tuple[Any, ...]:
    """What ``form_of`` depends on in a layer."""
    inner, end = block.inner._parameters, block.outer
    outer, norm = end.dense._parameters, end.norm._parameters
    read = (*map(inner.get, _NAMES), outer.get("weight"), *map(norm.get, _NAMES))
    kinds = [None if one is None else (one.dtype, one.device, one.shape) for one in read]
    return type(block.inner), end.rms, *kinds


_NAMES = ("weight", "bias")


def all_ready(layers: list[Layer], x: Tensor) -> list[Ready] | None:
    """``ready``; None unless all layers run in one way."""
    made = [one for one in ready(layers, x) if one is not None and one.form.backend]
    return made if len(made) == len(layers) else None


def of_one_forward(layers: Iterable[Any], given: Tensor, dtype: torch.dtype) -> dict[int, Ready]:
    """Layers of a model by their ``id``, with the weights of all of them copied at once.

    A layer that is not here finds its own when it runs.

    Args:
        layers: the modules, with a method ``_parts``.
        given: a tensor on the device of the rows.
        dtype: of the rows, outside of autocast.
    """
    if given.device.type == "cpu" and not torch.is_autocast_enabled("cpu"):
        return {}  # there is nothing to copy
    parts = {id(one): one._parts() for one in layers if hasattr(one, "_parts")}
    made = zip(parts, ready(parts.values(), given.new_empty(0, dtype=dtype)), strict=True)
    return {key: one for key, one in made if one is not None and one.form.backend}


def ready_layer(layer: Any, rows: Rows | None, hidden: Tensor) -> Ready | None:
    """A layer with a method ``_parts``; None if its own forward must run."""
    made = None if rows is None else rows.layers.get(id(layer))
    return ready([layer._parts()], hidden)[0] if made is None else made


def _attends_by_name(layer: Layer, named: dict[int, bool]) -> bool:
    """Whether the attention of a layer is fastplm's. GPT has no choice: there it always is.

    ``named``: what is known of configurations, by their ``id``: a model has one for all layers.
    """
    for block in layer.attentions:
        config = vars(block.module).get("config")
        if config is not None and id(config) not in named:
            named[id(config)] = config._attn_implementation == NAME
        if not named.get(id(config), True):
            return False
    return True


def copies_of(made: list[Ready | None]) -> Copies:
    """Copies, in one launch, of what products read in another dtype or place than it has."""
    sources: list[Any] = []
    for layer, form, _, projects, joins, activation in filter(None, made):
        dense: list[Any] = []
        for block, projected, joined in zip(layer.attentions, projects, joins, strict=True):
            if projected:
                first = block.projections[0]._parameters["weight"]
                # On a GPU three weights are copied side by side, so that one product reads them.
                needs_joined_copy = len(block.projections) == 3 and form.backend != "cpp"
                if needs_joined_copy or first.dtype is not form.dtype:
                    for name in _NAMES:
                        for one in block.projections:
                            if one._parameters[name] is not None:
                                sources.append(one._parameters[name])
            if joined:
                dense.append(block.join.dense)
        if activation is not None:
            feed = layer.feed_forward
            dense += (feed.inner, feed.outer.dense)
            if feed.factor is not None:
                dense.append(feed.factor)
        for one in dense:
            weight = one._parameters["weight"]
            if weight.dtype is not form.dtype:
                sources.append(weight)
    if not sources:
        return {}
    with torch.no_grad():
        dtype = next(one.form.dtype for one in filter(None, made) if one.form.dtype is not None)
        flat = sources[0].new_empty(sum(map(Tensor.numel, sources)), dtype=dtype)
        copies = torch._utils._unflatten_dense_tensors(flat, sources)
        torch._foreach_copy_(copies, sources)
    return dict(zip(map(id, sources), copies, strict=True))


_NO_SEEDS = (None, None, None)
_NO_ROW_NUMBERS = (None, None)


def _drawn(dropout: Any, training: bool, seed: Tensor | None, numbers: Any, x: Tensor) -> Drawn:
    """What the dropout of rows like ``x`` depends on. A module knows by itself whether it trains,
    a probability does not."""
    if isinstance(dropout, float):
        p = dropout if training else 0.0
    else:
        p = dropout.p if dropout.training else 0.0
    if p == 0.0:
        return NO_DROPOUT
    if seed is None:
        seed = seed_tensor("", None, x, optional=True)
    return Drawn(p, seed, numbers or _NO_ROW_NUMBERS)


def run_layer(
    made: Ready,
    hidden: Tensor,
    mask: Tensor | None,
    last: LastRows | None,
    kwargs: dict[str, Any],
    cross_attention_args: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """A layer whose norms come last: hidden [B, T, E], or [1, N, E] of packed rows -> the same.

    Args:
        mask: as the attention interface takes it.
        last: the rows to compute, if it is the last layer and computes only some: -> [1, P, E].
        kwargs: what else the attention interface gets.
        cross_attention_args: the states of an encoder, and their mask, for the second attention.
    """
    if made.form.no_grad and torch.is_grad_enabled():
        with torch.no_grad():
            return run_layer(made, hidden, mask, last, kwargs, cross_attention_args)
    rows: Rows | None = kwargs.get(ROWS)
    numbers = None if rows is None else rows.numbers_of(last)
    module, dtype = made.layer.attentions[0].module, made.form.dtype
    first, second, end = (None if rows is None else rows.seeds_of(module)) or _NO_SEEDS

    def run(hidden: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> Tensor:
        if dtype is not None and hidden.dtype is not dtype:
            hidden = hidden.to(dtype)
        hidden, *_ = attend(made, 0, hidden, None, None, mask, first, numbers, kwargs, last)
        if cross_attention_args[0] is not None:
            hidden, *_ = attend(
                made, 1, hidden, None, *cross_attention_args, second, numbers, kwargs
            )
        return feed(made, hidden, None, end, numbers)[0]

    return on_rows(numbers, run, hidden, mask, kwargs)


def attend(
    made: Ready,
    index: int,
    hidden: Tensor,
    residual: Any,
    states: Any,
    mask: Tensor | None,
    seed: Tensor | None,
    numbers: Any,
    kwargs: dict[str, Any],
    last: LastRows | None = None,
) -> tuple[Tensor, Any, Any]:
    """A block of attention: hidden [..., E] -> (the norm of a sum [..., E], the sum, the states).

    Args:
        residual: [..., E] if norms come first; None = ``hidden``, and no sum is returned.
        states: what key and value are of, [..., E]; None = ``hidden``. The next layer gets those
            that are returned, so that gradients are added by products.
        mask, kwargs: what the attention interface gets, and as ``position_embeddings`` (cos, sin)
            of rotary positions.
        seed, numbers: of the dropout of hidden states.
        last: the queries to compute, if not all: -> [1, P, E].
    """
    block, form, copies = made.layer.attentions[index], made.form, made.copies
    turn: Any = kwargs.get(ANGLES)
    joined = len(block.projections) == 1
    if turn is not None:
        kwargs = {name: one for name, one in kwargs.items() if name != ANGLES}
    if last is not None:
        kwargs = {**kwargs, ROWS: replace(kwargs[ROWS], is_cut=True)}
        residual = None if residual is None else last.rows(residual)
        if turn is not None:
            turn = [one.expand(*hidden.shape[:-1], -1).flatten(0, 1)[None] for one in turn]
        if joined:
            hidden, mask = hidden.flatten(0, -2)[None], last.attention_mask()
        else:
            hidden, states, mask = last.attention_inputs(hidden)
    shape, width = hidden.shape[:-1], hidden.shape[-1]
    keys = shape if states is None else states.shape[:-1]
    given = hidden.reshape(-1, width)
    size, turns = block.head_size, None
    if not made.projects[index]:
        heads = _projected(block.projections, hidden, hidden if states is None else states)
    elif states is None:
        turns = None if turn is None else (*turn, size, shape, form.backend)
        *heads, given = project(given, block.projections, copies, 3, turns)
    else:
        if turn is not None:
            turns = (*turn, size, keys, form.backend)
            turn = [last.rows(one) for one in turn]  # type: ignore[union-attr]
        of_query = None if turn is None else (*turn, size, shape, form.backend)
        query, given = project(given, block.projections[:1], copies, 1, of_query)
        others = states.reshape(-1, states.shape[-1]).to(form.dtype)
        key, value, others = project(others, block.projections[1:], copies, 2, turns)
        states, heads = others.view(states.shape), [query, key, value]
    query, key, value = [
        # Not view(…, -1, …), which no batch of 0 can take.
        one.view(*where, one.shape[-1] // size, size).transpose(1, 2)
        for one, where in zip(heads, (shape, keys, keys), strict=True)
    ]
    if turn is not None and turns is None:
        query, key = rotated(query, key, turn, None if joined else last)
    if last is not None and joined:
        hidden, given = last.rows(hidden), last.rows(given).squeeze(0)
        query = last.rows(query.transpose(1, 2), 2).transpose(1, 2)
    module = block.module
    drop: Any = block.dropout
    training = module.training
    if isinstance(drop, nn.Module):
        drop, training = drop.p, drop.training
    dropout = drop if training else 0.0
    context, _ = (block.function or ALL_ATTENTION_FUNCTIONS[NAME])(
        *(module, query, key, value, mask),
        dropout=dropout,
        scaling=module.scaling if block.scaling is None else block.scaling,
        **kwargs,
    )
    context = context.flatten(-2)
    training = made.layer.training
    if not made.joins[index]:
        before = hidden if residual is None else residual
        out, sum = block.join.by_modules(context, before, training)
        return out, None if residual is None else sum, states
    drawn = _drawn(block.join.dropout, training, seed, numbers, context)
    before = given if residual is None else residual.reshape(given.shape)
    out, sum = join(context.flatten(0, -2), before, block.join, drawn, copies, form)
    return out.view(hidden.shape), None if residual is None else sum.view(hidden.shape), states


def rotated(
    query: Tensor, key: Tensor, angles: Sequence[Tensor], last: LastRows | None
) -> tuple[Tensor, Tensor]:
    """Query and key [B, H, T, D] turned by their positions, by (cos, sin) [1 or B, T, D].

    ``last``: which of the rows the queries are.
    """

    if last is None:
        return ops.rotary(query, key, *angles)
    query, _ = ops.rotary(query, query[:, :0], *map(last.rows, angles))
    return query, ops.rotary(key, key[:, :0], *angles)[0]


def _projected(modules: tuple[Any, ...], hidden: Tensor, states: Tensor) -> list[Tensor]:
    """Query of ``hidden``, key and value of ``states``, by their modules."""
    query, *others = modules
    if not others:
        return [*query(hidden).chunk(3, -1)]
    heads = [one(states) for one in others]
    return [query(hidden), *(heads if len(heads) == 2 else heads[0].chunk(2, -1))]


def feed(
    made: Ready, hidden: Tensor, residual: Any, seed: Tensor | None, numbers: Any
) -> tuple[Tensor, Any]:
    """A block of two products: hidden [..., E] -> (the norm of a sum [..., E], the sum).

    Args:
        residual, seed, numbers: as of ``attend``.
    """
    block, training, copies = made.layer.feed_forward, made.layer.training, made.copies
    if made.activation is None:
        before = hidden if residual is None else residual
        out, sum = block.outer.by_modules(block.by_modules(hidden, training), before, training)
        return out, None if residual is None else sum
    drop, within = block.dropout, NO_DROPOUT
    if not isinstance(drop, float) and drop.training:
        within = Drawn(drop.p, None, numbers or _NO_ROW_NUMBERS)
    active, given = expand(hidden.flatten(0, -2), block, made.activation, within, copies, made.form)
    drawn = _drawn(block.outer.dropout, training, seed, numbers, hidden)
    before = given if residual is None else residual.reshape(given.shape)
    out, sum = join(active, before, block.outer, drawn, copies, made.form)
    return out.view(hidden.shape), None if residual is None else sum.view(hidden.shape)


# --- a stack ------------------------------------------------------------------------------------

OUTPUTS = ("output_hidden_states", "output_attentions")
_ASIDE = {*OUTPUTS, "use_cache", "return_dict", CACHE}


class Blocks:
    """Mixin between the two forwards of a stack: its blocks run as this file says, if all modules
    around those of a ``Layer`` are what they were made as; else the parent's forward."""

    #: The class of the blocks. Their ``_parts_up_to`` gets the norm that follows them, and whether
    #: they attend to an encoder; it returns None if what is around the modules is of another class.
    _block: type
    #: The last norm.
    _norm: Callable[[], Any]
    #: The last hidden state [..., T, E] by these layers; None if the parent's forward must run.
    _run: Callable[..., Tensor | None]

    def forward(self: Any, **inputs: Any) -> Any:
        made = self._ready(inputs) if inputs.get(CACHE) is None else None
        given = {name: one for name, one in inputs.items() if name not in _ASIDE}
        out = None if made is None else self._run(made, **given)
        if out is None:
            return super().forward(**inputs)  # type: ignore[misc]
        return self._returned(out.to(self.dtype))

    def _returned(self, hidden: Tensor) -> Any:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)

    def _ready(self: Any, inputs: dict[str, Any]) -> list[Ready] | None:
        ids: Any = inputs.get("input_ids")
        given, uses = inputs.get("inputs_embeds"), inputs.get("use_cache")
        uses = self.config.use_cache if uses is None else uses
        asked = any(wants_output(self, name, inputs) for name in OUTPUTS)
        if asked or uses or (ids is None) == (given is None) or torch.compiler.is_compiling():
            return None
        layers = self._described(inputs.get("encoder_hidden_states") is not None)
        if layers is None:
            return None
        return all_ready(layers, ids.new_empty(0, dtype=self.dtype) if given is None else given)

    def _described(self: Any, crossed: bool) -> list[Layer] | None:
        """The layers; None if what is around their modules is not as it was made, or has hooks."""
        layers: list[Layer] = []
        norm = self._norm()
        for block in reversed([*self._layers()]):
            known = kind_of(block) is self._block
            layer = block._parts_up_to(norm, crossed) if known else None
            if layer is None or not are_plain(layer.around):
                return None
            if not nothing_hides_modules(*layer.around):
                return None
            layers.insert(0, layer)
            norm = layer.norm
        return layers or None


def run_blocks(
    made: list[Ready],
    blocks: Iterable[Any],
    hidden: Tensor,
    mask: Tensor | None,
    kwargs: dict[str, Any],
    cross_attention_args: tuple[Tensor | None, Tensor | None] = (None, None),
    of_states: Any = None,
    table: Tensor | None = None,
    biased: Callable[[Tensor], dict[str, Any]] | None = None,
    of_layers: Sequence[dict[str, Any]] | None = None,
) -> Tensor:
    """The layers of a stack: hidden [..., E] -> the norm of the last sum.

    Args:
        blocks: the modules of the layers, which may be checkpointed.
        mask, kwargs: what the attention interface gets.
        cross_attention_args: the states of an encoder, and their mask, for the second attention.
        of_states: what else that attention gets.
        table: a tensor that all layers share, of which ``biased`` makes what else the first gets.
        of_layers: what else that of each layer gets.
    """
    if made[0].form.no_grad and torch.is_grad_enabled():
        with torch.no_grad():
            given = kwargs, cross_attention_args, of_states, table, biased, of_layers
            return run_blocks(made, blocks, hidden, mask, *given)
    rows: Rows | None = kwargs.get(ROWS)
    dtype, norm = made[0].form.dtype, made[0].layer.norm
    normed = hidden = hidden if dtype is None else hidden.to(dtype)
    states, mask_of_states = cross_attention_args
    if norm is None:  # norms come last: the residual is what a block reads
        hidden = None  # type: ignore[assignment]
    else:
        normed = norm(hidden)
        normed = normed if dtype is None else normed.to(dtype)

    def run(
        at: int, last: Any, numbers: Any, normed: Any, hidden: Any, states: Any, table: Any
    ) -> tuple[Any, ...]:
        one, given, seeds = made[at], kwargs, None
        module = one.layer.attentions[0].module
        if rows is not None:
            own = rows.for_layer(at) if getattr(module, "layer_idx", None) is None else rows
            given, seeds = given | {ROWS: own}, own.seeds_of(module)
        first, second, end = seeds or _NO_SEEDS
        given = given if biased is None else given | biased(table)
        given = given if of_layers is None else given | of_layers[at]
        normed, hidden, _ = attend(one, 0, normed, hidden, None, mask, first, numbers, given, last)
        if states is not None:
            others = mask_of_states, second, numbers, of_states
            normed, hidden, states = attend(one, 1, normed, hidden, states, *others)
        return *feed(one, normed, hidden, end, numbers), states

    for at, block in enumerate(blocks):
        last = None if rows is None or at + 1 < len(made) else rows.last
        numbers = None if rows is None else rows.numbers_of(last)
        call = partial(on_rows, numbers, run)
        if block.training and block.gradient_checkpointing:
            call = partial(block._gradient_checkpointing_func, call)
        normed, hidden, states = call(at, last, numbers, normed, hidden, states, table)
    return normed


# --- from modules to the functions ----------------------------------------------------------------


def project(
    x: Tensor,
    modules: tuple[Any, ...],
    copies: Copies,
    outputs: int,
    turns: tuple[Any, ...] | None = None,
) -> tuple[Tensor, ...]:
    """The outputs [N, M] of linear modules, or the parts of that of one module, and ``x`` [N, E] as
    the residual of what follows.

    ``turns``: (cos, sin, the size of a head, [B, T], a backend), to turn all heads but the values.
    """
    parameters: list[Any] = []
    read: list[Any] = []
    sizes, turned = [], isinstance(modules[0], _CONV1D)
    for module in modules:
        weight, bias = module._parameters["weight"], module._parameters["bias"]
        parameters += (weight, bias)
        sizes.append(weight.shape[turned])
        copy = copies.get(id(weight), weight)
        read += (copy.t() if turned else copy, copies.get(id(bias), bias))
    if len(sizes) < outputs:
        sizes = [sizes[0] // outputs] * outputs
    if not turned and id(parameters[0]) in copies:
        read = [_joined(read[::2]), None if read[1] is None else _joined(read[1::2])]
    count, turn = len(read) // 2, None
    if turns is not None:
        cos, sin, size, shape, backend = turns
        heads = [one // size for one in sizes[: max(1, outputs - 1)]] + [0] * (outputs > 1)
        heads = heads if count == len(sizes) else [sum(heads)]
        turn = _functions.Turn(cos, sin, tuple(heads), tuple(shape), backend)
    return _functions.project(x, sizes, turned, turn, count, *read, *parameters)


def _joined(copies: list[Tensor]) -> Tensor:
    """Copies one below the other, as which they were made unless modules share a parameter."""
    first, rows, at = copies[0], 0, copies[0].storage_offset()
    for one in copies:
        if one.storage_offset() != at:
            return torch.cat(copies)
        at, rows = at + one.numel(), rows + one.shape[0]
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def join(
    x: Tensor, residual: Tensor, end: Join, drawn: Drawn, copies: Copies, form: Form
) -> tuple[Tensor, Tensor]:
    """(the norm, the sum) of ``residual + dropout(dense(x))``: [N, K], [N, E] -> [N, E] twice."""
    dense, norm = end.dense._parameters, end.norm._parameters
    weight, turned = dense["weight"], isinstance(end.dense, _CONV1D)
    eps = end.norm.eps if end.rms is None else end.norm.variance_epsilon
    read = copies.get(id(weight), weight)
    return _functions.join(
        *(x, residual, read.t() if turned else read, weight, dense["bias"]),
        *(norm["weight"], norm.get("bias"), drawn, eps, end.rms is not None),
        *(form.backend, turned),
    )


def expand(
    x: Tensor, block: FeedForward, activation: str, drawn: Drawn, copies: Copies, form: Form
) -> tuple[Tensor, Tensor]:
    """What the outer product reads: [N, E] -> [N, F]; and ``x`` as the residual of what follows."""
    read, weights, turned = [], [], isinstance(block.inner, _CONV1D)
    for one in (block.inner,) if block.factor is None else (block.inner, block.factor):
        weight = one._parameters["weight"]
        copy = copies.get(id(weight), weight)
        read.append(copy.t() if turned else copy)
        weights.append(weight)
    return _functions.expand(
        *(x, activation, drawn, form.backend, block.inner._parameters["bias"]),
        *(turned, block.gated, len(weights), *read, *weights),
    )
