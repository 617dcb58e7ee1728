"""The tokenizer and the model of a fine-tuning."""

from __future__ import annotations

import contextlib
import copy
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

import fastplm.models
from fastplm.data import load_tokenizer
from fastplm.data._folder import say
from fastplm.data.tokenizer import for_words
from fastplm.errors import DataError
from fastplm.finetune.frozen import Frozen, Kept
from fastplm.finetune.layers import check_layers
from fastplm.finetune.pairs import check_own_head
from fastplm.finetune.settings import ENCODERS, FinetuneArguments
from fastplm.finetune.tasks import CAUSAL, Labelled, Logits, Task, predict
from fastplm.models._base import most_positions
from fastplm.run.checkpoint import check_vocabulary_fits, config_at, set_dropout, weights_at
from fastplm.run.folder import loaded

#: What a GPT reads around its texts.
START, DELIMITER, EXTRACT = "<|start|>", "<|delimiter|>", "<|extract|>"
_PADDING = "<|padding|>"
#: Settings of the student that its teacher does not have.
_OF_STUDENTS = (
    *("teacher_weight", "teacher_temperature", "from_scratch", "layer_decay", "lm_weight"),
    *ENCODERS,
)


def read_config(args: FinetuneArguments, **settings: Any) -> Any:
    """The configuration of the checkpoint, with some settings of its own."""
    argument = "model" if args.encoder is None else "encoder"
    config = config_at("finetune", argument, args.checkpoint, **settings)
    causal = config.model_type in CAUSAL
    encodes = not causal and not config.is_encoder_decoder
    for name, able, expected in (
        ("both_orders", causal, "a GPT or GPT-2; an encoder reads two texts at once, in one order"),
        ("lm_weight", causal, "a GPT or GPT-2, which are language models"),
        *((name, encodes, "an encoder, such as BERT") for name in ENCODERS),
    ):
        value = getattr(args, name)
        default = args.__dataclass_fields__[name].default
        got = f"{value} with --model {args.model}, a {config.model_type}"
        args.check(name, able or value == default, expected, "Leave the option out.", got)
    if reads_to_the_right(config):
        expected = "an encoder that reads in both directions, as this task reads the first token"
        fix, got = "Choose another one.", f"{args.model}, which reads from left to right"
        args.check("model", args.task != "choice" and not args.own_head, expected, fix, got)
    check_layers(args, config)
    check_own_head(args, config)
    able = config.is_encoder_decoder or args.task != "seq2seq" or args.encoder is not None
    expected = "a model that writes texts from texts, such as T5 or BART"
    fix = "Choose another, or start one from an encoder: --encoder in place of --model."
    args.check("model", able, expected, fix, f"{args.model}, a {config.model_type}")
    return config


def reads_to_the_right(config: Any) -> bool:
    """Whether it is an encoder that reads from left to right."""
    causal = config.model_type in CAUSAL or config.is_encoder_decoder
    return not causal and getattr(config, "is_decoder", False)  # ALBERT has no such setting


# --- the tokenizer --------------------------------------------------------------------------------


def read_tokenizer(args: FinetuneArguments) -> Any:
    """The tokenizer of the checkpoint, which can pad and keeps two texts apart."""
    from transformers import AutoTokenizer

    tokenizer: Any = load_tokenizer(args.checkpoint, needs=())
    if args.task == "tagging" and hasattr(tokenizer, "add_prefix_space"):
        # A class that is saved keeps this, and not what ``for_words`` does to others.
        tokenizer = AutoTokenizer.from_pretrained(
            args.model, add_prefix_space=True, local_files_only=True
        )

    def check(able: bool, expected: str, fix: str, got: str) -> None:
        got = f"{args.checkpoint}, whose tokenizer {got}"
        args.check("model", able, expected, fix, got, DataError)

    kind, fix = type(tokenizer).__name__, "Save it as one, with a tokenizer.json."
    check(tokenizer.is_fast, "a fast tokenizer", fix, f"is {kind}")
    if args.task == "tagging":
        tokenizer = for_words(args.where, tokenizer)
    several = args.task not in ("tagging", "seq2seq")
    if several and tokenizer.num_special_tokens_to_add(pair=True) == 0:
        add_task_tokens(tokenizer)
    if several and args.task != "classification":
        apart = None in tokenizer("a", "b").sequence_ids()[1:-1]
        expected = "a tokenizer with a token between two texts"
        fix = "Give its tokenizer.json a post-processor that adds one."
        check(apart, expected, fix, "puts nothing between them")
    if tokenizer.pad_token is None:
        able, fix = tokenizer.eos_token is not None, "Add one with tokenizer.add_special_tokens."
        check(able, "a tokenizer that can pad", fix, "has no pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


def add_task_tokens(tokenizer: Any) -> None:
    """Make a tokenizer put start, delimiter and extract tokens around its texts.

    One text becomes ``start text extract``, two become ``start first delimiter second extract``.
    The tokens are special ones, and the saved tokenizer adds them, too.

    Source: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training",
    figure 1 and §3.3.
    """
    special: dict[str, Any] = {"additional_special_tokens": [START, DELIMITER, EXTRACT]}
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        special["pad_token"] = _PADDING
    tokenizer.add_special_tokens(special)
    names = (START, DELIMITER, EXTRACT)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A {EXTRACT}",
        pair=f"{START} $A {DELIMITER} $B:0 {EXTRACT}",
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names],
    )


