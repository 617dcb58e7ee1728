"""Shared by all drop-in models: replacing the parent class, and checks of inputs."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import transformers
import transformers.pytorch_utils
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, activations
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from fastplm._checks import INTEGER, check_dtype, check_shape, check_tensor
from fastplm._modes import values_are_known
from fastplm.errors import check_choice, fail
from fastplm.hf import IS_CHOSEN, NAME, POSITION_TABLES, packing_of
from fastplm.models._packed import takes_packed
from fastplm.nn import GELU, Dropout, Linear, RMSNorm
from fastplm.nn._rows import check_flat_positions
from fastplm.nn._tied_embedding import shares_table, tied_lookup
from fastplm.nn.gelu import gelu
from fastplm.ops.linear import OP as LINEAR

_Class = TypeVar("_Class", bound=type)
_logger = logging.get_logger(__name__)

#: {parent class: its drop-in class}, of the families imported so far.
DROP_INS: dict[type, type] = {
    nn.Linear: Linear,
    nn.Dropout: Dropout,
    nn.GELU: GELU,
    nn.RMSNorm: RMSNorm,
}

#: What Transformers calls the argument and the output for a cache: "past_key_values" before 5.24.
_OLD_CACHE = "past_key_values"
_OF_BERT = inspect.signature(transformers.BertModel.forward).parameters
CACHE = "cache" if "cache" in _OF_BERT else _OLD_CACHE
#: {drop-in class: its parent class}, of those that ``_like`` has made: they hold for one model.
MADE: dict[type, type] = {}

#: The attribute of a model whose padding is read, by a module that ``accelerate`` has seen.
READS = "_fastplm_padding_is_read"

#: Families whose first position is the row after that of padding, as in RoBERTa.
_AFTER_PADDING = (
    *("camembert", "data2vec-text", "esm", "ibert", "lilt", "longformer", "luke", "markuplm"),
    *("mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl"),
    "xmod",
)
#: The fields of configurations that say how many positions there are.
_POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "max_seq_len")

#: Arguments of mixins that stand in the signature of a class only if its parent has them, too:
#: others conclude from them what a model can do, as PEFT does for prefix tuning.
_OF_SOME_PARENTS = (
    "encoder_attention_mask",
    "encoder_hidden_states",
    CACHE,
    "token_type_ids",
    "use_cache",
)

# Module instances that Transformers shares between all models. Their class must not change.
_SHARED = {id(value) for value in vars(activations).values() if isinstance(value, nn.Module)}


def drop_in(ours: _Class) -> _Class:
    """Class decorator: registers the drop-in class of the parent class of the same name.

    Both have the same parameters, buffers and attributes; only their methods differ. So assigning
    ``__class__`` is enough to replace one by the other. ``forward`` may be called with positional
    arguments in the order of the parent's, whichever its own are; those that it adds come after.
    (ONNX's exporter of ``dynamo=False`` passes the defaults of all of them in this order.)
    """
    parent: Any = _parent_of(ours)
    DROP_INS[parent] = ours
    return fitted(ours, parent)


def fitted(ours: _Class, parent: Any) -> _Class:
    """The class, with the signature and the recorded outputs of its parent."""
    forward: Any = ours.forward  # type: ignore[attr-defined]
    if issubclass(parent, PreTrainedModel):
        forward = ours.forward = takes_packed(forward, parent.forward)  # type: ignore[attr-defined]
    arguments = inspect.signature(forward).parameters.values()
    passes_on = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in arguments)
    theirs = _positional(parent.forward)
    differs = _positional(forward)[: len(theirs)] != theirs
    if issubclass(parent, PreTrainedModel):
        differs |= any(_not_of(theirs, p.name) for p in arguments)
        differs |= _keywords_of(forward) != _keywords_of(parent.forward)
        asks = "loss_function" in inspect.unwrap(parent.forward).__code__.co_names
        ours._named_by_parent = frozenset(theirs) if asks else None  # type: ignore[attr-defined]
    if not passes_on and differs:
        ours.forward = _by_position(forward, parent.forward)  # type: ignore[attr-defined]
        # Transformers checkpoints a layer only if its outermost forward is the one that it wrapped.
        wrap = vars(GradientCheckpointingLayer).get("__init_subclass__")
        if wrap is not None and issubclass(ours, GradientCheckpointingLayer):
            wrap.__func__(ours)
    recorded = getattr(ours, "_can_record_outputs", None)
    if recorded:
        # Transformers looks up by class what output_hidden_states records, and registers a class
        # when it constructs a model. Assigning ``__class__`` constructs none, so register both.
        for either in (ours, parent):
            dict.__setitem__(_CAN_RECORD_REGISTRY, str(either), recorded)
    return ours


def _parent_of(ours: type) -> type | None:
    """The class of Transformers with the same name."""
    for base in ours.__mro__[1:]:
        if base.__name__ == ours.__name__ and base.__module__.startswith("transformers."):
            return base
    return None


def joined(*bases: Any, **attributes: Any) -> Any:
    """The class of mixins and their parent, the last of ``bases``, with the name of the parent.

    It stands for the class statement of a module inside of a model, if that has no methods.
    """
    attributes.setdefault("__module__", sys._getframe(1).f_globals["__name__"])
    made = types.new_class(bases[-1].__name__, bases, {}, lambda body: body.update(attributes))
    return made if issubclass(made, FastplmModel) else drop_in(documented(made))


def documented(ours: _Class) -> _Class:
    """Give a class without a docstring the one of its mixins: ``_summary`` says how such classes
    differ from their parents."""
    if "__doc__" not in vars(ours) or ours.__doc__ is None:
        summary, name = getattr(ours, "_summary", ""), ours.__name__
        text = f"``transformers.{name}``, " + summary
        ours.__doc__ = text if summary else ours.__mro__[1].__doc__
    return ours


def _positional(function: Callable) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _keywords_of(function: Callable) -> Any:
    """What a function says of the keywords that it does not name."""
    parameters = inspect.signature(function).parameters.values()
    return [p.annotation for p in parameters if p.kind is p.VAR_KEYWORD]


def _not_of(theirs: Iterable[str], name: str) -> bool:
    return name in _OF_SOME_PARENTS and name not in theirs


def _by_position(forward: Callable, parent: Callable) -> Callable:
    """``forward(self, **arguments)`` with the signature of the parent's, plus its own arguments."""
    signature = inspect.signature(parent)
    theirs = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = [parameter.name for parameter in theirs[1:]]
    _, *arguments = inspect.signature(forward).parameters.values()
    both = (*signature.parameters.values(), *arguments)
    others = [p for p in both if p.kind is p.VAR_KEYWORD][:1]
    options = [p for p in arguments if p.name not in names and p.kind is not p.VAR_KEYWORD]
    options = [p for p in options if not _not_of(names, p.name)]
    options = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in options]
    names += [parameter.name for parameter in options]

    @functools.wraps(forward)
    def by_position(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, value in zip(names, args):  # noqa: B905
            if name in kwargs:
                raise TypeError(f"forward() got multiple values for argument {name!r}")
            kwargs[name] = value
        if len(args) > len(names):
            raise TypeError(f"forward() takes {len(names)} positional arguments, got {len(args)}")
        return forward(self, **kwargs)

    by_position.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*theirs, *options, *others], return_annotation=signature.return_annotation
    )
    return by_position


