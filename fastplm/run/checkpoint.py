"""The configuration and the weights of a checkpoint."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open

from fastplm._checks import is_number
from fastplm.errors import DataError, fail, shown
from fastplm.run.folder import loaded

#: What others put before the names of weights, and who.
_PREFIXES = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}
_MOST_LAYERS = 1000
#: Models of which Transformers 5 ignores any other kind of positions than absolute ones.
_ABSOLUTE = ("albert", "bert", "electra", "roberta")
_LAYER = re.compile(r"\.\d+\.")

#: The model type of ELECTRA's pre-training, whose checkpoints hold two models.
JOINT = "fastplm-electra-joint"
#: The commands that need a model of a language; a discriminator that detects tokens is none.
_LANGUAGE_MODELS = ("score", "prompt")
#: Every dropout of a configuration.
DROPOUTS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
    *("classifier_dropout", "dropout", "dropout_rate", "attention_dropout", "activation_dropout"),
    *("embedding_dropout", "mlp_dropout", "qa_dropout", "seq_classif_dropout"),
    *("summary_last_dropout", "summary_first_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
)


def config_at(
    where: str, argument: str, path: str | Path, *, part: str | None = None, **settings: Any
) -> Any:
    """The configuration in a folder, which ``argument`` of the command ``where`` names.

    A checkpoint of ELECTRA's pre-training holds two models, and is read as one of them. That is the
    generator for an argument of this name, and for ``score`` and ``prompt`` unless the
    discriminator predicts tokens; else the discriminator.

    Args:
        where, argument: the command, and its setting that names the folder.
        path: the folder.
        part: "generator" or "discriminator", to choose one; give ``weights_at`` the same.
        settings: fields to change.

    Raises:
        DataError: there is none; or the generator draws tokens by frequency, and is no model; or
            the discriminator is not trained yet.
    """
    from transformers import AutoConfig

    expected = "a checkpoint with its config.json"
    if kind_of(path) == JOINT:
        name, joint = _part_of_joint(where, argument, path, expected, part)
        config = getattr(joint, name)
        config = type(config).from_dict(config.to_diff_dict(), **settings)
        predicts = name == "generator" or not joint.detects
        config.architectures = ["ElectraForMaskedLM" if predicts else "ElectraForPreTraining"]
    else:
        load = functools.partial(
            AutoConfig.from_pretrained, path, local_files_only=True, **settings
        )
        config = loaded(where, argument, path, expected, load)
    _check_config(where, argument, path, config)
    return config


def kind_of(path: str | Path) -> str | None:
    """The model type that the config.json of a folder names; None without one."""
    try:
        return json.loads((Path(path) / "config.json").read_text("utf-8"))["model_type"]
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return None  # who loads it says what is wrong


def _part_of_joint(
    where: str, argument: str, path: str | Path, expected: str, part: str | None
) -> tuple[str, Any]:
    """(the model of a checkpoint of ELECTRA's pre-training that is read, its configuration)."""
    from fastplm.models.electra_joint import ElectraJointConfig

    load = functools.partial(ElectraJointConfig.from_pretrained, path, local_files_only=True)
    joint = loaded(where, argument, path, expected, load)
    generates = argument == "generator" or (where in _LANGUAGE_MODELS and joint.detects)
    name = part or ("generator" if generates else "discriminator")
    fix = "Choose another checkpoint."
    if name == "generator" and joint.generator_type != "model":
        got = f"{path}, whose generator draws tokens by their frequency"
        fail(where, argument, got, "a generator that is a model", fix, DataError)
    if name == "discriminator" and joint.stage == 1:
        got = f"{path}, of the first stage, in which the generator alone is trained"
        fail(where, argument, got, "a discriminator that was trained", fix, DataError)
    return name, joint


def _weights_of_joint(
    where: str, argument: str, path: str | Path, expected: str, part: str | None
) -> dict[str, Any]:
    """``config`` and ``state_dict`` of the model that is read, for ``from_pretrained``."""
    from fastplm.models.electra_joint import ElectraForJointPreTraining

    name, _ = _part_of_joint(where, argument, path, expected, part)
    both, _ = weights_at(where, argument, path, expected, ElectraForJointPreTraining)
    config = config_at(where, argument, path, part=name)
    return {"config": config, "state_dict": getattr(both, name).state_dict()}


def _is_small(value: Any) -> bool:
    return is_number(value) and 0.0 <= value < math.inf


#: What Transformers reads from config.json without a look, and fails on later: hours of building,
#: layers that are left out, or NaN. {names: (whether a value is right, what is expected)}
_CHECKS: dict[tuple[str, ...], tuple[Callable[[Any], bool], str]] = {
    ("architectures",): (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names of classes",
    ),
    ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"): (
        lambda value: isinstance(value, int) and value > 0,
        "a whole number above 0",
    ),
    ("num_hidden_layers",): (
        lambda value: value in range(1, _MOST_LAYERS + 1),
        f"1 to {_MOST_LAYERS}",
    ),
    ("initializer_range", "layer_norm_eps", "layer_norm_epsilon"): (
        _is_small,
        "a small positive number",
    ),
    DROPOUTS: (
        lambda value: is_number(value) and 0.0 <= value <= 1.0,
        "a probability from 0 to 1",
    ),
    ("chunk_size_feed_forward",): (
        lambda value: value == 0,
        "0: the parts save memory alone, and would have to divide the tokens of each batch",
    ),
    ("return_dict",): (lambda value: value is True, "true, as a command reads outputs by name"),
}
_POSITIONS: dict[tuple[str, ...], tuple[Callable[[Any], bool], str]] = {
    ("position_embedding_type",): (
        lambda value: value == "absolute",
        "absolute, as Transformers 5 has no other and would ignore it",
    ),
}


