"""The contrastive loss of a large batch, and the encoder that can be that large."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from fastplm import ops
from fastplm._checks import (
    FLOATING,
    check_dtype,
    check_int,
    check_number,
    check_same,
    check_same_device,
    check_tensor,
)
from fastplm.errors import fail
from fastplm.nn._rows import IGNORE_INDEX

#: The logit of a document that is a copy of another: its exponential is 0 beside any other one.
#: As small as fp16 holds.
_LEFT_OUT = -3e4


class ContrastiveLoss(nn.Module):
    """Cross-entropy of finding each query's document among all of the batch: in-batch negatives.

    ``loss[i] = logsumexp_j(s[i, j]) - mean over the positives p of s[i, p]`` with
    ``s[i, j] = cos(query[i], document[j]) / temperature``

    Known as InfoNCE, NT-Xent or multiple negatives ranking loss. The matrix [B, D] of similarities
    is never stored: the documents are the table of ``ops.linear_cross_entropy``.

    Args:
        temperature: what similarities are divided by: a number over 0, or a 0-d tensor or parameter
            that is learned. 0.05 is the scale of 20 in sentence-transformers.
        symmetric: add the loss of finding the query of each document among all queries, and take
            the mean of both.
        normalize: cosine similarity; False is the dot product.
        logits_budget: of ``ops.linear_cross_entropy``: bytes for similarities that are kept for the
            backward instead of computed again; 0 keeps none, None leaves the choice to the op.

    Source: van den Oord et al. 2018 (arXiv 1807.03748), equation 4; Henderson et al. 2017
        (arXiv 1705.00652), section 4.4; for several positives Khosla et al. 2020 (SupCon,
        arXiv 2004.11362), equation 2; symmetric as Radford et al. 2021 (CLIP, arXiv 2103.00020).
    """

    def __init__(
        self,
        temperature: float | Tensor = 0.05,
        *,
        symmetric: bool = False,
        normalize: bool = True,
        logits_budget: int | None = 0,
    ) -> None:
        super().__init__()
        where = "ContrastiveLoss"
        if isinstance(temperature, Tensor):
            check_tensor(where, "temperature", temperature, ndim=0)
        else:
            least = torch.finfo(torch.float32).tiny
            fix = "0.05 is common for cosine similarities, 1.0 for dot products."
            check_number(where, "temperature", temperature, least, math.inf, "over 0", fix)
        self.temperature = temperature
        self.symmetric, self.normalize = symmetric, normalize
        self.logits_budget = logits_budget

    def extra_repr(self) -> str:
        return (
            f"temperature={float(self.temperature):g}, symmetric={self.symmetric}, "
            f"normalize={self.normalize}"
        )

    def forward(
        self,
        query: Tensor,
        document: Tensor,
        positive: Tensor | None = None,
        *,
        query_id: Tensor | None = None,
        document_id: Tensor | None = None,
    ) -> Tensor:
        """The mean loss of the queries, a number in fp32.

        Args:
            query: [B, E], the embeddings of queries, fp32, fp16 or bf16.
            document: [D, E], those of documents, dtype of ``query``: the positives, and any others,
                which are hard negatives. With several processes, those of all of them.
            positive: int64 [B], the row of each query's document; [B, P], several of them, unused
                places at the end -1. A query without one does not count. Default: row i for
                query i, and documents from row B on are hard negatives.
            query_id: int64 [B], equal for queries that are the same (a hash of the text). They are
                no negatives of each other's documents in the symmetric loss: the first one
                stands for all.
            document_id: int64 [D], equal for documents that are the same. A copy of a positive is
                no negative: the first of the copies stands for all, also as a positive, and the
                others get no gradient from this direction.
        """
        where = "ContrastiveLoss"
        self._check(where, query, document, positive, query_id, document_id)
        count = query.shape[0]
        if positive is None:
            positive = torch.arange(count, device=query.device)
        if positive.dim() == 1:
            positive = positive[:, None]  # [B, P]
        if self.normalize:
            query, document = _unit(query), _unit(document)
        scaled = (query / self.temperature).to(query.dtype)
        loss = self._find(scaled, document, positive, document_id)
        if not self.symmetric:
            return loss
        # A row for each pair: its document looks for its query.
        places = positive.shape[1]
        pair = torch.arange(count, device=query.device)[:, None].expand(-1, places)
        used = positive >= 0
        pair = torch.where(used, pair, -1).reshape(-1, 1)
        weight = used.double() / used.sum(1, keepdim=True).clamp(min=1)
        rows = ops.gather_rows(document, positive.flatten())
        scaled = (rows / self.temperature).to(rows.dtype)
        reverse = self._find(scaled, query, pair, query_id, weight.flatten())
        return (loss + reverse) / 2

    def _find(
        self,
        rows: Tensor,
        table: Tensor,
        positive: Tensor,
        table_id: Tensor | None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """The mean of ``logsumexp(rows @ table.T) - mean of the positives``, over rows with one.

        With ``weight`` [N], which is 0 for the others, rows count by it.
        """
        bias = None
        if table_id is not None:
            first = _first_of_equals(table_id)
            copy = first != torch.arange(len(first), device=first.device)
            bias = (copy * _LEFT_OUT).to(table.dtype)
            positive = torch.where(positive >= 0, first[positive.clamp(min=0)], -1)
        # The one that the product picks, and what the mean of all differs from it by.
        target = torch.where(positive[:, 0] >= 0, positive[:, 0], IGNORE_INDEX)
        loss = ops.linear_cross_entropy(
            rows,
            table,
            target,
            linear_bias=bias,
            reduction="none",
            logits_budget=self.logits_budget,
        )
        if positive.shape[1] > 1:
            used = positive >= 0
            share = used.to(loss.dtype) / used.sum(1, keepdim=True).clamp(min=1)
            share[:, 0] -= used[:, 0].to(loss.dtype)
            others = ops.gather_rows(table, positive.flatten()).view(*positive.shape, -1)
            similarity = (others.to(loss.dtype) * rows[:, None].to(loss.dtype)).sum(2)
            loss = loss - (similarity * share).sum(1)
        weight = (target >= 0 if weight is None else weight).to(loss.dtype)
        return (loss * weight).sum() / weight.sum().clamp(min=torch.finfo(loss.dtype).tiny)

    def _check(
        self,
        where: str,
        query: Tensor,
        document: Tensor,
        positive: Tensor | None,
        query_id: Tensor | None,
        document_id: Tensor | None,
    ) -> None:
        for name, rows in (("query", query), ("document", document)):
            check_tensor(where, name, rows, ndim=2)
            check_dtype(where, name, rows, FLOATING)
            if rows.numel() == 0:
                got, fix = f"shape {tuple(rows.shape)}", "Leave out an empty batch."
                fail(where, name, got, "at least one row", fix)
        check_same(where, query=query, document=document)
        if document.shape[1] != query.shape[1]:
            got, expected = f"{document.shape[1]} columns", f"{query.shape[1]}, as `query` has"
            fail(where, "document", got, expected, "Both come from encoders of one width.")
        if positive is None and document.shape[0] < query.shape[0]:
            got, expected = f"{document.shape[0]} rows", f"at least {query.shape[0]}, one a query"
            fail(where, "document", got, expected, "Pass the row of each query's document.")
        for name, value, rows in (
            ("positive", positive, query),
            ("query_id", query_id, query),
            ("document_id", document_id, document),
        ):
            if value is None:
                continue
            check_tensor(where, name, value)
            check_dtype(where, name, value, (torch.int64,))
            check_same_device(where, query=query, **{name: value})
            dims = (1, 2) if name == "positive" else (1,)
            right = value.dim() in dims and value.shape[0] == rows.shape[0]
            if not right or (name == "positive" and value.shape[-1] == 0):
                got, expected = f"shape {tuple(value.shape)}", f"[{rows.shape[0]}]"
                if name == "positive":
                    expected += f" or [{rows.shape[0]}, P]"
                fail(where, name, got, expected, "Pass one value a row.")


def _unit(rows: Tensor) -> Tensor:
    wide = rows if rows.dtype is torch.float64 else rows.float()
    return F.normalize(wide, dim=-1).to(rows.dtype)


def _first_of_equals(ids: Tensor) -> Tensor:
    """int64 [N]: the first place with the same id, without a wait for the device."""
    values, order = ids.sort(stable=True)
    place = torch.arange(len(ids), device=ids.device)
    begins = F.pad(values[1:] != values[:-1], (1, 0), value=True)[: len(ids)]
    start = torch.where(begins, place, 0).cummax(0).values
    return torch.empty_like(order).scatter_(0, order, order[start])


class GradCache(nn.Module):
    """An encoder that runs a large batch in the memory of a small one, for a loss over all of it.

    The encoder runs chunk by chunk and keeps nothing but its embeddings. In the backward each chunk
    runs again, with the same dropout, and is given the gradient of its embeddings, which the loss
    of the whole batch has left. So a batch costs one more forward, and the memory of the largest
    chunk:

        encode = GradCache(encoder, chunk_size=32)
        loss = ContrastiveLoss()(encode(**queries), encode(**documents))
        loss.backward()

    Two towers are two of these. Gradient scaling, accumulation and DistributedDataParallel work as
    ever, as it is one graph (``torch.utils.checkpoint`` without reentry, of each chunk).

    Args:
        encoder: a module or function that returns a tensor [B, ...] of its arguments, and whose row
            i depends on row i of them alone: no batch norm.
        chunk_size: rows of a chunk; the last one may be smaller.

    Numerics:
        The gradients are, bit for bit, those of the same chunks with everything kept. Without
        dropout they are those of the whole batch at once up to rounding, as sums over rows are cut
        at the chunks. With dropout each chunk draws masks of its own, from the generators of
        PyTorch on the CPU and on the devices of the arguments.

    Source: Gao et al. 2021, "Scaling Deep Contrastive Learning Batch Size under Memory Limited
        Setup" (GradCache, arXiv 2101.06983), section 3.
    """

    def __init__(self, encoder: Any, chunk_size: int) -> None:
        super().__init__()
        fix = "Pass the largest batch whose activations fit into memory."
        check_int("GradCache", "chunk_size", chunk_size, 1, 2**31, fix)
        self.encoder, self.chunk_size = encoder, chunk_size

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The embeddings [B, ...] of a batch.

        Args:
            args, kwargs: those of the encoder. Tensors in them have the rows of the batch first,
                and are cut; other values, and 0-d tensors, are passed to each chunk.
        """
        leaves, spec = tree_flatten((args, kwargs))
        cut = [at for at, one in enumerate(leaves) if isinstance(one, Tensor) and one.dim() > 0]
        sizes = {leaves[at].shape[0] for at in cut}
        if len(sizes) != 1:
            got = f"tensors of {sorted(sizes)} rows" if sizes else "no tensor"
            fix = "Pass tensors whose first dimension is the batch."
            fail("GradCache", "args, kwargs", got, "tensors of one number of rows", fix)

        def run(*tensors: Tensor) -> Tensor:
            filled = list(leaves)
            for at, one in zip(cut, tensors, strict=True):
                filled[at] = one
            positional, named = tree_unflatten(filled, spec)
            return self.encoder(*positional, **named)

        chunks = zip(*(leaves[at].split(self.chunk_size) for at in cut), strict=True)
        # By position: of tensors in keywords checkpoint() does not see the device whose generator
        # it is to set back.
        return torch.cat([checkpoint(run, *chunk, use_reentrant=False) for chunk in chunks])
