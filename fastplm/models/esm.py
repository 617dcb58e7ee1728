"""ESM-2: drop-in for the classes of the same names in Transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers
from torch import Tensor
from transformers.activations import GELUActivation
from transformers.models.esm import modeling_esm as theirs

from fastplm.models import _described, _heads, roberta
from fastplm.models._base import check_input_ids, check_positions
from fastplm.models._ragged import read_by_callers

EsmLayer = _described.layer(
    *(theirs, "Esm", "Layer", _described.PARTS_OF_BERT),
    _described.OF_BERT._replace(activation=GELUActivation()),  # the parent's is a function
)


class EsmModel(_described.Encoder, roberta.Backbone, transformers.EsmModel):
    """``transformers.EsmModel`` with fused attention, computing only tokens after the embeddings.

    The embeddings depend on the number of masked tokens of a sequence: those of the padded batch.

    Source: Lin et al. 2023, "Evolutionary-scale prediction of atomic-level protein structure with a
    language model".
    """

    _block, _last_norm = EsmLayer, "encoder.emb_layer_norm_after"

    @property
    def _rotary(self) -> str:  # type: ignore[override]
        return "" if self.rotary_embeddings is None else "rotary_embeddings"

    def forward(
        self,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        lookup: Callable[..., Any] | None = None,
        **inputs: Any,
    ) -> Any:
        """Like the parent, with the additional arguments of ``BertModel``."""
        if inputs_embeds is None and input_ids is not None:
            where, embeddings = type(self).__name__, self.embeddings
            check_input_ids(where, input_ids, embeddings.word_embeddings.num_embeddings)
            table = getattr(embeddings, "position_embeddings", None)
            if table is not None and position_ids is None:
                check_positions(where, table, self._positions_taken(input_ids, input_ids))
            if all(inputs.get(name) is None for name in ("unpad", "output_rows", "extra_rows")):
                rows = read_by_callers(self.config, input_ids, attention_mask)
                inputs["extra_rows"] = rows  # the embeddings show no ids
            rows = None if lookup is None else lookup(input_ids)
            inputs_embeds = embeddings(input_ids, attention_mask, position_ids, rows)
            input_ids = None
        inputs |= dict(attention_mask=attention_mask, position_ids=position_ids)
        return super().forward(input_ids=input_ids, inputs_embeds=inputs_embeds, **inputs)

    def _position_table(self) -> None:
        """None: the positions are in the embeddings."""

    def _embedded(self, **inputs: Any) -> Tensor:
        return inputs["inputs_embeds"]


class EsmForMaskedLM(roberta.LMHead, _heads.MaskedLM, transformers.EsmForMaskedLM):
    def _logits_bias(self) -> Tensor | None:
        return self.lm_head.bias if _heads.as_made(self, self.lm_head) else None


class EsmForSequenceClassification(
    _heads.SequenceClassification, transformers.EsmForSequenceClassification
): ...


class EsmForTokenClassification(
    _heads.TokenClassification, transformers.EsmForTokenClassification
): ...
