"""The ops: names and argument order follow ``torch.nn.functional``."""

from __future__ import annotations

from fastplm.ops.attention import attention

__all__ = ["attention"]
