"""``fastplm.accelerate`` and ``fastplm.restore``: a live model becomes ours, and its own again."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TypeVar

from torch import nn

from fastplm._checks import UnsupportedError, check

# Transformers takes seconds to import, and so do the models: both wait for the first call.

_Model = TypeVar("_Model", bound=nn.Module)

#: Where a model of Transformers keeps the attention implementation that it had before.
_BEFORE = "_fastplm_attention_before"


def accelerate(model: _Model) -> _Model:
    """Make the Transformers models in a live module ours, in place.

    Every module of a Transformers class that has a drop-in of the same name in ``fastplm.models``
    becomes one, by its ``__class__``, and the attention implementation becomes "fastplm".
    Parameters, buffers, hooks, names, modes and devices stay what and where they are, so an
    optimizer that holds them goes on as before. A second call changes nothing.

    A subclass of the user's keeps its own methods; the modules inside become ours. If a module
    inside is of a class that is neither PyTorch's nor Transformers' nor ours, and does not stand
    for a linear layer or a table (``weight``, or ``base_layer`` as in PEFT), what contains it stays
    as it is: it might look at more than one row, and ours leave out padding. A warning says so.
    Other models of Transformers get the attention implementation alone, if they honour one.

    Args:
        model: a model of Transformers, or any module with some inside.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: there is nothing in it that could be made ours.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = fastplm.accelerate(BertModel(BertConfig(vocab_size=100, **sizes)))
        >>> type(model).__module__
        'fastplm.models.bert'
        >>> type(fastplm.restore(model)).__module__
        'transformers.models.bert.modeling_bert'
    """
    check(
        isinstance(model, nn.Module),
        "accelerate",
        "model",
        f"a {type(model).__name__}",
        "a torch.nn.Module",
        "Pass the model itself.",
    )
    anything, kept = switch(model)
    check(
        anything,
        "accelerate",
        "model",
        f"a {type(model).__name__} that stays as it is" + (f": {'; '.join(kept)}" if kept else ""),
        "a model of Transformers with drop-in classes in fastplm.models, or one whose attention "
        "implementation can be set",
        "Call the ops of fastplm in its own modules; or call accelerate before fully_shard and "
        "before modules of it are replaced.",
        UnsupportedError,
    )
    if kept:
        from transformers.utils import logging

        logging.get_logger(__name__).warning(f"accelerate left alone: {'; '.join(kept)}")
    return model


def switch(model: nn.Module, attention: bool = True) -> tuple[bool, list[str]]:
    """Switch what can be, and the attention implementation too unless told otherwise.

    Returns:
        (whether anything inside is ours now, what was left alone and why).
    """
    from transformers import PreTrainedModel

    from fastplm.hf import NAME
    from fastplm.models._base import DROP_INS, drop_in_for, share_config

    by_class = {kind: drop_in_of(kind) for kind in {type(module) for module in model.modules()}}
    ours = set(DROP_INS.values())
    kept = []
    switched = []
    dispatching = []
    for path, module in model.named_modules():
        drop_in = by_class[type(module)]
        honours = isinstance(module, PreTrainedModel) and (
            drop_in is not None or type(module) in ours or module._can_set_attn_implementation()
        )
        if drop_in is None and not honours:
            continue
        foreign = _foreign(module)
        if foreign is not None:
            kept.append(f"`{path or type(module).__name__}`, as {foreign}")
            continue
        if drop_in is not None:
            switched.append((module, drop_in))
        # A configuration may say this beside "eager" alone.
        if attention and honours and not module.config.output_attentions:
            dispatching.append(module)
    # All notes before any change: several modules may share a configuration.
    for module in dispatching:
        if type(module) not in ours and _BEFORE not in vars(module):
            setattr(module, _BEFORE, module.config._attn_implementation)
    for module in dispatching:
        if type(module) in ours or type(module) in DROP_INS:
            share_config(module, module.config)
        module.config._attn_implementation_internal = NAME
    for module, drop_in in switched:
        module.__class__ = drop_in
        for inner in module.modules():  # such as linear layers, of no family
            if by_class.get(type(inner)) is None and (drop_in := drop_in_for(inner)) is not None:
                inner.__class__ = drop_in
    already = any(type(module) in ours for module in model.modules())
    return bool(switched or dispatching or already), kept


def restore(model: _Model) -> _Model:
    """Make a model what it was before ``accelerate``, in place: same classes, same attention.

    Its outputs are again those of Transformers bit for bit. A model that was made of classes of
    ``fastplm.models`` becomes one of Transformers' classes, with their default attention. What
    looks for ``nn.Linear`` by its exact class, as ``torch.ao.quantization`` does, finds it then.

    Args:
        model: what ``accelerate`` was given, or a part of it. Others stay as they are.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: the ``forward`` of one of our classes was wrapped on the module itself,
            as Accelerate does for mixed precision: that wrapper cannot be turned back.
    """
    from transformers import PreTrainedModel

    from fastplm.hf import NAME
    from fastplm.models._base import DROP_INS, restore_modules

    ours = set(DROP_INS.values())
    for module in model.modules():
        check(
            type(module) not in ours or "forward" not in vars(module),
            "restore",
            "model",
            f"a {type(module).__name__} whose forward somebody has replaced on the module",
            "one that runs the forward of its class",
            "Undo that first, with accelerate.utils.extract_model_from_parallel("
            "model, keep_fp32_wrapper=False) if Accelerate did it.",
            UnsupportedError,
        )
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    own = [module for module in models if type(module) in ours]
    restore_modules(model)
    # Those without a note first: they may share their configuration with one that has a note.
    for module in own:
        if _BEFORE not in vars(module) and module.config._attn_implementation == NAME:
            module.config._attn_implementation_internal = module.get_correct_attn_implementation(
                None, is_init_check=True
            )
    for module in models:
        if _BEFORE in vars(module):
            module.config._attn_implementation_internal = getattr(module, _BEFORE)
            delattr(module, _BEFORE)
    return model


def drop_in_of(theirs: type) -> type | None:
    """The class of ``fastplm.models`` that stands for one of Transformers, if there is one."""
    package, _, family = theirs.__module__.rpartition(".")[0].rpartition(".")
    if package != "transformers.models":
        return None
    if importlib.util.find_spec(f"fastplm.models.{family}") is None:
        return None
    importlib.import_module(f"fastplm.models.{family}")
    from fastplm.models._base import DROP_INS

    return DROP_INS.get(theirs)


def _foreign(outer: nn.Module) -> str | None:
    """A module inside that may look at more than one row, as far as anybody can tell."""
    for path, module in outer.named_modules():
        package = type(module).__module__.partition(".")[0]
        if module is outer:
            continue
        if package in ("torch", "transformers", "fastplm"):
            if package != "torch" and "forward" in vars(module) and any(module.children()):
                return f"the forward of `{path}` was replaced"
        elif not hasattr(module, "weight") and not hasattr(module, "base_layer"):
            return f"`{path}` is a {type(module).__name__} from {type(module).__module__}"
    return None
