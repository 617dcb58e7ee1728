"""Every barrier of every kernel is left out once: the emulator must see it, or it is harmless."""

from __future__ import annotations

import pytest
import triton

pytestmark = [pytest.mark.compile]
slow = pytest.mark.slow

TRITON = "3.7.1"
CASES = {
    "attention of short rows": ("attention", dict(shape=(2, 1, 40, 70, 64), option="mask causal")),
}
