"""Linear layer and softmax cross-entropy in one pass over the vocabulary, forward and backward.

    Z = X W^T + b      loss_n = log(l_n) - sum_v q_nv (Z_nv - m_n)      P = exp(Z - m) / l
    q = (1 - s) onehot(target) + s / V        dZ = g (P - q)
    dX = dZ W          dW = dZ^T X            db = colsum(dZ)

where dZ[n, target_n] is taken as g (exp(log P[n, target_n]) - 1 + s - s / V), so that a row that is
certain of its target has gradient 0 whatever the rounding of its recomputed logits.

Source: Wijmans et al. 2024 (arXiv 2411.09009), algorithms 1-3, without gradient filtering (in
pre-training the softmax is flat); running maximum and sum as in Milakov and Gimelshein 2018
(arXiv 1805.02867). No sum needs an atomic, so every bit repeats.

Files: ``forward`` and ``backward`` hold kernels and the launchers of each data flow, ``sample`` the
draw, ``rows`` the order of rows, ``tiles`` what kernels share, ``products`` those of the vendor's
library, ``configs`` the launch tables, ``launch`` the launchers, ``cases`` what tools compile.

Legend: N rows · V vocabulary · E row width · m row maximum · l row sum of exp(z - m), in natural
        units: z - m is taken before the factor log2(e) of exp2, so a large common offset of the
        logits costs no digits · s label smoothing · g upstream gradient of a row's loss · dz
        gradient of a logit · D = P - q, dZ at g = 1 · slot: a row's place among those that count

The rows that count are addressed through `order`, which lists them first, in their order; `count`
says how many there are and stays on the device. A tile past it ends at once, so ignored rows cost
nothing in the products and their content is never read.

Two data flows, each for its share of the slots:

Kept logits, for the first slots, as many as the caller expects to count and memory allows: Z, dX
and dW are plain products of a stored matrix, which the vendor's library makes over all these slots,
used or not. Between them one kernel walks along each row, twice: for its statistics, then to turn Z
into D in place (0 in unused slots). g waits on the rows of the other operand, so that the upstream
gradient need not be known before.

Recompute, for the others: Z is never stored, and no tile without a row that counts is computed. In
the forward a program owns a tile of rows and one split of the vocabulary; a second kernel combines
the splits. The backward of rows that one tile holds (E <= 128) computes Z again in registers, once
for the owner of dX, once for that of dW. Wider rows would do so for every tile of E; there, dZ is
computed once, by chunks of the vocabulary that a bounded scratch holds, and the products read it.

Sampling: a token of softmax(Z / T) by the inverse of its distribution function at one uniform
number a row. The forward leaves the sum of every tile; another kernel chooses the tile and, in it,
the token, from the kept logits or from those of that tile alone, computed again.
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
