"""What the cells of a study cost, before they run: their FLOPs, and from these their time.

The FLOPs of a pre-training are the library's own count (``run/flops.py``). For fine-tuning
and scoring they follow from the size of the files and are about right; they weigh cells of one
command against each other, and measured seconds of finished cells turn them into time.
"""

from __future__ import annotations

import functools
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fastplm.data.sources import HUB, is_table, texts_of
from fastplm.finetune.mixture import counts_of_epoch, read_parts
from fastplm.finetune.tasks import TASKS, task_class
from fastplm.run.checkpoint import config_at
from fastplm.run.flops import flops_a_token, training_flops

#: Tokens of a word, and special tokens of a text.
_A_WORD, _SPECIAL = 1.3, 2
#: Bytes of a minimal pair in a file, tokens of its sentence, and paradigms, as in BLiMP.
_PAIR_BYTES, _PAIR_TOKENS, _PARADIGMS = 400, 10, 67
#: The share of a block that T5's decoder has to write.
_SPANS = 0.23
_TIMED = 0.2  # seconds


def cost_of(command: str, args: Any, model: Any, folder: Path = Path()) -> float:
    """The FLOPs of a command, about.

    Args:
        command: its name.
        args: its settings.
        model: the configuration of the model that it makes or reads.
        folder: the one that it runs in.
    """
    if getattr(args, "flops", None) is not None:  # a budget
        return float(args.flops)
    if command == "pretrain":
        return _of_pretraining(args, model)
    if command == "distill":
        tokens = args.steps * args.batch_size * args.gradient_accumulation * args.block_size
        return tokens * flops_a_token(model, args.block_size)
    if command == "finetune":
        return _of_finetuning(args, model, folder)
    return _of_scoring(args, model)


def configuration_of(args: Any) -> Any:
    """The configuration that a pre-training makes, with the most tokens its vocabulary may have."""
    from fastplm.pretrain.objectives import JOINT_FAMILIES
    from fastplm.pretrain.presets import configuration

    joint = args.joint_settings() if args.preset.family in JOINT_FAMILIES else None
    return configuration(
        args.preset,
        vocab_size=args.vocab_size,
        block_size=args.block_size,
        objective=args.objective,
        joint=joint,
    )


@functools.cache
def config_at_folder(folder: Path) -> Any:
    """The configuration of a checkpoint that is there."""
    return config_at("study", "model", folder)


def _of_pretraining(args: Any, config: Any) -> float:
    from fastplm.pretrain.objectives import objective_of

    if args.objective == "spans":  # a tokenizer alone would say how long its targets are
        block, targets = args.block_size, round(_SPANS * args.block_size)
        return flops_a_token(config, block, targets) * args.samples * (block + targets)
    objective = objective_of(args, cast(Any, None))
    return objective.tokens_of(args.samples) * objective.flops_a_token(config)


def _of_finetuning(args: Any, config: Any, folder: Path) -> float:
    parts = [_examples(part, folder) for part in [*read_parts(args).values()] or [args]]
    of_parts = counts_of_epoch(args, [count for count, _ in parts])
    count = sum(of_parts)
    words = sum(n * mean for n, (_, mean) in zip(of_parts, parts, strict=True)) / count
    most = args.max_samples
    counts = most if isinstance(most, list) else [most or count]
    longest = args.max_length or TASKS[args.task].max_length
    length = round(min(_A_WORD * words + _SPECIAL, longest))
    each = _of_sequence(config, length)
    runs = args.seeds
    if isinstance(args.learning_rate, list):
        runs += len(args.learning_rate)
    passes = [
        args.steps * args.batch_size if args.steps else args.epochs * min(n, count) for n in counts
    ]
    return each * runs * sum(passes)


def _of_sequence(config: Any, length: int) -> float:
    targets = (length,) if config.is_encoder_decoder else ()
    return training_flops(config, (length,), targets, masked=0.0)


def _of_scoring(args: Any, config: Any) -> float:
    path = Path(args.data)
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as inside:
            size = sum(each.file_size for each in inside.infolist())
    pairs = max(1, size // _PAIR_BYTES)
    if args.max_pairs:
        pairs = min(pairs, _PARADIGMS * args.max_pairs)
    # Each token of a sentence is masked once, or all are read in one go.
    causal = config.is_encoder_decoder or config.model_type in ("gpt2", "openai-gpt")
    times = 1 if causal else _PAIR_TOKENS
    return 2 * pairs * times * _of_sequence(config, _PAIR_TOKENS) / 3


def _examples(args: Any, folder: Path) -> tuple[int, float]:
    """How many examples a file has, and the mean number of words of one."""
    data = str(args.data if str(args.data).startswith(HUB) else folder / args.data)
    columns = tuple(args.text_columns) if args.text_columns else None
    targets = args.targets and str(folder / args.targets)
    return _counted(args.task, data, columns, args.label_column, targets)


@functools.cache
def _counted(
    task: str, data: str, columns: Any, label: str | None, targets: str | None
) -> tuple[int, float]:
    if TASKS[task].running_text:  # as many as fit
        if is_table(data):
            letters = sum(len(text or "") for _, text in texts_of(data))
        else:
            letters = Path(data).stat().st_size
        return max(1, letters // 600), 90.0
    options = SimpleNamespace(text_columns=columns, label_column=label)
    found = task_class(task).read(cast(Any, options), data, targets, TASKS[task].max_length)
    words = sum(len(str(text).split()) for each in found for text in each.texts)
    return max(1, len(found)), words / max(1, len(found))


def product_speed(width: int, threads: int) -> float:
    """The FLOPs a second of a matrix product of a model's width: more than a training reaches."""
    import torch

    from fastplm.run.threads import using_threads

    with using_threads(threads), torch.no_grad():
        rows = torch.randn(1024, width, device="cpu")
        weight = torch.randn(width, 4 * width, device="cpu")
        rows @ weight
        begun, done = time.perf_counter(), 0
        while time.perf_counter() - begun < _TIMED:
            rows @ weight
            done += 1
        return done * 2 * 1024 * width * 4 * width / (time.perf_counter() - begun)


def amount(value: float, unit: str) -> str:
    """A number with three digits, such as 3.1 TFLOP."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:,.3g} Z{unit}"
