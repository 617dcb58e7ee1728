"""torch.compile(dynamic=True): one graph for batches of all shapes, in every class.

``pytest tests/models/test_graphs.py -m "slow or not slow" -s -q`` prints the number of graphs of
every class, and that of its parent.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config
import transformers

from fastplm import models
from fastplm.finetune.bart_translation import BartForTranslation

from ..finetune import test_bart_translation
from . import test_electra_joint, test_encoder_decoder
from .conftest import (
    CLASSES,
    CLONED,
    LENGTH,
    ROWS,
    TARGET,
    config_of,
    has_decoder,
    inputs_of,
    parent_of,
)

#: (batch, length). A size of 1 or a length of 2 (shifted labels) is a constant of a graph.
SHAPES = ((4, 9), (3, 7), (5, 12), (2, 16), (6, 5), (4, 18), (8, 11), (7, 3), (3, 17), (9, 6))
#: The packed rows of ``unpad``: more than some batches have, fewer than others.
CAPACITY = 60
#: The cases to count graphs in: whether the model trains, and the option ``unpad``.
CASES = {
    "training": (True, None),
    "inference": (False, None),
    "training, unpad": (True, CAPACITY),
    "inference, unpad": (False, CAPACITY),
}
JOINT, TRANSLATION = "ElectraForJointPreTraining", "BartForTranslation"
GENERATORS = ("ForConditionalGeneration", TRANSLATION, "EncoderDecoderModel")
#: One class for each mixin, and its compiler backend: ``aot_eager`` traces the backward, too.
SAMPLE = {
    ("BertForMaskedLM", "training"): "aot_eager",
    ("AlbertForPreTraining", "training, unpad"): "eager",
    ("BertForSequenceClassification", "inference, unpad"): "eager",
    ("GPT2DoubleHeadsModel", "training, unpad"): "eager",
    ("T5ForConditionalGeneration", "training, unpad"): "eager",
    ("EncoderDecoderModel", "inference, unpad"): "eager",
    (JOINT, "training, unpad"): "eager",
}


def made(name):
    """(the model, its parent or None, the configuration of its inputs) of a class."""
    if name == JOINT:
        return test_electra_joint.Step(test_electra_joint.build()), None, test_electra_joint.ENCODER
    if name == TRANSLATION:
        bart = transformers.BartForConditionalGeneration(test_bart_translation.CONFIG)
        model = BartForTranslation.from_bart(bart, 41, layers=1)
        return model, None, test_bart_translation.CONFIG
    config = test_encoder_decoder.config() if name == "EncoderDecoderModel" else config_of(name)
    if "SequenceClassification" in name:
        config.problem_type = "single_label_classification"  # else forward changes it
    ours = getattr(models, name)
    stock = parent_of(ours)._from_config(copy.deepcopy(config))
    stock.loss_type = stock.loss_type or "ForCausalLM"  # the default, which warns
    return ours(copy.deepcopy(config)), stock, config


def batch_of(name, config, batch, length):
    """The inputs of a class at any shape: those of a small batch, repeated or cut."""
    mask = (torch.arange(LENGTH) < torch.tensor([[6], [3], [5], [4]])).long()
    inputs = inputs_of(
        "BartForConditionalGeneration" if name == TRANSLATION else name, config, mask
    )
    if name == "OpenAIGPTDoubleHeadsModel":
        inputs["attention_mask"] = inputs["attention_mask"].view(inputs["input_ids"].shape)
    lengths = {LENGTH: length, TARGET: length // 2 + 2}
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            continue
        value = value[torch.arange(batch) % ROWS]
        if value.dim() > 1 and value.shape[-1] in lengths:
            old = value.shape[-1]
            value = value[..., torch.arange(lengths[old]) * old // lengths[old]]
        inputs[key] = value.contiguous()
    if "mc_token_ids" in inputs:
        inputs["mc_token_ids"] = inputs["mc_token_ids"].clamp(max=length - 1)
    if name == "OpenAIGPTDoubleHeadsModel":
        inputs["attention_mask"] = inputs["attention_mask"].flatten(0, 1)
    eos = getattr(config, "eos_token_id", None)
    if has_decoder(name) and eos is not None:  # EOS ends each source, and stands nowhere else
        ids = inputs["input_ids"].masked_fill_(inputs["input_ids"] == eos, 5)
        ids[torch.arange(batch), inputs["attention_mask"].sum(1) - 1] = eos
    return inputs


def batches_of(name, config, case, ours):
    """The batches of ``SHAPES``, with the options of a case."""
    trains, unpad = CASES[case]
    generates = name.endswith(GENERATORS)
    for batch, length in SHAPES:
        torch.manual_seed(batch)
        inputs = batch_of(name, config, batch, length)
        if name == JOINT:
            ids, mask = inputs["input_ids"], inputs["attention_mask"]
            yield {"ids": ids, "mask": mask, "index": torch.arange(batch)}
            continue
        for key in [key for key in inputs if "label" in key or key.endswith("_positions")]:
            if trains:
                continue
            target = inputs.pop(key)
            if generates:
                inputs["decoder_input_ids"] = target.clamp(min=0)
        if ours and unpad is not None:
            choices = name.endswith(("DoubleHeadsModel", "MultipleChoice"))
            inputs["unpad"] = (3 * unpad if choices else unpad) + batch  # another N for each batch
            if generates:
                inputs["decoder_unpad"] = 3 * unpad // 4
        yield inputs


def graphs(model, batches, trains, backend):
    """The number of graphs that a model is compiled to for all of these batches."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model.train(trains), backend=counter, fullgraph=True, dynamic=True)
    made = 0
    with torch._dynamo.config.patch(recompile_limit=2 * len(SHAPES)):
        for inputs in batches:
            calls = counter.frame_count
            with torch.set_grad_enabled(trains):
                out = compiled(**inputs)
            loss = out.get("loss")
            if loss is not None:
                torch.testing.assert_close(loss, model(**inputs).loss)
            if trains:
                (out[0].sum() if loss is None else loss).backward()
            # A graph may need two calls: at first PyTorch tries to keep numbers as symbols.
            made += counter.frame_count > calls
    return made


