"""Whole models exported as programs: ``torch.jit.trace``, ``torch.export``, ONNX.

A program is made from one batch with padding, saved, loaded if possible, and run on other batches:
other sizes, other lengths, other padding. ``pytest -m "slow or not slow" -rP`` prints the largest
difference of each program. Tests that need the package onnx are skipped without it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import re

import pytest
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderConfig

import fastplm
import fastplm.hf
from fastplm import models
from fastplm.errors import UnsupportedError
from fastplm.hf import attention_of
from fastplm.nn import FusedAttention
from fastplm.testing import FORWARD_FACTOR, check_error

from .conftest import (
    CHOICES,
    CLASSES,
    LANGUAGE_MODELS,
    PADDINGS,
    _measures,
    config_of,
    eager_parent,
    has_decoder,
    inputs_of,
    pair,
    small_config,
)

BACKBONES = [name for name in CLASSES if name.endswith("Model") and "Heads" not in name]
BACKBONES = [name for name in BACKBONES if name not in LANGUAGE_MODELS.values()]
#: A backbone and a language model of each family, and other heads.
NAMES = (
    *BACKBONES,
    *LANGUAGE_MODELS.values(),
    *("ElectraForPreTraining", "RobertaForSequenceClassification", "EncoderDecoderModel"),
)
#: (padding, B, T) of the batches; the exporter gets the first.
BATCHES = (("right", 2, 7), ("none", 3, 5), ("left", 3, 11), ("holes", 4, 9), ("right", 1, 8))

needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("onnx", "onnxruntime", "onnxscript"))),
    reason="needs onnx, onnxruntime and onnxscript",
)
# Tracing warns of each size that it takes for a constant, the exporters of deprecated functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def both(name):
    """(a drop-in model, its parent with the same weights)."""
    if name != "EncoderDecoderModel":
        return pair(name)
    parts = small_config("bert"), small_config("bert")
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        *parts, pad_token_id=0, decoder_start_token_id=3
    )
    model = models.EncoderDecoderModel(copy.deepcopy(config)).eval()
    parent = eager_parent(type(model), config).eval()
    parent.load_state_dict(model.state_dict())
    return model, parent


def mask_of(padding, batch, length):
    """A mask, int64 [B, T]: sequence b is 2 b tokens shorter, or has holes."""
    missing = torch.arange(batch)[:, None] * 2 % max(length - 1, 1)
    column = torch.arange(length)
    if padding == "holes":
        return (column % 4 != 2 + missing % 2).long().expand(batch, -1).contiguous()
    found = column >= missing if padding == "left" else column < length - missing
    return torch.ones(batch, length).long() if padding == "none" else found.long()


def batch_of(name, padding, batch, length):
    generator = torch.Generator().manual_seed(length)

    def side(mask, prefix=""):
        ids = torch.randint(4, 37, mask.shape, generator=generator)
        pad = small_config(CLASSES.get(name, "bert")).pad_token_id or 0
        ids = ids.masked_fill(mask == 0, pad)
        return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": mask}

    inputs = side(mask_of(padding, batch, length))
    if has_decoder(name):
        target = "none" if padding == "none" else "right"
        inputs |= side(mask_of(target, batch, length - 2), "decoder_")
    return inputs


def first(outputs):
    """Logits, or the last hidden state."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    return outputs[0] if isinstance(outputs, tuple) else next(iter(outputs.values()))


def at_tokens(out, inputs):
    mask = inputs.get("decoder_attention_mask", inputs["attention_mask"]).bool()
    return (out[mask] if out.shape[:2] == mask.shape else out).flatten()


def hold(name, program, parent, batches=BATCHES):
    """A program's error against the parent in fp64 is within that of the parent in fp32."""

    def run(model):
        outs = [(first(model(**inputs)), inputs) for inputs in given]
        return {"out": torch.cat([at_tokens(out, inputs) for out, inputs in outs])}

    given = [batch_of(name, *batch) for batch in batches]
    with torch.no_grad():
        out = run(lambda **inputs: program(**inputs))["out"]
        bases = [base[0]["out"] for base in _measures(parent, run)]
        gold = run(copy.deepcopy(parent).double())["out"]
    check_error(name, out, gold, bases, FORWARD_FACTOR)
    return (out - bases[0]).abs().max().item()


# --- the exporters: (model, inputs) -> program, called with the inputs by name --------------------


class Plain(torch.nn.Module):
    """A model as a function from tensors to a tensor."""

    def __init__(self, model, names):
        super().__init__()
        self.model, self.names = model, names
        self.eval()

    def forward(self, *tensors):
        return first(self.model(**dict(zip(self.names, tensors, strict=True))))


