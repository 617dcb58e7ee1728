"""What a model computes before its classes change, and whether it still does."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastplm.models._base import CACHE
from fastplm.nn import Dropout

#: Padding at the right, at the left and scattered; and at the right alone.
_MASKS = (
    [[1] * 8, [1] * 5 + [0] * 3, [0] * 3 + [1] * 5, [1, 1, 0, 1, 1, 1, 0, 0], [1, 0, 0] + [1] * 5],
    [[1] * 8, [1] * 5 + [0] * 3, [1] * 7 + [0], [1] * 3 + [0] * 5, [1] * 6 + [0] * 2],
)
_BATCH, _LENGTH = 5, 8
_STATES = 6  # of an encoder
#: How many roundings of fp32 two outputs, or two gradients, may differ: of the largest number of
#: their own, and of all.
_ROUNDINGS = (1024, 1), (16384, 1024)
_MOST = 1 << 22  # elements of a parameter whose gradient is compared
_SOME = 1 << 16  # elements of a tensor that are compared

#: (the place in a layer or outside of layers, the attribute) of a probability of dropout.
_Role = tuple[str, str]


class Trial(NamedTuple):
    """One call, or two of which the second has the cache of the first.

    Args:
        input: the name of the input that is tried; "" = ids, masks and labels.
        inner: whether the model without head is called.
        drops: what is dropped, in training, with a probability of 1. "" = nothing.
        gradients: whether these are compared; None = nobody computes any.
        read: the outputs that are compared; () = all.
    """

    calls: tuple[dict[str, Any], ...]
    input: str = ""
    inner: bool = False
    drops: _Role | str | None = None
    gradients: bool | None = False
    read: tuple[str, ...] = ()


class Proof:
    """What a model computes before its classes change, and whether it still does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        chosen = [p for p in model.parameters() if p.is_floating_point() and p.numel() <= _MOST]
        self.parameters = chosen[:48] + chosen[48:][-48:]
        with self._undisturbed():
            self.trials = list(_trials(model))
            self.before = [self._outcome(trial) for trial in self.trials]
        for one in self.before[:2]:
            if isinstance(one, type):
                raise ValueError(f"{one.__name__} for ids, or ids and a mask, alone")

    def differs(self) -> set[str]:
        """The inputs with which the model computes something else now, or raises another error.

        The ids and masks are "", and then nothing else is tried.
        """
        found: set[str] = set()
        with self._undisturbed():
            for trial, before in zip(self.trials, self.before, strict=True):
                if trial.input not in found and not _are_equal(self._outcome(trial), before):
                    found.add(trial.input)
                    if not trial.input:
                        break
        return found

    def _undisturbed(self) -> Any:
        return _left_alone(self.model, self.parameters)

    def _outcome(self, trial: Trial) -> Any:
        """(outputs, gradients), or the type of the error."""
        model: Any = self.model.base_model if trial.inner else self.model
        self.model.train(trial.drops is not None)
        # What is dropped with a probability of 1 is known, and where it is dropped is seen.
        for role, module, name in _rates(self.model):
            vars(module)[name] = float(role == trial.drops)
        try:
            with torch.set_grad_enabled(trial.gradients is not None):
                outputs = _outputs(model, trial)
            found: Any = ()
            if trial.gradients:
                total: Any = sum(
                    (one * _weights(one)).sum() for one in outputs if one.requires_grad
                )
                found = torch.autograd.grad(total, self.parameters, allow_unused=True)
        except Exception as error:
            return type(error)
        return [_some(one) for one in outputs], [_some(one) for one in found if one is not None]


# --- what is tried --------------------------------------------------------------------------------


