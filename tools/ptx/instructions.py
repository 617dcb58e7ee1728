"""What every instruction does to the registers of a group of threads.

``bind(group, instruction)`` looks everything up once and gives the function that executes it:
``run()`` for instructions that only write registers, ``run(mask)`` for those that touch memory or
the group's asynchronous work (``mask``: the threads that take part, None for all of them).

Numerics: fp32 arithmetic is exact to the last bit, except the functions that hardware approximates
(``ex2``, ``lg2``, ``rcp``, ``rsqrt``, ``sqrt.approx``, ``div.full``, ``sin``, ``cos``, ``tanh``):
these are computed in fp64 and rounded once. So are fused multiply-adds. Matrix products multiply
exactly and add in fp32, in the order of the host's BLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ptx.memory import WHOLE, MemoryFault
from ptx.parse import Address, Instruction, PtxError

U16, U32, U64, F32, F64 = np.uint16, np.uint32, np.uint64, np.float32, np.float64
NUMPY = {
    "pred": np.bool_,
    "f16": np.float16,
    "f32": F32,
    "f64": F64,
    "bf16": U16,
    "f16x2": U32,
    "bf16x2": U32,
    "tf32": F32,
    **{f"{kind}{8 * size}": WHOLE[size] for kind in "bu" for size in (1, 2, 4, 8)},
    **{f"s{8 * size}": np.dtype(f"i{size}").type for size in (1, 2, 4, 8)},
}
_SIZE = {name: np.dtype(kind).itemsize for name, kind in NUMPY.items()}
#: Instructions that change nothing here; ``fences`` says whether a ``wgmma.fence`` is missing.
NOTHING = ("fence.acq_rel.cta", "fence.sc.cta", "membar.cta", "wgmma.fence", "setmaxnreg")

Pure = tuple[Callable[[], Any], list[np.ndarray]]
_PURE: dict[str, Callable[..., Pure]] = {}
_MASKED: dict[str, Callable[..., Callable[[np.ndarray | None], Any]]] = {}


def _pure(*names: str):
    def note(function):
        _PURE.update(dict.fromkeys(names, function))
        return function

    return note


def _masked(*names: str):
    def note(function):
        _MASKED.update(dict.fromkeys(names, function))
        return function

    return note


def bind(group: Any, ins: Instruction) -> tuple[Callable[[], Any], Callable[[np.ndarray], Any]]:
    """(a function that runs it for all threads, a function that runs it for those of a mask)."""
    try:
        return _bind(group, ins)
    except (KeyError, IndexError, ValueError, StopIteration, PtxError) as error:
        if isinstance(error, PtxError) and str(error).startswith("line"):
            raise
        raise ins.error(f"the emulator does not know what this asks for ({error})") from error


def _bind(group: Any, ins: Instruction) -> tuple[Callable[[], Any], Callable[[np.ndarray], Any]]:
    head = ins.parts[0]
    if ins.name.startswith(NOTHING):
        return _nothing, _nothing
    if head in _MASKED and not ins.name.startswith("ld.param"):
        masked = partial(_reported, _MASKED[head](group, ins), ins)
        every = partial(masked, None)
    elif head in _PURE:
        every, targets = _PURE[head](group, ins)
        masked = partial(_keep_others, every, targets)
    else:
        raise ins.error("an instruction that the emulator does not know")
    if ins.guard is None:
        return every, masked
    guard, wanted = group.row(ins.guard), not ins.negated

    def guarded(mask: np.ndarray | None = None) -> None:
        taken = guard if wanted else ~guard
        if mask is not None:
            taken = taken & mask
        count = np.count_nonzero(taken)
        if count == len(taken):
            every()
        elif count:
            masked(taken.copy() if wanted and mask is None else taken)

    return guarded, guarded


def _nothing(mask: np.ndarray | None = None) -> None:
    pass


def _reported(run: Callable, ins: Instruction, mask: np.ndarray | None) -> None:
    try:
        run(mask)
    except MemoryFault as fault:
        raise ins.error(str(fault)) from None


def _keep_others(run: Callable, targets: list[np.ndarray], mask: np.ndarray) -> None:
    kept = [target.copy() for target in targets]
    run()
    for target, old in zip(targets, kept, strict=True):
        np.copyto(target, old, where=~mask)


def _known(ins: Instruction, modifiers: set[str], *allowed: str) -> set[str]:
    """The modifiers, if all are known. To skip an unknown one would be a silent error."""
    if modifiers - set(allowed):
        raise ins.error(f"modifiers that the emulator does not know: {modifiers - set(allowed)}")
    return modifiers


# --- 16-bit numbers -------------------------------------------------------------------------------


def widen(bits: np.ndarray, kind: str) -> np.ndarray:
    """fp32 of fp16, bf16 or TF32 bits; the hardware ignores the low 13 bits of TF32."""
    if kind == "tf32":
        return (bits & U32(0xFFFFE000)).view(F32)
    if kind.startswith("f16"):
        return bits.view(np.float16).astype(F32)
    return (bits.astype(U32) << 16).view(F32)


def narrow(values: np.ndarray, kind: str) -> np.ndarray:
    """fp16 or bf16 bits of fp32, rounded to nearest even."""
    if kind.startswith("f16"):
        return values.astype(np.float16).view(U16)
    bits = np.ascontiguousarray(values, F32).view(U32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(U16)
    return np.where(np.isnan(values), U16(0x7FFF), rounded)


def _reader(group: Any, operand: str, kind: str) -> Callable[[], np.ndarray]:
    """Reads a 16-bit operand as fp32 [threads], or a pair of them as [threads, 2]."""
    if kind.endswith("x2"):
        row = group.source(operand, "b32").view(U16).reshape(-1, 2)
    else:
        row = group.source(operand, "b16")
    return lambda: widen(row, kind)


def _writer(group: Any, operand: str, kind: str) -> Callable[[np.ndarray], None]:
    row = group.target(operand, "b32" if kind.endswith("x2") else "b16")
    if kind.endswith("x2"):
        row = row.view(U16).reshape(-1, 2)
    return lambda values: np.copyto(row, narrow(values, kind))


_HALF = ("f16", "bf16", "f16x2", "bf16x2")


# --- arithmetic -----------------------------------------------------------------------------------


def _flush(values: np.ndarray) -> np.ndarray:
    """fp32 without denormal numbers."""
    return np.where(np.abs(values) < np.finfo(F32).tiny, np.copysign(F32(0), values), values)


_FLOAT_OPS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.fmin,
    "max": np.fmax,
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": np.reciprocal,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
}
_FLOAT_OPS["copysign"] = lambda sign, value: np.copysign(value, sign)
_IN_FP64 = ("sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh", "fma", "mad")


def _float(group: Any, ins: Instruction) -> Pure:
    head, *modifiers, kind = ins.parts
    said = _known(ins, set(modifiers), "rn", "ftz", "approx", "full", "sat", "NaN")
    out, *given = ins.operands
    function = _FLOAT_OPS[head]
    if "NaN" in said:
        function = {"min": np.minimum, "max": np.maximum}[head]
    if head in ("min", "max") and len(given) == 3:  # sm_100 and later have this form
        pair = function

        def function(a, b, c, out=None):
            return pair(pair(a, b), c, out=out)

    targets = [group.row(out)]
    if kind in _HALF:
        readers = [_reader(group, operand, kind) for operand in given]
        write = _writer(group, out, kind)
        exact = F64 if head in _IN_FP64 else F32

        def half() -> None:
            values = function(*(read().astype(exact) for read in readers))
            write(np.clip(values, 0, 1) if "sat" in said else values.astype(F32))

        return half, targets
    bits = "b64" if kind == "f32x2" else kind  # a pair is read as two fp32
    numbers = F32 if kind == "f32x2" else NUMPY[kind]
    target = group.target(out, bits).view(numbers)
    sources = [group.source(operand, bits).view(numbers) for operand in given]
    if kind == "f64":
        if head in ("fma", "mad"):
            sources = [s.view(F64) for s in sources]
            return lambda: np.copyto(target, _fma64(*sources)), targets
        return lambda: np.copyto(target, function(*sources)), targets
    in_fp64 = head in _IN_FP64 or said & {"approx", "full"}
    if not in_fp64 and not said & {"ftz", "sat"}:
        return partial(function, *sources, out=target), targets
    if head in ("fma", "mad") and not said & {"ftz", "sat"}:
        a, b, c = sources
        wide, multiply, add = np.empty(len(target)), np.multiply, np.add

        def fma() -> None:
            multiply(a, b, wide, dtype=F64)
            add(wide, c, target, dtype=F64, casting="same_kind")

        return fma, targets

    def single() -> None:
        values = [_flush(s) for s in sources] if "ftz" in said else sources
        if in_fp64:
            values = [value.astype(F64) for value in values]
        result = function(*values).astype(F32)
        if "sat" in said:
            result = np.where(np.isnan(result), F32(0), np.clip(result, 0, 1))
        np.copyto(target, _flush(result) if "ftz" in said else result)

    return single, targets


def _fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.longdouble) * b + c).astype(F64)


def _integer(group: Any, ins: Instruction, function: Callable) -> Pure:
    kind = ins.parts[-1]
    bits, one = ("b32", kind[:-2]) if kind in ("s16x2", "u16x2") else (kind, kind)
    target = group.target(ins.operands[0], bits).view(NUMPY[one])
    sources = [group.source(operand, bits).view(NUMPY[one]) for operand in ins.operands[1:]]
    return partial(function, *sources, out=target), [group.row(ins.operands[0])]


def _computed(group: Any, ins: Instruction, function: Callable, kinds: list[str]) -> Pure:
    """An instruction whose operands, the result first, have the types ``kinds``."""
    target = group.target(ins.operands[0], kinds[0])
    names = ins.operands[1 : len(kinds)]
    sources = [group.source(*pair) for pair in zip(names, kinds[1:], strict=True)]
    return (
        lambda: np.copyto(target, function(*sources), casting="unsafe"),
        [group.row(ins.operands[0])],
    )


def _high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of the product."""
    if a.dtype.itemsize == 4:
        wide = np.int64 if a.dtype.kind == "i" else U64
        return np.multiply(a, b, dtype=wide) >> wide(32)
    if a.dtype.itemsize == 2:
        return np.multiply(a, b, dtype=np.int32) >> 16
    return np.array(
        [(int(x) * int(y) >> 64) & (2**64 - 1) for x, y in zip(a, b, strict=True)], U64
    ).view(a.dtype)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a / b`` rounded towards zero; all bits are 1 if ``b`` is 0."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    found = a // safe
    if a.dtype.kind == "i":
        found = found + ((found < 0) & (found * safe != a)).astype(a.dtype)
    return np.where(zero, np.array(-1).astype(a.dtype), found)


