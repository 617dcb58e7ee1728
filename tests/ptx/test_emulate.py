"""The kernels as Triton compiles them for a GPU, run by the emulator, against the reference.

The output and all gradients must be within the error budget. Their bits must be the same in any
order of the warps, and however early or late asynchronous work is done.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.compile
slow = pytest.mark.slow

# arch, dtype, (B, H, Tq, Tk, D), options; (a length past 128 keys takes the streaming kernels).
ATTENTION = [
    (80, "float16", (1, 1, 65, 65, 64), "mask"),
    (80, "bfloat16", (1, 1, 40, 150, 64), "causal dropout"),
    (90, "bfloat16", (2, 1, 40, 70, 64), "mask causal"),
    (90, "float16", (2, 1, 70, 300, 64), "ragged"),
    (90, "bfloat16", (1, 1, 40, 144, 64), "dense"),
    (80, "tf32", (2, 1, 40, 70, 64), "mask causal"),
    pytest.param(90, "tf32", (2, 1, 40, 70, 64), "ragged dropout", marks=slow),
    pytest.param(90, "bfloat16", (1, 1, 70, 300, 64), "mask dropout bias", marks=slow),
    *(
        pytest.param(arch, dtype, (2, 1, 40, 70, 64), "mask causal", marks=slow)
        for arch in (86, 89, 120)
        for dtype in ("bfloat16", "tf32")
    ),
    *(
        pytest.param(arch, dtype, shape, options, marks=slow)
        for arch in (80, 90)
        for dtype in ("float16", "bfloat16", "float32", "tf32")
        for shape, options in (
            ((2, 2, 65, 65, 64), ""),
            ((2, 1, 40, 70, 32), "mask causal"),
            ((2, 1, 70, 40, 96), "causal dropout"),
            ((1, 1, 130, 300, 128), "mask"),
            ((2, 1, 40, 70, 64), "mask dropout bias"),
            ((3, 1, 63, 130, 80), "ragged causal dropout"),
            ((3, 1, 63, 63, 40), "ragged bias"),
            ((2, 1, 40, 70, 64), "dense mask causal dropout"),
            ((2, 2, 40, 160, 64), "dense bias"),
        )
    ),
]


@pytest.mark.parametrize(("arch", "dtype", "shape", "options"), ATTENTION)
def test_attention(emulate, request, arch, dtype, shape, options):
    seeds = range(4 if request.node.get_closest_marker("slow") else 2)
    emulate("attention", arch=arch, dtype=dtype, shape=shape, option=options, seeds=list(seeds))


def every(*small):
    """(arch, dtype) pairs: the small ones always run, all others in the slow lane."""
    pairs = [(a, d) for a in (80, 90) for d in ("float16", "bfloat16", "float32")]
    return [pair if pair in small else pytest.param(*pair, marks=slow) for pair in pairs]


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize(("arch", "dtype"), every((90, "bfloat16")))
def test_disentangled_attention(emulate, arch, dtype, packed):
    emulate("disentangled_attention", arch=arch, dtype=dtype, width=32, packed=packed)


WIDTHS = dict(gather_rows=40, maxsim=80, replaced_token_loss=72, embedding_layer_norm=40)


@pytest.mark.parametrize("op", WIDTHS)
@pytest.mark.parametrize(("arch", "dtype"), every((90, "bfloat16")))
def test_an_op_of_rows(emulate, op, arch, dtype):
    emulate(op, arch=arch, dtype=dtype, width=WIDTHS[op])


@pytest.mark.parametrize(("arch", "dtype"), every((80, "float32"), (90, "bfloat16")))
def test_rotary(emulate, arch, dtype):
    emulate("rotary", arch=arch, dtype=dtype, dim=40)


@pytest.mark.parametrize(("arch", "dtype"), every((80, "float32"), (90, "bfloat16")))
@pytest.mark.parametrize("approximate", ("none", "tanh"))
def test_bias_gelu(emulate, arch, dtype, approximate):
    emulate("bias_gelu", arch=arch, dtype=dtype, width=72, approximate=approximate)


@pytest.mark.parametrize(
    "case",
    (
        dict(width=256),
        dict(width=384, by_sample=True, is_rms=True),
        pytest.param(dict(width=40), marks=slow),
        pytest.param(dict(width=768, by_sample=True), marks=slow),
        pytest.param(dict(width=1024, rows=5, is_rms=True), marks=slow),
    ),
    ids=str,
)
@pytest.mark.parametrize(("arch", "dtype"), every((90, "bfloat16")))
def test_dropout_add_layer_norm(emulate, arch, dtype, case):
    launched = emulate("dropout_add_layer_norm", arch=arch, dtype=dtype, **case)
    assert len(launched) == 3  # forward, backward and the sums over groups of rows


@pytest.mark.parametrize(("arch", "dtype"), every((80, "float16"), (90, "bfloat16")))
def test_linear_cross_entropy(emulate, arch, dtype):
    """With narrow rows, the backward computes the logits again."""
    shape = (150, 150, 64)
    emulate("linear_cross_entropy", arch=arch, dtype=dtype, shape=shape, seeds=[0, 1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), every())
def test_linear_cross_entropy_of_wide_rows(emulate, arch, dtype):
    emulate("linear_cross_entropy", arch=arch, dtype=dtype, shape=(300, 200, 272), seeds=[0, 1, 2])


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype"), every())
def test_linear_cross_entropy_with_smoothing(emulate, arch, dtype):
    shape = (100, 150, 40)
    emulate("linear_cross_entropy", arch=arch, dtype=dtype, shape=shape, label_smoothing=0.1)


@pytest.mark.parametrize(("arch", "dtype"), every((90, "bfloat16")))
def test_kept_logits_of_the_vocabulary(emulate, arch, dtype):
    """Several warps share a row: none may write D over a logit that another has yet to read."""
    call = dict(arch=arch, dtype=dtype, shape=(70, 1000, 272), label_smoothing=0.1)
    launched = emulate("linear_cross_entropy", logits_budget=1 << 28, **call)
    assert "_linear_cross_entropy_rows_kernel" in launched


DIVERGENCES = ("js", pytest.param("forward_kl", marks=slow), pytest.param("reverse_kl", marks=slow))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("arch", "dtype"), every((90, "bfloat16")))
def test_distillation(emulate, arch, dtype, divergence):
    call = dict(arch=arch, dtype=dtype, shape=(20, 90, 40), divergence=divergence)
    emulate("linear_distillation", teacher_width=72, **call)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize(("arch", "dtype"), every((80, "float16")))
def test_kept_logits_of_distillation(emulate, arch, dtype, divergence):
    call = dict(arch=arch, dtype=dtype, shape=(20, 1000, 40), divergence=divergence)
    emulate("linear_distillation", teacher_width=72, logits_budget=1 << 28, **call)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_nan_of_a_teacher(emulate, divergence):
    shape = dict(arch=90, dtype="bfloat16", shape=(20, 90, 40), teacher_width=72)
    emulate("nan_of_a_teacher", divergence=divergence, **shape)


@pytest.mark.parametrize("budget", (pytest.param(0, marks=slow), 1 << 28))
@pytest.mark.parametrize(("arch", "dtype"), every((90, "bfloat16")))
def test_distillation_from_given_words(emulate, arch, dtype, budget):
    """There are more words than a tile holds; logits are computed again, or kept."""
    call = dict(arch=arch, dtype=dtype, shape=(20, 90, 40), words=37, logits_budget=budget)
    launched = emulate("linear_distillation_topk", **call)
    kernels = {f"_linear_distillation_{name}_kernel" for name in ("given", "given_dz")}
    assert kernels <= set(launched)


@pytest.mark.slow
@pytest.mark.parametrize("arch", (80, 90))
def test_distillation_from_given_words_as_they_are(emulate, arch):
    call = dict(arch=arch, dtype="float16", shape=(150, 200, 272), words=8)
    emulate("linear_distillation_topk", renormalize=False, **call)


@pytest.mark.parametrize(("arch", "dtype"), every((90, "float32")))
def test_sampling(emulate, arch, dtype):
    emulate("sample", arch=arch, dtype=dtype, shape=(40, 150, 64))


# --- faults ---------------------------------------------------------------------------------------

FORWARD = "_attention_stream_fwd_kernel"


@pytest.mark.parametrize("arch", (80, 90))
@pytest.mark.parametrize("fault", ("copies waited for too little", "no barrier"))
def test_a_fault_in_the_machine_text_is_seen(emulate, arch, fault):
    call = dict(check="attention", dtype="bfloat16", shape=(1, 1, 70, 300, 64), kernel=FORWARD)
    found = emulate("faulty", arch=arch, fault=fault, seeds=[0], **call)
    assert found == "numbers" or "with no barrier in between" in found
    if fault == "no barrier":
        assert emulate("faulty", arch=arch, fault=fault, seeds=[1], **call) == "numbers"


def test_a_product_that_is_not_waited_for_or_not_fenced_is_seen(emulate):
    arguments = dict(arch=90, dtype="bfloat16", shape=(1, 1, 70, 300, 64), kernel=FORWARD)
    faults = ("products not waited for", "no fence before products")
    for fault in (*faults, "a fragment overwritten too early"):
        assert emulate("faulty", check="attention", fault=fault, **arguments) == "numbers"
    assert emulate("faulty", check="attention", fault="another comment", **arguments) == "passes"


@pytest.mark.parametrize("place", range(4))
def test_registers_of_a_product_that_are_not_fenced_are_named(emulate, place):
    """The waits for the products of scores and output, for whole tiles and for the last one."""
    arguments = dict(arch=90, dtype="bfloat16", shape=(1, 1, 70, 300, 64), kernel=FORWARD)
    fault = "one fence of registers less"
    found = emulate("faulty", check="attention", fault=fault, place=place, **arguments)
    assert "wgmma.mma_async" in found and "with no wgmma.fence" in found


def test_a_copy_that_overwrites_what_a_product_still_reads_is_seen(emulate):
    """One load feeds a product and a sum. The result is right if the product reads at once, and
    wrong if it reads when it is waited for. On sm_80 products are not asynchronous."""
    orders = [(copies, products) for copies in ("early", "late") for products in ("early", "late")]
    at_90 = dict(zip(orders, planted(emulate, 90, "product_and_sum", orders), strict=True))
    exact = at_90["early", "early"]
    assert exact == at_90["late", "early"] < 1e-3 < at_90["early", "late"]
    assert planted(emulate, 80, "product_and_sum", orders) == [exact] * 4


def planted(emulate, arch: int, name: str, schedules) -> list:
    return emulate("planted_kernel", arch=arch, name=name, schedules=schedules)


def test_what_a_launch_leaves_unwritten_is_no_number(emulate):
    """Memory that a launch leaves unwritten is NaN, even if it held the right numbers before."""
    for name in ("write_too_little", "write_too_few_integers"):
        assert planted(emulate, 90, name, [("", "")]) == [1]


def test_partial_sums_of_gather_rows_need_the_order_of_its_atomic(emulate):
    arguments = dict(check="gather_rows", dtype="bfloat16", width=40, seeds=[0])
    arguments |= dict(arch=90, kernel="_gather_rows_bwd_kernel")
    assert emulate("faulty", fault="a relaxed atomic", **arguments) == "numbers"


@pytest.mark.parametrize("arch", (80, 90))
def test_an_access_beyond_the_tensors_is_named(emulate, arch):
    default = [("", "")]
    assert planted(emulate, arch, "copy", default) == [0]
    (read,) = planted(emulate, arch, "read_past_the_end", default)
    assert "_copy_kernel, line" in read and "ld.global" in read
    assert "the nearest tensor is x_ptr, 1200 bytes" in read and "+1200 from its start" in read
    (written,) = planted(emulate, arch, "write_past_the_end", default)
    assert "st.global" in written and "the nearest tensor is out_ptr, 1200 bytes" in written


@pytest.mark.slow
@pytest.mark.parametrize("arch", (80, 90))
def test_every_instruction_of_every_kernel_is_known(emulate, arch):
    assert emulate("every_instruction", arch=arch) > 10_000
