"""Launches on meta tensors, for tools that compile the kernels without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from fastplm.triton_kernels.attention.launch import Call, Saved, attention_bwd, attention_fwd


def compile_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every shipped configuration: a label ("slow: …" for the long lane) and what launches it."""
    variants = {
        "padded": dict(has_mask=True),
        "causal": dict(is_causal=True),
        "ragged": dict(ragged=True),
        "dropout": dict(has_mask=True, has_dropout=True),
        "bias": dict(has_bias=True),
        "attention mask": dict(has_attn_mask=True),
        "everything": dict(ragged=True, is_causal=True, has_mask=True, has_dropout=True),
        "everything and bias": dict(
            ragged=True, is_causal=True, has_mask=True, has_dropout=True, has_bias=True
        ),
        "window": dict(ragged=True, window=(64, 64)),
        "window and everything": dict(
            ragged=True, has_mask=True, has_dropout=True, has_bias=True, window=(64, 64)
        ),
        "attention mask and everything": dict(
            has_attn_mask=True, is_causal=True, has_mask=True, has_dropout=True, has_bias=True
        ),
    }
    always = {
        ("bfloat16", 64, 128, "padded"),
        ("bfloat16", 64, 128, "everything"),
        ("bfloat16", 64, 1024, "ragged"),
        ("bfloat16", 64, 1024, "everything"),
        ("bfloat16", 64, 1024, "everything and bias"),
        ("bfloat16", 64, 128, "attention mask"),
        ("bfloat16", 64, 1024, "window"),
        ("float32", 64, 1024, "window and everything"),
        ("bfloat16", 64, 1024, "attention mask and everything"),
        ("bfloat16", 128, 1024, "causal"),
        ("float32", 64, 1024, "everything and bias"),
        ("tf32", 64, 1024, "ragged"),
        ("tf32", 64, 1024, "everything and bias"),
    }
    for dtype, head_dims in (
        ("bfloat16", (64, 16, 32, 80, 128, 256)),
        ("float16", (64,)),
        ("float32", (64, 80)),
        ("tf32", (64, 80)),
    ):
        for head_dim in head_dims:
            case = functools.partial(
                meta_case,
                torch.float32 if dtype == "tf32" else getattr(torch, dtype),
                head_dim,
                allow_tf32=dtype == "tf32",
            )
            for seqlen in (64, 128, 1024):
                for name, options in variants.items():
                    label = f"{dtype} D={head_dim} T={seqlen} {name}"
                    slow = "" if (dtype, head_dim, seqlen, name) in always else "slow: "
                    yield slow + label, functools.partial(case, seqlen, seqlen, **options)
            yield (
                f"slow: {dtype} D={head_dim} one query to 512 keys",
                functools.partial(case, 1, 512),
            )


def meta_case(
    dtype: torch.dtype,
    head_dim: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    ragged: bool = False,
    is_causal: bool = False,
    has_mask: bool = False,
    has_attn_mask: bool = False,
    has_dropout: bool = False,
    has_bias: bool = False,
    allow_tf32: bool = False,
    window: tuple[int, int] = (-1, -1),
    batch: int = 8,
    heads: int = 4,
) -> None:
    """Launch forward and backward on meta tensors that are views of packed projections."""

    def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def project(length: int) -> tuple[torch.Tensor, ...]:
        if ragged:
            return meta(batch * length, 3, heads, head_dim, dtype=dtype).unbind(1)
        return meta(batch, length, 3, heads, head_dim, dtype=dtype).permute(2, 0, 3, 1, 4).unbind()

    query, (_, key, value) = project(seqlen_q)[0], project(seqlen_k)
    cu_seqlens = meta(batch + 1, dtype=torch.int32) if ragged else None
    keys = (batch * seqlen_k,) if ragged else (batch, seqlen_k)
    attn_mask = None
    if has_attn_mask:  # one for all heads of a sample
        attn_mask = meta(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool)
        attn_mask = attn_mask.expand(-1, heads, -1, -1)
    call = Call(
        query=query,
        key=key,
        value=value,
        key_mask=meta(*keys, dtype=torch.bool) if has_mask else None,
        attn_mask=attn_mask,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        bias_weight=meta(32, heads, dtype=torch.float32) if has_bias else None,
        buckets=meta(257, dtype=torch.int64) if has_bias else None,
        seed=meta(dtype=torch.int64) if has_dropout else None,
        sample_index=meta(batch, dtype=torch.int64) if has_dropout else None,
        dropout_threshold=26 if has_dropout else 0,
        is_causal=is_causal,
        scale=0.125,
        allow_tf32=allow_tf32,
        side_by_side=False,
        window_left=window[0],
        window_right=window[1],
    )
    out, stats = attention_fwd(call)
    attention_bwd(out, Saved(call, out, stats, has_bias))
