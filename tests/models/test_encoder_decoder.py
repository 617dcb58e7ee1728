"""fastplm.models.EncoderDecoderModel against the class of the same name in Transformers."""

from __future__ import annotations

import copy
import gzip
import importlib
import runpy
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    EncoderDecoderConfig,
)

import fastplm
from fastplm import models
from fastplm._checks import ArgumentValueError
from fastplm.models import EncoderDecoderModel, _ragged

from .conftest import in_own_memory, small_config

pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")

VOCAB, ROWS, SOURCE, TARGET = 37, 4, 9, 7
WIDE = {"hidden_size": 32, "intermediate_size": 48}
CONFIGS = {
    "bert": small_config("bert", **WIDE),
    "roberta": small_config("roberta", **WIDE),
    "albert": small_config("albert", **WIDE, embedding_size=16),
    "electra": small_config("electra", **WIDE, embedding_size=16),
    # Narrower than the encoder, so its states have to be projected.
    "gpt2": small_config("gpt2", vocab_size=VOCAB + 4, n_embd=24, n_inner=None),
}
LENGTHS = {
    "none": None,
    "right": ((9, 5, 8, 2), (7, 3, 6, 4)),
    "left": ((9, 5, 8, 2), (7, 3, 6, 4)),
    "dead row": ((9, 5, 0, 2), (7, 3, 6, 0)),
}
PAD = {"roberta": 1}


def config(encoder="bert", decoder="bert", **kwargs):
    parts = copy.deepcopy(CONFIGS[encoder]), copy.deepcopy(CONFIGS[decoder])
    return EncoderDecoderConfig.from_encoder_decoder_configs(
        *parts, pad_token_id=PAD.get(decoder, 0), decoder_start_token_id=3, **kwargs
    )


def parent_of(settings, dtype=torch.float32):
    return transformers.EncoderDecoderModel._from_config(
        copy.deepcopy(settings), attn_implementation="eager", dtype=dtype
    )


def masks(padding):
    """int64 [B, S] and [B, T], 0 = padding; None, None without any."""
    if LENGTHS[padding] is None:
        return None, None
    both = []
    for lengths, width in zip(LENGTHS[padding], (SOURCE, TARGET), strict=True):
        mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
        both.append(mask.flip(1) if padding == "left" else mask)
    return tuple(both)


def batch(padding, settings):
    """Both sides, each with its mask, and labels at most of the decoder's tokens.

    Nothing is asked of a decoder row that sees no token, or whose source has none.
    """
    mask, decoder_mask = masks(padding)
    pads = [PAD.get(part.model_type, 0) for part in (settings.encoder, settings.decoder)]
    ids = torch.randint(4, VOCAB, (ROWS, SOURCE))
    decoder_ids = torch.randint(4, VOCAB, (ROWS, TARGET))
    labels = torch.randint(4, VOCAB, (ROWS, TARGET))
    labels = labels.masked_fill(torch.rand(ROWS, TARGET) < 0.3, -100)
    labels[0, 0] = 0
    labels[1, -1 if padding == "left" else 2 :] = -100
    given = {}
    if mask is not None:
        ids = ids.masked_fill(mask == 0, pads[0])
        decoder_ids = decoder_ids.masked_fill(decoder_mask == 0, pads[1])
        labels = labels.masked_fill((decoder_mask == 0) | ~mask.bool().any(1)[:, None], -100)
        given = {"attention_mask": mask, "decoder_attention_mask": decoder_mask}
    return {"input_ids": ids, "decoder_input_ids": decoder_ids, "labels": labels, **given}


def compared(outputs, inputs):
    """What two models must agree on: nothing that belongs to padding, or sees nothing else."""
    seen, read = slice(None), slice(None)
    if "attention_mask" in inputs:
        seen = inputs["attention_mask"].bool()
        read = inputs["decoder_attention_mask"].bool() & seen.any(1)[:, None]
    named = {"encoder": outputs.encoder_last_hidden_state[seen], "logits": outputs.logits[read]}
    for side, rows in (("encoder", seen), ("decoder", read)):
        states = outputs[f"{side}_hidden_states"]
        named.update((f"{side} {i}", state[rows]) for i, state in enumerate(states))
    return {"loss": outputs.loss.float() if outputs.loss.itemsize < 4 else outputs.loss, **named}


