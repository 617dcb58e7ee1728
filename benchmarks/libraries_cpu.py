"""What ``accelerate`` and ``quantize`` do to the objects of other libraries on a CPU.

    pip install ".[serve]" gliner setfit
    python benchmarks/libraries_cpu.py --model DIR --texts FILE --rows FILE.csv

Each call gets eight texts in their order, so a batch has the padding that texts of natural lengths
have; the time of a tokenizer counts. The object as it comes, accelerated and in 8 bits take turns,
batch by batch, with --threads threads. A row has the median over the batches of the fastest round
of each, and the largest difference from the object as it comes. DIR is a BERT with its tokenizer;
heads that it lacks have random weights. A library that is not installed is left out.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fastplm
from harness import append_row, machine_line

FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "transformers", "library", "version", "call"),
    *("model", "texts", "variant", "ms", "times", "difference"),
)
TEXTS = 8
LABELS = ["person", "film", "place"]
#: Spans that GLiNER finds in a text, about.
SPANS = 3
#: What ``call`` gives for texts, as an array.
Call = Callable[[Any, list[str]], np.ndarray]


def sentence_transformer(model: str) -> tuple[Any, Call]:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(model, device="cpu"), lambda given, texts: given.encode(texts)


def cross_encoder(model: str) -> tuple[Any, Call]:
    from sentence_transformers import CrossEncoder

    def call(given: Any, texts: list[str]) -> np.ndarray:
        pairs = list(zip(texts, reversed(texts), strict=True))
        return given.predict(pairs, show_progress_bar=False)

    return CrossEncoder(model, device="cpu", num_labels=1), call


def sparse_encoder(model: str) -> tuple[Any, Call]:
    from sentence_transformers import SparseEncoder

    def call(given: Any, texts: list[str]) -> np.ndarray:
        return given.encode(texts, convert_to_sparse_tensor=False).numpy()

    return SparseEncoder(model, device="cpu"), call


def classification(model: str) -> tuple[Any, Call]:
    from transformers import pipeline

    def call(given: Any, texts: list[str]) -> np.ndarray:
        answers = given(texts, batch_size=len(texts), top_k=None)
        scores = [{one["label"]: one["score"] for one in answer} for answer in answers]
        return np.array([[score[name] for name in sorted(score)] for score in scores])

    return pipeline("text-classification", model, device="cpu"), call


def tagging(model: str) -> tuple[Any, Call]:
    from transformers import pipeline

    def call(given: Any, texts: list[str]) -> np.ndarray:
        answers = given(texts, batch_size=len(texts))
        return np.array([one["score"] for answer in answers for one in answer])

    return pipeline("token-classification", model, device="cpu", ignore_labels=[]), call


def setfit(model: str) -> tuple[Any, Call]:
    from setfit import SetFitModel

    made = SetFitModel.from_pretrained(model)
    examples = ["a good film", "a very bad one", "no, never again", "what a joy it is"]
    made.model_head.fit(made.model_body.encode(examples), [1, 0, 0, 1])
    return made, lambda given, texts: given.predict_proba(texts).numpy()


def gliner(model: str) -> tuple[Any, Call]:
    from gliner import GLiNER, GLiNERConfig
    from transformers import AutoConfig

    width = AutoConfig.from_pretrained(model).hidden_size
    shape = dict(model_name=model, hidden_size=width, max_width=8, span_mode="markerV0")
    made = GLiNER.from_config(GLiNERConfig(**shape, max_len=384), load_tokenizer=True).eval()
    options: dict[str, Any] = dict(labels=LABELS, batch_size=TEXTS)
    thresholds: list[float] = []

    def call(given: Any, texts: list[str]) -> np.ndarray:
        with torch.inference_mode():
            if not thresholds:
                # Random weights find a span everywhere, and trained ones a few.
                found = given.inference(texts, threshold=0.0, **options)
                scores = sorted(x["score"] for one in found for x in one)
                thresholds.append(scores[-SPANS * len(texts)])
            found = given.inference(texts, threshold=thresholds[0], **options)
        # Spans of near scores may change places.
        return np.array([score for one in found for score in sorted(x["score"] for x in one)])

    return made, call


LIBRARIES: dict[tuple[str, str], Callable[[str], tuple[Any, Call]]] = {
    ("sentence-transformers", "SentenceTransformer.encode"): sentence_transformer,
    ("sentence-transformers", "CrossEncoder.predict"): cross_encoder,
    ("sentence-transformers", "SparseEncoder.encode"): sparse_encoder,
    ("transformers", 'pipeline("text-classification")'): classification,
    ("transformers", 'pipeline("token-classification")'): tagging,
    ("setfit", "SetFitModel.predict_proba"): setfit,
    ("gliner", "GLiNER.inference"): gliner,
}


def variants_of(stock: Any) -> dict[str, Any]:
    ours = fastplm.accelerate(copy.deepcopy(stock))
    int8 = fastplm.quantize(copy.deepcopy(ours))
    return {"stock": stock, "fastplm": fastplm.freeze(ours), "fastplm int8": fastplm.freeze(int8)}


def difference(some: list[np.ndarray], others: list[np.ndarray]) -> str:
    if any(one.shape != other.shape for one, other in zip(some, others, strict=True)):
        return "other spans"  # of GLiNER, which of two that overlap takes one
    return f"{max(np.abs(a - b).max() for a, b in zip(some, others, strict=True)):.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a BERT")
    parser.add_argument("--texts", type=Path, required=True, help="one text a line")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that the rows go to")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lines = [line.split("\t")[-1] for line in args.texts.read_text("utf-8").splitlines()]
    count = TEXTS * args.batches
    batches = [lines[first : first + TEXTS] for first in range(1, 1 + count, TEXTS)]
    for (library, name), make in LIBRARIES.items():
        torch.manual_seed(0)
        try:
            stock, call = make(str(args.model))
        except ImportError as error:
            print(f"{name} is left out: {error}")
            continue
        variants = variants_of(stock)
        outputs = {key: [call(one, batch) for batch in batches] for key, one in variants.items()}
        took = {key: np.zeros((args.rounds, args.batches)) for key in variants}
        for turn in range(args.rounds):
            for at, batch in enumerate(batches):
                for key, one in variants.items():
                    start = time.perf_counter()
                    call(one, batch)
                    took[key][turn, at] = 1e3 * (time.perf_counter() - start)
        ms = {key: float(np.median(times.min(0))) for key, times in took.items()}
        row = machine_line() | {"library": library, "call": name, "texts": TEXTS}
        row |= {"version": importlib.metadata.version(library), "model": args.model.name}
        row["transformers"] = importlib.metadata.version("transformers")
        for key in variants:
            row |= {"variant": key, "ms": f"{ms[key]:.2f}", "times": f"{ms['stock'] / ms[key]:.2f}"}
            row["difference"] = difference(outputs[key], outputs["stock"])
            append_row(args.rows, FIELDS, row)
            print({key: row[key] for key in FIELDS[6:]}, flush=True)


if __name__ == "__main__":
    main()
