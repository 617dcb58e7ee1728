"""The steps of all families: every variant has the same loss and gradients; FLOPs are counted."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import steps
from fastplm.run import flops
from fastplm.testing import BudgetExceeded

CPU = torch.device("cpu")
OURS = steps.PATHS["fastplm"]
ROOM = steps.Path("fastplm", room=True)
every_family = pytest.mark.parametrize("family", steps.FAMILIES)


def small(family, **changed):
    return replace(steps.Step(f"{family}-tiny", 1, 1).small, **changed)


def check(step, path=OURS):
    steps.gate(step, steps.variant(step, path), None, step.make(CPU))


@every_family
def test_the_gate_lets_the_right_step_pass(family):
    for path in (OURS, ROOM):
        check(small(family), path)


def test_the_gate_in_bf16_lets_the_right_step_pass():
    check(small("bert", bf16=True))


@pytest.fixture
def scaled_by(monkeypatch):
    """``plant(factor)``: one weight of fastplm's model is wrong by this factor."""
    real = steps.build

    def plant(factor):
        def build(step, kind, *args):
            made = real(step, kind, *args)
            if kind == "fastplm":
                weight = next(p for p in made.parameters() if p.dim() == 2)
                with torch.no_grad():
                    weight.mul_(factor)
            return made

        monkeypatch.setattr(steps, "build", build)
        steps.passes.cache_clear()

    return plant


@every_family
def test_the_gate_refuses_a_wrong_step(family, scaled_by):
    scaled_by(1.001)
    with pytest.raises(BudgetExceeded):
        check(small(family))


def test_the_gate_in_bf16_refuses_a_wrong_step(scaled_by, monkeypatch):
    monkeypatch.setattr(steps, "check_in_fp32", lambda *args: None)
    scaled_by(1.2)
    with pytest.raises(BudgetExceeded, match="bf16"):
        check(small("bert", bf16=True))


def test_what_is_compiled_says_where_it_is_compared(monkeypatch):
    path = steps.PATHS["fastplm compiled"]
    for gpu, full, words in ((False, True, "on a GPU"), (True, False, "--full")):
        monkeypatch.setattr(steps, "GPU", gpu)
        monkeypatch.setattr(steps.SESSION, "full", full)
        with pytest.raises(steps.Unavailable, match=words):
            check(small("bert"), path)
        with pytest.raises(steps.Unavailable, match=words):
            steps.variant(small("bert"), path)(**small("bert").make(CPU))
    monkeypatch.setattr(steps.SESSION, "full", True)
    path.check()


@every_family
def test_the_work_is_what_transformers_multiplies(family, monkeypatch):
    """PyTorch's count, if every token is masked, without padding, with all pairs in attention."""
    monkeypatch.setattr(steps, "MASKED", 1.0)
    monkeypatch.setattr(flops, "_triangles", flops._squares)
    step = small(family, padding=0.0)
    batch = step.make(CPU)
    if family == "electra":
        batch["replaced_ids"] = batch["input_ids"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        steps.Path("eager").loss(steps.build(step, "eager", CPU), step, batch)
    counted = counter.get_total_flops()
    config = step.config()
    if family == "gpt2":  # Transformers also computes logits after the last token
        counted -= 2 * step.batch * config.n_embd * config.vocab_size
    assert step.flops == 3 * counted


@every_family
def test_padding_costs_no_work(family):
    step = small(family, seqlen=128, padding=0.0, vocab=30000)
    whole, half = step.flops, replace(step, padding=0.5).flops
    assert half < 0.55 * whole
    assert replace(step, padding=0.5).tokens <= 0.51 * step.tokens


@every_family
def test_room_is_enough_and_less_than_everything(family):
    step = small(family, batch=32, seqlen=128, padding=0.3)
    mask = step.make(CPU)["attention_mask"]
    room = ROOM._room(step)["unpad"]
    assert int(mask.sum()) <= room < mask.numel()
    assert step.tokens >= int(mask.sum())


def test_a_hand_written_electra_draws_what_it_judges():
    """The hand-written step's loss with certain draws is that with given replacements."""
    step = small("electra")
    batch = step.make(CPU)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    plain = steps.build(step, "eager", CPU)
    with torch.no_grad():
        bias = plain.generator.generator_lm_head.bias
        bias.zero_()[7] = 1e4
        drawn = plain(**inputs).loss
        sevens = inputs["input_ids"].masked_fill(inputs["labels"] != -100, 7)
        assert torch.equal(drawn, plain(**inputs, replaced_ids=sevens).loss)
        originals = torch.where(inputs["labels"] == -100, inputs["input_ids"], inputs["labels"])
        assert not torch.equal(drawn, plain(**inputs, replaced_ids=originals).loss)


def test_models_of_a_case_are_shared_and_others_dropped():
    step = small("bert")
    first = steps.model(step, "eager", CPU)
    assert steps.model(replace(step, batch=2, padding=0.0), "eager", CPU) is first
    assert steps.model(replace(step, dropout=0.1), "eager", CPU) is not first
    weights = copy.deepcopy(first.state_dict())
    for kind in ("sdpa", "fastplm"):
        other = steps.model(step, kind, CPU).state_dict()
        assert all(torch.equal(value, other[name]) for name, value in weights.items())


def test_sizes_are_the_published_ones():
    config = steps.Step("bert-large", 1, 1).config()
    with torch.device("meta"):
        model = steps.models.BertForMaskedLM(config)
    # The 335,141,888 of docs/models.md, less the pooler, plus the head's transform and biases.
    pooler, head = 1024 * 1024 + 1024, 1024 * 1024 + 1024 + 2 * 1024 + 30522
    assert sum(p.numel() for p in model.parameters()) == 335_141_888 - pooler + head


def test_every_family_has_a_file_and_cases():
    names = set()
    for family in steps.FAMILIES:
        for case in steps.cases(family):
            assert case.op == family and case.training_flops > 0 and case.tokens > 0
            assert case.dtype in (torch.float32, torch.bfloat16)
            names.add((case.op, case.label))
    assert len(names) == sum(len(steps.cases(family)) for family in steps.FAMILIES)
    assert steps.SIZES.keys() == steps.FAMILIES.keys()
