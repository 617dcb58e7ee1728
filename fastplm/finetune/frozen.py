"""A frozen backbone: no gradients, no dropout, and each text computed once."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

#: The bytes of states that are kept at most.
MOST_BYTES = 4 << 30


class Kept(NamedTuple):
    """The outputs of a backbone for one text, on the CPU.

    Args:
        states: [layers, tokens, width], of the layers that the head reads.
        pooled: [width], None without a pooler.
        kind: the class of the outputs.
    """

    states: Tensor
    pooled: Tensor | None
    kind: Any


class Frozen:
    """The forward of a frozen backbone, which remembers the texts that it has seen.

    The backbone stays in evaluation mode, so that it has no dropout and a text has one state. A
    pooler that is new is trained.

    Args:
        model: of Transformers or of ``fastplm.models``, whose head is to be trained.
        kept: the outputs known already, of the same weights.
        new_pooler: whether the checkpoint had no weights for the pooler.
        layers: how many of the recorded hidden states the head reads, counted from the last one;
            0 = all.

    Attributes:
        keeps: whether new texts are remembered. It ends when ``MOST_BYTES`` are.
    """

    def __init__(
        self, model: Any, kept: dict[Any, Kept], *, new_pooler: bool = False, layers: int = 0
    ) -> None:
        self.backbone, self.kept = model.base_model, kept
        self.new_pooler, self.layers = new_pooler, layers
        self.keeps = False
        self._bytes = 0
        self._forward = self.backbone.forward
        self._signature = inspect.signature(self._forward)
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(new_pooler and name.startswith("pooler"))
        self.backbone.eval()
        self.backbone.train = lambda mode=True: self.backbone
        self.backbone.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs: dict[str, Any] = {}
        for name, value in self._signature.bind(*args, **kwargs).arguments.items():
            inputs |= value if isinstance(value, dict) else {name: value}  # **kwargs
        names = self._names(inputs)
        if names and all(name in self.kept for name in names):
            outputs = self._remembered(names, inputs)
        else:
            with torch.no_grad():
                outputs = self._forward(*args, **kwargs)
            if names and self.keeps:
                self._remember(names, outputs)
        if self.new_pooler and outputs.get("pooler_output") is not None:
            outputs["pooler_output"] = self._pooled(outputs["last_hidden_state"])
        return outputs

    def _names(self, inputs: dict[str, Any]) -> list[tuple]:
        """What each text of a batch is known by; none if the inputs are more than texts."""
        given = {name: value for name, value in inputs.items() if value is not None}
        # The labelled tokens, which ``extra_rows`` are, are never padding here; Transformers' heads
        # pass on the denominator of the loss; and a frozen backbone draws no dropout of samples.
        tensors = {"input_ids", "attention_mask", "token_type_ids"}
        tensors |= {"extra_rows", "num_items_in_batch", "sample_index"}
        options = {name: value for name, value in given.items() if name not in tensors}
        if any(isinstance(value, Tensor) for value in options.values()):
            return []
        if "input_ids" not in given or "attention_mask" not in given:
            return []
        ids = given["input_ids"]
        types = given.get("token_type_ids", torch.zeros_like(ids)).expand_as(ids)
        lengths = given["attention_mask"].sum(-1).tolist()
        chosen = tuple(sorted(options.items(), key=lambda option: option[0]))
        return [
            (tuple(row[:length]), tuple(kinds[:length]), chosen)
            for row, kinds, length in zip(ids.tolist(), types.tolist(), lengths, strict=True)
        ]

    def _remember(self, names: list[tuple], outputs: Any) -> None:
        states = outputs.get("hidden_states")
        states = [outputs["last_hidden_state"]] if states is None else states[-self.layers :]
        pooled = outputs.get("pooler_output")
        for index, name in enumerate(names):
            # A model whose head reads the first token alone returns that one.
            own = torch.stack([state[index, : len(name[0])] for state in states])
            state = None if pooled is None else pooled[index].float().cpu()
            self.kept[name] = Kept(own.float().cpu(), state, type(outputs))
            self._bytes += self.kept[name].states.nbytes
        if self._bytes > MOST_BYTES:
            self.kept.clear()
            self.keeps = False

    def _remembered(self, names: list[tuple], inputs: dict[str, Any]) -> Any:
        found = [self.kept[name] for name in names]
        weight = next(self.backbone.parameters())
        longest = max(each.states.shape[1] for each in found)
        if longest > 1:  # as long as the mask
            longest = inputs["attention_mask"].shape[1]
        rows = [
            nn.functional.pad(each.states, (0, 0, 0, longest - each.states.shape[1]))
            for each in found
        ]
        states = torch.stack(rows, 1).to(weight)  # [layers, B, T, E]
        outputs: dict[str, Any] = {"last_hidden_state": states[-1]}
        if inputs.get("output_hidden_states"):
            outputs["hidden_states"] = tuple(states)
        if found[0].pooled is not None:
            pooled = [each.pooled for each in found if each.pooled is not None]
            outputs["pooler_output"] = torch.stack(pooled).to(weight)
        return found[0].kind(**outputs)

    def _pooled(self, states: Tensor) -> Tensor:
        """What a new pooler makes of the states [B, T, E]: [B, E]."""
        if hasattr(self.backbone, "pooler_activation"):  # ALBERT's
            return self.backbone.pooler_activation(self.backbone.pooler(states[:, 0]))
        return self.backbone.pooler(states)
