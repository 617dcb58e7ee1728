"""A post-norm layer of an encoder: three autograd functions, and the attention between them.

::

    x [N, E] -> query, key, value              ``project``: one product
             -> context                        ``ops.attention``
             -> y = norm(x + dropout(W c + b))         ``join``: a product, the rest in one pass
             -> norm(y + dropout(W gelu(V y + a) + b)) ``feed_forward``: two products and passes

Autograd adds no gradients of residuals: each function hands that of its residual to the previous,
which adds to it by the product that computes its own. Gradients of weights leave the products in
the dtype of the weights. Under autocast to bf16, products, norms and the rows between them are
bf16, and the weights are copied to it once a forward, query, key and value side by side.

A block runs this way if its modules are what they were made as. With a hook, an adapter or another
class the modules run themselves, which are the specification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from transformers.activations import GELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastplm._backends import requested
from fastplm._registry import Op, is_eager
from fastplm.hf import NAME, ROWS
from fastplm.models._base import GELUTanh, NewGELUActivation
from fastplm.models._ragged import LastRows, Rows
from fastplm.nn import Dropout, Linear
from fastplm.nn._rows import is_plain
from fastplm.nn.dropout import RowNumbers, on_rows
from fastplm.ops._common import seed_tensor
from fastplm.ops.bias_gelu import OP as BIAS_GELU
from fastplm.ops.bias_gelu import Call as BiasGelu
from fastplm.ops.bias_gelu import Saved as SavedGelu
from fastplm.ops.dropout_add_layer_norm import OP as NORM
from fastplm.ops.dropout_add_layer_norm import Call as Norm
from fastplm.ops.dropout_add_layer_norm import Saved as SavedNorm
from fastplm.ops.linear import product

_has_global_hook = torch.nn.modules.module._has_any_global_hook
PARAMETER = (nn.Parameter, FakeTensor)
_LINEAR, _DROPOUT = (Linear, nn.Linear), (Dropout, nn.Dropout)


#: The copies of a forward by the ``id`` of a parameter. That of a query's weight, or bias, is
#: followed in memory by those of key and value.
Copies = dict[int, Tensor]


class Join(NamedTuple):
    """The end of a block: the modules of a product and a norm, and the dropout between them."""

    dense: Any
    norm: Any
    dropout: Any  # a module, or what a layer has for one: a probability

    def is_plain(self) -> bool:
        """Whether the modules are as they were made."""
        dense, norm, dropout = self
        return (
            _is_linear(dense)
            and is_plain(norm, nn.LayerNorm)
            and norm.normalized_shape == dense._parameters["weight"].shape[:1]
            and has_both(norm)
            and (isinstance(dropout, float) or is_plain(dropout, *_DROPOUT))
        )

    def drawn(self, training: bool, beside: Tensor, of: Of) -> Drawn:
        p = self.dropout if isinstance(self.dropout, float) else self.dropout.p
        if not training or p == 0.0:
            return Drawn(0.0, None, None)
        return Drawn(p, seed_tensor("", of.seed, beside, optional=True), of.numbers)


class Attention(NamedTuple):
    """A block of attention: its modules, whatever a family calls them."""

    module: Any  # what the attention interface gets
    head_size: int
    dropout: float
    projections: tuple[Any, Any, Any]  # of query, key and value
    join: Join
    by_modules: Callable[[Tensor, Tensor], Tensor]  # the join of a context and a residual


class FeedForward(NamedTuple):
    """A block of two products: its modules, whatever a family calls them."""

    inner: Any
    activation: Any
    outer: Join
    by_modules: Callable[[Tensor], Tensor]


class Layer(NamedTuple):
    """The blocks of a post-norm layer."""

    attentions: tuple[Attention, ...]
    feed_forward: FeedForward
    training: bool


class Form(NamedTuple):
    """How the functions of this file run: a backend of the ops, and the dtype of all rows."""

    backend: str
    dtype: torch.dtype | None


_BY_MODULES = Form("", None)


def form_of(x: Tensor, layer: Layer) -> Form | None:
    """How the blocks of a layer run on rows like ``x``; None if its modules must run themselves."""
    inner, norm = layer.feed_forward.inner._parameters, layer.feed_forward.outer.norm._parameters
    weight = inner.get("weight")
    if weight is None or weight.device != x.device or _has_global_hook():
        return None
    if not (is_eager(x) or is_fake(x)) or requested("attention") == "eager":
        return None
    dtype, device = x.dtype, x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        if dtype is not torch.bfloat16:  # sums of fp16 are not the scaler's business
            return None
    elif weight.dtype is not dtype:
        return None
    rows = x.new_empty(0, weight.shape[1], dtype=dtype)
    nothing = (None, None, None, None, 0.0, 0.0)
    calls = (
        (NORM, Norm(rows, rows, norm.get("weight"), norm.get("bias"), *nothing)),
        (BIAS_GELU, BiasGelu(rows, inner.get("bias"))),
    )
    usual = "cpp" if device == "cpu" else "triton"
    name, *others = {_backend_of(op, call, usual) for op, call in calls}
    return None if others or name is None else Form(name, dtype)


def is_fake(x: Tensor) -> bool:
    """Whether it is a tensor without data, which may be on a device that is not there."""
    return type(x) is FakeTensor and not torch.compiler.is_compiling()


def _backend_of(op: Op, call: Any, usual: str) -> str | None:
    wanted = requested(op.name)
    name = usual if wanted == "auto" else wanted
    if name not in ("cpp", "triton") or name not in op.backends:
        return None
    return None if op.backends[name].rejects(call, forced=wanted != "auto") else name


def has_both(module: Any) -> bool:
    """Whether a module has a weight and a bias, and reads them from nowhere else."""
    own, parameters = vars(module), module._parameters
    return (
        type(parameters.get("weight")) in PARAMETER
        and type(parameters.get("bias")) in PARAMETER
        and "weight" not in own
        and "bias" not in own
    )


def nothing_hides_modules(*modules: Any) -> bool:
    """Whether the children of modules are what their names give: an attribute is found first."""
    return all(vars(one).keys().isdisjoint(one._modules) for one in modules)


def _is_linear(module: Any) -> bool:
    return (
        is_plain(module, *_LINEAR)
        and has_both(module)
        and module._parameters["weight"].layout is torch.strided
    )


def approximation(activation: Any) -> str | None:
    """The form of a GELU, as ``ops.gelu`` calls it; None for another activation."""
    if is_plain(activation, GELUActivation):
        return "none" if activation.act is torch.nn.functional.gelu else None
    return "tanh" if is_plain(activation, NewGELUActivation, GELUTanh) else None


# --- a layer --------------------------------------------------------------------------------------


class Ready(NamedTuple):
    """A layer in one forward. It is made before the layers run, so a checkpointed one is as first
    run when the backward runs it again."""

    layer: Layer
    form: Form
    copies: Copies
    projects: tuple[bool, ...]  # of each attention, whether its function runs
    joins: tuple[bool, ...]
    feeds: bool  # whether the function of the feed-forward runs


def ready(layers: Iterable[Layer], x: Tensor) -> list[Ready]:
    """Layers that get rows like ``x``."""
    made = []
    for layer in layers:
        form = form_of(x, layer)
        blocks, feed = layer.attentions, layer.feed_forward
        if form is None:
            none = (False,) * len(blocks)
            made.append(Ready(layer, _BY_MODULES, {}, none, none, False))
            continue
        projects = tuple(all(map(_is_linear, one.projections)) for one in blocks)
        joins = tuple(one.join.is_plain() for one in blocks)
        inner = _is_linear(feed.inner) and approximation(feed.activation) is not None
        made.append(Ready(layer, form, {}, projects, joins, inner and feed.outer.is_plain()))
    copies = copies_of(made)
    return [one._replace(copies=copies) for one in made] if copies else made


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
    known = {key: one for key, one in parts.items() if one is not None}
    made = ready(known.values(), given.new_empty(0, dtype=dtype))
    return {key: one for key, one in zip(known, made, strict=True) if one.form.backend}


def ready_layer(layer: Any, rows: Rows | None, hidden: Tensor) -> Ready | None:
    """A layer with a method ``_parts``; None if its own forward must run."""
    made = None if rows is None else rows.layers.get(id(layer))
    if made is None and (parts := layer._parts()) is not None:
        made = ready([parts], hidden)[0]
    return made


def copies_of(made: list[Ready]) -> Copies:
    """Copies, in one launch, of what products read in another dtype or place than it has."""
    sources: list[Tensor] = []
    for layer, form, _, projects, joins, feeds in made:
        others: list[Any] = []
        for block, projected, joined in zip(layer.attentions, projects, joins, strict=True):
            if projected:
                parameters = [one._parameters for one in block.projections]
                weights: list[Any] = [one["weight"] for one in parameters]
                if form.backend != "cpp" or weights[0].dtype is not form.dtype:
                    sources += weights + [one["bias"] for one in parameters]
            others += [block.join.dense] * joined
        others += [layer.feed_forward.inner, layer.feed_forward.outer.dense] * feeds
        weights = [one._parameters["weight"] for one in others]
        sources += [one for one in weights if one.dtype is not form.dtype]
    if not sources:
        return {}
    with torch.no_grad():
        dtype = next(one.form.dtype for one in made if one.form.dtype is not None)
        flat = sources[0].new_empty(sum(one.numel() for one in sources), dtype=dtype)
        copies = torch._utils._unflatten_dense_tensors(flat, sources)
        torch._foreach_copy_(copies, sources)
    return dict(zip(map(id, sources), copies, strict=True))


class Of(NamedTuple):
    """What the dropout of a block depends on, besides its probability."""

    seed: Tensor | None
    numbers: RowNumbers | None


def run_layer(
    made: Ready,
    hidden: Tensor,
    mask: Tensor | None,
    last: LastRows | None,
    kwargs: dict[str, Any],
    crossed: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """A layer's forward: hidden [B, T, E], or [1, N, E] of packed rows -> the same.

    Args:
        mask: as the attention interface takes it.
        last: the rows to compute, if it is the last layer and computes only some: -> [1, P, E].
        kwargs: what else the attention interface gets.
        crossed: the states of an encoder, and their mask, for the second attention.
    """
    rows: Rows | None = kwargs.get(ROWS)
    numbers = None if rows is None else rows.numbers_of(last)
    return on_rows(numbers, _run_layer, made, hidden, mask, last, numbers, kwargs, *crossed)


def _run_layer(
    made: Ready,
    hidden: Tensor,
    mask: Tensor | None,
    last: LastRows | None,
    numbers: RowNumbers | None,
    kwargs: dict[str, Any],
    encoded: Tensor | None,
    encoded_mask: Tensor | None,
) -> Tensor:
    rows: Rows | None = kwargs.get(ROWS)
    seeds = None if rows is None else rows.seeds_of(made.layer.attentions[0].module)
    first, second, end = (Of(seed, numbers) for seed in seeds or (None, None, None))
    if made.form.dtype is not None and hidden.dtype is not made.form.dtype:
        hidden = hidden.to(made.form.dtype)
    states = None
    if last is not None:
        hidden, kwargs = last.attention_inputs(hidden)
        mask, states = kwargs.pop("attention_mask"), kwargs.pop("encoder_hidden_states")
    hidden = attend(made, 0, hidden, states, mask, first, kwargs)
    if encoded is not None:
        hidden = attend(made, 1, hidden, encoded, encoded_mask, second, kwargs)
    return feed(made, hidden, end)


def attend(
    made: Ready,
    index: int,
    hidden: Tensor,
    states: Tensor | None,
    mask: Tensor | None,
    of: Of,
    kwargs: dict[str, Any],
) -> Tensor:
    """A block of attention: hidden [..., E] -> [..., E].

    Args:
        states: what key and value are of, [..., E]; None = ``hidden``.
        mask, kwargs: what the attention interface gets.
    """
    block, form, copies = made.layer.attentions[index], made.form, made.copies
    shape, width = hidden.shape[:-1], hidden.shape[-1]
    keys = shape if states is None else states.shape[:-1]
    residual = hidden.reshape(-1, width)
    if not made.projects[index]:
        query, key, value = block.projections
        others = hidden if states is None else states
        heads = [query(hidden), key(others), value(others)]
    elif states is None:
        *heads, residual = project(residual, block.projections, copies)
    else:
        query, residual = project(residual, block.projections[:1], copies)
        states = states.reshape(-1, states.shape[-1]).to(form.dtype)
        key, value, _ = project(states, block.projections[1:], copies)
        heads = [query, key, value]
    query, key, value = (
        one.view(*where, -1, block.head_size).transpose(1, 2)
        for one, where in zip(heads, (shape, keys, keys), strict=True)
    )
    module, dropout = block.module, block.dropout if made.layer.training else 0.0
    context, _ = ALL_ATTENTION_FUNCTIONS[NAME](
        module, query, key, value, mask, dropout=dropout, scaling=module.scaling, **kwargs
    )
    context = context.reshape(*shape, -1)
    if not made.joins[index]:
        return block.by_modules(context, hidden)
    drawn = block.join.drawn(made.layer.training, context, of)
    out = join(context.flatten(0, -2), residual, block.join, drawn, copies, form)
    return out.view(*shape, width)


def feed(made: Ready, hidden: Tensor, of: Of) -> Tensor:
    """A block of two products: hidden [..., E] -> [..., E]."""
    block = made.layer.feed_forward
    if not made.feeds:
        return block.by_modules(hidden)
    drawn = block.outer.drawn(made.layer.training, hidden, of)
    out = feed_forward(hidden.flatten(0, -2), block, drawn, made.copies, made.form)
    return out.view(hidden.shape)


# --- products and weights -------------------------------------------------------------------------


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """[M, K], [K, N], [N] -> [M, N], ``a b + bias``."""
    if a.device.type == "cpu":
        return product(a, b, bias)
    return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)


def _add_product(sum: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """``sum + a b``, written over ``sum``, which nobody else holds."""
    return _multiply(a, b) if sum is None else sum.addmm_(a, b)


def _of_weight(grad: Tensor, input: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient [M, K] of a weight, of gradients [N, M] and inputs [N, K]."""
    if dtype is grad.dtype or grad.device.type == "cpu":
        return _multiply(grad.t(), input).to(dtype)
    return torch.mm(grad.t(), input, out_dtype=dtype)


