"""ops.attention and ops.attention_varlen against their eager references and PyTorch's own kernels.

On a GPU every case has every baseline; one that cannot run it is a row with its reason.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fastplm import ops
from fastplm.reference.attention import attention_ref, attention_varlen_ref, t5_buckets
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32
#: The targets of a GPU are of the two halves of a step; on a CPU the step is what counts.
DIRECTIONS = ("forward", "backward") if GPU else ("forward", "training")
BUCKETS, MAX_DISTANCE = 32, 128

if GPU:  # every case compiles the same functions for shapes of its own
    torch._dynamo.config.recompile_limit = 256
    torch._dynamo.config.accumulated_recompile_limit = 1024


@dataclass(frozen=True)
class Shape:
    """A call; ``padding`` is the share of the padded batch that is not there."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    dim: int = 64
    is_causal: bool = False
    padding: float = 0.0
    ragged: bool = False
    dropout_p: float = 0.0
    bias: bool = False
    trained: bool = True

    @property
    def small(self) -> Shape:
        """The same call, small enough for fp64."""
        return replace(
            self,
            batch=2,
            heads=2,
            seqlen_q=min(self.seqlen_q, 65),
            seqlen_k=min(self.seqlen_k, 65),
        )

    def lengths(self, longest: int) -> list[int]:
        """Of the sequences: evenly spread around the mean, up to the longest, in no order."""
        least, steps = longest * (1 - 2 * self.padding), max(self.batch - 1, 1)
        spread = [round(least + (longest - least) * b / steps) for b in range(self.batch)]
        return random.Random(0).sample([max(length, 1) for length in spread], self.batch)

    @property
    def work(self) -> tuple[int, int, int]:
        """Rows of queries and of keys, and pairs of them that attend, of one head."""
        keys = self.lengths(self.seqlen_k)
        queries = self.lengths(self.seqlen_q) if self.ragged else [self.seqlen_q] * self.batch
        pairs = sum(q * k for q, k in zip(queries, keys, strict=True))
        if self.is_causal:
            pairs -= sum(q * (q - 1) // 2 for q in queries)
        return sum(queries), sum(keys), pairs

    @property
    def scale(self) -> float:
        return 1.0 if self.bias else self.dim**-0.5  # T5 has none

    def make(self, device: torch.device) -> dict[str, object]:
        def draw(length):
            """Views of a projection's output, as a model hands them over."""
            if self.ragged:
                rows = sum(self.lengths(length))
                return torch.randn(rows, self.heads, self.dim, device=device, dtype=DTYPE)
            shape = (self.batch, length, self.heads, self.dim)
            return torch.randn(shape, device=device, dtype=DTYPE).transpose(1, 2)

        made = dict(query=draw(self.seqlen_q), key=draw(self.seqlen_k), value=draw(self.seqlen_k))
        if self.bias:
            # Scores of about 1, as T5's initial weights give without a scale.
            made["query"] *= self.dim**-0.5
            made["weight"] = torch.randn(BUCKETS, self.heads, device=device, dtype=DTYPE)
        if self.ragged:
            for name, longest in (("q", self.seqlen_q), ("k", self.seqlen_k)):
                ends = itertools.accumulate(self.lengths(longest), initial=0)
                cu_seqlens = torch.tensor(list(ends), dtype=torch.int32, device=device)
                made |= {f"cu_seqlens_{name}": cu_seqlens, f"max_seqlen_{name}": longest}
        elif self.padding:
            lengths = torch.tensor(self.lengths(self.seqlen_k), device=device)
            made["key_mask"] = torch.arange(self.seqlen_k, device=device) < lengths[:, None]
        return made


# --- fastplm and its reference --------------------------------------------------------------------


def over(shape: Shape, dense: Callable[..., Tensor], varlen: Callable[..., Tensor]):
    """The function that fits the layout, with the options of the shape."""
    options: dict[str, object] = dict(is_causal=shape.is_causal, scale=shape.scale)
    if shape.dropout_p:
        options |= dict(dropout_p=shape.dropout_p, seed=0)

    def run(weight=None, **inputs):
        bias = None if weight is None else ops.T5RelativeBias(weight, True, MAX_DISTANCE)
        return (varlen if shape.ragged else dense)(**inputs, **options, relative_bias=bias)

    return run


def without_bias(function):
    def run(weight, **inputs):
        return function(**inputs)

    return run


# --- baselines ------------------------------------------------------------------------------------


def cannot(reason: str):
    def run(**inputs):
        raise NotImplementedError(reason)

    return run


def sdpa(shape: Shape, backend: SDPBackend | None = None):
    if shape.ragged:
        return cannot("it has no ragged batches")
    # Its causality is top-left aligned, and the one query of a decoding step sees every key.
    is_causal = shape.is_causal and shape.seqlen_q > 1

    def run(query, key, value, key_mask=None, weight=None):
        mask = None if key_mask is None else key_mask[:, None, None, :]
        if weight is not None:  # as Transformers' T5 makes it
            buckets = _buckets(query.shape[2], key.shape[2], query.device)
            mask = weight[buckets].permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=shape.dropout_p,
            is_causal=is_causal,
            scale=shape.scale,
        )

    def run_forced(**inputs):
        with sdpa_kernel(backend):
            return run(**inputs)

    return run if backend is None else run_forced


