"""What ``fastplm.keep_memory`` gives to a training on a CPU.

    python benchmarks/keep_memory.py --corpus FILE --rows FILE [--rounds 3] [--threads 2]

Each measurement is a process of its own, which takes the steps of a model by the library's
training loop for some seconds, after warm-up; the settings take turns, so that other load slows all
of them. A row has the median of the rounds, in milliseconds a step, and of these processes the
largest memory at its peak and the fewest page faults, from its start to its end.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import append_row, machine_line

#: Names of models, and their options.
MODELS = {
    "BERT, 4 layers of width 128, 64 x 32 tokens": {
        **{"arch": "bert-tiny", "layers": 4, "objective": "mlm", "vocab_size": 2000},
        **{"block_size": 32, "batch_size": 64, "dropout": 0.0},
    },
    "GPT-2, 8 layers of width 384, 64 x 64 tokens": {
        **{"arch": "gpt2-mini", "layers": 8, "hidden": 384, "heads": 6, "vocab_size": 8000},
        **{"block_size": 64, "batch_size": 64, "dropout": 0.1},
    },
    "BERT-base, 16 x 128 tokens": {
        **{"arch": "bert-base", "objective": "mlm", "vocab_size": 8000},
        **{"block_size": 128, "batch_size": 16},
    },
}
#: What is passed to ``keep_memory``, or None where it is not called.
SETTINGS = {"as PyTorch": None, "kept": False, "kept, huge pages": True}
FIELDS = (
    *("date", "machine", "torch", "triton", "commit"),
    *("model", "threads", "setting", "step_ms", "of_first", "peak_mb", "page_faults"),
)


def child(given: dict[str, Any]) -> None:
    """Take steps, and print what they took."""
    import torch

    import fastplm
    from fastplm.pretrain.run import rehearse
    from fastplm.pretrain.settings import PretrainArguments

    torch.set_num_threads(given["threads"])
    if given["huge_pages"] is not None:
        fastplm.keep_memory(huge_pages=given["huge_pages"])
    with tempfile.TemporaryDirectory() as folder:
        args = PretrainArguments(
            **given["options"],
            **{"corpus": [given["corpus"]], "cache": given["cache"], "out": folder},
            **{"steps": 10_000, "report_to": "none", "save_every": 1 << 40, "lr": 1e-3},
        )
        seconds = rehearse(args, patience=given["patience"]).seconds
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps([1e3 * seconds, used.ru_maxrss / 1024, used.ru_minflt]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", help="text to train on")
    parser.add_argument("--rows", type=Path, help="CSV file to which the rows are appended")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--patience", type=float, default=6.0, help="seconds of each measurement")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(json.loads(args.child))
    with tempfile.TemporaryDirectory() as cache:
        for model, options in MODELS.items():
            given = {"options": options, "corpus": args.corpus, "cache": cache}
            given |= {"threads": args.threads, "patience": args.patience}
            found: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
            for _ in range(args.rounds):
                for name, huge_pages in SETTINGS.items():
                    words = json.dumps(given | {"huge_pages": huge_pages})
                    command = [sys.executable, __file__, "--child", words]
                    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
            first = statistics.median(run[0] for run in found["as PyTorch"])
            for name, runs in found.items():
                median = statistics.median(run[0] for run in runs)
                row = {"model": model, "threads": args.threads, "setting": name}
                row["step_ms"] = f"{median:.1f}"
                row["of_first"] = f"{median / first:.3f}"
                row["peak_mb"] = round(max(run[1] for run in runs))
                row["page_faults"] = min(run[2] for run in runs)
                append_row(args.rows, FIELDS, machine_line() | row)


if __name__ == "__main__":
    main()