def loss_alone(model, inputs, **extra):
    loss = model(**inputs, **extra).loss
    return {"loss": loss.float() if loss.itemsize < 4 else loss}


def hold_pair(hold, ours, parent, inputs, **options):
    """Compare all outputs, and the loss of a call that returns only the loss."""

    def whole(model, **extra):
        return compared(model(**inputs, output_hidden_states=True, **extra), inputs)

    def twice(model):
        outputs = whole(model, output_logits=True, **options)
        alone = loss_alone(model, inputs, **options)["loss"]
        return {**outputs, "alone": alone, "loss": outputs["loss"] + alone}

    def parent_twice(model):
        outputs = whole(model)
        return {**outputs, "alone": outputs["loss"], "loss": 2 * outputs["loss"]}

    hold(ours, parent, twice, parent_twice)


@pytest.mark.parametrize(
    "padding,dtype",
    [
        ("none", torch.float32),
        ("right", torch.float32),
        ("left", torch.float32),
        ("dead row", torch.float32),
        ("right", torch.bfloat16),
    ],
    ids=str,
)
def test_bert2bert_equals_its_parent(hold, padding, dtype):
    settings = config()
    ours = EncoderDecoderModel(copy.deepcopy(settings)).to(dtype)
    assert type(ours.encoder) is models.BertModel
    assert type(ours.decoder) is models.BertLMHeadModel
    assert ours.state_dict().keys() == parent_of(settings).state_dict().keys()
    hold_pair(hold, ours, parent_of(settings, dtype), batch(padding, settings))


@pytest.mark.parametrize(
    "encoder,decoder",
    [("roberta", "roberta"), ("bert", "gpt2"), ("electra", "electra"), ("albert", "electra")],
)
def test_other_pairs_equal_their_parent(hold, encoder, decoder):
    settings = config(encoder, decoder)
    ours = EncoderDecoderModel(copy.deepcopy(settings))
    assert all(
        type(part).__module__.startswith("fastplm.") for part in (ours.encoder, ours.decoder)
    )
    hold_pair(hold, ours, parent_of(settings), batch("right", settings))


@pytest.mark.parametrize("padding", ["right", pytest.param("left", marks=pytest.mark.slow)])
def test_a_capacity_changes_nothing(hold, padding):
    settings = config()
    inputs = batch(padding, settings)
    ours = EncoderDecoderModel(copy.deepcopy(settings))
    hold_pair(hold, ours, parent_of(settings), inputs, unpad=30, decoder_unpad=25)


@pytest.mark.parametrize("padding,decoder_padded", [("left", True), ("right", False)])
def test_a_decoder_on_its_own_attends_to_padded_states(hold, padding, decoder_padded):
    settings = config().decoder
    inputs = batch(padding, config())
    labels = inputs["labels"]
    if padding == "left":  # the first token's label would be predicted from padding
        labels = labels.masked_fill(torch.arange(TARGET) <= 4, -100)
    states = torch.randn(ROWS, SOURCE, 32)

    def run(model):
        mask = inputs["decoder_attention_mask"] if decoder_padded else None
        given = states.to(next(model.parameters()).dtype)
        out = model(
            inputs["decoder_input_ids"],
            attention_mask=mask,
            encoder_hidden_states=given,
            encoder_attention_mask=inputs["attention_mask"],
            labels=labels,
        )
        return {"loss": out.loss}

    parent = transformers.BertLMHeadModel._from_config(
        copy.deepcopy(settings), attn_implementation="eager"
    )
    hold(models.BertLMHeadModel(copy.deepcopy(settings)), parent, run)