# --- query, key and value -------------------------------------------------------------------------


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *given: Any) -> Any:
        """x [N, E]; ``count`` pairs of weight [M, E] and bias [M], of that many products; the
        weights and biases of which they are copies, one pair for each output."""
        read, parameters = given[: 2 * count], given[2 * count :]
        ctx.save_for_backward(x, *read[::2])
        ctx.dtypes = parameters[0].dtype, parameters[1].dtype
        ctx.sizes = [one.shape[0] for one in parameters[::2]]
        ctx.set_materialize_grads(False)
        products = zip(read[::2], read[1::2], strict=True)
        outs = [_multiply(x, weight.t(), bias) for weight, bias in products]
        if count < len(ctx.sizes):
            outs = outs[0].split(ctx.sizes, 1)
        return *outs, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (x, *weights), needs, of_x = ctx.saved_tensors, ctx.needs_input_grad, grads[-1]
        count, outputs = len(weights), len(ctx.sizes)
        found, first = [None] * 2 * outputs, 2 + 2 * count
        each = outputs // count  # outputs of one product
        for at, weight in enumerate(weights):
            part = slice(at * each, (at + 1) * each)
            if all(one is None for one in grads[part]):
                continue
            grad = _side_by_side(grads[part], ctx.sizes[part], x)
            places = (
                slice(2 * part.start, 2 * part.stop, 2),
                slice(2 * part.start + 1, 2 * part.stop, 2),
            )
            if any(needs[first:][places[0]]):
                found[places[0]] = _of_weight(grad, x, ctx.dtypes[0]).split(ctx.sizes[part])
            if any(needs[first:][places[1]]):
                sums = grad.sum(0, dtype=torch.float32).to(ctx.dtypes[1])
                found[places[1]] = sums.split(ctx.sizes[part])
            if needs[0]:
                of_x = _add_product(of_x, grad, weight)
        return of_x, None, *[None] * 2 * count, *found