def torch_varlen(shape: Shape):
    if shape.bias or shape.dropout_p:
        return cannot("it has no bias and no dropout")
    if shape.padding and not shape.ragged:
        return cannot("it has no key mask")

    def run(query, key, value, cu_seqlens_q=None, cu_seqlens_k=None, **longest):
        from torch.nn.attention.varlen import varlen_attn

        dense = cu_seqlens_q is None
        if dense:
            cu_seqlens_q, cu_seqlens_k = (
                _even(tensor.shape[0], tensor.shape[2], tensor.device) for tensor in (query, key)
            )
            query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        window = dict(window_size=(-1, 0)) if shape.is_causal else {}
        out = varlen_attn(
            query, key, value, cu_seqlens_q, cu_seqlens_k, shape.seqlen_q, shape.seqlen_k, **window
        )
        return out.unflatten(0, (-1, shape.seqlen_q)).transpose(1, 2) if dense else out

    return run


def flex(shape: Shape):
    if shape.ragged or shape.dropout_p:
        return cannot("it has no ragged batches and no dropout")
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(query, key, value, key_mask=None, weight=None):
        seqlen_q, seqlen_k = query.shape[2], key.shape[2]
        buckets = _buckets(seqlen_q, seqlen_k, query.device)

        def biased(score, b, h, i, j):
            return score + weight[buckets[i, j], h]

        return compiled(
            query,
            key,
            value,
            score_mod=None if weight is None else biased,
            block_mask=_block_mask(shape, query.device),
            scale=shape.scale,
        )

    return run


@functools.cache
def _block_mask(shape: Shape, device: torch.device):
    """Made once, as a model makes it once for all of its layers; all inputs have these lengths."""
    if not (shape.padding or shape.is_causal):
        return None
    lengths = torch.tensor(shape.lengths(shape.seqlen_k), device=device)
    cached = shape.seqlen_k - shape.seqlen_q

    def mask_mod(b, h, i, j):
        exists = j < lengths[b]
        return exists & (j <= i + cached) if shape.is_causal else exists

    batch = shape.batch if shape.padding else None
    return create_block_mask(mask_mod, batch, None, shape.seqlen_q, shape.seqlen_k, device=device)


@functools.cache
def _buckets(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None]
    table = t5_buckets(BUCKETS, True, MAX_DISTANCE)
    return table[distance.clamp(-MAX_DISTANCE, MAX_DISTANCE) + MAX_DISTANCE].to(device)


