"""``fastplm.accelerate`` and ``fastplm.restore``: replace the classes of an existing model."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from fastplm.errors import UnsupportedError, check, fail

# Importing Transformers and the models takes seconds, so both are imported on the first call.

_Model = TypeVar("_Model")
#: Where objects of other libraries have their model: Transformers' pipelines, setfit's.
_INNER = ("model", "model_body")

#: The attribute in which ``accelerate`` stores a model's previous attention implementation.
_BEFORE = "_fastplm_attention_before"
#: The attribute with the hooks that check what is given to models without a drop-in class.
_CHECK = "_fastplm_length_check"


def accelerate(model: _Model) -> _Model:
    """Replace the classes of the Transformers models in a module by drop-in classes, in place.

    Each module whose Transformers class has a drop-in class in ``fastplm.models`` gets that class
    (``__class__`` is assigned), and the attention implementation becomes "fastplm". Parameters,
    buffers, hooks, names, modes and devices do not change, so an existing optimizer stays valid.
    The model gets a copy of its configuration, which other models may have, too. A second call
    changes nothing.

    A subclass of the user keeps its class; its submodules are replaced. A model is left unchanged,
    with a warning, if it contains a module that is not from PyTorch, Transformers or fastplm, and
    is not a replacement of a linear layer or an embedding (``weight``, or ``base_layer`` as in
    PEFT): that module might use several rows, and drop-in classes leave out padding.

    A model of Transformers without a class in ``fastplm.models``, whose layers are put together as
    those of BERT or BART, gets classes of its own, if these prove to compute the same: a few short
    texts, with and without padding, run through the model before and after, forward and backward,
    with each input and each dropout. An input with which they compute something else is left to the
    parent, which then computes padding, too. The proof needs a model in fp32 or fp64, on a CPU or a
    GPU; change its dtype afterwards. In all other models of Transformers only the attention
    implementation changes, if they support one.

    Args:
        model: a model of Transformers, a module that contains models, such as a
            ``SentenceTransformer``, or an object that has one in ``model`` or ``model_body``, such
            as a pipeline.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: ``model`` contains nothing that can be replaced.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = fastplm.accelerate(BertModel(BertConfig(vocab_size=100, **sizes)))
        >>> type(model).__module__
        'fastplm.models.bert'
        >>> type(fastplm.restore(model)).__module__
        'transformers.models.bert.modeling_bert'
    """
    from fastplm.models._watch import thaw

    where, got = "accelerate", f"a {type(model).__name__}"
    inner = module_of(where, model)
    thaw(inner, "accelerate was called")
    anything, left = switch(inner, by_behaviour=True)
    _note_readers(inner)
    got += " that cannot change" + (f": {'; '.join(left)}" if left else "")
    expected = "a model of Transformers with drop-in classes in fastplm.models, or one whose "
    expected += "attention implementation can be set"
    fix = "Use the ops of fastplm in its modules; or call accelerate before fully_shard and before "
    fix += "you replace its modules."
    check(anything, where, "model", got, expected, fix, UnsupportedError)
    if left:
        from transformers.utils import logging

        logging.get_logger(__name__).warning(f"accelerate did not change: {'; '.join(left)}")
    return model


def module_of(where: str, model: object) -> nn.Module:
    """The module that a user means: ``model``, or that of another library's object."""
    for inner in (model, *(getattr(model, name, None) for name in _INNER)):
        if isinstance(inner, nn.Module):
            return inner
    expected = "a torch.nn.Module, or an object that has one in `model` or `model_body`"
    fail(where, "model", f"a {type(model).__name__}", expected, "Pass the model itself.")


