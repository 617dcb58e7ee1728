"""A frozen encoder in one call of csrc/, for inference on a CPU.

With one or two short texts, Python and PyTorch's calls between the operators of a layer take longer
than its products. ``fastplm_C::backbone`` runs a model from its ids on, and ``fastplm_C::encoder``
all layers. The modules themselves are their specification.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from fastplm import _extension
from fastplm._backends import note, requested, takes_notes
from fastplm._rules import ALONE, slower
from fastplm.models._base import DROP_INS, unpad_of, wants_output
from fastplm.models._encoder import EMBEDDING_TABLES, EncoderLayer, EncoderModel
from fastplm.models._layer import Blocks
from fastplm.models._ragged import LastRows, RaggedBatch, Rows, read_by_callers
from fastplm.models._watch import (
    LINEAR,
    Facts,
    Plans,
    child,
    facts_of,
    gelu_of,
    norm,
    norm_of,
    of_kind,
    plan_in,
    require,
    tensor,
    tensors,
    thaw,
)
from fastplm.nn import Dropout, LinearInt8

_LACKS = _extension.lacks("encoder", "CPU")


class _Plan(NamedTuple):
    """What ``backbone`` and ``encoder`` in csrc/layers/encoder.cpp get of a model."""

    facts: Facts
    ops: tuple[str, ...]  # whose backends decide, too
    weights: list[Tensor]  # 16 of each layer, or 22 in 8 bits
    embeddings: list[Tensor]
    projection: list[Tensor]
    pooler: list[Tensor]
    padding_id: int  # -1: positions do not depend on the ids
    head_size: int
    embeddings_eps: float
    eps: float
    tanh: bool
    int8: bool  # always faster

    def may_call(self, given: tuple[Tensor, ...], rows: Tensor | int | None) -> bool:
        """``rows``: how many, or the mask of those that go through the layers."""
        if not all(requested(op) in ("auto", "cpp") for op in self.ops):
            return False
        if not self.facts.may_call(given):
            return False
        if self.int8 or requested("linear") == "cpp":
            return True
        if not isinstance(rows, int):
            rows = given[0].numel() if rows is None else max(1, int(rows.count_nonzero()))
        return _is_faster(rows, self.weights[1].shape[0])


def plans(module: nn.Module) -> Plans:
    """The plan of a model without a head, which runs by ``backbone_call`` and ``layers_call``."""
    like_bert = isinstance(module, EncoderModel) and not isinstance(module, Blocks)
    if like_bert and module._output is not None:
        yield _plan_of(module), (backbone_call, layers_call)


def _plan_of(model: Any) -> _Plan:
    config = model.config
    require(_LACKS is None, _LACKS or "")
    require(type(model).__module__.startswith("fastplm.models."), "its class is not fastplm's")
    facts = facts_of(model, config)
    encoder: Any = _part(model, "encoder", "Encoder")
    require(encoder.config is config, "its encoder has another configuration")
    require(not (config.is_decoder or config.chunk_size_feed_forward), "its configuration")
    layers = child(encoder, "layer", nn.ModuleList)
    weights: list[Tensor] = []
    numbers = {_add_layer(layer, weights, config) for layer in layers}
    require(len(numbers) == 1, "its layers have different numbers")
    head_size, eps, tanh = numbers.pop()
    require(torch.ops.fastplm_C.encoder_fits(weights, head_size), "its weights do not fit")
    embeddings = _part(model, "embeddings", "Embeddings")
    tables: list[Tensor] = []
    for name in EMBEDDING_TABLES:
        table = child(embeddings, name, nn.Embedding)
        require(table.max_norm is None, "an embedding has a max_norm")
        tables.append(tensor(table, table._parameters, "weight"))
    embeddings_eps = norm(embeddings, "LayerNorm", tables)
    child(embeddings, "dropout", nn.Dropout, Dropout)
    for name in ("position_ids", "token_type_ids"):
        tables.append(tensor(embeddings, embeddings._buffers, name, Tensor))
    projection, pooler = [], []
    if "embeddings_project" in model._modules:
        projection = tensors(child(model, "embeddings_project", *LINEAR))
    if model._modules.get("pooler") is not None:
        pools = _part(model, "pooler", "Pooler")
        pooler = tensors(child(pools, "dense", *LINEAR))
        child(pools, "activation", nn.Tanh)
    counts = hasattr(type(embeddings), "create_position_ids_from_input_ids")
    padding_id = embeddings.padding_idx if counts else -1
    require(type(padding_id) is int and (padding_id >= 0) == counts, "its padding_idx")
    ops = ("attention", "linear", "linear_int8", *(("gelu",) if tanh else ()))
    int8 = type(layers[0].intermediate.dense) is LinearInt8
    return _Plan(
        *(facts, ops, weights, tables, projection, pooler, padding_id),
        *(head_size, embeddings_eps, eps, tanh, int8),
    )


def _part(model: nn.Module, name: str, end: str) -> Any:
    """A module of the class that this family's models have."""
    kind: Any = type(model._modules.get(name))
    right = kind.__module__.startswith(("transformers.models.", "fastplm.models."))
    right = right and kind.__name__ == type(model).__name__.replace("Model", end)
    require(right, "its `{}` is a {}", name, kind.__name__)
    return model._modules[name]


