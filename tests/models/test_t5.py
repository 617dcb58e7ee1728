"""fastplm.models.t5: tests beyond test_contract.py and test_seq2seq.py."""

from __future__ import annotations

import copy
import re

import pytest
import torch
import transformers
from transformers.models.t5 import modeling_t5

import fastplm.hf
from fastplm import models
from fastplm._backends import record_decisions
from fastplm.models import T5ForConditionalGeneration, T5Model
from fastplm.models._base import switch_modules
from fastplm.testing import GRADIENT_FACTOR

from . import conftest
from .conftest import LENGTH, OF_BLOCKS, PADDINGS, ROWS, changed, small_config, trained

CONFIG = small_config("t5", num_labels=3)
#: A model with gated GELU, and with an untied head whose input is not scaled.
V1_1 = dict(is_gated_act=True, dense_act_fn="gelu_new")
V1_1 |= dict(tie_word_embeddings=False, scale_decoder_outputs=False)
HOLES = torch.tensor(
    [[1, 0, 1, 1, 1, 1, 0, 0, 1], [0, 1, 1, 0, 0, 1, 1, 0, 0], [1] * 8 + [0], [0] * 3 + [1] * 6]
)


def inputs_of(name, padding="right"):
    return conftest.inputs_of(name, CONFIG, PADDINGS[padding])


@pytest.mark.parametrize("options", [{}, {"decoder_unpad": False}], ids=str)
@pytest.mark.parametrize("fields", [{}, V1_1], ids=["v1.0", "v1.1"])
def test_holes_in_the_source_equal_the_parents(hold_drop_in, fields, options):
    config = changed(CONFIG, **fields)
    given = {"attention_mask": HOLES}
    hold_drop_in(T5ForConditionalGeneration, config, "right", given=given, **options)


def test_a_decoder_with_a_cache_equals_the_parents(hold_drop_in):
    hold_drop_in(T5Model, CONFIG, "left", given={"use_cache": True})


