"""ops.maxsim against its eager reference and the product of padded sets: BERTScore's matching."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import peers
from fastplm import ops
from fastplm.reference.maxsim import maxsim_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DTYPE = torch.bfloat16 if GPU else torch.float32


def inputs(pairs, longest, width):
    """Sets with the lengths of sentences, from a quarter of the longest to the longest."""

    def make(device: torch.device):
        generator = torch.Generator().manual_seed(0)
        sizes = torch.randint(longest // 4, longest + 1, (2, pairs), generator=generator)
        ends = F.pad(sizes.cumsum(1), (1, 0)).int().to(device)
        query, key = (
            torch.randn(int(one.sum()), width, device=device, dtype=DTYPE) for one in sizes
        )
        return dict(
            query=query,
            key=key,
            cu_seqlens_q=ends[0],
            cu_seqlens_k=ends[1],
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )

    return make


def eager(**inputs):
    return scores(maxsim_ref(**inputs))


def fastplm(**inputs):
    return scores(ops.maxsim(**inputs))


def scores(match):
    return torch.cat([match.query_score, match.key_score])


def case(label, pairs, longest, width):
    # The mean length is 5/8 of the longest, on both sides.
    rows, product = 2 * pairs * longest * 5 // 8, pairs * (longest * 5 // 8) ** 2 * width * 2
    size = DTYPE.itemsize
    return Case(
        op="maxsim",
        label=label,
        make=inputs(pairs, longest, width),
        make_small=inputs(5, 40, width),
        variants={
            "eager": eager,
            "fastplm": fastplm,
            "compiled": peers.compiled("maxsim", eager),
        },
        wrt=("query", "key"),
        directions=("forward", "training"),
        flops=product,
        bytes=rows * (size * width + 12),
        # The backward gathers the rows of the matches and writes the gradients.
        training_flops=product,
        training_bytes=rows * (4 * size * width + 24),
        dtype=DTYPE,
    )


CASES = [
    case("MiniLM 64 x 40", 64, 40, 384),
    case("BERT-base 64 x 128", 64, 128, 768),
]
if GPU:
    CASES += [case("BERT-base 1024 x 64", 1024, 64, 768), case("BERT-base 64 x 512", 64, 512, 768)]


def test_maxsim(case, direction, bench):
    bench(case, direction)
