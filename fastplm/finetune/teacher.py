"""What a fine-tuned teacher says of the training examples."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from fastplm.data._folder import say
from fastplm.errors import DataError
from fastplm.finetune.models import check_model, longest, read_config, read_tokenizer
from fastplm.finetune.settings import ENCODERS, FinetuneArguments
from fastplm.finetune.tasks._task import Logits, Task, predict
from fastplm.run.checkpoint import config_at, weights_at

#: Settings of the student that its teacher does not have.
_OF_STUDENTS = (
    *("teacher_weight", "teacher_temperature", "from_scratch", "layer_decay", "lm_weight"),
    *ENCODERS,
)


def order_of_labels(task: Task) -> list[int]:
    """``task.teacher_order`` of the teacher: the number that each label has in its head."""
    return task.teacher_order(config_at("finetune", "teacher", str(task.args.teacher)))


def teacher_logits(task: Task, device: torch.device) -> list[Logits]:
    """What the teacher says of the training examples of a task, once and without dropout.

    It reads them with its own tokenizer; for tags and answers this must be the model's, as these
    are predicted for tokens.

    Args:
        task: that of the model.
        device: where the teacher computes.

    Raises:
        DataError: the teacher has no head for this task, or other tokens.
    """
    args, order = task.args, order_of_labels(task)
    own: dict[str, Any] = {"model": args.teacher, "library": "transformers", "teacher": None}
    own |= {name: FinetuneArguments.__dataclass_fields__[name].default for name in _OF_STUDENTS}
    settings = args.changed(**own)
    tokenizer, config = read_tokenizer(settings), read_config(settings)
    check_model(settings, config)
    length = longest(settings, config, tokenizer)
    theirs = type(task)(settings, config, task.train, task.train, tokenizer, length, task.known)
    kind = getattr(transformers, theirs.auto)
    expected = f"a checkpoint that was fine-tuned with --task {args.task}"
    model, _ = weights_at(
        "finetune", "teacher", str(args.teacher), expected, kind, dtype=torch.float32
    )
    read, _ = theirs.features(task.train)
    tokens = [[feature["input_ids"] for feature in each] for each in (read, task.dataset.features)]
    same = not task.of_tokens or tokens[0] == tokens[1]
    got, fix = f"{args.teacher}, whose tokens are others", "Choose another teacher."
    args.check("teacher", same, "the tokenizer of the model", fix, got, DataError)
    trainer = SimpleNamespace(
        model=model.to(device),
        args=SimpleNamespace(eval_batch_size=args.batch_size, device=device),
        data_collator=theirs.collator(),
        compute_loss_context_manager=contextlib.nullcontext,
    )
    say(f"The teacher reads {len(read):,} training samples, once.")
    found = predict(trainer, theirs, read)
    if task.of_tokens:  # without the padding of the batches
        lengths = [len(feature["input_ids"]) for feature in read]
        found = [tuple(x[:n] for x in each) for each, n in zip(found, lengths, strict=True)]
    if order:
        found = [tuple(x[..., order] for x in each) for each in found]
    return found
