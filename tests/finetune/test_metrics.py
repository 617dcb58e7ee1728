"""The metrics, by hand, and as the usual packages compute them."""

from __future__ import annotations

import random

import pytest
import torch

from fastplm.finetune.metrics import (
    entities,
    entity_scores,
    exact_match,
    f1,
    mark_entities,
    matthews,
    null_threshold,
    pearson,
    ranks,
    text_scores,
    words_f1,
)


def test_f1_by_hand():
    # Three predictions are 1, two of them right; one label 1 was missed: 2*2 / (3 + 3).
    assert f1([1, 1, 1, 0, 0], [1, 1, 0, 1, 0], 2) == 2 / 3
    assert f1([0, 0], [0, 0], 2) == 0
    # Class 0: 1; class 1: 2*1 / (1 + 2); class 2: 0.
    assert f1([0, 1, 2], [0, 1, 1], 3) == (1 + 2 / 3 + 0) / 3


def test_matthews_by_hand():
    # Two classes: 2 true, 1 false and 1 missed of class 1, 1 true of class 0:
    # (2*1 - 1*1) / sqrt(3 * 3 * 2 * 2).
    assert matthews([1, 1, 1, 0, 0], [1, 1, 0, 1, 0]) == pytest.approx(1 / 6)
    assert matthews([1, 0, 0], [0, 1, 1]) == -1 and matthews([2, 0, 1], [2, 0, 1]) == 1
    assert matthews([1, 1, 1], [1, 1, 0]) == 0
    # Three classes, s = 4, c = 3, p = (1, 2, 1), t = (1, 1, 2): (12 - 5) / (16 - 6).
    assert matthews([0, 1, 2, 1], [0, 1, 2, 2]) == 0.7


def test_correlations_by_hand():
    # Deviations (-2, 0, 2) and (-1, -1, 2): (2 + 4) / sqrt(8 * 6).
    assert pearson([1.0, 3.0, 5.0], [2.0, 2.0, 5.0]) == pytest.approx(6 / 48**0.5)
    assert pearson([1.0, 1.0], [2.0, 5.0]) == 0
    assert ranks([0.5, 2.0, -1.0, 2.0]) == [2.0, 3.5, 1.0, 3.5]


