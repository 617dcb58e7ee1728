"""CUDA graphs of training steps, on the stand-in of ``recorder.py``."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, is_dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from transformers import BertConfig
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput

import fastplm
from fastplm import graphs, models
from fastplm.errors import ArgumentValueError
from fastplm.graphs import GraphedStep, _split
from fastplm.models._ragged import RaggedBatch

from .recorder import record_graphs

CONFIG = BertConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=24,
)
LENGTHS = {"a": (16, 9, 13), "b": (3, 16, 5), "c": (16, 16, 16)}


@pytest.fixture
def recorded(monkeypatch):
    return record_graphs(monkeypatch)


def batch(kind, seed=0):
    """A batch of one of few shapes, as the collator with ``unpad`` makes them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(LENGTHS[kind])
    mask = (torch.arange(16) < lengths[:, None]).long()
    ids = torch.randint(5, 61, mask.shape, generator=generator)
    positions = torch.stack((torch.zeros(3), lengths - 1)).long().flatten()
    positions = positions + torch.arange(3).repeat(2) * 16
    labels = torch.full_like(ids, -100).flatten()
    labels[positions] = ids.flatten()[positions]
    rows = RaggedBatch.in_steps_on_cpu(mask)
    made = {"input_ids": ids, "labels": labels.view_as(ids), "masked_positions": positions}
    made |= {"sample_index": torch.arange(3) + seed, "unpad": rows is not None and rows}
    return made | ({"attention_mask": mask} if rows is not None else {})


def built(**options):
    torch.manual_seed(0)
    model = models.BertForMaskedLM(copy.deepcopy(CONFIG)).train()
    return model, torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True, **options)


def eager(model, optimizer, *batches, norm=None):
    """One step of accumulated batches, as without graphs. Returns the losses."""
    losses = []
    for each in batches:
        loss = model(**each).loss
        loss.backward()
        losses.append(loss.detach())
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
    optimizer.step()
    model.zero_grad()
    return losses


def both(change=None, kinds="ababab", at=3, **options):
    """(losses and weights of steps with graphs, those without), ``change``d before one step."""
    found = []
    for graphed in (True, False):
        model, optimizer = built()
        step = GraphedStep(model, optimizer, **options) if graphed else None
        torch.manual_seed(1)  # of dropout
        losses = []
        for number, kind in enumerate(kinds):
            if number == at and change is not None:
                change(model, optimizer)
            given = batch(kind, number)
            if step is None:
                losses += eager(model, optimizer, given, norm=options.get("max_grad_norm"))
            else:
                losses.append(step(**given))
        found.append((torch.stack(losses), [*model.parameters()]))
    return found


def check_equal(found, exact=True):
    (losses, weights), (gold, others) = found
    close = dict(rtol=0, atol=0) if exact else {}
    torch.testing.assert_close(losses, gold, **close)
    for weight, other in zip(weights, others, strict=True):
        torch.testing.assert_close(weight, other, **close)


# --- steps are those without graphs ---------------------------------------------------------------


def test_steps_are_those_without_graphs(recorded):
    """Losses and weights are the same bits, dropout included; each shape is captured once."""
    check_equal(both(kinds="abcabcabc"))
    # Forward and backward of three shapes; the optimizer was captured once.
    assert recorded.count("capture") == 4
    assert recorded[-2:] == ["replay"] * 2


def test_gradients_are_clipped(recorded):
    check_equal(both(kinds="aaaa", max_grad_norm=0.1), exact=False)


@pytest.mark.parametrize("norms", [(0.1, None), (0.1, 0.01), (0.01, 100.0), (None, 0.1)])
def test_another_max_grad_norm_is_used(recorded, norms):
    found = []
    for graphed in (True, False):
        model, optimizer = built()
        step = GraphedStep(model, optimizer, max_grad_norm=norms[0]) if graphed else None
        torch.manual_seed(1)
        losses = []
        for number in range(8):
            norm, given = norms[number >= 4], batch("a", number)
            if step is None:
                losses += eager(model, optimizer, given, norm=norm)
            else:
                step.max_grad_norm = norm
                losses.append(step(**given))
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found)


def test_a_clipped_gradient_that_is_not_used_changes_no_later_step(recorded):
    """As where its norm is not finite."""
    found = []
    for skips in (True, False):
        model, optimizer = built()
        step = GraphedStep(model, optimizer, max_grad_norm=0.1)
        for number in range(8):
            if skips and number == 5:
                step.backward(**batch("a", 50))
                step.clip()
                model.zero_grad()
            torch.manual_seed(number)
            loss = step(**batch("a", number))
        found.append((loss, [*model.parameters()]))
    check_equal(found)


