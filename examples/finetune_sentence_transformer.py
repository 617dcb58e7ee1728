"""Fine-tune embeddings with sentence-transformers' own trainer, loss and evaluators.

    python examples/finetune_sentence_transformer.py CHECKPOINT train.de,train.en \\
        test.de,test.en [STEPS] [OUT]

Two files (may be .gz) whose lines belong together: questions and answers, paraphrases, a text in
two languages. One line makes it fastplm: ``fastplm.accelerate(model)``. The model that is saved is
one of sentence-transformers, with the card that it writes.
"""

from __future__ import annotations

import gzip
import sys

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import (
    InformationRetrievalEvaluator,
    SequentialEvaluator,
    TripletEvaluator,
)
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

import fastplm


def lines(path: str) -> list[str]:
    with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
        return file.read().splitlines()


def evaluator_of(anchors: list[str], positives: list[str]) -> SequentialEvaluator:
    """How often an anchor's partner is the nearest of all, and nearer than the line after it."""
    numbers = [str(number) for number in range(len(anchors))]
    retrieval = InformationRetrievalEvaluator(
        queries=dict(zip(numbers, anchors, strict=True)),
        corpus=dict(zip(numbers, positives, strict=True)),
        relevant_docs={number: {number} for number in numbers},
        name="pairs",
    )
    negatives = positives[1:] + positives[:1]
    return SequentialEvaluator(
        [retrieval, TripletEvaluator(anchors, positives, negatives, name="next")]
    )


def main() -> None:
    checkpoint, train_files, test_files, *more = sys.argv[1:]
    steps, out = int(more[0]) if more else -1, more[1] if more[1:] else "runs/sentences"
    anchors, positives = map(lines, train_files.split(","))
    model = SentenceTransformer(checkpoint)
    model.max_seq_length = 64
    fastplm.accelerate(model)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=out,
            max_steps=steps,
            num_train_epochs=1,
            per_device_train_batch_size=128,
            learning_rate=2e-4,
            batch_sampler="no_duplicates",
            save_strategy="no",
            logging_steps=5,
            report_to="none",
        ),
        train_dataset=Dataset.from_dict({"anchor": anchors, "positive": positives}),
        loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=32),
        evaluator=evaluator_of(*map(lines, test_files.split(","))),
    )
    scores = (
        "eval_pairs_cosine_accuracy@1",
        "eval_pairs_cosine_mrr@10",
        "eval_next_cosine_accuracy",
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    for name in scores:
        print(f"{name.removeprefix('eval_')}: {before[name]:.3f} -> {after[name]:.3f}")
    model.save_pretrained(f"{out}/model")


if __name__ == "__main__":
    main()
