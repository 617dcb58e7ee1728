"""An embedding whose weight is tied to a vocabulary head: both gradients in one buffer.

Plain autograd computes two dense [V, E] gradients, one of the lookup and one of the head, and adds
them. Here the gradient of the lookup is added to that of the head directly; on the CPU, only that
of the tokens in the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, is_inference_mode_enabled, nn

from fastplm._modes import is_exporting, is_transformed
from fastplm.nn._rows import is_known, kind_of
from fastplm.nn.linear import Linear
from fastplm.ops.embedding_layer_norm import ADD_ROWS, adds_rows


def tied_embedding(
    input_ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    *,
    read: bool = True,
) -> tuple[Tensor, Tensor]:
    """(``weight[input_ids]`` [..., E], an alias of ``weight`` [V, E] for a head tied to it).

    The gradient of ``weight`` is the sum of both uses. Only ``ops.linear_cross_entropy`` may use
    the returned table: its gradient is then a new tensor that nothing else uses, so the gradient of
    the rows is added in place.

    Args:
        input_ids: int64 or int32, any shape.
        padding_idx: in [0, V), a token that gets no gradient from the rows.
        read: False: the rows are one element of the table, for a caller that looks up itself and
            gives their gradient, such as ``ops.embedding_layer_norm``.

    Numerics:
        The gradient has the dtype of ``weight``. The rows of a token are summed in fp32, and the
        sum with the head's gradient is rounded once. With fp32 weights it equals the gradient of
        ``nn.Embedding`` bit for bit.

    Determinism:
        Eager backward passes are deterministic, on the CPU by ascending order, on CUDA by sorting.
        Under ``torch.compile`` Inductor uses atomic additions, unless PyTorch's deterministic
        algorithms are on.
    """
    return _TiedEmbedding.apply(input_ids, weight, padding_idx, read)


def shares_table(
    embedding: nn.Module, decoder: nn.Module, kind: type[nn.Embedding] = nn.Embedding
) -> bool:
    """Whether ``tied_lookup`` may replace calling ``embedding`` on ids.

    The table must be the decoder's weight and require a gradient, and the call must be a plain
    lookup: no replaced forward, no option or hook that changes ids or gradients. An embedding of
    class ``kind`` may also multiply the rows by its ``embed_scale``.
    """
    return (
        isinstance(embedding, nn.Embedding)
        and kind_of(embedding) in (nn.Embedding, kind)
        and kind_of(decoder) in (nn.Linear, Linear)
        and embedding.weight is decoder.weight
        and embedding.weight.requires_grad
        and torch.is_grad_enabled()
        and (torch.compiler.is_compiling() or not (is_transformed() or is_inference_mode_enabled()))
        and not is_exporting()  # a trace cannot store an autograd function
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
        and "forward" not in vars(embedding)
        and (torch.compiler.is_compiling() or is_known(type(embedding).forward))
        and not embedding._forward_pre_hooks
        and not embedding._forward_hooks_with_kwargs
        and not embedding._backward_hooks
        and not embedding._backward_pre_hooks
    )


def tied_lookup(
    embedding: nn.Embedding,
    input_ids: Tensor,
    weight: Tensor | None = None,
    *,
    read: bool = True,
) -> tuple[Tensor, Tensor]:
    """(``embedding(input_ids)``, its table, which only ``ops.linear_cross_entropy`` may use).

    Requires ``shares_table``. A second lookup in the same table (encoder and decoder) takes the
    ``weight`` that the first one returned, so that all gradients use one buffer. ``read``: as in
    ``tied_embedding``.
    """
    table = embedding.weight if weight is None else weight
    rows, weight = tied_embedding(input_ids, table, embedding.padding_idx, read=read)
    scale: Any = getattr(embedding, "embed_scale", 1.0)
    if scale != 1.0:
        rows = rows * scale
    # Transformers' gradient checkpointing and NEFTune register forward hooks.
    for hook in embedding._forward_hooks.values():
        changed = hook(embedding, (input_ids,), rows)
        rows = rows if changed is None else changed
    return rows, weight


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        input_ids: Tensor, weight: Tensor, padding_idx: int | None, read: bool
    ) -> tuple[Tensor, Tensor]:
        # Not view_as: torch.compile does not support a second lookup in its result.
        if read:
            return F.embedding(input_ids, weight), weight.detach()
        return weight.detach()[0, 0].expand(*input_ids.shape, weight.shape[1]), weight.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        input_ids, weight, ctx.padding_idx, _ = inputs
        ctx.vocab = weight.shape[0]
        ctx.save_for_backward(input_ids)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (input_ids,) = ctx.saved_tensors
        grad_rows, table = grads
        if grad_rows is None:
            return None, table, None, None
        if table is None:
            table = grad_rows.new_zeros(ctx.vocab, grad_rows.shape[-1])
        elif torch.is_grad_enabled():  # it is part of a graph (create_graph=True)
            table = table.clone()
        # Otherwise in place is safe: the backward of linear_cross_entropy created this tensor, and
        # only this function uses it. With retain_graph, a second backward creates a new one.
        rows = grad_rows.reshape(-1, table.shape[1])
        _add_rows_(table, input_ids.flatten(), rows, ctx.padding_idx)
        return None, table, None, None


def _is_known_on_cpu(ids: Tensor) -> bool:
    """Whether the values are known, which those of a traced tensor are not."""
    plain = type(ids) is Tensor and not torch.compiler.is_compiling()
    return plain and ids.device.type == "cpu"


def _add_rows_(table: Tensor, ids: Tensor, rows: Tensor, padding_idx: int | None) -> None:
    """``table[ids[n]] += rows[n]``; [V, E], [N], [N, E]."""
    # The backward of nn.Embedding, because on CUDA index_add_ is atomic, and index_put_ is serial
    # for the rows of one token, which is slow for frequent tokens such as [MASK].
    skip = -1 if padding_idx is None else padding_idx
    vocab = table.shape[0]
    if not torch.is_grad_enabled() and adds_rows(table, rows):
        ADD_ROWS(table, ids, rows.contiguous(), skip)
        return
    if _is_known_on_cpu(ids):
        # The same sums, only for the tokens in the batch: on the CPU, finding them needs no sync.
        tokens, slots = ids.long().unique(return_inverse=True)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        sums = torch.ops.aten.embedding_dense_backward(wide, slots, len(tokens), -1, False)
        sums = sums.masked_fill((tokens == skip)[:, None], 0.0)
        table.index_copy_(0, tokens, (table.index_select(0, tokens) + sums).to(table.dtype))
        return
    # One call for all columns, as it sorts the ids.
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    table.add_(torch.ops.aten.embedding_dense_backward(wide, ids, vocab, skip, False))
