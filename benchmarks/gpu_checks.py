"""Whether the kernels are right on this machine: a small call of each kernel, dtype and branch.

Each call is compared with its eager reference: outputs and gradients by the error budget of
``fastplm.testing``, ids bit by bit. ``gpu_report.py`` makes the calls in the dtype that it times,
and a wrong op has no speed on its page; ``compile_cache.py`` compiles what all of them launch. The
whole GPU suite is ``make test-device``.

Without a GPU, TRITON_INTERPRET=1 runs the Triton kernels on tiny inputs of one dtype, and csrc/
runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fastplm
from fastplm import ops
from fastplm.reference.attention import attention_ref, attention_varlen_ref
from fastplm.reference.bart_noise import bart_noise_ref
from fastplm.reference.bias_gelu import bias_gelu_ref
from fastplm.reference.corrupt_spans import corrupt_spans_ref
from fastplm.reference.disentangled_attention import disentangled_attention_ref
from fastplm.reference.dropout_add_layer_norm import dropout_add_layer_norm_ref
from fastplm.reference.embedding_layer_norm import embedding_layer_norm_ref
from fastplm.reference.gather_rows import gather_rows_ref
from fastplm.reference.geglu import geglu_ref
from fastplm.reference.linear_cross_entropy import linear_cross_entropy_ref, sample_ref
from fastplm.reference.linear_distillation import (
    linear_distillation_ref,
    linear_distillation_topk_ref,
)
from fastplm.reference.mask_tokens import mask_tokens_ref
from fastplm.reference.maxsim import maxsim_ref
from fastplm.reference.replaced_token_loss import replaced_token_loss_ref
from fastplm.reference.rotary import rotary_ref
from fastplm.testing import assert_within_budget

Inputs = dict[str, Any]
ROOM = 1 << 40  # bytes that kept logits may take
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Where:
    """The device of the calls, and how large they are."""

    device: torch.device
    dtype: torch.dtype

    @property
    def small(self) -> bool:
        return self.device.type == "cpu"

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, device=self.device)

    def flags(self, share: float, *shape: int) -> Tensor:
        """Random flags; the first flag of each row is set."""
        made = torch.rand(shape, device=self.device) < share
        made[..., 0] = True
        return made

    def whole(self, *numbers: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Check:
    """One call: ``fused(**make(where))`` against ``eager`` on the same inputs.

    Args:
        op: the op whose kernels run.
        branch: what is particular about the call.
        backend: the backend that has the kernels on a GPU.
        wrt: the inputs whose gradients are compared; none: the results must be equal.
    """

    op: str
    branch: str
    backend: str
    make: Callable[[Where], Inputs]
    fused: Callable[..., Any]
    eager: Callable[..., Any]
    wrt: tuple[str, ...] = ()

    def run(self, where: Where) -> None:
        """Raise AssertionError, or the call's own error, unless it is right."""
        torch.manual_seed(0)
        inputs = self.make(where)
        backend = "cpp" if where.small and self.backend == "cuda" else self.backend

        def fused(**inputs: Any) -> Any:
            with fastplm.use_backend(backend):
                return self.fused(**inputs)

        if self.wrt:
            assert_within_budget(fused, self.eager, inputs, wrt=self.wrt)
            return
        for name, got, wanted in zip(
            *(range(9), _tuple(fused(**inputs)), _tuple(self.eager(**inputs))), strict=False
        ):
            assert torch.equal(got, wanted), f"result {name} differs from the reference"


def _tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


# --- attention ------------------------------------------------------------------------------------

QKV = ("query", "key", "value")


