"""The ops: names and argument order follow ``torch.nn.functional``."""

from __future__ import annotations

from fastplm.ops.attention import attention, attention_varlen
from fastplm.ops.bart_noise import bart_noise
from fastplm.ops.bias_gelu import bias_gelu
from fastplm.ops.corrupt_spans import corrupt_spans, span_corruption_fit, span_corruption_lengths
from fastplm.ops.disentangled_attention import disentangled_attention
from fastplm.ops.dropout import dropout
from fastplm.ops.dropout_add_layer_norm import dropout_add_layer_norm, dropout_add_rms_norm
from fastplm.ops.embedding_layer_norm import embedding_layer_norm
from fastplm.ops.gather_rows import gather_rows
from fastplm.ops.geglu import geglu
from fastplm.ops.gelu import gelu
from fastplm.ops.linear import linear
from fastplm.ops.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_with_sample,
)
from fastplm.ops.linear_distillation import linear_distillation, linear_distillation_topk
from fastplm.ops.linear_int8 import linear_int8
from fastplm.ops.mask_tokens import mask_tokens
from fastplm.ops.maxsim import maxsim
from fastplm.ops.replaced_token_loss import replaced_token_loss
from fastplm.ops.rms_norm import rms_norm
from fastplm.ops.rotary import rotary
from fastplm.reference.attention import T5RelativeBias
from fastplm.reference.bart_noise import NoisedText
from fastplm.reference.corrupt_spans import CorruptedSpans
from fastplm.reference.linear_cross_entropy import RowStatistics
from fastplm.reference.linear_distillation import LinearDistillation
from fastplm.reference.linear_int8 import dequantize_int8, quantize_int8
from fastplm.reference.mask_tokens import MaskedTokens
from fastplm.reference.maxsim import MaxSim
from fastplm.reference.replaced_token_loss import DetectionCounts

__all__ = [
    "CorruptedSpans",
    "DetectionCounts",
    "LinearDistillation",
    "MaskedTokens",
    "MaxSim",
    "NoisedText",
    "RowStatistics",
    "T5RelativeBias",
    "attention",
    "attention_varlen",
    "bart_noise",
    "bias_gelu",
    "corrupt_spans",
    "dequantize_int8",
    "disentangled_attention",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "embedding_layer_norm",
    "gather_rows",
    "geglu",
    "gelu",
    "linear",
    "linear_cross_entropy",
    "linear_cross_entropy_with_sample",
    "linear_distillation",
    "linear_distillation_topk",
    "linear_int8",
    "mask_tokens",
    "maxsim",
    "quantize_int8",
    "replaced_token_loss",
    "rms_norm",
    "rotary",
    "span_corruption_fit",
    "span_corruption_lengths",
]
