"""Functions that tests run in the emulator's process; a line of JSON asks for one of them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
import triton

import planted

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from fastplm import ops  # noqa: E402
from fastplm.reference.attention import attention_ref, attention_varlen_ref  # noqa: E402
from fastplm.reference.bias_gelu import bias_gelu_ref  # noqa: E402
from fastplm.reference.disentangled_attention import disentangled_attention_ref  # noqa: E402
from fastplm.reference.dropout_add_layer_norm import dropout_add_layer_norm_ref  # noqa: E402
from fastplm.reference.embedding_layer_norm import embedding_layer_norm_ref  # noqa: E402
from fastplm.reference.gather_rows import gather_rows_ref  # noqa: E402
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref, sample_ref  # noqa: E402
from fastplm.reference.linear_distillation import (  # noqa: E402
    linear_distillation_ref,
    linear_distillation_topk_ref,
)
from fastplm.reference.maxsim import maxsim_ref  # noqa: E402
from fastplm.reference.replaced_token_loss import replaced_token_loss_ref  # noqa: E402
from fastplm.reference.rotary import rotary_ref  # noqa: E402
from fastplm.testing import BudgetExceeded, ProductsInTF32, assert_within_budget  # noqa: E402
from ptx.emulate import emulated  # noqa: E402
from ptx.machine import Schedule  # noqa: E402
from ptx.parse import PtxError  # noqa: E402

QKV = ("query", "key", "value")
ADDED = ("input", "residual", "weight", "bias", "linear_bias")
# Triton 3.6 puts no fence between copies and the products that read them; 3.7.1 does, since its
# pull request 10537. With None the seed decides.
FENCED = False if triton.__version__.startswith("3.6") else None


#: Faults that are planted in kernels while a check runs.
edits: dict = {}


def hold(arch, function, reference, inputs, wrt, seeds, schedule=None, peers=()) -> list[str]:
    """Output and gradients are within the error budget, with the same bits by every schedule."""
    results = []
    for seed in seeds:
        leaves = {name: inputs[name].detach().clone().requires_grad_() for name in wrt}
        chosen = schedule or Schedule(seed, fenced=FENCED)
        with emulated(arch, schedule=chosen, edits=edits) as launches:
            if not results:
                assert_within_budget(function, reference, inputs, wrt=wrt, peers=peers)
            out = function(**(inputs | leaves))
            torch.manual_seed(0)
            grads = torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out))
        results.append((out, *grads))
        assert out.any(), "zeros alone prove nothing"
        for name, first, now in zip(("output", *wrt), results[0], results[-1], strict=True):
            assert torch.equal(first, now), f"schedule {seed}: other bits in {name}"
    return sorted({launch.kernel.__name__ for launch in launches})


def drawn(dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(getattr(torch, dtype))


def attention_inputs(dtype, batch, heads, seqlen_q, seqlen_k, width, option) -> dict:
    torch.manual_seed(seqlen_q + seqlen_k)
    inputs = dict(
        query=drawn(dtype, batch, heads, seqlen_q, width),
        key=drawn(dtype, batch, heads, seqlen_k, width),
        value=drawn(dtype, batch, heads, seqlen_k, width),
    )
    if "dense" in option:
        inputs["attn_mask"] = torch.rand(batch, 1, seqlen_q, seqlen_k) < 0.7
        inputs["attn_mask"][..., 3, :] = False  # a query without a key
    if "mask" in option:
        mask = torch.rand(batch, seqlen_k) < 0.7
        if batch > 1:
            mask[0] = False  # a sequence without a key
        inputs["key_mask"] = mask
    if "causal" in option:
        inputs["is_causal"] = True
    if "dropout" in option:
        inputs |= dict(dropout_p=0.2, seed=7)
    if "bias" in option:
        inputs["table"] = drawn(dtype, 32, heads)
    if "ragged" in option:
        inputs = {n: t.transpose(1, 2).flatten(0, 1) if n in QKV else t for n, t in inputs.items()}
        for side, length in (("q", seqlen_q), ("k", seqlen_k)):
            ends = [0, length // 2, length // 2, *range(length, batch * length, length)]
            inputs[f"cu_seqlens_{side}"] = torch.tensor(ends, dtype=torch.int32)
            inputs[f"max_seqlen_{side}"] = length
        if "key_mask" in inputs:
            inputs["key_mask"] = inputs["key_mask"].flatten()
    return inputs


def with_table(function):
    def call(table=None, **inputs):
        if table is not None:
            inputs["relative_bias"] = ops.T5RelativeBias(table)
        return function(**inputs)

    return call


@contextlib.contextmanager
def allowed_tf32():
    """PyTorch may multiply fp32 matrices of a GPU in TF32."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


