"""``fastplm.quantize``: what it replaces, that nothing is stale or lost, and what it costs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import transformers
from safetensors.torch import load_model, save_model
from torch import nn
from transformers.pytorch_utils import Conv1D

import fastplm
from fastplm import _extension, models, ops
from fastplm.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from fastplm.models._watch import plan_in
from fastplm.nn import LinearInt8
from fastplm.reference.linear_int8 import linear_int8_ref
from fastplm.testing import (
    GRADIENT_FACTOR,
    ReversedReductions,
    ShuffledReductions,
    check_error,
    rerounded,
)

SIZES = dict(vocab_size=50, pad_token_id=1, bos_token_id=2, eos_token_id=3)
BERT = SIZES | dict(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=70,
    max_position_embeddings=300,
    initializer_range=0.2,
)
GPT = SIZES | dict(n_embd=48, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
SEQ2SEQ = SIZES | dict(decoder_start_token_id=2, d_model=48)
MODELS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**BERT)),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**BERT)),
    "albert": lambda: transformers.AlbertModel(transformers.AlbertConfig(**BERT)),
    "gpt2": lambda: transformers.GPT2Model(transformers.GPT2Config(**GPT)),
    "bart": lambda: transformers.BartModel(
        transformers.BartConfig(
            **SEQ2SEQ,
            **dict(encoder_layers=2, decoder_layers=2, encoder_ffn_dim=70, decoder_ffn_dim=70),
            **dict(encoder_attention_heads=4, decoder_attention_heads=4, init_std=0.2),
        )
    ),
    "t5": lambda: transformers.T5Model(
        transformers.T5Config(**SEQ2SEQ, num_layers=2, num_heads=4, d_kv=12, d_ff=70)
    ),
}
needs_call = pytest.mark.skipif(
    _extension.lacks("encoder", "CPU") is not None, reason="csrc/ is not built"
)


def made(family="bert"):
    torch.manual_seed(0)
    return MODELS[family]().eval()


def batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(4, 50, mask.shape, generator=generator).masked_fill(~mask, 1)
    return {"input_ids": ids, "attention_mask": mask.long()}


def states(model, given):
    """The states of the tokens that are no padding: [N, E]."""
    if model.config.is_encoder_decoder:
        given = given | {"decoder_input_ids": given["input_ids"]}
    with torch.no_grad():
        out = model(**given).last_hidden_state
    return out[given["attention_mask"].bool()]


def layers_of(model, kind):
    return [module for module in model.modules() if isinstance(module, kind)]


GIVEN = batch([7, 12, 1, 30])


# --- what it replaces -----------------------------------------------------------------------------


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_the_linear_layers_of_the_blocks(family, accelerated):
    """8 bits lose less than weights of 6 bits alone do."""
    model = made(family)
    expected = states(model, GIVEN)
    coarse = copy.deepcopy(model)
    count = 0
    for module in layers_of(coarse, (nn.Linear, Conv1D)):
        peak = module.weight.detach().abs().amax(0 if isinstance(module, Conv1D) else 1, True)
        module.weight.data = torch.round(module.weight.data * (31 / peak)) * (peak / 31)
    blocks = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    count = len({id(one) for block in blocks for one in layers_of(block, (nn.Linear, Conv1D))})
    if accelerated:
        fastplm.accelerate(model)
    assert fastplm.quantize(model) is model and not model.training
    assert len(layers_of(model, LinearInt8)) == count > 0
    for block in blocks:
        assert not layers_of(block, (nn.Linear, Conv1D))
    out = states(model, GIVEN)
    assert 0 < (out - expected).norm() < (states(coarse, GIVEN) - expected).norm()
    assert torch.equal(states(fastplm.quantize(model), GIVEN), out)  # again: nothing changes
    assert "LinearInt8(in_features=" in repr(model)


def test_each_layer_is_the_formula():
    model = made()
    dense = model.encoder.layer[1].output.dense
    fastplm.quantize(model)
    ours, x = model.encoder.layer[1].output.dense, torch.randn(3, 5, 70)
    expected = linear_int8_ref(x, *ops.quantize_int8(dense.weight), None)
    with torch.no_grad():
        ours.bias.zero_()
        assert torch.equal(ours(x), expected)
    assert ours.weight.shape == dense.weight.shape


def test_skip_keeps_layers():
    model = fastplm.quantize(made(), skip=["attention.output.dense", "query"])
    kept = [name for name, one in model.encoder.named_modules() if type(one) is nn.Linear]
    assert kept == [
        f"layer.{i}.attention.{own}" for i in range(3) for own in ("self.query", "output.dense")
    ]
    with pytest.raises(UnsupportedError, match=r"`skip`.*'uery'"):
        fastplm.quantize(made(), skip=["uery"])
    with pytest.raises(ArgumentTypeError, match="a list of names"):
        fastplm.quantize(made(), skip="query")


def test_what_cannot_be_quantized_says_so():
    with pytest.raises(UnsupportedError, match="without linear layers in blocks"):
        fastplm.quantize(nn.Linear(3, 4))
    for function in (fastplm.quantize, fastplm.dequantize):
        with pytest.raises((ArgumentTypeError, ValueError), match="torch.nn.Module"):
            function("bert-base-uncased")


# --- the layers of an encoder in one call ---------------------------------------------------------


@needs_call
@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
@pytest.mark.parametrize("lengths", [[1], [63], [5, 1, 9, 2], [257] * 3 + [11]], ids=str)
def test_the_call_has_the_error_of_the_layers(family, lengths, calls):
    """A rounding more or less moves a number to the next of its 255 steps, in either: which of
    them it moves is by chance, so the budget is that of gradients."""
    model, given = fastplm.quantize(made(family)), batch(lengths)
    gold = states(copy.deepcopy(model).double(), given)
    measures = [states(model, given)]
    for mode in (ReversedReductions(), ShuffledReductions(0), ShuffledReductions(1)):
        with mode:
            measures.append(states(model, given))
    layers = fastplm.accelerate(copy.deepcopy(model))
    layers.encoder.layer[0].register_forward_hook(lambda module, given, out: None)
    for each in (model, layers):
        measures += [states(other, given) for other in rerounded(each)]
    assert not calls
    out = states(fastplm.freeze(fastplm.accelerate(model)), given)
    check_error("out", out, gold, measures, GRADIENT_FACTOR)
    assert calls == ["backbone"]


def _scale(model):
    model.encoder.layer[1].output.dense.scale.mul_(2)


def _packed(model):
    model.encoder.layer[0].attention.self.value.packed.copy_(
        model.encoder.layer[1].attention.self.value.packed
    )


def _swap(model):
    dense = model.encoder.layer[2].intermediate.dense
    dense.bias.data = dense.bias.data + 1


def _new_buffer(model):
    own = model.encoder.layer[1].attention.self.key
    own.packed = own.packed.flip(1)


def _load(model):
    torch.manual_seed(5)
    other = fastplm.quantize(MODELS["bert"]().eval())
    model.load_state_dict(other.state_dict())


def _layer(model):
    torch.manual_seed(6)
    model.encoder.layer[0].output.dense = nn.Linear(70, 48)


def _hook(model):
    model.encoder.layer[1].output.dense.register_forward_hook(lambda module, given, out: out * 2)


def _dequantize(model):
    fastplm.dequantize(model)


CHANGES = (_scale, _packed, _swap, _new_buffer, _load, _layer, _hook, _dequantize)


@needs_call
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_are_never_stale(change, mode):
    stock = fastplm.quantize(made())
    ours = fastplm.freeze(fastplm.accelerate(copy.deepcopy(stock)))
    with mode():
        before = ours(**GIVEN).last_hidden_state
    with torch.no_grad():
        change(stock)
        change(ours)
    with mode():
        out = ours(**GIVEN).last_hidden_state
    seen = GIVEN["attention_mask"].bool()
    assert not torch.allclose(out[seen], before[seen])
    gold = states(copy.deepcopy(stock).double(), GIVEN)
    measures = [states(stock, GIVEN), *(states(other, GIVEN) for other in rerounded(stock))]
    check_error("out", out[seen].clone(), gold, measures, GRADIENT_FACTOR)


@needs_call
def test_a_mixture_runs_its_layers():
    model = fastplm.quantize(fastplm.accelerate(made()), skip=["query"])
    assert plan_in(fastplm.freeze(model)) is None
    assert states(model, GIVEN).isfinite().all()


# --- back, and to a file --------------------------------------------------------------------------


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_dequantize_gives_back_kept_weights(family, accelerated):
    model = made(family)
    if accelerated:
        fastplm.accelerate(model)
    frozen = next(iter(model.parameters()))
    frozen.requires_grad_(False)
    expected, before = (
        states(model, GIVEN),
        {n: p.requires_grad for n, p in model.named_parameters()},
    )
    kinds = [type(module) for module in model.modules()]
    fastplm.quantize(model, keep_weights=True)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert fastplm.dequantize(model) is model
    assert [type(module) for module in model.modules()] == kinds
    assert {n: p.requires_grad for n, p in model.named_parameters()} == before
    assert torch.equal(states(model, GIVEN), expected)
    model.train()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_dequantize_without_them_gives_rounded_ones(family):
    model = made(family)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    fastplm.dequantize(fastplm.quantize(model))
    assert [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == list(weights)
    for name, value in model.state_dict().items():
        dims = 0 if family == "gpt2" else -1
        step = weights[name].abs().amax(dims, True) / 127 if weights[name].dim() == 2 else 0.0
        assert ((value - weights[name]).abs() <= 0.501 * step).all(), name


@pytest.mark.parametrize("family", MODELS)
def test_safetensors(family, tmp_path):
    model = fastplm.quantize(made(family))
    save_model(model, str(tmp_path / "int8.safetensors"))
    torch.manual_seed(3)
    other = fastplm.quantize(MODELS[family]().eval(), keep_weights=True)
    load_model(other, str(tmp_path / "int8.safetensors"))
    assert torch.equal(states(other, GIVEN), states(model, GIVEN))
    # It does not go back to weights that are not those of the checkpoint.
    given_back = states(fastplm.dequantize(copy.deepcopy(other)), GIVEN)
    assert torch.equal(given_back, states(fastplm.dequantize(copy.deepcopy(model)), GIVEN))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(states(again, GIVEN), states(model, GIVEN))


def test_a_checkpoint_of_the_other_kind_is_refused():
    model, floats = made(), made()
    fastplm.quantize(model)
    with pytest.raises(RuntimeError, match="is a weight in floating point: load it into a model"):
        model.load_state_dict(floats.state_dict())
    with pytest.raises(RuntimeError, match="weight_int8"):
        floats.load_state_dict(model.state_dict())
    state = model.state_dict()
    name = "encoder.layer.0.output.dense.weight_int8"
    with pytest.raises(RuntimeError, match=r"weight_int8: it is \(48, 69\) in the checkpoint"):
        model.load_state_dict(state | {name: state[name][:, 1:]})
    state.pop(name)
    with pytest.raises(RuntimeError, match="Missing key.*weight_int8"):
        model.load_state_dict(state)


# --- what is refused, other dtypes, compilers -----------------------------------------------------


def test_training_is_refused_with_its_reason():
    model = fastplm.quantize(made())
    assert model(**GIVEN).last_hidden_state.requires_grad is False  # without no_grad, too
    model.train()
    with pytest.raises(UnsupportedError, match="dequantize"):
        model(**GIVEN)
    model.eval()
    model.embeddings.word_embeddings.weight.requires_grad_()
    with pytest.raises(UnsupportedError, match="requires a gradient"):
        model(**GIVEN)


@pytest.mark.parametrize("accelerated", [False, True])
@pytest.mark.parametrize("family", ["bert", "t5", "gpt2"])
def test_autocast(family, accelerated):
    model = fastplm.quantize(made(family))
    if accelerated:
        fastplm.accelerate(model)
    expected = states(model, GIVEN)
    with torch.autocast("cpu", torch.bfloat16):
        out = states(model, GIVEN)
    assert out.isfinite().all() and out.shape == expected.shape


def test_a_folder_that_would_load_as_new_weights_is_not_written(tmp_path):
    model = fastplm.quantize(made())
    with pytest.raises(UnsupportedError, match="state_dict"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    fastplm.dequantize(model).save_pretrained(tmp_path)
    assert torch.equal(
        states(transformers.BertModel.from_pretrained(tmp_path).eval(), GIVEN),
        states(model, GIVEN),
    )


def test_values_of_a_weight_cannot_be_used():
    """PyTorch's own meta tensors would give what lies in the memory."""
    layer = LinearInt8(nn.Linear(5, 6))
    weight = layer.weight
    assert weight.shape == (6, 5) and weight.dtype is torch.int8 and weight.size(1) == 5
    assert weight.device == torch.device("cpu") and isinstance(weight, torch.Tensor)
    for use in (
        lambda: nn.functional.linear(torch.randn(2, 5), weight),
        lambda: weight.data.add_(1),
        lambda: weight[:3],
        lambda: weight.float(),
        lambda: weight.sum(),
    ):
        with pytest.raises(UnsupportedError, match="LinearInt8: `weight`"):
            use()


