"""Hidden states of an encoder on a CPU: fastplm beside what users would take in its place.

    pip install "fastplm[cpu-peers]"
    python benchmarks/peers_cpu.py --texts FILE --rows FILE.csv [--model DIR] [--batch-size 1 8]

Texts are taken in their order, ``--batch-size`` at once, so a batch has the padding that texts of
natural lengths have. All variants have the same weights in fp32 and the same number of threads, and
take turns, batch by batch. First their outputs must agree on every token. A row has the median over
the batches of the fastest round of each, the share of padding, and the slowest call in a hundred.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import fastplm
from harness import append_row, machine_line

Batch = dict[str, Tensor]
Run = Callable[[Batch], Any]
FIELDS = (
    *("date", "machine", "torch", "triton", "commit", "model", "batch", "batches", "padding"),
    *("variant", "version", "ms", "p99_ms", "texts_per_s", "times_transformers", "difference"),
)
#: Outputs may differ by so much, in states of a size of about 1.
ALLOWED = 1e-4
#: Seconds until the threads of a runtime stop to wait busily for more work.
ASLEEP = 5e-3
SIZES = {
    "minilm": dict(hidden_size=384, num_hidden_layers=6, num_attention_heads=12),
    "bert-base": dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    "electra-small": dict(hidden_size=256, num_hidden_layers=12, num_attention_heads=4),
}


class Names(torch.nn.Module):
    """A model with its two inputs by position, as ONNX's exporter passes them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state


# --- the variants: functions of a model that return a function of a batch -------------------------


def of_torch(model: torch.nn.Module) -> Run:
    def run(batch: Batch) -> Tensor:
        with torch.inference_mode():
            return model(**batch).last_hidden_state

    return run


def of_transformers(model: Any, folder: Path) -> Run:
    return of_torch(model)


def of_fastplm(model: Any, folder: Path) -> Run:
    return of_torch(fastplm.accelerate(model))


def of_compile(model: Any, folder: Path) -> Run:
    return of_torch(torch.compile(model, dynamic=True))


def exported(model: Any, folder: Path) -> Path:
    """The model as an ONNX file of any batch and length."""
    path = folder / "model.onnx"
    if not path.exists():
        model = copy.deepcopy(model)
        model.set_attn_implementation("eager")
        ids = torch.randint(1, 99, (2, 8))
        axes = {0: "batch", 1: "length"}
        torch.onnx.export(
            Names(model),
            (ids, torch.ones_like(ids)),
            str(path),
            input_names=["input_ids", "attention_mask"],
            output_names=["states"],
            dynamic_axes={"input_ids": axes, "attention_mask": axes, "states": axes},
            dynamo=False,
            opset_version=17,
        )
    return path


def of_session(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])

    def run(batch: Batch) -> Any:
        return session.run(None, {name: each.numpy() for name, each in batch.items()})[0]

    return run


def of_onnxruntime(model: Any, folder: Path) -> Run:
    return of_session(exported(model, folder))


def of_onnxruntime_fused(model: Any, folder: Path) -> Run:
    """With its own fused attention, layer norm and GELU."""
    from onnxruntime.transformers import optimizer

    fused = optimizer.optimize_model(
        str(exported(model, folder)),
        model_type="bert",
        num_heads=model.config.num_attention_heads,
        hidden_size=model.config.hidden_size,
    )
    fused.save_model_to_file(str(folder / "fused.onnx"))
    return of_session(folder / "fused.onnx")


def of_openvino(model: Any, folder: Path) -> Run:
    import openvino

    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }
    compiled = openvino.Core().compile_model(str(exported(model, folder)), "CPU", settings)
    request, output = compiled.create_infer_request(), compiled.output(0)

    def run(batch: Batch) -> Any:
        given = {name: each.numpy() for name, each in batch.items()}
        return request.infer(given, share_inputs=True)[output]

    return run


VARIANTS: dict[str, tuple[str, Callable[[Any, Path], Run]]] = {
    "transformers sdpa": ("transformers", of_transformers),
    "torch.compile": ("torch", of_compile),
    "onnxruntime": ("onnxruntime", of_onnxruntime),
    "onnxruntime fused": ("onnxruntime", of_onnxruntime_fused),
    "openvino": ("openvino", of_openvino),
    "fastplm": ("fastplm", of_fastplm),
}


# --- batches --------------------------------------------------------------------------------------