def test_correlations_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    values = torch.randn(2, 50, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    found, right = values.tolist()
    assert pearson(found, right) == pytest.approx(stats.pearsonr(found, right)[0])
    spearman = pearson(ranks(found), ranks(right))
    assert spearman == pytest.approx(stats.spearmanr(found, right)[0])


def test_squad_scores():
    """The scores are computed by hand, with the definition of the evaluation script."""
    assert exact_match("The  Cat!", "a cat") == 1 and exact_match("cats", "cat") == 0
    # Two of "big black cat" (3 words) and "black cat sat down" (4 words) are common: 2*2/7.
    assert words_f1("the big, black cat", "Black cat sat down") == 4 / 7
    assert words_f1("dog dog", "dog") == 2 / 3
    assert words_f1("dog", "cat") == words_f1("", "cat") == 0
    assert words_f1("the", "") == 1  # "the" is no word, as in the evaluation script
    assert exact_match("theory", "ory") == 0


def test_null_threshold_by_hand():
    """Two of five questions have no answer: to answer one loses the point for leaving it open."""
    differences = [-3.0, -1.0, 0.5, 2.0, 2.0]
    # To answer up to 0.5 gains 1 - 1 + 0.8; the two questions at 2.0 together lose 0.4 - 1.
    assert null_threshold(differences, [1.0, -1.0, 0.8, 0.4, -1.0]) == -3.0
    assert null_threshold(differences, [1.0, -0.5, 0.8, 0.4, -1.0]) == 0.5
    assert null_threshold(differences, [1.0, -1.0, 0.8, 0.4, 1.0]) == 2.0
    assert null_threshold(differences, [-1.0, -1.0, 0.8, 0.4, -1.0]) == -4.0


def test_entities_by_hand():
    tags = "B-PER I-PER O I-LOC B-LOC I-PER I-PER B-PER".split()
    found = {("PER", 0, 1), ("LOC", 3, 3), ("LOC", 4, 4), ("PER", 5, 6), ("PER", 7, 7)}
    assert entities(tags) == found
    assert entities("S-A B-A E-A I-A O".split()) == {("A", 0, 0), ("A", 1, 2), ("A", 3, 3)}
    assert entities([]) == entities(["O", "O"]) == set()


def test_entity_scores_by_hand():
    """Two entities are said and three are true; one has the right kind and both ends."""
    right = ["B-PER I-PER O B-LOC".split(), "B-LOC O".split()]
    found = ["B-PER I-PER O B-PER".split(), "O O".split()]
    scores = {"f1": 2 / 5, "precision": 1 / 2, "recall": 1 / 3}
    assert entity_scores(found, right) == pytest.approx(scores)
    nothing = [["O"] * len(tags) for tags in right]
    assert entity_scores(nothing, right) == dict.fromkeys(scores, 0.0)
    assert entity_scores(nothing, nothing) == dict.fromkeys(scores, 0.0)


def test_entity_scores_are_those_of_seqeval():
    metrics = pytest.importorskip("seqeval.metrics")
    draw = random.Random(0)
    tags = ["O", "O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in ("PER", "LOC"))]
    for names in (tags, [tag for tag in tags if tag[0] in "OBI"]):
        right = [[draw.choice(names) for _ in range(1 + i % 9)] for i in range(200)]
        said = [[t if draw.random() < 0.8 else draw.choice(names) for t in each] for each in right]
        found = entity_scores(said, right)
        for name in ("f1", "precision", "recall"):
            theirs = getattr(metrics, f"{name}_score")(right, said)
            assert found[name] == pytest.approx(theirs) and 0.2 < theirs < 0.9


def test_which_tags_mark_entities():
    assert mark_entities(["B-PER", "I-PER", "O"]) and mark_entities(["S-X"])
    for tags in (["O"], ["NOUN", "O"], ["B", "I", "O"], ["B-PER", "I-PER", "O", "-X-"]):
        assert not mark_entities(tags)


WRITTEN = ["the cat sat on the mats", "a dog runs far away today", "nothing"]

RIGHT = [
    ("a cat sat on a mat", "the cat sat on the mat"),
    ("a dog runs far away today",),
    ("something else", "nothing", "no word"),
]


def test_texts_with_several_references():
    """As the packages score them: sacreBLEU with streams of references, ROUGE's best reference."""
    sacrebleu = pytest.importorskip("sacrebleu")
    scorer = pytest.importorskip("rouge_score.rouge_scorer")
    found = text_scores(WRITTEN, RIGHT)
    streams = [
        [right[0] for right in RIGHT],
        [right[1] if len(right) > 1 else None for right in RIGHT],
        [None, None, RIGHT[2][2]],
    ]
    assert found["bleu"] == sacrebleu.BLEU().corpus_score(WRITTEN, streams).score
    assert found["chrf"] == sacrebleu.CHRF().corpus_score(WRITTEN, streams).score
    assert found["exact_match"] == pytest.approx(200 / 3)
    for stemmer in (False, True):
        rouge = scorer.RougeScorer(["rouge1", "rougeLsum"], use_stemmer=stemmer)
        scores = text_scores(WRITTEN, RIGHT, stemmer=stemmer)
        for name in ("rouge1", "rougeLsum"):
            best = [
                max(rouge.score(each, text)[name].fmeasure for each in right)
                for text, right in zip(WRITTEN, RIGHT, strict=True)
            ]
            assert scores[name] == pytest.approx(100 * sum(best) / 3)
    # "mats" and "mat" have one stem.
    assert scores["rouge1"] == pytest.approx(100) and found["rouge1"] < 99
    first = text_scores(WRITTEN, [right[:1] for right in RIGHT])
    assert first["bleu"] < found["bleu"] and first["exact_match"] == pytest.approx(100 / 3)
