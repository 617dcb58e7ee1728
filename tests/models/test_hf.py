"""attn_implementation="fastplm" in Hugging Face models, compared with their eager attention."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import transformers
from transformers import AttentionInterface, StaticCache
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

import fastplm
from fastplm import hf, ops
from fastplm._backends import record_decisions
from fastplm.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from fastplm.testing import KeptDouble, check_in_fp64

from . import conftest
from .conftest import FAMILIES, LANGUAGE_MODELS, as_loss, changed, gradients, same, small_config

pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")

VOCAB, WIDTH = 37, 16
ALONE = ("albert", "bert", "electra", "gpt2", "roberta")
SEQ2SEQ = ("bart", "t5", "bert2bert")
DECODER = {"add_cross_attention": True}
MODELS = {
    **{name: (LANGUAGE_MODELS[name], small_config(name)) for name in FAMILIES if name != "openai"},
    "mt5": ("MT5ForConditionalGeneration", transformers.MT5Config(**FAMILIES["t5"][1])),
    "bert2bert": (
        "EncoderDecoderModel",
        transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
            small_config("bert"), small_config("bert")
        ),
    ),
    "bert decoder": ("BertLMHeadModel", small_config("bert", is_decoder=True, **DECODER)),
    "gpt2 decoder": ("GPT2LMHeadModel", small_config("gpt2", **DECODER)),
}
PADDINGS = {side: conftest.PADDINGS[side] for side in ("right", "left")}
MASK = PADDINGS["right"]
NOT_CAUSAL = torch.nn.Identity()
NOT_CAUSAL.is_causal = False
# The shortest source has the longest target, so that the two paddings are independent.
TARGETS = {"right": torch.arange(6) < torch.tensor([[2], [4], [3], [6]])}
TARGETS["left"] = TARGETS["right"].flip(1)
both_paddings = pytest.mark.parametrize("padding", PADDINGS)


def build(family, implementation="fastplm", **fields):
    name, config = MODELS[family]
    config = changed(config, **fields)
    kind = getattr(transformers, name)
    return kind._from_config(config, attn_implementation=implementation).eval()


def pair(family, reference="eager", **fields):
    """Two models with the same weights, under "fastplm" and another implementation."""
    ours, theirs = (build(family, name, **fields) for name in ("fastplm", reference))
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def states(model, *args, **inputs):
    """The last hidden state of the model, or of T5's encoder."""
    base = model.encoder if model.config.model_type == "t5" else model.base_model
    return base(*args, **inputs).last_hidden_state


def random_ids(*shape):
    return torch.randint(3, VOCAB, shape)


def other_ids(ids, mask):
    """The same ids where the mask is 1, others where it is 0; none is special."""
    return torch.where(mask.bool(), ids, 3 + (ids + 4) % (VOCAB - 3))


def inputs_of(family, padding="right"):
    """(a batch without cache, the mask of the tokens that the model gives logits of)."""
    mask = PADDINGS[padding]
    inputs = {"input_ids": random_ids(*mask.shape), "attention_mask": mask, "use_cache": False}
    if family in ALONE:
        return inputs, mask.bool()
    target = TARGETS[padding]
    inputs["decoder_input_ids"] = random_ids(*target.shape)
    return inputs | {"decoder_attention_mask": target.long()}, target


def attentions_of(family):
    """The number of attentions that a forward of the model computes."""
    return 2 if family in ALONE else 6