def test_labels_alone_make_the_decoders_input(hold):
    """Holes in the labels become padding of the decoder that has a label all the same."""
    settings = config()
    inputs = batch("right", settings)
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask", "labels")}
    inputs["labels"][0] = torch.tensor([5, -100, 7, 8, -100, -100, -100])
    ours = EncoderDecoderModel(copy.deepcopy(settings))
    hold(ours, parent_of(settings), lambda model: loss_alone(model, inputs))


def test_embeddings_and_encoder_outputs_may_be_given(hold):
    settings = config("bert", "gpt2")
    inputs = batch("right", settings)
    inputs["inputs_embeds"] = torch.randn(*inputs.pop("input_ids").shape, 32)
    inputs["decoder_inputs_embeds"] = torch.randn(*inputs.pop("decoder_input_ids").shape, 24)

    def run(model, **extra):
        dtype = next(model.parameters()).dtype
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        embeds, mask = given.pop("inputs_embeds"), given["attention_mask"]
        first = loss_alone(model, given, inputs_embeds=embeds)["loss"]
        states = model.encoder(inputs_embeds=embeds, attention_mask=mask)
        second = loss_alone(model, given, encoder_outputs=(states.last_hidden_state,))["loss"]
        return {"loss": first + second, "first": first, "second": second}

    hold(EncoderDecoderModel(copy.deepcopy(settings)), parent_of(settings), run)


def test_a_mask_of_four_dimensions_gives_the_same_loss():
    settings = config()
    inputs = batch("right", settings)
    model = EncoderDecoderModel(settings)
    whole = {**inputs, "attention_mask": inputs["attention_mask"].bool()[:, None, None]}
    torch.testing.assert_close(model(**whole).loss, model(**inputs).loss)
    del whole["labels"], inputs["labels"]
    read = inputs["decoder_attention_mask"].bool()
    dense, packed = (model(**given, use_cache=False).logits[read] for given in (whole, inputs))
    torch.testing.assert_close(dense, packed)


def test_a_bart_decoder_equals_its_parent(hold):
    importlib.import_module("fastplm.models.bart")
    decoder = small_config("bart", d_model=32, decoder_layers=1, decoder_ffn_dim=48)
    settings = EncoderDecoderConfig.from_encoder_decoder_configs(
        copy.deepcopy(CONFIGS["bert"]), decoder, pad_token_id=1, decoder_start_token_id=3
    )
    inputs = batch("right", config())
    ours = EncoderDecoderModel(copy.deepcopy(settings))
    assert type(ours.decoder) is models.BartForCausalLM
    hold(ours, parent_of(settings), lambda model: loss_alone(model, inputs))


def test_each_side_is_counted_once_though_nothing_is_padding(monkeypatch):
    """Each count waits for the device."""
    counts, inner = [], _ragged._counts_on_cpu
    monkeypatch.setattr(
        _ragged, "_counts_on_cpu", lambda *masks: counts.append(masks) or inner(*masks)
    )
    inputs = batch("right", config())
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    EncoderDecoderModel(config())(**inputs)
    assert len(counts) == 2


def test_only_rows_that_matter_are_computed():
    settings = config()
    inputs = batch("right", settings)
    inputs["labels"] = torch.full((ROWS, TARGET), -100)
    inputs["labels"][0, 4] = inputs["labels"][1, 1] = inputs["labels"][2, 2] = 5
    model = EncoderDecoderModel(settings)
    rows = {}

    def note(name):
        return lambda module, args: rows.update({name: args[0].shape[:-1].numel()})

    model.encoder.encoder.layer[0].register_forward_pre_hook(note("encoder"))
    model.decoder.bert.encoder.layer[0].register_forward_pre_hook(note("decoder"))
    out = model(**inputs)
    # 5, 2 and 3 rows up to the last label, and a sequence without any.
    assert rows == {"encoder": int(inputs["attention_mask"].sum()), "decoder": 10}
    assert out.logits is None and out.past_key_values is None
    assert out.encoder_last_hidden_state is None
    del inputs["decoder_attention_mask"]
    assert torch.equal(model(**inputs).loss, out.loss) and rows["decoder"] == 10
    model(**inputs, output_logits=True)
    assert rows["decoder"] == ROWS * TARGET


