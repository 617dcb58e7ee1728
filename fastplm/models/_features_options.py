"""The choices of ``FeaturesConfig``, importable without Transformers."""

from __future__ import annotations

FEATURES = ("last", "mix", "last-four")
HEADS = ("linear", "bilstm")
POOLINGS = ("cls", "mean", "max", "last")