def _add_layer(layer: Any, weights: list[Tensor], config: Any) -> tuple[int, float, bool]:
    """Add the tensors of a layer; (the size of a head, the epsilon, whether GELU has a tanh)."""
    require(type(layer) in DROP_INS.values() and isinstance(layer, EncoderLayer), "a layer")
    parts = layer._parts(no_hooks=False)  # ``facts_of`` looks at hooks
    require(parts is not None, "a layer is not as it was made")
    (attention,), feed_forward = parts.attentions, parts.feed_forward
    module, ends = attention.module, (attention.join, feed_forward.outer)
    require(module.config is config, "a layer has another configuration")
    require(module.scaling == attention.head_size**-0.5, "its attention is scaled")
    require(not (module.is_decoder or layer.is_decoder), "it is a decoder")
    child(module, "dropout", nn.Dropout, Dropout)
    eps = set()
    for inputs, end in zip((attention.projections, (feed_forward.inner,)), ends, strict=True):
        for product in (*inputs, end.dense):
            weights += tensors(of_kind(product, "product", *LINEAR))
        eps.add(norm_of(end.norm, weights))
        of_kind(end.dropout, "dropout", nn.Dropout, Dropout)
    require(len(eps) == 1, "its layers have different numbers")
    return attention.head_size, eps.pop(), gelu_of(feed_forward.activation) == "tanh"


# --- the calls ------------------------------------------------------------------------------------


def backbone_call(
    model: Any,
    input_ids: Any = None,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    *others: Any,
    output_rows: Any = None,
    return_dict: Any = None,
    **kwargs: Any,
) -> ModelOutput | None:
    """A model's forward from ids on, in one call; None if the modules must run themselves, or find
    what is wrong."""
    plan: _Plan | None = plan_in(model)
    first_only = isinstance(output_rows, str) and output_rows == "first"
    if plan is None or others or takes_notes() or not (first_only or output_rows is None):
        return None
    if return_dict is False or type(input_ids) is not Tensor:
        return None
    unpad = unpad_of(model, kwargs.pop("unpad", None), {})
    if not (unpad is None or unpad is False) or any(
        value is not None and not (name in _RECORDED and value is False)
        for name, value in kwargs.items()
    ):
        return None
    given = [input_ids]
    given += [each for each in (attention_mask, token_type_ids) if each is not None]
    if not all(map(_is_dense_on_cpu, given)) or not plan.may_call(tuple(given), attention_mask):
        return None
    if unpad is False and attention_mask is not None and not attention_mask.all():
        return None
    if unpad is None and not first_only and attention_mask is not None:
        read = read_by_callers(model.config, input_ids, attention_mask)
        hidden = ~attention_mask.bool()
        if read is not None and read.shape == hidden.shape and bool((read & hidden).any()):
            return None
    states = torch.ops.fastplm_C.backbone.default(
        *(input_ids, attention_mask, token_type_ids),
        *(plan.embeddings, plan.projection, plan.weights, plan.pooler, plan.padding_id),
        *(plan.head_size, plan.embeddings_eps, plan.eps, plan.tanh, first_only),
    )
    return output_of(model._output, states) if states else None