def _side_by_side(grads: Sequence[Any], sizes: list[int], x: Tensor) -> Tensor:
    """[N, M] of gradients of its columns. Attention on a GPU has written them side by side."""
    if len(grads) == 1:
        return grads[0]
    grads = [x.new_zeros(len(x), n) if g is None else g for g, n in zip(grads, sizes, strict=True)]
    first, width = grads[0], sum(sizes)
    at = first.storage_offset()
    for one, size in zip(grads, sizes, strict=True):
        same = one.untyped_storage() is first.untyped_storage() or _storage(one) == _storage(first)
        if not same or one.stride() != (width, 1) or one.storage_offset() != at:
            return torch.cat(grads, 1)
        at += size
    return first.as_strided((len(x), width), (width, 1))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# --- the ends of blocks ---------------------------------------------------------------------------


class Drawn(NamedTuple):
    """What dropout of hidden states depends on."""

    p: float
    seed: Tensor | None
    numbers: RowNumbers | None  # of the rows; None: elements are counted

    @property
    def indices(self) -> tuple[Tensor | None, Tensor | None]:
        numbers = self.numbers if self.seed is not None else None
        return (None, None) if numbers is None else (numbers.sample_index, numbers.position)


def _normed(x: Tensor, residual: Tensor, norm: Any, backend: str) -> tuple[Tensor, Tensor]:
    weight, bias, linear_bias, drawn, eps = norm
    call = Norm(
        *(x, residual, weight, bias, linear_bias),
        *(drawn.seed, *drawn.indices, drawn.p, eps),
    )
    return NORM.run(call, backend)