@pytest.mark.parametrize("weights", [False, True], ids=["", "weights"])
@pytest.mark.parametrize("mask", [None, "keys", "full", "additive"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_outputs_are_contiguous(dtype, causal, mask, weights):
    """As of Transformers' own functions: JetMoe takes a view of them."""
    query, key, value = (torch.randn(2, 9, 4, 16, dtype=dtype).transpose(1, 2) for _ in range(3))
    mask = {
        None: None,
        "keys": torch.arange(9) < torch.tensor([[5], [9]]),
        "full": torch.rand(2, 1, 9, 9) > 0.2,
        "additive": torch.randn(2, 1, 9, 9, dtype=dtype),
    }[mask]
    module = torch.nn.Identity()
    module.num_key_value_groups = 1
    out, _ = hf.fastplm_attention_forward(
        module, query, key, value, mask, is_causal=causal, output_attentions=weights
    )
    assert out.shape == (2, 9, 4, 16) and out.is_contiguous()


@pytest.mark.parametrize("family", [*ALONE, *SEQ2SEQ])
def test_from_pretrained_takes_the_name_and_does_not_save_it(tmp_path, family):
    kind = getattr(transformers, MODELS[family][0])
    build(family, "eager").save_pretrained(tmp_path / "theirs")
    model = kind.from_pretrained(tmp_path / "theirs", attn_implementation="fastplm")
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} == {"fastplm"}
    model.save_pretrained(tmp_path / "ours")
    assert "fastplm" not in (tmp_path / "ours" / "config.json").read_text()
    assert kind.from_pretrained(tmp_path / "ours").config._attn_implementation == "sdpa"


# --- padding ------------------------------------------------------------------------------------


@both_paddings
@pytest.mark.parametrize("family", [*ALONE, *SEQ2SEQ, "mt5"])
def test_loss_and_every_gradient_equal_eager(hold, family, padding):
    inputs, labelled = inputs_of(family, padding)
    if family == "gpt2":
        # Padding at the left attends to no token, so its predictions are not defined.
        labelled = labelled & labelled.roll(1, 1)
    labels = random_ids(*labelled.shape).masked_fill(~labelled, -100)
    ours, theirs = pair(family)
    with record_decisions() as decisions:
        found = gradients(ours, ours(**inputs, labels=labels).loss)
    assert len(decisions) == attentions_of(family), "every layer is fused"
    tables = [name for name in found if name.endswith("relative_attention_bias.weight")]
    assert len(tables) == (2 if "t5" in family else 0)
    assert all(found[name].any() for name in tables)

    def run(model):
        with KeptDouble():  # GPT-2 computes its loss in fp32
            return {"loss": model(**inputs, labels=labels).loss}

    hold(ours, theirs, run)


@both_paddings
@pytest.mark.parametrize("family", [*ALONE, *SEQ2SEQ])
def test_padding_has_no_effect(family, padding):
    model, (inputs, shown) = build(family), inputs_of(family, padding)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    other = other_ids(ids, mask)

    def run(**given):
        return model(**inputs | given).logits[shown]

    with torch.no_grad(), record_decisions() as decisions:
        kept = run()
        assert torch.equal(kept, run(input_ids=other))
        assert torch.equal(kept, run(attention_mask=mask.bool()))
        unmasked = run(input_ids=other, attention_mask=None)
    assert len(decisions) == 4 * attentions_of(family), "every layer of every run is fused"
    # In a causal model, no token attends to padding at the right, even without a mask. (Products of
    # more rows may round differently.)
    same = torch.allclose(kept, unmasked, rtol=1e-5, atol=1e-5)
    assert same == (family == "gpt2" and padding == "right")


@pytest.mark.parametrize("family", ["bert decoder", "gpt2 decoder"])
def test_cross_attention_over_a_padded_source(hold, family):
    """Decoder rows are not dropped where the source is padded (transformers#35032)."""
    ours, theirs = pair(family)
    source, ids = torch.randn(*MASK.shape, WIDTH), random_ids(4, 6)

    def run(model, source=source):
        given = {"encoder_hidden_states": source.to(model.dtype), "encoder_attention_mask": MASK}
        return {"logits": model(ids, **given, use_cache=False).logits.detach()}

    hold(ours, theirs, run)
    with record_decisions() as decisions:
        assert same(run(ours), run(ours, source.masked_fill(~MASK.bool()[..., None], 1e4)))
    assert len(decisions) == 2 * 4, "self- and cross-attention of two layers are fused"


@pytest.mark.parametrize("family", ALONE)
def test_a_fully_padded_row_has_finite_outputs_and_gradients(family):
    model, mask = build(family), conftest.PADDINGS["dead row"]
    out = states(model, random_ids(*mask.shape), attention_mask=mask)
    found = gradients(model, out[mask.bool()].sum())
    assert out.isfinite().all() and all(value.isfinite().all() for value in found.values())


# --- the position bias of T5 ----------------------------------------------------------------------


def test_a_t5_bias_of_unknown_origin_is_added_as_a_dense_bias(hold):
    """The bias may be a copy, or made by the caller, and need not match other layers' tables."""
    hidden, bias = torch.randn(2, 7, WIDTH), torch.randn(1, 2, 7, 7)

    def run(model):
        layer = model.encoder.block[1].layer[0].SelfAttention
        return {
            "out": layer(hidden.to(model.dtype), position_bias=bias.to(model.dtype))[0].detach()
        }

    with record_decisions() as decisions:
        hold(*pair("t5"), run)
    assert not decisions


def test_a_subclass_of_the_table_is_added_as_a_dense_bias(hold):
    class Doubled(torch.nn.Embedding):
        def forward(self, input):
            return 2 * super().forward(input)

    models, ids = pair("t5"), random_ids(2, 7)
    for model in models:
        model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.__class__ = Doubled
    with record_decisions() as decisions:
        hold(*models, lambda model: {"out": states(model, ids).detach()})
    assert not decisions


def test_a_bias_in_a_layer_similar_to_t5s_is_added_as_a_dense_bias():
    module = torch.nn.Identity()
    module.relative_attention_bias = torch.nn.Embedding(8, 2)
    module.is_decoder = module.is_causal = False
    module.relative_attention_max_distance = 16
    query, bias = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 3)
    with record_decisions() as decisions:
        out, _ = hf.fastplm_attention_forward(
            module, query, query, query, None, position_bias=bias, scaling=1.0
        )
    assert not decisions
    base = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(out, base(query, query, query, bias, scale=1.0).transpose(1, 2))


