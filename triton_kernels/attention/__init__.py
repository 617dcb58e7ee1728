"""Flash-style attention, forward and backward: padded, packed, masked, causal, dropout, T5's bias.

    S = scale * Q K^T + bias + mask     P = softmax(S)     O = (Z * P) V
    dV = (Z * P)^T dO     dP = Z * (dO V^T)     dS = P * (dP - delta)     delta = rowsum(P * dP)
    dQ = scale * dS K     dK = scale * dS^T Q     dbias = dS

where Z is 0 for a dropped probability and 1 / (1 - p) for a kept one.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2; T5's bias: Raffel et al.
2020, §2.1; dropout bits: Philox4x32-7 (Salmon et al. 2011).

Files: ``forward``, ``backward`` and ``bias`` hold the kernels, ``tiles`` what they share,
``configs`` the launch tables, ``launch`` the launchers, ``cases`` what tools compile.

Legend: B batch · H heads · Tq/Tk query/key length · D head dim (BLOCK_D, its power of two)
        m_i row maximum · l_i row sum. exp2 is the hardware's own: log2(e) * scale is folded into
        one multiply-add per score, and m_i is in base-2 units (natural ones under a bias).

Two families, chosen from dtype and shapes alone (``configs.py``):

row     One tile holds all keys of a row (Tk <= 128 in 16 bits), so the softmax needs no running
        maximum. A program keeps K and V for several tiles of queries. Up to 128 queries and keys,
        the backward is one kernel, and one tile holds a head: it computes the softmax again, so it
        reads neither O nor row statistics, and the three gradients take 5 matmuls.
stream  A program loops over tiles of keys (FlashAttention-2). In the backward one kernel computes
        dQ and delta, and a second one dK and dV. That takes 7 matmuls, but neither an fp32 dQ in
        memory nor atomics. A masked key affects its own row of dK and dV alone, which is set to 0
        at the end.

Programs that keep K and V of up to 512 rows in shared memory were tried: the code spilled
registers, and an SM had room for only one program.

No sum depends on the order in which programs run, so results repeat bit for bit. A tile of masked
keys adds exact zeros, so a padded and a packed batch give the same bits.

The streaming forward saves m and log2(l) separately, not their sum. If the scores of a row share a
large offset, the sum would lose the digits of l, and the backward's P = exp2(S - m - log2(l)) would
no longer add up to 1.

An attention mask [B, H, Tq, Tk] is loaded tile by tile, and a tile is computed even if all of it is
masked. The mask's loads are as wide as possible if 16 divides the number of keys.

A masked key is loaded as 0, so that a NaN behind the mask reaches no sum. A row that may attend to
nothing has l = 0. It gets output 0, m = log2(l) = 0 and gradient 0, because all its p are 0.
"""

from fastplm.triton_kernels.attention.cases import compile_cases, meta_case
from fastplm.triton_kernels.attention.configs import needs_statistics
from fastplm.triton_kernels.attention.launch import attention_bwd, attention_fwd

__all__ = ["attention_bwd", "attention_fwd", "compile_cases", "meta_case", "needs_statistics"]