def takes_cache(forward: Callable) -> Any:
    """Decorator of a ``forward`` with an argument ``past_key_values``: callers say ``CACHE``."""
    if CACHE == _OLD_CACHE:
        return forward

    @functools.wraps(forward)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if CACHE in kwargs:
            kwargs[_OLD_CACHE] = kwargs.pop(CACHE)
        return forward(self, *args, **kwargs)

    signature = inspect.signature(forward)
    parameters = signature.parameters.values()
    renamed.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p.replace(name=CACHE) if p.name == _OLD_CACHE else p for p in parameters]
    )
    return renamed


@drop_in
class NewGELUActivation(activations.NewGELUActivation):
    """One op for "gelu_new" of GPT-2, ALBERT and T5 1.1; the parent runs eight."""

    def forward(self, input: Tensor) -> Tensor:
        return gelu(input, "tanh")


@drop_in
class GELUTanh(activations.GELUTanh):
    """One op for "gelu_pytorch_tanh", the same function."""

    def forward(self, input: Tensor) -> Tensor:
        fused = isinstance(self.act, functools.partial)
        return gelu(input, "tanh") if fused else super().forward(input)


@drop_in
class Conv1D(transformers.pytorch_utils.Conv1D):
    """A linear layer with a transposed weight [K, M]; see ``fastplm.nn.Linear``."""

    def forward(self, x: Tensor) -> Tensor:
        dense = self.weight.layout is torch.strided
        out = LINEAR.layer(x, self.weight.t(), self.bias) if dense else None
        return super().forward(x) if out is None else out


