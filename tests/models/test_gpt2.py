"""GPT and GPT-2: tests beyond test_contract.py."""

from __future__ import annotations

import contextlib
import re
from unittest import mock

import pytest
import torch
from torch.testing import assert_close
from transformers.models.gpt2 import modeling_gpt2

import fastplm
from fastplm import models
from fastplm._backends import record_decisions
from fastplm.errors import ArgumentValueError
from fastplm.models import (
    GPT2DoubleHeadsModel,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
    OpenAIGPTDoubleHeadsModel,
    OpenAIGPTModel,
)
from fastplm.testing import GRADIENT_FACTOR

from .conftest import (
    CLASSES,
    LENGTH,
    OF_BLOCKS,
    PADDINGS,
    ROWS,
    as_loss,
    changed,
    config_of,
    eager_parent,
    in_dtype_of,
    inputs_of,
    loss_of,
    rows_of,
    small_config,
    trained,
)

VOCAB = 37
CONFIG = small_config("gpt2", use_cache=False)
RIGHT = PADDINGS["right"]


def config(**changes):
    return changed(CONFIG, **changes)


def pair(ours, **changes):
    return ours(config(**changes)), eager_parent(ours, config(**changes))


def batch(mask=None):
    ids = torch.randint(4, VOCAB, (ROWS, LENGTH))
    return ids if mask is None else ids.masked_fill(mask == 0, 0)


@pytest.mark.parametrize("name", [n for n in CLASSES if CLASSES[n] in ("gpt2", "openai")])
def test_padding_is_left_out_and_attention_fused(name):
    settings = config_of(name)
    given = {"exclude_padding": True} if name == "GPT2ForQuestionAnswering" else {}
    if name in ("GPT2Model", "GPT2LMHeadModel", "GPT2DoubleHeadsModel"):
        given["use_cache"] = False  # by default, the other classes return no cache
    settings.use_cache = True
    model = getattr(models, name)(settings)
    shapes = rows_of(model.base_model.h[0])
    with record_decisions() as decisions:
        model(batch(RIGHT), attention_mask=RIGHT, **given)
        model(batch(), **given)
    # By default the last position is classified, which is padding in three rows.
    rows = int(RIGHT.sum()) + (3 if name.endswith("DoubleHeadsModel") else 0)
    assert shapes == [(1, rows), (ROWS, LENGTH)]
    assert [decision.op for decision in decisions].count("attention") == 2 * CONFIG.n_layer


def test_position_ids_that_restart_keep_texts_apart_without_a_cache(hold):
    """As what Transformers' flattening collator returns; a cache is made only on request."""
    ours, parent = pair(GPT2LMHeadModel, use_cache=True)
    ids, places = batch().view(1, -1), torch.arange(LENGTH).repeat(ROWS)[None]
    given = {"position_ids": places, "labels": ids.masked_fill(places == 0, -100)}
    hold(ours, parent, loss_of(ids, **given), loss_of(ids, **given, use_cache=False))
    hold(ours, parent, loss_of(ids, **given, use_cache=True))


@pytest.mark.parametrize("use_cache", [None, True])
def test_a_cache_keeps_the_parents_padded_path(hold, use_cache):
    ids, (ours, parent) = batch(RIGHT), pair(GPT2LMHeadModel, use_cache=True)
    shapes = rows_of(ours.transformer.h[0])
    inputs = {"input_ids": ids, "attention_mask": RIGHT, "use_cache": use_cache}
    assert (ours(**inputs, labels=ids).past_key_values is None) == (use_cache is None)
    ours(**inputs)
    assert shapes[1] == (ROWS, LENGTH)

    def run(model):
        """Run two steps; the positions of the second begin where the first ended."""
        out = model(ids[:, :5], use_cache=use_cache)
        out = model(ids[:, 5:], past_key_values=out.past_key_values, use_cache=use_cache)
        return {"logits": out.logits, "loss": as_loss(out.logits)}

    hold(ours, parent, run)


@pytest.mark.parametrize("option", ["scale_attn_by_inverse_layer_idx", "scale_attn_weights"])
def test_the_scale_of_attention_is_the_parents(hold_drop_in, option):
    hold_drop_in(GPT2LMHeadModel, config(**{option: not getattr(CONFIG, option)}), "right")


