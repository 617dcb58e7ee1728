"""Calls of every operator of ``fastplm_C`` on the CPU, with little stack or memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import math
import mmap
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves

import fastplm
from fastplm import models, ops

sys.path.insert(0, str(Path(__file__).parents[1]))
from samples import SAMPLES, kernels, results_and_grads

#: Rows of each kind of product: a stream of one or of few, a tile, more, and many, packed.
ROWS = (1, 3, 9, 60, 450)
LAYERS = dict(vocab_size=60, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
LAYERS |= dict(embedding_size=48, intermediate_size=70, max_position_embeddings=600)
ENCODERS = {
    "bert": (models.BertModel, transformers.BertConfig),
    "roberta": (models.RobertaModel, transformers.RobertaConfig),
    "electra": (models.ElectraModel, transformers.ElectraConfig),
}
T5 = dict(vocab_size=60, d_model=48, d_kv=12, num_heads=4, d_ff=70, num_layers=2)
TOKENS = dict(bos_token_id=1, eos_token_id=1, pad_token_id=0, decoder_start_token_id=0)
DECODERS = {
    "gpt2": lambda: models.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=60, n_embd=48, n_layer=2, n_head=4, **TOKENS)
    ),
    **{
        f"t5 {form}": lambda form=form: models.T5ForConditionalGeneration(
            transformers.T5Config(**T5, feed_forward_proj=form, **TOKENS)
        )
        for form in ("relu", "gated-gelu")
    },
}

Cases = Iterator[tuple[str, Callable[[], Any]]]


def calls_of_ops() -> Cases:
    for (name, sample), size, dtype in itertools.product(
        SAMPLES.items(), (5, 450), (torch.float32, torch.bfloat16)
    ):
        if "cpp" in kernels(sample):
            given = sample, "cpp", sample.make(size, dtype)
            yield f"{name}, {size} in {dtype}", lambda given=given: results_and_grads(*given)
    called, lengths = torch.ops.fastplm_C, torch.tensor([3, 5, 2])
    yield "pack_sequences", lambda: called.pack_sequences(lengths, 6)
    ends, out = torch.tensor([0, 3, 8, 10]), torch.empty(3, 8, dtype=torch.int64)
    documents = torch.tensor([0, 3])
    yield "sentence_chunks", lambda: called.sentence_chunks(ends, documents, 6, out)
    # The losses of a vocabulary, for which it is, multiply by MKL, which may need more stack.
    logits = torch.randn(450, 900)
    yield "softmax_statistics", lambda: called.softmax_statistics(logits, False, False, 0.7)
    yield "ask_for_huge_pages", lambda: called.ask_for_huge_pages(torch.empty(1 << 20))


def products() -> Cases:
    called = torch.ops.fastplm_C
    for rows, dtype, by_rows in itertools.product(
        ROWS, (torch.float32, torch.float16, torch.bfloat16), (False, True)
    ):
        given, weight = torch.randn(rows, 801).to(dtype), torch.randn(390, 801).to(dtype)
        if by_rows:
            weight = weight.t().contiguous().t()
        yield (
            f"product of {rows}, {dtype}, by rows: {by_rows}",
            lambda given=given, weight=weight: called.linear(given, weight, None),
        )
    given, weight = torch.randn(801, 60).t(), torch.randn(390, 801)  # copied to rows first
    yield "product of columns", lambda: called.linear(given, weight, None)
    for rows in ROWS:
        given, (weight, scale) = torch.randn(rows, 801), ops.quantize_int8(torch.randn(390, 801))
        yield (
            f"product in 8 bits of {rows}",
            lambda args=(given, weight, scale): called.linear_int8(*args, None),
        )


def calls_of_layers() -> Cases:
    for int8 in (False, True):
        for family, (kind, config) in ENCODERS.items():
            model = kind(config(**LAYERS)).eval()
            model = fastplm.freeze(fastplm.quantize(model) if int8 else model)
            states = torch.randn(2, 300, LAYERS["hidden_size"])
            yield f"{family} of states, 8 bits: {int8}", forward(model, inputs_embeds=states)
            for shape in ((1, 7), (3, 40), (2, 500)):
                ids = torch.randint(2, 60, shape)
                mask = torch.arange(shape[1]) < torch.tensor([[shape[1]], [3], [9]])[: shape[0]]
                ids = ids.masked_fill(~mask, model.config.pad_token_id)
                given = dict(input_ids=ids, attention_mask=mask.long())
                yield f"{family} {shape}, 8 bits: {int8}", forward(model, **given)
        for family, make in DECODERS.items():
            model = make().eval()
            model = fastplm.freeze(fastplm.quantize(model) if int8 else model)
            ids = torch.randint(2, 60, (3, 7))
            generate = functools.partial(model.generate, max_new_tokens=4, do_sample=False)
            given = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
            yield f"{family}, 8 bits: {int8}", functools.partial(generate, **given)


def forward(model: Any, **given: Tensor) -> Callable[[], Any]:
    return torch.no_grad()(lambda: model(**given))


def in_thread(call: Callable[[], Any]) -> Any:
    """What the call gives in a new thread by csrc/, or raises there."""
    results: list[Any] = []
    failed: list[BaseException] = []

    def target() -> None:
        try:
            with fastplm.use_backend("cpp"):
                results.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return results[0]


def record_calls(kind: type, ran: set[str]) -> None:
    """Adds the names of operators that are called. A profiler would keep layers from running."""
    call: Any = kind.__call__

    def recorded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        ran.add(self._qualified_op_name if kind is OpOverloadPacket else self._schema.name)
        return call(self, *args, **kwargs)

    kind.__call__ = recorded  # type: ignore[method-assign]


def calls() -> Cases:
    return itertools.chain(calls_of_ops(), products(), calls_of_layers())


# --- stacks ---------------------------------------------------------------------------------------


def small_stacks() -> None:
    """Each case is named before it runs, as too small a stack ends the process without a word. In
    the end come the operators that did not run."""
    threading.stack_size(64 * 1024)
    ran: set[str] = set()
    for kind in (OpOverload, OpOverloadPacket):
        record_calls(kind, ran)
    for name, call in calls():
        print(json.dumps(name), flush=True)
        in_thread(call)
    print(json.dumps(sorted(operators() - ran)))


# --- memory ---------------------------------------------------------------------------------------


def bits(results: Any) -> list[Tensor]:
    return [one for one in tree_leaves(results) if isinstance(one, Tensor)]


def refused_memory(library: str) -> None:
    """Each allocation of each case is refused once. Prints what the errors say, and which cases
    have other results afterwards. ``library`` is refuse_memory.cpp, which is preloaded."""
    refuse = ctypes.CDLL(library).refuse
    changed, said = [], set()
    for name, call in calls():
        seeded = functools.partial(repeatably, call)
        right = in_thread(seeded)
        for number in itertools.count():
            refuse(number)
            try:
                in_thread(seeded)
            except BaseException as error:
                said.add(f"{type(error).__name__}: {error}")
            # It still counts down: there are no more allocations.
            if refuse(-1) >= 0:
                break
        again = in_thread(seeded)
        if not all(map(torch.equal, bits(right), bits(again))):
            changed.append(name)
    print(json.dumps({"said": sorted(said), "changed": changed}))


def repeatably(call: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return call()


class Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]


def memory_left() -> None:
    """Prints the bytes that are still in use after large calls, of a thread that goes on."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Heap
    query, weight = torch.randn(1, 2, 4096, 64), torch.randn(64, 3072)
    rows, packed = torch.randn(2048, 3072), ops.quantize_int8(weight)
    shapes = (*[(768, 768), (768,)] * 4, (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,))
    of_layer = [torch.randn(shape) for shape in (*shapes, (768,), (768,))]

    def layer(count: int) -> Tensor:
        ends = torch.tensor([0, count], dtype=torch.int32)
        encoder = torch.ops.fastplm_C.encoder.default
        return encoder(rows[:count, :768].contiguous(), of_layer, ends, None, None, 64, 1e-5, False)

    assert layer(8) is not None
    calls = {
        "layers": (lambda: layer(8), lambda: layer(512)),
        "attention": (
            lambda: ops.attention(query[:, :, :8], query[:, :, :8], query[:, :, :8]),
            lambda: ops.attention(query, query, query),
        ),
        "linear": (lambda: ops.linear(rows[:8], weight), lambda: ops.linear(rows, weight)),
        "linear_int8": (
            lambda: ops.linear_int8(rows[:8], *packed),
            lambda: ops.linear_int8(rows, *packed),
        ),
    }

    def used_by(small: Callable[[], Any], large: Callable[[], Any]) -> int:
        small()
        before = mallinfo()
        large()
        after = mallinfo()
        return after.uordblks + after.hblkhd - before.uordblks - before.hblkhd

    print(
        json.dumps({name: in_thread(lambda two=two: used_by(*two)) for name, two in calls.items()})
    )


