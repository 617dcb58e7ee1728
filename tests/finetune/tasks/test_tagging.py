"""Tags of words."""

from __future__ import annotations

import pytest
import torch

from fastplm.errors import DataError
from fastplm.finetune.data import prepare_task
from fastplm.finetune.run import finetune

from ...commands import TellsNoRest
from ..conftest import copied


def test_each_word_has_one_label(arguments):
    """A word has the label of its first token, also if the word or sentence continues in another
    feature."""
    for length in (16, 64):
        task = prepare_task(arguments("tagging", max_length=length))
        task.tokenizer = TellsNoRest(task.tokenizer)
        features, notes = task.features(task.train)
        assert (len(features) > len(task.train)) == (length == 16)
        words = [(i, j) for i, example in enumerate(task.train) for j in range(len(example.texts))]
        assert [place[:2] for places in notes for place in places] == words
        for feature, places in zip(features, notes, strict=True):
            labelled = [i for i, label in enumerate(feature["labels"]) if label != -100]
            assert labelled == [place for _, _, place in places]
            tokens = task.tokenizer.convert_ids_to_tokens(feature["input_ids"])
            assert any(token.startswith("##") for token in tokens)
            assert not any(tokens[place].startswith("##") for place in labelled)


def test_words_without_tokens(arguments, tmp_path):
    path = tmp_path / "tags.txt"
    path.write_text("\u200b\tX\n\u200b\tY\n" * 2)
    task = prepare_task(arguments("tagging", data=path, eval_data=copied(path)))
    with pytest.raises(DataError, match=":1: words of which the tokenizer makes no token"):
        task.features(task.train)


def test_a_tagger_of_entities(arguments, tmp_path):
    """The first score is F1 of entities; a word without a token is outside of all."""
    words = "anna sees bern and carl sees oslo".split()
    tags = "B-PER O B-LOC O B-PER O B-LOC".split()
    sentences = ["\n".join(f"{w}\t{t}" for w, t in zip(words, tags, strict=True))] * 20
    data = tmp_path / "tags.tsv"
    data.write_text("\n\n".join(sentences))
    args = arguments("tagging", data=data, steps=1)
    metrics = finetune(args)
    assert metrics["main_score"] == "f1" and metrics["most_frequent_label"] is None
    assert [*metrics["scores"]] == ["f1", "precision", "recall", "accuracy"]
    assert metrics["chance"] == 0.0
    task = prepare_task(args)
    examples = task.test[:1]
    _, notes = task.features(examples)
    logits = torch.zeros(64, len(task.names))
    for _, word, place in notes[0]:
        logits[place, task.ids[tags[word]]] = 1.0
    notes[0] = [note for note in notes[0] if note[1] != 2]  # "bern" has no prediction
    scores, predictions = task.score(examples, notes, [(logits,)])
    # Three of four entities were said, all of them right.
    assert scores == pytest.approx(
        {"f1": 6 / 7, "precision": 1.0, "recall": 3 / 4, "accuracy": 6 / 7}
    )
    assert predictions[0][2] is None
