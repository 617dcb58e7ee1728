"""Folders of sentence-transformers: the vectors of its own ``encode``, or a field that is named."""

from __future__ import annotations

import json

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from fastplm import cli
from fastplm.errors import ArgumentValueError, DataError
from fastplm.inference.columns import TextEmbedder
from fastplm.inference.embed import embed
from fastplm.inference.sentence_folder import sentence_transformers_settings
from fastplm.models import AutoModel

from ..models.conftest import pair

TEXTS = ["ab cde", "p", "abc defg hi klm", "fg fg Fgh", "a b c d e f g h i j k l m n o p " * 3]
NEW = "sentence_transformers.sentence_transformer.modules."
STEPS = {
    "Transformer": {"type": "sentence_transformers.models.Transformer", "path": ""},
    "Pooling": {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    "Normalize": {"type": "sentence_transformers.models.Normalize", "path": "2_Normalize"},
    "Dropout": {"type": f"{NEW}dropout.Dropout", "path": "3_Dropout"},
}
FILES = {
    "modules": "modules.json",
    "transformer": "sentence_bert_config.json",
    "roberta": "sentence_roberta_config.json",
    "encode": "config_sentence_transformers.json",
    "pooling": "1_Pooling/config.json",
    "normalize": "2_Normalize/config.json",
    "dropout": "3_Dropout/config.json",
    "tokens": "tokenizer_config.json",
}
MEAN = {"embedding_dimension": 16, "pooling_mode": "mean"}
STATES = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}


def steps(*names):
    return [
        {"idx": i, "name": str(i), **(STEPS[name] if isinstance(name, str) else name)}
        for i, name in enumerate(names)
    ]


def step(kind, path="4_Step"):
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


@pytest.fixture
def write(tokenizer, tmp_path):
    """Writes a folder: a BERT of 20 positions, its tokenizer of 16 tokens, and the files given."""

    def folder(name="BertForMaskedLM", **files):
        pair(name)[0].save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        whole = {"modules": steps("Transformer", "Pooling"), "pooling": MEAN, **files}
        for file, content in whole.items():
            path = tmp_path / FILES[file]
            path.parent.mkdir(exist_ok=True)
            old = json.loads(path.read_text()) if file == "tokens" else {}
            path.write_text(json.dumps({**old, **content} if old else content))
        return tmp_path

    return folder


