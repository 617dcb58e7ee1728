"""Reference of ``ops.attention``: the specification, in plain differentiable PyTorch."""

from __future__ import annotations

import torch


def attention_ref(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """``softmax(scale * Q K^T + mask) V`` with the conventions of ``ops.attention``.

    Args:
        query: [B, H, Tq, D].
        key, value: [B, H, Tk, D].
        key_mask: bool [B, Tk], True = attend.
        is_causal: query i sees keys j <= i + (Tk - Tq).
        scale: default ``D ** -0.5``.

    Returns:
        [B, H, Tq, D]; a row that may attend to nothing is 0 and passes no gradient.
    """
    seqlen_q, seqlen_k, head_dim = query.shape[-2], key.shape[-2], query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale

    allowed = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril(seqlen_k - seqlen_q)
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None, :]
        # A masked key must not matter even if it is NaN, and 0 * NaN would.
        key = key.masked_fill(~key_mask[:, None, :, None], 0.0)
        value = value.masked_fill(~key_mask[:, None, :, None], 0.0)
    alive = allowed.any(-1, keepdim=True)

    scores = torch.matmul(query, key.transpose(-2, -1)) * scale  # [B, H, Tq, Tk]
    # Dead rows get finite scores first: softmax over -inf alone is NaN, and so is its gradient.
    scores = scores.masked_fill(~(allowed | ~alive), float("-inf"))
    probs = scores.softmax(-1).masked_fill(~alive, 0.0)
    return torch.matmul(probs, value)