def test_t5_continues_a_cache_with_the_dense_bias(hold):
    ids, target, fused = random_ids(*MASK.shape), random_ids(4, 6), []

    @torch.no_grad()
    def run(model):
        encoded = model.encoder(ids, attention_mask=MASK)
        options = {"encoder_outputs": encoded, "attention_mask": MASK, "use_cache": True}
        first = model(decoder_input_ids=target[:, :4], **options)
        with record_decisions() as decisions:
            options["past_key_values"] = first.past_key_values
            second = model(decoder_input_ids=target[:, 4:], **options)
        fused.append(len(decisions))
        return {"logits": torch.cat((first.logits, second.logits), 1)}

    ours, theirs = pair("t5")
    run(ours)
    assert fused == [2], "cross-attention, which has no bias, is fused; a cache is not certain"
    hold(ours, theirs, run)


# --- generation and caches ------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gpt2", "bart", "t5"])
def test_greedy_generation_equals_sdpa(family, cache):
    mask = PADDINGS["left" if family == "gpt2" else "right"]
    ids = random_ids(*mask.shape)
    arguments = {
        "attention_mask": mask,
        "max_new_tokens": 8,
        "min_new_tokens": 8,
        "do_sample": False,
        "cache_implementation": cache,
        "disable_compile": True,
    }
    peaked = {"t5": {"initializer_factor": 3.0}, "bart": {"init_std": 0.5}}.get(family, {})
    for _ in range(20):  # some random weights repeat one token
        ours, theirs = pair(family, "sdpa", **peaked)
        expected = theirs.generate(ids, **arguments)
        if expected[:, -8:].unique().numel() > 2:
            break
    else:
        pytest.fail("no model generates different tokens")
    assert torch.equal(ours.generate(ids, **arguments), expected)


@pytest.mark.parametrize(
    ("cache", "ends"), [("dynamic", (5, 9)), ("static", (6, 8, 9))], ids=["dynamic", "static"]
)
def test_chunked_prefill_into_a_cache_is_bottom_right_aligned(hold, cache, ends):
    mask = PADDINGS["left"]
    ids = random_ids(*mask.shape)

    @torch.no_grad()
    def run(model):
        past = StaticCache(config=model.config, max_cache_len=16) if cache == "static" else None
        logits, start = [], 0
        for end in ends:
            given = {"attention_mask": mask[:, :end], "past_key_values": past, "use_cache": True}
            out = model(ids[:, start:end], **given)
            logits.append(out.logits)
            start, past = end, out.past_key_values
        return {"logits": torch.cat(logits, 1)[mask.bool()]}

    hold(*pair("gpt2"), run)


# --- masks that are more than padding -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["boolean", "of each head", "lowest", "infinite", "additive"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_a_4d_mask_of_the_user_is_used(hold, family, kind):
    ids = random_ids(2, 7)
    mask = (torch.rand(2, 1 + (kind == "of each head"), 7, 7) > 0.5) | torch.eye(7).bool()

    def run(model, mask=mask):
        hidden = {"infinite": -torch.inf, "lowest": torch.finfo(model.dtype).min}.get(kind, -1e9)
        additive = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, hidden)
        booleans = "boolean", "of each head"
        eager = model.config._attn_implementation == "eager"
        given = mask if kind in booleans and not eager else additive
        return {"out": states(model, ids, attention_mask=given).detach()}

    ours, theirs = pair(family)
    with record_decisions() as decisions:
        run(ours)
    assert len(decisions) == (0 if kind == "additive" else 2)  # one for each of two layers
    hold(ours, theirs, run)
    assert not same(run(ours), run(ours, torch.ones_like(mask)))


def test_gradients_and_dropout_under_a_4d_mask(hold):
    """A training step with a prefix that all tokens see, and causality after it."""
    ids, places = random_ids(2, 9), torch.arange(9)
    mask = ((places <= places[:, None]) | (places < 4)).expand(2, 1, 9, 9)

    def run(model):
        given = mask
        if model.config._attn_implementation == "eager":
            given = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, -torch.inf)
        with KeptDouble():  # GPT-2 computes its loss in fp32
            return {"loss": model(ids, attention_mask=given, labels=ids).loss}

    hold(*pair("gpt2"), run)
    model, drawn = with_dropout("gpt2"), []
    with record_decisions() as decisions:
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            drawn.append(states(model, ids, attention_mask=mask))
    assert len(decisions) == 6
    assert torch.equal(*drawn[:2]) and not torch.equal(*drawn[1:])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_of_every_token_for_every_token(hold, dtype):
    """A mask [B, F, T] as in Google's BERT and Transformers 4: 1 = attend, in each dtype."""
    ids = random_ids(2, 7)
    mask = (torch.rand(2, 7, 7) > 0.5) | torch.eye(7, dtype=torch.bool)

    def run(model):
        if model.config._attn_implementation == "eager":
            lowest = torch.finfo(model.dtype).min
            given = torch.zeros(2, 1, 7, 7, dtype=model.dtype).masked_fill(~mask[:, None], lowest)
        else:
            given = mask.to(dtype)
        return {"out": states(model, ids, attention_mask=given).detach()}

    ours, theirs = pair("bert")
    with record_decisions() as decisions:
        run(ours)
    assert len(decisions) == 2
    hold(ours, theirs, run)


