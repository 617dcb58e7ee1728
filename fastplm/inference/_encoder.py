"""The hidden states of chosen layers, on packed rows; no layer above them is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from fastplm.errors import UnsupportedError, check, check_type
from fastplm.inference._batches import Batch, evaluating
from fastplm.models._encoder import EncoderModel
from fastplm.models._gpt import CausalModel
from fastplm.models._ragged import RaggedBatch
from fastplm.models._seq2seq import Stack


class _Enough(Exception):
    """The last layer that is needed is done."""


class Encoder:
    """The hidden states of a batch, layer by layer, on its tokens alone.

    A model with a head gives the states below it, an encoder-decoder those of its encoder.

    Args:
        where: the caller, for errors.
        model: of fastplm or Transformers.
        layers: which hidden states: 0 = the embeddings, i = those after layer i, -1 = the last
            ones, as in ``output_hidden_states`` of Transformers.

    Raises:
        ArgumentTypeError, ArgumentValueError: no model, or one that has fewer layers.
    """

    def __init__(self, where: str, model: Any, layers: Sequence[int] = (-1,)) -> None:
        expected = "a model of fastplm.models or Transformers"
        fix = "Load it with fastplm.models.AutoModel.from_pretrained."
        check_type(where, "model", model, PreTrainedModel, expected, fix)
        backbone: Any = model.base_model
        inner = getattr(backbone, "encoder", None)
        self.backbone: Any = inner if isinstance(inner, PreTrainedModel) else backbone
        self.config = self.backbone.config
        self.device = self.backbone.device
        self.width = self.config.hidden_size
        #: How many layers there are.
        self.depth = depth = self.config.num_hidden_layers
        there = len(layers) > 0 and all(-depth <= i + 1 <= depth + 1 for i in layers)
        expected = f"numbers from {-depth - 1} to {depth}, as the model has {depth} layers"
        fix = "0 is the embeddings, -1 the last layer."
        check(there, where, "layers", list(layers), expected, fix)
        self.layers = [i % (depth + 1) for i in layers]
        self._states: dict[int, Tensor] = {}
        self._hooked = self._blocks() if min(self.layers) < depth else []
        got = f"{list(layers)} of a {type(self.backbone).__name__}"
        expected = "the last layer, as the layers of this model are not known"
        known = bool(self._hooked) or min(self.layers) == depth
        check(known, where, "layers", got, expected, "Leave it out.", UnsupportedError)

    def _blocks(self) -> list[nn.Module]:
        """The modules whose outputs are the hidden states, as Transformers records them."""
        recorded = _CAN_RECORD_REGISTRY.get(self.backbone).get("hidden_states")
        kind = getattr(recorded, "target_class", recorded)
        if kind is None:  # GPT, MPNet, DeBERTa
            layers = getattr(self.backbone, "_layers", lambda: getattr(self.backbone, "h", ()))
            return list(layers())
        return [module for module in self.backbone.modules() if isinstance(module, kind)]

    @property
    def selects(self) -> bool:
        """Whether the model computes in its last layer only the rows that are asked for."""
        return (
            self.layers == [self.depth]
            and isinstance(self.backbone, EncoderModel)
            and not isinstance(self.backbone, CausalModel)
        )

    @contextmanager
    def ready(self) -> Iterator[None]:
        """In this block the encoder can be called: dropout is off, and no gradient is recorded."""
        handles = [block.register_forward_hook(self._record) for block in self._hooked]
        try:
            with evaluating(self.backbone):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, module: nn.Module, inputs: tuple, output: Any) -> None:
        self._count += 1
        if self._count == 1 and 0 in self.layers:
            self._states[0] = inputs[0]
        if self._count in self.layers and self._count < self.depth:
            self._states[self._count] = output if isinstance(output, Tensor) else output[0]
        if max(self.layers) <= self._count < self.depth:
            raise _Enough

    def __call__(self, batch: Batch, rows: Tensor | None = None) -> list[Tensor]:
        """The states of each of ``layers``: [N, E], or [P, E] of chosen ``rows``, int64 [P]."""
        packed = batch.rows.to(self.device)
        inputs: dict[str, Any] = {"input_ids": batch.ids.to(self.device)}
        if len(packed.positions) < batch.ids.numel():
            inputs["attention_mask"] = packed.token_mask().long()  # XLNet subtracts it
        rows = None if rows is None else rows.to(self.device)
        if isinstance(self.backbone, EncoderModel | Stack):
            inputs["unpad"] = packed.with_spare_slots(self.backbone.dtype)
        if isinstance(self.backbone, CausalModel):
            inputs["use_cache"] = False  # with a cache the batch stays padded
        if rows is not None and self.selects:
            inputs["output_rows"] = packed.positions[rows]
            return [self.backbone(**inputs).last_hidden_state[:, 0]]
        self._states, self._count = {}, 0
        with suppress(_Enough):
            self._states[self.depth] = self.backbone(**inputs).last_hidden_state
        states = [_tokens(self._states[i], packed) for i in self.layers]
        self._states = {}
        return states if rows is None else [state[rows] for state in states]


def _tokens(state: Tensor, rows: RaggedBatch) -> Tensor:
    """[1, N or more, E] or [B, T, E] -> [N, E]."""
    flat, count = state.flatten(0, 1), len(rows.positions)
    return flat[:count] if len(state) == 1 else flat[rows.positions]
