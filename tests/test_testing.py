"""The harness is tested too: it must fail on planted bugs and pass honest kernels."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fastplm import _machine
from fastplm.reference.attention import attention_ref
from fastplm.testing import (
    BudgetExceeded,
    ReversedReductions,
    ShuffledReductions,
    assert_repeatable,
    assert_within_budget,
    check_error,
    poisoned_memory,
)

QKV = ("query", "key", "value")
DTYPES = pytest.mark.parametrize(
    "dtype", (torch.float32, torch.float16, torch.bfloat16), ids=("fp32", "fp16", "bf16")
)


def make(dtype):
    return {name: torch.randn(2, 2, 33, 16).to(dtype) for name in QKV}


def planted(bug):
    """A copy of attention with one classic bug."""

    def attention(query, key, value):
        scale = query.shape[-1] ** -0.5
        length = query.shape[2]
        if bug == "wrong scale":
            scale = key.shape[2] ** -0.5
        if bug == "swapped strides":
            key = key.transpose(1, 2).reshape(key.shape)
        scores = query @ key.transpose(-1, -2) * scale
        diagonal = {"causal off by one": 1, "causal": 0}.get(bug, length)
        allowed = torch.ones(length, length, dtype=torch.bool).tril(diagonal)
        if bug == "last key dropped":
            allowed[:, -1] = False
        probs = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        if bug == "unnormalised":
            probs = scores.exp()
        if bug == "detached key":
            probs = (query @ key.detach().transpose(-1, -2) * scale).softmax(-1)
        if bug == "half accumulate":
            probs = probs.to(torch.bfloat16).to(query.dtype)
        return probs @ value

    return attention


@DTYPES
def test_an_honest_kernel_passes(dtype):
    def sdpa(query, key, value):
        return F.scaled_dot_product_attention(query, key, value)

    assert_within_budget(sdpa, attention_ref, make(dtype), wrt=QKV)


@DTYPES
@pytest.mark.parametrize(
    "bug", ("wrong scale", "swapped strides", "last key dropped", "unnormalised")
)
def test_planted_bugs_are_caught(bug, dtype):
    with pytest.raises(BudgetExceeded, match="output"):
        assert_within_budget(planted(bug), attention_ref, make(dtype), wrt=QKV)


@DTYPES
def test_a_gradient_that_lost_a_path_is_caught(dtype):
    def detached_value(query, key, value):
        return attention_ref(query, key, value) + 0 * value.sum() - (value - value.detach()) / 2

    with pytest.raises(BudgetExceeded, match="gradient of value"):
        assert_within_budget(detached_value, attention_ref, make(dtype), wrt=QKV)


def test_low_precision_inside_an_fp32_kernel_is_caught():
    with pytest.raises(BudgetExceeded, match="output: max"):
        assert_within_budget(planted("half accumulate"), attention_ref, make(torch.float32))


@DTYPES
@pytest.mark.parametrize("where", (*QKV, "output"))
def test_ten_roundings_in_the_same_direction_are_caught(where, dtype):
    """A small bias is caught, as PyTorch's own errors go in all directions."""
    off = 1 + 10 * torch.finfo(dtype).eps

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor * off if where == "output" else tensor.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad if where == "output" else grad * off

    def systematic(**inputs):
        if where in QKV:
            inputs[where] = Off.apply(inputs[where])
        out = F.scaled_dot_product_attention(**inputs)
        return Off.apply(out) if where == "output" else out

    with pytest.raises(BudgetExceeded, match=where):
        assert_within_budget(systematic, attention_ref, make(dtype), wrt=QKV)


def test_one_lucky_draw_of_pytorchs_is_not_the_budget():
    inputs = dict(input=torch.rand(100) + 1)

    def reference(lucky):
        """A function that is wrong by 1e-5 in fp32, except in some draws."""
        draws = itertools.count()

        def run(input):
            exact = input.dtype is torch.float64 or next(draws) < lucky
            return input if exact else input * (1 + 1e-5)

        return run

    def off(by):
        return lambda input: input * (1 + by)

    for lucky in range(8):
        assert_within_budget(off(1.5e-5), reference(lucky), inputs)
        with pytest.raises(BudgetExceeded, match="output"):
            assert_within_budget(off(4e-5), reference(lucky), inputs)
    with pytest.raises(BudgetExceeded, match="output"):
        assert_within_budget(off(1.5e-5), reference(8), inputs)


def test_unwritten_output_is_caught():
    def partly_written(input):
        out = torch.empty_like(input)
        out[:-1] = input[:-1] * 2
        return out

    with pytest.raises(BudgetExceeded, match="nan where the reference has 0"):
        assert_within_budget(partly_written, lambda input: input * 2, dict(input=torch.randn(5)))