@_pure("add", "sub", "min", "max", "mul", "neg", "abs", "div", "rem", "fma", "mad")
def _arithmetic(group: Any, ins: Instruction) -> Pure:
    head, *modifiers, kind = ins.parts
    if kind[0] == "f" or kind.startswith("bf"):
        return _float(group, ins)
    said = _known(ins, set(modifiers), "lo", "hi", "wide", "relu")
    if head in ("add", "sub"):
        return _integer(group, ins, {"add": np.add, "sub": np.subtract}[head])
    if head in ("min", "max"):
        function = {"min": np.minimum, "max": np.maximum}[head]
        if "relu" in said:
            return _computed(group, ins, lambda a, b: np.maximum(function(a, b), 0), [kind] * 3)
        return _integer(group, ins, function)
    if head in ("neg", "abs"):
        return _integer(group, ins, {"neg": np.negative, "abs": np.abs}[head])
    if head == "div":
        return _computed(group, ins, _quotient, [kind] * 3)
    if head == "rem":
        return _computed(group, ins, lambda a, b: a - _quotient(a, b) * b, [kind] * 3)
    if "wide" in said:
        double = f"{kind[0]}{2 * int(kind[1:])}"
        wide = NUMPY[double]
        if head == "mul":
            target = group.target(ins.operands[0], double)
            a, b = (group.source(operand, kind) for operand in ins.operands[1:])
            return partial(np.multiply, a, b, target, dtype=wide), [group.row(ins.operands[0])]
        return _computed(
            group,
            ins,
            lambda a, b, c: np.multiply(a, b, dtype=wide) + c,
            [double, kind, kind, double],
        )
    product = _high if "hi" in said else np.multiply
    if head == "mul":
        if product is np.multiply:
            return _integer(group, ins, np.multiply)
        return _computed(group, ins, product, [kind] * 3)
    return _computed(group, ins, lambda a, b, c: product(a, b).astype(a.dtype) + c, [kind] * 4)


for _name in ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", "copysign"):
    _pure(_name)(_float)


_BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}


@_pure(*_BITS)
def _bitwise(group: Any, ins: Instruction) -> Pure:
    return _integer(group, ins, _BITS[ins.parts[0]])