def test_reorder_and_upcast_attn_affects_only_eager_attention():
    """The parent's other implementations do not read the options either."""
    models = [GPT2Model(config(reorder_and_upcast_attn=option)) for option in (False, True)]
    models[1].load_state_dict(models[0].state_dict())
    ids = batch(RIGHT)
    assert torch.equal(*(model(ids, attention_mask=RIGHT)[0] for model in models))


def test_classification_reads_one_row_a_sequence():
    model, parent = pair(GPT2ForSequenceClassification)
    parent.load_state_dict(model.state_dict())
    seen, ids = rows_of(model.score), batch(RIGHT)
    model(ids, attention_mask=RIGHT)
    assert seen == [(ROWS,)]
    embeds = model.transformer.wte(ids)
    assert_close(model(inputs_embeds=embeds).logits, parent(inputs_embeds=embeds).logits)
    # Without a mask padding is a token like any other, but is not classified.
    assert_close(model(ids).logits, parent(ids).logits)


def test_double_heads_read_the_rows_of_a_loss_alone():
    model = GPT2DoubleHeadsModel(config())
    ids = batch().expand(3, ROWS, LENGTH)
    labels = torch.full_like(ids, -100)
    labels[0, 0, 3] = 5
    out = model(ids, labels=labels, mc_labels=torch.zeros(3, dtype=torch.int64))
    assert out.logits is None and out.mc_logits.shape == (3, ROWS)
    asked = model(ids, labels=labels, output_logits=True)
    assert asked.logits.shape == (3, ROWS, LENGTH, VOCAB)
    assert torch.equal(asked.logits, model(ids).logits)
    with pytest.raises(ArgumentValueError, match="mc_token_ids"):
        model(ids, mc_token_ids=torch.full((3, ROWS), LENGTH))


@pytest.mark.parametrize("summary", ["cls_index", "mean", "last", "first"])
@pytest.mark.parametrize("choices", [(), (2,)], ids=["[B, T]", "[B, C, T]"])
def test_double_heads_with_any_summary(hold, summary, choices):
    ids = batch(RIGHT).view(-1, *choices, LENGTH)
    mask = RIGHT.view(ids.shape)

    def run(model):
        out = model(ids, attention_mask=mask)
        return {"mc_logits": out.mc_logits, "loss": as_loss(out.mc_logits)}

    hold(*pair(GPT2DoubleHeadsModel, summary_type=summary), run)


SOURCE_MASK = torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [1] + [0] * 5, [0] * 2 + [1] * 4])


def test_output_attentions_equal_the_parents(hold):
    ids, states = batch(RIGHT), torch.randn(ROWS, 6, CONFIG.n_embd)

    def run(model):
        given = {"encoder_hidden_states": states.to(model.dtype), "output_attentions": True}
        out = model(ids, attention_mask=RIGHT, encoder_attention_mask=SOURCE_MASK, **given)
        names = ("self 0", "self 1", "cross 0", "cross 1")
        weights = dict(zip(names, out.attentions + out.cross_attentions, strict=True))
        return {**weights, "loss": as_loss(*weights.values())}

    hold(*pair(GPT2Model, add_cross_attention=True), run)


def test_accumulated_choices_are_one_batch(hold):
    """The sum of the language model's loss and the choice's loss is trained."""
    ids = torch.randint(4, VOCAB, (ROWS, 2, LENGTH))
    # Each part has the same number of labels, so that the mean of the choices weighs them equally.
    labels, right = ids.masked_fill(torch.arange(LENGTH) % 3 == 0, -100), torch.tensor([0, 1, 1, 0])

    def run(model, rows, **items):
        total = 0.0
        for part in torch.arange(ROWS).split(rows):
            out = model(ids[part], labels=labels[part], mc_labels=right[part], **items)
            total = total + out.loss + out.mc_loss
        return {"loss": total}

    ours = OpenAIGPTDoubleHeadsModel(small_config("openai"))
    count = int((labels[..., 1:] != -100).sum())
    parent = eager_parent(OpenAIGPTDoubleHeadsModel, small_config("openai"))
    hold(
        ours,
        parent,
        lambda model: run(model, 2, num_items_in_batch=count),
        lambda model: run(model, ROWS),
    )


