"""The layers of an encoder in one call of csrc/: the results, and when they run themselves."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import gc
import inspect
import itertools
import operator
import pickle
import weakref

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils import _pytree as pytree
from transformers import modeling_outputs
from transformers.activations import GELUActivation
from transformers.models.bert import modeling_bert

import fastplm
from fastplm import _explain, _extension, models
from fastplm._backends import record_notes
from fastplm._extension import unchanged
from fastplm._rules import ALONE
from fastplm.models import _encoder, _encoder_call, _measure
from fastplm.testing import (
    FORWARD_FACTOR,
    ReversedReductions,
    ShuffledReductions,
    check_error,
    rerounded,
)

pytestmark = pytest.mark.skipif(not _encoder_call._BUILT, reason="csrc/ is not built")

SIZES = dict(
    vocab_size=50,
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=70,
    max_position_embeddings=300,
    pad_token_id=1,
    initializer_range=0.3,
)
FAMILIES = {
    "bert": (models.BertModel, transformers.BertConfig),
    "roberta": (models.RobertaModel, transformers.RobertaConfig),
    "electra": (models.ElectraModel, transformers.ElectraConfig),
}
#: Sequences of a batch: alone, alike, of one token, more rows than go through the layers at once.
BATCHES = ([1], [63], [7, 7, 7], [5, 1, 9, 2], [65, 3], [257] * 4 + [11])


def made(family="bert", **changed):
    """A drop-in model and its parent in evaluation, with the same weights, biases and all."""
    ours, config = FAMILIES[family]
    torch.manual_seed(0)
    model = ours(config(**{**SIZES, **changed})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model, parent_of(model)


def parent_of(model):
    """A copy with Transformers' classes."""
    return fastplm.restore(copy.deepcopy(model))


def batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, 50, mask.shape, generator=generator).masked_fill(~mask, 1)
    return {"input_ids": ids, "attention_mask": mask.long()}


@pytest.fixture(autouse=True)
def of_csrc():
    """csrc/ multiplies, whatever was measured on this machine."""
    with fastplm.use_backend("cpp", "linear"):
        yield


def last(model, given):
    """The states of the second sequence."""
    return model(**given).last_hidden_state[1]


def hold(name, out, parent, run):
    """The error of ``out`` is within that of ``run(parent)``; the parent is fp64 afterwards."""
    measures = [run(parent)]
    for mode in (ReversedReductions(), ShuffledReductions(0)):
        with mode:
            measures.append(run(parent))
    measures += [run(other) for other in rerounded(parent)]
    check_error(name, out, run(parent.double()), measures, FORWARD_FACTOR)


# --- what it computes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "act"),
    [*((each, "gelu") for each in FAMILIES), ("bert", "gelu_new"), ("bert", "gelu_pytorch_tanh")],
)
def test_its_error_is_that_of_the_parent(family, act, calls):
    for lengths, changes in itertools.product(BATCHES, ({}, {"num_hidden_layers": 1})):
        model, parent = made(family, hidden_act=act, **changes)
        given, gold = batch(lengths), copy.deepcopy(parent).double()
        seen = given["attention_mask"].bool()
        with torch.no_grad():
            expected = gold(**given).last_hidden_state
            out = model(**given)
            measures = [parent(**given)]
            with ReversedReductions():
                measures.append(parent(**given))
            measures += [other(**given) for other in rerounded(parent)]
            few = model(**given, output_rows="first").last_hidden_state
        assert type(out) is type(measures[0]) and list(out) == list(measures[0])
        states = [each.last_hidden_state for each in measures]
        check_error(
            f"{lengths}",
            out.last_hidden_state[seen],
            expected[seen],
            [state[seen] for state in states],
            FORWARD_FACTOR,
        )
        check_error(
            f"first of {lengths}",
            few[:, 0],
            expected[:, 0],
            [s[:, 0] for s in states],
            FORWARD_FACTOR,
        )
        assert not out.last_hidden_state[~seen].any()
    assert calls and all(calls)


@pytest.mark.parametrize(
    "width, inner, heads", [(24, 40, 3), (64, 256, 1), (40, 33, 8), (400, 17, 4)]
)
def test_widths_that_are_no_multiple_of_a_vector(width, inner, heads, calls):
    model, parent = made(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_hidden_layers=2
    )
    given = batch([20, 3, 90])
    with torch.no_grad():
        out, gold = model(**given), copy.deepcopy(parent).double()(**given)
        measures = [other(**given) for other in (parent, *rerounded(parent))]
    seen = given["attention_mask"].bool()
    check_error(
        "out",
        out.last_hidden_state[seen],
        gold.last_hidden_state[seen],
        [each.last_hidden_state[seen] for each in measures],
        FORWARD_FACTOR,
    )
    assert calls == [True]


