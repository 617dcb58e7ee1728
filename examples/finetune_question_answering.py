"""Fine-tune on questions from Python, then ask one with Transformers' own classes.

    python examples/finetune_question_answering.py CHECKPOINT squad.json

The same from the command line:

    fastplm finetune --task qa --model CHECKPOINT --data squad.json --out runs/qa
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from fastplm.finetune.report import summary
from fastplm.finetune.run import finetune
from fastplm.finetune.settings import FinetuneArguments

checkpoint, data, *steps = sys.argv[1:]
metrics = finetune(
    FinetuneArguments(
        task="qa",
        model=checkpoint,
        data=data,
        out="runs/qa",
        epochs=2,
        steps=int(steps[0]) if steps else None,
    ),
    print,
)
print(summary(metrics))

path = metrics["seeds"][0]["model"]
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForQuestionAnswering.from_pretrained(path)
text = "The drop-in classes subclass those of Transformers, and compute the tokens alone."
batch = tokenizer("What do the classes compute?", text, return_tensors="pt")
with torch.no_grad():
    outputs = model(**batch)
start, end = int(outputs.start_logits.argmax()), int(outputs.end_logits.argmax())
print(tokenizer.decode(batch["input_ids"][0, start : end + 1]))
