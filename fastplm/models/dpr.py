"""DPR: its encoder, where ``fastplm.accelerate`` changes the BERT inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.dpr import modeling_dpr

from fastplm.models._base import drop_in


@drop_in
class DPREncoder(modeling_dpr.DPREncoder):
    """``DPREncoder``, whose pooled output is the first token's, also behind padding at the left.

    The parent's is that of row 0, which is padding then. Source: Karpukhin et al. 2020 (arXiv
    2004.04906), §3.1: the representation at [CLS].
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        return_dict: bool = False,
        **inputs: Any,
    ) -> Any:
        outputs = super().forward(input_ids, attention_mask, return_dict=True, **inputs)
        if attention_mask is not None and attention_mask.dim() == 2:
            first = attention_mask.bool().to(torch.uint8).argmax(1)
            states = outputs.last_hidden_state
            pooled = states[torch.arange(states.shape[0], device=states.device), first]
            outputs.pooler_output = self.encode_proj(pooled) if self.projection_dim > 0 else pooled
        return outputs if return_dict else outputs.to_tuple()
