"""The student and the teacher of a distillation, and the checkpoints that they are read from."""

from __future__ import annotations

import copy
import hashlib
import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fastplm.models
from fastplm.data import load_tokenizer
from fastplm.data._folder import file_hash
from fastplm.distill.objectives import DECODERS, KINDS, uniform_layers
from fastplm.distill.settings import DistillArguments
from fastplm.errors import DataError
from fastplm.models._base import most_positions
from fastplm.run.checkpoint import config_at, set_dropout, weights_at

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The files of a model and its tokenizer.
_READ = ("*.safetensors", "*.bin", "*.json", "*.txt", "*.model")
# `bert.encoder.layer.3.output.dense.weight`, `transformer.h.3.…`,
# `albert.encoder.albert_layer_groups.3.…`, `distilbert.transformer.layer.3.…`, `model.layers.3.…`:
# the list of layers, the index and the rest.
_LAYER = re.compile(r"(.*er\.layer|.*\bh|.*albert_layer_groups|.*\blayers)\.(\d+)\.(.*)")


# --- students -------------------------------------------------------------------------------------


def make_student(
    args: DistillArguments,
    teacher: Any,
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> Any:
    """The student of a run: from a checkpoint, from layers of the teacher, or with new weights."""
    if args.student is not None:
        student = load_model(args, "student", args.dropout)
        if args.recipe != "multilingual":
            check_vocabulary(args, "student", args.student, teacher_tokenizer)
        return student
    config = copy.deepcopy(teacher.config)
    layers = config.num_hidden_layers
    count = args.student_layers or max(1, layers // 2)
    expected = f"1 to {layers}, the layers of the teacher"
    args.check("student_layers", count <= layers, expected, "Lower it.", count)
    choose = uniform_layers if args.recipe == "tinybert" else spread_layers
    chosen = choose(count, layers)
    config.num_hidden_layers = count
    if (types := getattr(config, "layer_types", None)) is not None:  # windows of ModernBERT
        config.layer_types = [types[index] for index in chosen]
    groups = getattr(config, "num_hidden_groups", None)  # ALBERT's
    if groups is not None:
        config.num_hidden_groups = min(groups, count)
    new = args.student_hidden is not None or args.student_heads is not None
    if new:
        _change_width(args, config)
    set_dropout(config, args.dropout)
    options = _without_pooler(type(teacher))
    student = type(teacher)._from_config(config, **options)
    if not new:
        if groups is not None:
            chosen = spread_layers(config.num_hidden_groups, groups)
        copy_weights(student, teacher, chosen)
    if args.recipe == "multilingual":
        change_vocabulary(student, tokenizer, teacher_tokenizer, copied=not new)
    return student


def spread_layers(count: int, of: int) -> list[int]:
    """Choose ``count`` of ``of`` layers at equal distances, including the first and the last.

    For 6 of 12 these are DistilBERT's layers 0, 2, 4, 7, 9 and 11.
    """
    return [round(index * (of - 1) / max(count - 1, 1)) for index in range(count)]


def copy_weights(student: nn.Module, teacher: nn.Module, layers: list[int]) -> None:
    """Give a student the weights of a teacher of the same width.

    Args:
        student, teacher: models of the same class.
        layers: for each layer of the student, the index of the teacher's layer.
    """
    source = teacher.state_dict()

    def name_in_teacher(name: str) -> str:
        found = _LAYER.fullmatch(name)
        return name if found is None else f"{found[1]}.{layers[int(found[2])]}.{found[3]}"

    student.load_state_dict({name: source[name_in_teacher(name)] for name in student.state_dict()})


@torch.no_grad()
def change_vocabulary(
    student: Any,
    tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    copied: bool,
) -> None:
    """Give a student the embeddings of another vocabulary.

    Args:
        student: a model with the teacher's vocabulary.
        tokenizer, teacher_tokenizer: the tokenizers of the new and of the old vocabulary.
        copied: whether tokens in both vocabularies keep their embedding. All other embeddings are
            initialized like new weights.
    """
    ours, theirs = tokenizer.get_vocab(), teacher_tokenizer.get_vocab()
    if ours == theirs:
        return
    old = student.get_input_embeddings().weight.clone()
    new = torch.empty(len(tokenizer), old.shape[1], device="cpu").normal_(
        std=student.config.initializer_range
    )
    both = [(index, theirs[token]) for token, index in ours.items() if token in theirs]
    if copied and both:
        target, source = torch.tensor(both, device="cpu").T
        new[target] = old[source]
    student.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    student.get_input_embeddings().weight.copy_(new)
    student.config.pad_token_id = tokenizer.pad_token_id
    student.get_input_embeddings().padding_idx = tokenizer.pad_token_id


def _change_width(args: DistillArguments, config: Any) -> None:
    width = args.student_hidden or config.hidden_size
    heads = args.student_heads or config.num_attention_heads
    fix, expected = "Change it, or --student-heads.", f"a multiple of the {heads} attention heads"
    args.check("student_hidden", width % heads == 0, expected, fix, width)
    if getattr(config, "intermediate_size", None) is not None:
        config.intermediate_size = config.intermediate_size * width // config.hidden_size
    config.hidden_size, config.num_attention_heads = width, heads


# --- checkpoints ----------------------------------------------------------------------------------


def load_model(args: DistillArguments, argument: str, dropout: float | None = None) -> Any:
    """Load the model from the folder in an argument, with the head that the recipe needs.

    Raises:
        DataError: there is no such checkpoint, or it lacks weights.
    """
    path = getattr(args, argument)
    config = config_at("distill", argument, path)
    kind = _class_for(args, argument, config)
    set_dropout(config, dropout)
    options = {"config": config, "dtype": torch.float32, **_without_pooler(kind)}
    expected = (
        f"a {kind.__name__} with all weights, as the recipe {args.recipe} needs; tinybert, minilm "
        "and multilingual need no head"
    )
    model, _ = weights_at("distill", argument, path, expected, kind, **options)
    return model


def hash_of_model(folder: str | Path) -> str:
    """A hash of the files of a model and its tokenizer."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted({path for pattern in _READ for path in Path(folder).glob(pattern)}):
        digest.update(f"{path.name} {file_hash(path)} ".encode())
    return digest.hexdigest()


def _class_for(args: DistillArguments, argument: str, config: Any) -> Any:
    """The class of ``fastplm.models`` with which the recipe reads a checkpoint."""
    family, method = config.model_type, KINDS[args.recipe]
    expected = f"a model of the family {' or '.join(method.families)} for the recipe {args.recipe}"
    got = f"{getattr(args, argument)}, of the family {family}"
    fix = "Choose another checkpoint or recipe."
    args.check(argument, family in method.families, expected, fix, got, DataError)
    if family in DECODERS:
        return fastplm.models.GPT2LMHeadModel
    # Its head predicts the next token, not the masked one.
    reads_both = not getattr(config, "is_decoder", False)
    got = f"{getattr(args, argument)}, which reads from left to right"
    expected = "an encoder that reads in both directions"
    args.check(argument, reads_both, expected, fix, got, DataError)
    head = "ForMaskedLM" if argument == "generator" else method.head
    auto = getattr(fastplm.models, "AutoModel" + head.removeprefix("Model"))
    return auto._model_mapping[type(config)]


def _without_pooler(kind: Any) -> dict[str, bool]:
    """The argument that builds a backbone without a pooler, as no recipe would train it."""
    inits = (inspect.signature(base.__init__) for base in kind.__mro__[:-1])
    takes = any("add_pooling_layer" in init.parameters for init in inits)
    return {"add_pooling_layer": False} if takes else {}


def is_causal(config: Any) -> bool:
    return config.model_type in DECODERS


def check_vocabulary(
    args: DistillArguments, argument: str, path: Any, teacher_tokenizer: Any
) -> None:
    theirs = load_tokenizer(path, ())
    same = theirs.get_vocab() == teacher_tokenizer.get_vocab()
    expected = f"the vocabulary of the teacher, of {len(teacher_tokenizer):,} tokens"
    fix = "Choose a model with the same tokenizer; only multilingual distils into another one."
    got = f"{path}, with another one of {len(theirs):,} tokens"
    args.check(argument, same, expected, fix, got, DataError)


def check_pair(args: DistillArguments, student: Any, teacher: Any) -> None:
    """Check that ``block_size`` fits both models, and the sizes that the recipe compares."""
    ours, theirs = student.config, teacher.config
    (heads, layers, width), (their_heads, their_layers, their_width) = (
        (each.num_attention_heads, each.num_hidden_layers, each.hidden_size)
        for each in (ours, theirs)
    )

    def of_student(setting: str) -> str:
        """The name of the setting that determined this size of the student."""
        return "student" if args.student is not None else setting

    for config in (ours, theirs):
        longest = most_positions(config)
        expected = f"at most {longest}, the positions of student and teacher"
        fits = longest is None or args.block_size <= longest
        args.check("block_size", fits, expected, "Lower it.")
    if args.recipe in ("tinybert", "minilm"):
        expected = f"{their_heads}, as attention is compared head by head"
        fix = "Choose as many heads as the teacher has, or minilm-v2."
        got = f"{heads} attention heads"
        args.check(of_student("student_heads"), heads == their_heads, expected, fix, got)
    if args.recipe == "tinybert":
        expected = f"at most {their_layers}, the layers of the teacher"
        fix = "Choose a smaller student."
        name, got = of_student("student_layers"), f"{layers} layers"
        args.check(name, layers <= their_layers, expected, fix, got)
    if args.recipe == "multilingual":
        expected = f"{their_width}, the width of the teacher's vectors"
        fix = "Choose a student of the teacher's width."
        args.check(of_student("student_hidden"), width == their_width, expected, fix, width)
    if args.teacher_layer is not None:
        expected, there = f"1 to {their_layers}, the layers of the teacher", args.teacher_layer
        args.check("teacher_layer", there <= their_layers, expected, "Lower it.")
    if args.recipe == "minilm-v2":
        parts = args.relation_heads or their_heads
        expected = f"a divisor of both widths, {width} and {their_width}"
        divides = width % parts == 0 == their_width % parts
        args.check("relation_heads", divides, expected, "Choose another number.", parts)