def drop_in_for(module: nn.Module) -> type | None:
    """The drop-in class for a module. None if it has none, or if other models share the module."""
    return None if id(module) in _SHARED else DROP_INS.get(type(module))


def switch_modules(model: nn.Module) -> None:
    """Replace the class of each submodule that has a drop-in class. User subclasses stay."""
    for module in model.modules():
        ours = drop_in_for(module)
        if ours is not None:
            module.__class__ = ours


def restore_modules(model: nn.Module) -> None:
    """Undo ``switch_modules``."""
    parents = MADE | {ours: parent for parent, ours in DROP_INS.items()}
    for module in model.modules():
        parent = parents.get(type(module))
        if parent is not None:
            module.__class__ = parent


def own_configs(model: nn.Module) -> None:
    """Give all modules copies of their configurations, one of each: others may have them, too."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig):
                vars(module)[name] = copy.deepcopy(value, copies)


def share_config(module: nn.Module, config: PreTrainedConfig) -> None:
    """Make ``config`` the configuration of all submodules, and of the model without head.

    Transformers' ``EncoderDecoderModel`` gives its parts new configurations, but the submodules of
    an existing part keep the old one.
    """
    for child in module.children():
        if isinstance(child, PreTrainedModel) and child is not getattr(module, "base_model", None):
            continue
        if type(vars(child).get("config")) is type(config):
            child.config = config  # type: ignore[assignment]
        share_config(child, config)


def set_attention(model: nn.Module, name: str) -> None:
    """Write the name of an attention implementation where the layers of a model read it.

    Inner models are left out. The configuration of a model may not be that of its layers.
    """
    for value in vars(model).values():
        if isinstance(value, PreTrainedConfig):
            value._attn_implementation_internal = name
    for child in model.children():
        if not isinstance(child, PreTrainedModel):
            set_attention(child, name)


class FastplmModel:
    """Mixin in front of a Transformers model: fused attention and drop-in submodules.

    The attention implementation is "fastplm", unless the call that makes the model asks for another
    one: ``from_pretrained(…, attn_implementation=…)``. What a configuration says is no such wish:
    Transformers writes its own choice there whenever it builds a model. With another implementation
    padding is computed, too, and a line says so. The caller's configuration is not changed, and
    checkpoints do not store the choice.
    """

    #: ``forward`` divides its loss by ``num_items_in_batch``. Trainer reads this attribute; it is
    #: False where Trainer counts other labels than the loss, and then averages means of batches.
    accepts_loss_kwargs = True
    #: The arguments that the forward of the parent names, if it asks its ``loss_function``, which a
    #: user may set, and passes the others on to it; None if it computes its loss by itself.
    _named_by_parent: frozenset[str] | None = None
    #: Whether ``unpad`` may be the ``RaggedBatch`` of a packed row, whose rows are then returned.
    _takes_rows = False
    #: Whether ``labels`` has one for each text, not for each token.
    _one_label_a_text = False
    config: Any
    base_model: Any
    dtype: Any
    training: bool

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A class of this package whose parent has its name is that one's drop-in class."""
        super().__init_subclass__(**kwargs)
        ours = cls.__module__.startswith("fastplm.") and "_recipe" not in vars(cls)
        if ours and _parent_of(cls) is not None:
            drop_in(documented(cls))
        elif ours and issubclass(cls, PreTrainedModel):
            kind: Any = cls
            kind.forward = takes_packed(kind.forward, kind.forward)

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        if not IS_CHOSEN.get():
            config = copy.deepcopy(config)
            # Weights of attention are wanted with output_attentions: "eager" alone has them.
            if not config.output_attentions:
                self._say_what_is_left_aside(config._attn_implementation)
                config._attn_implementation = NAME
        with choosing():
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        switch_modules(self)  # type: ignore[arg-type]

    def _say_what_is_left_aside(self, name: str | None) -> None:
        usual = "sdpa" if self._supports_sdpa else "eager"  # type: ignore[attr-defined]
        if name not in (None, NAME, usual):
            _logger.warning_once(
                f"{type(self).__name__}: the configuration says attn_implementation={name!r}, as "
                f"after a model was made with it; this one is made with {NAME!r}. To choose "
                "another, pass it to from_pretrained or set_attn_implementation."
            )

    @classmethod
    def is_custom_code(cls) -> bool:
        """As of the parent: of others' code Transformers initializes no module without parameters.

        So what a file lacks would have the values of a plain layer: N(0, 1) in T5.
        """
        return False

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Like the parent. ``attn_implementation`` is "fastplm" by default."""
        with choosing(kwargs.get("attn_implementation"), cls):
            return super().from_pretrained(*args, **kwargs)  # type: ignore[misc]

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
        with choosing(kwargs.get("attn_implementation"), cls):
            return super()._from_config(copy.deepcopy(config), **kwargs)  # type: ignore[misc]

    def _has_our_attention(self) -> bool:
        return self.config._attn_implementation == NAME

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Like the parent."""
        before = self.config._attn_implementation
        with choosing():
            super().set_attn_implementation(  # type: ignore[misc]
                attn_implementation, *args, **kwargs
            )
        if (now := self.config._attn_implementation) != before:
            say_what_is_lost(now, type(self))

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """A class of this package can, one that ``accelerate`` made if its parent can.

        (The parent's answer, which it keeps, would be inherited.)
        """
        parent: Any = MADE.get(cls)
        return parent is None or parent._can_set_attn_implementation()


