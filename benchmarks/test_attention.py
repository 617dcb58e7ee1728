"""ops.attention against its eager reference and SDPA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastplm import ops
from fastplm.reference.attention import attention_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32


def inputs(batch, heads, seqlen_q, seqlen_k, dim, is_causal, padding):
    def make(device: torch.device):
        def draw(length):
            # Views of a projection's output, as a model hands them over.
            return torch.randn(batch, length, heads, dim, device=device, dtype=DTYPE).transpose(
                1, 2
            )

        made = dict(query=draw(seqlen_q), key=draw(seqlen_k), value=draw(seqlen_k))
        made["is_causal"] = is_causal
        if padding:
            lengths = torch.randint(
                int(seqlen_k * (1 - 2 * padding)), seqlen_k + 1, (batch, 1), device=device
            )
            made["key_mask"] = torch.arange(seqlen_k, device=device)[None, :] < lengths
        return made

    return make


def sdpa(query, key, value, is_causal, key_mask=None):
    mask = None if key_mask is None else key_mask[:, None, None, :]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)


def forced(backend):
    def run(**keywords):
        with sdpa_kernel(backend):
            return sdpa(**keywords)

    return run


def case(label, batch, heads, seqlen_q, seqlen_k, dim=64, is_causal=False, padding=0.0):
    variants = {"eager": attention_ref, "fastplm": ops.attention, "sdpa": sdpa}
    if GPU:
        variants["compiled"] = torch.compile(attention_ref)
        if not padding:
            variants["sdpa flash"] = forced(SDPBackend.FLASH_ATTENTION)
        variants["sdpa cudnn"] = forced(SDPBackend.CUDNN_ATTENTION)
        variants["sdpa efficient"] = forced(SDPBackend.EFFICIENT_ATTENTION)
    size = DTYPE.itemsize * batch * heads * dim
    pairs = batch * heads * seqlen_q * seqlen_k // (2 if is_causal else 1)
    return Case(
        op="attention",
        label=label,
        make=inputs(batch, heads, seqlen_q, seqlen_k, dim, is_causal, padding),
        make_small=inputs(2, 2, min(seqlen_q, 65), min(seqlen_k, 65), dim, is_causal, padding),
        variants=variants,
        wrt=("query", "key", "value"),
        bytes=size * 2 * (seqlen_q + seqlen_k),
        flops=4 * pairs * dim,
        # Read q, k, v, grad_out and write three gradients and the output, each once.
        training_bytes=size * 2 * (seqlen_q + seqlen_k) + size * (3 * seqlen_q + 4 * seqlen_k),
        training_flops=14 * pairs * dim,
    )


if GPU:
    CASES = [
        case("BERT-base 256x128", 256, 12, 128, 128),
        case("BERT-base 64x512", 64, 12, 512, 512),
        case("BERT-base 64x512 padded 40 %", 64, 12, 512, 512, padding=0.4),
        case("ALBERT-xxlarge 16x512", 16, 64, 512, 512),
        case("ELECTRA-small 128x128", 128, 4, 128, 128),
        case("GPT-2 16x1024 causal", 16, 12, 1024, 1024, is_causal=True),
        case("cross 128x512", 64, 12, 128, 512),
        case("cross 512x128", 64, 12, 512, 128),
    ]
else:
    CASES = [
        case("BERT-base 8x128", 8, 12, 128, 128),
        case("BERT-base 2x512", 2, 12, 512, 512),
        case("BERT-base 8x128 padded 40 %", 8, 12, 128, 128, padding=0.4),
        case("GPT-2 2x256 causal", 2, 12, 256, 256, is_causal=True),
        case("cross 64x256", 4, 12, 64, 256),
    ]


@pytest.mark.parametrize("direction", ("forward", "training"))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case, direction, bench):
    bench(case, direction)
