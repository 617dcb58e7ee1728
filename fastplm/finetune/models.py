"""The tokenizer and the model of a fine-tuning."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, set_seed

import fastplm.models
from fastplm.data import load_tokenizer
from fastplm.data.tokenizer import for_words
from fastplm.errors import DataError, about
from fastplm.finetune.features import (
    FeaturesConfig,
    FeaturesForSequenceClassification,
    FeaturesForTokenClassification,
)
from fastplm.finetune.frozen import Frozen
from fastplm.finetune.layers import check_layers
from fastplm.finetune.settings import ENCODERS, FinetuneArguments
from fastplm.finetune.tasks import TASKS, task_class
from fastplm.finetune.tasks._task import Task
from fastplm.models._base import most_positions
from fastplm.run.checkpoint import check_vocabulary_fits, config_at, set_dropout, weights_at
from fastplm.run.folder import loaded

#: What a GPT reads around its texts.
START, DELIMITER, EXTRACT = "<|start|>", "<|delimiter|>", "<|extract|>"
_PADDING = "<|padding|>"
#: The families with a causal backbone, whose classifiers read the last token.
CAUSAL = ("gpt2", "openai-gpt")


def read_config(args: FinetuneArguments, **settings: Any) -> Any:
    """The configuration of the checkpoint, with some settings of its own."""
    argument = "model" if args.encoder is None else "encoder"
    return config_at("finetune", argument, args.checkpoint, **settings)


def check_model(args: FinetuneArguments, config: Any) -> None:
    """Check that a model has what the settings and the task ask of it."""
    causal = config.model_type in CAUSAL
    for name, able, expected in (
        ("both_orders", causal, "a GPT or GPT-2; an encoder reads two texts at once, in one order"),
        ("lm_weight", causal, "a GPT or GPT-2, which are language models"),
        *((name, _is_encoder(config), "an encoder, such as BERT") for name in ENCODERS),
    ):
        got = f"{getattr(args, name)} with --model {args.model}, a {config.model_type}"
        args.check(name, able or args.is_default(name), expected, "Leave the option out.", got)
    check_layers(args, config)
    task_class(args.task).check_model(args, config)


def check_reads_both_ways(args: FinetuneArguments, config: Any) -> None:
    """Check that the first token of an encoder sees more than itself."""
    expected = "an encoder that reads in both directions, as this task reads the first token"
    got = f"{args.model}, which reads from left to right"
    args.check("model", not _reads_left_to_right(config), expected, "Choose another one.", got)


def pooling_of(args: FinetuneArguments, config: Any) -> str | None:
    """``args.pooling``; by default the last token's of a left-to-right encoder.

    Its first token sees nothing but itself.
    """
    last = _reads_left_to_right(config) and "pooling" in TASKS[args.task].options
    return "last" if last and args.pooling is None else args.pooling


def _is_encoder(config: Any) -> bool:
    return config.model_type not in CAUSAL and not config.is_encoder_decoder


def _reads_left_to_right(config: Any) -> bool:
    """Whether an encoder does, such as one that was pre-trained as a language model."""
    return _is_encoder(config) and getattr(config, "is_decoder", False)  # ALBERT has no such field


# --- the tokenizer --------------------------------------------------------------------------------


def read_tokenizer(args: FinetuneArguments) -> Any:
    """The tokenizer of the checkpoint, which can pad and keeps two texts apart."""
    with about(args.where, "model"):
        tokenizer: Any = load_tokenizer(args.checkpoint, needs=())
    inputs = task_class(args.task).inputs
    if inputs == "words" and hasattr(tokenizer, "add_prefix_space"):
        # A class that is saved keeps this, and not what ``for_words`` does to others.
        options = {"add_prefix_space": True, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, **options)

    def check(able: bool, expected: str, fix: str, got: str) -> None:
        got = f"{args.checkpoint}, whose tokenizer {got}"
        args.check("model", able, expected, fix, got, DataError)

    kind, fix = type(tokenizer).__name__, "Save it as one, with a tokenizer.json."
    check(tokenizer.is_fast, "a fast tokenizer", fix, f"is {kind}")
    if inputs == "words":
        tokenizer = for_words(args.where, tokenizer)
    elif inputs != "source" and tokenizer.num_special_tokens_to_add(pair=True) == 0:
        add_task_tokens(tokenizer)
    if inputs == "texts":
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


def longest(args: FinetuneArguments, config: Any, tokenizer: Any) -> int:
    """The most tokens of a feature: ``max_length``, or within the model's those of the task."""
    usual = TASKS[args.task].max_length
    bound = min(tokenizer.model_max_length, most_positions(config) or tokenizer.model_max_length)
    length = min(usual, bound) if args.max_length is None else args.max_length
    args.check("max_length", length <= bound, f"{bound}, this model's", "Lower it.", length)
    return length


