"""Scores of texts, against minicons: ``python benchmarks/scoring.py --model DIR --texts FILE``.

With ``--pairs FILE`` in place of ``--texts`` the texts are the sentences of minimal pairs, drawn
evenly from the file, and a score is the sum of a sentence; the decoder reads the beginning of text
first, in both libraries.

The texts and the weights are the same, and each run has its own process: first the tokenizer and
the model are loaded and a short text is scored, then the clock starts. Memory is the highest
resident size from there on (VmHWM, which Linux resets) less the resident size before. The libraries
take turns, and the shortest time counts. minicons gets ``--batches`` texts at a time.

A checkpoint without a head for masked tokens gets one, with random weights and the tied embeddings.
The decoder is a GPT-2 with random weights, of the same width and depth, its vocabulary trained on
the texts.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METRICS = ("original", "within_word_l2r", "log-likelihood")
_WARM_UP = "It is short."
_VOCABULARY = 30_522


def lines_of(path: Path, count: int) -> list[str]:
    """The first lines that are not blank."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.strip()][:count]


def sentences_of(path: Path, count: int) -> list[str]:
    """The sentences of minimal pairs that are drawn evenly from a file, pair by pair."""
    from fastplm.data.minimal_pairs import read_pairs

    pairs = [pair for pair in read_pairs(path) if pair.good != pair.bad]
    return [text for i in range(count) for text in pairs[i * len(pairs) // count][:2]]


# --- a run, in a process of its own ---------------------------------------------------------------


def memory(name: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the highest."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) << 10


def ours(folder: str, metric: str, batch: int, pairs: bool) -> Any:
    from transformers import AutoTokenizer

    from fastplm.inference.minimal_pairs import minimal_pairs
    from fastplm.inference.score import log_likelihood, pseudo_log_likelihood
    from fastplm.models import AutoModelForCausalLM, AutoModelForMaskedLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if pairs:
        causal = metric == "log-likelihood"
        kind, method = (AutoModelForCausalLM, None) if causal else (AutoModelForMaskedLM, metric)
        judge = kind.from_pretrained(folder)

        def run(texts: list[str]) -> list[list[float]]:
            of = zip(texts[::2], texts[1::2], strict=True)
            scores = minimal_pairs(judge, tokenizer, of, method=method)
            both = zip(scores.good.tolist(), scores.bad.tolist(), strict=True)
            return [[value] for pair in both for value in pair]

        return run
    if metric == "log-likelihood":
        decoder = AutoModelForCausalLM.from_pretrained(folder)
        return lambda texts: [
            s.log_probs.tolist() for s in log_likelihood(decoder, tokenizer, texts)
        ]
    model = AutoModelForMaskedLM.from_pretrained(folder)
    return lambda texts: [
        score.log_probs.tolist()
        for score in pseudo_log_likelihood(model, tokenizer, texts, method=metric)
    ]


def minicons(folder: str, metric: str, batch: int, pairs: bool) -> Any:
    import transformers
    from minicons import scorer

    # minicons 0.3.39 uses a name of Transformers 4.
    base: Any = transformers.PreTrainedTokenizerBase
    if not hasattr(base, "batch_encode_plus"):
        base.batch_encode_plus = base.__call__

    options: dict[str, Any] = {}
    if metric == "log-likelihood":
        model = scorer.IncrementalLMScorer(folder, "cpu")
        options = {"bos_token": True} if pairs else {}
    else:
        model = scorer.MaskedLMScorer(folder, "cpu", PLL_metric=metric)
        options = {"PLL_metric": metric}

    def run(texts: list[str]) -> list[list[float]]:
        found = []
        for start in range(0, len(texts), batch):
            for text in model.token_score(texts[start : start + batch], **options):
                scores = [score for _, score in text]
                # minicons gives a decoder's first token the score 0.
                scores = scores[1:] if metric == "log-likelihood" else scores
                found.append([sum(scores)] if pairs else scores)
        return found

    return run


def child(settings: dict[str, Any]) -> dict[str, Any]:
    import torch

    torch.set_num_threads(settings["threads"])
    texts = settings["texts"]
    make = minicons if settings["system"] == "minicons" else ours
    run = make(*(settings[name] for name in ("folder", "metric", "batch", "pairs")))
    run([_WARM_UP, _WARM_UP[:-2]])
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to VmRSS
    before, began = memory("VmRSS"), time.perf_counter()
    scores = run(texts)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "bytes": memory("VmHWM") - before, "scores": scores}


# --- all runs -------------------------------------------------------------------------------------


def make_models(
    checkpoint: Path, texts: list[str], folder: Path, plain: bool = False
) -> tuple[str, str]:
    """Folders with a masked language model and with a decoder.

    The decoder's tokenizer adds special tokens unless it is ``plain``.
    """
    import torch
    import transformers

    from fastplm.data import train_tokenizer

    transformers.logging.set_verbosity_error()  # a new head is expected
    torch.manual_seed(0)
    masked = transformers.AutoModelForMaskedLM.from_pretrained(checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    config = masked.config
    tokenizer.model_max_length = config.max_position_embeddings
    for part in (masked, tokenizer):
        part.save_pretrained(folder / "masked")
    letters = train_tokenizer(texts, _VOCABULARY, folder / "cache", "bytelevel")
    if plain:
        from tokenizers.processors import ByteLevel

        letters.backend_tokenizer.post_processor = ByteLevel()
        letters = transformers.PreTrainedTokenizerFast(
            tokenizer_object=letters.backend_tokenizer, bos_token="<s>", eos_token="</s>"
        )
    decoder = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=_VOCABULARY,
            n_embd=config.hidden_size,
            n_layer=config.num_hidden_layers,
            n_head=config.num_attention_heads,
            initializer_range=0.1,
        )
    )
    for part in (decoder, letters):
        part.save_pretrained(folder / "decoder")
    return str(folder / "masked"), str(folder / "decoder")


def apart(first: list[list[float]], second: list[list[float]]) -> float:
    """The largest difference of two log-probabilities."""
    assert [len(text) for text in first] == [len(text) for text in second], "other tokens"
    pairs = zip(first, second, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a BERT and its tokenizer")
    parser.add_argument("--texts", type=Path, help="texts, one a line")
    parser.add_argument("--pairs", type=Path, help="minimal pairs, in place of --texts")
    parser.add_argument("--count", type=int, default=200, help="how many lines or pairs are scored")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="texts for minicons")
    parser.add_argument("--metrics", nargs="+", choices=METRICS, default=METRICS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(json.load(sys.stdin))))
        return 0
    if args.model is None or (args.texts is None) == (args.pairs is None):
        parser.error("--model is needed, and either --texts or --pairs")
    systems = [("fastplm", 0)]
    if importlib.util.find_spec("minicons"):
        print(f"minicons {importlib.metadata.version('minicons')}")
        systems += [("minicons", size) for size in args.batches]
    else:
        print("minicons is not installed, and is left out: pip install minicons==0.3.39")

    def run(**settings: Any) -> dict[str, Any]:
        command = [sys.executable, __file__, "--child", "-"]
        given = json.dumps(settings)
        done = subprocess.run(command, input=given, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    print("| metric | threads | system | seconds | MB | times the seconds | times the MB | apart |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        if args.pairs is None:
            lines = lines_of(args.texts, args.count)
        else:
            lines = sentences_of(args.pairs, args.count)
        pairs = args.pairs is not None
        masked, decoder = make_models(args.model, lines, Path(scratch), pairs)
        for metric in args.metrics:
            for threads in args.threads:
                folder = decoder if metric == "log-likelihood" else masked
                found: dict[tuple[str, int], list[dict[str, Any]]] = {}
                for _ in range(args.rounds):
                    for system, batch in systems:
                        measured = run(
                            system=system,
                            batch=batch,
                            metric=metric,
                            threads=threads,
                            folder=folder,
                            texts=lines,
                            pairs=pairs,
                        )
                        found.setdefault((system, batch), []).append(measured)
                best = found[systems[0]]
                seconds = min(each["seconds"] for each in best)
                size = max(each["bytes"] for each in best)
                for (system, batch), runs in found.items():
                    name = f"{system}, {batch} at a time" if batch else system
                    own = min(each["seconds"] for each in runs)
                    top = max(each["bytes"] for each in runs)
                    gap = apart(runs[0]["scores"], best[0]["scores"])
                    print(
                        f"| {metric} | {threads} | {name} | {own:.1f} | {top / 1e6:.0f} "
                        f"| {own / seconds:.2f} | {top / size:.1f} | {gap:.0e} |",
                        flush=True,
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
