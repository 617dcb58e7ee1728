"""DeBERTa-v2 and -v3: drop-in for the classes of the same names in Transformers.

Attention is ``ops.disentangled_attention``: it depends on distances, so packing must not change
them. If a mask has holes, all rows between the first and the last token of a sequence are computed,
and the rows in the holes are masked as keys.

In the parent a masked query attends to all keys alike, those of padding, too: it gets the mean of
all values, here without dropout. Where a head reads such a row outside of a hole (a classifier of
texts padded at the left, an answer's softmax), padding is computed.

Source: He et al. 2020 (arXiv 2006.03654); He et al. 2021 (arXiv 2111.09543).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.deberta_v2 import modeling_deberta_v2
from transformers.models.electra.modeling_electra import ElectraDiscriminatorPredictions

from fastplm import ops
from fastplm._modes import values_are_known, values_can_be_read
from fastplm.hf import ROWS, seed_of_layer
from fastplm.models import _encoder, _heads
from fastplm.models._base import (
    choosing,
    drop_in,
    fitted,
    switch_modules,
    wants_output,
    warn_of_weights,
)
from fastplm.models._layer import ready_layer, run_layer, stand_for
from fastplm.models._own_attention import GetsMore, PassesOn
from fastplm.models._ragged import Counted, RaggedBatch, Rows, slots_of, unpadded
from fastplm.models.electra import ReplacedTokenDetection
from fastplm.nn._rows import is_plain
from fastplm.nn.dropout import on_rows


class _Keys(NamedTuple):
    """Stands for the parent's mask [B, 1, T, T] in the layers.

    Args:
        mask: bool [B, T], or [1, N] of packed rows, True = attend; None = all.
        rows: which rows the layer computes; its number in the model.
    """

    mask: Tensor | None
    rows: Rows


@drop_in
class DisentangledSelfAttention(modeling_deberta_v2.DisentangledSelfAttention):
    """Attention to contents and positions in one op, without a matrix of all scores."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(attention_mask, _Keys):
            others = output_attentions, query_states, relative_pos, rel_embeddings
            return super().forward(hidden_states, attention_mask, *others)
        query, key, value = (
            self._heads(dense(hidden_states)).transpose(1, 2)
            for dense in (self.query_proj, self.key_proj, self.value_proj)
        )
        dropout = self.dropout.p if self.dropout.training else 0.0
        mask, rows = attention_mask
        out, _ = attend(self, query, key, value, mask, dropout, rows, rel_embeddings)
        return out.flatten(-2), None

    @property
    def scaling(self) -> float:
        terms = 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)
        return (self.attention_head_size * terms) ** -0.5

    def tables(self, rel_embeddings: Tensor | None) -> list[Tensor | None]:
        """The projected embeddings of positions, for queries and for keys; None = no such term."""
        if not self.relative_attention or rel_embeddings is None:
            return [None, None]
        rows, found = self.pos_dropout(rel_embeddings)[: 2 * self.pos_ebd_size], []
        prefix = "" if self.share_att_key else "pos_"
        for term, name in (("c2p", f"{prefix}key_proj"), ("p2c", f"{prefix}query_proj")):
            dense = getattr(self, name) if term in self.pos_att_type else None
            found.append(None if dense is None else self._heads(dense(rows)))
        return found

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.num_attention_heads, -1))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    rows: Rows,
    rel_embeddings: Tensor | None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention of a layer, in the calling convention of Transformers' attention interface:
    [B, H, T, D] or [1, H, N, D] of packed rows -> [B, T, H, D]."""
    tables = module.tables(rel_embeddings)
    options: dict[str, Any] = dict(key_mask=mask, dropout_p=dropout, scale=module.scaling)
    if dropout:
        options |= dict(sample_index=rows.sample_index, seed=seed_of_layer(rows, module, False))
    lengths = rows.cu_seqlens_of(self_attention=True)
    if lengths is not None:
        query, key, value = (one.squeeze(0).transpose(0, 1) for one in (query, key, value))
        options["key_mask"] = None if mask is None else mask.flatten()
    source = rows.last.source if rows.is_cut and rows.last is not None else None
    if source is not None:  # distances need all rows
        query = _gathered(query, slots_of(source, key.shape[0]))
    if tables == [None, None] and lengths is None:
        out = ops.attention(query, key, value, **options)
    elif tables == [None, None]:
        ends = lengths[1], lengths[1], lengths[3], lengths[3]  # type: ignore[index]
        out = ops.attention_varlen(query, key, value, *ends, **options)
    else:
        if lengths is not None:
            options |= dict(cu_seqlens=lengths[1], max_seqlen=lengths[3])
        longest = key.shape[2] if lengths is None else lengths[3]
        furthest = module.max_relative_positions if module.position_buckets > 0 else 0
        near = module.position_buckets // 2 + 1
        if furthest <= near and longest <= near:  # each distance has a bucket of its own
            furthest = 0
        out = ops.disentangled_attention(
            query, key, value, *tables, max_distance=furthest, **options
        )
    if lengths is None:
        if mask is not None:
            out = torch.where(mask[:, None, :, None], out, value.mean(2, keepdim=True))
        return out.transpose(1, 2).contiguous(), None
    if mask is not None:
        out = torch.where(mask.view(-1, 1, 1), out, _means(value, rows.packed))
    return (out if source is None else _gathered(out, source))[None], None


def _means(value: Tensor, packed: Any) -> Tensor:
    """What a masked query of the padded batch gets, of packed rows: the mean of all values of its
    text, [N, H, D] -> [N, H, D].

    All masked rows of a text are equal: they begin as 0 and get the same. So those that are
    computed, in the holes of the mask, stand for those that are not.
    """
    seen = packed.token_mask()
    holes = packed.slots().view(seen.shape).ge(0) & ~seen
    dtype = torch.promote_types(value.dtype, torch.float32)
    masked = (packed.seqlen - seen.sum(1, keepdim=True)).to(dtype)
    share = seen + holes * (masked / holes.sum(1, keepdim=True).clamp(min=1))
    values = packed.pad(value.flatten(1)[None]) * share[..., None]
    means = (values.sum(1, keepdim=True) / packed.seqlen).to(value.dtype)
    return packed.pack(means)[0].view_as(value)


def _gathered(rows: Tensor, places: Tensor) -> Tensor:
    """[N, H, D] -> [P, H, D]; 0 where a place is -1."""
    return ops.gather_rows(rows.flatten(1), places).unflatten(-1, rows.shape[1:])


@drop_in
class DebertaV2Layer(_encoder.EncoderLayer, modeling_deberta_v2.DebertaV2Layer):
    """A layer that runs as ``_layer`` says; the last may compute few rows."""

    _around = (
        modeling_deberta_v2.DebertaV2Attention,
        DisentangledSelfAttention,
        modeling_deberta_v2.DebertaV2SelfOutput,
        modeling_deberta_v2.DebertaV2Intermediate,
        modeling_deberta_v2.DebertaV2Output,
    )
    _feed_forward_method = None
    _projections = ("query_proj", "key_proj", "value_proj")
    _attention_function = staticmethod(attend)
    _is_numbered = False

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Any,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        compute, numbers = modeling_deberta_v2.DebertaV2Layer.forward, None
        if isinstance(attention_mask, _Keys):
            mask, rows = attention_mask
            made = ready_layer(self, rows, hidden_states)
            if made is not None:
                given = {ROWS: rows, "rel_embeddings": rel_embeddings}
                return run_layer(made, hidden_states, mask, rows.last, given), None
            numbers = rows.numbers
        others = query_states, relative_pos, rel_embeddings, output_attentions
        return on_rows(numbers, compute, self, hidden_states, attention_mask, *others)


stand_for(*DebertaV2Layer._around, modeling_deberta_v2.DisentangledSelfAttention)
stand_for(modeling_deberta_v2.DebertaV2Layer)


class _Layers:
    """Mixin in front of the parent's forward: no [T, T] mask, and rows may be packed."""

    def forward(
        self: Any,
        *,
        attention_mask: Tensor | None = None,
        rows: Rows | None = None,
        output_hidden_states: bool | None = None,
        **inputs: Any,
    ) -> Any:
        states = {"output_hidden_states": output_hidden_states}
        two = (inputs.get("input_ids") is None) == (inputs.get("inputs_embeds") is None)
        if two or not self._runs_here(attention_mask, rows, inputs):
            inputs |= dict(attention_mask=attention_mask, **states)
            return super().forward(**inputs)  # type: ignore[misc]
        names = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds")
        given = {name: inputs.get(name) for name in names}
        hidden = self.embeddings(**given, mask=attention_mask)
        mask = None if attention_mask is None else attention_mask.bool()
        table, rows, layers = self.encoder.get_rel_embedding(), rows or Rows(), self.encoder.layer
        keeps, seen = wants_output(self, "output_hidden_states", states), [hidden]
        for number, layer in enumerate(layers, 1):
            its = (rows if number == len(layers) else rows.of_others()).for_layer(number - 1)
            hidden, _ = layer(hidden, _Keys(mask, its), rel_embeddings=table)
            seen.append(hidden)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(*seen,) if keeps else None)