def test_rows_that_a_4d_mask_leaves_nothing_are_zero():
    query = torch.randn(2, 2, 5, 8)
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool)
    mask[1, :, 2] = False
    out, _ = hf.fastplm_attention_forward(torch.nn.Identity(), query, query, query, mask)
    assert not out[1, 2].any() and out[0].all() and out[1, :2].all()


@pytest.mark.parametrize("queries", [1, 3])
def test_a_4d_mask_of_keys_may_be_one_for_all(queries):
    query, key, value = (torch.randn(2, 2, size, 4) for size in (queries, 5, 5))
    given = (torch.nn.Identity(), query, key, value)
    mask = torch.tensor([True, False, True, True, False]).view(1, 1, 1, 5)
    each = mask.expand(2, 1, 1, 5).contiguous()
    out, expected = (hf.fastplm_attention_forward(*given, one)[0] for one in (mask, each))
    assert torch.equal(out, expected)


def test_a_4d_mask_of_integers_is_one_of_booleans():
    query = torch.randn(1, 2, 3, 4)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.int64).tril()
    given = (torch.nn.Identity(), query, query, query)
    out, expected = (hf.fastplm_attention_forward(*given, one)[0] for one in (mask, mask.bool()))
    assert torch.equal(out, expected)
    with pytest.raises(ArgumentValueError, match="`attention_mask` got -1.*mask == 0"):
        hf.fastplm_attention_forward(*given, mask - 1)


def test_a_learned_4d_mask_gets_its_gradient():
    query, mask = torch.randn(1, 2, 3, 4), torch.zeros(1, 1, 3, 3, requires_grad=True)
    out, _ = hf.fastplm_attention_forward(torch.nn.Identity(), query, query, query, mask)
    (grad,) = torch.autograd.grad(out.square().sum(), mask)
    assert grad.any()


def test_packed_sequences_do_not_see_each_other(hold):
    ids, position_ids = random_ids(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])

    @torch.no_grad()
    def run(model, ids=ids):
        return {"out": states(model, ids, position_ids=position_ids, use_cache=False)}

    ours, theirs = pair("gpt2")
    hold(ours, theirs, run)
    other = run(ours, (ids + torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1]])) % VOCAB)
    assert torch.equal(run(ours)["out"][:, 4:7], other["out"][:, 4:7])


PACKED = ("bert", "gpt2", "t5")


def packed_and_padded(family):
    """(inputs of the packed row, of the padded batch, the function from a model to its run)."""
    ids, real, lengths = random_ids(*MASK.shape), MASK.bool(), MASK.sum(1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed = {
        "input_ids": ids[real][None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends.clone(),
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }
    if family != "t5":
        packed["position_ids"] = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    if family == "gpt2":
        # Without a mask, Transformers would make a dense mask from the position_ids.
        packed |= {"attention_mask": torch.ones_like(packed["input_ids"]), "use_cache": False}

    def run(model, given):
        torch.manual_seed(1)
        out = states(model, **given)
        out = out[given.get("attention_mask", torch.ones(out.shape[:2])).bool()]
        return {"out": out, "loss": as_loss(out)}

    return packed, {"input_ids": ids, "attention_mask": MASK}, run


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_equal_the_padded_batch(hold, family, dropout):
    packed, padded, run = packed_and_padded(family)
    ours, theirs = pair(family)
    if dropout:
        ours = theirs = with_dropout(family)
    with record_decisions() as decisions:
        run(ours, packed)
    assert [each.arguments.split("@")[0] for each in decisions] == ["float32[24, 2, 8]"] * 2
    hold(ours, theirs, lambda model: run(model, packed), lambda model: run(model, padded))


@pytest.mark.parametrize("added", [False, True], ids=["boolean", "added to the scores"])
def test_a_4d_mask_and_the_lengths_of_packed_sequences_both_count(added):
    packed, _, _ = packed_and_padded("bert")
    ends, total = packed["cu_seq_lens_q"], packed["input_ids"].shape[1]
    query, key, value = torch.randn(3, 1, 2, total, 8, dtype=torch.float64)
    seen = (torch.rand(1, 2, total, total) < 0.7) | torch.eye(total, dtype=torch.bool)
    text = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    both = seen & (text[:, None] == text)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, both)
    mask = torch.zeros(seen.shape, dtype=query.dtype).masked_fill(~seen, -1e300) if added else seen
    bounds = {name: packed[name] for name in hf.PACKED}
    found, _ = hf.fastplm_attention_forward(NOT_CAUSAL, query, key, value, mask, **bounds)
    torch.testing.assert_close(found.transpose(1, 2), wanted)


def test_a_4d_mask_that_transformers_makes_of_packed_sequences(hold):
    """Of ``position_ids``; the lengths may say less."""
    packed, _, run = packed_and_padded("gpt2")
    del packed["attention_mask"]
    ours, theirs = pair("gpt2")
    with record_decisions() as decisions:
        run(ours, packed)
    assert [each.arguments.split("@")[0] for each in decisions] == ["float32[1, 2, 24, 8]"] * 2
    hold(ours, theirs, lambda model: run(model, packed))


def test_packed_rows_that_do_not_fit_raise():
    model, (packed, _, _) = build("bert"), packed_and_padded("bert")
    for name in hf.PACKED:
        with pytest.raises(ArgumentValueError, match=f"`{name}` got None"):
            model(**packed | {name: None})
    two = {name: packed[name].repeat(2, 1) for name in ("input_ids", "position_ids")}
    with pytest.raises(ArgumentValueError, match="batch of 2"):
        model(**packed | two)
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
        model(**packed, output_attentions=True)
    bounds = {name: packed[name] for name in hf.PACKED}
    query = torch.randn(1, 4, 16, 8)
    bias = torch.zeros(1, 4, 16, 16)
    with pytest.raises(UnsupportedError, match="position_bias"):
        hf.fastplm_attention_forward(
            NOT_CAUSAL, query, query, query, None, position_bias=bias, **bounds
        )


MASKS = {
    "square": (6, 6, 0, 0),
    "continued": (3, 9, 6, 0),
    "one step": (1, 9, 8, 0),
    "one step, static": (1, 12, torch.tensor(8), 0),
    "prefill, static": (4, 12, torch.tensor(0), 0),
    "prefill, static, int": (4, 12, 0, 0),
    "window": (2, 5, 7, 4),
    "cross": (3, 9, 0, 0),
}
FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "sliding": sliding_window_causal_mask_function(3),
    "chunked": chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64)),
    "sliding, and more": and_masks(sliding_window_causal_mask_function(3), causal_mask_function),
    "sliding, wide": sliding_window_causal_mask_function(30),
    "sliding, 1": sliding_window_causal_mask_function(1),
    "sliding, bidirectional": sliding_window_bidirectional_mask_function(2),
    "sliding, bidirectional, wide": sliding_window_bidirectional_mask_function(30),
}