def traced(model, inputs):
    program = torch.jit.trace(Plain(model, tuple(inputs)), tuple(inputs.values()))
    kinds = {node.kind().split("::")[0] for node in program.inlined_graph.nodes()}
    assert kinds <= {"aten", "prim"} and not program.inlined_graph.findAllNodes("prim::PythonOp")
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    program = torch.jit.load(file)
    return lambda **inputs: program(*inputs.values())


def sizes(inputs):
    return {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in inputs}


def exported(strict=False, backend=None):
    def export(model, inputs):
        backends = fastplm.use_backend(backend) if backend else contextlib.nullcontext()
        with backends, torch.no_grad():
            program = torch.export.export(
                model, (), dict(inputs), dynamic_shapes=sizes(inputs), strict=strict
            )
        operators = {str(node.target).split(".")[0] for node in program.graph.nodes}
        assert ("fastplm" in operators) == (backend is None)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        return torch.export.load(file).module()

    return export


def onnx(dynamo):
    def export(model, inputs):
        file, names = io.BytesIO(), list(inputs)
        with torch.no_grad():
            if dynamo:
                program = torch.onnx.export(
                    model,
                    kwargs=dict(inputs),
                    input_names=names,
                    dynamic_shapes=sizes(inputs),
                    dynamo=True,
                    verbose=False,
                )
                program.save(file)
            else:
                torch.onnx.export(
                    model,
                    (),
                    file,
                    kwargs=dict(inputs),
                    input_names=names,
                    dynamic_axes={name: {0: "batch", 1: f"{name} length"} for name in names},
                    dynamo=False,
                    opset_version=18,
                )
        return session(file.getvalue())

    return export


def session(program):
    from onnxruntime import InferenceSession

    loaded = InferenceSession(program, providers=["CPUExecutionProvider"])

    def run(**inputs):
        fed = {one.name: inputs[one.name].numpy() for one in loaded.get_inputs()}
        return torch.from_numpy(loaded.run(None, fed)[0])

    return run


EXPORTERS = {
    "jit.trace": traced,
    "torch.export": exported(),
    "torch.export strict": exported(strict=True),
    "torch.export eager": exported(backend="eager"),
    "torch.export eager strict": exported(strict=True, backend="eager"),
    "onnx dynamo=False": onnx(dynamo=False),
    "onnx dynamo=True": onnx(dynamo=True),
}
#: The cases of the CPU lane: those that one exporter alone got wrong before, and quick ones.
FAST = {
    *(("jit.trace", name) for name in ("BertForMaskedLM", "EncoderDecoderModel")),
    *(("torch.export", name) for name in ("BertForMaskedLM", "OpenAIGPTModel")),
    ("torch.export eager", "RobertaForSequenceClassification"),
    *(("onnx dynamo=False", name) for name in ("BertModel", "T5EncoderModel", "OpenAIGPTModel")),
    *(("onnx dynamo=False", name) for name in ("EncoderDecoderModel", "GPT2LMHeadModel")),
    ("onnx dynamo=False", "ModernBertModel"),
    ("onnx dynamo=True", "BertForMaskedLM"),
}
TABLE = [
    pytest.param(
        exporter,
        name,
        marks=[
            *([] if (exporter, name) in FAST else [pytest.mark.slow]),
            *([needs_onnx] if "onnx" in exporter else []),
        ],
    )
    for exporter in EXPORTERS
    for name in NAMES
]


@pytest.mark.parametrize(("exporter", "name"), TABLE)
def test_a_program_computes_what_the_model_does(exporter, name):
    model, parent = both(name)
    inputs = batch_of(name, *BATCHES[0])
    if "jit" not in exporter and "dynamo=False" not in exporter:
        model.config.use_cache = False  # torch.export does not know caches
        for part in model.modules():
            if hasattr(part, "config"):
                part.config.use_cache = False
    program = EXPORTERS[exporter](model, inputs)
    torch._dynamo.reset()
    print(f"{exporter} | {name} | {hold(name, program, parent):.1e}")


def of_class(name, config, padding, batch, length):
    """``batch_of`` for a class with any head."""
    inputs = batch_of(name, padding, batch, length)
    if name.endswith("QuestionAnswering") or "SequenceClass" in name:
        inputs = {key: value for key, value in inputs.items() if "decoder" not in key}
    eos = getattr(config, "eos_token_id", None)
    if has_decoder(name) and eos is not None:  # EOS ends each source, and stands nowhere else
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        ids[ids == eos] = 6
        ids[torch.arange(batch), (mask * torch.arange(length)).argmax(1)] = eos
    if name.endswith(("MultipleChoice", "DoubleHeadsModel")):
        inputs = {key: one[:, None].repeat(1, CHOICES, 1) for key, one in inputs.items()}
    if name.endswith("DoubleHeadsModel"):
        inputs["mc_token_ids"] = torch.full((batch, CHOICES), length - 1)
    if name == "OpenAIGPTDoubleHeadsModel":
        inputs["attention_mask"] = inputs["attention_mask"].flatten(0, 1)
    return inputs