# --- the model ------------------------------------------------------------------------------------


def build_model(task: Task, seed: int) -> PreTrainedModel:
    """The model of a task, its head new: that of Transformers, or ours with the same weights."""
    set_seed(seed)
    return task.make_model(functools.partial(_of_checkpoint, task, seed))


def _of_checkpoint(task: Task, seed: int) -> PreTrainedModel:
    args = task.args
    own = args.features != "last" or args.head != "linear" or args.pooling not in (None, "cls")
    config = read_config(args, **({} if own else task.config))
    set_dropout(config, args.dropout)
    if config.pad_token_id is None:
        config.pad_token_id = task.tokenizer.pad_token_id
    set_seed(seed)
    plain, new_pooler = _plain(args, "AutoModel" if own else task.auto, config)
    _make_room(task, plain)
    if own:
        model = _with_features(task, plain, seed)
    else:
        model = plain if args.library == "transformers" else _ours(args, plain)
    if args.freeze:
        layers = 4 if args.features == "last-four" else 0
        model.frozen = Frozen(model, task.dataset.kept, new_pooler=new_pooler, layers=layers)
    return model


def _plain(args: FinetuneArguments, auto: str, config: Any) -> tuple[Any, bool]:
    """A model of Transformers, and whether the checkpoint has no weights of its pooler."""
    assert args.model is not None
    kind: Any = getattr(transformers, auto)
    expected = f"a checkpoint of a model with a head for {args.task}"
    if args.from_scratch:
        make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        expected = f"the configuration of a model with a head for {args.task}"
        load = functools.partial(make, config)
        return loaded("finetune", "model", args.model, expected, load).float(), False
    options = {"config": config, "dtype": torch.float32, "ignore_mismatched_sizes": True}

    def is_new(model: Any, name: str) -> bool:
        if args.own_head:
            return False
        # A model without a head is the backbone itself.
        backbone = "" if auto == "AutoModel" else f"{model.base_model_prefix}."
        return "pooler." in name or not name.startswith(backbone)

    plain, missing = weights_at("finetune", "model", args.model, expected, kind, is_new, **options)
    return plain, any("pooler." in name for name in missing)


def _with_features(task: Task, plain: Any, seed: int) -> Any:
    """An encoder with one of the heads that Transformers does not have."""
    args = task.args
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    config = FeaturesConfig(
        encoder=plain.config.to_dict(),
        features=args.features,
        head=args.head,
        pooling=args.pooling or "mean",
        **task.config,
        **({} if args.dropout is None else {"dropout": args.dropout}),
    )
    tokens = task.auto == "AutoModelForTokenClassification"
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


def _make_room(task: Task, model: Any) -> None:
    """Check that tokenizer and embedding belong together, and add rows for the tokens of a task.

    They are drawn as the model draws its own: the mean of the others, which is Transformers'
    default, would make start, delimiter and extract the same token.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    known = task.tokenizer.get_added_vocab()
    added = sum(name in known for name in (START, DELIMITER, EXTRACT, _PADDING))
    size = len(task.tokenizer)
    check_vocabulary_fits(task.args, "model", size - added, vocabulary)
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


def usual_learning_rate(args: FinetuneArguments, config: Any) -> float:
    """A peak learning rate for a width: small models learn with larger ones, heads with more."""
    if args.freeze or args.optimizer == "adafactor":
        return 1e-3
    width = getattr(config, "decoder", config).hidden_size
    return 2e-5 if width >= 1024 else 5e-5 if width >= 768 else 1e-4
