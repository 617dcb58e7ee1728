"""A tokenizer of letters, texts of different lengths, and small models of every family."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from fastplm.testing import check_in_fp64

LETTERS = "abcdefghijklmnop"
#: Texts of different lengths, in no order; one has no letter, one occurs twice.
TEXTS = ["ab cde", "p", "abc defg hi klm", "", "fg fg fgh", "p", "olm nop bad", "k lm"]

#: Sizes of small models: of encoders, GPT-2, BART and T5.
SMALL = dict(
    num_hidden_layers=2,
    num_attention_heads=2,
    hidden_size=16,
    intermediate_size=24,
    max_position_embeddings=64,
    initializer_range=0.3,
)
GPT = dict(n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3)
BART = dict(
    d_model=16,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=64,
    init_std=0.3,
)
T5 = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each letter, and at most 16 tokens of a text."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.Replace("\u200b", "")
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_max_length=16,
    )


def states_of(parent, ids):
    """A model's hidden states of one text: [T, E] of each layer."""
    backbone = parent.encoder if parent.config.is_encoder_decoder else parent
    with torch.no_grad():
        outputs = backbone(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return [state[0] for state in outputs.hidden_states]


def hold(model, parent, ours, theirs):
    """Checks that ``ours(model)`` equals ``theirs(parent)`` in fp64."""
    out = torch.as_tensor(ours(model.double()))
    gold, single = theirs(parent.double()), theirs(parent.float())
    check_in_fp64({"result": out}, {"result": gold}, {"result": single})