WAYS = {
    "class": lambda ours, stock: ours,
    "accelerate": lambda ours, stock: fastplm.accelerate(stock),
    "name": lambda ours, stock: stock.set_attn_implementation("fastplm") or stock,
}


def _is_slow(name, way):
    return name not in BACKBONES or (way == "name" and name not in ("BertModel", "ModernBertModel"))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] * _is_slow(name, way))
        for name in CLASSES
        for way in WAYS
    ],
)
def test_a_trace_of_every_class_is_the_parent(name, way):
    """On texts of one token, and on those longer than any window, with a mask and without."""
    ours, parent = pair(name)
    if way == "name" and attention_of(type(parent)) != "interface":
        pytest.skip("its attention has no choice of a name")
    model = WAYS[way](ours, copy.deepcopy(parent))
    # The parent's head reads the first place, which is padding there.
    batches = [one for one in BATCHES if one[0] != "left" or not name.startswith("ModernBertForS")]
    for masked in (True, False):
        program = None
        for batch in (*batches, *([] if has_decoder(name) else [("none", 2, 1)])):
            inputs = of_class(name, parent.config, *batch)
            if not masked:
                inputs = {key: one for key, one in inputs.items() if "attention" not in key}
            if program is None:
                function = Plain(model, tuple(inputs))
                program = torch.jit.trace(function, tuple(inputs.values()), check_trace=False)
            with torch.no_grad():
                found, expected = program(*inputs.values()), first(parent(**inputs))
            if masked:
                mask = inputs["attention_mask"].view(inputs["input_ids"].shape)
                mask = inputs.get("decoder_attention_mask", mask).bool()
                if found.shape[: mask.dim()] == mask.shape:
                    found, expected = found[mask], expected[mask]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_of_four_dimensions_is_that_of_all_layers(way):
    """In ModernBERT's parent it has no window."""
    ours, parent = pair("ModernBertModel")
    parent.set_attn_implementation("sdpa")  # "eager" takes no booleans
    model = WAYS[way](ours, copy.deepcopy(parent))
    inputs = batch_of("ModernBertModel", "right", 3, 17)
    keys = inputs["attention_mask"].bool()
    for mask in (keys[:, None, None], keys[:, None, None] & torch.ones(17, 17).tril(3).bool()):
        inputs["attention_mask"] = mask
        expected = parent(**inputs)[0][keys]
        torch.testing.assert_close(model(**inputs)[0][keys], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]
)
def test_a_trace_of_a_loss_takes_other_labels(name):
    model, parent = pair(name)
    given = []
    for seed, padding in enumerate(("right", "left", "full")):
        torch.manual_seed(seed)
        inputs = inputs_of(name, model.config, PADDINGS[padding])
        given.append({k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)})

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *tensors):
            return self.model(**dict(zip(given[0], tensors, strict=True))).loss

    program = torch.jit.trace(Loss(), tuple(given[0].values()))
    torch.jit.save(program, io.BytesIO())

    def run(model):
        return {"out": torch.stack([first(model(**inputs)) for inputs in given])}

    with torch.no_grad():
        out = torch.stack([program(*inputs.values()) for inputs in given])
        bases = [base[0]["out"] for base in _measures(parent, run)]
        gold = run(copy.deepcopy(parent).double())["out"]
    check_error(name, out, gold, bases, FORWARD_FACTOR)


