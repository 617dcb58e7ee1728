"""Tokenizers and models of a fine-tuning: what is put around texts, which weights are new."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers
from tokenizers.processors import TemplateProcessing

import fastplm.models
from fastplm.data import load_tokenizer, train_tokenizer
from fastplm.errors import ArgumentValueError, DataError
from fastplm.finetune.data import prepare_task
from fastplm.finetune.models import DELIMITER, EXTRACT, START, build_model
from fastplm.finetune.run import finetune
from fastplm.finetune.settings import LIBRARIES

from .conftest import NOUNS, TAGS, copied, gpt2


def test_initial_weights_are_those_of_transformers(arguments):
    pair = []
    for library in LIBRARIES:
        args = arguments("tagging", library=library, dropout=0.25)
        model = build_model(prepare_task(args), seed=5)
        assert model.dropout.p == model.bert.encoder.layer[0].attention.output.dropout.p == 0.25
        pair.append(model)
    ours, theirs = pair
    assert type(ours) is fastplm.models.BertForTokenClassification
    assert type(theirs) is transformers.BertForTokenClassification
    assert (
        ours.config.id2label == theirs.config.id2label == dict(enumerate(sorted({*TAGS.values()})))
    )
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)


@pytest.mark.parametrize("family", ["own class", "no class"])
def test_tags_of_a_byte_level_tokenizer(family, arguments, checkpoint, tmp_path):
    """Words have the tokens that they have in a text, also those of the saved tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("bert"), folder)
    own = train_tokenizer(NOUNS * 9, 400, tmp_path / "cache", "bytelevel")
    if family == "no class":
        own = transformers.PreTrainedTokenizerFast(
            tokenizer_object=own.backend_tokenizer, **own.special_tokens_map
        )
    (folder / "tokenizer.json").unlink()
    own.save_pretrained(folder)
    tokenizer = prepare_task(arguments("tagging", folder)).tokenizer
    tokenizer.save_pretrained(tmp_path / "saved")
    inside = own(" " + " ".join(NOUNS))["input_ids"]
    for each in (tokenizer, load_tokenizer(tmp_path / "saved", ())):
        assert each(NOUNS, is_split_into_words=True)["input_ids"] == inside


def test_two_texts_are_kept_apart(arguments):
    """Both texts are as in figure 1 of the paper, also with the saved tokenizer."""
    ends = {"gpt2": "", "gpt": "</w>"}
    for family, end in ends.items():
        task = prepare_task(arguments("pair", family))
        (first, *_), _ = task.features(task.train)
        tokens = task.tokenizer.convert_ids_to_tokens(first["input_ids"])
        assert tokens == [START, "a", f"b{end}", DELIMITER, "c", f"d{end}", EXTRACT]
        assert "token_type_ids" not in first or set(first["token_type_ids"]) == {0}
        task = prepare_task(arguments("classification", family))
        (first, *_), _ = task.features(task.train)
        tokens = task.tokenizer.convert_ids_to_tokens(first["input_ids"])
        assert tokens == [START, "a", "b", f"c{end}", EXTRACT]


def test_long_texts_are_cut_before_the_extract_token(arguments, tmp_path):
    path = tmp_path / "long"
    path.write_text(f"text1\ttext2\tlabel\n{'a' * 40}\t{'b' * 40}\t0\na\tb\t1\n")
    task = prepare_task(arguments("pair", "gpt2", data=path, max_length=16, eval_data=copied(path)))
    (first, _), _ = task.features(task.train)
    tokens = task.tokenizer.convert_ids_to_tokens(first["input_ids"])
    assert len(tokens) == 16 and tokens[0] == START and tokens[-1] == EXTRACT
    assert tokens[1:-1].count("a") >= 6 and tokens[1:-1].count("b") >= 6 and DELIMITER in tokens


def test_a_tokenizer_that_glues_two_texts_is_refused(arguments, files, tmp_path):

    tokenizer, model = gpt2()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A",
        pair="<|endoftext|> $A $B",
        special_tokens=[("<|endoftext|>", 0)],
    )
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match="puts nothing between them"):
        prepare_task(arguments("pair", tmp_path, data=files["letters pair"]))
    prepare_task(arguments("classification", tmp_path, data=files["letters classification"]))