def _trials(model: Any) -> Iterator[Trial]:
    config, names = model.config, inspect.signature(model.forward).parameters
    plain, padded, right = (_batch_for(model, mask) for mask in (None, *_MASKS))
    yield Trial((plain,), gradients=True)
    yield Trial((padded,), gradients=True)
    predicts = "labels" in plain
    if predicts:  # which may compute the labelled rows alone
        yield Trial((padded,), drops="", gradients=True, read=("loss",))
    if (inner := model.base_model) is not model:  # what the head does not read, as a pooler
        # At the right: before the first token, a decoder's pooler reads what attends to nothing.
        yield Trial((_batch_for(inner, _MASKS[1]),), inner=True, gradients=True)
    for role in dict.fromkeys(role for role, *_ in _rates(model)):
        yield Trial((_without(padded, "labels"),), drops=role)
    if config.is_encoder_decoder:
        yield from _of_sides(model, plain, right, predicts)
    within = inspect.signature(inner.forward).parameters
    for seed, batch in enumerate((plain, right)):
        for name, values in _further(model, seed).items():
            given = _without_ids(batch, name) | _choices(model, values)
            how: Any = {"gradients": False if seed else None}
            if name in names:
                yield Trial((given,), name, **how)
            elif name in within:
                given = _without_ids(_batch_for(inner, _MASKS[1] if seed else None), name)
                yield Trial((given | values,), name, inner=True, **how)
            if name == "encoder_hidden_states" and {name, "use_cache"} <= names.keys():
                yield Trial(_in_two(model, batch | values), name, gradients=None)
    decodes = config.is_encoder_decoder or getattr(config, "is_decoder", False)
    if "use_cache" in names and decodes and (predicts or inner is model):
        yield Trial(_in_two(model, right), "use_cache", gradients=None)
    if "logits_to_keep" in names:
        kept = _without(plain, "labels") | {"logits_to_keep": 2}
        yield Trial((kept,), "logits_to_keep", gradients=None)
    if "labels" in names and not predicts:
        shape = (_BATCH, _LENGTH) if "ForTokenClass" in type(model).__name__ else (_BATCH,)
        labels = torch.arange(_BATCH * _LENGTH, device=model.device)[: torch.Size(shape).numel()]
        yield Trial((right | {"labels": labels.view(shape) % 2},), "labels")


def _of_sides(model: Any, plain: Any, right: Any, predicts: bool) -> Iterator[Trial]:
    """The ways to say what the decoder of an encoder-decoder reads."""
    alone = _without(right, "decoder_input_ids", "labels")
    yield Trial((alone,))
    ids = alone["input_ids"].flip(0)
    yield Trial((_without(plain, "labels") | {"decoder_input_ids": ids},), "decoder_input_ids")
    seen = alone["attention_mask"]
    scattered = torch.tensor(_MASKS[0], device=model.device)
    scattered[:, 0] = 1  # as a row before it would attend to nothing
    both = {"decoder_input_ids": ids, "decoder_attention_mask": scattered}
    yield Trial((alone | both,), "decoder_attention_mask")
    rows = model.get_input_embeddings()(ids).detach()
    yield Trial((alone | {"decoder_inputs_embeds": rows},), "decoder_inputs_embeds")
    if predicts:
        labels = ids.masked_fill(seen.flip(0) == 0, -100)
        yield Trial((alone | {"labels": labels},), gradients=True)
        both = {"labels": labels, "decoder_inputs_embeds": rows}
        yield Trial((alone | both,), "decoder_inputs_embeds")