def test_results_are_not_overwritten_by_later_steps(recorded):
    model, optimizer = built()
    step = GraphedStep(model, optimizer)
    losses = [step(**batch("a", seed)) for seed in range(6)]
    assert len({loss.item() for loss in losses}) == 6
    assert all(loss.grad_fn is None and not loss.requires_grad for loss in losses)


@pytest.mark.parametrize("kinds", ["aa", "ab", "cab"])
def test_accumulated_gradients(recorded, kinds):
    """Micro-batches of any shapes, first met in any place: some are captured, others not yet."""
    found = []
    for graphed in (True, False):
        model, optimizer = built()
        step = GraphedStep(model, optimizer) if graphed else None
        torch.manual_seed(1)
        losses = []
        for number in range(5):
            given = [batch(kind, 10 * number + i) for i, kind in enumerate(kinds)]
            given = given[number % 2 :]  # so that each shape is now first, now added
            if step is None:
                losses += eager(model, optimizer, *given)
                continue
            losses += [step.backward(**each) for each in given]
            step.update()
            model.zero_grad()
        found.append((torch.stack(losses), [*model.parameters()]))
    check_equal(found)
    assert "replay" in recorded


def test_gradients_of_the_user_are_added_to(recorded):
    """Zeros, as of ``zero_grad(set_to_none=False)``, and gradients of another loss."""
    found = []
    for graphed in (True, False):
        model, optimizer = built()
        step = GraphedStep(model) if graphed else None
        grads = []
        for seed in range(5):
            torch.manual_seed(seed)
            model.zero_grad(set_to_none=seed % 2 == 0)
            sum(weight.square().sum() for weight in model.parameters()).backward()
            given = batch("a", seed)
            step.backward(**given) if graphed else model(**given).loss.backward()
            grads += [weight.grad.clone() for weight in model.parameters()]
        found.append((torch.zeros(()), grads))
    check_equal(found)
    assert recorded.count("replay") == 4


# --- nothing stale is replayed --------------------------------------------------------------------


def set_rate(model, optimizer):
    optimizer.param_groups[0]["lr"] = 0.25


def set_rate_tensor(model, optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)


def set_decay(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.5


def add_group(model, optimizer):
    group = optimizer.param_groups[0]
    optimizer.add_param_group({"params": [group["params"].pop()], "lr": 0.25})


def resume(model, optimizer):
    """The states of another training, as a resumed run loads them."""
    other, theirs = built()
    for seed in range(3):
        eager(other, theirs, batch("b", seed))
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    optimizer.param_groups[0]["lr"] = 2**-5


def assign(model, optimizer):
    weights = {name: 2 * weight for name, weight in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    optimizer.param_groups[0]["params"][:] = model.parameters()
    optimizer.state.clear()


def replace_data(model, optimizer):
    for weight in model.parameters():
        weight.data = weight.data * 2


def write_in_place(model, optimizer):
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)


def to_double(model, optimizer):
    model.double()
    optimizer.state.clear()


def replace_layer(model, optimizer):
    layers = model.bert.encoder.layer
    layers[1] = layers[0]


def remove_layer(model, optimizer):
    del model.bert.encoder.layer[1]


def freeze(model, optimizer):
    model.bert.embeddings.requires_grad_(False)


def untie(model, optimizer):
    weight = torch.nn.Parameter(model.cls.predictions.decoder.weight.detach() * 2)
    model.cls.predictions.decoder.weight = weight
    optimizer.param_groups[0]["params"].append(weight)


def evaluate(model, optimizer):
    model.eval()


def drop_nothing(model, optimizer):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def other_activation(model, optimizer):
    model.bert.encoder.layer[0].intermediate.intermediate_act_fn = torch.nn.ReLU()


def other_attention(model, optimizer):
    model.set_attn_implementation("sdpa")


def replace_buffer(model, optimizer):
    embeddings = model.bert.embeddings
    embeddings.position_ids = embeddings.position_ids.flip(1)


CHANGES = (set_rate, resume, assign, replace_data, to_double, freeze, evaluate, drop_nothing)
FURTHER = (
    *(set_rate_tensor, set_decay, add_group, write_in_place, replace_layer, remove_layer, untie),
    *(other_activation, other_attention, replace_buffer),
)
FURTHER_ONES = [pytest.param(change, marks=pytest.mark.slow) for change in FURTHER]


@pytest.mark.parametrize("change", [*CHANGES, *FURTHER_ONES], ids=lambda change: change.__name__)
def test_what_changes_is_not_replayed_as_it_was(recorded, change):
    """Three steps before it and three after it, as without graphs; the last ones are replayed."""
    exact = change not in (set_rate, set_rate_tensor)
    check_equal(both(change, kinds="aaaaaa"))
    assert recorded[-1] == "replay"
    assert exact or recorded.count("capture") == 2  # learning rates are copied


def test_a_changed_setting_of_the_process_is_not_replayed(recorded):
    """Autocast, and a backend that is forced."""
    model, optimizer = built()
    step = GraphedStep(model)
    blocks = (
        *(contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)),
        *(fastplm.use_backend("eager"), contextlib.nullcontext()),
    )
    for block in blocks:
        with block:
            for seed in range(3):
                torch.manual_seed(seed)
                loss = step.backward(**batch("a", seed))
                torch.manual_seed(seed)
                assert torch.equal(loss, model(**batch("a", seed)).loss)
    assert recorded.count("capture") == 4 - 1  # the last block has the settings of the first