def test_modules_that_multiply_by_the_weights_themselves():
    torch.manual_seed(0)
    module = nn.ModuleList([fastplm.nn.FusedAttention(32, 4), nn.Linear(32, 32)]).eval()
    x, context = torch.randn(1, 3, 32), torch.randn(1, 5, 32)
    with torch.no_grad():
        expected = module[0](x, context)
        fastplm.quantize(module)
        assert torch.equal(module[0](x, context), expected) and type(module[1]) is LinearInt8
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    lengths = torch.tensor([[False] * 3, [False, True, True]])
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=lengths)
        out = fastplm.quantize(encoder)(x, src_key_padding_mask=lengths)
        assert 0 < (out - expected)[0].norm() < expected[0].norm() / 20
        nested = fastplm.quantize(nn.TransformerEncoder(layer, 2).eval())
        nested.load_state_dict(encoder.state_dict())
        # PyTorch's own fused path, which reads the weights and takes nested tensors, is not taken.
        assert torch.equal(nested(x, src_key_padding_mask=lengths)[0], out[0])
        rows = torch.nested.nested_tensor([torch.randn(2, 32), torch.randn(3, 32)])
        with pytest.raises(ArgumentValueError, match="enable_nested_tensor=False"):
            encoder.layers[0].linear1(rows)


