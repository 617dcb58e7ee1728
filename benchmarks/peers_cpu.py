"""Encoders, generation and training on a CPU: fastplm beside what users would take in its place.

    pip install ".[cpu-peers]"
    python benchmarks/peers_cpu.py --task embed --texts FILE --rows FILE.csv --model DIR

The tasks are hidden states (embed), one score for a pair of texts (rerank), a class for each token
(tag), 32 new tokens (generate) and a step with AdamW on masked tokens (train). All variants have
the same weights and number of threads, and take turns, batch by batch. Variants in fp32 must first
agree on every output. For those in int8 a row has the mean cosine to the states in fp32 ("cosine").

Texts are taken in their order, ``--batch-size`` at once, so a batch has the padding that texts of
natural lengths have; with --sorted, texts of similar length share a batch. A row has the median
over the batches of the fastest round of each, the share of padding, and the slowest call in a
hundred. With --memory a row has instead the memory of a process that runs one variant alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peers_cpu_variants
import torch
import transformers
from peers_cpu_variants import STOCK, VARIANTS, Batch, Given, Run, Variant
from torch import Tensor

import fastplm
from harness import Unavailable, append_row, machine_line

SETTING = (
    *("date", "machine", "torch", "triton", "commit"),
    *("task", "model", "batch", "batches", "order", "padding", "variant", "version"),
)
FIELDS = (*SETTING, "ms", "p99_ms", "texts_per_s", "times_transformers", "difference", "cosine")
MEMORY_FIELDS = (*SETTING, "imported_mb", "peak_mb")
#: Outputs may differ by so much, in states of a size of about 1.
ALLOWED = 1e-4
#: Seconds of a look at whether threads of a runtime still wait busily for more work, and the most
#: looks: those of Intel's OpenMP, which CTranslate2 has, wait for 0.2 s.
ASLEEP, LOOKS = 5e-3, 100


def bert(hidden: int, layers: int, heads: int) -> transformers.BertConfig:
    shape = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    return transformers.BertConfig(**shape, intermediate_size=4 * hidden)


SIZES = {
    "minilm": bert(384, 6, 12),
    "bert-base": bert(768, 12, 12),
    "bert-mini": bert(256, 4, 4),
    "electra-small": transformers.ElectraConfig(),
    "roberta-base": transformers.RobertaConfig(vocab_size=50265, max_position_embeddings=514),
    # Narrower random weights repeat one token; wider ones of T5 are chaotic in fp32.
    "gpt2-small": transformers.GPT2Config(initializer_range=0.1),
    "t5-small": transformers.T5Config(initializer_factor=1.5, decoder_start_token_id=0),
}
AUTO = {
    "embed": transformers.AutoModel,
    "rerank": transformers.AutoModelForSequenceClassification,
    "tag": transformers.AutoModelForTokenClassification,
    "train": transformers.AutoModelForMaskedLM,
}
#: Settings of the model that are the task's.
CONFIG: dict[str, dict[str, Any]] = {
    "rerank": {"num_labels": 1},
    "tag": {"num_labels": 17},
    "train": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


def models(args: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    """The label, the model and the tokenizer of each; random weights have no tokenizer."""
    given = CONFIG.get(args.task, {})
    if args.model is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        yield args.model.name, AUTO[args.task].from_pretrained(args.model, **given), tokenizer
    for name in args.sizes:
        config = SIZES[name]
        config.update(given)
        causal, pairs = transformers.AutoModelForCausalLM, transformers.AutoModelForSeq2SeqLM
        auto = AUTO.get(args.task, pairs if config.is_encoder_decoder else causal)
        yield name, auto.from_config(config), None


# --- batches --------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """A text's tokens; ``types`` is 1 in the second text of a pair."""

    ids: list[int]
    types: list[int]
    text: Any = None


def random_sample(length: int) -> Sample:
    first = length // 2
    ids = torch.randint(2, 999, (length,)).tolist()  # no model's padding
    return Sample(ids, [0] * first + [1] * (length - first))