@functools.cache
def _even(batch: int, length: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


# --- cases ----------------------------------------------------------------------------------------


def case(label: str, shape: Shape, floor=None, must=None) -> Case:
    """``floor`` and ``must`` are microseconds of forward and backward on an H200."""
    eager = over(shape, attention_ref, attention_varlen_ref)
    fastplm = over(shape, ops.attention, ops.attention_varlen)
    variants = {"eager": eager, "fastplm": fastplm}
    if shape.bias:
        variants["fastplm, no bias"] = without_bias(fastplm)
    if GPU or not shape.ragged:
        variants["sdpa, dense bias" if shape.bias else "sdpa"] = sdpa(shape)
    if GPU:
        variants |= {
            "sdpa flash": sdpa(shape, SDPBackend.FLASH_ATTENTION),
            "sdpa cudnn": sdpa(shape, SDPBackend.CUDNN_ATTENTION),
            "sdpa efficient": sdpa(shape, SDPBackend.EFFICIENT_ATTENTION),
            "torch varlen": torch_varlen(shape),
            "flex": flex(shape),
        }
        # Compiling takes longer than measuring all the rest, so not in every variation of a shape.
        if not (shape.padding or shape.ragged or shape.dropout_p):
            variants["compiled"] = torch.compile(eager, dynamic=False)
    wrt = ("query", "key", "value", "weight") if shape.bias else ("query", "key", "value")
    size = DTYPE.itemsize * shape.heads * shape.dim
    rows_q, rows_k, pairs = shape.work
    forward_bytes, flops = size * 2 * (rows_q + rows_k), 4 * pairs * shape.heads * shape.dim
    targets = {}
    if floor is not None:
        targets = dict(zip(("forward", "backward"), zip(floor, must, strict=True), strict=True))
    return Case(
        op="attention",
        label=label,
        make=shape.make,
        make_small=shape.small.make,
        variants=variants,
        wrt=wrt if shape.trained else (),
        directions=DIRECTIONS if shape.trained else DIRECTIONS[:1],
        bytes=forward_bytes,
        flops=flops,
        # Read q, k, v and grad_out once, and write the output and three gradients once.
        training_bytes=forward_bytes + size * (3 * rows_q + 4 * rows_k),
        training_flops=7 * flops // 2,
        targets=targets,
    )


def padded(label: str, shape: Shape, *paddings: float) -> list[Case]:
    """Dense with a key mask, and ragged."""
    return [
        case(
            f"{label} padded {100 * padding:.0f} %{', ragged' if ragged else ''}",
            replace(shape, padding=padding, ragged=ragged),
        )
        for padding in paddings
        for ragged in (False, True)
    ]


def dropped(label: str, shape: Shape, floor=None, must=None) -> list[Case]:
    """Dense and ragged with dropout 0.1, which may cost 10 % and 12 %."""
    shape = replace(shape, dropout_p=0.1)
    return [
        case(
            f"{label} dropout 0.1{', ragged' if ragged else ''}",
            replace(shape, ragged=ragged),
            floor,
            must and tuple(round(share * time, 1) for time in must),
        )
        for ragged, share in ((False, 1.1), (True, 1.12))
    ]


S128, S512 = Shape(256, 12, 128, 128), Shape(64, 12, 512, 512)
#: The shapes to reach a time at on an H200: label, shape, floor and must in µs (forward, backward).
TARGETS = [
    ("BERT-base 256x128", S128, (47, 82), (60, 125)),
    ("BERT-base 64x512", S512, (65, 163), (128, 380)),
    ("ALBERT-xxlarge 16x512", Shape(16, 64, 512, 512), (87, 218), (172, 505)),
    ("ELECTRA-small 128x128", Shape(128, 4, 128, 128), (8, 16), (14, 26)),
    # The bias may cost 10 % forward and 20 % backward.
    ("T5-base 64x512", replace(S512, bias=True), (65, 163), (140.8, 456)),
    ("GPT-2 16x1024 causal", Shape(16, 12, 1024, 1024, is_causal=True), (33, 82), (80, 215)),
    ("cross 128x512", Shape(64, 12, 128, 512), (30, 59), (42, 95)),
    ("cross 512x128", Shape(64, 12, 512, 128), (30, 59), (42, 95)),
]

if GPU:
    CASES = [
        *(case(*target) for target in TARGETS),
        *dropped("BERT-base 256x128", S128, (47, 82), (60, 125)),
        *dropped("BERT-base 64x512", S512, (65, 163), (128, 380)),
        # The first of these is the dense batch without padding, which is above.
        *padded("BERT-base 256x128", S128, 0.0, 0.3, 0.5)[1:],
        *padded("BERT-base 64x512", S512, 0.0, 0.3, 0.5)[1:],
        case("decode 64x512", Shape(64, 12, 1, 512, is_causal=True, trained=False)),
    ]
else:
    CASES = [
        case("BERT-base 8x128", Shape(8, 12, 128, 128)),
        case("BERT-base 2x512", Shape(2, 12, 512, 512)),
        *padded("BERT-base 8x128", Shape(8, 12, 128, 128), 0.4),
        *dropped("BERT-base 2x128", Shape(2, 12, 128, 128)),
        case("T5-base 2x128", Shape(2, 12, 128, 128, bias=True)),
        case("GPT-2 2x256 causal", Shape(2, 12, 256, 256, is_causal=True)),
        case("cross 64x256", Shape(4, 12, 64, 256)),
        case("cross 256x64", Shape(4, 12, 256, 64)),
        case("decode 8x256", Shape(8, 12, 1, 256, is_causal=True, trained=False)),
    ]


@pytest.mark.parametrize(
    ("case", "direction"),
    [(case, direction) for case in CASES for direction in case.directions],
    ids=str,
)
def test_attention(case, direction, bench):
    bench(case, direction)