def attention(arch, dtype, shape, option="", seeds=(0, 1), schedule=None) -> list[str]:
    """The ``dtype`` "tf32" is fp32 where PyTorch allows TF32: its error is within that of products
    in TF32, and above that of products in fp32."""
    in_tf32 = dtype == "tf32"
    inputs = attention_inputs("float32" if in_tf32 else dtype, *shape, option)
    ragged = "ragged" in option
    function = ops.attention_varlen if ragged else ops.attention
    reference = with_table(attention_varlen_ref if ragged else attention_ref)
    function = with_table(function)
    wrt = [name for name in (*QKV, "table") if name in inputs]
    if not in_tf32:
        return hold(arch, function, reference, inputs, wrt, seeds, schedule)

    def peer(**inputs):
        with ProductsInTF32():
            return reference(**inputs)

    with allowed_tf32():
        with emulated(arch), pytest.raises(BudgetExceeded, match="output"):
            assert_within_budget(function, reference, inputs)
        return hold(arch, function, reference, inputs, wrt, seeds, schedule, [peer])


def disentangled_attention(arch, dtype, width, packed, seeds=(0, 1)) -> list[str]:
    """Three sequences, and programs that take tiles of several."""
    batch, heads, length = 3, 2, 40
    torch.manual_seed(width)
    inputs = {name: drawn(dtype, batch, heads, length, width) for name in QKV}
    inputs |= {name: drawn(dtype, 16, heads, width) for name in ("pos_key", "pos_query")}
    inputs |= dict(max_distance=24, dropout_p=0.2, seed=7)
    if packed:
        inputs |= {name: inputs[name].transpose(1, 2).flatten(0, 1)[:70] for name in QKV}
        ends = torch.tensor([0, 40, 45, 70], dtype=torch.int32)
        inputs |= dict(cu_seqlens=ends, max_seqlen=length)
    else:
        inputs["key_mask"] = torch.rand(batch, length) < 0.7
    functions = ops.disentangled_attention, disentangled_attention_ref
    return hold(arch, *functions, inputs, [*QKV, "pos_key", "pos_query"], seeds)


def gather_rows(arch, dtype, width, seeds=(0, 1)) -> list[str]:
    torch.manual_seed(0)
    positions = torch.randint(-1, 150, (600,))
    positions[:3] = 3
    positions[100:110] = 5  # a long row; the next one is split in two chunks
    positions[300:580:2] = 149
    inputs = dict(input=drawn(dtype, 150, width), positions=positions)
    return hold(arch, ops.gather_rows, gather_rows_ref, inputs, ["input"], seeds)


def maxsim(arch, dtype, width, seeds=(0, 1)) -> list[str]:
    """Sets of several tiles, of one tile, and empty sets; spare rows."""
    torch.manual_seed(0)
    sizes_q, sizes_k = torch.tensor([150, 3, 0]), torch.tensor([70, 140, 2])
    inputs = dict(
        query=drawn(dtype, 155, width),
        key=drawn(dtype, 212, width),
        cu_seqlens_q=torch.nn.functional.pad(sizes_q.cumsum(0), (1, 0)).int(),
        cu_seqlens_k=torch.nn.functional.pad(sizes_k.cumsum(0), (1, 0)).int(),
        max_seqlen_q=150,
        max_seqlen_k=140,
    )

    def scores(function):
        def call(**inputs):
            match = function(**inputs)
            return torch.cat([match.query_score, match.key_score])

        return call

    return hold(arch, scores(ops.maxsim), scores(maxsim_ref), inputs, ["query", "key"], seeds)


def replaced_token_loss(arch, dtype, width, rows=70, seeds=(0, 1)) -> list[str]:
    torch.manual_seed(0)
    inputs = dict(
        input=drawn(dtype, rows, width),
        weight=drawn(dtype, width) / width**0.5,
        bias=drawn(dtype, 1)[0],
        replaced=torch.rand(rows) < 0.2,
        mask=torch.rand(rows) < 0.8,
    )
    wrt = ["input", "weight", "bias"]
    return hold(arch, ops.replaced_token_loss, replaced_token_loss_ref, inputs, wrt, seeds)