def attention(longest: int, queries: int | None = None, **options: Any) -> Check:
    """A dense call. Its lengths decide the kernels: "row" and "tile" up to 128, then "stream"."""
    bias, masked = options.pop("bias", False), options.pop("attn_mask", False)
    key_mask = options.pop("key_mask", False)

    def make(where: Where) -> Inputs:
        length = min(longest, 40) if where.small else longest
        heads, dim, first = 2, 16 if where.small else 64, min(queries or length, length)
        # Views of a projection's output, as a model passes them.
        made: Inputs = {
            name: where.draw(2, first if name == "query" else length, heads, dim).transpose(1, 2)
            for name in QKV
        }
        if key_mask:
            made["key_mask"] = where.flags(0.7, 2, length)
        if masked:
            made["attn_mask"] = where.flags(0.7, 2, 1, first, length)
        if bias:
            made["weight"] = where.draw(32, heads)
        return made

    wrt = (*QKV, "weight") if bias else QKV
    fused, eager = _attend(ops.attention, options), _attend(attention_ref, options)
    said = [name for name, given in options.items() if given and name != "seed"]
    said += [
        n for n, given in dict(bias=bias, attn_mask=masked, key_mask=key_mask).items() if given
    ]
    branch = f"T={queries or longest}x{longest} {' '.join(said)}".rstrip()
    return Check("attention", branch, "triton", make, fused, eager, wrt)


