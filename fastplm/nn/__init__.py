"""Thin modules over ``fastplm.ops``, from which the models are built."""

from __future__ import annotations

from fastplm.nn.attention import FusedAttention
from fastplm.nn.contrastive import ContrastiveLoss, GradCache
from fastplm.nn.dropout import Dropout
from fastplm.nn.gelu import GELU
from fastplm.nn.linear import Linear
from fastplm.nn.linear_int8 import LinearInt8
from fastplm.nn.mlm_head import MLMHead
from fastplm.nn.model_heads import (
    AlbertMLMHead,
    BertMLMHead,
    ElectraMLMHead,
    ElectraRTDHead,
    RobertaMLMHead,
)
from fastplm.nn.rms_norm import RMSNorm
from fastplm.nn.rtd_head import RTDHead
from fastplm.nn.token_masker import TokenMasker

__all__ = [
    "AlbertMLMHead",
    "BertMLMHead",
    "ElectraMLMHead",
    "ElectraRTDHead",
    "RobertaMLMHead",
    "ContrastiveLoss",
    "Dropout",
    "FusedAttention",
    "GELU",
    "GradCache",
    "Linear",
    "LinearInt8",
    "MLMHead",
    "RMSNorm",
    "RTDHead",
    "TokenMasker",
]