def switch(
    model: nn.Module, attention: bool = True, by_behaviour: bool = False
) -> tuple[bool, list[str]]:
    """Replace classes and, with ``attention``, the attention implementation.

    With ``by_behaviour``, models without a drop-in class get one of their own, if it is proved.

    Returns:
        (whether anything is replaced now, what was left unchanged and why).
    """
    from transformers import PreTrainedModel

    from fastplm.hf import NAME, CheckCall, attention_of
    from fastplm.models import _like
    from fastplm.models._base import (
        DROP_INS,
        MADE,
        check_length,
        drop_in_for,
        looks_positions_up,
        own_configs,
        set_attention,
        share_config,
    )

    by_class = {kind: drop_in_of(kind) for kind in {type(module) for module in model.modules()}}
    ours = {*DROP_INS.values(), *MADE}
    left = []
    switched = []
    proofs = []
    dispatching = []
    for path, module in model.named_modules():
        drop_in = by_class[type(module)]
        honours = isinstance(module, PreTrainedModel) and (
            drop_in is not None or attention_of(type(module)) == "interface"
        )
        if drop_in is None and not honours:
            continue
        foreign = _foreign(module)
        if foreign is not None:
            left.append(f"`{path or type(module).__name__}`, as {foreign}")
            continue
        if drop_in is not None:
            switched.append((module, drop_in))
        # Transformers allows output_attentions only with "eager".
        if attention and honours and not module.config.output_attentions:
            dispatching.append(module)
    for root in _roots(model) if by_behaviour else ():
        if by_class[type(root)] is None and _foreign(root) is None:
            if not any(type(module) in ours for module in root.modules()):
                proofs.append(_like.prover(root, attention_of(type(root)) == "own"))
    # First store all previous values: several modules may share a configuration.
    for module in dispatching:
        if type(module) not in ours and _BEFORE not in vars(module):
            setattr(module, _BEFORE, module.config._attn_implementation)
            hooks: list[Any] = [] if type(module) in DROP_INS else [CheckCall(type(module))]
            if hooks and looks_positions_up(module):
                hooks.append(check_length)
            add = functools.partial(module.register_forward_pre_hook, with_kwargs=True)
            if hooks:
                setattr(module, _CHECK, [add(hook) for hook in hooks])
    if any(module.config._attn_implementation != NAME for module in dispatching):
        own_configs(model)
    for module in dispatching:
        if type(module) in ours or type(module) in DROP_INS:
            share_config(module, module.config)
        set_attention(module, NAME)
    for module, drop_in in switched:
        module.__class__ = drop_in
        for inner in module.modules():  # such as linear layers
            if by_class.get(type(inner)) is None and (drop_in := drop_in_for(inner)) is not None:
                inner.__class__ = drop_in
    proved = [prove() for prove in proofs if prove is not None]
    already = any(type(module) in ours for module in model.modules())
    return bool(switched or dispatching or already or any(proved)), left


