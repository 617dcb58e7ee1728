"""attn_implementation="fastplm" in Hugging Face models, compared with their eager attention."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    AlbertModel,
    AttentionInterface,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    BertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraModel,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    MT5Config,
    MT5ForConditionalGeneration,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import fastplm
from fastplm import hf, ops
from fastplm._backends import record_decisions
from fastplm._checks import ArgumentTypeError, ArgumentValueError, UnsupportedError
from fastplm.testing import KeptDouble, check_in_fp64

VOCAB = 40
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "initializer_range": 0.5,
    "pad_token_id": 0,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
BART = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 40,
    "init_std": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "initializer_factor": 3.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
# Factor 3 gives peaked probabilities, with which rounding errors vary too much.
CALM_T5 = T5 | {"initializer_factor": 1.0}
ENCODERS = {
    "bert": (BertModel, BertConfig(**BASE)),
    "roberta": (RobertaModel, RobertaConfig(**BASE)),
    "albert": (AlbertModel, AlbertConfig(**BASE, embedding_size=16)),
    "electra": (ElectraModel, ElectraConfig(**BASE, embedding_size=16)),
    "gpt2": (GPT2Model, GPT2Config(**GPT2)),
}
SEQ2SEQ = {
    "bart": (BartForConditionalGeneration, BartConfig(**BART)),
    "t5": (T5ForConditionalGeneration, T5Config(**T5)),
    "bert2bert": (
        EncoderDecoderModel,
        EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**BASE), BertConfig(**BASE)),
    ),
}
TASKS = {
    "bert": (BertForMaskedLM, ENCODERS["bert"][1]),
    "roberta": (RobertaForMaskedLM, ENCODERS["roberta"][1]),
    "albert": (AlbertForMaskedLM, ENCODERS["albert"][1]),
    "electra": (ElectraForMaskedLM, ENCODERS["electra"][1]),
    "gpt2": (GPT2LMHeadModel, ENCODERS["gpt2"][1]),
    "bart": SEQ2SEQ["bart"],
    "t5": (T5ForConditionalGeneration, T5Config(**CALM_T5)),
    "mt5": (MT5ForConditionalGeneration, MT5Config(**CALM_T5)),
    "bert2bert": SEQ2SEQ["bert2bert"],
}
CROSS = {
    "bert decoder": (
        BertLMHeadModel,
        BertConfig(**BASE, is_decoder=True, add_cross_attention=True),
    ),
    "gpt2 decoder": (GPT2LMHeadModel, GPT2Config(**GPT2, add_cross_attention=True)),
}
# Longest target row for the shortest source row: the two paddings are independent.
TARGETS = {
    "right": torch.tensor([[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1] * 6]),
    "left": torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [1] * 6]),
}
PADDINGS = {
    "right": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 2 + [0] * 7]),
    "left": torch.tensor([[1] * 9, [0] * 4 + [1] * 5, [0] * 7 + [1] * 2]),
}


def build(cls, config, implementation, state=None, dtype=torch.float32):
    config = copy.deepcopy(config)
    model = cls._from_config(config, attn_implementation=implementation).to(dtype).eval()
    if state is not None:
        model.load_state_dict(state)
    return model


def pair(cls, config, reference="eager"):
    """The same weights under "fastplm" and under another implementation."""
    ours = build(cls, config, "fastplm")
    return ours, build(cls, config, reference, ours.state_dict())


def hold(name, run, ours, theirs, keep=None):
    """``run(ours)`` is ``run(theirs)`` in fp64, at the positions kept; in fp32 it is returned."""
    keep = (lambda tensor: tensor) if keep is None else keep

    def seen(model):
        with torch.no_grad():
            return {name: keep(run(model))}

    check_in_fp64(seen(in_fp64(ours)), seen(in_fp64(theirs)), seen(theirs))
    return seen(ours)[name]


def in_fp64(model):
    return copy.deepcopy(model).double()


def other_ids(ids, mask):
    """The same ids where the mask is 1, others where it is 0."""
    # Neither 0, from which RoBERTa counts its positions, nor one of the other special ids.
    return torch.where(mask.bool(), ids, 3 + (ids + 4) % (VOCAB - 3))


def random_ids(*shape):
    return torch.randint(3, VOCAB, shape)


@pytest.mark.parametrize("family", [*ENCODERS, *SEQ2SEQ])
def test_from_pretrained_takes_the_name_and_does_not_save_it(tmp_path, family):
    cls, config = ENCODERS.get(family) or SEQ2SEQ[family]
    build(cls, config, "eager").save_pretrained(tmp_path / "theirs")
    model = cls.from_pretrained(tmp_path / "theirs", attn_implementation="fastplm")
    assert {c.config._attn_implementation for c in model.modules() if hasattr(c, "config")} == {
        "fastplm"
    }
    model.save_pretrained(tmp_path / "ours")
    assert "fastplm" not in (tmp_path / "ours" / "config.json").read_text()
    assert cls.from_pretrained(tmp_path / "ours").config._attn_implementation == "sdpa"


# --- padding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", ENCODERS)
def test_padding_is_applied_and_equals_eager(family, padding):
    ours, theirs = pair(*ENCODERS[family])
    mask = PADDINGS[padding]
    ids = random_ids(*mask.shape)

    def run(model, ids=ids, mask=mask):
        return model(ids, attention_mask=mask).last_hidden_state

    kept = hold(family, run, ours, theirs, keep=lambda out: out[mask.bool()])
    with torch.no_grad(), record_decisions() as decisions:
        changed = run(ours, other_ids(ids, mask))[mask.bool()]
        boolean = run(ours, mask=mask.bool())[mask.bool()]
        unmasked = run(ours, other_ids(ids, mask), mask=None)[mask.bool()]
    assert torch.equal(kept, changed)
    assert torch.equal(kept, boolean)
    assert len(decisions) == 3 * 2, "every layer of every run is fused"
    # In a causal model, no token attends to padding at the right, even without a mask.
    assert torch.equal(kept, unmasked) == (family == "gpt2" and padding == "right")


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", SEQ2SEQ)
def test_padding_of_source_and_target(family, padding):
    ours, theirs = pair(*SEQ2SEQ[family])
    mask = PADDINGS[padding]
    ids, target = random_ids(*mask.shape), random_ids(3, 6)
    target_mask = TARGETS["right"]

    def run(model, ids=ids):
        out = model(
            ids,
            attention_mask=mask,
            decoder_input_ids=target,
            decoder_attention_mask=target_mask,
        )
        return torch.cat(
            (out.encoder_last_hidden_state[mask.bool()].flatten(), out.logits.flatten())
        )

    kept = hold(family, run, ours, theirs)
    with torch.no_grad(), record_decisions() as decisions:
        assert torch.equal(kept, run(ours, other_ids(ids, mask)))
        assert not torch.equal(kept, run(ours, (ids + 7) % VOCAB))
    assert len(decisions) == 2 * 6, "self- and cross-attention of all layers are fused"


@pytest.mark.parametrize("family", CROSS)
def test_cross_attention_over_a_padded_source(family):
    """Decoder rows are not dropped where the source is padded (transformers#35032)."""
    ours, theirs = pair(*CROSS[family])
    source_mask = PADDINGS["right"]
    source, ids = torch.randn(3, 9, 32), random_ids(3, 6)

    def run(model, source=source):
        return model(
            ids,
            encoder_hidden_states=source.to(model.dtype),
            encoder_attention_mask=source_mask,
            use_cache=False,
        ).logits

    kept = hold(family, run, ours, theirs)
    poisoned = source.masked_fill(~source_mask.bool()[..., None], 1e4)
    with torch.no_grad(), record_decisions() as decisions:
        assert torch.equal(kept, run(ours, poisoned))
    assert len(decisions) == 4, "self- and cross-attention of two layers are fused"


@pytest.mark.parametrize("family", ENCODERS)
def test_a_fully_padded_row_has_finite_outputs_and_gradients(family):
    model = build(*ENCODERS[family], "fastplm")
    mask = PADDINGS["right"].clone()
    mask[1] = 0
    out = model(random_ids(*mask.shape), attention_mask=mask).last_hidden_state
    out[mask.bool()].sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_without_the_mask_interface_padding_would_be_ignored(monkeypatch):
    """Without a registered mask function, Transformers passes no mask."""
    model = build(*ENCODERS["bert"], "fastplm")
    mask = PADDINGS["right"]
    ids = random_ids(*mask.shape)
    with torch.no_grad():
        out = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
        monkeypatch.delitem(AttentionMaskInterface._global_mapping, hf.NAME)
        ignored = model(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert not torch.equal(out, ignored)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("family", TASKS)
def test_loss_and_every_gradient_equal_eager(family, padding):
    ours, theirs = pair(*TASKS[family])
    mask = PADDINGS[padding]
    inputs = {"input_ids": random_ids(*mask.shape), "attention_mask": mask}
    labelled = mask
    if family not in ENCODERS:
        labelled = TARGETS[padding]
        inputs["decoder_input_ids"] = random_ids(*labelled.shape)
        inputs["decoder_attention_mask"] = labelled
    if family == "gpt2":
        # Padding at the left attends to no token: what it predicts is not defined.
        labelled = labelled & labelled.roll(1, 1)
    labels = random_ids(*labelled.shape).masked_fill(labelled == 0, -100)

    def run(model):
        return model(**inputs, labels=labels, use_cache=False).loss

    with record_decisions() as decisions:
        grads = value_and_gradients(run, ours)
    assert len(decisions) == (2 if family in ENCODERS else 6), "every layer is fused"
    tables = [name for name in grads if name.endswith("relative_attention_bias.weight")]
    assert len(tables) == (2 if "t5" in family else 0)
    assert all(grads[name].any() for name in tables)
    hold_gradients(run, ours, run, theirs)


def value_and_gradients(run, model):
    """Every gradient of ``run(model)`` by the name of its parameter, and the value as "value"."""
    value = run(model)
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(value, parameters, upstream(value), allow_unused=True)
    found = {n: g for n, g in zip(names, found, strict=True) if g is not None}
    return found | {"value": value.detach()}


def upstream(value):
    """A gradient for ``value``, the same one each time: 1 for a loss."""
    if value.dim() == 0:
        return torch.ones_like(value)
    return torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value.dtype)


def hold_gradients(run, ours, their_run, theirs):
    """The value and every gradient of ours in fp64 are theirs."""
    single = value_and_gradients(their_run, theirs)
    with KeptDouble():
        gold = value_and_gradients(their_run, in_fp64(theirs))
        out = value_and_gradients(run, in_fp64(ours))
    check_in_fp64(out, gold, single)


# --- the position bias of T5 ----------------------------------------------------------------------


def self_attentions(model):
    return [block.layer[0].SelfAttention for block in model.encoder.block]


def test_a_t5_bias_of_unknown_origin_is_added_as_a_dense_bias():
    """Whatever the other layers' tables say: a copy, or one that the caller made."""
    ours, theirs = pair(*SEQ2SEQ["t5"])
    hidden, bias = torch.randn(2, 7, 32), torch.randn(1, 2, 7, 7)

    def run(model):
        layer = self_attentions(model)[1]
        return layer(hidden.to(model.dtype), position_bias=bias.to(model.dtype))[0]

    with record_decisions() as decisions:
        hold("unknown", run, ours, theirs)
    assert not decisions


def test_a_subclass_of_the_table_is_added_as_a_dense_bias():
    class Doubled(torch.nn.Embedding):
        def forward(self, input):
            return 2 * super().forward(input)

    ours, theirs = pair(*SEQ2SEQ["t5"])
    for model in (ours, theirs):
        layer = self_attentions(model)[0]
        table = layer.relative_attention_bias
        layer.relative_attention_bias = Doubled(*table.weight.shape, _weight=table.weight.data)
    ids = random_ids(2, 7)
    with record_decisions() as decisions:
        hold("doubled", lambda model: model.encoder(ids).last_hidden_state, ours, theirs)
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


def test_t5_continues_a_cache_with_the_dense_bias():
    ours, theirs = pair(*SEQ2SEQ["t5"])
    mask = PADDINGS["right"]
    ids, target = random_ids(*mask.shape), random_ids(3, 6)
    fused = []

    def run(model):
        encoded = model.encoder(ids, attention_mask=mask)
        options = {"encoder_outputs": encoded, "attention_mask": mask, "use_cache": True}
        first = model(decoder_input_ids=target[:, :4], **options)
        with record_decisions() as decisions:
            options["past_key_values"] = first.past_key_values
            second = model(decoder_input_ids=target[:, 4:], **options)
        fused.append(len(decisions))
        return torch.cat((first.logits, second.logits), 1)

    hold("continued", run, ours, theirs)
    assert fused[0] == 2, "cross-attention, which has no bias, is fused; a cache is not certain"


# --- generation and caches ------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["gpt2", "bart", "t5"])
def test_greedy_generation_equals_sdpa(family, cache):
    cls, config = SEQ2SEQ.get(family) or (GPT2LMHeadModel, GPT2Config(**GPT2))
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
    for _ in range(20):  # some random weights repeat one token
        ours, theirs = pair(cls, config, reference="sdpa")
        expected = theirs.generate(ids, **arguments)
        if expected[:, -8:].unique().numel() > 2:
            break
    else:
        pytest.fail("no model generates different tokens")
    assert torch.equal(ours.generate(ids, **arguments), expected)


def test_chunked_prefill_into_a_cache_is_bottom_right_aligned():
    ours, theirs = pair(GPT2LMHeadModel, GPT2Config(**GPT2))
    mask = PADDINGS["left"]
    ids = random_ids(*mask.shape)

    def run(model):
        first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        return model(ids[:, 5:], attention_mask=mask, past_key_values=first.past_key_values).logits

    hold("chunked", run, ours, theirs, keep=lambda out: out[mask[:, 5:].bool()])


def test_prefill_into_a_static_cache():
    ours, theirs = pair(GPT2LMHeadModel, GPT2Config(**GPT2))
    mask = PADDINGS["left"]
    ids = random_ids(*mask.shape)

    def run(model):
        cache = StaticCache(config=model.config, max_cache_len=16)
        first = model(ids[:, :6], attention_mask=mask[:, :6], past_key_values=cache).logits
        second = model(ids[:, 6:8], attention_mask=mask[:, :8], past_key_values=cache).logits
        third = model(ids[:, 8:], attention_mask=mask, past_key_values=cache).logits
        return torch.cat((first, second, third), 1)

    hold("static", run, ours, theirs, keep=lambda out: out[mask.bool()])


# --- masks that are more than padding -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_a_4d_mask_of_the_user_is_used(family, kind):
    cls, config = ENCODERS.get(family) or SEQ2SEQ[family]
    ours, theirs = pair(cls, config)
    ids = random_ids(2, 7)
    mask = torch.rand(2, 1, 7, 7) > 0.5
    mask = mask | torch.eye(7, dtype=torch.bool)

    def run(model, mask=mask):
        additive = torch.zeros(mask.shape, dtype=model.dtype).masked_fill(~mask, -1e9)
        eager = model.config._attn_implementation == "eager"
        given = additive if kind == "additive" or eager else mask
        if family == "t5":
            return model.encoder(ids, attention_mask=given).last_hidden_state
        return model(ids, attention_mask=given).last_hidden_state

    out = hold(family, run, ours, theirs)
    with torch.no_grad():
        assert not torch.equal(out, run(ours, torch.ones_like(mask)))


def test_packed_sequences_do_not_see_each_other():
    ours, theirs = pair(GPT2Model, GPT2Config(**GPT2))
    ids = random_ids(1, 9)
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])

    def packed(model):
        return model(ids, position_ids=position_ids, use_cache=False).last_hidden_state

    out = hold("packed", packed, ours, theirs)
    with torch.no_grad():
        other = (ids + torch.tensor([[1, 1, 1, 1, 0, 0, 0, 1, 1]])) % VOCAB
        changed = ours(other, position_ids=position_ids, use_cache=False).last_hidden_state
    assert torch.equal(out[:, 4:7], changed[:, 4:7])