def _check_config(where: str, argument: str, path: str | Path, config: Any) -> None:
    for part in (config, getattr(config, "encoder", None), getattr(config, "decoder", None)):
        absolute = getattr(part, "model_type", None) in _ABSOLUTE
        for names, (able, expected) in (_CHECKS | (_POSITIONS if absolute else {})).items():
            for name in names:
                value = getattr(part, name, None)
                if value is not None and not able(value):
                    got = f"{path}, whose config.json has {name}: {shown(value)}"
                    fail(where, argument, got, expected, "Correct it, or convert it.", DataError)


def weights_at(
    where: str,
    argument: str,
    path: str | Path,
    expected: str,
    kind: Any,
    may_lack: Callable[[Any, str], bool] = lambda model, name: False,
    *,
    part: str | None = None,
    **options: Any,
) -> tuple[Any, list[str]]:
    """(a model of the class ``kind`` from a folder, the names of the weights that it lacks).

    Every command loads weights by this function, as Transformers fills what a file lacks with
    random numbers and drops what a model has no place for.

    Args:
        where, argument: the command, and its setting that names the folder.
        path: the folder.
        expected: what is to be there, for errors.
        kind: a class with ``from_pretrained``.
        may_lack: whether a model may lack the weight of this name: that of a new head, say.
        part: of a checkpoint of ELECTRA's pre-training, see ``config_at``.
        options: of ``from_pretrained``.

    Raises:
        DataError: there is no checkpoint; it lacks a weight, has more layers than its
            configuration says, or holds a number that is not finite.
    """
    from transformers.utils import logging

    source: str | Path | None = path
    joint = kind_of(path) == JOINT
    reads_both = getattr(getattr(kind, "config_class", None), "model_type", "") == JOINT
    if joint and not reads_both:
        source = None
        options = _weights_of_joint(where, argument, path, expected, part) | options
        # Transformers' Auto classes ask for a folder, even for weights that are given.
        if hasattr(kind, "_model_mapping"):
            kind = kind._model_mapping[type(options["config"])]
    elif not joint and (Path(path) / "config.json").is_file():
        config_at(where, argument, path)  # its sizes, before a model is made of them
    options |= {"local_files_only": True, "output_loading_info": True}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        load = functools.partial(_load, kind, source, options)
        model, info = loaded(where, argument, path, expected, load)
    finally:
        logging.set_verbosity(verbosity)
    _check_config(where, argument, path, model.config)
    # What ``ignore_mismatched_sizes`` lets pass is random, too.
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})

    def refuse(what: str, fix: str) -> NoReturn:
        fail(where, argument, f"{path}, {what}", expected, fix, DataError)

    lost = [name for name in missing if not may_lack(model, name)]
    if lost:
        what = f"which lacks {len(lost)} weights of a {type(model).__name__}, such as {lost[0]}"
        refuse(what, _why_lost(sorted(info["unexpected_keys"]), model.config))
    more = next(filter(_beyond(model), sorted(info["unexpected_keys"])), None)
    if more is not None:
        what = f"whose file has more layers than its config.json says, such as {more}"
        refuse(what, "Correct the number of layers in config.json.")
    types = _types_of_weights(Path(path))
    embedded = any(name.endswith(("shared.weight", "embed_tokens.weight")) for name in types)
    if model.config.model_type.endswith("t5") and "lm_head.weight" in types and not embedded:
        # Transformers takes it for the embeddings, too: it cannot tell T5 from T5 1.1, whose head
        # is another table.
        what = "whose file has lm_head.weight, but no embeddings of tokens"
        refuse(what, "Save it again with its shared.weight.")
    # Not a bias: GPT-2's files may have masks of bytes that are called so.
    whole = ("I", "U", "BOOL")
    weights = (name for name in types if name.endswith(".weight"))
    quantized = next((name for name in weights if types[name].startswith(whole)), None)
    if quantized is not None:
        what = f"whose weight {quantized} is of type {types[quantized]}"
        refuse(what, "Save it in fp32, fp16 or bf16: quantized weights need their scales.")
    bad = next((name for name, value in model.named_parameters() if not _is_finite(value)), None)
    if bad is not None:
        what = f"whose weight {bad} holds NaN or infinity"
        refuse(what, "Take an earlier checkpoint: the training that wrote it has diverged.")
    return model, missing


