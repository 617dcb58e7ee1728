"""Thin modules over ``fastplm.ops``: the parts that models are built of."""

from __future__ import annotations

from fastplm.nn.attention import FusedAttention
from fastplm.nn.mlm_head import MLMHead
from fastplm.nn.rtd_head import RTDHead
from fastplm.nn.token_masker import TokenMasker

__all__ = ["FusedAttention", "MLMHead", "RTDHead", "TokenMasker"]