@contextlib.contextmanager
def choosing(name: Any = NAME, kind: type | None = None) -> Iterator[None]:
    """The attention implementation of drop-in models made inside; None = choose it as usual."""
    if name is None:
        yield
        return
    if kind is not None:
        say_what_is_lost(name, kind)
    token = IS_CHOSEN.set(True)
    try:
        yield
    finally:
        IS_CHOSEN.reset(token)


def say_what_is_lost(name: Any, kind: type) -> None:
    """Once for each name and class, where the user asks for another attention than fastplm's."""
    if name != NAME:
        _logger.warning_once(
            f"{kind.__name__}: with attn_implementation={name!r} padding is computed, and the "
            f"attention is not fastplm's. Leave it out, or pass {NAME!r}, to leave padding out."
        )


class TiedLookup:
    """Lookups in embeddings that may share their weight with a vocabulary head.

    If they do, all gradients are accumulated in one buffer. Only the loss may use ``weight``;
    logits use the weight of the decoder itself.

    Args:
        decoder: the head's projection to the vocabulary.
        kind: the class of the embeddings; an embedding of another class is called normally.
    """

    def __init__(self, decoder: nn.Module, kind: type[nn.Embedding] = nn.Embedding) -> None:
        self.decoder, self.kind = decoder, kind
        self.weight: Any = getattr(decoder, "weight", None)  # an adapter may have none

    def __call__(self, embedding: Any, input_ids: Tensor, *, read: bool = True) -> Any:
        """int64 [...] -> [..., E]; or, if they are not ``read``, what gets their gradient."""
        if not shares_table(embedding, self.decoder, self.kind):
            return embedding(input_ids) if read else None
        # Each lookup gets the table that the previous one returned, so that gradients add up.
        rows, self.weight = tied_lookup(embedding, input_ids, self.weight, read=read)
        return rows


