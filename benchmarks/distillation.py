"""Distilled students of MiniLM against the same students without a teacher, by seeds.

    python benchmarks/distillation.py --model DIR --data DIR [--seeds 3] [--scale 1] [--work DIR]

The model's DIR is a MiniLM (``BertModel``); the data's DIR holds text/, pairs/, qa/ and
translation/.

1. MiniLM has no head over the vocabulary. The teacher is MiniLM with a new head, trained on
   WikiText. MiniLM itself is the teacher of the hidden states there, so that they keep their
   meaning. Students with two of its layers are trained on the same text, with the teacher (labels,
   predictions and hidden states) and with the labels alone. The scores are the loss of held-out
   text, and two of the cosines of mean-pooled vectors: how often the paragraph nearest to a
   question is its own (XQuAD, English), and how well paraphrases are recognised (MRPC, test).
2. Students with two layers of MiniLM itself learn its sentence vectors, for English captions and
   their German translations (Multi30k), with a vocabulary of both. The score is how often the
   nearest English vector of a German caption is that of its translation (1,000 test captions),
   against the student before its first step, which has the teacher's layers and its embeddings of
   the common tokens.

Runs are kept in --work, each with its log, and continued there if the script was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging

from fastplm import models
from fastplm.distill.objectives import sentence_vectors
from fastplm.distill.run import DistillArguments, distill
from fastplm.run.folder import can_resume
from fastplm.run.seeds import interval
from harness import machine_folder, machine_line

#: With so many steps, all runs together take about a quarter of an hour on one core.
TEACHER_STEPS, STUDENT_STEPS, MULTILINGUAL_STEPS = 240, 120, 150
NO_TEACHER = {"soft_weight": 0.0, "hidden_weight": 0.0, "hard_weight": 1.0}
#: Settings of the teacher, which learns to predict words and keeps MiniLM's hidden states.
KEEPS_STATES = {**NO_TEACHER, "hidden_weight": 10.0}
FIELDS = (
    *("date", "machine", "torch", "triton", "commit"),
    *("experiment", "student", "seeds", "steps", "metric", "value", "half_width", "seconds"),
)


def run(out: Path, **settings: Any) -> dict[str, Any]:
    """The metrics of a run, which is started or continued unless it is finished."""
    if out.exists() and not can_resume(out):
        settings["overwrite"] = True
    arguments = DistillArguments(
        out=out, resume=can_resume(out), save_every=20, log_every=20, **settings
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("a") as log, contextlib.redirect_stderr(log):
        return distill(arguments)


@torch.no_grad()
def vectors(model: Any, tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """The vectors of the texts, fp32 [texts, E], of length 1."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: dict[int, torch.Tensor] = {}
    for begin in range(0, len(order), 64):
        chosen = order[begin : begin + 64]
        batch = tokenizer(
            [texts[index] for index in chosen],
            padding=True,
            truncation=True,
            max_length=128,
            return_tensors="pt",
        )
        rows = sentence_vectors(model, batch["input_ids"], batch["attention_mask"])
        found.update(zip(chosen, torch.nn.functional.normalize(rows), strict=True))
    return torch.stack([found[index] for index in range(len(texts))])


def backbone(path: Path | str) -> tuple[Any, Any]:
    """(the model without its head, the tokenizer) from a folder."""
    model = models.BertModel.from_pretrained(path, add_pooling_layer=False)
    return model.eval(), AutoTokenizer.from_pretrained(path)


def paraphrase_auc(path: Path | str, data: Path) -> float:
    """The probability that a pair of paraphrases has a larger cosine than another pair."""
    with (data / "pairs/mrpc.test.txt").open(encoding="utf-8-sig") as file:
        rows = [line.rstrip("\n").split("\t") for line in file][1:]
    model, tokenizer = backbone(path)
    first, second = (vectors(model, tokenizer, [row[side] for row in rows]) for side in (3, 4))
    cosines = (first * second).sum(1)
    labels = torch.tensor([row[0] == "1" for row in rows])
    above = cosines[labels][:, None] - cosines[~labels]
    return float(((above > 0).double() + 0.5 * (above == 0)).mean())


