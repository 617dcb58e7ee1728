"""Whole models under PyTorch's transforms: torch.func, forward-mode AD, traces, exports."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import CompileConfig

from fastplm import models
from fastplm._backends import record_decisions
from fastplm.testing import KeptDouble, check_in_fp64

from .conftest import PADDINGS, inputs_of, parent_of, with_classes
from .test_contract import config_of

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


def pair(name):
    """A drop-in model, its parent with the same weights and attention in plain PyTorch; inputs."""
    config = with_classes(name, config_of(name))
    model = getattr(models, name)(copy.deepcopy(config)).eval()
    config._attn_implementation = "eager"
    parent = parent_of(type(model))(config).eval()
    parent.load_state_dict(model.state_dict())
    return model, parent, inputs_of(name, config, PADDINGS["right"])


def loss_of(model, inputs):
    """The loss as a function of the parameters, and those."""
    parameters = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (), inputs)["loss"]

    return loss, parameters


@every_family
def test_torch_func_grad_is_that_of_the_parent(name):
    model, parent, inputs = pair(name)

    def gradients(model):
        model.zero_grad()
        model(**inputs).loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters()}

    single = gradients(copy.deepcopy(parent))
    with KeptDouble():
        gold = gradients(parent.double())
        loss, parameters = loss_of(model.double(), inputs)
        out = torch.func.grad(loss)(parameters)
    gold = {name: gradient for name, gradient in gold.items() if gradient is not None}
    check_in_fp64({name: out[name] for name in gold}, gold, single)
    assert not any(gradient.any() for name, gradient in out.items() if name not in gold)


@every_family
def test_tangents_are_those_of_the_parent(name):
    model, parent, inputs = pair(name)
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


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_a_static_cache_takes_one_graph(name):
    """To the last step, in which the mask of the cache hides nothing."""
    config = config_of(name)
    graphs = []

    def record(graph, _, **options):
        graphs.append(graph)
        return graph.forward

    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend=record)
    compile_config._compile_all_devices = True
    model = getattr(models, name)(config).eval()
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