def _roots(model: nn.Module) -> Iterator[Any]:
    """The outermost models of Transformers in a module."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers."):
        yield model
    else:
        for child in model.children():
            yield from _roots(child)


def restore(model: _Model) -> _Model:
    """Undo ``accelerate``, in place: the previous classes and attention implementation.

    The outputs are again those of Transformers bit for bit. A model that was built with classes of
    ``fastplm.models`` gets Transformers' classes, with their default attention. After that, code
    that tests for exactly ``nn.Linear``, such as ``torch.ao.quantization``, works.

    Args:
        model: a model that ``accelerate`` changed, or a part of it. Others are not changed. A
            drop-in model around such a part still works, or says that it must be restored, too.

    Returns:
        ``model``.

    Raises:
        UnsupportedError: the ``forward`` of a drop-in module was replaced on the instance, as
            Accelerate does for mixed precision: the wrapper would still call the drop-in class.
    """
    from transformers import PreTrainedModel

    from fastplm.hf import NAME
    from fastplm.models._base import DROP_INS, MADE, READS, restore_modules, set_attention
    from fastplm.models._watch import thaw

    ours, inner = {*DROP_INS.values(), *MADE}, module_of("restore", model)
    thaw(inner, "restore was called")
    for module in inner.modules():
        if type(module) in ours and "forward" in vars(module):
            got = f"a {type(module).__name__} whose forward was replaced on the instance"
            fix = "Undo that first, with accelerate.utils.extract_model_from_parallel(model, "
            fix += "keep_fp32_wrapper=False) if Accelerate did it."
            expected = "a module that uses the forward of its class"
            fail("restore", "model", got, expected, fix, UnsupportedError)
    models = [module for module in inner.modules() if isinstance(module, PreTrainedModel)]
    drop_ins = [module for module in models if type(module) in ours]
    restore_modules(inner)
    # First the models without a stored value: they may share their configuration with others.
    for module in drop_ins:
        if _BEFORE not in vars(module) and module.config._attn_implementation == NAME:
            set_attention(module, module.get_correct_attn_implementation(None, is_init_check=True))
    for module in models:
        vars(module).pop(READS, None)
        if _BEFORE in vars(module):
            set_attention(module, getattr(module, _BEFORE))
            delattr(module, _BEFORE)
        if _CHECK in vars(module):
            for hook in getattr(module, _CHECK):
                hook.remove()
            delattr(module, _CHECK)
    return model


#: Modules of sentence-transformers that read rows of padding, or rows beside a row.
_READ_BESIDE = ("CNN", "LSTM")
#: The packages of modules that read what the mask leaves, or are inside of such a module.
_KNOWN = ("fastplm", "peft", "sentence_transformers", "torch", "transformers")


def _note_readers(model: nn.Module) -> None:
    """In pipelines of sentence-transformers, let models keep padding that a module may read."""
    from transformers import PreTrainedModel
    from transformers.utils import logging

    from fastplm.models._base import READS

    for path, pipeline in model.named_modules():
        kinds = [kind.__module__.partition(".")[0] for kind in type(pipeline).__mro__]
        if not isinstance(pipeline, nn.Sequential) or "sentence_transformers" not in kinds:
            continue
        inner = [one for one in pipeline.modules() if isinstance(one, PreTrainedModel)]
        why = next(filter(None, map(_reads, _around(path, pipeline))), None)
        for one in inner:
            vars(one).pop(READS, None)
            if why is not None:
                setattr(one, READS, True)
        if why is not None and inner:
            logging.get_logger(__name__).warning(
                f"accelerate: padding is computed in `{type(inner[0]).__name__}`, as {why}."
            )


def _around(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a pipeline, without those of models."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        yield path, module
        for name, child in module.named_children():
            yield from _around(f"{path}.{name}".strip("."), child)


def _reads(named: tuple[str, Any]) -> str | None:
    """Why a module of a pipeline may read padding; None if it does not."""
    from fastplm.models._ragged import padding_of

    (path, module), kind = named, type(named[1])
    package = kind.__module__.partition(".")[0]
    if package not in _KNOWN or "forward" in vars(module):
        return f"`{path}` is a {kind.__name__} from {kind.__module__}, which may read it"
    if package == "sentence_transformers" and kind.__name__ in _READ_BESIDE:
        return f"`{path}` is a {kind.__name__}, which reads it"
    expansion = getattr(module, "query_expansion", None)
    if not expansion or expansion["attend"] or module.tokenizer is None:
        return None
    token, tokenizer, config = expansion["token"], module.tokenizer, module.model.config
    filler = tokenizer.mask_token_id if token is None else tokenizer.convert_tokens_to_ids(token)
    filler = tokenizer.eos_token_id if filler is None else filler
    same = filler == padding_of(config)
    return f"`{path}` fills queries up with the id of padding, which is scored" if same else None


def drop_in_of(theirs: type) -> type | None:
    """The drop-in class of ``fastplm.models`` for a class of Transformers, if there is one."""
    package, _, family = theirs.__module__.rpartition(".")[0].rpartition(".")
    if package != "transformers.models":
        return None
    if importlib.util.find_spec(f"fastplm.models.{family}") is None:
        return None
    importlib.import_module(f"fastplm.models.{family}")
    from fastplm.models._base import DROP_INS

    return DROP_INS.get(theirs)


def _foreign(outer: nn.Module) -> str | None:
    """Why a submodule may use more than one row; None if none does."""
    parts: tuple[str, ...] = ()  # of what replaces a linear layer or an embedding
    for path, module in outer.named_modules():
        package = type(module).__module__.partition(".")[0]
        if module is outer:
            continue
        if package in ("torch", "transformers", "fastplm"):
            if package != "torch" and "forward" in vars(module) and any(module.children()):
                return f"the forward of `{path}` was replaced"
        elif hasattr(module, "weight") or hasattr(module, "base_layer"):
            parts += (f"{path}.",)
        elif not path.startswith(parts):
            return f"`{path}` is a {type(module).__name__} from {type(module).__module__}"
    return None
