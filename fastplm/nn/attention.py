"""Multi-head attention over ``ops.attention`` and ``ops.attention_varlen``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastplm import ops
from fastplm._checks import check_same, check_shape, check_tensor
from fastplm.errors import fail

_WHERE = "FusedAttention"


class FusedAttention(nn.Module):
    """Multi-head self- or cross-attention, batch first or ragged.

    ``out_proj(dropout(softmax(scale * Q K^T + bias + mask)) V)``, where Q, K, V are projections of
    the input, or K and V of ``context``.

    Args:
        embed_dim: E.
        num_heads: H.
        context_dim: C, the width of ``context``, which every call then needs (in
            ``nn.MultiheadAttention`` it is ``kdim`` and ``vdim``). None: E, and self-attention too.
        head_dim: D; default ``embed_dim / num_heads``, which must then be an integer. (``d_kv`` in
            T5.)
        bias: whether both projections have a bias.
        dropout: the probability of dropping an attention probability; only in training mode.
        scale: factor on the scores; default ``D ** -0.5`` (T5 uses 1.0).
        device, dtype: where the parameters are, and their dtype.

    Parameters are ``qkv_proj`` (weight [3 H D, E], in the order Q, K, V) and ``out_proj``
    (weight [E, H D]), initialized like ``nn.Linear``. With ``context_dim``, ``q_proj`` (weight
    [H D, E]) and ``kv_proj`` (weight [2 H D, C]) are in place of ``qkv_proj``.

    Raises:
        ArgumentValueError: sizes that do not fit, or a dropout outside [0, 1].

    Source: Vaswani et al. 2017, §3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        context_dim: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads <= 0 or (head_dim is None and embed_dim % num_heads != 0):
            got = f"{embed_dim} with {num_heads} heads"
            fix = "Change one of the two, or give `head_dim`."
            fail(_WHERE, "embed_dim", got, "a multiple of `num_heads`", fix)
        for name, size, fix in (
            ("head_dim", head_dim, "Leave it out for embed_dim / num_heads."),
            ("context_dim", context_dim, "Leave it out if the context is as wide as the input."),
        ):
            if size is not None and size <= 0:
                fail(_WHERE, name, size, "at least 1", fix)
        if not 0.0 <= dropout <= 1.0:
            fix = "Pass the share of attention probabilities to drop."
            fail(_WHERE, "dropout", dropout, "a probability in [0, 1]", fix)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.context_dim = context_dim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout = dropout
        self.scale = scale
        width = num_heads * self.head_dim
        options: Any = dict(bias=bias, device=device, dtype=dtype)
        if context_dim is None:
            self.qkv_proj = nn.Linear(embed_dim, 3 * width, **options)
        else:
            self.q_proj = nn.Linear(embed_dim, width, **options)
            self.kv_proj = nn.Linear(context_dim, 2 * width, **options)
        self.out_proj = nn.Linear(width, embed_dim, **options)

    def forward(
        self,
        input: Tensor,
        context: Tensor | None = None,
        *,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        relative_bias: ops.T5RelativeBias | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_context: Tensor | None = None,
        max_seqlen_context: int | None = None,
        past: tuple[Tensor, Tensor] | None = None,
        use_cache: bool = False,
        seed: int | Tensor | None = None,
        sample_index: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend from ``input`` to itself, or to ``context``.

        Args:
            input: [B, Tq, E], or ragged [N, E] with ``cu_seqlens``.
            context: [B, Tk, C], or ragged [Nk, C] with ``cu_seqlens_context``; None for
                self-attention. C is ``context_dim``, or E without it.
            key_mask: bool [B, Tk], True = attend, keys of ``past`` first; ragged [Nk].
            attn_mask: bool [Tq, Tk] or [B, H, Tq, Tk], some sizes 1, True = attend, as in
                ``ops.attention``; not with ``cu_seqlens``.
            is_causal: query i may attend to keys j <= i + (Tk - Tq); Tk includes ``past``.
            relative_bias: as in ``ops.attention``.
            cu_seqlens, max_seqlen: int32 [B + 1] from 0, and an upper bound of the lengths;
                sequence b is the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``.
            cu_seqlens_context, max_seqlen_context: the same for ``context``.
            past: for decoding, the previous keys and values [B, H, Tp, D], as a call with
                ``use_cache`` returned them. (The keys of a context are complete after the first
                step: then pass a context without rows, [B, 0, C].)
            use_cache: also return all keys and values.
            seed, sample_index: what dropout is drawn from, as in ``ops.attention``; default: each
                call draws a seed from PyTorch's generator.

        Returns:
            A tensor of the shape of ``input``; with ``use_cache`` the pair (tensor, (key, value)),
            with [B, H, Tp + Tk, D]. Rows of a ragged input from ``cu_seqlens[-1]`` on attend to no
            key: ``out_proj(0)``.

        Raises:
            ArgumentValueError, ArgumentTypeError: shapes or dtypes that do not fit.
        """
        ragged = cu_seqlens is not None
        _check_given("max_seqlen", max_seqlen, ragged, ragged, context)
        both = ragged and context is not None
        _check_given("cu_seqlens_context", cu_seqlens_context, both, ragged, context)
        _check_given("max_seqlen_context", max_seqlen_context, both, ragged, context)
        if ragged:
            _check_given("past", past, False, ragged, context)
            _check_given("use_cache", use_cache or None, False, ragged, context)
            _check_given("attn_mask", attn_mask, False, ragged, context)
        self._check(ragged, "input", input, self.embed_dim)
        if context is not None:
            self._check(ragged, "context", context, self.context_dim or self.embed_dim)
        query, key, value = self._projected(input, context)
        options: dict[str, Any] = {
            "key_mask": key_mask,
            "is_causal": is_causal,
            "dropout_p": self.dropout if self.training else 0.0,
            "scale": self.scale,
            "relative_bias": relative_bias,
            "seed": seed,
            "sample_index": sample_index,
        }
        if cu_seqlens is None:
            if past is not None:
                key, value = self._after(past, key, value)
            out = ops.attention(query, key, value, attn_mask=attn_mask, **options).transpose(1, 2)
        else:
            if context is None:
                cu_seqlens_context, max_seqlen_context = cu_seqlens, max_seqlen
            out = ops.attention_varlen(
                query,
                key,
                value,
                cu_seqlens,
                cu_seqlens_context,  # type: ignore[arg-type]
                max_seqlen,  # type: ignore[arg-type]
                max_seqlen_context,  # type: ignore[arg-type]
                **options,
            )
        out = self.out_proj(out.flatten(-2))
        return (out, (key, value)) if use_cache else out

    def _projected(self, input: Tensor, context: Tensor | None) -> tuple[Tensor, ...]:
        """The query of the input, then key and value of the context or the input, as ``_heads``."""
        if self.context_dim is not None:
            if context is None:
                expected = f"a tensor of width {self.context_dim}, as `context_dim` was given"
                fix = "Build the module without context_dim for self-attention."
                fail(_WHERE, "context", "None", expected, fix)
            return *self._heads(self.q_proj(input)), *self._heads(self.kv_proj(context))
        if context is None:
            return self._heads(self.qkv_proj(input))
        weight, bias = self.qkv_proj.weight, self.qkv_proj.bias
        width = self.num_heads * self.head_dim
        query_bias, context_bias = (None, None) if bias is None else (bias[:width], bias[width:])
        queries = nn.functional.linear(input, weight[:width], query_bias)
        keys_and_values = nn.functional.linear(context, weight[width:], context_bias)
        return *self._heads(queries), *self._heads(keys_and_values)

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        """[B, T, n H D] -> n views [B, H, T, D], or [N, n H D] -> n views [N, H, D].

        The fused kernels read these views without a copy.
        """
        count = projected.shape[-1] // (self.num_heads * self.head_dim)
        # Not unflatten, after which the TorchScript exporter of ONNX takes lengths for constants.
        shape = (*projected.shape[:-1], count, self.num_heads, self.head_dim)
        parts = projected.view(shape).unbind(-3)
        return parts if projected.dim() == 2 else tuple(part.transpose(1, 2) for part in parts)

    def _after(
        self, past: tuple[Tensor, Tensor], key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """All keys and values, starting with the past."""
        past_key, past_value = past
        check_tensor(_WHERE, "past[0]", past_key, ndim=4)
        check_tensor(_WHERE, "past[1]", past_value, ndim=4)
        batch, heads, _, head_dim = key.shape
        shape = (batch, heads, past_key.shape[2], head_dim)
        check_shape(_WHERE, "past[0]", past_key, shape, "[B, H, Tp, D]")
        check_shape(_WHERE, "past[1]", past_value, shape, "[B, H, Tp, D], the shape of past[0]")
        check_same(_WHERE, **{"projected keys": key, "past[0]": past_key, "past[1]": past_value})
        if key.shape[2] == 0:
            return past_key, past_value
        return torch.cat((past_key, key), 2), torch.cat((past_value, value), 2)

    def _check(self, ragged: bool, argument: str, value: Tensor, width: int) -> None:
        check_tensor(_WHERE, argument, value)
        name = "embed_dim"
        if argument == "context" and self.context_dim is not None:
            name = "context_dim"
        if value.dim() != (2 if ragged else 3) or value.shape[-1] != width:
            got = f"shape {tuple(value.shape)} with{'' if ragged else 'out'} `cu_seqlens`"
            expected = f"[{'N' if ragged else 'B, T'}, {name}] with {name} = {width}"
            fix = "A ragged batch needs `cu_seqlens`, a dense batch must not have it."
            fail(_WHERE, argument, got, expected, fix)

    def extra_repr(self) -> str:
        text = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, head_dim={self.head_dim}"
        if self.context_dim is not None:
            text += f", context_dim={self.context_dim}"
        return f"{text}, dropout={self.dropout}, scale={self.scale}"


def _check_given(
    argument: str, value: object, wanted: bool, ragged: bool, context: Tensor | None
) -> None:
    if (value is not None) is not wanted:
        got = "None" if value is None else "a value"
        got += f" with{'' if ragged else 'out'} `cu_seqlens`, "
        got += f"with{'out' if context is None else ''} `context`"
        fix = "A ragged batch needs the bounds of input and context, and supports no cache and no "
        fail(_WHERE, argument, got, "a value" if wanted else "None", fix + "attn_mask.")