@pytest.mark.parametrize("padded", [None, 4, 9, 12])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_the_mask_equals_that_of_sdpa(name, function, padded):
    q_length, kv_length, q_offset, kv_offset = MASKS[name]
    attention_mask = None if padded is None else torch.rand(2, padded) > 0.3
    arguments = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[function],
        "attention_mask": attention_mask,
    }
    expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
    mask = hf.fastplm_mask(**arguments)
    assert mask.dtype is torch.bool
    if name == "square" and function not in (
        "chunked",
        "sliding, and more",
    ):  # no mask [Tq, Tk] is made, but in memory one of keys
        assert mask.untyped_storage().nbytes() <= 2 * 12
    # The meaning of the mask does not depend on the module.
    causal, mask, window = hf._meaning(torch.nn.Module(), mask, None)
    assert not causal or "bidirectional" not in function
    if mask is None or mask.dim() == 2:
        assert mask is None or mask.shape == (2, kv_length)
        query, key = torch.empty(2, 1, q_length, 1), torch.empty(2, 1, kv_length, 1)
        mask, dead = hf._complete_mask(query, key, mask, causal, window, always=True)
        mask = torch.ones(()).bool() if mask is None else mask & ~dead
    assert torch.equal(mask.expand_as(expected), expected)


# --- dropout --------------------------------------------------------------------------------------

DROPOUT = 0.3
FUSED = {"bert": 2, "gpt2": 2, "bart": 6, "t5": 6}


def with_dropout(family):
    """A model in training mode with dropout of attention probabilities alone."""
    own = {"gpt2": "attn_pdrop", "bart": "attention_dropout", "t5": "dropout_rate"}
    model = build(family, **{own.get(family, "attention_probs_dropout_prob"): DROPOUT}).train()
    if family == "t5":  # T5 has one rate for the whole model
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return model


def seeded_run(family):
    """A function from (model, seed) to the output, on fixed inputs."""
    inputs, _ = inputs_of(family)

    def run(model, seed=1):
        torch.manual_seed(seed)
        return model(**inputs).logits

    return run


@pytest.mark.parametrize("family", FUSED)
def test_dropout_in_training_is_fused_and_seeded(family):
    model, run = with_dropout(family), seeded_run(family)
    with torch.no_grad(), record_decisions() as decisions:
        kept, again, other = run(model), run(model), run(model, seed=2)
        quiet = run(model.eval())
    assert torch.equal(kept, again)
    assert not torch.equal(kept, other)
    assert not torch.equal(kept, quiet)
    # Without gradients, T5's later layers take the dense bias in training.
    assert len(decisions) == (3 * (FUSED[family] - 2 * (family == "t5")) + FUSED[family])
    with record_decisions() as decisions:
        run(model.train())
    assert len(decisions) == FUSED[family]