def test_the_extract_token_is_classified(arguments):
    """The head gets no other state, also in padded batches."""
    for family in ("gpt2", "gpt"):
        args = arguments("pair", family, dropout=0.0)
        task = prepare_task(args)
        model = build_model(task, 0).eval()
        features, _ = task.features(task.train)
        batch = task.collator()([dict(feature) for feature in features[:6]])
        assert len(set(batch["attention_mask"].sum(-1).tolist())) > 1
        batch.pop("labels")
        extract = task.tokenizer.convert_tokens_to_ids(EXTRACT)
        hidden = model.base_model(**batch).last_hidden_state
        state = hidden[batch["input_ids"] == extract]
        assert state.shape[0] == 6
        torch.testing.assert_close(model(**batch).logits, model.score(state))


def test_from_scratch(arguments, checkpoint):
    """The model has the sizes of the checkpoint but none of its weights; each seed draws others."""
    metrics = finetune(arguments("choice", "gpt2", from_scratch=True, steps=1))
    assert metrics["arguments"]["from_scratch"] is True
    before = transformers.AutoModel.from_pretrained(checkpoint("gpt2")).state_dict()
    for task in ("choice", "pair"):
        for library in LIBRARIES:
            args = arguments(task, "gpt2", from_scratch=True, library=library)
            prepared = prepare_task(args)
            first, again, other = (build_model(prepared, seed) for seed in (5, 5, 6))
            name = "h.0.mlp.c_fc.weight"
            weights = [model.base_model.state_dict()[name] for model in (first, again, other)]
            assert torch.equal(weights[0], weights[1]) and weights[0].shape == before[name].shape
            assert not torch.equal(weights[0], weights[2])
            assert not torch.equal(weights[0], before[name])


def test_wrong_models(arguments, checkpoint, tmp_path):
    with pytest.raises(DataError, match="a directory that tokenizer.save_pretrained wrote"):
        finetune(arguments("tagging", tmp_path / "missing"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("bert"))
    config = transformers.AutoConfig.from_pretrained(checkpoint("bert"))
    for name, lacks, expected in (
        ("other", "", r"lacks \d+ weights of a \w+, such as bert\."),
        ("small", "embeddings", "a tokenizer of"),
    ):
        path = tmp_path / name
        if lacks:
            config.vocab_size = 20
            transformers.BertModel(config).save_pretrained(path)
        else:
            model = transformers.BertModel(config)
            state = {f"encoder.{key}": value for key, value in model.state_dict().items()}
            model.save_pretrained(path, state_dict=state)
        tokenizer.save_pretrained(path)
        with pytest.raises(DataError, match=expected):
            build_model(prepare_task(arguments("tagging", path)), 0)
    path = tmp_path / "xlnet"
    small = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16, "vocab_size": 80}
    config = transformers.XLNetConfig(**small)
    transformers.XLNetModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    with pytest.raises(DataError, match="a XLNetForTokenClassification; .*--library"):
        build_model(prepare_task(arguments("tagging", path)), 0)
    build_model(prepare_task(arguments("tagging", path, library="transformers")), 0)


def test_options_that_a_model_lacks(arguments, checkpoint, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("bert"))
    tokenizer.save_pretrained(tmp_path)
    transformers.GPT2Config(vocab_size=len(tokenizer), n_layer=1).save_pretrained(tmp_path)
    for name, value in {"freeze": True, "pooling": "mean", "head": "bilstm"}.items():
        args = arguments("classification", tmp_path, **{name: value})
        with pytest.raises(ArgumentValueError, match=f"`{name}` got .*gpt2; expected an encoder"):
            prepare_task(args)
    for options in ({"both_orders": True}, {"lm_weight": 0.5}):
        (name,) = options
        with pytest.raises(ArgumentValueError, match=f"`{name}` got .*bert; expected a GPT"):
            prepare_task(arguments("pair", **options))