def test_the_same_seed_drops_the_same():
    model = OpenAIGPTModel(small_config("openai", attn_pdrop=0.5)).train()
    ids, runs = batch(RIGHT), []
    for seed, unpad in ((0, None), (0, None), (0, 30), (1, None)):
        torch.manual_seed(seed)
        runs.append(model(ids, attention_mask=RIGHT, unpad=unpad)[0])
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
    assert not torch.equal(runs[0], runs[3])


@pytest.mark.parametrize("kind", ("GPT2ForSequenceClassification", "GPT2DoubleHeadsModel"))
def test_a_head_returns_the_attentions_alone(kind):
    """There is no cross-attention, so its attentions are not returned; the output has no field."""
    model = getattr(models, kind)(config(pad_token_id=0)).eval()
    ids = torch.randint(3, 9, (1, 1, 5) if "Double" in kind else (1, 5))
    assert len(model(ids, output_attentions=True).attentions) == model.config.n_layer


# --- blocks by the functions of ``_layer`` --------------------------------------------------------

#: What two layers run.
ALL_RUN = {"project": 2, "join": 4, "expand": 2}
#: The same with attention to the states of an encoder, which projects twice.
CROSSED = {"project": 6, "join": 6, "expand": 2}
NONE_RUN = dict.fromkeys(ALL_RUN, 0)


def drops(p, **changes):
    rates = dict(embd_pdrop=p, attn_pdrop=p, resid_pdrop=p)
    torch.manual_seed(1)
    return GPT2LMHeadModel(config(**rates, **changes)).train()


def given_of(padding="right", **more):
    return inputs_of("GPT2LMHeadModel", CONFIG, PADDINGS[padding]) | more


def crossed_of(padding="right"):
    states = torch.randn(ROWS, 6, CONFIG.n_embd)
    return given_of(padding, encoder_hidden_states=states, encoder_attention_mask=SOURCE_MASK)


def by_both(model, given):
    return trained(model, given), trained(model, given, OF_BLOCKS)


close = dict(rtol=2e-5, atol=2e-6)
PACKED = torch.tensor([0, 9, 18, 27, 36], dtype=torch.int32)
FULL = torch.rand(ROWS, 1, LENGTH, LENGTH).gt(0.3).tril() | torch.eye(LENGTH, dtype=torch.bool)
BATCHES = {
    "no padding": lambda: given_of("none"),
    "padding": given_of,
    "padding at the left": lambda: given_of("left"),
    "padding computed": lambda: given_of(unpad=False),
    "types": lambda: given_of(token_type_ids=batch()),
    "positions": lambda: given_of("none", position_ids=torch.arange(LENGTH) % 5),
    "an embedding": lambda: {
        "inputs_embeds": torch.randn(ROWS, LENGTH, CONFIG.n_embd),
        "labels": batch(),
    },
    "a mask of pairs": lambda: given_of("none", attention_mask=FULL),
    "an added mask": lambda: given_of("none", attention_mask=torch.randn(FULL.shape) + FULL.log()),
    "samples": lambda: given_of(sample_index=torch.tensor([7, 2, 9, 4])),
    "packed": lambda: {
        **{name: one.view(1, -1) for name, one in given_of("none").items()},
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), PACKED),
        **dict.fromkeys(("max_length_q", "max_length_k"), LENGTH),
        "attention_mask": torch.ones(1, ROWS * LENGTH),
        "position_ids": torch.arange(LENGTH).repeat(ROWS)[None],
    },
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_blocks_equal_the_modules(runs, name, p):
    """With dropout, too, whose seeds are drawn in the same order; with such masks by the batch."""
    found, wanted = by_both(drops(0.0 if "mask" in name else p), BATCHES[name]())
    assert runs == ALL_RUN
    assert_close(found, wanted, **close)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("padding", ["none", "right"])
