"""Calls of every operator of ``fastplm_C`` on the CPU, with little stack or memory."""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
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
            model = fastplm.quantize(model) if int8 else model
            states = torch.randn(2, 300, LAYERS["hidden_size"])
            yield f"{family} of states, 8 bits: {int8}", forward(model, inputs_embeds=states)
            for shape in ((1, 7), (3, 40), (2, 500)):
                ids = torch.randint(2, 60, shape)
                mask = torch.arange(shape[1]) < torch.tensor([[shape[1]], [3], [9]])[: shape[0]]
                given = dict(input_ids=ids, attention_mask=mask.long())
                yield f"{family} {shape}, 8 bits: {int8}", forward(model, **given)
        for family, make in DECODERS.items():
            model = make().eval()
            model = fastplm.quantize(model) if int8 else model
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
    there = {
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fastplm_C::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    }
    print(json.dumps(sorted(there - ran)))


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


if __name__ == "__main__":
    {"small_stacks": small_stacks, "refused_memory": refused_memory}[sys.argv[1]](*sys.argv[2:])