def longest(args: FinetuneArguments, usual: int, config: Any, tokenizer: Any) -> int:
    """The tokens of a feature at most: ``args.max_length`` or, within the model's, ``usual``."""
    bound = min(tokenizer.model_max_length, most_positions(config) or tokenizer.model_max_length)
    length = min(usual, bound) if args.max_length is None else args.max_length
    args.check("max_length", length <= bound, f"{bound}, this model's", "Lower it.", length)
    return length


# --- the model ------------------------------------------------------------------------------------


def build_model(
    args: FinetuneArguments, task: Task, seed: int, kept: dict[Any, Kept] | None = None
) -> PreTrainedModel:
    """The model of a run, its head new: that of Transformers, or ours with the same weights.

    Args:
        args: the settings of the run.
        task: what the model learns.
        seed: of the new weights.
        kept: what a frozen backbone knows of the examples.
    """
    from transformers import set_seed

    set_seed(seed)
    model = task.new_model()
    if model is not None:
        return model
    args = args.changed(pooling=task.args.pooling)  # which the model decides
    own = args.needs_features
    config = read_config(args, **({} if own else task.config))
    set_dropout(config, args.dropout)
    if config.pad_token_id is None:
        config.pad_token_id = task.tokenizer.pad_token_id
    set_seed(seed)
    plain, new = _plain(args, "AutoModel" if own else task.auto, config)
    _make_room(args, task, plain)
    if own:
        model = _with_features(args, task, plain, seed)
    else:
        model = task.adapted(plain if args.library == "transformers" else _ours(args, plain))
    if args.freeze:
        layers, kept = 4 if args.features == "last-four" else 0, {} if kept is None else kept
        # Kept for ``FinetuningTrainer``.
        model.frozen = Frozen(model, kept, new_pooler="pooler" in new, layers=layers)
    return model


def _plain(args: FinetuneArguments, auto: str, config: Any) -> tuple[Any, set[str]]:
    """A model of Transformers, and the parts of its backbone that are new."""
    assert args.model is not None
    kind: Any = getattr(transformers, auto)
    expected = f"a checkpoint of a model with a head for {args.task}"
    if args.from_scratch:
        make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        expected = f"the configuration of a model with a head for {args.task}"
        load = functools.partial(make, config)
        return loaded("finetune", "model", args.model, expected, load).float(), set()
    options = {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}

    def is_new(model: Any, name: str) -> bool:
        if args.own_head:
            return False
        # A model without a head is the backbone itself.
        backbone = "" if auto == "AutoModel" else f"{model.base_model_prefix}."
        return "pooler." in name or not name.startswith(backbone)

    plain, missing = weights_at("finetune", "model", args.model, expected, kind, is_new, **options)
    missing = [name for name in missing if "pooler." in name]
    return plain, {"pooler"} if missing else set()


def _with_features(args: FinetuneArguments, task: Task, plain: Any, seed: int) -> Any:
    """An encoder with one of the heads that Transformers does not have."""
    from transformers import set_seed

    from fastplm.finetune.features import (
        FeaturesConfig,
        FeaturesForSequenceClassification,
        FeaturesForTokenClassification,
    )

    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    config = FeaturesConfig(
        encoder=plain.config.to_dict(),
        features=args.features,
        head=args.head,
        pooling=args.pooling or "mean",
        **task.config,
        **({} if args.dropout is None else {"dropout": args.dropout}),
    )
    tokens = args.task == "tagging"
    kind = FeaturesForTokenClassification if tokens else FeaturesForSequenceClassification
    encoder = None if args.library == "transformers" else _ours(args, plain)
    set_seed(seed)  # what was drawn until here depends on the library
    model = kind(config, plain)
    # The head reads no pooler; and to initialise the head changes what is in the encoder.
    model.encoder.load_state_dict({n: w for n, w in weights.items() if "pooler." not in n})
    if encoder is None:
        return model
    ours = kind(config, encoder)
    ours.load_state_dict(model.state_dict())
    return ours


