"""What a model computes before its classes change, and whether it still does."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fastplm.nn import Dropout

_BATCH, _LENGTH = 3, 8
#: None, at the right, at the left, and scattered.
_MASKS: tuple[Any, ...] = (
    None,
    [[1] * 8, [1] * 5 + [0] * 3, [1] * 7 + [0]],
    [[1] * 8, [0] * 3 + [1] * 5, [0] + [1] * 7],
    [[1] * 8, [1, 1, 0, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 1, 1, 1]],
)
#: How many roundings of fp32 of the largest number two outputs, or two gradients, may differ.
_ROUNDINGS = 1024, 16384
_MOST = 1 << 22  # elements of a parameter whose gradient is compared


class Proof:
    """What a model computes before its classes change, and whether it still does."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        chosen = [p for p in model.parameters() if p.is_floating_point() and p.numel() <= _MOST]
        self.parameters = chosen[:48] + chosen[48:][-48:]
        self.before = self._results()

    def holds(self) -> bool:
        pairs = zip(self._results(), self.before, strict=True)
        return all(map(_are_equal, *zip(*pairs, strict=True)))

    def _results(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """(outputs, gradients) of each batch."""
        found, model = [], self.model
        with _left_alone(model, self.parameters), torch.enable_grad():
            for mask in _MASKS:
                found.append(self._of_batch(model, mask))
            if (inner := model.base_model) is not model:  # what the head does not read, as a pooler
                found.append(self._of_batch(inner, _MASKS[1]))
            # What is dropped with a probability of 1 is known, and where it is dropped is seen. (In
            # layers: without embeddings, norms would have no numbers.)
            rates = list(_rates(model))
            for role in sorted({role for role, *_ in rates if role is not None}):
                model.train()
                for its_role, module, name in rates:
                    vars(module)[name] = float(its_role == role)
                found.append(self._of_batch(model, _MASKS[1]))
        return found

    def _of_batch(self, model: Any, mask: Any) -> tuple[list[Tensor], list[Tensor]]:
        inputs = _batch_for(model, mask)
        outputs = _tensors(model(**inputs), inputs)
        total: Any = 0
        for one in outputs:
            weights = torch.linspace(-1, 1, one.numel(), device=one.device, dtype=one.dtype)
            total = total + (one.flatten() * weights).sum() if one.requires_grad else total
        grads = torch.autograd.grad(total, self.parameters, allow_unused=True)
        return [one.detach() for one in outputs], [g for g in grads if g is not None]


def _batch_for(model: Any, mask: Any) -> dict[str, Any]:
    """A few short texts for a model, padded with its padding."""
    config, device = model.config, model.device
    special = {getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "unk")}
    special |= {getattr(config, "decoder_start_token_id", None)}
    words = [one for one in range(min(config.vocab_size, 200)) if one not in special]
    choice = torch.arange(_BATCH * _LENGTH, device=device) * 7 % len(words)
    ids = torch.tensor(words, device=device)[choice].view(_BATCH, _LENGTH)
    inputs: dict[str, Any] = {"input_ids": ids}
    if mask is not None:
        inputs["attention_mask"] = torch.tensor(mask, device=device)
        padding = getattr(config, "pad_token_id", None) or 0
        ids.masked_fill_(inputs["attention_mask"] == 0, padding)
    if config.is_encoder_decoder:
        if getattr(config, "eos_token_id", None) is not None:  # which some classifiers read
            seen = torch.ones_like(ids) if mask is None else inputs["attention_mask"]
            last = (seen * torch.arange(1, _LENGTH + 1, device=device)).argmax(1)
            ids[torch.arange(_BATCH, device=device), last] = config.eos_token_id
        inputs["decoder_input_ids"] = ids.flip(0)[:, : _LENGTH - 2]
    if "MultipleChoice" in type(model).__name__:
        inputs = {name: torch.stack((one, one.flip(0)), 1) for name, one in inputs.items()}
    names = inspect.signature(model.forward).parameters
    if "use_cache" in names:
        inputs["use_cache"] = False
    if "labels" in names and model.get_output_embeddings() is not None and not model.training:
        seen = inputs.get("attention_mask", torch.ones_like(ids)).bool()
        inputs["labels"] = ids.masked_fill(~(seen & seen.roll(1, 1)), -100)
        if config.is_encoder_decoder:
            inputs["labels"] = inputs["decoder_input_ids"].flip(1)
    return inputs


def _tensors(outputs: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """The outputs, without those of padding."""
    mask: Tensor | None = inputs.get("attention_mask")
    found = []
    for name, value in outputs.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            if mask is not None and value.shape[:2] == mask.shape and name != "pooler_output":
                value = value[mask.bool()]
            found.append(value)
    return found


def _are_equal(ours: Any, theirs: Any) -> bool:
    for mine, others, most in zip(ours, theirs, _ROUNDINGS, strict=True):
        if [one.shape for one in mine] != [one.shape for one in others]:
            return False
        for one, other in zip(mine, others, strict=True):
            if not torch.equal(one.isfinite(), other.isfinite()):
                return False
            least = most * torch.finfo(torch.float32).eps  # parents compute parts in fp32
            scale = max((float(x.nan_to_num().abs().max()) for x in others if x.numel()), default=0)
            if bool(((one - other).nan_to_num().abs() > least * scale).any()):
                return False
    return True


def _rates(model: nn.Module) -> Iterator[tuple[str | None, nn.Module, str]]:
    """The probabilities of dropout: (the place in a layer, the module, the attribute)."""
    for path, module in model.named_modules():
        alone = isinstance(module, (nn.Dropout, Dropout))
        parts = path.split(".")[: -1 if alone else None]
        place = ".".join(part for part in parts if not part.isdigit())
        inside = any(part.isdigit() for part in parts)
        for name, value in vars(module).items():
            if isinstance(value, float) and (alone and name == "p" or "drop" in name):
                yield place if inside else None, module, name


@contextlib.contextmanager
def _left_alone(model: nn.Module, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Restores modes, probabilities, what requires gradients and the generators of numbers."""
    modes = [(module, module.training) for module in model.modules()]
    rates = [(module, name, vars(module)[name]) for _, module, name in _rates(model)]
    needs = [(parameter, parameter.requires_grad) for parameter in parameters]
    devices = [parameters[0].device] if parameters and parameters[0].is_cuda else []
    try:
        with torch.random.fork_rng(devices):
            model.eval()
            for parameter in parameters:
                parameter.requires_grad_(True)
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        for module, name, rate in rates:
            vars(module)[name] = rate
        for parameter, need in needs:
            parameter.requires_grad_(need)
