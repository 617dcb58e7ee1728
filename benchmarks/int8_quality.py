"""What 8 bits cost: scores of a model before and after ``fastplm.quantize``, on real tasks.

    python benchmarks/int8_quality.py --model DIR --data DIR --rows FILE.csv

Two tasks take the model as it is, a sentence encoder: which of all paragraphs has the answer to a
question (XQuAD), and whether two sentences say the same (MRPC, by the area under the ROC curve of
their cosine). Two take it after a short fine-tuning in fp32: the sentiment of a film review, and
the part of speech of a word. PyTorch's own dynamic quantization, which has one scale for a whole
batch, is beside it. The data folder has the files that the names in this script say.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import fastplm
from harness import append_row, machine_line

FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "model", "task", "metric", "examples"),
    *("variant", "score", "cosine"),
)
BATCH, LONGEST, RATE = 32, 128, 1e-4
Score = Callable[[torch.nn.Module], tuple[float, np.ndarray]]


def torch_int8(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its end
        return torch.ao.quantization.quantize_dynamic(
            fastplm.restore(model), {torch.nn.Linear}, dtype=torch.qint8
        )


VARIANTS: dict[str, Callable[[Any], torch.nn.Module]] = {
    "fp32": lambda model: model,
    "fastplm int8": fastplm.quantize,
    "torch dynamic int8": torch_int8,
}


def batches(tokenizer: Any, texts: list, **options: Any) -> list[Any]:
    options |= dict(padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    return [tokenizer(texts[i : i + BATCH], **options) for i in range(0, len(texts), BATCH)]


def embed(model: torch.nn.Module, given: list[Any]) -> Tensor:
    """Means over the tokens, of length 1: [N, E]."""
    found = []
    with torch.inference_mode():
        for batch in given:
            mask = batch["attention_mask"][..., None]
            states = model(**batch).last_hidden_state
            found.append((states * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


# --- the tasks of a sentence encoder --------------------------------------------------------------


def retrieval(data: Path, tokenizer: Any) -> tuple[str, int, Score]:
    """The share of questions whose nearest paragraph is their own."""
    articles = json.loads((data / "qa/xquad.en.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [one for article in articles for one in article["paragraphs"]]
    own = [i for i, one in enumerate(paragraphs) for _ in one["qas"]]
    texts = batches(tokenizer, [one["context"] for one in paragraphs])
    questions = batches(tokenizer, [each["question"] for one in paragraphs for each in one["qas"]])

    def score(model: torch.nn.Module) -> tuple[float, np.ndarray]:
        asked = embed(model, questions)
        nearest = (asked @ embed(model, texts).t()).argmax(1)
        return float((nearest == torch.tensor(own)).double().mean()), asked.numpy()

    return "accuracy", len(own), score


def paraphrases(data: Path, tokenizer: Any) -> tuple[str, int, Score]:
    """The probability that a pair of paraphrases is nearer than a pair that is none."""
    lines = (data / "pairs/mrpc.test.txt").read_text(encoding="utf-8-sig").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    labels = np.array([row[0] == "1" for row in rows])
    sides = [batches(tokenizer, [row[side] for row in rows]) for side in (3, 4)]

    def score(model: torch.nn.Module) -> tuple[float, np.ndarray]:
        left, right = (embed(model, side) for side in sides)
        near = (left * right).sum(1).numpy()
        ranks = near.argsort().argsort() + 1
        yes, no = labels.sum(), (~labels).sum()
        area = (ranks[labels].sum() - yes * (yes + 1) / 2) / (yes * no)
        return float(area), left.numpy()

    return "area under the ROC curve", len(rows), score


# --- the tasks that need fine-tuning --------------------------------------------------------------


def trained(model: Any, given: list[Any], labels: list[Tensor], epochs: int) -> Any:
    """AdamW with a rate that falls to 0, in an order that is drawn anew each time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    steps = epochs * len(given)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    model.train()
    for _ in range(epochs):
        for i in random.sample(range(len(given)), len(given)):
            model(**given[i], labels=labels[i]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model.eval()


def accuracy(given: list[Any], labels: list[Tensor]) -> Score:
    def score(model: torch.nn.Module) -> tuple[float, np.ndarray]:
        right, found = 0, []
        with torch.inference_mode():
            for batch, of_batch in zip(given, labels, strict=True):
                logits = model(**batch).logits
                seen = of_batch >= 0
                right += int((logits.argmax(-1) == of_batch)[seen].sum())
                found.append(logits[seen])
        return right / sum(map(len, found)), torch.cat(found).numpy()

    return score


def sentiment(data: Path, tokenizer: Any, part: str, most: int) -> tuple[list[Any], list[Tensor]]:
    lines = (data / f"sentiment/movie.{part}.tsv").read_text(encoding="utf-8").splitlines()[1:]
    rows = [line.split("\t") for line in lines]
    rows = [row for row in rows if float(row[0]) != 0][:most]
    labels = torch.tensor([int(float(row[0]) > 0) for row in rows]).split(BATCH)
    return batches(tokenizer, [row[-1] for row in rows]), list(labels)


def tagging(data: Path, tokenizer: Any, part: str, tags: list[str]) -> tuple[list, list[Tensor]]:
    """The label of a word is that of its first token. ``tags`` gets those of a new name."""
    text = (data / f"tagging/ewt-pos.{part}.tsv").read_text(encoding="utf-8")
    sentences = [
        [line.split("\t") for line in one.splitlines()] for one in text.strip().split("\n\n")
    ]
    for sentence in sentences:
        tags += [tag for tag in dict.fromkeys(word[1] for word in sentence) if tag not in tags]
    given = batches(
        tokenizer, [[word[0] for word in one] for one in sentences], is_split_into_words=True
    )
    labels = []
    for at, batch in enumerate(given):
        of_batch = torch.full(batch["input_ids"].shape, -100)
        for row, sentence in enumerate(sentences[at * BATCH : (at + 1) * BATCH]):
            before = None
            for place, word in enumerate(batch.word_ids(row)):
                if word is not None and word != before:
                    of_batch[row, place] = tags.index(sentence[word][1])
                before = word
        labels.append(of_batch)
    return given, labels


def jobs(args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, Any, str, int, Score]]:
    """(task, model in fp32, metric, number of examples, score), one after the other."""
    data, load = args.data, transformers.AutoModelForSequenceClassification.from_pretrained
    encoder = fastplm.accelerate(transformers.AutoModel.from_pretrained(args.model)).eval()
    yield "retrieval, XQuAD", encoder, *retrieval(data, tokenizer)
    yield "paraphrases, MRPC", encoder, *paraphrases(data, tokenizer)
    given = sentiment(data, tokenizer, "train", args.reviews)
    model = trained(fastplm.accelerate(load(args.model)), *given, epochs=2)
    given = sentiment(data, tokenizer, "test", 10**9)
    yield "film reviews", model, "accuracy", sum(map(len, given[1])), accuracy(*given)
    tags: list[str] = []
    given = tagging(data, tokenizer, "dev", tags)
    test = tagging(data, tokenizer, "test", tags)
    load = transformers.AutoModelForTokenClassification.from_pretrained
    model = trained(fastplm.accelerate(load(args.model, num_labels=len(tags))), *given, epochs=3)
    count = sum(int((each >= 0).sum()) for each in test[1])
    yield "parts of speech, EWT", model, "accuracy", count, accuracy(*test)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a sentence encoder")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that rows are added to")
    parser.add_argument("--reviews", type=int, default=2000, help="to fine-tune with")
    args = parser.parse_args()
    random.seed(0)
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    for task, model, metric, count, score in jobs(args, tokenizer):
        before = None
        for name, make in VARIANTS.items():
            value, vectors = score(make(copy.deepcopy(model)))
            before = vectors if before is None else before
            norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(before, axis=1)
            cosine = float(((vectors * before).sum(1) / norms).mean())
            row = {**machine_line(), "model": args.model.name, "task": task}
            row |= {"metric": metric, "examples": count, "variant": name}
            row |= {"score": f"{100 * value:.2f}", "cosine": f"{cosine:.4f}"}
            append_row(args.rows, FIELDS, row)
            print({key: row[key] for key in FIELDS[6:]}, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
