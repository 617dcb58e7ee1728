"""MPNet: drop-in for the classes of the same names in Transformers.

BERT's layers with T5's position bias, which the parent computes densely, once for all layers. Here
attention looks up the distance j - i in its table [32, H].

Source: Song et al. 2020 (arXiv 2004.09297).
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.mpnet import modeling_mpnet

from fastplm import ops
from fastplm.models import _heads, roberta
from fastplm.models._base import joined
from fastplm.models._layer import Attention, FeedForward, Join, Layer, stand_for
from fastplm.models._own_attention import HERE, GetsMore, OnRows, OwnAttention, OwnLayer, PassesOn


class _Attention(OwnAttention):
    _projections = ("q", "k", "v")

    def _output(self: Any, context: Tensor) -> Tensor:
        return self.o(context)


MPNetSelfAttention = joined(_Attention, modeling_mpnet.MPNetSelfAttention)


class _Layer(OwnLayer):
    def _attends(self: Any) -> tuple[Any, ...]:
        attention = self._modules.get("attention")
        return attention, None if attention is None else attention._modules.get("attn")

    def _parts(self: Any, no_hooks: bool = True) -> Layer | None:
        attention, within = self._attends()
        inner, outer = self._modules["intermediate"], self._modules["output"]
        if not self._is_known((attention, within, inner, outer), no_hooks):
            return None
        query, key, value, out, dropout = within.children()
        join = Join(out, *(attention._modules[name] for name in ("LayerNorm", "dropout")))
        block = Attention(within, within.attention_head_size, dropout.p, (query, key, value), join)
        (dense, activation), end = inner.children(), Join(*outer.children())
        feed_forward = FeedForward(dense, activation, end)
        return Layer((block,), feed_forward, self.training)


_AROUND = (
    *(modeling_mpnet.MPNetAttention, MPNetSelfAttention),
    *(modeling_mpnet.MPNetIntermediate, modeling_mpnet.MPNetOutput),
)
stand_for(*_AROUND, modeling_mpnet.MPNetLayer)
MPNetLayer = joined(
    *(_Layer, modeling_mpnet.MPNetLayer), _around=_AROUND, _feed_forward_method=None
)


class _Encoder:
    def compute_position_bias(self, *args: Any, **kwargs: Any) -> Tensor | None:
        if HERE.now is not None:  # each layer has the table
            return None
        return super().compute_position_bias(*args, **kwargs)  # type: ignore[misc]


MPNetEncoder = joined(_Encoder, modeling_mpnet.MPNetEncoder)


class MPNetModel(GetsMore, roberta.Backbone, OnRows, transformers.MPNetModel):
    contiguous = True
    _output = None

    def _of_attention(self) -> dict[str, Any]:
        buckets = torch.arange(32, device=self.device)  # in the parent, too, whatever is configured
        table = self.encoder.relative_attention_bias(buckets)
        return dict(is_causal=False, position_bias=ops.T5RelativeBias(table, max_distance=128))


class MPNetForMaskedLM(roberta.LMHead, _heads.MaskedLM, transformers.MPNetForMaskedLM): ...


class MPNetForSequenceClassification(
    _heads.SequenceClassification, PassesOn, transformers.MPNetForSequenceClassification
): ...


class MPNetForMultipleChoice(
    _heads.MultipleChoice, PassesOn, transformers.MPNetForMultipleChoice
): ...


class MPNetForTokenClassification(
    _heads.TokenClassification, PassesOn, transformers.MPNetForTokenClassification
): ...


class MPNetForQuestionAnswering(
    _heads.QuestionAnswering, PassesOn, transformers.MPNetForQuestionAnswering
): ...