def test_parameters_after_a_step_equal_the_parents(hold):
    settings = config(tie_encoder_decoder=True)
    inputs = batch("right", settings)

    def run(model):
        model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(**inputs).loss.backward()
        optimizer.step()
        return dict(model.named_parameters())

    ours = EncoderDecoderModel(copy.deepcopy(settings))
    with torch.no_grad():
        # A key's bias, which changes nothing, would stay 0 but for rounding.
        for weight in ours.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    hold(ours, tied_parent(ours, settings), run)


def test_num_items_in_batch_is_the_denominator():
    settings = config()
    inputs = batch("right", settings)
    model = EncoderDecoderModel(settings)
    count = int((inputs["labels"] != -100).sum())
    assert torch.equal(model(**inputs).loss, 2 * model(**inputs, num_items_in_batch=2 * count).loss)


# --- what cross-attention sees --------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [1e6, float("nan")])
@pytest.mark.parametrize("padding", ["right", "left"])
def test_cross_attention_never_sees_padding(padding, garbage):
    settings = config("bert", "gpt2")
    inputs = batch(padding, settings)
    del inputs["input_ids"]
    model = EncoderDecoderModel(settings)
    hidden = inputs["attention_mask"] == 0
    states = torch.randn(ROWS, SOURCE, 32).masked_fill(hidden[..., None], 0.0)
    results = []
    for value in (0.0, garbage):
        given = states.masked_fill(hidden[..., None], value).requires_grad_()
        model.zero_grad()
        loss = model(**inputs, encoder_outputs=(given,)).loss
        loss.backward()
        gradients = [p.grad for p in model.decoder.parameters()] + [given.grad]
        rest = {k: v for k, v in inputs.items() if k != "labels"}
        with torch.no_grad():
            packed = model(**rest, encoder_outputs=(given,), use_cache=False).logits
            cached = model(**rest, encoder_outputs=(given,), use_cache=True).logits
            embedded = model(**inputs, inputs_embeds=given).loss
        seen = inputs["decoder_attention_mask"].bool()
        gradients.append(model.enc_to_dec_proj.weight.grad)
        results.append([loss, *gradients, packed[seen], cached[seen], embedded])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


# --- generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 2}, {"do_sample": True}],
    ids=["greedy", "beam", "sampling"],
)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_generation_gives_the_parents_tokens(padding, how):
    settings = config()
    inputs = batch(padding, settings)
    ours = EncoderDecoderModel(copy.deepcopy(settings)).eval()
    parent = parent_of(settings).eval()
    parent.load_state_dict(ours.state_dict())
    tokens = []
    for model in (ours, parent):
        torch.manual_seed(0)
        given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        tokens.append(model.generate(**given, max_new_tokens=5, eos_token_id=4, **how))
    assert torch.equal(*tokens)


# --- weights that both parts share ----------------------------------------------------------------


def tied_parent(ours, settings):
    """The parent class, which cannot tie, with what ours shares shared by hand."""
    parent = parent_of(settings)
    for name, source in ours._tied_weights_keys.items():
        module, _, attribute = name.rpartition(".")
        setattr(parent.get_submodule(module), attribute, parent.get_parameter(source))
    parent.decoder.tie_weights()
    return parent


@pytest.mark.parametrize("family", ["bert", "roberta", "electra"])
def test_tied_parts_equal_a_parent_tied_by_hand(hold, family):
    settings = config(family, family, tie_encoder_decoder=True)
    ours = EncoderDecoderModel(copy.deepcopy(settings))
    parent = tied_parent(ours, settings)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in parent.named_parameters()]
    encoder = dict(ours.encoder.named_parameters())
    for name, weight in ours.decoder.base_model.named_parameters():
        assert (weight is encoder.get(name)) != (".crossattention." in name)
    if family == "bert":
        inputs = batch("right", settings)
        hold(ours, parent, lambda model: loss_alone(model, inputs))


