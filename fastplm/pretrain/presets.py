"""The published architectures by name, with the settings they were pre-trained with.

A preset of a published name has the published shape, vocabulary size, dropout, optimizer, and a
peak learning rate together with the samples of a step it was published for. Every other preset
says that it is fastplm's own (``source`` is empty): those ``-tiny`` and ``-mini`` that are not
BERT's, for tests, examples and small corpora, with rates for a batch of 32.

Sources: BERT of Devlin et al. 2019 (arXiv 1810.04805), §3 and §A.2; its sizes from tiny to medium
of Turc et al. 2019 (arXiv 1908.08962), trained by the recipe of BERT; RoBERTa of Liu et al. 2019
(arXiv 1907.11692), table 9; ALBERT of Lan et al. 2020 (arXiv 1909.11942), table 1 and §4.1;
ELECTRA of Clark et al. 2020 (arXiv 2003.10555), table 6; DeBERTa-v3 of He et al. 2021 (arXiv
2111.09543), §4 and table 9, whose generators have half of the layers, with a vocabulary of our
kind in the published size; GPT of Radford et al. 2018, §4.1; GPT-2
of Radford et al. 2019, table 2 and §2.3, which names no rate: those of GPT-3's models of the same
size and batch (Brown et al. 2020, arXiv 2005.14165, table 2.1); T5 of Raffel et al. 2020 (arXiv
1910.10683), §3.1; BART of Lewis et al. 2020 (arXiv 1910.13461), §2 and §5, which follows RoBERTa
and names no rate: RoBERTa's; DistilBERT of Sanh et al. 2019 (arXiv 1910.01108), §3, rate of its
released code; XLM-R of Conneau et al. 2020 (arXiv 1911.02116), §4, which names no rate: RoBERTa's;
ModernBERT of Warner et al. 2024 (arXiv 2412.13663), §2 and table 3. docs/pretraining.md says, under
"Presets", what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastplm.errors import check_choice
from fastplm.pretrain.objectives import OBJECTIVES, learned_as

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Preset:
    """One architecture.

    Args:
        family: a key of ``FAMILIES``.
        layers, hidden, heads: of the encoder, and of the decoder where there is one (ELECTRA: of
            the discriminator).
        learning_rate: the peak of the published run.
        batch_size: the samples of a step that the rate is published for.
        source: of shape and rate; empty for those of fastplm's own.
        optimizer: that of the published run.
        inner: width of the feed-forward layer, four times ``hidden`` by default.
        embedding: width of the embeddings, ``hidden`` by default.
        sharing: what the layers of an ALBERT share, see ``fastplm.models.albert``.
        generator: ELECTRA's generator has this share of the discriminator's width and heads.
        mlm_probability: share of the tokens that is masked.
        dropout, attention_dropout: of hidden states and embeddings; of attention weights.
        initializer_range: standard deviation of the initial weights; T5 scales its own.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    learning_rate: float
    batch_size: int = 32
    source: str = ""
    optimizer: str = "adamw"
    inner: int | None = None
    embedding: int | None = None
    sharing: str = "all"
    generator: float = 1.0
    mlm_probability: float = 0.15
    dropout: float = 0.1
    attention_dropout: float = 0.0
    initializer_range: float = 0.02


@dataclass(frozen=True)
class Family:
    """What an architecture is trained with.

    Args:
        tokenizer: the kind of vocabulary, see ``train_tokenizer``.
        vocab_size: tokens of the published vocabulary, as its embeddings have them.
        objective: what it learns by default; each of ``OBJECTIVES`` says which families learn it.
        unit: the default of ``--unit``.
    """

    tokenizer: str
    vocab_size: int
    objective: str
    unit: str = "token"


FAMILIES: Mapping[str, Family] = {
    "bert": Family("wordpiece", 30522, "mlm+nsp"),
    "roberta": Family("bytelevel", 50265, "mlm"),
    "albert": Family("wordpiece", 30000, "mlm+sop", unit="ngram"),
    "electra": Family("wordpiece", 30522, "rtd"),
    "deberta-v3": Family("wordpiece", 128100, "rtd"),
    "gpt": Family("bytelevel", 40478, "clm"),
    "gpt2": Family("bytelevel", 50257, "clm"),
    "t5": Family("unigram", 32128, "spans"),
    "bart": Family("bytelevel", 50265, "denoise"),
    "distilbert": Family("wordpiece", 30522, "mlm"),
    "xlm-roberta": Family("bytelevel", 250002, "mlm"),
    "roberta-prelayernorm": Family("bytelevel", 50265, "mlm"),
    "modernbert": Family("bytelevel", 50368, "mlm"),
}
OPTIMIZERS = ("adamw", "lamb", "adafactor")


