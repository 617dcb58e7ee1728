from __future__ import annotations

import pytest
import torch

from fastplm._checks import ArgumentValueError
from fastplm.models import BertForPreTraining, ElectraForJointPreTraining
from fastplm.train.presets import PRESETS, configuration


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def build(kind, arch):
    with torch.device("meta"):
        return kind(configuration(arch, vocab_size=30522))


# The encoders of the published checkpoints (google/bert_uncased_L-*_H-*, bert-base-uncased and
# bert-large-uncased), pooler included.
@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("bert-tiny", 4_385_920),
        ("bert-mini", 11_170_560),
        ("bert-small", 28_763_648),
        ("bert-medium", 41_373_184),
        ("bert-base", 109_482_240),
        ("bert-large", 335_141_888),
    ],
)
def test_bert_sizes(arch, expected):
    assert parameters(build(BertForPreTraining, arch).bert) == expected


# The discriminators of google/electra-{small,base,large}-discriminator; the generators of table 6
# of the paper: a quarter, a third and a quarter of the width.
@pytest.mark.parametrize(
    ("arch", "expected", "generator"),
    [
        ("electra-small", 13_483_008, (12, 64, 1, 256)),
        ("electra-base", 108_891_648, (12, 256, 4, 1024)),
        ("electra-large", 334_092_288, (24, 256, 4, 1024)),
    ],
)
def test_electra_sizes(arch, expected, generator):
    model = build(ElectraForJointPreTraining, arch)
    assert parameters(model.discriminator.electra) == expected
    config = model.generator.config
    assert generator == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
    )


def test_a_generator_of_the_same_size_where_weights_are_shared_or_handed_over():
    for joint in ({"embedding_sharing": "all"}, {"embedding_sharing": "none", "stage": 1}):
        config = configuration("electra-small", vocab_size=99, joint=joint)
        assert config.generator.hidden_size == config.discriminator.hidden_size == 256
        assert {name: getattr(config, name) for name in joint} == joint


def test_every_preset_builds():
    for arch, preset in PRESETS.items():
        kind = BertForPreTraining if preset.family == "bert" else ElectraForJointPreTraining
        assert parameters(build(kind, arch)) > 0
        assert preset.hidden % preset.heads == 0


def test_unknown_architecture():
    with pytest.raises(ArgumentValueError, match="bert-base"):
        configuration("bert-huge")
