"""The steps of all families: every variant has the same loss and gradients; FLOPs are counted."""

from __future__ import annotations

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
    if family == "deberta-v3":  # which projects its positions, and multiplies by all buckets
        buckets, width = 2 * config.position_buckets, config.hidden_size
        more = step.batch * step.seqlen * (buckets - step.seqlen)
        counted -= 4 * config.num_hidden_layers * width * (buckets * width + more)
    assert step.flops == 3 * counted


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


def test_every_family_has_a_file_and_cases():
    names = set()
    for family in steps.FAMILIES:
        for case in steps.cases(family):
            assert case.op == family and case.training_flops > 0 and case.tokens > 0
            assert case.dtype in (torch.float32, torch.bfloat16)
            names.add((case.op, case.label))
    assert len(names) == sum(len(steps.cases(family)) for family in steps.FAMILIES)
    assert steps.SIZES.keys() == steps.FAMILIES.keys()