@pytest.mark.parametrize("where", ["embeddings", "query", "up", "down"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_what_is_not_finite_is_where_the_parent_has_it(value, where, calls):
    """In the states of one sequence, or in a bias: at the largest numbers of softmax and GELU."""
    model, parent = made()
    parent.set_attn_implementation("eager")  # PyTorch's SDPA loses a NaN of a query
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    embeds = torch.randn(2, 6, 48)
    embeds[1, 4:] = float("nan")  # padding
    for each in (model, parent):
        layer = each.encoder.layer[1]
        biases = {"query": layer.attention.self.query, "up": layer.intermediate.dense}
        biases["down"] = layer.output.dense
        if where in biases:
            biases[where].bias.data[5] = value
    if where == "embeddings":  # whose norm is PyTorch's: 1e30 squared is too large for it
        embeds[1, 2, 5] = value / 1e15
    parent.double()  # in fp32 it depends on the place whether PyTorch's norm of 1e30 is NaN
    with torch.no_grad():
        out = model(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
        embeds = embeds.double()
        theirs = [parent(inputs_embeds=embeds[:1]), parent(inputs_embeds=embeds[1:, :4])]
    assert calls == [True]
    for ours, other in zip((out[0], out[1, :4]), theirs, strict=True):
        assert torch.equal(ours.isfinite(), other.last_hidden_state[0].isfinite())
    if where == "embeddings":
        assert out[0].isfinite().all()


def test_the_bits_do_not_depend_on_threads(calls):
    model, _ = made()
    given = batch([200, 100, 257, 3, 290, 290, 290])
    with torch.no_grad():
        outputs = []
        for threads in (1, 2, 3):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                outputs.append(model(**given).last_hidden_state)
            finally:
                torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert all(calls)


@pytest.mark.parametrize("transposed", ["query", "all", "none"])
def test_weights_that_lie_by_columns(transposed, calls):
    model, parent = made()
    for name, parameter in model.named_parameters():
        chosen = transposed == "all" or (transposed == "query" and "query" in name)
        if "layer" in name and parameter.dim() == 2 and chosen:
            parameter.data = parameter.data.t().contiguous().t()
    given = batch([5, 9])
    with torch.no_grad():
        hold("out", last(model, given), parent, lambda each: last(each, given))
    assert calls == [True]


def test_the_operator_refuses_rows_that_do_not_fit():
    model, _ = made()
    plan = _encoder_call._plan_of(model.encoder)

    def run(cu_seqlens, rows=None, cu_rows=None, size=12):
        of = [None if each is None else torch.tensor(each) for each in (cu_seqlens, rows, cu_rows)]
        starts, rows, cu_rows = (of[0].int(), of[1], None if of[2] is None else of[2].int())
        return torch.ops.fastplm_C.encoder(
            torch.randn(6, 48), plan.weights, starts, rows, cu_rows, size, plan.eps, plan.tanh
        )

    assert run([0, 4, 6]).shape == (6, 48) and run([0, 4, 6], [1, 5], [0, 1, 2]).shape == (2, 48)
    for wrong in ([0, 4, 5], [0, 5, 4, 6], [1, 6], [0, 4, 7]):
        with pytest.raises(RuntimeError, match="cu_seqlens do not fit the rows"):
            run(wrong)
    for rows, of_rows in (([1, 3], [0, 1, 2]), ([-1, 5], [0, 1, 2]), ([1, 6], [0, 1, 2])):
        with pytest.raises(RuntimeError, match="rows of other sequences"):
            run([0, 4, 6], rows, of_rows)
    with pytest.raises(RuntimeError, match="rows of other sequences"):
        run([0, 4, 6], [4, 4, 5], [0, 0, 3])
    with pytest.raises(RuntimeError, match="rows int64 with their offsets"):
        run([0, 4, 6], [1, 5])
    for size in (0, 5, -12):
        assert run([0, 4, 6], size=size) is None
    assert not torch.ops.fastplm_C.encoder_fits(plan.weights[:-1], 12)


# --- weights are never out of date ----------------------------------------------------------------


def _step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _swap_data(model):
    weight = model.encoder.layer[1].output.dense.weight
    weight.data = weight.data * 2


def _new_parameter(model):
    dense = model.encoder.layer[0].intermediate.dense
    dense.weight = nn.Parameter(dense.weight.detach() * 2)


def _load(model):
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def _assign(model):
    state = {name: value * 1.5 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


class _Adapter(nn.Module):
    """A layer of PEFT's form: a frozen one and two small weights beside it."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base_layer(x) + x @ self.down.t() @ self.up.t()


def _adapt(model):
    own = model.encoder.layer[1].attention.self
    torch.manual_seed(1)
    own.value = _Adapter(own.value)


def _merge(model):
    """An adapter that was merged: its product is added to the weight in place."""
    dense = model.encoder.layer[1].attention.self.query
    torch.manual_seed(1)
    dense.weight.data += torch.randn(48, 2) @ torch.randn(2, 48)


def _hook(model):
    model.encoder.layer[1].output.register_forward_hook(lambda module, given, out: out * 2)


def _pre_hook(model):
    norm = model.encoder.layer[0].attention.output.LayerNorm
    norm.register_forward_pre_hook(lambda module, given: (given[0] * torch.arange(48),))


def _hook_on_the_encoder(model):
    def doubled(module, given, out):
        out.last_hidden_state = out.last_hidden_state * 2

    model.encoder.register_forward_hook(doubled)


def _replaced_forward(model):
    dense = model.encoder.layer[2].intermediate.dense
    dense.forward = lambda x: nn.functional.linear(x, dense.weight) * 3


def _another_activation(model):
    model.encoder.layer[0].intermediate.intermediate_act_fn = nn.ReLU()


def _python_gelu(model):
    act = GELUActivation()
    act.act = nn.functional.silu
    model.encoder.layer[0].intermediate.intermediate_act_fn = act


def _eps(model):
    model.encoder.layer[0].output.LayerNorm.eps = 1e3


def _scaling(model):
    model.encoder.layer[0].attention.self.scaling = 0.01


def _own_encoder(model):
    class Encoder(type(model.encoder)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(-hidden_states, **kwargs)

    model.encoder.__class__ = Encoder


def _new_dicts_of_hooks(model):
    """The usual way to remove all hooks; then another one."""
    for module in model.encoder.modules():
        module._forward_hooks = collections.OrderedDict()
    _hook(model)


def _new_dict_of_parameters(model):
    dense = model.encoder.layer[1].intermediate.dense
    dense._parameters = dict(dense._parameters, weight=nn.Parameter(dense.weight.detach() * 2))


def _exchanged_dicts(model):
    one, other = model.encoder.layer[0], model.encoder.layer[2]
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


def _own_chunk(model):
    model.encoder.layer[0].feed_forward_chunk = lambda x: x * 2


def _own_mask(model):
    def own(attention_mask, embedding_output, **others):
        mask = torch.ones(embedding_output.shape[1], embedding_output.shape[1]).tril()
        return mask.bool()[None, None], None

    model._create_attention_masks = own
    model.config._attn_implementation = "sdpa"


def _head_size(model):
    for layer in model.encoder.layer:
        layer.attention.self.attention_head_size = 24


def _own_iteration(model):
    class Reversed(nn.ModuleList):
        def __iter__(self):
            return iter(list(self._modules.values())[::-1])

        def __getitem__(self, index):
            return super().__getitem__(index)[::-1] if isinstance(index, slice) else None

    model.encoder.layer.__class__ = Reversed


def _other_order_of_names(model):
    layers = model.encoder.layer._modules
    layers["0"] = layers.pop("0")


def _swapped(model):
    dense = model.encoder.layer[1].intermediate.dense
    torch.utils.swap_tensors(dense.weight, nn.Parameter(dense.weight.detach() * 2))


def _less_layers(model):
    del model.encoder.layer[1]


def _layers_in_another_order(model):
    model.encoder.layer = nn.ModuleList(list(model.encoder.layer)[::-1])


def _prune(model):
    prune.l1_unstructured(model.encoder.layer[0].output.dense, "weight", amount=0.5)


def _parametrize(model):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    dense = model.encoder.layer[0].output.dense
    parametrize.register_parametrization(dense, "weight", Doubled())


def _no_bias(model):
    model.encoder.layer[1].intermediate.dense.bias = None


def _freeze(model):
    model.requires_grad_(False)
    model.encoder.layer[0].output.dense.weight.mul_(2)


def _in_place(model):
    with torch.no_grad():
        model.encoder.layer[0].attention.self.key.bias.copy_(torch.arange(48.0))
        model.encoder.layer[0].attention.self.query.bias.add_(1)


def _half_of_a_layer(model):
    for module in model.encoder.layer[1].modules():
        if isinstance(module, nn.Linear):
            module.weight.data = module.weight.data.clone()
            module.bias.data = module.bias.data.clone() + 1


def _a_norm_of_its_own(model):
    class Norm(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x) * 2

    norm = model.encoder.layer[1].output.LayerNorm
    norm.__class__ = Norm


def _new_dict_of_layers(model):
    layers = model.encoder.layer
    layers._modules = dict(list(layers._modules.items())[:1])


def _new_dict_of_the_encoder(model):
    hooks = collections.OrderedDict()
    model.encoder.__dict__ = {**vars(model.encoder), "_forward_hooks": hooks}
    model.encoder.register_forward_hook(lambda module, args, out: _doubled(out))


def _doubled(out):
    out.last_hidden_state = out.last_hidden_state * 2
    return out


def _shadowed_weight(model):
    norm = model.encoder.layer[1].output.LayerNorm
    vars(norm)["weight"] = norm.weight.detach() * 2


def _shadowed_norm(model):
    norm = copy.deepcopy(model.encoder.layer[1].output.LayerNorm)
    norm.weight.data *= 2
    vars(model.encoder.layer[1].output)["LayerNorm"] = norm


#: What changes an encoder, and whether one call still runs its layers; None: it is not asked.
CHANGES = {
    _step: True,
    _swap_data: True,
    _new_parameter: True,
    _load: True,
    _assign: True,
    _merge: True,
    _freeze: True,
    _in_place: True,
    _half_of_a_layer: True,
    _less_layers: True,
    _layers_in_another_order: True,
    _adapt: False,
    _hook: False,
    _pre_hook: False,
    _hook_on_the_encoder: False,
    _replaced_forward: False,
    _another_activation: False,
    _python_gelu: False,
    _eps: False,
    _scaling: False,
    _own_encoder: False,
    _new_dicts_of_hooks: False,
    _new_dict_of_parameters: True,
    _exchanged_dicts: True,
    _own_chunk: False,
    _head_size: False,
    _own_iteration: False,
    _other_order_of_names: True,
    _swapped: True,
    _own_mask: None,
    _prune: False,
    _parametrize: False,
    _no_bias: False,
    _a_norm_of_its_own: False,
    _new_dict_of_layers: True,
    _new_dict_of_the_encoder: False,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_change_is_seen(change, mode, calls):
    model, parent = made()
    given = batch([5, 9])
    with mode():
        before = model(**given).last_hidden_state
        model(**given)
    assert calls == [True, True]
    for each in (model, parent):
        change(each)
    with mode():
        out = last(model, given)
        hold("out", out, parent, lambda each: last(each, given))
    assert calls[2:] == ([] if CHANGES[change] is None else [CHANGES[change]])
    assert (out - before[1]).abs().mean() > 0.01 * before[1].abs().mean()  # the change matters


KINDS = {kind for kind in vars(modeling_outputs).values() if inspect.isclass(kind)}


@pytest.mark.parametrize(
    "kind", sorted((k for k in KINDS if k.__name__.startswith("BaseModelOutput")), key=str)
)
def test_an_output_is_that_of_its_constructor(kind):
    names = [field.name for field in dataclasses.fields(kind)]
    assert _encoder_call._names_of(kind) == tuple(names)
    given = {name: torch.randn(2) for name in names[:2]}
    made, right = _encoder_call.output_of(kind, given), kind(**given)
    assert type(made) is kind and vars(made) == vars(right) and list(made) == list(right)
    assert made[0] is made[names[0]] is getattr(made, names[0]) is given[names[0]]
    assert made.to_tuple() == tuple(given.values()) and repr(made) == repr(right)
    for copied in (copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert list(copied) == list(right)
    leaves, spec = pytree.tree_flatten(made)
    assert spec == pytree.tree_flatten(right)[1] and all(map(operator.is_, leaves, given.values()))
    for each in (made, right):  # set as an attribute, and as an item
        setattr(each, names[0], given[names[1]])
        each[names[-1]] = given[names[0]]
    assert list(made) == list(right) and vars(made) == vars(right)


def test_an_output_with_a_constructor_of_its_own_gets_it():
    @dataclasses.dataclass
    class Counted(modeling_outputs.BaseModelOutput):
        count: int | None = None

        def __post_init__(self):
            super().__post_init__()
            self.count = 1

    states = torch.randn(2)
    assert _encoder_call.output_of(Counted, {"last_hidden_state": states}).count == 1


@pytest.mark.parametrize("change", [_shadowed_weight, _shadowed_norm])
def test_an_attribute_that_is_found_first_is_seen(change, calls):
    model, parent = made()
    given = batch([5, 9])
    with torch.no_grad():
        before = last(model, given)
        for each in (model, parent):
            change(each)  # to tensors that no .double() reaches
        torch.testing.assert_close(last(model, given), last(parent, given))
        assert (last(model, given) - before).abs().max() > 0.1
    assert calls == [True, False, False]


class _Thing:
    def __init__(self):
        self.eps, self.names = 0.5, ["a"]


@pytest.mark.parametrize(
    "change, same",
    [
        (lambda thing: None, True),
        (lambda thing: thing.names.append("b"), True),  # the same list
        (lambda thing: setattr(thing, "eps", thing.eps), True),
        (lambda thing: setattr(thing, "eps", 0.25), False),
        (lambda thing: setattr(thing, "names", ["a"]), False),  # equal, and another list
        (lambda thing: setattr(thing, "more", None), False),
        (lambda thing: delattr(thing, "eps"), False),
        (lambda thing: vars(thing).update(eps=vars(thing).pop("eps")), False),  # the last one now
        (lambda thing: setattr(thing, "__dict__", {"eps": thing.eps, "names": []}), False),
        (lambda thing: setattr(thing, "__dict__", {"e": thing.eps, "names": thing.names}), False),
    ],
)
def test_attributes_are_unchanged(change, same):
    things = (_Thing(), _Thing())
    names = tuple(tuple(vars(thing)) for thing in things)
    values = tuple(tuple(vars(thing).values()) for thing in things)
    assert unchanged.attributes(things, names, values)
    change(things[1])
    assert unchanged.attributes(things, names, values) is same


def test_entries_and_types_are_unchanged():
    held, other = {"weight": 0.5, "bias": None}, collections.OrderedDict()
    asked = (held, held, other), ("weight", "bias", "bias"), (held["weight"], None, None)
    assert unchanged.entries(*asked) is True
    other["bias"] = 1
    assert unchanged.entries(*asked) is False
    del other["bias"], held["bias"]
    assert unchanged.entries(*asked) is True  # None is no entry
    held["weight"] = 0.25
    assert unchanged.entries(*asked) is False
    assert unchanged.types((held, other), (dict, collections.OrderedDict)) is True
    assert unchanged.types((held, other), (dict, dict)) is False
    assert unchanged.types((), ()) is True


@pytest.mark.parametrize(
    "function, given",
    [
        ("attributes", ((1,), ((),), ((),))),  # has no attributes
        ("attributes", ((_Thing(),), (["eps"],), ((),))),
        ("attributes", ((_Thing(),), ())),
        ("entries", ((1,), ("a",), (2,))),
        ("entries", (({},), ([],), (2,))),  # unhashable
        ("entries", (({},), (), (2,))),
        ("types", ([], [])),
    ],
)
def test_unchanged_refuses_what_it_cannot_compare(function, given):
    with pytest.raises((TypeError, AttributeError, SystemError)):
        getattr(unchanged, function)(*given)


def test_what_is_missing_is_said(monkeypatch):
    assert not any("_unchanged" in line for line in _explain._missing())
    monkeypatch.setattr(_extension, "unchanged", None)
    assert any("fastplm._unchanged was not built" in line for line in _explain._missing())


def test_names_that_are_equal_are_not_a_change_at_each_call(monkeypatch):
    """The attributes of an unpickled module have names of their own."""
    model, made_by, plans = made()[0], _encoder_call._made, []
    output = model.encoder.layer[1].output
    output.LayerNorm = pickle.loads(pickle.dumps(output.LayerNorm))
    monkeypatch.setattr(
        _encoder_call, "_made", lambda *given: plans.append(made_by(*given)) or plans[-1]
    )
    with torch.inference_mode():
        for _ in range(3):
            model(**batch([5]))
    assert len(plans) == 1 and plans[0] is not None


def test_a_layer_that_was_compiled_runs_its_program(calls):
    model, _ = made()
    ran = []

    def backend(graph, inputs):
        ran.append(graph)
        return graph.forward

    with torch.no_grad():
        model(**batch([5]))
        model.encoder.layer[1].compile(backend=backend)
        model(**batch([5]))
    assert calls == [True, False] and ran


def test_a_hook_that_is_gone_lets_the_call_run_again(calls):
    model, parent = made()
    given, handles = batch([4]), []
    with torch.no_grad():
        model(**given)
        handles.append(model.encoder.layer[0].register_forward_hook(lambda *_: None))
        model(**given)
        handles.pop().remove()
        model(**given)
        model.encoder.layer[0].output.dropout.train()
        model(**given)
        model.eval()
        model(**given)
    assert calls == [True, False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_and_back(dtype, calls):
    """The parameters stay the same objects."""
    model, parent = made()
    given = batch([5, 9])
    with torch.no_grad():
        first = model(**given).last_hidden_state
        model.to(dtype)
        assert model(**given).last_hidden_state.dtype is dtype
        model.float()
        model(**given)
        model.encoder.layer[2].output.dense.bias.data = model.encoder.layer[2].output.dense.bias.to(
            dtype
        )
        with contextlib.suppress(RuntimeError):  # as the layers, whose products take one dtype
            model(**given)
    assert first.dtype is torch.float32 and calls[0] and calls[1] and calls[2:] == [False]


def test_copies_and_pickles_begin_anew(calls):
    model, _ = made()
    given = batch([5, 9])
    with torch.no_grad():
        out = model(**given).last_hidden_state
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(**given).last_hidden_state, out)
            other.encoder.layer[0].output.dense.weight.data.zero_()
            assert not torch.equal(other(**given).last_hidden_state, out)
        assert torch.equal(model(**given).last_hidden_state, out)
    assert calls == [True] * 6
    assert not any("fastplm" in name for name in vars(fastplm.restore(model).encoder))


@pytest.mark.parametrize("cycle", [False, True])
def test_the_end_of_a_model(cycle):
    model, _ = made()
    if cycle:
        model.encoder.layer[0].__dict__["owner"] = model
    with torch.no_grad():
        model(**batch([5]))
    end = weakref.ref(model.encoder.layer[0].output.dense.weight)
    del model
    gc.collect()
    assert end() is None


def test_weights_that_were_replaced_are_not_kept():
    model, _ = made()
    with torch.no_grad():
        model(**batch([5]))
        end = weakref.ref(model.encoder.layer[0].output.dense.weight)
        state = {name: value.bfloat16() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model(**batch([5]))
    gc.collect()
    assert end() is None


def test_the_embeddings_run_once(calls):
    """Once more at the call in which a weight does not fit any more."""
    model, parent = made()
    given, ran = batch([5, 9]), []
    table = model.embeddings.word_embeddings
    table.register_forward_hook(lambda *_: ran.append(1))
    with torch.no_grad():
        model(**given)
        for each in (model, parent):
            wide = torch.randn(48, 140, generator=torch.Generator().manual_seed(0))
            each.encoder.layer[2].output.dense.weight.data = wide[:, ::2]
        counts = []
        for _ in range(3):
            before = len(ran)
            out = last(model, given)
            counts.append(len(ran) - before)
        hold("out", out, parent, lambda each: last(each, given))
    assert counts == [2, 1, 1] and calls == [True, False, False, False]


def test_outputs_that_were_recorded_once_let_the_call_run_again(calls):
    model, _ = made()
    with torch.no_grad():
        model(**batch([5, 9]))
        assert len(model(**batch([5, 9]), output_hidden_states=True).hidden_states) == 4
        model(**batch([5, 9]))
    assert calls == [True, True]


@pytest.mark.parametrize("unpad", [16, 14])
def test_unused_slots(unpad, calls):
    model, parent = made()
    given = batch([5, 9])
    with torch.no_grad():
        out = model(**given, unpad=unpad).last_hidden_state[1]
        hold("out", out, parent, lambda each: last(each, given))
    assert calls == [unpad == 14]


def test_the_default_device_is_not_asked(calls):
    model, _ = made()
    _encoder_call._starts.cache_clear()
    ids = batch([7])["input_ids"]
    with torch.no_grad(), torch.device("meta"):
        model(ids)
    with torch.no_grad():
        model(ids)
    assert calls[-1]


def test_threads_at_once(calls):
    model, _ = made()
    inputs = [batch([5 + i, 9, 40], seed=i) for i in range(4)]
    with torch.no_grad():
        expected = [model(**given).last_hidden_state for given in inputs]

    def run(i):
        with torch.no_grad(), fastplm.use_backend("cpp", "linear"):
            return all(
                torch.equal(model(**inputs[i]).last_hidden_state, expected[i]) for _ in range(20)
            )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(4)))
    assert all(calls)


# --- when the layers run themselves ---------------------------------------------------------------


def _with(context=contextlib.nullcontext, train=False, **extra):
    def run(model, given):
        model.train(train)
        with context():
            return model(**given, **extra)

    return run


def _traced(model, given):
    ids = given["input_ids"]
    model.requires_grad_(False)
    return torch.jit.trace(lambda ids: model(ids)[0], (ids,), check_trace=False)(ids)


def _compiled(model, given):
    return torch.compile(model, backend="eager")(**given)


def _global_hook(model, given):
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        return model(**given)
    finally:
        handle.remove()


def _other_attention(model, given):
    model.set_attn_implementation("sdpa")
    return model(**given)


@pytest.mark.parametrize(
    "run",
    [
        _with(torch.enable_grad),
        _with(train=True),
        _with(lambda: fastplm.use_backend("eager")),
        _with(lambda: fastplm.use_backend("stock", "linear")),
        _with(lambda: fastplm.use_backend("eager", "attention")),
        _with(lambda: torch.autocast("cpu", torch.bfloat16)),
        _with(output_hidden_states=True),
        _with(extra_rows=torch.ones(2, 9, dtype=torch.bool)),
        _with(extra_rows=torch.arange(18).view(2, 9) == 7),  # one row of padding
        _with(unpad=False),
        _traced,
        _compiled,
        _global_hook,
        _other_attention,
    ],
)
def test_layers_that_must_run_themselves(run, calls):
    model, _ = made()
    given = batch([5, 9])
    with torch.no_grad():
        model(**given)
        assert calls == [True]
        run(model, given)
    assert not any(calls[1:])


def test_output_attentions(calls):
    model, _ = made()
    with torch.no_grad():
        assert len(model(**batch([5]), output_attentions=True).attentions) == 3
    assert not any(calls)


def test_a_decoder(calls):
    model, parent = made(is_decoder=True)
    with torch.no_grad():
        hold("out", model(**batch([5]))[0], parent, lambda each: each(**batch([5]))[0])
    assert not any(calls)


@pytest.mark.parametrize("op", ["encoder", "linear"])
def test_it_runs_where_it_is_faster_by_the_rules(op, calls, measured):
    model, _ = made()
    asked = []
    measured.ours = lambda name, form, dtype, sizes: asked.append((name, sizes)) or name == op
    with torch.no_grad(), fastplm.use_backend("auto"):
        model(**batch([5, 9]))
    assert calls == [True] * (op == "encoder") and asked[0] == ("encoder", (14, 48))


@pytest.mark.parametrize("head", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_heads_get_its_rows(head, calls):
    torch.manual_seed(0)
    model = getattr(models, head)(transformers.BertConfig(**SIZES)).eval()
    given, parent = batch([5, 9, 2]), parent_of(model)
    seen = given["attention_mask"].bool() if "Token" in head else slice(None)
    with torch.no_grad():
        hold("logits", model(**given).logits[seen], parent, lambda each: each(**given).logits[seen])
    assert calls == [True]


def test_sequences_without_a_row(calls):
    """Some are all padding, and of some the last layer computes nothing."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES)
    model = models.BertModel(config, add_pooling_layer=False).eval()
    parent = parent_of(model)
    given = batch([257, 3, 257, 257, 11])
    given["attention_mask"][1] = 0
    rows = torch.tensor([0, 5, 2 * 257 + 1, -1])
    with torch.no_grad():
        out = model(**given, output_rows=rows).last_hidden_state[:3, 0]
        whole = model(**given).last_hidden_state.flatten(0, 1)[rows[:3]]
        for each in (out, whole):
            hold(
                "rows",
                each,
                parent.float(),
                lambda other: other(**given).last_hidden_state.flatten(0, 1)[rows[:3]],
            )
        nothing = {name: value[:0] for name, value in given.items()}
        assert model(**nothing).last_hidden_state.shape == (0, 257, 48)
    assert calls[:2] == [True, True]


def test_explain_says_it():
    model, _ = made()
    with torch.no_grad(), record_notes() as notes:
        model(**batch([5, 9]))
    assert "3 layers in one call" in notes[-1]


# --- from ids on ----------------------------------------------------------------------------------


@pytest.fixture
def whole(monkeypatch):
    """Whether one call ran a model from ids on, of each forward that asked for it."""
    asked, original = [], _encoder.backbone_call

    def recorded(*given):
        out = original(*given)
        asked.append(bool(out))
        return out

    monkeypatch.setattr(_encoder, "backbone_call", recorded)
    return asked


def tokens(out, given):
    """The states of tokens and, of a model with a pooler, its output: [rows, E]."""
    seen = given.get("attention_mask")
    seen = torch.ones(out[0].shape[:2]) if seen is None else seen
    return torch.cat([out[0][seen.expand(out[0].shape[:2]).bool()], *out[1:]])


GIVEN = {
    "as a tokenizer's": batch([5, 9, 1]),
    "no padding": batch([6, 6]),
    "no mask": {"input_ids": batch([6, 6])["input_ids"]},
    "several blocks of rows": batch([257, 3, 257, 256, 11]),
    "a mask of bools": {**batch([5, 9]), "attention_mask": batch([5, 9])["attention_mask"].bool()},
    "int32": {name: value.int() for name, value in batch([5, 9]).items()},
    "nothing recorded": {
        **batch([5, 9]),
        **{"output_hidden_states": False, "output_attentions": None},
    },
    "types": {**batch([5, 9]), "token_type_ids": torch.arange(18).view(2, 9) % 2},
    "types of int32": {**batch([4]), "token_type_ids": torch.tensor([[0, 1, 1, 0]]).int()},
    "the id of padding between": {"input_ids": torch.tensor([[3, 1, 4, 1, 5], [6, 7, 8, 9, 1]])},
    "padding between": {
        "input_ids": batch([6, 6])["input_ids"],
        "attention_mask": torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]]),
    },
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_from_ids_on(family, given, whole):
    for changes in ({}, {"embedding_size": 20}) if family == "electra" else ({},):
        model, parent = made(family, type_vocab_size=2, **changes)
        with torch.no_grad():
            out = model(**GIVEN[given])
            hold(
                given,
                *(tokens(out, GIVEN[given]), parent),
                lambda m: tokens(m(**GIVEN[given]), GIVEN[given]),
            )
        unseen = GIVEN[given].get("attention_mask", torch.ones(1)) == 0
        assert not out[0][unseen.expand(out[0].shape[:2])].any()
    assert whole and all(whole)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_from_ids_on_the_first_tokens_only(family, given, whole):
    """The last layer computes one row of each sequence, and the pooler reads it."""

    def first(model, **rows):
        out = model(**GIVEN[given], **rows)
        return torch.cat([out[0][:, 0], *out[1:]])

    for changes in ({}, {"num_hidden_layers": 1}):
        model, parent = made(family, type_vocab_size=2, **changes)
        with torch.no_grad():
            shape = model(**GIVEN[given], output_rows="first")[0].shape
            hold(given, first(model, output_rows="first"), parent, first)
        assert shape == (len(GIVEN[given]["input_ids"]), 1, 48)
    assert whole and all(whole)


HEADS = {
    "a classifier": "BertForSequenceClassification",
    "a classifier without a pooler": "RobertaForSequenceClassification",
    "a classifier of ELECTRA": "ElectraForSequenceClassification",
    "choices": "BertForMultipleChoice",
    "tags": "BertForTokenClassification",
    "spans": "BertForQuestionAnswering",  # which keeps padding
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_head_of_a_model_that_is_called_whole(head, accelerated, whole):
    """Both of ours and of Transformers after ``accelerate``; it reads the rows that were asked."""
    name, given = HEADS[head], batch([9, 9] if head == "spans" else [5, 9, 1])
    torch.manual_seed(0)
    config = FAMILIES[name.partition("For")[0].lower()][1](**SIZES)
    model = getattr(transformers if accelerated else models, name)(config).eval()
    parent = copy.deepcopy(model) if accelerated else parent_of(model)
    model = fastplm.accelerate(model) if accelerated else model
    seen = given["attention_mask"].bool()
    if head == "choices":
        given = {each: value[None] for each, value in given.items()}

    def logits(each):
        out = each(**given)
        if head == "tags":
            return out.logits[seen]
        if head == "spans":
            return torch.stack([out.start_logits[seen], out.end_logits[seen]])
        return out.logits

    with torch.no_grad():
        hold(head, logits(model), parent, logits)
    assert whole == [True]


LEFT = {
    "padding on the left": {**batch([6, 6]), "attention_mask": torch.arange(6).expand(2, 6) > 1},
    "a mask of floats": {**batch([6]), "attention_mask": torch.ones(1, 6)},
    "one mask for all": {**batch([6, 6]), "attention_mask": torch.ones(1, 6).long()},
    "by columns": {"input_ids": batch([6, 6])["input_ids"].t().contiguous().t()},
    "positions": {**batch([6]), "position_ids": torch.arange(6)[None] + 3},
    "embeddings": {"inputs_embeds": torch.ones(1, 6, 48)},
    "rows": {**batch([6, 6]), "output_rows": torch.tensor([3, 7])},
    "padding that is kept": {**batch([6, 4]), "unpad": False},
    "the first row of a sequence without one": {
        **{**batch([6, 6]), "attention_mask": torch.arange(12).view(2, 6) < 6},
        "output_rows": "first",
    },
}
LEFT["the same without a pooler"] = LEFT["the first row of a sequence without one"]


@pytest.mark.parametrize("given", LEFT)
def test_what_is_left_to_the_modules(given, whole):
    model, parent = made("electra" if "without a pooler" in given else "bert")
    rows = LEFT[given].get("output_rows")
    own = ("output_rows", "unpad")
    theirs = {name: value for name, value in LEFT[given].items() if name not in own}

    def read(out):
        if isinstance(rows, torch.Tensor):
            return out[0].flatten(0, 1)[rows]
        return tokens(out, theirs) if rows is None else out[0][:1, 0]

    with torch.no_grad():
        out = model(**LEFT[given])
        out = out[0][:, 0] if isinstance(rows, torch.Tensor) else read(out)
        hold(given, out, parent, lambda each: read(each(**theirs)))
    assert not any(whole)


WRONG = {
    "too large an id": {"input_ids": torch.tensor([[3, 50]])},
    "a negative id": {"input_ids": torch.tensor([[-1, 3]])},
    "one in the padding": {
        "input_ids": torch.tensor([[3, 50]]),
        "attention_mask": torch.tensor([[1, 0]]),
    },
    "a type": {**batch([2]), "token_type_ids": torch.tensor([[0, 2]])},
    "too long": {"input_ids": torch.full((1, 301), 2)},
    "a longer mask": {**batch([2]), "attention_mask": torch.ones(1, 3).long()},
    "a longer row of types": {**batch([2]), "token_type_ids": torch.zeros(1, 3).long()},
    "ids of floats": {"input_ids": torch.ones(1, 2)},
    "ids of bools": {"input_ids": torch.ones(1, 2).bool()},
    "types of bools": {**batch([2]), "token_type_ids": torch.zeros(1, 2).bool()},
    "a mask of one number": {**batch([2]), "attention_mask": 1},
    "types of one number": {**batch([2]), "token_type_ids": 0},
    "a quantized mask": {
        "input_ids": torch.tensor([[3, 50]]),
        "attention_mask": torch.quantize_per_tensor(torch.ones(1, 2), 1.0, 0, torch.quint8),
    },
    "sparse ids": {"input_ids": torch.ones(1, 2).long().to_sparse()},
    "a sparse mask": {**batch([2]), "attention_mask": torch.ones(1, 2).long().to_sparse()},
    "one dimension": {"input_ids": torch.ones(2).long()},
    "a list": {"input_ids": [[1, 2]]},
    "nothing": {},
}


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [{}, {"unpad": False}, {"output_rows": "first"}], ids=str)
def test_wrong_input_gets_the_error_of_the_modules(family, rows, given, monkeypatch):
    model, _ = made(family)
    raised = []
    for asked in (True, False):
        if not asked:
            monkeypatch.setattr(_encoder, "backbone_call", lambda *_: [])
        with torch.no_grad(), pytest.raises(Exception) as info:
            model(**WRONG[given], **rows)
        raised.append((type(info.value), str(info.value)))
    assert raised[0] == raised[1]


def _words(model):
    model.embeddings.word_embeddings.weight.data = torch.randn(
        50, 48, generator=torch.Generator().manual_seed(0)
    )


def _more_words(model):
    torch.manual_seed(0)
    model.embeddings.word_embeddings = nn.Embedding(60, 48).eval()


def _hook_on_words(model):
    model.embeddings.word_embeddings.register_forward_hook(lambda module, given, out: out * 2)


def _hook_on_the_embeddings(model):
    model.embeddings.register_forward_hook(lambda module, given, out: out * 2)


def _own_embeddings(model):
    model.embeddings.forward = lambda input_ids, **others: model.embeddings.word_embeddings(
        input_ids
    )


def _types_by_default(model):
    model.embeddings.token_type_ids.fill_(1)


def _eps_of_embeddings(model):
    model.embeddings.LayerNorm.eps = 10.0


def _least_norm(model):
    model.embeddings.word_embeddings.max_norm = 0.1


def _pool(model):
    with torch.no_grad():
        model.pooler.dense.bias.add_(1)


def _another_pooler(model):
    model.pooler.activation = nn.Sigmoid()


def _hook_on_the_pooler(model):
    model.pooler.dense.register_forward_hook(lambda module, given, out: out * 2)


def _no_pooler(model):
    model.pooler = None


def _masks_of_its_own(model):
    def own(attention_mask, embedding_output, **others):
        return torch.eye(embedding_output.shape[1]).bool()[None, None], None

    model._create_attention_masks = own


def _padding_index(model):
    """An attribute that RoBERTa's embeddings count by, and BERT's do not know."""
    model.embeddings.padding_idx = 1
    model.pooler.dense.bias.data += 1


def _new_embeddings(model):
    torch.manual_seed(1)
    model.embeddings = type(model.embeddings)(model.config).eval()


def _own_call(model):
    kind = type(model.embeddings)

    class Own(kind):
        def __call__(self, *args, **given):
            return super().__call__(*args, **given) * 2

    Own.__name__, Own.__module__ = kind.__name__, kind.__module__
    model.embeddings.__class__ = Own


#: What changes a model around its layers, and whether one call still runs all of it.
AROUND = {
    _words: True,
    _more_words: True,
    _types_by_default: True,
    _eps_of_embeddings: True,
    _pool: True,
    _no_pooler: True,
    _new_embeddings: True,
    _padding_index: True,
    _masks_of_its_own: False,
    _hook_on_words: False,
    _hook_on_the_embeddings: False,
    _own_embeddings: False,
    _own_call: False,
    _least_norm: False,
    _another_pooler: False,
    _hook_on_the_pooler: False,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", AROUND, ids=lambda change: change.__name__.strip("_"))
def test_a_change_around_the_layers_is_seen(change, mode, whole):
    model, parent = made()
    given = batch([5, 9])
    with mode():
        before = tokens(model(**given), given)
    for each in (model, parent):
        change(each)
    with mode():
        out = tokens(model(**given), given)
        hold("out", out, parent, lambda each: tokens(each(**given), given))
    assert whole == [True, AROUND[change]]
    assert before.shape != out.shape or not torch.allclose(before, out, atol=1e-2)


def test_tables_of_another_dtype_are_left_to_the_modules(whole):
    model, _ = made()
    with torch.no_grad():
        model(**batch([5]))
        model.embeddings.word_embeddings.bfloat16()
        model(**batch([5]))
        model.embeddings.word_embeddings.float()
        model(**batch([5]))
        model.config.output_hidden_states = True
        assert len(model(**batch([5])).hidden_states) == 4
    assert whole == [True, False, True, False]


def test_weights_of_a_model_that_were_replaced_are_not_kept():
    """Neither the layers' nor the tables'."""
    model, _ = made()
    with torch.no_grad():
        model(**batch([5]))
        ends = [weakref.ref(parameter) for parameter in model.parameters()]
        state = {name: value.bfloat16() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        model(**batch([5]))
    gc.collect()
    assert not any(end() is not None for end in ends)


@pytest.mark.parametrize("part", ["encoder", "pooler", "embeddings"])
def test_a_shallow_copy_has_a_plan_of_its_own(part, whole):
    model, _ = made()
    given = batch([5, 9])
    with torch.no_grad():
        before = tokens(model(**given), given)
        other = copy.copy(model)
        other._modules = model._modules.copy()
        setattr(other, part, copy.deepcopy(getattr(model, part)))
        for parameter in getattr(other, part).parameters():
            parameter.mul_(2)
        out = tokens(other(**given), given)
        hold("the copy", out, parent_of(other), lambda each: tokens(each(**given), given))
        assert not torch.allclose(out, before, atol=1e-2)
        assert torch.equal(tokens(model(**given), given), before)
    # The encoder's copy has a configuration of its own.
    assert whole == [True, part != "encoder", True]


PATCHED = (
    modeling_bert.BertSelfAttention,  # which a drop-in class calls
    modeling_bert.BertEmbeddings,
    modeling_bert.BertPooler,
    nn.Tanh,
    nn.LayerNorm,
    nn.Embedding,
)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("kind", PATCHED)
def test_the_forward_of_a_class_that_was_patched_runs(kind, wraps, whole, monkeypatch):
    original, given = kind.forward, batch([5, 9])

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

    for early in (True, False):
        model, _ = made()
        with torch.no_grad(), monkeypatch.context() as patched:
            if not early:
                model(**given)
            patched.setattr(
                kind, "forward", functools.wraps(original)(forward) if wraps else forward
            )
            out = tokens(model(**given), given)
            hold("out", out, parent_of(model), lambda each: tokens(each(**given), given))
    assert whole == [False, True, False]


def test_a_model_is_not_kept_alive(whole):
    model, _ = made()
    with torch.no_grad():
        model(**batch([5, 9]))
    alive = [weakref.ref(weight) for weight in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        del model
        assert whole == [True] and not any(each() for each in alive)
    finally:
        gc.enable()


def test_layers_that_checkpoint_in_their_call_are_known(whole, checkpointing_call):
    model, _ = made()
    with torch.no_grad():
        model(**batch([5, 9]))
    assert whole == [True]


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids"])
def test_buffers_of_another_shape_are_left_to_the_modules(name, whole):
    model, _ = made()
    setattr(model.embeddings, name, getattr(model.embeddings, name).expand(2, -1).contiguous())
    with torch.no_grad(), contextlib.suppress(RuntimeError):  # as Transformers
        model(**batch([6, 6, 6]))
    assert whole == [False]


@pytest.mark.parametrize("op", ["linear", "linear_int8"])
def test_a_backend_that_was_forced_is_kept(op, whole):
    model, _ = made()
    for each in (model, fastplm.quantize(copy.deepcopy(model))):
        with torch.no_grad(), fastplm.use_backend("eager", op):
            each(**batch([5]))
    assert whole == [False, False]


def test_a_model_compiles_in_one_graph_and_is_exported():
    model, parent = made()
    given = batch([5, 9])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            run = torch.compile(model, backend="eager", fullgraph=True)
            out = tokens(run(**given), given)
            hold("out", out, parent.float(), lambda each: tokens(each(**given), given))
    with torch.no_grad():
        torch.export.export(model, (), given, strict=True)


def test_the_operator_of_a_whole_model_refuses_other_lists():
    model, _ = made()
    plan = _encoder_call._made(model.encoder, model)
    ends = plan.ends

    def run(
        embeddings=ends.embeddings,
        projection=(),
        weights=plan.weights,
        pooler=ends.pooler,
        first_only=False,
    ):
        given = torch.tensor([[3, 4]])
        return torch.ops.fastplm_C.backbone(
            *(given, None, None, embeddings, list(projection), weights, pooler),
            *(-1, plan.head_size, ends.eps, plan.eps, plan.tanh, first_only),
        )

    assert [each.shape for each in run()] == [(1, 2, 48), (1, 48)]
    assert [each.shape for each in run(pooler=[])] == [(1, 2, 48)]
    assert [each.shape for each in run(pooler=[], first_only=True)] == [(1, 1, 48)]
    assert not run(embeddings=ends.embeddings[:-1]) and not run(weights=plan.weights[1:])
    for cut in (ends.pooler[:1], ends.pooler * 2, ends.pooler[::-1]):
        assert not run(pooler=cut) and not run(projection=cut)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_measured_is_asked_of_the_tokens(family, monkeypatch):
    """Padding does not go through the layers, so it is no reason for or against one call."""
    asked = []
    monkeypatch.setattr(_encoder_call, "_is_faster", lambda rows, *_: asked.append(rows) or True)
    model, _ = made(family)
    with torch.no_grad():
        model(**batch([5, 1, 9, 2]))
        model(batch([7, 7])["input_ids"])
    assert asked == [17, 14]


def test_fastplm_measure_times_one_call_and_the_modules(whole):
    together, alone = _measure.plans()
    assert alone.form == together.form + ALONE
    for rows in (8, 64):
        one, other = (call().last_hidden_state for call in together.make(rows, 256))
        assert one.shape[:2].numel() == rows
        torch.testing.assert_close(one, other)
    assert whole == [True, True]


@pytest.mark.parametrize("kind", ("instance attribute", "sparse", "chunks"))
@pytest.mark.parametrize("trains", (False, True))
def test_a_changed_layer_is_obeyed(kind, trains):
    config = transformers.BertConfig(**_SMALL)
    model = models.BertModel(config).train(trains)
    parent = transformers.BertModel(config).train(trains)
    parent.load_state_dict(model.state_dict())
    ids, mask = torch.randint(5, 50, (1, 8)), torch.tensor([[1] * 6 + [0] * 2])
    for each in (model, parent):
        layer = each.encoder.layer[0]
        dense = layer.intermediate.dense
        if kind == "chunks":
            layer.chunk_size_feed_forward = 4
        elif kind == "sparse":
            dense.weight = nn.Parameter(dense.weight.detach().to_sparse())
        else:
            dense.__dict__["weight"] = 2 * dense.weight.detach()
    with fastplm.use_backend("cpp", "linear"), torch.set_grad_enabled(trains):
        out = model(ids, attention_mask=mask).last_hidden_state
    expected = parent(ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(out[:, :6], expected[:, :6])


def test_training_lets_go_of_replaced_weights():
    model = models.BertModel(transformers.BertConfig(**_SMALL)).eval()
    with torch.no_grad():
        model(torch.randint(5, 50, (1, 8)))
    replaced = [weakref.ref(weight) for weight in model.parameters()]
    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.train()(torch.randint(5, 50, (1, 8)))
    gc.collect()
    assert not any(weight() is not None for weight in replaced)


_SMALL = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
_SMALL |= dict(vocab_size=50, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