def lengths_of(path: Path, tokenizer: Any) -> list[int]:
    """The tokens of each line's last column; without a tokenizer, guessed from its words."""
    lines = [line.split("\t")[-1] for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line.strip()]
    if tokenizer is not None:
        return [len(ids) for ids in tokenizer(lines, truncation=True)["input_ids"]]
    return [2 + len(line.split()) * 4 // 3 for line in lines]


def batches_of(lengths: list[int], size: int, count: int, longest: int) -> list[Batch]:
    """Random ids of these lengths."""
    made = []
    for first in range(0, min(len(lengths), size * count) - size + 1, size):
        part = torch.tensor(lengths[first : first + size]).clamp(max=longest)
        mask = (torch.arange(int(part.max())) < part[:, None]).long()
        made.append({"input_ids": torch.randint(1, 999, mask.shape) * mask, "attention_mask": mask})
    return made


def difference(run: Run, expected: Run, batches: list[Batch]) -> float:
    """The largest difference of a token's states."""
    most = 0.0
    for batch in batches:
        seen = batch["attention_mask"].bool().numpy()
        one, other = np.asarray(run(batch)), np.asarray(expected(batch))
        most = max(most, float(np.abs(one - other)[seen].max()))
    return most


def timed(variants: dict[str, Run], batches: list[Batch], rounds: int) -> dict[str, np.ndarray]:
    """Milliseconds of each round and batch.

    A variant is alone in most programs, so here it finds threads of its own awake, those of the
    others asleep, and its weights in the caches as far as they fit: the call before is not timed.
    """
    took = {name: np.zeros((rounds, len(batches))) for name in variants}
    for turn in range(rounds):
        for at, batch in enumerate(batches):
            for name, run in variants.items():
                time.sleep(ASLEEP)
                run(batch)
                start = time.perf_counter()
                run(batch)
                took[name][turn, at] = 1e3 * (time.perf_counter() - start)
    return took


# --- rows -----------------------------------------------------------------------------------------


def ready(model: Any, names: list[str], folder: Path) -> dict[str, Run]:
    """The variants that are installed; a line says which one is not, and why."""
    made = {}
    for name in names:
        try:
            made[name] = VARIANTS[name][1](copy.deepcopy(model), folder)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return made


def compare(model: Any, label: str, lengths: list[int], args: argparse.Namespace) -> None:
    longest = model.config.max_position_embeddings
    with tempfile.TemporaryDirectory() as folder:
        variants = ready(model, args.variants, Path(folder))
        for size in args.batch_size:
            batches = batches_of(lengths, size, args.batches, longest)
            slots = sum(batch["attention_mask"].numel() for batch in batches)
            padding = 1 - sum(int(batch["attention_mask"].sum()) for batch in batches) / slots
            expected = variants["transformers sdpa"]
            away = {name: difference(run, expected, batches) for name, run in variants.items()}
            took = timed(variants, batches, args.rounds)
            stock = np.median(took["transformers sdpa"].min(0))
            for name, times in took.items():
                ms = float(np.median(times.min(0)))
                row: dict[str, Any] = {**machine_line(), "model": label, "batch": size}
                row["batches"] = len(batches)
                row |= {"padding": f"{padding:.2f}", "variant": name}
                row |= {"version": importlib.metadata.version(VARIANTS[name][0])}
                right = away[name] <= ALLOWED
                row["difference"] = f"{away[name]:.1e}" + ("" if right else ", too much")
                if right:
                    row |= {"ms": f"{ms:.3f}", "p99_ms": f"{np.quantile(times, 0.99):.3f}"}
                    row |= {"texts_per_s": f"{1e3 * size / ms:.0f}"}
                    row |= {"times_transformers": f"{stock / ms:.2f}"}
                append_row(args.rows, FIELDS, row)
                print({key: row.get(key, "") for key in FIELDS[5:]}, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True, help="lines that end in a text")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file that rows are added to")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint of a BERT")
    parser.add_argument("--sizes", nargs="*", default=[], choices=SIZES, help="with random weights")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 8, 32])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--threads", type=int, help="of every variant (default: PyTorch's)")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer, models = None, {}
    if args.model is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        models[args.model.name] = transformers.AutoModel.from_pretrained(args.model)
    for name in args.sizes:
        shape = SIZES[name]
        config = transformers.BertConfig(**shape, intermediate_size=4 * shape["hidden_size"])
        models[name] = transformers.BertModel(config)
    lengths = lengths_of(args.texts, tokenizer)
    for name, model in models.items():
        compare(model.eval(), name, lengths, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
