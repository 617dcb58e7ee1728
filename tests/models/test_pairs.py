"""Encoders and decoders that were joined: which attention each layer really uses, and whose
configuration that changes."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fastplm
from fastplm import models

from .conftest import FAMILIES, LANGUAGE_MODELS, PADDINGS, same, small_config

pytestmark = pytest.mark.filterwarnings("ignore:Version v4.12.0:FutureWarning")

SIZES = dict(
    vocab_size=37,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=20,
    pad_token_id=0,
)
#: Encoders that have no drop-in class: (model class, configuration).
ENCODERS = {
    "bert-generation": ("BertGenerationEncoder", "BertGenerationConfig", {}),
    "camembert": ("CamembertModel", "CamembertConfig", {}),
    "data2vec": ("Data2VecTextModel", "Data2VecTextConfig", {}),
    "distilbert": (
        *("DistilBertModel", "DistilBertConfig"),
        dict(dim=16, n_layers=2, n_heads=2, hidden_dim=24),
    ),
    "ernie": ("ErnieModel", "ErnieConfig", {}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", dict(global_attn_every_n_layers=2)),
    "roberta-prelayernorm": ("RobertaPreLayerNormModel", "RobertaPreLayerNormConfig", {}),
    "xlm-roberta": ("XLMRobertaModel", "XLMRobertaConfig", {}),
    "xlm-roberta-xl": ("XLMRobertaXLModel", "XLMRobertaXLConfig", {}),
}
#: The classes of a family as encoder and as decoder.
PARTS = {
    "bert": ("BertModel", "BertLMHeadModel"),
    "roberta": ("RobertaModel", "RobertaForCausalLM"),
    "electra": ("ElectraModel", "ElectraForCausalLM"),
    "albert": ("AlbertModel", None),
    "gpt2": (None, "GPT2LMHeadModel"),
    "bart": (None, "BartForCausalLM"),
}
PAIRS = [("bert", other) for other in PARTS if PARTS[other][1]]
PAIRS += [(one, "gpt2") for one in PARTS if PARTS[one][0] and one != "bert"]
#: Each side has two layers; those of the decoder attend twice.
EVERY_LAYER = 2 + 2 * 2
TARGET = torch.randint(4, 37, (4, 5), generator=torch.Generator().manual_seed(1))
MASK = PADDINGS["right"]
IDS = torch.randint(4, 37, MASK.shape, generator=torch.Generator().manual_seed(2))
BATCH = {"input_ids": IDS, "decoder_input_ids": TARGET}


@pytest.fixture
def attended(monkeypatch):
    """{attention implementation: the attention modules that called it}."""
    calls = {}
    for name in ("fastplm", "sdpa"):
        function = ALL_ATTENTION_FUNCTIONS[name]

        def record(module, *args, name=name, function=function, **kwargs):
            calls.setdefault(name, set()).add(id(module))
            return function(module, *args, **kwargs)

        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, name, record)
    return calls


def decoder_config(family):
    config = small_config(family)
    config.is_decoder = config.add_cross_attention = True
    return config


def joined(encoder, decoder, kind=transformers.EncoderDecoderModel):
    pair = kind(encoder=encoder, decoder=decoder)
    pair.config.pad_token_id, pair.config.decoder_start_token_id = 0, 3
    pair.generation_config.decoder_start_token_id = 3
    return pair.eval()


def part(library, family, side):
    """An encoder (side 0) or a decoder (1) of transformers or fastplm.models."""
    config = decoder_config(family) if side else small_config(family)
    return getattr(library, PARTS[family][side])(config)


def from_parts(encoder, decoder, folder):
    for family, side in ((encoder, 0), (decoder, 1)):
        part(transformers, family, side).save_pretrained(folder / f"{side}")
    options = {"decoder_is_decoder": True, "decoder_add_cross_attention": True}
    make = models.EncoderDecoderModel.from_encoder_decoder_pretrained
    return make(str(folder / "0"), str(folder / "1"), **options)


def from_checkpoint(encoder, decoder, folder):
    from_parts(encoder, decoder, folder).save_pretrained(folder / "pair")
    return models.EncoderDecoderModel.from_pretrained(folder / "pair")


def of_theirs(encoder, decoder, folder, kind=models.EncoderDecoderModel):
    return kind(encoder=part(transformers, encoder, 0), decoder=part(transformers, decoder, 1))


def of_ours(encoder, decoder, folder):
    parts = part(models, encoder, 0), part(models, decoder, 1)
    return models.EncoderDecoderModel(encoder=parts[0], decoder=parts[1])


def of_accelerated_parts(encoder, decoder, folder):
    pair = of_theirs(encoder, decoder, folder, transformers.EncoderDecoderModel)
    fastplm.accelerate(pair.encoder)
    fastplm.accelerate(pair.decoder)
    return pair


def accelerated(encoder, decoder, folder):
    return fastplm.accelerate(of_theirs(encoder, decoder, folder, transformers.EncoderDecoderModel))


WAYS = (from_parts, from_checkpoint, of_theirs, of_ours, of_accelerated_parts, accelerated)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("encoder", "decoder"), PAIRS)
def test_every_layer_of_a_pair_has_fused_attention(encoder, decoder, way, attended, tmp_path):
    """In training, where no layer is part of a longer call."""
    pair = way(encoder, decoder, tmp_path).train()
    for mask in (None, MASK):
        attended.clear()
        pair(**BATCH, attention_mask=mask, labels=TARGET)
        # The layers of ALBERT are one module.
        count = EVERY_LAYER - (encoder == "albert")
        assert {name: len(modules) for name, modules in attended.items()} == {"fastplm": count}


@pytest.mark.parametrize("decoder", ["bert", "bart", "gpt2"])
@pytest.mark.parametrize("encoder", [*ENCODERS, "vit"])
def test_encoders_without_drop_in_class(encoder, decoder, attended):
    """Outputs, generated tokens and attention of an accelerated pair; and restored, equal bits."""
    if encoder == "vit":
        sizes = {**SIZES, "image_size": 8, "patch_size": 4}
        vit = transformers.ViTModel(transformers.ViTConfig(**sizes), add_pooling_layer=False)
        kind = transformers.VisionEncoderDecoderModel
        pair = joined(vit, part(transformers, decoder, 1), kind)
        batches = [{"pixel_values": torch.randn(4, 3, 8, 8)}]
    else:
        name, config, sizes = ENCODERS[encoder]
        config = getattr(transformers, config)(**{**SIZES, **sizes})
        pair = joined(getattr(transformers, name)(config), part(transformers, decoder, 1))
        batches = [{"input_ids": IDS}]
        batches += [{"input_ids": IDS.masked_fill(MASK == 0, 0), "attention_mask": MASK}]

    @torch.no_grad()
    def run(batch):
        options = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False)
        return pair(**batch, decoder_input_ids=TARGET).logits, pair.generate(**batch, **options)

    for batch in batches:
        logits, tokens = run(batch)
        fastplm.accelerate(pair)
        attended.clear()
        found = run(batch)
        used = {name: len(modules) for name, modules in attended.items()}
        assert used == {"fastplm": EVERY_LAYER}
        torch.testing.assert_close(found[0], logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(found[1], tokens)
        fastplm.restore(pair)
        assert same(run(batch), (logits, tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_accelerate_leaves_the_callers_configuration(family, attended):
    """Folds of a loop have one configuration; a stock model with it stays as it was."""
    config = small_config(family)
    kind = getattr(transformers, LANGUAGE_MODELS[family])
    before = None
    for _ in range(2):
        model, other = kind(config).eval(), kind(config).eval()
        before = before or (config.to_dict(), config._attn_implementation)
        fastplm.accelerate(model)
        assert (config.to_dict(), config._attn_implementation) == before
        assert model.config.to_dict() == before[0]
        inputs = {"input_ids": IDS}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = TARGET
        attended.clear()
        other(**inputs)
        assert "fastplm" not in attended
        # The second to be accelerated is restored to what it had, not to the first one's.
        fastplm.restore(fastplm.accelerate(other))
        assert other.config._attn_implementation == before[1]
        attended.clear()
        model(**inputs)
        assert "sdpa" not in attended


def test_a_joined_pair_leaves_the_configurations_of_its_parts(attended):
    configs = small_config("bert"), decoder_config("bert")
    stock = transformers.BertModel(configs[0])
    pair = models.EncoderDecoderModel(
        encoder=transformers.BertModel(configs[0]), decoder=transformers.BertLMHeadModel(configs[1])
    )
    assert [config._attn_implementation for config in configs] == ["sdpa", "sdpa"]
    stock(IDS)
    assert attended.keys() == {"sdpa"}
    assert pair.config.encoder is pair.encoder.config is pair.encoder.encoder.config
    assert pair.config.decoder is pair.decoder.config is pair.decoder.bert.config
