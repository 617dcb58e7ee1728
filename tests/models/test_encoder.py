"""Unusual inputs, configurations and changes of models, for BERT as an example of all encoders."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch._dynamo.testing
import transformers
from accelerate.utils import send_to_device
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config
from transformers.models.bert import modeling_bert

from fastplm import models
from fastplm.errors import ArgumentValueError
from fastplm.models import _ragged
from fastplm.models._encoder import cross_inputs
from fastplm.models._ragged import LastRows, RaggedBatch, Rows
from fastplm.nn._rows import compact

from .conftest import (
    LENGTH,
    PADDINGS,
    ROWS,
    changed,
    config_of,
    eager_parent,
    gradients,
    loss_of,
    same,
    small_config,
)

VOCAB = 37
CONFIG = small_config(
    "bert", num_hidden_layers=3, num_labels=3, hidden_size=32, intermediate_size=48
)
MASK = PADDINGS["right"]
HOLES = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1], [0] * 8 + [1], [1, 1, 0] * 3, [1] * 9])


def pair(name="BertForMaskedLM", **changes):
    ours = getattr(models, name)(changed(CONFIG, **changes))
    return ours, eager_parent(type(ours), changed(CONFIG, **changes))


def batch(mask=MASK):
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH))
    labels = ids.masked_fill(torch.rand(ROWS, LENGTH) > 0.3, -100)
    labels[:, 0] = 7
    return ids, labels.masked_fill(mask == 0, -100)


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_may_have_holes_and_any_dtype(hold, dtype):
    ids, labels = batch(HOLES)
    hold(*pair(), loss_of(input_ids=ids, attention_mask=HOLES.to(dtype), labels=labels))
    shown = (HOLES == 0) & (torch.arange(LENGTH) < 3)
    rows, expected = (RaggedBatch.of(mask, shown) for mask in (HOLES.to(dtype), HOLES.bool()))
    assert rows.key_mask.dtype is torch.bool and torch.equal(rows.key_mask, expected.key_mask)


def test_an_encoders_mask_that_cannot_be_read_beside_packed_rows(monkeypatch):
    """As in a CUDA graph with a capacity: padding of the source stays, and is masked."""
    monkeypatch.setattr(_ragged, "values_can_be_read", lambda mask: False)
    states, mask = torch.randn(ROWS, LENGTH, 8), PADDINGS["left"]
    given, _ = cross_inputs(states, mask, None, RaggedBatch.of(MASK))
    assert torch.equal(given["encoder_hidden_states"], states.flatten(0, 1)[None])
    assert torch.equal(given["encoder_attention_mask"], mask.bool().flatten()[None])


def test_one_row_of_mask_positions_or_types_is_for_all_sequences(hold):
    ids, labels = batch()
    row = MASK[1:2]
    mask = row.expand(ROWS, LENGTH)
    labels = labels.masked_fill(mask == 0, -100)
    places, types = torch.arange(LENGTH)[None] + 3, torch.arange(LENGTH)[None] % 2
    given = {"input_ids": ids, "labels": labels, "position_ids": places, "token_type_ids": types}
    hold(
        *pair(),
        loss_of(**given, attention_mask=row),
        loss_of(**given, attention_mask=mask),
    )


@pytest.mark.parametrize("shape", [(ROWS, LENGTH + 3), (ROWS, LENGTH - 3), (ROWS + 1, LENGTH)])
@pytest.mark.parametrize(
    "name",
    ["BertForMaskedLM", "BertForQuestionAnswering", "GPT2LMHeadModel", "OpenAIGPTLMHeadModel"],
)
def test_a_mask_of_another_shape_is_an_error(name, shape):
    """Transformers takes some of these inputs, and fails on others deep inside."""
    model = getattr(models, name)(config_of(name))
    for extra in ({}, {"unpad": False}):
        with pytest.raises(ArgumentValueError, match="attention_mask"):
            model(batch()[0], attention_mask=torch.ones(shape), **extra)


def test_masked_positions_in_any_order_repeated_or_without_label(hold):
    """The loss counts the token of each position, also if a position occurs twice."""
    ids, labels = batch()
    positions = torch.tensor([18, -1, 0, 9, 0, 5, -1])
    expected = torch.cat((labels.flatten(), torch.tensor([-100])))[positions]

    def parent_run(model):
        logits = model(ids, attention_mask=MASK).logits.flatten(0, 1)[positions.clamp(min=0)]
        return {"loss": nn.functional.cross_entropy(logits, expected)}

    run = loss_of(
        input_ids=ids, attention_mask=MASK, labels=labels.int(), masked_positions=positions
    )
    hold(*pair(), run, parent_run)


def test_a_sequence_of_one_token(hold):
    ids, labels = batch()
    hold(*pair(), loss_of(input_ids=ids[:, :1], labels=labels[:, :1]))


# --- configurations -------------------------------------------------------------------------------


def test_chunks_of_the_feed_forward_part(hold):
    ids, labels = batch()
    ours, parent = pair(chunk_size_feed_forward=3)
    hold(ours, parent, loss_of(input_ids=ids, attention_mask=MASK, labels=labels))
    seen = []
    ours.bert.encoder.layer[0].intermediate.register_forward_hook(lambda *given: seen.append(0))
    ours(ids)
    assert len(seen) == LENGTH // 3


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_outputs_by_configuration(hold, name):
    ids, labels = batch()
    labels = labels[:, 0] % 3 if "Sequence" in name else labels
    asked = {"output_logits": True} if name == "BertForMaskedLM" else {}

    def run(model, **extra):
        loss, logits, states = model(ids, MASK, labels=labels, **extra)
        return {"loss": loss, "states": torch.stack(states)[:, MASK.bool()]}

    ours, parent = pair(name, return_dict=False, output_hidden_states=True)
    hold(ours, parent, lambda model: run(model, **asked), run)


# --- models that the user changed -----------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [[0, 1], [0, 1, 1], [1, 0, 1, 2], [2, 0]], ids=lambda order: "".join(map(str, order))
)
def test_layers_taken_out_or_repeated(hold, order):
    ids, labels = batch()
    ours, parent = pair()
    parent.load_state_dict(ours.state_dict())
    for model in (ours, parent):
        layers = model.bert.encoder.layer
        model.bert.encoder.layer = nn.ModuleList([layers[i] for i in order])
    hold(ours, parent, loss_of(input_ids=ids, attention_mask=MASK, labels=labels))


class Doubled(nn.Module):
    """An adapter that replaces a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, rows):
        return self.base(rows) * 2 + rows.sum(-1, keepdim=True)


