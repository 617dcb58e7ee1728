"""Heads that read more of an encoder than its last layer's first token, frozen or fine-tuned."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.loss.loss_utils import ForSequenceClassificationLoss, ForTokenClassification
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from fastplm.errors import check_choice, fail
from fastplm.finetune.settings import FEATURES, HEADS, POOLINGS
from fastplm.models._encoder import EncoderModel
from fastplm.models._heads import ScaledLoss
from fastplm.models.auto import AutoModel

_LAST = 4
_LSTM_LAYERS = 2


class FeaturesConfig(PreTrainedConfig):
    """Configuration of ``FeaturesForSequenceClassification`` and ``…ForTokenClassification``.

    Args:
        encoder: the encoder's configuration, as a dict.
        features: "last" (default): the last layer's states [B, T, E] | "mix": a learned weighted
            sum of the states of the embeddings and all layers | "last-four": the last four layers'
            states, one behind the other [B, T, 4 E].
        head: "linear" (default) | "bilstm": a bidirectional LSTM of two layers, as wide as the
            encoder (half of it in each direction), and then a linear layer.
        pooling: of the states of a text: "cls": the first one | "mean" (default) | "max" |
            "last": the last one, which of a left-to-right encoder alone has seen the whole text.
        dropout: of the states before the LSTM and before the linear layer.

    Raises:
        ArgumentValueError: an unknown choice, or fewer than four layers for "last-four".

    Source: Peters et al. 2018 (arXiv 1802.05365), equation 1 (mix); Devlin et al. 2019 (arXiv
    1810.04805), §5.3 (last-four and bilstm).
    """

    model_type = "fastplm-features"

    encoder: dict | None = None
    features: str = "last"
    head: str = "linear"
    pooling: str = "mean"
    dropout: float = 0.1

    def __post_init__(self, **kwargs: Any) -> None:
        where = "FeaturesConfig"
        check_choice(where, "features", self.features, FEATURES)
        check_choice(where, "head", self.head, HEADS)
        check_choice(where, "pooling", self.pooling, POOLINGS)
        super().__post_init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """The width of the encoder."""
        return (self.encoder or {})["hidden_size"]


class ScalarMix(nn.Module):
    """``gamma * sum_j softmax(w)_j h_j`` of the states h_j of all layers: Peters et al. 2018, (1).

    Args:
        count: of the layers.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count))
        self.gamma = nn.Parameter(torch.ones(()))

    def forward(self, states: tuple[Tensor, ...]) -> Tensor:
        """Mix tensors of one shape."""
        weights = self.weight.softmax(0)
        return self.gamma * sum(w * state for w, state in zip(weights, states, strict=True))


class _Features(ScaledLoss, PreTrainedModel):
    """An encoder, and a head on its states."""

    config_class = FeaturesConfig
    base_model_prefix = "encoder"
    _supports_sdpa = True
    _outputs: Any
    _logits: Any
    _loss: Any

    def __init__(self, config: FeaturesConfig, encoder: Any = None) -> None:
        PreTrainedModel.__init__(self, config)
        if encoder is None:
            encoder = AutoModel.from_config(AutoConfig.for_model(**(config.encoder or {})))
        self.encoder: Any = encoder
        if getattr(encoder, "pooler", None) is not None:
            self.encoder.pooler = None
        layers = encoder.config.num_hidden_layers
        if config.features == "last-four" and layers < _LAST:
            got = f"last-four with an encoder of {layers} layers"
            expected = f"{_LAST} layers or more"
            fail("FeaturesConfig", "features", got, expected, "Choose mix or last.")
        width = config.hidden_size
        self.mix = ScalarMix(layers + 1) if config.features == "mix" else None
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = None
        given = width * (_LAST if config.features == "last-four" else 1)
        if config.head == "bilstm":
            options: Any = {"batch_first": True, "bidirectional": True}
            self.lstm = nn.LSTM(given, width // 2, _LSTM_LAYERS, **options)
            given = 2 * (width // 2)
        self.classifier = nn.Linear(given, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ScalarMix):  # of a checkpoint without a mixture
            init.zeros_(module.weight)
            init.ones_(module.gamma)

    def _states(self, attention_mask: Tensor, **inputs: Any) -> Tensor:
        """What the classifier reads of each token: [B, T, W]."""
        recorded = self.config.features != "last"
        inputs |= {"output_hidden_states": recorded, "return_dict": True}
        if recorded and isinstance(self.encoder, EncoderModel):
            inputs["unpad"] = True  # nobody reads padding, or the gradient of a state
        outputs = self.encoder(attention_mask=attention_mask, **inputs)
        if self.mix is not None:
            states = self.mix(outputs.hidden_states)
        elif recorded:
            states = torch.cat(outputs.hidden_states[-_LAST:], -1)
        else:
            states = outputs.last_hidden_state
        states = self.dropout(states)
        if self.lstm is None:
            return states
        # Padding is at the right. The lengths of a packed batch are on the CPU.
        lengths = attention_mask.sum(-1).cpu()
        packed = pack_padded_sequence(states, lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(
            self.lstm(packed)[0], batch_first=True, total_length=states.shape[1]
        )
        return self.dropout(states)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """Classify.

        Args:
            input_ids: int64 [B, T], padding at the right.
            attention_mask: [B, T], 0 = padding; None = no padding.
            labels: see the class.
            num_items_in_batch: the denominator of the loss; default the number of labels.
            inputs: of the encoder.
        """
        assert input_ids is not None
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = self._logits(mask, {"input_ids": input_ids, **inputs})
        loss = None if labels is None else self._loss(logits, labels)
        outputs = self._outputs(loss=loss, logits=logits)
        return self._scaled(outputs, labels, num_items_in_batch)


class FeaturesForSequenceClassification(_Features):
    """An encoder with a classifier, or a regression, of pooled states.

    Transformers has no such class. ``FeaturesForSequenceClassification.from_pretrained(folder)``
    loads one with its encoder, a drop-in model of ``fastplm.models``; ``save_pretrained`` saves it.
    Labels are int64 [B], or scores [B] for ``problem_type="regression"``; logits [B, labels].

    Args:
        config: a ``FeaturesConfig``; ``num_labels`` and ``problem_type`` as in Transformers.
        encoder: used as it is; by default a new one.
    """

    _outputs = SequenceClassifierOutput

    def _logits(self, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        config = self.config
        first = config.pooling == "cls" and config.features == "last" and self.lstm is None
        if first and hasattr(type(self.encoder), "_last_rows"):
            inputs["output_rows"] = "first"  # all that the last layer computes
        return self.classifier(pooled(self._states(mask, **inputs), mask, config.pooling))

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ForSequenceClassificationLoss(labels, logits, self.config)


class FeaturesForTokenClassification(_Features):
    """An encoder with a classifier of each token's states; see the class for sequences.

    Labels are int64 [B, T], -100 = none; logits [B, T, labels].
    """

    _outputs = TokenClassifierOutput

    def _logits(self, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        return self.classifier(self._states(mask, **inputs))

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ForTokenClassification(logits, labels, self.config)


def pooled(states: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One state for each text: [B, T, W] -> [B, W]; the tokens that ``mask`` [B, T] has count."""
    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        last = mask.sum(1).clamp(min=1) - 1
        return states[torch.arange(len(states), device=states.device), last.long()]
    kept = mask.bool()[..., None]
    if pooling == "max":
        return states.masked_fill(~kept, -torch.inf).amax(1)
    return states.masked_fill(~kept, 0).sum(1) / kept.sum(1).clamp(min=1)
