"""A masked language model of one's own: fused attention, masking and loss under plain PyTorch.

    python examples/own_encoder.py text.txt --steps 200

Bytes are the vocabulary, so no tokenizer is needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from fastplm.nn import FusedAttention, MLMHead, TokenMasker

BYTES, MASK = 256, 256  # a mask is the id after those of bytes


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), FusedAttention(width, heads)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.feed_forward(hidden)


class Encoder(nn.Module):
    def __init__(self, length: int, width: int = 128, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(BYTES + 1, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = MLMHead(nn.LayerNorm(width), nn.Linear(width, BYTES + 1))
        self.head.decoder.weight = self.words.weight

    def forward(self, ids: Tensor, labels: Tensor, positions: Tensor) -> Tensor:
        """The loss; the head computes only the rows at ``positions``."""
        hidden = self.blocks(self.words(ids) + self.places.weight)
        return self.head(hidden, labels, positions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=64)
    options = parser.parse_args()
    text = torch.tensor(list(options.text.read_bytes()))
    text = text[: len(text) // options.length * options.length].view(-1, options.length)
    model, masker = Encoder(options.length), TokenMasker(BYTES + 1, MASK, special_ids=[MASK])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        index = torch.randint(len(text), (16,))
        batch = masker(text[index], sample_index=index, step=step)
        labels = torch.full_like(text[index], -100).flatten()
        labels[batch.positions] = batch.labels
        loss = model(batch.input_ids, labels, batch.positions)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
