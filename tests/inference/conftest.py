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