def test_the_expectation_of_dropout_is_no_dropout():
    query, key, value = (torch.randn(2, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    mask, module = MASK[:2].bool(), torch.nn.Identity()

    def run(dropout):
        return hf.fastplm_attention_forward(
            module, query, key, value, mask, dropout=dropout, is_causal=False
        )[0]

    draws = torch.stack([run(DROPOUT) for _ in range(400)])
    standard_error = draws.std(0) / len(draws) ** 0.5
    score = (draws.mean(0) - run(0.0)) / standard_error
    # The largest of 288 standard normal numbers exceeds 5 once in six thousand times.
    assert score.abs().max() < 5
    assert draws.std(0).min() > 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_activation_checkpointing_repeats_the_dropout(monkeypatch, family, reentrant):
    """Backward computes every layer again, and drops the same probabilities."""
    model, run, fused = with_dropout(family), seeded_run(family), FUSED[family]
    expected = run(model)
    plain = gradients(model, as_loss(expected))
    outputs = []

    def recorded(*args, **kwargs):
        result = hf.fastplm_attention_forward(*args, **kwargs)
        outputs.append(result[0].detach())
        return result

    monkeypatch.setitem(AttentionInterface._global_mapping, hf.NAME, recorded)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with record_decisions() as forward:
        value = run(model)
    assert len(outputs) == fused
    with record_decisions() as backward:
        found = gradients(model, as_loss(value))
    assert len(forward) == len(backward) == fused - 2 * (reentrant and family == "t5")
    first, second = outputs[:fused], outputs[fused:]
    assert len(first) == len(second)
    for output in first:
        assert any(output.shape == again.shape and torch.equal(output, again) for again in second)
    if not reentrant:
        # With reentrant checkpoints, Transformers' BART loses gradients, and T5 uses a dense bias.
        assert torch.equal(value, expected) and same(found, plain)


# --- what the fused kernel does not do ------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "bart", "t5"])
def test_output_attentions(hold, family):
    inputs, _ = inputs_of(family)

    @torch.no_grad()
    def run(model):
        out = model(**inputs, output_attentions=True)
        names = [name for name in out if name.endswith("attentions")]
        assert len(names) == (1 if family == "bert" else 3)
        # The first sequence has no padding, whose output is not defined.
        return {f"{name} {i}": each[0] for name in names for i, each in enumerate(out[name])}

    hold(*pair(family), run)


def test_is_causal_false_makes_gpt2_bidirectional(hold):
    ours, theirs = pair("gpt2", reference="sdpa")
    ids = random_ids(*MASK.shape)

    @torch.no_grad()
    def run(model, **given):
        return {"out": states(model, ids, use_cache=False, **given)[MASK.bool()]}

    for mask in (None, MASK):
        hold(ours, theirs, lambda m, mask=mask: run(m, attention_mask=mask, is_causal=False))
        assert not same(run(ours, attention_mask=mask), run(ours, is_causal=False))


UNSUPPORTED = {name: 1.0 for name in ("softcap", "s_aux", "head_mask", "sinks of a new model")}
UNSUPPORTED |= {name: 1 for name in ("indices", "block_indices")}  # of sparse attention


@pytest.mark.parametrize("argument", UNSUPPORTED)
def test_unsupported_arguments_raise(argument):
    with pytest.raises(UnsupportedError, match=argument):
        build("bert")(random_ids(1, 4), **{argument: torch.tensor([UNSUPPORTED[argument]])})


def test_a_two_dimensional_mask_must_be_boolean():
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(ArgumentTypeError, match="key_mask"):
        hf.fastplm_attention_forward(
            torch.nn.Identity(), query, query, query, torch.zeros(1, 3), is_causal=False
        )


def test_grouped_heads_fall_back():
    module = torch.nn.Identity()
    module.num_key_value_groups = 2
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)

    def repeated(query, key):
        key = key.repeat_interleave(2, 1)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return {"out": sdpa(query, key, key, is_causal=True).transpose(1, 2)}

    exact = query.double(), key.double()
    out, _ = hf.fastplm_attention_forward(module, *exact, exact[1], None, is_causal=True)
    check_in_fp64({"out": out}, repeated(*exact), repeated(query, key))


# --- torch.compile --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "gpt2", "bart", "t5"])
def test_compiled_once_for_all_masks_of_a_shape(family):
    model, (inputs, _) = build(family), inputs_of(family)
    frames = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=frames, fullgraph=True)
    with torch.no_grad():
        for mask in (*PADDINGS.values(), torch.ones_like(MASK)):
            inputs |= {"input_ids": random_ids(*mask.shape), "attention_mask": mask}
            assert torch.equal(compiled(**inputs).logits, model(**inputs).logits)
    assert frames.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "checkpointing"), [("bert", True), ("t5", False)])
