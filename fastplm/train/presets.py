"""The published architectures by name, with the settings they were pre-trained with.

Sizes: BERT of Turc et al. 2019, "Well-Read Students Learn Better" (arXiv 1908.08962); ELECTRA of
Clark et al. 2020 (arXiv 2003.10555), table 6; RoBERTa of Liu et al. 2019 (arXiv 1907.11692); ALBERT
of Lan et al. 2020 (arXiv 1909.11942), table 1; GPT-2 of Radford et al. 2019, table 2; T5 of Raffel
et al. 2020 (arXiv 1910.10683), §3.7; BART of Lewis et al. 2020 (arXiv 1910.13461). BERT's tiny to
medium are of Turc et al.; every other tiny and mini is ours, for tests, examples and small corpora.

Learning rates of the named sizes are published ones where there is one for Adam: RoBERTa's (table
9) also for BART, which names none; GPT-1's (Radford et al. 2018) for GPT-2, which names none;
BERT's for ALBERT under AdamW, as Lan et al. used LAMB (see ``lamb_learning_rate``). T5 was trained
with Adafactor at 1e-2 times the RMS of each weight, about ``hidden ** -0.5`` at the start: its
rates here are that product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastplm.errors import check_choice

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preset:
    """One architecture.

    Args:
        family: "bert", "roberta", "albert", "electra", "gpt2", "t5" or "bart".
        layers, hidden, heads: of the encoder, and of the decoder where there is one (ELECTRA: of
            the discriminator). The feed-forward layer has four times the width.
        learning_rate: the peak of the published run.
        embedding: width of the embeddings, ``hidden`` by default.
        generator: ELECTRA's generator has this share of the discriminator's width and heads.
        mlm_probability: share of the tokens that is masked.
        initializer_range: standard deviation of the initial weights; T5 scales its own.
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


@dataclass(frozen=True)
class Family:
    """What an architecture can learn, and how.

    Args:
        tokenizer: the kind of vocabulary, see ``train_tokenizer``.
        classes: the class of ``fastplm.models`` that learns each objective; the first objective is
            the default.
        unit: the default of ``--unit``.
    """

    tokenizer: str
    classes: Mapping[str, str]
    unit: str = "token"


FAMILIES: Mapping[str, Family] = {
    "bert": Family("wordpiece", {"mlm+nsp": "BertForPreTraining", "mlm": "BertForMaskedLM"}),
    "roberta": Family("bytelevel", {"mlm": "RobertaForMaskedLM"}),
    "albert": Family(
        "wordpiece", {"mlm+sop": "AlbertForPreTraining", "mlm": "AlbertForMaskedLM"}, unit="ngram"
    ),
    "electra": Family("wordpiece", {"rtd": "ElectraForJointPreTraining"}),
    "gpt2": Family("bytelevel", {"clm": "GPT2LMHeadModel"}),
    "t5": Family("unigram", {"spans": "T5ForConditionalGeneration"}),
    "bart": Family("bytelevel", {"denoise": "BartForConditionalGeneration"}),
}
#: All objectives, and those that choose tokens to mask.
OBJECTIVES = tuple(dict.fromkeys(name for family in FAMILIES.values() for name in family.classes))
MASKED = ("mlm", "mlm+nsp", "mlm+sop", "rtd")
OPTIMIZERS = ("adamw", "lamb")

# 0.02 suits a width of a thousand; with it, layers of width 128 have almost no effect at first.
_NARROW = 0.06