class Step(torch.nn.Module):
    """A step of generation: ids [B, Tq] after keys and values [B, H, Tp, D] of two layers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, *past):
        cache = DynamicCache()
        for layer in range(2):
            cache.update(*past[2 * layer : 2 * layer + 2], layer)
        return self.model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)[0]


@pytest.mark.parametrize("attention", ["drop-in", "attention only"])
def test_a_traced_step_of_one_token_takes_several(attention):
    """Such a program once attended to no token after the first, or to all."""
    model, parent = pair("GPT2LMHeadModel")
    if attention != "drop-in":
        model = transformers.GPT2LMHeadModel(copy.deepcopy(parent.config)).eval()
        model.set_attn_implementation("fastplm")
        model.load_state_dict(parent.state_dict())

    def inputs(queries, past):
        mask = torch.ones(2, past + queries, dtype=torch.long)
        mask[1, :2] = 0
        return torch.randint(4, 37, (2, queries)), mask, *torch.randn(4, 2, 2, past, 8)

    with torch.no_grad():
        program = torch.jit.trace(Step(model), inputs(1, 4))
        given = [inputs(*sizes) for sizes in ((1, 4), (1, 7), (2, 5), (3, 3))]
        out = torch.cat([program(*one).flatten() for one in given])

        def run(model):
            return {"out": torch.cat([Step(model)(*one).flatten() for one in given])}

        bases = [base[0]["out"] for base in _measures(parent, run)]
        gold_model = copy.deepcopy(parent).double()
        given = [(*one[:2], *(tensor.double() for tensor in one[2:])) for one in given]
        gold = run(gold_model)["out"]
    check_error(attention, out, gold, bases, FORWARD_FACTOR)


def test_a_capacity_is_refused_where_its_check_would_be_lost():
    model, inputs = pair("BertModel")[0], batch_of("BertModel", *BATCHES[0])

    def forward(ids, mask):
        return model(ids, mask, unpad=12)[0]

    with pytest.raises(UnsupportedError, match="Leave it out"):
        torch.jit.trace(forward, tuple(inputs.values()))


def test_a_trace_in_training_drops_other_weights_in_each_run():
    config = config_of("BertModel", hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    model, inputs = models.BertModel(config), batch_of("BertModel", *BATCHES[0])
    program = Plain(model, tuple(inputs)).train()
    program = torch.jit.trace(program, tuple(inputs.values()), check_trace=False)
    runs = [program(*inputs.values()) for _ in range(2)]
    assert not torch.equal(*runs)
    torch.manual_seed(0)
    again = program(*inputs.values())
    torch.manual_seed(0)
    assert torch.equal(program(*inputs.values()), again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForMaskedLM", "T5EncoderModel"])
def test_accelerated_and_restored_models_are_traced(name):
    _, parent = pair(name)
    inputs = batch_of(name, *BATCHES[0])
    stock = type(parent)._from_config(copy.deepcopy(parent.config), attn_implementation="sdpa")
    stock.eval().load_state_dict(parent.state_dict())
    other = batch_of(name, *BATCHES[2])
    with torch.no_grad():
        expected = first(stock(**other))
        hold(name, traced(fastplm.accelerate(stock), inputs), parent)
        program = traced(fastplm.restore(stock), inputs)
        assert torch.equal(program(**other), expected)


OTHERS = {
    "DistilBertModel": dict(dim=16, n_layers=2, n_heads=2, hidden_dim=24, dropout=0.0),
    "LlamaForCausalLM": dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        use_cache=False,
    ),
}


class OfTokens(torch.nn.Module):
    """A model as a function of ids and mask."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        return first(self.model(input_ids=input_ids, attention_mask=attention_mask))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "exporter",
    [
        "jit.trace",
        *(
            pytest.param(exporter, marks=[pytest.mark.slow, *[needs_onnx] * ("onnx" in exporter)])
            for exporter in ("torch.export", "onnx dynamo=False", "onnx dynamo=True")
        ),
    ],
)
def test_attention_alone_in_other_models(exporter, name):
    kind = getattr(transformers, name)
    config = kind.config_class(vocab_size=37, max_position_embeddings=20, **OTHERS[name])
    parent = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    model = kind._from_config(config, attn_implementation="fastplm").eval()
    model.load_state_dict(parent.state_dict())
    export = EXPORTERS[exporter]
    if exporter == "torch.export" and name == "LlamaForCausalLM":
        pytest.skip("grouped heads are PyTorch's, so there is no operator of ours to look for")
    if exporter == "onnx dynamo=False":
        # The exporter makes an input of each default that is a number, such as logits_to_keep.
        model = OfTokens(model).eval()
    program = export(model, batch_of(name, *BATCHES[0]))
    torch._dynamo.reset()
    print(f"{exporter} | {name} | {hold(name, program, parent):.1e}")


@needs_onnx
def test_the_attention_layer_keeps_no_length():
    layer, file = FusedAttention(16, 2).eval(), io.BytesIO()
    torch.onnx.export(
        Plain(layer, ("input",)),
        (torch.randn(2, 7, 16),),
        file,
        input_names=["query"],
        dynamic_axes={"query": {0: "batch", 1: "length"}},
        dynamo=False,
    )
    other = torch.randn(3, 9, 16)
    with torch.no_grad(), fastplm.use_backend("eager"):
        gold, base = copy.deepcopy(layer).double()(other.double()), layer(other)
    check_error("layer", session(file.getvalue())(query=other), gold, [base], FORWARD_FACTOR)


@pytest.mark.slow
@needs_onnx
def test_an_exported_program_with_our_operators_is_refused_by_onnx():
    model, inputs = pair("BertModel")[0], batch_of("BertModel", *BATCHES[0])
    program = torch.export.export(model, (), inputs)
    with pytest.raises(torch.onnx.OnnxExporterError) as caught:
        torch.onnx.export(program, dynamo=True, verbose=False)
    assert re.search(r"fastplm\.attention", str(caught.value.__cause__ or caught.value))