def test_inputs_of_another_width_are_refused():
    """Where the weight is filled up, csrc/ could not see it."""
    with torch.no_grad(), pytest.raises(ArgumentValueError, match=r"expected \[\.\.\., 13\]"):
        LinearInt8(nn.Linear(13, 4))(torch.randn(2, 16))


def test_adapters_are_refused():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer, self.down = base, nn.Linear(70, 2)

    model = made()
    block = model.encoder.layer[1].output
    block.dense = Adapter(block.dense)
    before = [type(module) for module in model.modules()]
    with pytest.raises(UnsupportedError, match="adapter at `encoder.layer.1.output.dense`.*erge"):
        fastplm.quantize(model)
    assert [type(module) for module in model.modules()] == before


def test_one_layer_at_two_places_stays_one():
    model = made()
    first, second = (layer.output for layer in model.encoder.layer[:2])
    second.dense = first.dense
    fastplm.quantize(model)
    assert type(first.dense) is LinearInt8 and second.dense is first.dense
    fastplm.dequantize(model)
    assert type(first.dense) is nn.Linear and second.dense is first.dense


def test_parts_that_are_gone_or_new_when_it_is_undone():
    model = fastplm.quantize(made(), keep_weights=True)
    model.pooler = None
    dense = model.encoder.layer[0].output.dense
    dense.bias = nn.Parameter(torch.full((48,), 3.0), requires_grad=False)
    fastplm.dequantize(model.encoder)
    assert torch.equal(model.encoder.layer[0].output.dense.bias, torch.full((48,), 3.0))
    assert all(parameter.requires_grad for parameter in model.encoder.parameters())
    assert not any(parameter.requires_grad for parameter in model.embeddings.parameters())
    assert all(one.requires_grad for one in fastplm.dequantize(model).parameters())


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("family", ["bert", "t5"])
def test_another_dtype_when_it_is_undone(family, keep_weights):
    model = fastplm.quantize(made(family), keep_weights=keep_weights).to(torch.bfloat16)
    assert states(fastplm.dequantize(model), GIVEN).dtype is torch.bfloat16


