"""Fine-tune a BERT to embed texts that belong together alike: in-batch negatives.

    python examples/finetune_embeddings.py CHECKPOINT train.de,train.en test.de,test.en [STEPS]

Two files (may be .gz) whose lines belong together: questions and answers, paraphrases, a text in
two languages. Prints how many test lines find their own partner first, before and after.
"""

from __future__ import annotations

import gzip
import sys
import time

import torch
from transformers import AutoTokenizer

from fastplm.models import BertModel
from fastplm.nn import ContrastiveLoss, GradCache

BATCH, CHUNK, LENGTH = 128, 32, 64
checkpoint, train_files, test_files, *steps = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = BertModel.from_pretrained(checkpoint)


def lines(path: str) -> list[str]:
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def embed(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """The mean of the last layer's tokens."""
    hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    mask = attention_mask[:, :, None]
    return (hidden * mask).sum(1) / mask.sum(1)


def tensors(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    encoded = tokenizer(texts, truncation=True, max_length=LENGTH, padding=True)
    return torch.tensor(encoded["input_ids"]), torch.tensor(encoded["attention_mask"])


@torch.no_grad()
def accuracy() -> float:
    """The share of lines whose partner is the nearest of all lines of the other file."""
    model.eval()
    sides = []
    for path in test_files.split(","):
        rows = [embed(*tensors([line])) for line in lines(path)]
        sides.append(torch.nn.functional.normalize(torch.cat(rows), dim=1))
    found = (sides[0] @ sides[1].T).argmax(1)
    return float((found == torch.arange(len(found))).float().mean())


pairs = list(zip(*map(lines, train_files.split(",")), strict=True))
generator = torch.Generator().manual_seed(0)
order = torch.randperm(len(pairs), generator=generator).tolist()
torch.manual_seed(0)
encode, loss_of = GradCache(embed, CHUNK), ContrastiveLoss(symmetric=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
total = int(steps[0]) if steps else len(pairs) // BATCH
print(f"before: {accuracy():.3f}", flush=True)
start = time.monotonic()
for step in range(total):
    model.train()
    batch = [pairs[order[(step * BATCH + i) % len(pairs)]] for i in range(BATCH)]
    left, right = zip(*batch, strict=True)
    loss = loss_of(encode(*tensors(list(left))), encode(*tensors(list(right))))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == total - 1:
        print(f"step {step}  loss {float(loss):.3f}  {time.monotonic() - start:.0f} s", flush=True)
print(f"after: {accuracy():.3f}")