def test_training_with_dropout_compiles_to_one_graph(hold, family, checkpointing):
    """(Checkpointed T5 never compiles, with any attention, as it sets ``requires_grad``.)"""
    model = with_dropout(family)
    model = model.encoder if family == "t5" else model.base_model
    ids = random_ids(*MASK.shape)

    def run(model):
        torch.manual_seed(1)
        out = model(ids, attention_mask=MASK, use_cache=False).last_hidden_state
        return {"out": out, "loss": as_loss(out)}

    with record_decisions() as decisions:
        run(model)
    assert len(decisions) == 2
    eager = copy.deepcopy(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    # This compiler backend draws from PyTorch's generator as eager mode does. SDPA would drop other
    # probabilities, so equal outputs also show that the fused op ran.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    hold(model, eager, lambda _: run(compiled), run)
    assert same(run(compiled), run(compiled))


def test_the_output_is_contiguous_in_the_layout_of_the_projections():
    query = torch.randn(2, 3, 5, 8)
    out, _ = hf.fastplm_attention_forward(NOT_CAUSAL, query, query, query, None)
    assert out.shape == (2, 5, 3, 8) and out.is_contiguous()


# --- one query of few keys ------------------------------------------------------------------------


def ops_called(function) -> list[str]:
    with record_decisions() as decisions:
        function()
    return [decision.op for decision in decisions]


def one_query(seqlen_k=40, dtype=torch.float32, heads_k=4, **kwargs):
    """A call of one layer's attention, for a token that a model is about to generate."""
    query = torch.randn(2, 4, 1, 16).to(dtype)
    key, value = (torch.randn(2, heads_k, seqlen_k, 16).to(dtype) for _ in range(2))
    arguments = {"attention_mask": None, "scaling": 0.25} | kwargs
    return lambda: hf.fastplm_attention_forward(torch.nn.Module(), query, key, value, **arguments)[
        0
    ]


@pytest.mark.parametrize("seqlen_k", (0, 1, 40))
def test_one_query_with_few_keys_uses_sdpa(seqlen_k):
    """SDPA is faster there, and its output is that of the op."""
    call = one_query(seqlen_k)
    with record_decisions() as decisions:
        call()
    assert [decision.backend for decision in decisions] == ["stock"]
    with fastplm.use_backend("cpp"):
        expected = call()
    torch.testing.assert_close(call(), expected)


@pytest.mark.parametrize("is_causal", (False, True))
def test_sdpa_is_causal_too(measured, is_causal):
    measured.ours = lambda *call: False
    query, key = torch.randn(2, 4, 7, 16), torch.randn(2, 4, 9, 16)
    out, _ = hf.fastplm_attention_forward(
        torch.nn.Module(), query, key, key, None, is_causal=is_causal
    )
    expected = ops.attention(query, key, key, is_causal=is_causal).transpose(1, 2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "arguments",
    (
        dict(seqlen_k=10_000),
        dict(attention_mask=torch.ones(2, 40, dtype=torch.bool)),
        dict(dropout=0.5),
    ),
    ids=("many keys", "a mask", "dropout"),
)
def test_other_single_queries_use_the_op(arguments):
    assert ops_called(one_query(**arguments)) == ["attention"]


def test_a_trace_works_with_other_masks():
    class Masks(torch.nn.Module):
        def forward(self, mask):
            made = hf.fastplm_mask(2, 1, 5, 4, attention_mask=mask)
            return torch.zeros(()) if made is None else made

    ones = torch.ones(2, 5, dtype=torch.bool)
    traced = torch.jit.trace(Masks(), (ones,))
    assert torch.equal(traced(~ones).flatten(1), ~ones)


def test_a_mask_of_ones_hides_no_key():
    arguments = dict(batch_size=2, q_length=1, kv_length=5, q_offset=4)
    ones = torch.ones(2, 5, dtype=torch.bool)
    assert hf.fastplm_mask(**arguments, attention_mask=ones).shape == (1, 1, 1, 0)
    ones[1, 0] = False
    assert torch.equal(hf.fastplm_mask(**arguments, attention_mask=ones)[:, 0, 0], ones)
    # On other devices the mask's values are not read.
    assert hf.fastplm_mask(**arguments, attention_mask=ones.to("meta")).shape == (2, 1, 1, 5)


@pytest.mark.parametrize("seqlen", (1, 4))
@pytest.mark.parametrize("mask", (None, torch.ones(1, 4, dtype=torch.bool)), ids=("none", "keys"))
def test_causality_that_nobody_says_raises(seqlen, mask):
    query, key = torch.randn(1, 2, seqlen, 8), torch.randn(1, 2, 4, 8)
    call = (torch.nn.Identity(), query, key, key, mask)
    if seqlen == 1:  # one query sees all keys
        hf.fastplm_attention_forward(*call)
        return
    with pytest.raises(UnsupportedError, match="whether attention is causal"):
        hf.fastplm_attention_forward(*call)


@pytest.mark.parametrize("is_causal", (False, True))
def test_the_mask_says_more_than_the_module(is_causal):
    """BigBird-Pegasus' decoder says that it is not causal, and Splinter's encoder says nothing."""
    query = torch.randn(2, 3, 5, 8)
    function = causal_mask_function if is_causal else bidirectional_mask_function
    padding = torch.arange(5) < torch.tensor([[5], [3]])
    module = torch.nn.Identity()
    for attention_mask in (None, padding):
        mask = hf.fastplm_mask(2, 5, 5, mask_function=function, attention_mask=attention_mask)
        expected = ops.attention(
            query, query, query, key_mask=attention_mask, is_causal=is_causal
        ).transpose(1, 2)
        for said in (not is_causal, None):
            module.is_causal = said
            out, _ = hf.fastplm_attention_forward(module, query, query, query, mask)
            assert torch.equal(out, expected)


@pytest.mark.parametrize("padded", (False, True))
def test_generation_calls_the_op_where_there_is_padding(padded):
    model = build("gpt2", bos_token_id=None, eos_token_id=None)
    ids = torch.randint(VOCAB, (2, 9))
    attention_mask = torch.ones_like(ids)
    if padded:
        attention_mask[0, :3] = 0

    def generate():
        settings = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        return model.generate(ids, attention_mask=attention_mask, **settings)

    with record_decisions() as decisions:
        ours = generate()
    # Two layers each run the prompt, then three of the four tokens; SDPA runs these.
    assert [decision.op for decision in decisions] == ["attention"] * 8
    assert padded or {decision.backend for decision in decisions[2:]} == {"stock"}
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, generate())