@pytest.mark.parametrize("shared_once", [False, True])
def test_tied_parts_are_tied_again_when_loaded(tmp_path, shared_once):
    settings = config(tie_encoder_decoder=True)
    inputs = batch("right", settings)
    ours = EncoderDecoderModel(settings).eval()
    with torch.no_grad():
        ours.encoder.embeddings.word_embeddings.weight[5].fill_(0.5)
        loss = ours(**inputs).loss
    ours.save_pretrained(tmp_path / "ours", shared_once=shared_once)
    ours.save_pretrained(tmp_path / "both")
    size = (tmp_path / "ours/model.safetensors").stat().st_size
    assert (size < (tmp_path / "both/model.safetensors").stat().st_size) == shared_once
    loaded = EncoderDecoderModel.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(in_own_memory(loaded)(**inputs).loss, loss)
    for name, source in ours._tied_weights_keys.items():
        assert loaded.get_parameter(name) is loaded.get_parameter(source)
    table = loaded.encoder.embeddings.word_embeddings.weight
    assert loaded.decoder.cls.predictions.decoder.weight is table


def test_what_cannot_be_shared_is_an_error():
    with pytest.raises(ArgumentValueError, match="a bert encoder and a gpt2 decoder"):
        EncoderDecoderModel(config("bert", "gpt2", tie_encoder_decoder=True))
    for name, value in (("num_hidden_layers", 3), ("intermediate_size", 40)):
        settings = config(tie_encoder_decoder=True)
        setattr(settings.decoder, name, value)
        with pytest.raises(ArgumentValueError, match="tie_encoder_decoder"):
            EncoderDecoderModel(settings)
    with pytest.raises(ArgumentValueError, match="both an encoder and a decoder"):
        EncoderDecoderModel(encoder=models.BertModel(CONFIGS["bert"]))


# --- checkpoints and warm starts ------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_go_both_ways(tmp_path, tied):
    settings = config(tie_encoder_decoder=tied)
    inputs = batch("right", settings)
    first = EncoderDecoderModel(settings).eval()
    first.save_pretrained(tmp_path / "ours")
    assert "fastplm" not in (tmp_path / "ours/config.json").read_text()
    second = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "ours").eval()
    second.save_pretrained(tmp_path / "theirs")
    third = EncoderDecoderModel.from_pretrained(tmp_path / "theirs").eval()
    for other in (second, third):
        weights, loaded = first.state_dict(), other.state_dict()
        assert weights.keys() == loaded.keys()
        assert all(torch.equal(value, loaded[key]) for key, value in weights.items())
    with torch.no_grad():
        assert torch.equal(first(**inputs).loss, in_own_memory(third)(**inputs).loss)


@pytest.fixture
def checkpoint(tmp_path):
    transformers.BertModel(copy.deepcopy(CONFIGS["bert"])).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_a_warm_start_takes_the_encoders_weights(checkpoint):
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(checkpoint, checkpoint)
    assert type(model.encoder) is models.BertModel
    assert type(model.decoder) is models.BertLMHeadModel
    assert model.config.encoder._attn_implementation == "fastplm"
    weights = dict(model.encoder.named_parameters())
    for name, weight in model.decoder.bert.named_parameters():
        assert ".crossattention." in name or torch.equal(weight, weights[name])
    attention = model.decoder.bert.encoder.layer[0].attention.self
    assert attention.is_causal
    table = model.decoder.bert.embeddings.word_embeddings.weight
    assert model.decoder.cls.predictions.decoder.weight is table
    cold = models.BertLMHeadModel(copy.deepcopy(model.config.decoder))
    half = EncoderDecoderModel.from_encoder_decoder_pretrained(checkpoint, decoder_model=cold)
    assert half.decoder is cold
    tied = EncoderDecoderModel.from_encoder_decoder_pretrained(
        checkpoint, checkpoint, tie_encoder_decoder=True
    )
    assert tied.decoder.bert.embeddings.word_embeddings.weight is next(tied.encoder.parameters())


