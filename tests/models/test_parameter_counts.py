"""Parameter counts of the published configurations, and the table of them in docs/models.md.

``python tests/models/test_parameter_counts.py`` prints the table.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from transformers import (
    AlbertConfig,
    BartConfig,
    BertConfig,
    ElectraConfig,
    GPT2Config,
    OpenAIGPTConfig,
    RobertaConfig,
    T5Config,
)

from fastplm import models

DOC = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- parameter counts: begin -->\n", "<!-- parameter counts: end -->\n"


def encoder(hidden: int, layers: int, heads: int, inner: int, **others: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        **others,
    }


def roberta(**sizes: int) -> RobertaConfig:
    return RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1, **sizes)


def bart(width: int, layers: int, heads: int) -> BartConfig:
    return BartConfig(
        vocab_size=50265,
        max_position_embeddings=1024,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
    )


def albert(**sizes: int) -> AlbertConfig:
    return AlbertConfig(vocab_size=30000, embedding_size=128, **sizes)


def gpt2(width: int, layers: int, heads: int) -> GPT2Config:
    return GPT2Config(
        vocab_size=50257, n_positions=1024, n_embd=width, n_layer=layers, n_head=heads
    )


def t5(width: int, inner: int, layers: int, heads: int, head: int) -> T5Config:
    return T5Config(
        vocab_size=32128, d_model=width, d_ff=inner, num_layers=layers, num_heads=heads, d_kv=head
    )


BASE, LARGE = encoder(768, 12, 12, 3072), encoder(1024, 24, 16, 4096)
DEVLIN = "Devlin et al. 2018, §3"
LIU = "Liu et al. 2019, §5; base: its model card"
LAN = "Lan et al. 2019, table 1"
CLARK = "Clark et al. 2020, tables 1 and 2"
RADFORD = "Radford et al. 2019, table 2"
LEWIS = "Lewis et al. 2019; figures of its model cards"
RAFFEL = "Raffel et al. 2019, §3.7"
#: (family, size, class, configuration, millions in the paper, where).
PUBLISHED = [
    ("BERT", "base", "BertModel", BertConfig(**BASE), 110, DEVLIN),
    ("BERT", "large", "BertModel", BertConfig(**LARGE), 340, DEVLIN),
    ("RoBERTa", "base", "RobertaModel", roberta(**BASE), 125, LIU),
    ("RoBERTa", "large", "RobertaModel", roberta(**LARGE), 355, LIU),
    ("ALBERT", "base", "AlbertModel", albert(**BASE), 12, LAN),
    ("ALBERT", "large", "AlbertModel", albert(**LARGE), 18, LAN),
    ("ALBERT", "xlarge", "AlbertModel", albert(**encoder(2048, 24, 16, 8192)), 60, LAN),
    ("ALBERT", "xxlarge", "AlbertModel", albert(**encoder(4096, 12, 64, 16384)), 235, LAN),
    ("ELECTRA", "small", "ElectraForPreTraining",
     ElectraConfig(**encoder(256, 12, 4, 1024, embedding_size=128)), 14, CLARK),
    ("ELECTRA", "base", "ElectraForPreTraining",
     ElectraConfig(**BASE, embedding_size=768), 110, CLARK),
    ("ELECTRA", "large", "ElectraForPreTraining",
     ElectraConfig(**LARGE, embedding_size=1024), 335, CLARK),
    ("GPT", "", "OpenAIGPTLMHeadModel", OpenAIGPTConfig(), 117, RADFORD),
    ("GPT-2", "small", "GPT2LMHeadModel", gpt2(768, 12, 12), 117, RADFORD),
    ("GPT-2", "medium", "GPT2LMHeadModel", gpt2(1024, 24, 16), 345, RADFORD),
    ("GPT-2", "large", "GPT2LMHeadModel", gpt2(1280, 36, 20), 762, RADFORD),
    ("GPT-2", "xl", "GPT2LMHeadModel", gpt2(1600, 48, 25), 1542, RADFORD),
    ("BART", "base", "BartForConditionalGeneration", bart(768, 6, 12), 140, LEWIS),
    ("BART", "large", "BartForConditionalGeneration", bart(1024, 12, 16), 400, LEWIS),
    ("T5", "small", "T5ForConditionalGeneration", t5(512, 2048, 6, 8, 64), 60, RAFFEL),
    ("T5", "base", "T5ForConditionalGeneration", t5(768, 3072, 12, 12, 64), 220, RAFFEL),
    ("T5", "large", "T5ForConditionalGeneration", t5(1024, 4096, 24, 16, 64), 770, RAFFEL),
    ("T5", "3B", "T5ForConditionalGeneration", t5(1024, 16384, 24, 32, 128), 2800, RAFFEL),
    ("T5", "11B", "T5ForConditionalGeneration", t5(1024, 65536, 24, 128, 128), 11000, RAFFEL),
]  # fmt: skip


@functools.cache
def count(row: int) -> int:
    """The number of parameters, tied ones once, on the meta device."""
    _, _, name, config, _, _ = PUBLISHED[row]
    with torch.device("meta"):
        model = getattr(models, name)(config)
    return sum(parameter.numel() for parameter in model.parameters())


def table() -> str:
    lines = [
        "| family | size | class | parameters | paper | source |",
        "|---|---|---|---:|---:|---|",
    ]
    for row, (family, size, name, _, paper, source) in enumerate(PUBLISHED):
        figure = f"{paper / 1000:g}B" if paper >= 1000 else f"{paper}M"
        lines.append(f"| {family} | {size} | `{name}` | {count(row):,} | {figure} | {source} |")
    return "\n".join(lines) + "\n"


def test_the_table_in_the_docs_holds_what_is_computed():
    text = DOC.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == table()


def test_a_count_is_that_of_its_own_row_in_the_paper():
    """The count of a model is nearest to its own figure, among all figures of its paper."""
    for row, (family, size, _, _, paper, _) in enumerate(PUBLISHED):
        computed = math.log(count(row) / 1e6)
        figures = [other[4] for other in PUBLISHED if other[0] == family]
        nearest = min(figures, key=lambda figure: abs(math.log(figure) - computed))
        assert nearest == paper, (family, size)


def test_every_class_is_in_the_docs():
    text = DOC.read_text(encoding="utf-8")
    assert [name for name in models.__all__ if f"`{name}`" not in text] == []


if __name__ == "__main__":
    print(table(), end="")
