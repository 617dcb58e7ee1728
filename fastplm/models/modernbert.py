"""ModernBERT: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from typing import Any

import transformers
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.modernbert import modeling_modernbert as theirs

from fastplm.models import _described, _heads
from fastplm.models._layer import ANGLES
from fastplm.models._ragged import RaggedBatch

ModernBertEncoderLayer = _described.layer(
    *(theirs, "ModernBert", "EncoderLayer", "Attention MLP"),
    _described.Names(
        attention="attn",
        projections=("attn.Wqkv",),
        context="attn.Wo",
        context_dropout="attn.out_drop",
        norms=("attn_norm", "mlp_norm"),
        inner="mlp.Wi",
        activation="mlp.act",
        outer="mlp.Wo",
        dropout="mlp.drop",
        gated=True,
        probability="attention_dropout",
    ),
)


class ModernBertModel(_described.Encoder, transformers.ModernBertModel):
    """``transformers.ModernBertModel`` with fused attention, computing only tokens.

    Source: Warner et al. 2024 (arXiv 2412.13663).
    """

    _block, _last_norm, _output = ModernBertEncoderLayer, "final_norm", BaseModelOutput
    _rotary, contiguous = "rotary_emb", True  # a window counts the rows in holes of the mask

    def _embedded(self, **inputs: Any) -> Tensor:
        return self.embeddings(inputs["input_ids"], inputs["inputs_embeds"])

    def _of_layers(
        self: Any, hidden: Tensor, position_ids: Tensor, mask: Tensor | None
    ) -> list[dict[str, Any]]:
        kinds = [layer.attention_type for layer in self.layers]
        angles = {kind: self.rotary_emb(hidden, position_ids, kind) for kind in {*kinds}}
        given = [{ANGLES: angles[kind]} for kind in kinds]
        for one, layer in zip(given, self.layers, strict=True):
            size = layer.attn.sliding_window  # counts the row itself
            # As in the parent, a mask [B, 1, Tq, Tk] of the caller is that of all layers.
            if size is not None and (mask is None or mask.dim() == 2):
                one["window"] = (size - 1, size - 1)
        return given

    def _last_layer(self: Any) -> int | None:
        """None if the last layer has a window: it counts the queries before a row."""
        window = len(self.layers) and getattr(self.layers[-1].attn, "sliding_window", None)
        return super()._last_layer() if window is None else None


class ModernBertForMaskedLM(_heads.MaskedLM, transformers.ModernBertForMaskedLM):
    _loss_by_name = False

    def _head(self) -> _heads.Head:
        return self.head, self.decoder

    def _kept(self, labels: Tensor) -> Tensor | None:
        return labels.flatten() != self.sparse_pred_ignore_index if self.sparse_prediction else None

    def _compute(self, labels: Tensor | None, inputs: Any, *how: Any) -> Any:
        kept = None if labels is None else self._kept(labels)
        if labels is None or kept is None:
            return super()._compute(labels, inputs, *how)
        labels = labels.masked_fill(~kept.view(labels.shape), -100)
        if how[1] and isinstance(inputs.get("unpad"), RaggedBatch):
            inputs["unpad"] = False  # the kept ones are rows of the padded batch
        outputs, loss, logits = super()._compute(labels, inputs, *how)
        if logits is not None:
            logits = logits.flatten(0, 1)[kept]
            if logits.requires_grad:
                loss = _heads.loss_of_logits(self, logits, labels.flatten()[kept], *how[2:])
        return outputs, loss, logits


class ModernBertForSequenceClassification(
    _heads.PooledClassification, transformers.ModernBertForSequenceClassification
): ...


class ModernBertForMultipleChoice(_heads.MultipleChoice, transformers.ModernBertForMultipleChoice):
    def _select_rows(self, inputs: dict[str, Any], labels: Tensor | None) -> None:
        _heads.set_output_rows(self, inputs, None)  # the first token may be after padding


class ModernBertForTokenClassification(
    _heads.TokenClassification, transformers.ModernBertForTokenClassification
): ...


class ModernBertForQuestionAnswering(
    _heads.QuestionAnswering, transformers.ModernBertForQuestionAnswering
): ...