# --- dtypes ---------------------------------------------------------------------------------------

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e5m2)
DTYPES += (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def at_the_end_of_its_memory(tensor: Tensor, dtype: torch.dtype, at_end: bool = True) -> Tensor:
    """A copy of a shape and strides; to read or write behind it ends the process. Or before it, if
    it is not ``at_end``."""
    page, count = mmap.PAGESIZE, 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))  # noqa: B905
    count = count if tensor.numel() else 0
    size = -(-count * dtype.itemsize // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for guard in (start, start + page + size):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), page, 0) == 0
    offset = page + (size - count * dtype.itemsize if at_end else 0)
    if count == 0:
        return torch.empty(0, dtype=dtype).as_strided(tensor.shape, tensor.stride())
    room = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    # The first of the elements that lie in one place is copied.
    apart = tuple(slice(None) if step else slice(1) for step in tensor.stride())
    room.as_strided(tensor[apart].shape, tensor.stride()).copy_(tensor[apart])
    return room.as_strided(tensor.shape, tensor.stride())


def recorded_calls() -> list[tuple[OpOverload, tuple]]:
    """A call of each operator and each form of its arguments: dtypes, layouts, what is left out."""
    seen: dict[Any, tuple[OpOverload, tuple]] = {}
    originals = {kind: kind.__call__ for kind in (OpOverload, OpOverloadPacket)}

    def recorded(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        operator = self if isinstance(self, OpOverload) else self.default
        if operator.namespace == "fastplm_C":
            arguments = operator._schema.arguments
            args = (*args, *(kwargs[one.name] for one in arguments[len(args) :]))
            seen.setdefault((operator, *map(form_of, args)), (operator, args))
            return originals[OpOverload](operator, *args)
        return originals[type(self)](self, *args, **kwargs)

    for kind in originals:
        kind.__call__ = recorded  # type: ignore[method-assign]
    of_ops = (case for case in calls_of_ops() if ", 450" not in case[0])
    for _, call in itertools.chain(of_ops, products(), calls_of_layers()):
        with fastplm.use_backend("cpp"):
            call()
    for kind, original in originals.items():
        kind.__call__ = original  # type: ignore[method-assign]
    return list(seen.values())


def form_of(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.dim(), argument.stride()[-1:]
    if isinstance(argument, (list, tuple)):
        return len(argument), *map(form_of, argument[:1])
    return type(argument)


def is_taken(result: Any) -> bool:
    """Whether an operator did what it was asked; one of a layer may leave it to the modules."""
    return result is not False and result is not None and result != []


def wrong_types() -> None:
    """Each case is named before it runs. In the end come those that were not refused."""
    taken = set()
    for operator, args in recorded_calls():
        for i, name, tensor, put in tensors_of(operator, args):
            for dtype in DTYPES:
                if dtype is tensor.dtype or tensor.numel() == 0:
                    continue
                case = f"{operator._schema.name.split('::')[1]} {name} {dtype}"
                print(json.dumps(case), flush=True)
                with contextlib.suppress(RuntimeError):
                    changed = [*args]
                    changed[i] = put(at_the_end_of_its_memory(tensor, dtype))
                    if is_taken(operator(*changed)):
                        taken.add(case)
    print(json.dumps(sorted(taken)))


def tensors_of(operator: OpOverload, args: tuple) -> Iterator[tuple[int, str, Tensor, Any]]:
    """The place, name and value of each tensor, of lists the first, and what puts another in."""
    for i, (argument, value) in enumerate(zip(operator._schema.arguments, args, strict=False)):
        if isinstance(value, Tensor):
            yield i, argument.name, value, lambda other: other
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
            for k in range(min(4, len(value))):
                yield (
                    *(i, argument.name, value[k]),
                    lambda other, k=k, value=value: [*value[:k], other, *value[k + 1 :]],
                )


# --- shapes ---------------------------------------------------------------------------------------


def other_shapes(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of other sizes with the same numbers, of which some are repeated or left out."""
    for dim, size in enumerate(tensor.shape):
        for other in {size + 1, 3 * size, size - 1, 0} - {size} if size else ():
            chosen = torch.arange(other).clamp(max=size - 1)
            yield f"size {other} of {dim}", tensor.index_select(dim, chosen)
        if size:
            yield f"without {dim}", tensor.select(dim, 0)
    yield "one more dimension", tensor[None]
    if tensor.dim() != 1:
        yield "a row", tensor.flatten()
    if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]:
        yield "columns", tensor.t().contiguous()


def other_strides(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same shape, of which each second number is read, or one in place of many."""
    if tensor.dim():
        yield "each second", torch.stack((tensor, tensor), -1)[..., 0]
        yield "each second row", torch.stack((tensor, tensor), 1)[:, 0]
    for dim, size in enumerate(tensor.shape):
        if size > 1:
            yield f"one of {dim}", tensor.narrow(dim, 0, 1).expand(tensor.shape)


def other_values(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if tensor.dtype in (torch.int32, torch.int64):
        most = torch.iinfo(tensor.dtype).max
        for value in (-1, 0, 7, 1 << 20, most, -most):
            yield f"all {value}", torch.full_like(tensor, value)
        if tensor.dim():
            yield "falling", tensor.flip(0)
            yield "more", tensor + 1


def other_arguments(operator: OpOverload, args: tuple) -> Iterator[tuple[str, str, list]]:
    """A call's arguments with one of them changed: its kind, what changed, and all of them."""
    for i, name, tensor, put in tensors_of(operator, args):
        for kind, others in (
            ("shape", other_shapes),
            ("strides", other_strides),
            ("value", other_values),
        ):
            for what, other in others(tensor):
                yield kind, f"{name} {what}", [*args[:i], put(other), *args[i + 1 :]]
    for i, (argument, value) in enumerate(zip(operator._schema.arguments, args, strict=False)):
        others: tuple[Any, ...] = ()
        if isinstance(value, bool):
            others = (not value,)
        elif isinstance(value, int):
            others = (-1, 0, 1, 9, (1 << 31) - 1, 1 << 32, 1 << 62, -(1 << 62))
        elif isinstance(value, float):
            others = (0.0, -1.0, math.nan, math.inf)
        elif isinstance(value, (list, tuple)):
            others = ([], value[:-1], [*value, *value], value[::-1])
        elif value is not None and str(argument.type).startswith("Optional"):
            others = (None,)
        for other in others:
            shown = len(other) if isinstance(other, (list, tuple)) else other
            yield "value", f"{argument.name} {shown}", [*args[:i], other, *args[i + 1 :]]


def guarded(value: Any, at_end: bool) -> Any:
    if isinstance(value, Tensor):
        return at_the_end_of_its_memory(value, value.dtype, at_end)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return [guarded(one, at_end) for one in value]
    return value


def wrong_shapes(library: str) -> None:
    """Prints the operators that were not called, and of each other one the case that ended the
    process, and those that ran with another shape. ``library`` is guarded_memory.cpp."""
    # What is asked for in vain should not be taken from the machine.
    size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + (1 << 30),) * 2)
    of_operator: dict[OpOverload, list[tuple]] = {}
    for operator, args in recorded_calls():
        of_operator.setdefault(operator, []).append(args)
    guard = ctypes.CDLL(library).guard
    missing = operators() - {one._schema.name for one in of_operator}
    print(json.dumps(sorted(name for name in missing if takes_tensors(name))), flush=True)
    for operator, calls in of_operator.items():
        reads, writes = os.pipe()
        if (process := os.fork()) == 0:
            guard(1)
            with os.fdopen(writes, "w") as out:
                for args, at_end in itertools.product(calls, (True, False)):
                    run_cases(operator, [guarded(one, at_end) for one in args], at_end, out)
            os._exit(0)
        os.close(writes)
        with os.fdopen(reads) as given:
            lines = given.read().splitlines()
        taken = sorted({line[6:] for line in lines if line.startswith("taken ")})
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        ended = None if status == 0 else f"{lines[-1]}: {status}"
        found = dict(operator=operator._schema.name, cases=len(lines), ended=ended, taken=taken)
        print(json.dumps(found), flush=True)


def run_cases(operator: OpOverload, args: list, at_end: bool, out: Any) -> None:
    for kind, what, changed in other_arguments(operator, tuple(args)):
        print(what, file=out, flush=True)
        try:
            given = (
                one if one is before else guarded(one, at_end)
                for one, before in zip(changed, args, strict=True)
            )
            result = operator(*given)
        except (RuntimeError, TypeError):
            continue
        if kind == "shape" and is_taken(result):
            print("taken", what, file=out, flush=True)


def operators() -> set[str]:
    """The names of all operators that run on the CPU."""
    return {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fastplm_C::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    }


def takes_tensors(name: str) -> bool:
    schema = getattr(torch.ops.fastplm_C, name.split("::")[1]).default._schema
    return any("Tensor" in str(one.type) for one in schema.arguments)


if __name__ == "__main__":
    commands = (small_stacks, refused_memory, memory_left, wrong_types, wrong_shapes)
    {command.__name__: command for command in commands}[sys.argv[1]](*sys.argv[2:])