_RECORDED = {"output_hidden_states", "output_attentions"}


def _is_dense_on_cpu(tensor: Any) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_quantized or tensor.is_nested:
        return False
    return tensor.is_cpu and tensor.layout is torch.strided


def layers_call(
    model: Any,
    given: Tensor,
    inputs: dict[str, Any],
    row_plan: Rows,
    masks: Iterable[Tensor | None],
    kwargs: dict[str, Any],
) -> ModelOutput | None:
    """The parent's forward with all layers in one call; None if they must run themselves.

    Args:
        given: ids [B, T], or embeddings [B, T, E]. If they are not packed, none of it is padding.
        inputs: of the embeddings.
        row_plan: which rows are computed, as the layers would get it.
        masks, kwargs: other arguments of the forward.
    """
    plan: _Plan | None = plan_in(model)
    packed, last = row_plan.packed, row_plan.last
    batch, seqlen = given.shape[:2]
    rows = batch * seqlen if packed is None else packed.positions.shape[0]
    if (
        plan is None
        or not plan.may_call((given,), rows)
        or wants_output(model, "output_hidden_states", kwargs)
        or (packed is None and model._keeps_padding(masks, kwargs, layers=False) is not None)
        or not (_is_dense(packed) and _is_dense(last))
    ):
        return None
    hidden = model._embedded(**inputs)
    shape = (batch, seqlen) if packed is None else (1, rows)
    if type(hidden) is not Tensor or hidden.shape[:-1] != shape:
        return None
    starts = _starts(batch, seqlen) if packed is None else packed.cu_seqlens
    source, of_source = (None, None) if last is None else (last.source, last.cu_seqlens_q)
    out = torch.ops.fastplm_C.encoder.default(
        *(hidden.flatten(0, 1), plan.weights, starts, source, of_source),
        *(plan.head_size, plan.eps, plan.tanh),
    )
    if out is None:
        thaw(model, "a weight has another dtype or shape")
        return None
    out = out.view(hidden.shape) if last is None else out[None]
    name = type(model).__name__
    note(lambda: f"{name}: its {len(model.encoder.layer)} layers in one call of csrc/")
    if not model._pools():
        return model._output(last_hidden_state=out)
    # The first rows of packed sequences lie elsewhere, where ``restore_layout`` finds them.
    pooled = None if packed or last else model._pooled(out)
    return model._output(last_hidden_state=out, pooler_output=pooled)


def _is_dense(rows: RaggedBatch | LastRows | None) -> bool:
    """Whether all of these rows may be attended to, and none is an unused slot."""
    if rows is None:
        return True
    if rows.key_mask is not None:
        return False
    if isinstance(rows, RaggedBatch):
        return rows.positions.shape[0] == int(rows.cu_seqlens[-1])
    return rows.source.shape[0] == int(rows.cu_seqlens_q[-1])


@functools.lru_cache(maxsize=256)
def _starts(batch: int, seqlen: int) -> Tensor:
    """int32 [B + 1]: the offsets of sequences of one length."""
    with torch.inference_mode(False):
        return torch.arange(batch + 1, dtype=torch.int32, device="cpu") * seqlen


def _is_faster(rows: int, width: int) -> bool:
    """Whether the rules say that one call is faster than the modules."""
    alone = ALONE if torch.get_num_threads() == 1 else ""
    call = ("forward" + alone, torch.float32, (rows, width))
    return requested("linear") == "auto" and slower("encoder", call) is None


def output_of(kind: Any, states: list[Tensor]) -> ModelOutput:
    """``kind(*states)``, without its constructor, which reads all fields once for each of them."""
    made = kind.__new__(kind)
    for name, state in itertools.zip_longest(kind.__dataclass_fields__, states):
        vars(made)[name] = state
        if state is not None:
            OrderedDict.__setitem__(made, name, state)
    return made