def ragged(longest: int, **options: Any) -> Check:
    bias = options.pop("bias", False)

    def make(where: Where) -> Inputs:
        length = min(longest, 40) if where.small else longest
        heads, dim = 2, 16 if where.small else 64
        ends = where.whole(0, length, length, length + length // 3, dtype=torch.int32)
        rows = length + length // 3 + 2  # two of these are spare
        made: Inputs = {name: where.draw(rows, heads, dim) for name in QKV}
        for name in "qk":
            made |= {f"cu_seqlens_{name}": ends, f"max_seqlen_{name}": length}
        if bias:
            made["weight"] = where.draw(32, heads)
        return made

    wrt = (*QKV, "weight") if bias else QKV
    said = [name for name, given in options.items() if given and name != "seed"]
    branch = " ".join([f"T={longest} ragged", *said, *["bias"] * bias])
    fused, eager = _attend(ops.attention_varlen, options), _attend(attention_varlen_ref, options)
    return Check("attention", branch, "triton", make, fused, eager, wrt)


def _attend(function: Callable[..., Tensor], options: Inputs) -> Callable[..., Tensor]:
    def run(weight: Tensor | None = None, **inputs: Any) -> Tensor:
        if weight is not None:
            inputs["relative_bias"] = ops.T5RelativeBias(weight, True, 128)
        return function(**inputs, **options)

    return run


def attention_checks() -> Iterator[Check]:
    dropout = dict(dropout_p=0.1, seed=5)
    yield attention(128)
    yield attention(64, key_mask=True)
    yield attention(128, key_mask=True, **dropout)
    yield attention(128, attn_mask=True)
    yield attention(256, is_causal=True)
    yield attention(512)
    yield attention(512, key_mask=True, **dropout)
    yield attention(512, bias=True)
    yield attention(512, attn_mask=True, is_causal=True, key_mask=True, bias=True, **dropout)
    yield attention(512, queries=1)
    yield attention(512, window=(64, 64))
    yield attention(128, window=(20, 3), key_mask=True)
    yield attention(512, window=(100, None), is_causal=True, key_mask=True, bias=True, **dropout)
    yield ragged(128)
    yield ragged(128, **dropout)
    yield ragged(512, is_causal=True)
    yield ragged(512, window=(64, 64), **dropout)
    yield ragged(512, bias=True, **dropout)


# --- losses ---------------------------------------------------------------------------------------

PARAMETERS = ("input", "linear_weight", "linear_bias")


def _first(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """The function, with the loss as its only result."""

    def run(**inputs: Any) -> Tensor:
        return _tuple(function(**inputs, **options))[0]

    return run


def _layer(where: Where, width: int) -> Inputs:
    """Inputs of a loss over a vocabulary; every seventh row does not count."""
    rows, vocab = (9, 70) if where.small else (65, 999)
    target = where.ids(vocab, rows)
    target[::7] = -100
    return dict(
        input=where.draw(rows, width),
        linear_weight=where.draw(vocab, width) * width**-0.5,
        linear_bias=where.draw(vocab),
        target=target,
    )


def cross_entropy(branch: str, width: int, budget: int, **options: Any) -> Check:
    flow = dict(logits_budget=budget)
    fused = _first(ops.linear_cross_entropy, **options, **flow)
    eager = _first(linear_cross_entropy_ref, **options)
    make = _of_width(_layer, width)
    return Check("linear_cross_entropy", branch, "triton", make, fused, eager, PARAMETERS)


def _of_width(make: Callable[[Where, int], Inputs], width: int) -> Callable[[Where], Inputs]:
    return lambda where: make(where, 32 if where.small else width)


def _exact(where: Where, width: int) -> Inputs:
    """Inputs whose logits are exact in every dtype, so that rounding changes no sample."""
    made = _layer(where, width)
    made["input"] = made["input"].sign()
    for name in PARAMETERS[1:]:
        made[name] = made[name].mul(8).round().div(8)
    return made


def _sampled(budget: int) -> Callable[..., Any]:
    def run(**inputs: Any) -> Any:
        for name in PARAMETERS:  # logits are kept only if a gradient is needed
            inputs[name].requires_grad_()
        return ops.linear_cross_entropy_with_sample(**inputs, seed=3, logits_budget=budget)[1]

    return run


def _sample_ref(**inputs: Any) -> Tensor:
    return sample_ref(**inputs, seed=3)


def loss_checks() -> Iterator[Check]:
    for name, budget in (("kept", ROOM), ("recomputed", 0)):
        yield cross_entropy(f"E=128 {name}", 128, budget)
        yield cross_entropy(f"E=768 {name}", 768, budget)
        yield cross_entropy(f"E=128 {name} smoothed", 128, budget, label_smoothing=0.1)
        yield cross_entropy(f"E=768 {name} of rows", 768, budget, reduction="none")
        make = _of_width(_exact, 128)
        fused = _sampled(budget)
        branch = f"E=128 {name} sampled"
        yield Check("linear_cross_entropy", branch, "triton", make, fused, _sample_ref)


def _taught(where: Where, width: int) -> Inputs:
    made = _layer(where, width)
    vocab = made["linear_weight"].shape[0]
    return made | dict(
        teacher_input=where.draw(len(made["target"]), 2 * width),
        teacher_weight=where.draw(vocab, 2 * width) * (2 * width) ** -0.5,
        teacher_bias=where.draw(vocab),
    )


def _given(where: Where, width: int) -> Inputs:
    made = _layer(where, width)
    rows, vocab = len(made["target"]), made["linear_weight"].shape[0]
    return made | dict(
        teacher_indices=torch.rand(rows, vocab, device=where.device).argsort(1)[:, :20],
        teacher_probabilities=torch.rand(rows, 20, device=where.device).to(where.dtype),
    )


def distillation_checks() -> Iterator[Check]:
    for name, budget in (("kept", ROOM), ("recomputed", 0)):
        for divergence, hard in (("forward_kl", 0.0), ("reverse_kl", 0.0), ("js", 0.5)):
            options = dict(divergence=divergence, temperature=2.0, cross_entropy_weight=hard)
            fused = _first(ops.linear_distillation, **options, logits_budget=budget)
            eager = _first(linear_distillation_ref, **options)
            make, branch = _of_width(_taught, 128), f"E=128 {name} {divergence}"
            yield Check("linear_distillation", branch, "triton", make, fused, eager, PARAMETERS)
        options = dict(temperature=2.0, cross_entropy_weight=0.3)
        fused = _first(ops.linear_distillation_topk, **options, logits_budget=budget)
        eager = _first(linear_distillation_topk_ref, **options)
        make, branch = _of_width(_given, 128), f"E=128 {name} top k"
        yield Check("linear_distillation", branch, "triton", make, fused, eager, PARAMETERS)


def detection_checks() -> Iterator[Check]:
    def make(where: Where) -> Inputs:
        rows, width = (33, 40) if where.small else (1025, 256)
        return dict(
            input=where.draw(rows, width),
            weight=where.draw(width) * width**-0.5,
            bias=where.draw(1),
            replaced=where.flags(0.1, rows),
            mask=where.flags(0.7, rows),
        )

    def make_of_ids(where: Where) -> Inputs:
        rows, width = (17, 40) if where.small else (513, 768)
        ids = (where.ids(3, rows), where.ids(3, rows))
        weight = where.draw(width) * width**-0.5
        return dict(input=where.draw(rows, width), weight=weight, replaced=ids)

    fused, eager = ops.replaced_token_loss, replaced_token_loss_ref
    for branch, inputs, options in (
        ("mean", make, {}),
        ("sum with counts", make, dict(reduction="sum", return_counts=True)),
        ("of rows", make, dict(reduction="none")),
        ("of ids", make_of_ids, {}),
    ):
        functions = _first(fused, **options), _first(eager, **options)
        # The bias' gradient is left out: it is one number, so its rounding error is chance.
        wrt = ("input", "weight")
        yield Check("replaced_token_loss", branch, "triton", inputs, *functions, wrt)


# --- layers ---------------------------------------------------------------------------------------

OF_NORM = ("input", "residual", "weight", "bias", "linear_bias")
OF_EMBEDDINGS = ("word_weight", "position_weight", "token_type_weight", "weight", "bias")


def norm_checks() -> Iterator[Check]:
    def make(where: Where, width: int, is_rms: bool) -> Inputs:
        rows, width = (9, 40) if where.small else (513, width)
        made: Inputs = {name: where.draw(rows, width) for name in OF_NORM[:2]}
        names = OF_NORM[2 : 3 if is_rms else 5]
        return made | {name: where.draw(width) / 8 + (name == "weight") for name in names}

    for width, p in ((768, 0.1), (768, 0.0), (256, 0.1), (1024, 0.1)):
        for is_rms in (False, True):
            options = dict(dropout_p=p, eps=1e-6) | (dict(seed=5) if p else {})
            inputs = lambda where, w=width, rms=is_rms: make(where, w, rms)  # noqa: E731
            fused: Any = ops.dropout_add_rms_norm if is_rms else ops.dropout_add_layer_norm
            functions = (
                _first(fused, **options),
                _first(dropout_add_layer_norm_ref, is_rms=is_rms, **options),
            )
            branch = f"E={width} p={p:g}{' rms' * is_rms}"
            wrt = OF_NORM[: 3 if is_rms else 5]
            yield Check("dropout_add_layer_norm", branch, "triton", inputs, *functions, wrt)


def gelu_checks() -> Iterator[Check]:
    def make(where: Where, width: int) -> Inputs:
        rows, width = (9, 40) if where.small else (513, width)
        return dict(input=where.draw(rows, width), bias=where.draw(width))

    for width, approximate in ((3072, "none"), (1024, "none"), (3072, "tanh")):
        inputs = lambda where, w=width: make(where, w)  # noqa: E731
        functions = [_first(f, approximate=approximate) for f in (ops.bias_gelu, bias_gelu_ref)]
        branch = f"F={width} {approximate}"
        yield Check("bias_gelu", branch, "triton", inputs, *functions, ("input", "bias"))


def geglu_checks() -> Iterator[Check]:
    def make(where: Where, width: int) -> Inputs:
        rows, width = (9, 40) if where.small else (513, width)
        return dict(input=where.draw(rows, 2 * width))

    for width, activation in ((1152, "gelu"), (3072, "silu"), (1024, "gelu_tanh")):
        inputs = lambda where, w=width: make(where, w)  # noqa: E731
        functions = [_first(f, activation=activation) for f in (ops.geglu, geglu_ref)]
        yield Check("geglu", f"F={width} {activation}", "triton", inputs, *functions, ("input",))


def disentangled_checks() -> Iterator[Check]:
    def make(where: Where, longest: int) -> Inputs:
        sequences, heads, dim = (2, 2, 16) if where.small else (8, 12, 64)
        longest = 33 if where.small else longest
        rows = [where.draw(sequences, heads, longest, dim) for _ in range(3)]
        tables = [where.draw(512, heads, dim) for _ in range(2)]
        names = ("query", "key", "value", "pos_key", "pos_query")
        return dict(
            zip(names, rows + tables, strict=True), key_mask=where.flags(0.8, sequences, longest)
        )

    both = (ops.disentangled_attention, disentangled_attention_ref)
    functions = [lambda f=f, **given: f(**given, max_distance=512) for f in both]
    for longest in (128, 512):
        inputs = lambda where, n=longest: make(where, n)  # noqa: E731
        names = ("query", "key", "value", "pos_key", "pos_query")
        yield Check("disentangled_attention", f"T={longest}", "triton", inputs, *functions, names)


def rotary_checks() -> Iterator[Check]:
    def make(where: Where, heads: int, dim: int) -> Inputs:
        batch, length = (1, 9) if where.small else (2, 513)
        turns = torch.randn(1, length, dim // 2, device=where.device).repeat(1, 1, 2)
        query, key = (where.draw(batch, one, length, dim) for one in (heads, heads // 2))
        return dict(query=query, key=key, cos=turns.cos(), sin=turns.sin())

    functions = [lambda f=f, **given: torch.cat(f(**given), 1) for f in (ops.rotary, rotary_ref)]
    for heads, dim in ((12, 64), (4, 128), (6, 40)):
        inputs = lambda where, h=heads, d=dim: make(where, h, d)  # noqa: E731
        branch = f"H={heads} D={dim}"
        yield Check("rotary", branch, "triton", inputs, *functions, ("query", "key"))


def embedding_checks() -> Iterator[Check]:
    def make(where: Where) -> Inputs:
        rows, width, vocab = (9, 40, 50) if where.small else (1024, 768, 999)
        made: Inputs = dict(input_ids=where.ids(vocab, rows), word_weight=where.draw(vocab, width))
        made |= dict(position_ids=where.ids(20, rows), position_weight=where.draw(20, width))
        made |= dict(token_type_ids=where.ids(2, rows), token_type_weight=where.draw(2, width))
        return made | dict(weight=1 + where.draw(width) / 8, bias=where.draw(width))

    for p in (0.0, 0.1):
        options = dict(dropout_p=p, eps=1e-12) | (dict(seed=5) if p else {})

        def eager(options: Inputs = options, **inputs: Any) -> Tensor:
            dtype = inputs["word_weight"].dtype
            return embedding_layer_norm_ref(**inputs, **options, dtype=dtype)

        fused = _first(ops.embedding_layer_norm, **options)
        name, branch = "embedding_layer_norm", f"E=768 p={p:g}"
        yield Check(name, branch, "triton", make, fused, eager, OF_EMBEDDINGS)


# --- rows -----------------------------------------------------------------------------------------


def row_checks() -> Iterator[Check]:
    def make(where: Where, ascending: bool) -> Inputs:
        rows, width = (33, 40) if where.small else (257, 768)
        positions = where.ids(rows, rows // 3)  # some occur twice
        if ascending:
            positions = torch.randperm(rows, device=where.device)[: rows // 6].sort().values
        positions[-2:] = -1
        return dict(input=where.draw(rows, width), positions=positions)

    for branch, ascending in (("ascending", True), ("repeated", False)):
        inputs = lambda where, given=ascending: make(where, given)  # noqa: E731
        functions = ops.gather_rows, gather_rows_ref
        yield Check("gather_rows", branch, "triton", inputs, *functions, ("input",))


def set_checks() -> Iterator[Check]:
    def make(where: Where, longest: int) -> Inputs:
        longest, width = (min(longest, 20), 40) if where.small else (longest, 384)
        made: Inputs = dict(query=where.draw(2 * longest, width), key=where.draw(longest, width))
        short = longest // 2
        made["cu_seqlens_q"] = where.whole(0, short, short, 2 * longest - short, dtype=torch.int32)
        made["cu_seqlens_k"] = where.whole(0, short, short + 3, longest, dtype=torch.int32)
        return made | dict(max_seqlen_q=2 * longest - 2 * short, max_seqlen_k=longest)

    def scores(function: Callable[..., Any], normalize: bool) -> Callable[..., Tensor]:
        def run(**inputs: Any) -> Tensor:
            match = function(**inputs, normalize=normalize)
            return torch.cat([match.query_score, match.key_score])

        return run

    for branch, longest, normalize in (("short, cosine", 60, True), ("long, dot", 300, False)):
        inputs = lambda where, most=longest: make(where, most)  # noqa: E731
        functions = scores(ops.maxsim, normalize), scores(maxsim_ref, normalize)
        yield Check("maxsim", branch, "triton", inputs, *functions, ("query", "key"))


# --- tokens ---------------------------------------------------------------------------------------


def token_checks() -> Iterator[Check]:
    def rows(where: Where, length: int, packed: bool = False) -> Inputs:
        length = min(length, 40) if where.small else length
        ids, numbers = where.ids(900, 3, length) + 50, where.whole(7, 1 << 40, 2)
        made: Inputs = dict(input_ids=ids, sample_index=numbers, seed=where.whole(11)[0], step=1)
        if packed:
            lengths = where.whole(0, length, length, length + length // 2, dtype=torch.int32)
            made |= dict(input_ids=ids.flatten()[: length + length // 2 + 2], cu_seqlens=lengths)
        return made

    def mask(where: Where, length: int, packed: bool) -> Inputs:
        made = rows(where, length, packed)
        made["maskable"] = where.flags(0.9, *made["input_ids"].shape)
        return made | dict(vocab_size=1000, mask_token_id=3)

    def of_words(where: Where, length: int, packed: bool) -> Inputs:
        made = mask(where, length, packed)
        words = where.ids(2, *made["input_ids"].shape).cumsum(-1)
        return made | dict(unit="ngram", word_ids=words, special_ids=where.whole(0, 9))

    def spans(where: Where, length: int, packed: bool) -> Inputs:
        made = rows(where, length, packed)
        if packed:
            made["max_seqlen"] = int(made["cu_seqlens"].diff().max())
        sentinels = torch.arange(1099, 999, -1, device=where.device)
        return made | dict(sentinel_ids=sentinels, eos_token_id=1)

    def noise(where: Where, length: int, packed: bool) -> Inputs:
        made = spans(where, length, packed)
        del made["sentinel_ids"]
        made |= dict(vocab_size=1000, mask_token_id=3, pad_token_id=0, bos_token_id=1)
        made |= dict(mask_probability=0.1, delete_probability=0.1, rotate_probability=0.5)
        ends = torch.arange(100, 1000, 9, device=where.device)
        return made | dict(
            eos_token_id=2, sentence_end_ids=ends, special_ids=where.whole(0, 1, 2, 3)
        )

    for op, make, fused, eager in (
        ("mask_tokens", mask, ops.mask_tokens, mask_tokens_ref),
        ("mask_tokens", of_words, ops.mask_tokens, mask_tokens_ref),
        ("corrupt_spans", spans, ops.corrupt_spans, corrupt_spans_ref),
        ("bart_noise", noise, ops.bart_noise, bart_noise_ref),
    ):
        for length, packed in ((128, False), (2500, False), (512, True)):
            branch = f"{'packed ' * packed}{make.__name__} T={length}"
            inputs = lambda where, m=make, n=length, p=packed: m(where, n, p)  # noqa: E731
            yield Check(op, branch, "cuda", inputs, fused, eager)


# --- all of them ----------------------------------------------------------------------------------

#: Every op with a kernel for a GPU, in the order in which their speed matters.
OPS: dict[str, Callable[[], Iterator[Check]]] = {
    "attention": attention_checks,
    "linear_cross_entropy": loss_checks,
    "dropout_add_layer_norm": norm_checks,
    "bias_gelu": gelu_checks,
    "geglu": geglu_checks,
    "disentangled_attention": disentangled_checks,
    "rotary": rotary_checks,
    "embedding_layer_norm": embedding_checks,
    "gather_rows": row_checks,
    "replaced_token_loss": detection_checks,
    "mask_tokens": lambda: _of("mask_tokens"),
    "linear_distillation": distillation_checks,
    "maxsim": set_checks,
    "corrupt_spans": lambda: _of("corrupt_spans"),
    "bart_noise": lambda: _of("bart_noise"),
}


def _of(op: str) -> Iterator[Check]:
    return (check for check in token_checks() if check.op == op)


def runs(
    op: str, device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[tuple[Check, Where]]:
    """Every check of an op in each dtype, on a CPU in one. Ops on ids have one dtype."""
    for check in OPS[op]():
        several = check.backend == "triton" and device.type == "cuda"
        for dtype in dtypes if several else DTYPES[1:2]:
            yield check, Where(device, dtype)


def check_op(
    op: str, device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[tuple[str, BaseException | None]]:
    """The label of each check of an op, and its error or None."""
    for check, where in runs(op, device, dtypes):
        label = check.branch
        if check.backend == "triton":
            label = f"{str(where.dtype)[6:]} {label}"
        try:
            check.run(where)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:  # after any error, the op has no speed
            yield label, error
        else:
            yield label, None
