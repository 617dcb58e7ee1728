"""Reference of ``ops.disentangled_attention``, in plain differentiable PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastplm.reference.attention import _attend, _distances, _padded_rows


def disentangled_buckets(rows: int, max_distance: int, seqlen: int) -> Tensor:
    """The rows of position tables of the distances 1 - T … T - 1 of a query i and a key j, i - j.

    Distances up to a quarter of the rows have one of their own on either side; the others share
    them by the logarithm, up to ``max_distance``. With ``max_distance`` 0 each distance has its
    own, up to half of the rows.

    Always computed in fp32 on the CPU: where the logarithm falls on a whole number, its rounding
    decides the bucket, and that must not depend on the device.

    Returns:
        int64 [2 T - 1], never decreasing.
    """
    distance = torch.arange(1 - seqlen, seqlen, device="cpu")
    span, bucket = rows // 2, distance
    if max_distance > 0:
        exact = span // 2
        ratio = torch.tensor((max_distance - 1) / exact, device="cpu")
        size = distance.abs().clamp(min=exact)
        shared = torch.ceil(torch.log(size / exact) / torch.log(ratio) * (exact - 1)) + exact
        bucket = torch.where(distance.abs() <= exact, distance, (shared * distance.sign()).long())
    return (bucket + span).clamp(0, rows - 1)


def disentangled_attention_ref(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    *,
    max_distance: int = 0,
    key_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int = 0,
    dropout_p: float = 0.0,
    scale: float | None = None,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
) -> Tensor:
    """Attention to contents and positions as ``ops.disentangled_attention`` defines it.

    Args: those of ``ops.disentangled_attention``; ``dropout_p`` over 0 needs ``seed``.

    Returns:
        [B, H, T, D], or [N, H, D] of packed sequences; a row that may attend to nothing is 0 and
        passes no gradient.
    """
    options = max_distance, dropout_p, scale, seed, sample_index
    if cu_seqlens is None:
        return _dense(query, key, value, pos_key, pos_query, key_mask, *options)
    if cu_seqlens.numel() == 1:  # the result is that of one sequence of length 0
        cu_seqlens = cu_seqlens.expand(2)
    tokens = query.shape[0]
    rows, exists = _padded_rows(cu_seqlens, max(max_seqlen, 1))  # [B, T]

    def pad(packed: Tensor) -> Tensor:  # -> [B, H, T, D]
        if packed.shape[0] == 0:
            packed = nn.functional.pad(packed, (0, 0, 0, 0, 0, 1))
        return packed[rows].masked_fill(~exists[:, :, None, None], 0.0).transpose(1, 2)

    seen = exists if key_mask is None else exists & nn.functional.pad(key_mask, (0, 1))[rows]
    query, key, value = pad(query), pad(key), pad(value)
    out = _dense(query, key, value, pos_key, pos_query, seen, *options)
    row = torch.arange(tokens, device=query.device)
    sequence = torch.bucketize(row, cu_seqlens[1:], right=True).clamp(max=len(rows) - 1)
    position = (row - cu_seqlens[sequence]).clamp(max=rows.shape[1] - 1)
    spare = row >= cu_seqlens[-1]
    return out.transpose(1, 2)[sequence, position].masked_fill(spare[:, None, None], 0.0)


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pos_key: Tensor | None,
    pos_query: Tensor | None,
    key_mask: Tensor | None,
    max_distance: int,
    dropout_p: float,
    scale: float | None,
    seed: int | Tensor | None,
    sample_index: Tensor | None,
) -> Tensor:
    batch, heads, seqlen, head_dim = query.shape
    reach = max(seqlen, 1)
    tables = [table for table in (pos_key, pos_query) if table is not None]
    scale = (head_dim * (1 + len(tables))) ** -0.5 if scale is None else scale
    distance = _distances(seqlen, seqlen, query.device)  # j - i
    seen = key if key_mask is None else key.masked_fill(~key_mask[:, None, :, None], 0.0)
    added = None
    for rows, table in ((query, pos_key), (seen, pos_query)):
        if table is None:
            continue
        buckets = disentangled_buckets(table.shape[0], max_distance, reach).to(query.device)
        bucket = buckets[reach - 1 - distance].expand(batch, heads, seqlen, seqlen)
        products = torch.matmul(rows, table.permute(1, 2, 0))  # [B, H, T, rows of the table]
        if table is pos_key:
            term = products.gather(-1, bucket)
        else:
            term = products.gather(-1, bucket.transpose(-1, -2)).transpose(-1, -2)
        added = term if added is None else added + term
    options = False, dropout_p, scale, None, seed, sample_index, None
    return _attend(query, key, value, distance, key_mask, None, *options, products=added)
