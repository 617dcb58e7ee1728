"""fastplm.models.EncoderDecoderModel: tests beyond test_seq2seq.py."""

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
from transformers import EncoderDecoderConfig

import fastplm
from fastplm import models
from fastplm.errors import ArgumentValueError
from fastplm.models import EncoderDecoderModel

from . import conftest
from .conftest import PADDINGS, eager_parent, in_own_memory, loss_of, same, small_config

pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")

CONFIGS = {
    **{name: small_config(name) for name in ("bert", "roberta", "albert", "electra")},
    "bart": small_config("bart"),
    # The decoder is wider than the encoder, so the encoder's states have to be projected.
    "gpt2": small_config("gpt2", vocab_size=41, n_embd=24, n_inner=None),
}
MASK = PADDINGS["right"]


def config(encoder="bert", decoder="bert", **fields):
    parts = copy.deepcopy(CONFIGS[encoder]), copy.deepcopy(CONFIGS[decoder])
    return EncoderDecoderConfig.from_encoder_decoder_configs(
        *parts, pad_token_id=CONFIGS[decoder].pad_token_id, decoder_start_token_id=3, **fields
    )


def batch(padding="right"):
    return conftest.inputs_of("EncoderDecoderModel", config(), PADDINGS[padding])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoder", "decoder", "padding", "dtype"),
    [
        *(("bert", "bert", side, torch.float64) for side in ("none", "right", "left", "dead row")),
        ("bert", "bert", "right", torch.bfloat16),
        ("roberta", "roberta", "right", torch.float64),
        ("bert", "gpt2", "right", torch.float64),
        ("electra", "electra", "right", torch.float64),
        ("albert", "electra", "right", torch.float64),
        ("bert", "bart", "right", torch.float64),
    ],
    ids=str,
)
def test_a_pair_equals_its_parent(hold_drop_in, encoder, decoder, padding, dtype):
    given = {"decoder_input_ids": torch.randint(4, 37, (4, 7))}
    given["decoder_attention_mask"] = torch.ones(4, 7, dtype=torch.int64)
    settings = config(encoder, decoder)
    importlib.import_module(f"fastplm.models.{decoder}")  # registers its classes
    model = hold_drop_in(EncoderDecoderModel, settings, padding, dtype, given=given)
    for part in (model.encoder, model.decoder):
        assert type(part).__module__.startswith("fastplm.")


@pytest.mark.parametrize("given", ["encoder_outputs", "inputs_embeds"])
def test_states_that_are_projected_equal_the_parents(hold, given):
    settings, inputs, states = config("bert", "gpt2"), batch(), torch.randn(*MASK.shape, 16)
    inputs |= {given: (states,) if given == "encoder_outputs" else states}
    del inputs["input_ids"]
    models = EncoderDecoderModel(settings), eager_parent(EncoderDecoderModel, settings)
    hold(*models, loss_of(**inputs))
    for garbage in (1e6, float("nan")):  # the states of padding
        spoiled = states.masked_fill(~MASK.bool()[..., None], garbage)
        other = inputs | {given: (spoiled,) if given == "encoder_outputs" else spoiled}
        assert same(*(loss_of(**each)(models[0]) for each in (inputs, other)))


@pytest.mark.parametrize(("padding", "decoder_padded"), [("left", True), ("right", False)])
def test_a_decoder_on_its_own_attends_to_padded_states(hold, padding, decoder_padded):
    settings, states = config().decoder, torch.randn(*MASK.shape, 16)
    ids = torch.randint(4, 37, (4, 7))
    mask = torch.arange(7) >= torch.tensor([[0], [4], [1], [3]]) if decoder_padded else None
    # The first token has no label, as it would be predicted from padding.
    labels = ids if mask is None else ids.masked_fill(torch.arange(7) <= 4, -100)
    run = loss_of(
        ids,
        attention_mask=mask,
        encoder_hidden_states=states,
        encoder_attention_mask=PADDINGS[padding],
        labels=labels,
    )
    hold(models.BertLMHeadModel(settings), eager_parent(models.BertLMHeadModel, settings), run)