def count(name, case, ours=True, backend="eager"):
    torch.manual_seed(0)
    model, stock, config = made(name)
    if name == JOINT:
        model.unpad = CASES[case][1]
    model = model if ours else stock
    return graphs(model, batches_of(name, config, case, ours), CASES[case][0], backend)


def check(name, case, backend):
    found = count(name, case, backend=backend)
    print(f"\ngraphs: {name}, {case}: {found}")
    assert found == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), SAMPLE)
def test_one_graph_serves_batches_of_ten_shapes(name, case):
    check(name, case, SAMPLE[name, case])


ALL = [*CLASSES, "EncoderDecoderModel", TRANSLATION, JOINT]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["training", "inference, unpad"])
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_inductor_makes_one_of_any_shape(name, case):
    """Inductor's own passes over a graph may fail on symbols.

    A graph from Inductor's cache brings the guards of the sizes that another run began with.
    """
    with torch._inductor.config.patch(force_disable_caches=True):
        check(name, case, "inductor")


#: Two cases a class, so that each one trains and does not, with ``unpad`` and without.
TURNS = (("training", "inference, unpad"), ("training, unpad", "inference"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for at, name in enumerate(ALL) for case in TURNS[at % 2]]
)
def test_one_graph_in_every_class(name, case):
    check(name, case, "eager")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["training", "inference"])
@pytest.mark.parametrize("name", [name for name, _ in SAMPLE if name != JOINT])
def test_the_parent_needs_one_too(name, case):
    """The parent needs one graph for the same calls, so fastplm's calls are not easier."""
    if (name, case) == ("EncoderDecoderModel", "training"):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="warn"):  # a warning breaks a graph
            count(name, case, ours=False)
        return
    found = count(name, case, ours=False)
    print(f"\ngraphs: {name} of Transformers, {case}: {found}")
    assert found == 1


def test_all_classes_are_here():
    heads = {name for name in models.__all__ if hasattr(getattr(models, name), "forward")}
    assert heads - {*CLONED, "DebertaV2ForPreTraining"} | {TRANSLATION} == set(ALL)
