"""An embedding whose table is a vocabulary head's weight too: both gradients in one buffer.

Plain autograd makes two dense [V, E] gradients, one of the lookup and one of the head, and adds
them. Here the lookup's is added to the head's while it is made, a few columns at a time or, on the
CPU, for the tokens that occur alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastplm._registry import is_transformed
from fastplm.nn.linear import Linear

# The sums of the lookup's gradient exist for this share of the columns at a time.
_COLUMN_BLOCKS = 4


def tied_embedding(
    input_ids: Tensor, weight: Tensor, padding_idx: int | None = None, *, sole_use: bool = False
) -> tuple[Tensor, Tensor]:
    """The rows of a table and the table itself, for a head that is tied to it.

    ``rows[i] = weight[input_ids[i]]``; the gradient of ``weight`` is the sum of both uses.

    Args:
        input_ids: int64 or int32, any shape.
        weight: [V, E], floating.
        padding_idx: in [0, V), a token whose rows give no gradient.
        sole_use: the caller's promise that the returned table goes to ``ops.linear_cross_entropy``
            and to nothing else. The gradient that arrives is then fresh memory which nobody else
            holds, and the rows' is added to it in place. Without the promise it is added to a
            copy: another operator may hand the same gradient to several places.

    Returns:
        (rows [..., E], an alias of ``weight`` for the head).

    Numerics:
        The gradient is in the dtype of ``weight``. The rows of a token are added up in fp32, and
        the sum with the head's gradient is rounded once. With fp32 weights the bits are those of
        ``nn.Embedding``.

    Determinism:
        That of ``nn.Embedding``: eager backward passes repeat bit for bit, on the CPU in ascending
        order, on CUDA by sorting. Under ``torch.compile`` Inductor makes atomic additions of it,
        unless PyTorch's deterministic algorithms are on.
    """
    return _TiedEmbedding.apply(input_ids, weight, padding_idx, sole_use)


def shares_table(
    embedding: nn.Module, decoder: nn.Module, kind: type[nn.Embedding] = nn.Embedding
) -> bool:
    """Whether ``tied_lookup`` may stand in for calling ``embedding`` on ids.

    The table is the decoder's weight and learns, and nothing but a plain lookup would happen: a
    replaced forward, or an option or hook that changes ids or gradients, needs the call itself. An
    embedding of a ``kind`` of the caller's may multiply the rows by its ``embed_scale`` besides.
    """
    return (
        isinstance(embedding, nn.Embedding)
        and type(embedding) in (nn.Embedding, kind)
        and type(decoder) in (nn.Linear, Linear)
        and embedding.weight is decoder.weight
        and embedding.weight.requires_grad
        and torch.is_grad_enabled()
        and (torch.compiler.is_compiling() or not is_transformed())
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
        and not embedding.sparse
        and "forward" not in vars(embedding)
        and not embedding._forward_pre_hooks
        and not embedding._forward_hooks_with_kwargs
        and not embedding._backward_hooks
        and not embedding._backward_pre_hooks
    )


def tied_lookup(
    embedding: nn.Embedding, input_ids: Tensor, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What ``embedding(input_ids)`` returns, and its table for ``ops.linear_cross_entropy`` alone.

    Only where ``shares_table`` says so. A second lookup in the same table (a decoder's beside an
    encoder's) is given the ``weight`` that the first returned: all gradients meet in one buffer.
    """
    table = embedding.weight if weight is None else weight
    rows, weight = tied_embedding(input_ids, table, embedding.padding_idx, sole_use=True)
    scale: Any = getattr(embedding, "embed_scale", 1.0)
    if scale != 1.0:
        rows = rows * scale
    # Transformers' gradient checkpointing hangs a hook here, and so does NEFTune.
    for hook in embedding._forward_hooks.values():
        changed = hook(embedding, (input_ids,), rows)
        rows = rows if changed is None else changed
    return rows, weight


class _TiedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        input_ids: Tensor, weight: Tensor, padding_idx: int | None, sole_use: bool
    ) -> tuple[Tensor, Tensor]:
        # Not view_as: a second lookup in what it returns could not be compiled.
        return F.embedding(input_ids, weight), weight.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        input_ids, weight, ctx.padding_idx, ctx.sole_use = inputs
        ctx.vocab = weight.shape[0]
        ctx.save_for_backward(input_ids)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None, None, None]:
        (input_ids,) = ctx.saved_tensors
        grad_rows, table = grads
        if grad_rows is None:
            return None, table, None, None
        if table is None:
            table = grad_rows.new_zeros(ctx.vocab, grad_rows.shape[-1])
        elif not ctx.sole_use or torch.is_grad_enabled():
            # Somebody else may hold this tensor: another operator's gradient, a hook, the caller
            # of autograd.grad. Or it is part of a graph (create_graph=True).
            table = table.clone()
        # In place is safe else: the backward of linear_cross_entropy wrote this tensor for its one
        # reader, us. retain_graph keeps the operator's inputs and statistics, never its gradients;
        # a second backward pass writes fresh ones.
        rows = grad_rows.reshape(-1, table.shape[1])
        _add_rows_(table, input_ids.flatten(), rows, ctx.padding_idx)
        return None, table, None, None


def _is_known_on_cpu(ids: Tensor) -> bool:
    """Whether the tokens can be counted: a traced tensor holds none."""
    plain = type(ids) is Tensor and not torch.compiler.is_compiling()
    return plain and ids.device.type == "cpu"


def _add_rows_(table: Tensor, ids: Tensor, rows: Tensor, padding_idx: int | None) -> None:
    """``table[ids[n]] += rows[n]``; [V, E], [N], [N, E]."""
    # The backward of nn.Embedding rather than index_add_, which is atomic on CUDA, or index_put_,
    # which walks the rows of a frequent token one by one there. And the [MASK] token is frequent.
    skip = -1 if padding_idx is None else padding_idx
    vocab, width = table.shape
    if _is_known_on_cpu(ids):
        # The same sums, of the tokens that occur alone: to count them is to wait for nothing here.
        tokens, slots = ids.long().unique(return_inverse=True)
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        sums = torch.ops.aten.embedding_dense_backward(wide, slots, len(tokens), -1, False)
        sums = sums.masked_fill((tokens == skip)[:, None], 0.0)
        table.index_copy_(0, tokens, (table.index_select(0, tokens) + sums).to(table.dtype))
        return
    step = -(-width // _COLUMN_BLOCKS)
    for start in range(0, width, step):
        block = slice(start, start + step)
        some_rows = rows[:, block].to(torch.promote_types(rows.dtype, torch.float32))
        sums = torch.ops.aten.embedding_dense_backward(some_rows, ids, vocab, skip, False)
        table[:, block].add_(sums)