def _batch_for(model: Any, mask: Any) -> dict[str, Any]:
    """A few short texts for a model, padded with its padding."""
    config, device, name = model.config, model.device, type(model).__name__
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "unk")}
    special |= {getattr(config, "decoder_start_token_id", None)}
    words = [one for one in range(min(config.vocab_size, 200)) if one not in special]
    choice = torch.arange(_BATCH * _LENGTH, device=device) * 7 % len(words)
    ids = torch.tensor(words, device=device)[choice].view(_BATCH, _LENGTH)
    seen = torch.ones_like(ids) if mask is None else torch.tensor(mask, device=device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = seen
        ids.masked_fill_(seen == 0, getattr(config, "pad_token_id", None) or 0)
    if config.is_encoder_decoder:
        if getattr(config, "eos_token_id", None) is not None:  # the last of which some heads read
            for places in (seen.argmax(1), (seen * torch.arange(1, 9, device=device)).argmax(1)):
                ids[torch.arange(_BATCH, device=device), places] = config.eos_token_id
        if not name.endswith("ForSequenceClassification"):
            inputs["decoder_input_ids"] = ids.flip(0)[:, : _LENGTH - 2]
    names = inspect.signature(model.forward).parameters
    if "use_cache" in names:
        inputs["use_cache"] = False
    if "labels" in names and model.get_output_embeddings() is not None:
        seen = seen.bool()
        inputs["labels"] = ids.masked_fill(~(seen & seen.roll(1, 1)), -100)
        if config.is_encoder_decoder:
            inputs["labels"] = inputs["decoder_input_ids"].flip(1)
    return _choices(model, inputs)


def _choices(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a model that chooses between two texts."""
    if "MultipleChoice" not in type(model).__name__:
        return inputs
    both = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
    return inputs | {k: torch.stack((v, v.roll(1, 0)), 1) for k, v in both.items()}


def _further(model: Any, seed: int) -> dict[str, dict[str, Tensor]]:
    """{the name of an input: its values, and those that belong to it}; the seed gives others."""
    config, device = model.config, model.device
    generator = torch.Generator().manual_seed(seed)

    def size(name: str) -> int:
        return getattr(config, name, None) or 1

    def numbers(most: int, *more: int, columns: int = _LENGTH) -> Tensor:
        shape = _BATCH, columns, *more
        return torch.randint(most, shape, generator=generator, device="cpu").to(device)

    def floats(columns: int, width: int) -> Tensor:
        out = torch.randn(_BATCH, columns, width, generator=generator, device="cpu")
        return out.to(device, model.dtype)

    sizes = getattr(config, "type_vocab_sizes", None)  # of tables, one for each column
    types = numbers(size("type_vocab_size"))
    if sizes is not None:
        types = torch.stack([numbers(one) for one in sizes], -1)
    corner, side = (numbers(max(size("max_2d_position_embeddings") // 2, 1), 2) for _ in range(2))
    depth, mentions = size("max_depth"), size("max_mention_length")
    found = {
        "token_type_ids": types,
        "position_ids": numbers(_LENGTH),
        "inputs_embeds": model.get_input_embeddings()(numbers(10)).detach(),
        "bbox": torch.cat((corner, corner + side), -1),
        "task_type_ids": numbers(size("task_type_vocab_size")),
        "input_shape_ids": numbers(size("shape_vocab_size")),
        "input_pronunciation_ids": numbers(size("pronunciation_vocab_size")),
        "xpath_tags_seq": numbers(size("max_xpath_tag_unit_embeddings"), depth),
        "xpath_subs_seq": numbers(size("max_xpath_subs_unit_embeddings"), depth),
        "lang_ids": numbers(len(getattr(config, "languages", "1")))[:, 0],
    }
    values = {name: {name: value} for name, value in found.items()}
    values["entity_ids"] = {
        "entity_ids": numbers(size("entity_vocab_size"), columns=3),
        "entity_position_ids": numbers(_LENGTH, mentions, columns=3),
        "entity_attention_mask": torch.ones_like(types[:, :3]),
        "entity_token_type_ids": numbers(size("type_vocab_size"), columns=3),
    }
    if getattr(config, "is_decoder", False):
        width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
        states = {"encoder_hidden_states": floats(_STATES, width)}
        if seed:
            mask = torch.tensor(_MASKS[0], device=device)[:, :_STATES]
            states["encoder_attention_mask"] = mask
        values["encoder_hidden_states"] = states
    return values


def _without(inputs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in inputs.items() if name not in names}


def _without_ids(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    return _without(inputs, "input_ids") if name == "inputs_embeds" else inputs


def _in_two(model: Any, inputs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first tokens, and those after them."""
    given = _without(inputs, "labels") | {"use_cache": True}
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    first, second = given | {name: given[name][:, :3]}, given | {name: given[name][:, 3:]}
    if name == "input_ids" and "attention_mask" in given:
        first["attention_mask"] = given["attention_mask"][:, :3]
    return first, second


# --- what is compared -----------------------------------------------------------------------------


def _outputs(model: Any, trial: Trial) -> list[Tensor]:
    """The outputs, without those of padding."""
    found: list[Tensor] = []
    cached: dict[str, Any] = {}
    sides = model.config.is_encoder_decoder
    for inputs in trial.calls:
        outputs = model(**inputs, **cached)
        if len(trial.calls) == 2:
            cached = {CACHE: outputs.get(CACHE)}
        for name, value in outputs.items():
            mask = inputs.get("attention_mask")
            if sides and "encoder" not in name:
                mask = inputs.get("decoder_attention_mask")
            if not trial.read or name in trial.read:
                found += [_of_tokens(name, one, mask) for one in _flat(value)]
    return found


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [one for part in value for one in _flat(part)] if isinstance(value, tuple) else []


def _of_tokens(name: str, value: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None or name == "pooler_output" or value.dim() < 2:
        return value
    mask = mask.flatten(0, -2)
    if value.dim() > 2 and value.shape[1] <= mask.shape[1]:
        mask = mask[:, -value.shape[1] :]
    return value[mask.bool()] if value.shape[:2] == mask.shape else value


def _weights(output: Tensor) -> Tensor:
    """Numbers that depend on the place, which cancel nowhere."""
    places = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
    return (1.3 * places + 0.4).cos().to(output.dtype).view(output.shape)


def _some(value: Tensor) -> Tensor:
    return value.detach().flatten()[:: value.numel() // _SOME | 1].clone()


def _are_equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, type) or isinstance(theirs, type):
        both = isinstance(ours, type) and isinstance(theirs, type)
        return both and issubclass(ours, theirs)
    eps = torch.finfo(torch.float32).eps  # parents compute parts in fp32
    for mine, others, (most, of_all) in zip(ours, theirs, _ROUNDINGS, strict=True):
        if [one.shape for one in mine] != [one.shape for one in others]:
            return False
        scales = [float(x.nan_to_num().abs().max()) if x.numel() else 0.0 for x in others]
        least = eps * of_all * max(scales, default=0.0)
        for one, other, scale in zip(mine, others, scales, strict=True):
            if not torch.equal(one.isfinite(), other.isfinite()):
                return False
            if bool(((one - other).nan_to_num().abs() > eps * most * scale + least).any()):
                return False
    return True


def _rates(model: nn.Module) -> Iterator[tuple[_Role, nn.Module, str]]:
    """The probabilities of dropout: (where, the module, the attribute)."""
    kinds = nn.Dropout, Dropout
    for path, module in model.named_modules():
        alone = isinstance(module, kinds)
        parts = path.split(".")[: -1 if alone else None]
        place = ".".join(part for part in parts if not part.isdigit())
        # Attention may have a module and a number of the same meaning.
        beside = alone or any(isinstance(child, kinds) for child in module.children())
        for name, value in vars(module).items():
            if isinstance(value, float) and (alone and name == "p" or "drop" in name):
                yield (place, "" if beside else name), module, name


@contextlib.contextmanager
def _left_alone(model: Any, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Restores modes, probabilities, what requires gradients, the generators of numbers, and what
    a head concludes from labels."""
    modes = [(module, module.training) for module in model.modules()]
    rates = [(module, name, vars(module)[name]) for _, module, name in _rates(model)]
    needs = [(parameter, parameter.requires_grad) for parameter in parameters]
    devices = [parameters[0].device] if parameters and parameters[0].is_cuda else []
    problem = model.config.problem_type
    try:
        with torch.random.fork_rng(devices):
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
    finally:
        model.config.problem_type = problem
        for module, mode in modes:
            module.training = mode
        for module, name, rate in rates:
            vars(module)[name] = rate
        for parameter, need in needs:
            parameter.requires_grad_(need)