def _gradients_of_norm(
    grad: Tensor, sum: Tensor, norm: Any, backend: str, needs: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """Of the product, of the residual, of weight, bias and the product's bias.

    The first two are one tensor where nothing is dropped.
    """
    weight, bias, linear_bias, drawn, eps = norm
    saved = SavedNorm(
        *(sum, weight, bias, linear_bias, None, drawn.seed, *drawn.indices, drawn.p, eps, False),
        *(drawn.p > 0.0, True, *needs),
    )
    of_x, of_residual, *others = NORM.gradients(grad.contiguous(), saved, backend)
    return of_x if drawn.p > 0.0 else of_residual, of_residual, *others


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        read: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        drawn: Drawn,
        eps: float,
        backend: str,
    ) -> Tensor:
        """x [N, K], residual [N, E], and the weight that the product reads; -> [N, E]."""
        norm = norm_weight, norm_bias, bias, drawn, eps
        out, sum = _normed(_multiply(x, read.t()), residual, norm, backend)
        ctx.save_for_backward(x, read, sum, *norm[:3])
        ctx.others, ctx.backend, ctx.dtype = norm[3:], backend, weight.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, read, sum, *norm = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_product, of_residual, *of_norm = _gradients_of_norm(
            grad, sum, (*norm, *ctx.others), ctx.backend, (needs[5], needs[6], needs[4])
        )
        of_x = _multiply(of_product, read) if needs[0] else None
        of_weight = _of_weight(of_product, x, ctx.dtype) if needs[3] else None
        of_weights = (of_weight, of_norm[2], of_norm[0], of_norm[1])
        return of_x, of_residual, None, *_wanted(of_weights, needs[3:7]), None, None, None


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        read_inner: Tensor,
        read_outer: Tensor,
        inner_weight: Tensor,
        inner_bias: Tensor,
        outer_weight: Tensor,
        outer_bias: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        approximate: str,
        drawn: Drawn,
        eps: float,
        backend: str,
    ) -> Tensor:
        """x [N, E] -> [N, E]; what the two products read is [F, E] and [E, F]."""
        norm = norm_weight, norm_bias, outer_bias, drawn, eps
        product = _multiply(x, read_inner.t())  # [N, F]
        active = BIAS_GELU.run(BiasGelu(product, inner_bias, approximate), backend)
        out, sum = _normed(_multiply(active, read_outer.t()), x, norm, backend)
        ctx.save_for_backward(
            x, product, active, sum, read_inner, read_outer, inner_bias, *norm[:3]
        )
        ctx.others, ctx.backend, ctx.approximate = norm[3:], backend, approximate
        ctx.dtypes = inner_weight.dtype, outer_weight.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, product, active, sum, read_inner, read_outer, inner_bias, *norm = ctx.saved_tensors
        needs = ctx.needs_input_grad
        of_outer, of_x, *of_norm = _gradients_of_norm(
            grad, sum, (*norm, *ctx.others), ctx.backend, (needs[7], needs[8], needs[6])
        )
        of_outer_weight = _of_weight(of_outer, active, ctx.dtypes[1]) if needs[5] else None
        of_active = _multiply(of_outer, read_outer)
        saved = SavedGelu(product, inner_bias, ctx.approximate, needs[4])
        of_inner, of_inner_bias = BIAS_GELU.gradients(of_active, saved, ctx.backend)
        of_inner_weight = _of_weight(of_inner, x, ctx.dtypes[0]) if needs[3] else None
        # ``of_outer`` may be the same tensor, which is not read any more.
        of_input = _add_product(of_x, of_inner, read_inner) if needs[0] else None
        of_weights = (of_inner_weight, of_inner_bias, of_outer_weight, of_norm[2], *of_norm[:2])
        return of_input, None, None, *_wanted(of_weights, needs[3:9]), None, None, None, None


