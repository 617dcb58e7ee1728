"""How many minimal pairs the frequency of tokens alone gets right: a unigram over a tokenizer.

    python benchmarks/unigram_pairs.py --tokenizer DIR --corpus FILE --data FILE --out FILE.tsv

A sentence has the sum of the logarithms of its tokens' shares in the text, each count plus a half,
as a language model that has learned nothing else. A pair is right if the acceptable sentence has
the higher sum, and half right if the sums are equal. ``FILE.tsv`` has a row for each paradigm, with
the accuracy and that of choosing the sentence with fewer tokens, and then their means.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from itertools import islice
from pathlib import Path

import numpy as np
import transformers

from fastplm.data.minimal_pairs import read_pairs
from fastplm.train.pretrain_data import open_corpus


def log_shares(tokenizer: transformers.PreTrainedTokenizerBase, corpus: Path) -> np.ndarray:
    """The logarithm of each token's share in a text: fp64 [V]."""
    counts = np.full(len(tokenizer), 0.5)
    documents = iter(open_corpus([corpus]))
    while some := list(islice(documents, 64)):
        for ids in tokenizer(some, add_special_tokens=False)["input_ids"]:
            counts += np.bincount(ids, minlength=len(counts))
    return np.log(counts / counts.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer")
    parser.add_argument("--corpus", type=Path, required=True, help="text whose tokens are counted")
    parser.add_argument("--data", type=Path, required=True, help="minimal pairs, as for score")
    parser.add_argument("--out", type=Path, required=True, help="TSV file that is written")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer)
    shares = log_shares(tokenizer, args.corpus)
    right: dict[str, list[tuple[float, float]]] = defaultdict(list)
    pairs = read_pairs(args.data)
    good, bad = (
        tokenizer([getattr(pair, side) for pair in pairs], add_special_tokens=False)["input_ids"]
        for side in ("good", "bad")
    )
    for pair, ours, theirs in zip(pairs, good, bad, strict=True):
        more = np.sign(round(shares[ours].sum() - shares[theirs].sum(), 9))
        shorter = np.sign(len(theirs) - len(ours))
        right[pair.paradigm].append(((1 + more) / 2, (1 + shorter) / 2))
    means = {name: np.mean(each, axis=0) for name, each in sorted(right.items())}
    means["mean"] = np.mean(list(means.values()), axis=0)
    with args.out.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(["UID", "unigram", "fewer_tokens"])
        writer.writerows(
            [name, f"{one:.4f}", f"{other:.4f}"] for name, (one, other) in means.items()
        )
    print(f"{len(tokenizer):,} tokens: a unigram has {means['mean'][0]:.4f}")


if __name__ == "__main__":
    main()
