from __future__ import annotations

import pytest
import torch
import transformers

from fastplm._checks import ArgumentValueError
from fastplm.models import ElectraForJointPreTraining
from fastplm.train.objectives import FAMILIES, build_model
from fastplm.train.presets import PRESETS, configuration


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


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
    with torch.device("meta"):
        model = ElectraForJointPreTraining(configuration(arch, vocab_size=30522))
    assert parameters(model.discriminator.electra) == expected
    config = model.generator.config
    assert generator == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
    )


# Published, without their heads: google/bert_uncased_L-*_H-*, bert-base-uncased and
# bert-large-uncased, roberta-base, albert-base-v1, gpt2, t5-small, t5-base, facebook/bart-base.
@pytest.mark.parametrize(
    ("arch", "vocab_size", "expected"),
    [
        ("bert-tiny", 30522, 4_385_920),
        ("bert-mini", 30522, 11_170_560),
        ("bert-small", 30522, 28_763_648),
        ("bert-medium", 30522, 41_373_184),
        ("bert-base", 30522, 109_482_240),
        ("bert-large", 30522, 335_141_888),
        ("roberta-base", 50265, 124_645_632),
        ("albert-base", 30000, 11_683_584),
        ("gpt2-small", 50257, 124_439_808),
        ("t5-small", 32128, 60_506_624),
        ("t5-base", 32128, 222_903_552),
        ("bart-base", 50265, 139_420_416),
    ],
)
def test_sizes(arch, vocab_size, expected):
    config = configuration(arch, vocab_size=vocab_size)
    with torch.device("meta"):
        assert parameters(transformers.AutoModel.from_config(config)) == expected


def test_a_generator_of_the_same_size_where_weights_are_shared_or_handed_over():
    for joint in ({"embedding_sharing": "all"}, {"embedding_sharing": "none", "stage": 1}):
        config = configuration("electra-small", vocab_size=99, joint=joint)
        assert config.generator.hidden_size == config.discriminator.hidden_size == 256
        assert {name: getattr(config, name) for name in joint} == joint


def test_every_preset_builds():
    for arch, preset in PRESETS.items():
        config = configuration(arch, vocab_size=30522, block_size=2048)
        assert preset.hidden % preset.heads == 0
        for objective in FAMILIES[preset.family].classes:
            with torch.device("meta"):
                assert parameters(build_model(preset.family, objective, config)) > 0


def test_unknown_architecture():
    with pytest.raises(ArgumentValueError, match="bert-base"):
        configuration("bert-huge", vocab_size=99)