def test_holes_in_the_labels_become_padding_of_the_decoder(hold):
    """The decoder has a label in this row, too."""
    inputs = batch()
    inputs["labels"][0] = torch.tensor([5, -100, 7, 8, -100, -100, -100])
    parent = eager_parent(EncoderDecoderModel, config())
    hold(EncoderDecoderModel(config()), parent, loss_of(**inputs))


def test_parameters_after_a_step_equal_the_parents(hold):
    settings, inputs = config(tie_encoder_decoder=True), batch()

    def run(model):
        model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(**inputs).loss.backward()
        optimizer.step()
        return dict(model.named_parameters())

    ours = EncoderDecoderModel(copy.deepcopy(settings))
    with torch.no_grad():
        # A key's bias has no effect, so it would stay 0 except for rounding.
        for weight in ours.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    hold(ours, tied_parent(ours, settings), run)


@pytest.mark.parametrize("decoder", ["bert", "gpt2", "bart"])
@pytest.mark.parametrize("training", [True, False])
def test_one_mask_may_be_that_of_all_texts(decoder, training):
    model = EncoderDecoderModel(config(decoder=decoder)).train(training)
    given = batch()
    for labels in (given["labels"], None):
        inputs = {"input_ids": given["input_ids"], "labels": labels}
        inputs["decoder_input_ids"] = given["labels"].clamp(min=1)
        one = MASK[1:2]
        found = (model(**inputs, attention_mask=mask)[0] for mask in (one, one.expand(4, -1)))
        assert torch.equal(*found)


def test_num_items_in_batch_is_the_denominator():
    inputs, model = batch(), EncoderDecoderModel(config())
    count = int((inputs["labels"] != -100).sum())
    assert torch.equal(model(**inputs).loss, 2 * model(**inputs, num_items_in_batch=2 * count).loss)


@pytest.mark.parametrize(
    "how", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beam", "sampling"]
)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_generation_gives_the_parents_tokens(padding, how):
    inputs = batch(padding)
    prompt = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    ours = EncoderDecoderModel(config()).eval()
    parent = eager_parent(EncoderDecoderModel, config()).eval()
    parent.load_state_dict(ours.state_dict())
    tokens = []
    for model in (ours, parent):
        torch.manual_seed(0)
        tokens.append(model.generate(**prompt, max_new_tokens=5, eos_token_id=4, **how))
    assert torch.equal(*tokens)


# --- weights that both parts share ----------------------------------------------------------------


def tied_parent(ours, settings):
    """The parent class cannot tie, so parameters that fastplm's model shares are shared by hand."""
    parent = eager_parent(EncoderDecoderModel, settings)
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
        hold(ours, parent, loss_of(**batch()))


@pytest.mark.parametrize("shared_once", [False, True])
def test_tied_parts_are_tied_again_when_loaded(tmp_path, shared_once):
    inputs, ours = batch(), EncoderDecoderModel(config(tie_encoder_decoder=True)).eval()
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
def test_checkpoints_go_both_ways(round_trip, tied):
    round_trip(EncoderDecoderModel, config(tie_encoder_decoder=tied))


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
    """In the parent, the encoder's modules keep another configuration than the encoder's."""
    make = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained
    model = make(checkpoint, checkpoint).eval()
    model.config.decoder_start_token_id, model.config.pad_token_id = 3, 0
    inputs = batch()
    inputs["decoder_input_ids"] = inputs.pop("labels").clamp(min=0)
    with torch.no_grad():
        before = model(**inputs).logits
        fastplm.accelerate(model if whole else model.encoder)
        assert type(model.encoder) is models.BertModel
        attention = model.encoder.encoder.layer[0].attention.self
        assert attention.config._attn_implementation == "fastplm"
        torch.testing.assert_close(model(**inputs).logits, before)
        fastplm.restore(model)
        assert torch.equal(model(**inputs).logits, before)


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
            # Some lines are empty, and one has a character at which str.splitlines would split.
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
