"""Linear layer and softmax cross-entropy in one pass over the vocabulary, forward and backward.

    Z = X W^T + b      loss_n = log(l_n) - sum_v q_nv (Z_nv - m_n)      P = exp(Z - m) / l
    q = (1 - s) onehot(target) + s / V        dZ = g (P - q)
    dX = dZ W          dW = dZ^T X            db = colsum(dZ)

where dZ[n, target_n] is computed as g (exp(log P[n, target_n]) - 1 + s - s / V): a row that is
certain of its target then has gradient 0, however its recomputed logits are rounded.

Source: Wijmans et al. 2024 (arXiv 2411.09009), algorithms 1-3, without gradient filtering (in
pre-training the softmax is flat); running maximum and sum as in Milakov and Gimelshein 2018
(arXiv 1805.02867). No sum needs an atomic, so every bit repeats.

Files: ``forward`` and ``backward`` hold kernels and the launchers of each data flow, ``sample`` the
draw, ``rows`` the order of rows, ``tiles`` what kernels share, ``products`` the calls of cuBLAS,
``configs`` the launch tables, ``launch`` the launchers, ``cases`` what tools compile.

Legend: N rows · V vocabulary · E row width · m row maximum · l row sum of exp(z - m), in natural
        units: z - m is taken before the factor log2(e) of exp2, so a large common offset of the
        logits costs no digits · s label smoothing · g upstream gradient of a row's loss · dz
        gradient of a logit · D = P - q, dZ at g = 1 · slot: a row's place among those that count

The kernels read the rows that count through `order`, which lists them first, in ascending order.
`count`, their number, stays on the device. A program whose tile lies past it returns at once, so
ignored rows cost nothing in the products and are never read.

There are two data flows, each for a part of the slots:

Kept logits, for the first slots: as many as the caller expects to count and as memory allows. Z, dX
and dW are products of stored matrices, which cuBLAS computes over all these slots, used or not.
Between Z and the other two, one kernel reads each row twice: for its statistics, then to replace Z
by D (0 in unused slots). The backward multiplies the upstream gradient g into the other operand, so
the forward need not know it.

Recomputed logits, for the other slots. Z is never stored, and only tiles with a row that counts are
computed. In the forward a program handles a tile of rows and one split of the vocabulary, and a
second kernel combines the splits. In the backward of rows that fit into one tile (E <= 128), the
kernels of dX and of dW each compute Z again in registers. For wider rows they would do so once for
each tile of E. So dZ is computed once for each chunk of the vocabulary, into a buffer of bounded
size that the products read.

Sampling draws a token of softmax(Z / T) by the inverse of the distribution function, at one uniform
number for each row. The forward writes the sum of every tile. Another kernel chooses the tile, then
the token in it: from the kept logits, or it computes the logits of that one tile again.
"""

from fastplm.triton_kernels.linear_cross_entropy.cases import compile_cases, meta_case
from fastplm.triton_kernels.linear_cross_entropy.launch import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from fastplm.triton_kernels.linear_cross_entropy.rows import mean

__all__ = [
    "compile_cases",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "mean",
    "meta_case",
]