def test_blocks_with_an_encoder_equal_the_modules(runs, p, padding):
    model, given = drops(p, add_cross_attention=True), crossed_of(padding)
    states = given["encoder_hidden_states"].requires_grad_()
    found, of_states = trained(model, given), states.grad.clone()
    assert runs == CROSSED
    states.grad = None
    assert_close(found, trained(model, given, OF_BLOCKS), **close)
    assert_close(of_states, states.grad, **close)
    found, wanted = by_both(model, given_of(padding))
    assert runs == {name: CROSSED[name] + ALL_RUN[name] for name in runs}
    assert_close(found, wanted, **close)


OPTIONS = {
    "a scale of each layer": dict(scale_attn_by_inverse_layer_idx=True),
    "no scale": dict(scale_attn_weights=False),
    "eager's order": dict(reorder_and_upcast_attn=True),
    "exact GELU": dict(activation_function="gelu"),
    "a narrow feed-forward": dict(n_inner=24),
}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_options_of_blocks(runs, option):
    found, wanted = by_both(drops(0.1, **option), given_of())
    assert runs == ALL_RUN
    assert_close(found, wanted, **close)


@pytest.mark.parametrize("name", ["relu", "silu", "gelu_fast"])
def test_other_activations_are_modules(runs, name):
    found, wanted = by_both(drops(0.1, activation_function=name), given_of())
    assert runs == {"project": 2, "join": 2, "expand": 0}
    assert_close(found, wanted, **close)


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_blocks_are_as_exact_as_the_parents(runs, crossed, autocast):
    """The sums between the blocks are bf16 under autocast, and fp32 in the parent."""
    given = crossed_of() if crossed else given_of()
    model = drops(0.0, add_cross_attention=crossed)
    parent = eager_parent(GPT2LMHeadModel, model.config).train()
    parent.load_state_dict(model.state_dict())
    found = []
    for one in (parent, model):
        # As on a GPU: on a CPU the modules run under autocast, unless a backend is asked for.
        asked = fastplm.use_backend("cpp", *OF_BLOCKS)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), asked:
            one.zero_grad()
            loss = one(**given).loss
        loss.backward()
        found.append({name: p.grad.clone() for name, p in one.named_parameters()})
    assert runs == (CROSSED if crossed else ALL_RUN)
    _, exact = trained(parent.double(), in_dtype_of(parent, given))

    def error(grads):
        off = sum((grads[name].double() - exact[name]).square().sum() for name in exact)
        return (off / sum(one.square().sum() for one in exact.values())).sqrt()

    assert all(one.dtype is torch.float32 and one.is_contiguous() for one in found[1].values())
    assert error(found[1]) <= max((2 if autocast else GRADIENT_FACTOR) * error(found[0]), 1e-6)


@pytest.mark.parametrize("frozen", ["c_attn.weight", "c_attn", "c_fc", "ln_", "bias", "wte|wpe"])
def test_frozen_parameters_of_blocks(runs, frozen):
    model = drops(0.1, add_cross_attention=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not re.search(frozen, name))
    found, wanted = by_both(model, crossed_of())
    assert runs == CROSSED and found[1].keys() == wanted[1].keys()
    assert_close(found, wanted, **close)


def halved(module):
    module.register_forward_hook(lambda module, given, out: out / 2)


def as_linear(attention):
    """The same product by another class."""
    before = attention.c_proj
    attention.c_proj = torch.nn.Linear(*before.weight.shape)
    attention.c_proj.weight.data.copy_(before.weight.data.t())


CHANGES = {
    "a query": (lambda block: halved(block.attn.c_attn), {"project": 5}),
    "an output": (lambda block: halved(block.attn.c_proj), {"join": 5}),
    "a query across": (lambda block: halved(block.crossattention.q_attn), {"project": 4}),
    "a key across": (lambda block: halved(block.crossattention.c_attn), {"project": 4}),
    "a norm": (lambda block: halved(block.ln_cross_attn), {"join": 5}),
    "the norm of the next": (lambda block: halved(block.ln_2), {"join": 5}),
    "a dropout": (lambda block: halved(block.mlp.dropout), {"join": 5, "expand": 1}),
    "an inner product": (lambda block: halved(block.mlp.c_fc), {"join": 5, "expand": 1}),
    "an activation": (
        lambda block: setattr(block.mlp, "act", torch.nn.SiLU()),
        {"join": 5, "expand": 1},
    ),
    "a Linear": (lambda block: as_linear(block.attn), {}),
}
AROUND = {
    "attention": lambda block: block.attn.register_forward_hook(
        lambda module, given, out: (out[0] / 2, *out[1:])
    ),
    "feed-forward": lambda block: halved(block.mlp),
    "block": lambda block: halved(block),
    "a forward": lambda block: setattr(block.mlp, "forward", lambda x: x / 2),
    "a shadow": lambda block: vars(block.mlp).update(dropout=torch.nn.Identity()),
}


