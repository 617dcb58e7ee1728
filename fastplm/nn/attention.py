"""Multi-head attention over ``ops.attention``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastplm import ops
from fastplm._checks import check, check_shape, check_tensor


class FusedAttention(nn.Module):
    """Multi-head self- or cross-attention, batch first, with key padding and causality.

    ``out_proj(softmax(Q K^T / sqrt(D) + mask) V)``, where Q, K, V are projections of the input, or
    K and V of ``context``.

    Args:
        embed_dim: E, a multiple of ``num_heads``.
        num_heads: H.
        bias: whether both projections have one.
        device, dtype: of the parameters.

    Parameters are ``qkv_proj`` (weight [3 E, E], in the order Q, K, V) and ``out_proj``
    (weight [E, E]), initialised as ``nn.Linear`` does.

    Raises:
        ArgumentValueError: ``embed_dim`` is not a multiple of ``num_heads``.

    Source: Vaswani et al. 2017, §3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check(
            num_heads > 0 and embed_dim % num_heads == 0,
            "FusedAttention",
            "embed_dim",
            f"{embed_dim} with {num_heads} heads",
            "a multiple of `num_heads`",
            "Change one of the two.",
        )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)

    def forward(
        self,
        input: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Attend from ``input`` to itself, or to ``context``.

        Args:
            input: [B, Tq, E].
            context: [B, Tk, E], or None for self-attention.
            key_mask: bool [B, Tk], True = attend.
            is_causal: query i sees the keys j <= i + (Tk - Tq).

        Returns:
            [B, Tq, E].

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes or dtypes that do not fit.
        """
        self._check("input", input)
        if context is None:
            query, key, value = self._heads(self.qkv_proj(input))
        else:
            self._check("context", context)
            weight, bias, width = self.qkv_proj.weight, self.qkv_proj.bias, self.embed_dim
            query_bias, context_bias = (
                (None, None) if bias is None else (bias[:width], bias[width:])
            )
            (query,) = self._heads(nn.functional.linear(input, weight[:width], query_bias))
            key, value = self._heads(nn.functional.linear(context, weight[width:], context_bias))
        out = ops.attention(query, key, value, key_mask=key_mask, is_causal=is_causal)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        """[B, T, n E] -> n views [B, H, T, D]; the fused kernels read them where they lie."""
        heads = projected.unflatten(-1, (-1, self.num_heads, self.embed_dim // self.num_heads))
        return tuple(part.transpose(1, 2) for part in heads.unbind(2))

    def _check(self, argument: str, value: Tensor) -> None:
        check_tensor("FusedAttention", argument, value, ndim=3)
        shape = (*value.shape[:2], self.embed_dim)
        check_shape("FusedAttention", argument, value, shape, "[B, T, embed_dim]")

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}"
