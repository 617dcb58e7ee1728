"""A tokenizer of letters, texts of different lengths, and small models of every family."""

from __future__ import annotations

import copy
import csv
import io

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import fastplm.models
from fastplm.data import train_tokenizer
from fastplm.testing import check_in_fp64

from ..models.conftest import in_double

LETTERS = "abcdefghijklmnop"
#: Texts of different lengths, in no order; one has no letter, one occurs twice.
TEXTS = ["ab cde", "p", "abc defg hi klm", "", "fg fg fgh", "p", "olm nop bad", "k lm"]
#: The same of lists of words; some have no token, some no word.
WORDS = [["ab", "c"], [], ["\u200b", "klm", "d"], ["p"], ["hi"] * 4]

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
#: Language models: their configuration, its sizes, and the kind of their tokenizer.
MASKED = {
    "BertForMaskedLM": ("BertConfig", SMALL, "wordpiece"),
    "AlbertForMaskedLM": ("AlbertConfig", SMALL | dict(embedding_size=8), "unigram"),
    "ElectraForMaskedLM": ("ElectraConfig", SMALL | dict(embedding_size=8), "wordpiece"),
    "RobertaForMaskedLM": ("RobertaConfig", SMALL, "bytelevel"),
}
DECODERS = {
    "GPT2LMHeadModel": ("GPT2Config", GPT, "bytelevel"),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", GPT, "wordpiece"),
    "BertLMHeadModel": ("BertConfig", SMALL | dict(is_decoder=True), "wordpiece"),
    "BartForCausalLM": ("BartConfig", BART, "bytelevel"),
}
PAIRED = {
    "BartForConditionalGeneration": ("BartConfig", BART, "bytelevel"),
    "T5ForConditionalGeneration": ("T5Config", T5, "unigram"),
    "EncoderDecoderModel": ("EncoderDecoderConfig", SMALL, "wordpiece"),
}
_DISCRIMINATOR = {"ElectraForPreTraining": MASKED["ElectraForMaskedLM"]}
_ALL = MASKED | DECODERS | PAIRED | _DISCRIMINATOR
#: Vocabularies of each kind of tokenizer, so small that words have several tokens.
_VOCABULARY = {"wordpiece": 60, "bytelevel": 285, "unigram": 130}
# Words consist of letters alone, so that a tokenizer's marks tell where words begin.
_CORPUS = (
    *("the lazy foxes jump", "the lazy dogs jumps", "a", "unbelievably lazy", "dogs  and dogs"),
    *("the lazy dogs jump", "a fox", "a dog", "over and over", "foxes over dogs"),
    *("jumping", "believe", "able", "lazily"),
)


@pytest.fixture(scope="session")
def words_of(tmp_path_factory):
    """A small tokenizer of each kind."""
    cache, found = tmp_path_factory.mktemp("tokenizers"), {}
    for kind, size in _VOCABULARY.items():
        found[kind] = train_tokenizer([*_CORPUS] * 3, size, cache, kind)
    found["unigram"].add_special_tokens({"mask_token": "<extra_id_0>"})
    return found


@pytest.fixture(scope="session")
def made(words_of):
    """(a drop-in model, its parent with the same weights, the tokenizer), by the class's name."""

    def build(name):
        kind, sizes, vocabulary = _ALL[name]
        tokenizer = words_of[vocabulary]
        special = {
            f"{role}_token_id": getattr(tokenizer, f"{role}_token_id")
            for role in ("bos", "eos", "pad")
        }
        if kind == "EncoderDecoderConfig":
            part = transformers.BertConfig(vocab_size=len(tokenizer), pad_token_id=0, **sizes)
            config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
                part, copy.deepcopy(part)
            )
            config.decoder_start_token_id = tokenizer.cls_token_id
            config.pad_token_id = tokenizer.pad_token_id
        else:
            config = getattr(transformers, kind)(vocab_size=len(tokenizer), **special | sizes)
        torch.manual_seed(0)
        model = getattr(fastplm.models, name)(copy.deepcopy(config))
        parent = getattr(transformers, name)(copy.deepcopy(config)).eval()
        parent.set_attn_implementation("eager")
        if hasattr(model, "final_logits_bias"):
            torch.nn.init.normal_(model.final_logits_bias)
        parent.load_state_dict(model.state_dict())
        return model, parent, tokenizer

    return build


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


def pooled(rows, kind):
    """[T, E] -> [E], as the name says."""
    order = torch.arange(1, len(rows) + 1, dtype=rows.dtype)[:, None]
    return {
        "mean": lambda: rows.mean(0),
        "cls": lambda: rows[0],
        "first": lambda: rows[0],
        "last": lambda: rows[-1],
        "max": lambda: rows.max(0).values,
        "sum": lambda: rows.sum(0),
        "mean_sqrt_len": lambda: rows.sum(0) / len(rows) ** 0.5,
        "weighted_mean": lambda: (rows * order).sum(0) / order.sum(),
    }[kind]()


def of_texts(parent, tokenizer, layers=(-1,), kinds=("mean",)):
    vectors = []
    for text in TEXTS:
        states = states_of(parent, tokenizer(text)["input_ids"])
        vectors.append(torch.cat([pooled(states[i], kind) for kind in kinds for i in layers]))
    return torch.stack(vectors)


def hold(model, parent, ours, theirs):
    """Checks that ``ours(model)`` equals ``theirs(parent)`` in fp64."""
    with in_double(model):
        out = torch.as_tensor(ours(model.double()))
        gold = theirs(parent.double())
    single = theirs(parent.float())
    check_in_fp64({"result": out}, {"result": gold}, {"result": single})


def rows_of(text):
    """The rows of a table with tabs, by the names of its columns."""
    return list(csv.DictReader(io.StringIO(text), delimiter="\t"))


def saved(folder, *parts):
    """Save a model and its tokenizer; gives the folder."""
    for part in parts:
        part.save_pretrained(folder)
    return folder


def loaded(folder, kind):
    """A model of a class, and its tokenizer, from a folder."""
    return kind.from_pretrained(folder), transformers.AutoTokenizer.from_pretrained(folder)