def test_weights_of_an_open_autocast_block_are_not_replayed(recorded):
    """Autocast keeps the weights of a block in bf16: graphs, and steps after them, cast anew."""
    model, optimizer = built()
    step = GraphedStep(model, optimizer)
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for kind in "aaab":
            torch.manual_seed(0)
            torch.clear_autocast_cache()
            expected = model(**batch(kind)).loss
            torch.manual_seed(0)
            found.append(step(**batch(kind)))
            assert torch.equal(found[-1], expected)
    assert "replay" in recorded


# --- steps that are no graphs ---------------------------------------------------------------------


def hook(model):
    model.bert.encoder.layer[0].register_forward_hook(lambda *_: None)


def hook_of_a_weight(model):
    next(model.parameters()).register_post_accumulate_grad_hook(lambda *_: None)


def checkpoint(model):
    model.gradient_checkpointing_enable()


def drop_layers(model):
    model.config.encoder_layerdrop = 0.5


def count_rows(given):
    del given["unpad"]


def want_a_gradient(given):
    weight = torch.zeros(3, 16, CONFIG.hidden_size, requires_grad=True)
    given["inputs_embeds"] = weight + 0.1
    del given["input_ids"]


@pytest.mark.parametrize(
    "change, words",
    [
        *(
            (drop_layers, "layerdrop"),
            (hook, "has hooks"),
            (hook_of_a_weight, "has hooks"),
            (checkpoint, "checkpointing"),
        ),
        *((count_rows, "unpad=True"), (want_a_gradient, "needs a gradient")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_steps_that_are_computed_as_usual(recorded, change, words):
    """One line says why."""
    found = []
    for graphed in (True, False):
        model, optimizer = built()
        if change not in (count_rows, want_a_gradient):
            change(model)
        lines = []
        step = GraphedStep(model, optimizer, say=lines.append)
        torch.manual_seed(1)
        losses = []
        for seed in range(4):
            given = batch("a", seed)
            if change in (count_rows, want_a_gradient):
                change(given)
            losses += [step(**given)] if graphed else eager(model, optimizer, given)
        found.append((torch.stack(losses), [*model.parameters()]))
        if graphed:
            assert len(lines) == 1 and words in lines[0]
    check_equal(found)
    assert not recorded


def test_a_cpu_has_no_graphs(caplog):
    model, optimizer = built()
    lines = []
    step = GraphedStep(model, optimizer, max_grad_norm=1.0, say=lines.append)
    for seed in range(3):
        step(**batch("a", seed))
    assert len(lines) == 1 and lines[0].startswith("The model is on cpu")


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Held:
    one: Any
    other: Any = field(init=False, default=None)


def _held(one):
    made = Held(one)
    object.__setattr__(made, "other", [one])
    return made


#: What a step may get and return, made of a tensor.
KINDS = {
    "None": lambda x: None,
    "a tensor": lambda x: x,
    "a list": lambda x: [x, [x]],
    "an empty list": lambda x: [],
    "a tuple": lambda x: (x, (), [x]),
    "a named tuple": lambda x: Pair(x, [Pair(None, x)]),
    "a result of torch": lambda x: x.max(0),
    "a size": lambda x: (x, x.shape),
    "a dict": lambda x: {"a": x, 1: {"b": [x]}},
    "an ordered dict": lambda x: OrderedDict(b=x, a=(x,)),
    "a default dict": lambda x: defaultdict(list, {"a": [x]}),
    "a dataclass": _held,
    "an output": lambda x: MaskedLMOutput(loss=x.sum(), hidden_states=(x, x)),
    "an output without a loss": lambda x: BaseModelOutput(last_hidden_state=x),
    "other values": lambda x: [x, 1, 2.0, "a", True, torch.float32],
}


def kinds_in(value):
    """The types of a value and of all in it."""
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.requires_grad
    if isinstance(value, dict):
        return type(value), [(name, kinds_in(each)) for name, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [*map(kinds_in, value)]
    return type(value), kinds_in(vars(value)) if is_dataclass(value) else value


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gets_and_returns_what_a_plain_one_does(recorded, kind):
    """On a CPU, and of a graph."""
    make, found = KINDS[kind], []

    def function(**given):
        found.append(kinds_in(given["x"]))
        (model.weight * 2).sum().backward()
        return make(model.weight.detach() * 2)

    for device in ("cpu", "cuda"):
        model = torch.nn.Linear(3, 2, bias=False)
        step = GraphedStep(model, function=function, say=str)
        if device == "cpu":
            step._why_not = lambda *_: "The model is on a CPU"
        x = make(torch.arange(6.0).view(3, 2))
        for _ in range(3):
            out = step(x=x)
            expected = make(model.weight.detach() * 2)
            assert kinds_in(out) == kinds_in(expected)
            assert all(map(torch.equal, _split(out)[1], _split(expected)[1]))
            assert all(one == kinds_in(x) for one in found)
    assert recorded


@pytest.mark.parametrize(
    "config", [None, {"layerdrop": 0.0, 1: 2}, Pair(1, 2), 3, "a", SimpleNamespace(layerdrop=0.0)]
)
def test_a_module_may_have_any_config(config):
    steps = []
    for graphed in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2))
        model.config, model[0].config = config, config
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def function(x, model=model):
            loss = model(x).square().sum()
            loss.backward()
            return loss

        step = GraphedStep(model, optimizer, function=function, say=str)
        for _ in range(2):
            if graphed:
                step(x=torch.ones(4, 3))
            else:
                function(torch.ones(4, 3))
                optimizer.step()
                optimizer.zero_grad()
        steps.append([*model.parameters()])
    assert all(map(torch.equal, *steps))


def test_a_changed_dict_of_a_module_makes_a_new_graph(recorded):
    model = torch.nn.Linear(3, 2)
    model.config = {"factor": 1.0}

    def function(x):
        loss = (model(x) * model.config["factor"]).sum()
        loss.backward()
        return loss

    step, losses = GraphedStep(model, function=function, say=str), []
    for factor in (1.0, 1.0, 1.0, 2.0):
        model.config["factor"] = factor
        losses.append(float(step(x=torch.ones(4, 3))))
    assert losses == [losses[0]] * 3 + [2 * losses[0]]


def test_a_step_that_reads_a_value_is_computed_as_usual(recorded):
    model, optimizer = built()
    lines = []

    def read(**inputs):
        loss = model(**inputs).loss
        loss.backward()
        assert loss.item() > 0
        return {"loss": loss}

    step = GraphedStep(model, optimizer, function=read, say=lines.append)
    other, theirs = built()
    for seed in range(4):
        torch.manual_seed(seed)
        ours = step(**batch("a", seed))["loss"]
        torch.manual_seed(seed)
        assert [ours] == eager(other, theirs, batch("a", seed))
    assert len(lines) == 1 and "capturing" in lines[0]


def test_there_are_not_more_graphs_than_there_is_memory(recorded, monkeypatch):
    monkeypatch.setattr(graphs, "_MOST", 2)
    lines = []
    check_equal(both(kinds="abcabcabc", say=lines.append))
    assert len(lines) == 1 and "unpad=True" in lines[0]
    assert recorded.count("capture") == 3


def test_an_optimizer_that_cannot_be_captured_steps_as_usual(recorded):
    found, lines = [], []
    for graphed in (True, False):
        model, _ = built()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = GraphedStep(model, optimizer, max_grad_norm=0.1, say=lines.append)
        torch.manual_seed(0)
        losses = []
        for seed in range(4):
            given = batch("a", seed)
            losses += [step(**given)] if graphed else eager(model, optimizer, given, norm=0.1)
        found.append((torch.stack(losses), [*model.parameters()]))
    check_equal(found)
    assert len(lines) == 1 and "SGD" in lines[0]


def test_a_capacity_too_small_says_so_before_any_kernel_runs(recorded):
    model, optimizer = built()
    given = batch("a") | {"unpad": 37}
    with pytest.raises(ArgumentValueError, match="`unpad` got 37 for a batch of 38 tokens"):
        GraphedStep(model, optimizer)(**given)


@pytest.mark.parametrize("norm", [0, -1.0])
def test_a_norm_that_clips_all_is_refused(norm):
    with pytest.raises(ArgumentValueError, match="max_grad_norm"):
        GraphedStep(torch.nn.Linear(2, 2), max_grad_norm=norm)