def learned_by(family: str) -> tuple[str, ...]:
    """The objectives that a family can learn, its default first."""
    names = (kind.name for kind in OBJECTIVES if family in kind.models)
    return tuple(dict.fromkeys((FAMILIES[family].objective, *names)))


_Ids = dict[str, int]
#: The families that are RoBERTa in all but a few modules, and their configurations.
_ROBERTAS = {
    "roberta": "RobertaConfig",
    "xlm-roberta": "XLMRobertaConfig",
    "roberta-prelayernorm": "RobertaPreLayerNormConfig",
}
# 0.02 suits a width of a thousand; with it, layers of width 128 have almost no effect at first.
_NARROW = 0.06


def _published(
    source: str,
    family: str,
    sizes: Mapping[str, tuple[int, int, int]],
    rate: float,
    samples: int,
    **others: Any,
) -> dict[str, Preset]:
    """Published sizes, each (layers, hidden, heads), that were trained in one way."""
    others = {"attention_dropout": 0.1} | others
    return {
        f"{family}-{size}" if size else family: Preset(
            family, *shape, rate, samples, source, **others
        )
        for size, shape in sizes.items()
    }


_TURC = {"tiny": (2, 128, 2), "mini": (4, 256, 4), "small": (4, 512, 8), "medium": (8, 512, 8)}
_BASE, _LARGE = {"base": (12, 768, 12)}, {"large": (24, 1024, 16)}
_XLARGE, _XXLARGE = {"xlarge": (24, 2048, 16)}, {"xxlarge": (12, 4096, 64)}
_CLARK, _RAFFEL, _HE = "Clark et al. 2020", "Raffel et al. 2020", "He et al. 2021"
_LAMB: dict[str, Any] = {"optimizer": "lamb", "embedding": 128}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}
_LEWIS = "Lewis et al. 2020; rate of Liu et al. 2019"
_RADFORD = "Radford et al. 2019; rate of Brown et al. 2020"
_SANH = "Sanh et al. 2019; rate of its code"
_CONNEAU = "Conneau et al. 2020; rate of Liu et al. 2019"
# GeGLU has three weights in the place of two, so a narrower layer has as many.
_WARNER: dict[str, Any] = {"mlm_probability": 0.3, **_NO_DROPOUT}

