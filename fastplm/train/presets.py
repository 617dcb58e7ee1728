"""The published architectures by name, with the settings they were pre-trained with.

Sources: BERT sizes of Turc et al. 2019, "Well-Read Students Learn Better" (arXiv 1908.08962);
ELECTRA of Clark et al. 2020 (arXiv 2003.10555), table 6. ``electra-tiny`` is ours: small enough to
learn something in two minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastplm._checks import check_choice

if TYPE_CHECKING:
    from transformers import BertConfig

    from fastplm.models.electra_joint import ElectraJointConfig


@dataclass(frozen=True)
class Preset:
    """One architecture.

    Args:
        family: "bert" or "electra".
        layers, hidden, heads: of the encoder (ELECTRA: of the discriminator). The feed-forward
            layer has four times the width.
        learning_rate: the peak of the published run.
        embedding: width of the embeddings, ``hidden`` by default.
        generator: ELECTRA's generator has this share of the discriminator's width and heads.
        mlm_probability: share of the tokens that is masked.
        initializer_range: standard deviation of the initial weights.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    learning_rate: float
    embedding: int | None = None
    generator: float = 1.0
    mlm_probability: float = 0.15
    initializer_range: float = 0.02


PRESETS = {
    "bert-tiny": Preset("bert", 2, 128, 2, 1e-4),
    "bert-mini": Preset("bert", 4, 256, 4, 1e-4),
    "bert-small": Preset("bert", 4, 512, 8, 1e-4),
    "bert-medium": Preset("bert", 8, 512, 8, 1e-4),
    "bert-base": Preset("bert", 12, 768, 12, 1e-4),
    "bert-large": Preset("bert", 24, 1024, 16, 1e-4),
    # 0.02 suits the width of a thousand; its layers at 128 would start out as good as absent.
    "electra-tiny": Preset("electra", 2, 128, 4, 1e-3, generator=1 / 4, initializer_range=0.06),
    "electra-small": Preset("electra", 12, 256, 4, 5e-4, embedding=128, generator=1 / 4),
    "electra-base": Preset("electra", 12, 768, 12, 2e-4, generator=1 / 3),
    "electra-large": Preset("electra", 24, 1024, 16, 2e-4, generator=1 / 4, mlm_probability=0.25),
}


def preset(arch: str) -> Preset:
    """The preset of a name.

    Raises:
        ArgumentValueError: there is no such architecture.
    """
    check_choice("preset", "arch", arch, tuple(PRESETS))
    return PRESETS[arch]


def configuration(
    arch: str, *, joint: Mapping[str, Any] | None = None, **settings: Any
) -> BertConfig | ElectraJointConfig:
    """The configuration of a model to pre-train.

    Args:
        arch: a key of ``PRESETS``.
        joint: of ELECTRA, fields of ``ElectraJointConfig``.
        settings: passed to the configuration of the encoder as they are, e.g. ``vocab_size``.

    Returns:
        Transformers' ``BertConfig``, or our ``ElectraJointConfig`` whose generator is as deep as
        the discriminator and as narrow as the preset says; or as wide, where all its weights are
        shared or handed over.
    """
    from transformers import BertConfig, ElectraConfig

    from fastplm.models.electra_joint import ElectraJointConfig

    chosen = preset(arch)
    sizes = {
        "num_hidden_layers": chosen.layers,
        "hidden_size": chosen.hidden,
        "num_attention_heads": chosen.heads,
        "intermediate_size": 4 * chosen.hidden,
        "initializer_range": chosen.initializer_range,
    }
    if chosen.family == "bert":
        return BertConfig(**{**sizes, **settings})
    sizes["embedding_size"] = chosen.embedding or chosen.hidden
    joint = joint or {}
    equal = joint.get("embedding_sharing") == "all" or joint.get("stage") is not None
    return ElectraJointConfig.from_discriminator(
        ElectraConfig(**{**sizes, **settings}),
        generator_size=1.0 if equal else chosen.generator,
        **joint,
    )
