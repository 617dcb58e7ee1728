"""Lanes and devices of the test suite.

Without a GPU the Triton kernels run under Triton's interpreter, which must be switched on before a
kernel module is imported. With a GPU they are compiled and run there, by the same tests.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
from collections.abc import Iterator

import pytest
import torch

from fastplm import _rules
from fastplm.testing import hold_to_level

from . import quick
from .commands import (  # noqa: F401 (fixtures)
    arguments,
    bert,
    command,
    corpus,
    curve,
    electra,
    in_two_processes,
    killed,
    one_step_of,
    refused,
    run,
    word_tokenizer,
)

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a folder that is not there may be a name on the Hub
hold_to_level()


def _interpret_kernels():
    """Switch Triton's interpreter on, without two steps that take half its time and do nothing.

    The interpreter computes whether integers overflow, but uses that only in its debug mode. And a
    launch makes ``triton.language`` callable until it ends; each call of a device function does so
    again. Only the first such call, from a module of Triton's own, needs it.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    known = set()

    def call(function, *args, **kwargs):
        if function.fn.__module__ not in known:
            interpreter._patch_lang(function.fn)
            known.add(function.fn.__module__)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    _describe_each_type_once()


def _describe_each_type_once():
    """Let the interpreter keep what it knows of a block's shape and of a dtype.

    For every number that a kernel computes it makes a type and a tensor of that type, and describes
    their shape and dtype in objects of Python again: a third of its time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    unwrap = core._unwrap_if_constexpr
    plain = {int, bool, float, str, core.dtype, core.pointer_type, core.block_type, core.tensor}

    @functools.cache
    def of_shape(sizes):
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        sizes = tuple(map(unwrap, sizes))
        numel = core.validate_block_shape(sizes)
        shape = core.tuple(list(map(core.constexpr, sizes)))
        return sizes, core.tuple(list(sizes)), numel, (core.constexpr(numel), shape)

    def make_type(self, element_ty, shape):
        self.element_ty = element_ty
        self.sizes, self.shape, self.numel, self.of_tensor = of_shape(tuple(unwrap(shape)))

    scalar = core.constexpr(1), core.tuple([])

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensor if type.is_block() else scalar

    def is_type(self, other):
        if not isinstance(other, core.block_type):
            return False
        return self.sizes == other.sizes and self.element_ty == other.element_ty

    core.block_type.__init__ = make_type
    core.block_type.__eq__ = is_type
    core.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    core.tensor.__init__ = make_tensor
    core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)

    find, found = interpreter._get_np_dtype, {}

    def numpy_dtype(type):
        scalar = type.scalar
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = numpy_dtype


if not torch.cuda.is_available():
    _interpret_kernels()


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="what every test draws its numbers from")
    parts = {"choices": ("all", "quick", "rest"), "default": "all"}
    parser.addoption("--part", **parts, help="quick: the tests of `make test`, see quick.py")


def pytest_itemcollected(item):
    if item.nodeid.startswith(quick.OF_SLOW_LANE):
        item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if (part := config.getoption("part")) != "all":
        chosen = quick.chosen(item.nodeid for item in items)
        kept = [item for item in items if (item.nodeid in chosen) == (part == "quick")]
        config.hook.pytest_deselected(items=set(items) - set(kept))
        items[:] = kept
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="gpu lane: no CUDA device on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _no_old_objects_in_collections():
    """Let no collection of cycles, of which each ``Trainer`` asks for one, look at all tests, and
    at what earlier ones left."""
    gc.collect()
    gc.freeze()


def _devices():
    yield pytest.param("cpu", id="cpu")
    yield pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=_devices())
def device(request) -> torch.device:
    """CPU tensors in the interpreter lane, CUDA tensors in the gpu lane."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded(request):
    torch.manual_seed(request.config.getoption("seed"))


class Measured:
    """Rules that are the same on every machine: ``ours`` says where csrc/ is faster."""

    def __init__(self):
        self.ours = _ours

    def __setattr__(self, name, value) -> None:
        super().__setattr__(name, value)
        _rules.slower.cache_clear()

    def decide(self, op: str, call: _rules.CallClass) -> _rules.Rule:
        return _rules.Rule("cpp" if self.ours(op, *call) else "stock", "a test", "2.00")


def _ours(op: str, form: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> bool:
    if op == "attention":  # except for the next token of a generation
        seqlen_q, seqlen_k, heads, _ = sizes
        return seqlen_q > 1 or seqlen_k * heads > 1 << 14
    least = {"gelu": 1 << 14, "dropout": 1 << 14, "rms_norm": 1 << 13}
    return op in least and sizes[0] >= least[op]


@pytest.fixture(autouse=True)
def measured(monkeypatch) -> Iterator[Measured]:
    """Fixed rules, for tests of which kernel runs on any machine."""
    rules = Measured()
    monkeypatch.setattr(_rules, "decide", rules.decide)
    yield rules
    _rules.slower.cache_clear()


@pytest.fixture
def spare_slots(monkeypatch):
    """Two unused slots beside the rows of each batch on a CPU, as bf16 gets some, in every dtype.

    The list says how many each batch got.
    """
    from fastplm.nn import _rows

    added = []

    def two_more(count, most):
        added.append(min(2, most - count))
        return count + added[-1]

    monkeypatch.setattr(_rows, "_is_compiled", lambda dtype: True)
    monkeypatch.setattr(_rows, "bucketed_rows", two_more)
    return added


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A folder with a BERT of two layers for masked words, and its tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, PreTrainedTokenizerFast

    from fastplm.models import BertForMaskedLM

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **names, sep_token="[SEP]", mask_token="[MASK]"
    )
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=32,
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
