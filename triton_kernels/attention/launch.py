"""The launchers of attention's forward and backward."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from fastplm.triton_kernels._launch import (
    Fixed,
    cdiv,
    is_recording,
    launch,
    next_power_of_2,
    sm_count,
    upcast_dot,
)
from fastplm.triton_kernels.attention.backward import (
    _attention_stream_bwd_dkdv_kernel,
    _attention_stream_bwd_dq_kernel,
    _attention_tile_bwd_kernel,
)
from fastplm.triton_kernels.attention.bias import bias_gradient, bias_rows
from fastplm.triton_kernels.attention.configs import (
    DECODE_QUERIES,
    STREAM_KINDS,
    block_d_of,
    config_of,
    length_class,
    needs_statistics,
    row_limit,
    tile_kind,
)
from fastplm.triton_kernels.attention.forward import (
    _attention_row_fwd_kernel,
    _attention_stream_fwd_kernel,
)
from fastplm.triton_kernels.attention.tiles import (
    LOG2E,
    NO_ATTN_MASK,
    _attention_key_bits_kernel,
)


class Call(NamedTuple):
    """A call of ``ops.attention`` or, with ``cu_seqlens``, of ``ops.attention_varlen``, as the
    launchers read it: the op's arguments, and

    buckets: int64 [2 * max_distance + 1], the row of ``bias_weight`` for each distance.
    dropout_threshold: bytes below it drop a probability.
    allow_tf32: whether fp32 is multiplied in TF32; a backward takes its forward's value.
    side_by_side: whether the gradients of query, key and value are parts of one tensor, see
        ``attention_bwd``.
    window_left, window_right: how far from a query its keys may be; -1: as far as they like.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_mask: torch.Tensor | None
    attn_mask: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    bias_weight: torch.Tensor | None
    buckets: torch.Tensor | None
    seed: torch.Tensor | None
    sample_index: torch.Tensor | None
    dropout_threshold: int
    is_causal: bool
    scale: float
    allow_tf32: bool
    side_by_side: bool
    window_left: int = -1
    window_right: int = -1


class Saved(NamedTuple):
    """The backward reads these beside the gradient."""

    call: Call
    out: torch.Tensor
    stats: torch.Tensor
    need_bias_weight: bool