def embedding_layer_norm(arch, dtype, width, rows=70, seeds=(0, 1)) -> list[str]:
    torch.manual_seed(0)
    ids = torch.randint(0, 9, (rows,))
    inputs = dict(
        input_ids=ids,
        word_weight=torch.randn(9, width),
        position_ids=ids,
        position_weight=torch.randn(9, width),
        token_type_ids=ids % 2,
        token_type_weight=torch.randn(2, width),
        weight=1 + torch.randn(width) / 4,
        bias=torch.randn(width),
    )
    options = dict(dropout_p=0.3, seed=torch.tensor(5), dtype=getattr(torch, dtype))
    function = functools.partial(ops.embedding_layer_norm, **options)
    reference = functools.partial(embedding_layer_norm_ref, **options)
    return hold(arch, function, reference, inputs, [n for n in inputs if "ids" not in n], seeds)


def bias_gelu(arch, dtype, width, approximate="none", rows=70, seeds=(0, 1)) -> list[str]:
    inputs = dict(input=drawn(dtype, rows, width), bias=drawn("float32", width))
    function = functools.partial(ops.bias_gelu, approximate=approximate)
    reference = functools.partial(bias_gelu_ref, approximate=approximate)
    return hold(arch, function, reference, inputs, ["input", "bias"], seeds)


