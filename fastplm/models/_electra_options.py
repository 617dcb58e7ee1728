"""The choices of ``ElectraJointConfig``, importable without Transformers."""

from __future__ import annotations

OBJECTIVES = ("rtd", "rtd_masked", "replace_mlm", "all_tokens_mlm")
SHARINGS = ("none", "embeddings", "all")
GENERATORS = ("model", "unigram")
SECOND_STAGES = ("generator", "scratch")
