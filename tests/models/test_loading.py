"""What ``from_pretrained`` makes of a checkpoint that lacks weights."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import transformers
from safetensors.torch import save_file

from fastplm import models
from fastplm.classic.elmo import ElmoConfig, ElmoForLanguageModeling
from fastplm.classic.sentences import QuickThoughtsModel, SkipThoughtsModel, ThoughtsConfig
from fastplm.errors import DataError
from fastplm.finetune.bart_translation import BartForTranslation
from fastplm.finetune.features import (
    FEATURES,
    HEADS,
    FeaturesConfig,
    FeaturesForSequenceClassification,
    FeaturesForTokenClassification,
)
from fastplm.run.checkpoint import weights_at

from .conftest import CLASSES, CLONED, config_of, every_class, parent_of, small_config


def joint(**options):
    part = config_of("ElectraModel").to_dict()
    return models.ElectraJointConfig(generator=part, discriminator=part, **options)


def translation():
    config = config_of("BartModel")
    names = "vocab_size d_model encoder_layers encoder_attention_heads encoder_ffn_dim"
    config.source_encoder = {name: getattr(config, name) for name in names.split()}
    return config


def two_berts(**options):
    one, other = config_of("BertModel"), config_of("BertLMHeadModel", add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(one, other)
    return type(config).from_dict(config.to_dict() | options)


HEADS_OF_TABLES = ("lm_head.weight", "predictions.decoder.weight")
THOUGHTS = dict(vocab_size=20, embedding_size=16, hidden_size=24)
#: {name: (class, its configuration)} of every class that has ``from_pretrained``.
MODELS = {name: (getattr(models, name), config_of(name)) for name in CLASSES | CLONED}
MODELS["replaced tokens"] = (models.DebertaV2ForPreTraining, small_config("deberta_v2"))
MODELS |= {
    f"joint {option}": (models.ElectraForJointPreTraining, joint(**dict([option])))
    for option in (
        *(("objective", each) for each in ("rtd", "rtd_masked", "replace_mlm", "all_tokens_mlm")),
        *(("embedding_sharing", each) for each in ("none", "all")),
        *(("generator_type", "unigram"), ("adversarial", True)),
    )
}
MODELS |= {
    f"two BERTs, tied {tied}": (models.EncoderDecoderModel, two_berts(tie_encoder_decoder=tied))
    for tied in (False, True)
}
MODELS |= {
    f"{kind.__name__} {features} {head}": (
        kind,
        FeaturesConfig(
            encoder=config_of("BertModel", num_hidden_layers=4).to_dict(),
            features=features,
            head=head,
        ),
    )
    for kind in (FeaturesForSequenceClassification, FeaturesForTokenClassification)
    for features in FEATURES
    for head in HEADS
}
MODELS |= {
    "translation": (BartForTranslation, translation()),
    "elmo": (
        ElmoForLanguageModeling,
        ElmoConfig(vocab_size=20, filters=((1, 8), (2, 8)), projection=16, lstm_size=24),
    ),
    "skip-thoughts": (SkipThoughtsModel, ThoughtsConfig(**THOUGHTS)),
    "quick-thoughts": (QuickThoughtsModel, ThoughtsConfig(**THOUGHTS)),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def dirty():
    """New memory holds NaN, or the largest whole number."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


def save(folder, config, weights):
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def is_as_new(value, new):
    """Whether a tensor has the value, or the distribution, of one of a new model."""
    if not new.is_floating_point() or (new == new.flatten()[0]).all():
        return torch.equal(value, new)
    # The deviation of 256 numbers is right by 4 %.
    near = new.numel() < 256 or 0.75 < value.std() / new.std() < 1.33
    return bool(value.isfinite().all() and near)


def test_every_class_is_listed():
    kinds = {name for name in models.__all__ if hasattr(getattr(models, name), "forward")}
    assert kinds <= {kind.__name__ for kind, _ in MODELS.values()}


@every_model
def test_what_a_checkpoint_lacks_is_initialized(name, dirty, tmp_path):
    """All of it, as in a new model; of a drop-in class at least what the parent initializes."""
    kind, config = MODELS[name]
    new = kind(copy.deepcopy(config))
    save(tmp_path, new.config, {"other": torch.zeros(1)})
    wrong = {
        each: value
        for each, value in tensors_of(kind.from_pretrained(tmp_path)).items()
        if not is_as_new(value, tensors_of(new)[each])
    }
    if (
        wrong and name in CLASSES | CLONED
    ):  # Transformers leaves the products of OpenAI GPT as memory is
        theirs = tensors_of(parent_of(kind).from_pretrained(tmp_path))
        wrong = {each for each in wrong if is_as_new(theirs[each], tensors_of(new)[each])}
    assert not wrong


@every_class
def test_a_new_model_is_that_of_the_parent(name):
    """The same seed draws the same weights."""
    kind, config = MODELS[name]
    weights = []
    for each in (kind, parent_of(kind)):
        torch.manual_seed(0)
        weights.append(each(copy.deepcopy(config)).state_dict())
    assert all(torch.equal(value, weights[1][each]) for each, value in weights[0].items())


@every_model
def test_one_table_of_several_is_enough_or_refused(name, dirty, tmp_path):
    """A model that loads has the values of the file, whichever of its tied weights that has."""
    kind, config = MODELS[name]
    new = kind(copy.deepcopy(config))
    whole = {each: value.detach().clone() for each, value in new.state_dict().items()}
    tied: dict[int, list[str]] = {}
    for each, value in new.state_dict().items():
        tied.setdefault(value.data_ptr(), []).append(each)
    groups = [names for names in tied.values() if len(names) > 1]
    # A first and a last group are enough where layers share all weights.
    for names in groups[:: max(1, len(groups) - 1)]:
        for kept in (set(kept) for n in (0, 1, 2) for kept in itertools.combinations(names, n)):
            rest = {each: v for each, v in whole.items() if each not in names or each in kept}
            save(tmp_path, new.config, rest)
            try:
                loaded, _ = weights_at("score", "model", tmp_path, "a checkpoint", kind)
            except DataError as error:
                assert "lacks" in str(error) or "no embeddings of tokens" in str(error)
                # Transformers looks for no third table of a chain of ties.
                assert not kept or all(each.endswith(HEADS_OF_TABLES) for each in kept)
                continue
            assert all(torch.equal(v, whole[each]) for each, v in loaded.state_dict().items())
            assert kept and (kept != {"lm_head.weight"} or new.config.model_type != "t5")


def test_the_head_of_t5_alone_in_a_file_of_pickle(tmp_path):
    kind, config = MODELS["T5ForConditionalGeneration"]
    new = kind(config)
    new.config.save_pretrained(tmp_path)
    shared = ("shared.weight", "embed_tokens.weight")
    weights = {each: v for each, v in new.state_dict().items() if not each.endswith(shared)}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(DataError, match="but no embeddings of tokens"):
        weights_at("finetune", "model", tmp_path, "a checkpoint", kind)