@pytest.mark.parametrize("change, counts", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_block_with_a_module_of_the_users_runs_that_one(runs, change, counts, checkpoints):
    model, given = drops(0.3, add_cross_attention=True), crossed_of()
    change(model.transformer.h[1])
    found, wanted = by_both(model, given)
    assert runs == CROSSED | counts
    assert_close(found, wanted, **close)
    if checkpoints:
        model.gradient_checkpointing_enable()
        assert_close(trained(model, given), found, rtol=0, atol=0)


@pytest.mark.parametrize("change", AROUND.values(), ids=AROUND)
def test_a_model_with_changes_around_modules_runs_itself(runs, change):
    model, given = drops(0.1), given_of()
    change(model.transformer.h[1])
    assert_close(*by_both(model, given))
    assert runs == NONE_RUN


@pytest.mark.parametrize("name", ["GPT2Attention", "GPT2MLP", "GPT2Block", "GPT2Model"])
def test_a_class_whose_forward_was_replaced_is_called(monkeypatch, runs, name):
    kind, called = getattr(modeling_gpt2, name), []
    inner = kind.forward

    def forward(self, *given, **more):
        called.append(name)
        return inner(self, *given, **more)

    monkeypatch.setattr(kind, "forward", forward)
    drops(0.1)(**given_of())
    assert called and runs == NONE_RUN


BY_MODULES = {
    "hidden_states": dict(output_hidden_states=True),
    "attentions": dict(output_attentions=True),
    "past_key_values": dict(use_cache=True),
}


@pytest.mark.parametrize("name", BY_MODULES)
def test_what_blocks_do_not_return_runs_the_modules(runs, name):
    found = drops(0.0)(**given_of(), **BY_MODULES[name])
    assert found[name] is not None and runs == NONE_RUN


@pytest.mark.parametrize("change", ["sdpa", "fp64", "eager", "compiled"])
def test_models_that_run_their_modules(runs, change):
    model, given, asked = drops(0.0), given_of("none"), contextlib.nullcontext()
    wanted = model(**given).loss
    assert runs == ALL_RUN
    if change == "sdpa":
        model.set_attn_implementation("sdpa")
    elif change == "fp64":
        model.double()
    elif change == "eager":
        asked = fastplm.use_backend("eager", "attention")
    elif change == "compiled":
        asked = mock.patch.object(torch.compiler, "is_compiling", lambda: True)
    with asked:
        assert_close(model(**given).loss.float(), wanted)
    assert runs == ALL_RUN


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_checkpointed_blocks_run_the_same_functions(runs, reentrant, crossed):
    model = drops(0.3, add_cross_attention=crossed)
    given, once = (crossed_of(), CROSSED) if crossed else (given_of(), ALL_RUN)
    wanted = trained(model, given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_close(trained(model, given), wanted, rtol=0, atol=0)
    assert runs == {name: 3 * count for name, count in once.items()}


def test_the_rows_of_a_packed_block_drop_as_in_a_padded_one(runs):
    model, given = drops(0.3), given_of()
    assert_close(trained(model, given), trained(model, given | {"unpad": False}), **close)
    assert runs == {name: 2 * count for name, count in ALL_RUN.items()}


def test_parts_of_a_model_that_do_not_train(runs):
    model, given = drops(0.3), given_of()
    model.transformer.h[0].attn.eval()
    model.transformer.h[1].mlp.eval()
    found, wanted = by_both(model, given)
    assert runs == ALL_RUN
    assert_close(found, wanted, **close)


def test_a_hook_on_the_last_norm(runs):
    model, given = drops(0.0), given_of()
    halved(model.transformer.ln_f)
    found, wanted = by_both(model, given)
    assert runs == {"project": 2, "join": 3, "expand": 1}
    assert_close(found, wanted, **close)