def wants_output(model: PreTrainedModel, name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an argument or the configuration requests an output ("output_hidden_states", …)."""
    value = kwargs.get(name)
    return bool(getattr(model.config, name, False) if value is None else value)


def unpad_of(model: Any, unpad: Any, kwargs: dict[str, Any]) -> Any:
    """``unpad`` of a call. None becomes False where padding that is left out would be missed.

    Hidden states that are padded again are copies beside the graph: no gradient reaches them.
    """
    if unpad is not None:
        return unpad
    wanted = torch.is_grad_enabled() and wants_output(model, "output_hidden_states", kwargs)
    return False if wanted or READS in vars(model) else None


def may_read_beside(module: Any) -> bool:
    """Whether a module is, or holds, the user's own, which may read several rows of a text."""
    if type(module) is nn.Sequential:
        return any(map(may_read_beside, module))
    packages = ("fastplm.", "peft.", "torch.", "transformers.")
    if module is None or type(module).__module__.startswith(packages):
        return False
    return not (hasattr(module, "weight") or hasattr(module, "base_layer"))  # a linear layer


def warn_of_weights() -> None:
    _logger.warning_once(
        "output_attentions: fused attention computes no attention weights, so this call uses "
        "unfused attention, which needs more time and memory."
    )


def caches(use_cache: bool | None, past_key_values: Any) -> bool | None:
    """``use_cache``, whose default is False in ``torch.jit.trace``: it only returns tensors."""
    default = use_cache is None and past_key_values is None
    return False if default and torch.jit.is_tracing() else use_cache


def check_parts(model: Any, *parts: Any) -> None:
    """Check that no part is of the parent's class, as after ``restore`` of that part alone: a
    drop-in model tells its parts which rows it reads, which the parent's ignore."""
    for part in parts:
        if type(part) in DROP_INS or type(part) in MADE.values():
            where, kind = type(model).__name__, type(part)
            got = f"a part that is a {kind.__name__} of {kind.__module__}"
            fix = "Restore the outer model, too: fastplm.restore(model), or accelerate both again."
            fail(where, "model", got, "parts of fastplm.models, as the model itself is", fix)


def keeps_padding(model: Any, masks: Iterable[Tensor | None], kwargs: dict[str, Any]) -> str | None:
    """The name in ``_ragged.PADDING_REASONS`` of what makes a backbone keep padding, or None."""
    if not model._has_our_attention():
        return "attention"
    if any(mask is not None and mask.dim() != 2 for mask in masks):
        return "mask"
    if model.training and hasattr(model.get_input_embeddings(), "neftune_noise_alpha"):
        return "noise"
    if any(map(may_read_beside, model._modules.values())):
        return "layers"
    return "weights" if wants_output(model, "output_attentions", kwargs) else None


def check_batch(
    model: Any,
    given: Tensor,
    input_ids: Tensor | None,
    masks: Iterable[Tensor | None],
    sample_index: Tensor | None,
    output_rows: Any = None,
    words: tuple[str, ...] = (),
) -> None:
    """Check what a backbone is given, except sizes that differ between the families.

    ``given`` are the ids, or embeddings [B, T, E] in their place; ``masks`` those of the batch and
    of an encoder; ``output_rows`` int64 [P], or one of ``words``.
    """
    where, table = type(model).__name__, model.get_input_embeddings()
    # The user may have replaced the embeddings by larger ones; T5's parts do not learn of it.
    check_input_ids(where, input_ids, getattr(table, "num_embeddings", model.config.vocab_size))
    for name, mask in zip(("attention_mask", "encoder_attention_mask"), masks, strict=True):
        check_mask(where, name, mask)
    if sample_index is not None:
        check_tensor(where, "sample_index", sample_index)
        check_dtype(where, "sample_index", sample_index, (torch.int64,))
        fix = "Pass one of each sequence, as the collators return them."
        check_shape(where, "sample_index", sample_index, given.shape[:1], "[batch]", fix)
    if words and isinstance(output_rows, str):
        check_choice(where, "output_rows", output_rows, words)
    elif output_rows is not None:
        check_tensor(where, "output_rows", output_rows, ndim=1)
        check_dtype(where, "output_rows", output_rows, (torch.int64,))
        if values_are_known(output_rows):
            total = given.shape[0] * given.shape[1]
            check_flat_positions(where, "output_rows", output_rows, total)


def check_mask(where: str, name: str, mask: Any) -> None:
    """Check a padding mask [B, T], or a full mask with more dimensions."""
    if mask is None:
        return
    check_tensor(where, name, mask)
    expected = "[batch, tokens], 1 = token and 0 = padding"
    fix = "Pass what the tokenizer returns, with return_tensors='pt'."
    if mask.dim() < 2:
        fail(where, name, f"shape {tuple(mask.shape)}", expected, fix)
    if mask.dim() == 2 and mask.is_floating_point() and values_are_known(mask):
        if bool((mask < 0).any()):
            fix = "Pass mask == 0 if 0 was a token, and other numbers were added to the scores."
            fail(where, name, f"numbers from {float(mask.min())}", expected, fix)


def check_positions(where: str, table: nn.Module | None, length: int, cache: Any = None) -> None:
    """Check that a sequence is not longer than the position embeddings. Reads no tensor value.

    Args:
        table: the position embeddings; None = the model has none, so any length is valid.
        length: the number of tokens of a sequence.
        cache: the key-value cache of the tokens before them.
    """
    rows = getattr(table, "num_embeddings", None)
    if rows is not None:
        # The first rows of BART's and RoBERTa's embeddings belong to no position.
        padding = getattr(table, "padding_idx", None)
        most = rows - getattr(table, "offset", 0 if padding is None else padding + 1)
        if cache is not None or length > most:
            _check_room(where, most, length, cache)


def _check_room(where: str, most: int, length: int, cache: Any) -> None:
    before = cache.get_seq_length() if hasattr(cache, "get_seq_length") else 0
    if isinstance(before, int) and before + length > most:
        got = f"{length} tokens" + (f" after {before} in the cache" if before else "")
        fix = f"Cut the text: tokenizer(..., truncation=True, max_length={most})."
        expected = f"at most {most}, the positions of this model (max_position_embeddings)"
        fail(where, "input_ids", got, expected, fix)


def check_length(model: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """``check_positions`` before the forward of a model of Transformers without a drop-in class."""
    given = kwargs.get("input_ids", args[0] if args else None)
    given = kwargs.get("inputs_embeds") if given is None else given
    most = most_positions(model.config)
    # A row may hold several texts. The positions that are given say so, or its borders.
    if kwargs.get("position_ids") is not None or packing_of(kwargs) is not None:
        return
    if most is not None and isinstance(given, Tensor) and given.dim() > 1:
        _check_room(type(model).__name__, most, given.shape[1], kwargs.get(CACHE))


def looks_positions_up(model: nn.Module) -> bool:
    """Whether a model has a table of positions, one that is not of a model in it."""
    if isinstance(getattr(model, "pos_encoding", None), Tensor):  # CTRL's sines
        return True
    return any(
        (isinstance(child, nn.Embedding) and name in POSITION_TABLES)
        or (not isinstance(child, PreTrainedModel) and looks_positions_up(child))
        for name, child in model.named_children()
    )


def most_positions(config: Any) -> int | None:
    """The most tokens of a sequence, by the configuration of a model; None = any number."""
    said = (getattr(config, name, None) for name in _POSITIONS)
    positions = next((number for number in said if isinstance(number, int)), 0)
    if config.model_type in _AFTER_PADDING:
        positions -= (config.pad_token_id or 0) + 1  # the first rows belong to no position
    return positions if positions > 0 else None  # XLNet says -1


def check_input_ids(where: str, input_ids: Tensor | None, vocab_size: int) -> None:
    """Check ids against the vocabulary, on eager CPU tensors only: elsewhere it would be a sync."""
    if input_ids is None:
        return
    check_tensor(where, "input_ids", input_ids, ndim=2)
    check_dtype(where, "input_ids", input_ids, INTEGER)
    if input_ids.numel() == 0 or not values_are_known(input_ids):
        return
    low, high = (int(bound) for bound in input_ids.aminmax())
    if low < 0 or high >= vocab_size:
        got = f"ids from {low} to {high}"
        expected = f"0 to {vocab_size - 1}, the vocabulary of this model"
        fix = "Use the tokenizer of the checkpoint, or resize_token_embeddings."
        fail(where, "input_ids", got, expected, fix)