PRESETS = {
    "bert-tiny": Preset("bert", 2, 128, 2, 1e-4),
    "bert-mini": Preset("bert", 4, 256, 4, 1e-4),
    "bert-small": Preset("bert", 4, 512, 8, 1e-4),
    "bert-medium": Preset("bert", 8, 512, 8, 1e-4),
    "bert-base": Preset("bert", 12, 768, 12, 1e-4),
    "bert-large": Preset("bert", 24, 1024, 16, 1e-4),
    "electra-tiny": Preset("electra", 2, 128, 4, 1e-3, generator=1 / 4, initializer_range=_NARROW),
    "electra-small": Preset("electra", 12, 256, 4, 5e-4, embedding=128, generator=1 / 4),
    "electra-base": Preset("electra", 12, 768, 12, 2e-4, generator=1 / 3),
    "electra-large": Preset("electra", 24, 1024, 16, 2e-4, generator=1 / 4, mlm_probability=0.25),
    "roberta-tiny": Preset("roberta", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "roberta-mini": Preset("roberta", 4, 256, 4, 6e-4),
    "roberta-base": Preset("roberta", 12, 768, 12, 6e-4),
    "albert-tiny": Preset("albert", 2, 128, 2, 1e-3, embedding=64, initializer_range=_NARROW),
    "albert-mini": Preset("albert", 4, 256, 4, 5e-4, embedding=128),
    "albert-base": Preset("albert", 12, 768, 12, 1e-4, embedding=128),
    "gpt2-tiny": Preset("gpt2", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "gpt2-mini": Preset("gpt2", 4, 256, 4, 6e-4),
    "gpt2-small": Preset("gpt2", 12, 768, 12, 2.5e-4),
    "t5-tiny": Preset("t5", 2, 128, 2, 1e-3),
    "t5-mini": Preset("t5", 4, 256, 4, 6e-4),
    "t5-small": Preset("t5", 6, 512, 8, 4e-4),
    "t5-base": Preset("t5", 12, 768, 12, 3.5e-4),
    "bart-tiny": Preset("bart", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "bart-mini": Preset("bart", 4, 256, 4, 6e-4),
    "bart-base": Preset("bart", 6, 768, 12, 6e-4),
}


def preset(arch: str) -> Preset:
    """The preset of a name.

    Raises:
        ArgumentValueError: there is no such architecture.
    """
    check_choice("preset", "arch", arch, tuple(PRESETS))
    return PRESETS[arch]


def lamb_learning_rate(samples: int) -> float:
    """LAMB's peak rate for a number of samples a step: 5e-3 at 32768, else by the square root.

    At 4096 that is ALBERT's 1.76e-3.

    Source: You et al. 2020 (arXiv 1904.00962), table 4; Lan et al. 2020, §4.1.
    """
    return 5e-3 * (samples / 32768) ** 0.5


def configuration(
    arch: str,
    *,
    vocab_size: int,
    block_size: int = 512,
    dropout: float = 0.1,
    attention_dropout: float = 0.0,
    tokenizer: PreTrainedTokenizerBase | None = None,
    joint: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """The configuration of a model to pre-train.

    Args:
        arch: a key of ``PRESETS``.
        vocab_size: tokens, the special ones included.
        block_size: the longest sequence to come; the published number of positions is the least.
        dropout: of hidden states and embeddings, and of T5's attention, which has no rate of its
            own.
        attention_dropout: of attention weights.
        tokenizer: gives the ids of padding, beginning and end; without it the family's usual ones.
        joint: of ELECTRA, fields of ``ElectraJointConfig``.

    Returns:
        Transformers' configuration of the family, or our ``ElectraJointConfig`` whose generator is
        as deep as the discriminator and as narrow as the preset says; or as wide, where all its
        weights are shared or handed over.
    """
    import transformers

    chosen = preset(arch)
    width, depth, heads = chosen.hidden, chosen.layers, chosen.heads
    common = {"vocab_size": vocab_size, **_special_ids(chosen.family, tokenizer)}
    encoder = {
        **common,
        "num_hidden_layers": depth,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "initializer_range": chosen.initializer_range,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": attention_dropout,
        "max_position_embeddings": max(512, block_size),
    }
    if chosen.family == "bert":
        return transformers.BertConfig(**encoder)
    if chosen.family == "roberta":
        # Positions are counted from the id of the padding on; there is one type of segment.
        encoder["max_position_embeddings"] += common["pad_token_id"] + 1
        return transformers.RobertaConfig(**encoder, type_vocab_size=1, layer_norm_eps=1e-5)
    if chosen.family == "albert":
        return transformers.AlbertConfig(
            **encoder,
            embedding_size=chosen.embedding or width,
            classifier_dropout_prob=dropout,  # of the head for the order of segments, too
        )
    if chosen.family == "gpt2":
        return transformers.GPT2Config(
            **common,
            n_layer=depth,
            n_embd=width,
            n_head=heads,
            n_positions=max(1024, block_size),
            initializer_range=chosen.initializer_range,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=attention_dropout,
        )
    if chosen.family == "t5":
        return transformers.T5Config(
            **common,
            decoder_start_token_id=common["pad_token_id"],
            num_layers=depth,
            d_model=width,
            d_kv=width // heads,
            d_ff=4 * width,
            num_heads=heads,
            dropout_rate=dropout,
        )
    if chosen.family == "bart":
        sides = {
            f"{side}_{name}": value
            for side in ("encoder", "decoder")
            for name, value in (
                ("layers", depth),
                ("attention_heads", heads),
                ("ffn_dim", 4 * width),
            )
        }
        return transformers.BartConfig(
            **common,
            **sides,
            decoder_start_token_id=common["eos_token_id"],
            forced_eos_token_id=common["eos_token_id"],
            d_model=width,
            max_position_embeddings=max(1024, block_size),
            init_std=chosen.initializer_range,
            dropout=dropout,
            attention_dropout=attention_dropout,
        )
    return _electra(chosen, encoder, joint or {})


def _electra(
    chosen: Preset, encoder: Mapping[str, Any], joint: Mapping[str, Any]
) -> PreTrainedConfig:
    from transformers import ElectraConfig

    from fastplm.models.electra_joint import ElectraJointConfig

    equal = joint.get("embedding_sharing") == "all" or joint.get("stage") is not None
    return ElectraJointConfig.from_discriminator(
        ElectraConfig(**encoder, embedding_size=chosen.embedding or chosen.hidden),
        generator_size=1.0 if equal else chosen.generator,
        **joint,
    )


# The ids of special tokens in our trained vocabularies, by their kind.
_USUAL_IDS: Mapping[str, Mapping[str, int]] = {
    "wordpiece": {"pad": 0, "bos": 2, "eos": 3},
    "bytelevel": {"pad": 1, "bos": 0, "eos": 2},
    "unigram": {"pad": 0, "eos": 1},
}
_ALSO = {"bos": "cls", "eos": "sep"}


def _special_ids(family: str, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, int]:
    """The ids of special tokens under the names that the configurations have for them."""
    usual = _USUAL_IDS[FAMILIES[family].tokenizer]
    if family in ("bert", "electra"):  # whose configurations name the padding alone
        usual = {"pad": usual["pad"]}
    if tokenizer is None:
        return {f"{role}_token_id": value for role, value in usual.items()}
    ids = {}
    for role in usual:
        value = getattr(tokenizer, f"{role}_token_id")
        if value is None and role in _ALSO:
            value = getattr(tokenizer, f"{_ALSO[role]}_token_id")
        ids[f"{role}_token_id"] = value
    return ids
