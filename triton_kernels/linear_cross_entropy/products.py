"""Products of whole matrices, by cuBLAS."""

from __future__ import annotations

import torch

from fastplm.triton_kernels._launch import cdiv

# A vector of 16 bytes has so many elements of 16 bits.
_VECTOR = 8


def weight_of(
    weight: torch.Tensor, slots: torch.Tensor, kept_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(W as products read it, the slots): ``slots`` may begin with a copy of W, see ``copy_to``."""
    copied = slots.shape[0] - kept_rows
    return slots[:copied] if copied else weight, slots[copied:]


def copied(weight: torch.Tensor, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """W in ``dtype``, and with ``whole`` as products need it."""
    vocab, width = weight.shape
    rows = whole_vectors(vocab) if whole else vocab
    if weight.dtype is dtype and rows == vocab:
        return weight
    copy = weight.new_empty(rows, width, dtype=dtype)
    copy_to(copy, weight)
    return copy


def copy_to(copy: torch.Tensor, weight: torch.Tensor) -> None:
    """Write W into a copy of it, if it is one, with rows of 0 up to a multiple of 8.

    The kernels of cuBLAS need each dimension of a matrix in whole vectors of 16 bytes.
    """
    if copy is weight:
        return
    vocab = weight.shape[0]
    copy[:vocab] = weight
    copy[vocab:] = 0.0


def whole_vectors(columns: int) -> int:
    return cdiv(columns, _VECTOR) * _VECTOR


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out[...] = a @ b`` by cuBLAS, ``out`` in the dtype of ``a`` or fp32.

    Sums are in fp32, and fp32 operands in TF32 if ``torch.backends.cuda.matmul`` allows it, as in
    ``nn.Linear``. If cuBLAS splits a sum, it may add the parts in 16 bits.
    """
    if out.device.type == "meta":
        return
    if out.device.type == "cpu":  # interpreted kernels: a product in 16 bits is slow, or rounded
        for part, result in zip(a.split(32), out.split(32), strict=True):
            result.copy_(part.float() @ b.float())
    elif out.dtype is a.dtype:
        torch.mm(a, b, out=out)
    elif a.dtype is torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        out.copy_(a @ b)  # as PyTorch does where that is allowed
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
