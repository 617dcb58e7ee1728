"""Whole models under PyTorch's transforms: torch.func, forward-mode AD, exports."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import CompileConfig

import fastplm
from fastplm import models
from fastplm._backends import record_decisions
from fastplm.nn.linear import _warn_of_quantization
from fastplm.testing import KeptDouble, check_in_fp64

from ..samples import assert_same, check_mode, every_mode
from .conftest import PADDINGS, config_of, every_class, gradients, inputs_of, pair

#: A class of each family, and one whose last layer computes few rows.
NAMES = (
    "AlbertForPreTraining",
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "ElectraForPreTraining",
    "GPT2LMHeadModel",
    "OpenAIGPTLMHeadModel",
    "RobertaForMaskedLM",
    "T5ForConditionalGeneration",
)
every_family = pytest.mark.parametrize("name", NAMES)


def loss_of(model, inputs):
    """(the loss as a function of the parameters, the parameters)."""
    parameters = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), inputs)["loss"]

    return loss, parameters


@every_family
def test_torch_func_grad_is_that_of_the_parent(name):
    model, parent = pair(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])

    def found(model):
        return gradients(model, model(**inputs).loss)

    single = found(copy.deepcopy(parent))
    with KeptDouble():
        gold = found(parent.double())
        loss, parameters = loss_of(model.double(), inputs)
        out = torch.func.grad(loss)(parameters)
    check_in_fp64({name: out[name] for name in gold}, gold, single)
    assert not any(gradient.any() for name, gradient in out.items() if name not in gold)


@every_family
def test_tangents_are_those_of_the_parent(name):
    model, parent = pair(name)
    inputs = inputs_of(name, model.config, PADDINGS["right"])
    directions = {
        name: torch.linspace(-1, 1, weight.numel()).view_as(weight)
        for name, weight in model.named_parameters()
    }

    def tangent(model):
        loss, parameters = loss_of(model, inputs)
        along = {name: directions[name].to(weight.dtype) for name, weight in parameters.items()}
        return {"tangent": torch.func.jvp(loss, (parameters,), (along,))[1]}

    single = tangent(parent)
    with record_decisions() as decisions:
        tangent(model)
    assert {decision.backend for decision in decisions} == {"eager"}
    with KeptDouble():
        check_in_fp64(tangent(model.double()), tangent(parent.double()), single)


@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_vmap_of_samples_calls_for_no_issue(name, capfd, recwarn):
    """vmap over the embeddings, as for gradients of samples, prints no warning about fastplm's
    ops."""
    model = getattr(models, name)(config_of(name)).eval()
    embedded = torch.randn(3, 2, 7, model.config.hidden_size)

    def logits(rows):
        return model(inputs_embeds=rows).logits

    torch.set_warn_always(True)
    with torch.no_grad():
        batched = torch.vmap(logits)(embedded)
        expected = torch.stack([logits(rows) for rows in embedded])
    torch.set_warn_always(False)
    torch.testing.assert_close(batched, expected)
    printed = [capfd.readouterr().err, *(str(warning.message) for warning in recwarn)]
    assert not any("performance drop" in text for text in printed), printed


@every_family
def test_gradients_of_samples_are_those_one_by_one(name):
    """``vmap(grad(f))``, where labels, and so the rows that are computed, are batched."""
    model = getattr(models, name)(config_of(name)).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for option in {"dropout", "activation_dropout"} & vars(module).keys():
            setattr(module, option, 0.0)
    inputs = inputs_of(name, model.config, PADDINGS["none"])
    inputs = {key: one for key, one in inputs.items() if isinstance(one, Tensor)}
    inputs.pop("attention_mask", None)
    parameters = {key: weight.detach() for key, weight in model.named_parameters()}

    def loss(parameters, sample):
        sample = {key: one[None] for key, one in sample.items()}
        return torch.func.functional_call(model, parameters, (), sample)["loss"]

    found = torch.func.vmap(torch.func.grad(loss), (None, 0), randomness="same")(parameters, inputs)
    for at in range(inputs["input_ids"].shape[0]):
        sample = {key: one[at] for key, one in inputs.items()}
        one = torch.func.grad(loss)(parameters, sample)
        torch.testing.assert_close({key: each[at] for key, each in found.items()}, one)


@pytest.mark.slow
def test_a_static_cache_takes_one_graph():
    """One graph serves all steps up to the last, in which the cache's mask masks no key."""
    config = config_of("T5ForConditionalGeneration")
    graphs = []

    def record(graph, _, **options):
        graphs.append(graph)
        return graph.forward

    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend=record)
    compile_config._compile_all_devices = True
    model = models.T5ForConditionalGeneration(config).eval()
    model.generation_config.update(eos_token_id=None, forced_eos_token_id=None)
    model.generate(
        torch.randint(4, config.vocab_size, (2, 9)),
        max_new_tokens=6,
        do_sample=False,
        cache_implementation="static",
        compile_config=compile_config,
    )
    torch._dynamo.reset()
    assert len(graphs) == 1


class Plain(torch.nn.Module):
    """A model as a function of two tensors, to export."""

    def __init__(self, name):
        super().__init__()
        config = config_of(name)
        self.model = getattr(models, name)(config).eval()
        inputs = inputs_of(name, config, PADDINGS["right"])
        self.inputs = inputs["input_ids"], inputs["attention_mask"]

    def forward(self, ids, mask):
        out = self.model(ids, attention_mask=mask, return_dict=False)[0]
        return out * mask[..., None] if out.shape[:2] == mask.shape else out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "T5EncoderModel"])
def test_torch_export_keeps_operators_unless_told_otherwise(name, monkeypatch):
    model = Plain(name)

    def operators():
        program = torch.export.export(model, model.inputs)
        return program, {str(node.target).split(".")[0] for node in program.graph.nodes}

    assert "fastplm" in operators()[1]
    with fastplm.use_backend("eager"):
        program, names = operators()
    assert "fastplm" not in names
    torch.testing.assert_close(program.module()(*model.inputs), model(*model.inputs))
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    assert "fastplm" not in operators()[1]


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*:DeprecationWarning")
def test_quantization_warns_about_drop_in_linear_layers():
    """Quantization looks for the exact class nn.Linear; a subclass would silently stay in fp32."""
    parent = transformers.BertModel(config_of("BertModel"))
    model = models.BertModel(config_of("BertModel"))

    def quantized(model):
        changed = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
        return sum("quantized" in type(module).__module__ for module in changed.modules())

    _warn_of_quantization.cache_clear()
    with pytest.warns(UserWarning, match=r"fastplm\.restore\(model\)") as caught:
        assert quantized(model) == 0
    ours = [one for one in caught if "restore" in str(one.message)]
    assert len(ours) == 1 and "torch/ao/quantization" in ours[0].filename.replace("\\", "/")
    expected = quantized(parent)
    assert quantized(fastplm.restore(model)) == expected > 0


@every_mode
@pytest.mark.parametrize("trains", (False, True), ids=("evaluated", "trained"))
@every_class
def test_a_mode_leaves_nothing_behind(name, trains, mode):
    config = config_of(name)
    model, inputs = getattr(models, name)(config), inputs_of(name, config, PADDINGS["right"])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.2

    def call(model=model):
        torch.manual_seed(0)
        with torch.set_grad_enabled(trains):
            outputs = model.train(trains)(**inputs)
        return [one.detach() for one in tree_leaves(dict(outputs)) if isinstance(one, Tensor)]

    check_mode(mode, call)
    assert_same(call(), call(copy.deepcopy(model)))