def _types_of_weights(path: Path) -> dict[str, str]:
    """The dtype of each weight in a folder, as safetensors calls it; "" in a file of PyTorch's."""
    found: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (it is no mapping)
                found[name] = weights.get_slice(name).get_dtype()
    for file in path.glob("pytorch_model*.bin") if not found else ():
        found |= dict.fromkeys(torch.load(file, map_location="meta", weights_only=True), "")
    return found


def _load(kind: Any, path: str | Path | None, options: dict[str, Any]) -> Any:
    """``kind.from_pretrained``, which names a weight of another shape."""
    try:
        return kind.from_pretrained(path, **options)
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        # The message is about a table that was not printed, as it is of many lines.
        _, info = kind.from_pretrained(path, **options | {"ignore_mismatched_sizes": True})
        name, there, here = sorted(info["mismatched_keys"])[0]
        reason = f"its weight {name} has shape {tuple(there)}, and {tuple(here)} by config.json"
        raise RuntimeError(reason) from error


def _why_lost(unexpected: list[str], config: Any) -> str:
    """What to do about weights that a file lacks, by the names that it has instead."""
    for prefix, saved_by in _PREFIXES.items():
        if any(name.startswith(prefix) for name in unexpected):
            return (
                f"Its weights are called {prefix}…, as {saved_by} saves them: load the file, "
                f"rename them by name.removeprefix({prefix!r}), and save it again."
            )
    if unexpected:
        return (
            f"The file has {unexpected[0]} instead: see that it is of the model type "
            f"{config.model_type}, as config.json says, and has the head that is needed."
        )
    return "Check whether the file is complete, and has the head that is needed."


def _beyond(model: Any) -> Callable[[str], bool]:
    """Whether a weight is of a layer that ``model`` does not have, though it has others like it."""
    known = {_LAYER.sub(".0.", f".{name}") for name in model.state_dict()}
    prefix = f"{model.base_model_prefix}."

    def beyond(name: str) -> bool:
        first = _LAYER.sub(".0.", f".{name}")
        names = {first, f".{prefix}{first[1:]}", f".{first[1:].removeprefix(prefix)}"}
        return first != f".{name}" and bool(names & known)

    return beyond


def _is_finite(value: Any) -> bool:
    # A sum of finite numbers may overflow, so only where it has is each looked at.
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def check_vocabulary_fits(args: Any, argument: str, tokenizer: int, embedding: int) -> None:
    """Check that a tokenizer has no more tokens than the embedding of its model.

    Raises:
        DataError: the two do not belong together.
    """
    expected = "a tokenizer and a model that belong together"
    got = f"a tokenizer of {tokenizer} tokens and an embedding of {embedding}"
    args.check(argument, tokenizer <= embedding, expected, "Check the path.", got, DataError)


def set_dropout(config: Any, rate: float | None) -> None:
    """Set every dropout of a configuration, and of the parts of an encoder-decoder's."""
    if rate is None:
        return
    for each in (config, getattr(config, "encoder", None), getattr(config, "decoder", None)):
        for name in DROPOUTS:
            if hasattr(each, name):
                setattr(each, name, rate)
