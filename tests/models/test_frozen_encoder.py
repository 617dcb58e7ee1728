"""A frozen encoder in one call of csrc/: its results, and what is left to the modules."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree

import fastplm
from fastplm import models
from fastplm._backends import record_notes
from fastplm.models import _frozen_encoder
from fastplm.models._frozen_encoder import output_of
from fastplm.models._watch import plan_in
from fastplm.testing import FORWARD_FACTOR, ReversedReductions, check_error, rerounded

from .frozen import BERT, ENCODERS, FAMILIES, batch, hold, made, parent_of, tokens

pytestmark = pytest.mark.usefixtures("of_csrc")
BATCHES = ([1], [63], [7, 7, 7], [5, 1, 9, 2], [65, 3], [257] * 4 + [11])


@pytest.mark.parametrize(
    ("family", "act"),
    [*((each, "gelu") for each in ENCODERS), ("bert", "gelu_new"), ("bert", "gelu_pytorch_tanh")],
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
    assert {*calls} == {"backbone"}


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
    assert calls == ["backbone"]


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
        out = model(inputs_embeds=embeds, attention_mask=mask, unpad=True).last_hidden_state
        embeds = embeds.double()
        theirs = [parent(inputs_embeds=embeds[:1]), parent(inputs_embeds=embeds[1:, :4])]
    assert calls == ["encoder"]
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
    assert {*calls} == {"backbone"}


@pytest.mark.parametrize("transposed", ["query", "all", "none"])
def test_weights_that_lie_by_columns(transposed, calls):
    model, parent = made()
    for name, parameter in model.named_parameters():
        chosen = transposed == "all" or (transposed == "query" and "query" in name)
        if "layer" in name and parameter.dim() == 2 and chosen:
            parameter.data = parameter.data.t().contiguous().t()
    given = batch([5, 9])
    with torch.no_grad():
        out = tokens(model(**given), given)
        hold("out", out, parent, lambda each: tokens(each(**given), given))
    assert calls == ["backbone"]


def test_the_operator_refuses_rows_that_do_not_fit():
    model, _ = made()
    plan = plan_in(model)

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
    with pytest.raises(RuntimeError, match="rows comes with cu_rows"):
        run([0, 4, 6], [1, 5])
    for size in (0, 5, -12):
        assert run([0, 4, 6], size=size) is None
    assert not torch.ops.fastplm_C.encoder_fits(plan.weights[:-1], 12)


@pytest.mark.parametrize("family", ENCODERS)
def test_an_output_is_that_of_its_constructor(family):
    kind, states = FAMILIES[family][0]._output, [torch.randn(2), torch.randn(2)]
    for count in (1, 2):
        made_by_hand, right = output_of(kind, states[:count]), kind(*states[:count])
        assert type(made_by_hand) is kind and vars(made_by_hand) == vars(right)
        assert list(made_by_hand) == list(right) and repr(made_by_hand) == repr(right)
        assert list(pickle.loads(pickle.dumps(made_by_hand))) == list(right)
        assert pytree.tree_flatten(made_by_hand)[1] == pytree.tree_flatten(right)[1]


def test_a_weight_of_another_shape_or_dtype_is_left_to_the_modules(calls):
    """It thaws at the next call."""
    model, parent = made()
    given = batch([5, 9])
    with torch.no_grad():
        for each in (model, parent):
            wide = torch.randn(48, 140, generator=torch.Generator().manual_seed(0))
            each.encoder.layer[2].output.dense.weight.data = wide[:, ::2]
        out = tokens(model(**given), given)
        assert plan_in(model) is None and not calls
        hold("out", out, parent, lambda each: tokens(each(**given), given))


@pytest.mark.parametrize("unpad", [16, 14])
def test_unused_slots(unpad, calls):
    model, parent = made()
    given = batch([5, 9])
    with torch.no_grad():
        out = model(**given, unpad=unpad).last_hidden_state[1]
        hold("out", out, parent, lambda each: each(**given).last_hidden_state[1])
    assert calls == ["encoder"] * (unpad == 14)


def test_the_default_device_is_not_asked(calls):
    model, _ = made()
    _frozen_encoder._starts.cache_clear()
    ids = batch([7])["input_ids"]
    with torch.no_grad(), torch.device("meta"):
        model(ids)
    with torch.no_grad():
        model(ids)
    assert calls[-1]


def test_a_decoder(calls):
    model, parent = made(is_decoder=True)
    with torch.no_grad():
        hold("out", model(**batch([5]))[0], parent, lambda each: each(**batch([5]))[0])
    assert not any(calls)


@pytest.mark.parametrize("faster", [False, True])
def test_it_runs_where_the_rules_say_so(faster, calls, measured):
    model, _ = made()
    asked = []

    def ours(op, form, dtype, sizes):
        asked.append((op, sizes))
        return op == "encoder" and faster

    measured.ours = ours
    with torch.no_grad(), fastplm.use_backend("auto"):
        model(**batch([5, 9]))
    assert calls == ["backbone"] * faster
    assert {sizes for op, sizes in asked if op == "encoder"} == {(14, 48)}


def test_sequences_without_a_row(calls):
    """Some are all padding, and of some the last layer computes nothing."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT)
    model = fastplm.freeze(models.BertModel(config, add_pooling_layer=False))
    parent = parent_of(model)
    given = batch([257, 3, 257, 257, 11])
    given["attention_mask"][1], given["input_ids"][1] = 0, 1
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
    assert calls[:2] == ["encoder", "backbone"]