def test_restored_before_it_is_undone():
    model = fastplm.quantize(fastplm.accelerate(made()), keep_weights=True)
    fastplm.dequantize(fastplm.restore(model))
    assert not any(type(one).__module__.startswith("fastplm") for one in model.modules())


def test_the_plan_of_a_call_keeps_no_former_weights():
    model = fastplm.freeze(fastplm.accelerate(made()))
    states(model, GIVEN)
    weight = weakref.ref(model.encoder.layer[0].output.dense.weight)
    fastplm.quantize(model)
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accelerated", [False, True])
def test_a_model_of_16_bits_keeps_its_scales_in_fp32(dtype, accelerated):
    model = made()
    if accelerated:
        fastplm.accelerate(model)
    expected = states(model, GIVEN)
    fastplm.quantize(model)
    scales = [layer.scale.clone() for layer in layers_of(model, LinearInt8)]
    model.to(dtype)
    for layer, scale in zip(layers_of(model, LinearInt8), scales, strict=True):
        assert torch.equal(layer.scale, scale) and layer.bias.dtype is dtype
    out = states(model, GIVEN)
    assert (
        out.dtype is dtype
        and torch.nn.functional.cosine_similarity(out.float(), expected).min()
        > torch.nn.functional.cosine_similarity(out.float().roll(1, 0), expected).max()
    )
    assert fastplm.dequantize(model).encoder.layer[0].output.dense.weight.dtype is dtype


def test_torch_compile_takes_it_whole():
    model = fastplm.quantize(made())
    compiled = torch.compile(model.encoder.layer[0].output.dense, fullgraph=True, backend="eager")
    x = torch.randn(4, 70)
    with torch.no_grad():
        assert torch.equal(compiled(x), model.encoder.layer[0].output.dense(x))


def test_the_drop_in_of_gpt2_generates():
    model = models.GPT2LMHeadModel(transformers.GPT2Config(**GPT)).eval()
    fastplm.quantize(model)
    assert not any(type(module) is LinearInt8 for module in [model.lm_head])
    out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False)
    assert out.shape[1] > 3