def samples_of(path: Path, tokenizer: Any, task: str) -> list[Sample]:
    """The texts in the last column of each line, or pairs in the last two. Without a tokenizer they
    have random ids, and their lengths are guessed from their words."""
    lines = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line[-1].strip()]
    columns = [-2, -1] if task == "rerank" and min(map(len, lines)) > 1 else [-1]
    texts = [tuple(line[column] for column in columns) for line in lines]
    if tokenizer is None:
        words = [" ".join(text).split() for text in texts]
        return [random_sample(1 + len(columns) + len(each) * 4 // 3) for each in words]
    made = tokenizer(*map(list, zip(*texts, strict=True)), truncation=True)
    types = made.get("token_type_ids") or [[0] * len(ids) for ids in made["input_ids"]]
    texts = [text if task == "rerank" else text[0] for text in texts]
    return list(map(Sample, made["input_ids"], types, texts))


def batches_of(
    samples: list[Sample],
    size: int,
    count: int,
    longest: int,
    task: str,
    ordered: bool = False,
    pad_id: int = 0,
) -> list[Batch]:
    """Batches of the first samples, in their order or, if ``ordered``, by their lengths."""
    samples = samples[: min(len(samples) // size, count) * size]
    if ordered:
        samples = sorted(samples, key=lambda sample: len(sample.ids))
    made = []
    for first in range(0, len(samples), size):
        part = samples[first : first + size]
        lengths = torch.tensor([len(sample.ids) for sample in part]).clamp(max=longest)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()

        def padded(rows: list[list[int]], filler: int = 0, mask: Tensor = mask) -> Tensor:
            kept = torch.tensor([each for row in rows for each in row[:longest]])
            return torch.full_like(mask, filler).masked_scatter(mask.bool(), kept)

        ids = padded([sample.ids for sample in part], pad_id)
        inputs = {"input_ids": ids, "attention_mask": mask}
        if task == "rerank":
            inputs["token_type_ids"] = padded([sample.types for sample in part])
        if task == "train":
            chosen = (torch.rand(mask.shape) < 0.15) & mask.bool()
            inputs["labels"] = inputs["input_ids"].masked_fill(~chosen, -100)
            inputs["input_ids"] = inputs["input_ids"].masked_fill(chosen, 103)
        made.append(Batch(inputs, [sample.text for sample in part if sample.text is not None]))
    return made


def settings(
    args: argparse.Namespace, tokenizer: Any, longest: int, pad_id: int
) -> Iterator[list[Batch]]:
    """The batches of each size, and for training of each share of padding."""
    samples: list[Sample] = []
    if args.task != "train" and args.length is None:
        samples = samples_of(args.texts, tokenizer, args.task)
    for size in args.batch_size:
        for share in args.padding if args.task == "train" else (0.0,):
            if args.length is not None:
                # Lengths are spread evenly around their mean.
                spread = args.length * torch.linspace(1 - 2 * share, 1, size)
                lengths = spread.round().long().clamp(min=2).tolist()
                samples = list(map(random_sample, lengths * args.batches))
            how = args.batches, longest, args.task, args.sorted, pad_id
            yield batches_of(samples, size, *how)


def padding_of(batches: list[Batch]) -> float:
    masks = [batch.inputs["attention_mask"] for batch in batches]
    return 1 - sum(int(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)


# --- outputs and times ----------------------------------------------------------------------------


def outputs_of(run: Run, batches: list[Batch]) -> list[np.ndarray]:
    """What counts of each batch's output: all of it, or of states those of tokens."""
    made = []
    for batch in batches:
        output, mask = np.asarray(run(batch)), batch.inputs["attention_mask"].bool().numpy()
        # A runtime may use the memory of an output again.
        made.append(output[mask] if output.ndim == 3 else output.copy())
    return made


def difference(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The largest difference of an output; for new tokens, the share that differs."""
    if np.issubdtype(some[0].dtype, np.integer):
        return float(np.mean(np.concatenate(some) != np.concatenate(others)))
    return max(float(np.abs(a - b).max()) for a, b in zip(some, others, strict=True))


def cosine(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The mean over tokens; for scores, the cosine of all of them."""
    one, other = np.concatenate(some), np.concatenate(others)
    if one.shape[1] == 1:
        one, other = one.T, other.T
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(1) / lengths).mean())


def together(task: str, alone: bool) -> list[str]:
    """The variants that can take turns in one process.

    CTranslate2 brings threads of GNU's OpenMP, which then has more of them than processors. So
    those of PyTorch wait less busily, and small batches take up to twice as long.
    """
    return [name for name in VARIANTS[task] if alone or not name.startswith("ctranslate2")]


def rest() -> None:
    """Sleep until the process does so, too."""
    for _ in range(LOOKS):
        before = time.process_time()
        time.sleep(ASLEEP)
        if time.process_time() - before < ASLEEP / 5:
            return


def timed(variants: dict[str, Run], batches: list[Batch], rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds of each round and batch.

    A variant is alone in most programs, so here it finds threads of its own awake, those of the
    others asleep, and its weights in the caches as far as they fit: the call before is not timed.
    """
    took = {name: np.zeros((rounds, len(batches))) for name in variants}
    for turn in range(rounds):
        for at, batch in enumerate(batches):
            for name, run in variants.items():
                rest()
                run(batch)
                start = time.perf_counter()
                run(batch)
                took[name][turn, at] = 1e3 * (time.perf_counter() - start)
    return took


def memory_of(name: str, given: Given, batches: list[Batch]) -> tuple[int, int] | None:
    """Bytes after the imports and at the peak, of a process that finds the variant's files."""
    file = given.folder / "given.pickle"
    file.write_bytes(pickle.dumps((name, torch.get_num_threads(), given, batches)))
    command = [sys.executable, peers_cpu_variants.__file__, str(file)]
    for _ in range(2):  # the first process makes the files
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name} is left out: {done.stderr.strip().splitlines()[-1]}")
            return None
    return tuple(json.loads(done.stdout.splitlines()[-1]))


# --- rows -----------------------------------------------------------------------------------------


def ready(given: Given, names: list[str]) -> dict[str, Run]:
    """The variants that are installed; a line says which one is not, and why."""
    made = {}
    for name in names:
        try:
            made[name] = VARIANTS[given.task][name].make(given)
        except (ImportError, Unavailable) as error:
            print(f"{name} is left out: {error}")
    return made


def compare(
    runs: dict[str, Run], table: dict[str, Variant], batches: list[Batch], rounds: int
) -> Iterator[dict[str, Any]]:
    """The columns of each variant."""
    outputs = {name: outputs_of(run, batches) for name, run in runs.items()}
    took = timed(runs, batches, rounds)
    fastest = {name: float(np.median(times.min(0))) for name, times in took.items()}
    for name, ms in fastest.items():
        away = difference(outputs[name], outputs[STOCK])
        wrong = table[name].exact and not away <= ALLOWED
        row: dict[str, Any] = {"variant": name}
        row["difference"] = f"{away:.1e}" + (", too much" if wrong else "")
        if not table[name].exact and np.issubdtype(outputs[name][0].dtype, np.floating):
            row["cosine"] = f"{cosine(outputs[name], outputs[STOCK]):.5f}"
        if not wrong:
            row |= {"ms": f"{ms:.3f}", "p99_ms": f"{np.quantile(took[name], 0.99):.3f}"}
            texts = len(batches[0].inputs["input_ids"])
            row |= {"texts_per_s": f"{1e3 * texts / ms:.2f}"}
            row |= {"times_transformers": f"{fastest[STOCK] / ms:.2f}"}
        yield row


def memories(names: list[str], given: Given, batches: list[Batch]) -> Iterator[dict[str, Any]]:
    for name in names:
        if (found := memory_of(name, given, batches)) is not None:
            imported, peak = (f"{each / 2**20:.0f}" for each in found)
            yield {"variant": name, "imported_mb": imported, "peak_mb": peak}


def measure(label: str, model: Any, tokenizer: Any, args: argparse.Namespace) -> None:
    """Append the rows of a model."""
    longest = getattr(model.config, "max_position_embeddings", 512)
    pad_id = getattr(model.config, "pad_token_id", None) or 0
    table, fields = VARIANTS[args.task], MEMORY_FIELDS if args.memory else FIELDS
    beams = f", {args.beams} beams" if args.beams > 1 else ""
    order = "sorted" if args.sorted else "natural"
    if args.length is not None and args.task != "train":
        order = f"{args.length} tokens"
    with tempfile.TemporaryDirectory() as folder:
        given = Given(args.task, Path(folder), [], args.beams)
        for part in (model, tokenizer):
            if part is not None:
                part.save_pretrained(given.checkpoint)
        runs: dict[str, Run] = {}
        for batches in settings(args, tokenizer, longest, pad_id):
            given.examples = given.examples or batches
            if args.memory:
                rows = memories(args.variants, given, batches)
            else:
                if args.task == "train" or not runs:  # a training changes its weights
                    runs = ready(given, args.variants)
                rows = compare(runs, table, batches, args.rounds)
            about = {**machine_line(), "task": args.task + beams, "model": label}
            about |= {"batch": len(batches[0].inputs["input_ids"]), "batches": len(batches)}
            about |= {"order": order, "padding": f"{padding_of(batches):.2f}"}
            for row in rows:
                row = about | row
                package = table[row["variant"]].package
                ours = package == "fastplm"  # on the index that is another project
                row["version"] = (
                    fastplm.__version__ if ours else importlib.metadata.version(package)
                )
                append_row(args.rows, fields, row)
                print({key: row.get(key, "") for key in fields[5:]}, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=VARIANTS, default="embed")
    parser.add_argument("--texts", type=Path, help="lines that end in a text, or in a pair")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that rows are added to")
    parser.add_argument("--model", type=Path, help="folder of an encoder's checkpoint")
    parser.add_argument("--sizes", nargs="*", default=[], choices=SIZES, help="with random weights")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--sorted", action="store_true", help="texts of similar length together")
    parser.add_argument("--length", type=int, help="random texts of so many tokens, not --texts")
    parser.add_argument("--padding", type=float, nargs="+", default=[0.0], help="of train: shares")
    parser.add_argument("--beams", type=int, default=1, help="of generate")
    parser.add_argument("--variants", nargs="+", help="default: those of the task")
    parser.add_argument("--memory", action="store_true", help="measure it, and no time")
    parser.add_argument("--threads", type=int, help="of every variant (default: PyTorch's)")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    args.variants = args.variants or together(args.task, args.memory)
    if unknown := set(args.variants) - set(VARIANTS[args.task]):
        parser.error(f"{args.task} has no {', '.join(unknown)}: {', '.join(VARIANTS[args.task])}")
    if args.task in ("generate", "train"):
        args.length = args.length or {"generate": 32, "train": 128}[args.task]
    if args.texts is None and args.length is None:
        parser.error(f"{args.task} needs --texts or --length")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    for label, model, tokenizer in models(args):
        measure(label, model, tokenizer, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