def test_a_tuple():
    model, _ = made()
    with torch.no_grad():
        out, expected = model(**batch([5]), return_dict=False), model(**batch([5]))
    assert type(out) is tuple
    torch.testing.assert_close(out, expected.to_tuple(), rtol=1e-3, atol=1e-3)


def test_explain_says_it():
    model, _ = made()
    with torch.no_grad(), record_notes() as notes:
        model(**batch([5, 9]))
    assert "3 layers in one call" in notes[-1]


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
        "input_ids": torch.tensor([[3, 7, 1, 5, 1, 1], [6, 1, 1, 1, 1, 8]]),
        "attention_mask": torch.tensor([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1]]),
    },
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("family", ENCODERS)
def test_from_ids_on(family, given, calls):
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
    assert {*calls} == {"backbone"}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("family", ENCODERS)
def test_from_ids_on_the_first_tokens_only(family, given, calls):
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
    assert {*calls} == {"backbone"}


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
def test_a_head_of_a_model_that_is_called_whole(head, accelerated, calls):
    """Both of ours and of Transformers after ``accelerate``; it reads the rows that were asked."""
    name, given = HEADS[head], batch([9, 9] if head == "spans" else [5, 9, 1])
    torch.manual_seed(0)
    config = FAMILIES[name.partition("For")[0].lower()][1](**BERT)
    model = getattr(transformers if accelerated else models, name)(config).eval()
    parent = copy.deepcopy(model) if accelerated else parent_of(model)
    fastplm.freeze(fastplm.accelerate(model))
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
    assert calls == ["backbone"]


LEFT = {
    "padding on the left": {**batch([6, 6]), "attention_mask": torch.arange(6).expand(2, 6) > 1},
    "a mask of floats": {**batch([6]), "attention_mask": torch.ones(1, 6)},
    "one mask for all": {**batch([6, 6]), "attention_mask": torch.ones(1, 6).long()},
    "by columns": {"input_ids": batch([6, 6])["input_ids"].t().contiguous().t()},
    "positions": {**batch([6]), "position_ids": torch.arange(6)[None] + 3},
    "embeddings": {"inputs_embeds": torch.ones(1, 6, 48)},
    "rows": {**batch([6, 6]), "output_rows": torch.tensor([3, 7])},
    "padding that is kept": {**batch([6, 4]), "unpad": False},
    "padding that is computed": {**batch([6, 4]), "extra_rows": torch.ones(2, 6).bool()},
    "the first row of a sequence without one": {
        **{**batch([6, 6]), "attention_mask": torch.arange(12).view(2, 6) < 6},
        "output_rows": "first",
    },
}


@pytest.mark.parametrize("given", LEFT)
def test_what_is_left_to_the_modules(given, calls):
    model, parent = made("electra" if "without a pooler" in given else "bert")
    rows = LEFT[given].get("output_rows")
    own = ("output_rows", "unpad", "extra_rows")
    theirs = {name: value for name, value in LEFT[given].items() if name not in own}

    def read(out):
        if isinstance(rows, torch.Tensor):
            return out[0].flatten(0, 1)[rows]
        return tokens(out, theirs) if rows is None else out[0][:1, 0]

    with torch.no_grad():
        out = model(**LEFT[given])
        out = out[0][:, 0] if isinstance(rows, torch.Tensor) else read(out)
        hold(given, out, parent, lambda each: read(each(**theirs)))
    assert "backbone" not in calls


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
@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("rows", [{}, {"unpad": False}, {"output_rows": "first"}], ids=str)
def test_wrong_input_gets_the_error_of_the_modules(family, rows, given, monkeypatch):
    model, _ = made(family)
    raised = []
    for each in (model, copy.deepcopy(model)):  # which is not frozen
        with torch.no_grad(), pytest.raises(Exception) as info:
            each(**WRONG[given], **rows)
        raised.append((type(info.value), str(info.value)))
    assert raised[0] == raised[1]


def test_the_operator_of_a_whole_model_refuses_other_lists():
    model, _ = made()
    plan = plan_in(model)

    def run(
        embeddings=plan.embeddings,
        projection=(),
        weights=plan.weights,
        pooler=plan.pooler,
        first_only=False,
    ):
        given = torch.tensor([[3, 4]])
        return torch.ops.fastplm_C.backbone(
            *(given, None, None, embeddings, list(projection), weights, pooler),
            *(-1, plan.head_size, plan.embeddings_eps, plan.eps, plan.tanh, first_only),
        )

    assert [each.shape for each in run()] == [(1, 2, 48), (1, 48)]
    assert [each.shape for each in run(pooler=[])] == [(1, 2, 48)]
    assert [each.shape for each in run(pooler=[], first_only=True)] == [(1, 1, 48)]
    assert not run(embeddings=plan.embeddings[:-1]) and not run(weights=plan.weights[1:])
    for cut in (plan.pooler[:1], plan.pooler * 2, plan.pooler[::-1]):
        assert not run(pooler=cut) and not run(projection=cut)


@pytest.mark.parametrize("family", ENCODERS)
def test_what_was_measured_is_asked_of_the_tokens(family, monkeypatch):
    """Padding does not go through the layers, so it is no reason for or against one call."""
    asked = []
    monkeypatch.setattr(_frozen_encoder, "_is_faster", lambda rows, *_: asked.append(rows) or True)
    model, _ = made(family)
    with torch.no_grad(), fastplm.use_backend("auto", "linear"):
        model(**batch([5, 1, 9, 2]))
        model(batch([7, 7])["input_ids"])
    assert asked == [17, 14]