class OwnLayer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs).tanh()


class OwnSelfAttention(modeling_bert.BertSelfAttention):
    def forward(self, hidden_states, attention_mask=None, **kwargs):
        out, weights = super().forward(hidden_states, attention_mask, **kwargs)
        return out * 2, weights


class OwnHead(modeling_bert.BertLMPredictionHead):
    def forward(self, rows):
        return super().forward(rows).tanh()


def last_layer(model):
    return model.bert.encoder.layer[-1]


def own_layer(model):
    model.bert.encoder.layer[-1] = OwnLayer(last_layer(model))


def own_projections(model):
    attention = last_layer(model).attention.self
    attention.key, attention.query = Doubled(attention.key), Doubled(attention.query)


def halve(module):
    """Add a hook that halves the output, or the first of several outputs."""

    def hook(module, args, out):
        return (out[0] * 0.5, *out[1:]) if isinstance(out, tuple) else out * 0.5

    module.register_forward_hook(hook)


USER_CHANGES = {
    "own self-attention": lambda m: setattr(
        last_layer(m).attention.self, "__class__", OwnSelfAttention
    ),
    "own layer": own_layer,
    "own projections": own_projections,
    "own head": lambda m: setattr(m.cls.predictions, "__class__", OwnHead),
    "hook on head": lambda m: halve(m.cls),
    "hook on predictions": lambda m: halve(m.cls.predictions),
    "hook on layer": lambda m: halve(last_layer(m)),
    "hook on self-attention": lambda m: halve(last_layer(m).attention.self),
    "hook on attention": lambda m: halve(last_layer(m).attention),
    "frozen": lambda m: m.bert.requires_grad_(False),
}