@pytest.mark.parametrize("enabled", [True, False], ids=["autocast", "fp32"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_feed_forward_layer_under_autocast(gated, enabled):
    """Equal to the parent's, bit for bit, with a second matrix that reads what the first made."""
    config = changed(CONFIG, **(V1_1 | {"dense_act_fn": "relu"} if gated else {}))
    parent = modeling_t5.T5LayerFF(config).DenseReluDense
    ours = copy.deepcopy(parent)
    switch_modules(ours)
    assert type(ours) is not type(parent)
    found = []
    for layer in (parent, ours):
        read = []
        layer.wo.register_forward_pre_hook(lambda wo, args, read=read: read.append(args[0].dtype))
        torch.manual_seed(3)
        x = torch.randn(5, 7, config.d_model, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = layer(x)
        out.float().square().sum().backward()
        found.append((out, x.grad, *(weight.grad for weight in layer.parameters())))
    assert read == [torch.bfloat16 if enabled else torch.float32]
    for ours_is, parents in zip(*found, strict=True):
        assert ours_is.dtype == parents.dtype and torch.equal(ours_is, parents)


def test_no_layer_gets_a_dense_bias(monkeypatch):
    """Layers pass the table on as the position bias, also for a padded batch."""
    seen, inner = [], fastplm.hf._relative_bias

    def spy(module, query, key, position_bias):
        seen.append(position_bias)
        return inner(module, query, key, position_bias)

    monkeypatch.setattr(fastplm.hf, "_relative_bias", spy)
    model, given = T5ForConditionalGeneration(CONFIG), inputs_of("T5ForConditionalGeneration")
    for unpad in (None, False):
        with record_decisions() as decisions:
            model(**given, unpad=unpad, decoder_unpad=unpad)
        assert [decision.op for decision in decisions].count("attention") == 6
    assert len(seen) == 12 and not any(isinstance(bias, torch.Tensor) for bias in seen)


def test_a_table_goes_with_a_complete_mask():
    query = torch.randn(1, 2, 3, 8)
    bias = fastplm.ops.T5RelativeBias(torch.randn(8, 2))
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    found, _ = fastplm.hf.fastplm_attention_forward(
        torch.nn.Identity(), query, query, query, mask, scaling=1.0, position_bias=bias
    )
    wanted = fastplm.ops.attention(
        query, query, query, attn_mask=mask, scale=1.0, relative_bias=bias
    )
    assert torch.equal(found, wanted.transpose(1, 2))


def test_a_decoder_without_inputs_is_the_parents_error():
    given = inputs_of("T5Model") | {"decoder_input_ids": None}
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        T5Model(CONFIG)(**given)


def test_a_classifiers_decoder_of_another_length_is_the_parents_error():
    given = inputs_of("T5ForSequenceClassification")
    given["decoder_input_ids"] = torch.full((ROWS, LENGTH + 2), 5)
    with pytest.raises(IndexError):
        models.T5ForSequenceClassification(CONFIG)(**given)


@pytest.mark.parametrize("unpad", [None, 20])
def test_question_answering_computes_every_row_of_the_decoder(unpad):
    given = inputs_of("T5ForQuestionAnswering")
    given["decoder_input_ids"] = given["input_ids"]
    given["decoder_attention_mask"] = given["attention_mask"]
    model = models.T5ForQuestionAnswering(changed(CONFIG, num_labels=2))
    assert torch.equal(model(**given).loss, model(**given, decoder_unpad=unpad).loss)


# --- blocks by the functions of ``_layer`` --------------------------------------------------------

FORMS = {"v1.0": {}, "v1.1": V1_1, "gated ReLU": dict(is_gated_act=True, dense_act_fn="relu")}
every_form = pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)


#: What two layers on each side run: 6 attentions, of which the 2 across project twice.
ALL_RUN = {"project": 8, "join": 10, "expand": 4}


def of_training(fields, p=0.1, **more):
    config = changed(CONFIG, dropout_rate=p, num_layers=2, num_decoder_layers=2, **fields, **more)
    torch.manual_seed(1)
    return T5ForConditionalGeneration(config).train()


@every_form
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_blocks_equal_the_modules(runs, fields, padding, p):
    """With dropout, too, whose seeds are drawn in the same order."""
    model, given = of_training(fields, p), inputs_of("T5ForConditionalGeneration", padding)
    found = trained(model, given)
    assert runs == ALL_RUN
    wanted = trained(model, given, OF_BLOCKS)
    assert runs == ALL_RUN
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


@every_form
def test_the_gradients_of_blocks_are_as_exact_as_the_parents(fields):
    model, given = of_training(fields, 0.0), inputs_of("T5ForConditionalGeneration", "right")
    exact = transformers.T5ForConditionalGeneration(model.config)
    exact.load_state_dict(model.state_dict())
    parent = trained(exact, given)[1]
    parent = {name: one.clone() for name, one in parent.items()}
    wanted = trained(exact.double(), given)[1]
    found = trained(model, given)[1]
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        error = (found[name] - one).norm() / one.norm()
        assert error <= max(GRADIENT_FACTOR * (parent[name] - one).norm() / one.norm(), 1e-6), name


@every_form
def test_blocks_under_autocast_are_as_exact_as_the_parents(runs, fields):
    """The sums between the blocks are bf16 there, and fp32 in the parent."""
    given = inputs_of("T5ForConditionalGeneration", "right")
    model = of_training(fields, 0.0)
    parent = transformers.T5ForConditionalGeneration(model.config)
    parent.load_state_dict(model.state_dict())
    errors = []
    for one in (parent, model):
        # As on a GPU: on a CPU the modules run under autocast, unless a backend is asked for.
        asked = fastplm.use_backend("cpp", "dropout_add_layer_norm", "bias_gelu")
        with torch.autocast("cpu", torch.bfloat16), asked:
            torch.manual_seed(7)
            one.zero_grad()
            outputs = one(**given)
        outputs.loss.backward()
        used = {name: p.grad for name, p in one.named_parameters() if p.grad is not None}
        errors.append(used)
    assert runs == ALL_RUN
    _, exact = trained(parent.double(), given)

    def error(found):
        off = sum((found[name].double() - exact[name]).square().sum() for name in exact)
        return (off / sum(one.square().sum() for one in exact.values())).sqrt()

    assert all(found.dtype is torch.float32 for found in errors[1].values())
    assert error(errors[1]) <= 2 * error(errors[0])
    assert outputs.encoder_last_hidden_state.dtype is torch.float32


@every_form
@pytest.mark.parametrize(
    "frozen", ["wi|DenseReluDense.wo", "SelfAttention", "layer_norm", "shared"]
)
def test_frozen_parameters_of_blocks(runs, fields, frozen):
    model, given = of_training(fields), inputs_of("T5ForConditionalGeneration", "right")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(frozen, name))
    found = trained(model, given)
    assert runs == ALL_RUN
    wanted = trained(model, given, OF_BLOCKS)
    assert found[1].keys() == wanted[1].keys()
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-6)


