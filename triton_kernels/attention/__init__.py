"""Flash-style attention, forward and backward: padded, ragged, causal, dropout, T5's bias.

    S = scale * Q K^T + bias + mask     P = softmax(S)     O = (Z * P) V
    dV = (Z * P)^T dO     dP = Z * (dO V^T)     dS = P * (dP - delta)     delta = rowsum(P * dP)
    dQ = scale * dS K     dK = scale * dS^T Q     dbias = dS

where Z is 0 for a dropped probability and 1 / (1 - p) for a kept one.

Source: FlashAttention-2 (Dao 2023, arXiv 2307.08691), algorithms 1 and 2; T5's bias: Raffel et al.
2020, §2.1; dropout bits: Philox4x32-7 (Salmon et al. 2011).

Files: ``forward``, ``backward`` and ``bias`` hold the kernels, ``tiles`` what they share,
``configs`` the launch tables, ``launch`` the launchers, ``cases`` what tools compile; ``ping_pong``
is another forward for sm_90.

Legend: B batch · H heads · Tq/Tk query/key length · D head dim (BLOCK_D, its power of two)
        m_i row maximum · l_i row sum. exp2 is the hardware's own: log2(e) * scale is folded into
        one multiply-add per score, and m_i is in base-2 units (natural ones under a bias).

Two families, chosen from dtype and shapes alone (``configs.py``):

row     the whole row of keys lies in one tile (Tk <= 256 in 16 bits): no online softmax, and K and
        V stay with a program for some tiles of queries. Up to 128 queries and keys the backward is
        one kernel, a head in one tile: it rebuilds the softmax, so it reads neither O nor row
        statistics, and all three gradients take 5 matmuls.
stream  tiles of keys pass by (FlashAttention-2). The backward has one kernel that owns dQ (and
        computes delta on its way), then one that owns dK and dV: 7 matmuls, and in exchange no fp32
        dQ in memory and no atomic. A masked key costs nothing there but its own row: it is set to 0
        once, at the end.

Keys and values of up to 512 rows resident in shared memory were tried as tiles of one program: the
code spilled, and an SM had room for one program alone.

No sum ever depends on the order in which programs run, so every bit repeats; and a tile of masked
keys adds exact zeros, so a padded and a ragged batch get the same bits.

The streaming forward saves m and log2(l) apart, not their sum: scores of a row that share a large
offset would lose the digits of l in it, and the backward's P = exp2(S - m - log2(l)) would no
longer add up to 1.

A masked key is loaded as 0, so that even a NaN behind the mask cannot reach a sum. A row that may
attend to nothing has l = 0; it gets output 0, m = log2(l) = 0 and, as all its p are 0, gradient 0.
"""

from fastplm.triton_kernels.attention.cases import compile_cases, meta_case
from fastplm.triton_kernels.attention.configs import needs_statistics
from fastplm.triton_kernels.attention.launch import attention_bwd, attention_fwd

__all__ = ["attention_bwd", "attention_fwd", "compile_cases", "meta_case", "needs_statistics"]
