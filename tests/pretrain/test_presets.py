"""The presets against their papers, and the table of them in docs/pretraining.md.

``python tests/pretrain/test_presets.py`` prints the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from fastplm.errors import ArgumentValueError
from fastplm.models import ElectraForJointPreTraining
from fastplm.pretrain.model import build_model
from fastplm.pretrain.presets import FAMILIES, PRESETS, configuration, learned_by
from fastplm.pretrain.settings import PretrainArguments

DOC = Path(__file__).parents[2] / "docs" / "pretraining.md"
BEGIN, END = "<!-- presets: begin -->\n", "<!-- presets: end -->\n"


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# The discriminators of google/electra-{small,base,large}-discriminator; the generators of table 6
# of the paper: a quarter, a third and a quarter of the width.
ELECTRAS = [
    ("electra-small", 13_483_008, (12, 64, 1, 256)),
    ("electra-base", 108_891_648, (12, 256, 4, 1024)),
    ("electra-large", 334_092_288, (24, 256, 4, 1024)),
    # microsoft/deberta-v3-{small,base}; the generators have half of the layers.
    ("deberta-v3-small", 141_304_320, (3, 768, 12, 3072)),
    ("deberta-v3-base", 183_831_552, (6, 768, 12, 3072)),
]


@pytest.mark.parametrize(("arch", "expected", "generator"), ELECTRAS)
def test_electra_sizes(arch, expected, generator):
    with torch.device("meta"):
        vocab = FAMILIES[PRESETS[arch].family].vocab_size
        model = ElectraForJointPreTraining(configuration(arch, vocab_size=vocab))
    assert parameters(model.discriminator.base_model) == expected
    config = model.generator.config
    assert generator == (
        config.num_hidden_layers,
        config.hidden_size,
        config.num_attention_heads,
        config.intermediate_size,
    )


# Published models, without their heads: google/bert_uncased_L-*_H-*, bert-base-uncased and
# bert-large-uncased, roberta-base and -large, albert-{base,large,xlarge,xxlarge}-v1, gpt2 and
# gpt2-medium, t5-small, t5-base, facebook/bart-base and -large, distilbert-base-uncased,
# xlm-roberta-base and -large, ModernBERT-base and -large. Each has the configuration of
# Transformers that is the published one, except the fields named.
SIZES = [
    ("bert-tiny", 4_385_920, transformers.BertConfig, (2, 128, 2)),
    ("bert-mini", 11_170_560, transformers.BertConfig, (4, 256, 4)),
    ("bert-small", 28_763_648, transformers.BertConfig, (4, 512, 8)),
    ("bert-medium", 41_373_184, transformers.BertConfig, (8, 512, 8)),
    ("bert-base", 109_482_240, transformers.BertConfig, ()),
    ("bert-large", 335_141_888, transformers.BertConfig, (24, 1024, 16)),
    ("roberta-base", 124_645_632, transformers.RobertaConfig, ()),
    ("roberta-large", 355_359_744, transformers.RobertaConfig, (24, 1024, 16)),
    ("albert-base", 11_683_584, transformers.AlbertConfig, (12, 768, 12)),
    ("albert-large", 17_683_968, transformers.AlbertConfig, (24, 1024, 16)),
    ("albert-xlarge", 58_724_864, transformers.AlbertConfig, (24, 2048, 16)),
    ("albert-xxlarge", 222_595_584, transformers.AlbertConfig, ()),
    ("gpt", 116_534_784, transformers.OpenAIGPTConfig, ()),
    ("gpt2-small", 124_439_808, transformers.GPT2Config, ()),
    ("gpt2-medium", 354_823_168, transformers.GPT2Config, None),
    ("t5-small", 60_506_624, transformers.T5Config, ()),
    ("t5-base", 222_903_552, transformers.T5Config, None),
    ("bart-base", 139_420_416, transformers.BartConfig, None),
    ("bart-large", 406_291_456, transformers.BartConfig, ()),
    ("distilbert-base", 66_362_880, transformers.DistilBertConfig, ()),
    ("xlm-roberta-base", 278_043_648, transformers.XLMRobertaConfig, ()),
    ("xlm-roberta-large", 559_890_432, transformers.XLMRobertaConfig, (24, 1024, 16)),
    ("modernbert-base", 149_014_272, transformers.ModernBertConfig, ()),
    ("modernbert-large", 394_781_696, transformers.ModernBertConfig, None),
]


@pytest.mark.parametrize(("arch", "expected", "parent", "sizes"), SIZES)
def test_sizes(arch, expected, parent, sizes):
    """The sizes are the published ones, and those of Transformers' own configuration."""
    config = configuration(arch, vocab_size=FAMILIES[PRESETS[arch].family].vocab_size)
    assert type(config) is parent
    with torch.device("meta"):
        assert parameters(transformers.AutoModel.from_config(config)) == expected
        if sizes is None:  # Transformers' default has another size
            return
        names = ("num_hidden_layers", "hidden_size", "num_attention_heads")
        changed = dict(zip(names, sizes, strict=False))
        if sizes:
            changed["intermediate_size"] = 4 * sizes[1]
        if parent is transformers.RobertaConfig:  # its defaults are BERT's
            changed |= {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
        if parent is transformers.XLMRobertaConfig:
            changed |= {"vocab_size": 250002, "max_position_embeddings": 514, "type_vocab_size": 1}
        assert parameters(transformers.AutoModel.from_config(parent(**changed))) == expected


def test_every_published_size_is_counted():
    published = {name for name, chosen in PRESETS.items() if chosen.source}
    assert {arch for arch, *_ in SIZES + ELECTRAS} == published


# The table of each paper: rate, samples of a step, optimizer.
@pytest.mark.parametrize(
    ("arch", "rate", "samples", "optimizer"),
    [
        ("bert-base", 1e-4, 256, "adamw"),
        ("roberta-base", 6e-4, 8192, "adamw"),
        ("roberta-large", 4e-4, 8192, "adamw"),
        ("electra-small", 5e-4, 128, "adamw"),
        ("electra-base", 2e-4, 256, "adamw"),
        ("electra-large", 2e-4, 2048, "adamw"),
        ("albert-base", 1.76e-3, 4096, "lamb"),
        ("gpt", 2.5e-4, 64, "adamw"),
        ("gpt2-small", 6e-4, 512, "adamw"),
        ("t5-base", 1e-2, 128, "adafactor"),
        ("t5-mini", 1e-2, 128, "adafactor"),
        ("bart-large", 4e-4, 8000, "adamw"),
    ],
)
def test_the_published_batch_has_the_published_rate(arch, rate, samples, optimizer):
    args = PretrainArguments(arch, ["-"], 9, "out", batch_size=samples).plan()
    assert (args.lr, args.optimizer) == (rate, optimizer)
    assert args.attention_dropout == args.dropout == 0.1
    # Another batch size scales by the square root of the ratio, however the batch is divided.
    quarter = PretrainArguments(
        arch, ["-"], 9, "out", batch_size=samples // 8, gradient_accumulation=2
    ).plan()
    assert quarter.lr == pytest.approx(rate / 2, rel=1e-12)
    given = PretrainArguments(arch, ["-"], 9, "out", batch_size=samples // 4, lr=0.5).plan()
    assert given.lr == 0.5


def test_the_largest_albert_has_no_dropout():
    """As the published albert-xxlarge-v1; the paper rounds its parameters to 235 and 60 million."""
    for arch, dropout, millions in (("albert-xlarge", 0.1, 60), ("albert-xxlarge", 0.0, 235)):
        args = PretrainArguments(arch, ["-"], 9, "out").plan()
        assert (args.dropout, args.attention_dropout) == (dropout, dropout)
        config = configuration(args.preset, vocab_size=30000)
        assert config.hidden_dropout_prob == config.attention_probs_dropout_prob == dropout
        assert config.embedding_size == 128
        with torch.device("meta"):
            model = build_model("albert", "mlm+sop", config)
        assert parameters(model) == pytest.approx(1e6 * millions, rel=0.06)


def test_what_is_fastplms_own_says_so():
    own = {name for name, chosen in PRESETS.items() if not chosen.source}
    assert own == {
        f"{family}-{size}"
        for family in FAMILIES
        for size in ("tiny", "mini")
        if family != "bert"
        and f"{family}-{size}" not in ("electra-mini", "gpt-mini", "deberta-v3-mini")
    }
    for name in own:
        args = PretrainArguments(name, ["-"], 9, "out").plan()
        assert args.lr == PRESETS[name].learning_rate  # the rate of the usual batch
        assert "fastplm's own" in args.peak.source


def test_another_optimizer_has_a_rate_of_its_own():
    lamb = PretrainArguments(
        "bert-base", ["-"], 9, "out", optimizer="lamb", batch_size=32768
    ).plan()
    assert lamb.lr == 5e-3
    adamw = PretrainArguments(
        "albert-base", ["-"], 9, "out", optimizer="adamw", batch_size=256
    ).plan()
    assert adamw.lr == 1e-4
    t5 = PretrainArguments("t5-small", ["-"], 9, "out", optimizer="adamw", batch_size=128).plan()
    assert t5.lr == pytest.approx(1e-2 / 512**0.5)


def test_vocabularies_are_the_published_ones():
    for arch, size in (("roberta-base", 50265), ("albert-base", 30000), ("t5-small", 32128)):
        assert PretrainArguments(arch, ["-"], 9, "out").plan().vocab_size == size


def test_a_generator_of_the_same_size_where_weights_are_shared_or_handed_over():
    for joint in ({"embedding_sharing": "all"}, {"embedding_sharing": "none", "stage": 1}):
        config = configuration("electra-small", vocab_size=99, joint=joint)
        assert config.generator.hidden_size == config.discriminator.hidden_size == 256
        assert {name: getattr(config, name) for name in joint} == joint


def test_every_preset_builds():
    for arch, preset in PRESETS.items():
        assert preset.hidden % preset.heads == 0
        for objective in learned_by(preset.family):
            config = configuration(arch, vocab_size=30522, block_size=2048, objective=objective)
            with torch.device("meta"):
                assert parameters(build_model(preset.family, objective, config)) > 0


def test_unknown_architecture():
    with pytest.raises(ArgumentValueError, match="bert-base"):
        configuration("bert-huge", vocab_size=99)


def test_a_published_shape_that_was_changed_says_so():
    args = PretrainArguments(
        "albert-base", ["-"], 9, "out", layers=6, parameter_sharing="none"
    ).plan()
    assert args.preset.source == "Lan et al. 2020, with other layers, sharing"
    config = configuration(args.preset, vocab_size=99)
    assert (config.num_hidden_layers, config.num_hidden_groups) == (6, 6)
    large = PretrainArguments("electra-large", ["-"], 9, "out", objective="mlm").plan()
    assert large.preset.mlm_probability == 0.15 and large.preset.source == "Clark et al. 2020"


def table() -> str:
    counts = {arch: count for arch, count, *_ in SIZES + ELECTRAS}
    lines = [
        "| preset | layers, width, heads | parameters | vocabulary | peak rate, samples a step | "
        "optimizer | source |",
        "|---|---|---:|---:|---|---|---|",
    ]
    for name, chosen in PRESETS.items():
        if chosen.source:
            shape = f"{chosen.layers}, {chosen.hidden}, {chosen.heads}"
            vocabulary = FAMILIES[chosen.family].vocab_size
            peak = f"{chosen.learning_rate:g}, {chosen.batch_size:,}"
            lines.append(
                f"| `{name}` | {shape} | {counts[name]:,} | {vocabulary:,} | {peak} | "
                f"{chosen.optimizer} | {chosen.source} |"
            )
    own = ", ".join(f"`{name}`" for name, chosen in PRESETS.items() if not chosen.source)
    return "\n".join(lines) + f"\n\nfastplm's own, for a batch of 32: {own}.\n"


def test_the_table_in_the_docs_holds_the_presets():
    text = DOC.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == table()


if __name__ == "__main__":
    print(table(), end="")