@pytest.mark.parametrize("change", USER_CHANGES.values(), ids=USER_CHANGES)
def test_user_changes_of_a_model_equal_the_parent(hold, change):
    ids, labels = batch()
    ours, parent = pair()
    change(ours)
    change(parent)
    hold(ours, parent, loss_of(input_ids=ids, attention_mask=MASK, labels=labels))


# --- parts of a layer called alone ----------------------------------------------------------------


def feed_forward(dtype=torch.float64):
    """A layer, and ``feed_forward_chunk`` of Transformers' layer with the same weights."""
    ours, parent = pair()
    parent.load_state_dict(ours.state_dict())
    return last_layer(ours).to(dtype).eval(), last_layer(parent).to(dtype).eval()


class Negated(nn.Module):
    """A module that is not a dropout, but replaces one."""

    def forward(self, rows):
        return -rows


def test_a_users_dropout_is_called_in_evaluation():
    layer, parent = feed_forward()
    rows = torch.randn(ROWS, LENGTH, 32, dtype=torch.float64)
    for each in (layer, parent):
        each.output.dropout = Negated().eval()
    with torch.no_grad():
        torch.testing.assert_close(*(each.feed_forward_chunk(rows) for each in (layer, parent)))
    layer.output.dropout = nn.Dropout().eval()
    layer.output.dropout.register_forward_hook(lambda module, given, out: -out)
    with torch.no_grad():
        torch.testing.assert_close(*(each.feed_forward_chunk(rows) for each in (layer, parent)))


@pytest.mark.parametrize("where", ["intermediate", "output"])
def test_a_users_projection_keeps_its_output(where):
    layer, parent = feed_forward()
    own = [copy.deepcopy(each) for each in (layer, parent)]
    for each in own:
        block = getattr(each, where)
        block.dense = Doubled(block.dense)
    rows = torch.randn(ROWS, LENGTH, 32, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(*(each.feed_forward_chunk(rows) for each in own))


def test_a_residual_may_be_wider_than_the_product():
    layer, parent = feed_forward()
    row, wide = torch.randn(1, 48).double(), torch.randn(ROWS, 32).double()
    with torch.no_grad():
        torch.testing.assert_close(layer.output(row, wide), parent.output(row, wide))


def test_parts_of_a_layer_under_transforms():
    """vmap over the residual alone, whose rows the product does not have; jvp without gradients."""
    layer, parent = feed_forward()
    rows, other = torch.randn(2, ROWS, LENGTH, 32, dtype=torch.float64)
    wide = torch.randn(ROWS, LENGTH, 48, dtype=torch.float64)

    def mapped(layer):
        return torch.vmap(lambda row: layer.output(wide[0], row))(rows)

    def pushed(layer):
        return torch.func.jvp(layer.feed_forward_chunk, (rows,), (other,))

    with torch.no_grad():
        for run in (mapped, pushed):
            torch.testing.assert_close(run(layer), run(parent))


def test_larger_input_embeddings():
    model, parent = pair("BertModel")
    for each in (model, parent):
        each.set_input_embeddings(nn.Embedding(VOCAB + 8, 32))
    parent.load_state_dict(model.state_dict())
    ids = torch.full((1, 3), VOCAB + 7)
    torch.testing.assert_close(model(ids)[0], parent(ids)[0])
    with pytest.raises(ArgumentValueError, match="vocabulary"):
        model(ids + 1)


def test_a_backbone_of_transformers_in_a_head_of_ours_is_an_error():
    """Such a backbone would return all rows, and the head would read the wrong ones."""
    model, parent = pair()
    model.bert = parent.bert
    ids, labels = batch()
    with pytest.raises(ArgumentValueError, match="part that is a BertModel"):
        model(ids, labels=labels)

    own = GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=2, n_positions=20)
    own.pad_token_id = 0
    model = models.GPT2ForSequenceClassification(own)
    model.transformer = transformers.GPT2Model(copy.deepcopy(own))
    with pytest.raises(ArgumentValueError, match="part that is a GPT2Model"):
        model(ids)