PACKED = ("bert", "gpt2", "t5")


def packed_and_padded(family, mask):
    """(inputs of the packed row, of the padded batch, the function from a model to its run)."""
    ids = random_ids(*mask.shape)
    lengths = mask.sum(1)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    packed = {
        "input_ids": ids[mask.bool()][None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends.clone(),
        "max_length_q": int(lengths.max()),
        "max_length_k": int(lengths.max()),
    }
    if family != "t5":
        packed["position_ids"] = torch.cat([torch.arange(n) for n in lengths.tolist()])[None]
    if family == "gpt2":
        # Without a mask, Transformers would make a dense one of the position_ids.
        packed |= {"attention_mask": torch.ones_like(packed["input_ids"]), "use_cache": False}

    def run(model, given):
        model = model.encoder if family == "t5" else model
        out = model(**given).last_hidden_state
        return out[given.get("attention_mask", torch.ones(out.shape[:2])).bool()]

    return packed, {"input_ids": ids, "attention_mask": mask}, run


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_equal_the_padded_batch(family):
    ours, theirs = pair(*(TASKS["t5"] if family == "t5" else ENCODERS[family]))
    packed, padded, run = packed_and_padded(family, PADDINGS["right"])
    with record_decisions() as decisions:
        run(ours, packed)
    assert [each.arguments.split("@")[0] for each in decisions] == ["float32[16, 2, 16]"] * 2
    hold_gradients(lambda model: run(model, packed), ours, lambda model: run(model, padded), theirs)


@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_have_the_dropout_of_the_padded_batch(family):
    model = with_dropout(family)
    packed, padded, run = packed_and_padded(family, PADDINGS["right"])

    def seeded(given):
        def call(model):
            torch.manual_seed(1)
            return run(model, given)

        return call

    hold_gradients(seeded(packed), model, seeded(padded), model)


def test_a_4d_mask_replaces_the_lengths_of_packed_sequences():
    """Transformers makes one of ``position_ids``; it may hold more than the lengths say."""
    ours, theirs = pair(GPT2Model, GPT2Config(**GPT2))
    packed, _, _ = packed_and_padded("gpt2", PADDINGS["right"])
    del packed["attention_mask"]
    with record_decisions() as decisions:
        hold("packed", lambda model: model(**packed).last_hidden_state, ours, theirs)
    assert not decisions


def test_packed_rows_that_do_not_fit_raise():
    model = build(*ENCODERS["bert"], "fastplm")
    packed, _, _ = packed_and_padded("bert", PADDINGS["right"])
    for name in hf._PACKED:
        with pytest.raises(ArgumentValueError, match=f"`{name}` got None"):
            model(**packed | {name: None})
    two = {name: packed[name].repeat(2, 1) for name in ("input_ids", "position_ids")}
    with pytest.raises(ArgumentValueError, match="batch of 2"):
        model(**packed | two)
    with pytest.raises(UnsupportedError, match="cu_seq_lens_q"):
        model(**packed, output_attentions=True)
    bounds = {name: packed[name] for name in hf._PACKED}
    query, key = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    with pytest.raises(UnsupportedError, match="grouped heads"):
        hf.fastplm_attention_forward(torch.nn.Identity(), query, key, key, None, **bounds)
    bias = torch.zeros(1, 4, 16, 16)
    with pytest.raises(UnsupportedError, match="position_bias"):
        hf.fastplm_attention_forward(
            torch.nn.Identity(), query, query, query, None, position_bias=bias, **bounds
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
    mask = hf.fastplm_mask(**arguments, allow_is_causal_skip=True)
    if mask is None or mask.dim() == 2:
        assert mask is None or mask.dtype is torch.bool and mask.shape == (2, kv_length)
        query, key = torch.empty(2, 1, q_length, 1), torch.empty(2, 1, kv_length, 1)
        causal = function == "causal"
        mask, dead = hf._complete_mask(query, key, mask, causal, always=True)
        mask = torch.ones(()).bool() if mask is None else mask & ~dead
    assert torch.equal(mask.expand_as(expected), expected)


# --- dropout --------------------------------------------------------------------------------------

DROPOUT = 0.3
FUSED = {"bert": 2, "gpt2": 2, "bart": 6, "t5": 6}


def with_dropout(family):
    """A model in training that drops attention probabilities and nothing else."""
    cls, config = ENCODERS.get(family) or TASKS[family]
    config = copy.deepcopy(config)
    for name in vars(config):
        if isinstance(getattr(config, name), float) and "drop" in name:
            setattr(config, name, 0.0)
    own = {"gpt2": "attn_pdrop", "bart": "attention_dropout", "t5": "dropout_rate"}
    setattr(config, own.get(family, "attention_probs_dropout_prob"), DROPOUT)
    model = build(cls, config, "fastplm").train()
    if family == "t5":  # one rate for all of the model
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return model


def seeded_run(family):
    """A function from (model, seed) to the output, on the same inputs each time."""
    mask = PADDINGS["right"]
    inputs = {"input_ids": random_ids(*mask.shape), "attention_mask": mask}
    if family in SEQ2SEQ:
        inputs |= {
            "decoder_input_ids": random_ids(3, 6),
            "decoder_attention_mask": TARGETS["right"],
        }

    def run(model, seed=1):
        torch.manual_seed(seed)
        return model(**inputs, use_cache=False)[0]

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
    mask, module = PADDINGS["right"][:2].bool(), torch.nn.Identity()

    def run(dropout):
        return hf.fastplm_attention_forward(
            module, query, key, value, mask, dropout=dropout, is_causal=False
        )[0]

    draws = torch.stack([run(DROPOUT) for _ in range(400)])
    standard_error = draws.std(0) / len(draws) ** 0.5
    score = (draws.mean(0) - run(0.0)) / standard_error
    # Of 288 standard normal numbers, the largest passes 5 once in six thousand times.
    assert score.abs().max() < 5
    assert draws.std(0).min() > 0


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", FUSED)
def test_activation_checkpointing_repeats_the_dropout(monkeypatch, family, reentrant):
    """Backward computes every layer again, and drops the same probabilities."""
    model, run = with_dropout(family), seeded_run(family)
    plain = value_and_gradients(run, model)
    outputs = []

    def recorded(*args, **kwargs):
        result = hf.fastplm_attention_forward(*args, **kwargs)
        outputs.append(result[0].detach())
        return result

    monkeypatch.setitem(AttentionInterface._global_mapping, hf.NAME, recorded)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with record_decisions() as forward:
        value = run(model)
    assert len(outputs) == FUSED[family]
    with record_decisions() as backward:
        value.backward(upstream(value))
    assert len(forward) == len(backward) == FUSED[family] - 2 * (reentrant and family == "t5")
    first, second = outputs[: FUSED[family]], outputs[FUSED[family] :]
    assert len(first) == len(second)
    for output in first:
        assert any(
            torch.equal(output, replayed) for replayed in second if replayed.shape == output.shape
        )
    if not reentrant:
        # Transformers' own reentrant BART loses gradients, and T5 takes the dense bias there.
        assert torch.equal(value, plain.pop("value"))
        grads = dict(model.named_parameters())
        assert all(torch.equal(grads[name].grad, grad) for name, grad in plain.items())


# --- what the fused kernel does not do ------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "bart", "t5"])
def test_output_attentions(family):
    cls, config = ENCODERS.get(family) or SEQ2SEQ[family]
    ours, theirs = pair(cls, config)
    mask = PADDINGS["right"]
    ids = random_ids(*mask.shape)
    target = {} if family == "bert" else {"decoder_input_ids": ids[:, :4]}

    def run(model):
        out = model(ids, attention_mask=mask, output_attentions=True, **target)
        weights = list(out.attentions if family == "bert" else out.encoder_attentions)
        if target:
            weights += [*out.decoder_attentions, *out.cross_attentions]
        return torch.cat([each[0].flatten() for each in weights])

    assert hold(family, run, ours, theirs).numel() > 0


def test_is_causal_false_makes_gpt2_bidirectional():
    ours, theirs = pair(GPT2Model, GPT2Config(**GPT2), reference="sdpa")
    mask = PADDINGS["right"]
    ids = random_ids(*mask.shape)
    for given in (None, mask):
        out = hold(
            "bidirectional",
            lambda model, given=given: (
                model(ids, attention_mask=given, is_causal=False, use_cache=False).last_hidden_state
            ),
            ours,
            theirs,
            keep=lambda out: out[mask.bool()],
        )
        with torch.no_grad():
            causal = ours(ids, attention_mask=given).last_hidden_state[mask.bool()]
        assert not torch.equal(out, causal)


@pytest.mark.parametrize("argument", ["softcap", "s_aux", "head_mask"])
def test_unsupported_arguments_raise(argument):
    model = build(*ENCODERS["bert"], "fastplm")
    with pytest.raises(UnsupportedError, match=argument):
        model(random_ids(1, 4), **{argument: torch.ones(2)})


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


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart", "t5"])
def test_compiled_once_for_all_masks_of_a_shape(family):
    cls, config = ENCODERS.get(family) or SEQ2SEQ[family]
    model = build(cls, config, "fastplm")
    frames = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=frames, fullgraph=True)
    extra = {"decoder_input_ids": random_ids(3, 6)} if family in SEQ2SEQ else {}
    with torch.no_grad():
        for mask in (*PADDINGS.values(), torch.ones_like(PADDINGS["left"])):
            ids = random_ids(*mask.shape)
            expected = model(ids, attention_mask=mask, use_cache=False, **extra)[0]
            out = compiled(ids, attention_mask=mask, use_cache=False, **extra)[0]
            assert torch.equal(out, expected)
    assert frames.frame_count == 1


@pytest.mark.parametrize(("family", "checkpointing"), [("bert", True), ("t5", False)])
def test_training_with_dropout_compiles_to_one_graph(family, checkpointing):
    """(Checkpointed T5 does not compile, whatever its attention: it sets ``requires_grad``.)"""
    model = with_dropout(family)
    model = model.encoder if family == "t5" else model
    mask = PADDINGS["right"]
    ids = random_ids(*mask.shape)

    def run(model):
        torch.manual_seed(1)
        return model(ids, attention_mask=mask, use_cache=False).last_hidden_state

    with record_decisions() as decisions:
        single = value_and_gradients(run, model)
    assert len(decisions) == 2
    model = model.double()
    gold = value_and_gradients(run, model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    # This backend draws from PyTorch's generator as eager mode does.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def compiled_run(_):
        return run(compiled)

    out = value_and_gradients(compiled_run, model)
    assert torch.equal(out["value"], value_and_gradients(compiled_run, model)["value"])
    # SDPA would drop others, so this shows as well that the fused op ran. A compiled step gives
    # unused parameters a gradient of 0.
    check_in_fp64({name: out[name] for name in gold}, gold, single)


def test_the_output_is_contiguous_in_the_layout_of_the_projections():
    query = torch.randn(2, 3, 5, 8)
    out, _ = hf.fastplm_attention_forward(torch.nn.Identity(), query, query, query, None)
    assert out.shape == (2, 5, 3, 8) and out.is_contiguous()


# --- one query of few keys ------------------------------------------------------------------------


def ops_called(function) -> list[str]:
    with record_decisions() as decisions:
        function()
    return [decision.op for decision in decisions]


def one_query(seqlen_k=40, dtype=torch.float32, heads_k=4, **kwargs):
    """A call of the attention of one layer, of a token that a model is about to generate."""
    query = torch.randn(2, 4, 1, 16).to(dtype)
    key, value = (torch.randn(2, heads_k, seqlen_k, 16).to(dtype) for _ in range(2))
    arguments = {"attention_mask": None, "scaling": 0.25} | kwargs
    return lambda: hf.fastplm_attention_forward(torch.nn.Module(), query, key, value, **arguments)[
        0
    ]


@pytest.mark.parametrize("seqlen_k", (0, 1, 40))
def test_one_query_with_few_keys_uses_sdpa(seqlen_k):
    """Because that is faster; the output is that of the op."""
    call = one_query(seqlen_k)
    assert ops_called(call) == []
    with fastplm.use_backend("torch"):
        assert ops_called(call) == ["attention"]
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
    assert torch.equal(traced(~ones), ~ones)


def test_a_mask_of_ones_becomes_none():
    arguments = dict(batch_size=2, q_length=1, kv_length=5, q_offset=4)
    ones = torch.ones(2, 5, dtype=torch.bool)
    assert hf.fastplm_mask(**arguments, attention_mask=ones) is None
    ones[1, 0] = False
    assert torch.equal(hf.fastplm_mask(**arguments, attention_mask=ones), ones)
    # On other devices, the values are not read.
    assert hf.fastplm_mask(**arguments, attention_mask=ones.to("meta")) is not None


@pytest.mark.parametrize("padded", (False, True))
def test_generation_calls_the_op_where_there_is_padding(padded):
    config = GPT2Config(vocab_size=37, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    config.bos_token_id = config.eos_token_id = None
    model = GPT2LMHeadModel._from_config(config, attn_implementation="fastplm").eval()
    ids = torch.randint(37, (2, 9))
    attention_mask = torch.ones_like(ids)
    if padded:
        attention_mask[0, :3] = 0

    def generate():
        settings = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
        return model.generate(ids, attention_mask=attention_mask, **settings)

    # Two layers; the prompt, and then three tokens of the four.
    assert len(ops_called(generate)) == (8 if padded else 2)
    ours = generate()
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, generate())
