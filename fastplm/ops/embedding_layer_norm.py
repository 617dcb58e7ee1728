"""``ops.embedding_layer_norm``: its arguments, and its backends."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from fastplm._backends import requested, why_not_triton
from fastplm._checks import FLOATING, check_int, check_number, check_probability, check_tensor
from fastplm._declare import Arg, from_fields
from fastplm._modes import is_batched, is_eager, is_fake, values_are_known
from fastplm._registry import Op, define
from fastplm.errors import ArgumentTypeError, ArgumentValueError, fail
from fastplm.ops._common import kernels, last_dim_contiguous, seed_tensor, triton_rejects
from fastplm.reference.dropout import dropout_scale, dropout_threshold
from fastplm.reference.embedding_layer_norm import embedding_layer_norm_ref

#: ``MAX_WIDTH`` of the kernels, which are imported when one is first called.
_MAX_WIDTH = 16384
_IDS = Arg("[N]", (torch.int64, torch.int32), "Use .flatten().")
_ROW_INDEX = Arg("[N]", (torch.int64,))
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATING}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Call(NamedTuple):
    """``seed`` is None exactly if ``dropout_p`` is 0; an index of padding of -1 is none; ``dtype``
    is the name of one."""

    input_ids: Annotated[Tensor, _IDS]
    word_weight: Annotated[Tensor, Arg("[V > 0, E > 0]")]
    position_ids: Annotated[Tensor, _IDS]
    position_weight: Annotated[Tensor, Arg("[P > 0, E]")]
    token_type_ids: Annotated[Tensor | None, _IDS]
    token_type_weight: Annotated[Tensor, Arg("[T > 0, E]")]
    weight: Annotated[Tensor, Arg("[E]")]
    bias: Annotated[Tensor, Arg("[E]")]
    word_rows: Annotated[Tensor | None, Arg("[N, E]")]
    padding_idx: int
    position_padding_idx: int
    seed: Annotated[Tensor | None, Arg("[]", (torch.int64,))]
    sample_index: Annotated[Tensor | None, _ROW_INDEX]
    position: Annotated[Tensor | None, _ROW_INDEX]
    dropout_p: float
    eps: float
    dtype: str

    def check(self, where: str) -> None:
        check_number(where, "eps", self.eps, 0.0, math.inf, "0 or more", "Pass the model's.")
        if self.position is not None and self.sample_index is None:
            fix = "Say of which samples the rows are, too."
            fail(where, "position", "a value without sample_index", "None", fix)


class Saved(NamedTuple):
    """Nothing but the arguments: the rows are looked up again."""

    call: Call
    need_word_rows: bool
    need_word_weight: bool
    need_position_weight: bool
    need_token_type_weight: bool


def embedding_layer_norm(
    input_ids: Tensor,
    word_weight: Tensor,
    position_ids: Tensor,
    position_weight: Tensor,
    token_type_ids: Tensor | None,
    token_type_weight: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    word_rows: Tensor | None = None,
    padding_idx: int | None = None,
    position_padding_idx: int | None = None,
    dropout_p: float = 0.0,
    eps: float = 1e-12,
    seed: int | Tensor | None = None,
    sample_index: Tensor | None = None,
    position: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What an encoder begins with: three embeddings, their sum, its layer norm and dropout at once.

    ``out = dropout(layer_norm(word[input_ids] + position[position_ids] + type[token_type_ids]))``

    Args:
        input_ids, position_ids: int64 or int32 [N], of rows packed or padded.
        word_weight: [V, E], fp64, fp32, fp16 or bf16.
        position_weight: [P, E], of any of these dtypes.
        token_type_ids: int64 or int32 [N]. None: all are of type 0.
        token_type_weight: [T, E], of any of these dtypes.
        weight, bias: [E], those of the layer norm; of any of these dtypes.
        word_rows: [N, E], finite. It gets the gradient of the rows of words, and ``word_weight``
            gets none; its values do not matter. So a caller may add the rows to a gradient of the
            table that it has.
        padding_idx, position_padding_idx: a word and a position that get no gradient, as in
            ``nn.Embedding``.
        dropout_p: the probability of dropping an element, as the ``p`` of ``ops.dropout``.
        eps: what is added to the variance, 0 or more.
        seed: int, or 0-d int64 tensor on the device of the ids; default a new one.
        sample_index, position: int64 [N], what the random choices depend on, as in ``ops.dropout``:
            the same elements are dropped as there.
        dtype: that of the result, such as bf16 of fp32 tables; default that of ``word_weight``.

    Returns:
        [N, E] in ``dtype``. Nothing but the arguments is kept for the backward. On a GPU a row
        with an id that its table does not have is NaN.

    Numerics:
        In fp32 (fp64 if there is fp64), rounded once. The gradient of a row's sum has the dtype of
        the tables; for a table, weight and bias it is summed in fp32.

    Determinism:
        Forward and backward repeat bit for bit on one backend; no atomics. The rows of an id are
        found by a stable sort and summed in order.

    Raises:
        ArgumentValueError, ArgumentTypeError: shapes, dtypes, devices or numbers that do not fit.
        BackendError: a forced backend cannot run the call.

    Examples:
        >>> ids, table = torch.tensor([1, 0]), torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])
        >>> ops.embedding_layer_norm(
        ...     ids, table, ids, 0 * table, None, 0 * table, torch.ones(3), torch.zeros(3)
        ... )
        tensor([[ 1.2247,  0.0000, -1.2247],
                [-1.2247,  0.0000,  1.2247]])

    Source: Devlin et al. 2018 (BERT, arXiv 1810.04805), figure 2; Ba, Kiros and Hinton 2016, "Layer
        Normalization" (arXiv 1607.06450), equation 4.
    Reference: ``fastplm.reference.embedding_layer_norm.embedding_layer_norm_ref``.
    """
    where = "embedding_layer_norm"
    check_tensor(where, "input_ids", input_ids)
    check_tensor(where, "word_weight", word_weight)
    check_probability(where, "dropout_p", dropout_p, "Pass the share of elements to drop.")
    fix = "Pass the model's, or None."
    for argument, index in (
        ("padding_idx", padding_idx),
        ("position_padding_idx", position_padding_idx),
    ):
        if index is not None:
            check_int(where, argument, index, 0, 2**31 - 1, fix)
    if dtype is not None and dtype not in _NAMES:
        error = ArgumentValueError if isinstance(dtype, torch.dtype) else ArgumentTypeError
        fail(
            where,
            "dtype",
            dtype,
            "a floating dtype",
            "Pass torch.bfloat16, or leave it out.",
            error,
        )
    name = _NAMES.get(word_weight.dtype if dtype is None else dtype, "float32")
    if dropout_p > 0.0 or seed is not None:
        seed = seed_tensor(where, seed, input_ids, optional=True)
    call = Call(
        *(input_ids, word_weight, position_ids, position_weight),
        *(token_type_ids, token_type_weight, weight, bias, word_rows),  # type: ignore[arg-type]
        -1 if padding_idx is None else padding_idx,
        -1 if position_padding_idx is None else position_padding_idx,
        *(seed, sample_index, position, dropout_p, eps, name),  # type: ignore[arg-type]
    )
    OP.check(call)
    if word_rows is not None:
        call = call._replace(word_weight=word_weight.detach())
    if dropout_p == 0.0:
        call = call._replace(seed=None, sample_index=None, position=None)
    return OP(call, OP.resolve(call))