def test_a_decoder_takes_an_encoder_mask_of_4_dimensions(hold):
    ids, labels = batch()
    states = torch.randn(ROWS, 5, 32)
    seen = torch.rand(ROWS, 1, LENGTH, 5) < 0.7
    seen[..., 0] = True

    def run(model):
        given = {
            "encoder_hidden_states": states.to(model.dtype),
            "encoder_attention_mask": torch.zeros(seen.shape, dtype=model.dtype).masked_fill(
                ~seen, torch.finfo(model.dtype).min
            ),
        }
        return {"loss": model(ids, attention_mask=MASK, labels=labels, **given).loss}

    hold(*pair("BertLMHeadModel", is_decoder=True, add_cross_attention=True), run)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(reentrant):
    ids, labels = batch()
    model, _ = pair()
    run = loss_of(ids, attention_mask=MASK, labels=labels)
    plain = gradients(model.train(), run(model)["loss"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert same(gradients(model, run(model)["loss"]), plain)


def test_what_the_layers_are_told_moves_to_another_device():
    """Accelerate moves the arguments of a layer that lies on another device."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    own = RaggedBatch.of(mask)
    last = LastRows.of(1, mask.bool(), 3, 3, own, None)
    moved = send_to_device({"rows": Rows(own, None, last)}, torch.device("meta"))["rows"]
    tensors = [value for part in (moved.packed, moved.last) for value in vars(part).values()]
    tensors = [value for value in tensors if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6 and all(value.is_meta for value in tensors)
    assert moved.packed.max_seqlen == own.max_seqlen and moved.last.layer == 1


# --- host time ------------------------------------------------------------------------------------


class _Dispatched(TorchDispatchMode):
    """Counts the operators that a forward dispatches."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def _python_calls(run):
    count = 0

    def called(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


#: Operators that a batch without padding may add to the parent's: for a forward, and for a layer.
#: A forward adds the checks of the inputs, and asks twice whether one call is faster. A layer looks
#: whether its modules are as they were made, and views rows as matrices; each of its six products
#: asks whether csrc/ is faster.
_MORE_OPERATORS, _MORE_OPERATORS_A_LAYER = 4, 18
_MORE_CALLS, _MORE_CALLS_A_LAYER = 135, 210


@pytest.mark.parametrize("given", ["mask", "no mask"])
def test_a_batch_without_padding_costs_the_host_what_it_costs_the_parent(given):
    ids, _ = batch()
    inputs = {"input_ids": ids}
    if given == "mask":
        inputs["attention_mask"] = torch.ones_like(ids)
    operators, calls = [], []
    for layers in (2, 6):
        config = changed(CONFIG, num_hidden_layers=layers)
        parent = transformers.BertModel._from_config(config, attn_implementation="sdpa")
        for model in (models.BertModel(changed(CONFIG, num_hidden_layers=layers)), parent):
            model.eval()
            with torch.inference_mode():
                model(**inputs)  # does the work that happens only once
                with _Dispatched() as dispatched:
                    model(**inputs)
                operators.append(dispatched.count)
                calls.append(_python_calls(lambda model=model: model(**inputs)))
    for (ours, theirs), layers in ((operators[:2], 2), (operators[2:], 6)):
        assert ours <= theirs + _MORE_OPERATORS + layers * _MORE_OPERATORS_A_LAYER
    ours, theirs = calls[0] - calls[1], calls[2] - calls[3]
    print(operators, calls)
    assert (theirs - ours) / 4 <= _MORE_CALLS_A_LAYER
    assert ours - 2 * (theirs - ours) / 4 <= _MORE_CALLS


def test_positions_without_a_look_at_values():
    """As a compiled model and a GPU find them: the same, with unused slots at the end."""
    mask = torch.rand(4, 9) < 0.6
    count = int(mask.sum())
    find = torch.compile(compact, backend="eager", fullgraph=True)
    for size in (count, count + 2, mask.numel()):
        expected = mask.flatten().nonzero()[:, 0]
        expected = torch.nn.functional.pad(expected, (0, size - count), value=-1)
        assert torch.equal(find(mask, size), expected)
        assert torch.equal(compact(mask, size), expected)