@_pure("shl", "shr")
def _shift(group: Any, ins: Instruction) -> Pure:
    kind = ins.parts[-1]
    width = 8 * _SIZE[kind]
    function = np.left_shift if ins.parts[0] == "shl" else np.right_shift
    count = ins.operands[2]
    target, value = group.target(ins.operands[0], kind), group.source(ins.operands[1], kind)
    targets = [group.row(ins.operands[0])]
    if not group.is_register(count):
        places = group.constant(count, "u32")[0]
        if places < width:
            amount = np.full(len(value), places, value.dtype)
            return partial(function, value, amount, target), targets
    counts = group.source(count, "u32")
    signed = value.dtype.kind == "i"

    def shift() -> None:
        amount = np.minimum(counts, width - 1).astype(value.dtype)
        result = function(value, amount)
        np.copyto(target, result if signed else np.where(counts < width, result, 0))

    return shift, targets


@_pure("bfe")
def _extract(group: Any, ins: Instruction) -> Pure:
    kind = ins.parts[-1]
    width = 8 * _SIZE[kind]
    if kind[0] == "u" and not any(map(group.is_register, ins.operands[2:])):
        start, size = (int(group.constant(operand, "u32")[0]) for operand in ins.operands[2:])
        if start + size <= width:
            ones = NUMPY[kind]((1 << size) - 1)
            return _computed(group, ins, lambda a, *_: a >> start & ones, [kind, kind])

    def extract(a: np.ndarray, position: np.ndarray, length: np.ndarray) -> np.ndarray:
        start, size = position & 0xFF, length & 0xFF
        shifted = np.where(start < width, a >> np.minimum(start, width - 1).astype(a.dtype), 0)
        if a.dtype.kind == "i":
            filled = np.where(start < width, shifted, a >> a.dtype.type(width - 1))
            left = (width - np.clip(size, 1, width)).astype(a.dtype)
            return np.where(size == 0, 0, filled << left >> left)
        kept = (np.uint64(1) << np.minimum(size, 63).astype(U64)) - np.uint64(1)
        return np.where(size < width, shifted & kept.astype(a.dtype), shifted)

    return _computed(group, ins, extract, [kind, kind, "u32", "u32"])


@_pure("bfi")
def _insert(group: Any, ins: Instruction) -> Pure:
    kind = ins.parts[-1]
    width = 8 * _SIZE[kind]

    def insert(a, b, position, length):
        start = np.minimum(position & 0xFF, 64)
        size = np.minimum(length & 0xFF, width)
        ones = np.array(
            [((1 << int(n)) - 1 << int(s)) % 2**width for n, s in zip(size, start, strict=True)]
        )
        moved = np.array([(int(x) << int(s)) % 2**width for x, s in zip(a, start, strict=True)])
        ones, moved = ones.astype(b.dtype), moved.astype(b.dtype)
        return b & ~ones | moved & ones

    return _computed(group, ins, insert, [kind, kind, kind, "u32", "u32"])


@_pure("popc", "clz", "brev")
def _count(group: Any, ins: Instruction) -> Pure:
    head, kind = ins.parts
    width = 8 * _SIZE[kind]
    functions: dict[str, Callable[[int], int]] = {
        "popc": int.bit_count,
        "clz": lambda x: width - x.bit_length(),
        "brev": lambda x: int(f"{x:0{width}b}"[::-1], 2),
    }
    function = functions[head]
    result = kind if head == "brev" else "u32"
    return _computed(
        group, ins, lambda a: np.array([function(int(x)) for x in a], U64), [result, kind]
    )


