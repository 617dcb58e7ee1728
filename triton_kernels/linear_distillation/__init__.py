"""A divergence of two softmaxes over the vocabulary, of student and teacher, and cross-entropy.

    z = x W^T + b, q = softmax(z / T) of the student; t and p of the teacher in the same way
    loss_n = w_d T^2 D(p, q) + w_c CE(z, target)

    forward KL  D = sum p log(p / q)                          dD/dz = (q - p) / T
    given       D = sum p log(p / q) over given words         dD/dz = (S q - p) / T, S = sum p
    reverse KL  D = sum q log(q / p)                          dD/dz = q (r - R) / T, r = log(q / p)
    JS          D = a sum p log(p / m) + (1 - a) sum q log(q / m), m = a p + (1 - a) q
                                                              dD/dz = (1 - a) q (r - R) / T,
                                                              r = log(q / m)
    with R = sum q r. At an upstream gradient of 1 the loss of a row has the gradient
    dz = w_d T [q - p | S q - p | q (r - R) | (1 - a) q (r - R)] + w_c (softmax(z) - onehot(target))

Source: Hinton et al. 2015 (arXiv 1503.02531); Agarwal et al. 2024 (arXiv 2306.13649). The running
sums of student and teacher follow Milakov and Gimelshein 2018 (arXiv 1805.02867), side by side. A
sum of differences of logits, weighted by exponentials, moves with both maxima: if the teacher's
rises by u and the student's by v, each difference summed so far changes by (v - u) / T.

Files: ``tiles`` has the arithmetic on a tile of both logits, ``forward`` and ``backward`` the
kernels and launchers of each data flow, ``given`` the further kernels for given probabilities,
``launch`` the launchers, ``cases`` what tools compile. The order of
rows, the products, dX, dW and db are those of ``linear_cross_entropy``, and so are the two data
flows: D (dz at an upstream gradient of 1) is stored for kept rows; for the others all logits are
computed again and dz goes through a buffer of bounded size. The teacher's logits never outlive the
forward. KL takes one pass over the vocabulary, JS two: its mixture needs the sums of both sides.

Legend: that of ``linear_cross_entropy``. Names with t or teacher are the teacher's; a is beta, the
        teacher's share of the mixture; dz is made from r and R. Numbers relative to a maximum are
        divided by T, except those named "hard".
"""

from fastplm.triton_kernels.linear_cross_entropy.rows import mean
from fastplm.triton_kernels.linear_distillation.cases import compile_cases, meta_case
from fastplm.triton_kernels.linear_distillation.launch import (
    linear_distillation_bwd,
    linear_distillation_fwd,
)

__all__ = [
    "compile_cases",
    "linear_distillation_bwd",
    "linear_distillation_fwd",
    "mean",
    "meta_case",
]
