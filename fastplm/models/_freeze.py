"""``fastplm.freeze``: a model for inference, whose layers run in one call of csrc/ on a CPU."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from transformers.utils import logging

from fastplm.models._accelerate import module_of
from fastplm.models._frozen_decoder import plans as decoder_plans
from fastplm.models._frozen_encoder import plans as encoder_plans
from fastplm.models._watch import Freeze, UnsupportedModule, freeze_of, lock

_Model = TypeVar("_Model")


def freeze(model: _Model) -> _Model:
    """Say that a model is for inference: on a CPU its layers run in one call of csrc/, in place.

    BERT, RoBERTa, ELECTRA and DPR then run from their ids on in one call, and GPT-2 and T5 a layer
    a call for each new token, in fp32 or after ``fastplm.quantize``. All other parts, and calls
    with gradients, under autocast, ``torch.compile`` or hooks of the whole process, run by their
    modules. The results are those of the modules within rounding.

    The model is put in ``eval()``. Weights are not copied: changes in place (an optimizer's step,
    ``load_state_dict``, ``weight.data = …``) are seen by the next call, as are changes of
    ``model.config``. All else that changes a frozen part thaws the whole model, with a warning:
    ``train()``, ``to()`` or ``half()``, ``load_state_dict(assign=True)``, hooks, adapters, and
    whatever is set or deleted in a module: submodules, parameters, buffers, attributes, its
    class; also ``fastplm.accelerate``, ``restore`` and ``quantize``. A thawed model runs by its
    modules, until it is frozen again. A copy or pickle of a frozen model is not frozen.

    Not seen are writes by ``object.__setattr__`` or ``dict.__setitem__``, which pass every class
    by, and, of functions that are replaced in their modules or classes while the model is frozen,
    all but the ``forward`` and ``__call__`` of its modules' classes, the attention function and
    those of ``torch.nn.functional`` that they call.

    Args:
        model: as for ``fastplm.accelerate``, which is called first.

    Returns:
        ``model``.

    Examples:
        >>> from transformers import BertConfig, BertModel
        >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
        >>> model = BertModel(BertConfig(vocab_size=100, intermediate_size=64, **sizes))
        >>> model = fastplm.freeze(fastplm.accelerate(model))
        >>> model.training
        False
    """
    inner = module_of("freeze", model)
    found, left = freeze_parts(inner)
    say = logging.get_logger(__name__).warning
    if left:
        say("freeze left to their modules: %s", "; ".join(left))
    elif not found:
        say(
            "freeze: no part of this %s runs in one call. Those of BERT, RoBERTa, ELECTRA, DPR, "
            "GPT-2 and T5 do after fastplm.accelerate(model).",
            type(inner).__name__,
        )
    return model


def freeze_parts(model: nn.Module) -> tuple[bool, list[str]]:
    """(whether anything is frozen now, what runs by its modules and why)."""
    left: dict[str, str] = {}  # the first module, by each reason
    found: list[tuple[nn.Module, Any, Any]] = []
    model.eval()
    with lock:
        for module in model.modules():
            freeze_of(module).end()
        for path, module in model.named_modules():
            for plans in (encoder_plans, decoder_plans):
                try:
                    found += [(module, *plan) for plan in plans(module)]
                except UnsupportedModule as reason:
                    left.setdefault(str(reason), path or type(module).__name__)
        frozen = Freeze(type(model).__name__)
        for root, plan, methods in found:
            for module in root.modules():
                frozen.watch(module)
            plan = plan._replace(facts=plan.facts.with_frozen(root))
            frozen.watch(root, plan, *methods)
    return bool(found), ["`{}`, as {}".format(*each[::-1]) for each in left.items()]