@pytest.mark.parametrize("whole", [True, False])
def test_a_live_warm_start_can_be_accelerated(checkpoint, whole):
    """The parent leaves the encoder's modules with another configuration than the encoder's."""
    make = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained
    model = make(checkpoint, checkpoint).eval()
    model.config.decoder_start_token_id, model.config.pad_token_id = 3, 0
    inputs = batch("right", model.config)
    inputs = {k: v for k, v in inputs.items() if k != "labels"}
    with torch.no_grad():
        before = model(**inputs, use_cache=False).logits
        fastplm.accelerate(model if whole else model.encoder)
        assert type(model.encoder) is models.BertModel
        attention = model.encoder.encoder.layer[0].attention.self
        assert attention.config._attn_implementation == "fastplm"
        during = model(**inputs, use_cache=False).logits
        seen = inputs["decoder_attention_mask"].bool()
        torch.testing.assert_close(during[seen], before[seen])
        fastplm.restore(model)
        assert torch.equal(model(**inputs, use_cache=False).logits, before)


def test_another_attention_implementation_reaches_every_layer(checkpoint):
    make = EncoderDecoderModel.from_encoder_decoder_pretrained
    for model in (
        make(checkpoint, checkpoint),
        make(checkpoint, checkpoint, attn_implementation="sdpa"),
    ):
        model.set_attn_implementation("eager")
        used = {
            module.config._attn_implementation
            for module in model.modules()
            if hasattr(module, "query")
        }
        assert used == {"eager"}


@pytest.mark.slow
def test_a_compiled_step_has_no_breaks():
    settings = config()
    inputs = batch("right", settings)
    model = EncoderDecoderModel(settings)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for options in ({}, {"unpad": 30, "decoder_unpad": 25}):
        torch.testing.assert_close(compiled(**inputs, **options).loss, model(**inputs).loss)


# --- the example ----------------------------------------------------------------------------------

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_bert2bert.py"
WORDS = "a man and two dogs are on the street , ein mann zwei hunde sind auf der".split()


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(["--share"], id="warm"),
        pytest.param(["--cold"], id="cold", marks=pytest.mark.slow),
    ],
)
def test_the_example_learns(checkpoint, tmp_path, monkeypatch, capsys, start):
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    tokenizer = transformers.BertTokenizer({word: i for i, word in enumerate(vocab)})
    tokenizer.save_pretrained(checkpoint)
    for name, opened in (("source.gz", gzip.open), ("target", open)):
        with opened(tmp_path / name, "wt", encoding="utf-8") as file:
            # Some lines are empty, and one has what str.splitlines takes for the end of another.
            break_within = "\x85 die" if name == "target" else ""
            for i in range(40):
                file.write(" ".join(WORDS[i % 7 : i % 5 + i % 7]) + break_within * (i == 9) + "\n")
    paths = [str(tmp_path / "source.gz"), str(tmp_path / "target")]
    names = ("--source", "--target", "--valid-source", "--valid-target")
    files = [word for pair in zip(names, paths * 2, strict=True) for word in pair]
    options = ["--steps", "12", "--batch-size", "4", "--max-length", "8", "--learning-rate", "0.01"]
    argv = [str(EXAMPLE), "--checkpoint", str(checkpoint), "--out", str(tmp_path / "out"), *files]
    monkeypatch.setattr(sys, "argv", [*argv, *options, *start])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    before, after = (float(word) for word in last.split("loss ")[1].split()[:3:2])
    assert last.startswith("cold" if start == ["--cold"] else "warm") and after < before
    trained = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "out")
    assert trained.generation_config.eos_token_id == 3