NORMAL = steps("Transformer", "Pooling", "Normalize")
OBEYED = {
    "mean": {},
    "normalized": {"modules": NORMAL},
    "normalized twice, dropout": {
        "modules": steps("Transformer", "Pooling", "Dropout", "Normalize", "Normalize"),
        "dropout": {"dropout": 0.5},
        "normalize": {"module_input_name": "sentence_embedding", "module_output_name": None},
    },
    "max_seq_length below": {"transformer": {"max_seq_length": 8, "do_lower_case": False}},
    "max_seq_length above the tokenizer's": {"transformer": {"max_seq_length": 20}},
    "max_seq_length null": {"transformer": {"max_seq_length": None}},
    "the tokenizer's own length": {"transformer": {}},
    "the name of RoBERTa's file": {"roberta": {"max_seq_length": 7}},
    "the first of both files": {
        "transformer": {"max_seq_length": 9},
        "roberta": {"max_seq_length": 7},
    },
    "an empty file, and another": {"transformer": {}, "roberta": {"max_seq_length": 7}},
    "what 6.2 writes": {
        "modules": steps(
            {"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""},
            {"type": f"{NEW}pooling.Pooling", "path": "1_Pooling"},
        ),
        "transformer": {
            "transformer_task": "feature-extraction",
            "modality_config": STATES,
            "module_output_name": "token_embeddings",
        },
        "pooling": MEAN | {"include_prompt": True},
        "encode": {
            "__version__": {"sentence_transformers": "6.2.0", "pytorch": "2.13.0"},
            "model_type": "SentenceTransformer",
            "prompts": {"query": "", "document": "d: "},
            "default_prompt_name": None,
            "similarity_fn_name": "dot",
        },
    },
    "lengths of queries, and speed": {
        "transformer": {"query_length": 4, "document_length": 5, "unpad_inputs": False}
    },
    "an empty prompt": {"encode": {"prompts": {"q": ""}, "default_prompt_name": "q"}},
    "no prompt of a query": {"encode": {"default_prompt_name": "query"}},
    "similarity": {"encode": {"similarity_fn_name": "euclidean"}},
    "arguments that say nothing": {
        "transformer": {"max_seq_length": 12}
        | dict.fromkeys(("model_args", "tokenizer_args", "config_args", "processing_kwargs"), {})
    },
    **{
        f"pooling {mode}": {"pooling": MEAN | {"pooling_mode": mode}}
        for mode in ("cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    },
    "several poolings, in their order": {
        "pooling": MEAN | {"pooling_mode": ["lasttoken", "cls", "mean"]}
    },
    "switches": {
        "pooling": {
            "word_embedding_dimension": 16,
            "pooling_mode_lasttoken": True,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_cls_token": True,
            "pooling_mode_max_tokens": False,
        }
    },
    "no switch": {"pooling": {"word_embedding_dimension": 16, "pooling_mode_cls_token": False}},
    "a switch and a mode": {"pooling": MEAN | {"pooling_mode_cls_token": True}},
}


LONG = {"transformer": {"max_seq_length": 18}}
OTHERS = ("RobertaForMaskedLM", "T5ForConditionalGeneration", "GPT2Model")


@pytest.mark.filterwarnings("ignore:.*were cut off")
@pytest.mark.parametrize(
    "name, files",
    [*(("BertForMaskedLM", files) for files in OBEYED.values()), *((n, LONG) for n in OTHERS)],
    ids=[*OBEYED, *OTHERS],
)
def test_the_vectors_of_encode(name, files, write):
    folder = write(name, **files)
    theirs = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    ours = TextEmbedder(folder)({"text": TEXTS})["embedding"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


REFUSED = {
    "Transformer.do_lower_case=True": {"transformer": {"do_lower_case": True}},
    "Transformer.max_seq_length=-1": {"transformer": {"max_seq_length": -1}},
    "Transformer.max_seq_length='60'": {"transformer": {"max_seq_length": "60"}},
    "Transformer.transformer_task='fill-mask'": {"transformer": {"transformer_task": "fill-mask"}},
    "Transformer.modality_config=": {
        "transformer": {"modality_config": {"text": {"method": "forward"}}}
    },
    "Transformer.module_output_name='scores'": {"transformer": {"module_output_name": "scores"}},
    "Transformer.processing_kwargs=": {
        "transformer": {"processing_kwargs": {"text": {"padding": "max_length"}}}
    },
    "Transformer.model_args=": {"transformer": {"model_args": {"dtype": "bfloat16"}}},
    "Transformer.tokenizer_args=": {"transformer": {"tokenizer_args": {"do_lower_case": True}}},
    "Transformer.config_args=": {"transformer": {"config_args": {"num_hidden_layers": 1}}},
    "Transformer.tokenizer_name_or_path='x'": {"transformer": {"tokenizer_name_or_path": "x"}},
    "Transformer.invented=1": {"roberta": {"invented": 1}},
    "Transformer.path": {"modules": steps(step("Transformer", "1_Pooling"), "Pooling")},
    "Pooling.pooling_mode=['median']": {"pooling": MEAN | {"pooling_mode": "median"}},
    "Pooling.pooling_mode=[]": {"pooling": MEAN | {"pooling_mode": []}},
    "Pooling.pooling_mode=[['cls']]": {"pooling": MEAN | {"pooling_mode": [["cls"]]}},
    "Pooling.pooling_mode=['mean'], with no file": {"pooling": {}},
    "Pooling.pooling_mode_median=True": {"pooling": MEAN | {"pooling_mode_median": True}},
    "Normalize.module_input_name='token_embeddings'": {
        "modules": NORMAL,
        "normalize": {"module_input_name": "token_embeddings"},
    },
    "Normalize.module_output_name='other'": {
        "modules": NORMAL,
        "normalize": {"module_output_name": "other"},
    },
    "default_prompt_name='q'": {
        "encode": {"prompts": {"q": "query: "}, "default_prompt_name": "q"},
        "pooling": MEAN | {"include_prompt": False},
    },
    "default_prompt_name='none'": {"encode": {"default_prompt_name": "none"}},
    "truncate_dim=8": {"encode": {"truncate_dim": 8}},
    "model_type='SparseEncoder'": {"encode": {"model_type": "SparseEncoder"}},
    "requirements=": {"encode": {"requirements": {"transformers": ">=99"}}},
    "Transformer in this order": {"modules": steps("Transformer")},
    "Pooling and Transformer in this order": {"modules": steps("Pooling", "Transformer")},
    "Transformer and Normalize and Pooling in this order": {
        "modules": steps("Transformer", "Normalize", "Pooling")
    },
    "other.Pooling": {"modules": steps("Transformer", {"type": "other.Pooling", "path": ""})},
    **{
        f"sentence_transformers.models.{kind}": {
            "modules": steps("Transformer", "Pooling", step(kind))
        }
        for kind in (
            *("Dense", "LayerNorm", "WeightedLayerPooling", "Router", "Asym", "CNN", "LSTM", "BoW"),
            *("WordWeights", "WordEmbeddings", "StaticEmbedding", "CLIPModel", "SpladePooling"),
        )
    },
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_computed_is_named(said, write, tmp_path, capsys):
    folder = write(**REFUSED[said])
    name = said.partition(", with")[0]
    with pytest.raises(DataError) as raised:
        sentence_transformers_settings(folder)
    assert f"whose files ask for {name}" in str(raised.value) or f" and {name}" in str(raised.value)
    assert "name --pooling: then its files are not read" in str(raised.value)
    (tmp_path / "texts.txt").write_text("ab\n")
    words = ["embed", "--model", folder, "--data", folder / "texts.txt", "--out", folder / "v.npy"]
    assert cli.main([*map(str, words)]) == 2 and name in capsys.readouterr().err
    assert cli.main([*map(str, words), "--pooling", "cls"]) == 0


def test_the_decoder_of_which_it_takes_the_states_is_named(write):
    with pytest.raises(DataError, match="ask for the decoder of bart"):
        sentence_transformers_settings(write("BartModel"))


@pytest.mark.parametrize(
    "file, content",
    [
        ("modules", {}),
        ("modules", [{"type": "sentence_transformers.models.Transformer"}]),
        ("modules", ["Transformer"]),
        ("pooling", ["mean"]),
        ("encode", 5),
    ],
)
def test_damaged_files_are_named(file, content, write):
    with pytest.raises(DataError, match=FILES[file]):
        sentence_transformers_settings(write(**{file: content}))


def test_the_command_obeys_the_files(write, tmp_path, capsys):
    """Texts are cut off where sentence-transformers ends in an IndexError."""
    assert sentence_transformers_settings(tmp_path) is None
    folder = write(modules=NORMAL, transformer={"max_seq_length": 1000})
    assert sentence_transformers_settings(folder)["max_length"] == 20
    texts = ["a " * 30, "ab"]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    words = ["embed", "--model", folder, "--data", folder / "texts.txt", "--out", folder / "v.npy"]
    assert cli.main([*map(str, words)]) == 0
    assert "1 of 2 texts were cut off after 20 tokens." in capsys.readouterr().err
    known = TextEmbedder(folder)({"text": texts})["embedding"]
    assert np.array_equal(np.load(folder / "v.npy"), known)


def test_a_length_of_the_caller_is_stronger_than_the_tokenizers(tokenizer):
    model = AutoModel.from_config(pair("BertModel")[0].config)
    text = ["a " * 30]
    with pytest.warns(UserWarning, match="after 19 tokens"):
        longer = embed(model, tokenizer, text, max_length=19)
    with pytest.warns(UserWarning, match="after 16 tokens"):
        assert not np.array_equal(longer, embed(model, tokenizer, text))
    with pytest.raises(ArgumentValueError, match="expected 3 to 20, what this model takes"):
        embed(model, tokenizer, text, max_length=21)
