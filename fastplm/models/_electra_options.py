"""The choices of ``ElectraJointConfig``, for those who need no model (and no Transformers)."""

from __future__ import annotations

OBJECTIVES = ("rtd", "rtd_masked", "replace_mlm", "all_tokens_mlm")
SHARINGS = ("none", "embeddings", "all")
GENERATORS = ("model", "unigram")