@_pure("prmt")
def _permute(group: Any, ins: Instruction) -> Pure:
    _known(ins, set(ins.parts[1:]), "b32")
    out, first, second, selector = ins.operands
    if not group.is_register(selector) and out not in (first, second):
        choices = [int(selector.rstrip("U"), 0) >> 4 * place & 0xF for place in range(4)]
        if max(choices) < 8:
            given = [group.source(name, "b32").view(np.uint8) for name in (first, second)]
            to = group.target(out, "b32").view(np.uint8)
            moves = [(to[i::4], given[c // 4][c % 4 :: 4]) for i, c in enumerate(choices)]

            def move() -> None:
                for target, source in moves:
                    target[:] = source

            return move, [group.row(out)]

    def permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
        whole = a.astype(U64) | b.astype(U64) << U64(32)
        result = np.zeros(len(a), U32)
        for place in range(4):
            choice = selector >> U32(4 * place) & U32(0xF)
            byte = whole >> (choice & U32(7)).astype(U64) * U64(8) & U64(0xFF)
            byte = np.where(choice & 8, np.where(byte & U64(0x80), 0xFF, 0), byte)
            result |= byte.astype(U32) << U32(8 * place)
        return result

    return _computed(group, ins, permute, ["b32"] * 4)


@_pure("shf")
def _funnel(group: Any, ins: Instruction) -> Pure:
    _, side, mode, _ = ins.parts

    def funnel(low: np.ndarray, high: np.ndarray, count: np.ndarray) -> np.ndarray:
        places = (count & U32(31) if mode == "wrap" else np.minimum(count, 32)).astype(U64)
        whole = low.astype(U64) | high.astype(U64) << U64(32)
        if side == "l":
            return whole << places >> U64(32)
        return whole >> places & U64(0xFFFFFFFF)

    return _computed(group, ins, funnel, ["b32"] * 4)


@_pure("lop3")
def _logic(group: Any, ins: Instruction) -> Pure:
    table = int(ins.operands[4], 0)

    def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros(len(a), U32)
        for row in range(8):
            if table >> row & 1:
                taken = [x if row & bit else ~x for x, bit in ((a, 4), (b, 2), (c, 1))]
                result |= taken[0] & taken[1] & taken[2]
        return result

    return _computed(group, ins, logic, ["b32"] * 4)


# --- comparing, choosing and converting -----------------------------------------------------------

_ORDERED = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_OPPOSITE = {"ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}


def _comparison(name: str, is_float: bool) -> Callable:
    if name in _ORDERED:
        return _ORDERED[name]
    if name == "neu" or (name == "ne" and not is_float):
        return np.not_equal
    if name == "ne":
        return lambda a, b: (a < b) | (a > b)
    if name == "equ":
        return lambda a, b: ~((a < b) | (a > b))
    if name == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if name == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    opposite = _ORDERED[_OPPOSITE[name]]
    return lambda a, b: ~opposite(a, b)


@_pure("setp")
def _compare(group: Any, ins: Instruction) -> Pure:
    _, name, *modifiers, kind = ins.parts
    said = _known(ins, set(modifiers), "ftz", "and", "or", "xor")
    function = _comparison(name, "f" in kind)
    first, _, second = ins.operands[0].partition("|")
    target, targets = group.row(first), [group.row(first)]
    if kind in _HALF:
        read_a, read_b = (_reader(group, operand, kind) for operand in ins.operands[1:3])
        a = b = None
    else:
        a, b = (group.source(operand, kind) for operand in ins.operands[1:3])
    if isinstance(function, np.ufunc) and a is not None and len(said) == 0 and not second:
        return partial(function, a, b, target), targets
    combined = _BITS.get(next(iter(said - {"ftz"}), ""))
    other = group.source(ins.operands[3], "pred") if combined else None
    also = group.row(second) if second else None
    if second:
        targets.append(also)

    def compare() -> None:
        values = (read_a(), read_b()) if a is None else (a, b)
        if "ftz" in said:
            values = tuple(map(_flush, values))
        found = function(*values)
        if also is not None:
            np.copyto(also, combined(~found, other) if combined else ~found)
        np.copyto(target, combined(found, other) if combined else found)

    return compare, targets


@_pure("selp")
def _select(group: Any, ins: Instruction) -> Pure:
    kind = f"b{8 * _SIZE[ins.parts[-1]]}"
    target = group.target(ins.operands[0], kind)
    a, b = (group.source(operand, kind) for operand in ins.operands[1:3])
    choice, where = group.source(ins.operands[3], "pred"), np.where

    def select() -> None:
        target[:] = where(choice, a, b)

    return select, [target]


@_pure("slct")
def _select_by_sign(group: Any, ins: Instruction) -> Pure:
    kind, sign = ins.parts[-2:]
    return _computed(group, ins, lambda a, b, c: np.where(c >= 0, a, b), [kind, kind, kind, sign])


def _to_integer(values: np.ndarray, kind: str) -> np.ndarray:
    """Whole floats as integers: numbers out of range become the nearest limit, NaN becomes 0."""
    limits = np.iinfo(NUMPY[kind])
    inside = np.nan_to_num(values.astype(F64), nan=0.0, posinf=0.0, neginf=0.0)
    safe = np.where((inside >= limits.max) | (inside <= limits.min), 0, inside)
    result = safe.astype(NUMPY[kind])
    result = np.where(values >= float(limits.max), limits.max, result)
    return np.where(values <= float(limits.min), limits.min, result)


_ROUND = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil}


@_pure("cvt")
def _convert(group: Any, ins: Instruction) -> Pure:
    *modifiers, to, of = ins.parts[1:]
    said = _known(ins, set(modifiers), "rn", "rni", "rzi", "rmi", "rpi", "rz", "ftz", "sat", "rna")
    out, *given = ins.operands
    targets = [group.row(out)]
    if to in ("bf16x2", "f16x2"):
        _known(ins, said, "rn")
        row = group.target(out, "b32").view(U16).reshape(-1, 2)
        high, low = (group.source(operand, "f32") for operand in given)

        def pack() -> None:
            both = narrow(low, to), narrow(high, to)
            row[:, 0], row[:, 1] = both

        return pack, targets
    if of == "bf16":
        read = _reader(group, given[0], of)
    else:
        source = group.source(given[0], of)
        if not said and to not in ("bf16", "tf32") and "f" not in to + of:
            if _SIZE[to] == group.width(out):  # between integers: the most frequent by far
                target = group.target(out, to)
                return partial(np.copyto, target, source, casting="unsafe"), targets

        def read() -> np.ndarray:
            return source

    write = group.extending(out, to)
    rounding = next((name[:2] for name in said if len(name) == 3 and name[2] == "i"), None)
    whole = "f" not in to

    def convert() -> None:
        values = read()
        if "ftz" in said and values.dtype == F32:
            values = _flush(values)
        if whole and "f" not in of:
            if "sat" in said:
                limits = np.iinfo(NUMPY[to])
                values = np.clip(values, limits.min, limits.max)
            return write(values.astype(NUMPY[to]))
        if rounding:
            values = _ROUND[rounding](values)
        if whole:
            return write(_to_integer(values, to).astype(NUMPY[to]))
        if "sat" in said:
            values = np.where(np.isnan(values), 0, np.clip(values, 0, 1))
        if to == "bf16":
            if "rz" in said:
                return write((values.astype(F32).view(U32) >> U32(16)).astype(U16))
            return write(narrow(values.astype(F32), to))
        if to == "tf32":
            bits = values.astype(F32).view(U32)
            bits = bits + U32(0x1000) if "rna" in said else bits
            return write((bits & U32(0xFFFFE000)).view(F32))
        return write(values.astype(NUMPY[to]))

    if "rz" in said and to not in ("bf16", "tf32"):
        raise ins.error("rounding towards zero to this type")
    return convert, targets


@_pure("mov")
def _move(group: Any, ins: Instruction) -> Pure:
    kind = ins.parts[-1]
    out, given = ins.operands
    if kind == "pred":
        return partial(np.copyto, group.row(out), group.source(given, kind)), [group.row(out)]
    kind = f"b{8 * _SIZE[kind]}"
    if isinstance(out, tuple):
        piece = f"b{8 * _SIZE[kind] // len(out)}"
        parts = group.source(given, kind).view(NUMPY[piece]).reshape(-1, len(out))
        rows = [(i, group.target(name, piece)) for i, name in enumerate(out) if name != "_"]

        def split() -> None:
            for i, row in rows:
                row[:] = parts[:, i]

        return split, [row for _, row in rows]
    target = group.target(out, kind)
    if isinstance(given, tuple):
        piece = f"b{8 * _SIZE[kind] // len(given)}"
        parts = target.view(NUMPY[piece]).reshape(-1, len(given))
        rows = [(i, group.source(name, piece)) for i, name in enumerate(given)]

        def join() -> None:
            for i, row in rows:
                parts[:, i] = row

        return join, [target]
    return partial(np.copyto, target, group.source(given, kind)), [target]


@_pure("ld")
def _load_parameter(group: Any, ins: Instruction) -> Pure:
    kind = ins.parts[-1]
    target = group.row(ins.operands[0])
    write = group.extending(ins.operands[0], kind)
    place: Address = ins.operands[1]
    size, lanes = _SIZE[kind], group.lanes

    def load() -> None:
        raw = group.params[place.base][place.offset : place.offset + size]
        write(np.full(lanes, np.frombuffer(raw, NUMPY[kind])[0]))

    return load, [target]


@_pure("cvta")
def _to_address_space(group: Any, ins: Instruction) -> Pure:
    if "shared" in ins.name:
        raise ins.error("generic addresses of shared memory")
    return _integer(group, ins, lambda a, out: np.copyto(out, a))


# --- between the threads of a warp ----------------------------------------------------------------


@_pure("shfl")
def _shuffle(group: Any, ins: Instruction) -> Pure:
    mode = ins.parts[2]
    if mode not in ("up", "down", "bfly", "idx"):
        raise ins.error("a shuffle that the emulator does not know")
    first, _, second = ins.operands[0].partition("|")
    value = group.source(ins.operands[1], "b32")
    by, clamp = (group.source(operand, "u32") for operand in ins.operands[2:4])
    target, found = group.target(first, "b32"), group.row(second) if second else None
    lane = group.lane.astype(np.int64)
    warp = np.arange(group.lanes) - lane
    targets = [target] if found is None else [target, found]

    def source() -> tuple[np.ndarray, np.ndarray]:
        step = (by & U32(31)).astype(np.int64)
        limit, segment = (clamp & U32(31)).astype(np.int64), (clamp >> U32(8)) & U32(31)
        segment = segment.astype(np.int64)
        least, most = lane & segment, (lane & segment) | (limit & ~segment)
        if mode == "up":
            other = lane - step
            inside = other >= most
        else:
            other = {"down": lane + step, "bfly": lane ^ step, "idx": least | (step & ~segment)}[
                mode
            ]
            inside = other <= most
        return np.where(inside, other, lane) + warp, inside

    if not any(map(group.is_register, ins.operands[2:4])):
        places, inside = source()

        def shuffle() -> None:
            target[:] = value.take(places)
            if found is not None:
                found[:] = inside

        return shuffle, targets

    def looked_up() -> None:
        places, inside = source()
        target[:] = value.take(places)
        if found is not None:
            found[:] = inside

    return looked_up, targets


_REDUCE = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@_pure("redux")
def _reduce(group: Any, ins: Instruction) -> Pure:
    _, _, operation, kind = ins.parts
    value, target = group.source(ins.operands[1], kind), group.target(ins.operands[0], kind)
    function = _REDUCE[operation]

    def reduce() -> None:
        whole = function.reduce(value.reshape(-1, 32), axis=1, dtype=value.dtype)
        target[:] = np.repeat(whole, 32)

    return reduce, [target]


@_pure("vote")
def _vote(group: Any, ins: Instruction) -> Pure:
    mode = ins.parts[2]
    given = ins.operands[1]
    value = group.source(given.removeprefix("!"), "pred")
    negated = given.startswith("!")
    target = group.row(ins.operands[0])
    bits = U32(1) << np.arange(32, dtype=U32)
    functions: dict[str, Callable] = {
        "ballot": lambda votes: (votes * bits).sum(1, dtype=U32),
        "any": lambda votes: votes.any(1),
        "all": lambda votes: votes.all(1),
        "uni": lambda votes: votes.all(1) | ~votes.any(1),
    }
    function = functions[mode]

    def vote() -> None:
        votes = (~value if negated else value).reshape(-1, 32)
        target[:] = np.repeat(function(votes), 32)

    return vote, [target]


@_pure("elect")
def _elect(group: Any, ins: Instruction) -> Pure:
    if ins.name != "elect.sync" or ins.operands[1] != "-1":
        raise ins.error("an election that the emulator does not know")
    lane, _, elected = ins.operands[0].partition("|")
    who, chosen = group.target(lane, "b32"), group.row(elected)

    def elect() -> None:
        who.fill(0)
        np.equal(group.lane, 0, out=chosen)

    return elect, [who, chosen]


@_masked("activemask")
def _active(group: Any, ins: Instruction) -> Callable:
    target = group.target(ins.operands[0], "b32")
    bits = U32(1) << np.arange(32, dtype=U32)

    def active(mask: np.ndarray | None) -> None:
        present = np.ones(group.lanes, bool) if mask is None else mask
        np.copyto(
            target, np.repeat((present.reshape(-1, 32) * bits).sum(1, dtype=U32), 32), where=present
        )

    return active


# --- memory ---------------------------------------------------------------------------------------

#: Modifiers that change no value: they say how memory is cached, ordered and shared.
_HINTS = {"weak", "relaxed", "acquire", "release", "acq_rel", "gpu", "cta", "sys", "nc", "volatile"}


def releases(ins: Instruction) -> bool:
    """Whether the instruction releases earlier stores to other blocks."""
    said = set(ins.parts)
    if ins.parts[0] in ("fence", "membar"):
        return bool(said & {"gpu", "gl", "sys"})
    return bool(said & {"release", "acq_rel"}) and "cta" not in said


def _acquires(ins: Instruction) -> bool:
    return bool({"acquire", "acq_rel"} & set(ins.parts)) and "cta" not in ins.parts


def acquire(group: Any, which: Any) -> None:
    """These threads acquire what was released to the values that they have read."""
    group.acquired[which] = np.maximum(group.acquired[which], group.observed[which])


def _is_strong(ins: Instruction) -> bool:
    """Whether the access is strong: it goes to the memory that all blocks share."""
    said = set(ins.parts)
    strong = said & {"relaxed", "acquire", "release", "acq_rel", "volatile"}
    return bool(strong) and "cta" not in said


def _access(ins: Instruction) -> tuple[str, int, str]:
    """(space, elements, type) of a load or store."""
    modifiers = [m for m in ins.parts[1:-1] if m not in _HINTS and "::" not in m]
    space = modifiers.pop(0) if modifiers and modifiers[0] in ("global", "shared") else ""
    count = 1
    for modifier in modifiers:
        if modifier in ("v2", "v4"):
            count = int(modifier[1])
        else:
            raise ins.error(f".{modifier}: a modifier that the emulator does not know")
    if "shared::cta" in ins.name:
        space = "shared"
    if space not in ("global", "shared"):
        raise ins.error("a memory that the emulator does not know")
    return space, count, ins.parts[-1]


def _addresses(
    group: Any, ins: Instruction, place: Address, space: str
) -> Callable[[], np.ndarray]:
    kind = "u32" if space == "shared" else "u64"
    if group.is_register(place.base):
        base = group.source(place.base, kind).view(np.int64 if kind == "u64" else U32)
    elif place.base in group.kernel.symbols:
        base = np.full(group.lanes, group.kernel.symbols[place.base], U32)
    else:
        raise ins.error(f"an address that the emulator does not know: {place.base}")
    if place.offset == 0:
        return lambda: base
    offset = base.dtype.type(place.offset % 2**32) if kind == "u32" else np.int64(place.offset)
    return lambda: base + offset


@_masked("ld")
def _load(group: Any, ins: Instruction) -> Callable:
    space, count, kind = _access(ins)
    size = _SIZE[kind]
    address = _addresses(group, ins, ins.operands[1], space)
    out = ins.operands[0]
    names = out if isinstance(out, tuple) else (out,)
    element = NUMPY[kind]
    rows, straight = [], True
    how = "strong" if _is_strong(ins) else "constant" if "nc" in ins.parts else "weak"
    acquires = _acquires(ins)
    for name in names:
        if name != "_":
            straight &= group.width(name) == size
        rows.append(None if name == "_" else group.row(name))

    def load(mask: np.ndarray | None) -> None:
        places, which = address(), slice(None)
        if mask is not None:
            places, which = places[mask], mask
        if space == "global":
            whole = group.memory.load(places, size * count, group, which, how)
            if acquires:
                acquire(group, which)
        else:
            whole = group.shared.load(places, size * count, group, which)
        values = whole.view(element).reshape(-1, count)
        for i, row in enumerate(rows):
            if row is None:
                continue
            value = values[:, i]
            if not straight:
                value = value.astype(np.int64).astype(row.dtype)
            else:
                value = value.view(row.dtype) if count == 1 else value
                row = row if count == 1 else row.view(element)
            if mask is None:
                row[:] = value
            else:
                row[mask] = value

    return load


@_masked("st")
def _store(group: Any, ins: Instruction) -> Callable:
    space, count, kind = _access(ins)
    size = _SIZE[kind]
    address = _addresses(group, ins, ins.operands[0], space)
    given = ins.operands[1]
    names = given if isinstance(given, tuple) else (given,)
    bits = f"b{8 * size}"
    rows = [group.source(name, bits) for name in names]
    lanes, is_release = group.lanes, releases(ins)
    how = "strong" if _is_strong(ins) else "weak"

    def store(mask: np.ndarray | None) -> None:
        values = np.empty((lanes, count), NUMPY[bits])
        for i, row in enumerate(rows):
            values[:, i] = row
        whole, places = values.view(WHOLE[size * count])[:, 0], address()
        which = slice(None)
        if mask is not None:
            whole, places, which = whole[mask], places[mask], mask
        if space == "global":
            released = group.memory.release(group, which) if is_release else 0
            group.memory.store(places, size * count, whole, group, which, how, released)
        else:
            group.shared.store(places, size * count, whole, group, which)

    return store


_ATOMIC: dict[str, Callable] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda old, new: new,
}


@_masked("atom", "red")
def _atomic(group: Any, ins: Instruction) -> Callable:
    head = ins.parts[0]
    words = [m for m in ins.parts[1:-1] if m not in _HINTS and m != "global"]
    kind = ins.parts[-1]
    if len(words) != 1 or words[0] not in (*_ATOMIC, "cas") or ".global" not in ins.name:
        raise ins.error("an atomic operation that the emulator does not know")
    place, *given = ins.operands if head == "red" else ins.operands[1:]
    target = None
    if head == "atom" and ins.operands[0] != "_":
        target = group.target(ins.operands[0], kind)
    address = _addresses(group, ins, place, "global")
    sources = [group.source(operand, kind) for operand in given]
    function = _ATOMIC.get(words[0])
    size, element = _SIZE[kind], NUMPY[kind]
    # Without modifiers the order is relaxed, and the scope is the GPU.
    reads, writes = ("weak", "weak") if "cta" in ins.parts else ("strong", "atomic")
    is_release, is_acquire = releases(ins), _acquires(ins)

    def atomic(mask: np.ndarray | None) -> None:
        places = address()
        lanes = np.arange(group.lanes) if mask is None else np.flatnonzero(mask)
        released = group.memory.release(group, lanes) if is_release else 0
        for lane in lanes:
            where = places[lane : lane + 1]
            old = group.memory.load(where, size, group, [lane], reads).view(element)
            if function is not None:
                new = function(old, sources[0][lane : lane + 1])
            else:
                compared, wanted = (source[lane : lane + 1] for source in sources)
                new = np.where(old == compared, wanted, old)
            changed = new.astype(element).view(WHOLE[size])
            group.memory.store(where, size, changed, group, [lane], writes, released)
            if target is not None:
                target[lane] = old[0]
        if is_acquire:
            acquire(group, lanes)

    return atomic


# --- asynchronous copies --------------------------------------------------------------------------


@_masked("cp")
def _copy(group: Any, ins: Instruction) -> Callable:
    if ins.name == "cp.async.commit_group":
        return group.copies.commit
    if ins.name == "cp.async.wait_group":
        return partial(group.copies.wait, int(ins.operands[0]))
    if ins.name == "cp.async.wait_all":
        return partial(group.copies.wait, -1)
    names = [part for part in ins.parts if "::" not in part]
    if ins.name.startswith("cp.async.mbarrier.arrive.noinc.shared"):
        return _copies_arrive(group, ins)
    if names not in (
        ["cp", "async", "ca", "shared", "global"],
        ["cp", "async", "cg", "shared", "global"],
    ):
        raise ins.error("an asynchronous copy that the emulator does not know")
    to = _addresses(group, ins, ins.operands[0], "shared")
    of = _addresses(group, ins, ins.operands[1], "global")
    size = int(ins.operands[2], 0)
    taken = group.source(ins.operands[3], "u32") if len(ins.operands) > 3 else None
    if len(ins.operands) > 4:
        raise ins.error("a cache policy")

    def copy(mask: np.ndarray | None) -> None:
        lanes = np.arange(group.lanes) if mask is None else np.flatnonzero(mask)
        places = group.shared.places(to()[lanes], size) + group.block_start[lanes]
        values = np.zeros(len(lanes), WHOLE[size])
        sizes = np.full(len(lanes), size) if taken is None else taken[lanes]
        whole = sizes == size
        if whole.any():
            values[whole] = group.memory.load(of()[lanes][whole], size, group, lanes[whole])
        raw = values.view(np.uint8).reshape(-1, size)
        for i in np.flatnonzero(~whole & (sizes > 0)):
            start = of()[lanes[i]]
            which = np.full(sizes[i], lanes[i])
            raw[i, : sizes[i]] = group.memory.load(start + np.arange(sizes[i]), 1, group, which)
        view = group.shared.views[size]
        group.shared.watch(places, size, group, lanes, writes=True)

        def land(which: np.ndarray) -> None:
            group.shared.watch(places[which], size, group, lanes[which], writes=True)
            view[places[which] // size] = values[which]

        def landed(which: np.ndarray) -> None:
            _reported(land, ins, which)

        group.copies.issue(lanes, landed)

    return copy


@_masked("bar")
def _warp_barrier(group: Any, ins: Instruction) -> Callable:
    if not ins.name.startswith("bar.warp.sync"):
        raise ins.error("a barrier that the emulator does not know")

    def meet(mask: np.ndarray | None) -> None:
        taken = np.ones(group.lanes, bool) if mask is None else mask
        warps = taken.reshape(-1, 32)
        for times, later in ((group.acquired, 0), (group.clock, 1)):
            most = np.where(warps, times.reshape(-1, 32), 0).max(1, keepdims=True) + later
            np.copyto(times.reshape(-1, 32), most, where=warps)

    return meet


# --- phases of mbarrier objects -------------------------------------------------------------------


def _copies_arrive(group: Any, ins: Instruction) -> Callable:
    address = _addresses(group, ins, ins.operands[0], "shared")

    def arrive(mask: np.ndarray | None) -> None:
        lanes = np.arange(group.lanes) if mask is None else np.flatnonzero(mask)
        blocks, places = group.block_start[lanes], address()[lanes].copy()
        group.copies.signal(lanes, lambda which: group.shared.arrive(blocks[which], places[which]))

    return arrive


@_masked("mbarrier")
def _phases(group: Any, ins: Instruction) -> Callable:
    operation = ins.parts[1]
    place, *count = ins.operands if operation == "init" else ins.operands[::-1][:1]
    if operation not in ("init", "inval", "arrive") or ins.parts[2:] != ["shared::cta", "b64"]:
        raise ins.error("what the emulator does not know of an mbarrier")
    if operation == "arrive" and (ins.operands[0] != "_" or len(ins.operands) != 2):
        raise ins.error("an arrival that the emulator does not know")
    address = _addresses(group, ins, place, "shared")
    threads = group.source(count[0], "u32") if count else None

    def run(mask: np.ndarray | None) -> None:
        lanes = np.arange(group.lanes) if mask is None else np.flatnonzero(mask)
        given = () if threads is None else (threads[lanes],)
        getattr(group.shared, operation)(group.block_start[lanes], address()[lanes], *given)

    return run


def trying(group: Any, ins: Instruction) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the threads of a mask whose phase is complete, and sets their predicate."""
    if ins.parts[1:] != ["try_wait", "parity", "shared::cta", "b64"]:
        raise ins.error("a wait that the emulator does not know")
    done, place, parity = ins.operands
    found, parities = group.row(done), group.source(parity, "u32")
    address = _addresses(group, ins, place, "shared")

    def passed(mask: np.ndarray) -> np.ndarray:
        lanes = np.flatnonzero(mask)
        try:
            phases = group.shared.phases(group.block_start[lanes], address()[lanes])
        except MemoryFault as fault:
            raise ins.error(str(fault)) from None
        result = np.zeros(group.lanes, bool)
        result[lanes] = phases % 2 != parities[lanes]
        found[result] = True
        return result

    return passed


@_masked("fence", "membar")
def _fence(group: Any, ins: Instruction) -> Callable:
    if releases(ins):

        def order(mask: np.ndarray | None) -> None:
            which = slice(None) if mask is None else mask
            acquire(group, which)
            group.released[which] = group.memory.release(group, which)

        return order
    if not ins.name.startswith("fence.proxy.async"):
        raise ins.error("a fence that the emulator does not know")

    def fence(mask: np.ndarray | None) -> None:
        group.shared.fence(np.unique(group.block if mask is None else group.block[mask]))

    return fence


# --- tiles of matrices ----------------------------------------------------------------------------

#: The integer type that holds an element of a matrix product.
_ELEMENT = {"f16": U16, "bf16": U16, "tf32": U32}


@_masked("ldmatrix", "stmatrix")
def _matrix(group: Any, ins: Instruction) -> Callable:
    head, *modifiers = ins.parts
    said = _known(
        ins, set(modifiers), "sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared", "b16"
    )
    count = next(int(m[1]) for m in said if m in ("x1", "x2", "x4"))
    loads, transposed = head == "ldmatrix", "trans" in said
    registers, place = ins.operands if loads else ins.operands[::-1]
    address = _addresses(group, ins, place, "shared")
    rows = [group.row(name) for name in registers]
    warps = group.lanes // 32

    def lines(mask: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Where each row of each matrix lies, [warps * count * 8], and the warps that take part."""
        active = np.ones(warps, bool) if mask is None else mask.reshape(-1, 32).all(1)
        lanes = np.arange(group.lanes).reshape(-1, 32)[active, : 8 * count].reshape(-1)
        places = group.shared.places(address()[lanes], 16) + group.block_start[lanes]
        group.shared.watch(places, 16, group, lanes, writes=not loads)
        return places // 16, active

    def load(mask: np.ndarray | None) -> None:
        places, active = lines(mask)
        tiles = group.shared.views[16].take(places).view(U16).reshape(-1, count, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        found = tiles.view(U32).reshape(-1, count, 32)
        for i, row in enumerate(rows):
            row.reshape(-1, 32)[active] = found[:, i]

    def store(mask: np.ndarray | None) -> None:
        places, active = lines(mask)
        tiles = np.stack([row.reshape(-1, 32)[active] for row in rows], 1)
        tiles = tiles.view(U16).reshape(-1, count, 8, 8)
        if transposed:
            tiles = np.ascontiguousarray(tiles.swapaxes(2, 3))
        group.shared.views[16][places] = tiles.reshape(-1, 8).view(np.complex128)[:, 0]

    return load if loads else store


@_pure("mma")
def _mma(group: Any, ins: Instruction) -> Pure:
    _, _, _, shape, *rest = ins.parts
    kind = rest[3]
    size = _SIZE[kind]
    shapes = (f"m16n8k{32 // size}", f"m16n8k{16 // size}")
    if shape not in shapes or rest != ["row", "col", "f32", kind, kind, "f32"]:
        raise ins.error("a matrix product that the emulator does not know")
    element, each = _ELEMENT[kind], 4 // size  # elements in a register
    halves = int(shape[6:]) // (4 * each)
    out, a, b, c = ([group.row(name) for name in operand] for operand in ins.operands)

    def multiply() -> None:
        # k half, m half, warp, g, t, element of a register
        left = np.stack(a).view(element).reshape(halves, 2, -1, 8, 4, each)
        left = widen(left.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 4 * each * halves), kind)
        right = np.stack(b).view(element).reshape(halves, -1, 8, 4, each)
        right = widen(right.transpose(1, 0, 3, 4, 2).reshape(-1, 4 * each * halves, 8), kind)
        product = (left @ right).reshape(-1, 2, 8, 4, 2)  # warp, m half, g, t, element
        parts = product.transpose(1, 4, 0, 2, 3).reshape(4, -1)
        sums = [added.view(F32) + part for added, part in zip(c, parts, strict=True)]
        for target, total in zip(out, sums, strict=True):
            target[:] = total.view(U32)

    return multiply, out


_SWIZZLE = {0: 0, 1: 7, 2: 3, 3: 1}  # mode -> bits of the row that are mixed into the column


@lru_cache(maxsize=256)
def operand_offsets(
    rows: int, leading: int, stride: int, mode: int, by_columns: bool, size: int = 2
) -> np.ndarray:
    """Bytes from a shared operand's start to its elements, [rows, 32 / size], before the swizzle.

    ``by_columns``: neighbours in memory are rows of the operand (M or N), not columns (K); only
    elements of 16 bits may lie so. ``size``: bytes of an element.
    """
    row, k = np.arange(rows)[:, None], np.arange(32 // size)[None, :]
    width = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
    if not by_columns:
        return (
            row // 8 * stride
            + row % 8 * width
            + k * size // 16 * (leading if mode == 0 else 16)
            + k * size % 16
        )
    along = row // (width // 2)
    if mode == 0:
        return along * stride + k // 8 * leading + k % 8 * 16 + row % 8 * 2
    return along * leading + k // 8 * stride + k % 8 * width + row % (width // 2) * 2


@_masked("wgmma")
def _group_product(group: Any, ins: Instruction) -> Callable:
    if ins.name == "wgmma.commit_group.sync.aligned":
        return group.products.commit
    if ins.name == "wgmma.wait_group.sync.aligned":
        return partial(group.products.wait, int(ins.operands[0]))
    _, operation, _, _, shape, *kinds = ins.parts
    kind = kinds[1]
    element, size = _ELEMENT[kind], _SIZE[kind]
    width, _, depth = shape.removeprefix("m64n").partition("k")
    if (operation, kinds, int(depth)) != ("mma_async", ["f32", kind, kind], 32 // size):
        raise ins.error("a matrix product that the emulator does not know")
    columns, each = int(width), 4 // size  # elements in a register
    out, a, b, scale, *signs = ins.operands
    from_registers = isinstance(a, tuple)
    sign_a, sign_b, *by_columns = (int(sign, 0) for sign in signs)
    if (sign_a, sign_b) != (1, 1):
        raise ins.error("a negated operand")
    # The PTX leaves out a flag that cannot be set: A in registers is never transposed, nor is TF32.
    a_by_columns, b_by_columns = [0] * (2 - len(by_columns)) + by_columns
    bank, places = group.bank(out)
    if bank.dtype != U32:
        raise ins.error("accumulators that are not 32 bits wide")
    left = [group.row(name) for name in a] if from_registers else group.source(a, "u64")
    right, scales = group.source(b, "u64"), group.source(scale, "pred")
    first = np.arange(0, group.lanes, 32)

    def operand(words: np.ndarray, warps: np.ndarray, rows: int, flag: bool) -> Callable:
        """A function that gives the places of warps' operands, [warps, rows, K]."""
        if (words >> U64(49) & U64(7)).any():
            raise ins.error("a descriptor with a base offset")
        layouts = np.unique(words & ~U64(0x3FFF))
        if len(layouts) != 1:
            raise ins.error("warps with unlike descriptors")
        layout = int(layouts[0])
        mode, leading, stride = layout >> 62, layout >> 16 & 0x3FFF, layout >> 32 & 0x3FFF
        table = operand_offsets(rows, leading * 16, stride * 16, mode, bool(flag), size)
        starts = (words & U64(0x3FFF)).astype(np.int64) * 16
        blocks = group.block_start[first[warps]]

        def reach(which: np.ndarray, lines: np.ndarray | None = None) -> np.ndarray:
            offsets = table[None] if lines is None else table[lines]
            linear = starts[which][:, None, None] + offsets
            linear ^= (linear >> 7 & _SWIZZLE[mode]) << 4
            found = group.shared.places(linear.reshape(-1), size).reshape(linear.shape)
            found += blocks[which][:, None, None]
            lanes = np.repeat(first[warps[which]], found[0].size)
            group.shared.watch(found.reshape(-1), size, group, lanes, writes=False)
            return found // size

        return reach

    def read(places: np.ndarray) -> np.ndarray:
        return widen(group.shared.proxy.view(element)[places], kind)

    def quarter(warps: np.ndarray) -> np.ndarray:
        """The rows of A that each warp multiplies."""
        return (group.warp[first[warps]] % 4 * 16)[:, None] + np.arange(16)

    def issue(mask: np.ndarray | None) -> None:
        warps = np.arange(len(first)) if mask is None else np.flatnonzero(mask[first])
        heads = first[warps]
        reach_b = operand(right[heads], warps, columns, b_by_columns)
        if not from_registers:
            reach_a = operand(left[heads], warps, 64, a_by_columns)
        every = np.arange(len(warps))
        if group.shared.watched:  # the product may read from now on
            reach_b(every)
            if not from_registers:
                reach_a(every, quarter(warps))
        added = scales[heads].copy()

        def land(which: np.ndarray) -> None:
            if from_registers:  # nothing may write these before the wait for the product
                held = np.stack([row.reshape(-1, 32)[warps[which]] for row in left]).view(element)
                held = held.reshape(2, 2, -1, 8, 4, each).transpose(2, 1, 3, 0, 4, 5)
                tile = widen(held.reshape(-1, 16, 8 * each), kind)
            else:
                tile = read(reach_a(which, quarter(warps[which])))
            product = tile @ read(reach_b(which)).swapaxes(1, 2)  # [warps, 16, columns]
            lanes = (heads[which][:, None] + np.arange(32)).reshape(-1)
            # Register 4 j + 2 h + e of thread 4 g + t holds row 8 h + g, column 8 j + 2 t + e.
            parts = product.reshape(-1, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4)
            parts = parts.reshape(columns // 2, -1)
            old = bank[places[:, None], lanes].view(F32)
            keep = np.repeat(added[which], 32)
            bank[places[:, None], lanes] = np.where(keep, old + parts, parts).view(U32)

        def landed(which: np.ndarray) -> None:
            _reported(land, ins, which)

        group.products.issue(warps, landed)

    return issue