def _wanted(gradients: tuple[Any, ...], needs: tuple[bool, ...]) -> list[Any]:
    return [one if need else None for one, need in zip(gradients, needs, strict=True)]


#: ``Function.apply`` of a call that no transform of ``torch.func`` sees, in half of the time.
_project, _join, _feed_forward = (
    super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    for kind in (_Project, _Join, _FeedForward)
)


def project(x: Tensor, modules: tuple[Any, ...], copies: Copies) -> tuple[Tensor, ...]:
    """The outputs [N, M] of linear modules, and ``x`` [N, E] as the residual of what follows."""
    parameters: list[Any] = []
    for module in modules:
        parameters += (module._parameters["weight"], module._parameters["bias"])
    if id(parameters[0]) not in copies:
        return _project(x, len(modules), *parameters, *parameters)
    read = [copies[id(one)] for one in parameters]
    return _project(x, 1, _joined(read[::2]), _joined(read[1::2]), *parameters)


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
) -> Tensor:
    """``norm(residual + dropout(dense(x)))``: [N, K], [N, E] -> [N, E]."""
    own, norm = end.dense._parameters, end.norm._parameters
    weight = own["weight"]
    return _join(
        *(x, residual, copies.get(id(weight), weight), weight, own["bias"]),
        *(norm["weight"], norm["bias"], drawn, end.norm.eps, form.backend),
    )


def feed_forward(x: Tensor, block: FeedForward, drawn: Drawn, copies: Copies, form: Form) -> Tensor:
    """``norm(x + dropout(outer(gelu(inner(x)))))``: [N, E] -> [N, E]."""
    inner, outer = block.inner._parameters, block.outer.dense._parameters
    norm, first, second = block.outer.norm._parameters, inner["weight"], outer["weight"]
    return _feed_forward(
        *(x, copies.get(id(first), first), copies.get(id(second), second)),
        *(first, inner["bias"], second, outer["bias"], norm["weight"], norm["bias"]),
        *(approximation(block.activation), drawn, block.outer.norm.eps, form.backend),
    )
