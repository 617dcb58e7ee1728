"""DistilBERT: drop-in for the classes of the same names in Transformers.

BERT's layers under other names, without token types.

Source: Sanh et al. 2019 (arXiv 1910.01108).
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor, nn
from transformers.models.distilbert import modeling_distilbert

from fastplm.models import _encoder, _heads
from fastplm.models._base import joined
from fastplm.models._layer import Attention, FeedForward, Join, Layer, stand_for
from fastplm.nn._rows import is_plain


class _Layer(_encoder.EncoderLayer):
    _around = (modeling_distilbert.DistilBertSelfAttention, modeling_distilbert.FFN)
    _feed_forward_method = "ff_chunk"
    _is_numbered = False

    def _attends(self: Any) -> tuple[Any, ...]:
        return (self._modules.get("attention"),)

    def _parts(self: Any, no_hooks: bool = True) -> Layer | None:
        attention, feed = (self._modules[name] for name in ("attention", "ffn"))
        if not self._is_known((attention, feed), no_hooks, feed):
            return None
        query, key, value, out, dropout = attention.children()
        join = Join(out, self._modules["sa_layer_norm"], 0.0)
        block = Attention(
            *(attention, attention.attention_head_size, dropout.p, (query, key, value), join)
        )
        parts = feed._modules
        end = Join(parts["lin2"], self._modules["output_layer_norm"], parts["dropout"])
        feed_forward = FeedForward(parts["lin1"], parts["activation"], end)
        return Layer((block,), feed_forward, self.training)


stand_for(*_Layer._around, modeling_distilbert.TransformerBlock)
TransformerBlock = joined(_Layer, modeling_distilbert.TransformerBlock)


class DistilBertModel(_encoder.EncoderModel, transformers.DistilBertModel):
    def _layers(self) -> Any:
        return self.transformer.layer


def _is_as_made(loss: Any) -> bool:
    """Whether a loss is the parent's: the user may set another, or one with other options."""
    if not is_plain(loss, nn.CrossEntropyLoss) or loss.weight is not None:
        return False
    return (loss.ignore_index, loss.label_smoothing, loss.reduction) == (-100, 0.0, "mean")


class DistilBertForMaskedLM(_heads.MaskedLM, transformers.DistilBertForMaskedLM):
    def _compute(self, labels: Tensor | None, inputs: Any, *how: Any) -> Any:
        if labels is None or _is_as_made(self.mlm_loss_fct):
            return super()._compute(labels, inputs, *how)
        inputs["unpad"] = False  # nobody knows which rows it reads, so all are computed
        outputs, _, logits = super()._compute(None, inputs, None, True, None)
        return outputs, self.mlm_loss_fct(logits.flatten(0, 1), labels.flatten()), logits

    def _head(self) -> _heads.Head:
        return self._transform, self.vocab_projector

    def _transform(self, rows: Tensor) -> Tensor:
        return self.vocab_layer_norm(self.activation(self.vocab_transform(rows)))


class DistilBertForSequenceClassification(
    _heads.SequenceClassification, transformers.DistilBertForSequenceClassification
): ...


class DistilBertForMultipleChoice(
    _heads.MultipleChoice, transformers.DistilBertForMultipleChoice
): ...


class DistilBertForTokenClassification(
    _heads.TokenClassification, transformers.DistilBertForTokenClassification
): ...


class DistilBertForQuestionAnswering(
    _heads.QuestionAnswering, transformers.DistilBertForQuestionAnswering
): ...