def halved(module):
    module.register_forward_hook(lambda module, given, out: out / 2)


CHANGES = {
    "a query": (lambda block: halved(block[0].SelfAttention.q), {"project": 7}),
    "an output": (lambda block: halved(block[0].SelfAttention.o), {"join": 9}),
    "a value across": (lambda block: halved(block[1].EncDecAttention.v), {"project": 6}),
    "a norm": (lambda block: halved(block[1].layer_norm), {"join": 9}),
    "a dropout": (lambda block: halved(block[2].DenseReluDense.dropout), {"join": 9, "expand": 3}),
    "an inner product": (
        lambda block: halved(block[2].DenseReluDense.wi),
        {"join": 9, "expand": 3},
    ),
    "an activation": (
        lambda block: setattr(block[2].DenseReluDense, "act", torch.nn.Mish()),
        {"join": 9, "expand": 3},
    ),
}
OF_ENCODER = {"project": 2, "join": 4, "expand": 2}
AROUND = {
    "attention": lambda block: block[0].SelfAttention.register_forward_hook(
        lambda module, given, out: (out[0] / 2, *out[1:])
    ),
    "feed-forward": lambda block: halved(block[2].DenseReluDense),
    "sublayer": lambda block: halved(block[2]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_checkpointed_modules_drop_the_same_again(change):
    """The backward runs them alone, so they find the numbers of their rows in the checkpoint."""
    model, given = of_training({}, 0.3), inputs_of("T5ForConditionalGeneration", "right")
    change[0](model.decoder.block[1].layer)
    wanted = trained(model, given)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(trained(model, given), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("change, counts", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_with_a_module_of_the_users_runs_that_one(runs, change, counts, autocast):
    model, given = of_training({}), inputs_of("T5ForConditionalGeneration", "right")
    change(model.decoder.block[1].layer)
    asked = fastplm.use_backend("cpp", "dropout_add_layer_norm", "bias_gelu")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        with asked:
            found = trained(model, given)
        assert runs == ALL_RUN | counts
        wanted = trained(model, given, OF_BLOCKS)
    close = dict(rtol=0.3, atol=0.05) if autocast else dict(rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(found, wanted, **close)


def test_parts_of_a_model_that_do_not_train(runs):
    model, given = of_training({}, 0.3), inputs_of("T5ForConditionalGeneration", "right")
    model.encoder.block[1].eval()
    model.decoder.block[0].layer[0].SelfAttention.eval()
    for module in model.decoder.block[1].layer[2].modules():
        if isinstance(module, torch.nn.Dropout):
            module.eval()
    found = trained(model, given)
    assert runs == ALL_RUN
    torch.testing.assert_close(found, trained(model, given, OF_BLOCKS), rtol=2e-5, atol=2e-6)


def test_sums_of_fp16_are_the_parents(runs):
    """They are clamped."""
    model, given = of_training({}, 0.0).half(), inputs_of("T5ForConditionalGeneration", "right")
    model.decoder.block[0].layer[0].SelfAttention.o.weight.data.fill_(60000.0)
    with torch.no_grad():
        assert model(**given).loss.isfinite()
    assert not any(runs.values())


@pytest.mark.parametrize("change", AROUND.values(), ids=AROUND)
def test_a_stack_with_a_hook_around_modules_runs_itself(runs, change):
    model, given = of_training({}), inputs_of("T5ForConditionalGeneration", "right")
    change(model.decoder.block[1].layer)
    found = trained(model, given)
    assert runs == OF_ENCODER
    torch.testing.assert_close(found, trained(model, given, OF_BLOCKS), rtol=2e-5, atol=2e-6)


def test_what_blocks_do_not_return_runs_the_modules(runs):
    model, given = of_training({}, 0.0), inputs_of("T5ForConditionalGeneration", "right")
    hidden = model(**given, output_hidden_states=True).encoder_hidden_states
    assert len(hidden) == 3 and not any(runs.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_run_the_same_functions(runs, reentrant):
    model, given = of_training({}), inputs_of("T5ForConditionalGeneration", "right")
    wanted = trained(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = trained(model, given)
    assert runs == {name: 3 * count for name, count in ALL_RUN.items()}
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_decoder_without_an_encoder(runs):
    """The norm after its attention is that of the feed-forward."""
    decoder = of_training({}).decoder.eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    with torch.no_grad():
        found = decoder(input_ids=ids, use_cache=False).last_hidden_state
        assert runs == OF_ENCODER
        with fastplm.use_backend("eager", "dropout_add_layer_norm"):
            wanted = decoder(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