class DebertaV2Model(GetsMore, _encoder.EncoderModel, _Layers, transformers.DebertaV2Model):
    """``transformers.DebertaV2Model`` with fused attention, computing only tokens.

    The parent's padded computation is also used with a convolution after the first layer
    (DeBERTa-v2-xlarge), and with ``z_steps``.

    Source: He et al. 2020 (arXiv 2006.03654).
    """

    def _runs_here(self, mask: Tensor | None, rows: Rows | None, kwargs: dict[str, Any]) -> bool:
        if rows is not None and (rows.packed is not None or rows.last is not None):
            return True
        if self._has_our_attention() and wants_output(self, "output_attentions", kwargs):
            warn_of_weights()
        return self._keeps_padding((mask,), kwargs) is None

    def _is_causal(self) -> bool:
        return False

    def _layers_are_ours(self) -> bool:
        encoder = self.encoder
        plain = is_plain(encoder, modeling_deberta_v2.DebertaV2Encoder)
        return plain and self.z_steps <= 1 and encoder.conv is None and super()._layers_are_ours()

    def _layer_numbers(self) -> list[Any]:
        return list(range(len(self.encoder.layer)))

    def _unpadded(self, mask: Any, extra_rows: Any, unpad: Any) -> Any:
        if mask is not None and extra_rows is not None and not isinstance(unpad, RaggedBatch):
            hidden = (extra_rows & ~mask.bool()).any()
            if type(unpad) is int and not values_are_known(mask):  # no wait for a device
                torch._assert_async(~hidden, "unpad: a masked token of DeBERTa has a label")
            elif values_can_be_read(mask) and bool(hidden):
                return None, False
        unpad = None if isinstance(unpad, Counted) else unpad  # it counts no rows in holes
        return unpadded(mask, extra_rows, unpad, contiguous=True, dtype=self.dtype)

    def _last_rows(self, needed: Any, rows: Any, ragged: Any, mask: Any, one_each: bool) -> Any:
        padded = ragged is None and mask is not None
        return None if padded else super()._last_rows(needed, rows, ragged, mask, one_each)