def test_the_bits_of_a_key_mask_serve_all_layers_and_both_directions(monkeypatch):
    """The kernels read a key mask as bits, which a kernel of its own makes."""
    made = []

    def count(kernel, *args, **options):
        made.append(kernel.fn.__name__)
        return inner(kernel, *args, **options)

    launches = pytest.importorskip("fastplm.triton_kernels.attention.launch")
    inner = launches.launch
    monkeypatch.setattr(launches, "launch", count)
    model = build("bert").train()
    ids, mask = torch.randint(3, VOCAB, MASK.shape), MASK.clone()

    def gradient():
        made.clear()
        model.zero_grad()
        with fastplm.use_backend("triton", "attention"):
            torch.manual_seed(0)
            model(input_ids=ids, attention_mask=mask).logits.square().sum().backward()
        return model.bert.embeddings.word_embeddings.weight.grad.clone()

    first = gradient()
    layers = model.config.num_hidden_layers
    assert made.count("_attention_key_bits_kernel") == 1 < layers
    monkeypatch.setattr(hf, "share_bits", lambda *_: None)
    assert torch.equal(gradient(), first)
    assert made.count("_attention_key_bits_kernel") == 2 * layers
    monkeypatch.undo()
    mask[:] = 1  # the bits are those of one forward
    assert not torch.equal(gradient(), first)


# --- sliding windows ------------------------------------------------------------------------------

TINY = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2)
TINY |= dict(num_attention_heads=4, max_position_embeddings=64, pad_token_id=0, eos_token_id=2)
GROUPED = dict(num_key_value_heads=2, sliding_window=5)
SLIDING = {
    "MistralForCausalLM": transformers.MistralConfig(**TINY, **GROUPED),
    "Gemma3ForCausalLM": transformers.Gemma3TextConfig(
        **TINY, **GROUPED, head_dim=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "Qwen2ForCausalLM": transformers.Qwen2Config(
        **TINY, **GROUPED, use_sliding_window=True, max_window_layers=1
    ),
    "ModernBertForMaskedLM": transformers.ModernBertConfig(
        **TINY, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
    "ModernBertDecoderForCausalLM": transformers.ModernBertDecoderConfig(
        **TINY, local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2
    ),
}


@pytest.mark.parametrize("padding", [None, "right", "left"])
@pytest.mark.parametrize("name", SLIDING)
def test_a_sliding_window_is_a_window_of_the_op(monkeypatch, name, padding):
    """Logits and gradients equal eager's; no layer gets a mask [Tq, Tk]."""
    kind, windows, meaning = getattr(transformers, name), [], hf._meaning

    def meant(*arguments):
        found = meaning(*arguments)
        assert found[1] is None or found[1].dim() == 2
        windows.append(found[2])
        return found

    monkeypatch.setattr(hf, "_meaning", meant)
    ours, theirs = (
        kind._from_config(copy.deepcopy(SLIDING[name]), attn_implementation=implementation)
        for implementation in ("fastplm", "eager")
    )
    theirs.load_state_dict(ours.state_dict())
    mask = torch.ones(3, 20, dtype=torch.long)
    if padding is not None:
        mask = (torch.arange(20) < torch.tensor([[20], [12], [3]])).long()
        mask = mask.flip(1) if padding == "left" else mask
    ids = random_ids(3, 20)
    logits = [model(ids, attention_mask=mask).logits[mask.bool()] for model in (ours, theirs)]
    torch.testing.assert_close(*logits)
    upstream = torch.randn_like(logits[0])
    grads = [
        torch.autograd.grad((one * upstream).sum(), [*model.parameters()], allow_unused=True)
        for one, model in zip(logits, (ours, theirs), strict=True)
    ]
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    width = 4 if name.startswith(("Mistral", "Gemma", "Qwen")) else None
    assert {None, *windows} != {None} and len(windows) == 2
    assert width is None or (width, None) in windows
    if padding != "right" and name.endswith("CausalLM"):
        options = dict(max_new_tokens=12, do_sample=False, attention_mask=mask)
        assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))