def test_wrong_dtype_and_shape_are_caught():
    inputs = dict(input=torch.randn(5))
    with pytest.raises(BudgetExceeded, match="float64"):
        assert_within_budget(lambda input: input.double(), lambda input: input * 1, inputs)
    with pytest.raises(BudgetExceeded, match="instead of"):
        assert_within_budget(lambda input: input[:1], lambda input: input * 1, inputs)


def test_a_single_number_that_pytorch_has_right_by_luck_may_be_two_roundings_off():
    gold = torch.tensor(44.0, dtype=torch.float64)
    unit = 2.0**-18  # the last place of an fp32 number of this size
    check_error("x", (gold + 2 * unit).float(), gold, [gold.float()], 2.0)
    with pytest.raises(BudgetExceeded, match="max error"):
        check_error("x", (gold + 3 * unit).float(), gold, [gold.float()], 2.0)


def test_infinities_must_stand_in_the_same_places():
    gold = torch.tensor([1.0, float("inf")], dtype=torch.float64)
    base = (gold.float(),)
    check_error("x", gold.float(), gold, base, 2.0)
    with pytest.raises(BudgetExceeded, match="inf"):
        check_error("x", torch.tensor([float("inf"), 1.0]), gold, base, 2.0)


def test_a_gradient_that_is_0_but_for_fp64_may_be_rounded():
    def shifted(input, shift, by=0.0):
        nothing = sum(input.new_tensor(term) for term in (0.1, 0.2, -0.3))
        assert (nothing == 0) == (input.dtype is torch.float32)
        return input * 3 + shift * (nothing + by)

    inputs = dict(input=torch.randn(100), shift=torch.zeros(100))
    wrt = ("input", "shift")
    assert_within_budget(lambda **x: shifted(**x, by=1e-7), shifted, inputs, wrt=wrt)
    with pytest.raises(BudgetExceeded, match="gradient of shift"):
        assert_within_budget(lambda **x: shifted(**x, by=1e-5), shifted, inputs, wrt=wrt)


def test_the_error_of_a_peer_is_pytorchs_too():
    def off(by):
        return lambda input: input * (1 + by)

    inputs = dict(input=torch.rand(100) + 1)
    with pytest.raises(BudgetExceeded, match="output"):
        assert_within_budget(off(1e-5), off(0.0), inputs)
    assert_within_budget(off(1e-5), off(0.0), inputs, peers=[off(8e-6)])
    with pytest.raises(BudgetExceeded, match="output"):
        assert_within_budget(off(1e-4), off(0.0), inputs, peers=[off(8e-6)])


def test_atomics_like_noise_is_caught():
    noise = iter((0.0, 1e-7, 0.0))

    def noisy(input):
        return input + next(noise)

    with pytest.raises(AssertionError, match="differs between two runs"):
        assert_repeatable(noisy, dict(input=torch.ones(3)))


def test_what_depends_on_the_number_of_threads_is_not_repeatable():
    def by_threads(input):
        return input * torch.get_num_threads()

    before, inputs = torch.get_num_threads(), dict(input=torch.ones(3))
    assert_repeatable(by_threads, inputs)
    with pytest.raises(AssertionError, match="differs between two runs"):
        assert_repeatable(by_threads, inputs, threads=(before + 1,))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "mode", (ReversedReductions(), ShuffledReductions(0)), ids=("reversed", "shuffled")
)
def test_reordered_reductions_change_rounding_and_nothing_else(mode):
    a, b = torch.randn(8, 1000), torch.randn(1000, 8)
    with mode:
        product, total, soft = a @ b, a.sum(), a.softmax(-1)
    assert not torch.equal(product, a @ b)
    for got, expected in ((product, a.double() @ b.double()), (total, a.double().sum())):
        assert (got.double() - expected).abs().max() < 1e-3
    assert (soft - a.softmax(-1)).abs().max() <= torch.finfo(torch.float32).eps


def test_memory_is_poisoned_inside_only():
    with poisoned_memory():
        assert torch.empty(4).isnan().all() and torch.empty_like(torch.ones(2)).isnan().all()
        assert (torch.empty(4, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in _machine.X86, reason="levels of x86")
def test_one_level_is_one_machine():
    """At AVX2 neither PyTorch nor fastplm uses features that only CPUs with AVX-512 have."""
    program = """if True:
        import torch
        from fastplm import _machine
        from fastplm.testing import hold_to_level

        hold_to_level()
        assert _machine.level() in ("avx2", "none", "baseline"), _machine.level()
        for dtype in (torch.bfloat16, torch.float16):
            assert not _machine.computes_in(dtype), dtype
        oneDNN = torch.ops.mkldnn
        assert not oneDNN._is_mkldnn_bf16_supported() and not oneDNN._is_mkldnn_fp16_supported()
        # Which fails at AVX2 while oneDNN uses more ("pack_vnni2 is only supported when ...").
        rows = torch.randn(1, 2, 64, 64).bfloat16()
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)
    """
    held = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
    environment = {name: value for name, value in os.environ.items() if name not in held}
    environment |= {"ATEN_CPU_CAPABILITY": "avx2", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