def answering(path: Path | str, data: Path) -> float:
    """The share of questions whose nearest paragraph is their own."""
    articles = json.loads((data / "qa/xquad.en.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
    asked = [(question["question"], i) for i, p in enumerate(paragraphs) for question in p["qas"]]
    model, tokenizer = backbone(path)
    questions = vectors(model, tokenizer, [question for question, _ in asked])
    texts = vectors(model, tokenizer, [paragraph["context"] for paragraph in paragraphs])
    found = (questions @ texts.T).argmax(1)
    return float((found == torch.tensor([i for _, i in asked])).double().mean())


def retrieval(path: Path | str, data: Path) -> float:
    """The share of German captions whose nearest English vector is that of their translation."""
    model, tokenizer = backbone(path)
    sides = []
    for language in ("de", "en"):
        with gzip.open(data / f"translation/multi30k.test.{language}.gz", "rt") as file:
            sides.append(vectors(model, tokenizer, [line.strip() for line in file]))
    found = (sides[0] @ sides[1].T).argmax(1)
    return float((found == torch.arange(len(found))).double().mean())


def masked_teacher(options: argparse.Namespace, text: dict[str, Any]) -> dict[str, Any]:
    """MiniLM with a head over the vocabulary, trained on the text."""
    start = options.work / "minilm-with-new-head"
    if not (start / "tokenizer.json").exists():
        torch.manual_seed(0)
        models.BertForMaskedLM.from_pretrained(options.model).save_pretrained(start)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(start)
    layers = models.BertForMaskedLM.config_class.from_pretrained(start).num_hidden_layers
    settings = {**text, **KEEPS_STATES, "lr": 2e-4, "student_layers": layers}
    steps = max(2, round(TEACHER_STEPS * options.scale))
    return run(
        options.work / "teacher", recipe="distilbert", teacher=start, steps=steps, **settings
    )


def figures_of(metrics: dict[str, Any], model: Path, data: Path) -> dict[str, float]:
    """The scores of a model that predicts masked words."""
    return {
        "held-out loss": metrics["held_out"]["mlm_loss"],
        "questions that find their paragraph": answering(model, data),
        "MRPC AUC": paraphrase_auc(model, data),
        "seconds": metrics["train_seconds"],
    }


def with_and_without(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the first experiment."""
    files = [options.data / f"text/wikitext-2.{part}.txt" for part in ("valid", "test")]
    text = {"corpus": files, "block_size": 64, "batch_size": 16, "dropout": 0.0}
    text |= {"cache": options.work / "cache", "precision": options.precision}
    teacher = masked_teacher(options, text)
    folder = options.work / "teacher/model"
    steps = max(2, round(STUDENT_STEPS * options.scale))
    found: dict[str, list[dict[str, float]]] = {"with a teacher": [], "without": []}
    for seed in range(options.seeds):
        for student, weights in (("with a teacher", {}), ("without", NO_TEACHER)):
            out = options.work / f"{student.replace(' ', '-')}-{seed}"
            settings = {**text, **weights, "lr": 5e-4, "student_layers": 2, "seed": seed}
            metrics = run(out, recipe="distilbert", teacher=folder, steps=steps, **settings)
            figures = figures_of(metrics, out / "model", options.data)
            found[student].append(figures)
            print(f"{student:<15} seed {seed}  {figures}", flush=True)
    own = figures_of(teacher, folder, options.data)
    rows = rows_of("masked words", "the teacher, 6 layers", teacher["arguments"]["steps"], [own])
    for student, runs in found.items():
        rows += rows_of("masked words", f"2 layers, {student}", steps, runs)
    return rows


def multilingual(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the second experiment."""
    train = {
        name: [options.data / f"translation/multi30k.train.{language}.gz"]
        for name, language in (("corpus", "en"), ("translation", "de"))
    }
    steps = max(2, round(MULTILINGUAL_STEPS * options.scale))
    settings = {**train, "recipe": "multilingual", "teacher": options.model, "lr": 1e-3}
    settings |= {"student_layers": 2, "vocab_size": 8000, "batch_size": 32, "block_size": 48}
    settings |= {"cache": options.work / "cache", "precision": options.precision, "dropout": 0.0}
    after, before = [], []
    for seed in range(options.seeds):
        for name, found, length, rate in (
            ("multilingual", after, steps, 1e-3),
            ("untrained", before, 1, 1e-12),
        ):
            out = options.work / f"{name}-{seed}"
            metrics = run(out, **{**settings, "steps": length, "lr": rate, "seed": seed})
            figures = {
                "held-out loss": sum(
                    metrics["held_out"][f"{side}_loss"] for side in ("source", "translation")
                ),
                "de to en": retrieval(out / "model", options.data),
                "MRPC AUC": paraphrase_auc(out / "model", options.data),
                "seconds": metrics["train_seconds"],
            }
            found.append(figures)
            print(f"{name:<15} seed {seed}  {figures}", flush=True)
    own = {
        "de to en": retrieval(options.model, options.data),
        "MRPC AUC": paraphrase_auc(options.model, options.data),
        "seconds": 0.0,
    }
    rows = rows_of("sentence vectors", "the teacher, MiniLM", 0, [own])
    rows += rows_of("sentence vectors", "2 layers, before the first step", 0, before)
    return rows + rows_of("sentence vectors", "2 layers, with a teacher", steps, after)


def rows_of(
    experiment: str, student: str, steps: int, runs: list[dict[str, float]]
) -> list[dict[str, Any]]:
    """A row for each figure of some runs."""
    rows = []
    seconds = sum(figures["seconds"] for figures in runs) / len(runs)
    for metric in (name for name in runs[0] if name != "seconds"):
        score = interval([figures[metric] for figures in runs])
        width = score["half_width"]
        rows.append(
            {
                **machine_line(),
                "experiment": experiment,
                "student": student,
                "seeds": len(runs),
                "steps": steps,
                "metric": metric,
                "value": round(float(score["mean"] or 0.0), 4),
                "half_width": "" if width is None else round(width, 4),
                "seconds": round(seconds, 1),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    head = ("experiment", "student", "steps", "metric", "mean", "95 % interval", "seeds", "seconds")
    lines = [head, ("---",) * len(head)]
    for row in rows:
        width = f"± {row['half_width']}" if row["half_width"] != "" else ""
        names = ("experiment", "student", "steps", "metric", "value")
        last = (width, row["seeds"], row["seconds"])
        lines.append((*(str(row[name]) for name in names), *map(str, last)))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


EXPERIMENTS = {"masked-words": with_and_without, "sentence-vectors": multilingual}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="MiniLM's folder")
    parser.add_argument("--data", type=Path, required=True, help="the folder of the texts")
    parser.add_argument("--work", type=Path, default=Path("runs/distillation"))
    parser.add_argument("--experiments", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual steps")
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    results = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=results, help="where rows are added")
    options = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder = options.results / machine_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "distillation.csv"
    rows = []
    for name in options.experiments:
        fresh = EXPERIMENTS[name](options)
        rows += fresh
        begins = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, FIELDS)
            if begins:
                writer.writeheader()
            writer.writerows(fresh)
    print(f"\n{machine_line()['machine']}, torch {torch.__version__}\n\n{table(rows)}")
    page = folder / "distillation.md"
    page.write_text(f"Written by `python benchmarks/distillation.py`.\n\n{table(rows)}\n")
    print(f"\n{path}, {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