class Shape:
    """Sizes of a call in either layout, and the launch arguments that follow from them.

    One object serves all calls of the same sizes, strides and options: the layers of a model.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        query_shape: tuple[int, ...],
        key_shape: tuple[int, ...],
        strides: tuple[tuple[int, ...], ...],
        attn_mask_strides: tuple[int, ...] | None,
        num_seqs: int | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        has_bias: bool,
        dropout_threshold: int | None,
        is_causal: bool,
        scale: float,
        allow_tf32: bool,
        side_by_side: bool,
        window: tuple[int, int],
    ) -> None:
        self.dtype, self.device, self.has_bias = dtype, device, has_bias
        self.seqlen_q, self.seqlen_k = max_seqlen_q, max_seqlen_k
        self.words = cdiv(max_seqlen_k, 64)
        self.ragged = num_seqs is not None
        if num_seqs is not None:
            self.batch, (self.rows_q, self.heads, self.head_dim) = num_seqs, query_shape
            self.rows_k = key_shape[0]
        else:
            self.batch, self.heads, length, self.head_dim = query_shape
            self.rows_q, self.rows_k = self.batch * length, self.batch * key_shape[2]
        # Whether no query has a key.
        self.is_empty = 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k)
        self.like_query, self.like_key = self.output(query_shape), self.output(key_shape)
        parts = 3 if side_by_side else 1
        self.steps_dq = self.output(query_shape, parts)[1]
        self.steps_dk = self.output(key_shape, parts)[1]
        self.block_d = block_d_of(self.head_dim)
        self.precision = "tf32" if allow_tf32 else "upcast" if upcast_dot(dtype) else "ieee"
        self.streams = needs_statistics(dtype, self.head_dim, max_seqlen_q, max_seqlen_k, has_bias)
        # A streaming kernel's registers depend on what it keeps besides the scores.
        has_dropout = dropout_threshold is not None
        self.has_attn_mask = attn_mask_strides is not None
        self.kind = "mask" if self.has_attn_mask else STREAM_KINDS[2 * has_bias + has_dropout]
        self.has_window = max(window) >= 0
        threshold, self.scale = dropout_threshold or 0, scale
        attn_mask = NO_ATTN_MASK
        if attn_mask_strides is not None:
            step = 16 if max_seqlen_k % 16 == 0 else 1  # 16 bytes are the widest load
            attn_mask = dict(**self.strides("a", attn_mask_strides), MASK_STEP=step)
        self.shared = dict(
            num_seqs=self.batch,
            num_heads=self.heads,
            seqlen_q=max_seqlen_q,
            seqlen_k=max_seqlen_k,
            scale_log2=scale * LOG2E.value,
            threshold=threshold,
            left=window[0] if window[0] >= 0 else None,
            right=window[1] if window[1] >= 0 else None,
            keep_scale=256 / (256 - threshold) if threshold < 256 else 0.0,
            **self.strides("q", strides[0]),
            **self.strides("k", strides[1]),
            **self.strides("v", strides[2]),
            **attn_mask,
            HEAD_DIM=self.head_dim,
            BLOCK_D=self.block_d,
            IS_CAUSAL=is_causal,
            PRECISION=self.precision,
        )

    def strides(self, letter: str, steps: tuple[int, ...]) -> dict[str, int]:
        """Keywords ``stride_<letter>b, …h, …t``."""
        steps = (0, steps[1], steps[0]) if self.ragged else steps[:3]
        return {f"stride_{letter}{axis}": step for axis, step in zip("bht", steps, strict=True)}

    def output(
        self, shape: tuple[int, ...], parts: int = 1
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of [N, H, D], or [B, H, T, D] over the [B, T, H, D] of projections,
        with so many of them side by side."""
        width = max(self.heads, 1) * self.head_dim * parts
        if self.ragged:
            return shape, (width, self.head_dim, 1)
        return shape, (max(shape[2], 1) * width, self.head_dim, width, 1)

    def empty_stats(self, query: torch.Tensor) -> torch.Tensor:
        """fp32 [2, H, rows of query]: m and log2(l); no rows where the backward needs neither."""
        if not self.streams:
            return query.new_empty((2, self.heads, 0), dtype=torch.float32)
        stats = query.new_empty((2, self.heads, self.rows_q), dtype=torch.float32)
        return stats.zero_() if self.ragged else stats  # spare rows are written by no kernel

    def grid(self, length: int, block: int) -> tuple[int]:
        """One program for every tile of every head."""
        return (cdiv(length, block) * self.batch * self.heads,)

    @functools.cached_property
    def forward(self) -> tuple[Any, tuple[int], Fixed]:
        """Kernel, grid and arguments of the forward."""
        kernel, config = _forward_config(self)
        fixed = Fixed(
            num_rows=self.rows_q,
            stride_sh=self.rows_q if self.streams else 1,
            HAS_STATS=self.streams,
            **self.strides("o", self.like_query[1]),
            **self.shared,
            **config,
        )
        if kernel is _attention_stream_fwd_kernel:
            fixed |= dict(scale=self.scale)
        tiles = config.get("tiles_q", 1)
        return kernel, self.grid(self.seqlen_q, config["BLOCK_Q"] * tiles), fixed

    @functools.cached_property
    def tile_backward(self) -> tuple[tuple[int], Fixed]:
        """Grid and arguments of the backward of a head in one tile."""
        config = config_of("tile_bwd", self, tile_kind(self))
        programs = self.batch * self.heads
        if config["PERSISTENT"]:
            programs = min(programs, sm_count(self.device))
        fixed = Fixed(
            num_rows_q=self.rows_q,
            num_rows_k=self.rows_k,
            scale=self.scale,
            **self.strides("dq", self.steps_dq),
            **self.strides("dk", self.steps_dk),
            **self.shared,
            **config,
        )
        return (programs,), fixed

    @functools.cached_property
    def stream_dq(self) -> tuple[tuple[int], Fixed]:
        """Grid and arguments of the streaming backward of the queries."""
        config = config_of("stream_dq", self, self.kind)
        fixed = Fixed(
            num_rows=self.rows_q,
            scale=self.scale,
            stride_sh=self.rows_q,
            **self.strides("o", self.like_query[1]),
            **self.strides("dq", self.steps_dq),
            **self.shared,
            **config,
        )
        return self.grid(self.seqlen_q, config["BLOCK_Q"]), fixed

    @functools.cached_property
    def stream_dkdv(self) -> tuple[tuple[int], Fixed]:
        """Grid and arguments of the streaming backward of keys and values."""
        config = config_of("stream_dkdv", self, self.kind)
        fixed = Fixed(
            num_rows=self.rows_k,
            scale=self.scale,
            stride_sh=self.rows_q,
            **self.strides("dk", self.steps_dk),
            **self.shared,
            **config,
        )
        return self.grid(self.seqlen_k, config["BLOCK_K"]), fixed


