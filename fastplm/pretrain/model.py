"""The model of a pre-training: new, or begun with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastplm import models
from fastplm.errors import DataError
from fastplm.models._base import most_positions
from fastplm.pretrain.objectives import JOINT_FAMILIES, learned_as, objective_of
from fastplm.pretrain.presets import configuration
from fastplm.pretrain.settings import PretrainPlan
from fastplm.run.checkpoint import (
    DROPOUTS,
    JOINT,
    check_vocabulary_fits,
    config_at,
    kind_of,
    weights_at,
)
from fastplm.run.folder import loaded

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

#: The settings of sizes, what configurations call them, and the value of one that has none.
_SIZES = (
    ("layers", "num_hidden_layers", None),
    ("hidden", "hidden_size", None),
    ("heads", "num_attention_heads", None),
    ("embedding_size", "embedding_size", None),
    ("parameter_sharing", "num_hidden_groups", None),
    ("parameter_sharing", "parameter_sharing", "all"),
    ("start_from", "intermediate_size", None),
)


def model_config(plan: PretrainPlan, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of the model of a run.

    Raises:
        DataError: the checkpoint of ``start_from`` is of another architecture or shape, has fewer
            positions than a block, or another vocabulary than its tokenizer.
    """
    made = configuration(
        plan.preset,
        vocab_size=len(tokenizer),
        block_size=plan.block_size,
        dropout=plan.dropout,
        attention_dropout=plan.attention_dropout,
        tokenizer=tokenizer,
        objective=plan.objective,
        joint=plan.joint_settings() if plan.preset.family in JOINT_FAMILIES else None,
    )
    return made if plan.start_from is None else _begun(plan, made, len(tokenizer))


def build_model(family: str, objective: str, config: Any) -> PreTrainedModel:
    """The untrained model of a family that learns an objective."""
    return getattr(models, learned_as(objective, family).models[family])(config)


def make_model(plan: PretrainPlan, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The model of a run before its first step.

    Its ``new_weights`` are the names of those that ``start_from`` lacks, which are heads.
    """
    family, objective = plan.preset.family, learned_as(plan.objective, plan.preset.family)
    config = model_config(plan, tokenizer)
    if plan.start_from is None:
        return build_model(family, objective.name, config)
    kind = getattr(models, objective.models[family])

    def is_head(model: Any, name: str) -> bool:
        own = f"{model.base_model_prefix}."
        return objective.new_heads and ("pooler." in name or not name.startswith(own))

    expected = f"a checkpoint with the weights of a {kind.__name__}"
    options = {"config": config, "dtype": torch.float32}
    model, missing = weights_at(
        plan.where, "start_from", plan.start_from, expected, kind, is_head, **options
    )
    model.new_weights = missing
    return model


def flops_a_step(plan: PretrainPlan, tokenizer: PreTrainedTokenizerBase) -> float:
    """The FLOPs of forward and backward of an optimizer step of full samples, see ``flops``."""
    objective, config = objective_of(plan, tokenizer), model_config(plan, tokenizer)
    return objective.tokens_of(plan.samples_a_step) * objective.flops_a_token(config)


def _begun(args: PretrainPlan, made: Any, tokens: int) -> Any:
    """The configuration of the checkpoint of ``start_from``, with what the run has otherwise."""
    path = args.start_from
    assert path is not None
    there = _config_there(args, path, made)
    parts = {"": (made, there)}
    if made.model_type == JOINT:
        names = ("discriminator", "generator")
        parts = {f"the {name} of ": (getattr(made, name), getattr(there, name)) for name in names}
    for part, (ours, theirs) in parts.items():
        for setting, name, usual in _SIZES:
            if "generator" in part and setting in ("hidden", "heads"):
                setting = "generator_size"
            wanted, value = getattr(ours, name, usual), getattr(theirs, name, usual)
            fix = f"Give the sizes of {path}, or another checkpoint."
            expected, got = f"{value}, the {name} of {part}{path}", f"{wanted} with {args.arch}"
            args.check(setting, wanted == value, expected, fix, got)
        for name in DROPOUTS:
            if hasattr(ours, name) and hasattr(theirs, name):
                setattr(theirs, name, getattr(ours, name))
        if hasattr(ours, "is_decoder"):  # of an encoder that can read from left to right
            theirs.is_decoder = ours.is_decoder
        positions = most_positions(theirs)
        able, fix = positions is None or args.block_size <= positions, "Lower it."
        args.check("block_size", able, f"{positions} at most, the positions of {path}", fix)
        check_vocabulary_fits(args, "start_from", tokens, theirs.vocab_size)
    if made.model_type == JOINT:
        # A checkpoint of a two-stage training may be in its second stage: this run begins anew.
        for name in args.joint_settings():
            setattr(there, name, getattr(made, name))
        there.check_options()
    return there


def _config_there(args: PretrainPlan, path: str | Path, made: Any) -> Any:
    expected = f"a checkpoint of the architecture of {args.arch}"
    if made.model_type == JOINT:
        if kind_of(path) != JOINT:
            got = f"{path}, which is not both models of ELECTRA's pre-training"
            fix = "Give OUT/checkpoint-N of a pre-training of ELECTRA."
            args.check("start_from", False, expected, fix, got, DataError)
        kind = type(made)
        return loaded(
            args.where,
            "start_from",
            path,
            expected,
            lambda: kind.from_pretrained(path, local_files_only=True),
        )
    there = config_at(args.where, "start_from", path)
    same, got = there.model_type == made.model_type, f"{path}, a {there.model_type}"
    args.check("start_from", same, expected, "Choose another --arch.", got, DataError)
    return there
