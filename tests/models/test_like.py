"""``accelerate`` by behaviour: classes made from a model's structure, and proved on the model."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import transformers
from torch import nn

import fastplm
from fastplm.errors import UnsupportedError
from fastplm.models import _base, _like
from fastplm.models._accelerate import _roots

from .conftest import rows_of, same

SIZES = dict(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
    initializer_range=0.3,
    pad_token_id=1,
)
_BART = dict(
    vocab_size=40,
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=32,
    init_std=0.3,
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
    scale_embedding=True,
)
#: A model of each way in which classes are made: its class and its configuration.
MADE = {
    "interface": ("RoCBertForMaskedLM", SIZES | dict(enable_shape=False)),
    "own masks": ("LayoutLMForTokenClassification", SIZES),
    "own attention": ("RemBertForSequenceClassification", SIZES | dict(input_embedding_size=8)),
    "norms first": ("MegatronBertForMaskedLM", SIZES),
    "decoder": ("MegatronBertForCausalLM", SIZES | dict(is_decoder=True)),
    "rotary": ("RoFormerForMaskedLM", SIZES | dict(embedding_size=16)),
    "adapters": ("XmodModel", SIZES | dict(languages=["a", "b"], default_language="a")),
    "seq2seq": ("MarianMTModel", _BART),
    "seq2seq, norms first": ("MBartForConditionalGeneration", _BART),
    "seq2seq, own attention": ("MvpForConditionalGeneration", _BART),
    "decoder alone": (
        "TrOCRForCausalLM",
        _BART | dict(hidden_size=16, cross_attention_hidden_size=16),
    ),
}
MADE["pooler"] = (
    "BigBirdForSequenceClassification",
    SIZES | dict(attention_type="original_full"),
)
every_way = pytest.mark.parametrize("way", MADE)
IDS = torch.arange(4, 28).view(3, 8)
MASK = torch.tensor([[1] * 8, [1] * 5 + [0] * 3, [1] * 7 + [0]])


def stock(way: str, **changed) -> transformers.PreTrainedModel:
    name, sizes = MADE[way]
    kind = getattr(transformers, name)
    torch.manual_seed(1)
    return kind(kind.config_class(**{**sizes, **changed})).eval().double()


def batch(model, mask=MASK):
    given = {"input_ids": IDS.masked_fill(mask == 0, 1), "attention_mask": mask}
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": IDS[:, :6], "use_cache": False}
    elif "use_cache" in model.config.to_dict():
        given["use_cache"] = False
    return given


def outputs(model, **more):
    with torch.no_grad():
        out = model(**(batch(model) | more))
    return [
        one[MASK.bool()] if one.shape[:2] == MASK.shape else one
        for one in out.values()
        if isinstance(one, torch.Tensor) and one.is_floating_point()
    ]


def is_made(model) -> bool:
    return any(type(module) in _base.MADE for module in model.modules())


@every_way
def test_classes_are_made_and_taken_back(way):
    model = stock(way)
    before, kinds = outputs(model), [type(module) for module in model.modules()]
    names = [set(vars(module)) for module in model.modules()]
    fastplm.accelerate(model)
    assert type(model).__module__ == "fastplm.models._like"
    assert type(model).__mro__[-1] is object and issubclass(type(model), kinds[0])
    torch.testing.assert_close(outputs(model), before)
    again = [type(module) for module in model.modules()]
    fastplm.accelerate(model)
    assert [type(module) for module in model.modules()] == again
    fastplm.restore(model)
    assert [type(module) for module in model.modules()] == kinds
    assert [set(vars(module)) for module in model.modules()] == names
    assert same(outputs(model), before)


@every_way
def test_padding_is_left_out(way):
    model = fastplm.accelerate(stock(way).float())  # in which the kernels run
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 2]
    shapes = rows_of(stacks[0][0])
    outputs(model)
    if "seq2seq" not in way or shapes:
        assert shapes and shapes[0] == (1, int(MASK.sum()))


@every_way
def test_a_model_is_left_as_it_was(way):
    """Modes, gradients, probabilities, the configuration and the generator of random numbers."""
    model = stock(way)
    model.train()
    next(iter(model.modules()))
    part = next(m for m in model.modules() if not any(m.children()))
    part.eval()
    frozen = next(model.parameters())
    frozen.requires_grad_(False)
    rates = [vars(m).get("p") for m in model.modules()]
    config, modes = model.config.to_dict(), [m.training for m in model.modules()]
    state = torch.get_rng_state()
    fastplm.accelerate(model)
    assert is_made(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in model.modules()] == modes
    assert [vars(m).get("p") for m in model.modules()] == rates
    assert all(p.grad is None for p in model.parameters()) and not frozen.requires_grad
    assert model.config.to_dict() == config


@every_way
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(way, how):
    model = fastplm.accelerate(stock(way))
    if how == "deepcopy":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert same(outputs(other), outputs(model))


@every_way
def test_what_rows_cannot_have_the_parent_computes(way):
    """Attention weights, full masks, and hidden states of every layer."""
    theirs, ours = stock(way), fastplm.accelerate(stock(way))
    theirs.set_attn_implementation("eager")
    theirs.config.output_attentions = ours.config.output_attentions = False
    inputs = batch(theirs)
    for more in ({"output_attentions": True}, {"output_hidden_states": True}):
        with torch.no_grad():
            expected, found = (model(**inputs, **more) for model in (theirs, ours))
        assert expected.keys() == found.keys()
        for name in expected.keys() & {"hidden_states", "attentions", "encoder_hidden_states"}:
            for one, other in zip(found[name], expected[name], strict=True):
                seen = MASK.bool()
                if name == "attentions":
                    if one.shape[2] != MASK.shape[1] or "seq2seq" in way:
                        continue
                    seen = seen[:, None].expand(one.shape[:3])
                elif one.shape[:2] != MASK.shape:
                    continue
                # As close as in fp32: the parents' eager softmax is fp32 whatever the dtype is.
                torch.testing.assert_close(one[seen].float(), other[seen].float())


@pytest.mark.parametrize("way", ["decoder", "seq2seq", "seq2seq, own attention", "decoder alone"])
def test_generation_has_a_cache(way):
    theirs, ours = stock(way), fastplm.accelerate(stock(way))
    inputs = {k: v for k, v in batch(theirs).items() if k in ("input_ids", "attention_mask")}
    if "decoder" in way:
        inputs = {k: v.flip(1) for k, v in inputs.items()}
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert torch.equal(ours.generate(**inputs, **options), theirs.generate(**inputs, **options))


@pytest.mark.parametrize(
    "way", ["norms first", "own attention", "rotary", "seq2seq, own attention"]
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_know_their_rows(way, reentrant):
    grads = []
    for model in (stock(way), fastplm.accelerate(stock(way))):
        model.train()
        for module in model.modules():
            for name, value in vars(module).items():
                if isinstance(value, float) and ("drop" in name or name == "p"):
                    setattr(module, name, 0.0)
        if grads:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        out = model(**batch(model)).logits
        out = out[MASK.bool()] if out.shape[:2] == MASK.shape else out
        out.square().sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, one in grads[0].items():
        torch.testing.assert_close(grads[1][name], one)


def test_inputs_of_tokens_are_packed_and_others_keep_padding():
    theirs, ours = stock("own masks"), fastplm.accelerate(stock("own masks"))
    boxes = torch.randint(0, 500, (3, 8, 2)).sort(1)[0]
    given = {"bbox": torch.cat((boxes, boxes + 100), -1), "token_type_ids": IDS % 2}
    torch.testing.assert_close(outputs(ours, **given), outputs(theirs, **given))
    theirs, ours = stock("adapters"), fastplm.accelerate(stock("adapters"))
    shapes = rows_of(ours.encoder.layer[0])
    given = {"lang_ids": torch.tensor([0, 1, 0])}
    torch.testing.assert_close(outputs(ours, **given), outputs(theirs, **given))
    assert shapes == [tuple(IDS.shape)]


# --- what must not be replaced --------------------------------------------------------------------

ROC = transformers.models.roc_bert.modeling_roc_bert
MEGATRON = transformers.models.megatron_bert.modeling_megatron_bert
MBART = transformers.models.mbart.modeling_mbart


def other_residual(original):
    return lambda self, hidden, input: self.LayerNorm(self.dense(hidden) + 1.01 * input)


def scaled_query(original):
    def forward(self, hidden_states, *args, **kwargs):
        return original(self, 1.02 * hidden_states, *args, **kwargs)

    return forward


def biased(original):
    """Attention that prefers near keys, by a bias that adds up with the distance."""

    def forward(self, hidden_states, attention_mask=None, *args, **kwargs):
        length = hidden_states.shape[1]
        near = -0.3 * (torch.arange(length)[:, None] - torch.arange(length)).abs()
        mask = near if attention_mask is None else attention_mask + near
        return original(self, hidden_states, mask, *args, **kwargs)

    return forward


def dropped_twice(original):
    def forward(self, hidden, input):
        return self.LayerNorm(self.dropout(self.dense(hidden) + input))

    return forward


def not_dropped(original):
    return lambda self, hidden, input: self.LayerNorm(self.dense(hidden) + input)


def other_rows(original):
    """Positions that lean on the row before: rows of two texts stand side by side when packed."""

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        return out + 0.1 * out.roll(1, 1)

    return forward


def by_length(original):
    def forward(self, hidden, *args, **kwargs):
        return original(self, hidden * hidden.shape[1] ** -0.1, *args, **kwargs)

    return forward


@pytest.mark.parametrize(
    ("way", "kind", "change"),
    [
        ("interface", ROC.RoCBertSelfOutput, other_residual),
        ("interface", ROC.RoCBertOutput, other_residual),
        ("interface", ROC.RoCBertSelfOutput, dropped_twice),
        ("interface", ROC.RoCBertOutput, not_dropped),
        ("interface", ROC.RoCBertEmbeddings, other_rows),
        ("interface", ROC.RoCBertLayer, by_length),
        ("interface", ROC.RoCBertPredictionHeadTransform, other_rows),
        ("norms first", MEGATRON.MegatronBertSelfAttention, scaled_query),
        ("norms first", MEGATRON.MegatronBertSelfAttention, biased),
        ("norms first", MEGATRON.MegatronBertLMPredictionHead, other_rows),
        ("seq2seq, norms first", MBART.MBartEncoderLayer, by_length),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_a_class_that_computes_something_else_is_not_replaced(monkeypatch, way, kind, change):
    monkeypatch.setattr(kind, "forward", change(kind.forward))
    model = stock(way)
    before, kinds = outputs(model), [type(module) for module in model.modules()]
    try:
        fastplm.accelerate(model)
    except UnsupportedError:
        assert "norms first" in way  # its attention cannot be set
    assert not is_made(model)
    if model.config._attn_implementation != "fastplm":
        assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(outputs(model), before)


@pytest.mark.parametrize("missing", ["scaling", "keys", "causal", "positions", "dropout"])
def test_the_proof_finds_what_the_mixins_could_do_wrong(monkeypatch, missing):
    way = {"causal": "decoder", "positions": "seq2seq, norms first"}.get(missing, "norms first")
    if missing == "scaling":
        monkeypatch.setattr(_like.OwnAttention, "scaling", 0.3)
    elif missing == "keys":
        monkeypatch.setattr(_like.OnRows, "forward", _without_rows)
    elif missing == "causal":
        monkeypatch.setattr(_like.OnRows, "_of_attention", lambda self: {"is_causal": False})
    elif missing == "positions":
        monkeypatch.setattr(_like._Positions, "forward", _counted_through)
    else:
        monkeypatch.setattr(_like.OwnAttention, "forward", _undropped(_like.OwnAttention.forward))
    _like.made.cache_clear()
    model = stock(way)
    try:
        fastplm.accelerate(model)
    except UnsupportedError:
        pass
    _like.made.cache_clear()
    assert not is_made(model)


def _without_rows(self, *, rows=None, **inputs):
    return super(_like.OnRows, self).forward(**inputs)


def _counted_through(self, *args, **kwargs):
    return super(_like._Positions, self).forward(*args, **kwargs)


def _undropped(forward):
    def run(self, *args, **kwargs):
        rate, self.dropout.p = self.dropout.p, 0.0
        try:
            return forward(self, *args, **kwargs)
        finally:
            self.dropout.p = rate

    return run


@pytest.mark.parametrize("how", ["bf16", "meta", "block-sparse", "mixture", "subclass"])
def test_what_cannot_be_proved_is_as_before(how):
    if how == "block-sparse":
        config = transformers.BigBirdConfig(**SIZES, block_size=4, num_random_blocks=1)
        model = transformers.BigBirdForMaskedLM(config)
    elif how == "mixture":
        config = transformers.NllbMoeConfig(**_BART, num_experts=2, expert_capacity=4)
        model = transformers.NllbMoeForConditionalGeneration(config)
    else:
        model = stock("norms first" if how == "subclass" else "interface")
    if how == "bf16":
        model.bfloat16()
    elif how == "meta":
        model.to("meta")
    elif how == "subclass":
        model.bert.encoder.layer[0].attention.self.__class__ = _Own
    with contextlib.suppress(UnsupportedError):
        fastplm.accelerate(model)
    assert not is_made(model)


class _Own(MEGATRON.MegatronBertSelfAttention):
    """Attention of the user."""


def test_bigbirds_pooler_is_a_product_and_its_activation():
    theirs, ours = stock("pooler"), fastplm.accelerate(stock("pooler"))
    assert is_made(ours)
    found = [model.bert(**batch(model)).pooler_output for model in (ours, theirs)]
    torch.testing.assert_close(*found)


def test_what_no_head_reads_is_proved_too(monkeypatch):
    monkeypatch.setattr(
        _like._LinearPooler, "_pooled", lambda self, first: self.pooler(first[:, 0])
    )
    with pytest.raises(UnsupportedError):
        fastplm.accelerate(stock("pooler"))


def test_only_the_outermost_models_of_transformers_are_looked_at():
    inner = stock("interface")
    outer = nn.Sequential(nn.ModuleDict({"model": inner}), nn.Linear(2, 2))
    assert list(_roots(outer)) == [inner]
    fastplm.accelerate(outer)
    assert is_made(inner)


def test_a_replaced_module_makes_the_parent_run():
    """After accelerate, too: the layer is not what was proved."""
    theirs, ours = stock("norms first"), fastplm.accelerate(stock("norms first"))
    for model in (theirs, ours):
        attention = model.bert.encoder.layer[1].attention
        attention.self = _Mean(attention.self)
    torch.testing.assert_close(outputs(ours), outputs(theirs))


@every_way
def test_a_stock_module_that_is_put_in_later_makes_the_parent_run(way):
    """As by the parent's ``resize_position_embeddings``: in place of each module with a class that
    was made. Parts that are told which rows to read are refused."""
    model = fastplm.accelerate(stock(way))
    given = batch(model)
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": given["input_ids"], "decoder_attention_mask": MASK}
    expected = outputs(model, **given)
    for path, module in model.named_modules():
        if path and type(module) in _base.MADE:
            kinds = [(part, type(part)) for part in module.modules()]
            _base.restore_modules(module)
            try:
                torch.testing.assert_close(outputs(model, **given), expected, msg=path)
            except fastplm.errors.ArgumentValueError as error:
                assert f"got a part that is a {type(module).__name__}" in str(error)
            for part, kind in kinds:
                part.__class__ = kind


def test_positions_of_another_number():
    sizes = _BART | {"max_position_embeddings": 12}
    theirs = transformers.PegasusModel(transformers.PegasusConfig(**sizes)).eval().double()
    ours = fastplm.accelerate(copy.deepcopy(theirs))
    for model in (theirs, ours):
        model.resize_position_embeddings(30)
    torch.testing.assert_close(outputs(ours), outputs(theirs))


class _Mean(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.value = inner.value

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.value(hidden_states.mean(1, keepdim=True)).expand_as(hidden_states), None


def test_attention_of_its_own_cannot_be_set():
    """As in Transformers, which says so; the rows stay right."""
    model = fastplm.accelerate(stock("rotary")).eval()
    expected = model(IDS, attention_mask=MASK).logits
    model.set_attn_implementation("fastplm")
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(IDS, attention_mask=MASK).logits, expected)