def _forward_config(shape: Shape) -> tuple[Any, dict[str, int]]:
    most = row_limit(shape.dtype, shape.head_dim)
    whole_row = not shape.has_bias and shape.seqlen_k <= most
    if shape.seqlen_q > DECODE_QUERIES and whole_row:
        return _attention_row_fwd_kernel, config_of("row_fwd", shape, length_class(shape.seqlen_k))
    kernel = "decode" if shape.seqlen_q <= DECODE_QUERIES else "stream_fwd"
    return _attention_stream_fwd_kernel, config_of(kernel, shape, shape.kind)


_kept_shape = functools.lru_cache(maxsize=1024)(Shape)


def _shape_of(call: Call) -> Shape:
    query, key, starts = call.query, call.key, call.cu_seqlens_q
    make = Shape if is_recording() else _kept_shape
    return make(
        query.dtype,
        query.device,
        query.shape,
        key.shape,
        (query.stride(), key.stride(), call.value.stride()),
        None if call.attn_mask is None else call.attn_mask.stride(),
        None if starts is None else starts.shape[0] - 1,
        call.max_seqlen_q,
        call.max_seqlen_k,
        call.bias_weight is not None,
        None if call.seed is None else call.dropout_threshold,
        call.is_causal,
        call.scale,
        call.allow_tf32,
        call.side_by_side,
        (call.window_left, call.window_right),
    )


def _key_bits(call: Call, shape: Shape) -> dict[str, Any]:
    """The key mask as int64 [B, words], 64 keys each, and its stride.

    The layers of a model and their backwards share them (``ops._attention_call.BITS``).
    """
    if call.key_mask is None:
        return dict(mask_ptr=None, stride_mb=0)
    words = shape.words
    shared = getattr(call.key_mask, "_fastplm_bits", {})
    if (shape.batch, words) in shared:
        return dict(mask_ptr=shared[shape.batch, words], stride_mb=words)
    bits = call.query.new_empty(shape.batch, words, dtype=torch.int64)
    block = min(16, next_power_of_2(words))
    launch(
        _attention_key_bits_kernel,
        (shape.batch * cdiv(words, block),),
        shape.device,
        mask_ptr=call.key_mask.view(torch.uint8),
        stride_mb=0 if call.cu_seqlens_k is not None else call.key_mask.stride(0),
        cu_k_ptr=call.cu_seqlens_k,
        bits_ptr=bits,
        seqlen_k=shape.seqlen_k,
        words=words,
        BLOCK_W=block,
        num_warps=1,
        num_stages=1,
    )
    shared[shape.batch, words] = bits
    return dict(mask_ptr=bits, stride_mb=words)