# --- heads ----------------------------------------------------------------------------------------


_HEADS = (
    modeling_deberta_v2.LegacyDebertaV2OnlyMLMHead,
    modeling_deberta_v2.LegacyDebertaV2LMPredictionHead,
    modeling_deberta_v2.DebertaV2OnlyMLMHead,
    modeling_deberta_v2.DebertaV2LMPredictionHead,
)


class DebertaV2ForMaskedLM(_heads.MaskedLM, transformers.DebertaV2ForMaskedLM):
    """``transformers.DebertaV2ForMaskedLM`` whose head and loss compute only labelled tokens."""

    def _head(self) -> _heads.Head:
        if self.legacy:
            whole, head = self.cls, self.cls.predictions
            kinds = _HEADS[:2]
        else:
            whole, head = self.lm_predictions, self.lm_predictions.lm_head
            kinds = _HEADS[2:]
        table: Any = self.get_input_embeddings()
        if not (is_plain(whole, kinds[0]) and is_plain(head, kinds[1])):
            return None, whole if self.legacy else partial(whole, word_embeddings=table)
        if self.legacy:
            return head.transform, head.decoder
        decoder: Any = nn.Linear(1, 1, device="meta")
        # In torch.func.functional_call these are tensors, which a module takes for no parameters.
        decoder._parameters.update(weight=table.weight, bias=head.bias)
        return lambda rows: head.LayerNorm(head.transform_act_fn(head.dense(rows))), decoder


class DebertaV2ForSequenceClassification(
    _heads.SequenceClassification, PassesOn, transformers.DebertaV2ForSequenceClassification
): ...


class DebertaV2ForMultipleChoice(
    _heads.MultipleChoice, PassesOn, transformers.DebertaV2ForMultipleChoice
): ...


class DebertaV2ForTokenClassification(
    _heads.TokenClassification, PassesOn, transformers.DebertaV2ForTokenClassification
): ...


class DebertaV2ForQuestionAnswering(
    _heads.QuestionAnswering, PassesOn, transformers.DebertaV2ForQuestionAnswering
): ...


class DebertaV2ForPreTraining(ReplacedTokenDetection, transformers.DebertaV2PreTrainedModel):
    """A discriminator of DeBERTa-v3: ``DebertaV2Model`` and ELECTRA's head, which says of each
    token whether it was replaced. Transformers has no such class; its ``DebertaV2Model`` loads the
    checkpoints.

    Source: He et al. 2021 (arXiv 2111.09543), §3.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        with choosing():  # the backbone has the configuration and the attention of this model
            self.deberta = DebertaV2Model(self.config)
        self.discriminator_predictions = ElectraDiscriminatorPredictions(self.config)
        switch_modules(self)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.deberta.get_input_embeddings()


# It has no parent of its name, and takes its arguments by position as the others of its family.
fitted(DebertaV2ForPreTraining, transformers.DebertaV2ForMaskedLM)