_TABLES = (
    ("input_ids", "word_weight"),
    ("position_ids", "position_weight"),
    ("token_type_ids", "token_type_weight"),
)


def _check_range(call: Call) -> None:
    """Every id of a CPU tensor is that of a row of its table."""
    for ids_name, table_name in _TABLES:
        ids, rows = getattr(call, ids_name), getattr(call, table_name).shape[0]
        if ids is None or not values_are_known(ids) or ids.numel() == 0:
            continue
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= rows:
            got, expected = f"id {low if low < 0 else high}", f"0 … {rows - 1}, a row of its table"
            fix = f"Check `{ids_name}`, or pass a longer `{table_name}`."
            fail("embedding_layer_norm", ids_name, got, expected, fix)


def _eager(call: Call) -> Tensor:
    _check_range(call)
    return _reference(call, dtype=_DTYPES[call.dtype])


_reference = from_fields(embedding_layer_norm_ref)


# --- backend "triton" -----------------------------------------------------------------------------


def _triton_rejects(call: Call, *, forced: bool) -> str | None:
    tables = (call.word_weight, call.position_weight, call.token_type_weight)
    floating = (*tables, call.weight, call.bias)
    if call.dtype == "float64" or any(one.dtype is torch.float64 for one in floating):
        return "float64: the kernels take fp32, fp16 and bf16"
    if call.weight.shape[0] > _MAX_WIDTH:
        return f"rows of more than {_MAX_WIDTH} elements: they do not fit into the registers"
    return triton_rejects(call, forced=forced)


