"""Pre-train ELECTRA on your own text from Python, and use the discriminator in Transformers.

    python examples/pretrain_electra.py my-text.txt

The same run from the command line:

    fastplm pretrain --arch electra-small --corpus my-text.txt --steps 1000 --out runs/electra
"""

from __future__ import annotations

import sys

from transformers import AutoTokenizer, ElectraForPreTraining

from fastplm.pretrain.report import summary
from fastplm.pretrain.run import PretrainArguments, pretrain

metrics = pretrain(
    PretrainArguments(
        arch="electra-small",
        corpus=sys.argv[1:] or ["embedded"],
        steps=1000,
        out="runs/electra",
        batch_size=16,
        vocab_size=8192,
        log_every=10,
    )
)
print(summary(metrics))

path = metrics["models"]["discriminator"]
tokenizer = AutoTokenizer.from_pretrained(path)
model = ElectraForPreTraining.from_pretrained(path).eval()
batch = tokenizer("Return a list of the purple in the directory.", return_tensors="pt")
for token, score in zip(batch.tokens(), model(**batch).logits[0].sigmoid().tolist(), strict=True):
    print(f"{score:6.1%} replaced  {token}")
