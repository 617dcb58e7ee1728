"""ops.embedding_layer_norm against PyTorch's modules one after another, and its compiler."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fastplm import ops
from fastplm.reference.embedding_layer_norm import embedding_layer_norm_ref
from harness import Case, default_device

GPU = default_device().type == "cuda"
DIRECTIONS = ("forward", "training")
VOCAB, PLACES, P = 30522, 512, 0.1
TABLES = ("word_weight", "position_weight", "token_type_weight", "weight", "bias")


def torch_embeddings(**inputs):
    """With PyTorch's dropout, whose choices are others."""
    rows = F.embedding(inputs["input_ids"], inputs["word_weight"], 0)
    rows = rows + F.embedding(inputs["token_type_ids"], inputs["token_type_weight"])
    rows = rows + F.embedding(inputs["position_ids"], inputs["position_weight"])
    rows = F.layer_norm(rows, inputs["weight"].shape, inputs["weight"], inputs["bias"], 1e-12)
    return F.dropout(rows, inputs["dropout_p"]).to(inputs["dtype"])


compiled = torch.compile(torch_embeddings)


def case(rows, width, dtype, p):
    def inputs(rows, width, vocab):
        def make(device):
            table = torch.randn(vocab, width, device=device)
            # A power law, as words have it.
            ids = (vocab * torch.rand(rows, device=device) ** 4).long()
            return dict(
                input_ids=ids,
                word_weight=table,
                position_ids=torch.arange(rows, device=device) % 128,
                position_weight=torch.randn(PLACES, width, device=device),
                token_type_ids=torch.zeros_like(ids),
                token_type_weight=torch.randn(2, width, device=device),
                weight=torch.ones(width, device=device),
                bias=torch.zeros(width, device=device),
                padding_idx=0,
                dropout_p=p,
                seed=torch.tensor(1, device=device),
                dtype=dtype,
            )

        return make

    read, written = 4 * rows * width, dtype.itemsize * rows * width
    return Case(
        op="embedding_layer_norm",
        label=f"{rows}x{width} {str(dtype).removeprefix('torch.')}{' dropout' if p else ''}",
        make=inputs(rows, width, VOCAB),
        make_small=inputs(9, 33, 50),
        variants={
            "eager": embedding_layer_norm_ref,
            "torch": torch_embeddings,
            "compile": compiled,
            "fastplm": ops.embedding_layer_norm,
        },
        gated=("fastplm",) if p else ("torch", "fastplm"),
        wrt=TABLES,
        directions=DIRECTIONS,
        bytes=read + written,
        flops=0,
        # Rows are looked up twice, and the gradients of sums written once and read twice.
        training_bytes=2 * read + 2 * written + 3 * read + 4 * VOCAB * width,
        training_flops=0,
        dtype=dtype,
    )


CASES = [
    case(rows, width, dtype, p)
    for rows, width, dtype in (
        ((32768, 768, torch.bfloat16), (32768, 128, torch.bfloat16))
        if GPU
        else ((1024, 768, torch.float32),)
    )
    for p in (0.0, P)
]


def test_embedding_layer_norm(case, direction, bench):
    bench(case, direction)