def _arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The tensors of a call as the kernels take them, and the other arguments."""
    call = Call._make(one.contiguous() if isinstance(one, Tensor) else one for one in call)
    tables = (
        *(call.input_ids, call.word_weight),
        *(call.position_ids, call.position_weight),
        *(call.token_type_ids, call.token_type_weight),
    )
    threshold = dropout_threshold(call.dropout_p)
    settings = dict(threshold=threshold, keep_scale=dropout_scale(threshold), eps=call.eps)
    return (tables, call.weight, call.bias, (call.seed, call.sample_index, call.position)), settings


def _triton_forward(call: Call) -> Tensor:
    _check_range(call)
    tensors, settings = _arguments(call)
    return kernels("embedding_layer_norm").embedding_layer_norm_fwd(
        *tensors, dtype=_DTYPES[call.dtype], **settings
    )


def _triton_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    call, *needs = saved
    tensors, settings = _arguments(call)
    return kernels("embedding_layer_norm").embedding_layer_norm_bwd(
        last_dim_contiguous(grad),
        *tensors,
        paddings=(call.padding_idx, call.position_padding_idx),
        needs=needs,
        **settings,
    )


#: ``table[ids[n]] += rows[n]`` for a table [V, E], ids [N] and rows [N, E], without
#: ``padding_idx``; the rows of an id are summed in fp32, in their order.
ADD_ROWS = define(
    "add_rows_",
    "(Tensor(a!) table, Tensor ids, Tensor rows, int padding_idx) -> ()",
    run=lambda *arguments: kernels("embedding_layer_norm").add_rows_(*arguments),
    fake=lambda *_: None,
)


def adds_rows(table: Tensor, rows: Tensor) -> bool:
    """Whether ``ADD_ROWS`` runs on these."""
    wanted = requested("embedding_layer_norm")
    return (
        (is_eager(table, rows) or is_fake(rows))
        and not (is_batched(table) or is_batched(rows))
        and not (rows.is_cpu and wanted != "triton")
        and wanted in ("auto", "triton")
        and torch.float64 not in (table.dtype, rows.dtype)
        and table.is_contiguous()
        and why_not_triton(table, wanted == "triton") is None
    )


# --- registration ---------------------------------------------------------------------------------


def dtype_of_rows(*tables: Tensor) -> torch.dtype:
    """The dtype of the gradient of a row's sum."""
    return functools.reduce(torch.promote_types, (one.dtype for one in tables))


def _fake(call: Call, backend: str) -> Tensor:
    shape = (call.input_ids.shape[0], call.weight.shape[0])
    return call.weight.new_empty(shape, dtype=_DTYPES[call.dtype])


def _fake_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, ...]:
    call, need_rows, *needs = saved
    tables = (call.word_weight, call.position_weight, call.token_type_weight)
    return (
        call.weight.new_empty(
            (call.input_ids.shape[0], call.weight.shape[0]) if need_rows else (0,),
            dtype=dtype_of_rows(*tables),
        ),
        *(
            one.new_empty(one.shape if need else (0,))
            for one, need in zip(tables, needs, strict=True)
        ),
        call.weight.new_empty(call.weight.shape),
        call.bias.new_empty(call.bias.shape),
    )


def _smoke(device: torch.device) -> None:
    ids = torch.tensor([4, 0, 4, 1], device=device)
    table, vector = torch.randn(5, 16, device=device), torch.ones(16, device=device)
    tables = (ids, table.requires_grad_(), ids, table, None, table)
    embedding_layer_norm(*tables, vector, vector, dropout_p=0.1).sum().backward()


OP = Op(
    "embedding_layer_norm",
    Call,
    fake=_fake,
    reference=embedding_layer_norm_ref,
    eager=_eager,
    smoke=_smoke,
    saved=Saved,
    gradients=(
        "word_rows",
        "word_weight",
        "position_weight",
        "token_type_weight",
        "weight",
        "bias",
    ),
    fake_backward=_fake_backward,
)
OP.backend("triton", forward=_triton_forward, backward=_triton_backward, rejects=_triton_rejects)
