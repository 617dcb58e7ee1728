"""How many minimal pairs the frequency of tokens alone gets right: a unigram over a tokenizer.

    python studies/unigram_pairs.py DIR [DIR ...] --corpus FILE --data FILE --out FILE.tsv

A sentence has the sum of the logarithms of its tokens' shares in the text, each count plus a half,
as a language model that has learned nothing else. A pair is right if the acceptable sentence has
the higher sum, and half right if the sums are equal. ``FILE.tsv`` has a row for each paradigm and
one of means, with the accuracy by each tokenizer DIR, under its name.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import transformers

from fastplm.data.minimal_pairs import MinimalPair, read_pairs
from fastplm.pretrain.data import open_corpus


def log_shares(tokenizer: transformers.PreTrainedTokenizerBase, corpus: Path) -> np.ndarray:
    """The logarithm of each token's share in a text: fp64 [V]."""
    counts = np.full(len(tokenizer), 0.5)
    documents = iter(open_corpus([corpus]))
    while some := list(islice(documents, 64)):
        for ids in tokenizer(some, add_special_tokens=False)["input_ids"]:
            counts += np.bincount(ids, minlength=len(counts))
    return np.log(counts / counts.sum())


def accuracies(
    tokenizer: transformers.PreTrainedTokenizerBase, corpus: Path, pairs: list[MinimalPair]
) -> dict[str, float]:
    """By paradigm, and of all of them the mean."""
    shares = log_shares(tokenizer, corpus)
    good, bad = (
        tokenizer([getattr(pair, side) for pair in pairs], add_special_tokens=False)["input_ids"]
        for side in ("good", "bad")
    )
    right: dict[str, list[float]] = defaultdict(list)
    for pair, ours, theirs in zip(pairs, good, bad, strict=True):
        more = np.sign(round(shares[ours].sum() - shares[theirs].sum(), 9))
        right[pair.paradigm].append((1 + more) / 2)
    means = {name: float(np.mean(each)) for name, each in sorted(right.items())}
    return means | {"mean": float(np.mean(list(means.values())))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tokenizers", type=Path, nargs="+", help="folders of tokenizers")
    parser.add_argument("--corpus", type=Path, required=True, help="text whose tokens are counted")
    parser.add_argument("--data", type=Path, required=True, help="minimal pairs, as for score")
    parser.add_argument("--out", type=Path, required=True, help="TSV file that is written")
    args = parser.parse_args()
    pairs = read_pairs(args.data)
    found = {}
    for folder in args.tokenizers:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        found[folder.name] = accuracies(tokenizer, args.corpus, pairs)
        print(f"{folder.name}: a unigram has {found[folder.name]['mean']:.4f}")
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["UID", *found])
        for name in next(iter(found.values())):
            writer.writerow([name, *(f"{each[name]:.4f}" for each in found.values())])


if __name__ == "__main__":
    main()