PRESETS = {
    **_published("Turc et al. 2019", "bert", _TURC, 1e-4, 256),
    **_published("Devlin et al. 2019", "bert", _BASE | _LARGE, 1e-4, 256),
    "electra-tiny": Preset("electra", 2, 128, 4, 1e-3, generator=1 / 4, initializer_range=_NARROW),
    **_published(
        _CLARK, "electra", {"small": (12, 256, 4)}, 5e-4, 128, embedding=128, generator=1 / 4
    ),
    **_published(_CLARK, "electra", _BASE, 2e-4, 256, generator=1 / 3),
    **_published(_CLARK, "electra", _LARGE, 2e-4, 2048, generator=1 / 4, mlm_probability=0.25),
    "deberta-v3-tiny": Preset(
        "deberta-v3", 2, 128, 2, 1e-3, generator=1 / 2, initializer_range=_NARROW
    ),
    **_published(_HE, "deberta-v3", {"small": (6, 768, 12)} | _BASE, 6e-4, 8192, generator=1 / 2),
    "roberta-tiny": Preset("roberta", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "roberta-mini": Preset("roberta", 4, 256, 4, 6e-4),
    **_published("Liu et al. 2019", "roberta", _BASE, 6e-4, 8192),
    **_published("Liu et al. 2019", "roberta", _LARGE, 4e-4, 8192),
    "albert-tiny": Preset("albert", 2, 128, 2, 1e-3, embedding=64, initializer_range=_NARROW),
    "albert-mini": Preset("albert", 4, 256, 4, 5e-4, embedding=128),
    **_published("Lan et al. 2020", "albert", _BASE | _LARGE | _XLARGE, 1.76e-3, 4096, **_LAMB),
    **_published("Lan et al. 2020", "albert", _XXLARGE, 1.76e-3, 4096, **_LAMB, **_NO_DROPOUT),
    "gpt-tiny": Preset("gpt", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    **_published("Radford et al. 2018", "gpt", {"": (12, 768, 12)}, 2.5e-4, 64),
    "gpt2-tiny": Preset("gpt2", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "gpt2-mini": Preset("gpt2", 4, 256, 4, 6e-4),
    **_published(_RADFORD, "gpt2", {"small": (12, 768, 12)}, 6e-4, 512),
    **_published(_RADFORD, "gpt2", {"medium": (24, 1024, 16)}, 3e-4, 512),
    "t5-tiny": Preset("t5", 2, 128, 2, 5e-3, optimizer="adafactor"),
    "t5-mini": Preset("t5", 4, 256, 4, 5e-3, optimizer="adafactor"),
    **_published(_RAFFEL, "t5", {"small": (6, 512, 8)} | _BASE, 1e-2, 128, optimizer="adafactor"),
    "bart-tiny": Preset("bart", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "bart-mini": Preset("bart", 4, 256, 4, 6e-4),
    **_published(_LEWIS, "bart", {"base": (6, 768, 12)}, 6e-4, 8000),
    **_published(_LEWIS, "bart", {"large": (12, 1024, 16)}, 4e-4, 8000),
    "distilbert-tiny": Preset("distilbert", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "distilbert-mini": Preset("distilbert", 4, 256, 4, 6e-4),
    **_published(_SANH, "distilbert", {"base": (6, 768, 12)}, 5e-4, 4000),
    "xlm-roberta-tiny": Preset("xlm-roberta", 2, 128, 2, 1e-3, initializer_range=_NARROW),
    "xlm-roberta-mini": Preset("xlm-roberta", 4, 256, 4, 6e-4),
    **_published(_CONNEAU, "xlm-roberta", _BASE, 6e-4, 8192),
    **_published(_CONNEAU, "xlm-roberta", _LARGE, 4e-4, 8192),
    "roberta-prelayernorm-tiny": Preset(
        "roberta-prelayernorm", 2, 128, 2, 1e-3, initializer_range=_NARROW
    ),
    "roberta-prelayernorm-mini": Preset("roberta-prelayernorm", 4, 256, 4, 6e-4),
    "modernbert-tiny": Preset(
        "modernbert", 3, 128, 2, 1e-3, inner=192, initializer_range=_NARROW, **_WARNER
    ),
    "modernbert-mini": Preset("modernbert", 6, 256, 4, 6e-4, inner=384, **_WARNER),
    **_published(
        "Warner et al. 2024",
        "modernbert",
        {"base": (22, 768, 12)},
        8e-4,
        4608,
        inner=1152,
        **_WARNER,
    ),
    **_published(
        "Warner et al. 2024",
        "modernbert",
        {"large": (28, 1024, 16)},
        5e-4,
        4928,
        inner=2624,
        **_WARNER,
    ),
}


def preset(arch: str) -> Preset:
    """The preset of a name.

    Raises:
        ArgumentValueError: there is no such architecture.
    """
    check_choice("preset", "arch", arch, tuple(PRESETS))
    return PRESETS[arch]


@dataclass(frozen=True)
class Peak:
    """A peak learning rate, the samples of a step that it is for, and where both stand."""

    rate: float
    samples: int
    source: str

    def scaled(self, samples: int) -> float:
        """The rate for another number of samples a step: times the square root of their ratio.

        Source: You et al. 2020 (arXiv 1904.00962), table 4, for LAMB; Malladi et al. 2022 (arXiv
        2205.10287) for Adam. For Adafactor it is an assumption.
        """
        return self.rate * (samples / self.samples) ** 0.5


def usual_peak(chosen: Preset, optimizer: str) -> Peak:
    """The published peak of an architecture, or of the optimizer where that is another one.

    AdamW takes BERT's rate for an ALBERT. For a T5 it takes Adafactor's relative rate times
    ``hidden ** -0.5``, about the RMS of its weights at the start.
    """
    if optimizer == chosen.optimizer:
        return Peak(
            chosen.learning_rate, chosen.batch_size, chosen.source or "a size of fastplm's own"
        )
    if optimizer == "lamb":
        return Peak(5e-3, 32768, "You et al. 2020, table 4")
    if optimizer == "adafactor":
        return Peak(1e-2, 128, _RAFFEL)
    if chosen.family == "t5":
        source = f"{_RAFFEL}, times the weights' RMS of {chosen.hidden} ** -0.5"
        return Peak(chosen.learning_rate * chosen.hidden**-0.5, chosen.batch_size, source)
    return Peak(1e-4, 256, "Devlin et al. 2019")


def configuration(
    arch: str | Preset,
    *,
    vocab_size: int,
    block_size: int = 512,
    dropout: float | None = None,
    attention_dropout: float | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    objective: str | None = None,
    joint: Mapping[str, Any] | None = None,
) -> PreTrainedConfig:
    """The configuration of a model to pre-train.

    Args:
        arch: a key of ``PRESETS``, or a preset of your own.
        vocab_size: tokens, the special ones included.
        block_size: the longest sequence to come; the published number of positions is the least.
        dropout: of hidden states and embeddings, and of T5's attention, which has no rate of its
            own; that of the preset by default.
        attention_dropout: of attention weights; that of the preset by default.
        tokenizer: gives the ids of padding, beginning and end; without it the family's usual ones.
        objective: with "mlm" or "clm" an ELECTRA is one encoder, the discriminator's; with "clm"
            an encoder has a causal mask, by ``is_decoder``.
        joint: of ELECTRA, fields of ``ElectraJointConfig``.

    Returns:
        Transformers' configuration of the family, or our ``ElectraJointConfig`` whose generator is
        as deep as the discriminator and as narrow as the preset says; or as wide, where all its
        weights are shared or handed over.
    """
    import transformers

    chosen = preset(arch) if isinstance(arch, str) else arch
    dropout = chosen.dropout if dropout is None else dropout
    if attention_dropout is None:
        attention_dropout = chosen.attention_dropout
    common = {"vocab_size": vocab_size, **_special_ids(chosen.family, tokenizer)}
    if chosen.family in _OTHER_NAMES:
        return _OTHER_NAMES[chosen.family](chosen, common, block_size, dropout, attention_dropout)
    encoder = {
        **common,
        "num_hidden_layers": chosen.layers,
        "hidden_size": chosen.hidden,
        "num_attention_heads": chosen.heads,
        "intermediate_size": chosen.inner or 4 * chosen.hidden,
        "initializer_range": chosen.initializer_range,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": attention_dropout,
        "max_position_embeddings": max(512, block_size),
    }
    learned = learned_as(objective or FAMILIES[chosen.family].objective, chosen.family)
    if learned.causal:
        # With a cache in every forward, padding would be computed.
        encoder |= {"is_decoder": True, "use_cache": False}
    if chosen.family == "bert":
        return transformers.BertConfig(**encoder)
    if chosen.family in _ROBERTAS:
        # Positions are counted from the id of the padding on; there is one type of segment.
        encoder["max_position_embeddings"] += common["pad_token_id"] + 1
        kind = getattr(transformers, _ROBERTAS[chosen.family])
        return kind(**encoder, type_vocab_size=1, layer_norm_eps=1e-5)
    if chosen.family == "deberta-v3":
        deberta = _deberta(encoder)
        return _joint(chosen, deberta, joint or {}) if learned.is_joint else deberta
    encoder["embedding_size"] = chosen.embedding or chosen.hidden
    if chosen.family == "albert":
        return transformers.AlbertConfig(
            **encoder,
            parameter_sharing=chosen.sharing,
            num_hidden_groups=1 if chosen.sharing == "all" else chosen.layers,
            classifier_dropout_prob=dropout,  # of the head for the order of segments, too
        )
    electra = transformers.ElectraConfig(**encoder)
    return _joint(chosen, electra, joint or {}) if learned.is_joint else electra


def _deberta(encoder: dict[str, Any]) -> Any:
    """Relative positions alone, in 256 buckets of a side up to the longest distance."""
    import transformers

    return transformers.DebertaV2Config(
        **encoder,
        **dict(relative_attention=True, position_buckets=256, pos_att_type="p2c|c2p"),
        **dict(share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False),
        **dict(pooler_hidden_size=encoder["hidden_size"], legacy=False),
    )


def _gpt(chosen: Preset, common: _Ids, block_size: int, dropout: float, attention: float) -> Any:
    import transformers

    first = chosen.family == "gpt"
    kind = transformers.OpenAIGPTConfig if first else transformers.GPT2Config
    # In training the end of a document is what stands before a text, as in OpenAI's GPT-2.
    ids = common | {"bos_token_id": common["eos_token_id"]}
    return kind(
        **ids,
        n_layer=chosen.layers,
        n_embd=chosen.hidden,
        n_head=chosen.heads,
        n_positions=max(512 if first else 1024, block_size),
        initializer_range=chosen.initializer_range,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=attention,
    )


def _t5(chosen: Preset, common: _Ids, block_size: int, dropout: float, attention: float) -> Any:
    import transformers

    return transformers.T5Config(
        **common,
        decoder_start_token_id=common["pad_token_id"],
        num_layers=chosen.layers,
        d_model=chosen.hidden,
        d_kv=chosen.hidden // chosen.heads,
        d_ff=4 * chosen.hidden,
        num_heads=chosen.heads,
        dropout_rate=dropout,
    )


def _bart(chosen: Preset, common: _Ids, block_size: int, dropout: float, attention: float) -> Any:
    import transformers

    sizes = {"layers": chosen.layers, "attention_heads": chosen.heads, "ffn_dim": 4 * chosen.hidden}
    sides = {f"{side}_{name}": sizes[name] for side in ("encoder", "decoder") for name in sizes}
    return transformers.BartConfig(
        **common,
        **sides,
        decoder_start_token_id=common["eos_token_id"],
        forced_eos_token_id=common["eos_token_id"],
        d_model=chosen.hidden,
        max_position_embeddings=max(1024, block_size),
        init_std=chosen.initializer_range,
        dropout=dropout,
        attention_dropout=attention,
    )


def _distilbert(
    chosen: Preset, common: _Ids, block_size: int, dropout: float, attention: float
) -> Any:
    import transformers

    return transformers.DistilBertConfig(
        **common,
        n_layers=chosen.layers,
        dim=chosen.hidden,
        n_heads=chosen.heads,
        hidden_dim=chosen.inner or 4 * chosen.hidden,
        max_position_embeddings=max(512, block_size),
        initializer_range=chosen.initializer_range,
        dropout=dropout,
        attention_dropout=attention,
    )


def _modernbert(
    chosen: Preset, common: _Ids, block_size: int, dropout: float, attention: float
) -> Any:
    import transformers

    return transformers.ModernBertConfig(
        **common,
        cls_token_id=common["bos_token_id"],
        sep_token_id=common["eos_token_id"],
        num_hidden_layers=chosen.layers,
        hidden_size=chosen.hidden,
        num_attention_heads=chosen.heads,
        intermediate_size=chosen.inner or 4 * chosen.hidden,
        max_position_embeddings=max(8192, block_size),
        initializer_range=chosen.initializer_range,
        embedding_dropout=dropout,
        mlp_dropout=dropout,
        attention_dropout=attention,
    )


#: The families whose configurations name the sizes in another way than BERT's.
_OTHER_NAMES = {
    **{"gpt": _gpt, "gpt2": _gpt, "t5": _t5, "bart": _bart},
    **{"distilbert": _distilbert, "modernbert": _modernbert},
}


def _joint(
    chosen: Preset, discriminator: PreTrainedConfig, joint: Mapping[str, Any]
) -> PreTrainedConfig:
    from fastplm.models.electra_joint import ElectraJointConfig

    handed_over = joint.get("second_stage_from", "generator") == "generator"
    equal = joint.get("embedding_sharing") == "all"
    equal |= joint.get("stage") is not None and handed_over
    return ElectraJointConfig.from_discriminator(
        discriminator, generator_size=1.0 if equal else chosen.generator, **joint
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
    if family in ("bert", "electra", "distilbert", "deberta-v3"):
        # Their configurations name the padding alone.
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