def rotary(arch, dtype, dim, heads=(5, 2), length=70, seeds=(0, 1)) -> list[str]:
    """Both results are read; the second half of the angles repeats the first."""
    angles = torch.randn(1, length, dim // 2).repeat(1, 1, 2)
    names = dict(zip(("query", "key"), heads, strict=True))
    inputs = {name: drawn(dtype, 2, one, length, dim) for name, one in names.items()}
    inputs |= dict(cos=angles.cos(), sin=angles.sin())
    functions = [lambda f=f, **given: torch.cat(f(**given), 1) for f in (ops.rotary, rotary_ref)]
    return hold(arch, *functions, inputs, [*names], seeds)


def dropout_add_layer_norm(
    arch, dtype, width, rows=37, by_sample=False, is_rms=False, seeds=(0, 1)
) -> list[str]:
    """Both results are read, so that the sum has a gradient, too."""
    torch.manual_seed(0)
    inputs = dict(input=drawn(dtype, rows, width), residual=drawn(dtype, rows, width))
    inputs |= dict(weight=torch.randn(width), dropout_p=0.3, seed=torch.tensor(-7))
    if not is_rms:
        inputs |= dict(bias=torch.randn(width), linear_bias=torch.randn(width))
    if by_sample:
        numbers = torch.arange(rows)
        inputs |= dict(sample_index=numbers // 3 << 33, position=numbers % 3)
    wrt = [name for name in ADDED if name in inputs]
    function = ops.dropout_add_rms_norm if is_rms else ops.dropout_add_layer_norm

    def both(**inputs):
        return torch.cat(function(**inputs, eps=1e-6, return_sum=True))

    def reference(**inputs):
        return torch.cat(dropout_add_layer_norm_ref(**inputs, eps=1e-6, is_rms=is_rms))

    return hold(arch, both, reference, inputs, wrt, seeds)


def linear_cross_entropy(
    arch, dtype, shape, label_smoothing=0.0, seeds=(0, 1), logits_budget=0
) -> list[str]:
    inputs = loss_inputs(dtype, *shape) | dict(label_smoothing=label_smoothing)
    wrt = ["input", "linear_weight", "linear_bias"]
    function = functools.partial(ops.linear_cross_entropy, logits_budget=logits_budget)
    return hold(arch, function, linear_cross_entropy_ref, inputs, wrt, seeds)


def linear_distillation(
    arch, dtype, shape, teacher_width, divergence, seeds=(0, 1), logits_budget=0
) -> list[str]:
    inputs = taught_inputs(dtype, shape, teacher_width, divergence)
    wrt = ["input", "linear_weight", "linear_bias"]

    def loss(**inputs):
        return ops.linear_distillation(**inputs, logits_budget=logits_budget).loss

    def reference(**inputs):
        return linear_distillation_ref(**inputs).loss

    return hold(arch, loss, reference, inputs, wrt, seeds)


def nan_of_a_teacher(arch, dtype, shape, teacher_width, divergence) -> None:
    """It is NaN in the gradient of its row, and of no other. The interpreter does not show this:
    there the maximum of NaN and a number is NaN."""
    inputs = taught_inputs(dtype, shape, teacher_width, divergence)
    inputs["teacher_input"][3] = float("nan")
    inputs["input"].requires_grad_()
    with emulated(arch, schedule=Schedule(0, fenced=FENCED), edits=edits):
        loss = ops.linear_distillation(**inputs, reduction="none", logits_budget=0).loss
        (grad,) = torch.autograd.grad(loss, inputs["input"], torch.ones_like(loss))
    for found in (loss.isnan(), grad.isnan().all(1), grad.isnan().any(1)):
        assert found.nonzero().flatten().tolist() == [3]


def taught_inputs(dtype, shape, teacher_width, divergence) -> dict:
    rows, vocab, _ = shape
    return loss_inputs(dtype, *shape) | dict(
        teacher_input=drawn(dtype, rows, teacher_width),
        teacher_weight=drawn(dtype, vocab, teacher_width) / teacher_width**0.5,
        teacher_bias=drawn(dtype, vocab),
        temperature=2.0,
        divergence=divergence,
        cross_entropy_weight=0.5,
    )


def linear_distillation_topk(
    arch, dtype, shape, words, renormalize=True, seeds=(0, 1), logits_budget=0
) -> list[str]:
    """Rows with many words, few words and none; a place with probability 0 may have any index."""
    rows, vocab, _ = shape
    inputs = loss_inputs(dtype, *shape)
    indices = torch.stack([torch.randperm(vocab)[:words] for _ in range(rows)])
    probabilities = torch.rand(rows, words)
    for row, few in ((0, 0), (1, 1), (2, words - 1)):
        probabilities[row, few:] = 0.0
        indices[row, few:] = 1 << 40
    probabilities /= 1.1 * probabilities.sum(1, keepdim=True).clamp(min=1e-9)
    inputs |= dict(
        teacher_indices=indices,
        teacher_probabilities=probabilities,
        temperature=2.0,
        renormalize=renormalize,
        cross_entropy_weight=0.5,
    )

    def loss(**inputs):
        return ops.linear_distillation_topk(**inputs, logits_budget=logits_budget).loss

    def reference(**inputs):
        return linear_distillation_topk_ref(**inputs).loss

    wrt = ["input", "linear_weight", "linear_bias"]
    return hold(arch, loss, reference, inputs, wrt, seeds)


def loss_inputs(dtype, rows, vocab, width) -> dict:
    torch.manual_seed(0)
    target = torch.randint(0, vocab, (rows,))
    target[::7] = -100
    return dict(
        input=drawn(dtype, rows, width),
        linear_weight=drawn(dtype, vocab, width) / width**0.5,
        linear_bias=drawn(dtype, vocab),
        target=target,
    )


def sample(arch, dtype, shape, seeds=(0, 1)) -> list[str]:
    """The samples are the reference's; the loss is that of a call without samples."""
    inputs = loss_inputs(dtype, *shape)
    call = dict(temperature=0.9, seed=11)
    # The reference rounds its logits to 16 bits; the kernel does not.
    exact = {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
    drawn_there = sample_ref(**exact, **call)
    wrt = ["input", "linear_weight", "linear_bias"]

    def loss(**inputs):
        value, found = ops.linear_cross_entropy_with_sample(**inputs, **call)
        counts = inputs["target"] != -100
        assert torch.equal(found[counts], drawn_there[counts])
        return value

    return hold(arch, loss, linear_cross_entropy_ref, inputs, wrt, seeds)


# --- faults that must be seen ---------------------------------------------------------------------

#: Changes of the PTX: the pattern, its replacement, and the number of the place (-1 for all).
EDITS = {
    "copies waited for too little": (r"cp\.async\.wait_group\s+(\d+)", lambda m: later(m), -1),
    "products not waited for": (r"wgmma\.wait_group\S*\s+(\d+)", lambda m: later(m), -1),
    "no barrier": (r"bar\.sync\s+0\s*;", lambda m: "", -1),
    "one barrier less": (r"bar\.sync\s+0\s*;", lambda m: "", 0),
    "no fence before products": (r"fence\.proxy\.async\S*;", lambda m: "", -1),
    "no fence of registers": (r"wgmma\.fence\S*;", lambda m: "", -1),
    "one fence of registers less": (r"wgmma\.fence\S*;", lambda m: "", 0),
    "a fragment overwritten too early": (
        r"(?s)(wgmma\.mma_async\S* \{[^}]*\}, \{(%r\d+),.*?wgmma\.commit_group\S*;)",
        lambda m: f"{m[1]} mov.b32 {m[2]}, 0;",
        0,
    ),
    "a relaxed atomic": (r"(atom\.global\.gpu\.)acq_rel", lambda m: f"{m[1]}relaxed", -1),
    "another comment": (r"// begin inline asm", lambda m: "// asm", -1),
}


def later(match: re.Match) -> str:
    return match[0][: match.start(1) - match.start()] + str(int(match[1]) + 1)


def faulty(check, kernel, fault, place=None, **arguments) -> str:
    """The outcome of a check with the fault in the kernel's PTX: "passes", "numbers" or an error's
    text."""
    pattern, change, which = EDITS[fault]
    which = which if place is None else place

    def edit(text: str) -> str:
        places = list(re.finditer(pattern, text))
        assert places, f"no {pattern} in {kernel}"
        for match in reversed(places if which < 0 else places[which : which + 1]):
            text = text[: match.start()] + change(match) + text[match.end() :]
        return text

    edit.__name__ = f"{fault} {which}"
    edits[kernel] = edit
    try:
        launched = globals()[check](**arguments)
    except (BudgetExceeded, AssertionError):
        return "numbers"
    except PtxError as error:
        return str(error)
    finally:
        edits.clear()
    assert kernel in launched, f"{kernel} was not launched but {launched}"
    return "passes"


def planted_kernel(arch, name, schedules) -> list:
    """For each schedule, the error of a planted kernel, or the message about an access."""
    found = []
    for copies, products in schedules:
        schedule = Schedule(5, copies, products, fenced=False)
        try:
            with emulated(arch, schedule=schedule):
                found.append(getattr(planted, name)())
        except PtxError as error:
            found.append(str(error))
    return found


#: Kernels whose scratch memory depends on the order of atomics, although their results do not.
IN_ANY_ORDER = ("_gather_rows_count_kernel",)


def bits_of(launch) -> list[torch.Tensor]:
    """Copies of all memory of a launch."""
    tensors = [t for t in launch.arguments.values() if isinstance(t, torch.Tensor)]
    return [torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).clone() for t in tensors]


def set_bits(launch, copies: list[torch.Tensor]) -> None:
    tensors = [t for t in launch.arguments.values() if isinstance(t, torch.Tensor)]
    for tensor, copy in zip(tensors, copies, strict=True):
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).copy_(copy)


def removed_barriers(check, calls=({},), seeds=range(8), **arguments) -> dict[str, list]:
    """By kernel, for each of its barriers, the first seed by which a launch without the barrier is
    an error or gives other memory; None if no launch of any call does.

    The program of a kernel is the one launched first; all calls should launch it.
    """
    import ptx.emulate as emulator

    run_launch, found, programs = emulator.run_launch, {}, {}

    def outcome(launch, arch, before, right, seed) -> str:
        set_bits(launch, before)
        try:
            run_launch(launch, arch, Schedule(seed, fenced=FENCED))
        except PtxError as error:
            return str(error)
        return "" if all(map(torch.equal, bits_of(launch), right)) else "other memory"

    def run(launch, arch, schedule, edit):
        before = bits_of(launch)
        run_launch(launch, arch, schedule)
        right = bits_of(launch)
        program, _ = emulator.compile_program(launch, arch)
        name = program.kernel.name
        if "gather_rows" in name and check != "gather_rows":
            return
        if programs.setdefault(name, program) is not program or name in launched:
            return
        launched.add(name)
        same = {outcome(launch, arch, before, right, seed) for seed in (1, 2)}
        assert same == {""} or name in IN_ANY_ORDER, same
        places = found.setdefault(name, [None] * len(program.barriers))
        for index, barrier in enumerate(program.barriers):
            with program.without(barrier):
                for seed in seeds if places[index] is None else ():
                    if outcome(launch, arch, before, right, seed) not in same:
                        places[index] = seed
                        break
        set_bits(launch, right)

    emulator.run_launch = run
    try:
        for call in calls:
            launched: set[str] = set()
            globals()[check](seeds=[0], **call, **arguments)
    finally:
        emulator.run_launch = run_launch
    return {name: places for name, places in found.items() if places}


def every_instruction(arch, slow=False) -> int:
    """Bind every kernel of every compile case. Returns the number of instructions."""
    import importlib

    from compile_kernels import kernel_modules, source_of
    from fastplm.triton_kernels._launch import record_launches
    from ptx.emulate import compile_program

    count, programs = 0, set()
    for name in kernel_modules():
        module = importlib.import_module(f"fastplm.triton_kernels.{name}")
        for label, case in module.compile_cases():
            if label.startswith("slow: ") and not slow:
                continue
            with record_launches(arch) as launches:
                case()
            for launch in launches:
                key = source_of(launch)[2]
                if key not in programs:
                    programs.add(key)
                    program, _ = compile_program(launch, arch)
                    program.bind(1, 1)
                    count += len(program.kernel.code)
    return count


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        answer = [None, None]
        try:
            answer[0] = globals()[name](**arguments)
        except BaseException:
            answer[1] = traceback.format_exc()
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
