"""Fine-tune BERT to tell good reviews from bad ones, with the Trainer, as with Transformers.

    python examples/finetune_classification.py CHECKPOINT train.tsv test.tsv

The files have a header with the columns "text" and "score" or "label"; a score above 0 is good. The
same from the command line, with several seeds:

    fastplm finetune --task classification --threshold 0 --model CHECKPOINT --data train.tsv \\
        --eval-data test.tsv --seeds 5 --out runs/sentiment
"""

from __future__ import annotations

import sys

import numpy
from transformers import AutoTokenizer, DataCollatorWithPadding, Trainer, TrainingArguments

from fastplm.data.examples import read_table
from fastplm.models import BertForSequenceClassification

checkpoint, train_file, test_file, *steps = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(checkpoint)


def features(path: str) -> list[dict]:
    examples = read_table(path)
    encoded = tokenizer([e.texts[0] for e in examples], truncation=True, max_length=128)
    return [
        {"input_ids": ids, "labels": int(float(example.target) > 0)}
        for ids, example in zip(encoded["input_ids"], examples, strict=True)
    ]


def accuracy(prediction) -> dict[str, float]:
    logits, labels = prediction
    return {"accuracy": float(numpy.mean(logits.argmax(-1) == labels))}


model = BertForSequenceClassification.from_pretrained(checkpoint, num_labels=2)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="runs/sentiment",
        learning_rate=1e-4,
        num_train_epochs=1,
        max_steps=int(steps[0]) if steps else -1,
        per_device_train_batch_size=32,
        warmup_steps=0.1,
        train_sampling_strategy="group_by_length",
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=features(train_file),
    eval_dataset=features(test_file),
    data_collator=DataCollatorWithPadding(tokenizer),
    processing_class=tokenizer,
    compute_metrics=accuracy,
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("runs/sentiment/model")  # transformers.pipeline("text-classification", …)