def _make_room(args: FinetuneArguments, task: Task, model: Any) -> None:
    """Check that tokenizer and embedding belong together, and add rows for the tokens of a task.

    They are drawn as the model draws its own: the mean of the others, which is Transformers'
    default, would make start, delimiter and extract the same token.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    known = task.tokenizer.get_added_vocab()
    added = sum(name in known for name in (START, DELIMITER, EXTRACT, _PADDING))
    size = len(task.tokenizer)
    check_vocabulary_fits(args, "model", size - added, vocabulary)
    if size > vocabulary:
        model.resize_token_embeddings(size, mean_resizing=False)


def _ours(args: FinetuneArguments, plain: Any) -> Any:
    """The drop-in model of a model of Transformers, with its weights."""
    name = type(plain).__name__
    able, fix = name in fastplm.models.__all__, "Use --library transformers."
    got = f"{args.model}, a {name}"
    args.check("model", able, "a class of fastplm.models", fix, got, DataError)
    ours = getattr(fastplm.models, name)._from_config(
        copy.deepcopy(plain.config), attn_implementation="fastplm"
    )
    ours.load_state_dict(plain.state_dict())
    return ours


# --- the teacher ----------------------------------------------------------------------------------


def check_teacher(args: FinetuneArguments, task: Task) -> list[int]:
    """The number that each label of a task has in the head of the teacher.

    Raises:
        DataError: there is no such checkpoint, or it has other labels.
    """
    config = config_at("finetune", "teacher", str(args.teacher))
    if not isinstance(task, Labelled):
        outputs = getattr(config, "num_labels", 1)
        able = args.task != "regression" or outputs == 1
        got = f"{args.teacher}, which has {outputs} outputs"
        fix = "Fine-tune it with --task regression."
        args.check("teacher", able, "one output", fix, got, DataError)
        return []
    numbers = {str(name): number for number, name in config.id2label.items()}
    got = f"{args.teacher}, with the labels {', '.join(sorted(numbers))}"
    expected = f"those of this run: {', '.join(task.names)}"
    fix = "Fine-tune it on labels that are called so."
    args.check("teacher", {*numbers} == {*task.names}, expected, fix, got, DataError)
    return [numbers[name] for name in task.names]


def teacher_logits(
    args: FinetuneArguments, task: Task, features: list[Any], device: torch.device
) -> list[Logits]:
    """What the teacher says of the training examples of a task, once and without dropout.

    It reads them with its own tokenizer; for tags and answers this must be the model's, as these
    are predicted for tokens.

    Args:
        args: the settings.
        task: that of the model.
        features: of ``task.train``.
        device: where the teacher computes.

    Raises:
        DataError: the teacher has no head for this task, or other tokens.
    """
    order = check_teacher(args, task)
    own: dict[str, Any] = {"model": args.teacher, "library": "transformers", "teacher": None}
    own |= {name: FinetuneArguments.__dataclass_fields__[name].default for name in _OF_STUDENTS}
    settings = replace(args, **own)
    tokenizer, config = read_tokenizer(settings), read_config(settings)
    length = longest(settings, task.max_length, config, tokenizer)
    theirs = type(task)(settings, config, task.train, task.train, tokenizer, length, task.known)
    kind = getattr(transformers, theirs.auto)
    expected = f"a checkpoint that was fine-tuned with --task {args.task}"
    model, _ = weights_at(
        "finetune", "teacher", str(args.teacher), expected, kind, dtype=torch.float32
    )
    read, _ = theirs.features(task.train)
    of_tokens = args.task in ("tagging", "qa")
    same = not of_tokens or [f["input_ids"] for f in read] == [f["input_ids"] for f in features]
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
    if of_tokens:  # without the padding of the batches
        lengths = [len(feature["input_ids"]) for feature in read]
        found = [tuple(x[:n] for x in each) for each, n in zip(found, lengths, strict=True)]
    if order:
        found = [tuple(x[..., order] for x in each) for each in found]
    return found


def usual_learning_rate(args: FinetuneArguments, config: Any) -> float:
    """A peak learning rate for a width: small models learn with larger ones, heads with more."""
    if args.freeze or args.optimizer == "adafactor":
        return 1e-3
    width = getattr(config, "decoder", config).hidden_size
    return 2e-5 if width >= 1024 else 5e-5 if width >= 768 else 1e-4