def _pointers(call: Call) -> dict[str, Any]:
    """The pointers that all kernels share, except the key mask."""
    pointers = dict(
        q_ptr=call.query,
        k_ptr=call.key,
        v_ptr=call.value,
        cu_q_ptr=call.cu_seqlens_q,
        cu_k_ptr=call.cu_seqlens_k,
        seed_ptr=call.seed,
        sample_ptr=None if call.seed is None else call.sample_index,
    )
    if call.attn_mask is not None:  # else it is in NO_ATTN_MASK
        pointers["attn_mask_ptr"] = call.attn_mask.view(torch.uint8)
    return pointers


def attention_fwd(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the forward.

    Returns:
        The output in the shape of ``query``, and the row statistics fp32 [2, H, rows or 0].
    """
    query, shape = call.query, _shape_of(call)
    out, stats = query.new_empty_strided(*shape.like_query), shape.empty_stats(query)
    if shape.is_empty:
        return out.zero_(), stats.zero_()
    kernel, grid, fixed = shape.forward
    pointers = _pointers(call) | _key_bits(call, shape)
    if kernel is _attention_stream_fwd_kernel:
        pointers |= bias_rows(call.bias_weight, call.buckets)
    m, log2l = stats.unbind() if shape.streams else (stats, stats)  # empty, and not written
    launch(
        kernel,
        grid,
        shape.device,
        fixed=fixed,
        out_ptr=out,
        m_ptr=m,
        log2l_ptr=log2l,
        **pointers,
    )
    return out, stats


def attention_bwd(
    grad_out: torch.Tensor, saved: Saved
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the backward: gradients of query, key, value and, if needed, of bias_weight.

    With ``side_by_side`` the first is [N, 3, H, D] or [B, T, 3, H, D], of all three, and the two
    after it are empty.
    """
    call, out, stats, bias_grad = saved
    query, bias_weight, buckets = call.query, call.bias_weight, call.buckets
    shape = _shape_of(call)
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    if call.side_by_side:
        places = query.shape[:1] if shape.ragged else (query.shape[0], query.shape[2])
        whole = query.new_empty(*places, 3, shape.heads, shape.head_dim)
        grad_query, grad_key, grad_value = whole.unbind(-3)
        grads = whole, query.new_empty(0), query.new_empty(0)
    else:
        grad_query = query.new_empty_strided(*shape.like_query)
        grad_key, grad_value = (query.new_empty_strided(*shape.like_key) for _ in range(2))
        grads = grad_query, grad_key, grad_value
    grad_bias = query.new_empty(0)
    if bias_weight is not None and bias_grad:
        grad_bias = bias_weight.new_empty(bias_weight.shape)
    if shape.is_empty:
        return tuple(grad.zero_() for grad in (*grads, grad_bias))  # type: ignore[return-value]
    shared: dict[str, Any] = dict(
        do_ptr=grad_out,
        **shape.strides("do", grad_out.stride()),
        **_pointers(call),
        **_key_bits(call, shape),
    )
    if not shape.streams:
        grid, fixed = shape.tile_backward
        launch(
            _attention_tile_bwd_kernel,
            grid,
            shape.device,
            fixed=fixed,
            dq_ptr=grad_query,
            dk_ptr=grad_key,
            dv_ptr=grad_value,
            **shared,
        )
        return *grads, grad_bias

    m, log2l = stats.unbind()
    shared |= dict(m_ptr=m, log2l_ptr=log2l, delta_ptr=torch.empty_like(m))
    shared |= bias_rows(bias_weight, buckets)
    grid, fixed = shape.stream_dq
    far = None
    if bias_weight is not None and bias_grad:
        far = query.new_empty(shape.heads, grid[0] // shape.heads, 2, dtype=torch.float32)
    launch(
        _attention_stream_bwd_dq_kernel,
        grid,
        shape.device,
        fixed=fixed,
        out_ptr=out,
        dq_ptr=grad_query,
        far_ptr=far,
        **shared,
    )
    grid, fixed = shape.stream_dkdv
    launch(
        _attention_stream_bwd_dkdv_kernel,
        grid,
        shape.device,
        fixed=fixed,
        dk_ptr=grad_key,
        dv_ptr=grad_value,
        **shared,
    )
    if far is not None:
        bias_gradient(shape, shared, far, buckets, grad_bias)
    return *grads, grad_bias
