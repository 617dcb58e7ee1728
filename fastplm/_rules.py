"""The rules that say which implementation of an op runs on a CPU: csrc/ or stock PyTorch.

An op has an ordered list of rules. The first one that holds for a call decides. Each rule names the
measured row that it stands on, of ``benchmarks/results/cpu/rules/``: the file, the series, the
sizes, and there the time of PyTorch over that of csrc/. ``benchmarks/judge_rules.py`` judges the
rules by all rows, ``fastplm measure`` by those of this machine.

The words of a rule, all of which must hold:

- the CPU: avx2 or avx512, the level of csrc/ in use; intel, where MKL uses the whole level; zen5.
- the dtype: float32, or half for both of 16 bits. For native the CPU has instructions for products
  of the dtype, for emulated it has none.
- the form: forward or training (a call with a gradient); linear or conv1d (how a weight lies); for
  products and attention: threads or 1 thread.
- bounds of the sizes of ``sizes_by_name``, with K for 2^10 and M for 2^20.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from fastplm import _machine

#: The levels of csrc/ that were measured.
LEVELS = frozenset(("avx2", "avx512"))
#: The end of a form with one thread.
ALONE = ", 1 thread"
#: What ``aspect`` is of a square weight, and at most.
SQUARE, LONGEST = 64, 64**2
#: What the speed of a call depends on: a form of the op, the dtype, and sizes. (A tuple, as every
#: layer of a model makes one.)
CallClass = tuple[str, torch.dtype, tuple[int, ...]]

_BOUND = re.compile("([a-z]+) (<|>=) ([0-9]+)([KM]?)$")
_SIGNS = {"<": operator.lt, ">=": operator.ge}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


class Rule(NamedTuple):
    backend: str
    when: str
    row: str

    @property
    def words(self) -> frozenset[str]:
        return frozenset(part for part in self.when.split(", ") if not _BOUND.match(part))

    @property
    def bounds(self) -> dict[str, tuple[str, str, int]]:
        """(size, "<" or ">=", number) of each bound, by its text."""
        found = filter(None, map(_BOUND.match, self.when.split(", ")))
        return {bound[0]: (bound[1], bound[2], int(bound[3]) * _UNITS[bound[4]]) for bound in found}

    def __str__(self) -> str:
        faster = "csrc/" if self.backend == "cpp" else "PyTorch's"
        return f'{faster} is faster by the rule "{self.when}" (measured: {self.row})'


#: Rules, each with the bounds that are left to ask.
BoundedRules = list[tuple[Rule, list[tuple[str, Callable[[int, int], bool], int]]]]


def _read(text: str) -> tuple[Rule, ...]:
    found = re.findall(r"(cpp|stock): (.+?)\s*\| (.+)", text)
    return tuple(Rule(*fields) for fields in found)


RULES = {
    "attention": _read("""
        stock: avx512, intel, half, native, forward
            | avx512-intel, forward bfloat16 native, 64 128 24: 0.53
        stock: avx512, intel, half, native, scores < 2K
            | avx512-intel, training float16 native, 1 64 2: 0.56
        cpp: half, training, queries < 16, keys >= 768 | avx2, training bfloat16, 4 512 12: 3.07
        cpp: half, training, scores >= 1536 | avx2, training, 1 thread float16, 64 128 2: 4.49
        stock: half, training | avx2, training float16, 16 16 2: 0.69
        cpp: half, queries < 16, keys >= 1280 | avx2-intel, forward bfloat16, 1 128 96: 2.40
        cpp: half, queries >= 16, scores >= 2K | avx2-intel, forward bfloat16, 128 16 96: 2.45
        stock: half | avx512-amd, forward bfloat16 native, 4 16 24: 0.72
        cpp: intel, scores >= 160K | avx512-intel, training float32 native, 512 512 96: 1.20
        stock: intel | avx512-intel, forward float32 native, 4 128 24: 0.64
        stock: forward, queries < 16, keys < 8K | avx2, forward float32 native, 1 128 12: 0.68
        stock: training, queries < 4, scores < 48K | avx2, training float32 native, 1 64 24: 0.61
        cpp: zen5, scores >= 5K | avx512-amd-zen5, forward float32 native, 32 512 24: 2.04
        cpp: avx2, threads, scores >= 10K | avx2, forward float32 native, 512 128 96: 1.35
        cpp: avx2, forward, scores >= 12K | avx2, forward, 1 thread float32 native, 64 128 24: 1.25
        cpp: scores >= 72K | avx512-amd, training float32 native, 128 512 24: 1.27
        stock: otherwise | avx2, forward, 1 thread float32 native, 32 16 2: 0.76
    """),
    "dropout": _read("""
        cpp: forward, elements >= 3K | avx512-amd-zen5, forward float32 native, 16384: 5.79
        cpp: training, elements >= 10K | avx512-intel, training float16 native, 131072: 3.41
        stock: otherwise | avx2, forward float32 native, 512: 0.56
    """),
    "encoder": _read("""
        stock: intel, rows >= 512 | avx512-intel, forward, 1 thread float32 native, 512 256: 0.91
        stock: rows >= 2K, width < 384 | avx2, forward float32 native, 2048 256: 0.93
        cpp: otherwise | avx2, forward, 1 thread float32 native, 8 768: 1.37
    """),
    "gelu": _read("""
        stock: avx2, float16 | avx2-intel, forward float16, 32768: 0.60
        stock: avx2, bfloat16, elements < 512K | avx2-intel, training bfloat16, 2048: 0.47
        stock: float16, elements < 12K | avx512-amd, forward float16, 2048: 0.47
        cpp: forward, elements >= 8K | avx512-amd, forward float16, 524288: 2.03
        cpp: training, elements >= 14K | avx512-amd, training bfloat16 native, 131072: 1.76
        stock: otherwise | avx512-amd-zen5, training float32 native, 512: 0.48
    """),
    "linear": _read("""
        stock: intel, float32, conv1d | avx2-intel, conv1d float32 native, 48 262144 64: 0.71
        stock: avx2, intel, float32, rows >= 8 | avx2-intel, linear float32 native, 8 65536 64: 0.85
        stock: avx512, intel, float32, rows < 4
            | avx512-intel, linear float32 native, 3 262144 64: 0.52
        stock: avx512, intel, float32, rows >= 16
            | avx512-intel, linear float32 native, 56 4194304 64: 0.83
        cpp: intel, float32, products >= 4M | avx2-intel, linear float32 native, 2 4194304 64: 1.47
        stock: intel, float32 | avx512-intel, linear float32 native, 8 16384 64: 0.67
        stock: float32, 1 thread, rows < 2 | avx2, linear, 1 thread float32 native, 1 16384 16: 0.82
        cpp: zen5, float32, products >= 64K
            | avx512-amd-zen5, conv1d, 1 thread float32 native, 16 131072 64: 1.82
        cpp: float32, threads, rows < 16, products >= 96K
            | avx2, linear float32 native, 2 1048576 16: 2.00
        cpp: avx2, float32, linear, threads, rows < 96, products >= 96K
            | avx2, linear float32 native, 56 65536 256: 1.53
        cpp: float32, 1 thread, rows < 32 | avx2, conv1d, 1 thread float32 native, 3 262144 64: 1.33
        stock: float32, outputs < 384 | avx2, linear float32 native, 2 16384 256: 0.83
        stock: float32, threads, rows >= 96, outputs < 1K
            | avx512-amd, linear float32 native, 256 1048576 16: 0.86
        stock: float32, threads, rows >= 1K, outputs < 3K
            | avx512-amd, linear float32 native, 1024 4194304 16: 0.92
        stock: avx2, float32, 1 thread, conv1d
            | avx2, conv1d, 1 thread float32 native, 56 262144 64: 0.93
        stock: avx2, float32, 1 thread, rows >= 96
            | avx2, linear, 1 thread float32 native, 96 4194304 64: 0.89
        cpp: float32 | avx2, linear float32 native, 256 4194304 64: 1.18
        stock: intel, native | avx512-intel, conv1d, 1 thread bfloat16 native, 256 1048576 64: 0.11
        cpp: native, rows < 8 | avx512-amd, conv1d, 1 thread bfloat16 native, 4 131072 64: 1.96
        cpp: native, rows < 192, products < 3M
            | avx512-amd-zen5, linear bfloat16 native, 56 4096 64: 1.87
        stock: native | avx512-amd, linear, 1 thread bfloat16 native, 96 131072 64: 0.52
        cpp: avx2, intel, bfloat16, conv1d | avx2-intel, conv1d bfloat16, 3 1048576 64: 32.83
        stock: avx2, bfloat16, conv1d, rows >= 8, products >= 2M
            | avx2, conv1d, 1 thread bfloat16, 128 65536 256: 0.63
        stock: linear, rows < 2 | avx2, linear, 1 thread bfloat16, 1 262144 64: 0.73
        stock: float16, linear, rows < 3 | avx2, linear, 1 thread float16, 2 1048576 256: 0.82
        cpp: otherwise | avx2, linear, 1 thread float16, 64 147456 64: 4.63
    """),
    "rms_norm": _read("""
        stock: avx512, intel, training, elements < 4K
            | avx512-intel, training float32 native, 2048: 0.91
        cpp: training, elements >= 1K | avx512-amd, training float16, 32768: 2.05
        stock: avx2, float16 | avx2-intel, forward float16, 8192: 0.53
        cpp: forward, elements >= 24K | avx512-amd, forward bfloat16 native, 32768: 1.80
        stock: otherwise | avx512-intel, forward bfloat16 native, 512: 0.74
    """),
}
_ANY_OTHER = Rule("stock", "another CPU or dtype", "none")


def aspect(n: int, k: int) -> int:
    """The form of a weight [N, K]: N for ``SQUARE`` of K; the longest are taken for one form."""
    return min(max(SQUARE * n // max(k, 1), 1), LONGEST)


def words_of(form: str, dtype: torch.dtype, kind: str, native: bool) -> frozenset[str]:
    """The words that hold for a call on a CPU of a kind (``_machine.cpu_kind``)."""
    way, alone = form.removesuffix(ALONE), form.endswith(ALONE)
    bits = ("float32",) if dtype is torch.float32 else ("half", str(dtype).removeprefix("torch."))
    words = (*kind.split("-"), *bits, way, "1 thread" if alone else "threads", "otherwise")
    return frozenset((*words, "native" if native else "emulated"))


def decide(op: str, call: CallClass) -> Rule:
    """The rule that decides on this machine."""
    form, dtype, sizes = call
    return first(_here(op, form, dtype), sizes_by_name(op, sizes))


@functools.lru_cache(maxsize=4096)  # layers ask
def slower(op: str, call: CallClass) -> str | None:
    """Why a call is PyTorch's; None if it is csrc/'s."""
    rule = decide(op, call)
    return None if rule.backend == "cpp" else str(rule)


def training(*tensors: torch.Tensor | None) -> str:
    """The form of a call: "training" if it can have a gradient, else "forward"."""
    grad = torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    return "training" if grad else "forward"


def first(rules: BoundedRules, sizes: dict[str, int]) -> Rule:
    """The first rule whose bounds hold. Every list ends with one for all calls."""
    return next(
        rule
        for rule, bounds in rules
        if all(holds(sizes[size], number) for size, holds, number in bounds)
    )


@functools.cache
def with_words(rules: tuple[Rule, ...], words: frozenset[str]) -> BoundedRules:
    """The rules whose words all hold."""
    return [
        (rule, [(size, _SIGNS[sign], number) for size, sign, number in rule.bounds.values()])
        for rule in rules
        if rule.words <= words
    ]


@functools.cache
def _here(op: str, form: str, dtype: torch.dtype) -> BoundedRules:
    words = words_of(form, dtype, _machine.cpu_kind(), _machine.computes_in(dtype))
    if not words & LEVELS or dtype not in _DTYPES:
        return [(_ANY_OTHER, [])]
    return with_words(RULES[op], words)


def sizes_by_name(op: str, sizes: tuple[int, ...]) -> dict[str, int]:
    """The sizes of a call by the names that rules use."""
    if op == "linear":
        rows, weight, aspect = sizes
        outputs = math.isqrt(weight * aspect // SQUARE)
        return {"rows": rows, "outputs": outputs, "products": rows * weight}
    if op == "attention":  # ``keys`` and ``scores`` of all heads of all samples
        queries, keys, heads = sizes[:3]
        return {"queries": queries, "keys": keys * heads, "scores": queries * keys * heads}
    if op == "encoder":
        return {"rows": sizes[0], "width": sizes[1]}
    return {"elements": sizes[0]}
