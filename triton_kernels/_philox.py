"""Philox4x32 inside a kernel; the specification is ``fastplm/reference/philox.py``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def philox(seed, c0, c1, c2, c3, ROUNDS: tl.constexpr):
    """Four uint32 words for uint32 counters that broadcast to the shape of ``c0 ^ c3``.

    Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
    """
    key0 = seed.to(tl.uint32)
    key1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):
        product0 = c0.to(tl.uint64) * 0xD2511F53
        product1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
    return c0, c1, c2, c3
