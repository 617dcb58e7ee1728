"""Products of whole matrices, by cuBLAS."""

from __future__ import annotations

import torch

from fastplm.triton_kernels._launch import cdiv

# A vector of 16 bytes has so many elements of 16 bits.
_VECTOR = 8


def padded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """W in ``dtype``, with rows of 0 up to a multiple of 8.

    The kernels of cuBLAS need each dimension of a matrix in whole vectors of 16 bytes.
    """
    vocab, width = weight.shape
    if vocab % _VECTOR == 0:
        return weight.to(dtype)
    padded = weight.new_empty(whole_vectors(vocab), width, dtype=dtype)
    padded[:vocab] = weight
    padded[vocab:] = 0.0
    return padded


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
