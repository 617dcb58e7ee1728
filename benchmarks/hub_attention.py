"""The Hub kernels of attention beside SDPA, in Transformers' own classes and sentence-transformers.

    python tools/hub_kernel.py OUT --compiled
    python benchmarks/hub_attention.py OUT [--families t5] [--model FOLDER] [--rounds 7]

The batches and all models but T5 are those of families.py; only the name of the attention differs.
T5 has the kernel for padded batches; its inference is that of its encoder. With
``--model``, a model of sentence-transformers also embeds texts, which it packs without padding if
it has the kernel. Losses and embeddings must agree before anything is timed. Rounds take turns, and
a row has the medians.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

import families
from harness import append_row, machine_folder, machine_line

PACKED, PADDED = KERNELS = "fastplm/flash-attn", "fastplm/attention"
FAMILIES = {"xlm-roberta": PACKED, "modernbert": PACKED, "t5": PADDED}
T5 = {
    "num_layers": 4,
    "d_model": 384,
    "d_kv": 64,
    "num_heads": 6,
    "d_ff": 1536,
    "vocab_size": 32128,
}
FIELDS = (
    *("model", "work", "padding", "rounds", "sdpa_ms", "kernel_ms", "ratio"),
    *("machine", "torch", "transformers", "commit", "date"),
)
WORDS = "the cat sat on a mat and the dogs ran to see what it was that made them so happy".split()


def pair(family: str) -> list[Any]:
    if family == "t5":
        name, config = "T5ForConditionalGeneration", transformers.T5Config(**T5)
        config.decoder_start_token_id, config.use_cache = 0, False
    else:
        config_name, name, special = families.FAMILIES[family]
        sizes = families.SIZES | {"intermediate_size": 1536, "pad_token_id": 1} | special
        config = getattr(transformers, config_name)(**sizes)
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    both = [
        kind._from_config(copy.deepcopy(config), attn_implementation=name)
        for name in ("sdpa", FAMILIES[family])
    ]
    both[1].load_state_dict(both[0].state_dict())
    return both


def compare(works: list[Callable[[], Any]], row: dict[str, Any], rounds: int, path: Path) -> None:
    """Time two functions in turns, and append the row."""
    times: list[list[float]] = [[], []]
    for index in range(rounds + 1):
        for work, found in zip(works, times, strict=True):
            spent = families.seconds(lambda work, _: work(), work, None)
            if index:
                found.append(spent)
    before, after = (1e3 * statistics.median(some) for some in times)
    row |= {"rounds": rounds, "sdpa_ms": f"{before:.1f}", "kernel_ms": f"{after:.1f}"}
    row["ratio"] = f"{before / after:.2f}"
    append_row(path, FIELDS, row)
    print(", ".join(str(row[name]) for name in FIELDS[:7]), flush=True)


def texts(padding: float) -> list[str]:
    """64 texts of 4 to 120 words, or all of 120."""
    lengths = torch.linspace(4, 120, 64).round().int() if padding else torch.full((64,), 120)
    lengths = lengths[torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    return [
        " ".join(WORDS[(3 * i + j) % len(WORDS)] for j in range(n)) for i, n in enumerate(lengths)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kernel", type=Path, help="the folder of tools/hub_kernel.py")
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--model", type=Path, help="a folder of sentence-transformers")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    folders = (f"{name}={args.kernel.absolute() / name.split('/')[1]}" for name in KERNELS)
    os.environ["LOCAL_KERNELS"] = ":".join(folders)
    about = {name: value for name, value in machine_line().items() if name in FIELDS}
    about["transformers"] = transformers.__version__
    path = Path(__file__).with_name("results") / machine_folder() / "hub_attention.csv"
    for family in args.families:
        both = pair(family)
        for padding in families.PADDINGS:
            given = families.batch(padding, both[0].config.vocab_size)
            expected, found = (families.training(model.eval(), given) for model in both)
            if abs(expected - found) > 1e-4 * abs(expected):
                raise SystemExit(f"{family}: loss {found}, and not {expected}")
            for work in (families.training, families.inference):
                for model in both:
                    model.train(work is families.training)
                encoder = family == "t5" and work is families.inference
                works = [partial(work, one.encoder if encoder else one, given) for one in both]
                row = about | {"model": family, "work": work.__name__, "padding": padding}
                compare(works, row, args.rounds, path)
    if args.model is None:
        return
    from sentence_transformers import SentenceTransformer

    both = [
        SentenceTransformer(str(args.model), model_kwargs={"attn_implementation": name})
        for name in ("sdpa", PACKED)
    ]
    for padding in (0.0, 0.5):
        given = texts(padding)
        # All in one batch, as a server gets them: sentence-transformers sorts longer lists.
        works = [partial(model.encode, given, batch_size=64) for model in both]
        first, second = (torch.tensor(work()) for work in works)
        torch.testing.assert_close(first, second, rtol=0, atol=1e-5)
        row = about | {"model": args.model.name, "work": "encode", "padding": padding}
        compare(works, row, args.rounds, path)


if __name__ == "__main__":
    main()
