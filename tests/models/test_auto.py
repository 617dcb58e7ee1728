"""fastplm.models.Auto…: Transformers chooses a class, fastplm's class of that name is used."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from fastplm import models
from fastplm.models import _NAMES

from .conftest import CLONES, FAMILIES, small_config

NAMES = [name for name in models.__all__ if name.startswith("Auto")]
BERT = small_config("bert")
#: A family without classes here.
LLAMA = transformers.LlamaConfig(
    vocab_size=37,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=24,
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_auto_classes_return_drop_in_classes(name, family):
    theirs = getattr(transformers, name)
    config = small_config(family)
    if type(config) not in theirs._model_mapping:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            getattr(models, name).from_config(config)
        return
    with torch.device("meta"):
        expected = theirs.from_config(small_config(family))
        model = getattr(models, name).from_config(config)
    assert type(model).__name__ == type(expected).__name__
    assert config._attn_implementation is None, "the caller's configuration is not changed"
    known = hasattr(models, type(expected).__name__)
    assert type(model).__module__.startswith("fastplm." if known else "transformers.")
    if known:
        assert model.config._attn_implementation == "fastplm"
        assert type(model) is getattr(models, type(expected).__name__)


def test_every_family_is_tried():
    others = {"auto", "bart_translation", "electra_joint", "encoder_decoder", "layer_report"}
    assert set(_NAMES) - others == {*FAMILIES, *CLONES}


@pytest.mark.parametrize("config", [BERT, LLAMA], ids=["bert", "llama"])
def test_auto_classes_take_the_attention_of_the_call(config, tmp_path):
    config = copy.deepcopy(config)
    argument = {"attn_implementation": "eager"}
    model = models.AutoModel.from_config(config, **argument)
    assert model.config._attn_implementation == "eager"
    assert type(model).__module__.startswith("fastplm.") == (config.model_type == "bert")
    model.save_pretrained(tmp_path)
    loaded = models.AutoModel.from_pretrained(tmp_path, **argument)
    assert loaded.config._attn_implementation == "eager"
    # The configuration's attention is the choice of an earlier call.
    for again in (
        models.AutoModel.from_config(model.config),
        models.AutoModel.from_pretrained(tmp_path, config=model.config),
    ):
        assert again.config._attn_implementation == "fastplm"
    assert model.config._attn_implementation == "eager"


def test_from_pretrained(tmp_path):
    torch.manual_seed(0)
    theirs = transformers.BertForMaskedLM(copy.deepcopy(BERT)).eval()
    theirs.save_pretrained(tmp_path)
    ours, report = models.AutoModelForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(ours) is models.BertForMaskedLM and not ours.training
    assert ours.config._attn_implementation == "fastplm"
    assert all(
        torch.equal(*pair)
        for pair in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    )
    half = models.AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype is torch.bfloat16


def test_other_models_get_fused_attention(tmp_path):
    config = copy.deepcopy(LLAMA)
    model = models.AutoModel.from_config(config)
    assert type(model) is transformers.LlamaModel
    assert config._attn_implementation is None, "the caller's configuration is not changed"
    model.save_pretrained(tmp_path)
    loaded = models.AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaModel
    for either in (model, loaded):
        assert either.config._attn_implementation == "fastplm"


def test_trust_remote_code(tmp_path):
    config = copy.deepcopy(BERT)
    config.auto_map = {"AutoModel": "own.OwnModel"}
    models.BertModel(config).save_pretrained(tmp_path)
    (tmp_path / "own.py").write_text(
        "from transformers import BertModel\n\n\nclass OwnModel(BertModel):\n    own = True\n"
    )
    trusted = models.AutoModel.from_pretrained(tmp_path, trust_remote_code=True)
    assert trusted.own and not isinstance(trusted, models.BertModel)
    ours = models.AutoModel.from_pretrained(tmp_path, trust_remote_code=False)
    assert type(ours) is models.BertModel


def test_transformers_auto_classes_are_not_changed():
    models.AutoModel.from_config(copy.deepcopy(BERT))
    theirs = transformers.AutoModel.from_config(copy.deepcopy(BERT))
    assert type(theirs) is transformers.BertModel
    with pytest.raises(OSError, match="AutoModelForMaskedLM is designed"):
        models.AutoModelForMaskedLM()
